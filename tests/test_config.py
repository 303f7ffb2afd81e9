"""The command line, and refusals in one line before anything expensive."""

import dataclasses
import json
import os
import pickle
import re
import sys

import cloudpickle
import pytest
from helpers import ROOT

from config import TrainConfig, UserError, changed_fields, describe, parse_args, to_json

MUST = ["--model_id", "m", "--dataset_id", "d", "--reward_funcs", "os.path.exists"]


def make(**fields):
    needed = {"model_id": "m", "dataset_id": "d", "reward_funcs": ["os.path.exists"]}
    return TrainConfig(**needed | fields)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--bf16 true", "bf16", True),
        ("--top_k none", "top_k", None),
        ("--stop a,b", "stop", ["a", "b"]),
        ('--stop ["a,b"]', "stop", ["a,b"]),
        ("--stop 3", "stop", ["3"]),
        ("--stop \\n", "stop", ["\n"]),
        ("--reward_weights=-.5", "reward_weights", [-0.5]),
        ('--sampling_params {"seed":3}', "sampling_params", {"seed": 3}),
        ("--output-dir x", "output_dir", "x"),
        ("--output_dir=~/run", "output_dir", os.path.expanduser("~/run")),
        ("--reference_id ~/m --beta 1", "reference_id", os.path.expanduser("~/m")),
        ("--model_id 123", "model_id", "123"),
        ("--model_id none", "model_id", "none"),
        ("--scale_rewards none", "scale_rewards", "none"),
        ("--failed_reward -1", "failed_reward", -1.0),
        ("--wandb-project=--a-b=c --use_wandb true", "wandb_project", "--a-b=c"),
        ('--reward-funcs ["os.path.isfile"]', "reward_funcs", [os.path.isfile]),
        ("--collate_fn os.path.isfile", "collate_fn", os.path.isfile),
        ("--batch_size 3 --batch_size 4", "batch_size", 4),
        ('--eval_dataset_id {"a":"x.jsonl"}', "eval_dataset_id", {"a": "x.jsonl"}),
    ],
)
def test_overrides(words, field, value):
    assert getattr(parse_args(MUST + words.split()), field) == value


