"""However a run ends, its last whole step is saved first; and what cannot be written or read is said in one line."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_server import fake_server
from helpers import ENV, RECIPE, ROOT, answer_in, on_forked_ranks, read
from test_resume import assert_identical, weights

from config import UserError, parse_args
from rollouts.rollouts import Rollouts
from train import main
from training.checkpoints import _make_way, find_start
from training.logs import encoded

HOOKS = """
import itertools
import os
import train
num_calls = {"advantages": 0, "loss": 0, "step": 0}
def count(name, last):
    num_calls[name] += 1
    if num_calls[name] == last and "ARMED" in os.environ: raise ZeroDivisionError(name)
def advantages(rewards, groups):
    count("advantages", 1 + 3)  # a trial comes first
    return train.compute_advantages(rewards)
def loss(*arguments):
    count("loss", 2 + 3)
    return train.grpo_loss(*arguments)
def told(step, metrics, groups):
    count("step", 1)
rollouts = itertools.count()
def flaky(server, prompt, sampling):
    if next(rollouts) % 5 == 2: raise TimeoutError("the environment is busy")
    return server.generate(prompt.token_ids, sampling)
def broken(server, prompt, sampling):
    raise TimeoutError("the environment is gone")
"""


@pytest.fixture(scope="module")
def hooked(models, tmp_path_factory):
    """A server, and a function: the command line of a run of it into a folder, whose hooks may fail in step 3."""
    folder = tmp_path_factory.mktemp("endings")
    numbers = itertools.count()
    with fake_server(models["untied"], answer_in(0.01)) as server:

        def command(output, *options):
            path = folder / f"recipe_{next(numbers)}.py"
            path.write_text(
                HOOKS + RECIPE.format(model=models["untied"], urls=[server.url], output=str(output))
            )
            fixed = ("--max_steps", "4", "--max_staleness", "0")
            return [str(path), *fixed, *map(str, options)]

        yield command


@pytest.fixture(scope="module")
def whole(hooked, tmp_path_factory):
    """The folder of a run of two ranks that nothing ends."""
    folder = tmp_path_factory.mktemp("whole")
    done = on_forked_ranks(2, ROOT / "train.py", *hooked(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("hook", ["advantage_fn=advantages", "loss_fn=loss", "on_step=told"])
def test_an_error_of_a_hook_saves_the_last_whole_step(hooked, whole, tmp_path, hook):
    """On rank 0 alone, as of advantages, or in its writer's thread, and on all ranks, as of a loss.

    Then the run goes on as if nothing was.
    """
    command = hooked(tmp_path / "run", f"--{hook}")
    failed = on_forked_ranks(2, ROOT / "train.py", *command, env={"ARMED": "1"})
    assert failed.returncode == 1
    assert "ZeroDivisionError" in failed.stdout + failed.stderr
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    # A rank may have two rows a step.
    assert saved.name in ("checkpoint-1", "checkpoint-2", "checkpoint-3")
    command += ["--resume_from_checkpoint", "auto"]
    done = on_forked_ranks(2, ROOT / "train.py", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_identical(weights(tmp_path / "run"), weights(whole))


def failing(function, last, error):
    """The function, whose call number `last` raises."""
    num_calls = 0

    def called(*arguments, **more):
        nonlocal num_calls
        num_calls += 1
        if num_calls == last:
            raise error
        return function(*arguments, **more)

    return called


PLACES = {  # what fails in step 3, or on the way to it; and the step that is saved
    "out of memory": ("train.grpo_loss", torch.OutOfMemoryError("no memory"), 2),
    "an exit": ("train.grpo_loss", SystemExit("enough"), 2),
    "the log": ("training.logs.encoded", PermissionError("read only"), 3),
    "the metrics": ("training.logs.batch_metrics", KeyError("no such"), 3),
    "rewards": ("rollouts.scoring.weighted", OverflowError("too large"), 2),
}


@pytest.mark.parametrize("place", PLACES)
def test_any_error_saves_the_last_whole_step(hooked, tmp_path, monkeypatch, place):
    path, error, step = PLACES[place]
    module, _, name = path.rpartition(".")
    owner = __import__(module, fromlist=[name])
    calls_a_step = {"encoded": 4, "weighted": 8}.get(name, 1)
    last = 2 * calls_a_step + 1
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), last, error))
    with pytest.raises((type(error), UserError)):
        main(parse_args(hooked(tmp_path / "run", "--batch_size", "8")))
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    assert saved.name in (
        f"checkpoint-{step}",
        f"checkpoint-{step + 1}",
    )  # threads hear of it later


def test_an_update_that_is_not_counted_yet_is_not_saved(hooked, tmp_path, monkeypatch):
    """Between the optimizer's step and the end of its batch: step 2's folder must not get step 3's weights."""
    end_batch = failing(Rollouts.end_batch, 3, KeyError("no such"))
    monkeypatch.setattr(Rollouts, "end_batch", end_batch)
    with pytest.raises(KeyError):
        main(parse_args(hooked(tmp_path / "run")))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_half_an_update_is_not_saved(hooked, tmp_path, monkeypatch):
    """An error in the middle of AdamW's step: some weights have moved, and no checkpoint may have them."""
    module = sys.modules["torch.optim.adam"]  # torch.optim hides it
    adam = module.adam
    num_calls = 0

    def half(*arguments, **more):
        nonlocal num_calls
        num_calls += 1
        adam(*arguments, **more)
        if num_calls == 2 * 2 + 2:  # of step 2: two groups a call, and a step fills in the state
            raise torch.OutOfMemoryError("half way")

    monkeypatch.setattr(module, "adam", half)
    with pytest.raises(torch.OutOfMemoryError):
        main(parse_args(hooked(tmp_path / "run")))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_rollout_that_fails_now_and_then_is_left_out(hooked, tmp_path):
    """Another prompt takes its place, in training; a held-out group stays empty. As often as it is, it is counted."""
    command = hooked(tmp_path / "run", "--rollout_fn", "flaky", "--eval_steps", "4")
    path = Path(command[0])
    path.write_text(
        path.read_text().replace("dataset_id=rows", "dataset_id=rows, eval_dataset_id=rows")
    )
    main(parse_args(command))
    dropped = read(tmp_path, "dropped")
    failed = read(tmp_path, "failed_rollouts")
    metrics = read(tmp_path, "metrics")
    assert {row["reason"] for row in dropped} == {"failed"}
    assert "TimeoutError: the environment is busy" in failed[0]["error"]
    assert sum(row.get("groups/dropped_failed", 0) for row in metrics) == len(dropped) > 0
    assert len(failed) > len(dropped)  # and those of the two evaluations
    assert metrics[-1]["rollouts_failed"] >= len(dropped)
    trained = [row["group"] for row in read(tmp_path, "completions")]
    assert len(trained) == 4 * 6 * 4
    assert not set(trained) & {row["group"] for row in dropped}
    assert len(read(tmp_path, "held_out")) < 2 * 40


