"""Groups: sampled ahead of the trainer, scored, and taken by it."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from config import TrainConfig, UserError
from rollouts.data import Prompt, with_images
from vllm_client import Completion, Server, ServerError, ServerLost, VLLMClient


@dataclass
class Group:
    """One prompt and its completions: the unit from the dataset to the gradient, filled in on its way.

    Attributes:
        completions, texts: as sampled, and decoded for rewards and people.
        rewards: [num_generations][num_reward_funcs], None where a function does not apply.
        reward: [num_generations], weighted sums; NaN where no function applies.
        advantages: [num_generations].
        id: its place in the order of admission.
        started_version, finished_version: of the policy when its request was sent (-1 before), and when its rewards
            were known.
        started_s, sampled_s, scored_s: when that was, on the monotonic clock.
    """

    prompt: Prompt
    completions: list[Completion] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[list[float | None]] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    id: int = 0
    started_version: int = -1
    finished_version: int = 0
    started_s: float = 0.0
    sampled_s: float = 0.0
    scored_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens of the group, the prompt counted once per completion."""
        return sum(len(self.prompt.token_ids) + len(c.token_ids) for c in self.completions)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled one of its tokens."""
        return min((span[0] for c in self.completions for span in c.weight_versions), default=self.finished_version)

    @property
    def have_reward(self) -> list[bool]:
        """Which completions have one; all of them before any is scored."""
        return [not math.isnan(r) for r in self.reward] or [True] * len(self.completions)

    @property
    def can_teach(self) -> bool:
        """Whether its rewards differ, so that its advantages do."""
        return len({r for r in self.reward if not math.isnan(r)}) > 1


def sampling_params(config: TrainConfig) -> dict[str, Any]:
    """vLLM's sampling parameters for a group; what the config leaves at None is not sent."""
    guides = {"regex": config.guided_regex, "json": config.guided_json}
    params = {
        "n": config.num_generations,
        "max_tokens": config.max_completion_len,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "stop": config.stop,
        "structured_outputs": {name: guide for name, guide in guides.items() if guide} or None,
        **(config.sampling_params or {}),
    }
    return {name: value for name, value in params.items() if value is not None}


def sample_group(
    group: Group, client: VLLMClient, processor: Any, sampling: dict[str, Any], config: TrainConfig
) -> None:
    """Fill in the group's `completions`, by one request or the recipe's `rollout_fn`, all on one server.

    Raises:
        ServerError: as `Server.generate`, with the dataset row, or no server is left.
        UserError: `rollout_fn` raises, or returns something else than `n` completions that fit a micro-batch; or as
            `with_images`.
    """
    failures = 0
    group.prompt = with_images(group.prompt, processor, config)
    if config.max_staleness == 0 and not config.rollout_fn:  # nothing else depends on time; completions count on
        seed = (config.seed << 40) + group.id * 2 * (sampling["n"] + config.extra_generations)
        sampling = {"seed": seed % 2**63, **sampling}
    while not group.completions:
        with client.lease() as server:
            try:
                completions = _sampled_by(server, group.prompt, sampling, config)
            except ServerLost as error:  # another one starts the group anew
                if not (server.is_ready and server.answers()):
                    client.lose(server, error)
                elif (failures := failures + 1) == 3:  # it is not the servers
                    raise ServerError(f"dataset row {group.prompt.index}: {error}, though it is healthy") from error
            except ServerError as error:
                raise ServerError(f"dataset row {group.prompt.index}: {error}") from None
            else:
                if any(span[0] < 0 for c in completions for span in c.weight_versions):
                    client.lose(server, ServerLost("it sampled with weights of its own: was it restarted?"))
                else:
                    group.completions = completions
    group.sampled_s = time.monotonic()


def _sampled_by(server: Server, prompt: Prompt, sampling: dict[str, Any], config: TrainConfig) -> list[Completion]:
    if config.rollout_fn is None:
        extra = config.extra_generations if sampling["n"] > 1 else 0
        return server.generate(prompt.token_ids, sampling, extra, prompt.images)
    assert callable(config.rollout_fn)
    where = f"rollout_fn on dataset row {prompt.index}"
    try:
        completions = config.rollout_fn(server, prompt, sampling)
    except ServerError:
        raise
    except Exception as error:
        raise UserError(f"{where} raised {type(error).__name__}: {error}") from error
    check_rollout(completions, prompt, sampling["n"], where, config, server.forbidden)
    return completions


