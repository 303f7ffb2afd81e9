"""The model's processor or tokenizer, and its chat template."""

import copy
import inspect
import re
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from config import TrainConfig, UserError
from utils import naming

IMAGE = {"type": "image"}  # the place of an image in a message, for templates


def load_processor(config: TrainConfig) -> Any:
    """The processor of `model_id`; its tokenizer where it takes text alone.

    Raises:
        UserError: there is no such model, it is an adapter, the processor does not know one of
            `processor_kwargs`, or `reference_id` has another vocabulary.
    """
    from transformers import AutoProcessor, AutoTokenizer

    for field in ("model_id", "reference_id"):
        folder = str(getattr(config, field))
        if Path(folder, "adapter_config.json").exists():
            raise UserError(
                f"{field}={folder} has a LoRA adapter: merge it first, or go on with "
                "resume_from_checkpoint"
            )
    arguments = config.processor_kwargs or {}
    with naming(f"model_id={config.model_id}, a folder here or a name on the hub"):
        processor = AutoProcessor.from_pretrained(
            config.model_id,
            trust_remote_code=config.trust_remote_code,
            # Where vLLM is installed, transformers prefers Mistral's own, without a chat template.
            mistral_format=False,
            **arguments,
        )

    known = set(inspect.signature(type(processor)).parameters)
    if hasattr(processor, "image_processor"):
        known |= processor.image_processor.valid_kwargs.__annotations__.keys()
    for name in arguments:
        if name not in known:  # the processor would ignore it
            raise UserError(
                f"processor_kwargs: the processor takes no {name}, but {', '.join(sorted(known))}"
            )

    if config.reference_id:
        with naming(f"reference_id={config.reference_id}"):
            reference = AutoTokenizer.from_pretrained(
                config.reference_id, trust_remote_code=config.trust_remote_code
            )
            if reference.get_vocab() != tokenizer_of(processor).get_vocab():
                raise ValueError("its vocabulary is not that of model_id")
    return processor


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def placeholder_ids(owner: Any) -> list[int]:
    """Tokens that stand for images and the like, never sampled.

    Args:
        owner: a model's configuration, or a processor.
    """
    names = ("image_token_id", "video_token_id", "audio_token_id")
    found: set[Any] = {getattr(owner, name, None) for name in names}
    return sorted(found - {None})


def hold_date(processor: Any, moment: str) -> None:
    """Let chat templates that write the date take this moment for now, an ISO date and time.

    So a run's prompts and turns stay the same over midnight, and when it goes on another day.
    """
    tokenizer = tokenizer_of(processor)
    tokenizer.apply_chat_template = partial(
        tokenizer.apply_chat_template,
        strftime_now=datetime.fromisoformat(moment).strftime,  # as transformers names it
    )


def as_sampled(token_ids: Any, tokenizer: Any) -> str:
    """The text of tokens [n] as they stand: some tokenizers would leave out spaces."""
    return tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)


# -- From messages to text -------------------------------------------------------------------------


def as_text(
    processor: Any, content: Any, num_images: int, config: TrainConfig, **template: Any
) -> tuple[str, bool]:
    """A string or chat messages as text, by the chat template.

    A last message of the assistant is a prefill, from which the completion goes on. It follows as
    it stands, but for a beginning that the template has opened already, as with <think>.

    Returns the text, and True where the tokenizer's beginning (BOS) still has to come before it.
    Raises ValueError for a message of which the template shows nothing, or an argument unread.
    """
    tokenizer = tokenizer_of(processor)
    chat_template = processor.chat_template or tokenizer.chat_template
    if isinstance(content, str) and config.no_apply_chat_template:
        chat_template = None
    for name in template:
        if not re.search(rf"\b{name}\b", str(chat_template)):
            raise ValueError(f"no chat template reads its {name} here: leave it out")
    if isinstance(chat_template, str):
        template["chat_template"] = chat_template  # a processor's own, where it has one
    if isinstance(content, str):
        if not chat_template:
            return content, True
        content = [{"role": "user", "content": content}]

    messages = []  # with their texts in parts, as templates for images want
    for message in content:
        parts = message.get("content") or []
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        messages.append({**message, "content": parts})

    prefill = ""
    if messages[-1]["role"] == "assistant":
        prefill = _text_of(messages[-1])
        if messages.pop().get("tool_calls") or not messages:
            raise ValueError("its last message calls tools, or is its only one: nothing goes on")

    takes_images = hasattr(processor, "image_processor")
    if takes_images and not any(IMAGE in message["content"] for message in messages):
        for message in messages:
            if message["role"] == "user":
                message["content"] = [IMAGE] * num_images + message["content"]
                break

    def render(messages: list[dict[str, Any]]) -> str:
        if not takes_images:  # whose templates would show parts as nothing, or as Python
            messages = [{**message, "content": _text_of(message)} for message in messages]
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **template
        )

    text = render(messages)
    _check_shown(messages, render)
    for length in range(len(prefill), 2, -1):
        if text.endswith(prefill[:length]):
            prefill = prefill[length:]  # the template has opened it
            break
    return text + prefill, takes_images  # LLaVA's template leaves BOS to the tokenizer


def _text_of(message: dict[str, Any]) -> str:
    """The text of a message; of several parts one a line, as vLLM joins them."""
    return "\n".join(part["text"] for part in message["content"] if part["type"] == "text")


def _check_shown(
    messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> None:
    """Raise ValueError for a text of which the template shows nothing, not even its end."""
    marked = copy.deepcopy(messages)
    texts: dict[str, str] = {}  # by the mark at their end
    for message in marked:
        for part in message["content"]:
            text = part.get("text", "")
            if text.strip():
                mark = f"mark{len(texts):06}"
                texts[mark] = text
                part["text"] = text + mark

    shown = render(marked)
    for mark, text in texts.items():
        if mark not in shown:
            raise ValueError(f"the chat template shows nothing of its message {text!r:.100}")


# -- From text to tokens ---------------------------------------------------------------------------


def missing_beginning(token_ids: list[int], processor: Any) -> list[int]:
    """The ids that still have to come before a prompt: mostly BOS or none.

    Tokens that a tokenizer adds to ends (EOS) are none: the completion goes on from there.
    """
    tokenizer = tokenizer_of(processor)
    first = tokenizer("a", add_special_tokens=False)["input_ids"][0]
    whole = tokenizer("a")["input_ids"]
    beginning = whole[: whole.index(first)]
    return [] if token_ids[: len(beginning)] == beginning else beginning
