"""On-policy distillation (arXiv:2306.13649) on the tiny sorter: a teacher's log-probs of what the student says.

    bash scripts/demo.sh                               # trains the teacher
    bash scripts/demo.sh recipes/distillation.py

The student starts as the teacher did, and learns from no reward: `exact_match` is only reported. Teacher and student
share the forward of each prompt. Expected: the teacher's held-out accuracy, within 3 points.
"""

from dataclasses import replace

import torch

from recipes import tiny


def reverse_kl(logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config):
    """The policy gradient of KL(student || teacher) of each next token (arguments as `train.grpo_loss`, [N] each)."""
    ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).exp()
    gap = torch.where(mask > 0, logprobs.detach() - ref_logprobs, 0.0)
    return (ratio * gap).sum(), {"loss/reverse_kl": gap.sum()}


config = replace(
    tiny.config,
    reference_id="outputs/tiny/run/checkpoint-150",
    loss_fn=reverse_kl,
    max_steps=300,
    learning_rate=4e-4,
    output_dir="outputs/tiny/distilled",
)
