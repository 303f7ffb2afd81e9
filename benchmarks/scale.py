"""What rank 0, the servers and the loading cost, and how these costs grow: measured on one machine, without GPUs.

    python benchmarks/scale.py [--parts tokens ranks servers loading rank0] [--against CHECKOUT] --json PATH

    tokens    rank 0's CPU time per completion token, from the bytes of a reply to the bytes for the other ranks
    ranks     the same of dealing alone, for as many ranks as there may be; none of them is started
    servers   CPU time of the trainer with stand-in servers: connecting, leasing, watching, syncing
    loading   peak memory of all ranks together while FSDP2 loads a model of 350 MB
    rank0     a step on rank 0, while rollouts arrive at 200,000 tokens/s, against rank 1's and one without rollouts

Every part runs in a process of its own. With `--against` each runs for that checkout, too, of another commit.
"""

import argparse
import importlib
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent.parent
RATE = 200_000  # completion tokens per second that the stand-in servers of `rank0` deliver
GROUPS_PER_S = 50  # at which the servers' bookkeeping is stated


def found(name: str, *modules: str) -> Any:
    """A name of the measured checkout, whose commit may have it in another module."""
    for module in modules:
        with suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"{root()} has no {name} in {' or '.join(modules)}")


def best_us(call: Any, num_tokens: float, repeats: int) -> tuple[float, Any]:
    """The least time of a call in us per token, as everything else on the machine only adds to it; and its result."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - started)
    return min(times) / num_tokens * 1e6, result


# -- tokens and ranks --------------------------------------------------------------------------------------------------


def reply_bytes(num: int, length: int, seed: int = 0) -> bytes:
    """The body of a reply with `num` completions, as the checkout's server writes it."""
    import msgspec

    from server import messages

    rng = random.Random(seed)
    replies: list[Any] = []
    for index in range(num):
        ids = array("i", [rng.randrange(150_000) for _ in range(length)])
        logprobs = array("f", [-3 * rng.random() for _ in range(length)])
        reply: Any = messages.Sampled(finish_reason="stop", weight_versions=[("999", 0, length)])
        reply.token_ids, reply.logprobs = ids.tobytes(), logprobs.tobytes()
        if streams():
            reply.index = index
        replies.append(reply)
    if streams():
        return b"".join(map(found("packed", "server.messages"), replies))
    return msgspec.msgpack.encode(replies)


def streams() -> bool:
    """True of an older checkout, whose replies come in parts."""
    from server import messages

    return hasattr(messages, "packed")


def read_reply(body: bytes, num: int) -> Any:
    """Its completions, as the checkout's client reads them."""
    import msgspec

    import vllm_client
    from server.messages import Sampled

    if streams():
        reply: Any = SimpleNamespace(iter_content=lambda _: [body])
        return found("all_choices", "vllm_client")(num, reply)[0]
    return [vllm_client.completion_of(m) for m in msgspec.msgpack.decode(body, type=list[Sampled])]


def make_config(**fields: Any) -> Any:
    """A configuration for a part of a run."""
    from config import TrainConfig

    return TrainConfig(
        **{"model_id": "m", "dataset_id": "d", "reward_funcs": [lambda **_: []], **fields}
    )


def make_groups(num: int, prompt: int, completion: int, generations: int) -> tuple[Any, list[Any]]:
    """`num` scored groups, made of the bytes of a few replies again and again; and what reads the next of these."""
    group_type = found("Group", "rollouts.group", "rollouts.data")
    prompt_type = found("Prompt", "rollouts.group", "rollouts.data")
    rng = random.Random(0)
    bodies = [reply_bytes(generations, completion, seed) for seed in range(min(num, 4))]

    def read(number: int) -> Any:
        return read_reply(bodies[number % len(bodies)], generations)

    few = [read(number) for number in range(len(bodies))]
    groups = []
    for number in range(num):
        ids = [rng.randrange(150_000) for _ in range(prompt)]
        completions = list(few[number % len(few)])
        rewards = [rng.random() for _ in range(generations)]
        groups.append(
            group_type(
                prompt_type(number, ids, "", {}), completions=completions, reward=rewards, id=number
            )
        )
    return read, groups


