"""A policy in checkpoint form: whole tensors, by plain Hugging Face names.

`published_weights` are for servers, `host_weights` for checkpoints.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from prefix_attention import base_model
from utils import is_main
from weights.group import BUCKET_BYTES


def unwrap(model: nn.Module) -> Any:
    """The module inside DistributedDataParallel; FSDP2 and plain models are their own."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module
    return model


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, detached, in its shape and dtype.

    For an FSDP2 shard this is an all-gather: collective.
    """
    whole: Any = tensor.detach()
    if isinstance(tensor, DTensor):  # which `fsdp_offload` keeps elsewhere
        whole = whole.to(whole.device_mesh.device_type).full_tensor()
    return whole


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once, whole, with LoRA merged, as `(name, tensor)`.

    Names are those of the plain Hugging Face model; tied weights appear under their first name.
    Merged weights are temporaries, W + s·B·A computed in the wider of the dtypes and rounded to
    W's; others may be the model's own, read only. Collective: every rank iterates to the end.
    """
    base = base_model(model)
    seen: set[int] = set()
    for name, tensor in base.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        assert tensor.dtype != torch.uint8, f"{name} is in 4 bits, and cannot be sent"

        whole = full_tensor(tensor)
        if name.endswith(".base_layer.weight"):
            layer = base.get_submodule(name.removesuffix(".base_layer.weight"))
            with torch.no_grad():
                whole = whole + full_tensor(layer.get_delta_weight("default"))  # the one adapter
            whole = whole.to(tensor.dtype)
        yield name.replace(".base_layer.", "."), whole


def published_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield `full_weights` in the form and names that `save_pretrained` would write.

    No more than one decoder layer is alive at a time. Collective.
    """
    # Some weights have another form in a checkpoint: fused experts, renamed towers.
    # Names of a layer begin alike: `model.layers.3.`
    for _, layer in groupby(
        full_weights(model), key=lambda item: re.findall(r"^.*?\.\d+\.", item[0])
    ):
        yield from revert_weight_conversion(base_model(model), dict(layer)).items()


def _lora_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield LoRA's weights, whole, by their names in the model. Collective."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" in name:
            yield name, full_tensor(tensor)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield LoRA's A and s·B, whole, by their names in a checkpoint of peft's. Collective."""
    wrapped = unwrap(model)
    for name, whole in _lora_weights(wrapped):
        module, _, kind = name.partition(".lora_")
        if kind.startswith(("B", "embedding_B")):
            # With the scale in it a server needs no rank, alpha, or formula of its own.
            whole = whole * wrapped.get_submodule(module).scaling["default"]  # the adapter
        yield name.replace(".default", ""), whole


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Join consecutive weights, of any shapes, to buckets of at most `BUCKET_BYTES`.

    A larger weight is a bucket of its own.
    """
    bucket: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        if bucket and num_bytes + tensor.nbytes > BUCKET_BYTES[tensor.device.type]:
            yield bucket
            bucket = {}
            num_bytes = 0
        bucket[name] = tensor
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def host_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole `state_dict` for `save_pretrained`, on the CPU.

    With LoRA its weights alone. Ranks other than 0 get {}. Collective.
    """
    unwrapped = unwrap(model)
    weights = full_weights(model)
    if hasattr(unwrapped, "peft_config"):
        weights = _lora_weights(unwrapped)
    # Every rank takes part in every gather.
    return {name: tensor.to("cpu", copy=True) for name, tensor in weights if is_main()}
