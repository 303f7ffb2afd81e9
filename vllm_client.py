"""From dataset rows to scored groups: prompts, the HTTP client of the rollout servers (`vllm_server.py`), rewards.

The client samples completions, publishes weights and watches health; `RolloutStream` keeps the servers busy ahead of
the trainer. Nothing here imports vLLM.
"""

import base64
import hashlib
import inspect
import io
import json
import math
import os
import resource
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain, product
from numbers import Real
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor
from torch.distributed import TCPStore

from config import TrainConfig, UserError, is_data_file
from recipes.workers import CallError, CallPool
from utils import TransferGroup, address_towards, api_token, buckets, in_threads

NO_LOGPROB = -9999.0  # what vLLM's API makes of NaN and minus infinity
MAX_SHOWN = 2000  # characters of a column in completions.jsonl
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
class Prompt:
    """One problem: what the server gets, and what the rewards see.

    Attributes:
        index: row in the dataset.
        token_ids: the prompt, tokenized once, every placeholder of an image expanded to the tokens it stands for.
        content: the dataset's `prompt` (string or chat messages), for rewards and people.
        columns: the other columns that the rewards want.
        sources: its images as the dataset has them.
        images: the same, processed; None before it is sampled, and for text.
    """

    index: int
    token_ids: list[int]
    content: Any
    columns: dict[str, Any]
    sources: list[Any] = field(default_factory=list)
    images: Images | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Its images for the policy: `Images.inputs`, or {} without images, or before they are processed."""
        return self.images.inputs if self.images else {}


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


@dataclass
class Group:
    """One prompt and its completions: the unit from the dataset to the gradient, filled in on its way.

    Attributes:
        completions, texts: as sampled, and decoded for rewards and people.
        rewards: [num_generations][num_reward_funcs], None where a function does not apply.
        reward: [num_generations], weighted sums; NaN where no function applies.
        advantages: [num_generations].
        id: its place in the order of admission.
        started_version, finished_version: of the policy when its request was sent (-1 before), and when its rewards
            were known.
        started_s, sampled_s, scored_s: when that was, on the monotonic clock.
    """

    prompt: Prompt
    completions: list[Completion] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[list[float | None]] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    id: int = 0
    started_version: int = -1
    finished_version: int = 0
    started_s: float = 0.0
    sampled_s: float = 0.0
    scored_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens of the group, the prompt counted once per completion."""
        return sum(len(self.prompt.token_ids) + len(c.token_ids) for c in self.completions)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled one of its tokens."""
        return min((span[0] for c in self.completions for span in c.weight_versions), default=self.finished_version)

    @property
    def have_reward(self) -> list[bool]:
        """Which completions have one; all of them before any is scored."""
        return [not math.isnan(r) for r in self.reward] or [True] * len(self.completions)

    @property
    def can_teach(self) -> bool:
        """Whether its rewards differ, so that its advantages do."""
        return len({r for r in self.reward if not math.isnan(r)}) > 1


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
        config: vllm_urls, request_timeout, max_concurrent_requests, server_timeout, model_id.
        processor: of the model, for images and rollout functions.
        forbidden: tokens that are never sampled.

    Raises:
        UserError: `VLLM_API_KEY` is not ASCII.
    """

    def __init__(self, config: TrainConfig, processor: Any = None, forbidden: Sequence[int] = ()):
        self.config = config
        self.processor = processor
        if not api_token().isascii():
            raise UserError("VLLM_API_KEY has other characters than ASCII: no header can carry it")
        limits = (config.request_timeout, 0)
        self.servers = [Server(url, *limits, tokenizer_of(processor), forbidden) for url in config.vllm_urls]
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


# --------------------------------------------------------------------------------------------------------------------
# Prompts


def load_processor(config: TrainConfig) -> Any:
    """The processor of `model_id`, which takes text and images; its tokenizer where it has no other.

    Raises:
        UserError: no such model, an adapter alone, or `processor_kwargs` that it does not take.
    """
    from transformers import AutoProcessor

    given = config.processor_kwargs or {}
    folder = Path(config.model_id)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(
            f"model_id={folder} is a LoRA adapter: give it merged (merge_and_unload, save_pretrained), or go on from "
            "it with resume_from_checkpoint"
        )
    try:
        processor = AutoProcessor.from_pretrained(
            config.model_id,
            trust_remote_code=config.trust_remote_code,
            mistral_format=False,  # its tokenizer, which transformers prefers where vLLM is, has no chat template
            **given,
        )
        of_images = getattr(getattr(processor, "image_processor", None), "valid_kwargs", None)
        known = {*inspect.signature(type(processor)).parameters, *(get_type_hints(of_images) if of_images else ())}
        if unknown := sorted(set(given) - known):
            raise UserError(
                f"processor_kwargs: the model's processor takes no {unknown[0]}, but {', '.join(sorted(known))}"
            )
        return processor
    except OSError as error:
        raise UserError(
            f"model_id={config.model_id}: no such path, and the hub has no such model ({str(error).splitlines()[0]})"
        ) from None


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def placeholder_ids(owner: Any) -> list[int]:
    """Tokens that stand for images and the like, by a model's configuration or processor.

    A policy's forward could not take one that was sampled.
    """
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return [token for name in names if (token := getattr(owner, name, None)) is not None]


