"""Check a recipe before a run: exactness, memory, speed, and which side waits. About a minute for a tiny model.

    python scripts/doctor.py recipe.py [--field value ...]

Arguments are those of `train.py`, and the servers must run; under torchrun it looks at all ranks. It samples and trains
a few batches with the trainer's own parts, at learning rate 0, and writes nothing to `output_dir`.

    python scripts/doctor.py recipe.py --plan 24GB [--field value ...]

says what fits on a card of 24 GB, with its server and without, and how to start it. It needs neither GPU nor server.
"""

import ctypes
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, count, islice
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.common import memory_mb, reset_peak
from config import TrainConfig, UserError, bending, parse_args
from prefix_attention import evaluating
from rollouts.custom import can_teach
from rollouts.evaluation import Round
from rollouts.group import Group, Prompt
from rollouts.rollouts import Rollouts
from rollouts.stream import MAX_GROUPS
from train import set_advantages, train_batch
from training.batching import Dealer
from training.metrics import batch_metrics
from training.model import build_policy, build_reference, share_prefixes, with_bf16
from training.optimizer import build_optimizer
from utils import broadcast_object, exits, is_main, process_group
from vllm_client import ServerError

MUCH, LITTLE = 0.25, 0.05  # shares of a step: idle time worth advice; a gain worth taking
USABLE = 0.9  # of the device's memory: the rest is lost to fragments


class Parts(NamedTuple):
    """What was measured of a step, in seconds."""

    # `line` until all rewards are there, over the groups of one server
    sampling: tuple[float, float]
    num_groups: float  # that a step samples, with those that it drops
    reward_s: float  # after the last completion
    rows: list[float]  # the part of that time after which each of the trainer's rows is there
    train_s: float
    sync_s: float
    slowdown: float  # of servers and trainer that work side by side: they may share cores, or a GPU


class Step(NamedTuple):
    """A predicted step: its seconds, and the shares of them in which the trainer and the servers wait."""

    step_s: float
    trainer_waits: float
    servers_wait: float


