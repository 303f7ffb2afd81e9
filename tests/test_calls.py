"""Calls in worker processes: values, failures, time-outs, what cannot be sent, orphans."""

import concurrent.futures
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT
from some_calls import add, dies, fails, hangs, in_one_loop, later, leaves, sandbox, unsendable

from recipes import workers
from recipes.workers import CallError, CallPool


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


def test_closures_run_in_a_thread(pool):
    held = object()
    assert pool.call(lambda a: (a, held), {"a": 2}, 5) == (2, held)
    with pytest.raises(CallError, match="took longer than 0.1 s"):
        pool.call(lambda: time.sleep(2), {}, 0.1)
    with pytest.raises(CallError, match="raised ZeroDivisionError"):
        pool.call(lambda: 1 / 0, {}, 5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, "raised KeyError: 'gold'"),
        (leaves, "raised SystemExit: 3"),
        (dies, r"ended its process \(exit code 7\)"),
        (unsendable, "returned what no process can send"),
    ],
)
def test_failures(pool, function, message):
    for _ in range(3):  # more often than there are workers
        with pytest.raises(CallError, match=message):
            pool.call(function, {}, 5)
    assert pool.call(add, {"a": 1, "b": 1}, 5)[0] == 2


def test_a_stuck_call_is_killed_and_its_worker_replaced(pool, tmp_path):
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(pool.call, hangs, {"path": tmp_path / str(i)}, 0.5) for i in range(4)]
        for call in calls:
            with pytest.raises(CallError, match="took longer than 0.5 s"):
                call.result()
    assert time.monotonic() - started < 20
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert pool.call(add, {"a": 1, "b": 2}, 5)[0] == 3


def test_a_function_of_a_file_that_nothing_imports(pool, tmp_path):
    path = tmp_path / "odd name.py"
    path.write_text("class Twice:\n    def __call__(self, a): return 2 * a\ndef f(a): return 3 * a\ntwice = Twice()\n")
    spec = importlib.util.spec_from_file_location("recipe_odd", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe_odd"] = module
    spec.loader.exec_module(module)
    assert pool.call(module.f, {"a": 2}, 5) == 6
    assert pool.call(module.twice, {"a": 2}, 5) == 4


ORPHAN = """
import sys, threading; sys.path[:0] = {path!r}
from pathlib import Path
from helpers import ROOT
from some_calls import hangs
from recipes.workers import CallPool
threading.Thread(target=lambda: CallPool(1).call(hangs, {{"path": Path({note!r})}}, 60), daemon=True).start()
while not Path({note!r}).exists() or not Path({note!r}).read_text(): pass
import os; os._exit(0)
"""


def test_a_stuck_worker_ends_with_its_trainer(tmp_path):
    note = tmp_path / "pid"
    script = ORPHAN.format(path=[*sys.path[:3], str(ROOT)], note=str(note))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{note.read_text()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_a_function_of_the_main_script(tmp_path):
    """Without running the script's guarded part again."""
    script = tmp_path / "main.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\nfrom recipes.workers import CallPool\n"
        "def f(a): return a + 1\n"
        "if __name__ == '__main__':\n    pool = CallPool(1)\n    print(pool.call(f, {'a': 1}, 5))\n    pool.close()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "2"


def test_what_a_stuck_function_started_ends_with_it(pool, tmp_path):
    """As a sandbox that runs code in a process of its own."""
    with pytest.raises(CallError, match="took longer than 0.5 s"):
        pool.call(sandbox, {"path": tmp_path / "pid"}, 0.5)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_import_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "IMPORT_TIMEOUT_S", 0.5)
    path = tmp_path / "slow_module.py"
    path.write_text("import sys, time\nif not hasattr(sys, 'ours'): time.sleep(60)\ndef f(): return 1\n")
    monkeypatch.setattr(sys, "ours", True, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    slow = importlib.import_module("slow_module")
    pool = CallPool(1)
    with pytest.raises(CallError, match="took longer than 0.5 s to be imported"):
        pool.call(slow.f, {}, 5)
    pool.close()


def test_threads_are_bounded_too():
    pool, running, most = CallPool(2), [0], [0]

    def count():
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        running[0] -= 1

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for call in [threads.submit(pool.call, count, {}, 5) for _ in range(16)]:
            call.result()
    assert most[0] <= 2
    pool.close()
