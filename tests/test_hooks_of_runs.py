"""What a run lets a researcher hook in, against fake servers: info, evaluations, proofs of syncs, teachers, replays."""

import itertools
import json
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import helpers
import losses
import pytest
import torch
from helpers import change, flags, make_model, make_tokenizer, read, request_times, server
from test_loss import make_config
from test_prefix_models import plain_rows
from test_resume import assert_identical, weights
from transformers import AutoModelForCausalLM

from config import UserError, parse_args
from prefix_attention import attach, pack
from recipes.replay import file_of, replaying
from recipes.teacher import ReferenceServer, Teacher
from rollouts.group import Completion, Group, Prompt
from rollouts.processor import load_processor
from rollouts.proofs import prove
from rollouts.rollouts import Rollouts
from rollouts.scoring import Scorer
from server.messages import About
from train import grpo_loss, main
from training.model import build_policy, build_reference, token_logprobs
from vllm_client import ServerError, State

SAVE = ("--parts", "recipes.replay.save")


@pytest.fixture
def fake(stand_in):
    return stand_in(0.0)


# -- What an environment knows ----------------------------------------------------------------------------------------


def with_info(server, prompt, sampling):
    """Each completion is worth its number; the last one does not know. In odd rows the first has won."""
    completions = server.generate(prompt.token_ids, sampling)
    for number, completion in enumerate(completions[:-1]):
        completion.info = {"score": number + prompt.index, "note": {"turns": [number]}}
    if prompt.index % 2:
        completions[0].info["won"] = True
    return completions


def times_won(rewards, groups):
    """Reads the `info` of rollouts, which no trial before the run could have."""
    assert all("won" in group.completions[0].info for group in groups if group.prompt.index % 2)
    return rewards - rewards.mean()


def test_an_environment_hands_back_its_own_reward(fake, recipe, tmp_path):
    """A function of the run gets None where no completion of a group has its column."""

    def what_it_scored(completions, score, **_):
        return score

    def has_won(completions, won, worth=1.0, **_):
        return [worth * bool(value) for value in won]

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
    refused = pytest.raises(UserError, match="rollout_fn on dataset row 3: info has the column a")
    with closing(Scorer(make_tokenizer(), make_config())) as scorer, refused:
        scorer.score(group)


# -- Evaluation -------------------------------------------------------------------------------------------------------


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


def test_held_out_sets_and_their_completions(fake, stand_in, recipe, tmp_path):
    """Sampled by settings of their own; no reference is asked for them."""
    temperatures = []
    sample = fake.sample

    def noted(request):
        temperatures.append(request.sampling_params["temperature"])
        return sample(request)

    fake.sample = noted
    teacher = stand_in()
    path = Path(recipe(fake))
    path.write_text(path.read_text() + SETS)
    main(replace(parse_args([str(path), "--max_steps", "2"]), parts=[Teacher(teacher.url)]))
    held_out, metrics = read(tmp_path, "held_out"), read(tmp_path, "metrics")
    assert temperatures.count(0.7) == 3 * 8  # of each step's prompts
    assert len(request_times(teacher)) == 2 * 6 * 4  # of what trained
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row, (name, size) in itertools.product(metrics, {"short/": 3, "long/": 5, "": 8}.items()):
        of_prompt: dict[str, list[float]] = {}
        for sample in held_out:
            if sample["step"] == row["step"] and f"{sample['set']}/".startswith(name):
                of_prompt.setdefault(sample["prompt"], []).append(sample["reward"])
                assert sample["reward"] == float(len(sample["completion"]) > 3)
        assert [len(rewards) for rewards in of_prompt.values()] == [4] * size
        share = fmean(map(fmean, of_prompt.values()))
        assert row[f"eval/{name}reward"] == row[f"eval/{name}accuracy"] == pytest.approx(share)
        assert row[f"eval/{name}pass@4"] == pytest.approx(fmean(map(max, of_prompt.values())))
        assert f"eval/{name}rewards/is_long" in row
    assert "advantage" not in held_out[0]


