"""A long run: does anything grow?

    python benchmarks/soak.py [--json PATH] [--quick] [--parts stand-in,server] [--keep FOLDER]

The tiny recipe with batches of 8 prompts: 2,000 steps against a stand-in for the server, then 500 with the real one,
both asynchronous, with evaluations and checkpoints. Every half second each process is looked at from outside: resident
memory (of all its parts), threads, open files, and how many of these are sockets. A row compares their medians over
steps 100 to 200 with those over the last 100; `growth_percent` is that of memory. `step_s` is treated alike.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import psutil
import torch
from build_tiny import build_model, build_tokenizer, problems

from benchmarks.common import Rows, arguments, as_options, lines, median
from benchmarks.local_server import local_server, stand_in
from utils import die_with

KINDS = ("rss_mb", "threads", "files", "sockets")


def build(folder: Path) -> None:
    """A random model of the tiny recipe's shape, and its data."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, count, held_out in (("train", 4096, False), ("heldout", 64, True)):
        rows = [json.dumps(row) + "\n" for row in problems(count, held_out=held_out, seed=0)]
        (folder / f"{name}.jsonl").write_text("".join(rows))


def answer(prompt_ids: list[int], number: int) -> tuple[list[int], float]:
    """Nine digits, at once."""
    return [5 + (sum(prompt_ids) + number + place) % 10 for place in range(9)], 0.0


@contextmanager
def real(folder: Path) -> Iterator[tuple[str, int]]:
    """The real server's address and process."""
    # A small cache, which is all in use after a few steps: a large one is touched bit by bit.
    options = ("--max-model-len", "64", "--kv-cache-memory-bytes", "64M")
    model, log = str(folder / "model"), folder / "server.log"
    with local_server(model, log, *options) as server:
        yield server.wait(), server.process.pid


# -- What is seen from outside ---------------------------------------------------------------------


def seen(processes: list[psutil.Process]) -> dict[str, float]:
    """Memory, threads, open files and sockets of processes together."""
    sums = dict.fromkeys(KINDS, 0.0)
    for process in processes:
        with process.oneshot():
            sums["rss_mb"] += process.memory_info().rss / 1e6
            sums["threads"] += process.num_threads()
            sums["files"] += process.num_fds()
            sums["sockets"] += len(process.net_connections("all"))
    return sums


def look(trainer: int, server: int) -> dict[str, dict[str, float]]:
    """The trainer, what it started, and the server with what that started."""
    of_trainer, of_server = psutil.Process(trainer), psutil.Process(server)
    return {
        "trainer": seen([of_trainer]),
        "reward workers": seen(of_trainer.children(recursive=True)),
        "server": seen([of_server, *of_server.children(recursive=True)]),
    }


def watch(
    process: Any, server: int, output: Path, interval_s: float
) -> list[tuple[int, dict[str, dict[str, float]]]]:
    """The step and what is seen, time and again until the run ends."""
    samples = []
    while process.poll() is None:
        time.sleep(interval_s)
        metrics = output / "metrics.jsonl"
        step = metrics.read_text().count('"time/step_s"') if metrics.exists() else 0
        with suppress(psutil.Error):  # the trainer or one of its workers has ended
            samples.append((step, look(process.pid, server)))
    return samples


# -- Runs ------------------------------------------------------------------------------------------


def run(rows: Rows, folder: Path, part: str, steps: int) -> dict[str, Any]:
    """A run's rows; returns the seconds of its steps."""
    output = folder / f"run-{part}"
    serving: Any = real(folder)
    if part == "stand-in":
        serving = stand_in(str(folder / "model"), answer)
    with serving as (url, server):
        fields = {
            "model_id": folder / "model", "dataset_id": folder / "train.jsonl",
            "eval_dataset_id": folder / "heldout.jsonl", "eval_steps": 200, "save_steps": 200,
            "keep_last_n": 2, "batch_size": 8, "max_steps": steps, "learning_rate": 1e-5,
            "parts": "recipes.replay.save", "vllm_urls": url, "output_dir": output, "server_timeout": 60,
        }  # fmt: skip
        command = [sys.executable, "train.py", "recipes/tiny.py", *as_options(fields)]
        with (folder / f"{part}.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                preexec_fn=partial(die_with, os.getpid()),
            )  # fmt: skip
            samples = watch(process, server, output, 0.5 if steps > 100 else 0.05)
        if process.returncode:
            text = (folder / f"{part}.log").read_text()
            raise RuntimeError(" ".join(text.split())[-280:])

    span = min(100, steps // 4)
    early = [sample for sample in samples if span <= sample[0] < 2 * span]
    late = [sample for sample in samples if steps - span <= sample[0] < steps]
    for role in samples[-1][1]:
        row: dict[str, Any] = {"part": part, "role": role}
        for kind in KINDS:
            row[f"{kind}_early"] = median([sample[1][role][kind] for sample in early])
            row[f"{kind}_late"] = median([sample[1][role][kind] for sample in late])
        row["growth_percent"] = 100 * (row["rss_mb_late"] / row["rss_mb_early"] - 1)
        rows.add(row)

    metrics = lines(output / "metrics.jsonl")
    times = [line["time/step_s"] for line in metrics if "time/step_s" in line]
    return {
        "steps": len(times),
        "step_s_early": median(times[span : 2 * span]),
        "step_s_late": median(times[-span:]),
        "run_mb": sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) / 1e6,
    }


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "40 steps against the stand-in")
    parser.add_argument("--parts", default="stand-in,server")
    parser.add_argument("--keep", type=Path, help="a folder for the run, which is kept")
    args = parser.parse_args()
    rows = Rows(args.json)
    folder = args.keep or Path(tempfile.mkdtemp())
    try:
        build(folder)
        steps = {"stand-in": 2000, "server": 500}
        for part in ["stand-in"] if args.quick else args.parts.split(","):
            one = partial(run, rows, folder, part, 40 if args.quick else steps[part])
            rows.measure({"part": part}, one)
    finally:
        if not args.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
