"""Law 3: the gradient does not depend on micro-batches, their order, ranks or wrappers.

The reference is computed here in another way: one plain row per completion, the loss written out,
one backward.
"""

import itertools
import json
import math
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import moved_adapter, on_ranks
from safetensors.torch import load_file
from test_config import make
from test_prefix_models import SIZES, break_gradients, plain_rows
from test_prefix_models import make_model as make_family
from transformers import AutoModelForCausalLM

from config import UserError
from prefix_attention import _blocks, attach, completion_logprobs, pack
from recipes.losses import entropy_bonus
from rollouts.group import Completion, Group, Prompt
from rollouts.run import open_run
from train import loss_normalizer, optimizer_step, train_batch
from training.batching import Dealer
from training.loading import add_lora
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
NUM_TOKENS = sum(map(sum, LENGTHS))
TRUNCATED = (0, 1)  # group 0, completion 1 ran into its limit


def make_groups():
    tokens = itertools.cycle(range(5, 60))
    draw = lambda num: [next(tokens) for _ in range(num)]
    groups = []
    for g, lengths in enumerate(LENGTHS):
        prompt = Prompt(g, draw(3 + 2 * g), "", {})
        completions = []
        for c, length in enumerate(lengths):
            reason = "length" if (g, c) == TRUNCATED else "stop"
            completions.append(Completion(draw(length), [-3.0] * length, reason, 0))
        groups.append(Group(prompt, completions))
    return groups


def dealt(groups, advantages, num_ranks, config):
    """What each rank gets of a whole batch: [rank][row]; advantages are by the prompts' numbers."""
    for group in groups:
        group.advantages = advantages[group.prompt.index].tolist()
    return Dealer(num_ranks, config).deal(groups, is_complete=True)


def updates_of(rows):
    return [row.update for row in rows if row.update]


def make_config(model, **fields):
    if not {"old_logprobs", "off_policy_correction"} & set(fields):
        fields["off_policy_correction"] = "none"
    sizes = {"num_generations": 3, "batch_size": 4, "max_completion_len": 12}
    return make(model_id=model, **{"grad_norm": 0, **sizes, **fields})


def with_adapter(model, config):
    """A model, if asked for with LoRA."""
    return moved_adapter(add_lora(model, config)) if config.use_peft else model


def make_policy(config, device):
    """As build_policy, but for the adapter."""
    torch.manual_seed(1)
    model = with_adapter(load_model(config, on_meta=dist.get_rank() > 0), config)
    if config.share_prefix:
        attach(model, verify=False)  # other ranks have no weights yet
    return parallelize(model, config, device)


def named_once(model):
    """What trains, by name; tied weights under their first name."""
    found = {}
    for name, weight in reversed(model.state_dict(keep_vars=True).items()):
        if weight.requires_grad:
            found[id(weight)] = (name, weight)
    return dict(found.values())


def trainable(policy):
    weights = named_once(unwrap(policy))
    return {name: full_tensor(weight).clone() for name, weight in weights.items()}


def sgd(policy: Any, learning_rate: float = 1.0) -> tuple[Any, Any]:
    """An optimizer whose step subtracts the gradient, and its schedule."""
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=learning_rate)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def trained_difference(config, device, groups=None):
    """What one step subtracts from each weight: the gradient, through the real path."""
    policy = make_policy(config, device)
    before = trainable(policy)
    rows = dealt(groups or make_groups(), ADVANTAGES, dist.get_world_size(), config)
    train_batch(policy, None, *sgd(policy), rows[dist.get_rank()], config, device)
    return {name: before[name] - weight for name, weight in trainable(policy).items()}


def each_completion(groups):
    """(group's number, completion's, prompt and tokens of each of its segments) of every completion."""
    for g, group in enumerate(groups):
        for c, segments in enumerate(group.segments):
            pairs = []
            for segment in segments:
                is_first = segment.prompt_ids is None
                prompt = torch.tensor(group.prompt.token_ids) if is_first else segment.prompt_ids
                pairs.append((prompt, segment.token_ids))
            yield g, c, pairs


