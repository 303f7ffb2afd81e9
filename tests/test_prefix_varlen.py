"""The CUDA branch of the cascade, on the CPU: the flash kernels written out, with what they ask for and give.

Of torch 2.11 to 2.13, `mha_varlen_fwd` and `mha_varlen_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/
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
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(
                1 + scores.shape[2] - scores.shape[1]
            )
            scores = scores.masked_fill(hidden, -torch.inf)
        yield rows, columns, scores


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, return_debug_mask, *, scale):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for rows, columns, scores in pieces(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, scale
    ):
        lse[:, rows] = scores.logsumexp(-1)
        values = v[columns].repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[rows] = torch.einsum("hlk,khd->lhd", scores.softmax(-1), values)
    return out, lse, *torch.zeros(2, 2, dtype=torch.uint64), q.new_empty(0)


def backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout,
    is_causal,
    rng_state,
    unused,
    *,
    scale,
):
    """p is made again from the given log-sum-exp, rowsum(grad·out) from the given out."""
    assert grad.shape == out.shape == q.shape
    assert lse.shape == (q.shape[1], len(q))
    assert lse.is_contiguous()  # the kernel reads from its first address on
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    for rows, columns, scores in pieces(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, scale
    ):
        keys, values = (t[columns].repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        p = (scores - lse[:, rows, None]).exp()
        delta = (grad[rows] * out[rows]).sum(-1).T[..., None]
        ds = p * (torch.einsum("lhd,khd->hlk", grad[rows], values) - delta) * scale
        dq[rows] = torch.einsum("hlk,khd->lhd", ds, keys)
        dk[columns] = (
            torch.einsum("hlk,lhd->khd", ds, q[rows]).unflatten(1, (k.shape[1], -1)).sum(2)
        )
        dv[columns] = (
            torch.einsum("hlk,lhd->khd", p, grad[rows]).unflatten(1, (k.shape[1], -1)).sum(2)
        )
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
    """The same by recipes/flash4.py: of vLLM 0.32's copy, names and order of what it takes, and what it gives."""

    def forward_4(
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        return_lse,
    ):
        assert len(cu_seqlens_q) <= 257
        limits = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False
        out, lse, *_ = forward(q, k, v, *limits, scale=softmax_scale)
        return out, lse if return_lse else None, None, None

    def backward_4(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale,
        causal,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
    ):
        limits = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, None, None
        return backward(dout, q, k, v, out, lse, *limits, scale=softmax_scale)

    with pytest.MonkeyPatch.context() as patched:
        for name in (
            "_flash",
            "_flash_backward",
        ):  # put back at the end, as use_flash_attention_4 does not
            patched.setattr(prefix_attention, name, getattr(prefix_attention, name))
        patched.setattr(torch.Tensor, "is_cuda", True)
        patched.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        kernels = SimpleNamespace(_flash_attn_fwd=forward_4, _flash_attn_bwd=backward_4)
        patched.setitem(sys.modules, "vllm.vllm_flash_attn", SimpleNamespace())
        patched.setitem(
            sys.modules, "vllm.vllm_flash_attn.cute", SimpleNamespace(interface=kernels)
        )
        flash4.use_flash_attention_4()
        yield


def test_flash_attention_4_ends_a_run_for_which_it_was_not_tried(monkeypatch):
    """An error would be taken for one of the model: sharing would be off, and the run go on."""
    monkeypatch.setattr(prefix_attention, "_flash", flash4.forward)
    with pytest.raises(SystemExit, match="not been tried with .* on cpu: leave out"):
        attach(make_model("Llama"), verify=True)


