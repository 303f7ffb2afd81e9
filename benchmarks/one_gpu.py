"""A whole run with the real vLLM on one GPU: where a step's time goes. And TRL's, if it is installed.

    python benchmarks/one_gpu.py [--json PATH] [--quick] [--models 0.6B,1.5B,4B] [--together] [-- OPTIONS OF THE SERVER]

Random weights of Qwen3's shapes and random words as prompts: 16 prompts of 512 tokens, 8 completions of 512 each
(`ignore_eos`), the trainer under bf16 autocast, beside vLLM on the same GPU; the 4B with LoRA. Each model runs with
`max_staleness` 0 and 1. Times are medians over the steps but the first two. `sampled_tokens_per_s` counts a step's
completion tokens, over the time of its sampling at 0 and of the whole step at 1. TRL runs with the first model, vLLM
colocated (one_gpu_trl.py): `train_s` is what neither samples nor sends weights.

vLLM runs with CUDA graphs of decoding, and without inductor. `--together` starts all servers at once, which saves
minutes and takes memory. `--quick` is a tiny model on a CPU. Syncs alone are in real_server.py, and what the server
costs beside its model in serving.py.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.common import (
    MODELS,
    Rows,
    Skipped,
    arguments,
    as_options,
    device_here,
    lines,
    median,
    medians,
    random_model,
)
from benchmarks.local_server import beside_trainer, run_train
from utils import die_with

NUM_GENERATIONS = 8
# Of vLLM in either place. Without inductor, which would take minutes to start.
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 8, 32, 64, 128],
}
FIELDS: dict[str, dict[str, Any]] = {
    "0.6B": {},
    "1.5B": {"gradient_checkpoint": True},
    "4B": {
        "use_peft": True, "lora_rank": 16, "dtype": "bfloat16", "gradient_checkpoint": True,
        "learning_rate": 1e-5,
    },
    "quick": {},
}  # fmt: skip
RECIPE = """
import random
from config import TrainConfig
def rows():
    rng = random.Random(0)
    words = [f"w{{number}}" for number in range({vocab_size} - 2)]
    return [{{"prompt": " ".join(rng.choices(words, k={num_tokens}))}} for _ in range(512)]
def parity(completion_ids, **_):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]
config = TrainConfig(
    model_id="", dataset_id=rows, reward_funcs=[parity], max_completion_len={num_tokens}, batch_size={num_prompts}, num_generations=8,
    learning_rate=1e-6, no_apply_chat_template=True, max_tokens_per_gpu=16384, gradient_checkpoint=False,
    sampling_params={{"ignore_eos": True}}, reward_workers=2, server_timeout=300, logged_groups=1,
    max_logprob_mismatch=0.3, log_steps=1,
)
"""


def build(folder: Path, size: str, device: torch.device) -> None:
    """A checkpoint of random weights, with a tokenizer whose words are w0, w1, ..."""
    vocab_size = MODELS[size]["vocab_size"]
    words = {f"w{number}": number for number in range(vocab_size - 2)}
    special = {"<eos>": vocab_size - 2, "<unk>": vocab_size - 1}
    tokenizer = Tokenizer(models.WordLevel(words | special, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    ).save_pretrained(folder)

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = {"eos_token_id": vocab_size - 2, "bos_token_id": None}
    random_model(MODELS[size], device, dtype, **ids).save_pretrained(folder)
    torch.cuda.empty_cache()  # vLLM measures what is free


def run(folder: Path, size: str, url: str, staleness: int, steps: int) -> dict[str, Any]:
    """The medians of a run of train.py."""
    output = folder / f"staleness-{staleness}"
    fields = {"model_id": folder, "vllm_urls": url, "output_dir": output}
    fields |= {"max_staleness": staleness, "max_steps": steps, **FIELDS[size]}
    recipe = str(folder / "one_gpu_recipe.py")
    command = [str(ROOT / "train.py"), recipe, *as_options(fields)]
    run_train(command, folder / f"staleness-{staleness}.log")

    metrics = lines(output / "metrics.jsonl")
    trained = [line for line in metrics if "time/step_s" in line][2:]
    found = medians(trained, ("time/", "idle/"))
    sampling = "time/step_s" if staleness else "time/generate_s"
    num_completions = NUM_GENERATIONS * num_prompts_of(size)
    num_sampled = trained[0]["completions/mean_length"] * num_completions
    found["sampled_tokens_per_s"] = num_sampled / found[sampling]
    mismatch = "sampling/sampling_logp_difference/mean"
    found["mismatch"] = median([line[mismatch] for line in trained])
    return found


def num_tokens_of(size: str) -> int:
    """Of a prompt, and of a completion."""
    return 32 if size == "quick" else 512


def num_prompts_of(size: str) -> int:
    """Of a batch."""
    return 4 if size == "quick" else 16


def cache_bytes(size: str) -> int:
    """What the keys and values of two batches take, one of whose completions are sampled."""
    shape = MODELS[size]
    num_tokens = num_tokens_of(size) * num_prompts_of(size) * (2 + NUM_GENERATIONS) * 5 // 4
    width = shape["head_dim"] * shape["num_key_value_heads"]
    num_bytes = 2 if device_here().type == "cuda" else 4
    return num_tokens * width * shape["num_hidden_layers"] * 2 * num_bytes


def prepare(folder: Path, size: str) -> None:
    """Make the model and its recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    build(folder, size, device_here())
    recipe = RECIPE.format(
        vocab_size=MODELS[size]["vocab_size"],
        num_tokens=num_tokens_of(size),
        num_prompts=num_prompts_of(size),
    )
    (folder / "one_gpu_recipe.py").write_text(recipe)


