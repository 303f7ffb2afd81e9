"""The whole program against the real server: steps, files, refusals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_tiny import build
from helpers import ENV, ROOT, on_forked_ranks, saved_state, server, torchrun
from transformers import AutoModelForCausalLM, AutoTokenizer

import utils
from config import parse_args
from prefix_attention import completion_logprobs, pack
from recipes.tool_calculator import calculate
from train import main

RECIPE = """
import os
from config import TrainConfig
def rows(): return [{{"prompt": f"{{i}}+{{i}}=", "answer": str(2 * i)}} for i in range(40)]
def held_out(): return rows()[:6]
def ones(prompts, completions, completion_ids, answer): return [len(set(text)) / 12 for text in completions]
def broken(prompts, completions, completion_ids, answer): return [1 / 0]
config = TrainConfig(
    model_id={model!r}, vllm_urls=[{url!r}], dataset_id=rows, eval_dataset_id=held_out, reward_funcs=[ones],
    max_completion_len=12, batch_size=6, num_generations=4, max_steps=3, learning_rate=1e-2, max_tokens_per_gpu=96,
    output_dir={output!r}, server_timeout=60.0, max_staleness=0, logged_groups=None,
)
"""
NAMES = {
    "step", "reward", "reward_std", "rewards/ones", "entropy", "loss", "grad_norm", "learning_rate", "num_tokens",
    "clip_ratio/low", "clip_ratio/high", "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std",
    "time/step_s", "time/generate_s", "time/reward_s", "time/train_s", "time/sync_s", "policy_version",
    "staleness/mean", "staleness/max",
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
}  # fmt: skip


@pytest.fixture
def recipe(models, servers, tmp_path):
    path = tmp_path / f"recipe_{tmp_path.name}.py"
    path.write_text(
        RECIPE.format(model=models["untied"], url=servers["untied"], output=str(tmp_path / "run"))
    )
    return path


def read(folder, name):
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def check_run(folder, steps=3):
    """What every run leaves behind."""
    metrics = read(folder, "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(steps + 1))
    assert all(set(row) >= NAMES for row in metrics[1:])
    assert [row["policy_version"] for row in metrics[1:]] == list(range(steps))
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in metrics[1:])
    assert {"eval/reward", "eval/rewards/ones"} <= set(metrics[0]) & set(metrics[steps])
    completions = read(folder, "completions.jsonl")
    assert len(completions) == steps * 6 * 4
    assert all(span[0] == row["step"] - 1 for row in completions for span in row["weight_versions"])
    assert json.loads((folder / "run" / "config.json").read_text())["max_steps"] == steps
    return metrics


def test_ddp(recipe, tmp_path):
    """Two ranks; more rows than fit one micro-batch, four updates a batch."""
    done = torchrun(
        2,
        ROOT / "train.py",
        recipe,
        "--beta",
        "0.01",
        "--num_iterations",
        "2",
        "--num_minibatches",
        "2",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "share_prefix is off" not in done.stdout
    metrics = check_run(tmp_path)
    assert all(row["kl"] > 0 for row in metrics[1:])  # the policy moves
    assert len([line for line in done.stdout.splitlines() if line.startswith("step ")]) == 4


def test_fsdp_and_lora(recipe, tmp_path):
    options = [
        "--use_fsdp",
        "true",
        "--use_peft",
        "true",
        "--lora_rank",
        "4",
        "--beta",
        "0.01",
        "--gradient_checkpoint",
        "true",
    ]
    done = on_forked_ranks(2, ROOT / "train.py", recipe, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "share_prefix is off" not in done.stdout
    metrics = check_run(tmp_path)
    assert metrics[1]["kl"] == pytest.approx(0, abs=1e-9)  # a fresh adapter changes nothing
    assert min(metrics[2]["kl"], metrics[3]["kl"]) > 1e-6
    assert (tmp_path / "run" / "checkpoint-3" / "adapter_model.safetensors").is_file()


def test_fsdp_mixed_precision(recipe, tmp_path):
    """bfloat16 compute: the weights stay fp32, and the log-probs stay within bfloat16's reach of the server's."""
    done = on_forked_ranks(
        2, ROOT / "train.py", recipe, "--use_fsdp", "true", "--fsdp_bf16", "true"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert read(tmp_path, "metrics.jsonl")[3]["sampling/sampling_logp_difference/mean"] < 0.1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "options",
    [[], ["--use_peft", "true", "--lora_rank", "4"], ["--use_fsdp", "true"]],
    ids=["full", "lora", "fsdp"],
)
def test_checkpoint_has_the_servers_log_probs(recipe, tmp_path, servers, models, options):
    """In this process, without torchrun; then `from_pretrained` gives the log-probs that the server samples with."""
    from rollouts.servers import ServerPool

    config = parse_args([str(recipe), "--bf16", "false", *options])
    main(config)
    check_run(tmp_path)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token == "<eos>"
    client = ServerPool(config)
    completions = client.servers[0].generate(
        [5, 6, 7], {"n": 4, "max_tokens": 12, "temperature": 1.0}
    )
    client.close()
    (row,) = pack([([5, 6, 7], [c.token_ids for c in completions])], share_prefix=False)
    sampled = torch.tensor([x for c in completions for x in c.sampler_logprobs])
    assert (completion_logprobs(model, row) - sampled).abs().max() < 1e-4


def test_no_learning_rate_no_gain(recipe, tmp_path, models):
    """The gain comes from the optimizer alone: at rate 0 nothing moves, weights and held-out reward alike."""
    main(parse_args([str(recipe), "--learning_rate", "0", "--weight_decay", "0.1"]))
    metrics = read(tmp_path, "metrics.jsonl")
    assert metrics[3]["eval/reward"] == metrics[0]["eval/reward"]
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (models["untied"], tmp_path / "run" / "checkpoint-3")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_autocast(recipe, tmp_path):
    main(parse_args([str(recipe), "--bf16", "true", "--max_steps", "1"]))
    (row,) = read(tmp_path, "metrics.jsonl")[1:]
    assert (
        1e-6 < row["sampling/sampling_logp_difference/mean"] < 0.1
    )  # bfloat16 was used, and is close


def test_schedule(recipe, tmp_path):
    """Four steps, half of them warm-up, then linear: 1/2, 1, 1, 1/2 of the peak."""
    options = [
        "--max_steps",
        "4",
        "--warmup_ratio",
        "0.5",
        "--lr_scheduler",
        "linear",
        "--learning_rate",
        "1e-4",
    ]
    main(parse_args([str(recipe), *options]))
    rates = [row["learning_rate"] for row in read(tmp_path, "metrics.jsonl")[1:]]
    assert rates == pytest.approx([0.5e-4, 1e-4, 1e-4, 0.5e-4])


def test_epochs_and_checkpoints(recipe, tmp_path):
    """40 prompts in batches of 20 make two steps an epoch; a checkpoint and an evaluation each."""
    options = [
        "--max_steps",
        "none",
        "--batch_size",
        "20",
        "--save_steps",
        "1",
        "--eval_steps",
        "1",
    ]
    main(parse_args([str(recipe), *options]))
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    assert all("eval/reward" in row for row in read(tmp_path, "metrics.jsonl"))
    prompts = [row["prompt"] for row in read(tmp_path, "completions.jsonl")][::4]
    assert sorted(prompts) == sorted(f"{i}+{i}=" for i in range(40))


def test_asynchronous(recipe, tmp_path):
    """Two ranks, the next batch sampled while one trains: bounded, exactly once, and log-probs of the right weights."""
    options = [
        "--max_staleness",
        "1",
        "--max_steps",
        "6",
        "--drop_zero_advantage",
        "true",
        "--learning_rate",
        "1e-4",
    ]
    done = on_forked_ranks(2, ROOT / "train.py", recipe, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics, samples, dropped = (
        read(tmp_path, f"{name}.jsonl") for name in ("metrics", "completions", "dropped")
    )
    assert [row["step"] for row in metrics] == list(range(7))
    assert all(set(row) >= NAMES for row in metrics[1:])
    assert max(row["staleness/max"] for row in metrics[1:]) <= 1
    assert {span[0] for row in samples for span in row["weight_versions"]} <= set(range(7))
    assert len(samples) == 6 * 6 * 4
    ids = sorted({row["group"] for row in samples} | {row["group"] for row in dropped})
    assert ids == list(range(len(ids)))
    # the first batch is on-policy; later ones differ by what one small update changes
    assert metrics[1]["sampling/sampling_logp_difference/max"] < 1e-4
    assert all(row["sampling/sampling_logp_difference/mean"] < 0.05 for row in metrics[1:])
    assert all(0.9 < row["sampling/effective_sample_size"] <= 1.0001 for row in metrics[1:])


@pytest.mark.slow
def test_two_turns_with_a_tool(tmp_path):
    """The recipe with the real server: what the calculator says is no part of the loss, and its position is right."""
    build(tmp_path, seed=0, task="calculator")
    with server(str(tmp_path / "model"), tmp_path / "log") as started:
        words = {
            "model_id": tmp_path / "model",
            "dataset_id": tmp_path / "train.jsonl",
            "max_staleness": 0,
        }
        words |= {
            "eval_dataset_id": tmp_path / "heldout.jsonl",
            "output_dir": tmp_path / "run",
            "max_steps": 2,
        }
        words |= {"vllm_urls": started.wait(), "batch_size": 8, "learning_rate": 0}
        config = parse_args(
            [
                str(ROOT / "recipes" / "tool_calculator.py"),
                *(f"--{k}={v}" for k, v in words.items()),
            ]
        )
        main(config)
    metrics, samples = read(tmp_path, "metrics.jsonl"), read(tmp_path, "completions.jsonl")
    assert metrics[0]["eval/accuracy"] > 0
    # trainer and server agree on the tokens after the tool's word as well: they saw the same context
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in metrics[1:])
    two_turns = 0
    for row in samples:
        call, asked, said = row["completion"].partition("?")
        spans, word = row["weight_versions"], calculate(call + "?")
        if not asked or spans[0][2] != len(
            call + "?"
        ):  # no call, or one with a special token, which the text hides
            continue
        if len(call + "?" + word) >= config.max_completion_len:
            assert len(spans) == 1  # no room for a reply
            continue
        two_turns += 1
        assert said.startswith(word)
        assert spans[1][1] - spans[0][2] == len(word)  # the gap between the turns is the tool's
    assert two_turns > 30


def test_wandb_offline(recipe, tmp_path):
    done = on_forked_ranks(
        1,
        ROOT / "train.py",
        recipe,
        "--use_wandb",
        "true",
        "--log_completions_steps",
        "1",
        env={"WANDB_MODE": "offline"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    written = run.read_bytes()
    assert all(
        name in written
        for name in (
            b"train/grad_norm",
            b"completions/mean_length",
            b"completions/table",
            b"eval/reward",
        )
    )
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    wandb_id = run.name.removeprefix("run-").removesuffix(".wandb")
    assert saved_state(saved)["run_id"] == wandb_id
    steps = str(1 + saved_state(saved)["step"])
    options = ["--use_wandb", "true", "--log_completions_steps", "1", "--max_steps", steps]
    done = on_forked_ranks(
        1,
        ROOT / "train.py",
        recipe,
        *options,
        "--resume_from_checkpoint",
        "auto",
        env={"WANDB_MODE": "offline"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{wandb_id}.wandb"))) == 2
    )  # goes on as one


def test_push_to_hub(recipe, tmp_path, monkeypatch):
    calls: list[tuple] = []

    class Hub:
        def auth_check(self, repo_id, write):
            assert write

        def create_repo(self, repo_id, **options):
            calls.append(("create", repo_id, options))

        def upload_folder(self, repo_id, folder_path, **options):
            calls.append(("upload", repo_id, sorted(os.listdir(folder_path))))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    main(
        parse_args(
            [str(recipe), "--push_to_hub", "true", "--hub_repo_id", "me/it", "--max_steps", "1"]
        )
    )
    assert calls[0] == ("create", "me/it", {"private": True, "exist_ok": True})
    assert calls[1][:2] == ("upload", "me/it")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(calls[1][2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--reward_funcs", "broken"],
            r"error: reward broken on (dataset row \d+|row \d+ of \w+) raised ZeroDivisionError",
        ),
        (
            ["--model_id", "/nowhere"],
            "error: model_id=/nowhere, a folder here or a name on the hub: ",
        ),
        (
            ["--vllm_urls", "http://127.0.0.1:9", "--server_timeout", "0"],
            "error: no rollout server at http://127.0.0.1:9",
        ),
        (  # data are read before the servers are waited for
            [
                "--dataset_id",
                "nowhere.jsonl",
                "--vllm_urls",
                "http://127.0.0.1:9",
                "--server_timeout",
                "500",
            ],
            "error: dataset_id: dataset nowhere.jsonl: FileNotFoundError",
        ),
        (
            ["--max_completion_len", "127", "--max_tokens_per_gpu", "128"],
            r"error: dataset_id: left out \d+ of \d+ prompts, empty or over 1 tokens: raise max_tokens",
        ),
        (
            ["--max_completion_len", "127"],
            "error: max_tokens_per_gpu must exceed max_completion_len",
        ),
        (
            ["--use_peft", "true", "--lora_target_modules", "qkv"],
            "error: lora_target_modules: qkv is no module",
        ),
        (["--lerning_rate", "1"], "error: unknown field lerning_rate: did you mean learning_rate?"),
    ],
)
def test_bad_input_is_one_line(recipe, options, message):
    done = on_forked_ranks(0, ROOT / "train.py", recipe, *options)
    assert done.returncode == 1
    assert re.match(message, done.stderr.strip().splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr


def test_top_k_warns(recipe, tmp_path, capsys):
    main(parse_args([str(recipe), "--top_k", "3", "--max_steps", "1"]))
    assert "top_k" in capsys.readouterr().out


def test_train_imports_without_vllm_datasets_or_wandb(tmp_path):
    blocked = "import sys\nfor name in ('vllm', 'datasets', 'wandb', 'peft', 'matplotlib'): sys.modules[name] = None\n"
    code = f"{blocked}sys.path.insert(0, {str(ROOT)!r})\nimport train\n"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENV)


def test_readme_gives_the_commands_that_ci_runs():
    readme = (ROOT / "README.md").read_text()
    assert "bash scripts/demo.sh" in readme
    assert "bash scripts/test.sh" in readme
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
    assert Path(utils.__file__).parent == ROOT
