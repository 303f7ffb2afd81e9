"""Rank 0 alone reads the model, and every rank has its part of it: weights, buffers, adapters, the reference."""

import json
import shutil
from datetime import timedelta
from itertools import chain

import pytest
import torch
import torch.distributed as dist
import vision_models
from helpers import moved_adapter, on_ranks
from test_gradients import (
    ADVANTAGES,
    assert_same,
    dealt,
    make_config,
    make_groups,
    plain_gradient,
    trained_difference,
)
from test_prefix_models import FAMILIES
from test_prefix_models import make_model as make_family
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from config import UserError
from training.loading import add_lora
from training.model import base_model, build_policy, build_reference, load_model
from utils import process_group
from weights.publish import full_tensor

WRAPPERS = [{}, {"use_fsdp": True}, {"use_fsdp": True, "fsdp_offload": True}]


def state_of(model):
    """Everything a model computes with, whole: weights, buffers, and tensors that are neither."""
    listed = (model.named_parameters, model.named_buffers)
    named = chain.from_iterable(of(remove_duplicate=False) for of in listed)
    found = {name: full_tensor(tensor).cpu() for name, tensor in named}
    for name, module in model.named_modules():
        loose = {n: value for n, value in vars(module).items() if isinstance(value, Tensor)}
        found |= {f"{name}.{n}": value for n, value in loose.items()}
    return found


