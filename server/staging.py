"""Updates beside the model: a second set of its layers takes weights while the first samples."""

import threading
from collections.abc import Iterable
from copy import copy
from types import MethodType
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload import layerwise, meta, sanitize

from weights.arrival import WorkerGroup
from weights.transfer import in_thread

logger = init_logger(__name__)

# What a layer holds by itself; the rest of it is shared with its twin.
OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def room_beside(model: nn.Module, model_config: Any, device: torch.device) -> float:
    """How many times a model's weights fit into the memory that is free.

    0 for a model whose layers cannot be filled apart: quantized layers and experts keep what they
    make of weights in objects that twins would share.
    """
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()]
    if model_config.quantization or any(isinstance(m, FusedMoEMethodBase) for m in methods):
        return 0.0
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what an earlier trainer's updates have left
        free_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        free_bytes = psutil.virtual_memory().available
    return free_bytes / sum(weight.nbytes for weight in model.parameters())


class Twins:
    """Twins of a model's layers, which have tensors only while an update is under way.

    vLLM's layerwise reload fills them: a layer is made, and on a CPU packed, once it is whole.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self._dtype = dtype
        self._twins: dict[nn.Module, Any] = {}  # by the layer that samples
        self._shared: dict[nn.Module, dict[str, Any]] = {}  # attributes that both have
        self._whole: list[nn.Module] = []  # layers whose twins have new weights
        self._model: Any = self._twin_of(model)
        self._ties = self._tied_weights()

    def _twin_of(self, layer: nn.Module) -> Any:
        """Make the twins of a layer and of those in it."""
        if layer in self._twins:
            return self._twins[layer]
        twin = copy(layer)
        for name in OWN:
            twin.__dict__[name] = copy(layer.__dict__[name])
        self._twins[layer] = twin
        for name, child in layer.named_children():
            twin._modules[name] = self._twin_of(child)

        info = layerwise.get_layerwise_info(layer)
        forms = []
        for tensors in info.restore_metadata:  # parameters and buffers
            own_forms = {}
            for name, form in tensors.items():
                own_forms[name] = _for_twin(form.data.to("meta"), form, twin, layer)
            forms.append(own_forms)
        twin_info = layerwise.get_layerwise_info(twin)
        twin_info.restore_device = info.restore_device
        twin_info.restore_metadata = (forms[0], forms[1])
        return twin

    def _tied_weights(self) -> list[tuple[nn.Module, nn.Module, str]]:
        """Pairs of layers, of which the second has the first's weight, and its name."""
        owners: dict[int, nn.Module] = {}
        ties = []
        for layer in self._twins:
            for name, weight in layer.named_parameters(recurse=False):
                owner = owners.setdefault(id(weight), layer)
                if owner is not layer:
                    ties.append((owner, layer, name))
        return ties

    def begin(self) -> None:
        """Make ready for an update."""
        for layer, twin in self._twins.items():
            shared = layer.__dict__.copy()  # at once, as the layer samples meanwhile
            self._shared[layer] = shared
            for name in shared.keys() - OWN:
                twin.__dict__[name] = shared[name]
            for own in ("_parameters", "_buffers"):
                for name, tensor in layer.__dict__[own].items():
                    # vLLM loads these where they are: not where the layer samples.
                    if name in meta.SKIP_TENSORS and tensor is not None:
                        twin.__dict__[own][name] = _for_twin(
                            tensor.data.clone(), tensor, twin, layer
                        )
        layerwise.initialize_layerwise_reload(self._model)
        for twin in self._twins.values():
            # Else a layer that is whole would be copied to where it samples.
            layerwise.get_layerwise_info(twin).kernel_tensors = None

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights by their names in a checkpoint."""
        self._model.load_weights(weights)

    def finish(self) -> None:
        """Make the layers of which no more comes: the update is whole."""
        self._whole = []
        tied_layers = [layer for _, layer, _ in self._ties]
        for layer, twin in self._twins.items():
            info = layerwise.get_layerwise_info(twin)
            if info.can_load() and info.load_numel > 0:
                layerwise._layerwise_process(twin, info)
            if not info.can_load():
                self._whole.append(layer)
            elif info.restore_metadata[0] and layer not in tied_layers:
                logger.warning("%s: Failed to load weights", type(layer).__name__)
            info.reset()
        for owner, layer, name in self._ties:
            if owner in self._whole and layer not in self._whole:
                twin = self._twins[layer]
                twin._parameters[name] = self._twins[owner]._parameters[name]
                twin.quant_method.process_weights_after_loading(twin)
                self._whole.append(layer)

    @torch.no_grad()
    def put_in_place(self) -> None:
        """Let the model sample from the new weights, in the memory of the old: graphs know it."""
        for layer in self._whole:
            twin = self._twins[layer]
            fresh = _lasting(twin)
            for name, tensor in _lasting(layer).items():
                tensor.copy_(fresh[name])
            shared = self._shared[layer]
            for name in twin.__dict__.keys() - OWN:
                if twin.__dict__[name] is not shared.get(name):  # as what a CPU packs
                    layer.__dict__[name] = twin.__dict__[name]
        for layer in self._twins:
            if is_deferred_attention_layer(layer):  # some make weights of others
                attention: Any = layer
                attention.process_weights_after_loading(self._dtype)


def _for_twin(tensor: Tensor, model: Tensor, twin: nn.Module, layer: nn.Module) -> Tensor:
    """Give a tensor the class and loaders of a layer's, bound to the twin."""
    tensor.__class__ = model.__class__
    tensor.__dict__.update(model.__dict__)
    for name, value in tensor.__dict__.items():
        # vLLM takes a layer out of the forms that it keeps, and leaves it in those it has used.
        owners = (layer, sanitize.layer_ref_sentinel)
        if isinstance(value, MethodType) and any(value.__self__ is owner for owner in owners):
            tensor.__dict__[name] = value.__func__.__get__(twin)
    return tensor


