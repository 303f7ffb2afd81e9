"""Prompts, their order, rewards."""

import contextlib
import gzip
import json
import math
import shutil
import threading
from array import array
from dataclasses import replace
from decimal import Decimal
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from helpers import CHAT_TEMPLATE, make_tokenizer, table
from some_rewards import hangs, only_first, raises, right
from test_config import make as make_config

from config import UserError, to_json
from recipes.rewards import best_of
from rollouts.data import check_vocabulary, fingerprint, leave_out_long, load_rows, load_sets
from rollouts.group import ENVIRONMENT, FOREIGN, Completion, Group, Prompt, version_spans
from rollouts.sampling import sample_group, sampling_params
from rollouts.scoring import Scorer, check_rewards, required
from rollouts.stream import add_to_history, next_groups
from server.messages import Sampled
from training.batching import token_columns, trained_lengths
from training.loading import load_model_config
from training.logs import batch_samples
from training.metrics import batch_metrics
from vllm_client import Server, completion_of

ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": "12+30=", "answer": "42", "level": 2},
]
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def prompts_of(source, tokenizer=None, max_prompt_len=100, **fields):
    config = make_config(**{"dataset_id": source, **fields})
    (prompts,) = load_sets("dataset_id", "train", tokenizer or make_tokenizer(), config).values()
    return leave_out_long(prompts, max_prompt_len, config)


def rows():
    return ROWS


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json", "csv", "parquet"])
def test_files_by_their_endings(tmp_path, ending):
    """In any case, zipped, with a byte order mark; a folder's name may have an ending, too. Cells are as they stand."""
    row = {"prompt": "1+1=", "day": "2020-01-01", "code": "007", "word": "NA"}
    table = [row, row]  # a whole column could be read as dates, or numbers
    folder = tmp_path / f"folder.{ending}"
    folder.mkdir()
    Dataset.from_list(table).to_parquet(folder / "part-0.parquet")
    lines = "\r\n".join(map(json.dumps, table))
    cells = ",".join(row.values()) + "\r\n"
    texts = {"json": json.dumps(table), "csv": ",".join(row) + "\r\n" + 2 * cells}
    content = texts.get(ending, lines).encode()
    if ending == "parquet":
        content = (folder / "part-0.parquet").read_bytes()
    contents = {f"a.{ending}": content, f"A.{ending.upper()}": content}
    if ending != "parquet":
        zipped = gzip.compress(content)
        contents |= {f"b.{ending}.gz": zipped, f"B.{ending.upper()}.GZ": zipped}
        contents |= {f"mark.{ending}": b"\xef\xbb\xbf" + content}
    if ending == "json":
        contents["lines.json"] = lines.encode()
    for name, written in contents.items():
        (tmp_path / name).write_bytes(written)
    blob = shutil.copy(tmp_path / f"a.{ending}", tmp_path / "0123abcd")  # as the hub's cache has it
    (tmp_path / f"linked.{ending}").symlink_to(blob)
    for name in (*contents, f"linked.{ending}", folder.name):
        assert load_rows(str(tmp_path / name), "train", make_config()) == table, name


