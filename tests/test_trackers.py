"""Where a run's steps go beside its files: wandb, trackio, and a recipe's `on_step`."""

import json
import math
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ENV, ROOT
from test_tools import scored

from config import TrainConfig, UserError
from rollouts.group import Batch
from rollouts.run import check_packages
from train import main
from training.logs import RunLog
from utils import process_group

TIMES = {"time/train_s": 1.0, "time/wait_s": 0.0}


def config_of(folder, on_step=None, **fields):
    return TrainConfig(
        model_id="/nowhere",
        dataset_id="d.jsonl",
        reward_funcs=[len],
        output_dir=str(folder),
        on_step=on_step,
        **fields,
    )


BOTH = """
import json
import sys
sys.path[:0] = [{root!r}]
from config import TrainConfig
from rollouts.group import Batch, Completion, Group, Prompt
from training.logs import RunLog
from utils import process_group
def scored(rewards):
    completions = [Completion([6], [-1.0], "stop", 0) for _ in rewards]
    return Group(Prompt(0, [5], "a", {{}}), completions, ["b"] * 2, [[r] for r in rewards], rewards)
config = TrainConfig(
    model_id="m", dataset_id="d", reward_funcs=[len], output_dir={folder!r},
    use_wandb=True, use_trackio=True, wandb_project="mine", log_completions_steps=2,
)
times = {{"time/train_s": 1.0, "time/wait_s": 0.0}}
with process_group(60):
    log = RunLog(config, 4)
    log.step(0, {{"eval/reward": 0.25}})
    for step in (1, 2):
        log.step(step, times | {{"loss": float("nan")}}, Batch([scored([0.0, 1.0])]))
    before = log.state()
    log.close()
    log = RunLog(config, 4, before | {{"step": 2}})
    log.step(3, times, Batch([scored([1.0, 1.0])]))
    after = log.state()
    log.close()
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("mine")
rows = SQLiteStorage.get_logs("mine", after["run_id"])
settings = SQLiteStorage.get_run_config("mine", after["run_id"])
print(json.dumps([before, after, runs, rows, settings]))
"""


def test_wandb_and_trackio_get_the_same(tmp_path):
    """Both real, without a network; a run that goes on is the same run there, too."""
    pytest.importorskip("trackio")
    code = BOTH.format(root=str(ROOT), folder=str(tmp_path))
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "tracked"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ENV | env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after, runs, rows, settings = json.loads(done.stdout.splitlines()[-1])
    assert before == after
    assert len(runs) == 1
    assert settings["model_id"] == "m"
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["eval/reward"] == 0.25
    assert [row["train/reward"] for row in rows[1:]] == [0.5, 0.5, 1.0]
    assert math.isnan(rows[1]["train/loss"])
    assert [row["step"] for row in rows if "completions/table" in row] == [2]
    table = rows[2]["completions/table"]["_value"]
    assert [(cells["completion"], cells["reward"]) for cells in table] == [("b", 0.0), ("b", 1.0)]

    parts = [*(tmp_path / "wandb").glob(f"offline-run-*/run-{after['run_id']}.wandb")]
    assert len(parts) == 2
    written = b"".join(part.read_bytes() for part in parts)
    for name in (*rows[0], *rows[2]):
        assert name in ("timestamp", "step") or name.encode() in written, name


@pytest.mark.parametrize(("package", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_tracker_gets_metrics_and_a_table(monkeypatch, tmp_path, package, key):
    """Of a package with the interface of both, which need not be installed."""
    opened: list[Any] = []
    sent: list[Any] = []

    def init(**options):
        opened.append(options[key])
        return SimpleNamespace(**{key: "mine"})

    tracker = SimpleNamespace(
        init=init, log=lambda values, step: sent.append((step, values)), finish=lambda: sent.append("end"),
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, package, tracker)
    options = {f"use_{package}": True, "log_completions_steps": 2}
    with process_group(60):
        log = RunLog(config_of(tmp_path, **options), 4)
        for step in (1, 2):
            log.step(step, dict(TIMES), Batch([scored([0.0, 1.0])]))
        state = log.state()
        log.close()
        RunLog(config_of(tmp_path, **options), 4, state | {"step": 2}).close()
    assert opened == [state["run_id"]] * 2
    assert sent[2:] == ["end", "end"]
    (_, first), (step, second) = sent[:2]
    assert step == 2
    assert (first["train/reward"], first["time/train_s"]) == (0.5, 1.0)
    assert "completions/table" not in first
    table = second["completions/table"]
    assert [(row["completion"], row["reward"]) for row in table] == [("b", 0.0), ("b", 1.0)]
    assert table[0]["rewards"] == "{'len': 0.0}"
    assert "advantage" in table[0]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_package_is_named_at_once(monkeypatch, tmp_path, package):
    """Before servers are waited for, ten minutes long, and weights are loaded."""
    monkeypatch.setitem(sys.modules, package, None)
    config = config_of(tmp_path, server_timeout=600.0, **{f"use_{package}": True})
    with pytest.raises(UserError, match=f"use_{package} needs {package}: pip install {package}"):
        main(config)
    check_packages(config_of(tmp_path))


# -- A recipe's own --------------------------------------------------------------------------------


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
    with process_group(60):
        log = RunLog(config_of(tmp_path, on_step), 4)
        first = {"eval/reward": 0.25}
        log.step(0, first)
        log.step(1, dict(TIMES), batches[0])
        log.step(2, dict(TIMES), batches[1])
        log.state()
        assert [step for step, *_ in told] == [0, 1, 2]  # all are behind a checkpoint
        log.close()
    assert first == {"eval/reward": 0.25}
    assert [given for _, given, _ in told] == [[], *groups]
    assert [batch.groups for batch in batches] == groups
    threads = {thread for *_, thread in told}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("last", [0, 1, 2])
def test_an_error_of_on_step_is_heard_of(tmp_path, last):
    """At step 0 at once, before anything is trained; later at the end of the next step, or of the run."""

    def on_step(step, metrics, groups):
        if step == last:
            raise ZeroDivisionError("no such tracker")

    heard = []
    with process_group(60):
        log = RunLog(config_of(tmp_path, on_step), 4)
        for step in range(3):
            try:
                log.step(step, {"loss": 0.5})
            except UserError as error:
                heard.append((step, str(error)))
        with pytest.raises(UserError, match=r"on_step raised .*test_trackers\.py"):
            log.close()
    assert [step for step, _ in heard][:1] == {0: [0], 1: [2], 2: []}[last]
    assert all("on_step raised ZeroDivisionError: no such tracker" in said for _, said in heard)


@pytest.mark.parametrize(
    "on_step", [lambda step, metrics: None, lambda *, step, metrics, groups: None]
)
def test_another_signature_is_told_at_the_first_step(tmp_path, on_step):
    with process_group(60):
        log = RunLog(config_of(tmp_path, on_step), 4)
        with pytest.raises(UserError, match=r"^on_step raised TypeError: .* positional argument"):
            log.step(0, {"eval/reward": 0.5})


WRITTEN = """
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
sys.path[:0] = [{root!r}]
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

    code = WRITTEN.format(root=str(ROOT), folder=str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=True, env=ENV)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(row.step, row.value) for row in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]
    assert [(row.step, row.value) for row in events.Scalars("eval/reward")] == [(0, 0.25)]
    assert [row.step for row in events.Tensors("completion/text_summary")] == [1, 2]