def test_a_held_out_set_is_named_in_what_is_wrong_with_it(models, fake, capsys, device):
    """A missing file, before any server is asked; and prompts without room."""
    long = [{"prompt": "1+1="}, {"prompt": "1" * 120}]
    sets: Any = {"easy": lambda: long[:1], "hard": lambda: long}
    fields: dict[str, Any] = {
        "model_id": models["untied"], "dataset_id": lambda: long, "reward_funcs": [lambda **_: []],
        "max_completion_len": 20, "num_epochs": 2.0,
    }  # fmt: skip
    for found, name in (("x.jsonl", ""), (sets | {"aime": "x.jsonl"}, " aime")):
        message = rf"^eval_dataset_id{name}: dataset x\.jsonl: FileNotFoundError"
        with pytest.raises(UserError, match=message):
            Rollouts(make_config(eval_dataset_id=found, **fields), device)
    capsys.readouterr()
    config = make_config(eval_dataset_id=sets, vllm_urls=[fake.url], **fields)
    Rollouts(config, device).close()
    told = "left out 1 of 2 prompts, .* over 108 tokens, as row 1 of (.*): raise"
    assert re.findall(told, capsys.readouterr().out) == ["dataset_id", "eval_dataset_id hard"]


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
    stand_in, train_on, tmp_path, capsys, monkeypatch
):
    """One norm that is one update behind differs by three orders more than what both sides agree to."""
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    monkeypatch.setattr("rollouts.servers.PROBE_S", 0.05)
    fake, other = stand_in(0.05), stand_in(0.05)
    # It is back within the run, which waits for its sixth update.
    is_back = lambda: "5" not in other.versions or len(request_times(fake, "/update")) > 5
    other.fault = lambda path: path == "/sample" and helpers.wait_until(is_back)
    dropping(fake, "model.norm.weight", lambda sync: sync == 5)
    train_on(fake, other, max_steps=8, max_logprob_mismatch=1e-3)
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
    fake, train_on, tmp_path, capsys, monkeypatch, old
):
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    fields = {"num_iterations": 3, "num_minibatches": 2, "learning_rate": 2e-2}
    train_on(fake, old_logprobs=old, max_logprob_mismatch=1e-3, **fields)
    assert "is left out" not in capsys.readouterr().out
    metrics = read(tmp_path, "metrics")
    assert max(row["sampling/current_logp_difference"] for row in metrics) < 1e-4
    assert all(row["sampling/current_share"] == 1 for row in metrics)


BENT = {"sampling_params": '{"top_p": 1.0}'}  # no tokens can tell: their log-probs are others


def test_a_busy_server_is_no_lost_one(fake, train_on, capsys, monkeypatch):
    """It answers no probe in time after the first one: that is no proof, and no reason to leave it out."""
    monkeypatch.setattr("rollouts.rollouts.PROBE_STEPS", 1)
    asked = itertools.count()

    def answer(_, number):
        if next(asked) < 2:
            return [5 + number], 0.0
        monkeypatch.setattr("rollouts.proofs.CONTROL_TIMEOUT_S", 1.5)
        return [5 + number], 2.2

    fake.answer = answer
    train_on(fake, **BENT)
    assert "is left out" not in capsys.readouterr().out


def test_the_run_ends_where_the_only_server_goes_on_to_drop(fake, train_on, monkeypatch):
    monkeypatch.setattr("training.metrics.MIN_COMPARED", 8)
    monkeypatch.setattr("rollouts.servers.PROBE_S", 0.2)
    dropping(fake, "model.layers.1.mlp.down_proj.weight", lambda sync: sync > 1)
    with pytest.raises(ServerError, match="no rollout server is left: .* nats a token"):
        # Longer than it is left alone before it is asked again.
        train_on(fake, max_steps=8, max_logprob_mismatch=1e-3, server_timeout=8)


def test_all_servers_are_probed_every_few_versions(fake, train_on, capsys, monkeypatch):
    monkeypatch.setattr("rollouts.rollouts.PROBE_STEPS", 3)
    dropping(fake, "model.norm.weight", lambda sync: sync == 4)
    train_on(fake, max_steps=5, max_logprob_mismatch=1e-3, **BENT)
    told = f"{fake.url} is left out for now: its log-probs differ"
    assert capsys.readouterr().out.count(told) == 1


