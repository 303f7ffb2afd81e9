"""GRPO (DeepSeekMath, arXiv:2402.03300) on plain torch.distributed, with rollouts from vLLM servers.

    torchrun --nproc_per_node=N train.py [recipes/x.py] [--field value ...]

In reading order: advantages, the loss and its corrections, the rows of a batch, one step, the loop (`main`).
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainConfig, UserError, parse_args
from prefix_attention import PackedBatch, num_packed_tokens, pack
from rollouts.data import Prompt, joined_images
from rollouts.stream import Group, Rollouts
from training.checkpoints import Checkpoints, find_checkpoint, locked, read_state
from training.logs import RunLog, TokenSums
from training.model import (
    build_optimizer,
    build_policy,
    build_reference,
    share_prefixes,
    token_logprobs,
    with_bf16,
)
from utils import (
    Stopped,
    exits,
    is_main,
    naming,
    process_group,
    scatter_objects,
    stop_signals,
    timed,
)
from vllm_client import Completion, ServerError, Span
from weights.publish import full_tensor

LOSS_SUMS = (
    "kl",
    "clip_ratio/low",
    "clip_ratio/high",
)  # sums over tokens that a loss_fn may return, besides loss/...
MAX_LOG_RATIO = 20.0  # nats: an exp that overflows would give a finite loss a gradient of NaN

# -- Advantages --------------------------------------------------------------------------------------------------------


def compute_advantages(rewards: Tensor, scale: str = "group") -> Tensor:
    """Group-relative advantages, (r - mean of the group) / (std + 1e-4).

    Args:
        rewards: [num_groups, num_generations], of a floating type; NaN where a completion has no valid reward.
        scale: `group` divides by the group's own standard deviation (unbiased), `batch` by that of all rewards,
            `none` by nothing (Dr. GRPO, arXiv:2503.20783).

    Returns:
        Same shape and type; 0 where the reward is NaN and in groups with a single valid reward.
    """
    valid = ~rewards.isnan()
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale == "none":
        return centred.nan_to_num(0.0)
    if scale == "batch":
        std = rewards[valid].std() if valid.sum() > 1 else rewards.new_zeros(())
    else:
        degrees = (valid.sum(dim=1, keepdim=True) - 1).clamp(min=1)
        std = (centred.nan_to_num(0.0).square().sum(dim=1, keepdim=True) / degrees).sqrt()
    return (centred / (std + 1e-4)).nan_to_num(0.0)


def set_advantages(groups: list[Group], config: TrainConfig) -> None:
    """Fill in the advantages of groups that have rewards: of a whole batch where `config.weighs_whole_batch`."""
    # Otherwise group by group: in one tensor, rounding would depend on which groups arrived together.
    parts = [groups] if config.weighs_whole_batch else [[group] for group in groups]
    advantage_fn: Any = config.advantage_fn or (
        lambda rewards, _: compute_advantages(rewards, config.scale_rewards)
    )
    for part in parts:
        rewards = torch.tensor([group.reward for group in part], dtype=torch.float64)
        with naming(
            f"advantage_fn must return finite numbers [{len(part)}, {config.num_generations}]"
        ):
            advantages = advantage_fn(rewards.clone(), part)
            if (
                advantages.shape != rewards.shape
                or not (advantages.isfinite() | rewards.isnan()).all()
            ):
                raise ValueError(f"it returned {advantages}")
        for group, of_group in zip(
            part, advantages.where(~rewards.isnan(), 0.0).tolist(), strict=True
        ):
            group.advantages = of_group


# -- The loss and its corrections --------------------------------------------------------------------------------------


def completion_sums(values: Tensor, completion: Tensor) -> Tensor:
    """For each token, the sum of `values` [N] over all tokens of its completion (`completion` [N]); differentiable."""
    numbers, place = completion.unique(return_inverse=True)
    return values.new_zeros(len(numbers)).index_add(0, place, values)[place]


def bounded_log_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """log p / q [N] of two log-probs [N], nats, within ±`MAX_LOG_RATIO`; 0 on masked tokens, whatever they hold."""
    return (
        (logprobs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).where(mask > 0, 0.0)
    )  # 0 times infinity is NaN


def grpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor, mask: Tensor,
    completion: Tensor, config: TrainConfig,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The unnormalized policy loss of one micro-batch: a sum over its completion tokens.

    The ratio ρ is exp(logprobs - old_logprobs); for importance_level sequence it is its geometric mean over the
    completion, with the gradient of the token's own log-prob (GSPO-token, arXiv:2507.18071). A token's loss is
    -min(ρA, clip(ρ, 1-ε, 1+ε_high)·A), with ρ ≤ δ in the first term (two-sided clip, arXiv:2505.07291), or for cispo
    (arXiv:2506.13585) -sg(clip(ρ))·A·logprobs. To it come β·k3, k3 = exp(ref - logprobs) - (ref - logprobs) - 1, or
    β·ρ·k3 for kl_gradient reverse. For loss_type grpo it is divided by the trained tokens of its completion. The caller
    divides the gradient of the sum over all micro-batches by `loss_normalizer`, once.

    Args:
        logprobs: [N], one per completion token, nats, under the policy; the gradient goes through them alone.
        old_logprobs: [N], nats: what the ratio is taken against.
        ref_logprobs: [N], nats, under the reference; may be None where config.beta is 0.
        advantages: [N].
        mask: [N], 1 on tokens that train, 0 elsewhere; any type.
        completion: [N] int64, which completion each token belongs to. Micro-batches split one only between
            segments, and where no loss looks at the others (`TrainConfig.weighs_whole_completions`).
        config: loss_type, importance_level, epsilon, epsilon_high, delta, beta, kl_gradient.

    Returns:
        The loss sum, 0-d, and 0-d sums over tokens for the metrics: `clip_ratio/low`, `clip_ratio/high`, and `kl`
        (nats) where config.beta is above 0.
    """
    mask = mask.to(logprobs.dtype)
    num_tokens = completion_sums(mask, completion).clamp(min=1)
    log_ratio = bounded_log_ratio(logprobs, old_logprobs, mask)
    token_ratio = ratio = log_ratio.exp()
    if (
        config.importance_level == "sequence"
    ):  # a token's gradient is its own: a correction may give others weight 0
        mean = completion_sums(log_ratio.detach(), completion) / num_tokens
        ratio = (mean + log_ratio - log_ratio.detach()).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.loss_type == "cispo":
        per_token = -clipped.detach() * advantages * logprobs
    else:
        bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
        per_token = -torch.minimum(bounded * advantages, clipped * advantages)
    sums = {
        "clip_ratio/low": ((ratio < 1 - config.clip_low) & (advantages < 0)).to(mask.dtype) @ mask,
        "clip_ratio/high": ((ratio > 1 + config.clip_high) & (advantages > 0)).to(mask.dtype)
        @ mask,
    }
    if config.beta > 0:
        assert ref_logprobs is not None
        log_gap = bounded_log_ratio(ref_logprobs, logprobs, mask)
        k3 = log_gap.exp() - log_gap - 1
        per_token = per_token + config.beta * (
            k3 if config.kl_gradient == "forward" else token_ratio * k3
        )
        sums["kl"] = k3.detach() @ mask
    per_token = per_token.where(mask > 0, 0.0)
    if config.loss_type == "grpo":
        per_token = per_token / num_tokens
    return per_token.sum(), sums


