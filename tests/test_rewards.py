"""Verifiers on what models write, hostile answers included: nothing in them is run, and each gets its number."""

import pytest

from recipes.rewards import (
    Cosine,
    boxed_exact,
    countdown,
    exact_match,
    format_reward,
    last_boxed,
    length_penalty,
    math_answer,
    sympy_equal,
)
from recipes.workers import CallPool

BOMBS = [
    r"\boxed{10^{10^{10^{10}}}}",
    r"\boxed{9**9**9**9}",
    r"\boxed{" + "(" * 3000 + "4" + ")" * 3000 + "}",
    r"\boxed{" + "9" * 100_000 + "}",
    r"\boxed{100000000!}",
    r"\boxed{" + r"\frac{1}{" * 500 + "4" + "}" * 500 + "}",
    r"\boxed{\sum_{i=1}^{10^{12}} i^{10^{9}}}",
]


def test_what_takes_sympy_for_ever_is_wrong_and_the_rest_of_its_group_is_not(tmp_path):
    """In a worker, as the trainer calls it; the last one would touch a file if it were code."""
    code = rf"\boxed{{__import__('pathlib').Path('{tmp_path}/run').touch()}}"
    texts = [*BOMBS, code, r"so \boxed{4}", r"\boxed{\frac{8}{2}}", r"\boxed{5}"]
    pool = CallPool(1)
    arguments = {"prompts": [""] * len(texts), "completions": texts, "answer": ["4"] * len(texts)}
    values = pool.call(math_answer, arguments, 60)
    pool.close()
    assert values == [0.0] * (len(BOMBS) + 1) + [1.0, 1.0, 0.0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(50 - 2) / 4 + 8", 1),
        ("<think>2 + 2</think>\n<answer> (50 - 2) / 4 + 8 </answer>", 1),
        ("<answer>1 + 1</answer> no: <answer>8+(50-2)/4 = 20</answer>", 1),
        ("-(2 - 50) / 4 + 8", 1),
        ("8 + 4 * (50 - 2) / 16", 0),  # 20, with a number that is not given
        ("50 / 2 - 4 + 8 - 9", 0),
        ("(50 - 2) / 4 + 8 + 8 - 8", 0),  # 8 more than once
        ("50 - 2 * 8 - 4", 0),  # 30
        ("(50 - 2) / 4 + 8 = 21", 0),
        ("20", 0),
        ("", 0),
        ("<answer></answer>", 0),
        ("(50 - 2) // 4 + 8", 0),
        ("50 - 2 / 4 + 8", 0),  # 57.5
        ("50 ** 2 ** 4 ** 8", 0),
        ("9" * 250, 0),
        ("9" * 10**6, 0),
        ("(" * 140 + "4" + ")" * 140, 0),
        ("-" * 290 + "4", 0),
        ("50 / (2 - 2) + 4 + 8", 0),
        ("50 - 2 / 4 + 8.0", 0),
        ("(50, 2, 4, 8)", 0),
        ("__import__('os').getpid()", 0),
        ("5_0 - 2 / 4 + 8", 0),
        ("(50 - 2) / 4 + 08", 0),
        ("(50 - 2) / ٤ + 8", 0),
        ("50 2 4 8", 0),
        ("(50 - 2) / 4 + 8\0", 0),
    ],
)
def test_countdown(text, value):
    assert countdown([text], nums=[[2, 4, 8, 50]], target=[20]) == [value]


def test_countdown_is_exact():
    """6 / (1 - 3/4) is 24 in fractions; in floats 1/3 * 3 and the like need not be whole. One number may come twice."""
    assert countdown(["6/(1-3/4)", "(5-1/5)*5"], nums=[[1, 3, 4, 6], [5, 5, 1, 5]], target=[24, 24]) == [1.0, 1.0]
    assert countdown(["(5-1/5)*5"], nums=[[5, 5, 5, 5]], target=[24]) == [0.0]


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
    ],
)
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


SAME = [
    (r"\dfrac12", "1/2"), (r"\frac{1}{2}", "0.5"), (r"\sqrt3", r"\sqrt{3}"), ("x = 5", "5"), ("1,000", "1000"),
    (r"50\%", "50"), (r"90^\circ", "90"), (".5", r"\tfrac{1}{2}"), (r"\left( 1, 2 \right)", "(1,2)"),
    (r"5 \text{ cm}", "5"),
    (r"\$12", "12"), (r"\text{Monday}", "Monday"), (r"\frac1{72}", r"\frac{1}{72}"), ("x+1.", "x + 1"),
    (r"3\!\!,000", "3,000"),
]  # fmt: skip
OTHER = [
    ("5", "6"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "12"),
    ("1,2", "12"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    ("", "5"),
    ("5.0", "5"),
]


@pytest.mark.parametrize(("given", "wanted", "value"), [(*p, 1) for p in SAME] + [(*p, 0) for p in OTHER])
def test_boxed_exact(given, wanted, value):
    assert boxed_exact([rf"thus \boxed{{{given}}}"], [wanted]) == [value]


MATHEMATICS = [
    (r"2\sqrt{2}", r"\sqrt{8}", 1), ("x(x+1)", "x^2+x", 1), (r"(\sqrt{4}, 3)", "(2,3)", 0), ("(1, x+x)", "(1,2x)", 1),
    ("[0,1)", "[0,1)", 1), ("[0,1]", "[0,1)", 0), ("(0,1)", "[0,1]", 0), (r"\frac{2}{4}", r"\frac{1}{2}", 0),
    ("4/2", "2", 0), ("2.0", "2", 0), ("1+1", "2", 0), (r"\frac{\pi}{2}", r"0.5\pi", 1),
    ("(1,2,3)", "(1,2)", 0), ("3,4", "(3,4)", 0),
    ("10^{10^{10^{10}}}", "x", 0), ("", "2", 0),
]  # fmt: skip


@pytest.mark.parametrize(("given", "wanted", "value"), MATHEMATICS + [(*p, 1) for p in SAME])
def test_sympy_equal(given, wanted, value):
    assert sympy_equal([rf"thus \boxed{{{given}}}"], [wanted]) == [value]


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
    texts, answers = ["a", "a", "a", "b", "b", "b"], ["a"] * 6
    lengths = [[0] * length for length in (0, 100, 200, 0, 100, 500)]
    values = scaled(completion_ids=lengths, completions=texts, answer=answers)
    assert values == pytest.approx([1.0, 0.75, 0.5, -1.0, -0.75, -0.5])
    pool = CallPool(1)
    arguments = {"completion_ids": lengths, "completions": texts, "answer": answers}
    assert pool.call(scaled, arguments, 20) == values
    assert pool.call(length_penalty(300, 100), {"completion_ids": ids}, 20) == [0, 0, -0.5, -1, -1]
    pool.close()
    assert Cosine(100, exact_match, right=(2.0, 1.0))(completion_ids=[[0] * 50], completions=["a"], answer=["a"]) == [
        1.5
    ]
    for wrong in ({}, {"cushion": 10, "verifier": exact_match}, {"cushion": 0}, {"cushion": 301}):
        with pytest.raises(ValueError, match="length_penalty"):
            length_penalty(300, **wrong)
