"""Calls in worker processes: values, failures, time-outs, what cannot be sent, orphans."""

import concurrent.futures
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import ROOT
from some_calls import (
    Client,
    add,
    dies,
    fails,
    hangs,
    in_one_loop,
    later,
    leaves,
    leaves_later,
    naps,
    prints_and_hangs,
    sandbox,
    unsendable,
)

from rollouts import workers
from rollouts.workers import CallError, CallPool


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def pool():
    pool = CallPool(2)
    yield pool
    pool.close()


def test_calls_run_in_another_process_and_workers_are_kept(pool):
    values = [pool.call(add, {"a": 1, "b": i}, 5) for i in range(6)]
    assert [v for v, _ in values] == [1 + i for i in range(6)]
    pids = {pid for _, pid in values}
    assert os.getpid() not in pids
    assert len(pids) <= 2


def test_coroutines_are_awaited(pool):
    assert pool.call(later, {"a": 4}, 5) == 4


def test_coroutines_of_a_worker_share_a_loop():
    pool = CallPool(1)
    assert [pool.call(in_one_loop, {}, 5) for _ in range(3)] == [True] * 3
    pool.close()


def test_lambdas_and_closures_are_sent_whole(pool):
    held = 40
    value, pid = pool.call(lambda a: (a + held, os.getpid()), {"a": 2}, 5)
    assert value == 42
    assert pid != os.getpid()
    with pytest.raises(
        CallError, match=r"raised ZeroDivisionError: division by zero \(test_calls.py:\d+\)"
    ):
        pool.call(lambda: 1 / 0, {}, 5)


def test_what_holds_a_lock_is_refused(pool):
    client, lock = Client(), threading.Lock()
    for function in (client.ask, lambda: lock):
        with pytest.raises(
            CallError, match="cannot be sent to a worker: cannot pickle '_thread.lock' object; open"
        ):
            pool.call(function, {}, 5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, r"raised KeyError: 'gold' \(some_calls.py:\d+\)"),
        (leaves, "raised SystemExit: 3"),
        (leaves_later, "raised SystemExit: 4"),
        (dies, r"ended its process \(exit code 7\)"),
        (unsendable, "returned what no process can send"),
    ],
)
def test_failures(pool, function, message):
    for _ in range(3):  # more often than there are workers
        with pytest.raises(CallError, match=message):
            pool.call(function, {}, 5)
    assert pool.call(add, {"a": 1, "b": 1}, 5)[0] == 2


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(workers, "IMPORT_GRACE_S", 2.0)


def test_a_stuck_call_is_killed_and_its_worker_replaced(pool, tmp_path, short_grace):
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(pool.call, hangs, {"path": tmp_path / str(i)}, 0.5) for i in range(4)
        ]
        for call in calls:
            with pytest.raises(CallError, match="took longer than 0.5 s"):
                call.result()
    assert time.monotonic() - started < 20
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert pool.call(add, {"a": 1, "b": 2}, 5)[0] == 3


def test_a_worker_killed_while_idle_is_replaced():
    pool = CallPool(1)
    for _ in range(2):
        _, pid = pool.call(add, {"a": 1, "b": 2}, 5)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: "Z" in Path(f"/proc/{pid}/stat").read_text())
    with pytest.raises(CallError, match=r"ended its process \(exit code -9\)"):
        pool.call(lambda: os.kill(os.getpid(), signal.SIGKILL), {}, 5)
    pool.close()


def test_a_functions_first_call_in_a_worker_has_time_for_imports(short_grace):
    pool = CallPool(1)
    pool.call(add, {"a": 1, "b": 2}, 0.1)  # of another function
    pool.call(naps, {"seconds": 1.0}, 0.1)
    with pytest.raises(CallError, match="took longer than 0.1 s"):
        pool.call(naps, {"seconds": 1.0}, 0.1)
    pool.close()


def test_close_ends_calls_and_refuses_more(tmp_path):
    pool = CallPool(2)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(pool.call, hangs, {"path": tmp_path / str(i)}, 60) for i in range(4)
        ]
        wait_for(lambda: sum(bool(path.read_text()) for path in tmp_path.iterdir()) == 2)
        pool.close()
        errors = [str(call.exception(timeout=10)) for call in calls]
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert (
        sorted(errors)
        == ["ended its process (exit code -9)"] * 2
        + ["was not called, as the pool of workers is closed"] * 2
    )
    with pytest.raises(CallError, match="is closed"):
        pool.call(add, {"a": 1, "b": 2}, 5)


