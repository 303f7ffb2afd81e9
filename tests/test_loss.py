"""Advantages and every loss against numbers worked out by hand."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_server import fake_server
from helpers import ROOT, on_forked_ranks, on_ranks, read, said

import train
import training.metrics
from config import TrainConfig, UserError, parse_args
from rollouts.group import Group, Prompt
from train import (
    compute_advantages,
    grpo_loss,
    loss_normalizer,
    main,
    off_policy_weights,
    set_advantages,
)
from training.batching import Dealer, MicroBatch
from training.metrics import TokenSums
from utils import process_group

NAN = math.nan


def make_config(**fields):
    return TrainConfig(
        **{"model_id": "m", "dataset_id": "d", "reward_funcs": ["os.path.exists"], **fields}
    )


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


# -- advantages ------------------------------------------------------------------------------------------------------


def test_group_scale():
    # mean 0.25, deviations .75 -.25 -.25 -.25, unbiased variance (.5625 + 3 * .0625) / 3 = .25, std .5
    got = compute_advantages(rows([1, 0, 0, 0], [2, 2, 2, 2]))
    expected = rows([0.75, -0.25, -0.25, -0.25], [0, 0, 0, 0]) / 0.5001
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_batch_scale():
    # all eight rewards: mean .5, squares 8 * .25 = 2, unbiased variance 2/7
    got = compute_advantages(rows([1, 0, 0, 0], [1, 1, 1, 0]), "batch")
    expected = rows([0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]) / (
        math.sqrt(2 / 7) + 1e-4
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_no_scale():
    torch.testing.assert_close(compute_advantages(rows([3, 1]), "none"), rows([1, -1]))


def test_missing_rewards():
    # the second row's valid rewards are 1 and 3: mean 2, std sqrt(2); one valid reward or none gives nothing to compare
    got = compute_advantages(rows([NAN, NAN, NAN], [1, NAN, 3], [NAN, 5, NAN]))
    x = 1 / (math.sqrt(2) + 1e-4)
    torch.testing.assert_close(got, rows([0, 0, 0], [-x, 0, x], [0, 0, 0]), rtol=1e-12, atol=1e-12)
    assert compute_advantages(rows([NAN, NAN]), "batch").tolist() == [[0, 0]]
    assert compute_advantages(rows([NAN, NAN]), "none").tolist() == [[0, 0]]


def test_advantages_of_groups_and_of_a_batch():
    """The same numbers as above, filled in; with `batch` all groups at once."""
    for scale, wanted in (
        ("group", (0.75 / 0.5001, 0.0)),
        ("batch", (0.75 / (math.sqrt(2 / 7) + 1e-4),) * 2),
    ):
        groups = [
            Group(Prompt(0, [5], "", {}), reward=reward)
            for reward in ([1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0])
        ]
        set_advantages(groups, make_config(scale_rewards=scale))
        assert groups[0].advantages[0] == pytest.approx(wanted[0])
    assert groups[1].advantages == pytest.approx([-wanted[1], *[wanted[1] / 3] * 3])
    equal = Group(Prompt(0, [5], "", {}), reward=[2.0] * 4)
    set_advantages([*groups, equal], make_config())
    assert equal.advantages == [0.0] * 4


BEYOND_THE_GROUP = {  # changes of `compute_advantages` as people make them
    "normalized over the batch": lambda rewards, scale: (rewards - rewards.mean()) / rewards.std(),
    "the batch's mean": lambda rewards, scale: rewards - rewards.nanmean(),
    "the batch's scale": lambda rewards, scale: compute_advantages(rewards) / rewards.abs().amax(),
    "ranks": lambda rewards, scale: rewards.flatten().argsort().argsort().view_as(rewards).double(),
    "the number of groups": lambda rewards, scale: compute_advantages(rewards) / len(rewards),
}


@pytest.mark.parametrize("changed", BEYOND_THE_GROUP.values(), ids=BEYOND_THE_GROUP.keys())
def test_advantages_beyond_the_group_need_the_batch(changed, monkeypatch):
    """`compute_advantages` gets groups as they come: looking at others is refused, unless the batch is handed over."""
    monkeypatch.setattr(train, "compute_advantages", changed)
    rewards = [[1.0, 0.0, 0.5, 0.0], [3.0, 7.0, 2.0, 1.0], [0.0, 1.0, 1.0, 9.0]]
    for scale in ("group", "none"):
        with pytest.raises(UserError, match="^compute_advantages gives .* make it an advantage_fn"):
            set_advantages(scored(*rewards), make_config(scale_rewards=scale))
    own = make_config(advantage_fn=lambda rewards, groups: changed(rewards, "group"))
    for config in (own, make_config(scale_rewards="batch")):
        groups = scored(*rewards)
        set_advantages(groups, config)
        wanted = changed(torch.tensor(rewards, dtype=torch.float64), "group")
        assert [group.advantages for group in groups] == wanted.tolist()


def test_advantages_within_the_group_are_free(monkeypatch):
    """To the bit the same for any groups that come together."""
    rewards = [[0.1 * i * j % 0.7 for j in range(8)] for i in range(1, 20)]
    rewards[3][2] = NAN
    for changed in (compute_advantages, lambda r, scale: r.nan_to_num(0.0).softmax(1) - 1 / 8):
        monkeypatch.setattr(train, "compute_advantages", changed)
        together, alone = scored(*rewards), scored(*rewards)
        set_advantages(together, make_config())
        for group in alone:
            set_advantages([group], make_config())
        assert [group.advantages for group in together] == [group.advantages for group in alone]
    monkeypatch.setattr(train, "compute_advantages", lambda r, scale: r.mul_(2))  # in place
    twice = scored([1.0, 0.0, 2.0, 1.0])
    set_advantages(twice, make_config())
    assert twice[0].advantages == [2.0, 0.0, 4.0, 2.0]


@pytest.mark.parametrize("max_tokens", [13, 16384])
def test_a_run_whose_groups_come_one_by_one_checks_the_batch(
    max_tokens, models, recipe, monkeypatch
):
    """Rows train before the batch is there; the run ends with the step at the latest."""
    monkeypatch.setattr(
        train, "compute_advantages", lambda rewards, scale: rewards - rewards.mean()
    )
    with fake_server(models["untied"], lambda ids, number: (said(ids, number), 0.0)) as one:
        words = [recipe(one), "--max_steps", "1", "--max_completion_len", "9"]
        with pytest.raises(UserError, match="gives a group other advantages in its batch"):
            main(parse_args([*words, "--max_tokens_per_gpu", str(max_tokens)]))


# -- losses ----------------------------------------------------------------------------------------------------------
# Three completions of 2, 1 and 2 tokens. Ratios and advantages are chosen so that every branch of the clip occurs; the
# last token is masked.

RATIO = [1.5, 0.5, 0.5, 1.1, 3.0]
ADVANTAGE = [1.0, 1.0, -1.0, -2.0, -2.0]
MASK = [1.0, 1.0, 1.0, 1.0, 0.0]
COMPLETION = [4, 4, 5, 6, 6]
OLD = [-1.0, -2.0, -0.5, -1.5, -0.7]


def loss_and_gradient(config, ratio=RATIO, ref=None, mask=MASK):
    old = rows(*OLD)
    logprobs = (old + rows(*ratio).log()).requires_grad_()
    args = (rows(*ADVANTAGE), rows(*mask), torch.tensor(COMPLETION), config)
    loss, sums = grpo_loss(logprobs, old, ref, *args)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), {name: value.item() for name, value in sums.items()}


# epsilon .2: token 0 is clipped to 1.2 (A > 0), token 1 keeps .5, token 2 is clipped to .8 (A < 0), token 3 keeps 1.1.
# Per token -min(ρA, clip A): -1.2, -.5, +.8, +2.2. The gradient of an unclipped term is -ρA: 0, -.5, 0, +2.2.


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "dr_grpo"])
def test_token_sum_losses(loss_type):
    loss, gradient, sums = loss_and_gradient(make_config(loss_type=loss_type))
    assert loss == pytest.approx(-1.2 - 0.5 + 0.8 + 2.2)
    assert gradient == pytest.approx([0, -0.5, 0, 2.2, 0])
    assert sums == {"clip_ratio/low": 1.0, "clip_ratio/high": 1.0}


def test_grpo_is_a_sum_of_completion_means():
    loss, gradient, _ = loss_and_gradient(make_config(loss_type="grpo"))
    assert loss == pytest.approx(
        (-1.2 - 0.5) / 2 + 0.8 + 2.2
    )  # the third completion has one unmasked token
    assert gradient == pytest.approx([0, -0.25, 0, 2.2, 0])


def test_grpo_counts_a_completion_whose_first_token_is_masked():
    loss, gradient, _ = loss_and_gradient(make_config(loss_type="grpo"), mask=[0, 1, 1, 1, 0])
    assert loss == pytest.approx(-0.5 + 0.8 + 2.2)
    assert gradient == pytest.approx([0, -0.5, 0, 2.2, 0])


def test_cispo():
    # -sg(clip ρ)·A·logprob; gradient -clip(ρ)·A: -1.2, -.8 (raised from .5), +.8, +2.2
    loss, gradient, _ = loss_and_gradient(make_config(loss_type="cispo", epsilon=0.2))
    logprobs = [old + math.log(ratio) for old, ratio in zip(OLD, RATIO, strict=True)]
    assert gradient == pytest.approx([-1.2, -0.8, 0.8, 2.2, 0])
    assert loss == pytest.approx(
        sum(g * x for g, x in zip([-1.2, -0.8, 0.8, 2.2], logprobs, strict=False))
    )


@pytest.mark.parametrize(
    ("fields", "high"), [({}, 1.2), ({"epsilon": 1.5}, 1.2), ({"epsilon_high": 0.3}, 1.3)]
)
def test_cispo_has_no_lower_bound_of_its_own(fields, high):
    _, gradient, sums = loss_and_gradient(make_config(loss_type="cispo", **fields))
    assert gradient == pytest.approx(
        [-high, -0.5, 0.5, 2.2, 0]
    )  # .5 is not raised, and epsilon says nothing of the upper bound
    assert sums["clip_ratio/low"] == 0


def test_epsilon_high():
    # the upper bound 1.6 leaves token 0 unclipped: -1.5, gradient -1.5
    loss, gradient, sums = loss_and_gradient(make_config(epsilon_high=0.6))
    assert loss == pytest.approx(-1.5 - 0.5 + 0.8 + 2.2)
    assert gradient == pytest.approx([-1.5, -0.5, 0, 2.2, 0])
    assert sums["clip_ratio/high"] == 0


def test_delta_bounds_the_ratio_of_negative_advantages():
    # token 3 at ratio 5, A -2: unbounded 10; with delta 2: min(2·-2, 1.2·-2) = -4, loss 4, no gradient
    ratio = [1.0, 1.0, 1.0, 5.0, 1.0]
    assert loss_and_gradient(make_config(), ratio)[0] == pytest.approx(-1 - 1 + 1 + 10)
    loss, gradient, _ = loss_and_gradient(make_config(delta=2.0), ratio)
    assert loss == pytest.approx(-1 - 1 + 1 + 4)
    assert gradient == pytest.approx([-1, -1, 1, 0, 0])


def test_sequence_ratio_is_the_geometric_mean():
    # completion 4: sqrt(1.5 * .5) = .8660, unclipped below 1.2: -s·A per token; both tokens share the gradient of s
    s = math.sqrt(0.75)
    loss, gradient, _ = loss_and_gradient(make_config(importance_level="sequence"))
    assert loss == pytest.approx(
        -2 * s + 0.8 + 2.2
    )  # the third completion's ratio is its unmasked token's 1.1
    assert gradient == pytest.approx([-s, -s, 0, 2.2, 0])


def test_a_token_that_a_correction_masks_gets_no_gradient_of_its_completion():
    """Each token's gradient is its own at the sequence level, too: with weights 0 and 1 on completion 4, 0 and -s·A."""
    config, old = make_config(importance_level="sequence"), rows(*OLD)
    logprobs = (old + rows(*RATIO).log()).requires_grad_()
    weighted = rows(*ADVANTAGE) * rows(0, 1, 1, 1, 1)
    grpo_loss(logprobs, old, None, weighted, rows(*MASK), torch.tensor(COMPLETION), config)[
        0
    ].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, -math.sqrt(0.75), 0, 2.2, 0])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.parametrize("gap", [2000.0, -2000.0])
