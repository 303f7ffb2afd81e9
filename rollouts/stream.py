"""Groups: sampled ahead of the trainer, scored, taken by it, and evaluated; and the policy that samples them.

`GroupStream` keeps the servers busy within the bound on staleness. `Rollouts` is what the training loop sees of it.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from config import TrainConfig, UserError, describe
from prefix_attention import pack
from rollouts.data import (
    Group,
    Prompt,
    epochs,
    fingerprint,
    image_example,
    load_processor,
    load_prompts,
    placeholder_ids,
    tokenizer_of,
    with_images,
)
from rollouts.scoring import Scorer, check_rewards, reward_means
from training.model import forward, load_model_config, published_weights
from utils import Stopped, broadcast_object, is_main, timed
from vllm_client import CONTROL_TIMEOUT_S, Completion, Server, ServerError, ServerLost, VLLMClient

DROP_REASONS = ("stale", "zero_advantage")
DISAGREES = (
    "and the trainer differ by {:.3g} nats a token after the weight sync: it does not compute this model as the "
    "trainer does, or takes no new weights for a part of it (vLLM: gpt-oss's experts); compare its --dtype (and, for "
    "images, its --mm-processor-kwargs with processor_kwargs), or raise max_logprob_mismatch"
)


class Dropped(NamedTuple):
    """A group that is not trained, and why: one of `DROP_REASONS`."""

    group: Group
    reason: str


@dataclass
class Batch:
    """What was trained in a step, what was dropped since the step before, and what is known of both. Rank 0's."""

    groups: list[Group] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------------------
