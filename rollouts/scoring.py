"""The rewards of a group, and the fate of calls that fail."""

import copy
import inspect
import itertools
import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import TrainConfig, UserError
from rollouts.group import Group, Prompt
from rollouts.processor import as_sampled
from rollouts.sampling import sampling_params
from rollouts.workers import CallError, CallPool, packed
from utils import naming

REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")  # no column may have such a name
LARGEST = 1e30  # of rewards, well within float32


def check_rewards(prompts: list[Prompt], config: TrainConfig) -> None:
    """Try each reward function's signature on the columns of every row.

    Raises:
        UserError: a function cannot be called with them, or not be sent to a worker; or a column
            has the name of another argument.
    """
    # The first row with each set of columns.
    row_of_columns = {tuple(prompt.columns): prompt.where for prompt in reversed(prompts)}

    own = dict.fromkeys([*REWARD_ARGUMENTS, *getattr(config.rollout_fn, "info_names", ())])
    function: Any
    for function in config.reward_funcs:
        for columns, row in row_of_columns.items():
            names = ", ".join([*own, *columns])
            with naming(f"reward {function.__name__} on {row}, which gives it {names}"):
                # `best_of` and the like call several functions.
                for called in getattr(function, "functions", [function]):
                    signature = inspect.signature(called)
                    # With a rollout_fn, the `info` of its rollouts may give it the missing ones.
                    bind = signature.bind_partial if config.rollout_fn else signature.bind
                    bind(**own, **dict.fromkeys(columns))  # a TypeError names one given twice
                packed(function, {})


def required(function: Any) -> set[str]:
    """The parameters without which a reward, or one that it calls, cannot be called."""
    names = set()
    for called in getattr(function, "functions", [function]):
        signature = inspect.signature(called)
        others = signature.bind_partial()
        others.apply_defaults()  # with `*args` and `**columns`, which are empty
        names |= signature.parameters.keys() - others.arguments.keys()
    return names


def text_of(
    token_ids: Any,
    tokenizer: Any,
    is_ended: bool = True,
    stop: Collection[str] = (),
    stop_token_ids: Collection[int] = (),
    **_: Any,
) -> str:
    """The text of sampled tokens, without those that end it.

    Other special tokens belong to it, as `<think>` and `<tool_call>` in some vocabularies; and the
    padding token, as servers sample no padding: it may be any word.

    Args:
        token_ids: of a completion, or of a turn, a list or a tensor [n].
        tokenizer: of the model.
        is_ended: False where the text was cut: its last token is no end.
        stop: a parameter of vLLM that it was sampled with: what it names belongs to the text.
        stop_token_ids: the same.
    """

    def is_kept(token_id: int) -> bool:
        return token_id in stop_token_ids or as_sampled([token_id], tokenizer) in stop

    token_ids = torch.as_tensor(token_ids).tolist()
    end = tokenizer.eos_token_id
    last = token_ids[-1:]
    if is_ended and last != [end]:  # maybe the end of a turn, which not every tokenizer names
        is_special = tokenizer.decode(last) != tokenizer.decode(last, skip_special_tokens=True)
        if is_special and not is_kept(last[0]):
            token_ids = token_ids[:-1]
    return as_sampled([each for each in token_ids if each != end or is_kept(each)], tokenizer)


def mean(values: list[float]) -> float:
    """The mean of the values, NaN where there are none."""
    return sum(values) / len(values) if values else math.nan


