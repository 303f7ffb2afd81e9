"""The real vLLM beside the trainer on this machine: syncs, an update in flight, a run that learns.

    python benchmarks/real_server.py [--json PATH] [--quick]

On a GPU the two share it, or each has one where there are two; the server computes in bf16, with CUDA graphs. `--quick`
runs on a CPU, too, in fp32, with a smaller model and few steps.
  sync       seconds of a weight sync of a random model (median), and the probe: the mean difference of the trainer's
             log-probs from the server's under the new weights, nats, on four sampled completions
  in flight  an update in the middle of completions: the versions of their tokens, and the same difference for the
             tokens before it from the old weights, and for those after it from the new ones
  start      seconds until the server answers
  learns     recipes/tiny.py: held-out accuracy before and after, seconds of a step and of its sync
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from build_tiny import build
from launch import LocalServer

from benchmarks.common import Rows, device_here, median
from benchmarks.local_server import local_server
from benchmarks.step_time import build_random, train_problems
from config import TrainConfig
from prefix_attention import completion_logprobs, pack
from recipes.rewards import exact_match
from rollouts.stream import Rollouts
from training.model import build_policy, published_weights
from utils import die_with, process_group

PROMPT = list(range(20, 40))
SAMPLING = {"n": 4, "max_tokens": 100, "ignore_eos": True, "temperature": 1.0}


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """The address of a server for short sequences, which leaves room on a GPU for the trainer."""
    options = ["--max-model-len", "128", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.3"]
    env: dict[str, str] = {}
    if device_here().type == "cuda":
        options += ["--dtype", "bfloat16", "--no-enforce-eager"]
        env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        if torch.cuda.device_count() > 1:
            env["CUDA_VISIBLE_DEVICES"] = "1"
    with local_server(str(model), log, *options, env=env) as server:
        assert isinstance(server, LocalServer)
        yield server.wait()


@torch.no_grad()
def disturbed(config: TrainConfig, device: torch.device, seed: int) -> Any:
    """The policy with every weight moved by noise."""
    policy = build_policy(config, device)
    generator = torch.Generator(device).manual_seed(seed)
    for weight in policy.parameters():
        weight.add_(0.02 * torch.randn(weight.shape, generator=generator, device=device))
    return policy


@torch.no_grad()
def differences(policy: Any, completion: Any, device: torch.device) -> torch.Tensor:
    """|trainer - server| of every token, nats."""
    (row,) = pack([(PROMPT, [completion.token_ids])], share_prefix=False)
    return (completion_logprobs(policy, row.to(device)).cpu() - completion.sampler_logprobs).abs()


def syncs(rollouts: Rollouts, config: TrainConfig, device: torch.device, repeats: int) -> dict[str, Any]:
    """Some syncs, the last one of other weights, and the probe."""
    policy, times = build_policy(config, device), []
    num_bytes = sum(tensor.nbytes for _, tensor in published_weights(policy))
    rollouts.publish(policy, 0)
    for version in range(1, repeats + 1):
        policy = disturbed(config, device, version)
        started = time.perf_counter()
        rollouts.publish(policy, version)
        times.append(time.perf_counter() - started)
    replies = rollouts.client.servers[0].generate(PROMPT, SAMPLING)
    probe = torch.cat([differences(policy, reply, device) for reply in replies]).mean().item()
    versions = sorted({span.version for reply in replies for span in reply.weight_versions})
    return {"model_mb": num_bytes / 1e6, "sync_s": median(times), "probe": probe, "versions": versions}


def in_flight(rollouts: Rollouts, config: TrainConfig, device: torch.device, first: int) -> dict[str, Any]:
    """Updates until one hits completions on the way."""
    old = disturbed(config, device, first)
    rollouts.publish(old, first)
    for version in range(first + 1, first + 20):
        new = disturbed(config, device, version)
        with ThreadPoolExecutor(1) as pool:
            replies = pool.submit(rollouts.client.servers[0].generate, PROMPT, SAMPLING)
            rollouts.publish(new, version)
            found = [reply for reply in replies.result() if len(reply.weight_versions) == 2]
        if found:
            before, after = found[0].weight_versions
            return {
                "attempts": version - first,
                "weight_versions": [list(before), list(after)],
                "before_update": differences(old, found[0], device)[: before.end].mean().item(),
                "after_update": differences(new, found[0], device)[after.start :].mean().item(),
                "old_weights_after_update": differences(old, found[0], device)[after.start :].mean().item(),
            }
        old = new
    raise RuntimeError("no update came in the middle of a completion")


def on_random_model(rows: Rows, folder: Path, is_quick: bool) -> dict[str, Any]:
    """The first two parts, on one server; returns the seconds of its start."""
    size = {"hidden": 256, "layers": 4} if is_quick else {"hidden": 1024, "layers": 6}
    build_random(folder / "random", **size)
    started = time.perf_counter()
    with served(folder / "random", folder / "server.log") as url:
        start_s = time.perf_counter() - started
        config = TrainConfig(
            model_id=str(folder / "random"), vllm_urls=[url], dataset_id=train_problems, reward_funcs=[exact_match],
            no_apply_chat_template=True, max_completion_len=100, output_dir=str(folder / "run"), reward_workers=1,
        )  # fmt: skip
        with process_group(120) as device:
            rollouts = Rollouts(config, device)
            repeats = 2 if is_quick else 7
            rows.measure({"part": "sync"}, partial(syncs, rollouts, config, device, repeats))
            rows.measure({"part": "in flight"}, partial(in_flight, rollouts, config, device, repeats + 1))
            rollouts.close()
    return {"seconds": start_s}


def learns(folder: Path, steps: int) -> dict[str, Any]:
    """The tiny recipe by train.py, in a process of its own."""
    build(folder / "tiny", seed=0)
    with served(folder / "tiny" / "model", folder / "tiny.log") as url:
        fields = {
            "model_id": folder / "tiny" / "model", "dataset_id": folder / "tiny" / "train.jsonl",
            "eval_dataset_id": folder / "tiny" / "heldout.jsonl", "output_dir": folder / "learns", "vllm_urls": url,
            "max_steps": steps,
        }  # fmt: skip
        command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "recipes" / "tiny.py")]
        command += [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, preexec_fn=partial(die_with, os.getpid())
        )
        if done.returncode:
            raise RuntimeError(" ".join((done.stdout + done.stderr).split())[-250:])
    lines = [json.loads(line) for line in (folder / "learns" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["eval/accuracy"] for row in lines if "eval/accuracy" in row]
    trained = [row for row in lines if row["step"] > 0]
    times = {name: median([row[f"time/{name}"] for row in trained]) for name in ("step_s", "sync_s", "train_s")}
    return {"steps": steps, "accuracy_before": accuracy[0], "accuracy_after": accuracy[-1]} | times


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here, one by one")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps, on a CPU, too")
    args = parser.parse_args()
    rows = Rows(args.json)
    reason = "" if importlib.util.find_spec("vllm") else "vLLM is not installed"
    if device_here().type == "cpu" and not args.quick:
        reason = "no CUDA device (the suite has the same on a CPU)"
    if reason:
        rows.add({"skipped": reason})
        return
    with tempfile.TemporaryDirectory() as folder:
        rows.measure({"part": "start"}, partial(on_random_model, rows, Path(folder), args.quick))
        rows.measure({"part": "learns"}, partial(learns, Path(folder), 3 if args.quick else 100))


if __name__ == "__main__":
    main()
