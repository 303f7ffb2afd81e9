"""A sync to the real server: how long it takes, and for how long it stops sampling.

    python benchmarks/sync.py [--against CHECKOUT] [--json PATH] [--quick]

A random Qwen3 of 336 MB goes from this process to a server, in float32, and the
same number of bytes by one plain gloo broadcast to another process, in turn. `idle` and `busy` say what the server does
meanwhile: nothing, or sample 16 sequences. Columns:

  sync_s      a whole sync
  pause_s     of it, what sampling waits
  plain_s     the plain broadcast, of an idle server's row
  over_plain  sync_s / plain_s
  pause_share pause_s / sync_s

With `--against` a checkout of another commit is measured in turn with this one, three times; a row has the medians.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PROMPT = list(range(20, 40))
GROUP = 16  # completions of a busy server
SYNCS = 9


# -- In a process of its own, for one checkout -----------------------------------------------------


def client_pool(url: str) -> Any:
    """The trainer's servers, of the checkout that is first on the path."""
    import torch

    from config import TrainConfig
    from rollouts.servers import ServerPool

    config = TrainConfig(model_id="m", dataset_id="d", reward_funcs=[print], vllm_urls=[url])
    pool = ServerPool(config)
    pool.connect(torch.device("cpu"))
    return pool


def busy(server: Any, is_over: threading.Event) -> None:
    """Ask for completions until the end."""
    sampling = {"n": GROUP, "max_tokens": 64, "ignore_eos": True, "temperature": 1.0}
    while not is_over.is_set():
        server.generate(PROMPT, sampling)


def of_checkout(model: str) -> list[dict[str, Any]]:
    """The rows of an idle and of a busy server."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from benchmarks.local_server import local_server
    from benchmarks.step_time import plain_receiver
    from weights.publish import published_weights

    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(model)
    num_bytes = sum(tensor.nbytes for _, tensor in published_weights(policy))
    spawn = multiprocessing.get_context("spawn")
    ports = spawn.Queue()
    receiver = spawn.Process(target=plain_receiver, args=(ports, num_bytes, 2 * SYNCS))
    receiver.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    group: Any = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=120))
    data = torch.zeros(num_bytes, dtype=torch.uint8)

    options = ["--max-model-len", "128", "--max-num-seqs", "64"]
    rows = []
    with local_server(model, Path(model) / "server.log", *options) as started:
        pool = client_pool(started.wait())
        [server] = pool.servers
        version = 0
        for state in ("idle", "busy"):
            is_over = threading.Event()
            for waiting in pool.update_weights(published_weights(policy), version):
                pool.admit(waiting)
            asking = threading.Thread(target=busy, args=(server, is_over))
            if state == "busy":
                asking.start()
                time.sleep(3.0)  # the first batches are slow
            times: dict[str, list[float]] = {"sync_s": [], "pause_s": [], "plain_s": []}
            for _ in range(SYNCS):
                version += 1
                started_s = time.perf_counter()
                pool.update_weights(published_weights(policy), version)
                times["sync_s"].append(time.perf_counter() - started_s)
                times["pause_s"].append(server.paused_s)
                started_s = time.perf_counter()
                group.broadcast([data], dist.BroadcastOptions()).wait()
                times["plain_s"].append(time.perf_counter() - started_s)
                time.sleep(0.2)
            is_over.set()
            if state == "busy":
                asking.join()
            middle = {name: sorted(found)[SYNCS // 2] for name, found in times.items()}
            rows.append({"server": state, **middle})
    receiver.join()
    return rows


# -- The command line ------------------------------------------------------------------------------


def main() -> None:
    """Measure the checkouts in turn, and print and write the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the checkout of another commit")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="a 20 MB model, once, in a minute")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(of_checkout(args.child)), flush=True)
        os._exit(0)

    sys.path[:0] = [str(HERE), str(HERE / "scripts")]
    from benchmarks.common import median, report
    from benchmarks.step_time import build_random

    checkouts = {"now": HERE}
    if args.against:
        checkouts = {"before": args.against.resolve(), "now": HERE}
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = {"hidden": 256, "layers": 4} if args.quick else {"hidden": 1024, "layers": 6}
        build_random(Path(folder), **size)
        for _ in range(1 if args.quick else args.repeats):
            for when, checkout in checkouts.items():
                env = {**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'scripts'}"}
                done = subprocess.run(
                    [sys.executable, __file__, "--child", folder],
                    stdout=subprocess.PIPE, text=True, check=True, env=env, cwd=checkout,
                )  # fmt: skip
                for row in json.loads(done.stdout.splitlines()[-1]):
                    runs.setdefault((when, row.pop("server")), []).append(row)

    rows = []
    for (when, state), found in runs.items():
        medians = {name: median([run[name] for run in found]) for name in found[0]}
        medians["over_plain"] = median([run["sync_s"] / run["plain_s"] for run in found])
        medians["pause_share"] = median([run["pause_s"] / run["sync_s"] for run in found])
        rows.append({"when": when, "server": state, **medians})
    report(rows, args.json)


if __name__ == "__main__":
    main()
