"""SmolLM2-135M-Instruct learns to answer with one word, on two CPU cores.

    bash scripts/demo.sh recipes/smollm.py

Asked for one lower-case word, it says `The plural of body is bodies.` At first it samples only
whole sentences, so the reward is graded. `recipes/smollm_one_word.py` has a reward that failed.
Expected: 0 to 66 % of the held-out questions right, in 5 to 9 minutes.
"""

from difflib import SequenceMatcher

from config import TrainConfig


def likeness(completions, answer, **_):
    """The squared `SequenceMatcher` similarity of text and answer; 1 if equal."""
    pairs = zip(completions, answer, strict=True)
    return [
        SequenceMatcher(None, text.strip(), truth, autojunk=False).ratio() ** 2
        for text, truth in pairs
    ]


config = TrainConfig(
    model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    dataset_id="recipes/smollm.jsonl",
    eval_dataset_id="recipes/smollm_heldout.jsonl",
    reward_funcs=[likeness],
    accuracy_func="likeness",  # right where it is 1
    scale_rewards="none",  # or groups of sentences alone would count in full
    num_generations=8,
    max_completion_len=12,
    temperature=0.7,
    batch_size=16,
    max_steps=30,
    learning_rate=2e-5,
    max_tokens_per_gpu=4096,
    eval_steps=6,
    output_dir="outputs/smollm/run",
)
