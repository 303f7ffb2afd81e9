"""Kinds of faults that users of other trainers met, each by the value that would have been wrong."""

import math
import re
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import some_rewards
import torch
from helpers import ENV, ROOT, make_tokenizer, on_forked_ranks, table
from launch import LocalServer
from PIL import Image
from test_config import MUST
from test_data import make_config, make_groups, prompts_of, score, scored
from test_prefix_models import make_model
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Trainer

from config import UserError
from recipes.rewards import format_reward
from rollouts.data import fingerprint
from rollouts.evaluation import held_out_metrics
from rollouts.group import Completion, Group, Prompt
from rollouts.images import open_image
from rollouts.scoring import Failures, Scorer, text_of
from train import off_policy_weights
from training.batching import MicroBatch
from training.logs import token_text
from training.metrics import TokenSums, batch_metrics
from training.optimizer import build_optimizer

# -- accuracy --------------------------------------------------------------------------------------


FIRST: list[list[Any]] = [[1, 0, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1], [0.5, 0, None, 1], [None] * 4]
SEVERAL = [[[first, 0] for first in rewards] for rewards in FIRST]
OF_PAIRS = (5 / 6 + 0 + 1 + 2 / 3) / 4  # the share with a right one, in each of the first four


@pytest.mark.parametrize(
    ("groups", "fields", "expected"),
    [
        # Right and long is 0.93, wrong and well formed is 1; of three pairs two have the right one.
        ([[[1, -0.07], [0, 1], [0, -0.07], [None, 1]]], {}, [1 / 3, 2 / 3, math.nan]),
        ([[[1, 0.5], [1, 0]]], {"accuracy_func": "spread"}, [0.0, 0.0]),
        ([[[0.5, 0.5], [1, 0]]], {}, []),  # graded
        ([[[0.5, 0.5], [1, 0]]], {"accuracy_func": "right"}, [0.5, 1.0]),
        # A failed call's value is no verdict of right, and leaves the others what they are.
        ([[[1, 0.5], [-0.5, 0]]], {"failed_reward": -0.5}, [0.5, 1.0]),
        ([[[1, 0.5]]], {}, [1.0]),
        (SEVERAL, {"accuracy_func": "right"}, [7 / 15, OF_PAIRS, 2 / 3]),
    ],
)
def test_accuracy_and_pass_at_k_are_of_one_function(groups, fields, expected):
    """The sum says nothing of who is right; completions without a reward are in no subset of k."""
    filled = [Group(Prompt(0, [5], "a", {}), rewards=table(rows)) for rows in groups]
    for group in filled:
        group.reward = group.rewards.nansum(dim=1).tolist()
    fields = {"eval_dataset_id": "e", "eval_temperature": 1.0, **fields}
    fields |= {"reward_funcs": [some_rewards.right, some_rewards.spread]}
    config = make_config(eval_generations=len(groups[0]), **fields)
    metrics = held_out_metrics(filled, config)
    found = [value for name, value in metrics.items() if name.startswith(("accuracy", "pass@"))]
    assert found == pytest.approx(expected, nan_ok=True)
    with pytest.raises(UserError, match="accuracy_func=nobody: it is none of reward_funcs"):
        replace(config, accuracy_func="nobody")


# -- texts -----------------------------------------------------------------------------------------

THOUGHT = "<think>a</think><answer>b</answer>"


@pytest.fixture
def special():
    """A tokenizer of special tokens that belong to a text, and one more that ends a turn."""
    tokenizer = make_tokenizer()
    for token in ("<think>", "</think>", "<answer>", "</answer>", "<|turn_end|>"):
        tokenizer.add_tokens([AddedToken(token, special=True)], special_tokens=True)
    return tokenizer


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (THOUGHT, {"is_ended": False}, THOUGHT),
        (f"{THOUGHT}<eos>", {}, THOUGHT),
        (f"{THOUGHT}<|turn_end|>", {}, THOUGHT),
        (f"{THOUGHT}<eos><eos>", {}, THOUGHT),
        ("<think>a</think>", {"is_ended": False}, "<think>a</think>"),  # cut behind a special token
        (THOUGHT, {"stop": ["</answer>"]}, THOUGHT),
        ("a<eos>[user]b<eos>", {}, "a[user]b"),
        ("a<|turn_end|>b<|turn_end|>", {}, "a<|turn_end|>b"),
        ("a<eos>", {"stop": ["<eos>"]}, "a<eos>"),
    ],
)
def test_special_tokens_are_part_of_a_text(special, text, options, expected):
    assert text_of(torch.tensor(ids_of(special, text)), special, **options) == expected


def test_text_is_as_it_was_sampled():
    """Whatever a tokenizer would clean up; and its padding token may be any word."""
    words = ["<unk>", "\u2581a", "\u2581.", "\u2581,", "\u2581n't", "\u2581!", "<eos>", "0", "1"]
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="0",
        clean_up_tokenization_spaces=True,
    )  # fmt: skip
    ids, text = [1, 2, 1, 3, 1, 4, 1, 5], "a . a , a n't a !"
    assert text_of(ids, tokenizer) == text
    assert "".join(token_text(tokenizer, token_id) for token_id in ids).strip() == text
    for end in ([], [6]):
        assert text_of([8, 7, 7, 8, 7, 8, *end], tokenizer) == "100101"
    assert text_of([8, 7], tokenizer, is_ended=False) == "10"