def test_a_token_without_an_embedding_names_its_row(models):
    """Added to the tokenizer alone, by whatever set."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    rows = [{"prompt": "1+1="}, {"prompt": "<tool>2+2="}]
    sets = {"easy": lambda: rows[:1], "hard": lambda: rows}
    fields = {"dataset_id": sets, "eval_dataset_id": sets["hard"], "reward_funcs": [only_first]}
    config = make_config(model_id=models["untied"], **fields)
    hard = load_sets("dataset_id", "train", tokenizer, config)["hard"]
    held_out = load_sets("eval_dataset_id", "test", tokenizer, config)[""]
    model_config, _ = load_model_config(config)
    for prompts, where in ((hard, "dataset_id hard"), (held_out, "eval_dataset_id")):
        check_vocabulary(prompts[:1], tokenizer, model_config)
        message = f"^row 1 of {where}: its token <tool> .* no embedding for it"
        with pytest.raises(UserError, match=message):
            check_vocabulary(prompts, tokenizer, model_config)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, b"x", rf"{name}: its name must end in one of \.jsonl, ") for name in (
            "a.txt", "a", "a.jsonl.zst", "a.parquet.gz", "a.csv.jsonl.bak"
        )),
        ("a.jsonl", b'{"prompt": "\xe9"}', "a.jsonl: UnicodeDecodeError: 'utf-8'"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt"\n', "a.jsonl: line 2: JSONDecodeError"),
        ("a.csv", b"prompt,day\nx,1\nx,1,3\n", "a.csv: a row has more cells than the header has names"),
        *((name, None, "FileNotFoundError: .*no.*") for name in ("no.csv", "no.parquet")),
        ("no.JSON.GZ", None, "FileNotFoundError: .*No such file"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_rows(str(tmp_path / name), "train", make_config())


def test_a_table_is_taken_as_it_is_shown():
    """With what its owner selected, and by its transform."""
    table = Dataset.from_list(ROWS)
    assert prompts_of(lambda: table.select([1]))[0].content == "12+30="
    doubled = table.with_transform(lambda rows: {"prompt": [2 * text for text in rows["prompt"]]})
    assert prompts_of(lambda: doubled)[0].content == "1+1=1+1="


def test_columns_and_collate():
    columns_of = lambda **fields: [prompt.columns for prompt in prompts_of(rows, **fields)]
    assert columns_of() == [{"answer": "2", "level": 1}, {"answer": "42", "level": 2}]
    assert columns_of(extra_columns=["level"]) == [{"level": 1}, {"level": 2}]
    renamed = lambda rows: [{"prompt": "Q" + row["prompt"], "truth": row["answer"]} for row in rows]
    (first, _) = prompts_of(rows, collate_fn=renamed)
    assert (first.content, first.columns) == ("Q1+1=", {"truth": "2"})


@pytest.mark.parametrize("add_bos", [False, True])
def test_chat_template_once_and_one_bos(add_bos):
    """The template writes a BOS; a tokenizer that adds its own must not add a second one."""
    tokenizer = make_tokenizer(add_bos)
    tokenizer.chat_template = CHAT_TEMPLATE
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}]
    (chat,) = prompts_of(lambda: [{"prompt": messages}], tokenizer)
    assert chat.token_ids == tokenizer.convert_tokens_to_ids(["<bos>", *"[system]s[user]1+1=>"])
    (string,) = prompts_of(lambda: [{"prompt": "1+1="}], tokenizer)
    assert string.token_ids == tokenizer.convert_tokens_to_ids(["<bos>", *"[user]1+1=>"])
    (plain,) = prompts_of(lambda: [{"prompt": "1+1="}], tokenizer, no_apply_chat_template=True)
    assert plain.token_ids == tokenizer.convert_tokens_to_ids(["<bos>"] * add_bos + list("1+1="))


def test_long_prompts_are_counted_and_left_out(capsys):
    told = "left out %d of 2 prompts, empty or over %d tokens, as row %d of dataset_id: raise max_t"
    assert len(prompts_of(rows, max_prompt_len=6)) == 2
    assert capsys.readouterr().out == ""
    (kept,) = prompts_of(rows, max_prompt_len=4)
    assert kept.index == 0
    assert capsys.readouterr().out.startswith(told % (1, 4, 1))
    with pytest.raises(UserError, match=f"^{told % (2, 3, 0)}.*max_completion_len=512$"):
        prompts_of(rows, max_prompt_len=3)


NO_PROMPT = "row 0: it has no `prompt`, a string or a list of messages: "


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": lambda: []}, "it has no rows"),
        # Several splits; and as pandas' tables, a list of its columns' names.
        ({"source": lambda: DatasetDict(train=Dataset.from_list(ROWS))}, f"{NO_PROMPT}'train'"),
        ({"source": lambda: {"prompt": 1}}, f"{NO_PROMPT}'prompt'"),
        ({"extra_columns": ["label"]}, "row 0: KeyError: 'label'"),
        ({"collate_fn": lambda row: row["prompt"]}, "through collate_fn, .* all rows: TypeError"),
    ],
)
def test_bad_data(fields, message):
    with pytest.raises(UserError, match=message):
        prompts_of(**{"source": rows, **fields})


def test_a_resumed_run_notices_other_data():
    """Also another answer under the same question, or another image; what is no plain data counts by its type."""

    def digest(answer="2", image="a.png", more=None, index=0):
        columns = {"answer": answer, "more": more}
        return fingerprint([Prompt(index, [5], "1+1=", columns, [image])])

    assert digest() == digest()
    others = [digest("3"), digest(image="b.png"), digest(image=b"png"), digest(more={(1, 2): 3})]
    assert len({digest(), digest(index=1), *others}) == 6
    assert digest(more=object()) == digest(more=object())


def test_sampling_parameters():
    config = make_config(num_generations=4, top_k=5, stop=["\n"], sampling_params={"seed": 1})
    others = {"temperature": 1.0, "top_k": 5, "stop": ["\n"], "seed": 1}
    assert sampling_params(config) == {"n": 4, "max_tokens": 512, **others}
    assert sampling_params(make_config()) == {"n": 8, "max_tokens": 512, "temperature": 1.0}


def test_several_sets():
    """Rows are numbered on, and messages have a set's own."""
    rows = [{"prompt": f"{number}+1="} for number in range(3)]
    sets = {"few": lambda: rows, "more": lambda: iter(rows * 3)}
    config = make_config(dataset_id=sets, reward_funcs=[only_first])
    few, more = load_sets("dataset_id", "train", make_tokenizer(), config).values()
    assert [prompt.index for prompt in few + more] == list(range(3 + 9))
    assert (more[1].set, more[1].where) == ("more", "row 1 of dataset_id more")