def loss_normalizer(lengths: list[int], config: TrainConfig) -> float:
    """What the summed gradient is divided by, at least 1; `lengths` are the trained tokens of each completion.

    grpo: the completions. dr_grpo: completions x max_completion_len. bnpo, dapo, cispo: the tokens.
    """
    if config.loss_type == "grpo":
        return max(len(lengths), 1)
    if config.loss_type == "dr_grpo":
        return max(len(lengths), 1) * config.max_completion_len
    return max(sum(lengths), 1)


def off_policy_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    completion: Tensor,
    config: TrainConfig,
) -> Tensor:
    """Bounded importance weights p(trainer) / p(server) on the advantages; 1 where config.old_logprobs is `sampler`.

    w is exp(old_logprobs - sampler_logprobs) of the token; `sequence` takes the product over its completion (unbiased
    below the cap), `geometric` the geometric mean. `truncate` (TIS), `sequence` and `geometric` give min(w, cap);
    `mask` (IcePop, arXiv:2510.18855), `sequence_mask` and `geometric_mask` give w within [floor, cap] and 0 outside;
    `none` gives 1. Tensors are as for `grpo_loss`, [N].
    """
    level, _, _ = config.off_policy_correction.partition("_")
    if config.old_logprobs == "sampler" or level == "none":
        return torch.ones_like(old_logprobs)
    log_weights = bounded_log_ratio(old_logprobs, sampler_logprobs, mask)
    if level in ("sequence", "geometric"):
        log_weights = completion_sums(log_weights, completion)
    if level == "geometric":
        log_weights = log_weights / completion_sums(mask.to(log_weights.dtype), completion).clamp(
            min=1
        )
    weights = log_weights.clamp(max=MAX_LOG_RATIO).exp()
    if not config.off_policy_correction.endswith("mask"):
        return weights.clamp(max=config.correction_cap)
    return weights.where(
        (weights >= config.correction_floor) & (weights <= config.correction_cap), 0.0
    )