def plain_distributions(model, prompt, ids, temperature=1.0):
    """The log-probs [n, V] of which a completion was drawn, by a row of its own."""
    logits = model(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def plain_logprobs(model, prompt, ids, temperature=1.0):
    return plain_distributions(model, prompt, ids, temperature)[range(len(ids)), ids]


def plain_gradient(config, groups=None):
    """Σ over tokens of -A·log p of one plain row at a time, over the normalizer worked out here."""
    groups = groups or make_groups()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(config.model_id, dtype=torch.float32)
    model = with_adapter(model, config)
    total, num_tokens = torch.zeros(()), 0
    for g, c, segments in each_completion(groups):
        if config.mask_truncated_completions and (g, c) == TRUNCATED:
            continue
        parts = []
        for prompt, ids in segments:
            parts.append(plain_distributions(model, prompt, ids, config.temperature))
        of_all = torch.cat(parts)
        ids = torch.cat([ids for _, ids in segments])
        num_tokens += len(ids)
        logprobs = of_all[range(len(ids)), ids]
        ratio = (logprobs.detach() + 3.0).exp()  # to the sampler's log-probs
        weight = torch.ones_like(ratio)
        if config.off_policy_correction == "truncate" and config.old_logprobs == "trainer":
            weight = ratio.clamp(max=config.correction_cap)
        elif config.off_policy_correction == "mask":
            weight = ratio * ((ratio >= 0.5) & (ratio <= 2.0))
        elif config.old_logprobs == "sampler":  # PPO's clip: nothing where it has gone far enough
            weight = ratio * ((ratio <= 1.2) if ADVANTAGES[g, c] > 0 else (ratio >= 0.8))
        loss = -ADVANTAGES[g, c] * weight * logprobs
        if config.loss_fn is entropy_bonus:
            loss = loss + 0.01 * (of_all.exp() * of_all).sum(-1)
        total = total + (loss.mean() if config.loss_type == "grpo" else loss.sum())
    num = sum(len(group.completions) for group in groups)
    (total / {"grpo": num, "dr_grpo": num * 12}.get(config.loss_type, num_tokens)).backward()
    return {name: weight.grad for name, weight in named_once(model).items()}


def assert_same(got, expected):
    """fp32 sums of about 60 terms in another order, of size 0.01 to 1, read off weights of size 1."""
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=3e-6)


# -- one step --------------------------------------------------------------------------------------

