"""Shared prefixes against one plain row per completion, for every model family: values, every gradient, LoRA.

The reference runs each prompt and completion alone through the stock model, eager where sdpa leaves something out.
"""

import contextlib
import functools
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

import prefix_attention
from prefix_attention import Tree, _Cascade, attach, completion_logprobs, pack
from recipes import flash4

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
    """Logits [n, V] of the tokens of each completion, with its prompt alone, and these; by ids or rows of a table."""
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
    """Adapters on every linear layer, the head included, and recomputed; without them rows are the stock model's."""

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


@pytest.mark.parametrize("block", [1, 3, 512])
@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "GptOss"])
def test_windows_that_bind_by_one_token(family, block, monkeypatch):
    """Paths below, at and over the window, in blocks of queries smaller than a segment."""
    monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", block)
    plain, shared = make_model(family, stock(family)), attach(make_model(family))
    for length in range(4, 9):  # with two prompt tokens, all but the last forwarded
        groups = [([5, 6], [list(range(10, 10 + length)), [7, 8]])]
        got, expected = shared_rows(shared, groups), plain_rows(plain, groups)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


READS = [lambda logprobs, _: logprobs, lambda _, entropies: entropies, lambda a, b: a + 0.3 * b]


@pytest.mark.parametrize("reads", READS, ids=["log-probs", "entropies", "both"])
@pytest.mark.parametrize("chunk", [1, 97 * 5, 1 << 24])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_the_head_in_chunks(family, chunk, reads, exact, monkeypatch):
    """At a temperature, without two tokens; Gemma3 has a softcap. fp64: the order of summation."""
    monkeypatch.setitem(prefix_attention.HEAD_CHUNK, "cpu", chunk)
    plain = make_model(family, stock(family), torch.float64)
    forbidden = [1, 2]
    logprobs, entropies = [], []
    for logits, ids in plain_logits(plain, make_groups(), 0.7):
        allowed = logits.index_fill(-1, torch.tensor(forbidden), -torch.inf).log_softmax(-1)
        logprobs.append(allowed[range(len(ids)), ids])
        entropies.append(-(allowed.exp() * allowed.nan_to_num(neginf=0.0)).sum(-1))
    expected = [torch.cat(logprobs), torch.cat(entropies)]

    ours = attach(make_model(family, dtype=torch.float64))
    (row,) = pack(make_groups())
    found = completion_logprobs(ours, row, 0.7, return_entropy=True, forbidden=forbidden)
    got = [values[row.index.argsort()] for values in found]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    of_ours = gradients(ours, reads(*got))
    of_plain = gradients(plain, reads(*expected))
    assert_equal_gradients(of_ours, of_plain, 1e-10)


# -- the kernels of GPUs, written out ----------------------------------------------------------------------------------
# Of torch 2.11 to 2.13, `mha_varlen_fwd` and `mha_varlen_bwd` in native/transformers/cuda/flash_attn/flash_api.cpp:
# [T, H, D], int32 lengths, causal from the bottom right, natural log-sum-exp [H, T] in one piece.


def pieces(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, scale):
    """Queries, keys, and scores [H, L, K] of every sequence, after the kernels' checks."""
    assert k.shape == v.shape == (len(k), k.shape[1], q.shape[2])
    assert q.shape[1] % k.shape[1] == q.shape[2] % 8 == dropout == 0
    assert all(t.stride(2) == 1 and t.stride(0) % 8 == t.stride(1) % 8 == 0 for t in (q, k, v))
    assert cu_q.dtype == cu_k.dtype == torch.int32
    ends = cu_q.tolist(), cu_k.tolist()
    assert [(end[0], end[-1]) for end in ends] == [(0, len(q)), (0, len(k))]
    spans = [[slice(*pair) for pair in pairwise(end)] for end in ends]
    lengths = [[span.stop - span.start for span in of] for of in spans]
    assert [min(of) > 0 for of in lengths] == [True, True]  # no log-sum-exp would be there to merge
    assert [max(of) for of in lengths] == [max_q, max_k]
    for rows, columns in zip(*spans, strict=True):
        keys = k[columns].repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("lhd,khd->hlk", q[rows], keys) * scale
        if is_causal:
            later = 1 + scores.shape[2] - scores.shape[1]
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(later)
            scores = scores.masked_fill(hidden, -torch.inf)
        yield rows, columns, scores


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, return_debug_mask, *, scale):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    lengths = cu_q, cu_k, max_q, max_k
    for rows, columns, scores in pieces(q, k, v, *lengths, dropout, is_causal, scale):
        lse[:, rows] = scores.logsumexp(-1)
        values = v[columns].repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[rows] = torch.einsum("hlk,khd->lhd", scores.softmax(-1), values)
    return out, lse, *torch.zeros(2, 2, dtype=torch.uint64), q.new_empty(0)


def backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, seed, offset, *, scale
):  # fmt: skip
    """p is made again from the given log-sum-exp, rowsum(grad·out) from the given out."""
    assert grad.shape == out.shape == q.shape
    assert lse.shape == (q.shape[1], len(q))
    assert lse.is_contiguous()  # the kernel reads from its first address on
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    lengths = cu_q, cu_k, max_q, max_k
    for rows, columns, scores in pieces(q, k, v, *lengths, dropout, is_causal, scale):
        keys, values = (t[columns].repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        p = (scores - lse[:, rows, None]).exp()
        delta = (grad[rows] * out[rows]).sum(-1).T[..., None]
        ds = p * (torch.einsum("lhd,khd->hlk", grad[rows], values) - delta) * scale
        dq[rows] = torch.einsum("hlk,khd->lhd", ds, keys)
        of_keys = torch.einsum("hlk,lhd->khd", ds, q[rows])
        of_values = torch.einsum("hlk,lhd->khd", p, grad[rows])
        dk[columns] = of_keys.unflatten(1, (k.shape[1], -1)).sum(2)
        dv[columns] = of_values.unflatten(1, (k.shape[1], -1)).sum(2)
    return dq, dk, dv


@contextlib.contextmanager
def written_out():
    """Tensors on the CPU take the CUDA branch, with the kernels above; gives the queries and keys of each forward."""
    shapes = []

    def noted(q, k, *arguments, **options):
        shapes.append((len(q), len(k)))
        return forward(q, k, *arguments, **options)

    with (
        pytest.MonkeyPatch.context() as patched,
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        patched.setattr(torch.Tensor, "is_cuda", True)
        library.impl("_flash_attention_forward", noted, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield shapes


@contextlib.contextmanager
def flash_attention_4():
    """The same by recipes/flash4.py, with the names, order and results of vLLM 0.32's copy."""

    def forward_4(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        return_lse,
    ):  # fmt: skip
        assert len(cu_seqlens_q) <= 257
        limits = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False
        out, lse, *_ = forward(q, k, v, *limits, scale=softmax_scale)
        return out, lse if return_lse else None, None, None

    def backward_4(
        q, k, v, out, dout, lse, softmax_scale, causal, *, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k,
    ):  # fmt: skip
        limits = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, None, None
        return backward(dout, q, k, v, out, lse, *limits, scale=softmax_scale)

    with pytest.MonkeyPatch.context() as patched:
        for name in ("_flash", "_flash_backward"):  # put back at the end
            patched.setattr(prefix_attention, name, getattr(prefix_attention, name))
        patched.setattr(torch.Tensor, "is_cuda", True)
        patched.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        kernels = SimpleNamespace(_flash_attn_fwd=forward_4, _flash_attn_bwd=backward_4)
        package = SimpleNamespace(interface=kernels)
        patched.setitem(sys.modules, "vllm.vllm_flash_attn", SimpleNamespace())
        patched.setitem(sys.modules, "vllm.vllm_flash_attn.cute", package)
        flash4.use_flash_attention_4()
        yield


def test_flash_attention_4_ends_a_run_for_which_it_was_not_tried(monkeypatch):
    """An error would be taken for one of the model: sharing would be off, and the run go on."""
    monkeypatch.setattr(prefix_attention, "_flash", flash4.forward)
    with pytest.raises(SystemExit, match="not been tried with .* on cpu: leave out"):
        attach(make_model("Llama"), verify=True)


def test_flash_attention_4_leaves_calls_of_many_pieces():
    segments = []
    for number in range(300):
        segments += [(2 * number, 2, 0, 0), (600 + number, 1, 2, 0)]
    draw = lambda heads: torch.randn(900, heads, 64, dtype=torch.float64, requires_grad=True)
    tensors = [draw(4), draw(2), draw(2)]

    def results():
        out = _Cascade.apply(*tensors, None, Tree(segments), 0.1)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    expected = results()
    with written_out(), flash_attention_4():
        got = results()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def dense(q, k, v, segments, scale, sinks=None):
    """Attention [T, H, D] written out, with the mask of the segments."""
    total = len(q)
    mask = torch.zeros(total, total, dtype=torch.bool)
    path: list[int] = []
    for start, length, depth, sees_all in segments:
        own = torch.ones(length, length, dtype=torch.bool)
        path = path[:depth]
        mask[start : start + length, path] = True
        mask[start : start + length, start : start + length] = own if sees_all else own.tril()
        path += range(start, start + length)
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("lhd,khd->hlk", q, k) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, total, 1)], -1)
    return torch.einsum("hlk,khd->lhd", scores.softmax(-1)[..., :total], v)


