"""The server's routes, on vLLM's engine: a trainer connects, samples and sends its weights.

Completions are ids in, arrays out: vLLM's own route makes an object and 132 bytes of JSON of every
token, and decodes text that nobody reads.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import astuple
from itertools import chain
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker
from vllm.sampling_params import RequestOutputKind, SamplingParams

from server.messages import (
    MAX_BODY_BYTES,
    NOT_ARRIVED,
    About,
    ConnectRequest,
    Sampled,
    SampleRequest,
    SleepRequest,
    UpdateRequest,
    api_token,
)  # fmt: skip
from server.receiver import ADAPTER, BROKEN, COMING

POLL_S = 5e-3  # between looks how far an update is
# What a request is to blame for; msgpack raises the second and third.
REFUSALS = (ValueError, OverflowError, TypeError, msgspec.MsgspecError, VLLMClientError)


class KnownParams(SamplingParams, forbid_unknown_fields=True):
    """vLLM's parameters, without others that it would leave out."""


class RolloutServer:
    """The routes, and the trainer that has the server: one at a time."""

    def __init__(self, engine: Any, args: Any):
        self.engine = engine
        self.args = args
        self.config = engine.vllm_config
        self.can_sleep = engine.vllm_config.model_config.enable_sleep_mode
        self.trainer = ""  # that took the server last
        self._connection: Request | None = None  # by which it has it, while that is open
        self._coming: UpdateRequest | None = None  # the last update
        self._changing = asyncio.Lock()  # the weights: one at a time does
        self._adapter: Any = None  # of all completions, after an update
        routes = [
            Route("/health", self.health),
            self._route("/connect", self.connect, ConnectRequest),
            self._route("/sample", self.sample, SampleRequest),
            self._route("/update", self.update, UpdateRequest),
            self._route("/sleep", self.sleep, SleepRequest),
        ]
        if args.metrics:
            routes.append(self._route("/metrics", self.metrics))
        self.app = Starlette(routes=routes)

    def _route(
        self, path: str, answer: Callable[[Any, Request], Awaitable[Response]], kind: Any = None
    ) -> Route:
        """A route for who has the token: a POST of a JSON of this kind, or a GET without one."""
        token = f"Bearer {api_token()}".encode()

        async def checked(http: Request) -> Response:
            given = http.headers.get("authorization", "").encode()
            if api_token() and not hmac.compare_digest(given, token):
                raise HTTPException(401, "no or a wrong token: set VLLM_API_KEY to the server's")
            length = int(http.headers.get("content-length", 0))  # which uvicorn has checked
            if "transfer-encoding" in http.headers or length > MAX_BODY_BYTES:
                raise HTTPException(
                    413, f"it takes {MAX_BODY_BYTES} bytes, and wants to know how many"
                )
            try:
                request = None
                if kind:
                    # A web page may send any other type without being asked.
                    if http.headers.get("content-type") != "application/json":
                        raise ValueError("it takes application/json")
                    request = msgspec.json.decode(await http.body(), type=kind)
                return await answer(request, http)
            except Exception as error:  # whatever vLLM raises: the server goes on
                status = 400 if isinstance(error, REFUSALS) else 500
                raise HTTPException(status, f"{type(error).__name__}: {error}") from error

        return Route(path, checked, methods=["POST" if kind else "GET"])

    async def _on_workers(self, method: str, *args: Any) -> list[Any]:
        """What a method of `WorkerExtension` returns, of all workers of all engines."""
        of_engines = await self.engine.engine_core.call_utility_all_async(
            "collective_rpc", method, None, args, None
        )
        return [*chain.from_iterable(of_engines)]

    async def health(self, _: Request) -> Response:
        """Answer while the engine lives."""
        await self.engine.check_health()
        return Response()

    async def metrics(self, _: None, __: Request) -> Response:
        """Statistics of vLLM."""
        return Response(generate_latest())

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
            self.can_sleep,
        )
        if request.temperature:
            await self._on_workers("become_reference", request.temperature)
        if request.sampling_params:
            tried = await self._begin(SampleRequest([0], request.sampling_params))
            await self.engine.abort([tried.request_id], internal=True)
        if not request.trainer:
            return Response(msgspec.json.encode(about))

        is_free = not self._connection or await self._connection.is_disconnected()
        if request.trainer != self.trainer and not is_free:
            raise ValueError("another trainer uses this server: one at a time")
        self.trainer = request.trainer
        self._connection = http
        self._coming = None
        async with self._changing:
            # It may be asleep, or paused in the middle of an update, since an earlier trainer.
            if self.can_sleep:
                await self.engine.wake_up()
            await self.engine.pause_generation(mode="abort", clear_cache=True)
            # Late requests must not get zeroed weights: it stays paused until the first update, or
            # with sleep mode until that wakes its weights.
            about.gpus = await self._on_workers("zero_weights")

        async def held() -> AsyncIterator[bytes]:
            yield msgspec.json.encode(about) + b"\n"
            await asyncio.Event().wait()  # this is cancelled once the trainer has hung up

        return StreamingResponse(held())

    # -- /sample -----------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest, _: Request) -> Response:
        """Answer the completions of a prompt in one piece, once all have ended."""
        begun = await self._begin(request)

        async def reply() -> AsyncIterator[bytes]:
            try:
                output = await begun.get()
            except BaseException:  # a client that hangs up cancels this, perhaps once more
                await asyncio.shield(self.engine.abort([begun.request_id], internal=True))
                raise
            expanded = output.prompt_token_ids if request.images else []
            prompt_ids = np.asarray(expanded, "<i4").tobytes()
            of_prompt = getattr(output.prompt_logprobs, "logprobs", [])  # where asked for
            prompt_logprobs = np.asarray(of_prompt, "<f4").tobytes()
            messages = []
            for completion in output.outputs:
                logprobs = getattr(completion.logprobs, "logprobs", [])
                spans = completion.weight_versions or []
                message = Sampled(
                    completion.finish_reason,
                    np.asarray(completion.token_ids, "<i4").tobytes(),
                    np.asarray(logprobs, "<f4").tobytes(),
                    [astuple(span) for span in spans],
                    prompt_ids,
                    prompt_logprobs,
                )
                messages.append(message)
            yield msgspec.msgpack.encode(messages)

        return StreamingResponse(reply())

    async def _begin(self, request: SampleRequest) -> Any:
        """Begin completions: whole ones, without a text that nobody reads.

        Returns:
            vLLM's collector of their outputs.

        Raises:
            Exception: whatever vLLM raises where it refuses one.
        """
        # Without a limit a completion may fill the context; vLLM's own default is 16 tokens.
        given = {"max_tokens": None, **request.sampling_params}
        params = msgspec.convert(given, KnownParams, str_keys=True)
        # Else the engine's encoder fails on them once the request is registered, which then stays.
        msgspec.msgpack.encode(params)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        params.flat_logprobs = True
        params.detokenize = bool(params.stop)

        prompt: Any = {"type": "token", "prompt_token_ids": request.token_ids}
        if request.images:
            tracker = AsyncMultiModalItemTracker(self.engine.model_config)
            parser = tracker.create_parser()
            for url in request.images:
                parser.parse_image(url, None)
            images, _ = await tracker.resolve_items()
            prompt = TokensPrompt(prompt_token_ids=request.token_ids, multi_modal_data=images)
            (prompt,) = await self.engine.renderer.render_cmpl_async([prompt])
        return await self.engine.add_request(
            uuid4().hex, prompt, params, lora_request=self._adapter, priority=request.priority
        )

    # -- /update, /sleep ---------------------------------------------------------------------------

    async def update(self, request: UpdateRequest, http: Request) -> Response:
        """Take an update, and sample on as its version; sampling pauses to put it in place.

        While it comes it is given up where the trainer asks for that, begins another, or hangs up.
        After an error sampling may stay paused, with a part of the weights, until the next update.
        """
        if request.trainer != self.trainer:
            raise ValueError("another trainer uses this server")
        engine = self.engine
        self._coming = request  # one that is under way sees it, and ends
        async with self._changing:
            if not request.weight_version:
                return Response()
            is_sampling = engine.output_processor.has_unfinished_requests()
            await self._on_workers("begin_update", request.meeting, is_sampling)
            state = COMING
            while state == COMING:
                await asyncio.sleep(POLL_S)
                state, error = min(await self._on_workers("state_of_update"))
                is_over = self._coming is not request or await http.is_disconnected()
                if is_over or state == BROKEN:
                    return Response(error or "the trainer has given it up", NOT_ARRIVED)

            started_s = time.monotonic()
            if self.can_sleep:
                await engine.wake_up(["weights"])  # before the pause, which it would end
            await engine.renderer.clear_mm_cache_async()
            # vLLM's `pause_generation` takes 20 ms more.
            await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
            error = max(await self._on_workers("load_update"))
            if error:
                return Response(error, NOT_ARRIVED)

            if self.config.lora_config:
                self._adapter = ADAPTER
            await engine.update_weight_version(request.weight_version)
            if self.can_sleep:
                # The cache comes last: loading may need its memory, and then vLLM samples again.
                await engine.wake_up(["kv_cache"])
            await engine.resume_generation()
            return Response(msgspec.msgpack.encode(time.monotonic() - started_s))

    async def sleep(self, request: SleepRequest, _: Request) -> Response:
        """Give up the GPU's memory until the next update."""
        await self.engine.sleep(request.level)
        return Response()
