"""A step over trees: TRL's packed prefix trees beside our rows, on the same model and completions.

    python benchmarks/trees.py [--json PATH] [--quick] [--model 1.5B]

Three jobs, on random weights of Qwen3's shape, in bf16 with gradient checkpointing on a GPU:
  4096/256/16   two groups: a prompt of 4,096 tokens, 16 completions of 256 each
  1024/256/8    five groups: 1,024 tokens, 8 completions of 256
  agents        four agents of ten turns on one prompt, whose thoughts leave the history when their turn is over
                (`rewritten` of benchmarks/branching.py)
A step is forward, entropies, a policy-gradient loss and backward of all rows, none above 16,384 tokens.
  trl           TRL 1.16's own `TreeRow`, `tree_attention` and fused head (trl.experimental.async_grpo). Its attention
                gathers keys and values along each segment's path, and calls FlashAttention 3 on them, which comes from
                the hub through the package kernels. Without that, torch's FlashAttention 2 takes its place (`kernel`
                says so), and on a CPU a loop over the segments.
  ours          `pack`, `attach`, `completion_logprobs`, with torch's FlashAttention 2
`s` is the median of steps after one that warms up, `mb` the peak above the model's memory, `tokens` what is forwarded.
`mean_error` and `max_error` are those of log-probs, in nats, from the same weights in fp32, each sequence alone.
"""

import os
import random
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.branching import Pairs, flat, make_job
from benchmarks.common import (
    MODELS,
    Rows,
    Skipped,
    arguments,
    device_here,
    durations,
    median,
    memory_mb,
    reset_peak,
)
from benchmarks.prefix_attention import make_groups, make_model
from prefix_attention import attach, completion_logprobs, pack

BUDGET = {False: 16384, True: 1024}  # tokens of a row; of --quick
SHAPES = {  # of groups: prompt, completion, completions, groups
    False: {"4096/256/16": "4096,256,16,2", "1024/256/8": "1024,256,8,5"},
    True: {"4096/256/16": "40,6,4,2", "1024/256/8": "10,6,3,5"},
}
SECONDS = {"cuda": 5.0, "cpu": 0.0}


@dataclass
class Work:
    """What a method forwards: rows, and of each the places of its log-probs among all sampled tokens."""

    rows: list[Any]
    places: list[Tensor]
    num_tokens: int


# -- The jobs --------------------------------------------------------------------------------------


def make_pairs(job: str, is_quick: bool, vocab: int) -> list[list[Pairs]]:
    """Groups of rollouts of segments: what was seen, and what was sampled below it."""
    if job == "agents":
        return make_job("rewritten", is_quick, vocab)
    found: list[list[Pairs]] = []
    for prompt, completions in make_groups(SHAPES[is_quick][job], vocab):
        found.append([[(prompt, completion)] for completion in completions])
    return found


# -- TRL's trees -----------------------------------------------------------------------------------


def flash_2(q: Tensor, k: Tensor, v: Tensor, *where: Any, softmax_scale: float, **_: Any) -> Tensor:
    """`flash_attn_varlen_func` by torch's kernel, ours too; a segment's queries are its path's last."""
    forward = torch.ops.aten._flash_attention_forward
    out: Tensor = forward(q, k, v, *where, 0.0, True, False, scale=softmax_scale)[0]
    return out


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *_: Any,
    softmax_scale: float, **__: Any,
) -> Tensor:  # fmt: skip
    """`flash_attn_varlen_func` for a CPU, a segment at a time."""
    parts = []
    queries = q.split(ends_q.diff().tolist())
    keys = k.split(ends_k.diff().tolist())
    values = v.split(ends_k.diff().tolist())
    for query, key, value in zip(queries, keys, values, strict=True):
        mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@cache
def use_a_kernel_that_is_here(device: torch.device) -> str:
    """Let TRL's tree attention run on this machine; returns the kernel's name."""
    from trl.experimental.async_grpo import packing as module

    packing: Any = module
    try:
        packing._flash_attn()
        return "FlashAttention 3"
    except Exception:  # whatever the package or the hub raises, without which the others are here
        is_gpu = device.type == "cuda"
    function = flash_2 if is_gpu else one_by_one
    kernel = SimpleNamespace(flash_attn_varlen_func=function)
    packing._flash_attn = lambda: kernel
    return "FlashAttention 2" if is_gpu else "a loop over segments"


def trl_work(pairs: Pairs, budget: int, device: torch.device) -> Work:
    """Segments folded into TRL's rows, in order, as its planner for one rank does."""
    from trl.experimental.async_grpo.packing import TreeRow

    rows = [TreeRow()]
    for number, (seen, sampled) in enumerate(pairs):
        mask = [0] * len(seen) + [1] * len(sampled)
        sample = {
            "input_ids": torch.tensor([*seen, *sampled]),
            "completion_mask": torch.tensor(mask),
            "old_log_probs": torch.zeros(len(mask)),
            "advantage": 1.0 - 2 * (number % 2),
            "group_id": 0,
        }
        if not rows[-1].fits(sample, budget):
            rows.append(TreeRow())
        rows[-1].add(sample)

    packed = [row.pack() for row in rows]
    places = []
    start = 0
    for row in packed:
        end = start + len(row["token_index"])
        places.append(torch.arange(start, end))
        start = end
    num_tokens = sum(len(row["input_ids"]) for row in packed)
    on_device = [{name: value.to(device) for name, value in row.items()} for row in packed]
    return Work(on_device, places, num_tokens)


