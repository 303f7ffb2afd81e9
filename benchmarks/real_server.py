"""The real vLLM beside the trainer on this machine: syncs, an update in flight, a run that learns.

    python benchmarks/real_server.py [--json PATH] [--quick] [--parts small,1.5B,...] [-- OPTIONS OF THE SERVER]

On a GPU the two share it, or each has one where there are two; the server computes in bf16. `--quick` runs on a CPU,
too, in fp32, with a smaller model and few steps. Parts:
  small             a random model, with two rows. `sync` is the seconds of a weight sync (median), of which `pause_s`
                    stops sampling, and the probe: the mean difference of the trainer's log-probs from the server's
                    under the new weights, nats, on four sampled completions. `copies` is it as a multiple of one
                    copy, on the device, of the bytes that travel, `start_s` the start of the server. `in flight` is
                    an update in the middle of completions: the versions of their tokens, and the same difference for
                    the tokens before it from the old weights, and for those after it from the new ones
  sleep             on a GPU: a server that sleeps while the trainer trains, of a model of 0.6B. `awake_gb` and
                    `asleep_gb` are what it takes of the GPU's memory; `sleep_s` is its way to bed, `wake_s` an update
                    that wakes it, and the probe is taken after that
  adapter           the same model with LoRA, whose adapter alone travels: `sync`, by vLLM's own kernels
  0.6B, 1.5B, 8B    on a GPU, random models of these shapes: `sync`
  learns            recipes/tiny.py; on a GPU recipes/smollm.py for 100 steps: held-out accuracy before and after, and
                    medians of the metrics that docs/metrics.md explains
"""

import copy
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from build_tiny import build as build_tiny
from build_tiny import build_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import (
    Rows,
    arguments,
    as_options,
    device_here,
    durations,
    lines,
    median,
    medians,
)
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
from weights.publish import adapter_weights, published_weights

SMALL = {"small": {"hidden": 1024, "layers": 6}, "quick": {"hidden": 256, "layers": 4}}
PROMPT = list(range(20, 40))
SAMPLING = {"n": 4, "max_tokens": 100, "ignore_eos": True, "temperature": 1.0}


@contextmanager
def served(model: Path, log: Path, *options: str) -> Iterator[tuple[str, float]]:
    """A server for short sequences: its address, and the seconds of its start."""
    is_cuda = device_here().type == "cuda"
    words = ["--max-model-len", "128", "--max-num-seqs", "1024" if is_cuda else "256", *options]
    env: dict[str, str] = {}
    if is_cuda:  # keys and values of a fixed size: what others take meanwhile does not matter
        words += ["--kv-cache-memory-bytes", "2G", "--gpu-memory-utilization", "0.02"]
        words += ["--dtype", "bfloat16"]
        env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        if torch.cuda.device_count() > 1:
            env["CUDA_VISIBLE_DEVICES"] = "1"
    started = time.perf_counter()
    with local_server(str(model), log, *words, env=env) as server:
        yield server.wait(), time.perf_counter() - started


def empty(size: str, device: torch.device) -> Any:
    """A model of one of the sizes, on the device, in the dtype that leaves room for the server: fp32, 8B in bf16."""
    shape = MODELS["Qwen3-0.6B"] if size == "0.6B" else SIZES[size]
    config = Qwen3Config(**shape, max_position_embeddings=4096, tie_word_embeddings=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if size == "8B" else torch.float32)
    try:
        with device:
            return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def build(folder: Path, size: str, device: torch.device) -> None:
    """A checkpoint of random weights, in bf16 but for the small models."""
    if size in SMALL:
        build_random(folder, **SMALL[size])
        return
    empty(size, device).to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    torch.cuda.empty_cache()


def free_gb() -> float:
    """Memory that is free on the GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] / 1e9 if torch.cuda.is_available() else 0.0


class Session(NamedTuple):
    """A trainer's policy and its server."""

    policy: Any
    rollouts: Rollouts
    device: torch.device
    start_s: float  # of the server
    server_gb: float  # that it takes of the GPU

    def probe(self) -> float:
        """The mean difference of the trainer's log-probs from the server's, nats."""
        replies = self.rollouts.pool.servers[0].generate(PROMPT, SAMPLING)
        of_replies = [differences(self.policy, reply, self.device) for reply in replies]
        return torch.cat(of_replies).mean().item()

    def sync(self, version: int) -> float:
        """Publish other weights; returns the seconds."""
        disturbed(self.policy, self.device, version)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        self.rollouts.publish(self.policy, version)
        return time.perf_counter() - started


