"""Weights by CUDA IPC, between a trainer and a worker on one GPU.

The worker copies them out of the trainer's memory: NCCL below 2.30 takes no GPU twice, and gloo
goes through the memory of the host.
"""

import json
from contextlib import suppress

import torch
from torch import Tensor

TRIAL = torch.arange(64, dtype=torch.uint8)


def trial_of(device: torch.device) -> tuple[Tensor, str]:
    """A tensor for a worker to open, and its handle: empty on CPUs, and where CUDA forbids it."""
    trial = TRIAL.to(device)
    handle = ""
    if device.type == "cuda":
        with suppress(RuntimeError):  # of CUDA
            handle = handle_of(trial)
    return trial, handle


def can_open(handle: str, device: torch.device) -> bool:
    """Try to open a trainer's trial: drivers and containers may forbid it."""
    if not handle or device.type != "cuda":
        return False
    with suppress(RuntimeError):
        return torch.equal(copied(handle, len(TRIAL), device).cpu(), TRIAL)
    return False


def handle_of(buffer: Tensor) -> str:
    """A JSON handle of a GPU tensor of bytes, for other processes."""
    torch.cuda.current_stream(buffer.device).synchronize()  # its bytes are there
    fields = buffer.untyped_storage()._share_cuda_()[1:-1]
    # False: there is nothing to wait for, and no event to leak.
    numbers_and_bytes = [buffer.storage_offset(), len(buffer), *fields, False]
    return json.dumps(numbers_and_bytes, default=bytes.hex)


def copied(handle: str, size: int, device: torch.device) -> Tensor:
    """A copy of the tensor of `size` bytes of another process on this GPU.

    `handle` is made there, by `handle_of`.
    """
    start, _, *given = json.loads(handle)
    fields = [bytes.fromhex(field) if isinstance(field, str) else field for field in given]
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)
    shared = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    buffer = shared[start : start + size].clone()
    torch.cuda.current_stream(device).synchronize()
    return buffer