def trl_logprobs(model: Any, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a row's sampled tokens, as `AsyncGRPOTrainer.compute_loss` takes them."""
    longest_q, longest_k = row["tree_max_seqlens"].tolist()
    outputs = model(
        input_ids=row["input_ids"][None],
        position_ids=row["position_ids"][None],
        shift_labels=row["shift_labels"][None],
        fused_lm_head=True,
        tree_kv_index=row["tree_kv_index"],
        tree_cu_seqlens_q=row["tree_cu_seqlens_q"],
        tree_cu_seqlens_k=row["tree_cu_seqlens_k"],
        tree_max_seqlen_q=longest_q,
        tree_max_seqlen_k=longest_k,
    )
    of_token = row["token_index"]
    return outputs.log_probs.flatten()[of_token], outputs.entropy.flatten()[of_token]


def make_trl(size: str, device: torch.device) -> tuple[Any, str]:
    """The model as TRL's trainer prepares it, and the name of its kernel."""
    try:
        from trl.experimental.async_grpo.packing import TREE_ATTENTION, register_tree_attention
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise Skipped(f"TRL is not installed: {error}") from None

    kernel = use_a_kernel_that_is_here(device)
    register_tree_attention()
    model = make_model(size, device)
    model.set_attn_implementation(TREE_ATTENTION)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model, kernel


# -- Measuring -------------------------------------------------------------------------------------


def our_work(groups: list[list[Pairs]], budget: int, device: torch.device) -> Work:
    """`pack`'s rows of the groups."""
    of_groups: Any = [(group[0][0][0], group) for group in groups]
    rows = [row.to(device) for row in pack(of_groups, budget)]
    return Work(rows, [row.index.cpu() for row in rows], sum(row.num_tokens for row in rows))


def exact(size: str, pairs: Pairs, device: torch.device) -> Tensor:
    """Log-probs of all sampled tokens from the weights in fp32, each sequence alone."""
    model = make_model(size, device).float().eval()
    found = []
    for seen, sampled in pairs:
        ids = torch.tensor([[*seen, *sampled]], device=device)
        with torch.no_grad():
            logits = model(ids[:, :-1], logits_to_keep=len(sampled)).logits[0]
        chosen = ids[0, len(seen) :, None]
        found.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0].cpu())
    return torch.cat(found)


def measure(
    method: str, size: str, groups: list[list[Pairs]], budget: int, right: Tensor,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Steps of one method."""
    if method == "trl":
        model, kernel = make_trl(size, device)
        work, logprobs_of = trl_work(flat(groups), budget, device), trl_logprobs
    else:
        model, kernel = attach(make_model(size, device)), "torch's"
        work = our_work(groups, budget, device)
        logprobs_of = partial(completion_logprobs, return_entropy=True)
    row: dict[str, Any] = {"kernel": kernel}
    values = torch.zeros(len(right))
    generator = random.Random(0)
    signs = torch.tensor([generator.choice((-1.0, 1.0)) for _ in right])

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for packed, places in zip(work.rows, work.places, strict=True):
            logprobs, _ = logprobs_of(model, packed)
            ratio = (logprobs - logprobs.detach()).exp()
            (-ratio @ signs[places].to(ratio)).backward()

    reset_peak(device)
    before = memory_mb(device, "VmRSS")
    step()
    row["s"] = median(durations(step, device, SECONDS[device.type]))
    row["mb"] = memory_mb(device, "VmHWM") - before
    row["rows"] = len(work.rows)
    row["tokens"] = work.num_tokens

    for packed, places in zip(work.rows, work.places, strict=True):
        with torch.no_grad():
            logprobs, _ = logprobs_of(model, packed)
        values[places] = logprobs.float().cpu()
    error = (values - right).abs()
    row["mean_error"] = error.mean().item()
    row["max_error"] = error.max().item()
    return row


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "a tiny model and jobs, on a CPU, too")
    parser.add_argument("--model", default="1.5B")
    args = parser.parse_args()
    rows = Rows(args.json)
    device = device_here()
    is_quick = args.quick
    if device.type == "cpu" and not is_quick:
        rows.add({"skipped": "no CUDA device"})
        return

    size = "quick" if is_quick else args.model
    jobs = {}
    for job in (*SHAPES[is_quick], "agents"):
        groups = make_pairs(job, is_quick, MODELS[size]["vocab_size"])
        jobs[job] = (groups, exact(size, flat(groups), device))
    for method in ("trl", "ours"):
        for job, (groups, right) in jobs.items():
            names = {"model": size, "job": job, "method": method}
            one = partial(measure, method, size, groups, BUDGET[is_quick], right, device)
            rows.measure(names, one)


if __name__ == "__main__":
    main()