def test_names_with_subset_and_split(monkeypatch):
    load = Mock(return_value=Dataset.from_list(ROWS))
    monkeypatch.setattr("datasets.load_dataset", load)
    for source in ("a/b", "a/b:main", "a/b::test[:100]", "a/b:main:dev"):
        prompts_of(source)
    wanted = [(None, "train"), ("main", "train"), (None, "test[:100]"), ("main", "dev")]
    assert load.mock_calls == [call("a/b", subset, split=split) for subset, split in wanted]


# -- their order -----------------------------------------------------------------------------------------------------


def test_each_prompt_once_per_epoch():
    """Whatever the size of a batch; and from any number on, as a run that goes on needs it."""
    prompts = [Prompt(row, [5], "", {}) for row in range(7)]

    def rows(seed, batch_size, first=0):
        groups = next_groups(first, prompts, {}, make_config(seed=seed, batch_size=batch_size))
        assert [group.id for group in groups] == list(range(first, first + batch_size))
        return [group.prompt.index for group in groups]

    order = rows(3, 21)
    passes = [order[:7], order[7:14], order[14:]]
    assert all(sorted(items) == list(range(7)) for items in passes)
    assert passes[0] != passes[1]
    assert order == [row for first in range(0, 21, 3) for row in rows(3, 3, first)]
    assert order[5:] == rows(3, 16, 5)
    assert order != rows(4, 21)


PROMPTS = [Prompt(index, [5], "", {}) for index in (0, 1, 3, 4)]  # 2 was left out


def choose(order_fn, first=0, history=None, **fields):
    config = make_config(order_fn=order_fn, batch_size=3, **fields)
    return next_groups(first, PROMPTS, history or {}, config)


def test_an_order_by_lot():
    """Another batch draws other prompts, another seed too, the same one the same."""
    drawn = lambda prompts, _, count, rng: rng.choices(prompts, k=count)

    def rows(**fields):
        groups = [group for first in range(0, 30, 3) for group in choose(drawn, first, **fields)]
        assert [group.id for group in groups] == list(range(30))
        return [group.prompt.index for group in groups]

    order = rows()
    assert order == rows()
    assert order != rows(seed=7)
    assert len({tuple(order[begin : begin + 3]) for begin in range(0, 30, 3)}) > 3


