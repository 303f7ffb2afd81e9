"""The advantages, losses, rewards and rollouts of other papers that recipes bring, against plain loops."""

import math
import random
import statistics
from functools import partial
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documents import DOCUMENTS, blocks
from helpers import table
from test_config import make as make_config

from recipes import advantages, insert_reasoning, losses
from recipes.majority import majority_is_right, majority_vote
from rollouts.group import ENVIRONMENT, Completion, Group, Prompt
from training.metrics import check_loss

NAN, INF = math.nan, math.inf


# -- advantages ------------------------------------------------------------------------------------------------------

REWARDS = [
    [1.0, 0.0, NAN, 0.5],
    [0.0, 0.0, 0.0, 0.0],
    [NAN, NAN, NAN, NAN],
    [NAN, 2.0, NAN, NAN],
    [1.0, 1.0, 0.0, 3.0],
]


def valid(row):
    return [value for value in row if not math.isnan(value)]


def std(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def per_reward(function, rewards):
    """`function(reward, the group's valid rewards, where among them)` of each, 0 where there is none."""
    rows = []
    for row in rewards:
        of_row = []
        for place, reward in enumerate(row):
            is_none = math.isnan(reward)
            before = len(valid(row[:place]))
            of_row.append(0.0 if is_none else function(reward, valid(row), before))
        rows.append(of_row)
    return rows


def over_batch(rows, rewards):
    """Normalized over what has a reward."""
    pairs = [[*zip(*pair, strict=True)] for pair in zip(rows, rewards, strict=True)]
    counted = [value for pair in pairs for value, reward in pair if not math.isnan(reward)]
    middle, scale = mean(counted), std(counted) + 1e-4
    return [[0.0 if math.isnan(r) else (v - middle) / scale for v, r in pair] for pair in pairs]


def as_tensor(rewards):
    return torch.tensor(rewards, dtype=torch.float64)


def check(got, wanted):
    torch.testing.assert_close(got, as_tensor(wanted), rtol=1e-12, atol=1e-12)


def plain_rloo(reward, row, place):
    others = row[:place] + row[place + 1 :]
    return reward - mean(others) if others else 0.0


def plain_maxrl(reward, row, place):
    return (reward - mean(row)) / mean(row) if mean(row) > 0 else 0.0


def test_advantages():
    check(advantages.rloo(as_tensor(REWARDS), []), per_reward(plain_rloo, REWARDS))
    check(advantages.maxrl(as_tensor(REWARDS), []), per_reward(plain_maxrl, REWARDS))
    check(advantages.maxrl(as_tensor([[-1.0, 0.5]]), []), [[0.0, 0.0]])  # a mean below 0
    centred = per_reward(lambda reward, row, _: reward - mean(row), REWARDS)
    check(advantages.reinforce_plus_plus(as_tensor(REWARDS), []), over_batch(centred, REWARDS))


def test_gdpo():
    """Two functions; the first does not apply to some completions, and neither to one."""
    first = [[1.0, 0.0, NAN, 0.0], [5.0, 5.0, 5.0, 5.0], [NAN, NAN, 3.0, 4.0]]
    second = [[0.2, 0.4, NAN, 0.1], [0.0, 1.0, 0.0, 7.0], [1.0, 2.0, 3.0, NAN]]
    both = torch.stack([as_tensor(first), as_tensor(second)], dim=2)  # [groups, completions, 2]
    groups = [Group(Prompt(0, [5], "", {}), rewards=rewards) for rewards in both]
    given = (10 * both.nansum(2)).masked_fill(both.isnan().all(2), NAN)
    given[1, 3] = NAN  # it counts in its group's statistics, and not in the batch's

    def one(r, row, _):
        return (r - mean(row)) / (std(row) + 1e-4)

    summed = as_tensor(per_reward(one, first)) + as_tensor(per_reward(one, second))
    wanted = over_batch(summed.tolist(), given.tolist())
    check(advantages.gdpo(given, groups), wanted)


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus", "maxrl", "gdpo"])
@pytest.mark.parametrize("rewards", [[[NAN, NAN]], [[2.0, NAN]], [[1.0, 1.0], [0.0, 0.0]]])
def test_nothing_to_compare(name, rewards):
    groups = [Group(Prompt(0, [5], "", {}), rewards=table([r] for r in row)) for row in rewards]
    found = getattr(advantages, name)(as_tensor(rewards), groups)
    assert found.tolist() == [[0.0, 0.0]] * len(rewards)


# -- losses ----------------------------------------------------------------------------------------------------------
# Six completions of 3, 2, 3, 1, 1 and 1 tokens, of which the second and the last are masked. Ratios and
# advantages reach every branch.

OLD = [-0.7, -2.0, -0.01, -1.5, -0.2, -3.0, -1.0, -0.4, -0.5, -1.2, -1.0]
RATIO = [1.7, 3.0, 0.7, 1.3, 0.6, 0.2, 0.4, 1.3, 0.4, 2.2, 1.0]
ADVANTAGE = [1.0, 1.0, 1.0, -0.5, -0.5, -2.0, -2.0, 0.25, 1.0, -1.0, -2.0]
MASK = [1.0, 0.0, *[1.0] * 8, 0.0]
COMPLETION = [3, 3, 3, 4, 4, 7, 7, 9, 11, 12, 7]
# Of the reference's log-probs to the policy's:
GAP = [0.3, 5.0, -0.2, 0.0, 1.0, -1.0, 0.5, 0.1, 0.2, -0.3, 2.0]
TRAINED = [place for place, trains in enumerate(MASK) if trains]
NEW = [old + math.log(ratio) for old, ratio in zip(OLD, RATIO, strict=True)]


def of_completion(values, place):
    """The values of the trained tokens of a token's completion."""
    return [values[other] for other in TRAINED if COMPLETION[other] == COMPLETION[place]]


def plain_sapo(config, i):
    tau = 1.0 if ADVANTAGE[i] > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (RATIO[i] - 1)))
    slope = gate * (1 - gate) * tau * RATIO[i]  # of the gate, by log π
    return -4 / tau * gate * ADVANTAGE[i], -4 / tau * slope * ADVANTAGE[i], set()


