"""GRPO (DeepSeekMath, arXiv:2402.03300) on torch.distributed, with rollouts from vLLM servers.

    torchrun --nproc_per_node=N train.py [recipes/x.py] [--field value ...]

In reading order: advantages, the loss and its corrections, one step, the loop (`main`). A
micro-batch is one forward on this rank: a packed row, with columns of its tokens. Log-probs are the
policy's, or `sampler_` (the server's), `trainer_` and `old_` (the policy's before the batch's first
update), `ref_` (the reference's).
"""

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainConfig, UserError, parse_args
from rollouts.custom import naming_function, own_advantages
from rollouts.group import Batch, Group
from rollouts.rollouts import Rollouts
from training.batching import MicroBatch
from training.checkpoints import Checkpoints, run_folder
from training.logs import RunLog
from training.metrics import Gaps, TokenSums, check_loss
from training.model import (
    build_policy,
    build_reference,
    share_prefixes,
    token_logprobs,
    with_bf16,
)
from training.optimizer import build_optimizer
from utils import exits, process_group, stop_signals, timed
from vllm_client import ServerError
from weights.publish import full_tensor

MAX_SKIPPED_STEPS = 10  # in a row, without a finite gradient
MAX_LOG_RATIO = 20.0  # nats: an exp that overflows would give a finite loss a gradient of NaN

# -- Advantages ------------------------------------------------------------------------------------


