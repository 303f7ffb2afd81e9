"""What a run lets a researcher hook in, against fake servers: info, evaluations, proofs of syncs, teachers, replays."""

import itertools
import json
import math
import re
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import losses
import pytest
import torch
from fake_server import fake_server
from forked import Forked, serve
from helpers import (
    ROOT,
    answer_in,
    make_model,
    make_tokenizer,
    on_forked_ranks,
    read,
    said,
    server,
    table,
)
from safetensors.torch import load_file
from test_loss import make_config
from transformers import AutoModelForCausalLM

from benchmarks.local_server import local_server
from config import UserError, parse_args
from prefix_attention import attach, pack
from recipes.own_loss import reinforce
from recipes.replay import file_of, replaying
from recipes.teacher import ReferenceServer, Teacher
from rollouts.evaluation import Round, held_out_metrics
from rollouts.group import Completion, Group, Prompt
from rollouts.processor import load_processor
from rollouts.proofs import Proofs
from rollouts.rollouts import Rollouts
from rollouts.run import Run
from rollouts.sampling import sampling_params
from rollouts.scoring import Failures, Scorer
from server.messages import About
from train import grpo_loss, main
from training.model import build_policy, build_reference, token_logprobs
from utils import process_group
from vllm_client import ServerError, ServerLost, State

SAVE = ("--parts", "recipes.replay.save")
WITH_TEACHER = """
from dataclasses import replace
from recipes.teacher import Teacher
config = replace(config, parts=[Teacher({urls})])
"""


def weights(folder, step=3):
    return load_file(folder / f"checkpoint-{step}" / "model.safetensors")


def assert_identical(one, two):
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name


# -- What an environment knows ----------------------------------------------------------------------------------------


def with_info(server, prompt, sampling):
    """Each completion is worth its number; the last one does not know."""
    completions = server.generate(prompt.token_ids, sampling)
    for number, completion in enumerate(completions[:-1]):
        completion.info = {"score": number + prompt.index, "note": {"turns": [number]}}
    return completions


def what_it_scored(completions, score, **_):
    return score


def test_an_environment_hands_back_its_own_reward(models, recipe, tmp_path):
    with fake_server(models["untied"], answer_in(0.01)) as server:
        config = parse_args([recipe(server), "--max_steps", "1"])
        main(replace(config, rollout_fn=with_info, reward_funcs=[what_it_scored]))
    samples = read(tmp_path, "completions")
    for group in (samples[start : start + 4] for start in range(0, len(samples), 4)):
        assert [sample["reward"] for sample in group] == [
            *(group[0]["row"] + number for number in range(3)),
            None,
        ]
        assert group[1]["info"] == {"score": 1 + group[0]["row"], "note": {"turns": [1]}}
        assert group[3]["info"] == {}


def won_at_times(server, prompt, sampling):
    completions = server.generate(prompt.token_ids, sampling)
    if prompt.index % 2:
        completions[0].info = {"won": True}
    return completions


def times_won(rewards, groups):
    """Reads the `info` of rollouts, which no trial before the run could have."""
    assert all("won" in group.completions[0].info for group in groups if group.prompt.index % 2)
    return rewards - rewards.mean()


def has_won(completions, won, worth=1.0, **_):
    return [worth * bool(value) for value in won]


def test_an_info_that_no_completion_of_a_group_has_is_none(models, recipe, tmp_path, capsys):
    with fake_server(models["untied"], answer_in(0.01)) as server:
        config = parse_args([recipe(server), "--max_steps", "2"])
        own: Any = {
            "rollout_fn": won_at_times, "reward_funcs": [has_won], "advantage_fn": times_won
        }  # fmt: skip
        main(replace(config, **own))
    samples = read(tmp_path, "completions")
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}
    assert sum(sample["reward"] for sample in samples) == len(
        {s["group"] for s in samples if s["row"] % 2}
    )
    assert (
        capsys.readouterr().out.count("reward has_won gets won=None: no info of some group has won")
        == 1
    )


def test_info_of_turns_is_joined_and_hides_no_column():
    one = Completion([5], [-1.0], "stop", 0, info={"a": 1, "b": 1})
    assert one.then([7], replace(one, info={"b": 2})).info == {"a": 1, "b": 2}
    group = Group(Prompt(3, [5], "", {"a": "x"}), [one, one])
    scorer = Scorer(make_tokenizer(), make_config(reward_funcs=[what_it_scored]))
    with pytest.raises(UserError, match="rollout_fn on dataset row 3: info has the column a"):
        scorer.score(group)
    scorer.close()


