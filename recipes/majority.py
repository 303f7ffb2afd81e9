"""`recipes/tiny.py` without its answers: the group's majority answer stands for the right one (TTRL, arXiv:2504.16084).

    bash scripts/demo.sh recipes/majority.py

The right answers are only looked at: `exact_match` has weight 0, and `eval/rewards/exact_match` is the accuracy. (The
vote of one completion, as in an evaluation, is always 1.) Expected: agreement rises from 41 to 92 %, and accuracy falls
from 35 to 16 %: one in five of this model's samples is right, and it agrees on wrong answers. Start from a better one.
"""

from collections import Counter
from dataclasses import replace

from recipes import tiny
from recipes.rewards import exact_match, last_boxed, normalized


def answer_of(text: str) -> str:
    r"""The last `\boxed{...}`, normalized, or all of a completion that has none; empty where it has no end."""
    return normalized(last_boxed(text) or "") if "\\boxed" in text else text.strip()


def majority_vote(completions: list[str], **_) -> list[float]:
    """1 where a completion's answer is the one that most of its group give, else 0; of equally many, the first."""
    answers = [answer_of(text) for text in completions]
    votes = Counter(answer for answer in answers if answer).most_common(1)
    return [float(bool(votes) and answer == votes[0][0]) for answer in answers]


config = replace(
    tiny.config,
    reward_funcs=[majority_vote, exact_match],
    reward_weights=[1.0, 0.0],
    output_dir="outputs/tiny/majority",
)
