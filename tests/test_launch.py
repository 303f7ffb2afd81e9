"""`scripts/launch.py`: which commands it makes, and real servers and trainers that end together."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import launch
import pytest
from filelock import FileLock
from helpers import (
    ENV,
    ROOT,
    change,
    finished,
    have_ended,
    living,
    make_model,
    processes_of,
    read_until,
    start_as_a_user,
    wait_until,
    write_program,
    write_recipe,
)

from config import parse_args

LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
SMALL = "--server_options", "--max-num-seqs 64"


@pytest.fixture
def my_recipe(tmp_path):
    """A short run of a tiny model, which has no server yet."""
    path = write_recipe(tmp_path, make_model(tmp_path / "model"), ["http://127.0.0.1:1"])
    change(path, "vllm_urls=", "max_tokens_per_gpu=200, vllm_urls=")
    return str(path)


def made(*words, gpus="", cwd=ROOT, **variables):
    """The commands of `--print`, each as its environment and its words; or its error. `gpus` may be unknown."""
    env = {**ENV, **variables}
    del env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    done = finished(*LAUNCH, *words, "--print", env=env, cwd=cwd)
    if done.returncode:
        assert done.returncode == 1
        return done.stderr
    found = []
    for line in done.stdout.splitlines():
        command = shlex.split(line)
        place = next(place for place, word in enumerate(command) if not re.match(r"\w+=", word))
        env = dict(word.split("=", 1) for word in command[:place])
        found.append((env, command[place:]))
    return found


def option(words, name):
    return words[words.index(name) + 1]


def test_on_a_cpu(my_recipe, tmp_path):
    """Both sides know what to take of it; and the commands may be pasted where they were asked for."""
    (env, server), (trainer_env, trainer) = made(my_recipe, "--stop", "a b", cwd=tmp_path)
    assert env == trainer_env == {}
    assert "--gpu-memory-utilization" not in server
    assert (server[0], trainer[0]) == (sys.executable, sys.executable)
    assert (tmp_path / server[1]).resolve() == ROOT / "vllm_server.py"
    assert (tmp_path / trainer[1]).resolve() == ROOT / "train.py"
    urls = f"http://127.0.0.1:{option(server, '--port')}"
    assert trainer[2:] == [my_recipe, "--stop", "a b", "--vllm_urls", urls]
    assert parse_args(trainer[2:]).vllm_urls == [urls]


def test_each_gets_its_share_of_the_cores(my_recipe):
    (env, _), (trainer_env, _) = made(my_recipe, "--trainers", "3", gpus="-1,0")
    assert env == trainer_env == {"OMP_NUM_THREADS": str(max(len(os.sched_getaffinity(0)) // 4, 1))}


LORA = "--use_peft true --lora_rank 20"


@pytest.mark.parametrize(
    ("words", "gpus", "given"),
    [
        # None: it is not given that; the length is the trainer's bound where the model has that.
        ("", "", {"--max-model-len": "200", "--enable-lora": None, "--trust-remote-code": None}),
        ("--max_tokens_per_gpu 5000", "", {"--max-model-len": "auto"}),
        ("--trust_remote_code true", "", {"--trust-remote-code": ""}),
        ("--model_id VLM --max_tokens_per_gpu 512", "", {"--max-model-len": "512"}),
        ("--model_id VLM --max_tokens_per_gpu 513", "", {"--max-model-len": "auto"}),
        # Adapters travel alone on GPUs, by the smallest rank of vLLM's that takes them.
        (LORA, "0", {"--enable-lora": "", "--max-lora-rank": "32"}),
        (LORA, "", {"--enable-lora": None}),
        (f"{LORA} --model_id VLM", "0", {"--enable-lora": None}),
        # One GPU is shared.
        ("", "3", {"--gpu-memory-utilization": "0.35", "--enable-lora": None}),
        ("--sleep", "3", {"--enable-sleep-mode": "", "--gpu-memory-utilization": "0.6"}),
        ("--sleep --max_staleness 0", "3", {"--enable-sleep-mode": ""}),
        ("", "0,1", {"--gpu-memory-utilization": None, "--enable-sleep-mode": None}),
    ],
)
def test_what_a_server_is_given(my_recipe, vlm, words, gpus, given):
    commands = made(my_recipe, *words.replace("VLM", vlm).split(), gpus=gpus)
    (env, server), (trainer_env, trainer) = commands
    for name, value in given.items():
        assert (name in server) == (value is not None), name
        assert not value or option(server, name) == value, name
    assert "--sleep" not in trainer
    if gpus == "3":
        assert env == trainer_env == {"CUDA_VISIBLE_DEVICES": "3"}


def test_the_users_own_options_win(my_recipe):
    """But for the port."""
    fields = ["--processor_kwargs", '{"max_pixels": 1000}']
    (_, server), _ = made(my_recipe, *fields, "--server_options", "--port 7 --max-num-seqs 7")
    assert option(server, "--model") == parse_args([my_recipe]).model_id
    assert json.loads(option(server, "--mm-processor-kwargs")) == {"max_pixels": 1000}
    assert server[-6:-1] == ["--port", "7", "--max-num-seqs", "7", "--port"]


@pytest.mark.parametrize("gpus", ["", "0"])
def test_a_base_in_4_bits(my_recipe, gpus):
    """It is written first, as servers load whole weights; they take adapters alone, on a CPU too."""
    words = ["--use_peft", "true", "--base_4bit", "true"]
    (_, first), (_, server), (_, trainer) = made(my_recipe, *words, gpus=gpus)
    config = parse_args(trainer[2:])
    base = f"{config.output_dir}/base"
    assert first[1:] == ["scripts/dequantize.py", base, my_recipe, *words]
    assert option(server, "--model") == base
    assert option(server, "--served-model-name") == config.model_id
    assert "--enable-lora" in server


def test_gpus_are_dealt(my_recipe):
    """Servers first; a name of the user's stays as it is."""
    sizes = ["--servers", "2", "--tensor_parallel", "2", "--trainers", "3"]
    *servers, (env, trainer) = made(my_recipe, *sizes, gpus="7,1,2,3,4,5,6,0")
    assert [given["CUDA_VISIBLE_DEVICES"] for given, _ in servers] == ["7,1", "2,3"]
    assert env == {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    for _, words in servers:
        assert option(words, "--tensor-parallel-size") == "2"
        assert not {"--enforce-eager", "--gpu-memory-utilization"} & {*words}
    urls = [f"http://127.0.0.1:{option(words, '--port')}" for _, words in servers]
    assert option(trainer, "--vllm_urls") == ",".join(urls)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    assert trainer[1:6] == [*torchrun, "train.py"]


def test_gpus_that_nvidia_smi_counts(my_recipe, tmp_path):
    fake = tmp_path / "bin" / "nvidia-smi"
    write_program(fake, "#!/bin/sh\nprintf '0\\n1\\n2\\n'\n")
    path = f"{fake.parent}:{ENV['PATH']}"
    (server, _), (trainer, _) = made(my_recipe, gpus=None, PATH=path)
    assert (server, trainer) == ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"})
    assert "and 3 are here" in made(my_recipe, "--trainers", "3", gpus=None, PATH=path)
    fake.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert made(my_recipe, gpus=None, PATH=path)[0][0] == {}


@pytest.mark.parametrize(
    ("said", "words", "gpus", "given"),
    [
        ("", "--max_steps 2 --output_dir max_staleness_1", "3", ["0"]),
        ("", "--sleep", "3", ["0"]),
        ("", "--max_staleness 1", "3", ["1"]),
        ("", "--max-staleness=2", "3", ["2"]),
        ("", "--inflight_updates false", "3", []),  # which reads it
        ("**{'max_staleness': 1},", "", "3", []),  # if only the default
        ("**dict([('max_staleness', 2)]),", "", "3", []),  # or by a value that it took from another
        ("", "", "", []),  # they share no GPU
        ("", "", "0,1", []),
    ],
)
def test_on_one_gpu_both_take_turns(my_recipe, said, words, gpus, given):
    """Unless the command line or the recipe says how far rollouts run ahead."""
    change(my_recipe, "max_staleness=0,", said)
    _, (_, trainer) = made(my_recipe, *words.split(), gpus=gpus)
    assert re.findall(r"--max.staleness[ =](\d)", " ".join(trainer)) == given


def test_other_programs(my_recipe):
    """A doctor in the trainer's place; and a trainer of saved rollouts without servers."""
    _, (_, words) = made("--doctor", my_recipe, "--max_steps", "2")
    assert words[1:5] == ["scripts/doctor.py", my_recipe, "--max_steps", "2"]
    change(
        my_recipe, "vllm_urls=['http://127.0.0.1:1']", "parts=['recipes.replay.save'], vllm_urls=[]"
    )
    ((_, words),) = made(my_recipe)
    assert "--vllm_urls" not in words


@pytest.mark.parametrize(
    ("words", "gpus", "error"),
    [
        ("--print --trainers 2", "0,1", "servers and trainer need 1 + 2 GPUs, and 2 are here: ask"),
        ("--print --servers 0", "", "numbers of servers, trainers, nodes and GPUs are 1 or more"),
        ("--print --server_nodes 2", "", "--server_nodes has no effect without --slurm"),
        ("--print --max_step 2", "", "unknown field max_step: did you mean max_steps? --help"),
        ("--print --vllm-urls=http://a:8000", "", "--vllm_urls: servers are started here; "),
        ("--print --sleep", "", "share no GPU here"),
        ("--print --sleep --max_staleness 1", "0", "set max_staleness=0"),
        ("--print --sleep --doctor", "0", "no effect with --slurm or --doctor"),
        ("--model_id no/such/model", "", "no/such/model is no model's folder, nor on the hub"),
        ("--slurm job.sh --servers 2", "", "--servers has no effect with --slurm"),
        ("--slurm job.sh --tensor_parallel 3", "", "--gpus_per_node 8 is no multiple of --tensor"),
    ],
)
def test_what_is_wrong_is_one_line(my_recipe, tmp_path, words, gpus, error):
    env = {**ENV, "CUDA_VISIBLE_DEVICES": gpus}
    done = finished(*LAUNCH, my_recipe, *words.split(), env=env, cwd=tmp_path)
    assert re.fullmatch(f"error: .*{re.escape(error)}.*\n", done.stderr)
    assert not (tmp_path / "job.sh").exists()


def test_a_folder_with_a_run_in_it(my_recipe, tmp_path):
    """It keeps the logs of that run."""
    log = tmp_path / "run" / "server-0.log"
    log.parent.mkdir()
    log.write_text("of that run")
    with FileLock(tmp_path / "run" / "lock"):
        done = finished(*LAUNCH, my_recipe)
    assert done.returncode == 1
    assert done.stderr == f"error: output_dir={tmp_path}/run has another run in it: end it first\n"
    assert log.read_text() == "of that run"


def marked(my_recipe, program=""):
    """Ids of the processes that name the recipe's folder on their command line, and a program."""
    folder = str(Path(my_recipe).parent)
    return [
        number
        for number, _, _, command in living()
        if folder in command and program in command and number != os.getpid()
    ]


@pytest.mark.slow
def test_a_run_of_two_ranks(my_recipe, tmp_path):
    """An earlier run's log of a server is kept."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "server-0.log").write_text("earlier")
    process = start_as_a_user(*LAUNCH, my_recipe, "--trainers", "2", "--max_steps", "2", *SMALL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert re.search(r"starting the rollout server at (\S+) .*\n\1 serves\n", output), output
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "server-0.log.old").read_text() == "earlier"
    assert not marked(my_recipe)


CAUGHT = [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


@pytest.mark.server
@pytest.mark.parametrize(
    "number", [*(pytest.param(each, marks=pytest.mark.slow) for each in CAUGHT), signal.SIGKILL]
)
def test_it_ends_with_all_that_it_started(my_recipe, number):
    """A signal that can be caught lets the trainer save its last step."""
    process = start_as_a_user(*LAUNCH, my_recipe, "--max_steps", "1000", *SMALL)
    read_until(process, "step 1/1000")
    processes = processes_of(process.pid)
    assert len(processes) >= 4  # it, the server and its engine, the trainer
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    wait_until(lambda: have_ended(processes))
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 0, output  # the trainer's own
        assert "saving the last whole step" in output
        assert re.search(r"saved .*/checkpoint-\d+\n", output), output


@pytest.mark.slow
def test_ctrl_c_while_the_server_loads(my_recipe, tmp_path):
    """It ends at once: end_all would wait 40 s for it."""
    process = start_as_a_user(*LAUNCH, my_recipe, *SMALL)
    log = tmp_path / "run" / "server-0.log"
    wait_until(lambda: log.exists() and "Loading safetensors" in log.read_text(), 120)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=35)
    assert process.returncode == 130
    assert not marked(my_recipe)


LOG = r"^error: the server at \S+ ended before it served, and the end of \S+/run/server-0\.log is\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--server_options=--no-such-option"], LOG + r"(.*\n)*.*: --no-such-option"),
        (["--eval_dataset_id", "no.jsonl", *SMALL], r"error: .*no\.jsonl.*\n\Z"),
    ],
)
def test_a_server_or_a_trainer_that_does_not_start(my_recipe, words, error):
    done = finished(*LAUNCH, my_recipe, *words)
    assert done.returncode == 1
    assert re.search(error, done.stderr, re.MULTILINE), done.stderr
    assert not marked(my_recipe)


@pytest.mark.slow
def test_a_server_that_dies_is_started_again(my_recipe):
    """The trainer, which waits for it, goes on; if it dies again within minutes it is given up."""
    process = start_as_a_user(*LAUNCH, my_recipe, "--max_steps", "1000", *SMALL)
    for moment, word in (
        ("step 1/1000", "ended, and starts again"),
        (" is back", "ended again, and is given up"),
    ):
        read_until(process, moment)
        (server,) = marked(my_recipe, "vllm_server.py")
        os.kill(server, signal.SIGKILL)
        read_until(process, word)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert not marked(my_recipe)


SRUN = """#!/usr/bin/env bash
# Runs a step here, in place of each node, and ends it when it ends.
log=/dev/stdout count=1
while [[ $1 == --* ]]; do
    case $1 in --output=*) log=${1#*=} ;; --nodes=*) count=${1#*=} ;; esac
    echo "$1" >> "$SRUN_LOG"
    shift
done
echo "$*" >> "$SRUN_LOG"
for ((node = 0; node < count; node++)); do setsid "$@" >> "$log" 2>&1 & pids+=($!); done
trap 'for pid in "${pids[@]}"; do kill -TERM -- -"$pid"; done; exit 143' TERM
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""


def job(my_recipe, tmp_path, *words):
    """The batch script, its path, and an environment with commands of Slurm that run all on this machine."""
    path, folder = tmp_path / "job.sh", tmp_path / "bin"
    done = finished(*LAUNCH, my_recipe, "--slurm", path, *words)
    assert done.stdout == f"sbatch {path}\n", done.stderr
    write_program(folder / "srun", SRUN)
    write_program(folder / "scontrol", "#!/bin/sh\nprintf 'localhost\\n127.0.0.1\\n127.0.0.2\\n'\n")
    while (port := launch.free_port()) >= 30_000:  # the job's number is at most 20,000 below
        pass
    env = {
        "PATH": f"{folder}:{ENV['PATH']}",
        "SLURM_JOB_ID": str(port - 10_000),
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SRUN_LOG": str(tmp_path / "srun.log"),
    }
    return path, {**ENV, **env}


def test_the_steps_of_a_job(my_recipe, tmp_path):
    """Two servers of two GPUs on one node, ranks on the two others; stand-ins for the programs."""
    words = "--server_nodes 1 --trainer_nodes 2 --gpus_per_node 4 --tensor_parallel 2 --seed 7"
    path, env = job(my_recipe, tmp_path, *words.split())
    stand_in = tmp_path / "bin" / "python"
    # It ends once the steps of both servers have begun.
    noted = """$(grep -c -e '--host 0.0.0.0' "$SRUN_LOG")"""
    write_program(stand_in, f'#!/bin/sh\nuntil [ "{noted}" = 2 ]; do sleep 0.1; done\n')
    text = re.sub(r"python=\S+", f"python={stand_in}", path.read_text())
    text = text.replace(f"server=({sys.executable} ", "server=(true ")
    assert "#SBATCH --nodes=3 " in text
    subprocess.run(["bash", "-c", text], check=True, env=env, timeout=60)
    number = int(env["SLURM_JOB_ID"])
    port = number + 10_000
    servers = (tmp_path / "run" / "servers.txt").read_text().split()
    assert servers == [f"http://localhost:{port + 1}", f"http://localhost:{port + 3}"]
    steps = (tmp_path / "srun.log").read_text()
    trainer = f"train.py {my_recipe} --seed 7 --vllm_urls @{tmp_path}/run/servers.txt"
    for said, count in (
        ("--nodelist=localhost\n", 2),
        ("CUDA_VISIBLE_DEVICES=0,1 ", 1),
        ("CUDA_VISIBLE_DEVICES=2,3 ", 1),
        ("--tensor-parallel-size 2 --host 0.0.0.0 --port", 2),
        ("--nodes=2\n", 1),
        ("--nodelist=127.0.0.1,127.0.0.2\n", 1),
        (f"--nnodes=2 --nproc_per_node=4 --rdzv_id={number} --rdzv_backend=c10d", 1),
        (f"--rdzv_endpoint=127.0.0.1:{port} {trainer} --resume_from_checkpoint auto\n", 1),
        ("VLLM_API_KEY", 0),
    ):
        assert steps.count(said) == count, said


@pytest.mark.slow
def test_a_job_of_two_nodes_that_train(my_recipe, tmp_path):
    """One server and two nodes of a rank, all on this CPU; the server ends with the trainer."""
    words = "--trainer_nodes 2 --gpus_per_node 1 --max_steps 2"
    path, env = job(my_recipe, tmp_path, *words.split())
    done = subprocess.run(["bash", path], env=env, timeout=300, check=False, capture_output=True)
    run = tmp_path / "run"
    assert done.returncode == 0, done.stderr + (run / "trainer.log").read_bytes()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    wait_until(lambda: not marked(my_recipe))
