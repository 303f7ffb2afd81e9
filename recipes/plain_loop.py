"""Synchronous GRPO on one rank and one screen, by the project's functions.

    python -m recipes.plain_loop recipes/tiny.py --max_staleness 0 [--field value ...]

train.py ends with the same weights, to the bit. It adds ranks, rollouts ahead of the trainer,
proofs of the servers' weights, references, several updates a batch, checkpoints, evaluations, logs.
"""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from config import TrainConfig, UserError, changed_fields, parse_args
from rollouts.run import Run, open_run
from rollouts.stream import next_groups
from train import grpo_loss, loss_normalizer, off_policy_weights, optimizer_step, set_advantages
from training.batching import Dealer, num_trained
from training.model import build_policy, share_prefixes, token_logprobs, with_bf16
from training.optimizer import build_optimizer
from utils import exits, process_group
from vllm_client import ServerError
from weights.publish import published_weights

# Settings of train.py that would change what is trained, and that this loop does not read.
LEFT_OUT = {
    "loss_fn", "order_fn", "parts", "old_logprobs", "drop_zero_advantage", "resume_from_checkpoint",
}  # fmt: skip


def plain_loop(run: Run, device: Any, config: TrainConfig) -> None:
    """Publish the policy, sample, score, weigh, learn; and again."""
    torch.manual_seed(config.seed)
    policy = build_policy(config, device)
    config = share_prefixes(policy, config)  # patches the policy, or turns `share_prefix` off
    num_batches = math.ceil(config.num_epochs * len(run.prompts) / config.batch_size)
    num_steps = config.max_steps or num_batches
    optimizer, scheduler = build_optimizer(policy, num_steps, config)

    for step in range(num_steps):
        # 1. Send the policy to all servers; new ones are admitted once they have the weights.
        for server in run.pool.update_weights(published_weights(policy), version=step):
            run.pool.admit(server)

        # 2. A group of completions for each prompt, their rewards, and advantages within the group.
        groups = next_groups(step * config.batch_size, run.prompts, {}, config)  # shuffled
        with ThreadPoolExecutor(config.batch_size) as threads:
            list(threads.map(run.fill, groups))  # samples and scores a group
        set_advantages(groups, config)

        # 3. Rows that hold each prompt once; their losses add up.
        dealer = Dealer(num_ranks=1, config=config)
        (micro_batches,) = dealer.deal(groups, is_complete=True)  # a list for each rank, here one
        for micro_batch in micro_batches:
            micro_batch = micro_batch.to(device)
            completion = micro_batch.packed.completion  # the index of each token's completion
            mask = micro_batch.mask
            logprobs = token_logprobs(policy, micro_batch.packed, micro_batch.images, config)
            old = logprobs.detach()  # as this is the batch's only update
            # Even on-policy the server's log-probs differ, by rounding.
            sampled = micro_batch.sampler_logprobs
            weights = off_policy_weights(old, sampled, mask, completion, config)
            advantages = micro_batch.advantages * weights
            loss, _ = grpo_loss(logprobs, old, None, advantages, mask, completion, config)
            loss.backward()

        # 4. One division for all rows, and a step.
        normalizer = loss_normalizer(*num_trained(groups, config), config)
        norm = optimizer_step(policy, optimizer, scheduler, normalizer, config)
        reward = sum(sum(group.reward) for group in groups) / len(groups) / config.num_generations
        print(f"step {step + 1}/{num_steps} · reward {reward:.4g} · grad_norm {norm:.4g}")
    policy.save_pretrained(config.output_dir)


def main(config: TrainConfig) -> None:
    """Load the prompts, connect servers and reward workers, and train.

    Raises:
        UserError: the config asks for a part of train.py that this loop leaves out.
    """
    if config.has_reference or config.updates_per_batch > 1 or config.max_staleness:
        raise UserError(
            "plain_loop has no reference, second update or staleness: set --max_staleness 0, or "
            "use train.py"
        )
    left_out = sorted(LEFT_OUT & changed_fields(config))
    if left_out:
        raise UserError(f"plain_loop leaves out {', '.join(left_out)}: use train.py")
    config = with_bf16(config)
    with process_group(config.collective_timeout) as device:
        run = open_run(config, {})
        with run.exits:
            if any(prompt.sources for prompt in run.prompts):
                raise UserError("plain_loop takes no images: use train.py")
            run.pool.connect(device)
            plain_loop(run, device, config)


if __name__ == "__main__":
    with exits(UserError, ServerError):
        main(parse_args(sys.argv[1:]))
