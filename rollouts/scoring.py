"""The rewards of a group, and what becomes of calls that fail."""

import inspect
import json
import math
import threading
from collections import Counter
from collections.abc import Iterable
from itertools import chain, product
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from config import TrainConfig, UserError
from rollouts.data import Prompt
from rollouts.workers import CallError, CallPool
from vllm_client import Completion


class Scores(NamedTuple):
    """The decoded completions of a group, [completions][functions] rewards, and their weighted sums, NaN for none."""

    texts: list[str]
    rewards: list[list[float | None]]
    reward: list[float]


def check_rewards(prompts: list[Prompt], config: TrainConfig) -> None:
    """Raise a UserError for a reward function that no worker, or no row of the data, can call; it names the row."""
    rows = {tuple(prompt.columns): prompt.index for prompt in reversed(prompts)}  # the first with each set of columns
    for outer in config.reward_funcs:
        inner: Any = getattr(outer, "functions", [outer])  # those that `best_of` calls
        for function, (columns, row) in product(inner, rows.items()):
            names = ["prompts", "completions", "completion_ids", *columns]
            try:
                inspect.signature(function).bind(**dict.fromkeys(names))
            except TypeError as error:
                where = f"reward {function.__name__} on dataset row {row}"
                raise UserError(f"{where}: {error}; it gets {', '.join(names)}") from None
        try:
            cloudpickle.dumps(outer)
        except Exception as error:  # whatever the objects that it holds raise
            name = getattr(outer, "__name__", "")
            raise UserError(f"reward {name} cannot be sent to a worker: {error}; open clients inside it") from None


def reward_means(rewards: Iterable[list[list[float | None]]], config: TrainConfig) -> dict[str, float]:
    """`rewards/<function>`: its mean over the completions that it gave a number; `rewards` are of several groups."""
    columns = zip(*chain.from_iterable(rewards), strict=True)
    means = {}
    for function, column in zip(config.reward_funcs, columns, strict=True):
        given = [value for value in column if value is not None]
        means[f"rewards/{getattr(function, '__name__', '')}"] = sum(given) / len(given) if given else math.nan
    return means


class Scorer:
    """Calls the reward functions, in worker processes, and keeps account of what fails.

    `failed_rewards.jsonl` in the `output_dir` starts anew unless the run `resumes`.
    """

    def __init__(self, tokenizer: Any, config: TrainConfig, resumes: bool = False):
        self.tokenizer = tokenizer
        self.config = config
        self.num_failed = 0
        self.failed_path = Path(config.output_dir) / "failed_rewards.jsonl"
        if not resumes:
            self.failed_path.unlink(missing_ok=True)
        self._is_closed = False
        self._in_a_row: Counter[str] = Counter()  # failures of each function since its last success
        self._calls = CallPool(config.reward_workers)
        self._lock = threading.Lock()

    def score(self, prompt: Prompt, completions: list[Completion]) -> Scores:
        """The rewards of a prompt's completions. Thread-safe.

        Raises:
            UserError: a function returns no finite numbers, or fails time after time; names it and the dataset row.
            CallError: the scorer was closed meanwhile.
        """
        texts = [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        columns = [self._call(function, prompt, completions, texts) for function in self.config.reward_funcs]
        rewards = [list(row) for row in zip(*columns, strict=True)]
        weights = self.config.reward_weights or [1.0] * len(columns)
        given = [[w * r for w, r in zip(weights, row, strict=True) if r is not None] for row in rewards]
        return Scores(texts, rewards, [sum(row) if row else math.nan for row in given])

    def _call(self, function: Any, prompt: Prompt, completions: list[Completion], texts: list[str]) -> list[Any]:
        num = len(completions)
        where = f"reward {function.__name__} on dataset row {prompt.index}"
        arguments = {
            "prompts": [prompt.content] * num,
            "completions": texts,
            "completion_ids": [c.token_ids for c in completions],
            **{column: [value] * num for column, value in prompt.columns.items()},
        }
        try:
            values = self._calls.call(function, arguments, self.config.reward_timeout)
        except CallError as error:
            if self._is_closed:
                raise
            self._note_failure(function.__name__, f"{where} {error}", prompt, texts)
            return [self.config.failed_reward] * num
        with self._lock:
            self._in_a_row[function.__name__] = 0
        if not isinstance(values, list | tuple) or len(values) != num:
            raise UserError(f"{where} must return a list of {num} numbers, one per completion, not {values!r:.100}")
        if odd := [v for v in values if v is not None and not (isinstance(v, Real) and math.isfinite(v))]:
            raise UserError(f"{where} returned {odd[0]!r}: rewards are finite numbers or None")
        return [None if value is None else float(value) for value in values]

    def _note_failure(self, name: str, message: str, prompt: Prompt, texts: list[str]) -> None:
        """Write the failed call down; a function that fails `batch_size` times in a row, and 4 times, ends the run."""
        sample = {"error": message, "prompt": prompt.content, "completions": texts, "columns": prompt.columns}
        with self._lock:
            with self.failed_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sample, ensure_ascii=False, default=repr) + "\n")
            self.num_failed += 1
            self._in_a_row[name] += 1
            if self.num_failed == 1:
                print(f"{message} (later ones are counted in rewards_failed, and in {self.failed_path})", flush=True)
            if self._in_a_row[name] >= max(self.config.batch_size, 4):
                raise UserError(f"{message}; so did its last {self._in_a_row[name]} calls, see failed_rewards.jsonl")

    def close(self) -> None:
        """End the workers."""
        self._is_closed = True
        self._calls.close()