def test_what_a_killed_function_printed_is_seen(capfd, monkeypatch, short_grace):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    pool = CallPool(1)
    with pytest.raises(CallError, match="took longer than 0.1 s"):
        pool.call(prints_and_hangs, {}, 0.1)
    assert capfd.readouterr() == ("to stdout", "to stderr")
    pool.close()


def test_a_worker_is_in_the_trainers_folder(pool):
    assert pool.call(os.getcwd, {}, 5) == os.getcwd()


def test_a_worker_starts_with_the_standard_library_only():
    code = f"import runpy; runpy.run_path({workers.__file__!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


def test_a_function_of_a_file_that_nothing_imports(pool, tmp_path, monkeypatch):
    """It is sent whole, unless its module says that it can be imported."""
    path = tmp_path / "odd name.py"
    path.write_text(
        "class Twice:\n    def __call__(self, a): return 2 * a\ndef f(a): return 3 * a\ntwice = Twice()\n"
    )
    spec = importlib.util.spec_from_file_location("recipe_odd", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert pool.call(module.f, {"a": 2}, 5) == 6
    assert pool.call(module.twice, {"a": 2}, 5) == 4
    monkeypatch.setitem(sys.modules, "recipe_odd", module)  # as if it could be imported
    with pytest.raises(CallError, match="cannot be imported by a worker: ModuleNotFoundError: No"):
        pool.call(module.f, {"a": 2}, 5)


ORPHAN = """
import sys, threading; sys.path[:0] = {path!r}
from pathlib import Path
from some_calls import hangs
from rollouts.workers import CallPool
threading.Thread(target=lambda: CallPool(1).call(hangs, {{"path": Path({note!r})}}, 60), daemon=True).start()
while not Path({note!r}).exists() or not Path({note!r}).read_text(): pass
import os; os._exit(0)
"""


def test_a_stuck_worker_ends_with_its_trainer(tmp_path):
    note = tmp_path / "pid"
    script = ORPHAN.format(path=[*sys.path[:3], str(ROOT)], note=str(note))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    wait_for(lambda: not Path(f"/proc/{note.read_text()}").exists())


def test_a_function_of_the_main_script(tmp_path):
    """Without running the script again or reading its input; the script ends at once, with a worker that waits."""
    script = tmp_path / "main.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\nfrom rollouts.workers import CallPool\n"
        "one = 1\ndef f(a): return a + one, sys.stdin.read()\n"
        "pool = CallPool(1)\nprint(pool.call(f, {'a': 1}, 5))\n"
    )
    done = subprocess.run(
        [sys.executable, script], input="typed", capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("(2, '')\n", "")


def test_what_a_stuck_function_started_ends_with_it(pool, tmp_path, short_grace):
    """As a sandbox that runs code in a process of its own."""
    with pytest.raises(CallError, match="took longer than 0.5 s"):
        pool.call(sandbox, {"path": tmp_path / "pid"}, 0.5)
    pid = int((tmp_path / "pid").read_text())
    wait_for(
        lambda: (
            not Path(f"/proc/{pid}/cmdline").exists()
            or not Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    )


def test_an_import_that_hangs_is_ended(tmp_path, monkeypatch, short_grace):
    path = tmp_path / "slow_module.py"
    path.write_text(
        "import sys, time\nif not hasattr(sys, 'ours'): time.sleep(60)\ndef f(): return 1\n"
    )
    monkeypatch.setattr(sys, "ours", True, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    slow = importlib.import_module("slow_module")
    pool = CallPool(1)
    with pytest.raises(CallError, match="took longer than 0.5 s"):
        pool.call(slow.f, {}, 0.5)
    pool.close()


def test_an_import_that_fails_says_so(pool, tmp_path, monkeypatch):
    path = tmp_path / "choosy_module.py"
    path.write_text(
        "import sys\nif not hasattr(sys, 'ours'): sys.exit('not here')\ndef f(): return 1\n"
    )
    monkeypatch.setattr(sys, "ours", True, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    choosy = importlib.import_module("choosy_module")
    with pytest.raises(CallError, match="cannot be imported by a worker: SystemExit: not here"):
        CallPool(1).call(choosy.f, {}, 5)


def test_no_more_calls_at_a_time_than_workers():
    pool = CallPool(2)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        times = [threads.submit(pool.call, naps, {"seconds": 0.05}, 5) for _ in range(16)]
        spans = [call.result() for call in times]
    assert max(sum(start <= moment < end for start, end in spans) for moment, _ in spans) == 2
    pool.close()
