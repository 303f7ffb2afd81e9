"""What rank 0 and the servers cost, and how these costs grow: measured on one machine, without GPUs.

    python benchmarks/scale.py [--json PATH] [--quick]
    sudo python benchmarks/scale.py --parts network [--json PATH] [--quick]

    tokens    rank 0's CPU time per completion token, from the bytes of a reply to the bytes for the other ranks
    servers   CPU time of the trainer with stand-in servers: connecting, leasing, watching, syncing
    network   a sync over links of a limited rate, and with a host that dies or hangs in it

For `network`, network namespaces stand for hosts: one has the trainer, the others a stand-in server each. Each has a link
of 800 Mbit/s to one switch (tc's token bucket, both ways). `fault` is what happens to one of them in the middle of the
sync: nothing, `kill -9`, or `kill -STOP`, with a `sync_timeout` of 8 s. `sync_s` is the whole sync of 336 MB (median of
three without a fault), `over_link` it as a multiple of what the bytes take over one link, `serving` counts the servers
that have the weights after it, `next_s` is the sync after it. It needs root, `ip` and `tc`, and leaves nothing behind.
"""

import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import msgspec
import torch
from fake_server import FakeServer, serving

from benchmarks.common import Rows, arguments, median
from benchmarks.local_server import apart
from config import TrainConfig
from rollouts.group import Group, Prompt
from rollouts.servers import ServerPool
from server.messages import Sampled
from train import set_advantages
from training.batching import Dealer
from vllm_client import completion_of

GROUPS_PER_S = 50  # at which the servers' bookkeeping is stated


def best_us(call: Any, num_tokens: float, repeats: int) -> tuple[float, Any]:
    """The least time of a call in us per token, as everything else on the machine only adds to it; and its result."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - started)
    return min(times) / num_tokens * 1e6, result


# -- tokens ------------------------------------------------------------------------------------------------------------


def reply_bytes(num: int, length: int, seed: int) -> bytes:
    """The body of a reply with `num` completions."""
    rng = random.Random(seed)
    replies = []
    for _ in range(num):
        ids = array("i", [rng.randrange(150_000) for _ in range(length)])
        logprobs = array("f", [-3 * rng.random() for _ in range(length)])
        reply = Sampled(finish_reason="stop", weight_versions=[("999", 0, length)])
        reply.token_ids, reply.logprobs = ids.tobytes(), logprobs.tobytes()
        replies.append(reply)
    return msgspec.msgpack.encode(replies)


def read_reply(body: bytes) -> Any:
    """Its completions, as the client reads them."""
    return [completion_of(m) for m in msgspec.msgpack.decode(body, type=list[Sampled])]


def make_config(**fields: Any) -> Any:
    """A configuration for a part of a run."""
    needed = {"model_id": "m", "dataset_id": "d", "reward_funcs": [print]}
    return TrainConfig(**{**needed, **fields})


def make_groups(num: int, prompt: int, completion: int, generations: int) -> tuple[Any, list[Any]]:
    """`num` scored groups, made of the bytes of a few replies again and again; and what reads the next of these."""
    rng = random.Random(0)
    bodies = [reply_bytes(generations, completion, seed) for seed in range(min(num, 4))]

    def read(number: int) -> Any:
        return read_reply(bodies[number % len(bodies)])

    few = [read(number) for number in range(len(bodies))]
    groups = []
    for number in range(num):
        ids = [rng.randrange(150_000) for _ in range(prompt)]
        completions = list(few[number % len(few)])
        rewards = [rng.random() for _ in range(generations)]
        of_prompt = Prompt(number, ids, "", {})
        groups.append(Group(of_prompt, completions=completions, reward=rewards, id=number))
    return read, groups


def deal(groups: list[Any], num_ranks: int, config: Any) -> list[Any]:
    """What each rank gets of groups that come one after the other, a row of each at a time, as `Rollouts.next_batch` does."""
    dealer, dealt, taken = Dealer(num_ranks, config), [], []
    for number, group in enumerate(groups):
        set_advantages([group], config)
        taken.append(group)
        is_last = number == len(groups) - 1
        if is_last or not dealer.needs_more(group):
            dealt.append(dealer.deal(taken, is_last))
            taken = []
    return dealt


def dumped(dealt: list[Any]) -> list[list[bytes]]:
    """The bytes that travel to each rank."""
    return [[pickle.dumps(share) for share in of_ranks] for of_ranks in dealt]


def tokens(is_quick: bool) -> list[dict[str, Any]]:
    """us per completion token of each stage, for completions of several lengths."""
    prompt, generations = 512, 16
    rows = []
    for completion in (32, 512) if is_quick else (32, 128, 512, 2048, 8192):
        of_group = completion * generations
        num = max(2, min(256, (60_000 if is_quick else 400_000) // (of_group + prompt)))
        config = make_config(max_tokens_per_gpu=65_536, batch_size=num, num_generations=generations)
        read, groups = make_groups(num, prompt, completion, generations)
        repeats, total = 2 if is_quick else 5, num * of_group
        reply, _ = best_us(lambda: [read(n) for n in range(num)], total, repeats)
        dealing, dealt = best_us(lambda: deal(groups, 2, config), total, repeats)
        dumping, sent = best_us(lambda: dumped(dealt), total, repeats)
        loading, _ = best_us(lambda: [pickle.loads(d[1]) for d in sent], total / 2, repeats)
        rows.append({
            "part": "tokens", "prompt": prompt, "completion": completion, "generations": generations,
            "reply_us": reply, "deal_us": dealing, "scatter_us": dumping,
            "rank_0_us": reply + dealing + dumping, "other_ranks_us": loading,
        })  # fmt: skip
    return rows


# -- servers -----------------------------------------------------------------------------------------------------------


class Sink(FakeServer):
    """One without a model: it takes weights of any names, keeps none, and samples nothing."""

    def load(self) -> Any:
        """No model."""
        return torch.nn.Module()

    def place(self, weights: dict[str, torch.Tensor], version: str) -> None:
        """Nothing is kept."""


def no_answer(*_: Any) -> Any:
    """It is not asked."""


def serve(link: Any, num: int) -> None:
    """Serve until the end of this process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        blocks = [serving(Sink("m", no_answer), poll_s=5.0) for _ in range(num)]
        link.send([stack.enter_context(block).url for block in blocks])
        link.recv()  # never comes