def test_what_a_run_stops_at_is_part_of_a_text(special):
    """A stop string that is one special token, and stop_token_ids."""

    def text(**fields):
        ids = ids_of(special, THOUGHT)
        completion = Completion(ids, [-1.0] * len(ids), "stop", 0)
        group = Group(Prompt(0, [5], "a", {}), [completion])
        config = make_config(reward_funcs=[some_rewards.spread], **fields)
        with closing(Scorer(special, config)) as scorer:
            scorer.score(group)
        return group.texts[0]

    assert text(stop=["</answer>"]) == THOUGHT
    assert text(sampling_params={"stop_token_ids": ids_of(special, "</answer>")}) == THOUGHT
    assert text() == THOUGHT.removesuffix("</answer>")


def test_a_thought_that_the_prompt_has_opened():
    texts = [THOUGHT, "a</think><answer>b</answer>", "</think><answer>b</answer>"]
    assert format_reward([*texts, "a<answer>b</answer>"]) == [1.0, 1.0, 1.0, 0.0]


# -- rewards ---------------------------------------------------------------------------------------


def test_a_reward_that_changes_a_column_changes_its_own():
    group, _ = make_groups()
    group.prompt = Prompt(7, [5], [{"role": "user", "content": "a"}], {"notes": ["a"]})
    assert score([group], make_config(reward_funcs=[some_rewards.changes])) == [[3.0, 3.0]]
    assert group.prompt.columns["notes"] == ["a"]


@pytest.mark.parametrize("failed", [[0, 1, 2, 3], [5, 7, 4, 6], [1, 2, 3, 4, 5, 6, 7]])
def test_failures_in_a_row_end_a_run_in_whatever_order_they_end(tmp_path, failed):
    """Four of a function that began in a row, seven at the latest; a tuple may be a column's key."""
    found = Failures("rewards", make_config(batch_size=1, output_dir=str(tmp_path)))
    group = Group(Prompt(0, [5], "a", {("a", 1): 2, "b": {3}}))  # type: ignore[dict-item]
    of_f, of_g = zip(*[(found.begin("f"), found.begin("g")) for _ in range(8)], strict=True)
    for number in failed[:-1]:
        found.note(of_f[number], "it fails", group)
    found.note(of_g[failed[-1]], "it fails", group)
    with pytest.raises(UserError, match="it fails; so did 4 calls in a row"):
        found.note(of_f[failed[-1]], "it fails", group)
    assert len(found.failed) == len(failed) + 1


def test_failed_calls_are_said_once_in_a_row(tmp_path, capsys):
    """Half of a run's calls may fail, also where they end first; a judge's second outage is named."""
    found = Failures("rewards", make_config(batch_size=64, output_dir=str(tmp_path)))
    calls = [found.begin("f") for _ in range(640)]
    for number in (*range(0, 64, 2), 70, 500):
        found.note(calls[number], f"away at {number}", make_groups()[0])
    assert len(found.failed) == 34
    told = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["away at 0", "away at 70", "away at 500"]


# -- data ------------------------------------------------------------------------------------------


def test_an_endless_generator_is_refused(monkeypatch):
    """Whatever `max_steps` is: a run could not be made longer on the same rows."""
    monkeypatch.setattr("rollouts.data.MOST_ROWS", 20)

    def rows(num):
        return lambda: ({"prompt": f"{number}="} for number in range(num))

    with pytest.raises(UserError, match="goes on after 20 rows"):
        prompts_of(rows(10**9), max_steps=3)
    few, more = (prompts_of(rows(19), max_steps=max_steps) for max_steps in (3, 30))
    assert fingerprint(few) == fingerprint(more)


# -- pixels ----------------------------------------------------------------------------------------


def test_transparent_pixels_have_a_white_ground():
    palette = Image.new("P", (1, 1))
    palette.info["transparency"] = 0
    red, none = Image.new("RGBA", (2, 2), (255, 0, 0, 0)), Image.new("LA", (2, 2), (0, 0))
    for image in (red, none, palette):
        assert open_image(image).getpixel((0, 0)) == (255, 255, 255)
    half = open_image(Image.new("RGBA", (1, 1), (255, 0, 0, 128))).getpixel((0, 0))
    assert half == pytest.approx((255, 127, 127), abs=1)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_deep_pixels_are_refused(kind):
    """PIL's own conversion cuts them off at 255, or takes floats for black."""
    with pytest.raises(ValueError, match=r"image of mode \S+: save it with 8 bits a channel"):
        open_image(Image.fromarray(np.array([[0, 1]], dtype=kind)))


# -- numbers ---------------------------------------------------------------------------------------