def test_flash_attention_4_leaves_calls_of_many_pieces():
    tree = Tree([s for n in range(300) for s in ((2 * n, 2, 0, 0), (600 + n, 1, 2, 0))])
    tensors = [
        torch.randn(900, heads, 64, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]

    def results():
        out = _Cascade.apply(*tensors, None, tree, 0.1)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    expected = results()
    with written_out(), flash_attention_4():
        got = results()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", [contextlib.nullcontext, written_out, flash_attention_4])
def test_segments_that_see_all_of_themselves(kernels):
    """Images in two prompts, one of them first in its row, with text before, behind and below: against a dense mask."""
    plan = [
        (0, 3, 0, 0), (3, 4, 3, 1), (7, 3, 7, 0), (14, 1, 10, 0), (10, 4, 9, 0), (15, 4, 0, 1), (19, 6, 4, 0),
    ]  # fmt: skip
    mask = torch.zeros(25, 25, dtype=torch.bool)
    path: list[int] = []
    for start, length, depth, sees_all in plan:
        own = torch.ones(length, length, dtype=torch.bool)
        path = path[:depth]
        mask[start : start + length, path] = True
        mask[start : start + length, start : start + length] = own if sees_all else own.tril()
        path += range(start, start + length)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(25, heads, 64, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    ]
    q, k, v = (tensor.requires_grad_() for tensor in tensors)
    keys, values = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    scores = torch.einsum("lhd,khd->hlk", q, keys).masked_fill(~mask, -torch.inf) * 0.1
    expected = torch.einsum("hlk,khd->lhd", scores.softmax(-1), values)
    weights = torch.randn(25, 4, 64, generator=generator, dtype=torch.float64)
    with kernels():
        got = _Cascade.apply(q, k, v, None, Tree(plan), 0.1)
        of_cascade = torch.autograd.grad((got * weights).sum(), (q, k, v))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        of_cascade, torch.autograd.grad((expected * weights).sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_tokens", [None, 48])
@pytest.mark.parametrize("make", [make_groups, make_agents])
@pytest.mark.parametrize("family", FAMILIES)
def test_to_the_last_digit(family, make, max_tokens, exact):
    """fp64 against plain rows; among the groups: of one, an empty completion, prompts above a single token."""
    plain, shared = (
        make_model(family, stock(family), torch.float64),
        attach(make_model(family, dtype=torch.float64)),
    )
    groups = [*make(), ([5], [[6, 7]]), ([8, 9, 10], [[11, 12]])]
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return forward(*arguments, **options)

    with written_out(counted):
        got = shared_rows(shared, groups, max_tokens, temperature=0.7)
        of_shared = gradients(shared, got)
    assert bool(calls) == (
        family not in ("Mistral", "Gemma2")
    )  # windows that bind in every layer, softcap
    expected = plain_rows(plain, groups, 0.7)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert_equal_gradients(of_shared, gradients(plain, expected), 1e-10)


def test_one_call_per_level():
    """40 groups of all lengths: two calls in the forward of a layer, of whole slices, whose plan is made once."""
    random = torch.Generator().manual_seed(0)
    length = lambda most: int(torch.randint(1, most, (), generator=random))
    tokens = lambda number: torch.randint(3, 97, (number,), generator=random).tolist()
    groups = [
        ([g, *tokens(length(40))], [[c, *tokens(length(20))] for c in range(1 + length(4))])
        for g in range(40)
    ]
    (row,) = pack(groups)
    assert row.tree is not None
    shapes = []

    def counted(q, k, v, *arguments, **options):
        shapes.append((len(q), len(k), q._base is None))
        return forward(q, k, v, *arguments, **options)

    model = attach(make_model("Llama"))
    prefix_attention._blocks.cache_clear()
    with written_out(counted):
        completion_logprobs(model, row).sum().backward()
    paths = prefix_attention._paths(row.tree.segments)
    num_roots = sum(len(path[0]) for path in paths if len(path) == 1)
    seen = {path[0] for path in paths if len(path) == 2}
    levels = [
        (row.num_tokens, row.num_tokens),
        (row.num_tokens - num_roots, sum(map(len, seen))),
    ]
    assert [shape[:2] for shape in shapes] == levels * len(model.model.layers)
    assert prefix_attention._blocks.cache_info().misses == 1


def swapped(*args, calls=prefix_attention._calls):
    """Within a call, each piece of queries sees another's keys."""
    return [
        [(queries, keys) for (queries, _), (_, keys) in zip(call, call[::-1], strict=True)]
        for call in calls(*args)
    ]


def test_the_comparison_notices_swapped_pieces(monkeypatch):
    model = attach(make_model("Llama"))
    with written_out():
        right = shared_rows(model, make_groups())
        monkeypatch.setattr(prefix_attention, "_calls", swapped)
        wrong = shared_rows(model, make_groups())
    assert not torch.allclose(wrong, right, rtol=0, atol=1e-3)