CASES = [
    {},
    {"loss_type": "grpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "cispo", "temperature": 0.7},
    {"mask_truncated_completions": True},
    {"use_peft": True, "lora_rank": 4},
    {"gradient_checkpoint": True},
    pytest.param({"torch_compile": True}, marks=pytest.mark.slow),
    {"share_prefix": False, "loss_type": "grpo"},
    {"off_policy_correction": "truncate", "correction_cap": 1.5},
    {"off_policy_correction": "mask"},
    {"old_logprobs": "sampler"},
    {"loss_fn": "recipes.losses.entropy_bonus"},
    {"loss_fn": "recipes.losses.entropy_bonus", "loss_type": "grpo"},
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_any_split_equals_plain_rows(models, device, fields):
    expected = plain_gradient(make_config(models["tied"], **fields))
    for max_tokens, order in ((10_000, (0, 1, 2, 3)), (60, (2, 0, 3, 1)), (24, (3, 2, 1, 0))):
        config = make_config(models["tied"], max_tokens_per_gpu=max_tokens, **fields)
        groups = [make_groups()[number] for number in order]
        assert_same(trained_difference(config, device, groups), expected)


def rank_configs(tied, untied):
    """A single row, of which the other rank has but a filler; shared or padded rows of 30."""
    peft = {"use_peft": True, "lora_rank": 4}
    rows = [(tied, 10_000, True), (tied, 30, True), (tied, 30, False), (untied, 30, True)]
    found = []
    for kind in ({}, peft, {"use_fsdp": True}, {"use_fsdp": True, **peft}):
        for model, max_tokens, is_shared in rows:
            split = {"max_tokens_per_gpu": max_tokens, "share_prefix": is_shared}
            found.append(make_config(model, **kind, **split))
    return found


def rank_main(output, *models):
    """On each of two ranks."""
    with process_group(60) as device:
        found = [trained_difference(config, device) for config in rank_configs(*models)]
        if dist.get_rank() == 0:
            torch.save(found, output)


def test_two_ranks_equal_plain_rows(models, tmp_path):
    output, paths = tmp_path / "out.pt", (models["tied"], models["untied"])
    on_ranks(2, tmp_path, "test_gradients.rank_main", output, *paths)
    expected = {}
    for config, got in zip(rank_configs(*paths), torch.load(output), strict=True):
        kind = (config.model_id, config.use_peft)
        if kind not in expected:
            expected[kind] = plain_gradient(config)
        assert_same(got, expected[kind])


def sums_of_adapters(output, model):
    """On each of two ranks: LoRA on bfloat16 weights under FSDP2; each has another gradient."""
    config = make_config(model, dtype="bfloat16", use_peft=True, use_fsdp=True, fsdp_bf16=True)
    with process_group(60) as device:
        torch.manual_seed(0)
        policy = build_policy(config, device)
        logits = policy(input_ids=torch.arange(5, 25)[None] + 7 * dist.get_rank()).logits
        logits.float().log_softmax(-1)[..., 3].sum().backward()
        gradients = [p.grad.full_tensor() for p in policy.parameters() if p.grad is not None]
        torch.save(gradients, output)


def test_sums_of_adapters_are_not_rounded(models, tmp_path):
    """They are fp32, as the adapters are: in bfloat16 all of them would have 8 bits."""
    on_ranks(2, tmp_path, "test_gradients.sums_of_adapters", tmp_path / "out.pt", models["tied"])
    gradients = [gradient for gradient in torch.load(tmp_path / "out.pt") if gradient.any()]
    assert gradients
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert not any(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)


def plans_of_a_row(output, model):
    """How often the kernel calls of a row were planned, in both passes of all layers."""
    config = make_config(model, use_fsdp=True, fsdp_bf16=True)
    with process_group(60) as device:
        policy = attach(build_policy(config, device), verify=False)
        _blocks.cache_clear()
        (row,) = pack([([5, 6, 7], [[8, 9], [10, 11]])])
        completion_logprobs(policy, row).sum().backward()
        torch.save(_blocks.cache_info().misses, output)


def test_a_row_is_planned_once_under_fsdp(models, tmp_path):
    """Whatever FSDP2 copies of a layer's arguments when it casts them."""
    on_ranks(1, tmp_path, "test_gradients.plans_of_a_row", tmp_path / "out.pt", models["tied"])
    assert torch.load(tmp_path / "out.pt") == 1


# -- rows and ranks --------------------------------------------------------------------------------


def test_a_completion_without_a_reward_is_left_out():
    """The row and its normalizer are those of the others; of a group that is not scored all train."""
    groups = make_groups()
    for group in groups[1:]:
        group.reward = [1.0] * 3
    groups[2].reward[0] = math.nan
    ((micro,),) = dealt(groups, ADVANTAGES, 1, make_config("m"))
    masks = [mask.unique().tolist() for mask in micro.mask.split([*itertools.chain(*LENGTHS)])]
    assert masks == [[1.0]] * 6 + [[0.0]] + [[1.0]] * 5
    assert micro.update == (12, NUM_TOKENS - 12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
@pytest.mark.parametrize("max_tokens", [24, 60, 10_000])
def test_ranks_get_equally_many_rows_and_every_token_once(max_tokens, num_ranks):
    config = make_config("m", max_tokens_per_gpu=max_tokens)
    ranks = dealt(make_groups(), ADVANTAGES, num_ranks, config)
    assert len({len(rows) for rows in ranks}) == 1
    assert sum(micro.mask.sum().item() for rows in ranks for micro in rows) == NUM_TOKENS
    assert [updates_of(rows) for rows in ranks] == [[(12, NUM_TOKENS)]] * num_ranks
    assert all(rows[-1].update for rows in ranks)
    if num_ranks == 2 and max_tokens == 10_000:  # all of the batch would fit a single row
        sizes = [sum(row.packed.num_tokens for row in rows) for rows in ranks]
        assert max(sizes) < 0.7 * sum(sizes)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # At a learning rate of zero two halves add up to twice the batch.
        ("dapo", [NUM_TOKENS / 2] * 2),
        ("cispo", [NUM_TOKENS / 2] * 2),
        ("bnpo", [14 + 13, 19 + 15]),  # each half by its own
        ("grpo", [6, 6]),
        ("dr_grpo", [6 * 12, 6 * 12]),
    ],
)
def test_minibatches_weigh_every_token_alike(loss_type, expected):
    config = make_config("m", num_minibatches=2, loss_type=loss_type)
    (halves,) = dealt(make_groups(), ADVANTAGES, 1, config)
    found = [loss_normalizer(num, tokens, config) for num, tokens in updates_of(halves)]
    assert found == expected
    assert loss_normalizer(12, 0, config) > 0


@pytest.mark.parametrize("fields", [
    {"max_staleness": 1}, {"scale_rewards": "batch"}, {"num_minibatches": 2},
    {"num_iterations": 2}, {"advantage_fn": lambda rewards, groups: rewards},
], ids=" ".join)  # fmt: skip
def test_training_waits_for_the_batch_where_it_must(fields):
    """Elsewhere it starts once the groups that came fill a row."""
    groups = make_groups()
    config = make_config("m", max_tokens_per_gpu=40, max_staleness=0)
    dealer = Dealer(1, config)
    needs = [dealer.needs_more(group) for group in groups[:3]]
    assert needs == [True, True, False]  # 35 tokens of two
    dealer = Dealer(1, replace(config, **fields))
    assert all(dealer.needs_more(group) for group in groups)


# -- the policy's log-probs ------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"gradient_checkpoint": True}, {"bf16": True}], ids=str)
def test_first_ratio_is_one(models, device, fields):
    """Old, reference and training log-probs of a shared row are the same to the bit."""
    config = make_config(models["tied"], beta=0.1, **fields)
    policy = build_policy(config, device)
    config = share_prefixes(policy, config)
    reference = build_reference(policy, config, device)
    for micro in dealt(make_groups(), ADVANTAGES, 1, config)[0]:
        assert micro.packed.tree is not None
        trained = token_logprobs(policy, micro.packed, micro.images, config)
        with torch.no_grad():
            old = token_logprobs(policy, micro.packed, micro.images, config)
        assert trained.requires_grad
        assert torch.equal(trained, old)
        assert torch.equal(trained, reference(micro.packed, micro.images))


def test_sharing_falls_back(models, device, capsys, monkeypatch):
    """A model that is not exact trains on padded rows, as any that is refused; the reason is told."""
    config = make_config(models["tied"])
    policy = build_policy(config, device)
    break_gradients(monkeypatch, 2)
    config = share_prefixes(policy, config)
    assert not config.share_prefix
    told = capsys.readouterr().out
    assert "share_prefix is off, each prompt is forwarded once per completion: Qwen3For" in told
    assert "differ from plain rows" in told
    rows = dealt(make_groups(), ADVANTAGES, 1, config)[0]
    assert all(micro.packed.tree is None for micro in rows)


def test_attention_with_a_softcap(tmp_path):
    """transformers would take sdpa for it, which has none: another model would train."""
    make_family("Gemma2").save_pretrained(tmp_path)
    config = make_config(str(tmp_path), share_prefix=False)
    groups = [([5, 6, 7], [[8, 9, 10, 11, 12, 13]])]
    expected = plain_rows(make_family("Gemma2", "eager"), groups)
    torch.testing.assert_close(plain_rows(load_model(config), groups), expected)
    with pytest.raises(UserError, match="attn_implementation=sdpa leaves out the softcap"):
        load_model(replace(config, attn_implementation="sdpa"))


def test_adapters_of_experts_are_refused(tmp_path, device):
    """peft adapts tensors of all experts at once where all layers are asked for; attention trains."""
    experts = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    transformers.MixtralForCausalLM(experts).save_pretrained(tmp_path)
    config = make_config(str(tmp_path), use_peft=True)
    with pytest.raises(UserError, match="experts in one tensor"):
        build_policy(config, device)
    policy = build_policy(replace(config, lora_target_modules=["q_proj", "o_proj"]), device)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name for name, _ in published_weights(policy)} == saved.keys()