# One group


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

    A group whose server is lost starts anew on another one. ServerError where none is left, one refuses, or healthy
    ones fail three times; UserError where an image cannot be read or `rollout_fn` fails.
    """
    group.prompt = with_images(group.prompt, processor, config)
    if config.max_staleness == 0 and not config.rollout_fn:  # nothing else depends on time; completions count on
        seed = (config.seed << 40) + group.id * 2 * (sampling["n"] + config.extra_generations)
        sampling = {"seed": seed % 2**63, **sampling}
    where = f"dataset row {group.prompt.index}"
    num_failed = 0
    while not group.completions:
        with client.lease() as server:
            try:
                completions = _sample(server, group.prompt, sampling, config)
            except ServerLost as error:
                if not (server.has_weights and server.answers()):
                    client.lose(server, error)
                elif (num_failed := num_failed + 1) == 3:  # the servers are not to blame
                    raise ServerError(f"{where}: {error}, though the server is healthy") from error
            except ServerError as error:
                raise ServerError(f"{where}: {error}") from None
            else:
                if any(span.version < 0 for c in completions for span in c.weight_versions):
                    client.lose(server, ServerLost("it sampled with weights of its own: was it restarted?"))
                else:
                    group.completions = completions
    group.sampled_s = time.monotonic()


def _sample(server: Server, prompt: Prompt, sampling: dict[str, Any], config: TrainConfig) -> list[Completion]:
    if config.rollout_fn is None:
        extra = config.extra_generations if sampling["n"] > 1 else 0
        return server.generate(prompt.token_ids, sampling, extra, prompt.images)
    rollout_fn: Any = config.rollout_fn
    where = f"rollout_fn on dataset row {prompt.index}"
    try:
        completions = rollout_fn(server, prompt, sampling)
    except ServerError:
        raise
    except Exception as error:
        raise UserError(f"{where} raised {type(error).__name__}: {error}") from error
    is_list = isinstance(completions, list) and all(isinstance(c, Completion) for c in completions)
    if not is_list or len(completions) != sampling["n"]:
        raise UserError(f"{where} must return a list of n={sampling['n']} Completions, not {completions!r:.200}")
    for completion in completions:
        if fault := _fault(completion, prompt, server, config):
            raise UserError(f"{where} returned {fault}")
    return completions


def _fault(completion: Completion, prompt: Prompt, server: Server, config: TrainConfig) -> str:
    """Why a completion that a `rollout_fn` returned cannot be trained; empty where it can."""
    ids, sampled = completion.token_ids, completion.sampled
    covered = [place for span in completion.weight_versions for place in range(span.start, span.end)]
    faults = {
        "an empty completion": not ids,
        "a placeholder of an image, which no policy takes": not set(server.forbidden).isdisjoint(ids),
        "ids, log-probs, loss mask or weight_versions that do not fit each other: join with `then`": not (
            len(ids) == len(completion.sampler_logprobs) == len(sampled)
            and covered == [place for place, was_sampled in enumerate(sampled) if was_sampled]
        ),
        f"{len(ids)} tokens, with the prompt over max_tokens_per_gpu: raise it": (
            len(prompt.token_ids) + len(ids) > config.max_tokens_per_gpu
        ),
    }
    return next((words for words, applies in faults.items() if applies), "")


# --------------------------------------------------------------------------------------------------------------------
# Ahead of the trainer


class GroupStream:
    """Scored groups for the trainer, sampled ahead of it within the bound on staleness. Lives on rank 0.

    A group is admitted while groups accepted + running < (max_staleness + version + 1) x batch_size: what is dropped
    makes room for another one, and at staleness 0 exactly the batch to be trained is sampled. Every group ends once:
    taken, or dropped with a reason. No more groups can have begun by version v than the batches up to
    v + max_staleness hold, so that it always suffices to keep room for them, and to wait.

    Args:
        groups: fresh ones without end, in the order of admission.
        sample, score: fill in a group's completions, and its rewards; `num_threads` groups at a time.
        num_steps: batches to be taken in all; an earlier run took `num_trained` groups of them.
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
        self.version = -1  # of the policy that the servers have
        self._num_steps = num_steps
        self._groups, self._sample, self._score = groups, sample, score
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="rollout")
        self._changed = threading.Condition()
        self._running: dict[int, Group] = {}
        self._ready: list[Group] = []  # accepted and not yet taken, in the order they were completed
        self._taken: list[Group] = []  # of the batch under way
        self._dropped: list[Dropped] = []  # since the batch before
        self._num_accepted = num_trained
        self._num_sampled_tokens = 0
        self._told_s = time.monotonic()  # when a group was taken, or the user was told that none comes
        self._failure: BaseException | None = None

    def open(self, version: int) -> None:
        """The servers now run policy `version`: admit what that allows."""
        with self._changed:
            self.version = version
            self._admit()

    def take(self) -> Group | None:
        """A group for the batch that trains the current version; None where none comes within a second.

        Raises:
            UserError, ServerError: what sampling or scoring raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._next() is not None, 1)
            if self._failure:
                raise self._failure
            if (group := self._next()) is not None:
                assert self.version - group.oldest_version <= self.config.max_staleness
                self._ready.remove(group)
                self._taken.append(group)
                self._told_s = time.monotonic()
            elif time.monotonic() > self._told_s + 60 and self._running:
                self._told_s = time.monotonic()
                oldest = self._running[min(self._running)]
                print(f"waiting for rollouts; the oldest is of dataset row {oldest.prompt.index}", flush=True)
            return group

    @property
    def missing(self) -> int:
        """Groups that the batch still lacks."""
        return self.config.batch_size - len(self._taken)

    def end_batch(self) -> Batch:
        """The groups taken and dropped since this was last called, and metrics of the queues."""
        with self._changed:
            values = {
                "queue/ready": len(self._ready),
                "queue/running": len(self._running),
                "num_sampled_tokens": self._num_sampled_tokens,
                **{f"groups/dropped_{r}": sum(r == reason for _, reason in self._dropped) for r in DROP_REASONS},
            }
            batch = Batch(self._taken, self._dropped, {name: float(value) for name, value in values.items()})
            self._num_sampled_tokens, self._taken, self._dropped = 0, [], []
            return batch

    def close(self) -> None:
        """Admit and start nothing more."""
        with self._changed:
            self._failure = self._failure or ServerError("the stream of rollouts was closed")
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _admit(self) -> None:
        limit = min(self.config.max_staleness + self.version + 1, self._num_steps) * self.config.batch_size
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
            seen = {span.version for c in group.completions for span in c.weight_versions}
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
                self._drop_zero_advantage(group)
            else:
                self._num_accepted += 1
                self._ready.append(group)
            self._admit()
            self._changed.notify_all()

    def _drop_zero_advantage(self, group: Group) -> None:
        self._dropped.append(Dropped(group, "zero_advantage"))
        num = sum(reason == "zero_advantage" for _, reason in self._dropped)
        if num >= self.config.max_dropped_batches * self.config.batch_size:
            self._failure = self._failure or UserError(
                f"nothing to learn: {num} groups of this step were dropped, as all rewards within each were "
                "equal; look at the rewards, or raise max_dropped_batches"
            )

    def _next(self) -> Group | None:
        """The group to train next, or None where one has to be waited for."""
        if self.config.max_staleness == 0:  # in the order of admission, so that a run does not depend on latencies
            first = min([*self._running, *(group.id for group in self._ready)], default=None)
            return next((group for group in self._ready if group.id == first), None)
        if self.config.stale_policy == "drop":
            self._drop_stale()
            return self._ready[0] if self._ready else None
        by_deadline = sorted(self._ready, key=self._deadline)  # stable: else in the order they were completed
        return next(filter(self._leaves_room, by_deadline), None)

    def _drop_stale(self) -> None:
        for group in [g for g in self._ready if self.version - g.oldest_version > self.config.max_staleness]:
            self._ready.remove(group)
            self._num_accepted -= 1
            self._dropped.append(Dropped(group, "stale"))
        self._admit()

    def _deadline(self, group: Group) -> int:
        """The last policy version that may train the group."""
        return group.started_version + self.config.max_staleness

    def _leaves_room(self, group: Group) -> bool:
        """Whether all groups with earlier deadlines still find a place in time, if this one is taken now."""
        begun = [g for g in [*self._running.values(), *self._ready] if g.started_version >= 0]
        for version in range(self.version, self._deadline(group)):
            num_due = sum(self._deadline(other) <= version for other in begun)
            if num_due > self.missing - 1 + (version - self.version) * self.config.batch_size:
                return False
        return True


# --------------------------------------------------------------------------------------------------------------------
# What the loop sees


class Probe(NamedTuple):
    """A short completion of a server, to compare its log-probs with the trainer's, or why there is none."""

    url: str
    prompt: Prompt
    completion: Completion | None = None
    failure: str = ""


