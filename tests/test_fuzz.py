"""Whatever comes in by the command line, a data set or a server's reply: what is wrong with it is said by us."""

import copy
import dataclasses
import math
from array import array
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from build_tiny_vlm import build_processor
from helpers import ROOT, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_config import make as make_config

from config import TrainConfig, UserError, parse_args
from rollouts.data import leave_out_long, load_sets
from rollouts.group import Completion
from server.messages import Sampled
from vllm_client import ServerError, completion_of

settings.register_profile("short", max_examples=150, deadline=None, derandomize=True)
settings.load_profile("short")

TINY = str(ROOT / "recipes" / "tiny.py")
FLAGS = [f"--{field.name}" for field in dataclasses.fields(TrainConfig)]
SHORT = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | SHORT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=5,
)
VALUES = st.text(max_size=12) | st.sampled_from(
    ["0", "-1", "nan", "1e999", "true", "none", "{}", "[", "[1]", "a.b", ""]
)
WORDS = st.tuples(st.sampled_from(FLAGS) | st.text(max_size=8), VALUES)


@given(st.lists(WORDS, min_size=1, max_size=3))
def test_command_lines(pairs):
    words = [word for pair in pairs for word in pair]
    with suppress(UserError, SystemExit):  # SystemExit: --help
        assert isinstance(parse_args([TINY, *words]), TrainConfig)


KEYS = st.sampled_from(["type", "text", "image", "image_url", "url", "x"])
PARTS = st.lists(st.dictionaries(KEYS, JSON, max_size=3) | JSON, max_size=2)
FIELDS = st.sampled_from(["role", "content", "name"])
MESSAGES = st.dictionaries(FIELDS, SHORT | PARTS | JSON, max_size=3)
PROMPTS = {"prompt": JSON | st.lists(MESSAGES, max_size=3)}
ROWS = st.fixed_dictionaries({}, optional=PROMPTS | {"image": JSON, "images": JSON, "answer": JSON})


@pytest.mark.parametrize("processor", [make_tokenizer(), build_processor()], ids=["text", "vision"])
@given(rows=st.lists(ROWS | JSON, max_size=3))
def test_rows(processor, rows):
    config = make_config(max_completion_len=4, dataset_id=lambda: rows)
    with suppress(UserError):
        prompts = load_sets("dataset_id", "train", processor, config)[""]
        prompts = leave_out_long(prompts, 50, config)
        assert all(0 < len(prompt.token_ids) <= 50 for prompt in prompts)


MESSAGE: dict[str, Any] = {
    "finish_reason": "stop", "token_ids": array("i", [5, 6]).tobytes(),
    "logprobs": array("f", [-1.0, 0.0]).tobytes(), "weight_versions": [["3", 0, 2]],
    "prompt_token_ids": b"", "prompt_logprobs": b"",
}  # fmt: skip
PATHS = [*([name] for name in MESSAGE), ["weight_versions", 0]]
PATHS += [["weight_versions", 0, place] for place in range(3)]


def parse(message, cut=0):
    """The completion of a reply, cut off at its end."""
    data = msgspec.msgpack.encode([message])
    (sampled,) = msgspec.msgpack.decode(data[: len(data) - cut], type=list[Sampled])
    return completion_of(sampled)


@given(path=st.sampled_from(PATHS), value=JSON | st.binary(max_size=12), cut=st.integers(0, 60))
def test_replies(path, value, cut):
    """A reply with one value replaced, or cut off, is an error that `generate` expects, or two valid tokens."""
    message = copy.deepcopy(MESSAGE)
    *way, last = path
    place: Any = message
    for step in way:
        place = place[step]
    place[last] = value
    try:
        completion = parse(message, max(cut - 30, 0))
    except (msgspec.MsgspecError, ValueError, ServerError, OverflowError):
        return  # as `post` and `generate` expect; msgpack has no numbers that overflow
    assert isinstance(completion, Completion)
    assert len(completion.token_ids) == len(completion.sampler_logprobs)
    assert len(completion.weight_versions) == len(completion.token_ids)


@pytest.mark.parametrize("logprobs", [[-1.0, math.nan], [-math.inf, -1.0], [], [-1.0] * 3])
def test_a_token_without_a_logprob_is_refused(logprobs):
    with pytest.raises(ValueError, match="log-?probs"):
        parse(MESSAGE | {"logprobs": array("f", logprobs).tobytes()})
