"""train.py in its modes against a stand-in for the server, compared with fp32 on the CPU; and where a step's time goes.

    python benchmarks/train_modes.py [--json PATH] [--quick]

Every run has the same random model, data, seeds and answers, so that only the arithmetic differs from the reference,
which runs in fp32 on the CPU (with LoRA for the modes with LoRA, with 8-bit moments for that with them).
`*_difference` are the largest of all steps: of the loss and the entropy (nats), and of the gradient's norm relative to
the reference's. `mismatch` is the mean difference of the trainer's log-probs from the stand-in's, which computes in
fp32 what it received (nats). Modes of several ranks are in ranks.py.

The last row is a step of `steps.py`'s model on shared prompts under torch.profiler: the shares of the kernels of
attention, of what merges their outputs, of the head, and of the rest, in percent of the time that the device (on a CPU
the thread) was busy.
"""

import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from build_tiny import build_model, build_tokenizer
from launch import free_port
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Rows, Skipped, arguments, as_options, device_here, lines
from benchmarks.local_server import stand_in
from benchmarks.steps import MODELS, make_config, make_policy, micro_batch
from prefix_attention import pack
from train import train_batch
from training.batching import Update
from training.optimizer import build_optimizer
from utils import die_with, process_group

RECIPE = """
import random
from config import TrainConfig
def rows():
    rng = random.Random(0)
    return [{{"prompt": "".join(rng.choices("0123456789", k=48)) + "="}} for _ in range(64)]
def mean_id(completion_ids, **_):
    return [sum(ids) / len(ids) / 50 for ids in completion_ids]
config = TrainConfig(
    model_id={model!r}, vllm_urls=[{url!r}], dataset_id=rows, reward_funcs=[mean_id], max_completion_len=16,
    batch_size=8, num_generations=8, num_iterations=2, max_steps={steps}, learning_rate=1e-3, max_staleness=0,
    reward_workers=1, no_apply_chat_template=True, max_tokens_per_gpu=1024, server_timeout=60,
)
"""
LORA = {"use_peft": True, "lora_rank": 8}
FSDP_FP32 = {"use_fsdp": True, "fsdp_bf16": False, "bf16": False}
FSDP_BF16 = {"use_fsdp": True, "fsdp_bf16": True, "bf16": False}
# ranks and fields, of which bf16 is always given, as its default depends on the device
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (1, {"bf16": False}),
    "bf16": (1, {"bf16": True}),
    "FSDP2 fp32": (1, FSDP_FP32),
    "FSDP2 fsdp_bf16": (1, FSDP_BF16),
    "LoRA bf16": (1, {**LORA, "bf16": True}),
    "LoRA fsdp_bf16": (1, {**LORA, **FSDP_BF16}),
    "bf16, 8-bit moments": (1, {"bf16": True, "adam_8bit": True}),
}
KEPT_BY_REFERENCES = ("use_peft", "lora_rank", "adam_8bit", "num_minibatches", "beta")  # fields
QUICK = ("bf16", "FSDP2 fp32")


def answer(prompt_ids: list[int], number: int) -> tuple[list[int], float]:
    """4 to 16 tokens that depend on nothing but prompt and number, at once."""
    rng = random.Random(1000 * sum(prompt_ids) + number)
    return [rng.randrange(5, 90) for _ in range(rng.randrange(4, 17))], 0.0


def build_random(folder: Path) -> str:
    """A random model whose distributions are far from uniform."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    network = build_model(tokenizer)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def shares_one_gpu(num_ranks: int) -> bool:
    """True where the ranks are more than the GPUs, which are not none.

    Raises:
        Skipped: nccl does not take them so.
    """
    if not 0 < torch.cuda.device_count() < num_ranks:
        return False
    if "NCCL_LIBRARY" not in os.environ:
        raise Skipped(
            f"needs {num_ranks} GPUs, or NCCL_LIBRARY=, the libnccl.so.2 of 2.30 or later"
        )
    return True


def sharing_one_gpu() -> dict[str, str]:
    """Variables for processes that are several ranks of one GPU."""
    library = str(Path(os.environ["NCCL_LIBRARY"]).resolve(strict=True))
    return {"LD_PRELOAD": library, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def command_of(
    recipe: Path, fields: dict[str, Any], num_ranks: int
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a run of train.py; on the CPU without ranks."""
    command = [sys.executable]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run"]
        command += [f"--nproc_per_node={num_ranks}", f"--master_port={free_port()}"]
    if num_ranks == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif shares_one_gpu(num_ranks):
        command.append(str(ROOT / "benchmarks" / "on_one_gpu.py"))
        env |= sharing_one_gpu()
    return [*command, str(ROOT / "train.py"), str(recipe), *as_options(fields)], env


