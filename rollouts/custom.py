"""Functions of a recipe: their errors named, their results checked."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from config import TrainConfig, UserError
from prefix_attention import num_packed_tokens
from rollouts.group import Group, RolloutFailed
from rollouts.workers import described
from training.batching import groups_apart
from utils import naming
from vllm_client import Server, ServerError


@contextmanager
def naming_function(name: str) -> Iterator[None]:
    """Turn an error of one of the config's functions into a UserError with the line where."""
    try:
        yield
    except torch.OutOfMemoryError:  # which has a cure of its own
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{name} raised {described(error)}") from error


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
    """True where not all of a scored group's advantages are 0.

    So it is where its rewards differ. An `advantage_fn` is asked, about the group alone, until the
    group has its advantages.
    """
    if not config.advantage_fn:
        valid = {reward for reward in group.reward if not math.isnan(reward)}
        return len(valid) > 1
    if group.advantages:
        return any(group.advantages)
    rewards = torch.tensor([group.reward], dtype=torch.float64)
    return bool(own_advantages(rewards, [group], config).any())


def fill_by_rollout_fn(
    group: Group, server: Server, sampling: dict[str, Any], config: TrainConfig
) -> None:
    """Fill in the completions of the config's `rollout_fn`, checked.

    Raises:
        RolloutFailed: it failed, or they are no completions; with the line where.
    """
    rollout_fn: Any = config.rollout_fn
    prompt = group.prompt
    where = f"rollout_fn on {prompt.where}"
    try:
        rollouts = list(rollout_fn(server, prompt, sampling))
    except ServerError:
        raise
    except (Exception, SystemExit) as error:  # whatever the recipe raises
        raise RolloutFailed(f"{where}: {described(error)}") from error

    try:
        if len(rollouts) != sampling["n"]:
            raise ValueError(f"{len(rollouts)} rollouts, not {sampling['n']}")
        group.fill(rollouts)
        check_segments(group, server.forbidden, config)
    except (AttributeError, TypeError, ValueError) as error:
        raise RolloutFailed(f"{where}: it returned no completions to train: {error}") from error


def check_segments(group: Group, forbidden: Sequence[int], config: TrainConfig) -> None:
    """Refuse segments that no row of the policy takes, by a ValueError.

    Args:
        group: with its completions.
        forbidden: tokens that stand for images, which no policy samples.
        config: max_tokens_per_gpu, share_prefix, and the loss, which may need whole completions.
    """
    own_prompt, completions = group.sequences
    fixed_ids = own_prompt[:0]  # with which every segment's prompt must begin
    if group.prompt.images:
        fixed_ids = own_prompt
    placeholders = torch.tensor(forbidden, dtype=torch.int64)
    for pairs in completions:
        rows = [[pair] for pair in pairs]
        if config.loss_needs_completions:
            rows = [pairs]
        for row in rows:
            # A position predicts the next token, so a row has one fewer than tokens.
            num_positions = num_packed_tokens(
                [(own_prompt, [row])], config.share_prefix, groups_apart([group])
            )
            if num_positions >= config.max_tokens_per_gpu:
                raise ValueError(
                    f"a completion has {num_positions + 1} tokens with its prompt: raise "
                    "max_tokens_per_gpu"
                )

        for prompt_ids, token_ids in pairs:
            if not torch.equal(prompt_ids[: len(fixed_ids)], fixed_ids):
                raise ValueError(
                    "a segment's prompt does not begin with the group's, which has images"
                )
            text_ids = torch.cat([prompt_ids[len(fixed_ids) :], token_ids])
            if torch.isin(text_ids, placeholders).any():
                raise ValueError(
                    "a completion has a placeholder of an image, which no policy takes"
                )