def check_rollout(
    completions: Any, prompt: Prompt, num: int, where: str, config: TrainConfig, forbidden: Sequence[int] = ()
) -> None:
    """Refuse what a `rollout_fn` returned, unless it is `num` completions that can be trained.

    Raises:
        UserError: says `where`, and what is wrong.
    """
    if not isinstance(completions, list) or not all(isinstance(c, Completion) for c in completions):
        raise UserError(f"{where} must return a list of Completion")
    if len(completions) != num:
        raise UserError(f"{where} returned {len(completions)} completions: sampling asks for n={num}")
    for c in completions:
        if not c.token_ids:
            raise UserError(f"{where} returned an empty completion")
        if not set(forbidden).isdisjoint(c.token_ids):
            raise UserError(f"{where} returned a completion with the placeholder of an image, which no policy takes")
        if len({len(c.token_ids), len(c.sampler_logprobs), len(c.sampled)}) > 1:
            raise UserError(f"{where} returned ids, log-probs and loss mask of different lengths: join with `then`")
        covered = [place for _, start, end in c.weight_versions for place in range(start, end)]
        if covered != [place for place, sampled in enumerate(c.sampled) if sampled]:
            raise UserError(
                f"{where} returned weight_versions that are not those of the sampled tokens: join with `then`"
            )
        if (length := len(prompt.token_ids) + len(c.token_ids)) > config.max_tokens_per_gpu:
            raise UserError(f"{where} returned {length} tokens with the prompt, over max_tokens_per_gpu: raise it")


DROP_REASONS = ("stale", "zero_advantage")