# -- the optimizer's side --------------------------------------------------------------------------


def test_gradients_are_normalized_before_they_are_clipped():
    """Sum (30, 40), normalizer 10: (3, 4) of norm 5, clipped to norm 1: (.6, .8)."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([30.0, 40.0])
    module = torch.nn.ParameterList([weight])
    norm = optimizer_step(module, *sgd(module), 10.0, make_config("m", grad_norm=1.0))
    assert norm == pytest.approx(5)
    torch.testing.assert_close(weight.data, torch.tensor([-0.6, -0.8]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("kind", "warmup_ratio", "rates"),
    [
        ("constant", 0.2, [1, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
        ("linear", 0.2, [1, 2, 2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25]),
        ("cosine", 0.2, [1, 2, *(1 + math.cos(math.pi * k / 8) for k in range(8))]),
        ("constant", 0.1, [2] * 14),  # to whole updates: 1.4 are one, whose rate is the whole
        ("constant", 0.1, [1] + [2] * 15),
    ],
)
def test_optimizer_and_schedules(kind, warmup_ratio, rates):
    fields = {"lr_scheduler": kind, "warmup_ratio": warmup_ratio}
    config = make_config("m", adam_beta2=0.95, learning_rate=2.0, **fields)
    optimizer, scheduler = build_optimizer(torch.nn.Linear(3, 3), len(rates), config)
    seen = []
    for _ in rates:
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx(rates)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.95)] * 2


# -- several updates, a reference that moves -------------------------------------------------------


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_a_reference_that_moves(kind, models, device):
    """After four steps, two with a move, against weights averaged here, in a model of their own."""
    fields = {"use_peft": True, "lora_rank": 4, "lora_dropout": 0.3} if kind == "lora" else {}
    config = make_config(
        models["tied"], beta=0.3, reference_decay=0.25, reference_steps=2, num_minibatches=2,
        max_tokens_per_gpu=40, **fields,
    )  # fmt: skip
    policy = make_policy(config, device).train()
    steps = sgd(policy, 0.1)
    reference = build_reference(policy, config, device)
    sequences = [group.sequences for group in make_groups()]
    (row,) = pack(sequences)
    expected = trainable(policy)
    for step in (1, 2, 3, 4):
        batch = dealt(make_groups(), ADVANTAGES, 1, config)[0]
        train_batch(policy, reference, *steps, batch, config, device)
        reference.follow(step)
        if step % 2 == 0:
            for name, weight in trainable(policy).items():
                expected[name] = 0.25 * expected[name] + 0.75 * weight

    after = trainable(policy)
    got = reference(row, {})[row.index.argsort()]
    assert policy.training
    torch.testing.assert_close(trainable(policy), after, rtol=0, atol=0)

    model = make_policy(replace(config, share_prefix=False), device).eval()
    model.load_state_dict(expected, strict=False)
    with torch.no_grad():
        (plain,) = pack(sequences, share_prefix=False)
        theirs = token_logprobs(model, plain, {}, config)[plain.index.argsort()]
        moved = token_logprobs(policy.eval(), row, {}, config)[row.index.argsort()]
    torch.testing.assert_close(got, theirs, rtol=1e-5, atol=1e-4)
    assert (moved - theirs).abs().max() > 1e-3  # it lags behind the policy


def test_several_updates_on_one_batch(models, device):
    """Two passes of two mini-batches with KL, an adapter, and corrections of the policy before all of them."""
    config = make_config(
        models["tied"], max_tokens_per_gpu=40, use_peft=True, lora_rank=4, beta=0.3,
        num_iterations=2, num_minibatches=2, epsilon=0.05, off_policy_correction="truncate",
        correction_cap=1.5,
    )  # fmt: skip
    policy, model = make_policy(config, device), make_policy(config, device)
    start = trainable(policy)
    (batch,) = dealt(make_groups(), ADVANTAGES, 1, config)
    reference = build_reference(policy, config, device)
    metrics, _ = train_batch(policy, reference, *sgd(policy, 0.05), batch, config, device)

    optimizer, _ = sgd(model, 0.05)
    rows = [(g, c, *segment) for g, c, (segment,) in each_completion(make_groups())]
    with torch.no_grad():
        old = {row[:2]: plain_logprobs(model, *row[2:]) for row in rows}
        with model.disable_adapter():
            ref = {row[:2]: plain_logprobs(model, *row[2:]) for row in rows}
    kl, clipped, losses = 0.0, 0, []
    for half in (rows[:6], rows[6:], rows[:6], rows[6:]):
        total = torch.zeros(())
        for g, c, prompt, ids in half:
            advantage = ADVANTAGES[g, c] * (old[g, c] + 3.0).exp().clamp(max=1.5)
            now = plain_logprobs(model, prompt, ids)
            ratio = (now - old[g, c]).exp()
            gap = ref[g, c] - now
            k3 = gap.exp() - gap - 1
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage)
            total = total + (0.3 * ratio * k3 - surrogate).sum()
            kl += k3.sum().item() / (2 * NUM_TOKENS)
            is_clipped = (ratio < 0.95) & (advantage < 0) | (ratio > 1.05) & (advantage > 0)
            clipped += is_clipped.sum().item() / (2 * NUM_TOKENS)
        optimizer.zero_grad()
        losses.append(total / (NUM_TOKENS / 2))
        losses[-1].backward()
        optimizer.step()
    assert clipped > 0
    metrics["clipped"] = metrics["clip_ratio/low"] + metrics["clip_ratio/high"]
    expected = {"loss": sum(loss.item() for loss in losses) / 4, "kl": kl, "clipped": clipped}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    # The whole way moved, to the rounding that four steps in fp32 add up.
    got, wanted = (
        {name: weight - start[name] for name, weight in trainable(of).items()}
        for of in (policy, model)
    )
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-5)


# -- what a checkpoint needs -----------------------------------------------------------------------


REFUSED = {
    "temperature": 0.9, "top_p": 0.6, "min_p": 0.1, "top_h": 0.3, "typical_p": 0.9, "eta_cutoff": 0.1,
    "early_stopping": True, "length_penalty": 0.8, "output_scores": True, "pad_token_id": -1,
}  # fmt: skip


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_generation_config_that_could_not_be_saved(models, tmp_path, file):
    """Defaults that transformers loads and refuses to save: each checkpoint has them, and all others of the model."""
    folder = shutil.copytree(models["tied"], tmp_path / "model")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | REFUSED))
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    before = transformers.GenerationConfig.from_pretrained(folder, config_file_name=file).to_dict()

    config = make_config(str(folder))
    load_model(config).save_pretrained(tmp_path / "saved")
    load_model(config, tmp_path / "saved").save_pretrained(tmp_path / "again")
    for name in ("saved", "again"):
        loaded = transformers.GenerationConfig.from_pretrained(tmp_path / name)
        after = loaded.to_dict()
        assert REFUSED.items() <= after.items()
        assert after["eos_token_id"] == before["eos_token_id"] == 2
        if file == "generation_config.json":
            assert after == before


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerBase", "PreTrainedConfig"])
def test_what_could_not_be_saved_is_known_at_the_start(models, monkeypatch, kind):
    """Tokenizer, processor or configuration: before servers are asked or a policy is loaded."""

    def save(*_, **__):
        raise NotImplementedError("no file\nof a vocabulary")

    monkeypatch.setattr(getattr(transformers, kind), "save_pretrained", save)
    cause = "NotImplementedError: no file of a vocabulary$"
    with pytest.raises(UserError, match=f"^model_id: its checkpoints could not be saved: {cause}"):
        open_run(make_config(models["tied"], server_timeout=1.0), {"step": 0})
