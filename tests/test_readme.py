"""The documents' servers and trainers, as they stand there, with tiny models: real vLLM servers and real ranks."""

import contextlib
import json
import re
import shlex
import sys
from typing import Any

import build_tiny
import pytest
from documents import DOCUMENTS, README, blocks, commands, metrics
from forked import Forked
from helpers import CHAT_TEMPLATE, ENV, ROOT, free_port, make_model, read
from launch import LocalServer, end_all, popen

SMALL = "--max_completion_len 8 --batch_size 4 --num_generations 4 --max_tokens_per_gpu 2048 --max_steps 1"
OF_MATH = "--dataset_id math.jsonl --eval_dataset_id none --eval_steps 0"
OF_MATH += " --drop_zero_advantage false"  # no random model is right
FOLDERS = ("recipes", "rollouts", "training", "weights", "server", "scripts", "benchmarks")
SERVING = {**ENV, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
TRAINS = re.compile(r"(\w+=\S+ )*(torchrun .*|python )train\.py ")
PLAIN_LOOP = "python -m recipes.plain_loop "
BLOCKS = [block for text in DOCUMENTS.values() for block in commands(text)]
TRAINING = [block for block in BLOCKS if any(map(TRAINS.match, block))]


def make_clone(folder):
    """The repository's files, README's recipe, and data for it."""
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in FOLDERS)]:
        (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "my_recipe.py").write_text(blocks("python", README)[1])
    rows = [{"prompt": f"{i}+{i}=", "problem": f"{i}+{i}", "answer": str(2 * i)} for i in range(16)]
    for name in ("my_problems", "math"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@contextlib.contextmanager
def started(line, folder, env, url=""):
    """A command of a document in a session of its own, which ends with the block."""
    log = folder / f"{free_port()}.log"
    given = re.match(r"(?:until )?((?:\w+=\S+ )*)python (vllm_server.py [^;]*)", line)
    if given:  # what it says is done, without importing vLLM again
        more = dict(word.split("=", 1) for word in given[1].split())
        process: Any = Forked(["python", *shlex.split(given[2])], log, env | more)
    else:
        command = f"cd {folder}; source .venv/bin/activate; {line}"
        process = popen(["bash", "-c", command], log, env)
    try:
        yield LocalServer(url, process, log)
    finally:
        end_all([process])


def with_stand_ins(block, model):
    """The block with a tiny model, free ports, and ranks that fit this machine."""
    text = "\n".join(block)
    if "--port 8000" in text and ":8000" not in text:  # the default of both sides
        text = text.replace("my_recipe.py", "my_recipe.py --vllm_urls http://127.0.0.1:8000")
    text = re.sub(r"Qwen/[\w.-]+", model, text)
    for port in set(re.findall(r":(8\d{3}|29500)\b", text)):
        text = re.sub(rf"(:|--port ){port}\b", rf"\g<1>{free_port()}", text)
    for old, new in (
        ("=10.0.0.9", "=127.0.0.1"),
        ("=10.0.0.1", "=127.0.0.1"),
        ("--nproc_per_node=8", "--nproc_per_node=1"),
        ("--tensor-parallel-size 2", ""),
        ("vllm_server.py", "vllm_server.py --dtype float32 --enforce-eager --max-model-len 640"),
    ):
        text = text.replace(old, new)
    return text


def test_the_plain_loop(tmp_path, monkeypatch):
    """README's commands, at a free port and for two steps of an untaught model; the loop waits for the server."""
    monkeypatch.setattr(build_tiny, "teach", lambda *_: None)
    (block,) = [block for block in commands(README) if block[-1].startswith(PLAIN_LOOP)]
    environment, build, serve, train = block
    assert environment == "source .venv/bin/activate"
    folder, port = make_clone(tmp_path), free_port()
    build_tiny.build(folder / "outputs" / "tiny", 0, "sort")
    with started(build + " --output outputs/tiny", folder, ENV) as built:
        assert built.process.wait(300) == 0, built.log.read_text()
    assert "outputs/tiny is there already" in built.log.read_text()
    few = f" --vllm_urls http://127.0.0.1:{port} --max_steps 2"
    serve = serve.replace("outputs/tiny", f"{folder}/outputs/tiny")  # it is forked elsewhere
    serve += f" --port {port} --dtype float32 --enforce-eager"
    with started(serve, folder, SERVING), started(train + few, folder, SERVING) as loop:
        assert loop.process.wait(300) == 0, loop.log.read_text()
    assert "step 2/2 " in loop.log.read_text()


@pytest.mark.parametrize(
    "block", TRAINING, ids=lambda block: block[-1].rpartition("train.py ")[2].split(" ")[0]
)
def test_servers_and_trainers(block, tmp_path):
    """Each block's own lines train one step, whose metrics are those that docs/metrics.md explains."""
    folder, output = make_clone(tmp_path), tmp_path / "run"
    model = make_model(folder / "model", max_len=1024, chat_template=CHAT_TEMPLATE)
    env, waiting = SERVING, []
    with contextlib.ExitStack() as stack:
        for line in with_stand_ins(block, model).splitlines():
            if line.startswith("export "):
                env = env | dict(word.split("=", 1) for word in shlex.split(line)[1:])
            elif "vllm_server.py" in line:
                address = "http://127.0.0.1:" + line.partition("--port ")[2].split()[0]
                waiting.append(stack.enter_context(started(line, folder, env, address)))
            elif TRAINS.match(line):
                for server in waiting:
                    server.wait()
                nodes = int(next(iter(re.findall(r"--nnodes=(\d+)", line)), 1))
                more = f" {SMALL} --output_dir {output} --model_id {model}"
                more += f" {OF_MATH}" if "fsdp_multi_node" in line else ""
                ranks = [
                    stack.enter_context(started(line + more, folder, env)) for _ in range(nodes)
                ]
                for rank in ranks:
                    assert rank.process.wait(300) == 0, rank.log.read_text()[-4000:]
                assert any("step 1/1 " in rank.log.read_text() for rank in ranks)
            else:
                assert line == "source .venv/bin/activate"
    (row,) = read(tmp_path, "metrics")
    assert {name for name in row if not name.startswith("rewards/")} <= metrics()
