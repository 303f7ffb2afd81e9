"""Advantages of the config's own `advantage_fn`, checked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from config import TrainConfig, UserError
from rollouts.workers import described
from utils import naming


@contextmanager
def naming_function(name: str) -> Iterator[None]:
    """Turn an error of one of the config's functions into a UserError with the line where."""
    try:
        yield
    except torch.OutOfMemoryError:  # which has a cure of its own
        raise
    except Exception as error:
        raise UserError(f"{name} raised {described(error)}") from error


def own_advantages(rewards: Tensor, groups: Sequence[Any], config: TrainConfig) -> Tensor:
    """The advantages of `advantage_fn`; 0 for completions without a reward.

    Args:
        rewards: [groups, completions] float64, NaN for those without.
        groups: of `rollouts.group.Group`, with their rewards.
        config: `advantage_fn`.

    Raises:
        UserError: it fails, or gives no finite numbers in the shape of the rewards.
    """
    advantage_fn: Any = config.advantage_fn
    with naming_function("advantage_fn"):
        advantages = advantage_fn(rewards, groups)

    has_reward = ~rewards.isnan()
    with naming(f"advantage_fn must return finite numbers {list(rewards.shape)}"):
        if advantages.shape != rewards.shape or not advantages[has_reward].isfinite().all():
            raise ValueError(f"it returned {advantages}")
    return torch.where(has_reward, advantages, 0.0)