def test_no_finite_loss_has_a_gradient_that_is_not(level, loss_type, gap):
    """exp of either gap is infinity or 0, and infinity times a clipped term's 0 would be NaN."""
    config = make_config(
        importance_level=level, loss_type=loss_type, beta=0.5, kl_gradient="reverse"
    )
    old = rows(-1.0, -1.0, -1.0)
    for advantages in (rows(1, 1, 1), rows(-1, -1, -1)):
        logprobs = (old + rows(gap, 0, 0)).requires_grad_()
        args = (advantages, rows(1, 1, 1), torch.tensor([0, 0, 1]), config)
        loss, _ = grpo_loss(logprobs, old, old, *args)
        loss.backward()
        assert logprobs.grad is not None
        assert loss.isfinite()
        assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_which_kl_the_gradient_is_of(direction):
    """Expected over all tokens of a policy, against autograd through the divergence itself."""
    generator = torch.Generator().manual_seed(0)
    scores, ref = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    scores.requires_grad_()
    logprobs, ref = scores.log_softmax(-1), ref.log_softmax(-1)
    divergence = (
        (ref.exp() * (ref - logprobs))
        if direction == "forward"
        else (logprobs.exp() * (logprobs - ref))
    )
    (wanted,) = torch.autograd.grad(divergence.sum(), scores, retain_graph=True)
    config = make_config(beta=0.3)  # reverse, unless set
    if direction == "forward":
        config = make_config(beta=0.3, kl_gradient="forward")
    # One completion of each token, which counts as often as the policy draws it; advantages of 0 leave the penalty.
    got = torch.zeros_like(scores)
    for token, chance in enumerate(logprobs.exp().tolist()):
        drawn = logprobs[token, None]
        args = (rows(0), rows(1), torch.zeros(1, dtype=torch.long), config)
        loss, _ = grpo_loss(drawn, drawn.detach(), ref[token, None], *args)
        got += chance * torch.autograd.grad(loss, scores, retain_graph=True)[0]
    torch.testing.assert_close(got, 0.3 * wanted, rtol=1e-12, atol=1e-12)


