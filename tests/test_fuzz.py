"""Whatever comes in by the command line, a data set or a server's reply: what is wrong with it is said by us."""

import dataclasses
import json
import types
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from build_tiny_vlm import build_processor
from helpers import ROOT, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from config import TrainConfig, UserError, parse_args
from recipes.first_to_finish import first_to_finish
from rollouts.data import leave_out_long, load_prompts
from rollouts.group import Completion
from vllm_client import ServerError, all_choices

settings.register_profile("short", max_examples=150, deadline=None, derandomize=True)
settings.load_profile("short")

TINY = str(ROOT / "recipes" / "tiny.py")
FLAGS = [f"--{field.name}" for field in dataclasses.fields(TrainConfig)]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
VALUES = st.text(max_size=12) | st.sampled_from(
    ["0", "-1", "nan", "1e999", "true", "none", "{}", "[", "[1]", "a.b", ""]
)


@given(
    st.lists(
        st.tuples(st.sampled_from(FLAGS) | st.text(max_size=8), VALUES), min_size=1, max_size=3
    )
)
def test_command_lines(pairs):
    with suppress(UserError, SystemExit):  # SystemExit: --help
        assert isinstance(
            parse_args([TINY, *(word for pair in pairs for word in pair)]), TrainConfig
        )


PARTS = st.dictionaries(
    st.sampled_from(["type", "text", "image", "image_url", "url", "x"]), JSON, max_size=3
)
MESSAGES = st.dictionaries(
    st.sampled_from(["role", "content", "name"]),
    st.text(max_size=5) | st.lists(PARTS | JSON, max_size=2) | JSON,
    max_size=3,
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": JSON | st.lists(MESSAGES, max_size=3),
        "image": JSON,
        "images": JSON,
        "answer": JSON,
    },
)


@pytest.mark.parametrize("processor", [make_tokenizer(), build_processor()], ids=["text", "vision"])
@given(rows=st.lists(ROWS | JSON, max_size=3))
def test_rows(processor, rows):
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=["os.path.exists"], max_completion_len=4
    )
    with suppress(UserError):
        prompts = leave_out_long(load_prompts(lambda: rows, "train", processor, config), 50, config)
        assert all(0 < len(prompt.token_ids) <= 50 for prompt in prompts)


CHOICE = {
    "index": 0, "token_ids": [5, 6], "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -1.0}, {"logprob": 0}]},
    "weight_versions": [{"version": "3", "start": 0, "end": 2}],
}  # fmt: skip
PATHS = [
    ["choices"], ["choices", 0], *(["choices", 0, name] for name in CHOICE), ["choices", 0, "token_ids", 1],
    ["choices", 0, "logprobs", "content"], ["choices", 0, "logprobs", "content", 0],
    ["choices", 0, "logprobs", "content", 0, "logprob"], ["choices", 0, "weight_versions", 0],
    *(["choices", 0, "weight_versions", 0, name] for name in ("version", "start", "end")),
]  # fmt: skip


@pytest.mark.parametrize("parse", [all_choices, first_to_finish])
@given(path=st.sampled_from(PATHS), value=JSON, cut=st.integers(0, 60))
def test_replies(parse, path, value, cut):
    """A reply with one value replaced, or cut off, is an error that `request` retries, or two valid tokens."""
    reply = json.loads(json.dumps({"choices": [CHOICE]}))
    *way, last = path
    place = reply
    for step in way:
        place = place[step]
    place[last] = value
    text = json.dumps(reply)
    text = text[: len(text) - max(cut - 30, 0)]
    lines = [b"data: " + text.encode(), b"data: [DONE]"]
    answer: Any = types.SimpleNamespace(content=text.encode(), iter_lines=lambda: lines)
    try:
        completions, _ = parse(1, answer)
    except (msgspec.MsgspecError, ValueError, ServerError):  # what `request` expects
        return
    (completion,) = completions
    assert isinstance(completion, Completion)
    assert len(completion.token_ids) == len(completion.sampler_logprobs)
    assert len(completion.weight_versions) == len(completion.token_ids)


@pytest.mark.parametrize("logprob", [-9999.0, float("nan"), float("-inf"), None])
def test_a_token_without_a_logprob_is_refused(logprob):
    """vLLM's API says -9999 where its model computed NaN."""
    spans = [{"version": "0", "start": 0, "end": 1}]

    reply: Any = lambda content: types.SimpleNamespace(content=content)

    def parse(value):
        content = [{"logprob": value}]
        choice = {
            "token_ids": [5],
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "weight_versions": spans,
        }
        (completion,), _ = all_choices(1, reply(json.dumps({"choices": [choice]}).encode()))
        return completion

    assert parse(-1.0).sampler_logprobs.tolist() == [-1.0]
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        parse(logprob)
