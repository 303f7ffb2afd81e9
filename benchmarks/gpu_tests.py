"""The tests marked `gpu`, with a row of JSON for each as it ends.

    python benchmarks/gpu_tests.py [--json PATH]

Only files that have such tests are collected, as others need packages that a machine for measurements may lack.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest

from benchmarks.common import Rows, arguments, device_here


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


def main() -> int:
    """Command line; the exit status is pytest's."""
    args = arguments(__doc__, "as without it").parse_args()
    rows = Rows(args.json)
    if device_here().type == "cpu":
        rows.add({"skipped": "the tests marked gpu need a CUDA device"})
        return 0
    tests = sorted((ROOT / "tests").glob("test_*.py"))
    files = [str(path) for path in tests if "mark.gpu" in path.read_text()]
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    return pytest.main([*options, *files], plugins=[Recorder(rows)])


if __name__ == "__main__":
    sys.exit(main())
