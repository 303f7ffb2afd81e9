"""Proofs that servers compute what the trainer computes.

Each takes the run's `Rollouts`, and compares servers with the policy that it published last.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from config import bending
from prefix_attention import evaluating
from rollouts.group import Completion, Group
from training.batching import micro_batches
from training.model import token_logprobs
from utils import call_on_main
from vllm_client import CONTROL_TIMEOUT_S, Server, ServerError, State

MISMATCH = (
    "its log-probs differ from the trainer's by {:.3g} nats a token: vLLM computes this model"
    " otherwise, takes no new weights for a part of it (as gpt-oss's experts), or has another base"
    " under the adapter (--enable-lora); compare its --model, --dtype and, for images,"
    " --mm-processor-kwargs, or raise max_logprob_mismatch"
)


def check_gaps(rollouts: Any, gaps: dict[int, float]) -> None:
    """Leave out servers whose tokens have other log-probs here. On rank 0.

    Args:
        rollouts: of the run.
        gaps: mean |trainer - server|, nats a token, by the server's number; servers with too few
            tokens of this version have none.
    """
    config = rollouts.config
    # With these, log-probs differ although the weights are the same.
    if config.rollout_fn or config.lora_dropout or bending(config):
        return
    for server in rollouts.pool.serving:
        gap = gaps.get(server.number, 0.0)
        if gap > config.max_logprob_mismatch:
            rollouts.pool.lose(server, MISMATCH.format(gap))


def prove(rollouts: Any, servers: list[Server]) -> None:
    """Compare each server's log-probs of a probe with the policy's. Collective.

    One that waits serves if they agree, and one that serves is left out if they do not.

    Args:
        rollouts: of the run.
        servers: on rank 0; none on the others.
    """
    config = rollouts.config
    with ThreadPoolExecutor(64) as threads:
        probes = call_on_main(lambda: list(threads.map(partial(_probe, rollouts), servers)))

    gaps = []
    # LoRA's dropout would differ from the server, and move the random state of the step.
    with evaluating(rollouts.policy), torch.no_grad():
        for completions in probes:  # every rank takes part in every forward
            gap = 0.0
            if completions:
                group = Group(rollouts.probe_prompt, completions, advantages=[0.0, 0.0])
                [micro_batch] = micro_batches([group], None, config)
                micro_batch = micro_batch.to(rollouts.device)
                logprobs = token_logprobs(
                    rollouts.policy, micro_batch.packed, micro_batch.images, config
                )
                gap = (logprobs - micro_batch.sampler_logprobs).abs().mean().item()
            gaps.append(gap)

    for server, gap in zip(servers, gaps, strict=False):  # on rank 0
        if not gap <= config.max_logprob_mismatch:  # also a NaN
            rollouts.pool.lose(server, MISMATCH.format(gap))
        elif server.state is State.WAITING and server.version == rollouts.version:
            rollouts.pool.admit(server)  # one that was lost meanwhile may be back without weights


def _probe(rollouts: Any, server: Server) -> list[Completion]:
    """Two short completions under the weights that were sent; none if it gives no such.

    Then it is left out, but for one that serves: it may be busy, and if it is lost, those who ask
    it for groups notice.
    """
    prompt = rollouts.probe_prompt
    sampling = {
        "n": 2,
        "max_tokens": min(16, rollouts.config.max_completion_len),
        "temperature": rollouts.config.temperature,
    }
    try:
        completions = server.generate(
            prompt.token_ids, sampling, prompt.images, timeout_s=CONTROL_TIMEOUT_S, priority=-1
        )
    except ServerError as error:
        if server.state is not State.SERVING:
            rollouts.pool.lose(server, error)
        return []
    versions = torch.cat([completion.weight_versions for completion in completions])
    if not versions.eq(rollouts.version).all():
        rollouts.pool.lose(server, "answers with other weights than it was sent")
        return []
    return completions