def sampling_params(config: TrainConfig) -> dict[str, Any]:
    """vLLM's sampling parameters for a group; what the config leaves at None is not sent."""
    guides = {"regex": config.guided_regex, "json": config.guided_json}
    params = {
        "n": config.num_generations,
        "max_tokens": config.max_completion_len,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "stop": config.stop,
        "structured_outputs": {name: guide for name, guide in guides.items() if guide} or None,
        **(config.sampling_params or {}),
    }
    return {name: value for name, value in params.items() if value is not None}


def load_rows(source: str | Callable[[], Any], split: str, config: TrainConfig) -> list[dict[str, Any]]:
    """The rows of a function, a local `.jsonl`/`.parquet` file or a `datasets` name.

    Raises:
        UserError: no such file or data set, one that cannot be read, or no rows.
    """
    if callable(source):
        rows = list(source())
    else:
        path = Path(source)
        if is_data_file(source) and not path.is_file():
            raise UserError(f"dataset file {source} does not exist")
        if path.is_file() and not is_data_file(source):
            raise UserError(f"dataset file {source} must be .jsonl (one object a line) or .parquet")
        rows = _jsonl_rows(path) if path.suffix == ".jsonl" else _datasets_rows(source, split, config)
    if config.collate_fn:
        assert callable(config.collate_fn)
        try:
            rows = config.collate_fn(rows)
        except Exception as error:
            raise UserError(
                f"collate_fn raised {type(error).__name__}: {error}; it gets the list of all rows, and returns one"
            ) from error
    if not rows:
        raise UserError(
            f"dataset {source if isinstance(source, str) else getattr(source, '__name__', source)} has no rows"
        )
    return rows


def _jsonl_rows(path: Path) -> list[dict[str, Any]]:
    # as they stand: `datasets` would turn strings that look like dates into dates
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not in UTF-8: {error}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON: {error}") from None
    return rows


def _datasets_rows(source: str, split: str, config: TrainConfig) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        if source.endswith(".parquet"):
            return list(_undecoded(load_dataset("parquet", data_files=source, split="train")))
        subset = config.dataset_config if source == config.dataset_id else None
        return list(_undecoded(load_dataset(source, subset, split=split)))
    except (OSError, ValueError) as error:  # ConnectionError, DatasetNotFoundError, an unknown split
        raise UserError(f"dataset {source} cannot be loaded: {str(error).splitlines()[0]}") from error


def _undecoded(dataset: Any) -> Any:
    """The data set with its images as bytes and paths: pixels are made when they are needed."""
    from datasets import Image, List

    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return dataset


def prompt_text(processor: Any, prompt: Any, num_images: int, config: TrainConfig) -> tuple[str, bool]:
    """What the tokenizer gets for a string or chat messages, and whether special tokens (BOS) are still to be added.

    The chat template writes them where it applies. Images stand where the messages have `{"type": "image"}`, or else
    before the text of the first user message.

    Raises:
        ValueError: the template does not take the messages, or there is none.
    """
    owner = processor if getattr(processor, "chat_template", None) else tokenizer_of(processor)
    takes_parts = hasattr(processor, "image_processor")
    if isinstance(prompt, str) and (config.no_apply_chat_template or not owner.chat_template):
        return prompt, True
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if takes_parts:  # and so does its template
        missing = num_images if num_images and not any(map(is_image, chain.from_iterable(map(parts, messages)))) else 0
        written = []
        for message in messages:
            placeholders = [{"type": "image"}] * missing if message["role"] == "user" else []
            missing -= len(placeholders)
            written.append({**message, "content": [*placeholders, *parts(message)]})
        messages = written
    from jinja2 import TemplateError

    try:
        is_begun = messages[-1]["role"] == "assistant"  # the completion goes on from there
        text = owner.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not is_begun, continue_final_message=is_begun
        )
    except (TemplateError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"has messages that the model's chat template does not take: {error}") from error
    bos = tokenizer_of(processor).bos_token  # which LLaVA's template leaves to the tokenizer, as transformers has it
    return text, takes_parts and not (bos and text.startswith(bos))


def parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat message's content as parts."""
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def is_image(part: dict[str, Any]) -> bool:
    """Whether a part of a message is an image, or the place of one."""
    return part.get("type") in ("image", "image_url")


def take_images(row: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A row's `prompt` without images, and its images: of the column `image` or `images`, or from within messages.

    Keys without a value, which `datasets` gives every part that has one in another row, are left out.

    Raises:
        ValueError: images in two places, or in another number than the messages have places; or what is no message.
    """
    prompt = row["prompt"]
    columns = [value for name in ("image", "images") if (value := row.get(name)) is not None]
    if len(columns) > 1:
        raise ValueError("has both `image` and `images`: leave one of them out")
    images = [image for value in columns for image in (value if isinstance(value, list | tuple) else [value])]
    if isinstance(prompt, str):
        return prompt, images
    for message in prompt:
        _check_message(message)
    inside: list[Any] = []
    messages = []
    for message in prompt:
        if not isinstance(message.get("content"), list):
            messages.append(message)
            continue
        content = [{key: value for key, value in part.items() if value is not None} for part in message["content"]]
        for part in filter(is_image, content):
            found = part.get("image") or part.get("url") or part.get("path") or part.get("image_url")
            if isinstance(found, dict) and "url" in found:
                found = found["url"]
            inside += [found] if found else []
        bare = [{"type": "image"} if is_image(part) else part for part in content]
        messages.append({**message, "content": bare})
    if inside and images:
        raise ValueError("has images both in its messages and in a column: leave one of them out")
    images = inside or images
    places = sum(is_image(part) for message in messages for part in parts(message))
    if places not in (0, len(images)):
        raise ValueError(
            f"has {len(images)} images for the {places} places in its messages: give them in a column, or as `image`, "
            "`url`, `path` or `image_url` of each place"
        )
    return messages, images


def _check_message(message: Any) -> None:
    # refuses what is no chat message, or has parts that a template would leave out without a word
    content = message.get("content") if isinstance(message, dict) and "role" in message else 0
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if odd := [part for part in content if part.get("type") not in ("text", "image", "image_url")]:
            raise ValueError(f"has a message with a part that is neither of type text nor image: {odd[0]!r:.100}")
    elif not (isinstance(content, str) or (content is None and ("content" in message or "tool_calls" in message))):
        raise ValueError(
            f"has a message that is not {{'role': ..., 'content': string or list of typed parts}}: {message!r:.100}"
        )


def open_image(source: Any) -> Any:
    """A PIL image, upright and in RGB, from one, a path, URL, data URI, bytes, or `datasets`' `bytes` and `path`."""
    from PIL import Image
    from transformers.image_utils import load_image

    if isinstance(source, dict):
        source = next((found for key in ("bytes", "path", "url") if (found := source.get(key))), source)
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if isinstance(source, str) and not source.startswith(("http://", "https://", "data:")):
        source = Image.open(source.removeprefix("file://"))
    return load_image(Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source)


def fingerprint(prompts: list[Prompt]) -> str:
    """A hash of prompts' tokens, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt.token_ids).encode())
    return digest.hexdigest()


def downloaded(source: Any) -> Any:
    """The bytes behind a URL, so that it is asked once; any other source as it is.

    Raises:
        OSError: it does not answer within 30 s, or with an error.
    """
    url = source.get("url") if isinstance(source, dict) else source
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return source
    reply = requests.get(url, timeout=30)
    reply.raise_for_status()
    return reply.content


def with_images(prompt: Prompt, processor: Any, config: TrainConfig) -> Prompt:
    """The prompt with its images processed and its tokens expanded; one of text, or processed before, as it is.

    A URL among its sources is replaced by what it answered.

    Raises:
        UserError: an image cannot be read or has no place in the prompt, or the processor refuses it; names the row.
    """
    from huggingface_hub.errors import StrictDataclassError

    if not prompt.sources or prompt.images:
        return prompt
    where = f"dataset row {prompt.index}"
    sources, images = [], []
    for source in prompt.sources:
        try:
            sources.append(downloaded(source))
            images.append(open_image(sources[-1]))
        except Exception as error:  # whatever Pillow, requests or a broken file may raise
            name = source if isinstance(source, str) else type(source).__name__
            cause = f"no such file in {Path.cwd()}" if isinstance(error, FileNotFoundError) else error
            raise UserError(f"{where}: the image {name:.100} cannot be read: {cause}") from error
    text, add_special_tokens = prompt_text(processor, prompt.content, len(images), config)
    server_ids = tokenizer_of(processor)(text, add_special_tokens=add_special_tokens)["input_ids"]
    place = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    num_places = text.count(place) if place else 0
    if num_places not in (0, len(images)):
        raise UserError(f"{where}: its text has {num_places} placeholders ({place}) for its {len(images)} images")
    try:
        batch = processor(text=[text], images=[images], add_special_tokens=add_special_tokens, return_tensors="pt")
    except (ValueError, TypeError, IndexError, RuntimeError, StrictDataclassError) as error:
        cause = " ".join(str(error).split())
        raise UserError(f"{where}: the model's processor does not take its {len(images)} images: {cause}") from error
    token_ids = batch["input_ids"][0].tolist()
    if num_places == 0 and token_ids == server_ids:
        raise UserError(f"{where}: its prompt has no place for its {len(images)} images: use chat messages")
    inputs = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor)
        and name not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    }
    urls = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "png", compress_level=1)
        urls.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return replace(
        prompt, token_ids=token_ids, sources=sources, images=Images(server_ids, len(token_ids), urls, inputs)
    )


def load_prompts(
    source: str | Callable[[], Any], split: str, processor: Any, max_prompt_len: int, config: TrainConfig
) -> list[Prompt]:
    """Prompts with their token ids and reward columns; those over `max_prompt_len` tokens are counted and left out.

    Every image is read and processed once here, so that a broken one shows at once, and again when it is sampled: only
    its tokens are kept.

    Raises:
        UserError: a row without a usable `prompt`, a column that does not exist or is named as a reward's own argument,
            an image that cannot be read or that the model does not take, or nothing left.
    """  # noqa: DOC501  # ValueError is caught here
    rows = load_rows(source, split, config)
    videos = set(placeholder_ids(processor)) - {getattr(processor, "image_token_id", None)}
    prompts = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list) or not row["prompt"]:
            raise UserError(
                f"dataset row {index} has no `prompt` (string or chat messages); its columns are "
                f"{sorted(row) if isinstance(row, dict) else type(row).__name__}"
            )
        ours = ("prompt", "image", "images")
        wanted = [name for name in row if name not in ours] if config.extra_columns is None else config.extra_columns
        if missing := [name for name in wanted if name not in row]:
            raise UserError(
                f"dataset row {index} has no column {missing[0]}, which extra_columns names; it has {sorted(row)}"
            )
        if taken := {"prompts", "completions", "completion_ids"} & set(wanted):
            raise UserError(f"dataset column {taken.pop()} is the name of a reward's own argument: rename it")
        try:
            content, images = take_images(row)
            if images and not hasattr(processor, "image_processor"):
                raise ValueError(f"has images, and model_id={config.model_id} takes none")
            text, add_special_tokens = prompt_text(processor, content, len(images), config)
            token_ids = tokenizer_of(processor)(text, add_special_tokens=add_special_tokens)["input_ids"]
        except ValueError as error:
            raise UserError(f"dataset row {index} {' '.join(str(error).split())}") from error
        if placeholders := set(token_ids) & set(placeholder_ids(processor) if not images else videos):
            token = tokenizer_of(processor).convert_ids_to_tokens(placeholders.pop())
            raise UserError(f"dataset row {index}: its prompt has a placeholder ({token}), and nothing for it")
        prompts.append(Prompt(index, token_ids, content, {name: row[name] for name in wanted}, images))
    prompts = in_threads(
        lambda p: replace(with_images(p, processor, config), images=None), prompts, os.cpu_count() or 1
    )
    kept = [prompt for prompt in prompts if 0 < len(prompt.token_ids) <= max_prompt_len]
    if len(kept) < len(prompts):
        print(f"left out {len(prompts) - len(kept)} of {len(prompts)} prompts: empty, or over {max_prompt_len} tokens")
    if not kept:
        raise UserError(
            f"no prompt has at most {max_prompt_len} tokens, the room that max_completion_len="
            f"{config.max_completion_len} leaves in the server's --max-model-len and in max_tokens_per_gpu"
        )
    return kept


# --------------------------------------------------------------------------------------------------------------------
# Rewards


def check_rewards(prompts: list[Prompt], config: TrainConfig) -> None:
    """Refuse reward functions that cannot be called with the columns of the data.

    Raises:
        UserError: one wants a column that is not there, or does not take one that is; names the row.
    """
    rows = {tuple(prompt.columns): prompt.index for prompt in reversed(prompts)}  # the first with each set of columns
    functions = chain.from_iterable(getattr(f, "functions", [f]) for f in config.reward_funcs)
    for function, (columns, row) in product(functions, rows.items()):
        assert callable(function)
        names = ["prompts", "completions", "completion_ids", *columns]
        try:
            inspect.signature(function).bind(**dict.fromkeys(names))
        except TypeError as error:
            where = f" on dataset row {row}" if len(rows) > 1 else ""
            raise UserError(f"reward {function.__name__}{where}: {error}; it gets {', '.join(names)}") from None


class Scorer:
    """Calls the reward functions, in workers of their own, and keeps account of what fails.

    Args:
        tokenizer: decodes completions.
        config: reward_funcs, reward_weights, reward_workers, reward_timeout, failed_reward, batch_size, output_dir.
    """

    def __init__(self, tokenizer: Any, config: TrainConfig):
        self.tokenizer = tokenizer
        self.config = config
        self.num_failed = 0
        self._is_closed = False
        self._in_a_row: Counter[str] = Counter()
        self._told: set[str] = set()
        self._calls = CallPool(config.reward_workers)
        self._lock = threading.Lock()
        self.failed_path = Path(config.output_dir) / "failed_rewards.jsonl"

    def score(self, group: Group) -> None:
        """Fill in the group's `texts`, `rewards` and `reward`. Thread-safe.

        Raises:
            UserError: a function returns something else than one finite number or None per completion, or fails time
                after time; the message names it and the dataset row.
            CallError: it was closed meanwhile.
        """
        group.texts = [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in group.completions]
        columns = [self._call(function, group) for function in self.config.reward_funcs]
        group.rewards = [list(row) for row in zip(*columns, strict=True)]
        weights = self.config.reward_weights or [1.0] * len(columns)
        parts = [
            [w * r for w, r in zip(weights, row, strict=True) if r is not None] or [math.nan] for row in group.rewards
        ]
        group.reward = [sum(row) for row in parts]
        group.scored_s = time.monotonic()

    def _call(self, function: Any, group: Group) -> list[float | None]:
        """One reward per completion from `f(prompts, completions, completion_ids, **columns)`.

        Raises:
            UserError: as `score`.
            CallError: the workers were ended meanwhile.
        """
        num = len(group.completions)
        name, where = function.__name__, f"reward {function.__name__} on dataset row {group.prompt.index}"
        arguments = {
            "prompts": [group.prompt.content] * num,
            "completions": group.texts,
            "completion_ids": [list(c.token_ids) for c in group.completions],  # the function's own, to change at will
            **{column: [value] * num for column, value in group.prompt.columns.items()},
        }
        try:
            values = self._calls.call(function, arguments, self.config.reward_timeout)
        except CallError as error:
            if self._is_closed:
                raise
            self._count_failure(name, f"{where} {error}", group)
            return [self.config.failed_reward] * num
        with self._lock:
            self._in_a_row[name] = 0
        if not isinstance(values, list | tuple) or len(values) != num:
            got = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
            raise UserError(f"{where} returned {got}: it must return a list of {num} numbers, one per completion")
        for value in values:
            if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
                raise UserError(f"{where} returned {value!r}: rewards are finite numbers or None")
        return [None if value is None else float(value) for value in values]

    def _count_failure(self, name: str, message: str, group: Group) -> None:
        """Write the failed call down; a function that only ever fails ends the run.

        Raises:
            UserError: so did its last calls, `batch_size` of them and at least 4.
        """
        sample = {"error": message, "prompt": group.prompt.content, "completions": group.texts}
        line = json.dumps({**sample, "columns": group.prompt.columns}, ensure_ascii=False, default=repr)
        with self._lock:
            with self.failed_path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self.num_failed += 1
            self._in_a_row[name] += 1
            if name not in self._told:
                self._told.add(name)
                print(
                    f"{message} (further failures are counted in rewards_failed, and in {self.failed_path})",
                    flush=True,
                )
            if self._in_a_row[name] >= max(self.config.batch_size, 4):
                raise UserError(f"{message}; so did its last {self._in_a_row[name]} calls, see failed_rewards.jsonl")

    def close(self) -> None:
        """End the workers."""
        self._is_closed = True
        self._calls.close()


# --------------------------------------------------------------------------------------------------------------------
# The stream


def sample_group(group: Group, client: VLLMClient, sampling: dict[str, Any], config: TrainConfig) -> None:
    """Fill in the group's `completions`, by one request or the recipe's `rollout_fn`, all on one server.

    Raises:
        ServerError: as `Server.generate`, with the dataset row, or no server is left.
        UserError: `rollout_fn` raises, or returns something else than `n` completions that fit a micro-batch; or as
            `with_images`.
    """
    failures = 0
    group.prompt = with_images(group.prompt, client.processor, config)
    if config.max_staleness == 0 and not config.rollout_fn:  # nothing else depends on time; completions count on
        seed = (config.seed << 40) + group.id * 2 * (sampling["n"] + config.extra_generations)
        sampling = {"seed": seed % 2**63, **sampling}
    while not group.completions:
        with client.lease() as server:
            try:
                completions = _sampled_by(server, group.prompt, sampling, config)
            except ServerLost as error:  # another one starts the group anew
                if not (server.is_ready and server.answers()):
                    client.lose(server, error)
                elif (failures := failures + 1) == 3:  # it is not the servers
                    raise ServerError(f"dataset row {group.prompt.index}: {error}, though it is healthy") from error
            except ServerError as error:
                raise ServerError(f"dataset row {group.prompt.index}: {error}") from None
            else:
                if any(span[0] < 0 for c in completions for span in c.weight_versions):
                    client.lose(server, ServerLost("it sampled with weights of its own: was it restarted?"))
                else:
                    group.completions = completions
    group.sampled_s = time.monotonic()


def _sampled_by(server: Server, prompt: Prompt, sampling: dict[str, Any], config: TrainConfig) -> list[Completion]:
    if config.rollout_fn is None:
        extra = config.extra_generations if sampling["n"] > 1 else 0
        return server.generate(prompt.token_ids, sampling, extra, prompt.images)
    assert callable(config.rollout_fn)
    where = f"rollout_fn on dataset row {prompt.index}"
    try:
        completions = config.rollout_fn(server, prompt, sampling)
    except ServerError:
        raise
    except Exception as error:
        raise UserError(f"{where} raised {type(error).__name__}: {error}") from error
    check_rollout(completions, prompt, sampling["n"], where, config, server.forbidden)
    return completions


def check_rollout(
    completions: Any, prompt: Prompt, num: int, where: str, config: TrainConfig, forbidden: Sequence[int] = ()
) -> None:
    """Refuse what a `rollout_fn` returned, unless it is `num` completions that can be trained.

    Raises:
        UserError: says `where`, and what is wrong.
    """
    if not isinstance(completions, list) or not all(isinstance(c, Completion) for c in completions):
        raise UserError(f"{where} must return a list of Completion")
    if len(completions) != num:
        raise UserError(f"{where} returned {len(completions)} completions: sampling asks for n={num}")
    for c in completions:
        if not c.token_ids:
            raise UserError(f"{where} returned an empty completion")
        if not set(forbidden).isdisjoint(c.token_ids):
            raise UserError(f"{where} returned a completion with the placeholder of an image, which no policy takes")
        if len({len(c.token_ids), len(c.sampler_logprobs), len(c.sampled)}) > 1:
            raise UserError(f"{where} returned ids, log-probs and loss mask of different lengths: join with `then`")
        covered = [place for _, start, end in c.weight_versions for place in range(start, end)]
        if covered != [place for place, sampled in enumerate(c.sampled) if sampled]:
            raise UserError(
                f"{where} returned weight_versions that are not those of the sampled tokens: join with `then`"
            )
        if (length := len(prompt.token_ids) + len(c.token_ids)) > config.max_tokens_per_gpu:
            raise UserError(f"{where} returned {length} tokens with the prompt, over max_tokens_per_gpu: raise it")


DROP_REASONS = ("stale", "zero_advantage")


class RolloutStream:
    """Scored groups for the trainer, sampled ahead of it within the bound on staleness. Lives on rank 0.

    A prompt is admitted while groups accepted + running < (max_staleness + version + 1) x batch_size: what is dropped
    is replaced by itself, and at staleness 0 exactly the batch to be trained is sampled. Every group ends once: taken,
    or dropped with a reason. No more groups can have begun by version v than the batches up to v + max_staleness hold,
    so that it always suffices to keep room for them, and to wait.

    Args:
        groups: endless, fresh ones, in the order of admission.
        sample: fills in a group's completions.
        score: fills in its rewards.
        num_threads: groups that are sampled or scored at a time.
        num_steps: batches to be taken in all.
        num_trained: groups that an earlier run took, of those.
        config: batch_size, max_staleness, stale_policy, drop_zero_advantage, max_dropped_batches.
    """

    def __init__(
        self,
        groups: Iterator[Group],
        sample: Callable[[Group], None],
        score: Callable[[Group], None],
        num_threads: int,
        num_steps: int,
        config: TrainConfig,
        num_trained: int = 0,
    ):
        self.config = config
        self.num_steps = num_steps
        self.dropped: list[tuple[Group, str]] = []  # with the reason, since the batch before
        self.version = -1
        self._groups, self._sample, self._score = groups, sample, score
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="rollout")
        self._changed = threading.Condition()
        self._running: dict[int, Group] = {}
        self._ready: list[Group] = []  # accepted and not yet taken, in the order they were completed
        self._num_accepted = num_trained
        self._num_sampled_tokens = 0
        self._waited_s, self._taken_groups = 0.0, list[Group]()
        self._failure: BaseException | None = None

    def open(self, version: int) -> None:
        """The servers now run policy `version`: admit what that allows."""
        with self._changed:
            self.version = version
            self._admit()

    def take(self, version: int, meanwhile: Callable[[], None] = lambda: None) -> Iterator[Group]:
        """The groups of the batch that trains policy `version`, each as soon as it may be trained.

        Args:
            version: of the policy that the batch trains.
            meanwhile: called about every second that is waited, and before each group.

        Raises:
            UserError, ServerError: what sampling or scoring raised.
        """
        for missing in range(self.config.batch_size, 0, -1):
            asked_s = told_s = time.monotonic()
            while (group := self._taken(version, missing)) is None:
                meanwhile()
                if time.monotonic() > told_s + 60 and self._running:
                    told_s = time.monotonic()
                    oldest = min(list(self._running.values()), key=lambda g: g.id)
                    print(f"waiting for rollouts; the oldest is of dataset row {oldest.prompt.index}", flush=True)
            assert version - group.oldest_version <= self.config.max_staleness
            meanwhile()
            self._waited_s += time.monotonic() - asked_s
            self._taken_groups.append(group)
            yield group

    def _taken(self, version: int, missing: int) -> Group | None:
        """The group to train next, waited for at most a second."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._next(version, missing) or self._failure, 1)
            if isinstance(found, BaseException):
                raise found
            if found:
                self._ready.remove(found)
            return found

    def report(self) -> tuple[dict[str, float], list[Group], list[tuple[Group, str]]]:
        """Metrics of the queues and since this was last asked; groups taken since then; groups dropped, and why."""
        with self._changed:
            values = {
                "queue/ready": len(self._ready),
                "queue/running": len(self._running),
                "time/wait_s": self._waited_s,
                "num_sampled_tokens": self._num_sampled_tokens,
                **{f"groups/dropped_{r}": sum(r == reason for _, reason in self.dropped) for r in DROP_REASONS},
            }
            taken, dropped = self._taken_groups, self.dropped
            self._waited_s, self._num_sampled_tokens, self._taken_groups, self.dropped = 0.0, 0, [], []
            return {name: float(value) for name, value in values.items()}, taken, dropped

    def close(self) -> None:
        """Admit and start nothing more."""
        with self._changed:
            self._failure = self._failure or ServerError("the stream of rollouts was closed")
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self) -> None:
        limit = min(self.config.max_staleness + self.version + 1, self.num_steps) * self.config.batch_size
        while self._num_accepted + len(self._running) < limit and not self._failure:
            group = next(self._groups)
            self._running[group.id] = group
            self._pool.submit(self._run, group)

    def _run(self, group: Group) -> None:
        try:
            with self._changed:
                if self._failure:
                    return
                group.started_version, group.started_s = self.version, time.monotonic()
            self._sample(group)
            with self._changed:
                self._num_sampled_tokens += sum(sum(c.sampled) for c in group.completions)
            seen = {span[0] for c in group.completions for span in c.weight_versions}
            published = range(group.started_version, self.version + 2)  # the last one: an update may be under way
            if odd := sorted(seen - set(published)):
                raise ServerError(
                    f"asked for policy version {published.start}, got {odd[0]}: does another trainer use the server?"
                )
            self._score(group)
        except BaseException as error:  # for the trainer's thread, which raises it
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            return
        with self._changed:
            del self._running[group.id]
            group.finished_version = self.version
            if self.config.drop_zero_advantage and not group.can_teach:
                self.dropped.append((group, "zero_advantage"))
                num = sum(reason == "zero_advantage" for _, reason in self.dropped)
                if num >= self.config.max_dropped_batches * self.config.batch_size:
                    self._failure = self._failure or UserError(
                        f"nothing to learn: {num} groups of this step were dropped, as all rewards within each were "
                        "equal; look at the rewards, or raise max_dropped_batches"
                    )
            else:
                self._num_accepted += 1
                self._ready.append(group)
            self._admit()
            self._changed.notify_all()

    def _next(self, version: int, missing: int) -> Group | None:
        """The group to train next, or None where one has to be waited for."""
        staleness = self.config.max_staleness
        if staleness == 0:  # in the order of admission, so that a run is the same whatever the servers' latencies
            first = min([*self._running, *(group.id for group in self._ready)], default=None)
            return next((group for group in self._ready if group.id == first), None)
        if self.config.stale_policy == "drop":
            for group in [g for g in self._ready if g.oldest_version + staleness < version]:
                self._ready.remove(group)
                self._num_accepted -= 1
                self.dropped.append((group, "stale"))
            self._admit()
            return self._ready[0] if self._ready else None
        # A group that began under policy v must be in batch v + staleness at the latest. Take the oldest that leaves
        # enough room in this batch and the next ones for all that are older than it, ready or still running.
        starts = [g.started_version for g in [*self._running.values(), *self._ready] if g.started_version >= 0]
        last_call = version - staleness
        for group in sorted(self._ready, key=lambda g: g.started_version):  # stable: else as they were completed
            later = range(group.started_version - last_call)
            if all(
                sum(start <= last_call + k for start in starts) <= missing - 1 + k * self.config.batch_size
                for k in later
            ):
                return group
        return None


