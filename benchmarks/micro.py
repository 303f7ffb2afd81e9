"""Attention over shared prompts and the log-prob head, each alone beside its rivals, in one process.

    python benchmarks/micro.py [--json PATH] [--quick] [--parts head attention] [--against CHECKOUT]

On a GPU in bf16 with the shapes of an 8B model, on a CPU (`--quick`) in fp32 with tiny ones. Times are medians of
forward and backward after a warm-up; `forward_ms` is the forward alone, `memory_mb` the peak above the inputs.
  attention  ours (the cascade over one row) and PrefixGrouper share the prompts; the others run on repeated prompts.
             `tflops` counts the pairs of query and key that a variant has to do.
  head       ours, and rivals that write the logits down or make them again. The bound is 6·N·hidden·vocab FLOPs at
             the peak of the data sheet.
`difference` is from the first variant's outputs, relative to their norm; for the head, from fp64 log-probs, in nats.
A variant that cannot run here gives a row that says why.
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.common import (
    Rows,
    Skipped,
    arguments,
    beside,
    device_here,
    durations,
    median,
    memory_mb,
    peak_flops,
    reset_peak,
)
from benchmarks.prefix_attention import grouper_attention
from prefix_attention import _Asked, _attention, _in_chunks, _paths, _WideProducts, pack

# groups, tokens of a prompt, tokens of a completion that are forwarded, completions of a group
SHAPES = {
    False: [(1, 8192, 512, 8), (10, 1024, 256, 8), (10, 128, 128, 8), (40, 256, 128, 8)],
    True: [(1, 64, 16, 4), (10, 16, 8, 2), (40, 8, 4, 2)],
}
HEADS = {False: (32, 8, 128), True: (4, 2, 32)}  # of queries, of keys, size
# tokens, hidden, vocab
HEAD_SHAPES = {False: [(8192, 4096, 151936), (8192, 1536, 151936)], True: [(64, 32, 512)]}

# for `--against`: tokens, hidden size, vocabulary on a CPU, one thread
AGAINST = {"narrow": "(4096, 256, 32768)", "wide": "(1024, 1024, 32768)"}
HEAD_ALONE = """
import json, sys, time
time.perf_counter = time.process_time  # which neighbours on the machine disturb less
sys.path.insert(0, ".")
import torch
from functools import partial
from benchmarks.micro import HEAD, Head, device_here, timed_step
torch.set_num_threads(1)
case = Head({shape}, device_here())
step = partial(HEAD["ours"], case)
print(json.dumps(timed_step(step, (case.x, case.weight), device_here())[0]))
"""


def timed_step(
    forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], device: torch.device
) -> tuple[dict[str, float], Tensor]:
    """Times and peak memory of forward and backward, and the output; only the forward's where it has no gradient."""
    seconds = 0.4 if device.type == "cuda" else 0.05

    def forward_only() -> Tensor:
        with torch.no_grad():
            return forward()

    def both() -> None:
        out = forward()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    has_gradient = forward().requires_grad
    steps = [forward_only, both] if has_gradient else [forward_only]
    for step in steps * 2:
        step()
    before = memory_mb(device, "VmRSS")
    reset_peak(device)
    found = {"forward_ms": 1e3 * median(durations(forward_only, device, seconds))}
    if has_gradient:
        found["ms"] = 1e3 * median(durations(both, device, seconds))
    found["memory_mb"] = memory_mb(device, "VmHWM") - before
    return found, forward_only()


# -- Attention ---------------------------------------------------------------------------------------------------------


class Attention:
    """Random queries, keys and values of one shape, over a row that shares prompts, and with these repeated."""

    def __init__(
        self, shape: tuple[int, int, int, int], heads: tuple[int, int, int], device: torch.device
    ):
        num_groups, prompt, completion, size = shape
        self.device, self.prompt, self.length = device, prompt, prompt + completion
        completions = [[n] * (completion + 1) for n in range(size)]
        (row,) = pack([([g] * prompt, completions) for g in range(num_groups)])
        assert row.tree is not None
        self.tree = row.tree
        paths = sorted(_paths(self.tree.segments), key=lambda path: path[0].start)  # by group
        places = [[*chain(*path)] for path in paths]
        self.rows = torch.tensor(places, device=device)  # [completions, length]
        together = [self.rows[n * size : (n + 1) * size] for n in range(num_groups)]
        of_groups = [torch.cat([rows[0, :prompt], *rows[:, prompt:]]) for rows in together]
        self.groups = torch.stack(of_groups)
        self.num_groups, self.size = num_groups, size
        own, whole = completion * (completion + 1) // 2, self.length * (self.length + 1) // 2
        num = num_groups * size
        of_prompts = num_groups * prompt * (prompt + 1) // 2
        shared = of_prompts + num * (completion * prompt + own)
        self.pairs = {True: shared, False: num * whole}
        queries, keys, dim = heads
        self.scale, self.flops_per_pair = dim**-0.5, 3.5 * 4 * queries * dim
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shapes = [(row.num_tokens, count, dim) for count in (queries, keys, keys)]
        self.qkv = [torch.randn(of, dtype=dtype, device=device) for of in shapes]

    def taken(self, places: Tensor | None = None) -> tuple[Tensor, ...]:
        """q, k and v [T, H, D] as leaves: the row's own, or those of some places in it, flat."""
        picked = self.qkv if places is None else [t[places.flatten()] for t in self.qkv]
        return tuple(t.clone().requires_grad_() for t in picked)

    def from_row(self, out: Tensor) -> Tensor:
        """The completions' outputs in the order of `rows`, of a variant that ran on the shared row."""
        return out[self.rows[:, self.prompt :].flatten()]

    def from_rows(self, out: Tensor) -> Tensor:
        """The same of a variant that ran on repeated rows."""
        return out.unflatten(0, self.rows.shape)[:, self.prompt :].flatten(0, 1)


