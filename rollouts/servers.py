"""The rollout servers of a run: leases, losses, returns, and new weights."""

import math
import re
import resource
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from config import TrainConfig, UserError, lora_options
from rollouts.sending import Sender
from server.messages import SleepRequest
from utils import naming
from vllm_client import (
    TRAINER,
    Server,
    ServerError,
    ServerLost,
    State,
    UpdateBroken,
)  # fmt: skip

ADDRESS = r"https?://([\w.-]+|\[[\w:]+\])(:\d+)?/?$"
PROBE_S = 1.0  # until a lost server is asked, doubled at each of its losses; then between questions
MOST_DOUBLED = 8  # times


def server_urls(config: TrainConfig) -> list[str]:
    """The addresses that `vllm_urls` names now, each once.

    `@file` stands for the addresses in a file.

    Raises:
        UserError: there is none, and no part that needs none; or something else.
    """
    with naming(f"vllm_urls={','.join(config.vllm_urls)}"):
        urls: list[str] = []
        for word in config.vllm_urls:
            if word.startswith("@"):
                urls += Path(word[1:]).expanduser().read_text().split()
            else:
                urls.append(word)
        wrong = [url for url in urls if not re.match(ADDRESS, url)]
        if wrong or (not urls and (config.vllm_urls or not config.parts)):
            raise ValueError(f"give http://host:port, or @file with one a line, not {wrong}")
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


