"""The order of an `order_fn`: what it is told, and what a run that goes on knows again."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import ROOT, change, flags, on_forked_ranks, read, saved_state
from test_hooks import make_config

from config import UserError, parse_args
from rollouts.group import Prompt
from rollouts.stream import add_to_history, next_groups
from train import main

INDICES = (0, 1, 3, 4)  # 2 was left out
PROMPTS = [Prompt(index, [5 + index], f"prompt {index}", {}) for index in INDICES]


def drawn(prompts, history, count, rng):
    return rng.choices(prompts, k=count)


def choose(first, order_fn=drawn, history=None, **fields):
    config = make_config(order_fn=order_fn, **{"batch_size": 3, **fields})
    return next_groups(first, PROMPTS, history or {}, config)


def first_groups(num=30, **fields):
    return [group for first in range(0, num, 3) for group in choose(first, **fields)]


def ended(group, rewards):
    return replace(group, reward=[*rewards])


def test_numbers_and_draws():
    """Groups are numbered on; another batch draws other prompts, another seed too, the same one the same."""
    groups = first_groups()
    assert [group.id for group in groups] == list(range(30))
    rows = [group.prompt.index for group in groups]
    assert rows == [group.prompt.index for group in first_groups()]
    assert rows != [group.prompt.index for group in first_groups(seed=7)]
    assert len({tuple(rows[begin : begin + 3]) for begin in range(0, 30, 3)}) > 3


def test_what_it_is_told():
    """Rewards of the last eight groups of each prompt, those that there are, trained or dropped; not one later."""
    told = []

    def noting(prompts, history, count, rng):
        told.append({index: list(groups) for index, groups in history.items()})
        return [prompts[1]] * count

    history: dict[int, list[list[float]]] = {}
    first = choose(0, noting, history)
    assert [group.prompt for group in first] == [PROMPTS[1]] * 3
    rewards = [(0.5, math.nan), (), (math.nan,)]
    add_to_history(history, [ended(*pair) for pair in zip(first, rewards, strict=True)])
    choose(3, noting, history)
    assert told == [{}, {1: [[0.5], [], []]}]
    for number in range(10):
        add_to_history(history, [ended(first[0], [float(number)])])
    assert history[1] == [[float(number)] for number in range(2, 10)]


def failing(prompts, history, count, rng):
    raise KeyError("gold")


@pytest.mark.parametrize(
    ("order_fn", "reason"),
    [
        (lambda prompts, _, count, rng: prompts[: count - 1], "must return 3 of the prompts that it gets: it returned 2, 0"),
        (lambda prompts, *_: [replace(prompt) for prompt in prompts[:3]], "must return 3 .*: it returned 3, 3 of them others"),
        (failing, r"raised KeyError: 'gold' \(test_order.py:\d+\)"),
    ],
)  # fmt: skip
def test_an_order_that_is_none(order_fn, reason):
    with pytest.raises(UserError, match=f"^order_fn {reason}"):
        choose(0, order_fn)


FAILS_LATER = """
from dataclasses import replace
def failing(prompts, history, count, rng):
    if history:
        raise KeyError('gold')
    return prompts[:count]
config = replace(config, order_fn=failing)
"""


def test_an_order_that_fails_in_the_middle(stand_in, recipe, tmp_path):
    """Of two ranks: the run ends in a line, after both have saved the last whole step."""
    path = Path(recipe(stand_in(0.0)))
    path.write_text(path.read_text() + FAILS_LATER)
    done = on_forked_ranks(2, ROOT / "train.py", path, "--max_steps", "4")
    assert done.returncode != 0
    message = rf"^error: order_fn raised KeyError: 'gold' \({path.name}:\d+\)$"
    assert re.search(message, done.stderr, re.M)
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_dropped_groups_are_in_the_history(stand_in, recipe, tmp_path):
    path = recipe(stand_in(0.0))
    all_alike = "float(len(completion_ids[0]) % 3 > 0)*ids[0]"  # in some groups
    change(path, "sum(ids) / len(ids) / 50", all_alike)
    main(parse_args([path, *flags(order_fn="test_order.drawn", drop_zero_advantage=True)]))
    dropped = read(tmp_path, "dropped")
    assert dropped
    state = saved_state(tmp_path / "run" / "checkpoint-3")
    counts = [len(groups) for groups in state["history"].values()]
    assert max(counts) < 8  # none is forgotten
    assert sum(counts) == 3 * 6 + len(dropped) == state["next"] - len(state["open"])
