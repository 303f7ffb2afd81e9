"""Asynchronous rollouts: the bound on staleness, every group once, updates in flight, filters; latencies are ours."""

import itertools
import math
import random
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_server import fake_server
from helpers import ROOT, answer_in, make_tokenizer, on_forked_ranks, read, said
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from config import TrainConfig, UserError, parse_args
from prefix_attention import attach, completion_logprobs, pack
from recipes.plain_loop import main as main_of_plain_loop
from rollouts import servers, stream
from rollouts.group import Completion, Group, Prompt, RolloutFailed
from rollouts.rollouts import Rollouts, Word
from rollouts.servers import ServerPool
from rollouts.stream import GroupStream
from server.messages import About
from train import compute_advantages, grpo_loss, main
from vllm_client import ServerError, ServerLost, State

BATCH, STEPS = 4, 8


def make_config(**fields):
    defaults = {
        "model_id": "m",
        "dataset_id": "d",
        "reward_funcs": ["os.path.exists"],
        "batch_size": BATCH,
    }
    return TrainConfig(**{**defaults, "num_generations": 2, **fields})


def chosen(first):
    """The groups of a batch; a batch may be chosen in parts."""
    return [Group(Prompt(number, [5], "", {}), id=number) for number in range(first, first + 3)]


class Trainer:
    """A stream whose groups take random times, and the loop that trains them: nothing but sleeps, and a record."""

    def __init__(self, seed, teaches=lambda group: True, **fields):
        self.random = random.Random(seed)
        self.config = make_config(**fields)
        self.teaches = teaches
        self.outstanding = self.most_outstanding = 0
        self.trained: list[tuple[int, Group]] = []
        self.dropped: list[tuple[int, str]] = []
        self.stream = GroupStream(chosen, self.fill, STEPS, self.config)

    def fill(self, group):
        self.sample(group)
        group.reward = [1.0, 0.0] if self.teaches(group) else [1.0, 1.0]

    def sample(self, group):
        start = group.started_version = self.stream.version
        self.most_outstanding = max(self.most_outstanding, len(self.stream._queue))
        time.sleep(self.random.choice([0, 0.001, 0.002, 0.03]))
        end = self.stream.version
        spans = [start, end]
        group.fill([Completion([5, 6], [-1.0, -1.0], "stop", spans)] * 2)

    def step(self, version):
        """Take the batch of one step; returns the ids of its groups."""
        self.stream.advance_to(version)
        taken = []
        while self.stream.missing:
            if group := self.stream.take():
                taken.append(group)
        batch = self.stream.end_batch()
        assert batch.groups == taken
        self.trained += [(version, group) for group in taken]
        self.dropped += [(group.id, group.dropped) for group in batch.dropped]
        return [group.id for group in taken]

    def run(self):
        for version in range(STEPS):
            self.step(version)
            time.sleep(self.random.choice([0, 0.004]))
        self.stream.advance_to(STEPS)
        self.stream.close()
        return self


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_the_bound_holds_and_every_group_ends_once(staleness):
    """Over random latencies; a quarter of the groups teach nothing, and others join the end for them."""
    for seed in range(6):
        done = Trainer(
            seed, lambda group: group.id % 4, drop_zero_advantage=True, max_staleness=staleness
        ).run()
        assert len(done.trained) == STEPS * BATCH
        for version, group in done.trained:
            assert 0 <= version - group.oldest_version <= staleness
        ids = [group.id for _, group in done.trained]
        assert ids == sorted(ids)  # in the order of their admission, whatever the latencies
        ended = sorted(ids + [number for number, _ in done.dropped])
        assert ended == list(range(len(ended)))
        assert {number for number, reason in done.dropped if reason == "zero_advantage"} == {
            number for number in ended if number % 4 == 0
        }
        assert all(reason == "zero_advantage" for _, reason in done.dropped)
        assert done.most_outstanding <= (staleness + 1) * BATCH


