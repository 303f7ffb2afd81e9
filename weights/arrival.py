"""Weights on the wire: the side of a server's worker."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weights.shared import SharedGroup, meet
from weights.transfer import TransferGroup, within


class WorkerGroup(TransferGroup):
    """A `TransferGroup`, as a worker of the server sees it."""

    def __init__(
        self, store: dist.TCPStore, *args: Any,
        environment: Callable[[], AbstractContextManager[Any]] = nullcontext, **kwargs: Any,
    ):  # fmt: skip
        """Meet the other members, and those of shared groups later, within `environment`."""
        self._environment = environment
        self._inbox: Any = store  # by which it waits for messages
        with environment():
            super().__init__(store, *args, **kwargs)

    def receive(self, is_first: bool = False) -> dict[str, Tensor]:
        """Take rank 0's next bucket, in fresh memory on the group's device.

        The bucket is empty at the end of the stream. The first may be long in coming.
        """
        buffer = None
        while buffer is None:
            message = self._next_message(is_first)
            is_first = False
            if "join" in message:
                self._join(*message["join"])
                continue
            size, entries, number, is_shared = message
            buffer = self._take(size, is_shared)
            # To a worker that was stopped, a broadcast may seem over that nobody has finished.
            if not self.trainer_lives():
                raise RuntimeError("the trainer has left")
            if number == self._bucket_number:  # sent again, as others have not got it
                buffer = None

        self._bucket_number = number
        bucket = {}
        for name, dtype, shape, start, end in entries:
            bucket[name] = buffer[start:end].view(getattr(torch, dtype)).view(shape)
        return bucket

    def _next_message(self, is_first: bool) -> Any:
        """What the trainer has posted next for this worker."""
        key = f"message/{self._rank}/{self._number}"
        if is_first:
            self._wait_for(key)
        # The trainer may be waiting its own time-out for another server.
        limit_s = 2 * self.timeout_s + 10
        # The store's own limit ends the thread that `within` leaves behind.
        within(limit_s, partial(self._inbox.wait, [key], timedelta(seconds=limit_s + 60)))
        message = within(limit_s, partial(self._take_message, key))
        if not message:
            raise RuntimeError("the trainer has left")
        self._number += 1
        return json.loads(message)

    def _take_message(self, key: str) -> bytes:
        """Read and delete a message; torch waits without a limit if the trainer is stopped now."""
        message: bytes = self._store.get(key)
        self._store.delete_key(key)
        return message

    def _join(self, port: int, rank: int, world_size: int) -> None:
        """Join a shared group; one that does not meet is done without."""
        self.leave_shared()
        limit = timedelta(seconds=self.timeout_s)
        with suppress(RuntimeError), self._environment():
            store = dist.TCPStore(self._store.host, port, is_master=False, timeout=limit)
            make = partial(
                SharedGroup, store, rank, world_size, self.backend, self.device, self.timeout_s
            )
            self.shared = meet(make, self.timeout_s, partial(self._is_off, port))

    def _is_off(self, port: int) -> bool:
        """True once the trainer has called off a meeting."""
        found: bool = within(5.0, partial(self._store.check, [f"off/{port}"]))
        return found

    def _take(self, size: int, is_shared: bool) -> Tensor | None:
        """A bucket's bytes; None where a shared group fails: the trainer sends them again."""
        if is_shared:
            with suppress(RuntimeError):
                if self.shared:
                    taken: Tensor = self.shared.take(size)
                    return taken
            self.shared = None
            return None
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        if size:
            self._begun_s = time.monotonic()
            self.finish(self._broadcast(buffer))
        return buffer

    def _wait_for(self, key: str) -> None:
        """Wait without a limit until the trainer sets a key, or is gone."""
        # A store does one thing at a time: one that waits would keep questions waiting.
        if self._inbox is self._store:
            self._inbox = self._inbox.clone()  # type: ignore[attr-defined]  # of torch's stubs
        while self._group and self.trainer_lives():
            with suppress(dist.DistStoreError):  # a minute is over
                self._inbox.wait([key], timedelta(minutes=1))
                return
        raise RuntimeError("the trainer has left")
