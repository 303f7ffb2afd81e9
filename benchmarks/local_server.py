"""Rollout servers on this machine that end with the block that started them, for tests and benchmarks."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from launch import LocalServer, end_all, free_port, popen

from utils import die_with


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
    script = str(ROOT / "vllm_server.py")
    command = [sys.executable, script, "--model", model, "--port", str(port), *options]
    usual = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = start(command, log, {**usual, **os.environ, **(env or {})})
    try:
        yield LocalServer(f"http://127.0.0.1:{port}", process, log)
    finally:
        end_all([process])


@contextmanager
def stand_in(model: str, answer: Any, **fields: Any) -> Iterator[tuple[str, int]]:
    """Serve `fake_server` in a process of its own, on the CPU: its address, and the process id.

    Args:
        model: path.
        answer: what it says; a function of a module.
        fields: as `fake_server` takes them.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    arguments = (there, os.getpid(), model, answer, fields)
    process = spawn.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    there.close()
    try:
        assert process.pid
        yield here.recv(), process.pid
    finally:
        process.terminate()
        process.join()


def _serve(link: Any, parent: int, model: str, answer: Any, fields: dict[str, Any]) -> None:
    """Serve until the parent ends this process."""
    die_with(parent)
    import torch
    from fake_server import fake_server

    torch.set_num_threads(1)
    with fake_server(model, answer, **fields) as server:
        link.send(server.url)
        link.recv()  # never comes