# -- The rows of a batch -----------------------------------------------------------------------------------------------


@dataclass
class MicroBatch:
    """One forward and what the loss needs for each of its N completion tokens; tensors are [N] float32."""

    packed: PackedBatch
    advantages: Tensor
    mask: Tensor  # 1 on tokens that train, 0 elsewhere
    sampler_logprobs: Tensor  # nats, the server's
    servers: Tensor  # int16: 1 + the server's number where the current policy sampled the token, 0 where an older did
    images: dict[str, Tensor] = field(
        default_factory=dict
    )  # those of the row's prompts, from `joined_images`
    ref_logprobs: Tensor | None = None  # nats, of `reference_urls`
    old_logprobs: Tensor | None = (
        None  # nats, the policy's before the first of several updates, on its device
    )

    def to(self, device: torch.device) -> Self:
        """The same micro-batch on `device`."""
        moved: Any = {
            n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor | PackedBatch)
        }
        return replace(
            self, **moved, images={name: value.to(device) for name, value in self.images.items()}
        )


def row_tokens(groups: list[Group], config: TrainConfig) -> int:
    """Positions of the smallest row that holds all groups."""
    with_images = {number for number, group in enumerate(groups) if group.prompt.images}
    return num_packed_tokens(
        [group.sequences for group in groups], config.share_prefix, apart=with_images
    )


def trained_lengths(groups: list[Group], config: TrainConfig) -> list[int]:
    """How many tokens of each completion train: none without a reward, or where truncation masks them."""
    masks_cut = config.mask_truncated_completions
    return [
        0 if math.isnan(reward) or (masks_cut and c.finish_reason == "length") else c.num_sampled
        for group in groups  # which need not have been scored
        for c, reward in zip(
            group.completions, group.reward or [0.0] * len(group.completions), strict=True
        )
    ]