def cpu_s(call: Any) -> tuple[float, float]:
    """Seconds of this process's processor time that a call takes, and those on the clock."""
    started, began = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - started, time.perf_counter() - began


def servers(is_quick: bool) -> list[dict[str, Any]]:
    """CPU time of the trainer for 1 to 500 servers that answer at once and compute nothing."""
    return [costs_of_servers(num, is_quick) for num in ((1, 8) if is_quick else (1, 8, 64, 500))]


def costs_of_servers(num: int, is_quick: bool) -> dict[str, Any]:
    """A row of `servers`."""
    with apart(serve, num) as (link, _):
        config = make_config(vllm_urls=link.recv(), request_timeout=120.0)
        with closing(ServerPool(config)) as client:
            client.wait_until_ready()
            connect_s, _ = cpu_s(lambda: client.connect(torch.device("cpu")))
            weights = {f"w{n}": torch.zeros(64, 64) for n in range(4)}
            client.update_weights(iter(weights.items()), 0)
            for server in client.servers:
                client.admit(server)
            update = lambda: client.update_weights(iter(weights.items()), 1)
            sync_s, wall_s = min(cpu_s(update) for _ in range(3))

            def lease_all() -> None:
                for _ in range(2000):
                    with client.lease():
                        pass

            # As rollouts lease them: not in the trainer's thread.
            with ThreadPoolExecutor(1) as other:
                lease_s, _ = cpu_s(lambda: other.submit(lease_all).result())
            watch_s, watched_s = cpu_s(lambda: time.sleep(2 if is_quick else 10))
            metrics_s, _ = cpu_s(lambda: [client.idle_seconds() for _ in range(100)])
    busy = lease_s / 2000 * GROUPS_PER_S + watch_s / watched_s
    return {
        "part": "servers",
        "servers": num,
        "connect_ms_each": connect_s / num * 1e3,
        "lease_us": lease_s / 2000 * 1e6,
        "metrics_us": metrics_s / 100 * 1e6,
        "bookkeeping_percent": 100 * busy,
        "sync_cpu_ms_each": sync_s / num * 1e3,
        "sync_s": wall_s,
    }


