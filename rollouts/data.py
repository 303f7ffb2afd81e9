"""From a dataset row to a `Prompt`: chat templates, tokens, images."""

import base64
import hashlib
import inspect
import io
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import requests
from torch import Tensor

from config import TrainConfig, UserError, is_data_file
from vllm_client import Images


@dataclass(frozen=True)
class Prompt:
    """One problem: what the server gets, and what the rewards see.

    Attributes:
        index: row in the dataset.
        token_ids: the prompt, tokenized once, every placeholder of an image expanded to the tokens it stands for.
        content: the dataset's `prompt` (string or chat messages), for rewards and people.
        columns: the other columns that the rewards want.
        sources: its images as the dataset has them.
        images: the same, processed; None before it is sampled, and for text.
    """

    index: int
    token_ids: list[int]
    content: Any
    columns: dict[str, Any]
    sources: list[Any] = field(default_factory=list)
    images: Images | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Its images for the policy: `Images.inputs`, or {} without images, or before they are processed."""
        return self.images.inputs if self.images else {}


def load_processor(config: TrainConfig) -> Any:
    """The processor of `model_id`, which takes text and images; its tokenizer where it has no other.

    Raises:
        UserError: no such model, an adapter alone, or `processor_kwargs` that it does not take.
    """
    from transformers import AutoProcessor

    given = config.processor_kwargs or {}
    folder = Path(config.model_id)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(
            f"model_id={folder} is a LoRA adapter: give it merged (merge_and_unload, save_pretrained), or go on from "
            "it with resume_from_checkpoint"
        )
    try:
        processor = AutoProcessor.from_pretrained(
            config.model_id,
            trust_remote_code=config.trust_remote_code,
            mistral_format=False,  # its tokenizer, which transformers prefers where vLLM is, has no chat template
            **given,
        )
        of_images = getattr(getattr(processor, "image_processor", None), "valid_kwargs", None)
        known = {*inspect.signature(type(processor)).parameters, *(get_type_hints(of_images) if of_images else ())}
        if unknown := sorted(set(given) - known):
            raise UserError(
                f"processor_kwargs: the model's processor takes no {unknown[0]}, but {', '.join(sorted(known))}"
            )
        return processor
    except OSError as error:
        raise UserError(
            f"model_id={config.model_id}: no such path, and the hub has no such model ({str(error).splitlines()[0]})"
        ) from None


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def placeholder_ids(owner: Any) -> list[int]:
    """Tokens that stand for images and the like, by a model's configuration or processor.

    A policy's forward could not take one that was sampled.
    """
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return [token for name in names if (token := getattr(owner, name, None)) is not None]


def load_rows(source: str | Callable[[], Any], split: str, config: TrainConfig) -> list[dict[str, Any]]:
    """The rows of a function, a local `.jsonl`/`.parquet` file or a `datasets` name.

    Raises:
        UserError: no such file or data set, one that cannot be read, or no rows.
    """
    if callable(source):
        rows = list(source())
    else:
        path = Path(source)
        if is_data_file(source) and not path.is_file():
            raise UserError(f"dataset file {source} does not exist")
        if path.is_file() and not is_data_file(source):
            raise UserError(f"dataset file {source} must be .jsonl (one object a line) or .parquet")
        rows = _jsonl_rows(path) if path.suffix == ".jsonl" else _datasets_rows(source, split, config)
    if config.collate_fn:
        assert callable(config.collate_fn)
        try:
            rows = config.collate_fn(rows)
        except Exception as error:
            raise UserError(
                f"collate_fn raised {type(error).__name__}: {error}; it gets the list of all rows, and returns one"
            ) from error
    if not rows:
        raise UserError(
            f"dataset {source if isinstance(source, str) else getattr(source, '__name__', source)} has no rows"
        )
    return rows


def _jsonl_rows(path: Path) -> list[dict[str, Any]]:
    # as they stand: `datasets` would turn strings that look like dates into dates
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not in UTF-8: {error}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON: {error}") from None
    return rows


def _datasets_rows(source: str, split: str, config: TrainConfig) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        if source.endswith(".parquet"):
            return list(_undecoded(load_dataset("parquet", data_files=source, split="train")))
        subset = config.dataset_config if source == config.dataset_id else None
        return list(_undecoded(load_dataset(source, subset, split=split)))
    except (OSError, ValueError) as error:  # ConnectionError, DatasetNotFoundError, an unknown split
        raise UserError(f"dataset {source} cannot be loaded: {str(error).splitlines()[0]}") from error


def _undecoded(dataset: Any) -> Any:
    """The data set with its images as bytes and paths: pixels are made when they are needed."""
    from datasets import Image, List

    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return dataset


def load_prompts(
    source: str | Callable[[], Any], split: str, processor: Any, max_prompt_len: int, config: TrainConfig
) -> list[Prompt]:
    """Prompts with their token ids and reward columns; those over `max_prompt_len` tokens are counted and left out.

    Every image is read and processed once here, so that a broken one shows at once, and again when it is sampled: only
    its tokens are kept.

    Raises:
        UserError: a row without a usable `prompt`, a column that does not exist or is named as a reward's own argument,
            an image that cannot be read or that the model does not take, or nothing left.
    """  # ValueError is caught here
    rows = load_rows(source, split, config)
    videos = set(placeholder_ids(processor)) - {getattr(processor, "image_token_id", None)}
    prompts = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list) or not row["prompt"]:
            raise UserError(
                f"dataset row {index} has no `prompt` (string or chat messages); its columns are "
                f"{sorted(row) if isinstance(row, dict) else type(row).__name__}"
            )
        ours = ("prompt", "image", "images")
        wanted = [name for name in row if name not in ours] if config.extra_columns is None else config.extra_columns
        if missing := [name for name in wanted if name not in row]:
            raise UserError(
                f"dataset row {index} has no column {missing[0]}, which extra_columns names; it has {sorted(row)}"
            )
        if taken := {"prompts", "completions", "completion_ids"} & set(wanted):
            raise UserError(f"dataset column {taken.pop()} is the name of a reward's own argument: rename it")
        try:
            content, images = take_images(row)
            if images and not hasattr(processor, "image_processor"):
                raise ValueError(f"has images, and model_id={config.model_id} takes none")
            text, add_special_tokens = prompt_text(processor, content, len(images), config)
            token_ids = tokenizer_of(processor)(text, add_special_tokens=add_special_tokens)["input_ids"]
        except ValueError as error:
            raise UserError(f"dataset row {index} {' '.join(str(error).split())}") from error
        if placeholders := set(token_ids) & set(placeholder_ids(processor) if not images else videos):
            token = tokenizer_of(processor).convert_ids_to_tokens(placeholders.pop())
            raise UserError(f"dataset row {index}: its prompt has a placeholder ({token}), and nothing for it")
        prompts.append(Prompt(index, token_ids, content, {name: row[name] for name in wanted}, images))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        prompts = list(pool.map(lambda p: replace(with_images(p, processor, config), images=None), prompts))
    kept = [prompt for prompt in prompts if 0 < len(prompt.token_ids) <= max_prompt_len]
    if len(kept) < len(prompts):
        print(f"left out {len(prompts) - len(kept)} of {len(prompts)} prompts: empty, or over {max_prompt_len} tokens")
    if not kept:
        raise UserError(
            f"no prompt has at most {max_prompt_len} tokens, the room that max_completion_len="
            f"{config.max_completion_len} leaves in the server's --max-model-len and in max_tokens_per_gpu"
        )
    return kept


def prompt_text(processor: Any, prompt: Any, num_images: int, config: TrainConfig) -> tuple[str, bool]:
    """What the tokenizer gets for a string or chat messages, and whether special tokens (BOS) are still to be added.

    The chat template writes them where it applies. Images stand where the messages have `{"type": "image"}`, or else
    before the text of the first user message.

    Raises:
        ValueError: the template does not take the messages, or there is none.
    """
    owner = processor if getattr(processor, "chat_template", None) else tokenizer_of(processor)
    takes_parts = hasattr(processor, "image_processor")
    if isinstance(prompt, str) and (config.no_apply_chat_template or not owner.chat_template):
        return prompt, True
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if takes_parts:  # and so does its template
        missing = num_images if num_images and not any(map(is_image, chain.from_iterable(map(parts, messages)))) else 0
        written = []
        for message in messages:
            placeholders = [{"type": "image"}] * missing if message["role"] == "user" else []
            missing -= len(placeholders)
            written.append({**message, "content": [*placeholders, *parts(message)]})
        messages = written
    from jinja2 import TemplateError

    try:
        is_begun = messages[-1]["role"] == "assistant"  # the completion goes on from there
        text = owner.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not is_begun, continue_final_message=is_begun
        )
    except (TemplateError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"has messages that the model's chat template does not take: {error}") from error
    bos = tokenizer_of(processor).bos_token  # which LLaVA's template leaves to the tokenizer, as transformers has it
    return text, takes_parts and not (bos and text.startswith(bos))


def parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat message's content as parts."""
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def is_image(part: dict[str, Any]) -> bool:
    """Whether a part of a message is an image, or the place of one."""
    return part.get("type") in ("image", "image_url")