def deal(groups: list[Any], num_ranks: int, config: Any) -> list[Any]:
    """What each rank gets of groups that come one after the other, a row of each at a time, as `Rollouts.take` does."""
    from train import set_advantages

    dealer_type = found("Dealer", "training.batching", "train")
    dealer, dealt, taken = dealer_type(num_ranks, config), [], []
    room = dealer.missing_tokens()
    for number, group in enumerate(groups):
        set_advantages([group], config)
        taken.append(group)
        room -= len(group.prompt.token_ids) + sum(len(c.token_ids) for c in group.completions)
        if (is_last := number == len(groups) - 1) or room <= 0:
            dealt.append(dealer.deal(taken, is_last))
            taken, room = [], dealer.missing_tokens()
    return dealt


def tokens(quick: bool) -> list[dict[str, Any]]:
    """us per completion token of each stage, for completions, groups and prompts of several sizes."""
    lengths = [(512, length, 16) for length in ((32, 512) if quick else (32, 128, 512, 2048, 8192))]
    sizes = [(512, 512, size) for size in (() if quick else (2, 8, 64, 256))]
    prompts = [(prompt, 64, 16) for prompt in (() if quick else (32, 8192))]
    rows = []
    for prompt, completion, generations in lengths + sizes + prompts:
        of_group = completion * generations
        num = max(2, min(256, (60_000 if quick else 400_000) // (of_group + prompt)))
        config = make_config(max_tokens_per_gpu=65_536, batch_size=num, num_generations=generations)
        read, groups = make_groups(num, prompt, completion, generations)
        repeats = 2 if quick else 5
        reply, _ = best_us(lambda: [read(n) for n in range(num)], num * of_group, repeats)
        dealing, dealt = best_us(lambda: deal(groups, 2, config), num * of_group, repeats)
        dumping, sent = best_us(
            lambda: [[pickle.dumps(s) for s in d] for d in dealt], num * of_group, repeats
        )
        loading, _ = best_us(
            lambda: [pickle.loads(d[1]) for d in sent], num * of_group / 2, repeats
        )
        stages = {
            "reply": reply,
            "deal": dealing,
            "scatter": dumping,
            "rank_0": reply + dealing + dumping,
        }
        sizes_of = {"prompt": prompt, "completion": completion, "generations": generations}
        rows.append(
            {
                **sizes_of,
                **{f"{name}_us": us for name, us in stages.items()},
                "other_ranks_us": loading,
            }
        )
    return rows


def ranks(quick: bool) -> list[dict[str, Any]]:
    """us per completion token of dealing a batch of a few rows for each rank."""
    rows = []
    for num_ranks in (8, 32) if quick else (8, 64, 256, 1024):
        config = make_config(max_tokens_per_gpu=4096, batch_size=2 * num_ranks, num_generations=4)
        _, groups = make_groups(2 * num_ranks, 256, 400, 4)
        num_tokens = 2 * num_ranks * 4 * 400
        dealing, dealt = best_us(lambda: deal(groups, num_ranks, config), num_tokens, 3)
        dumping, sent = best_us(
            lambda: [[pickle.dumps(s) for s in d] for d in dealt], num_tokens, 3
        )
        mb = sum(len(data) for of_rank in sent for data in of_rank) / 1e6
        us = {"deal_us": dealing, "scatter_us": dumping, "bytes_per_token": mb / num_tokens * 1e6}
        rows.append({"ranks": num_ranks, **us})
    return rows


# -- servers -----------------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """The routes of a rollout server, for all stand-ins of a process: they differ by the address that was asked."""

    protocol_version = "HTTP/1.1"
    groups: dict[str, Any] = {}  # noqa: RUF012
    coming: dict[str, Any] = {}  # noqa: RUF012  # the meeting of an update
    threads = ThreadPoolExecutor(1024)
    body = b"{}"  # of every completion
    delay_s = 0.0

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        """As POST."""
        self.do_POST()

    def do_POST(self) -> None:
        """One request."""
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"
        status = 200
        path, host, reply = self.path.partition("?")[0], self.headers["Host"], b"{}"
        if path == "/connect":
            self.hold(json.loads(data))
            return
        if path == "/update":
            reply = self.update(host, data)
            status = 200 if reply else 409
        elif path == "/sample":
            time.sleep(self.delay_s)
            reply = self.body
        else:  # of an older checkout
            reply = self.old_route(path, host, data)
        self.answer(reply, status)

    def answer(self, reply: bytes, status: int = 200) -> None:
        """Send a whole reply."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        if self.close_connection:  # as asked: else the client may take it for open
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(reply)

    def hold(self, request: dict[str, Any]) -> None:
        """Tell about the server, and keep a trainer's connection until it hangs up."""
        import msgspec

        from server.messages import About

        line = msgspec.json.encode(About(["m"], 10**6, "float32", 0, False, [None])) + b"\n"
        if not request.get("trainer"):
            return self.answer(line)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(line)
        self.close_connection = True
        with suppress(OSError):
            self.connection.recv(1)
        return None

    def update(self, host: str, data: bytes) -> bytes:
        """Take an update; returns nothing where it does not come, or is given up."""
        if streams():
            while self.groups[host].receive():
                pass
            return b'{"paused_s": 0}'
        import msgspec

        from server.messages import Updated, UpdateRequest

        self.coming[host] = meeting = msgspec.json.decode(data, type=UpdateRequest).meeting
        if meeting:
            taking = self.threads.submit(self.take, host, meeting)
            while not taking.done() and self.coming[host] is meeting:
                time.sleep(1e-3)
            if not taking.done() or taking.exception():
                return b""
        return msgspec.msgpack.encode(Updated())

    def take(self, host: str, meeting: Any) -> None:
        """Take the buckets of an update."""
        import torch

        from weights.group import WeightGroup

        group = self.groups.get(host)
        if not group or group.meeting != meeting:
            group = WeightGroup(meeting, meeting.first_rank, torch.device("cpu"))
            self.groups[host] = group
        try:
            while group.receive():
                pass
        except RuntimeError:
            group.close()
            raise

    def old_route(self, path: str, host: str, data: bytes) -> bytes:
        """The answer of a server that older checkouts speak with."""
        from server.messages import VLLM_VERSIONS

        if path == "/version":
            return json.dumps({"version": VLLM_VERSIONS[0]}).encode()
        if path == "/v1/models":
            model = {"id": "m", "root": "m", "max_model_len": 10**6}
            return json.dumps({"data": [model]}).encode()
        if path == "/get_world_size":
            return b'{"world_size": 1}'
        if path == "/init_weight_transfer_engine":
            self.join(host, json.loads(data)["init_info"])
        return b"{}"

    def join(self, host: str, info: dict[str, Any]) -> None:
        """Enter the group that an older trainer has with each server."""
        from datetime import timedelta

        import torch
        from torch.distributed import TCPStore

        limit = timedelta(seconds=info["timeout_s"])
        store = TCPStore(info["host"], info["port"], is_master=False, timeout=limit)
        group_type = found("WorkerGroup", "weights.arrival")
        self.groups[host] = group_type(
            store, 1, info["world_size"], torch.device("cpu"), info["timeout_s"]
        )


class Listener(ThreadingHTTPServer):
    """Many servers at one port: each has an address of its own in 127/8."""

    daemon_threads = True
    request_queue_size = 4096


def stand_ins(delay_s: float = 0.0, generations: int = 0, length: int = 0) -> None:
    """Serve until standard input ends, after a line with the port."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if generations:
        Handler.body, Handler.delay_s = reply_bytes(generations, length), delay_s
    listener = Listener(("0.0.0.0", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    print(listener.server_address[1], flush=True)
    sys.stdin.read()
    os._exit(0)


class StandIns:
    """`num` servers in one process, while the block runs; `urls` are theirs."""

    def __init__(self, num: int, *arguments: float):
        command = [
            sys.executable,
            __file__,
            "--checkout",
            str(root()),
            "--child",
            "stand_ins",
            *map(str, arguments),
        ]
        env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # an address in 127/8 has no name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.process.stdout
        port = int(self.process.stdout.readline())
        self.urls = [f"http://127.0.{n // 250 + 1}.{n % 250 + 1}:{port}" for n in range(num)]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)


def cpu_s(call: Any) -> tuple[float, float]:
    """Seconds of this process's processor time that a call takes, and those on the clock."""
    started, began = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - started, time.perf_counter() - began


def servers(quick: bool) -> list[dict[str, Any]]:
    """CPU time of the trainer for 1 to 500 servers that answer at once and compute nothing."""
    import torch

    from rollouts.servers import ServerPool

    rows = []
    for num in (1, 8) if quick else (1, 8, 64, 500):
        with closing(StandIns(num)) as started:
            config = make_config(vllm_urls=started.urls, request_timeout=120.0)
            with closing(ServerPool(config)) as client:
                client.wait_until_ready()
                connect_s, _ = cpu_s(lambda: client.connect(torch.device("cpu")))
                weights = {f"w{n}": torch.zeros(64, 64) for n in range(4)}
                client.update_weights(iter(weights.items()), 0)
                for server in client.servers:
                    client.admit(server)
                sync_s, wall_s = min(
                    cpu_s(lambda: client.update_weights(iter(weights.items()), 1)) for _ in range(3)
                )

                def lease_all(times: int) -> None:
                    with ThreadPoolExecutor(
                        1
                    ) as pool:  # as rollouts do it: another thread than the trainer's
                        pool.submit(lambda: [lease() for _ in range(times)]).result()

                def lease() -> Any:
                    with client.lease():
                        pass

                lease_s, _ = cpu_s(lambda: lease_all(2000))
                watch_s, watched_s = cpu_s(lambda: time.sleep(2 if quick else 10))
                metrics_s, _ = cpu_s(lambda: [client.idle_seconds() for _ in range(100)])
                rows.append(
                    {
                        "servers": num,
                        "connect_ms_each": connect_s / num * 1e3,
                        "lease_us": lease_s / 2000 * 1e6,
                        "metrics_us": metrics_s / 100 * 1e6,
                        "bookkeeping_percent": 100
                        * (lease_s / 2000 * GROUPS_PER_S + watch_s / watched_s),
                        "sync_cpu_ms_each": sync_s / num * 1e3,
                        "sync_s": wall_s,
                    }
                )
    return rows


# -- loading -----------------------------------------------------------------------------------------------------------


def anonymous_mb(pid: int) -> float:
    """Memory of a process that is its own: without the files that it has mapped."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) / 1e3
    return 0.0


def load_on_rank(model: str, folder: str, dtype: str) -> None:
    """Runs on every rank: says when it begins and what its own pid is, and loads."""
    from training.model import build_policy
    from utils import process_group

    with process_group(300) as device:
        import torch.distributed as dist
        import transformers  # noqa: F401  # its memory is not the model's

        config = make_config(model_id=model, use_fsdp=True, dtype=dtype)
        rank = dist.get_rank()
        (Path(folder) / f"ready{rank}").write_text(str(os.getpid()))
        while not (Path(folder) / "go").exists():
            time.sleep(0.01)
        policy = build_policy(config, device)
        (Path(folder) / f"done{rank}").write_text("")
        while not (Path(folder) / "end").exists():
            time.sleep(0.01)
        del policy


def loaded(
    checkpoint: str, size_mb: float, dtype: str, num_ranks: int, folder: Path
) -> dict[str, float]:
    """A row of `loading`: the ranks speak to this process by files in `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks)]
    command += ["--master_port", str(free_port()), __file__, "--checkout", str(root())]
    command += ["--child", "load_on_rank", checkpoint, str(folder), dtype]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wait_for(folder, "ready", num_ranks, process)
    pids = [int((folder / f"ready{rank}").read_text()) for rank in range(num_ranks)]
    time.sleep(1)

    before = sum(map(anonymous_mb, pids))
    (folder / "go").touch()
    peak, started = before, time.perf_counter()
    while len(list(folder.glob("done*"))) < num_ranks and process.poll() is None:
        peak = max(peak, sum(map(anonymous_mb, pids)))
        time.sleep(0.002)
    took_s = time.perf_counter() - started
    after = sum(map(anonymous_mb, pids))
    (folder / "end").touch()
    if process.wait(120):
        raise RuntimeError(f"the ranks ended with {process.returncode}")
    return {
        "peak_of_checkpoint": (peak - before) / size_mb,
        "after": (after - before) / size_mb,
        "seconds": took_s,
    }


def loading(quick: bool) -> list[dict[str, Any]]:
    """The peak of all ranks' memory together, above what they had before, over the size of the checkpoint."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    small: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    large: Any = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 11}
    shape: Any = {
        "vocab_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 96,
    }
    rows, full, half = [], "float32", "bfloat16"
    cases = [(full, full, num) for num in ((1, 2) if quick else (1, 2, 4))]
    cases += [] if quick else [(half, kept, num) for kept in (half, full) for num in (1, 2, 4)]
    with TemporaryDirectory() as path:
        sizes_mb = {}
        for stored in {case[0] for case in cases}:
            model = Qwen3ForCausalLM(Qwen3Config(**shape, **(small if quick else large))).to(
                getattr(torch, stored)
            )
            sizes_mb[stored] = sum(weight.nbytes for weight in model.parameters()) / 1e6
            model.save_pretrained(f"{path}/{stored}", max_shard_size="100MB")
            del model
        for stored, kept, num_ranks in cases:
            about = {"checkpoint": stored, "dtype": kept, "ranks": num_ranks}
            about["checkpoint_mb"] = sizes_mb[stored]
            folder = Path(path) / f"{stored}-{kept}-{num_ranks}"
            folder.mkdir()
            checkpoint = f"{path}/{stored}"
            rows.append(about | loaded(checkpoint, sizes_mb[stored], kept, num_ranks, folder))
    return rows


def wait_for(folder: Path, word: str, num: int, process: Any) -> None:
    """Wait for a file of every rank."""
    while len(list(folder.glob(f"{word}*"))) < num:
        if process.poll() is not None:
            raise RuntimeError(f"the ranks ended with {process.returncode}")
        time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens at."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- rank 0 ------------------------------------------------------------------------------------------------------------


class Device:
    """What a GPU is to the thread that launches work: it is done one after the other, while the thread goes on."""

    def __init__(self) -> None:
        self.free_s = 0.0

    def run(self, seconds: float) -> None:
        """Launch work of so many seconds."""
        self.free_s = max(self.free_s, time.perf_counter()) + seconds

    def synchronize(self) -> None:
        """Wait for its end."""
        time.sleep(max(0.0, self.free_s - time.perf_counter()))


def make_rollouts(urls: list[str], num_steps: int, config: Any) -> Any:
    """The rollouts of a run without data, rewards and policy; real clients and a real stream."""
    from rollouts.group import Group, Prompt
    from rollouts.rollouts import Rollouts
    from rollouts.servers import ServerPool
    from rollouts.stream import GroupStream
    from utils import is_main

    rollouts: Any = Rollouts.__new__(Rollouts)
    rollouts.config, rollouts.stop, rollouts.failure = config, threading.Event(), None
    rollouts.waited_s, rollouts.servers_sleep = 0.0, False
    if not is_main():
        return rollouts
    rollouts.pool = ServerPool(config)
    for server in rollouts.pool.servers:
        rollouts.pool.admit(server)
    ids = list(range(512))
    sampling = {"n": config.num_generations, "max_tokens": config.max_completion_len}

    def fill(group: Any) -> None:
        with rollouts.pool.lease() as server:
            completions = server.generate(ids, sampling)
        for number, completion in enumerate(completions):  # else they were one, and shared all
            completion.token_ids[0] = group.id * len(completions) + number
        group.fill(completions)
        group.reward = [random.random() for _ in group.completions]

    choose = lambda first: [Group(Prompt(first, ids, "", {}), id=first)]
    rollouts.stream = GroupStream(choose, fill, num_steps, config)
    return rollouts


def train_on_rank(folder: str, num_steps: str, row_s: str, *urls: str) -> None:
    """Runs on two ranks: steps with rollouts that arrive, or without `urls` steps on data that is there."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import train
    from utils import broadcast_object, is_main, process_group

    # As many calls of kernels as a model of 28 layers needs, on next to nothing.
    sizes: Any = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_hidden_layers=28, head_dim=16, **sizes))
    ids = torch.arange(8)[None]
    config = make_config(
        vllm_urls=list(urls) or ["http://none"], batch_size=12, num_generations=16, max_completion_len=2048,
        max_tokens_per_gpu=36_000,
    )  # fmt: skip
    times: dict[str, list[float]] = {"step_s": [], "busy_s": [], "launch_s": []}
    here: Any = train
    arriving = getattr(here, "arriving_rows", None) or here.arriving_shares  # an older checkout
    with process_group(300) as device:
        rollouts = make_rollouts(list(urls), int(num_steps), config)
        _, groups = make_groups(12, 512, 2048, 16) if not urls and is_main() else (None, [])
        ready: Any = [[], []]
        if groups:
            ready = [list(of_rank) for of_rank in zip(*deal(groups, 2, config), strict=True)]
        stored = broadcast_object(ready)[dist.get_rank()]
        for step in range(int(num_steps)):
            if urls and is_main():
                rollouts.stream.advance_to(step)
                rollouts.version = step
            broadcast_object(None)
            started_s, gpu, launch_s, busy_from = time.perf_counter(), Device(), 0.0, 0.0
            items = arriving(rollouts, config) if urls else chain.from_iterable(stored)
            for item in items:
                busy_from = busy_from or time.perf_counter()
                for row in getattr(item, "micro_batches", [item]):
                    began_s = time.perf_counter()
                    row.to(device)
                    model(input_ids=ids).logits.sum().backward()
                    gpu.run(float(row_s))
                    launch_s += time.perf_counter() - began_s
            gpu.synchronize()
            ended_s = time.perf_counter()
            if urls and is_main():
                rollouts.stream.end_batch()
            for name, value in zip(
                times, (ended_s - started_s, ended_s - busy_from, launch_s), strict=True
            ):
                times[name].append(value)
        (Path(folder) / f"rank{dist.get_rank()}").write_text(json.dumps(times))
        broadcast_object(None)
        os._exit(0)  # requests are in flight


def rank0(quick: bool) -> list[dict[str, Any]]:
    """Seconds of a step on both ranks, with data that arrives and with data that is there."""
    from statistics import median

    num_steps, row_s = (
        (3, 0.05) if quick else (12, 12 * 16 * 2048 / RATE / 6)
    )  # 12 groups in rows of one, on two ranks
    delay_s = (
        0.02 if quick else 1.0
    )  # half a step: replies come in while the batch before is trained
    rows = []
    with TemporaryDirectory() as path, closing(StandIns(4, delay_s, 16, 2048)) as started:
        for data, urls in (("there", []), ("arrives", started.urls)) * (1 if quick else 2):
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
            command += [
                "--master_port",
                str(free_port()),
                __file__,
                "--checkout",
                str(root()),
                "--child",
            ]
            command += ["train_on_rank", path, str(num_steps), str(row_s), *urls]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            for rank in (0, 1):
                found = json.loads((Path(path) / f"rank{rank}").read_text())
                means = {
                    name: median(values[2:]) for name, values in found.items()
                }  # the first waits for its data
                tokens_per_s = 12 * 16 * 2048 / means["step_s"]
                rows.append({"data": data, "rank": rank, **means, "tokens_per_s": tokens_per_s})
    return rows


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS = {part.__name__: part for part in (tokens, ranks, servers, loading, rank0)}
CHILDREN = {child.__name__: child for child in (load_on_rank, train_on_rank)}


@cache
def root() -> Path:
    """The checkout whose trainer is measured."""
    return Path(sys.argv[sys.argv.index("--checkout") + 1]) if "--checkout" in sys.argv else HERE


PIECES = {  # of rank 0's work on a token, and what they are called in the picture
    "reply_us": "bytes of a reply to tensors",
    "deal_us": "tensors to rows, dealt",
    "scatter_us": "rows to bytes for other ranks",
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Rank 0's work on a completion token, in its pieces, by the length of completions."""
    sys.path.insert(0, str(HERE / "scripts"))
    import plot
    from matplotlib import pyplot as plt

    shown = [
        row
        for row in rows
        if (row["part"], row["when"]) == ("tokens", "now")
        and (row["prompt"], row["generations"]) == (512, 16)
    ]
    shown.sort(key=lambda row: row["completion"])
    names = [f"{row['completion']:,}" for row in shown]
    bottoms = [0.0] * len(shown)
    figure, axes = plt.subplots(figsize=(7, 3.4))
    for piece, label in PIECES.items():
        heights = [row[piece] for row in shown]
        bars = axes.bar(names, heights, bottom=bottoms, width=0.6, label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.bar_label(bars, [f"{total:.2g}" for total in bottoms], padding=2)
    axes.set_title("rank 0's work on a completion token", loc="left", fontsize="medium")
    axes.set_xlabel("tokens of a completion")
    axes.set_ylabel("microseconds")
    axes.legend(frameon=False)
    figure.tight_layout()
    plot.save(figure, path)


def main() -> None:
    """Run the parts, each in a process of its own, and print and write what they found."""
    from common import report, write

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--against", type=Path, help="the checkout of another commit, measured beside this one"
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--picture", type=Path, help="draw rank 0's work on a token, as SVG")
    parser.add_argument("--kept", type=Path, help="rows of an earlier --json, to draw again")
    parser.add_argument("--quick", action="store_true", help="small sizes, in a minute")
    args = parser.parse_args()
    if args.kept:
        draw(json.loads(args.kept.read_text())["rows"], args.picture)
        return
    rows: list[dict[str, Any]] = []
    for part in args.parts:
        for when, checkout in (("before", args.against), ("now", HERE)):
            if checkout:
                command = [
                    sys.executable,
                    __file__,
                    "--checkout",
                    str(checkout.resolve()),
                    "--child",
                    part,
                ]
                command += ["quick"] * args.quick
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rows += [
                    {"part": part, "when": when, **row}
                    for row in json.loads(done.stdout.splitlines()[-1])
                ]
    for part in args.parts:
        report([row for row in rows if row["part"] == part], None)
        print()
    write(rows, args.json)
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    if "--child" in sys.argv:
        sys.path.insert(0, str(root()))
        import torch

        torch.set_num_threads(1)
        name, *words = sys.argv[sys.argv.index("--child") + 1 :]
        if name == "stand_ins":
            stand_ins(*(kind(word) for kind, word in zip((float, int, int), words, strict=False)))
        elif name in CHILDREN:
            CHILDREN[name](*words)
        else:
            print(json.dumps(PARTS[name](bool(words))), flush=True)
        os._exit(0)
    main()
