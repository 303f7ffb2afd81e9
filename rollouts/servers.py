"""The rollout servers of a run: leases, lost and returned ones, weights to all of them."""

import math
import re
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from config import ADDRESS, TrainConfig, UserError
from utils import (
    RIGHT_VLLM,
    VLLM_VERSION,
    naming,
)
from vllm_client import CONTROL_TIMEOUT_S, Server, ServerError, ServerLost
from weights.transfer import buckets

POLL_S = 2e-4  # between looks at what servers do
POLL_S_PER_SERVER = 2e-5
PROBE_S = 1.0  # between questions to a lost server
RETRY_S = 30.0  # before a server that answered, and could not be used, is tried again


def server_urls(config: TrainConfig) -> list[str]:
    """The addresses that `vllm_urls` means now, each once: those of a file for `@file`. UserError where it has none."""
    with naming(f"vllm_urls={','.join(config.vllm_urls)}"):
        lists = [
            Path(word[1:]).read_text().split() if word[0] == "@" else [word]
            for word in config.vllm_urls
        ]
        urls = [url.rstrip("/") for of_word in lists for url in of_word]
        if not urls or (wrong := [url for url in urls if not re.match(ADDRESS, url)]):
            raise ValueError(
                f"it needs lines of http://host:port, and has {wrong if urls else 'none'}"
            )
    return list(dict.fromkeys(urls))