def take_images(row: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A row's `prompt` without images, and its images: of the column `image` or `images`, or from within messages.

    Keys without a value, which `datasets` gives every part that has one in another row, are left out.

    Raises:
        ValueError: images in two places, or in another number than the messages have places; or what is no message.
    """
    prompt = row["prompt"]
    columns = [value for name in ("image", "images") if (value := row.get(name)) is not None]
    if len(columns) > 1:
        raise ValueError("has both `image` and `images`: leave one of them out")
    images = [image for value in columns for image in (value if isinstance(value, list | tuple) else [value])]
    if isinstance(prompt, str):
        return prompt, images
    for message in prompt:
        _check_message(message)
    inside: list[Any] = []
    messages = []
    for message in prompt:
        if not isinstance(message.get("content"), list):
            messages.append(message)
            continue
        content = [{key: value for key, value in part.items() if value is not None} for part in message["content"]]
        for part in filter(is_image, content):
            found = part.get("image") or part.get("url") or part.get("path") or part.get("image_url")
            if isinstance(found, dict) and "url" in found:
                found = found["url"]
            inside += [found] if found else []
        bare = [{"type": "image"} if is_image(part) else part for part in content]
        messages.append({**message, "content": bare})
    if inside and images:
        raise ValueError("has images both in its messages and in a column: leave one of them out")
    images = inside or images
    places = sum(is_image(part) for message in messages for part in parts(message))
    if places not in (0, len(images)):
        raise ValueError(
            f"has {len(images)} images for the {places} places in its messages: give them in a column, or as `image`, "
            "`url`, `path` or `image_url` of each place"
        )
    return messages, images


def _check_message(message: Any) -> None:
    # refuses what is no chat message, or has parts that a template would leave out without a word
    content = message.get("content") if isinstance(message, dict) and "role" in message else 0
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if odd := [part for part in content if part.get("type") not in ("text", "image", "image_url")]:
            raise ValueError(f"has a message with a part that is neither of type text nor image: {odd[0]!r:.100}")
    elif not (isinstance(content, str) or (content is None and ("content" in message or "tool_calls" in message))):
        raise ValueError(
            f"has a message that is not {{'role': ..., 'content': string or list of typed parts}}: {message!r:.100}"
        )


def open_image(source: Any) -> Any:
    """A PIL image, upright and in RGB, from one, a path, URL, data URI, bytes, or `datasets`' `bytes` and `path`."""
    from PIL import Image
    from transformers.image_utils import load_image

    if isinstance(source, dict):
        source = next((found for key in ("bytes", "path", "url") if (found := source.get(key))), source)
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if isinstance(source, str) and not source.startswith(("http://", "https://", "data:")):
        source = Image.open(source.removeprefix("file://"))
    return load_image(Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source)


def downloaded(source: Any) -> Any:
    """The bytes behind a URL, so that it is asked once; any other source as it is.

    Raises:
        OSError: it does not answer within 30 s, or with an error.
    """
    url = source.get("url") if isinstance(source, dict) else source
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return source
    reply = requests.get(url, timeout=30)
    reply.raise_for_status()
    return reply.content


def with_images(prompt: Prompt, processor: Any, config: TrainConfig) -> Prompt:
    """The prompt with its images processed and its tokens expanded; one of text, or processed before, as it is.

    A URL among its sources is replaced by what it answered.

    Raises:
        UserError: an image cannot be read or has no place in the prompt, or the processor refuses it; names the row.
    """
    from huggingface_hub.errors import StrictDataclassError

    if not prompt.sources or prompt.images:
        return prompt
    where = f"dataset row {prompt.index}"
    sources, images = [], []
    for source in prompt.sources:
        try:
            sources.append(downloaded(source))
            images.append(open_image(sources[-1]))
        except Exception as error:  # whatever Pillow, requests or a broken file may raise
            name = source if isinstance(source, str) else type(source).__name__
            cause = f"no such file in {Path.cwd()}" if isinstance(error, FileNotFoundError) else error
            raise UserError(f"{where}: the image {name:.100} cannot be read: {cause}") from error
    text, add_special_tokens = prompt_text(processor, prompt.content, len(images), config)
    server_ids = tokenizer_of(processor)(text, add_special_tokens=add_special_tokens)["input_ids"]
    place = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    num_places = text.count(place) if place else 0
    if num_places not in (0, len(images)):
        raise UserError(f"{where}: its text has {num_places} placeholders ({place}) for its {len(images)} images")
    try:
        batch = processor(text=[text], images=[images], add_special_tokens=add_special_tokens, return_tensors="pt")
    except (ValueError, TypeError, IndexError, RuntimeError, StrictDataclassError) as error:
        cause = " ".join(str(error).split())
        raise UserError(f"{where}: the model's processor does not take its {len(images)} images: {cause}") from error
    token_ids = batch["input_ids"][0].tolist()
    if num_places == 0 and token_ids == server_ids:
        raise UserError(f"{where}: its prompt has no place for its {len(images)} images: use chat messages")
    inputs = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor)
        and name not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    }
    urls = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "png", compress_level=1)
        urls.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return replace(
        prompt, token_ids=token_ids, sources=sources, images=Images(server_ids, len(token_ids), urls, inputs)
    )


