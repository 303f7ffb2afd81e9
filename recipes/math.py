"""DeepSeek-R1-Distill-Qwen-1.5B on competition mathematics, as DeepScaleR did.

    python scripts/launch.py recipes/math.py --servers 4 --trainers 4

Completions are long. Meant for eight GPUs of 80 GB. First 8192 tokens; once
`completions/clipped_ratio` falls no more, go on with 16384: `--max_completion_len 16384 --model_id
outputs/math/checkpoint-1000 --output_dir outputs/math16k`. Expected, and not measured here:
DeepScaleR reports 28.8 % of AIME 2024 for this model (mean of 16 samples) and 43.1 % after stages
of 8k, 16k and 24k tokens, of which these are two. An evaluation here is one greedy answer to each
of the 30 problems.
"""

from typing import Any

from config import TrainConfig
from recipes.rewards import math_answer

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def with_instruction(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`problem` and `answer` as rows with a `prompt`."""
    return [{"prompt": f"{row['problem']} {INSTRUCTION}", "answer": row["answer"]} for row in rows]


config = TrainConfig(
    model_id="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    dataset_id="agentica-org/DeepScaleR-Preview-Dataset",
    eval_dataset_id="HuggingFaceH4/aime_2024::train",
    collate_fn=with_instruction,
    reward_funcs=[math_answer],
    vllm_urls=[f"http://127.0.0.1:800{number}" for number in range(4)],
    max_staleness=2,
    num_generations=8,
    max_completion_len=8192,
    temperature=0.6,
    request_timeout=2400,
    batch_size=128,
    max_steps=1000,
    learning_rate=1e-6,
    loss_type="dapo",
    drop_zero_advantage=True,
    use_fsdp=True,
    fsdp_bf16=True,
    gradient_checkpoint=True,
    max_tokens_per_gpu=32768,
    eval_steps=25,
    save_steps=25,
    keep_last_n=3,
    resume_from_checkpoint="auto",
    output_dir="outputs/math",
)
