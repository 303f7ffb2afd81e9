"""Verifiers on what models write, hostile answers included: nothing in them is run, and each gets its number."""

from contextlib import closing
from functools import partial
from typing import Any

import pytest

from recipes.rewards import (
    Cosine,
    best_of,
    boxed_exact,
    countdown,
    exact_match,
    format_reward,
    length_penalty,
    math_answer,
)
from rollouts.workers import CallPool

BOMBS = [
    r"\boxed{10^{10^{10^{10}}}}",
    r"\boxed{9**9**9**9}",
    r"\boxed{" + "(" * 3000 + "4" + ")" * 3000 + "}",
    r"\boxed{" + "9" * 100_000 + "}",
    r"\boxed{100000000!}",
    r"\boxed{" + r"\frac{1}{" * 500 + "4" + "}" * 500 + "}",
    r"\boxed{\sum_{i=1}^{10^{12}} i^{10^{9}}}",
]


def called(function, timeout_s, **arguments):
    """What a worker returns, as a run calls it."""
    with closing(CallPool(1)) as pool:
        return pool.call(function, arguments, timeout_s)


def test_what_takes_sympy_for_ever_is_wrong_and_the_rest_of_its_group_is_not(tmp_path):
    """The last of them would touch a file if it were code."""
    code = rf"\boxed{{__import__('pathlib').Path('{tmp_path}/run').touch()}}"
    hostile = [(text, "4") for text in (*BOMBS, code)] + [(BOMBS[0], "x+4"), (BOMBS[-1], "x+4")]
    fine = [(r"so \boxed{4}", "4"), (r"\boxed{x+4}", "x+4"), (r"\boxed{5}", "4")]
    texts, answers = zip(*hostile, *fine, strict=True)
    arguments = {"prompts": answers, "completions": texts, "answer": answers}
    assert called(math_answer, 40, **arguments) == [0.0] * len(hostile) + [1.0, 1.0, 0.0]
    assert not (tmp_path / "run").exists()


RIGHT = [
    "(50 - 2) / 4 + 8", "-(2 - 50) / 4 + 8", "8\t+\n+(50 - 2) / 4",
    "<think>2 + 2</think>\n<answer> (50 - 2) / 4 + 8 </answer>",
    "<answer>1 + 1</answer> no: <answer>8+(50-2)/4 = 20</answer>",
    "<answer>8 + (50 - 2) / 4</answer></answer>",
]  # fmt: skip
WRONG = [
    "8 + 4 * (50 - 2) / 16",  # 20, with a number that is not given
    "(50 - 2) / 4 + 8 + 8 - 8",  # 8 more than once
    "8 + 4 * 2 + 4",  # 20, with 4 twice
    "2 * 8 + 4",  # 20, without the 50
    "50 - 2 * 8 - 4",  # 30
    "(50 - 2) / 4 + 8 = 21",
    # Nothing, other operators, numbers too long, nested too deeply, by zero, and what is no number.
    "20", "", "<answer></answer>", "(50 - 2) // 4 + 8", "50 ** 2 ** 4 ** 8", "9" * 250, "9" * 10**6,
    "(" * 140 + "4" + ")" * 140, "-" * 290 + "4", "50 / (2 - 2) + 4 + 8", "50 - 2 / 4 + 8.0",
    "(50, 2, 4, 8)", "__import__('os').getpid()", "5_0 - 2 / 4 + 8", "(50 - 2) / 4 + 08",
    "(50 - 2) / ٤ + 8", "50 2 4 8", "(50 - 2) / 4 + 8\0",
]  # fmt: skip


