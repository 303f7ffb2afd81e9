"""Advantages, losses, corrections and their metrics against numbers worked out by hand."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, on_forked_ranks, on_ranks, read
from test_config import make as make_config

import train
import training.metrics
from config import UserError
from recipes import losses
from rollouts.group import Group, Prompt
from train import compute_advantages, grpo_loss, off_policy_weights, set_advantages
from training.batching import MicroBatch
from training.metrics import TokenSums
from utils import process_group

NAN = math.nan


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def scored(*rewards):
    return [Group(Prompt(0, [5], "", {}), reward=list(reward)) for reward in rewards]


# -- advantages ------------------------------------------------------------------------------------

OF_1_0_0_0 = rows([0.75, -0.25, -0.25, -0.25])
OF_BOTH = torch.cat([OF_1_0_0_0, -OF_1_0_0_0])


@pytest.mark.parametrize(
    ("scale", "rewards", "deviations", "std"),
    [
        # Deviations .75 -.25 -.25 -.25: unbiased variance (.5625 + 3 * .0625) / 3 = .25.
        ("group", [[1, 0, 0, 0]], OF_1_0_0_0, 0.5),
        ("group", [[2, 2, 2, 2]], rows([0, 0, 0, 0]), 0),
        # Of all eight the mean is .5, squares are 8 * .25, and the unbiased variance is 2/7.
        ("batch", [[1, 0, 0, 0], [0, 1, 1, 1]], OF_BOTH, math.sqrt(2 / 7)),
        ("none", [[3, 1]], rows([1, -1]), None),
        # Without a reward it is 0, and so it is where there is nothing to compare.
        ("group", [[NAN, NAN, NAN], [NAN, 5, NAN]], rows([0, 0, 0], [0, 0, 0]), 1),
        ("group", [[1, NAN, 3]], rows([-1, 0, 1]), math.sqrt(2)),
        ("batch", [[0, 1], [NAN, NAN]], rows([-0.5, 0.5], [0, 0]), math.sqrt(0.5)),
        ("batch", [[NAN, NAN]], rows([0, 0]), 1),
        ("none", [[NAN, NAN]], rows([0, 0]), 1),
    ],
)
def test_advantages(scale, rewards, deviations, std):
    expected = deviations if std is None else deviations / (std + 1e-4)
    got = compute_advantages(rows(*rewards), scale)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    groups = scored(*rewards)
    set_advantages(groups, make_config(scale_rewards=scale))
    assert [group.advantages for group in groups] == got.tolist()


BEYOND_THE_GROUP = {  # changes of `compute_advantages` as people make them
    "the batch's mean": lambda rewards, scale: rewards - rewards.nanmean(),
    "the number of groups": lambda rewards, scale: compute_advantages(rewards) / len(rewards),
}


@pytest.mark.parametrize("changed", BEYOND_THE_GROUP.values(), ids=BEYOND_THE_GROUP)
def test_advantages_beyond_the_group_need_the_batch(changed, monkeypatch):
    """`compute_advantages` gets groups as they come; an `advantage_fn` has the whole batch."""
    monkeypatch.setattr(train, "compute_advantages", changed)
    rewards = [[1.0, 0.0, 0.5, 0.0], [3.0, 7.0, 2.0, 1.0], [0.0, 1.0, 1.0, 9.0]]
    for scale in ("group", "none"):
        with pytest.raises(UserError, match="^compute_advantages gives .* make it an advantage_fn"):
            set_advantages(scored(*rewards), make_config(scale_rewards=scale))
    groups = scored(*rewards)
    set_advantages(groups, make_config(scale_rewards="batch"))
    assert [group.advantages for group in groups] == changed(rows(*rewards), "batch").tolist()


def test_advantages_of_ones_own():
    """They are of the whole batch and its groups; a completion without a reward has 0."""
    own = lambda rewards, groups: rewards - rewards.nanmean() + len(groups)
    groups = scored([1.0, 2.0], [NAN, 6.0])
    set_advantages(groups, make_config(advantage_fn=own))
    assert [group.advantages for group in groups] == [[0.0, 1.0], [0.0, 5.0]]


RETURNED = r"must return finite numbers \[2, 8\]: "


@pytest.mark.parametrize(
    ("advantage_fn", "reason"),
    [
        (lambda rewards: rewards, r"raised TypeError: .*\(custom.py:"),
        (lambda rewards, groups: rewards.tolist(), f"{RETURNED}AttributeError: 'list' object has "),
        (lambda rewards, groups: rewards[0], f"{RETURNED}it returned "),  # fits by broadcasting
        (lambda rewards, groups: rewards / 0, f"{RETURNED}it returned tensor"),
        (lambda rewards, groups: groups[0].prompt.columns["gold"], "raised KeyError: 'gold'"),
    ],
)
def test_advantages_that_are_none(advantage_fn, reason):
    groups = scored(range(8), range(8))
    with pytest.raises(ValueError, match=f"^advantage_fn {reason}"):
        set_advantages(groups, make_config(advantage_fn=advantage_fn))


def test_a_recipe_can_change_what_train_defines(stand_in, recipe, tmp_path):
    """`train.py` runs as `__main__`: a recipe that imports `train` gets no second copy of it."""
    path = Path(recipe(stand_in()))
    change = "\nimport train\ntrain.compute_advantages = lambda rewards, scale: 0 * rewards\n"
    path.write_text(path.read_text() + change)
    on_forked_ranks(0, ROOT / "train.py", path, "--max_steps", "1", status=0)
    (metrics,) = read(tmp_path, "metrics")
    assert metrics["reward_std"] > 0
    assert metrics["grad_norm"] == 0


# -- losses ----------------------------------------------------------------------------------------
# Three completions of 2, 1 and 2 tokens, whose ratios and advantages take every branch of the clip.
# The last token is masked: its infinity stays out.

RATIO = [1.5, 0.5, 0.5, 1.1, math.inf]
ADVANTAGE = [1.0, 1.0, -1.0, -2.0, -2.0]
MASK = [1.0, 1.0, 1.0, 1.0, 0.0]
COMPLETION = torch.tensor([4, 4, 5, 6, 6])
OLD = [-1.0, -2.0, -0.5, -1.5, -0.7]
LOGPROBS = [old + math.log(ratio) for old, ratio in zip(OLD, RATIO, strict=True)]


def loss_and_gradient(
    config, ratio=RATIO, ref=None, mask=MASK, advantage=ADVANTAGE, loss_fn=grpo_loss
):
    old = rows(*OLD)
    logprobs = (old + rows(*ratio).log()).requires_grad_()
    args = (rows(*advantage), rows(*mask), COMPLETION, config)
    loss, sums = loss_fn(logprobs, old, ref, *args)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), {name: value.item() for name, value in sums.items()}


# With epsilon .2 token 0 is clipped to 1.2 (A > 0), 1 keeps .5, 2 is clipped to .8 (A < 0), 3 keeps
# 1.1: -min(ρA, clip A) is -1.2, -.5, .8, 2.2. The gradient of an unclipped term is -ρA.
CLIPPED = [0, -0.5, 0, 2.2, 0]
FIVE = {"ratio": [1.0, 1.0, 1.0, 5.0, 1.0]}
MEAN = math.sqrt(0.75)  # of the ratios of completion 4, unclipped; both tokens share its gradient
SEQUENCE = {"importance_level": "sequence"}
CISPO = {"loss_type": "cispo"}  # -sg(clip ρ)·A·logprob: the loss follows from its gradient


@pytest.mark.parametrize(
    ("fields", "inputs", "loss", "gradient", "clipped"),
    [
        # A sum over tokens, also with bnpo and dr_grpo.
        ({"loss_type": "dapo"}, {}, -1.2 - 0.5 + 0.8 + 2.2, CLIPPED, (1, 1)),
        # A sum of the means of completions, over their unmasked tokens.
        ({"loss_type": "grpo"}, {}, -1.7 / 2 + 0.8 + 2.2, [0, -0.25, 0, 2.2, 0], (1, 1)),
        ({"loss_type": "grpo"}, {"mask": [0, 1, 1, 1, 0]}, -0.5 + 0.8 + 2.2, CLIPPED, (1, 0)),
        ({"epsilon_high": 0.6}, {}, -1.5 - 0.5 + 0.8 + 2.2, [-1.5, -0.5, 0, 2.2, 0], (1, 0)),
        ({"epsilon": 0.6}, {}, -1.5 - 0.5 + 0.5 + 2.2, [-1.5, -0.5, 0.5, 2.2, 0], (0, 0)),
        # Token 3 at ratio 5, A -2: unbounded 10; with delta 2 it is -min(2·-2, 1.2·-2) = 4.
        ({}, FIVE, -1 - 1 + 1 + 10, [-1, -1, 1, 10, 0], (0, 0)),
        ({"delta": 2.0}, FIVE, -1 - 1 + 1 + 4, [-1, -1, 1, 0, 0], (0, 0)),
        (SEQUENCE, {}, -2 * MEAN + 0.8 + 2.2, [-MEAN, -MEAN, 0, 2.2, 0], (1, 0)),
        # A token whose advantage a correction has set to 0 gets no gradient of its completion.
        (SEQUENCE, {"advantage": [0, 1, -1, -2, -2]}, -MEAN + 3, [0, -MEAN, 0, 2.2, 0], (1, 0)),
        # Without a lower bound unless set below 1; and epsilon says nothing of the upper one.
        (CISPO | {"epsilon": 0.2}, {}, None, [-1.2, -0.8, 0.8, 2.2, 0], (1, 1)),
        (CISPO, {}, None, [-1.2, -0.5, 0.5, 2.2, 0], (0, 1)),
        (CISPO | {"epsilon": 1.5}, {}, None, [-1.2, -0.5, 0.5, 2.2, 0], (0, 1)),
        (CISPO | {"epsilon_high": 0.3}, {}, None, [-1.3, -0.5, 0.5, 2.2, 0], (0, 1)),
    ],
)
def test_losses_by_hand(fields, inputs, loss, gradient, clipped):
    got_loss, got_gradient, sums = loss_and_gradient(make_config(**fields), **inputs)
    if loss is None:
        loss = (rows(*gradient[:4]) * rows(*LOGPROBS[:4])).sum().item()
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)
    assert (sums["clip_ratio/low"], sums["clip_ratio/high"]) == clipped


@pytest.mark.parametrize(
    ("loss_fn", "fields"),
    [(grpo_loss, {}), (grpo_loss, SEQUENCE), (losses.sapo, {}), (losses.dppo_tv, {})],
)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_kl_is_k3(direction, loss_fn, fields):
    """k = e^x - x - 1 of x = ref - logprob; reverse multiplies it by ρ, never the completion's."""
    if direction == "forward":  # reverse, unless set
        fields = fields | {"kl_gradient": "forward"}
    config = make_config(beta=0.3, old_logprobs="sampler", **fields)
    gaps = rows(0.3, -0.2, 0.0, 1.0)
    ref = torch.cat([rows(*LOGPROBS[:4]) + gaps, rows(1e9)])
    loss, gradient, sums = loss_and_gradient(config, ref=ref, advantage=[0] * 5, loss_fn=loss_fn)
    k3 = gaps.exp() - gaps - 1
    penalty, slope = k3, 1 - gaps.exp()
    if direction == "reverse":  # the gradient goes through ρ, too
        ratio = rows(*RATIO[:4])
        penalty, slope = ratio * k3, ratio * (k3 + slope)
    assert sums["kl"] == pytest.approx(k3.sum().item())
    assert loss == pytest.approx(0.3 * penalty.sum().item())
    assert gradient == pytest.approx([*(0.3 * slope).tolist(), 0])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