@pytest.mark.parametrize("staleness", [2, 3, 4])
def test_slow_old_groups_are_not_crowded_out(staleness):
    """All that begin under policy 0 are slow, all later ones are instant."""
    trainer = Trainer(0, max_staleness=staleness)

    def sample(group):
        version = group.started_version = trainer.stream.version
        time.sleep(0.05 if version == 0 and group.id >= BATCH else 0)
        group.fill([Completion([5], [-1.0], "stop", version)] * 2)

    trainer.stream._fill = sample
    for version, group in trainer.run().trained:
        assert version - group.oldest_version <= staleness


def test_a_dropped_group_makes_room_at_the_end():
    """The next in order moves up at once, also where the first of the queue is dropped."""
    trainer = Trainer(0, lambda group: group.id, drop_zero_advantage=True, max_staleness=0)
    goes_on = threading.Event()
    fill = trainer.stream._fill

    def filling(group):
        if group.id == BATCH:  # the successor
            goes_on.wait(20)
        fill(group)

    trainer.stream._fill = filling
    trainer.stream.advance_to(0)
    taken = []
    while trainer.stream.missing > 1:
        if group := trainer.stream.take():
            taken.append(group.id)
    assert taken == [1, 2, 3]
    goes_on.set()
    while not (last := trainer.stream.take()):
        pass
    assert last.id == BATCH
    trainer.stream.close()


def test_failures_cost_no_time():
    """At staleness 0 a batch whose first groups fail goes on as soon as the others have come."""
    trainer = Trainer(0, max_staleness=0)

    def failing(group):
        time.sleep(0.02)
        if group.id < 3:
            raise RolloutFailed("the environment is down")
        trainer.sample(group)
        group.reward = [0.0, 1.0]

    trainer.stream._fill = failing
    trainer.stream.advance_to(0)
    started_s = time.monotonic()
    taken = []
    while trainer.stream.missing:
        if group := trainer.stream.take():
            taken.append(group.id)
    assert taken == [3, 4, 5, 6]
    assert time.monotonic() - started_s < 0.9  # a look at the queue takes a second at most
    trainer.stream.close()


@pytest.mark.parametrize("is_slow", ["choose", "can_teach"])
def test_slow_functions_of_a_recipe_hold_up_nothing(is_slow, monkeypatch):
    """An `order_fn` that is asked for another group, or an `advantage_fn` whether one teaches."""
    trainer = Trainer(0, lambda group: group.id, drop_zero_advantage=True, max_staleness=0)
    goes_on, is_asked = threading.Event(), threading.Event()

    def waits():
        is_asked.set()
        assert goes_on.wait(20)

    def choose(first):
        if first >= 6 and is_slow == "choose":
            waits()
        return chosen(first)

    def can_teach(group, config):
        if group.id == BATCH - 1 and is_slow == "can_teach":
            waits()
        return group.id not in (0, 4, 5)  # so that another batch has to be chosen

    trainer.stream._choose = choose
    monkeypatch.setattr(stream, "can_teach", can_teach)
    trainer.stream.advance_to(0)
    try:
        assert is_asked.wait(20)
        started_s = time.monotonic()
        while not (group := trainer.stream.take()):
            pass
        assert group.id == 1
        assert [group.id for group in trainer.stream.end_batch().groups] == [1]
        trainer.stream.state()
        assert time.monotonic() - started_s < 5
    finally:
        goes_on.set()
        trainer.stream.close()


def test_what_a_run_that_goes_on_knows():
    """Chosen groups that no finished batch has, once each, in their order; then new ones."""
    trainer = Trainer(0, lambda group: group.id % 4, drop_zero_advantage=True)
    ended = trainer.step(0) + trainer.step(1)
    ended += [number for number, _ in trainer.dropped]
    trainer.stream.take()  # of a batch that does not end
    state = trainer.stream.state()
    trainer.stream.close()
    numbers = [number for number, _ in state["open"]]
    assert sorted(ended + numbers) == list(range(state["next"]))
    assert numbers == sorted(numbers)

    again = Trainer(1, lambda group: group.id % 4, drop_zero_advantage=True)
    waiting = [Group(Prompt(row, [5], "", {}), id=number) for number, row in state["open"]]
    again.stream = GroupStream(chosen, again.fill, STEPS, again.config, waiting, state["next"])
    taken = again.step(2) + again.step(3)
    ended += taken + [number for number, _ in again.dropped]
    again.stream.close()
    assert taken == sorted(taken)
    assert set(range(min(numbers), max(taken))) <= set(ended)
    assert len(set(ended)) == len(ended)


