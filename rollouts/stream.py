"""`GroupStream` samples groups ahead of the trainer; `Rollouts` is what its loop sees of groups and servers."""

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from config import TrainConfig, UserError, bending, describe
from prefix_attention import num_packed_tokens, pack
from rollouts import data, images
from rollouts.group import FOREIGN, Batch, Completion, Group, Prompt, as_completion, check_segments
from rollouts.processor import load_processor, placeholder_ids, tokenizer_of
from rollouts.references import ReferenceServer
from rollouts.replay import restore, saved_groups
from rollouts.scoring import Scorer, check_rewards, held_out_metrics
from rollouts.servers import ServerPool
from training.model import load_model_config, token_logprobs, with_bf16
from utils import Stopped, broadcast_object, gather_objects, is_main, naming, timed
from vllm_client import CONTROL_TIMEOUT_S, Server, ServerError, ServerLost
from weights.publish import published_weights
from weights.transfer import gpu_of

MISMATCH = (
    "and the trainer differ by {:.3g} nats a token after the weight sync: vLLM computes this model otherwise, or takes "
    "no new weights for a part of it (as gpt-oss's experts); compare its --dtype and, for images, "
    "--mm-processor-kwargs, or raise max_logprob_mismatch"
)
MAX_GROUPS = 4096  # at work at once: each is a thread that waits for a server or a reward


def sampling_params(config: TrainConfig) -> dict[str, Any]:
    """vLLM's sampling parameters for a group; what the config leaves at None is not sent."""
    params: dict[str, Any] = {"n": config.num_generations, "max_tokens": config.max_completion_len}
    params |= {"temperature": config.temperature, "top_k": config.top_k, "stop": config.stop}
    return {
        name: value
        for name, value in (params | (config.sampling_params or {})).items()
        if value is not None
    }


def sample_group(
    group: Group, client: ServerPool, processor: Any, sampling: Any, config: TrainConfig
) -> None:
    """Fill in the group's `completions`, by one request or `rollout_fn` (UserError where it fails), on one server."""
    if group.prompt.sources:  # of images
        group.prompt = images.with_images(group.prompt, processor, config)
    if (
        config.max_staleness == 0 and not config.rollout_fn
    ):  # completion i of a group gets seed + i from vLLM
        sampling = {
            "seed": ((config.seed << 40) + group.id * 2 * sampling["n"]) % 2**63,
            **sampling,
        }

    def sample(server: Server) -> list[Completion]:
        group.started_version = client.version
        group.started_s = time.monotonic()
        group.server = server.number
        completions = _ask(server, group.prompt, sampling, config)
        if has_foreign_tokens(completions):
            error = ServerLost("it sampled with weights of its own: was it restarted?")
            client.lose(server, error)
            raise error
        return completions

    group.fill(on_one_server(group, client, sample))
    group.sampled_s = time.monotonic()


def has_foreign_tokens(completions: list[Completion]) -> bool:
    """Whether weights that no trainer sent sampled one of their tokens."""
    for completion in completions:
        for segment in completion.segments:
            if (segment.weight_versions == FOREIGN).any():
                return True
    return False


def on_one_server(group: Group, client: ServerPool, ask: Callable[[Any], Any]) -> Any:
    """Ask a server; if it is lost, ask another. ServerError where none is left, or healthy ones fail three times."""
    where, num_failed = f"dataset row {group.prompt.index}", 0
    while True:
        with client.lease() as server:
            try:
                return ask(server)
            except ServerLost as error:
                if not (server.has_weights and server.answers()):
                    client.lose(server, error)
                elif (num_failed := num_failed + 1) == 3:  # the servers are not to blame
                    raise ServerError(f"{where}: {error}, though the server is healthy") from error
            except ServerError as error:
                raise ServerError(f"{where}: {error}") from None


def _ask(
    server: Server, prompt: Prompt, sampling: dict[str, Any], config: TrainConfig
) -> list[Completion]:
    if config.rollout_fn is None:
        return [
            replace(c, prompt_ids=None)
            for c in server.generate(prompt.token_ids, sampling, prompt.images)
        ]
    rollout_fn: Any = config.rollout_fn
    try:
        completions = [
            as_completion(rollout, prompt) for rollout in rollout_fn(server, prompt, sampling)
        ]
        if len(completions) != sampling["n"]:
            raise ValueError(f"it returned {len(completions)} completions, not {sampling['n']}")
        check_segments(Group(prompt, completions), server.forbidden, config)
    except ServerError:
        raise
    except Exception as error:  # whatever the recipe raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        raise UserError(f"rollout_fn on dataset row {prompt.index}: {cause}") from error
    return completions


