"""The rewards of a group, and the fate of calls that fail."""

import copy
import inspect
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

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


def decoded(group: Group, tokenizer: Any, config: TrainConfig) -> list[str]:
    """The texts of a group's completions, as `spoken`."""
    kept = [*(config.sampling_params or {}).get("stop_token_ids", ())]
    # Strings that are one token, as `</answer>` in some vocabularies.
    added = tokenizer.get_added_vocab()
    kept += [added[string] for string in config.stop or () if string in added]
    texts = []
    for completion in group.completions:
        is_ended = completion.finish_reason == "stop"
        texts.append(spoken(completion.token_ids.tolist(), tokenizer, is_ended, kept))
    return texts


def spoken(
    token_ids: Sequence[int], tokenizer: Any, is_ended: bool = True, kept: Collection[int] = ()
) -> str:
    """The text of sampled tokens, without those that end or pad it.

    Other special tokens belong to it, as `<think>` and `<tool_call>` in some vocabularies.

    Args:
        token_ids: of a completion, or of a turn.
        tokenizer: of the model.
        is_ended: False where the text was cut: its last token is no end.
        kept: tokens that belong to the text even where they end it.
    """
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}.difference(kept)
    text_ids = [token_id for token_id in token_ids if token_id not in ends]
    last = token_ids[-1]
    if is_ended and last not in ends and last in _special_ids(tokenizer).difference(kept):
        text_ids.pop()  # the end of a turn, which not every tokenizer names
    return tokenizer.decode(text_ids)


@cache
def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of a tokenizer's special tokens."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token_id for token_id, token in added if token.special)


def mean(values: list[float]) -> float:
    """The mean of the values, NaN where there are none."""
    return sum(values) / len(values) if values else math.nan


def reward_means(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """`rewards/<function>`: the mean reward of each function, NaN without any."""
    scored = [group.rewards for group in groups if len(group.rewards)]
    # With a row of NaN, as there may be no group.
    none = torch.full((1, len(config.reward_funcs)), math.nan, dtype=torch.float64)
    means = torch.cat([*scored, none]).nanmean(dim=0).tolist()
    functions: Any = config.reward_funcs
    names = [f"rewards/{function.__name__}" for function in functions]
    return dict(zip(names, means, strict=True))


def weighted(rewards: Tensor, config: TrainConfig) -> list[float]:
    """The weighted sum of each completion's rewards, NaN without any."""
    weights = rewards.new_tensor(config.reward_weights or [1.0] * len(config.reward_funcs))
    sums = (rewards * weights).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), math.nan, sums).tolist()


SAY_S = 60.0  # between failed calls that are printed


class Failures:
    """Failed calls of one kind, kept in a file of the run. Thread-safe.

    One in thousands is no reason to end a run, but many in a row are.
    """

    def __init__(self, kind: str, config: TrainConfig):
        self.kind = kind
        self.count = 0
        self._most_in_a_row = max(config.batch_size, 4)
        self.path = Path(config.output_dir) / f"failed_{kind}.jsonl"
        self._num_calls: Counter[str] = Counter()  # of each function
        self._failed: dict[str, set[int]] = {}  # the numbers of its calls that failed
        self._said_s = -math.inf  # when one was printed, on the monotonic clock
        self._lock = threading.Lock()

    def begin(self, name: str) -> int:
        """The number of a call of the function, which begins now."""
        with self._lock:
            self._num_calls[name] += 1
            return self._num_calls[name]

    def note(self, name: str, number: int, message: str, sample: dict[str, Any]) -> None:
        """Write a failed call down, with what it was called for.

        Raises:
            UserError: max(batch_size, 4) calls that began one after the other have failed.
        """
        failed_call = {"error": message, **sample}
        line = json.dumps(failed_call, ensure_ascii=False, default=repr, skipkeys=True)
        with self._lock:
            # Half a surrogate pair, which UTF-8 cannot hold, becomes JSON's escape of it.
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
            self.count += 1
            failed = self._failed.setdefault(name, set())
            failed.add(number)
            # Not those that ended one after the other: quick failures overtake slow successes.
            first = last = number
            while first - 1 in failed:
                first -= 1
            while last + 1 in failed:
                last += 1
            now_s = time.monotonic()
            if now_s > self._said_s + SAY_S:
                print(f"{message} (counted in {self.kind}_failed, all in {self.path})", flush=True)
                self._said_s = now_s
            if last - first + 1 >= self._most_in_a_row:
                raise UserError(
                    f"{message}; so did {last - first + 1} calls in a row, see {self.path}; mend "
                    "the cause, and go on with --resume_from_checkpoint auto"
                )


