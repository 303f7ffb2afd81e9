"""The order of a config's own `order_fn`: which prompt comes next, by how earlier ones went."""

import math
import random
import threading
from collections.abc import Iterator
from typing import Any

from config import TrainConfig
from rollouts.group import Group, Prompt
from rollouts.own_advantages import naming_function
from utils import naming

GROUPS_KEPT = 8  # of each prompt, the last ones, in the history


class Order:
    """Endless groups of the prompts that `order_fn` chooses, a batch's worth at a time.

    `history` has the rewards of each prompt's last groups that ended, by `Prompt.index`. A resumed
    run first samples what was chosen and had not ended, and then chooses from the same history.
    """

    def __init__(self, prompts: list[Prompt], resumed: dict[str, Any] | None, config: TrainConfig):
        """Try `order_fn`, and take up the order of an earlier run.

        Raises:
            UserError: it fails, or returns no prompts.
        """
        self.config = config
        self.prompts = {prompt.index: prompt for prompt in prompts}
        state = (resumed or {}).get("order", {})
        self.history: dict[int, list[list[float]]] = state.get("history", {})
        self.chosen: dict[int, int] = state.get("chosen", {})  # index by id, of groups not ended
        self.num_chosen: int = state.get("num_chosen", 0)
        self._lock = threading.Lock()
        self._choose()  # for its errors alone

    def groups(self) -> Iterator[Group]:
        """The groups, numbered in the order of their choice."""
        for number, index in sorted(self.chosen.items()):
            yield Group(self.prompts[index], id=number)
        while True:
            with self._lock:
                first = self.num_chosen
                chosen = self._choose()
                for number, prompt in enumerate(chosen, first):
                    self.chosen[number] = prompt.index
                self.num_chosen += len(chosen)
            for number, prompt in enumerate(chosen, first):
                yield Group(prompt, id=number)

    def _choose(self) -> list[Prompt]:
        """The prompts of the next `batch_size` groups.

        The generator is seeded by their number, so that a resumed run chooses alike.
        """
        config = self.config
        order_fn: Any = config.order_fn
        rng = random.Random(f"{config.seed} {self.num_chosen}")
        with naming_function("order_fn"):
            prompts = [*self.prompts.values()]
            chosen = order_fn(prompts, self.history, config.batch_size, rng)
        with naming(f"order_fn must return {config.batch_size} of the prompts that it gets"):
            is_known = [self.prompts.get(prompt.index) is prompt for prompt in chosen]
            if len(chosen) != config.batch_size or not all(is_known):
                raise ValueError(f"it returned {len(chosen)} of which {sum(is_known)} are known")
        return list(chosen)

    def add_to_history(self, groups: list[Group]) -> None:
        """Add the rewards of groups that ended, trained or dropped."""
        with self._lock:
            for group in groups:
                self.chosen.pop(group.id, None)
                # Empty where rollouts failed, or no function gave a number.
                rewards = [reward for reward in group.reward if not math.isnan(reward)]
                before = self.history.get(group.prompt.index, [])
                self.history[group.prompt.index] = [*before, rewards][-GROUPS_KEPT:]

    def state(self) -> dict[str, Any]:
        """What a run that goes on needs."""
        with self._lock:
            return {
                "history": dict(self.history),
                "chosen": dict(self.chosen),
                "num_chosen": self.num_chosen,
            }