def micro_batches(groups: list[Group], max_tokens: int, config: TrainConfig) -> list[MicroBatch]:
    """Groups packed into rows of at most `max_tokens`, with what their tokens need for the loss."""
    segments = [segment for group in groups for segment in group.segments]
    of_segments = torch.tensor([len(segment.token_ids) for segment in segments])
    sizes = torch.tensor(
        [sum(len(s.token_ids) for s in c.segments) for group in groups for c in group.completions]
    )
    trains = torch.tensor(trained_lengths(groups, config)) > 0
    num_old = torch.tensor(
        [segment.start_of(group.trained_version) for group in groups for segment in group.segments]
    )
    marks = [mark for group in groups for _ in group.segments for mark in (0, 1 + group.server)]
    sizes_by_age = torch.stack(
        [num_old, of_segments - num_old], 1
    ).flatten()  # older policies' tokens come first
    tokens = {
        "advantages": torch.tensor([a for group in groups for a in group.advantages])
        .float()
        .repeat_interleave(sizes),
        "mask": (
            trains.repeat_interleave(sizes) & torch.cat([segment.loss_mask for segment in segments])
        ).float(),
        "sampler_logprobs": torch.cat([segment.sampler_logprobs for segment in segments]),
        "servers": torch.tensor(marks, dtype=torch.int16).repeat_interleave(sizes_by_age),
    }
    if groups[0].ref_logprobs:
        tokens["ref_logprobs"] = torch.cat(
            [values for group in groups for values in group.ref_logprobs]
        )
    batches = []
    with_images = {number for number, group in enumerate(groups) if group.prompt.images}
    for row in pack(
        [group.sequences for group in groups], max_tokens, config.share_prefix, apart=with_images
    ):
        of_row: Any = {name: values[row.index] for name, values in tokens.items()}
        prompts = [groups[number].prompt for number in row.prompts if number is not None]
        batches.append(MicroBatch(row, images=joined_images(prompts), **of_row))
    return batches


class Share(NamedTuple):
    """Rows that one rank trains next. With a `normalizer` an update follows, which divides the gradients by it."""

    micro_batches: list[MicroBatch]
    normalizer: float | None = None


class Dealer:
    """Packs the groups of a batch into rows, and deals the rows to the ranks. Only rank 0's is filled.

    A round deals one row to each rank, as FSDP2 and DDP need equally many backward passes on all. The largest row goes
    to the rank that has had the fewest tokens, and masked copies of the smallest row fill up the last round.
    """

    def __init__(self, num_ranks: int, config: TrainConfig):
        self.config = config
        self.loads = [0] * num_ranks  # tokens that each rank has had
        self.waiting: list[Group] = []  # groups of a row that still has room
        self.waiting_tokens = (
            0  # of these, each alone: where prefixes are shared, at least those of their row
        )
        self.rows: list[MicroBatch] = []  # not dealt yet
        self.lengths: list[int] = []  # tokens that train, of each completion of the mini-batch

    def missing_tokens(self) -> float:
        """How many more tokens fill a row on every rank; infinitely many where training needs the whole batch."""
        if self.config.updates_per_batch > 1 or self.config.weighs_whole_batch:
            return math.inf
        num_rows = len(self.loads) - len(self.rows)
        return num_rows * self.config.max_tokens_per_gpu - row_tokens(self.waiting, self.config)

    def deal(self, groups: list[Group], is_complete: bool) -> list[list[Share]]:
        """Each rank's shares of the groups that came, one per mini-batch; `is_complete`: they are the batch's last."""
        config = self.config
        size = config.batch_size // config.num_minibatches
        # With several mini-batches these groups are the whole batch, for which `missing_tokens` makes `take` wait.
        parts = [
            self._shares(groups[start : start + size], is_complete)
            for start in range(0, len(groups), size)
        ]
        if config.num_minibatches > 1 and config.loss_type in (
            "dapo",
            "cispo",
        ):  # a token weighs the same in each
            mean = loss_normalizer(trained_lengths(groups, config), config) / config.num_minibatches
            parts = [[share._replace(normalizer=mean) for share in part] for part in parts]
        return [list(of_rank) for of_rank in zip(*parts, strict=True)]

    def _shares(self, groups: list[Group], ends_update: bool) -> list[Share]:
        """Each rank's share of a mini-batch, or of the part of it that fills whole rounds."""
        config, num_ranks = self.config, len(self.loads)
        self.lengths += trained_lengths(groups, config)
        for group in groups:
            own_tokens = row_tokens([group], config)
            may_be_over = (
                not config.share_prefix
                or self.waiting_tokens + own_tokens > config.max_tokens_per_gpu
            )
            if (
                self.waiting
                and may_be_over
                and row_tokens([*self.waiting, group], config) > config.max_tokens_per_gpu
            ):
                self.rows += micro_batches(self.waiting, config.max_tokens_per_gpu, config)
                self.waiting, self.waiting_tokens = [], 0
            self.waiting.append(group)
            self.waiting_tokens += own_tokens
        normalizer = None
        if ends_update:  # Spread the waiting groups evenly over the rows that the round lacks.
            num_missing = num_ranks - len(self.rows) % num_ranks
            tokens_each = math.ceil(row_tokens(self.waiting, config) / num_missing)
            alone = [
                (prompt, [one])
                for prompt, every in (g.sequences for g in self.waiting)
                for one in every
            ]
            longest = max(
                num_packed_tokens([completion], config.share_prefix) for completion in alone
            )
            budget = min(max(tokens_each, longest), config.max_tokens_per_gpu)
            self.rows += micro_batches(self.waiting, budget, config)
            smallest = min(self.rows, key=lambda micro: micro.packed.num_tokens)
            filler = replace(smallest, mask=torch.zeros_like(smallest.mask))
            self.rows += [filler] * (-len(self.rows) % num_ranks)
            normalizer = loss_normalizer(self.lengths, config)
            self.waiting, self.waiting_tokens, self.lengths = [], 0, []
        dealt: list[list[MicroBatch]] = [[] for _ in self.loads]
        while len(self.rows) >= num_ranks:
            by_size = sorted(self.rows[:num_ranks], key=lambda micro: -micro.packed.num_tokens)
            by_load = sorted(range(num_ranks), key=lambda rank: self.loads[rank])
            for rank, micro in zip(by_load, by_size, strict=True):
                dealt[rank].append(micro)
                self.loads[rank] += micro.packed.num_tokens
            self.rows = self.rows[num_ranks:]
        return [Share(of_rank, normalizer) for of_rank in dealt]


