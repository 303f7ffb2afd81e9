"""Runs that stop and go on: bit for bit the same, every group once, and nothing half-written."""

import itertools
import json
import os
import re
import shutil
import signal
import time
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path

import launch
import pytest
import torch
from fake_server import fake_server
from helpers import (
    ENV,
    ROOT,
    answer_in,
    change,
    checkpoints_of,
    flags,
    make_tokenizer,
    on_forked_ranks,
    read,
    read_until,
    saved_state,
    start_train,
    steps_of,
    trained_groups,
    wait_until,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import chat_template_utils

import train
from config import UserError, parse_args
from rollouts.rollouts import Rollouts
from train import main
from training.checkpoints import find_start
from training.logs import cut_after
from training.model import with_bf16


@pytest.fixture
def start(recipe, stand_in):
    """The command line of a run of a server into `run`, or another folder."""
    path = recipe(stand_in(0.02))
    return lambda **fields: [path, *flags(**{"max_steps": 4, **fields})]


@pytest.fixture
def trained(start):
    """Trains such a run in this process."""
    return lambda **fields: main(parse_args(start(**fields)))


@pytest.fixture
def resumed(trained):
    """Goes on with it from its last checkpoint."""
    return lambda **fields: trained(resume_from_checkpoint="auto", **fields)


def weights(folder, step=4):
    """What a checkpoint has: of the model, or of its adapter."""
    (file,) = (folder / f"checkpoint-{step}").glob("*model.safetensors")
    return load_file(file)


def assert_identical(one, two):
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name


def run(ranks, command, apart=False):
    """In this process where one rank is enough, and none of its own is asked for."""
    if ranks == 1 and not apart:
        return main(parse_args(command))
    on_forked_ranks(ranks, ROOT / "train.py", *command, status=0)


def chosen(command):
    """The checkpoint that a command goes on from."""
    return find_start(with_bf16(parse_args(command)))[0]


ORDER_FN = "recipes.curriculum.prefer_half_solved"
MOVING = {"beta": 0.1, "reference_decay": 0.5}
KINDS: dict[str, tuple[int, dict]] = {
    "whole": (1, {**MOVING, "order_fn": ORDER_FN}),
    "lora": (1, {**MOVING, "reference_decay": 0, "reference_steps": 2, "use_peft": True, "lora_dropout": 0.5}),
    "ddp": (2, {"num_minibatches": 2, "warmup_ratio": 0.5}),
    "fsdp": (2, {**MOVING, "use_fsdp": True, "lr_scheduler": "cosine"}),
    "fsdp_lora": (2, {**MOVING, "use_fsdp": True, "use_peft": True}),
    "lora_8bit": (1, {"adam_8bit": True, "use_peft": True, "lora_rank": 64}),
    "ddp_8bit": (2, {"adam_8bit": True, "num_minibatches": 2, "warmup_ratio": 0.5}),
    "fsdp_8bit": (2, {"adam_8bit": True, "use_fsdp": True, "fsdp_offload": True, "lr_scheduler": "cosine"}),
}  # fmt: skip
SAME = ("step", "reward", "loss", "grad_norm", "learning_rate", "num_tokens", "policy_version")


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_bit_for_bit(start, tmp_path, kind):
    """Four steps at once, and the last two of them again, from the checkpoint, in other processes."""
    ranks, fields = KINDS[kind]
    if "adam_8bit" in fields:
        pytest.importorskip("torchao")
    run(ranks, start(save_steps=2, **fields))
    metrics, completions = (read(tmp_path, name) for name in ("metrics", "completions"))
    expected = weights(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    run(ranks, start(resume_from_checkpoint=checkpoint, **fields), apart=True)
    assert_identical(weights(tmp_path / "run"), expected)
    assert read(tmp_path, "completions") == completions
    for one, two in zip(read(tmp_path, "metrics"), metrics, strict=True):
        assert [one[name] for name in SAME] == [two[name] for name in SAME]
    # Peft's card is empty, which the hub may refuse.
    assert not [*(tmp_path / "run").glob("checkpoint-*/README.md")]


ADAPTER = {"use_peft": True, "lora_target_modules": "q_proj,lm_head", "learning_rate": 0.05}


@pytest.mark.parametrize("own", [{"learning_rate": 0.003}, ADAPTER], ids=["whole", "lora"])
def test_ranks_and_shards_change_nothing(start, tmp_path, own):
    """A moving reference under FSDP2, whose root has the head, on two ranks; then one rank goes on from their shards."""
    fields = {"beta": 0.5, "reference_decay": 0.5, **own}
    run(1, start(**fields))
    expected, metrics = weights(tmp_path / "run"), read(tmp_path, "metrics")
    assert max(row["kl"] for row in metrics) > 1e-3

    def assert_close():  # sums are rounded otherwise
        for one, two in zip(metrics, read(tmp_path, "metrics"), strict=True):
            assert two["kl"] == pytest.approx(one["kl"], rel=1e-2, abs=1e-6)
        for name, weight in weights(tmp_path / "run").items():
            torch.testing.assert_close(weight, expected[name], rtol=2e-3, atol=1e-3)

    run(2, start(use_fsdp=True, save_steps=2, **fields))
    assert_close()
    if own is not ADAPTER:
        middle = tmp_path / "run" / "checkpoint-2"
        run(1, start(use_fsdp=False, resume_from_checkpoint=middle, **fields))
        assert_close()


def test_a_run_goes_on_with_the_date_of_its_beginning(trained, resumed, tmp_path, monkeypatch):
    """On another day the template would write another prompt."""

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=1)

    dated = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = make_tokenizer(chat_template=dated)
    monkeypatch.setattr("rollouts.run.load_processor", lambda _: tokenizer)
    trained(max_steps=2)
    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    resumed(max_steps=3)
    began, later = (saved_state(tmp_path / "run" / f"checkpoint-{n}")["began"] for n in (2, 3))
    assert datetime.fromisoformat(later) == datetime.fromisoformat(began)


# -- which checkpoint, and what is in its way ----------------------------------------------------------


def test_auto_and_keep_last(start, resumed, tmp_path):
    """`auto` starts anew where there is nothing, else goes on from the largest step, however old."""
    folder = tmp_path / "run"
    (folder / "checkpoint-500").mkdir(parents=True)  # another trainer's
    (folder / "checkpoint-of-9" / "trainer").mkdir(parents=True)
    others = ["checkpoint-500", "checkpoint-of-9"]
    resumed(save_steps=1, keep_last_n=2)
    assert checkpoints_of(folder) == ["checkpoint-3", "checkpoint-4", *others]
    os.utime(folder / "checkpoint-4", (0, 0))  # a copy may have any time
    assert chosen(start(resume_from_checkpoint="auto")) == folder / "checkpoint-4"
    (folder / "checkpoint-9.part").mkdir()  # a crash left it
    resumed(save_steps=1, keep_last_n=2, max_steps=5)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    assert len(read(tmp_path, "completions")) == 5 * 6 * 4
    assert checkpoints_of(folder) == ["checkpoint-4", "checkpoint-5", *others]


def test_a_new_run_moves_an_earlier_one_away(trained, resumed, tmp_path, monkeypatch, capsys):
    """All of it; what others have put there stays. A run that came to no step leaves nothing to keep."""
    folder = tmp_path / "run"

    def fail(*_):
        raise UserError("not now")

    def start_in_vain(owner, name):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(UserError, match="not now"):
                trained()

    trained(save_steps=1, max_steps=2)
    (folder / "server-0.log").touch()
    before = {path.name: path.read_bytes() for path in folder.glob("*.json*")}
    start_in_vain(train, "build_policy")
    assert steps_of(tmp_path) == [1, 2]  # a run that cannot start moves nothing
    start_in_vain(Rollouts, "publish")
    aside = tmp_path / "run.1"
    assert f"{folder} has an earlier run, or later steps, which go" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in aside.glob("*.json*")} == before
    assert checkpoints_of(aside) == ["checkpoint-1", "checkpoint-2"]
    assert checkpoints_of(folder) == []
    assert (folder / "server-0.log").exists()

    trained(max_steps=3)
    assert not (tmp_path / "run.2").exists()
    trained(max_steps=3)
    assert checkpoints_of(tmp_path / "run.2") == ["checkpoint-3"]
    resumed(save_steps=1, keep_last_n=1)
    assert checkpoints_of(folder) == ["checkpoint-4"]


