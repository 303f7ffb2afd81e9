"""Kinds of faults that users of other trainers met, each by the value that would have been wrong."""

import json
import math
import os
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import some_rewards
import torch
from datasets import Dataset, DatasetDict
from helpers import ENV, ROOT, make_tokenizer, table
from PIL import Image
from test_data import make_config, make_groups, prompts_of, rows, score
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

import recipes.losses
import train
from config import UserError, parse_args
from prefix_attention import pack
from recipes.rewards import format_reward
from rollouts.custom import can_teach
from rollouts.data import fingerprint
from rollouts.evaluation import held_out_metrics
from rollouts.group import Completion, Group, Prompt
from rollouts.images import open_image
from rollouts.scoring import Failures, decoded, spoken
from training.batching import MicroBatch, Update
from training.logs import token_texts
from training.metrics import TokenSums, batch_metrics
from training.model import load_model, token_logprobs
from training.optimizer import build_optimizer
from utils import process_group

MUST = ["--model_id", "m", "--dataset_id", "d", "--reward_funcs", "os.path.exists"]

# -- Parameters of vLLM ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 3}, "may not set max_tokens, which is the trainer"),
        ({"temperature": 0.5}, "may not set temperature, which is the trainer"),
        (
            {"trace_decode_token_ids": [1]},
            "may not set trace_decode_token_ids, which is the trainer",
        ),
        ([], r"sampling_params=(\[\]|'\[\]'): Input should be a valid dictionary"),
    ],
)
def test_sampling_params_that_are_fields(given, message):
    """All else vLLM checks: test_server.py."""
    with pytest.raises(UserError, match=message):
        make_config(sampling_params=given)
    with pytest.raises(UserError, match=message):
        parse_args([*MUST, "--sampling_params", json.dumps(given)])


@pytest.mark.parametrize("value", [0.001, 0.0099, 2.01, 0.0])
def test_temperatures_that_the_server_would_change(value):
    """vLLM raises one below 0.01, and refuses one above 2; what it samples from is not the trainer's softmax."""
    with pytest.raises(UserError, match="temperature"):
        make_config(temperature=value)
    if value:
        with pytest.raises(UserError, match="eval_temperature"):
            make_config(eval_dataset_id="e", eval_temperature=value)
    assert make_config(temperature=0.01).temperature == 0.01


# -- Accuracy ----------------------------------------------------------------------------------------------------------


def exact(**_: Any) -> list[float]:
    return []


def brevity(**_: Any) -> list[float]:
    return []


def evaluated(rewards: list[list[float | None]], **fields: Any) -> dict[str, float]:
    group = Group(Prompt(0, [5], "a", {}), rewards=table(rewards))
    group.reward = [sum(value for value in row if value is not None) for row in rewards]
    config = make_config(
        reward_funcs=[exact, brevity],
        eval_dataset_id="e",
        eval_temperature=1.0,
        eval_generations=len(rewards),
        **fields,
    )
    return held_out_metrics([group], config)


def test_accuracy_is_of_one_function():
    """The sum says nothing of who is right: right and long is 0.93, wrong and well formed is 1."""
    values = evaluated([[1.0, -0.07], [0.0, 1.0], [0.0, -0.07], [None, 1.0]])
    assert values["accuracy"] == pytest.approx(1 / 3)
    assert values["pass@2"] == pytest.approx(
        2 / 3
    )  # of the three pairs of three, two have the right one
    assert evaluated([[1.0, 0.5], [1.0, 0.0]], accuracy_func="brevity")["accuracy"] == 0.0
    graded = evaluated([[0.5, 0.5], [1.0, 0.0]])
    assert not [name for name in graded if name.startswith(("accuracy", "pass"))]
    assert evaluated([[0.5, 0.5], [1.0, 0.0]], accuracy_func="exact")["accuracy"] == 0.5
    # A failed call's value is no verdict of right, and leaves the others what they are.
    failed = evaluated([[1.0, 0.5], [-0.5, 0.0]], failed_reward=-0.5)
    assert failed["accuracy"] == 0.5
    with pytest.raises(UserError, match="accuracy_func=nobody: it is none of reward_funcs"):
        make_config(eval_dataset_id="e", accuracy_func="nobody")


