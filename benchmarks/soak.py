"""A long run: does anything grow?

    python benchmarks/soak.py [--json PATH] [--quick] [--parts stand-in server]

The tiny recipe with batches of 8 prompts: 2,000 steps against a stand-in for the server, then 500 with the real one,
both asynchronous, with evaluations and checkpoints. Every half second each process is looked at from outside: resident
memory (of all its parts), threads, open files, and how many of these are sockets. A row compares their medians over
steps 100 to 200 with those over the last 100; `growth_percent` is that of memory. `step_s` is treated alike.
"""

import json
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
from build_tiny import problems

from benchmarks.common import Rows, arguments, as_options, lines, median, medians
from benchmarks.local_server import local_server, random_tiny, run_train, stand_in


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


def seen(processes: list[psutil.Process]) -> dict[str, float]:
    """Memory, threads, open files and sockets of processes together."""
    return {
        "rss_mb": sum(process.memory_info().rss for process in processes) / 1e6,
        "threads": sum(process.num_threads() for process in processes),
        "files": sum(process.num_fds() for process in processes),
        "sockets": sum(len(process.net_connections("all")) for process in processes),
    }


def look(trainer: int, server: int) -> dict[str, dict[str, float]]:
    """The trainer, what it started, and the server with what that started."""
    of_trainer, of_server = psutil.Process(trainer), psutil.Process(server)
    return {
        "trainer": seen([of_trainer]),
        "reward workers": seen(of_trainer.children(recursive=True)),
        "server": seen([of_server, *of_server.children(recursive=True)]),
    }


def run(rows: Rows, folder: Path, part: str, steps: int) -> dict[str, Any]:
    """Add a row for each role of a run; returns the seconds of its steps."""
    output = folder / f"run-{part}"
    serving: Any = real(folder)
    if part == "stand-in":
        serving = stand_in(str(folder / "model"), answer)
    samples: list[tuple[int, dict[str, dict[str, float]]]] = []  # what is seen, with the step
    with serving as (url, server):
        fields = {
            "model_id": folder / "model", "dataset_id": folder / "train.jsonl",
            "eval_dataset_id": folder / "heldout.jsonl", "eval_steps": 200, "save_steps": 200,
            "keep_last_n": 2, "batch_size": 8, "max_steps": steps, "learning_rate": 1e-5,
            "parts": "recipes.replay.save", "vllm_urls": url, "output_dir": output, "server_timeout": 60,
        }  # fmt: skip

        def watch(process: Any) -> None:
            time.sleep(0.5 if steps > 100 else 0.05)
            metrics = output / "metrics.jsonl"
            step = metrics.read_text().count('"time/step_s"') if metrics.exists() else 0
            with suppress(psutil.Error):  # the trainer or one of its workers has ended
                samples.append((step, look(process.pid, server)))

        recipe = str(ROOT / "recipes" / "tiny.py")
        command = [str(ROOT / "train.py"), recipe, *as_options(fields)]
        run_train(command, folder / f"{part}.log", {"OMP_NUM_THREADS": "1"}, watch)

    span = min(100, steps // 4)
    spans = {"early": range(span, 2 * span), "late": range(steps - span, steps)}
    for role in samples[-1][1]:
        row: dict[str, Any] = {"part": part, "role": role}
        for when, of_steps in spans.items():
            found = medians([look[role] for step, look in samples if step in of_steps])
            row |= {f"{kind}_{when}": value for kind, value in found.items()}
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
    steps = {"stand-in": 2000, "server": 500}
    parser.add_argument("--parts", nargs="+", choices=steps, default=[*steps])
    args = parser.parse_args()
    rows = Rows(args.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_tiny(folder / "model")
        for file, count, held_out in (("train", 4096, False), ("heldout", 64, True)):
            texts = [json.dumps(row) + "\n" for row in problems(count, held_out, seed=0)]
            (folder / f"{file}.jsonl").write_text("".join(texts))

        for part in ["stand-in"] if args.quick else args.parts:
            one = partial(run, rows, folder, part, 40 if args.quick else steps[part])
            rows.measure({"part": part}, one)


if __name__ == "__main__":
    main()
