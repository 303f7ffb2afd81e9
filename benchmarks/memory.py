"""Memory of a row, planned from shapes and measured: `scripts/doctor.py --plan` against this machine's CPU.

    python benchmarks/memory.py [--json PATH] [--quick]

A random Qwen3 of 6 layers (1024 wide, 8192 tokens of vocabulary), and a row of 2,048 tokens forward and backward, with
gradients of an earlier row already there. The plan counts as for a CPU. The allocator gives freed memory back, and each
line has a process of its own.

  planned_mb   what the plan counts beside weights and gradients
  measured_mb  by how much the process grew at most
  measured_over_planned
"""

import argparse
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read by the processes below, as they start

import torch
from plan import OnPaper
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.common import memory_mb, report, reset_peak
from config import TrainConfig
from prefix_attention import attach, completion_logprobs, pack
from recipes.rewards import exact_match
from training.lora import add_lora
from training.model import recompute_layers

SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 8192, "tie_word_embeddings": True,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, checkpointing": {"gradient_checkpoint": True},
    "LoRA, bf16 base, checkpointing": {
        "gradient_checkpoint": True, "use_peft": True, "dtype": "bfloat16",
    },
}  # fmt: skip


def measure(fields: dict[str, Any], num_tokens: int) -> tuple[float, float]:
    """MB of a row, planned and measured."""
    config = TrainConfig(
        model_id="m", dataset_id=list, reward_funcs=[exact_match], bf16=False, **fields
    )
    paper = OnPaper(config, Qwen3Config(**SHAPE))
    planned = paper.measured_row(num_tokens, on_gpu=False) / 1e6

    dtype = getattr(torch, config.dtype)
    model: Any = AutoModelForCausalLM.from_config(paper.text_config, dtype=dtype)
    model.eval()
    if config.use_peft:
        model = add_lora(model, config)
    if config.gradient_checkpoint:
        recompute_layers(model)
    attach(model)
    run_row(model, 64)  # gradients, and what libraries make once

    device = torch.device("cpu")
    before = memory_mb(device, "VmRSS")
    reset_peak(device)
    run_row(model, num_tokens)
    return planned, memory_mb(device, "VmHWM") - before


def run_row(model: nn.Module, num_tokens: int) -> None:
    """Run a row forward and backward."""
    (row,) = pack([([5], [[5] * num_tokens])])
    completion_logprobs(model, row).sum().backward()


def main() -> None:
    """Measure all modes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    parser.add_argument("--quick", action="store_true", help="a shorter row")
    args = parser.parse_args()
    num_tokens = 512 if args.quick else 2048

    rows = []
    spawning = multiprocessing.get_context("spawn")
    for name, fields in MODES.items():
        with spawning.Pool(1) as pool:
            planned, measured = pool.apply(measure, (fields, num_tokens))
        rows.append({"mode": name, "tokens": num_tokens, "planned_mb": planned,
                     "measured_mb": measured, "measured_over_planned": measured / planned})  # fmt: skip
    report(rows, args.json)


if __name__ == "__main__":
    main()
