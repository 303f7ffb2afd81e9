"""The model's processor or tokenizer, and its chat template."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from config import TrainConfig, UserError
from utils import naming

IMAGE = {"type": "image"}  # the place of an image in a message, for templates


def load_processor(config: TrainConfig) -> Any:
    """The processor of `model_id`; its tokenizer where it takes text alone.

    Raises:
        UserError: there is no such model, it is an adapter, the processor does not know one of
            `processor_kwargs`, or `reference_id` has another vocabulary.
    """
    from transformers import AutoProcessor

    folder = Path(config.model_id)
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"model_id={folder} has a LoRA adapter: merge it first, or go on with "
            "resume_from_checkpoint"
        )
    try:
        processor = AutoProcessor.from_pretrained(
            config.model_id,
            trust_remote_code=config.trust_remote_code,
            # Where vLLM is installed, transformers prefers Mistral's own, without a chat template.
            mistral_format=False,
            **(config.processor_kwargs or {}),
        )
    except OSError as error:
        raise UserError(
            f"model_id={config.model_id}: no such path, and no such model on the hub "
            f"({str(error).splitlines()[0]})"
        ) from None

    _check_arguments(processor, config)
    if config.reference_id:
        _check_reference(processor, config)
    return processor


def _check_arguments(processor: Any, config: TrainConfig) -> None:
    """Raise UserError for one of `processor_kwargs` that the processor would ignore."""
    known = set(inspect.signature(type(processor)).parameters)
    image_arguments = getattr(getattr(processor, "image_processor", None), "valid_kwargs", None)
    if image_arguments:
        known |= set(get_type_hints(image_arguments))
    unknown = sorted(set(config.processor_kwargs or {}) - known)
    if unknown:
        raise UserError(
            f"processor_kwargs: the processor takes no {unknown[0]}, but {', '.join(sorted(known))}"
        )


def _check_reference(processor: Any, config: TrainConfig) -> None:
    """Raise UserError where `reference_id` is an adapter, or of another vocabulary."""
    from transformers import AutoTokenizer

    if (Path(str(config.reference_id)) / "adapter_config.json").exists():
        raise UserError(f"reference_id={config.reference_id} is a LoRA adapter: merge it first")
    with naming(f"reference_id={config.reference_id}"):
        reference_tokenizer = AutoTokenizer.from_pretrained(
            config.reference_id, trust_remote_code=config.trust_remote_code
        )
        if reference_tokenizer.get_vocab() != tokenizer_of(processor).get_vocab():
            raise ValueError("its vocabulary is not that of model_id")


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def placeholder_ids(owner: Any) -> list[int]:
    """Tokens that stand for images and the like, never sampled.

    Args:
        owner: a model's configuration, or a processor.
    """
    found = []
    for name in ("image_token_id", "video_token_id", "audio_token_id"):
        token_id = getattr(owner, name, None)
        if token_id is not None:
            found.append(token_id)
    return found


# -- From messages to text -------------------------------------------------------------------------


def as_text(processor: Any, content: Any, num_images: int, config: TrainConfig) -> tuple[str, bool]:
    """A string or chat messages as text, by the chat template.

    A last message of the assistant is a prefill, from which the completion goes on: it follows as
    it stands, as templates change the messages of the past; but for a beginning that the template
    has opened already, as with <think>.

    Returns:
        The text, and True where the tokenizer's beginning (BOS) still has to come before it.

    Raises:
        ValueError: a message of which the template shows nothing.
    """
    owner = processor if getattr(processor, "chat_template", None) else tokenizer_of(processor)
    if isinstance(content, str):
        if config.no_apply_chat_template or not owner.chat_template:
            return content, True
        content = [{"role": "user", "content": content}]

    messages = [_in_parts(message) for message in content]
    prefill = ""
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        prefill = _text_of(last)
        if last.get("tool_calls") or not messages:
            raise ValueError("its last message calls tools, or is its only one: nothing goes on")
    takes_images = hasattr(processor, "image_processor")
    if takes_images:
        _place_images(messages, num_images)
    else:  # whose templates would show parts as nothing, or as Python
        messages = [{**message, "content": _text_of(message)} for message in messages]

    render = partial(owner.apply_chat_template, tokenize=False, add_generation_prompt=True)
    text = render(messages)
    _check_shown(messages, render)
    opened = _opened(text, prefill)
    # LLaVA's template leaves BOS to the tokenizer.
    return text + prefill.removeprefix(opened), takes_images


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content in parts, as templates for images want; none for null."""
    parts = message.get("content") or []
    if isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    return {**message, "content": parts}


def _text_of(message: dict[str, Any]) -> str:
    """The text of a message; of several parts one a line, as vLLM joins them."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _check_shown(
    messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> None:
    """Raise ValueError for a text of which the template shows nothing, not even its end."""
    marks: dict[str, str] = {}  # at the end of each text, and what it is

    def marked(message: dict[str, Any], text: str) -> str:
        if not text.strip():
            return text
        mark = f"mark{len(marks):06}"
        marks[mark] = f"{message['role']} message {text!r:.100}"
        return text + mark

    changed = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = marked(message, content)
        else:
            parts = []
            for part in content:
                text = marked(message, part.get("text", ""))
                parts.append(part | {"text": text} if text else part)
            content = parts
        changed.append({**message, "content": content})

    shown = render(changed)
    for mark, text in marks.items():
        if mark not in shown:
            raise ValueError(f"the chat template shows nothing of its {text}")


def _opened(prompt: str, prefill: str) -> str:
    """The beginning of a prefill that the prompt ends with; empty, or of two letters and more."""
    for length in range(len(prefill), 1, -1):
        beginning = prefill[:length]
        if prompt.endswith(beginning) and len(beginning.strip()) > 1:
            return beginning
    return ""


def _place_images(messages: list[dict[str, Any]], num_images: int) -> None:
    """Put images without a place in any message before the text of the first user message."""
    if any(IMAGE in message["content"] for message in messages):
        return
    for message in messages:
        if message["role"] == "user":
            message["content"] = [IMAGE] * num_images + message["content"]
            return


# -- From text to tokens ---------------------------------------------------------------------------


def as_ids(text: str, tokenizer: Any, needs_beginning: bool) -> list[int]:
    """The token ids of a prompt, with the tokenizer's beginning before them where that is needed.

    Tokens that a tokenizer adds to ends (EOS) are left out: the completion goes on from there.
    """
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return beginning_of(token_ids, tokenizer, needs_beginning) + token_ids


def beginning_of(token_ids: list[int], tokenizer: Any, needs_beginning: bool) -> list[int]:
    """The tokens that have to come before a prompt's, mostly BOS or none."""
    if not needs_beginning:
        return []
    first = tokenizer("a", add_special_tokens=False)["input_ids"][0]
    whole = tokenizer("a")["input_ids"]
    beginning = whole[: whole.index(first)]
    return [] if token_ids[: len(beginning)] == beginning else beginning