def test_a_server_that_was_lost_in_its_proof_is_not_admitted(monkeypatch, device):
    """It is back meanwhile, without the weights of version 4; the policy is nowhere."""
    one: Any = SimpleNamespace(url="http://a", state=State.SERVING, version=4)
    one.generate = lambda *_, **__: [Completion([5], [-1.0], "stop", 4)]

    def no_difference(*_):
        one.state, one.version = State.WAITING, -1
        return torch.tensor([-1.0])

    monkeypatch.setattr("rollouts.proofs.token_logprobs", no_difference)
    rollouts = SimpleNamespace(
        policy=SimpleNamespace(eval=lambda: None, modules=list), version=4, config=make_config(),
        pool=SimpleNamespace(admit=pytest.fail, lose=pytest.fail), device=device,
        probe_prompt=Prompt(0, [5], "", {}),
    )  # fmt: skip
    prove(rollouts, [one])


# -- A teacher --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"use_peft": True}], ids=str)
def test_a_teacher_is_another_model_of_the_same_vocabulary(models, tmp_path, fields, device):
    """Its log-probs against its own plain forward, where the policy has an adapter, too."""
    teacher = make_model(tmp_path / "teacher", layers=3)
    groups = [([5, 6, 7], [[8, 9], [10, 11, 12]])]
    (row,) = pack(groups)
    common: Any = {"model_id": models["tied"], "reference_id": teacher, "beta": 0.1}
    config = make_config(**common, temperature=0.7, **fields)
    policy = attach(build_policy(config, device))
    got = build_reference(policy, config, device)(row, {})
    plain = AutoModelForCausalLM.from_pretrained(teacher)
    torch.testing.assert_close(got, plain_rows(plain, groups, 0.7), rtol=0, atol=1e-5)
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
def test_a_reference_server_is_the_reference(models, tmp_path, device):
    """A real one at another temperature than 1, against the reference within the trainer; it keeps its temperature."""
    first, second = (Completion([n, 10], [-1.0] * 2, "stop", 0) for n in (9, 11))
    group = Group(Prompt(0, [5, 6, 7, 8], "", {}))
    group.set_rollouts([first, [second, replace(second, prompt_ids=[5, 6, 9])]])
    config = make_config(model_id=models["tied"], beta=0.1, temperature=0.7)
    (row,) = pack([group.sequences])
    wanted = build_reference(attach(build_policy(config, device)), config, device)(row, {})
    with server(models["tied"], tmp_path / "log") as started:
        reference = ReferenceServer(started.wait(), temperature=0.7, timeout_s=60.0)
        for _ in range(2):  # a trainer that goes on tells it again
            reference.connect()
            got = reference.logprobs(group)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        message = "it is the reference of a run at temperature 0.7: start another one"
        with pytest.raises(ServerError, match=message):
            ReferenceServer(started.url, temperature=1.0, timeout_s=60.0).connect()


def test_a_server_that_a_trainer_has_sent_weights_is_no_reference(fake):
    """Its log-probs would be those of another policy, and nobody would notice."""
    group = Group(Prompt(0, [5, 6], "", {}), [Completion([7, 8], [-1.0] * 2, "stop", 0)])
    reference = ReferenceServer(fake.url, temperature=1.0, timeout_s=60.0)
    reference.connect()
    assert len(reference.logprobs(group)) == 2
    fake.version = "3"
    with pytest.raises(ServerError, match="has the weights of a trainer"):
        reference.logprobs(group)


def test_reference_servers_train_as_the_reference_does(fake, stand_in, recipe, tmp_path, capsys):
    """One of two dies on the way: the other one goes on for it; its weights are never touched."""
    options = flags(beta=0.3, temperature=0.7, off_policy_correction="none")
    main(parse_args([recipe(fake), *options]))
    by_reference = weights(tmp_path / "run", 3)
    asked = itertools.count()

    def ill(path):
        if (path == "/health" and next(asked) > 3) or (path == "/sample" and next(asked) > 9):
            raise RuntimeError("ill")

    one, two = stand_in(fault=ill), stand_in()
    main(replace(parse_args([recipe(fake), *options]), parts=[Teacher(one.url, two.url)]))
    for reference in (one, two):
        assert request_times(reference)
        assert not request_times(reference, "/update")
    assert f"{one.url} is left out" in capsys.readouterr().out
    # Log-probs in packed rows and in plain ones, three updates on.
    found = weights(tmp_path / "run", 3)
    torch.testing.assert_close(found, by_reference, rtol=1e-3, atol=1e-5)


