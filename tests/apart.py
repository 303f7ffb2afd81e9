"""Stand-in servers in processes of their own, which a test can kill, stop and question."""

import hashlib
import os
import signal
import time
from typing import Any

from forked import forks


def digest_of(model):
    """The hash of a model's weights."""
    state = model.state_dict().items()
    parts = [name.encode() + tensor.numpy().tobytes() for name, tensor in state]
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest()


def _serve(model, pipe):
    """A stand-in whose fault is told by messages."""
    import torch
    from fake_server import fake_server

    from utils import die_with

    die_with(os.getppid())
    torch.set_num_threads(1)
    fault: list[Any] = []  # path or `any`, turn, what happens

    def ill(path):
        if not {path, "any"} & {*fault[:1]}:
            return
        fault[1] -= 1
        if fault[1] < 0:
            what = fault[2]
            fault[:] = "any", 0, "refuses"  # until it is told otherwise
            if what != "refuses":
                os.kill(os.getpid(), signal.SIGKILL if what == "dies" else signal.SIGSTOP)
                time.sleep(0.5)  # another thread may take the signal
            raise ConnectionError("out of order")  # what was stopped does not serve so late

    answer = lambda prompt, number: ([7, 8, 9], 0.0)
    with fake_server(model, answer, fault=ill, stages=True) as fake:
        pipe.send(fake.url)
        while True:
            message = pipe.recv()
            if message == "digest":
                pipe.send((fake.version, digest_of(fake.model)))
            else:
                fault[:] = message
                pipe.send(None)


class Apart:
    """A stand-in in a process of its own."""

    def __init__(self, model):
        context = forks("fake_server", "transformers.models.qwen3.modeling_qwen3")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(model, theirs), daemon=True)
        self.process.start()
        self.url = self._answer()

    def _answer(self):
        assert self._pipe.poll(60), "a stand-in does not answer"
        return self._pipe.recv()

    def fault(self, *fault):
        """`path, turn, what`: at that request of the path from now on it `dies`, `hangs` or `refuses` until it wakes; or no fault."""
        self._pipe.send(fault)
        self._answer()

    def digest(self):
        """The version of its weights, and their hash."""
        self._pipe.send("digest")
        return self._answer()

    def wake(self):
        """Go on, if it was stopped; nothing fails any more."""
        os.kill(self.process.pid, signal.SIGCONT)
        self.fault()