def total_variation(new, old):
    return abs(new - old)


def kl(new, old):
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


def plain_dppo(divergence, config, i):
    moves_down, moves_up = RATIO[i] < 1 and ADVANTAGE[i] < 0, RATIO[i] > 1 and ADVANTAGE[i] > 0
    distance = divergence(math.exp(NEW[i]), math.exp(OLD[i]))
    if moves_down and distance > config.epsilon:
        return 0.0, 0.0, {"clip_ratio/low"}
    if moves_up and distance > config.clip_high:
        return 0.0, 0.0, {"clip_ratio/high"}
    return -RATIO[i] * ADVANTAGE[i] * NEW[i], -RATIO[i] * ADVANTAGE[i], set()


def plain_sequence_mask(config, i):
    drift = mean([-math.log(ratio) for ratio in of_completion(RATIO, i)])
    if ADVANTAGE[i] < 0 and drift > 0.5:
        return 0.0, 0.0, {"loss/off_policy"}
    if ADVANTAGE[i] > 0 and RATIO[i] > 1 + config.clip_high:
        return -(1 + config.clip_high) * ADVANTAGE[i], 0.0, set()
    if ADVANTAGE[i] < 0 and RATIO[i] < 1 - config.epsilon:
        return -(1 - config.epsilon) * ADVANTAGE[i], 0.0, set()
    return -RATIO[i] * ADVANTAGE[i], -RATIO[i] * ADVANTAGE[i], set()


LOW, HIGH = "clip_ratio/low", "clip_ratio/high"
PLAIN = [  # a loss, the same in plain words, what it counts, and how many tokens of the above
    (losses.sapo, plain_sapo, {}),
    (losses.dppo_tv, partial(plain_dppo, total_variation), {LOW: 2, HIGH: 1}),
    (losses.dppo_kl, partial(plain_dppo, kl), {LOW: 1, HIGH: 1}),
    (losses.off_policy_sequence_mask, plain_sequence_mask, {"loss/off_policy": 2}),
]
LOSSES = [loss_fn for loss_fn, *_ in PLAIN]