@contextmanager
def session(model: Path, policy: Any, *options: str, **fields: Any) -> Iterator[Session]:
    """A server of a checkpoint, and a policy that was published to it; the checkpoint's where None is given."""
    before_gb = free_gb()
    server = served(model, Path(f"{model}.log"), *options)
    with server as (url, start_s), process_group(120) as device:
        server_gb = before_gb - free_gb()
        config = TrainConfig(
            model_id=str(model), vllm_urls=[url], dataset_id=train_problems, reward_funcs=[exact_match],
            no_apply_chat_template=True, max_completion_len=100, output_dir=f"{model}-run", reward_workers=1,
            **fields,
        )  # fmt: skip
        with closing(Rollouts(config, device)) as rollouts:
            if policy is None:
                policy = build_policy(config, device)
            attach(policy)
            rollouts.publish(policy, 0)
            yield Session(policy, rollouts, device, start_s, server_gb)


@torch.no_grad()
def disturbed(policy: Any, device: torch.device, seed: int) -> Any:
    """The policy, every weight of which that trains is moved by noise."""
    generator = torch.Generator(device).manual_seed(seed)
    for weight in policy.parameters():
        if not weight.requires_grad:  # the base of an adapter
            continue
        weight.add_(
            0.02 * torch.randn(weight.shape, generator=generator, device=device, dtype=weight.dtype)
        )
    return policy


@torch.no_grad()
def differences(policy: Any, completion: Any, device: torch.device) -> torch.Tensor:
    """|trainer - server| of every token, nats."""
    (row,) = pack([(PROMPT, [completion.token_ids])], share_prefix=False)
    return (completion_logprobs(policy, row.to(device)).cpu() - completion.sampler_logprobs).abs()


def syncs(of: Session, repeats: int) -> dict[str, Any]:
    """Some syncs of other weights each, and the probe."""
    published = adapter_weights if of.rollouts.pool.sends_adapter else published_weights
    weights = [tensor for _, tensor in published(of.policy)]
    num_bytes = sum(tensor.nbytes for tensor in weights)

    def copy_all() -> None:
        for tensor in weights:
            tensor.clone()

    copy_s = median(durations(copy_all, of.device, 0.1))
    times, pauses = [], []
    server = of.rollouts.pool.servers[0]
    for version in range(1, repeats + 1):
        times.append(of.sync(version))
        pauses.append(server.paused_s)
    replies = server.generate(PROMPT, SAMPLING)
    versions = torch.cat([reply.weight_versions for reply in replies]).unique().tolist()
    found = {"sent_mb": num_bytes / 1e6, "sync_s": median(times), "pause_s": median(pauses)}
    found["copies"] = found["sync_s"] / copy_s
    return found | {"probe": of.probe(), "versions": versions, "start_s": of.start_s}


def in_flight(of: Session, first: int) -> dict[str, Any]:
    """Updates until one hits completions on the way."""
    old, new = of.policy, disturbed(copy.deepcopy(of.policy), of.device, first)
    server, publish = of.rollouts.pool.servers[0], of.rollouts.publish
    publish(old, first)
    for version in range(first + 1, first + 20):
        with ThreadPoolExecutor(1) as pool:
            replies = pool.submit(server.generate, PROMPT, SAMPLING)
            time.sleep(0.04 * (version - first))  # each time a little later
            publish(new, version)
        for reply in replies.result():
            spans = version_spans(reply.weight_versions)
            if len(spans) == 2:
                before, after = spans
                of_old, of_new = (differences(policy, reply, of.device) for policy in (old, new))
                return {
                    "attempts": version - first,
                    "weight_versions": [list(before), list(after)],
                    "before_update": of_old[: before[2]].mean().item(),
                    "after_update": of_new[after[1] :].mean().item(),
                    "old_weights_after_update": of_old[after[1] :].mean().item(),
                }
        old, new = new, disturbed(old, of.device, version)
    raise RuntimeError("no update came in the middle of a completion")


def on_small_model(rows: Rows, folder: Path, size: str, *options: str) -> None:
    """A sync, and an update in flight, on one server."""
    build(folder / size, size, device_here())
    with session(folder / size, None, *options) as of:
        repeats = 2 if size == "quick" else 7
        rows.measure({"part": "sync", "model": "small"}, partial(syncs, of, repeats))
        rows.measure({"part": "in flight"}, partial(in_flight, of, repeats + 1))


