"""On-policy distillation (arXiv:2306.13649) on the tiny sorter.

    bash scripts/demo.sh                               # trains the teacher
    bash scripts/demo.sh recipes/distillation.py

The loss compares with a teacher's log-probs of what the student says. The student starts as the
teacher did, and learns from no reward: `exact_match` is only reported. Teacher and student share
the forward of each prompt. Expected: 35 to 91 % held out; the teacher has 92 %.
"""

from dataclasses import replace

from recipes import tiny
from train import bounded_log_ratio


def k3(logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config):
    """A sampled estimate of each next token's KL(teacher || student), when differentiated.

    exp(Δ) - Δ - 1 with Δ = log p_teacher - log p_student (arguments as `grpo_loss`, [N]). Its
    gradient is bounded where the teacher would never say what the student said. That of KL(student
    || teacher), -Δ ∇log p_student, is not, and learns more slowly here.
    """
    gap = bounded_log_ratio(ref_logprobs, logprobs, mask)
    loss = (gap.exp() - gap - 1).sum()
    return loss, {"kl": loss.detach()}


config = replace(
    tiny.config,
    reference_id="outputs/tiny/run/checkpoint-150",
    loss_fn=k3,
    max_steps=250,
    output_dir="outputs/tiny/distilled",
)