class Variant(NamedTuple):
    """What runs: a forward of `inputs`, and how its output gives the completions' outputs."""

    inputs: tuple[Tensor, ...]
    forward: Callable[[], Tensor]
    completions: Callable[[Tensor], Tensor]
    is_shared: bool = False


def imported(module: str, name: str) -> Any:
    """A function of a package that may be missing."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Skipped(f"no {module}.{name}: {error}") from error


def sdpa(case: Attention) -> Variant:
    """torch's own attention over repeated rows, which here are equally long."""
    inputs = case.taken(case.rows)

    def forward() -> Tensor:
        q, k, v = (t.unflatten(0, case.rows.shape).transpose(1, 2) for t in inputs)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=case.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return Variant(inputs, forward, case.from_rows)


def cascade(case: Attention) -> Variant:
    """Ours."""
    inputs = case.taken()

    def forward() -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in inputs)
        return _attention(nn.Module(), q, k, v, None, tree=case.tree)[0][0]

    return Variant(inputs, forward, case.from_row, is_shared=True)


def flash(case: Attention) -> Variant:
    """One call of the kernel (FA2) whose calls the cascade consists of."""
    if case.device.type != "cuda":
        raise Skipped("needs a GPU")
    inputs = case.taken(case.rows)
    # Where the repeated rows begin and end.
    places = range(0, case.rows.numel() + 1, case.length)
    ends = torch.tensor(places, dtype=torch.int32, device=case.device)
    limits = (ends, ends, case.length, case.length, 0.0, True, False)
    kernel = torch.ops.aten._flash_attention_forward
    return Variant(inputs, lambda: kernel(*inputs, *limits, scale=case.scale)[0], case.from_rows)


def grouper(case: Attention) -> Variant:
    """PrefixGrouper through sdpa, a row for each group."""
    masks = imported("prefix_grouper", "PrefixGrouper").from_ungrouped_masks
    inputs, completion = case.taken(case.groups), case.length - case.prompt
    size = (case.num_groups * case.size, case.length)
    ones = torch.ones(size, dtype=torch.long, device=case.device)
    grouped = masks(
        prefix_mask=ones[: case.num_groups, : case.prompt], suffix_mask=ones[:, :completion],
        group_sizes=[case.size] * case.num_groups, padding_mode="right", device=case.device,
    )  # fmt: skip

    def forward() -> Tensor:
        q, k, v = (t.unflatten(0, case.groups.shape).transpose(1, 2) for t in inputs)
        out, _ = grouper_attention(
            nn.Module(), q, k, v, None, prefix_grouper=grouped, scaling=case.scale
        )
        return out.flatten(0, 1)

    def completions(out: Tensor) -> Tensor:
        return out.unflatten(0, case.groups.shape)[:, case.prompt :].flatten(0, 1)

    return Variant(inputs, forward, completions, is_shared=True)


ATTENTION: dict[str, Callable[[Attention], Variant]] = {
    "sdpa, repeated": sdpa,
    "ours": cascade,
    "one FA2 varlen call, repeated": flash,
    "prefix_grouper": grouper,
}


def attention_rows(rows: Rows, is_quick: bool, device: torch.device) -> None:
    """Every variant of attention on every shape."""
    for shape in SHAPES[is_quick]:
        case = Attention(shape, HEADS[is_quick], device)
        reference: list[Tensor] = []

        def measure(
            build: Callable[[Attention], Variant], case: Any = case, reference: Any = reference
        ) -> Any:
            variant = build(case)
            found, out = timed_step(variant.forward, variant.inputs, device)
            outputs = variant.completions(out).float()
            if not reference:
                reference.append(outputs)
            found["difference"] = ((outputs - reference[0]).norm() / reference[0].norm()).item()
            if "ms" in found:
                num_flops = case.flops_per_pair * case.pairs[variant.is_shared]
                found["tflops"] = num_flops / found["ms"] / 1e9
            if "ms" in found and (peak := peak_flops()):
                found["of_peak"] = found["tflops"] * 1e12 / peak
            return found

        names = dict(zip(("groups", "prompt", "completion", "size"), shape, strict=True))
        for variant, build in ATTENTION.items():
            named = {"part": "attention", **names, "variant": variant}
            rows.measure(named, partial(measure, build))


