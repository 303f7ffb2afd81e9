"""From dataset rows to scored groups: prompts, the HTTP client of the rollout servers (`vllm_server.py`), rewards.

The client samples completions, publishes weights and watches health; `RolloutStream` keeps the servers busy ahead of
the trainer. Nothing here imports vLLM.
"""

import json
import math
import os
import resource
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor
from torch.distributed import TCPStore

from config import TrainConfig, UserError
from utils import TransferGroup, address_towards, api_token, buckets

NO_LOGPROB = -9999.0  # what vLLM's API makes of NaN and minus infinity
CONTROL_TIMEOUT_S = 60.0  # for requests that have nothing to wait for
PROBE_S = 1.0  # between questions to a lost server
RETRY_S = 30.0  # before one that answered, and could not be used, is tried again
TRAINER = uuid.uuid4().hex  # this process, for servers: they take the weights of one trainer at a time
Timeout = float | tuple[float, None]  # seconds; or to connect, and none to answer


class ServerError(RuntimeError):
    """A rollout server could not be reached, or refused; the message says which one, why and what to do."""


class ServerLost(ServerError):
    """A server does not answer any more, or only with errors of its own: another one may do its work."""


@dataclass(frozen=True)
class Images:
    """A prompt's images, processed once for all its completions.

    Attributes:
        server_ids: the prompt with one placeholder for each image, which the server expands.
        num_tokens: of the prompt once it is expanded.
        urls: for the server: PNG, as data URIs.
        inputs: for the policy: what the model's processor makes of them (`pixel_values`, ...), in its own shapes and
            dtypes, on the CPU.
    """

    server_ids: list[int]
    num_tokens: int
    urls: list[str]
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class Completion:
    """What was sampled for a prompt.

    Attributes:
        token_ids: the sampled ids, the end-of-sequence token included where one was sampled.
        sampler_logprobs: the server's log-probability of each token, nats, after temperature (and top-k/p).
        finish_reason: `stop` (ended by itself) or `length` (cut off).
        weight_versions: `(version, start, end)` for each span of tokens sampled under one policy version.
        loss_mask: False on tokens that an environment wrote, which do not train; None where all were sampled.
    """

    token_ids: list[int]
    sampler_logprobs: list[float]
    finish_reason: str
    weight_versions: list[tuple[int, int, int]]
    loss_mask: list[bool] | None = None

    @property
    def truncated(self) -> bool:
        """True where the completion ran into its length limit."""
        return self.finish_reason == "length"

    @property
    def sampled(self) -> list[bool]:
        """Which tokens were sampled, as against written by an environment."""
        return [True] * len(self.token_ids) if self.loss_mask is None else self.loss_mask

    def then(self, environment_ids: list[int], reply: "Completion") -> "Completion":
        """This turn, the environment's answer and the policy's next turn as one completion; ids are only joined."""
        start = len(self.token_ids) + len(environment_ids)
        return Completion(
            [*self.token_ids, *environment_ids, *reply.token_ids],
            [*self.sampler_logprobs, *[0.0] * len(environment_ids), *reply.sampler_logprobs],
            reply.finish_reason,
            [*self.weight_versions, *((v, start + first, start + last) for v, first, last in reply.weight_versions)],
            [*self.sampled, *[False] * len(environment_ids), *reply.sampled],
        )


# --------------------------------------------------------------------------------------------------------------------
# Servers


def _json(reply: requests.Response) -> Any:
    return reply.json() if reply.content else None


