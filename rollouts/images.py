"""Images, from a data set's row to the policy and the server."""

import base64
import io
import os
from dataclasses import dataclass, replace
from typing import Any

import requests
import torch
from torch import Tensor

from config import TrainConfig, UserError
from rollouts.group import Prompt
from rollouts.processor import as_ids, as_text, beginning_of, tokenizer_of
from utils import naming

PADDING_MARKS = {"image_sizes", "pixel_attention_mask"}  # inputs that tell the model its padding
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Images:
    """A prompt's images, processed once for all its completions."""

    server_ids: list[int]  # the prompt with one placeholder an image, which the server expands
    num_tokens: int  # of the prompt, with the placeholders expanded
    urls: list[str]  # for the server: PNG, as data URIs
    inputs: dict[str, Tensor]  # for the policy: `pixel_values` and the like, on the CPU


def image_source(source: Any) -> Any:
    """An image that `open_image` can open without the network.

    A URL is fetched; of the dictionaries of `datasets` the bytes, the path or the URL is taken.
    """
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
    """A PIL image, upright and in RGB, transparent pixels on a white ground.

    Args:
        source: a PIL image, bytes, a path, a data URI or its base64 alone.

    Raises:
        ValueError: it has more than 8 bits a channel.
    """
    from PIL import Image, ImageOps

    if isinstance(source, str) and not os.path.isfile(source):
        try:
            source = base64.b64decode(source.rpartition(",")[2], validate=True)
        except ValueError:
            raise ValueError(f"no file of an image, and no base64: {source:.100}") from None
    if isinstance(source, bytes):
        source = Image.open(io.BytesIO(source))
    elif isinstance(source, str):
        source = Image.open(source)
    if not isinstance(source, Image.Image):
        raise ValueError(f"no image, path, URL or bytes: {source!r:.100}")
    if source.mode == "F" or source.mode.startswith("I"):  # which PIL would cut off
        raise ValueError(f"it has an image of mode {source.mode}: save it with 8 bits a channel")
    image = ImageOps.exif_transpose(source)
    if image.has_transparency_data:  # which PIL would blacken
        ground = Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image.convert("RGBA"))
        image = ground
    return image.convert("RGB")


def with_images(prompt: Prompt, processor: Any, config: TrainConfig) -> Prompt:
    """The prompt with its images processed and its tokens expanded.

    Raises:
        UserError: an image cannot be read, or has no place in the prompt; names the row.
    """
    with naming(prompt.where):
        sources = [image_source(source) for source in prompt.sources]
        images = [open_image(source) for source in sources]
        text, needs_beginning = as_text(processor, prompt.content, len(images), config)
        num_places = _num_places(text, len(images), processor)
        batch = processor(
            text=[text], images=[images], add_special_tokens=False, return_tensors="pt"
        )
        tokenizer = tokenizer_of(processor)
        server_ids = as_ids(text, tokenizer, needs_beginning)
        token_ids = batch["input_ids"][0].tolist()
        token_ids = beginning_of(token_ids, tokenizer, needs_beginning) + token_ids
        if num_places == 0 and token_ids == server_ids:
            raise ValueError(
                f"its prompt has no place for its {len(images)} images: use chat messages"
            )

    inputs = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor) and name not in TEXT_INPUTS
    }
    return replace(
        prompt,
        token_ids=token_ids,
        sources=sources,
        images=Images(server_ids, len(token_ids), list(map(_data_uri, images)), inputs),
    )


def _num_places(text: str, num_images: int, processor: Any) -> int:
    """The number of image placeholders in a text.

    Raises:
        ValueError: there are some, and not one for each image.
    """
    placeholder = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    num_places = text.count(placeholder) if placeholder else 0
    if num_places not in (0, num_images):
        raise ValueError(
            f"its text has {num_places} placeholders ({placeholder}) for its {num_images} images"
        )
    return num_places


def _data_uri(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "png", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_example(prompts: list[Prompt], processor: Any, config: TrainConfig) -> Prompt | None:
    """The shortest prompt with images, processed; None without images."""
    with_sources = [prompt for prompt in prompts if prompt.sources]
    if hasattr(processor, "image_processor"):
        print(f"{len(with_sources)} of {len(prompts)} prompts have images", flush=True)
    if not with_sources:
        if config.freeze_vision_tower:
            raise UserError("freeze_vision_tower has no effect: no prompt has an image")
        return None
    shortest = min(with_sources, key=lambda prompt: len(prompt.token_ids))
    return replace(with_images(shortest, processor, config), sources=[])  # no rank needs the files


def joined_images(prompts: list[Prompt]) -> dict[str, Tensor]:
    """Each tensor of the prompts' `inputs`, zero-padded, and joined along dimension 0.

    Raises:
        UserError: images of several sizes, of a model that could not tell padding from pixels.
    """
    inputs = [prompt.inputs for prompt in prompts if prompt.inputs]
    names = inputs[0].keys()
    joined = {}
    for name in names:
        tensors = [values[name] for values in inputs]
        sizes = {tensor.shape[1:] for tensor in tensors}
        if len(sizes) > 1 and names.isdisjoint(PADDING_MARKS):
            raise UserError(
                f"images with {name} of several sizes cannot be in one row: resize them to one size"
            )
        largest = [max(lengths) for lengths in zip(*sizes, strict=True)]
        parts = []
        for tensor in tensors:
            part = tensor.new_zeros(len(tensor), *largest)
            part[tuple(map(slice, tensor.shape))] = tensor
            parts.append(part)
        joined[name] = torch.cat(parts)
    return joined