class Scorer:
    """Calls the reward functions, in worker processes.

    Calls that fail are kept in `failures`.
    """

    def __init__(self, tokenizer: Any, config: TrainConfig):
        self.tokenizer = tokenizer
        self.config = config
        self.failures = Failures("rewards", config)
        self._calls = CallPool(config.reward_workers)
        self.close = self._calls.close
        self._say_once = cache(partial(print, flush=True))

    def score(self, group: Group) -> None:
        """Fill in a group's texts and rewards.

        Raises:
            UserError: a reward is no finite number, or a function keeps failing.
        """
        group.texts = decoded(group, self.tokenizer, self.config)
        ids = [completion.token_ids.tolist() for completion in group.completions]

        by_function = []
        function: Any
        for function in self.config.reward_funcs:
            arguments = self._arguments(function, group, ids)
            by_function.append(self._call(function, arguments, group))
        group.rewards = torch.from_numpy(np.array(by_function, np.float64).T)  # NaN for None
        group.reward = weighted(group.rewards, self.config)
        if any(math.isinf(reward) for reward in group.reward):
            raise UserError(f"the weighted sum of rewards on {group.prompt.where} is not finite")
        group.scored_s = time.monotonic()

    def _arguments(self, function: Any, group: Group, ids: list[list[int]]) -> dict[str, Any]:
        """A function's arguments: the group, dataset columns, and columns of `info`."""
        num = len(group.completions)
        arguments = {
            "prompts": _copies(group.prompt.content, num),
            "completions": group.texts,
            "completion_ids": ids,
        }
        for name, value in group.prompt.columns.items():
            arguments[name] = _copies(value, num)

        info_names: dict[str, None] = {}  # in the order of their first completion
        for completion in group.completions:
            info_names |= dict.fromkeys(completion.info)
        for name in info_names:
            if name in arguments:
                raise UserError(f"rollout_fn on {group.prompt.where}: info has the column {name}")
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
        where = f"reward {function.__name__} on {group.prompt.where}"
        number = self.failures.begin(function.__name__)
        try:
            values = self._calls.call(function, arguments, self.config.reward_timeout)
        except CallError as error:
            if self._calls.is_closed:
                raise
            sample = {
                "prompt": group.prompt.content,
                "completions": group.texts,
                "columns": group.prompt.columns,
            }
            self.failures.note(function.__name__, number, f"{where} {error}", sample)
            return [self.config.failed_reward] * num

        if not isinstance(values, list | tuple) or len(values) != num:
            raise UserError(
                f"{where} must return a list of {num} numbers, one per completion, not "
                f"{values!r:.100}"
            )
        rewards = []
        for value in values:
            reward = None if value is None else as_float(value)
            if reward is not None and not math.isfinite(reward):
                raise UserError(
                    f"{where} returned {reward}, of a {type(value).__name__}: rewards are finite "
                    "numbers or None"
                )
            rewards.append(reward)
        return rewards


def _copies(value: Any, num: int) -> list[Any]:
    """Copies of a value, so that a reward which changes one leaves the others alone."""
    return [copy.deepcopy(value) for _ in range(num)]


def as_float(number: Any) -> float:
    """A number as a float; infinity where no float is as large, NaN for what is no number."""
    try:
        return float(number.__float__())
    except OverflowError:
        return math.inf
    except (AttributeError, TypeError, ValueError):
        return math.nan


def required(function: Any) -> list[str]:
    """The parameters without which a function, or those of `best_of`, cannot be called."""
    names = []
    for called in getattr(function, "functions", [function]):
        for parameter in inspect.signature(called).parameters.values():
            is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is parameter.empty and not is_open:
                names.append(parameter.name)
    return names
