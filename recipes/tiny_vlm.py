"""A tiny Qwen2.5-VL learns to name the colour of a square.

    bash scripts/demo.sh recipes/tiny_vlm.py

`scripts/build_tiny_vlm.py` makes the model, half-taught. Expected: 39 % of the held-out squares,
and 68 to 81 % after 120 steps, which take 3 min on two CPU cores.
"""

import random
from functools import partial
from typing import Any

from PIL import Image, ImageDraw

from config import TrainConfig
from recipes.rewards import exact_match

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 220, 50),
    "purple": (140, 50, 170),
    "orange": (240, 140, 30),
    "cyan": (60, 210, 220),
    "pink": (250, 150, 190),
}
SIZE = 64  # pixels
QUESTION = "Colour?"


def squares(num: int, seed: int) -> list[dict[str, Any]]:
    """`num` problems: a coloured square on grey noise, and the colour's name."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num):
        name = rng.choice(list(COLOURS))
        noise = Image.frombytes("L", (SIZE, SIZE), rng.randbytes(SIZE * SIZE))
        image = noise.point(lambda value: 96 + value // 4).convert("RGB")

        left = rng.randint(0, 32)
        top = rng.randint(0, 32)
        edge = rng.randint(16, 31)
        shade = [min(255, max(0, value + rng.randint(-25, 25))) for value in COLOURS[name]]
        ImageDraw.Draw(image).rectangle((left, top, left + edge, top + edge), fill=tuple(shade))
        rows.append({"prompt": QUESTION, "image": image, "answer": name})
    return rows


config = TrainConfig(
    model_id="outputs/tiny_vlm/model",
    dataset_id=partial(squares, 2048, seed=1),
    eval_dataset_id=partial(squares, 256, seed=2),
    reward_funcs=[exact_match],
    num_generations=8,
    max_completion_len=8,
    batch_size=64,
    max_steps=120,
    learning_rate=1.5e-4,
    lr_scheduler="linear",
    warmup_ratio=0.05,
    max_tokens_per_gpu=4096,
    eval_steps=20,
    output_dir="outputs/tiny_vlm/run",
)
