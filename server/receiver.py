"""The worker's side of updates: weights from a trainer, or an adapter, into vLLM's model."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise
from vllm.utils import nccl

from weights.group import Meeting, WeightGroup, gpu_of

FREE_BYTES = 2 << 30  # that an update leaves, while it waits beside the model
# States of an update. Of all workers the least counts: where one has to load now, all do.
BROKEN, LOADS_NOW, COMING, WHOLE = range(4)
# The one that a server with `--enable-lora` samples from: vLLM finds it by its number, and never
# looks for the path.
ADAPTER = LoRARequest("policy", 1, "policy")


class ComingUpdate:
    """An update on its way into a worker's model.

    A thread takes buckets from `_buckets`, which wait beside the model while it samples, as far as
    they have room. While sampling pauses, `arriving` gives these, and goes on with `_buckets`.
    """

    def __init__(self, meeting: Meeting, worker: Any, is_sampling: bool):
        self.state = COMING
        self.error = ""  # why no more of it comes
        # Beside the model: not on the trainer's card. One that sleeps, to make room, is idle.
        self._can_wait = meeting.backend != "ipc" and is_sampling
        self._waiting: list[dict[str, Tensor]] = []
        self._coming = self._buckets(meeting, worker)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        """Take buckets as long as they can wait."""
        with suppress(Exception):  # of which `error` tells
            for bucket in self._coming:
                self._waiting.append(bucket)
                if self.state == LOADS_NOW:
                    return

    def _buckets(self, meeting: Meeting, worker: Any) -> Iterator[dict[str, Tensor]]:
        """The buckets, up to the empty one, by the worker's group, or a new one in its place."""
        device = worker.device
        group = worker.group
        try:
            torch.get_device_module(device).set_device(device)  # of this thread
            if not group or group.meeting != meeting:
                if group:
                    group.close()
                config = worker.parallel_config
                number = config.data_parallel_index * config.world_size + config.rank
                with nccl.unpinned_nccl_env():  # vLLM sets variables that the trainer has not
                    group = WeightGroup(meeting, meeting.first_rank + number, device)
                if worker.update is self:  # and no other has begun
                    worker.group = group
            largest = 0  # bytes of a bucket, of which loading holds a second copy
            for bucket in iter(group.receive, {}):
                largest = max(largest, sum(tensor.nbytes for tensor in bucket.values()))
                free_bytes = psutil.virtual_memory().available
                if meeting.backend == "nccl":
                    free_bytes, _ = torch.cuda.mem_get_info(device)
                if not self._can_wait or free_bytes < FREE_BYTES + 2 * largest:
                    self.state = LOADS_NOW
                yield bucket
            self.state = WHOLE
        except Exception as error:  # the trainer is told, and makes another group
            self.error = f"{type(error).__name__}: {error}"
            self.state = BROKEN
            if group:
                group.close()
            raise

    def arriving(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that are here, whose memory is freed, and those that still come.

        Raises:
            Exception: no more come; `error` tells why.
        """
        self._can_wait = False
        self._thread.join()
        if self.error:
            raise RuntimeError(self.error)
        while self._waiting:
            yield from self._waiting.pop(0).items()
        for bucket in self._coming:
            yield from bucket.items()


class WorkerExtension:
    """A base that vLLM gives its `Worker`, as `--worker-extension-cls` names it.

    So `self` is the worker. The API process calls the methods, on all workers at once; vLLM hears
    nothing else meanwhile.
    """

    group: WeightGroup | None = None
    update: Any = None  # the last one
    temperature = 0.0  # of a reference, 0 for any other server

    def zero_weights(self: Any) -> str | None:
        """Make ready for a trainer; returns the name of this GPU.

        Weights become zero: log-probs can then only agree if every weight arrives.
        """
        self.update = None
        if self.group:
            self.group.close()
        self.group = None
        if not self.vllm_config.lora_config:  # of adapters the base stays
            self.reset_weights()
        return gpu_of(self.device)

    def begin_update(self, meeting: dict[str, Any], is_sampling: bool) -> None:
        """Take an update, in place of one that is under way."""
        self.update = ComingUpdate(msgspec.convert(meeting, Meeting), self, is_sampling)

    def state_of_update(self) -> tuple[int, str]:
        """How far the update is, and why no more of it comes."""
        return self.update.state, self.update.error

    @torch.no_grad()
    def load_update(self: Any) -> str:
        """Give the model the update, while sampling pauses, also what still comes.

        Returns:
            Why no more of it came; empty where all did.
        """
        model = self.get_model()
        lora_config = self.vllm_config.lora_config
        weights = self.update.arriving()
        try:
            if lora_config:
                load_adapter(weights, model, lora_config)
            else:
                # It warns of modules without weights; vLLM names those that did not come.
                layerwise.logger.setLevel(logging.ERROR)
                self.reload_weights(weights_iterator=weights)
        except Exception:
            if not lora_config:  # else the next reload could not begin
                with set_current_vllm_config(self.vllm_config):
                    layerwise.finalize_layerwise_reload(model, self.model_config)
            if self.update.error:
                return self.update.error
            raise
        if self.device.type == "cpu" and not lora_config:
            refresh_packed(model)
        if self.device.type == "cuda":
            # The memory of what waited is another stream's, which may use it again from here on.
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # or what torch keeps would count as taken
        return ""

    def become_reference(self: Any, temperature: float) -> None:
        """Scale the logits, as vLLM's log-probs of prompts know no temperature."""
        if self.temperature == temperature:
            return
        if self.temperature:
            raise RuntimeError(
                f"it is the reference of a run at temperature {self.temperature}: start another one"
            )
        for module in self.get_model().modules():
            if isinstance(module, LogitsProcessor):
                module.scale /= temperature
        self.temperature = temperature


def load_adapter(weights: Iterable[tuple[str, Tensor]], model: Any, config: Any) -> None:
    """Let the model sample from the policy's adapter, unmerged: one for all requests.

    Args:
        weights: by their names in a checkpoint of peft's; the trainer has multiplied B by its
            scale.
        model: vLLM's.
        config: vLLM's LoRAConfig.

    Raises:
        ValueError: vLLM has no place for one of them.
    """
    rename = getattr(model, "hf_to_vllm_mapper", None)
    max_rank = config.max_lora_rank
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER.lora_int_id,
        dict(weights),
        # With alpha = r, vLLM's own scale is 1.
        PEFTHelper(r=max_rank, lora_alpha=max_rank, target_modules=[]),
        device="cpu",
        dtype=config.lora_dtype,
        weights_mapper=rename and rename.get_rename_mapper(),
    )

    # What has no place vLLM would leave out without a word.
    manager = model.lora_manager
    places = set(manager.modules).union(*manager.packed_modules.values())
    unplaced = sorted(adapter.loras.keys() - places)
    if unplaced:
        raise ValueError(
            f"vLLM has no place for the adapters of {len(unplaced)} modules, such as "
            f"{unplaced[0]}: leave them out of lora_target_modules, or restart the server "
            "without --enable-lora"
        )
    manager.remove_adapter(ADAPTER.lora_int_id)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER.lora_int_id)


def refresh_packed(model: Any) -> None:
    """Pack for a CPU what vLLM's reload leaves as it was: a tied embedding, and experts."""
    for module in model.modules():
        quant_method: Any = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead):
            quant_method.process_weights_after_loading(module)
        kernel = getattr(quant_method, "moe_kernel", None)
        if kernel:
            kernel.fused_experts.process_weights_after_loading(module)