def test_what_an_order_is_told():
    """Rewards of the last eight groups of each prompt, those that there are, trained or dropped; not one later."""
    told = []

    def noting(prompts, history, count, rng):
        told.append({index: list(groups) for index, groups in history.items()})
        return [prompts[1]] * count

    history: dict[int, list[list[float]]] = {}
    first = choose(noting, 0, history)
    assert [group.prompt for group in first] == [PROMPTS[1]] * 3
    rewards = [[0.5, math.nan], [], [math.nan]]
    add_to_history(history, [replace(first[0], reward=of_group) for of_group in rewards])
    choose(noting, 3, history)
    assert told == [{}, {1: [[0.5], [], []]}]
    for number in range(10):
        add_to_history(history, [replace(first[0], reward=[float(number)])])
    assert history[1] == [[float(number)] for number in range(2, 10)]


@pytest.mark.parametrize(
    ("order_fn", "reason"),
    [
        (lambda prompts, _, count, rng: prompts[: count - 1], "it returned 2, 0 of them others"),
        (lambda prompts, *_: [replace(prompt) for prompt in prompts[:3]], "it returned 3, 3 of"),
    ],
)
def test_an_order_that_is_none(order_fn, reason):
    message = f"^order_fn must return 3 of the prompts that it gets: {reason}"
    with pytest.raises(UserError, match=message):
        choose(order_fn)


def fails_later(prompts, history, count, rng):
    if history:
        raise KeyError("gold")
    return prompts[:count]


def test_an_order_that_fails_in_the_middle(stand_in, train_on, tmp_path):
    """The run ends in a line, after it has saved the last whole step."""
    with pytest.raises(UserError, match=r"^order_fn raised KeyError: 'gold' \(test_data.py:\d+\)$"):
        train_on(stand_in(), order_fn="test_data.fails_later")
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


# -- metrics and samples of groups -------------------------------------------------------------------------------------


def make_groups():
    ids = [make_tokenizer().convert_tokens_to_ids([*text, "<eos>"]) for text in ("2", "3")]
    completions = [Completion(token_ids, [0.0] * len(token_ids), "stop", 0) for token_ids in ids]
    prompts = [Prompt(7, [5], row["prompt"], {"answer": row["answer"]}) for row in ROWS]
    return [Group(prompt, completions) for prompt in prompts]


def scored(group, rewards, advantages=(0.0, 0.0), texts=("2", "3")):
    """The group as one reward function leaves it, with its advantages."""
    group.texts, group.reward, group.advantages = [*texts], [*rewards], [*advantages]
    group.rewards = table([reward] for reward in rewards)
    return group


def of_lengths(lengths, name=""):
    """A group of completions of these lengths, each with another text and reward."""
    completions = [Completion([1] * length, [0.0] * length, "stop", 0) for length in lengths]
    numbers = [float(number) for number in range(len(lengths))]
    group = Group(Prompt(0, [5], "", {}, set=name), completions)
    return scored(group, numbers, numbers, map(str, numbers))


