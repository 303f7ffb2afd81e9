"""`recipes/smollm.py` through a `rollout_fn`: another try where there are several words.

    bash scripts/demo.sh recipes/smollm_asked_again.py

An answer of several words is met by `One word only.`. The reward looks at the last answer, and both
train. Expected: 0 to 66 % of the held-out questions right, in 5 minutes.
"""

from dataclasses import replace

from recipes.smollm import config as smollm
from recipes.smollm import likeness
from recipes.turns import side_by_side

# The chat template puts this between the end of an answer, which is sampled, and the next one.
AGAIN = "\n<|im_start|>user\nOne word only.<|im_end|>\n<|im_start|>assistant\n"


def ask_again(server, prompt, sampling):
    """`sampling["n"]` answers, each with a second try where it has several words."""

    def second_try(first):
        text = server.tokenizer.decode(first.token_ids).strip()
        if first.finish_reason == "length" or " " not in text:
            return first
        said = server.tokenizer(AGAIN, add_special_tokens=False)["input_ids"]
        ids = [*prompt.token_ids, *first.token_ids.tolist(), *said]
        (second,) = server.generate(ids, {**sampling, "n": 1})
        return first.then(said, second)

    return side_by_side(second_try, server.generate(prompt.token_ids, sampling))


def last_likeness(completions, answer, **_):
    """`likeness` of the last answer."""
    return likeness([text.rpartition("assistant\n")[2] for text in completions], answer)


config = replace(
    smollm,
    rollout_fn=ask_again,
    reward_funcs=[last_likeness],
    accuracy_func="last_likeness",
    max_completion_len=16,
    output_dir="outputs/smollm/asked_again",
)
