"""Shared prefixes against one plain row per completion, for every model family: values, every gradient, LoRA.

The reference runs each prompt and completion alone through the stock model, eager where sdpa leaves something out.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from prefix_attention import attach, completion_logprobs, pack

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {**WINDOW, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "Gemma3": {**WINDOW, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "Phi3": {},
    "Olmo2": {},
    "Qwen3Moe": {**MOE, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "GptOss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Glm4": {"partial_rotary_factor": 0.5},
    "DeepseekV3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    },
    "Cohere2": {**WINDOW, "logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.3},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Qwen3Next": {**DELTA, **MOE, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 24},
    "Qwen3_5": {**DELTA},
}  # fmt: skip
WITH_EXPERTS = ("Qwen3Moe", "GptOss", "DeepseekV3", "Qwen3Next")
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}


def make_model(family, attention=None, dtype=torch.float32):
    """A random model of two layers whose distributions are far from uniform."""
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(
        **{**SIZES, **FAMILIES[family]}
    )
    config._attn_implementation = attention
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # the grouped product of experts has no fp64
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    wide = torch.promote_types(dtype, torch.float32)  # torch 2.11 draws other numbers in bfloat16
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
            noise = torch.randn(parameter.shape, generator=generator, dtype=wide)
            parameter.add_(0.1 * noise.to(dtype))
    return model


def bare_head(head):
    """A model of nothing but a head, and the outputs of its body."""
    body = torch.nn.Module()
    forward = lambda: SimpleNamespace(logits=head(body.forward().last_hidden_state))
    outputs = BaseModelOutputWithPast(last_hidden_state=None)
    return SimpleNamespace(base_model=body, forward=forward, outputs=outputs)


def make_groups():
    """Ragged prompts, completions and group sizes; one of a single token, one empty, one group of one."""
    generator = torch.Generator().manual_seed(2)

    def tokens(count):
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    return [
        (tokens(9), [tokens(5), tokens(1), tokens(8)]),
        (tokens(3), [tokens(4)]),
        (tokens(7), [tokens(6), [], tokens(2)]),
    ]


def make_agents():
    """Three groups with one system prompt: histories that go on, branch, or are rewritten, equal and nested answers."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count):
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    system, first, second = tokens(6), tokens(3), tokens(4)
    thought, answer, tool = tokens(5), tokens(3), tokens(2)
    a, b = tokens(5), tokens(8)
    rewritten = [
        (system + first, thought + answer),
        (system + first + answer + tool, a),  # without the thought
        (system + first + answer + tool + a[2:] + tool, b),  # without the second's, too
    ]
    goes_on = [
        (system + second, a),
        (system + second + a + tool, b),
        (system + second + a + tool + b + tool, a),
    ]
    return [
        (system + first, [rewritten, thought + answer, thought[:2] + b, answer]),
        (system + second, [a, a[:2] + b, a[:4] + b, b, [], a[:3], a, goes_on]),
        (system + first[:1], [[(system + first + answer[:2], b), (tool, a)], b]),
        (tokens(2), [a, a]),
    ]


def pairs(groups):
    """(prompt, tokens) of every segment that is not empty; a completion of a single one is its tokens."""
    for prompt, completions in groups:
        for ids in filter(None, completions):
            yield from ids if isinstance(ids[0], tuple) else [(prompt, ids)]


def plain_rows(model, groups, temperature=1.0):
    """Log-probs of every completion token, each prompt and completion alone through `model`."""
    values = []
    for prompt, ids in pairs(groups):
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        values.append((logits / temperature).log_softmax(-1)[range(len(ids)), ids])
    return torch.cat(values)


def shared_rows(model, groups, max_tokens=None, temperature=1.0, **options):
    """The same through shared rows, in the order of the completions."""
    rows = pack(groups, max_tokens, **options)
    device = next(model.parameters()).device
    values = torch.cat([completion_logprobs(model, row.to(device), temperature) for row in rows])
    return values[torch.cat([row.index for row in rows]).argsort()]


