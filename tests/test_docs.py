"""What README and docs/ say exists: commands, fields, metrics, files, functions, links; and the translation agrees."""

import ast
import json
import re
import shlex
import subprocess
from functools import cache

import pytest
from documents import DOCUMENTS, README, TRANSLATION, blocks, commands, inline, metrics
from helpers import ROOT
from test_readme import BLOCKS, FOLDERS, PLAIN_LOOP, TRAINING, make_clone

from config import TrainConfig, parse_args
from rollouts.servers import server_urls

ROOMS = ("rollouts", "training", "weights", "server")
CORE = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).glob("*.py"))]
HOUSE = (ROOT / "docs" / "house.svg").read_text()
# Files that are imported only where a setting needs them, as the picture draws them.
ONLY_WHERE_USED = set(re.findall(r' rare"/>\n<text [^>]*class="name">([\w.]+)<', HOUSE))
# What documents name and no source of ours has: other programs, their options and variables, and names of examples.
OUTSIDE = frozenset({
    "True", "False", "brevity", "OUTPUT", "nohup", "ps", "sbatch", "ssh", "TRACKIO_DIR", "WANDB_NAME",
    "VLLM_MAX_IMAGE_PIXELS", "--limit-mm-per-prompt", "--no-enforce-eager", "--servers", "--versions",
})  # fmt: skip
ELSEWHERE = "docs/coming-from-elsewhere.md"
HINTS = json.loads((ROOT / "docs" / "elsewhere.json").read_text())
OF_OTHERS = frozenset({  # names of other trainers there
    "GRPOConfig", "AsyncGRPOConfig", "ModelConfig", "algorithm", "class_path", "class_name", "policy_loss", "_mode",
    "custom_reward_function", "_clip_max", "rollout_correction", "enable", "max_off_policy_threshold", "accelerate",
    "max_off_policy_strategy", "fsdp2", "high_mean", "critic", "response_length", "pg_clipfrac", "register_attention",
    "prefix_grouper_attention", "actor", "actor_rollout_ref", "clip_ratio_c", *HINTS,
})  # fmt: skip
A_NODE = "for gpu in "  # of docs/scale.md: a server on each GPU


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return make_clone(tmp_path_factory.mktemp("clone"))


@cache
def defined():
    """Every name and every string of the sources, and how their f-strings begin."""
    names, parts = set(OUTSIDE), set()
    for path in [*CORE, *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))]:
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            names.update(text for text in vars(node).values() if isinstance(text, str))
            if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                parts.add(node.values[0].value)
    for path in ROOT.glob("scripts/*.sh"):
        names.update(re.findall(r"\w+", path.read_text()))
    for path in ROOT.glob("tests/test_*.py"):
        names.update(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    return names, parts


def is_defined(name):
    """Whether the sources have the name, or build it: `groups/dropped_stale` is an f-string."""
    names, parts = defined()
    return name in names or any(len(part) > 3 and name.startswith(part) for part in parts)


def unexplained(span):
    """The words of inline code that nothing explains: neither a file, a metric, a test nor a name of the sources."""
    is_command = span.startswith(("--", "python ", "bash ", "torchrun ", "pip "))
    is_file = any((ROOT / folder / span).exists() for folder in ("", *FOLDERS))
    # Commands have tests of their own.
    if is_command or is_file or span in metrics() | defined()[0]:
        return []
    if span.startswith("test_"):
        return [span]
    span = re.sub(r"--[\w-]+|<\w+>|\.\.\.", " ", span)
    if re.fullmatch(r"[\w-]+\.(jsonl|json)", span):  # a run's own, whole or by its stem
        return [] if is_defined(span) or is_defined(span.rpartition(".")[0]) else [span]
    return [word for word in re.findall(r"[A-Za-z_]\w{2,}", span) if not is_defined(word)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_names_exist(name):
    """Every field, metric, file, function, test and column that stands in inline code."""
    others = OF_OTHERS if name == ELSEWHERE else frozenset()
    for span in inline(DOCUMENTS[name]):
        assert not {*unexplained(span)} - others, span


def test_where_a_function_lives():
    """`name` in [file], or [`test`](file): the file has it."""
    pages = "".join(DOCUMENTS.values())
    said = re.findall(r"`(\w+)`\s+in\s+\[[\w/.]+\]\((?:\.\./)?([\w/.]+\.py)\)", pages)
    tests = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/\w+\.py)\)", pages)
    assert len(tests) > 20
    for function, path in said + tests:
        source = (ROOT / path).read_text()
        assert re.search(rf"^(def |class |){function}\b", source, re.MULTILINE), function


def test_metrics():
    """docs/metrics.md explains every metric that the sources write, and no other."""
    heads = "|".join(sorted({name.partition("/")[0] for name in metrics() if "/" in name}))
    written = set()
    for path in CORE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                written.update(re.findall(rf"^(?:{heads})/[a-z_/]+[a-z]$", node.value))
    assert written - {"completions/table"} <= metrics()  # a table in wandb
    assert all(is_defined(re.sub("<.*", "", name)) for name in metrics())


