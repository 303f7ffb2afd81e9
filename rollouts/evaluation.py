"""Held-out problems: when they are due, what they are sampled with, and their metrics."""

import math
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import chain
from typing import Any

from config import TrainConfig
from rollouts.group import Group, Prompt
from rollouts.sampling import sampling_params
from rollouts.scoring import mean, reward_means
from rollouts.stream import MAX_GROUPS


def is_due(step: int, num_steps: int, config: TrainConfig) -> bool:
    """True after steps 0 and `num_steps` of a run, and every `eval_steps`."""
    every = config.eval_steps or num_steps
    return step % every == 0 or step == num_steps


def held_out_sampling(config: TrainConfig) -> dict[str, Any]:
    """Give vLLM's sampling parameters for a held-out problem."""
    held_out = {"n": config.eval_generations, "temperature": config.eval_temperature}
    return sampling_params(config) | held_out


class Round:
    """An evaluation under way: a group of every held-out prompt, sampled and scored in threads."""

    def __init__(
        self,
        held_out: dict[str, list[Prompt]],
        fill: Callable[[Group], None],
        config: TrainConfig,
    ):
        self.config = config
        self.sets = {}  # groups by the name of their set
        for name, prompts in held_out.items():
            self.sets[name] = [Group(prompt, id=number) for number, prompt in enumerate(prompts)]
        self._groups = list(chain.from_iterable(self.sets.values()))
        self._threads = ThreadPoolExecutor(MAX_GROUPS)
        self._answers = [self._threads.submit(fill, group) for group in self._groups]

    def is_complete(self) -> bool:
        """Wait for all groups, a second at most; raises what ended one of them."""
        done, running = wait(self._answers, 1, FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        return not running

    def close(self) -> None:
        """Start no more groups."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def metrics(self) -> dict[str, float]:
        """Give `eval/...` of all groups together, and `eval/<set>/...` of each set with a name."""
        by_prefix = {"eval": self._groups}
        for name, groups in self.sets.items():
            if name:
                by_prefix[f"eval/{name}"] = groups

        metrics = {}
        for prefix, groups in by_prefix.items():
            for name, value in held_out_metrics(groups, self.config).items():
                metrics[f"{prefix}/{name}"] = value
        return metrics


def held_out_metrics(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """Give `reward`, `rewards/<function>`, `accuracy` and `pass@k` of held-out groups.

    `accuracy` is the share of completions with a reward of at least 1. Of n = `eval_generations`
    completions a problem, c of them right, `pass@k`, for k = 2, 4, ... and n, is the mean of
    1 - C(n-c, k) / C(n, k) (arXiv:2107.03374), unbiased. Completions without a reward count in
    none of them.
    """
    rewards = []
    counts = []  # of each group: its completions with a reward, and the right ones
    for group in groups:
        valid = [reward for reward in group.reward if not math.isnan(reward)]
        num_right = sum(reward >= 1 for reward in valid)
        counts.append((len(valid), num_right))
        rewards += valid

    values = {"reward": mean(rewards), **reward_means(groups, config)}
    values["accuracy"] = mean([reward >= 1 for reward in rewards])
    for k in tries(config.eval_generations):
        chances = []
        for num, num_right in counts:
            if num >= k:
                all_wrong = math.comb(num - num_right, k) / math.comb(num, k)
                chances.append(1 - all_wrong)
        values[f"pass@{k}"] = mean(chances)
    return values


def tries(most: int) -> list[int]:
    """Give 2, 4, 8, ... below `most`, and `most`, where it is not 1."""
    found = []
    k = 2
    while k < most:
        found.append(k)
        k *= 2
    if most > 1:
        found.append(most)
    return found
