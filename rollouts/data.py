"""From a dataset row to a `Prompt`: rows, templates, tokens, images."""

import base64
import inspect
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import requests
import torch
from torch import Tensor

from config import TrainConfig, UserError
from rollouts.group import Prompt
from rollouts.scoring import check_rewards
from utils import naming


def load_processor(config: TrainConfig) -> Any:
    """The processor of `model_id`, which takes text and images; its tokenizer where it has no other."""
    from transformers import AutoProcessor, AutoTokenizer

    given, folder = config.processor_kwargs or {}, Path(config.model_id)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(
            f"model_id={folder} is a LoRA adapter: merge it first, or go on with resume_from_checkpoint"
        )
    # Where vLLM is installed, transformers prefers Mistral's own tokenizer, which has no chat template.
    ours = {"trust_remote_code": config.trust_remote_code, "mistral_format": False}
    try:
        processor = AutoProcessor.from_pretrained(config.model_id, **ours, **given)
    except OSError as error:
        cause = str(error).splitlines()[0]
        raise UserError(
            f"model_id={config.model_id}: no such path, and no such model on the hub ({cause})"
        ) from None
    of_images = getattr(getattr(processor, "image_processor", None), "valid_kwargs", None)
    known = {
        *inspect.signature(type(processor)).parameters,
        *(get_type_hints(of_images) if of_images else ()),
    }
    if unknown := sorted(set(given) - known):
        raise UserError(
            f"processor_kwargs: the processor takes no {unknown[0]}, but {', '.join(sorted(known))}"
        )
    if config.reference_id:
        with naming(f"reference_id={config.reference_id}"):
            theirs = AutoTokenizer.from_pretrained(
                config.reference_id, trust_remote_code=config.trust_remote_code
            )
            if theirs.get_vocab() != tokenizer_of(processor).get_vocab():
                raise ValueError("its vocabulary is not that of model_id")
    return processor


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def placeholder_ids(owner: Any) -> list[int]:
    """Tokens that stand for images and the like, by a model's configuration or processor; none may be sampled."""
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return [token for name in names if (token := getattr(owner, name, None)) is not None]


def load_rows(
    source: str | Callable[[], Any], split: str, config: TrainConfig
) -> list[dict[str, Any]]:
    """The rows of a function, a local `.jsonl`/`.parquet` file or a `datasets` name, through `collate_fn`."""
    collate_fn: Any = config.collate_fn or list
    name = getattr(source, "__name__", source)
    how = ", through collate_fn, which gets the list of all rows" if config.collate_fn else ""
    with naming(f"dataset {name}{how}"):
        rows = collate_fn(
            list(source()) if callable(source) else _stored_rows(source, split, config)
        )
    if not rows:
        raise UserError(f"dataset {name} has no rows")
    return rows


def _stored_rows(source: str, split: str, config: TrainConfig) -> list[dict[str, Any]]:
    if source.endswith(
        ".jsonl"
    ):  # as they stand: `datasets` would turn strings that look like dates into dates
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(Path(source).read_text("utf-8-sig").split("\n"), 1):
            with naming(f"line {number}"):
                rows += [json.loads(line)] if line.strip() else []
        return rows
    from datasets import load_dataset

    if source.endswith(".parquet"):
        dataset = load_dataset("parquet", data_files=source, split="train")
    else:
        dataset = load_dataset(
            source, config.dataset_config if source == config.dataset_id else None, split=split
        )
    # Images stay bytes and paths until they are needed.
    return list(dataset.to_iterable_dataset().decode(False)) if len(dataset) else []


def load_prompts(
    source: str | Callable[[], Any], split: str, processor: Any, config: TrainConfig
) -> list[Prompt]:
    """One prompt per row, with its token ids and reward columns. UserError with a row's number where it makes none."""

    def load(index: int, row: dict[str, Any]) -> Prompt:
        with naming(f"dataset row {index}"):
            prompt = make_prompt(index, row, processor, config)
        # Images are processed here, so that a broken one shows at once, and again when sampled; a URL's bytes stay.
        return (
            replace(with_images(prompt, processor, config), images=None)
            if prompt.sources
            else prompt
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(load, itertools.count(), load_rows(source, split, config)))


def leave_out_long(
    prompts: list[Prompt], max_len: int, config: TrainConfig, name: str = "dataset_id"
) -> list[Prompt]:
    """The prompts of 1 to `max_len` tokens; says how many of data set `name` it leaves out. UserError if all."""
    kept = [prompt for prompt in prompts if 0 < len(prompt.token_ids) <= max_len]
    is_ours = max_len + config.max_completion_len == config.max_tokens_per_gpu
    room = "max_tokens_per_gpu" if is_ours else "the servers' --max-model-len"
    cure = f"raise {room}, or lower max_completion_len={config.max_completion_len}"
    if prompts and not kept:
        raise UserError(f"{name}: no prompt has at most {max_len} tokens: {cure}")
    if num := len(prompts) - len(kept):
        print(
            f"{name}: left out {num} of {len(prompts)} prompts, empty or over {max_len} tokens: {cure}"
        )
    return kept


