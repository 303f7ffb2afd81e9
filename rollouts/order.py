"""Which prompts come next: all, shuffled, or those that an `order_fn` chooses."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from config import TrainConfig
from rollouts.custom import naming_function
from rollouts.group import Group, Prompt
from utils import naming

GROUPS_KEPT = 8  # of each prompt, the last ones, in the history


def next_groups(
    first: int,
    prompts: Sequence[Prompt],
    history: dict[int, list[list[float]]],
    config: TrainConfig,
) -> list[Group]:
    """The next `batch_size` groups of a run.

    Args:
        first: the number of the first one.
        prompts: of the run.
        history: for an `order_fn`: by `Prompt.index` the rewards of the last groups that ended.
        config: batch_size, order_fn, seed.

    Raises:
        UserError: `order_fn` fails, or returns anything but `batch_size` of the prompts.
    """
    num = config.batch_size
    order_fn: Any = config.order_fn
    if order_fn:
        with naming_function("order_fn"):
            chosen = order_fn(
                list(prompts),
                dict(history),  # a copy, as groups end meanwhile
                num,
                random.Random(f"{config.seed} {first}"),  # a resumed run chooses alike
            )
        with naming(f"order_fn must return {num} of the prompts that it gets"):
            strangers = {*map(id, chosen)}.difference(map(id, prompts))
            if len(chosen) != num or strangers:
                raise ValueError(f"it returned {len(chosen)}, {len(strangers)} of them others")
    else:
        epoch, place = divmod(first, len(prompts))
        rows: list[int] = []
        while len(rows) < place + num:  # each epoch has its permutation
            generator = torch.Generator().manual_seed(config.seed + epoch)
            rows += torch.randperm(len(prompts), generator=generator).tolist()
            epoch += 1
        chosen = [prompts[row] for row in rows[place : place + num]]
    return [Group(prompt, id=number) for number, prompt in enumerate(chosen, first)]


def add_to_history(history: dict[int, list[list[float]]], groups: Sequence[Group]) -> None:
    """Add the rewards of groups that ended, trained or dropped."""
    for group in groups:
        # Empty where rollouts failed, or no function gave a number.
        before = history.get(group.prompt.index, [])
        history[group.prompt.index] = [*before, group.valid_rewards][-GROUPS_KEPT:]