# --------------------------------------------------------------------------------------------------------------------
# What is logged of a batch


def batch_metrics(groups: list[Group], version: int, config: TrainConfig) -> dict[str, float]:
    """What is known of a batch before it trains policy `version`: rewards, lengths, staleness, times."""
    completions = [c for group in groups for c in group.completions]
    rewards = torch.tensor([group.reward for group in groups], dtype=torch.float64)
    lengths = torch.tensor([float(len(c.token_ids)) for c in completions])
    stale = [[version - min((span[0] for span in c.weight_versions), default=version)] for c in completions]
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    spread = centred.square().nanmean(dim=1).sqrt().nan_to_num(0.0)
    return {
        "reward": rewards.nanmean().item(),
        "reward_std": spread.mean().item(),
        "frac_reward_zero_std": sum(not group.can_teach for group in groups) / len(groups),
        **reward_means(groups, config),
        "staleness/mean": torch.tensor(stale).double().mean().item(),
        "staleness/max": float(max(map(max, stale))),
        "staleness/in_flight": sum(g.finished_version - g.started_version for g in groups) / len(groups),
        "staleness/in_queue": sum(version - g.finished_version for g in groups) / len(groups),
        "completions/mean_length": lengths.mean().item(),
        "completions/clipped_ratio": sum(c.truncated for c in completions) / len(completions),
        "completions/weight_versions": sum(len({s[0] for s in c.weight_versions}) for c in completions)
        / len(completions),
        "time/generate_s": max(g.sampled_s for g in groups) - min(g.started_s for g in groups),
        "time/reward_s": sum(g.scored_s - g.sampled_s for g in groups),
    }


