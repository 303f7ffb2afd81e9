"""`recipes/tiny.py` with a loss of its own: REINFORCE without a clipped ratio.

    bash scripts/demo.sh recipes/own_loss.py

It replaces `train.grpo_loss`, with the same arguments, [N] each. Baseline, normalizer and the
weights of stale tokens stay. Expected: 35 to 93 %.
"""

from config import TrainConfig
from recipes.rewards import exact_match


def reinforce(logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config):
    """The sum of -A log p over trained tokens, without metrics."""
    return -(advantages * logprobs).where(mask > 0, 0.0).sum(), {}


config = TrainConfig(
    model_id="outputs/tiny/model",
    dataset_id="outputs/tiny/train.jsonl",
    eval_dataset_id="outputs/tiny/heldout.jsonl",
    reward_funcs=[exact_match],
    loss_fn=reinforce,
    no_apply_chat_template=True,
    num_generations=8,
    max_completion_len=12,
    batch_size=64,
    max_steps=150,
    learning_rate=3e-4,
    lr_scheduler="linear",
    warmup_ratio=0.03,
    max_tokens_per_gpu=2048,
    eval_steps=25,
    output_dir="outputs/tiny/own_loss",
)
