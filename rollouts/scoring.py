"""The rewards of a group, and the fate of calls that fail."""

import inspect
import json
import math
import threading
import time
from collections import Counter
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any

import cloudpickle

from config import TrainConfig, UserError
from rollouts.group import Group, Prompt
from rollouts.workers import CallError, CallPool
from utils import naming

REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")  # no column may have such a name


def check_rewards(prompts: list[Prompt], config: TrainConfig) -> None:
    """Try each reward function's signature on the columns of every row.

    Raises:
        UserError: a function cannot be called with them, or not be sent to a worker.
    """
    # The first row with each set of columns.
    row_of_columns = {tuple(prompt.columns): prompt.index for prompt in reversed(prompts)}

    function: Any
    for function in config.reward_funcs:
        for columns, row in row_of_columns.items():
            names = [*REWARD_ARGUMENTS, *columns]
            given = f"which gives it {', '.join(names)}"
            with naming(f"reward {function.__name__} on dataset row {row}, {given}"):
                check_signature(function, names, config)
        with naming(
            f"reward {function.__name__} cannot be sent to a worker (open clients inside it)"
        ):
            cloudpickle.dumps(function)


def check_signature(function: Any, names: list[str], config: TrainConfig) -> None:
    """Raise TypeError where a function does not take arguments of the `names`.

    `best_of` has several functions, each of which is tried.
    """
    arguments = dict.fromkeys(names)
    for called in getattr(function, "functions", [function]):
        signature = inspect.signature(called)
        if config.rollout_fn:
            signature.bind_partial(**arguments)  # a rollout's `info` may give it the missing ones
        else:
            signature.bind(**arguments)


def decoded(group: Group, tokenizer: Any) -> list[str]:
    """The texts of a group's completions, without special tokens."""
    return [
        tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        for completion in group.completions
    ]


def mean(values: list[float]) -> float:
    """The mean of the values, NaN where there are none."""
    return sum(values) / len(values) if values else math.nan


def reward_means(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """`rewards/<function>`: the mean reward of each function, NaN without any."""
    means = {}
    function: Any
    for number, function in enumerate(config.reward_funcs):
        given: list[float] = []
        for group in groups:
            for row in group.rewards:
                reward = row[number]
                if reward is not None:
                    given.append(reward)
        means[f"rewards/{function.__name__}"] = mean(given)
    return means


def weighted(rewards: list[list[float | None]], config: TrainConfig) -> list[float]:
    """The weighted sum of each completion's rewards, NaN without any."""
    weights = config.reward_weights or [1.0] * len(config.reward_funcs)
    sums = []
    for row in rewards:
        given = []
        for weight, reward in zip(weights, row, strict=True):
            if reward is not None:
                given.append(weight * reward)
        sums.append(sum(given) if given else math.nan)
    return sums


class Scorer:
    """Calls the reward functions, in worker processes.

    Calls that fail are kept in `failed_rewards.jsonl`.
    """

    def __init__(self, tokenizer: Any, config: TrainConfig):
        self.tokenizer = tokenizer
        self.config = config
        self.num_failed = 0
        self.failed_path = Path(config.output_dir) / "failed_rewards.jsonl"
        self._in_a_row: Counter[str] = Counter()  # failures of each function since its last success
        self._calls = CallPool(config.reward_workers)
        self.close = self._calls.close
        self._lock = threading.Lock()
        self._say_once = cache(partial(print, flush=True))

    def score(self, group: Group) -> None:
        """Fill in a group's texts and rewards.

        Raises:
            UserError: a reward is no finite number, or a function keeps failing.
        """
        group.texts = decoded(group, self.tokenizer)
        ids = [completion.token_ids.tolist() for completion in group.completions]

        by_function = []
        function: Any
        for function in self.config.reward_funcs:
            arguments = self._arguments(function, group, ids)
            by_function.append(self._call(function, arguments, group))
        group.rewards = [list(row) for row in zip(*by_function, strict=True)]
        group.reward = weighted(group.rewards, self.config)
        group.scored_s = time.monotonic()

    def _arguments(self, function: Any, group: Group, ids: list[list[int]]) -> dict[str, Any]:
        """A function's arguments: the group, dataset columns, and columns of `info`."""
        num = len(group.completions)
        arguments = {
            "prompts": [group.prompt.content] * num,
            "completions": group.texts,
            "completion_ids": ids,
        }
        for name, value in group.prompt.columns.items():
            arguments[name] = [value] * num

        info_names: dict[str, None] = {}  # in the order of their first completion
        for completion in group.completions:
            info_names |= dict.fromkeys(completion.info)
        for name in info_names:
            if name in arguments:
                raise UserError(
                    f"rollout_fn on dataset row {group.prompt.index}: info has the column {name}"
                )
        if self.config.rollout_fn:
            for name in required(function):
                if name not in arguments and name not in info_names:
                    self._say_once(
                        f"reward {function.__name__} gets {name}=None: no info of some group has "
                        f"{name}"
                    )
                    info_names[name] = None

        for name in info_names:
            arguments[name] = [completion.info.get(name) for completion in group.completions]
        return arguments

    def _call(self, function: Any, arguments: dict[str, Any], group: Group) -> list[float | None]:
        """A function's rewards, one per completion; all `failed_reward` after a failed call."""
        num = len(group.completions)
        where = f"reward {function.__name__} on dataset row {group.prompt.index}"
        try:
            values = self._calls.call(function, arguments, self.config.reward_timeout)
        except CallError as error:
            if self._calls.is_closed:
                raise
            self._note_failure(function.__name__, f"{where} {error}", group)
            return [self.config.failed_reward] * num
        with self._lock:
            self._in_a_row[function.__name__] = 0

        if not isinstance(values, list | tuple) or len(values) != num:
            raise UserError(
                f"{where} must return a list of {num} numbers, one per completion, not "
                f"{values!r:.100}"
            )
        rewards: list[float | None] = []
        for value in values:
            if value is None:
                rewards.append(None)
            elif isinstance(value, Real) and math.isfinite(value):
                rewards.append(float(value))
            else:
                raise UserError(f"{where} returned {value!r}: rewards are finite numbers or None")
        return rewards

    def _note_failure(self, name: str, message: str, group: Group) -> None:
        """Write a failed call down.

        Raises:
            UserError: the function has failed max(batch_size, 4) times in a row.
        """
        sample = {
            "error": message,
            "prompt": group.prompt.content,
            "completions": group.texts,
            "columns": group.prompt.columns,
        }
        line = json.dumps(sample, ensure_ascii=False, default=repr)

        with self._lock:
            with self.failed_path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self.num_failed += 1
            self._in_a_row[name] += 1
            if self.num_failed == 1:
                print(
                    f"{message} (later ones are counted in rewards_failed, and in "
                    f"{self.failed_path})",
                    flush=True,
                )
            num_failures = self._in_a_row[name]
            if num_failures >= max(self.config.batch_size, 4):
                raise UserError(
                    f"{message}; so did its last {num_failures} calls, see failed_rewards.jsonl"
                )


def required(function: Any) -> list[str]:
    """The parameters without which a function cannot be called."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_open:
            names.append(parameter.name)
    return names