def line(small: Sequence[float], large: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, both at least 0, of the line through `small` and `large`; the latter is hit exactly."""
    (x, y), (last_x, last_y) = small, large
    slope = (last_y - y) / (last_x - x) if last_x > x else 0.0
    slope = min(max(slope, 0.0), last_y / last_x)
    return last_y - slope * last_x, slope


def fitting_tokens(memory: tuple[float, float], available: float) -> int:
    """The largest row whose peak is `USABLE` of the available bytes; 0 where the peak does not tell."""
    start, slope = memory
    return max(int((USABLE * available - start) / slope), 0) if slope > 0 else 0


def predict(parts: Parts, num_servers: int, staleness: int) -> Step:
    """A step with so many servers: at staleness 0 a batch is sampled and then trained, above 0 side by side."""
    per_batch_s = parts.sampling[1] * parts.num_groups / num_servers
    sample_s = parts.sampling[0] + per_batch_s
    slowdown = parts.slowdown if staleness else 1.0
    alone_s = 0.0
    for part in parts.rows:  # each trains as soon as it is there
        alone_s = max(alone_s, part * sample_s) + parts.train_s / len(parts.rows)
    # A batch begins once the one `staleness` before it is sampled: so many overlap, with the one that is trained.
    step_s = slowdown * (max(per_batch_s, alone_s / (staleness + 1), parts.train_s) + parts.sync_s)
    busy = parts.train_s + parts.sync_s, sample_s - parts.reward_s
    return Step(step_s, *(min(max(1 - slowdown * busy_s / step_s, 0.0), 1.0) for busy_s in busy))


def other_staleness(parts: Parts, num_servers: int, staleness: int) -> tuple[int, float]:
    """1, or where that or more is set 0, and the share of a step that it would save."""
    other = 0 if staleness else 1
    now_s, other_s = (predict(parts, num_servers, n).step_s for n in (staleness, other))
    return other, 1 - other_s / now_s


def seconds(call: Callable[[], Any], num: int = 3) -> float:
    """The median of `num` calls."""
    return median(repeat(call, number=1, repeat=num))


def lengths_with_prompt(group: Group) -> list[int]:
    """Tokens of each completion's last segment, with those of the prompt."""
    prompt = len(group.prompt.token_ids)
    return [prompt + len(completion.token_ids) for completion in group.completions]


def tell(name: str, text: str) -> None:
    """Print a line of the table, on rank 0."""
    if is_main():
        print(f"{name:<34}{text}", flush=True)


class Doctor:
    """What `train.main` builds, with learning rate 0: a step takes its time and memory, and changes no weight."""

    def __init__(self, config: TrainConfig, device: torch.device, rollouts: Rollouts):
        self.device, self.rollouts, self.advice = device, rollouts, list[str]()
        if rollouts.servers_sleep:
            cure = "start them without --enable-sleep-mode"
            raise UserError(f"doctor.py measures with servers awake: {cure}")
        torch.manual_seed(config.seed)
        self.policy = build_policy(config, device, rollouts.example)
        self.config = share_prefixes(self.policy, config, rollouts.example)
        rollouts.set_config(self.config)
        self.reference = build_reference(self.policy, self.config, device, rollouts.example)
        idle = replace(config, learning_rate=0.0)
        self.optimizer, self.scheduler = build_optimizer(self.policy, 1, idle)
        self.pool, self.prompts = ThreadPoolExecutor(MAX_GROUPS), iter(list[Prompt]())
        if is_main():
            rollouts.stream.num_steps = 0  # it admits nothing: groups are sampled here
            batches = (rollouts.choose(first) for first in count(0, config.batch_size))
            self.prompts = (group.prompt for batch in batches for group in batch)

    def evaluate(self, held_out: list[Prompt]) -> None:
        """Rank 0 samples and scores them as an evaluation does."""
        under_way = Round(replace(self.rollouts.run, held_out={"": held_out}))
        while not under_way.wait():
            pass

    def sample(self, num: int, meanwhile: Any = lambda: None) -> list[Group]:
        """Rank 0 samples and scores `num` fresh groups, while all do something else."""
        groups: list[Group] = []
        for prompt in islice(self.prompts, num):
            groups.append(Group(prompt, id=len(groups), trained_version=self.rollouts.version))
        answers = [self.pool.submit(self.rollouts.run.fill, group) for group in groups]
        meanwhile()
        for answer in answers:
            answer.result()  # raises what it ended with
        return groups

    def train(self, groups: list[Group], config: TrainConfig) -> tuple[dict[str, float], list[int]]:
        """Train rank 0's groups; returns metrics, and the tokens of each row of this rank. Collective."""
        dealt: list[Any] = []
        if is_main():
            set_advantages(groups, config)
            if not any(any(group.advantages) for group in groups):  # the gradient would be 0
                groups[0].advantages = [1.0] * config.num_generations
            dealt = Dealer(dist.get_world_size(), config).deal(groups, is_complete=True)
        rows = broadcast_object(dealt)[dist.get_rank()]
        built = self.policy, self.reference, self.optimizer, self.scheduler
        metrics, _ = train_batch(*built, rows, config, self.device)
        return metrics, [row.packed.num_tokens for row in rows]

    def sync(self, *_: Any) -> None:
        """Send the weights to the servers once more. Collective."""
        self.rollouts.publish(self.policy, self.rollouts.version + 1)

    def advise(self, is_off: Any, text: str) -> None:
        """Keep the text for the end, where something is off."""
        self.advice += [text] if is_off else []

    def look_at_batch(self, groups: list[Group]) -> None:
        """Rewards and lengths. On rank 0."""
        config, metrics = self.config, batch_metrics(groups, 0, self.config)
        equal, cut = metrics["frac_reward_zero_std"], metrics["completions/clipped_ratio"]
        length = f"{metrics['completions/mean_length']:.0f} tokens a completion, {cut:.0%} cut off"
        reward = f"reward {metrics['reward']:.3g}, all equal in {equal:.0%} of groups"
        tell("one batch", f"{reward}; {length}")
        much = f"{'nothing' if equal == 1 else 'little'} to learn; look at the rewards"
        self.advise(equal > 0.7, f"rewards are all equal in {equal:.0%} of groups: {much}")
        setting = f"max_completion_len={config.max_completion_len}"
        self.advise(cut > 0.2, f"{setting} cuts {cut:.0%} of completions: raise it")

    def look_at_servers(self, groups: list[Group]) -> None:
        """Whether each server gives its tokens the log-probs that the trainer gives them. Collective."""
        config = replace(self.config, num_iterations=1, num_minibatches=1)
        limit = config.max_logprob_mismatch
        servers = []
        if is_main():
            servers = [(server.url, server.number) for server in self.rollouts.pool.servers]
        for url, number in broadcast_object(servers):
            own = [group for group in groups if group.server == number]
            if not broadcast_object(len(own)):
                tell(f"server {url}", "got none of the batch's groups")
                continue
            metrics, _ = self.train(own, config)
            mean = metrics["sampling/sampling_logp_difference/mean"]
            most = metrics["sampling/sampling_logp_difference/max"]
            tell(f"server {url}", f"mismatch {mean:.2g} mean, {most:.2g} max nats")
            # Of a server that samples from the policy itself.
            is_off = mean > limit / 3 and not bending(config)
            cure = f"at {limit:g} it is left out: compare its --dtype"
            self.advise(is_off, f"{url} is {mean:.2g} nats off, and {cure}")

    def look_at_sharing(self, groups: list[Group]) -> None:
        """Shared prompts against plain rows: gradients, weight by weight, and time. Collective."""
        if not self.config.share_prefix:
            return tell("shared prompts", "off, by the config or for the reason above")
        found: list[list[Tensor]] = []  # this rank's parts of either's gradients

        def keep(*_: Any) -> None:
            grads = [weight.grad for weight in self.policy.parameters() if weight.grad is not None]
            own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            found.append([grad.to("cpu", torch.float64, copy=True) for grad in own])

        shared = replace(self.config, num_iterations=1, num_minibatches=1, grad_norm=0.0)
        both = (shared, replace(shared, share_prefix=False))
        calls = [partial(self.train, groups, config) for config in both]
        hook, pairs = self.optimizer.register_step_pre_hook(keep), []
        with evaluating(self.policy):  # dropout would be another one every time
            for _ in range(3):  # in turn, as machines are noisy
                pairs.append([seconds(call, 1) for call in calls])
                hook.remove()  # gradients of the first pair are enough
        if len(found) < 2:
            cure = "look at loss_fn and the rewards"
            raise UserError(f"the gradient of a batch is not finite: {cure}")
        squares = [((a - b).square().sum(), b.square().sum()) for a, b in zip(*found, strict=True)]
        sums = torch.tensor(squares, device=self.device)
        dist.all_reduce(sums)
        errors, norms = sums.sqrt().T
        at_least = 0.01 * norms.max()  # some gradients are nothing but rounding
        error = (errors / norms.clamp(min=at_least)).max().item()
        gain = median(plain_s / shared_s for shared_s, plain_s in pairs)
        fast = f"{gain:.2f} times as fast"
        tell("shared prompts", f"gradients equal to {error:.1g}, {fast} as plain rows")
        self.advise(gain < 0.95, f"share_prefix gains nothing ({fast}): set it to false")
        config = self.config
        rounds = config.bf16 or config.fsdp_bf16 or config.dtype == "bfloat16"
        is_inexact = error > (0.1 if rounds else 1e-3)
        self.advise(is_inexact, "share_prefix is inexact here: set it to false, and report it")

    def peak(self, groups: list[Group], max_tokens: int) -> list[float]:
        """Of a batch in such rows: tokens of the largest, bytes at the peak, seconds; over all ranks. Collective."""
        config, sizes = replace(self.config, max_tokens_per_gpu=max_tokens), [0]
        with suppress(AttributeError):  # only glibc has it: give back what was freed
            ctypes.CDLL(None).malloc_trim(0)
        reset_peak(self.device)
        step_s = seconds(lambda: sizes.extend(self.train(groups, config)[1]))
        peak = [max(sizes), 1e6 * memory_mb(self.device, "VmHWM"), step_s]
        most = torch.tensor(peak, device=self.device).double()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()

    def look_at_memory(self, groups: list[Group]) -> tuple[int, float]:
        """The peak, and the size of rows that fits; returns the rows that a rank trains, and seconds. Collective."""
        config, sizes, device = self.config, self.train(groups, self.config)[1], self.device
        longest = max((max(lengths_with_prompt(group)) for group in groups), default=0)
        least = broadcast_object(max(longest, config.max_completion_len + 1))
        own = 1e6 * memory_mb(device, "VmRSS")
        free = psutil.virtual_memory().available / dist.get_world_size() + own
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        half = self.peak(groups, max(max(sizes) // 2, least))
        whole = self.peak(groups, max(config.max_tokens_per_gpu, least))
        fits = fitting_tokens(line(half[:2], whole[:2]), free)
        limit = f"up to {fits:,} fit into" if fits else "free:"
        peak = f"peak {whole[1] / 1e9:.2f} GB with rows of {whole[0]:,.0f} tokens"
        tell("memory", f"{peak}; {limit} {free / 1e9:.1f} GB")
        setting, gain = f"max_tokens_per_gpu={config.max_tokens_per_gpu}", half[2] / whole[2] - 1
        has_room = fits > 2 * config.max_tokens_per_gpu and len(sizes) > config.num_minibatches
        longer = f"rows of half of it take {gain:.0%} longer: raise it"
        self.advise(has_room and gain > LITTLE, f"{setting}: {fits:,} fit, and {longer}")
        self.advise(0 < fits < config.max_tokens_per_gpu, f"{setting}: only {fits:,} fit: lower it")
        return len(sizes), whole[2]

    def measure(
        self, groups: list[Group], num_rows: int, train_s: float, num_servers: int
    ) -> Parts:
        """The parts of a step; of use on rank 0 alone. Collective."""
        config, size, samples = self.config, self.config.batch_size, [groups]
        few = min(max(size // 8, num_servers), size)
        few_s = seconds(lambda: self.sample(few))
        sample_s = seconds(lambda: samples.append(self.sample(size)))
        sync_s = seconds(self.sync)
        train = lambda: self.sync(self.train(groups, config))
        both_s = seconds(lambda: self.sample(size, train))
        sampling = line((few / num_servers, few_s), (size / num_servers, sample_s))
        begun_s = min((g.started_s for g in samples[-1]), default=0)
        ends_s = accumulate((g.scored_s for g in samples[-1]), max)
        ends = [end_s - begun_s for end_s in ends_s] or [1.0]
        waits = config.updates_per_batch > 1 or config.advantages_need_batch  # for the whole batch
        rows = []
        for row in range(1, num_rows + 1):  # the next group tells that a row is full
            place = len(ends) if waits else math.ceil(len(ends) * row / num_rows)
            rows.append(ends[min(place, len(ends) - 1)] / ends[-1])
        equal = 0.0
        if config.drop_zero_advantage:
            equal = sum(not can_teach(g, config) for g in groups) / size
        reward_s = ends[-1] - max((g.sampled_s - begun_s for g in samples[-1]), default=0)
        slowdown = max(both_s / (max(sample_s, train_s) + sync_s), 1.0)  # below 1 it is noise
        num_groups = size / max(1 - equal, 0.1)
        return Parts(sampling, num_groups, reward_s, rows, train_s, sync_s, slowdown)

    def look_at_speed(self, groups: list[Group], num_rows: int, train_s: float) -> None:
        """A step and the run, and what more servers, or staleness, would give. Collective."""
        config = self.config
        rollouts = self.rollouts
        num = len(rollouts.pool.servers) if is_main() else 1
        parts = self.measure(groups, num_rows, train_s, num)
        if not is_main():
            return
        start, slope = parts.sampling
        sampled_s = start + slope * config.batch_size / num
        sampled = sum(sum(group.num_sampled) for group in groups) / sampled_s
        trained = sum(sum(lengths_with_prompt(group)) for group in groups) / train_s
        rates = f"{sampled:,.0f} tokens/s sampled, {trained:,.0f} tokens/s trained"
        tell("speed of either side alone", rates)
        steps = {k: predict(parts, k, config.max_staleness) for k in sorted({1, 2, 4, 8, num})}
        step_s, waits, idle = steps[num]
        sample_s = start + slope * parts.num_groups / num - parts.reward_s
        times = f"sampling {sample_s:.2f} s, rewards {parts.reward_s:.2f} s"
        times += f", training {train_s:.2f} s, sync {parts.sync_s:.2f} s"
        tell("one step", f"{step_s:.2f} s: {times}")
        slower = ""
        if config.max_staleness:
            slower = f"; both at once take {parts.slowdown:.2f} times as long"
        tell("", f"trainer waits {waits:.0%}, servers {idle:.0%}{slower}")
        good_s = (1 + LITTLE) * min(steps.values()).step_s
        enough = min(k for k in steps if steps[k].step_s < good_s)
        by_number = ", ".join(f"{k}: {of_k.step_s:.2f} s" for k, of_k in steps.items())
        tell("one step, by number of servers", f"{by_number}; enough: {enough}")
        held_out = [*chain.from_iterable(rollouts.run.held_out.values())]
        some = held_out[: config.batch_size * config.num_generations]
        every = config.eval_steps or rollouts.num_steps
        num_evals, eval_s = 0, 0.0
        if held_out:
            eval_s = seconds(lambda: self.evaluate(some), 1) * len(held_out) / len(some)
            num_evals = len({0, rollouts.num_steps, *range(every, rollouts.num_steps, every)})
        hours = (rollouts.num_steps * step_s + num_evals * eval_s) / 3600
        evaluations = f"{num_evals} evaluations of {eval_s:.2f} s"
        tell("the run", f"{hours:.2f} h: {rollouts.num_steps:,} steps, {evaluations}")
        other, saved = other_staleness(parts, num, config.max_staleness)
        cost = f"max_staleness={config.max_staleness} costs {saved:.0%} of a step"
        self.advise(saved > LITTLE, f"{cost}, which {other} would save")
        is_sync = config.max_staleness == 0
        cure = "raise batch_size"
        if enough > num:
            cure = f"{enough} servers give {steps[enough].step_s:.2f} s a step"
        is_idle = not is_sync and waits > MUCH
        self.advise(is_idle, f"the trainer waits {waits:.0%} of the time: {cure}")
        cure = f"{enough} would do" if enough < num else "the trainer is the slower side"
        self.advise(not is_sync and idle > MUCH, f"servers wait {idle:.0%} of the time: {cure}")


def examine(config: TrainConfig) -> None:
    """Print the table, and then the advice. Collective."""
    if not config.vllm_urls:
        raise UserError("vllm_urls names no server, and the trainer's speed alone says little")
    group = process_group(config.collective_timeout)
    with group as device, closing(Rollouts(config, device)) as rollouts:
        if is_main():
            for failures in (rollouts.run.scorer.failures, rollouts.run.failures):
                name = f"doctor-{os.getpid()}-{failures.path.name}"
                failures.path = Path(tempfile.gettempdir()) / name
        doctor = Doctor(config, device, rollouts)
        rollouts.publish(doctor.policy, 0)
        groups = doctor.sample(config.batch_size)
        doctor.look_at_servers(groups)
        doctor.look_at_sharing(groups)
        doctor.look_at_speed(groups, *doctor.look_at_memory(groups))
        if is_main():
            doctor.look_at_batch(groups)
            advice = "\n".join(f"- {text}" for text in doctor.advice)
            print("\n" + (advice or "no setting looks off"))


def main(argv: list[str]) -> None:
    """Plan or examine."""
    if {"-h", "--help"} & {*argv}:
        print(__doc__)
        parse_args(["--help"])
    if "--plan" not in argv:
        return examine(with_bf16(parse_args(argv)))
    from plan import print_plan

    place = argv.index("--plan")
    card = "".join(argv[place + 1 : place + 2])
    words = argv[:place] + argv[place + 2 :]
    return print_plan(parse_args(words), card, words)


if __name__ == "__main__":
    with exits(UserError, ServerError, torch.OutOfMemoryError):
        main(sys.argv[1:])
