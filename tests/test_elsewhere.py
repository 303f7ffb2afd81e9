"""Names and defaults of other trainers: what a script for them is told here, and how one is ported."""

import ast
import dataclasses
import json
import re
import sys
from typing import Any

import pytest
from documents import DOCUMENTS, blocks, cells
from fake_server import fake_server
from helpers import ROOT, answer_in, make_model, read
from test_config import MUST, make

from config import TrainConfig, UserError, parse_args
from train import main

PAGE = DOCUMENTS["docs/coming-from-elsewhere.md"]
HINTS = json.loads((ROOT / "docs" / "elsewhere.json").read_text())
NAMES = [name for name in HINTS if "=" not in name]
VALUES = [name.split("=") for name in HINTS if "=" in name]
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
# The rows of the table of defaults, but for its head, as lists of cells.
SECTION = re.split(r"^##+ ", PAGE.partition("# Defaults\n")[2], flags=re.MULTILINE)[0]
DEFAULTS = [cells(line) for line in SECTION.splitlines() if line.startswith("|")][2:]


def refused(function, *words, **fields):
    with pytest.raises(UserError) as caught:
        function(*words, **fields)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_of_elsewhere_is_told(name):
    """On the command line, below dots as verl has it, and in a recipe."""
    assert name not in FIELDS
    for words in ([f"--{name}", "1"], [f"--{name.replace('_', '-')}=x"]):
        assert refused(parse_args, [*MUST, *words]) == f"unknown field {name}: {HINTS[name]}"
    for given in (name, f"actor.optim.{name}"):
        assert refused(make, **{given: None}) == f"unknown field {given}: {HINTS[name]}"


def test_hints_name_fields():
    """Whatever is to be set is a field; what a hint takes a value for takes it."""
    for name, hint in HINTS.items():
        assert "\n" not in hint
        for field in re.findall(r"\bset ([a-z]\w+)", hint):
            assert field in FIELDS, (name, field)
        for path in re.findall(r"[\w/]+\.(?:py|md)\b", hint):
            assert path == "recipe.py" or (ROOT / path).exists(), (name, path)
        for field, function in re.findall(r"\b(\w+_fn)=(recipes\.\w+\.\w+)", hint):
            assert callable(getattr(make(**{field: function}), field)), name


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_what_a_value_of_elsewhere_is_told(name, value):
    """Where the field does not take it; on the command line, and in a recipe."""
    assert name in FIELDS
    given = {"True": True, "False": False, "-1": -1, "0": 0}.get(value, value)
    told = {repr(given): refused(make, **{name: given})}
    if value not in ("True", "true"):  # a word is a folder's name there
        told[repr(value)] = refused(parse_args, [*MUST, f"--{name}={value}"])
    for shown, text in told.items():
        assert text.startswith(f"{name}={shown}: Input should ")
        assert text.endswith("; " + HINTS[f"{name}={value}"])


