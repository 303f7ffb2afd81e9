"""The real vLLM beside the trainer on this machine: syncs, an update in flight, a run that learns.

    python benchmarks/real_server.py [--json PATH] [--quick] [--parts small,1.5B,...] [-- OPTIONS OF THE SERVER]

On a GPU the two share it, or each has one where there are two; the server computes in bf16. `--quick` runs on a CPU,
too, in fp32, with a smaller model and few steps. Parts:
  small             a random model, with two rows. `sync` is the seconds of a weight sync (median), of which `pause_s`
                    stops sampling, and the probe: the mean difference of the trainer's log-probs from the server's
                    under the new weights, nats, on four sampled completions. `in flight` is an update in the middle of completions: the versions of their
                    tokens, and the same difference for the tokens before it from the old weights, and for those after
                    it from the new ones
  sleep             on a GPU: a server that sleeps while the trainer trains, of a model of 0.6B. `awake_gb` and
                    `asleep_gb` are what it takes of the GPU's memory; `sleep_s` is its way to bed, `wake_s` an update
                    that wakes it, and the probe is taken after that
  adapter           on a GPU: the same model with LoRA, whose adapter alone travels: `sync`, by vLLM's own kernels
  0.6B, 1.5B, 8B    on a GPU, random models of these shapes: `sync`. `copies` is it as a multiple of one copy, on the
                    device, of the bytes that travel
  learns            recipes/tiny.py; on a GPU recipes/smollm.py for 100 steps: held-out accuracy before and after, and
                    medians of the metrics that docs/metrics.md explains
"""

import argparse
import copy
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
from build_tiny import build, build_tokenizer
from launch import LocalServer
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import Rows, device_here, durations, median
from benchmarks.local_server import local_server
from benchmarks.prefix_attention import SIZES
from benchmarks.step_time import build_random, train_problems
from benchmarks.steps import MODELS
from config import TrainConfig, lora_options
from prefix_attention import attach, completion_logprobs, pack
from recipes.rewards import exact_match
from rollouts.group import version_spans
from rollouts.rollouts import Rollouts
from training.model import build_policy
from utils import die_with, process_group
from weights.publish import published_weights

PROMPT = list(range(20, 40))
SAMPLING = {"n": 4, "max_tokens": 100, "ignore_eos": True, "temperature": 1.0}


@contextmanager
def served(model: Path, log: Path, *options: str) -> Iterator[tuple[str, float]]:
    """A server for short sequences: its address, and the seconds of its start."""
    words = [
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "1024" if device_here().type == "cuda" else "256",
        *options,
    ]
    env: dict[str, str] = {}
    # Keys and values of a fixed size: what others take meanwhile does not matter.
    if device_here().type == "cuda":
        words += [
            "--gpu-memory-utilization",
            "0.02",
            "--kv-cache-memory-bytes",
            str(2 << 30),
            "--dtype",
            "bfloat16",
        ]
        env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        if torch.cuda.device_count() > 1:
            env["CUDA_VISIBLE_DEVICES"] = "1"
    started = time.perf_counter()
    with local_server(str(model), log, *words, env=env) as server:
        assert isinstance(server, LocalServer)
        yield server.wait(), time.perf_counter() - started


def empty(size: str, device: torch.device) -> Any:
    """A model of one of the sizes, on the device, in the dtype that leaves room for the server: fp32, 8B in bf16."""
    shape = MODELS["Qwen3-0.6B"] if size == "0.6B" else SIZES[size]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if size == "8B" else torch.float32)
    try:
        with device:
            return Qwen3ForCausalLM(
                Qwen3Config(**shape, max_position_embeddings=4096, tie_word_embeddings=True)
            )
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def disturbed(policy: Any, device: torch.device, seed: int) -> Any:
    """The policy, every weight of which is moved by noise."""
    generator = torch.Generator(device).manual_seed(seed)
    for weight in policy.parameters():
        weight.add_(
            0.02 * torch.randn(weight.shape, generator=generator, device=device, dtype=weight.dtype)
        )
    return policy


@torch.no_grad()
def differences(policy: Any, completion: Any, device: torch.device) -> torch.Tensor:
    """|trainer - server| of every token, nats."""
    (row,) = pack([(PROMPT, [completion.token_ids])], share_prefix=False)
    return (completion_logprobs(policy, row.to(device)).cpu() - completion.sampler_logprobs).abs()


def syncs(rollouts: Rollouts, policy: Any, device: torch.device, repeats: int) -> dict[str, Any]:
    """Some syncs of other weights each, and the probe."""
    times: list[float] = []
    pauses: list[float] = []
    weights = [tensor for _, tensor in published_weights(policy)]
    num_bytes = sum(tensor.nbytes for tensor in weights)

    def copy_all() -> None:
        for tensor in weights:
            tensor.clone()

    copy_s = median(durations(copy_all, device, 0.1))
    rollouts.publish(policy, 0)
    for version in range(1, repeats + 1):
        disturbed(policy, device, version)
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        rollouts.publish(policy, version)
        times.append(time.perf_counter() - started)
        pauses.append(rollouts.pool.servers[0].paused_s)
    difference = probe(rollouts, policy, device)
    replies = rollouts.pool.servers[0].generate(PROMPT, SAMPLING)
    versions = torch.cat([reply.weight_versions for reply in replies]).unique().tolist()
    found = {"sent_mb": num_bytes / 1e6, "sync_s": median(times), "pause_s": median(pauses)}
    found["copies"] = found["sync_s"] / copy_s
    return found | {"probe": difference, "versions": versions}