def by_teacher(rewards, groups):
    """Rewards, times the sum of a group's log-probs under the teacher."""
    sums = torch.stack([group.ref_logprobs.sum() for group in groups])
    return rewards * sums[:, None]


def test_another_model_teaches_by_advantages(stand_in, recipe, tmp_path, monkeypatch):
    """Its servers are those that a file names, which changes on the way."""
    monkeypatch.setattr("rollouts.servers.PROBE_S", 0.05)
    one, two, names = stand_in(), stand_in(), tmp_path / "names.txt"
    names.write_text(one.url)
    parts: Any = [Teacher(f"@{names}", model_id=one.model_id)]
    is_there = lambda: not request_times(one) or len(request_times(two, "/connect")) > 1
    sampler = stand_in(0.3, fault=lambda path: path == "/sample" and helpers.wait_until(is_there))
    config = parse_args([recipe(sampler), *flags(max_steps=4)])
    one.fault = lambda path: path == "/sample" and names.write_text(two.url)
    main(replace(config, parts=parts, advantage_fn="test_hooks_of_runs.by_teacher"))
    assert request_times(two)


def test_what_a_reference_server_cannot_do(fake, recipe, vlm):
    config = parse_args([recipe(fake)])
    parts: Any = [Teacher(fake.url)]
    with pytest.raises(UserError, match="Teacher has no effect without beta or a loss_fn"):
        main(replace(config, parts=parts))
    fake.about = lambda: About([vlm], 128, "float32", 0, False)
    with pytest.raises(UserError, match="Teacher: with images the trainer needs its own ref"):
        main(replace(config, parts=parts, beta=0.1, model_id=vlm))
    with pytest.raises(UserError, match="the reference is a part, or reference_id, or"):
        replace(config, parts=parts, beta=0.1, reference_id="other")


def test_a_part_without_servers(recipe):
    """It gives the groups itself; a group that asks for a server ends the run."""
    with pytest.raises(ServerError, match="vllm_urls names no server, and a group asks for one"):
        main(replace(parse_args([recipe()]), parts=[lambda run: None]))
    with pytest.raises(UserError, match=r"parts takes functions f\(run\), or objects as Teacher"):
        make_config(parts=[Teacher], beta=0.1)
    with pytest.raises(UserError, match="Teacher needs the address of a server"):
        Teacher()


# -- Replay -----------------------------------------------------------------------------------------------------------


MINI_BATCHES = "--num_iterations 2 --num_minibatches 2 --beta 0.1"
CUT = "--mask_truncated_completions true --max_completion_len 6 --scale_rewards batch"
SAME = ("loss", "reward", "grad_norm", "entropy", "num_tokens", "staleness/mean")


@pytest.mark.parametrize("options", [MINI_BATCHES, CUT])  # at staleness 1: test_segments.py
def test_a_replay_ends_with_the_same_bits(stand_in, recipe, tmp_path, options):
    """Without a server, and with rewards that raise: nothing is sampled or scored again."""
    fake = stand_in(0.03)
    main(parse_args([recipe(fake), *SAVE, *options.split()]))
    path = Path(recipe(fake))  # without the module of the run before
    change(path, "return [sum(ids)", "return 1 / 0, [sum(ids)")
    run, again = tmp_path / "run", tmp_path / "again" / "run"
    main(replaying(parse_args([str(path), *flags(output_dir=again), *options.split()]), run))
    assert_identical(weights(run, 3), weights(again, 3))
    found = []
    for folder in (tmp_path, tmp_path / "again"):
        metrics = [[row[name] for name in SAME] for row in read(folder, "metrics")]
        samples = read(folder, "completions")
        assert len({row["group"] for row in samples}) == 18
        for row in samples:
            del row["group"]  # a replay's are numbered in the order in which they trained
        found.append((metrics, sorted(samples, key=repr)))
    assert found[0] == found[1]


