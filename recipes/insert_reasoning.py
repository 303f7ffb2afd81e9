r"""Half of a group thinks again: cut at random, cued, sampled on.

    bash scripts/demo.sh recipes/insert_reasoning.py

On `recipes/tiny.py`. As `insert_reasoning_phrases` of async-grpo, but within the group's size, and
without training the cue: only what the policy sampled before and after it trains. A model of
language wants `CUE = "Wait! "` and `BREAK = "\n\n"`. Expected, without the cue: 35 to 88 %.
"""

import random
from dataclasses import replace
from functools import partial

from recipes import tiny
from recipes.rewards import exact_match
from recipes.turns import side_by_side
from rollouts.group import Completion

CUE = "="  # after which the tiny model begins its answer again
BREAK = ""  # a token that ends with it may be the last before a cut


def begin(turn: Completion, num: int) -> Completion:
    """The first `num` tokens of a turn that was sampled."""
    return Completion(
        turn.token_ids[:num], turn.sampler_logprobs[:num], "length", turn.weight_versions[:num]
    )


def sample_on(server, prompt, sampling, turn):
    """Cut a turn at random, and sample on after the cue.

    The cut is at a place where the turn may be cut, after a token that ends with `BREAK`.
    """
    cue = server.tokenizer(CUE, add_special_tokens=False)["input_ids"]
    last = min(len(turn.token_ids), sampling["max_tokens"] - len(cue))  # leave room for a token
    texts = [server.tokenizer.decode(token) for token in turn.token_ids.tolist()]
    places = [place for place in range(1, last) if texts[place - 1].endswith(BREAK)]
    if not places:
        return turn

    kept = begin(turn, random.choice(places))
    ids = [*prompt.token_ids, *kept.token_ids.tolist(), *cue]
    room = sampling["max_tokens"] - len(kept.token_ids) - len(cue)
    (reply,) = server.generate(ids, {**sampling, "n": 1, "max_tokens": room}, prompt.images)
    return kept.then(cue, reply)


def think_again(server, prompt, sampling):
    """Sample half of a group, then as many from random places within.

    A group of one is sampled whole.
    """
    num_again = sampling["n"] // 2
    first = {**sampling, "n": sampling["n"] - num_again}
    turns = server.generate(prompt.token_ids, first, prompt.images)

    again = side_by_side(partial(sample_on, server, prompt, sampling), turns[:num_again])
    return [*turns, *again]


def right_at_last(completions: list[str], answer: list[str], **_) -> list[float]:
    """1 where the `answer` column follows the last cue, else 0."""
    return exact_match([text.rpartition(CUE)[2] for text in completions], answer)


config = replace(
    tiny.config,
    rollout_fn=think_again,
    reward_funcs=[right_at_last],
    max_completion_len=20,
    output_dir="outputs/tiny/insert_reasoning",
)
