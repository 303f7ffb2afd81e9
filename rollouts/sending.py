"""Updates on their way to the servers, and the process groups that they travel over."""

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed import TCPStore

from vllm_client import ANSWER_TIMEOUT_S, Server, ServerError, ServerLost, UpdateBroken
from weights.group import Meeting, WeightGroup, gpu_of, packed
from weights.publish import buckets


class Sender:
    """Sends a policy to servers, bucket by bucket, in `timeout_s` a policy.

    All servers of an update are in one group, which is kept while they and the connections to them
    stay the same.

    Args:
        device: that the weights come from.
        gpus: of all ranks of the trainer.
        timeout_s: for an update, until all servers have it, but for the time of an answer.
        threads: for requests to servers, and for what waits for them.
    """

    def __init__(
        self, device: torch.device, gpus: Sequence[str | None], timeout_s: float, threads: Executor
    ):
        self._device = device
        self._gpus = gpus
        self._timeout_s = timeout_s
        self._threads = threads
        self._connections: list[Any] = []  # by which the group's servers are this trainer's
        self._meeting: Any = None  # of the group
        self._group: Any = None  # the Future of a WeightGroup

    def send(
        self, weights: Iterable[tuple[str, Tensor]], servers: list[Server], version: int
    ) -> dict[Server, BaseException | None]:
        """Send a policy, and wait until servers sample from it; the weights are read to the end.

        After an error servers are told to give it up.

        Returns:
            None for each server that has it, else the reason: UpdateBroken for a server that is
            well, and takes the next one.
        """
        if not servers:
            for _ in weights:  # which other ranks gather, too
                pass
            return {}
        ends_s = time.monotonic() + self._timeout_s + 1  # the group's own error comes first
        self._meet(servers)
        replies: dict[Server, Future[None]] = {}
        rank = 1
        for server in servers:
            meeting = replace(self._meeting, first_rank=rank)
            replies[server] = self._threads.submit(server.update, version, meeting)
            rank += len(server.about.gpus)
        dtypes = [getattr(torch, server.about.dtype) for server in servers]
        dtypes.sort(key=attrgetter("itemsize"))

        error: BaseException | None = None
        sending = self._group  # what is on its way: members that meet, then each bucket
        # It travels while the trainer gathers the next one; an empty one is the last.
        for bucket in chain(buckets(weights), [{}]):
            error = error or self._error_of([*replies.values(), sending], ends_s)
            if not error:
                message: Any = packed(bucket, self._device, dtypes[-1])
                sending = self._threads.submit(self._group.result().send, *message)
        if not error:
            wait([*replies.values(), sending], ends_s + ANSWER_TIMEOUT_S - time.monotonic())
        return self._failures(replies, error)

    def _failures(
        self, replies: dict[Server, Future[None]], error: BaseException | None
    ) -> dict[Server, BaseException | None]:
        """Let servers give up an update that broke off; returns why each has it not."""

        def give_up(server: Server) -> None:
            ends_s = time.monotonic() + self._timeout_s  # of its own wait for what still comes
            while not replies[server].done() and time.monotonic() < ends_s:
                with suppress(ServerError):  # it is busy, or a worker hangs
                    server.give_up_update()
                wait([replies[server]], 1)  # or what it should give up is still on its way

        if error:
            print(f"an update broke off: {error}")
            self.leave()  # or those that are well would wait for this member
            list(self._threads.map(give_up, replies))

        failures: dict[Server, BaseException | None] = {}
        for server, reply in replies.items():
            late = ServerLost("it has not ended an update in time")
            failures[server] = reply.exception() if reply.done() else late
        if any(failures.values()):
            self.leave()
        if all(isinstance(failure, UpdateBroken) for failure in failures.values()):
            # Who is to blame, nobody knows. The first may go on without the others: perhaps they
            # have no way to each other.
            for server in list(replies)[1:] or replies:
                failures[server] = ServerLost(str(failures[server]))
        return failures

    def _meet(self, servers: list[Server]) -> None:
        """Begin to meet servers in a new group, unless all of them are in the last one."""
        connections = [server.connection for server in servers]
        if connections == self._connections:
            return
        self.leave()
        self._connections = connections
        # The one that all can reach, if some servers are here and some are not.
        addresses = [server.address for server in servers]
        host = min(addresses, key=lambda address: ip_address(address).is_loopback)
        limit = timedelta(seconds=self._timeout_s)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)

        gpus: list[str | None] = []
        for server in servers:
            gpus += server.about.gpus
        own = gpu_of(self._device)
        backend = "gloo"
        if own and gpus == [own]:
            backend = "ipc"
        elif own and {None, own, *self._gpus}.isdisjoint(gpus) and len(set(gpus)) == len(gpus):
            backend = "nccl"  # each has a GPU of its own
        secret = os.urandom(16).hex()
        self._meeting = Meeting(
            host, store.port, secret, backend, 1 + len(gpus), 1, self._timeout_s
        )
        names = ", ".join(server.url for server in servers)
        print(f"weights go to {names} over {backend}")
        self._group = self._threads.submit(WeightGroup, self._meeting, 0, self._device, store)

    def _error_of(self, works: list[Future[Any]], ends_s: float) -> BaseException | None:
        """Wait until the last work is over; returns the error by which the update breaks off."""
        wait(works, ends_s - time.monotonic(), FIRST_COMPLETED)
        for work in works:
            if work.done() and work.exception():
                return work.exception()
        if not works[-1].done():
            return TimeoutError(f"it took longer than sync_timeout, {self._timeout_s:.0f} s")
        return None

    def leave(self) -> None:
        """Leave the group: members that wait for this one get an error."""

        def close(group: Future[WeightGroup]) -> None:
            if not group.exception():
                group.result().close()

        if self._group:
            self._group.add_done_callback(close)
        self._group = None
        self._connections = []
