"""The tests marked `gpu`, with a row of JSON for each as it ends.

    python benchmarks/gpu_tests.py [--json PATH]

Only files that have such tests are collected, as others need packages that a machine for measurements may lack.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import Rows, device_here


class Recorder:
    """A plugin of pytest."""

    def __init__(self, rows: Rows):
        self.rows = rows

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A row for a test that ran, or that did not get so far."""
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            if report.outcome != "passed":
                row["reason"] = str(report.longrepr).strip().splitlines()[-1][:300]
            self.rows.add(row)

    def pytest_collectreport(self, report: Any) -> None:
        """A row for a file that cannot be imported."""
        if report.failed:
            self.rows.add(
                {
                    "test": report.nodeid,
                    "error": str(report.longrepr).strip().splitlines()[-1][:300],
                }
            )


def main() -> int:
    """Command line; the exit status is pytest's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here, one by one")
    args = parser.parse_args()
    rows = Rows(args.json)
    if device_here().type == "cpu":
        rows.add({"skipped": "the tests marked gpu need a CUDA device"})
        return 0
    if not importlib.util.find_spec("pytest"):
        rows.add({"skipped": "pytest is not installed"})
        return 0
    import pytest

    files = [
        str(path)
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if "mark.gpu" in path.read_text()
    ]
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    return pytest.main([*options, *files], plugins=[Recorder(rows)])


if __name__ == "__main__":
    sys.exit(main())
