"""Runs that stop and go on: bit for bit the same, every group once, and nothing half-written."""

import ast
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import launch
import pytest
import torch
from fake_server import fake_server
from helpers import (
    ENV,
    RECIPE,
    ROOT,
    answer_in,
    free_port,
    make_tokenizer,
    on_forked_ranks,
    read,
    saved_state,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import chat_template_utils

import train
import training.model
import vllm_client
from config import TrainConfig, UserError, parse_args
from rollouts.rollouts import Rollouts
from train import main
from training.checkpoints import (
    MAY_CHANGE,
    Checkpoints,
    _remove,
    find_start,
)
from training.logs import cut_after
from training.model import with_bf16
from weights.publish import published_weights


@pytest.fixture
def start(models, tmp_path):
    """A server, and the command line of a run of it into `run` or another folder."""
    with fake_server(models["untied"], answer_in(0.02)) as server:
        path = tmp_path / f"recipe_{tmp_path.name}.py"
        path.write_text(
            RECIPE.format(model=models["untied"], urls=[server.url], output=str(tmp_path / "run"))
        )
        yield lambda *options: [str(path), "--max_steps", "4", *map(str, options)]


def weights(folder, step=4):
    name = (
        "adapter_model"
        if (folder / f"checkpoint-{step}" / "adapter_model.safetensors").exists()
        else "model"
    )
    return load_file(folder / f"checkpoint-{step}" / f"{name}.safetensors")


def assert_identical(one, two):
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name


def run(ranks, command):
    """In this process where one rank is enough, else under torchrun."""
    if ranks == 1:
        main(parse_args(command))
        return
    done = on_forked_ranks(ranks, ROOT / "train.py", *command)
    assert done.returncode == 0, done.stderr[-3000:]


KINDS: dict[str, tuple[int, list]] = {
    "plain": (1, []),
    "ddp": (2, ["--num_minibatches", 2, "--warmup_ratio", 0.5]),
    "fsdp": (2, ["--use_fsdp", "true", "--lr_scheduler", "cosine"]),
    "lora": (1, ["--use_peft", "true", "--lora_dropout", 0.2, "--beta", 0.01]),
    "fsdp_lora": (2, ["--use_fsdp", "true", "--use_peft", "true"]),
    "moving": (1, ["--beta", 0.1, "--reference_decay", 0.5]),
    "moving_fsdp": (2, ["--beta", 0.1, "--reference_decay", 0.5, "--use_fsdp", "true"]),
    "moving_lora": (
        1,
        ["--beta", 0.1, "--reference_decay", 0, "--reference_steps", 2, "--use_peft", "true"],
    ),
    "moving_fsdp_lora": (
        2,
        ["--beta", 0.1, "--reference_decay", 0.7, "--use_peft", "true", "--use_fsdp", "true"],
    ),
    "order": (1, ["--order_fn", "recipes.curriculum.prefer_half_solved"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_bit_for_bit(start, tmp_path, kind):
    """Four steps at once, and the last two of them again, from the checkpoint, in other processes."""
    ranks, options = KINDS[kind]
    run(ranks, start(*options, "--save_steps", 2))
    whole = {name: read(tmp_path, name) for name in ("metrics", "completions")}
    expected = weights(tmp_path / "run")
    middle = tmp_path / "run" / "checkpoint-2"
    done = on_forked_ranks(
        ranks, ROOT / "train.py", *start(*options, "--resume_from_checkpoint", middle)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_identical(weights(tmp_path / "run"), expected)
    again = {name: read(tmp_path, name) for name in ("metrics", "completions")}
    assert again["completions"] == whole["completions"]
    assert not [
        *(tmp_path / "run").glob("checkpoint-*/README.md")
    ]  # peft's empty card, which the hub may refuse
    for one, two in zip(again["metrics"], whole["metrics"], strict=True):
        for name in (
            "step",
            "reward",
            "loss",
            "grad_norm",
            "learning_rate",
            "num_tokens",
            "policy_version",
        ):
            assert one[name] == two[name]


def test_another_number_of_ranks_goes_on(start, tmp_path):
    """FSDP2's shards of two ranks, loaded by one under DDP: the run of one rank, to the rounding of other sums."""
    run(1, start())
    expected = weights(tmp_path / "run")
    run(2, start("--use_fsdp", "true", "--save_steps", 2))
    run(
        1,
        start("--use_fsdp", "false", "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-2"),
    )
    for name, weight in weights(tmp_path / "run").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def test_a_run_goes_on_with_the_date_of_its_beginning(start, tmp_path, monkeypatch):
    """On another day the template would write another prompt."""

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=1)

    dated = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(
        "rollouts.run.load_processor", lambda _: make_tokenizer(chat_template=dated)
    )
    options = ["--save_steps", 1]
    main(parse_args(start(*options, "--max_steps", 2)))
    began = datetime.fromisoformat(saved_state(tmp_path / "run" / "checkpoint-2")["began"])

    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    main(parse_args(start(*options, "--resume_from_checkpoint", "auto", "--max_steps", 3)))
    later = saved_state(tmp_path / "run" / "checkpoint-3")
    assert datetime.fromisoformat(later["began"]) == began

    del later["began"]  # as a checkpoint of an earlier version
    torch.save(later, tmp_path / "run" / "checkpoint-3" / "trainer" / "state.pt")
    monkeypatch.setattr(chat_template_utils, "datetime", datetime)
    main(parse_args(start(*options, "--resume_from_checkpoint", "auto")))
    assert "began" in saved_state(tmp_path / "run" / "checkpoint-4")


ADAPTER = ["--use_peft", "true", "--lora_target_modules", "q_proj,lm_head"]


@pytest.mark.parametrize("own", [[], ADAPTER], ids=["whole", "lora"])
def test_a_moving_reference_is_the_same_on_shards(start, tmp_path, own):
    """FSDP2 on two ranks against one rank; the head, and here its adapter, are in FSDP2's root."""
    options = ["--beta", 0.5, "--reference_decay", 0.5, *own]
    options += ["--learning_rate", 0.05 if own else 0.003]
    run(1, start(*options))
    expected, whole = weights(tmp_path / "run"), read(tmp_path, "metrics")
    run(2, start(*options, "--use_fsdp", "true"))
    for one, two in zip(whole, read(tmp_path, "metrics"), strict=True):
        assert two["kl"] == pytest.approx(one["kl"], rel=1e-2, abs=1e-6)
    assert max(row["kl"] for row in whole) > 1e-3
    for name, weight in weights(tmp_path / "run").items():
        torch.testing.assert_close(weight, expected[name], rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("own", [[], ["--use_peft", "true"]], ids=["whole", "lora"])
def test_sampling_defaults_that_transformers_does_not_save(models, tmp_path, own):
    """The run of such a model saves, goes on, and its checkpoint has the defaults that the model has."""
    folder = tmp_path / "greedy"
    shutil.copytree(models["untied"], folder)
    file = "generation_config.json"
    found = json.loads((folder / file).read_text()) | {"min_p": 0.05, "pad_token_id": -1}
    (folder / file).write_text(json.dumps(found))
    path = tmp_path / f"recipe_{tmp_path.name}.py"
    with fake_server(str(folder), answer_in(0.02)) as server:
        path.write_text(
            RECIPE.format(model=str(folder), urls=[server.url], output=str(tmp_path / "run"))
        )
        for steps in ("1", "2"):
            command = [path, "--max_steps", steps, "--resume_from_checkpoint", "auto", *own]
            main(parse_args([*map(str, command)]))
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert (checkpoint / "tokenizer.json").exists()
    if not own:
        assert json.loads((checkpoint / file).read_text()) == found
        AutoModelForCausalLM.from_pretrained(checkpoint)


def chosen(command):
    """The checkpoint that a command goes on from."""
    return find_start(with_bf16(parse_args(command)))[0]


def test_auto_and_keep_last(start, tmp_path):
    """`auto` starts anew where there is nothing, and goes on from the checkpoint of the largest step."""
    main(
        parse_args(start("--resume_from_checkpoint", "auto", "--save_steps", 1, "--keep_last_n", 2))
    )
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [
        "checkpoint-3",
        "checkpoint-4",
    ]
    assert chosen(start("--resume_from_checkpoint", "auto")) == folder / "checkpoint-4"
    (folder / "checkpoint-9.part").mkdir()
    (folder / "checkpoint-8").mkdir()  # of something else
    (folder / "checkpoint-of-9").mkdir()
    options = [
        "--resume_from_checkpoint",
        "auto",
        "--save_steps",
        1,
        "--keep_last_n",
        2,
        "--max_steps",
        5,
    ]
    main(parse_args(start(*options)))
    assert [row["step"] for row in read(tmp_path, "metrics")] == [1, 2, 3, 4, 5]
    assert len(read(tmp_path, "completions")) == 5 * 6 * 4
    assert not (folder / "checkpoint-9.part").exists()
    assert not (folder / "checkpoint-3").exists()


def test_a_new_run_moves_an_earlier_one_away(start, tmp_path, monkeypatch, capsys):
    """All of it; what others have put there stays. A run that came to no step leaves nothing to keep."""
    folder = tmp_path / "run"

    def fail(*_):
        raise UserError("not now")

    for number in ("1", "2"):
        main(parse_args(start("--save_steps", 1, "--max_steps", 2)))
        (folder / "server-0.log").touch()
        before = {path.name: path.read_bytes() for path in folder.glob("*.json*")}
        with monkeypatch.context() as patch:
            patch.setattr(train, "build_policy", fail)
            with pytest.raises(UserError, match="not now"):
                main(parse_args(start()))
        assert len(read(tmp_path, "metrics")) == 2  # a run that cannot start moves nothing

        with monkeypatch.context() as patch:
            patch.setattr(Rollouts, "publish", fail)
            with pytest.raises(UserError, match="not now"):
                main(parse_args(start()))
        aside = tmp_path / f"run.{number}"
        assert f"{folder} has an earlier run, which goes to {aside}" in capsys.readouterr().out
        assert {path.name: path.read_bytes() for path in aside.glob("*.json*")} == before
        assert [path.name for path in sorted(aside.glob("checkpoint-*"))] == [
            "checkpoint-1", "checkpoint-2"
        ]  # fmt: skip
        assert not list(folder.glob("checkpoint-*"))
        assert (folder / "server-0.log").exists()

    main(parse_args(start("--max_steps", 3)))
    assert not (tmp_path / "run.3").exists()
    main(
        parse_args(start("--resume_from_checkpoint", "auto", "--save_steps", 1, "--keep_last_n", 1))
    )
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]


def test_a_run_from_another_folders_checkpoint_is_a_new_one(start, tmp_path):
    """It leaves that folder as it is, and moves away what its own has."""
    main(parse_args(start("--max_steps", 2)))
    other = tmp_path / "other"
    options = ["--output_dir", other, "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-2"]
    for _ in range(2):
        main(parse_args(start(*options, "--max_steps", 3)))
    assert weights(other, 3)
    assert weights(tmp_path / "other.1", 3)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    main(parse_args(start(*options, "--max_steps", 2)))  # nothing is left to train, but it is saved
    assert weights(other, 2)


def test_a_longer_schedule_counts_from_the_first_step(start, tmp_path):
    options = ["--lr_scheduler", "linear", "--learning_rate", 1e-2]
    main(parse_args(start(*options, "--max_steps", 2)))
    main(parse_args(start(*options, "--max_steps", 4, "--resume_from_checkpoint", "auto")))
    rates = [row["learning_rate"] for row in read(tmp_path, "metrics")]
    assert rates == pytest.approx([1e-2, 0.5e-2, 0.5e-2, 0.25e-2])


def test_after_a_step_back_auto_does_not_leap_forward(start, tmp_path, capsys):
    """What a run leaves behind, as it is told to go on from an earlier checkpoint, gets another name."""
    folder = tmp_path / "run"
    for _ in range(2):
        main(parse_args(start("--save_steps", 2, "--resume_from_checkpoint", "auto")))
        back = ["--resume_from_checkpoint", folder / "checkpoint-2"]
        main(parse_args(start(*back, "--max_steps", 2)))
        later = folder / "checkpoint-4"
        assert f"{later} is later, and gets the ending .old" in capsys.readouterr().out
        assert [path.name for path in sorted(folder.glob("checkpoint-*"))] == [
            "checkpoint-2", "checkpoint-4.old"
        ]  # fmt: skip
        command = start("--resume_from_checkpoint", "auto")
        assert chosen(command) == folder / "checkpoint-2"
        assert [row["step"] for row in read(tmp_path, "metrics")] == [1, 2]


def test_all_ranks_go_on_from_rank_0s_checkpoint(start, tmp_path):
    """Others may see another folder for some seconds, over NFS: here rank 1 sees no checkpoint of step 4."""
    path = Path(start()[0])
    plain = path.read_text()
    run(1, start("--save_steps", 2))
    hidden = (
        "import os, pathlib\nglob = pathlib.Path.glob\n"
        "if os.environ.get('RANK') == '1':\n"
        "    pathlib.Path.glob = lambda *a: (p for p in glob(*a) if not p.match('checkpoint-4*'))\n"
    )
    path.write_text(hidden + plain)
    run(2, start("--resume_from_checkpoint", "auto", "--max_steps", 5))
    assert [row["step"] for row in read(tmp_path, "metrics")] == [1, 2, 3, 4, 5]


def test_a_last_write_that_takes_longer_than_a_collective(start, tmp_path):
    path = Path(start()[0])
    slow = (
        "import time, transformers\nsave = transformers.PreTrainedModel.save_pretrained\n"
        "def slow(*arguments, **more):\n    time.sleep(15)\n    save(*arguments, **more)\n"
        "transformers.PreTrainedModel.save_pretrained = slow\n"
    )
    path.write_text(slow + path.read_text())
    run(2, start("--max_steps", 1, "--collective_timeout", 10))
    assert weights(tmp_path / "run", 1)


def test_two_runs_in_one_folder(start, tmp_path):
    """The second is refused, and no torchrun that is killed leaves the first behind."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master_port",
        str(free_port()),
    ]
    command += [str(ROOT / "train.py"), *start("--max_steps", 500)]
    run = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    assert run.stdout
    for line in run.stdout:
        if line.startswith("step 2/"):
            break
    ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    with pytest.raises(ValueError, match=f"{tmp_path / 'run'} has another run in it"):
        main(parse_args(start()))
    run.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    main(parse_args(start("--max_steps", 1)))


def test_a_folder_that_cannot_be_written(start, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match=r"run cannot be written: File exists"):
        main(parse_args(start()))


def test_lines_end_where_json_says(tmp_path):
    """A completion may hold what str.splitlines() takes for the end of a line."""
    path = tmp_path / "completions.jsonl"
    rows = [{"step": step, "completion": "a\u2028b\x85c\x0bd"} for step in (1, 2, 3)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    cut_after(path, 2)
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == rows[:2]


def test_a_cut_off_line_is_dropped(start, tmp_path):
    main(parse_args(start("--save_steps", 2)))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 5, "rew')
    main(parse_args(start("--resume_from_checkpoint", "auto", "--max_steps", 5)))
    assert [row["step"] for row in read(tmp_path, "metrics")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--resume_from_checkpoint", "/nowhere"],
            "resume_from_checkpoint: /nowhere/trainer cannot be read: .*No such file.*state.pt",
        ),
        (
            ["--resume_from_checkpoint", ""],
            "resume_from_checkpoint: trainer cannot be read: .*No such file.*state.pt",
        ),  # a shell's unset variable
        (["--resume_from_checkpoint", "auto", "--seed", 7], "was trained with seed=42, not 7"),
        (
            ["--resume_from_checkpoint", "auto", "--weight_decay", 1],
            "was trained with weight_decay=0.0, not 1",
        ),
    ],
)
def test_another_run_is_refused(start, options, message):
    main(parse_args(start("--max_steps", 1)))
    with pytest.raises(ValueError, match=message):
        main(parse_args(start(*options)))


def test_other_prompts_are_refused(start):
    command = start("--max_steps", 1)
    main(parse_args(command))
    path = Path(command[0])
    path.write_text(path.read_text().replace("{i}+{i}=", "{i}+{i + 1}="))
    del sys.modules[path.stem]  # as in another process
    with pytest.raises(ValueError, match="that run had other prompts"):
        main(parse_args([*command, "--resume_from_checkpoint", "auto"]))


def test_a_model_that_cannot_share_goes_on(start, monkeypatch):
    """`share_prefix`, which the run itself turned off, is no other setting."""

    def refuse(*_, **__):
        raise ValueError("not this one")

    monkeypatch.setattr(training.model, "attach", refuse)
    main(parse_args(start("--max_steps", 1)))
    main(parse_args(start("--max_steps", 2, "--resume_from_checkpoint", "auto")))


def test_dropout_does_not_keep_a_server_out(start):
    """The comparison with the server is without the adapter's dropout, which it has not."""
    options = ["--use_peft", "true", "--lora_dropout", 0.5, "--learning_rate", 0.3]
    main(parse_args(start(*options, "--max_steps", 2)))
    main(parse_args(start(*options, "--max_steps", 3, "--resume_from_checkpoint", "auto")))


def test_seeds_are_distinct_and_return(start, tmp_path, monkeypatch):
    """Synchronous runs seed each group's sampling, within 64 bits, and a resumed run does it alike."""
    asked: list[int] = []
    post = vllm_client.Server.post

    def noted(self, path, body, *arguments, **more):
        params = getattr(body, "sampling_params", {})
        asked.extend(params[name] for name in ("seed",) if name in params)
        return post(self, path, body, *arguments, **more)

    monkeypatch.setattr(vllm_client.Server, "post", noted)
    options = ["--seed", 123456789, "--reward_workers", 1]
    main(parse_args(start(*options, "--save_steps", 2)))
    assert len(set(asked)) == 24
    assert all(0 <= seed < 2**63 for seed in asked)
    assert (
        min(abs(a - b) for a, b in itertools.combinations(asked, 2)) >= 4
    )  # a group's completions count on from it
    whole, asked[:] = sorted(asked), []
    main(parse_args(start(*options, "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-2")))
    assert len(asked) == 12
    assert set(asked) < set(whole)


def test_one_failed_write_does_not_end_a_run(start, tmp_path, monkeypatch, capsys):
    """The next checkpoint is waited for, and if that one is whole the run goes on; the half is gone at once."""
    save, wait = PreTrainedModel.save_pretrained, Checkpoints._wait
    failed: list[bool] = []
    halves: list[Path] = []

    def look_and_wait(self):
        if self._writing:
            self._writing.exception()
            halves.extend(self.folder.glob("*.part"))
        wait(self)

    def full_once(*arguments, **more):
        if not failed:
            failed.append(True)
            raise OSError(28, "No space left on device")
        return save(*arguments, **more)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full_once)
    monkeypatch.setattr(Checkpoints, "_wait", look_and_wait)
    main(parse_args(start("--save_steps", 1)))
    assert not halves
    assert "checkpoint-1 cannot be written" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-2", "checkpoint-3", "checkpoint-4"
    ]  # fmt: skip


def test_writes_follow_each_other_and_reach_the_disk(start, tmp_path, monkeypatch):
    """One at a time, and everything is flushed before the folder has its name."""
    save, rename, fsync = PreTrainedModel.save_pretrained, Path.rename, os.fsync
    writing: list[bool] = []
    synced: set[str] = set()
    unsynced: list[str] = []

    def slow(*arguments, **more):
        assert not writing
        writing.append(True)
        time.sleep(0.5)
        save(*arguments, **more)
        writing.pop()

    def noted(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def checked(self, target):
        if self.name.endswith(".part") and self.is_dir():
            unsynced.extend({str(path) for path in [self, *self.rglob("*")]} - synced)
        return rename(self, target)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", slow)
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    main(parse_args(start("--save_steps", 1)))
    assert unsynced == []
    assert len(synced) > 20


def test_saving_changes_nothing_before_the_first_step(start, tmp_path, monkeypatch):
    """AdamW's count of steps, where the first ones were skipped, is the same with a checkpoint of them."""
    real, expected = train.grpo_loss, None
    for options in ([], ["--save_steps", 1]):
        calls: list[int] = []

        def broken(*arguments, calls=calls):
            loss, sums = real(*arguments)
            calls.append(0)
            return (loss * float("nan") if len(calls) == 1 else loss), sums

        monkeypatch.setattr(train, "grpo_loss", broken)
        main(parse_args(start(*options)))
        expected = expected or weights(tmp_path / "run")
        assert_identical(weights(tmp_path / "run"), expected)


def test_a_weight_that_no_gradient_reached_goes_on(start, tmp_path, monkeypatch):
    """Its part of AdamW's state is in the checkpoint, as the run that goes on wants it."""
    build, publish = train.build_policy, published_weights

    def with_one_more(*arguments):
        policy = build(*arguments)
        policy.register_parameter("unused", torch.nn.Parameter(torch.zeros(2, 2)))
        return policy

    monkeypatch.setattr(train, "build_policy", with_one_more)
    monkeypatch.setattr(
        "rollouts.rollouts.published_weights",
        lambda p: (item for item in publish(p) if item[0] != "unused"),
    )
    monkeypatch.setattr(training.model, "check_complete", lambda *_: None)  # the model has no such
    main(parse_args(start("--max_steps", 2)))
    main(parse_args(start("--resume_from_checkpoint", "auto")))
    assert [row["step"] for row in read(tmp_path, "metrics")] == [1, 2, 3, 4]


def test_a_folder_that_ranks_do_not_share_is_refused(start, tmp_path):
    """Each rank in a directory of its own, with a relative output_dir."""
    path = Path(start()[0])
    apart = f"import os; os.makedirs({str(tmp_path)!r} + os.environ['RANK'], exist_ok=True)\n"
    apart += f"os.chdir({str(tmp_path)!r} + os.environ['RANK'])\n"
    path.write_text(apart + path.read_text().replace(str(tmp_path / "run"), "run"))
    done = on_forked_ranks(2, ROOT / "train.py", *start("--save_steps", 2, "--use_fsdp", "true"))
    assert done.returncode != 0
    assert "output_dir=run is not one folder for all ranks" in done.stderr


def test_a_reader_that_ends_with_ctrl_c(start, tmp_path):
    """`python train.py | tee log`: both get the signal, and the run still saves and ends with status 0."""
    command = [sys.executable, str(ROOT / "train.py"), *start("--max_steps", 40)]
    run = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    assert run.stdout
    for line in run.stdout:
        if line.startswith("step 2/"):
            break
    run.stdout.close()
    time.sleep(0.5)  # steps that nobody reads
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 0
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    assert AutoModelForCausalLM.from_pretrained(saved)


def test_a_disk_that_is_full(start, tmp_path, monkeypatch):
    """The path is named, what was saved before is whole, and nothing half is left."""
    main(parse_args(start("--max_steps", 2)))
    expected = weights(tmp_path / "run", 2)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(
        ValueError, match="checkpoint-4 cannot be written.*: .*No space left on device"
    ):
        main(parse_args(start("--resume_from_checkpoint", "auto")))
    assert_identical(weights(tmp_path / "run", 2), expected)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        (1, signal.SIGTERM),
        (1, signal.SIGINT),
        (1, signal.SIGHUP),
        (1, signal.SIGUSR1),
        (2, signal.SIGTERM),
        (2, signal.SIGHUP),
        (2, signal.SIGUSR1),
    ],
)
def test_a_signal_saves_and_ends(start, tmp_path, ranks, number):
    """Status 0 and a checkpoint of the last whole step, from which the run goes on as if nothing had happened."""
    main(parse_args(start("--max_steps", 20)))
    expected = weights(tmp_path / "run", 20)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command += ["--master_port", str(free_port())]
    command = command if ranks > 1 else [sys.executable]
    process = subprocess.Popen(
        [*command, str(ROOT / "train.py"), *start("--max_steps", 20)], cwd=ROOT, env=ENV | launch.PASSED_ON,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step 2/20"):
            process.send_signal(number)
            break
    output = process.stdout.read()
    assert process.wait(30) == 0 or ranks > 1, output  # torchrun calls every signal a failure
    assert f"{number.name}: saving the last whole step" in output
    assert "Traceback" not in output.replace(
        'Traceback (most recent call last):\n  File "<frozen runpy>', ""
    )
    (saved,) = (path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert 2 <= int(saved.removeprefix("checkpoint-")) <= 19
    run(ranks, start("--max_steps", 20, "--resume_from_checkpoint", "auto"))
    if ranks == 1:
        assert_identical(weights(tmp_path / "run", 20), expected)
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(120))


def test_a_second_signal_ends_at_once():
    """One at the heels of the first is torchrun's copy of it."""
    script = (
        "import threading, time\nfrom utils import process_group, stop_signals\n"
        "with process_group(60), stop_signals(stop := threading.Event()):\n"
        "    print('ready', flush=True)\n    stop.wait()\n    time.sleep(1)\n    print('still here', flush=True)\n"
        "    time.sleep(60)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE
    )
    assert run.stdout
    for line in run.stdout:
        if line.startswith("ready"):
            run.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            run.send_signal(signal.SIGTERM)
        if line.startswith("still here"):
            run.send_signal(signal.SIGTERM)
    assert run.wait(10) == 128 + signal.SIGTERM


# -- Clocks, names of folders, and settings that may change ------------------------------------------------------------


def test_no_resume_goes_by_the_time_of_day(start, tmp_path, monkeypatch):
    """A host whose clock is behind, or stands still, and copies that are all of one time, or the older the later."""
    folder = tmp_path / "run"
    options = ["--save_steps", 1, "--keep_last_n", 3, "--resume_from_checkpoint", "auto"]
    main(parse_args(start(*options, "--max_steps", 2)))
    behind_s = time.time() - 600
    monkeypatch.setattr(time, "time", lambda: behind_s)
    monkeypatch.setattr(time, "time_ns", lambda: int(behind_s * 1e9))
    main(parse_args(start(*options, "--max_steps", 5)))
    monkeypatch.undo()
    before = weights(folder, 5)
    for ages in ([0, 0, 0], [3, 2, 1], [1, 2, 3]):
        for step, age in zip((3, 4, 5), ages, strict=True):
            os.utime(folder / f"checkpoint-{step}", (age, age))
        assert chosen(start(*options)) == folder / "checkpoint-5"
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy)  # as `cp -r`
    assert chosen(start(*options, "--output_dir", tmp_path / "copy")).name == "checkpoint-5"
    assert_identical(weights(folder, 5), before)
    main(parse_args(start(*options, "--max_steps", 6)))
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-5",
        "checkpoint-6",
    ]
    assert_identical(weights(folder, 5), before)
    assert [row["step"] for row in read(tmp_path, "metrics")] == [1, 2, 3, 4, 5, 6]


