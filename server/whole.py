"""Whole completions from vLLM's engine to its API process.

The engine sends a message of every token, and reading them costs the API process three times what
the rest of its work does. Where nobody waits for single tokens, the engine keeps them until the
completion ends.
"""

from itertools import chain, islice
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

MOST_KEPT = 256  # tokens of a completion: an update sends all that are kept, while sampling pauses

_attach_weight_version = EngineCore._attach_weight_version
_set_weight_version = EngineCore.set_weight_version


def keep_tokens() -> None:
    """Change two methods of vLLM's engine in this process.

    One marks a step's messages with the version of the weights, the other sets the next version.
    """
    core: Any = EngineCore
    core._attach_weight_version = _attach_and_keep
    core.set_weight_version = _send_and_set


def _attach_and_keep(core: Any, messages: dict[int, EngineCoreOutputs]) -> None:
    """Mark a step's messages with the weights' version; keep the tokens that can wait."""
    _attach_weight_version(core, messages)
    kept: dict[str, list[EngineCoreOutput]] = core.__dict__.setdefault("kept", {})
    requests = core.scheduler.requests  # without those that have ended
    for client, message in list(messages.items()):
        sent = []
        for output in message.outputs:
            name = output.request_id
            outputs = kept.setdefault(name, [])
            outputs.append(output)
            can_wait = name in requests and _can_wait(requests[name].sampling_params, output)
            if not can_wait or len(outputs) == MOST_KEPT:
                sent.append(joined(kept.pop(name)))
        message.outputs = sent
        if not sent and not message.scheduler_stats and not message.finished_requests:
            del messages[client]
    if len(kept) > len(requests):  # some were aborted, of which no output tells
        for name in kept.keys() - requests.keys():
            del kept[name]


def _can_wait(params: Any, output: EngineCoreOutput) -> bool:
    """True for tokens alone, where only the whole completion is asked for, without its text.

    Others are the last, log-probs of the prompt, and events, of which /metrics tells the time.
    """
    is_whole = params.output_kind == RequestOutputKind.FINAL_ONLY and not params.detokenize
    has_prompt = output.new_prompt_logprobs_tensors is not None
    has_more = output.finished or has_prompt or output.events
    return is_whole and params.logprobs == 0 and not has_more


def _send_and_set(core: Any, weight_version: str) -> None:
    """Send all tokens that are kept, under the version that sampled them; set the next."""
    kept = core.__dict__.pop("kept", {})
    outputs = [joined(found) for found in kept.values()]
    if outputs:
        message = EngineCoreOutputs(outputs=outputs, weight_version=core._weight_version)
        core.output_queue.put_nowait((0, message))  # there is one API process
    _set_weight_version(core, weight_version)


def joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The last output of a completion, with the tokens of all."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last.prefill_stats = outputs[0].prefill_stats
    last.new_token_ids = [*chain.from_iterable(output.new_token_ids for output in outputs)]
    # None of an output without tokens, as the end of one that was aborted.
    parts = [output.new_logprobs for output in outputs if output.new_logprobs]
    if parts:
        columns: Any = zip(*parts, strict=True)
        ids, logprobs, ranks = [np.concatenate(column) for column in islice(columns, 3)]
        last.new_logprobs = LogprobsLists(ids, logprobs, ranks)
    return last