def load_on_ranks(output, *paths):
    """Runs on two ranks; the second has nothing but shapes until rank 0 sends it values."""
    found = []
    with process_group(60) as device:
        shapes = load_model(make_config(paths[0]), on_meta=dist.get_rank() == 1)
        assert {weight.is_meta for weight in shapes.parameters()} == {dist.get_rank() == 1}
        for path in paths:
            states = []
            for fields in WRAPPERS:
                policy = build_policy(make_config(path, **fields), device)
                tensors = chain(policy.parameters(), policy.buffers())
                assert {tensor.device.type for tensor in tensors} == {"cpu"}
                states.append(state_of(base_model(policy)))
            found.append(states)
        torch.save(found, f"{output}.{dist.get_rank()}")


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    """The path of every family of the tests, saved."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_family(family).save_pretrained(folder / family)
    for family in ("qwen3_vl", "llava", "gemma3"):
        vision_models.save(family, folder / family)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("part", [0, 1, 2])
def test_every_rank_has_rank_0s_model(saved_models, tmp_path, part):
    paths = [path for _, path in sorted(saved_models.items())][part::3]
    on_ranks(2, tmp_path, "test_loading.load_on_ranks", tmp_path / "out", *paths)
    of_ranks = [torch.load(tmp_path / f"out.{rank}") for rank in (0, 1)]
    for number, path in enumerate(paths):
        has_vision = "vision_config" in json.loads((path / "config.json").read_text())
        kind = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
        expected = state_of(kind.from_pretrained(path, dtype=torch.float32))
        for state in chain.from_iterable(of_rank[number] for of_rank in of_ranks):
            assert state.keys() == expected.keys(), path.name
            for name, tensor in expected.items():
                assert torch.equal(state[name], tensor), (path.name, name)


def adapters_on_ranks(output, model, checkpoint):
    """Runs on two ranks: a fresh adapter, one of a checkpoint, and the reference of a policy that has moved."""
    found = []
    with process_group(60) as device:
        for fields in WRAPPERS:
            torch.manual_seed(7 + dist.get_rank())  # each rank would draw another adapter
            config = make_config(model, use_peft=True, lora_rank=4, **fields)
            fresh = state_of(build_policy(config, device))
            loaded = state_of(build_policy(config, device, None, checkpoint))
            config = make_config(model, beta=0.1, **fields)
            policy = build_policy(config, device)
            reference = build_reference(policy, config, device)
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.mul_(1.5)
            found.append((fresh, loaded, reference_logprobs(reference, config)))
        torch.save(found, f"{output}.{dist.get_rank()}")


def reference_logprobs(reference, config):
    (row,) = [micro.packed for micro in dealt(make_groups(), ADVANTAGES, 1, config)[0]]
    assert reference
    return reference(row, {})


def test_adapters_and_reference(models, tmp_path, device):
    config = make_config(models["tied"], use_peft=True, lora_rank=4)
    torch.manual_seed(7)
    fresh = state_of(add_lora(load_model(config), config))
    trained = moved_adapter(add_lora(load_model(config), config))
    adapter = tmp_path / "adapter"
    trained.save_pretrained(adapter)
    config = make_config(models["tied"], beta=0.1)
    reference = build_reference(build_policy(config, device), config, device)
    expected = reference_logprobs(reference, config)
    out = tmp_path / "out"
    on_ranks(2, tmp_path, "test_loading.adapters_on_ranks", out, models["tied"], adapter)
    for rank in (0, 1):
        for *adapted, logprobs in torch.load(f"{out}.{rank}"):
            for got, wanted in zip(adapted, (fresh, state_of(trained)), strict=True):
                got = {name.removeprefix("module."): tensor for name, tensor in got.items()}
                assert got.keys() == wanted.keys()
                assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
            # Rows that are laid out alike through kernels that may be called with other shapes.
            torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)


LORA = {"use_peft": True, "lora_rank": 4}
SHARDS = [
    {"use_fsdp": True, "fsdp_shard_size": 2},
    {"use_fsdp": True, "fsdp_shard_size": 1},
    {"use_fsdp": True, "fsdp_shard_size": 4, "fsdp_offload": True},
    {"use_fsdp": True, "fsdp_shard_size": 2, **LORA},
    {"use_fsdp": True, "fsdp_offload": True, "gradient_checkpoint": True, **LORA},
]


def shards_on_ranks(output, model):
    """Runs on four ranks."""
    with process_group(60) as device:
        # Shards lie within consecutive ranks, as of a node; time-outs and offload reach them.
        for size, ranks in ((2, [[0, 1], [2, 3]]), (4, [[0, 1, 2, 3]])):
            fields = {"use_fsdp": True, "fsdp_shard_size": size, "fsdp_offload": True}
            policy = build_policy(make_config(model, collective_timeout=77, **fields), device)
            mesh = next(policy.parameters()).device_mesh
            assert mesh.mesh.tolist() == ranks
            limits = [g._get_backend(device).options._timeout for g in mesh.get_all_groups()]
            assert limits == [timedelta(seconds=77)] * 2
            of_root = policy._get_fsdp_state()._fsdp_param_group
            assert of_root.offload_policy == CPUOffloadPolicy(pin_memory=False)
        got = [
            trained_difference(make_config(model, max_tokens_per_gpu=30, **fields), device)
            for fields in SHARDS
        ]
        if dist.get_rank() == 0:
            torch.save(got, output)
        with pytest.raises(UserError, match="fsdp_shard_size=3: 4 ranks are no multiple of it"):
            build_policy(make_config(model, use_fsdp=True, fsdp_shard_size=3), device)


def test_replicas_of_shards_equal_plain_rows(models, tmp_path):
    """HSDP, and weights in host memory: the same sum of gradients over four ranks."""
    on_ranks(4, tmp_path, "test_loading.shards_on_ranks", tmp_path / "out.pt", models["tied"])
    for fields, got in zip(SHARDS, torch.load(tmp_path / "out.pt"), strict=True):
        assert_same(got, plain_gradient(make_config(models["tied"], **fields)))


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "fp8"])
def test_a_quantized_model_is_refused(models, tmp_path, method):
    """By its configuration alone, before weights or kernels are looked for."""
    shutil.copytree(models["untied"], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    settings = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}
    path.write_text(json.dumps(settings))
    message = rf"is quantized \({method}\), and cannot be trained: take"
    with process_group(60) as device, pytest.raises(UserError, match=message):
        build_policy(make_config(str(tmp_path / "model")), device)