def test_the_penalty_has_the_ratio_of_the_token_at_both_levels():
    """With advantages of 0 only β·ρ·k3 is left, where ρ is never the completion's."""
    losses = []
    for level in ("token", "sequence"):
        config = make_config(beta=0.3, kl_gradient="reverse", importance_level=level)
        logprobs = rows(*OLD) + rows(*RATIO).log()
        args = (rows(0, 0, 0, 0, 0), rows(*MASK), torch.tensor(COMPLETION), config)
        losses.append(grpo_loss(logprobs, rows(*OLD), rows(*OLD), *args)[0].item())
    k3 = [1 / ratio + math.log(ratio) - 1 for ratio in RATIO[:4]]
    assert losses == pytest.approx(
        [0.3 * sum(ratio * value for ratio, value in zip(RATIO, k3, strict=False))] * 2
    )


def test_sequence_weights_give_the_exact_policy_gradient():
    """Two tokens of a policy over three, all nine completions weighed by how often the server draws them.

    The exact gradient is that of the expected reward. The product of a completion's ratios gives it, each token's own
    ratio, which leaves out what comes before, does not.
    """
    generator = torch.Generator().manual_seed(1)
    first, second = (
        torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((3,), (3, 3))
    )
    first.requires_grad_()
    second.requires_grad_()
    server = [
        torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((3,), (3, 3))
    ]
    reward = torch.randn(3, 3, generator=generator, dtype=torch.float64)

    def chances(begin, follow):
        return begin.softmax(-1)[:, None] * follow.softmax(-1)

    wanted = torch.autograd.grad((chances(first, second) * reward).sum(), (first, second))
    drawn, errors = chances(*server), {}
    for correction in ("sequence", "truncate", "geometric", "none"):
        cap = {} if correction == "none" else {"correction_cap": 1e9}
        config = make_config(off_policy_correction=correction, **cap)
        total = torch.zeros((), dtype=torch.float64)
        for a in range(3):
            for b in range(3):
                logprobs = torch.stack([first.log_softmax(-1)[a], second.log_softmax(-1)[a, b]])
                sampler = torch.stack(
                    [server[0].log_softmax(-1)[a], server[1].log_softmax(-1)[a, b]]
                )
                old, mask, completion = (
                    logprobs.detach(),
                    rows(1, 1),
                    torch.zeros(2, dtype=torch.long),
                )
                weights = off_policy_weights(old, sampler, mask, completion, config)
                loss, _ = grpo_loss(
                    logprobs, old, None, reward[a, b] * weights, mask, completion, config
                )
                total = total - drawn[a, b] * loss
        got = torch.autograd.grad(total, (first, second))
        errors[correction] = max(
            (g - w).abs().max().item() for g, w in zip(got, wanted, strict=True)
        )
    assert errors.pop("sequence") < 1e-12
    assert min(errors.values()) > 1e-3


