"""The house: which rooms there are, who may import whom, and how plainly all of it reads."""

import ast
import re
import shutil
import sys

import pytest
from helpers import ROOT, change, finished
from measure import Counts, broken_limits
from test_docs import CORE, ROOMS

FLOORS = {  # of a file, or else of its room
    "train": 6, "rollouts": 5, "training": 5, "vllm_client": 4, "vllm_server": 4, "weights": 3, "server": 3,
    "rollouts.group": 3, "rollouts.workers": -1, "prefix_attention": 2, "utils": 1, "config": 0,
}  # fmt: skip
FILE_LINES, FUNCTION_LINES = 450, 60
# A library that nobody must read, and fields that are their own documentation.
FILE_LIMITS = {"prefix_attention": 1275, "config": 820}
ALL_NODES = 33_570  # of the syntax tree, without annotations and docstrings
# The trainer's own files by their module's name: those at the top, and those in the rooms (see test_docs.test_layout).
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in CORE}


def imported_by(path):
    """What a file imports, at its top or in a function: names of modules, and of what is in them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


ALL_IMPORTS = {name: imported_by(path) for name, path in FILES.items()}
IMPORTS = {name: found & FILES.keys() for name, found in ALL_IMPORTS.items()}
PAIRS = sorted((name, other) for name, others in IMPORTS.items() for other in others)


def place(name):
    """The room of a file; a file at the top is its own."""
    return name.partition(".")[0]


def floor(name):
    """A file's own, or its room's."""
    return FLOORS[name] if name in FLOORS else FLOORS[place(name)]


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_imports_go_down(name, other):
    """Within a room, and between the two rooms, they may go either way, but never in a circle (see below)."""
    above, below = floor(name), floor(other)
    assert above > below or (above == below and place(name) in ROOMS and place(other) in ROOMS)
    assert place(name) != "prefix_attention"


def test_nothing_imports_in_a_circle():
    left = {name: set(others) for name, others in IMPORTS.items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert not left


def test_nothing_beside_the_trainer_is_in_it():
    """Recipes, tests, scripts and benchmarks use it; of them it uses nothing."""
    outside = {path.name for path in ROOT.iterdir() if path.is_dir()} - {*ROOMS}
    for name, modules in ALL_IMPORTS.items():
        assert not {place(module) for module in modules} & outside, name


@pytest.mark.parametrize(
    "paths", [FILES.values(), ROOT.glob("recipes/*.py")], ids=["core", "recipes"]
)
def test_it_reads_as_the_best_code_of_the_field(paths):
    """By the measure that `python scripts/measure.py --list` explains, place by place."""
    figures = Counts(paths).figures()
    assert not broken_limits(figures), figures


def test_how_much_there_is_to_read():
    assert Counts(FILES.values()).figures()["nodes"] <= ALL_NODES


@pytest.mark.parametrize("name", FILES)
def test_sizes_of_files_and_functions(name):
    text = FILES[name].read_text()
    assert len(text.splitlines()) <= FILE_LIMITS.get(name, FILE_LINES)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= FUNCTION_LINES, f"{name}.{node.name}"


def test_a_fork_fails_nothing_under_quick(tmp_path):
    """A recipe beside train.py, one in recipes/, lines in the loop: what guards the house is left out."""
    fork = tmp_path / "fork"
    hidden = shutil.ignore_patterns(".*", "outputs", "__pycache__")
    shutil.copytree(ROOT, fork, ignore=hidden)
    for path in ("my_recipe.py", "recipes/mine.py"):
        shutil.copy(fork / "recipes" / "tiny.py", fork / path)
    line = "    config = with_bf16(config)\n"
    change(fork / "train.py", line, line + 3 * '    print("a fork")\n')

    script = (fork / "scripts" / "test.sh").read_text()
    (quick,) = re.findall(r'--quick ]; then set -- -m "(.*?)"', script)
    names = ("house", "docs", "evidence", "recipes", "config")
    readers = [f"tests/test_{name}.py" for name in names]
    pytest_of_fork = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = finished(*pytest_of_fork, "-m", quick, *readers, cwd=fork)
    assert done.returncode == 0, done.stdout
