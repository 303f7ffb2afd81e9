"""One training step on prompts with an image: each prompt forwarded once, against once per completion.

python benchmarks/vlm.py [--json PATH] [--quick]

A tiny Qwen2.5-VL, 8 completions of 32 tokens on prompts with 256 image tokens; every figure from a process of its own.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from build_tiny_vlm import build_model, build_processor
from PIL import Image

from benchmarks.common import arguments, median, memory_mb, ran, report
from config import TrainConfig
from rollouts.group import Completion, Group, Prompt
from rollouts.images import with_images
from train import train_batch
from training.batching import Dealer
from training.model import parallelize, share_prefixes
from training.optimizer import build_optimizer
from training.vision import run_tower_always
from utils import process_group

EDGE = 256  # pixels: 32 x 32 patches of 8, merged by four into 256 tokens
REPEATS = 5


def make_groups(
    num_prompts: int, num_generations: int, length: int, config: TrainConfig
) -> list[Group]:
    """Prompts with noise for an image, and completions of random letters."""
    processor = build_processor(EDGE)
    generator = torch.Generator().manual_seed(0)
    groups = []
    for index in range(num_prompts):
        noise = torch.randint(256, (EDGE, EDGE, 3), generator=generator, dtype=torch.uint8)
        prompt = with_images(
            Prompt(index, [], "Colour?", {}, [Image.fromarray(noise.numpy())]), processor, config
        )
        completions = [
            Completion(ids, [-4.0] * length, "stop", 0)
            for ids in torch.randint(5, 90, (num_generations, length), generator=generator).tolist()
        ]
        groups.append(
            Group(
                prompt,
                completions,
                advantages=torch.randn(num_generations, generator=generator).tolist(),
            )
        )
    return groups


def measure(share_prefix: bool, num_prompts: int, length: int) -> dict[str, Any]:
    """Steps with or without shared prefixes, in this process."""
    torch.set_num_threads(1)
    config = TrainConfig(
        model_id="tiny", dataset_id="d", reward_funcs=["os.path.exists"], batch_size=num_prompts, num_generations=8,
        max_completion_len=length, max_tokens_per_gpu=4096, share_prefix=share_prefix,
    )  # fmt: skip
    with process_group(60) as device:
        torch.manual_seed(0)
        groups = make_groups(num_prompts, 8, length, config)
        policy = build_model(build_processor().tokenizer)
        images = 0

        def count(_: Any, args: Any, inputs: dict[str, Any]) -> None:
            nonlocal images
            images += len(inputs["grid_thw"])

        policy.model.visual.register_forward_pre_hook(count, with_kwargs=True)
        run_tower_always(policy, groups[0].prompt, device)
        policy = parallelize(policy, config, device)
        config = share_prefixes(policy, config, groups[0].prompt)
        assert config.share_prefix == share_prefix
        optimizer, scheduler = build_optimizer(policy, 100, config)
        before, times = memory_mb(device, "VmRSS"), []
        for _ in range(1 + REPEATS):
            images, started = 0, time.perf_counter()
            (rows,) = Dealer(1, config).deal(groups, is_complete=True)
            metrics, _ = train_batch(policy, None, optimizer, scheduler, rows, config, device)
            times.append(time.perf_counter() - started)
        peak = memory_mb(device, "VmHWM") - before
    return {
        "seconds": median(times[1:]),
        "memory_mb": peak,
        "images_forwarded": images,
        "loss": metrics["loss"],
    }


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "two prompts, in under a minute")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        path, num_prompts = args.measure
        print(json.dumps(measure(path == "shared", int(num_prompts), 32)))
        return
    rows = []
    num_prompts = 2 if args.quick else 8
    for path in ("repeated", "shared"):
        found = ran([__file__, "--measure", path, num_prompts])
        rows.append({"path": path, "prompts": num_prompts, **found})
    for row in rows:
        row["speedup"] = rows[0]["seconds"] / row["seconds"]
        row["memory"] = row["memory_mb"] / rows[0]["memory_mb"]
    report(rows, args.json)


if __name__ == "__main__":
    main()
