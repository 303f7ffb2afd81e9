"""Calls of functions in worker processes, with a hard time-out. Run as a script, this file is a worker."""

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

IMPORT_GRACE_S = 60.0


class CallError(RuntimeError):
    """A call could not be sent, raised, took too long, or ended its process; the message says which."""


class CallPool:
    """Calls functions in `num_workers` processes; a stuck or dead one is killed and replaced. Thread-safe.

    They start when needed, with this process's `sys.path` and folder, and end with it, however it ends. A function that
    they can import keeps its module's globals from call to call; any other is sent with a copy of those that it uses.
    """

    def __init__(self, num_workers: int):
        self._threads = ThreadPoolExecutor(
            num_workers
        )  # each has a worker, which Linux ends with the thread
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.Lock()
        self.is_closed = False

    def call(
        self, function: Callable[..., Any], arguments: dict[str, Any], timeout_s: float
    ) -> Any:
        """`function(**arguments)`, awaited if need be, or a CallError; a first call may take `IMPORT_GRACE_S` more."""
        import cloudpickle  # here, as a worker starts with the standard library only

        try:
            module = sys.modules.get(function.__module__)
            if module and not any(
                finder.find_spec(module.__name__.split(".")[0], None) for finder in sys.meta_path
            ):
                cloudpickle.register_pickle_by_value(module)
            message = cloudpickle.dumps((function, arguments))
        except Exception as error:  # a class's `__getstate__` may raise anything
            raise CallError(
                f"cannot be sent to a worker: {error}; open clients in a module-level function"
            ) from None
        return self._threads.submit(self._call, id(function), message, timeout_s).result()

    def _call(self, key: int, message: bytes, timeout_s: float) -> Any:
        with self._lock:
            if self.is_closed:
                raise CallError("was not called, as the pool of workers is closed")
            worker = self._workers.get(threading.get_ident())
            if worker is None or worker.process.poll() is not None:
                worker = self._workers[threading.get_ident()] = _Worker()
        try:
            worker.connection.send_bytes(message)
            if not worker.connection.poll(
                timeout_s if key in worker.imported else timeout_s + IMPORT_GRACE_S
            ):
                worker.end()
                raise CallError(f"took longer than {timeout_s:g} s")
            succeeded, value = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(TimeoutExpired):
                worker.process.wait(1.0)  # for the exit code of its own end
            worker.end()
            raise CallError(f"ended its process (exit code {worker.process.returncode})") from None
        worker.imported.add(key)
        if not succeeded:
            raise CallError(value)
        return value

    def close(self) -> None:
        """End all workers, those in a call too."""
        with self._lock:
            self.is_closed = True
        for worker in self._workers.values():
            worker.end()


class _Worker:
    def __init__(self) -> None:
        self.imported: set[int] = set()  # functions that have answered
        self.connection, theirs = Pipe()
        command = [
            sys.executable,
            "-P",
            "-u",
            __file__,
            str(theirs.fileno()),
        ]  # -u: a kill loses nothing printed
        self.process = Popen(
            command, pass_fds=[theirs.fileno()], stdin=DEVNULL, start_new_session=True
        )
        theirs.close()
        self.connection.send_bytes(pickle.dumps(sys.path))

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                self.process.pid, signal.SIGKILL
            )  # with the processes that a function may have started
        self.process.wait()


def _answer(message: bytes, loop: asyncio.AbstractEventLoop) -> bytes:
    """Pickled: (True, what the function returns) or (False, why there is no such value)."""
    problem = "cannot be imported by a worker:"
    try:
        function, arguments = pickle.loads(message)
        problem = "raised"
        value = function(**arguments)
        if hasattr(value, "__await__"):
            value = loop.run_until_complete(value)
        problem = "returned what no process can send:"
        return pickle.dumps((True, value))
    except BaseException as error:  # whatever user code raises, SystemExit too
        file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
        return pickle.dumps(
            (False, f"{problem} {type(error).__name__}: {error} ({os.path.basename(file)}:{line})")
        )


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG: end with the trainer, also when stuck in a call
    trainer = Connection(int(sys.argv[1]))
    loop = (
        asyncio.new_event_loop()
    )  # one for all calls: a client that a module keeps belongs to the loop it began in
    with contextlib.suppress(EOFError, OSError):
        sys.path[:] = pickle.loads(trainer.recv_bytes())
        while True:
            trainer.send_bytes(_answer(trainer.recv_bytes(), loop))
