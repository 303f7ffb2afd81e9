"""Seconds per step, split into generate, reward, train and sync; a sync against one plain broadcast of its bytes.

    python benchmarks/step_time.py [--json PATH] [--quick] [--against CHECKOUT]

Each model trains against a real server on this machine. Between steps, the same weights are synced once more and the
same number of bytes is broadcast once over plain gloo to another process: the ratio of the two medians is what the
sync costs beside the bytes themselves (pause, pack, load, resume). `sync_memory_mb` is how far the trainer's resident
peak rises in a sync; `largest_tensor_mb` and `bucket_mb` stand beside it.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
import torch.distributed as dist
from build_tiny import build, build_tokenizer, problems

from benchmarks.common import arguments, beside, median, memory_mb, random_model, report, reset_peak
from benchmarks.local_server import apart, local_server
from config import TrainConfig
from recipes.rewards import exact_match
from rollouts.rollouts import Rollouts
from train import set_advantages, train_batch
from training.metrics import batch_metrics
from training.model import build_policy, share_prefixes
from training.optimizer import build_optimizer
from utils import process_group, timed
from weights.group import BUCKET_BYTES
from weights.publish import published_weights

TIMEOUT_S = 600.0  # of a plain broadcast


def receive(link: Any, port: int, num_bytes: int, repeats: int) -> None:
    """The other end of a plain broadcast."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group: Any = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=TIMEOUT_S))
    data = torch.empty(num_bytes, dtype=torch.uint8)
    for _ in range(repeats):
        group.broadcast([data], dist.BroadcastOptions()).wait()
    link.recv()  # never comes


@contextmanager
def plain_broadcast(num_bytes: int, repeats: int) -> Iterator[Callable[[], float]]:
    """What sends as many bytes over gloo to another process, `repeats` times and no less, and returns the seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with apart(receive, store.port, num_bytes, repeats):
        group: Any = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=TIMEOUT_S))
        data = torch.zeros(num_bytes, dtype=torch.uint8)

        def send() -> float:
            started_s = time.perf_counter()
            group.broadcast([data], dist.BroadcastOptions()).wait()
            return time.perf_counter() - started_s

        yield send


def build_random(path: Path, hidden: int, layers: int) -> None:
    """A random Qwen3 with the tiny recipe's tokenizer and a 8192-row embedding: 350 MB at 1024 x 6.

    Its weights have the digits of bf16, as those of most checkpoints.
    """
    shape = {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64, "vocab_size": 8192,
    }  # fmt: skip
    fields = {"max_position_embeddings": 128, "eos_token_id": 2}
    model = random_model(shape, torch.device("cpu"), torch.bfloat16, **fields)
    model.float().save_pretrained(path)
    build_tokenizer().save_pretrained(path)


def train_problems() -> list[dict[str, str]]:
    """The tiny recipe's problems."""
    return problems(1000, held_out=False, seed=0)


def measure(name: str, model: Path, steps: int, **fields: Any) -> dict[str, Any]:
    """Train `steps` steps on a server of its own, then sync and broadcast in turn."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--max-model-len", "64", "--max-num-seqs", "256")
        with local_server(str(model), Path(folder) / "server.log", *options) as server:
            config = TrainConfig(
                model_id=str(model),
                vllm_urls=[server.wait()],
                dataset_id=train_problems,
                reward_funcs=[exact_match],
                no_apply_chat_template=True,
                max_completion_len=12,
                max_steps=steps,
                max_staleness=0,
                output_dir=folder,
                **fields,
            )
            with process_group(120) as device:
                return {"model": name, **run(config, device, steps)}


def run(config: TrainConfig, device: torch.device, steps: int) -> dict[str, Any]:
    """The loop of train.py without log and checkpoints, every part timed."""
    rollouts = Rollouts(config, device)
    policy = build_policy(config, device)
    config = share_prefixes(policy, config)
    rollouts.set_config(config)
    optimizer, scheduler = build_optimizer(policy, steps, config)
    sizes = [tensor.nbytes for _, tensor in published_weights(policy)]
    rollouts.publish(policy, 0)
    times: dict[str, list[float]] = {}
    for version in range(steps):
        parts: dict[str, float] = {}
        with timed("time/step_s", parts):
            with timed("time/train_s", parts):
                rows = rollouts.next_batch(set_advantages)
                train_batch(policy, None, optimizer, scheduler, rows, config, device)
            batch = rollouts.end_batch({})
            with timed("time/sync_s", parts):
                rollouts.publish(policy, version + 1)
        parts |= batch_metrics(batch.groups, version, config) | batch.metrics
        parts["time/train_s"] -= parts["time/wait_s"]
        for part, seconds in parts.items():
            if part.startswith("time/"):
                times.setdefault(part.removeprefix("time/"), []).append(seconds)
    order = ("generate_s", "reward_s", "train_s", "sync_s", "step_s")
    # The first step warms up.
    row: dict[str, Any] = {part: median(times[part][1:]) for part in order}
    row |= sync_against_broadcast(rollouts, policy, sum(sizes), 7, steps)
    row |= {
        "model_mb": sum(sizes) / 1e6,
        "largest_tensor_mb": max(sizes) / 1e6,
        "bucket_mb": BUCKET_BYTES["cpu"] / 1e6,
    }
    rollouts.close()
    return row


def sync_against_broadcast(
    rollouts: Rollouts, policy: Any, num_bytes: int, repeats: int, version: int
) -> dict[str, float]:
    """Medians of `repeats` syncs and as many plain gloo broadcasts of their bytes, in turn, and the sync's memory."""
    cpu = torch.device("cpu")
    syncs, plains, memory = [], [], []
    with plain_broadcast(num_bytes, repeats) as send_plain:
        for repeat in range(repeats):
            reset_peak(cpu)
            before = memory_mb(cpu, "VmRSS")
            started = time.perf_counter()
            rollouts.publish(policy, version + repeat + 1)
            syncs.append(time.perf_counter() - started)
            memory.append(memory_mb(cpu, "VmHWM") - before)
            plains.append(send_plain())
    ratio = median([sync / plain_s for sync, plain_s in zip(syncs, plains, strict=True)])
    return {
        "extra_sync_s": median(syncs),
        "plain_broadcast_s": median(plains),
        "sync_over_plain": ratio,
        "sync_memory_mb": max(memory),
    }


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "a 20 MB model only, in under a minute", "steps").parse_args()
    if args.against:
        quick = ["--quick"] if args.quick else []
        commands = {"step": ["benchmarks/step_time.py", *quick]}
        beside(args.against, commands, 1 if args.quick else 3, args.json)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        if args.quick:
            build_random(models / "small", hidden=256, layers=4)
            rows = [measure("random 20 MB", models / "small", steps=2, batch_size=4)]
        else:
            build(models / "tiny", seed=0)
            model = models / "tiny" / "model"
            rows = [measure("tiny recipe", model, steps=9, batch_size=64, learning_rate=3e-4)]
            build_random(models / "large", hidden=1024, layers=6)
            rows.append(measure("random 350 MB", models / "large", steps=4, batch_size=8))
    report(rows, args.json)


if __name__ == "__main__":
    main()