def test_nothing_to_learn_stops_loudly(monkeypatch):
    monkeypatch.setattr("rollouts.stream.MAX_DROPPED_BATCHES", 3)
    with pytest.raises(ValueError, match=r"nothing to learn: 12 groups of this step were dropped"):
        Trainer(0, lambda group: False, drop_zero_advantage=True).run()


def test_errors_of_sampling_and_scoring_reach_the_trainer():
    broken = Trainer(0)
    broken.teaches = lambda group: [][0]
    with pytest.raises(IndexError):
        broken.run()


def test_no_room_for_a_thread_ends_the_run(monkeypatch):
    """Else it would wait for groups that nobody samples."""
    trainer = Trainer(0, lambda group: True, max_staleness=0)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trainer.stream._threads, "submit", refuse)
    trainer.stream.advance_to(0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        trainer.stream.take()


def test_nothing_is_sampled_for_a_stream_that_is_closed():
    """Groups that are dropped after its end have no successors."""
    trainer = Trainer(0, lambda group: False, drop_zero_advantage=True, max_staleness=0)
    goes_on, begun = threading.Event(), []

    def fill(group):
        begun.append(group.id)
        goes_on.wait(20)
        trainer.fill(group)

    trainer.stream._fill = fill
    trainer.stream.advance_to(0)
    while len(begun) < BATCH:
        time.sleep(0.01)
    trainer.stream.close()
    goes_on.set()
    trainer.stream._threads.shutdown()  # waits for all
    assert sorted(begun) == list(range(BATCH))
    trainer.stream.advance_to(1)
    with pytest.raises(ServerError, match="the stream of rollouts was closed"):
        trainer.stream.take()


def test_between_ready_groups_there_is_time_for_other_things(monkeypatch):
    """A signal, and a server that is back, are noticed before each group, also where none is waited for."""
    trainer = Trainer(0, max_staleness=0)
    trainer.stream.advance_to(0)
    while trainer.stream.end_batch().metrics["queue/ready"] < BATCH:
        time.sleep(0.01)
    proved: list[Any] = []
    rollouts: Any = SimpleNamespace(
        stop=threading.Event(),
        failure=None,
        pool=SimpleNamespace(returned=["a server"]),
        noting_failure=nullcontext,
        proofs=SimpleNamespace(prove=proved.append),
    )

    def send(only_returned):
        returned, rollouts.pool.returned = rollouts.pool.returned, []
        return returned

    def look():
        assert proved == [["a server"]]
        assert trainer.stream.take()
        rollouts.stop.set()

    rollouts._send = send
    monkeypatch.setattr("rollouts.rollouts.call_on_main", lambda function: function())
    assert Rollouts._wait(rollouts, look) is Word.STOP
    assert trainer.stream.missing == BATCH - 1
    trainer.stream.close()


def test_draining_waits_and_holds():
    """The block begins when what is sampled has ended, and nothing begins before its end."""
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=["os.path.exists"], max_concurrent_requests=2
    )
    client, stop, release = ServerPool(config), threading.Event(), threading.Event()
    client.admit(client.servers[0])
    begun, under_way = [], threading.Event()

    def sample(number):
        with client.lease():
            begun.append(number)
            under_way.set()
            release.wait(20)

    threads = [threading.Thread(target=sample, args=(number,)) for number in range(2)]
    threads[0].start()
    assert under_way.wait(20)
    threading.Timer(0.2, release.set).start()
    with client.drained(stop):
        assert release.is_set()
        assert client.servers[0].in_flight == 0
        threads[1].start()
        time.sleep(0.1)
        assert begun == [0]
    threads[1].join(20)
    assert begun == [0, 1]
    assert client._limit == config.max_concurrent_requests
    release.clear()
    under_way.clear()
    threading.Thread(target=sample, args=(2,), daemon=True).start()
    assert under_way.wait(20)
    stop.set()
    with client.drained(stop):  # a run that ends does not wait
        assert client.servers[0].in_flight == 1
    release.set()
    client.close()