# -- Head --------------------------------------------------------------------------------------------------------------


class Head:
    """Random hidden states [N, hidden] and head [V, hidden], whose logits have a spread of about 1, and targets."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device):
        num_tokens, hidden, vocab = shape
        self.device = device
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.x = torch.randn(num_tokens, hidden, dtype=dtype, device=device).requires_grad_()
        weight = torch.randn(vocab, hidden, dtype=dtype, device=device) * hidden**-0.5
        self.weight = weight.requires_grad_()
        self.targets = torch.randint(vocab, (num_tokens,), device=device)
        self.flops = 6.0 * num_tokens * hidden * vocab

    @torch.no_grad()
    def difference(self, logprobs: Tensor) -> float:
        """The largest difference from fp64, among the first tokens, nats."""
        some = slice(0, 64)
        logits = self.x[some].double() @ self.weight.double().T
        exact = logits.log_softmax(-1).gather(-1, self.targets[some, None])[:, 0]
        return (logprobs[some].double() - exact).abs().max().item()


def ours(with_entropy: bool, case: Head) -> Tensor:
    """The one of prefix_attention.py."""

    def head(hidden: Tensor) -> Tensor:
        with _WideProducts():
            return F.linear(hidden, case.weight)

    asked = _Asked(case.targets, case.targets, 1.0, (), with_entropy)
    return _in_chunks(head, case.x, len(case.weight), asked)[0]


def written_down(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The logits of all tokens, and cross_entropy."""
    return -F.cross_entropy((x @ weight.T).float(), targets, reduction="none")


def checkpointed(case: Head) -> Tensor:
    """Chunks of 1024 tokens under torch's checkpoint."""
    parts = zip(case.x.split(1024), case.targets.split(1024), strict=True)
    found = [checkpoint(written_down, x, case.weight, t, use_reentrant=False) for x, t in parts]
    return torch.cat(found)


def cut(case: Head) -> Tensor:
    """Apple's cut-cross-entropy."""
    return -imported("cut_cross_entropy", "linear_cross_entropy")(
        case.x, case.weight, case.targets, reduction="none"
    )


def liger(case: Head) -> Tensor:
    """Liger's fused linear and cross-entropy."""
    loss = imported("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")
    return -loss(reduction="none")(case.weight, case.x, case.targets)


HEAD: dict[str, Callable[[Head], Tensor]] = {
    "ours": partial(ours, False),
    "ours, with entropy": partial(ours, True),
    "all logits, cross_entropy": lambda case: written_down(case.x, case.weight, case.targets),
    "chunks under checkpoint": checkpointed,
    "cut-cross-entropy": cut,
    "Liger": liger,
}


def head_rows(rows: Rows, is_quick: bool, device: torch.device) -> None:
    """Every variant of the head on every shape."""
    for shape in HEAD_SHAPES[is_quick]:
        case = Head(shape, device)

        def measure(variant: Callable[[Head], Tensor], case: Any = case) -> dict[str, Any]:
            found, out = timed_step(partial(variant, case), (case.x, case.weight), device)
            found["difference"] = case.difference(out)
            found["tflops"] = case.flops / found["ms"] / 1e9
            if peak := peak_flops():
                found["of_bound"] = case.flops / peak / (found["ms"] / 1e3)
            return found

        names = dict(zip(("tokens", "hidden", "vocab"), shape, strict=True))
        for variant, function in HEAD.items():
            named = {"part": "head", **names, "variant": variant}
            rows.measure(named, partial(measure, function))


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "tiny shapes, in under a minute on a CPU", "the heads")
    parts = ("head", "attention")
    which = "which of them, in the usual order"
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help=which)
    args = parser.parse_args()
    if args.against:
        shapes = {"quick": "(64, 32, 512)"} if args.quick else AGAINST
        commands = {name: ["-c", HEAD_ALONE.format(shape=shape)] for name, shape in shapes.items()}
        beside(args.against, commands, 1 if args.quick else 3, args.json)
        return
    rows, device = Rows(args.json), device_here()
    if "head" in args.parts:
        head_rows(rows, args.quick, device)
    if "attention" in args.parts:
        attention_rows(rows, args.quick, device)


if __name__ == "__main__":
    main()