def test_a_run_from_another_folders_checkpoint_is_a_new_one(trained, tmp_path):
    """It leaves that folder as it is, and moves away what its own has."""
    trained(max_steps=2)
    other = tmp_path / "other"
    fields = {"output_dir": other, "resume_from_checkpoint": tmp_path / "run" / "checkpoint-2"}
    for _ in range(2):
        trained(max_steps=3, **fields)
    assert weights(other, 3)
    assert weights(tmp_path / "other.1", 3)
    assert checkpoints_of(tmp_path / "run") == ["checkpoint-2"]
    trained(max_steps=2, **fields)  # nothing is left to train, but it is saved
    assert weights(other, 2)


def test_a_longer_schedule_counts_from_the_first_step(trained, resumed, tmp_path):
    trained(lr_scheduler="linear", max_steps=2)
    resumed(lr_scheduler="linear")
    rates = [row["learning_rate"] for row in read(tmp_path, "metrics")]
    assert rates == pytest.approx([1e-2, 0.5e-2, 0.5e-2, 0.25e-2])


def test_after_a_step_back_auto_does_not_leap_forward(start, trained, resumed, tmp_path):
    """What a run leaves behind, as it is told to go on from an earlier checkpoint, goes to another folder."""
    folder = tmp_path / "run"
    for number in (1, 2):
        resumed(save_steps=2)
        trained(resume_from_checkpoint=folder / "checkpoint-2", max_steps=2)
        assert [path.name for path in (tmp_path / f"run.{number}").iterdir()] == ["checkpoint-4"]
        assert checkpoints_of(folder) == ["checkpoint-2"]
        assert chosen(start(resume_from_checkpoint="auto")) == folder / "checkpoint-2"
        assert steps_of(tmp_path) == [1, 2]


