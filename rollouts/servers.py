"""The rollout servers of a run: leases, losses, returns, and new weights."""

import math
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

from config import TrainConfig, UserError, sampling_settings, truncating
from rollouts.addresses import server_urls
from vllm_client import CONTROL_TIMEOUT_S, Server, ServerError, ServerLost, State
from weights.publish import buckets

POLL_S = 2e-4  # between looks at what servers do
POLL_S_PER_SERVER = 2e-5
PROBE_S = 1.0  # between questions to a lost server
RETRY_S = 30.0  # before a server that answered, and could not be used, is tried again


class ServerPool:
    """The rollout servers of a run, thread-safe.

    `tokenizer` and `forbidden` are passed on to the servers, which `kind` makes. The limit on open
    files is raised, for the whole process.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Any = None,
        forbidden: Sequence[int] = (),
        kind: Any = Server,
    ):
        self.config = config
        self._make_server = partial(
            kind, timeout_s=config.request_timeout, tokenizer=tokenizer, forbidden=forbidden
        )
        self.servers: list[Server] = []  # the watcher replaces the list, and never changes it
        if not config.replay:
            self.servers = [self._make_server(url) for url in server_urls(config)]
        self.version = -1  # of the policy that was published last
        self.sends_adapter = False  # in place of whole weights
        self.sleeps = False  # until the next update: no server is taken back, which would wake it

        # Every request has a connection, which is a file.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._control = ThreadPoolExecutor(1024, thread_name_prefix="control")  # never for rollouts
        self._updating = threading.Lock()
        self._slots = threading.Condition()  # guards what the servers do, and tells of a free one
        self._limit = config.max_concurrent_requests  # groups on a server; 0 while `drained`
        self._is_closed = threading.Event()

        self._why_lost: object = None  # why no server is left
        self._all_lost_s = math.inf  # when the last server was lost
        self._idle_s = 0.0  # without groups in flight, since it was asked for, all servers together
        self._say_once = cache(partial(print, flush=True))  # what is tried again and again

    @property
    def serving(self) -> list[Server]:
        """Servers with the current weights."""
        return [server for server in self.servers if server.has_weights]

    @property
    def returned(self) -> list[Server]:
        """Connected servers that wait for the current weights."""
        return [server for server in self.servers if server.state is State.WAITING]

    # -- the start ---------------------------------------------------------------------------------

    def wait_until_ready(self) -> int:
        """Wait for all servers; returns the longest sequence they take, in tokens.

        Raises:
            ServerError: one does not answer in time, or cannot be used.
        """
        deadline_s = time.monotonic() + self.config.server_timeout
        for server in self.servers:
            self._wait_for(server, deadline_s)

        lengths = [self._max_model_len(server) for server in self.servers]
        self._longest = min(lengths, default=self.config.max_tokens_per_gpu)
        return self._longest

    def _wait_for(self, server: Server, deadline_s: float) -> None:
        """Wait until a server answers.

        Raises:
            ServerError: there is no answer in time; the message says how to start a server.
        """
        hint = self._how_to_start(server)
        while not server.answers():
            self._say_once(
                f"waiting up to {self.config.server_timeout:.0f} s for {server.url} ({hint})"
            )
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"no rollout server at {server.url}: start one with {hint}, or set vllm_urls"
                )
            time.sleep(1)

    def _how_to_start(self, server: Server) -> str:
        port = urlsplit(server.url).port or 80
        return f"`python vllm_server.py --model {self.config.model_id} --port {port}`"

    def _max_model_len(self, server: Server) -> int:
        """The longest sequence that a server takes, in tokens.

        Raises:
            ServerError: it has another version of vLLM than we speak to, or another model.
            UserError: as `check_server` of sampling_mask.py.
        """
        server.check_version()
        if server.returns_sampling_mask or truncating(sampling_settings(self.config)):
            from rollouts.sampling_mask import check_server

            check_server(server, self.config, self._say_once)
        model = server.request("GET", "/v1/models")["data"][0]
        ours = self.config.model_id
        served = [Path(model[name]).resolve() for name in ("id", "root")]
        if Path(ours).resolve() not in served:  # ours may be a relative path
            raise ServerError(
                f"{server.url} serves {model['root']}, not {ours}: restart it with --model {ours}"
            )
        if self.config.base_4bit and served[1] == Path(ours).resolve():
            raise ServerError(
                f"{server.url} serves {ours} itself, and not its base in 4 bits: start it on what "
                "scripts/dequantize.py writes, as launch.py does"
            )
        return model["max_model_len"]

    def connect(self, device: torch.device, gpus: Sequence[str | None] = ()) -> None:
        """Connect all servers, and watch for lost servers to take back.

        Args:
            device: that the weights are sent from.
            gpus: of all ranks, see `TransferGroup`.

        Raises:
            ServerError: one refuses.
        """
        self._device = device
        self._gpus = gpus
        list(self._control.map(self._connect, self.servers))  # raises the first error
        threading.Thread(target=self._watch, daemon=True).start()

    def _connect(self, server: Server) -> None:
        server.connect(self._device, self.config.sync_timeout, self._gpus)

    # -- leases ------------------------------------------------------------------------------------

    @contextmanager
    def lease(self) -> Iterator[Server]:
        """The server with the fewest groups in flight, for one group.

        All turns of the group go to this server, which caches them.

        Raises:
            ServerError: the run has ended, or no server came back in time.
        """
        with self._slots:
            server = self._wait_for_slot()
            if server.in_flight == 0:
                self._count_idle(server)
            server.in_flight += 1
        try:
            yield server
        finally:
            with self._slots:
                server.in_flight -= 1
                server.idle_since_s = time.monotonic()
                self._slots.notify()

    def _wait_for_slot(self) -> Server:
        """The server with the fewest groups, once there is room.

        The caller holds the lock.
        """
        while True:
            for server in sorted(self.serving, key=lambda server: server.in_flight):
                if server.in_flight < self._limit:
                    return server

            if self._is_closed.is_set():
                raise ServerError("the run has ended")
            gives_up_s = self._all_lost_s + self.config.server_timeout
            if not self.serving and time.monotonic() > gives_up_s:
                raise ServerError(
                    f"no rollout server is left: {self._why_lost}; "
                    "start one, and go on with --resume_from_checkpoint auto"
                )
            self._slots.wait(10)

    @contextmanager
    def drained(self, stop: threading.Event) -> Iterator[None]:
        """Stop all sampling for the block; groups wait for its end.

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
            for server in self.servers:
                if server.in_flight == 0:
                    self._count_idle(server)
            mean_s = self._idle_s / max(len(self.servers), 1)
            self._idle_s = 0.0
            return mean_s

    def _count_idle(self, server: Server) -> None:
        """Add a server's time without groups. The caller holds the lock."""
        now_s = time.monotonic()
        self._idle_s += now_s - server.idle_since_s
        server.idle_since_s = now_s

    # -- lost and returned servers -----------------------------------------------------------------

    def lose(self, server: Server, error: BaseException) -> None:
        """Leave out a server that served, until it answers again and has the current weights."""
        with self._slots:
            if not server.has_weights:
                return
            # One that the list does not name any more is not asked again.
            until = "until it answers again" if server in self.servers else "from now on"
            print(f"{server.url} is left out {until}: {error}", flush=True)
            server.state = State.LOST
            self._why_lost = error
            if not self.serving:
                self._all_lost_s = time.monotonic()
                print(
                    "no rollout server is left: waiting "
                    f"{self.config.server_timeout:.0f} s for one ({self._how_to_start(server)})",
                    flush=True,
                )

    def keep_out(self, server: Server, reason: object) -> None:
        """Leave out a server that answers and cannot be used, for `RETRY_S`."""
        server.state = State.LOST
        server.why_out = str(reason)
        server.retry_s = time.monotonic() + RETRY_S
        if not self.serving:
            self._why_lost = reason
        self._say_once(f"{server.url} answers again, but stays left out: {reason}")

    def admit(self, server: Server) -> None:
        """Let a server serve.

        It has the current weights, and computes with them what the trainer does.
        """
        with self._slots:
            server.state = State.SERVING
            self._slots.notify_all()
        if self._why_lost:
            print(f"{server.url} is back", flush=True)

    def _watch(self) -> None:
        """Connect new servers and lost servers that answer, until the run ends."""
        while not self._is_closed.wait(PROBE_S):
            if self.version < 0:  # the servers of the start come first
                continue
            self._read_list()
            for server in self.servers:
                if self._is_closed.is_set():  # which makes all of them lost
                    return
                with self._updating:  # a server lost in an update comes back after it
                    is_lost = server.state is State.LOST
                if is_lost and not self.sleeps and time.monotonic() > server.retry_s:
                    try:
                        self._take_back(server)
                    except Exception as error:  # any, as the watcher goes on for the other servers
                        self.keep_out(server, error)

    def _take_back(self, server: Server) -> None:
        """Connect a server, if it answers."""
        if server.was_ours:  # else it may be another trainer's
            server.break_off()  # what it had in flight has gone to other servers
        if not server.answers():
            return
        longest = self._max_model_len(server)
        if longest < self._longest:
            raise ServerError(f"its --max-model-len is {longest}: restart it with {self._longest}")
        self._connect(server)
        if server.takes_adapter or self.sends_adapter or server.can_sleep:
            from rollouts.adapters import check_returned

            check_returned(server, self.sends_adapter, self.config)
        if self._is_closed.is_set():  # the run has ended meanwhile
            server.disconnect()

    def _read_list(self) -> None:
        """Read the files of addresses: take in new servers, drop unlisted servers."""
        try:
            urls = server_urls(self.config)
        except UserError as error:
            self._say_once(f"the servers stay as they are: {error}")
            return
        known = {server.url: server for server in self.servers}
        if urls == list(known):
            return

        print(f"{self.config.vllm_urls} names {len(urls)} servers now", flush=True)
        for url in urls:
            if url not in known:
                known[url] = self._make_server(url)
        self.servers = [known.pop(url) for url in urls]
        for server in known.values():  # they finish what they have in flight
            self.lose(server, ServerLost("the list does not name it any more"))
            with self._updating:
                server.disconnect()

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(
        self, weights: Iterable[Any], version: int, only_returned: bool = False
    ) -> list[Server]:
        """Publish a policy as `version` on all servers, side by side, bucket by bucket.

        Args:
            weights: (checkpoint name, tensor in its checkpoint's shape), consumed to the end.
            version: of the policy.
            only_returned: leave out the servers that serve already.

        Returns:
            The servers that were `WAITING` and have it now: they serve once passed to `admit`.
        """
        with self._updating:
            self.sleeps = False
            returned = self.returned
            servers = returned if only_returned else self.serving + returned
            try:
                for server in servers:
                    server.start_update(version)
                sharing: list[Server] | None = None
                # One bucket loads while the trainer gathers the next; an empty one is the last.
                for bucket in chain(buckets(weights), [{}]):
                    if servers != sharing and not only_returned:
                        self._share(servers)
                        sharing = servers
                    send = partial(Server.try_to_send, bucket=bucket, buffers={})
                    servers = self._until(servers, send)

                servers = self._on(servers, Server.end_update)
                self.version = version
                return [server for server in servers if server in returned]
            except BaseException:
                # A server with half of the weights must not sample: wait until it is stopped.
                self._on(servers, partial(Server.break_off, timeout_s=CONTROL_TIMEOUT_S))
                raise

    def fall_asleep(self, step: Callable[[Server], Any]) -> None:
        """Put servers to sleep by `step`, until the next update; one that fails is left out."""
        with self._updating:
            self.sleeps = True
            self._on([server for server in self.servers if server.can_sleep], step)

    def _share(self, servers: list[Server]) -> None:
        """Let those that are left share what they are sent."""
        if len(self.servers) > 1:
            from weights.shared import share

            transfers = filter(None, [server.transfer for server in servers])
            share(transfers, lambda: any(server.loading.done() for server in servers))

    def _on(self, servers: list[Server], step: Callable[[Server], Any]) -> list[Server]:
        """Do a step on all servers at once; returns the successful servers."""
        replies = {server: self._control.submit(step, server) for server in servers}

        def has_replied(server: Server) -> bool:
            if not replies[server].done():
                return False
            replies[server].result()  # raises what the step failed with
            return True

        return self._until(servers, has_replied)

    def _until(self, servers: list[Server], is_done: Callable[[Server], bool]) -> list[Server]:
        """Poll servers until all are done; returns the done servers, in order.

        A server that fails is left out. So is one that keeps the others waiting: its time counts
        once half of them are done.
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
            waiting = still_waiting
            last_poll_s = now_s
            if waiting:
                time.sleep(POLL_S + POLL_S_PER_SERVER * len(waiting))
        return [server for server in servers if server in done]

    def _leave_out(self, server: Server, error: BaseException) -> None:
        """Go on without a server.

        Its workers get an error instead of waiting for the rest of the weights.
        """
        if server.has_weights:
            self.lose(server, error)
        else:
            self.keep_out(server, error)
        server.disconnect()

    def close(self) -> None:
        """Leave the transfer groups, and drop all that still waits."""
        self._is_closed.set()
        self._control.shutdown(wait=False, cancel_futures=True)
        with self._slots:
            self._slots.notify_all()
        for server in self.servers:
            server.disconnect()