def compute_advantages(rewards: Tensor, scale: str = "group") -> Tensor:
    """Group-relative advantages, (r - mean of the group) / (std + 1e-4).

    Args:
        rewards: [num_groups, num_generations], of a floating type; NaN where a completion has none.
            All of a batch, if `scale` is batch. Else they may be of any groups, and no group's
            result may depend on the others: `set_advantages` refuses that. An `advantage_fn` may.
        scale: `group` divides by the group's own standard deviation (unbiased), `batch` by that of
            all rewards, `none` by nothing (Dr. GRPO, arXiv:2503.20783).

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
        std = (centred.square().nansum(dim=1, keepdim=True) / degrees).sqrt()
    return (centred / (std + 1e-4)).nan_to_num(0.0)


def set_advantages(groups: list[Group], config: TrainConfig) -> None:
    """Fill in the advantages of a batch's groups: of all, if `config.advantages_need_batch`.

    Otherwise a group's are its own, as it may train before the others have come.

    Raises:
        UserError: `advantage_fn` gives no finite numbers in the shape of the rewards, or a changed
            `compute_advantages` looks at other groups where these may be missing.
    """
    rewards = torch.tensor([group.reward for group in groups], dtype=torch.float64)
    scale = config.scale_rewards
    if config.advantage_fn:
        advantages = own_advantages(rewards, groups, config)
    elif config.advantages_need_batch:
        advantages = compute_advantages(rewards, scale)
    else:
        others = torch.cat([rewards - 1, rewards + 2])  # made up: they must not matter
        among_others = compute_advantages(torch.cat([rewards, others]), scale)[: len(rewards)]
        # One by one, as rounding would depend on which groups arrived together.
        advantages = torch.cat([compute_advantages(one, scale) for one in rewards.split(1)])
        if not torch.allclose(among_others, advantages, equal_nan=True):
            raise UserError(
                "compute_advantages gives a group other advantages in its batch than alone: make it"
                " an advantage_fn, which gets whole batches"
            )
    for group, group_advantages in zip(groups, advantages.tolist(), strict=True):
        group.advantages = group_advantages


# -- The loss and its corrections ------------------------------------------------------------------


def completion_sums(values: Tensor, completion: Tensor) -> Tensor:
    """For each token, the sum of `values` over its completion; differentiable.

    Args:
        values: [N].
        completion: [N] int64, the completion of each token.
    """
    numbers, place = completion.unique(return_inverse=True)
    sums = values.new_zeros(len(numbers)).index_add(0, place, values)
    return sums[place]


def bounded_log_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """log p / q [N] of two log-probs [N], nats, within ±`MAX_LOG_RATIO`.

    It is 0 on masked tokens, whatever they hold: sums over a completion leave them out.
    """
    log_ratio = (logprobs - others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.where(mask > 0, 0.0)


def grpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor,
    mask: Tensor, completion: Tensor, config: TrainConfig,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The unnormalized policy loss of a micro-batch: a sum over tokens.

    A token's ratio is ρ = exp(logprobs - old_logprobs). Its loss:
    - -min(ρA, clip(ρ, 1-ε, 1+ε_high)·A), in whose first term ρ ≤ δ (arXiv:2505.07291);
    - for loss_type cispo (arXiv:2506.13585) -sg(clip(ρ))·A·logprobs;
    - for importance_level sequence ρ is its completion's geometric mean (GSPO, arXiv:2507.18071);
    - plus β·ρ·k3, or for kl_gradient forward β·k3, of the token's own ρ, with
      k3 = exp(ref - logprobs) - (ref - logprobs) - 1;
    - for loss_type grpo all of it is divided by the trained tokens of its completion.

    Args:
        logprobs: [N], one per completion token, nats, under the policy; they alone have a gradient.
        old_logprobs: [N], nats, the denominator of the ratio.
        ref_logprobs: [N], nats, under the reference; may be None where config.beta is 0.
        advantages: [N].
        mask: [N], 1 on tokens that train, 0 elsewhere; any type.
        completion: [N] int64, that of each token; whole if `config.loss_needs_completions`.
        config: loss_type, importance_level, epsilon, epsilon_high, delta, beta, kl_gradient.

    Returns:
        The loss, and sums over tokens: `clip_ratio/low`, `clip_ratio/high`, `kl` (nats); all 0-d.
    """
    mask = mask.to(logprobs.dtype)
    lengths = completion_sums(mask, completion).clamp(min=1)  # tokens that train
    log_ratio = bounded_log_ratio(logprobs, old_logprobs, mask)
    token_ratio = log_ratio.exp()
    ratio = token_ratio
    if config.importance_level == "sequence":  # with a gradient of each token's own
        mean = completion_sums(log_ratio.detach(), completion) / lengths
        ratio = (mean + log_ratio - log_ratio.detach()).exp()

    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)  # epsilon, epsilon_high
    if config.loss_type == "cispo":
        per_token = -clipped.detach() * advantages * logprobs
    else:
        bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
        per_token = -torch.minimum(bounded * advantages, clipped * advantages)

    is_clipped_low = (ratio < 1 - config.clip_low) & (advantages < 0)
    is_clipped_high = (ratio > 1 + config.clip_high) & (advantages > 0)
    sums = {
        "clip_ratio/low": is_clipped_low.to(mask.dtype) @ mask,
        "clip_ratio/high": is_clipped_high.to(mask.dtype) @ mask,
    }
    if config.beta > 0:
        assert ref_logprobs is not None
        log_gap = bounded_log_ratio(ref_logprobs, logprobs, mask)
        k3 = log_gap.exp() - log_gap - 1
        penalty = k3 if config.kl_gradient == "forward" else token_ratio * k3
        per_token = per_token + config.beta * penalty
        sums["kl"] = k3.detach() @ mask

    per_token = per_token.where(mask > 0, 0.0)
    if config.loss_type == "grpo":
        per_token = per_token / lengths
    return per_token.sum(), sums


def loss_normalizer(num_completions: int, num_trained_tokens: int, config: TrainConfig) -> float:
    """The number that divides an update's summed gradient.

    Args:
        num_completions: of the mini-batch, those without a trained token too.
        num_trained_tokens: those that train; both are of the whole batch where
            `config.divides_by_batch` (dapo, cispo).
        config: loss_type, max_completion_len, num_minibatches.
    """
    if config.loss_type == "grpo":
        return num_completions
    if config.loss_type == "dr_grpo":
        return num_completions * config.max_completion_len
    num_trained_tokens = max(num_trained_tokens, 1)
    if config.divides_by_batch:  # the batch's mean number in a mini-batch
        return num_trained_tokens / config.num_minibatches
    return num_trained_tokens  # bnpo


