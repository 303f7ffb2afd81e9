"""The server's own routes, on a stand-in for the engine: refusals, aborts, errors, and updates."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="tests of the server's side")

import uvicorn
from vllm.exceptions import VLLMClientError
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from server import sample
from server.app import RolloutServer
from server.messages import MAX_BODY_BYTES, About, Sampled, SampleRequest, Updated
from server.receiver import COMING, FAILED, GIVEN_UP, LOADED, LOADING, LOADS_NOW, WHOLE
from vllm_client import Server, ServerError

BODY: dict[str, Any] = {
    "token_ids": [5],
    "sampling_params": {"n": 3, "max_tokens": 4, "logprobs": 0},
}
MEETING = {
    "host": "127.0.0.1", "port": 1, "secret": "s", "backend": "gloo", "world_size": 3,
    "first_rank": 1, "timeout_s": 5.0,
}  # fmt: skip
UPDATE = {"trainer": "t", "weight_version": "7", "meeting": MEETING}
REASON = "it took longer"
POSTS = ("/connect", "/sample", "/update", "/sleep")


class Engine:
    """Takes completions, and ends them when it is told to; and two workers, which do as told."""

    def __init__(self, lora_config=None, can_sleep=False, trainer=""):
        self.trainer = trainer  # that has the server
        self.loads = [[LOADING, LOADED], [LOADED, LOADED]]  # the steps from `load_update` on
        self.params = {}
        self.queues = []
        self.aborted = []
        self.adapters = []
        self.fails_at = None
        self.error: Exception = RuntimeError("it is\nbroken")
        self.slowness_s = 0.0
        self.calls: list[Any] = []  # in their order, but for steps of updates
        self.steps: list[list[Any]] = []  # what the workers answer to each, the last one for ever
        model_config = SimpleNamespace(
            max_model_len=64, dtype="torch.bfloat16", enable_sleep_mode=can_sleep
        )
        self.vllm_config = SimpleNamespace(model_config=model_config, lora_config=lora_config)
        self.engine_core = self.renderer = self
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: True)

    async def add_request(self, name, prompt, params, lora_request, priority):
        self.adapters.append(lora_request)
        await asyncio.sleep(self.slowness_s)
        if len(self.queues) == self.fails_at:
            raise self.error
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

    async def check_health(self):
        pass

    async def call_utility_all_async(self, name, method, timeout, args, kwargs):
        """Of two engines with a worker each, as a list of lists."""
        assert name == "collective_rpc"
        found: list[Any] = [None] * 2
        if method == "state_of_update":
            states = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
            found = [(state, REASON if state in (FAILED, GIVEN_UP) else "") for state in states]
        else:
            self.calls.append(method)
        if method == "connect":
            found = ["gpu 0", "gpu 1"]
        if method == "load_update":
            self.steps = list(self.loads)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return [[each] for each in found]

    def __getattr__(self, name):
        async def noted(*args, **options):
            self.calls.append(name)

        return noted


def served(asks, engine=None, **options):
    """The result of `asks(engine, connect)` while the routes are served.

    `connect` sends a request, and returns both ends of its connection.
    """

    async def run():
        theirs = engine or Engine()
        args: Any = {"model": "m", "served_model_name": None, "metrics": False, **options}
        rollout_server: Any = RolloutServer(theirs, SimpleNamespace(**args))
        rollout_server.trainer = theirs.trainer
        app = rollout_server.app
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        async def connect(body, path="/sample", method="POST", kind="application/json", length=""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            head += f"Content-Type: {kind}\r\nContent-Length: {length or len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            await writer.drain()
            return reader, writer

        try:
            return await asyncio.wait_for(asks(theirs, connect), 30)
        finally:
            server.should_exit = server.force_exit = True
            await task

    return asyncio.run(run())


def replied(engine, *requests):
    """The status and body of the replies to requests, one after the other."""

    async def asks(_, connect):
        found = []
        for request in requests:
            reader, _ = await connect(**request)
            found.append(whole(await reader.read()))
        return found

    return served(asks, engine)


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about in five seconds")


def whole(reply):
    """The status of a reply, and its body; None for a body that broke off."""
    head, _, body = reply.partition(b"\r\n\r\n")
    if b"chunked" in head:
        parts = []
        size = None
        while body:
            size, _, body = body.partition(b"\r\n")
            parts.append(body[: int(size, 16)])
            body = body[int(size, 16) + 2 :]
        body = b"".join(parts) if size == b"0" else None
    return int(head.split()[1]), body


# -- completions -----------------------------------------------------------------------------------


def test_completions_come_when_all_have_ended():
    async def asks(engine, connect):
        sampling = BODY["sampling_params"] | {"seed": 40}
        reader, _ = await connect(BODY | {"sampling_params": sampling})
        await until(lambda: len(engine.queues) == 3)
        engine.end(1, [5, 6])
        engine.end(2, [7], "length")
        await asyncio.sleep(0.1)
        engine.end(0, [8, 9])
        return whole(await reader.read()), engine

    (status, body), engine = served(asks)
    assert status == 200
    found = msgspec.msgpack.decode(body, type=list[Sampled])
    assert [list(memoryview(each.token_ids).cast("i")) for each in found] == [[8, 9], [5, 6], [7]]
    assert memoryview(found[1].logprobs).cast("f").tolist() == [-2.5, -3.0]
    assert found[1].weight_versions == [("7", 0, 2)]
    assert [each.finish_reason for each in found] == ["stop", "stop", "length"]
    assert not engine.aborted
    assert engine.adapters == [None] * 3  # there was no update
    params = list(engine.params.values())
    assert [own.seed for own in params] == [40, 41, 42]
    for own in params:
        assert (own.n, own.detokenize, own.output_kind) == (1, False, RequestOutputKind.FINAL_ONLY)


def test_what_a_request_leaves_out():
    """Stop strings need the text; without max_tokens the context is the limit, and not 16."""
    params = sample._params(SampleRequest([5], {"stop": ["x"], "n": 2}))
    assert params.detokenize
    assert params.max_tokens is None


@pytest.mark.parametrize(
    ("request_of", "status"),
    [
        ({"body": b"{not json"}, 400),
        ({"body": b""}, 400),
        ({"body": BODY | {"content_parts": []}}, 400),
        ({"body": {"token_ids": ["x"], "sampling_params": {}}}, 400),
        ({"body": {"token_ids": [5], "sampling_params": {"temperature": -1.0}}}, 400),
        ({"body": {"token_ids": [5], "sampling_params": {"seed": 2**64}}}, 400),
        ({"body": BODY, "kind": "text/plain"}, 400),
        ({"body": BODY, "kind": "application/x-www-form-urlencoded"}, 400),
        ({"body": BODY, "length": MAX_BODY_BYTES + 1}, 413),
        ({"body": {}, "path": "/sleep"}, 400),
        ({"body": {"level": 2}, "path": "/sleep"}, 400),  # it cannot
        ({"body": {"weight_version": 7}, "path": "/update"}, 400),
        ({"body": {"weight_version": "7", "meeting": {}}, "path": "/update"}, 400),
        ({"body": {"trainer": None}, "path": "/connect"}, 400),
    ],
)
def test_what_is_refused(request_of, status):
    engine = Engine()
    ((found, body),) = replied(engine, request_of)
    assert found == status
    assert "\n" not in json.loads(body)["error"]
    assert not engine.queues
    assert not engine.calls


def test_posts_alone():
    """A web page, or a mistyped address, changes nothing."""
    engine = Engine()
    asked: list[Any] = [
        {"body": {}, "path": path, "method": method}
        for path in POSTS
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH")
    ]
    assert {status for status, _ in replied(engine, *asked)} == {405}
    assert not engine.calls


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("it is\nbroken"), 500, "RuntimeError: it is broken"),
        (VLLMClientError("no such\ntoken"), 400, "VLLMClientError: no such token"),
    ],
)
def test_an_engine_that_fails_at_the_second_of_three(error, status, said):
    """A refusal of vLLM's is told as one."""
    engine = Engine()
    engine.fails_at = 1
    engine.error = error
    ((found, body),) = replied(engine, {"body": BODY})
    assert found == status
    assert json.loads(body) == {"error": said}
    assert engine.aborted == list(engine.params)