# -- Rewards and their texts -------------------------------------------------------------------------------------------


def special_tokenizer():
    tokenizer = make_tokenizer()
    for token in ("<think>", "</think>", "<answer>", "</answer>", "<|turn_end|>"):
        tokenizer.add_tokens([AddedToken(token, special=True)], special_tokens=True)
    return tokenizer


def test_special_tokens_are_part_of_a_text():
    tokenizer = special_tokenizer()

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    thought = "<think>a</think><answer>b</answer>"
    for end in ("", "<eos>", "<|turn_end|>", "<eos><eos>"):
        assert spoken(ids(thought + end), tokenizer, is_ended=end != "") == thought
    assert format_reward([thought]) == [1.0]
    cut = "<think>a</think>"  # a special token, and no end
    assert spoken(ids(cut), tokenizer, is_ended=False) == cut
    (stop_id,) = ids("</answer>")
    for kept in (stop_id, "</answer>"):
        assert spoken(ids(thought), tokenizer, is_ended=True, kept=[kept]) == thought
    assert spoken(ids("a<eos>[user]b<eos>"), tokenizer) == "a[user]b"
    turns = "a<|turn_end|>b<|turn_end|>"  # a special token that is not the tokenizer's end
    assert spoken(ids(turns), tokenizer) == "a<|turn_end|>b"
    assert spoken(ids("a<eos>"), tokenizer, kept=["<eos>"]) == "a<eos>"


def test_text_is_as_it_was_sampled():
    """Whatever a tokenizer would clean up; and its padding token may be any word."""
    words = ["<unk>", "\u2581a", "\u2581.", "\u2581,", "\u2581n't", "\u2581!", "<eos>", "0", "1"]
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="0",
        clean_up_tokenization_spaces=True,
    )  # fmt: skip
    ids = [1, 2, 1, 3, 1, 4, 1, 5]
    assert spoken(ids, tokenizer) == "a . a , a n't a !"
    assert "".join(token_texts(ids, tokenizer)).strip() == "a . a , a n't a !"
    for end in ([], [6]):
        assert spoken([8, 7, 7, 8, 7, 8, *end], tokenizer) == "100101"
    assert spoken([8, 7, 6, 8, 7, 6], tokenizer) == "1010"
    assert spoken([8, 7], tokenizer, is_ended=False) == "10"


def test_what_a_run_stops_at_is_part_of_a_text():
    """A stop string that is one special token, stop_token_ids, and an end of the model among them."""
    tokenizer = special_tokenizer()

    def text_of(text, **fields):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        completion = Completion(ids, [-1.0] * len(ids), "stop", 0)
        group = Group(Prompt(0, [5], "a", {}), [completion])
        return decoded(group, tokenizer, make_config(**fields))[0]

    thought = "<think>a</think><answer>b</answer>"
    (stop_id,) = tokenizer("</answer>", add_special_tokens=False)["input_ids"]
    assert text_of(thought, stop=["</answer>"]) == thought
    assert text_of(thought, sampling_params={"stop_token_ids": [stop_id]}) == thought
    assert (
        text_of("a<eos>", sampling_params={"stop_token_ids": [tokenizer.eos_token_id]}) == "a<eos>"
    )
    tokenizer.unk_token = tokenizer.eos_token  # as GPT-2's: a string of several tokens is none
    assert text_of("a<eos>", stop=["never"]) == "a"


def test_a_thought_that_the_prompt_has_opened():
    assert format_reward(["a</think><answer>b</answer>"]) == [1.0]
    assert format_reward(["</think><answer>b</answer>"]) == [1.0]
    assert format_reward(["a<answer>b</answer>"]) == [0.0]