def make_prompt(index: int, row: dict[str, Any], processor: Any, config: TrainConfig) -> Prompt:
    """A row's prompt, tokenized, with its images as the dataset has them; a ValueError says what is wrong with it."""
    if not isinstance(row.get("prompt"), str | list):
        raise ValueError(f"it has no `prompt` (string or chat messages), but {sorted(row)}")
    wanted = config.extra_columns or [
        name for name in row if name not in ("prompt", "image", "images")
    ]
    if taken := {"prompts", "completions", "completion_ids"} & set(wanted):
        raise ValueError(
            f"its column {taken.pop()} has the name of a reward's own argument: rename it"
        )
    content, images = take_images(row)
    if images and not hasattr(processor, "image_processor"):
        raise ValueError(f"it has images, and model_id={config.model_id} takes none")
    text, adds_special_tokens = as_text(processor, content, len(images), config)
    token_ids = tokenizer_of(processor)(text, add_special_tokens=adds_special_tokens)["input_ids"]
    filled = {processor.image_token_id} if images else set()
    if unfilled := (set(placeholder_ids(processor)) - filled) & set(token_ids):
        token = tokenizer_of(processor).convert_ids_to_tokens(unfilled.pop())
        raise ValueError(f"its prompt has a placeholder ({token}), and nothing for it")
    return Prompt(index, token_ids, content, {name: row[name] for name in wanted}, images)


def as_text(processor: Any, content: Any, num_images: int, config: TrainConfig) -> tuple[str, bool]:
    """A string or chat messages as text, and whether the tokenizer adds special tokens (BOS) that no template wrote."""
    owner = processor if getattr(processor, "chat_template", None) else tokenizer_of(processor)
    if isinstance(content, str) and (config.no_apply_chat_template or not owner.chat_template):
        return content, True
    messages: list[dict[str, Any]] = (
        [{"role": "user", "content": content}] if isinstance(content, str) else content
    )
    takes_images = hasattr(processor, "image_processor")
    if (
        takes_images
    ):  # contents as parts; images without a place stand before the first user message's text
        contents = (message.get("content") or [] for message in messages)
        parts = (
            [{"type": "text", "text": text}] if isinstance(text, str) else text for text in contents
        )
        messages = [
            {**message, "content": part} for message, part in zip(messages, parts, strict=True)
        ]
        first = next((message for message in messages if message["role"] == "user"), None)
        if first and not any(IMAGE in message["content"] for message in messages):
            first["content"] = [IMAGE] * num_images + first["content"]
    is_begun = messages[-1]["role"] == "assistant"  # the completion goes on from there
    modes = {
        "tokenize": False,
        "add_generation_prompt": not is_begun,
        "continue_final_message": is_begun,
    }
    text = owner.apply_chat_template(messages, **modes)
    bos = tokenizer_of(processor).bos_token  # LLaVA's template leaves it to the tokenizer
    return text, takes_images and not (bos and text.startswith(bos))


def epochs(num_items: int, seed: int) -> Iterator[int]:
    """Endless item indices: each epoch is a fresh seeded permutation, so every item comes once per epoch."""
    for epoch in itertools.count():
        yield from torch.randperm(
            num_items, generator=torch.Generator().manual_seed(seed + epoch)
        ).tolist()


# -- Images ------------------------------------------------------------------------------------------------------------

IMAGE = {"type": "image"}  # the place of an image, for templates
PADDING_MARKS = {
    "image_sizes",
    "pixel_attention_mask",
}  # inputs that tell the model what is padding


@dataclass(frozen=True)
class Images:
    """A prompt's images, processed once for all its completions."""

    server_ids: list[
        int
    ]  # the prompt with one placeholder for each image, which the server expands to `num_tokens`
    num_tokens: int
    urls: list[str]  # for the server: PNG, as data URIs
    inputs: dict[
        str, Tensor
    ]  # for the policy: what the processor makes of them (`pixel_values`, ...), on the CPU


