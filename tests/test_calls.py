"""Calls in worker processes: values, failures, time-outs, what cannot be sent, orphans."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from types import ModuleType

import pytest
import some_calls
from helpers import ROOT, finished, have_ended, wait_until

from rollouts.workers import CallError, CallPool


@pytest.fixture(scope="module")
def pool():
    pool = CallPool(2)
    yield pool
    pool.close()


@pytest.fixture
def single():
    """A pool of one worker."""
    pool = CallPool(1)
    yield pool
    pool.close()


def is_written(path):
    return path.exists() and path.read_text() != ""


def test_calls_run_in_another_process_and_workers_are_kept(pool):
    """Lambdas and closures too, which are sent whole."""
    held = 40
    values = [pool.call(lambda a: (a + held, os.getpid()), {"a": i}, 60) for i in range(6)]
    assert [value for value, _ in values] == [40 + i for i in range(6)]
    pids = {pid for _, pid in values}
    assert os.getpid() not in pids
    assert len(pids) <= 2
    assert pool.call(os.getcwd, {}, 60) == os.getcwd()


def test_coroutines_of_a_worker_share_a_loop(single):
    assert [single.call(some_calls.in_one_loop, {}, 60) for _ in range(3)] == [True] * 3


NO_LOCK = "cannot be sent to a worker: cannot pickle '_thread.lock' object; open"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (threading.Lock().acquire, NO_LOCK),  # a method of what the trainer made
        (lambda lock=threading.Lock(): lock, NO_LOCK),  # noqa: B008
        (some_calls.fails, r"raised KeyError: 'gold' \(some_calls.py:\d+\)"),
        (lambda: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_calls.py:\d+\)"),
        (lambda: sys.exit(3), "raised SystemExit: 3"),
        (some_calls.leaves_later, "raised SystemExit: 4"),
        (lambda: os._exit(7), r"ended its process \(exit code 7\)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"ended its process \(exit code -9\)"),
        (lambda: (i for i in range(3)), "raised TypeError: cannot pickle 'generator' object"),
    ],
)
def test_failures(pool, function, message):
    for _ in range(3):  # more often than there are workers
        with pytest.raises(CallError, match=message):
            pool.call(function, {}, 60)
    assert pool.call(some_calls.add, {"a": 1, "b": 1}, 60)[0] == 2


@pytest.mark.parametrize("function", [some_calls.hangs, some_calls.sandbox])
def test_a_stuck_call_is_killed_and_its_worker_replaced(single, tmp_path, monkeypatch, function):
    """With what it started, as a sandbox that runs code in a process of its own."""
    path = tmp_path / "pid"
    for _ in range(2):
        with monkeypatch.context() as patch:  # its time is over once it has begun
            patch.setattr(Connection, "poll", lambda *_: wait_until(lambda: is_written(path)))
            with pytest.raises(CallError, match="took longer than 0.5 s"):
                single.call(function, {"path": path}, 0.5)
        wait_until(lambda: have_ended({int(path.read_text())}))
        path.unlink()
    assert single.call(some_calls.add, {"a": 1, "b": 2}, 60)[0] == 3


def test_a_worker_killed_while_idle_is_replaced(single):
    for _ in range(2):
        _, pid = single.call(some_calls.add, {"a": 1, "b": 2}, 60)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: have_ended({pid}))


def test_a_functions_first_call_in_a_worker_has_time_for_imports(single):
    single.call(some_calls.add, {"a": 1, "b": 2}, 0.1)  # of another function
    single.call(some_calls.naps, {"seconds": 1.0}, 0.1)
    with pytest.raises(CallError, match="took longer than 0.1 s"):
        single.call(some_calls.naps, {"seconds": 20.0}, 0.1)


def test_close_ends_calls_and_refuses_more(tmp_path):
    pool = CallPool(2)
    paths = [tmp_path / str(number) for number in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(pool.call, some_calls.hangs, {"path": path}, 60) for path in paths]
        wait_until(lambda: sum(map(is_written, paths)) == 2)
        pool.close()
        errors = sorted(str(call.exception(timeout=60)) for call in calls)
    killed = "ended its process (exit code -9)"
    assert errors == [killed] * 2 + ["was not called, as the pool of workers is closed"] * 2
    assert have_ended({int(path.read_text()) for path in paths if path.exists()})
    with pytest.raises(CallError, match="is closed"):
        pool.call(some_calls.add, {"a": 1, "b": 2}, 60)


def test_what_a_killed_function_printed_is_seen(single, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with pytest.raises(CallError, match=r"ended its process \(exit code -9\)"):
        single.call(some_calls.prints_and_is_killed, {}, 60)
    assert capfd.readouterr() == ("to stdout", "to stderr")


def test_a_function_of_a_file_that_nothing_imports(pool, monkeypatch):
    """It is sent whole, unless its module says that it can be imported."""
    module = ModuleType("recipe_odd")
    code = "class Twice:\n    def __call__(self, a): return 2 * a\ndef f(a): return 3 * a\n"
    exec(code, vars(module))
    assert pool.call(module.f, {"a": 2}, 60) == 6
    assert pool.call(module.Twice(), {"a": 2}, 60) == 4
    monkeypatch.setitem(sys.modules, "recipe_odd", module)  # as if it could be imported
    with pytest.raises(CallError, match="raised ModuleNotFoundError: No"):
        pool.call(module.f, {"a": 2}, 60)


ORPHAN = """
import os, sys, threading
sys.path[:0] = {path!r}
from pathlib import Path
import some_calls
from rollouts.workers import CallPool
note = Path({note!r})
calling = lambda: CallPool(1).call(some_calls.hangs, {{"path": note}}, 60)
threading.Thread(target=calling, daemon=True).start()
while not note.exists() or not note.read_text(): pass
os._exit(0)
"""


def test_a_stuck_worker_ends_with_its_trainer(tmp_path):
    note = tmp_path / "pid"
    script = ORPHAN.format(path=[*sys.path[:3], str(ROOT)], note=str(note))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    wait_until(lambda: have_ended({int(note.read_text())}))


def test_a_function_of_the_main_script(tmp_path):
    """Without running the script again or reading its input; the script ends at once, with a worker that waits."""
    script = tmp_path / "main.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\nfrom rollouts.workers import CallPool\n"
        "one = 1\ndef f(a): return a + one, sys.stdin.read()\n"
        "pool = CallPool(1)\nprint(pool.call(f, {'a': 1}, 60))\n"
    )
    done = finished(sys.executable, script, input="typed")
    assert (done.stdout, done.stderr) == ("(2, '')\n", "")


def test_no_more_calls_at_a_time_than_workers(pool, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        call = lambda _: pool.call(some_calls.meets_another, {"folder": tmp_path}, 30)
        spans = [*threads.map(call, range(16))]
    assert max(sum(start <= moment < end for start, end in spans) for moment, _ in spans) == 2
