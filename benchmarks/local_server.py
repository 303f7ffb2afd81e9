"""A rollout server on this machine that ends with the block that started it, for tests and benchmarks."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from launch import LocalServer, end_all, free_port, popen


@contextmanager
def local_server(
    model: str, log: Path, *options: str, env: Mapping[str, str] | None = None,
    start: Callable[[list[str], Path, dict[str, str]], Any] = popen,
) -> Iterator[LocalServer]:  # fmt: skip
    """Start `vllm_server.py` for `model`, with one thread and 1 GiB for keys and values.

    Args:
        model: path or name.
        log: file for its output.
        options: further options of the server.
        env: variables to add to the environment.
        start: what starts the command, with a log and an environment, and returns a `Popen` or its like.
    """
    port = free_port()
    command = [
        sys.executable,
        str(ROOT / "vllm_server.py"),
        "--model",
        model,
        "--port",
        str(port),
        *options,
    ]
    process = start(
        command,
        log,
        {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, **(env or {})},
    )
    try:
        yield LocalServer(f"http://127.0.0.1:{port}", process, log)
    finally:
        end_all([process])