def test_a_replay_trains_what_was_trained(stand_in, recipe, tmp_path):
    """Whatever its own rules would drop, wait for or evaluate; only the weights of the rewards are its own."""
    words = [recipe(stand_in(0.03)), "--reward_funcs", "some_rewards.always_one"]
    main(parse_args([*words, *SAVE, "--max_staleness", "1"]))
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1="}\n')
    own = {"reward_weights": 2, "drop_zero_advantage": True, "max_staleness": 2}
    own |= {"output_dir": tmp_path / "again" / "run"}
    own |= {"eval_dataset_id": tmp_path / "held_out.jsonl"}
    main(replaying(parse_args([*words, *flags(**own)]), tmp_path / "run"))
    before, after = read(tmp_path, "metrics"), read(tmp_path / "again", "metrics")
    assert [(row["step"], row["reward"]) for row in after] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert [row["staleness/mean"] for row in after] == [row["staleness/mean"] for row in before]
    assert not [name for row in after for name in row if name.startswith("eval/")]


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
    main(parse_args([path, *flags(output_dir=without, max_steps=1)]))

    def refused(message, folder=run, parts=(), **fields):
        config = parse_args([path, *flags(**{"output_dir": tmp_path / "again"} | fields)])
        with pytest.raises(UserError, match=message):
            main(replaying(replace(config, parts=[*parts]), folder))

    refused("replay: set another output_dir than the folder", output_dir=run)
    refused("without has a run without --parts recipes.replay.save", without)
    refused("nowhere has no run with --parts recipes.replay.save", tmp_path / "nowhere")
    refused("replay asks no server: leave the Teacher out", parts=[Teacher("http://x")], beta=1)
    refused("replay: that run had batch_size=6: set it", batch_size=3)
    refused("replay: that run had temperature=1.0: set it", temperature=0.5)
    other = "recipes.majority.majority_vote"
    refused(r"replay: that run had reward_funcs=\['mean_id'\]: set it", reward_funcs=other)
    file_of(run, 1).rename(file_of(run, 2))
    refused("run has no rollouts of step 1")
    file_of(run, 2).rename(file_of(run, 1))
    path = recipe(fake)
    change(path, "{i}+{i}=", "{i}-{i}=")
    refused(r"replay: dataset row \d+ is not the prompt that it was in ")


def twice(*arguments):
    loss, sums = grpo_loss(*arguments)
    return 2 * loss, sums


LOSSES = [("test_hooks_of_runs.twice", 2), ("recipes.own_loss.reinforce", 1)]


@pytest.mark.parametrize(("loss", "ratio"), LOSSES)
def test_two_losses_on_identical_data(fake, recipe, tmp_path, capsys, loss, ratio):
    """The same loss doubled; and REINFORCE, which on-policy has the gradient of the clipped loss."""
    path = recipe(fake)
    main(parse_args([path, *SAVE]))
    other = shutil.copy(path, tmp_path / f"other_{tmp_path.name}.py")
    change(other, "max_steps=3", f"max_steps=3, loss_fn={loss!r}")
    capsys.readouterr()
    losses.main([str(tmp_path / "run"), path, str(other)])
    lines = re.findall(r"step (\d) · norms (\S+) (\S+) · cosine (\S+)", capsys.readouterr().out)
    norms = [row["grad_norm"] for row in read(tmp_path, "metrics")]
    # Four digits are printed.
    found, expected = [[*map(float, line)] for line in lines], []
    for step, norm in enumerate(norms, 1):
        expected.append(pytest.approx([step, norm, ratio * norm, 1], rel=1e-3))
    assert found == expected
    path = recipe(fake)
    change(path, "{i}+{i}=", "{i}-{i}=")
    with pytest.raises(SystemExit, match=r"replay: dataset row \d+ is not the prompt that it was"):
        losses.main([str(tmp_path / "run"), path, path, "--old_logprobs", "sampler"])
