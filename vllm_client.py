"""The HTTP side of one rollout server: completions from it, and weights to it, without vLLM."""

import math
import os
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Annotated, Any, TypedDict
from urllib.parse import urlsplit

import msgspec
import requests
import torch
from torch import Tensor
from torch.distributed import TCPStore

from config import UserError
from rollouts.group import ENVIRONMENT, FOREIGN, Completion, spans_to_versions
from utils import RIGHT_VLLM, api_token
from weights.transfer import TransferGroup, address_towards

NO_LOGPROB = -9999.0  # what vLLM's API makes of NaN and minus infinity
CONTROL_TIMEOUT_S = 60.0  # for requests that have nothing to wait for
MAX_SERVERS = 1024  # that are told apart by their numbers
_numbers = count()
TRAINER = os.urandom(
    16
).hex()  # names this process to servers, which take the weights of one trainer at a time


class ServerError(RuntimeError):
    """A rollout server could not be reached, or refused; the message says which one, why and what to do."""


class ServerLost(ServerError):
    """A server does not answer any more, or answers with errors of its own: another server may do its work."""


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
    spans = []
    for span in choice.weight_versions or ():
        version = int(span["version"]) if span["version"].isdecimal() else FOREIGN
        spans.append((version, span["start"], span["end"]))
    versions = spans_to_versions(spans, len(ids))
    if (versions == ENVIRONMENT).any():
        raise ValueError(f"of {len(ids)} tokens some have no weight version")
    # torch.tensor would take eight times as long
    token_ids = torch.frombuffer(array("q", ids), dtype=torch.int64)
    logprobs = torch.frombuffer(values, dtype=torch.float32)
    return Completion(token_ids, logprobs, choice.finish_reason, versions)


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