def _lasting(layer: nn.Module) -> dict[str, Tensor]:
    """A layer's tensors that an update changes."""
    found: dict[str, Any] = dict(layer._parameters)
    for name, buffer in layer._buffers.items():
        if name not in layer._non_persistent_buffers_set:
            found[name] = buffer
    return {name: tensor for name, tensor in found.items() if tensor is not None}


class StagedUpdates:
    """Takes a trainer's updates in a thread, until the trainer has left.

    They lie `beside` the model, as `Twins` or an `Adapter`, until they are put in place.
    """

    def __init__(self, group: WorkerGroup, beside: Any, config: VllmConfig, device: torch.device):
        self._group = group
        self._beside = beside
        self._config = config
        self._device = device
        self._error: BaseException | None = None
        self._arrived = threading.Event()  # an update is whole
        self._may_come = threading.Event()  # the last one is in place
        self._may_come.set()
        threading.Thread(target=self._run, daemon=True).start()

    def has_arrived(self) -> bool:
        """True once an update is whole.

        Raises:
            RuntimeError: why none comes any more.
        """
        if self._error:
            raise RuntimeError(str(self._error)) from self._error
        return self._arrived.is_set()

    def put_in_place(self) -> None:
        """Let the model sample from the update that has arrived."""
        assert self.has_arrived()
        self._beside.put_in_place()
        self._synchronize()  # before the twins' memory is given up
        self._arrived.clear()
        self._may_come.set()

    def close(self) -> None:
        """Let the thread end, whose group is closed, and give up an update that has arrived."""
        self._may_come.set()

    def _run(self) -> None:
        """Take updates until an error."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        try:
            while True:
                self._may_come.wait()
                self._may_come.clear()
                self._take_one()
                self._synchronize()
                self._arrived.set()
        except BaseException as error:  # for the request that waits for the update
            self._error = error
            self._group.close()  # what the trainer sends then fails at once

    @torch.no_grad()
    def _take_one(self) -> None:
        """Take one update, up to its empty bucket; the next bucket comes while one loads."""
        self._beside.begin()
        bucket = self._group.receive(is_first=True)
        while bucket:
            coming = in_thread(self._group.receive)
            with set_current_vllm_config(self._config):
                self._beside.load(bucket.items())
            bucket = coming.result()
        with set_current_vllm_config(self._config):
            self._beside.finish()

    def _synchronize(self) -> None:
        """Wait for the GPU: sampling has a stream of its own."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