def test_kl_is_k3():
    # exp(x) - x - 1 with x = ref - logprob; gradient beta * (1 - exp(x))
    config = make_config(beta=0.5, kl_gradient="forward")
    logprobs = [old + math.log(ratio) for old, ratio in zip(OLD, RATIO, strict=True)]
    gaps = [0.3, -0.2, 0.0, 1.0, 9.0]
    ref = rows(*[x + gap for x, gap in zip(logprobs, gaps, strict=True)])
    loss, gradient, sums = loss_and_gradient(config, ref=ref)
    k3 = [math.exp(x) - x - 1 for x in gaps[:4]]
    assert sums["kl"] == pytest.approx(sum(k3))
    assert loss == pytest.approx(1.3 + 0.5 * sum(k3))
    plain = [0, -0.5, 0, 2.2]
    assert gradient[:4] == pytest.approx(
        [g + 0.5 * (1 - math.exp(x)) for g, x in zip(plain, gaps, strict=False)]
    )


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
@pytest.mark.parametrize("importance_level", ["token", "sequence"])
def test_ratio_one_is_the_plain_policy_gradient(loss_type, importance_level):
    config = make_config(loss_type=loss_type, importance_level=importance_level)
    _, gradient, _ = loss_and_gradient(config, [1.0] * 5)
    share = [0.5, 0.5, 1, 1, 0] if loss_type == "grpo" else MASK
    assert gradient == pytest.approx([-a * w for a, w in zip(ADVANTAGE, share, strict=True)])