def test_layout():
    """docs/files.md and the picture have every file of the core, README every folder and document."""
    for path in CORE:
        link = f"[{path.name}](../{path.relative_to(ROOT)})"
        row = f"| *{link}* |" if path.name in ONLY_WHERE_USED else f"| {link} |"
        assert row in DOCUMENTS["docs/files.md"], row
    drawn = set(re.findall(r">([\w]+\.py)<", HOUSE))
    assert drawn == {path.name for path in CORE} - {"__init__.py"}
    assert all(f"[{room}/]({room})" in README for room in ROOMS)
    assert all(f"]({name})" in README for name in DOCUMENTS if name != "README.md")
    assert max(len(text.splitlines()) for text in (README, TRANSLATION)) <= 290


def test_the_algorithm_stands_in_readme():
    """README shows the loop of recipes/plain_loop.py in full."""
    source = (ROOT / "recipes" / "plain_loop.py").read_text()
    assert blocks("python", README)[0].strip() in source


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
    if words[1] == "-m":  # of test_recipes.py and test_stream.py
        assert words[2].removeprefix("recipes.") in ("dpo", "score", "plain_loop", "replay")
    elif words[1] != "train.py":  # whose fields are tested as flags
        known = (ROOT / words[1]).read_text()
        if words[1] in ("scripts/launch.py", "scripts/doctor.py"):
            known += " ".join(f"--{name}" for name in TrainConfig.__dataclass_fields__)
        assert all(word in known for word in words[2:] if word.startswith("--")), command


def test_every_command_is_run_by_a_test():
    """By test_readme.py, test_scripts.py, test_launch.py, test_tools.py or test_low_memory.py."""
    names = ("launch", "plot", "show", "doctor", "dequantize", "vllm_surface")
    own = [f"python scripts/{name}.py " for name in names]
    scripts = ("bash scripts/demo.sh", "bash scripts/test.sh", *own)
    others = ("source .venv/bin/activate", "until python vllm_server.py ")
    for block in BLOCKS:
        if block in TRAINING or block[-1].startswith(PLAIN_LOOP) or block[0].startswith(A_NODE):
            continue
        for line in block:
            assert line.startswith((*scripts, *others)), line
            if line.startswith(scripts):
                check_options(line)
    for text in DOCUMENTS.values():
        for span in inline(text):
            if span.startswith(("python ", "bash ")):
                check_options(span)


def test_eight_servers_on_a_node(tmp_path):
    """Each on a GPU and at a port of its own, and in the file that the trainer reads."""
    python = 'python() { echo "$CUDA_VISIBLE_DEVICES $*" >> calls; }; SERVERS=10.0.0.9\n'
    page = blocks("bash", DOCUMENTS["docs/scale.md"])
    (block,) = [block for block in page if block.lstrip().startswith(A_NODE)]
    subprocess.run(["bash", "-euc", python + block], cwd=tmp_path, check=True, timeout=60)
    calls = sorted((tmp_path / "calls").read_text().splitlines())
    served = [f"http://10.0.0.9:{8000 + gpu}" for gpu in range(8)]
    for gpu, call in enumerate(calls):
        words = rf"{gpu} vllm_server.py --host 0.0.0.0 --port {8000 + gpu} --model \S+"
        assert re.fullmatch(words, call)
    assert sorted((tmp_path / "servers.txt").read_text().splitlines()) == served
    config = parse_args(["recipes/tiny.py", "--vllm_urls", f"@{tmp_path / 'servers.txt'}"])
    assert server_urls(config) == served
    assert len(calls) == 8


def test_flags(clone, monkeypatch):
    """Every `--field value` of the documents is accepted beside README's recipe, and has an effect."""
    monkeypatch.chdir(clone)
    for name in DOCUMENTS:
        for span in inline(DOCUMENTS[name]):
            option = span.split()[0].partition("=")[0]
            if not span.startswith("--"):
                continue
            if option.removeprefix("--") not in TrainConfig.__dataclass_fields__:
                assert is_defined(option), (name, span)
            elif " " in span:
                parse_args(["my_recipe.py", *shlex.split(span)])


def test_code_blocks(clone, monkeypatch):
    """Python runs, also in tests of its subject; JSON is JSON."""
    monkeypatch.chdir(clone)
    ran: dict = {}
    (config,) = blocks("python", DOCUMENTS["docs/images.md"])[:1]
    exec("from config import TrainConfig\n" + config, ran)
    assert ran["config"].freeze_vision_tower
    for block in blocks("json", "".join(DOCUMENTS.values())):
        json.loads(block)


def untranslated(block):
    """The lines of a code block without their comments and docstrings, which are translated."""
    return [re.sub(r"( *#.*|\"\"\".*\"\"\")$", "", line) for line in block.splitlines()]


def in_order(text):
    """What a translation leaves as it is: kinds of lines, but for prose; commands; code."""
    heads = (re.match(r"#+ |\||- |```\w*", line) for line in text.splitlines())
    code = [untranslated(block) for block in blocks("python", text)]
    return [head[0] for head in heads if head], commands(text), code


def in_any_order(text):
    """And: inline code, links, numbers."""
    links = re.findall(r"\]\(([^)]+)\)", text.replace("(README.md)", "(README.zh.md)"))
    numbers = re.findall(r"\d+(?:\.\d+)?", text)
    return sorted(inline(text)), sorted(links), sorted(numbers)


def test_the_translation_says_the_same():
    assert in_order(TRANSLATION) == in_order(README)
    assert in_any_order(TRANSLATION) == in_any_order(README)