def test_an_engine_that_fails_later():
    """The reply breaks off, and what is left of it is aborted."""

    async def asks(engine, connect):
        reader, _ = await connect(BODY)
        await until(lambda: len(engine.queues) == 3)
        engine.end(0, [5])
        await asyncio.sleep(0.1)
        engine.queues[1].put(RuntimeError("it is\nbroken"))
        reply = whole(await reader.read())
        await until(lambda: engine.aborted)
        return reply, engine

    (_, body), engine = served(asks)
    assert body is None
    assert list(engine.params)[2] in engine.aborted


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
        await until(lambda: {0, 2} <= {[*engine.params].index(name) for name in engine.aborted})
        return engine

    engine = served(asks)
    names = list(engine.params)
    assert {names[0], names[2]} <= set(engine.aborted)
    assert len(names) == 3


def test_aborts_that_fail_are_no_noise(caplog):
    async def asks(engine, connect):
        tried = []

        async def abort(names, internal):
            tried.append(names)
            raise RuntimeError("dead")

        engine.abort = abort
        _, writer = await connect(BODY)
        await until(lambda: len(engine.queues) == 3)
        writer.close()
        await until(lambda: tried)
        await asyncio.sleep(0.1)

    served(asks)
    assert "never retrieved" not in caplog.text


