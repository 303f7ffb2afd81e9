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
    """Refuse reward functions that cannot be called with the columns of the data.

    Raises:
        UserError: one wants a column that is not there, or does not take one that is; names the row.
    """
    rows = {tuple(prompt.columns): prompt.index for prompt in reversed(prompts)}  # the first with each set of columns
    functions: Any = chain.from_iterable(getattr(f, "functions", [f]) for f in config.reward_funcs)
    for function, (columns, row) in product(functions, rows.items()):
        names = ["prompts", "completions", "completion_ids", *columns]
        try:
            inspect.signature(function).bind(**dict.fromkeys(names))
        except TypeError as error:
            where = f" on dataset row {row}" if len(rows) > 1 else ""
            raise UserError(f"reward {function.__name__}{where}: {error}; it gets {', '.join(names)}") from None
    for function in config.reward_funcs:
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # whatever the objects that it holds raise
            name = getattr(function, "__name__", "")
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

    Args:
        tokenizer: decodes completions.
        config: reward_funcs, reward_weights, reward_workers, reward_timeout, failed_reward, batch_size, output_dir.
        resumes: whether `failed_rewards.jsonl` goes on.
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
        self._told: set[str] = set()  # functions whose first failure was printed
        self._calls = CallPool(config.reward_workers)
        self._lock = threading.Lock()

    def score(self, prompt: Prompt, completions: list[Completion]) -> Scores:
        """The rewards of a prompt's completions. Thread-safe.

        Raises:
            UserError: a function returns something else than one finite number or None per completion, or fails time
                after time; the message names it and the dataset row.
            CallError: the scorer was closed meanwhile.
        """
        texts = [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        columns = [self._call(function, prompt, completions, texts) for function in self.config.reward_funcs]
        rewards = [list(row) for row in zip(*columns, strict=True)]
        weights = self.config.reward_weights or [1.0] * len(columns)
        given = [[w * r for w, r in zip(weights, row, strict=True) if r is not None] for row in rewards]
        return Scores(texts, rewards, [sum(row) if row else math.nan for row in given])

    def _call(
        self, function: Any, prompt: Prompt, completions: list[Completion], texts: list[str]
    ) -> list[float | None]:
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
            got = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
            raise UserError(f"{where} returned {got}: it must return a list of {num} numbers, one per completion")
        for value in values:
            if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
                raise UserError(f"{where} returned {value!r}: rewards are finite numbers or None")
        return [None if value is None else float(value) for value in values]

    def _note_failure(self, name: str, message: str, prompt: Prompt, texts: list[str]) -> None:
        """Write the failed call down; a function that fails `batch_size` times in a row, and 4 times, ends the run."""
        sample = {"error": message, "prompt": prompt.content, "completions": texts, "columns": prompt.columns}
        line = json.dumps(sample, ensure_ascii=False, default=repr) + "\n"
        with self._lock:
            with self.failed_path.open("a", encoding="utf-8") as file:
                file.write(line)
            self.num_failed += 1
            self._in_a_row[name] += 1
            if name not in self._told:
                self._told.add(name)
                print(f"{message} (later ones are counted in rewards_failed, and in {self.failed_path})", flush=True)
            if self._in_a_row[name] >= max(self.config.batch_size, 4):
                raise UserError(f"{message}; so did its last {self._in_a_row[name]} calls, see failed_rewards.jsonl")

    def close(self) -> None:
        """End the workers."""
        self._is_closed = True
        self._calls.close()