def in_flight(rollouts: Rollouts, policy: Any, device: torch.device, first: int) -> dict[str, Any]:
    """Updates until one hits completions on the way."""
    old, new = policy, disturbed(copy.deepcopy(policy), device, first)
    rollouts.publish(old, first)
    for version in range(first + 1, first + 20):
        with ThreadPoolExecutor(1) as pool:
            replies = pool.submit(rollouts.pool.servers[0].generate, PROMPT, SAMPLING)
            time.sleep(0.04 * (version - first))  # each time a little later
            rollouts.publish(new, version)
            found = [
                reply
                for reply in replies.result()
                if len(version_spans(reply.weight_versions)) == 2
            ]
        if found:
            before, after = version_spans(found[0].weight_versions)
            return {
                "attempts": version - first,
                "weight_versions": [list(before), list(after)],
                "before_update": differences(old, found[0], device)[: before[2]].mean().item(),
                "after_update": differences(new, found[0], device)[after[1] :].mean().item(),
                "old_weights_after_update": differences(old, found[0], device)[after[1] :]
                .mean()
                .item(),
            }
        old, new = new, disturbed(old, device, version)
    raise RuntimeError("no update came in the middle of a completion")


def connected(model: Path, folder: Path, url: str, device: torch.device, **fields: Any) -> Rollouts:
    """What publishes to the server."""
    config = TrainConfig(
        model_id=str(model), vllm_urls=[url], dataset_id=train_problems, reward_funcs=[exact_match],
        no_apply_chat_template=True, max_completion_len=100, output_dir=str(folder / "run"), reward_workers=1,
        **fields,
    )  # fmt: skip
    return Rollouts(config, device)


def on_small_model(rows: Rows, folder: Path, is_quick: bool, *options: str) -> dict[str, Any]:
    """A sync, and an update in flight, on one server; returns the seconds of its start."""
    size = {"hidden": 256, "layers": 4} if is_quick else {"hidden": 1024, "layers": 6}
    build_random(folder / "small", **size)
    with (
        served(folder / "small", folder / "small.log", *options) as (url, start_s),
        process_group(120) as device,
    ):
        rollouts = connected(folder / "small", folder, url, device)
        policy = attach(build_policy(rollouts.config, device))
        repeats = 2 if is_quick else 7
        rows.measure(
            {"part": "sync", "model": "small"}, partial(syncs, rollouts, policy, device, repeats)
        )
        rows.measure(
            {"part": "in flight"}, partial(in_flight, rollouts, policy, device, repeats + 1)
        )
        rollouts.close()
    return {"seconds": start_s}


def on_large_model(size: str, folder: Path, *options: str) -> dict[str, Any]:
    """Syncs of a random model of the shape of `size`."""
    with process_group(120) as device:
        policy = empty(size, device)
        policy.config.architectures = [type(policy).__name__]
        policy.config.save_pretrained(folder / size)
        build_tokenizer().save_pretrained(folder / size)
        with served(folder / size, folder / f"{size}.log", "--load-format", "dummy", *options) as (
            url,
            start_s,
        ):
            rollouts = connected(folder / size, folder, url, device)
            found = syncs(rollouts, attach(policy), device, 5)
            rollouts.close()
    return found | {"start_s": start_s}


def save_random(size: str, folder: Path, device: torch.device) -> Path:
    """A checkpoint of random weights of the shape of `size`, in bf16."""
    policy = empty(size, device).to(torch.bfloat16)
    policy.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def probe(rollouts: Rollouts, policy: Any, device: torch.device) -> float:
    """The mean difference of the trainer's log-probs from the server's, nats."""
    replies = rollouts.pool.servers[0].generate(PROMPT, SAMPLING)
    return torch.cat([differences(policy, reply, device) for reply in replies]).mean().item()


def sleeps(folder: Path, *options: str) -> dict[str, Any]:
    """A server that falls asleep and is woken by updates, five times."""
    times: dict[str, list[float]] = {"sleep_s": [], "wake_s": []}
    with process_group(120) as device:
        before_gb = torch.cuda.mem_get_info()[0] / 1e9
        model = save_random("0.6B", folder / "sleeper", device)
        torch.cuda.empty_cache()
        words = ["--enable-sleep-mode", *options]
        with served(model, folder / "sleeper.log", *words) as (url, _):
            awake_gb = before_gb - torch.cuda.mem_get_info()[0] / 1e9
            rollouts = connected(model, folder, url, device, max_staleness=0)
            policy = attach(build_policy(rollouts.config, device))
            rollouts.publish(policy, 0)
            first = probe(rollouts, policy, device)
            for version in range(1, 6):
                free_gb = torch.cuda.mem_get_info()[0] / 1e9
                started = time.perf_counter()
                rollouts.pool.fall_asleep()
                times["sleep_s"].append(time.perf_counter() - started)
                freed_gb = torch.cuda.mem_get_info()[0] / 1e9 - free_gb
                disturbed(policy, device, version)
                torch.cuda.synchronize()
                started = time.perf_counter()
                rollouts.publish(policy, version)
                times["wake_s"].append(time.perf_counter() - started)
            last = probe(rollouts, policy, device)
            rollouts.close()
    found = {"awake_gb": awake_gb, "asleep_gb": awake_gb - freed_gb}
    found |= {name: median(values) for name, values in times.items()}
    return found | {"probe_before": first, "probe": last}


