"""Rollouts of several segments: their loss, normalizers and gradient; versions; what is refused, saved and sampled."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
from helpers import flags, read
from test_gradients import assert_same, make_config, plain_gradient, trained_difference
from test_resume import assert_identical, weights

from config import UserError, parse_args
from recipes.replay import replaying
from rollouts.custom import check_segments
from rollouts.group import Completion, Group, Prompt
from rollouts.images import Images
from train import main
from training.batching import Dealer, micro_batches
from training.metrics import batch_metrics


def turns(g, c):
    """The sampled turns of a rollout, and what its environment said between them: all tokens are different ones."""
    start = 10 + 40 * g + 13 * c
    first, second = range(start, start + 3), range(start + 5, start + 9)
    return [[*first], [*second], [start + 11]], [[3, 4], [3]]


def completion(ids, reason="stop", **fields):
    return Completion(ids, [-3.0] * len(ids), reason, 0, **fields)


def filled(prompt, rollouts, **fields):
    group = Group(prompt, **fields)
    group.set_rollouts(rollouts)
    return group


def make_groups(kind):
    """Two groups of three rollouts of three turns: joined; as segments that go on; or with the first turn rewritten."""
    groups = []
    for g in range(2):
        prompt = Prompt(g, [5, 6, 7 + g, 8, 9][: 5 - g], "", {})
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
                go_on = replace(go_on, prompt_ids=history)
                end = replace(end, prompt_ids=[*history, *second, *two])
                rollouts.append([begin, go_on, end])
        groups.append(filled(prompt, rollouts))
    return groups


OWN = Prompt(0, [5, 6], "", {})
FORGETS = [completion([7] * 20), completion([8] * 20, prompt_ids=[9] * 20)]


@pytest.mark.parametrize("fields", [
    {}, {"loss_type": "grpo"}, {"loss_type": "dr_grpo"}, {"share_prefix": False}, {"mask_truncated_completions": True},
    {"off_policy_correction": "truncate"}, {"off_policy_correction": "sequence"}, {"old_logprobs": "sampler"},
    {"old_logprobs": "sampler", "importance_level": "sequence", "epsilon": 0.9, "epsilon_high": 50.0},
], ids=str)  # fmt: skip
def test_turns_may_be_segments(models, fields, device):
    for max_tokens in (10_000, 40):
        config = make_config(models["tied"], batch_size=2, max_tokens_per_gpu=max_tokens, **fields)
        expected = trained_difference(config, device, make_groups("joined"))
        assert_same(trained_difference(config, device, make_groups("segments")), expected)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("max_tokens", [10_000, 30])
def test_rewritten_histories(models, loss_type, max_tokens, device):
    """Against one plain row per segment: each sampled token once, the means over rollouts."""
    fields = {"loss_type": loss_type, "max_tokens_per_gpu": max_tokens}
    config = make_config(models["tied"], batch_size=2, **fields)
    groups = make_groups("rewritten")
    assert_same(trained_difference(config, device, groups), plain_gradient(config, groups))


@pytest.mark.parametrize("share_prefix", [True, False])
def test_spreading_the_tail_over_ranks_cuts_no_rollout(share_prefix):
    """A loss may look at all of it; padded, its two segments take more positions than they have tokens."""
    group = filled(OWN, [FORGETS], advantages=[1.0])
    config = make_config("m", batch_size=1, share_prefix=share_prefix, loss_type="grpo")
    ranks = Dealer(2, config).deal([group], is_complete=True)
    assert sorted(row.mask.sum() for rows in ranks for row in rows) == [0, 40]


def test_versions_are_of_segments():
    """The second segment was sampled by a later policy: tokens of the trained one are compared, older ones are not."""
    (group, _) = make_groups("rewritten")
    rollouts = []
    for first, second, third in group.segments:
        rollouts.append([first, replace(second, weight_versions=2), third])
    group.set_rollouts(rollouts)
    group.trained_version, group.reward, group.server = 2, [1.0, 0.0, 0.0], 3
    group.advantages = [0.0] * 3
    assert group.oldest_version == 0
    (micro,) = micro_batches([group], 1000, make_config("m", batch_size=2))
    by_token = dict(zip(micro.packed.targets.tolist(), micro.servers.tolist(), strict=True))
    for c in range(3):
        (first, second, third), _ = turns(0, c)
        assert {by_token[token] for token in second} == {1 + group.server}
        assert {by_token[token] for token in first + third} == {0}
    metrics = batch_metrics([group], 2, make_config("m", batch_size=2))
    assert metrics["completions/segments"] == 3
    assert metrics["completions/weight_versions"] == 2
    assert metrics["completions/mean_length"] == 8
    assert metrics["staleness/max"] == 2


@pytest.mark.parametrize(
    ("looks_at_all", "field", "values"),
    [
        (True, "off_policy_correction", "sequence sequence_mask geometric geometric_mask"),
        (True, "loss_type", "grpo"),
        (True, "importance_level", "sequence"),
        (True, "loss_fn", "train.grpo_loss"),
        (False, "off_policy_correction", "mask truncate none"),
        (False, "loss_type", "dr_grpo"),
    ],
)
def test_losses_that_look_at_a_whole_rollout(looks_at_all, field, values):
    """For these its segments stay in one row, padded or not, or it is refused."""
    group = filled(OWN, [FORGETS])
    sizes = ((True, 2 + 19 + 20 + 19 + 1), (False, 2 * 39 + 1))
    for value, (share_prefix, size) in itertools.product(values.split(), sizes):
        fields = {field: value, "share_prefix": share_prefix}
        check_segments(group, [], make_config("m", max_tokens_per_gpu=size, **fields))
        too_small = make_config("m", max_tokens_per_gpu=size - 1, **fields)
        refused = pytest.raises(ValueError, match=f"has {size} tokens with its prompt: raise max_t")
        with refused if looks_at_all else nullcontext():
            check_segments(group, [], too_small)


def test_rollouts_are_completions_or_lists_of_segments():
    """Rewards and logs see the last segment, with the info of all."""
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


def test_what_no_row_takes_is_refused():
    def refused(message, rollouts, placeholders=(), prompt=OWN, **fields):
        config = make_config("m", **{"max_tokens_per_gpu": 40} | fields)
        with pytest.raises(ValueError, match=message):
            check_segments(filled(prompt, rollouts), placeholders, config)

    too_long = "a completion has 40 tokens with its prompt: raise max_t"
    refused(too_long, [FORGETS], max_tokens_per_gpu=39)
    refused("a placeholder of an image", [FORGETS], [9])
    refused("a rollout without a completion", [[]])
    sees = replace(OWN, images=Images([5], 1, [], {}))
    refused("does not begin with the group's, which has images", [FORGETS], [5], sees)
    with pytest.raises(ValueError, match="joined to a turn that it was not sampled for"):
        FORGETS[1].then([7], FORGETS[1])
    goes_on = [completion([7], prompt_ids=[5, 6, 8])]
    check_segments(filled(sees, [goes_on]), [5], make_config("m", max_tokens_per_gpu=40))


def forgets(server, prompt, sampling):
    """Two turns, the second of which sees only the end of the first."""
    rollouts = []
    for first in server.generate(prompt.token_ids, {**sampling, "max_tokens": 6}):
        history = [*prompt.token_ids, *first.token_ids[-2:].tolist(), 10]
        (second,) = server.generate(history, {**sampling, "n": 1})
        second.info = {"kept": int(first.token_ids[-1])}
        rollouts.append([first, second])
    return rollouts


def test_a_run_and_its_replay(stand_in, recipe, tmp_path):
    """What was asked is what was trained, staleness apart from numerics; what was saved gives the same weights."""
    words = [recipe(stand_in()), *flags(rollout_fn="test_segments.forgets", max_staleness=1)]
    main(parse_args([*words, "--parts", "recipes.replay.save"]))
    metrics = read(tmp_path, "metrics")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    gaps = [row["sampling/current_logp_difference"] or 0.0 for row in metrics]
    stale_gaps = [row["sampling/stale_logp_difference"] or 0.0 for row in metrics]
    assert max(gaps) < 1e-4 < 1e-3 < max(stale_gaps)  # each token below its own history
    assert any(row["sampling/current_share"] < 1 for row in metrics)
    assert all("kept" in row["info"] for row in read(tmp_path, "completions"))
    run, again, short = (tmp_path / name / "run" for name in (".", "again", "short"))
    main(replaying(parse_args([*words, *flags(output_dir=again)]), run))
    assert_identical(weights(run, 3), weights(again, 3))
    words += flags(output_dir=short, max_tokens_per_gpu=15, max_completion_len=5)
    message = "replay: dataset row .*: a completion has .* raise max_tokens_per_gpu"
    with pytest.raises(UserError, match=message):
        main(replaying(parse_args(words), run))