def test_a_minute_without_a_batch_is_told(capsys):
    """Also where groups come one by one: how many there are, and which is waited for."""
    goes_on = threading.Event()

    def sample(group):
        if group.id:
            goes_on.wait(60)
        group.fill([Completion([6], [-1.0], "stop", 0)] * 2)
        group.reward = [0.0, 1.0]

    prompt = Prompt(7, [5], "", {}, set="hard", place="row 3 of dataset hard")
    config = make_config(batch_size=3, max_staleness=0)
    groups = GroupStream(lambda first: [Group(prompt, id=first)], sample, 1, config)
    try:
        groups.advance_to(0)
        while groups.take() is None:
            pass
        assert capsys.readouterr().out == ""
        groups._told_s -= 61
        assert groups.take() is None
        told = capsys.readouterr().out
        assert told == (
            "waiting for rollouts and rewards: 1 of 3 groups have come; "
            "the oldest at work is of row 3 of dataset hard\n"
        )
    finally:
        goes_on.set()
        groups.close()


# -- the whole trainer against a server whose latencies are under control --------------------------------------------


def plain_loop(model_id, tokenizer_ids):
    """Three steps written out: one row a batch, one group after the other."""
    model = attach(AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32))
    config = make_config(batch_size=6, num_generations=4)
    decay = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1]},
    ]
    optimizer = torch.optim.AdamW(decay, lr=1e-2, weight_decay=0.0)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(42)).tolist()
    for step in range(3):
        prompts = [tokenizer_ids(f"{i}+{i}=") for i in order[6 * step : 6 * step + 6]]
        groups = [(prompt, [said(prompt, number) for number in range(4)]) for prompt in prompts]
        rewards = torch.tensor(
            [[sum(ids) / len(ids) / 50 for ids in ids_of] for _, ids_of in groups],
            dtype=torch.float64,
        )
        advantages = compute_advantages(rewards).float().flatten()
        (row,) = pack(groups)
        logprobs = completion_logprobs(model, row)
        per_token = advantages[row.completion]
        old, mask = logprobs.detach(), torch.ones_like(per_token)
        loss, _ = grpo_loss(logprobs, old, None, per_token, mask, row.completion, config)
        loss.backward()
        for p in model.parameters():
            p.grad /= len(per_token)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_staleness_zero_is_the_synchronous_loop(models, recipe, tmp_path):
    """Bit for bit, whatever the latencies; also in many rows, where only their order of arrival could differ."""
    weights = {}
    for latency, options in itertools.product((0.0, 0.1), ([], ["--max_tokens_per_gpu", "60"])):
        with fake_server(models["untied"], answer_in(latency)) as server:
            main(parse_args([recipe(server), "--off_policy_correction", "none", *options]))
        weights[latency, bool(options)] = load_file(
            tmp_path / "run" / "checkpoint-3" / "model.safetensors"
        )
    expected = plain_loop(models["untied"], lambda text: make_tokenizer()(text)["input_ids"])
    for name, weight in weights[0.0, False].items():
        assert torch.equal(weight, expected[name]), name
        assert torch.equal(weight, weights[0.1, False][name]), name
        assert torch.equal(weights[0.0, True][name], weights[0.1, True][name]), name


@pytest.mark.parametrize(
    "options",
    [[], ["--max_tokens_per_gpu", "60"], ["--use_peft", "true"], ["--loss_type", "grpo"]],
    ids=str,
)
def test_the_loop_on_one_screen(models, recipe, tmp_path, options):
    """recipes/plain_loop.py, as README shows it, ends with the same weights, to the bit."""
    weights = []
    for loop in (main, main_of_plain_loop):
        with fake_server(models["untied"], answer_in(0.0)) as server:
            loop(
                parse_args(
                    [recipe(server), *options, "--output_dir", str(tmp_path / loop.__module__)]
                )
            )
        (file,) = (tmp_path / loop.__module__).rglob("*model.safetensors")
        weights.append(load_file(file))
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


