"""Rollouts of several segments: their loss, normalizers and gradient; versions; what is refused, saved and sampled."""

import dataclasses
import itertools
from contextlib import nullcontext

import pytest
import torch
from fake_server import fake_server
from helpers import answer_in, make_tokenizer, read
from test_gradients import assert_same, make_config, make_policy, trainable
from test_hooks_of_runs import assert_identical, weights
from transformers import AutoModelForCausalLM

from config import UserError, parse_args
from recipes.replay import replaying
from rollouts.custom import check_segments
from rollouts.group import Completion, Group, Prompt
from rollouts.images import Images
from train import main, train_batch
from training.batching import Dealer, micro_batches, row_tokens
from training.logs import batch_samples
from training.metrics import batch_metrics
from utils import process_group

ADVANTAGES = [[0.9, -0.4, -0.5], [-1.1, 0.3, 0.8]]


@pytest.fixture
def device():
    with process_group(60) as device:
        yield device


def turns(g, c):
    """The sampled turns of a rollout, and what its environment said between them: all tokens are different ones."""
    start = 10 + 40 * g + 13 * c
    first, second = range(start, start + 3), range(start + 5, start + 9)
    return [[*first], [*second], [start + 11]], [[3, 4], [3]]


def prompt_of(g):
    return [5, 6, 7 + g, 8, 9][: 5 - g]


def completion(ids, reason="stop", version=0, **fields):
    return Completion(ids, [-3.0] * len(ids), reason, version, **fields)


def filled(prompt, rollouts, **fields):
    group = Group(prompt, **fields)
    group.fill(rollouts)
    return group


def make_groups(kind):
    """Two groups of three rollouts of three turns: joined; as segments that go on; or with the first turn rewritten."""
    groups = []
    for g, advantages in enumerate(ADVANTAGES):
        prompt = Prompt(g, prompt_of(g), "", {})
        rollouts: list = []
        for c in range(3):
            (first, second, third), (one, two) = turns(g, c)
            reason = "length" if (g, c) == (0, 1) else "stop"
            kept = first[-1:] if kind == "rewritten" else first
            history = [*prompt.token_ids, *kept, *one]
            begin, go_on, end = completion(first), completion(second), completion(third, reason)
            if kind == "joined":
                rollouts.append(begin.then(one, go_on).then(two, end))
            else:
                go_on = dataclasses.replace(go_on, prompt_ids=history)
                end = dataclasses.replace(end, prompt_ids=[*history, *second, *two])
                rollouts.append([begin, go_on, end])
        groups.append(filled(prompt, rollouts, advantages=advantages))
    return groups


OWN = Prompt(0, [5, 6], "", {})
FORGETS = [completion([7] * 20), completion([8] * 20, prompt_ids=[9] * 20)]


def trained_difference(config, device, groups):
    """What one step of SGD with learning rate 1 subtracts from each weight: the gradient."""
    policy = make_policy(config, device)
    before = trainable(policy)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    (rows,) = Dealer(1, config).deal(groups, is_complete=True)
    train_batch(policy, None, optimizer, schedule, rows, config, device)
    return {name: before[name] - weight for name, weight in trainable(policy).items()}


@pytest.mark.parametrize("fields", [
    {}, {"loss_type": "grpo"}, {"loss_type": "dr_grpo"}, {"share_prefix": False}, {"mask_truncated_completions": True},
    {"off_policy_correction": "truncate"}, {"off_policy_correction": "sequence"}, {"old_logprobs": "sampler"},
    {"old_logprobs": "sampler", "importance_level": "sequence", "epsilon": 0.9, "epsilon_high": 50.0},
], ids=str)  # fmt: skip
def test_turns_may_be_segments(models, device, fields):
    """Turns that are segments give what the same turns, joined, give."""
    for max_tokens in (10_000, 40):
        config = make_config(models["tied"], batch_size=2, max_tokens_per_gpu=max_tokens, **fields)
        expected = trained_difference(config, device, make_groups("joined"))
        assert_same(trained_difference(config, device, make_groups("segments")), expected)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("max_tokens", [10_000, 30])
