"""The training loop's source of groups, and way to the servers."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from config import TrainConfig, UserError, describe
from rollouts.data import fingerprint
from rollouts.evaluation import Round, round_metrics
from rollouts.group import Batch, Group, Prompt
from rollouts.images import image_example
from rollouts.proofs import check_gaps, prove
from rollouts.run import open_run
from rollouts.stream import GroupStream, add_to_history, next_groups
from training.batching import Dealer, MicroBatch
from training.metrics import Gaps
from utils import (
    Stopped,
    broadcast_object,
    call_on_main,
    gather_objects,
    is_main,
    timed,
)
from vllm_client import Server, ServerError
from weights.group import gpu_of
from weights.publish import adapter_weights, published_weights

PROBE_STEPS = 20  # after which all servers' log-probs are compared on a probe again

# From rank 0, which alone sees servers, to all ranks: one came back, and needs the policy.
RESYNC = "resync"


class Rollouts:
    """Groups for the training loop, and its policy for the servers.

    Data and servers live on rank 0. Every rank calls the methods, most of which are collective.
    """

    def __init__(
        self, config: TrainConfig, device: torch.device, before: dict[str, Any] | None = None
    ):
        self.config = config
        self.device = device
        self.stop = threading.Event()  # ends `next_batch` and `evaluate`
        self.failure: Exception | None = None  # for which the run is to end, on rank 0
        self.policy: Any = None  # that was published last
        self.version = -1  # of that policy
        self.run: Any = None  # on rank 0
        self.pool: Any = None  # on rank 0

        before = before or {"num_tokens": 0, "step": 0, "open": [], "next": 0, "history": {}}
        self.num_tokens = before["num_tokens"]  # that were trained, prompts included
        gpus = gather_objects(gpu_of(device))  # of all ranks: a server may share one of them
        opened: Any = call_on_main(partial(self._open, before, gpus))
        # An adapter is sent alone, where servers take it; they may sleep while the trainer trains.
        self.num_steps, self.probe_prompt, self.sends_adapter, self.servers_sleep = opened
        self.example = self.probe_prompt if self.probe_prompt.images else None

    def _open(
        self, before: dict[str, Any], gpus: list[str | None]
    ) -> tuple[int, Prompt, bool, bool]:
        """Put the run together, and connect its servers. On rank 0.

        Args:
            before: the state of the run that this one resumes.
            gpus: of all ranks.

        Returns:
            The number of steps, a prompt (with images, where any has some), whether servers take
            an adapter alone, and whether they sleep: all ranks need these.
        """
        config = self.config
        print(describe(config))
        self.run = run = open_run(config, before)
        self.pool = run.pool

        digest = fingerprint(run.prompts)
        if before.setdefault("prompts", digest) != digest:
            raise UserError(
                "resume_from_checkpoint: that run had other prompts or columns: give it the same"
                " rows (a dataset's function must return them each time), the servers'"
                " --max-model-len, max_tokens_per_gpu and max_completion_len (by which prompts are"
                " left out), or another output_dir"
            )
        example = image_example(run.prompts, run.processor, config)
        self.pool.connect(self.device, gpus)

        num_steps = (
            config.max_steps
            or run.num_steps
            or math.ceil(config.num_epochs * len(run.prompts) / config.batch_size)
        )
        if before["step"] >= num_steps:
            print(f"all {num_steps} steps are done: raise max_steps or num_epochs to go on")
        self.history = before["history"]
        self.choose = partial(next_groups, prompts=run.prompts, history=self.history, config=config)
        self.choose(0)  # for an `order_fn`'s errors alone
        prompts = {prompt.index: prompt for prompt in run.prompts}
        waiting = [Group(prompts[index], id=number) for number, index in before["open"]]
        self.stream = GroupStream(
            run.choose or self.choose, run.fill, run.num_steps or num_steps, config, waiting,
            before["next"],
        )  # fmt: skip
        run.exits.callback(self.stream.close)
        sleeps = any(server.about.can_sleep for server in run.pool.servers)
        return num_steps, example or run.prompts[0], run.pool.sends_adapter, sleeps

    # -- Groups, from here to the trainer --

    def next_batch(
        self, set_advantages: Callable[[list[Group], TrainConfig], None]
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the next batch, as its groups come.

        Collective: every rank iterates to the end. Rank 0 waits for groups, has `set_advantages`
        fill in their advantages, packs them, and sends each rank its own. Where servers sleep it
        waits for the whole batch, as no more can be sampled until that is trained.

        Raises:
            Stopped: the run is to end.
        """
        dealer = Dealer(dist.get_world_size(), self.config)
        groups: list[Group] = []
        of_ranks: list[list[MicroBatch]] = []

        def deal_groups() -> bool | None:  # `is_complete`, or None where nothing was dealt
            group = self.stream.take()
            if not group:
                if self.version >= self.stream.num_steps:  # a part has too few groups for the run
                    self.stop.set()
                return None
            groups.append(group)
            is_complete = len(self.stream.batch.groups) == self.config.batch_size
            if not is_complete and (self.servers_sleep or dealer.needs_more(group)):
                return None
            if self.servers_sleep:  # before any rank trains
                self.pool.fall_asleep()
            set_advantages(groups, self.config)
            of_ranks.extend(dealer.deal(groups, is_complete))
            groups.clear()
            return is_complete

        is_complete: bool | None = False
        while not is_complete:
            started_s = time.monotonic()
            is_complete = self._repeat(deal_groups)
            self.waited_s += time.monotonic() - started_s
            if is_complete is None:  # the run is to end
                raise Stopped
            own: list[list[MicroBatch]] = [[]]  # of this rank
            dist.scatter_object_list(own, of_ranks, src=0)
            of_ranks.clear()
            yield from own[0]

    def _repeat(self, attempt: Callable[[], bool | None]) -> bool | None:
        """Repeat an attempt on rank 0 until it has a result. Collective.

        It waits a second at most, and returns None where it is to be repeated. Between two of them
        all ranks send the policy to servers that came back.

        Returns:
            The result, on every rank; None where the run is to end, by a signal, a failure, or as
            there are no more groups.
        """

        def result_or_resync() -> bool | str | None:
            with self.noting_failure():
                while not self.stop.is_set() and not self.failure:
                    if self.pool.waiting:
                        return RESYNC
                    result = attempt()
                    if result is not None:
                        return result
            return None

        while True:
            result = call_on_main(result_or_resync)
            if result != RESYNC:
                return result
            prove(self, self._send(only_waiting=True))

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Let an error of rank 0 end the run once all ranks can save."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error

    def end_batch(self, gaps: Gaps) -> Batch:
        """The batch of groups trained and dropped, with metrics, on rank 0.

        Args:
            gaps: of trainer and servers; servers are left out by them, as `check_gaps` says.
        """
        if not is_main():
            return Batch()
        check_gaps(self, gaps)
        batch = self.stream.end_batch()
        if not any(group.valid_rewards for group in batch.groups):
            self.failure = self.failure or UserError(
                "no reward function gave any completion of this batch a number: nothing to learn"
            )

        num_tokens = sum(group.num_tokens for group in batch.groups)
        self.num_tokens += num_tokens
        ended = sorted([*batch.groups, *batch.dropped], key=lambda group: group.id)
        if self.config.order_fn:  # else it would grow with the data
            add_to_history(self.history, ended)

        elapsed_s = time.monotonic() - self.clock_s
        num_sampled = self.stream.num_sampled_tokens - self.sampled_before
        batch.metrics |= {
            "num_tokens": self.num_tokens,
            "rewards_failed": len(self.run.scorer.failures.failed),
            "rollouts_failed": len(self.run.failures.failed),
            "time/wait_s": self.waited_s,
            "idle/trainer": self.waited_s / elapsed_s,
            "idle/servers": (self.pool.idle_seconds() - self.idle_before_s) / elapsed_s,
            "tokens_per_s/sampled": num_sampled / elapsed_s,
            "tokens_per_s/trained": num_tokens / elapsed_s,
        }
        self._restart_clocks()
        return batch

    def _restart_clocks(self) -> None:
        """Leave all until now out of the rates that `end_batch` reports."""
        self.clock_s = time.monotonic()
        self.waited_s = 0.0
        if is_main():
            self.sampled_before = self.stream.num_sampled_tokens
            self.idle_before_s = self.pool.idle_seconds()

    def evaluate(self, step: int, batch: Batch) -> Batch:
        """Evaluate the policy on the held-out sets, where that is due. Collective.

        Returns:
            The batch, on rank 0 with the groups by set, `eval/...` of all sets, and
            `eval/<set>/...` of each; without them where the run is to end.
        """
        config = self.config
        # Also at step 0, and at the last one.
        is_due = step == self.num_steps or step % (config.eval_steps or self.num_steps) == 0
        if not is_due or not config.eval_dataset_id or not config.vllm_urls:
            return batch

        metrics: dict[str, float] = {}
        under_way: Any = Round(self.run) if is_main() else None
        with timed("time/eval_s", metrics):
            is_complete = self._repeat(lambda: under_way.wait())

        self._restart_clocks()
        if is_complete and is_main():
            batch.held_out = under_way.sets
            batch.metrics |= metrics | round_metrics(under_way.sets, config)
        return batch

    # -- The policy, from here to the servers --

    def publish(self, policy: torch.nn.Module, version: int) -> None:
        """Send the policy to every server as `version`. Collective.

        A new or returned server, whose weights were zeroed (but for the base of an adapter that is
        sent alone), serves once its log-probs of a probe agree. At the first sync one that does not
        is a ServerError. Every 20th version all servers are probed.
        """
        is_first = self.policy is None
        connected = self.pool.waiting if is_main() else []  # at the first sync all
        self.policy = policy
        self.version = version
        if self.servers_sleep:  # they wake up, and need the memory that all ranks cache
            torch.cuda.empty_cache()
            dist.barrier()
        if not self.config.inflight_updates:
            call_on_main(lambda: self.pool.drain(self.stop))
        servers = self._send()
        if is_main() and version % PROBE_STEPS == 0:
            servers += self.pool.serving
        prove(self, servers)
        if is_first:
            self._restart_clocks()
            faults = [f"{server.url}: {server.why_out}" for server in connected if server.why_out]
            faults = broadcast_object(faults)
            if faults:  # before anything is sampled
                raise ServerError("; ".join(faults))
        if is_main():
            self.stream.advance_to(version)

    def _send(self, only_waiting: bool = False) -> list[Server]:
        """Stream the policy to the servers. Collective.

        Returns:
            On rank 0, the servers that came back and now have the policy.
        """
        if not self.config.vllm_urls:
            return []
        in_checkpoint_form = adapter_weights if self.sends_adapter else published_weights
        weights = in_checkpoint_form(self.policy)
        if is_main():
            return self.pool.update_weights(weights, self.version, only_waiting)
        for _ in weights:  # every rank gathers all
            pass
        return []

    def set_config(self, config: TrainConfig) -> None:
        """Take the config as `share_prefixes` gives it, maybe without `share_prefix`."""
        self.config = config
        if is_main():
            self.run.config = config

    def state(self) -> dict[str, Any]:
        """What a later run needs from here to go on, on rank 0."""
        if not is_main():
            return {}
        history = dict(self.history)  # it is written while groups end
        of_run = self.run.before | {"num_tokens": self.num_tokens, "history": history}
        return of_run | self.stream.state()

    def close(self) -> None:
        """Leave the servers; raise, on rank 0, the failure that ended the run."""
        if is_main():
            self.run.exits.close()
            if self.failure:
                raise self.failure