HIDING = """
import os, pathlib
glob = pathlib.Path.glob
if os.environ.get('RANK') == '1':
    pathlib.Path.glob = lambda *a: (path for path in glob(*a) if not path.match('checkpoint-4*'))
"""


def test_all_ranks_go_on_from_rank_0s_checkpoint(start, tmp_path):
    """Others may see another folder for some seconds, over NFS: here rank 1 sees no checkpoint of step 4."""
    path = Path(start()[0])
    run(1, start(save_steps=2))
    path.write_text(HIDING + path.read_text())
    run(2, start(resume_from_checkpoint="auto", max_steps=5))
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


def test_two_runs_in_one_folder(start, trained, tmp_path):
    """The second is refused, and no torchrun that is killed leaves the first behind."""
    first = start_train(2, *start(max_steps=500))
    read_until(first, "step 2/")
    ranks = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    message = f"{tmp_path / 'run'} cannot be written, or has another run in it"
    with pytest.raises(ValueError, match=message):
        trained()
    first.kill()
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    trained(max_steps=1)


def test_a_folder_that_cannot_be_written(trained, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="run cannot be written, .*: .*File exists"):
        trained()


def test_a_folder_that_ranks_do_not_share_is_refused(start, tmp_path):
    """Each rank in a directory of its own, with a relative output_dir."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    path = Path(start()[0])
    change(path, str(tmp_path / "run"), "run")
    to_own = f"import os\nos.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])\n"
    path.write_text(to_own + path.read_text())
    command = start(save_steps=2, use_fsdp=True)
    done = on_forked_ranks(2, ROOT / "train.py", *command, status=1)
    assert "output_dir=run is not one folder for all ranks" in done.stderr


def test_lines_end_where_json_says(tmp_path):
    """A completion may hold what str.splitlines() takes for the end of a line; one that is cut off is dropped."""
    path = tmp_path / "completions.jsonl"
    rows = [{"step": step, "completion": "a\u2028b\x85c\x0bd"} for step in (1, 2, 3)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(lines + '{"step": 3, "rew')
    for last in (3, 2):
        cut_after(path, last)
        kept = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        assert kept == rows[:last]


def test_another_run_is_refused(trained, resumed):
    trained(max_steps=1)
    for given in ("/nowhere", ""):  # as a shell's unset variable
        message = f"resume_from_checkpoint: {given}.* cannot be read: .*No such file.*state.pt"
        with pytest.raises(UserError, match=message):
            trained(resume_from_checkpoint=given)
    with pytest.raises(UserError, match="was trained with seed=42, not 7"):
        resumed(seed=7)


# -- writing -------------------------------------------------------------------------------------------

SLOW = """
import sys, time
if "transformers" in sys.modules:  # of a rank, not of a worker for rewards
    from transformers import PreTrainedModel
    save = PreTrainedModel.save_pretrained
    PreTrainedModel.save_pretrained = lambda *a, **more: time.sleep(10) or save(*a, **more)
