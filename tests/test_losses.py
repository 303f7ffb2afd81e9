"""Updates of four servers, in processes of their own, of which some fail at any place.

After each fault all that serve have the same bits, and nobody waited longer than `sync_timeout` and what a living
server needs to answer.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from apart import Apart, digest_of
from helpers import ENV, ROOT, read_until
from test_config import make as make_config
from transformers import AutoModelForCausalLM

import vllm_client
from rollouts import servers as servers_module
from rollouts.servers import ServerPool
from vllm_client import State
from weights.group import BUCKET_BYTES
from weights.publish import published_weights

SYNC_TIMEOUT_S = 7.0
ANSWER_TIMEOUT_S = 3.0  # in place of the 10 s for a living server
SLOW_S = 12.0  # what a busy machine may add


@pytest.fixture(scope="module")
def stand_ins():
    servers: list[Apart] = []
    yield servers
    for server in servers:
        server.process.kill()


@pytest.fixture
def four(models, stand_ins, monkeypatch):
    """Four that live; those that died in the last test are replaced."""
    monkeypatch.setitem(BUCKET_BYTES, "cpu", 40_000)  # some ten of them
    monkeypatch.setattr(servers_module, "PROBE_S", 0.2)
    monkeypatch.setattr(vllm_client, "ANSWER_TIMEOUT_S", ANSWER_TIMEOUT_S)
    stand_ins[:] = [server for server in stand_ins if server.process.is_alive()]
    while len(stand_ins) < 4:
        stand_ins.append(Apart(models["untied"]))
    yield list(stand_ins)
    for server in stand_ins:
        if server.process.is_alive():
            server.wake()


class Trainer:
    """A policy, and the pool of its servers."""

    def __init__(self, model, urls):
        timeouts = {"sync_timeout": SYNC_TIMEOUT_S, "server_timeout": 60.0}
        config = make_config(model_id=model, vllm_urls=urls, **timeouts)
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.pool = ServerPool(config)
        self.pool.wait_until_ready()
        self.pool.connect(torch.device("cpu"))
        self.version = -1
        self.publish()

    def publish(self):
        """Another policy for all; returns the seconds."""
        self.version += 1
        with torch.no_grad():
            for weight in self.policy.parameters():
                weight.add_(0.01)
        started_s = time.monotonic()
        self.send()
        return time.monotonic() - started_s

    def send(self, only_waiting=False):
        weights = published_weights(self.policy)
        for server in self.pool.update_weights(weights, self.version, only_waiting):
            self.pool.admit(server)

    def settle(self, num):
        """As the loop does: send those that came back the policy, until so many serve."""
        ends_s = time.monotonic() + 30.0
        while len(self.pool.serving) < num:
            states = [(server.url, server.state, server.why_out) for server in self.pool.servers]
            assert time.monotonic() < ends_s, states
            if self.pool.waiting:
                self.send(only_waiting=True)
            time.sleep(0.01)

    def check(self, servers, num):
        """So many serve, and all that do have the policy."""
        serving = {server.url for server in self.pool.serving}
        assert len(serving) == num
        for server in servers:
            if server.url in serving:
                assert server.digest() == (f"{self.version}", digest_of(self.policy))


@pytest.fixture
def trainer(models, four):
    trainer = Trainer(models["untied"], [server.url for server in four])
    trainer.check(four, 4)
    yield trainer
    trainer.pool.close()


# In the chain of servers: the first one anywhere, and one in its middle that hands buckets on.
PLACES = [
    ("/update", 0), ("/update/bucket", 0), ("/update/arrived", 0), ("/update/placed", 0),
    ("/update/bucket", 2),
]  # fmt: skip


@pytest.mark.parametrize(("place", "number"), PLACES)
@pytest.mark.parametrize("what", ["dies", "refuses", "hangs"])
def test_one_of_four_fails(trainer, four, place, number, what):
    """The others have the policy at once; it serves again once it is well."""
    ill = four[number]
    ill.fault(place, 3 if place == "/update/bucket" else 0, what)
    seconds = trainer.publish()
    # None waits for a time-out where a connection is closed, or an answer tells.
    limit_s = SYNC_TIMEOUT_S + ANSWER_TIMEOUT_S if what == "hangs" else 0.0
    assert seconds < limit_s + SLOW_S
    lost = [server for server in trainer.pool.servers if server.state is State.LOST]
    assert [server.url for server in lost] == [ill.url]
    trainer.settle(3)
    trainer.check(four, 3)
    assert trainer.publish() < SLOW_S
    if what != "dies":
        ill.wake()
        trainer.settle(4)
        trainer.publish()
    trainer.check(four, 3 if what == "dies" else 4)


def test_two_are_lost_at_once(trainer, four):
    """One dies, and one hangs; a third comes back in the middle of it."""
    four[3].fault("/update", 0, "refuses")
    trainer.publish()
    four[3].wake()
    four[0].fault("/update/bucket", 2, "dies")
    four[2].fault("/update/bucket", 4, "hangs")
    assert trainer.publish() < SYNC_TIMEOUT_S + ANSWER_TIMEOUT_S + SLOW_S
    trainer.settle(2)
    trainer.check(four, 2)
    four[2].wake()
    trainer.settle(3)
    trainer.publish()
    trainer.check(four, 3)


def test_a_server_that_hangs_as_it_comes_back_keeps_no_other_out(trainer, four):
    """Two were lost; the first answers, and then no more. The second, which is well, serves at once."""
    for number in (0, 1):
        four[number].fault("/update", 0, "refuses")
    trainer.publish()
    four[0].fault("/connect", 1, "hangs")
    four[1].wake()
    started_s = time.monotonic()
    trainer.settle(3)
    assert time.monotonic() - started_s < SLOW_S
    trainer.check(four, 3)


def test_servers_that_do_not_meet_are_updated_one_by_one(trainer, four, monkeypatch, capfd):
    """All are well, and do not meet: the first goes on, the others are lost, and come back after it."""
    trainer.publish()
    trainer.pool._leave_group()
    make = servers_module.WeightGroup

    def no_way(meeting, *more):
        if meeting.world_size > 2:
            raise RuntimeError("they do not meet over gloo: no route to host")
        return make(meeting, *more)

    monkeypatch.setattr(servers_module, "WeightGroup", no_way)
    assert trainer.publish() < SLOW_S
    assert [server.num_losses for server in trainer.pool.servers] == [0, 1, 1, 1]
    trainer.settle(4)
    trainer.check(four, 4)
    assert "no route to host" in capfd.readouterr().out


TRAINER = """
import sys; sys.path[:0] = {paths!r}
import time
from test_losses import BUCKET_BYTES, Trainer
from weights.publish import published_weights
BUCKET_BYTES["cpu"] = 40_000
trainer = Trainer({model!r}, {urls!r})
def slow(weights):
    for number, weight in enumerate(weights):
        if number == 8:
            print("half", flush=True)
            time.sleep(600)
        yield weight
trainer.pool.update_weights(slow(published_weights(trainer.policy)), 1)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_dies_or_hangs_in_an_update_leaves_servers_usable(models, four, how):
    """Those of a dead one are free at once; of one that is stopped, once it is killed."""
    paths = [str(ROOT / name) for name in ("", "tests", "scripts")]
    urls = [server.url for server in four]
    code = TRAINER.format(paths=paths, urls=urls, model=models["untied"])
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENV, cwd=ROOT) as first:
        read_until(first, "half")
        os.kill(first.pid, how)
        if how == signal.SIGSTOP:
            time.sleep(SYNC_TIMEOUT_S + 2)
            first.kill()
        first.wait(20)
        started_s = time.monotonic()
        trainer = Trainer(models["untied"], urls)
        assert time.monotonic() - started_s < SLOW_S
    trainer.publish()
    trainer.check(four, 4)
    trainer.pool.close()
