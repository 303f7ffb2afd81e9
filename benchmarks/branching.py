"""Forward and backward of agents' rollouts: a row per turn, and one tree, side by side.

    python benchmarks/branching.py [--json PATH] [--quick] [--against CHECKOUT]

Three jobs, on the 4-layer model of benchmarks/prefix_attention.py, one CPU thread, fp32:
  rewritten  four agents of ten turns on one prompt, whose thoughts leave the history when their turn is over
  appended   the same agents, whose history only grows
  system     eight groups of four completions, below a system prompt that all groups share
Two ways:
  dense      a sequence per turn, without padding, nothing shared: what trainers do that make a row of each turn
  tree       `pack` of segments
Each figure is the median of runs in processes of their own, by turns, within one token budget. `bound` is the speed-up
over dense rows that the FLOPs allow if no context is forwarded twice (counted here by a trie of tokens): linear layers
by tokens, attention by pairs of query and key, the head by sampled tokens. `of_bound` is the share of it that is
reached. `difference` is the largest difference of a log-prob from that of dense rows; memory is above the model's.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.common import (
    CPU_CLOCK,
    MODELS,
    Rows,
    arguments,
    beside,
    durations,
    flops,
    median,
    memory_mb,
    ran,
)  # fmt: skip
from benchmarks.prefix_attention import make_model
from prefix_attention import PackedBatch, attach, completion_logprobs, pack

JOBS, METHODS = ("rewritten", "appended", "system"), ("dense", "tree")
Pairs = list[tuple[list[int], list[int]]]  # what is seen, and what is sampled below it

# agents: prompt, agents, turns, thought, answer, observation; and system prompt, groups, question, completions, length
SHAPES: dict[bool, dict[str, Any]] = {
    False: {
        "agents": (384, 4, 10, 96, 32, 64),
        "system": (1500, 8, 40, 4, 120),
        "budget": 16384,
        "seconds": 20.0,
    },
    True: {
        "agents": (24, 2, 3, 8, 4, 6),
        "system": (60, 3, 5, 2, 9),
        "budget": 1024,
        "seconds": 0.0,
    },
}


def make_job(job: str, is_quick: bool, vocab: int) -> list[list[Pairs]]:
    """Groups of rollouts of segments."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    if job == "system":
        system, num_groups, question, size, length = SHAPES[is_quick]["system"]
        shared = tokens(system)
        prompts = [shared + tokens(question) for _ in range(num_groups)]
        return [[[(prompt, tokens(length))] for _ in range(size)] for prompt in prompts]
    prompt, num_agents, num_turns, thought, answer, observation = SHAPES[is_quick]["agents"]
    first = tokens(prompt)
    group = []
    for _ in range(num_agents):
        seen, rollout = first, []
        for _ in range(num_turns):
            thinks, says = tokens(thought), tokens(answer)
            rollout.append((seen, thinks + says))
            seen = [*seen, *(thinks if job == "appended" else []), *says, *tokens(observation)]
        group.append(rollout)
    return [group]


def flat(groups: list[list[Pairs]]) -> Pairs:
    """All segments in order."""
    return [pair for group in groups for rollout in group for pair in rollout]


def make_rows(method: str, groups: list[list[Pairs]], budget: int) -> list[PackedBatch]:
    """What a method forwards, all with the same sampled tokens in the same order of `index`."""
    if method == "tree":
        return pack([(group[0][0][0], group) for group in groups], budget)
    alone: Any = [(prompt, [ids]) for prompt, ids in flat(groups)]
    return pack(alone, budget, apart=range(len(alone)))


def count(pairs: Pairs, shares: bool) -> tuple[int, int, int]:
    """Tokens forwarded, pairs of query and key, and tokens sampled; with `shares` each context counts once."""
    tokens = scores = 0
    trie: dict[int, Any] = {}
    for prompt, ids in pairs:
        node = trie if shares else {}
        for depth, token in enumerate([*prompt, *ids[:-1]], 1):
            if token not in node:
                node[token] = {}
                tokens, scores = tokens + 1, scores + depth
            node = node[token]
    return tokens, scores, sum(len(ids) for _, ids in pairs)


def measure(job: str, method: str, is_quick: bool) -> dict[str, Any]:
    """One method on one job, in this process."""
    torch.set_num_threads(1)
    device, size = torch.device("cpu"), "quick" if is_quick else "4 layers"
    model = attach(make_model(size, device))
    shape = SHAPES[is_quick]
    groups = make_job(job, is_quick, MODELS[size]["vocab_size"])
    rows = make_rows(method, groups, shape["budget"])
    values = torch.zeros(sum(len(row.targets) for row in rows))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for row in rows:
            logprobs = completion_logprobs(model, row)
            logprobs.sum().backward()
            values[row.index] = logprobs.detach()

    before = memory_mb(device, "VmRSS")
    step()
    times = durations(step, device, shape["seconds"], 1)
    return {
        "s": median(times), "mb": memory_mb(device, "VmHWM") - before, "rows": len(rows),
        "tokens": sum(row.num_tokens for row in rows), "logprobs": values.tolist(),
    }  # fmt: skip


def compare(job: str, is_quick: bool) -> dict[str, Any]:
    """All methods on one job, by turns."""
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for _ in range(1 if is_quick else 3):
        for method in METHODS:
            words = [__file__, "--measure", job, method, *["--quick"] * is_quick]
            found[method].append(ran(words))
    size = "quick" if is_quick else "4 layers"
    pairs = flat(make_job(job, is_quick, MODELS[size]["vocab_size"]))
    dense, tree = (count(pairs, shares) for shares in (False, True))
    row: dict[str, Any] = {"job": job, "unique_tokens": tree[0]}
    middle = lambda method, name: median([one[name] for one in found[method]])
    for name in ("tokens", "s", "mb"):
        row |= {f"{method}_{name}": middle(method, name) for method in METHODS}
    row["bound"] = flops(MODELS[size], *dense) / flops(MODELS[size], *tree)
    row["speedup"] = row["dense_s"] / row["tree_s"]
    row["of_bound"] = row["speedup"] / row["bound"]
    alone, shared = (found[method][0]["logprobs"] for method in ("dense", "tree"))
    row["difference"] = max(abs(one - other) for one, other in zip(alone, shared, strict=True))
    return row


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "tiny jobs and a tiny model, in half a minute", "trees")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        job, method = args.measure
        print(json.dumps(measure(job, method, args.quick)))
        return
    if args.against:
        quick = ["--quick"] if args.quick else []
        script = ["-c", CPU_CLOCK, "benchmarks/branching.py", *quick]
        commands = {job: [*script, "--measure", job, "tree"] for job in JOBS}
        beside(args.against, commands, 1 if args.quick else 3, args.json)
        return
    rows = Rows(args.json)
    for job in JOBS:
        rows.add(compare(job, args.quick))


if __name__ == "__main__":
    main()
