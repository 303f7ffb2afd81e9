"""The rewards of a group, and what becomes of calls that fail."""

import inspect
import json
import math
import threading
import time
from collections import Counter
from functools import cache, partial
from itertools import product
from numbers import Real
from pathlib import Path
from typing import Any

import cloudpickle

from config import TrainConfig, UserError
from rollouts.data import Group, Prompt
from rollouts.workers import CallError, CallPool
from utils import naming


def check_rewards(prompts: list[Prompt], config: TrainConfig) -> None:
    """Raise a UserError where a reward function cannot be sent to a worker, or called with the columns of some row."""
    rows = {
        tuple(prompt.columns): prompt.index for prompt in reversed(prompts)
    }  # the first with each set of columns
    function: Any
    for function, (columns, row) in product(config.reward_funcs, rows.items()):
        names = ["prompts", "completions", "completion_ids", *columns]
        with naming(
            f"reward {function.__name__} on dataset row {row}, which gives it {', '.join(names)}"
        ):
            for called in getattr(function, "functions", [function]):  # those that `best_of` calls
                signature = inspect.signature(
                    called
                )  # a rollout's `info` may give it the missing ones
                (signature.bind_partial if config.rollout_fn else signature.bind)(
                    **dict.fromkeys(names)
                )
        with naming(
            f"reward {function.__name__} cannot be sent to a worker (open clients inside it)"
        ):
            cloudpickle.dumps(function)


def reward_means(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """`rewards/<function>`: the mean of what it gave for the completions of all groups, NaN where it gave nothing."""
    means = {}
    function: Any
    for number, function in enumerate(config.reward_funcs):
        given = [
            value for group in groups for row in group.rewards if (value := row[number]) is not None
        ]
        means[f"rewards/{function.__name__}"] = sum(given) / len(given) if given else math.nan
    return means


def weighted(rewards: list[list[float | None]], config: TrainConfig) -> list[float]:
    """The weighted sum of what the functions gave each completion, NaN where none gave a number."""
    weights = config.reward_weights or [1.0] * len(config.reward_funcs)
    given = [[w * r for w, r in zip(weights, row, strict=True) if r is not None] for row in rewards]
    return [sum(row) if row else math.nan for row in given]


def held_out_metrics(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """`reward` and `rewards/<function>`: means; `accuracy`: the share of completions with a reward of at least 1.

    Of n = `eval_generations` completions a problem, c of them right, `pass@k`, for k = 2, 4, ... and n, is the mean of
    1 - C(n-c, k) / C(n, k) (arXiv:2107.03374), unbiased. Completions without a reward count in none of them.
    """
    valid = [[reward for reward in group.reward if not math.isnan(reward)] for group in groups]
    numbers = [(len(rewards), sum(reward >= 1 for reward in rewards)) for rewards in valid]
    num = sum(n for n, _ in numbers)
    values = {
        "reward": sum(map(sum, valid)) / num if num else math.nan,
        **reward_means(groups, config),
    }
    values["accuracy"] = sum(c for _, c in numbers) / num if num else math.nan
    most = config.eval_generations
    for k in sorted({*(2**power for power in range(1, most.bit_length())), most} - {1}):
        chances = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in numbers if n >= k]
        values[f"pass@{k}"] = sum(chances) / len(chances) if chances else math.nan
    return values


class Scorer:
    """Calls the reward functions, in worker processes, and keeps account of what fails in `failed_rewards.jsonl`."""

    def __init__(self, tokenizer: Any, config: TrainConfig):
        self.tokenizer, self.config = tokenizer, config
        self.num_failed = 0
        self.failed_path = Path(config.output_dir) / "failed_rewards.jsonl"
        self._in_a_row: Counter[str] = Counter()  # failures of each function since its last success
        self._calls = CallPool(config.reward_workers)
        self.close = self._calls.close
        self._lock = threading.Lock()
        self._say_once = cache(partial(print, flush=True))

    def score(self, group: Group) -> None:
        """Fill in a group's texts and rewards. UserError where a reward is not finite, or a function keeps failing."""
        ids = [completion.token_ids.tolist() for completion in group.completions]
        group.texts = [self.tokenizer.decode(of_one, skip_special_tokens=True) for of_one in ids]
        columns = [self._call(function, group, ids) for function in self.config.reward_funcs]
        group.rewards = [list(row) for row in zip(*columns, strict=True)]
        group.reward = weighted(group.rewards, self.config)
        group.scored_s = time.monotonic()

    def _call(self, function: Any, group: Group, ids: list[list[int]]) -> list[float | None]:
        num = len(group.completions)
        where = f"reward {function.__name__} on dataset row {group.prompt.index}"
        arguments = {
            "prompts": [group.prompt.content] * num,
            "completions": group.texts,
            "completion_ids": ids,
        }
        arguments |= {column: [value] * num for column, value in group.prompt.columns.items()}
        names = dict.fromkeys(name for completion in group.completions for name in completion.info)
        if taken := names.keys() & arguments.keys():
            raise UserError(
                f"rollout_fn on dataset row {group.prompt.index}: info has the column {taken.pop()}"
            )
        for p in inspect.signature(function).parameters.values() if self.config.rollout_fn else ():
            is_wanted = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if is_wanted and p.name not in arguments.keys() | names.keys():
                self._say_once(
                    f"reward {function.__name__} gets {p.name}=None: no info of some group has {p.name}"
                )
                names[p.name] = None
        arguments |= {
            name: [completion.info.get(name) for completion in group.completions] for name in names
        }
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
                f"{where} must return a list of {num} numbers, one per completion, not {values!r:.100}"
            )
        if odd := [
            v for v in values if v is not None and not (isinstance(v, Real) and math.isfinite(v))
        ]:
            raise UserError(f"{where} returned {odd[0]!r}: rewards are finite numbers or None")
        return [None if value is None else float(value) for value in values]

    def _note_failure(self, name: str, message: str, group: Group) -> None:
        """Write the failed call down; a function that fails max(batch_size, 4) times in a row ends the run."""
        prompt = group.prompt
        sample = {
            "error": message,
            "prompt": prompt.content,
            "completions": group.texts,
            "columns": prompt.columns,
        }
        with self._lock:
            with self.failed_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sample, ensure_ascii=False, default=repr) + "\n")
            self.num_failed += 1
            self._in_a_row[name] += 1
            if self.num_failed == 1:
                print(
                    f"{message} (later ones are counted in rewards_failed, and in {self.failed_path})",
                    flush=True,
                )
            if self._in_a_row[name] >= max(self.config.batch_size, 4):
                raise UserError(
                    f"{message}; so did its last {self._in_a_row[name]} calls, see failed_rewards.jsonl"
                )
