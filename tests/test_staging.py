"""Twins of a server's layers take weights, and what samples is untouched until they are put in place."""

from typing import Any

import pytest
import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    """Two linear layers, which load as vLLM's models do; `bias` is a name that vLLM's reload leaves where it is."""

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


@pytest.fixture
def twins():
    """A model, and its twins, as a worker makes them once the model has loaded."""
    pytest.importorskip("vllm")
    from vllm.model_executor.model_loader.reload import layerwise

    from server.staging import Twins

    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layerwise.record_metadata_for_reloading(model)
    return model, Twins(model, torch.float32)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_what_samples_changes_in_place_and_at_once(twins):
    """Biases too: vLLM's reload writes them where they are."""
    model, copies = twins
    for number in range(3):
        before, places = state(model), {n: t.data_ptr() for n, t in model.named_parameters()}
        fresh = {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}
        copies.begin()
        for name, tensor in fresh.items():
            copies.load([(name, tensor)])
            assert all(torch.equal(now, before[n]) for n, now in state(model).items()), (
                number,
                name,
            )
        copies.finish()
        assert all(torch.equal(now, before[n]) for n, now in state(model).items()), number
        copies.put_in_place()
        assert all(torch.equal(tensor, fresh[n]) for n, tensor in model.named_parameters()), number
        assert {n: t.data_ptr() for n, t in model.named_parameters()} == places  # graphs know them


def test_a_layer_that_gets_nothing_stays(twins):
    model, copies = twins
    before = state(model)
    copies.begin()
    copies.load([("first.weight", torch.zeros(4, 3)), ("first.bias", torch.zeros(4))])
    copies.finish()
    copies.put_in_place()
    assert model.first.weight.eq(0).all()
    assert torch.equal(model.second.weight, before["second.weight"])
