"""Rollouts side by side, and the tokens between two turns, for a `rollout_fn`: docs/agents.md."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rollouts.processor import as_sampled
from rollouts.scoring import text_of

First = TypeVar("First")
Rollout = TypeVar("Rollout")


def side_by_side(play: Callable[[First], Rollout], firsts: Sequence[First]) -> list[Rollout]:
    """`play(first)` for each, in threads, so that the turns of a group are sampled together.

    Returns the rollouts in the order of `firsts`. When all have ended, the error of the earliest in
    that order is raised.
    """
    with ThreadPoolExecutor(max(len(firsts), 1)) as pool:
        return list(pool.map(play, firsts))


def turn_ids(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    reply_ids: Any,
    then: list[dict[str, Any]],
    **template: Any,
) -> list[int] | None:
    """The chat template's ids between a sampled reply and the next.

    The difference of two renderings, from the end of the reply on: of `messages`, and of these with
    the reply and `then`. No sampled token is tokenized again, and `Completion.then` joins them.

    Args:
        tokenizer: of the model, with a chat template.
        messages: the conversation for which the reply was sampled.
        reply_ids: its tokens [n].
        then: the messages that answer it.
        template: what else the template takes, as for the first turn: `prompt.template`.

    Returns:
        None where the template rewrites history (stripped thinking): where the second rendering
        does not begin with the first and the reply, white space aside. Then the next turn is a
        segment, whose prompt is that rendering.
    """

    def rendered(conversation: list[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **template
        )

    reply = as_sampled(reply_ids, tokenizer)
    said = text_of(reply_ids, tokenizer)
    before = rendered(messages)
    after = rendered([*messages, {"role": "assistant", "content": said}, *then])
    if not after.startswith(before):
        return None

    rest = after[len(before) :]
    end = end_of(reply, rest)
    if end is None:
        return None
    sampled_space = reply[len(reply.rstrip()) :]
    between = rest[end:].removeprefix(sampled_space)

    last = int(reply_ids[-1])
    if last not in tokenizer.added_tokens_decoder:
        return tokenizer(between, add_special_tokens=False)["input_ids"]
    # Behind that token, which is then dropped: some tokenizers treat the beginning of a text in a
    # way of their own.
    with_last = as_sampled([last], tokenizer) + between
    return tokenizer(with_last, add_special_tokens=False)["input_ids"][1:]


def end_of(reply: str, text: str) -> int | None:
    """The end of the reply with which a text begins, or None.

    A place in the text. White space does not count; None where the text begins otherwise.
    """
    letters = "".join(reply.split())
    if not "".join(text.split()).startswith(letters):
        return None
    ends = [0]
    for place, letter in enumerate(text, 1):
        if not letter.isspace():
            ends.append(place)
    return ends[len(letters)]
