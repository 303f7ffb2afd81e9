"""`recipes/tiny.py` on a JSONL file with columns of its own.

    bash scripts/demo.sh recipes/own_data.py

The prompt is made from them. Expected: 35 to 77 % held out; there are 512 problems.
"""

from config import TrainConfig
from recipes.rewards import exact_match


def with_prompt(rows):
    """Rows with a `prompt`, and the `answer` that `exact_match` asks for."""
    return [{"prompt": row["digits"] + "=", "answer": row["ordered"]} for row in rows]


config = TrainConfig(
    model_id="outputs/tiny/model",
    dataset_id="recipes/own_data.jsonl",
    eval_dataset_id="recipes/own_heldout.jsonl",
    collate_fn=with_prompt,
    reward_funcs=[exact_match],
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
    output_dir="outputs/tiny/own_data",
)
