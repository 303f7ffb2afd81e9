"""The HTTP client of a rollout server, which needs no vLLM.

Completions come from the server, and weights go to it.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import requests
import torch
from urllib3.exceptions import HTTPError

from config import UserError
from rollouts.group import CUT, FOREIGN, Completion
from server.messages import (
    NOT_ARRIVED,
    About,
    ConnectRequest,
    Sampled,
    SampleRequest,
    UpdateRequest,
    api_token,
)  # fmt: skip
from weights.group import Meeting, address_towards

CONTROL_TIMEOUT_S = 60.0  # for requests that have nothing to wait for
ANSWER_TIMEOUT_S = 10.0  # for one that a living server answers at once, on the busiest host
TRAINER = os.urandom(16).hex()  # this process's name: servers take weights of one trainer at a time


class ServerError(RuntimeError):
    """A rollout server could not be reached, or refused.

    The message says which one, why and what to do.
    """


class ServerLost(ServerError):
    """The loss of a server: another may do its work.

    The server is silent, or answers with errors of its own.
    """


class UpdateBroken(ServerError):
    """The end of an update that did not come through, at a server that is well."""


def completion_of(message: Sampled, prompt_ids: Any = None) -> Completion:
    """Check a completion that a server sampled of a prompt.

    Raises:
        ServerLost: the server broke the completion off.
        ValueError: a part of it is missing or makes no sense.
    """
    token_ids = torch.from_numpy(np.frombuffer(message.token_ids, "<i4").astype(np.int64))
    logprobs = torch.from_numpy(np.frombuffer(message.logprobs, "<f4").copy())
    reason = message.finish_reason
    if reason not in ("stop", *CUT):
        raise ServerLost(f"a server ended a completion by {reason!r}")
    if not logprobs.isfinite().all():
        raise ValueError("some log-probs are no finite numbers")

    # Also where no span tells. In numpy, which is cheaper to start than torch, for so few.
    versions = np.full(len(token_ids), FOREIGN)
    for name, start, end in message.weight_versions:
        if name.isdecimal():
            versions[start:end] = int(name)
    # It refuses columns of several lengths.
    return Completion(token_ids, logprobs, reason, versions, prompt_ids=prompt_ids)


class State(Enum):
    """The use that a run has of a server at the moment."""

    LOST = "lost"  # none: a thread asks until the server answers again, and connects it
    WAITING = "waiting"  # connected, at the start or once it is back, without the current weights
    SERVING = "serving"  # groups, under the current weights


@dataclass(eq=False, repr=False)
class Server:
    """One rollout server.

    A recipe's `rollout_fn` gets it, and uses `generate` and the model's `tokenizer`.
    """

    url: str
    timeout_s: float  # of a request, if the caller names none
    tokenizer: Any = None
    forbidden: Sequence[int] = ()  # tokens that are never sampled
    number: int = field(default_factory=count().__next__)  # that tells servers apart
    about: Any = None  # an About, of the last connection
    connection: Any = None  # by which the server is this trainer's, while it is open
    address: str = ""  # of this machine, on the way to it

    # What the pool knows of it:
    state: State = State.LOST
    version: int = -1  # of the weights that it has
    why_out: str = ""  # for what reason it has not the current ones
    num_losses: int = 0
    in_flight: int = 0  # groups
    paused_s: float = 0.0  # for how long the last update stopped sampling

    # -- requests ----------------------------------------------------------------------------------

    def post(self, path: str, body: Any, kind: Any = None, timeout_s: Any = None) -> Any:
        """The answer to a struct of messages.py, or to a GET, without one.

        Args:
            path: of the route.
            body: the struct.
            kind: of the answer, in msgpack; None: it is not read; `requests.Response`: it may still
                be coming, and stays open.
            timeout_s: seconds that the server may be silent, or a pair, to connect and then;
                `request_timeout` if there are none.

        Raises:
            ServerError: the server refused, by a 4xx reply.
            ServerLost: no connection, a time-out, a 5xx reply, or one that cannot be read.
        """
        session = requests.Session()  # of its own: servers come and go
        session.trust_env = False  # no proxy in between
        session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        headers = {"Content-Type": "application/json"}
        if api_token():
            headers["Authorization"] = f"Bearer {api_token()}"
        try:
            reply = session.request(
                "POST" if body else "GET",
                self.url + path,
                data=body and msgspec.json.encode(body),
                headers=headers,
                timeout=timeout_s or self.timeout_s,
                stream=True,
            )
            if reply.status_code >= 400:
                text = " ".join(reply.text.split())[:500]
                error_type = ServerError if reply.status_code < 500 else ServerLost
                if reply.status_code == NOT_ARRIVED:
                    error_type = UpdateBroken
                raise error_type(f"{self.url}{path} answered {reply.status_code}: {text}")
            if kind is requests.Response:
                return reply
            # Leaving the block closes the connection: the server aborts what it does for it.
            with reply:
                return kind and msgspec.msgpack.decode(reply.content, type=kind)
        except (requests.RequestException, msgspec.MsgspecError) as error:
            raise ServerLost(f"{self.url}{path} failed: {error!r}") from error

    # -- completions -------------------------------------------------------------------------------

    def generate(
        self, prompt: Any, sampling: dict[str, Any], images: Any = None,
        timeout_s: float | None = None, priority: int = 0,
    ) -> list[Completion]:  # fmt: skip
        """Sample `sampling["n"]` completions of a prompt, which they keep as `prompt_ids`.

        Args:
            prompt: ids of the prompt and of earlier turns, a list or a tensor [n]; the placeholders
                of `images` stand first.
            sampling: vLLM's own parameters.
            images: `rollouts.images.Images` of the prompt.
            timeout_s: as in `post`.
            priority: those of a lower number go before all that wait on the server.

        Raises:
            ServerError: as `post`; or trainer and server do not process images alike.
            UserError: a prompt has placeholders of images, and no images.
        """
        prompt_ids = torch.as_tensor(prompt).tolist()
        text_ids = prompt_ids[images.num_tokens :] if images else prompt_ids
        if not set(self.forbidden).isdisjoint(text_ids):
            raise UserError(
                "a prompt with placeholders of images was sent without them: "
                "pass images=prompt.images"
            )
        request = SampleRequest(prompt_ids, self._sampling_params(sampling), priority=priority)
        if images:
            request.token_ids = images.server_ids + text_ids
            request.images = images.urls

        messages = self.post("/sample", request, list[Sampled], timeout_s)
        expanded_ids = np.frombuffer(messages[0].prompt_token_ids, "<i4").tolist()
        if images and expanded_ids != prompt_ids:
            raise ServerError(
                f"a prompt has {len(expanded_ids)} tokens on {self.url} and {len(prompt_ids)} here,"
                " or others of the same number: do both process images alike "
                "(--mm-processor-kwargs)?"
            )
        own_prompt = torch.tensor(prompt_ids)
        try:
            return [completion_of(message, own_prompt) for message in messages]
        except ValueError as error:
            raise ServerLost(f"{self.url}: {error}") from error

    def _sampling_params(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """The caller's parameters, for completions with log-probs and no forbidden token."""
        params = {**sampling, "logprobs": 0}
        if params.get("stop"):  # which may be special tokens, as `</answer>` in some vocabularies
            params["skip_special_tokens"] = False
        if self.forbidden:
            given = sampling.get("logit_bias") or {}
            # -100 is the lowest that the server takes, and as good as -inf
            params["logit_bias"] = given | dict.fromkeys(self.forbidden, -100.0)
        return params

    # -- weights -----------------------------------------------------------------------------------

    def ask(
        self, trainer: str = "", temperature: float = 0.0, sampling: dict[str, Any] | None = None
    ) -> requests.Response:
        """Ask the server about itself; returns the answer, which is still open.

        The arguments are those of `ConnectRequest`, and `sampling` of `generate`.
        """
        tried = self._sampling_params(sampling) if sampling else {}
        request = ConnectRequest(trainer, temperature, tried)
        reply = self.post("/connect", request, requests.Response, CONTROL_TIMEOUT_S)
        try:  # to a trainer more never comes
            self.about = msgspec.json.decode(reply.raw.readline(), type=About)
        except (HTTPError, msgspec.MsgspecError) as error:
            raise ServerLost(
                f"{self.url} does not speak as a vllm_server.py of this version: {error}"
            ) from error
        return reply

    def connect(self) -> None:
        """Take the server for this trainer, until `disconnect`; its weights become zero.

        Raises:
            ServerError: it is another trainer's.
        """
        connection = self.ask(TRAINER)
        self.disconnect()
        self.connection = connection
        self.address = address_towards(urlsplit(self.url).hostname)
        self.version = -1
        self.state = State.WAITING

    def disconnect(self) -> None:
        """Let the server go, which other trainers may take then."""
        if self.connection:
            self.connection.close()
        self.connection = None

    def update(self, version: int, meeting: Meeting) -> None:
        """Let the server take an update from a group, and sample on as `version`.

        Requests in flight go on with the new weights: with K/V made anew, and no cached prefix.

        Raises:
            UpdateBroken: it did not come through; the server is well.
            ServerError: the server could not load it, or gives no answer.
        """
        request = UpdateRequest(TRAINER, str(version), meeting)
        timeout_s = meeting.timeout_s + ANSWER_TIMEOUT_S
        self.paused_s = self.post("/update", request, float, timeout_s)

    def give_up_update(self) -> None:
        """Let the server give up the update that it takes, if it answers; a worker may hang."""
        with suppress(ServerError):
            self.post("/update", UpdateRequest(TRAINER), timeout_s=ANSWER_TIMEOUT_S)