@pytest.mark.parametrize("gap", [2000.0, -2000.0])
def test_no_finite_loss_has_a_gradient_that_is_not(level, loss_type, gap):
    """exp of either gap is infinity or 0, and infinity times a clipped term's 0 would be NaN."""
    fields = {"importance_level": level, "loss_type": loss_type}
    config = make_config(beta=0.5, kl_gradient="reverse", **fields)
    old = rows(-1.0, -1.0, -1.0)
    for sign in (1, -1):
        logprobs = (old + rows(gap, 0, 0)).requires_grad_()
        args = (sign * rows(1, 1, 1), rows(1, 1, 1), torch.tensor([0, 0, 1]), config)
        loss, _ = grpo_loss(logprobs, old, old, *args)
        loss.backward()
        assert logprobs.grad is not None
        assert loss.isfinite()
        assert logprobs.grad.isfinite().all()


# -- off-policy ------------------------------------------------------------------------------------
# Server log-probs such that trainer / server is 1, 3, 0.25, 0.8 and (masked) infinity.

W = [1.0, 3.0, 0.25, 0.8]
SAMPLER = [old - math.log(w) for old, w in zip(OLD[:4], W, strict=True)] + [-math.inf]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, 2, 0.25, 0.8]),  # TIS: min(w, 2)
        ({"correction_cap": 5.0}, W),
        ({"off_policy_correction": "mask"}, [1, 0, 0, 0.8]),  # IcePop: 0 outside [0.5, 2]
        ({"off_policy_correction": "mask", "correction_floor": 0.2, "correction_cap": 5.0}, W),
        ({"off_policy_correction": "none"}, [1, 1, 1, 1]),
        ({"old_logprobs": "sampler"}, [1, 1, 1, 1]),
        # Products 1 * 3, 0.25 and 0.8; the mean of the first is sqrt(3).
        ({"off_policy_correction": "sequence"}, [2, 2, 0.25, 0.8]),
        ({"off_policy_correction": "sequence", "correction_cap": 5.0}, [3, 3, 0.25, 0.8]),
        ({"off_policy_correction": "sequence_mask"}, [0, 0, 0, 0.8]),
        ({"off_policy_correction": "geometric"}, [math.sqrt(3), math.sqrt(3), 0.25, 0.8]),
        ({"off_policy_correction": "geometric_mask"}, [math.sqrt(3), math.sqrt(3), 0, 0.8]),
    ],
)
def test_off_policy_weights(fields, expected):
    tensors = (rows(*OLD), rows(*SAMPLER), rows(*MASK), COMPLETION)
    weights = off_policy_weights(*tensors, make_config(**fields))
    assert weights[:4].tolist() == pytest.approx(expected)
    assert math.isfinite(weights[4])


