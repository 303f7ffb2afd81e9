"""The model's processor or tokenizer, and its chat template."""

import inspect
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
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(
            f"model_id={folder} is a LoRA adapter: merge it first, or go on with "
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
        _check_vocabulary(processor, config)
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


def _check_vocabulary(processor: Any, config: TrainConfig) -> None:
    """Raise UserError where the reference has another vocabulary than the policy."""
    from transformers import AutoTokenizer

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


def as_text(processor: Any, content: Any, num_images: int, config: TrainConfig) -> tuple[str, bool]:
    """A string or chat messages as text, by the chat template.

    Returns:
        The text, and True where the tokenizer still has to add special tokens (BOS).
    """
    owner = processor if getattr(processor, "chat_template", None) else tokenizer_of(processor)
    if isinstance(content, str):
        if config.no_apply_chat_template or not owner.chat_template:
            return content, True
        content = [{"role": "user", "content": content}]

    takes_images = hasattr(processor, "image_processor")
    if takes_images:
        content = _as_parts(content, num_images)
    is_begun = content[-1]["role"] == "assistant"  # the completion goes on from there
    text = owner.apply_chat_template(
        content,
        tokenize=False,
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
    )
    if not takes_images:
        return text, False
    bos = tokenizer_of(processor).bos_token  # LLaVA's template leaves it to the tokenizer
    return text, not (bos and text.startswith(bos))


def _as_parts(messages: list[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Messages with contents in parts, as templates for images want.

    Images without a place in any message stand before the text of the first user message.
    """
    in_parts = []
    for message in messages:
        parts = message.get("content") or []
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        in_parts.append({**message, "content": parts})

    if any(IMAGE in message["content"] for message in in_parts):
        return in_parts
    for message in in_parts:
        if message["role"] == "user":
            message["content"] = [IMAGE] * num_images + message["content"]
            break
    return in_parts
