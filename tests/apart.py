"""Stand-in servers in processes of their own, which a test can kill, stop and question."""

import hashlib
import multiprocessing
import os
import signal
import time
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@cache
def _forks():
    """The context of a process that has imported the libraries, and ends with this one."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["fake_server", "transformers.models.qwen3.modeling_qwen3"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "scripts")]))
        forkserver.ensure_running()
    return forks


def digest_of(model):
    """The hash of a model's weights."""
    state = model.state_dict().items()
    parts = [name.encode() + tensor.numpy().tobytes() for name, tensor in state]
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest()


def _serve(model, pipe, fields):
    """A stand-in whose faults are told by messages `(path, turn, what happens)`."""
    import torch
    from fake_server import fake_server

    from utils import die_with

    die_with(os.getppid())
    torch.set_num_threads(1)
    faults: list[list] = []

    def ill(path):
        for fault in list(faults):
            if fault[0] == path:
                fault[1] -= 1
                if fault[1] < 0:
                    faults.remove(fault)
                    if fault[2] == "refuses":
                        raise ConnectionError("out of order")
                    os.kill(os.getpid(), signal.SIGKILL if fault[2] == "dies" else signal.SIGSTOP)
                    time.sleep(0.5)  # another thread may take the signal
                    raise ConnectionError("it was stopped")  # its request is not served so late

    answer = lambda prompt, number: ([7, 8, 9], 0.0)
    with fake_server(model, answer, fault=ill, **fields) as fake:
        pipe.send(fake.url)
        while True:
            message = pipe.recv()
            if message == "digest":
                pipe.send((fake.version, digest_of(fake.model)))
            else:
                faults[:] = [list(message)] if message else []
                pipe.send(None)


class Apart:
    """A stand-in in a process of its own."""

    def __init__(self, model, **fields):
        self._pipe, theirs = _forks().Pipe()
        self.process = _forks().Process(target=_serve, args=(model, theirs, fields), daemon=True)
        self.process.start()
        self.url = self._ask()

    def _ask(self):
        assert self._pipe.poll(60), "a stand-in does not answer"
        return self._pipe.recv()

    def fault(self, path, turn, what):
        """At the `turn`-th request of this path from now on it `dies`, `hangs` or `refuses`; no other fault."""
        self._pipe.send((path, turn, what))
        self._ask()

    def digest(self):
        """The version of its weights, and their hash."""
        self._pipe.send("digest")
        return self._ask()

    def wake(self):
        """Go on, if it was stopped; nothing fails any more."""
        os.kill(self.process.pid, signal.SIGCONT)
        self._pipe.send(None)
        self._ask()

    @property
    def lives(self):
        """True until it has died."""
        return self.process.is_alive()

    def end(self):
        """Kill it, also where it is stopped."""
        self.process.kill()
        self.process.join(20)
