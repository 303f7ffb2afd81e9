"""The order of groups against that of another commit: steps a second over latencies of a long tail, with drops.

    python benchmarks/admission.py --against CHECKOUT [--json PATH] [--quick]

The stream of a run, with its threads, under a trainer that sleeps for `TRAIN_S` a step. A group takes a time from a
lognormal distribution, two in a hundred take ten times as long, and one in a hundred fails; `drops` of them have equal
rewards, and others take their place. A group has the same latency in both checkouts. `slots` groups are sampled at a time:
32 are one busy server, 256 eight with room. Columns:

  steps_per_s  of the trainer, after the first six steps
  over_before  those of this checkout over those of the other one, in turn, twice; a row has the mean
  staleness    mean policy versions between a group's first token and its training; `most` is the largest
"""

import inspect
import itertools
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent.parent
BATCH, STEPS, SKIPPED = 32, 30, 6
TRAIN_S, MEAN_S, SIGMA = 0.06, 0.03, 0.8
SETTINGS = list(itertools.product((0, 1, 2, 4), (0.0, 0.3, 0.6), (32, 256)))
FAILS, STRAGGLES = 0.01, 0.02


# -- In a process of its own, for one checkout -----------------------------------------------------


def run(staleness: int, drops: float, slots: int) -> dict[str, float]:
    """Steps a second and staleness of one run."""
    from config import TrainConfig
    from rollouts.group import Completion, Group, Prompt, RolloutFailed
    from rollouts.stream import GroupStream

    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=[print], batch_size=BATCH, num_generations=2,
        max_staleness=staleness, drop_zero_advantage=drops > 0,
    )  # fmt: skip
    free = threading.Semaphore(slots)

    def fill(group: Any) -> None:
        rng = random.Random(f"latency {group.id}")
        seconds = rng.lognormvariate(0, SIGMA) * MEAN_S
        if rng.random() < STRAGGLES:
            seconds *= 10
        with free:
            group.started_version = stream.version
            time.sleep(seconds)
        if rng.random() < FAILS:
            raise RolloutFailed("an environment is down")
        group.fill([Completion([5], [-1.0], "stop", group.started_version)] * 2)
        group.reward = [1.0, 1.0] if rng.random() < drops else [1.0, 0.0]

    def group_of(number: int) -> Any:
        return Group(Prompt(number, [5], "", {}), id=number)

    source: Any = lambda first: [group_of(first + place) for place in range(BATCH)]
    if "choose" not in inspect.signature(GroupStream).parameters:  # an earlier commit's
        source = map(group_of, itertools.count())
    stream: Any = GroupStream(source, fill, STEPS, config)
    taken = []
    for step in range(STEPS):
        if step == SKIPPED:
            started_s = time.perf_counter()
        stream.advance_to(step)
        while stream.missing:
            group = stream.take()
            if group:
                taken.append(group)
        stream.end_batch()
        time.sleep(TRAIN_S)
    took_s = time.perf_counter() - started_s
    stream.close()
    numbers = [group.id for group in taken]
    assert len(set(numbers)) == len(numbers) == STEPS * BATCH
    lags = [group.trained_version - group.oldest_version for group in taken]
    return {
        "steps_per_s": (STEPS - SKIPPED) / took_s,
        "staleness": sum(lags) / len(lags),
        "most": max(lags),
    }


# -- The command line ------------------------------------------------------------------------------


def main() -> None:
    """Measure the checkouts in turn, and print and write the medians."""
    if len(sys.argv) == 3 and sys.argv[1] == "--child":
        print(json.dumps([run(*setting) for setting in SETTINGS[: int(sys.argv[2])]]), flush=True)
        os._exit(0)

    sys.path[:0] = [str(HERE), str(HERE / "scripts")]
    from benchmarks.common import arguments, ran, report

    args = arguments(__doc__, "one setting, once", "the order").parse_args()
    settings = SETTINGS[:1] if args.quick else SETTINGS
    words = [__file__, "--child", len(settings)]
    checkouts = {"before": args.against.resolve()} if args.against else {}
    checkouts["now"] = HERE
    found: dict[str, list[Any]] = {when: [] for when in checkouts}
    for _ in range(1 if args.quick else 2):
        for when, checkout in checkouts.items():
            path = {"PYTHONPATH": f"{checkout}:{checkout / 'scripts'}", "PYTHONSAFEPATH": "1"}
            found[when].append(ran(words, checkout, path))
    rows = []
    for number, (staleness, drops, slots) in enumerate(settings):
        row: dict[str, Any] = {"max_staleness": staleness, "drops": drops, "slots": slots}
        for when, runs in found.items():
            for name in ("steps_per_s", "staleness", "most"):
                row[f"{name}_{when}"] = fmean(measured[number][name] for measured in runs)
        if args.against:
            row["over_before"] = row["steps_per_s_now"] / row["steps_per_s_before"]
        rows.append(row)
    report(rows, args.json)


if __name__ == "__main__":
    main()
