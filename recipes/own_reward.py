"""`recipes/tiny.py` with a reward function of its own.

    bash scripts/demo.sh recipes/own_reward.py

It gives a part for each digit in its place. Expected: 79 to 98 % of them held out.
"""

from operator import eq

from config import TrainConfig


def in_place(completions, answer, **_):
    """The share of the answer's digits that stand where they belong."""
    pairs = zip(completions, answer, strict=True)
    return [sum(map(eq, text, truth)) / len(truth) for text, truth in pairs]


config = TrainConfig(
    model_id="outputs/tiny/model",
    dataset_id="outputs/tiny/train.jsonl",
    eval_dataset_id="outputs/tiny/heldout.jsonl",
    reward_funcs=[in_place],
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
    output_dir="outputs/tiny/own_reward",
)