def test_batch_metrics():
    """Two groups of two; the second one's completions come from versions 3 and 4, one of them was cut off."""
    one, two = make_groups()
    last = Completion([1, 2, 3, 4], [0.0] * 4, "length", [3, 5, 5, 5])
    two.set_rollouts([Completion([1, 2], [0.0] * 2, "stop", 4), last])
    scored(one, [1.0, math.nan])
    scored(two, [2.0, 0.0], [0.75, -1.75], ["2", "2"])
    one.started_version, one.finished_version = 0, 1
    two.started_version, two.finished_version = 3, 5
    one.started_s, one.sampled_s, one.scored_s = 10.0, 12.0, 12.5
    two.started_s, two.sampled_s, two.scored_s = 11.0, 15.0, 16.0
    two.completions[1].info.update(turns=3, done=True, said="4", huge=10**400, odd=math.nan)
    two.completions[0].info.update(turns=1, huge=2)  # a number that no float holds is left out
    metrics = batch_metrics([one, two], 5, make_config(reward_funcs=[only_first]))
    assert metrics == {
        "advantages/mean_abs": 2.5 / 4,
        "advantages/max_abs": 1.75,
        "advantages/share_positive": 0.25,
        "info/turns": 2.0,
        "info/done": 1.0,
        "info/huge": 2.0,
        "completions/segments": 1.0,
        "completions/different": (1 + 0.5) / 2,
        "reward": 1.0,
        "reward_std": 0.5,
        "frac_reward_zero_std": 0.5,
        "rewards/only_first": 1.0,
        "staleness/mean": (5 + 5 + 1 + 2) / 4,
        "staleness/max": 5.0,
        "staleness/in_flight": 1.5,
        "staleness/in_queue": 2.0,
        "completions/weight_versions": 1.25,
        "time/generate_s": 5.0,
        "time/reward_s": 1.5,
        "completions/mean_length": (2 + 2 + 2 + 4) / 4,
        "completions/clipped_ratio": 0.25,
    }


def test_metrics_of_sets_are_of_their_own_groups():
    """The share of different texts is of each group, whatever its size: 2 of 2, 1 of 3, 1 of 1."""
    groups = [of_lengths([1, 3], "a"), of_lengths([10, 20, 30], "b"), of_lengths([5], "a")]
    groups[1].texts = ["same"] * 3
    metrics = batch_metrics(groups, 0, make_config(reward_funcs=[len]))
    assert metrics["sets/a/mean_length"] == (1 + 3 + 5) / 3
    assert metrics["sets/b/mean_length"] == (10 + 20 + 30) / 3
    assert metrics["sets/a/reward"] == (0 + 1 + 0) / 3
    assert metrics["sets/b/reward"] == (0 + 1 + 2) / 3
    assert (metrics["sets/a/groups"], metrics["sets/b/groups"]) == (2, 1)
    assert metrics["completions/mean_length"] == 69 / 6
    assert metrics["completions/different"] == pytest.approx((2 / 2 + 1 / 3 + 1 / 1) / 3)


def test_a_group_with_one_advantage_can_teach():
    """Before it has its advantages, when the function is asked, and with them; one without any cannot.

    Nor one whose advantages are rounding, as of 0.1 less the mean of three of them.
    """
    rounding = [0.1 - (0.1 + 0.1 + 0.1) / 3] * 3
    assert rounding[0] != 0
    for given, share in (([0.0, 0.5, -0.5], 0.0), ([0.0, 0.0, 0.0], 1.0), (rounding, 1.0)):
        advantage_fn = lambda rewards, _, given=given: table([given])
        config = make_config(reward_funcs=[len], advantage_fn=advantage_fn)
        group = of_lengths([1, 1, 1])
        for group.advantages in ([], given):
            assert batch_metrics([group], 0, config)["frac_reward_zero_std"] == share


def test_all_that_was_cut_is_counted_and_masked():
    """A completion that repeated itself was cut, too: none of its tokens trains, or is in the normalizer."""
    group = of_lengths([1, 2, 4, 8])
    group.completions[1].finish_reason = "length"
    group.completions[2].finish_reason = "repetition"
    config = make_config(reward_funcs=[len], mask_truncated_completions=True)
    assert batch_metrics([group], 0, config)["completions/clipped_ratio"] == 0.5
    assert trained_lengths(group, config) == [1, 0, 0, 8]
    assert token_columns([group], config)["mask"].sum() == 9
    assert trained_lengths(group, make_config(reward_funcs=[len])) == [1, 2, 4, 8]


def test_whatever_a_policy_sampled_trains():
    """Weights of the step, of older ones, and such as this trainer never sent; the normalizer counts the same."""
    group = of_lengths([5])
    versions = torch.tensor([FOREIGN, 0, 3, ENVIRONMENT, 2])
    group.set_rollouts([Completion([1] * 5, [0.0] * 5, "stop", versions)])
    group.trained_version = 3
    columns = token_columns([group], make_config(reward_funcs=[len]))
    assert columns["mask"].tolist() == [1, 1, 1, 0, 1]
    assert trained_lengths(group, make_config(reward_funcs=[len])) == [4]
    assert columns["servers"].tolist() == [0, 0, 1, 0, 0]  # which compare only the step's own


