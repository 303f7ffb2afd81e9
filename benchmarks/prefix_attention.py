"""Forward and backward of groups that share a prompt: repeated rows, prefix_grouper, and ours, side by side.

    python benchmarks/prefix_attention.py [--json PATH] [--quick] [--models 1.5B,8B] [--compile] [--flash4]
    python benchmarks/prefix_attention.py --against CHECKOUT [--json PATH] [--quick]

A Qwen3-shaped random model with its head, on one CPU thread in fp32, or on a GPU in bf16 with gradient checkpointing:
  padded    (a) one row per completion, right-padded, stock sdpa, logits of the completion tokens
  packed    (b) one sequence per completion, without padding, the same kernels and head, nothing shared or merged
  grouper   (c) the prefix_grouper package with its sdpa adapter, logits as in its documentation
  ours      (d) `pack`, `attach`, `completion_logprobs`
On a GPU without (a); with `--compile` of compiled decoder layers, with `--flash4` by `recipes/flash4.py`.

Every figure is the median over runs after a warm-up, within one token budget; memory is the peak above the model's. On
a CPU each method has processes of its own, (b) and (d) in turn. On a GPU all run in one process and on one model, row
by row: a run that is cut keeps the rows it has. `bound` is the speed-up over (b) that the FLOPs allow: Σ over linear
layers (by tokens forwarded), attention (by pairs of query and key) and head (by completion tokens, the same for both);
`of_bound` is the share of it that ours reaches. `*_difference` is the largest difference of a log-prob from (a)'s, or
(b)'s.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from benchmarks.common import (
    CPU_CLOCK,
    MODELS,
    Rows,
    arguments,
    beside,
    device_here,
    durations,
    flops,
    median,
    medians,
    memory_mb,
    ran,
    random_model,
    reset_peak,
)  # fmt: skip
from prefix_attention import NAME, PackedBatch, _attention, attach, completion_logprobs, pack
from recipes.flash4 import use_flash_attention_4

Groups = list[tuple[list[int], list[list[int]]]]

METHODS = ("padded", "packed", "grouper", "ours")
# on a CPU: processes of (b) and (d), whose ratio is the finest; seconds that a process measures, once at least
REPEATS = {"quick": (1, 0.0), "4 layers": (3, 15.0)}
CPU_SHAPES = ("512,512,8", "1024,256,8", "2048,128,8", "4096,64,16", "ragged")
CPU_CASES = [("4 layers", shape, 8192) for shape in CPU_SHAPES]  # size, shape, token budget
# on a GPU: tokens of a row, of which those of the 8B model have to fit 80 GB beside its weights and gradients
BUDGETS = {"quick": 4096, "1.5B": 131072, "8B": 65536}
# repeated tokens: packed rows of more would take the 8B model out of nine minutes
LARGEST = 200_000


def make_groups(shape: str, vocab: int) -> Groups:
    """`P,S,G` or `P,S,G,groups`; `ragged`: six groups of 8, prompts of 200 to 2000, completions of 20 to 600 tokens."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    if shape == "ragged":
        return [
            (tokens(rng.randint(200, 2000)), [tokens(rng.randint(20, 600)) for _ in range(8)])
            for _ in range(6)
        ]
    prompt, completion, size, *more = map(int, shape.split(","))
    return [
        (tokens(prompt), [tokens(completion) for _ in range(size)])
        for _ in range(more[0] if more else 1)
    ]


def make_model(size: str, device: torch.device) -> Any:
    """Random weights; bf16 with gradient checkpointing on a GPU, fp32 on a CPU."""
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    model = random_model(MODELS[size], device, dtype)
    if is_cuda:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def padded_logprobs(model: Any, row: PackedBatch) -> Tensor:
    """(a), by the model's own logits from the first position that predicts."""
    line, position = row.cells // row.input_ids.shape[1], row.cells % row.input_ids.shape[1]
    first = int(position.min())
    logits = model(
        input_ids=row.input_ids,
        attention_mask=row.attention_mask,
        logits_to_keep=row.input_ids.shape[1] - first,
    ).logits
    chosen = logits[line, position - first].float()
    return chosen.gather(-1, row.targets[:, None])[:, 0] - chosen.logsumexp(-1)