@pytest.mark.parametrize("options", [[], ["--inflight_updates", "false"]], ids=str)
def test_staleness_one(models, recipe, tmp_path, options):
    """Updates come in mid-generation; every token knows its version, and none is older than one step."""
    prompts = set()

    def half_before_an_update(prompt_ids, number):
        """After the first batch, a group's first completion waits half-way for the next update.

        Not for more than 3 s: of what began after an update some may belong to the batch that the next one waits for.
        """
        prompts.add(tuple(prompt_ids))
        ids, began = said(prompt_ids, number), server.version
        until = time.monotonic() + 3 if len(prompts) > 8 and number == 0 else 0

        def wait(place):
            while place == len(ids) // 2 and server.version == began and time.monotonic() < until:
                time.sleep(0.01)

        return ids, wait

    # Without updates in flight an update waits for the completions.
    answer = (
        answer_in(0.15) if options == ["--inflight_updates", "false"] else half_before_an_update
    )
    with fake_server(models["untied"], answer) as server:
        main(parse_args([recipe(server), "--max_staleness", "1", "--max_steps", "8", *options]))
    metrics, samples, dropped = (
        read(tmp_path, name) for name in ("metrics", "completions", "dropped")
    )
    assert [row["step"] for row in metrics] == list(range(1, 9))
    spans = [
        (row["step"] - 1, [version for version, _, _ in row["weight_versions"]]) for row in samples
    ]
    assert all(version - min(seen) in (0, 1) for version, seen in spans)
    assert any(version > min(seen) for version, seen in spans)
    assert max(row["staleness/max"] for row in metrics) == 1
    mixed = [seen for _, seen in spans if len(seen) > 1]
    assert bool(mixed) == (options != ["--inflight_updates", "false"])
    ids = sorted({row["group"] for row in samples} | {row["group"] for row in dropped})
    assert ids == list(range(len(ids)))
    assert len(samples) == 8 * 6 * 4
    updates = [path for path, _ in server.log if path == "/update"]
    assert len(updates) == 9


def test_two_servers_share_the_work_and_groups_stay_together(models, recipe, tmp_path):
    with (
        fake_server(models["untied"], answer_in(0.05)) as one,
        fake_server(models["untied"], answer_in(0.05)) as two,
    ):
        main(parse_args([recipe(one, two), "--max_staleness", "1"]))
    counts = [sum(path == "/sample" for path, _ in server.log) for server in (one, two)]
    assert sum(counts) == 3 * 6 + 2  # one request a group, and the probes
    assert min(counts) >= 6
    for name, weight in one.versions["3"].items():
        assert torch.equal(weight, two.versions["3"][name])
    assert len(read(tmp_path, "completions")) == 72


GENERATE = "/sample"


def asked(server, path=GENERATE):
    """How often a server was asked."""
    return [path for path, _ in server.log].count(path)


def hold(server, until):
    """Let a server answer no rollouts before `until()` holds: on a fast machine a run would be over before it."""

    def wait(path):
        deadline = time.monotonic() + 20
        while path == GENERATE and not until() and time.monotonic() < deadline:
            time.sleep(0.01)

    server.fault = wait


def test_a_server_leaves_and_comes_back(models, recipe, tmp_path, capsys):
    """It answers only errors for a while: its groups go to the other one, and the next sync after that has it back."""
    with (
        fake_server(models["untied"], answer_in(0.05)) as one,
        fake_server(models["untied"], answer_in(0.05)) as two,
    ):

        def ill(path):
            if asked(two) > 4 and "2" not in one.versions:
                raise ConnectionError("out of order")
            connects.extend([path] * (path == "/connect"))

        two.fault = ill
        connects: list[str] = []  # to ask, and then for the trainer
        hold(one, lambda: "2" not in one.versions or len(connects) == 4)
        main(parse_args([recipe(one, two), "--max_staleness", "1", "--max_steps", "10"]))
    output = capsys.readouterr().out
    assert output.count(f"{two.url} is left out for now") == 1
    assert output.count(f"{two.url} is back") == 1
    samples = read(tmp_path, "completions")
    assert sorted({row["group"] for row in samples}) == list(range(60))
    assert len(samples) == 60 * 4
    served = [number for number, (path, _) in enumerate(two.log) if path == GENERATE]
    back = max(number for number, (path, _) in enumerate(two.log) if path == "/connect")
    assert min(served) < back < max(served)
    for name, weight in one.versions["10"].items():
        assert torch.equal(weight, two.versions["10"][name])
    assert (
        "1" not in two.versions
    )  # it was ill then, and may be back as soon as the other one has version 2


