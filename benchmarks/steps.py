"""Seconds, MFU and peak memory of a trainer's step at the shapes of prime-rl's published steps on one H100.

    python benchmarks/steps.py [--json PATH] [--quick]

As there, a step is two rows of one sequence each, with gradient checkpointing and one AdamW update; here random weights
stand in for the models', and the step is `train_batch` of train.py: forward, loss, backward, clipping, update. Nothing
is shared. A row of T tokens has a prompt of one token, so that the head runs on all. Modes:
  bf16          fp32 weights, bf16 autocast
  fsdp_bf16     fp32 weights, FSDP2 of one rank, which computes in bf16
  bf16 weights  for LoRA: frozen weights in bf16, adapters under autocast
  ..., compiled  with `torch_compile`

`mfu` counts 6 FLOPs per token and weight of a matrix (4 where it is frozen, head included, embedding not) and
12·layers·heads·head_dim per causal pair of query and key, nothing that is computed twice, over the data sheet's dense
bf16. `mfu_their_way` counts attention as prime-rl does: without causality, with hidden / heads as the size of a head
(12·layers·hidden·T per token). `published_*` are from its benchmarks/baselines, FlashAttention 3; their MFU of the full
0.6B counts the time between steps, 2.75 s for 1.99 s of step.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.common import (
    MODELS,
    Rows,
    arguments,
    durations,
    layer_weights,
    median,
    memory_mb,
    peak_flops,
    random_model,
    reset_peak,
)
from config import TrainConfig
from prefix_attention import PackedBatch, attach, pack
from recipes.rewards import exact_match
from train import train_batch
from training.batching import MicroBatch, Update
from training.loading import add_lora
from training.model import parallelize
from training.optimizer import build_optimizer
from utils import process_group

MODES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fsdp_bf16": {"bf16": False, "use_fsdp": True, "fsdp_bf16": True},
    "bf16 weights": {"bf16": True, "dtype": "bfloat16"},
}
MODES |= {f"{mode}, compiled": fields | {"torch_compile": True} for mode, fields in MODES.items()}
NUM_ROWS = 2


class Case(NamedTuple):
    """A published step: seconds, MFU in percent, GiB; None where none is published."""

    model: str
    is_lora: bool
    num_tokens: int  # of a row
    modes: tuple[str, ...]
    seconds: float | None = None
    mfu: float | None = None
    gib: float | None = None


FULL = ("bf16", "bf16, compiled", "fsdp_bf16, compiled")
LORA = ("bf16 weights", "bf16 weights, compiled", "fsdp_bf16, compiled")
CASES = (
    Case("0.6B", False, 16384, FULL, 1.99, 11.1, 12.5),
    Case("4B", True, 16384, LORA, 5.26, 21.7, 23.3),
    Case("0.6B", True, 16384, LORA, 2.45, None, 5.1),
    Case("4B", True, 65536, LORA[1:2], 31.5, 37.4, 42.0),
)
QUICK = (
    Case("quick", False, 256, ("bf16", "fsdp_bf16")),
    Case("quick", True, 256, ("bf16", "fsdp_bf16", "bf16 weights")),
)


def make_config(is_lora: bool, mode: str) -> TrainConfig:
    """The settings of a step; what concerns data and servers is not used."""
    return TrainConfig(
        model_id="random", dataset_id=list, reward_funcs=[exact_match], use_peft=is_lora, gradient_checkpoint=True,
        max_tokens_per_gpu=1 << 20, **MODES[mode],
    )  # fmt: skip


def make_policy(model: str, config: TrainConfig, device: torch.device) -> Any:
    """What `build_policy` makes, of random weights, which are made on the device; attention is ours."""
    dtype = getattr(torch, config.dtype)
    network = random_model(MODELS[model], device, dtype, max_position_embeddings=1 << 17)
    policy = add_lora(network, config) if config.use_peft else network
    return attach(parallelize(policy, config, device))


def micro_batch(row: PackedBatch) -> MicroBatch:
    """A row with advantages of both signs."""
    ones = torch.ones(len(row.targets))
    servers = torch.ones(len(ones), dtype=torch.int16)
    return MicroBatch(row, ones - 2 * (row.index % 2), ones, -ones, servers)


def sequence(num_tokens: int, vocab: int, seed: int) -> MicroBatch:
    """One sequence that shares nothing, of which every token but the first is predicted."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (num_tokens + 1,), generator=generator).tolist()
    (row,) = pack([(ids[:1], [ids[1:]])])
    return micro_batch(row)


class Flops(NamedTuple):
    """Of one step: ours, and by the way the published MFU counts."""

    ours: float
    theirs: float


def flops(model: str, num_tokens: int, adapters: int | None) -> Flops:
    """Of `NUM_ROWS` sequences of `num_tokens` each; `adapters` is the number of LoRA's weights, None without LoRA."""
    s = MODELS[model]
    heads = s["num_attention_heads"] * s["head_dim"]
    head = s["vocab_size"] * s["hidden_size"]
    matrices = s["num_hidden_layers"] * layer_weights(s) + head
    per_token = 6 * matrices if adapters is None else 4 * matrices + 6 * adapters
    pairs = num_tokens * (num_tokens + 1) // 2
    layers = 12 * s["num_hidden_layers"]
    return Flops(
        NUM_ROWS * (per_token * num_tokens + layers * heads * pairs),
        NUM_ROWS * (per_token * num_tokens + layers * s["hidden_size"] * num_tokens**2),
    )


def measure(case: Case, mode: str, device: torch.device) -> dict[str, Any]:
    """Steps of one mode, after one that warms up."""
    config = make_config(case.is_lora, mode)
    policy = make_policy(case.model, config, device)
    optimizer, scheduler = build_optimizer(policy, 100, config)
    vocab = MODELS[case.model]["vocab_size"]
    rows = [sequence(case.num_tokens, vocab, seed) for seed in range(NUM_ROWS)]
    rows[-1].update = Update(1, 1)
    metrics: dict[str, float] = {}

    def step() -> None:
        metrics.update(train_batch(policy, None, optimizer, scheduler, rows, config, device)[0])

    step()
    reset_peak(device)
    at_least = 1 if case.num_tokens > 16384 else 3
    seconds = median(durations(step, device, 5.0 if device.type == "cuda" else 0.0, at_least))
    adapters = None
    if case.is_lora:
        adapters = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    count, peak = flops(case.model, case.num_tokens, adapters), peak_flops()
    found: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_s": NUM_ROWS * case.num_tokens / seconds,
    }
    if peak:
        found |= {
            "mfu": 100 * count.ours / seconds / peak,
            "mfu_their_way": 100 * count.theirs / seconds / peak,
        }
    found["peak_gib"] = memory_mb(device, "VmHWM") * 1e6 / 2**30
    if device.type == "cuda":
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    published = {"seconds": case.seconds, "mfu": case.mfu, "gib": case.gib}
    found |= {f"published_{name}": value for name, value in published.items() if value is not None}
    return found | {"grad_norm": metrics["grad_norm"]}


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "a tiny model, in under a minute on a CPU").parse_args()
    rows = Rows(args.json)
    with process_group(600) as device:
        for case in QUICK if args.quick else CASES:
            for mode in case.modes:
                method = "LoRA r16" if case.is_lora else "full"
                names = {"model": f"Qwen3-{case.model}", "method": method}
                names |= {"tokens": f"{NUM_ROWS} x {case.num_tokens}", "mode": mode}
                rows.measure(names, partial(measure, case, mode, device))


if __name__ == "__main__":
    main()
