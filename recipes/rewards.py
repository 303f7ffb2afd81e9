"""Verifiers: reward functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]`."""

from typing import Any


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion is the `answer` column to the letter, surrounding white space aside, else 0."""
    return [float(text.strip() == truth) for text, truth in zip(completions, answer, strict=True)]
