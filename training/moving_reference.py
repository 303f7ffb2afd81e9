"""A reference that follows the policy: an average of its weights, or a copy from time to time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from config import TrainConfig
from prefix_attention import PackedBatch
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
        own_model: nn.Module | None,
        logprobs_of: Callable[..., Tensor],
        config: TrainConfig,
    ):
        """Begin at the policy's weights.

        Args:
            policy: whose weights it follows.
            own_model: a frozen model that begins with the same weights; None with LoRA.
            logprobs_of: `token_logprobs`, of a model, a row and images.
            config: reference_decay, reference_steps.
        """
        self.config = config
        self.logprobs_of = logprobs_of
        self.model: Any = own_model or unwrap(policy)
        self.swaps_weights = own_model is None
        self.policy_weights = _trained(unwrap(policy))
        self.weights: dict[str, Tensor] = {}  # by the policy's names
        weights_of_model = dict(self.model.named_parameters())
        for name in self.policy_weights:
            weight = weights_of_model[name].detach()
            self.weights[name] = weight.clone() if self.swaps_weights else weight

    def __call__(self, row: PackedBatch, images: dict[str, Tensor]) -> Tensor:
        """`token_logprobs` of a row.

        Never call it between the policy's forward and its backward: with LoRA it overwrites the
        policy's weights, and restores them.
        """
        with torch.no_grad():
            if not self.swaps_weights:
                return self.logprobs_of(self.model, row, images)
            with self._in_the_policy():
                return self.logprobs_of(self.model, row, images)

    @contextmanager
    def _in_the_policy(self) -> Iterator[None]:
        """Put the averages in the place of the policy's weights, without dropout."""
        kept = {name: _local(weight).clone() for name, weight in self.policy_weights.items()}
        self._set_policy(self.weights)
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()
            self._set_policy(kept)

    def _set_policy(self, values: dict[str, Tensor]) -> None:
        for name, weight in self.policy_weights.items():
            _local(weight).copy_(_local(values[name]))
        _gather_anew(self.model)

    def follow(self, step: int) -> None:
        """Move towards the policy after a step, if this one is due."""
        if step % self.config.reference_steps:
            return
        decay: Any = self.config.reference_decay
        with torch.no_grad():
            for name, weight in self.policy_weights.items():
                _local(self.weights[name]).lerp_(_local(weight), 1 - decay)
        _gather_anew(self.model)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _gather_anew(model: Any) -> None:
    """Let FSDP2 forget the weights that its root has gathered for the last forward."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a weight, in the same memory."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight
