"""Rollout servers and trainers on this machine that end with the block that started them; random tiny models."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from build_tiny import build_model, build_tokenizer
from fake_server import fake_server
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


def beside_trainer(model: Path, log: Path, cache_bytes: int, *options: str) -> Any:
    """`local_server` beside the trainer on its GPU, where the engine is a process of its own.

    Args:
        model: path.
        log: file for its output.
        cache_bytes: of keys and values; so what others take meanwhile does not matter.
        options: further options of the server.
    """
    words = ["--kv-cache-memory-bytes", str(cache_bytes)]
    env: dict[str, str] = {}
    if torch.cuda.is_available():
        words += ["--gpu-memory-utilization", "0.02", "--dtype", "bfloat16"]
        env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return local_server(str(model), log, *words, *options, env=env)


@contextmanager
def apart(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Any]]:
    """Run `target(link, *arguments)`, of a module, in a process that ends with the block: our link to it, and the process."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    words = (target, there, os.getpid(), arguments)
    process = spawn.Process(target=_run_apart, args=words, daemon=True)
    process.start()
    there.close()
    try:
        yield here, process
    finally:
        process.kill()
        process.join()


def _run_apart(target: Callable[..., None], link: Any, parent: int, arguments: Any) -> None:
    die_with(parent)
    torch.set_num_threads(1)
    target(link, *arguments)


@contextmanager
def stand_in(model: str, answer: Any, **fields: Any) -> Iterator[tuple[str, int]]:
    """Serve `fake_server` in a process of its own, on the CPU: its address, and the process id.

    Args:
        model: path.
        answer: what it says; a function of a module.
        fields: as `fake_server` takes them.
    """
    with apart(_serve, model, answer, fields) as (link, process):
        yield link.recv(), process.pid


def _serve(link: Any, model: str, answer: Any, fields: dict[str, Any]) -> None:
    with fake_server(model, answer, **fields) as server:
        link.send(server.url)
        link.recv()  # never comes


def random_tiny(folder: Path, sharper: float = 1.0, max_length: int = 128) -> str:
    """Write a random model of the tiny recipe's shape, with its tokenizer; returns the path.

    Args:
        folder: for the model.
        sharper: factor of its matrices; distributions over tokens are far from uniform at 3.
        max_length: tokens that it may see.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    model.config.max_position_embeddings = max_length
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(sharper)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_train(
    command: list[str], log: Path, env: Mapping[str, str] | None = None,
    watch: Callable[[Any], None] = lambda _: time.sleep(0.2),
) -> None:  # fmt: skip
    """Run a trainer to its end.

    Args:
        command: what follows `python`.
        log: file for its output.
        env: variables to add to the environment.
        watch: called with the process, again and again.

    Raises:
        RuntimeError: it failed; the message is the end of its output.
    """
    process = popen([sys.executable, *command], log, {**os.environ, **(env or {})})
    try:
        while process.poll() is None:
            watch(process)
    finally:
        end_all([process])
    if process.returncode:
        raise RuntimeError(" ".join(log.read_text().split())[-280:])