# -- off-policy ------------------------------------------------------------------------------------------------------
# Server log-probs such that trainer / server is 1, 3, 0.25, 0.8 and (masked) infinity

W = [1.0, 3.0, 0.25, 0.8]
SAMPLER = [old - math.log(w) for old, w in zip(OLD, W, strict=False)] + [-math.inf]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, 2, 0.25, 0.8]),  # TIS: min(w, 2)
        ({"correction_cap": 5.0}, W),
        ({"off_policy_correction": "mask"}, [1, 0, 0, 0.8]),  # IcePop: 0 outside [0.5, 2]
        ({"off_policy_correction": "mask", "correction_floor": 0.2, "correction_cap": 5.0}, W),
        ({"off_policy_correction": "none"}, [1, 1, 1, 1]),
        ({"old_logprobs": "sampler"}, [1, 1, 1, 1]),
        # products 1 * 3, 0.25 and 0.8; the mean of the first is sqrt(3)
        ({"off_policy_correction": "sequence"}, [2, 2, 0.25, 0.8]),
        ({"off_policy_correction": "sequence", "correction_cap": 5.0}, [3, 3, 0.25, 0.8]),
        ({"off_policy_correction": "sequence_mask"}, [0, 0, 0, 0.8]),
        ({"off_policy_correction": "geometric"}, [math.sqrt(3), math.sqrt(3), 0.25, 0.8]),
        ({"off_policy_correction": "geometric_mask"}, [math.sqrt(3), math.sqrt(3), 0, 0.8]),
    ],
)
def test_off_policy_weights(fields, expected):
    config = make_config(**fields)
    weights = off_policy_weights(
        rows(*OLD), rows(*SAMPLER), rows(*MASK), torch.tensor(COMPLETION), config
    )
    assert weights[:4].tolist() == pytest.approx(expected)
    assert math.isfinite(weights[4])


def test_the_decoupled_objective():
    """w·min(ρA, clip(ρ)A) with ρ against the trainer's old log-probs and w = old / server, capped at 2."""
    config = make_config()
    old = rows(*OLD)
    logprobs = (old + rows(*RATIO).log()).requires_grad_()
    weights = off_policy_weights(old, rows(*SAMPLER), rows(*MASK), torch.tensor(COMPLETION), config)
    args = (rows(*ADVANTAGE) * weights, rows(*MASK), torch.tensor(COMPLETION), config)
    loss, _ = grpo_loss(logprobs, old, None, *args)
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(-1.2 - 2 * 0.5 + 0.25 * 0.8 + 0.8 * 2.2)
    assert logprobs.grad.tolist() == pytest.approx([0, 2 * -0.5, 0, 0.8 * 2.2, 0])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"off_policy_correction": "mask"},
        {"off_policy_correction": "sequence"},
        {"off_policy_correction": "geometric_mask"},
        {"off_policy_correction": "none"},
        {"old_logprobs": "sampler"},
        {"old_logprobs": "sampler", "delta": 4.0},
    ],
)
def test_on_policy_all_corrections_are_the_same(loss_type, fields):
    if loss_type == "cispo":
        fields = {name: value for name, value in fields.items() if name != "delta"}
    config = make_config(loss_type=loss_type, **fields)
    old = rows(*OLD)
    logprobs = old.clone().requires_grad_()
    weights = off_policy_weights(old, old, rows(*MASK), torch.tensor(COMPLETION), config)
    args = (rows(*ADVANTAGE) * weights, rows(*MASK), torch.tensor(COMPLETION), config)
    grpo_loss(logprobs, old, None, *args)[0].backward()
    assert logprobs.grad is not None
    share = [0.5, 0.5, 1, 1, 0] if loss_type == "grpo" else MASK
    assert logprobs.grad.tolist() == pytest.approx(
        [-a * w for a, w in zip(ADVANTAGE, share, strict=True)]
    )