class ServerPool:
    """The rollout servers of a run, thread-safe.

    `tokenizer` and `forbidden` are passed on to the servers, which `kind` makes, and which take
    texts of `rope_limit` tokens at most. The limit on open files is raised, for the whole process.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Any = None,
        forbidden: Sequence[int] = (),
        kind: Any = Server,
        rope_limit: float = math.inf,
    ):
        self.config = config
        self._make_server = partial(
            kind, timeout_s=config.request_timeout, tokenizer=tokenizer, forbidden=forbidden
        )
        # The watcher replaces the list, and never changes it.
        self.servers = [self._make_server(url) for url in server_urls(config)]
        self.version = -1  # of the policy that was published last
        self.sends_adapter = False  # in place of whole weights
        self.sleeps = False  # until the next update: no server is taken back, which would wake it
        self._longest = config.max_tokens_per_gpu  # tokens of a sequence that all take
        self._rope_limit = rope_limit

        # Every request has a connection, which is a file.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._control = ThreadPoolExecutor(1024, thread_name_prefix="control")  # never for rollouts
        self._slots = threading.Condition()  # guards what the servers do, and tells of a free one
        self._limit = config.max_concurrent_requests  # groups on a server; 0 while `drained`
        self._ends_s = math.inf  # when a run that has lost its last server ends
        self._is_closed = threading.Event()

        self._updating = threading.Lock()
        self._sender: Any = None  # of updates, once it is connected

        self._idle_s = 0.0  # of a mean server, without groups in flight, since it was asked for
        self._counted_s = time.monotonic()  # until when it is counted
        self._say_once = cache(print)  # what is tried again and again

    @property
    def serving(self) -> list[Server]:
        """Servers with the current weights."""
        return [server for server in self.servers if server.state is State.SERVING]

    @property
    def returned(self) -> list[Server]:
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
                    server.connect(sampling=sampling)
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
        """Connect all servers, and watch for lost servers to take back.

        Args:
            device: that the weights are sent from.
            gpus: of all ranks: a server may share one of them.

        Raises:
            ServerError: one refuses.
        """
        self._sender = Sender(device, gpus, self.config.sync_timeout, self._control)
        # Raises the first error.
        list(self._control.map(lambda server: server.connect(TRAINER), self.servers))
        threading.Thread(target=self._watch, daemon=True).start()

    def _check(self, server: Server) -> None:
        """Refuse a server of another kind than the run needs, and its other servers are.

        Raises:
            ServerError: what it is, and how to start it.
        """
        about = server.about
        config = self.config
        ours = Path(config.model_id).resolve()  # which may be a relative path
        served = [Path(name).resolve() for name in about.names]
        takes_adapter = about.lora_rank > 0
        options = " ".join(lora_options(config.lora_rank))
        faults = {
            f"serves {about.names[0]}: restart it with --model {config.model_id}": (
                ours not in served
            ),
            f"takes fewer tokens than others: give it --max-model-len {self._longest}": (
                about.max_model_len < self._longest
            ),
            "takes long texts, and so all by other rope factors than the trainer: "
            f"give it --max-model-len {self._rope_limit}": about.max_model_len > self._rope_limit,
            "serves the model itself, and not what scripts/dequantize.py makes of it": (
                config.base_4bit and ours == served[0]
            ),
            f"takes whole weights, and base_4bit has none: give it {options}": (
                config.base_4bit and not takes_adapter
            ),
            "differs from others in --enable-lora: give it to all, or to none": (
                takes_adapter != self.sends_adapter
            ),
            "takes adapters alone: start it without --enable-lora, or set use_peft": (
                takes_adapter and not config.use_peft
            ),
            f"takes adapters of rank {about.lora_rank} at most: give it {options}": (
                0 < about.lora_rank < config.lora_rank
            ),
            "sleeps while this trains: set max_staleness=0, or no --enable-sleep-mode": (
                about.can_sleep and config.max_staleness > 0
            ),
        }
        for fault, is_found in faults.items():
            if is_found:
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
            while True:
                server = min(self.serving, key=lambda server: server.in_flight, default=None)
                if server and server.in_flight < self._limit:
                    break
                if self._is_closed.is_set():
                    raise ServerError("the run has ended")
                if not self.servers:
                    raise ServerError("vllm_urls names no server, and a group asks for one")
                if not server and not self.returned and time.monotonic() > self._ends_s:
                    why = "; ".join(server.why_out for server in self.servers)
                    raise ServerError(
                        f"no rollout server is left: {why}; "
                        "start one, and go on with --resume_from_checkpoint auto"
                    )
                self._slots.wait(1)
            self._count_idle()
            server.in_flight += 1
        try:
            yield server
        finally:
            with self._slots:
                self._count_idle()
                server.in_flight -= 1
                self._slots.notify()

    @contextmanager
    def drained(self, stop: threading.Event) -> Iterator[None]:
        """Wait until all groups in flight have ended; others begin after the block.

        The block begins at once where `stop` is set.
        """
        with self._slots:
            self._limit = 0
        while any(server.in_flight for server in self.servers) and not stop.wait(0.005):
            pass
        try:
            yield
        finally:
            with self._slots:
                self._limit = self.config.max_concurrent_requests
                self._slots.notify_all()

    def idle_seconds(self) -> float:
        """A server's mean seconds without groups in flight, since the last call."""
        with self._slots:
            self._count_idle()
            idle_s = self._idle_s
            self._idle_s = 0.0
            return idle_s

    def _count_idle(self) -> None:
        """Add the time up to now, before what is in flight changes. The caller holds the lock."""
        now_s = time.monotonic()
        num_idle = sum(server.in_flight == 0 for server in self.servers)
        self._idle_s += (now_s - self._counted_s) * num_idle / max(len(self.servers), 1)
        self._counted_s = now_s

    # -- lost and returned servers -----------------------------------------------------------------

    def lose(self, server: Server, error: object) -> None:
        """Leave out a server, until it answers again and has the current weights."""
        with self._slots:
            if server.state is State.LOST or self._is_closed.is_set():
                return
            print(f"{server.url} is left out for now: {error}")
            server.state = State.LOST
            server.why_out = str(error)
            # One that comes and goes should cost little.
            server.retry_s = time.monotonic() + PROBE_S * 2 ** min(server.num_losses, MOST_DOUBLED)
            server.num_losses += 1
            if not self.serving and not self.returned:
                timeout_s = self.config.server_timeout
                self._ends_s = time.monotonic() + timeout_s
                print(f"no rollout server is left: waiting {timeout_s:.0f} s for one")

    def admit(self, server: Server) -> None:
        """Let a server serve.

        It has the current weights, and computes with them what the trainer does.
        """
        with self._slots:
            server.state = State.SERVING
            self._slots.notify_all()
        if server.num_losses:
            print(f"{server.url} is back")

    def _watch(self) -> None:
        """Take back lost servers that answer, each in a thread of its own, until the run ends.

        Files of addresses are read each time: listed servers come, and others leave.
        """
        while not self._is_closed.wait(PROBE_S):
            if self.version < 0:  # the servers of the start come first
                continue
            known = {server.url: server for server in self.servers}
            urls = [*known]
            try:
                urls = server_urls(self.config)
            except UserError as error:
                self._say_once(f"the servers stay as they are: {error}")

            with self._updating:  # a server lost in an update comes back after it
                self.servers = [known.get(url) or self._make_server(url) for url in urls]
                for url in known.keys() - urls:  # they finish what they have in flight
                    self.lose(known[url], "the list does not name it any more")
                    known[url].disconnect()
                for server in self.servers:
                    is_due = server.state is State.LOST and time.monotonic() > server.retry_s
                    if is_due and not self.sleeps:
                        server.retry_s = math.inf  # not twice at a time
                        with suppress(RuntimeError):  # of a pool that closes
                            self._control.submit(self._take_back, server)

    def _take_back(self, server: Server) -> None:
        """Connect a server, if it answers; what it had in flight has gone to other servers."""
        try:
            server.connect()
            self._check(server)
            server.connect(TRAINER)
            if self._is_closed.is_set() or server not in self.servers:  # meanwhile
                server.disconnect()
        except Exception as error:  # any, or nobody would be told
            server.retry_s = 0.0
            if not isinstance(error, ServerLost):  # it is there
                server.why_out = str(error)
                self._say_once(f"{server.url} answers again, but stays left out: {error}")

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(
        self, weights: Iterable[Any], version: int, only_returned: bool = False
    ) -> list[Server]:
        """Publish a policy as `version` on all servers, bucket by bucket.

        Where it breaks off, servers that are well wait for the next update.

        Args:
            weights: (checkpoint name, tensor in its checkpoint's shape), consumed to the end.
            version: of the policy.
            only_returned: leave out the servers that serve already.

        Returns:
            The servers that were `WAITING` and have it now: they serve once passed to `admit`.
        """
        with self._updating:
            self.sleeps = False
            # While they slept nobody was taken back.
            self._ends_s = time.monotonic() + self.config.server_timeout
            returned = self.returned
            servers = returned if only_returned else self.serving + returned
            failures = self._sender.send(weights, servers, version)
            for server, failure in failures.items():
                if not failure:
                    server.version = version
                elif not isinstance(failure, UpdateBroken):
                    self.lose(server, failure)
                elif server.state is not State.LOST:  # as a rollout noticed meanwhile
                    server.why_out = str(failure)
                    server.state = State.WAITING
            self.version = version
            return [server for server in returned if server.version == version]

    def fall_asleep(self) -> None:
        """Let servers give up their GPUs' memory, until the next update; who fails is left out.

        A lost one may have the GPU's memory, too, if it listens.
        """

        def sleep(server: Server) -> None:
            # Level 1 keeps the base of adapters, which an update does not bring.
            request = SleepRequest(1 if server.about.lora_rank else 2)
            try:
                server.post("/sleep", request, timeout_s=(5.0, self.config.sync_timeout))
            except ServerError as error:
                self.lose(server, error)

        with self._updating:
            self.sleeps = True
            able = [server for server in self.servers if server.about and server.about.can_sleep]
            list(self._control.map(sleep, able))

    def close(self) -> None:
        """Leave the servers, and drop all that still waits."""
        self._is_closed.set()
        self._control.shutdown(wait=False, cancel_futures=True)
        if self._sender:
            self._sender.leave()
        for server in self.servers:
            server.disconnect()