# -- Evaluation -------------------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    """Against all subsets of k completions, counted out; completions without a reward are in none."""
    rewards = [
        [1.0, 0.0, 0.0, 2.0],
        [0.0] * 4,
        [1.0] * 4,
        [0.5, 0.0, math.nan, 1.0],
        [math.nan] * 4,
    ]
    groups = [
        Group(
            Prompt(0, [5], "", {}),
            reward=row,
            rewards=table([reward] for reward in row),
        )
        for row in rewards
    ]
    valid = [[reward for reward in row if not math.isnan(reward)] for row in rewards]
    named = {"eval_dataset_id": "d", "accuracy_func": "exists"}
    values = held_out_metrics(
        groups, make_config(eval_generations=4, eval_temperature=1.0, **named)
    )
    for k in (2, 4):
        shares = []
        for row in valid:
            subsets = list(itertools.combinations(row, k))
            shares += (
                [sum(max(subset) >= 1 for subset in subsets) / len(subsets)] if subsets else []
            )
        assert values[f"pass@{k}"] == pytest.approx(sum(shares) / len(shares))
    assert "pass@1" not in values
    everything = list(itertools.chain(*valid))
    assert values["accuracy"] == sum(reward >= 1 for reward in everything) / len(everything)
    assert values["reward"] == pytest.approx(sum(everything) / len(everything))
    assert {
        name for name in held_out_metrics(groups, make_config()) if name.startswith("pass")
    } == set()


SETS = """
from contextlib import closing
from dataclasses import replace
from functools import partial
def short(): return rows()[:3]
def long(): return rows()[3:8]
def is_long(completion_ids, **_): return [float(len(ids) > 3) for ids in completion_ids]
config = replace(
    config, eval_dataset_id={"short": short, "long": long}, eval_generations=4, eval_temperature=0.7,
    reward_funcs=[is_long], eval_steps=1,
)
"""


def test_held_out_sets_and_their_completions(models, recipe, tmp_path):
    with fake_server(models["untied"], answer_in(0.01)) as server:
        path = Path(recipe(server))
        path.write_text(path.read_text() + SETS)
        main(parse_args([str(path), "--max_steps", "2"]))
    held_out, metrics = read(tmp_path, "held_out"), read(tmp_path, "metrics")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics:
        of_step = [sample for sample in held_out if sample["step"] == row["step"]]
        assert len(of_step) == 4 * 8
        sets = {name: [s for s in of_step if s["set"] == name] for name in ("short", "long")}
        assert [len(samples) for samples in sets.values()] == [12, 20]
        for name, samples in (("", of_step), ("short/", sets["short"]), ("long/", sets["long"])):
            lengths: dict[str, list[bool]] = {sample["prompt"]: [] for sample in samples}
            for sample in samples:
                lengths[sample["prompt"]].append(len(sample["completion"]) > 3)
                assert sample["reward"] == float(len(sample["completion"]) > 3)
            share = sum(map(sum, lengths.values())) / len(samples)
            assert row[f"eval/{name}reward"] == row[f"eval/{name}accuracy"] == pytest.approx(share)
            assert row[f"eval/{name}pass@4"] == pytest.approx(
                sum(map(any, lengths.values())) / len(lengths)
            )
            assert f"eval/{name}rewards/is_long" in row
    assert "advantage" not in held_out[0]


def test_a_held_out_set_is_named_in_what_is_wrong_with_it(models, capsys):
    """A missing file, before any server is asked; and prompts without room."""
    long = [{"prompt": "1+1="}, {"prompt": "1" * 120}]
    sets: Any = {"easy": lambda: long[:1], "hard": lambda: long}
    words = {
        "model_id": models["untied"],
        "dataset_id": lambda: long,
        "max_completion_len": 20,
        "num_epochs": 2.0,
    }
    of_one = make_config(**words, eval_dataset_id="nowhere.jsonl", reward_funcs=[lambda **_: []])
    of_two = replace(of_one, eval_dataset_id=sets | {"aime": "nowhere.jsonl"})
    with process_group(60) as device:
        for config, name in ((of_one, "eval_dataset_id"), (of_two, "eval_dataset_id aime")):
            with pytest.raises(
                UserError, match=rf"^{name}: dataset nowhere\.jsonl: FileNotFoundError"
            ):
                Rollouts(config, device)
        capsys.readouterr()
        with fake_server(models["untied"], answer_in(0.0)) as server:
            of_two = replace(of_one, eval_dataset_id=sets, vllm_urls=[server.url])
            Rollouts(of_two, device).close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    cure = "raise the servers' --max-model-len, or lower max_completion_len=20"
    expected = f"left out 1 of 2 prompts, empty or over 108 tokens: {cure}"
    assert lines == [f"dataset_id: {expected}", f"eval_dataset_id hard: {expected}"]


