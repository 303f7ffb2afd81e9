"""Updates of a server that was started with `--enable-lora`: adapters, beside a base that stays."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

# vLLM finds the adapter by its number, and never looks for the path.
ADAPTER = LoRARequest("policy", 1, "policy")


class Adapter:
    """The policy's adapter, which vLLM applies unmerged: one for all requests.

    The trainer has multiplied B by its scale. Updates come by the methods of `staging.Twins`.
    """

    def __init__(self, model: Any, config: Any):
        self._model = model
        self._manager = model.lora_manager
        self._max_rank: int = config.max_lora_rank
        self._dtype: torch.dtype = config.lora_dtype
        self._tensors: dict[str, Tensor] = {}
        self._coming: LoRAModel | None = None

    def begin(self) -> None:
        """Make ready for an update."""
        self._tensors = {}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors by their names in a checkpoint of peft's."""
        self._tensors.update(weights)

    def finish(self) -> None:
        """Make an adapter of the tensors: all have come.

        Raises:
            ValueError: vLLM has no place for one of them.
        """
        rename = getattr(self._model, "hf_to_vllm_mapper", None)
        self._coming = LoRAModel.from_lora_tensors(
            ADAPTER.lora_int_id,
            self._tensors,
            # With alpha = r, vLLM's own scale is 1.
            PEFTHelper(r=self._max_rank, lora_alpha=self._max_rank, target_modules=[]),
            device=str(next(iter(self._tensors.values())).device),
            dtype=self._dtype,
            weights_mapper=rename and rename.get_rename_mapper(),
        )
        self._check(self._coming)

    def _check(self, adapter: LoRAModel) -> None:
        """Refuse a rank without room, and what vLLM would leave out without a word."""
        rank = max(len(lora.lora_a) for lora in adapter.loras.values())
        if rank > self._max_rank:
            raise ValueError(
                f"an adapter has rank {rank}: restart the server with --max-lora-rank {rank}"
            )
        places = set(self._manager.modules)
        for parts in self._manager.packed_modules.values():
            places.update(parts)
        unplaced = sorted(adapter.loras.keys() - places)
        if unplaced:
            raise ValueError(
                f"vLLM has no place for the adapters of {len(unplaced)} modules, such as "
                f"{unplaced[0]}: leave them out of lora_target_modules, or restart the server "
                "without --enable-lora"
            )

    def put_in_place(self) -> None:
        """Let the model sample from the adapter that has come."""
        assert self._coming
        self._manager.remove_adapter(ADAPTER.lora_int_id)
        self._manager.add_adapter(self._coming)
        self._manager.activate_adapter(ADAPTER.lora_int_id)
        self._coming = None
