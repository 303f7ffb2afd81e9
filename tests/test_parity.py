"""benchmarks/parity.py: what is called equal is, to rounding, and what is called different is not."""

import pytest
from test_scripts import benchmark

pytest.importorskip("trl", reason="of requirements/dev.txt")


@pytest.mark.server
def test_the_loss_is_trls(tmp_path):
    rows = benchmark("parity", tmp_path / "out.json", "--quick")
    losses = [row for row in rows if row["part"] == "loss"]
    (run,) = [row for row in rows if row["part"] == "run"]
    equal = [row for row in losses if "why" not in row]
    assert {row["loss_type"] for row in equal} == {"grpo", "bnpo", "dr_grpo", "dapo", "cispo"}
    assert len(equal) == 23
    # A sum that nearly cancels is 100 times as inexact as its terms.
    assert all(row["loss"] < 1e-12 and row["gradient"] < 1e-14 for row in equal)
    assert all(row["gradient"] > 1e-3 for row in losses if "why" in row)
    assert run["grad_norm"] < 1e-5
    assert run["update"] < 1e-3  # of AdamW: a gradient near zero is divided by its own size