def test_countdown():
    """In fractions: 6 / (1 - 3/4) is 24; in floats 1/3 * 3 and the like need not be whole."""
    for text in [*RIGHT, *WRONG]:
        value = float(text in RIGHT)
        assert countdown([text], nums=[[2, 4, 8, 50]], target=[20]) == [value], text[:80]
    nums: list[list[Any]] = [[1, 3, 4, 6], [5, 5, 1, 5], [5, 5, 5, 5], [1, 2, 3]]
    texts = ["6/(1-3/4)", "(5-1/5)*5", "(5-1/5)*5", "1/2+3"]
    assert countdown(texts, nums=nums, target=[24, 24, 24, 3]) == [1.0, 1.0, 0.0, 0.0]
    as_in_jsonl: Any = {"nums": [["1", "2"], [1, 2.0]], "target": ["3", 0.5]}
    assert countdown(["1+2=3", "1/2"], **as_in_jsonl) == [1.0, 1.0]


SAME = [
    (r"\dfrac12", "1/2"), (r"\frac{1}{2}", "0.5"), (r"\sqrt3", r"\sqrt{3}"), ("x = 5", "5"),
    ("1,000", "1000"), (r"50\%", "50"), (r"90^\circ", "90"), (".5", r"\tfrac{1}{2}"), ("{5}", "5"),
    (r"\left( 1, 2 \right)", "(1,2)"), (r"5 \text{ cm}", "5"), (r"\$12", "12"), ("x+1.", "x + 1"),
    (r"\text{Monday}", "Monday"), (r"\frac1{72}", r"\frac{1}{72}"), (r"3\!\!,000", "3,000"),
    (r"5\,\text{cm}", "5"), (r"5\ \mbox{cm}^2", "5"), (r"\\frac12", "1/2"), (r"\cfrac12", "1/2"),
    ("{1}/{2}", "1/2"),
]  # fmt: skip
OTHER = [
    ("5", "6"), ("(1,2)", "(2,1)"), ("(1,2)", "12"), ("1,2", "12"), (r"\frac{2}{4}", r"\frac{1}{2}"),
    ("", "5"), ("5.0", "5"), ("", r"\text{ Monday}"), (r"\text{ Tuesday}", r"\text{ Monday}"),
    (r"\text{even}", r"\text{Even}"), ("5 cm", "5"),
]  # fmt: skip


def test_boxed_exact():
    for given, wanted in [*SAME, *OTHER]:
        value = float((given, wanted) in SAME)
        assert boxed_exact([rf"thus \boxed{{{given}}}"], [wanted]) == [value], (given, wanted)
    assert exact_match(["4"], [4]) == boxed_exact([r"\boxed{4}"], [4]) == [1.0]  # as numbers


MATH_RIGHT = [
    (r"\boxed{1} no: \boxed{2}", "2"), (r"\boxed{2+2}", "4"), (r"\boxed{1\,000}", "1000"),
    (r"\boxed{\sqrt{12}}", r"2 \sqrt { 3 }"), (r"\boxed{1{,}000}", 1000), ("It is 72.", "72."),
    (r"\boxed{10^5}", "100000"), (r"\boxed{2^{16}}", 65536), (r"\boxed{\text{east}}", "east"),
    (r"\boxed{\text{Even}}", r"\text{even}"), (r"\boxed{\textbf{Monday}}", "Monday"),
    (r"\fbox{3}", "3"), (r"$\boxed 5$", "5"), (r"\boxed{1} so \fbox{2}", "1"),
    (r"\boxed{72.}", "72"), (r"\boxed{72}", "72."), ("The answer is 5", "5"), ("It is 5", 5),
]  # fmt: skip
MATH_WRONG = [
    (r"\boxed{1} and \boxed{2}", "1"), (r"\boxed{1}. The final answer is 2.", "2"),
    (r"\boxed{1} \boxed{2", "1"), (r"\boxed{\text{seat}}", "east"), (r"\boxed{101_3}", "101_2"),
    (r"\boxed{\text{ Tuesday}}", r"\text{ Monday}"), (r"\boxed{}", r"\text{ Monday}"),
    ("The answer is 6", "5"), ("", "5"), (r"\boxed", "5"),
]  # fmt: skip


