"""Law 3: the gradient does not depend on micro-batches, their order, ranks or wrappers.

The reference is computed here in another way: one plain row per completion, the loss written out, one backward.
"""

import dataclasses
import itertools
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import on_ranks
from safetensors.torch import load_file
from test_prefix_models import SIZES
from test_prefix_models import make_model as make_family
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

import prefix_attention
import train
from config import TrainConfig, UserError
from prefix_attention import attach, completion_logprobs, pack
from recipes.losses import entropy_bonus
from rollouts.group import ENVIRONMENT, Completion, Group, Prompt
from rollouts.run import open_run
from train import loss_normalizer, optimizer_step, train_batch
from training.batching import Dealer, micro_batches, row_tokens
from training.lora import add_lora
from training.model import (
    build_policy,
    build_reference,
    load_model,
    parallelize,
    share_prefixes,
    token_logprobs,
)
from training.optimizer import build_optimizer
from utils import process_group
from weights.publish import full_tensor, published_weights, unwrap

ADVANTAGES = torch.tensor(
    [[0.9, -0.4, -0.5], [-1.1, 0.3, 0.8], [1.2, 0.0, -1.2], [0.7, -0.1, -0.6]]
)
LENGTHS = [[4, 9, 1], [3, 3, 7], [12, 2, 5], [1, 6, 8]]
TRUNCATED = (0, 1)  # group 0, completion 1 ran into its limit


def make_groups():
    tokens = itertools.cycle(range(5, 60))
    groups = []
    for g, lengths in enumerate(LENGTHS):
        prompt = Prompt(g, [next(tokens) for _ in range(3 + 2 * g)], "", {})
        completions = []
        for c, length in enumerate(lengths):
            ids = [next(tokens) for _ in range(length)]
            reason = "length" if (g, c) == TRUNCATED else "stop"
            completions.append(Completion(ids, [-3.0] * length, reason, 0))
        groups.append(Group(prompt, completions))
    return groups


def with_advantages(groups, advantages=ADVANTAGES):
    for group, values in zip(groups, advantages.tolist(), strict=True):
        group.advantages = values
    return groups


def dealt(groups, advantages, num_ranks, config):
    """What each rank gets of a whole batch: [rank][row]."""
    return Dealer(num_ranks, config).deal(with_advantages(groups, advantages), is_complete=True)


def updates_of(rows):
    """Completions and tokens of the updates after these rows."""
    return [row.update for row in rows if row.update]


def normalizers(rows, config):
    return [loss_normalizer(n, tokens, config) for n, tokens in updates_of(rows)]


def make_config(model, **fields):
    defaults = {
        "dataset_id": "d",
        "reward_funcs": ["os.path.exists"],
        "num_generations": 3,
        "batch_size": 4,
    }
    if not {"old_logprobs", "off_policy_correction"} & set(fields):
        defaults["off_policy_correction"] = "none"
    return TrainConfig(
        model_id=model, max_completion_len=12, **{**defaults, "grad_norm": 0, **fields}
    )


def make_policy(config, device):
    """As build_policy, with LoRA's B away from zero, so that A has a gradient too."""
    torch.manual_seed(1)
    model = load_model(config, on_meta=dist.get_rank() > 0)
    if config.use_peft:
        model = add_lora(model, config)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    if config.share_prefix:
        attach(model, verify=False)  # other ranks have no weights yet
    return parallelize(model, config, device)


def trainable(policy):
    weights = unwrap(policy).state_dict(keep_vars=True)
    seen = {id(w): (name, w) for name, w in reversed(weights.items()) if w.requires_grad}
    return {name: full_tensor(w).clone() for name, w in seen.values()}


def trained_difference(config, device, order=None):
    """What one step of SGD with learning rate 1 subtracts from each weight: the gradient, through the real path."""
    policy = make_policy(config, device)
    groups, advantages = make_groups(), ADVANTAGES
    if order:
        groups, advantages = [groups[i] for i in order], advantages[list(order)]
    before = trainable(policy)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    rows = dealt(groups, advantages, dist.get_world_size(), config)[dist.get_rank()]
    train_batch(policy, None, optimizer, scheduler, rows, config, device)
    return {name: before[name] - weight for name, weight in trainable(policy).items()}


