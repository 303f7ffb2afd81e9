"""The order in which groups are admitted and trained."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from config import TrainConfig, UserError
from rollouts.group import Batch, Group, RolloutFailed, can_teach
from vllm_client import ServerError

MAX_GROUPS = 4096  # at work at once: each is a thread that waits for a server or a reward


class GroupStream:
    """Scored groups for the trainer, sampled ahead. Lives on rank 0.

    `groups` are admitted in their order, while
    accepted + running < (max_staleness + version + 1) x batch_size. So a dropped group makes room
    for another, and at staleness 0 just the batch to be trained is sampled. All groups begun under
    versions up to v fit into the batches up to v + max_staleness, so none becomes too stale if
    newer ones let it go first. Every group ends once: taken, or dropped with a reason.
    `sample(group)` samples and scores one, or restores one that was saved, in a thread.
    """

    def __init__(
        self,
        groups: Iterator[Group],
        sample: Callable[[Group], None],
        num_steps: int,
        config: TrainConfig,
    ):
        self.config = config
        # The two rules that a replay sets otherwise: another run has chosen its groups.
        self.max_staleness = config.max_staleness
        self.drop_zero_advantage = config.drop_zero_advantage
        self.num_steps = num_steps
        self.version = -1  # of the policy that the servers have
        self.num_sampled_tokens = 0  # since the stream was made
        self._groups = groups
        self._sample = sample
        self._pool = ThreadPoolExecutor(MAX_GROUPS, thread_name_prefix="rollout")
        self._changed = threading.Condition()
        self._running: dict[int, Group] = {}  # by id
        self._ready: list[Group] = []  # accepted and not yet taken, in the order of completion
        self._batch = Batch()  # the one under way
        self._num_accepted = 0  # of the whole run: all that were taken, and all that are ready
        self._told_s = time.monotonic()  # when a batch ended, or the user was reminded
        self._failure: BaseException | None = None

    def advance_to(self, version: int) -> None:
        """Admit the groups that policy `version`, now on the servers, allows."""
        with self._changed:
            if self.version < 0:  # a run that goes on has trained a batch for each version before
                self._num_accepted = version * self.config.batch_size
            self.version = version
            self._admit()

    def take(self) -> Group | None:
        """Take a group for the batch; None if a second brings none.

        Raises:
            BaseException: the first that sampling or scoring raised, or that closed the stream.
        """
        with self._changed:
            group = self._changed.wait_for(self._next, timeout=1)  # which may drop groups, or raise
            self._remind()
            if not group:
                return None

            self._ready.remove(group)
            self._batch.groups.append(group)
            group.trained_version = self.version
            return group

    def _remind(self) -> None:
        """Tell the user once a minute how many groups have come, and which is waited for."""
        if self._running and time.monotonic() > self._told_s + 60:
            self._told_s = time.monotonic()
            num_taken = len(self._batch.groups)
            oldest = self._running[min(self._running)].prompt.where
            print(
                f"waiting for rollouts and rewards: {num_taken} of {self.config.batch_size} groups "
                f"have come; the oldest at work is of {oldest}",
                flush=True,
            )

    @property
    def missing(self) -> int:
        """Groups that the batch still lacks."""
        return self.config.batch_size - len(self._batch.groups)

    def end_batch(self) -> Batch:
        """The groups taken and dropped since the last call, with metrics."""
        with self._changed:
            batch = self._batch
            self._batch = Batch()
            self._told_s = time.monotonic()
            for reason, groups in batch.dropped.items():
                batch.metrics[f"groups/dropped_{reason}"] = len(groups)
            batch.metrics["queue/ready"] = len(self._ready)
            batch.metrics["queue/running"] = len(self._running)
            return batch

    def close(self, cause: BaseException | None = None) -> None:
        """Admit and start nothing more: `take` raises the first cause."""
        with self._changed:
            self._failure = (
                self._failure or cause or ServerError("the stream of rollouts was closed")
            )
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self) -> None:
        """Start as many groups as allowed. The caller holds the lock."""
        num_batches = min(self.max_staleness + self.version + 1, self.num_steps)
        limit = num_batches * self.config.batch_size
        while self._num_accepted + len(self._running) < limit and not self._failure:
            try:
                group = next(self._groups)
            except UserError as error:  # of `order_fn`
                self.close(error)
                return
            self._running[group.id] = group
            self._pool.submit(self._run, group)

    def _run(self, group: Group) -> None:
        try:
            self._sample(group)
            with self._changed:
                self._finish(group)
        except RolloutFailed:
            with self._changed:
                del self._running[group.id]
                self._batch.dropped["failed"].append(group)
                self._admit()
        except BaseException as error:  # for the trainer's thread
            self.close(error)

    def _finish(self, group: Group) -> None:
        """Accept or drop a scored group. The caller holds the lock.

        Raises:
            UserError: `max_dropped_batches` were dropped in this step.
        """
        del self._running[group.id]
        group.finished_version = self.version
        self.num_sampled_tokens += sum(group.num_sampled)
        if self.drop_zero_advantage and not can_teach(group, self.config):
            dropped = self._batch.dropped["zero_advantage"]
            dropped.append(group)
            if len(dropped) >= self.config.max_dropped_batches * self.config.batch_size:
                raise UserError(
                    f"nothing to learn: {len(dropped)} groups of this step were dropped, as all"
                    " rewards within each were equal; look at the rewards, or raise"
                    " max_dropped_batches"
                )
        else:
            self._num_accepted += 1
            self._ready.append(group)

        self._admit()
        self._changed.notify_all()

    def _next(self) -> Group | None:
        """The group to train next; None where none is ready.

        With `stale_policy` drop, groups that are too stale are dropped.

        Raises:
            BaseException: the cause that ended the stream.
        """
        if self._failure:
            raise self._failure
        if self.max_staleness == 0:
            return self._first_admitted()
        if self.config.stale_policy == "drop":
            self._drop_stale()
            return min(self._ready, key=_by_age, default=None)
        return self._first_to_fall_due()

    def _first_admitted(self) -> Group | None:
        """The next group in order of admission, so that latencies change nothing."""
        first = min(self._ready, key=lambda group: group.id, default=None)
        if first and first.id < min(self._running, default=math.inf):
            return first
        return None

    def _drop_stale(self) -> None:
        """Drop ready groups that are too stale, and admit others."""
        for group in list(self._ready):
            if self.version - group.oldest_version > self.max_staleness:
                self._ready.remove(group)
                self._num_accepted -= 1
                self._batch.dropped["stale"].append(group)
        self._admit()

    def _first_to_fall_due(self) -> Group | None:
        """The ready group begun first that makes no other too stale by going now.

        Groups begun under the same version go in the order of their admission: in that of their
        completion, quick ones would come first.
        """
        for group in sorted(self._ready, key=_by_age):
            if self._leaves_room(group):
                assert self.version - group.oldest_version <= self.max_staleness
                return group
        return None

    def _leaves_room(self, group: Group) -> bool:
        """True where no group becomes too stale if `group` goes now.

        A group falls due at its `started_version` + `max_staleness`: the batch of that version is
        the last that may take it.
        """
        # Groups that have not begun fall due later than all others.
        waiting = [*self._running.values(), *self._ready]
        due_versions = [
            other.started_version + self.max_staleness
            for other in waiting
            if other.started_version >= 0
        ]

        # `group` goes by its own due version in any case. By going now it leaves one place fewer
        # until then, so only groups that are due before it may miss a place.
        num_places = self.missing - 1
        for version in range(self.version, group.started_version + self.max_staleness):
            num_due = sum(due <= version for due in due_versions)
            if num_due > num_places:
                return False
            num_places += self.config.batch_size
        return True


def _by_age(group: Group) -> tuple[int, int]:
    """A sort key: the version under which the group was begun, then its place in admission."""
    return group.started_version, group.id
