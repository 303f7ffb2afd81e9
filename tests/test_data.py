"""Prompts, their order, rewards."""

import contextlib
import dataclasses
import gzip
import json
import math
import shutil
from array import array
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers import CHAT_TEMPLATE, make_tokenizer, table
from some_rewards import hangs, infinite, only_first, raises, right, scalar, short, words
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from config import TrainConfig, UserError, to_json
from recipes.rewards import best_of
from rollouts import workers
from rollouts.data import (
    ENDINGS,
    check_vocabulary,
    fingerprint,
    leave_out_long,
    load_prompts,
    load_rows,
    load_sets,
    load_train_set,
)
from rollouts.group import (
    ENVIRONMENT,
    FOREIGN,
    Completion,
    Group,
    Prompt,
    version_spans,
)
from rollouts.order import Order
from rollouts.processor import load_processor
from rollouts.sampling import sample_group, sampling_params
from rollouts.scoring import Scorer, check_rewards, required, weighted
from server.messages import Sampled
from training.batching import token_columns, trained_lengths
from training.logs import batch_samples, token_texts
from training.metrics import batch_metrics
from training.model import load_model_config
from vllm_client import Server, completion_of

ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": "12+30=", "answer": "42", "level": 2},
]


def make_config(**fields):
    return TrainConfig(
        **{"model_id": "m", "dataset_id": "d", "reward_funcs": ["os.path.exists"], **fields}
    )


def prompts_of(source, tokenizer=None, max_prompt_len=100, **fields):
    config = make_config(**fields)
    return leave_out_long(
        load_prompts(source, "train", tokenizer or make_tokenizer(), config), max_prompt_len, config
    )


def rows():
    return ROWS


assert_same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


# -- data ------------------------------------------------------------------------------------------------------------


