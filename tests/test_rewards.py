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
    last_boxed,
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


@pytest.mark.parametrize("truth", ["4", "x+4"])
def test_what_takes_sympy_for_ever_is_wrong_and_the_rest_of_its_group_is_not(tmp_path, truth):
    """The last of them would touch a file if it were code."""
    code = rf"\boxed{{__import__('pathlib').Path('{tmp_path}/run').touch()}}"
    texts = [*BOMBS, code, rf"so \boxed{{{truth}}}", rf"\boxed{{ {truth} }}", r"\boxed{5}"]
    answers = [truth] * len(texts)
    values = called(math_answer, 40, prompts=answers, completions=texts, answer=answers)
    assert values == [0.0] * (len(BOMBS) + 1) + [1.0, 1.0, 0.0]
    assert not (tmp_path / "run").exists()


RIGHT = [
    "(50 - 2) / 4 + 8",
    "-(2 - 50) / 4 + 8",
    "8\t+\n+(50 - 2) / 4",
    "<think>2 + 2</think>\n<answer> (50 - 2) / 4 + 8 </answer>",
    "<answer>1 + 1</answer> no: <answer>8+(50-2)/4 = 20</answer>",
    "<answer>\n8 + (50 - 2) / 4\n</answer>",
    "<answer>8 + (50 - 2) / 4</answer></answer>",
]
WRONG = [
    "8 + 4 * (50 - 2) / 16",  # 20, with a number that is not given
    "(50 - 2) / 4 + 8 + 8 - 8",  # 8 more than once
    "8 + 4 * 2 + 4",  # 20, with 4 twice
    "2 * 8 + 4",  # 20, without the 50
    "(50 - 8 - 2) / 2",  # 20, without the 4
    "50 - 2 * 8 - 4",  # 30
    "50 - 2 / 4 + 8",  # 57.5
    "(50 - 2) / 4 + 8 = 21",
    "20",
    "",
    "<answer></answer>",
    "(50 - 2) // 4 + 8",
    "50 ** 2 ** 4 ** 8",
    "9" * 250,
    "9" * 10**6,
    "(" * 140 + "4" + ")" * 140,
    "-" * 290 + "4",
    "50 / (2 - 2) + 4 + 8",
    "50 - 2 / 4 + 8.0",
    "(50, 2, 4, 8)",
    "__import__('os').getpid()",
    "5_0 - 2 / 4 + 8",
    "(50 - 2) / 4 + 08",
    "(50 - 2) / ٤ + 8",
    "50 2 4 8",
    "(50 - 2) / 4 + 8\0",
]


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


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{1} \boxed{2", None),
        ("4", None),
        ("", None),
        (r"\boxed", None),
        (r"\boxed{}", ""),
        (r"\boxed{1} so \fbox{2}", "1"),
    ],
)
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


