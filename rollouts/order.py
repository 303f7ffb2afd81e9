"""Which prompts come next: all, shuffled, or those that an `order_fn` chooses."""

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from config import TrainConfig
from rollouts.custom import naming_function
from rollouts.group import Group, Prompt
from utils import naming

GROUPS_KEPT = 8  # of each prompt, the last ones, in the history


class Order:
    """The order of a run's prompts.

    For an `order_fn`, `history` has the rewards of each prompt's last groups that ended, by
    `Prompt.index`.
    """

    def __init__(
        self, prompts: Sequence[Prompt], history: dict[int, list[list[float]]], config: TrainConfig
    ):
        """Try the `order_fn`, if there is one.

        Raises:
            UserError: it fails, or returns anything but `batch_size` of the prompts.
        """
        self.config = config
        self.prompts = prompts
        self.history = history
        self.choose(0)  # for its errors alone

    def choose(self, first: int) -> list[Group]:
        """The next `batch_size` groups, by the number of the first."""
        seed = self.config.seed
        num = self.config.batch_size
        order_fn: Any = self.config.order_fn
        if not order_fn:
            chosen = []
            for number in range(first, first + num):
                epoch, place = divmod(number, len(self.prompts))  # each has its permutation
                row = int(permutation(len(self.prompts), seed + epoch)[place])
                chosen.append(self.prompts[row])
        else:
            rng = random.Random(f"{seed} {first}")  # a resumed run chooses alike
            with naming_function("order_fn"):
                # A copy, as groups end meanwhile.
                chosen = order_fn(list(self.prompts), dict(self.history), num, rng)
            with naming(f"order_fn must return {num} of the prompts that it gets"):
                strangers = {*map(id, chosen)}.difference(map(id, self.prompts))
                if len(chosen) != num or strangers:
                    raise ValueError(f"it returned {len(chosen)}, {len(strangers)} of them others")
        return [Group(prompt, id=number) for number, prompt in enumerate(chosen, first)]

    def add_to_history(self, groups: Sequence[Group]) -> None:
        """Add the rewards of groups that ended, trained or dropped."""
        if not self.config.order_fn:
            return
        for group in groups:
            # Empty where rollouts failed, or no function gave a number.
            rewards = [reward for reward in group.reward if not math.isnan(reward)]
            before = self.history.get(group.prompt.index, [])
            self.history[group.prompt.index] = [*before, rewards][-GROUPS_KEPT:]


@lru_cache(maxsize=1)
def permutation(num: int, seed: int) -> Tensor:
    """The numbers below `num`, shuffled."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))