def test_long_texts_are_shortened_in_samples():
    """A column, and each message of a conversation, which stays one; a group that was refused has none."""
    config = make_config(reward_funcs=[right])
    assert batch_samples(make_groups(), config) == []
    group = scored(make_groups()[0], [1.0, 0.0])
    group.prompt.columns["tests"] = ["assert"] * 1000
    messages = [{"role": "user", "content": "x" * 9000}, {"role": "tool", "content": ["y"] * 9000}]
    group.completions[0].info["messages"] = messages
    first, second = batch_samples([group], config)
    assert first["columns"]["answer"] == second["columns"]["answer"] == "2"
    assert second["columns"]["tests"].startswith("['assert', ")
    assert len(json.dumps(second)) < 3000
    asked, told = first["info"]["messages"]
    assert asked == {"role": "user", "content": "x" * 2000}
    assert told == {"role": "tool", "content": str(["y"] * 9000)[:2000]}


def test_samples_have_their_tokens():
    group = scored(make_groups()[0], [1.0, 0.0])
    long = group.completions[0].token_ids.tolist()
    segment = Completion([40, 41], [-0.126, -math.inf], "stop", 3, prompt_ids=[5, 6])
    last = Completion(long, [-0.5] * len(long), "stop", 4)
    group.set_rollouts([[segment, last], group.completions[1]])
    tokenizer = make_tokenizer()
    config = make_config(reward_funcs=[right])
    first, second = batch_samples([group], config, tokenizer=tokenizer)
    assert "".join(first["tokens"]) == tokenizer.decode(long)
    assert first["logprobs"] == [-0.5] * len(long)
    (earlier,) = first["earlier"]
    tokens, prompt = [tokenizer.decode([40]), tokenizer.decode([41])], tokenizer.decode([5, 6])
    assert (earlier["tokens"], earlier["prompt"]) == (tokens, prompt)
    assert earlier["logprobs"] == [-0.13, -math.inf]
    assert earlier["weight_versions"] == [(3, 0, 2)]
    assert "earlier" not in second


# -- completions -----------------------------------------------------------------------------------------------------


def busy_client(generate=None):
    """A client that leases a server, which has got version 3 while one waited for it."""
    server: Any = Server("http://x", 1.0)
    server.version = 3
    server.generate = generate
    return SimpleNamespace(version=1, lease=lambda: contextlib.nullcontext(server))


def rolled_out(rollout_fn):
    """The group that the recipe's function fills in."""
    group, config = Group(Prompt(0, [5], "", {})), make_config(rollout_fn=rollout_fn)
    sample_group(group, busy_client(), None, config, n=1)
    return group


def of_two(logprobs=(-1.0, -1.0), versions=3):
    """A rollout_fn whose completion has two tokens, and these columns."""
    return lambda *_: [Completion([5, 6], [*logprobs], "stop", versions)]


@pytest.mark.parametrize("versions", [3, [4, 3], [3, ENVIRONMENT]], ids=str)
def test_a_rollout_has_a_version_of_each_token(versions):
    """Its group begins when it has a server, not when it waits for one; it is as old as its oldest token."""
    group = rolled_out(of_two(versions=versions))
    found = group.tokens.weight_versions.tolist()
    assert found == [3, 3] if versions == 3 else versions
    assert group.started_version == group.oldest_version == 3
    assert 0 < group.started_s <= group.sampled_s


LONG = Completion([5] * 20_000, [-1.0] * 20_000, "stop", 3)