def served(folder: Path, size: str, *options: str) -> Any:
    """The server of a model, as a block to be entered."""
    words = ["--max-model-len", str(2 * num_tokens_of(size) + 64), "--max-num-seqs", "128"]
    words += ["--load-format", "dummy"]
    if device_here().type == "cuda":
        words += ["--compilation-config", json.dumps(GRAPHS)]
    return beside_trainer(folder, folder / "server.log", cache_bytes(size), *words, *options)


@contextmanager
def trl_beside(folder: Path, size: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """TRL's trainer, which waits with its model loaded: what lets it train, and gives the medians of its steps."""
    reason = "" if importlib.util.find_spec("trl") else "TRL is not installed"
    if device_here().type == "cpu":
        reason = "TRL cannot give new weights to vLLM's layers of a CPU"
    if reason:

        def skip() -> dict[str, Any]:
            raise Skipped(reason)

        yield skip
        return
    options = {"kv_cache_memory_bytes": cache_bytes(size), "compilation_config": GRAPHS}
    numbers = (num_tokens_of(size), num_prompts_of(size), NUM_GENERATIONS)
    command = [sys.executable, str(ROOT / "benchmarks" / "one_gpu_trl.py"), str(folder)]
    with (folder / "trl.log").open("w+") as log:
        process: Any = subprocess.Popen(
            [*command, json.dumps(options), *map(str, numbers)], cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            preexec_fn=partial(die_with, os.getpid()),
        )  # fmt: skip
        while process.stdout.readline() not in ("loaded\n", ""):  # or it has failed
            pass

        def train() -> dict[str, Any]:
            text, _ = process.communicate("train\n")
            if process.returncode:
                log.seek(0)
                raise RuntimeError(log.read()[-280:])
            found: dict[str, Any] = json.loads(text.splitlines()[-1])
            return found

        try:
            yield train
        finally:
            process.kill()
            process.wait()


def one_round(
    rows: Rows, folder: Path, sizes: list[str], options: list[str], with_trl: bool
) -> None:
    """Start the servers of some models, wait until all have loaded, and measure one after the other."""
    with ExitStack() as started:
        servers = {}
        for size in sizes:
            prepare(folder / size, size)
            servers[size] = started.enter_context(served(folder / size, size, *options))
        started_s = time.perf_counter()
        trl = None
        if with_trl:
            trl = started.enter_context(trl_beside(folder / sizes[0], sizes[0]))
        for server in servers.values():
            server.wait()
        waited_s = time.perf_counter() - started_s
        rows.add({"models": " ".join(servers), "waited_for_servers_s": waited_s})

        for size, server in servers.items():
            url = server.wait()
            for staleness in (0, 1):
                steps = 4 if size == "quick" else 5 + 2 * staleness
                one = partial(run, folder / size, size, url, staleness, steps)
                rows.measure({"model": size, "max_staleness": staleness}, one)
            if trl and size == sizes[0]:
                rows.measure({"model": size, "trainer": "TRL"}, trl)


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "a tiny model, on a CPU, too")
    parser.add_argument("--models", default="0.6B,1.5B,4B")
    parser.add_argument("--together", action="store_true", help="start all servers at once")
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="of the server")
    args = parser.parse_args()
    rows = Rows(args.json)
    reason = "" if importlib.util.find_spec("vllm") else "vLLM is not installed"
    if device_here().type == "cpu" and not args.quick:
        reason = "no CUDA device"
    if reason:
        rows.add({"skipped": reason})
        return

    sizes = ["quick"] if args.quick else args.models.split(",")
    with tempfile.TemporaryDirectory() as folder:
        rounds = [sizes] if args.together else [[size] for size in sizes]
        for number, together in enumerate(rounds):
            one_round(rows, Path(folder), together, args.options, with_trl=number == 0)


if __name__ == "__main__":
    main()
