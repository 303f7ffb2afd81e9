"""Calls of functions in worker processes, with a hard time-out.

Run as a script, this file is a worker.
"""

import asyncio
import ctypes
import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from queue import LifoQueue
from subprocess import DEVNULL, Popen
from typing import Any

IMPORT_GRACE_S = 60.0


class CallError(RuntimeError):
    """A call that was not answered; the message says why."""


def packed(function: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    """A call as it is sent to a worker, or a CallError."""
    import cloudpickle  # here, as a worker starts with the standard library only

    try:
        return cloudpickle.dumps((function, arguments))
    except Exception as error:  # a class's `__getstate__` may raise anything
        raise CallError(
            f"cannot be sent to a worker: {error}; open clients in a module-level function"
        ) from None


class CallPool:
    """Calls functions in worker processes. Thread-safe.

    A stuck or dead worker is killed and replaced. Workers start when needed, with this process's
    `sys.path` and folder, and end with this process, however that ends. A function that they can
    import keeps its module's globals from call to call; a lambda, a closure, or one of the main
    script is sent with a copy of those that it uses.
    """

    def __init__(self, num_workers: int):
        # Linux ends a worker with the thread that started it, so that one lives with the pool.
        self._starter = ThreadPoolExecutor(1)
        self._workers: list[Any] = [None] * num_workers  # None before the start
        self._idle: LifoQueue[int] = LifoQueue()  # numbers of those that are in no call
        self.is_closed = False
        for number in range(num_workers):
            self._idle.put(number)

    def call(
        self, function: Callable[..., Any], arguments: dict[str, Any], timeout_s: float
    ) -> Any:
        """The value of `function(**arguments)`, awaited if need be, or a CallError.

        A function's first call in a worker may take `IMPORT_GRACE_S` more.
        """
        message = packed(function, arguments)
        number = self._idle.get()
        try:
            worker = self._workers[number]
            if not self.is_closed and (not worker or worker.poll() is not None):
                worker = self._starter.submit(_Worker).result()
                self._workers[number] = worker
            if self.is_closed:  # meanwhile, or before
                if worker:
                    worker.end()
                raise CallError("was not called, as the pool of workers is closed")

            grace_s = 0.0 if id(function) in worker.imported else IMPORT_GRACE_S
            try:
                worker.connection.send_bytes(message)
                if not worker.connection.poll(timeout_s + grace_s):
                    worker.end()
                    raise CallError(f"took longer than {timeout_s:g} s")
                succeeded, value = worker.connection.recv()
            except (EOFError, OSError):
                worker.end()
                raise CallError(f"ended its process (exit code {worker.returncode})") from None
            worker.imported.add(id(function))
        finally:
            self._idle.put(number)

        if not succeeded:
            raise CallError(value)
        return value

    def close(self) -> None:
        """End all workers, those in a call too."""
        self.is_closed = True
        for worker in self._workers:
            if worker:
                worker.end()


class _Worker(Popen):
    """A worker process, at the other end of a connection."""

    def __init__(self) -> None:
        self.imported: set[int] = set()  # functions that have answered
        self.connection, theirs = Pipe()
        super().__init__(
            # -P keeps this folder out of sys.path.
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.connection.send(sys.path)

    def end(self) -> None:
        """Kill it, with the processes that a function may have started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def die_with(parent: int) -> None:
    """Let Linux end this process with its parent, however the parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


class _Output(io.FileIO):
    """An output whose reader may go away.

    Ctrl-C ends a `| tee`, too, a terminal closes, a log's disk is full: the run goes on.
    """

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def keep_outputs(write_through: bool = False) -> None:
    """Let this process print, whether there is anybody who reads it or not.

    `write_through` does not wait for the end of a line.
    """
    # Else a file that is opened later would be in the place of an output that was closed.
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass
    for number, name in {1: "stdout", 2: "stderr"}.items():
        file = _Output(number, "w", closefd=False)
        text = io.TextIOWrapper(file, "utf-8", "backslashreplace", None, True, write_through)
        setattr(sys, name, text)


def described(error: BaseException) -> str:
    """An error that user code raised: its type, its message, and the line where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"


if __name__ == "__main__":
    die_with(os.getppid())  # also when stuck in a call
    keep_outputs(write_through=True)  # a kill loses nothing printed
    trainer = Connection(int(sys.argv[1]))
    # One loop for all calls: a client that a module keeps belongs to the loop it began in.
    loop = asyncio.new_event_loop()
    with suppress(EOFError, OSError):
        sys.path[:] = trainer.recv()
        while True:
            message = trainer.recv_bytes()
            try:
                function, arguments = pickle.loads(message)
                value = function(**arguments)
                if hasattr(value, "__await__"):
                    value = loop.run_until_complete(value)
                reply = pickle.dumps((True, value))
            except BaseException as error:  # whatever user code raises, SystemExit too
                reply = pickle.dumps((False, f"raised {described(error)}"))
            trainer.send_bytes(reply)
