"""The HTTP side of rollouts: completions from the servers, and weights out to them. Nothing here imports vLLM."""

import math
import os
import re
import resource
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict
from urllib.parse import urlsplit

import msgspec
import requests
import torch
from torch import Tensor
from torch.distributed import TCPStore

from config import ADDRESS, TrainConfig, UserError
from utils import RIGHT_VLLM, VLLM_VERSION, api_token, naming
from weights.transfer import TransferGroup, address_towards, buckets

NO_LOGPROB = -9999.0  # what vLLM's API makes of NaN and minus infinity
CONTROL_TIMEOUT_S = 60.0  # for requests that have nothing to wait for
PROBE_S = 1.0  # between questions to a lost server
MAX_SERVERS = 1024  # that are told apart by their numbers
RETRY_S = 30.0  # before a server that answered, and could not be used, is tried again
_numbers = count()
TRAINER = os.urandom(
    16
).hex()  # names this process to servers, which take the weights of one trainer at a time


class ServerError(RuntimeError):
    """A rollout server could not be reached, or refused; the message says which one, why and what to do."""


class ServerLost(ServerError):
    """A server does not answer any more, or answers with errors of its own: another server may do its work."""


class Span(NamedTuple):
    """Tokens `start` to `end` of a completion, sampled under one policy version; -1 for weights no trainer sent."""

    version: int
    start: int
    end: int


@dataclass(eq=False)
class Completion:
    """What was sampled for a prompt; lists are taken as tensors. ValueError where the parts do not fit together."""

    token_ids: Any  # [n] int64, with the end-of-sequence token, where one was sampled
    sampler_logprobs: (
        Any  # [n] float32, nats, of each token, by the server: after temperature (and top-k/p)
    )
    finish_reason: str  # `stop` (the completion ended by itself) or `length` (it was cut off)
    weight_versions: list[Span]  # the tokens that were sampled, by policy version
    loss_mask: Any = (
        None  # [n] bool, False on tokens that an environment wrote; all True where it is not given
    )
    info: dict[str, Any] = field(
        default_factory=dict
    )  # what an environment knows: columns for the rewards, by name
    prompt_ids: Any = (
        None  # [m] int64, what it was sampled for, where that is not the prompt of its group
    )
    earlier: list["Completion"] = field(default_factory=list)  # the rollout's other segments

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        self.prompt_ids = (
            None if self.prompt_ids is None else torch.as_tensor(self.prompt_ids, dtype=torch.int64)
        )
        self.token_ids = torch.as_tensor(self.token_ids, dtype=torch.int64)
        self.sampler_logprobs = torch.as_tensor(self.sampler_logprobs, dtype=torch.float32)
        self.loss_mask = torch.as_tensor(
            torch.ones(n) if self.loss_mask is None else self.loss_mask, dtype=torch.bool
        )
        edges = [0, *(edge for _, start, end in self.weight_versions for edge in (start, end)), n]
        sampled = torch.zeros(n, dtype=torch.bool)
        for _, start, end in self.weight_versions:
            sampled[start:end] = True
        are_right = edges == sorted(edges) and torch.equal(sampled, self.loss_mask)
        if not len(self.sampler_logprobs) == n > 0 or not are_right:
            raise ValueError(
                "a completion needs tokens, with a log-prob each, and a version of each that was sampled"
            )

    @property
    def segments(self) -> list["Completion"]:
        """All segments of the rollout, itself the last; each token was sampled in one of them."""
        return [*self.earlier, self]

    @property
    def num_sampled(self) -> int:
        """How many tokens of its segments were sampled."""
        return sum(
            end - start for segment in self.segments for _, start, end in segment.weight_versions
        )

    def start_of(self, version: int) -> int:
        """Index of the first token that `version`, its last, sampled; the length where it sampled none."""
        return next(
            (span.start for span in self.weight_versions if span.version == version),
            len(self.token_ids),
        )

    def then(self, environment_ids: Sequence[int], reply: "Completion") -> "Completion":
        """Join this turn, the environment's answer and the policy's next turn; nothing is tokenized again."""
        said = torch.as_tensor(environment_ids, dtype=torch.int64)
        before, zeros = torch.cat([self.token_ids, said]), torch.zeros(len(said))
        are_known = self.prompt_ids is not None and reply.prompt_ids is not None
        if are_known and not torch.equal(torch.cat([self.prompt_ids, before]), reply.prompt_ids):
            raise ValueError("a reply is joined to a turn that it was not sampled for")
        moved = [
            Span(version, len(before) + start, len(before) + end)
            for version, start, end in reply.weight_versions
        ]
        return replace(
            self, token_ids=torch.cat([before, reply.token_ids]), finish_reason=reply.finish_reason,
            sampler_logprobs=torch.cat([self.sampler_logprobs, zeros, reply.sampler_logprobs]),
            loss_mask=torch.cat([self.loss_mask, zeros.bool(), reply.loss_mask]), earlier=self.earlier + reply.earlier,
            weight_versions=[*self.weight_versions, *moved], info=self.info | reply.info,
        )  # fmt: skip