def test_a_server_that_comes_back_shorter_stays_out(models, recipe, capsys):
    """Restarted with a smaller --max-model-len it would cut completions without a word."""
    with (
        fake_server(models["untied"], answer_in(0.05)) as one,
        fake_server(models["untied"], answer_in(0.05)) as two,
    ):

        def ill(path):
            if asked(two) > 4 and "2" not in one.versions:
                two.max_model_len = 9
                raise ConnectionError("out of order")
            connects.extend([path] * (path == "/connect"))

        two.fault = ill
        connects: list[str] = []
        hold(one, lambda: "2" not in one.versions or len(connects) == 3)
        main(parse_args([recipe(one, two), "--max_steps", "6"]))
    output = capsys.readouterr().out
    reason = "takes fewer tokens than others: give it --max-model-len 128"
    assert output.count(f"answers again, but stays left out: {two.url} {reason}") == 1
    assert "is back" not in output


def test_a_server_that_hangs_in_a_sync_keeps_no_other_waiting(models, recipe):
    """Longer than an update may take: the healthy one gets the whole of it again."""
    with (
        fake_server(models["untied"], answer_in(0.01)) as one,
        fake_server(models["untied"], answer_in(0.01)) as two,
    ):

        def ill(asked):
            if asked == "/update" and "1" in two.versions:
                time.sleep(3)
                raise ConnectionError("out of order")

        two.fault = ill
        flags = ["--max_steps", "3", "--sync_timeout", "1"]
        main(parse_args([recipe(one, two), *flags]))
    assert "3" in one.versions
    assert "3" not in two.versions


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("path", ["/update", "/update/arrived", "/update/placed"])
def test_a_server_lost_in_a_sync_does_not_cost_the_step(
    models, recipe, tmp_path, monkeypatch, path, stages
):
    monkeypatch.setattr(servers, "PROBE_S", 600.0)  # or it would come back, and get version 4
    with (
        fake_server(models["untied"], answer_in(0.01), stages=stages) as one,
        fake_server(models["untied"], answer_in(0.01), stages=stages) as two,
    ):

        def ill(asked):
            if asked == path and "1" in two.versions:
                raise ConnectionError("out of order")

        two.fault = ill
        main(parse_args([recipe(one, two), "--max_steps", "4", "--sync_timeout", "10"]))
    assert "4" in one.versions
    assert "4" not in two.versions
    assert len(read(tmp_path, "completions")) == 4 * 6 * 4


def test_requests_in_flight_on_a_server_lost_in_a_sync_go_to_another(models, recipe, tmp_path):
    """It stands paused in mid-update, with completions under way; they are aborted there, and sampled anew."""
    with (
        fake_server(models["untied"], answer_in(0.3)) as one,
        fake_server(models["untied"], answer_in(0.3)) as two,
    ):

        def ill(asked):
            if asked == "/update/arrived" and "1" in two.versions:
                raise ConnectionError("out of order")

        two.fault = ill
        started = time.monotonic()
        main(parse_args([recipe(one, two), "--max_steps", "4", "--max_staleness", "1"]))
        assert time.monotonic() - started < 60  # request_timeout is 600
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(24))


def test_a_restarted_server_gets_the_weights_again(models, recipe, tmp_path, capsys, monkeypatch):
    """It answers, with the weights it started with: what it says is not trained, and it is sent the current ones."""
    monkeypatch.setattr(servers, "PROBE_S", 0.05)
    with (
        fake_server(models["untied"], answer_in(0.02)) as one,
        fake_server(models["untied"], answer_in(0.01)) as two,
    ):

        def restart(path):
            if path == "/update/placed" and int(two.version) >= 2 and len(restarts) < 2:
                restarts.append(asked(two, "/update"))
                two.version = "default"

        two.fault = restart
        restarts: list[int] = []
        hold(one, lambda: not restarts or asked(two, "/update") >= restarts[0] + 2)
        main(parse_args([recipe(one, two), "--max_steps", "12"]))
    assert len(restarts) == 2  # the second one when it was given the weights again
    assert "was it restarted?" in capsys.readouterr().out
    spans = [span[0] for row in read(tmp_path, "completions") for span in row["weight_versions"]]
    assert set(spans) == set(range(12))
    assert "12" in two.versions


