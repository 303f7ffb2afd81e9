"""`recipes/tiny.py` without its answers: the majority is taken as right.

    bash scripts/demo.sh recipes/majority.py

The answer that most of a group give stands for the right one (TTRL, arXiv:2504.16084). The right
answers are only looked at, by rewards of weight 0: of eight completions of a held-out problem,
`eval/rewards/exact_match` is the mean accuracy, and `eval/rewards/majority_is_right` that of their
majority (maj@8). Expected: agreement, `eval/reward`, rises from 38 to 91 %. Accuracy falls from 20
to between 4 and 14 %, that of the majority from 33 to between 4 and 15 %: this model agrees on
wrong answers. Start from one that is right more often than not.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from recipes import tiny
from recipes.rewards import exact_match, last_boxed, normalized


def answer_of(text: str) -> str:
    r"""The last `\boxed{...}`, normalized, or all of a completion without a box.

    Empty where the box has no end.
    """
    if "\\boxed" in text:
        return normalized(last_boxed(text) or "")
    return text.strip()


def majority_vote(completions: list[str], **_) -> list[float]:
    """1 where a completion gives its group's most frequent answer, else 0.

    Of equally frequent answers, the first.
    """
    answers = [answer_of(text) for text in completions]
    counts = Counter(answer for answer in answers if answer)
    if not counts:
        return [0.0] * len(answers)
    winner = counts.most_common(1)[0][0]
    return [float(answer == winner) for answer in answers]


def majority_is_right(completions: list[str], answer: list[Any], **_) -> list[float]:
    """maj@n: 1 for all n completions whose majority is right, else 0."""
    right = exact_match([answer_of(text) for text in completions], answer)
    votes = majority_vote(completions)
    is_right = max(vote * value for vote, value in zip(votes, right, strict=True))
    return [is_right] * len(completions)


config = replace(
    tiny.config,
    reward_funcs=[majority_vote, exact_match, majority_is_right],
    reward_weights=[1.0, 0.0, 0.0],
    eval_generations=8,
    eval_temperature=1.0,
    output_dir="outputs/tiny/majority",
)
