"""From a dataset row to a `Prompt` and its `Group`: rows, chat templates, tokens; at the end of the file, images."""

import base64
import hashlib
import inspect
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import requests
import torch
from torch import Tensor

from config import TrainConfig, UserError, is_data_file
from vllm_client import Completion

IMAGE_TYPES = ("image", "image_url")  # of a message's part that is an image, or the place of one
PADDING = {"image_sizes", "pixel_attention_mask"}  # what processors call the measures of images that they padded


@dataclass(frozen=True)
class Images:
    """A prompt's images, processed once for all its completions.

    Attributes:
        server_ids: the prompt with one placeholder for each image, which the server expands to `num_tokens`.
        urls: for the server: PNG, as data URIs.
        inputs: for the policy: what the model's processor makes of them (`pixel_values`, ...), in its own shapes and
            dtypes, on the CPU.
    """

    server_ids: list[int]
    num_tokens: int
    urls: list[str]
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class Prompt:
    """One problem: what the server gets, and what the rewards see.

    Attributes:
        index: row in the dataset.
        token_ids: the prompt, tokenized once, every placeholder of an image expanded to the tokens it stands for.
        content: the dataset's `prompt` (string or chat messages), for rewards and people.
        columns: the other columns that the rewards want.
        sources: its images as the dataset has them.
        images: its images, processed; None before it is sampled, and for text.
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


@dataclass
class Group:
    """One prompt and its completions: the unit from the dataset to the gradient, filled in on its way.

    Attributes:
        completions, texts: as sampled, and decoded for rewards and people.
        rewards: [num_generations][num_reward_funcs], None where a function does not apply.
        reward: [num_generations], weighted sums; NaN where no function applies.
        advantages: [num_generations].
        id: its place in the order of admission.
        started_version: the policy version when its request was sent, -1 before.
        finished_version: the policy version when its rewards were known.
        started_s, sampled_s, scored_s: when that was, on the monotonic clock.
    """

    prompt: Prompt
    completions: list[Completion] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[list[float | None]] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    id: int = 0
    started_version: int = -1
    finished_version: int = 0
    started_s: float = 0.0
    sampled_s: float = 0.0
    scored_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens of the group, the prompt counted once per completion."""
        return sum(len(self.prompt.token_ids) + len(c.token_ids) for c in self.completions)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled one of its tokens."""
        versions = (span.version for c in self.completions for span in c.weight_versions)
        return min(versions, default=self.finished_version)

    @property
    def have_reward(self) -> list[bool]:
        """For each completion, whether it has a reward; True for all before any is scored."""
        return [not math.isnan(r) for r in self.reward] or [True] * len(self.completions)

    @property
    def can_teach(self) -> bool:
        """Whether its rewards differ, so that its advantages do."""
        return len({r for r in self.reward if not math.isnan(r)}) > 1


def load_processor(config: TrainConfig) -> Any:
    """The processor of `model_id`, which takes text and images; its tokenizer where it has no other.

    Raises:
        UserError: no such model, an adapter alone, or `processor_kwargs` that it does not take.
    """
    from transformers import AutoProcessor

    given, folder = config.processor_kwargs or {}, Path(config.model_id)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(f"model_id={folder} is a LoRA adapter: merge it first, or go on with resume_from_checkpoint")
    try:
        processor = AutoProcessor.from_pretrained(
            config.model_id,
            trust_remote_code=config.trust_remote_code,
            mistral_format=False,  # its tokenizer, which transformers prefers where vLLM is, has no chat template
            **given,
        )
    except OSError as error:
        cause = str(error).splitlines()[0]
        raise UserError(f"model_id={config.model_id}: no such path, and no such model on the hub ({cause})") from None
    of_images = getattr(getattr(processor, "image_processor", None), "valid_kwargs", None)
    known = {*inspect.signature(type(processor)).parameters, *(get_type_hints(of_images) if of_images else ())}
    if unknown := sorted(set(given) - known):
        raise UserError(
            f"processor_kwargs: the model's processor takes no {unknown[0]}, but {', '.join(sorted(known))}"
        )
    return processor


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def placeholder_ids(owner: Any) -> list[int]:
    """Tokens that stand for images and the like, by a model's configuration or processor.

    A policy's forward could not take one that was sampled.
    """
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return [token for name in names if (token := getattr(owner, name, None)) is not None]


# --------------------------------------------------------------------------------------------------------------------
# Rows


def load_rows(source: str | Callable[[], Any], split: str, config: TrainConfig) -> list[dict[str, Any]]:
    """The rows of a function, a local `.jsonl`/`.parquet` file or a `datasets` name.

    Raises:
        UserError: no such file or data set, one that cannot be read, or no rows.
    """
    if callable(source):
        name, rows = getattr(source, "__name__", "function"), list(source())
    else:
        name, path = source, Path(source)
        if is_data_file(source) != path.is_file():
            raise UserError(f"dataset file {source} must exist, as .jsonl (one object a line) or .parquet")
        rows = _jsonl_rows(path) if path.suffix == ".jsonl" else _datasets_rows(source, split, config)
    if config.collate_fn:
        collate_fn: Any = config.collate_fn
        try:
            rows = collate_fn(rows)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise UserError(f"collate_fn raised {cause}; it gets the list of all rows, and returns one") from error
    if not rows:
        raise UserError(f"dataset {name} has no rows")
    return rows


def _jsonl_rows(path: Path) -> list[dict[str, Any]]:
    """The rows as they stand: `datasets` would turn strings that look like dates into dates."""
    rows = []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:  # neither JSON nor UTF-8
            raise UserError(f"{path} line {number} is not JSON in UTF-8: {error}") from None
    return rows


def _datasets_rows(source: str, split: str, config: TrainConfig) -> list[dict[str, Any]]:
    from datasets import Image, List, load_dataset

    try:
        if source.endswith(".parquet"):
            dataset = load_dataset("parquet", data_files=source, split="train")
        else:
            dataset = load_dataset(source, config.dataset_config if source == config.dataset_id else None, split=split)
    except (OSError, ValueError) as error:  # ConnectionError, DatasetNotFoundError, an unknown split
        raise UserError(f"dataset {source} cannot be loaded: {str(error).splitlines()[0]}") from error
    for name, feature in dataset.features.items():  # images as bytes and paths: pixels are made when they are needed
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return list(dataset)


# --------------------------------------------------------------------------------------------------------------------
# Prompts


def load_prompts(
    source: str | Callable[[], Any], split: str, processor: Any, max_prompt_len: int, config: TrainConfig
) -> list[Prompt]:
    """Prompts with their token ids and reward columns; those over `max_prompt_len` tokens are counted and left out.

    Every image is read and processed once here, so that a broken one shows at once, and again when it is sampled: only
    its tokens are kept.

    Raises:
        UserError: a row that makes no prompt, with its number and the reason; or nothing is left.
    """

    def load(numbered: tuple[int, dict[str, Any]]) -> Prompt:
        index, row = numbered
        try:
            return replace(with_images(make_prompt(index, row, processor, config), processor, config), images=None)
        except UserError:
            raise
        except Exception as error:  # whatever odd data makes of a template, a tokenizer or a processor
            cause = " ".join(str(error).split())
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            raise UserError(f"dataset row {index}: {kind}{cause}") from error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        prompts = list(pool.map(load, enumerate(load_rows(source, split, config))))
    kept = [prompt for prompt in prompts if 0 < len(prompt.token_ids) <= max_prompt_len]
    if len(kept) < len(prompts):
        print(f"left out {len(prompts) - len(kept)} of {len(prompts)} prompts: empty, or over {max_prompt_len} tokens")
    if not kept:
        raise UserError(
            f"no prompt has at most {max_prompt_len} tokens, the room that max_completion_len="
            f"{config.max_completion_len} leaves in the server's --max-model-len and in max_tokens_per_gpu"
        )
    return kept


def make_prompt(index: int, row: dict[str, Any], processor: Any, config: TrainConfig) -> Prompt:
    """A row's prompt, tokenized, with its images as the dataset has them.

    Raises:
        ValueError: what is wrong with the row.
    """
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list) or not row["prompt"]:
        raise ValueError(f"it has no `prompt` (string or chat messages), but {sorted(row)}")
    wanted = config.extra_columns
    if wanted is None:
        wanted = [name for name in row if name not in ("prompt", "image", "images")]
    if missing := [name for name in wanted if name not in row]:
        raise ValueError(f"it has no column {missing[0]}, which extra_columns names, but {sorted(row)}")
    if taken := {"prompts", "completions", "completion_ids"} & set(wanted):
        raise ValueError(f"its column {taken.pop()} has the name of a reward's own argument: rename it")
    content, images = take_images(row)
    if images and not hasattr(processor, "image_processor"):
        raise ValueError(f"it has images, and model_id={config.model_id} takes none")
    token_ids = tokenize(processor, content, len(images), config)[1]
    unfilled = set(placeholder_ids(processor))
    if images:
        unfilled.discard(processor.image_token_id)
    if found := unfilled & set(token_ids):
        token = tokenizer_of(processor).convert_ids_to_tokens(found.pop())
        raise ValueError(f"its prompt has a placeholder ({token}), and nothing for it")
    return Prompt(index, token_ids, content, {name: row[name] for name in wanted}, images)


def tokenize(processor: Any, content: Any, num_images: int, config: TrainConfig) -> tuple[str, list[int], bool]:
    """A string or chat messages as text and token ids, and whether the tokenizer added special tokens (BOS).

    The chat template writes special tokens where it applies.
    """
    tokenizer = tokenizer_of(processor)
    owner = processor if getattr(processor, "chat_template", None) else tokenizer
    if isinstance(content, str) and (config.no_apply_chat_template or not owner.chat_template):
        return content, tokenizer(content)["input_ids"], True
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    takes_parts = hasattr(processor, "image_processor")  # and so does its template
    if takes_parts:
        messages = _in_parts(messages, num_images)
    is_begun = messages[-1]["role"] == "assistant"  # the completion goes on from there
    text = owner.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=not is_begun, continue_final_message=is_begun
    )
    bos = tokenizer.bos_token  # LLaVA's template leaves it to the tokenizer
    adds_special_tokens = takes_parts and not (bos and text.startswith(bos))
    return text, tokenizer(text, add_special_tokens=adds_special_tokens)["input_ids"], adds_special_tokens


def fingerprint(prompts: list[Prompt]) -> str:
    """A hash of prompts' tokens, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt.token_ids).encode())
    return digest.hexdigest()


