"""Prompts from the rows of a data set: read, tokenized, checked."""

import csv
import gzip
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from config import TrainConfig, UserError
from rollouts.group import Prompt
from rollouts.images import with_tokens
from rollouts.processor import IMAGE, placeholder_ids, tokenizer_of
from utils import naming

MOST_ROWS = 10_000_000  # of a generator, which may be endless
ENDINGS = (  # of files of rows
    ".jsonl", ".ndjson", ".json", ".csv", ".parquet",
    ".jsonl.gz", ".ndjson.gz", ".json.gz", ".csv.gz",
)  # fmt: skip
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # for the chat template, as TRL names them
NO_COLUMNS = ("prompt", "image", "images", *TEMPLATE_COLUMNS)  # of rewards, unless asked for


def load_rows(
    source: str | Callable[[], Any], split: str, config: TrainConfig
) -> list[dict[str, Any]]:
    """The rows of a data set, after `collate_fn`.

    Args:
        source: a function, a file with one of `ENDINGS`, or a folder or name that `datasets` knows.
        split: of a `datasets` name that says none.
        config: collate_fn.

    Raises:
        UserError: there are no rows, or reading fails.
    """
    from datasets import Dataset, load_dataset

    name = getattr(source, "__name__", source)
    rows: Any
    with naming(f"dataset {name}"):
        if callable(source):
            rows = source()
        elif os.path.isfile(source) or (
            source.lower().endswith(ENDINGS) and not os.path.isdir(source)
        ):
            rows = _rows_of_file(source)
        else:
            path, subset, own_split = [*source.split(":", 2), "", ""][:3]
            rows = load_dataset(path, subset or None, split=own_split or split)

        if isinstance(rows, Dataset) and rows.format["type"] is None:
            # Images stay bytes and paths.
            rows = rows.with_format("arrow")[:].to_pylist()
            for row in rows:
                for column in row:
                    row[column] = _without_nulls(row[column], column in TEMPLATE_COLUMNS)
        # Not only what max_steps needs: a run that goes on may raise it.
        rows = list(itertools.islice(rows, MOST_ROWS + 1))
        if len(rows) > MOST_ROWS:
            raise ValueError(f"it goes on after {MOST_ROWS} rows: let it end, or return fewer")

        collate_fn: Any = config.collate_fn
        if collate_fn:
            with naming("through collate_fn, which gets the list of all rows"):
                rows = collate_fn(rows)
        if not rows:
            raise ValueError("it has no rows")
    return rows


def _rows_of_file(path: str) -> Any:
    """The rows of a file, by the ending of its name. JSON has one in a line, or a list of all.

    Raises:
        ValueError: it has another ending; or a row of a table has more cells than its header.
        OSError: there is no such file, or it cannot be read.
    """
    from datasets import Dataset

    name = path.lower()
    if not name.endswith(ENDINGS):
        raise ValueError(f"its name must end in one of {', '.join(ENDINGS)}")
    if name.endswith(".parquet"):
        return Dataset.from_parquet(path)
    open_text: Any = gzip.open if name.endswith(".gz") else open
    with open_text(path, "rt", encoding="utf-8-sig", newline="") as file:
        if name.endswith((".csv", ".csv.gz")):
            rows = list(csv.DictReader(file))  # all is text: 007 is not 7, and NA is not nothing
            if any(None in row for row in rows):  # the name of cells beyond the header's
                raise ValueError("a row has more cells than the header has names")
            return rows
        text = file.read()

    # `datasets` would turn strings that look like dates into dates.
    if text.lstrip().startswith("["):
        return json.loads(text)
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        with naming(f"line {number}"):
            if line.strip():
                rows.append(json.loads(line))
    return rows


def _without_nulls(value: Any, is_chat: bool) -> Any:
    """A column's value without null values in messages, which its type gives to all of them.

    Else a tool would be called with the arguments of all others, or have their parameters.
    """
    if isinstance(value, list):
        return [_without_nulls(item, is_chat) for item in value]
    if not isinstance(value, dict):
        return value
    is_chat = is_chat or "role" in value
    return {
        key: _without_nulls(item, is_chat)
        for key, item in value.items()
        if item is not None or not is_chat
    }


def load_sets(
    field: str, split: str, processor: Any, config: TrainConfig
) -> dict[str, list[Prompt]]:
    """The prompts of the data sets that a field names, by name; of a single one by "".

    Their `index` goes on from one set to the next.

    Raises:
        UserError: a row makes no prompt; names its set and number.
    """
    sources = getattr(config, field) or {}
    if not isinstance(sources, dict):
        sources = {"": sources}
    make = partial(make_prompt, processor=processor, config=config)
    numbers = itertools.count()
    sets = {}
    for name, source in sources.items():
        where = f"{field} {name}".strip()
        with naming(where), ThreadPoolExecutor() as pool:
            prompts = list(pool.map(make, itertools.count(), load_rows(source, split, config)))
        sets[name] = [
            replace(prompt, index=next(numbers), set=name, place=f"row {prompt.index} of {where}")
            for prompt in prompts
        ]
    return sets


