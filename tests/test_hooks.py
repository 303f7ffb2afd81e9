"""The advantages, losses, rewards and rollouts of other papers that recipes bring, against plain loops."""

import math
import random
import statistics
from functools import partial
from statistics import mean
from typing import Any

import pytest
import torch
from documents import DOCUMENTS, blocks
from helpers import make_tokenizer, table
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
    """`function(reward, the group's valid rewards)` of each; NaN stays NaN."""
    return [[r if math.isnan(r) else function(r, valid(row)) for r in row] for row in rewards]


def over_batch(rows):
    """Normalized over what is not NaN."""
    counted = [value for row in rows for value in valid(row)]
    middle, scale = mean(counted), std(counted) + 1e-4
    return [[(value - middle) / scale for value in row] for row in rows]


def check(got, wanted):
    """Where there is no reward, the advantage is 0."""
    torch.testing.assert_close(got, table(wanted).nan_to_num(0.0), rtol=1e-12, atol=1e-12)


def plain_rloo(reward, row):
    num_others = len(row) - 1
    return reward - (sum(row) - reward) / num_others if num_others else 0.0


def plain_maxrl(reward, row):
    return (reward - mean(row)) / mean(row) if mean(row) > 0 else 0.0


def test_advantages():
    rewards = table(REWARDS)
    check(advantages.rloo(rewards, []), per_reward(plain_rloo, REWARDS))
    check(advantages.maxrl(rewards, []), per_reward(plain_maxrl, REWARDS))
    check(advantages.maxrl(table([[-1.0, 0.5]]), []), [[0.0, 0.0]])  # a mean below 0
    centred = per_reward(lambda reward, row: reward - mean(row), REWARDS)
    check(advantages.reinforce_plus_plus(rewards, []), over_batch(centred))


def test_gdpo():
    """Two functions; the first does not apply to some completions, and neither to one."""
    first = [[1.0, 0.0, NAN, 0.0], [5.0, 5.0, 5.0, 5.0], [NAN, NAN, 3.0, 4.0]]
    second = [[0.2, 0.4, NAN, 0.1], [0.0, 1.0, 0.0, 7.0], [1.0, 2.0, 3.0, NAN]]
    both = torch.stack([table(first), table(second)], dim=2)  # [groups, completions, 2]
    groups = [Group(Prompt(0, [5], "", {}), rewards=rewards) for rewards in both]
    given = (10 * both.nansum(2)).masked_fill(both.isnan().all(2), NAN)
    given[1, 3] = NAN  # it counts in its group's statistics, and not in the batch's

    def one(r, row):
        return (r - mean(row)) / (std(row) + 1e-4)

    of_first, of_second = (table(per_reward(one, each)).nan_to_num() for each in (first, second))
    summed = (of_first + of_second).masked_fill(given.isnan(), NAN)
    check(advantages.gdpo(given, groups), over_batch(summed.tolist()))


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus", "maxrl", "gdpo"])
@pytest.mark.parametrize("rewards", [[[NAN, NAN]], [[2.0, NAN]], [[1.0, 1.0], [0.0, 0.0]]])
def test_nothing_to_compare(name, rewards):
    groups = [Group(Prompt(0, [5], "", {}), rewards=table([r] for r in row)) for row in rewards]
    found = getattr(advantages, name)(table(rewards), groups)
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


def run(
    loss_fn, config, new=NEW, old=OLD, ref=None, advantage=ADVANTAGE, mask=MASK, dtype=torch.float64
):
    logprobs = torch.tensor(new, dtype=dtype, requires_grad=True)
    others = [
        None if values is None else torch.tensor(values, dtype=dtype)
        for values in (old, ref, advantage, mask)
    ]
    loss, sums = loss_fn(logprobs, *others, torch.tensor(COMPLETION[: len(new)]), config)
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
    one = {"new": [new], "old": [old], "advantage": [advantage], "mask": [1.0]}
    assert run(loss_fn, make_config(), **one)[1] == pytest.approx([gradient])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_extremes(loss_fn, dtype, loss_type):
    """Masked infinities stay out, and log-ratios beyond any exp give finite gradients; a filler row gives none."""
    new = [-1e4, NAN, -1e-9, -50.0, 0.0, -1e-30, -1e3, -1.0, 0.0, -30.0, INF]
    old = [-1.0, INF, -80.0, -1e-9, -1e4, 0.0, -1e-3, -1.0, -30.0, 0.0, INF]
    ref = [0.0, NAN, -1e4, -1.0, -1e4, -2.0, 0.0, -1.0, 0.0, 0.0, -INF]
    config = make_config(beta=0.1, loss_type=loss_type)
    row: Any = {"new": new, "old": old, "ref": ref, "dtype": dtype}
    loss, gradient, sums = run(loss_fn, config, **row)
    assert all(map(math.isfinite, [loss, *gradient, *sums.values()]))
    assert gradient[1] == gradient[10] == 0.0
    loss, gradient, sums = run(loss_fn, config, **row, mask=[0.0] * 11)
    assert {loss, *gradient, *sums.values()} == {0.0}


# -- majority votes --------------------------------------------------------------------------------------------------


BOXED = [r"so \boxed{\frac12}", r"\boxed{1/2} it is", r"no, \boxed{3}", r"\boxed{0.5}"]


