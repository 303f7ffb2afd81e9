"""One way for the weights to many servers: each byte leaves the trainer once.

`TransferGroup` sends to the workers of one server. Where several servers take the same bytes, their
workers form a `SharedGroup` besides, and only if that breaks does each server get them by itself.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weights.transfer import TransferGroup, in_thread, make_group, within

CHUNK_BYTES = 2 << 20  # that the trainer scatters at a time, over gloo
PIECE_BYTES = 1 << 16  # at least, to a worker


class SharedGroup:
    """The trainer, rank 0, and the workers of several servers.

    nccl runs a broadcast as a ring. gloo sends one from rank 0 to every member, so there the
    trainer scatters a chunk in pieces, which the workers gather from each other while the next one
    comes.

    A member that fails breaks the group, for all members: they notice within a second.
    """

    def __init__(
        self, store: dist.TCPStore, rank: int, world_size: int, backend: str,
        device: torch.device, timeout_s: float,
    ):  # fmt: skip
        """Meet the other members.

        Raises:
            RuntimeError: they do not meet.
        """
        self._store = store
        self._rank = rank
        self._num_workers = world_size - 1
        self._backend = backend
        self._device = device
        self._timeout_s = timeout_s
        self._number = -1  # of the bucket under way
        self._arrived = -1  # the last one that every worker has
        self._last_sent: Callable[[], Tensor | None] = lambda: None  # on rank 0, a weak reference
        self._works: list[Any] = []
        self.is_broken = False
        self.members: list[TransferGroup] = []  # on rank 0: one for each server
        self._group: Any = None
        self._workers: Any = None
        piece_bytes = max(CHUNK_BYTES // self._num_workers, PIECE_BYTES)
        self._chunk_bytes = piece_bytes * self._num_workers

        try:
            self._meet(world_size)
        except BaseException:
            self.close()
            raise

    def _meet(self, world_size: int) -> None:
        """Connect to the other members, and send a byte through."""
        make = partial(make_group, self._backend, self._store, timeout_s=self._timeout_s / 2)
        self._group = make("all", self._rank, world_size)
        if self._rank == 0:
            self.send(torch.zeros(1, dtype=torch.uint8, device=self._device))
            while not self.has_arrived(0):
                time.sleep(1e-3)
        else:
            if self._backend == "gloo":
                self._workers = make("workers", self._rank - 1, world_size - 1)
            self.take(1)

    # -- the trainer -------------------------------------------------------------------------------

    def send(self, buffer: Tensor) -> int:
        """Start to send a buffer of bytes; returns its number.

        Each server's sending calls it: the first call sends to all. `has_arrived` tells failures.
        """
        if buffer is not self._last_sent():
            self._last_sent = weakref.ref(buffer)
            self._number += 1
            self._begun_s = time.monotonic()
            try:
                self._start(buffer)
            except RuntimeError:
                self.close()
        return self._number

    def _start(self, buffer: Tensor) -> None:
        group = self._living_group()
        if self._backend == "nccl":
            self._works = [group.broadcast([buffer], dist.BroadcastOptions())]
            return
        options = dist.ScatterOptions()
        options.rootRank = 0
        self._works = []
        for chunk in buffer.split(self._chunk_bytes):
            if len(chunk) < self._chunk_bytes:
                chunk = torch.cat([chunk, chunk.new_empty(self._chunk_bytes - len(chunk))])
            pieces = list(chunk.chunk(self._num_workers))
            unused = torch.empty_like(pieces[0])
            self._works.append(group.scatter([unused], [[unused, *pieces]], options))

    def has_arrived(self, number: int) -> bool:
        """True once every worker has the buffer of a number.

        Raises:
            RuntimeError: the group is broken, or half of the time-out is over: the other half is
                for servers that get it by themselves.
        """
        if number <= self._arrived:
            return True
        if self.is_broken or self._store.check(["broken"]):
            raise RuntimeError("the shared group is broken")
        for work in self._works:
            if work.is_completed():
                work.wait()  # raises what it failed with
        if self._store.add(f"taken/{number}", 0) == self._num_workers:
            self._arrived = number
            self._works = []
            return True
        if time.monotonic() > self._begun_s + self._timeout_s / 2:
            raise RuntimeError(f"nothing moved to some server for {self._timeout_s / 2:.0f} s")
        return False

    def sending(self, transfer: TransferGroup, buffer: Tensor) -> "SharedSending":
        """Send a buffer to all servers, of which `transfer`'s is one."""
        return SharedSending(transfer, self, buffer)

    # -- a worker ----------------------------------------------------------------------------------

    def take(self, size: int) -> Tensor:
        """Take the bytes that are sent, of which there are `size`.

        Raises:
            RuntimeError: the group is broken.
        """
        self._number += 1
        try:
            buffer = self._receive(size)
            # To a member that was stopped, a broadcast may seem over that nobody has finished.
            if within(5.0, partial(self._store.check, ["broken"])):
                raise RuntimeError("the shared group is broken")
        except BaseException:
            self.close()
            raise
        self._store.add(f"taken/{self._number}", 1)
        return buffer

    def _living_group(self) -> Any:
        group = self._group  # read once, as another thread may close it
        if not group:
            raise RuntimeError("the shared group is closed")
        return group

    def _receive(self, size: int) -> Tensor:
        group = self._living_group()
        workers = self._workers
        if self._backend == "nccl":
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._finish(group.broadcast([buffer], dist.BroadcastOptions()))
            return buffer

        num_chunks = -(-size // self._chunk_bytes)
        buffer = torch.empty(num_chunks * self._chunk_bytes, dtype=torch.uint8)
        chunks = buffer.split(self._chunk_bytes)
        pieces = [torch.empty_like(chunk.chunk(self._num_workers)[0]) for chunk in chunks]
        options = dist.ScatterOptions()
        options.rootRank = 0
        coming = [group.scatter([piece], [], options) for piece in pieces]
        gathers = []
        for work, piece, chunk in zip(coming, pieces, chunks, strict=True):
            self._finish(work)
            gathers.append(workers._allgather_base(chunk, piece))
        for work in gathers:
            self._finish(work)
        return buffer[:size]

    def _finish(self, work: Any) -> None:
        """Wait until the work is over."""
        asked_s = time.monotonic()
        while not work.is_completed():
            if time.monotonic() > asked_s + 0.5:
                asked_s = time.monotonic()
                if within(5.0, partial(self._store.check, ["broken"])):
                    raise RuntimeError("the shared group is broken")
            time.sleep(2e-4)
        work.wait()

    def close(self) -> None:
        """Break the group, in a second or two. May be called again."""
        if self.is_broken:
            return
        self.is_broken = True
        with suppress(RuntimeError):  # of a trainer that is dead
            within(1.0, partial(self._store.set, "broken", ""))
        with suppress(RuntimeError):
            within(1.0, self._end)

    def _end(self) -> None:
        group = self._group
        self._group = None
        self._workers = None
        if group and self._backend == "nccl":
            group.abort()


class SharedSending:
    """A bucket on its way to one server: with others', and by itself after that has failed.

    Has the methods of torch.distributed's works.
    """

    def __init__(self, transfer: TransferGroup, shared: SharedGroup, buffer: Tensor):
        self._transfer = transfer
        self._shared = shared
        self._buffer = buffer
        self._number = shared.send(buffer)
        self._own_work: Any = None

    def is_completed(self) -> bool:
        """True once the server's workers have it."""
        if self._own_work:
            return self._own_work.is_completed()
        try:
            return self._shared.has_arrived(self._number)
        except RuntimeError:
            self._shared.close()
            self._own_work = self._transfer.send_again(self._buffer, self._shared)
            return False

    def wait(self) -> None:
        """Raise the failure, if there is one."""
        if self._own_work:
            self._own_work.wait()


def share(transfers: Iterable[TransferGroup], one_is_lost: Callable[[], bool]) -> None:
    """Let servers that differ in nothing share what they are sent, from the next bucket on.

    Collective with their workers, which are invited to join; one that is lost is not waited for.
    """
    kinds: dict[Any, list[TransferGroup]] = {}
    for transfer in transfers:
        if transfer.backend != "ipc":
            kinds.setdefault(transfer.kind, []).append(transfer)
    for members in kinds.values():
        shared = members[0].shared
        is_formed = shared and shared.members == members and not shared.is_broken
        # Where they have no route to each other, each try would take half of the time-out.
        if not is_formed and members[0].apart_from != members:
            _form(members, one_is_lost)


def _form(members: list[TransferGroup], one_is_lost: Callable[[], bool]) -> None:
    """Try to make a group of servers; where they do not meet, each goes on by itself."""
    for member in members:
        member.leave_shared()
    if len(members) == 1:
        return
    started_s = time.monotonic()
    try:
        shared = _met(members, one_is_lost)
    except RuntimeError as error:
        members[0].apart_from = members
        for member in members:
            member.spent_s = time.monotonic() - started_s
        cause = str(error).partition("\n")[0]
        print(f"{len(members)} servers get their weights one by one: {cause}", flush=True)
        return
    if shared:
        shared.members = members
        for member in members:
            member.shared = shared
        print(f"{len(members)} servers share what they are sent", flush=True)


def _met(members: list[TransferGroup], one_is_lost: Callable[[], bool]) -> SharedGroup | None:
    """The group of servers that have met; None where one is lost meanwhile.

    Raises:
        RuntimeError: they do not meet in half of the time-out.
    """
    backend, device, _, host = members[0].kind
    timeout_s = members[0].timeout_s
    store = dist.TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    *first_ranks, world_size = accumulate((member.num_workers for member in members), initial=1)
    for member, first_rank in zip(members, first_ranks, strict=True):
        member.invite(store.port, first_rank, world_size)

    make = partial(SharedGroup, store, 0, world_size, backend, device, timeout_s)
    shared = None
    try:
        shared = meet(make, timeout_s, one_is_lost)
    finally:
        if not shared:
            for member in members:
                member.call_off(store.port)
    return shared


def meet(
    make: Callable[[], SharedGroup], timeout_s: float, is_off: Callable[[], bool]
) -> SharedGroup | None:
    """The group that `make` returns once all members have met; None where it is off meanwhile.

    A thread that still waits for them is left behind, and ends by its own time-out.

    Raises:
        RuntimeError: they do not meet in half of the time-out.
    """
    meeting = in_thread(make)
    ends_s = time.monotonic() + timeout_s / 2
    while not meeting.done():
        if is_off():
            return None
        if time.monotonic() > ends_s:
            raise RuntimeError(f"nothing came through in {timeout_s / 2:.0f} s")
        wait([meeting], 0.02)
    return meeting.result()
