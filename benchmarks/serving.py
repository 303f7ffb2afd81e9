"""What the real server costs beside its model: CPU time, bytes and tokens a second of completions.

    python benchmarks/serving.py [--against CHECKOUT] [--json PATH] [--quick] [--length 96]

The tiny model on a server whose engine is a process of its own, as on a GPU. Groups of 8 completions of `length` tokens
are asked for, so many at once that the named number of sequences is under way. Columns:

  tokens_per_s  completion tokens that arrive
  api_us        CPU time of the API process for a completion token, microseconds
  engine_us     of the engine's
  client_us     of the process that asks: here it does nothing but ask and decode
  decode_us     of that alone, the decoding of a reply that is there
  bytes         of replies, for a token

With `--against` a checkout of another commit is measured in turn with this one, each by its own client, three times;
a row has the medians.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
GROUP = 8  # completions
SEQUENCES = (16, 128, 512)
WARM_UP_S, MEASURED_S = 4.0, 12.0


# -- In a process of its own, for one checkout -----------------------------------------------------


class Load:
    """Threads that ask for groups all the time; counts what arrives."""

    def __init__(self, server: Any, num_groups: int, length: int):
        self.server = server
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
    import psutil

    from vllm_client import Server

    server = Server(url, timeout_s=300.0)
    load = Load(server, num_sequences // GROUP, length)
    engines = api.children(recursive=True)

    def spent() -> tuple[float, float, float]:
        times = [sum(api.cpu_times()[:2]), 0.0, sum(psutil.Process().cpu_times()[:2])]
        times[1] = sum(sum(engine.cpu_times()[:2]) for engine in engines)
        return times[0], times[1], times[2]

    time.sleep(WARM_UP_S)
    before, tokens_before, started_s = spent(), load.num_tokens, time.monotonic()
    time.sleep(seconds)
    after, num_tokens = spent(), load.num_tokens - tokens_before
    passed_s = time.monotonic() - started_s
    load.close()

    names = ("api_us", "engine_us", "client_us")
    found: dict[str, Any] = {"tokens_per_s": num_tokens / passed_s}
    for name, first, last in zip(names, before, after, strict=True):
        found[name] = (last - first) / num_tokens * 1e6
    return found | decoding(server, length)


def decoding(server: Any, length: int) -> dict[str, float]:
    """Seconds and bytes of one reply, for a token."""
    read, content = reply_of(server, length)
    times = []
    for _ in range(20):
        started_s = time.process_time()
        read()
        times.append(time.process_time() - started_s)
    num_tokens = GROUP * length
    return {
        "decode_us": sorted(times)[len(times) // 2] / num_tokens * 1e6,
        "bytes": len(content) / num_tokens,
    }


def reply_of(server: Any, length: int) -> tuple[Callable[[], Any], bytes]:
    """What reads a reply that is there, as the checkout's client does, and its bytes."""
    import msgspec

    import vllm_client
    from server import messages

    sampling: dict[str, Any] = {"n": GROUP, "max_tokens": length}
    sampling |= {"ignore_eos": True, "temperature": 1.0}
    old: Any = getattr(vllm_client, "all_choices", None)
    if old:  # a reply that comes in parts
        kept: list[Any] = []

        def keep(num: int, reply: Any) -> Any:
            kept.extend((reply, reply.content))  # all of it is there then
            return old(num, reply)

        server.generate([5, 6, 7], sampling, read=keep)
        return partial(old, GROUP, kept[0]), kept[1]

    request = messages.SampleRequest([5, 6, 7], {**sampling, "logprobs": 0})
    with server._open("/sample", request, None) as reply:
        content = reply.content

    def read() -> Any:
        sampled = msgspec.msgpack.decode(content, type=list[messages.Sampled])
        return [vllm_client.completion_of(message) for message in sampled]

    return read, content


def of_checkout(model: str, length: int, sequences: list[int], seconds: float) -> Any:
    """All rows of the checkout that is first on the path."""
    import psutil

    from benchmarks.local_server import local_server

    options = [
        "--max-num-seqs", str(max(SEQUENCES)), "--max-model-len", str(length + 32),
        "--kv-cache-memory-bytes", "1G",
    ]  # fmt: skip
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    rows = []
    with local_server(model, Path(model) / "server.log", *options, env=env) as server:
        url = server.wait()
        api = psutil.Process(server.process.pid)
        for num_sequences in sequences:
            found = measured(url, api, num_sequences, length, seconds)
            rows.append({"sequences": num_sequences} | found)
    return rows


# -- The command line ------------------------------------------------------------------------------


def main() -> None:
    """Measure the checkouts in turn, and print and write the medians."""
    if sys.argv[1:2] == ["--child"]:
        model, length, passed, *sequences = sys.argv[2:]
        found = of_checkout(model, int(length), [int(num) for num in sequences], float(passed))
        print(json.dumps(found), flush=True)
        os._exit(0)

    sys.path[:0] = [str(HERE), str(HERE / "scripts")]
    from benchmarks.common import arguments, by_turns, medians, report
    from benchmarks.local_server import random_tiny

    parser = arguments(__doc__, "16 sequences, once, in a minute", "the servers")
    parser.add_argument("--length", type=int, default=96, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sequences", type=int, nargs="+", default=list(SEQUENCES))
    args = parser.parse_args()
    seconds = MEASURED_S
    if args.quick:
        args.repeats, args.sequences, seconds = 1, [SEQUENCES[0]], 3.0
    with tempfile.TemporaryDirectory() as folder:
        random_tiny(Path(folder))
        words = [__file__, "--child", folder, args.length, seconds, *args.sequences]
        found = by_turns(words, args.against, args.repeats)

    rows = []
    for when, runs in found.items():
        for number in range(len(args.sequences)):
            rows.append({"when": when, **medians([run[number] for run in runs])})
    report(rows, args.json)


if __name__ == "__main__":
    main()
