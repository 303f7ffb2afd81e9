"""What rank 0, the servers and the loading cost, and how these costs grow: measured on one machine, without GPUs.

    python benchmarks/scale.py [--parts tokens ranks servers loading] [--against CHECKOUT] [--json PATH] [--quick]

    tokens    rank 0's CPU time per completion token, from the bytes of a reply to the bytes for the other ranks
    ranks     the same of dealing alone, for as many ranks as there may be; none of them is started
    servers   CPU time of the trainer with stand-in servers: connecting, leasing, watching, syncing
    loading   peak memory of all ranks together while FSDP2 loads a model of 350 MB

Every part runs in a process of its own. With `--against` each runs for that checkout, too, of another commit.
"""

import json
import multiprocessing
import os
import pickle
import random
import resource
import subprocess
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent.parent
GROUPS_PER_S = 50  # at which the servers' bookkeeping is stated
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # an address in 127/8 has no name


def best_us(call: Any, num_tokens: float, repeats: int) -> tuple[float, Any]:
    """The least time of a call in us per token, as everything else on the machine only adds to it; and its result."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - started)
    return min(times) / num_tokens * 1e6, result


# -- tokens and ranks --------------------------------------------------------------------------------------------------


def reply_bytes(num: int, length: int, seed: int) -> bytes:
    """The body of a reply with `num` completions."""
    import msgspec

    from server.messages import Sampled

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
    import msgspec

    import vllm_client
    from server.messages import Sampled

    return [vllm_client.completion_of(m) for m in msgspec.msgpack.decode(body, type=list[Sampled])]


def make_config(**fields: Any) -> Any:
    """A configuration for a part of a run."""
    from config import TrainConfig

    needed = {"model_id": "m", "dataset_id": "d", "reward_funcs": [print]}
    return TrainConfig(**{**needed, **fields})


def make_groups(num: int, prompt: int, completion: int, generations: int) -> tuple[Any, list[Any]]:
    """`num` scored groups, made of the bytes of a few replies again and again; and what reads the next of these."""
    from rollouts.group import Group, Prompt

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
    """What each rank gets of groups that come one after the other, a row of each at a time, as `Rollouts.take` does."""
    from train import set_advantages
    from training.batching import Dealer

    dealer, dealt, taken = Dealer(num_ranks, config), [], []
    room = dealer.missing_tokens()
    for number, group in enumerate(groups):
        set_advantages([group], config)
        taken.append(group)
        room -= len(group.prompt.token_ids) + sum(len(c.token_ids) for c in group.completions)
        if (is_last := number == len(groups) - 1) or room <= 0:
            dealt.append(dealer.deal(taken, is_last))
            taken, room = [], dealer.missing_tokens()
    return dealt


def dumped(dealt: list[Any]) -> list[list[bytes]]:
    """The bytes that travel to each rank."""
    return [[pickle.dumps(share) for share in of_ranks] for of_ranks in dealt]


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
        repeats, total = 2 if quick else 5, num * of_group
        reply, _ = best_us(lambda: [read(n) for n in range(num)], total, repeats)
        dealing, dealt = best_us(lambda: deal(groups, 2, config), total, repeats)
        dumping, sent = best_us(lambda: dumped(dealt), total, repeats)
        loading, _ = best_us(lambda: [pickle.loads(d[1]) for d in sent], total / 2, repeats)
        rows.append({
            "prompt": prompt, "completion": completion, "generations": generations,
            "reply_us": reply, "deal_us": dealing, "scatter_us": dumping,
            "rank_0_us": reply + dealing + dumping, "other_ranks_us": loading,
        })  # fmt: skip
    return rows


def ranks(quick: bool) -> list[dict[str, Any]]:
    """us per completion token of dealing a batch of a few rows for each rank."""
    rows = []
    for num in (8, 32) if quick else (8, 64, 256, 1024):
        config = make_config(max_tokens_per_gpu=4096, batch_size=2 * num, num_generations=4)
        _, groups = make_groups(2 * num, 256, 400, 4)
        num_tokens = 2 * num * 4 * 400
        dealing, dealt = best_us(lambda: deal(groups, num, config), num_tokens, 3)
        dumping, sent = best_us(lambda: dumped(dealt), num_tokens, 3)
        per_token = sum(len(data) for of_rank in sent for data in of_rank) / num_tokens
        us = {"deal_us": dealing, "scatter_us": dumping, "bytes_per_token": per_token}
        rows.append({"ranks": num, **us})
    return rows


# -- servers -----------------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """The routes of a rollout server, for all stand-ins of a process: they differ by the address that was asked."""

    protocol_version = "HTTP/1.1"
    groups: dict[str, Any] = {}  # noqa: RUF012
    coming: dict[str, Any] = {}  # noqa: RUF012  # the meeting of an update
    threads = ThreadPoolExecutor(1024)

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        """As POST."""
        self.do_POST()

    def do_POST(self) -> None:
        """One request."""
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"
        if self.path == "/connect":
            self.hold(json.loads(data))
        elif self.path == "/update":
            reply = self.update(self.headers["Host"], data)
            self.answer(reply, 200 if reply else 409)
        else:
            self.answer(b"{}")

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
            self.answer(line)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(line)
        self.close_connection = True
        with suppress(OSError):
            self.connection.recv(1)

    def update(self, host: str, data: bytes) -> bytes:
        """Take an update; returns nothing where it does not come, or is given up."""
        import msgspec

        from server.messages import UpdateRequest

        self.coming[host] = meeting = msgspec.json.decode(data, type=UpdateRequest).meeting
        if meeting:
            taking = self.threads.submit(self.take, host, meeting)
            while not taking.done() and self.coming[host] is meeting:
                time.sleep(1e-3)
            if not taking.done() or taking.exception():
                return b""
        return msgspec.msgpack.encode(0.0)

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


class Listener(ThreadingHTTPServer):
    """Many servers at one port: each has an address of its own in 127/8."""

    daemon_threads = True
    request_queue_size = 4096


def serve(link: Any) -> None:
    """Serve until the parent ends this process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener = Listener(("0.0.0.0", 0), Handler)
    link.send(listener.server_address[1])
    listener.serve_forever()


