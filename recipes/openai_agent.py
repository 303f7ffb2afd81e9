"""Any agent of OpenAI's protocol as a `rollout_fn`.

A loopback `/v1/chat/completions` stands in front of the rollout server.

    def solve(base_url, prompt):  # the agent, as it runs anywhere else
        # `prompt.content` is the data's
        client = openai.OpenAI(base_url=base_url, api_key="none")
        ...
        return {"solved": 1.0}  # columns for the rewards, or None

    config = TrainConfig(..., rollout_fn=trained(solve, max_len=4096), reward_funcs=[...])

A request that goes on from an earlier reply continues its tokens, as they were sampled; one whose
history was changed, by the agent or by the chat template, begins a segment; several conversations
of an agent are segments, too. Every reply trains once: a request that is repeated because its reply
was lost gets the same one again, and one that never arrived does not train. Rewards see the column
`messages`, the conversation that was answered last. Sampling is the run's: `temperature` and the
like of a request are ignored. Thinking stays in `content`.
"""

import asyncio
import inspect
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from recipes.openai_protocol import (
    assistant_message,
    chat_completion,
    check_parameters,
    chunks_of,
    hermes_calls,
    identity,
    plain_message,
    stop_words,
)
from recipes.turns import side_by_side, turn_ids
from rollouts.group import Completion
from rollouts.scoring import text_of
from vllm_client import ServerError


def trained(
    agent: Callable[[str, Any], Any], max_len: int, parse_calls: Any = hermes_calls
) -> Callable[..., list[list[Completion]]]:
    """A `rollout_fn` that runs `agent(base_url, prompt)` in a thread per rollout.

    Args:
        agent: asks `base_url`; returns columns for the rewards, or None. Where it raises, its
            group is not trained. May be async.
        max_len: tokens of a prompt and its reply at most; longer prompts get OpenAI's
            `context_length_exceeded`, and where the agent raises it the rollout ends there, cut.
            Not over `max_tokens_per_gpu` and the server's `--max-model-len`.
        parse_calls: finds the calls of tools in a reply's text, as `hermes_calls` does.
    """

    @wraps(agent)
    def rollout_fn(server: Any, prompt: Any, sampling: dict[str, Any]) -> list[list[Completion]]:
        def run(_: int) -> list[Completion]:
            rollout = _Rollout(server, sampling, max_len, parse_calls)
            info = rollout.run(agent, prompt)
            return rollout.segments(info)

        return side_by_side(run, range(sampling["n"]))

    rollout_fn.info_names = ("messages",)  # type: ignore[attr-defined]
    return rollout_fn


@dataclass(eq=False)
class _Call:
    """A request and its reply."""

    body: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)  # that the reply was sampled for
    previous: "_Call | None" = None  # it continues that call's segment, by `between` and its reply
    between: list[int] = field(default_factory=list)
    is_continued: bool = False  # by another call, in the same segment
    arrived_s: float = 0.0  # when the agent got the reply, on the monotonic clock; 0: it has not
    reply: Any = None  # Completion
    answer: Future[dict[str, Any]] = field(default_factory=Future)  # OpenAI's reply, without stream

    @property
    def is_answered(self) -> bool:
        """True once the reply is there; False after an error instead."""
        return self.answer.done() and not self.answer.exception()

    @property
    def said(self) -> dict[str, Any]:
        """The message that answers the request."""
        return plain_message(self.answer.result()["choices"][0]["message"])


def _arrival(call: _Call) -> float:
    return call.arrived_s


def _longest_history_first(call: _Call) -> tuple[int, bool]:
    return -len(call.messages), call.is_continued


