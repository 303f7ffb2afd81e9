"""The page of a large run: how large it is, and how long a browser takes to show it.

    python benchmarks/page.py [--json PATH] [--quick]

10,000 completions of random words, 64 a step, with tokens and log-probs, and 2,000 steps of 60 metrics, in
headless Chromium on this machine's CPU. Rows, one for each number of tokens a completion:

  mb          of the page
  kept        completions in it: a page has at most 40 MB of them
  write_s     that scripts/show.py takes
  load_s      from the address to curves and the first completions, median of five
  step_s      to show another step, median of five
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import run_page
from playwright.sync_api import sync_playwright

from benchmarks.common import median, report

GROUP, NUM_GROUPS = 8, 8
REPEATS = 5
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def make_run(folder: Path, num_steps: int, num_tokens: int) -> None:
    """Write the logs of a run with random words."""
    numbers = random.Random(0)
    words = [" " + "".join(numbers.choices("abcdefgh", k=4)) for _ in range(1000)]
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(1, 2001):
            metrics = {f"metric/{number}": numbers.random() for number in range(60)}
            lines.write(json.dumps({"step": step, "reward": numbers.random(), **metrics}) + "\n")
    with (folder / "completions.jsonl").open("w") as lines:
        for step in range(1, num_steps + 1):
            for number in range(GROUP * NUM_GROUPS):
                tokens = numbers.choices(words, k=num_tokens)
                row: dict[str, Any] = {
                    "step": step, "group": step * NUM_GROUPS + number // GROUP, "row": number, "prompt": "Why?",
                    "columns": {}, "completion": "".join(tokens), "reward": 0.5, "rewards": {"right": 0.5},
                    "advantage": 0.1, "finish_reason": "stop", "info": {}, "weight_versions": [[0, 0, num_tokens]],
                    "tokens": tokens, "logprobs": [round(-numbers.random(), 2) for _ in tokens],
                }  # fmt: skip
                lines.write(json.dumps(row) + "\n")


def measured(browser: Any, path: Path) -> dict[str, float]:
    """Seconds in the browser."""
    loads, steps = [], []
    for _ in range(REPEATS):
        page = browser.new_page()
        begun_s = time.perf_counter()
        page.goto(path.as_uri())
        page.locator("article").first.wait_for()
        loads.append(time.perf_counter() - begun_s)

        begun_s = time.perf_counter()
        page.keyboard.press("[")
        page.wait_for_function("state.step === runs[0].steps.at(-2)")
        steps.append(time.perf_counter() - begun_s)
        kept = page.evaluate("runs[0].samples.length")
        page.close()
    return {"kept": kept, "load_s": median(loads), "step_s": median(steps)}


def main(argv: list[str]) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tenth of the completions")
    args = parser.parse_args(argv)
    num_steps = 16 if args.quick else 10_000 // (GROUP * NUM_GROUPS)
    rows: list[dict[str, Any]] = []
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        for num_tokens in (20, 200, 1000):
            with tempfile.TemporaryDirectory() as folder:
                make_run(Path(folder), num_steps, num_tokens)
                file = Path(folder) / "run.html"
                begun_s = time.perf_counter()
                file.write_bytes(run_page.page([Path(folder)]))
                write_s = time.perf_counter() - begun_s
                found: dict[str, Any] = {
                    "tokens": num_tokens,
                    "mb": file.stat().st_size / 1e6,
                    "write_s": write_s,
                }
                rows.append(found | measured(browser, file))
        browser.close()
    report(rows, args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
