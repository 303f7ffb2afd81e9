"""The whole program against the real server: steps, files, refusals."""

import json
import subprocess
import sys

import pytest
import torch
from build_tiny import build
from helpers import ENV, ROOT, checkpoints_of, flags, on_forked_ranks, read, server, write_recipe
from test_prefix_models import plain_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import parse_args
from recipes.tool_calculator import calculate
from train import main
from vllm_client import Server

MORE = """
from dataclasses import replace
def held_out(): return rows()[:6]
def broken(**_): return [1 / 0]
config = replace(config, eval_dataset_id=held_out, max_tokens_per_gpu=96, server_timeout=60.0)
"""
NAMES = {
    "step", "reward", "reward_std", "rewards/mean_id", "entropy", "loss", "grad_norm",
    "learning_rate", "num_tokens", "clip_ratio/low", "clip_ratio/high", "completions/mean_length",
    "completions/clipped_ratio", "frac_reward_zero_std", "time/step_s", "time/generate_s",
    "time/reward_s", "time/train_s", "time/sync_s", "policy_version", "staleness/mean",
    "staleness/max", "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
}  # fmt: skip


@pytest.fixture
def recipe(models, servers, tmp_path):
    path = write_recipe(tmp_path, models["untied"], [servers["untied"]])
    path.write_text(path.read_text() + MORE)
    return path


def train(recipe, options):
    """A run in this process."""
    main(parse_args([str(recipe), *options.split()]))


def train_on_two_ranks(recipe, options):
    return on_forked_ranks(2, ROOT / "train.py", recipe, *options.split(), status=0).stdout


def check_run(folder):
    """What every run leaves behind."""
    metrics = read(folder, "metrics")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert all(set(row) >= NAMES for row in metrics[1:])
    assert [row["policy_version"] for row in metrics[1:]] == [0, 1, 2]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in metrics[1:])
    assert {"eval/reward", "eval/rewards/mean_id"} <= set(metrics[0]) & set(metrics[3])
    completions = read(folder, "completions")
    assert len(completions) == 3 * 6 * 4
    assert all(span[0] == row["step"] - 1 for row in completions for span in row["weight_versions"])
    assert json.loads((folder / "run" / "config.json").read_text())["max_steps"] == 3
    return metrics


def test_ddp(recipe, tmp_path):
    """Two ranks; more rows than fit one micro-batch, four updates a batch."""
    options = "--beta 0.01 --num_iterations 2 --num_minibatches 2"
    output = train_on_two_ranks(recipe, options)
    assert "share_prefix is off" not in output
    metrics = check_run(tmp_path)
    assert all(row["kl"] > 0 for row in metrics[1:])  # the policy moves
    assert len([line for line in output.splitlines() if line.startswith("step ")]) == 4


def test_fsdp_and_lora(recipe, tmp_path):
    options = "--use_fsdp true --use_peft true --lora_rank 4 --beta 0.01 --gradient_checkpoint true"
    assert "share_prefix is off" not in train_on_two_ranks(recipe, options)
    metrics = check_run(tmp_path)
    assert metrics[1]["kl"] == pytest.approx(0, abs=1e-9)  # a fresh adapter changes nothing
    assert min(metrics[2]["kl"], metrics[3]["kl"]) > 1e-6
    assert (tmp_path / "run" / "checkpoint-3" / "adapter_model.safetensors").is_file()


def test_fsdp_mixed_precision(recipe, tmp_path):
    """bfloat16 compute: weights stay fp32, log-probs stay within its reach of the server's."""
    train_on_two_ranks(recipe, "--use_fsdp true --fsdp_bf16 true")
    assert read(tmp_path, "metrics")[3]["sampling/sampling_logp_difference/mean"] < 0.1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3", dtype="auto")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("options", ["", "--use_peft true --lora_rank 4", "--use_fsdp true"])
def test_checkpoint_has_the_servers_log_probs(recipe, tmp_path, options):
    """Without torchrun; `from_pretrained` gives the log-probs that the server samples with."""
    train(recipe, f"--bf16 false {options}")
    check_run(tmp_path)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token == "<eos>"
    server = Server(parse_args([str(recipe)]).vllm_urls[0], 60.0)
    completions = server.generate([5, 6, 7], {"n": 4, "max_tokens": 12, "temperature": 1.0})
    expected = plain_rows(model, [([5, 6, 7], [c.token_ids.tolist() for c in completions])])
    sampled = torch.cat([c.sampler_logprobs for c in completions])
    assert (expected - sampled).abs().max() < 1e-4


def test_autocast(recipe, tmp_path, capsys):
    """bfloat16 is used, and is close; warnings are printed."""
    train(recipe, "--bf16 true --max_steps 1 --top_k 90")
    (row,) = read(tmp_path, "metrics")[1:]
    assert 1e-6 < row["sampling/sampling_logp_difference/mean"] < 0.1
    assert "warning: top_k" in capsys.readouterr().out