def grouper_attention(
    _: Any, query: Tensor, key: Tensor, value: Tensor, __: Any, prefix_grouper: Any, scaling: float,
    **___: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The package's attention through sdpa. Its masks are of padding [B, K]; causality goes from the end of the keys.

    Without padding a prompt needs no mask, and the masks are made once a forward: as good as sdpa allows.
    """
    from prefix_grouper.forward import AttentionForward

    def sdpa(q: Tensor, k: Tensor, v: Tensor, padding: Any) -> Tensor:
        if q.shape[2] == k.shape[2] and padding.all():
            mask = None
        elif (mask := getattr(padding, "causal", None)) is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(
                k.shape[2] - q.shape[2]
            )
            mask = mask & padding[:, None, None]
            mask |= ~mask.any(-1, keepdim=True)  # queries that are padding: anything but nothing
            padding.causal = mask
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    return AttentionForward(sdpa)(prefix_grouper, query, key, value), None


def padded_batches(groups: Groups, max_tokens: int) -> list[Groups]:
    """Consecutive groups whose padded rows fit the token budget together; a larger group alone."""
    batches: list[Groups] = []
    for group in groups:
        together = [*batches[-1], group] if batches else []
        longest = max(
            (len(prompt) + sum(map(len, completions)) for prompt, completions in together),
            default=0,
        )
        if not together or longest * len(together) > max_tokens:
            batches.append([])
        batches[-1].append(group)
    return batches


def grouper_logprobs(model: Any, groups: Groups) -> Tensor:
    """(c), the groups in one padded batch, as its documentation has it."""
    from prefix_grouper import PrefixGrouper

    device = model.device

    def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        tensors = [torch.tensor(row) for row in rows]
        masks = [torch.ones_like(tensor) for tensor in tensors]
        ids, mask = pad_sequence(tensors, batch_first=True), pad_sequence(masks, batch_first=True)
        return ids.to(device), mask.to(device)

    prompt_ids, prompt_mask = padded([prompt for prompt, _ in groups])
    completion_ids, completion_mask = padded(
        [ids for _, completions in groups for ids in completions]
    )
    grouper = PrefixGrouper.from_ungrouped_masks(
        prefix_mask=prompt_mask,
        suffix_mask=completion_mask,
        group_sizes=[len(completions) for _, completions in groups],
        padding_mode="right",
        device=device,
    )
    input_ids = grouper.concat_input(prompt_ids, prompt_mask, completion_ids, completion_mask)
    position_ids = torch.zeros_like(input_ids)
    for number, (prompt, completions) in enumerate(groups):
        places = list(range(len(prompt)))
        for ids in completions:
            places += range(len(prompt), len(prompt) + len(ids))
        position_ids[number, : len(places)] = torch.tensor(places)
    logits = model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
        prefix_grouper=grouper,
    ).logits
    _, _, suffix, suffix_mask = grouper.split_output(logits, include_prefix_last=1)
    targets = grouper.convert_padding(completion_ids, completion_mask, padding_mode="right")
    suffix, kept = suffix[:, :-1], suffix_mask[:, 1:].bool()
    return (suffix.gather(-1, targets[..., None])[..., 0] - suffix.logsumexp(-1))[kept]


def make_batches(
    method: str, groups: Groups, max_tokens: int, device: torch.device
) -> Sequence[Any]:
    """What `method` forwards at a time, within the same token budget."""
    if method == "grouper":
        return padded_batches(groups, max_tokens)
    if method == "padded":  # a group's rows are equally long but for the completions
        rows = [row for group in groups for row in pack([group], max_tokens, share_prefix=False)]
    elif method == "packed":
        alone = [
            (prompt, [completion]) for prompt, completions in groups for completion in completions
        ]
        rows = pack(alone, max_tokens, apart=range(len(alone)))
    else:
        rows = pack(groups, max_tokens)
    return [row.to(device) for row in rows]


LOGPROBS: dict[str, Callable[[Any, Any], Tensor]] = {
    "padded": padded_logprobs,
    "packed": completion_logprobs,
    "grouper": grouper_logprobs,
    "ours": completion_logprobs,
}


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "packed": _attention,
    "ours": _attention,
    "grouper": grouper_attention,
}


def timed(
    method: str, model: Any, batches: Sequence[Any], device: torch.device, seconds: float
) -> dict[str, Any]:
    """Seconds and peak memory of forward and backward of all batches, after one to warm up; and all log-probs."""
    found: list[float] = []

    def run(some: Sequence[Any]) -> None:
        model.zero_grad(set_to_none=True)
        found.clear()
        for batch in some:
            logprobs = LOGPROBS[method](model, batch)
            logprobs.sum().backward()
            found.extend(logprobs.detach().tolist())

    model.zero_grad(set_to_none=True)
    before = memory_mb(device, "VmRSS")
    reset_peak(device)
    run(batches[:1])  # the kernels of these shapes
    times = durations(partial(run, batches), device, seconds, 1)
    peak = memory_mb(device, "VmHWM") - before
    return {"seconds": median(times), "memory_mb": peak, "logprobs": found}


def measure(method: str, size: str, shape: str, seconds: float, max_tokens: int) -> dict[str, Any]:
    """One method on one shape, in this process."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = make_model(size, device)
    if method in ATTENTIONS:
        attach(model)
        AttentionInterface.register(NAME, ATTENTIONS[method])
    groups = make_groups(shape, MODELS[size]["vocab_size"])
    batches = make_batches(method, groups, max_tokens, device)
    return timed(method, model, batches, device, seconds)


def flops_of(groups: Groups, size: str, share: bool) -> float:
    """Of forward and backward, each completion's last token left out."""
    tokens = pairs = predicted = 0
    for prompt, completions in groups:
        length, copies = len(prompt), 1 if share else len(completions)
        tokens += copies * length
        pairs += copies * length * (length + 1) // 2
        for ids in completions:
            own = len(ids) - 1
            tokens += own
            pairs += own * length + own * (own + 1) // 2
            predicted += len(ids)
    return flops(MODELS[size], tokens, pairs, predicted)


def compare(size: str, shape: str, max_tokens: int) -> dict[str, Any]:
    """All methods on one shape, each in processes of its own."""
    found: dict[str, list[dict[str, Any]]] = {}
    processes, seconds = REPEATS[size]
    for method in (*METHODS, *("packed", "ours") * (processes - 1)):
        words = [__file__, "--measure", method, size, shape, seconds, max_tokens]
        found.setdefault(method, []).append(ran(words))
    results = {}
    for method, runs in found.items():
        figures = [{name: run[name] for name in ("seconds", "memory_mb")} for run in runs]
        results[method] = runs[-1] | medians(figures)
    return compared(size, shape, results)


def compared(size: str, shape: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The row of a table, from each method's seconds, memory and log-probs."""
    groups = make_groups(shape, MODELS[size]["vocab_size"])
    row: dict[str, Any] = {f"{method}_s": found["seconds"] for method, found in results.items()}
    row |= {f"{method}_mb": found["memory_mb"] for method, found in results.items()}
    row["bound"] = flops_of(groups, size, share=False) / flops_of(groups, size, share=True)
    if {"packed", "ours"} <= results.keys():
        row["speedup"] = results["packed"]["seconds"] / results["ours"]["seconds"]
        row["of_bound"] = row["speedup"] / row["bound"]
    if {"grouper", "ours"} <= results.keys():
        row["over_grouper"] = results["grouper"]["seconds"] / results["ours"]["seconds"]
    plain = results.get("padded") or results.get("packed")
    for method in ("ours", "grouper"):
        if plain and method in results:
            pairs = zip(plain["logprobs"], results[method]["logprobs"], strict=True)
            row[f"{method}_difference"] = max(abs(a - b) for a, b in pairs)
    return row


def compare_in_one_process(
    size: str, model: Any, shape: str, device: torch.device
) -> dict[str, Any]:
    """The methods on one attached model, one after the other."""
    groups = make_groups(shape, MODELS[size]["vocab_size"])
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}  # why a rival has no figures: no package, no room for its logits
    for method, attention in ATTENTIONS.items():
        AttentionInterface.register(NAME, attention)
        batches = make_batches(method, groups, BUDGETS[size], device)
        try:
            results[method] = timed(method, model, batches, device, 1.0)
        except Exception as error:
            if method in ("packed", "ours"):
                raise
            failed[f"{method}_error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return compared(size, shape, results) | failed


def measure_size(size: str, shapes: Sequence[str], rows: Rows, more: dict[str, str]) -> None:
    """A row for each shape on one model; `more` is said of every row."""
    device = device_here()
    model = attach(make_model(size, device))
    if "layers" in more:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    for shape in shapes:
        one = partial(compare_in_one_process, size, model, shape, device)
        rows.measure({"model": size, "shape": shape, **more}, one)


def shapes_for_gpu(size: str) -> list[str]:
    """Many short groups, then prompts of 16k tokens together, those of fewest repeated tokens first."""
    long = [
        (p, p // part, g, max(1, 16384 // p))
        for p in (4096, 8192, 16384)
        for g in (8, 16)
        for part in (16, 4)
    ]
    repeated = {shape: (shape[0] + shape[1]) * shape[2] * shape[3] for shape in long}
    long = sorted(
        (shape for shape in long if size != "8B" or repeated[shape] <= LARGEST),
        key=repeated.__getitem__,
    )
    return ["128,128,8,10", "128,128,8,40", *(",".join(map(str, shape)) for shape in long)]


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "a tiny model and one small shape, in under a minute", "ours")
    sizes = "on a GPU: which of them (each under nine minutes)"
    parser.add_argument("--models", default="1.5B,8B", help=sizes)
    shapes = "on a GPU: P,S,G or P,S,G,groups in place of the usual ones"
    parser.add_argument("--shapes", nargs="+", help=shapes)
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers")
    parser.add_argument("--flash4", action="store_true", help="on a Hopper GPU: FlashAttention 4")
    parser.add_argument("--one-process", action="store_true", help="on a CPU, too: as on a GPU")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        method, size, shape, seconds, max_tokens = args.measure
        print(json.dumps(measure(method, size, shape, float(seconds), int(max_tokens))))
        return
    cases = [("quick", "128,32,4", 4096)] if args.quick else CPU_CASES
    if args.against:
        commands = {}
        for size, shape, max_tokens in cases:
            words = ["ours", size, shape, str(REPEATS[size][1]), str(max_tokens)]
            script = ["-c", CPU_CLOCK, "benchmarks/prefix_attention.py"]
            commands[shape] = [*script, "--measure", *words]
        beside(args.against, commands, 1 if args.quick else 3, args.json)
        return
    rows = Rows(args.json)
    if device_here().type == "cuda" or args.one_process:
        more = {"layers": "compiled"} if args.compile else {}
        if args.flash4:
            use_flash_attention_4()
            more["kernels"] = "FlashAttention 4"
        for size in ["quick"] if args.quick else args.models.split(","):
            usual = ["128,32,4", "32,16,4,10"] if args.quick else shapes_for_gpu(size)
            measure_size(size, args.shapes or usual, rows, more)
        return
    for size, shape, max_tokens in cases:
        rows.add({"model": size, "shape": shape} | compare(size, shape, max_tokens))


if __name__ == "__main__":
    main()
