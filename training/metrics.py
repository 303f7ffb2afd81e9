"""The metrics of a batch, from its tokens and its groups."""

import math
import statistics
import sys
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from config import TrainConfig
from rollouts.custom import can_teach
from rollouts.group import CUT, Group
from rollouts.scoring import mean, reward_means
from training.batching import MicroBatch
from utils import gather_objects

MIN_COMPARED = 32  # tokens by which a server is compared with the trainer: as many as a probe has
LOSS_SUMS = ("kl", "clip_ratio/low", "clip_ratio/high")  # what a loss may name, besides loss/...


class Gaps(NamedTuple):
    """Means of |log p trainer - log p server|, nats a token, before the batch's first update."""

    by_server: dict[int, float]  # over tokens that the current policy sampled: numerics alone
    by_completion: dict[int, float]  # over all that train, with staleness; by `rollout_number`


class TokenSums:
    """Sums over a batch's trained tokens, on the device until `metrics`.

    Of Δ = trainer - sampler log-prob (nats) they are |Δ|, k3 of Δ, which estimates
    KL(server || trainer), and w = exp(Δ), whose effective sample size is (Σw)² / NΣw².
    """

    def __init__(self, device: torch.device):
        # In float64, as float32 counts to 2^24.
        self.per_token: dict[str, Any] = defaultdict(float)  # become means over tokens
        self.totals: dict[str, Any] = defaultdict(float)
        self.max_gap = torch.zeros((), device=device)
        # Of each token its server, as in a `MicroBatch`, its completion, |Δ|, and 1 if it trains.
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self.compared = [(nothing, nothing, nothing, nothing)]

    def add(
        self, loss_sums: dict[str, Tensor], entropy: Tensor, trainer_logprobs: Tensor,
        micro_batch: MicroBatch, compares_servers: bool,
    ) -> None:  # fmt: skip
        """Count a micro-batch in.

        Args:
            loss_sums: 0-d sums over tokens that the loss returned, by name.
            entropy: [N], nats.
            trainer_logprobs: [N], nats, before the batch's first update, where they are kept; else
                of this forward.
            micro_batch: with the server's log-probs.
            compares_servers: count it for each server and completion, too.
        """
        mask = micro_batch.mask
        gap = (trainer_logprobs - micro_batch.sampler_logprobs).where(mask > 0, 0.0)
        distance = gap.abs()
        weight = gap.exp() * mask

        sums = {
            **loss_sums,
            "entropy": entropy @ mask.to(entropy.dtype),
            "sampling/sampling_logp_difference/mean": distance.sum(),
            "sampling/kl": (gap.expm1() - gap).sum(),
        }
        for name, value in sums.items():
            self.per_token[name] += value.detach().double()

        self.totals["tokens"] += mask.sum().double()
        self.totals["weight"] += weight.sum().double()
        self.totals["weight_square"] += weight.square().sum().double()
        self.max_gap = torch.maximum(self.max_gap, distance.max())
        if compares_servers:
            self.compared.append((micro_batch.servers, micro_batch.rollouts, distance, mask))

    def metrics(self) -> tuple[dict[str, float], Gaps]:
        """Means over all ranks' tokens, and mean |Δ| by server and completion. Collective.

        Servers are compared by tokens of the current policy, if they have `MIN_COMPARED` of them.
        """
        servers, completions, *columns = map(torch.cat, zip(*self.compared, strict=True))
        of_servers = over_ranks(sums_by(servers - 1, columns))
        of_completions = over_ranks(sums_by(completions, columns))
        per_token = over_ranks({name: float(value) for name, value in self.per_token.items()})
        totals = over_ranks({name: float(value) for name, value in self.totals.items()})
        dist.all_reduce(self.max_gap, dist.ReduceOp.MAX)

        num_tokens = max(totals["tokens"], 1)
        metrics = {name: value / num_tokens for name, value in per_token.items()}
        metrics["loss"] = totals["loss"]
        stale = of_servers.pop(-1, np.zeros(2))
        current = sum(of_servers.values(), np.zeros(2))
        metrics["sampling/current_logp_difference"] = ratio(*current)
        metrics["sampling/stale_logp_difference"] = ratio(*stale)
        metrics["sampling/current_share"] = ratio(current[1], max(current[1] + stale[1], 1))
        metrics["sampling/sampling_logp_difference/max"] = self.max_gap.item()
        squares = max(totals["weight_square"], 1e-30)
        metrics["sampling/effective_sample_size"] = totals["weight"] ** 2 / squares / num_tokens
        return metrics, Gaps(means(of_servers, MIN_COMPARED), means(of_completions, 1))