class Rollouts:
    """Where groups come from and the policy goes to. Data and servers live on rank 0; the methods are collective.

    Making one checks data, rewards and servers, before a model is loaded (UserError, ServerError).

    Attributes:
        num_steps: of the run.
        example: the shortest prompt with images, processed; None in a run without.
        processor: the model's, on rank 0.
        stop: an event that ends `take` and `evaluate`.
        failure: the error that ended one of them, on rank 0.
    """

    def __init__(self, config: TrainConfig, device: torch.device, resumed: dict[str, Any] | None = None):
        self.config, self.device = config, device
        self.stop = threading.Event()
        self.failure: Exception | None = None
        self.processor: Any = None
        self.policy: Any = None  # the one that was published last, as `version`
        self.version = -1
        self.num_steps, self.example = broadcast_object(self._open(resumed) if is_main() else None)
        self._restart_clocks()

    def _open(self, resumed: dict[str, Any] | None) -> tuple[int, Prompt | None]:
        """Check and load everything that rank 0 needs; returns `num_steps` and `example`."""
        config = self.config
        print(describe(config))
        self.processor = load_processor(config)
        tokenizer = tokenizer_of(self.processor)
        self.client = VLLMClient(config, tokenizer, placeholder_ids(load_model_config(config)[0]))
        max_prompt_len = min(self.client.wait_until_ready(), config.max_tokens_per_gpu) - config.max_completion_len
        self.prompts = self._load("dataset_id", config.dataset_split, max_prompt_len)
        self.held_out = self._load("eval_dataset_id", config.eval_dataset_split, max_prompt_len)
        self.fingerprint = fingerprint(self.prompts)
        if resumed and resumed["prompts"] != self.fingerprint:
            raise UserError(
                "resume_from_checkpoint: that run had other prompts: give this one the same dataset, and the servers "
                "the same --max-model-len (or a max_tokens_per_gpu that holds as long ones)"
            )
        example = image_example(self.prompts, self.processor, config)
        self.client.connect(self.device)
        self.scorer = Scorer(tokenizer, config, resumes=resumed is not None)
        before = resumed or {"step": 0, "num_tokens": 0, "ended": ()}
        num_steps = config.max_steps or math.ceil(config.num_epochs * len(self.prompts) / config.batch_size)
        if before["step"] >= num_steps:
            print(f"all {num_steps} steps are done: raise max_steps or num_epochs to go on", flush=True)
        self.num_tokens, self.ended = before["num_tokens"], set(before["ended"])
        order = enumerate(epochs(len(self.prompts), config.seed))
        groups = (Group(self.prompts[index], id=number) for number, index in order if number not in self.ended)
        num_threads = len(config.vllm_urls) * config.max_concurrent_requests + config.reward_workers
        sample = partial(self._sample, sampling=sampling_params(config))
        num_trained = before["step"] * config.batch_size
        self.stream = GroupStream(groups, sample, self._score, num_threads, num_steps, config, num_trained)
        return num_steps, example

    def _load(self, name: str, split: str, max_prompt_len: int) -> list[Prompt]:
        """The prompts of a config field, whose name is told where it is not the training data's."""
        if (source := getattr(self.config, name)) is None:
            return []
        try:
            prompts = load_prompts(source, split, self.processor, max_prompt_len, self.config)
            check_rewards(prompts, self.config)
        except UserError as error:
            raise UserError(f"{name}: {error}" if name != "dataset_id" else str(error)) from error
        return prompts

    def _sample(self, group: Group, sampling: dict[str, Any]) -> None:
        sample_group(group, self.client, self.processor, sampling, self.config)

    def _score(self, group: Group) -> None:
        group.texts, group.rewards, group.reward = self.scorer.score(group.prompt, group.completions)
        group.scored_s = time.monotonic()

    # -- groups

    def take(self, is_enough: Callable[[list[Group]], bool]) -> tuple[list[Group], bool]:
        """The next groups of the batch, and whether they are its last. Collective.

        Rank 0 waits until the batch is complete or `is_enough` of the groups that came; the other ranks wait for
        rank 0, and get no groups.

        Raises:
            Stopped: the run was told to end, or failed: `failure` says how.
        """
        groups: list[Group] = []

        def look() -> str | None:
            if group := self.stream.take():
                groups.append(group)
                if self.stream.missing == 0:
                    return "complete"
                return "enough" if is_enough(groups) else None
            return None

        started_s = time.monotonic()
        word = self._lead(look)
        self.waited_s += time.monotonic() - started_s
        if word == "stop":
            raise Stopped
        return groups, word == "complete"

    def _lead(self, look: Callable[[], str | None]) -> str:
        """Every rank gets the first word that `look` says on rank 0, or `stop`. Collective.

        `look` takes at most about a second. Between two looks servers that came back get the policy, as all ranks must
        take part in sending it.
        """
        while (word := broadcast_object(self._next_word(look) if is_main() else None)) == "resync":
            self._admit(self._send(only_returned=True))
        return word

    def _next_word(self, look: Callable[[], str | None]) -> str:
        try:
            while not self.stop.is_set() and not self.failure:
                if self.client.returned:
                    return "resync"
                if word := look():
                    return word
        except (UserError, ServerError) as error:  # all ranks hear of it, and save what there is
            self.failure = error
        return "stop"

    def end_batch(self) -> Batch:
        """What was trained and dropped, with metrics of the queues, waits and rates; empty on ranks other than 0."""
        if not is_main():
            return Batch()
        batch = self.stream.end_batch()
        if all(math.isnan(reward) for group in batch.groups for reward in group.reward):
            self.failure = UserError("no reward function gave any completion of this batch a number: nothing to learn")
        num_tokens = sum(group.num_tokens for group in batch.groups)
        self.num_tokens += num_tokens
        self.ended.update([*(group.id for group in batch.groups), *(group.id for group, _ in batch.dropped)])
        elapsed_s = time.monotonic() - self.clock_s
        batch.metrics |= {
            "num_tokens": self.num_tokens,
            "rewards_failed": float(self.scorer.num_failed),
            "time/wait_s": self.waited_s,
            "idle/trainer": self.waited_s / elapsed_s,
            "idle/servers": self.client.idle_seconds() / elapsed_s,
            "tokens_per_s/sampled": batch.metrics.pop("num_sampled_tokens") / elapsed_s,
            "tokens_per_s/trained": num_tokens / elapsed_s,
        }
        self._restart_clocks()
        return batch

    def _restart_clocks(self) -> None:
        """Leave the time until now out of the rates that `end_batch` reports."""
        self.clock_s, self.waited_s = time.monotonic(), 0.0
        if is_main():
            self.client.idle_seconds()

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy held-out rewards where they are due: `eval/reward`, and `eval/accuracy` where all are 0 or 1.

        Also `eval/rewards/<function>`. Collective. Empty on ranks other than 0, and where the run is told to end.
        """
        config = self.config
        is_due = step in (0, self.num_steps) or (config.eval_steps and step % config.eval_steps == 0)
        if not (config.eval_dataset_id and is_due):
            return {}
        prompts = self.held_out if is_main() else []
        values: dict[str, float] = {}
        with timed("time/eval_s", values):
            pool = ThreadPoolExecutor(config.max_concurrent_requests * len(config.vllm_urls))
            answers = [pool.submit(self._answer, prompt) for prompt in prompts]

            def look() -> str | None:
                ended = wait(answers, 1, FIRST_EXCEPTION)
                for reply in ended.done:
                    reply.result()  # raises what it ended with
                return None if ended.not_done else "answered"

            word = self._lead(look)
            pool.shutdown(wait=False, cancel_futures=True)
        self._restart_clocks()
        if word == "stop" or not is_main():
            return {}
        groups = [reply.result() for reply in answers]
        rewards = torch.tensor([group.reward for group in groups])
        values["eval/reward"] = rewards.nanmean().item()
        values |= {f"eval/{name}": value for name, value in reward_means([g.rewards for g in groups], config).items()}
        if {0.0, 1.0} >= set(rewards[~rewards.isnan()].tolist()) > set():
            values["eval/accuracy"] = values["eval/reward"]
        return values

    def _answer(self, prompt: Prompt) -> Group:
        group = Group(prompt)
        self._sample(group, {**sampling_params(self.config), "n": 1, "temperature": 0.0})
        self._score(group)
        return group

    # -- the policy

    def publish(self, policy: nn.Module, version: int) -> None:
        """Send the policy to every server as `version`, which lets sampling go on. Collective.

        A server begins to serve, at the start and when it is back, once its log-probs on a probe agree with the
        policy's; all of its weights were zero before it was sent any.

        Raises:
            ServerError: at the first sync, a server that does not agree.
        """
        is_first = self.policy is None
        self.policy, self.version = policy, version
        with nullcontext() if self.config.inflight_updates or not is_main() else self.client.drained(self.stop):
            returned = self._send()
            if is_main():
                self.stream.open(version)
        if is_first:
            self._restart_clocks()
        refused = self._admit(self.client.servers if is_first and is_main() else returned)
        if is_first and refused:
            raise ServerError(refused[0])

    def _send(self, only_returned: bool = False) -> list[Server]:
        """Stream the policy to the servers; returns those on rank 0 that waited for it and have it now. Collective."""
        weights = published_weights(self.policy)
        if is_main():
            return self.client.update_weights(weights, self.version, only_returned)
        for _ in weights:
            pass
        return []

    def _admit(self, servers: list[Server]) -> list[str]:
        """Let rank 0's servers serve, except those that do not compute what the policy does. Collective.

        Returns:
            The exceptions' addresses and reasons, on every rank.
        """
        probes = broadcast_object([self._probe(server) for server in servers] if is_main() else None)
        self.policy.eval()  # LoRA's dropout would differ from the server, and move the random state of the step
        reasons = [probe.failure or self._difference(probe) for probe in probes]
        self.policy.train()
        for server, reason in zip(servers, reasons, strict=False):  # there are servers on rank 0 alone
            if reason:
                self.client.keep_out(server, reason)
            else:
                self.client.admit(server)
        return [f"{probe.url} {reason}" for probe, reason in zip(probes, reasons, strict=True) if reason]

    def _probe(self, server: Server) -> Probe:
        """A short completion of a server, with an image if the run has one."""
        config, prompt = self.config, self.example or self.prompts[0]
        sampling = {"n": 1, "max_tokens": min(16, config.max_completion_len), "temperature": config.temperature}
        try:
            (completion,) = server.generate(prompt.token_ids, sampling, 0, prompt.images, CONTROL_TIMEOUT_S)
        except ServerError as error:
            return Probe(server.url, prompt, failure=str(error))
        if any(span.version != self.version for span in completion.weight_versions):
            return Probe(server.url, prompt, failure="answers with other weights than it was sent")
        return Probe(server.url, prompt, completion)

    def _difference(self, probe: Probe) -> str:
        assert probe.completion is not None
        (row,) = pack([(probe.prompt.token_ids, [probe.completion.token_ids])], share_prefix=False)
        images = {name: value.to(self.device) for name, value in probe.prompt.inputs.items()}
        with torch.no_grad():
            logprobs = forward(self.policy, row.to(self.device), images, self.config)
        mismatch = (logprobs.cpu() - torch.tensor(probe.completion.sampler_logprobs)).abs().mean().item()
        return "" if mismatch <= self.config.max_logprob_mismatch else DISAGREES.format(mismatch)

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on after the last whole step; empty on ranks other than 0."""
        if not is_main():
            return {}
        return {"num_tokens": self.num_tokens, "ended": sorted(self.ended), "prompts": self.fingerprint}

    def close(self) -> None:
        """Leave the servers."""
        if is_main():
            self.stream.close()
            self.scorer.close()
            self.client.close()