def gradients(model, values):
    """Of a weighted sum of the log-probs, by parameter; interior tokens with weight 0."""
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, len(values), dtype=values.dtype).masked_fill(
        torch.arange(len(values)) % 5 == 2, 0
    )
    (values * weights.to(values.device)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(got, expected, tolerance):
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (got[name] - gradient).norm() / gradient.norm().clamp(min=1e-30)
        assert error <= tolerance, (name, error.item())


def stock(family):
    """The attention of the reference: sdpa would leave out softcap, and gpt-oss has none but eager for its sinks."""
    return "eager" if family in ("Gemma2", "GptOss") else "sdpa"


@pytest.mark.parametrize("make", [make_groups, make_agents])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(family, make):
    """fp32: 1e-5 of each gradient's norm, 1e-5 nats: the rounding of a few hundred products in another order."""
    plain, shared = make_model(family, stock(family)), attach(make_model(family))
    expected, got = plain_rows(plain, make()), shared_rows(shared, make())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(gradients(shared, got), gradients(plain, expected), 1e-5)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss", "Qwen3_5"])
def test_ordinary_batches_of_an_attached_model(family):
    expected = plain_rows(make_model(family, stock(family)), make_groups())
    got = plain_rows(attach(make_model(family)), make_groups())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def exact(monkeypatch):
    """Lift Hugging Face's casts to fp32, so that an fp64 model computes in fp64 throughout."""

    def kept(original):
        @functools.wraps(original)
        def call(tensor, *args, **kwargs):
            if tensor.dtype == torch.float64:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {n: torch.float64 if v is torch.float32 else v for n, v in kwargs.items()}
            return original(tensor, *args, **kwargs)

        return call

    monkeypatch.setattr(torch.Tensor, "to", kept(torch.Tensor.to))
    monkeypatch.setattr(torch.Tensor, "type", kept(torch.Tensor.type))
    monkeypatch.setattr(F, "softmax", kept(F.softmax))
    to_float, lifted = (
        torch.Tensor.float,
        (torch.float64, torch.int64),
    )  # positions meet fp64 frequencies
    monkeypatch.setattr(
        torch.Tensor, "float", lambda t: t.double() if t.dtype in lifted else to_float(t)
    )


@pytest.mark.parametrize("max_tokens", [None, 48])
@pytest.mark.parametrize("make", [make_groups, make_agents])
@pytest.mark.parametrize("family", FAMILIES)
def test_to_the_last_digit(family, make, max_tokens, exact):
    """fp64, casts lifted: what is left is the order of summation."""
    plain, shared = (
        make_model(family, stock(family), torch.float64),
        attach(make_model(family, dtype=torch.float64)),
    )
    groups = make()
    expected, got = (
        plain_rows(plain, groups, 0.7),
        shared_rows(shared, groups, max_tokens, temperature=0.7),
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert_equal_gradients(gradients(shared, got), gradients(plain, expected), 1e-10)


def test_paths_about_as_long_as_a_window():
    """Those that fit take the kernels, those that are a token longer do not."""
    plain, shared = make_model("Mistral", stock("Mistral")), attach(make_model("Mistral"))
    window = plain.config.sliding_window
    for length in range(window - 1, window + 6):
        groups = [
            ([3, 4, 5], [[*range(10, 8 + length)], [7, 8]])
        ]  # the last token is not forwarded
        assert max(len(prompt + ids) - 1 for prompt, ids in pairs(groups)) == length
        torch.testing.assert_close(
            shared_rows(shared, groups), plain_rows(plain, groups), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"share_prefix": False}],
    ids=str,
)
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3_5"])
def test_features_in_place_of_ids(family, options, exact):
    """Each token's random features as a leaf; 1e-10, as fp64 with casts lifted leaves only the order of summation."""
    plain = make_model(family, "eager", torch.float64)
    model = make_model(family, dtype=torch.float64)
    model = model if options == {"share_prefix": False} else attach(model)
    groups = [*make_groups(), *make_agents()]
    table = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    leaves: list[
        tuple[list[int], Any]
    ] = []  # token ids, and the features that a forward gets in their place

    def features(ids):
        leaves.append((ids.flatten().tolist(), table[ids].requires_grad_()))
        return leaves[-1][1]

    def of_features():
        """The gradient of a token's features: the sum of those of its copies."""
        total = torch.zeros_like(table)
        for ids, leaf in leaves:
            total.index_add_(0, torch.tensor(ids), leaf.grad.flatten(0, 1))
        leaves.clear()
        return total

    parts = []
    for prompt, ids in pairs(groups):
        logits = plain(inputs_embeds=features(torch.tensor([prompt + ids]))).logits[
            0, len(prompt) - 1 : -1
        ]
        parts.append((logits / 0.7).log_softmax(-1)[range(len(ids)), ids])
    expected = torch.cat(parts)
    of_plain = gradients(plain, expected) | {"features": of_features()}
    got = torch.zeros_like(expected)
    for row in pack(groups, 48, **options):
        logprobs = completion_logprobs(model, row, 0.7, inputs_embeds=features(row.input_ids))
        got = got.index_put((row.index,), logprobs)
    of_ours = gradients(model, got) | {"features": of_features()}
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert_equal_gradients(of_ours, of_plain, 1e-10)


