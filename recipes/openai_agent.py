"""Any agent of OpenAI's protocol as a `rollout_fn`: a loopback `/v1/chat/completions` in front of the rollout server.

    def solve(base_url, prompt):            # the agent, as it runs anywhere else; `prompt.content` is the data's
        client = openai.OpenAI(base_url=base_url, api_key="none")
        ...
        return {"solved": 1.0}              # columns for the rewards, or None

    config = TrainConfig(..., rollout_fn=trained(solve, max_len=4096), reward_funcs=[...])

A request that goes on from an earlier reply continues its tokens, as they were sampled; one whose history was changed,
by the agent or by the chat template, begins a segment; several conversations of an agent are segments, too. Every reply
trains once: a request that is repeated because its reply was lost gets the same one again, and one that never arrived
does not train. Rewards see the column `messages`, the conversation that was answered last. Sampling is the run's:
`temperature` and the like of a request are ignored. Thinking stays in `content`.
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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from recipes.turns import turn_ids
from rollouts.group import Completion
from vllm_client import ServerError

READ = {
    "messages",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stream",
    "stream_options",
}
READ |= {"chat_template_kwargs"}
IGNORED = {
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "user",
}
IGNORED |= {"parallel_tool_calls", "metadata", "store", "reasoning_effort"}
HARMLESS: Any = {
    "n": 1,
    "tool_choice": "auto",
    "logprobs": False,
    "response_format": {"type": "text"},
}


def hermes_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """A reply's words, and the (name, arguments as JSON) of its calls, as Qwen and Hermes models write them."""
    calls = []
    for found in re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", text, re.DOTALL):
        try:
            call = json.loads(found)
            calls.append(
                (str(call["name"]), json.dumps({**call.get("arguments", {})}))
            )  # which are a dictionary
        except (ValueError, KeyError, TypeError):
            return text, []  # what a model wrote in no right form is text
    return text.partition("<tool_call>")[0].rstrip() if calls else text, calls


def trained(
    agent: Callable[[str, Any], Any], max_len: int, parse_calls: Any = hermes_calls
) -> Callable[..., list[list[Completion]]]:
    """A `rollout_fn` that runs `agent(base_url, prompt)` for every rollout, each in a thread.

    Args:
        agent: asks `base_url`; returns columns for the rewards, or None. What it raises ends the run. May be async.
        max_len: tokens of a prompt and its reply at most; longer prompts get OpenAI's `context_length_exceeded`. Not
            over `max_tokens_per_gpu` and the server's `--max-model-len`.
        parse_calls: finds the calls of tools in a reply's text, as `hermes_calls` does.
    """

    @wraps(agent)
    def rollout_fn(server: Any, prompt: Any, sampling: dict[str, Any]) -> list[list[Completion]]:
        def run(_: int) -> list[Completion]:
            with _Rollout(server, sampling, max_len, parse_calls) as rollout:
                try:
                    info = agent(rollout.base_url, prompt)
                    info = asyncio.run(info) if inspect.iscoroutine(info) else info
                except Exception:
                    if rollout.failure:  # then the agent's is only what came of it
                        raise rollout.failure from None
                    raise
            if rollout.failure:
                raise rollout.failure
            if not isinstance(info, dict | None):
                raise TypeError(
                    f"the agent returned {info!r:.100}: no dictionary of columns for the rewards, nor None"
                )
            return rollout.segments(info or {})

        with ThreadPoolExecutor(sampling["n"]) as pool:
            return list(pool.map(run, range(sampling["n"])))

    return rollout_fn


@dataclass(eq=False)
class _Call:
    """A request and its reply."""

    body: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)  # that the reply was sampled for
    before: "_Call | None" = None  # the one whose segment it continues, by `between` and its reply
    between: list[int] = field(default_factory=list)
    is_continued: bool = False  # by another call, in the same segment
    arrived_s: float = (
        0.0  # when the agent got the reply, on the monotonic clock; 0 where it has not
    )
    reply: Any = None  # Completion
    answer: Future[dict[str, Any]] = field(default_factory=Future)  # OpenAI's reply, without stream

    @property
    def said(self) -> dict[str, Any]:
        """The message that answers."""
        return _plain(self.answer.result()["choices"][0]["message"])


