"""Asynchronous rollouts: bounded staleness, every group once, updates in flight, lost servers."""

import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from helpers import (
    answer_in,
    flags,
    make_tokenizer,
    read,
    request_times,
    said,
    trained_groups,
    wait_until,
)
from safetensors.torch import load_file
from test_resume import assert_identical, run

from config import TrainConfig, UserError, parse_args
from recipes import plain_loop
from rollouts import servers, stream
from rollouts.group import Completion, Group, Prompt, RolloutFailed
from rollouts.servers import ServerPool
from rollouts.stream import GroupStream
from train import main
from vllm_client import ServerError

BATCH, STEPS = 4, 8


def make_config(**fields):
    defaults = {"model_id": "m", "dataset_id": "d", "reward_funcs": ["os.path.exists"]}
    return TrainConfig(**{**defaults, "batch_size": BATCH, "num_generations": 2, **fields})


def chosen(first):
    """The groups of a batch; a batch may be chosen in parts."""
    return [Group(Prompt(number, [5], "", {}), id=number) for number in range(first, first + 3)]


def random_latency(seed):
    rng = random.Random(seed)
    return lambda group: rng.choice([0.0, 0.001, 0.002, 0.03])


def slow_at_first(group):
    """Later groups could crowd out those that began under the first policy."""
    return 0.05 if group.started_version == 0 and group.id >= BATCH else 0.0


class Trainer:
    """A stream of groups, and the loop that trains them: nothing but sleeps, and a record."""

    def __init__(self, latency_s=lambda _: 0.0, teaches=lambda _: True, choose=chosen, **fields):
        self.latency_s = latency_s
        self.teaches = teaches
        self.most_outstanding = 0
        self.trained: list[tuple[int, Group]] = []
        self.dropped: list[tuple[int, str]] = []
        config = make_config(drop_zero_advantage=True, **fields)
        self.stream = GroupStream(choose, self.fill, STEPS, config)

    def fill(self, group):
        start = group.started_version = self.stream.version
        self.most_outstanding = max(self.most_outstanding, len(self.stream._queue))
        time.sleep(self.latency_s(group))
        spans = [start, self.stream.version]
        group.set_rollouts([Completion([5, 6], [-1.0, -1.0], "stop", spans)] * 2)
        group.reward = [1.0, 0.0] if self.teaches(group) else [1.0, 1.0]

    def step(self, version):
        """Take the batch of one step; returns the ids of its groups."""
        self.stream.advance_to(version)
        started_s = time.monotonic()
        while len(self.stream.batch.groups) < self.stream.config.batch_size:
            self.stream.take()
            assert time.monotonic() < started_s + 20, "a group does not come"
        batch = self.stream.end_batch()
        self.trained += [(version, group) for group in batch.groups]
        self.dropped += [(group.id, group.dropped) for group in batch.dropped]
        return [group.id for group in batch.groups]

    def run(self):
        for version in range(STEPS):
            self.step(version)
            time.sleep(0.004 * (version % 2))
        self.stream.advance_to(STEPS)
        self.stream.close()


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 4])
def test_the_bound_holds_and_every_group_ends_once(staleness):
    """A quarter of the groups teach nothing, and others join the end for them."""
    for latency_s in [slow_at_first, *map(random_latency, range(6))]:
        done = Trainer(latency_s, lambda group: group.id % 4, max_staleness=staleness)
        done.run()
        assert len(done.trained) == STEPS * BATCH
        for version, group in done.trained:
            assert 0 <= version - group.oldest_version <= staleness
        ids = [group.id for _, group in done.trained]
        assert ids == sorted(ids)  # in the order of their admission, whatever the latencies
        ended = sorted(ids + [number for number, _ in done.dropped])
        assert ended == list(range(len(ended)))
        expected = [(number, "zero_advantage") for number in ended if number % 4 == 0]
        assert sorted(done.dropped) == expected
        assert done.most_outstanding <= (staleness + 1) * BATCH