class _Token(msgspec.Struct, gc=False):
    logprob: float


class _Span(TypedDict):
    version: str
    start: int
    end: int


class _Choice(
    msgspec.Struct
):  # what we read of a choice of /inference/v1/generate, or of a part of one in a stream
    index: int = 0
    finish_reason: str | None = None
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]] | None = None
    logprobs: dict[str, list[_Token] | None] | None = None  # under the name `content`
    weight_versions: list[_Span] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    error: Any = None


DECODER = msgspec.json.Decoder(_Reply)


def completion_of(choice: _Choice) -> Completion:
    """What a server sampled, checked: ValueError where a part of it is missing or makes no sense."""
    ids, content = choice.token_ids or [], (choice.logprobs or {}).get("content") or []
    if not ids or choice.finish_reason not in ("stop", "length"):
        raise ServerLost(
            f"a server ended a completion by {choice.finish_reason!r} after {len(ids)} tokens"
        )
    values = array("f", [token.logprob for token in content])
    if len(values) != len(ids) or not math.isfinite(sum(values)) or min(values) <= NO_LOGPROB:
        raise ValueError(f"of {len(ids)} tokens some log-probs are missing, or no finite numbers")
    parts = choice.weight_versions or ()
    spans = [
        Span(int(v) if (v := of["version"]).isdecimal() else -1, of["start"], of["end"])
        for of in parts
    ]
    token_ids = torch.frombuffer(
        array("q", ids), dtype=torch.int64
    )  # torch.tensor would take eight times as long
    return Completion(
        token_ids, torch.frombuffer(values, dtype=torch.float32), choice.finish_reason, spans
    )


def all_choices(num: int, reply: requests.Response) -> tuple[list[Completion], list[int]]:
    """The `num` completions of a reply, and the prompt's tokens as the server expanded them; or ValueError."""
    body = DECODER.decode(reply.content)
    if len(body.choices) != num:
        raise ValueError(f"{len(body.choices)} of {num} completions")
    return [*map(completion_of, body.choices)], body.prompt_token_ids or []


