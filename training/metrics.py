"""The metrics of a batch, from its tokens and its groups."""

import math
import statistics
import sys
from collections import Counter, defaultdict
from typing import Any

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
LOSS_SUMS = ("kl", "clip_ratio/low", "clip_ratio/high", "loss/")  # as the sums of a loss begin
MAX_SERVERS = 1 << 15  # as many as int16 has numbers for

# By a server's number the mean of |log p trainer - log p server|, nats, over the tokens that it
# sampled with the current policy, before the batch's first update: numerics alone.
Gaps = dict[int, float]


class TokenSums:
    """Sums over a batch's trained tokens, on the device until `metrics`.

    Of Δ = trainer - sampler log-prob (nats) they are |Δ|, k3 of Δ, which estimates
    KL(server || trainer), and w = exp(Δ), whose effective sample size is (Σw)² / NΣw².
    """

    def __init__(self, device: torch.device):
        # In float64, as float32 counts to 2^24.
        self.totals: dict[str, Any] = defaultdict(float)
        self.max_gap = torch.zeros((), device=device)
        # The sum of |Δ|, and of tokens that train, by their number in `MicroBatch.servers`.
        self.by_server = torch.zeros(2, MAX_SERVERS, dtype=torch.float64, device=device)

    def add(
        self, loss_sums: dict[str, Tensor], entropy: Tensor, trainer_logprobs: Tensor,
        micro_batch: MicroBatch,
    ) -> None:  # fmt: skip
        """Count a micro-batch in.

        Args:
            loss_sums: 0-d sums over tokens, by name: `loss_sum`, and those that came with it.
            entropy: [N], nats.
            trainer_logprobs: [N], nats, before the batch's first update, where they are kept; else
                of this forward.
            micro_batch: with the server's log-probs.
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
        sums |= {"tokens": mask.sum(), "weight": weight.sum(), "square": weight.square().sum()}
        for name, value in sums.items():
            self.totals[name] += value.detach().double()

        self.max_gap = torch.maximum(self.max_gap, distance.max())
        columns = torch.stack([distance, mask]).double()
        self.by_server.index_add_(1, micro_batch.servers.long(), columns)

    def end_update(self, divisor: float) -> None:
        """Add to `loss` the `loss_sum` of the rows since the last update, over `divisor`."""
        self.totals["loss"] += self.totals.pop("loss_sum") / divisor

    def metrics(self) -> tuple[dict[str, float], Gaps]:
        """Means over all ranks' tokens, and mean |Δ| by server. Collective.

        Servers are compared by tokens of the current policy, if they have `MIN_COMPARED` of them.
        """
        # A rank may lack a name, or have another order: a loss gives sums as it likes.
        totals: Any = Counter()
        for of_rank in gather_objects({name: float(value) for name, value in self.totals.items()}):
            totals.update(of_rank)
        dist.all_reduce(self.max_gap, dist.ReduceOp.MAX)
        dist.all_reduce(self.by_server)

        num_trained_tokens = max(totals.pop("tokens", 0.0), 1)
        metrics = {name: value / num_trained_tokens for name, value in totals.items()}
        metrics["loss"] = totals["loss"]  # of the batch
        metrics["sampling/sampling_logp_difference/max"] = self.max_gap.item()
        square = max(metrics.pop("square", 0.0), 1e-30)
        metrics["sampling/effective_sample_size"] = metrics.pop("weight", 0.0) ** 2 / square

        distances, counts = self.by_server  # 0 stands for the tokens of older policies
        stale, *current = (distances / counts).tolist()  # NaN without tokens
        num_current = counts[1:].sum()
        metrics["sampling/current_logp_difference"] = (distances[1:].sum() / num_current).item()
        metrics["sampling/stale_logp_difference"] = stale
        metrics["sampling/current_share"] = (num_current / num_trained_tokens).item()
        compared = (counts[1:] >= MIN_COMPARED).nonzero().flatten().tolist()
        return metrics, {server: current[server] for server in compared}


def check_loss(loss: Tensor, sums: dict[str, Tensor]) -> None:
    """Raise a TypeError where a loss is no scalar of log-probs, or a sum no known scalar."""
    if loss.ndim > 0 or not loss.requires_grad:
        raise TypeError(f"it must return a scalar of logprobs first, and returned {loss}")
    for name, value in sums.items():
        if value.ndim > 0 or not name.startswith(LOSS_SUMS):
            names = ", ".join(LOSS_SUMS)
            raise TypeError(f"it must return scalar sums named {names}..., not {name}")


def batch_metrics(groups: list[Group], version: int, config: TrainConfig) -> dict[str, float]:
    """Rewards, lengths, staleness and times of a batch that trained policy `version`."""
    metrics = reward_means(groups, config)
    values: dict[str, list[float]] = defaultdict(list)  # of groups and completions, by metric
    for group in groups:
        rewards = group.valid_rewards
        found: dict[str, Any] = {
            "reward_std": [statistics.pstdev(rewards)] if rewards else [],
            "frac_reward_zero_std": [not can_teach(group, config)] if rewards else [],
            "advantages/mean_abs": map(abs, group.advantages),
            "advantages/share_positive": [each > 0 for each in group.advantages],
            "completions/different": [len(set(group.texts)) / len(group.completions)],
            "completions/mean_length": group.lengths,
            "completions/clipped_ratio": [each.finish_reason in CUT for each in group.completions],
            "completions/weight_versions": map(len, group.versions),
            "completions/segments": map(len, group.segments),
            "staleness/mean": [version - min(each, default=version) for each in group.versions],
            "staleness/in_flight": [group.finished_version - group.started_version],
            "staleness/in_queue": [version - group.finished_version],
        }
        if group.prompt.set:
            place = f"sets/{group.prompt.set}"
            found |= {f"{place}/reward": rewards, f"{place}/mean_length": group.lengths}
            metrics[f"{place}/groups"] = metrics.get(f"{place}/groups", 0) + 1
        for name, of_group in found.items():
            values[name] += of_group
        for completion in group.completions:
            for name, value in completion.info.items():
                # True counts as 1.
                if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
                    values[f"info/{name}"].append(float(value))

    for name, of_group in values.items():
        metrics[name] = mean(of_group)
    metrics["advantages/max_abs"] = max(values["advantages/mean_abs"], default=math.nan)
    metrics["staleness/max"] = float(max(values["staleness/mean"]))
    metrics["time/generate_s"] = max(group.sampled_s for group in groups)
    metrics["time/generate_s"] -= min(group.started_s for group in groups)
    metrics["time/reward_s"] = sum(group.scored_s - group.sampled_s for group in groups)
    return metrics
