"""However a run ends, its last whole step is saved first; and what cannot be written or read is said in one line."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, change, checkpoints_of, flags, on_forked_ranks, read
from test_resume import assert_identical, weights

import train
import training.logs
from config import UserError, parse_args
from rollouts.rollouts import Rollouts
from train import main
from training.checkpoints import find_start

# Train is imported by the hooks that need it: a worker for rewards would need seconds.
HOOKS = """
import itertools
import os
num_calls = {"advantages": 0, "loss": 0, "step": 0}
def count(name, last):
    num_calls[name] += 1
    if num_calls[name] == last and "ARMED" in os.environ: raise ZeroDivisionError(name)
def advantages(rewards, groups):
    from train import compute_advantages
    count("advantages", 1 + 3)  # a trial comes first
    return compute_advantages(rewards)
def loss(*arguments):
    from train import grpo_loss
    count("loss", 2 + 3)
    return grpo_loss(*arguments)
def told(step, metrics, groups):
    count("step", 1)
rollouts = itertools.count()
def flaky(server, prompt, sampling):
    if next(rollouts) % 5 == 2: raise TimeoutError("the environment is busy")
    return server.generate(prompt.token_ids, sampling)
def broken(server, prompt, sampling):
    raise TimeoutError("the environment is gone")
"""


@pytest.fixture
def command(recipe, stand_in):
    """The command line of a run whose hooks, where they are armed, fail in step 3."""
    path = Path(recipe(stand_in()))
    path.write_text(HOOKS + path.read_text())
    return lambda **fields: [str(path), *flags(**{"max_steps": 4, **fields})]


@pytest.fixture
def trained(command):
    """Trains such a run in this process."""
    return lambda **fields: main(parse_args(command(**fields)))


def test_an_error_of_a_hook_saves_the_last_whole_step(command, tmp_path):
    """On rank 0 alone, or in its writer's thread, or on all ranks; then the run goes on as if nothing was."""

    def on_two_ranks(status=0, env=(), **fields):
        done = on_forked_ranks(2, ROOT / "train.py", *command(**fields), status=status, env=env)
        assert ("ZeroDivisionError" in done.stdout + done.stderr) == (status == 1)

    on_two_ranks(output_dir=tmp_path / "whole")
    for field, hook in (("advantage_fn", "advantages"), ("on_step", "told"), ("loss_fn", "loss")):
        fields = {field: hook, "output_dir": tmp_path / hook}
        on_two_ranks(status=1, env={"ARMED": "1"}, **fields)
        (saved,) = checkpoints_of(tmp_path / hook)
        # A rank may have two rows a step.
        assert saved in ("checkpoint-1", "checkpoint-2", "checkpoint-3")
        on_two_ranks(resume_from_checkpoint="auto", **fields)
        assert_identical(weights(tmp_path / hook), weights(tmp_path / "whole"))


def failing(function, last, error):
    """The function, whose call number `last` raises."""
    numbers = itertools.count(1)

    def called(*arguments, **more):
        if next(numbers) == last:
            raise error
        return function(*arguments, **more)

    return called


FULL = torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize(
    ("owner", "name", "call", "error", "saved"),
    [
        # In step 3, or on the way to it; threads hear of it later.
        (train, "grpo_loss", 3, FULL, (2, 3)),
        (train, "grpo_loss", 3, SystemExit("enough"), (2, 3)),
        (training.logs, "encoded", 2 * 4 + 1, PermissionError("read only"), (3, 4)),
        (training.logs, "batch_metrics", 3, KeyError("no such"), (3, 4)),
        # Half an update: no folder of the step before may get its weights.
        (Rollouts, "end_batch", 3, FULL, ()),
        # Step 2 of AdamW, over two groups; a step before the first fills in the state.
        (sys.modules["torch.optim.adam"], "adam", 2 * 2 + 2, FULL, ()),  # torch.optim hides it
    ],
)
def test_any_error_saves_the_last_whole_step(
    trained, tmp_path, monkeypatch, owner, name, call, error, saved
):
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), call, error))
    with pytest.raises((type(error), UserError)):
        trained(batch_size=8)
    allowed = [[f"checkpoint-{step}"] for step in saved] or [[]]
    assert checkpoints_of(tmp_path / "run") in allowed


def test_a_rollout_that_fails_now_and_then_is_left_out(command, trained, tmp_path):
    """Another prompt takes its place, in training; a held-out group stays empty. As often as it is, it is counted."""
    change(command()[0], "dataset_id=rows", "dataset_id=rows, eval_dataset_id=rows")
    trained(rollout_fn="flaky", eval_steps=4)
    names = ("dropped", "failed_rollouts", "metrics")
    dropped, failed, metrics = (read(tmp_path, name) for name in names)
    assert {row["reason"] for row in dropped} == {"failed"}
    assert "TimeoutError: the environment is busy" in failed[0]["error"]
    assert sum(row.get("groups/dropped_failed", 0) for row in metrics) == len(dropped) > 0
    assert len(failed) > len(dropped)  # and those of the two evaluations
    assert metrics[-1]["rollouts_failed"] >= len(dropped)
    completions = [row["group"] for row in read(tmp_path, "completions")]
    assert len(completions) == 4 * 6 * 4
    assert not set(completions) & {row["group"] for row in dropped}
    assert len(read(tmp_path, "held_out")) < 2 * 40


