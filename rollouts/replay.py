"""Saved rollouts: groups as lines of `rollouts.jsonl`, and a run that trains from those of an earlier one."""

import base64
import json
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from config import TrainConfig, UserError, describe, to_json
from rollouts import data
from rollouts.data import Batch, Group, Prompt
from rollouts.scoring import weighted
from utils import Stopped, broadcast_object, is_main

DTYPES = (torch.int32, torch.float32, torch.bool)  # of saved tensors
MUST_BE_EQUAL = ("batch_size", "num_generations", "temperature", "reward_funcs")  # in both runs


def _encoded(value: Any) -> Any:
    if not isinstance(value, Tensor):  # something odd in `info`
        return repr(value)
    value = value.int() if value.dtype == torch.int64 else value
    return msgspec.msgpack.Ext(DTYPES.index(value.dtype), value.numpy().tobytes())


def _decoded(number: int, values: memoryview) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=DTYPES[number])


ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
DECODER = msgspec.msgpack.Decoder(Group, ext_hook=_decoded)


def saved_group(group: Group) -> dict[str, Any]:
    """A line of `rollouts.jsonl`, whose bytes become base64: about 12 a token. The prompt's text is left out."""
    prompt = Prompt(group.prompt.index, group.prompt.token_ids, "", {})
    return {"group": ENCODER.encode(replace(group, prompt=prompt, texts=[], ref_logprobs=[]))}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, without one that a crash left without its end."""
    with path.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.endswith("\n"))


class Replay:
    """The batches of an earlier run, which had `save_rollouts`, in their order; in place of `Rollouts`, as it is used.

    There is no server: nothing is sampled, published or evaluated. Groups come in the order in which they were trained,
    so that the same settings give the same weights to the bit.
    """

    def __init__(self, config: TrainConfig, device: torch.device, resumed: dict[str, Any] | None = None):
        self.config, self.stop = config, threading.Event()
        self.failure: Exception | None = None
        self.processor: Any = None
        self._batch: list[Group] = []  # the one under way, on rank 0
        self.num_tokens = resumed["num_tokens"] if resumed else 0
        self.num_steps, self.example = broadcast_object(self._open(resumed) if is_main() else None)

    def _open(self, resumed: dict[str, Any] | None) -> tuple[int, Prompt | None]:
        config, folder = self.config, Path(str(self.config.replay))
        print(describe(config))
        self.processor = data.load_processor(config)
        try:
            last = deque(_rows(folder / "rollouts.jsonl"), 1).pop()["step"]
            settings = [json.loads((folder / "config.json").read_text()), to_json(config)]
        except (OSError, IndexError, ValueError) as error:
            raise UserError(f"replay={folder}: no rollouts of a run with save_rollouts ({error})") from None
        for of_run in settings:  # recipes may have the same function in files of different names
            of_run["reward_funcs"] = [path.rpartition(".")[2] for path in of_run["reward_funcs"]]
        for name in MUST_BE_EQUAL:
            if settings[0][name] != settings[1][name]:
                raise UserError(f"replay: that run had {name}={settings[0][name]}: set it")
        self.prompts = data.load_prompts(config.dataset_id, config.dataset_split, self.processor, config)
        self._batches = self._read(folder / "rollouts.jsonl", resumed["step"] if resumed else 0)
        return config.max_steps or last, data.image_example(self.prompts, self.processor, config)

    def _read(self, path: Path, step: int) -> Iterator[list[Group]]:
        """The batches after `step`."""
        for expected, (number, rows) in enumerate(groupby(_rows(path), key=lambda row: row["step"]), 1):
            batch = [self._group(row["group"]) for row in rows] if number > step else []
            if number != expected or len(batch) not in (0, self.config.batch_size):
                raise UserError(f"replay: step {expected} is not whole in {path}: it was not saved from the start")
            if batch:
                yield batch

    def _group(self, saved: str) -> Group:
        """A saved group with its prompt, its texts, and the reward by this run's weights."""
        group = DECODER.decode(base64.b64decode(saved))
        row = group.prompt.index
        prompt = self.prompts[row % len(self.prompts)]  # of fewer rows it is another one
        if prompt.sources:
            prompt = data.with_images(prompt, self.processor, self.config)
        if prompt.token_ids != group.prompt.token_ids:
            raise UserError(f"replay: dataset row {row} was another prompt in {self.config.replay}")
        decode = data.tokenizer_of(self.processor).decode
        texts = [decode(c.token_ids.tolist(), skip_special_tokens=True) for c in group.completions]
        return replace(group, prompt=prompt, texts=texts, reward=weighted(group.rewards, self.config))

    def take(self, num_tokens: float) -> tuple[list[Group], bool]:
        """The next batch, as `Rollouts.take` gives a part of one; Stopped where the file ends."""
        self._batch = []
        try:
            self._batch = next(self._batches, []) if is_main() and not self.stop.is_set() else []
        except ValueError as error:  # the last whole step is saved first
            self.failure = UserError(str(error))
        if broadcast_object(not self._batch):
            raise Stopped
        return self._batch, True

    def end_batch(self) -> Batch:
        """What was trained; empty on ranks other than 0."""
        self.num_tokens += sum(group.row_sizes[1] for group in self._batch)
        return Batch(self._batch, metrics={"num_tokens": self.num_tokens, "time/wait_s": 0.0})

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on, as `Rollouts.state`."""
        return {"num_tokens": self.num_tokens, "ended": [], "prompts": 0} if is_main() else {}

    def evaluate(self, step: int) -> tuple[dict[str, float], dict[str, list[Group]]]:
        """Nothing is evaluated without a server."""
        return {}, {}

    def close(self, *_: Any) -> None:
        """Nothing is to be closed, checked or published without a server."""

    check = publish = close
