"""TRL's GRPOTrainer with vLLM in its own process, for one_gpu.py: the same model, lengths and batch.

It loads all, waits for a line on its standard input, trains, and prints one JSON object: medians of its steps but the
first two.
"""

import json
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

STEPS = 6
ROWS = 16  # of a forward and backward, whose logits are whole


class Clock(TrainerCallback):
    """The seconds of each step, and of what is called within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"step_s": [], "generate_s": [], "sync_s": []}
        self.begun_s = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Open the step's row."""
        self.begun_s = now_s()
        self.seconds["generate_s"].append(0.0)
        self.seconds["sync_s"].append(0.0)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Close it."""
        self.seconds["step_s"].append(now_s() - self.begun_s)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which adds its seconds to the step's row."""

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            started_s = now_s()
            found = call(*args, **kwargs)
            if self.seconds[name]:
                self.seconds[name][-1] += now_s() - started_s
            return found

        return timed_call


def now_s() -> float:
    """The time, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(
    folder: Path, options: dict[str, Any], num_tokens: int, num_prompts: int, num_generations: int
) -> None:
    """Load, wait, train, print. `options` are vLLM's, for which TRL has no fields."""
    recipe = runpy.run_path(str(folder / "one_gpu_recipe.py"))
    is_cuda = torch.cuda.is_available()
    batch_size = num_prompts * num_generations
    rows = min(ROWS, batch_size)
    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch_size // rows, num_generations=num_generations,
        max_completion_length=num_tokens, beta=0.0, learning_rate=1e-6, bf16=is_cuda, use_cpu=not is_cuda,
        gradient_checkpointing=False, report_to="none", save_strategy="no", generation_kwargs={"ignore_eos": True},
        use_vllm=True, vllm_mode="colocate", vllm_max_model_length=2 * num_tokens + 64,
        vllm_gpu_memory_utilization=0.02,
    )  # fmt: skip
    generation: Any = vllm_generation
    generation.LLM = partial(generation.LLM, **options)
    clock = Clock()
    trainer: Any = GRPOTrainer(
        str(folder),
        recipe["parity"],
        config,
        Dataset.from_list(recipe["rows"]()),
        callbacks=[clock],
    )
    inner = trainer.vllm_generation
    inner.generate = clock.timed("generate_s", inner.generate)
    inner.sync_weights = clock.timed("sync_s", inner.sync_weights)

    print("loaded", flush=True)
    sys.stdin.readline()
    trainer.train()
    found = {}
    for name, seconds in clock.seconds.items():
        found[name] = statistics.median(seconds[2:])
    found["train_s"] = found["step_s"] - found["generate_s"] - found["sync_s"]
    num_sampled = batch_size * num_tokens
    found["sampled_tokens_per_s"] = num_sampled / found["generate_s"]
    found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else 0.0
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:]))