def test_nothing_reads_the_time_of_day():
    """Not the core, which has `time.monotonic` and `time.perf_counter` for what takes time.

    But for the day on which a run began, which its chat template may write.
    """
    clocks = {
        "time",
        "time_ns",
        "st_mtime",
        "st_mtime_ns",
        "st_ctime",
        "getmtime",
        "getctime",
        "utcnow",
        "now",
        "today",
    }
    rooms = ("", "rollouts", "training", "weights", "server")
    paths = [path for room in rooms for path in (ROOT / room).glob("*.py")]
    assert len(paths) > 30
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and (path.name, node.attr) != ("run.py", "now"):
                assert node.attr not in clocks, f"{path.name}:{node.lineno}"


@pytest.fixture
def named(start, models, tmp_path):
    """A command line of a run whose model and data have names from `tmp_path`, and those files."""
    folder = tmp_path / "home"
    shutil.copytree(models["untied"], folder / "model")
    shutil.copytree(models["untied"], folder / "another")
    rows = [{"prompt": f"{number}+{number}="} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = start()
    text = Path(command[0]).read_text()
    for old, new in (
        (repr(models["untied"]), "'home/model'"),
        ("dataset_id=rows", "dataset_id='home/rows.jsonl'"),
    ):
        assert old in text
        text = text.replace(old, new)
    Path(command[0]).write_text(text)
    return lambda *options: [*command, *map(str, options)], folder


def spellings(path):
    """Names of a file or folder in `tmp_path/home`, from `tmp_path` and from `home`."""
    link = path.parent / f"link-{path.name}"
    link.symlink_to(path)
    home = path.parent
    slash = "/" if path.is_dir() else ""
    return [
        (home.parent, f"home/{path.name}"),
        (home.parent, f"./home/../home/{path.name}{slash}"),
        (home.parent, f"{path}{slash}"),
        (home.parent, f"home/link-{path.name}"),
        (home, path.name),
        (home, f"{link}{slash}"),
    ]


WITH_A_BASE = {
    "lora": ["--use_peft", "true", "--lora_rank", 2],
    "reference": ["--beta", 0.1],
}


@pytest.mark.parametrize("kind", WITH_A_BASE)
def test_a_model_by_another_name_is_the_same(named, models, tmp_path, monkeypatch, kind):
    """Where weights of the model itself are needed, its name must lead to where it was; another folder is refused."""
    command, folder = named
    words = [*WITH_A_BASE[kind], "--output_dir", tmp_path / "run"]
    monkeypatch.chdir(tmp_path)
    with fake_server(str(folder / "model"), answer_in(0.0)) as server:
        urls = ["--vllm_urls", server.url]
        main(parse_args(command(*words, *urls, "--max_steps", 1)))
    saved = tmp_path / "run" / "checkpoint-1"
    words += ["--resume_from_checkpoint", "auto"]
    for cwd, name in spellings(folder / "model"):
        monkeypatch.chdir(cwd)
        assert chosen(command(*words, "--model_id", name)) == saved
    for name in (folder / "another", "another", "model2"):
        with pytest.raises(
            UserError, match="was trained with model_id=home/model, not .*(another|model2)"
        ):
            chosen(command(*words, "--model_id", name))


def test_a_model_and_data_that_moved(named, tmp_path, monkeypatch):
    """All weights are the checkpoint's, and prompts are compared themselves: wherever both lie now, the run goes on."""
    command, folder = named
    words = ["--output_dir", tmp_path / "run", "--resume_from_checkpoint", "auto"]
    monkeypatch.chdir(tmp_path)
    with fake_server(str(folder / "model"), answer_in(0.0)) as server:
        main(parse_args(command(*words, "--vllm_urls", server.url, "--max_steps", 1)))
        for cwd, name in spellings(folder / "rows.jsonl"):
            monkeypatch.chdir(cwd)
            named_anew = ["--model_id", folder / "model", "--dataset_id", name]
            found = chosen(command(*words, *named_anew))
            assert found == tmp_path / "run" / "checkpoint-1"
    monkeypatch.chdir(tmp_path)
    folder.rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    more = ["--model_id", moved / "model", "--dataset_id", moved / "rows.jsonl", "--max_steps", 2]
    with fake_server(str(moved / "model"), answer_in(0.0)) as server:
        main(parse_args(command(*words, *more, "--vllm_urls", server.url)))
        assert [row["step"] for row in read(tmp_path, "metrics")] == [1, 2]
        text = (moved / "rows.jsonl").read_text()
        (moved / "rows.jsonl").write_text(text.replace("7+7=", "7+8="))
        with pytest.raises(UserError, match="that run had other prompts"):
            main(parse_args(command(*words, *more, "--vllm_urls", server.url)))


ADVICE = re.compile(r"(?i:\b(raise|lower|set|unset|or))[ (]+([a-z]+_[a-z_]+|beta|temperature)")
# Messages of a start that has no checkpoint yet: the settings contradict each other, or a server is of another kind.
AT_THE_START = {
    "dtype": "config.py: of a bfloat16 average",
    "reference_decay": "config.py: of a bfloat16 average",
    "reference_id": "config.py: of several references",
    "use_peft": "rollouts/servers.py: of a server that takes adapters alone, which may be started otherwise, too",
}


def advised():
    """The fields that texts in the core say to raise, lower, set or unset, each with the places."""
    fields = TrainConfig.__dataclass_fields__
    found: dict[str, set[str]] = {}
    rooms = ("", "rollouts", "training", "weights", "server")
    for path in (path for room in rooms for path in (ROOT / room).glob("*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        parts = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        for node in ast.walk(tree):
            if id(node) in docs or id(node) in parts:
                continue
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(getattr(part, "value", "?")) for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            for _, name in ADVICE.findall(text):
                if name in fields:
                    found.setdefault(name, set()).add(path.name)
    return found


def test_a_resume_accepts_what_messages_advise():
    """After a run that ended with a message, or a lack of memory: the same command with that setting changed."""
    found = advised()
    some = {
        "learning_rate",
        "max_tokens_per_gpu",
        "gradient_checkpoint",
        "use_fsdp",
        "beta",
        "max_logprob_mismatch",
    }
    assert some <= found.keys()
    assert found.keys() - AT_THE_START.keys() <= MAY_CHANGE, found


@pytest.mark.parametrize(
    "options",
    [
        ["--learning_rate", 0.001],
        ["--beta", 0.1],
        ["--max_completion_len", 16],
        ["--max_staleness", 1],
        ["--max_tokens_per_gpu", 64],
        ["--gradient_checkpoint", "true"],
        ["--use_fsdp", "true"],
        ["--drop_zero_advantage", "false", "--max_logprob_mismatch", 1],
    ],
)
def test_a_run_goes_on_with_what_was_advised(start, tmp_path, options):
    """The new setting is in use from the next step on."""
    main(parse_args(start("--max_steps", 2)))
    main(parse_args(start("--max_steps", 4, "--resume_from_checkpoint", "auto", *options)))
    rows = read(tmp_path, "metrics")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    rates = [0.001 if "--learning_rate" in options else 0.01] * 2
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.01, 0.01, *rates])
    assert ("kl" in rows[-1]) == ("--beta" in options)


def test_asynchronous_groups_end_once(start, tmp_path):
    """Groups that were under way or waiting when the run stopped are sampled again, under their ids."""
    options = ["--max_staleness", 1, "--max_steps", 6, "--save_steps", 1]
    main(parse_args(start(*options)))
    main(parse_args(start(*options, "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-3")))
    samples = read(tmp_path, "completions")
    assert len(samples) == 6 * 6 * 4
    ids = {row["group"] for row in samples} | {row["group"] for row in read(tmp_path, "dropped")}
    assert len({row["group"] for row in samples}) == 36
    assert ids == set(range(len(ids)))


def test_an_order_goes_on(start, tmp_path):
    """Asynchronously, with drops: each group once, and the same prompts as if nothing had happened.

    The order is a function of what was trained two steps before, which a resumed run knows again.
    """
    command = start("--max_staleness", 1, "--max_steps", 6, "--save_steps", 1)
    path = Path(command[0])
    text = path.read_text()
    path.write_text(
        f"{text}from dataclasses import replace\n{ORDER}config = replace(config, order_fn=by_rewards)\n"
    )
    main(parse_args(command))
    whole = rows_of_groups(tmp_path)
    seen = [row["seen"] for row in read(tmp_path, "seen")]
    assert seen == [0, 0, 0, 6, 12, 18, 24]  # ended when it is tried, and when each batch is chosen

    main(parse_args([*command, "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-3")]))
    again = rows_of_groups(tmp_path)
    assert again.keys() == set(range(36))
    # What is sampled again has other rewards, and what is chosen by them may be other prompts.
    assert [again[number] for number in range(5 * 6)] == [whole[number] for number in range(5 * 6)]
    assert [row["seen"] for row in read(tmp_path, "seen")][7:] == [18, 24]