def sends_adapter(folder: Path, *options: str) -> dict[str, Any]:
    """Syncs of an adapter alone, which vLLM applies by its own kernels."""
    with process_group(120) as device:
        model = save_random("0.6B", folder / "adapter", device)
        torch.cuda.empty_cache()
        with served(model, folder / "adapter.log", *lora_options(16), *options) as (url, _):
            fields: dict[str, Any] = {"use_peft": True, "lora_rank": 16, "dtype": "bfloat16"}
            rollouts = connected(model, folder, url, device, **fields)
            policy = attach(build_policy(rollouts.config, device))
            times = []
            for version in range(6):
                for name, weight in policy.named_parameters():
                    if "lora_B" in name:  # which begins as zeroes
                        torch.manual_seed(version)
                        weight.data.normal_(std=0.02)
                torch.cuda.synchronize()
                started = time.perf_counter()
                rollouts.publish(policy, version)
                times.append(time.perf_counter() - started)
            found = {"sync_s": median(times[1:]), "probe": probe(rollouts, policy, device)}
            rollouts.close()
    return found


def learns(folder: Path, is_quick: bool, *options: str) -> dict[str, Any]:
    """A recipe by train.py, in a process of its own."""
    if is_quick:
        build(folder / "tiny", seed=0)
        recipe, model = "tiny.py", folder / "tiny" / "model"
        fields: dict[str, Any] = {
            "dataset_id": folder / "tiny" / "train.jsonl",
            "eval_dataset_id": folder / "tiny" / "heldout.jsonl",
        }
        fields |= {"max_steps": 3}
    else:
        found = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "get_smollm.py"), "--output", str(folder / "smollm")],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        recipe, model, fields = (
            "smollm.py",
            Path(found.stdout.split()[-1]),
            {"max_steps": 100, "eval_steps": 25},
        )
    with served(
        model, folder / "learns.log", *(() if is_quick else ("--max-model-len", "512")), *options
    ) as (url, _):
        fields |= {"model_id": model, "output_dir": folder / "learns", "vllm_urls": url}
        command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "recipes" / recipe)]
        command += [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=partial(die_with, os.getpid()),
            cwd=ROOT,
        )
        if done.returncode:
            raise RuntimeError(" ".join((done.stdout + done.stderr).split())[-250:])
    metrics = (folder / "learns" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    accuracy = [row["eval/accuracy"] for row in lines if "eval/accuracy" in row]
    trained = [row for row in lines if row["step"] > 0]
    names = [
        name
        for name in trained[0]
        if name.startswith(("time/", "idle/", "tokens_per_s/")) and "eval" not in name
    ]
    medians = {name: median([row[name] for row in trained]) for name in names}
    return {"recipe": recipe, "steps": len(trained), "eval/accuracy": accuracy} | medians


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here, one by one")
    parser.add_argument(
        "--quick", action="store_true", help="a small model and few steps, on a CPU, too"
    )
    parser.add_argument(
        "--parts",
        help="which of small,sleep,adapter,0.6B,1.5B,8B,learns; with --quick small,learns",
    )
    parser.add_argument(
        "--keep", type=Path, help="a folder for models, logs and the run, which is kept"
    )
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="of the server")
    args = parser.parse_args()
    rows = Rows(args.json)
    reason = "" if importlib.util.find_spec("vllm") else "vLLM is not installed"
    if device_here().type == "cpu" and not args.quick:
        reason = "no CUDA device (the suite has the same on a CPU)"
    if reason:
        rows.add({"skipped": reason})
        return
    usual = "small,learns" if args.quick else "small,sleep,adapter,0.6B,1.5B,8B,learns"
    on_gpu = {"sleep": sleeps, "adapter": sends_adapter}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        for part in (args.parts or usual).split(","):
            if part == "small":
                of_small = partial(on_small_model, rows, folder, args.quick, *args.options)
                rows.measure({"part": "start", "model": part}, of_small)
            elif part in on_gpu:
                rows.measure(
                    {"part": part, "model": "0.6B"}, partial(on_gpu[part], folder, *args.options)
                )
            elif part == "learns":
                rows.measure({"part": part}, partial(learns, folder, args.quick, *args.options))
            else:
                rows.measure(
                    {"part": "sync", "model": part},
                    partial(on_large_model, part, folder, *args.options),
                )


if __name__ == "__main__":
    main()