@pytest.mark.parametrize(
    ("rollout_fn", "message"),
    [
        (lambda *_: [5], "it returned no completions to train: TypeError: 'int' object is not"),
        (lambda *_: None, "raised TypeError: 'NoneType' object is not iterable"),
        (lambda *_: [LONG, LONG], "it returned no completions to train: 2 rollouts, not 1"),
        (lambda *_: [][0], "raised IndexError"),
        (lambda *_: [LONG], "it returned no completions to train: a completion has 20001 tokens"),
        (lambda *_: [Completion([], [], "stop", 3)], "raised ValueError: a completion needs"),
        (of_two(logprobs=[-1.0]), "raised ValueError: a completion needs"),
        (of_two(versions=[]), "raised ValueError: a completion needs"),
        (of_two(versions=[3]), "raised ValueError: a completion needs"),
    ],
)
def test_what_is_no_rollout_is_refused(rollout_fn, message):
    with pytest.raises(UserError, match=f"rollout_fn on dataset row 0:? {message}"):
        rolled_out(rollout_fn)


SPANS = [
    ([], [-2, -2, -2]),
    ([(4, 0, 3)], [4, 4, 4]),
    ([(-1, 0, 1), (7, 1, 3)], [-1, 7, 7]),
    ([(3, 0, 1), (3, 2, 3)], [3, -2, 3]),
    ([(0, 0, 2)], [0, 0, -2]),
]


def sampled(spans):
    """A message of three tokens."""
    named = [(str(version) if version >= 0 else "default", *span) for version, *span in spans]
    ids, logprobs = array("i", [5, 6, 7]).tobytes(), array("f", [-1.0] * 3).tobytes()
    return Sampled("stop", ids, logprobs, named)


@pytest.mark.parametrize(("spans", "versions"), SPANS, ids=str)
def test_spans_of_versions(spans, versions):
    """Between spans an environment wrote; in a server's completion, which has none of it, tokens there are foreign."""
    assert version_spans(torch.tensor(versions)) == spans
    found = completion_of(sampled(spans)).weight_versions.tolist()
    assert found == [FOREIGN if version == ENVIRONMENT else version for version in versions]


def seeds_sent(**fields):
    """The seed of each request of two neighbouring groups."""
    sent = []

    def generate(prompt, sampling, *_):
        sent.append(sampling.get("seed"))
        return [Completion([5], [-1.0], "stop", 3)]

    config = make_config(num_generations=4, **fields)
    for number in (6, 7):
        sample_group(Group(Prompt(0, [5], "", {}), id=number), busy_client(generate), None, config)
    return sent


def test_seeds_of_groups():
    """vLLM adds a completion's number: no two completions of a run, or of two runs, have the same."""
    first, second = seeds_sent(max_staleness=0)
    assert second - first >= 4
    assert all(0 <= seed < 2**63 - 4 for seed in (first, second))
    assert seeds_sent(max_staleness=0) == [first, second]
    assert seeds_sent(max_staleness=0, seed=43)[0] - first > 10**9
    assert seeds_sent(max_staleness=0, sampling_params={"seed": 3}) == [3, 3]
    assert seeds_sent(max_staleness=1) == [None, None]


# -- rewards ---------------------------------------------------------------------------------------------------------


ANSWERED = {"prompt": "1+1=", "answer": "2"}
NO_ANSER = "row 0 of dataset_id, which .*answer: TypeError: missing .*'anser'"


@pytest.mark.parametrize(
    ("function", "last", "message"),
    [
        (lambda lock=threading.Lock(), **_: lock, ANSWERED, "row 0 .*: cannot be sent .*lock"),  # noqa: B008
        (right, ANSWERED | {"completions": 1}, "row 2 .*multiple values .*'completions'"),
        (lambda anser, **_: anser, ANSWERED, NO_ANSER),
        (lambda prompts: prompts, ANSWERED, "row 0 .*: TypeError: got an unexpected keyword"),
        (right, {"prompt": "2+2="}, "row 2 .*: TypeError: missing a required argument: 'answer'"),
    ],
)
def test_rewards_that_do_not_fit_the_data(function, last, message):
    fits = make_config(reward_funcs=[right, best_of(right, only_first)])
    check_rewards(prompts_of(lambda: [ANSWERED]), fits)
    prompts = prompts_of(lambda: [ANSWERED, ANSWERED, last])
    with pytest.raises(UserError, match=f"reward {function.__name__} on {message}"):
        check_rewards(prompts, make_config(reward_funcs=[function]))


