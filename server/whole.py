"""Whole completions from vLLM's engine to its API process.

The engine sends a message of every token, and reading them costs the API process three times what
the rest of its work does. Where nobody waits for single tokens, the engine keeps them until the
completion ends.
"""

from array import array
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

MOST_KEPT = 256  # tokens of a completion: an update sends all that are kept, while sampling pauses

_attach_weight_version = EngineCore._attach_weight_version
_set_weight_version = EngineCore.set_weight_version


class Kept:
    """The tokens that the engine has of a completion, and has not sent."""

    def __init__(self, client: int):
        self.client = client  # the number of the API process
        self.clear()

    def clear(self) -> None:
        """Keep none."""
        self.prefill_stats: Any = None
        self.token_ids: list[int] = []
        self.logprobs = array("f")
        self.ranks = array("q")
        self.mask_ids: list[Any] = []
        self.mask_sizes: list[int] = []

    def add(self, output: EngineCoreOutput) -> None:
        """Take the tokens of an output, and what the first says of the prompt."""
        self.prefill_stats = self.prefill_stats or output.prefill_stats
        self.token_ids += output.new_token_ids
        if output.new_logprobs:
            self.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
            self.ranks.extend(output.new_logprobs.sampled_token_ranks.tolist())
        mask = output.new_sampling_mask
        if mask is not None:  # with `--return-sampling-mask`
            self.mask_ids.append(mask.token_ids)
            if mask.offsets is None:  # of one token
                self.mask_sizes.append(len(mask.token_ids))
            else:
                self.mask_sizes += np.diff(mask.offsets).tolist()

    def put_into(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Give an output all tokens; none are kept from then on."""
        ids = np.array(self.token_ids, dtype=np.int64)[:, None]
        logprobs = np.array(self.logprobs, dtype=np.float32)[:, None]
        ranks = np.array(self.ranks, dtype=np.int64)
        output.prefill_stats = self.prefill_stats
        output.new_token_ids = self.token_ids
        output.new_logprobs = LogprobsLists(ids, logprobs, ranks) if self.token_ids else None
        if self.mask_sizes:
            offsets = np.cumsum([0, *self.mask_sizes])
            output.new_sampling_mask = SamplingMaskLists(np.concatenate(self.mask_ids), offsets)
        self.clear()
        return output


def _attach_and_keep(core: Any, messages: dict[int, EngineCoreOutputs]) -> None:
    """Mark a step's messages with the weights' version; keep the tokens that can wait."""
    _attach_weight_version(core, messages)
    kept: dict[str, Kept] = core.__dict__.setdefault("kept", {})
    requests = core.scheduler.requests
    for client, message in list(messages.items()):
        sent = []
        for output in message.outputs:
            name = output.request_id
            if name in requests and name not in kept and _can_wait(requests[name]):
                kept[name] = Kept(client)
            if name not in kept:  # as one that ended with its first token
                sent.append(output)
                continue
            kept[name].add(output)
            if _must_go(output) or len(kept[name].token_ids) >= MOST_KEPT:
                sent.append(kept[name].put_into(output))
            if output.finished:
                del kept[name]
        message.outputs = sent
        if not sent and not message.scheduler_stats and not message.finished_requests:
            del messages[client]
    if len(kept) > len(requests):  # some were aborted, of which no output tells
        for name in kept.keys() - requests.keys():
            del kept[name]


def _can_wait(request: Any) -> bool:
    """True where only the whole completion is asked for, without its text."""
    params = request.sampling_params
    is_whole = params.output_kind == RequestOutputKind.FINAL_ONLY
    return is_whole and not params.detokenize and params.logprobs == 0


def _must_go(output: EngineCoreOutput) -> bool:
    """True for an output that cannot wait: the last, or one with more than tokens.

    Such are log-probs of the prompt, and events, of which /metrics tells the time.
    """
    has_prompt = output.new_prompt_logprobs_tensors is not None
    return output.finished or has_prompt or bool(output.events)


def _send_and_set(core: Any, weight_version: str) -> None:
    """Send all tokens that are kept, under the version that sampled them; set the next."""
    of_clients: dict[int, list[EngineCoreOutput]] = {}
    for name, tokens in core.__dict__.get("kept", {}).items():
        if tokens.token_ids:
            output = tokens.put_into(EngineCoreOutput(name, []))
            of_clients.setdefault(tokens.client, []).append(output)
    for client, outputs in of_clients.items():
        message = EngineCoreOutputs(outputs=outputs, weight_version=core._weight_version)
        core.output_queue.put_nowait((client, message))
    _set_weight_version(core, weight_version)


def keep_tokens() -> None:
    """Change two methods of vLLM's engine in this process.

    One marks a step's messages with the version of the weights, the other sets the next version.
    """
    core: Any = EngineCore
    core._attach_weight_version = _attach_and_keep
    core.set_weight_version = _send_and_set
