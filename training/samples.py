"""Completions as lines of a run's logs, for people."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from config import TrainConfig
from rollouts.group import Completion, Group, rollout_number, version_spans
from training.thumbnails import image_name

MAX_SHOWN = 2000  # characters of a column, of a message, of a segment's prompt
UNREADABLE = "\ufffd"  # what a part of a character is decoded as
MAX_PARTS = 4  # tokens of a character, as UTF-8 has at most four bytes for it


class TokenTexts:
    """The text of each token, for a reader who goes from token to token.

    A character of several tokens is given whole to the last of them, and "" to the others. Joined,
    the texts are the decoded completion, except where its bytes are not valid UTF-8.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: list[int]) -> list[str]:
        """One text a token."""
        texts: list[str] = []
        part: list[int] = []  # tokens that make no whole character yet
        for token_id in token_ids:
            text = self._text(token_id)
            if UNREADABLE not in text:
                self._end_part(part, texts)
                texts.append(text)
                continue

            part.append(token_id)
            texts.append("")
            if len(part) == MAX_PARTS or UNREADABLE not in self.tokenizer.decode(part):
                self._end_part(part, texts)

        self._end_part(part, texts)
        return texts

    def _end_part(self, part: list[int], texts: list[str]) -> None:
        """Give the text of a part, whole or not, to its last token."""
        if part:
            texts[-1] = self.tokenizer.decode(part)
            part.clear()

    def _text(self, token_id: int) -> str:
        if token_id not in self._known:
            # Behind another token: at the beginning of a text some tokenizers leave out a space.
            once = self.tokenizer.decode([token_id])
            twice = self.tokenizer.decode([token_id, token_id])
            self._known[token_id] = twice.removeprefix(once)
        return self._known[token_id]


def batch_samples(
    groups: list[Group],
    config: TrainConfig,
    texts: TokenTexts | None = None,
    mismatches: Mapping[int, float] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """One JSON object a completion.

    `texts` adds its tokens and their log-probs; the mismatches are those of a `Batch`.
    """
    functions: Any = config.reward_funcs
    names = [function.__name__ for function in functions]
    samples = []
    for group in groups:
        of_prompt = prompt_fields(group)
        # A held-out group whose rollouts were refused may have completions, and no texts.
        for number, text in enumerate(group.texts):
            completion = group.completions[number]
            sample = {
                **of_prompt,
                "completion": text,
                "reward": group.reward[number],
                "rewards": dict(zip(names, group.rewards[number].tolist(), strict=True)),
            }
            if group.advantages:  # held-out completions have none
                sample["advantage"] = group.advantages[number]

            mismatch = mismatches.get(rollout_number(group, number))
            if mismatch is not None:
                sample["mismatch"] = mismatch
            sample["finish_reason"] = completion.finish_reason
            sample["info"] = shortened_info(completion.info)
            sample |= token_fields(completion, texts)
            if texts and len(group.segments[number]) > 1:
                sample["earlier"] = [
                    segment_fields(part, group, texts) for part in group.segments[number][:-1]
                ]
            samples.append(sample)
    return samples


def prompt_fields(group: Group) -> dict[str, Any]:
    """The fields that a group's completions share; images by the names of their files."""
    prompt = group.prompt
    fields = {
        "group": group.id,
        "row": prompt.index,
        "prompt": prompt.content,
        "columns": shortened(prompt.columns),
    }
    if prompt.set:
        fields["set"] = prompt.set
    if prompt.images:
        fields["images"] = [image_name(url) for url in prompt.images.urls]
    return fields


def token_fields(completion: Completion, texts: TokenTexts | None) -> dict[str, Any]:
    """A completion's versions, and with `texts` its tokens and the server's log-probs."""
    fields: dict[str, Any] = {"weight_versions": version_spans(completion.weight_versions)}
    if texts:
        fields["tokens"] = texts(completion.token_ids.tolist())
        fields["logprobs"] = rounded(completion.sampler_logprobs)
    return fields


def segment_fields(segment: Completion, group: Group, texts: TokenTexts) -> dict[str, Any]:
    """The fields of a segment before the last, with the end of a prompt of its own."""
    fields = token_fields(segment, texts)
    own_prompt = segment.prompt_ids
    if own_prompt is not None and own_prompt.tolist() != group.prompt.token_ids:
        end = own_prompt[-MAX_SHOWN:]  # a token has a character, as a rule
        fields["prompt"] = texts.tokenizer.decode(end)[-MAX_SHOWN:]
    return fields


def rounded(logprobs: Tensor) -> list[float]:
    """Log-probs to a hundredth of a nat: 5 bytes each."""
    hundredths = (logprobs.double() * 100).round()
    return [value / 100 if math.isfinite(value) else value for value in hundredths.tolist()]


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """Columns whose text is cut to `MAX_SHOWN` characters."""
    found = {}
    for name, value in values.items():
        text = value if isinstance(value, str) else repr(value)
        found[name] = value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN]
    return found


def shortened_info(info: dict[str, Any]) -> dict[str, Any]:
    """An environment's columns; of a conversation each message is cut by itself."""
    found = shortened(info)
    messages = info.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        found["messages"] = [shortened(message) for message in messages]
    return found