def plain_gradient(config):
    """Σ over tokens of -A·log p of one plain row at a time, over the normalizer worked out here."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(config.model_id, dtype=torch.float32)
    if config.use_peft:
        model = add_lora(model, config)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    total = torch.zeros(())
    for g, group in enumerate(make_groups()):
        for c, completion in enumerate(group.completions):
            if config.mask_truncated_completions and (g, c) == TRUNCATED:
                continue
            start, ids = (
                len(group.prompt.token_ids),
                group.prompt.token_ids + completion.token_ids.tolist(),
            )
            logits = (
                model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1] / config.temperature
            )
            logprobs = logits.log_softmax(-1)[
                range(len(completion.token_ids)), completion.token_ids
            ]
            ratio = (logprobs.detach() + 3.0).exp()  # to the sampler's log-probs
            weight = torch.ones_like(ratio)
            if config.off_policy_correction == "truncate" and config.old_logprobs == "trainer":
                weight = ratio.clamp(max=config.correction_cap)
            elif config.off_policy_correction == "mask":
                weight = ratio * ((ratio >= 0.5) & (ratio <= 2.0))
            elif (
                config.old_logprobs == "sampler"
            ):  # PPO's clip: nothing further where the ratio has gone far enough
                up = ADVANTAGES[g, c] > 0
                weight = ratio * ((ratio <= 1.2) if up else (ratio >= 0.8))
            loss = -ADVANTAGES[g, c] * weight * logprobs
            total = total + (loss.mean() if config.loss_type == "grpo" else loss.sum())
    tokens = sum(map(sum, LENGTHS)) - (9 if config.mask_truncated_completions else 0)
    (total / {"grpo": 12, "dr_grpo": 12 * 12}.get(config.loss_type, tokens)).backward()
    weights = {
        id(w): (name, w)
        for name, w in reversed(model.state_dict(keep_vars=True).items())
        if w.requires_grad
    }
    return {name: w.grad for name, w in weights.values()}


def assert_same(got, expected):
    """fp32 sums of about 60 terms in another order, on gradients of size 0.01 to 1, read off weights of size 1."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=3e-6)


def with_environment(groups):
    """The same groups, whose completions of more than two tokens have an environment's word in their middle."""
    for group in groups:
        completions = []
        for c in group.completions:
            versions = c.weight_versions.clone()
            versions[1:-1] = ENVIRONMENT
            completions.append(dataclasses.replace(c, weight_versions=versions))
        group.fill(completions)
    return groups


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_tokens_of_an_environment_are_context_only(models, device, loss_type):
    """Against plain rows whose loss takes the first and the last token of each completion, and counts no others."""
    config = make_config(models["tied"], loss_type=loss_type, max_tokens_per_gpu=60)
    policy = make_policy(config, device)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    before = trainable(policy)
    rows = dealt(with_environment(make_groups()), ADVANTAGES, 1, config)[0]
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    train_batch(policy, None, optimizer, schedule, rows, config, device)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(config.model_id, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for group, c, completion in _numbered(make_groups()):
        start, ids = (
            len(group.prompt.token_ids),
            group.prompt.token_ids + completion.token_ids.tolist(),
        )
        logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(len(completion.token_ids)), completion.token_ids]
        own = logprobs[[0]] if len(logprobs) == 1 else logprobs[[0, -1]]
        count += len(own)
        loss = -ADVANTAGES[group.prompt.index, c] * own
        total = total + (loss.mean() if loss_type == "grpo" else loss.sum())
    (total / {"grpo": 12, "dr_grpo": 12 * 12, "dapo": count}[loss_type]).backward()
    got = {name: before[name] - weight for name, weight in trainable(policy).items()}
    weights = {
        id(w): (name, w)
        for name, w in reversed(model.state_dict(keep_vars=True).items())
        if w.requires_grad
    }
    assert_same(got, {name: w.grad for name, w in weights.values()})