class Server:
    """One rollout server: its address, how many groups it is sampling for us, and its weight-transfer group.

    This is the `client` of a recipe's `rollout_fn`, which uses `generate` and the model's `tokenizer`.
    """

    def __init__(self, url: str, timeout_s: float, retries: int, tokenizer: Any = None, forbidden: Sequence[int] = ()):
        self.url = url.rstrip("/")
        self.tokenizer = tokenizer
        self.forbidden = forbidden  # tokens that are never sampled
        self.timeout_s = timeout_s
        self.retries = retries
        self.is_ready = True  # has the current weights; False once it is lost
        self.in_flight = 0
        self.idle_s = 0.0  # since the last report
        self.idle_since = time.monotonic()
        self.transfer: TransferGroup | None = None
        self.sending: list[Any] = []  # broadcasts under way
        self.loading: Future[Any]  # the server's reply to an update under way
        self.receiver: ThreadPoolExecutor  # waits for it
        self.num_lost = 0  # how often
        self.answers_again = False  # after it was lost
        self.retry_s = 0.0  # when it may be tried again, on the monotonic clock
        self.why_out = ""
        self._local = threading.local()  # a requests.Session is not thread-safe

    def request(
        self,
        method: str,
        path: str,
        timeout_s: Timeout | None = None,
        retries: int | None = None,
        read: Callable[[requests.Response], Any] = _json,
        **kwargs: Any,
    ) -> Any:
        """What `read` makes of the reply, retried after connection errors, time-outs, 5xx and incomplete replies.

        Raises:
            ServerError: a 4xx reply, at once.
            ServerLost: anything else, after the last retry; without one where the server is lost meanwhile, or `read`
                raises it.
        """
        retries = self.retries if retries is None else retries
        for attempt in range(retries + 1):
            try:
                timeout = timeout_s or self.timeout_s
                # closed at the end: the server aborts what is left of a stream
                with self._session().request(method, self.url + path, timeout=timeout, **kwargs) as reply:
                    if reply.status_code < 400:
                        return read(reply)
                    cause = f"answered {reply.status_code}: {reply.text[:500]}"
                    cause += ": set VLLM_API_KEY to the server's token" if reply.status_code == 401 else ""
                if reply.status_code < 500:
                    raise ServerError(f"{method} {self.url}{path} {cause}")
            except requests.ConnectionError as error:
                root: BaseException = error
                while root.__context__:  # within three layers of "max retries exceeded"
                    root = root.__context__
                cause = f"{type(root).__name__}: {root}"
            except (requests.RequestException, ValueError, LookupError, TypeError, AttributeError) as error:
                cause = f"{type(error).__name__}: {error}"  # half a reply
            if not self.is_ready:  # lost meanwhile: its work is for another one
                break
            if attempt < retries:
                time.sleep(min(0.5 * 2**attempt, 10))
        raise ServerLost(f"{method} {self.url}{path} failed {attempt + 1} times, at last: {cause}")

    def generate(
        self,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        extra: int = 0,
        images: Images | None = None,
        **limits: Any,
    ) -> list[Completion]:
        """Sample `sampling["n"]` completions of one prompt.

        Args:
            prompt_ids: the prompt's tokens, and those of earlier turns.
            sampling: vLLM's sampling parameters, passed through.
            extra: sample so many more, keep the first `n` to finish, and abort the rest.
            images: of the prompt, which are at the beginning of `prompt_ids`.
            limits: `timeout_s` and `retries` of `request`.

        Raises:
            ServerError: refused, no valid reply after the retries, or images that the server expands to other tokens.
            UserError: a prompt has placeholders of images, and `images` are not given.
        """
        num = sampling.get("n", 1)
        body: dict[str, Any] = {"token_ids": prompt_ids}
        body["sampling_params"] = {**sampling, "n": num + extra, "logprobs": 0}
        if self.forbidden:  # -100 is the most that the server takes, and as good as -inf
            bias = dict.fromkeys(self.forbidden, -100.0)
            body["sampling_params"]["logit_bias"] = {**(sampling.get("logit_bias") or {}), **bias}
        if not set(self.forbidden).isdisjoint(prompt_ids[images.num_tokens if images else 0 :]):
            raise UserError("a prompt with placeholders of images was sent without them: pass images=prompt.images")
        if images:
            body["token_ids"] = [*images.server_ids, *prompt_ids[images.num_tokens :]]
            body["content_parts"] = [{"type": "image_url", "url": url} for url in images.urls]
            body["return_token_ids"] = True
        streamed = {"stream": True} if extra else {}
        read = partial(_first_to_finish if extra else _all_choices, num)
        completions, expanded = self.request(
            "POST", "/inference/v1/generate", read=read, json={**body, **streamed}, **streamed, **limits
        )
        if images and expanded != prompt_ids:
            raise ServerError(
                f"{self.url} expands the images of a prompt to {len(expanded)} tokens in all, the trainer to "
                f"{len(prompt_ids)}, or to others of the same number: do both process images alike "
                "(--mm-processor-kwargs)?"
            )
        return completions

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            self._local.session.trust_env = False  # no proxy between trainer and server
            self._local.session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
            if token := api_token():
                self._local.session.headers["Authorization"] = f"Bearer {token}"
        return self._local.session

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Open the weight-transfer group with this server's workers, replacing one that an earlier trainer left.

        Raises:
            ServerError: it refuses, or its workers do not come.
        """
        self.receiver = ThreadPoolExecutor(1)  # a fresh one: what a lost server was sent may still be waiting
        self.sync_timeout_s = timeout_s
        address = address_towards(urlsplit(self.url).hostname or "127.0.0.1")
        world_size = 1 + self.request("GET", "/get_world_size", CONTROL_TIMEOUT_S)["world_size"]
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        info = {
            "host": address,
            "port": store.port,
            "world_size": world_size,
            "timeout_s": timeout_s,
            "trainer": TRAINER,
        }
        with ThreadPoolExecutor(1) as pool:  # both sides must enter the rendezvous
            reply = pool.submit(
                self.post, "/init_weight_transfer_engine", {"init_info": info}, timeout_s + CONTROL_TIMEOUT_S
            )
            while not store.check(["device/1"]):  # a server that refuses never comes
                if reply.done():
                    reply.result()
                    raise ServerError(f"{self.url} took the invitation, and its workers did not come")
                time.sleep(0.01)
            self.transfer = TransferGroup(store, 0, world_size, device, timeout_s)
            reply.result()

    def disconnect(self) -> None:
        """Leave the weight-transfer group; what a lost server never received may keep it open for its time-out."""
        if self.transfer is not None:
            leaving = threading.Thread(target=self.transfer.close, daemon=True)
            self.transfer, self.sending = None, []  # a broadcast would keep the group, and the server, waiting
            leaving.start()
            leaving.join(1.0)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout_s: Timeout = CONTROL_TIMEOUT_S) -> Any:
        """A POST that is never repeated, as it may not be done twice."""
        return self.request("POST", path, timeout_s, retries=0, json=body)

    def answers(self) -> bool:
        """Whether it calls itself healthy."""
        try:
            self.request("GET", "/health", timeout_s=5, retries=0)
        except ServerError:
            return False
        return True

    def abort(self) -> None:
        """End what is in flight, if the server still listens."""
        with suppress(ServerError):
            self.post("/pause?mode=abort", timeout_s=5)

    def clear_weights(self) -> None:
        """Zero them, so that a comparison after the first sync can only hold if every weight arrived."""
        self.post("/weight_checker", {"action": "reset"})

    def pause(self) -> None:
        """Stop sampling, and make ready for new weights."""
        self.post("/pause?mode=keep&clear_cache=true")
        self.post("/start_weight_update")

    def begin_update(self) -> None:
        """Start to receive a stream of weights. What bounds it is the time-out of each broadcast."""
        self.loading = self.receiver.submit(self.post, "/update_weights", {"update_info": {}}, (5, None))
        self.sending = []

    def send(self, bucket: dict[str, Tensor] | None) -> None:
        """Start to send a bucket, {} to end the stream, once the one before has arrived; None only waits for that.

        Its tensors, of any shapes, must not change until the next call.

        Raises:
            ServerLost: it was lost in this update.
        """
        if (transfer := self.transfer) is None:
            raise ServerLost(f"{self.url} was lost in this update")
        for handle in self.sending:
            while not handle.is_completed():
                if self.loading.done():
                    self.loading.result()  # the error of a server that failed, and will never take part
                time.sleep(2e-4)
            handle.wait()
        self.sending = [] if bucket is None else transfer.send(bucket)

    def end_update(self, version: int) -> None:
        """Wait until everything is loaded, and sample on as `version`.

        Raises:
            ServerLost: it takes longer than `sync_timeout` to load what it was sent last.
        """
        try:
            self.loading.result(self.sync_timeout_s)
        except TimeoutError:
            raise ServerLost(f"{self.url} took longer than sync_timeout to load the last weights") from None
        self.post("/finish_weight_update", {"weight_version": str(version)})
        self.post("/resume")


class VLLMClient:
    """All rollout servers of a run. Thread-safe; lives on rank 0.

    Args:
        config: vllm_urls, request_timeout, request_retries, max_concurrent_requests, server_timeout, model_id.
        tokenizer: the model's, for rollout functions.
        forbidden: tokens that are never sampled.

    Raises:
        UserError: `VLLM_API_KEY` is not ASCII.
    """

    def __init__(self, config: TrainConfig, tokenizer: Any = None, forbidden: Sequence[int] = ()):
        self.config = config
        if not api_token().isascii():
            raise UserError("VLLM_API_KEY has other characters than ASCII: no header can carry it")
        limits = (config.request_timeout, config.request_retries)
        self.servers = [Server(url, *limits, tokenizer, forbidden) for url in config.vllm_urls]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a connection for each thread and server
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard if 0 < hard < 65536 else 65536), hard))
        self._control = ThreadPoolExecutor(len(self.servers), thread_name_prefix="control")  # never behind rollouts
        self._slots = threading.Condition()
        self._is_held = False
        self._last_loss: BaseException | None = None
        self._alone_s = math.inf  # when the last server was lost
        self._is_closed = threading.Event()

    def wait_until_ready(self) -> int:
        """Wait until every server answers; returns the longest sequence that all of them take, in tokens.

        Raises:
            ServerError: a server does not answer within `server_timeout` (the message says how to start one), or
                serves another model.
        """
        deadline = time.monotonic() + self.config.server_timeout
        self._longest = min(self._when_ready(server, deadline) for server in self.servers)
        return self._longest

    def _when_ready(self, server: Server, deadline: float) -> int:
        model_id = self.config.model_id
        command = f"python vllm_server.py --model {model_id} --port {urlsplit(server.url).port or 80}"
        waiting = False
        while True:
            try:
                server.request("GET", "/health", timeout_s=5, retries=0)
                break
            except ServerError as error:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"no rollout server at {server.url} ({error}): start one with `{command}`, or set vllm_urls"
                    ) from None
                if not waiting:
                    waiting = True
                    print(
                        f"waiting up to {self.config.server_timeout:.0f} s for {server.url} (`{command}`)", flush=True
                    )
                time.sleep(1)
        (model, *_) = server.request("GET", "/v1/models")["data"]
        served = (model["id"], model["root"])
        same_path = Path(model_id).exists() and any(Path(name).resolve() == Path(model_id).resolve() for name in served)
        if model_id not in served and not same_path:
            raise ServerError(
                f"{server.url} serves {model['root']}, not {model_id}: restart it with --model {model_id}"
            )
        return model["max_model_len"]

    @contextmanager
    def lease(self) -> Iterator[Server]:
        """The server with the fewest groups in flight, for one group: its turns find their prefixes cached there.

        Raises:
            ServerError: no server is left.
        """
        limit = self.config.max_concurrent_requests
        with self._slots:
            while not (free := [s for s in self.servers if s.is_ready and s.in_flight < limit and not self._is_held]):
                none_left = not any(server.is_ready for server in self.servers)
                if none_left and time.monotonic() > self._alone_s + self.config.server_timeout:
                    raise ServerError(
                        f"no rollout server is left: {self._last_loss}; start one, and go on with "
                        "--resume_from_checkpoint auto"
                    )
                self._slots.wait(1)
            server = min(free, key=lambda server: server.in_flight)
            if server.in_flight == 0:
                server.idle_s += time.monotonic() - server.idle_since
            server.in_flight += 1
        try:
            yield server
        finally:
            with self._slots:
                server.in_flight -= 1
                if server.in_flight == 0:
                    server.idle_since = time.monotonic()
                (self._slots.notify_all if self._is_held else self._slots.notify)()  # of those that wait one gets it

    @contextmanager
    def drained(self, stop: threading.Event) -> Iterator[None]:
        """No server samples in this block; what wants one waits for its end. Not waited for once `stop` is set."""
        with self._slots:
            self._is_held = True
            while any(server.in_flight for server in self.servers) and not stop.is_set():
                self._slots.wait(1)
        try:
            yield
        finally:
            with self._slots:
                self._is_held = False
                self._slots.notify_all()

    def lose(self, server: Server, error: BaseException) -> None:
        """Leave a server out until it answers again, and has the current weights."""
        with self._slots:
            if not server.is_ready:
                return
            print(f"{server.url} is left out until it answers again: {error}", flush=True)
            server.is_ready = server.answers_again = False
            self._last_loss = error
            if not any(server.is_ready for server in self.servers):
                self._alone_s = time.monotonic()
                print(f"no rollout server is left: waiting {self.config.server_timeout:.0f} s for one", flush=True)
            server.num_lost += 1
            self._slots.notify_all()
        threading.Thread(target=self._recover, args=(server, server.num_lost), daemon=True).start()

    def _recover(self, server: Server, num_lost: int) -> None:
        """Ask a lost server, until it serves, or is lost anew, whether it can take the weights."""
        server.abort()  # what it has in flight goes to others, where it still listens: it may stand paused in an update
        while server.num_lost == num_lost and not server.is_ready:
            if not server.answers_again and time.monotonic() >= server.retry_s and server.answers():
                server.answers_again = self._reopened(server)
            if self._is_closed.wait(PROBE_S):
                return

    @property
    def returned(self) -> list[Server]:
        """Lost servers that answer again, connected, and are waiting for the current weights."""
        return [server for server in self.servers if server.answers_again and not server.is_ready]

    def admit(self, server: Server) -> None:
        """Let it serve: it has the current weights, and computes with them what the trainer does."""
        with self._slots:
            server.is_ready = True
            self._slots.notify_all()
        print(f"{server.url} is back", flush=True)

    def keep_out(self, server: Server, reason: object) -> None:
        """It answers, and cannot be used: try again in a while. The reason is told once."""
        server.answers_again, server.retry_s = False, time.monotonic() + RETRY_S
        if str(reason) != server.why_out:
            server.why_out = str(reason)
            print(f"{server.url} answers again, but stays left out: {reason}", flush=True)

    def generate(self, prompt_ids: list[int], sampling: dict[str, Any], **options: Any) -> list[Completion]:
        """`Server.generate` on the server with the fewest groups in flight, for a request on its own."""
        with self.lease() as server:
            return server.generate(prompt_ids, sampling, **options)

    def idle_seconds(self) -> float:
        """Seconds without a group in flight since this was last asked, mean over the servers."""
        with self._slots:
            now = time.monotonic()
            for server in self.servers:
                if server.in_flight == 0:
                    server.idle_s += now - server.idle_since
                    server.idle_since = now
            idle = [server.idle_s for server in self.servers]
            for server in self.servers:
                server.idle_s = 0.0
            return sum(idle) / len(idle)

    def connect(self, device: torch.device) -> None:
        """Open one weight-transfer group per server.

        Raises:
            ServerError: a server refuses, or its workers do not come.
        """
        self._device = device
        for server in self.servers:
            try:
                server.connect(device, self.config.sync_timeout)
            except RuntimeError as error:
                raise ServerError(
                    f"{server.url} and the trainer cannot open a weight-transfer group: {str(error).splitlines()[0]}"
                ) from error

    def clear_weights(self) -> None:
        """As `Server.clear_weights`, of all."""
        self._on(self.servers, Server.clear_weights)

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: int, only_returned: bool = False
    ) -> list[Server]:
        """Publish a policy on every server, side by side: pause, stream bucket by bucket, resume.

        Requests in flight are kept and go on under the new weights; their K/V is recomputed on resume, and the prefix
        cache is emptied, so that no old K/V serves a new request. A lost server that answers again takes part.

        Args:
            weights: `(checkpoint name, tensor in its checkpoint's shape)`, consumed to the end.
            version: policy version that completions report from now on.
            only_returned: the others have it.

        Returns:
            Servers that were lost, and now have the weights: for `admit`.
        """
        returned = self.returned
        servers = returned if only_returned else [s for s in self.servers if s.is_ready] + returned
        try:
            servers = self._on(servers, Server.pause)  # all of them first: one that hangs keeps no other waiting
            for server in servers:
                server.begin_update()
            for bucket in chain(buckets(weights), [{}, None]):  # one loads while the trainer gathers the next
                servers = self._on(servers, partial(Server.send, bucket=bucket))
            servers = self._on(servers, partial(Server.end_update, version=version))
            return [server for server in servers if server in returned]
        except BaseException:
            for server in servers:
                server.disconnect()  # a server that waits for the rest of the stream would not hear the next request
            for server in servers:
                server.abort()  # to go on with half of the weights would end its engine; the next sync resumes it
            raise

    def _on(self, servers: list[Server], step: Callable[[Server], Any]) -> list[Server]:
        """A step on every server, side by side; those that did it. A server that fails does not stop the others."""
        replies = [(server, self._control.submit(step, server)) for server in servers]
        for server, reply in replies:
            error = reply.exception()
            if error and not isinstance(error, RuntimeError):  # as a ServerError is, and one of a group that is gone
                raise error
            if error and server.is_ready:
                self.lose(server, error)
            elif error:
                self.keep_out(server, error)
        return [server for server, reply in replies if not reply.exception()]

    def _reopened(self, server: Server) -> bool:
        """Whether a server that answers again can be used; it is then connected, its weights zeroed.

        Why it cannot be is printed, not raised.
        """  # noqa: DOC501  # caught here
        server.disconnect()
        try:
            if (longest := self._when_ready(server, deadline=0.0)) < self._longest:
                raise ServerError(f"its --max-model-len is {longest}, this run's {self._longest}: restart it with that")
            server.connect(self._device, self.config.sync_timeout)
            server.clear_weights()
        except RuntimeError as error:  # a ServerError, or not all of its workers came to the transfer group
            self.keep_out(server, error)
            return False
        return True

    def close(self) -> None:
        """Leave the transfer groups and drop what is still waiting."""
        self._is_closed.set()
        self._control.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            server.disconnect()


def _all_choices(num: int, reply: requests.Response) -> tuple[list[Completion], list[int]]:
    """The completions of a reply, and the prompt's tokens as the server has them."""
    body = reply.json()
    return _completions(body["choices"], num), body.get("prompt_token_ids") or []