# -- network -----------------------------------------------------------------------------------------------------------

SYNC_TIMEOUT_S = 8.0
PORT = 8000
MBIT = 800  # a second, of a link


def run(*command: str) -> None:
    """A command of `ip` that must succeed."""
    subprocess.run(command, check=True)


@contextmanager
def hosts(num: int) -> Iterator[list[str]]:
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
            limit = ["root", "tbf", "rate", f"{MBIT}mbit", "burst", "256kb", "latency", "50ms"]
            run(*of_host, "tc", "qdisc", "add", "dev", "veth0", *limit)
            run(*inside, "tc", "qdisc", "add", "dev", port, *limit)
        yield names
    finally:
        for name in [switch, *names]:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def serve_alone() -> None:
    """A stand-in server on a host, until a signal."""
    with serving(Sink("m", no_answer), ("0.0.0.0", PORT)):
        signal.pause()


def sync(num_servers: int, megabytes: int, has_fault: bool) -> None:
    """The trainer's side; prints the row. With a fault it says when the sync begins."""
    urls = [f"http://10.77.0.{place + 2}:{PORT}" for place in range(num_servers)]
    limit_s = SYNC_TIMEOUT_S if has_fault else 60.0
    pool = ServerPool(make_config(vllm_urls=urls, server_timeout=60.0, sync_timeout=limit_s))
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
    row = {"sync_s": median(times), "serving": len(pool.serving)}
    print(json.dumps(row | {"next_s": seconds(4)}), flush=True)
    os._exit(0)


def through_links(num: int, megabytes: int, fault: str, delay_s: float) -> dict[str, Any]:
    """One row; a fault comes `delay_s` after the beginning of a sync."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with hosts(num + 1) as names, ExitStack() as started:

        def start(name: str, *words: Any) -> Any:
            command = ["ip", "netns", "exec", name, sys.executable, __file__, *map(str, words)]
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
            started.callback(process.wait)
            started.callback(process.kill)
            return process

        servers = [start(name, "--server") for name in names[1:]]
        trainer = start(names[0], "--sync", num, megabytes, fault)
        for line in trainer.stdout:
            if line == "begun\n":
                time.sleep(delay_s)
                servers[0].send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        row: dict[str, Any] = json.loads(line)
    return row


def network(is_quick: bool) -> list[dict[str, Any]]:
    """A sync over limited links to 1 to 8 servers, and to 8 with a fault."""
    megabytes = 64 if is_quick else 336
    link_s = megabytes * 2**20 * 8 / (MBIT * 1e6)
    numbers = (1, 2) if is_quick else (1, 2, 4, 8)
    cases = [(num, "") for num in numbers] + [(numbers[-1], fault) for fault in ("kill", "stop")]
    rows = []
    for num, fault in cases:
        found = through_links(num, megabytes, fault, 0.3 * link_s)
        names = {"part": "network", "servers": num, "fault": fault or "none"}
        rows.append({**names, **found, "over_link": found["sync_s"] / link_s})
    return rows


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS = {part.__name__: part for part in (tokens, servers, network)}


def main() -> None:
    """Command line."""
    match sys.argv[1:]:
        case ["--server"]:
            serve_alone()
        case ["--sync", num, megabytes, fault]:
            sync(int(num), int(megabytes), bool(fault))

    parser = arguments(__doc__, "small sizes, in a minute")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["tokens", "servers"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows(args.json)
    for part in args.parts:
        for row in PARTS[part](args.quick):
            rows.add(row)


if __name__ == "__main__":
    main()
