"""Functions of a recipe: their errors named, their results checked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from config import TrainConfig, UserError
from rollouts.group import Group, RolloutFailed
from rollouts.workers import described
from training.batching import longest_completion
from utils import naming
from vllm_client import ServerError


@contextmanager
def naming_function(name: str, error_type: type[UserError] = UserError) -> Iterator[None]:
    """Turn an error of one of the config's functions into a UserError with the line where."""
    # Another server is asked; and the trainer's full memory has a cure of its own.
    passed_on: Any = ServerError if error_type is RolloutFailed else torch.OutOfMemoryError
    try:
        yield
    except passed_on:
        raise
    except (Exception, SystemExit) as error:
        raise error_type(f"{name} raised {described(error)}") from error


def own_advantages(rewards: Tensor, groups: Sequence[Group], config: TrainConfig) -> Tensor:
    """The advantages of `advantage_fn`; 0 for completions without a reward.

    Args:
        rewards: [groups, completions] float64, NaN for those without.
        groups: with their rewards.
        config: `advantage_fn`.

    Raises:
        UserError: it fails, or gives no finite numbers in the shape of the rewards.
    """
    advantage_fn: Any = config.advantage_fn
    with naming_function("advantage_fn"):
        advantages = advantage_fn(rewards, groups)

    has_reward = ~rewards.isnan()
    with naming(f"advantage_fn must return finite numbers {list(rewards.shape)}"):
        if advantages.shape != rewards.shape or not advantages[has_reward].isfinite().all():
            raise ValueError(f"it returned {advantages}")
    return torch.where(has_reward, advantages, 0.0)


def can_teach(group: Group, config: TrainConfig) -> bool:
    """True where a scored group's rewards differ; with an `advantage_fn`, its advantages from 0.

    As long as the group has no advantages, that function is asked about the group alone.
    """
    if not config.advantage_fn:
        return len(set(group.valid_rewards)) > 1
    advantages = torch.tensor(group.advantages)
    if not group.advantages:
        rewards = torch.tensor([group.reward], dtype=torch.float64)
        advantages = own_advantages(rewards, [group], config)
    return advantages.abs().max().item() > 1e-9  # less is rounding, as of r - mean of equal ones


def check_segments(group: Group, forbidden: Sequence[int], config: TrainConfig) -> None:
    """Refuse segments that no row of the policy takes, by a ValueError.

    Args:
        group: with its completions.
        forbidden: tokens that stand for images, which no policy samples.
        config: max_tokens_per_gpu, share_prefix, and the loss, which may need whole completions.
    """
    group_prompt, completions = group.sequences
    # With this every segment's prompt must begin.
    beginning = group_prompt if group.prompt.images else group_prompt[:0]
    longest = 0
    if config.loss_needs_completions:
        # A position predicts the next token, so a row has one fewer than tokens.
        longest = longest_completion([group], config) + 1
    for prompt_ids, token_ids in chain.from_iterable(completions):
        longest = max(longest, len(prompt_ids) + len(token_ids))
        if not len(prompt_ids):
            raise ValueError("a segment has an empty prompt")
        if not torch.equal(prompt_ids[: len(beginning)], beginning):
            raise ValueError("a segment's prompt does not begin with the group's, which has images")
        text_ids = torch.cat([prompt_ids[len(beginning) :], token_ids])
        if not set(forbidden).isdisjoint(text_ids.tolist()):
            raise ValueError("a completion has a placeholder of an image, which no policy takes")
    if longest > config.max_tokens_per_gpu:
        raise ValueError(
            f"a completion has {longest} tokens with its prompt: raise max_tokens_per_gpu"
        )