ORDER = """
def by_rewards(prompts, history, count, rng):
    import json, pathlib
    seen = sum(map(len, history.values()))
    with pathlib.Path(config.output_dir, "seen.jsonl").open("a") as file:
        file.write(json.dumps({"seen": seen}) + "\\n")
    worth = [history[prompt.index][-1][0] if prompt.index in history else 1.0 for prompt in prompts]
    return rng.choices(prompts, [1e-3 + abs(value) for value in worth], k=count)

"""


def rows_of_groups(folder):
    """The dataset row of each group that was trained, by its id."""
    return {row["group"]: row["row"] for row in read(folder, "completions")}


def test_dropped_groups_do_not_come_again(start, tmp_path, monkeypatch):
    """Groups that taught nothing before the checkpoint have ended, for the run that goes on from it as well."""
    command = start("--drop_zero_advantage", "true", "--save_steps", 2, "--max_steps", 4)
    path = Path(command[0])
    path.write_text(
        path.read_text().replace(
            "sum(ids) / len(ids) / 50", "float(len(completion_ids[0]) % 3 > 0)*ids[0]"
        )
    )
    main(parse_args(command))
    main(parse_args([*command, "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2")]))
    dropped = [row["group"] for row in read(tmp_path, "dropped")]
    trained = {row["group"] for row in read(tmp_path, "completions")}
    assert len(trained) == 24
    assert [row["step"] for row in read(tmp_path, "dropped")] == sorted(
        row["step"] for row in read(tmp_path, "dropped")
    )
    assert any(row["step"] <= 2 for row in read(tmp_path, "dropped"))
    assert sorted([*trained, *dropped]) == list(range(len(trained) + len(dropped)))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_order_with_drops_goes_on(start, tmp_path, max_staleness):
    """Every checkpoint, amid drops too, knows each chosen group as ended or as to come; at staleness 0 all is the same."""
    options = ["--drop_zero_advantage", "true", "--max_staleness", max_staleness]
    options += ["--order_fn", "recipes.curriculum.prefer_half_solved"]
    command = start(*options, "--save_steps", 1, "--max_steps", 6)
    path = Path(command[0])
    path.write_text(
        path.read_text().replace(
            "sum(ids) / len(ids) / 50", "float(len(completion_ids[0]) % 3 > 0)*ids[0]"
        )
    )
    main(parse_args(command))
    num_dropped = []
    for step in range(1, 7):
        state = saved_state(tmp_path / "run" / f"checkpoint-{step}")
        numbers = {number for number, _ in state["open"]}
        num_ended = state["next"] - len(numbers)
        num_dropped.append(num_ended - 6 * step)
        assert len(numbers) == len(state["open"])
        assert numbers <= set(range(state["next"]))
        assert sum(map(len, state["history"].values())) == num_ended
    assert num_dropped[-1] > 0
    whole, dropped = rows_of_groups(tmp_path), read(tmp_path, "dropped")

    main(parse_args([*command, "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-3")]))
    again, dropped_again = rows_of_groups(tmp_path), read(tmp_path, "dropped")
    assert len(again) == len(whole) == 36
    gone = [row["group"] for row in dropped_again]
    assert sorted([*again, *gone]) == list(range(36 + len(gone)))
    if max_staleness == 0:
        assert again == whole
        assert dropped_again == dropped


def test_removal_leaves_nothing_half_under_the_name(tmp_path, monkeypatch):
    """Whatever interrupts it."""
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    _remove(folder)
    assert not folder.exists()