class _Rollout:
    """The calls of one agent."""

    def __init__(self, server: Any, sampling: dict[str, Any], max_len: int, parse_calls: Any):
        self.server = server
        self.sampling = {**sampling}
        self.sampling.pop("seed", None)  # it would repeat replies
        self.max_len = max_len
        self.parse_calls = parse_calls
        self.id = uuid.uuid4().hex
        self.lock = threading.Lock()
        self.calls: list[_Call] = []
        self.template: dict[str, Any] = {}  # what the chat template gets, but for a request's own
        self.failure: ServerError | None = None
        self.is_full = False  # a request found no room for a reply
        self.base_url = f"http://127.0.0.1:{_loopback().server_port}/{self.id}/v1"

    def run(self, agent: Callable[[str, Any], Any], prompt: Any) -> dict[str, Any]:
        """Run the agent; returns its columns for the rewards.

        Raises:
            ServerError: the rollout server failed, whatever the agent made of that.
            TypeError: the agent returned something else than columns or None.
            Exception: any other of the agent's.
        """
        ROLLOUTS[self.id] = self
        self.template = prompt.template
        try:
            info = agent(self.base_url, prompt)
            if inspect.iscoroutine(info):
                info = asyncio.run(info)
        except Exception:
            if self.failure:  # then the agent's is only what came of it
                raise self.failure from None
            if not self.is_full:
                raise
            info = None
        finally:
            del ROLLOUTS[self.id]

        if self.failure:
            raise self.failure
        if not isinstance(info, dict | None):
            raise TypeError(
                f"the agent returned {info!r:.100}: no dictionary of columns for the rewards, "
                "nor None"
            )
        return info or {}

    def call(self, request: dict[str, Any], is_retry: bool) -> _Call:
        """Answer a request.

        A client that repeats a request whose reply was lost gets the same reply.
        """
        call = _Call(json.dumps(request, sort_keys=True))
        alike = []
        with self.lock:
            if is_retry:
                alike = [other for other in self.calls if other.body == call.body]
            if not alike:
                self.calls.append(call)

        if alike:
            lost = min(alike, key=_arrival)  # 0, before all others: its reply has not arrived
            lost.answer.result()
            return lost
        try:
            self._sample(call, request)
        except Exception as error:  # the agent hears of it; of a lost server the trainer must, too
            if isinstance(error, ServerError):
                self.failure = error
            call.answer.set_exception(error)
            raise
        return call

    def _sample(self, call: _Call, request: dict[str, Any]) -> None:
        """Sample the reply to a request, and fill in the call.

        Raises:
            ValueError: the request is refused.
        """
        check_parameters(request)
        call.messages = [plain_message(message) for message in request["messages"]]
        call.template = {**self.template, **(request.get("chat_template_kwargs") or {})}
        if "tools" in request:
            call.template["tools"] = request["tools"]
        call.ids = self._prompt_ids(call)

        stops = stop_words(request)
        own_stops = self.sampling.get("stop") or []
        params = {
            **self.sampling,
            "n": 1,
            "max_tokens": self._room(call, request),
            "stop": [*own_stops, *stops],
        }
        (call.reply,) = self.server.generate(call.ids, params)

        is_ended = call.reply.finish_reason == "stop"
        text = text_of(call.reply.token_ids, self.server.tokenizer, is_ended, **params)
        if stops:  # which a reply leaves out; it trains
            text = re.split("|".join(map(re.escape, stops)), text, maxsplit=1)[0]
        content, calls = self.parse_calls(text)
        message = assistant_message(content, calls)
        reason = "tool_calls" if calls else call.reply.finish_reason
        model = request.get("model") or "policy"
        num_sampled = len(call.reply.token_ids)
        call.answer.set_result(chat_completion(message, reason, model, len(call.ids), num_sampled))

    def _prompt_ids(self, call: _Call) -> list[int]:
        """The tokens that the reply is sampled for.

        Those of an earlier call and its reply, if the request goes on from there, or else the
        template's.
        """
        tokenizer = self.server.tokenizer
        with self.lock:
            previous, between = self._continued(call)
            # If another call continues it, this one is a segment of its own.
            if previous and not previous.is_continued:
                call.previous = previous
                call.between = between
                previous.is_continued = True
        if previous:
            return [*previous.ids, *previous.reply.token_ids.tolist(), *between]
        text = tokenizer.apply_chat_template(
            call.messages, tokenize=False, add_generation_prompt=True, **call.template
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def _continued(self, call: _Call) -> tuple[_Call | None, list[int]]:
        """The earlier call that a request continues, and the tokens between.

        The request goes on from that call's reply. None, [] where there is no such call.
        """
        keys = [identity(message) for message in call.messages]
        for previous in sorted(self.calls, key=_longest_history_first):
            num = len(previous.messages)
            if not previous.is_answered or previous.template != call.template or num >= len(keys):
                continue
            history = [*previous.messages, previous.said]
            if keys[: num + 1] != [identity(message) for message in history]:
                continue

            previous.arrived_s = previous.arrived_s or time.monotonic()
            between = turn_ids(
                self.server.tokenizer,
                previous.messages,
                previous.reply.token_ids,
                call.messages[num + 1 :],
                **call.template,
            )
            if between is None:
                # A template that rewrites this reply would rewrite that of a shorter history, too.
                return None, []
            return previous, between
        return None, []

    def _room(self, call: _Call, request: dict[str, Any]) -> int:
        """The most tokens that the reply may have.

        Raises:
            _TooLong: there is no room for a token.
        """
        most = self.sampling["max_tokens"]
        wanted = request.get("max_completion_tokens") or request.get("max_tokens") or most
        room = min(wanted, most, self.max_len - len(call.ids))
        if room < 1:
            self.is_full = True
            if call.previous:
                call.previous.is_continued = False
            raise _TooLong(
                f"context_length_exceeded: {len(call.ids)} tokens, of max_len={self.max_len}"
            )
        return room

    def segments(self, info: dict[str, Any]) -> list[Completion]:
        """The replies that the agent got, each once, in their order.

        Raises:
            ValueError: there is no reply.
        """
        arrived = sorted((call for call in self.calls if call.arrived_s), key=_arrival)
        if not arrived:
            raise ValueError("the agent got no reply: has it asked its base_url?")

        joined: dict[_Call, Completion] = {}
        for call in arrived:
            if call.previous:  # which came before
                joined[call] = joined.pop(call.previous).then(call.between, call.reply)
            else:
                joined[call] = call.reply

        last = arrived[-1]
        completion = joined.pop(last)
        if self.is_full:
            completion = replace(completion, finish_reason="length")
        completion.info = {"messages": [*last.messages, last.said], **info}
        return [*joined.values(), completion]


class _TooLong(ValueError):
    """A prompt that leaves no room for a reply."""


ROLLOUTS: dict[str, _Rollout] = {}  # by the first part of their path


class _Loopback(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # connections that wait, of all agents at once


@cache
def _loopback() -> ThreadingHTTPServer:
    """The server of this process's rollouts, on a free port of 127.0.0.1."""
    server = _Loopback(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Send the list of models."""
        model = {"id": "policy", "object": "model", "owned_by": "grpo"}
        self._send(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        """Answer with a chat completion."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        rollout = ROLLOUTS.get(self.path.split("/")[1])
        if rollout is None or not self.path.endswith("/chat/completions"):
            error = {"message": f"no {self.path} here, or no more", "code": "not_found"}
            self._send(404, {"error": error})
            return
        try:
            request = json.loads(body)
            call = rollout.call(request, self.headers.get("x-stainless-retry-count", "0") != "0")
        except Exception as error:  # 400, which clients do not try again
            self._refuse(error)
            return
        if self._client_has_gone():
            return

        had_arrived_s = call.arrived_s
        call.arrived_s = had_arrived_s or time.monotonic()  # before the agent can go on
        answer = call.answer.result()
        try:
            if request.get("stream"):
                options = request.get("stream_options") or {}
                self._stream(answer, options.get("include_usage", False))
            else:
                self._send(200, answer)
        except OSError:
            call.arrived_s = had_arrived_s

    def _client_has_gone(self) -> bool:
        """True where the client closed the connection while its request was answered."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # open, with nothing to read
            return False
        except ConnectionError:
            return True

    def _refuse(self, error: Exception) -> None:
        code = "context_length_exceeded" if isinstance(error, _TooLong) else "invalid_request"
        body = {"message": str(error), "type": "invalid_request_error", "code": code}
        self._send(400, {"error": body})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, answer: dict[str, Any], with_usage: bool) -> None:
        """Send the reply as server-sent events."""
        events = chunks_of(answer, with_usage)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for text in [*map(json.dumps, events), "[DONE]"]:
            self.wfile.write(f"data: {text}\n\n".encode())
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Print no line for every request."""
