"""Verifiers: reward functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]`."""

import ast
import logging
import operator
import re
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MATH_TIMEOUT_S = 2  # to parse, and to compare: some expressions take sympy for ever
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion is the `answer` column to the letter, surrounding white space aside, else 0."""
    return [float(text.strip() == truth) for text, truth in zip(completions, answer, strict=True)]


def math_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion's last answer equals the `answer` column as mathematics (math-verify), else 0.

    What takes longer than `MATH_TIMEOUT_S` is wrong; only the main thread, as that of a reward worker, can bound it.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would print each completion that takes too long
    limit = MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None  # it uses SIGALRM
    wanted = [parse(f"\\boxed{{{truth}}}", parsing_timeout=limit) for truth in answer]
    given = [parse(text, parsing_timeout=limit) for text in completions]
    return [float(verify(w, g, timeout_seconds=limit)) for w, g in zip(wanted, given, strict=True)]


def countdown(completions: list[str], nums: list[list[int]], target: list[int], **_: Any) -> list[float]:
    """1 where the completion makes `target` of `nums`, each used once, by + - * / and brackets, else 0.

    Looks at the last `<answer>`, or at all of a completion without one; a final `= target` may stand there. Exact, on a
    parsed tree: nothing is evaluated.
    """
    rows = zip(completions, nums, target, strict=True)
    return [float(_makes(text, list(numbers), goal)) for text, numbers, goal in rows]


def _makes(text: str, numbers: list[int], goal: int) -> bool:
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    expression, _, result = (answers[-1] if answers else text).strip().partition("=")
    if result.strip() not in ("", str(goal)) or not re.fullmatch(r"[0-9+\-*/() ]{1,300}", expression):
        return False
    used: list[int] = []
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # the last ones: deep nesting
        return False
    return value == goal and sorted(used) == sorted(numbers)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """The value of a tree of numbers, noted in `used`, under the four operations."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError("no number, and none of + - * /")


def best_of(*functions: Callable[..., list[float | None]]) -> "BestOf":
    """A reward that gives each completion the best of what several functions give it, None where none applies."""
    return BestOf(*functions)


class BestOf:
    """What `best_of` returns: an object, which a worker process can be sent, unlike a function within a function."""

    def __init__(self, *functions: Callable[..., list[float | None]]):
        self.functions = functions
        self.__name__ = self.__qualname__ = "best_of_" + "_".join(f.__name__ for f in functions)

    def __call__(self, **arguments: Any) -> list[float | None]:
        """As any reward function."""
        columns = [function(**arguments) for function in self.functions]
        rows = zip(*columns, strict=True)
        return [max((value for value in row if value is not None), default=None) for row in rows]
