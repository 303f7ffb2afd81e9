"""What a run lets a researcher hook in, against fake servers: info, evaluations, proofs of syncs, teachers, replays."""

import itertools
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import losses
import pytest
import torch
from fake_server import fake_server
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

from config import UserError, parse_args
from prefix_attention import attach, pack
from recipes.own_loss import reinforce
from recipes.replay import file_of, replaying
from recipes.teacher import ReferenceServer, Teacher
from rollouts.evaluation import held_out_metrics
from rollouts.group import Completion, Group, Prompt
from rollouts.processor import load_processor
from rollouts.proofs import prove
from rollouts.rollouts import Rollouts
from rollouts.scoring import Scorer
from server.messages import About
from train import grpo_loss, main
from training.model import build_policy, build_reference, token_logprobs
from utils import process_group
from vllm_client import ServerError, State

SAVE = ("--parts", "recipes.replay.save")
WITH_TEACHER = """
from dataclasses import replace
from recipes.teacher import Teacher
config = replace(config, parts=[Teacher({urls})])
"""


@pytest.fixture
def fake(models):
    """A fake server that answers at once."""
    with fake_server(models["untied"], answer_in(0.0)) as server:
        yield server


def extended(path, text):
    """The recipe at a path, with more at its end."""
    with open(path, "a") as file:
        file.write(text)
    return path


def weights(folder, step=3):
    return load_file(folder / f"checkpoint-{step}" / "model.safetensors")


def assert_identical(one, two):
    assert one.keys() == two.keys()
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name


# -- What an environment knows ----------------------------------------------------------------------------------------


def with_info(server, prompt, sampling):
    """Each completion is worth its number; the last one does not know. In odd rows the first has won."""
    completions = server.generate(prompt.token_ids, sampling)
    for number, completion in enumerate(completions[:-1]):
        completion.info = {"score": number + prompt.index, "note": {"turns": [number]}}
    if prompt.index % 2:
        completions[0].info["won"] = True
    return completions


def what_it_scored(completions, score, **_):
    return score


def has_won(completions, won, worth=1.0, **_):
    return [worth * bool(value) for value in won]


def times_won(rewards, groups):
    """Reads the `info` of rollouts, which no trial before the run could have."""
    assert all("won" in group.completions[0].info for group in groups if group.prompt.index % 2)
    return rewards - rewards.mean()


def test_an_environment_hands_back_its_own_reward(fake, recipe, tmp_path):
    """A function of the run gets None where no completion of a group has its column."""
    own: Any = {"rollout_fn": with_info, "advantage_fn": times_won}
    own["reward_funcs"] = [what_it_scored, has_won]
    main(replace(parse_args([recipe(fake), "--max_steps", "2"]), **own))
    samples = read(tmp_path, "completions")
    for group in (samples[start : start + 4] for start in range(0, len(samples), 4)):
        row = group[0]["row"]
        scores = [sample["rewards"]["what_it_scored"] for sample in group]
        assert scores == [row, row + 1, row + 2, None]
        assert [sample["rewards"]["has_won"] for sample in group] == [row % 2, 0, 0, 0]
        assert group[1]["info"] == {"score": 1 + row, "note": {"turns": [1]}}
        assert group[3]["info"] == {}


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
    nan = math.nan
    rewards = [[1.0, 0.0, 0.0, 2.0], [0.0] * 4, [1.0] * 4, [0.5, 0.0, nan, 1.0], [nan] * 4]
    groups = []
    for row in rewards:
        columns = {"reward": row, "rewards": table([reward] for reward in row)}
        groups.append(Group(Prompt(0, [5], "", {}), **columns))
    named = {"eval_dataset_id": "d", "accuracy_func": "exists"}
    config = make_config(eval_generations=4, eval_temperature=1.0, **named)
    values = held_out_metrics(groups, config)
    valid = [[reward for reward in row if not math.isnan(reward)] for row in rewards]
    for k in (2, 4):
        shares = []
        for row in valid:
            is_right = [max(subset) >= 1 for subset in itertools.combinations(row, k)]
            shares += [sum(is_right) / len(is_right)] if is_right else []
        assert values[f"pass@{k}"] == pytest.approx(sum(shares) / len(shares))
    assert "pass@1" not in values
    everything = list(itertools.chain(*valid))
    assert values["accuracy"] == sum(reward >= 1 for reward in everything) / len(everything)
    assert values["reward"] == pytest.approx(sum(everything) / len(everything))
    assert not any(name.startswith("pass") for name in held_out_metrics(groups, make_config()))


