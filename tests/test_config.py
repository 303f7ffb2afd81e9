"""The command line, and refusals in one line before anything expensive."""

import ast
import dataclasses
import itertools
import json
import os
import re
import sys

import pytest
from helpers import ROOT

from config import TrainConfig, changed_fields, load_function, parse_args, to_json

MUST = ["--model_id", "m", "--dataset_id", "d", "--reward_funcs", "os.path.exists"]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--bf16", "true"], "bf16", True),
        (["--bf16=False"], "bf16", False),
        (["--top_k", "none"], "top_k", None),
        (["--top_k", "20"], "top_k", 20),
        (["--learning_rate", "3e-4"], "learning_rate", 3e-4),
        (["--epsilon_high", "1"], "epsilon_high", 1.0),
        (["--stop", "a,b"], "stop", ["a", "b"]),
        (["--stop", '["a,b"]'], "stop", ["a,b"]),
        (["--stop", "None"], "stop", None),
        (["--lora_target_modules", "q_proj,v_proj", "--use_peft", "true"], "lora_target_modules", ["q_proj", "v_proj"]),
        (["--vllm_urls", "http://a:1,http://b:2"], "vllm_urls", ["http://a:1", "http://b:2"]),
        (["--reward_weights", "0.5"], "reward_weights", [0.5]),
        (["--sampling_params", '{"seed": 3}'], "sampling_params", {"seed": 3}),
        (["--output-dir", "x"], "output_dir", "x"),
        (["--loss_type", "cispo"], "loss_type", "cispo"),
        (["--model_id", "123"], "model_id", "123"),
    ],
)
def test_overrides(words, field, value):
    assert getattr(parse_args(MUST + words), field) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lerning_rate", "1"], "unknown field lerning_rate: did you mean learning_rate?"),
        (["--bf16", "3"], "bf16='3': must be bool"),
        (["--batch_size", "2.5"], "batch_size='2.5': must be int"),
        (["--loss_type", "ppo"], "loss_type='ppo': must be one of grpo"),
        (["--num_generations", "1"], "num_generations=1: must be at least 2"),
        (["--sampling_params", "{"], "sampling_params='{': must be dict or None, as JSON"),
        (["--sampling_params", '{"n": 3}'], "sampling_params may not set n"),
        (["--batch_size", "9", "--num_minibatches", "2"], "cannot be divided into num_minibatches=2"),
        (["--epsilon", "nan"], "epsilon=nan: must be a finite number"),
        (["--temperature", "0"], "temperature=0.0: must be above 0"),
        (["--delta", "1.1"], "delta=1.1: must exceed"),
        (["--fsdp_bf16", "true"], "fsdp_bf16 has no effect without use_fsdp"),
        (["--lora_rank", "8"], "no effect without use_peft"),
        (["--reward_weights", "1,2"], "2 values for 1 reward_funcs"),
        (["--max_staleness", "-1"], "max_staleness=-1: must be at least 0"),
        (["--max_staleness", "0", "--stale_policy", "drop"], "stale_policy has no effect without max_staleness"),
        (["--max_staleness", "0", "--inflight_updates", "false"], "inflight_updates has no effect without"),
        (["--max_dropped_batches", "3"], "max_dropped_batches has no effect without drop_zero_advantage"),
        (["--old_logprobs", "sampler", "--off_policy_correction", "mask"], "no effect without old_logprobs=trainer"),
        (["--off_policy_correction", "none", "--correction_cap", "3"], "correction_cap has no effect without an"),
        (["--correction_floor", "0.1"], "correction_floor has no effect without off_policy_correction=mask"),
        (["--rollout_fn", "os.path.exists", "--extra_generations", "2"], "extra_generations has no effect with a"),
        (["--push_to_hub", "true"], "push_to_hub needs hub_repo_id"),
        (["--eval_steps", "5"], "eval_steps has no effect without eval_dataset_id"),
        (["--vllm_urls", "[]"], "vllm_urls is empty"),
        (["--vllm_urls", "localhost:8000"], "must start with http://"),
        (["--vllm_urls", "http://[1"], "http://[1 is no address"),
        (["--vllm_urls", "http://a:port"], "http://a:port is no address"),
        (["--vllm_urls", "http://user:token@a:1"], "a token belongs into VLLM_API_KEY"),
        (["--lora_target_modules", "[]", "--use_peft", "true"], "lora_target_modules is empty"),
        (["--sync_timeout", "0"], "sync_timeout=0.0: must be above 0"),
        (["--learning_rate", "inf"], "learning_rate=inf: must be a finite number"),
        (["--request_timeout", "3000"], "collective_timeout must exceed"),
        (["--reward_funcs", "os.path.nothing"], "no function os.path.nothing"),
        (["--reward_funcs", "no_such_module.f"], "no function no_such_module.f"),
        (["--reward_funcs", "..f"], "no function ..f"),
        (["--stop"], "--stop needs a value"),
        (["--wandb_project", "x"], "wandb_project has no effect without use_wandb"),
        (["--hub_private", "false"], "hub_private has no effect without push_to_hub"),
        (["--max_steps", "3", "--num_epochs", "2"], "num_epochs has no effect beside max_steps"),
        (["--dataset_id", "x.jsonl", "--dataset_split", "test"], "dataset_split has no effect on a dataset_id that is"),
        (["stray"], "unexpected 'stray'"),
    ],
)
def test_refusals(words, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_args(MUST + words)
    assert "\n" not in str(caught.value)


RECIPE = """
from config import TrainConfig
def rows(): return [{"prompt": "1"}]
def mine(completions, **_): return [1.0 for _ in completions]
def other(completions, **_): return [0.0 for _ in completions]
config = TrainConfig(model_id="m", dataset_id=rows, reward_funcs=[mine], learning_rate=2e-5%s)
"""


def test_recipe_and_its_own_functions(tmp_path, monkeypatch):
    path = tmp_path / "my_recipe.py"
    path.write_text(RECIPE % "")
    config = parse_args([str(path), "--reward_funcs", "other,os.path.exists", "--beta", "0.1"])
    assert config.reward_funcs == [sys.modules["recipe_my_recipe"].other, os.path.exists]
    assert (config.learning_rate, config.beta) == (2e-5, 0.1)
    saved = json.loads(json.dumps(to_json(config)))
    assert saved["reward_funcs"] == ["recipe_my_recipe.other", "genericpath.exists"]
    assert set(saved) == {f.name for f in dataclasses.fields(TrainConfig)}
    assert set(changed_fields(config)) == {"model_id", "dataset_id", "reward_funcs", "learning_rate", "beta"}


def test_bad_recipes(tmp_path):
    path = tmp_path / "bad_recipe.py"
    path.write_text(RECIPE % ", lerning_rate=1")
    with pytest.raises(ValueError, match="unknown field lerning_rate: did you mean learning_rate"):
        parse_args([str(path)])
    path.write_text("import no_such_module")
    with pytest.raises(ValueError, match="bad_recipe.py: No module named 'no_such_module'"):
        parse_args([str(path)])
    path.write_text("config = 3")
    with pytest.raises(ValueError, match="defines no `config = TrainConfig"):
        parse_args([str(path)])
    with pytest.raises(ValueError, match="no recipe at"):
        parse_args([str(tmp_path / "nowhere.py")])
    with pytest.raises(ValueError, match="dataset_id must be given"):
        parse_args(["--model_id", "m"])


def test_dotted_path_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_module.py").write_text("def f(**_): return []")
    monkeypatch.chdir(tmp_path)
    assert load_function("my_rewards_module.f").__name__ == "f"


def test_every_field_is_documented_and_read():
    source = (ROOT / "config.py").read_text()
    (cls,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "TrainConfig"]
    fields = []
    for node, following in itertools.pairwise(cls.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields.append(node.target.id)
            assert isinstance(following, ast.Expr), f"{fields[-1]} has no docstring"
    assert fields == list(TrainConfig.__dataclass_fields__)
    patterns = ("*.py", "rollouts/*.py", "training/*.py")
    code = "".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))
    for name in fields:
        assert re.search(rf'config\.{name}\b|config\["{name}"\]|self\.{name}\b|\("top_k", "top_p"', code), name
        uses = len(re.findall(rf"\b{name}\b", code.replace(source, "")))
        assert uses, f"nothing outside config.py reads {name}"
