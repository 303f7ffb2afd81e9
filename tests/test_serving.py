"""Completions on the wire, and what the engine keeps of them until they end."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="tests of the server's side")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from server import whole


class Engine(SimpleNamespace):
    """As much of vLLM's engine as keeps tokens."""

    def __init__(self):
        super().__init__(scheduler=SimpleNamespace(requests={}), sent=[], _weight_version="0")
        keep = lambda sent: self.sent.append(sent[1])
        self.output_queue = SimpleNamespace(put_nowait=keep)

    def add(self, name):
        params = SamplingParams(detokenize=False)
        self.scheduler.requests[name] = SimpleNamespace(sampling_params=params)
        return self

    def step(self, *outputs):
        """One step of (name, tokens, end); a log-prob is minus a tenth of its token."""
        message = EngineCoreOutputs()
        for name, tokens, end in outputs:
            output = EngineCoreOutput(name, list(tokens), finish_reason=end)
            if tokens:
                ids = np.array(tokens)[:, None]
                output.new_logprobs = LogprobsLists(ids, -0.1 * ids, ids[:, 0])
            message.outputs.append(output)
            if end:
                del self.scheduler.requests[name]
        step = {0: message}
        whole.attach_and_keep(self, step)
        self.sent += step.values()

    def received(self, name):
        """The messages of a completion: a version, tokens, and their log-probs."""
        return [
            (message.weight_version, output.new_token_ids, output.new_logprobs.logprobs[:, 0])
            for message in self.sent
            for output in message.outputs
            if output.request_id == name
        ]


def expected(version, *tokens):
    return version, [*tokens], pytest.approx(-0.1 * np.array(tokens))


def test_tokens_wait_for_the_end_or_an_update():
    """They come with the last; an update sends what the old weights sampled, and no step before is a message."""
    engine = Engine().add("a").add("b")
    for token in (1, 2, 3):
        engine.step(("a", [token], None), ("b", [token + 10], None))
    assert not engine.sent
    engine._weight_version = "2"
    engine.step(("a", [4, 5], None), ("b", [14], None))  # a step may have two tokens
    engine.step(("a", [6], FinishReason.STOP), ("b", [], FinishReason.LENGTH))  # or none
    assert engine.received("a") == [expected("0", 1, 2, 3), expected("2", 4, 5, 6)]
    assert engine.received("b") == [expected("0", 11, 12, 13), expected("2", 14)]
    assert not engine.kept[1]


def test_what_was_aborted_is_forgotten_at_the_next_update():
    engine = Engine().add("a").add("b")
    engine.step(("a", [1], None), ("b", [1], None))
    del engine.scheduler.requests["a"]  # as an abort does, without an output
    engine.step(("b", [2], None))
    engine.step(("b", [3], FinishReason.STOP))
    engine._weight_version = "1"
    engine.step()
    assert not engine.kept[1]
    assert engine.received("b") == [expected("0", 1, 2, 3)]
