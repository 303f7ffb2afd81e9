"""SmolLM2-135M-Instruct learns to answer with one word, on two CPU cores.

    bash scripts/demo.sh recipes/smollm.py

Asked for one word in lower case, it says `The plural of body is bodies.` The reward is graded, as whole sentences are
all that it samples at first. Two that seemed right were not: 0.2 for any single word was had by `admiration` for each
question after 12 steps, and 0.5 over the number of words, where the answer is one of them, left it with its sentences.
`scripts/show.py` tells such things. Expected: RESULT
"""

from difflib import SequenceMatcher

from config import TrainConfig


def likeness(completions, answer, **_):
    """1 for the answer alone; else the square of twice what the text has in common with it over both lengths."""
    pairs = zip(completions, answer, strict=True)
    return [SequenceMatcher(None, text.strip(), truth, autojunk=False).ratio() ** 2 for text, truth in pairs]


config = TrainConfig(
    model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    dataset_id="recipes/smollm.jsonl",
    eval_dataset_id="recipes/smollm_heldout.jsonl",
    reward_funcs=[likeness],
    scale_rewards="none",  # a group of sentences alone has little to say
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
