"""Qwen2.5-1.5B-Instruct learns grade-school mathematics (openai/gsm8k).

    python scripts/launch.py recipes/gsm8k.py

The reward is whether its boxed answer is right. Meant for two GPUs of 48 GB and more. Expected, and
not measured here: SkyRL reports a test accuracy of 79.6 % for full training of this model at this
learning rate, after 140 steps. An epoch is 117 steps here. verl reports 77.9 % for LoRA (rank 32,
rate 3e-5, batches of 64 prompts, one epoch).
"""

from typing import Any

from config import TrainConfig
from recipes.rewards import math_answer

INSTRUCTION = "Reason step by step, and put the final answer in \\boxed{}."


def with_answer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the `question` as `prompt`, and the answer's number.

    The number stands after `####` in the worked `answer`.
    """
    problems = []
    for row in rows:
        number = row["answer"].rpartition("####")[2].strip().replace(",", "")
        problems.append({"prompt": f"{row['question']}\n{INSTRUCTION}", "answer": number})
    return problems


config = TrainConfig(
    model_id="Qwen/Qwen2.5-1.5B-Instruct",
    dataset_id="openai/gsm8k:main",
    eval_dataset_id="openai/gsm8k:main",
    collate_fn=with_answer,
    reward_funcs=[math_answer],
    num_generations=8,
    max_completion_len=1024,
    batch_size=64,
    num_epochs=1,
    learning_rate=1e-6,
    warmup_ratio=0.05,
    gradient_checkpoint=True,
    max_tokens_per_gpu=16384,
    eval_steps=20,
    save_steps=50,
    output_dir="outputs/gsm8k",
)
