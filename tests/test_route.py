"""The server's own routes, on a stand-in for the engine: refusals, aborts, errors, and updates."""

import asyncio
import json
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from helpers import wait_until

pytest.importorskip("vllm", reason="tests of the server's side")

import uvicorn
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from server.app import RolloutServer
from server.messages import MAX_BODY_BYTES, About
from server.receiver import BROKEN, COMING, LOADS_NOW, WHOLE
from vllm_client import TRAINER, Server, ServerError, ServerLost, UpdateBroken
from weights.group import Meeting

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


class Engine:
    """Takes completions, and ends them when it is told to; and two workers, which do as told."""

    def __init__(self, lora_config=None, can_sleep=False, trainer="", steps=(), loads=("", "")):
        self.trainer = trainer  # that has the server
        # What the workers answer to each step of an update, the last one for ever.
        self.steps: list[list[Any]] = [*steps]
        self.loads = loads  # what they return of `load_update`, or an error
        self.params = {}
        self.queues = []
        self.aborted = []
        self.is_asked = False
        self.slowness_s = 0.0
        self.calls: list[Any] = []  # in their order, but for steps of updates
        model_config = SimpleNamespace(
            max_model_len=64, dtype="torch.bfloat16", enable_sleep_mode=can_sleep
        )
        self.vllm_config = SimpleNamespace(model_config=model_config, lora_config=lora_config)
        self.engine_core = self.renderer = self.output_processor = self

    async def add_request(self, name, prompt, params, lora_request, priority):
        self.is_asked = True
        await asyncio.sleep(self.slowness_s)
        self.params[name] = params
        self.loop = asyncio.get_running_loop()
        self.queues.append(RequestOutputCollector(RequestOutputKind.FINAL_ONLY, name))
        return self.queues[-1]

    def has_unfinished_requests(self):
        return bool(self.queues)

    async def abort(self, names, internal):
        assert internal
        self.aborted += names

    async def check_health(self):
        pass

    async def call_utility_all_async(self, name, method, timeout, args, kwargs):
        """Of two engines with a worker each, as a list of lists."""
        assert name == "collective_rpc"
        found: list[Any] = [None] * 2
        if method == "state_of_update":
            states = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
            found = [(state, REASON if state == BROKEN else "") for state in states]
        else:
            self.calls.append(method)
        if method == "zero_weights":
            found = ["gpu 0", "gpu 1"]
        if method == "load_update":
            found = [*self.loads]
        for each in found:
            if isinstance(each, Exception):
                raise each
        return [[each] for each in found]

    def __getattr__(self, name):
        async def noted(*args, **options):
            self.calls.append(name)

        return noted