# -- a trainer -------------------------------------------------------------------------------------


def test_who_only_asks_changes_nothing():
    engine = Engine(lora_config=SimpleNamespace(max_lora_rank=8), can_sleep=True)
    ((status, body),) = replied(engine, {"body": {}, "path": "/connect"})
    assert status == 200
    assert msgspec.json.decode(body, type=About) == About(["m"], 64, "bfloat16", 8, True)
    assert not engine.calls


def test_a_trainer_has_it_until_it_hangs_up():
    """Others are refused, and change nothing; the same may come again, before it has hung up."""

    async def asks(engine, connect):
        async def taken(name):
            reader, writer = await connect({"trainer": name}, "/connect")
            status = int((await reader.readline()).split()[1])
            while await reader.readline() not in (b"\r\n", b""):
                pass
            size = int(await reader.readline(), 16) if status == 200 else 0
            return status, await reader.readexactly(size), writer

        status, line, first = await taken("a")
        about = msgspec.json.decode(line, type=About)
        assert (status, about.gpus) == (200, ["gpu 0", "gpu 1"])
        assert engine.calls == ["pause_generation", "connect"]
        assert (await taken("b"))[0] == 400
        status, _, second = await taken("a")
        assert status == 200
        first.close()
        await asyncio.sleep(0.2)
        assert (await taken("b"))[0] == 400  # the second connection is open
        assert len(engine.calls) == 4
        second.close()
        for _ in range(100):
            status, _, _ = await taken("b")
            if status == 200:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the trainer has left, and the server is not free")

    served(asks)


def test_the_trainers_client_keeps_it_until_it_disconnects():
    """Or is connected anew, by which the server is never free in between."""

    async def asks(engine, connect):
        _, port = (await connect({}, "/connect"))[1].get_extra_info("peername")
        one, other = (Server(f"http://127.0.0.1:{port}", 10.0) for _ in range(2))
        for _ in range(2):
            await asyncio.to_thread(one.connect, "one")
            assert one.about.gpus == ["gpu 0", "gpu 1"]
            await asyncio.sleep(0.2)
            with pytest.raises(ServerError, match="another trainer uses this server"):
                await asyncio.to_thread(other.connect, "other")
        await asyncio.to_thread(other.connect)  # who only asks takes nothing
        assert len(engine.calls) == 4
        one.disconnect()
        await asyncio.sleep(0.2)
        await asyncio.to_thread(other.connect, "other")
        other.disconnect()

    served(asks)


# -- updates ---------------------------------------------------------------------------------------


def updated(steps, loads=None, **options):
    engine = Engine(trainer="t", **options)
    engine.steps = steps
    engine.loads = loads or engine.loads
    ((status, body),) = replied(engine, {"body": UPDATE, "path": "/update"})
    return status, body, engine


def test_sampling_pauses_once_every_worker_has_the_weights():
    """The version is set within the pause: no token is of new weights and the old version."""
    status, body, engine = updated([[COMING, COMING], [COMING, WHOLE], [WHOLE, WHOLE]])
    assert status == 200
    assert msgspec.msgpack.decode(body, type=Updated).paused_s > 0
    assert not engine.steps[1:]
    assert engine.calls == [
        "begin_update", "clear_mm_cache_async", "pause_scheduler_async", "load_update",
        "update_weight_version", "resume_generation",
    ]  # fmt: skip


def test_a_worker_that_is_full_keeps_no_other_waiting():
    """It takes no more until it may load what it has."""
    status, _, engine = updated([[COMING, COMING], [LOADS_NOW, COMING]])
    assert status == 200
    assert "resume_generation" in engine.calls


@pytest.mark.parametrize("trainer", ["", "another"])
def test_an_update_of_a_trainer_that_has_not_the_server(trainer):
    """As one that is gone, whose request was long on its way."""
    engine = Engine(trainer=trainer)
    asked = [
        {"body": UPDATE, "path": "/update"},
        {"body": UPDATE | {"weight_version": ""}, "path": "/update"},
    ]
    assert [status for status, _ in replied(engine, *asked)] == [400, 400]
    assert not engine.calls


