"""GRPO (DeepSeekMath, arXiv:2402.03300) on plain torch.distributed, with rollouts from vLLM servers.

    torchrun --nproc_per_node=N train.py [recipes/x.py] [--field value ...]

In reading order: advantages, the loss and its corrections, one step, the loop (`main`).
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainConfig, UserError, parse_args
from rollouts.group import Completion, Group, Prompt
from rollouts.rollouts import Rollouts
from training.batching import Dealer, MicroBatch, Share
from training.checkpoints import Checkpoints, find_checkpoint, locked, read_state
from training.logs import RunLog, TokenSums
from training.model import (
    build_optimizer,
    build_policy,
    build_reference,
    full_tensor,
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
from vllm_client import ServerError

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
    if config.weighs_whole_batch:
        set_advantages_together(groups, config)
    else:  # in one tensor, rounding would depend on which groups arrived together
        for group in groups:
            set_advantages_together([group], config)


def set_advantages_together(groups: list[Group], config: TrainConfig) -> None:
    """Fill in the advantages of groups by one call; a UserError where it gives no finite numbers."""
    advantage_fn: Any = config.advantage_fn
    rewards = torch.tensor([group.reward for group in groups], dtype=torch.float64)
    with naming(
        f"advantage_fn must return finite numbers [{len(groups)}, {config.num_generations}]"
    ):
        if advantage_fn is None:
            advantages = compute_advantages(rewards, config.scale_rewards)
        else:
            advantages = advantage_fn(rewards.clone(), groups)
        if advantages.shape != rewards.shape or not (advantages.isfinite() | rewards.isnan()).all():
            raise ValueError(f"it returned {advantages}")

    advantages = advantages.where(~rewards.isnan(), 0.0)
    for group, of_group in zip(groups, advantages.tolist(), strict=True):
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


# -- The step ----------------------------------------------------------------------------------------------------------


def train_batch(
    policy: Any, reference: Callable[..., Tensor] | None, optimizer: Any, scheduler: Any,
    shares: Iterable[Share], config: TrainConfig, device: torch.device,
) -> tuple[dict[str, float], dict[int, float]]:  # fmt: skip
    """Train one batch; returns metrics, and mean |trainer - server| by server.

    Collective: each rank has its own shares. With one update it trains while they arrive; for several they are
    collected, to take the trainer's log-probs before the first.
    """
    learning_rate = optimizer.param_groups[0]["lr"]
    token_sums = TokenSums(device)
    norms: list[float] = []
    if config.updates_per_batch > 1:
        shares = list(shares)
        if config.old_logprobs == "trainer":
            keep_trainer_logprobs(policy, shares, config, device)

    for iteration in range(config.num_iterations):
        loss_sum = torch.zeros((), device=device)
        for share in shares:
            for micro_batch in share.micro_batches:
                # DDP reduces gradients only in an update's last backward; FSDP2 and a single rank ignore this.
                is_last = micro_batch is share.micro_batches[-1]
                policy.require_backward_grad_sync = is_last and share.normalizer is not None
                # Servers are compared with the policy before the first update only, each token once.
                is_first_update = micro_batch.trainer_logprobs is not None or not norms
                compares_servers = iteration == 0 and is_first_update
                on_device = micro_batch.to(device)
                loss_sum += add_gradient(
                    policy, reference, on_device, token_sums, compares_servers, config
                )

            if share.normalizer is not None:
                norms.append(optimizer_step(policy, optimizer, scheduler, share.normalizer, config))
                token_sums.totals["loss"] += loss_sum / share.normalizer / config.updates_per_batch
                loss_sum = torch.zeros((), device=device)

    metrics, gaps = token_sums.metrics()
    metrics["grad_norm"] = sum(norms) / len(norms)
    metrics["skipped_steps"] = float(sum(not math.isfinite(norm) for norm in norms))
    metrics["learning_rate"] = learning_rate
    return metrics, gaps


def keep_trainer_logprobs(
    policy: Any, shares: list[Share], config: TrainConfig, device: torch.device
) -> None:
    """Fill in the policy's log-probs before the first update: what the ratios of all updates are taken against."""
    for share in shares:
        for micro_batch in share.micro_batches:
            row = micro_batch.to(device)
            with torch.no_grad():
                micro_batch.trainer_logprobs = token_logprobs(
                    policy, row.packed, row.images, config
                )


