"""Whole completions from vLLM's engine to its API process.

The engine sends a message of every token, and reading them costs the API process three times what
the rest of its work does. As our route waits for whole completions, the engine keeps them until
theirs ends. For this vllm_server.py puts two functions in the place of the engine's own.
"""

from itertools import chain, islice
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

MOST_KEPT = 256  # tokens of a completion: an update sends all that are kept, while sampling pauses

_attach_weight_version = EngineCore._attach_weight_version
_set_weight_version = EngineCore.set_weight_version


def attach_and_keep(core: Any, messages: dict[int, EngineCoreOutputs]) -> None:
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
            # Sent at once: the last tokens, log-probs of the prompt, events, of which /metrics
            # tells the time; and texts, in which strings that stop them are looked for.
            has_prompt = output.new_prompt_logprobs_tensors is not None
            cannot_wait = output.finished or has_prompt or output.events
            is_read = name not in requests or requests[name].sampling_params.detokenize
            if cannot_wait or is_read or len(outputs) == MOST_KEPT:
                sent.append(joined(kept.pop(name)))
        message.outputs = sent
        if not sent and not message.scheduler_stats and not message.finished_requests:
            del messages[client]
    if len(kept) > len(requests):  # some were aborted, of which no output tells
        for name in kept.keys() - requests.keys():
            del kept[name]


def send_and_set(core: Any, weight_version: str) -> None:
    """Send all tokens that are kept, under the version that sampled them; set the next.

    Those of requests that were aborted are not read.
    """
    kept = core.__dict__.pop("kept", {})
    outputs = [joined(found) for found in kept.values()]
    if outputs:
        message = EngineCoreOutputs(outputs=outputs, weight_version=core._weight_version)
        core.output_queue.put_nowait((0, message))  # there is one API process
    _set_weight_version(core, weight_version)


def joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The last output of a completion, with the tokens of all."""
    last = outputs[-1]
    last.prefill_stats = outputs[0].prefill_stats
    last.new_token_ids = [*chain.from_iterable(output.new_token_ids for output in outputs)]
    # None of an output without tokens, as the end of one that was aborted.
    parts = [output.new_logprobs for output in outputs if output.new_logprobs]
    if parts:
        columns: Any = zip(*parts, strict=True)
        ids, logprobs, ranks = [np.concatenate(column) for column in islice(columns, 3)]
        last.new_logprobs = LogprobsLists(ids, logprobs, ranks)
    return last
