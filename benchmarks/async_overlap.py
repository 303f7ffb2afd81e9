"""What overlapping generation and training gains: synchronous, streaming within the batch, and staleness 1.

python benchmarks/async_overlap.py [--json PATH] [--quick]
"""

import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from build_tiny import build, build_tokenizer

from benchmarks.common import arguments, lines, median, report
from benchmarks.end_to_end import num_sevens
from benchmarks.local_server import local_server, random_tiny, stand_in
from config import TrainConfig
from recipes.rewards import exact_match
from train import main as train
from vllm_client import Server

MODES: dict[str, dict[str, Any]] = {
    # One micro-batch: all is sampled before it trains.
    "sync": {"max_staleness": 0, "max_tokens_per_gpu": 1 << 20},
    "streaming": {"max_staleness": 0},
    "staleness 1": {"max_staleness": 1},
}


def run(config: TrainConfig) -> dict[str, Any]:
    """One training run, from its own metrics."""
    train(config)
    rows = [row for row in lines(Path(config.output_dir) / "metrics.jsonl") if row["step"] > 2]
    took = median([row["time/step_s"] for row in rows])
    measured = {
        "steps_per_s": 1 / took,
        "own_s": median([row["time/train_s"] + row["time/sync_s"] for row in rows]),
        "idle_trainer": median([row["time/wait_s"] for row in rows]) / took,
        "idle_servers": median([row["idle/servers"] for row in rows]),
        "staleness_mean": sum(row["staleness/mean"] for row in rows) / len(rows),
        "staleness_max": max(row["staleness/max"] for row in rows),
    }
    if "eval/accuracy" in rows[-1]:
        measured["accuracy"] = rows[-1]["eval/accuracy"]
    return measured


# -- (a) latencies under control ----------------------------------------------------------------------

BATCH, GROUP, SECONDS, SLOTS = 16, 4, 0.05, 8


def skewed(prompt_ids: list[int], number: int) -> tuple[list[int], float]:
    """8 tokens; one completion in ten takes ten times as long."""
    rng = random.Random(1000 * sum(prompt_ids) + number)
    return [rng.randrange(5, 90) for _ in range(8)], SECONDS * (10 if rng.random() < 0.1 else 1)


def long_prompts() -> list[dict[str, str]]:
    """256 prompts of 400 characters, so that training takes about as long as generation."""
    rng = random.Random(0)
    return [{"prompt": "".join(rng.choices("0123456789", k=400))} for _ in range(256)]


def generate_seconds(url: str) -> float:
    """A batch's generation by a server that is kept busy: the time of four, with 32 groups in flight, over four."""
    server = Server(url, 60)
    sampling = {"n": GROUP, "max_tokens": 8, "temperature": 1.0}
    tokenizer = build_tokenizer()
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in long_prompts()[: 5 * BATCH]]
    ended = []
    with ThreadPoolExecutor(2 * BATCH) as pool:
        for reply in [pool.submit(server.generate, ids, sampling) for ids in prompts]:
            reply.add_done_callback(lambda _: ended.append(time.perf_counter()))
    return (ended[4 * BATCH - 1] - ended[BATCH // 2 - 1]) / (4 * BATCH - BATCH // 2) * BATCH


def controlled(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Part (a)."""
    model = random_tiny(folder / "random", max_length=512)
    fields: dict[str, Any] = {"slots": SLOTS, "max_model_len": 512, "with_logprobs": False}
    with stand_in(model, skewed, **fields) as (url, _):
        generate_s = generate_seconds(url)
        rows = []
        for mode, fields in MODES.items():
            config = TrainConfig(
                model_id=model, vllm_urls=[url], dataset_id=long_prompts, reward_funcs=[num_sevens], batch_size=BATCH,
                num_generations=GROUP, max_completion_len=8, max_steps=steps, learning_rate=0.0, reward_workers=1,
                no_apply_chat_template=True, output_dir=str(folder / mode), max_logprob_mismatch=1e9,
                **{"max_tokens_per_gpu": 1800, **fields},
            )  # fmt: skip
            rows.append({"part": "a", "mode": mode, "generate_s": generate_s, **run(config)})
    for row in rows:
        row["bound"] = 1 / max(generate_s, rows[-1]["own_s"])
        row["of_bound"] = row["steps_per_s"] / row["bound"]
        row["speedup"] = row["steps_per_s"] / rows[0]["steps_per_s"]
    return rows


# -- (b) the tiny recipe -------------------------------------------------------------------------------


def tiny(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Part (b): medians over seeds of what each seed's runs have; one seed for the mode whose accuracy is sync's."""
    build(folder / "tiny", seed=0)
    rows = []
    options = ("--max-model-len", "64", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.3")
    with local_server(str(folder / "tiny" / "model"), folder / "server.log", *options) as server:
        url = server.wait()
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for seed in range(3):  # the modes side by side, as the machine's speed drifts
            for mode, fields in MODES.items():
                if mode == "streaming" and seed:
                    continue
                config = TrainConfig(
                    model_id=str(folder / "tiny" / "model"), vllm_urls=[url], reward_funcs=[exact_match], seed=seed,
                    dataset_id=str(folder / "tiny" / "train.jsonl"),
                    eval_dataset_id=str(folder / "tiny" / "heldout.jsonl"),
                    no_apply_chat_template=True, max_completion_len=12, batch_size=64, max_steps=steps,
                    learning_rate=3e-4, lr_scheduler="linear", warmup_ratio=0.03, output_dir=str(folder / "run"),
                    log_steps=50, **{"max_tokens_per_gpu": 2048, **fields},
                )  # fmt: skip
                runs[mode].append(run(config))
    for mode, measured in runs.items():
        row: dict[str, Any] = {"part": "b", "mode": mode}
        row |= {name: median([r[name] for r in measured]) for name in measured[0]}
        row |= {"accuracies": " ".join(f"{r['accuracy']:.3f}" for r in measured)}
        row["accuracy"] = sum(r["accuracy"] for r in measured) / len(measured)
        rows.append(row)
    for row in rows:
        row["speedup"] = row["steps_per_s"] / rows[0]["steps_per_s"]
    return rows


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "part (a) with few steps, in under a minute").parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = controlled(Path(folder), steps=5 if args.quick else 30)
        report(rows, args.json)
        if not args.quick:
            report(rows + tiny(Path(folder), steps=150), args.json)


if __name__ == "__main__":
    main()