def test_a_reward_that_changes_a_column_changes_its_own():
    groups = make_groups()
    for group in groups:
        group.prompt.columns["notes"] = ["a"]
        group.prompt = Prompt(
            7, group.prompt.token_ids, [{"role": "user", "content": "a"}], {"notes": ["a"]}
        )
    assert score(groups, make_config(reward_funcs=[some_rewards.changes])) == [
        [3.0, 3.0],
        [3.0, 3.0],
    ]
    assert groups[0].prompt.columns["notes"] == ["a"]


@pytest.mark.parametrize("failed", [[0, 1, 2, 3], [5, 7, 4, 6], [1, 2, 3, 4, 5, 6, 7]])
def test_failures_in_a_row_end_a_run_in_whatever_order_they_end(tmp_path, failed):
    """Four that began in a row, of one function; seven at the latest, if their beginning was not the first.

    A tuple among the keys of a column is no failure of its own.
    """
    failures = Failures("rewards", make_config(batch_size=1, output_dir=str(tmp_path)))
    group = Group(Prompt(0, [5], "a", {("a", 1): 2, "b": {3}}))  # type: ignore[dict-item]
    of_f = [failures.begin("f") for _ in range(8)]
    of_g = [failures.begin("g") for _ in range(8)]
    for number in failed[:-1]:
        failures.note(of_f[number], "it fails", group)
    failures.note(of_g[failed[-1]], "it fails", group)
    with pytest.raises(UserError, match="it fails; so did 4 calls in a row"):
        failures.note(of_f[failed[-1]], "it fails", group)
    assert failures.count == len(failed) + 1


def test_a_run_in_which_half_of_the_calls_fail_goes_on(tmp_path):
    """Also where they all end before the others: they began between calls that succeed."""
    failures = Failures("rewards", make_config(batch_size=1, output_dir=str(tmp_path)))
    calls = [failures.begin("f") for _ in range(100)]
    for call in calls[::2]:
        failures.note(call, "it fails", make_groups()[0])
    assert failures.count == 50


def test_what_a_float_can_be_made_of_is_a_reward():
    assert (
        score(make_groups(), make_config(reward_funcs=[some_rewards.other_numbers]))
        == [[1.0, 0.5]] * 2
    )
    for wrong in (some_rewards.arrays, some_rewards.numbers_as_text):
        with pytest.raises(UserError, match="must return a list of 2, one per completion"):
            score(make_groups(), make_config(reward_funcs=[wrong]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (some_rewards.large, "OverflowError: int too large to convert to float"),
        (some_rewards.largest, r"it returned \[1.0, 1.7e\+308\]"),
    ],
)
def test_numbers_that_no_loss_takes(function, message):
    """Nor would their weighted sum be one, in float32."""
    where = (
        f"reward {function.__name__} on dataset row 7 must return a list of 2, one per completion"
    )
    with pytest.raises(UserError, match=f"{where}: numbers below 1e30, or None: {message}"):
        score(make_groups(), make_config(reward_funcs=[function]))


# -- Data --------------------------------------------------------------------------------------------------------------


def test_a_csv_row_of_more_cells_than_names(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\n1+1=,2\n1+1=,2,3\n")
    with pytest.raises(UserError, match="a.csv: a row has more cells than the header has names"):
        prompts_of(str(tmp_path / "a.csv"), make_tokenizer())


def test_csv_and_json_are_read(tmp_path):
    """Every cell as it stands: a date, a number with zeros before it, the word NA."""
    words = {"day": "2020-01-01", "code": "007", "word": "NA"}
    table = [row | words for row in rows()]
    (tmp_path / "a.json").write_text(json.dumps(table))
    lines = [
        "prompt,answer,level,day,code,word",
        *(",".join(map(str, row.values())) for row in table),
    ]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    expected = [row["prompt"] for row in table]
    for name in ("a.json", "a.csv"):
        prompts = prompts_of(str(tmp_path / name))
        assert [prompt.content for prompt in prompts] == expected
        assert {name: prompts[0].columns[name] for name in words} == words
    (tmp_path / "lines.json").write_text("\n".join(json.dumps(row) for row in table))
    assert len(prompts_of(str(tmp_path / "lines.json"))) == len(table)
    (tmp_path / "b.json").write_text('{"data": []}')
    with pytest.raises(
        UserError, match="row 0: it has no `prompt`, a string or a list of messages: {'data': .*}"
    ):
        prompts_of(str(tmp_path / "b.json"))


class DataFrame:
    """As pandas' one, which is a list of its columns' names."""

    def __iter__(self):
        return iter(["prompt"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            lambda: DatasetDict(train=Dataset.from_list(rows())),
            "row 0: it has no `prompt`, a string or a list of messages: 'train'",
        ),
        (DataFrame, "row 0: it has no `prompt`, a string or a list of messages: 'prompt'"),
        (lambda: ["a", "b"], "row 0: it has no `prompt`, a string or a list of messages: 'a'"),
    ],
)
def test_what_is_no_list_of_rows(source, message):
    with pytest.raises(UserError, match=message):
        prompts_of(source)