SETS = """
from dataclasses import replace
def short(): return rows()[:3]
def long(): return rows()[3:8]
def is_long(completion_ids, **_): return [float(len(ids) > 3) for ids in completion_ids]
config = replace(
    config, eval_dataset_id={"short": short, "long": long}, eval_generations=4, eval_temperature=0.7,
    reward_funcs=[is_long], eval_steps=1, beta=0.1,
)
"""


def test_held_out_sets_and_their_completions(models, fake, recipe, tmp_path):
    """Sampled by settings of their own; no reference is asked for them."""
    temperatures = []
    sample = fake.sample

    def noted(request):
        temperatures.append(request.sampling_params["temperature"])
        return sample(request)

    fake.sample = noted
    with fake_server(models["untied"], answer_in(0.0)) as teacher:
        path = extended(recipe(fake), SETS + WITH_TEACHER.format(urls=repr(teacher.url)))
        main(parse_args([path, "--max_steps", "2"]))
    held_out, metrics = read(tmp_path, "held_out"), read(tmp_path, "metrics")
    assert temperatures.count(0.7) == 3 * 8  # of each step's prompts
    assert [path for path, _ in teacher.log].count("/sample") == 2 * 6 * 4  # of what trained
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics:
        of_step = [sample for sample in held_out if sample["step"] == row["step"]]
        sets = {name: [s for s in of_step if s["set"] == name] for name in ("short", "long")}
        assert [len(samples) for samples in sets.values()] == [4 * 3, 4 * 5]
        for name, samples in (("", of_step), ("short/", sets["short"]), ("long/", sets["long"])):
            of_prompt: dict[str, list[bool]] = {sample["prompt"]: [] for sample in samples}
            for sample in samples:
                is_long = len(sample["completion"]) > 3
                of_prompt[sample["prompt"]].append(is_long)
                assert sample["reward"] == float(is_long)
            share = sum(map(sum, of_prompt.values())) / len(samples)
            assert row[f"eval/{name}reward"] == row[f"eval/{name}accuracy"] == pytest.approx(share)
            solved = sum(map(any, of_prompt.values())) / len(of_prompt)
            assert row[f"eval/{name}pass@4"] == pytest.approx(solved)
            assert f"eval/{name}rewards/is_long" in row
    assert "advantage" not in held_out[0]


def test_a_held_out_set_is_named_in_what_is_wrong_with_it(models, fake, capsys):
    """A missing file, before any server is asked; and prompts without room."""
    long = [{"prompt": "1+1="}, {"prompt": "1" * 120}]
    sets: Any = {"easy": lambda: long[:1], "hard": lambda: long}
    words = {"dataset_id": lambda: long, "max_completion_len": 20, "num_epochs": 2.0}
    of_one = make_config(
        model_id=models["untied"],
        eval_dataset_id="nowhere.jsonl",
        reward_funcs=[lambda **_: []],
        **words,
    )
    of_two = replace(of_one, eval_dataset_id=sets | {"aime": "nowhere.jsonl"})
    with process_group(60) as device:
        for config, name in ((of_one, "eval_dataset_id"), (of_two, "eval_dataset_id aime")):
            message = rf"^{name}: dataset nowhere\.jsonl: FileNotFoundError"
            with pytest.raises(UserError, match=message):
                Rollouts(config, device)
        capsys.readouterr()
        Rollouts(replace(of_one, eval_dataset_id=sets, vllm_urls=[fake.url]), device).close()
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    cure = (
        "raise max_tokens_per_gpu, or the servers' --max-model-len, or lower max_completion_len=20"
    )
    expected = "left out 1 of 2 prompts, empty or over 108 tokens, as row 1 of {}: {}".format
    assert lines == [expected("dataset_id", cure), expected("eval_dataset_id hard", cure)]


# -- Every sync is proved ---------------------------------------------------------------------------------------------


def dropping(server, name, is_dropped):
    """At syncs whose number says so the server leaves a tensor as it was, without a word."""
    update, seen = server.update, itertools.count(1)

    def most(request):
        weight = server.model.get_parameter(name).data
        before = weight.clone()
        answer = update(request)
        if request.meeting and is_dropped(next(seen)):
            weight.copy_(before)
            server.versions[server.version] = server._weights()
        return answer

    server.update = most


