"""LoRA merged, and the adapter alone: bytes and seconds of a sync, and how far a server in bf16 follows its trainer.

    python benchmarks/adapters.py [--json PATH] [--quick]

A random Qwen3 of 336 MB with adapters of rank 16 on all linear layers, in float32, and the real server, idle. Its
weights are rounded to bfloat16, as those of most checkpoints. `weights` is how the server gets them: `merged`, or
`alone` where it was started with `--enable-lora`. Rows of part `sync`:

  mb          what travels
  sync_s      a whole sync, median of nine
  pause_s     of it, what sampling waits
  tokens_per_s  that the server samples in 16 sequences at once

Rows of part `follows`, server in bfloat16, after `steps` steps of AdamW at `rate` on the log-probs of random tokens:

  moved       how far the steps moved the trainer's log-probs of these tokens: mean |new - old|, nats
  mismatch    mean |server - trainer| after them
  at_start    the same before them: what bf16 computes otherwise
  follows     how much of the move the server made: slope of its own move over the trainer's, 1 where it follows
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import median, report
from benchmarks.local_server import local_server
from benchmarks.step_time import build_random
from config import TrainConfig, lora_options
from prefix_attention import completion_logprobs, pack
from rollouts.servers import ServerPool
from server.messages import Sampled, SampleRequest
from training.lora import add_lora
from training.model import load_model
from vllm_client import Server
from weights.publish import adapter_weights, published_weights

PROMPT = list(range(20, 40))
NUM_TOKENS = 96  # whose log-probs are compared, in each of 4 completions
SYNCS = 9
STEPS = (1, 5, 20)
OPTIONS = {"merged": [], "alone": lora_options(16)}
PUBLISHED = {"merged": published_weights, "alone": adapter_weights}


def round_weights(folder: str) -> None:
    """Leave the digits of bfloat16: others would blur what rounding loses."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.float().save_pretrained(folder)


def make_policy(model: str) -> Any:
    """The model with fresh adapters."""
    torch.manual_seed(0)
    config = TrainConfig(model_id=model, dataset_id="d", reward_funcs=[print], use_peft=True)
    return add_lora(load_model(config), config)


def make_pool(model: str, url: str) -> ServerPool:
    """A trainer's server, connected."""
    config = TrainConfig(
        model_id=model, dataset_id="d", reward_funcs=[print], use_peft=True, vllm_urls=[url]
    )
    pool = ServerPool(config)
    pool.connect(torch.device("cpu"))
    return pool


def send(policy: Any, pool: ServerPool, weights: str, version: int) -> None:
    """Publish the policy; the server serves then."""
    for server in pool.update_weights(PUBLISHED[weights](policy), version):
        pool.admit(server)


# -- A sync ----------------------------------------------------------------------------------------


def syncs(model: str, weights: str) -> dict[str, Any]:
    """A row of part `sync`."""
    policy = make_policy(model)
    num_bytes = sum(tensor.nbytes for _, tensor in PUBLISHED[weights](policy))
    options = ["--max-model-len", "128", "--max-num-seqs", "64", *OPTIONS[weights]]
    times, pauses = [], []
    with local_server(model, Path(model) / f"{weights}.log", *options) as started:
        pool = make_pool(model, started.wait())
        (server,) = pool.servers
        for version in range(SYNCS + 1):
            started_s = time.perf_counter()
            send(policy, pool, weights, version)
            times.append(time.perf_counter() - started_s)
            pauses.append(server.paused_s)
            time.sleep(0.2)

        sampling = {"n": 16, "max_tokens": 64, "ignore_eos": True, "temperature": 1.0}
        rates = []
        for _ in range(4):
            started_s = time.perf_counter()
            server.generate(PROMPT, sampling)
            rates.append(16 * 64 / (time.perf_counter() - started_s))
        pool.close()
    return {
        "part": "sync", "weights": weights, "mb": num_bytes / 1e6,
        "sync_s": median(times[1:]), "pause_s": median(pauses[1:]), "tokens_per_s": median(rates[1:]),
    }  # fmt: skip


# -- A server that follows -------------------------------------------------------------------------


def tokens() -> list[list[int]]:
    """Completions that nobody sampled."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 8000, (4, NUM_TOKENS), generator=generator).tolist()


def trainer_logprobs(policy: Any) -> Tensor:
    """Of the tokens, in float32."""
    (row,) = pack([(PROMPT, tokens())], share_prefix=False)
    return completion_logprobs(policy, row)


def server_logprobs(url: str) -> Tensor:
    """Of the tokens, which the server reads as prompts."""
    columns = []
    for ids in tokens():
        request = SampleRequest(PROMPT + ids, {"max_tokens": 1, "prompt_logprobs": 0})
        (message,) = Server(url, 60.0).post("/sample", request, list[Sampled])
        logprobs = np.frombuffer(message.prompt_logprobs, "<f4").copy()
        columns.append(torch.from_numpy(logprobs[len(PROMPT) - 1 :]))
    return torch.cat(columns)


def trained(model: str, rate: float, num_steps: int) -> tuple[Any, Tensor]:
    """A policy after so many steps, and its log-probs before them."""
    policy = make_policy(model)
    with torch.no_grad():
        before = trainer_logprobs(policy)
    optimizer = torch.optim.AdamW(
        [weight for weight in policy.parameters() if weight.requires_grad],
        lr=rate,
        weight_decay=0.0,
    )
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(NUM_TOKENS).repeat(2)  # as of advantages
    for _ in range(num_steps):
        (-signs * trainer_logprobs(policy)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy, before


def follows(model: str, weights: str, rates: list[float], all_steps: list[int]) -> list[Any]:
    """The rows of part `follows`."""
    options = ["--max-model-len", "128", "--max-num-seqs", "64", "--dtype", "bfloat16"]
    rows = []
    with local_server(model, Path(model) / "bf16.log", *options, *OPTIONS[weights]) as started:
        pool = make_pool(model, started.wait())
        (server,) = pool.servers
        version = 0
        for rate in rates:
            for num_steps in all_steps:
                policy, before = trained(model, rate, num_steps)
                send(make_policy(model), pool, weights, version)
                server_before = server_logprobs(server.url)
                send(policy, pool, weights, version + 1)
                version += 2
                with torch.no_grad():
                    after = trainer_logprobs(policy)
                server_after = server_logprobs(server.url)
                move = after - before
                own_move = server_after - server_before
                rows.append({
                    "part": "follows", "weights": weights, "rate": rate, "steps": num_steps,
                    "moved": move.abs().mean().item(),
                    "mismatch": (server_after - after).abs().mean().item(),
                    "at_start": (server_before - before).abs().mean().item(),
                    "follows": ((move * own_move).sum() / move.square().sum()).item(),
                })  # fmt: skip
        pool.close()
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="a 20 MB model, in a minute")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        size = {"hidden": 256, "layers": 4} if args.quick else {"hidden": 1024, "layers": 6}
        build_random(Path(folder), **size)
        round_weights(folder)
        rows = [syncs(folder, weights) for weights in OPTIONS]
        rates = [1e-4] if args.quick else [1e-5, 1e-4]
        for weights in OPTIONS:
            rows += follows(folder, weights, rates, list(STEPS[:1] if args.quick else STEPS))
        report(rows, args.json)


if __name__ == "__main__":
    main()
