"""Rollout servers for the tests, forked from a process that has imported vLLM: 20 seconds for each of its processes."""

import multiprocessing
import os
import sys
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = ["vllm_server", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3"]


@cache
def forks(*modules):
    """The context of a process that has imported these modules, and ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell it our sys.path before it imports.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "scripts")]))
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # read when torch is imported
        forkserver.ensure_running()
    return context


def serve(argv, log, environment):
    """`python vllm_server.py *argv` in a session of its own; its engine is forked, too."""
    import vllm_server
    from utils import die_with

    os.setsid()
    die_with(os.getppid())
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["vllm_server.py", *argv]
    # vLLM spawns on the CPU, and would import itself again.
    fork = multiprocessing.get_context("fork")
    setattr(multiprocessing, "get_context", lambda method=None: fork)  # noqa: B010
    vllm_server.main(argv)


class Forked:
    """As much of a `Popen` of `python vllm_server.py ...` as `local_server` needs."""

    serve = staticmethod(serve)
    allowed = False  # set by conftest.py before each test

    def __init__(self, command, log, env):
        assert self.allowed, "a test that starts a server is marked: @pytest.mark.server"
        arguments = command[2:], str(log), env
        self.process = forks(*PRELOAD).Process(target=self.serve, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        """Its exit code, below 0 the signal that ended it, None while it runs."""
        return self.process.exitcode

    returncode = property(poll)

    def wait(self, timeout):
        """Wait for its end, at most that long."""
        self.process.join(timeout)
