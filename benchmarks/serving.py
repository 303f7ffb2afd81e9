"""What the real server costs beside its model: CPU time and tokens a second of completions.

    python benchmarks/serving.py [--against CHECKOUT] [--json PATH] [--quick] [--length 96]

The tiny model on a server whose engine is a process of its own, as on a GPU. Groups of 8 completions of `length` tokens
are asked for, so many at once that the named number of sequences is under way. Columns:

  tokens_per_s  completion tokens that arrive
  api_us        CPU time of the API process for a completion token, microseconds
  engine_us     of the engine's
  client_us     of the process that asks: here it does nothing but ask and decode

Each figure is the median of `repeats` servers.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import psutil

from benchmarks.common import arguments, beside, medians, report
from benchmarks.local_server import local_server, random_tiny
from vllm_client import Server

GROUP = 8  # completions
SEQUENCES = (16, 128, 512)
WARM_UP_S, MEASURED_S = 4.0, 12.0


class Load:
    """Threads that ask for groups all the time; counts what arrives."""

    def __init__(self, url: str, num_groups: int, length: int):
        self.server = Server(url, timeout_s=300.0)
        self.length = length
        self.num_tokens = 0
        self.is_over = False
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.ask, args=(n,)) for n in range(num_groups)]
        for thread in self.threads:
            thread.start()

    def ask(self, number: int) -> None:
        """Ask for groups until the end, each of a prompt of its own."""
        sampling = {"n": GROUP, "max_tokens": self.length, "ignore_eos": True, "temperature": 1.0}
        turn = 0
        while not self.is_over:
            turn += 1
            prompt = [5 + (number + turn + place) % 10 for place in range(12)]
            completions = self.server.generate(prompt, sampling)
            with self.lock:
                self.num_tokens += sum(len(completion.token_ids) for completion in completions)

    def close(self) -> None:
        """Wait for what is under way."""
        self.is_over = True
        for thread in self.threads:
            thread.join()


def measured(url: str, api: Any, num_sequences: int, length: int, seconds: float) -> dict[str, Any]:
    """The columns of one row."""
    load = Load(url, num_sequences // GROUP, length)
    processes = {"api_us": [api], "engine_us": api.children(recursive=True)}
    processes["client_us"] = [psutil.Process()]

    def spent_s() -> dict[str, float]:
        """CPU time of each side."""
        found = {}
        for name, some in processes.items():
            found[name] = sum(sum(process.cpu_times()[:2]) for process in some)
        return found

    time.sleep(WARM_UP_S)
    before, tokens_before, started_s = spent_s(), load.num_tokens, time.monotonic()
    time.sleep(seconds)
    after, num_tokens = spent_s(), load.num_tokens - tokens_before
    passed_s = time.monotonic() - started_s
    load.close()
    row = {"sequences": num_sequences, "tokens_per_s": num_tokens / passed_s}
    return row | {name: (after[name] - before[name]) / num_tokens * 1e6 for name in processes}


def rows_of(model: str, length: int, sequences: list[int], seconds: float) -> list[dict[str, Any]]:
    """A row for each number of sequences, of one server."""
    options = [
        "--max-num-seqs", str(max(SEQUENCES)), "--max-model-len", str(length + 32),
        "--kv-cache-memory-bytes", "1G",
    ]  # fmt: skip
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with local_server(model, Path(model) / "server.log", *options, env=env) as server:
        url = server.wait()
        api = psutil.Process(server.process.pid)
        return [measured(url, api, number, length, seconds) for number in sequences]


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "16 sequences, once, in a minute", "the servers")
    parser.add_argument("--length", type=int, default=96, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sequences", type=int, nargs="+", default=list(SEQUENCES))
    args = parser.parse_args()
    seconds = MEASURED_S
    if args.quick:
        args.repeats, args.sequences, seconds = 1, [SEQUENCES[0]], 3.0
    if args.against:
        cases = {}
        for number in args.sequences:
            words = ["--length", args.length, "--sequences", number, "--repeats", 1]
            words += ["--quick"] * args.quick
            cases[f"{number} sequences"] = ["benchmarks/serving.py", *map(str, words)]
        beside(args.against, cases, args.repeats, args.json)
        return

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        random_tiny(Path(folder))
        for _ in range(args.repeats):
            runs.append(rows_of(folder, args.length, args.sequences, seconds))
    report([medians(list(rows)) for rows in zip(*runs, strict=True)], args.json)


if __name__ == "__main__":
    main()
