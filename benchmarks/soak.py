"""A long run: does anything grow?

    python benchmarks/soak.py [--json PATH] [--quick] [--parts stand-in,server] [--keep FOLDER]

The tiny recipe with batches of 8 prompts: 2,000 steps against a stand-in for the server, then 500 with the real one,
both asynchronous, with evaluations and checkpoints. Every half second each process is looked at from outside: resident
memory (of all its parts), threads, open files, and how many of these are sockets. A row compares their medians over
steps 100 to 200 with those over the last 100; `growth_percent` is that of memory. `step_s` is treated alike. `logs` are
bytes a step written in the first and the last 100 steps, and in all.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from build_tiny import build_model, build_tokenizer, problems

from benchmarks.common import Rows, median
from benchmarks.local_server import local_server
from utils import die_with

SPAWN = multiprocessing.get_context("spawn")
KINDS = ("rss_mb", "threads", "files", "sockets")
LOGS = ("metrics.jsonl", "completions.jsonl")


def build(folder: Path) -> None:
    """A random model of the tiny recipe's shape, and its data."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, count, held_out in (("train", 4096, False), ("heldout", 64, True)):
        lines = [json.dumps(row) for row in problems(count, held_out=held_out, seed=0)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


# -- Servers ---------------------------------------------------------------------------------------


def serve(model: str, link: Any, parent: int) -> None:
    """The stand-in, which forgets the weights of old versions."""
    die_with(parent)
    from fake_server import fake_server

    torch.set_num_threads(1)

    def answer(prompt_ids: list[int], number: int) -> tuple[list[int], float]:
        return [5 + (sum(prompt_ids) + number + place) % 10 for place in range(9)], 0.0

    with fake_server(model, answer) as server:

        def forget(path: str) -> None:
            del server.log[:-100]
            for version in list(server.versions)[:-8]:
                del server.versions[version]

        server.fault = forget  # called with every request
        link.send(server.url)
        link.recv()  # never comes: the parent ends this process


@contextmanager
def stand_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Its address and process."""
    here, there = SPAWN.Pipe()
    arguments = (str(folder / "model"), there, os.getpid())
    process = SPAWN.Process(target=serve, args=arguments, daemon=True)
    process.start()
    try:
        assert process.pid
        yield here.recv(), process.pid
    finally:
        process.terminate()
        process.join()


@contextmanager
def real(folder: Path) -> Iterator[tuple[str, int]]:
    """The real server's address and process."""
    log = folder / "server.log"
    # A small cache, which is all in use after a few steps: a large one is touched bit by bit.
    options = ("--max-model-len", "64", "--kv-cache-memory-bytes", "64M")
    with local_server(str(folder / "model"), log, *options) as server:
        yield server.wait(), server.process.pid


# -- What is seen from outside ---------------------------------------------------------------------


def seen(pid: int) -> dict[str, float]:
    """Memory, threads, open files and sockets of a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"{pid} has ended")
    targets = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets.append(os.readlink(descriptor))
        except FileNotFoundError:  # it is closed meanwhile
            continue
    return {
        "rss_mb": int(fields["VmRSS"].split()[0]) / 1e3,
        "threads": int(fields["Threads"]),
        "files": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
    }


def tree(root: int) -> list[int]:
    """A process and its descendants."""
    found = [root]
    for pid in found:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def look(trainer: int, server: int) -> dict[str, dict[str, float]]:
    """The trainer, what it started, and the server with what that started."""
    roles = {"trainer": [trainer], "reward workers": tree(trainer)[1:], "server": tree(server)}
    found = {}
    for role, pids in roles.items():
        sums = dict.fromkeys(KINDS, 0.0)
        for pid in pids:
            for kind, value in seen(pid).items():
                sums[kind] += value
        found[role] = sums
    return found


def watch(
    process: Any, server: int, output: Path, interval_s: float
) -> list[tuple[int, dict[str, dict[str, float]], int]]:
    """The step, what is seen, and the bytes of the logs, time and again until the run ends."""
    samples = []
    while process.poll() is None:
        time.sleep(interval_s)
        metrics = output / "metrics.jsonl"
        step = metrics.read_text().count('"time/step_s"') if metrics.exists() else 0
        num_bytes = sum((output / name).stat().st_size for name in LOGS if (output / name).exists())
        try:
            samples.append((step, look(process.pid, server), num_bytes))
        except OSError:  # the trainer or one of its workers has ended
            continue
    return samples


# -- Runs ------------------------------------------------------------------------------------------


def run(rows: Rows, folder: Path, part: str, steps: int) -> dict[str, Any]:
    """A run's rows; returns the seconds of its steps."""
    serving: Callable[[Path], Any] = stand_in if part == "stand-in" else real
    output = folder / f"run-{part}"
    with serving(folder) as (url, server):
        fields = {
            "model_id": folder / "model", "dataset_id": folder / "train.jsonl",
            "eval_dataset_id": folder / "heldout.jsonl", "eval_steps": 200, "save_steps": 200,
            "keep_last_n": 2,             "batch_size": 8, "max_steps": steps, "learning_rate": 1e-5,
            "parts": "recipes.replay.save", "vllm_urls": url, "output_dir": output, "server_timeout": 60,
        }  # fmt: skip
        command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "recipes" / "tiny.py")]
        for name, value in fields.items():
            command += [f"--{name}", str(value)]
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

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    times = [line["time/step_s"] for line in lines if "time/step_s" in line]
    early_bytes = (early[-1][2] - early[0][2]) / max(1, early[-1][0] - early[0][0])
    late_bytes = (late[-1][2] - late[0][2]) / max(1, late[-1][0] - late[0][0])
    return {
        "steps": len(times),
        "step_s_early": median(times[span : 2 * span]),
        "step_s_late": median(times[-span:]),
        "log_bytes_a_step_early": early_bytes,
        "log_bytes_a_step_late": late_bytes,
        "logs_mb": samples[-1][2] / 1e6,
        "run_mb": sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) / 1e6,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here, one by one")
    parser.add_argument("--quick", action="store_true", help="40 steps against the stand-in")
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
