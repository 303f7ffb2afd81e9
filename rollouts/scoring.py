"""The rewards of a group, and what becomes of calls that fail."""

import inspect
import json
import math
import threading
import time
from collections import Counter
from itertools import chain, product
from numbers import Real
from pathlib import Path
from typing import Any

from config import TrainConfig, UserError
from recipes.workers import CallError, CallPool
from rollouts.data import Prompt
from rollouts.stream import Group


def check_rewards(prompts: list[Prompt], config: TrainConfig) -> None:
    """Refuse reward functions that cannot be called with the columns of the data.

    Raises:
        UserError: one wants a column that is not there, or does not take one that is; names the row.
    """
    rows = {tuple(prompt.columns): prompt.index for prompt in reversed(prompts)}  # the first with each set of columns
    functions = chain.from_iterable(getattr(f, "functions", [f]) for f in config.reward_funcs)
    for function, (columns, row) in product(functions, rows.items()):
        assert callable(function)
        names = ["prompts", "completions", "completion_ids", *columns]
        try:
            inspect.signature(function).bind(**dict.fromkeys(names))
        except TypeError as error:
            where = f" on dataset row {row}" if len(rows) > 1 else ""
            raise UserError(f"reward {function.__name__}{where}: {error}; it gets {', '.join(names)}") from None


class Scorer:
    """Calls the reward functions, in workers of their own, and keeps account of what fails.

    Args:
        tokenizer: decodes completions.
        config: reward_funcs, reward_weights, reward_workers, reward_timeout, failed_reward, batch_size, output_dir.
    """

    def __init__(self, tokenizer: Any, config: TrainConfig):
        self.tokenizer = tokenizer
        self.config = config
        self.num_failed = 0
        self._is_closed = False
        self._in_a_row: Counter[str] = Counter()
        self._told: set[str] = set()
        self._calls = CallPool(config.reward_workers)
        self._lock = threading.Lock()
        self.failed_path = Path(config.output_dir) / "failed_rewards.jsonl"

    def score(self, group: Group) -> None:
        """Fill in the group's `texts`, `rewards` and `reward`. Thread-safe.

        Raises:
            UserError: a function returns something else than one finite number or None per completion, or fails time
                after time; the message names it and the dataset row.
            CallError: it was closed meanwhile.
        """
        group.texts = [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in group.completions]
        columns = [self._call(function, group) for function in self.config.reward_funcs]
        group.rewards = [list(row) for row in zip(*columns, strict=True)]
        weights = self.config.reward_weights or [1.0] * len(columns)
        parts = [
            [w * r for w, r in zip(weights, row, strict=True) if r is not None] or [math.nan] for row in group.rewards
        ]
        group.reward = [sum(row) for row in parts]
        group.scored_s = time.monotonic()

    def _call(self, function: Any, group: Group) -> list[float | None]:
        """One reward per completion from `f(prompts, completions, completion_ids, **columns)`.

        Raises:
            UserError: as `score`.
            CallError: the workers were ended meanwhile.
        """
        num = len(group.completions)
        name, where = function.__name__, f"reward {function.__name__} on dataset row {group.prompt.index}"
        arguments = {
            "prompts": [group.prompt.content] * num,
            "completions": group.texts,
            "completion_ids": [list(c.token_ids) for c in group.completions],  # the function's own, to change at will
            **{column: [value] * num for column, value in group.prompt.columns.items()},
        }
        try:
            values = self._calls.call(function, arguments, self.config.reward_timeout)
        except CallError as error:
            if self._is_closed:
                raise
            self._count_failure(name, f"{where} {error}", group)
            return [self.config.failed_reward] * num
        with self._lock:
            self._in_a_row[name] = 0
        if not isinstance(values, list | tuple) or len(values) != num:
            got = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
            raise UserError(f"{where} returned {got}: it must return a list of {num} numbers, one per completion")
        for value in values:
            if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
                raise UserError(f"{where} returned {value!r}: rewards are finite numbers or None")
        return [None if value is None else float(value) for value in values]

    def _count_failure(self, name: str, message: str, group: Group) -> None:
        """Write the failed call down; a function that only ever fails ends the run.

        Raises:
            UserError: so did its last calls, `batch_size` of them and at least 4.
        """
        sample = {"error": message, "prompt": group.prompt.content, "completions": group.texts}
        line = json.dumps({**sample, "columns": group.prompt.columns}, ensure_ascii=False, default=repr)
        with self._lock:
            with self.failed_path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self.num_failed += 1
            self._in_a_row[name] += 1
            if name not in self._told:
                self._told.add(name)
                print(
                    f"{message} (further failures are counted in rewards_failed, and in {self.failed_path})",
                    flush=True,
                )
            if self._in_a_row[name] >= max(self.config.batch_size, 4):
                raise UserError(f"{message}; so did its last {self._in_a_row[name]} calls, see failed_rewards.jsonl")

    def close(self) -> None:
        """End the workers."""
        self._is_closed = True
        self._calls.close()


def reward_means(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """`rewards/<function>`: its mean over the completions that it gave a number."""
    means = {}
    for number, function in enumerate(config.reward_funcs):
        assert callable(function)
        given = [value for group in groups for row in group.rewards if (value := row[number]) is not None]
        means[f"rewards/{function.__name__}"] = sum(given) / len(given) if given else math.nan
    return means