def test_a_completion_without_a_reward_is_left_out():
    """The row and its normalizer are those of the others; of a group that is not scored all train."""
    groups = make_groups()
    config = make_config("m")
    for number, group in enumerate(groups):
        group.reward = (
            [math.nan if number == 2 and c == 0 else 1.0 for c in range(3)] if number else []
        )
    (micro,) = dealt(groups, ADVANTAGES, 1, config)[0]
    of_completion = [
        c.tolist() for c in micro.mask.split([length for lengths in LENGTHS for length in lengths])
    ]
    assert [len(set(mask)) for mask in of_completion] == [1] * 12
    assert [mask[0] for mask in of_completion] == [
        0.0 if number == 6 else 1.0 for number in range(12)
    ]
    assert micro.update == (12, sum(map(sum, LENGTHS)) - 12)


def test_turns_are_joined():
    first = Completion([5, 6], [-1.0, -2.0], "stop", 3)
    last = Completion([9], [-0.5], "length", 3)
    joined = first.then([7, 8], last)
    assert joined.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert joined.sampler_logprobs.tolist() == [-1.0, -2.0, 0.0, 0.0, -0.5]
    assert joined.loss_mask.tolist() == [True, True, False, False, True]
    assert joined.weight_versions[joined.loss_mask].tolist() == [3, 3, 3]
    assert joined.finish_reason == "length"
    assert joined.then([1], first).loss_mask.tolist() == [
        True,
        True,
        False,
        False,
        True,
        False,
        True,
        True,
    ]
    first, last = (
        dataclasses.replace(c, prompt_ids=ids) for c, ids in ((first, [4]), (last, [4, 5, 6, 7, 8]))
    )
    assert first.then([7, 8], last).prompt_ids.tolist() == [4]
    with pytest.raises(ValueError, match="joined to a turn that it was not sampled for"):
        first.then([7], last)


def test_the_tail_is_spread_over_the_ranks():
    """One batch that would fit a single row: each of two ranks gets about half of it."""
    ranks = dealt(make_groups(), ADVANTAGES, 2, make_config("m", max_tokens_per_gpu=10_000))
    sizes = [sum(micro.packed.num_tokens for micro in rows) for rows in ranks]
    assert max(sizes) < 0.7 * sum(sizes)
    assert sum(micro.mask.sum().item() for rows in ranks for micro in rows) == sum(
        map(sum, LENGTHS)
    )


def test_the_last_rows_are_spread_over_the_ranks():
    """Of three ranks' five rows the last two become three alike, and no rank gets a filler."""
    groups = []
    for number in range(9):  # two take a row
        completion = Completion([5 + number] * 20, [-1.0] * 20, "stop", 0)
        groups.append(Group(Prompt(number, [50 + number], "", {}), [completion] * 2))
        groups[-1].advantages = [1.0, -1.0]
    config = make_config("m", max_tokens_per_gpu=45, batch_size=9)
    ranks = Dealer(3, config).deal(groups, is_complete=True)
    sizes = [[micro.packed.num_tokens for micro in rows] for rows in ranks]
    assert sizes == [[40, 20]] * 3
    assert all(micro.mask.any() for rows in ranks for micro in rows)


