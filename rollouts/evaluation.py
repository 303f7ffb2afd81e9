"""Held-out problems: sampling and scoring them, and their metrics."""

import math
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain
from typing import Any

from config import TrainConfig
from rollouts.group import Group, RolloutFailed
from rollouts.run import Run
from rollouts.scoring import mean, reward_means
from rollouts.stream import MAX_GROUPS


class Round:
    """An evaluation under way: a group of every held-out prompt.

    Threads sample and score them, all at once. On other ranks than 0, without a `run`, it has none.
    """

    def __init__(self, run: Run | None, config: TrainConfig):
        self._run: Any = run
        self._config = config
        self.sets: dict[str, list[Group]] = {}  # by the name of their set
        held_out = getattr(run, "held_out", {})
        for name, prompts in held_out.items():
            self.sets[name] = [Group(prompt, id=number) for number, prompt in enumerate(prompts)]
        self._groups = list(chain.from_iterable(self.sets.values()))
        self._threads = ThreadPoolExecutor(MAX_GROUPS)
        self._answers = [self._threads.submit(self._fill, group) for group in self._groups]

    def _fill(self, group: Group) -> None:
        """Sample and score a group; one whose rollouts fail stays empty."""
        config = self._config
        with suppress(RolloutFailed):
            self._run.sample_and_score(
                group, n=config.eval_generations, temperature=config.eval_temperature
            )

    def is_complete(self) -> bool:
        """True once all groups are done; waits a second at most.

        Raises:
            BaseException: the error of a group.
        """
        done, running = wait(self._answers, 1, FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        return not running

    def close(self) -> None:
        """Start no more groups."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def metrics(self) -> dict[str, float]:
        """The `eval/...` of all groups, and `eval/<set>/...` of each named set."""
        metrics = {}
        for set_name, groups in ({"": self._groups} | self.sets).items():
            prefix = f"eval/{set_name}/" if set_name else "eval/"
            for name, value in held_out_metrics(groups, self._config).items():
                metrics[prefix + name] = value
        return metrics


def held_out_metrics(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """The `reward`, `rewards/<function>`, `accuracy` and `pass@k` of held-out groups.

    `accuracy` is the share of right completions, by `verdicts`. Of n = `eval_generations`
    completions a problem, c of them right, `pass@k`, for k = 2, 4, ... and n, is the mean of
    1 - C(n-c, k) / C(n, k) (arXiv:2107.03374), unbiased. Completions without a reward count in
    none of them; where nothing says which are right, only rewards are given.
    """
    rewards = []
    for group in groups:
        rewards += [reward for reward in group.reward if not math.isnan(reward)]
    values = {"reward": mean(rewards), **reward_means(groups, config)}

    verdicts_of_groups = verdicts(groups, config)
    if verdicts_of_groups is None:
        return values
    values["accuracy"] = mean(list(chain.from_iterable(verdicts_of_groups)))
    for k in tries(config.eval_generations):
        chances = []
        for found in verdicts_of_groups:
            if len(found) >= k:
                num_wrong = found.count(False)
                chances.append(1 - math.comb(num_wrong, k) / math.comb(len(found), k))
        values[f"pass@{k}"] = mean(chances)
    return values


def verdicts(groups: list[Group], config: TrainConfig) -> list[list[bool]] | None:
    """For each group, which of its completions are right.

    That function alone decides which `accuracy_func` names, right from a reward of 1 on; else the
    first, if it gives nothing but 0 and 1, or `failed_reward`. None where it gives other numbers.
    """
    functions: Any = config.reward_funcs
    names = [function.__name__ for function in functions]
    number = names.index(config.accuracy_func) if config.accuracy_func else 0
    found = []
    for group in groups:
        given = group.rewards[:, number : number + 1].flatten().tolist()  # or nothing, at a failure
        found.append([reward for reward in given if not math.isnan(reward)])

    is_binary = {0, 1, config.failed_reward}.issuperset(chain.from_iterable(found))
    if not is_binary and not config.accuracy_func:
        return None
    return [[reward >= 1 for reward in rewards] for rewards in found]


def tries(most: int) -> list[int]:
    """The numbers 2, 4, 8, ... below `most`, and `most`, without 1."""
    powers = [2**exponent for exponent in range(most.bit_length())]
    return sorted({*powers, most} - {1})
