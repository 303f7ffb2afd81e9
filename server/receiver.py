"""The worker's side of updates: weights from a trainer, into vLLM's model."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import msgspec
import psutil
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise
from vllm.utils import nccl

from server.adapter import load_adapter
from weights.group import Meeting, WeightGroup, gpu_of

FREE_BYTES = 2 << 30  # that an update leaves, while it waits beside the model
# States of an update. Of all workers the least counts: where one has to load now, all do.
FAILED, GIVEN_UP, LOADS_NOW, COMING, WHOLE, LOADING, LOADED = range(7)


class Update:
    """An update on its way into a worker's model.

    A thread takes its buckets, which wait beside the model while it samples, as far as they have
    room. They are loaded while sampling pauses; by a server that is idle, as they come.
    """

    def __init__(self, meeting: Meeting, worker: Any, is_sampling: bool):
        self.error = ""  # why no more of it comes
        self.loading: Future[None] | None = None  # into the model
        self._meeting = meeting
        self._worker = worker
        # Beside the model: not on the trainer's card. One that sleeps, to make room, is idle.
        self._can_wait = meeting.backend != "ipc" and is_sampling
        self._buckets: SimpleQueue[dict[str, Tensor]] = SimpleQueue()
        self._is_whole = False  # all have come
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        """Take buckets, up to the empty one."""
        device = self._worker.device
        group = None
        try:
            torch.get_device_module(device).set_device(device)  # of this thread
            group = self._joined()
            while not self.error and not self._is_whole:
                bucket = group.receive()
                self._buckets.put(bucket)
                self._is_whole = not bucket
                free_bytes = psutil.virtual_memory().available
                if self._meeting.backend == "nccl":
                    free_bytes, _ = torch.cuda.mem_get_info(device)
                self._can_wait = self._can_wait and free_bytes >= FREE_BYTES
                while not self._can_wait and not self._buckets.empty() and not self.error:
                    time.sleep(1e-3)
        except Exception as error:  # of the group, or of CUDA: the trainer is told
            self.stop(" ".join(f"{type(error).__name__}: {error}".split()))
        if group and not self._is_whole:
            group.close()  # the trainer makes another

    def stop(self, error: str) -> None:
        """Take no more of it, and none into the model."""
        self.error = self.error or error
        self._buckets.put({})  # for who waits for one

    def _joined(self) -> WeightGroup:
        """The group of the meeting: the worker's, or a new one in its place."""
        worker = self._worker
        group: WeightGroup | None = worker.group
        if group and group.meeting == self._meeting:
            return group
        if group:
            group.close()
        config = worker.parallel_config
        number = config.data_parallel_index * config.world_size + config.rank
        with nccl.unpinned_nccl_env():  # vLLM sets variables that the trainer has not
            group = WeightGroup(self._meeting, self._meeting.first_rank + number, worker.device)
        if worker.update is self:  # and no other has begun
            worker.group = group
        return group

    def state(self) -> tuple[int, str]:
        """How far it is, and what went wrong."""
        if self.error:
            return GIVEN_UP, self.error
        if self.loading and self.loading.done():
            fault = self.loading.exception()
            return (FAILED, f"{type(fault).__name__}: {fault}") if fault else (LOADED, "")
        if self.loading:
            return LOADING, ""
        if self._is_whole:
            return WHOLE, ""
        return COMING if self._can_wait or self._buckets.empty() else LOADS_NOW, ""

    def arriving(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that are here, and those that still come.

        Raises:
            RuntimeError: no more come.
        """
        bucket = self._buckets.get()
        while bucket and not self.error:
            for tensor in bucket.values():
                if tensor.is_cuda:  # its memory is another stream's, which may use it again
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            yield from bucket.items()
            bucket = self._buckets.get()
        if self.error:
            raise RuntimeError(self.error)


class WorkerExtension:
    """A base that vLLM gives its `Worker`, as `--worker-extension-cls` names it.

    So `self` is the worker. The API process calls the methods, on all workers at once; none takes
    long, as vLLM hears nothing else meanwhile.
    """

    group: WeightGroup | None = None
    update: Update | None = None  # the last one
    loader = ThreadPoolExecutor(1)  # of updates, one after the other
    temperature = 0.0  # of a reference, 0 for any other server

    def connect(self: Any) -> str | None:
        """Make ready for a trainer; returns the name of this GPU.

        Weights become zero: log-probs can then only agree if every weight arrives.
        """
        self.give_up_update()
        if self.group:
            self.group.close()
        if not self.vllm_config.lora_config:  # of adapters the base stays
            self.reset_weights()
        return gpu_of(self.device)

    def begin_update(self, meeting: dict[str, Any], is_sampling: bool) -> None:
        """Take an update; the one before is given up."""
        self.give_up_update()
        self.update = Update(msgspec.convert(meeting, Meeting), self, is_sampling)

    def state_of_update(self) -> tuple[int, str]:
        """How far the update is, and what went wrong."""
        return self.update.state() if self.update else (GIVEN_UP, "")

    def load_update(self) -> None:
        """Begin to give the model the update, while sampling pauses."""
        if self.update:
            self.update.loading = self.loader.submit(self._load, self.update.arriving())

    @torch.no_grad()
    def _load(self: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Give the model what is here of an update, and what still comes."""
        torch.get_device_module(self.device).set_device(self.device)  # of this thread
        model = self.get_model()
        if self.vllm_config.lora_config:
            load_adapter(weights, model, self.vllm_config.lora_config)
        else:
            # It warns of modules without weights; vLLM names those that did not come.
            layerwise.logger.setLevel(logging.ERROR)
            try:
                self.reload_weights(weights_iterator=weights)
            except BaseException:  # else the next could not begin
                with set_current_vllm_config(self.vllm_config):
                    layerwise.finalize_layerwise_reload(model, self.model_config)
                raise
            if self.device.type == "cpu":
                refresh_packed(model)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # or what torch keeps would count as taken

    def give_up_update(self) -> None:
        """Take no more of the update, if there is one, and none of it into the model."""
        if self.update:
            self.update.stop("it was given up")
            if self.update.loading:
                wait([self.update.loading])
        self.update = None

    def become_reference(self: Any, temperature: float) -> None:
        """Scale the logits, as vLLM's log-probs of prompts know no temperature."""
        if self.temperature not in (0.0, temperature):
            raise RuntimeError(
                f"it is the reference of a run at temperature {self.temperature}: start another one"
            )
        if self.temperature == 0:
            for module in self.get_model().modules():
                if isinstance(module, LogitsProcessor):
                    module.scale /= temperature
        self.temperature = temperature


def refresh_packed(model: Any) -> None:
    """Pack for a CPU what vLLM's reload leaves as it was: a tied embedding, and experts."""
    for module in model.modules():
        quant_method: Any = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead):
            quant_method.process_weights_after_loading(module)
        kernel = getattr(quant_method, "moe_kernel", None)
        if kernel:
            kernel.fused_experts.process_weights_after_loading(module)
