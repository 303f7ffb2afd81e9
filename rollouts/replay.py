"""Saved rollouts: groups as lines of `rollouts.jsonl`, and a run that trains from those of an earlier one."""

import base64
import json
import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from config import TrainConfig, UserError, describe
from rollouts import data
from rollouts.data import Batch, Group, Prompt
from utils import Stopped, broadcast_object, is_main
from vllm_client import Completion, Span

FILE = "rollouts.jsonl"
TYPES: dict[str, Any] = {"token_ids": torch.int32, "sampler_logprobs": torch.float32, "loss_mask": torch.bool}
PLAIN = ("id", "part", "rewards", "reward", "server", "trained_version", "started_version", "finished_version")


def saved_group(group: Group) -> dict[str, Any]:
    """What `Replay` makes the group of, for msgspec's JSON, which writes bytes as base64: about 12 bytes a token."""
    of_completions = {
        name: torch.cat([getattr(c, name) for c in group.completions]).to(dtype).numpy().tobytes()
        for name, dtype in TYPES.items()
    }
    others = [(len(c.token_ids), c.finish_reason, c.weight_versions, c.info) for c in group.completions]
    prompt = {"row": group.prompt.index, "prompt_ids": group.prompt.token_ids}
    return {**prompt, "completions": others, **of_completions, **{name: getattr(group, name) for name in PLAIN}}


def read_group(saved: dict[str, Any], prompt: Prompt, tokenizer: Any) -> Group:
    """The group that `saved_group` wrote, of this prompt, with its texts."""
    sizes = [size for size, *_ in saved["completions"]]
    parts: list[tuple[Tensor, ...]] = [
        torch.frombuffer(bytearray(base64.b64decode(saved[name])), dtype=dtype).split(sizes)
        for name, dtype in TYPES.items()
    ]
    completions = [
        Completion(ids, logprobs, reason, [Span(*span) for span in spans], mask, info)
        for (_, reason, spans, info), ids, logprobs, mask in zip(saved["completions"], *parts, strict=True)
    ]
    texts = [tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True) for completion in completions]
    plain = {name: saved[name] for name in PLAIN}
    plain["reward"] = [math.nan if value is None else value for value in saved["reward"]]  # JSON has no NaN
    return Group(prompt, completions, texts, **plain)


class Replay:
    """The batches of an earlier run, which had `save_rollouts`, in their order; in place of `Rollouts`, as it is used.

    There is no server: nothing is sampled, published or evaluated. Parts of a batch come as the earlier run took them,
    so that the same settings give the same weights to the bit.
    """

    def __init__(self, config: TrainConfig, device: torch.device, resumed: dict[str, Any] | None = None):
        self.config = config
        self.stop = threading.Event()
        self.failure: Exception | None = None
        self.processor: Any = None
        self._groups: list[Group] = []  # of the batch under way
        self.num_tokens = resumed["num_tokens"] if resumed else 0
        self.num_steps, self.example = broadcast_object(self._open(resumed) if is_main() else None)

    def _open(self, resumed: dict[str, Any] | None) -> tuple[int, Prompt | None]:
        config, path = self.config, Path(str(self.config.replay)) / FILE
        print(describe(config))
        self.processor = data.load_processor(config)
        try:
            with path.open(encoding="utf-8") as lines:
                last = json.loads(deque(lines, 1).pop())["step"]
        except (OSError, IndexError, ValueError) as error:
            cure = "give the output_dir of a run that had save_rollouts"
            raise UserError(f"replay={config.replay}: {path} has no rollouts: {cure} ({error})") from None
        self.prompts = data.load_prompts(config.dataset_id, config.dataset_split, self.processor, config)
        self._parts = self._read(path, resumed["step"] if resumed else 0)
        return config.max_steps or last, data.image_example(self.prompts, self.processor, config)

    def _read(self, path: Path, step: int) -> Iterator[tuple[list[Group], bool]]:
        """The parts of the batches after `step`, and whether each is its batch's last."""
        tokenizer = data.tokenizer_of(self.processor)
        with path.open(encoding="utf-8") as lines:
            saved = filter(lambda row: row["step"] > step, map(json.loads, lines))
            for number, rows in groupby(saved, key=lambda row: row["step"]):
                groups = [read_group(row, self._prompt(row), tokenizer) for row in rows]
                if len(groups) != self.config.batch_size:
                    raise UserError(f"replay: step {number} has {len(groups)} groups: set batch_size to it")
                for part, of_part in groupby(groups, key=lambda group: group.part):
                    yield list(of_part), part == groups[-1].part

    def _prompt(self, saved: dict[str, Any]) -> Prompt:
        prompt = self.prompts[saved["row"]] if saved["row"] < len(self.prompts) else Prompt(0, [], "", {})
        if prompt.sources:
            prompt = data.with_images(prompt, self.processor, self.config)
        if prompt.token_ids != saved["prompt_ids"]:
            raise UserError(f"replay: dataset row {saved['row']} was another prompt in {self.config.replay}")
        return replace(prompt, sources=[])

    def take(self, num_tokens: float) -> tuple[list[Group], bool]:
        """The next part of the batch, as `Rollouts.take`; Stopped where the file ends."""
        part = next(self._parts, None) if is_main() and not self.stop.is_set() else None
        groups, is_complete = part or ([], False)
        self._groups += groups
        is_over, is_complete = broadcast_object((part is None, is_complete))
        if is_over:
            raise Stopped
        return groups, is_complete

    def end_batch(self) -> Batch:
        """What was trained; empty on ranks other than 0."""
        groups, self._groups = self._groups, []
        self.num_tokens += sum(group.row_sizes[1] for group in groups)
        return Batch(groups, metrics={"num_tokens": self.num_tokens, "time/wait_s": 0.0})

    def evaluate(self, step: int) -> tuple[dict[str, float], dict[str, list[Group]]]:
        """Nothing, as `Rollouts.evaluate` where none is due."""
        return {}, {}

    def check(self, gaps: dict[int, float]) -> None:
        """There is no server to leave out."""

    def publish(self, policy: nn.Module, version: int) -> None:
        """There is no server to publish to."""

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on, as `Rollouts.state`."""
        return {"num_tokens": self.num_tokens, "ended": [], "prompts": 0} if is_main() else {}

    def close(self) -> None:
        """Nothing is open."""