"""


def test_a_last_write_that_takes_longer_than_a_collective(start, tmp_path):
    path = Path(start()[0])
    path.write_text(SLOW + path.read_text())
    run(2, start(max_steps=1, collective_timeout=6))
    assert weights(tmp_path / "run", 1)


@pytest.mark.parametrize(
    ("save_steps", "fails", "failed", "kept", "ends"),
    [
        (1, {1}, 1, 2, True),  # an earlier one: what came after it is saved
        (0, {1}, 3, 3, False),  # the last one: it is tried again
        (2, {1}, 2, 3, False),
        (2, {2, 3, 4}, 3, 2, True),
    ],
)
def test_a_disk_that_is_full(
    trained, tmp_path, monkeypatch, capsys, save_steps, fails, failed, kept, ends
):
    """Some writes fail: the path is named, the last step saved if possible, and nothing half left."""
    save, numbers = PreTrainedModel.save_pretrained, itertools.count(1)

    def write(*arguments, **more):
        if next(numbers) in fails:
            raise OSError(28, "No space left on device")
        save(*arguments, **more)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", write)
    told = f"checkpoint-{failed} cannot be written.*: .*No space left on device"
    with pytest.raises(UserError, match=told) if ends else nullcontext():
        trained(max_steps=3, save_steps=save_steps)
    assert ends or re.search(told, capsys.readouterr().out)
    assert checkpoints_of(tmp_path / "run") == [f"checkpoint-{kept}"]
    assert weights(tmp_path / "run", kept)


def test_everything_is_on_the_disk_before_a_checkpoint_has_its_name(trained, monkeypatch):
    rename, fsync = Path.rename, os.fsync
    synced: set[str] = set()
    unsynced: set[str] = set()

    def noted(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def checked(self, target):
        if self.name.endswith(".part") and self.is_dir():
            unsynced.update({str(path) for path in [self, *self.rglob("*")]} - synced)
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    trained(save_steps=1)
    assert not unsynced
    assert len(synced) > 20


def test_removal_leaves_nothing_half_under_the_name(trained, tmp_path, monkeypatch):
    """Whatever interrupts it."""
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    trained(max_steps=2, save_steps=1, keep_last_n=1)
    named = [name for name in checkpoints_of(tmp_path / "run") if not name.endswith(".part")]
    assert named == ["checkpoint-2"]


def test_saving_changes_nothing_before_the_first_step(trained, tmp_path, monkeypatch):
    """AdamW's count of steps, where the first ones were skipped, is the same with a checkpoint of them."""
    real, found = train.grpo_loss, []
    for fields in ({}, {"save_steps": 1}):
        factors = iter([float("nan")])

        def broken(*arguments, factors=factors):
            loss, sums = real(*arguments)
            return loss * next(factors, 1.0), sums

        monkeypatch.setattr(train, "grpo_loss", broken)
        trained(**fields)
        found.append(weights(tmp_path / "run"))
    assert_identical(*found)


