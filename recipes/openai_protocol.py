"""Requests and replies of OpenAI's chat completions, for `recipes/openai_agent.py`."""

import json
import re
import time
import uuid
from typing import Any

# Parameters of a request that count, those that are ignored, and values of others that do nothing.
READ = {
    "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options",
    "chat_template_kwargs",
}  # fmt: skip
IGNORED = {
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "user", "parallel_tool_calls", "metadata", "store", "reasoning_effort",
}  # fmt: skip
HARMLESS: dict[str, Any] = {
    "n": 1, "tool_choice": "auto", "logprobs": False, "response_format": {"type": "text"},
}  # fmt: skip

Message = dict[str, Any]
Calls = list[tuple[str, str]]  # the name of each tool, and its arguments as JSON


def check_parameters(request: dict[str, Any]) -> None:
    """Refuse parameters that would have no effect, by a ValueError."""
    for name in sorted(request.keys() - READ - IGNORED):
        value = request[name]
        if value is not None and value != HARMLESS.get(name):
            raise ValueError(f"{name}={value!r:.100} is not supported")


def stop_words(request: dict[str, Any]) -> list[str]:
    """The words that end a reply, and are left out of it."""
    stop = request.get("stop")
    if isinstance(stop, str):
        return [stop]
    return stop or []


def plain_message(message: Message) -> Message:
    """A message in the form that templates take.

    Text is in one piece, arguments are dictionaries, and nothing is None.
    """
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if part.get("type") != "text":
                raise ValueError(f"a message has a part that is no text: {part!r:.100}")
        content = "".join(part["text"] for part in content)

    plain = {"role": message["role"], "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [plain_call(call) for call in message["tool_calls"]]
    for name in ("name", "tool_call_id"):
        if message.get(name):
            plain[name] = message[name]
    return plain


def plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool with its arguments as a dictionary."""
    function = call["function"]
    arguments = json.loads(function["arguments"] or "{}")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def identity(message: Message) -> Any:
    """A key, equal for plain messages that are the same.

    An agent may strip the text of a reply.
    """
    content = message["content"]
    if message["role"] == "assistant":
        content = content.strip()
    return message["role"], content, message.get("tool_calls"), message.get("tool_call_id")


def hermes_calls(text: str) -> tuple[str, Calls]:
    """A reply's words and tool calls, in Qwen's and Hermes models' form.

    Where one call has not the right form, the whole reply is text.
    """
    calls = []
    for found in re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", text, re.DOTALL):
        try:
            call = json.loads(found)
            arguments = {**call.get("arguments", {})}  # a TypeError where they are no dictionary
            calls.append((str(call["name"]), json.dumps(arguments)))
        except (ValueError, KeyError, TypeError):
            return text, []
    if not calls:
        return text, []
    return text.partition("<tool_call>")[0].rstrip(), calls


def assistant_message(content: str, calls: Calls) -> Message:
    """The message of a reply."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = []
    for name, arguments in calls:
        function = {"name": name, "arguments": arguments}
        call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        message["tool_calls"].append(call)
    return message


def chat_completion(
    message: Message, finish_reason: str, model: str, num_prompt_tokens: int, num_sampled: int
) -> dict[str, Any]:
    """A reply in one piece."""
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt_tokens + num_sampled,
        },
    }


def chunks_of(completion: dict[str, Any], with_usage: bool) -> list[dict[str, Any]]:
    """The reply as a stream's events.

    The first has the whole reply, the second the reason why it ended.
    """
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if delta.get("tool_calls"):
        calls = enumerate(delta["tool_calls"])
        delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
    choices = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]},
    ]

    common = {
        "id": completion["id"],
        "object": "chat.completion.chunk",
        "created": completion["created"],
        "model": completion["model"],
    }
    chunks = [{**common, "choices": [choice]} for choice in choices]
    if with_usage:
        chunks.append({**common, "choices": [], "usage": completion["usage"]})
    return chunks
