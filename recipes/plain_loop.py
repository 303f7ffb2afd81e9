"""Synchronous GRPO on one rank and one screen, by the project's functions.

    python -m recipes.plain_loop recipes/tiny.py [--field value ...]

At max_staleness 0 train.py ends with the same weights, to the bit. It adds ranks, rollouts ahead of
the trainer, proofs of the servers' weights, references, images, checkpoints and logs.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice

import torch

from config import TrainConfig, UserError, parse_args
from rollouts.data import epochs, load_prompts
from rollouts.group import Group, Prompt
from rollouts.processor import load_processor, tokenizer_of
from rollouts.sampling import sampling_params
from rollouts.scoring import Scorer
from rollouts.servers import ServerPool
from train import grpo_loss, loss_normalizer, off_policy_weights, optimizer_step, set_advantages
from training.batching import Dealer, all_trained_lengths
from training.model import build_optimizer, build_policy, share_prefixes, token_logprobs
from utils import exits, process_group
from vllm_client import ServerError
from weights.publish import published_weights


def plain_loop(config: TrainConfig, pool: ServerPool, scorer: Scorer, device: torch.device) -> None:
    """Publish the policy, sample, score, weigh, learn: `max_steps` times."""
    prompts = load_prompts(config.dataset_id, config.dataset_split, scorer.tokenizer, config)
    order = epochs(len(prompts), config.seed)
    num_steps = config.max_steps or len(prompts) // config.batch_size
    torch.manual_seed(config.seed)
    policy = build_policy(config, device)
    config = share_prefixes(policy, config)
    optimizer, scheduler = build_optimizer(policy, num_steps, config)

    def sample_and_score(prompt: Prompt) -> Group:
        group = Group(prompt)
        with pool.lease() as server:
            group.fill(server.generate(prompt.token_ids, sampling_params(config)))
        scorer.score(group)
        return group

    for step in range(num_steps):
        for server in pool.update_weights(published_weights(policy), version=step):
            pool.admit(server)  # at the first step: all of them

        batch = [prompts[index] for index in islice(order, config.batch_size)]
        with ThreadPoolExecutor(config.batch_size) as threads:
            groups = list(threads.map(sample_and_score, batch))
        set_advantages(groups, config)

        (share,) = Dealer(num_ranks=1, config=config).deal(groups, is_complete=True)[0]
        for row in share.micro_batches:  # each prompt once, and all its completions
            logprobs = token_logprobs(policy, row.packed, row.images, config)
            old, mask, completion = logprobs.detach(), row.mask, row.packed.completion
            old = logprobs.detach()
            mask = row.mask
            completion = row.packed.completion
            weights = off_policy_weights(old, row.sampler_logprobs, mask, completion, config)
            advantages = row.advantages * weights
            loss, _ = grpo_loss(logprobs, old, None, advantages, mask, completion, config)
            loss.backward()

        normalizer = loss_normalizer(all_trained_lengths(groups, config), config)
        norm = optimizer_step(policy, optimizer, scheduler, normalizer, config)
        reward = sum(sum(group.reward) for group in groups) / len(groups) / config.num_generations
        print(f"step {step + 1}/{num_steps} · reward {reward:.4g} · grad_norm {norm:.4g}")
    policy.save_pretrained(config.output_dir)


def main(config: TrainConfig) -> None:
    """Connect the servers and the reward workers, and train.

    Raises:
        UserError: the config asks for a part of train.py that this loop leaves out.
    """
    if config.has_reference or config.updates_per_batch > 1 or config.rollout_fn:
        raise UserError("plain_loop has no reference, rollout_fn or second update: use train.py")
    tokenizer = tokenizer_of(load_processor(config))
    with (
        process_group(config.collective_timeout) as device,
        closing(ServerPool(config, tokenizer)) as pool,
        closing(Scorer(tokenizer, config)) as scorer,
    ):
        pool.wait_until_ready()
        pool.connect(device)
        plain_loop(config, pool, scorer, device)


if __name__ == "__main__":
    with exits({UserError: "", ServerError: ""}):
        main(parse_args(sys.argv[1:]))
