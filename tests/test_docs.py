"""What README and docs/ say exists: commands, fields, metrics, files, functions, links; and the translation agrees."""

import ast
import json
import re
import shlex
import subprocess
import sys
from functools import cache

import pytest
import torch
from documents import DOCUMENTS, README, TRANSLATION, blocks, cells, commands, inline, metrics, own
from helpers import ROOT
from test_readme import PLAIN_LOOP, TRAINING, make_clone
from transformers import Qwen3Config, Qwen3ForCausalLM

from config import TrainConfig, parse_args
from rollouts.servers import server_urls

ROOMS = ("rollouts", "training", "weights", "server")
FOLDERS = (*ROOMS, "recipes", "scripts", "benchmarks")
OPTIONS = {  # of the server, and of scripts: no fields
    "gpu-memory-utilization", "max-model-len", "dtype", "mm-processor-kwargs", "limit-mm-per-prompt", "host", "api-key",
    "servers", "print", "doctor", "metrics", "enable-lora", "enable-sleep-mode", "any-vllm", "ssl-keyfile", "ssl-certfile", "versions", "sleep", "max-lora-rank", "served-model-name", "plan", "server_options", "keep", "html", "serve", "kv-cache-memory-bytes", "no-enforce-eager",
}  # fmt: skip
# Files that are imported only where a setting needs them, as docs/house.svg draws them.
ONLY_WHERE_USED = set(
    re.findall(
        r' rare"/>\n<text [^>]*class="name">([\w.]+)<', (ROOT / "docs" / "house.svg").read_text()
    )
)
# What documents name and no source of ours defines: other programs, their variables, routes, and names of examples.
OUTSIDE = frozenset({
    "True", "torch", "distributed", "torchrun", "vllm", "serve", "ps", "wandb", "datasets", "from_pretrained",
    "GRPOTrainer", "GRPOConfig", "AsyncGRPOConfig", "actor", "actor_rollout_ref", "rollout", "clip_low", "clip_high",
    "clip_ratio_c", "CUDA_VISIBLE_DEVICES", "TRACKIO_DIR", "VLLM_MAX_IMAGE_PIXELS", "brevity", "own_loss", "MODEL", "OUTPUT", "PATH",
    "pairs", "context", "answers", "metrics", "sbatch", "False", "WANDB_NAME", "nohup", "git", "apply", "ssh",
})  # fmt: skip


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return make_clone(tmp_path_factory.mktemp("clone"))


@cache
def defined():
    """Every name that the sources define, every string in them, and how their f-strings begin."""
    names, parts = set(OUTSIDE), set()
    for path in [
        *ROOT.glob("*.py"),
        *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")),
    ]:
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                ):
                    names.add(name)
                case (
                    ast.arg(arg=name)
                    | ast.Name(id=name, ctx=ast.Store())
                    | ast.Attribute(attr=name, ctx=ast.Store())
                ):
                    names.add(name)
                case ast.JoinedStr(values=[ast.Constant(value=start), *_]):
                    parts.add(start)
                case ast.Constant(value=str(text)):
                    names.add(text)
    for path in ROOT.glob("scripts/*.sh"):
        names.update(re.findall(r"\w+", path.read_text()))
    return names, parts


def is_defined(name):
    """Whether the sources have the name, or build it: `groups/dropped_stale` is an f-string."""
    names, parts = defined()
    return name in names or any(len(part) > 3 and name.startswith(part) for part in parts)