def _first_to_finish(num: int, reply: requests.Response) -> tuple[list[Completion], list[int]]:
    # as `_all_choices`, of the first ones of a stream that end
    found: dict[int, dict[str, Any]] = {}
    finished: list[dict[str, Any]] = []
    prompt_ids: list[int] = []
    for line in reply.iter_lines():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise ValueError(f"the stream broke off: {chunk['error']}")
        prompt_ids = chunk.get("prompt_token_ids") or prompt_ids  # the first chunk has them
        for part in chunk["choices"]:
            choice = found.setdefault(part["index"], {"token_ids": [], "logprobs": {"content": []}})
            choice["token_ids"] += part["token_ids"] or []
            choice["logprobs"]["content"] += (part["logprobs"] or {}).get("content") or []
            if part["finish_reason"]:
                finished.append({**part, **choice})
        if len(finished) >= num:
            return _completions(finished[:num], num), prompt_ids
    raise ValueError(f"the stream ended after {len(finished)} of {num} completions")


def _completions(choices: list[dict[str, Any]], num: int) -> list[Completion]:
    if len(choices) != num:
        raise ValueError(f"{len(choices)} of {num} completions")
    return [_completion(choice) for choice in choices]


def _completion(choice: dict[str, Any]) -> Completion:
    # of /inference/v1/generate; a version other than a number is a server that was never synced: -1
    token_ids = choice["token_ids"] or []
    logprobs = [token["logprob"] for token in (choice["logprobs"] or {}).get("content") or []]
    if not all(type(token) is int and token >= 0 for token in token_ids):
        raise ValueError("token_ids that are none")
    if len(logprobs) != len(token_ids) or not all(
        isinstance(p, int | float) and NO_LOGPROB < p < math.inf for p in logprobs
    ):
        raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probs, or ones that are not finite")
    if not token_ids or choice["finish_reason"] not in ("stop", "length"):
        raise ServerLost(f"a server ended a completion by {choice['finish_reason']!r} after {len(token_ids)} tokens")
    spans = [
        (int(s["version"]) if s["version"].isdecimal() else -1, s["start"], s["end"]) for s in choice["weight_versions"]
    ]
    if [place for _, start, end in spans for place in range(start, end)] != list(range(len(token_ids))):
        raise ValueError(f"weight_versions {spans} for {len(token_ids)} tokens")
    return Completion(token_ids, logprobs, choice["finish_reason"], spans)
