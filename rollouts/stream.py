"""Which groups come next, and their queue: sampled ahead, trained in the order of admission."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from config import TrainConfig, UserError
from rollouts.custom import can_teach, naming_function
from rollouts.group import Batch, Group, Prompt, RolloutFailed
from utils import naming
from vllm_client import ServerError

MAX_GROUPS = 4096  # at work at once: each is a thread that waits for a server or a reward

MAX_DROPPED_BATCHES = 10  # in one step, for each batch that is under way
GROUPS_KEPT = 8  # of each prompt, the last ones, in the history


class GroupStream:
    """Scored groups for the trainer, in the order of their admission. Lives on rank 0.

    Under policy v as many are admitted as the batches up to v + max_staleness take. For one that is
    dropped another is admitted at the end of the queue, and those behind it move up by one place:
    so none trains later than by policy v + max_staleness. Every group ends once: trained, or
    dropped with a reason.

    Args:
        choose: the next groups, by the number of the first.
        fill: samples and scores a group, in a thread of its own.
        num_steps: of the run.
        waiting: groups that the resumed run had chosen, and whose batch had not ended.
        next_number: of the first group to choose.
    """

    def __init__(
        self,
        choose: Callable[[int], Sequence[Group]],
        fill: Callable[[Group], None],
        num_steps: int,
        config: TrainConfig,
        waiting: Sequence[Group] = (),
        next_number: int = 0,
    ):
        self.config = config
        self.num_steps = num_steps
        self.version = -1  # of the policy that the servers have
        self._choose = choose
        self._fill = fill
        self._threads = ThreadPoolExecutor(MAX_GROUPS, thread_name_prefix="rollout")
        self._num_batches = 0  # of the run, those whose groups have been given threads
        self._admitting = threading.Lock()  # a user's `choose` may be slow: rollouts go on
        self._changed = threading.Condition()  # guards all that follows
        self.num_sampled_tokens = 0  # since the stream was made
        self._waiting = deque(waiting)  # chosen, and not yet admitted
        self._next_number = next_number
        self._queue: deque[Group] = deque()  # admitted, and neither taken nor dropped
        self.batch = Batch()  # the one under way
        self._told_s = time.monotonic()  # when a batch ended, or the user was reminded
        self._failure: BaseException | None = None

    def advance_to(self, version: int) -> None:
        """Admit the groups that policy `version`, now on the servers, allows."""
        self.version = version
        first = max(self._num_batches, version)  # a run that goes on has trained those before
        self._num_batches = min(version + self.config.max_staleness + 1, self.num_steps)
        try:
            for _ in range((self._num_batches - first) * self.config.batch_size):
                self._threads.submit(self._work)
        except RuntimeError as error:  # the stream is closed, or there is no room for a thread
            self.close(error)  # `take` raises it, or what has closed the stream

    def _work(self) -> None:
        """Fill the next group, in a thread of its own; if it is dropped, another one is begun."""
        try:
            with self._admitting:
                chosen = [] if self._waiting else self._choose(self._next_number)
                with self._changed:
                    self._waiting += chosen
                    self._next_number += len(chosen)
                    group = self._waiting.popleft()
                    self._queue.append(group)

            try:
                self._fill(group)
                if self.config.drop_zero_advantage and not can_teach(group, self.config):
                    group.dropped = "zero_advantage"
                    group.why = "its rewards are equal, or all its advantages 0"
            except RolloutFailed as error:
                group.dropped = "failed"
                group.why = str(error)

            with self._changed:
                if group.dropped != "failed":
                    self.num_sampled_tokens += sum(group.num_sampled)
                if group.dropped:
                    self._queue.remove(group)
                    self.batch.dropped.append(group)
                else:
                    group.finished_version = self.version  # from here on `take` may return it
                num_dropped = len(self.batch.dropped)
                self._changed.notify_all()

            if group.dropped:
                num_batches = MAX_DROPPED_BATCHES * (1 + self.config.max_staleness)
                if num_dropped >= num_batches * self.config.batch_size:
                    raise UserError(
                        f"nothing to learn: {num_dropped} groups of this step were dropped, the "
                        f"last as {group.why}: look at dropped.jsonl and the rewards, or take "
                        "other prompts and another output_dir"
                    )
                self._threads.submit(self._work)
        except BaseException as error:
            self.close(error)  # `take` raises it

    def take(self) -> Group | None:
        """Take the next group for the batch; None if it is not there, after a second at most.

        Once a minute the user is told how many have come, and which is waited for.

        Raises:
            BaseException: the first that sampling or scoring raised, or that closed the stream.
        """
        with self._changed:
            if self._failure:
                raise self._failure
            if self._queue and self._queue[0].finished_version >= 0:
                group = self._queue.popleft()
                self.batch.groups.append(group)
                group.trained_version = self.version
                return group

            if self._queue and time.monotonic() > self._told_s + 60:
                self._told_s = time.monotonic()
                print(
                    f"waiting for rollouts and rewards: {len(self.batch.groups)} of "
                    f"{self.config.batch_size} groups have come; the oldest at work is of "
                    f"{self._queue[0].prompt.where}"
                )
            self._changed.wait(1)
            return None

    def end_batch(self) -> Batch:
        """The groups taken and dropped since the last call, with metrics."""
        with self._changed:
            batch = self.batch
            self.batch = Batch()
            self._told_s = time.monotonic()
            reasons = [group.dropped for group in batch.dropped]
            num_running = sum(group.finished_version < 0 for group in self._queue)
            batch.metrics = {
                "groups/dropped_zero_advantage": reasons.count("zero_advantage"),
                "groups/dropped_failed": reasons.count("failed"),
                "queue/ready": len(self._queue) - num_running,
                "queue/running": num_running,
            }
            return batch

    def state(self) -> dict[str, Any]:
        """What a run that goes on needs: number and row of each group whose batch has not ended."""
        with self._changed:
            batch = self.batch
            groups = [*batch.groups, *batch.dropped, *self._queue, *self._waiting]
            rows = sorted((group.id, group.prompt.index) for group in groups)
            return {"open": rows, "next": self._next_number}

    def close(self, cause: BaseException | None = None) -> None:
        """Admit and start nothing more: `take` raises the first cause."""
        with self._changed:
            self._failure = (
                self._failure or cause or ServerError("the stream of rollouts was closed")
            )
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)


# -- Which prompts come next -----------------------------------------------------------------------


def next_groups(
    first: int,
    prompts: Sequence[Prompt],
    history: dict[int, list[list[float]]],
    config: TrainConfig,
) -> list[Group]:
    """The next `batch_size` groups of a run.

    Args:
        first: the number of the first one.
        prompts: of the run.
        history: for an `order_fn`: by `Prompt.index` the rewards of the last groups that ended.
        config: batch_size, order_fn, seed.

    Raises:
        UserError: `order_fn` fails, or returns anything but `batch_size` of the prompts.
    """
    num = config.batch_size
    order_fn: Any = config.order_fn
    if order_fn:
        with naming_function("order_fn"):
            chosen = order_fn(
                list(prompts),
                dict(history),  # a copy, as groups end meanwhile
                num,
                random.Random(f"{config.seed} {first}"),  # a resumed run chooses alike
            )
        with naming(f"order_fn must return {num} of the prompts that it gets"):
            strangers = {*map(id, chosen)}.difference(map(id, prompts))
            if len(chosen) != num or strangers:
                raise ValueError(f"it returned {len(chosen)}, {len(strangers)} of them others")
    else:
        epoch, place = divmod(first, len(prompts))
        rows: list[int] = []
        while len(rows) < place + num:  # each epoch has its permutation
            generator = torch.Generator().manual_seed(config.seed + epoch)
            rows += torch.randperm(len(prompts), generator=generator).tolist()
            epoch += 1
        chosen = [prompts[row] for row in rows[place : place + num]]
    return [Group(prompt, id=number) for number, prompt in enumerate(chosen, first)]


def add_to_history(history: dict[int, list[list[float]]], groups: Sequence[Group]) -> None:
    """Add the rewards of groups that ended, trained or dropped."""
    for group in groups:
        # Empty where rollouts failed, or no function gave a number.
        before = history.get(group.prompt.index, [])
        history[group.prompt.index] = [*before, group.valid_rewards][-GROUPS_KEPT:]
