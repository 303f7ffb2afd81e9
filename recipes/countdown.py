"""Qwen2.5-3B learns countdown: make a number of three or four others.

    python scripts/launch.py recipes/countdown.py --trainers 2

Each number is used once (TinyZero's task). The problems come from a seeded generator: no download.
Meant for three GPUs of 80 GB. Expected, and not measured here: nano-aha-moment reports about 60 %
of held-out problems for a model of this size on this task.
"""

import random
from fractions import Fraction
from functools import partial
from typing import Any
from zlib import crc32

from config import TrainConfig
from recipes.rewards import OPERATIONS, countdown, format_reward

PROMPT = (
    "Using the numbers {nums}, make an equation that equals {target}. You can use + - * / and "
    "brackets, and each number exactly once. Think in <think> </think> tags, and give the equation "
    "in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)


def problems(num: int, held_out: bool) -> list[dict[str, Any]]:
    """`num` seeded problems: numbers up to 99, and a reachable target."""
    rng = random.Random(held_out)
    rows: list[dict[str, Any]] = []
    while len(rows) < num:
        nums = [rng.randint(1, 99) for _ in range(rng.choice([3, 4]))]
        target = joined(nums, rng)
        is_held_out = crc32(f"{sorted(nums)} {target}".encode()) % 8 == 0
        if target.denominator == 1 and 10 <= target <= 99 and is_held_out == held_out:
            prompt = PROMPT.format(nums=nums, target=target)
            rows.append({"prompt": prompt, "nums": nums, "target": int(target)})
    return rows


def joined(nums: list[int], rng: random.Random) -> Fraction:
    """The numbers, joined by random operations in a random order."""
    values = [Fraction(number) for number in nums]
    while len(values) > 1:
        left = values.pop(rng.randrange(len(values)))
        right = values.pop(rng.randrange(len(values)))
        operation = rng.choice(list(OPERATIONS.values()))
        values.append(operation(left, right) if right else left)  # nothing is divided by 0
    return values[0]


config = TrainConfig(
    model_id="Qwen/Qwen2.5-3B",
    dataset_id=partial(problems, 20_000, held_out=False),
    eval_dataset_id=partial(problems, 512, held_out=True),
    reward_funcs=[countdown, format_reward],
    reward_weights=[1.0, 0.1],
    max_completion_len=1024,
    batch_size=64,
    max_steps=400,
    learning_rate=1e-6,
    use_fsdp=True,
    fsdp_bf16=True,
    gradient_checkpoint=True,
    max_tokens_per_gpu=16384,
    eval_steps=25,
    output_dir="outputs/countdown",
)
