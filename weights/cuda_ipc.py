"""Weights by CUDA IPC, between a trainer and worker on one GPU.

The worker copies the weights out of the trainer's memory: NCCL below 2.30 takes no GPU twice, and
gloo goes through the memory of the host. `TransferGroup` imports this file only where both are on
one GPU.
"""

import json
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore


def share_memory(store: TCPStore, rank: int, device: torch.device) -> "SharedMemory | None":
    """Try to share the trainer's memory with the worker.

    The trainer is rank 0, the worker rank 1. None, on both sides, where the worker cannot open the
    memory: drivers and containers may forbid it.
    """
    trial = torch.arange(64, dtype=torch.uint8, device=device)
    if rank == 0:
        handle = ""
        with suppress(RuntimeError):  # of CUDA
            handle = _handle(trial)
        store.set("trial", handle)
    else:
        is_opened = False
        with suppress(RuntimeError):
            given = store.get("trial")
            if given:
                opened = torch.empty_like(trial)
                _copy(given, opened, device)
                is_opened = torch.equal(opened, trial)
        store.set("is_opened", json.dumps(is_opened))

    if json.loads(store.get("is_opened")):
        return SharedMemory(store, rank, device)
    return None


class SharedMemory:
    """Replaces the process group of a trainer and worker on one GPU."""

    def __init__(self, store: TCPStore, rank: int, device: torch.device):
        self._store = store
        self._rank = rank
        self._device = device
        self._number = 0  # of the next broadcast

    def broadcast(self, tensors: list[Tensor], _: Any) -> SimpleNamespace:
        """Start to copy rank 0's tensor of bytes into the worker's."""
        buffer = tensors[0]
        lent = f"lent/{self._number}"
        copied = f"copied/{self._number}"
        self._number += 1
        if self._rank > 0:
            return SimpleNamespace(
                is_completed=partial(self._store.check, [lent]),
                wait=partial(self._copy_lent, lent, copied, buffer),
            )

        # CUDA wraps the storage that it shares: this may be the model's memory, so share a copy.
        buffer = buffer.clone()
        self._store.set(lent, _handle(buffer))
        return SimpleNamespace(
            is_completed=partial(self._store.check, [copied]),
            wait=partial(self._store.delete_key, copied),
            buffer=buffer,  # which lives until the worker has copied it
        )

    def _copy_lent(self, lent: str, copied: str, buffer: Tensor) -> None:
        _copy(self._store.get(lent), buffer, self._device)
        self._store.delete_key(lent)
        self._store.set(copied, "")


def _handle(buffer: Tensor) -> str:
    """A JSON handle of a GPU tensor of bytes, for other processes."""
    torch.cuda.current_stream(buffer.device).synchronize()  # its bytes are there
    fields = buffer.untyped_storage()._share_cuda_()[1:-1]
    # False: there is nothing to wait for, and no event to leak.
    numbers_and_bytes = [buffer.storage_offset(), len(buffer), *fields, False]
    return json.dumps(numbers_and_bytes, default=bytes.hex)


def _copy(handle: str | bytes, buffer: Tensor, device: torch.device) -> None:
    """Fill a buffer with the tensor of another process on this GPU.

    `handle` is made there, by `_handle`.
    """
    given = json.loads(handle)
    fields = [bytes.fromhex(field) if isinstance(field, str) else field for field in given]
    start, length = fields[:2]
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields[2:])
    shared = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    buffer.copy_(shared[start : start + length])
    torch.cuda.current_stream(device).synchronize()
