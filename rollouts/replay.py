"""Saved rollouts, which a later run trains without servers."""

import base64
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from config import TrainConfig, UserError, to_json
from rollouts.group import (
    Completion,
    Group,
    Prompt,
    spans_to_versions,
    version_spans,
)
from rollouts.images import with_images
from rollouts.own_rollouts import check_segments
from rollouts.processor import tokenizer_of
from rollouts.scoring import decoded, weighted
from rollouts.stream import GroupStream
from utils import naming

DTYPES = (torch.int32, torch.float32, torch.bool)  # of saved tensors
MUST_BE_EQUAL = ("batch_size", "num_generations", "temperature", "reward_funcs")  # in both runs
# A line has these of a group and of a completion, and of a prompt what finds it in a data set.
GROUP_FIELDS = (
    "rewards", "started_version", "finished_version", "trained_version", "server", "started_s",
    "sampled_s", "scored_s",
)  # fmt: skip
COMPLETION_FIELDS = ("token_ids", "sampler_logprobs", "finish_reason", "info", "prompt_ids")


def _tensor_to_bytes(value: Any) -> Any:
    if isinstance(value, Tensor) and value.ndim == 1:
        if value.dtype == torch.int64:
            value = value.int()
        if value.dtype in DTYPES:
            data_bytes = value.detach().cpu().numpy().tobytes()
            return msgspec.msgpack.Ext(DTYPES.index(value.dtype), data_bytes)
    return repr(value)  # something odd in `info`


def _bytes_to_tensor(code: int, data_bytes: memoryview) -> Tensor:
    return torch.frombuffer(bytearray(data_bytes), dtype=DTYPES[code])


ENCODER = msgspec.msgpack.Encoder(enc_hook=_tensor_to_bytes)
DECODER = msgspec.msgpack.Decoder(ext_hook=_bytes_to_tensor)


def saved_group(group: Group) -> dict[str, Any]:
    """A line of `rollouts.jsonl`: about 12 bytes a token, 4 of its mask's, then in base64."""
    saved = {name: getattr(group, name) for name in GROUP_FIELDS}
    saved["rewards"] = group.rewards.tolist()
    saved["prompt"] = {"index": group.prompt.index, "token_ids": group.prompt.token_ids}
    saved["completions"] = [_saved_completion(completion) for completion in group.completions]
    return {"group": ENCODER.encode(saved)}


def restored(group_bytes: bytes, number: int) -> Group:
    """A group that `saved_group` encoded, still without texts."""
    saved = DECODER.decode(group_bytes)
    prompt = Prompt(saved["prompt"]["index"], saved["prompt"]["token_ids"], "", {})
    completions = [_restored_completion(fields) for fields in saved["completions"]]
    kept = {name: saved[name] for name in GROUP_FIELDS}
    kept["rewards"] = torch.from_numpy(np.array(saved["rewards"], np.float64))  # NaN for None
    return Group(prompt, completions, id=number, **kept)


def _saved_completion(completion: Completion) -> dict[str, Any]:
    saved = {name: getattr(completion, name) for name in COMPLETION_FIELDS}
    # Spans are few, where tokens are many.
    saved["weight_versions"] = version_spans(completion.weight_versions)
    saved["earlier"] = [_saved_completion(segment) for segment in completion.earlier]
    return saved


def _restored_completion(saved: dict[str, Any]) -> Completion:
    kept = {name: saved[name] for name in COMPLETION_FIELDS}
    versions = spans_to_versions(saved["weight_versions"], len(saved["token_ids"]))
    earlier = [_restored_completion(segment) for segment in saved["earlier"]]
    return Completion(weight_versions=versions, earlier=earlier, **kept)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The file's whole lines: a crash may leave half a line."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def saved_groups(config: TrainConfig) -> tuple[int, Iterator[Group]]:
    """The number of whole steps that a run saved, and their groups.

    The groups come in order.

    Raises:
        UserError: there are no rollouts, or they are of a run with other settings.
    """
    folder = Path(str(config.replay))
    path = folder / "rollouts.jsonl"
    with naming(f"replay={folder}: no rollouts of a run with save_rollouts"):
        num_groups = Counter(line["step"] for line in _lines(path) if "group" in line)
        theirs = json.loads((folder / "config.json").read_text())
    ours = to_json(config)
    for settings in (theirs, ours):  # recipes may have the same function in files of other names
        settings["reward_funcs"] = [path.rpartition(".")[2] for path in settings["reward_funcs"]]
    for name in MUST_BE_EQUAL:
        if theirs[name] != ours[name]:
            raise UserError(f"replay: that run had {name}={theirs[name]}: set it")

    num_steps = 0
    while num_groups[num_steps + 1] == config.batch_size:
        num_steps += 1
    if num_steps == 0:
        raise UserError(
            f"replay={folder}: step 1 is not whole: rollouts were not saved from the start"
        )
    return num_steps, _groups(path)


def _groups(path: Path) -> Iterator[Group]:
    for number, line in enumerate(_lines(path)):
        yield restored(base64.b64decode(line["group"]), number)


def restore(group: Group, prompts: dict[int, Prompt], processor: Any, config: TrainConfig) -> None:
    """Fill in a saved group's prompt, its texts and this run's reward.

    Raises:
        UserError: the row of the data set has another prompt than the group, or no row takes it.
    """
    row = group.prompt.index
    prompt = prompts.get(row)
    if prompt and prompt.sources:
        prompt = with_images(prompt, processor, config)
    if not prompt or prompt.token_ids != group.prompt.token_ids:
        raise UserError(
            f"replay: dataset row {row} is not the prompt that it was in {config.replay}"
        )
    group.prompt = prompt
    with naming(f"replay: dataset row {row}"):
        check_segments(group, (), config)
    group.texts = decoded(group, tokenizer_of(processor), config)
    group.reward = weighted(group.rewards, config)


def replay_stream(
    prompts: list[Prompt], processor: Any, num_trained: int, config: TrainConfig
) -> GroupStream:
    """The groups that another run trained, in order, from a number on."""
    num_steps, groups = saved_groups(config)
    by_row = {prompt.index: prompt for prompt in prompts}
    left = islice(groups, num_trained, None)
    return GroupStream(
        lambda first: list(islice(left, config.batch_size)),
        lambda group: restore(group, by_row, processor, config),
        num_steps,
        config,
    )
