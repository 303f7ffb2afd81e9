"""A sync to the real server: how long it takes, for how long it stops sampling, and how well a server follows.

    python benchmarks/sync.py [--against CHECKOUT] [--json PATH] [--quick] [--parts whole merged alone follows]

A random Qwen3 of 336 MB goes from this process to a server, in float32. Its weights are rounded to bfloat16, as those
of most checkpoints. Parts are how the server gets them:

  whole    all weights; in turn with a plain gloo broadcast of the same bytes to another process
  merged   adapters of rank 16 on all linear layers, merged into the weights
  alone    these adapters alone, to a server that was started with `--enable-lora`
  follows  `merged` and `alone` to a server in bfloat16, after `steps` steps of AdamW at `rate` on the log-probs of
           random tokens

`idle` and `busy` say what the server does meanwhile: nothing, or sample 16 sequences. Columns of the first three:

  mb            what travels
  sync_s        a whole sync, median of nine
  pause_s       of it, what sampling waits
  plain_s       the plain broadcast; `over_plain` is sync_s / plain_s
  tokens_per_s  that an idle server samples in 16 sequences at once

Columns of `follows`:

  moved         how far the steps moved the trainer's log-probs of these tokens: mean |new - old|, nats
  mismatch      mean |server - trainer| after them
  at_start      the same before them: what bf16 computes otherwise
  follows       how much of the move the server made: slope of its own move over the trainer's, 1 where it follows

With `--against` a checkout of another commit is measured in turn with this one, three times; a row has the medians.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PROMPT = list(range(20, 40))
GROUP = 16  # completions of a busy server
SYNCS = 9
TIMEOUT_S = 600.0  # of a plain broadcast
NUM_TOKENS = 96  # whose log-probs are compared, in each of 4 completions
PARTS = ("whole", "merged", "alone", "follows")


# -- In a process of its own, for one checkout -----------------------------------------------------


def make_policy(model: str, part: str) -> Any:
    """The model, with fresh adapters but in part `whole`."""
    import torch

    from config import TrainConfig
    from training.loading import add_lora
    from training.model import load_model

    torch.manual_seed(0)
    config = TrainConfig(
        model_id=model, dataset_id="d", reward_funcs=[print], use_peft=part != "whole"
    )
    policy = load_model(config)
    return add_lora(policy, config) if config.use_peft else policy


def published(policy: Any, part: str) -> Any:
    """The tensors that travel."""
    from weights.publish import adapter_weights, published_weights

    return adapter_weights(policy) if part == "alone" else published_weights(policy)


class Connection:
    """A trainer's connection to its only server."""

    def __init__(self, pool: Any, part: str):
        self.pool, self.part, self.version = pool, part, 0
        (self.server,) = pool.servers

    def send(self, policy: Any) -> float:
        """Publish the policy; returns the seconds."""
        started_s = time.perf_counter()
        for waiting in self.pool.update_weights(published(policy, self.part), self.version):
            self.pool.admit(waiting)
        self.version += 1
        return time.perf_counter() - started_s

    def sample(self) -> float:
        """Sample a group; returns its tokens a second."""
        sampling = {"n": GROUP, "max_tokens": 64, "ignore_eos": True, "temperature": 1.0}
        started_s = time.perf_counter()
        self.server.generate(PROMPT, sampling)
        return GROUP * 64 / (time.perf_counter() - started_s)


@contextmanager
def connected(model: str, part: str, *options: str) -> Iterator[Connection]:
    """A server of the model, which ends with the block."""
    import torch

    from benchmarks.local_server import local_server
    from config import TrainConfig, lora_options
    from rollouts.servers import ServerPool

    words = ["--max-model-len", "128", "--max-num-seqs", "64", *options]
    words += lora_options(16) if part == "alone" else []
    with local_server(model, Path(model) / "server.log", *words) as started:
        config = TrainConfig(
            model_id=model, dataset_id="d", reward_funcs=[print], vllm_urls=[started.wait()],
            use_peft=part != "whole",
        )  # fmt: skip
        with closing(ServerPool(config)) as pool:
            pool.connect(torch.device("cpu"))
            yield Connection(pool, part)


def receive(ports: Any, num_bytes: int, repeats: int) -> None:
    """The other end of a plain broadcast."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", ports.get(), is_master=False)
    group: Any = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=TIMEOUT_S))
    data = torch.empty(num_bytes, dtype=torch.uint8)
    for _ in range(repeats):
        group.broadcast([data], dist.BroadcastOptions()).wait()


class PlainBroadcast:
    """The same bytes over gloo to another process, `repeats` times and no less."""

    def __init__(self, num_bytes: int, repeats: int):
        import torch
        import torch.distributed as dist

        spawn = multiprocessing.get_context("spawn")
        ports = spawn.Queue()
        spawn.Process(target=receive, args=(ports, num_bytes, repeats), daemon=True).start()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports.put(self.store.port)
        self.group: Any = dist.ProcessGroupGloo(self.store, 0, 2, timedelta(seconds=TIMEOUT_S))
        self.data = torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self) -> float:
        """Seconds of one broadcast."""
        from torch.distributed import BroadcastOptions

        started_s = time.perf_counter()
        self.group.broadcast([self.data], BroadcastOptions()).wait()
        return time.perf_counter() - started_s


def syncs(model: str, part: str) -> list[dict[str, Any]]:
    """The rows of an idle server and, of all weights, of a busy one."""
    policy = make_policy(model, part)
    num_bytes = sum(tensor.nbytes for _, tensor in published(policy, part))
    states = ("idle", "busy") if part == "whole" else ("idle",)
    rows = []
    with connected(model, part) as to:
        plain = PlainBroadcast(num_bytes, 2 * SYNCS) if part == "whole" else None
        to.send(policy)
        for state in states:
            is_over = threading.Event()

            def ask(is_over: threading.Event = is_over) -> None:
                while not is_over.is_set():
                    to.sample()

            asking = threading.Thread(target=ask)
            if state == "busy":
                asking.start()
                time.sleep(3.0)  # the first batches are slow
            times: dict[str, list[float]] = {"sync_s": [], "pause_s": []}
            for _ in range(SYNCS):
                times["sync_s"].append(to.send(policy))
                times["pause_s"].append(to.server.paused_s)
                if plain:
                    times.setdefault("plain_s", []).append(plain.send())
                time.sleep(0.2)
            if state == "busy":
                is_over.set()
                asking.join()
            else:
                times["tokens_per_s"] = [to.sample() for _ in range(4)]
            middle = {name: sorted(found)[len(found) // 2] for name, found in times.items()}
            names = {"part": part, "server": state, "mb": num_bytes / 1e6}
            rows.append({**names, **middle})
    return rows


def tokens() -> list[list[int]]:
    """Completions that nobody sampled."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 8000, (4, NUM_TOKENS), generator=generator).tolist()


