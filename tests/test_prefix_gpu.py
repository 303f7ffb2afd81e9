"""Shared prefixes on a GPU: the flash kernels of the cascade, and whole models, against fp64 and fp32 on the CPU."""

import copy
from typing import Any

import pytest
import torch
from test_prefix_models import FAMILIES, gradients, make_groups, make_model, plain_rows, stock
from torch.nn import functional as F

from prefix_attention import _attention, _has_kernel, attach, completion_logprobs, pack

pytestmark = pytest.mark.gpu

SEGMENTS = torch.tensor([
    [0, 70, -1], [70, 33, 0], [103, 1, 0], [104, 20, 0], [124, 9, 3], [133, 41, -1], [174, 65, 5],
    [239, 300, -1], [539, 1, 7],  # one query below many keys takes a kernel of its own
])  # fmt: skip


def dense(q, k, v, sinks, scale):
    """Attention written out, with the mask of the forest."""
    total = len(q)
    mask = torch.zeros(total, total, dtype=torch.bool)
    for start, length, parent in SEGMENTS.tolist():
        mask[start : start + length, start : start + length] = torch.ones(length, length).tril().bool()
        while parent >= 0:
            above, size, parent = SEGMENTS[parent].tolist()
            mask[start : start + length, above : above + size] = True
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("lhd,khd->hlk", q, k) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, total, 1)], -1)
    return torch.einsum("hlk,khd->lhd", scores.softmax(-1)[..., :total], v)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_cascade(dtype, head_dim, with_sinks):
    """Relative to each tensor's norm: a few roundings of 2⁻⁹ (bf16) or 2⁻¹² (fp16), and fp16's small gradients."""
    torch.manual_seed(0)
    shapes = [(4, head_dim), (2, head_dim), (2, head_dim)]
    total = int(SEGMENTS[-1, 0] + SEGMENTS[-1, 1])
    inputs = [torch.randn(total, *shape).to(dtype) for shape in shapes]
    inputs += [torch.randn(4).to(dtype)] if with_sinks else []
    weights = torch.randn(total, 4, head_dim).to(dtype)
    exact: list[Any] = [t.double().requires_grad_() for t in inputs]
    expected = dense(exact[0], exact[1], exact[2], exact[3] if with_sinks else None, head_dim**-0.5)
    (expected * weights.double()).sum().backward()
    on_gpu: list[Any] = [t.cuda().requires_grad_() for t in inputs]
    assert _has_kernel(on_gpu[0])
    q, k, v = (t.transpose(0, 1)[None] for t in on_gpu[:3])
    sinks = on_gpu[3] if with_sinks else None
    out, _ = _attention(torch.nn.Module(), q, k, v, None, s_aux=sinks, segments=F.pad(SEGMENTS, (0, 1)))
    (out[0] * weights.cuda()).sum().backward()
    pairs = [(out[0], expected), *((a.grad, b.grad) for a, b in zip(on_gpu, exact, strict=True))]
    for number, (got, reference) in enumerate(pairs):
        error = (got.detach().cpu().double() - reference.detach()).norm() / reference.norm()
        assert error < (2e-2 if dtype == torch.bfloat16 else 3e-3), (number, error)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32(family):
    """The loop: fp32 has no flash kernel. 1e-4 of the norm, as the GPU's products round in another order."""
    plain, shared = make_model(family, stock(family)), attach(make_model(family).cuda())
    expected = plain_rows(plain, make_groups())
    (row,) = pack(make_groups())
    got = completion_logprobs(shared, row.to("cuda"))
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
    reference = gradients(plain, expected)
    for name, gradient in gradients(shared, got).items():
        assert (gradient.cpu() - reference[name]).norm() <= 1e-4 * reference[name].norm().clamp(min=1e-30), name


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Gemma2", "GptOss", "Qwen3Next"])
def test_bf16(family):
    """As near to fp32 as the stock model in bf16 is, one plain row per completion, within a factor of two."""
    exact = plain_rows(make_model(family, stock(family)), make_groups()).detach()
    stock_model = make_model(family, stock(family), torch.bfloat16)
    shared = attach(copy.deepcopy(stock_model).cuda())
    rounding = (plain_rows(stock_model, make_groups()).detach().float() - exact).abs().mean()
    (row,) = pack(make_groups())
    got = completion_logprobs(shared, row.to("cuda"))
    assert (got.detach().cpu() - exact).abs().mean() <= 2 * rounding
    assert all(torch.isfinite(g).all() for g in gradients(shared, got).values())
