"""Shared prefixes against one plain row per completion, for every model family: values, every gradient, LoRA.

The reference runs each prompt and completion alone through the stock model, eager where sdpa leaves something out.
"""

import functools
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from prefix_attention import _Cascade, attach, completion_logprobs, pack

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
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}


def make_model(family, attention=None, dtype=torch.float32):
    """A random model of two layers whose distributions are far from uniform."""
    kind = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
    config = kind(**{**SIZES, **FAMILIES[family]})
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


def drawing(seed):
    """A function that gives so many random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return lambda count: torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def make_groups():
    """Ragged prompts, completions and group sizes; one of a single token, one empty, one group of one."""
    tokens = drawing(2)
    return [
        (tokens(9), [tokens(5), tokens(1), tokens(8)]),
        (tokens(3), [tokens(4)]),
        (tokens(7), [tokens(6), [], tokens(2)]),
    ]


def make_agents():
    """Three groups with one system prompt: histories that go on, branch, or are rewritten, equal and nested answers."""
    tokens = drawing(5)
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


def plain_logits(model, groups, temperature=1.0, table=None):
    """For every completion the logits [n, V] of its tokens, each with its prompt alone, and the tokens.

    With a table [V, hidden] the model gets its rows in place of token ids.
    """
    for prompt, ids in pairs(groups):
        whole = torch.tensor([prompt + ids])
        inputs = {"input_ids": whole} if table is None else {"inputs_embeds": table[whole]}
        yield model(**inputs).logits[0, len(prompt) - 1 : -1] / temperature, ids


def plain_rows(model, groups, temperature=1.0, table=None):
    """Log-probs of every completion token, each prompt and completion alone through `model`."""
    found = plain_logits(model, groups, temperature, table)
    return torch.cat([logits.log_softmax(-1)[range(len(ids)), ids] for logits, ids in found])


def shared_rows(model, groups, max_tokens=None, temperature=1.0, table=None, **options):
    """The same through packed rows, in the order of the completions."""
    rows = pack(groups, max_tokens, **options)
    device = next(model.parameters()).device
    values = []
    for row in rows:
        features = {} if table is None else {"inputs_embeds": table[row.input_ids]}
        values.append(completion_logprobs(model, row.to(device), temperature, **features))
    return torch.cat(values)[torch.cat([row.index for row in rows]).argsort()]


def gradients(model, values):
    """Of a weighted sum of the log-probs, by parameter; interior tokens with weight 0."""
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, len(values), dtype=values.dtype)
    weights[2::5] = 0
    (values * weights.to(values.device)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def break_gradients(monkeypatch, factor):
    """Shared rows get gradients that many times as large."""
    backward = _Cascade.backward

    def broken(*args):
        return tuple(None if part is None else factor * part for part in backward(*args))

    monkeypatch.setattr(_Cascade, "backward", broken)


def assert_equal_gradients(got, expected, tolerance):
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (got[name] - gradient).norm() / gradient.norm().clamp(min=1e-30)
        assert error <= tolerance, (name, error.item())


def stock(family):
    """The attention of the reference: sdpa would leave out softcap, and gpt-oss has none but eager for its sinks."""
    return "eager" if family in ("Gemma2", "GptOss") else "sdpa"


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
    to_float = torch.Tensor.float
    lifted = (torch.float64, torch.int64)  # positions meet fp64 frequencies
    to_wide = lambda tensor: tensor.double() if tensor.dtype in lifted else to_float(tensor)
    monkeypatch.setattr(torch.Tensor, "float", to_wide)


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3_5"])
def test_features_in_place_of_ids(family, share_prefix, exact):
    """A table's rows as features, in shared and in padded rows; fp64 leaves the order of summation."""
    plain = make_model(family, "eager", torch.float64)
    model = attach(make_model(family, dtype=torch.float64))
    groups = [*make_groups(), *make_agents()]
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(VOCAB, 32, generator=generator, dtype=torch.float64, requires_grad=True)

    expected = plain_rows(plain, groups, 0.7, table)
    of_plain = gradients(plain, expected) | {"features": table.grad}
    table.grad = None
    got = shared_rows(model, groups, 48, 0.7, table, share_prefix=share_prefix)
    of_ours = gradients(model, got) | {"features": table.grad}
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert_equal_gradients(of_ours, of_plain, 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_and_lora(family):
    """Adapters on every linear layer, the head included, and recomputed.

    Without them shared, padded and plain rows of an attached model are plain rows of the stock one.
    """

    def adapted(model):
        names = set()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                names.add(name.rpartition(".")[2])
        if family == "Llama":  # tied: one matrix cannot take the adapter of one use
            names.remove("lm_head")
        lora = LoraConfig(r=2, target_modules=sorted(names), init_lora_weights=False)
        torch.manual_seed(3)
        return get_peft_model(model, lora)

    plain, shared = adapted(make_model(family, stock(family))), adapted(make_model(family))
    shared.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    attach(shared.train())
    groups = [*make_groups(), *make_agents()]
    expected, got = plain_rows(plain, groups), shared_rows(shared, groups)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert_equal_gradients(gradients(shared, got), gradients(plain, expected), 2e-5)
    with plain.disable_adapter(), shared.disable_adapter(), torch.no_grad():
        before = plain_rows(plain, groups)
        others = [shared_rows(shared, groups), plain_rows(shared, groups)]
        others += [shared_rows(model, groups, share_prefix=False) for model in (plain, shared)]
    for without in others:
        torch.testing.assert_close(without, before, rtol=1e-5, atol=1e-5)
    assert (before - got).abs().max() > 0.1


def test_a_window_is_found_in_a_class_without_a_source():
    """FSDP2 makes classes of what it wraps."""
    model = make_model("Mistral")
    for module in model.modules():
        kind = type(module)
        if "Attention" in kind.__name__:
            module.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})
    assert attach(model, verify=False) is model
