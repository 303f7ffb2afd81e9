"""`scripts/launch.py`: which commands it makes, and real servers and trainers that end together."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import launch
import pytest
from filelock import FileLock
from helpers import CHAT_TEMPLATE, ENV, RECIPE, ROOT, make_model

from config import parse_args

LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
SMALL = "--server_options", "--max-num-seqs 64"


@pytest.fixture
def my_recipe(tmp_path):
    """A short run of a tiny model, which has no server yet."""
    model = make_model(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    path = tmp_path / f"recipe_{tmp_path.name}.py"
    text = RECIPE.format(model=model, urls=["http://127.0.0.1:1"], output=str(tmp_path / "run"))
    path.write_text(text.replace("vllm_urls=", "max_tokens_per_gpu=200, vllm_urls="))
    return str(path)


def made(*words, gpus="", path=None, cwd=ROOT):
    """The commands of `--print`, each as its environment and its words; or its error."""
    env = {**ENV, "PATH": path or ENV["PATH"]} | (
        {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    )
    del env["OMP_NUM_THREADS"]
    if gpus is None:
        del env["CUDA_VISIBLE_DEVICES"]
    done = subprocess.run(
        [*LAUNCH, *words, "--print"], capture_output=True, text=True, env=env, cwd=cwd, check=False
    )
    if done.returncode:
        assert done.returncode == 1
        return done.stderr
    lines = map(shlex.split, done.stdout.splitlines())
    found = []
    for line in lines:
        num = next(place for place, word in enumerate(line) if not re.match(r"\w+=", word))
        found.append((dict(word.split("=", 1) for word in line[:num]), line[num:]))
    return found


def option(words, name):
    return words[words.index(name) + 1]


def test_on_a_cpu(my_recipe):
    """Both sides know what to take of it; with more of them each gets its share of the cores."""
    (env, server), (trainer_env, trainer) = made(my_recipe, "--max_steps", "2", "--stop", "a b")
    assert env == trainer_env == {}
    assert "--gpu-memory-utilization" not in server
    (env, _), (trainer_env, _) = made(my_recipe, "--trainers", "3", gpus="-1,0")
    assert env == trainer_env == {"OMP_NUM_THREADS": str(max(len(os.sched_getaffinity(0)) // 4, 1))}
    assert server[:2] == [sys.executable, "vllm_server.py"]
    urls = f"http://127.0.0.1:{option(server, '--port')}"
    assert trainer == [
        sys.executable,
        "train.py",
        my_recipe,
        "--max_steps",
        "2",
        "--stop",
        "a b",
        "--vllm_urls",
        urls,
    ]
    assert parse_args(trainer[2:]).vllm_urls == [urls]


def test_elsewhere_the_commands_still_work(my_recipe, tmp_path):
    """Paths are relative to the working directory, and commands may be pasted."""
    (_, server), (_, trainer) = made(my_recipe, cwd=tmp_path)
    assert (tmp_path / server[1]).resolve() == ROOT / "vllm_server.py"
    assert (tmp_path / trainer[1]).resolve() == ROOT / "train.py"


def test_what_the_server_takes_from_the_recipe(my_recipe):
    """The length is the trainer's bound where the model has that; the user's own options win, but for the port."""
    fields = ["--processor_kwargs", '{"max_pixels": 1000}', "--trust_remote_code", "true"]
    (_, server), _ = made(my_recipe, *fields, "--server_options", "--port 7 --max-num-seqs 7")
    config = parse_args([my_recipe])
    assert option(server, "--model") == config.model_id
    assert option(server, "--max-model-len") == "200"
    assert json.loads(option(server, "--mm-processor-kwargs")) == {"max_pixels": 1000}
    assert "--trust-remote-code" in server
    assert server[-6:-1] == ["--port", "7", "--max-num-seqs", "7", "--port"]
    (_, server), _ = made(my_recipe, "--max_tokens_per_gpu", "5000")
    assert option(server, "--max-model-len") == "auto"
    assert "--trust-remote-code" not in server
    assert "--mm-processor-kwargs" not in server


def test_adapters_travel_alone_on_gpus(my_recipe, vlm):
    """By the smallest rank of vLLM's that takes them; not where merged weights are the better choice, or the only."""
    lora = ["--use_peft", "true", "--lora_rank", "20"]
    (_, server), _ = made(my_recipe, *lora, gpus="0")
    assert "--enable-lora" in server
    assert option(server, "--max-lora-rank") == "32"
    for words, gpus in ((lora, ""), ([], "0"), ([*lora, "--model_id", vlm], "0")):
        (_, server), _ = made(my_recipe, *words, gpus=gpus)
        assert "--enable-lora" not in server


