"""The server's routes, on vLLM's engine: a trainer connects, samples and sends its weights."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable
from itertools import chain
from typing import Any

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import VLLMClientError

from server.adapter import ADAPTER
from server.messages import (
    MAX_BODY_BYTES,
    About,
    ConnectRequest,
    SampleRequest,
    SleepRequest,
    Updated,
    UpdateRequest,
    api_token,
)  # fmt: skip
from server.receiver import COMING, FAILED, GIVEN_UP, LOADED, LOADS_NOW, WHOLE
from server.sample import abort, begin, replies

POLL_S = 5e-3  # between looks how far an update is
# What a request is to blame for; msgpack raises the second and third.
REFUSALS = (ValueError, OverflowError, TypeError, msgspec.MsgspecError, VLLMClientError)


class RolloutServer:
    """The routes, and the trainer that has the server: one at a time."""

    def __init__(self, engine: Any, args: Any):
        self.engine = engine
        self.args = args
        self.config = engine.vllm_config
        self.trainer = ""  # that took the server last
        self._connection: Request | None = None  # by which it has it, while that is open
        self._coming: UpdateRequest | None = None  # the last update
        self._changing = asyncio.Lock()  # the weights: one at a time does
        self._adapter: Any = None  # of all completions, after an update
        routes: list[Any] = [
            Route("/health", self.health),
            self._route("/connect", ConnectRequest, self.connect),
            self._route("/sample", SampleRequest, self.sample),
            self._route("/update", UpdateRequest, self.update),
            self._route("/sleep", SleepRequest, self.sleep),
        ]
        if args.metrics:
            routes.append(Route("/metrics", lambda _: Response(generate_latest())))
        app = Starlette(routes=routes)
        app.router.redirect_slashes = False
        self.app = Guard(app)

    def _route(self, path: str, kind: Any, answer: Callable[[Any, Request], Any]) -> Route:
        """A route for a JSON of this kind."""

        async def checked(http: Request) -> Response:
            try:
                # A web page may send any other type without being asked.
                if http.headers.get("content-type") != "application/json":
                    raise ValueError("it takes application/json")
                request = msgspec.json.decode(await http.body(), type=kind)
                response: Response = await answer(request, http)
                return response
            except Exception as error:  # whatever vLLM raises: the server goes on
                status = 400 if isinstance(error, REFUSALS) else 500
                return refusal(status, f"{type(error).__name__}: {error}")

        return Route(path, checked, methods=["POST"])

    async def _on_workers(self, method: str, *args: Any) -> list[Any]:
        """What a method of `WorkerExtension` returns, of all workers of all engines."""
        of_engines = await self.engine.engine_core.call_utility_all_async(
            "collective_rpc", method, None, args, None
        )
        return [*chain.from_iterable(of_engines)]

    async def health(self, _: Request) -> Response:
        """Answer while the engine lives."""
        await self.engine.check_health()
        return JSONResponse({})

    # -- /connect ----------------------------------------------------------------------------------

    async def connect(self, request: ConnectRequest, http: Request) -> Response:
        """Tell about this server, and take a trainer, for as long as its connection lasts."""
        config = self.config
        lora = config.lora_config
        about = About(
            [self.args.model, *(self.args.served_model_name or [])],
            config.model_config.max_model_len,
            str(config.model_config.dtype).removeprefix("torch."),
            lora.max_lora_rank if lora else 0,
            config.model_config.enable_sleep_mode,
        )
        if request.temperature:
            await self._on_workers("become_reference", request.temperature)
        if request.sampling_params:
            trial = SampleRequest([0], request.sampling_params)
            await abort(await begin(trial, self.engine, None), self.engine)
        if not request.trainer:
            return Response(msgspec.json.encode(about))

        is_free = not self._connection or await self._connection.is_disconnected()
        if request.trainer != self.trainer and not is_free:
            raise ValueError("another trainer uses this server: one at a time")
        if await http.is_disconnected():  # its request was long on its way
            raise ValueError("the trainer has hung up")
        self.trainer = request.trainer
        self._connection = http
        self._coming = None
        async with self._changing:
            # It may be asleep, or paused in the middle of an update, since an earlier trainer.
            if config.model_config.enable_sleep_mode:
                await self.engine.wake_up()
            await self.engine.pause_generation(mode="abort", clear_cache=True)
            # It stays paused until the first update: late requests must not get zeroed weights.
            about.gpus = await self._on_workers("connect")
        return StreamingResponse(self._held(about))

    async def _held(self, about: About) -> AsyncIterator[bytes]:
        """Tell about this server, and leave the connection open."""
        yield msgspec.json.encode(about) + b"\n"
        await asyncio.Event().wait()  # this is cancelled once the trainer has hung up

    # -- /sample -----------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest, _: Request) -> Response:
        """Completions of a prompt."""
        begun = await begin(request, self.engine, self._adapter)
        return StreamingResponse(replies(begun, bool(request.images), self.engine))

    # -- /update, /sleep ---------------------------------------------------------------------------

    async def update(self, request: UpdateRequest, http: Request) -> Response:
        """Take an update, and sample on as its version; sampling pauses to put it in place.

        It is given up where the trainer asks for that, begins another, or hangs up. After an error
        sampling may stay paused, with a part of the weights, until the next update.
        """
        if request.trainer != self.trainer:
            raise ValueError("another trainer uses this server")
        engine = self.engine
        self._coming = request  # one that is under way sees it, and ends
        async with self._changing:
            if not request.weight_version:
                return JSONResponse({})
            can_sleep = self.config.model_config.enable_sleep_mode
            is_sampling = engine.output_processor.has_unfinished_requests()
            await self._on_workers("begin_update", request.meeting, is_sampling)
            state = COMING
            while state != LOADED:
                await asyncio.sleep(POLL_S)
                state, error = min(await self._on_workers("state_of_update"))
                is_over = self._coming is not request or await http.is_disconnected()
                if is_over or state in (FAILED, GIVEN_UP):
                    await self._on_workers("give_up_update")
                    status = 500 if state == FAILED else 409
                    return refusal(status, error or "the trainer has given it up")
                if state in (LOADS_NOW, WHOLE):
                    started_s = time.monotonic()
                    if can_sleep:
                        await engine.wake_up(["weights"])  # which would end a pause
                    await engine.renderer.clear_mm_cache_async()
                    # vLLM's `pause_generation` takes 20 ms more.
                    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
                    await self._on_workers("load_update")

            if self.config.lora_config:
                self._adapter = ADAPTER
            await engine.update_weight_version(request.weight_version)
            if can_sleep:
                # The cache comes last: loading may need its memory, and then vLLM samples again.
                await engine.wake_up(["kv_cache"])
            await engine.resume_generation()
            return Response(msgspec.msgpack.encode(Updated(time.monotonic() - started_s)))

    async def sleep(self, request: SleepRequest, _: Request) -> Response:
        """Give up the GPU's memory until the next update."""
        if not self.config.model_config.enable_sleep_mode:
            raise ValueError("it was started without --enable-sleep-mode")
        await self.engine.sleep(request.level)
        return JSONResponse({})


class Guard:
    """Lets requests with the token pass, where one is set, and bodies of a stated length."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._token = f"Bearer {api_token()}".encode() if api_token() else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        answer = self._app
        headers = dict(scope.get("headers", []))
        length = int(headers.get(b"content-length", 0))  # which uvicorn has checked
        is_open = scope["path"] == "/health"
        given = headers.get(b"authorization", b"")
        if not is_open and self._token and not hmac.compare_digest(given, self._token):
            answer = refusal(401, "no or a wrong token: set VLLM_API_KEY to the server's")
        elif b"transfer-encoding" in headers or length > MAX_BODY_BYTES:
            answer = refusal(413, f"it takes {MAX_BODY_BYTES} bytes, and wants to know how many")
        await answer(scope, receive, send)


def refusal(status: int, text: str) -> JSONResponse:
    """The answer to a request that is not served."""
    return JSONResponse({"error": " ".join(text.split())}, status)
