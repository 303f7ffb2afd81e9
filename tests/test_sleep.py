"""Servers that give up their GPU's memory while the trainer trains.

vLLM keeps count of who sleeps on a CPU, too, and frees nothing there: here a server's weights become NaN, as on a GPU
others' data would lie where they were.
"""

import concurrent.futures
import time
from contextlib import closing

import pytest
import torch
from fake_server import FakeServer
from forked import Forked, serve
from helpers import printed_until, request_times, server, wait_until
from msgspec.structs import replace
from safetensors.torch import load_file
from test_adapters import LORA, lora_config
from test_resume import assert_identical
from test_server import PROMPT, check_an_update_in_flight, connected, disturb, make_config, mismatch

import train
from rollouts import servers
from rollouts.servers import ServerPool
from training.batching import Dealer
from vllm_client import ServerError

SAMPLING = {"n": 2, "max_tokens": 20, "temperature": 1.0}


def serve_a_sleeper(argv, log, environment):
    """A real server that loses its weights at level 2."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(self, level=1):
        if level == 2:
            for weight in self.model_runner.model.parameters():
                weight.data.fill_(torch.nan)

    patch = pytest.MonkeyPatch()
    patch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)
    patch.setattr(CPUWorker, "sleep", sleep)
    serve([*argv, "--enable-sleep-mode"], log, environment)


class Sleeper(Forked):
    serve = staticmethod(serve_a_sleeper)


def check_a_nap(rollouts, policy, config):
    """A server samples nothing while it sleeps, and after the next update as before."""
    (one,) = rollouts.pool.servers
    for version in (1, 2):
        rollouts.pool.fall_asleep()
        disturb(policy, version)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reply = pool.submit(one.generate, PROMPT, SAMPLING)
            with pytest.raises(concurrent.futures.TimeoutError):
                reply.result(0.5)
            rollouts.publish(policy, version)
            completions = reply.result(30)
        assert {v for c in completions for v in c.weight_versions.tolist()} == {version}
        assert mismatch(policy, rollouts, config) == (pytest.approx(0, abs=2e-5), [version])


@pytest.mark.server
@pytest.mark.parametrize(("options", "make"), [((), make_config), (LORA, lora_config)])
def test_an_update_wakes_a_server(models, tmp_path, options, make):
    """Asleep it samples nothing; every weight comes anew, but for a base below adapters, which is kept.

    A trainer that died while it slept leaves it usable, and awake it takes updates as any server.
    """
    with server(models["untied"], tmp_path / "log", *options, start=Sleeper) as started:
        config = make(models["untied"], started.wait(), max_staleness=0, max_completion_len=100)
        for _ in range(2):
            with connected(config) as (rollouts, policy):
                check_a_nap(rollouts, policy, config)
                rollouts.pool.fall_asleep()
        check_an_update_in_flight(config)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_run_sleeps_while_it_trains(stand_in, train_on, tmp_path, monkeypatch, num_servers):
    """Once a step, after all samples and before the update; and learns the same, to the bit."""
    weights = []
    taken = []  # whether a batch was complete, each time that groups were dealt
    released = []  # the last request before memory is released
    deal = Dealer.deal

    def dealing(self, groups, is_complete):
        taken.append(is_complete)
        return deal(self, groups, is_complete)

    monkeypatch.setattr(Dealer, "deal", dealing)
    for can_sleep in (False, True):
        ours = [stand_in(can_sleep=can_sleep) for _ in range(num_servers)]
        log = ours[0].log
        note = lambda log=log: released.append(log[-1][0])
        monkeypatch.setattr(torch.cuda, "empty_cache", note)
        taken.clear()
        folder = tmp_path / f"run-{can_sleep}"
        train_on(*ours, max_steps=3, max_staleness=0, max_tokens_per_gpu=64, output_dir=folder)
        weights.append(load_file(folder / "checkpoint-3" / "model.safetensors"))
        assert ours[0].naps == [2] * 3 * can_sleep
        assert (taken == [True] * 3) == can_sleep  # else training begins earlier
        # At the start, and before each update.
        assert released == ["/connect", *["/sleep"] * 3] * can_sleep
        calls = [name for name, _ in log if name in ("/sample", "/sleep", "/update")]
        before_naps = [calls[at - 1] for at, name in enumerate(calls) if name == "/sleep"]
        assert before_naps == ["/sample"] * 3 * can_sleep
    assert [name for name in calls if name != "/sample"] == ["/update", *["/sleep", "/update"] * 3]
    assert_identical(*weights)


def test_a_server_that_does_not_fall_asleep_is_left_out(stand_in, train_on, capsys, monkeypatch):
    """It is not taken back, which would wake it, while the trainer trains; and is asked again to sleep."""
    monkeypatch.setattr(servers, "PROBE_S", 0.05)
    training = []
    step = train.optimizer_step

    def slow_step(*arguments):
        begun_s = time.monotonic()
        time.sleep(1)
        training.append((begun_s, time.monotonic()))
        return step(*arguments)

    def ill(asked):
        if asked == "/sleep" and "1" in two.versions and len(training) < 3:
            raise ConnectionError("out of order")

    monkeypatch.setattr(train, "optimizer_step", slow_step)
    one, two = stand_in(can_sleep=True), stand_in(can_sleep=True)
    two.fault = ill
    train_on(one, two, max_steps=5, max_staleness=0)
    woken = request_times(two, "/connect")
    assert "5" in one.versions
    assert len(woken) > 1  # it came back
    assert not [at for at in woken for begun_s, ended_s in training if begun_s < at < ended_s]
    assert f"{two.url} is left out" in capsys.readouterr().out


SLEEPS = "sleeps while this trains: set max_staleness=0, or no --enable-sleep-mode"
ROPE = "takes long texts, and so all by other rope factors than the trainer: "


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"can_sleep": True}, SLEEPS),
        ({"lora_rank": 8}, "differs from others in --enable-lora: give it to all"),
        ({"max_model_len": 64}, "takes fewer tokens than others: give it --max-model-len 128"),
        ({"max_model_len": 256}, ROPE + "give it --max-model-len 128"),
        ({"names": ["/another"]}, "serves /another: restart it with --model "),
    ],
)
def test_servers_that_join_a_run(models, stand_in, capsys, monkeypatch, kind, message):
    """One that was started anew must be as those of the start; else it stays out of the run."""
    monkeypatch.setattr(servers, "PROBE_S", 0.05)
    theirs, url = FakeServer.about, stand_in().url
    config = make_config(models["untied"], url, max_staleness=1, server_timeout=0.0)
    with closing(ServerPool(config, rope_limit=128)) as pool:
        assert pool.wait_until_ready() == 128
        pool.connect(torch.device("cpu"))
        for server in pool.update_weights([], 0):
            pool.admit(server)
        monkeypatch.setattr(FakeServer, "about", lambda self: replace(theirs(self), **kind))
        pool.lose(pool.servers[0], "it was ended")
        printed = printed_until(capsys, "stays left out")
        assert f"{url} answers again, but stays left out: {url} {message}" in printed
        with pytest.raises(ServerError, match=f"left: {url} {message}"), pool.lease():
            pass
        monkeypatch.setattr(FakeServer, "about", theirs)  # as it was told to
        wait_until(lambda: pool.waiting)