def epochs(num_items: int, seed: int) -> Iterator[int]:
    """Endless item indices: each epoch is a fresh seeded permutation, so every item comes once per epoch."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed + epoch)
        yield from torch.randperm(num_items, generator=generator).tolist()
        epoch += 1


# --------------------------------------------------------------------------------------------------------------------
# Images


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat message's content as parts, without the keys that `datasets` adds for parts of other rows.

    Raises:
        ValueError: it is no chat message, or has parts that a template would leave out without a word.
    """
    content = message.get("content") if isinstance(message, dict) and "role" in message else 0
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None and ("content" in message or "tool_calls" in message):
        return []
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        wanted = "{'role': ..., 'content': string or list of typed parts}"
        raise ValueError(f"it has a message that is not {wanted}: {message!r:.100}")
    if odd := [part for part in content if part.get("type") not in ("text", *IMAGE_TYPES)]:
        raise ValueError(f"it has a message with a part that is neither of type text nor image: {odd[0]!r:.100}")
    return [{key: value for key, value in part.items() if value is not None} for part in content]


def _in_parts(messages: list[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Messages with their contents as parts; images without a place stand before the first user message's text."""
    written = [{**message, "content": _parts(message)} for message in messages]
    places = [part for message in written for part in message["content"] if part["type"] in IMAGE_TYPES]
    first = next((message for message in written if message["role"] == "user"), None)
    if first and not places:
        first["content"] = [{"type": "image"}] * num_images + first["content"]
    return written


def take_images(row: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A row's `prompt` without images, and its images: of the column `image` or `images`, or from within messages.

    Raises:
        ValueError: images in two places, or in another number than the messages have places.
    """
    columns = [value for name in ("image", "images") if (value := row.get(name)) is not None]
    images = [image for value in columns for image in (value if isinstance(value, list | tuple) else [value])]
    inside: list[Any] = []
    messages, num_places = row["prompt"], 0
    if isinstance(messages, list):
        messages = []
        for message in row["prompt"]:
            parts = _parts(message)
            places = [part for part in parts if part["type"] in IMAGE_TYPES]
            num_places += len(places)
            for place in places:
                found = place.get("image") or place.get("url") or place.get("path") or place.get("image_url")
                found = found["url"] if isinstance(found, dict) and "url" in found else found
                inside += [found] if found else []
            if isinstance(message["content"], list):
                parts = [{"type": "image"} if part in places else part for part in parts]
                message = {**message, "content": parts}
            messages.append(message)
    if len(columns) + bool(inside) > 1:
        raise ValueError("it has images in two places of `image`, `images` and its messages: leave one")
    images = inside or images
    if num_places not in (0, len(images)):
        raise ValueError(
            f"it has {len(images)} images for the {num_places} places in its messages: give them in a column, or as "
            "`image`, `url`, `path` or `image_url` of each place"
        )
    return messages, images


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


def _downloaded(source: Any) -> Any:
    """The bytes behind a URL, so that it is asked once; any other source as it is."""
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
    if not prompt.sources or prompt.images:
        return prompt
    where, num = f"dataset row {prompt.index}", len(prompt.sources)
    sources, images = [], []
    for source in prompt.sources:
        try:
            sources.append(_downloaded(source))
            images.append(open_image(sources[-1]))
        except Exception as error:  # whatever Pillow, requests or a broken file may raise
            name = source if isinstance(source, str) else type(source).__name__
            cause = f"no such file in {Path.cwd()}" if isinstance(error, FileNotFoundError) else error
            raise UserError(f"{where}: the image {name:.100} cannot be read: {cause}") from error
    text, server_ids, adds_special_tokens = tokenize(processor, prompt.content, num, config)
    place = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    num_places = text.count(place) if place else 0
    if num_places not in (0, num):
        raise UserError(f"{where}: its text has {num_places} placeholders ({place}) for its {num} images")
    try:
        batch = processor(text=[text], images=[images], add_special_tokens=adds_special_tokens, return_tensors="pt")
    except Exception as error:  # whatever a processor makes of too many or too small images
        cause = " ".join(str(error).split())
        raise UserError(f"{where}: the model's processor does not take its {num} images: {cause}") from error
    token_ids = batch["input_ids"][0].tolist()
    if num_places == 0 and token_ids == server_ids:
        raise UserError(f"{where}: its prompt has no place for its {num} images: use chat messages")
    of_text = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    inputs = {name: value for name, value in batch.items() if isinstance(value, Tensor) and name not in of_text}
    urls = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "png", compress_level=1)
        urls.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    processed = Images(server_ids, len(token_ids), urls, inputs)
    return replace(prompt, token_ids=token_ids, sources=sources, images=processed)


def image_example(prompts: list[Prompt], processor: Any, config: TrainConfig) -> Prompt | None:
    """The shortest of the prompts with images, processed; None where no prompt has any.

    Raises:
        UserError: `freeze_vision_tower` in a run without images.
    """
    with_sources = [prompt for prompt in prompts if prompt.sources]
    if hasattr(processor, "image_processor"):
        print(f"{len(with_sources)} of {len(prompts)} prompts have images", flush=True)
    if with_sources:
        shortest = min(with_sources, key=lambda prompt: len(prompt.token_ids))
        return replace(with_images(shortest, processor, config), sources=[])  # no rank needs the files
    if config.freeze_vision_tower:
        raise UserError("freeze_vision_tower has no effect: no prompt has an image")
    return None


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
            raise UserError(f"images with {name} of several sizes cannot be in one row: resize them to one size")
        joined[name] = tensors[0].new_zeros(sum(map(len, tensors)), *sizes)
        places = joined[name].split([len(tensor) for tensor in tensors])
        for place, tensor in zip(places, tensors, strict=True):
            place[:, *map(slice, tensor.shape[1:])] = tensor
    return joined
