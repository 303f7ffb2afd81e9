"""Reward functions for the tests, in a module that imports nothing: worker processes import it."""

import time
from decimal import Decimal


def right(prompts, completions, completion_ids, answer):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer) == 2
    return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]


def only_first(prompts, **_):
    return [2.0 if prompt == "1+1=" else None for prompt in prompts]


def raises(**_):
    raise KeyError("gold")


def short(**_):
    return [1.0]


def scalar(**_):
    return 1.0


def hangs(**_):
    time.sleep(60)


def spread(completion_ids, **_):
    """What random models, which are never right, can learn."""
    return [sum(ids) / len(ids) / 50 for ids in completion_ids]


def changes(notes, prompts, **_):
    values = []
    for note, prompt in zip(notes, prompts, strict=True):
        values.append(float(len(note) + len(prompt) + len(prompt[0]["content"])))
        note.append("x")
        prompt.append("y")
        prompt[0]["content"] += "y"
    return values


def other_numbers(**_):
    import numpy as np

    return [np.bool_(True), Decimal("0.5")]


def arrays(**_):
    import numpy as np

    return [np.ones(2), 1.0]


def large(**_):
    return [1.0, 10**400]


def largest(**_):
    return [1.0, 1.7e308]


def numbers_as_text(**_):
    return ["1.0", "2"]
