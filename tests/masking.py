"""The real vLLM with sampling masks on a CPU.

`--return-sampling-mask` needs its second model runner, and that a GPU. Here the first runner's sampler tells its sets:
what has a finite log-prob after top-k, top-p and min-p. All behind it is vLLM's own: the scheduler that cuts masks by
request, the engine's messages, the outputs.
"""

from typing import Any

import forked
import numpy as np
from forked import Forked


def tell_sets():
    """Let vLLM's first runner return masks, in this process and those that it forks."""
    from vllm.config import VllmConfig
    from vllm.v1.outputs import SamplingMaskLists
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sampler: Any = Sampler
    runner: Any = GPUModelRunner
    sample, sample_tokens = sampler.sample, runner.sample_tokens
    sets: list[Any] = []  # of the last step, a request each

    def sample_and_keep(self, *args, **kwargs):
        token_ids, logprobs = sample(self, *args, **kwargs)
        sets[:] = [row.isfinite().nonzero()[:, 0].int().numpy() for row in logprobs]
        return token_ids, logprobs

    def sample_and_tell(self, *args, **kwargs):
        output = sample_tokens(self, *args, **kwargs)
        if sets and output is not None:
            offsets = np.cumsum([0, *map(len, sets)])
            output.sampling_masks = SamplingMaskLists(np.concatenate(sets), offsets)
            sets.clear()
        return output

    sampler.sample, runner.sample_tokens = sample_and_keep, sample_and_tell
    config: Any = VllmConfig
    config._verify_sampling_replay_config = lambda self: None  # which asks for the second runner


def serve_masks(argv, log, environment):
    """As `forked.serve`."""
    tell_sets()
    forked.serve([*argv, "--return-sampling-mask"], log, environment)


class Masking(Forked):
    """A server that returns sampling masks."""

    serve = staticmethod(serve_masks)
