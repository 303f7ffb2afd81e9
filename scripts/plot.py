"""Plot the metrics of one or several runs.

    python scripts/plot.py RUN [RUN ...]                               # reward, lengths, entropy, agreement
    python scripts/plot.py RUN RUN -v reward -v eval/reward -x num_tokens --smooth 20 -o curve.svg
    python scripts/plot.py info RUN                                    # which metrics there are

The suffix of `-o` chooses PNG, SVG or PDF. A picture has its own background, so that it reads the same on a light and
on a dark page.
"""

import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter, MaxNLocator
from run_page import read_config, read_rows

# Text stays text in an SVG, which is then small; the same numbers give the same file, with a point for each.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "plot", "path.simplify": False})
matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans"]
# A panel's size in inches: two of them are as wide as a page of README, whose text is then not scaled down.
PANEL_WIDTH, PANEL_HEIGHT = 4.5, 2.9
matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
ON_TOP: dict[str, Any] = {"clip_on": False, "zorder": 3}  # of axes that start where a curve does

Rows = list[dict[str, Any]]
SUMMARY = (
    ("reward", "eval/reward"),
    ("completions/mean_length",),
    ("entropy",),
    ("sampling/sampling_logp_difference/mean",),
)
TITLES = {  # of panels that show something else than their metric's name says
    ("reward", "eval/reward"): "reward, and held-out reward",
    ("eval/reward",): "held-out reward",
    ("eval/accuracy",): "held-out accuracy",
    ("completions/mean_length",): "mean length of completions",
    ("sampling/sampling_logp_difference/mean",): "trainer's and server's log-probs differ by",
}
UNITS = {  # by a metric's name, or a pattern of names; a reward, a loss and a norm have none
    "entropy": "nats", "*kl": "nats", "*logp_difference*": "nats",
    "time/*": "seconds", "tokens_per_s/*": "tokens/s",
    "num_tokens": "tokens", "completions/mean_length": "tokens",
    "*accuracy": "share", "*pass@*": "share", "frac_reward_zero_std": "share", "clip_ratio/*": "share",
    "completions/clipped_ratio": "share", "idle/*": "share", "sampling/current_share": "share",
    "sampling/effective_sample_size": "share",
    "staleness/*": "steps", "skipped_steps": "updates", "completions/weight_versions": "versions", "completions/different": "share", "advantages/share_positive": "share", "completions/segments": "segments",
    "groups/*": "groups", "queue/*": "groups", "rollouts_failed": "groups", "rewards_failed": "calls",
}  # fmt: skip


def read_metrics(run: Path) -> Rows:
    """The objects of `<run>/metrics.jsonl`, one per step (and step 0 where the run evaluated before it trained)."""
    path = run / "metrics.jsonl"
    return list(read_rows(path)) or sys.exit(f"error: {path} has no step yet")


def metric_names(rows: Rows) -> list[str]:
    """Every metric that a run has numbers of."""
    return sorted({name for row in rows for name, value in row.items() if value is not None})


def smoothed(values: list[float], window: int) -> list[float]:
    """The mean of each value and the `window` - 1 before it, or as many as there are."""
    ends = range(1, len(values) + 1)
    return [fmean(values[max(end - window, 0) : end]) for end in ends]


def sparkline(values: list[float], width: int = 60) -> str:
    """The values as a line of text, for a terminal: means of `width` parts of them, from the least to the greatest."""
    size = math.ceil(len(values) / width)
    means = [fmean(values[start : start + size]) for start in range(0, len(values), size)]
    low = min(means)
    height = (max(means) - low) or 1
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / height)] for mean in means)


def unit_of(name: str) -> str:
    """A metric's unit; empty where it has none."""
    return next((unit for pattern, unit in UNITS.items() if fnmatch(name, pattern)), "")


def labels_of(runs: list[str]) -> list[str]:
    """What a legend says of each run: the one setting that differs, as `seed 1`, or its folder, or its path."""
    settings = [read_config(Path(run))[0] for run in runs]
    names = {name for known in settings for name in known}
    differ = [name for name in names if len({str(known.get(name)) for known in settings}) > 1]
    if len(differ) == 1 and all(settings):
        labels = [f"{differ[0]} {known.get(differ[0])}" for known in settings]
        if len(set(labels)) == len(runs):
            return labels

    folders = [Path(run).name for run in runs]
    return folders if len(set(folders)) == len(runs) else runs