@pytest.mark.parametrize("kernels", [contextlib.nullcontext, written_out, flash_attention_4])
def test_segments_that_see_all_of_themselves(kernels):
    """Images in two prompts, with text before, behind and below: against a dense mask."""
    plan = [
        (0, 3, 0, 0), (3, 4, 3, 1), (7, 3, 7, 0), (14, 1, 10, 0), (10, 4, 9, 0), (15, 4, 0, 1),
        (19, 6, 4, 0),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    draw = lambda heads: torch.randn(25, heads, 64, generator=generator, dtype=torch.float64)
    q, k, v = tensors = [draw(heads).requires_grad_() for heads in (4, 2, 2)]
    expected = dense(q, k, v, plan, 0.1)
    weights = draw(4)
    of_expected = torch.autograd.grad((expected * weights).sum(), tensors)
    with kernels():
        got = _Cascade.apply(q, k, v, None, Tree(plan), 0.1)
        of_cascade = torch.autograd.grad((got * weights).sum(), tensors)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_cascade, of_expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_to_the_last_digit(family, on_gpu, exact):
    """fp64 against plain rows, casts lifted: what is left is the order of summation."""
    plain = make_model(family, stock(family), torch.float64)
    shared = attach(make_model(family, dtype=torch.float64))
    groups = [*make_groups(), *make_agents(), ([5], [[6, 7]]), ([8, 9, 10], [[11, 12]])]
    expected = plain_rows(plain, groups, 0.7)
    of_plain = gradients(plain, expected)
    has_no_kernel = family in ("Mistral", "Gemma2")  # windows that bind in every layer, softcaps
    for max_tokens in (None, 48):
        with written_out() if on_gpu else contextlib.nullcontext() as calls:
            got = shared_rows(shared, groups, max_tokens, temperature=0.7)
            of_shared = gradients(shared, got)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        assert_equal_gradients(of_shared, of_plain, 1e-10)
        assert bool(calls) == (on_gpu and not has_no_kernel)


def test_one_call_per_level():
    """Of all branches, and never more keys than the row has tokens."""
    # Stripped thoughts: branches that see 14, 10, 6 and 2 tokens of a history.
    segments = [([1, 2, *range(20, 20 + 4 * n)], [10 + n] * 3) for n in range(5)]
    (row,) = pack([([1, 2], [segments])])
    model = attach(make_model("Llama"))
    with written_out() as shapes:
        completion_logprobs(model, row).sum().backward()
    assert shapes == [(28, 28), (4, 24), (4, 8)] * len(model.model.layers)