def test_failures_cost_no_time(monkeypatch):
    """At staleness 0 a batch whose first groups fail goes on as soon as the others have come."""

    def failing(group):
        if group.id < 3:
            raise RolloutFailed("the environment is down")
        return 0.02

    trainer = Trainer(failing, max_staleness=0)
    wait = trainer.stream._changed.wait  # for a second at most; longer than `step` does
    monkeypatch.setattr(trainer.stream._changed, "wait", lambda _: wait(25))
    assert trainer.step(0) == [3, 4, 5, 6]
    trainer.stream.close()


@pytest.mark.parametrize("is_slow", ["choose", "can_teach"])
def test_slow_functions_of_a_recipe_hold_up_nothing(is_slow, monkeypatch):
    """An `order_fn` that is asked for another group, or an `advantage_fn` whether one teaches."""
    goes_on, is_asked = threading.Event(), threading.Event()

    def wait_in(function, is_there):
        if function == is_slow and is_there:
            is_asked.set()
            assert goes_on.wait(60)

    def choose(first):
        wait_in("choose", first >= 6)
        return chosen(first)

    def can_teach(group, config):
        wait_in("can_teach", group.id == BATCH - 1)
        return group.id not in (0, 4, 5)  # so that another batch has to be chosen

    monkeypatch.setattr(stream, "can_teach", can_teach)
    trainer = Trainer(choose=choose, max_staleness=0)
    trainer.stream.advance_to(0)
    try:
        assert is_asked.wait(20)
        started_s = time.monotonic()
        while not trainer.stream.take():
            pass
        assert [group.id for group in trainer.stream.end_batch().groups] == [1]
        trainer.stream.state()
        assert time.monotonic() - started_s < 30
    finally:
        goes_on.set()
        trainer.stream.close()


def test_no_room_for_a_thread_ends_the_run(monkeypatch):
    """Else it would wait for groups that nobody samples."""
    trainer = Trainer()

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trainer.stream._threads, "submit", refuse)
    trainer.stream.advance_to(0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        trainer.stream.take()


def test_a_run_that_ends_does_not_wait_for_completions():
    """Nor for those that an update without `inflight_updates` would wait for."""
    pool, stop = ServerPool(make_config()), threading.Event()
    pool.admit(pool.servers[0])
    stop.set()
    with ThreadPoolExecutor(1) as threads, pool.lease() as server:
        threads.submit(pool.drain, stop).result(20)
        assert server.in_flight == 1
    pool.close()


def test_a_minute_without_a_batch_is_told(capsys):
    """Also where groups come one by one: how many there are, and which is waited for."""
    goes_on = threading.Event()

    def sample(group):
        if group.id:
            goes_on.wait(60)
        group.set_rollouts([Completion([6], [-1.0], "stop", 0)] * 2)

    prompt = Prompt(7, [5], "", {}, set="hard", place="row 3 of dataset hard")
    config = make_config(batch_size=3, max_staleness=0)
    groups = GroupStream(lambda first: [Group(prompt, id=first)], sample, 1, config)
    groups.advance_to(0)
    while groups.take() is None:
        pass
    assert capsys.readouterr().out == ""
    groups._told_s -= 61
    assert groups.take() is None
    assert capsys.readouterr().out == (
        "waiting for rollouts and rewards: 1 of 3 groups have come; "
        "the oldest at work is of row 3 of dataset hard\n"
    )
    goes_on.set()
    groups.close()


# -- the whole trainer against servers whose latencies are under control -----------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"off_policy_correction": "none"},
        {"max_tokens_per_gpu": 60},  # many rows, where only their order of arrival could differ
        {"use_peft": True},
        {"loss_type": "grpo"},
    ],
    ids=str,
)
def test_staleness_zero_is_the_synchronous_loop(stand_in, recipe, tmp_path, fields):
    """Bit for bit, whatever the latencies: recipes/plain_loop.py, which README shows."""
    weights = []
    for latency_s, loop in ((0.1, main), (0.0, plain_loop.main)):
        folder = tmp_path / loop.__module__
        loop(parse_args([recipe(stand_in(latency_s)), *flags(output_dir=folder, **fields)]))
        (file,) = folder.rglob("*model.safetensors")
        weights.append(load_file(file))
    assert_identical(*weights)