class Served:
    """The routes on an engine, served in a thread until the block ends."""

    def __init__(self, engine=None, **options):
        self.engine = engine or Engine()
        args: Any = {"model": "m", "served_model_name": None, "metrics": False, **options}
        self.routes = RolloutServer(self.engine, SimpleNamespace(**args))
        self.routes.trainer = self.engine.trainer
        config = uvicorn.Config(self.routes.app, port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(20)

    def client(self):
        """The trainer's client of it."""
        return Server(f"http://127.0.0.1:{self.port}", 10.0)

    def send(self, body, path="/sample", method="POST", headers=()):
        """Send a request; the connection, whose answer may still be coming."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", "Content-Length": len(data), **dict(headers)}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.putrequest(method, path)
        for name, value in given.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(data)
        return connection

    def ask(self, *request, **options):
        """The status and body of the answer to a request."""
        return answer(self.send(*request, **options))


def answer(connection):
    reply = connection.getresponse()
    return reply.status, reply.read()


def statuses(engine, *requests):
    """Of the answers to requests, none of which may change anything."""
    with Served(engine) as served:
        found = [served.ask(**request)[0] for request in requests]
    assert not engine.queues
    assert not engine.calls
    return found


def test_what_the_engine_is_asked():
    """Stop strings need the text; without max_tokens the context is the limit, and not 16."""
    engine = Engine()
    with Served(engine) as served:
        served.send(BODY | {"sampling_params": {"n": 3, "max_tokens": 4, "seed": 40}})
        wait_until(lambda: len(engine.params) == 1)
        served.send(BODY | {"sampling_params": {"stop": ["x"]}})
        wait_until(lambda: len(engine.params) == 2)
    one, other = engine.params.values()
    assert (one.n, one.max_tokens, one.seed, one.detokenize) == (3, 4, 40, False)
    assert (other.max_tokens, other.detokenize) == (None, True)
    assert one.output_kind == RequestOutputKind.FINAL_ONLY


CHUNKED = {"Content-Length": None, "Transfer-Encoding": "chunked"}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/sample", b"{not json", {}, 400),
        ("/sample", b"", {}, 400),
        ("/sample", BODY | {"content_parts": []}, {}, 400),
        ("/sample", {"token_ids": ["x"], "sampling_params": {}}, {}, 400),
        ("/sample", {"token_ids": [5], "sampling_params": {"temperature": -1.0}}, {}, 400),
        ("/sample", {"token_ids": [5], "sampling_params": {"seed": 2**64}}, {}, 400),
        ("/sample", BODY, {"Content-Type": "text/plain"}, 400),
        ("/sample", BODY, {"Content-Type": "application/x-www-form-urlencoded"}, 400),
        ("/sample", BODY, {"Content-Length": MAX_BODY_BYTES + 1}, 413),
        ("/sample", b"2\r\n{}\r\n0\r\n\r\n", CHUNKED, 413),
        ("/sample", b"", {"Content-Length": None}, 400),
        ("/sleep", {}, {}, 400),
        ("/update", {"weight_version": 7}, {}, 400),
        ("/update", {"weight_version": "7", "meeting": {}}, {}, 400),
        ("/update", UPDATE, {}, 400),  # of a trainer that has not the server, as one that is gone
        ("/update", UPDATE | {"weight_version": ""}, {}, 400),
        ("/connect", {"trainer": None}, {}, 400),
    ],
)
def test_what_is_refused(path, body, headers, status):
    asked = {"body": body, "path": path, "headers": headers}
    assert statuses(Engine(trainer="another"), asked) == [status]


POSTS = ("/connect", "/sample", "/update", "/sleep")
TRICKS = (
    "/health/../update", "/health/%2e%2e/update", "//update", "/UPDATE", "/update;x", "/update%20",
    "/health/update", "/./update", "/health%2f..%2fupdate", "/x/../../update", "/%75pdate%00",
    "/metrics/../update", "/metrics/%2e%2e/update",
)  # fmt: skip
THEIRS = (  # routes of vLLM's own server
    "/collective_rpc", "/start_profile", "/wake_up", "/pause", "/v1/load_lora_adapter", "/tokenize",
    "/openapi.json", "/invocations", "/v1/chat/completions", "/v1/completions", "/server_info",
    "/docs", "/init_weight_transfer_engine", "/metrics", "/nothing",
)  # fmt: skip


@pytest.mark.parametrize(
    ("paths", "methods", "status"),
    [
        (POSTS, ("GET", "PUT", "DELETE", "OPTIONS", "PATCH"), 405),
        (THEIRS, ("GET", "POST"), 404),
        (TRICKS, ("GET", "POST"), 404),
    ],
    ids=["methods", "theirs", "tricks"],
)
def test_only_the_trainers_routes_are_open(paths, methods, status):
    """A web page, or a mistyped address, changes nothing; and none of vLLM's own routes is there."""
    asked = [{"body": {}, "path": path, "method": method} for path in paths for method in methods]
    assert set(statuses(Engine(), *asked)) == {status}


@pytest.mark.parametrize("end", ["it hangs up while it adds", "it hangs up", "the engine fails"])
def test_what_is_left_is_aborted(end):
    """Where the trainer leaves, or where the engine fails, by which the reply breaks off."""
    engine = Engine()
    engine.slowness_s = 0.1 if end == "it hangs up while it adds" else 0.0
    with Served(engine) as served:
        connection = served.send(BODY)
        wait_until(lambda: engine.is_asked)
        if engine.slowness_s == 0:
            wait_until(lambda: engine.queues)
            time.sleep(0.1)
        if end == "the engine fails":
            engine.loop.call_soon_threadsafe(engine.queues[0].put, RuntimeError("it is\nbroken"))
            with pytest.raises((HTTPException, ConnectionError)):
                answer(connection)
        else:
            connection.close()
        wait_until(lambda: engine.aborted)
    assert engine.aborted == list(engine.params)


def test_who_only_asks_changes_nothing():
    engine = Engine(lora_config=SimpleNamespace(max_lora_rank=8), can_sleep=True)
    with Served(engine) as served:
        status, body = served.ask({}, "/connect")
    assert status == 200
    assert msgspec.json.decode(body, type=About) == About(["m"], 64, "bfloat16", 8, True)
    assert not engine.calls


def test_a_trainer_has_it_until_it_disconnects():
    """Or is connected anew, by which the server is never free; others are refused, and change nothing."""
    taken = "another trainer uses this server: one at a time"
    engine = Engine()
    with Served(engine) as served:
        one, other = served.client(), served.client()
        for _ in range(2):
            one.connect()
            assert one.about.gpus == ["gpu 0", "gpu 1"]
            time.sleep(0.2)
            with pytest.raises(ServerError, match=taken):
                other.ask("other")
        other.ask()  # who only asks takes nothing
        assert engine.calls == ["pause_generation", "zero_weights"] * 2
        one.disconnect()
        wait_until(lambda: is_taken_by(other))


def is_taken_by(client):
    with suppress(ServerError), client.ask("other"):
        return True


PAUSED = ["clear_mm_cache_async", "pause_scheduler_async", "load_update", "update_weight_version"]


@pytest.mark.parametrize(
    ("steps", "can_sleep", "calls"),
    [
        ([[COMING, COMING], [COMING, WHOLE], [WHOLE, WHOLE]], False, PAUSED),
        # One that is full takes no more until it may load what it has.
        ([[COMING, COMING], [LOADS_NOW, COMING]], False, PAUSED),
        # One that sleeps gets its cache last: then vLLM samples again.
        ([[LOADS_NOW, LOADS_NOW]], True, ["wake_up", *PAUSED, "wake_up"]),
    ],
    ids=["whole", "full", "asleep"],
)
def test_sampling_pauses_once_every_worker_has_the_weights(steps, can_sleep, calls):
    """The version is set within the pause: no token is of new weights and the old version."""
    engine = Engine(trainer="t", can_sleep=can_sleep, steps=steps)
    with Served(engine) as served:
        status, body = served.ask(UPDATE, "/update")
    assert status == 200
    assert msgspec.msgpack.decode(body, type=float) > 0
    assert not engine.steps[1:]
    assert engine.calls == ["begin_update", *calls, "resume_generation"]


@pytest.mark.parametrize("version", ["", "8"])
def test_another_request_ends_an_update(version):
    """Of the trainer that gives it up, or begins the next one: only that is loaded then."""
    engine = Engine(trainer="t", steps=[[COMING, COMING]])
    with Served(engine) as served:
        first = served.send(UPDATE, "/update")
        wait_until(lambda: engine.calls == ["begin_update"])
        second = served.send(UPDATE | {"weight_version": version}, "/update")
        status, body = answer(first)
        assert (status, body) == (409, b"the trainer has given it up")
        engine.steps = [[WHOLE, WHOLE]]
        assert answer(second)[0] == 200
    assert engine.calls.count("load_update") == bool(version)


def test_a_trainer_that_leaves_an_update():
    """Or a server would wait for it, and take no other."""
    engine = Engine(trainer="t", steps=[[COMING, COMING]])
    with Served(engine) as served:
        first = served.send(UPDATE, "/update")
        wait_until(lambda: engine.calls == ["begin_update"])
        first.close()
        wait_until(lambda: not served.routes._changing.locked())


@pytest.mark.parametrize(
    ("steps", "loads", "kind", "said"),
    [
        ([[COMING, BROKEN]], (), UpdateBroken, f"409: .*{REASON}"),
        ([[LOADS_NOW, WHOLE]], ("", REASON), UpdateBroken, f"409: .*{REASON}"),
        ([[WHOLE, WHOLE]], ("", RuntimeError("no place")), ServerLost, "500: .*Error: no place"),
    ],
)
def test_an_update_that_comes_to_nothing_on_one_worker(steps, loads, kind, said):
    """The trainer gets the reason; a server that has a part of it samples nothing.

    It is to blame, and lost, where the update came, and cannot be loaded.
    """
    engine = Engine(trainer=TRAINER, steps=steps, loads=loads)
    with Served(engine) as served, pytest.raises(kind, match=said) as raised:
        served.client().update(7, msgspec.convert(MEETING, Meeting))
    assert raised.type is kind
    assert ("load_update" in engine.calls) == bool(loads)
    assert not {"update_weight_version", "resume_generation"} & {*engine.calls}


@pytest.mark.parametrize("word", [None, "Bearer wrong", "Bearer ", "Bearer tok\u00e9", "secret"])
def test_no_route_without_the_token(monkeypatch, word):
    """With any body: none is read before."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    asked = [
        {"body": body, "path": path, "headers": {"Authorization": word}}
        for path in POSTS
        for body in (BODY, UPDATE, {}, {"trainer": "a"}, {"level": 2}, b"{not json")
    ]
    assert set(statuses(Engine(), *asked)) == {401}


TOKEN = {"Authorization": "Bearer secret"}


def test_with_the_token(monkeypatch):
    """A web page cannot send the type without being asked; whether the server lives, anybody may ask."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    asked = [
        {"body": b"", "path": "/health", "method": "GET"},
        {"body": {}, "path": "/connect", "headers": TOKEN | {"Content-Type": "x"}},
        {"body": {}, "path": "/connect", "headers": TOKEN},
    ]
    assert statuses(Engine(), *asked) == [200, 400, 200]
    with Served(metrics=True) as served:
        for path in ("/metrics", "/metrics/", "/metrics/x"):
            assert b"python_info" not in served.ask(b"", path, "GET")[1]
        assert b"python_info" in served.ask(b"", "/metrics", "GET", TOKEN)[1]