def reward_means(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """`rewards/<function>`: its mean over the completions that it gave a number."""
    means = {}
    for number, function in enumerate(config.reward_funcs):
        assert callable(function)
        given = [value for group in groups for row in group.rewards if (value := row[number]) is not None]
        means[f"rewards/{function.__name__}"] = sum(given) / len(given) if given else math.nan
    return means


def _shortened(value: Any) -> Any:
    """A column's value to look at: the data set has the whole of a long one, which every completion would repeat."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " …"


def batch_samples(groups: list[Group], config: TrainConfig) -> list[dict[str, Any]]:
    """One JSON object per completion, for `completions.jsonl`."""
    names = [function.__name__ for function in config.reward_funcs if callable(function)]
    return [
        {
            "group": group.id,
            "row": group.prompt.index,
            "prompt": group.prompt.content,
            "columns": columns,
            "completion": text,
            "reward": None if math.isnan(reward) else reward,
            "rewards": dict(zip(names, parts, strict=True)),
            "advantage": advantage,
            "finish_reason": completion.finish_reason,
            "weight_versions": completion.weight_versions,
        }
        for group in groups
        for columns in [{name: _shortened(value) for name, value in group.prompt.columns.items()}]
        for completion, text, parts, reward, advantage in zip(
            group.completions, group.texts, group.rewards, group.reward, group.advantages, strict=True
        )
    ]