@pytest.mark.parametrize("in_flight", [True, False])
def test_staleness_one(stand_in, train_on, tmp_path, in_flight):
    """Updates come in mid-generation; every token knows its version, and none is older than one step."""
    prompts = set()

    def half_before_an_update(prompt_ids, number):
        """After the first batch, a group's first completion waits half-way for the next update.

        Not for more than 3 s: of what began after an update some may belong to the batch that the next one waits for.
        """
        prompts.add(tuple(prompt_ids))
        ids, began = said(prompt_ids, number), server.version
        until_s = time.monotonic() + 3 if len(prompts) > 8 and number == 0 else 0

        def wait(place):
            while place == len(ids) // 2 and server.version == began:
                if time.monotonic() > until_s:
                    break
                time.sleep(0.01)

        return ids, wait

    # Without updates in flight an update waits for the completions.
    server = stand_in(answer=half_before_an_update if in_flight else answer_in(0.15))
    train_on(server, max_staleness=1, max_steps=8, inflight_updates=in_flight)
    metrics, samples, dropped = (
        read(tmp_path, name) for name in ("metrics", "completions", "dropped")
    )
    assert [row["step"] for row in metrics] == list(range(1, 9))
    ages = {row["step"] - 1 - row["weight_versions"][0][0] for row in samples}
    assert ages == {0, 1}
    assert max(row["staleness/max"] for row in metrics) == 1
    assert any(len(row["weight_versions"]) > 1 for row in samples) == in_flight
    ids = sorted({row["group"] for row in samples} | {row["group"] for row in dropped})
    assert ids == list(range(len(ids)))
    assert len(samples) == 8 * 6 * 4
    assert len(request_times(server, "/update")) == 9


def test_the_fewest_in_flight_is_asked(stand_in, train_on):
    """A server that takes as long for a group as the other one for five gets one of six, each in one request."""

    def after_five(prompt_ids, number):
        step = len(request_times(slow)) - 1  # the first request is a probe
        wait = lambda _: wait_until(lambda: len(request_times(fast)) > 5 * step)
        return said(prompt_ids, number), wait if step else 0.0

    slow, fast = stand_in(answer=after_five), stand_in(0.04)
    train_on(slow, fast, max_concurrent_requests=1, max_steps=4)
    assert [len(request_times(server)) for server in (slow, fast)] == [1 + 4, 1 + 4 * 5]


@pytest.mark.parametrize(
    ("place", "error", "reason"),
    [
        ("/update", ConnectionError, "out of order"),
        ("/update", PermissionError, "/update answered 403"),
        ("/update/placed", ConnectionError, "out of order"),
    ],
)
def test_a_server_lost_in_a_sync_does_not_cost_the_step(
    stand_in, train_on, tmp_path, capsys, place, error, reason
):
    """Nor its completions under way, where it stands paused: the other server samples them anew."""
    one, two = (stand_in(0.3, stages=place == "/update/placed") for _ in range(2))

    def ill(path):
        if path == place and "1" in two.versions:
            raise error("out of order")

    two.fault = ill
    started_s = time.monotonic()
    train_on(one, two, max_steps=4, max_staleness=1, sync_timeout=10)
    assert time.monotonic() - started_s < 300  # request_timeout is 600
    assert "4" in one.versions
    told = re.findall(f"{two.url} is left out for now: (.*)", capsys.readouterr().out)
    assert reason in told[0]  # it comes back, and is lost again
    assert trained_groups(tmp_path) == list(range(24))
    assert len(read(tmp_path, "completions")) == 24 * 4


