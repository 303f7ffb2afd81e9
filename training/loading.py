"""A model and its LoRA adapters from their files, whole or refused."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    GenerationConfig,
)
from transformers.utils.logging import disable_progress_bar

from config import TrainConfig, UserError
from utils import naming

# Masks that GPT-Neo and GPT-J, and frequencies that old Llamas have in their files.
NO_WEIGHT = re.compile(r"(\.attn|\.attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
MOST_NAMES = 3  # of each kind, in a message


def load_model_config(config: TrainConfig) -> tuple[Any, Any]:
    """Read transformers' configuration of `model_id`, and choose its class.

    Raises:
        UserError: the model is quantized.
    """
    model_config = AutoConfig.from_pretrained(
        config.model_id, trust_remote_code=config.trust_remote_code
    )
    quantized = getattr(model_config, "quantization_config", None)
    method = dict(quantized or {}).get("quant_method")
    if method and method != "mxfp4":  # mxfp4 is loaded in bfloat16
        raise UserError(
            f"model_id={config.model_id} is quantized ({method}), and cannot be trained: take the "
            "model that it was made from"
        )
    if getattr(model_config, "vision_config", None) is not None:
        return model_config, AutoModelForImageTextToText
    return model_config, AutoModelForCausalLM


def load_model(config: TrainConfig, checkpoint: Path | None = None, on_meta: bool = False) -> Any:
    """Load a model on the CPU, in eval mode: without dropout, noise and skipped layers.

    With them log-probs would differ from the server's, and from forward to forward. `on_meta` gives
    its shapes alone.
    """
    disable_progress_bar()  # ours is the one to watch
    model_config, model_class = load_model_config(config)
    attention = config.attn_implementation
    if getattr(model_config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        if attention == "sdpa":
            raise UserError(
                f"attn_implementation=sdpa leaves out the softcap of {config.model_id}: "
                "leave it at none"
            )
        attention = attention or "eager"  # transformers would take sdpa

    source: Any = checkpoint or config.model_id
    if Path(source).exists():
        source = Path(source).resolve()  # as an adapter names its model by it
    quantization = None
    if config.base_4bit:  # linear layers, but the head
        computes_in = torch.bfloat16 if config.bf16 else getattr(torch, config.dtype)
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computes_in
        )
    with naming(f"the weights of {source} cannot be loaded"):
        model, found = model_class.from_pretrained(
            source,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            device_map="meta" if on_meta else None,
            quantization_config=quantization,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_complete` refuses them
        )
    if not on_meta:
        unknown = [name for name in found["unexpected_keys"] if not NO_WEIGHT.search(name)]
        check_complete(source, {
            "missing": found["missing_keys"],
            "unknown to the model": unknown,
            "of another shape": [name for name, _, _ in found["mismatched_keys"]],
            "tied in config.json, with other values (set tie_word_embeddings=false there)":
                # What the file has with other values transformers unties, and vLLM does not.
                model.get_expanded_tied_weights_keys(all_submodels=True).keys()
                - model.all_tied_weights_keys.keys(),
        })  # fmt: skip
    if config.base_4bit:
        from bitsandbytes.nn import Linear4bit

        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.support_avx512bf16_for_cpu = False  # a layout without a gradient
    if model.can_generate():
        model.generation_config = KeptDefaults.from_dict(model.generation_config.to_dict())
    return model.eval()


class KeptDefaults(GenerationConfig):
    """A model's defaults of sampling, which training does not use and checkpoints keep.

    transformers loads some that it refuses to save.
    """

    def validate(self, *_: Any, **__: Any) -> None:
        """Take them as they are."""


def check_complete(source: Any, faults: dict[str, Iterable[str]]) -> None:
    """Refuse weights that are not those of the model.

    Missing weights would be drawn at random and trained. The proof of servers cannot see it, as
    they get the same numbers.

    Args:
        source: of the weights, for the message.
        faults: names of weights by what is wrong with them.

    Raises:
        UserError: names some of them.
    """
    told = ""
    for fault, names in faults.items():
        found = sorted(names)
        if found:
            told += f"; {len(found)} {fault}: {', '.join(found[:MOST_NAMES])}"
    if told:
        raise UserError(f"the weights of {source} do not fit the model{told}")


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
        check_complete(checkpoint, {"missing": own - saved, "unknown to the model": saved - own})
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