def test_math_answer():
    for text, truth in [*MATH_RIGHT, *MATH_WRONG]:
        value = float((text, truth) in MATH_RIGHT)
        assert math_answer([text], [truth]) == [value], (text, truth)


def test_long_texts_take_no_time():
    """Linear in the text: a regular expression that is not takes minutes here."""
    texts = [
        r"\boxed{" + "9" * 100_000 + "}", r"\boxed{0." + "9" * 10_000 + "}", "<answer>" * 20_000,
        r"\boxed{" + r"\frac{" * 20_000 + "}", r"\boxed{5" + r"\text{ a}" * 10_000 + "}",
        r"\boxed{" * 20_000,
    ]  # fmt: skip
    wrong = [0.0] * len(texts)
    assert called(boxed_exact, 20, completions=texts, answer=["4"] * 6) == wrong
    assert called(countdown, 20, completions=texts, nums=[[4]] * 6, target=[4] * 6) == wrong


FORMATTED = "<think>a</think><answer>b</answer>"
UNFORMATTED = [
    "<think>a</think>b", "<answer>b</answer><think>a</think>", FORMATTED + " c", "<think>" * 50_000,
    "<think>a</think>c<answer>b</answer>", "<think>" + FORMATTED, FORMATTED + "<answer>b</answer>",
]  # fmt: skip


def test_format():
    right = [FORMATTED, "\n<think>\na\n</think>\n<answer>\nb\n</answer>\n"]
    assert format_reward([*right, *UNFORMATTED]) == [1] * 2 + [0] * 7


def test_length_penalties():
    """By hand: DAPO's equation 13 with 100 of 300 tokens as the cushion; the cosine at its start, middle and end."""
    ids = [[0] * length for length in (0, 200, 250, 300, 400)]
    assert called(length_penalty(300, cushion=100), 20, completion_ids=ids) == [0, 0, -0.5, -1, -1]
    scaled = length_penalty(200, verifier=exact_match)
    lengths = [[0] * length for length in (0, 100, 200, 0, 100, 199, 500)]
    arguments = {"completion_ids": lengths, "completions": [*"aaabbbb"], "answer": ["a"] * 7}
    values = called(scaled, 20, **arguments)
    assert values == pytest.approx([1.0, 0.75, -1.0, -1.0, -0.75, -0.5, -1.0], abs=1e-4)
    own = Cosine(100, sometimes, right=(2.0, 1.0), wrong=(-3.0, -1.0), exceeded=-9.0)
    half = {"completions": ["a", "b"], "answer": ["a", "a"]}
    assert own(completion_ids=[[0] * 50] * 2, **half) == [None, -2.0]
    assert own(completion_ids=[[0] * 100] * 2, **half) == [None, -9.0]


def sometimes(completions, **_):
    return [None if text == "a" else 0.5 for text in completions]


def test_best_of():
    """The better of two, None only where neither applies."""
    texts = {"completions": ["a", "b"], "answer": ["a", "a"]}
    assert called(best_of(exact_match, sometimes), 20, **texts) == [1.0, 0.5]
    assert called(best_of(sometimes, sometimes), 20, **texts) == [None, 0.5]


async def later(**_) -> Any:
    return [1.0]


BOUND: Any = partial(exact_match, answer=["a"])
ASYNC: Any = later
PATH: Any = "recipes.rewards.exact_match"


@pytest.mark.parametrize(
    "make",
    [
        lambda: length_penalty(300),
        lambda: length_penalty(300, cushion=10, verifier=exact_match),
        lambda: length_penalty(300, cushion=0),
        lambda: length_penalty(300, cushion=301),
        lambda: length_penalty(0, verifier=exact_match),
        *(lambda bad=bad: length_penalty(300, verifier=bad) for bad in (ASYNC, BOUND)),
        *(lambda bad=bad: best_of(*bad) for bad in ([], [exact_match, ASYNC], [BOUND], [PATH])),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(make):
    message = "length_penalty|cushion|max_tokens|best_of|async def|use def"
    with pytest.raises(ValueError, match=message):
        make()
