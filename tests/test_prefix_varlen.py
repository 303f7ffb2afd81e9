"""Every model family in fp64 by the kernels of CPUs, and by those of GPUs written out.

These are of torch 2.11 to 2.13, `mha_varlen_fwd` and `mha_varlen_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/
flash_api.cpp: [T, H, D], int32 lengths, causal from the bottom right, natural log-sum-exp [H, T] in one piece.
"""

import contextlib
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from test_prefix_models import (
    FAMILIES,
    assert_equal_gradients,
    exact,
    gradients,
    make_agents,
    make_groups,
    make_model,
    plain_rows,
    shared_rows,
    stock,
)

import prefix_attention
from prefix_attention import Tree, _Cascade, attach, completion_logprobs, pack
from recipes import flash4

__all__ = ["exact"]


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
def written_out(forward=forward):
    """Tensors on the CPU take the CUDA branch, with the kernels above."""
    with (
        pytest.MonkeyPatch.context() as patched,
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        patched.setattr(torch.Tensor, "is_cuda", True)
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


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


@pytest.mark.parametrize("kernels", ["of CPUs", "of GPUs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_to_the_last_digit(family, kernels, exact):
    """fp64 against plain rows, casts lifted: what is left is the order of summation."""
    plain = make_model(family, stock(family), torch.float64)
    shared = attach(make_model(family, dtype=torch.float64))
    groups = [*make_groups(), *make_agents(), ([5], [[6, 7]]), ([8, 9, 10], [[11, 12]])]
    expected = plain_rows(plain, groups, 0.7)
    of_plain = gradients(plain, expected)
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return forward(*arguments, **options)

    on_gpu = kernels == "of GPUs"
    for max_tokens in (None, 48):
        with written_out(counted) if on_gpu else contextlib.nullcontext():
            got = shared_rows(shared, groups, max_tokens, temperature=0.7)
            of_shared = gradients(shared, got)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
        assert_equal_gradients(of_shared, of_plain, 1e-10)
    has_no_kernel = family in ("Mistral", "Gemma2")  # windows that bind in every layer, softcaps
    assert bool(calls) == (on_gpu and not has_no_kernel)


# Stripped thoughts: branches that see 14, 10, 6 and 2 tokens of a history.
SEGMENTS = [([1, 2, *range(20, 20 + 4 * n)], [10 + n] * 3) for n in range(5)]
STRIPPED = ([1, 2], [SEGMENTS])


@pytest.mark.parametrize(
    ("groups", "calls"),
    [
        ([STRIPPED, ([5] * 3, [[6] * 9, [7] * 5, [8] * 2])], [(28 + 16, 28 + 16), (13, 32 + 3)]),
        ([STRIPPED], [(28, 28), (4, 24), (4, 8)]),  # never more keys than the row has tokens
    ],
)
def test_one_call_per_level(groups, calls):
    """In the forward of a layer."""
    (row,) = pack(groups)
    shapes = []

    def counted(q, k, v, *arguments, **options):
        shapes.append((len(q), len(k)))
        return forward(q, k, v, *arguments, **options)

    model = attach(make_model("Llama"))
    with written_out(counted):
        completion_logprobs(model, row).sum().backward()
    assert shapes == calls * len(model.model.layers)