# Fields whose defaults are the same value in TRL's GRPOConfig, under another name.
RENAMED = {
    "grad_norm": "max_grad_norm", "max_completion_len": "max_completion_length", "keep_last_n": "save_total_limit",
    "importance_level": "importance_sampling_level", "hub_repo_id": "hub_model_id", "warmup_ratio": "warmup_steps",
}  # fmt: skip
# Those whose defaults mean the same, in words of their own: (here, its default, those of TRL).
MEANS: list[tuple[str, Any, dict[str, Any]]] = [
    ("max_steps", None, {"max_steps": -1}),  # num_epochs counts
    ("top_k", None, {"top_k": 0}),
    ("sampling_params", None, {"top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}),
    ("sampling_params", None, {"generation_kwargs": None, "vllm_structured_outputs_regex": None}),
    # As many as one optimizer step takes.
    ("num_minibatches", 1, {"steps_per_generation": None, "generation_batch_size": None}),
    ("epsilon", None, {"epsilon": 0.2}),  # `clip_low`
    ("kl_gradient", "reverse", {"use_bias_correction_kl": True}),
    ("off_policy_correction", "truncate", {"vllm_importance_sampling_correction": True}),
    ("reference_decay", None, {"sync_ref_model": False}),
    ("order_fn", None, {"shuffle_dataset": True}),
    ("advantage_fn", None, {"multi_objective_aggregation": "sum_then_normalize"}),
    ("loss_fn", None, {"entropy_coef": 0.0, "use_adaptive_entropy": False}),
    ("loss_fn", None, {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}),
    ("rollout_fn", None, {"max_tool_calling_iterations": None}),
    ("use_wandb", False, {"report_to": "none"}),
    ("use_fsdp", False, {"fsdp": None}),
    ("eval_steps", 0, {"eval_steps": None}),
    ("log_completions_steps", 0, {"log_completions": False}),
]


def defaults_in(cell):
    """`name=value` of a cell, a Python literal, by name."""
    found = dict(span.split("=", 1) for span in re.findall(r"`([\w.]+=[^`]+)`", cell))
    return {name: ast.literal_eval(value) for name, value in found.items()}


def default_of(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


OURS = {name: default_of(field) for name, field in FIELDS.items()}


def test_defaults_that_differ_are_those_here():
    for here, _, why in DEFAULTS:
        assert why
        assert defaults_in(here)
        for name, value in defaults_in(here).items():
            assert OURS[name] == value, name
    assert (make().clip_low, make().clip_high) == (0.2, 0.2)


def test_defaults_are_trls():
    """Defaults are equal, or a row says why not; what is no field here has an answer."""
    pytest.importorskip("trl", reason="of requirements/dev.txt")
    from transformers.trainer_utils import SchedulerType
    from trl import GRPOConfig, ModelConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig

    classes = {"": GRPOConfig, "ModelConfig": ModelConfig, "AsyncGRPOConfig": AsyncGRPOConfig}
    theirs = {
        f"{prefix}.{field.name}".lstrip("."): default_of(field)
        for prefix, kind in classes.items()
        for field in dataclasses.fields(kind)
    }
    differing: dict[str, Any] = {}
    for name, value, others in MEANS:
        assert OURS[name] == value, name
        differing |= others
    for _, there, _ in DEFAULTS:
        differing |= defaults_in(there)
    for name, value in differing.items():
        assert theirs[name] == value, name

    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    shared = names & FIELDS.keys() - differing.keys() - {"output_dir"}
    for name, other in (RENAMED | {name: name for name in shared}).items():
        assert OURS[name] == theirs[other], name
    assert names - {*HINTS, *FIELDS} <= {"chat_template_kwargs"}
    schedules = {kind.value for kind in SchedulerType} - {"constant", "linear", "cosine"}
    assert all(f"lr_scheduler={name}" in HINTS for name in schedules)


SCRIPT, RECIPE = blocks("python", PAGE)[:2]


def keywords(source, name):
    """The keyword arguments of the call of a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
            return {word.arg: ast.unparse(word.value) for word in node.keywords}
    raise AssertionError(f"no call of {name}")


def test_names_of_the_script_are_fields_or_have_an_answer():
    """Handed over as they are, all that TRL has alone are refused at once."""
    given = keywords(SCRIPT, "GRPOConfig")
    foreign = given.keys() - FIELDS.keys()
    assert set(re.findall(r"unknown field (\w+):", refused(make, **given))) == foreign
    assert foreign <= HINTS.keys()
    ported = keywords(RECIPE, "TrainConfig")
    same = given.keys() & ported.keys() - {"scale_rewards", "loss_type"}
    assert {name: given[name] for name in same} == {name: ported[name] for name in same}


def test_the_recipe_trains(tmp_path, monkeypatch):
    """As it stands, but for its model, two steps, and W&B."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(i)} for i in range(16)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = f"ported_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = make_model(tmp_path / "model", max_len=1024)
    with fake_server(model, answer_in(0.0), max_model_len=1024) as server:
        words = [f"{name}.py", "--model_id", model, "--vllm_urls", server.url]
        words += ["--max_steps", "2", "--use_wandb", "false", "--log_completions_steps", "0"]
        main(parse_args([*words, "--output_dir", "run"]))
    metrics = read(tmp_path, "metrics")
    assert [row["step"] for row in metrics] == [1, 2]
    assert {"rewards/is_right", "kl"} <= metrics[-1].keys()
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
