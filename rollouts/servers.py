"""The rollout servers of a run: leases, losses, returns, and new weights."""

import math
import os
import re
import resource
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from ipaddress import ip_address
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch.distributed import TCPStore

from config import TrainConfig, UserError, lora_options
from server.messages import SleepRequest
from utils import naming
from vllm_client import Server, ServerError, ServerLost, State, UpdateBroken
from weights.group import Meeting, WeightGroup, gpu_of, packed
from weights.publish import buckets

ADDRESS = r"https?://([\w.-]+|\[[\w:]+\])(:\d+)?/?$"
PROBE_S = 1.0  # between questions to a lost server; before the first it doubles with each loss


def server_urls(config: TrainConfig) -> list[str]:
    """The addresses that `vllm_urls` names now, each once.

    `@file` stands for the addresses in a file.

    Raises:
        UserError: there is none, and no part that needs none; or something else.
    """
    with naming(f"vllm_urls={','.join(config.vllm_urls)}"):
        urls: list[str] = []
        for word in config.vllm_urls:
            is_file = word.startswith("@")
            urls += Path(word[1:]).expanduser().read_text().split() if is_file else [word]
        wrong = [url for url in urls if not re.match(ADDRESS, url)]
        if wrong or (not urls and (config.vllm_urls or not config.parts)):
            found = wrong or "none"
            raise ValueError(f"give http://host:port, or @file with one a line, not {found}")
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


