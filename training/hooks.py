"""Trials of a config's functions and packages before training."""

import importlib
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from config import TrainConfig, UserError
from rollouts.group import Completion, Group, Prompt
from rollouts.own_advantages import naming_function
from utils import naming

LOSS_SUMS = ("kl", "clip_ratio/low", "clip_ratio/high")  # what a loss_fn may name, besides loss/...
PACKAGES = {
    "adam_8bit": "torchao", "base_4bit": "bitsandbytes",
    "use_wandb": "wandb", "use_trackio": "trackio",
}  # fmt: skip


def check_packages(config: TrainConfig) -> None:
    """Raise a UserError where a package that the config needs cannot be imported."""
    for field, package in PACKAGES.items():
        if not getattr(config, field):
            continue
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UserError(f"{field} needs {package}: pip install {package} ({error})") from None


def check_functions(config: TrainConfig) -> None:
    """Try what can be tried before anything is loaded; raises UserError."""
    if config.loss_fn:
        check_loss(config)
    if config.on_step:
        check_on_step(config)


def check_loss(config: TrainConfig) -> None:
    """Try `loss_fn` on two tokens of log-probability -1, advantage 1 and entropy 1.

    Raises:
        UserError: the function fails, or gives no loss that can be trained.
    """
    loss_fn: Any = config.loss_fn
    names = ", ".join(LOSS_SUMS)
    for mask in (torch.ones(2), torch.zeros(2)):  # a row that fills up a round trains no token
        logprobs = torch.full((2,), -1.0, requires_grad=True)
        entropy = torch.ones(2, requires_grad=True)
        called = loss_fn
        if config.loss_reads_entropy:
            called = partial(loss_fn, entropy=entropy)
        old_logprobs = logprobs.detach()
        ref_logprobs = old_logprobs if config.has_reference else None
        completion = torch.zeros(2, dtype=torch.long)
        with naming_function("loss_fn"):
            returned = called(
                logprobs, old_logprobs, ref_logprobs, torch.ones(2), mask, completion, config
            )
        with naming(
            f"loss_fn must return (a finite scalar of logprobs, sums named {names}, loss/...)"
        ):
            _check_returned(returned, logprobs, entropy, mask)


def _check_returned(returned: Any, logprobs: Tensor, entropy: Tensor, mask: Tensor) -> None:
    """Raise where a `loss_fn` returned no usable loss of log-probs, and perhaps entropies."""
    loss, sums = returned
    loss.backward()

    is_usable = loss.isfinite()
    for name, value in sums.items():
        is_known = name in LOSS_SUMS or name.startswith("loss/")
        is_usable = is_usable and is_known and value.ndim == 0
    if not is_usable:
        raise ValueError(f"it returned {loss.item()} and {sums}")
    if mask.any():
        return
    for name, given in (("tokens", logprobs), ("entropies", entropy)):
        if given.grad is not None and given.grad.any():
            raise ValueError(f"{name} whose mask is 0 get the gradient {given.grad}")


def trial_groups(prompts: list[Prompt], config: TrainConfig) -> list[Group]:
    """Two scored groups of one-token completions, to try `advantage_fn` on.

    They have no `info`: with a `rollout_fn`, whose `advantage_fn` may need it, the caller does not.
    """
    num = config.num_generations
    groups = []
    for prompt in prompts[:2]:
        completions = [Completion([0], [-1.0], "stop", 0) for _ in range(num)]
        group = Group(prompt, completions, texts=[""] * num)
        group.reward = [float(number) for number in range(num)]
        column = torch.tensor(group.reward, dtype=torch.float64)[:, None]
        group.rewards = column.repeat(1, len(config.reward_funcs))
        groups.append(group)
    return groups


def check_on_step(config: TrainConfig) -> None:
    """Raise a UserError where `on_step` does not take (step, metrics, groups).

    Only its signature is tried: a call would leave a step that never was in the user's tracker.
    """
    on_step: Any = config.on_step
    with naming("on_step must take (step, metrics, groups)"):
        inspect.signature(on_step).bind(0, {}, [])
