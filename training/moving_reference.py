"""A reference that follows the policy: an average of its weights, or a copy from time to time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from config import TrainConfig
from prefix_attention import PackedBatch, evaluating
from weights.publish import unwrap


class MovingReference:
    """Log-probs under weights that become d · reference + (1 - d) · policy.

    With LoRA these are the averages of A and of B (not of their product). For the reference's
    forward they are put into the policy, so that the base is in memory once. Without LoRA the
    reference is a model of its own.
    """

    def __init__(
        self,
        policy: nn.Module,
        model: nn.Module,
        logprobs_of: Callable[..., Tensor],
        config: TrainConfig,
    ):
        """Begin at the policy's weights.

        Args:
            policy: whose weights it follows.
            model: a frozen one that begins with the same weights; with LoRA the policy's own.
            logprobs_of: `token_logprobs`, of a model, a row and images.
            config: reference_decay, reference_steps.
        """
        self.config = config
        self.logprobs_of = logprobs_of
        self.model = model
        self.swaps_weights = model is unwrap(policy)
        self.policy_weights: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}  # by the policy's names, too
        for name, weight in unwrap(policy).named_parameters():
            if weight.requires_grad:
                self.policy_weights[name] = weight
                own = model.get_parameter(name).detach()
                self.weights[name] = own.clone() if self.swaps_weights else own

    @torch.no_grad()
    def __call__(self, row: PackedBatch, images: dict[str, Tensor]) -> Tensor:
        """`token_logprobs` of a row.

        Never call it between the policy's forward and its backward: with LoRA it overwrites the
        policy's weights, and restores them.
        """
        if not self.swaps_weights:
            return self.logprobs_of(self.model, row, images)

        kept = {name: _local(weight).clone() for name, weight in self.policy_weights.items()}
        self._set_policy(self.weights)
        try:
            with evaluating(self.model):  # without dropout
                return self.logprobs_of(self.model, row, images)
        finally:
            self._set_policy(kept)

    def _set_policy(self, values: dict[str, Tensor]) -> None:
        for name, weight in self.policy_weights.items():
            _local(weight).copy_(_local(values[name]))
        _gather_anew(self.model)

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move towards the policy after a step, if this one is due."""
        if step % self.config.reference_steps:
            return
        decay: Any = self.config.reference_decay
        for name, weight in self.policy_weights.items():
            _local(self.weights[name]).lerp_(_local(weight), 1 - decay)
        _gather_anew(self.model)


def _gather_anew(model: Any) -> None:
    """Let FSDP2 forget the weights that its root has gathered for the last forward."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a weight, in the same memory."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight
