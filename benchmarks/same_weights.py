"""Final weights after three steps against the stand-in server: this checkout and another one, compared to the bit.

    python benchmarks/same_weights.py --against ../other-checkout [--json PATH]

Every run is synchronous, and what the stand-in server says depends on the prompt alone, so that two checkouts whose
mathematics and order of computation are the same end with the same bits. DDP on two ranks may sum in another order, and
is compared to 1e-6. The exit status is 0 where all is as it should be.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # at the end: with --train another checkout comes first

from benchmarks.common import report

DDP = "DDP, 2 ranks"
LIMITS = {
    DDP: 1e-6
}  # the largest difference of a weight, where it is not 0: an all-reduce may sum in another order
CASES: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "LoRA, beta": (1, ["--use_peft", "true", "--lora_target_modules", "q_proj,down_proj", "--beta", "0.1"]),
    "2 iterations of 2 mini-batches": (1, ["--num_iterations", "2", "--num_minibatches", "2"]),
    "FSDP2, 2 ranks": (2, ["--use_fsdp", "true"]),
    "FSDP2, LoRA, 2 ranks": (2, ["--use_fsdp", "true", "--use_peft", "true"]),
    "evaluation, drop_zero_advantage": (1, ["--reward_funcs", "is_long", "--drop_zero_advantage", "true",
                                            "--eval_dataset_id", "HELD_OUT", "--eval_steps", "1"]),
    DDP: (2, []),
}  # fmt: skip
RECIPE = """
from config import TrainConfig
def rows(): return [{{"prompt": f"{{i}}+{{i}}="}} for i in range(40)]
def mean_id(completion_ids, **_): return [sum(ids) / len(ids) / 50 for ids in completion_ids]
def is_long(completion_ids, **_): return [float(len(ids) > 3) for ids in completion_ids]
config = TrainConfig(
    model_id={model!r}, vllm_urls=[{url!r}], dataset_id=rows, reward_funcs=[mean_id], max_completion_len=12,
    batch_size=6, num_generations=4, max_steps=3, learning_rate=1e-3, max_tokens_per_gpu=64, max_staleness=0,
    reward_workers=1,
)
"""


def answer(prompt_ids: list[int], number: int) -> tuple[list[int], float]:
    """A completion of 1 to 9 tokens that depends on nothing but the prompt and its number in the group."""
    rng = random.Random(1000 * sum(prompt_ids) + number)
    return [rng.randrange(5, 90) for _ in range(rng.randrange(1, 10))], 0.01


def train(checkout: Path, folder: Path) -> None:
    """Run every case with the code of `checkout`; the case's name is its `output_dir` in `folder`.

    Raises:
        RuntimeError: a run failed, with the end of what it printed.
    """
    sys.path[:0] = [str(checkout), str(checkout / "scripts"), str(checkout / "tests")]
    from fake_server import fake_server
    from helpers import make_model

    folder.mkdir(parents=True)
    model = make_model(folder / "model", tied=False)
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"{i}-1="}) + "\n" for i in range(7)))
    recipe = folder / "same_weights_recipe.py"
    for case, (num_ranks, options) in CASES.items():
        command = [sys.executable]
        if num_ranks > 1:
            command += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={num_ranks}",
            ]
        command += ["train.py", str(recipe), *options, "--output_dir", str(folder / case)]
        command = [str(held_out) if word == "HELD_OUT" else word for word in command]
        with fake_server(model, answer) as server:
            recipe.write_text(RECIPE.format(model=model, url=server.url))
            done = subprocess.run(
                command, cwd=checkout, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise RuntimeError(f"{case}: {(done.stdout + done.stderr)[-3000:]}")


def compare(ours: Path, theirs: Path) -> dict[str, Any]:
    """One case: whether all weights are equal, their largest difference, and how far training moved any of ours."""
    from safetensors.torch import load_file

    (file,) = (ours / "checkpoint-3").glob("*model.safetensors")
    mine, other = load_file(file), load_file(theirs / "checkpoint-3" / file.name)
    if mine.keys() != other.keys():
        raise RuntimeError(
            f"{ours.name}: the checkpoints have different weights: {mine.keys() ^ other.keys()}"
        )
    if file.name.startswith("adapter"):
        moved = [weight for name, weight in mine.items() if "lora_B" in name]  # which starts at 0
    else:
        start = load_file(ours.parent / "model" / "model.safetensors")
        moved = [weight - start[name] for name, weight in mine.items()]
    return {
        "case": ours.name,
        "equal": all(weight.equal(other[name]) for name, weight in mine.items()),
        "largest_difference": max(
            (weight - other[name]).abs().max().item() for name, weight in mine.items()
        ),
        "trained_by": max(difference.abs().max().item() for difference in moved),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the root of the other checkout")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument(
        "--train", nargs=2, type=Path, help=argparse.SUPPRESS
    )  # a checkout, and a folder for its runs
    given = parser.parse_args()
    if given.train:
        checkout, folder = (path.resolve() for path in given.train)
        train(checkout, folder)
        return
    if not given.against:
        parser.error("--against is missing")
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = Path(name) / "ours", Path(name) / "theirs"
        for checkout, folder in ((ROOT, ours), (given.against, theirs)):
            subprocess.run([sys.executable, __file__, "--train", checkout, folder], check=True)
        rows = [compare(ours / case, theirs / case) for case in CASES]
    report(rows, given.json)
    sys.exit(any(row["largest_difference"] > LIMITS.get(row["case"], 0.0) for row in rows))


if __name__ == "__main__":
    main()