@pytest.mark.parametrize("version", ["", "8"])
def test_another_request_ends_an_update(version):
    """Of the trainer that gives it up, or begins the next one: only that is loaded then."""

    async def asks(engine, connect):
        engine.steps = [[COMING, COMING]]
        first, one = await connect(UPDATE, "/update")
        await until(lambda: engine.calls == ["begin_update"])
        second, two = await connect(UPDATE | {"weight_version": version}, "/update")
        status, body = whole(await first.read())
        assert (status, json.loads(body)) == (409, {"error": "the trainer has given it up"})
        engine.steps = [[WHOLE, WHOLE]]
        assert whole(await second.read())[0] == 200
        assert engine.calls.count("load_update") == bool(version)
        one.close()
        two.close()

    served(asks, Engine(trainer="t"))


def test_one_that_sleeps_gets_its_cache_last():
    """vLLM samples again once it has that."""
    status, _, engine = updated([[LOADS_NOW, LOADS_NOW]], can_sleep=True)
    assert status == 200
    assert [name for name in engine.calls if "mm" not in name] == [
        "begin_update", "wake_up", "pause_scheduler_async", "load_update", "update_weight_version",
        "wake_up", "resume_generation",
    ]  # fmt: skip


@pytest.mark.parametrize("arrived", [[], [[LOADS_NOW, WHOLE]]])
@pytest.mark.parametrize(("state", "code"), [(GIVEN_UP, 409), (FAILED, 500)])
def test_an_update_that_comes_to_nothing_on_one_worker(arrived, state, code):
    """The trainer gets the reason; a server that has a part of it samples nothing.

    It is to blame where the update came, and cannot be loaded.
    """
    end = [[COMING, state]]
    status, body, engine = updated(arrived or end, end)
    assert status == code
    assert json.loads(body) == {"error": REASON}
    assert engine.calls[-1] == "give_up_update"
    assert ("load_update" in engine.calls) == bool(arrived)
    assert "update_weight_version" not in engine.calls
    assert "resume_generation" not in engine.calls


def test_a_trainer_that_leaves_an_update():
    """Or a server would wait for it, and take no other."""

    async def asks(engine, connect):
        engine.steps = [[COMING, COMING]]
        _, writer = await connect(UPDATE, "/update")
        await until(lambda: engine.calls == ["begin_update"])
        writer.close()
        await until(lambda: engine.calls == ["begin_update", "give_up_update"])

    served(asks, Engine(trainer="t"))


def test_adapters_are_sampled_from_after_an_update():
    async def asks(engine, connect):
        for _ in range(2):
            engine.steps = [[WHOLE, WHOLE]]
            _, writer = await connect(BODY)
            await until(lambda: len(engine.queues) % 3 == 0)
            writer.close()
            reader, _ = await connect(UPDATE, "/update")
            assert whole(await reader.read())[0] == 200
        return engine.adapters

    before, after = served(asks, Engine(SimpleNamespace(max_lora_rank=8), trainer="t"))[2:4]
    assert before is None
    assert after.lora_name == "policy"


# -- strangers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [None, "wrong", "", "tok\u00e9"])
def test_no_route_without_the_token(monkeypatch, word):
    """But for /health, and with any body: none is read before."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    engine = Engine()
    engine.steps = [[WHOLE, WHOLE]]
    given = "" if word is None else f"\r\nAuthorization: Bearer {word}"
    bodies = [BODY, UPDATE, {}, {"trainer": "a"}, {"level": 2}, b"{not json"]
    asked: list[Any] = [
        {"body": body, "path": path, "kind": f"application/json{given}"}
        for path in POSTS
        for body in bodies
    ]
    assert {status for status, _ in replied(engine, *asked)} == {401}
    assert not engine.calls
    assert not engine.queues
    assert replied(engine, {"body": b"", "path": "/health", "method": "GET"})[0][0] == 200
    right = {"body": {}, "path": "/connect", "kind": "x\r\nAuthorization: Bearer secret"}
    assert replied(engine, right)[0][0] == 400
    right["kind"] = "application/json\r\nAuthorization: Bearer secret"
    assert replied(engine, right)[0][0] == 200


def test_statistics_need_the_token(monkeypatch):
    async def asks(_, connect):
        found = []
        for path in ("/metrics", "/metrics/", "/metrics/x"):
            for word in ("", "\r\nAuthorization: Bearer secret"):
                reader, _ = await connect(b"", path, "GET", f"x{word}")
                found.append(whole(await reader.read()))
        return found

    monkeypatch.setenv("VLLM_API_KEY", "secret")
    found = served(asks, metrics=True)
    assert not any(b"python_info" in body for status, body in found[::2])
    assert any(b"python_info" in body for status, body in found[1::2])