def test_what_held_out_completions_are_sampled_with(monkeypatch):
    """By `eval_generations` and `eval_temperature`; no reference is asked for them."""
    seen, asked = [], []
    monkeypatch.setattr(
        "rollouts.run.sample_group",
        lambda group, pool, processor, config, **instead: seen.append(
            sampling_params(config) | instead
        ),
    )
    monkeypatch.setattr(
        "recipes.teacher.on_one_server", lambda group, pool, ask: asked.append(group)
    )
    of_eval = {"eval_dataset_id": "x.jsonl", "eval_generations": 3, "eval_temperature": 0.5}
    config = make_config(num_generations=4, temperature=0.7, **of_eval)
    scorer: Any = SimpleNamespace(score=lambda group: None)
    groups = [Group(Prompt(number, [5], "", {})) for number in range(2)]
    failures = Failures("rollouts", config)
    pool: Any = None
    run = Run(config, {}, None, pool, [], {"": [groups[0].prompt]}, scorer, failures)
    teacher = Teacher("http://x")
    teacher.pool, teacher.sample_and_score = pool, run.fill
    run.fill = teacher.fill
    with closing(Round(run, config)) as under_way:
        while not under_way.is_complete():
            pass
    run.fill(groups[1])
    assert [(sampling["n"], sampling["temperature"]) for sampling in seen] == [(3, 0.5), (4, 0.7)]
    assert asked == groups[1:]


def test_held_out_sets_on_the_command_line():
    words = ["--model_id", "m", "--dataset_id", "d", "--reward_funcs", "os.path.exists"]
    config = parse_args(
        [
            *words,
            "--eval_dataset_id",
            '{"a": "x.jsonl", "b": "name::dev"}',
        ]
    )
    assert config.eval_dataset_id == {"a": "x.jsonl", "b": "name::dev"}
    with pytest.raises(UserError, match="eval_generations has no effect with eval_temperature=0.0"):
        parse_args([*words, "--eval_dataset_id", "x.jsonl", "--eval_generations", "3"])


# -- Every sync is proved ---------------------------------------------------------------------------------------------


def dropping(server, sync):
    """At its sync of that number the server leaves one tensor, the last matrix of a layer, as it was made: zeroed."""
    update, seen = server.update, itertools.count(1)
    name = "model.layers.1.mlp.down_proj.weight"

    def most(request):
        answer = update(request)
        if request.meeting and next(seen) == sync:
            server.model.get_parameter(name).data.zero_()
            server.versions[server.version] = server._weights()
        return answer

    server.update = most


def test_a_server_that_drops_a_tensor_is_left_out_and_heals(
    models, recipe, tmp_path, capsys, monkeypatch
):
    """At its fifth sync, synchronous: all tokens are of the current policy, and tell which of two servers it is."""
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    with (
        fake_server(models["untied"], answer_in(0.05)) as one,
        fake_server(models["untied"], answer_in(0.05)) as two,
    ):
        dropping(two, 5)
        main(parse_args([recipe(one, two), "--max_steps", "8", "--max_logprob_mismatch", "0.01"]))
    out = capsys.readouterr().out
    assert re.search(
        rf"{two.url} is left out for now: its log-probs differ from the trainer's by .* nats", out
    )
    assert f"{one.url} is left out" not in out
    metrics = read(tmp_path, "metrics")
    assert [row["step"] for row in metrics] == list(range(1, 9))
    gaps = [row["sampling/current_logp_difference"] for row in metrics]
    assert gaps[4] > 0.01
    assert max(gaps[:4] + gaps[5:]) < 1e-4
    assert all(row["sampling/current_share"] == 1 for row in metrics)
    assert all(row["sampling/stale_logp_difference"] is None for row in metrics)


def serve_dropping(argv, log, environment):
    """`serve`, but the fifth update passes the last norm by, without a word: it stays as the fourth left it."""
    from server.receiver import Update

    arriving, seen = Update.arriving, itertools.count(1)

    def most(self):
        is_fifth = next(seen) == 5
        for name, tensor in arriving(self):
            if not (is_fifth and name == "model.norm.weight"):
                yield name, tensor

    setattr(Update, "arriving", most)  # noqa: B010
    serve(argv, log, environment)


class Dropping(Forked):
    serve = staticmethod(serve_dropping)


@pytest.mark.server
def test_a_real_server_that_drops_a_tensor(models, recipe, tmp_path, capsys, monkeypatch):
    """What both sides agree to is 1e-5 at most; one norm that is one update behind is three orders above it."""
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    options = ("--max-model-len", "128", "--max-num-seqs", "64")
    with local_server(models["untied"], tmp_path / "log", *options, start=Dropping) as started:
        address = SimpleNamespace(url=started.wait())
        main(parse_args([recipe(address), "--max_steps", "7", "--max_logprob_mismatch", "1e-3"]))
    gaps = [row["sampling/current_logp_difference"] for row in read(tmp_path, "metrics")]
    assert gaps[4] > 1e-3
    assert max(gaps[:4] + gaps[5:]) < 1e-4
    out = capsys.readouterr().out
    assert (
        f"{address.url} is left out for now: its log-probs differ from the trainer's by {gaps[4]:.3g} nats"
        in out
    )
    assert f"{address.url} is back" in out