def test_an_endless_generator_is_refused(monkeypatch):
    """Whatever `max_steps` is: a run could not be made longer on the same rows."""
    monkeypatch.setattr("rollouts.data.MOST_ROWS", 20)

    def rows(num):
        return lambda: ({"prompt": f"{number}="} for number in range(num))

    with pytest.raises(UserError, match="goes on after 20 rows"):
        prompts_of(rows(10**9), max_steps=3)
    few, more = (prompts_of(rows(19), max_steps=max_steps) for max_steps in (3, 30))
    assert fingerprint(few) == fingerprint(more)


def test_paths_and_words_of_the_command_line(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = parse_args(
        [*MUST, "--output_dir=~/run", "--stop", "\\n", "--reference_id", "~/m", "--beta", "1"]
    )
    assert (config.output_dir, config.stop, config.reference_id) == (
        "/home/me/run",
        ["\n"],
        "/home/me/m",
    )
    with pytest.raises(
        UserError, match="seed='18446744073709551616': Input should be less than or equal"
    ):
        parse_args([*MUST, "--seed", str(2**64)])


def test_recipes_whose_names_cannot_be_imported(tmp_path):
    dotted = tmp_path / "r.v2.py"
    dotted.write_text("")
    with pytest.raises(
        UserError, match="r.v2.py: no such file, or none named NAME.py without further dots"
    ):
        parse_args([str(dotted)])
    (tmp_path / "utils.py").write_text("def mine(): pass")
    (tmp_path / "shadowed_recipe.py").write_text("from utils import mine")
    with pytest.raises(UserError, match=r"cannot import name 'mine' from 'utils' \(.*utils.py\)"):
        parse_args([str(tmp_path / "shadowed_recipe.py")])


# -- Pixels ------------------------------------------------------------------------------------------------------------


def test_transparent_pixels_have_a_white_ground():
    for mode, pixel in (("RGBA", (255, 0, 0, 0)), ("LA", (0, 0))):
        assert open_image(Image.new(mode, (2, 2), pixel)).getpixel((0, 0)) == (255, 255, 255)
    half = open_image(Image.new("RGBA", (1, 1), (255, 0, 0, 128))).getpixel((0, 0))
    assert half[0] == 255
    assert abs(half[1] - 127) <= 1
    palette = Image.new("P", (1, 1))
    palette.info["transparency"] = 0
    assert open_image(palette).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_deep_pixels_are_refused(kind):
    """PIL's own conversion cuts them off at 255, or takes floats for black."""
    with pytest.raises(ValueError, match=r"image of mode \S+: save it with 8 bits a channel"):
        open_image(Image.fromarray(np.array([[0, 1]], dtype=kind)))


# -- Numbers -----------------------------------------------------------------------------------------------------------


NO_ROW: Any = None


def test_sums_over_servers_count_beyond_float32(monkeypatch):
    """In float32 a count of ones stays at 2^24, and the mean difference grows with each further token."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
    monkeypatch.setattr("training.metrics.gather_objects", lambda value: [value])
    sums = TokenSums(torch.device("cpu"))
    many = 2**22
    logprobs = torch.full((many,), -1.0)
    servers = torch.ones(many, dtype=torch.int16)
    for _ in range(6):  # 25 million tokens
        ones = torch.ones(many)
        row = MicroBatch(NO_ROW, ones, ones, logprobs - 0.25, servers)
        sums.add({}, torch.zeros(many), logprobs, row, True)
    row = MicroBatch(NO_ROW, ones[:1], ones[:1], logprobs[:1] - 0.25, servers[:1])
    sums.add({}, torch.zeros(1), logprobs[:1], row, True)
    assert sums.totals["tokens"].item() == 6 * many + 1
    distance = sums.totals["sampling/sampling_logp_difference/mean"].item()
    assert distance == (6 * many + 1) * 0.25
    metrics, gaps = sums.metrics()
    assert gaps == {0: 0.25}
    assert metrics["sampling/current_logp_difference"] == 0.25
    assert metrics["sampling/sampling_logp_difference/mean"] == 0.25


@pytest.mark.parametrize("name", ["sapo", "dppo_tv"])
def test_losses_of_recipes_take_the_reverse_kl(name):
    """The gradient of β·ρ·k3 through ρ and k3, by hand: k = e^d - d - 1, d = ref - logp, so ρ(k + 1 - e^d)."""
    values = {"old_logprobs": torch.tensor([-1.2]), "ref_logprobs": torch.tensor([-0.7])}
    gradients = {}
    for kind in ("forward", "reverse"):
        config = make_config(beta=0.3, kl_gradient=kind, old_logprobs="sampler", loss_type="dapo")
        logprobs = torch.tensor([-1.0], requires_grad=True)
        loss, _ = getattr(recipes.losses, name)(
            logprobs, values["old_logprobs"], values["ref_logprobs"], torch.zeros(1), torch.ones(1),
            torch.zeros(1, dtype=torch.long), config,
        )  # fmt: skip
        loss.backward()
        assert logprobs.grad is not None
        gradients[kind] = logprobs.grad.item()
    gap = 0.3
    k3 = math.exp(gap) - gap - 1
    ratio = math.exp(0.2)
    assert gradients["forward"] == pytest.approx(0.3 * (1 - math.exp(gap)), rel=1e-5)
    assert gradients["reverse"] == pytest.approx(0.3 * ratio * (k3 + 1 - math.exp(gap)), rel=1e-5)


def test_cispo_keeps_its_upper_bound():
    """With epsilon 10, for no lower bound, the upper one of verl's recipe is 1.2, and not 11."""
    config = make_config(loss_type="cispo", epsilon=10.0)
    assert (config.clip_low, config.clip_high) == (10.0, 0.2)
    assert make_config(epsilon=0.3).clip_high == 0.3


def test_what_decays_is_what_transformers_decays():
    """Its trainer's own answer, for a family with biases that are matrices and sinks that are vectors."""
    from transformers import Trainer

    settings = GptOssConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = GptOssForCausalLM(settings)
    optimizer, _ = build_optimizer(model, 1, make_config(weight_decay=0.1))
    expected = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    names = {weight: name for name, weight in model.named_parameters()}
    decaying, others = (group["params"] for group in optimizer.param_groups)
    assert {names[weight] for weight in decaying} == expected
    assert {names[weight] for weight in others} == set(names.values()) - expected
    assert "model.layers.0.self_attn.sinks" in expected
    assert "model.layers.0.mlp.experts.gate_up_proj_bias" not in expected


# -- Advantages ---------------------------------------------------------------------------------------------------------


def by_length(rewards, groups):
    lengths = torch.tensor(
        [group.prompt.columns["lengths"] for group in groups], dtype=torch.float64
    )
    return lengths - lengths.mean(dim=1, keepdim=True)


def test_groups_that_can_teach_by_their_advantages():
    """Rewards that are all equal teach something where `advantage_fn` says so, and others nothing."""
    config = make_config(advantage_fn=by_length, num_generations=2)
    alike = Group(Prompt(0, [5], "a", {"lengths": [1.0, 2.0]}), reward=[1.0, 1.0])
    unlike = Group(Prompt(0, [5], "a", {"lengths": [2.0, 2.0]}), reward=[0.0, 1.0])
    assert [can_teach(group, config) for group in (alike, unlike)] == [True, False]
    assert [can_teach(group, make_config()) for group in (alike, unlike)] == [False, True]


# -- Signals -----------------------------------------------------------------------------------------------------------

SIGNALLED = """
import os, signal, sys, threading, time
sys.path[:0] = [{root!r}]
import utils
utils.is_main = lambda: True
stop = threading.Event()
with utils.stop_signals(stop):
    for _ in range({num}):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep({pause_s})
    assert stop.is_set()
os._exit(7)
"""


@pytest.mark.parametrize(
    ("num", "pause_s", "status"),
    [(1, 0.02, 7), (3, 0.02, 7), (2, 1.1, 130)],
)
def test_a_second_ctrl_c_ends_at_once(num, pause_s, status):
    """A second later, or more: torchrun and Slurm pass on copies of the first, which do not count."""
    code = SIGNALLED.format(root=str(ROOT), num=num, pause_s=pause_s)
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout.count(b"SIGINT") == 1


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ("SIGHUP", 7),
        ("SIGUSR1", 7),
        ("SIGUSR1 SIGTERM", 7),  # Slurm's warning before a time limit, and the limit
        ("SIGTERM SIGHUP", 7),  # the terminal closes meanwhile
        ("SIGUSR1 SIGUSR1", 128 + signal.SIGUSR1),
    ],
)
def test_every_signal_that_ends_a_run_saves(signals, status):
    """Only the same one, a second later, ends at once."""
    code = SIGNALLED.format(root=str(ROOT), num=0, pause_s=0).replace(
        "    assert stop",
        f"    for name in {signals.split()!r}:\n        os.kill(os.getpid(), getattr(signal, name))\n"
        "        time.sleep(1.1)\n    assert stop",
    )
    hears = partial(
        signal.signal, signal.SIGHUP, signal.SIG_DFL
    )  # as these tests may run under nohup
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, capture_output=True, check=False, preexec_fn=hears
    )
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(signals.split()[0].encode() + b": saving the last whole step")
    assert done.stdout.count(b"saving") == 1


