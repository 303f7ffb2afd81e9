"""Attention by FlashAttention 4, on a Hopper GPU: a recipe calls `use_flash_attention_4()` before its `config`.

In `prefix_attention.py` it takes the place of torch's FlashAttention 2, for heads of 64 or 128 numbers, with which it
has been tried (docs/results.md, "On a GPU"). The kernels come with vLLM for GPUs: there is nothing to install. They are
compiled when a kind of call comes first, which takes four to twelve seconds for forward and backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import prefix_attention


def use_flash_attention_4() -> None:
    """From now on, in this process. The first forward imports vLLM."""
    prefix_attention._flash, prefix_attention._flash_backward = forward, backward


def forward(q: Tensor, k: Tensor, v: Tensor, block: Any, scale: float) -> tuple[Tensor, ...]:
    """As `prefix_attention._flash`: output and log-sum-exp of a block's tokens."""
    options = options_of(q, block, scale)
    from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

    out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **options)
    return out, lse.T


def backward(tensors: Sequence[Tensor], block: Any, scale: float) -> tuple[Tensor, ...]:
    """As `prefix_attention._flash_backward`: the block's part of the gradients, by the merged out and log-sum-exp."""
    grad, q, k, v, out, lse = tensors
    from vllm.vllm_flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(q, k, v, out, grad, lse.T.contiguous(), **options_of(q, block, scale))


def options_of(q: Tensor, block: Any, scale: float) -> dict[str, Any]:
    """The block's cumulative lengths and longest pieces, of queries and of keys, by the kernels' names.

    Raises:
        ValueError: it has not been tried on this device, or with heads of this size.
    """
    is_hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    if not is_hopper or q.shape[-1] not in (64, 128):
        tried = "FlashAttention 4 is here for Hopper GPUs and heads of 64 or 128 numbers"
        raise ValueError(f"{tried}, not of {q.shape[-1]} on {q.device}: leave out use_flash_attention_4()")
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, block.lengths, strict=True)) | {"softmax_scale": scale, "causal": block.is_causal}