class ServerPool:
    """The rollout servers of a run, thread-safe.

    `tokenizer` and `forbidden` are passed on to the servers, which `kind` makes, and which take
    texts of `rope_limit` tokens at most. The limit on open files is raised, for the whole process.
    """

    def __init__(
        self, config: TrainConfig, tokenizer: Any = None, forbidden: Sequence[int] = (),
        kind: Any = Server, rope_limit: float = math.inf,
    ):  # fmt: skip
        self.config = config
        self._make_server = partial(
            kind, timeout_s=config.request_timeout, tokenizer=tokenizer, forbidden=forbidden
        )
        # The watcher replaces the list, and never changes it.
        self.servers = [self._make_server(url) for url in server_urls(config)]
        self.sends_adapter = False  # in place of whole weights
        self.sleeps = False  # until the next update: no server is taken back, which would wake it
        self._longest = config.max_tokens_per_gpu  # tokens of a sequence that all take
        self._rope_limit = rope_limit

        # Every request has a connection, which is a file.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._control = ThreadPoolExecutor(1024, thread_name_prefix="control")  # never for rollouts
        self._slots = threading.Condition()  # guards what the servers do, and tells of a free one
        self._limit = config.max_concurrent_requests  # groups on a server; 0 after `drain`
        self._is_closed = threading.Event()

        self._updating = threading.Lock()
        self._connections: Any = None  # to the servers of the group that weights travel over
        self._meetings: dict[Server, Meeting] = {}  # of each server, in that group
        self._dtype: Any = None  # that its servers take: the widest
        self._group: Any = None  # the Future of a WeightGroup
        self._idle_s = 0.0  # of a mean server, without groups in flight
        self._counted_s = time.monotonic()  # until when it is counted
        self._say_once = cache(print)  # what is tried again and again

    @property
    def serving(self) -> list[Server]:
        """Servers with the current weights."""
        return [server for server in self.servers if server.state is State.SERVING]

    @property
    def waiting(self) -> list[Server]:
        """Connected servers that wait for the current weights."""
        return [server for server in self.servers if server.state is State.WAITING]

    # -- the start ---------------------------------------------------------------------------------

    def wait_until_ready(self, sampling: dict[str, Any] | None = None) -> int:
        """Wait for all servers; returns the longest sequence they take, in tokens.

        Raises:
            ServerError: one does not answer in time, refuses the parameters of `sampling`, or
                cannot be used.
        """
        deadline_s = time.monotonic() + self.config.server_timeout
        for server in self.servers:
            missing = (
                f"no rollout server at {server.url}: start one with `python vllm_server.py --model "
                f"{self.config.model_id}`, or set vllm_urls"
            )
            while not server.about:
                try:
                    server.ask(sampling=sampling)
                except ServerLost as error:
                    if time.monotonic() > deadline_s:
                        raise ServerError(f"{missing} ({error})") from error
                    self._say_once(f"waiting, as there is {missing}")
                    time.sleep(1)
        lengths = [server.about.max_model_len for server in self.servers]
        self._longest = min(lengths, default=self._longest)
        self.sends_adapter = any(server.about.lora_rank for server in self.servers[:1])
        for server in self.servers:
            self._check(server)
        return self._longest

    def connect(self, device: torch.device, gpus: Sequence[str | None] = ()) -> None:
        """Connect all servers, or raise the ServerError of one that refuses.

        Args:
            device: that the weights are sent from.
            gpus: of all ranks: a server may share one of them.
        """
        self._device = device
        self._gpus = gpus
        list(self._control.map(lambda server: server.connect(), self.servers))
        threading.Thread(target=self._watch, daemon=True).start()

    def _check(self, server: Server) -> None:
        """Refuse a server of another kind than the run needs, by a ServerError with a cure."""
        about = server.about
        config = self.config
        ours = Path(config.model_id).resolve()  # which may be a relative path
        served = [Path(name).resolve() for name in about.names]
        takes_adapter = about.lora_rank > 0
        options = " ".join(lora_options(config.lora_rank))
        fault = ""
        if ours not in served:
            fault = f"serves {about.names[0]}: restart it with --model {config.model_id}"
        elif about.max_model_len < self._longest:
            fault = f"takes fewer tokens than others: give it --max-model-len {self._longest}"
        elif about.max_model_len > self._rope_limit:
            fault = (
                "takes long texts, and so all by other rope factors than the trainer: "
                f"give it --max-model-len {self._rope_limit}"
            )
        elif config.base_4bit and ours == served[0]:
            fault = "serves the model itself, and not what scripts/dequantize.py makes of it"
        elif config.base_4bit and not takes_adapter:
            fault = f"takes whole weights, and base_4bit has none: give it {options}"
        elif takes_adapter != self.sends_adapter:
            fault = "differs from others in --enable-lora: give it to all, or to none"
        elif takes_adapter and not config.use_peft:
            fault = "takes adapters alone: start it without --enable-lora, or set use_peft"
        elif 0 < about.lora_rank < config.lora_rank:
            fault = f"takes adapters of rank {about.lora_rank} at most: give it {options}"
        elif about.can_sleep and config.max_staleness > 0:
            fault = "sleeps while this trains: set max_staleness=0, or no --enable-sleep-mode"
        if fault:
            raise ServerError(f"{server.url} {fault}")

    # -- leases ------------------------------------------------------------------------------------

    @contextmanager
    def lease(self) -> Iterator[Server]:
        """The server with the fewest groups in flight, once it has room, for one group.

        All turns of the group go to this server, which caches them.

        Raises:
            ServerError: the run has ended, or no server came back in time.
        """
        with self._slots:
            ends_s = time.monotonic() + self.config.server_timeout
            while True:
                if self._is_closed.is_set():  # no server is left out any more
                    raise ServerError("the run has ended")
                server = min(self.serving, key=lambda server: server.in_flight, default=None)
                if server and server.in_flight < self._limit:
                    break
                if not self.servers:
                    raise ServerError("vllm_urls names no server, and a group asks for one")
                if server:
                    ends_s = time.monotonic() + self.config.server_timeout
                elif not self.waiting and time.monotonic() > ends_s:
                    why = "; ".join(server.why_out for server in self.servers)
                    raise ServerError(
                        f"no rollout server is left: {why}; "
                        "start one, and go on with --resume_from_checkpoint auto"
                    )
                self._slots.wait(1)
            self.idle_seconds()  # counts up to here
            server.in_flight += 1
        try:
            yield server
        finally:
            with self._slots:
                self.idle_seconds()
                server.in_flight -= 1
                self._slots.notify()

    def drain(self, stop: threading.Event) -> None:
        """Wait until no group is in flight, or for `stop`; others begin after the next update."""
        with self._slots:
            self._limit = 0
        while any(server.in_flight for server in self.servers) and not stop.wait(0.005):
            pass

    def idle_seconds(self) -> float:
        """A server's mean seconds without groups in flight, which this counts up to now."""
        with self._slots:
            now_s = time.monotonic()
            num_idle = sum(server.in_flight == 0 for server in self.servers)
            self._idle_s += (now_s - self._counted_s) * num_idle / max(len(self.servers), 1)
            self._counted_s = now_s
            return self._idle_s

    # -- lost and returned servers -----------------------------------------------------------------

    def lose(self, server: Server, error: object) -> None:
        """Leave out a server, until it answers again and has the current weights."""
        with self._slots:
            if server.state is State.LOST or self._is_closed.is_set():
                return
            print(f"{server.url} is left out for now: {error}")
            server.state = State.LOST
            server.why_out = str(error)
            server.num_losses += 1
            if not self.serving and not self.waiting:
                timeout_s = self.config.server_timeout
                print(f"no rollout server is left: waiting {timeout_s:.0f} s for one")
            threading.Thread(target=self._take_back, args=[server], daemon=True).start()

    def admit(self, server: Server) -> None:
        """Let a server serve: with the current weights it computes what the trainer does."""
        with self._slots:
            server.state = State.SERVING
            self._slots.notify_all()
        if server.num_losses:
            print(f"{server.url} is back")

    def _watch(self) -> None:
        """Read files of addresses until the run ends: listed servers come, and others leave."""
        while not self._is_closed.wait(PROBE_S):
            if self.waiting and not self._meetings:  # the servers of the start come first
                continue
            known = {server.url: server for server in self.servers}
            try:
                urls = server_urls(self.config)
            except UserError as error:
                self._say_once(f"the servers stay as they are: {error}")
                continue

            with self._updating:  # which needs all that it began with
                self.servers = [known.get(url) or self._make_server(url) for url in urls]
                for url in known.keys() - urls:  # they finish what they have in flight
                    self.lose(known[url], "the list does not name it any more")
                    known[url].disconnect()
            for server in self.servers:
                if server.url not in known:
                    threading.Thread(target=self._take_back, args=[server], daemon=True).start()

    def _take_back(self, server: Server) -> None:
        """Connect a lost or a new server, once it answers; others do its work until then."""
        # One that comes and goes should cost little.
        wait_s = PROBE_S / 2 * 2 ** min(server.num_losses, 6)
        while not self._is_closed.wait(wait_s) and server in self.servers:
            wait_s = PROBE_S
            if self.sleeps or self._updating.locked():  # in whose middle it may have been lost
                continue
            try:
                server.ask()
                self._check(server)
                server.connect()
                if self._is_closed.is_set() or server not in self.servers:  # meanwhile
                    server.disconnect()
                return
            except Exception as error:  # any, or nobody would be told
                if not isinstance(error, ServerLost):  # it is there
                    server.why_out = str(error)
                    self._say_once(f"{server.url} answers again, but stays left out: {error}")

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, only_waiting: bool = False
    ) -> list[Server]:
        """Publish a policy as `version`, bucket by bucket; servers sample from it then.

        Where it breaks off, servers that are well wait for the next update.

        Args:
            weights: (checkpoint name, tensor in its checkpoint's shape), consumed to the end.
            version: of the policy.
            only_waiting: leave out the servers that serve already.

        Returns:
            The servers that were `WAITING` and have it now: they serve once passed to `admit`.
        """
        with self._updating:
            self.sleeps = False
            waiting = self.waiting
            servers = waiting if only_waiting else self.serving + waiting
            # The group's own error comes first.
            ends_s = time.monotonic() + self.config.sync_timeout + 1
            self._meet(servers)
            replies = {}
            for server in servers:
                update = partial(server.update, version, self._meetings[server])
                replies[server] = self._control.submit(update)

            sending = self._group  # what is on its way: members that meet, then each bucket
            errors: list[BaseException | None] = []
            # One travels while the trainer gathers the next; an empty one is the last.
            for bucket in chain(buckets(weights), [{}]):
                if any(errors) or not servers:
                    continue  # other ranks gather all
                ended = wait(
                    [sending, *replies.values()], ends_s - time.monotonic(), FIRST_COMPLETED
                ).done
                errors = list(map(Future.exception, ended))
                if not ended:
                    errors = [TimeoutError("sync_timeout is over")]
                if not any(errors):
                    message: Any = packed(bucket, self._device, self._dtype)
                    sending = self._control.submit(self._group.result().send, *message)
            self._end_update(replies, errors, version)
        with self._slots:  # after `drain`
            self._limit = self.config.max_concurrent_requests
            self._slots.notify_all()
        return [server for server in waiting if server.version == version]

    def _meet(self, servers: list[Server]) -> None:
        """Begin to meet servers in a new group, unless all of them are in the last one."""
        connections = [server.connection for server in servers]
        if not servers or connections == self._connections:
            return
        self._leave_group()
        self._connections = connections
        # The address that all can reach, if some servers are here and some are not.
        addresses = [ip_address(server.address) for server in servers]
        host = str(min(addresses, key=attrgetter("is_loopback")))
        timeout_s = self.config.sync_timeout
        limit = timedelta(seconds=timeout_s)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)

        self._dtype = max(
            (getattr(torch, server.about.dtype) for server in servers), key=attrgetter("itemsize")
        )
        gpus: list[str | None] = []
        for server in servers:
            gpus += server.about.gpus
        own = gpu_of(self._device)
        backend = "gloo"
        if own and gpus == [own]:
            backend = "ipc"
        elif own and {None, own, *self._gpus}.isdisjoint(gpus) and len(set(gpus)) == len(gpus):
            backend = "nccl"  # each has a GPU of its own
        print(f"weights go to {', '.join(server.url for server in servers)} over {backend}")
        secret = os.urandom(16).hex()
        meeting = Meeting(host, store.port, secret, backend, 1 + len(gpus), 1, timeout_s)
        self._group = self._control.submit(WeightGroup, meeting, 0, self._device, store)
        for server in servers:
            self._meetings[server] = meeting
            meeting = replace(meeting, first_rank=meeting.first_rank + len(server.about.gpus))

    def _end_update(
        self, replies: dict[Server, Future[None]], errors: list[BaseException | None], version: int
    ) -> None:
        """Wait for all replies, and note who has the update; after an error all give it up."""
        servers = list(replies)
        if any(errors):
            print("an update broke off:", next(filter(None, errors)))
            self._leave_group()  # or those that are well would wait for this member
            # One that has not ended by itself; its update may still be on the way to it.
            while wait(replies.values(), 1).not_done:
                list(self._control.map(Server.give_up_update, servers))

        # Each answers, or its request ends by its time-out.
        failures = {server: reply.exception() for server, reply in replies.items()}
        if any(failures.values()):
            self._leave_group()
        if all(isinstance(failure, UpdateBroken) for failure in failures.values()):
            # Who is to blame, nobody knows. All but the first are lost, or a lone one: perhaps they
            # have no way to each other.
            for server in servers[1:] or servers:
                failures[server] = ServerLost(str(failures[server]))

        for server, failure in failures.items():
            if not failure:
                server.version = version
            elif not isinstance(failure, UpdateBroken):
                self.lose(server, failure)
            elif server.state is not State.LOST:  # as a rollout noticed meanwhile
                server.why_out = str(failure)
                server.state = State.WAITING

    def _leave_group(self) -> None:
        """Leave the group: members that wait for this one get an error."""

        def close(group: Future[WeightGroup]) -> None:
            if not group.exception():
                group.result().close()

        if self._group:
            self._group.add_done_callback(close)
        self._group = None
        self._connections = None

    def fall_asleep(self) -> None:
        """Let servers, lost ones too, give up GPU memory until the next update, or lose them."""
        timeout_s = (5.0, self.config.sync_timeout)
        with self._updating:
            self.sleeps = True
            replies = {}
            for server in self.servers:
                if server.about and server.about.can_sleep:
                    # Level 1 keeps the base of adapters, which an update does not bring.
                    request = SleepRequest(1 if server.about.lora_rank else 2)
                    reply = self._control.submit(server.post, "/sleep", request, None, timeout_s)
                    replies[server] = reply
            for server, reply in replies.items():
                error = reply.exception()
                if error:
                    self.lose(server, error)

    def close(self) -> None:
        """Leave the servers, and drop all that still waits."""
        self._is_closed.set()
        self._control.shutdown(wait=False, cancel_futures=True)
        self._leave_group()
        for server in self.servers:
            server.disconnect()