def add_gradient(
    policy: Any, reference: Callable[..., Tensor] | None, micro_batch: MicroBatch, token_sums: TokenSums,
    compares_servers: bool, config: TrainConfig,
) -> Tensor:  # fmt: skip
    """Forward and backward of one micro-batch; returns its loss sum, 0-d. Counts its tokens into `token_sums`."""
    packed = micro_batch.packed
    mask = micro_batch.mask
    sampler_logprobs = micro_batch.sampler_logprobs
    policy_logprobs, entropy = token_logprobs(
        policy, packed, micro_batch.images, config, return_entropy=True
    )

    trainer_logprobs = micro_batch.trainer_logprobs
    if (
        trainer_logprobs is None
    ):  # none are kept: this is the only update, or no ratio is taken against them
        trainer_logprobs = policy_logprobs.detach()
    ref_logprobs = micro_batch.ref_logprobs
    if reference is not None:
        ref_logprobs = reference(packed, micro_batch.images)
    old_logprobs = sampler_logprobs if config.old_logprobs == "sampler" else trainer_logprobs

    weights = off_policy_weights(old_logprobs, sampler_logprobs, mask, packed.completion, config)
    advantages = micro_batch.advantages * weights
    loss_fn: Any = config.loss_fn or grpo_loss
    loss, loss_sums = loss_fn(
        policy_logprobs, old_logprobs, ref_logprobs, advantages, mask, packed.completion, config
    )
    loss.backward()

    servers = micro_batch.servers if compares_servers else None
    token_sums.add(loss_sums, entropy, trainer_logprobs, sampler_logprobs, mask, servers)
    return loss.detach()


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


def check_loss(config: TrainConfig) -> None:
    """Try the config's `loss_fn` on two tokens of log-probability -1 and advantage 1, or raise a UserError."""
    if config.loss_fn is None:
        return
    names = ", ".join(LOSS_SUMS)
    for mask in (
        torch.ones(2),
        torch.zeros(2),
    ):  # a row that fills up a round has masked tokens alone
        with naming(
            f"loss_fn must return (a finite scalar of logprobs, sums named {names}, loss/...)"
        ):
            check_loss_of_tokens(mask, config)


def check_loss_of_tokens(mask: Tensor, config: TrainConfig) -> None:
    """ValueError where the config's `loss_fn` does not give a usable loss of two tokens with this mask."""
    loss_fn: Any = config.loss_fn
    ones = torch.ones(2)
    logprobs = (-ones).requires_grad_()
    old_logprobs = logprobs.detach()
    ref_logprobs = old_logprobs if config.has_reference else None
    completion = torch.zeros(2, dtype=torch.long)
    loss, sums = loss_fn(logprobs, old_logprobs, ref_logprobs, ones, mask, completion, config)
    loss.backward()

    are_known = all(name in LOSS_SUMS or name.startswith("loss/") for name in sums)
    are_scalars = all(value.ndim == 0 for value in sums.values())
    if not loss.isfinite() or not are_known or not are_scalars:
        raise ValueError(f"it returned {loss.item()} and {sums}")
    if not mask.any() and (logprobs.grad is None or logprobs.grad.any()):
        raise ValueError(f"tokens whose mask is 0 get the gradient {logprobs.grad}")


def check_advantages(prompts: list[Prompt], config: TrainConfig) -> None:
    """Try the config's `advantage_fn`, if any, on two prompts with one-token completions, or raise a UserError."""
    if config.advantage_fn is None or config.rollout_fn:  # these completions lack its `info`
        return
    num = config.num_generations
    completions = [Completion([0], [-1.0], "stop", 0) for _ in range(num)]
    reward = [float(number) for number in range(num)]
    rewards: Any = [[value] * len(config.reward_funcs) for value in reward]
    groups = [Group(prompt, completions, [""] * num, rewards, reward) for prompt in prompts[:2]]
    set_advantages(groups, config)


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
        step = checkpoints.resume(checkpoint)
        num_skipped = 0
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

                if trained["skipped_steps"] == config.updates_per_batch:
                    num_skipped += 1
                else:
                    num_skipped = 0
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