def test_best_of_several_verifiers_is_one_function():
    either = best_of(right, only_first)
    assert "answer" in required(either)  # None where no info has it, as for `right` alone
    (named,) = to_json(make_config(reward_funcs=[either]))["reward_funcs"]
    assert named == "recipes.rewards.best_of_right_only_first"


def score(groups, config):
    with contextlib.closing(Scorer(make_tokenizer(), config)) as scorer:
        for group in groups:
            scorer.score(group)
    return [group.reward for group in groups]


def test_weighted_rewards_and_none():
    """Weights are not rounded to float32, in which 0.1 is another number."""
    config = make_config(reward_funcs=[right, only_first], reward_weights=[0.1, 0.2])
    groups = make_groups()
    assert score(groups, config) == [[0.1 + 0.2 * 2, 0.2 * 2], [0.0, 0.0]]
    assert groups[0].texts == ["2", "3"]
    assert_same(groups[1].rewards, table([[0.0, math.nan], [0.0, math.nan]]))
    first, second = score(make_groups(), make_config(reward_funcs=[only_first]))
    assert first == [2.0, 2.0]
    assert all(math.isnan(value) for value in second)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], r"it returned \[1.0\]"),
        (1.0, "TypeError: 'float' object is not iterable"),
        ([np.ones(2)] * 2, ""),
        (["1.0"] * 2, ""),
        # No loss takes these, nor would their weighted sum be one, in float32.
        ([10**400] * 2, "OverflowError: int too large to convert to float"),
        ([1.7e308] * 2, r"it returned \[1.7e\+308, 1.7e\+308\]"),
    ],
)
def test_bad_rewards(values, message):
    message = f"a list of 2, one per completion: numbers below 1e30, or None: {message}"
    told = f"reward <lambda> on dataset row 7 must return {message}"
    with pytest.raises(UserError, match=told):
        score(make_groups(), make_config(reward_funcs=[lambda **_: values]))


def test_what_a_float_can_be_made_of_is_a_reward():
    function = lambda **_: [np.bool_(True), Decimal("0.5")]
    assert score(make_groups(), make_config(reward_funcs=[function])) == [[1.0, 0.5]] * 2


@pytest.mark.parametrize("value", [None, -1.0])
def test_a_failed_call_gives_the_configured_value(tmp_path, value):
    """The other function's rewards still count; the sample is written down."""
    fields = {"failed_reward": value, "output_dir": str(tmp_path)}
    config = make_config(reward_funcs=[right, raises], **fields)
    (group, _) = make_groups()
    assert score([group], config) == [[1.0 + (value or 0), 0.0 + (value or 0)]]
    assert_same(group.rewards, table([[1.0, value], [0.0, value]]))
    (line,) = (tmp_path / "failed_rewards.jsonl").read_text().splitlines()
    place = f"some_rewards.py:{raises.__code__.co_firstlineno + 1}"
    error = f"reward raises on dataset row 7 raised KeyError: 'gold' ({place})"
    sample = {"prompt": "1+1=", "completions": ["2", "3"], "columns": {"answer": "2"}}
    assert json.loads(line) == {"error": error, **sample}


def test_a_hanging_reward_is_replaced(tmp_path, monkeypatch):
    limits, poll = iter([0.3]), Connection.poll  # of the first call, without time for imports
    monkeypatch.setattr(Connection, "poll", lambda own, limit: poll(own, next(limits, limit)))
    fields = {"reward_timeout": 0.3, "reward_workers": 1, "output_dir": str(tmp_path)}
    config = make_config(reward_funcs=[hangs, right], **fields)
    assert score(make_groups()[:1], config) == [[1.0, 0.0]]
    (line,) = (tmp_path / "failed_rewards.jsonl").read_text().splitlines()
    assert "reward hangs on dataset row 7 took longer than 0.3 s" in line