def test_sources_give_the_same_prompts(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    expected = prompts_of(rows)
    assert [p.columns for p in expected] == [
        {"answer": "2", "level": 1},
        {"answer": "42", "level": 2},
    ]
    assert prompts_of(str(tmp_path / "a.jsonl")) == expected
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text(), "utf-8-sig")
    assert prompts_of(str(tmp_path / "a.jsonl")) == expected
    assert prompts_of(str(tmp_path / "a.parquet")) == expected


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "json", "csv", "parquet"])
def test_files_by_their_endings(tmp_path, ending):
    """In any case, zipped, and by links; a folder's name may have an ending, too."""
    table = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    lines = "\r\n".join(map(json.dumps, table))
    texts = {"json": json.dumps(table), "csv": "prompt,answer\r\n1+1=,2\r\n2+2=,4\r\n"}
    plain = tmp_path / f"a.{ending}"
    if ending == "parquet":
        Dataset.from_list(table).to_parquet(plain)
    else:
        plain.write_text(texts.get(ending, lines), newline="")
    paths = [shutil.copy(plain, tmp_path / f"A.{ending.upper()}"), plain]
    if ending != "parquet":
        for name in (f"b.{ending}.gz", f"B.{ending.upper()}.GZ"):
            (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
            paths.append(tmp_path / name)
    for number, path in enumerate(list(paths)):
        (tmp_path / f"link{number}").symlink_to(path)
        paths.append(tmp_path / f"link{number}")
    blob = shutil.copy(plain, tmp_path / "0123abcd")  # as the hub's cache has files
    (tmp_path / f"linked.{ending}").symlink_to(blob)
    for path in [*paths, tmp_path / f"linked.{ending}"]:
        assert load_rows(str(path), "train", make_config()) == table, path

    folder = tmp_path / f"folder.{ending}"
    folder.mkdir()
    Dataset.from_list(table).to_parquet(folder / "part-0.parquet")
    assert load_rows(str(folder), "train", make_config()) == table


def test_a_token_without_an_embedding_names_its_row(models):
    """Added to the tokenizer alone, by whatever set."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    config = make_config(model_id=models["untied"], reward_funcs=[only_first])
    plain = [{"prompt": "1+1="}]
    added = [*plain, {"prompt": "<tool>2+2="}]
    sets = {"easy": lambda: plain, "hard": lambda: added}
    config = dataclasses.replace(config, dataset_id=sets, eval_dataset_id=lambda: added)
    held_out = load_sets("eval_dataset_id", "test", tokenizer, config)[""]
    model_config, _ = load_model_config(config)
    for prompts, where in (
        (load_train_set(tokenizer, config), "row 1 of dataset_id hard"),
        (held_out, "row 1 of eval_dataset_id"),
    ):
        check_vocabulary(prompts[:1], tokenizer, model_config)
        with pytest.raises(UserError, match=f"^{where}: .* no embedding for its token <tool> .99."):
            check_vocabulary(prompts, tokenizer, model_config)


def test_files_that_cannot_be_read_are_named(tmp_path):
    for name in ("a.txt", "a", "a.jsonl.zst", "a.parquet.gz", "a.csv.jsonl.bak"):
        (tmp_path / name).write_text("x")
        with pytest.raises(UserError, match=rf"{name}: its name must end in one of \.jsonl, "):
            load_rows(str(tmp_path / name), "train", make_config())
    for ending in ENDINGS:
        for name in (f"no{ending}", f"no{ending.upper()}"):
            with pytest.raises(UserError, match="FileNotFoundError: .*No such file or directory"):
                load_rows(str(tmp_path / name), "train", make_config())


def test_a_table_is_taken_as_it_is_shown():
    """With what its owner selected, and by its transform."""
    table = Dataset.from_list(ROWS)
    assert prompts_of(lambda: table.select([1]))[0].content == "12+30="
    doubled = table.with_transform(lambda rows: {"prompt": [2 * text for text in rows["prompt"]]})
    assert prompts_of(lambda: doubled)[0].content == "1+1=1+1="
    with pytest.raises(UserError, match="has no rows"):
        prompts_of(lambda: table.select([]))


def test_columns_and_collate():
    assert [p.columns for p in prompts_of(rows, extra_columns=["level"])] == [
        {"level": 1},
        {"level": 2},
    ]
    renamed = lambda rows: [{"prompt": "Q" + row["prompt"], "truth": row["answer"]} for row in rows]
    (first, _) = prompts_of(rows, collate_fn=renamed)
    assert (first.content, first.columns) == ("Q1+1=", {"truth": "2"})


def test_strings_go_in_as_they_are_without_a_template():
    tokenizer = make_tokenizer()
    assert prompts_of(rows)[0].token_ids == tokenizer.convert_tokens_to_ids(list("1+1="))


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
    (kept,) = prompts_of(rows, max_prompt_len=4)
    assert kept.index == 0
    cure = "raise the servers' --max-model-len, or lower max_completion_len=512"
    line = f"dataset_id: left out 1 of 2 prompts, empty or over 4 tokens: {cure}\n"
    assert capsys.readouterr().out == line
    assert len(prompts_of(rows, max_prompt_len=6)) == 2
    assert capsys.readouterr().out == ""
    with pytest.raises(
        UserError, match=f"^dataset_id: left out 2 of 2 prompts, empty or over 3 tokens: {cure}$"
    ):
        prompts_of(rows, max_prompt_len=3)


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        (lambda: [], {}, "has no rows"),
        (
            lambda: [{"question": "x"}],
            {},
            "row 0: it has no `prompt`, a string or a list of messages: {'question': 'x'}",
        ),
        (
            lambda: [{"prompt": "x"}, {"prompt": 3}],
            {},
            "row 1: it has no `prompt`, .*: {'prompt': 3}",
        ),
        (rows, {"extra_columns": ["label"]}, "row 0: KeyError: 'label'"),
        (
            lambda: [{"prompt": "x", "completions": []}],
            {},
            "row 0: .*column completions has the name of another",
        ),
        ("nowhere.jsonl", {}, "dataset nowhere.jsonl: FileNotFoundError"),
        (__file__, {}, "dataset .*test_data.py: "),
    ],
)
def test_bad_data(source, fields, message):
    with pytest.raises(ValueError, match=message):
        prompts_of(source, **fields)


def test_what_is_not_utf_8(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "é"}', "latin-1")
    with pytest.raises(ValueError, match=r"a\.jsonl: UnicodeDecodeError: 'utf-8'"):
        prompts_of(str(tmp_path / "a.jsonl"))


def test_a_line_that_is_not_json(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt"\n')
    with pytest.raises(UserError, match=r"a\.jsonl: line 2: JSONDecodeError"):
        prompts_of(str(tmp_path / "a.jsonl"))


def test_a_resumed_run_notices_other_data():
    """Also another answer under the same question, or another image; what is no plain data counts by its type."""

    def digest(answer="2", image="a.png", more=None, index=0):
        columns = {"answer": answer, "more": more}
        return fingerprint([Prompt(index, [5], "1+1=", columns, [image])])

    assert digest() == digest()
    others = [digest("3"), digest(image="b.png"), digest(image=b"png"), digest(more={(1, 2): 3})]
    assert len({digest(), digest(index=1), *others}) == 6
    assert digest(more=object()) == digest(more=object())


def test_a_held_out_row_is_named_as_one():
    config = make_config(dataset_id=rows, eval_dataset_id={"hard": rows}, reward_funcs=[only_first])
    (_, trained) = load_train_set(make_tokenizer(), config)
    assert trained.where == "row 1 of dataset_id"
    (_, held_out) = load_sets("eval_dataset_id", "test", make_tokenizer(), config)["hard"]
    assert held_out.where == "row 1 of eval_dataset_id hard"


def test_each_prompt_once_per_epoch():
    """Whatever the size of a batch; and from any number on, as a run that goes on needs it."""
    prompts = [Prompt(row, [5], "", {}) for row in range(7)]

    def rows(seed, batch_size, first=0):
        order = Order(prompts, {}, make_config(seed=seed, batch_size=batch_size))
        groups = order.choose(first)
        assert [group.id for group in groups] == list(range(first, first + batch_size))
        return [group.prompt.index for group in groups]

    order = rows(3, 21)
    passes = [order[:7], order[7:14], order[14:]]
    assert all(sorted(items) == list(range(7)) for items in passes)
    assert passes[0] != passes[1]
    assert order == [row for first in range(0, 21, 3) for row in rows(3, 3, first)]
    assert order[5:] == rows(3, 16, 5)
    assert order != rows(4, 21)


def test_sampling_parameters():
    config = make_config(num_generations=4, top_k=5, stop=["\n"], sampling_params={"seed": 1})
    others = {"temperature": 1.0, "top_k": 5, "stop": ["\n"], "seed": 1}
    assert sampling_params(config) == {"n": 4, "max_tokens": 512, **others}
    assert sampling_params(make_config()) == {"n": 8, "max_tokens": 512, "temperature": 1.0}


# -- rewards ---------------------------------------------------------------------------------------------------------


def make_groups():
    ids = [make_tokenizer().convert_tokens_to_ids([*text, "<eos>"]) for text in ("2", "3")]
    completions = [Completion(token_ids, [0.0] * len(token_ids), "stop", 0) for token_ids in ids]
    return [
        Group(Prompt(7, [5], row["prompt"], {"answer": row["answer"]}), completions) for row in ROWS
    ]


def test_an_environments_number_that_no_float_holds():
    groups = make_groups()
    for group, value in zip(groups, (10**400, 2), strict=True):
        group.reward, group.advantages, group.texts = [0.0, 0.0], [0.0, 0.0], ["2", "3"]
        group.rewards = table([[0.0], [0.0]])
        group.completions[0].info["value"] = value
        group.completions[1].info["value"] = math.nan
    metrics = batch_metrics(groups, 0, make_config(reward_funcs=[only_first]))
    assert metrics["info/value"] == 2.0


def test_several_sets(monkeypatch):
    """A subset is of one set; messages have a set's own rows."""
    rows = [{"prompt": f"{number}+1=", "answer": "2"} for number in range(3)]
    sets: dict = {"few": lambda: rows, "more": lambda: iter(rows * 3)}
    config = make_config(dataset_id=sets, max_steps=2, batch_size=5, reward_funcs=[only_first])
    prompts = load_train_set(make_tokenizer(), config)
    assert [prompt.index for prompt in prompts] == list(range(3 + 9))
    assert prompts[4].where == "row 1 of dataset_id more"
    assert prompts[4].set == "more"
    sets = {"a": lambda: rows, "b": lambda: [{}]}
    broken = make_config(dataset_id=sets, reward_funcs=[only_first])
    with pytest.raises(
        UserError, match="^dataset_id b: dataset row 0: it has no `prompt`, a string"
    ):
        load_train_set(make_tokenizer(), broken)


def test_batch_metrics():
    """Two groups of two; the second one's completions come from versions 3 and 4, one of them was cut off."""
    groups = make_groups()
    last = Completion([1, 2, 3, 4], [0.0] * 4, "length", [3, 5, 5, 5])
    groups[1].fill([Completion([1, 2], [0.0] * 2, "stop", 4), last])
    groups[0].rewards, groups[0].reward = table([[1.0], [math.nan]]), [1.0, math.nan]
    groups[1].rewards, groups[1].reward = table([[2.0], [0.0]]), [2.0, 0.0]
    groups[0].started_version, groups[0].finished_version = 0, 1
    groups[1].started_version, groups[1].finished_version = 3, 5
    groups[0].started_s, groups[0].sampled_s, groups[0].scored_s = 10.0, 12.0, 12.5
    groups[1].started_s, groups[1].sampled_s, groups[1].scored_s = 11.0, 15.0, 16.0
    groups[0].advantages, groups[1].advantages = [0.0, 0.0], [0.75, -1.75]
    groups[0].texts, groups[1].texts = ["2", "3"], ["2", "2"]
    groups[1].completions[1].info.update(turns=3, done=True, said="4")
    groups[1].completions[0].info["turns"] = 1
    metrics = batch_metrics(groups, 5, make_config(reward_funcs=[only_first]))
    assert metrics == {
        "advantages/mean_abs": 2.5 / 4,
        "advantages/max_abs": 1.75,
        "advantages/share_positive": 0.25,
        "info/turns": 2.0,
        "info/done": 1.0,
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


def wants_anser(completions, anser, **_):
    return [0.0] * len(completions)


def takes_no_columns(prompts, completions, completion_ids):
    return [0.0] * len(completions)


def test_rewards_that_do_not_fit_the_data():
    prompts = prompts_of(lambda: ROWS, extra_columns=["answer"])
    check_rewards(prompts, make_config(reward_funcs=[right, best_of(right, only_first)]))
    with pytest.raises(
        ValueError,
        match="reward wants_anser on dataset row 0, which gives it .*answer: TypeError: missing .*'anser'",
    ):
        check_rewards(prompts, make_config(reward_funcs=[wants_anser]))
    with pytest.raises(
        ValueError,
        match="reward takes_no_columns on dataset row 0, .*: TypeError: got an unexpected keyword argument",
    ):
        check_rewards(prompts, make_config(reward_funcs=[takes_no_columns]))


def test_a_later_row_that_does_not_fit_the_rewards():
    prompts = prompts_of(lambda: [*ROWS, {"prompt": "2+2="}])
    with pytest.raises(
        ValueError,
        match="reward right on dataset row 2, .*: TypeError: missing a required argument: 'answer'",
    ):
        check_rewards(prompts, make_config(reward_funcs=[right]))


def test_a_collate_fn_for_single_rows_is_told():
    with pytest.raises(
        UserError, match="through collate_fn, which gets the list of all rows: TypeError"
    ):
        prompts_of(rows, collate_fn=lambda row: {"prompt": row["question"]})


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has a LoRA adapter: merge it first"):
        load_processor(make_config(model_id=str(tmp_path)))


def test_a_begun_answer_is_continued():
    """Behind what the template writes for an answer, without an end of the turn."""
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is "}]
    (prompt,) = prompts_of(lambda: [{"prompt": messages}], tokenizer)
    assert tokenizer.decode(prompt.token_ids) == "<bos>[user]1+1=>It is "


def test_long_columns_are_shortened_in_samples():
    (group, _) = make_groups()
    group.prompt.columns["tests"] = ["assert"] * 1000
    group.texts, group.rewards, group.reward, group.advantages = (
        ["a", "b"],
        table([[1.0], [0.0]]),
        [1.0, 0.0],
        [1.0, -1.0],
    )
    samples = batch_samples([group], make_config(reward_funcs=[right]))
    assert [sample["columns"]["answer"] for sample in samples] == ["2", "2"]
    assert all(sample["columns"]["tests"].startswith("['assert', ") for sample in samples)
    assert len(json.dumps(samples)) < 6000


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_tokens_as_text(kind):
    """Joined they are the text: also where several tokens make a character, or a word begins with its space."""
    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {symbol: number for number, symbol in enumerate(alphabet)}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        expected = [*"a ", "", "", "", "🙂", *"b", "", "é"]
    else:
        words = ["▁a", "▁🙂b", "é", "▁b", "<unk>"]
        vocab = {word: number for number, word in enumerate(words)}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
        backend.decoder = decoders.Metaspace()
        expected = [" a", " 🙂b", "é"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tokenizer("a 🙂bé")["input_ids"] if kind == "bytes" else [0, 1, 2]
    assert token_texts(ids, tokenizer) == expected
    assert "".join(expected).strip() == "a 🙂bé"
    if kind == "bytes":  # cut within the character, and what follows bytes that are none
        assert token_texts(ids[:4], tokenizer) == ["a", " ", "", ""]
        lone = tokenizer("é")["input_ids"][1]
        assert token_texts([lone, *tokenizer("ab")["input_ids"]], tokenizer) == ["", "\ufffda", "b"]
        expected = ["", "", "", "\ufffd" * 4, "", "", "\ufffd" * 2 + "a"]
        assert token_texts([lone] * 6 + ids[:1], tokenizer) == expected


def test_a_long_conversation_stays_one():
    (group, _) = make_groups()
    group.texts, group.rewards, group.reward = ["a", "b"], table([[1.0], [0.0]]), [1.0, 0.0]
    messages = [{"role": "user", "content": "x" * 9000}, {"role": "tool", "content": ["y"] * 9000}]
    group.completions[0].info["messages"] = messages
    first, _ = batch_samples([group], make_config(reward_funcs=[right]))
    shown = first["info"]["messages"]
    assert [message["role"] for message in shown] == ["user", "tool"]
    assert shown[0]["content"] == "x" * 2000
    assert shown[1]["content"].startswith("['y', ")


def of_lengths(lengths, name="", reasons=None):
    """A group of completions of these lengths, each with another text and reward."""
    completions = [
        Completion([1] * length, [0.0] * length, reason, 0)
        for length, reason in zip(lengths, reasons or ["stop"] * len(lengths), strict=True)
    ]
    numbers = [float(number) for number in range(len(lengths))]
    return Group(
        Prompt(0, [5], "", {}, set=name), completions, list(map(str, numbers)),
        table([number] for number in numbers), numbers, numbers,
    )  # fmt: skip


def test_different_texts_are_a_share_of_their_group():
    """1 of 4, 3 of 3 and 1 of 2: the mean over groups, which have not as many completions each as there are groups."""
    groups = [of_lengths([1] * size) for size in (4, 3, 2)]
    groups[0].texts, groups[2].texts = ["a"] * 4, ["a"] * 2
    metrics = batch_metrics(groups, 0, make_config(reward_funcs=[len]))
    assert metrics["completions/different"] == pytest.approx((1 / 4 + 3 / 3 + 1 / 2) / 3)


def test_metrics_of_sets_are_of_their_own_groups():
    groups = [of_lengths([1, 3], "a"), of_lengths([10, 20, 30], "b"), of_lengths([5], "a")]
    metrics = batch_metrics(groups, 0, make_config(reward_funcs=[len]))
    assert metrics["sets/a/mean_length"] == (1 + 3 + 5) / 3
    assert metrics["sets/b/mean_length"] == (10 + 20 + 30) / 3
    assert metrics["sets/a/reward"] == (0 + 1 + 0) / 3
    assert metrics["sets/b/reward"] == (0 + 1 + 2) / 3
    assert (metrics["sets/a/groups"], metrics["sets/b/groups"]) == (2, 1)
    assert metrics["completions/mean_length"] == 69 / 6


def test_a_group_with_one_advantage_can_teach():
    """Before it has its advantages, when the function is asked, and with them; one without any cannot."""
    given: list[float] = []
    config = make_config(reward_funcs=[len], advantage_fn=lambda rewards, _: table([given]))
    for given, share in (([0.0, 0.5, -0.5], 0.0), ([0.0, 0.0, 0.0], 1.0)):
        group = of_lengths([1, 1, 1])
        for group.advantages in ([], given):
            metrics = batch_metrics([group], 0, config)
            assert metrics["frac_reward_zero_std"] == share


def test_all_that_was_cut_is_counted_and_masked():
    """A completion that repeated itself was cut, too: none of its tokens trains, or is in the normalizer."""
    group = of_lengths([1, 2, 4, 8], reasons=["stop", "length", "repetition", "stop"])
    config = make_config(reward_funcs=[len], mask_truncated_completions=True)
    assert batch_metrics([group], 0, config)["completions/clipped_ratio"] == 0.5
    assert trained_lengths(group, config) == [1, 0, 0, 8]
    assert token_columns([group], config)["mask"].sum() == 9
    assert trained_lengths(group, make_config(reward_funcs=[len])) == [1, 2, 4, 8]


def test_whatever_a_policy_sampled_trains():
    """Weights of the step, of older ones, and such as this trainer never sent; the normalizer counts the same."""
    group = of_lengths([5])
    versions = torch.tensor([FOREIGN, 0, 3, ENVIRONMENT, 2])
    group.fill([Completion([1] * 5, [0.0] * 5, "stop", versions)])
    group.trained_version = 3
    columns = token_columns([group], make_config(reward_funcs=[len]))
    assert columns["mask"].tolist() == [1, 1, 1, 0, 1]
    assert trained_lengths(group, make_config(reward_funcs=[len])) == [4]
    assert columns["servers"].tolist() == [0, 0, 1, 0, 0]  # which compare only the step's own


def test_a_held_out_group_that_was_refused_has_no_samples():
    """As where a `rollout_fn` gave it completions that are too long: it has them, and no rewards."""
    (group, _) = make_groups()
    assert batch_samples([group], make_config(reward_funcs=[right])) == []


def test_samples_have_their_tokens():
    (group, _) = make_groups()
    group.texts, group.rewards, group.reward = ["a", "b"], table([[1.0], [0.0]]), [1.0, 0.0]
    long = group.completions[0].token_ids.tolist()
    segment = Completion([40, 41], [-0.126, -math.inf], "stop", 3, prompt_ids=[5, 6])
    last = Completion(long, [-0.5] * len(long), "stop", 4)
    group.fill([[segment, last], group.completions[1]])
    tokenizer = make_tokenizer()
    config = make_config(reward_funcs=[right])
    first, second = batch_samples([group], config, tokenizer=tokenizer)
    assert "".join(first["tokens"]) == tokenizer.decode(long)
    assert first["logprobs"] == [-0.5] * len(long)
    assert first["earlier"] == [
        {
            "weight_versions": [(3, 0, 2)],
            "tokens": [tokenizer.decode([40]), tokenizer.decode([41])],
            "logprobs": [-0.13, -math.inf],
            "prompt": tokenizer.decode([5, 6]),
        }
    ]
    assert "earlier" not in second


def test_names_with_subset_and_split(monkeypatch):
    asked = []

    def load(*names, split):
        asked.append((*names, split))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load)
    for source in ("a/b", "a/b:main", "a/b::test[:100]", "a/b:main:dev"):
        prompts_of(source)
    assert asked == [
        ("a/b", None, "train"), ("a/b", "main", "train"), ("a/b", None, "test[:100]"),
        ("a/b", "main", "dev"),
    ]  # fmt: skip


ROLLOUTS = [(0, True), ([0, 1], True), ([0, ENVIRONMENT], True), ([], False), ([0], False)]


class OneServer:
    """A client that leases a server which nobody asks anything."""

    version = 0

    @contextlib.contextmanager
    def lease(self):
        yield Server("http://x", 1.0)


def rolled_out(rollout_fn):
    """The group that the recipe's function fills in."""
    client: Any = OneServer()
    group, config = Group(Prompt(0, [5], "", {})), make_config(rollout_fn=rollout_fn)
    sample_group(group, client, None, config, n=1)
    return group


@pytest.mark.parametrize(("versions", "fits"), ROLLOUTS, ids=str)
def test_a_rollout_has_a_version_of_each_token(versions, fits):
    refused = pytest.raises(
        UserError, match="rollout_fn on dataset row 0: ValueError: a completion needs"
    )
    with contextlib.nullcontext() if fits else refused:
        group = rolled_out(lambda *_: [Completion([5, 6], [-1.0, -1.0], "stop", versions)])
        assert group.tokens.weight_versions.tolist() in (versions, [versions, versions])


SPANS = [
    ([], [-2, -2, -2]),
    ([(4, 0, 3)], [4, 4, 4]),
    ([(-1, 0, 1), (7, 1, 3)], [-1, 7, 7]),
    ([(3, 0, 1), (3, 2, 3)], [3, -2, 3]),
]


def sampled(spans):
    """A message of three tokens."""
    named = [(str(version) if version >= 0 else "default", *span) for version, *span in spans]
    ids, logprobs = array("i", [5, 6, 7]).tobytes(), array("f", [-1.0] * 3).tobytes()
    return Sampled("stop", ids, logprobs, named)


@pytest.mark.parametrize(("spans", "versions"), SPANS, ids=str)
def test_spans_of_versions(spans, versions):
    """Between spans an environment wrote; a server's completion has none of it."""
    assert version_spans(torch.tensor(versions)) == spans
    if ENVIRONMENT not in versions:
        assert completion_of(sampled(spans)).weight_versions.tolist() == versions


@pytest.mark.parametrize(
    "spans",
    [
        [], [(0, 0, 4)], [(0, 0, 2)], [(0, 1, 3), (1, 0, 1)], [(0, 0, 2), (1, 1, 3)],
        [(0, -1, 1)], [(0, 0, 1), (1, 2, 3)], [(0, 0, 3), (1, 3, 2)],
    ],
    ids=str,
)  # fmt: skip
def test_spans_that_do_not_fit_are_refused(spans):
    with pytest.raises(ValueError, match="of 3 tokens some have no weight version, or several"):
        completion_of(sampled(spans))


WHOLE = Completion([5, 6], [-1.0, -1.0], "stop", 0)
NO_ROLLOUTS = [
    (lambda *_: [5], "it returned no completions to train: 'int' object is not iterable"),
    (lambda *_: None, "TypeError: 'NoneType' object is not iterable"),
    (lambda *_: [WHOLE, WHOLE], "it returned no completions to train: 2 rollouts, not 1"),
    (lambda *_: [][0], "IndexError"),
    (lambda *_: [Completion([], [], "stop", 0)], "ValueError: a completion needs"),
    (
        lambda *_: [dataclasses.replace(WHOLE, sampler_logprobs=[-1.0])],
        "ValueError: a completion needs",
    ),
    (
        lambda *_: [dataclasses.replace(WHOLE, weight_versions=[0])],
        "ValueError: a completion needs",
    ),
    (
        lambda *_: [Completion([5] * 20_000, [-1.0] * 20_000, "stop", 0)],
        "it returned no completions to train: a completion has 20001 tokens with its prompt: raise",
    ),
]


@pytest.mark.parametrize(
    ("rollout_fn", "message"), NO_ROLLOUTS, ids=[message for _, message in NO_ROLLOUTS]
)
def test_what_is_no_rollout_is_refused(rollout_fn, message):
    with pytest.raises(UserError, match=f"rollout_fn on dataset row 0: {message}"):
        rolled_out(rollout_fn)


def score(groups, config):
    scorer = Scorer(make_tokenizer(), config)
    try:
        for group in groups:
            scorer.score(group)
    finally:
        scorer.close()
    return [group.reward for group in groups]


def test_weights_are_not_rounded():
    """To float32, in which 0.1 is another number."""
    config = make_config(reward_funcs=[right, only_first], reward_weights=[0.1, 0.2])
    assert weighted(table([[1.0, None], [1.0, 1.0]]), config) == [0.1, 0.1 + 0.2]


def test_weighted_rewards_and_none():
    config = make_config(reward_funcs=[right, only_first], reward_weights=[1.0, 0.5])
    groups = make_groups()
    assert score(groups, config) == [[2.0, 1.0], [0.0, 0.0]]
    assert groups[0].texts == ["2", "3"]
    assert_same(groups[1].rewards, table([[0.0, math.nan], [0.0, math.nan]]))
    for group in groups:
        group.advantages = [0.0, 0.0]
    metrics = batch_metrics(groups, 0, config)
    assert metrics["rewards/right"] == 0.25
    assert metrics["rewards/only_first"] == 2.0
    assert metrics["frac_reward_zero_std"] == 0.5
    totals = score(
        make_groups(), dataclasses.replace(config, reward_funcs=[only_first], reward_weights=None)
    )
    assert totals[0] == [2.0, 2.0]
    assert all(math.isnan(value) for value in totals[1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            short,
            "reward short on dataset row 7 must return a list of 2, one per completion: numbers below 1e30, or None: "
            "it returned \\[1.0\\]",
        ),
        (
            words,
            "numbers below 1e30, or None: AttributeError: 'str' object has no attribute '__float__'",
        ),
        (infinite, "it returned \\[1.0, inf\\]"),
        (scalar, "TypeError: 'float' object is not iterable"),
    ],
)
def test_bad_rewards(function, message):
    with pytest.raises(ValueError, match=message):
        score(make_groups(), make_config(reward_funcs=[function]))


@pytest.mark.parametrize("value", [None, -1.0])
def test_a_failed_call_gives_the_configured_value(tmp_path, value):
    """The other function's rewards still count; the sample is written down."""
    config = make_config(
        reward_funcs=[right, raises],
        failed_reward=value,
        output_dir=str(tmp_path),
        reward_timeout=30.0,
    )
    scorer = Scorer(make_tokenizer(), config)
    (group, _) = make_groups()
    scorer.score(group)
    assert group.reward == [1.0 + (value or 0), 0.0 + (value or 0)]
    given = math.nan if value is None else value
    assert_same(group.rewards, table([[1.0, given], [0.0, given]]))
    assert scorer.failures.count == 1
    (line,) = (tmp_path / "failed_rewards.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "error": "reward raises on dataset row 7 raised KeyError: 'gold' "
        f"(some_rewards.py:{raises.__code__.co_firstlineno + 1})",
        "prompt": "1+1=", "completions": ["2", "3"], "columns": {"answer": "2"},
    }  # fmt: skip
    scorer.close()


def test_a_hanging_reward_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "IMPORT_GRACE_S", 2.0)
    config = make_config(
        reward_funcs=[hangs, right], reward_timeout=0.3, reward_workers=1, output_dir=str(tmp_path)
    )
    groups = make_groups()
    assert score(groups, config) == [[1.0, 0.0], [0.0, 0.0]]
    lines = (tmp_path / "failed_rewards.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert all("reward hangs on dataset row 7 took longer than 0.3 s" in line for line in lines)


def test_a_reward_that_only_fails_ends_the_run(tmp_path):
    config = make_config(reward_funcs=[raises], batch_size=4, output_dir=str(tmp_path))
    with pytest.raises(
        ValueError,
        match="reward raises on dataset row 7 raised KeyError: 'gold' .*; so did 4 calls in a row",
    ):
        score([*make_groups(), *make_groups()], config)


def test_best_of_several_verifiers():
    """As one reward function, in a worker: the better of two, None only where neither applies."""
    either = best_of(right, only_first)
    assert either.__name__ == "best_of_right_only_first"
    assert "answer" in required(
        either
    )  # None where the info of a rollout_fn has none, as for `right` alone
    assert to_json(make_config(reward_funcs=[either]))["reward_funcs"] == [
        "recipes.rewards.best_of_right_only_first"
    ]
    groups = make_groups()
    assert score(groups, make_config(reward_funcs=[either])) == [[2.0, 2.0], [0.0, 0.0]]
    nothing = best_of(only_first, only_first)
    score(groups, make_config(reward_funcs=[nothing]))
    assert_same(groups[1].rewards, table([[math.nan], [math.nan]]))


def test_numpy_and_torch_numbers_are_numbers():
    values = lambda **_: [torch.tensor([0.5, 1.5])[i].item() for i in range(2)]
    values.__name__ = "values"
    assert score(make_groups(), make_config(reward_funcs=[values]))[0] == [0.5, 1.5]


def test_a_group_is_as_old_as_its_oldest_token():
    one = Completion([5, 6], [-1.0, -1.0], "stop", [4, 6])
    two = Completion([5], [-1.0], "stop", 5)
    assert Group(Prompt(0, [5], "", {}), [two, one]).oldest_version == 4


def test_a_group_begins_when_it_has_a_server():
    """Not when it begins to wait for one, for which two versions passed here."""

    class Busy:
        version = 1

        @contextmanager
        def lease(self):
            self.version = 3
            yield SimpleNamespace(
                number=0, version=3, generate=lambda *_: [Completion([5], [-1.0], "stop", 3)]
            )

    group, client = Group(Prompt(0, [5], "", {})), Busy()
    sample_group(group, client, None, make_config(), n=1)  # type: ignore[arg-type]
    assert group.started_version == 3
    assert 0 < group.started_s <= group.sampled_s


def seeds_sent(monkeypatch, **fields):
    """The seed of each request of two neighbouring groups."""
    sent = []

    def generate(self, prompt, sampling, *_):
        sent.append(sampling.get("seed"))
        return [Completion([5], [-1.0], "stop", 0) for _ in range(sampling["n"])]

    monkeypatch.setattr(Server, "generate", generate)
    client: Any = OneServer()
    for number in (6, 7):
        group = Group(Prompt(0, [5], "", {}), id=number)
        sample_group(group, client, None, make_config(num_generations=4, **fields))
    return sent


def test_seeds_of_groups(monkeypatch):
    """vLLM adds a completion's number: no two completions of a run, or of two runs, have the same."""
    first, second = seeds_sent(monkeypatch, max_staleness=0)
    assert second - first >= 4
    assert all(0 <= seed < 2**63 - 4 for seed in (first, second))
    assert seeds_sent(monkeypatch, max_staleness=0) == [first, second]
    others = seeds_sent(monkeypatch, max_staleness=0, seed=43)
    assert others[0] - first > 10**9
    assert seeds_sent(monkeypatch, max_staleness=0, sampling_params={"seed": 3}) == [3, 3]
    assert seeds_sent(monkeypatch, max_staleness=1) == [None, None]
