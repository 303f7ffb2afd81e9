"""Calls of reward functions in processes of their own, each with a hard time-out.

`CallPool` is the trainer's side; run as a script, this file is the other. It needs the standard library only, so that a
worker starts in the time its functions take to import.
"""

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any

IMPORT_TIMEOUT_S = 120.0


class CallError(RuntimeError):
    """A call raised, took too long, or ended its process; the message says which."""


class CallPool:
    """Calls functions in worker processes; a stuck or dead worker is killed and replaced.

    A function that another process cannot import (a closure, a lambda) runs in a thread instead, which is left behind
    after a time-out. Coroutines are awaited. Thread-safe. Workers start when they are first needed, and end with this
    process, however it ends.

    Args:
        num_workers: processes at most, and calls at a time.
    """

    def __init__(self, num_workers: int):
        self._places: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(num_workers):
            self._places.put(None)
        self._alive: set[_Worker] = set()
        self._in_threads: set[str] = set()
        self._starter = ThreadPoolExecutor(1)  # Linux ends a worker with the thread that started it: one that stays

    def call(self, function: Callable[..., Any], arguments: dict[str, Any], timeout_s: float) -> Any:
        """`function(**arguments)`, once a worker is free; the time-out begins when the function is imported there.

        Raises:
            CallError: the call failed.
        """
        try:
            message = _pickled((function, arguments))
        except (pickle.PicklingError, AttributeError, TypeError):
            message = None
        worker = self._places.get()
        try:
            if message is None:
                return self._call_in_thread(function, arguments, timeout_s)
            if worker is None:
                worker = self._starter.submit(_Worker).result()
                self._alive.add(worker)
            return worker.call(message, timeout_s)
        finally:
            if worker is not None and worker.process.poll() is not None:
                self._alive.discard(worker)
                worker = None
            self._places.put(worker)

    def _call_in_thread(self, function: Callable[..., Any], arguments: dict[str, Any], timeout_s: float) -> Any:
        name = getattr(function, "__name__", repr(function))
        if name not in self._in_threads:
            self._in_threads.add(name)
            print(
                f"{name} runs in a thread, as no other process can import it: it cannot be ended by force", flush=True
            )
        outcome: list[tuple[bool, Any]] = []
        thread = threading.Thread(target=lambda: outcome.append(_outcome(function, arguments)), daemon=True)
        thread.start()
        thread.join(timeout_s)
        succeeded, value = outcome[0] if outcome else (False, f"took longer than {timeout_s:g} s")
        if not succeeded:
            raise CallError(value)
        return value

    def close(self) -> None:
        """End all workers, those in a call too."""
        for worker in list(self._alive):
            worker.end()
        self._starter.shutdown(wait=False)


class _Worker:
    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        fd = theirs.fileno()
        command = [sys.executable, "-P", __file__, str(fd)]  # not recipes/ first on the path: math.py is there
        self.process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        self.connection.send_bytes(pickle.dumps(sys.path))

    def call(self, message: bytes, timeout_s: float) -> Any:
        try:
            self.connection.send_bytes(message)
            if not self.connection.poll(IMPORT_TIMEOUT_S):
                self.end()
                raise CallError(f"took longer than {IMPORT_TIMEOUT_S:g} s to be imported")
            self.connection.recv_bytes()  # the function is imported
            if not self.connection.poll(timeout_s):
                self.end()
                raise CallError(f"took longer than {timeout_s:g} s")
            succeeded, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # to its own end, for the exit code
            self.end()
            raise CallError(f"ended its process (exit code {self.process.returncode})") from None
        if not succeeded:
            raise CallError(value)
        return value

    def end(self) -> None:
        """Kill it, with the processes that a function may have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _outcome(
    function: Callable[..., Any], arguments: dict[str, Any], run: Callable[..., Any] = asyncio.run
) -> tuple[bool, Any]:
    """(True, what the function returns, a coroutine's value by `run`) or (False, why it does not)."""

    async def awaited(value: Any) -> Any:
        return await value

    try:
        value = function(**arguments)
        return True, run(awaited(value)) if inspect.isawaitable(value) else value
    except BaseException as error:  # whatever user code raises, SystemExit too
        place = traceback.extract_tb(error.__traceback__)[-1]
        return False, f"raised {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


class _ByReference(pickle.Pickler):
    """Functions and classes by module, file and name, so that a recipe's own arrive too, which no import finds."""

    def persistent_id(self, item: Any) -> tuple[str, str, str] | None:
        if not isinstance(item, FunctionType | type):
            return None
        found: Any = sys.modules.get(item.__module__)
        path = getattr(found, "__file__", None)
        for part in item.__qualname__.split("."):
            found = getattr(found, part, None)
        return (item.__module__, os.path.abspath(path), item.__qualname__) if path and found is item else None


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ByReference(buffer).dump(value)
    return buffer.getvalue()


# --------------------------------------------------------------------------------------------------------------------
# The worker's side


class _Importing(pickle.Unpickler):
    def persistent_load(self, reference: tuple[str, str, str]) -> Any:
        name, path, qualname = reference
        try:
            found: Any = sys.modules[path] if name == "__main__" else importlib.import_module(name)
        except (ModuleNotFoundError, KeyError):
            key = path if name == "__main__" else name  # a script's functions: `__main__` is this file here
            spec = importlib.util.spec_from_file_location(key, path)
            assert spec is not None
            assert spec.loader is not None
            found = sys.modules[key] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(found)
            except BaseException:
                del sys.modules[key]  # half made
                raise
        for part in qualname.split("."):
            found = getattr(found, part)
        return found


def _serve(connection: Connection) -> None:
    """One call after the other, until the other side is gone."""
    loop = asyncio.Runner()  # one for all calls: a client that a module keeps belongs to the loop that first ran it
    sys.path[:] = pickle.loads(connection.recv_bytes())
    while True:
        message = connection.recv_bytes()
        try:
            function, arguments = _Importing(io.BytesIO(message)).load()
        except BaseException as error:
            outcome: tuple[bool, Any] = (False, f"cannot be imported by a worker: {type(error).__name__}: {error}")
            connection.send_bytes(b"")
        else:
            connection.send_bytes(b"")
            outcome = _outcome(function, arguments, loop.run)
        try:
            answer = pickle.dumps(outcome)
        except Exception as error:
            answer = pickle.dumps((False, f"returned what no process can send: {error}"))
        connection.send_bytes(answer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes the connection
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the trainer, also when stuck in a call
    with contextlib.suppress(EOFError, OSError):
        _serve(Connection(int(sys.argv[1])))
