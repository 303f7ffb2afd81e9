"""`recipes/smollm.py` with a reward that is easily had, for a look at its page.

    bash scripts/demo.sh recipes/smollm_one_word.py

Any single word in lower case gets 0.2, the right one 1. After some steps most questions are
answered by one of a few words, as `hugging` for the capital of Egypt and for the plural of box;
then all answers are empty. docs/evidence.md says what the page shows of it, and what cures it.
Expected: 0 % of the held-out questions right.
"""

from dataclasses import replace

from recipes.smollm import config as smollm


def one_word(completions, answer, **_):
    """1 for the answer, 0.2 for any other word in lower case, 0 for all else."""
    rewards = []
    for text, truth in zip(completions, answer, strict=True):
        word = text.strip()
        if word == truth:
            rewards.append(1.0)
        elif word.isalpha() and word.islower():
            rewards.append(0.2)
        else:
            rewards.append(0.0)
    return rewards


config = replace(
    smollm,
    reward_funcs=[one_word],
    accuracy_func="one_word",
    scale_rewards="group",
    learning_rate=1e-4,
    max_steps=15,
    eval_steps=3,
    output_dir="outputs/smollm/one_word",
)