def test_a_rollout_that_only_fails_ends_the_run(trained):
    with pytest.raises(UserError, match="the environment is gone .*; so did \\d+ calls in a row"):
        trained(rollout_fn="broken")


def test_half_a_surrogate_pair_is_escaped(command, trained, tmp_path):
    """UTF-8 cannot hold it, and data may have it: in a column, or its name, beside what JSON has no number for."""
    note = '"note": {"a\\ud83d": ["\\ud83d", float("nan")]}'
    change(command()[0], '"prompt": f"{i}+{i}="', f'"prompt": f"{{i}}+{{i}}=", {note}')
    trained(max_steps=1)
    notes = [row["columns"]["note"] for row in read(tmp_path, "completions")]
    assert notes == [{"a&#55357;": ["&#55357;", None]}] * 24


# -- Damaged files -----------------------------------------------------------------------------------------------------

FILES = [
    "trainer/state.pt", "trainer/config.json", "trainer/.metadata", "trainer/__0_0.distcp", "model.safetensors",
    "config.json",
]  # fmt: skip


def test_a_damaged_checkpoint_is_named(trained, tmp_path):
    """By whatever reads it, in one line: a file is missing, empty, or cut off."""
    trained()
    checkpoint = tmp_path / "run" / "checkpoint-4"

    def refusal():
        with pytest.raises(UserError) as error:
            trained(max_steps=5, resume_from_checkpoint="auto")
        (line,) = str(error.value).splitlines()
        return line

    for name, size in itertools.product(FILES, (None, 0, 40)):
        file = checkpoint / name
        whole = file.read_bytes()
        file.unlink()
        if size is not None:
            file.write_bytes(whole[:size])
        told = f"{checkpoint}.*{name}|the weights of {checkpoint}|{checkpoint}/trainer cannot be"
        assert re.search(told, line := refusal()), (name, size, line)
        file.write_bytes(whole)

    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(f"{metrics.read_text().splitlines()[0]}\ngarbage\n")
    assert f"{metrics} has a damaged line: remove it" in refusal()

    # As after a copy that was broken off: the index lists what there must be.
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (checkpoint / "model.safetensors").rename(checkpoint / names[0])
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert re.search(f"the weights of {checkpoint} cannot .*{names[1]}", refusal())


# -- the hub -----------------------------------------------------------------------------------------------------------

PUSHED = {"push_to_hub": True, "hub_repo_id": "me/it"}


class Hub:
    """One that takes everything."""

    def create_repo(self, repo_id, private, exist_ok):
        assert (repo_id, private, exist_ok) == ("me/it", True, True)

    def auth_check(self, repo_id, write):
        assert (repo_id, write) == ("me/it", True)


@pytest.mark.parametrize("question", ["create_repo", "auth_check"])
def test_a_repository_of_anothers_is_known_at_the_start(trained, monkeypatch, question):
    """Before a policy is loaded; to make it once more is no error on the hub."""
    forbid = failing(getattr(Hub, question), 1, PermissionError("403 Forbidden: it is another's"))
    monkeypatch.setattr(Hub, question, forbid)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("train.build_policy", lambda *_: pytest.fail("a policy is loaded"))
    with pytest.raises(UserError, match="^hub_repo_id: nothing .* 403 Forbidden: it is another's"):
        trained(**PUSHED)


@pytest.mark.parametrize(
    ("repo_id", "offline", "why"),
    [
        ("me/my model (v1)", False, "Repo id must use alphanumeric"),
        ("me/model", True, "[Oo]ffline"),
        ("me/model", False, "[Cc]onnect"),
    ],
)
def test_a_hub_that_takes_nothing_is_known_at_the_start(
    trained, tmp_path, monkeypatch, repo_id, offline, why
):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(UserError, match=f"^hub_repo_id: nothing can be pushed there: .*{why}"):
        trained(**{**PUSHED, "hub_repo_id": repo_id})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_upload_that_fails_keeps_the_checkpoint(command, tmp_path, monkeypatch):
    """One line says how to upload by hand; and the same command, resumed, tries again."""
    uploaded: list[dict] = []
    note = lambda _, **options: uploaded.append(options)
    upload = failing(note, 1, ConnectionError("the hub\nis away"))
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "upload_folder", upload, raising=False)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    words = command(**PUSHED, resume_from_checkpoint="auto")
    with pytest.raises(UserError) as raised:
        main(parse_args(words))
    (line,) = str(raised.value).splitlines()
    assert f"`hf upload me/it {checkpoint} . --exclude 'trainer/*'`" in line
    assert line.endswith("ConnectionError: the hub is away")
    assert find_start(parse_args(words))[0] == checkpoint
    names = {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "trainer"} <= names

    main(parse_args(words))
    given = {"repo_id": "me/it", "folder_path": checkpoint, "ignore_patterns": "trainer/*"}
    assert uploaded == [given]
