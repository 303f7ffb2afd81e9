"""The worker's side of updates: weights from a trainer, into vLLM's model."""

from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any

from torch.distributed import TCPStore
from vllm.distributed.weight_transfer import base
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise
from vllm.utils import nccl

from server.adapter import Adapter
from server.staging import StagedUpdates, Twins, room_beside
from weights.arrival import WorkerGroup
from weights.transfer import About


@dataclass
class TransferInit(base.WeightTransferInitInfo):
    """The address at which the trainer waits for this server's workers.

    For the server of a reference only a `temperature`.
    """

    host: str = ""
    port: int = 0
    world_size: int = 0
    timeout_s: float = 0.0
    trainer: str = ""
    connection: str = ""  # the name of this connection
    temperature: float = 0.0


class WeightReceiver(base.WeightTransferEngine[TransferInit, base.WeightTransferUpdateInfo]):
    """Loads the trainer's weights into a worker.

    The worker gets full tensors and keeps its shard of them, as of a checkpoint.
    """

    init_info_cls = TransferInit
    # Buckets come until an empty one: there is nothing to say beforehand.
    update_info_cls = base.WeightTransferUpdateInfo
    group: WorkerGroup | None = None
    staged: StagedUpdates | None = None  # updates, where they are received beside the model
    trainer = ""
    connection = ""  # the name of the trainer's connection
    temperature = 0.0  # of a reference, 0 for any other server

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Join the trainer's transfer group, or become a reference.

        The group takes the place of one that an earlier trainer left.
        """
        if init_info.temperature:
            self._become_reference(init_info.temperature)
            return
        is_other = self.trainer != init_info.trainer
        if self.group and is_other and self.group.trainer_lives():
            raise RuntimeError("another trainer uses this server: one at a time")
        self.shutdown()
        self.trainer = init_info.trainer
        self.connection = init_info.connection

        config = self.parallel_config
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        # The trainer made the store before it invited us: where none is, the trainer is gone.
        timeout = timedelta(seconds=10)
        store = TCPStore(init_info.host, init_info.port, is_master=False, timeout=timeout)
        store.set_timeout(timedelta(seconds=init_info.timeout_s))
        self.group = WorkerGroup(
            store, rank, init_info.world_size, self.device, init_info.timeout_s,
            about=self._about(),
            environment=nccl.unpinned_nccl_env,  # vLLM sets variables that the trainer has not
        )  # fmt: skip
        if self.group.stages:
            lora = self.vllm_config.lora_config
            dtype: Any = self.model_config.dtype
            beside = Adapter(self.model, lora) if lora else Twins(self.model, dtype)
            self.staged = StagedUpdates(self.group, beside, self.vllm_config, self.device)

    def _about(self) -> About:
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        can_sleep = self.model_config.enable_sleep_mode
        lora = self.vllm_config.lora_config
        if lora:  # there is always room: an adapter is small
            return About(dtype, room=inf, lora_rank=lora.max_lora_rank, can_sleep=can_sleep)
        if can_sleep:
            # It samples nothing during an update: staging would only take the trainer's memory.
            return About(dtype, room=0.0, can_sleep=True)
        return About(dtype, room_beside(self.model, self.model_config, self.device))

    def _become_reference(self, temperature: float) -> None:
        """Scale the logits, as vLLM's log-probs of prompts know no temperature."""
        if self.temperature == temperature:
            return
        if self.temperature:
            raise RuntimeError(
                f"it is the reference of a run at temperature {self.temperature}: start another one"
            )
        for module in self.model.modules():
            if isinstance(module, LogitsProcessor):
                module.scale /= temperature
        self.temperature = temperature

    def can_place(self, connection: str) -> bool:
        """True once an update can be put in place: it is here, or comes in the pause.

        Raises:
            RuntimeError: no update comes by this connection any more.
        """
        if connection != self.connection or not self.group:
            raise RuntimeError("the trainer has connected anew, or left")
        return self.staged.has_arrived() if self.staged else True

    def start_weight_update(self) -> None:
        """Open vLLM's layerwise reload.

        Layers are rebuilt as soon as all of their weights have arrived.
        """
        layerwise.initialize_layerwise_reload(self.model)
        # Of modules without weights vLLM would warn that they failed to load.
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        for module in self.model.modules():
            info = layerwise.get_layerwise_info(module)
            if not info.restore_metadata[0] or (tied and isinstance(module, ParallelLMHead)):
                info.load_numel_total = 0

    def receive_weights(self, update_info: base.WeightTransferUpdateInfo) -> None:
        """Load buckets until an empty one.

        Each has memory of its own, as layerwise reload keeps views until a layer is whole.
        """
        load_weights: Any = self.model.load_weights
        try:
            assert self.group
            bucket = self.group.receive()
            while bucket:
                load_weights(bucket.items())
                bucket = self.group.receive()
        except BaseException:
            # What the trainer sends then fails at once, instead of waiting for this worker.
            self.shutdown()
            # Without this the next update could not begin.
            layerwise.finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        """Close the reload, and refresh everything that the reload left alone."""
        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            return
        # The reload does not touch what vLLM prepacks for the CPU, a tied embedding and experts:
        # they would stay.
        for module in self.model.modules():
            quant_method: Any = getattr(module, "quant_method", None)
            if isinstance(module, ParallelLMHead):
                quant_method.process_weights_after_loading(module)
            kernel = getattr(quant_method, "moe_kernel", None)
            if kernel:
                kernel.fused_experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the transfer group."""
        if self.group:
            self.group.close()
            self.group = None
        if self.staged:
            self.staged.close()
            self.staged = None


class WorkerExtension:
    """A base that vLLM gives its `Worker`, as `--worker-extension-cls` names it.

    So `self` is the worker, and has vLLM's own methods.
    """

    weight_transfer_engine: WeightReceiver

    def can_place_update(self, connection: str) -> bool:
        """As `WeightReceiver.can_place`."""
        return self.weight_transfer_engine.can_place(connection)

    def place_update(self: Any, connection: str) -> None:
        """Give the model an update's weights, while sampling pauses.

        Without staging this takes the whole update, through vLLM's methods of the worker, which
        call the `WeightReceiver`'s of the same names.

        Raises:
            RuntimeError: no update comes by this connection any more.
        """
        receiver = self.weight_transfer_engine
        receiver.can_place(connection)  # raises
        if receiver.staged:
            receiver.staged.put_in_place()
        else:
            self.start_weight_update()
            self.update_weights({})  # there is nothing to say: buckets come by the group
            self.finish_weight_update()