def test_a_base_in_4_bits(my_recipe):
    """It is written first, as servers load whole weights; they take adapters alone, on a CPU too."""
    for gpus in ("", "0"):
        words = ["--use_peft", "true", "--base_4bit", "true"]
        (_, first), (_, server), (_, trainer) = made(my_recipe, *words, gpus=gpus)
        config = parse_args(trainer[2:])
        assert first[1:3] == ["scripts/dequantize.py", f"{config.output_dir}/base"]
        assert first[3:] == [my_recipe, *words]
        assert option(server, "--model") == f"{config.output_dir}/base"
        assert option(server, "--served-model-name") == config.model_id
        assert "--enable-lora" in server


def test_a_server_that_sleeps(my_recipe):
    """On the GPU that it shares alone, and where nothing is sampled while the trainer trains."""
    words = ["--sleep", "--max_staleness", "0"]
    (_, server), (_, trainer) = made(my_recipe, *words, gpus="0")
    assert "--enable-sleep-mode" in server
    assert option(server, "--gpu-memory-utilization") == "0.6"
    assert "--sleep" not in trainer
    for gpus in ("", "0,1"):
        assert "share no GPU here" in made(my_recipe, *words, gpus=gpus)
    assert "set max_staleness=0" in made(my_recipe, "--sleep", "--max_staleness", "1", gpus="0")
    assert "no effect with --slurm or --doctor" in made(my_recipe, *words, "--doctor", gpus="0")


def test_the_length_of_a_vision_language_model(my_recipe, vlm):
    """Its text model has it."""
    for bound, length in (("512", "512"), ("513", "auto")):
        (_, server), _ = made(my_recipe, "--model_id", vlm, "--max_tokens_per_gpu", bound)
        assert option(server, "--max-model-len") == length


