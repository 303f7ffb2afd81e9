"""Shared prefixes on a GPU: the kernels of the cascade, and whole models, against the CPU."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_prefix_models import (
    FAMILIES,
    assert_equal_gradients,
    dense,
    gradients,
    make_agents,
    make_groups,
    make_model,
    plain_rows,
    shared_rows,
    stock,
)
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from prefix_attention import Tree, _Asked, _attention, _fits_kernels, _in_chunks, _logits, attach
from recipes import flash4

pytestmark = pytest.mark.gpu

# start, length, depth, whether all of the own is seen
SEGMENTS = [
    (0, 70, 0, 0), (70, 33, 70, 0), (103, 1, 70, 0), (104, 20, 51, 0), (124, 9, 71, 0),
    (133, 7, 74, 0), (140, 41, 0, 1), (181, 65, 41, 0), (246, 64, 71, 1), (310, 40, 135, 0),
    (350, 300, 0, 0), (650, 1, 300, 0),  # one query below many keys takes a kernel of its own
]  # fmt: skip


@pytest.mark.parametrize(("version", "head_dim"), [(2, 64), (2, 128), (2, 256), (4, 64), (4, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_cascade(dtype, version, head_dim, with_sinks, monkeypatch):
    """Relative to norms: a few roundings of 2⁻⁹ (bf16) or 2⁻¹² (fp16), whose gradients are small."""
    if version == 4:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("recipes/flash4.py is for Hopper GPUs")
        pytest.importorskip("cutlass", reason="comes with vLLM for GPUs")
        monkeypatch.setattr("prefix_attention._flash", flash4.forward)
        monkeypatch.setattr("prefix_attention._flash_backward", flash4.backward)
    torch.manual_seed(0)
    total = sum(SEGMENTS[-1][:2])
    inputs = [torch.randn(total, heads, head_dim).to(dtype) for heads in (4, 2, 2)]
    inputs += [torch.randn(4).to(dtype)] if with_sinks else []
    weights = torch.randn(total, 4, head_dim).to(dtype)
    exact: list[Any] = [t.double().requires_grad_() for t in inputs]
    q, k, v, *of_sinks = exact
    expected = dense(q, k, v, SEGMENTS, head_dim**-0.5, *of_sinks)
    (expected * weights.double()).sum().backward()
    on_gpu: list[Any] = [t.cuda().requires_grad_() for t in inputs]
    q, k, v = (t.transpose(0, 1)[None] for t in on_gpu[:3])
    assert _fits_kernels(q, v, Tree(SEGMENTS), {})
    sinks = on_gpu[3] if with_sinks else None
    out, _ = _attention(torch.nn.Module(), q, k, v, None, s_aux=sinks, tree=Tree(SEGMENTS))
    (out[0] * weights.cuda()).sum().backward()
    pairs = [(out[0], expected), *((a.grad, b.grad) for a, b in zip(on_gpu, exact, strict=True))]
    for number, (got, reference) in enumerate(pairs):
        error = (got.detach().cpu().double() - reference.detach()).norm() / reference.norm()
        assert error < (2e-2 if dtype == torch.bfloat16 else 3e-3), (number, error)


@pytest.mark.parametrize("make", [make_groups, make_agents])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32(family, make):
    """The loop, as fp32 has no flash kernel; 1e-4, as a GPU's products round in another order."""
    plain, shared = make_model(family, stock(family)), attach(make_model(family).cuda())
    expected = plain_rows(plain, make())
    got = shared_rows(shared, make())
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
    on_gpu = gradients(shared, got)
    of_shared = {name: gradient.cpu() for name, gradient in on_gpu.items()}
    assert_equal_gradients(of_shared, gradients(plain, expected), 1e-4)


@pytest.mark.parametrize("make", [make_groups, make_agents])
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Gemma2", "GptOss", "Qwen3Next"])
def test_bf16(family, make):
    """As near to fp32 as plain rows of the stock model in bf16 are, within a factor of two."""
    exact = plain_rows(make_model(family, stock(family)), make()).detach()
    stock_model = make_model(family, stock(family), torch.bfloat16)
    shared = attach(copy.deepcopy(stock_model).cuda())
    rounding = (plain_rows(stock_model, make()).detach().float() - exact).abs().mean()
    got = shared_rows(shared, make())
    assert (got.detach().cpu() - exact).abs().mean() <= 2 * rounding
    assert all(torch.isfinite(g).all() for g in gradients(shared, got).values())


@pytest.mark.parametrize("reads_entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head(dtype, cap, reads_entropy):
    """Compiled passes against fp64; 1e-2 of a norm is a few roundings of 2⁻⁹."""
    torch.manual_seed(0)
    x, weight = torch.randn(300, 64).to(dtype), (torch.randn(5000, 64) / 4).to(dtype)
    targets, grad, of_entropy = torch.randint(5000, (300,)), torch.randn(300), torch.randn(300)
    exact: list[Any] = [t.double().requires_grad_() for t in (x, weight)]
    logits = exact[0] @ exact[1].T * 0.7
    expected = (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)
    chosen = expected.gather(-1, targets[:, None])[:, 0]
    entropy = -(expected.exp() * expected).sum(-1)
    (chosen @ grad.double() + reads_entropy * (entropy @ of_entropy.double())).backward()
    ours: list[Any] = [t.cuda().requires_grad_() for t in (x, weight)]

    def capped(x):
        z = F.linear(x, ours[1]) * 0.7
        return z if cap is None else cap * torch.tanh(z / cap)

    body = torch.nn.Module()
    forward = lambda: SimpleNamespace(logits=capped(body.forward().last_hidden_state))
    base = SimpleNamespace(base_model=body, forward=forward)
    head = partial(_logits, base, forward, BaseModelOutputWithPast(last_hidden_state=None))
    targets = targets.cuda()
    logprobs, entropies = _in_chunks(head, ours[0], 5000, _Asked(targets, targets, 1.0, (), True))
    total = logprobs @ grad.cuda()
    if reads_entropy:
        total = total + entropies @ of_entropy.cuda()
    total.backward()
    few = 1e-2 if dtype == torch.bfloat16 else 1e-4
    # Sums are in fp32 for both.
    torch.testing.assert_close(logprobs.cpu().double(), chosen, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies.cpu().double(), entropy, rtol=1e-4, atol=1e-4)
    for got, reference in zip(ours, exact, strict=True):
        error = (got.grad.cpu().double() - reference.grad).norm() / reference.grad.norm()
        assert error < few, error