CASES = [
    {},
    {"loss_type": "grpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "cispo", "temperature": 0.7},
    {"mask_truncated_completions": True},
    {"use_peft": True, "lora_rank": 4},
    {"gradient_checkpoint": True},
    pytest.param({"torch_compile": True}, marks=pytest.mark.slow),
    {"share_prefix": False},
    {"off_policy_correction": "truncate", "correction_cap": 1.5},
    {"off_policy_correction": "mask"},
    {"old_logprobs": "sampler"},
]


@pytest.fixture(scope="module")
def device():
    with process_group(60) as device:
        yield device


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_any_split_equals_plain_rows(models, device, fields):
    expected = plain_gradient(make_config(models["tied"], **fields))
    for max_tokens in (10_000, 60, 24):
        assert_same(
            trained_difference(
                make_config(models["tied"], max_tokens_per_gpu=max_tokens, **fields), device
            ),
            expected,
        )


def test_first_ratio_is_one(models, device):
    """Old, reference and training log-probs of a shared row are the same to the bit, recomputation or not."""
    for fields in ({}, {"gradient_checkpoint": True}, {"bf16": True}):
        config = make_config(models["tied"], beta=0.1, **fields)
        policy = build_policy(config, device)
        config = share_prefixes(policy, config)
        reference = build_reference(policy, config, device)
        assert reference is not None
        for micro in dealt(make_groups(), ADVANTAGES, 1, config)[0]:
            assert micro.packed.tree is not None
            trained = token_logprobs(policy, micro.packed, micro.images, config)
            with torch.no_grad():
                old = token_logprobs(policy, micro.packed, micro.images, config)
            assert trained.requires_grad
            assert torch.equal(trained, old)
            assert torch.equal(trained, reference(micro.packed, micro.images))


def test_sharing_falls_back(models, device, capsys, monkeypatch):
    """A model that is refused trains on padded rows, with the reason."""
    config = make_config(models["tied"])
    policy = build_policy(config, device)
    monkeypatch.setattr(
        type(policy), "_can_set_attn_implementation", classmethod(lambda cls: False)
    )
    config = share_prefixes(policy, config)
    assert not config.share_prefix
    assert (
        "share_prefix is off, each prompt is forwarded once per completion: Qwen3ForCausalLM"
        in capsys.readouterr().out
    )
    assert all(
        micro.packed.tree is None for micro in dealt(make_groups(), ADVANTAGES, 1, config)[0]
    )
    config = make_config(models["tied"])
    (group, *_) = make_groups()
    group.advantages = [1.0, 0.0, -1.0]
    long = [Completion([n] * 100, [-1.0] * 100, "stop", 0) for n in (5, 6, 7)]
    group = dataclasses.replace(group, completions=long)
    assert row_tokens([group], config) == 3 + 3 * 99
    group = dataclasses.replace(
        group, prompt=dataclasses.replace(group.prompt, token_ids=[5] * 100)
    )
    (micro,) = micro_batches([group], 400, config)
    assert micro.packed.num_tokens == row_tokens([group], config) == 100 + 99 + 2 * 99


def test_sharing_is_verified_before_training(models, device, capsys, monkeypatch):
    own = lambda *row, blocks=prefix_attention._blocks: [b for b in blocks(*row) if b.level == 0]
    monkeypatch.setattr(prefix_attention, "_blocks", own)
    config = make_config(models["tied"])
    policy = build_policy(config, device)
    assert not share_prefixes(policy, config).share_prefix
    assert "differ from plain rows" in capsys.readouterr().out
    assert policy.config._attn_implementation == "sdpa"
    assert all(p.grad is None for p in policy.parameters())


def test_order_does_not_matter(models, device):
    config = make_config(models["untied"], max_tokens_per_gpu=40)
    assert_same(trained_difference(config, device, order=(2, 0, 3, 1)), plain_gradient(config))


def test_minibatches_of_dapo_weigh_every_token_alike(models, device):
    """Two mini-batches at a learning rate of zero: their gradients add up to twice the whole batch's."""
    config = make_config(models["tied"], num_minibatches=2)
    halves = dealt(make_groups(), ADVANTAGES, 1, config)[0]
    whole = dealt(make_groups(), ADVANTAGES, 1, dataclasses.replace(config, num_minibatches=1))[0]
    assert normalizers(halves, config) == [updates_of(whole)[0][1] / 2] * 2
    for loss_type, expected in (
        ("cispo", [(14 + 13 + 19 + 15) / 2] * 2),
        ("bnpo", [14 + 13, 19 + 15]),
    ):
        of_type = dataclasses.replace(config, loss_type=loss_type)
        rows = dealt(make_groups(), ADVANTAGES, 1, of_type)[0]
        assert normalizers(rows, of_type) == expected


def test_ranks_get_equally_many_rows_and_every_token_once():
    for max_tokens, num_ranks in itertools.product((24, 60, 10_000), (1, 2, 3, 16)):
        ranks = dealt(
            make_groups(), ADVANTAGES, num_ranks, make_config("m", max_tokens_per_gpu=max_tokens)
        )
        assert len({len(rows) for rows in ranks}) == 1
        trained = sum(micro.mask.sum().item() for rows in ranks for micro in rows)
        assert trained == sum(map(sum, LENGTHS))
        lengths = [length for lengths in LENGTHS for length in lengths]
        of_all = (len(lengths), sum(lengths))
        assert [updates_of(rows) for rows in ranks] == [[of_all]] * num_ranks
        assert all(rows[-1].update for rows in ranks)


def test_training_starts_before_the_batch_is_complete():
    """A row goes out as soon as the next group does not fit it, to the rank that has had the fewest tokens."""
    groups = with_advantages(make_groups())
    synchronous = {"max_tokens_per_gpu": 40, "max_staleness": 0}
    dealer = Dealer(1, make_config("m", **synchronous))  # groups take 17, 18, 26 and 24 tokens
    assert dealer.missing_tokens() == 40
    (first,) = dealer.deal(groups[:3], is_complete=False)[0]
    assert first.packed.group.unique().tolist() == [0, 1]
    assert first.update is None
    assert dealer.missing_tokens() == 40 - row_tokens(dealer.waiting, dealer.config) < 40
    second, third = dealer.deal(groups[3:], is_complete=True)[0]
    assert [micro.packed.num_tokens for micro in (first, second, third)] == [
        17 + 18 - 6, 26 - 3, 24 - 3
    ]  # fmt: skip  # the last token of a completion needs no forward
    assert second.update is None
    assert third.update == (sum(map(len, LENGTHS)), sum(map(sum, LENGTHS)))
    for fields in (
        {"max_staleness": 1},
        {"num_minibatches": 2},
        {"num_iterations": 2},
        {"scale_rewards": "batch"},
    ):  # they need all of it
        assert Dealer(1, make_config("m", **synchronous | fields)).missing_tokens() == math.inf
    loads = [sum(micro.packed.num_tokens for micro in rows) for rows in dealt(
        make_groups(), ADVANTAGES, 2, make_config("m", max_tokens_per_gpu=30)
    )]  # fmt: skip
    assert loads == [
        14 + 15 + 14,
        23 + 16,
    ]  # the larger row of the second round goes to the rank with fewer tokens


RANK_CASES = [
    {**wrapper, **peft, "max_tokens_per_gpu": max_tokens, "share_prefix": share_prefix}
    for wrapper in ({}, {"use_fsdp": True})
    for peft in ({}, {"use_peft": True, "lora_rank": 4})
    for max_tokens, share_prefix in ((10_000, True), (30, True), (30, False))
]


def rank_main(output, *models):
    """Runs on each of two ranks. With 10,000 tokens there is one row: the other rank has nothing but a filler."""
    results = []
    with process_group(60) as device:
        for model, fields in itertools.product(models, RANK_CASES):
            results.append(trained_difference(make_config(model, **fields), device))
        if dist.get_rank() == 0:
            torch.save(results, output)


def test_two_ranks_equal_plain_rows(models, tmp_path):
    on_ranks(
        2,
        tmp_path,
        "test_gradients.rank_main",
        tmp_path / "out.pt",
        models["tied"],
        models["untied"],
    )
    cases = itertools.product(models.values(), RANK_CASES)
    for (model, fields), got in zip(cases, torch.load(tmp_path / "out.pt"), strict=True):
        assert_same(got, plain_gradient(make_config(model, **fields)))


def sums_of_adapters(output, model):
    """Runs on each of two ranks: a LoRA on bfloat16 weights under FSDP2; every rank's gradient is another."""
    config = make_config(model, dtype="bfloat16", use_peft=True, use_fsdp=True, fsdp_bf16=True)
    with process_group(60) as device:
        torch.manual_seed(0)
        policy = build_policy(config, device)
        logits = policy(input_ids=torch.arange(5, 25)[None] + 7 * dist.get_rank()).logits
        logits.float().log_softmax(-1)[..., 3].sum().backward()
        gradients = [p.grad.full_tensor() for p in policy.parameters() if p.grad is not None]
        torch.save(gradients, output)


def test_sums_of_adapters_are_not_rounded(models, tmp_path):
    """The adapters are fp32, and so are their sums over ranks: in bfloat16 all of them would have 8 bits."""
    on_ranks(2, tmp_path, "test_gradients.sums_of_adapters", tmp_path / "out.pt", models["tied"])
    gradients = [gradient for gradient in torch.load(tmp_path / "out.pt") if gradient.any()]
    assert gradients
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert not any(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)


# -- the optimizer's side --------------------------------------------------------------------------------------------


def test_gradients_are_normalized_before_they_are_clipped():
    """Sum (30, 40), normalizer 10: (3, 4) of norm 5, clipped to norm 1: (.6, .8)."""
    weight = torch.nn.Parameter(torch.zeros(2))
    module = torch.nn.ParameterList([weight])
    weight.grad = torch.tensor([30.0, 40.0])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    norm = optimizer_step(module, optimizer, scheduler, 10.0, make_config("m", grad_norm=1.0))
    assert norm == pytest.approx(5.0)
    torch.testing.assert_close(weight.data, torch.tensor([-0.6, -0.8]), rtol=1e-5, atol=0)
    weight.grad = torch.tensor([math.nan, 1.0])
    assert math.isnan(optimizer_step(module, optimizer, scheduler, 10.0, make_config("m")))
    torch.testing.assert_close(weight.data, torch.tensor([-0.6, -0.8]), rtol=1e-5, atol=0)


def test_optimizer_and_schedules():
    model = torch.nn.Linear(3, 3)
    fields = {
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "warmup_ratio": 0.2,
        "learning_rate": 2.0,
    }
    expected = {
        "constant": [1, 2, 2, 2, 2, 2, 2, 2, 2, 2],
        "linear": [1, 2, 2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25],
        "cosine": [1, 2, *(1 + math.cos(math.pi * k / 8) for k in range(8))],
    }
    for kind, rates in expected.items():
        optimizer, scheduler = build_optimizer(
            model, 10, make_config("m", **{**fields, "lr_scheduler": kind})
        )
        seen = []
        for _ in range(10):
            seen.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        assert seen == pytest.approx(rates)
    assert [(g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (0.1, (0.9, 0.95)),
        (0.0, (0.9, 0.95)),
    ]
    assert [[p.ndim for p in g["params"]] for g in optimizer.param_groups] == [[2], [1]]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "found",
    [
        {"temperature": 0.9, "top_p": 0.6}, {"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.1}, {"top_h": 0.3},
        {"typical_p": 0.9}, {"epsilon_cutoff": 0.1}, {"eta_cutoff": 0.1}, {"early_stopping": True},
        {"length_penalty": 0.8}, {"output_scores": True}, {"pad_token_id": -1}, {"num_beams": 1, "min_p": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_a_generation_config_that_could_not_be_saved(models, tmp_path, found, file):
    """Defaults that transformers loads and refuses to save: the checkpoint after all of the training would fail.

    It keeps them, and all others that the model has, and so does a checkpoint of a run that goes on from it.
    """
    folder = shutil.copytree(models["tied"], tmp_path / "model")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | found))
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    before = GenerationConfig.from_pretrained(folder, config_file_name=file).to_dict()

    config = make_config(str(folder))
    load_model(config).save_pretrained(tmp_path / "saved")
    load_model(config, tmp_path / "saved").save_pretrained(tmp_path / "again")
    for name in ("saved", "again"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        after = loaded.generation_config.to_dict()
        assert found.items() <= after.items()
        assert after["eos_token_id"] == before["eos_token_id"] == 2
        if file == "generation_config.json":
            assert after == before


@pytest.mark.parametrize("kind", [PreTrainedTokenizerBase, PreTrainedConfig])
def test_what_could_not_be_saved_is_known_at_the_start(models, monkeypatch, kind):
    """A tokenizer, a processor or a configuration: one line, before servers are asked or a policy is loaded."""

    def save(*_, **__):
        raise NotImplementedError("no file\nof a vocabulary")

    monkeypatch.setattr(kind, "save_pretrained", save)
    cause = "NotImplementedError: no file of a vocabulary$"
    with pytest.raises(UserError, match=f"^model_id: its checkpoints could not be saved: {cause}"):
        open_run(make_config(models["tied"], server_timeout=1.0), {"step": 0})


def test_attention_with_a_softcap(tmp_path):
    """transformers would take sdpa for it, which has none: without shared prefixes another model would train."""
    make_family("Gemma2").save_pretrained(tmp_path)
    config = make_config(str(tmp_path), share_prefix=False)
    (row,) = pack([([5, 6, 7], [[8, 9, 10, 11, 12, 13]])], share_prefix=False)
    got, expected = (
        completion_logprobs(model, row)
        for model in (load_model(config), make_family("Gemma2", "eager"))
    )
    torch.testing.assert_close(got, expected)
    with pytest.raises(UserError, match="attn_implementation=sdpa leaves out the softcap"):
        load_model(dataclasses.replace(config, attn_implementation="sdpa"))


def test_adapters_of_experts_are_refused(tmp_path, device):
    """peft adapts tensors of all experts at once where all layers are asked for; attention trains."""
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="experts in one tensor"):
        build_policy(make_config(str(tmp_path), use_peft=True), device)
    policy = build_policy(
        make_config(str(tmp_path), use_peft=True, lora_target_modules=["q_proj", "o_proj"]), device
    )
    assert {name for name, _ in published_weights(policy)} == load_file(
        tmp_path / "model.safetensors"
    ).keys()


def test_corrections_are_of_the_policy_before_the_first_update(models, device, monkeypatch):
    """In the second pass too, when the policy that is trained has moved on."""
    seen = []

    def weights(trainer_logprobs, sampler_logprobs, *_):
        seen.append(trainer_logprobs.clone())
        return torch.ones_like(trainer_logprobs)

    monkeypatch.setattr(train, "off_policy_weights", weights)
    config = make_config(models["tied"], num_iterations=2, max_tokens_per_gpu=10_000)
    policy = make_policy(config, device)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    batch = dealt(make_groups(), ADVANTAGES, 1, config)[0]
    train_batch(policy, None, optimizer, scheduler, batch, config, device)
    first, second = seen
    assert torch.equal(first, second)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_bonus_for_entropy(loss_type, models, device):
    """Its gradient, in a step on shared rows, against the loss written out with all logits."""
    config = make_config(models["tied"], loss_type=loss_type, loss_fn=entropy_bonus)
    policy = make_policy(config, device)
    start = trainable(make_policy(config, device))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    batch = dealt(make_groups(), ADVANTAGES, 1, config)[0]
    metrics, _ = train_batch(policy, None, optimizer, scheduler, batch, config, device)

    model = make_policy(config, device)
    losses, entropies, tokens = [], [], []
    for group, c, completion in _numbered(make_groups()):
        prompt, ids = group.prompt.token_ids, completion.token_ids.tolist()
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        advantage = float(ADVANTAGES[group.prompt.index, c])
        # On-policy the ratio is 1, with the gradient of the log-prob.
        losses.append(-advantage * logprobs[range(len(ids)), ids] - 0.01 * entropy)
        entropies.append(entropy.detach())
        tokens.append(len(ids))
    if loss_type == "grpo":
        loss = torch.stack([one.mean() for one in losses]).mean()
    else:
        loss = torch.cat(losses).sum() / sum(tokens)
    loss.backward()
    assert metrics["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-4)
    assert metrics["loss/entropy_bonus"] == pytest.approx(0.01 * metrics["entropy"], rel=1e-5)
    got = trainable(policy)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(start[name] - got[name], weight.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_a_reference_that_moves(kind, models, device):
    """After three steps, one of them without a move, against weights averaged here, in a model of their own."""
    fields = {"use_peft": True, "lora_rank": 4, "lora_dropout": 0.3} if kind == "lora" else {}
    config = make_config(
        models["tied"],
        beta=0.3,
        reference_decay=0.25,
        reference_steps=2,  # of two updates each
        num_minibatches=2,
        max_tokens_per_gpu=40,
        **fields,
    )
    policy = make_policy(config, device).train()
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    reference = build_reference(policy, config, device)
    (row,) = pack(
        [(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in make_groups()]
    )
    expected = trainable(policy)
    if kind == "whole":  # the model's own, which `make_policy` has left alone
        before = token_logprobs(policy, row, {}, config).detach()
        torch.testing.assert_close(reference(row, {}), before, rtol=0, atol=1e-6)
    for step in (1, 2, 3, 4):
        batch = dealt(make_groups(), ADVANTAGES, 1, config)[0]
        train_batch(policy, reference, optimizer, scheduler, batch, config, device)
        reference.follow(step)
        if step % 2 == 0:
            for name, weight in trainable(policy).items():
                expected[name] = 0.25 * expected[name] + 0.75 * weight

    after = trainable(policy)
    got = reference(row, {})
    assert policy.training
    for name, weight in trainable(policy).items():
        assert torch.equal(weight, after[name]), name

    model = make_policy(replace(config, share_prefix=False), device).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.copy_(expected[name])
    (plain,) = pack(
        [(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in make_groups()],
        share_prefix=False,
    )
    with torch.no_grad():
        theirs = token_logprobs(model, plain, {}, config)[plain.index.argsort()]
    torch.testing.assert_close(got[row.index.argsort()], theirs, rtol=1e-5, atol=1e-4)
    moved = token_logprobs(policy.eval(), row, {}, config).detach()[row.index.argsort()]
    assert (moved - theirs).abs().max() > 1e-3  # it lags behind the policy


def test_several_updates_on_one_batch(models, device):
    """Two passes of two mini-batches with KL and an adapter, against the same written out token by token."""
    fields = {
        "use_peft": True,
        "lora_rank": 4,
        "beta": 0.3,
        "num_iterations": 2,
        "num_minibatches": 2,
        "epsilon": 0.05,
    }
    config = make_config(models["tied"], max_tokens_per_gpu=40, **fields)
    policy = make_policy(config, device)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.05)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    batch = dealt(make_groups(), ADVANTAGES, 1, config)[0]
    reference = build_reference(policy, config, device)
    metrics, _ = train_batch(policy, reference, optimizer, scheduler, batch, config, device)

    model = make_policy(config, device)
    steps = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    rows = [
        (g, c, g.prompt.token_ids, k.token_ids.tolist()) for g, c, k in _numbered(make_groups())
    ]

    def logprobs(prompt, ids):
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)[range(len(ids)), ids]

    with torch.no_grad():
        old = [logprobs(prompt, ids) for _, _, prompt, ids in rows]
        with model.disable_adapter():
            ref = [logprobs(prompt, ids) for _, _, prompt, ids in rows]
    kl, clipped, losses = 0.0, 0, []
    for _ in range(2):
        for half in (rows[:6], rows[6:]):
            total = torch.zeros(())
            for group, c, prompt, ids in half:
                i, a = rows.index((group, c, prompt, ids)), float(ADVANTAGES[group.prompt.index, c])
                now = logprobs(prompt, ids)
                for t in range(len(ids)):
                    ratio = (now[t] - old[i][t]).exp()
                    gap = ref[i][t] - now[t]
                    k3 = gap.exp() - gap - 1
                    total = total - torch.min(ratio * a, ratio.clamp(0.95, 1.05) * a)
                    total = total + 0.3 * ratio * k3
                    kl += k3.item()
                    clipped += (ratio.item() < 0.95 and a < 0) or (ratio.item() > 1.05 and a > 0)
            steps.zero_grad()
            losses.append(total / (sum(map(sum, LENGTHS)) / 2))
            losses[-1].backward()
            steps.step()
    tokens = 2 * sum(map(sum, LENGTHS))
    assert clipped > 0
    assert metrics["loss"] == pytest.approx(sum(loss.item() for loss in losses) / 4, rel=1e-3)
    assert metrics["kl"] == pytest.approx(kl / tokens, rel=1e-3)
    assert metrics["clip_ratio/low"] + metrics["clip_ratio/high"] == pytest.approx(clipped / tokens)
    got, expected = trainable(policy), trainable(model)
    start = trainable(make_policy(config, device))
    for name in expected:  # the whole way moved, to the rounding that four steps in fp32 add up
        torch.testing.assert_close(
            got[name] - start[name], expected[name] - start[name], rtol=2e-2, atol=2e-5
        )


def _numbered(groups):
    return [
        (group, c, completion) for group in groups for c, completion in enumerate(group.completions)
    ]
