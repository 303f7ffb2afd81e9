"""Syncs to the real vLLM beside the trainer on this machine: seconds, pauses, and whether the server follows.

    python benchmarks/real_server.py [--json PATH] [--quick] [--parts small,1.5B,...] [-- OPTIONS OF THE SERVER]

On a GPU the two share it, and the server computes in bf16; on a CPU in fp32.
`--quick` is for a CPU: a smaller model and few steps. Parts:
  small            a random model of 336 MB, all of whose weights travel: a row of syncs, and an update in flight, in the
                   middle of completions: the versions of their tokens, and the mean difference of the trainer's
                   log-probs from the server's, nats, for the tokens before it under the old weights, and for those
                   after it under the new ones
  merged, adapter  syncs of this model (on a GPU 0.6B) with LoRA of rank 16: merged into the weights, and the adapter alone
  follows          both to a server in bf16, after `steps` steps of AdamW at `rate` on the log-probs of random tokens:
                   how far these `moved` (mean, nats), `mismatch` of trainer and server (mean) then and `at_start`, and
                   how much of the move the server made (`follows`: the slope of its own move over the trainer's);
                   on a CPU merged alone
  sleep            on a GPU: a server that sleeps while the trainer trains. `awake_gb` and `asleep_gb` are what it takes
                   of the GPU's memory; `sleep_s` is its way to bed, `wake_s` an update that wakes it
  0.6B, 1.5B, 8B   on a GPU: syncs of random models of these shapes
Syncs are of other weights each. `sync_s` is the whole (median), of which `pause_s` stops sampling; `busy_` is while 16
sequences are sampled. `tokens_per_s` is what an idle server samples in 16 sequences, and `probe` the mean difference of
log-probs under the last weights.
"""

import copy
import importlib.util
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np
import torch
from build_tiny import build_tokenizer

from benchmarks.common import MODELS, Rows, arguments, device_here, median, random_model
from benchmarks.local_server import beside_trainer
from benchmarks.step_time import build_random, train_problems
from config import TrainConfig, lora_options
from prefix_attention import attach, completion_logprobs, pack
from recipes.rewards import exact_match
from rollouts.group import version_spans
from rollouts.rollouts import Rollouts
from server.messages import Sampled, SampleRequest
from training.model import build_policy
from utils import process_group
from weights.publish import adapter_weights, published_weights

SMALL = {"small": {"hidden": 1024, "layers": 6}, "quick": {"hidden": 256, "layers": 4}}
PROMPT = list(range(20, 40))
SAMPLING = {"n": 4, "max_tokens": 100, "ignore_eos": True, "temperature": 1.0}
SEQUENCES = 16  # of a busy server
CASES = [(rate, steps) for rate in (1e-5, 1e-4) for steps in (1, 5, 20)]  # of `follows`
USUAL, QUICK = "small,sleep,adapter,0.6B,1.5B,8B", "small,merged,adapter"


@contextmanager
def served(model: Path, log: Path, *options: str) -> Iterator[tuple[str, float]]:
    """A server for short sequences: its address, and the seconds of its start."""
    words = ["--max-model-len", "128", "--max-num-seqs", "256", *options]
    started = time.perf_counter()
    with beside_trainer(model, log, 2**30, *words) as server:
        yield server.wait(), time.perf_counter() - started