class ServerPool:
    """The rollout servers of a run, thread-safe; `tokenizer`, `forbidden` as of `Server`. Raises the file limit."""

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Any = None,
        forbidden: Sequence[int] = (),
        kind: Any = Server,
    ):
        self.config = config
        self._make = partial(
            kind, timeout_s=config.request_timeout, tokenizer=tokenizer, forbidden=forbidden
        )
        self.servers = (
            [] if config.replay else [*map(self._make, server_urls(config))]
        )  # the watcher replaces the list
        self.version = -1  # of the policy that was published last
        self._updating = threading.Lock()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every request has a connection
        self._control = ThreadPoolExecutor(
            1024, thread_name_prefix="control"
        )  # never waits for rollouts
        self._slots = threading.Condition()  # guards what the servers do, and tells of a free one
        self._limit = (
            config.max_concurrent_requests
        )  # groups in flight on one server; 0 while `drained` holds them
        self._why_lost: BaseException | None = None
        self._say_once = cache(partial(print, flush=True))  # what is tried again and again
        self._all_lost_s = math.inf  # when the last server was lost
        self._idle_s = 0.0  # of servers that have groups in flight again, since it was asked for
        self._is_closed = threading.Event()

    def wait_until_ready(self) -> int:
        """Wait for every server, or raise a ServerError; returns the longest sequence that all take, in tokens."""
        deadline = time.monotonic() + self.config.server_timeout
        for server in self.servers:
            hint = f"`python vllm_server.py --model {self.config.model_id} --port {urlsplit(server.url).port or 80}`"
            while not server.answers():
                self._say_once(
                    f"waiting up to {self.config.server_timeout:.0f} s for {server.url} ({hint})"
                )
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"no rollout server at {server.url}: start one with {hint}, or set vllm_urls"
                    )
                time.sleep(1)
        self._longest = min(
            map(self._max_model_len, self.servers), default=self.config.max_tokens_per_gpu
        )
        return self._longest

    def _max_model_len(self, server: Server) -> int:
        """The longest sequence that a server takes, if it serves our model by the version of vLLM that we speak to."""
        about = server.request("GET", "/version")
        version = str(about["version"] if isinstance(about, dict) and "version" in about else about)
        if version.partition("+")[0] != VLLM_VERSION:
            raise ServerError(
                f"{server.url} runs vLLM {version[:100]}, not {VLLM_VERSION}: {RIGHT_VLLM}"
            )
        (model, *_) = server.request("GET", "/v1/models")["data"]
        ours, served = self.config.model_id, (model["id"], model["root"])
        if Path(ours).resolve() not in [
            Path(name).resolve() for name in served
        ]:  # ours may be a relative path
            raise ServerError(
                f"{server.url} serves {model['root']}, not {ours}: restart it with --model {ours}"
            )
        return model["max_model_len"]

    def connect(self, device: torch.device, gpus: Sequence[str | None] = ()) -> None:
        """Connect every server, or raise a ServerError; from now on lost servers are watched for and taken back."""
        self._where = (device, self.config.sync_timeout, gpus)
        list(
            self._control.map(lambda server: server.connect(*self._where), self.servers)
        )  # raises the first error
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def lease(self) -> Iterator[Server]:
        """The server with the fewest groups in flight, for all turns of a group, which it caches; or ServerError."""
        with self._slots:
            while not (
                free := [s for s in self.servers if s.has_weights and s.in_flight < self._limit]
            ):
                if self._is_closed.is_set():
                    raise ServerError("the run has ended")
                gives_up = time.monotonic() > self._all_lost_s + self.config.server_timeout
                if gives_up and not any(server.has_weights for server in self.servers):
                    cure = "start one, and go on with --resume_from_checkpoint auto"
                    raise ServerError(f"no rollout server is left: {self._why_lost}; {cure}")
                self._slots.wait(10)
            server = min(free, key=lambda server: server.in_flight)
            if server.in_flight == 0:
                self._idle_s += time.monotonic() - server.idle_since_s
            server.in_flight += 1
        try:
            yield server
        finally:
            with self._slots:
                server.in_flight -= 1
                server.idle_since_s = time.monotonic()
                self._slots.notify()

    @contextmanager
    def drained(self, stop: threading.Event) -> Iterator[None]:
        """No server samples in this block; groups wait for its end. It begins at once where `stop` is set."""
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
        """Seconds without a group in flight since this was last asked, mean over the servers."""
        with self._slots:
            for server in (server for server in self.servers if server.in_flight == 0):
                self._idle_s += time.monotonic() - server.idle_since_s
                server.idle_since_s = time.monotonic()
            idle_s, self._idle_s = self._idle_s / max(len(self.servers), 1), 0.0
            return idle_s

    def lose(self, server: Server, error: BaseException) -> None:
        """Leave a server out that served, until it answers again and has the current weights."""
        with self._slots:
            if not server.has_weights:
                return
            until = "until it answers again" if server in self.servers else "from now on"
            print(f"{server.url} is left out {until}: {error}", flush=True)
            server.is_connected = server.has_weights = False
            self._why_lost = error
            if not any(server.has_weights for server in self.servers):
                self._all_lost_s = time.monotonic()
                print(
                    f"no rollout server is left: waiting {self.config.server_timeout:.0f} s for one",
                    flush=True,
                )

    def keep_out(self, server: Server, reason: object) -> None:
        """Leave out a server that answers and cannot be used, for `RETRY_S`. The same reason is printed once."""
        server.is_connected, server.retry_s = False, time.monotonic() + RETRY_S
        self._say_once(f"{server.url} answers again, but stays left out: {reason}")

    def admit(self, server: Server) -> None:
        """Let a server serve: it has the current weights, and computes with them what the trainer does."""
        with self._slots:
            server.has_weights = True
            self._slots.notify_all()
        if self._why_lost:
            print(f"{server.url} is back", flush=True)

    @property
    def returned(self) -> list[Server]:
        """Connected servers that wait for the current weights."""
        return [server for server in self.servers if server.is_connected and not server.has_weights]

    def _watch(self) -> None:
        """Connect new servers, and lost ones that answer again, until the run ends."""
        while not self._is_closed.wait(PROBE_S):
            if self.version < 0:  # the servers of the start come first
                continue
            self._read_list()
            for server in [
                s for s in self.servers if not s.is_connected and time.monotonic() > s.retry_s
            ]:
                try:
                    if server.was_ours:  # else it may be another trainer's
                        server.break_off()  # what it had in flight has gone to other servers
                    if not server.answers():
                        continue
                    if (longest := self._max_model_len(server)) < self._longest:
                        raise ServerError(
                            f"its --max-model-len is {longest}: restart it with {self._longest}"
                        )
                    server.connect(*self._where)
                except (
                    Exception
                ) as error:  # whatever it is, the watcher goes on for the other servers
                    self.keep_out(server, error)

    def _read_list(self) -> None:
        """Take in what files of addresses name now, and leave what they do not name any more."""
        here = {server.url: server for server in self.servers}
        try:
            urls = server_urls(self.config)
        except UserError as error:
            return self._say_once(f"the servers stay as they are: {error}")
        if urls != [*here]:
            print(f"{self.config.vllm_urls} names {len(urls)} servers now", flush=True)
            self.servers = [here.pop(url) if url in here else self._make(url) for url in urls]
            for server in here.values():  # which ends what it has in flight
                self.lose(server, ServerLost("the list does not name it any more"))
                with self._updating:
                    server.disconnect()

    def update_weights(
        self, weights: Iterable[Any], version: int, only_returned: bool = False
    ) -> list[Server]:
        """Publish a policy as `version` on every server, side by side: pause, stream bucket by bucket, resume.

        `weights` are `(checkpoint name, tensor in its checkpoint's shape)`, consumed to the end; with `only_returned`
        they go to servers that wait for weights alone. Returns those that waited: they serve once passed to `admit`.
        """
        with self._updating:
            returned = self.returned
            servers = (
                returned if only_returned else [s for s in self.servers if s.has_weights] + returned
            )
            try:
                servers = self._on(
                    servers, Server.pause
                )  # all of them first: one that hangs keeps no other waiting
                for (
                    server
                ) in servers:  # each broadcast has a time-out, so the request itself needs none
                    server.loading = server.pool.submit(
                        server.post, "/update_weights", {"update_info": {}}, (5, None)
                    )
                for bucket in chain(
                    buckets(weights), [{}]
                ):  # one loads while the trainer gathers the next
                    servers = self._until(
                        servers, partial(Server.try_to_send, bucket=bucket, buffers={})
                    )
                servers = self._on(
                    servers, lambda server: server.end_update(version, self.config.sync_timeout)
                )
                self.version = version
                return [server for server in servers if server in returned]
            except BaseException:
                # To go on with half of the weights would end an engine. Wait for its answer: the next sync resumes it.
                self._on(servers, partial(Server.break_off, timeout_s=CONTROL_TIMEOUT_S))
                raise

    def _on(self, servers: list[Server], step: Callable[[Server], Any]) -> list[Server]:
        """Do a step on every server, side by side; returns those that did it. The others are left out."""
        replies = {server: self._control.submit(step, server) for server in servers}

        def has_replied(server: Server) -> bool:
            if not replies[server].done():
                return False
            replies[server].result()  # raises what the step failed with
            return True

        return self._until(servers, has_replied)

    def _until(self, servers: list[Server], is_done: Callable[[Server], bool]) -> list[Server]:
        """Poll servers until all are done; returns those that are, in their order.

        One that fails is left out. So is one that keeps the others waiting: its time counts once half of them are done.
        """
        done: set[Server] = set()
        waiting = servers
        last_poll_s = time.monotonic()
        while waiting:
            now_s = time.monotonic()
            half_are_done = len(waiting) <= len(servers) / 2
            still_waiting = []
            for server in waiting:
                if half_are_done:
                    server.lag_s += now_s - last_poll_s
                try:
                    if is_done(server):
                        done.add(server)
                    elif server.lag_s > self.config.sync_timeout:
                        raise ServerLost("it kept the other servers waiting for sync_timeout")
                    else:
                        still_waiting.append(server)
                except RuntimeError as error:  # ServerError is one, and so is a lost group's error
                    self._leave_out(server, error)
            waiting, last_poll_s = still_waiting, now_s
            if waiting:
                time.sleep(POLL_S + POLL_S_PER_SERVER * len(waiting))
        return [server for server in servers if server in done]

    def _leave_out(self, server: Server, error: BaseException) -> None:
        """Go on without a server, whose workers get an error instead of waiting for the rest of the weights."""
        if server.has_weights:
            self.lose(server, error)
        else:
            self.keep_out(server, error)
        server.disconnect()

    def close(self) -> None:
        """Leave the transfer groups and drop what is still waiting."""
        self._is_closed.set()
        self._control.shutdown(wait=False, cancel_futures=True)
        with self._slots:
            self._slots.notify_all()
        for server in self.servers:
            server.disconnect()
