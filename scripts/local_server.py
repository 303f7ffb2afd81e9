"""A rollout server on this machine that ends with the block that started it, for tests and benchmarks."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from utils import die_with


def free_port() -> int:
    """A TCP port on loopback that nobody listens on, and that the system gives to nobody who asks for any port."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)  # Linux gives out those above
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class LocalServer:
    """A starting or running server: its address, process and log file."""

    url: str
    process: Any
    log: Path

    def wait(self, timeout_s: float = 240) -> str:
        """Wait until it answers; returns its address.

        Raises:
            RuntimeError: it ended, or took longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return self.url
            except (urllib.error.URLError, TimeoutError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}") from None
                time.sleep(0.5)


def popen(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, which ends with this process, also where that is killed."""
    with log.open("w") as out:
        end = partial(die_with, os.getpid())
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, preexec_fn=end, env=env)


@contextlib.contextmanager
def local_server(
    model: str, log: Path, *options: str, env: Mapping[str, str] | None = None, restarts: bool = False,
    start: Callable[[list[str], Path, dict[str, str]], Any] = popen,
) -> Iterator[LocalServer]:  # fmt: skip
    """Start `vllm_server.py` for `model` in a process group of its own, which ends with the block, or this process.

    Args:
        model: path or name.
        log: file for its output.
        options: further options of the server.
        env: variables to add to the environment.
        restarts: start it again when it dies; the process is then a shell, and the server its only child.
        start: what starts the command, with a log and an environment, and returns a `Popen` or its like.
    """
    port = free_port()
    command = [sys.executable, str(ROOT / "vllm_server.py"), "--model", model, "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", *options]
    if restarts:
        command = ["bash", "-c", 'until "$@"; do sleep 1; done', "restarts", *command]
    defaults = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the sampler would compile itself anew for many sizes of a batch
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process: between two, waiting takes a core
    }
    process = start(command, log, {**defaults, **os.environ, **(env or {})})
    try:
        yield LocalServer(f"http://127.0.0.1:{port}", process, log)
    finally:
        for kind, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