def take_images(row: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A row's `prompt` without images, and its images; ValueError for what a template would drop without a word."""
    columns = [value for name in ("image", "images") if (value := row.get(name)) is not None]
    images = [
        image
        for value in columns
        for image in (value if isinstance(value, list | tuple) else [value])
    ]
    messages, places = [], []
    for message in row["prompt"] if isinstance(row["prompt"], list) else ():
        if "role" not in message or not {"content", "tool_calls"} & message.keys():
            raise ValueError(f"it has a message without role or content: {message!r:.100}")
        parts = message.get("content")
        if parts is not None and not isinstance(parts, str):
            kept: list[
                dict[str, str]
            ] = []  # without the keys that `datasets` adds for parts of other rows
            for part in parts:
                if part.get("type") in ("image", "image_url"):  # one, or the place of one
                    places.append(
                        part.get("image")
                        or part.get("url")
                        or part.get("path")
                        or part.get("image_url")
                    )
                    kept.append(IMAGE)
                elif part.get("type") == "text" and isinstance(part.get("text"), str):
                    kept.append({"type": "text", "text": part["text"]})
                else:
                    raise ValueError(
                        f"it has a message with a part neither of type text nor image: {part!r:.100}"
                    )
            message = {**message, "content": kept}
        messages.append(message)
    inside = [image for image in places if image]
    if len(columns) + bool(inside) > 1:
        raise ValueError(
            "it has images in two places of `image`, `images` and its messages: leave one"
        )
    images = inside or images
    if len(places) not in (0, len(images)):
        raise ValueError(
            f"it has {len(images)} images for the {len(places)} places in its messages"
        )
    return messages or row["prompt"], images


def image_source(source: Any) -> Any:
    """What `open_image` opens: a URL's bytes; for `datasets`' dictionaries what they hold; all else as it is."""
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path") or source.get("url") or source
    if isinstance(source, str | os.PathLike):
        source = str(source).removeprefix("file://")
    if not isinstance(source, str) or not source.startswith(("http://", "https://")):
        return source
    reply = requests.get(source, timeout=30)
    reply.raise_for_status()
    return reply.content


def open_image(source: Any) -> Any:
    """A PIL image, upright and in RGB, from what `image_source` gives: one, its bytes, a path or a data URI."""
    from PIL import Image
    from transformers.image_utils import load_image

    return load_image(Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source)


def with_images(prompt: Prompt, processor: Any, config: TrainConfig) -> Prompt:
    """Process a prompt's images, fetch URLs and expand its tokens; UserError for one unreadable or without place."""
    num = len(prompt.sources)
    with naming(f"dataset row {prompt.index}"):
        sources = [image_source(source) for source in prompt.sources]
        images = [open_image(source) for source in sources]
        text, adds_special_tokens = as_text(processor, prompt.content, num, config)
        place = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
        num_places = text.count(place) if place else 0
        if num_places not in (0, num):
            raise ValueError(
                f"its text has {num_places} placeholders ({place}) for its {num} images"
            )
        batch = processor(
            text=[text],
            images=[images],
            add_special_tokens=adds_special_tokens,
            return_tensors="pt",
        )
        server_ids = tokenizer_of(processor)(text, add_special_tokens=adds_special_tokens)[
            "input_ids"
        ]
        token_ids = batch["input_ids"][0].tolist()
        if num_places == 0 and token_ids == server_ids:
            raise ValueError(f"its prompt has no place for its {num} images: use chat messages")
    of_text = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    inputs = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor) and name not in of_text
    }
    processed = Images(server_ids, len(token_ids), [_data_uri(image) for image in images], inputs)
    return replace(prompt, token_ids=token_ids, sources=sources, images=processed)


def _data_uri(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "png", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_example(prompts: list[Prompt], processor: Any, config: TrainConfig) -> Prompt | None:
    """The shortest of the prompts with images, processed; None where no prompt has any."""
    with_sources = [prompt for prompt in prompts if prompt.sources]
    if hasattr(processor, "image_processor"):
        print(f"{len(with_sources)} of {len(prompts)} prompts have images", flush=True)
    if config.freeze_vision_tower and not with_sources:
        raise UserError("freeze_vision_tower has no effect: no prompt has an image")
    shortest = min(with_sources, key=lambda prompt: len(prompt.token_ids), default=None)
    return shortest and replace(
        with_images(shortest, processor, config), sources=[]
    )  # no rank needs the files


def joined_images(prompts: list[Prompt]) -> dict[str, Tensor]:
    """Each tensor of the prompts' `inputs`, zero-padded to the largest, joined along its first dimension."""
    inputs = [prompt.inputs for prompt in prompts if prompt.inputs]
    joined = {}
    for name in inputs[0] if inputs else ():
        tensors = [values[name] for values in inputs]
        sizes = [
            max(of_dim) for of_dim in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)
        ]
        if any(list(t.shape[1:]) != sizes for t in tensors) and inputs[0].keys().isdisjoint(
            PADDING_MARKS
        ):
            raise UserError(
                f"images with {name} of several sizes cannot be in one row: resize them to one size"
            )
        joined[name] = tensors[0].new_zeros(sum(map(len, tensors)), *sizes)
        for place, tensor in zip(joined[name].split(list(map(len, tensors))), tensors, strict=True):
            place[:, *map(slice, tensor.shape[1:])] = tensor
    return joined


def load_data_sets(processor: Any, config: TrainConfig) -> dict[str, list[Prompt]]:
    """Load all data sets, by the field of the config that names them, `dataset_id` first.

    Raises:
        UserError: a row makes no prompt, or a reward function does not take its columns.
    """
    sets = {"dataset_id": load_prompts(config.dataset_id, config.dataset_split, processor, config)}
    check_rewards(sets["dataset_id"], config)
    for name, source in config.eval_sets.items():
        field = f"eval_dataset_id {name}".strip()
        with naming(field):
            sets[field] = load_prompts(source, config.eval_dataset_split, processor, config)
            check_rewards(sets[field], config)
    return sets
