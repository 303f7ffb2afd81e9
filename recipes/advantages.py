"""Advantages of other papers than GRPO's, for a config's `advantage_fn`.

Functions `f(rewards, groups) -> advantages`. `rewards` [num_groups, num_generations] float64 are
the weighted sums of the whole batch, NaN where a completion has no valid reward: it gets 0, and
counts in no mean. `groups` are the `rollouts.group.Group`s, in the same order.
"""

import math

import torch
from torch import Tensor

from rollouts.group import Group
from train import compute_advantages

EPS = 1e-4  # beside a standard deviation, as in `train.compute_advantages`


def rloo(rewards: Tensor, groups: list[Group]) -> Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740): r_i minus the mean of the group's others.

    A = r_i - Σ_{j≠i} r_j / (k - 1), which is k / (k - 1) times (r_i - mean), of the k valid rewards
    of a group; not scaled. 0 where there is only one.
    """
    num_valid = (~rewards.isnan()).sum(dim=1, keepdim=True)
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    return (centred * num_valid / (num_valid - 1).clamp(min=1)).nan_to_num(0.0)


def reinforce_plus_plus(rewards: Tensor, groups: list[Group]) -> Tensor:
    """REINFORCE++ with baseline (arXiv:2501.03262, eq. 6 and 7).

    A' = r - mean of its group, then A = (A' - mean(A')) / (std(A') + ε) over the whole batch. The
    paper adds a k2 loss towards the reference; `beta` adds k3.
    """
    return _normalized(rewards - rewards.nanmean(dim=1, keepdim=True))


def maxrl(rewards: Tensor, groups: list[Group]) -> Tensor:
    """Maximum likelihood RL (arXiv:2602.02710): advantages relative to the group's mean.

    A = (r - mean) / mean of the group, and 0 where the mean is not above 0. For rewards of 0 and 1.
    In expectation over groups of n, mean(A ∇log π) is Σ_{k<n} ∇pass@k / k, the gradient of the
    first n - 1 terms of log p = -Σ_k (1 - p)^k / k, where p is the probability to be right.
    """
    mean = rewards.nanmean(dim=1, keepdim=True)
    return ((rewards - mean) / mean).where(mean > 0, 0.0).nan_to_num(0.0)


def gdpo(rewards: Tensor, groups: list[Group]) -> Tensor:
    """GDPO (arXiv:2601.05242): each function normalized by group, the sum by batch.

    A_f = (r_f - mean) / (std + ε) in the group, for each function f; A' = Σ_f A_f, where all
    functions weigh the same, whatever `reward_weights` says; A = (A' - mean(A')) / (std(A') + ε)
    over the batch. None in a function, here NaN, adds 0.
    """
    by_function = torch.stack([group.rewards for group in groups]).unbind(dim=2)
    advantages = torch.stack([compute_advantages(column) for column in by_function])
    return _normalized(advantages.sum(dim=0).where(~rewards.isnan(), math.nan))


def _normalized(values: Tensor) -> Tensor:
    """Values normalized over all that are not NaN.

    (value - mean) / (std + ε), with the unbiased standard deviation; 0 where the value is NaN.
    """
    valid = values[~values.isnan()]
    std = valid.std() if len(valid) > 1 else 0.0
    return ((values - valid.mean()) / (std + EPS)).nan_to_num(0.0)
