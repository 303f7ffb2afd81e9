"""Two data sets, mixed by shares: `recipes/tiny.py` with its problems in two parts.

    bash scripts/demo.sh recipes/mixture.py

Problems of few different digits are a third of all, and are to be half of each batch on average.
Metrics have the reward of each part, as `sets/few_digits/reward`. Expected: 35 to 91 %.
"""

import json
from dataclasses import replace
from pathlib import Path

from recipes.tiny import config as tiny

SHARES = {"few_digits": 0.5, "many_digits": 0.5}


def few_digits():
    """Rows of at most five different digits."""
    return [row for row in read_rows() if len(set(row["answer"])) <= 5]


def many_digits():
    """Rows of six different digits or more."""
    return [row for row in read_rows() if len(set(row["answer"])) > 5]


def read_rows():
    """The rows of `recipes/tiny.py`."""
    lines = Path(str(tiny.dataset_id)).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def by_shares(prompts, history, count, rng):
    """`count` of the prompts: first their data set by its share, then one of it."""
    sets: dict[str, list] = {name: [] for name in SHARES}
    for prompt in prompts:
        sets[prompt.set].append(prompt)
    names = rng.choices(list(SHARES), list(SHARES.values()), k=count)
    return [rng.choice(sets[name]) for name in names]


config = replace(
    tiny,
    dataset_id={"few_digits": few_digits, "many_digits": many_digits},
    order_fn=by_shares,
    output_dir="outputs/tiny/mixture",
)
