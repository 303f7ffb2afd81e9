"""The same GRPO job given to this trainer and to TRL's `GRPOTrainer`, one after the other, on the CPU.

    pip install -r requirements/dev.txt
    python benchmarks/end_to_end.py [--json PATH] [--quick]

A random Qwen3 of 10 M parameters, prompts of 512 tokens, 8 completions of 64 tokens each, 8 prompts a step, one
optimizer step a batch; and a tiny one with prompts and completions of 16 tokens. Both training processes have two
threads (`OMP_WAIT_POLICY=PASSIVE`). TRL generates through transformers in its own; here a vLLM server with one thread
does, on the same cores. Figures: medians of seconds a step after the first, tokens (prompts once per completion) a
second, and the peak memory of the training process.
"""

import argparse
import importlib.util
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks.common import Rows, arguments, lines, median, ran, random_model

JOBS: dict[str, dict[str, Any]] = {
    "10 M": {
        "prompt": 512, "completion": 64, "max_tokens": 1100, "micro_batch": 8,
        "model": {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 6, "num_attention_heads": 6,
                  "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024},
    },
    "tiny": {
        "prompt": 16, "completion": 16, "max_tokens": 4096, "micro_batch": 64,
        "model": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128},
    },
}  # fmt: skip
PROMPTS, GROUP = 8, 8


def build(job: dict[str, Any], folder: Path) -> int:
    """A random model with a character tokenizer; returns its parameters."""
    import torch
    from build_tiny import build_tokenizer

    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.model_max_length = job["model"]["max_position_embeddings"]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape = {"vocab_size": len(tokenizer), **job["model"], **ids}
    model = random_model(shape, torch.device("cpu"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def problems(job: dict[str, Any]) -> list[dict[str, str]]:
    """Prompts of random digits."""
    rng = random.Random(0)
    return [{"prompt": "".join(rng.choices("0123456789", k=job["prompt"]))} for _ in range(64)]


def num_sevens(completions: list[str], **_: Any) -> list[float]:
    """Some reward."""
    return [float(text.count("7")) for text in completions]


def run_ours(
    job: dict[str, Any], model: str, url: str, staleness: int, steps: int, folder: Path
) -> list[float]:
    """Seconds of each step."""
    from config import TrainConfig
    from train import main

    config = TrainConfig(
        model_id=model, vllm_urls=[url], dataset_id=lambda: problems(job), reward_funcs=[num_sevens],
        batch_size=PROMPTS, num_generations=GROUP, max_completion_len=job["completion"], max_steps=steps,
        sampling_params={"ignore_eos": True}, no_apply_chat_template=True, max_staleness=staleness,
        max_tokens_per_gpu=job["max_tokens"], reward_workers=1, output_dir=str(folder), learning_rate=1e-6,
    )  # fmt: skip
    main(config)
    rows = lines(folder / "metrics.jsonl")
    assert all(row["completions/mean_length"] == job["completion"] for row in rows)
    return [row["time/step_s"] for row in rows]


def run_trl(job: dict[str, Any], model: str, steps: int, folder: Path) -> list[float]:
    """Seconds of each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        times: list[float]

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.times = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [*num_sevens(completions)]

    config = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=PROMPTS * GROUP // job["micro_batch"], num_generations=GROUP, max_steps=steps,
        max_completion_length=job["completion"], generation_kwargs={"min_new_tokens": job["completion"]},
        temperature=1.0, beta=0.0, learning_rate=1e-6, lr_scheduler_type="constant", report_to=[], use_cpu=True,
        bf16=False, gradient_checkpointing=False, save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        model=model, args=config, reward_funcs=[reward], train_dataset=Dataset.from_list(problems(job)),
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    lengths = {row.get("completions/mean_length") for row in trainer.state.log_history}
    assert lengths - {None} == {float(job["completion"])}, lengths
    return [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]


def measure(name: str, method: str, model: str, url: str, steps: int) -> dict[str, Any]:
    """One method on one job, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        if method == "trl":
            times = run_trl(JOBS[name], model, steps, Path(folder))
        else:
            staleness = int(method.removeprefix("ours "))
            times = run_ours(JOBS[name], model, url, staleness, steps, Path(folder))
    return {
        "seconds": median(times[1:]),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def compare(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """All methods on one job, each in a process of its own."""
    from benchmarks.local_server import local_server

    job = JOBS[name]
    model = folder / name.replace(" ", "")
    row: dict[str, Any] = {"job": name, "parameters": build(job, model)}
    tokens = PROMPTS * GROUP * (job["prompt"] + job["completion"])
    length = str(job["prompt"] + job["completion"])

    def child(method: str, url: str) -> None:
        words = [__file__, "--measure", name, method, model, url, steps]
        env = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
        measured = ran(words, env=env)
        key = method.replace(" ", "_")
        row[f"{key}_s"], row[f"{key}_mb"] = measured["seconds"], measured["memory_mb"]
        row[f"{key}_tokens_per_s"] = tokens / measured["seconds"]

    options = ["--max-model-len", length, "--max-num-seqs", "128"]
    options += ["--gpu-memory-utilization", "0.3"]
    with local_server(str(model), folder / "server.log", *options) as server:
        url = server.wait()
        for method in ("ours 0", "ours 1"):
            child(method, url)
    if importlib.util.find_spec("trl"):
        child("trl", "")
        row["times_as_fast"] = row["trl_s"] / row["ours_1_s"]
        row["share_of_memory"] = row["ours_1_mb"] / row["trl_mb"]
    else:
        print("trl is not installed, its side is left out: pip install -r requirements/dev.txt")
    return row


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "the tiny model for three steps")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, method, model, url, steps = args.measure
        print(json.dumps(measure(name, method, model, url, int(steps))))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = Rows(args.json)
        for name, steps in [("tiny", 3)] if args.quick else [("10 M", 6), ("tiny", 30)]:
            rows.add(compare(name, steps, Path(folder)))


if __name__ == "__main__":
    main()