# -- their metrics ---------------------------------------------------------------------------------

NO_ROW: Any = None


def tokens_row(servers, sampler_logprobs, mask=None):
    mask = torch.tensor(mask or [1.0] * len(servers))
    return MicroBatch(NO_ROW, mask, mask, rows(*sampler_logprobs), torch.tensor(servers))


def test_mismatch_of_trainer_and_server(monkeypatch, device):
    """Gaps 0, ln 3, -ln 4, ln .8, in two micro-batches; k3(x) = e^x - x - 1, ESS = (Σw)² / 4Σw²."""
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 2)
    gaps = [math.log(w) for w in W]
    servers = [0, 1, 8, 8, 8]  # token 0 is of an older policy, 1 of server 0, 2 and 3 of server 7
    sums = TokenSums(device)
    for part in (slice(0, 3), slice(3, 5)):
        entropy = torch.full_like(rows(*OLD[part]), 0.5)
        row = tokens_row(servers[part], SAMPLER[part], MASK[part])
        sums.add({"kl": row.mask.sum()}, entropy, rows(*OLD[part]), row)
    metrics, by_server = sums.metrics()
    of_no_rows, no_gaps = TokenSums(device).metrics()
    assert no_gaps == {}
    assert math.isnan(of_no_rows["sampling/current_logp_difference"])
    distances = [abs(gap) for gap in gaps]
    assert by_server == {7: pytest.approx(sum(distances[2:]) / 2)}  # one token judges no server
    k3 = [w - gap - 1 for w, gap in zip(W, gaps, strict=True)]
    expected = {
        "sampling/current_logp_difference": sum(distances[1:]) / 3,
        "sampling/stale_logp_difference": distances[0],
        "sampling/current_share": 0.75,
        "sampling/sampling_logp_difference/max": math.log(4),
        "sampling/sampling_logp_difference/mean": sum(distances) / 4,
        "sampling/kl": sum(k3) / 4,
        "sampling/effective_sample_size": sum(W) ** 2 / (4 * sum(w * w for w in W)),
        "entropy": 0.5,
        "kl": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def sum_on_two_ranks():
    """Names in another order on each rank, one of them on one rank alone; a server on both."""
    training.metrics.MIN_COMPARED = 3  # in this process alone
    with process_group(60) as device:
        rank = dist.get_rank()
        sums = TokenSums(device)
        names = [("loss/a", 1.0), ("loss/b", 10.0)]
        of_loss = dict(names if rank == 0 else [*reversed(names), ("loss/c", 4.0)])
        loss_sums = {name: torch.tensor(value) for name, value in of_loss.items()}
        row = tokens_row([[0, 1, 1], [1]][rank], [[-1, -2, -0.5], [-3]][rank])
        sums.add(loss_sums, row.mask, torch.zeros_like(row.mask), row)
        metrics, by_server = sums.metrics()
        assert [metrics[f"loss/{name}"] for name in "abc"] == [0.5, 5.0, 1.0]
        assert metrics["sampling/sampling_logp_difference/max"] == 3
        assert by_server == {0: pytest.approx((2 + 0.5 + 3) / 3)}
        assert metrics["sampling/stale_logp_difference"] == 1.0
        assert metrics["sampling/current_share"] == 0.75


def test_sums_on_two_ranks(tmp_path):
    on_ranks(2, tmp_path, "test_loss.sum_on_two_ranks")


# -- a loss of one's own ---------------------------------------------------------------------------


def tried(monkeypatch, loss_fn, mask=(1.0, 1.0)):
    """The gradients of two log-probs of -1 and their entropies of 1, in a row of the trainer."""
    logprobs = torch.full((2,), -1.0, requires_grad=True)
    entropies = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(train, "token_logprobs", lambda *_, **__: (logprobs, entropies))
    packed: Any = SimpleNamespace(completion=torch.zeros(2, dtype=torch.long))
    numbers = torch.zeros(2, dtype=torch.int64)
    row = MicroBatch(packed, torch.ones(2), torch.tensor(mask), torch.full((2,), -1.0), numbers)
    sums = TokenSums(torch.device("cpu"))
    train.add_gradient(None, None, row, sums, make_config(loss_fn=loss_fn))
    return logprobs.grad, entropies.grad


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (lambda logprobs, *_: logprobs.sum(), "TypeError: "),
        (lambda logprobs, *_: (logprobs.detach().sum(), {}), "TypeError: it must return a scalar"),
        (lambda logprobs, *_: (logprobs.sum(), {"kl": 0.5}), "AttributeError: "),
        (lambda logprobs, *_: (logprobs.sum(), {"kl": logprobs}), "TypeError: .* not kl"),
        (lambda logprobs, *_: (logprobs.sum(), {"reward": logprobs.sum()}), ".*, not reward"),
        (lambda logprobs, old, ref, *_: ((logprobs - ref).sum(), {}), r".*\(test_loss.py:"),
        (lambda logprobs: logprobs.sum(), r"TypeError: .*\(train.py:"),
        (lambda *_: sys.exit(3), "SystemExit: 3"),  # one rank would leave the others alone
    ],
)
def test_a_loss_that_is_none(loss_fn, reason, monkeypatch):
    with pytest.raises(UserError, match=rf"^loss_fn raised {reason}"):
        tried(monkeypatch, loss_fn)


def with_entropies(logprobs, old, ref, advantages, mask, completion, config, entropy):
    return (logprobs * mask).sum() - entropy.sum(), {}


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda logprobs, *_: (logprobs.sum(), {}),
        lambda *a: ((1 + a[0]).sqrt().where(a[4] > 0, 0.0).sum(), {}),  # infinity times 0
        with_entropies,
    ],
)
def test_masked_tokens_do_not_train(loss_fn, monkeypatch):
    """Whatever the loss does with them, and with their entropies."""
    gradient, of_entropies = tried(monkeypatch, loss_fn, mask=(1.0, 0.0))
    assert gradient[0] != 0
    assert gradient[1] == 0
    assert not tried(monkeypatch, loss_fn, mask=(0.0, 0.0))[0].any()
    if loss_fn is with_entropies:
        assert of_entropies.tolist() == [-1.0, 0.0]
