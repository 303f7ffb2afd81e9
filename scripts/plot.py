"""Plot a run's reward and held-out accuracy, and print where it started and ended.

python scripts/plot.py RUN [-o curve.png]
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The objects of `<run>/metrics.jsonl`, one per step (and step 0 where the run evaluated before it trained)."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Sampled reward and held-out value over the steps, as an image file."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, style in (("reward", "-"), ("eval/accuracy", "o-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name)
    axes.set(xlabel="step", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    rows = read_metrics(args.run)
    path = args.output or args.run / "reward.png"
    plot(rows, path)
    held_out = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    if held_out:
        print(f"held-out accuracy before: {held_out[0]:.1%}")
        print(f"held-out accuracy after:  {held_out[-1]:.1%}")
    print(f"reward curve: {path}")


if __name__ == "__main__":
    main()
