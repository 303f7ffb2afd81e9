"""Learning with AdamW's moments in 8 bits against AdamW itself: `recipes/tiny.py` for 50 steps, on the CPU.

    python benchmarks/adam_8bit.py [--json PATH] [--quick]

Needs torchao. Each seed trains once with either, one after the other, with the same server. Figures: the mean reward
of the last ten steps, the share of 512 held-out problems that is right at the end, seconds a step (median), and bytes
of the moments for a weight.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks.common import median, report
from benchmarks.local_server import local_server


def bytes_a_weight(model: Path, adam_8bit: bool) -> float:
    """Bytes of both moments for each weight, after a step."""
    import torch

    from config import TrainConfig
    from training.model import load_model
    from training.optimizer import build_optimizer

    config = TrainConfig(
        model_id=str(model), dataset_id="none", reward_funcs=["os.path.exists"], adam_8bit=adam_8bit
    )
    policy = load_model(config)
    optimizer, _ = build_optimizer(policy, 1, config)
    for weight in policy.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()

    num_bytes = 0
    for state in optimizer.state.values():
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            parts = [moment]
            if hasattr(moment, "codes"):
                parts = [moment.codes, moment.scale, moment.qmap]
            num_bytes += sum(part.nbytes for part in parts)
    return num_bytes / sum(weight.numel() for weight in policy.parameters())


def train(
    place: Path, url: str, seed: int, adam_8bit: bool, steps: int, folder: Path
) -> dict[str, Any]:
    """One run, in a process of its own."""
    fields = {
        "model_id": place / "model", "dataset_id": place / "train.jsonl", "vllm_urls": url,
        "eval_dataset_id": place / "heldout.jsonl", "output_dir": folder / "run", "seed": seed,
        "max_steps": steps, "eval_steps": steps, "adam_8bit": str(adam_8bit).lower(),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "train.py"), "recipes/tiny.py"]
    for name, value in fields.items():
        command += [f"--{name}", str(value)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    if done.returncode:
        sys.exit(f"seed {seed}: {done.stderr[-3000:]}")

    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward" in row]
    last = trained[-10:]
    return {
        "seed": seed,
        "adam_8bit": adam_8bit,
        "accuracy_before": rows[0]["eval/accuracy"],
        "accuracy": rows[-1]["eval/accuracy"],
        "reward": sum(row["reward"] for row in last) / len(last),
        "step_s": median([row["time/step_s"] for row in trained]),
        "bytes_a_weight": bytes_a_weight(place / "model", adam_8bit),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="one seed for three steps")
    args = parser.parse_args()
    seeds, steps = ((1,), 3) if args.quick else ((1, 2, 3), 50)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tiny"
        build = [sys.executable, str(ROOT / "scripts/build_tiny.py"), "--output", str(place)]
        subprocess.run(build, check=True)
        rows: list[dict[str, Any]] = []
        options = ("--max-model-len", "64", "--max-num-seqs", "256")
        with local_server(str(place / "model"), Path(folder) / "log", *options) as server:
            url = server.wait()
            for seed in seeds:
                for adam_8bit in (False, True):
                    own = Path(folder) / f"{seed}_{adam_8bit}"
                    rows.append(train(place, url, seed, adam_8bit, steps, own))
                    report(rows, args.json)


if __name__ == "__main__":
    main()
