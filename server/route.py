"""The server's own route for completions: ids in, arrays out.

vLLM's `/inference/v1/generate` makes an object and 132 bytes of JSON of every token, and decodes
text that nobody reads.
"""

import asyncio
from collections.abc import AsyncIterator
from copy import copy
from itertools import chain
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from server.messages import Sampled, packed


class SampleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON that a trainer posts to the route."""

    token_ids: list[int]  # of the prompt
    sampling_params: dict[str, object]  # vLLM's
    images: list[str] = []  # data URIs


PARAMS = TypeAdapter(SamplingParams)
REQUEST = msgspec.json.Decoder(SampleRequest)
# What a request is to blame for; msgpack raises the second and third.
REFUSALS = (ValueError, OverflowError, TypeError, msgspec.MsgspecError, VLLMClientError)
aborts: set[asyncio.Task[None]] = set()  # under way


async def sample(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a `SampleRequest` by a `Sampled` for each completion, as they end.

    A trainer that closes the connection aborts those that have not ended.
    """
    engine = scope["app"].state.engine_client
    begun: list[RequestOutputCollector] = []
    answer: JSONResponse | StreamingResponse
    try:
        request = REQUEST.decode(await json_body(Request(scope, receive)))
        params = _params(request, returns_sampling_mask(scope["app"].state))
        prompt = await _prompt(request, scope["app"].state)
        name = uuid4().hex
        adapter = getattr(scope["app"].state, "lora_request", None)  # there is one after an update
        for number, own_params in enumerate(_of_each(params)):
            begun.append(
                await engine.add_request(
                    f"{name}-{number}", prompt, own_params, lora_request=adapter
                )
            )
    except Exception as error:  # whatever vLLM raises: the server goes on
        _abort(begun, engine)
        answer = refusal(error)
    else:
        answer = StreamingResponse(_replies(begun, bool(request.images), engine))
    await answer(scope, receive, send)


async def json_body(request: Request) -> bytes:
    """The body; ValueError for what a web page may send without being asked (no JSON, a GET)."""
    if request.method != "POST" or request.headers.get("content-type") != "application/json":
        raise ValueError("it takes a POST of application/json")
    return await request.body()


def refusal(error: Exception) -> JSONResponse:
    """The answer to a request that cannot be served."""
    return JSONResponse({"error": _line(error)}, 400 if isinstance(error, REFUSALS) else 500)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def returns_sampling_mask(state: Any) -> bool:
    """True for a server that was started with `--return-sampling-mask`."""
    return bool(state.args.return_sampling_mask)


def _params(request: SampleRequest, has_mask: bool) -> SamplingParams:
    """vLLM's parameters, for completions as a whole and without a text that nobody reads."""
    # Without a limit a completion may fill the context; vLLM's own default is 16 tokens.
    given = {"max_tokens": None, **request.sampling_params}
    if has_mask and given.get("temperature") == 0:  # which vLLM refuses with masks
        given |= {"temperature": 1.0, "top_k": 1}
    params = PARAMS.validate_python(given)
    # Else the engine's encoder fails on them once the request is registered, which then stays.
    msgspec.msgpack.encode(params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = True
    params.detokenize = bool(params.stop)
    return params


def _of_each(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of `params.n` completions: they differ in their seeds, as vLLM's."""
    found = []
    for number in range(params.n):
        own = copy(params)
        own.n = 1
        own.skip_clone = True  # a deep copy of each would cost more than all else here
        if own.seed is not None:
            own.seed += number
        found.append(own)
    return found


async def _prompt(request: SampleRequest, state: Any) -> Any:
    """The prompt as the engine takes it, images processed."""
    if not request.images:
        return {"type": "token", "prompt_token_ids": request.token_ids}
    tracker = AsyncMultiModalItemTracker(state.engine_client.model_config)
    parser = tracker.create_parser()
    for url in request.images:
        parser.parse_image(url, None)
    images, names = await tracker.resolve_items()
    prompt = TokensPrompt(prompt_token_ids=request.token_ids, multi_modal_data=images)
    if names:
        prompt["multi_modal_uuids"] = names
    (rendered,) = await state.online_renderer.renderer.render_cmpl_async([prompt])
    return rendered


async def _replies(
    begun: list[RequestOutputCollector], has_images: bool, engine: Any
) -> AsyncIterator[bytes]:
    """The messages of completions, in the order in which they end."""
    ends = [asyncio.ensure_future(_end(number, queue)) for number, queue in enumerate(begun)]
    try:
        pending = set(ends)
        while pending:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            yield b"".join(packed(_message(*end.result(), has_images)) for end in ended)
    except Exception as error:  # of the engine, after the reply has begun
        yield packed(Sampled(error=_line(error)))
    finally:
        left = [queue for end, queue in zip(ends, begun, strict=True) if not end.done()]
        for end in ends:
            end.cancel()  # of one that has failed, too: nobody asks for its error any more
        _abort(left, engine)


async def _end(number: int, queue: RequestOutputCollector) -> tuple[int, Any]:
    """A completion's number, and its output once it has ended."""
    return number, await queue.get()


def _abort(begun: list[RequestOutputCollector], engine: Any) -> None:
    """Abort completions, in a task of its own: this one may be cancelled."""
    if begun:
        names = [queue.request_id for queue in begun]
        task = asyncio.ensure_future(engine.abort(names, internal=True))
        aborts.add(task)
        task.add_done_callback(_forget)


def _forget(task: asyncio.Task[None]) -> None:
    """Drop an abort that is over, also by an error: its engine is dead, and says so itself."""
    aborts.discard(task)
    if not task.cancelled():
        task.exception()


def _message(number: int, output: RequestOutput, has_images: bool) -> Sampled:
    """The message of a completion that has ended."""
    (completion,) = output.outputs
    message = Sampled(number, completion.finish_reason)
    message.token_ids = np.asarray(completion.token_ids, "<i4").tobytes()
    message.logprobs = _floats(completion.logprobs)
    for span in completion.weight_versions or ():
        message.weight_versions.append((span.version, span.start, span.end))
    if has_images:
        message.prompt_token_ids = np.asarray(output.prompt_token_ids, "<i4").tobytes()
    message.prompt_logprobs = _floats(output.prompt_logprobs)
    if completion.sampling_mask is not None:
        sets = completion.sampling_mask.token_ids
        message.mask_ids = np.fromiter(chain.from_iterable(sets), "<i4").tobytes()
        message.mask_sizes = np.array([len(ids) for ids in sets], "<i4").tobytes()
    return message


def _floats(logprobs: Any) -> bytes:
    """vLLM's flat log-probs, or none."""
    return np.asarray(logprobs.logprobs, "<f4").tobytes() if logprobs else b""
