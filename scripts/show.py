"""Read a run's completions: those of a step, best or worst first.

    python scripts/show.py RUN                       # the last step's, in their groups
    python scripts/show.py RUN --step 40 --worst 5
    python scripts/show.py RUN --best 3 --group 812
    python scripts/show.py RUN --held-out --worst 5
    python scripts/show.py RUN [RUN ...] --html      # a page with curves and completions, RUN/run.html
    python scripts/show.py RUN --serve               # the page of a run that trains, on loopback
    python scripts/show.py RUN --keep docs/runs/mine # a small copy of a run, for a repository

Held-out ones are of the last evaluation; with `--set NAME` of one of several sets.
"""

import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import run_page
from run_page import read_rows

Sample = dict[str, Any]


def read_samples(path: Path, step: int | None) -> list[Sample]:
    """The completions of a step, the last one where it is None, read line by line: the file may be large."""
    samples: list[Sample] = []
    last = None
    for sample in read_rows(path):
        if step is None and sample["step"] != last:
            samples = []
        last = sample["step"]
        if step in (None, last):
            samples.append(sample)
    if last is None:
        sys.exit(f"error: {path} has no completions yet")
    if not samples:
        sys.exit(f"error: {path} has no completions of step {step}; its last is {last}")
    return samples


def shown(sample: Sample) -> str:
    """One completion with its prompt, rewards and advantage, for people."""
    info, completion = dict(sample.get("info", {})), sample["completion"]
    prompt = info.pop("messages", None) or sample["prompt"]
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":  # an agent's conversation
        completion = content_text(prompt.pop().get("content"))
    if not isinstance(prompt, str):
        prompt = "\n".join(
            f"[{each['role']}] {content_text(each.get('content'))}" for each in prompt
        )
    parts = ", ".join(f"{name} {value}" for name, value in sample["rewards"].items())
    head = f"step {sample['step']} · group {sample['group']} · dataset row {sample['row']} · {sample['finish_reason']}"
    if sample.get("set"):  # one of several held-out ones
        head = f"{sample['set']} · {head}"
    if sample.get("times", 1) > 1:
        head += f" · x{sample['times']}"
    known = sample.get("columns", {}) | info
    columns = "".join(f"\n   {name}: {value}" for name, value in known.items())
    figures = f"reward {sample['reward']} ({parts})"
    if "advantage" in sample:
        figures += f" · advantage {sample['advantage']:+.3g}"
    text = "\n".join([f"── {head}", f"   {figures}{columns}", prompt, "▸ " + completion, ""])
    return "".join(map(harmless, text))


def harmless(character: str) -> str:
    """A character as no terminal obeys it: escaped where it cannot be printed."""
    if character.isprintable() or character in "\n\t":
        return character
    return repr(character)[1:-1]


def extremes(samples: list[Sample], number: int, is_best: bool) -> list[Sample]:
    """The best or worst samples that have a reward, each answer to a prompt once, with its `times`."""
    judged = [sample for sample in samples if sample["reward"] is not None]
    judged.sort(key=lambda sample: sample["reward"], reverse=is_best)
    found: dict[tuple[int, str], Sample] = {}
    for sample in judged:
        first = found.setdefault((sample["row"], sample["completion"]), sample | {"times": 0})
        first["times"] += 1
    return list(found.values())[:number]


def content_text(content: Any) -> str:
    """A chat message's content, with `<image>` in the place of one."""
    if isinstance(content, list):
        return "".join(part.get("text") or f"<{part['type']}>" for part in content)
    return str(content)


def main(argv: list[str]) -> None:
    """Command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's output_dir")
    parser.add_argument("--html", type=Path, nargs="?", const=Path(), metavar="FILE")
    parser.add_argument("--serve", type=int, nargs="?", const=0, metavar="PORT")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--step", type=int, help="default: the last")
    parser.add_argument("--group", type=int)
    parser.add_argument("--held-out", action="store_true", help="those of an evaluation")
    parser.add_argument("--set", metavar="NAME", help="one of several held-out sets")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", type=int, metavar="N")
    order.add_argument("--best", type=int, metavar="N")
    args = parser.parse_args(argv)
    if args.html is not None:
        path = args.html if args.html.name else args.runs[0] / "run.html"
        path.write_bytes(run_page.page(args.runs))
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; open it in a browser")
    if args.serve is not None:
        run_page.serve(args.runs, args.serve)
    if args.html is not None or args.serve is not None:
        return
    if len(args.runs) > 1:
        parser.error("several runs are shown by --html and --serve alone")
    if args.keep is not None:
        run_page.keep(args.runs[0], args.keep)
        return

    name = "held_out.jsonl" if args.held_out else "completions.jsonl"
    samples = read_samples(args.runs[0] / name, args.step)
    for field in ("group", "set"):
        wanted = getattr(args, field)
        samples = [sample for sample in samples if wanted in (None, sample.get(field))]
    number = args.worst if args.best is None else args.best
    if number is not None and number < 1:
        parser.error("--worst and --best must be at least 1")
    if number is not None:
        samples = extremes(samples, number, args.best is not None)
    print("\n".join(map(shown, samples)) or "no completion fits")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
    main(sys.argv[1:])