def arriving_shares(rollouts: Rollouts, config: TrainConfig) -> Iterator[Share]:
    """This rank's shares of the next batch, each as soon as its groups have come. Collective: every rank iterates."""
    dealer = Dealer(dist.get_world_size(), config)
    is_complete = False
    while not is_complete:
        groups, is_complete = rollouts.take(dealer.missing_tokens())
        dealt = None
        if is_main():
            set_advantages(groups, config)
            dealt = dealer.deal(groups, is_complete)
        yield from scatter_objects(dealt)


# -- The step ----------------------------------------------------------------------------------------------------------


def train_batch(
    policy: Any, reference: Callable[..., Tensor] | None, optimizer: Any, scheduler: Any,
    shares: Iterable[Share], config: TrainConfig, device: torch.device,
) -> tuple[dict[str, float], dict[int, float]]:  # fmt: skip
    """Train one batch; returns metrics, and mean |trainer - server| by server. Collective: each rank has its shares.

    With one update it trains while it arrives; for several it is collected, to take the log-probs before the first.
    """
    loss_fn: Any = config.loss_fn or grpo_loss
    learning_rate = optimizer.param_groups[0]["lr"]
    token_sums = TokenSums(device)
    norms: list[float] = []
    if config.updates_per_batch > 1:
        shares = list(shares)
        kept = (
            [micro for share in shares for micro in share.micro_batches]
            if config.old_logprobs == "trainer"
            else []
        )
        for stored in kept:  # what the ratios of all updates are taken against
            micro = stored.to(device)
            with torch.no_grad():
                stored.old_logprobs = token_logprobs(policy, micro.packed, micro.images, config)
    for iteration in range(config.num_iterations):
        loss_sum = torch.zeros((), device=device)
        for share in shares:
            for stored in share.micro_batches:
                micro = stored.to(device)
                # DDP reduces gradients only in an update's last backward; FSDP2 and a single rank ignore this.
                policy.require_backward_grad_sync = (
                    share.normalizer is not None and stored is share.micro_batches[-1]
                )
                logprobs, entropy = token_logprobs(
                    policy, micro.packed, micro.images, config, return_entropy=True
                )
                trainer_logprobs = (
                    logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
                )
                old = (
                    micro.sampler_logprobs if config.old_logprobs == "sampler" else trainer_logprobs
                )
                weights = off_policy_weights(
                    old, micro.sampler_logprobs, micro.mask, micro.packed.completion, config
                )
                ref = reference(micro.packed, micro.images) if reference else micro.ref_logprobs
                loss, loss_sums = loss_fn(
                    logprobs,
                    old,
                    ref,
                    micro.advantages * weights,
                    micro.mask,
                    micro.packed.completion,
                    config,
                )
                loss.backward()
                loss_sum += loss.detach()
                # Servers are compared with the policy before the first update only, each token once.
                is_compared = iteration == 0 and (micro.old_logprobs is not None or not norms)
                servers = micro.servers if is_compared else None
                token_sums.add(
                    loss_sums,
                    entropy,
                    trainer_logprobs,
                    micro.sampler_logprobs,
                    micro.mask,
                    servers,
                )
            if share.normalizer is not None:
                norms.append(optimizer_step(policy, optimizer, scheduler, share.normalizer, config))
                token_sums.totals["loss"] += loss_sum / share.normalizer / config.updates_per_batch
                loss_sum = torch.zeros((), device=device)
    metrics, gaps = token_sums.metrics()
    return {
        "grad_norm": sum(norms) / len(norms),
        "skipped_steps": float(sum(not math.isfinite(norm) for norm in norms)),
        "learning_rate": learning_rate,
        **metrics,
    }, gaps