def draw(
    axes: Any, label: str, rows: Rows, name: str, x: str, window: int, style: dict[str, Any]
) -> None:
    """One metric of one run, if it has it; few points, as of an evaluation, are marked and not smoothed."""
    # The evaluation of step 0 has no other metrics: nothing was trained.
    points = [(row.get(x, None if row["step"] else 0), row.get(name)) for row in rows]
    known: list[Any] = [point for point in points if None not in point]
    places = [place for place, _ in known]
    values = [value for _, value in known]
    if 0 < len(values) < len(rows) / 2:
        axes.plot(places, values, marker="o", label=label, markersize=4, **style, **ON_TOP)
    elif values:
        axes.plot(places, smoothed(values, window), label=label, **style, **ON_TOP)


def plot(runs: dict[str, Rows], names: list[str], x: str, window: int, path: Path) -> None:
    """The chosen metrics in a panel each, or the summary where none is chosen, as an image file."""
    present = {name for rows in runs.values() for name in metric_names(rows)}
    for name in [*names, x]:
        if name not in present:
            sys.exit(f"error: no run has {name}: there are {', '.join(sorted(present))}")
    panels = [(name,) for name in names] or SUMMARY
    labels = labels_of([*runs])
    columns = 3 if len(panels) == 3 else min(len(panels), 2)  # no place stays empty
    num_rows = math.ceil(len(panels) / columns)
    size = (PANEL_WIDTH * columns, PANEL_HEIGHT * num_rows)
    figure, grid = plt.subplots(num_rows, columns, squeeze=False, sharex=True, figsize=size)
    for axes, panel in zip(grid.flat, panels, strict=False):
        for name, dash in zip(panel, ("-", "--", ":"), strict=False):
            for number, (label, rows) in enumerate(zip(labels, runs.values(), strict=True)):
                parts = [label] * (len(runs) > 1) + [name] * (len(panel) > 1)
                style = {"color": f"C{number}", "linestyle": dash}
                draw(axes, " ".join(parts), rows, name, x, window, style)
        axes.margins(0)  # an axis starts and ends where the data do
        if panel[0] == "completions/mean_length":  # or a few tokens would look like much
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=x == "step"))
        if x == "num_tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 250k, 1M
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(f"{x} ({unit_of(x)})" if unit_of(x) else x)
        axes.set_ylabel(unit_of(panel[0]))
        axes.set_title(TITLES.get(panel, ", ".join(panel)), loc="left", fontsize="medium")
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(fontsize="small")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same numbers give the same file.
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def print_line(name: str, rows: Rows, metric: str) -> None:
    """Print a metric of a run as a line of text, if it has it."""
    values = [row[metric] for row in rows if row.get(metric) is not None]
    if values:
        print(f"{metric} of {name}: {values[0]:.3g} {sparkline(values)} {values[-1]:.3g}")


def print_ends(name: str, rows: Rows, is_only: bool) -> None:
    """Print a run's rewards, and its held-out figures before and after."""
    print_line(name, rows, "reward")

    held_out = [row for row in rows if row.get("eval/reward") is not None]
    if not held_out:
        return
    # An accuracy that equals the reward: rewards are 0 or 1.
    is_share = all(row.get("eval/accuracy") == row["eval/reward"] for row in held_out)
    kinds = [] if is_share else [("reward", ".3g")]
    if is_share or any(row.get("eval/accuracy") for row in held_out):
        kinds.append(("accuracy", ".1%"))
    whose = "" if is_only else f" of {name}"
    for kind, form in kinds:
        before = held_out[0].get(f"eval/{kind}", math.nan)
        after = held_out[-1].get(f"eval/{kind}", math.nan)
        print(f"held-out {kind}{whose} before: {before:{form}}")
        print(f"held-out {kind}{whose} after:  {after:{form}}")


def main(argv: list[str]) -> None:
    """Command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's output_dir")
    parser.add_argument(
        "-v", "--metric", action="append", default=[], help="a panel of its own; may be repeated"
    )
    parser.add_argument("-x", default="step", help="the metric of the horizontal axis")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="STEPS", help="mean over so many values"
    )
    parser.add_argument("-o", "--output", type=Path, help="default: reward.png in the first run")
    args = parser.parse_args(argv)
    if args.smooth < 1:
        parser.error("--smooth must be at least 1")
    only_list = args.runs[0] == Path("info")
    paths = args.runs[1:] if only_list else args.runs
    if not paths:
        parser.error("give a run's output_dir")
    runs = {str(path): read_metrics(path) for path in paths}
    if only_list:
        for name, rows in runs.items():
            print(f"{name}: {len(rows)} steps")
            for metric in metric_names(rows):
                print(f"  {metric}")
        return
    path = args.output or paths[0] / "reward.png"
    if path.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"-o {path} must end with .png, .svg or .pdf")
    plot(runs, args.metric, args.x, args.smooth, path)
    for name, rows in runs.items():
        for metric in args.metric:
            print_line(name, rows, metric)
        if not args.metric:
            print_ends(name, rows, is_only=len(runs) == 1)
    print(f"{', '.join(args.metric) or 'reward curve'}: {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