def test_mismatch_of_trainer_and_server(monkeypatch):
    # gaps 0, ln 3, -ln 4, ln .8; k3(x) = e^x - x - 1; ESS = (Σw)² / 4Σw²; 4 tokens train, in two micro-batches
    gaps = [math.log(w) for w in W]
    with process_group(60) as device:
        sums = TokenSums(device)
        for part in (slice(0, 3), slice(3, 5)):
            entropy = torch.full_like(rows(*OLD[part]), 0.5)
            of_loss = {"kl": rows(*MASK[part]).sum()}
            no_row: Any = None
            row = MicroBatch(
                no_row, entropy, rows(*MASK[part]), rows(*SAMPLER[part]),
                servers=torch.tensor([0, 1, 8, 8, 8])[part],
            )  # fmt: skip
            sums.add(of_loss, entropy, rows(*OLD[part]), row, True)
        monkeypatch.setattr("training.metrics.MIN_COMPARED", 2)
        metrics, by_server = sums.metrics()
    # Token 0 is of an older policy, token 1 of server 0, 2 and 3 of server 7; one token is too few to judge server 0.
    lag0 = [abs(gap) for gap in gaps[1:]]
    assert by_server == {7: pytest.approx(sum(lag0[1:]) / 2)}
    assert metrics["sampling/current_logp_difference"] == pytest.approx(sum(lag0) / 3)
    assert metrics["sampling/stale_logp_difference"] == abs(gaps[0])
    assert metrics["sampling/current_share"] == 0.75
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(4))
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(
        sum(map(abs, gaps)) / 4
    )
    assert metrics["sampling/kl"] == pytest.approx(
        sum(w - g - 1 for w, g in zip(W, gaps, strict=True)) / 4
    )
    assert metrics["sampling/effective_sample_size"] == pytest.approx(
        sum(W) ** 2 / (4 * sum(w * w for w in W))
    )
    assert (metrics["entropy"], metrics["kl"]) == pytest.approx((0.5, 1.0))


def test_servers_are_compared_before_updates_alone():
    """Later passes over a batch, at a policy that moved, are in no comparison: neither in its means nor its shares."""
    sampler = [-1.0, -2.0, -4.0, -8.0]
    row = one_token([0, 1, 1, 2], sampler)
    row.mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    with process_group(60) as device:
        sums = TokenSums(device)
        for _ in range(3):
            is_first = not sums.totals
            sums.add({}, row.mask, torch.zeros(4) if is_first else torch.ones(4), row, is_first)
        metrics, _ = sums.metrics()
    assert metrics["sampling/current_share"] == pytest.approx(2 / 3)
    assert metrics["sampling/current_logp_difference"] == (2 + 8) / 2
    assert metrics["sampling/stale_logp_difference"] == 1


def one_token(servers, sampler_logprobs):
    """A row of one completion token each, all of which train."""
    no_row: Any = None
    ones = torch.ones(len(sampler_logprobs))
    return MicroBatch(no_row, ones, ones, rows(*sampler_logprobs), torch.tensor(servers))


def sum_on_two_ranks():
    """Names in another order on each rank, one of them on one rank alone; a server on both."""
    training.metrics.MIN_COMPARED = 3  # in this process alone
    with process_group(60) as device:
        rank = dist.get_rank()
        sums = TokenSums(device)
        names = [("loss/a", 1.0), ("loss/b", 10.0)]
        of_loss = dict(names if rank == 0 else [*reversed(names), ("loss/c", 4.0)])
        loss_sums = {name: torch.tensor(value) for name, value in of_loss.items()}
        row = one_token([[0, 1, 1], [1]][rank], [[-1, -2, -0.5], [-3]][rank])
        sums.add(loss_sums, row.mask, torch.zeros_like(row.mask), row, True)
        metrics, by_server = sums.metrics()
        assert [metrics[f"loss/{name}"] for name in "abc"] == [0.5, 5.0, 1.0]
        assert metrics["sampling/sampling_logp_difference/max"] == 3
        assert by_server == {0: pytest.approx((2 + 0.5 + 3) / 3)}
        assert metrics["sampling/stale_logp_difference"] == 1.0
        assert metrics["sampling/current_share"] == 0.75


