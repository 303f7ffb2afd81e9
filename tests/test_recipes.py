"""Every recipe runs, against a real server, on tiny stand-ins of its model and of its data's schema."""

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import CHAT_TEMPLATE, ROOT, make_model, read, server
from some_rewards import spread
from test_images import geometry
from test_judge import Endpoint
from test_prefix_models import plain_rows
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import parse_args
from prefix_attention import attach
from recipes import countdown, dpo, score, tiny_vlm, trackers
from train import main

SORT = [{"prompt": f"{10000000 + 7 * i}=", "answer": "00000001"} for i in range(16)]
GSM8K = [
    {"question": f"Tom has {i} pens and {i} more.", "answer": f"He has\n#### {1000 + i:,}"}
    for i in range(16)
]
MATH = [{"problem": f"What is ${i}+{i}$?", "answer": str(2 * i)} for i in range(16)]
SUMS = [{"prompt": f"{500 + i}+{500 + i}=", "answer": str(1000 + 2 * i)} for i in range(16)]
OF_SMOLLM = ("smollm", "smollm_lora", "smollm_asked_again", "smollm_one_word")
DATA: dict[str, Any] = {
    "tiny": SORT, "majority": SORT, "insert_reasoning": SORT, "distillation": SORT, "own_reward": SORT, "own_loss": SORT,
    "trackers": SORT, "curriculum": SORT, "entropy": SORT, "own_data": "recipes/own_data.jsonl",
    "mixture": {"few_digits": partial(list, SORT[:8]), "many_digits": partial(list, SORT[8:])}, "tool_calculator": SUMS,
    "tool_agent": [{**row, "prompt": row["prompt"].replace("=", "~=")} for row in SUMS],
    "gsm8k": GSM8K, "lora_7b_one_gpu": GSM8K, "lora_one_card": GSM8K, "math": MATH, "fsdp_multi_node": MATH,
    "countdown": partial(countdown.problems, 16, held_out=True), "tiny_vlm": partial(tiny_vlm.squares, 8, 3),
    "judge": [{"prompt": f"Post {i}: rain.", "completion": "It rains."} for i in range(16)],
    "geometry3k": geometry, **dict.fromkeys(OF_SMOLLM, "recipes/smollm.jsonl"),
}  # fmt: skip
SLOW = {"tool_agent", "insert_reasoning"}  # half a minute each


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A random model with a chat template, and the address of a real server for it."""
    folder = tmp_path_factory.mktemp("chat")
    model = make_model(folder / "model", max_len=1024, chat_template=CHAT_TEMPLATE)
    with server(model, folder / "log", "--max-model-len", "640") as started:
        yield model, started.wait()


@pytest.mark.house
def test_every_recipe_is_here():
    files = (ROOT / "recipes").glob("*.py")
    assert {path.stem for path in files if "\nconfig = " in path.read_text()} == set(DATA)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in DATA]
)
def test_recipe(name, chat, request, tmp_path, monkeypatch):
    """Three steps with its own loss, rewards, rollouts, LoRA, FSDP2, types and checkpoints; only sizes are changed."""
    monkeypatch.chdir(ROOT)
    if name == "trackers":
        pytest.importorskip("tensorboard")
        monkeypatch.setattr(trackers, "FOLDER", tmp_path)
    if name == "judge":
        judge = Endpoint(lambda question: str(len(question) % 11))
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{judge.server_port}/v1")
        monkeypatch.setenv("JUDGE_REPLIES", str(tmp_path / "replies.sqlite"))
        request.addfinalizer(judge.shutdown)
    path = ROOT / "recipes" / f"{name}.py"
    how_to_start_it = path.read_text().split('"""')[1]
    assert f"recipes/{name}.py" in how_to_start_it or name == "tiny"
    model, url = chat
    if name in ("tiny_vlm", "geometry3k"):
        model, url = request.getfixturevalue("vlm"), request.getfixturevalue("vlm_server")
    config = parse_args([str(path)])
    data = geometry(tmp_path) if name == "geometry3k" else DATA[name]
    if isinstance(data, list):
        data = partial(list, data)
    teacher = None
    if config.reference_id:
        teacher = make_model(tmp_path / "teacher", layers=3, chat_template=CHAT_TEMPLATE)
    config = replace(
        config, model_id=model, reference_id=teacher, vllm_urls=[url],
        dataset_id=data, output_dir=str(tmp_path / "run"),
        eval_dataset_id=config.eval_dataset_id and data,
        reward_funcs=[*config.reward_funcs, spread], reward_weights=None,
        batch_size=4, num_generations=4, max_completion_len=16, max_steps=3, num_epochs=1.0, max_tokens_per_gpu=2048,
    )  # fmt: skip
    assert config.eval_dataset_id
    main(config)
    start, *metrics = read(tmp_path, "metrics")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert math.isfinite(start["eval/reward"])
    assert math.isfinite(metrics[-1]["eval/reward"])
    for row in metrics:
        names = [getattr(function, "__name__", "") for function in config.reward_funcs]
        assert all(math.isfinite(row[f"rewards/{name}"]) for name in names)
        # A small random model often talks on: a batch that is cut off whole has no gradient where such are masked.
        is_masked = config.mask_truncated_completions and row["completions/clipped_ratio"] == 1
        assert is_masked or row["grad_norm"] > 0
    rounded = config.bf16 or config.fsdp_bf16 or config.dtype == "bfloat16"
    assert metrics[0]["sampling/sampling_logp_difference/mean"] < (0.1 if rounded else 1e-4)
    assert (tmp_path / "run" / "checkpoint-3").is_dir()