class GroupStream:
    """Scored groups for the trainer, sampled ahead of it within the bound on staleness. Lives on rank 0.

    `groups` are admitted in their order, while accepted + running < (max_staleness + version + 1) x batch_size: what is
    dropped makes room for another, and at staleness 0 just the batch to be trained is sampled. All begun under versions
    up to v fit into the batches up to v + max_staleness, so none becomes too stale if newer ones let it go first. Every
    group ends once: taken, or dropped with a reason. `fill(group)` samples and scores one, or restores a saved one.
    """

    def __init__(self, groups: Iterator[Group], fill: Any, num_steps: int, config: TrainConfig):
        self.config = config
        self.version = -1  # of the policy that the servers have
        self.num_sampled_tokens = 0  # since the stream was made
        self._groups, self._fill, self.num_steps = groups, fill, num_steps
        self._pool = ThreadPoolExecutor(MAX_GROUPS, thread_name_prefix="rollout")
        self._changed = threading.Condition()
        self._running: dict[int, Group] = {}
        self._ready: list[
            Group
        ] = []  # accepted and not yet taken, in the order they were completed
        self._batch = Batch()  # the one under way
        self._num_accepted = 0  # of the whole run: those that were taken, and those that are ready
        self._told_s = (
            time.monotonic()
        )  # when a group was last taken, or the user told that none came
        self._failure: BaseException | None = None

    def advance_to(self, version: int) -> None:
        """The servers now run policy `version`: admit what that allows."""
        with self._changed:
            if (
                self.version < 0
            ):  # the first one: a run that goes on has trained a batch for each version before
                self._num_accepted = version * self.config.batch_size
            self.version = version
            self._admit()

    def take(self) -> Group | None:
        """A group for the batch under way, None where none comes within a second. Raises what sampling raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._next(), 1)
            if self._failure:
                raise self._failure
            if group := self._next():
                self._ready.remove(group)
                self._batch.groups.append(group)
                group.trained_version = self.version
                self._told_s = time.monotonic()
            elif self._running and time.monotonic() > self._told_s + 60:
                self._told_s = time.monotonic()
                oldest = self._running[min(self._running)].prompt.index
                print(f"waiting for rollouts; the oldest is of dataset row {oldest}", flush=True)
            return group

    @property
    def missing(self) -> int:
        """Groups that the batch still lacks."""
        return self.config.batch_size - len(self._batch.groups)

    def end_batch(self) -> Batch:
        """The groups taken and dropped since this was last called, with metrics of the queues."""
        with self._changed:
            batch, self._batch = self._batch, Batch()
            batch.metrics = {
                f"groups/dropped_{reason}": float(len(groups))
                for reason, groups in batch.dropped.items()
            }
            batch.metrics |= {
                "queue/ready": float(len(self._ready)),
                "queue/running": float(len(self._running)),
            }
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
        limit = (
            min(self.config.max_staleness + self.version + 1, self.num_steps)
            * self.config.batch_size
        )
        while self._num_accepted + len(self._running) < limit and not self._failure:
            group = next(self._groups)
            self._running[group.id] = group
            self._pool.submit(self._run, group)

    def _run(self, group: Group) -> None:
        try:
            self._fill(group)
            with self._changed:
                self._finish(group)
        except BaseException as error:  # for the trainer's thread
            self.close(error)

    def _finish(self, group: Group) -> None:
        """Accept or drop a scored group, and admit what that makes room for. The caller holds the lock."""
        del self._running[group.id]
        group.finished_version = self.version
        self.num_sampled_tokens += sum(group.num_sampled)
        if self.config.drop_zero_advantage and not group.can_teach:
            self._batch.dropped["zero_advantage"].append(group)
            num = len(self._batch.dropped["zero_advantage"])
            if num >= self.config.max_dropped_batches * self.config.batch_size:
                cause = "all rewards within each were equal; look at the rewards, or raise max_dropped_batches"
                raise UserError(
                    f"nothing to learn: {num} groups of this step were dropped, as {cause}"
                )
        else:
            self._num_accepted += 1
            self._ready.append(group)
        self._admit()
        self._changed.notify_all()

    def _next(self) -> Group | None:
        """The group to train next, None where none is ready; with `stale_policy` drop, it drops what is too stale."""
        if self.config.max_staleness == 0:
            return self._first_admitted()
        if self.config.stale_policy == "drop":
            self._drop_stale()
            return self._ready[0] if self._ready else None
        return self._first_to_fall_due()

    def _first_admitted(self) -> Group | None:
        """In the order of admission, so that a run does not depend on latencies."""
        if not self._ready:
            return None
        first = min(self._ready, key=lambda group: group.id)
        is_waited_for = any(number < first.id for number in self._running)
        return None if is_waited_for else first

    def _drop_stale(self) -> None:
        """Drop what is ready and too stale, and admit others in its place."""
        for group in list(self._ready):
            if self.version - group.oldest_version > self.config.max_staleness:
                self._ready.remove(group)
                self._num_accepted -= 1
                self._batch.dropped["stale"].append(group)
        self._admit()

    def _first_to_fall_due(self) -> Group | None:
        """What began first, as far as the others still find a place in time; equal ones as they were completed."""
        for group in sorted(self._ready, key=lambda group: group.started_version):
            if self._leaves_room(group):
                assert self.version - group.oldest_version <= self.config.max_staleness
                return group
        return None

    def _leaves_room(self, group: Group) -> bool:
        """Whether all groups that began earlier still find a place in time, if this one is taken now."""
        deadlines = []  # the last versions to train the groups that have begun
        for begun in [*self._running.values(), *self._ready]:
            if begun.started_version >= 0:
                deadlines.append(begun.started_version + self.config.max_staleness)

        num_places = self.missing - 1
        for version in range(self.version, group.started_version + self.config.max_staleness):
            num_due = sum(deadline <= version for deadline in deadlines)
            if num_due > num_places:
                return False
            num_places += self.config.batch_size
        return True


@dataclass
class Probe:
    """A server's answer to a fixed prompt, for comparison with the policy's own log-probs."""

    url: str
    completions: list[Completion]  # empty where it did not answer
    failure: str = ""  # why it cannot be used, "" where its answer is still to be compared


class Rollouts:
    """Where groups come from and the policy goes to. Data and servers live on rank 0; the methods are collective."""

    def __init__(
        self, config: TrainConfig, device: torch.device, resumed: dict[str, Any] | None = None
    ):
        self.config, self.device = config, device
        self.stop = threading.Event()  # ends `take` and `evaluate`
        self.failure: Exception | None = None  # what ended one of them, on rank 0
        self.processor: Any = None  # the model's, on rank 0
        self.policy: Any = None  # the one that was published last, as `version`
        self.version = -1
        self.num_tokens = 0  # that were trained, prompts included
        self.ended: set[int] = set()  # ids of groups that were trained or dropped
        self.gpus = gather_objects(gpu_of(device))  # of all ranks: a server may share one of them
        self.num_steps, self.example, self.probe_prompt = broadcast_object(
            self._open(resumed) if is_main() else None
        )
        self._restart_clocks()

    def _open(self, resumed: dict[str, Any] | None) -> tuple[int, Prompt | None, Prompt]:
        """Check and load everything that rank 0 needs; gives `num_steps`, an `image_example`, the prompt of probes."""
        config = self.config
        print(describe(config, usual=with_bf16(replace(config, bf16=None))))
        self.processor = load_processor(config)
        tokenizer = tokenizer_of(self.processor)
        forbidden = placeholder_ids(load_model_config(config)[0])
        self.pool = ServerPool(config, tokenizer, forbidden)
        self.references = self._reference_client(forbidden)
        self._load_prompts()
        self.fingerprint = hash(tuple(tuple(prompt.token_ids) for prompt in self.prompts))
        if resumed and resumed["prompts"] != self.fingerprint:
            cure = "give it the same dataset, the servers' --max-model-len, and max_tokens_per_gpu"
            raise UserError(f"resume_from_checkpoint: that run had other prompts: {cure}")

        example = images.image_example(self.prompts, self.processor, config)
        self.pool.connect(self.device, self.gpus)
        if self.references:
            self.references.version = 0  # of the weights that they have, and keep
            self.references.connect(self.device)
        self.scorer = Scorer(tokenizer, config)

        step = 0
        if resumed:
            step = resumed["step"]
            self.num_tokens = resumed["num_tokens"]
            self.ended = set(resumed["ended"])
        self.stream = self._replayed() if config.replay else self._sampled()
        num_steps = self.stream.num_steps
        if config.replay and config.max_steps:
            num_steps = config.max_steps
        if step >= num_steps:
            print(
                f"all {num_steps} steps are done: raise max_steps or num_epochs to go on",
                flush=True,
            )
        return num_steps, example, example or self.prompts[0]

    def _reference_client(self, forbidden: list[int]) -> ServerPool | None:
        """Servers of what `reference_id` names, or of the initial policy."""
        config = self.config
        if not config.reference_urls:
            return None
        if forbidden:
            raise UserError(
                "reference_urls: with images the trainer needs its own reference, see reference_id"
            )
        model_id = config.reference_id or config.model_id
        theirs = replace(config, vllm_urls=config.reference_urls, model_id=model_id)
        return ServerPool(theirs, kind=partial(ReferenceServer, temperature=config.temperature))

    def _load_prompts(self) -> None:
        """The prompts of all data sets, without those that are too long for the trainer or a server."""
        config = self.config
        prompts = self._load(config.dataset_id, config.dataset_split)
        held_out = {}
        for name, source in config.eval_sets.items():
            with naming(f"eval_dataset_id {name}".strip()):
                held_out[name] = self._load(source, config.eval_dataset_split)

        longest = min(self.pool.wait_until_ready(), config.max_tokens_per_gpu)
        if self.references:  # to give log-probs, vLLM must also sample a token
            longest = min(longest, self.references.wait_until_ready() - 1)
        fitting = partial(
            data.leave_out_long, max_len=longest - config.max_completion_len, config=config
        )
        self.prompts = fitting(prompts, name="dataset_id")
        self.held_out = {}
        for name, of_set in held_out.items():
            self.held_out[name] = fitting(of_set, name=f"eval_dataset_id {name}".strip())

    def _sampled(self) -> GroupStream:
        """Groups of this run's prompts, epoch by epoch."""
        config = self.config
        num_steps = config.max_steps or math.ceil(
            config.num_epochs * len(self.prompts) / config.batch_size
        )
        return GroupStream(self._new_groups(), self._fill, num_steps, config)

    def _new_groups(self) -> Iterator[Group]:
        for number, index in enumerate(data.epochs(len(self.prompts), self.config.seed)):
            if number not in self.ended:
                yield Group(self.prompts[index], id=number)

    def _replayed(self) -> GroupStream:
        """Groups that another run saved: as they were trained, whatever this run's rules would have dropped."""
        config = self.config
        num_saved, groups = saved_groups(config)
        prompts = {prompt.index: prompt for prompt in self.prompts}
        fill = partial(restore, prompts=prompts, processor=self.processor, config=config)
        rules: Any = SimpleNamespace(
            batch_size=config.batch_size, max_staleness=0, drop_zero_advantage=False
        )
        left = (group for group in groups if group.id not in self.ended)
        return GroupStream(left, fill, num_saved, rules)

    def _load(self, source: Any, split: str) -> list[Prompt]:
        prompts = data.load_prompts(source, split, self.processor, self.config)
        check_rewards(prompts, self.config)
        return prompts

    def _fill(self, group: Group, is_held_out: bool = False) -> None:
        sampling, config = sampling_params(self.config), self.config
        if is_held_out:
            sampling |= {"n": config.eval_generations, "temperature": config.eval_temperature}
        sample_group(group, self.pool, self.processor, sampling, config)
        self.scorer.score(group)
        if self.references and not is_held_out:
            group.ref_logprobs = on_one_server(
                group, self.references, lambda server: server.logprobs(group)
            )

    def take(self, num_tokens: float) -> tuple[list[Group], bool]:
        """The batch's next groups, about `num_tokens`, and whether they complete it. Raises Stopped. Collective."""
        groups: list[Group] = []

        def look() -> str | None:
            nonlocal num_tokens
            if (group := self.stream.take()) is None:
                return (
                    "stop" if self.version >= self.stream.num_steps else None
                )  # a replay may have fewer steps
            groups.append(group)
            num_tokens -= num_packed_tokens([group.sequences], self.config.share_prefix)
            return "complete" if self.stream.missing == 0 else "enough" if num_tokens <= 0 else None

        started_s = time.monotonic()
        word = self._lead(look)
        self.waited_s += time.monotonic() - started_s
        if word == "stop":
            raise Stopped
        return groups, word == "complete"

    def _lead(self, look: Callable[[], str | None]) -> str:
        """Repeat rank 0's `look` (a second each) until it returns a word; every rank gets it, or `stop`. Collective."""
        # Between two looks all ranks send the policy to servers that came back.
        while (word := broadcast_object(self._next_word(look) if is_main() else None)) == "resync":
            self._prove(self._send(only_returned=True))
        return word

    def _next_word(self, look: Callable[[], str | None]) -> str:
        try:
            while not self.stop.is_set() and not self.failure:
                if self.pool.returned:
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
            self.failure = UserError(
                "no reward function gave any completion of this batch a number: nothing to learn"
            )
        num_tokens = sum(group.num_tokens for group in batch.groups)
        self.num_tokens += num_tokens
        self.ended |= {
            group.id for groups in (batch.groups, *batch.dropped.values()) for group in groups
        }
        elapsed_s = time.monotonic() - self.clock_s
        batch.metrics |= {
            "num_tokens": self.num_tokens,
            "rewards_failed": float(self.scorer.num_failed),
            "time/wait_s": self.waited_s,
            "idle/trainer": self.waited_s / elapsed_s,
            "idle/servers": self.pool.idle_seconds() / elapsed_s,
            "tokens_per_s/sampled": (self.stream.num_sampled_tokens - self.sampled_before)
            / elapsed_s,
            "tokens_per_s/trained": num_tokens / elapsed_s,
        }
        self._restart_clocks()
        return batch

    def _restart_clocks(self) -> None:
        """Leave what was until now out of the rates that `end_batch` reports."""
        self.clock_s, self.waited_s = time.monotonic(), 0.0
        if is_main():
            self.sampled_before = self.stream.num_sampled_tokens
            self.pool.idle_seconds()

    def evaluate(self, step: int) -> tuple[dict[str, float], dict[str, list[Group]]]:
        """On rank 0, where due: `eval/...` of all held-out sets, `eval/<set>/...`; and groups by set. Collective."""
        config = self.config
        is_due = step in (0, self.num_steps) or (
            config.eval_steps and step % config.eval_steps == 0
        )
        if not config.eval_sets or not is_due or config.replay:
            return {}, {}
        sets: dict[str, list[Group]] = {}
        if is_main():
            for name, prompts in self.held_out.items():
                sets[name] = [Group(prompt, id=number) for number, prompt in enumerate(prompts)]
        every = [group for of_set in sets.values() for group in of_set]
        values: dict[str, float] = {}
        with timed("time/eval_s", values):
            word = self._answer_all(every)
        self._restart_clocks()
        if word == "stop" or not is_main():
            return {}, {}

        named = {"eval": every}
        for name, of_set in sets.items():
            if name:
                named[f"eval/{name}"] = of_set
        for name, of_set in named.items():
            for metric, value in held_out_metrics(of_set, config).items():
                values[f"{name}/{metric}"] = value
        return values, sets

    def _answer_all(self, groups: list[Group]) -> str:
        """Sample and score held-out groups; `stop` where it was broken off. Collective."""
        pool = ThreadPoolExecutor(MAX_GROUPS)
        answers = [pool.submit(self._fill, group, is_held_out=True) for group in groups]

        def look() -> str | None:
            done, running = wait(answers, 1, FIRST_EXCEPTION)
            for answer in done:
                answer.result()  # raises what it ended with
            return None if running else "answered"

        word = self._lead(look)
        pool.shutdown(wait=False, cancel_futures=True)
        return word

    def check(self, gaps: dict[int, float]) -> None:
        """Leave out servers whose log-probs differ from the trainer's by too much: `gaps`, nats a token, by number."""
        are_exact = not (bending(self.config) or self.config.rollout_fn or self.config.lora_dropout)
        for server in self.pool.servers if is_main() and are_exact else ():
            gap = gaps.get(server.number, math.nan)
            if gap <= self.config.max_logprob_mismatch:
                server.proved_version = self.version
            elif gap > self.config.max_logprob_mismatch:
                self.pool.lose(server, ServerLost(MISMATCH.format(gap)))

    def publish(self, policy: torch.nn.Module, version: int) -> None:
        """Send the policy to every server as `version`, which lets sampling go on. Collective.

        A server, whose weights were zero, serves once its log-probs of a probe agree; at the first sync all must, or it
        is a ServerError. A server that no sampled tokens have proved for `probe_steps` versions is probed again.
        """
        is_first = self.policy is None
        self.policy, self.version = policy, version
        if self.config.replay:  # there are no servers
            return self.stream.advance_to(version) if is_main() else None
        with (
            nullcontext()
            if self.config.inflight_updates or not is_main()
            else self.pool.drained(self.stop)
        ):
            returned = self._send()
            if is_first:  # a server that does not agree ends the run before anything is sampled
                self._prove(self.pool.servers if is_main() else [], is_first=True)
                self._restart_clocks()
            if is_main():
                self.stream.advance_to(version)
        if not is_first:
            serving = (
                [server for server in self.pool.servers if server.has_weights] if is_main() else []
            )
            first = sorted(serving, key=lambda s: s.proved_version)[
                : 1 + len(serving) // self.config.probe_steps
            ]
            self._prove(
                returned
                + [s for s in first if version - s.proved_version >= self.config.probe_steps]
            )

    def _send(self, only_returned: bool = False) -> list[Server]:
        """Stream the policy to the servers; returns, on rank 0, those that came back and now have it. Collective."""
        weights = published_weights(self.policy)
        if is_main():
            return self.pool.update_weights(weights, self.version, only_returned)
        deque(weights, 0)  # every rank gathers all
        return []

    def _prove(self, servers: list[Server], is_first: bool = False) -> None:
        """Compare each server's log-probs of a probe with the policy's, and act on it. Collective.

        `servers` stand on rank 0 alone. At the first sync all must agree, or it is a ServerError.
        """
        waiting = {server for server in servers if not server.has_weights}
        probes = broadcast_object(self._probe_all(servers) if is_main() else None)

        self.policy.eval()  # LoRA's dropout would differ from the server, and move the random state of the step
        for probe in probes:  # every rank takes part in every forward
            if not probe.failure:
                probe.failure = self._difference(probe.completions)
        self.policy.train()

        if is_first:
            faults = [f"{probe.url} {probe.failure}" for probe in probes if probe.failure]
            if faults:
                raise ServerError("; ".join(faults))
        if is_main():
            for server, probe in zip(servers, probes, strict=True):
                self._act_on(server, probe, server in waiting)

    def _act_on(self, server: Server, probe: Probe, is_waiting: bool) -> None:
        """Let a server that agrees serve, and leave one out that does not; silence is no reason to stop serving."""
        if not probe.failure:
            server.proved_version = self.version
            if is_waiting:
                self.pool.admit(server)
        elif is_waiting:
            self.pool.keep_out(server, probe.failure)
        elif probe.completions:
            self.pool.lose(server, ServerLost(probe.failure))

    def _probe_all(self, servers: list[Server]) -> list[Probe]:
        with ThreadPoolExecutor(64) as pool:
            return list(pool.map(self._probe, servers))

    def _probe(self, server: Server) -> Probe:
        """Ask for two short completions under the weights that the server was sent."""
        prompt = self.probe_prompt
        sampling = {
            "n": 2,
            "max_tokens": min(16, self.config.max_completion_len),
            "temperature": self.config.temperature,
        }
        try:
            completions = server.generate(
                prompt.token_ids, sampling, prompt.images, CONTROL_TIMEOUT_S
            )
        except ServerError as error:
            return Probe(server.url, [], str(error))
        for completion in completions:
            if not completion.weight_versions.eq(self.version).all():
                return Probe(server.url, completions, "answers with other weights than it was sent")
        return Probe(server.url, completions)

    def _difference(self, completions: list[Completion]) -> str:
        """In words, how far log-probs of the policy are from the server's; empty where they are close enough."""
        prompt = self.probe_prompt
        (row,) = pack(
            [(prompt.token_ids, [c.token_ids for c in completions])],
            share_prefix=self.config.share_prefix,
        )
        inputs = {
            n: t.to(self.device)
            for n, t in images.joined_images([prompt] * len(row.prompts)).items()
        }
        with torch.no_grad():
            logprobs = token_logprobs(self.policy, row.to(self.device), inputs, self.config)
        sampler_logprobs = torch.cat([completion.sampler_logprobs for completion in completions])
        mismatch = (logprobs.cpu() - sampler_logprobs).abs().mean().item()
        return "" if mismatch <= self.config.max_logprob_mismatch else MISMATCH.format(mismatch)

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on after the last whole step; empty on ranks other than 0."""
        if not is_main():
            return {}
        return {
            "num_tokens": self.num_tokens,
            "ended": sorted(self.ended),
            "prompts": self.fingerprint,
        }

    def close(self) -> None:
        """Leave the servers."""
        for part in (self.stream, self.scorer, self.pool, self.references) if is_main() else ():
            if part:
                part.close()
