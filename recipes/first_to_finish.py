"""Two completions more than a group needs: the last two are aborted.

    bash scripts/demo.sh recipes/first_to_finish.py

On `recipes/tiny.py`. Nobody waits for the longest ones. That saves time where lengths differ much,
and biases the batch towards short ones.
"""

from dataclasses import replace

from recipes import tiny
from vllm_client import first_choices

EXTRA = 2


def first_to_finish(num, reply):
    """The first `num` completions to end, and the prompt's tokens as served."""
    completions, prompt_ids = first_choices(num, reply)
    return list(completions.values()), prompt_ids


def sample(server, prompt, sampling):
    """Sample all by one request; evaluating one completion needs no others."""
    if sampling["n"] == 1:
        return server.generate(prompt.token_ids, sampling, prompt.images)
    how = {"read": first_to_finish, "extra": EXTRA}
    return server.generate(prompt.token_ids, sampling, prompt.images, **how)


config = replace(tiny.config, rollout_fn=sample, output_dir="outputs/tiny/first_to_finish")