def make_prompt(index: int, row: dict[str, Any], processor: Any, config: TrainConfig) -> Prompt:
    """A row's prompt, tokenized, with its images as the dataset has them.

    Raises:
        UserError: the row makes no prompt, or an image cannot be read; names its number.
    """
    with naming(f"dataset row {index}"):
        content, images = _content_and_images(row)
        names = config.extra_columns
        if names is None:
            names = [name for name in row if name not in NO_COLUMNS]
        template = dict(config.chat_template_kwargs or {})
        with naming("its chat_template_kwargs must be a dictionary, and no text"):
            template |= row.get("chat_template_kwargs") or {}
        tools = row.get("tools")
        if isinstance(tools, str):  # as tables have them
            tools = json.loads(tools)
        if tools:  # Llama's templates tell of tools even where the list is empty
            template["tools"] = tools  # which transformers checks
        columns = {name: row[name] for name in names}

    prompt = with_tokens(Prompt(index, [], content, columns, images, template), processor, config)
    return replace(prompt, images=None)  # a broken one has shown; sampling processes them again


def _content_and_images(row: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A row's prompt with marks in the places of images, and the images, unopened.

    Raises:
        ValueError: there is no prompt; a message has no role or content, or a part of another kind;
            or images are given twice, or not for each place.
    """
    content = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(content, str | list) or content == []:
        raise ValueError(f"it has no `prompt`, a string or a list of messages: {row!r:.200}")

    messages: list[Any] = []  # whose parts are text, or marks in the places of images
    places: list[Any] = []  # of images in messages, each with its image, or None
    for message in content if isinstance(content, list) else []:
        match message:
            case {"role": "assistant"} | {"role": str(), "content": str() | [_, *_]} if message[
                "role"
            ]:
                parts = message.get("content") or ""
            case _:
                raise ValueError(f"it has a message without role or content: {message!r:.100}")
        if isinstance(parts, str):
            messages.append(message)
            continue

        marked = []
        for part in parts:
            match part:
                case {"type": "text", "text": str(text)}:
                    marked.append({"type": "text", "text": text})
                case {"type": "image" | "image_url"}:
                    marked.append(IMAGE)
                    image = part.get("image") or part.get("image_url")
                    places.append(image or part.get("url") or part.get("path"))
                case _:
                    raise ValueError(
                        "it has a message with a part neither of type text nor image: "
                        f"{part!r:.100}"
                    )
        messages.append({**message, "content": marked})

    inside = [image for image in places if image]
    given = [images for images in (row.get("image"), row.get("images"), inside) if images]
    if len(given) > 1:
        raise ValueError(
            "it has images in two places of `image`, `images` and its messages: leave one"
        )
    images = given[0] if given else []
    if not isinstance(images, list | tuple):
        images = [images]
    if places and len(places) != len(images):
        raise ValueError(
            f"it has {len(images)} images for the {len(places)} places in its messages"
        )
    return messages or content, list(images)


def leave_out_long(prompts: list[Prompt], max_len: int, config: TrainConfig) -> list[Prompt]:
    """The prompts of 1 to `max_len` tokens; prints the others' number.

    Raises:
        UserError: all prompts are left out.
    """
    kept = []
    left_out = []
    for prompt in prompts:
        if 0 < len(prompt.token_ids) <= max_len:
            kept.append(prompt)
        else:
            left_out.append(prompt)
    if left_out:
        said = (
            f"left out {len(left_out)} of {len(prompts)} prompts, empty or over {max_len} tokens, "
            f"as {left_out[0].where}: raise max_tokens_per_gpu, or the --max-model-len of all "
            f"servers, or lower max_completion_len={config.max_completion_len}"
        )
        if not kept:
            raise UserError(said)
        print(said)
    return kept


def check_vocabulary(prompts: list[Prompt], processor: Any, model_config: Any) -> None:
    """Refuse prompts with a token that the model cannot read.

    It has no embedding, or is the placeholder of an image (or the like) that the row does not have.

    Raises:
        UserError: names the row.
    """
    vocab_size = model_config.get_text_config(decoder=True).vocab_size
    readable = set(range(vocab_size)).difference(placeholder_ids(processor))
    for prompt in prompts:
        unread = set(prompt.token_ids) - readable
        if prompt.sources:
            unread.discard(processor.image_token_id)
        if unread:
            token = tokenizer_of(processor).decode(min(unread))
            raise UserError(
                f"{prompt.where}: its token {token} stands for an image that the row has not, or "
                "the model has no embedding for it: leave it out, or resize the embeddings"
            )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A digest of prompts with their columns and images, as far as these are plain data."""
    digest = hashlib.sha256()
    for prompt in prompts:
        parts = [prompt.index, prompt.token_ids, prompt.columns, prompt.sources]
        # In place of what JSON does not hold: bytes as text, of all else the type.
        text = json.dumps(
            parts,
            skipkeys=True,
            default=lambda value: repr(value) if type(value) is bytes else type(value).__name__,
        )
        digest.update(text.encode())
    return digest.hexdigest()
