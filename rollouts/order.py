"""Which prompts come next: all, shuffled, or those that an `order_fn` chooses."""

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from config import TrainConfig
from rollouts.group import Group, Prompt
from rollouts.own_advantages import naming_function
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
        choose = self._own if self.config.order_fn else self._shuffled
        prompts = choose(first)
        return [Group(prompt, id=number) for number, prompt in enumerate(prompts, first)]

    def _shuffled(self, first: int) -> list[Prompt]:
        """The next prompts, over as many epochs as it takes; each has a permutation of its own."""
        chosen: list[Prompt] = []
        while len(chosen) < self.config.batch_size:
            epoch, start = divmod(first + len(chosen), len(self.prompts))
            generator = torch.Generator().manual_seed(self.config.seed + epoch)
            numbers = torch.randperm(len(self.prompts), generator=generator)[start:]
            missing = self.config.batch_size - len(chosen)
            chosen += [self.prompts[number] for number in numbers[:missing].tolist()]
        return chosen

    def _own(self, first: int) -> list[Prompt]:
        """The prompts that `order_fn` chooses.

        The generator is seeded by the number, so that a resumed run chooses alike.
        """
        config = self.config
        order_fn: Any = config.order_fn
        rng = random.Random(f"{config.seed} {first}")
        with naming_function("order_fn"):
            # A copy, as groups end meanwhile.
            chosen = order_fn(list(self.prompts), dict(self.history), config.batch_size, rng)
        known = {prompt.index: prompt for prompt in self.prompts}
        with naming(f"order_fn must return {config.batch_size} of the prompts that it gets"):
            is_known = [known.get(prompt.index) is prompt for prompt in chosen]
            if len(chosen) != config.batch_size or not all(is_known):
                raise ValueError(f"it returned {len(chosen)} of which {sum(is_known)} are known")
        return list(chosen)

    def add_to_history(self, groups: Sequence[Group]) -> None:
        """Add the rewards of groups that ended, trained or dropped."""
        if not self.config.order_fn:
            return
        for group in groups:
            # Empty where rollouts failed, or no function gave a number.
            rewards = [reward for reward in group.reward if not math.isnan(reward)]
            before = self.history.get(group.prompt.index, [])
            self.history[group.prompt.index] = [*before, rewards][-GROUPS_KEPT:]