def reward_means(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """The mean `reward`, and `rewards/<function>` of each function; NaN without any."""
    functions: Any = config.reward_funcs
    names = ["reward", *[f"rewards/{function.__name__}" for function in functions]]
    rows = [torch.empty(0, len(names))]
    for group in groups:
        if len(group.rewards):  # not where rollouts failed
            reward = group.rewards.new_tensor(group.reward)
            rows.append(torch.column_stack([reward, group.rewards]))
    means = torch.cat(rows).nanmean(dim=0).tolist()
    return dict(zip(names, means, strict=True))


def weighted(rewards: Tensor, config: TrainConfig) -> list[float]:
    """The weighted sum of each completion's rewards, NaN without any."""
    if config.reward_weights:
        rewards = rewards * rewards.new_tensor(config.reward_weights)
    has_none = rewards.isnan().all(dim=1)
    return rewards.nansum(dim=1).masked_fill(has_none, math.nan).tolist()


class Failures:
    """Failed calls of one kind, kept in a file of the run. Thread-safe.

    One in thousands is no reason to end a run, but a streak of them is. The calls of each function
    are counted off in streaks of `batch_size`, at least 4, as they begin: quick failures end before
    slow successes.
    """

    def __init__(self, kind: str, config: TrainConfig):
        self.path = Path(config.output_dir) / f"failed_{kind}.jsonl"
        self._streak_size = max(config.batch_size, 4)
        self._numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)  # of calls
        self.failed: list[tuple[str, int]] = []  # of each failed call its streak
        self._lock = threading.Lock()

    def begin(self, name: str) -> tuple[str, int]:
        """The streak, by function and number, of a call that begins now."""
        return name, next(self._numbers[name]) // self._streak_size

    def note(self, streak: tuple[str, int], message: str, group: Group) -> None:
        """Write a failed call down, with the group that it was for.

        Raises:
            UserError: all calls of its streak have failed.
        """
        failed_call = {
            "error": message,
            "prompt": group.prompt.content,
            "completions": group.texts,
            "columns": group.prompt.columns,
        }
        line = json.dumps(failed_call, ensure_ascii=False, default=repr, skipkeys=True)
        with self._lock:
            # Half a surrogate pair, which UTF-8 cannot hold, becomes JSON's escape of it.
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
            self.failed.append(streak)
            num_failed = self.failed.count(streak)
        if num_failed == 1:
            print(f"{message} (all that fail are in {self.path})")
        if num_failed == self._streak_size:
            raise UserError(
                f"{message}; so did {num_failed} calls in a row, see {self.path}; mend the cause, "
                "and go on with --resume_from_checkpoint auto"
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

    def score(self, group: Group) -> None:
        """Fill in a group's texts and rewards.

        The functions get the texts, columns of the data set, and columns of the rollouts' `info`.

        Raises:
            UserError: a reward is no finite number, or a function keeps failing.
        """
        prompt = group.prompt
        sampling = sampling_params(self.config)
        texts = []
        samples = []
        for completion in group.completions:
            is_ended = completion.finish_reason == "stop"
            texts.append(text_of(completion.token_ids, self.tokenizer, is_ended, **sampling))
            # A copy, so that a reward which changes one sample leaves the others alone.
            sample = copy.deepcopy({"prompts": prompt.content, **prompt.columns})
            sample |= {"completions": texts[-1], "completion_ids": completion.token_ids.tolist()}
            for name in completion.info:
                if name in sample:
                    raise UserError(f"rollout_fn on {prompt.where}: info has the column {name}")
            samples.append(sample | completion.info)

        group.texts = texts
        rewards = [self._call(function, samples, group) for function in self.config.reward_funcs]
        group.rewards = torch.stack(rewards, dim=1)
        group.reward = weighted(group.rewards, self.config)
        group.scored_s = time.monotonic()

    def _call(self, function: Any, samples: list[dict[str, Any]], group: Group) -> Tensor:
        """A function's rewards, [completions] float64, NaN for None.

        They are `failed_reward` after a failed call. The function gets None for a column that it
        needs, and that no `info` has.
        """
        arguments = {}
        # Every column that a completion has, or the function needs.
        for name in dict.fromkeys(itertools.chain(*samples, required(function))):
            arguments[name] = [sample.get(name) for sample in samples]

        where = f"reward {function.__name__} on {group.prompt.where}"
        size = len(samples)
        streak = self.failures.begin(function.__name__)
        try:
            values = self._calls.call(function, arguments, self.config.reward_timeout)
        except CallError as error:
            if self._calls.is_closed:
                raise
            self.failures.note(streak, f"{where} {error}", group)
            values = [self.config.failed_reward] * size

        with naming(
            f"{where} must return a list of {size}, one per completion: numbers below 1e30, or None"
        ):
            # `float` would take text, too.
            numbers = [math.nan if value is None else value.__float__() for value in values]
            rewards = torch.tensor(numbers, dtype=torch.float64)
            num_usable = (rewards.abs() < LARGEST).sum() + [*values].count(None)
            if not len(values) == num_usable == size:
                raise ValueError(f"it returned {values!r:.500}")
        return rewards