KEEPING = """
from dataclasses import replace
kept = []
def keeping(server, prompt, sampling):
    kept.append(server.generate(prompt.token_ids, sampling))
    return kept[0]
config = replace(config, rollout_fn=keeping)
"""


@pytest.mark.parametrize("staleness", ["0", "1"])
def test_completions_that_a_rollout_fn_kept(models, recipe, staleness):
    """They are of an older policy than the group: none trains, and the run says why it ends."""
    with fake_server(models["untied"], answer_in(0.0)) as server:
        path = Path(recipe(server))
        path.write_text(path.read_text() + KEEPING)
        with pytest.raises(UserError, match=r"tokens of policy 0, and was asked for under [12]"):
            main(parse_args([str(path), "--max_staleness", staleness]))


def test_a_group_that_no_server_can_take_is_dropped(models, recipe, tmp_path, capsys):
    """A healthy server that fails on one prompt, again and again: others take its place, and it is named."""

    def answer(ids, number):
        if make_tokenizer().decode(ids) == "3+3=":
            raise RuntimeError("a prompt like that")
        return said(ids, number), 0.01

    with fake_server(models["untied"], answer) as server:
        main(parse_args([recipe(server), "--max_steps", "7"]))
    rows = read(tmp_path, "metrics")
    assert rows[-1]["rollouts_failed"] == sum(row["groups/dropped_failed"] for row in rows) == 1
    assert [(row["row"], row["reason"]) for row in read(tmp_path, "dropped")] == [(3, "failed")]
    output = capsys.readouterr().out
    assert "row 3 of dataset_id: " in output
    assert "a prompt like that" in output
    assert "three times on healthy servers" in output
    assert "is left out" not in output


def test_groups_that_no_server_can_take_end_the_run(models, recipe):
    """A healthy server that fails on every prompt."""
    with fake_server(models["untied"], answer_in(0.01)) as server:

        def ill(path):
            if path == "/sample" and "0" in server.versions and len(server.log) > 20:
                raise RuntimeError("a prompt like that")

        server.fault = ill
        with pytest.raises(UserError, match=r"row \d+ of dataset_id: .*a prompt like that"):
            main(parse_args([recipe(server)]))


def test_the_fewest_in_flight_is_asked(models, recipe):
    """A server ten times as slow gets few of the groups, as it is the busier one."""
    with (
        fake_server(models["untied"], answer_in(0.4)) as slow,
        fake_server(models["untied"], answer_in(0.04)) as fast,
    ):
        limit = ["--max_concurrent_requests", "1", "--max_steps", "4", "--max_staleness", "1"]
        main(parse_args([recipe(slow, fast), *limit]))
    counts = [sum(path == "/sample" for path, _ in server.log) for server in (slow, fast)]
    assert counts[1] > 2 * counts[0]