@pytest.mark.parametrize("old", ["trainer", "sampler"])
def test_what_updates_of_the_batch_change_accuses_no_server(
    models, recipe, tmp_path, capsys, monkeypatch, old
):
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    options = [
        "--num_iterations",
        "3",
        "--num_minibatches",
        "2",
        "--learning_rate",
        "2e-2",
        "--old_logprobs",
        old,
    ]
    with fake_server(models["untied"], answer_in(0.01)) as server:
        main(parse_args([recipe(server), "--max_logprob_mismatch", "1e-3", *options]))
    assert "is left out" not in capsys.readouterr().out
    metrics = read(tmp_path, "metrics")
    assert max(row["sampling/current_logp_difference"] for row in metrics) < 1e-4
    assert all(row["sampling/current_share"] == 1 for row in metrics)


def test_a_busy_server_is_no_lost_one(models, recipe, capsys, monkeypatch):
    """It answers no probe in time after the first one: that is no proof, and no reason to leave it out."""
    monkeypatch.setattr("rollouts.proofs.ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr("rollouts.rollouts.PROBE_STEPS", 1)
    asked = itertools.count()
    with fake_server(
        models["untied"], lambda ids, number: (said(ids, number), 1.0 if next(asked) > 1 else 0.0)
    ) as one:
        options = ["--sampling_params", '{"top_p": 1.0}', "--max_steps", "3"]
        main(parse_args([recipe(one), *options]))
    assert "is left out" not in capsys.readouterr().out


def test_the_run_ends_where_the_only_server_goes_on_to_drop(models, recipe, capsys, monkeypatch):
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    monkeypatch.setattr("rollouts.servers.PROBE_S", 0.2)
    with fake_server(models["untied"], answer_in(0.02)) as server:
        dropping(server, 2)
        again = server.update
        name = "model.layers.1.mlp.down_proj.weight"

        def most(request):
            answer = again(request)
            if int(server.version) >= 1:
                server.model.get_parameter(name).data.zero_()
                server.versions[server.version] = server._weights()
            return answer

        server.update = most  # type: ignore[method-assign]
        options = ["--max_steps", "8", "--max_logprob_mismatch", "0.01", "--server_timeout", "3"]
        with pytest.raises(ServerError, match="no rollout server is left: .* nats a token"):
            main(parse_args([recipe(server), *options]))


def test_all_servers_are_probed_every_few_versions(models, recipe, monkeypatch):
    """So also where no tokens can tell, as those of a bent distribution, whose log-probs are others."""
    probed = []
    probe = Proofs._probe

    def note(self, server):
        probed.append((self.version, server.url))
        return probe(self, server)

    monkeypatch.setattr(Proofs, "_probe", note)
    monkeypatch.setattr("rollouts.rollouts.PROBE_STEPS", 3)
    with (
        fake_server(models["untied"], answer_in(0.0)) as one,
        fake_server(models["untied"], answer_in(0.0)) as two,
    ):
        options = ["--sampling_params", '{"top_p": 1.0}', "--max_steps", "8"]
        main(parse_args([recipe(one, two), *options]))
    assert [version for version, _ in probed] == [0, 0, 3, 3, 6, 6]
    assert [{url for _, url in probed[start : start + 2]} for start in (0, 2, 4)] == [
        {one.url, two.url}
    ] * 3


class StandIn(SimpleNamespace):
    """A server for sets and keys, as the real ones are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


def make_proofs(pool) -> Any:
    """Of version 4, by a policy that is nowhere."""
    policy: Any = SimpleNamespace(eval=lambda: None, modules=list)
    prompt = Prompt(0, [5], "", {})
    return Proofs(policy, 4, pool, prompt, make_config(), torch.device("cpu"))


@pytest.mark.parametrize("served", [True, False])
def test_who_is_lost_while_it_is_probed_is_not_let_in(served):
    """One that served and came back meanwhile has zeroed weights; one that waited for the probe is let in by it."""
    admitted: list[Any] = []
    state = State.SERVING if served else State.WAITING
    one: Any = StandIn(url="http://a", state=state, version=4)

    def lose_it(completions):
        if served:
            one.state, one.version = State.WAITING, -1
        return ""

    proofs = make_proofs(SimpleNamespace(admit=admitted.append))
    probe = (one.url, [Completion([5], [-1.0], "stop", 4)], "")
    proofs._probe, proofs._difference = lambda server: probe, lose_it
    with process_group(60):
        proofs.prove([one])
    assert admitted == ([] if served else [one])


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_that_answers_a_probe_with_other_weights_is_left_out(answers):
    """One that serves and does not answer in time goes on."""
    lost: list[Any] = []
    one: Any = StandIn(url="http://a", state=State.SERVING, version=4)
    pool = SimpleNamespace(lose=lambda server, error: lost.append(str(error)))
    stale = Completion([5], [-1.0], "stop", 3)
    one.generate = lambda *_, **__: [stale]
    if not answers:
        one.generate = lambda *_, **__: (_ for _ in ()).throw(ServerLost("it took too long"))
    with process_group(60):
        make_proofs(pool).prove([one])
    assert lost == (["answers with other weights than it was sent"] if answers else [])


def test_tokens_of_older_policies_say_nothing_of_a_sync(models, recipe, tmp_path):
    """Staleness is counted apart, at staleness 1 as well; numerics stay numerics."""
    with fake_server(models["untied"], answer_in(0.02)) as server:
        main(parse_args([recipe(server), "--max_staleness", "1", "--max_steps", "7"]))
    metrics = read(tmp_path, "metrics")
    assert any(row["sampling/current_share"] < 1 for row in metrics)
    assert max(row["sampling/stale_logp_difference"] or 0 for row in metrics) > 1e-3
    assert max(row["sampling/current_logp_difference"] or 0 for row in metrics) < 1e-4


# -- A teacher --------------------------------------------------------------------------------------------------------


def test_a_teacher_is_another_model_of_the_same_vocabulary(models, tmp_path):
    """Its log-probs against its own plain forward, where the policy has an adapter, too."""
    teacher = make_model(tmp_path / "teacher", layers=3)
    row = pack([([5, 6, 7], [[8, 9], [10, 11, 12]])])[0]
    for fields in ({}, {"use_peft": True}):
        config = make_config(
            model_id=models["tied"], beta=0.1, reference_id=teacher, temperature=0.7, **fields
        )
        with process_group(60) as device:
            policy = attach(build_policy(config, device))
            got = build_reference(policy, config, device)(row, {})
        plain = AutoModelForCausalLM.from_pretrained(teacher)
        wanted = []
        for ids in ([8, 9], [10, 11, 12]):
            with torch.no_grad():
                logits = plain(input_ids=torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1] / 0.7
            wanted += logits.log_softmax(-1)[range(len(ids)), ids].tolist()
        assert got.tolist() == pytest.approx(wanted, abs=1e-5)
        assert not torch.allclose(token_logprobs(policy, row, {}, config), got, atol=0.1)


def test_a_teacher_of_another_vocabulary_is_refused(models, recipe, tmp_path):
    other = make_model(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    words = json.loads(file.read_text())
    words["model"]["vocab"]["¤"] = words["model"]["vocab"].pop("~")
    file.write_text(json.dumps(words))
    with (
        fake_server(models["untied"], answer_in(0.0)) as server,
        pytest.raises(
            UserError, match="reference_id=.*other: its vocabulary is not that of model_id"
        ),
    ):
        main(parse_args([recipe(server), "--reference_id", other, "--beta", "0.1"]))
    Path(other, "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="reference_id=.*other has a LoRA adapter: merge it first"):
        load_processor(make_config(model_id=models["untied"], reference_id=other, beta=0.1))
    with pytest.raises(
        UserError, match="reference_id has no effect with beta=0.0 and loss_fn=None"
    ):
        parse_args([recipe(server), "--reference_id", other])


@pytest.mark.server
def test_a_reference_server_is_the_reference(models, tmp_path):
    """A real one at another temperature than 1, against the reference within the trainer; it keeps its temperature."""
    prompt, completions = [5, 6, 7, 8], [[9, 10], [([5, 6, 7, 8], [11, 12, 13]), ([5, 6, 9], [10])]]
    sampled = [Completion(ids, [-1.0] * len(ids), "stop", 0) for ids in [[9, 10], [11, 12, 13]]]
    last = Completion([10], [-1.0], "stop", 0, prompt_ids=[5, 6, 9])
    group = Group(Prompt(0, prompt, "", {}))
    group.fill([sampled[0], [sampled[1], last]])
    config = make_config(model_id=models["tied"], beta=0.1, temperature=0.7)
    row = pack([(prompt, completions)])[0]
    with process_group(60) as device:
        wanted = build_reference(attach(build_policy(config, device)), config, device)(row, {})
    with server(models["tied"], tmp_path / "log") as started:
        reference = ReferenceServer(started.wait(), temperature=0.7, timeout_s=60.0)
        for _ in range(2):  # a trainer that goes on tells it again
            reference.connect("trainer")
            got = reference.logprobs(group)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        with pytest.raises(
            ServerError, match="it is the reference of a run at temperature 0.7: start another one"
        ):
            ReferenceServer(started.url, temperature=1.0, timeout_s=60.0).connect("trainer")


def test_a_server_that_a_trainer_has_sent_weights_is_no_reference(models):
    """Its log-probs would be those of another policy, and nobody would notice."""
    completion = Completion([7, 8], [-1.0] * 2, "stop", 0)
    group = Group(Prompt(0, [5, 6], "", {}), [completion])
    with fake_server(models["untied"], answer_in(0.0)) as fake:
        reference = ReferenceServer(fake.url, temperature=1.0, timeout_s=60.0)
        reference.connect("trainer")
        assert len(reference.logprobs(group)) == 2
        fake.version = "3"
        with pytest.raises(ServerError, match="has the weights of a trainer"):
            reference.logprobs(group)


def test_reference_servers_train_as_the_reference_does(models, recipe, tmp_path, capsys):
    """One of two dies on the way: the other one goes on for it; its weights are never touched."""
    options = ["--beta", "0.3", "--temperature", "0.7", "--off_policy_correction", "none"]
    written = []
    with fake_server(models["untied"], answer_in(0.02)) as one:
        main(parse_args([recipe(one), *options]))
        written.append(weights(tmp_path / "run"))
        with (
            fake_server(models["untied"], answer_in(0.0)) as two,
            fake_server(models["untied"], answer_in(0.0)) as three,
        ):
            asked = itertools.count()

            def ill(path):
                if (path == "/health" and next(asked) > 3) or (
                    path == "/sample" and next(asked) > 9
                ):
                    raise RuntimeError("ill")

            two.fault = ill
            path = recipe(one)
            with open(path, "a") as file:
                file.write(WITH_TEACHER.format(urls=f"{two.url!r}, {three.url!r}"))
            main(parse_args([path, *options]))
            written.append(weights(tmp_path / "run"))
            for reference in (two, three):
                paths = {path for path, _ in reference.log}
                assert "/update" not in paths
                assert "/sample" in paths
    assert f"{two.url} is left out" in capsys.readouterr().out
    for name, weight in written[
        0
    ].items():  # log-probs in packed rows and in plain ones, three updates on
        torch.testing.assert_close(weight, written[1][name], rtol=1e-3, atol=1e-5)


def test_what_a_reference_server_cannot_do(models, recipe, vlm):
    with fake_server(models["untied"], answer_in(0.0)) as one:
        path = recipe(one)
        with open(path, "a") as file:
            file.write(WITH_TEACHER.format(urls=repr(one.url)))
        with pytest.raises(UserError, match="Teacher has no effect without beta or a loss_fn"):
            main(parse_args([path]))
        one.about = lambda: About([vlm], 128, "float32", 0, False)  # type: ignore[method-assign]
        with pytest.raises(UserError, match="Teacher: with images the trainer needs its own ref"):
            main(parse_args([path, "--beta", "0.1", "--model_id", vlm]))
        with pytest.raises(UserError, match="the reference is a part, or reference_id, or"):
            parse_args([path, "--beta", "0.1", "--reference_id", "other"])
    with pytest.raises(UserError, match=r"unknown field reference_urls: set parts=\[recipes"):
        make_config(reference_urls=["http://x"])


def nothing_new(run):
    """A part that changes nothing."""


def test_a_part_without_servers(models, recipe):
    """It gives the groups itself; a group that asks for a server ends the run."""
    path = recipe(SimpleNamespace(url="http://127.0.0.1:1"))
    with pytest.raises(UserError, match="vllm_urls names no server: set it"):
        replace(parse_args([path]), vllm_urls=[])
    with pytest.raises(ServerError, match="vllm_urls names no server, and a group asks for one"):
        main(replace(parse_args([path]), vllm_urls=[], parts=[nothing_new]))
    with pytest.raises(UserError, match=r"parts takes functions f\(run\), or objects as Teacher"):
        make_config(parts=[Teacher], beta=0.1)
    with pytest.raises(UserError, match="Teacher needs the address of a server"):
        Teacher()


def test_saved_rollouts_of_an_earlier_run(models, recipe, tmp_path):
    """They are kept with its logs: a start that is repeated is not refused."""
    with fake_server(models["untied"], answer_in(0.0)) as server:
        for _ in range(2):
            main(parse_args([recipe(server), *SAVE, "--max_steps", "1"]))
    assert file_of(tmp_path / "run", 1).exists()
    assert file_of(tmp_path / "run.1", 1).exists()


# -- Replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--num_iterations", "2", "--num_minibatches", "2", "--beta", "0.1"],
        ["--max_staleness", "1", "--max_tokens_per_gpu", "60"],
        [
            "--mask_truncated_completions",
            "true",
            "--max_completion_len",
            "6",
            "--scale_rewards",
            "batch",
        ],
    ],
    ids=str,
)
def test_a_replay_ends_with_the_same_bits(models, recipe, tmp_path, options):
    """Without a server, and with rewards that raise: nothing is sampled or scored again."""
    with fake_server(models["untied"], answer_in(0.03)) as server:
        path = Path(recipe(server))
        main(parse_args([str(path), *SAVE, *options]))
    path = Path(recipe(server))  # without the module of the run before
    path.write_text(path.read_text().replace("return [sum(ids)", "return 1 / 0, [sum(ids)"))
    run = tmp_path / "run"
    again = tmp_path / "again" / "run"
    main(replaying(parse_args([str(path), "--output_dir", str(again), *options]), run))
    assert_identical(weights(run), weights(again))
    for name in (
        "loss",
        "reward",
        "grad_norm",
        "entropy",
        "num_tokens",
        "staleness/mean",
        "completions/mean_length",
    ):
        assert [row[name] for row in read(tmp_path, "metrics")] == [
            row[name] for row in read(tmp_path / "again", "metrics")
        ]
    whole = [
        *(
            zip(
                read(run.parent, "completions"),
                read(tmp_path / "again", "completions"),
                strict=True,
            )
        )
    ]
    assert (
        len({after["group"] for _, after in whole})
        == len({before["group"] for before, _ in whole})
        == 18
    )
    rows = [[{**row, "group": None} for row in rows] for rows in zip(*whole, strict=True)]
    for of_run in rows:  # a replay's groups are numbered in the order in which they were trained
        of_run.sort(key=repr)
    assert rows[0] == rows[1]


def always_one(completions, **_):
    return [1.0] * len(completions)


def test_a_replay_trains_what_was_trained(models, recipe, tmp_path):
    """Whatever its own rules would drop, wait for or evaluate; only the weights of the rewards are its own."""
    with fake_server(models["untied"], answer_in(0.03)) as server:
        path = Path(recipe(server))
        same = Path(tmp_path / f"same_{tmp_path.name}.py")
        change = "from dataclasses import replace\nfrom test_hooks_of_runs import always_one\n"
        same.write_text(
            f"{path.read_text()}{change}config = replace(config, reward_funcs=[always_one])\n"
        )
        main(parse_args([str(same), *SAVE, "--max_staleness", "1"]))
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1="}\n')
    rules = ["--drop_zero_advantage", "true", "--max_staleness", "2"]
    rules += ["--eval_dataset_id", str(tmp_path / "held_out.jsonl")]
    again = str(tmp_path / "again" / "run")
    words = [str(same), "--output_dir", again, "--reward_weights", "2", *rules]
    main(replaying(parse_args(words), tmp_path / "run"))
    before, after = read(tmp_path, "metrics"), read(tmp_path / "again", "metrics")
    assert [row["step"] for row in after] == [1, 2, 3]
    assert [row["reward"] for row in after] == [2.0] * 3
    assert [row["staleness/mean"] for row in after] == [row["staleness/mean"] for row in before]
    assert not [name for row in after for name in row if name.startswith("eval/")]


def test_a_replay_on_two_ranks_resumes(models, recipe, tmp_path):
    """It stops after two steps and goes on; the run that it replays did not stop."""
    with fake_server(models["untied"], answer_in(0.03)) as server:
        path = recipe(server)
        common = [path, "--save_steps", "1", "--collective_timeout", "60"]
        done = on_forked_ranks(2, ROOT / "train.py", *common, *SAVE)
        assert done.returncode == 0, done.stderr
    again = tmp_path / "again" / "run"
    for steps, resume in (("2", "none"), ("3", "auto")):
        words = ["--output_dir", again, "--max_steps", steps, "--resume_from_checkpoint", resume]
        done = on_forked_ranks(2, ROOT / "recipes" / "replay.py", tmp_path / "run", *common, *words)
        assert done.returncode == 0, done.stderr
    one, two = weights(tmp_path / "run"), weights(again)
    for name, weight in one.items():  # two ranks may sum in another order
        torch.testing.assert_close(weight, two[name], rtol=1e-4, atol=1e-6)


def test_a_replay_ends_with_the_last_whole_step(models, recipe, tmp_path):
    """On the schedule of the whole run: what it trained until there is the same to the bit."""
    with fake_server(models["untied"], answer_in(0.0)) as server:
        path = recipe(server)
        options = ["--max_steps", "3", "--lr_scheduler", "linear"]
        main(parse_args([path, *options, *SAVE, "--save_steps", "1"]))
    file_of(tmp_path / "run", 3).unlink()
    words = [path, *options, "--output_dir", str(tmp_path / "again")]
    main(replaying(parse_args(words), tmp_path / "run"))
    assert [path.name for path in (tmp_path / "again").glob("checkpoint-*")] == ["checkpoint-2"]
    files = [
        tmp_path / folder / "checkpoint-2" / "model.safetensors" for folder in ("run", "again")
    ]
    assert_identical(*map(load_file, files))


def test_what_cannot_be_replayed(models, recipe, tmp_path):
    with fake_server(models["untied"], answer_in(0.0)) as server:
        path = Path(recipe(server))
        main(parse_args([str(path), *SAVE, "--max_steps", "1"]))
        main(parse_args([str(path), "--output_dir", str(tmp_path / "without"), "--max_steps", "1"]))
    words = [str(path), "--output_dir", str(tmp_path / "again")]
    run = tmp_path / "run"
    with pytest.raises(UserError, match="replay: set another output_dir than the folder"):
        replaying(parse_args([str(path)]), run)
    with pytest.raises(UserError, match="without has a run without --parts recipes.replay.save"):
        main(replaying(parse_args(words), tmp_path / "without"))
    with pytest.raises(UserError, match="replay asks no server: leave the Teacher out"):
        replaying(replace(parse_args([*words, "--beta", "1"]), parts=[Teacher("http://x")]), run)
    with pytest.raises(UserError, match="nowhere has no run with --parts recipes.replay.save"):
        main(replaying(parse_args(words), tmp_path / "nowhere"))
    for option, value, had in (
        ("batch_size", "3", "6"),
        ("temperature", "0.5", "1.0"),
        ("num_generations", "3", "4"),
    ):
        with pytest.raises(UserError, match=f"replay: that run had {option}={had}: set it"):
            main(replaying(parse_args([*words, f"--{option}", value]), run))
    other = [*words, "--reward_funcs", "recipes.majority.majority_vote"]
    with pytest.raises(UserError, match=r"replay: that run had reward_funcs=\['mean_id'\]: set it"):
        main(replaying(parse_args(other), run))
    file_of(run, 1).rename(file_of(run, 2))
    with pytest.raises(UserError, match="run has no rollouts of step 1"):
        main(replaying(parse_args(words), run))
    file_of(run, 2).rename(file_of(run, 1))
    path = Path(recipe(server))
    path.write_text(path.read_text().replace("{i}+{i}=", "{i}-{i}="))
    with pytest.raises(
        UserError, match=r"replay: dataset row \d+ is not the prompt that it was in "
    ):
        main(replaying(parse_args(words), run))


def no_prompts(prompts, history, count, rng):
    return prompts[: count - 1]


def strangers(prompts, history, count, rng):
    return [replace(prompt) for prompt in prompts[:count]]


def bad_order(prompts, history, count, rng):
    raise KeyError("gold")


@pytest.mark.parametrize(
    ("order_fn", "reason"),
    [
        ("no_prompts", "order_fn must return 6 of the prompts that it gets: it returned 5, 0 of them others"),
        ("strangers", "order_fn must return 6 .*: it returned 6, 6 of them others"),
        ("bad_order", r"order_fn raised KeyError: 'gold' \(test_hooks_of_runs.py:\d+\)"),
    ],
)  # fmt: skip
def test_an_order_that_is_none(models, recipe, order_fn, reason):
    """It is told before the model is loaded."""
    with fake_server(models["untied"], answer_in(0.0)) as server:
        config = parse_args([recipe(server), "--order_fn", f"test_hooks_of_runs.{order_fn}"])
        with pytest.raises(UserError, match=reason):
            main(config)


def test_figures_of_each_data_set(models, recipe, tmp_path):
    """Against the completions of the log; rows are numbered through both sets."""
    even = [{"prompt": f"{i}+{i}="} for i in range(0, 40, 2)]
    odd = [{"prompt": f"{i}+{i}="} for i in range(1, 21, 2)]
    with fake_server(models["untied"], answer_in(0.0)) as server:
        config = parse_args([recipe(server)])
        sets: Any = {"even": partial(list, even), "odd": partial(list, odd)}
        main(replace(config, dataset_id=sets))
    samples = read(tmp_path, "completions")
    for row in read(tmp_path, "metrics"):
        total = 0
        for name, rows in (("even", range(20)), ("odd", range(20, 30))):
            of_set = [s for s in samples if s["step"] == row["step"] and s["set"] == name]
            assert {s["row"] for s in of_set} <= set(rows)
            if of_set:
                mean = sum(s["reward"] for s in of_set) / len(of_set)
                assert row[f"sets/{name}/reward"] == pytest.approx(mean)
                lengths = sum(len(s["tokens"]) for s in of_set) / len(of_set)
                assert row[f"sets/{name}/mean_length"] == pytest.approx(lengths)
                total += row[f"sets/{name}/groups"]
        assert total == config.batch_size


def twice(*arguments):
    loss, sums = grpo_loss(*arguments)
    return 2 * loss, sums


def test_two_losses_on_identical_data(models, recipe, tmp_path, capsys):
    """The same loss doubled; and REINFORCE, which on-policy has the gradient of the clipped loss."""
    with fake_server(models["untied"], answer_in(0.0)) as server:
        path = Path(recipe(server))
        main(parse_args([str(path), *SAVE]))
    other = tmp_path / f"other_{tmp_path.name}.py"
    for loss, ratio in ((twice, 2), (reinforce, 1)):
        sys.modules.pop(other.stem, None)
        change = f"from {loss.__module__} import {loss.__name__}\nconfig = replace(config, loss_fn={loss.__name__})\n"
        other.write_text(f"{path.read_text()}from dataclasses import replace\n{change}")
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        capsys.readouterr()
        losses.main([str(tmp_path / "run"), str(path), str(other)])
        lines = re.findall(r"step (\d) · norms (\S+) (\S+) · cosine (\S+)", capsys.readouterr().out)
        assert [line[0] for line in lines] == ["1", "2", "3"]
        norms = [row["grad_norm"] for row in read(tmp_path, "metrics")]
        for (_, one, two, cosine), norm in zip(lines, norms, strict=True):
            assert float(one) == pytest.approx(norm, rel=1e-3)  # four digits are printed
            assert float(two) == pytest.approx(ratio * norm, rel=1e-3)
            assert float(cosine) == pytest.approx(1, abs=1e-4)
    path.write_text(path.read_text().replace("{i}+{i}=", "{i}-{i}="))
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    sys.modules.pop(path.stem, None)
    with pytest.raises(SystemExit, match=r"replay: dataset row \d+ is not the prompt that it was"):
        losses.main([str(tmp_path / "run"), str(path), str(path), "--old_logprobs", "sampler"])