class Server:
    """One rollout server. A recipe's `rollout_fn` gets it, and uses `generate` and the model's `tokenizer`.

    One that `has_weights` serves; one that only `is_connected`, at the start and once it is back, waits for the current
    weights; any other is lost, and the client's watcher asks until it answers again.
    """

    def __init__(
        self, url: str, timeout_s: float, tokenizer: Any = None, forbidden: Sequence[int] = ()
    ):
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.number = next(_numbers) % MAX_SERVERS
        self.proved_version = (
            -1
        )  # the last under which its log-probs were found to agree with the trainer's
        self.tokenizer, self.forbidden = tokenizer, forbidden  # tokens that are never sampled
        self.is_connected = self.has_weights = self.was_ours = False
        self.retry_s = 0.0  # when a lost server may be tried again, on the monotonic clock
        self.in_flight, self.idle_since_s = 0, time.monotonic()
        self.transfer: TransferGroup | None = None
        self.sending, self.sending_s = None, 0.0  # the bucket under way, and since when
        self.lag_s = 0.0  # for how long it was later than half of the servers, in this update
        self.loading: Future[Any]  # the server's reply to the update under way

    def request(
        self, method: str, path: str, timeout_s: Any = None, read: Any = None, **kwargs: Any
    ) -> Any:
        """What `read` makes of the reply, or its JSON.

        `timeout_s` is in seconds, or a pair, to connect and to answer (None: no limit); None takes `request_timeout`. A
        4xx reply is a ServerError; no connection, a time-out, a 5xx or one that cannot be read is a ServerLost.
        """
        where = f"{method} {self.url}{path}"
        try:
            with requests.Session() as session:
                session.trust_env, session.stream = (
                    False,
                    True,
                )  # no proxy in between; `read` may stream
                session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
                if token := api_token():
                    session.headers["Authorization"] = f"Bearer {token}"
                # Leaving the block closes the connection: the server aborts what is left of a stream.
                with session.request(
                    method, self.url + path, timeout=timeout_s or self.timeout_s, **kwargs
                ) as reply:
                    if reply.status_code >= 400:
                        kind = ServerError if reply.status_code < 500 else ServerLost
                        cures = {
                            401: "set VLLM_API_KEY to the server's token",
                            404: RIGHT_VLLM * (method == "GET"),
                        }
                        cure, text = cures.get(reply.status_code), " ".join(reply.text.split())
                        raise kind(
                            f"{where} answered {reply.status_code}{f' ({cure})' if cure else ''}: {text[:500]}"
                        )
                    return read(reply) if read else reply.json() if reply.content else None
        except (requests.RequestException, msgspec.MsgspecError, ValueError) as error:
            cause: BaseException = error
            while (
                isinstance(error, requests.ConnectionError) and cause.__context__
            ):  # below "max retries exceeded"
                cause = cause.__context__
            raise ServerLost(f"{where} failed: {type(cause).__name__}: {cause}") from error

    def post(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: Any = CONTROL_TIMEOUT_S
    ) -> Any:
        """`request` by POST, with a JSON body."""
        return self.request("POST", path, timeout_s, json=body)

    def generate(
        self, prompt: Any, sampling: dict[str, Any], images: Any = None, timeout_s: Any = None,
        read: Callable[[int, requests.Response], tuple[Any, list[int]]] = all_choices, extra: int = 0,
    ) -> Any:  # fmt: skip
        """Sample `sampling["n"]` completions of `prompt`, the ids (a list, or [n]) of it and of earlier turns.

        `sampling` are vLLM's own parameters. The placeholders of `images` (`rollouts.data.Images`) stand first in
        `prompt`. `extra` more are streamed to `read`, whose return aborts the rest: `recipes/first_to_finish.py`.
        """
        prompt_ids, num = torch.as_tensor(prompt).tolist(), sampling.get("n", 1)
        params = {**sampling, "n": num + extra, "logprobs": 0}
        if self.forbidden:  # -100 is the lowest that the server takes, and as good as -inf
            params["logit_bias"] = (sampling.get("logit_bias") or {}) | dict.fromkeys(
                self.forbidden, -100.0
            )
        body: dict[str, Any] = {
            "token_ids": prompt_ids,
            "sampling_params": params,
            "stream": extra > 0,
        }
        text_ids = prompt_ids[images.num_tokens :] if images else prompt_ids
        if not set(self.forbidden).isdisjoint(text_ids):
            raise UserError(
                "a prompt with placeholders of images was sent without them: pass images=prompt.images"
            )
        if images:
            body |= {"token_ids": [*images.server_ids, *text_ids], "return_token_ids": True}
            body["content_parts"] = [{"type": "image_url", "url": url} for url in images.urls]
        completions, expanded = self.request(
            "POST", "/inference/v1/generate", timeout_s, partial(read, num), json=body
        )
        if images and expanded != prompt_ids:
            sizes = f"{len(expanded)} tokens on {self.url} and {len(prompt_ids)} here, or others of the same number"
            raise ServerError(
                f"a prompt has {sizes}: do both process images alike (--mm-processor-kwargs)?"
            )
        return [
            replace(completion, prompt_ids=torch.tensor(prompt_ids)) for completion in completions
        ]

    def answers(self) -> bool:
        """Whether the server calls itself healthy."""
        with suppress(ServerError):
            self.request("GET", "/health", timeout_s=5)
            return True
        return False

    def connect(
        self, device: torch.device, timeout_s: float, gpus: Sequence[str | None] = ()
    ) -> None:
        """Open a transfer group with the server's workers, and zero its weights; ServerError where it refuses."""
        self.pool = ThreadPoolExecutor(
            1
        )  # a fresh one: what a lost server was sent may still be waiting
        address = address_towards(urlsplit(self.url).hostname or "127.0.0.1")
        world_size = 1 + self.request("GET", "/get_world_size", CONTROL_TIMEOUT_S)["world_size"]
        try:
            store = TCPStore(
                address,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
            init_info = {
                "host": address,
                "port": store.port,
                "world_size": world_size,
                "timeout_s": timeout_s,
            }
            body = {"init_info": init_info | {"trainer": TRAINER}}
            # Both sides must enter the rendezvous, and a server that refuses never comes.
            reply = self.pool.submit(
                self.post, "/init_weight_transfer_engine", body, timeout_s + CONTROL_TIMEOUT_S
            )
            while not store.check(["member/1"]):
                if reply.done():
                    reply.result()
                    raise ServerError("it took the invitation, and its workers did not come")
                time.sleep(0.01)
            self.transfer = TransferGroup(store, 0, world_size, device, timeout_s, gpus)
            reply.result()
        except RuntimeError as error:
            raise ServerError(f"{self.url}: no weight-transfer group: {error}") from error
        print(f"{self.url} gets its weights over {self.transfer.backend}", flush=True)
        self.post(
            "/weight_checker", {"action": "reset"}
        )  # zeroes: log-probs can only agree if every weight arrives
        self.is_connected = self.was_ours = True

    def disconnect(self) -> None:
        """Leave the transfer group."""
        self.is_connected = self.has_weights = False
        transfer, self.transfer, self.sending = self.transfer, None, None
        if transfer is not None:
            transfer.close()

    def break_off(self, timeout_s: float = 5.0) -> None:
        """Leave the transfer group, and then end what is in flight, if the server still listens."""
        self.disconnect()  # first: a server that waits for the rest of a stream would not hear the next request
        with suppress(ServerError):
            self.post("/pause?mode=abort", timeout_s=timeout_s)

    def pause(self) -> None:
        """Make ready for new weights, under which requests in flight go on, with K/V made anew and no cached prefix."""
        self.lag_s = 0.0
        self.post("/pause?mode=keep&clear_cache=true")
        try:
            self.post("/start_weight_update")
        except ServerLost:  # perhaps as a trainer died between this and its first bucket
            with suppress(ServerError):
                self.post("/finish_weight_update")
            self.post("/start_weight_update")

    def try_to_send(self, bucket: dict[str, Tensor], buffers: dict[Any, Any]) -> bool:
        """Pass a bucket to `TransferGroup.send`, if the one before has arrived; whether it has."""
        if (transfer := self.transfer) is None:
            raise ServerLost(f"{self.url} was lost in this update")
        if self.sending and not transfer.is_over(self.sending, self.sending_s):
            if self.loading.done():
                self.loading.result()
            return False
        self.sending, self.sending_s = transfer.send(bucket, buffers), time.monotonic()
        return True

    def end_update(self, version: int, timeout_s: float) -> None:
        """Wait until everything is loaded, and let the server sample on as `version`."""
        try:
            self.loading.result(timeout_s)
        except TimeoutError:
            raise ServerLost(
                f"{self.url} took longer than sync_timeout to load the last weights"
            ) from None
        self.post("/finish_weight_update", {"weight_version": str(version)})
        self.post("/resume")


class ReferenceServer(Server):
    """A server of the reference: it gets no weights, and gives log-probs at the run's `temperature`."""

    def __init__(self, url: str, temperature: float, **others: Any):
        super().__init__(url, **others)
        self.temperature = temperature

    def connect(self, *_: Any, **others: Any) -> None:
        """Tell it the temperature: it serves from then on."""
        self.post("/init_weight_transfer_engine", {"init_info": {"temperature": self.temperature}})
        self.is_connected = self.has_weights = True

    def logprobs(self, completions: list[list[tuple[Tensor, Tensor]]]) -> list[Tensor]:
        """The log-probs [n] float32, nats, of each completion's tokens, given as (prompt, tokens) of its segments."""
        if self.temperature != 1:  # it may have been restarted meanwhile
            self.connect()
        return [
            torch.cat([self._of_segment(*segment) for segment in segments])
            for segments in completions
        ]

    def _of_segment(self, prompt_ids: Tensor, token_ids: Tensor) -> Tensor:
        ids = token_ids.tolist()
        body = {
            "token_ids": [*prompt_ids.tolist(), *ids],
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0},
        }
        given = self.request("POST", "/inference/v1/generate", json=body)["prompt_logprobs"][
            len(prompt_ids) :
        ]
        return torch.tensor(
            [of_place[str(token)]["logprob"] for token, of_place in zip(ids, given, strict=True)]
        )


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