def test_a_restarted_server_gets_the_weights_again(
    stand_in, train_on, tmp_path, capsys, monkeypatch
):
    """It answers, with the weights it started with: what it says is not trained, and it is sent the current ones."""
    monkeypatch.setattr(servers, "PROBE_S", 0.05)
    one, two = stand_in(0.02), stand_in(0.01)

    def restart(path):
        if path == "/update/placed" and int(two.version) >= 2 and len(restarts) < 2:
            restarts.append(len(request_times(two, "/update")))
            two.version = "default"

    two.fault = restart
    restarts: list[int] = []
    is_back = lambda: not restarts or len(request_times(two, "/update")) >= restarts[0] + 2
    # On a fast machine the run would be over before it is.
    one.fault = lambda path: path == "/sample" and wait_until(is_back)
    train_on(one, two, max_steps=12)
    assert len(restarts) == 2  # the second one when it was given the weights again
    assert "was it restarted?" in capsys.readouterr().out
    spans = [span[0] for row in read(tmp_path, "completions") for span in row["weight_versions"]]
    assert set(spans) == set(range(12))
    assert "12" in two.versions


@pytest.mark.parametrize("staleness", [0, 1])
def test_completions_that_a_rollout_fn_kept(stand_in, recipe, staleness):
    """They are of an older policy than the group: none trains, and the run says why it ends."""
    kept = []

    def keeping(server, prompt, sampling):
        kept.append(server.generate(prompt.token_ids, sampling))
        return kept[0]

    config = parse_args([recipe(stand_in(0.0)), *flags(max_staleness=staleness)])
    with pytest.raises(UserError, match=r"tokens of policy 0, and was asked for under [12]"):
        main(replace(config, rollout_fn=keeping))


def test_a_group_that_no_server_can_take_is_dropped(stand_in, train_on, tmp_path, capsys):
    """A healthy server that fails on one prompt, again and again: others take its place, and it is named."""

    def answer(ids, number):
        if make_tokenizer().decode(ids) == "3+3=":
            raise RuntimeError("a prompt like that")
        return said(ids, number), 0.01

    train_on(stand_in(answer=answer), max_steps=7)
    rows = read(tmp_path, "metrics")
    assert rows[-1]["rollouts_failed"] == sum(row["groups/dropped_failed"] for row in rows) == 1
    assert [(row["row"], row["reason"]) for row in read(tmp_path, "dropped")] == [(3, "failed")]
    output = capsys.readouterr().out
    for told in ("row 3 of dataset_id: ", "a prompt like that", "three times on healthy servers"):
        assert told in output
    assert "is left out" not in output


def test_two_ranks_stream(stand_in, recipe, tmp_path):
    """Many small rows dealt to two ranks as they come: the gradient of one rank and one row."""
    norms = []
    for ranks, max_tokens in ((1, 16384), (2, 60)):
        options = flags(max_steps=1, grad_norm=0, max_tokens_per_gpu=max_tokens)
        run(ranks, [recipe(stand_in(0.02)), *options], apart=True)
        (row,) = read(tmp_path, "metrics")
        norms.append(row["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_all_groups_filtered_ends_the_run(stand_in, train_on, monkeypatch):
    monkeypatch.setattr(stream, "MAX_DROPPED_BATCHES", 2)
    server = stand_in(answer=lambda ids, number: ([7, 8, 9], 0.0))
    with pytest.raises(ValueError, match="nothing to learn: 1. groups of this step were dropped"):
        train_on(server, drop_zero_advantage=True)


def test_a_run_that_ends_while_a_server_comes_back(stand_in):
    """It lets the server go, for another run of the same process, as a notebook's; and no group begins any more."""
    one = stand_in(0.0)
    pool = ServerPool(make_config(model_id=one.model_id, vllm_urls=[one.url]))
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
    wait_until(lambda: not one.trainer)
    pool.admit(server)
    pool.lose(server, "it would be asked again without an end")
    with pytest.raises(ServerError, match="the run has ended"), pool.lease():
        pass
