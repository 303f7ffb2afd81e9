"""Held-out problems: sampling and scoring them, and their metrics."""

import itertools
import math
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import torch

from config import TrainConfig
from rollouts.group import Group, RolloutFailed
from rollouts.run import Run
from rollouts.scoring import mean, reward_means
from rollouts.stream import MAX_GROUPS


class Round:
    """An evaluation under way: a group of every held-out prompt. On rank 0.

    Threads sample and score them, all at once.
    """

    def __init__(self, run: Run):
        self.sets: dict[str, list[Group]] = {}  # by their names
        self._answers: list[Future[None]] = []
        instead: Any = {
            "n": run.config.eval_generations,
            "temperature": run.config.eval_temperature,
        }
        threads = ThreadPoolExecutor(MAX_GROUPS)
        for name, prompts in run.held_out.items():
            self.sets[name] = [Group(prompt, id=number) for number, prompt in enumerate(prompts)]
            for group in self.sets[name]:
                self._answers.append(threads.submit(run.sample_and_score, group, **instead))

    def wait(self) -> bool | None:
        """Wait a second at most; True once all groups are done, else None.

        A group whose rollouts fail stays empty.

        Raises:
            BaseException: another error of a group.
        """
        done, running = wait(self._answers, 1)
        for answer in done:
            with suppress(RolloutFailed):
                answer.result()
        return not running or None


def round_metrics(sets: dict[str, list[Group]], config: TrainConfig) -> dict[str, float]:
    """The `eval/...` of all groups, and `eval/<set>/...` of each named set."""
    every_group = list(itertools.chain.from_iterable(sets.values()))
    metrics = {}
    for set_name, groups in ({"": every_group} | sets).items():
        prefix = f"eval/{set_name}/" if set_name else "eval/"
        for name, value in held_out_metrics(groups, config).items():
            metrics[prefix + name] = value
    return metrics


def held_out_metrics(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """The `reward`, `rewards/<function>`, `accuracy` and `pass@k` of held-out groups.

    A completion is right where the function that `accuracy_func` names gives it 1 or more; else the
    first function decides, if it gives nothing but 0 and 1, or `failed_reward`. If not, only
    rewards are given. Completions without a reward count in none of them.

    `accuracy` is the share of right completions. Of n = `eval_generations` completions a problem, c
    of them right, `pass@k`, for k = 2, 4, ... and n, is the mean of 1 - C(n-c, k) / C(n, k)
    (arXiv:2107.03374), unbiased.
    """
    metrics = reward_means(groups, config)
    number = 0
    if config.accuracy_func:
        number = list(metrics).index(f"rewards/{config.accuracy_func}") - 1  # behind `reward`

    verdicts = []  # of each group's completions
    for group in groups:
        found = group.rewards[:, number : number + 1]  # or nothing, where rollouts failed
        verdicts.append(found[~found.isnan()])
    every_verdict = torch.cat(verdicts).tolist()
    if not config.accuracy_func and not {0, 1, config.failed_reward}.issuperset(every_verdict):
        return metrics

    metrics["accuracy"] = mean([float(verdict >= 1) for verdict in every_verdict])
    k = 1
    while k < config.eval_generations:
        k = min(2 * k, config.eval_generations)
        chances = []
        for given in verdicts:
            if len(given) >= k:
                num_wrong = int((given < 1).sum())
                chances.append(1 - math.comb(num_wrong, k) / math.comb(len(given), k))
        metrics[f"pass@{k}"] = mean(chances)
    return metrics
