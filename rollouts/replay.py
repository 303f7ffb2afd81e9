"""Saved rollouts: groups as lines of `rollouts.jsonl`, from which a later run trains in place of servers."""

import base64
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import msgspec
import torch

from config import TrainConfig, UserError, to_json
from rollouts import data
from rollouts.data import Group, Prompt
from rollouts.scoring import weighted
from utils import naming

DTYPES = (torch.int32, torch.float32, torch.bool)  # of saved tensors
MUST_BE_EQUAL = ("batch_size", "num_generations", "temperature", "reward_funcs")  # in both runs


def _encoded(value: Any) -> Any:
    if (
        not isinstance(value, torch.Tensor)
        or value.ndim != 1
        or value.dtype not in (torch.int64, *DTYPES)
    ):
        return repr(value)  # something odd in `info`
    value = (value.int() if value.dtype == torch.int64 else value).detach().cpu()
    return msgspec.msgpack.Ext(DTYPES.index(value.dtype), value.numpy().tobytes())


ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
DECODER = msgspec.msgpack.Decoder(
    Group, ext_hook=lambda n, raw: torch.frombuffer(bytearray(raw), dtype=DTYPES[n])
)


def saved_group(group: Group) -> dict[str, Any]:
    """A line of `rollouts.jsonl`, about 12 bytes a token (its encoder makes base64). The prompt's text is left out."""
    prompt = Prompt(group.prompt.index, group.prompt.token_ids, "", {})
    return {"group": ENCODER.encode(replace(group, prompt=prompt, texts=[], ref_logprobs=[]))}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, without one that a crash left without its end."""
    with path.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.endswith("\n"))


def saved_groups(config: TrainConfig) -> tuple[int, Iterator[Group]]:
    """The number of whole steps that the run saved, from step 1 on, and its groups in training order, numbered anew."""
    folder = Path(str(config.replay))
    with naming(f"replay={folder}: no rollouts of a run with save_rollouts"):
        sizes = Counter(row["step"] for row in _rows(folder / "rollouts.jsonl") if "group" in row)
        before, now = json.loads((folder / "config.json").read_text()), to_json(config)
    for settings in (before, now):  # recipes may have the same function in files of different names
        settings["reward_funcs"] = [path.rpartition(".")[2] for path in settings["reward_funcs"]]
    for name in MUST_BE_EQUAL:
        if before[name] != now[name]:
            raise UserError(f"replay: that run had {name}={before[name]}: set it")
    num_steps = len([*takewhile(lambda step: sizes[step] == config.batch_size, count(1))])
    if num_steps == 0:
        raise UserError(
            f"replay={folder}: step 1 is not whole: rollouts were not saved from the start"
        )
    rows = enumerate(_rows(folder / "rollouts.jsonl"))
    return num_steps, (
        replace(DECODER.decode(base64.b64decode(row["group"])), id=place) for place, row in rows
    )


def restore(group: Group, prompts: dict[int, Prompt], processor: Any, config: TrainConfig) -> None:
    """Give a saved group its prompt, its texts and this run's reward; UserError where the prompt is another one."""
    prompt = prompts.get(row := group.prompt.index)
    if prompt and prompt.sources:
        prompt = data.with_images(prompt, processor, config)
    if not prompt or prompt.token_ids != group.prompt.token_ids:
        raise UserError(
            f"replay: dataset row {row} is not the prompt that it was in {config.replay}"
        )
    with naming(f"replay: dataset row {row}"):
        data.check_segments(replace(group, prompt=prompt), (), config)
    ids = [completion.token_ids.tolist() for completion in group.completions]
    group.texts = [
        data.tokenizer_of(processor).decode(of_one, skip_special_tokens=True) for of_one in ids
    ]
    group.prompt, group.reward = prompt, weighted(group.rewards, config)