def test_gpus_are_dealt(my_recipe):
    """Servers first; a name of the user's stays as it is."""
    *servers, (env, trainer) = made(
        my_recipe,
        "--servers",
        "2",
        "--tensor_parallel",
        "2",
        "--trainers",
        "3",
        gpus="7,1,2,3,4,5,6,0",
    )
    assert [given for given, _ in servers] == [
        {"CUDA_VISIBLE_DEVICES": "7,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert env == {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    assert all(option(words, "--tensor-parallel-size") == "2" for _, words in servers)
    assert all(
        "--enforce-eager" not in words and "--gpu-memory-utilization" not in words
        for _, words in servers
    )
    ports = [option(words, "--port") for _, words in servers]
    assert option(trainer, "--vllm_urls") == ",".join(f"http://127.0.0.1:{port}" for port in ports)
    assert trainer[1:6] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=3",
        "train.py",
    ]


def test_gpus_that_nvidia_smi_counts(my_recipe, tmp_path):
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nprintf '0\\n1\\n2\\n'\n")
    fake.chmod(0o755)
    path = f"{fake.parent}:{ENV['PATH']}"
    server, trainer = made(my_recipe, gpus=None, path=path)
    assert server[0] == {"CUDA_VISIBLE_DEVICES": "0"}
    assert trainer[0] == {"CUDA_VISIBLE_DEVICES": "1"}
    assert "and 3 are here" in made(my_recipe, "--trainers", "3", gpus=None, path=path)
    fake.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert made(my_recipe, gpus=None, path=path)[0][0] == {}


def test_one_gpu_is_shared(my_recipe):
    (env, server), (trainer_env, _) = made(my_recipe, gpus="3")
    assert env == trainer_env == {"CUDA_VISIBLE_DEVICES": "3"}
    assert option(server, "--gpu-memory-utilization") == "0.35"


UNSAID = "max_staleness=0,"  # of `helpers.RECIPE`


@pytest.mark.parametrize(
    ("said", "words", "given"),
    [
        ("", [], ["0"]),
        ("", ["--max_steps", "2", "--output_dir", "max_staleness_1"], ["0"]),
        ("", ["--sleep"], ["0"]),
        ("", ["--doctor"], ["0"]),
        ("", ["--max_staleness", "1"], ["1"]),
        ("", ["--max-staleness=2"], ["2"]),
        ("", ["--inflight_updates", "false"], []),  # which reads it
        ("max_staleness=1,", [], []),
        ("max_staleness = 1,", ["--max_steps", "2"], []),
        ("**{'max_staleness': 1},", [], []),
        ("max_staleness=2,", [], []),
        ("max_staleness=1,", ["--max_staleness=0"], ["0"]),
    ],
)
def test_on_one_gpu_both_take_turns(my_recipe, said, words, given):
    """Unless the command line or the recipe says how far rollouts run ahead, if only the default."""
    text = Path(my_recipe).read_text()
    assert UNSAID in text
    Path(my_recipe).write_text(text.replace(UNSAID, said))
    _, (_, trainer) = made(my_recipe, *words, gpus="3")
    flags = [word.replace("-", "_") for word in trainer]
    found = [
        word.partition("=")[2] or trainer[place + 1]
        for place, word in enumerate(trainer)
        if flags[place].startswith("__max_staleness")
    ]
    assert found == given
    if "--sleep" in words:
        return
    fields = [word for word in words if word != "--doctor"]
    for gpus in ("", "0,1"):  # where they share none, nothing is added
        _, (_, apart) = made(my_recipe, *words, gpus=gpus)
        assert apart[2 : apart.index("--vllm_urls")] == [my_recipe, *fields]


def test_a_recipe_built_on_another_says_it_too(my_recipe, tmp_path):
    """By its value, where that is not the default."""
    mine = tmp_path / f"built_{tmp_path.name}.py"
    text = Path(my_recipe).read_text()
    for said, given in (("max_staleness=2,", []), ("", ["--max_staleness", "0"])):
        Path(my_recipe).write_text(text.replace(UNSAID, said))
        mine.write_text(f"from {Path(my_recipe).stem} import config\n")
        _, (_, trainer) = made(str(mine), gpus="3")
        assert trainer[3 : trainer.index("--vllm_urls")] == given


def test_a_run_without_servers(my_recipe):
    with open(my_recipe, "a") as file:
        file.write("from dataclasses import replace\n")
        file.write("config = replace(config, vllm_urls=[], parts=['recipes.replay.save'])\n")
    ((_, words),) = made(my_recipe)
    assert "--vllm_urls" not in words


def test_the_doctor(my_recipe):
    _, (_, words) = made("--doctor", my_recipe, "--max_steps", "2")
    assert words[1:5] == ["scripts/doctor.py", my_recipe, "--max_steps", "2"]


@pytest.mark.parametrize(
    ("words", "gpus", "error"),
    [
        (["--trainers", "2"], "0,1", "servers and trainer need 1 + 2 GPUs, and 2 are here: ask for fewer of them"),
        (["--servers", "2"], "0", "servers and trainer need 1 + 1 + 1 GPUs, and 1 are here: ask for fewer of them"),
        (["--servers", "0"], "", "numbers of servers, trainers, nodes and GPUs are 1 or more"),
        (["--server_nodes", "2"], "", "--server_nodes has no effect without --slurm"),
        (["--max_step", "2"], "", "unknown field max_step: did you mean max_steps? --help lists them all"),
        (["--vllm-urls=http://a:8000"], "", "--vllm_urls: servers are started here; .*"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(my_recipe, words, gpus, error):
    assert re.fullmatch(
        f"error: {error.replace('+', '[+]').replace('?', '[?]')}\n",
        made(my_recipe, *words, gpus=gpus),
    )


@pytest.mark.parametrize("model", ["no/such/model", "no such model"])
def test_a_model_that_is_nowhere(my_recipe, model):
    """Before anything is started; to print a command no model is looked for."""
    done = subprocess.run(
        [*LAUNCH, my_recipe, "--model_id", model],
        capture_output=True, text=True, env=ENV, timeout=120, check=False,
    )  # fmt: skip
    assert re.fullmatch(
        f"error: model_id={model} is no model's folder, nor on the hub: .*\n", done.stderr
    )
    (_, server), _ = made(my_recipe, "--model_id", model)
    assert option(server, "--max-model-len") == "auto"


def test_nothing_heavy_is_imported_before_it_must():
    code = "import sys, launch; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    command, folder = [sys.executable, "-c", code], ROOT / "scripts"
    assert (
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
        == "set()\n"
    )


# -- real servers and trainers -----------------------------------------------------------------------------------------


def launched(*words):
    """The command, from `/`; it hears the signals that tests in the background, or of `nohup`, do not."""
    env = {name: value for name, value in ENV.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [*LAUNCH, *words],
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        preexec_fn=lambda: [
            signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)
        ],
    )


def marked(my_recipe):
    """Living processes that name the recipe's folder on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(Path(my_recipe).parent) in (entry / "cmdline").read_text() and entry.name != str(
                os.getpid()
            ):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def gone(my_recipe, seconds=20):
    """Whether all of them are, after some seconds at most."""
    deadline = time.monotonic() + seconds
    while marked(my_recipe) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not marked(my_recipe)


def until(process, text):
    """Read its output up to a line with a text; what was read."""
    read = []
    for line in process.stdout:
        read.append(line)
        if text in line:
            return "".join(read)
    raise AssertionError("".join(read))


@pytest.mark.server
@pytest.mark.slow
def test_a_run_of_two_ranks(my_recipe, tmp_path):
    """An earlier run's log of a server is kept."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "server-0.log").write_text("earlier")
    process = launched(my_recipe, "--trainers", "2", "--max_steps", "2", *SMALL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert re.search(r"starting the rollout server at (\S+) .*\n\1 serves\n", output), output
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "run" / "server-0.log.old").read_text() == "earlier"
    assert gone(my_recipe, 0)


@pytest.mark.server
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
def test_it_ends_with_all_that_it_started(my_recipe, tmp_path, number):
    """A signal that can be caught lets the trainer save its last step."""
    process = launched(my_recipe, "--max_steps", "1000", *SMALL)
    until(process, "step 1/1000")
    assert len(marked(my_recipe)) >= 3  # it, the server, the trainer
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert gone(my_recipe)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 0, output  # the trainer's own
        assert "saving the last whole step" in output
        assert re.search(r"saved .*/checkpoint-\d+\n", output), output


@pytest.mark.server
@pytest.mark.slow
def test_ctrl_c_while_the_server_loads(my_recipe, tmp_path):
    """It ends at once: end_all would wait 40 s for it."""
    process, log = launched(my_recipe, *SMALL), tmp_path / "run" / "server-0.log"
    deadline = time.monotonic() + 120
    while not log.exists() or "Loading safetensors" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=35)
    assert process.returncode == 130
    assert gone(my_recipe, 0)


@pytest.mark.server
@pytest.mark.slow
def test_a_server_that_does_not_start(my_recipe, tmp_path):
    process = launched(my_recipe, "--server_options=--no-such-option")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    log = tmp_path / "run" / "server-0.log"
    assert re.search(
        rf"^error: the server at \S+ ended before it served, and the end of {log} is\n",
        output,
        re.MULTILINE,
    )
    assert "unrecognized arguments: --no-such-option" in output
    assert gone(my_recipe, 0)


@pytest.mark.server
@pytest.mark.slow
def test_a_server_that_dies_is_started_again(my_recipe, tmp_path):
    """The trainer, which waits for it, goes on; if it dies again within minutes it is given up."""
    process = launched(my_recipe, "--max_steps", "1000", *SMALL)
    for text, word in (
        ("step 1/1000", "ended, and starts again"),
        (" is back", "ended again, and is given up"),
    ):
        until(process, text)
        (server,) = [
            int(entry.name) for entry in Path("/proc").glob("[0-9]*") if is_server(entry, my_recipe)
        ]
        os.kill(server, signal.SIGKILL)
        until(process, word)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert gone(my_recipe, 0)


def is_server(entry, my_recipe):
    try:
        words = (entry / "cmdline").read_text()
    except OSError:
        return False
    return str(Path(my_recipe).parent) in words and "vllm_server.py" in words


@pytest.mark.server
@pytest.mark.slow
def test_a_trainer_that_fails(my_recipe, tmp_path):
    """Its own error is the last line, but for what ends it without a word."""
    process = launched(my_recipe, "--eval_dataset_id", "no.jsonl", *SMALL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "error: " in output.splitlines()[-1]
    assert "no.jsonl" in output.splitlines()[-1]
    assert gone(my_recipe, 0)


def test_a_folder_with_a_run_in_it(my_recipe, tmp_path):
    """It keeps the logs of that run."""
    log = tmp_path / "run" / "server-0.log"
    log.parent.mkdir()
    log.write_text("of that run")
    with FileLock(tmp_path / "run" / "lock"):
        done = subprocess.run(
            [*LAUNCH, my_recipe], capture_output=True, text=True, env=ENV, check=False
        )
    assert (done.returncode, done.stderr) == (
        1,
        f"error: output_dir={tmp_path}/run has another run in it: end it first\n",
    )
    assert log.read_text() == "of that run"


# -- Slurm -------------------------------------------------------------------------------------------------------------

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
    done = subprocess.run(
        [*LAUNCH, my_recipe, "--slurm", path, *words],
        capture_output=True,
        text=True,
        check=False,
        env=ENV,
    )
    assert done.stdout == f"sbatch {path}\n", done.stderr
    subprocess.run(["bash", "-n", path], check=True)
    folder.mkdir()
    (folder / "srun").write_text(SRUN)
    (folder / "scontrol").write_text("#!/bin/sh\nprintf 'localhost\\n127.0.0.1\\n127.0.0.2\\n'\n")
    for file in folder.iterdir():
        file.chmod(0o755)
    while (port := launch.free_port()) >= 30_000:  # the job's number is at most 20,000 below
        pass
    env = {
        "PATH": f"{folder}:{ENV['PATH']}",
        "SLURM_JOB_ID": str(port - 10_000),
        "SLURM_JOB_NODELIST": "node[1-3]",
    }
    return path, {**ENV, **env, "SRUN_LOG": str(tmp_path / "srun.log")}


def test_the_steps_of_a_job(my_recipe, tmp_path):
    """Two servers of two GPUs on one node, ranks on the two others; stand-ins for the programs."""
    words = "--server_nodes 1 --trainer_nodes 2 --gpus_per_node 4 --tensor_parallel 2 --seed 7"
    path, env = job(my_recipe, tmp_path, *words.split())
    stand_in = tmp_path / "bin" / "python"
    stand_in.write_text("#!/bin/sh\nsleep 2\n")  # the steps of the servers are begun meanwhile
    stand_in.chmod(0o755)
    text = re.sub(r"python=\S+", f"python={stand_in}", path.read_text()).replace(
        f"server=({sys.executable} ", "server=(true "
    )
    assert "#SBATCH --nodes=3 " in text
    subprocess.run(["bash", "-c", text], check=True, env=env, timeout=60)
    port = int(env["SLURM_JOB_ID"]) + 10_000
    servers = (tmp_path / "run" / "servers.txt").read_text().split()
    assert servers == [f"http://localhost:{port + 1}", f"http://localhost:{port + 3}"]
    steps = (tmp_path / "srun.log").read_text()
    assert steps.count("--nodelist=localhost\n") == 2
    assert "CUDA_VISIBLE_DEVICES=0,1 " in steps
    assert "CUDA_VISIBLE_DEVICES=2,3 " in steps
    assert steps.count("--tensor-parallel-size 2 --host 0.0.0.0 --port") == 2
    assert "--nodes=2\n" in steps
    assert "--nodelist=127.0.0.1,127.0.0.2\n" in steps
    assert f"--nnodes=2 --nproc_per_node=4 --rdzv_id={port - 10_000} --rdzv_backend=c10d" in steps
    trainer = f"--rdzv_endpoint=127.0.0.1:{port} train.py {my_recipe} --seed 7 --vllm_urls @{tmp_path}/run/servers.txt"
    assert f"{trainer} --resume_from_checkpoint auto\n" in steps
    assert "VLLM_API_KEY" not in steps


@pytest.mark.server
@pytest.mark.slow
def test_a_job_of_two_nodes_that_train(my_recipe, tmp_path):
    """One server and two nodes of a rank, all on this CPU; the server ends with the trainer."""
    words = ["--trainer_nodes", "2", "--gpus_per_node", "1"]
    path, env = job(my_recipe, tmp_path, *words, "--max_steps", "2")
    done = subprocess.run(
        ["bash", path], env=env, timeout=300, check=False, capture_output=True, text=True
    )
    run = tmp_path / "run"
    assert done.returncode == 0, done.stderr + (run / "trainer.log").read_text()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert gone(my_recipe)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--servers", "2"], "--servers has no effect with --slurm"),
        (["--tensor_parallel", "3"], "--gpus_per_node 8 is no multiple of --tensor_parallel"),
    ],
)
def test_a_job_that_cannot_be(my_recipe, tmp_path, words, error):
    done = subprocess.run(
        [*LAUNCH, my_recipe, "--slurm", tmp_path / "job.sh", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == f"error: {error}\n"
    assert not (tmp_path / "job.sh").exists()
