"""The house: which rooms there are, who may import whom, and how plainly all of it reads."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ENV, ROOT
from measure import broken_limits, figures_of

TOP = {"train", "config", "prefix_attention", "vllm_server", "vllm_client", "utils"}
ROOMS = {
    "rollouts": {
        "group", "data", "processor", "custom", "images", "sampling", "scoring", "workers", "stream",
        "servers", "proofs", "rollouts", "run", "evaluation",
    },
    "training": {
        "batching", "loading", "optimizer", "model", "checkpoints", "logs", "metrics",
    },
    "weights": {"publish", "group"},
    "server": {"app", "messages", "receiver", "whole"},
}  # fmt: skip
FLOORS = {  # of a file, or else of its room
    "train": 6, "rollouts": 5, "training": 5, "vllm_client": 4, "vllm_server": 4, "weights": 3, "server": 3,
    "rollouts.group": 3, "rollouts.workers": -1, "prefix_attention": 2, "utils": 1, "config": 0,
}  # fmt: skip
FILE_LINES, FUNCTION_LINES = 450, 60
FILE_LIMITS = {  # a library that nobody must read, fields that are their own documentation
    "prefix_attention": 1275,
    "config": 820,
}
ALL_NODES = 33_700  # of the syntax tree, without annotations and docstrings


def files():
    """The trainer's own files by their module's name: those at the top, and those in the rooms."""
    paths = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


def imported_by(tree):
    """Names of modules of ours that a tree imports, at its top or in a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(files())


IMPORTS = {name: imported_by(ast.parse(path.read_text())) for name, path in files().items()}
PAIRS = sorted((name, other) for name, others in IMPORTS.items() for other in others)


def place(name):
    """The room of a file; a file at the top is its own."""
    return name.partition(".")[0]


def test_the_rooms():
    assert {path.stem for path in ROOT.glob("*.py")} == TOP
    for room, names in ROOMS.items():
        assert {path.stem for path in (ROOT / room).rglob("*.py")} - {"__init__"} == names


def floor(name):
    """A file's own, or its room's."""
    return FLOORS[name] if name in FLOORS else FLOORS[place(name)]


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_imports_go_down(name, other):
    """Within a room, and between the two rooms, they may go either way, but never in a circle (see below)."""
    above, below = floor(name), floor(other)
    assert above > below or (above == below and place(name) in ROOMS and place(other) in ROOMS)
    assert place(other) != "train"
    assert place(name) != "prefix_attention"


def test_nothing_imports_in_a_circle():
    left = {name: set(others) for name, others in IMPORTS.items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert not left


def test_nothing_beside_the_trainer_is_in_it():
    """Recipes, tests, scripts and benchmarks use it; of them it uses nothing."""
    outside = {path.name for path in ROOT.iterdir() if path.is_dir()} - ROOMS.keys()
    for name, path in files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {place(module) for module in modules} & outside, name


def num_lines(path):
    return len(path.read_text().splitlines())


@pytest.mark.parametrize(
    "paths", [files().values(), ROOT.glob("recipes/*.py")], ids=["core", "recipes"]
)
def test_it_reads_as_the_best_code_of_the_field(paths):
    """By the measure that `python scripts/measure.py --list` explains, place by place."""
    figures = figures_of(paths)
    assert not broken_limits(figures), figures


def test_how_much_there_is_to_read():
    assert figures_of(files().values())["nodes"] <= ALL_NODES


@pytest.mark.parametrize("name", files())
def test_sizes_of_files(name):
    assert num_lines(files()[name]) <= FILE_LIMITS.get(name, FILE_LINES)


@pytest.mark.parametrize("name", files())
def test_sizes_of_functions(name):
    for node in ast.walk(ast.parse(files()[name].read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= FUNCTION_LINES, f"{name}.{node.name}"


def test_no_merge_is_half_done():
    done = subprocess.run(
        ["git", "grep", "-lE", "^(<<<<<<< |>>>>>>> )"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.stdout == b""


def test_a_fork_fails_nothing_under_quick(tmp_path):
    """A recipe beside train.py, one in recipes/, lines in the loop: what guards the house is left out."""
    fork = tmp_path / "fork"
    hidden = shutil.ignore_patterns(".*", "outputs", "__pycache__")
    shutil.copytree(ROOT, fork, ignore=hidden)
    for path in ("my_recipe.py", "recipes/mine.py"):
        shutil.copy(fork / "recipes" / "tiny.py", fork / path)
    train = (fork / "train.py").read_text()
    line = "    config = with_bf16(config)\n"
    assert line in train
    (fork / "train.py").write_text(train.replace(line, line + 3 * '    print("a fork")\n'))

    (quick,) = re.findall(
        r'--quick ]; then set -- -m "(.*?)"', (ROOT / "scripts/test.sh").read_text()
    )
    readers = [
        f"tests/test_{name}.py" for name in ("house", "docs", "evidence", "recipes", "config")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", quick, *readers],
        cwd=fork, env=ENV, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