def off_policy_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, completion: Tensor,
    config: TrainConfig,
) -> Tensor:  # fmt: skip
    """Bounded importance weights w = p(trainer) / p(server) on the advantages: [N].

    w is exp(trainer_logprobs - sampler_logprobs) of the token; `sequence*` take the product over
    its completion (unbiased below the cap), `geometric*` the geometric mean. `truncate` (TIS),
    `sequence` and `geometric` give min(w, cap); `mask` (IcePop, arXiv:2510.18855), `sequence_mask`
    and `geometric_mask` give w within [floor, cap] and 0 outside; `none` gives 1, and so does
    config.old_logprobs `sampler`, where the ratio itself corrects. Tensors are as for `grpo_loss`.
    """
    method = config.off_policy_correction
    if config.old_logprobs == "sampler" or method == "none":
        return torch.ones_like(trainer_logprobs)

    log_weights = bounded_log_ratio(trainer_logprobs, sampler_logprobs, mask)
    if method.startswith(("sequence", "geometric")):
        log_weights = completion_sums(log_weights, completion)
    if method.startswith("geometric"):
        lengths = completion_sums(mask.to(log_weights.dtype), completion).clamp(min=1)
        log_weights = log_weights / lengths

    weights = log_weights.clamp(max=MAX_LOG_RATIO).exp()  # products exceed their factors' bound
    if not method.endswith("mask"):
        return weights.clamp(max=config.correction_cap)
    is_within = (weights >= config.correction_floor) & (weights <= config.correction_cap)
    return weights.where(is_within, 0.0)


# -- The step --------------------------------------------------------------------------------------


def train_batch(
    policy: Any, reference: Any, optimizer: Any, scheduler: Any,
    micro_batches: Iterable[MicroBatch], config: TrainConfig, device: torch.device,
) -> tuple[dict[str, float], Gaps]:  # fmt: skip
    """Train one batch; returns metrics, and how far trainer and servers differ.

    Collective: each rank has its own micro-batches. With one update it trains on them as they are
    dealt; for several they are collected, to take the trainer's log-probs before the first.
    """
    learning_rate = float(optimizer.param_groups[0]["lr"])  # of 8-bit AdamW it is a tensor
    token_sums = TokenSums(device)
    grad_norms: list[float] = []
    if config.updates_per_batch > 1:  # with one, they train as they come, and are not kept
        micro_batches = list(micro_batches)
        for micro_batch in micro_batches:
            moved = micro_batch.to(device)
            with torch.no_grad():
                micro_batch.trainer_logprobs = token_logprobs(
                    policy, moved.packed, moved.images, config
                )

    for _ in range(config.num_iterations):
        for micro_batch in micro_batches:
            # DDP reduces gradients in an update's last backward; FSDP2 does not look at this.
            policy.require_backward_grad_sync = bool(micro_batch.update)
            add_gradient(policy, reference, micro_batch.to(device), token_sums, config)
            if micro_batch.update:
                normalizer = loss_normalizer(*micro_batch.update, config)
                grad_norms.append(optimizer_step(policy, optimizer, scheduler, normalizer, config))
                # `loss` becomes the mean of all updates.
                token_sums.end_update(normalizer * config.updates_per_batch)

    metrics, gaps = token_sums.metrics()
    metrics["grad_norm"] = sum(grad_norms) / len(grad_norms)
    metrics["skipped_steps"] = sum(not math.isfinite(norm) for norm in grad_norms)
    metrics["learning_rate"] = learning_rate
    return metrics, gaps


def add_gradient(
    policy: Any, reference: Callable[..., Tensor] | None, micro_batch: MicroBatch,
    token_sums: TokenSums, config: TrainConfig,
) -> None:  # fmt: skip
    """Run a micro-batch forward and backward, and count its tokens and its loss."""
    packed = micro_batch.packed
    images = micro_batch.images
    mask = micro_batch.mask
    ref_logprobs = micro_batch.ref_logprobs
    if reference:  # before the policy's forward: a moving one borrows the policy's weights
        ref_logprobs = reference(packed, images)
    logprobs, entropy = token_logprobs(policy, packed, images, config, return_entropy=True)

    trainer_logprobs = micro_batch.trainer_logprobs
    if trainer_logprobs is None:  # one update a batch: these are from before it
        trainer_logprobs = logprobs.detach()
    old_logprobs = trainer_logprobs
    if config.old_logprobs == "sampler":
        old_logprobs = micro_batch.sampler_logprobs
    weights = off_policy_weights(
        trainer_logprobs, micro_batch.sampler_logprobs, mask, packed.completion, config
    )
    loss_fn: Any = config.loss_fn or grpo_loss
    if config.loss_reads_entropy:
        loss_fn = partial(loss_fn, entropy=entropy.where(mask > 0, entropy.detach()))
    # Whatever a loss_fn does, masked tokens do not train.
    trained = logprobs.where(mask > 0, logprobs.detach())
    with naming_function("loss_fn"):
        loss, loss_sums = loss_fn(
            trained, old_logprobs, ref_logprobs, micro_batch.advantages * weights, mask,
            packed.completion, config,
        )  # fmt: skip
        check_loss(loss, loss_sums)
    loss.backward()

    token_sums.add({**loss_sums, "loss_sum": loss}, entropy, trainer_logprobs, micro_batch)


