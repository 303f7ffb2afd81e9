"""Updates on their way to the servers, and the process groups that they travel over."""

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed import TCPStore

from vllm_client import Server, ServerLost, UpdateBroken
from weights.group import Meeting, WeightGroup, gpu_of, packed
from weights.publish import buckets


@dataclass
class Sender:
    """Sends a policy to servers, bucket by bucket.

    All servers of an update are in one group, which is kept while they and the connections to them
    stay the same.
    """

    device: torch.device  # that the weights come from
    gpus: Sequence[str | None]  # of all ranks of the trainer
    timeout_s: float  # for an update, until all servers have it, but for the time of an answer
    threads: Executor  # for requests to servers, and for what waits for them
    connections: Any = None  # by which the group's servers are this trainer's
    meeting: Any = None  # of the group
    dtype: Any = None  # that its servers take: the widest
    group: Any = None  # the Future of a WeightGroup

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
        ends_s = time.monotonic() + self.timeout_s + 1  # the group's own error comes first
        self._meet(servers)
        replies: dict[Server, Future[None]] = {}
        rank = 1
        for server in servers:
            meeting = replace(self.meeting, first_rank=rank)
            replies[server] = self.threads.submit(server.update, version, meeting)
            rank += len(server.about.gpus)

        errors: list[BaseException | None] = []
        # The last one is of what is on its way: members that meet, then each bucket.
        works = [*replies.values(), self.group]
        # It travels while the trainer gathers the next one; an empty one is the last.
        for bucket in chain(buckets(weights), [{}]):
            if any(errors):
                continue  # other ranks gather all
            wait(works, ends_s - time.monotonic(), FIRST_COMPLETED)
            errors = [work.exception() for work in works if work.done()]
            if not works[-1].done():
                errors.append(TimeoutError(f"{self.timeout_s:.0f} s of sync_timeout are over"))
            if not any(errors):
                message: Any = packed(bucket, self.device, self.dtype)
                works[-1] = self.threads.submit(self.group.result().send, *message)
        return self._end_update(replies, errors)

    def _end_update(
        self, replies: dict[Server, Future[None]], errors: list[BaseException | None]
    ) -> dict[Server, BaseException | None]:
        """Wait for all replies, and let servers give up an update that broke off.

        Returns why each server has it not, None where it has.
        """
        servers = list(replies)
        if any(errors):
            print("an update broke off:", next(filter(None, errors)))
            self.leave()  # or those that are well would wait for this member
            # One that has not ended by itself; its update may still be on the way to it.
            while wait(replies.values(), 1).not_done:
                list(self.threads.map(Server.give_up_update, servers))

        # Each answers, or its request ends by its time-out.
        failures = {server: reply.exception() for server, reply in replies.items()}
        if any(failures.values()):
            self.leave()
        if all(isinstance(failure, UpdateBroken) for failure in failures.values()):
            # Who is to blame, nobody knows. All but the first are lost, or a lone one: perhaps they
            # have no way to each other.
            for server in servers[1:] or servers:
                failures[server] = ServerLost(str(failures[server]))
        return failures

    def _meet(self, servers: list[Server]) -> None:
        """Begin to meet servers in a new group, unless all of them are in the last one."""
        connections = [server.connection for server in servers]
        if connections == self.connections:
            return
        self.leave()
        self.connections = connections
        # The one that all can reach, if some servers are here and some are not.
        addresses = [server.address for server in servers]
        host = min(addresses, key=lambda address: ip_address(address).is_loopback)
        limit = timedelta(seconds=self.timeout_s)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)

        dtypes = [getattr(torch, server.about.dtype) for server in servers]
        self.dtype = max(dtypes, key=attrgetter("itemsize"))
        gpus: list[str | None] = []
        for server in servers:
            gpus += server.about.gpus
        own = gpu_of(self.device)
        backend = "gloo"
        if own and gpus == [own]:
            backend = "ipc"
        elif own and {None, own, *self.gpus}.isdisjoint(gpus) and len(set(gpus)) == len(gpus):
            backend = "nccl"  # each has a GPU of its own
        secret = os.urandom(16).hex()
        self.meeting = Meeting(host, store.port, secret, backend, 1 + len(gpus), 1, self.timeout_s)
        names = ", ".join(server.url for server in servers)
        print(f"weights go to {names} over {backend}")
        self.group = self.threads.submit(WeightGroup, self.meeting, 0, self.device, store)

    def leave(self) -> None:
        """Leave the group: members that wait for this one get an error."""

        def close(group: Future[WeightGroup]) -> None:
            if not group.exception():
                group.result().close()

        if self.group:
            self.group.add_done_callback(close)
        self.group = None
        self.connections = None
