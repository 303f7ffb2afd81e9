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
from rollouts.processor import as_text, missing_beginning, tokenizer_of
from server.messages import MAX_IMAGES_BYTES
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
    """An image's bytes, path or base64, or a PIL image.

    A URL is fetched; of the dictionaries of `datasets` the bytes, the path or the URL is taken.
    """
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path") or source.get("url") or source
    if isinstance(source, str | os.PathLike):
        source = str(source).removeprefix("file://")
        if source.startswith(("http://", "https://")):
            reply = requests.get(source, timeout=30)
            reply.raise_for_status()
            return reply.content
    return source


def open_image(source: Any) -> Any:
    """A PIL image, upright and in RGB, transparent pixels on a white ground.

    Args:
        source: as of `image_source`; base64 may be a data URI.

    Raises:
        ValueError: it is no image, or has more than 8 bits a channel.
    """
    from PIL import Image, ImageOps

    image = image_source(source)
    with naming(f"no image, path, URL, bytes or base64: {source!r:.100}"):
        if isinstance(image, str) and not os.path.isfile(image):
            image = base64.b64decode(image.rpartition(",")[2], validate=True)
        if not isinstance(image, Image.Image):
            image = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image)

    if image.mode[0] in "FI":  # of floats, or of more bits, which PIL would cut off
        raise ValueError(f"it has an image of mode {image.mode}: save it with 8 bits a channel")
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:  # which PIL would blacken
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image.convert("RGBA"))
    return image.convert("RGB")


def with_tokens(prompt: Prompt, processor: Any, config: TrainConfig) -> Prompt:
    """The prompt with its tokens, and its images processed.

    Raises:
        UserError: the chat template refuses it; an image cannot be read, or has no place in the
            prompt, or they are more than a server takes; names the row.
    """
    with naming(prompt.where):
        sources = list(map(image_source, prompt.sources))
        images = list(map(open_image, sources))
        text, needs_beginning = as_text(
            processor, prompt.content, len(images), config, **prompt.template
        )
        server_ids = tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"]
        beginning = missing_beginning(server_ids, processor) if needs_beginning else []
        server_ids = beginning + server_ids
        if not images:
            return replace(prompt, token_ids=server_ids)

        urls = []
        for image in images:
            file = io.BytesIO()
            image.save(file, "png", compress_level=1)
            urls.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
        if sum(map(len, urls)) > MAX_IMAGES_BYTES:
            raise ValueError(
                f"its images have more than {MAX_IMAGES_BYTES >> 20} MiB, as PNG in base64: "
                "make them smaller"
            )
        # Gemma3's templates write boi_token, others image_token.
        num_places = 0
        for name in ("boi_token", "image_token"):
            num_places = max(num_places, text.count(getattr(processor, name, None) or "\0"))
        if num_places != len(images):
            raise ValueError(
                f"its text has {num_places} places for its {len(images)} images: use chat messages "
                "and a model that takes images, and leave their marks to the chat template"
            )
        batch = processor(
            text=[text], images=[images], add_special_tokens=False, return_tensors="pt"
        )

    prompt = replace(prompt, token_ids=beginning + batch["input_ids"][0].tolist(), sources=sources)
    return replace(
        prompt,
        images=Images(
            server_ids,
            num_tokens=len(prompt.token_ids),
            urls=urls,
            inputs={name: batch[name] for name in batch if name not in TEXT_INPUTS},
        ),
    )


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
    return with_tokens(shortest, processor, config)


def joined_images(prompts: list[Prompt]) -> dict[str, Tensor]:
    """Each tensor of the images' `inputs`, zero-padded, and joined along dimension 0; {} for text.

    Raises:
        UserError: images of several sizes, of a model that could not tell padding from pixels.
    """
    inputs = [prompt.images.inputs for prompt in prompts if prompt.images]
    joined: dict[str, Tensor] = {}
    if not inputs:
        return joined
    for name in inputs[0]:
        tensors = [values[name] for values in inputs]
        sizes = {tensor.shape[1:] for tensor in tensors}
        if len(sizes) > 1 and PADDING_MARKS.isdisjoint(inputs[0]):
            raise UserError(
                f"images with {name} of several sizes cannot be in one row: resize them to one size"
            )
        largest = torch.tensor([*sizes]).amax(0).tolist()
        padded = [tensor.new_zeros(len(tensor), *largest) for tensor in tensors]
        for zeros, tensor in zip(padded, tensors, strict=True):
            zeros[tuple(map(slice, tensor.shape))] = tensor
        joined[name] = torch.cat(padded)
    return joined
