"""Updates on their way to the servers, and the process groups that they travel over."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed import TCPStore

from vllm_client import ANSWER_TIMEOUT_S, Server, ServerError, ServerLost, UpdateBroken
from weights.group import Meeting, WeightGroup, gpu_of, packed

POLL_S = 2e-4  # between looks at what servers do


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
        self._meetings: dict[Server, Meeting] = {}
        self._group: Any = None  # the Future of a WeightGroup

    def begin(self, servers: list[Server], version: int) -> None:
        """Let servers take an update, up to an empty bucket."""
        self._error: BaseException | None = None
        self._is_whole = False  # the trainer has no more of it
        self._ends_s = time.monotonic() + self._timeout_s + 1  # the group's own error comes first
        connections = [server.connection for server in servers]
        if servers and connections != self._connections:
            self.leave()
            self._group = self._threads.submit(self._invite(servers))
            self._connections = connections
        self._sending = self._group  # what is on its way: members that meet, then each bucket
        self._replies: dict[Server, Future[None]] = {}
        for server in servers:
            self._replies[server] = self._threads.submit(
                server.update, version, self._meetings[server]
            )

    def _invite(self, servers: list[Server]) -> Callable[[], WeightGroup]:
        """Make a place for a group, and note it for each of the servers; returns how to meet."""
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
        meeting = Meeting(host, store.port, secret, backend, 1 + len(gpus), 1, self._timeout_s)
        rank = 1
        for server in servers:
            self._meetings[server] = replace(meeting, first_rank=rank)
            rank += len(server.about.gpus)
        names = ", ".join(server.url for server in servers)
        print(f"weights go to {names} over {backend}")
        return partial(WeightGroup, meeting, 0, self._device, store)

    def send(self, tensors: dict[str, Tensor]) -> None:
        """Send named tensors, while the caller gathers the next; none end the update.

        Each call waits until those of the last one have gone off. After an error it does nothing.
        """
        self._wait()
        self._is_whole = not tensors
        if self._error or not self._replies:
            return
        dtypes = [getattr(torch, server.about.dtype) for server in self._replies]
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        entries, buffer = packed(tensors, self._device, widest)
        self._sending = self._threads.submit(self._group.result().send, entries, buffer)

    def _wait(self) -> None:
        """Wait for what is on its way; note the error by which the update breaks off, if any."""
        while self._replies and not self._error:
            for work in (*self._replies.values(), self._sending):
                if work.done():
                    self._error = self._error or work.exception()
            if self._sending.done():
                return
            if time.monotonic() > self._ends_s:
                late = TimeoutError(f"it took longer than sync_timeout, {self._timeout_s:.0f} s")
                self._error = self._error or late
            time.sleep(POLL_S)

    def end(self) -> dict[Server, BaseException | None]:
        """Wait until servers sample from the update; one that is not whole is given up.

        Returns:
            None for each server that has it, else the reason: UpdateBroken for a server that is
            well, and takes the next one.
        """
        self._wait()
        if not self._is_whole:
            self._error = self._error or RuntimeError("the trainer has no more of it")
        if self._error:
            print(f"an update broke off: {self._error}")
            self.leave()  # or those that are well would wait for this member
        servers = list(self._replies)
        found = list(self._threads.map(self._failure_of, servers))
        failures = dict(zip(servers, found, strict=True))
        if any(found):
            self.leave()
        if all(isinstance(failure, UpdateBroken) for failure in found):
            # Who is to blame, nobody knows. The first may go on without the others: perhaps they
            # have no way to each other.
            for server in servers[1:] or servers:
                failures[server] = ServerLost(str(failures[server]))
        return failures

    def _failure_of(self, server: Server) -> BaseException | None:
        """Wait until a server has the update, or, where that broke off, has given it up.

        Returns:
            Why it has not the update.
        """
        reply = self._replies[server]
        try:
            if not self._error:
                return reply.exception(self._ends_s + ANSWER_TIMEOUT_S - time.monotonic())
            while not reply.done():
                server.give_up_update()
                wait([reply], 1)  # or what it should give up is still on its way
        except TimeoutError:
            return ServerLost("it took longer than sync_timeout to load the last weights")
        except ServerError as lost:
            return lost
        if isinstance(reply.exception(), UpdateBroken):
            return UpdateBroken(f"an update broke off: {self._error}")
        return reply.exception()

    def leave(self) -> None:
        """Leave the group: members that wait for this one get an error."""

        def close(group: Future[WeightGroup]) -> None:
            if not group.exception():
                group.result().close()

        if self._group:
            self._group.add_done_callback(close)
        self._group = None
        self._connections = []