def trainer_logprobs(policy: Any) -> Any:
    """Of the tokens, in float32."""
    from prefix_attention import completion_logprobs, pack

    (row,) = pack([(PROMPT, tokens())], share_prefix=False)
    return completion_logprobs(policy, row)


def server_logprobs(server: Any) -> Any:
    """Of the tokens, which the server reads as prompts."""
    import numpy as np
    import torch

    from server.messages import Sampled, SampleRequest

    columns = []
    for ids in tokens():
        request = SampleRequest(PROMPT + ids, {"max_tokens": 1, "prompt_logprobs": 0})
        (message,) = server.post("/sample", request, list[Sampled])
        logprobs = np.frombuffer(message.prompt_logprobs, "<f4").copy()
        columns.append(torch.from_numpy(logprobs[len(PROMPT) - 1 :]))
    return torch.cat(columns)


def train(policy: Any, rate: float, num_steps: int) -> None:
    """Move the log-probs of the tokens, half of them up."""
    import torch

    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(NUM_TOKENS).repeat(2)  # as of advantages
    for _ in range(num_steps):
        (-signs * trainer_logprobs(policy)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def follows(model: str, part: str, is_quick: bool) -> list[dict[str, Any]]:
    """The rows of a server in bfloat16."""
    import torch

    rows = []
    cases = [(rate, steps) for rate in (1e-5, 1e-4) for steps in (1, 5, 20)]
    with connected(model, part, "--dtype", "bfloat16") as to, torch.no_grad():
        for rate, num_steps in cases[:1] if is_quick else cases:
            policy = make_policy(model, part)
            before = trainer_logprobs(policy)
            to.send(policy)
            server_before = server_logprobs(to.server)
            with torch.enable_grad():
                train(policy, rate, num_steps)
            to.send(policy)
            after = trainer_logprobs(policy)
            server_after = server_logprobs(to.server)
            move, own_move = after - before, server_after - server_before
            rows.append({
                "part": "follows", "weights": part, "rate": rate, "steps": num_steps,
                "moved": move.abs().mean().item(),
                "mismatch": (server_after - after).abs().mean().item(),
                "at_start": (server_before - before).abs().mean().item(),
                "follows": ((move * own_move).sum() / move.square().sum()).item(),
            })  # fmt: skip
    return rows


def of_checkout(model: str, parts: list[str], is_quick: bool) -> list[dict[str, Any]]:
    """All rows of the checkout that is first on the path."""
    import torch

    torch.set_num_threads(1)
    rows = []
    for part in parts:
        if part == "follows":
            rows += follows(model, "merged", is_quick) + follows(model, "alone", is_quick)
        else:
            rows += syncs(model, part)
    return rows


# -- The command line ------------------------------------------------------------------------------


def build(folder: Path, is_quick: bool) -> None:
    """A random model, with the digits of bfloat16 alone: others would blur what rounding loses."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.step_time import build_random

    size = {"hidden": 256, "layers": 4} if is_quick else {"hidden": 1024, "layers": 6}
    build_random(folder, **size)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.float().save_pretrained(folder)


def main() -> None:
    """Measure the checkouts in turn, and print and write the medians."""
    if sys.argv[1:2] == ["--child"]:
        model, is_quick, *parts = sys.argv[2:]
        print(json.dumps(of_checkout(model, parts, is_quick == "True")), flush=True)
        os._exit(0)

    sys.path[:0] = [str(HERE), str(HERE / "scripts")]
    from benchmarks.common import arguments, by_turns, median, report

    parser = arguments(__doc__, "a 20 MB model, once, in some minutes", "syncs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), args.quick)
        turns = 3 if args.against and not args.quick else 1
        found = by_turns(
            [__file__, "--child", folder, args.quick, *args.parts], args.against, turns
        )
    rows = []
    for when, runs in found.items():
        for number, first in enumerate(runs[0]):
            of_turns = [run[number] for run in runs]
            row = {"when": when, **first}
            for name, value in first.items():
                if isinstance(value, float):
                    row[name] = median([one[name] for one in of_turns])
            if "plain_s" in first:
                row["over_plain"] = median([one["sync_s"] / one["plain_s"] for one in of_turns])
            rows.append(row)
    report(rows, args.json)


if __name__ == "__main__":
    main()
