"""The server's own route for updates."""

import asyncio
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from server.adapter import ADAPTER
from server.route import json_body, refusal

POLL_S = 5e-3  # between looks whether an update has arrived


class UpdateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON that a trainer posts to the route."""

    weight_version: str
    connection: str  # over which the weights come


REQUEST = msgspec.json.Decoder(UpdateRequest)


async def update(scope: Scope, receive: Receive, send: Send) -> None:
    """Take an update from the trainer, and sample on as its version.

    Sampling pauses once the update is there, or before it comes where memory has no room for it.
    The answer says for how many seconds. A server that sleeps wakes up for it. After an error it
    may stay paused, with other weights: the trainer takes the server for lost.
    """
    state: Any = scope["app"].state
    try:
        request = REQUEST.decode(await json_body(Request(scope, receive)))
        paused_s = await _update(state, request)
        answer = JSONResponse({"paused_s": paused_s})
    except Exception as error:  # whatever vLLM raises: the server goes on
        answer = refusal(error)
    await answer(scope, receive, send)


async def _update(state: Any, request: UpdateRequest) -> float:
    """Put an update in place once it has come; returns the seconds of the pause."""
    engine = state.engine_client
    while not all(await engine.collective_rpc("can_place_update", args=(request.connection,))):
        await asyncio.sleep(POLL_S)

    can_sleep = engine.vllm_config.model_config.enable_sleep_mode
    if can_sleep:  # if it is awake, vLLM would take this for the end of a pause
        await engine.wake_up(["weights"])
    await engine.renderer.clear_mm_cache_async()
    # vLLM's `pause_generation` takes 20 ms more.
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
    started_s = time.monotonic()
    await engine.collective_rpc("place_update", args=(request.connection,))
    if engine.vllm_config.lora_config:
        state.lora_request = ADAPTER  # of all completions from now on
    await engine.update_weight_version(request.weight_version)
    if can_sleep:
        # The cache comes last: loading may need its memory, and with it vLLM samples again.
        await engine.wake_up(["kv_cache"])
    await engine.resume_generation()
    return time.monotonic() - started_s
