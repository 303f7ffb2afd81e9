"""Verifiers on what models write, hostile answers included: nothing in them is run, and each gets its number."""

import pytest

from recipes.rewards import countdown, math_answer
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