class RolloutStream:
    """Scored groups for the trainer, sampled ahead of it within the bound on staleness. Lives on rank 0.

    A prompt is admitted while groups accepted + running < (max_staleness + version + 1) x batch_size: what is dropped
    is replaced by itself, and at staleness 0 exactly the batch to be trained is sampled. Every group ends once: taken,
    or dropped with a reason. No more groups can have begun by version v than the batches up to v + max_staleness hold,
    so that it always suffices to keep room for them, and to wait.

    Args:
        groups: endless, fresh ones, in the order of admission.
        sample: fills in a group's completions.
        score: fills in its rewards.
        num_threads: groups that are sampled or scored at a time.
        num_steps: batches to be taken in all.
        num_trained: groups that an earlier run took, of those.
        config: batch_size, max_staleness, stale_policy, drop_zero_advantage, max_dropped_batches.
    """

    def __init__(
        self,
        groups: Iterator[Group],
        sample: Callable[[Group], None],
        score: Callable[[Group], None],
        num_threads: int,
        num_steps: int,
        config: TrainConfig,
        num_trained: int = 0,
    ):
        self.config = config
        self.num_steps = num_steps
        self.dropped: list[tuple[Group, str]] = []  # with the reason, since the batch before
        self.version = -1
        self._groups, self._sample, self._score = groups, sample, score
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="rollout")
        self._changed = threading.Condition()
        self._running: dict[int, Group] = {}
        self._ready: list[Group] = []  # accepted and not yet taken, in the order they were completed
        self._num_accepted = num_trained
        self._num_sampled_tokens = 0
        self._waited_s, self._taken_groups = 0.0, list[Group]()
        self._failure: BaseException | None = None

    def open(self, version: int) -> None:
        """The servers now run policy `version`: admit what that allows."""
        with self._changed:
            self.version = version
            self._admit()

    def take(self, version: int, meanwhile: Callable[[], None] = lambda: None) -> Iterator[Group]:
        """The groups of the batch that trains policy `version`, each as soon as it may be trained.

        Args:
            version: of the policy that the batch trains.
            meanwhile: called about every second that is waited, and before each group.

        Raises:
            UserError, ServerError: what sampling or scoring raised.
        """
        for missing in range(self.config.batch_size, 0, -1):
            asked_s = told_s = time.monotonic()
            while (group := self._taken(version, missing)) is None:
                meanwhile()
                if time.monotonic() > told_s + 60 and self._running:
                    told_s = time.monotonic()
                    oldest = min(list(self._running.values()), key=lambda g: g.id)
                    print(f"waiting for rollouts; the oldest is of dataset row {oldest.prompt.index}", flush=True)
            assert version - group.oldest_version <= self.config.max_staleness
            meanwhile()
            self._waited_s += time.monotonic() - asked_s
            self._taken_groups.append(group)
            yield group

    def _taken(self, version: int, missing: int) -> Group | None:
        """The group to train next, waited for at most a second."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._next(version, missing) or self._failure, 1)
            if isinstance(found, BaseException):
                raise found
            if found:
                self._ready.remove(found)
            return found

    def report(self) -> tuple[dict[str, float], list[Group], list[tuple[Group, str]]]:
        """Metrics of the queues and since this was last asked; groups taken since then; groups dropped, and why."""
        with self._changed:
            values = {
                "queue/ready": len(self._ready),
                "queue/running": len(self._running),
                "time/wait_s": self._waited_s,
                "num_sampled_tokens": self._num_sampled_tokens,
                **{f"groups/dropped_{r}": sum(r == reason for _, reason in self.dropped) for r in DROP_REASONS},
            }
            taken, dropped = self._taken_groups, self.dropped
            self._waited_s, self._num_sampled_tokens, self._taken_groups, self.dropped = 0.0, 0, [], []
            return {name: float(value) for name, value in values.items()}, taken, dropped

    def close(self) -> None:
        """Admit and start nothing more."""
        with self._changed:
            self._failure = self._failure or ServerError("the stream of rollouts was closed")
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self) -> None:
        limit = min(self.config.max_staleness + self.version + 1, self.num_steps) * self.config.batch_size
        while self._num_accepted + len(self._running) < limit and not self._failure:
            group = next(self._groups)
            self._running[group.id] = group
            self._pool.submit(self._run, group)

    def _run(self, group: Group) -> None:
        try:
            with self._changed:
                if self._failure:
                    return
                group.started_version, group.started_s = self.version, time.monotonic()
            self._sample(group)
            with self._changed:
                self._num_sampled_tokens += sum(sum(c.sampled) for c in group.completions)
            seen = {span[0] for c in group.completions for span in c.weight_versions}
            published = range(group.started_version, self.version + 2)  # the last one: an update may be under way
            if odd := sorted(seen - set(published)):
                raise ServerError(
                    f"asked for policy version {published.start}, got {odd[0]}: does another trainer use the server?"
                )
            self._score(group)
        except BaseException as error:  # for the trainer's thread, which raises it
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            return
        with self._changed:
            del self._running[group.id]
            group.finished_version = self.version
            if self.config.drop_zero_advantage and not group.can_teach:
                self.dropped.append((group, "zero_advantage"))
                num = sum(reason == "zero_advantage" for _, reason in self.dropped)
                if num >= self.config.max_dropped_batches * self.config.batch_size:
                    self._failure = self._failure or UserError(
                        f"nothing to learn: {num} groups of this step were dropped, as all rewards within each were "
                        "equal; look at the rewards, or raise max_dropped_batches"
                    )
            else:
                self._num_accepted += 1
                self._ready.append(group)
            self._admit()
            self._changed.notify_all()

    def _next(self, version: int, missing: int) -> Group | None:
        """The group to train next, or None where one has to be waited for."""
        staleness = self.config.max_staleness
        if staleness == 0:  # in the order of admission, so that a run is the same whatever the servers' latencies
            first = min([*self._running, *(group.id for group in self._ready)], default=None)
            return next((group for group in self._ready if group.id == first), None)
        if self.config.stale_policy == "drop":
            for group in [g for g in self._ready if g.oldest_version + staleness < version]:
                self._ready.remove(group)
                self._num_accepted -= 1
                self.dropped.append((group, "stale"))
            self._admit()
            return self._ready[0] if self._ready else None
        # A group that began under policy v must be in batch v + staleness at the latest. Take the oldest that leaves
        # enough room in this batch and the next ones for all that are older than it, ready or still running.
        starts = [g.started_version for g in [*self._running.values(), *self._ready] if g.started_version >= 0]
        last_call = version - staleness
        for group in sorted(self._ready, key=lambda g: g.started_version):  # stable: else as they were completed
            later = range(group.started_version - last_call)
            if all(
                sum(start <= last_call + k for start in starts) <= missing - 1 + k * self.config.batch_size
                for k in later
            ):
                return group
        return None


def epochs(num_items: int, seed: int) -> Iterator[int]:
    """Endless item indices: each epoch is a fresh seeded permutation, so every item comes once per epoch."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed + epoch)
        yield from torch.randperm(num_items, generator=generator).tolist()
        epoch += 1
