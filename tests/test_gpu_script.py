"""scripts/gpu.sh and the benchmarks that it runs, without a GPU: what runs, what says why not, what a cut run keeps."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from helpers import ENV, ROOT, finished, write_program
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import MODELS
from benchmarks.steps import NUM_ROWS, flops, make_config, make_policy

PARTS = [
    "tests", "micro", "prefix-1.5B", "prefix-8B", "steps", "trees", "train", "ranks",
    "server", "run",
]  # fmt: skip
NAMES = "tests, micro, prefix [1.5B|8B], steps, trees, train, ranks, server, run"
ON_CPU = {**ENV, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}


def gpu_sh(*words, env=ON_CPU, timeout=300):
    return finished("bash", ROOT / "scripts" / "gpu.sh", *words, env=env, cwd="/", timeout=timeout)


def rows_of(path):
    return json.loads(path.read_text())["rows"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The rows of all parts without a GPU: two minutes on two idle cores, six on busy ones."""
    folder = tmp_path_factory.mktemp("small")
    done = gpu_sh("--out", folder, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no GPU here: what can run runs small on the CPU" in done.stdout
    for part in PARTS:
        assert "cores" in json.loads((folder / f"{part}.json").read_text())["machine"]
    return {part: rows_of(folder / f"{part}.json") for part in PARTS}


def stand_in(folder, device, hangs_in="nothing", limit_s=60):
    """The environment of an interpreter that says its device, else notes what it was to run, and may hang."""
    write_program(
        folder / "python",
        f'#!/bin/bash\nif [ "$1" = -c ]; then echo {device}; exit; fi\necho "$@" >> {folder}/ran\n'
        f'if [ "$1" = benchmarks/{hangs_in}.py ]; then exec sleep 600; fi\n',
    )
    return {**ENV, "PYTHON": str(folder / "python"), "GPU_PART_SECONDS": str(limit_s)}


def test_a_wrong_command_is_one_line():
    for words, error in {
        "nope": f"unknown part nope: {NAMES}",
        "prefix 3B": "unknown size 3B: 1.5B or 8B",
        "--fast": "unknown option --fast: there is --out FOLDER",
        "micro --out": "--out needs a folder",
    }.items():
        done = gpu_sh(*words.split())
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {error}\n")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_all_parts_in_order(tmp_path, device):
    """On an emulated GPU at full size; on a CPU small, where there is a small form."""
    out = tmp_path / "out"
    done = gpu_sh("--out", out, env=stand_in(tmp_path, device))
    assert done.returncode == 0, done.stderr
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert [words[2] for words in ran] == [str(out / f"{part}.json") for part in PARTS]
    small = [part for part, words in zip(PARTS, ran, strict=True) if "--quick" in words]
    assert small == ([] if device == "cuda" else [*PARTS[1:-2], "run"])
    sizes = [words[words.index("--models") + 1] for words in ran if "--models" in words]
    assert sizes == ["1.5B", "8B"]


def test_a_part_that_takes_too_long_is_cut(tmp_path):
    env = stand_in(tmp_path, "cuda", hangs_in="micro", limit_s=5)
    done = gpu_sh("--out", tmp_path / "out", env=env)
    assert done.returncode == 1
    assert "micro: cut after 5 s\n" in done.stdout
    assert len((tmp_path / "ran").read_text().splitlines()) == len(PARTS)


@pytest.mark.parametrize(
    ("model", "num_tokens", "adapters", "seconds", "mfu"),
    [
        # The time between steps, by tokens a second.
        ("0.6B", 16384, None, 2 * 16384 / 11896, 11.1),
        ("4B", 65536, 33_030_144, 31.5, 37.4),
    ],
)
def test_flops_of_published_steps(model, num_tokens, adapters, seconds, mfu):
    """Published seconds give the published MFU, to its last digit, on a GPU of 989 TFLOP/s."""
    count = flops(model, num_tokens, adapters)
    assert abs(100 * count.theirs / seconds / 989e12 - mfu) < 0.06


def test_flops_are_those_of_a_forward_and_backward(device):
    """Ours is what torch counts, but for the half of eager attention's products that causality throws away."""
    shape = MODELS["quick"]
    config = replace(make_config(False, "bf16"), gradient_checkpoint=False)
    model = make_policy("quick", config, device)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 64, dtype=torch.long)).logits.sum().backward()
    num_heads, head_dim = shape["num_attention_heads"], shape["head_dim"]
    unseen = 12 * shape["num_hidden_layers"] * num_heads * head_dim * 64 * 63 // 2
    of_angles = 64 * head_dim  # a product in transformers 5.17, which ours leaves out
    expected = flops("quick", 64, None).ours / NUM_ROWS + unseen
    assert counter.get_total_flops() - expected in (0, of_angles)


@pytest.mark.slow
def test_steps(small):
    """All modes take the same step, to bf16's rounding: 2⁻⁸ of each product."""
    rows = small["steps"]
    modes = [row["mode"] for row in rows]
    assert modes == ["bf16", "fsdp_bf16", "bf16", "fsdp_bf16", "bf16 weights"]
    for method in ("full", "LoRA r16"):
        norms = [row["grad_norm"] for row in rows if row["method"] == method]
        assert max(norms) - min(norms) < 0.01 * max(norms)
    assert all(row["seconds"] > 0 and row["peak_gib"] > 0 for row in rows)


@pytest.mark.slow
def test_every_part_without_a_gpu(small):
    """Every variant that runs gives the same attention, log-probs and loss, to fp32's rounding."""
    for part, rows in small.items():
        assert not [row for row in rows if "error" in row]
        assert all("skipped" in row for row in rows) == (part in ("tests", "server"))
    ran = [row for row in small["micro"] if row["part"] in ("attention", "head") and "ms" in row]
    assert all(row["difference"] < 1e-5 for row in ran)
    assert {row["groups"] for row in ran if row["part"] == "attention"} == {1, 10, 40}
    variants = {"ours", "all logits, cross_entropy", "chunks under checkpoint"}
    assert {row["variant"] for row in ran if row["part"] == "head"} > variants
    assert all(row["ours_difference"] < 1e-4 for part in PARTS[2:4] for row in small[part])
    exact = next(row for row in small["train"] if row.get("mode") == "FSDP2 fp32")
    assert exact["loss_difference"] < 1e-5  # the same arithmetic on the same data


@pytest.mark.slow
def test_trees_beside_trls(small):
    """TRL's rows give the log-probs of each sequence alone, on a CPU with a loop for its kernel; and ours do."""
    pytest.importorskip("trl")
    rows = small["trees"]
    assert [row["method"] for row in rows] == ["trl"] * 3 + ["ours"] * 3
    assert max(row["max_error"] for row in rows) < 1e-5  # fp32, of log-probs around 7
    for trl, ours in zip(rows[:3], rows[3:], strict=True):
        assert trl["job"] == ours["job"]
        assert ours["tokens"] < trl["tokens"]  # whose trie forks a token early