def test_a_rollout_that_only_fails_ends_the_run(hooked, tmp_path):
    with pytest.raises(UserError, match="the environment is gone .*; so did \\d+ calls in a row"):
        main(parse_args(hooked(tmp_path / "run", "--rollout_fn", "broken")))


# -- What UTF-8 cannot hold --------------------------------------------------------------------------------------------


def test_half_a_surrogate_pair_is_escaped(models, tmp_path):
    half = json.loads('"a\\ud83d"')
    (line,) = encoded([{"prompt": [{"content": half}], half: 1.5, "none": math.nan}]).splitlines()
    assert json.loads(line) == {
        "prompt": [{"content": "a&#55357;"}],
        "a&#55357;": 1.5,
        "none": None,
    }


def test_a_run_with_half_a_surrogate_pair_in_a_column(hooked, tmp_path):
    command = hooked(tmp_path / "run", "--max_steps", "1")
    path = Path(command[0])
    text = path.read_text().replace(
        '"prompt": f"{i}+{i}="', '"prompt": f"{i}+{i}=", "note": "\\ud83d"'
    )
    path.write_text(text)
    main(parse_args(command))
    assert {row["columns"]["note"] for row in read(tmp_path, "completions")} == {"&#55357;"}


# -- Damaged checkpoints -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(hooked, tmp_path_factory):
    """A folder with checkpoints 1 to 4, and the command line of its run."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    command = hooked(folder, "--save_steps", "1")
    main(parse_args(command))
    return folder, command


FILES = [
    "trainer/state.pt", "trainer/config.json", "trainer/.metadata", "trainer/__0_0.distcp", "model.safetensors",
    "config.json",
]  # fmt: skip


@pytest.mark.parametrize("size", [None, 0, 40])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named(saved, tmp_path, name, size):
    """By whatever reads it, in one line; without it `auto` goes on from the one before."""
    folder, command = saved
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    damaged = run / "checkpoint-4"
    file = damaged / name
    if size is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:size])
    options = ["--output_dir", str(run), "--max_steps", "5", "--resume_from_checkpoint", "auto"]
    with pytest.raises(UserError) as error:
        main(parse_args([*command, *options]))
    (line,) = str(error.value).splitlines()
    assert str(damaged) in line
    assert name in line or "the weights of" in line or f"{damaged}/trainer cannot be" in line, line

    shutil.rmtree(damaged)
    main(parse_args([*command, *options]))
    assert (run / "checkpoint-5").is_dir()


def test_a_missing_file_of_several_is_a_fault(saved, tmp_path):
    """As after a copy that was broken off: the index lists what there must be."""
    folder, command = saved
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    checkpoint = run / "checkpoint-4"
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (checkpoint / "model.safetensors").rename(checkpoint / names[0])
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    options = ["--output_dir", str(run), "--max_steps", "5", "--resume_from_checkpoint", "auto"]
    with pytest.raises(UserError, match=f"the weights of {checkpoint} cannot .*{names[1]}"):
        main(parse_args([*command, *options]))


def test_what_is_no_checkpoint_of_ours_blocks_nothing(saved, tmp_path):
    """Another trainer's folder, and what is named alike."""
    _, command = saved
    run = tmp_path / "run"
    (run / "checkpoint-500").mkdir(parents=True)
    (run / "checkpoint-500" / "model.safetensors").write_bytes(b"")
    (run / "checkpoint-of-9" / "trainer").mkdir(parents=True)
    options = ["--output_dir", str(run), "--resume_from_checkpoint", "auto"]
    assert find_start(parse_args([*command, *options])) == (None, None)