def test_a_weight_that_no_gradient_reached_goes_on(trained, resumed, tmp_path, monkeypatch):
    """Its part of AdamW's state is in the checkpoint, as the run that goes on wants it."""
    add_gradient = train.add_gradient

    def but_for_one(policy, *arguments):
        add_gradient(policy, *arguments)
        policy.get_parameter("model.norm.weight").grad = None

    monkeypatch.setattr(train, "add_gradient", but_for_one)
    trained(max_steps=2)
    resumed()
    assert steps_of(tmp_path) == [1, 2, 3, 4]


# -- signals -------------------------------------------------------------------------------------------


def test_a_reader_that_ends_with_ctrl_c(start, tmp_path):
    """`python train.py | tee log`: both get the signal, and the run still saves and ends with status 0."""
    process = start_train(1, *start(max_steps=40))
    read_until(process, "step 2/")
    process.stdout.close()
    time.sleep(0.5)  # steps that nobody reads
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 0
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    assert AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("ranks", "number"),
    [(1, signal.SIGINT), (1, signal.SIGHUP), (2, signal.SIGTERM), (2, signal.SIGUSR1)],
)
def test_a_signal_saves_and_ends(start, trained, resumed, tmp_path, ranks, number):
    """Status 0 and a checkpoint of the last whole step, from which the run goes on as if nothing had happened."""
    process = start_train(
        ranks, *start(max_steps=20), env=ENV | launch.PASSED_ON,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip
    read_until(process, "step 2/20")
    process.send_signal(number)
    output = process.stdout.read()
    assert process.wait(300) == 0 or ranks > 1, output  # torchrun calls every signal a failure
    assert f"{number.name}: saving the last whole step" in output
    torchruns_own = 'Traceback (most recent call last):\n  File "<frozen runpy>'
    assert "Traceback" not in output.replace(torchruns_own, "")
    (saved,) = checkpoints_of(tmp_path / "run")
    assert 2 <= int(saved.removeprefix("checkpoint-")) <= 19
    resumed(max_steps=20)
    if ranks == 1:
        trained(max_steps=20, output_dir=tmp_path / "whole")
        assert_identical(weights(tmp_path / "run", 20), weights(tmp_path / "whole", 20))
    assert trained_groups(tmp_path) == list(range(120))


# -- Names of folders, and settings that may change --------------------------------------------------------------------


@pytest.fixture
def home(models, tmp_path, monkeypatch):
    """A folder with a model and rows, which commands name from the folder above it."""
    folder = tmp_path / "home"
    shutil.copytree(models["untied"], folder / "model")
    rows = [{"prompt": f"{number}+{number}="} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return folder


def train_in(folder, start, **fields):
    """Train the model of a folder, on a server of it; the command is named by `fields`."""
    with fake_server(str(folder / "model"), answer_in(0.0)) as server:
        main(parse_args(start(vllm_urls=server.url, resume_from_checkpoint="auto", **fields)))


@pytest.mark.parametrize("base", [{"use_peft": True, "lora_rank": 2}, {"beta": 0.1}], ids=str)
def test_a_model_by_another_name_is_the_same(home, start, tmp_path, monkeypatch, base):
    """Where weights of the model itself are needed, its name must lead to where it was; another folder is refused."""
    train_in(home, start, model_id="home/model", max_steps=1, **base)
    fields = {"resume_from_checkpoint": "auto", **base}
    (home / "link").symlink_to(home / "model")
    from_above = (tmp_path, "./home/../home/model"), (tmp_path, home / "model")
    for cwd, name in (*from_above, (home, "model"), (home, "link")):
        monkeypatch.chdir(cwd)
        assert chosen(start(model_id=name, **fields)) == tmp_path / "run" / "checkpoint-1"
    for name in (home / "another", "another"):
        with pytest.raises(UserError, match=f"was trained with model_id=home/model, not .*{name}"):
            chosen(start(model_id=name, **fields))


def test_a_model_and_data_that_moved(home, start, tmp_path):
    """All weights are the checkpoint's, and prompts are compared themselves: wherever both lie now, the run goes on."""
    train_in(home, start, model_id="home/model", dataset_id="home/rows.jsonl", max_steps=1)
    moved = home.rename(tmp_path / "moved")
    fields = {"model_id": moved / "model", "dataset_id": moved / "rows.jsonl", "max_steps": 2}
    train_in(moved, start, **fields)
    assert steps_of(tmp_path) == [1, 2]
    change(moved / "rows.jsonl", "7+7=", "7+8=")
    with pytest.raises(UserError, match="that run had other prompts"):
        train_in(moved, start, **fields)


def test_a_run_goes_on_with_what_was_advised(trained, resumed, tmp_path):
    """All that is changed is in use from the next step on; and a run may have turned off `share_prefix` itself."""
    trained(max_steps=1, share_prefix=False)
    resumed(
        max_steps=2, learning_rate=0.001, max_completion_len=16, max_staleness=1, beta=0.1,
        max_tokens_per_gpu=64, gradient_checkpoint=True, use_fsdp=True, max_logprob_mismatch=1,
    )  # fmt: skip
    one, two = read(tmp_path, "metrics")
    assert (one["step"], two["step"]) == (1, 2)
    assert (one["learning_rate"], two["learning_rate"]) == pytest.approx((0.01, 0.001))
    assert "kl" not in one
    assert "kl" in two


# -- groups --------------------------------------------------------------------------------------------


def run_and_go_on(command, folder):
    """The rows of trained groups by their ids, and dropped groups: of six steps, and with the last three again."""
    found = []
    for more in ({}, {"resume_from_checkpoint": folder / "run" / "checkpoint-3"}):
        main(parse_args([*command, *flags(max_steps=6, save_steps=1, **more)]))
        completions, dropped = read(folder, "completions"), read(folder, "dropped")
        assert len(completions) == 6 * 6 * 4
        rows = {row["group"]: row["row"] for row in completions}
        ids = sorted([*rows, *(row["group"] for row in dropped)])
        assert ids == list(range(len(ids)))
        found.append((rows, dropped))
    return found


def test_asynchronous_groups_end_once(start, tmp_path):
    """Groups under way or waiting when a run stopped are sampled again, under their ids, in the same order."""
    (whole, _), (again, _) = run_and_go_on(start(max_staleness=1, order_fn=ORDER_FN), tmp_path)
    # What is sampled again has other rewards; prompts that are chosen by these, two steps later, may be others.
    assert [again[number] for number in range(5 * 6)] == [whole[number] for number in range(5 * 6)]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_order_with_drops_goes_on(start, tmp_path, max_staleness):
    """Each chosen group ends once, trained or dropped, or is to come; at staleness 0 all is the same."""
    command = start(drop_zero_advantage=True, max_staleness=max_staleness, order_fn=ORDER_FN)
    change(command[0], "sum(ids) / len(ids) / 50", "float(len(completion_ids[0]) % 3 > 0)*ids[0]")
    whole, again = run_and_go_on(command, tmp_path)
    assert whole[1]  # some were dropped
    for step in range(1, 7):
        state = saved_state(tmp_path / "run" / f"checkpoint-{step}")
        assert len(state["open"]) == state["next"] - sum(map(len, state["history"].values()))
    if max_staleness == 0:
        assert again == whole