def train(folder: Path, model: str, steps: int, num_ranks: int, **fields: Any) -> list[Any]:
    """The metrics of each step of a run of train.py against a stand-in of its own; on the CPU without ranks.

    Raises:
        RuntimeError: the run failed; the message is the end of what it printed.
    """
    with stand_in(model, answer) as (url, _), tempfile.TemporaryDirectory(dir=folder) as own:
        recipe = Path(own) / "recipe_of_train_modes.py"
        recipe.write_text(RECIPE.format(model=model, url=url, steps=steps))
        output = Path(own) / "output"
        command, env = command_of(recipe, {**fields, "output_dir": output}, num_ranks)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=180, env=env, check=False,
            preexec_fn=partial(die_with, os.getpid()),
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(" ".join((done.stdout + done.stderr).split())[-250:])
        return [row for row in lines(output / "metrics.jsonl") if "loss" in row]


class References:
    """Runs in fp32 on the CPU, each kind of them once, however many ask."""

    def __init__(self, folder: Path, model: str, steps: int):
        self.folder, self.model, self.steps = folder, model, steps
        self.pool, self.lock = ThreadPoolExecutor(3), threading.Lock()
        self.runs: dict[Any, Future[list[Any]]] = {}

    def compared(self, num_ranks: int, fields: dict[str, Any]) -> dict[str, Any]:
        """A mode's differences from its reference."""
        if "adam_8bit" in fields and not importlib.util.find_spec("torchao"):
            raise Skipped("torchao is not installed")
        run = partial(train, self.folder, self.model, self.steps)
        kept = {name: fields[name] for name in KEPT_BY_REFERENCES if name in fields}
        kind = tuple(kept.items())
        with self.lock:
            if kind not in self.runs:
                self.runs[kind] = self.pool.submit(run, 0, **{**kept, "bf16": False})
        return compared(run(num_ranks, **fields), self.runs[kind].result())


def compared(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest differences of a run from the reference, and its seconds of training a step after the first."""
    pairs = list(zip(rows, reference, strict=True))
    norms = [(row["grad_norm"], other["grad_norm"]) for row, other in pairs]
    return {
        "steps": len(rows),
        "last_loss": rows[-1]["loss"],
        "loss_difference": max(abs(row["loss"] - other["loss"]) for row, other in pairs),
        "grad_norm_difference": max(abs(a - b) / b for a, b in norms),
        "entropy_difference": max(abs(row["entropy"] - other["entropy"]) for row, other in pairs),
        "mismatch": max(row["sampling/sampling_logp_difference/mean"] for row in rows),
        "train_s": min(row["time/train_s"] for row in rows),
        "sync_s": min(row["time/sync_s"] for row in rows),
    }


def kind_of(event: Any) -> str:
    """What an operation belongs to, by its name and those of the operations that called it."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    if any(name.startswith("_Cascade") for name in names):
        return "attention" if any("flash_attention" in name for name in names) else "merge"
    return "head" if any(name.startswith(("_Stats", "_Product32")) for name in names) else "rest"


def shares(is_quick: bool) -> dict[str, Any]:
    """The profile of one step: two groups of 8 completions of 512 tokens on 4096."""
    model, prompt, completion = ("quick", 128, 32) if is_quick else ("Qwen3-0.6B", 4096, 512)
    with process_group(600) as device:
        config = make_config(is_lora=False, mode="bf16")
        policy = make_policy(model, config, device)
        optimizer, scheduler = build_optimizer(policy, 10, config)
        rng = random.Random(0)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(MODELS[model]["vocab_size"]) for _ in range(count)]

        (row,) = pack([(tokens(prompt), [tokens(completion) for _ in range(8)]) for _ in range(2)])

        def step() -> None:
            rows = [replace(micro_batch(row), update=Update(1, 1))]
            train_batch(policy, None, optimizer, scheduler, rows, config, device)

        step()
        is_cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if is_cuda:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiled:
            step()
            if is_cuda:
                torch.cuda.synchronize()
    busy: Counter[str] = Counter()
    for event in profiled.events() or ():
        if event.device_type != DeviceType.CPU:
            continue  # a kernel's time is that of the operation that launched it
        busy_us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        busy[kind_of(event)] += busy_us
    total = sum(busy.values())
    parts = {
        f"{kind}_percent": 100 * busy[kind] / total
        for kind in ("attention", "merge", "head", "rest")
    }
    return {"model": model, "tokens": row.num_tokens, "busy_ms": total / 1e3, **parts}


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "few modes and a tiny model, in about a minute").parse_args()
    rows = Rows(args.json)
    with tempfile.TemporaryDirectory() as folder:
        model = build_random(Path(folder) / "model")
        references = References(Path(folder), model, 2 if args.quick else 4)
        for name in QUICK if args.quick else MODES:
            names = {"part": "mode", "mode": name, "device": device_here().type}
            rows.measure(names, partial(references.compared, *MODES[name]))
    rows.measure({"part": "profile"}, partial(shares, args.quick))


if __name__ == "__main__":
    main()
