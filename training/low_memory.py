"""AdamW's state in 8 bits (torchao), and a base of LoRA in 4 bits (bitsandbytes).

Imported where the config asks for one of them: neither package is needed otherwise.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig

from config import TrainConfig

# -- AdamW in 8 bits -------------------------------------------------------------------------------


def adamw_8bit(groups: list[dict[str, Any]], config: TrainConfig) -> Any:
    """Make AdamW with both moments in 8 bits, in blocks of 256 values (arXiv:2110.02861).

    It computes in fp32. A tensor, or a rank's shard of it, of fewer than 4,096 values, or of a
    number that 256 does not divide, keeps its moments in its own dtype.
    """
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    OptimState8bit.implements(torch.ops.aten.new_empty.default)(_new_empty)

    class AdamW(AdamW8bit):
        """torchao's AdamW, whose learning rates are tensors only during a step.

        Schedules and checkpoints have numbers, as with torch's AdamW.
        """

        add_param_group = torch.optim.Optimizer.add_param_group  # torchao's makes tensors of them

        def step(self, closure: Any = None) -> None:
            """Update the weights.

            On GPUs the first step compiles a kernel for each shape of a weight.
            """
            for group in self.param_groups:
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)

            # Models that train without a GPU are small, and would gain less than it takes.
            stance = "default" if torch.cuda.is_available() else "force_eager"
            with torch.compiler.set_stance(stance):
                super().step(closure)

            # A value below 1.6e-7 of the largest in its block is rounded to 0. The first moment
            # over that 0 would be a step of hundreds of learning rates.
            for state in self.state.values():
                moment = state["exp_avg_sq"]
                if isinstance(moment, DTensor):
                    moment = moment.to_local()
                if isinstance(moment, OptimState8bit):
                    moment.codes.clamp_(min=1)  # the place of the smallest value above 0
            for group in self.param_groups:
                group["lr"] = group["lr"].item()

    return AdamW(groups, config.learning_rate, (0.9, config.adam_beta2))


def _new_empty(_: Any, __: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate an 8-bit tensor for a copy: saving needs it, and torchao 0.18 lacks it."""
    tensor, shape = args
    device = kwargs.get("device", tensor.device)
    return tensor.zeros(shape, tensor.signed, tensor.block_size, device, tensor.dtype)


# -- A base in 4 bits ------------------------------------------------------------------------------


def use_differentiable_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from its own layout on CPUs, which has no gradient."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def in_4bit(config: TrainConfig) -> BitsAndBytesConfig:
    """transformers' setting for linear layers, but the head, in 4 bits (nf4)."""
    computes_in = getattr(torch, config.dtype)
    if config.bf16:
        computes_in = torch.bfloat16
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computes_in
    )
