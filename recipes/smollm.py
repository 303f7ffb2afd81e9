"""SmolLM2-135M-Instruct learns to answer with one word, on two CPU cores.

    bash scripts/demo.sh recipes/smollm.py
"""

from difflib import SequenceMatcher

from config import TrainConfig


def likeness(completions, answer, **_):
    """1 for the answer and nothing else; below that, how much of the text it is (2 x what is common / both lengths)."""
    pairs = zip(completions, answer, strict=True)
    return [SequenceMatcher(None, text.strip(), truth, autojunk=False).ratio() for text, truth in pairs]


config = TrainConfig(
    model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    dataset_id="recipes/smollm.jsonl",
    eval_dataset_id="recipes/smollm_heldout.jsonl",
    reward_funcs=[likeness],
    num_generations=8,
    max_completion_len=12,
    temperature=0.7,
    batch_size=16,
    max_steps=40,
    learning_rate=2e-5,
    max_tokens_per_gpu=4096,
    eval_steps=10,
    output_dir="outputs/smollm/run",
)
