"""A worker's update: what samples is untouched until all has come, and is loaded where it is."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

pytest.importorskip("vllm", reason="tests of the server's side")

from vllm.config import VllmConfig
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from server import receiver
from server.receiver import COMING, GIVEN_UP, LOADED, LOADING, LOADS_NOW, WHOLE, WorkerExtension
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


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def fresh_weights(model):
    return {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}


def until(condition):
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(2e-3)


def load(worker):
    """As the API process does, where all has come or is under way."""
    worker.load_update()
    until(lambda: worker.state_of_update()[0] not in (LOADING, LOADS_NOW))
    assert worker.state_of_update() == (LOADED, "")


class Trainer:
    """Sends a worker updates, and keeps the group, as a run does."""

    def __init__(self, worker, timeout_s=20.0, is_sampling=True):
        self.is_sampling = is_sampling
        self.worker = worker
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.meeting = Meeting("127.0.0.1", self.store.port, "s", "gloo", 2, 1, timeout_s)
        self.group: Any = None

    def begin(self):
        """Both meet for an update."""
        self.worker.begin_update(msgspec.to_builtins(self.meeting), self.is_sampling)
        if not self.group:
            self.group = WeightGroup(self.meeting, 0, CPU, self.store)

    def send(self, *buckets):
        for tensors in buckets:
            self.group.send(*packed(tensors, CPU, torch.float32))

    def progress(self):
        return self.worker.state_of_update()[0]


def test_what_samples_changes_in_place_and_at_once(worker):
    """After each of three updates; biases too: vLLM's reload writes them where they are."""
    model = worker.model
    trainer = Trainer(worker)
    for number in range(3):
        before, places = state(model), {n: t.data_ptr() for n, t in model.named_parameters()}
        fresh = fresh_weights(model)
        trainer.begin()
        for name, tensor in fresh.items():
            trainer.send({name: tensor})
            assert trainer.progress() == COMING
            assert same(state(model), before), (number, name)
        trainer.send({})
        until(lambda: trainer.progress() == WHOLE)
        assert same(state(model), before), number
        load(worker)
        assert all(torch.equal(tensor, fresh[n]) for n, tensor in model.named_parameters()), number
        assert {n: t.data_ptr() for n, t in model.named_parameters()} == places  # graphs know them
    trainer.group.close()


def test_a_layer_that_gets_nothing_stays(worker):
    model = worker.model
    before = state(model)
    trainer = Trainer(worker)
    trainer.begin()
    trainer.send({"first.weight": torch.zeros(4, 3), "first.bias": torch.zeros(4)}, {})
    until(lambda: trainer.progress() == WHOLE)
    load(worker)
    assert model.first.weight.eq(0).all()
    assert torch.equal(model.second.weight, before["second.weight"])
    trainer.group.close()


@pytest.mark.parametrize("is_full", [False, True])
def test_an_update_that_is_given_up(worker, monkeypatch, is_full):
    """Half of it may be loaded where there was no room; the next one is whole, over a new group."""
    if is_full:
        monkeypatch.setattr(receiver, "FREE_BYTES", 1 << 60)
    model = worker.model
    before = state(model)
    trainer = Trainer(worker)
    trainer.begin()
    trainer.send({"first.weight": torch.zeros(4, 3)})
    with ThreadPoolExecutor(2) as pool:
        if is_full:
            until(lambda: trainer.progress() == LOADS_NOW)
            worker.load_update()
            time.sleep(0.2)
        trainer.group.close()  # the trainer has died
        trainer.group = None
        until(lambda: trainer.progress() == GIVEN_UP)
        if is_full:
            assert "peer" in str(worker.update.loading.exception(20))
        else:
            assert same(state(model), before)
        assert "peer" in worker.state_of_update()[1]
        worker.give_up_update()
        fresh = fresh_weights(model)
        trainer = Trainer(worker)
        trainer.begin()
        sending = pool.submit(trainer.send, fresh, {})
        until(lambda: trainer.progress() in (LOADS_NOW, WHOLE))
        load(worker)
        sending.result()
    assert all(torch.equal(tensor, fresh[n]) for n, tensor in model.named_parameters())
    trainer.group.close()


@pytest.mark.parametrize("is_sampling", [False, True])
def test_buckets_are_taken_as_the_model_loads_them(worker, monkeypatch, is_sampling):
    """One by one, by a worker that has nothing to sample, or no room for them."""
    before = state(worker.model)
    if is_sampling:
        monkeypatch.setattr(receiver, "FREE_BYTES", 1 << 60)
    trainer = Trainer(worker, is_sampling=is_sampling)
    trainer.begin()
    with ThreadPoolExecutor(1) as pool:
        buckets: Any = {"first.weight": torch.ones(4, 3)}, {"second.weight": torch.ones(2, 4)}, {}
        sending = pool.submit(trainer.send, *buckets)
        until(lambda: trainer.progress() == LOADS_NOW)
        time.sleep(0.2)
        assert not sending.done()
        assert same(state(worker.model), before)
        load(worker)
        sending.result()
    assert worker.model.first.weight.eq(1).all()
    assert worker.model.second.weight.eq(1).all()
    trainer.group.close()


def test_an_update_in_which_nothing_comes(worker):
    """It ends after its time, and says why."""
    trainer = Trainer(worker, timeout_s=1.0)
    trainer.begin()
    started_s = time.monotonic()
    until(lambda: trainer.progress() != COMING)
    assert time.monotonic() - started_s < 5
    assert trainer.progress() == GIVEN_UP
    assert "imed out" in worker.state_of_update()[1]
    trainer.group.close()


def test_another_update_takes_the_place_of_one(worker):
    """As of a trainer that has not told that it gives the first one up."""
    trainer, other = Trainer(worker), Trainer(worker)
    trainer.begin()
    trainer.send({"first.weight": torch.zeros(4, 3)})
    other.meeting = msgspec.structs.replace(other.meeting, secret="other")
    other.begin()
    fresh = fresh_weights(worker.model)
    other.send(fresh, {})
    until(lambda: other.progress() == WHOLE)
    load(worker)
    parameters = worker.model.named_parameters()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in parameters)
    for each in (trainer, other):
        each.group.close()
