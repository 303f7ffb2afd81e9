"""A worker's update: what samples is untouched until all has come, and is loaded where it is."""

import copy
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from helpers import wait_until
from torch import nn
from torch.distributed import TCPStore

pytest.importorskip("vllm", reason="tests of the server's side")

from vllm.config import VllmConfig
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from server import receiver
from server.receiver import BROKEN, COMING, LOADS_NOW, WHOLE, WorkerExtension
from weights.group import Meeting, WeightGroup, packed

torch.set_num_threads(1)
CPU = torch.device("cpu")


class Model(nn.Module):
    """Two linear layers, which load as vLLM's models do.

    The buffer's is a name that vLLM's reload leaves where it is.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.second.register_buffer("e_score_correction_bias", torch.zeros(2))
        for layer in (self.first, self.second):
            setattr(layer.bias, "weight_loader", self.load_bias)  # noqa: B010

    @staticmethod
    def load_bias(param, loaded):
        param.data.copy_(loaded)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, value in weights:
            parameter: Any = parameters[name]
            parameter.weight_loader(parameter, value)


class Worker(WorkerExtension):
    """As much of a worker of vLLM as takes updates, once its model has loaded."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = Model()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        layerwise.record_metadata_for_reloading(self.model)
        self.vllm_config = VllmConfig()
        model_config: Any = SimpleNamespace(
            enable_sleep_mode=False, dtype=torch.float32, quantization=None
        )
        self.vllm_config.model_config = self.model_config = model_config
        self.parallel_config = self.vllm_config.parallel_config
        self.device = CPU

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator):
        reload_weights(self.vllm_config, self.model, weights_iterator, None, True)


@pytest.fixture
def worker():
    return Worker()


def fresh_weights(model):
    return {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}


def assert_weights(model, expected):
    for name, tensor in expected.items():
        assert torch.equal(model.state_dict()[name], tensor), name


class Trainer:
    """Sends a worker updates, and keeps the group, as a run does."""

    def __init__(self, worker, timeout_s=20.0, is_sampling=True, secret="s"):
        self.is_sampling = is_sampling
        self.worker = worker
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.meeting = Meeting("127.0.0.1", self.store.port, secret, "gloo", 2, 1, timeout_s)
        self.group: Any = None

    def begin(self):
        """Both meet for an update."""
        self.worker.begin_update(msgspec.to_builtins(self.meeting), self.is_sampling)
        if not self.group:
            self.group = WeightGroup(self.meeting, 0, CPU, self.store)

    def send(self, *buckets):
        for tensors in buckets:
            self.group.send(*packed(tensors, CPU, torch.float32))

    def wait_for(self, *states):
        wait_until(lambda: self.worker.state_of_update()[0] in states)


def test_what_samples_changes_in_place_and_at_once(worker):
    """After each of three updates; biases too: vLLM's reload writes them where they are."""
    model = worker.model
    trainer = Trainer(worker)
    places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    for _ in range(3):
        before, fresh = copy.deepcopy(model.state_dict()), fresh_weights(model)
        trainer.begin()
        for name, tensor in fresh.items():
            trainer.send({name: tensor})
            assert worker.state_of_update()[0] == COMING
            assert_weights(model, before)
        trainer.send({})
        trainer.wait_for(WHOLE)
        assert_weights(model, before)
        assert worker.load_update() == ""
        assert_weights(model, fresh)
        # Graphs know where they are.
        assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == places
    trainer.group.close()


@pytest.mark.parametrize("is_full", [False, True])
def test_an_update_that_is_given_up(worker, monkeypatch, is_full):
    """Half of it may be loaded where there was no room; the next one is whole, over a new group."""
    if is_full:
        monkeypatch.setattr(receiver, "FREE_BYTES", 1 << 60)
    before = copy.deepcopy(worker.model.state_dict())
    trainer = Trainer(worker)
    trainer.begin()
    trainer.send({"first.weight": torch.zeros(4, 3)})
    with ThreadPoolExecutor(2) as pool:
        loading = None
        if is_full:
            trainer.wait_for(LOADS_NOW)
            loading = pool.submit(worker.load_update)
            time.sleep(0.2)
        trainer.group.close()  # the trainer has died
        trainer.group = None
        trainer.wait_for(BROKEN)
        assert "peer" in worker.state_of_update()[1]
        if loading:
            assert "peer" in loading.result(20)
        else:
            assert_weights(worker.model, before)
        fresh = fresh_weights(worker.model)
        trainer = Trainer(worker)
        trainer.begin()
        sending = pool.submit(trainer.send, fresh, {})
        trainer.wait_for(LOADS_NOW, WHOLE)
        assert worker.load_update() == ""
        sending.result()
    assert_weights(worker.model, fresh)
    trainer.group.close()


@pytest.mark.parametrize("is_sampling", [False, True])
def test_buckets_are_taken_as_the_model_loads_them(worker, monkeypatch, is_sampling):
    """One by one, by a worker that has nothing to sample, or no room; a layer that gets nothing stays."""
    before = copy.deepcopy(worker.model.state_dict())
    if is_sampling:
        monkeypatch.setattr(receiver, "FREE_BYTES", 1 << 60)
    trainer = Trainer(worker, is_sampling=is_sampling)
    trainer.begin()
    fresh = {"first.weight": torch.ones(4, 3), "first.bias": torch.ones(4)}
    buckets = [*({name: tensor} for name, tensor in fresh.items()), {}]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(trainer.send, *buckets)
        trainer.wait_for(LOADS_NOW)
        time.sleep(0.2)
        assert not sending.done()
        assert_weights(worker.model, before)
        assert worker.load_update() == ""
        sending.result()
    assert_weights(worker.model, before | fresh)
    trainer.group.close()


@pytest.mark.parametrize(
    ("secret", "reason"),
    # A worker that comes late does not even meet the trainer.
    [("s", "imed out|wait timeout"), ("another", "do not meet over gloo"), (None, "do not meet")],
    ids=["nothing", "a stranger", "nobody"],
)
def test_an_update_in_which_nothing_comes(worker, secret, reason):
    """It ends after its time, and says why; a trainer may be gone before its request arrives."""
    trainer = Trainer(worker, timeout_s=3.0)
    worker.begin_update(msgspec.to_builtins(trainer.meeting), True)
    if secret:
        meeting = msgspec.structs.replace(trainer.meeting, secret=secret)
        with suppress(RuntimeError):  # of a stranger
            trainer.group = WeightGroup(meeting, 0, CPU, trainer.store)
    trainer.wait_for(BROKEN)
    assert re.search(reason, worker.state_of_update()[1])


def test_another_update_takes_the_place_of_one(worker):
    """As of a trainer that has not told that it gives the first one up."""
    trainer, other = Trainer(worker), Trainer(worker, secret="other")
    trainer.begin()
    trainer.send({"first.weight": torch.zeros(4, 3)})
    other.begin()
    fresh = fresh_weights(worker.model)
    other.send(fresh, {})
    other.wait_for(WHOLE)
    assert worker.load_update() == ""
    assert_weights(worker.model, fresh)
    for each in (trainer, other):
        each.group.close()
