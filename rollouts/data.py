"""From a dataset row to a `Prompt`: rows, templates, tokens, images; and what prompts become, `Group` and `Batch`."""

import base64
import inspect
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import requests
import torch
from torch import Tensor

from config import TrainConfig, UserError
from prefix_attention import as_tokens, num_packed_tokens
from utils import naming
from vllm_client import Completion


@dataclass(frozen=True)
class Prompt:
    """One problem: what the server gets, and what the rewards see."""

    index: int  # row in the dataset
    token_ids: list[
        int
    ]  # tokenized once; an image's placeholder is expanded to the tokens that it stands for
    content: Any  # the dataset's `prompt` (string or chat messages), for rewards and people
    columns: dict[str, Any]  # the other columns that the rewards want
    sources: list[Any] = field(default_factory=list)  # its images as the dataset has them
    images: "Images | None" = None  # its images, processed; None before it is sampled, and for text

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Its images for the policy: `Images.inputs`, or {} without images, or before they are processed."""
        return self.images.inputs if self.images else {}


@dataclass(eq=False)
class Group:
    """One prompt and its completions: the unit from the dataset to the gradient, filled in on its way."""

    prompt: Prompt
    completions: list[Completion] = field(default_factory=list)
    texts: list[str] = field(
        default_factory=list
    )  # the completions, decoded for rewards and people
    rewards: list[list[float | None]] = field(
        default_factory=list
    )  # [completion][function]; None: does not apply
    reward: list[float] = field(
        default_factory=list
    )  # [completion], weighted sums; NaN where no function applies
    advantages: list[float] = field(default_factory=list)  # [completion]
    ref_logprobs: list[Tensor] = field(
        default_factory=list
    )  # [completion] of [n], nats, from `reference_urls`
    id: int = 0  # its place in the order of admission
    started_version: int = -1  # the policy version when its request was sent, -1 before
    finished_version: int = 0  # the policy version when its rewards were known
    trained_version: int = -1  # the policy version that it trains, -1 before
    server: int = 0  # the number of the server that sampled it
    started_s: float = 0.0  # when its request was sent, on the monotonic clock
    sampled_s: float = 0.0
    scored_s: float = 0.0

    @cached_property
    def sequences(self) -> tuple[Tensor, list[list[tuple[Tensor, Tensor]]]]:
        """The prompt, and each completion as (prompt, tokens) of its segments: what `pack` takes as a group."""
        own, rollouts = (
            as_tokens(self.prompt.token_ids),
            [completion.segments for completion in self.completions],
        )
        return own, [
            [(own if s.prompt_ids is None else s.prompt_ids, s.token_ids) for s in of]
            for of in rollouts
        ]

    @property
    def segments(self) -> list[Completion]:
        """Those of all completions, one after the other."""
        return [segment for completion in self.completions for segment in completion.segments]

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled one of its tokens."""
        versions = (span.version for segment in self.segments for span in segment.weight_versions)
        return min(versions, default=self.finished_version)

    @property
    def can_teach(self) -> bool:
        """Whether its rewards differ, so that its advantages do."""
        return len({r for r in self.reward if not math.isnan(r)}) > 1


def as_completion(rollout: Completion | Sequence[Completion], prompt: Prompt) -> Completion:
    """A rollout as its last segment, which holds the earlier ones and the `info` of all; ValueError if it has none."""
    given = [rollout] if isinstance(rollout, Completion) else rollout
    segments = [
        replace(segment, earlier=[]) for completion in given for segment in completion.segments
    ]
    if not segments:
        raise ValueError("a rollout without a completion")
    for segment in segments:
        if segment.prompt_ids is not None and segment.prompt_ids.tolist() == prompt.token_ids:
            segment.prompt_ids = None
    info = {name: value for segment in segments for name, value in segment.info.items()}
    return replace(segments[-1], info=info, earlier=segments[:-1])


def check_segments(group: Group, forbidden: Sequence[int], config: TrainConfig) -> None:
    """ValueError where no row of the policy takes a group's segments."""
    own, completions = group.sequences
    num_fixed = len(own) if group.prompt.images else 0
    for segments in completions:
        longest = max(len(ids) + len(tokens) for ids, tokens in segments)
        if config.weighs_whole_completions:  # of the last token no row has a place
            whole = [(own, [segments])]
            longest = max(
                longest, num_packed_tokens(whole, config.share_prefix, {0} if num_fixed else ()) + 1
            )
        if longest > config.max_tokens_per_gpu:
            raise ValueError(
                f"a completion has {longest} tokens with its prompt: raise max_tokens_per_gpu"
            )
        for ids, tokens in segments:
            if not len(ids) or not torch.equal(ids[:num_fixed], own[:num_fixed]):
                raise ValueError(
                    "a segment's prompt is empty, or does not begin with the group's, which has images"
                )
            if torch.isin(
                torch.cat([ids[num_fixed:], tokens]), torch.tensor(forbidden, dtype=torch.int64)
            ).any():
                raise ValueError(
                    "a completion has a placeholder of an image, which no policy takes"
                )


@dataclass
class Batch:
    """The groups of a step: those that it trained, and those that were dropped since the step before it."""

    groups: list[Group] = field(default_factory=list)
    dropped: dict[str, list[Group]] = field(
        default_factory=lambda: {"stale": [], "zero_advantage": []}
    )
    metrics: dict[str, float] = field(default_factory=dict)


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
