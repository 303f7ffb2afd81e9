"""AdamW, and the schedule of its learning rate."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.trainer_pt_utils import get_parameter_names

from config import TrainConfig

# As of transformers' Trainer: names, in lower case, of what does not decay.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def build_optimizer(policy: nn.Module, num_updates: int, config: TrainConfig) -> tuple[Any, Any]:
    """Make AdamW and its schedule over `num_updates`; biases and norms do not decay."""
    decaying = set(get_parameter_names(policy, [nn.LayerNorm], NO_DECAY))
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": config.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            group = groups[0] if name in decaying else groups[1]
            group["params"].append(weight)
    if config.adam_8bit:
        optimizer = adamw_8bit(groups, config)
    else:
        on_cuda = any(weight.is_cuda for weight in policy.parameters())
        optimizer = torch.optim.AdamW(
            groups,
            config.learning_rate,
            (0.9, config.adam_beta2),
            fused=config.fsdp_offload or on_cuda or None,  # None leaves it to torch
        )
    num_warmup = round(config.warmup_ratio * num_updates)

    def factor(update: int) -> float:
        """The share of `learning_rate` that an update takes."""
        if update < num_warmup:
            return (update + 1) / num_warmup

        done = (update - num_warmup) / max(num_updates - num_warmup, 1)
        shapes = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return shapes[config.lr_scheduler]

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def adamw_8bit(groups: list[dict[str, Any]], config: TrainConfig) -> Any:
    """Make AdamW with both moments in 8 bits, in blocks of 256 values (arXiv:2110.02861).

    It computes in fp32. A tensor, or a rank's shard of it, of fewer than 4,096 values, or of a
    number that 256 does not divide, keeps its moments in its own dtype.
    """
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    @OptimState8bit.implements(torch.ops.aten.new_empty.default)
    def new_empty(_: Any, __: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Allocate an 8-bit tensor for a copy: saving needs it, and torchao 0.18 lacks it."""
        tensor, shape = args
        return tensor.zeros(
            shape,
            tensor.signed,
            tensor.block_size,
            kwargs.get("device", tensor.device),
            tensor.dtype,
        )

    class AdamW(AdamW8bit):
        """torchao's AdamW, whose learning rates are tensors."""

        def step(self, closure: Any = None) -> None:
            """Update the weights.

            On GPUs the first step compiles a kernel for each shape of a weight.
            """
            # Models that train without a GPU are small, and would gain less than it takes.
            compiles = torch.cuda.is_available()
            with torch.compiler.set_stance("default" if compiles else "force_eager"):
                super().step(closure)

            # A value below 1.6e-7 of the largest in its block is rounded to 0. The first moment
            # over that 0 would be a step of hundreds of learning rates.
            for state in self.state.values():
                moment = state["exp_avg_sq"]
                if isinstance(moment, DTensor):
                    moment = moment.to_local()
                if isinstance(moment, OptimState8bit):
                    moment.codes.clamp_(min=1)  # the place of the smallest value above 0

    return AdamW(groups, config.learning_rate, (0.9, config.adam_beta2))