def test_under_nohup_a_hang_up_is_ignored():
    """Before, while and after training; other signals are heard."""
    code = SIGNALLED.format(root=str(ROOT), num=1, pause_s=0.02)
    code = code.replace("SIGINT", "SIGHUP").replace("assert stop", "assert not stop")
    code = code.replace("os._exit(7)", "os.kill(os.getpid(), signal.SIGHUP)\nos._exit(7)")
    ignores = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, capture_output=True, check=False, preexec_fn=ignores
    )
    assert (done.returncode, done.stdout) == (7, b""), done.stderr


def test_commands_are_printed_without_a_hub(tmp_path):
    """The model need not be there, nor anybody who has it."""
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--print", *MUST]
    env = {
        **ENV,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--model m --max-model-len auto" in done.stdout


def test_a_server_killed_while_it_starts_is_said_by_its_signal(tmp_path):
    from launch import LocalServer

    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    log = tmp_path / "log"
    log.write_text("some line\n")
    with pytest.raises(RuntimeError, match="was ended by SIGKILL before it served"):
        LocalServer("http://127.0.0.1:9", process, log).wait(5)


# -- Lines that could be wrong without a test --------------------------------------------------------------------------


def test_two_rewards_of_a_batch_have_a_deviation():
    rewards = torch.tensor([[0.0, 1.0], [math.nan, math.nan]], dtype=torch.float64)
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert train.compute_advantages(rewards, "batch").tolist() == [
        pytest.approx([-expected, expected]),
        [0.0, 0.0],
    ]


def test_log_ratios_and_products_are_bounded_on_both_sides():
    ones = torch.ones(3)
    ratio = train.bounded_log_ratio(torch.tensor([-50.0, 50.0, 1.0]), torch.zeros(3), ones)
    assert ratio.tolist() == [-20.0, 20.0, 1.0]
    config = make_config(off_policy_correction="sequence", correction_cap=1e30)
    together = torch.zeros(3, dtype=torch.long)
    weights = train.off_policy_weights(ones * 15, ones * 0, ones, together, config)
    assert weights.tolist() == pytest.approx([math.exp(20)] * 3)


@pytest.mark.parametrize(
    ("norms", "skipped"), [((1.0, math.inf), 1), ((math.nan, -math.inf), 2), ((1.0, 2.0), 0)]
)
def test_updates_without_a_finite_gradient_are_counted(monkeypatch, models, norms, skipped):
    left = list(norms)
    monkeypatch.setattr(train, "optimizer_step", lambda *_: left.pop(0))
    monkeypatch.setattr(train, "add_gradient", lambda *_: torch.zeros(()))
    monkeypatch.setattr(TokenSums, "metrics", lambda _: ({}, {}))
    config = make_config(
        num_minibatches=2, batch_size=2, model_id=models["tied"], old_logprobs="sampler"
    )
    model: Any = nn.Linear(1, 1)
    optimizer, scheduler = build_optimizer(model, 2, config)
    with process_group(60) as device:
        row: Any = SimpleNamespace(update=Update(1, 1), trainer_logprobs=None, to=lambda _: row)
        rows = [row, row]
        metrics, _ = train.train_batch(model, None, optimizer, scheduler, rows, config, device)
    assert metrics["skipped_steps"] == skipped


def test_warm_up_is_rounded_to_whole_updates():
    """A tenth of 14 updates is one, and of 16 two; the first update of n takes 1/n of the rate."""
    for num_updates, expected in ((14, [1.0, 1.0]), (16, [0.5, 1.0])):
        config = make_config(warmup_ratio=0.1, learning_rate=1.0)
        optimizer, scheduler = build_optimizer(nn.Linear(1, 1), num_updates, config)
        rates = []
        for _ in range(2):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert rates == expected


def test_placeholders_have_no_probability(models):
    """The server never samples them, so the trainer's softmax is over the other tokens."""
    config = make_config(model_id=models["tied"], temperature=0.7)
    model = load_model(config)
    model.config.image_token_id = 9
    (row,) = pack([([5, 6], [[8, 10]])], share_prefix=False)
    with torch.no_grad():
        found = token_logprobs(model, row, {}, config)
        logits = model(torch.tensor([[5, 6, 8]])).logits[0, 1:] / 0.7
    logits[:, 9] = -math.inf
    expected = logits.log_softmax(-1)[[0, 1], [8, 10]]
    assert (found - expected).abs().max() < 1e-5  # fp32 rounding, of log-probs near -5


def test_groups_without_rewards_are_in_no_mean():
    """As where a judge was away: rewards that are all equal are another thing."""
    groups = make_groups()
    for group, reward in zip(groups, ([0.0, 1.0], [math.nan, math.nan]), strict=True):
        group.reward, group.advantages, group.texts = reward, [0.0, 0.0], ["2", "3"]
        group.rewards = torch.tensor(reward, dtype=torch.float64)[:, None]
    metrics = batch_metrics(groups, 0, make_config(reward_funcs=[len]))
    assert metrics["reward_std"] == 0.5
    assert metrics["frac_reward_zero_std"] == 0.0
    groups[0].reward = [math.nan, math.nan]
    metrics = batch_metrics(groups, 0, make_config(reward_funcs=[len]))
    assert math.isnan(metrics["reward_std"])
    assert math.isnan(metrics["frac_reward_zero_std"])


def test_failed_calls_are_said_once_in_a_row(tmp_path, capsys):
    """Not each of them; a second outage of a judge is named, too."""
    failures = Failures("rewards", make_config(batch_size=64, output_dir=str(tmp_path)))
    calls = [failures.begin("f") for _ in range(640)]
    for number in (3, 5, 62, 70, 500):
        failures.note(calls[number], f"away at {number}", make_groups()[0])
    told = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["away at 3", "away at 70", "away at 500"]