class _Rollout:
    """What one agent asked and got."""

    def __init__(self, server: Any, sampling: dict[str, Any], max_len: int, parse_calls: Any):
        self.server, self.max_len, self.parse_calls = server, max_len, parse_calls
        self.sampling = {
            name: value for name, value in sampling.items() if name != "seed"
        }  # it would repeat replies
        self.id, self.lock = uuid.uuid4().hex, threading.Lock()
        self.calls: list[_Call] = []
        self.failure: ServerError | None = None
        self.base_url = f"http://127.0.0.1:{_loopback().server_port}/{self.id}/v1"

    def __enter__(self) -> "_Rollout":
        ROLLOUTS[self.id] = self
        return self

    def __exit__(self, *_: object) -> None:
        del ROLLOUTS[self.id]

    def call(self, request: dict[str, Any], is_retry: bool) -> _Call:
        """The answered call of a request; an earlier one's where a client asks again, as it got no reply."""
        body = json.dumps(request, sort_keys=True)
        with self.lock:
            alike = [call for call in self.calls if call.body == body] if is_retry else []
            if not alike:
                self.calls.append(call := _Call(body))
        if alike:
            call = min(
                alike, key=lambda call: call.arrived_s
            )  # 0 before all others: the one that was lost
            call.answer.result()
            return call
        try:
            self._sample(call, request)
        except (
            Exception
        ) as error:  # of a request or a template the agent hears, of a lost server the trainer, too
            self.failure = error if isinstance(error, ServerError) else self.failure
            call.answer.set_exception(error)
            raise
        return call

    def _sample(self, call: _Call, request: dict[str, Any]) -> None:
        given = {
            name
            for name, value in request.items()
            if value is not None and value != HARMLESS.get(name)
        }
        if odd := sorted(given - READ - IGNORED):
            raise ValueError(f"{odd[0]}={request[odd[0]]!r:.100} is not supported")
        tools = {"tools": request["tools"]} if request.get("tools") else {}
        call.messages = [_plain(message) for message in request["messages"]]
        call.template = tools | (request.get("chat_template_kwargs") or {})
        tokenizer = self.server.tokenizer
        with self.lock:
            before, between = self._continued(call)
            if before and not before.is_continued:  # by another: then it is a segment of its own
                call.before, call.between, before.is_continued = before, between, True
        if before:
            call.ids = [*before.ids, *before.reply.token_ids.tolist(), *between]
        else:
            text = tokenizer.apply_chat_template(
                call.messages, tokenize=False, add_generation_prompt=True, **call.template
            )
            call.ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        wanted = (
            request.get("max_completion_tokens")
            or request.get("max_tokens")
            or self.sampling["max_tokens"]
        )
        room = min(wanted, self.sampling["max_tokens"], self.max_len - len(call.ids))
        if room < 1:
            if call.before:
                call.before.is_continued = False
            raise _TooLong(
                f"context_length_exceeded: {len(call.ids)} tokens, of max_len={self.max_len}"
            )
        stops = (
            [request["stop"]] if isinstance(request.get("stop"), str) else request.get("stop") or []
        )
        params = {
            **self.sampling,
            "n": 1,
            "max_tokens": room,
            "stop": [*(self.sampling.get("stop") or []), *stops],
        }
        (call.reply,) = self.server.generate(call.ids, params)
        text = tokenizer.decode(call.reply.token_ids, skip_special_tokens=True)
        if stops:  # which a reply leaves out; it trains
            text = re.split("|".join(map(re.escape, stops)), text, maxsplit=1)[0]
        content, calls = self.parse_calls(text)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
            message["tool_calls"] = [
                {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
                for function in functions
            ]
        reason = "tool_calls" if calls else call.reply.finish_reason
        used, sampled = len(call.ids), len(call.reply.token_ids)
        call.answer.set_result({
            "id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time()),
            "model": request.get("model") or "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {"prompt_tokens": used, "completion_tokens": sampled, "total_tokens": used + sampled},
        })  # fmt: skip

    def _continued(self, call: _Call) -> tuple[_Call | None, list[int]]:
        """The earlier call whose reply a request goes on from, and the tokens between; None where there is none."""
        keys = [_key(message) for message in call.messages]
        for before in sorted(
            self.calls, key=lambda other: (-len(other.messages), other.is_continued)
        ):
            num = len(before.messages)
            is_answered = before.answer.done() and not before.answer.exception()
            if not is_answered or before.template != call.template or num >= len(keys):
                continue
            if keys[: num + 1] != [*map(_key, before.messages), _key(before.said)]:
                continue
            before.arrived_s = before.arrived_s or time.monotonic()
            then = call.messages[num + 1 :]
            between = turn_ids(
                self.server.tokenizer,
                before.messages,
                before.reply.token_ids,
                then,
                **call.template,
            )
            # A template that rewrites this reply would rewrite what shorter histories end with, too.
            return (None, []) if between is None else (before, between)
        return None, []

    def segments(self, info: dict[str, Any]) -> list[Completion]:
        """What the agent got, each reply once, in the order in which it came; ValueError where it got none."""
        arrived = sorted(
            (call for call in self.calls if call.arrived_s), key=lambda call: call.arrived_s
        )
        if not arrived:
            raise ValueError("the agent got no reply: has it asked its base_url?")
        joined: dict[_Call, Completion] = {}
        for call in arrived:  # what it continues came before
            joined[call] = call.reply
            if call.before:
                joined[call] = joined.pop(call.before).then(call.between, call.reply)
        last = arrived[-1]
        joined[last].info = {"messages": [*last.messages, last.said], **info}
        return [*(joined[call] for call in joined if call is not last), joined[last]]


class _TooLong(ValueError):
    """A prompt that leaves no room for a reply."""


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates take it: text in one piece, arguments as dictionaries, nothing that is None."""
    content = message.get("content")
    if isinstance(content, list):
        if odd := [part for part in content if part.get("type") != "text"]:
            raise ValueError(f"a message has a part that is no text: {odd[0]!r:.100}")
        content = "".join(part["text"] for part in content)
    plain = {"role": message["role"], "content": content or ""}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": of["name"], "arguments": json.loads(of["arguments"] or "{}")},
            }
            for of in (call["function"] for call in calls)
        ]
    return plain | {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}


def _key(message: dict[str, Any]) -> Any:
    """What two plain messages have in common that are the same; an agent may strip what was said."""
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    return message["role"], content, message.get("tool_calls"), message.get("tool_call_id")


ROLLOUTS: dict[str, _Rollout] = {}  # by the first part of their path


class _Loopback(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 1024  # connections that wait, of all agents at once


@cache
def _loopback() -> ThreadingHTTPServer:
    """The server of all rollouts of this process, on a free port of 127.0.0.1."""
    server = _Loopback(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """The list of models."""
        self._send(
            200,
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "grpo"}]},
        )

    def do_POST(self) -> None:
        """A chat completion."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        rollout = ROLLOUTS.get(self.path.split("/")[1])
        if rollout is None or not self.path.endswith("/chat/completions"):
            self._send(
                404, {"error": {"message": f"no {self.path} here, or no more", "code": "not_found"}}
            )
            return
        try:
            request = json.loads(body)
            call = rollout.call(request, self.headers.get("x-stainless-retry-count", "0") != "0")
        except Exception as error:  # 400, which clients do not try again
            code = "context_length_exceeded" if isinstance(error, _TooLong) else "invalid_request"
            self._send(
                400,
                {"error": {"message": str(error), "type": "invalid_request_error", "code": code}},
            )
            return
        with suppress(BlockingIOError):
            try:
                has_gone = not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except ConnectionError:
                has_gone = True
            if has_gone:
                return
        had_arrived_s = call.arrived_s
        call.arrived_s = had_arrived_s or time.monotonic()  # before the agent can go on
        try:
            if request.get("stream"):
                self._stream(
                    call.answer.result(),
                    (request.get("stream_options") or {}).get("include_usage", False),
                )
            else:
                self._send(200, call.answer.result())
        except OSError:
            call.arrived_s = had_arrived_s

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, answer: dict[str, Any], with_usage: bool) -> None:
        """The reply as server-sent events: all of it, and then why it ended."""
        (choice,) = answer["choices"]
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
        of_all: dict[str, Any] = {"id": answer["id"], "object": "chat.completion.chunk"}
        of_all |= {name: answer[name] for name in ("created", "model")}
        ends = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
        chunks = [{"index": 0, "delta": delta, "finish_reason": None}, ends]
        events: list[dict[str, Any]] = [of_all | {"choices": [chunk]} for chunk in chunks]
        if with_usage:
            events.append(of_all | {"choices": [], "usage": answer["usage"]})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for text in [*map(json.dumps, events), "[DONE]"]:
            self.wfile.write(f"data: {text}\n\n".encode())
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """No line for every request."""
