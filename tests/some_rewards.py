"""Reward functions for the tests, in a module that imports little: worker processes import it."""

import time


def right(prompts, completions, completion_ids, answer):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer) == 2
    return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]


def only_first(prompts, **_):
    return [2.0 if prompt == "1+1=" else None for prompt in prompts]


def always_one(completions, **_):
    return [1.0] * len(completions)


def raises(**_):
    raise KeyError("gold")


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
