"""What the README says: its commands run, its flags exist, its metrics are those of a run, its translation agrees."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from helpers import CHAT_TEMPLATE, ENV, ROOT, free_port, make_model
from local_server import LocalServer
from transformers import Qwen3Config, Qwen3ForCausalLM

from config import TrainConfig, parse_args

README = (ROOT / "README.md").read_text()
TRANSLATION = (ROOT / "README.zh.md").read_text()
SMALL = "--max_completion_len 8 --batch_size 4 --num_generations 4 --max_tokens_per_gpu 2048 --max_steps 1"
OF_MATH = "--dataset_id math.jsonl --eval_dataset_id none --eval_dataset_split test --eval_steps 0"
OF_MATH += " --drop_zero_advantage false"  # no random model is right
SERVERS = {
    "gpu-memory-utilization",
    "dtype",
    "mm-processor-kwargs",
    "limit-mm-per-prompt",
    "host",
    "api-key",
    "restart",
}
SCRIPTS = {"remote", "json"}


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text=README):
    """The lines of the shell blocks, joined where they go on, without comments: a list for each block."""
    cleaned = (re.sub(r"\s+# .*", "", block.replace("\\\n", " "), flags=re.MULTILINE) for block in blocks("bash", text))
    return [[re.sub(r"\s+", " ", line).strip(" &") for line in block.splitlines()] for block in cleaned]


def inline(text=README):
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [re.sub(r"\s+", " ", span) for span in spans]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the repository's files, the README's recipe, and data for it; and a model to stand in."""
    folder = tmp_path_factory.mktemp("clone")
    for path in [
        *ROOT.glob("*.py"),
        *(ROOT / name for name in ("recipes", "scripts", "benchmarks", "rollouts", "training")),
    ]:
        (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "my_recipe.py").write_text(blocks("python")[0])
    rows = [{"prompt": f"{i}+{i}=", "problem": f"{i}+{i}", "answer": str(2 * i)} for i in range(16)]
    for name in ("my_problems", "math"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, make_model(folder / "model", max_len=1024, chat_template=CHAT_TEMPLATE)


@contextlib.contextmanager
def started(command, folder, env, url=""):
    """A command of the README in a session of its own, which ends with the block."""
    log = folder / f"{free_port()}.log"
    with log.open("w") as out:
        words = ["bash", "-c", f"source .venv/bin/activate; exec env {command}"]
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        yield LocalServer(url, process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


TRAINING = [block for block in commands() if any("torchrun" in line for line in block)]


@pytest.mark.parametrize("block", TRAINING, ids=lambda block: block[-1].rpartition("train.py ")[2].split(" ")[0])
def test_servers_and_trainers(block, place, tmp_path):
    """The README's own lines, with a tiny model, few tokens, free ports, and ranks that fit this machine."""
    folder, model = place
    text = "\n".join(block)
    stand_ins = dict.fromkeys(re.findall(r"Qwen/\S+", text), model)
    stand_ins |= {f":{port}": f":{free_port()}" for port in set(re.findall(r":(8\d{3}|29500)\b", text))}
    stand_ins |= {f"--port {old[1:]}": f"--port {new[1:]}" for old, new in stand_ins.items() if old[0] == ":"}
    stand_ins |= {"=10.0.0.9": "=127.0.0.1", "=10.0.0.1": "=127.0.0.1", "--nproc_per_node=8": "--nproc_per_node=1"}
    stand_ins |= {
        "--tensor-parallel-size 2": "",
        "vllm_server.py": "vllm_server.py --dtype float32 --max-model-len 640",
    }
    if "--port 8000" in text and ":8000" not in text:  # the default of both sides
        port = free_port()
        stand_ins |= {
            "--port 8000": f"--port {port}",
            "my_recipe.py": f"my_recipe.py --vllm_urls http://127.0.0.1:{port}",
        }
    for old, new in stand_ins.items():
        text = text.replace(old, new)
    env = {**ENV, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with contextlib.ExitStack() as stack:
        trained = 0
        waiting = []
        for line in text.splitlines():
            if line.startswith("export "):
                env |= dict(word.split("=", 1) for word in shlex.split(line)[1:])
            elif "vllm_server.py" in line:
                address = "http://127.0.0.1:" + line.partition("--port ")[2].split()[0]
                waiting.append(stack.enter_context(started(line, folder, env, address)))
            elif "torchrun" in line:
                for server in waiting:
                    server.wait()
                nodes = int(next(iter(re.findall(r"--nnodes=(\d+)", line)), 1))
                more = f" {SMALL} --output_dir {tmp_path} --model_id {model}"
                more += f" {OF_MATH}" if "fsdp_multi_node" in line else ""
                ranks = [stack.enter_context(started(line + more, folder, env)) for _ in range(nodes)]
                for rank in ranks:
                    assert rank.process.wait(300) == 0, rank.log.read_text()[-4000:]
                assert any("step 1/1 " in rank.log.read_text() for rank in ranks)
                trained += 1
            else:
                assert line == "source .venv/bin/activate"
    assert trained == 1
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    documented = {name for cell in re.findall(r"^\| (`[^|]*) \|", README, re.MULTILINE) for name in inline(cell)}
    documented |= {"sampling/sampling_logp_difference/max", "step"}
    assert {name for name in row if not name.startswith("rewards/")} <= documented


def test_every_command_is_run_by_a_test():
    """Here, or in `test_scripts.py` and `test_tools.py`, whose commands are named there as here."""
    known = ("bash scripts/demo.sh", "bash scripts/test.sh", "python scripts/plot.py ", "python scripts/show.py ")
    others = [line for block in commands() if block not in TRAINING for line in block]
    assert all(line.startswith(known) for line in others), others
    spans = [span for span in inline() if span.startswith(("python ", "bash ", "torchrun ")) and "..." not in span]
    for span in spans:
        words = shlex.split(span)
        assert span.startswith(
            (
                "bash scripts/demo.sh my_recipe.py",
                "bash scripts/test.sh -m slow",
                "python benchmarks/",
                "python -m recipes.",
            )
        )
        if words[1] == "-m":
            assert words[2].removeprefix("recipes.") in ("dpo", "score")  # test_recipes.py
        elif words[0] == "python":
            source = (ROOT / words[1]).read_text()
            assert all(f'"{word}"' in source for word in words[2:] if word.startswith("--"))


def test_flags(place, monkeypatch):
    """Every `--field value` of the text is accepted beside the README's recipe, and has an effect."""
    monkeypatch.chdir(place[0])
    for span in inline(re.sub(r"## Coming from elsewhere\n.*?\n## ", "", README, flags=re.DOTALL)):
        if not span.startswith("--") or "=" in span.split()[0]:
            continue
        name = span.split()[0].removeprefix("--")
        if name in SERVERS | SCRIPTS:
            continue
        if " " in span:
            parse_args(["my_recipe.py", *shlex.split(span)])
        else:
            assert name in TrainConfig.__dataclass_fields__, span


def test_other_blocks_and_links(place, tmp_path, monkeypatch):
    """Python runs, with a model of the same vocabulary; JSON is JSON; files that are linked exist."""
    monkeypatch.chdir(place[0])
    _, images, sharing = blocks("python")
    config: dict = {}
    exec("from config import TrainConfig\n" + images, config)
    assert config["config"].freeze_vision_tower
    small = Qwen3Config(vocab_size=10_000, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=1, head_dim=16)  # fmt: skip
    Qwen3ForCausalLM(small).save_pretrained(tmp_path)
    ran: dict = {}
    exec(sharing.replace("Qwen/Qwen3-0.6B", str(tmp_path)), ran)
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in ran["model"].parameters())
    for block in blocks("json"):
        json.loads(block)
    for text in (README, TRANSLATION):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_translation_says_the_same():
    """The same commands, code, names and numbers, and as many headings and rows; comments are translated."""
    assert commands(TRANSLATION) == commands()
    for language in ("python", "json"):
        bare = [
            [re.sub(r"( *#.*|\"\"\".*\"\"\")$", "", line) for line in block.splitlines()] for block in blocks(language)
        ]
        same = [
            [re.sub(r"( *#.*|\"\"\".*\"\"\")$", "", line) for line in block.splitlines()]
            for block in blocks(language, TRANSLATION)
        ]
        assert same == bare
    assert sorted(set(inline(TRANSLATION))) == sorted(set(inline()))
    for pattern in (r"^#+ ", r"^\|", r"^- "):
        assert len(re.findall(pattern, TRANSLATION, re.MULTILINE)) == len(re.findall(pattern, README, re.MULTILINE))
    numbers = [set(re.findall(r"\d+(?:\.\d+)?", text)) for text in (README, TRANSLATION)]
    assert numbers[0] ^ numbers[1] <= set()


def test_the_sources_compile():
    tracked = [path for path in ROOT.rglob("*.py") if not {".venv", "outputs"} & set(path.relative_to(ROOT).parts)]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *map(str, tracked)], check=True)