@contextmanager
def stand_ins(num: int) -> Any:
    """Addresses of `num` servers in one other process, while the block runs."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=serve, args=(there,), daemon=True)
    process.start()
    port = here.recv()
    try:
        yield [f"http://127.0.{n // 250 + 1}.{n % 250 + 1}:{port}" for n in range(num)]
    finally:
        process.kill()
        process.join()


def cpu_s(call: Any) -> tuple[float, float]:
    """Seconds of this process's processor time that a call takes, and those on the clock."""
    started, began = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - started, time.perf_counter() - began


def servers(quick: bool) -> list[dict[str, Any]]:
    """CPU time of the trainer for 1 to 500 servers that answer at once and compute nothing."""
    return [costs_of_servers(num, quick) for num in ((1, 8) if quick else (1, 8, 64, 500))]


def costs_of_servers(num: int, quick: bool) -> dict[str, Any]:
    """A row of `servers`."""
    import torch

    from rollouts.servers import ServerPool

    with stand_ins(num) as urls:
        config = make_config(vllm_urls=urls, request_timeout=120.0)
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

            with ThreadPoolExecutor(
                1
            ) as other:  # as rollouts lease them: not in the trainer's thread
                lease_s, _ = cpu_s(lambda: other.submit(lease_all).result())
            watch_s, watched_s = cpu_s(lambda: time.sleep(2 if quick else 10))
            metrics_s, _ = cpu_s(lambda: [client.idle_seconds() for _ in range(100)])
    busy = lease_s / 2000 * GROUPS_PER_S + watch_s / watched_s
    return {
        "servers": num,
        "connect_ms_each": connect_s / num * 1e3,
        "lease_us": lease_s / 2000 * 1e6,
        "metrics_us": metrics_s / 100 * 1e6,
        "bookkeeping_percent": 100 * busy,
        "sync_cpu_ms_each": sync_s / num * 1e3,
        "sync_s": wall_s,
    }


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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(num_ranks), __file__, "--child", "load_on_rank"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, checkpoint, str(folder), dtype], env=env)

    def have_all(word: str) -> bool:
        if process.poll():
            raise RuntimeError(f"the ranks ended with {process.returncode}")
        return len(list(folder.glob(f"{word}*"))) == num_ranks

    while not have_all("ready"):
        time.sleep(0.02)
    pids = [int((folder / f"ready{rank}").read_text()) for rank in range(num_ranks)]
    time.sleep(1)

    before = sum(map(anonymous_mb, pids))
    (folder / "go").touch()
    peak, started = before, time.perf_counter()
    while not have_all("done"):
        peak = max(peak, sum(map(anonymous_mb, pids)))
        time.sleep(0.002)
    took_s = time.perf_counter() - started
    after = sum(map(anonymous_mb, pids))
    (folder / "end").touch()
    process.wait(120)
    shares = {"peak_of_checkpoint": (peak - before) / size_mb, "after": (after - before) / size_mb}
    return {**shares, "seconds": took_s}


def loading(quick: bool) -> list[dict[str, Any]]:
    """The peak of all ranks' memory together, above what they had before, over the size of the checkpoint."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: Any = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 11}
    if quick:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Qwen3Config(
        vocab_size=4096, num_attention_heads=8, num_key_value_heads=8, head_dim=96, **shape
    )
    rows, full, half = [], "float32", "bfloat16"
    cases = [(full, full, num) for num in ((1, 2) if quick else (1, 2, 4))]
    cases += [] if quick else [(half, kept, num) for kept in (half, full) for num in (1, 2, 4)]
    with TemporaryDirectory() as path:
        for stored, kept, num_ranks in cases:
            checkpoint = Path(path) / stored
            model = Qwen3ForCausalLM(config).to(getattr(torch, stored))
            size_mb = sum(weight.nbytes for weight in model.parameters()) / 1e6
            model.save_pretrained(checkpoint, max_shard_size="100MB")
            del model
            about = {"checkpoint": stored, "dtype": kept, "ranks": num_ranks}
            folder = Path(path) / f"{stored}-{kept}-{num_ranks}"
            folder.mkdir()
            found = loaded(str(checkpoint), size_mb, kept, num_ranks, folder)
            rows.append({**about, "checkpoint_mb": size_mb, **found})
    return rows


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS = {part.__name__: part for part in (tokens, ranks, servers, loading)}


def main() -> None:
    """Run the parts, each in a process of its own, and print and write what they found."""
    if sys.argv[1:2] == ["--child"]:
        import torch

        torch.set_num_threads(1)
        name, *words = sys.argv[2:]
        if name == "load_on_rank":
            load_on_rank(*words)
        else:
            print(json.dumps(PARTS[name](words == ["True"])), flush=True)
        os._exit(0)

    sys.path[:0] = [str(HERE), str(HERE / "scripts")]
    from benchmarks.common import arguments, by_turns, report, write

    parser = arguments(__doc__, "small sizes, in a minute", "all parts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part in args.parts:
        found = by_turns([__file__, "--child", part, args.quick], args.against, 1)
        own: list[dict[str, Any]] = []
        for when, runs in found.items():
            own += [{"part": part, "when": when, **row} for row in runs[0]]
        report(own, None)
        print()
        rows += own
    write(rows, args.json)


if __name__ == "__main__":
    main()
