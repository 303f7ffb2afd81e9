"""How far trainer and server differ, for the fleet of servers and for who reads completions."""

from typing import NamedTuple

import torch
from torch import Tensor

from utils import gather_objects


class Gaps(NamedTuple):
    """Means of |log p trainer - log p server|, nats a token, before the batch's first update."""

    by_server: dict[int, float]  # over tokens that the current policy sampled: numerics alone
    by_completion: dict[int, float]  # over all that train, with staleness; by `rollout_number`


class CompletionSums:
    """Sums over the tokens of each completion, until `means`."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, rollouts: Tensor, distance: Tensor, mask: Tensor) -> None:
        """Count a micro-batch in: [N] numbers of completions, |Δ|, and 1 on tokens that train."""
        self._parts.append((rollouts, distance, mask))

    def means(self) -> dict[int, float]:
        """The mean of each completion with tokens that train.

        Collective: a completion of several segments may be on several ranks.
        """
        totals: dict[int, tuple[float, float]] = {}
        for of_rank in gather_objects(self._sums()):
            for number, distance, count in of_rank:
                before = totals.get(number, (0.0, 0.0))
                totals[number] = (before[0] + distance, before[1] + count)
        return {number: distance / count for number, (distance, count) in totals.items() if count}

    def _sums(self) -> list[tuple[int, float, float]]:
        """The completions of this rank, with the sum and the number of their tokens."""
        if not self._parts:
            return []
        rollouts, distances, masks = map(torch.cat, zip(*self._parts, strict=True))
        numbers, places = rollouts.unique(return_inverse=True)
        sums = torch.zeros(2, len(numbers), dtype=torch.float64, device=distances.device)
        sums.index_add_(1, places, torch.stack([distances, masks]).double())
        return list(zip(numbers.tolist(), *sums.tolist(), strict=True))
