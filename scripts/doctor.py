"""Before a run: is it exact, does it fit, how fast will it be, and which side will wait. About a minute for a tiny model.

    python scripts/doctor.py recipe.py [--field value ...]

Takes the arguments of `train.py`, under torchrun too, and needs the servers. It samples and trains a few batches with
the trainer's own parts at learning rate 0, writes nothing to `output_dir`, and leaves the servers to the next run.
"""

import ctypes
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import memory_mb, reset_peak
from config import TrainConfig, UserError, bending, parse_args
from rollouts.data import Group, epochs
from rollouts.stream import MAX_GROUPS, Rollouts
from train import Dealer, check_advantages, check_loss, set_advantages, train_batch
from training.logs import batch_metrics
from training.model import base_model, build_optimizer, build_policy, build_reference, share_prefixes, with_bf16
from utils import exits, is_main, over_ranks, process_group, scatter_objects
from vllm_client import ServerError

REPEATS = 3  # of all that is timed: medians are reported
NUM_SERVERS = (1, 2, 4, 8)  # for which a step is predicted
USABLE = 0.9  # of the device's memory: the rest is lost to fragments
FEW = 8  # a small batch is this part of a batch


# -- The prediction ----------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """What grows with something: a part that does not, and its growth; neither is below 0."""

    start: float
    slope: float

    def at(self, x: float) -> float:
        """The value at `x`."""
        return self.start + self.slope * x


def line(small: tuple[float, float], large: tuple[float, float]) -> Line:
    """The line through two points; through the larger one alone where noise would make it fall, or begin below 0."""
    (x, y), (last_x, last_y) = small, large
    slope = (last_y - y) / (last_x - x) if last_x > x else 0.0
    slope = min(max(slope, 0.0), last_y / last_x)
    return Line(last_y - slope * last_x, slope)


def fitting_tokens(memory: Line, available: float) -> int | None:
    """The largest row whose peak is within `USABLE` of the available bytes; None where memory does not grow with it."""
    return int((USABLE * available - memory.start) / memory.slope) if memory.slope > 0 else None


class Parts(NamedTuple):
    """What was measured of a step, in seconds."""

    sampling: Line  # until all rewards are there, over the groups of one server
    num_groups: float  # sampled for a step, those that are dropped among them
    reward_s: float  # at the end of it, when the servers have nothing to do
    rows: list[float]  # the parts of the sampling time after which each of the trainer's rows is there
    train_s: float
    sync_s: float
    slowdown: float  # of servers and trainer that work at the same time: they may share cores, or a GPU


class Step(NamedTuple):
    """A predicted step: its seconds, and the shares of it that either side waits."""

    step_s: float
    trainer_waits: float
    servers_wait: float


def predict(parts: Parts, num_servers: int, overlaps: bool) -> Step:
    """A step with so many servers; it `overlaps` where groups are sampled while those before them train."""
    sample_s, busy_s = parts.sampling.at(parts.num_groups / num_servers), parts.train_s + parts.sync_s
    if overlaps:
        step_s, slowdown = parts.slowdown * (max(sample_s, parts.train_s) + parts.sync_s), parts.slowdown
    else:
        step_s, slowdown = 0.0, 1.0
        for part in parts.rows:  # rows train as soon as they are there
            step_s = max(step_s, part * sample_s) + parts.train_s / len(parts.rows)
        step_s += parts.sync_s
    serving_s = max(sample_s - parts.reward_s, 0.0)
    return Step(step_s, *(max(1 - slowdown * seconds / step_s, 0.0) for seconds in (busy_s, serving_s)))


# -- The trainer's parts -----------------------------------------------------------------------------------------------