def answers_logprobs(model, groups):
    """The log-prob of each answer, by one plain forward."""
    lengths = [len(ids) for _, answers in groups for ids in answers]
    return torch.stack([part.sum() for part in plain_rows(model, groups).split(lengths)])


def test_dpo(tmp_path):
    """The loss and its gradient against whole rows, one per answer."""
    folder = make_model(tmp_path / "model")
    load = partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float64)
    policy, reference = load(), load()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    pairs = [([5, 6, 7, 8], [[20, 21, 22, 2], [30, 2]]), ([9, 10], [[40, 2], [50, 51, 2]])]

    ratios = answers_logprobs(policy, pairs) - answers_logprobs(reference, pairs).detach()
    wanted = -logsigmoid(dpo.BETA * (ratios[::2] - ratios[1::2])).mean()
    wanted.backward()
    gradients = [weight.grad for weight in policy.parameters()]
    policy.zero_grad()
    loss = dpo.dpo_loss(attach(policy), attach(reference), pairs)
    loss.backward()
    assert torch.allclose(loss, wanted, rtol=1e-8)  # RMSNorm computes in fp32
    found = [weight.grad for weight in policy.parameters()]
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-8)


def test_dpo_script_learns(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dpo, "LEARNING_RATE", 1e-3)
    folder = make_model(tmp_path / "model")
    row = json.dumps({"prompt": "Say it:", "chosen": "yes", "rejected": "no"}) + "\n"
    (tmp_path / "pairs.jsonl").write_text(row * 32)
    dpo.main(folder, str(tmp_path / "pairs.jsonl"), str(tmp_path / "out"))
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)  # the policy is the reference
    assert losses[-1] < 0.5 * losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@torch.no_grad()
def test_scores_of_many_answers(tmp_path):
    """Against one plain forward of each."""
    folder = make_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    context, answers = "A long, long story. " * 5, ["yes", "no, it is not", "maybe", "x"]
    ended = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in answers]
    wanted = answers_logprobs(model, [(tokenizer(context).input_ids, ended)])
    scores = score.scores(attach(model), tokenizer, context, answers)
    assert scores == pytest.approx(wanted.tolist(), rel=1e-4)
