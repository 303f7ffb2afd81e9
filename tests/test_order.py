"""The order of an `order_fn`: what it is told, and what a run that goes on knows again."""

import math
import re
from dataclasses import replace
from pathlib import Path

from fake_server import fake_server
from helpers import ROOT, answer_in, on_forked_ranks, read, saved_state
from test_hooks import make_config

from config import parse_args
from rollouts.group import Prompt
from rollouts.order import Order
from train import main

PROMPTS = [
    Prompt(index, [5 + index], f"prompt {index}", {}) for index in (0, 1, 3, 4)
]  # 2 was left out


def drawn(prompts, history, count, rng):
    return rng.choices(prompts, k=count)


def order_of(order_fn=drawn, history=None, **fields):
    config = make_config(order_fn=order_fn, **{"batch_size": 3, **fields})
    return Order(PROMPTS, history or {}, config)


def first_groups(order, num=30):
    return [group for first in range(0, num, 3) for group in order.choose(first)]


def ended(group, *rewards):
    return replace(group, reward=list(rewards))


def test_numbers_and_draws():
    """Groups are numbered on; another batch draws other prompts, another seed too, the same one the same."""
    groups = first_groups(order_of())
    assert [group.id for group in groups] == list(range(30))
    rows = [group.prompt.index for group in groups]
    assert rows == [group.prompt.index for group in first_groups(order_of())]
    assert rows != [group.prompt.index for group in first_groups(order_of(seed=7))]
    assert len({tuple(rows[begin : begin + 3]) for begin in range(0, 30, 3)}) > 3


def test_what_it_is_told():
    """Rewards of the last eight groups of each prompt, those that there are, trained or dropped; not one later."""
    told = []

    def noting(prompts, history, count, rng):
        told.append({index: list(groups) for index, groups in history.items()})
        return [prompts[1]] * count

    order = order_of(noting)
    assert told == [{}]  # it is tried
    first = order.choose(0)
    assert [group.prompt for group in first] == [PROMPTS[1]] * 3
    order.add_to_history(
        [ended(first[0], 0.5, math.nan), ended(first[1]), ended(first[2], math.nan)]
    )
    order.choose(3)
    assert told[1:] == [{}, {1: [[0.5], [], []]}]
    for number in range(10):
        order.add_to_history([ended(first[0], float(number))])
    assert order.history[1] == [[float(number)] for number in range(2, 10)]


def test_the_default_order_keeps_no_history():
    """Which would grow with the data."""
    order = order_of(None)
    order.add_to_history([ended(order.choose(0)[0], 1.0)])
    assert order.history == {}


def test_an_order_that_fails_in_the_middle(models, recipe, tmp_path):
    """Of two ranks: the run ends in a line, after both have saved the last whole step."""
    path = tmp_path / "fails.py"
    with fake_server(models["untied"], answer_in(0.0)) as server:
        path.write_text(
            Path(recipe(server)).read_text()
            + "from dataclasses import replace\n"
            + "def failing(prompts, history, count, rng):\n"
            + "    if history:\n        raise KeyError('gold')\n    return prompts[:count]\n"
            + "config = replace(config, order_fn=failing)\n"
        )
        done = on_forked_ranks(2, ROOT / "train.py", str(path), "--max_steps", "4")
    assert done.returncode != 0
    assert re.search(
        r"^error: order_fn raised KeyError: 'gold' \(fails.py:\d+\)$", done.stderr, re.M
    )
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_dropped_groups_are_in_the_history(models, recipe, tmp_path):
    with fake_server(models["untied"], answer_in(0.0)) as server:
        path = Path(recipe(server))
        text = path.read_text()
        path.write_text(
            text.replace("sum(ids) / len(ids) / 50", "float(len(completion_ids[0]) % 3 > 0)*ids[0]")
            + "from dataclasses import replace\n"
            + "def first(prompts, history, count, rng):\n    return rng.choices(prompts, k=count)\n"
            + "config = replace(config, order_fn=first, drop_zero_advantage=True)\n"
        )
        main(parse_args([str(path), "--max_steps", "3"]))
    dropped = read(tmp_path, "dropped")
    assert dropped
    state = saved_state(tmp_path / "run" / "checkpoint-3")
    counts = [len(groups) for groups in state["history"].values()]
    assert max(counts) < 8  # none is forgotten
    assert sum(counts) == 3 * 6 + len(dropped) == state["next"] - len(state["open"])