def functions_of(path):
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def unexplained(span):
    """The words of inline code that nothing explains: neither a file, a metric, a test nor a name of the sources."""
    if span.startswith(
        ("--", "python ", "bash ", "torchrun ", "pip ")
    ):  # tested as commands and flags
        return []
    if (
        span in metrics() | defined()[0]
        or (ROOT / span).exists()
        or any((ROOT / folder / span).exists() for folder in FOLDERS)
    ):
        return []
    if span.startswith("test_"):
        return (
            []
            if any(span in functions_of(path) for path in ROOT.glob("tests/test_*.py"))
            else [span]
        )
    span = re.sub(r"--[\w-]+|<\w+>|\.\.\.", " ", span)
    if re.fullmatch(
        r"[\w-]+\.(jsonl|json)", span
    ):  # a run's own: the sources have the whole name, or its stem
        return [] if is_defined(span) or is_defined(span.rpartition(".")[0]) else [span]
    words = re.findall(r"[A-Za-z_]\w{2,}", span)
    return [word for word in words if not is_defined(word)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_names_exist(name):
    """Every field, metric, file, function, test and column that stands in inline code."""
    unknown = {span: words for span in inline(own(name)) if (words := unexplained(span))}
    assert not unknown


def test_where_a_function_lives():
    """`name` in [file]: the file has it."""
    for name, text in DOCUMENTS.items():
        for function, path in re.findall(
            r"`(\w+)`\s+in\s+\[[\w/.]+\]\((?:\.\./)?([\w/.]+\.py)\)", text
        ):
            assert re.search(
                rf"^(def |class |){function}\b", (ROOT / path).read_text(), re.MULTILINE
            ), (name, function)


def test_metrics():
    """docs/metrics.md explains every metric that the sources write, and no other."""
    heads = "|".join(sorted({name.partition("/")[0] for name in metrics() if "/" in name}))
    written = set()
    for path in [
        ROOT / "train.py",
        *(path for room in ROOMS for path in (ROOT / room).glob("*.py")),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                written.update(re.findall(rf"^(?:{heads})/[a-z_/]+[a-z]$", node.value))
    assert written - {"completions/table"} <= metrics()  # a table in wandb
    assert all(is_defined(re.sub("<.*", "", name)) for name in metrics())


def test_layout():
    """docs/files.md has every file of the core, README every folder and document."""
    files = DOCUMENTS["docs/files.md"]
    for path in [
        *ROOT.glob("*.py"),
        *(path for room in ROOMS for path in (ROOT / room).glob("*.py")),
    ]:
        link = f"[{path.name}](../{path.relative_to(ROOT)})"
        row = f"| *{link}* |" if path.name in ONLY_WHERE_USED else f"| {link} |"
        assert row in files, row
    assert all(f"[{room}/]({room})" in README for room in ROOMS)
    assert all(f"]({name})" in README for name in DOCUMENTS if name != "README.md")
    assert all((ROOT / room).is_dir() for room in FOLDERS)


def test_length():
    assert len(README.splitlines()) <= 290
    assert len(TRANSLATION.splitlines()) <= 290


def test_the_algorithm_stands_in_readme():
    """README shows the loop of recipes/plain_loop.py in full."""
    source = (ROOT / "recipes" / "plain_loop.py").read_text()
    (function,) = [
        node for node in ast.parse(source).body if getattr(node, "name", "") == "plain_loop"
    ]
    assert ast.get_source_segment(source, function) == blocks("python", README)[0].strip()


def anchors(text):
    """What a heading is called in a link."""
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links():
    for name, text in {**DOCUMENTS, "README.zh.md": TRANSLATION}.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
            assert file.exists(), (name, target)
            assert not anchor or anchor in anchors(file.read_text()), (name, target)


def check_options(command):
    """The script or module of a command exists, and knows its options."""
    words = shlex.split(command)
    if words[1] == "-m":
        assert words[2].removeprefix("recipes.") in (
            "dpo",
            "score",
            "plain_loop",
            "replay",
        )  # test_recipes.py, test_stream.py
    elif words[1] != "train.py":  # whose fields are tested as flags
        source = (ROOT / words[1]).read_text()
        fields = (
            [f"--{name}" for name in TrainConfig.__dataclass_fields__]
            if words[1] in ("scripts/launch.py", "scripts/doctor.py")
            else []
        )
        assert all(
            word in source or word in fields for word in words[2:] if word.startswith("--")
        ), command


def test_every_command_is_run_by_a_test():
    """By test_readme.py, test_scripts.py, test_launch.py, test_tools.py or test_low_memory.py."""
    names = ("launch", "plot", "show", "doctor", "dequantize", "vllm_surface")
    scripts = (f"python scripts/{name}.py " for name in names)
    known = ("bash scripts/demo.sh", "bash scripts/test.sh", *scripts)
    assert any(block[-1].startswith(PLAIN_LOOP) for block in commands(README))
    environment = "source .venv/bin/activate"
    a_loop = "until python vllm_server.py "
    assert any(line.startswith(a_loop) for block in TRAINING for line in block)
    of_a_node = [
        block for block in commands(DOCUMENTS["docs/scale.md"]) if block[0].startswith(A_NODE)
    ]
    for text in DOCUMENTS.values():
        own = [
            block
            for block in commands(text)
            if block not in TRAINING
            and block not in of_a_node
            and not block[-1].startswith(PLAIN_LOOP)
        ]
        for line in (line for block in own for line in block):
            assert line.startswith((*known, environment, a_loop)), line
            if not line.startswith((environment, a_loop)):
                check_options(line)
        for span in inline(text):
            if span.startswith(("python ", "bash ")):
                check_options(span)


A_NODE = "for gpu in "  # of docs/scale.md: a server on each GPU


def test_eight_servers_on_a_node(tmp_path):
    """Each on a GPU and at a port of its own, and in the file that the trainer reads."""
    python = 'python() { echo "$CUDA_VISIBLE_DEVICES $*" >> calls; }; SERVERS=10.0.0.9\n'
    (block,) = [
        b for b in blocks("bash", DOCUMENTS["docs/scale.md"]) if b.lstrip().startswith(A_NODE)
    ]
    script = python + block
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True, timeout=60)
    calls = sorted((tmp_path / "calls").read_text().splitlines())
    assert len(calls) == 8
    for gpu, call in enumerate(calls):
        assert re.fullmatch(
            rf"{gpu} vllm_server.py --host 0.0.0.0 --port {8000 + gpu} --model \S+", call
        )
    served = sorted((tmp_path / "servers.txt").read_text().splitlines())
    assert served == [f"http://10.0.0.9:{8000 + gpu}" for gpu in range(8)]
    config = parse_args(["recipes/tiny.py", "--vllm_urls", f"@{tmp_path / 'servers.txt'}"])
    assert server_urls(config) == served


def test_help(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in TrainConfig.__dataclass_fields__)


def test_flags(clone, monkeypatch):
    """Every `--field value` of the documents is accepted beside README's recipe, and has an effect."""
    monkeypatch.chdir(clone)
    for name in DOCUMENTS:
        for span in inline(own(name)):
            field = span.split()[0].removeprefix("--").partition("=")[0]
            if not span.startswith("--") or field in OPTIONS:
                continue
            assert field in TrainConfig.__dataclass_fields__, (name, span)
            if " " in span:
                parse_args(["my_recipe.py", *shlex.split(span)])


def test_code_blocks(clone, tmp_path, monkeypatch):
    """Python runs, with a model of the same vocabulary; JSON is JSON."""
    monkeypatch.chdir(clone)
    config: dict = {}
    exec(
        "from config import TrainConfig\n" + blocks("python", DOCUMENTS["docs/images.md"])[0],
        config,
    )
    assert config["config"].freeze_vision_tower
    small = Qwen3Config(vocab_size=10_000, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=1, head_dim=16)  # fmt: skip
    Qwen3ForCausalLM(small).save_pretrained(tmp_path)
    for block in blocks("json", "".join(DOCUMENTS.values())):
        json.loads(block)
    sharing = "".join(blocks("python", DOCUMENTS["docs/prefix-attention.md"]))
    ran: dict = {}
    exec(sharing.replace("Qwen/Qwen3-0.6B", str(tmp_path)), ran)
    assert all(
        weight.grad is not None and torch.isfinite(weight.grad).all()
        for weight in ran["model"].parameters()
    )


def untranslated(block):
    """The lines of a code block without their comments and docstrings, which are translated."""
    return [re.sub(r"( *#.*|\"\"\".*\"\"\")$", "", line) for line in block.splitlines()]


def kinds(text):
    """What each line of a document is, but for prose, whose lines break elsewhere in a translation."""
    found = (re.match(r"#+ |\||- |```\w*", line) for line in text.splitlines())
    return [match[0] for match in found if match]


def test_the_translation_says_the_same():
    """The same headings, lists, tables, commands, code, names, links and numbers in the same order."""
    assert kinds(TRANSLATION) == kinds(README)
    assert commands(TRANSLATION) == commands()
    codes = [list(map(untranslated, blocks("python", text))) for text in (README, TRANSLATION)]
    assert codes[0] == codes[1]
    assert sorted(inline(TRANSLATION)) == sorted(inline())
    rows = [
        [cells(line) for line in text.splitlines() if line.startswith("|")]
        for text in (README, TRANSLATION)
    ]
    for row, translated in zip(*rows, strict=True):
        assert sorted(inline(" ".join(translated))) == sorted(inline(" ".join(row)))
    links = [sorted(re.findall(r"\]\(([^)]+)\)", text)) for text in (README, TRANSLATION)]
    assert links[0] == sorted("README.zh.md" if link == "README.md" else link for link in links[1])
    numbers = [sorted(re.findall(r"\d+(?:\.\d+)?", text)) for text in (README, TRANSLATION)]
    assert numbers[0] == numbers[1]


def test_the_sources_compile():
    tracked = [
        path
        for path in ROOT.rglob("*.py")
        if not path.relative_to(ROOT).parts[0].startswith((".venv", "outputs"))
    ]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *map(str, tracked)], check=True)
