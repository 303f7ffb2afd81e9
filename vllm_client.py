"""The HTTP client of a rollout server, which needs no vLLM.

Completions come from the server, and weights go to it.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import requests
import torch
from torch import Tensor
from torch.distributed import TCPStore

from config import UserError
from rollouts.group import CUT, ENVIRONMENT, FOREIGN, Completion, spans_to_versions
from server.messages import SAMPLE, UPDATE, Sampled, messages
from utils import RIGHT_VLLM, VLLM_VERSIONS, api_token, was_tried
from weights.transfer import TransferGroup, address_towards, in_thread

CONTROL_TIMEOUT_S = 60.0  # for requests that have nothing to wait for
MAX_SERVERS = 1024  # that are told apart by their numbers
TRAINER = os.urandom(16).hex()  # this process's name: servers take weights of one trainer at a time
_numbers = count()


class ServerError(RuntimeError):
    """A rollout server could not be reached, or refused.

    The message says which one, why and what to do.
    """


class ServerLost(ServerError):
    """The loss of a server: another may do its work.

    The server is silent, or answers with errors of its own.
    """


# -- Replies ---------------------------------------------------------------------------------------


def completion_of(message: Sampled) -> Completion:
    """Check a completion that a server sampled.

    Raises:
        ServerLost: the server broke the completion off.
        ValueError: a part of it is missing or makes no sense.
    """
    if message.error:
        raise ValueError(message.error)
    token_ids = torch.from_numpy(np.frombuffer(message.token_ids, "<i4").astype(np.int64))
    logprobs = torch.from_numpy(np.frombuffer(message.logprobs, "<f4").copy())
    num_tokens = len(token_ids)
    if num_tokens == 0 or message.finish_reason not in ("stop", *CUT):
        raise ServerLost(
            f"a server ended a completion by {message.finish_reason!r} after {num_tokens} tokens"
        )
    if len(logprobs) != num_tokens or not logprobs.isfinite().all():
        raise ValueError(f"of {num_tokens} tokens some log-probs are missing, or no finite numbers")

    spans = []
    for name, start, end in message.weight_versions:
        version = int(name) if name.isdecimal() else FOREIGN
        spans.append((version, start, end))
    versions = spans_to_versions(spans, num_tokens)
    if versions.eq(ENVIRONMENT).any():
        raise ValueError(f"of {num_tokens} tokens some have no weight version")
    mask = None
    if message.mask_sizes:
        from rollouts.sampling_mask import mask_of

        mask = mask_of(message)
    return Completion(token_ids, logprobs, message.finish_reason, versions, sampling_mask=mask)


def all_choices(num: int, reply: requests.Response) -> tuple[list[Completion], list[int]]:
    """A reply's `num` completions, and the prompt's tokens, expanded by the server.

    Raises:
        ValueError: the reply has another number of completions, or one that makes no sense.
    """
    completions, prompt_ids = first_choices(num, reply)
    return [completions[number] for number in sorted(completions)], prompt_ids


def first_choices(num: int, reply: requests.Response) -> tuple[dict[int, Completion], list[int]]:
    """The first `num` completions of a reply to end, by number; else as `all_choices`."""
    completions = {}
    prompt_ids: list[int] = []
    for message in messages(reply.iter_content(None)):
        completions[message.index] = completion_of(message)
        prompt_ids = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
        if len(completions) == num:
            return completions, prompt_ids
    raise ValueError(f"{len(completions)} of {num} completions")


def json_of(reply: requests.Response) -> Any:
    """The JSON of a reply, None for an empty one."""
    return reply.json() if reply.content else None


def _session() -> requests.Session:
    """The settings of a request."""
    session = requests.Session()
    session.trust_env = False  # no proxy in between
    session.stream = True  # `read` may take the reply as it comes
    session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
    token = api_token()
    if token:
        session.headers["Authorization"] = f"Bearer {token}"
    return session


def _reason(reply: requests.Response) -> str:
    """The text of a server's error, out of the JSON and the call around it."""
    text = reply.text
    with suppress(ValueError, TypeError, KeyError):
        error = reply.json()["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    return text.rpartition("collective_rpc method failed: ")[2]


def _refusal(method: str, url: str, reply: requests.Response) -> ServerError:
    """The one-line error for a reply of status 400 or more."""
    status = reply.status_code
    cure = ""
    if status == 401:
        cure = " (set VLLM_API_KEY to the server's token)"
    elif status == 404 and method == "GET":
        cure = f" ({RIGHT_VLLM})"

    text = " ".join(_reason(reply).split())
    kind = ServerError if status < 500 else ServerLost
    return kind(f"{method} {url} answered {status}{cure}: {text[:500]}")


def _root_cause(error: BaseException) -> BaseException:
    """The error, or the cause below a connection's "max retries exceeded"."""
    if isinstance(error, requests.ConnectionError):
        while error.__context__:
            error = error.__context__
    return error


# -- A server --------------------------------------------------------------------------------------


class State(Enum):
    """The use that a run has of a server at the moment."""

    LOST = "lost"  # none: the watcher asks until the server answers again, and connects it
    WAITING = "waiting"  # connected, at the start or once it is back, without the current weights
    SERVING = "serving"  # groups, under the current weights


class Server:
    """One rollout server.

    A recipe's `rollout_fn` gets it, and uses `generate` and the model's `tokenizer`.
    """

    def __init__(
        self, url: str, timeout_s: float, tokenizer: Any = None, forbidden: Sequence[int] = ()
    ):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s  # of a request, if the caller names none
        self.tokenizer = tokenizer
        self.forbidden = forbidden  # tokens that are never sampled
        self.number = next(_numbers) % MAX_SERVERS
        self.proved_version = -1  # the last under which trainer and server agreed on log-probs

        self.state = State.LOST
        self.was_ours = False  # this trainer has connected it before
        self.why_out = ""  # for what reason it cannot be used, where it answers
        self.retry_s = 0.0  # when a lost server may be tried again, on the monotonic clock
        self.in_flight = 0  # groups
        self.idle_since_s = time.monotonic()  # if none are in flight

        self.transfer: TransferGroup | None = None
        self.takes_adapter = False  # and nothing else: it was started with `--enable-lora`
        self.can_sleep = False  # it was started with `--enable-sleep-mode`
        self.returns_sampling_mask = False  # it was started with `--return-sampling-mask`
        self.sending: Any = None  # the bucket under way
        self.sync_timeout_s = 0.0
        self.connection = ""  # a name for it, which the server knows
        self.loading: Future[Any]  # the server's reply to the update under way
        self.paused_s = 0.0  # for how long the last update stopped sampling
        self.lag_s = 0.0  # for how long it was later than half of the servers, in this update

    @property
    def has_weights(self) -> bool:
        """True while the server serves, and so has the current weights."""
        return self.state is State.SERVING

    # -- requests ----------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, timeout_s: Any = None,
        read: Callable[[requests.Response], Any] = json_of, json: Any = None,
    ) -> Any:  # fmt: skip
        """Send a request; returns the result of `read` on the reply.

        Args:
            method: of HTTP.
            path: with the query.
            timeout_s: seconds, or a pair, to connect and to answer (None: no limit); without it
                `request_timeout` holds.
            read: takes the reply before all of it is there, and may return at any place.
            json: the body.

        Raises:
            ServerError: the server refused, by a 4xx reply.
            ServerLost: no connection, a time-out, a 5xx reply, or one that cannot be read.
        """
        url = self.url + path
        try:
            # Leaving the block closes the connection: the server aborts what is left of a stream.
            with (
                _session() as session,
                session.request(
                    method, url, timeout=timeout_s or self.timeout_s, json=json
                ) as reply,
            ):
                if reply.status_code >= 400:
                    raise _refusal(method, url, reply)
                return read(reply)
        except (requests.RequestException, msgspec.MsgspecError, ValueError) as error:
            cause = _root_cause(error)
            raise ServerLost(f"{method} {url} failed: {type(cause).__name__}: {cause}") from error

    def post(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: Any = CONTROL_TIMEOUT_S
    ) -> Any:
        """`request` by POST, with a JSON body."""
        return self.request("POST", path, timeout_s, json=body)

    def answers(self) -> bool:
        """Ask whether the server calls itself healthy."""
        with suppress(ServerError):
            self.request("GET", "/health", timeout_s=5)
            return True
        return False

    def check_version(self) -> None:
        """Refuse a vLLM that was not tried, unless the server was started with `--any-vllm`.

        Raises:
            ServerError: what it runs, and which versions were tried.
        """
        about = self.request("GET", "/version")
        if not isinstance(about, dict):
            about = {"version": about}
        self.returns_sampling_mask = bool(about.get("sampling_mask"))
        version = str(about.get("version", about))[:100]
        if about.get("any_vllm"):
            print(f"{self.url} runs vLLM {version}, which may not have been tried", flush=True)
        elif not was_tried(version):
            tried = " or ".join(VLLM_VERSIONS)
            raise ServerError(f"{self.url} runs vLLM {version}, not {tried}: {RIGHT_VLLM}")

    # -- completions -------------------------------------------------------------------------------

    def generate(
        self, prompt: Any, sampling: dict[str, Any], images: Any = None, timeout_s: Any = None,
        read: Callable[[int, requests.Response], tuple[Any, list[int]]] = all_choices,
        extra: int = 0,
    ) -> Any:  # fmt: skip
        """Sample `sampling["n"]` completions of a prompt, which they keep as `prompt_ids`.

        Args:
            prompt: ids of the prompt and of earlier turns, a list or a tensor [n]; the placeholders
                of `images` stand first.
            sampling: vLLM's own parameters.
            images: `rollouts.images.Images` of the prompt.
            timeout_s: as in `request`.
            read: takes the number of completions and the reply, as `all_choices`.
            extra: so many more are sampled; the return of `read` aborts the rest, as in
                `recipes/first_to_finish.py`.
        """
        prompt_ids = torch.as_tensor(prompt).tolist()
        num = sampling.get("n", 1)
        body = self._prompt_body(prompt_ids, images)
        body["sampling_params"] = self._sampling_params(sampling, num + extra)
        completions, expanded_ids = self.request(
            "POST", SAMPLE, timeout_s, partial(read, num), json=body
        )
        if images and expanded_ids != prompt_ids:
            raise ServerError(
                f"a prompt has {len(expanded_ids)} tokens on {self.url} and {len(prompt_ids)} "
                "here, or others of the same number: do both process images alike "
                "(--mm-processor-kwargs)?"
            )
        own_prompt = torch.tensor(prompt_ids)
        return [replace(completion, prompt_ids=own_prompt) for completion in completions]

    def _prompt_body(self, prompt_ids: list[int], images: Any) -> dict[str, Any]:
        """The prompt in a request's body, with the images as URLs."""
        text_ids = prompt_ids[images.num_tokens :] if images else prompt_ids
        if not set(self.forbidden).isdisjoint(text_ids):
            raise UserError(
                "a prompt with placeholders of images was sent without them: "
                "pass images=prompt.images"
            )
        if not images:
            return {"token_ids": prompt_ids}
        return {"token_ids": images.server_ids + text_ids, "images": images.urls}

    def _sampling_params(self, sampling: dict[str, Any], num: int) -> dict[str, Any]:
        """The caller's parameters, for `num` completions with log-probs and no forbidden token."""
        params = {**sampling, "n": num, "logprobs": 0}
        if params.get("stop"):  # which may be special tokens, as `</answer>` in some vocabularies
            params["skip_special_tokens"] = False
        if self.forbidden:
            given = sampling.get("logit_bias") or {}
            # -100 is the lowest that the server takes, and as good as -inf
            params["logit_bias"] = given | dict.fromkeys(self.forbidden, -100.0)
        return params

    # -- the group that weights travel over --------------------------------------------------------

    def connect(
        self, device: torch.device, timeout_s: float, gpus: Sequence[str | None] = ()
    ) -> None:
        """Open a transfer group with the server's workers, and zero its weights.

        A server that `takes_adapter` keeps them.

        Raises:
            ServerError: it refuses.
        """
        reply = self.request("GET", "/get_world_size", CONTROL_TIMEOUT_S)
        try:
            self._open_group(1 + reply["world_size"], device, timeout_s, gpus)
        except RuntimeError as error:
            raise ServerError(f"{self.url}: no weight-transfer group: {error}") from error

        if self.can_sleep:  # and may be asleep, since an earlier trainer, or a time-out
            self.post("/wake_up")
        # Zeroes: log-probs can only agree if every weight arrives.
        if not self.takes_adapter:
            self.post("/weight_checker", {"action": "reset"})
        self.state = State.WAITING
        self.was_ours = True

    def _open_group(
        self, world_size: int, device: torch.device, timeout_s: float, gpus: Sequence[str | None]
    ) -> None:
        """Invite the server's workers into a transfer group, and enter with them."""
        address = address_towards(urlsplit(self.url).hostname or "127.0.0.1")
        limit = timedelta(seconds=timeout_s)
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.sync_timeout_s = timeout_s
        self.connection = os.urandom(8).hex()
        init_info = {
            "host": address,
            "port": store.port,
            "world_size": world_size,
            "timeout_s": timeout_s,
            "trainer": TRAINER,
            "connection": self.connection,
        }

        # Both sides must enter the rendezvous, and a server that refuses never comes.
        path = "/init_weight_transfer_engine"
        reply_limit_s = timeout_s + CONTROL_TIMEOUT_S
        reply = in_thread(partial(self.post, path, {"init_info": init_info}, reply_limit_s))
        while not store.check(["member/1"]):  # which the first worker sets in `TransferGroup`
            if reply.done():
                reply.result()  # raises why the server refused
                raise ServerError("it took the invitation, and its workers did not come")
            time.sleep(0.01)
        transfer = TransferGroup(store, 0, world_size, device, timeout_s, gpus)
        self.transfer = transfer
        reply.result()
        # Kept here, as another thread may disconnect it.
        self.takes_adapter = transfer.lora_rank > 0
        self.can_sleep = transfer.can_sleep
        what = "the adapter" if self.takes_adapter else "its weights"
        when = "while it samples" if transfer.stages else "in a pause"
        print(f"{self.url} gets {what} over {transfer.backend}, {when}", flush=True)

    def disconnect(self) -> None:
        """Leave the transfer group."""
        self.state = State.LOST
        transfer = self.transfer
        self.transfer = None  # first: the thread that sends must not use it while it closes
        self.sending = None
        if transfer:
            transfer.close()

    def break_off(self, timeout_s: float = 5.0) -> None:
        """Leave the transfer group, then abort requests if the server still listens."""
        # In this order: a server that waits for the rest of a stream would not hear the request.
        self.disconnect()
        with suppress(ServerError):
            self.post("/pause?mode=abort", timeout_s=timeout_s)

    # -- the steps of an update --------------------------------------------------------------------

    def start_update(self, version: int) -> None:
        """Let the server take the coming buckets, up to an empty one, and sample on as `version`.

        Requests in flight go on with the new weights: with K/V made anew, and no cached prefix.
        """
        self.lag_s = 0.0
        self.sending = None
        body = {"weight_version": str(version), "connection": self.connection}
        # There is no limit to the answer: each bucket has one, and so has `end_update`. A server
        # that vanishes never answers, but its thread keeps no process from ending.
        self.loading = in_thread(partial(self.post, UPDATE, body, timeout_s=(5, None)))

    def try_to_send(self, bucket: dict[str, Tensor], buffers: dict[Any, Any]) -> bool:
        """Begin to send a bucket; returns False until the previous has arrived.

        `buffers` are those of `TransferGroup.send`.
        """
        transfer = self.transfer  # read once, as another thread may take it away
        sending = self.sending
        if not transfer:
            raise ServerLost(f"{self.url} was lost in this update")
        if sending and not transfer.is_over(sending):
            if self.loading.done():
                self.loading.result()
            return False
        self.sending = transfer.send(bucket, buffers)
        return True

    def end_update(self) -> None:
        """Wait until the server samples from the update."""
        try:
            reply = self.loading.result(self.sync_timeout_s)
        except TimeoutError:
            raise ServerLost(
                f"{self.url} took longer than sync_timeout to load the last weights"
            ) from None
        self.paused_s = reply["paused_s"]