def check_loss(loss: Tensor, sums: dict[str, Tensor]) -> None:
    """Raise a TypeError where a loss is no scalar of log-probs, or a sum no known scalar."""
    if loss.ndim > 0 or not loss.requires_grad:
        raise TypeError(f"it must return a scalar of logprobs first, and returned {loss}")
    for name, value in sums.items():
        is_known = name in LOSS_SUMS or name.startswith("loss/")
        if value.ndim > 0 or not is_known:
            names = ", ".join(LOSS_SUMS)
            raise TypeError(f"it must return scalar sums named {names} or loss/..., not {name}")


def sums_by(keys: Tensor, columns: list[Tensor]) -> dict[int, np.ndarray]:
    """The sums [C] of C columns [N] over the tokens of each key [N]."""
    found, places = keys.unique(return_inverse=True)
    sums = torch.zeros(len(found), len(columns), dtype=torch.float64, device=keys.device)
    sums.index_add_(0, places, torch.stack(columns, dim=1).double())
    return dict(zip(found.tolist(), sums.cpu().numpy(), strict=True))


def over_ranks(values: dict[Any, Any]) -> dict[Any, Any]:
    """The sum over all ranks of each name's values. Collective.

    A rank may lack a name, or have another order: a loss gives sums as it likes.
    """
    totals: dict[Any, Any] = defaultdict(float)
    for of_rank in gather_objects(values):
        for name, value in of_rank.items():
            totals[name] = totals[name] + value
    return totals


def means(sums: dict[int, np.ndarray], least: float) -> dict[int, float]:
    """The mean |Δ| of each key with `least` tokens, from the sums of |Δ| and of tokens."""
    found = {}
    for key, (distance, count) in sums.items():
        if count >= least:
            found[key] = ratio(distance, count)
    return found


def ratio(total: float, count: float) -> float:
    """total / count, NaN of nothing."""
    return float(total / count) if count else math.nan


def batch_metrics(groups: list[Group], version: int, config: TrainConfig) -> dict[str, float]:
    """Rewards, lengths, staleness and times of a batch that trained policy `version`."""
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for name, of_group in group_values(group, version, config).items():
            values[name] += of_group

    metrics = {name: mean(found) for name, found in values.items()}
    metrics["advantages/max_abs"] = max(values["advantages/mean_abs"], default=math.nan)
    metrics["staleness/max"] = float(max(values["staleness/mean"]))
    for name, num_groups in Counter(group.prompt.set for group in groups).items():
        if name:
            metrics[f"sets/{name}/groups"] = float(num_groups)

    first_started_s = min(group.started_s for group in groups)
    metrics["time/generate_s"] = max(group.sampled_s for group in groups) - first_started_s
    metrics["time/reward_s"] = sum(group.scored_s - group.sampled_s for group in groups)
    return reward_means(groups, config) | metrics


def group_values(group: Group, version: int, config: TrainConfig) -> dict[str, list[Any]]:
    """Values of a group and of its completions, for the means of a batch."""
    values: dict[str, list[Any]] = {
        "reward_std": [],
        "frac_reward_zero_std": [],
        "advantages/mean_abs": list(map(abs, group.advantages)),
        "advantages/share_positive": [],
        "completions/different": [len(set(group.texts)) / len(group.completions)],
        "completions/mean_length": group.lengths,
        "completions/clipped_ratio": [],
        "completions/weight_versions": list(map(len, group.versions)),
        "completions/segments": list(map(len, group.segments)),
        "staleness/mean": [],
        "staleness/in_flight": [group.finished_version - group.started_version],
        "staleness/in_queue": [version - group.finished_version],
    }
    rewards = [reward for reward in group.reward if not math.isnan(reward)]
    if rewards:
        values["reward_std"].append(statistics.pstdev(rewards))
        values["frac_reward_zero_std"].append(not can_teach(group, config))
    for advantage in group.advantages:
        values["advantages/share_positive"].append(advantage > 0)
    if group.prompt.set:
        values[f"sets/{group.prompt.set}/reward"] = rewards
        values[f"sets/{group.prompt.set}/mean_length"] = group.lengths

    for versions in group.versions:
        values["staleness/mean"].append(version - min(versions, default=version))
    for completion in group.completions:
        values["completions/clipped_ratio"].append(completion.finish_reason in CUT)
        for name, value in completion.info.items():
            # True counts as 1.
            if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
                values.setdefault(f"info/{name}", []).append(float(value))
    return values