def test_a_server_that_drops_a_tensor_is_left_out_and_heals(
    models, fake, recipe, tmp_path, capsys, monkeypatch
):
    """One norm that is one update behind differs by three orders more than what both sides agree to."""
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    monkeypatch.setattr("rollouts.servers.PROBE_S", 0.05)  # it is back within the run
    with fake_server(models["untied"], answer_in(0.05)) as other:
        dropping(fake, "model.norm.weight", lambda sync: sync == 5)
        fake.answer = other.answer
        options = ["--max_steps", "8", "--max_logprob_mismatch", "1e-3"]
        main(parse_args([recipe(fake, other), *options]))
    out = capsys.readouterr().out
    message = "is left out for now: its log-probs differ from the trainer's by .* nats"
    assert re.search(f"{fake.url} {message}", out)
    assert f"{fake.url} is back" in out
    assert f"{other.url} is left out" not in out
    metrics = read(tmp_path, "metrics")
    assert [row["step"] for row in metrics] == list(range(1, 9))
    gaps = [row["sampling/current_logp_difference"] for row in metrics]
    assert gaps[4] > 5e-4  # in the mean over both
    assert max(gaps[:4] + gaps[5:]) < 1e-4
    assert all(row["sampling/current_share"] == 1 for row in metrics)
    assert all(row["sampling/stale_logp_difference"] is None for row in metrics)


@pytest.mark.parametrize("old", ["trainer", "sampler"])
def test_what_updates_of_the_batch_change_accuses_no_server(
    fake, recipe, tmp_path, capsys, monkeypatch, old
):
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    options = ["--num_iterations", "3", "--num_minibatches", "2", "--learning_rate", "2e-2"]
    options += ["--old_logprobs", old, "--max_logprob_mismatch", "1e-3"]
    main(parse_args([recipe(fake), *options]))
    assert "is left out" not in capsys.readouterr().out
    metrics = read(tmp_path, "metrics")
    assert max(row["sampling/current_logp_difference"] for row in metrics) < 1e-4
    assert all(row["sampling/current_share"] == 1 for row in metrics)


def test_a_busy_server_is_no_lost_one(fake, recipe, capsys, monkeypatch):
    """It answers no probe in time after the first one: that is no proof, and no reason to leave it out."""
    monkeypatch.setattr("rollouts.proofs.CONTROL_TIMEOUT_S", 1.0)
    monkeypatch.setattr("rollouts.rollouts.PROBE_STEPS", 1)
    asked = itertools.count()
    fake.answer = lambda ids, number: (said(ids, number), 2.0 if next(asked) > 1 else 0.0)
    main(parse_args([recipe(fake), "--sampling_params", '{"top_p": 1.0}', "--max_steps", "3"]))
    assert "is left out" not in capsys.readouterr().out


def test_the_run_ends_where_the_only_server_goes_on_to_drop(fake, recipe, monkeypatch):
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    monkeypatch.setattr("rollouts.servers.PROBE_S", 0.2)
    dropping(fake, "model.layers.1.mlp.down_proj.weight", lambda sync: sync > 1)
    options = ["--max_steps", "8", "--max_logprob_mismatch", "1e-3", "--server_timeout", "3"]
    with pytest.raises(ServerError, match="no rollout server is left: .* nats a token"):
        main(parse_args([recipe(fake), *options]))


def test_all_servers_are_probed_every_few_versions(fake, recipe, capsys, monkeypatch):
    """So also where no tokens can tell, as those of a bent distribution, whose log-probs are others."""
    monkeypatch.setattr("rollouts.rollouts.PROBE_STEPS", 3)
    dropping(fake, "model.norm.weight", lambda sync: sync == 4)
    options = ["--sampling_params", '{"top_p": 1.0}', "--max_logprob_mismatch", "1e-3"]
    main(parse_args([recipe(fake), *options, "--max_steps", "5"]))
    out = capsys.readouterr().out
    assert out.count(f"{fake.url} is left out for now: its log-probs differ") == 1


