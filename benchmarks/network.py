"""A sync to several hosts over links of a limited rate, and with a host that dies or hangs in it.

    sudo python benchmarks/network.py [--against CHECKOUT] [--json PATH] [--quick]

Network namespaces stand for hosts: one has the trainer, the others a stand-in server each that takes weights and
computes nothing. Each host has a link of 800 Mbit/s to one switch (tc's token bucket, both ways). Columns:

  servers   hosts beside the trainer's
  fault     what happens to one of them in the middle of the sync: nothing, `kill -9`, or `kill -STOP`
  sync_s    the whole sync of 336 MB (median of three without a fault)
  over_link sync_s as a multiple of what the bytes take over one link
  serving   servers that have the weights after it
  next_s    the sync after it

Faults run with a `sync_timeout` of 8 s. With `--against` a checkout of another commit is measured in turn with this one.
It needs root, `ip` and `tc`, and leaves nothing behind.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
SYNC_TIMEOUT_S = 8.0
PORT = 8000


# -- Hosts -----------------------------------------------------------------------------------------


def run(*command: str) -> None:
    """A command of `ip` that must succeed."""
    subprocess.run(command, check=True)


@contextmanager
def hosts(num: int, rate: str) -> Iterator[list[str]]:
    """Names of network namespaces; each has the address 10.77.0.(its place + 1)."""
    prefix = f"grpo{os.getpid()}-"
    switch = f"{prefix}switch"
    names = [f"{prefix}{place}" for place in range(num)]
    try:
        run("ip", "netns", "add", switch)
        inside = ["ip", "netns", "exec", switch]
        run(*inside, "ip", "link", "add", "bridge", "type", "bridge")
        run(*inside, "ip", "link", "set", "bridge", "up")
        for place, name in enumerate(names):
            port = f"port{place}"
            run("ip", "netns", "add", name)
            of_host = ["ip", "netns", "exec", name]
            peer = ["type", "veth", "peer", "name", port, "netns", switch]
            run("ip", "link", "add", "veth0", "netns", name, *peer)
            run(*of_host, "ip", "addr", "add", f"10.77.0.{place + 1}/24", "dev", "veth0")
            for link in ("veth0", "lo"):
                run(*of_host, "ip", "link", "set", link, "up")
            run(*inside, "ip", "link", "set", port, "master", "bridge")
            run(*inside, "ip", "link", "set", port, "up")
            limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            run(*of_host, "tc", "qdisc", "add", "dev", "veth0", *limit)
            run(*inside, "tc", "qdisc", "add", "dev", port, *limit)
        yield names
    finally:
        for name in [switch, *names]:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


# -- In a process of its own, on a host, for one checkout -------------------------------------------


def serve() -> None:
    """A stand-in server, until a signal."""
    from benchmarks.scale import Handler, Listener

    Listener(("0.0.0.0", PORT), Handler).serve_forever()


def sync(num_servers: int, megabytes: int, has_fault: bool) -> None:
    """The trainer's side; prints the row. With a fault it says when the sync begins."""
    import torch

    from config import TrainConfig
    from rollouts.servers import ServerPool

    urls = [f"http://10.77.0.{place + 2}:{PORT}" for place in range(num_servers)]
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=[print], vllm_urls=urls, server_timeout=60.0,
        sync_timeout=SYNC_TIMEOUT_S if has_fault else 60.0,
    )  # fmt: skip
    pool = ServerPool(config)
    pool.wait_until_ready()
    pool.connect(torch.device("cpu"))
    weights = {f"w{number}": torch.zeros(1024, 1024) for number in range(megabytes >> 2)}

    def seconds(version: int) -> float:
        started_s = time.perf_counter()
        for server in pool.update_weights(iter(weights.items()), version):
            pool.admit(server)
        return time.perf_counter() - started_s

    for server in pool.update_weights(iter({"w": torch.zeros(4, 4)}.items()), 0):
        pool.admit(server)
    if has_fault:
        print("begun", flush=True)
        times = [seconds(1)]
    else:
        times = [seconds(version) for version in (1, 2, 3)]
    row = {"sync_s": sorted(times)[len(times) // 2], "serving": len(pool.serving)}
    print(json.dumps(row | {"next_s": seconds(4)}), flush=True)
    os._exit(0)


# -- The command line ------------------------------------------------------------------------------


def measured(
    checkout: Path, num: int, megabytes: int, fault: str, delay_s: float, rate: str
) -> dict[str, Any]:
    """One row of a checkout; a fault comes `delay_s` after the beginning of a sync."""
    path = {"PYTHONPATH": f"{checkout}:{checkout / 'scripts'}", "PYTHONSAFEPATH": "1"}
    env = {**os.environ, **path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with hosts(num + 1, rate) as names, ExitStack() as started:

        def start(name: str, *words: Any) -> Any:
            command = ["ip", "netns", "exec", name, sys.executable, __file__, *map(str, words)]
            process = subprocess.Popen(
                command, env=env, cwd=checkout, stdout=subprocess.PIPE, text=True
            )
            started.callback(process.wait)
            started.callback(process.kill)
            return process

        servers = [start(name, "--serve") for name in names[1:]]
        trainer = start(names[0], "--sync", num, megabytes, fault)
        for line in trainer.stdout:
            if line == "begun\n":
                time.sleep(delay_s)
                servers[0].send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        row: dict[str, Any] = json.loads(line)
    return row


def main() -> None:
    """Measure, and print and write the rows."""
    match sys.argv[1:]:
        case ["--serve"]:
            serve()
        case ["--sync", num, megabytes, fault]:
            sync(int(num), int(megabytes), bool(fault))

    sys.path[:0] = [str(HERE), str(HERE / "scripts")]
    from benchmarks.common import arguments, report

    parser = arguments(__doc__, "1 and 2 servers, 64 MB", "syncs")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--mb", type=int, default=336)
    parser.add_argument("--mbit", type=int, default=800, help="the rate of each link")
    args = parser.parse_args()
    if args.quick:
        args.servers, args.mb = [1, 2], 64
    checkouts = {"before": args.against.resolve()} if args.against else {}
    checkouts["now"] = HERE
    link_s = args.mb * 2**20 * 8 / (args.mbit * 1e6)
    cases = [(num, "") for num in args.servers]
    cases += [(args.servers[-1], fault) for fault in ("kill", "stop")]
    rows = []
    for num, fault in cases:
        for when, checkout in checkouts.items():
            found = measured(checkout, num, args.mb, fault, 0.3 * link_s, f"{args.mbit}mbit")
            shown = {"when": when, "servers": num, "fault": fault or "none"}
            rows.append({**shown, **found, "over_link": found["sync_s"] / link_s})
    report(rows, args.json)


if __name__ == "__main__":
    main()
