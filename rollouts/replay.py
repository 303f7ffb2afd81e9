"""Saved rollouts: groups as lines of `rollouts.jsonl`, and a run that trains from those of an earlier one."""

import base64
import json
import threading
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from config import TrainConfig, UserError, describe
from rollouts import data
from rollouts.data import Batch, Group, Prompt
from rollouts.scoring import weighted
from utils import Stopped, broadcast_object, is_main
from vllm_client import Completion, Span

TYPES: dict[str, Any] = {"token_ids": torch.int32, "sampler_logprobs": torch.float32, "loss_mask": torch.bool}
PLAIN = ("id", "rewards", "server", "trained_version", "started_version", "finished_version")


def must_be(config: TrainConfig) -> dict[str, Any]:
    """What both runs need alike: the log-probs and rewards that were saved depend on it."""
    functions: Any = config.reward_funcs
    alike = {name: getattr(config, name) for name in ("batch_size", "num_generations", "temperature")}
    return alike | {"reward_funcs": [function.__name__ for function in functions]}


def saved_group(group: Group, config: TrainConfig) -> dict[str, Any]:
    """A line of `rollouts.jsonl` for msgspec, which writes bytes as base64: about 12 bytes a token."""
    columns = {name: torch.cat([getattr(c, name) for c in group.completions]).to(of) for name, of in TYPES.items()}
    return {name: getattr(group, name) for name in PLAIN} | must_be(config) | {
        "row": group.prompt.index, "prompt_ids": group.prompt.token_ids,
        "completions": [(len(c.token_ids), c.finish_reason, c.weight_versions, c.info) for c in group.completions],
        **{name: column.numpy().tobytes() for name, column in columns.items()},
    }  # fmt: skip


def read_group(saved: dict[str, Any], prompt: Prompt, tokenizer: Any, config: TrainConfig) -> Group:
    """The group that `saved_group` wrote, of this prompt, with its texts."""
    columns = [torch.frombuffer(bytearray(base64.b64decode(saved[name])), dtype=of) for name, of in TYPES.items()]
    sizes = [size for size, *_ in saved["completions"]]
    parts: Any = zip(saved["completions"], *(column.split(sizes) for column in columns), strict=True)
    completions = [
        Completion(ids, logprobs, reason, [Span(*span) for span in spans], mask, info)
        for (_, reason, spans, info), ids, logprobs, mask in parts
    ]
    texts = [tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True) for completion in completions]
    plain = {name: saved[name] for name in PLAIN}
    return Group(prompt, completions, texts, **plain, reward=weighted(saved["rewards"], config))


def _is_whole(line: str) -> bool:
    """Not one that a crash left without its end."""
    return line.endswith("\n")


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
        config, path = self.config, Path(str(self.config.replay)) / "rollouts.jsonl"
        print(describe(config))
        self.processor = data.load_processor(config)
        try:
            with path.open(encoding="utf-8") as lines:
                last = json.loads(deque(filter(_is_whole, lines), 1).pop())["step"]
        except (OSError, IndexError, ValueError) as error:
            raise UserError(f"replay={config.replay}: no rollouts of a run with save_rollouts ({error})") from None
        self.prompts = data.load_prompts(config.dataset_id, config.dataset_split, self.processor, config)
        self._batches = self._read(path, resumed["step"] if resumed else 0)
        return config.max_steps or last, data.image_example(self.prompts, self.processor, config)

    def _read(self, path: Path, step: int) -> Iterator[list[Group]]:
        """The batches after `step`."""
        tokenizer, wanted = data.tokenizer_of(self.processor), must_be(self.config)
        with path.open(encoding="utf-8") as lines:
            by_step = groupby(map(json.loads, filter(_is_whole, lines)), key=lambda row: row["step"])
            for expected, (number, rows) in enumerate(by_step, 1):
                batch = list(rows) if number > step else []
                for name, value in wanted.items():
                    if any(row[name] != value for row in batch):
                        raise UserError(f"replay: that run had {name}={batch[0][name]}: set it")
                if number != expected or (batch and len(batch) != self.config.batch_size):
                    raise UserError(f"replay: step {expected} is not whole in {path}: it was not saved from the start")
                if batch:
                    yield [read_group(row, self._prompt(row), tokenizer, self.config) for row in batch]

    def _prompt(self, saved: dict[str, Any]) -> Prompt:
        """The prompt of a saved group, with its images."""
        prompt = self.prompts[saved["row"] % len(self.prompts)]  # of fewer rows it is another one
        if prompt.sources:
            prompt = data.with_images(prompt, self.processor, self.config)
        if prompt.token_ids != saved["prompt_ids"]:
            raise UserError(f"replay: dataset row {saved['row']} was another prompt in {self.config.replay}")
        return prompt

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
        """Nothing: there is no server."""
        return {}, {}

    def check(self, gaps: dict[int, float]) -> None:
        """Nothing."""

    def publish(self, policy: nn.Module, version: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