MOVING = "--beta 0.1 --reference_decay 0.5"
NO_EFFECT = [  # what is set, and "... has no effect with" what
    ("--lora_rank 8", "lora_rank", "use_peft=False"),
    ("--fsdp_bf16 true", "fsdp_bf16", "use_fsdp=False"),
    ("--hub_private false", "hub_private", "push_to_hub=False"),
    ("--eval_steps 5", "eval_steps", "eval_dataset_id=None"),
    ("--eval_dataset_id x --eval_generations 3", "eval_generations", "eval_temperature=0.0"),
    ("--log_completions_steps 5 --logged_groups 0", "log_completions_steps", "logged_groups=0"),
    ("--log_completions_steps 5", "log_completions_steps", "use_wandb=False and use_trackio=False"),
    ("--wandb_project x", "wandb_project", "use_wandb=False"),
    ("--max_staleness 0 --inflight_updates false", "inflight_updates", "max_staleness=0"),
    ("--old_logprobs sampler --correction_cap 3", "correction_cap", "old_logprobs=sampler"),
    ("--off_policy_correction none --correction_cap 3", "correction_cap", "off_policy_correction"),
    ("--correction_floor 0.1", "correction_floor", "off_policy_correction=truncate"),
    ("--kl_gradient forward", "kl_gradient", "beta=0.0"),
    ("--reference_id x", "reference_id", "beta=0.0 and loss_fn=None"),
    ("--reference_decay 0.5", "reference_decay", "beta=0.0 and loss_fn=None"),
    ("--beta 0.1 --reference_steps 2", "reference_steps", "reference_decay=None"),
    ("--loss_type cispo --delta 4", "delta", "loss_type=cispo"),
    ("--advantage_fn os.path.exists --scale_rewards none", "scale_rewards", "advantage_fn"),
]
REFUSED = [
    ("--lerning_rate 1", "unknown field lerning_rate: did you mean learning_rate?"),
    ("--model m", "unknown field model: did you mean model_id?"),
    ("--batch_size 2.5", "batch_size='2.5': Input should be a valid integer"),
    ("--batch_size 0", "batch_size='0': Input should be greater than 0"),
    ("--num_generations 1", "num_generations='1': Input should be greater than or equal to 2"),
    ("--warmup_ratio 1.5", "warmup_ratio='1.5': Input should be less than or equal to 1"),
    ("--max_staleness -1", "max_staleness='-1': Input should be greater than or equal to 0"),
    ("--epsilon nan", "epsilon='nan': Input should be a finite number"),
    (f"--seed {2**64}", f"seed='{2**64}': Input should be less than or equal to"),
    # vLLM raises one below 0.01, and refuses one above 2: it would sample from another softmax.
    ("--temperature 0.0099", "temperature='0.0099': Input should be greater than or equal to 0.01"),
    ("--temperature 2.01", "temperature='2.01': Input should be less than or equal to 2"),
    ("--eval_dataset_id e --eval_temperature 0.0099", "eval_temperature must be 0, or at least"),
    ("--eval_dataset_id e --eval_temperature 2.01", "eval_temperature='2.01': Input"),
    ("--loss_type ppo", "loss_type='ppo': Input should be 'grpo', "),
    ("--sampling_params {", "sampling_params='{': Input should be a valid dictionary"),
    ('--sampling_params {"n":3}', "sampling_params may not set n"),
    ("--stop [1", "stop='[1': Input should be a valid list"),
    ("--stop []", "stop=[]: List should have at least 1 item"),
    ("--dataset_id {}", "dataset_id={}: "),
    ('--dataset_id {"":"x.jsonl"}', "dataset_id"),
    ("--stop", "--stop: give --field value, or --field=value where the value begins with --"),
    ("--seed 3 batch_size 4", "batch_size: give --field value"),
    ("--reward_funcs os.path.nothing", "Invalid python path: No module named 'os.path.nothing'"),
    ("--reward_funcs ..f", "Invalid python path: No module named 'f'"),
    ("--reward_funcs os.path", "Input should be callable"),
    ("--reward_funcs os.path.exists,os.path.exists", "each needs a __name__ of its own"),
    ("--reward_weights 1,2", "reward_weights must be as many as reward_funcs"),
    ("--batch_size 9 --num_minibatches 2", "batch_size must be a multiple of num_minibatches"),
    ("--max_tokens_per_gpu 512", "max_tokens_per_gpu must exceed max_completion_len"),
    ("--off_policy_correction mask --correction_floor 3", "correction_floor must be below"),
    ("--epsilon 1", "epsilon must be below 1, but for loss_type=cispo"),
    ("--delta 1.1", "delta must exceed 1 + epsilon_high"),
    ("--push_to_hub true", "push_to_hub needs hub_repo_id"),
    ("--max_steps 3 --num_epochs 2", "num_epochs has no effect with max_steps"),
    (f"{MOVING} --dtype bfloat16", "reference_decay: an average in bfloat16 rounds its steps away"),
    (f"{MOVING} --reference_id m", "the reference is a part, or reference_id, or moves by ref"),
    *((words, f"{field} has no effect with {other}") for words, field, other in NO_EFFECT),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_refusals(words, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        parse_args(MUST + words.split())
    assert "\n" not in str(caught.value)


RECIPE = """
from config import TrainConfig
def rows(): return [{"prompt": "1"}]
def mine(completions, **_): return [1.0 for _ in completions]
def other(completions, **_): return [0.0 for _ in completions]
config = TrainConfig(model_id="m", dataset_id=rows, reward_funcs=[mine], learning_rate=2e-5%s)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file below an empty working directory, which is not on the path; modules made of it are forgotten."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    yield write
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_recipe_and_its_own_functions(write):
    path = write("own_functions.py", RECIPE % "")
    write("beside_it.py", "def f(**_): return []")
    config = parse_args([path, "--reward_funcs", ".other,beside_it.f", "--beta", "0.1"])
    assert parse_args([path, "--reward_funcs", "other"]).reward_funcs == config.reward_funcs[:1]
    functions = [sys.modules["own_functions"].other, sys.modules["beside_it"].f]
    assert config.reward_funcs == functions
    assert (config.learning_rate, config.beta) == (2e-5, 0.1)
    saved = json.loads(json.dumps(to_json(config)))
    assert saved["reward_funcs"] == ["own_functions.other", "beside_it.f"]
    assert set(saved) == {f.name for f in dataclasses.fields(TrainConfig)}
    needed = {"model_id", "dataset_id", "reward_funcs"}
    assert changed_fields(config) == {*needed, "learning_rate", "beta"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RECIPE % ", lerning_rate=1", "unknown field lerning_rate: did you mean learning_rate"),
        (RECIPE.replace('model_id="m", ', "") % "", r"model_id=None: Field required"),
        ("import no_such_module", "bad_recipe.py: No module named 'no_such_module'"),
        ("def f(:", "bad_recipe.py: invalid syntax"),
        ("config = 3", "defines no `config = TrainConfig"),
    ],
)
def test_bad_recipes(write, text, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_args([write("bad_recipe.py", text)])
    assert "\n" not in str(caught.value)


def test_errors_of_the_users_own_code_are_passed_on(write):
    write("odd_values.py", "int('x')\ndef f(): pass")
    with pytest.raises(ValueError, match="invalid literal") as caught:
        parse_args([*MUST, "--collate_fn", "odd_values.f"])
    assert type(caught.value) is ValueError
    with pytest.raises(TypeError, match="unsupported operand"):
        parse_args([write("odd_types.py", "1 + 'x'")])
    with pytest.raises(UserError, match="recipe nowhere.py: no such file"):
        parse_args(["nowhere.py"])


def test_recipes_are_importable_modules(write):
    """By a dotted name below this project, else by the file's stem."""
    module_of = lambda path: parse_args([path]).reward_funcs[0].__module__
    assert module_of(str(ROOT / "recipes" / "own_reward.py")) == "recipes.own_reward"
    assert module_of(write("runs/first/sums.py", RECIPE % "")) == "sums"
    write("recipes/beside.py", "")
    imports = "from recipes.rewards import exact_match as ours\nimport beside\n"
    write("recipes/mine.py", imports + RECIPE % "")
    assert module_of("recipes/mine.py") == "mine"
    assert module_of(write("v1.5/dotted_folder.py", RECIPE % "")) == "dotted_folder"
    assert module_of(write("sums-2.py", RECIPE % "")) == "sums-2"


@pytest.mark.parametrize("name", ["math.py", "config.py", "colorsys.py", "v1.5.py", "recipe.txt"])
def test_a_recipe_hides_no_other_module(write, name):
    """Neither one that is imported already, nor, as colorsys, one that could be."""
    sys.modules.pop("colorsys", None)
    message = "rename it|no such file, or none named NAME.py without further"
    with pytest.raises(UserError, match=message):
        parse_args([write(name, RECIPE % "")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": True}, "batch_size=True: Input should be a valid integer"),
        ({"batch_size": "2"}, "batch_size='2': Input should be a valid integer"),
        ({"stop": "a"}, "stop='a': Input should be a valid list; --help explains it"),
        ({"rollout_fn": 3}, "rollout_fn=3: Input should be callable"),
    ],
)
def test_strict_types(fields, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make(**fields)


def test_a_config_is_a_frozen_dataclass():
    config = make(temperature=2, reward_funcs=[os.path.exists, "os.path.isfile"])
    assert isinstance(config.temperature, float)
    assert config.reward_funcs == [os.path.exists, os.path.isfile]
    assert dataclasses.replace(config, batch_size=4).batch_size == 4
    with pytest.raises(UserError, match="batch_size=0"):
        dataclasses.replace(config, batch_size=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch_size = 3
    assert pickle.loads(pickle.dumps(config)) == config
    local = make(dataset_id=lambda: [])
    assert cloudpickle.loads(cloudpickle.dumps(local)).dataset_id() == []
    assert make().vllm_urls is not make().vllm_urls


BENT = "warning: {}: tokens are not drawn from the policy itself; ratios are then inexact"
BENDS = {"repetition_penalty": 1.1, "logit_bias": {"5": 1.0}, "top_p": 0.9}


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({}, None),
        ({"top_k": 3}, BENT.format("top_k")),
        ({"sampling_params": BENDS}, BENT.format("logit_bias, repetition_penalty, top_p")),
        ({"epsilon": 0.1, "delta": 4.0}, "delta, epsilon without effect: all ratios are 1"),
        ({"epsilon": 0.1, "num_minibatches": 2}, None),
        ({"dtype": "bfloat16"}, "weights lose most updates"),
        ({"dtype": "bfloat16", "use_peft": True, "learning_rate": 1e-5}, None),
        ({"use_peft": True}, "learning_rate=1e-06: LoRA hardly learns below 1e-5; try 1e-5 to"),
    ],
)
def test_describe(fields, warning):
    _, *lines = describe(make(**fields)).splitlines()
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(lines) - len(warnings) == len(fields) + 3
    assert "  reward_funcs = ['genericpath.exists']" in lines
    assert len(warnings) == (warning is not None)
    assert not warning or warning in warnings[0]


def test_help_shows_every_field(capsys):
    """With its type, its default and its docstring."""
    with pytest.raises(SystemExit) as ended:
        parse_args(["recipe_that_is_not_read.py", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "[recipe.py] [--field value ...]" in text
    for field in dataclasses.fields(TrainConfig):
        settings = rf"\n    {field.name}: (?:(?!\"\"\"|\n    \w+: ).)+"
        documented = re.compile(settings + r'\n    """(?:(?!""").)+"""\n', re.DOTALL)
        assert documented.search(text), f"{field.name} has no docstring"
    for line in ("    model_id: PathOrName", "    batch_size: PositiveInt = 32"):
        assert line in text.splitlines()


@pytest.mark.house
def test_every_field_is_read():
    rooms = (".", "rollouts", "training", "weights", "server")
    files = [file for room in rooms for file in (ROOT / room).glob("*.py")]
    code = "".join(file.read_text() for file in files if file.name != "config.py")
    for field in dataclasses.fields(TrainConfig):
        assert re.search(rf"\b{field.name}\b", code), f"nothing but config.py reads {field.name}"
