"""The metrics of a batch, from its tokens and its groups."""

import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from config import TrainConfig
from rollouts.group import CUT, Group, can_teach
from rollouts.scoring import mean, reward_means
from training.batching import MicroBatch
from training.mismatches import CompletionSums, Gaps
from utils import over_ranks
from vllm_client import MAX_SERVERS

MIN_COMPARED = 32  # tokens by which a server is compared with the trainer: as many as a probe has


class TokenSums:
    """Sums over a batch's trained tokens, on the device until `metrics`.

    Of Δ = trainer - sampler log-prob (nats) they are |Δ|, k3 of Δ, which estimates
    KL(server || trainer), and w = exp(Δ), whose effective sample size is (Σw)² / NΣw².
    """

    def __init__(self, device: torch.device):
        self.per_token: dict[str, Tensor] = {}  # become means over tokens
        names = ("loss", "tokens", "weight", "weight_square")
        zero = torch.zeros((), dtype=torch.float64, device=device)  # float32 counts to 2^24
        self.totals = {name: zero.clone() for name in names}
        self.max_gap = torch.zeros((), device=device)
        self.by_completion = CompletionSums()
        # Sums of |Δ|, and tokens: at 0 of older policies, at 1 + n of current tokens of server n.
        self.by_server = torch.zeros(2, 1 + MAX_SERVERS, dtype=torch.float64, device=device)

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
            self.per_token[name] = self.per_token.get(name, 0.0) + value.detach().double()

        self.totals["tokens"] += mask.sum()
        self.totals["weight"] += weight.sum()
        self.totals["weight_square"] += weight.square().sum()
        self.max_gap = torch.maximum(self.max_gap, distance.max())
        if compares_servers:
            distances_and_counts = torch.stack([distance, mask]).to(self.by_server.dtype)
            self.by_server.index_add_(1, micro_batch.servers.long(), distances_and_counts)
            self.by_completion.add(micro_batch.rollouts, distance, mask)

    def metrics(self) -> tuple[dict[str, float], Gaps]:
        """Means over all ranks' tokens, and mean |Δ| by server and completion. Collective.

        Servers are compared by tokens of the current policy, if they have `MIN_COMPARED` of them.
        """
        dist.all_reduce(self.by_server)
        gaps, counts = self.by_server.tolist()
        num_current = sum(counts[1:])
        totals = over_ranks(self.totals)
        num_tokens = max(totals["tokens"], 1)

        metrics = {name: value / num_tokens for name, value in over_ranks(self.per_token).items()}
        metrics["loss"] = totals["loss"]
        metrics["sampling/current_logp_difference"] = ratio(sum(gaps[1:]), num_current)
        metrics["sampling/stale_logp_difference"] = ratio(gaps[0], counts[0])
        metrics["sampling/current_share"] = num_current / max(sum(counts), 1)
        largest = {"sampling/sampling_logp_difference/max": self.max_gap}
        metrics |= over_ranks(largest, dist.ReduceOp.MAX)
        squares = max(num_tokens * totals["weight_square"], 1e-30)
        metrics["sampling/effective_sample_size"] = totals["weight"] ** 2 / squares

        gap_of_server = {}
        for place in range(1, len(gaps)):
            if counts[place] >= MIN_COMPARED:
                gap_of_server[place - 1] = gaps[place] / counts[place]
        return metrics, Gaps(gap_of_server, self.by_completion.means())


def ratio(total: float, count: float) -> float:
    """total / count, NaN of nothing."""
    return total / count if count else math.nan


def batch_metrics(groups: list[Group], version: int, config: TrainConfig) -> dict[str, float]:
    """Rewards, lengths, staleness and times of a batch that trained policy `version`."""
    rewards = torch.tensor([group.reward for group in groups], dtype=torch.float64)
    deviations = rewards - rewards.nanmean(dim=1, keepdim=True)
    spread = deviations.square().nanmean(dim=1).sqrt()  # NaN in groups without a reward
    rewarded = [groups[number] for number in spread.isfinite().nonzero()[:, 0].tolist()]

    num_groups = len(groups)
    num_without_spread = sum(not can_teach(group, config) for group in rewarded)
    versions_in_flight = [group.finished_version - group.started_version for group in groups]
    versions_in_queue = [version - group.finished_version for group in groups]
    first_started_s = min(group.started_s for group in groups)
    return {
        **reward_means(groups, config),
        "reward_std": spread.nanmean().item(),
        "frac_reward_zero_std": ratio(num_without_spread, len(rewarded)),
        **completion_metrics(groups, version),
        **set_metrics(groups),
        **advantage_metrics(groups),
        **info_metrics(groups),
        "staleness/in_flight": sum(versions_in_flight) / num_groups,
        "staleness/in_queue": sum(versions_in_queue) / num_groups,
        "time/generate_s": max(group.sampled_s for group in groups) - first_started_s,
        "time/reward_s": sum(group.scored_s - group.sampled_s for group in groups),
    }


def advantage_metrics(groups: list[Group]) -> dict[str, float]:
    """How large a batch's advantages are, before the weights of stale tokens."""
    advantages: list[float] = []
    for group in groups:
        advantages += group.advantages
    sizes = [abs(advantage) for advantage in advantages]
    return {
        "advantages/mean_abs": mean(sizes),
        "advantages/max_abs": max(sizes, default=math.nan),
        "advantages/share_positive": mean([float(advantage > 0) for advantage in advantages]),
    }


def info_metrics(groups: list[Group]) -> dict[str, float]:
    """The mean of each number that environments put into `info`, over those that are finite."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for completion in group.completions:
            for name, value in completion.info.items():
                # True counts as 1.
                if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
                    values.setdefault(name, []).append(float(value))
    return {f"info/{name}": sum(found) / len(found) for name, found in values.items()}


def set_metrics(groups: list[Group]) -> dict[str, float]:
    """The mean reward and length of each of several data sets, and its number of groups."""
    sets: dict[str, list[Group]] = {}
    for group in groups:
        if group.prompt.set:
            sets.setdefault(group.prompt.set, []).append(group)

    metrics = {}
    for name, of_set in sets.items():
        rewards = torch.tensor([group.reward for group in of_set], dtype=torch.float64)
        lengths = [length for group in of_set for length in group.lengths]
        metrics[f"sets/{name}/reward"] = rewards.nanmean().item()
        metrics[f"sets/{name}/mean_length"] = sum(lengths) / len(lengths)
        metrics[f"sets/{name}/groups"] = float(len(of_set))
    return metrics


def completion_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """Lengths and staleness of a batch's completions."""
    lengths = []
    staleness = []
    num_versions = 0
    num_clipped = 0
    num_segments = 0
    shares_different = []
    for group in groups:
        lengths += group.lengths
        shares_different.append(len(set(group.texts)) / len(group.completions))
        for versions in group.versions:
            oldest = versions[0] if versions else version
            staleness.append(version - oldest)
            num_versions += len(versions)
        for completion in group.completions:
            num_clipped += completion.finish_reason in CUT
        num_segments += sum(map(len, group.segments))

    num_completions = len(lengths)
    return {
        "staleness/mean": sum(staleness) / num_completions,
        "staleness/max": float(max(staleness)),
        "completions/mean_length": sum(lengths) / num_completions,
        "completions/clipped_ratio": num_clipped / num_completions,
        "completions/weight_versions": num_versions / num_completions,
        "completions/segments": num_segments / num_completions,
        "completions/different": mean(shares_different),
    }