def test_sums_over_servers_count_beyond_float32(device):
    """In float32 a count of ones stays at 2^24."""
    no_row: Any = None
    sums = TokenSums(device)
    for num, gap in ((2**24, 0.0), *[(1, 0.25)] * 64):
        ones = torch.ones(num)
        row = MicroBatch(no_row, ones, ones, -1.0 - gap * ones, ones.to(torch.int16))
        sums.add({}, torch.zeros(num), -ones, row)
    metrics, gaps = sums.metrics()
    found = [gaps[0], metrics["sampling/current_logp_difference"]]
    found.append(metrics["sampling/sampling_logp_difference/mean"])
    assert found == pytest.approx([16 / (2**24 + 64)] * 3, rel=1e-9)


def test_products_of_ratios_are_bounded():
    config = make_config(off_policy_correction="sequence", correction_cap=1e30)
    ones, together = torch.ones(3), torch.zeros(3, dtype=torch.long)
    weights = off_policy_weights(ones * 15, ones * 0, ones, together, config)
    assert weights.tolist() == pytest.approx([math.exp(20)] * 3)


def test_what_decays_is_what_transformers_decays():
    """Its trainer's answer, for a family with biases that are matrices, and sinks that are vectors."""
    model = make_model("GptOss", attention="eager")
    optimizer, _ = build_optimizer(model, 1, make_config(weight_decay=0.1))
    expected = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    names = {weight: name for name, weight in model.named_parameters()}
    decaying, others = ({names[w] for w in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decaying == expected
    assert others == set(names.values()) - expected


@pytest.mark.parametrize(
    ("first", "std", "share"), [([0.0, 1.0], 0.5, 0.0), ([math.nan] * 2, math.nan, math.nan)]
)
def test_groups_without_rewards_are_in_no_mean(first, std, share):
    """As where a judge was away: rewards that are all equal are another thing."""
    one, two = make_groups()
    groups = [scored(one, first), scored(two, [math.nan] * 2)]
    metrics = batch_metrics(groups, 0, make_config(reward_funcs=[len]))
    found = [metrics["reward_std"], metrics["frac_reward_zero_std"]]
    assert found == pytest.approx([std, share], nan_ok=True)


# -- signals and processes -------------------------------------------------------------------------

SIGNALLED = """
import os, signal, sys, threading
from types import SimpleNamespace
signal.signal(signal.SIGHUP, signal.{hang_up})
sys.path[:0] = [{root!r}]
import utils
now_s = 0.0
utils.time = SimpleNamespace(monotonic=lambda: now_s)
utils.is_main = lambda: True
stop = threading.Event()
with utils.stop_signals(stop):
    for name in {names!r}:
        os.kill(os.getpid(), getattr(signal, name))
        now_s += {pause_s}
    print(stop.is_set(), flush=True)
if signal.{hang_up} == signal.SIG_IGN:
    os.kill(os.getpid(), signal.SIGHUP)
os._exit(7)
"""


@pytest.mark.parametrize(
    ("names", "pause_s", "hang_up", "status"),
    [
        ("SIGINT", 0.02, "SIG_DFL", 7),
        ("SIGINT SIGINT SIGINT", 0.02, "SIG_DFL", 7),  # copies of torchrun and Slurm do not count
        ("SIGINT SIGINT", 1.1, "SIG_DFL", 128 + signal.SIGINT),
        ("SIGUSR1 SIGTERM", 1.1, "SIG_DFL", 7),  # Slurm's warning before a time limit, the limit
        ("SIGTERM SIGHUP", 1.1, "SIG_DFL", 7),  # the terminal closes meanwhile
        ("SIGUSR1 SIGUSR1", 1.1, "SIG_DFL", 128 + signal.SIGUSR1),
        ("SIGHUP", 0.02, "SIG_IGN", 7),  # under nohup: ignored while a run trains, and after
    ],
)
def test_only_the_same_signal_a_second_later_ends_at_once(
    tmp_path, names, pause_s, hang_up, status
):
    script = tmp_path / "signalled.py"
    fields = {"root": str(ROOT), "names": names.split(), "pause_s": pause_s, "hang_up": hang_up}
    script.write_text(SIGNALLED.format(**fields))
    printed = on_forked_ranks(0, script, status=status).stdout
    told = re.findall(r"^(\w+): saving the last whole step", printed, re.MULTILINE)
    assert told == ([] if hang_up == "SIG_IGN" else names.split()[:1])
    assert ("True" in printed) == (status == 7 and told != [])


def test_commands_are_printed_without_a_hub():
    """The model need not be there, nor anybody who has it."""
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--print", *MUST]
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    told = subprocess.check_output(command, env=ENV | away, text=True, timeout=60)
    assert "--model m --max-model-len auto" in told


def test_a_server_killed_while_it_starts_is_said_by_its_signal(tmp_path):
    process = subprocess.Popen(["sleep", "60"])
    process.kill()
    process.wait()
    log = tmp_path / "log"
    log.write_text("some line\n")
    with pytest.raises(RuntimeError, match="was ended by SIGKILL before it served"):
        LocalServer("http://127.0.0.1:9", process, log).wait(5)
