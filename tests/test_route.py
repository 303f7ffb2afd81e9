"""The server's own route, on a stand-in for the engine: what is refused, aborted, and said of errors."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="tests of the server's side")

import uvicorn
from starlette.applications import Starlette
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from server import route
from server.messages import messages

BODY: dict[str, Any] = {
    "token_ids": [5],
    "sampling_params": {"n": 3, "max_tokens": 4, "logprobs": 0},
}


class Engine:
    """Takes completions, and ends them when it is told to."""

    def __init__(self):
        self.params = {}
        self.queues = []
        self.aborted = []
        self.fails_at = None
        self.slowness_s = 0.0

    async def add_request(self, name, prompt, params, lora_request):
        assert lora_request is None  # there was no update
        await asyncio.sleep(self.slowness_s)
        if len(self.queues) == self.fails_at:
            raise RuntimeError("it is\nbroken")
        self.params[name] = params
        self.queues.append(RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name))
        return self.queues[-1]

    async def abort(self, names, internal):
        assert internal
        self.aborted += names

    def end(self, number, token_ids, reason="stop"):
        logprobs = FlatLogprobs()
        for token in token_ids:
            logprobs.append({token: Logprob(-0.5 * token)})
        completion = CompletionOutput(
            index=0, text="", token_ids=token_ids, cumulative_logprob=0.0, finish_reason=reason,
            logprobs=logprobs,
            weight_versions=[WeightVersionSpan("7", 0, len(token_ids))],
        )  # fmt: skip
        self.queues[number].put(RequestOutput("", None, [5], None, [completion], finished=True))


def on_route(asks):
    """The result of `asks(engine, connect)` while the route is served; `connect` sends a request."""

    async def run():
        engine = Engine()
        app = Starlette()
        app.state.engine_client = engine
        app.state.args = SimpleNamespace(return_sampling_mask=False)
        app.mount("/", lambda scope, *ends: route.sample(scope | {"app": app}, *ends))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        async def connect(body, method="POST", kind="application/json"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            head = f"{method} /sample HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            head += f"Content-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            await writer.drain()
            return reader, writer

        try:
            return await asyncio.wait_for(asks(engine, connect), 30)
        finally:
            server.should_exit = server.force_exit = True
            await task

    return asyncio.run(run())


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about in five seconds")


def whole(reply):
    """The status of a reply, and its body."""
    head, _, body = reply.partition(b"\r\n\r\n")
    if b"chunked" in head:
        parts = []
        while body:
            size, _, body = body.partition(b"\r\n")
            parts.append(body[: int(size, 16)])
            body = body[int(size, 16) + 2 :]
        body = b"".join(parts)
    return int(head.split()[1]), body


def test_completions_come_as_they_end():
    async def asks(engine, connect):
        reader, _ = await connect(
            BODY | {"sampling_params": BODY["sampling_params"] | {"seed": 40}}
        )
        await until(lambda: len(engine.queues) == 3)
        engine.end(1, [5, 6])
        await asyncio.sleep(0.1)
        engine.end(2, [7], "length")
        engine.end(0, [8, 9])
        return whole(await reader.read()), engine

    (status, body), engine = on_route(asks)
    found = list(messages([body]))
    assert status == 200
    assert found[0].index == 1
    assert sorted(message.index for message in found) == [0, 1, 2]
    assert found[0].token_ids == (5).to_bytes(4, "little") + (6).to_bytes(4, "little")
    assert memoryview(found[0].logprobs).cast("f").tolist() == [-2.5, -3.0]
    assert found[0].weight_versions == [("7", 0, 2)]
    assert {message.index: message.finish_reason for message in found}[2] == "length"
    assert not engine.aborted
    params = list(engine.params.values())
    assert [own.seed for own in params] == [40, 41, 42]
    for own in params:
        assert (own.n, own.detokenize, own.output_kind) == (1, False, RequestOutputKind.FINAL_ONLY)


@pytest.mark.parametrize(("has_mask", "expected"), [(True, (1.0, 1)), (False, (0.0, 0))])
def test_greedy_where_masks_are_returned(has_mask, expected):
    """There vLLM refuses temperature 0; elsewhere it is as it was."""
    params = route._params(route.SampleRequest([5], {"temperature": 0, "top_k": 9}), has_mask)
    assert (params.temperature, params.top_k) == expected


def test_what_a_request_leaves_out():
    """Stop strings need the text; without max_tokens the context is the limit, and not vLLM's 16 tokens."""
    params = route._params(route.SampleRequest([5], {"stop": ["x"], "n": 2}), False)
    assert params.detokenize
    assert params.max_tokens is None