def test_epochs_and_checkpoints(recipe, tmp_path):
    """40 prompts in batches of 20 make two steps; a checkpoint and an evaluation each."""
    train(recipe, "--max_steps none --batch_size 20 --save_steps 1 --eval_steps 1")
    assert checkpoints_of(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    assert all("eval/reward" in row for row in read(tmp_path, "metrics"))
    prompts = [row["prompt"] for row in read(tmp_path, "completions")][::4]
    assert sorted(prompts) == sorted(f"{i}+{i}=" for i in range(40))


def test_asynchronous(recipe, tmp_path):
    """Two ranks, the next batch sampled while one trains: bounded, and every group exactly once."""
    options = "--max_staleness 1 --max_steps 6 --drop_zero_advantage true --learning_rate 1e-4"
    train_on_two_ranks(recipe, options)
    metrics, samples = read(tmp_path, "metrics"), read(tmp_path, "completions")
    assert [row["step"] for row in metrics] == list(range(7))
    assert len(samples) == 6 * 6 * 4
    ids = sorted({row["group"] for row in [*samples, *read(tmp_path, "dropped")]})
    assert ids == list(range(len(ids)))
    # The first batch is on-policy; later ones differ by what one small update changes.
    assert metrics[1]["sampling/sampling_logp_difference/max"] < 1e-4
    for row in metrics[1:]:
        assert row["staleness/max"] <= 1
        assert row["sampling/sampling_logp_difference/mean"] < 0.05
        assert 0.9 < row["sampling/effective_sample_size"] <= 1.0001


@pytest.mark.slow
def test_two_turns_with_a_tool(tmp_path):
    """What the calculator says is no part of the loss, and its position is right."""
    build(tmp_path, seed=0, task="calculator")
    fields = {
        "model_id": tmp_path / "model", "dataset_id": tmp_path / "train.jsonl",
        "eval_dataset_id": tmp_path / "heldout.jsonl", "output_dir": tmp_path / "run",
        "max_steps": 2, "max_staleness": 0, "batch_size": 8, "learning_rate": 0,
    }  # fmt: skip
    with server(str(tmp_path / "model"), tmp_path / "log") as started:
        words = flags(**fields, vllm_urls=started.wait())
        main(parse_args([str(ROOT / "recipes" / "tool_calculator.py"), *words]))
    metrics, samples = read(tmp_path, "metrics"), read(tmp_path, "completions")
    assert metrics[0]["eval/accuracy"] > 0
    # They agree on the tokens after the tool's word as well: they saw the same context.
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in metrics[1:])
    two_turns = 0
    for row in samples:
        call, _, said = row["completion"].partition("?")
        spans, word = row["weight_versions"], calculate(call + "?")
        if len(spans) == 1 or spans[0][2] != len(call + "?"):
            continue  # no reply, or a special token in the call, which the text hides
        two_turns += 1
        assert said.startswith(word)
        assert spans[1][1] - spans[0][2] == len(word)  # the gap between the turns is the tool's
    assert two_turns > 30


def test_wandb_offline(recipe, tmp_path):
    """The real one; a run that goes on is the same run there, too."""
    options = ["--use_wandb", "true", "--log_completions_steps", "1"]
    options += ["--resume_from_checkpoint", "auto"]
    for num_steps in (1, 2):
        command = [ROOT / "train.py", recipe, *options, "--max_steps", num_steps]
        on_forked_ranks(1, *command, status=0, env={"WANDB_MODE": "offline"})
    parts = [*(tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")]
    assert len(parts) == 2
    assert parts[0].name == parts[1].name
    written = b"".join(part.read_bytes() for part in parts)
    for name in ("train/grad_norm", "completions/mean_length", "completions/table", "eval/reward"):
        assert name.encode() in written


NOBODY = "--vllm_urls http://127.0.0.1:9 --server_timeout"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Data are read before the servers are waited for.
        (f"--dataset_id no.jsonl {NOBODY} 500", "dataset_id: dataset no.jsonl: FileNotFoundError"),
        (f"{NOBODY} 0", "no rollout server at http://127.0.0.1:9"),
        ("--reward_funcs broken", "reward broken on "),
    ],
)
def test_bad_input_is_one_line(recipe, options, message):
    """In the data, of the servers, and while a run samples; of the command line: test_config.py."""
    done = on_forked_ranks(0, ROOT / "train.py", recipe, *options.split(), status=1)
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {message}"), done.stderr
    assert "Traceback" not in done.stderr


def test_train_imports_without_vllm_datasets_or_wandb():
    blocked = dict.fromkeys(["vllm", "datasets", "wandb", "peft", "matplotlib"])
    code = f"import sys; sys.modules.update({blocked}); import train"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENV, cwd=ROOT)