def run(loss_fn, config, new=NEW, old=OLD, ref=None, mask=MASK, dtype=torch.float64):
    logprobs = torch.tensor(new, dtype=dtype, requires_grad=True)
    others = [
        None if values is None else torch.tensor(values, dtype=dtype)
        for values in (old, ref, ADVANTAGE, mask)
    ]
    loss, sums = loss_fn(logprobs, *others, torch.tensor(COMPLETION), config)
    check_loss(loss, sums)  # the trainer takes it
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), {name: value.item() for name, value in sums.items()}


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize(("loss_fn", "plain", "expected"), PLAIN)
def test_losses(loss_fn, plain, expected, loss_type, beta):
    """Values, gradients and counts; a completion's tokens share its weight in `grpo`."""
    fields = {"kl_gradient": "forward"} if beta else {}
    config = make_config(loss_type=loss_type, beta=beta, epsilon=0.2, epsilon_high=0.25, **fields)
    loss, gradient, counts, kl = 0.0, [0.0] * len(OLD), dict.fromkeys(expected, 0.0), 0.0
    for i in TRAINED:
        value, slope, touched = plain(config, i)
        k3 = math.exp(GAP[i]) - GAP[i] - 1
        share = 1 / len(of_completion(RATIO, i)) if loss_type == "grpo" else 1.0
        loss += share * (value + beta * k3)
        gradient[i] = share * (slope + beta * (1 - math.exp(GAP[i])))
        kl += k3
        for name in touched:
            counts[name] += 1
    ref = [new + gap for new, gap in zip(NEW, GAP, strict=True)]
    got = run(loss_fn, config, ref=ref if beta else None)
    assert got[0] == pytest.approx(loss, rel=1e-12)
    assert got[1] == pytest.approx(gradient, rel=1e-12, abs=1e-14)
    assert counts == expected
    assert got[2] == pytest.approx(counts | ({"kl": kl} if beta else {}))


