"""Attention by FlashAttention 4, on a Hopper GPU.

A recipe calls `use_flash_attention_4()` before its `config`. In `prefix_attention.py` it takes the
place of torch's FlashAttention 2. It has been tried with heads of 64 and of 128 numbers, two to six
of queries for each of keys (docs/results.md, "On a GPU"), and ends a run of others. The kernels
come with vLLM for GPUs: there is nothing to install. They are compiled when a kind of call comes
first, in four to twelve seconds. The first forward imports vLLM, which sets options of
torch.compile in this process, too.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import prefix_attention

flash_2 = prefix_attention._flash
flash_2_backward = prefix_attention._flash_backward


def use_flash_attention_4() -> None:
    """Take the kernels of FlashAttention 4 in this process from now on.

    SystemExit in the first forward where it does not fit or vLLM lacks it.
    """
    prefix_attention._flash = forward
    prefix_attention._flash_backward = backward


def forward(q: Tensor, k: Tensor, v: Tensor, block: Any, scale: float | None) -> tuple[Tensor, ...]:
    """The output and log-sum-exp of a block's tokens, as `prefix_attention._flash`."""
    if has_many_pieces(block):
        return flash_2(q, k, v, block, scale)
    results = kernels(q, k)._flash_attn_fwd(q, k, v, return_lse=True, **options(block, scale))
    return results[0], results[1].T


def backward(tensors: Sequence[Tensor], block: Any, scale: float | None) -> tuple[Tensor, ...]:
    """The block's part of the gradients, as `prefix_attention._flash_backward`.

    By the output and the log-sum-exp of all blocks, merged.
    """
    if has_many_pieces(block):
        return flash_2_backward(tensors, block, scale)
    grad, q, k, v, out, lse = tensors
    named = options(block, scale)
    return kernels(q, k)._flash_attn_bwd(q, k, v, out, grad, lse.T.contiguous(), **named)


def has_many_pieces(block: Any) -> bool:
    """True above 256 pieces, for which FlashAttention 4 would compile other kernels.

    These have not been tried: such blocks stay with FlashAttention 2.
    """
    return len(block.lengths[0]) - 1 > 256


def kernels(q: Tensor, k: Tensor) -> Any:
    """vLLM's module; exits where an error would only turn `share_prefix` off."""
    is_hopper = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    _, num_heads, size = q.shape
    _, num_kv_heads, _ = k.shape
    if not is_hopper or size not in (64, 128) or num_heads == num_kv_heads:
        heads = f"{num_heads} and {num_kv_heads} heads of {size} numbers on {q.device}"
        sys.exit(
            f"FlashAttention 4 has not been tried with {heads}: leave out use_flash_attention_4()"
        )
    try:
        from vllm.vllm_flash_attn.cute import interface
    except ImportError as error:
        sys.exit(
            f"FlashAttention 4 comes with vLLM for GPUs: {error}; leave out use_flash_attention_4()"
        )
    return interface


def options(block: Any, scale: float | None) -> dict[str, Any]:
    """The block's cumulative lengths and longest pieces, by the kernels' names."""
    q_starts, k_starts, longest_q, longest_k = block.lengths
    return {
        "cu_seqlens_q": q_starts,
        "cu_seqlens_k": k_starts,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "softmax_scale": scale,
        "causal": block.is_causal,
    }