class Trial:
    """What `train.main` builds, with learning rate 0: steps take their time and memory, and change no weight."""

    def __init__(self, config: TrainConfig, device: torch.device, rollouts: Rollouts):
        self.device, self.rollouts = device, rollouts
        torch.manual_seed(config.seed)
        self.policy = build_policy(config, device, rollouts.example)
        with redirect_stdout(StringIO()) as said:  # why prompts cannot be shared
            self.config = rollouts.config = share_prefixes(self.policy, config, rollouts.example)
        self.why_plain = said.getvalue().strip() or "off by the config"
        self.reference = build_reference(self.policy, self.config, device, rollouts.example)
        self.optimizer, self.scheduler = build_optimizer(self.policy, 1, self.config)
        self.pool = ThreadPoolExecutor(MAX_GROUPS)
        if is_main():
            rollouts.stream.num_steps = 0  # it admits nothing: groups are sampled here
            check_advantages(rollouts.prompts, config)
            prompts = rollouts.prompts
            self.fresh = (prompts[row] for _, row in enumerate(epochs(len(prompts), config.seed)))

    def start(self, num: int, held_out: bool = False) -> tuple[list[Group], list[Future[None]]]:
        """Begin to sample and score `num` fresh groups, as a run or an evaluation does; nothing but on rank 0."""
        if not is_main():
            return [], []
        sets = self.rollouts.held_out.values()
        prompts = islice((p for of_set in sets for p in of_set) if held_out else self.fresh, num)
        groups = [Group(prompt, id=n, trained_version=self.rollouts.version) for n, prompt in enumerate(prompts)]
        return groups, [self.pool.submit(self.rollouts._fill, group, held_out) for group in groups]

    def sample(self, num: int, held_out: bool = False) -> tuple[list[Group], float]:
        """`num` fresh groups, and the seconds that they took."""
        started_s = time.perf_counter()
        groups, answers = self.start(num, held_out)
        for answer in answers:
            answer.result()
        return groups, time.perf_counter() - started_s

    def train(self, groups: list[Group], config: TrainConfig) -> tuple[dict[str, float], list[int], float]:
        """Train rank 0's groups; returns metrics, the sizes of this rank's rows, and seconds. Collective."""
        started_s, dealt = time.perf_counter(), None
        if is_main():
            set_advantages(groups, config)
            for group in groups:
                if not any(a for of_one in groups for a in of_one.advantages):  # no gradient could be compared
                    group.advantages = [1.0] * config.num_generations
            dealt = Dealer(dist.get_world_size(), config).deal(groups, is_complete=True)
        shares = scatter_objects(dealt)
        arguments = (self.policy, self.reference, self.optimizer, self.scheduler, shares, config, self.device)
        metrics, _ = train_batch(*arguments)
        sizes = [micro.packed.num_tokens for share in shares for micro in share.micro_batches]
        return metrics, sizes, time.perf_counter() - started_s

    def sync(self) -> float:
        """Seconds of a weight sync. Collective."""
        started_s = time.perf_counter()
        self.rollouts.publish(self.policy, self.rollouts.version + 1)
        return time.perf_counter() - started_s

    def overlapped(self, groups: list[Group], num: int) -> float:
        """Seconds in which `groups` train and are synced while `num` fresh ones are sampled. Collective."""
        started_s = time.perf_counter()
        _, answers = self.start(num)
        self.train(groups, self.config)
        self.sync()
        for answer in answers:
            answer.result()
        return time.perf_counter() - started_s

    def peak(self, groups: list[Group], max_tokens: int) -> tuple[int, float, float]:
        """The largest row of a batch of such rows, the peak memory in bytes, over all ranks; and seconds. Collective."""
        with suppress(AttributeError):  # only glibc has it: give back what was freed
            ctypes.CDLL(None).malloc_trim(0)
        reset_peak(self.device)
        _, sizes, seconds = self.train(groups, replace(self.config, max_tokens_per_gpu=max_tokens))
        largest = {"tokens": max(sizes), "bytes": memory_mb(self.device, "VmHWM") * 1e6}
        most = over_ranks({n: torch.tensor(v, device=self.device) for n, v in largest.items()}, dist.ReduceOp.MAX)
        return int(most["tokens"]), most["bytes"], seconds
