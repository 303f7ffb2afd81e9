"""Updates of a server that was started with `--enable-lora`: adapters, beside a base that stays."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

# vLLM finds the adapter by its number, and never looks for the path.
ADAPTER = LoRARequest("policy", 1, "policy")


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
    tensors = dict(weights)
    rename = getattr(model, "hf_to_vllm_mapper", None)
    max_rank = config.max_lora_rank
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER.lora_int_id,
        tensors,
        # With alpha = r, vLLM's own scale is 1.
        PEFTHelper(r=max_rank, lora_alpha=max_rank, target_modules=[]),
        device=str(next(iter(tensors.values())).device),
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