class VLLMClient:
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
        return self._until(
            servers, lambda server: replies[server].done() and [replies[server].result()]
        )

    def _until(self, servers: list[Server], is_done: Callable[[Server], Any]) -> list[Server]:
        """Ask each until it is done; returns those. One that fails, or is `sync_timeout` behind half, is left out."""
        waiting, lost, asked_s = servers, [], time.monotonic()
        while waiting:
            now_s, late = time.monotonic(), []
            for server in waiting:
                server.lag_s += (now_s - asked_s) * (2 * len(waiting) <= len(servers))
                try:
                    if is_done(server):
                        continue
                    if server.lag_s > self.config.sync_timeout:
                        raise ServerLost("it kept the other servers waiting for sync_timeout")
                    late.append(server)
                except RuntimeError as error:  # ServerError is one, and so is a lost group's error
                    lost.append(server)
                    (self.lose if server.has_weights else self.keep_out)(server, error)
                    server.disconnect()  # a worker that waits for the rest gets an error
            waiting, asked_s = late, now_s
            time.sleep(2e-5 * (10 + len(late)) * bool(late))
        return [server for server in servers if server not in lost]

    def close(self) -> None:
        """Leave the transfer groups and drop what is still waiting."""
        self._is_closed.set()
        self._control.shutdown(wait=False, cancel_futures=True)
        with self._slots:
            self._slots.notify_all()
        for server in self.servers:
            server.disconnect()