class StandIn(SimpleNamespace):
    """A server for sets and keys, as the real ones are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


PROOFS = {  # state before, version of the answer, lost and back meanwhile: what is said of the server
    (State.WAITING, 4, False): ["admitted"],
    (State.SERVING, 4, True): [],  # it has zeroed weights
    (State.SERVING, 3, False): ["answers with other weights than it was sent"],
}


@pytest.mark.parametrize("case", PROOFS, ids=str)
def test_proofs_of_one_server(case, monkeypatch):
    """Of version 4, by a policy that is nowhere."""
    state, version, is_lost = case
    one: Any = StandIn(url="http://a", state=state, version=4)
    one.generate = lambda *_, **__: [Completion([5], [-1.0], "stop", version)]

    def no_difference(*_):
        if is_lost:
            one.state, one.version = State.WAITING, -1
        return torch.tensor([-1.0])

    monkeypatch.setattr("rollouts.proofs.token_logprobs", no_difference)
    said: list[str] = []
    pool: Any = SimpleNamespace(
        admit=lambda server: said.append("admitted"),
        lose=lambda server, error: said.append(str(error)),
    )
    policy: Any = SimpleNamespace(eval=lambda: None, modules=list)
    rollouts = SimpleNamespace(
        policy=policy, version=4, pool=pool, probe_prompt=Prompt(0, [5], "", {}), config=make_config(),
        device=torch.device("cpu"),
    )  # fmt: skip
    with process_group(60):
        prove(rollouts, [one])
    assert said == PROOFS[case]


# -- A teacher --------------------------------------------------------------------------------------------------------


def test_a_teacher_is_another_model_of_the_same_vocabulary(models, tmp_path):
    """Its log-probs against its own plain forward, where the policy has an adapter, too."""
    teacher = make_model(tmp_path / "teacher", layers=3)
    row = pack([([5, 6, 7], [[8, 9], [10, 11, 12]])])[0]
    for fields in ({}, {"use_peft": True}):
        common: Any = {"model_id": models["tied"], "reference_id": teacher, "beta": 0.1}
        config = make_config(**common, temperature=0.7, **fields)
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


def test_a_teacher_of_another_vocabulary_is_refused(fake, models, recipe, tmp_path):
    other = make_model(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    words = json.loads(file.read_text())
    words["model"]["vocab"]["¤"] = words["model"]["vocab"].pop("~")
    file.write_text(json.dumps(words))
    message = "reference_id=.*other: its vocabulary is not that of model_id"
    with pytest.raises(UserError, match=message):
        main(parse_args([recipe(fake), "--reference_id", other, "--beta", "0.1"]))
    Path(other, "adapter_config.json").write_text("{}")
    reference = {"model_id": models["untied"], "reference_id": other, "beta": 0.1}
    for fields, name in ((reference, "reference_id"), ({"model_id": other}, "model_id")):
        with pytest.raises(UserError, match=f"{name}=.*other has a LoRA adapter: merge it first"):
            load_processor(make_config(**fields))


@pytest.mark.server
def test_a_reference_server_is_the_reference(models, tmp_path):
    """A real one at another temperature than 1, against the reference within the trainer; it keeps its temperature."""
    prompt = [5, 6, 7, 8]
    completions = [[9, 10], [(prompt, [11, 12, 13]), ([5, 6, 9], [10])]]
    first, second = (
        Completion(ids, [-1.0] * len(ids), "stop", 0) for ids in ([9, 10], [11, 12, 13])
    )
    last = Completion([10], [-1.0], "stop", 0, prompt_ids=[5, 6, 9])
    group = Group(Prompt(0, prompt, "", {}))
    group.fill([first, [second, last]])
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
        message = "it is the reference of a run at temperature 0.7: start another one"
        with pytest.raises(ServerError, match=message):
            ReferenceServer(started.url, temperature=1.0, timeout_s=60.0).connect("trainer")


def test_a_server_that_a_trainer_has_sent_weights_is_no_reference(fake):
    """Its log-probs would be those of another policy, and nobody would notice."""
    completion = Completion([7, 8], [-1.0] * 2, "stop", 0)
    group = Group(Prompt(0, [5, 6], "", {}), [completion])
    reference = ReferenceServer(fake.url, temperature=1.0, timeout_s=60.0)
    reference.connect("trainer")
    assert len(reference.logprobs(group)) == 2
    fake.version = "3"
    with pytest.raises(ServerError, match="has the weights of a trainer"):
        reference.logprobs(group)


def test_reference_servers_train_as_the_reference_does(models, fake, recipe, tmp_path, capsys):
    """One of two dies on the way: the other one goes on for it; its weights are never touched."""
    options = ["--beta", "0.3", "--temperature", "0.7", "--off_policy_correction", "none"]
    main(parse_args([recipe(fake), *options]))
    by_reference = weights(tmp_path / "run")
    asked = itertools.count()

    def ill(path):
        if (path == "/health" and next(asked) > 3) or (path == "/sample" and next(asked) > 9):
            raise RuntimeError("ill")

    with (
        fake_server(models["untied"], answer_in(0.0), fault=ill) as one,
        fake_server(models["untied"], answer_in(0.0)) as two,
    ):
        urls = f"{one.url!r}, {two.url!r}"
        main(parse_args([extended(recipe(fake), WITH_TEACHER.format(urls=urls)), *options]))
    for reference in (one, two):
        paths = {path for path, _ in reference.log}
        assert "/update" not in paths
        assert "/sample" in paths
    assert f"{one.url} is left out" in capsys.readouterr().out
    # Log-probs in packed rows and in plain ones, three updates on.
    for name, weight in weights(tmp_path / "run").items():
        torch.testing.assert_close(weight, by_reference[name], rtol=1e-3, atol=1e-5)


def test_what_a_reference_server_cannot_do(fake, recipe, vlm):
    path = extended(recipe(fake), WITH_TEACHER.format(urls=repr(fake.url)))
    with pytest.raises(UserError, match="Teacher has no effect without beta or a loss_fn"):
        main(parse_args([path]))
    fake.about = lambda: About([vlm], 128, "float32", 0, False)
    with pytest.raises(UserError, match="Teacher: with images the trainer needs its own ref"):
        main(parse_args([path, "--beta", "0.1", "--model_id", vlm]))
    with pytest.raises(UserError, match="the reference is a part, or reference_id, or"):
        parse_args([path, "--beta", "0.1", "--reference_id", "other"])


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


# -- Replay -----------------------------------------------------------------------------------------------------------


MINI_BATCHES = "--num_iterations 2 --num_minibatches 2 --beta 0.1"
CUT = "--mask_truncated_completions true --max_completion_len 6 --scale_rewards batch"
SAME = ("loss", "reward", "grad_norm", "entropy", "num_tokens", "staleness/mean")


@pytest.mark.parametrize("options", [MINI_BATCHES, CUT])  # at staleness 1: test_segments.py
def test_a_replay_ends_with_the_same_bits(fake, recipe, tmp_path, options):
    """Without a server, and with rewards that raise: nothing is sampled or scored again."""
    fake.answer = answer_in(0.03)
    main(parse_args([recipe(fake), *SAVE, *options.split()]))
    path = Path(recipe(fake))  # without the module of the run before
    path.write_text(path.read_text().replace("return [sum(ids)", "return 1 / 0, [sum(ids)"))
    run, again = tmp_path / "run", tmp_path / "again" / "run"
    words = [str(path), "--output_dir", str(again), *options.split()]
    main(replaying(parse_args(words), run))
    assert_identical(weights(run), weights(again))
    for name in (*SAME, "completions/mean_length"):
        before, after = (read(folder.parent, "metrics") for folder in (run, again))
        assert [row[name] for row in before] == [row[name] for row in after]
    found = []
    for folder in (run, again):  # a replay's groups are numbered in the order in which they trained
        rows = read(folder.parent, "completions")
        assert len({row["group"] for row in rows}) == 18
        found.append(sorted(({**row, "group": None} for row in rows), key=repr))
    assert found[0] == found[1]


def always_one(completions, **_):
    return [1.0] * len(completions)


def test_a_replay_trains_what_was_trained(fake, recipe, tmp_path):
    """Whatever its own rules would drop, wait for or evaluate; only the weights of the rewards are its own."""
    fake.answer = answer_in(0.03)
    change = "from dataclasses import replace\nfrom test_hooks_of_runs import always_one\n"
    change += "config = replace(config, reward_funcs=[always_one])\n"
    path = extended(recipe(fake), change)
    main(parse_args([path, *SAVE, "--max_staleness", "1"]))
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1="}\n')
    words = [path, "--output_dir", str(tmp_path / "again" / "run"), "--reward_weights", "2"]
    words += ["--drop_zero_advantage", "true", "--max_staleness", "2"]
    words += ["--eval_dataset_id", str(tmp_path / "held_out.jsonl")]
    main(replaying(parse_args(words), tmp_path / "run"))
    before, after = read(tmp_path, "metrics"), read(tmp_path / "again", "metrics")
    assert [row["step"] for row in after] == [1, 2, 3]
    assert [row["reward"] for row in after] == [2.0] * 3
    assert [row["staleness/mean"] for row in after] == [row["staleness/mean"] for row in before]
    assert not [name for row in after for name in row if name.startswith("eval/")]


def test_a_replay_on_two_ranks_resumes(fake, recipe, tmp_path):
    """It stops after two steps and goes on; the run that it replays did not stop."""
    fake.answer = answer_in(0.03)
    common = [recipe(fake), "--save_steps", "1", "--collective_timeout", "60"]
    run, again = tmp_path / "run", tmp_path / "again" / "run"
    replay = [ROOT / "recipes" / "replay.py", run, *common, "--output_dir", again, "--max_steps"]
    for command in (
        [ROOT / "train.py", *common, *SAVE],
        [*replay, "2"],
        [*replay, "3", "--resume_from_checkpoint", "auto"],
    ):
        done = on_forked_ranks(2, *command)
        assert done.returncode == 0, done.stderr
    found = weights(again)
    for name, weight in weights(run).items():  # two ranks may sum in another order
        torch.testing.assert_close(weight, found[name], rtol=1e-4, atol=1e-6)


def test_a_replay_ends_with_the_last_whole_step(fake, recipe, tmp_path):
    """On the schedule of the whole run: what it trained until there is the same to the bit."""
    options = [recipe(fake), "--max_steps", "3", "--lr_scheduler", "linear"]
    main(parse_args([*options, *SAVE, "--save_steps", "1"]))
    run, again = tmp_path / "run", tmp_path / "again"
    file_of(run, 3).unlink()
    main(replaying(parse_args([*options, "--output_dir", str(again)]), run))
    assert [path.name for path in again.glob("checkpoint-*")] == ["checkpoint-2"]
    assert_identical(weights(run, 2), weights(again, 2))


def test_what_cannot_be_replayed(fake, recipe, tmp_path):
    path = recipe(fake)
    run, without = tmp_path / "run", tmp_path / "without"
    for _ in range(2):  # a start that is repeated keeps the first one's files
        main(parse_args([path, *SAVE, "--max_steps", "1"]))
        assert file_of(run, 1).exists()
    assert file_of(tmp_path / "run.1", 1).exists()
    main(parse_args([path, "--output_dir", str(without), "--max_steps", "1"]))

    def refused(message, folder=run, *more, **fields):
        config = parse_args([path, "--output_dir", str(tmp_path / "again"), *more])
        with pytest.raises(UserError, match=message):
            main(replaying(replace(config, **fields), folder))

    refused("replay: set another output_dir than the folder", output_dir=str(run))
    refused("without has a run without --parts recipes.replay.save", without)
    refused("nowhere has no run with --parts recipes.replay.save", tmp_path / "nowhere")
    refused("replay asks no server: leave the Teacher out", parts=[Teacher("http://x")], beta=1.0)
    refused("replay: that run had batch_size=6: set it", batch_size=3)
    refused("replay: that run had temperature=1.0: set it", temperature=0.5)
    refused("replay: that run had num_generations=4: set it", num_generations=3)
    other = ("--reward_funcs", "recipes.majority.majority_vote")
    refused(r"replay: that run had reward_funcs=\['mean_id'\]: set it", run, *other)
    file_of(run, 1).rename(file_of(run, 2))
    refused("run has no rollouts of step 1")
    file_of(run, 2).rename(file_of(run, 1))
    text = Path(recipe(fake)).read_text()
    Path(path).write_text(text.replace("{i}+{i}=", "{i}-{i}="))
    refused(r"replay: dataset row \d+ is not the prompt that it was in ")


def twice(*arguments):
    loss, sums = grpo_loss(*arguments)
    return 2 * loss, sums


def test_two_losses_on_identical_data(fake, recipe, tmp_path, capsys):
    """The same loss doubled; and REINFORCE, which on-policy has the gradient of the clipped loss."""
    path = Path(recipe(fake))
    main(parse_args([str(path), *SAVE]))
    other = tmp_path / f"other_{tmp_path.name}.py"
    for loss, ratio in ((twice, 2), (reinforce, 1)):
        sys.modules.pop(other.stem, None)
        change = f"from {loss.__module__} import {loss.__name__} as loss\n"
        change += "from dataclasses import replace\nconfig = replace(config, loss_fn=loss)\n"
        other.write_text(path.read_text() + change)
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