@pytest.mark.parametrize(
    ("completions", "votes", "is_right"),
    [
        ([*BOXED, r"it is \boxed{3", "3"], [1, 1, 0, 1, 0, 0], False),
        (["7", " 8\n", "8 ", "9"], [0, 1, 1, 0], True),
        ([r"\boxed{8}", "7", "8", "9"], [1, 0, 1, 0], True),
        (["7", "8", "8", "7"], [1, 0, 0, 1], False),  # of equally many, the first
        (["", " ", r"\boxed{4", "5"], [0, 0, 0, 1], False),  # no answer has no vote
        (["", ""], [0, 0], False),
    ],
)
def test_majority(completions, votes, is_right):
    """Where 8 is right."""
    size = len(completions)
    assert majority_vote(completions=completions, completion_ids=[]) == votes
    assert majority_is_right(completions=completions, answer=["8"] * size) == [is_right] * size


# -- inserted reasoning ----------------------------------------------------------------------------------------------

PROMPT = Prompt(0, [51, 52, 61], "34=", {})
TOKENIZER = make_tokenizer()  # whose tokens are characters


def ids_of(text):
    return TOKENIZER(text)["input_ids"]


def text_of(completion):
    return TOKENIZER.decode(completion.token_ids)


class Talker:
    """A server that says `text`, and after a cue `again`, as far as it may."""

    tokenizer = TOKENIZER

    def __init__(self, text, again="9"):
        self.text, self.again, self.asked = text, again, []

    def generate(self, prompt, sampling, images=None):
        self.asked.append((list(prompt), sampling))
        text = self.text if list(prompt) == PROMPT.token_ids else self.again
        said = ids_of(text)[: sampling["max_tokens"]]
        logprobs = [-0.5 - len(self.asked)] * len(said)
        versions = [3, *[4] * (len(said) - 1)]
        return [Completion(said, logprobs, "stop", versions) for _ in range(sampling["n"])]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_half_of_a_group_thinks_again(n, monkeypatch):
    """Each rewritten one is a beginning of a sampled one, the cue, which does not train, and what was sampled then."""
    monkeypatch.setattr(insert_reasoning, "CUE", "=?")
    talker = Talker("1234", again="567")
    sampling = {"n": n, "max_tokens": 8, "temperature": 1.0}
    completions = insert_reasoning.think_again(talker, PROMPT, sampling)
    plain, rewritten = completions[: n - n // 2], completions[n - n // 2 :]
    assert len(rewritten) == n // 2
    assert [text_of(each) for each in plain] == ["1234"] * len(plain)
    assert len(talker.asked) == 1 + n // 2
    for completion in rewritten:  # asked for at once, so in any order
        kept, cue, said = text_of(completion).partition("=?")
        assert kept in ("1", "12", "123")
        assert cue + said == "=?567"
        room = {"n": 1, "max_tokens": 8 - len(kept + cue)}
        assert ([*PROMPT.token_ids, *ids_of(kept + cue)], sampling | room) in talker.asked[1:]
        is_sampled = completion.weight_versions != ENVIRONMENT
        assert is_sampled.tolist() == [True] * len(kept) + [False] * 2 + [True] * 3
        assert completion.sampler_logprobs[: len(kept)].tolist() == [-1.5] * len(kept)
        assert set(completion.weight_versions[is_sampled].tolist()) == {3, 4}


def test_what_follows_the_last_cue_is_judged():
    said = ["12=34", "34", "34=12", "1=2=34", "34="]
    assert insert_reasoning.right_at_last(said, ["34"] * 5) == [1, 1, 0, 1, 0]


def test_it_is_cut_after_a_break_and_leaves_room(monkeypatch):
    monkeypatch.setattr(insert_reasoning, "BREAK", "\n")
    monkeypatch.setattr(insert_reasoning, "CUE", "=?")

    def said(text, **sampling):
        return insert_reasoning.think_again(Talker(text), PROMPT, {"n": 2, **sampling})

    cuts = set()
    for seed in range(20):
        random.seed(seed)
        _, completion = said("a\nb\nc\nd\n", max_tokens=8)
        cuts.add(text_of(completion))
    # After the third break there is no room for an answer.
    assert cuts == {"a\n=?9", "a\nb\n=?9"}
    for text in ("abc", "\n"):  # nothing to cut
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
    rewards = table([[1.0, 0.0, 2.0], [0.5, 0.5, 0.0]])
    torch.testing.assert_close(ran["rloo"](rewards, []), advantages.rloo(rewards, []))
    talker, sampling = Talker("1234", again="567"), {"n": 2, "max_tokens": 8}
    games = ran["play"](talker, PROMPT, sampling)
    assert [game.info for game in games] == [{"score": 1.0}] * 2
    second = [*PROMPT.token_ids, *ids_of("1234!")], sampling | {"n": 1}
    assert talker.asked[1:] == [second] * 2
    assert text_of(games[0]) == "1234!567"
    is_sampled = games[0].weight_versions != ENVIRONMENT
    assert is_sampled.tolist() == [True] * 4 + [False] + [True] * 3
    assert ran["what_it_scored"](["a"], [0.5]) == [0.5]
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    teacher = torch.tensor([-1.5, -INF])
    loss, sums = ran["k3"](logprobs, None, teacher, None, torch.tensor([1.0, 0.0]), None, None)
    assert loss.item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.tolist() == pytest.approx([1 - math.exp(-0.5), 0.0])
    assert sums == {}