SAME = [
    (r"\dfrac12", "1/2"), (r"\frac{1}{2}", "0.5"), (r"\sqrt3", r"\sqrt{3}"), ("x = 5", "5"), ("1,000", "1000"),
    (r"50\%", "50"), (r"90^\circ", "90"), (".5", r"\tfrac{1}{2}"), (r"\left( 1, 2 \right)", "(1,2)"),
    (r"5 \text{ cm}", "5"),
    (r"\$12", "12"), (r"\text{Monday}", "Monday"), (r"\frac1{72}", r"\frac{1}{72}"), ("x+1.", "x + 1"),
    (r"3\!\!,000", "3,000"), (r"5\,\text{cm}", "5"), (r"5\ \mbox{cm}^2", "5"), ("{5}", "5"), (r"\\frac12", "1/2"),
    (r"\cfrac12", "1/2"), ("{1}/{2}", "1/2"),
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


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        (r"\boxed{1} no: \boxed{2}", "2", 1),
        (r"\boxed{1} and \boxed{2}", "1", 0),
        (r"\boxed{1}. The final answer is 2.", "2", 0),
        (r"\boxed{1} \boxed{2", "1", 0),
        (r"\boxed{2+2}", "4", 1),
        (r"\boxed{\sqrt{12}}", r"2 \sqrt { 3 }", 1),
        (r"\boxed{1\,000}", "1000", 1),
        (r"\boxed{1{,}000}", 1000, 1),
        (r"\boxed{\text{seat}}", "east", 0),
        (r"\boxed{\text{east}}", "east", 1),
        (r"\boxed{\text{Even}}", r"\text{even}", 1),
        (r"\boxed{\textbf{Monday}}", "Monday", 1),
        (r"\boxed{\text{ Monday}}", "Monday", 1),
        (r"\boxed{\text{ Tuesday}}", r"\text{ Monday}", 0),
        (r"\boxed{72.}", "72", 1),
        (r"\boxed{72}", "72.", 1),
        ("It is 72.", "72.", 1),
        (r"\boxed{}", r"\text{ Monday}", 0),
        (r"\boxed{101_3}", "101_2", 0),
        ("The answer is 5", "5", 1),
        ("The answer is 5", 5, 1),
        ("The answer is 6", "5", 0),
        (r"\boxed{10^5}", "100000", 1),
        (r"\boxed{2^{16}}", 65536, 1),
        ("", "5", 0),
    ],
)
def test_math_answer(text, truth, value):
    assert math_answer([text], [truth]) == [value]


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" + "9" * 100_000 + "}",
        r"\boxed{0." + "9" * 10_000 + "}",
        r"\boxed{" + r"\frac{" * 20_000 + "}",
        r"\boxed{5" + r"\text{ a}" * 10_000 + "}",
        "<answer>" * 20_000,
        r"\boxed{" * 20_000,
    ],
)
def test_long_texts_take_no_time(text):
    """Linear in the text: a regular expression that is not takes minutes here."""
    assert called(boxed_exact, 20, completions=[text], answer=["4"]) == [0.0]
    assert called(countdown, 20, completions=[text], nums=[[4]], target=[4]) == [0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na\n</think>\n<answer>\nb\n</answer>\n", 1),
        ("<think>a</think>b", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> c", 0),
        ("<think>a</think>c<answer>b</answer>", 0),
        ("<think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0),
        ("<think>" * 50_000, 0),
        ("", 0),
    ],
)
def test_format(text, value):
    assert format_reward([text]) == [value]


def test_length_penalties():
    """By hand: DAPO's equation 13 with 100 of 300 tokens as the cushion; the cosine at its start, middle and end."""
    ids = [[0] * length for length in (0, 200, 250, 300, 400)]
    assert length_penalty(300, cushion=100)(completion_ids=ids) == [0, 0, -0.5, -1, -1]
    scaled = length_penalty(200, verifier=exact_match)
    texts, answers = ["a", "a", "a", "b", "b", "b", "b"], ["a"] * 7
    lengths = [[0] * length for length in (0, 100, 200, 0, 100, 199, 500)]
    values = scaled(completion_ids=lengths, completions=texts, answer=answers)
    assert values == pytest.approx([1.0, 0.75, -1.0, -1.0, -0.75, -0.5, -1.0], abs=1e-4)
    arguments = {"completion_ids": lengths, "completions": texts, "answer": answers}
    assert called(scaled, 20, **arguments) == values
    assert called(length_penalty(300, 100), 20, completion_ids=ids) == [0, 0, -0.5, -1, -1]
    best = called(best_of(exact_match, sometimes), 20, **arguments)
    assert best == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    own = Cosine(100, sometimes, right=(2.0, 1.0), wrong=(-3.0, -1.0), exceeded=-9.0)
    half = {"completions": ["a", "b"], "answer": ["a", "a"]}
    assert own(completion_ids=[[0] * 50] * 2, **half) == [None, -2.0]
    assert own(completion_ids=[[0] * 100] * 2, **half) == [None, -9.0]


def sometimes(completions, **_):
    return [None if text == "a" else 0.5 for text in completions]


async def later(**_) -> Any:
    return [1.0]


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
        lambda: length_penalty(300, verifier=ASYNC),
        lambda: best_of(),
        lambda: best_of(exact_match, ASYNC),
        lambda: best_of(partial(exact_match, answer=["a"])),
        lambda: best_of(PATH),
        lambda: length_penalty(300, verifier=partial(exact_match, answer=["a"])),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(make):
    message = "length_penalty|cushion|max_tokens|best_of|async def|use def"
    with pytest.raises(ValueError, match=message):
        make()
