"""Final weights after three steps against the stand-in server: this checkout and another one, compared to the bit.

    python benchmarks/same_weights.py --against ../other-checkout [--json PATH]

Every run is synchronous, and what the stand-in server says depends on the prompt alone, so that two checkouts whose
mathematics and order of computation are the same end with the same bits. Sums over two ranks may be made in another
order, so DDP on two ranks is compared to 1e-6 of the largest weight.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
CASES: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "LoRA, beta": (1, ["--use_peft", "true", "--lora_target_modules", "q_proj,down_proj", "--beta", "0.1"]),
    "2 iterations of 2 mini-batches": (1, ["--num_iterations", "2", "--num_minibatches", "2"]),
    "FSDP2, 2 ranks": (2, ["--use_fsdp", "true"]),
    "FSDP2, LoRA, 2 ranks": (2, ["--use_fsdp", "true", "--use_peft", "true"]),
    "evaluation, drop_zero_advantage": (1, ["--reward_funcs", "is_long", "--drop_zero_advantage", "true",
                                            "--eval_dataset_id", "HELD_OUT", "--eval_steps", "1"]),
    "DDP, 2 ranks": (2, []),
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
    """Run every case with the code of `checkout`; checkpoints go to a folder for each case below `folder`.

    Raises:
        RuntimeError: a run failed.
    """
    sys.path[:0] = [str(checkout), str(checkout / "scripts"), str(checkout / "tests")]
    from fake_server import fake_server
    from helpers import make_model

    folder.mkdir(parents=True)
    model = make_model(folder / "model", tied=False)
    (folder / "held_out.jsonl").write_text("".join(json.dumps({"prompt": f"{i}-1="}) + "\n" for i in range(7)))
    for name, (num_ranks, options) in CASES.items():
        with fake_server(model, answer) as server:
            recipe = folder / "same_weights_recipe.py"
            recipe.write_text(RECIPE.format(model=model, url=server.url))
            ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
            given = [str(folder / "held_out.jsonl") if word == "HELD_OUT" else word for word in options]
            command = [sys.executable, *(ranks if num_ranks > 1 else ()), "train.py", str(recipe), *given]
            done = subprocess.run(
                [*command, "--output_dir", str(folder / name)],
                cwd=checkout,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{name}: {(done.stdout + done.stderr)[-3000:]}")


def compare(ours: Path, theirs: Path) -> dict[str, Any]:
    """One case: whether all tensors are equal, and the largest difference beside the largest weight."""
    from safetensors.torch import load_file

    (file,) = (ours / "checkpoint-3").glob("*model.safetensors")
    mine, other = load_file(file), load_file(theirs / "checkpoint-3" / file.name)
    assert mine.keys() == other.keys()
    start = load_file(ours.parent / "model" / "model.safetensors")
    moved = (
        max((mine[name] - start[name]).abs().max().item() for name in mine.keys() & start.keys() or [])
        if not (file.name.startswith("adapter"))
        else max(tensor.abs().max().item() for name, tensor in mine.items() if "lora_B" in name)
    )
    gap = max((mine[name] - other[name]).abs().max().item() for name in mine)
    return {"equal": all(mine[n].equal(other[n]) for n in mine), "largest_difference": gap, "trained_by": moved}


def main() -> None:
    """Train both, compare, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--train", nargs=2, type=Path, help=argparse.SUPPRESS)  # a checkout, a folder
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.train:
        return train(*(path.resolve() for path in given.train))
    with tempfile.TemporaryDirectory() as folder:
        trees = {"ours": HERE, "theirs": given.against}
        for name, checkout in trees.items():
            subprocess.run([sys.executable, __file__, "--train", checkout, f"{folder}/{name}"], check=True)
        rows = [
            {"case": case, **compare(Path(folder) / "ours" / case, Path(folder) / "theirs" / case)} for case in CASES
        ]
    for row in rows:
        print(
            f"{row['case']:35} equal {row['equal']!s:5}  difference {row['largest_difference']:.1e}  "
            f"trained by {row['trained_by']:.1e}"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")
    limits = {case: 1e-6 if case.startswith("DDP") else 0.0 for case in CASES}
    sys.exit(any(row["largest_difference"] > limits[row["case"]] for row in rows))


if __name__ == "__main__":
    main()
