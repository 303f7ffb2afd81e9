"""Whole completions from vLLM's engine to its API process.

The engine sends a message of every token, and reading them costs the API process three times what
the rest of its work does. As our route waits for whole completions, the engine keeps them until
theirs ends. For this vllm_server.py puts a function in the place of the engine's own.
"""

from itertools import chain, islice
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

MOST_KEPT = 256  # tokens of a completion: a new version sends all that are kept at once

_attach_weight_version = EngineCore._attach_weight_version


def attach_and_keep(core: Any, messages: dict[int, EngineCoreOutputs]) -> None:
    """Mark a step's messages with the weights' version; keep the tokens that can wait."""
    _attach_weight_version(core, messages)
    version = core._weight_version
    before, kept = core.__dict__.get("kept", (version, {}))
    if version != before:  # those that are kept go first, under the version that sampled them
        sent = [joined(outputs) for outputs in kept.values()]
        if sent:
            message = EngineCoreOutputs(outputs=sent, weight_version=before)
            core.output_queue.put_nowait((0, message))  # there is one API process
        kept = {}
    core.kept = (version, kept)

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


def joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """The last output of a completion, with the tokens of all."""
    last = outputs[-1]
    last.prefill_stats = outputs[0].prefill_stats
    last.new_token_ids = [*chain.from_iterable(output.new_token_ids for output in outputs)]
    # None of an output without tokens, as the end of one that was aborted.
    parts = [output.new_logprobs for output in outputs if output.new_logprobs]
    if parts:
        columns: Any = islice(zip(*parts, strict=True), 3)  # ids, log-probs, ranks
        arrays: Any = map(np.concatenate, columns)
        last.new_logprobs = LogprobsLists(*arrays)
    return last
