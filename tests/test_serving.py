"""Completions on the wire, and what the engine keeps of them until they end."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="tests of the server's side")

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from server import whole


class Engine(SimpleNamespace):
    """As much of vLLM's engine as keeps tokens."""

    def __init__(self):
        super().__init__(scheduler=SimpleNamespace(requests={}), sent=[], _weight_version="0")
        self.output_queue: Any = SimpleNamespace(put_nowait=self.sent.append)

    def add(self, name, **params):
        defaults: dict[str, Any] = {
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "detokenize": False,
            "logprobs": 0,
        }
        sampling = SamplingParams(**(defaults | params))
        self.scheduler.requests[name] = SimpleNamespace(sampling_params=sampling, is_new=True)
        return self

    def step(self, *outputs, stats=None, **said):
        """One step of (name, tokens, end); a log-prob is minus a tenth of its token, a rank the token and one."""
        message = EngineCoreOutputs(scheduler_stats=stats)
        for name, tokens, end in outputs:
            ids = np.array(tokens)[:, None]
            logprobs = LogprobsLists(ids, (-0.1 * ids).astype(np.float32), ids[:, 0] + 1)
            output: Any = EngineCoreOutput(name, list(tokens), finish_reason=end, **said)
            output.new_logprobs = logprobs if tokens else None
            if self.scheduler.requests[name].is_new:
                output.prefill_stats = f"of {name}"
                self.scheduler.requests[name].is_new = False
            message.outputs.append(output)
            if end:
                del self.scheduler.requests[name]
        step = {0: message}
        whole.attach_and_keep(self, step)
        self.sent += step.items()

    def received(self, name):
        """Its tokens, the versions and log-probs they came with, and the number of messages of it."""
        found = []
        num_messages = 0
        for _, message in self.sent:
            for output in message.outputs:
                if output.request_id != name:
                    continue
                num_messages += 1
                lists = output.new_logprobs
                for place, token in enumerate(output.new_token_ids):
                    assert lists.logprob_token_ids[place].tolist() == [token]
                    assert lists.sampled_token_ranks[place] == token + 1
                    found.append((token, message.weight_version, lists.logprobs[place].item()))
        return found, num_messages


def expected(tokens, version="0"):
    return [(token, version, pytest.approx(-0.1 * token)) for token in tokens]


def test_tokens_wait_for_the_end():
    """They come with the last, and with what vLLM says of the prompt at the first; no step before is a message."""
    engine = Engine().add("a")
    for token in (1, 2, 3):
        engine.step(("a", [token], None))
    assert not engine.sent
    stats: Any = SimpleNamespace()
    engine.step(("a", [4], None), stats=stats)
    assert [message.scheduler_stats for _, message in engine.sent] == [stats]
    engine.step(("a", [5], FinishReason.STOP))
    assert engine.received("a") == (expected([1, 2, 3, 4, 5]), 1)
    assert engine.sent[-1][1].outputs[0].prefill_stats == "of a"
    assert not engine.kept[1]


def test_tokens_that_stop_strings_are_looked_for_in():
    engine = Engine().add("a", detokenize=True).add("whole")
    for token in (1, 2, 3):
        engine.step(("a", [token], None), ("whole", [token], None))
    assert engine.received("a") == (expected([1, 2, 3]), 3)
    assert engine.received("whole") == ([], 0)


def test_an_update_sends_what_the_old_weights_sampled():
    engine = Engine().add("a").add("b")
    for token in (1, 2, 3):
        engine.step(("a", [token], None), ("b", [token + 10], None))
    engine._weight_version = "2"
    engine.step(("a", [4, 5], None), ("b", [14], None))  # a step may have two tokens
    engine.step(("a", [6], FinishReason.STOP), ("b", [], FinishReason.LENGTH))  # or none
    assert engine.received("a")[0] == expected([1, 2, 3]) + expected([4, 5, 6], "2")
    assert engine.received("b")[0] == expected([11, 12, 13]) + expected([14], "2")


def test_what_was_aborted_is_forgotten_at_the_next_update():
    engine = Engine().add("a").add("b")
    engine.step(("a", [1], None), ("b", [1], None))
    del engine.scheduler.requests["a"]  # as an abort does, without an output
    engine.step(("b", [2], None))
    engine.step(("b", [3], FinishReason.STOP))
    engine._weight_version = "1"
    engine.step()
    assert not engine.kept[1]
    assert engine.received("b") == (expected([1, 2, 3]), 1)


@pytest.mark.parametrize("said", [{"events": ["QUEUED"]}, {"new_prompt_logprobs_tensors": "x"}])
def test_what_is_no_token_goes_at_once(said):
    """With the tokens before it, in their order."""
    engine = Engine().add("a")
    engine.step(("a", [1], None), **said)
    assert engine.received("a") == (expected([1]), 1)
    engine.step(("a", [2], None))
    engine.step(("a", [3], None), **said)
    engine.step(("a", [4], FinishReason.STOP))
    assert engine.received("a") == (expected([1, 2, 3, 4]), 3)