def build(folder: Path, size: str) -> None:
    """A checkpoint of random weights with the digits of bf16: others would blur what rounding loses."""
    if size in SMALL:
        build_random(folder, **SMALL[size])
        return
    random_model(MODELS[size], device_here(), torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    torch.cuda.empty_cache()


def free_gb() -> float:
    """Memory that is free on the GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] / 1e9 if torch.cuda.is_available() else 0.0


class Session(NamedTuple):
    """A trainer's policy and its server."""

    policy: Any
    rollouts: Rollouts
    device: torch.device
    start_s: float  # of the server
    server_gb: float  # that it takes of the GPU

    @property
    def server(self) -> Any:
        """The only one."""
        return self.rollouts.pool.servers[0]

    def probe(self) -> float:
        """The mean difference of the trainer's log-probs from the server's, nats."""
        replies = self.server.generate(PROMPT, SAMPLING)
        of_replies = [differences(self.policy, reply, self.device) for reply in replies]
        return torch.cat(of_replies).mean().item()

    def sync(self) -> float:
        """Publish other weights; returns the seconds."""
        version = self.rollouts.version + 1
        disturbed(self.policy, self.device, version)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        self.rollouts.publish(self.policy, version)
        return time.perf_counter() - started

    def sample(self) -> float:
        """Sample a group; returns its tokens a second."""
        started = time.perf_counter()
        self.server.generate(PROMPT, SAMPLING | {"n": SEQUENCES})
        return SEQUENCES * 100 / (time.perf_counter() - started)


@contextmanager
def session(model: Path, policy: Any, *options: str, **fields: Any) -> Iterator[Session]:
    """A server of a checkpoint, and a policy that was published to it; the checkpoint's where None is given."""
    before_gb = free_gb()
    server = served(model, Path(f"{model}.log"), *options)
    with server as (url, start_s), process_group(120) as device:
        server_gb = before_gb - free_gb()
        config = TrainConfig(
            model_id=str(model), vllm_urls=[url], dataset_id=train_problems, reward_funcs=[exact_match],
            no_apply_chat_template=True, max_completion_len=100, output_dir=f"{model}-run", reward_workers=1,
            **fields,
        )  # fmt: skip
        with closing(Rollouts(config, device)) as rollouts:
            if policy is None:
                policy = build_policy(config, device)
            attach(policy)
            rollouts.publish(policy, 0)
            yield Session(policy, rollouts, device, start_s, server_gb)


@torch.no_grad()
def disturbed(policy: Any, device: torch.device, seed: int) -> Any:
    """The policy, every weight of which that trains is moved by noise."""
    generator = torch.Generator(device).manual_seed(seed)
    for weight in policy.parameters():
        if not weight.requires_grad:  # the base of an adapter
            continue
        noise = torch.randn(weight.shape, generator=generator, device=device, dtype=weight.dtype)
        weight.add_(0.02 * noise)
    return policy


@torch.no_grad()
def differences(policy: Any, completion: Any, device: torch.device) -> torch.Tensor:
    """|trainer - server| of every token, nats."""
    (row,) = pack([(PROMPT, [completion.token_ids])], share_prefix=False)
    return (completion_logprobs(policy, row.to(device)).cpu() - completion.sampler_logprobs).abs()


@contextmanager
def busy(of: Session) -> Iterator[None]:
    """Let the server sample all the time, while the block runs."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            of.sample()

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            time.sleep(3.0)  # the first batches are slow
            yield
        finally:
            is_over.set()
        asking.result()


def syncs(of: Session, repeats: int) -> dict[str, Any]:
    """Some syncs to an idle server, its speed, some syncs to a busy one, and the probe."""
    published = adapter_weights if of.rollouts.pool.sends_adapter else published_weights
    found: dict[str, list[float]] = {name: [] for name in ("sync_s", "pause_s")}

    def sync_all(prefix: str) -> None:
        for _ in range(repeats):
            found.setdefault(f"{prefix}sync_s", []).append(of.sync())
            found.setdefault(f"{prefix}pause_s", []).append(of.server.paused_s)
            time.sleep(0.2)

    sync_all("")
    found["tokens_per_s"] = [of.sample() for _ in range(4)]
    with busy(of):
        sync_all("busy_")
    return {
        "mb": sum(tensor.nbytes for _, tensor in published(of.policy)) / 1e6,
        **{name: median(values) for name, values in found.items()},
        "probe": of.probe(),
        "start_s": of.start_s,
    }


def in_flight(of: Session) -> dict[str, Any]:
    """Updates until one hits completions on the way."""
    first = of.rollouts.version + 1
    old, new = of.policy, disturbed(copy.deepcopy(of.policy), of.device, first)
    of.rollouts.publish(old, first)
    for version in range(first + 1, first + 20):
        with ThreadPoolExecutor(1) as pool:
            replies = pool.submit(of.server.generate, PROMPT, SAMPLING)
            time.sleep(0.04 * (version - first))  # each time a little later
            of.rollouts.publish(new, version)
        for reply in replies.result():
            spans = version_spans(reply.weight_versions)
            if len(spans) == 2:
                before, after = spans
                of_old, of_new = (differences(policy, reply, of.device) for policy in (old, new))
                return {
                    "attempts": version - first,
                    "weight_versions": [list(before), list(after)],
                    "before_update": of_old[: before[2]].mean().item(),
                    "after_update": of_new[after[1] :].mean().item(),
                    "old_weights_after_update": of_old[after[1] :].mean().item(),
                }
        old, new = new, disturbed(old, of.device, version)
    raise RuntimeError("no update came in the middle of a completion")


# -- How well a server in bf16 follows -------------------------------------------------------------


def tokens() -> list[list[int]]:
    """Completions that nobody sampled."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 8000, (4, 96), generator=generator).tolist()


def trainer_logprobs(of: Session) -> torch.Tensor:
    """Of the tokens."""
    (row,) = pack([(PROMPT, tokens())], share_prefix=False)
    return completion_logprobs(of.policy, row.to(of.device))


def server_logprobs(of: Session) -> torch.Tensor:
    """Of the tokens, which the server reads as prompts."""
    parts = []
    for ids in tokens():
        request = SampleRequest(PROMPT + ids, {"max_tokens": 1, "prompt_logprobs": 0})
        (message,) = of.server.post("/sample", request, list[Sampled])
        parts.append(np.frombuffer(message.prompt_logprobs, "<f4")[len(PROMPT) - 1 :])
    return torch.from_numpy(np.concatenate(parts)).to(of.device)


def follows(of: Session, start: list[torch.Tensor], rate: float, num_steps: int) -> dict[str, Any]:
    """Train from the weights at the start, half of the tokens' log-probs up and half down, and look at both sides."""
    trained = [weight for weight in of.policy.parameters() if weight.requires_grad]
    found = []

    def look() -> None:
        of.rollouts.publish(of.policy, of.rollouts.version + 1)
        with torch.no_grad():
            found.append((trainer_logprobs(of), server_logprobs(of)))

    with torch.no_grad():
        for weight, value in zip(trained, start, strict=True):
            weight.copy_(value)
    look()
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    for _ in range(num_steps):
        logprobs = trainer_logprobs(of)
        signs = torch.ones_like(logprobs).view(4, -1)
        signs[1::2] = -1.0
        (-signs.flatten() * logprobs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    look()
    (before, server_before), (after, server_after) = found
    move = after - before
    server_move = server_after - server_before
    return {
        "moved": move.abs().mean().item(),
        "mismatch": (server_after - after).abs().mean().item(),
        "at_start": (server_before - before).abs().mean().item(),
        "follows": ((move * server_move).sum() / move.square().sum()).item(),
    }


# -- Parts -----------------------------------------------------------------------------------------


def with_lora(part: str, size: str, folder: Path, *options: str) -> Any:
    """A session with LoRA: `merged` into the weights, or the `adapter` alone."""
    model = folder / f"{size}-{part}"
    build(model, size)
    words = lora_options(16) if part == "adapter" else []
    fields = {} if size in SMALL else {"dtype": "bfloat16"}
    return session(model, None, *words, *options, use_peft=True, lora_rank=16, **fields)


def sync_lora(part: str, size: str, repeats: int, folder: Path, *options: str) -> dict[str, Any]:
    """Syncs with LoRA."""
    with with_lora(part, size, folder, *options) as of:
        return syncs(of, repeats)


def sync_large(size: str, repeats: int, folder: Path, *options: str) -> dict[str, Any]:
    """Syncs of a random model of a size, of which the server knows the shape alone."""
    # In the dtype that leaves room for the server.
    dtype = torch.bfloat16 if size == "8B" else torch.float32
    policy = random_model(MODELS[size], device_here(), dtype)
    policy.config.architectures = [type(policy).__name__]
    policy.config.save_pretrained(folder / size)
    build_tokenizer().save_pretrained(folder / size)
    with session(folder / size, policy, "--load-format", "dummy", *options) as of:
        return syncs(of, repeats)


def sleeps(size: str, folder: Path, *options: str) -> dict[str, Any]:
    """A server that falls asleep and is woken by updates, five times."""
    model = folder / f"{size}-sleeper"
    build(model, size)
    times: dict[str, list[float]] = {"sleep_s": [], "wake_s": []}
    with session(model, None, "--enable-sleep-mode", *options, max_staleness=0) as of:
        first = of.probe()
        for _ in range(5):
            before_gb = free_gb()
            started = time.perf_counter()
            of.rollouts.pool.fall_asleep()
            times["sleep_s"].append(time.perf_counter() - started)
            freed_gb = free_gb() - before_gb
            times["wake_s"].append(of.sync())
        found = {"awake_gb": of.server_gb, "asleep_gb": of.server_gb - freed_gb}
        found |= {name: median(values) for name, values in times.items()}
        return found | {"probe_before": first, "probe": of.probe()}


def measure(rows: Rows, part: str, is_quick: bool, folder: Path, options: list[str]) -> None:
    """All rows of a part."""
    small = "quick" if is_quick else "small"
    large = "0.6B" if device_here().type == "cuda" else small
    repeats = 2 if is_quick else 9
    if part == "small":
        build(folder / small, small)
        with session(folder / small, None, *options) as of:
            rows.measure({"part": "sync", "model": "small"}, partial(syncs, of, repeats))
            rows.measure({"part": "in flight"}, partial(in_flight, of))
    elif part == "follows":
        words = ["--dtype", "bfloat16", *options]
        for weights in ("merged", "adapter"):
            if weights == "adapter" and device_here().type == "cpu":
                reason = (
                    "on a CPU vLLM reads no prompts' log-probs under an adapter that has sampled"
                )
                rows.add({"part": part, "weights": weights, "skipped": reason})
                continue
            with with_lora(weights, large, folder, *words) as of:
                start = [w.detach().clone() for w in of.policy.parameters() if w.requires_grad]
                for rate, steps in CASES[: 1 if is_quick else None]:
                    names = {"part": part, "weights": weights, "rate": rate, "steps": steps}
                    rows.measure(names, partial(follows, of, start, rate, steps))
    elif part in ("merged", "adapter"):
        one = partial(sync_lora, part, large, repeats, folder, *options)
        rows.measure({"part": part, "model": large}, one)
    elif part == "sleep":
        rows.measure({"part": part, "model": large}, partial(sleeps, large, folder, *options))
    else:
        one = partial(sync_large, part, repeats, folder, *options)
        rows.measure({"part": "sync", "model": part}, one)


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "a small model and few steps, for a CPU")
    usual = f"which of them; usually {USUAL}, and with --quick {QUICK}"
    parser.add_argument("--parts", help=usual)
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="of the server")
    args = parser.parse_args()
    rows = Rows(args.json)
    reason = "" if importlib.util.find_spec("vllm") else "vLLM is not installed"
    if device_here().type == "cpu" and not args.quick and not args.parts:
        reason = "no CUDA device; on a CPU name --parts"
    if reason:
        rows.add({"skipped": reason})
        return
    with tempfile.TemporaryDirectory() as folder:
        for part in (args.parts or (QUICK if args.quick else USUAL)).split(","):
            measure(rows, part, args.quick, Path(folder), args.options)


if __name__ == "__main__":
    main()