def on_large_model(size: str, folder: Path, *options: str) -> dict[str, Any]:
    """Syncs of a random model of the shape of `size`, of which the server knows the shape alone."""
    policy = empty(size, device_here())
    policy.config.architectures = [type(policy).__name__]
    policy.config.save_pretrained(folder / size)
    build_tokenizer().save_pretrained(folder / size)
    with session(folder / size, policy, "--load-format", "dummy", *options) as of:
        return syncs(of, 5)


def sends_adapter(size: str, folder: Path, *options: str) -> dict[str, Any]:
    """Syncs of an adapter alone, which vLLM applies by its own kernels."""
    model = folder / f"{size}-adapter"
    build(model, size, device_here())
    fields: dict[str, Any] = {"use_peft": True, "lora_rank": 16}
    if size not in SMALL:
        fields["dtype"] = "bfloat16"
    with session(model, None, *lora_options(16), *options, **fields) as of:
        return syncs(of, 5)


def sleeps(size: str, folder: Path, *options: str) -> dict[str, Any]:
    """A server that falls asleep and is woken by updates, five times."""
    model = folder / f"{size}-sleeper"
    build(model, size, device_here())
    times: dict[str, list[float]] = {"sleep_s": [], "wake_s": []}
    with session(model, None, "--enable-sleep-mode", *options, max_staleness=0) as of:
        first = of.probe()
        for version in range(1, 6):
            before_gb = free_gb()
            started = time.perf_counter()
            of.rollouts.pool.fall_asleep()
            times["sleep_s"].append(time.perf_counter() - started)
            freed_gb = free_gb() - before_gb
            times["wake_s"].append(of.sync(version))
        found = {"awake_gb": of.server_gb, "asleep_gb": of.server_gb - freed_gb}
        return (
            found
            | {name: median(values) for name, values in times.items()}
            | {"probe_before": first, "probe": of.probe()}
        )


def learns(is_quick: bool, folder: Path, *options: str) -> dict[str, Any]:
    """A recipe by train.py, in a process of its own."""
    if is_quick:
        build_tiny(folder / "tiny", seed=0)
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
    length = () if is_quick else ("--max-model-len", "512")
    with served(model, folder / "learns.log", *length, *options) as (url, _):
        fields |= {"model_id": model, "output_dir": folder / "learns", "vllm_urls": url}
        command = [sys.executable, "train.py", f"recipes/{recipe}", *as_options(fields)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT,
            preexec_fn=partial(die_with, os.getpid()),
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(" ".join((done.stdout + done.stderr).split())[-250:])
    metrics = lines(folder / "learns" / "metrics.jsonl")
    accuracy = [row["eval/accuracy"] for row in metrics if "eval/accuracy" in row]
    trained = [row for row in metrics if row["step"] > 0]
    times = medians(trained, ("time/", "idle/", "tokens_per_s/"))
    return {"recipe": recipe, "steps": len(trained), "eval/accuracy": accuracy} | times


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "a small model and few steps, on a CPU, too")
    which = "which of small,sleep,adapter,0.6B,1.5B,8B,learns; with --quick small,adapter,learns"
    parser.add_argument("--parts", help=which)
    parser.add_argument("--keep", type=Path, help="a folder for models, logs and runs, which stays")
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="of the server")
    args = parser.parse_args()
    rows = Rows(args.json)
    reason = "" if importlib.util.find_spec("vllm") else "vLLM is not installed"
    if device_here().type == "cpu" and not args.quick:
        reason = "no CUDA device (the suite has the same on a CPU)"
    if reason:
        rows.add({"skipped": reason})
        return
    usual = "small,adapter,learns" if args.quick else "small,sleep,adapter,0.6B,1.5B,8B,learns"
    small, large = ("quick", "quick") if args.quick else ("small", "0.6B")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        for part in (args.parts or usual).split(","):
            names, measured = {"part": part, "model": large}, partial(sleeps, large)
            if part == "small":
                on_small_model(rows, folder, small, *args.options)
                continue
            if part == "adapter":
                measured = partial(sends_adapter, large)
            elif part == "learns":
                names, measured = {"part": part}, partial(learns, args.quick)
            elif part != "sleep":
                names, measured = {"part": "sync", "model": part}, partial(on_large_model, part)
            rows.measure(names, partial(measured, folder, *args.options))


if __name__ == "__main__":
    main()