@pytest.mark.parametrize(
    "request_of",
    [
        {"body": b"{not json"},
        {"body": BODY | {"content_parts": []}},
        {"body": {"token_ids": ["x"], "sampling_params": {}}},
        {"body": {"token_ids": [5], "sampling_params": {"temperature": -1.0}}},
        {"body": {"token_ids": [5], "sampling_params": {"seed": 2**64}}},
        {"body": BODY, "kind": "text/plain"},
        {"body": BODY, "method": "PUT"},
    ],
)
def test_what_is_refused(request_of):
    async def asks(engine, connect):
        reader, _ = await connect(**request_of)
        return whole(await reader.read()), engine

    (status, body), engine = on_route(asks)
    assert status == 400
    assert "\n" not in json.loads(body)["error"]
    assert not engine.queues


def test_an_engine_that_fails_at_the_second_of_three():
    async def asks(engine, connect):
        engine.fails_at = 1
        reader, _ = await connect(BODY)
        reply = whole(await reader.read())
        await until(lambda: engine.aborted)
        return reply, engine

    (status, body), engine = on_route(asks)
    assert status == 500
    assert json.loads(body) == {"error": "RuntimeError: it is broken"}
    assert engine.aborted == list(engine.params)


def test_an_engine_that_fails_later():
    async def asks(engine, connect):
        reader, _ = await connect(BODY)
        await until(lambda: len(engine.queues) == 3)
        engine.end(0, [5])
        await asyncio.sleep(0.1)
        engine.queues[1].put(RuntimeError("it is\nbroken"))
        reply = whole(await reader.read())
        await until(lambda: engine.aborted)
        return reply, engine

    (status, body), engine = on_route(asks)
    completion, error = messages([body])
    assert status == 200
    assert completion.index == 0
    assert error.error == "RuntimeError: it is broken"
    assert engine.aborted == [list(engine.params)[2]]


@pytest.mark.parametrize("when", ["it waits", "it adds"])
def test_a_trainer_that_leaves(when):
    async def asks(engine, connect):
        engine.slowness_s = 0.1 if when == "it adds" else 0.0
        _, writer = await connect(BODY)
        await until(lambda: engine.queues)
        if when == "it waits":
            await until(lambda: len(engine.queues) == 3)
            engine.end(1, [5])
            await asyncio.sleep(0.1)
        writer.close()
        await until(lambda: len(engine.aborted) == (2 if when == "it waits" else 3))
        return engine

    engine = on_route(asks)
    names = list(engine.params)
    assert engine.aborted == ([names[0], names[2]] if when == "it waits" else names)


def test_aborts_that_fail_are_no_noise(caplog):
    async def asks(engine, connect):
        async def abort(names, internal):
            raise RuntimeError("dead")

        engine.abort = abort
        _, writer = await connect(BODY)
        await until(lambda: len(engine.queues) == 3)
        writer.close()
        await until(lambda: not route.aborts)
        await asyncio.sleep(0.1)

    on_route(asks)
    assert "never retrieved" not in caplog.text


def test_messages_say_what_they_are():
    with pytest.raises(msgspec.ValidationError):
        list(messages([b"\x02\0\0\0\x91\x01"]))