def optimizer_step(
    policy: nn.Module, optimizer: Any, scheduler: Any, normalizer: float, config: TrainConfig
) -> float:
    """Divide the gradients by `normalizer`, clip, and step if they are finite.

    They are sums over all ranks. Returns the unclipped norm. Collective.
    """
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    torch._foreach_div_(gradients, normalizer)
    max_norm = config.grad_norm or math.inf  # 0 clips nothing
    norm = full_tensor(nn.utils.clip_grad_norm_(policy.parameters(), max_norm)).item()
    if math.isfinite(norm):
        optimizer.step()
    scheduler.step()  # after a skipped step, too: checkpoints count updates by it
    optimizer.zero_grad(set_to_none=True)
    return norm


# -- The loop --------------------------------------------------------------------------------------


def main(config: TrainConfig) -> None:
    """Train, on all of torchrun's ranks; raise errors after the last save."""
    config = with_bf16(config)
    with (
        process_group(config.collective_timeout) as device,
        run_folder(config) as (checkpoint, before),
        closing(Rollouts(config, device, before)) as rollouts,
        stop_signals(rollouts.stop),
    ):
        torch.manual_seed(config.seed)
        policy = build_policy(config, device, rollouts.example, checkpoint)
        config = share_prefixes(policy, config, rollouts.example)
        rollouts.set_config(config)  # it packs groups as the trainer does
        reference = build_reference(policy, config, device, rollouts.example)
        num_updates = rollouts.num_steps * config.updates_per_batch
        optimizer, scheduler = build_optimizer(policy, num_updates, config)
        checkpoints = Checkpoints(config, policy, optimizer, scheduler, rollouts, reference)
        step = checkpoints.resume(checkpoint, before)
        num_skipped = 0
        log = RunLog(config, before, rollouts)
        with closing(log), checkpoints.saving(log):  # saves, and ends where `Stopped` is raised
            rollouts.publish(policy, step)  # from now on threads sample and score groups
            if step == 0:
                log.step(0, {}, rollouts.evaluate(0, Batch()))
            while step < rollouts.num_steps:
                # Seed LoRA's dropout per step, so that a resumed run repeats it.
                torch.manual_seed(hash((config.seed, step, dist.get_rank())))
                metrics: dict[str, float] = {"policy_version": step}
                with timed("time/step_s", metrics):
                    with timed("time/train_s", metrics):  # the log takes the waiting out
                        micro_batches = rollouts.next_batch(set_advantages)
                        trained, gaps = train_batch(
                            policy, reference, optimizer, scheduler, micro_batches, config, device
                        )
                    step += 1
                    if config.reference_decay is not None:
                        reference.follow(step)
                    batch = rollouts.end_batch(gaps)
                    with timed("time/sync_s", metrics):
                        rollouts.publish(policy, step)

                log.step(step, metrics | trained, rollouts.evaluate(step, batch))
                if config.save_steps and step % config.save_steps == 0:
                    checkpoints.save(log)

                was_skipped = trained["skipped_steps"] == config.updates_per_batch
                num_skipped = num_skipped + 1 if was_skipped else 0
                if num_skipped == MAX_SKIPPED_STEPS:  # the next batch ends the run, and saves
                    rollouts.failure = rollouts.failure or UserError(
                        f"{num_skipped} steps in a row had no finite gradient: lower learning_rate"
                        ", or look at loss_fn"
                    )


if __name__ == "__main__":
    # A recipe that imports `train`, and changes it, changes this module.
    sys.modules["train"] = sys.modules["__main__"]
    with exits(UserError, ServerError, torch.OutOfMemoryError):
        main(parse_args(sys.argv[1:]))
