"""What stands between two turns of a conversation, for a `rollout_fn`: docs/agents.md."""

from typing import Any


def turn_ids(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    reply_ids: Any,
    then: list[dict[str, Any]],
    **template: Any,
) -> list[int] | None:
    """What the chat template puts between a reply, as it was sampled, and the next one; None where it rewrites history.

    Renders `messages`, for which `reply_ids` [n] were sampled, and these with the reply and `then`, the messages that
    answer it; returns the ids of what the second has behind the reply. No sampled token is tokenized again, and
    `Completion.then` joins them. None where the second does not begin with the first and the reply, white space aside
    (stripped thinking): then the next turn is a segment, whose prompt is that rendering. `template` is what else the
    template takes, as for the first turn (`tools`, `enable_thinking`).
    """
    text, last = tokenizer.decode(reply_ids), int(reply_ids[-1])
    said = {"role": "assistant", "content": tokenizer.decode(reply_ids, skip_special_tokens=True)}
    before, after = (
        tokenizer.apply_chat_template(of, tokenize=False, add_generation_prompt=True, **template)
        for of in (messages, [*messages, said, *then])
    )
    rest = after[len(before) :]
    reply = "".join(text.split())
    if not after.startswith(before) or not "".join(rest.split()).startswith(reply):
        return None
    ends = [0, *(place for place, letter in enumerate(rest, 1) if not letter.isspace())]
    between = rest[ends[len(reply)] :].removeprefix(
        text[len(text.rstrip()) :]
    )  # white space that was sampled
    is_token = last in tokenizer.added_tokens_decoder
    # Behind that token, which is then dropped: some tokenizers treat the beginning of a text in a way of their own.
    ids = tokenizer(tokenizer.decode([last]) * is_token + between, add_special_tokens=False)[
        "input_ids"
    ]
    return ids[is_token:]