def test_rewritten_histories(models, device, loss_type, max_tokens):
    """Against one plain row per segment, the loss written out: each sampled token once, the means over rollouts."""
    fields = {"loss_type": loss_type, "max_tokens_per_gpu": max_tokens}
    config = make_config(models["tied"], batch_size=2, **fields)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(config.model_id, dtype=torch.float32)
    total = torch.zeros(())
    for g, c in itertools.product(range(2), range(3)):
        (first, second, third), (one, two) = turns(g, c)
        prompt = prompt_of(g)
        history = [*prompt, first[-1], *one]
        of_rollout = []
        for before, ids in ((prompt, first), (history, second), ([*history, *second, *two], third)):
            logits = model(input_ids=torch.tensor([[*before, *ids]])).logits[0]
            logprobs = logits[len(before) - 1 : -1].log_softmax(-1)
            of_rollout.append(logprobs[range(len(ids)), ids])
        loss = -ADVANTAGES[g][c] * torch.cat(of_rollout)
        total = total + (loss.mean() if loss_type == "grpo" else loss.sum())
    normalizers = {"grpo": 6, "dr_grpo": 6 * config.max_completion_len, "dapo": 6 * 8}
    (total / normalizers[loss_type]).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert_same(trained_difference(config, device, make_groups("rewritten")), expected)


def test_a_tree_costs_what_its_tokens_cost():
    """Of five prompt tokens, one kept, two and one said, and eight sampled, each stands in the row once."""
    groups = make_groups("rewritten")
    config = make_config("m", batch_size=2)
    assert row_tokens(groups[:1], config) == 5 + 3 * ((3 - 1) + 1 + 2 + 4 + 1)
    (micro,) = micro_batches(groups[:1], 1000, config)
    assert micro.mask.sum() == 3 * 8


@pytest.mark.parametrize("share_prefix", [True, False])
def test_spreading_the_tail_over_ranks_cuts_no_rollout(share_prefix):
    """A loss may look at all of it; padded, its two segments take more positions than they have tokens."""
    group = filled(OWN, [FORGETS], advantages=[1.0])
    config = make_config("m", batch_size=1, share_prefix=share_prefix, loss_type="grpo")
    ranks = Dealer(2, config).deal([group], is_complete=True)
    rows = [row for rows in ranks for row in rows if row.mask.any()]
    assert [row.mask.sum() for row in rows] == [40]


def test_versions_are_of_segments():
    """The second segment was sampled by a later policy: tokens of the trained one are compared, older ones are not."""
    (group, _) = make_groups("rewritten")
    rollouts = []
    for first, second, third in group.segments:
        rollouts.append([first, dataclasses.replace(second, weight_versions=2), third])
    group.fill(rollouts)
    group.trained_version, group.reward, group.server = 2, [1.0, 0.0, 0.0], 3
    assert group.oldest_version == 0
    (micro,) = micro_batches([group], 1000, make_config("m", batch_size=2))
    by_token = dict(zip(micro.packed.targets.tolist(), micro.servers.tolist(), strict=True))
    for c in range(3):
        (first, second, third), _ = turns(0, c)
        assert {by_token[token] for token in second} == {1 + group.server}
        assert {by_token[token] for token in first + third} == {0}
    group.advantages = [0.0] * 3
    metrics = batch_metrics([group], 2, make_config("m", batch_size=2))
    assert metrics["completions/segments"] == 3
    assert metrics["completions/weight_versions"] == 2
    assert metrics["completions/mean_length"] == 8
    assert metrics["staleness/max"] == 2


LOOKS_AT_OTHERS = [
    {"loss_type": "grpo"},
    {"importance_level": "sequence"},
    {"off_policy_correction": "sequence"},
    {"off_policy_correction": "sequence_mask"},
    {"off_policy_correction": "geometric"},
    {"off_policy_correction": "geometric_mask"},
    {"loss_fn": "train.grpo_loss"},
]
LOOKS_AT_NONE = [
    {},
    {"off_policy_correction": "mask"},
    {"off_policy_correction": "truncate"},
    {"loss_type": "dr_grpo"},
]


@pytest.mark.parametrize("fields", [*LOOKS_AT_OTHERS, *LOOKS_AT_NONE], ids=str)
def test_losses_that_look_at_a_whole_rollout(fields):
    """For these its segments stay in one row, padded or not, or it is refused."""
    group = filled(OWN, [FORGETS])
    for share_prefix, size in ((True, 2 + 19 + 20 + 19 + 1), (False, 2 * 39 + 1)):
        config = make_config("m", max_tokens_per_gpu=size, share_prefix=share_prefix, **fields)
        check_segments(group, [], config)
        config = dataclasses.replace(config, max_tokens_per_gpu=size - 1)
        refused = pytest.raises(ValueError, match=f"has {size} tokens with its prompt: raise max_t")
        with refused if fields in LOOKS_AT_OTHERS else nullcontext():
            check_segments(group, [], config)


