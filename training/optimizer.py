"""AdamW, and the schedule of its learning rate."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import get_parameter_names

from config import TrainConfig
from training.low_memory import adamw_8bit

# As of transformers' Trainer: names, in lower case, of what does not decay.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def build_optimizer(policy: nn.Module, num_updates: int, config: TrainConfig) -> tuple[Any, Any]:
    """Make AdamW and its schedule over `num_updates`; biases and norms do not decay."""
    decaying = set(get_parameter_names(policy, [nn.LayerNorm], NO_DECAY))
    decays: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            params = decays if name in decaying else others
            params.append(weight)
    groups = [
        {"params": decays, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
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
        if config.lr_scheduler == "linear":
            return 1 - done
        if config.lr_scheduler == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        return 1.0

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