@pytest.mark.parametrize("share_prefix", [False, True])
def test_features_of_another_shape_are_refused(share_prefix):
    (row,) = pack(make_groups(), share_prefix=share_prefix)
    with pytest.raises(ValueError, match=r"inputs_embeds \[1, 3, 32\] of a row of "):
        completion_logprobs(attach(make_model("Llama")), row, inputs_embeds=torch.randn(1, 3, 32))


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_and_lora(family):
    """Adapters on every linear layer, the head included, recomputed activations; then the same without the adapter."""
    from peft import LoraConfig, get_peft_model

    def adapted(model):
        heads = (
            [] if family == "Llama" else ["lm_head"]
        )  # tied there: one matrix cannot take the adapter of one use
        names = {
            n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)
        } - {"lm_head"}
        lora = LoraConfig(r=2, target_modules=sorted(names) + heads, init_lora_weights=False)
        torch.manual_seed(3)
        return get_peft_model(model, lora)

    plain, shared = adapted(make_model(family, stock(family))), adapted(make_model(family))
    shared.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    attach(shared.train())
    groups = [*make_groups(), *make_agents()]
    expected, got = plain_rows(plain, groups), shared_rows(shared, groups)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert_equal_gradients(gradients(shared, got), gradients(plain, expected), 2e-5)
    with plain.disable_adapter(), shared.disable_adapter():
        before, without = plain_rows(plain, groups), shared_rows(shared, groups)
    torch.testing.assert_close(without, before, rtol=1e-5, atol=1e-5)
    assert (without - got).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_do_not_see_each_other(family):
    """Another token in one completion leaves every other value, and the earlier ones of its own, as they were.

    They are bit-identical, as the shapes are the same, except where another token goes to other experts: each of these
    multiplies another number of tokens, for which a processor may take a kernel that rounds in another order.
    """
    model = attach(make_model(family))
    groups = make_groups()
    with torch.no_grad():
        before = shared_rows(model, groups)
        groups[0][1][2][4] = (
            groups[0][1][2][4] % 90 + 4
        )  # the fifth of the third completion, tokens 6 to 13 in order
        after = shared_rows(model, groups)
    rounding = 1e-5 if family in WITH_EXPERTS else 0
    same = torch.isclose(before, after, rtol=rounding, atol=rounding)
    assert same[:10].all()
    assert same[14:].all()
    assert not same[10:14].any()


def test_ordinary_batches_go_on_as_before():
    """An attached model on a padded batch, sdpa or written out, equals the stock model."""
    for family in FAMILIES:
        plain, shared = make_model(family, stock(family)), attach(make_model(family))
        (row,) = pack(make_groups(), share_prefix=False)
        with torch.no_grad():
            torch.testing.assert_close(
                completion_logprobs(shared, row),
                completion_logprobs(plain, row),
                rtol=1e-5,
                atol=1e-5,
                msg=family,
            )
            torch.testing.assert_close(
                completion_logprobs(plain, row),
                plain_rows(plain, make_groups()),
                rtol=1e-5,
                atol=1e-5,
                msg=family,
            )


def test_a_window_is_found_in_a_class_without_a_source():
    """FSDP2 makes classes of what it wraps, among them a tower's pooling by attention."""
    model = make_model("Mistral")
    for module in model.modules():
        kind = type(module)
        if "Attention" in kind.__name__:
            module.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})
    assert attach(model, verify=False) is model