def test_two_ranks_stream(models, recipe, tmp_path):
    """Many small rows dealt to two ranks as they come, DDP and FSDP2 alike: the weights of one rank and one row."""
    weights = []
    for ranks, options in (
        (1, []),
        (2, ["--max_tokens_per_gpu", "60"]),
        (2, ["--max_tokens_per_gpu", "60", "--use_fsdp", "true"]),
    ):
        with fake_server(models["untied"], answer_in(0.02)) as server:
            path = recipe(server)
            sgd = ["--max_steps", "1", "--grad_norm", "0"]
            done = on_forked_ranks(ranks, ROOT / "train.py", path, *sgd, *options)
        assert done.returncode == 0, done.stderr[-3000:]
        weights.append(load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors"))
        (row,) = read(tmp_path, "metrics")
        assert math.isfinite(row["grad_norm"])
        weights[-1]["norm"] = torch.tensor(row["grad_norm"])
    for other in weights[1:]:
        torch.testing.assert_close(other["norm"], weights[0]["norm"], rtol=1e-5, atol=0)


def test_all_groups_filtered_ends_the_run(models, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("rollouts.stream.MAX_DROPPED_BATCHES", 2)
    same = lambda ids, number: ([7, 8, 9], 0.0)
    with (
        fake_server(models["untied"], same) as server,
        pytest.raises(ValueError, match="nothing to learn: 12 groups of this step"),
    ):
        main(parse_args([recipe(server), "--drop_zero_advantage", "true"]))


@pytest.mark.parametrize(("share_prefix", "size"), [(True, 3 + 1 + 3), (False, 2 * (3 + 3))])
def test_take_waits_for_no_more_than_enough_tokens(share_prefix, size, monkeypatch):
    """Groups of a prompt of 3 tokens and completions of 2 and 4; without sharing each is padded to the longest."""
    completions = [Completion([5 + n] * n, [-1.0] * n, "stop", 0) for n in (2, 4)]
    group = Group(Prompt(0, [5] * 3, "", {}), completions)
    stream = SimpleNamespace(take=lambda: group, missing=1)
    config = SimpleNamespace(share_prefix=share_prefix)

    def lead(look):
        while not (word := look()):
            pass
        return word

    rollouts: Any = SimpleNamespace(
        stream=stream, config=config, waited_s=0.0, servers_sleep=False, _wait=lead
    )
    monkeypatch.setattr("rollouts.rollouts.scatter_objects", lambda rows: rows[0])
    deal: Any = lambda groups, is_last: [[(group, is_last) for group in groups]]
    for num_tokens, num_groups in ((2 * size, 2), (2 * size + 1, 3)):
        rows, is_last = Rollouts.take(rollouts, num_tokens, deal)
        assert (rows, is_last) == ([(group, False)] * num_groups, False)
    rollouts.servers_sleep = True  # no more could be sampled before all is trained

    def complete_after_5():
        stream.num_taken += 1
        stream.missing = 5 - stream.num_taken
        return group

    stream.num_taken = 0
    stream.take = complete_after_5
    slept: list[Any] = []
    rollouts.pool = SimpleNamespace(fall_asleep=lambda: slept.append(True))
    rows, is_last = Rollouts.take(rollouts, 1, deal)
    assert (len(rows), is_last, len(slept)) == (5, True, 1)

    rollouts.servers_sleep = False
    stream.take = lambda: group
    stream.missing = 0
    assert Rollouts.take(rollouts, math.inf, deal) == ([(group, True)], True)


def test_whoever_measures_rollouts_knows_if_rows_share_prefixes(monkeypatch):
    """Else one that fits a shared row alone would be cut into several by `pack`."""
    monkeypatch.setattr("rollouts.rollouts.is_main", lambda: True)
    rollouts: Any = SimpleNamespace(run=SimpleNamespace())
    decided: Any = object()
    Rollouts.set_config(rollouts, decided)
    assert rollouts.config is rollouts.run.config is decided


def test_a_run_that_ends_while_a_server_comes_back(models):
    """The next run would find a trainer that uses the server, in a process that goes on, as a notebook's."""
    with fake_server(models["untied"], lambda ids, number: (said(ids, number), 0.0)) as one:
        pool = ServerPool(make_config(model_id=models["untied"], vllm_urls=[one.url]))
        pool.wait_until_ready()
        pool.connect(torch.device("cpu"))
        (server,) = pool.servers
        server.disconnect()

        def end(path):
            if path == "/connect":
                one.fault = lambda path: None
                pool.close()

        one.fault = end
        pool._take_back(server)
        deadline = time.monotonic() + 20
        while one.trainer and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not one.trainer


def test_the_last_reason_is_the_one_that_is_told():
    """A server that is started again with another model is not said to refuse connections."""
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=[lambda **_: []], server_timeout=0.1
    )
    pool = ServerPool(config)
    (server,) = pool.servers
    server.state = State.SERVING
    pool.lose(server, ServerLost("connection refused"))
    server.about = About(["other"], 128, "float32", 0, False)
    server.connect = lambda *_: None
    pool._take_back(server)
    time.sleep(0.2)
    with (
        pytest.raises(
            ServerError, match=r"left: \S+ serves \S*other: restart it with --model m.*; start"
        ),
        pool.lease(),
    ):
        pass
