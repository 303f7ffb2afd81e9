"""Weights by CUDA IPC, between a trainer and a worker on one GPU.

The worker copies them out of the trainer's memory: NCCL below 2.30 takes no GPU twice, and gloo
goes through the memory of the host.
"""

import json

import torch
from torch import Tensor


def handle_of(buffer: Tensor) -> str:
    """A JSON handle of a GPU tensor of bytes, for other processes; "" where CUDA forbids it."""
    torch.cuda.current_stream(buffer.device).synchronize()  # its bytes are there
    try:
        fields = buffer.untyped_storage()._share_cuda_()[1:-1]
    except RuntimeError:
        return ""
    # False: there is nothing to wait for, and no event to leak.
    numbers_and_bytes = [buffer.storage_offset(), *fields, False]
    return json.dumps(numbers_and_bytes, default=bytes.hex)


def copied(handle: str, size: int, device: torch.device) -> Tensor | None:
    """A copy of the tensor of `size` bytes of another process on this GPU.

    `handle` is made there, by `handle_of`. None where a driver or container forbids to open it.
    """
    start, *given = json.loads(handle)
    fields = [bytes.fromhex(field) if isinstance(field, str) else field for field in given]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)
    except RuntimeError:
        return None
    shared = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    buffer = shared[start : start + size].clone()
    torch.cuda.current_stream(device).synchronize()
    return buffer