@pytest.mark.parametrize(
    ("loss_fn", "new", "old", "advantage", "gradient"),
    [
        # From e^-10 to e^-2, by less than ε_high = .2 as a difference: its weight is bounded.
        (losses.dppo_tv, -2.0, -10.0, 1.0, -20.0),
        (losses.dppo_tv, -2.0, -4.0, 1.0, -math.exp(2)),
        # A token that was certain has a probability of 0 in its binary distribution, whose
        # logarithm must not hide the divergence.
        (losses.dppo_kl, -0.7, 0.0, -1.0, 0.0),
        (losses.dppo_kl, -0.1, 0.0, -1.0, math.exp(-0.1)),
        (losses.dppo_kl, 0.0, -0.7, 1.0, 0.0),
    ],
)
def test_dppo_of_one_token(loss_fn, new, old, advantage, gradient):
    logprobs = torch.tensor([new], requires_grad=True)
    others = (torch.tensor([old]), None, torch.tensor([advantage]), torch.ones(1))
    loss_fn(logprobs, *others, torch.zeros(1, dtype=torch.long), make_config())[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("mask", [[0.0] * 11, [False] * 11])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_mask_of_zeros(loss_fn, mask):
    """A filler row, whatever stands in it."""
    odd = [-INF, INF, NAN, -INF, -1.0, 0.0, 1e30, -1e30, NAN, INF, 0.0]
    config = make_config(beta=0.1, loss_type="grpo")
    loss, gradient, sums = run(loss_fn, config, new=odd, ref=odd[::-1], mask=mask)
    assert (loss, gradient) == (0.0, [0.0] * 11)
    assert set(sums.values()) <= {0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_extremes(loss_fn, dtype):
    """Masked infinities stay out, and log-ratios beyond any exp give finite gradients."""
    new = [-1e4, -INF, -1e-9, -50.0, 0.0, -1e-30, -1e3, -1.0, 0.0, -30.0, INF]
    old = [-1.0, INF, -80.0, -1e-9, -1e4, 0.0, -1e-3, -1.0, -30.0, 0.0, INF]
    ref = [0.0, NAN, -1e4, -1.0, -1e4, -2.0, 0.0, -1.0, 0.0, 0.0, -INF]
    config = make_config(beta=0.1)
    loss, gradient, sums = run(loss_fn, config, new=new, old=old, ref=ref, dtype=dtype)
    assert all(map(math.isfinite, [loss, *gradient, *sums.values()]))
    assert gradient[1] == gradient[10] == 0.0


# -- majority votes --------------------------------------------------------------------------------------------------


BOXED = [r"so \boxed{\frac12}", r"\boxed{1/2} it is", r"no, \boxed{3}", r"\boxed{0.5}"]


@pytest.mark.parametrize(
    ("completions", "votes"),
    [
        ([*BOXED, r"it is \boxed{3", "3"], [1, 1, 0, 1, 0, 0]),
        (["7", " 8\n", "8 ", "9"], [0, 1, 1, 0]),
        (["7", "8", "8", "7"], [1, 0, 0, 1]),  # of equally many, the first
        (["", " ", r"\boxed{4", "5"], [0, 0, 0, 1]),  # no answer has no vote
        (["", ""], [0, 0]),
    ],
)
def test_majority_vote(completions, votes):
    assert majority_vote(completions=completions, completion_ids=[]) == votes


@pytest.mark.parametrize(
    ("completions", "is_right"),
    [
        (["7", " 8", "8", "9"], True),
        ([r"\boxed{8}", "7", "8", "9"], True),
        (["7", "8", "7", "9"], False),  # though one is right
        (["", "", "", ""], False),
    ],
)
def test_majority_is_right(completions, is_right):
    assert majority_is_right(completions=completions, answer=["8"] * 4) == [is_right] * 4


# -- inserted reasoning ----------------------------------------------------------------------------------------------

PROMPT = Prompt(0, [51, 52, 61], "34=", {})


class Talker:
    """A server whose tokens are characters: it says `text`, and after a cue `again`, as far as it may."""

    def __init__(self, text, again="9"):
        self.text, self.again, self.asked = text, again, []
        self.tokenizer = self

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [*map(ord, text)]}

    def decode(self, token):
        return chr(token)

    def generate(self, prompt, sampling, images=None):
        self.asked.append((list(prompt), sampling))
        text = self.text if list(prompt) == PROMPT.token_ids else self.again
        said = [*map(ord, text[: sampling["max_tokens"]])]
        logprobs = [-0.5 - len(self.asked)] * len(said)
        versions = [3, *[4] * (len(said) - 1)]
        return [Completion(said, logprobs, "stop", versions) for _ in range(sampling["n"])]


def text_of(completion):
    return "".join(map(chr, completion.token_ids.tolist()))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_half_of_a_group_thinks_again(n, monkeypatch):
    """Each rewritten one is a beginning of a sampled one, the cue, which does not train, and what was sampled then."""
    monkeypatch.setattr(insert_reasoning, "CUE", "=?")
    talker = Talker("1234", again="567")
    sampling = {"n": n, "max_tokens": 8, "temperature": 1.0}
    completions = insert_reasoning.think_again(talker, PROMPT, sampling)
    plain, rewritten = completions[: n - n // 2], completions[n - n // 2 :]
    assert len(rewritten) == n // 2
    assert all(
        text_of(each) == "1234" and ENVIRONMENT not in each.weight_versions for each in plain
    )
    assert len(talker.asked) == 1 + n // 2
    for completion in rewritten:  # asked for at once, so in any order
        kept, cue, said = text_of(completion).partition("=?")
        assert "1234".startswith(kept)
        assert 0 < len(kept) < 4
        assert cue + said == "=?567"
        prompt, sampling = [*PROMPT.token_ids, *map(ord, kept + cue)], {"n": 1, "temperature": 1.0}
        assert (prompt, sampling | {"max_tokens": 8 - len(kept + cue)}) in talker.asked[1:]
        is_sampled = completion.weight_versions != ENVIRONMENT
        assert is_sampled.tolist() == [True] * len(kept) + [False] * 2 + [True] * 3
        assert completion.sampler_logprobs[: len(kept)].tolist() == [-1.5] * len(kept)
        assert set(completion.weight_versions[is_sampled].tolist()) == {3, 4}


def test_what_follows_the_last_cue_is_judged():
    said = ["12=34", "34", "34=12", "1=2=34", "34="]
    assert insert_reasoning.right_at_last(said, ["34"] * 5) == [1, 1, 0, 1, 0]


def test_it_is_cut_after_a_break_and_leaves_room(monkeypatch):
    """Full stops end with a line break, and letters begin with one."""
    monkeypatch.setattr(insert_reasoning, "BREAK", "\n")
    monkeypatch.setattr(insert_reasoning, "CUE", "=?")
    written = lambda _, token: ".\n" if chr(token) == "." else "\n" + chr(token)
    monkeypatch.setattr(Talker, "decode", written)

    def said(text, **sampling):
        return insert_reasoning.think_again(Talker(text), PROMPT, {"n": 2, **sampling})

    cuts = set()
    for seed in range(20):
        random.seed(seed)
        _, completion = said("a.b.c.d.", max_tokens=8)
        assert len(completion.token_ids) <= 8
        cuts.add(text_of(completion))
    assert cuts == {"a.=?9", "a.b.=?9"}  # after the third break there is no room for an answer
    for text in ("abc", "."):  # nothing to cut
        first, second = said(text, max_tokens=6)
        assert torch.equal(first.token_ids, second.token_ids)


def test_an_entropy_of_ones_own_stays():
    """A coefficient of that name has a default, or is bound, and is not taken for a wish."""

    def with_default(logprobs, old, ref, advantages, mask, completion, config, entropy=0.5):
        return (logprobs * mask).sum() * entropy, {}

    assert not make_config(loss_fn=with_default).loss_reads_entropy
    assert not make_config(loss_fn=partial(losses.entropy_bonus, entropy=0.5)).loss_reads_entropy
    assert make_config(loss_fn=losses.entropy_bonus).loss_reads_entropy
    assert not make_config().loss_reads_entropy


def test_the_examples_of_the_documents():
    """The leave-one-out baseline is the recipe's, the environment's two turns give a reward, k3 its own gradient."""
    ran: dict = {}
    for block in blocks("python", DOCUMENTS["docs/hooks.md"]):
        exec(block, ran)
    rewards = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(ran["rloo"](rewards, []), advantages.rloo(rewards, []))
    turn = Completion([5] * 9, [-1.0] * 9, "stop", 0)
    asked = []

    def generate(ids, sampling):
        asked.append((ids, sampling))
        return [turn] * sampling["n"]

    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [7])
    server: Any = SimpleNamespace(generate=generate, tokenizer=tokenizer)
    games = ran["play"](server, Prompt(0, [3], "", {}), {"n": 2, "stop": ["x"]})
    assert [game.info for game in games] == [{"score": 0.0}] * 2
    assert asked[1:] == [([3, *[5] * 9, 7], {"n": 1, "stop": ["x"]})] * 2
    assert games[0].token_ids.tolist() == [*[5] * 9, 7, *[5] * 9]
    is_sampled = games[0].weight_versions != ENVIRONMENT
    assert is_sampled.tolist() == [True] * 9 + [False] + [True] * 9
    assert ran["what_it_scored"](["a"], [0.5]) == [0.5]
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    teacher = torch.tensor([-1.5, -INF])
    loss, sums = ran["k3"](logprobs, None, teacher, None, torch.tensor([1.0, 0.0]), None, None)
    assert loss.item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == pytest.approx([1 - math.exp(-0.5), 0.0])
    assert sums == {}
