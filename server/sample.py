"""The server's route for completions: ids in, arrays out.

vLLM's own makes an object and 132 bytes of JSON of every token, and decodes text that nobody reads.
"""

import asyncio
from collections.abc import AsyncIterator
from copy import copy
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from pydantic import TypeAdapter, ValidationError
from vllm.inputs import TokensPrompt
from vllm.renderers.chat_utils import AsyncMultiModalItemTracker
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from server.messages import Sampled, SampleRequest

PARAMS = TypeAdapter(SamplingParams)
KNOWN = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}


async def begin(request: SampleRequest, engine: Any, adapter: Any) -> list[RequestOutputCollector]:
    """Begin the completions that a request asks for; they end in `replies`.

    Raises:
        Exception: whatever vLLM raises where it refuses one.
    """
    params = _params(request)
    prompt: Any = {"type": "token", "prompt_token_ids": request.token_ids}
    if request.images:
        prompt = await _with_images(request, engine)
    begun: list[RequestOutputCollector] = []
    try:
        for number in range(params.n):
            # As vLLM's own, completions of a request differ in their seeds.
            own = copy(params)
            own.n = 1
            own.skip_clone = True  # a deep copy of each would cost more than all else here
            if own.seed is not None:
                own.seed += number
            queue = await engine.add_request(
                uuid4().hex, prompt, own, lora_request=adapter, priority=request.priority
            )
            begun.append(queue)
    except BaseException:
        await abort(begun, engine)
        raise
    return begun


def _params(request: SampleRequest) -> SamplingParams:
    """vLLM's parameters, for completions as a whole and without a text that nobody reads."""
    # Without a limit a completion may fill the context; vLLM's own default is 16 tokens.
    given = {"max_tokens": None, **request.sampling_params}
    unknown = given.keys() - KNOWN
    if unknown:
        raise ValueError(f"sampling_params: vLLM knows no {', '.join(sorted(unknown))}")
    try:
        params = PARAMS.validate_python(given)
    except ValidationError as error:
        last = error.errors()[-1]  # those before it are of other forms of the parameters
        names = [part for part in last["loc"] if part in KNOWN]
        where = " ".join(["sampling_params", *map(str, names)])
        raise ValueError(f"{where}: {last['msg']}") from None
    # Else the engine's encoder fails on them once the request is registered, which then stays.
    msgspec.msgpack.encode(params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = True
    params.detokenize = bool(params.stop)
    return params


async def _with_images(request: SampleRequest, engine: Any) -> Any:
    """The prompt as the engine takes it, images processed."""
    tracker = AsyncMultiModalItemTracker(engine.model_config)
    parser = tracker.create_parser()
    for url in request.images:
        parser.parse_image(url, None)
    images, names = await tracker.resolve_items()
    prompt = TokensPrompt(prompt_token_ids=request.token_ids, multi_modal_data=images)
    if names:
        prompt["multi_modal_uuids"] = names
    (rendered,) = await engine.renderer.render_cmpl_async([prompt])
    return rendered


async def replies(
    begun: list[RequestOutputCollector], has_images: bool, engine: Any
) -> AsyncIterator[bytes]:
    """The answer in one piece, once all have ended; a client that hangs up aborts them."""
    try:
        outputs = [await queue.get() for queue in begun]
        begun = []
        yield msgspec.msgpack.encode([_message(output, has_images) for output in outputs])
    finally:
        await abort(begun, engine)


async def abort(begun: list[RequestOutputCollector], engine: Any) -> None:
    """Abort completions, also where this task is cancelled again."""
    if begun:
        names = [queue.request_id for queue in begun]
        await asyncio.shield(engine.abort(names, internal=True))


def _message(output: Any, has_images: bool) -> Sampled:
    """A completion that has ended."""
    (completion,) = output.outputs
    message = Sampled(completion.finish_reason)
    message.token_ids = np.asarray(completion.token_ids, "<i4").tobytes()
    message.logprobs = _floats(completion.logprobs)
    for span in completion.weight_versions or ():
        message.weight_versions.append((span.version, span.start, span.end))
    if has_images:
        message.prompt_token_ids = np.asarray(output.prompt_token_ids, "<i4").tobytes()
    message.prompt_logprobs = _floats(output.prompt_logprobs)
    return message


def _floats(logprobs: Any) -> bytes:
    """vLLM's flat log-probs, or none."""
    return np.asarray(logprobs.logprobs, "<f4").tobytes() if logprobs else b""
