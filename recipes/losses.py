"""Losses of other papers than GRPO's, for a config's `loss_fn`.

    python train.py recipes/tiny.py --loss_fn recipes.losses.sapo

They have the arguments of `train.grpo_loss`, and are sums over tokens, weighted by `loss_type` and
with β·k3 or β·ρ·k3 as there. A log-ratio is bounded to ±20, beyond which it has no gradient. DPPO
and DeepSeek compare with the sampler's policy: set `old_logprobs="sampler"` for those.
"""

import torch

from train import bounded_log_ratio, completion_sums, grpo_loss

TAU_POSITIVE = 1.0  # SAPO's temperatures, of its paper
TAU_NEGATIVE = 1.05
MAX_RATIO = 20.0  # of DPPO's importance weight
MAX_DRIFT = 0.5  # nats a token, of `off_policy_sequence_mask`
ENTROPY_COEF = 0.01  # per nat, of `entropy_bonus`


def entropy_bonus(
    logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config, entropy
):
    """`train.grpo_loss` less 0.01 times each token's entropy, which slows its collapse.

    The first seven arguments are those of `train.grpo_loss`. `entropy` [N], nats, is that of the
    policy's distribution at each token, differentiable. A loss gets it by an argument of that name,
    without a default: others do not pay for its gradient.
    """
    loss, sums = grpo_loss(
        logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config
    )
    bonus = ENTROPY_COEF * entropy.where(mask > 0, 0.0)
    sums["loss/entropy_bonus"] = bonus.detach().sum()
    if config.loss_type == "grpo":
        num_tokens = completion_sums(mask.to(bonus.dtype), completion)
        bonus = bonus / num_tokens.clamp(min=1)
    return loss - bonus.sum(), sums


def sapo(logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config):
    """Soft adaptive policy optimization (arXiv:2511.20347): a sigmoid in place of the clip.

    -σ(τ(ρ - 1))·(4/τ)·A of the ratio ρ, with τ = 1 where A > 0 and else 1.05, which fades faster.
    At ρ = 1 its gradient is -A.
    """
    ratio = bounded_log_ratio(logprobs, old_logprobs, mask).exp()
    tau = torch.full_like(advantages, TAU_POSITIVE).where(advantages > 0, TAU_NEGATIVE)
    per_token = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    return _total(per_token, logprobs, old_logprobs, ref_logprobs, mask, completion, config)


def dppo_tv(logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config):
    """Divergence proximal policy optimization (arXiv:2602.04879), Binary-TV.

    |π - μ| of the sampled token is bounded. -sg(ρ)·A·log π, with ρ = π / μ up to 20, and without
    the tokens that A moves further away from μ once their divergence exceeds ε (A < 0 and π < μ) or
    ε_high (A > 0 and π > μ). The paper compares with the sampler's μ, and takes 0.15 for both.
    """
    divergence = (logprobs.detach().exp() - old_logprobs.exp()).abs()
    return _dppo(
        divergence, logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config
    )


def dppo_kl(logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config):
    """`dppo_tv`, but Binary-KL: KL(μ || π) of "this token or another".

    The paper takes 0.05 for both bounds. μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π)), in nats.
    """
    new = logprobs.detach()
    others_old = _probability_of_others(old_logprobs)
    others_new = _probability_of_others(new)
    of_others = others_old * (others_old / others_new).log()
    divergence = of_others - old_logprobs.exp() * bounded_log_ratio(new, old_logprobs, mask)
    return _dppo(
        divergence, logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config
    )


def off_policy_sequence_mask(
    logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config
):
    """DeepSeek-V3.2's off-policy sequence masking (arXiv:2512.02556).

    On the clipped loss with ratios of tokens. The policy loss of a completion with A < 0 is 0 where
    the mean of log(π_old / π) over its tokens exceeds δ, 0.5 here (the paper gives none). Its π_old
    is the sampler's. `loss/off_policy` is the share of tokens masked.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs, mask)
    drift = _mean(-log_ratio.detach(), mask, completion)
    is_off = (advantages < 0) & (drift > MAX_DRIFT)

    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages).where(~is_off, 0.0)
    counts = {"loss/off_policy": is_off}
    return _total(per_token, logprobs, old_logprobs, ref_logprobs, mask, completion, config, counts)


def _probability_of_others(logprobs):
    """The probability of the other tokens, 1 - p, at least 1e-7."""
    return -logprobs.expm1().clamp(max=-1e-7)


def _mean(values, mask, completion):
    """The mean of `values` over its completion's trained tokens, for each token.

    Where the mask is 0, so must `values` be.
    """
    num_tokens = completion_sums(mask.to(values.dtype), completion)
    return completion_sums(values, completion) / num_tokens.clamp(min=1)


def _dppo(divergence, logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config):
    """The loss -ρ·A·log π of tokens within the bounds of the divergence."""
    ratio = bounded_log_ratio(logprobs.detach(), old_logprobs, mask).exp()
    low = (divergence > config.clip_low) & (advantages < 0) & (ratio < 1)
    high = (divergence > config.clip_high) & (advantages > 0) & (ratio > 1)
    per_token = -ratio.clamp(max=MAX_RATIO) * advantages * logprobs
    per_token = per_token.where(~(low | high), 0.0)
    counts = {"clip_ratio/low": low, "clip_ratio/high": high}
    return _total(per_token, logprobs, old_logprobs, ref_logprobs, mask, completion, config, counts)


def _total(per_token, logprobs, old_logprobs, ref_logprobs, mask, completion, config, counts=()):
    """The loss sum of trained tokens, with β·k3, and sums for metrics.

    Args:
        per_token: the loss of each token [N].
        logprobs: as all the others, an argument of `train.grpo_loss`.
        old_logprobs: read where β > 0 and kl_gradient is reverse.
        ref_logprobs: read where β > 0.
        mask: 1 on the tokens that train.
        completion: the number of each token's completion.
        config: the run's.
        counts: tokens to count for metrics, by name: [N] bool.
    """
    trains = mask > 0
    sums = {}
    for name, is_counted in dict(counts).items():
        sums[name] = (is_counted & trains).sum().to(per_token.dtype)

    if config.beta > 0:
        log_gap = bounded_log_ratio(ref_logprobs, logprobs, mask)
        k3 = log_gap.exp() - log_gap - 1
        penalty = k3
        if config.kl_gradient == "reverse":
            penalty = bounded_log_ratio(logprobs, old_logprobs, mask).exp() * k3
        per_token = per_token + config.beta * penalty
        sums["kl"] = k3.detach().sum()

    per_token = torch.where(trains, per_token, 0.0)
    if config.loss_type == "grpo":
        num_tokens = completion_sums(trains.to(per_token.dtype), completion)
        per_token = per_token / num_tokens.clamp(min=1)
    return per_token.sum(), sums