def test_sums_on_two_ranks(tmp_path):
    on_ranks(2, tmp_path, "test_loss.sum_on_two_ranks")


def test_a_rank_without_rows():
    with process_group(60) as device:
        metrics, gaps = TokenSums(device).metrics()
    assert gaps == {}
    assert math.isnan(metrics["sampling/current_logp_difference"])


def test_a_masked_infinity_stays_out():
    config = make_config(beta=0.5)
    ref = rows(0, 0, 0, 0, 1e9)
    loss, gradient, sums = loss_and_gradient(config, [1.5, 0.5, 0.5, 1.1, math.inf], ref)
    assert math.isfinite(loss)
    assert math.isfinite(sums["kl"])
    assert all(map(math.isfinite, gradient))
    assert gradient[4] == 0


def test_normalizers():
    numbers = (3, 8)  # completions of 3, 0 and 5 tokens
    assert loss_normalizer(*numbers, make_config(loss_type="grpo")) == 3
    assert loss_normalizer(*numbers, make_config(loss_type="dr_grpo", max_completion_len=10)) == 30
    for loss_type in ("bnpo", "dapo", "cispo"):
        assert loss_normalizer(*numbers, make_config(loss_type=loss_type)) == 8
        assert loss_normalizer(2, 0, make_config(loss_type=loss_type)) == 1
    halves = {"num_minibatches": 2, "batch_size": 2}
    for loss_type, expected in (("dapo", 4), ("cispo", 4), ("bnpo", 8), ("grpo", 3)):
        assert loss_normalizer(*numbers, make_config(loss_type=loss_type, **halves)) == expected


def doubled(*arguments):
    loss, sums = grpo_loss(*arguments)
    return 2 * loss, {**sums, "loss/tokens_seen": arguments[4].sum()}


def test_a_loss_of_ones_own(models, recipe, tmp_path):
    """It replaces grpo_loss and nothing else: the same under that name, twice the gradient under another."""
    written = {}
    with fake_server(models["untied"], lambda ids, number: (said(ids, number), 0.0)) as one:
        for name, loss_fn in (("none", None), ("same", grpo_loss), ("doubled", doubled)):
            config = replace(parse_args([recipe(one), "--max_steps", "1"]), loss_fn=loss_fn)
            main(config)
            (written[name],) = read(tmp_path, "metrics")
    for metric in ("loss", "grad_norm", "kl", "entropy"):
        assert written["same"].get(metric) == written["none"].get(metric)
    assert written["doubled"]["grad_norm"] == pytest.approx(
        2 * written["none"]["grad_norm"], rel=1e-5
    )
    assert written["doubled"]["loss"] == pytest.approx(2 * written["none"]["loss"], rel=1e-5)
    assert written["doubled"]["loss/tokens_seen"] == 1  # of each token, divided by their number