def fingerprint(prompts: list[Prompt]) -> str:
    """A hash of prompts' tokens, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt.token_ids).encode())
    return digest.hexdigest()


PADDING = {"image_sizes", "pixel_attention_mask"}  # what processors call the measures of images that they padded


def joined_images(prompts: list[Prompt]) -> dict[str, Tensor]:
    """The images of several prompts: each tensor of `Prompt.inputs`, joined along its first dimension; {} without.

    Images are padded to the largest, with zeros as their processors do, where these say what is padding.

    Raises:
        UserError: images of several sizes, and nothing would say what is padding.
    """
    inputs = [prompt.inputs for prompt in prompts if prompt.inputs]
    joined = {}
    for name in inputs[0] if inputs else ():
        tensors = [values[name] for values in inputs]
        sizes = [max(of_dim) for of_dim in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        is_even = all(list(tensor.shape[1:]) == sizes for tensor in tensors)
        if not is_even and inputs[0].keys().isdisjoint(PADDING):
            raise UserError(
                f"images with {name} of several sizes cannot be trained in one row: resize them to one size"
            )
        joined[name] = tensors[0].new_zeros(sum(map(len, tensors)), *sizes)
        places = joined[name].split([len(tensor) for tensor in tensors])
        for place, tensor in zip(places, tensors, strict=True):
            place[:, *map(slice, tensor.shape[1:])] = tensor
    return joined