def optimizer_step(
    policy: nn.Module, optimizer: Any, scheduler: Any, normalizer: float, config: TrainConfig
) -> float:
    """Divide the gradients by `normalizer`, clip, step if they are finite; returns the unclipped norm. Collective."""
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    torch._foreach_div_(gradients, normalizer)
    norm = full_tensor(
        nn.utils.clip_grad_norm_(policy.parameters(), config.grad_norm or math.inf)
    ).item()
    if math.isfinite(norm):
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


# -- The loop ----------------------------------------------------------------------------------------------------------


def check_loss(config: TrainConfig) -> None:
    """Try the config's `loss_fn` on two tokens of log-probability -1 and advantage 1, or raise a UserError."""
    loss_fn: Any = config.loss_fn
    ones = torch.ones(2)
    for mask in (
        (ones, 0 * ones) if loss_fn else ()
    ):  # a row that fills up a round has masked tokens alone
        logprobs = (-ones).requires_grad_()
        ref = logprobs.detach() if config.has_reference else None
        with naming(
            f"loss_fn must return (a finite scalar of logprobs, sums named {', '.join(LOSS_SUMS)}, loss/...)"
        ):
            loss, sums = loss_fn(
                logprobs,
                logprobs.detach(),
                ref,
                ones,
                mask,
                torch.zeros(2, dtype=torch.long),
                config,
            )
            loss.backward()
            is_known = [
                v.ndim == 0 and (name in LOSS_SUMS or name.startswith("loss/"))
                for name, v in sums.items()
            ]
            if not loss.isfinite() or not all(is_known):
                raise ValueError(f"it returned {loss.item()} and {sums}")
            if not mask.any() and (logprobs.grad is None or logprobs.grad.any()):
                raise ValueError(f"tokens whose mask is 0 get the gradient {logprobs.grad}")


