"""LoRA adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import TrainConfig, UserError
from training.intact import check_complete
from utils import naming


def add_lora(
    model: Any, config: TrainConfig, frozen: Sequence[str] = (), checkpoint: Path | None = None
) -> Any:
    """Wrap a model in LoRA adapters, but for its frozen modules.

    The adapters are fresh, or those of a checkpoint.
    """
    # Here, as it takes a second, and looks for the libraries of all its methods.
    from peft import (
        LoraConfig,
        PeftModel,
        get_peft_model,
        get_peft_model_state_dict,
        load_peft_weights,
    )
    from peft.tuners.lora.layer import ParamWrapper

    if checkpoint:
        with naming(f"the adapter of {checkpoint} cannot be loaded"):
            model = PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
            saved = load_peft_weights(str(checkpoint), device="cpu").keys()
        own = get_peft_model_state_dict(model).keys()
        check_complete(checkpoint, own - saved, saved - own, reshaped=())
        return model

    targets = config.lora_target_modules
    if targets == ["all-linear"]:  # peft's word for the default here
        targets = None
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = set()
    if head is not None and head.weight is embedding.weight:
        tied = {embedding, head}  # one matrix cannot take the adapter of one of its two uses
    names = [f".{name}" for name, module in model.named_modules() if module not in tied]
    for target in targets or ():
        if not any(name.endswith(f".{target}") for name in names):
            raise UserError(f"lora_target_modules: {target} is no module, or a tied embedding")
    with naming("lora_target_modules"):
        lora_config = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
            target_modules=targets or "all-linear",
            exclude_modules=list(frozen) or None, task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, lora_config)
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        raise UserError(
            "lora_target_modules: adapters of experts in one tensor cannot be sent: "
            "name attention layers"
        )
    return model
