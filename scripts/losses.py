"""Compare two losses on identical data: the saved rollouts of a run, step by step.

    python scripts/losses.py RUN a.py b.py [--field value ...]

RUN is the output_dir of a run with `--parts recipes.replay.save`; a.py and b.py are recipes of its model and data that differ in
what makes a gradient: the loss and its settings, advantages, corrections. Each step prints the norms of both gradients
of the whole batch and their cosine, at the same policy and before clipping. Then the policy takes a's step. There is
one update per batch, so ratios differ from 1 only with `--old_logprobs sampler`. Fields are set in both recipes.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from config import TrainConfig, UserError, parse_args
from recipes.replay import replaying
from rollouts.rollouts import Rollouts
from train import set_advantages, train_batch
from training.batching import MicroBatch
from training.model import build_policy, build_reference, share_prefixes, with_bf16
from training.optimizer import build_optimizer
from utils import Stopped, process_group

OF_POLICY = ("model_id", "use_peft", "lora_rank", "lora_alpha", "lora_target_modules", "dtype")
IDLE: Any = SimpleNamespace(step=lambda: None)  # a schedule of no learning rate


def gradient(
    policy: Any, reference: Any, rows: list[MicroBatch], config: TrainConfig, device: torch.device
) -> Tensor:
    """The gradient of one batch in fp64, normalized and not clipped; 0 where it is not finite."""
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    idle_optimizer = torch.optim.SGD(weights, lr=0.0)
    found = torch.zeros(sum(weight.numel() for weight in weights), dtype=torch.float64)

    def keep(*_: Any) -> None:
        parts = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        found.copy_(torch.cat([part.flatten().double().cpu() for part in parts]))

    idle_optimizer.register_step_pre_hook(keep)
    torch.manual_seed(0)  # the same dropout for both
    unclipped = replace(config, grad_norm=0.0)
    train_batch(policy, reference, idle_optimizer, IDLE, rows, unclipped, device)
    return found


def compare(configs: list[TrainConfig]) -> None:
    """Print both gradients of every step."""
    a, b = configs
    with (
        process_group(600) as device,
        closing(Rollouts(a, device)) as of_a,
        closing(Rollouts(b, device)) as of_b,
    ):
        torch.manual_seed(a.seed)
        policy = build_policy(a, device, of_a.example)
        a = share_prefixes(policy, a, of_a.example)
        b = share_prefixes(policy, b, of_a.example)
        of_a.set_config(a)
        of_b.set_config(b)
        reference_a = build_reference(policy, a, device, of_a.example)
        reference_b = build_reference(policy, b, device, of_a.example)
        optimizer, scheduler = build_optimizer(policy, of_a.num_steps, a)
        for step in range(1, of_a.num_steps + 1):
            for rollouts in (of_a, of_b):
                rollouts.publish(policy, step - 1)
            try:
                batch_a = list(of_a.next_batch(set_advantages))
                batch_b = list(of_b.next_batch(set_advantages))
            except Stopped:
                if failure := of_a.failure or of_b.failure:
                    raise failure from None
                break  # the run has no more steps
            for rollouts in (of_a, of_b):
                rollouts.end_batch({})
            one = gradient(policy, reference_a, batch_a, a, device)
            two = gradient(policy, reference_b, batch_b, b, device)
            norms = f"{one.norm():.4g} {two.norm():.4g}"
            cosine = (one @ two) / (one.norm() * two.norm())  # NaN where one of them is 0
            print(f"step {step} · norms {norms} · cosine {cosine:.4f}", flush=True)
            train_batch(policy, reference_a, optimizer, scheduler, batch_a, a, device)


def main(argv: list[str]) -> None:
    """Command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run's output_dir")
    parser.add_argument("recipes", nargs=2, metavar="RECIPE")
    args, fields = parser.parse_known_args(argv)
    try:
        words = ["--num_iterations", "1", "--num_minibatches", "1", "--max_steps", "none"]
        words += ["--output_dir", f"{args.run}-unused"]  # nothing is written there
        given = [parse_args([recipe, *fields, *words]) for recipe in args.recipes]
        configs = [with_bf16(replaying(config, args.run)) for config in given]
        if {config.old_logprobs for config in configs} == {"trainer"}:
            cure = "with --old_logprobs sampler they are against the server's log-probs"
            print(f"all ratios are 1: {cure}", flush=True)
        if any(config.reference_decay is not None for config in configs):
            cure = "unset reference_decay"
            raise UserError(f"nothing is trained here, so no reference follows: {cure}")
        for name in OF_POLICY:
            if len({str(getattr(config, name)) for config in configs}) > 1:
                raise UserError(f"the recipes differ in {name}: both gradients are of one policy")
        compare(configs)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
