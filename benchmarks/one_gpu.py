"""A whole run with the real vLLM on one GPU: where a step's time goes.

    python benchmarks/one_gpu.py [--json PATH] [--quick] [--models 0.6B,1.5B,4B] [-- OPTIONS OF THE SERVER]

Random weights of Qwen3's shapes and random words as prompts: 16 prompts of 512 tokens, 8 completions of 512 each
(`ignore_eos`), the trainer under bf16 autocast, beside vLLM on the same GPU; the 4B with LoRA. Each model runs with
`max_staleness` 0 and 1. Times are medians over the steps but the first two. `sampled_tokens_per_s` counts a
step's completion tokens, over the time of its sampling at 0 and of the whole step at 1. `front_end` and `engine` are
the CPU seconds a second of the server's API process and of the process that runs the model. `--quick` is a tiny model
on a CPU.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import Rows, device_here, median
from benchmarks.local_server import local_server
from benchmarks.prefix_attention import SIZES
from benchmarks.steps import MODELS
from utils import die_with

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": MODELS["Qwen3-0.6B"],
    "1.5B": SIZES["1.5B"],
    "4B": MODELS["Qwen3-4B"],
    "quick": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    },
}  # fmt: skip
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
    learning_rate=1e-6, no_apply_chat_template=True, max_tokens_per_gpu=32768, gradient_checkpoint=False,
    sampling_params={{"ignore_eos": True}}, reward_workers=2, server_timeout=300, logged_groups=1,
    max_logprob_mismatch=0.3, log_steps=1,
)
"""


def build(folder: Path, size: str, device: torch.device) -> None:
    """A checkpoint of random weights, with a tokenizer whose words are w0, w1, ..."""
    shape = SHAPES[size]
    vocab_size = shape["vocab_size"]
    words = {f"w{number}": number for number in range(vocab_size - 2)}
    special = {"<eos>": vocab_size - 2, "<unk>": vocab_size - 1}
    tokenizer = Tokenizer(models.WordLevel(words | special, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    ).save_pretrained(folder)

    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, tie_word_embeddings=True, max_position_embeddings=4096,
        eos_token_id=vocab_size - 2, bos_token_id=None,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with device:
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # vLLM measures what is free


def cpu_seconds(root: int) -> dict[int, float]:
    """CPU seconds of a process and of all its descendants, by process id."""
    parents = {}
    seconds = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descends(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return {pid: spent for pid, spent in seconds.items() if descends(pid)}


def run(folder: Path, size: str, url: str, server: int, staleness: int, steps: int) -> Any:
    """The medians of a run of train.py."""
    output = folder / f"staleness-{staleness}"
    fields = {"model_id": folder, "vllm_urls": url, "output_dir": output}
    fields |= {"max_staleness": staleness, "max_steps": steps, **FIELDS[size]}
    command = [sys.executable, str(ROOT / "train.py"), str(folder / "one_gpu_recipe.py")]
    for name, value in fields.items():
        command += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    before = cpu_seconds(server)
    with (folder / "train.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            preexec_fn=partial(die_with, os.getpid()),
        )  # fmt: skip
        samples = []  # of the CPU's time, from the third step on
        metrics = output / "metrics.jsonl"
        while process.poll() is None:
            num_steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if 2 <= num_steps < steps:  # not while it saves
                samples.append((time.monotonic(), cpu_seconds(server)))
            time.sleep(0.2)
    if process.returncode:
        text = (folder / "train.log").read_text()
        raise RuntimeError(" ".join(text.split())[-280:])

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in lines if "time/step_s" in line][2:]
    names = [name for name in lines[0] if name.startswith(("time/", "idle/"))]
    found = {name: median([line[name] for line in lines]) for name in names}
    sampling = "time/step_s" if staleness else "time/generate_s"
    num_tokens = lines[0]["completions/mean_length"] * 8 * (16 if size != "quick" else 4)
    found["sampled_tokens_per_s"] = num_tokens / found[sampling]
    mismatch = "sampling/sampling_logp_difference/mean"
    found["mismatch"] = median([line[mismatch] for line in lines])

    (first_s, first), (last_s, last) = samples[0], samples[-1]
    spent = {pid: (last[pid] - first.get(pid, 0.0)) / (last_s - first_s) for pid in last}
    found["front_end"] = spent.pop(server)
    found["engine"] = max(spent.values(), default=0.0)
    assert set(before) <= set(last), "the server's processes are not those of before"
    return found


def runs(rows: Rows, folder: Path, size: str, *options: str) -> dict[str, Any]:
    """Both runs of a model on one server; the seconds of its start."""
    device = device_here()
    is_quick = size == "quick"
    build(folder, size, device)
    num_tokens = 32 if is_quick else 512
    recipe = RECIPE.format(
        vocab_size=SHAPES[size]["vocab_size"],
        num_tokens=num_tokens,
        num_prompts=4 if is_quick else 16,
    )
    (folder / "one_gpu_recipe.py").write_text(recipe)
    words = ["--max-model-len", str(2 * num_tokens + 64), "--max-num-seqs", "128"]
    words += ["--load-format", "dummy"]
    if device.type == "cuda":
        words += ["--gpu-memory-utilization", "0.25", "--dtype", "bfloat16"]
    env = {"TORCHDYNAMO_DISABLE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    started_s = time.perf_counter()
    with local_server(str(folder), folder / "server.log", *words, *options, env=env) as server:
        url = server.wait()
        start_s = time.perf_counter() - started_s
        for staleness in (0, 1):
            names = {"model": size, "max_staleness": staleness}
            steps = 4 if is_quick else 5 + 2 * staleness
            one = partial(run, folder, size, url, server.process.pid, staleness, steps)
            rows.measure(names, one)
    return {"server_starts_s": start_s}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here, one by one")
    parser.add_argument("--quick", action="store_true", help="a tiny model, on a CPU, too")
    parser.add_argument("--models", default="0.6B,1.5B,4B")
    parser.add_argument("options", nargs="*", metavar="-- OPTIONS", help="of the server")
    args = parser.parse_args()
    rows = Rows(args.json)
    reason = "" if importlib.util.find_spec("vllm") else "vLLM is not installed"
    if device_here().type == "cpu" and not args.quick:
        reason = "no CUDA device"
    if reason:
        rows.add({"skipped": reason})
        return
    for size in ["quick"] if args.quick else args.models.split(","):
        with tempfile.TemporaryDirectory() as name:
            rows.measure({"model": size}, partial(runs, rows, Path(name), size, *args.options))


if __name__ == "__main__":
    main()