def check_advantages(prompts: list[Prompt], config: TrainConfig) -> None:
    """Try the config's `advantage_fn`, if any, on two prompts with one-token completions, or raise a UserError."""
    num = config.num_generations
    completions = [Completion([0], [-1.0], "stop", [Span(0, 0, 1)]) for _ in range(num)]
    reward = [float(number) for number in range(num)]
    rewards: Any = [[value] * len(config.reward_funcs) for value in reward]
    if config.advantage_fn and not config.rollout_fn:  # these completions lack its `info`
        set_advantages(
            [Group(prompt, completions, [""] * num, rewards, reward) for prompt in prompts[:2]],
            config,
        )


def main(config: TrainConfig) -> None:
    """Train; under torchrun on every rank. A UserError or ServerError in training is raised after the last save."""
    config = with_bf16(config)
    check_loss(config)
    checkpoint = find_checkpoint(config)
    resumed = read_state(checkpoint) if checkpoint else None
    with (
        process_group(config.collective_timeout) as device,
        locked(Path(config.output_dir)),
        closing(Rollouts(config, device, resumed)) as rollouts,
        stop_signals(rollouts.stop),
    ):
        if is_main():
            check_advantages(rollouts.prompts, config)
        torch.manual_seed(config.seed)
        policy = build_policy(config, device, rollouts.example, checkpoint)
        config = rollouts.config = share_prefixes(policy, config, rollouts.example)
        reference = build_reference(policy, config, device, rollouts.example)
        optimizer, scheduler = build_optimizer(
            policy, rollouts.num_steps * config.updates_per_batch, config
        )
        checkpoints = Checkpoints(config, policy, optimizer, scheduler, rollouts.processor)
        step, num_skipped = checkpoints.resume(checkpoint), 0
        with closing(RunLog(config, rollouts.num_steps, resumed)) as log, suppress(Stopped):
            rollouts.publish(policy, step)
            if step == 0:
                evaluated, held_out = rollouts.evaluate(0)
                log.step(0, evaluated, held_out=held_out)
            # `publish` lets groups be sampled and scored, in threads; `arriving_shares` takes, weighs and packs them.
            while step < rollouts.num_steps and num_skipped < config.max_skipped_steps:
                # Seed dropout per step, so that a resumed run repeats it.
                torch.manual_seed(hash((config.seed, step, dist.get_rank())))
                metrics: dict[str, float] = {"policy_version": step}
                with timed("time/step_s", metrics):
                    with timed("time/train_s", metrics):
                        shares = arriving_shares(rollouts, config)
                        trained, gaps = train_batch(
                            policy, reference, optimizer, scheduler, shares, config, device
                        )
                    rollouts.check(gaps)
                    batch = rollouts.end_batch()
                    step += 1
                    with timed("time/sync_s", metrics):
                        rollouts.publish(policy, step)
                num_skipped = (
                    num_skipped + 1 if trained["skipped_steps"] == config.updates_per_batch else 0
                )
                evaluated, held_out = rollouts.evaluate(step)
                log.step(step, metrics | trained | evaluated, batch, held_out)
                if config.save_steps and step % config.save_steps == 0:
                    checkpoints.save(step, rollouts.state() | log.state())
        checkpoints.finish(step, rollouts.state() | log.state(), is_last=step == rollouts.num_steps)
        if is_main() and rollouts.failure:
            raise rollouts.failure
        if is_main() and num_skipped >= config.max_skipped_steps:
            cure = "look at loss_fn" if config.loss_fn else "lower learning_rate"
            raise UserError(f"{num_skipped} steps in a row had no finite gradient: {cure}")


if __name__ == "__main__":
    sys.modules["train"] = sys.modules[
        "__main__"
    ]  # a recipe that imports `train`, and changes it, changes this module
    cure = "; lower max_tokens_per_gpu, or set gradient_checkpoint or use_fsdp"
    with exits({UserError: "", ServerError: "", torch.OutOfMemoryError: cure}):
        main(parse_args(sys.argv[1:]))
