"""Verifiers: reward functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]`."""

from collections.abc import Callable
from typing import Any


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion is the `answer` column to the letter, surrounding white space aside, else 0."""
    return [float(text.strip() == truth) for text, truth in zip(completions, answer, strict=True)]


def math_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion's last answer equals the `answer` column as mathematics (math-verify), else 0.

    It belongs into a worker process, where this runs by itself: some expressions take sympy for ever.
    """
    from math_verify import parse, verify

    wanted = [parse(f"\\boxed{{{truth}}}", parsing_timeout=None) for truth in answer]
    given = [parse(text, parsing_timeout=None) for text in completions]
    return [float(verify(w, g, timeout_seconds=None)) for w, g in zip(wanted, given, strict=True)]


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