def test_a_damaged_line_of_the_log(saved, tmp_path):
    folder, command = saved
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1] = "garbage"
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    options = ["--output_dir", str(run), "--max_steps", "5", "--resume_from_checkpoint", "auto"]
    with pytest.raises(UserError, match=f"{run}/metrics.jsonl: line 2 is damaged: remove it"):
        main(parse_args([*command, *options]))


# -- the hub -----------------------------------------------------------------------------------------------------------

PUSHED = ["--push_to_hub", "true", "--hub_repo_id"]


@pytest.mark.parametrize(
    ("repo_id", "offline", "why"),
    [
        ("me/my model (v1)", False, "Repo id must use alphanumeric"),
        ("a/b/c", False, "Repo id must be in the form"),
        ("me/model", True, "[Oo]ffline"),
        ("me/model", False, "[Cc]onnect"),
    ],
)
def test_a_hub_that_takes_nothing_is_one_line_at_the_start(hooked, tmp_path, repo_id, offline, why):
    """Before a policy is loaded: the name, the way, and what the hub answers are tried."""
    env = {"HF_HUB_OFFLINE": str(int(offline)), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = hooked(tmp_path / "run", *PUSHED, repo_id)
    words = [sys.executable, str(ROOT / "train.py"), *command]
    done = subprocess.run(
        words, cwd=ROOT, env=ENV | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.match(f"error: hub_repo_id: nothing can be pushed there: .*{why}", last), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_hub_is_asked_on_rank_0_before_a_policy_is_loaded(hooked, tmp_path, monkeypatch):
    class Hub:
        def create_repo(self, repo_id, **options):
            raise PermissionError(f"403 Forbidden: {repo_id} is another's")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr("train.build_policy", lambda *_: pytest.fail("a policy is loaded"))
    with pytest.raises(
        UserError, match="^hub_repo_id: nothing .* 403 Forbidden: you/it is another's$"
    ):
        main(parse_args(hooked(tmp_path / "run", *PUSHED, "you/it")))


def test_failures_of_a_start_that_came_to_no_step_are_not_the_next_runs(tmp_path):
    (tmp_path / "failed_rewards.jsonl").write_text("{}\n")
    (tmp_path / "mine.jsonl").write_text("{}\n")
    _make_way(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


def test_a_repository_of_anothers_is_known_at_the_start(hooked, tmp_path, monkeypatch):
    """To make it once more is no error on the hub."""

    class Hub:
        def create_repo(self, repo_id, **options):
            pass

        def auth_check(self, repo_id, write):
            assert write
            raise PermissionError("403 Forbidden")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    with pytest.raises(UserError, match="^hub_repo_id: nothing .* 403 Forbidden$"):
        main(parse_args(hooked(tmp_path / "run", *PUSHED, "you/it")))


def test_an_upload_that_fails_keeps_the_checkpoint(hooked, tmp_path, monkeypatch):
    """One line says how to upload by hand; and the same command, resumed, tries again."""
    asked = []

    class Hub:
        def auth_check(self, repo_id, write):
            assert write

        def create_repo(self, repo_id, **options):
            asked.append(repo_id)

        def upload_folder(self, **options):
            if len(asked) == 1:
                raise ConnectionError("the hub\nis away")
            asked.append(options["folder_path"])

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    run = tmp_path / "run"
    command = hooked(run, *PUSHED, "me/it", "--resume_from_checkpoint", "auto")
    with pytest.raises(UserError) as raised:
        main(parse_args(command))
    (line,) = str(raised.value).splitlines()
    assert f"`hf upload me/it {run}/checkpoint-4 . --exclude 'trainer/*'`" in line
    assert line.endswith("ConnectionError: the hub is away")
    assert find_start(parse_args(command))[0] == run / "checkpoint-4"
    assert (run / "checkpoint-4" / "model.safetensors").exists()
    main(parse_args(command))
    assert asked == ["me/it", "me/it", run / "checkpoint-4"]