def test_rollouts_are_completions_or_lists_of_segments():
    """Rewards and logs see the last segment, with the info of all; logs show only prompts of their own."""
    one, two, three = (
        completion([n], prompt_ids=[n, n], info={"a": n, str(n): n}) for n in (7, 8, 9)
    )
    group = filled(OWN, [(one, two, three), three])
    assert [len(segments) for segments in group.segments] == [3, 1]
    assert [last.token_ids.tolist() for last in group.completions] == [[9], [9]]
    assert group.completions[0].info == {"a": 9, "7": 7, "8": 8, "9": 9}
    assert group.completions[1].info == {"a": 9, "9": 9}
    assert three.info == {"a": 9, "9": 9}
    assert group.num_sampled == [3, 1]
    assert group.num_tokens == 3 * 3 + 3
    as_served, other = completion([7], prompt_ids=[5, 6]), completion([8], prompt_ids=[5, 7])
    group = filled(OWN, [[as_served, other, completion([9])]])
    group.texts, group.reward, group.rewards = ["x"], [0.0], torch.zeros(1, 1)
    (sample,) = batch_samples([group], make_config("m"), tokenizer=make_tokenizer())
    assert ["prompt" in part for part in sample["earlier"]] == [False, True]


def test_equal_prompts_with_images_stay_apart():
    """In the trainer's rows each has its own images."""
    config = make_config("m", batch_size=2)
    groups = []
    for number in range(2):
        images = Images([5], 3, [], {"pixel_values": torch.full((1, 2), float(number))})
        prompt = Prompt(number, [5, 5, 6], "", {}, images=images)
        groups.append(
            Group(prompt, [completion([7, 8]), completion([9, 7])], advantages=[1.0, -1.0])
        )
    assert row_tokens(groups, config) == 2 * (3 + 1 + 1)
    (micro,) = micro_batches(groups, 100, config)
    assert micro.packed.prompts == [0, 1]
    assert micro.images["pixel_values"][:, 0].tolist() == [0.0, 1.0]


def test_what_no_row_takes_is_refused():
    config = make_config("m", max_tokens_per_gpu=40)
    check_segments(filled(OWN, [FORGETS]), [], config)
    with pytest.raises(ValueError, match="a completion has 40 tokens with its prompt: raise max_t"):
        check_segments(
            filled(OWN, [FORGETS]), [], dataclasses.replace(config, max_tokens_per_gpu=39)
        )
    with pytest.raises(ValueError, match="a placeholder of an image"):
        check_segments(filled(OWN, [FORGETS]), [9], config)
    sees = dataclasses.replace(OWN, images=Images([5], 1, [], {}))
    check_segments(filled(sees, [[completion([7], prompt_ids=[5, 6, 8])]]), [5], config)
    with pytest.raises(ValueError, match="does not begin with the group's, which has images"):
        check_segments(filled(sees, [FORGETS]), [5], config)
    with pytest.raises(ValueError, match="a rollout without a completion"):
        filled(OWN, [[]])


def forgets(server, prompt, sampling):
    """Two turns, the second of which sees only the end of the first."""
    rollouts = []
    for first in server.generate(prompt.token_ids, {**sampling, "max_tokens": 6}):
        history = [*prompt.token_ids, *first.token_ids[-2:].tolist(), 10]
        (second,) = server.generate(history, {**sampling, "n": 1})
        second.info = {"kept": int(first.token_ids[-1])}
        rollouts.append([first, second])
    return rollouts


def test_a_run_and_its_replay(models, recipe, tmp_path):
    """What was asked is what was trained, staleness apart from numerics; what was saved gives the same weights."""
    with fake_server(models["untied"], answer_in(0.0)) as server:
        words = [recipe(server), "--rollout_fn", "test_segments.forgets", "--max_staleness", "1"]
        main(parse_args([*words, "--parts", "recipes.replay.save"]))
    metrics = read(tmp_path, "metrics")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    gaps = [row["sampling/current_logp_difference"] or 0.0 for row in metrics]
    stale_gaps = [row["sampling/stale_logp_difference"] or 0.0 for row in metrics]
    assert max(gaps) < 1e-4 < 1e-3 < max(stale_gaps)  # each token below its own history
    assert any(row["sampling/current_share"] < 1 for row in metrics)
    assert all("kept" in row["info"] for row in read(tmp_path, "completions"))
    again = tmp_path / "again" / "run"
    run = tmp_path / "run"
    main(replaying(parse_args([*words, "--output_dir", str(again)]), run))
    assert_identical(weights(run), weights(again))
    words += ["--max_tokens_per_gpu", "15", "--max_completion_len", "5"]
    words += ["--output_dir", str(tmp_path / "short" / "run")]
    message = "replay: dataset row .*: a completion has .* raise max_tokens_per_gpu"
    with pytest.raises(UserError, match=message):
        main(replaying(parse_args(words), run))
