"""Where a run's steps go beside its files: wandb, trackio, and a recipe's `on_step`."""

import json
import math
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ENV, ROOT, finished
from test_config import make
from test_tools import TIMES, logging, scored

from config import UserError
from rollouts.group import Batch
from rollouts.run import check_packages
from train import main


def log_two_runs(folder, package):
    """Three steps, the last one by a run that goes on; returns the name that the tracker knows it by."""
    options = {f"use_{package}": True, "wandb_project": "mine", "log_completions_steps": 2}
    with logging(folder, **options) as log:
        log.step(0, {"eval/reward": 0.25}, Batch())
        for step in (1, 2):
            log.step(step, TIMES | {"loss": float("nan")}, Batch([scored([0.0, 1.0])]))
        state = log.state()
    with logging(folder, start=state | {"step": 2}, **options) as log:
        log.step(3, TIMES, Batch([scored([1.0, 1.0])]))
    return state["run_id"]


def assert_logged(rows, table):
    """The same, whoever tracks it: metrics of each step, and the completions of the second."""
    assert rows[0]["eval/reward"] == 0.25
    assert [row["train/reward"] for row in rows[1:]] == [0.5, 0.5, 1.0]
    assert rows[1]["time/train_s"] == 1.0
    assert math.isnan(rows[1]["train/loss"])
    assert ["completions/table" in row for row in rows] == [False, False, True, False]
    assert [(cells["completion"], cells["reward"]) for cells in table] == [("b", 0.0), ("b", 1.0)]
    assert table[0]["rewards"] == "{'len': 0.0}"
    assert "advantage" in table[0]


@pytest.mark.parametrize(("package", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_tracker_gets_metrics_and_a_table(monkeypatch, tmp_path, package, key):
    """Of a package with the interface of both, which need not be installed; a run that goes on is the same there."""
    opened: list[str] = []
    sent: list[Any] = []

    def init(**options):
        opened.append(options[key])
        return SimpleNamespace(log=lambda values, step: sent.append(values))

    tracker = SimpleNamespace(
        init=init, finish=lambda: sent.append("end"),
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, package, tracker)
    assert opened == [log_two_runs(tmp_path, package)] * 2
    assert [sent.pop(3), sent.pop()] == ["end", "end"]
    assert_logged(sent, sent[2]["completions/table"])


def test_trackio(tmp_path):
    """The real one, without a network (wandb: test_train.py)."""
    pytest.importorskip("trackio")
    code = "import json, test_trackers\n"
    code += f"name = test_trackers.log_two_runs({str(tmp_path)!r}, 'trackio')\n"
    code += "from trackio.sqlite_storage import SQLiteStorage as kept\n"
    code += "print(json.dumps([name, kept.get_runs('mine'), kept.get_logs('mine', name)]))"
    env = ENV | {"TRACKIO_DIR": str(tmp_path / "tracked")}
    done = finished(sys.executable, "-c", code, env=env, cwd=ROOT / "tests")
    name, runs, rows = json.loads(done.stdout.splitlines()[-1])
    assert runs == [name]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert_logged(rows, rows[2]["completions/table"]["_value"])


NEEDED = {"use_wandb": "wandb", "use_trackio": "trackio"}
NEEDED |= {"adam_8bit": "torchao", "base_4bit": "bitsandbytes"}


@pytest.mark.parametrize(("field", "package"), NEEDED.items())
def test_a_missing_package_is_named_at_once(monkeypatch, field, package):
    """Before servers are waited for, ten minutes long, and weights are loaded."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"^{field} needs {package}: pip install {package}"):
        main(make(server_timeout=600.0, use_peft=field == "base_4bit", **{field: True}))
    check_packages(make())


def test_on_step_gets_what_is_on_the_disk(tmp_path):
    """Each step once and in order, in one thread beside the loop's; what it does to its metrics stays there."""
    told = []

    def on_step(step, metrics, groups):
        rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
        told.append((step, list(groups), threading.get_ident()))
        assert json.loads(rows[-1]) == {"step": step, **metrics}
        metrics.clear()
        groups.clear()

    batches = [Batch([scored([0.0, 1.0]), scored([1.0, 1.0])]) for _ in range(2)]
    groups = [list(batch.groups) for batch in batches]
    first = {"eval/reward": 0.25}
    with logging(tmp_path, on_step=on_step) as log:
        log.step(0, first, Batch())
        for step, batch in enumerate(batches, 1):
            log.step(step, TIMES, batch)
        log.state()
        assert [step for step, *_ in told] == [0, 1, 2]  # all are behind a checkpoint
    assert first == {"eval/reward": 0.25}
    assert [given for _, given, _ in told] == [[], *groups]
    assert [batch.groups for batch in batches] == groups
    (thread,) = {thread for *_, thread in told}
    assert thread != threading.get_ident()


@pytest.mark.parametrize(("last", "heard_at"), [(0, [0]), (1, [2]), (2, [])])
def test_an_error_of_on_step_is_heard_of(tmp_path, last, heard_at):
    """At step 0 at once, before anything is trained; later at the end of the next step, or of the run."""

    def on_step(step, metrics, groups):
        if step == last:
            raise ZeroDivisionError("no such tracker")

    heard = []
    at_the_end = pytest.raises(UserError, match=r"on_step raised .*test_trackers\.py")
    with at_the_end, logging(tmp_path, on_step=on_step) as log:
        for step in range(3):
            try:
                log.step(step, {"loss": 0.5}, Batch())
            except UserError as error:
                heard.append((step, str(error)))
    assert [step for step, _ in heard][:1] == heard_at
    assert all("on_step raised ZeroDivisionError: no such tracker" in said for _, said in heard)


WRITTEN = """
import os
from pathlib import Path
from recipes import trackers
from rollouts.group import Completion, Group, Prompt
trackers.FOLDER = Path({folder!r})
group = Group(Prompt(0, [5], "a", {{}}), [Completion([6], [-1.0], "stop", 0)], ["b"])
trackers.to_tensorboard(0, {{"eval/reward": 0.25}}, [])
trackers.to_tensorboard(1, {{"reward": 0.5, "loss": float("nan")}}, [group])
trackers.to_tensorboard(2, {{"reward": 0.75}}, [group])
os._exit(0)
"""


def test_tensorboard(tmp_path):
    """All that the recipe wrote is there after an end as the trainer's, which waits for no thread."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code = WRITTEN.format(folder=str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=True, env=ENV, cwd=ROOT)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(row.step, row.value) for row in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]
    assert [(row.step, row.value) for row in events.Scalars("eval/reward")] == [(0, 0.25)]
    assert [row.step for row in events.Tensors("completion/text_summary")] == [1, 2]