def tried(monkeypatch, loss_fn, mask=(1.0, 1.0)):
    """The gradients of two log-probs of -1 and their entropies of 1, in a row of the trainer."""
    logprobs = torch.full((2,), -1.0, requires_grad=True)
    entropies = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(train, "token_logprobs", lambda *_, **__: (logprobs, entropies))
    packed: Any = SimpleNamespace(completion=torch.zeros(2, dtype=torch.long))
    numbers = torch.zeros(2, dtype=torch.int64)
    row = MicroBatch(packed, torch.ones(2), torch.tensor(mask), torch.full((2,), -1.0), numbers)
    sums = TokenSums(torch.device("cpu"))
    train.add_gradient(None, None, row, sums, False, make_config(loss_fn=loss_fn))
    return logprobs.grad, entropies.grad


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (lambda *_: 1.0, "TypeError: "),
        (lambda logprobs, *_: logprobs.sum(), "TypeError: "),
        (lambda logprobs, *_: (logprobs, {}), "TypeError: it must return a scalar of logprobs"),
        (
            lambda logprobs, *_: (logprobs.detach().sum(), {}),
            "TypeError: it must return a scalar of logprobs",
        ),
        (lambda logprobs, *_: (logprobs.sum(), {"kl": 0.5}), "AttributeError: "),
        (lambda logprobs, *_: (logprobs.sum(), {"kl": logprobs}), "TypeError: .* not kl"),
        (
            lambda logprobs, *_: (logprobs.sum(), {"reward": logprobs.sum()}),
            "TypeError: .* or loss/..., not reward",
        ),
        (
            lambda logprobs, old, ref, *_: ((logprobs - ref).sum(), {}),
            r"TypeError: .*\(test_loss.py:",
        ),
        (lambda logprobs: logprobs.sum(), r"TypeError: .*\(train.py:"),
        (lambda *_: sys.exit(3), "SystemExit: 3"),  # one rank would leave the others alone
    ],
)
def test_a_loss_that_is_none(loss_fn, reason, monkeypatch):
    with pytest.raises(UserError, match=rf"^loss_fn raised {reason}"):
        tried(monkeypatch, loss_fn)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda logprobs, *_: (logprobs.sum(), {}),
        lambda *a: ((a[0] * a[4]).sum(), {}),
        lambda *a: ((1 + a[0]).sqrt().where(a[4] > 0, 0.0).sum(), {}),  # infinity times 0
    ],
)
def test_masked_tokens_do_not_train(loss_fn, monkeypatch):
    """Whatever the loss does with them."""
    gradient, _ = tried(monkeypatch, loss_fn, mask=(1.0, 0.0))
    assert gradient[0] != 0
    assert gradient[1] == 0
    assert not tried(monkeypatch, loss_fn, mask=(0.0, 0.0))[0].any()


def with_entropies(logprobs, old, ref, advantages, mask, completion, config, entropy):
    return (logprobs * mask).sum() - entropy.sum(), {}


def test_entropies_of_masked_tokens_do_not_train(monkeypatch):
    _, gradient = tried(monkeypatch, with_entropies, mask=(1.0, 0.0))
    assert gradient.tolist() == [-1.0, 0.0]


# -- advantages of one's own -------------------------------------------------------------------------------------------


def first_minus_rest(rewards, groups):
    """Needs the whole batch: a reward less the batch's mean; of the group only its prompt's row is read."""
    assert len(groups) == len(rewards)
    return rewards - rewards.nanmean() + groups[0].prompt.index


def scored(*rewards):
    return [Group(Prompt(0, [5], "", {}), reward=list(reward)) for reward in rewards]


def test_advantages_of_ones_own():
    config = make_config(advantage_fn=first_minus_rest, num_generations=2)
    groups = scored([1.0, 2.0], [NAN, 6.0])
    set_advantages(groups, config)
    assert [group.advantages for group in groups] == [[-2.0, -1.0], [0.0, 3.0]]
    assert Dealer(1, config).missing_tokens() == math.inf


@pytest.mark.parametrize(
    ("advantage_fn", "reason"),
    [
        (lambda rewards: rewards, r"raised TypeError: .*\(custom.py:"),
        (
            lambda rewards, groups: rewards.tolist(),
            "AttributeError: 'list' object has no attribute 'shape'",
        ),
        (lambda rewards, groups: rewards.mean(1), "it returned "),
        (
            lambda rewards, groups: rewards[0],
            "it returned ",
        ),  # which would fit every group by broadcasting
        (lambda rewards, groups: rewards / 0, "it returned tensor"),
        (
            lambda rewards, groups: groups[0].prompt.columns["gold"],
            r"raised KeyError: 'gold' \(test_loss.py:",
        ),
    ],
)
def test_advantages_that_are_none(advantage_fn, reason):
    config = make_config(advantage_fn=advantage_fn)
    groups = [
        Group(Prompt(row, [5], "", {}), reward=[float(n) for n in range(8)]) for row in (0, 1)
    ]
    shape = r"must return finite numbers \[2, 8\]: "
    with pytest.raises(ValueError, match=rf"^advantage_fn ({shape})?{reason}"):
        set_advantages(groups, config)


def test_a_recipe_can_change_what_train_defines(models, recipe, tmp_path):
    """`train.py` runs as `__main__`: a recipe that imports `train` must not get a second copy of it."""
    with fake_server(models["untied"], lambda ids, number: (said(ids, number), 0.0)) as one:
        path = recipe(one)
        Path(path).write_text(
            Path(path).read_text()
            + "\nimport train\ntrain.compute_advantages = lambda r, scale: 0 * r\n"
        )
        done = on_forked_ranks(0, ROOT / "train.py", path, "--max_steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = read(tmp_path, "metrics")
    assert metrics["reward_std"] > 0
    assert metrics["grad_norm"] == 0
