"""Rows of prompts and completions for a training forward, and the log-probabilities of their completion tokens.

    rows = pack(groups, max_tokens=8192, share_prefix=False)      # groups: (prompt_ids, [completion_ids, ...])
    for row in rows:
        logprobs = completion_logprobs(model, row)                # [N], group by group, completion by completion

This is the reference path: one plain right-padded row per completion through the model's stock attention, exact for
every causal language model. Needs only torch (and a Hugging Face model), and can be copied alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One forward's worth of tokens; R rows of T positions hold N completion tokens.

    Attributes:
        input_ids: [R, T] int64, right-padded.
        attention_mask: [R, T] int64, 1 on tokens. Built from lengths, never from the value of a token.
        row, position: [N] int64, where the logits that predict each completion token stand.
        targets: [N] int64, the completion tokens.
        completion: [N] int64, number of the completion among all completions given to `pack`.
        index: [N] int64, place of the token among all completion tokens given to `pack`, in the order group,
            completion, token: `per_token[row.index]` picks this row's part of any per-token tensor.
    """

    input_ids: Tensor
    attention_mask: Tensor
    row: Tensor
    position: Tensor
    targets: Tensor
    completion: Tensor
    index: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> Self:
        """The same row on `device`."""
        return type(self)(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def pack(
    groups: Sequence[tuple[list[int], list[list[int]]]], max_tokens: int | None = None, share_prefix: bool = True
) -> list[PackedBatch]:
    """Split groups into forwards of at most `max_tokens` positions (padding counted), in the given order.

    Args:
        groups: `(prompt_ids, completions)` of one prompt each; an empty completion contributes nothing.
        max_tokens: bound on R·T of a batch; None puts everything into one.
        share_prefix: False gives one row per completion, the only form so far.

    Raises:
        ValueError: an empty prompt, or a prompt and completion that alone exceed `max_tokens`, named by number.
    """
    if share_prefix:
        raise ValueError("rows that share a prefix are not available: call pack(..., share_prefix=False)")
    batches: list[PackedBatch] = []
    rows: list[_Row] = []
    number = start = 0
    for g, (prompt, completions) in enumerate(groups):
        if not prompt:
            raise ValueError(
                f"group {g} has an empty prompt: the first completion token has nothing to be predicted from"
            )
        for c, completion in enumerate(completions):
            row = _Row(prompt, completion, number, start)
            if max_tokens is not None and len(row) > max_tokens:
                raise ValueError(
                    f"completion {c} of group {g} has {len(row)} tokens with its prompt, over max_tokens={max_tokens}"
                )
            if max_tokens is not None and max(map(len, [*rows, row])) * (len(rows) + 1) > max_tokens:
                batches.append(_padded(rows))
                rows = []
            if completion:
                rows.append(row)
            number += 1
            start += len(completion)
    if rows:
        batches.append(_padded(rows))
    return batches


@dataclass(frozen=True)
class _Row:
    prompt: list[int]
    completion: list[int]
    number: int  # of the completion among all
    start: int  # of its tokens among all

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def _padded(rows: list[_Row]) -> PackedBatch:
    input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    places = []
    for r, row in enumerate(rows):
        input_ids[r, : len(row)] = torch.tensor(row.prompt + row.completion)
        attention_mask[r, : len(row)] = 1
        places += [
            (r, len(row.prompt) - 1 + t, token, row.number, row.start + t) for t, token in enumerate(row.completion)
        ]
    return PackedBatch(input_ids, attention_mask, *torch.tensor(places).T.contiguous())


@overload
def completion_logprobs(
    model: Any, row: PackedBatch, temperature: float = 1.0, return_entropy: Literal[False] = False
) -> Tensor: ...
@overload
def completion_logprobs(
    model: Any, row: PackedBatch, temperature: float = 1.0, *, return_entropy: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@overload
def completion_logprobs(
    model: Any, row: PackedBatch, temperature: float, return_entropy: bool
) -> Tensor | tuple[Tensor, Tensor]: ...
def completion_logprobs(
    model: Any, row: PackedBatch, temperature: float = 1.0, return_entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """log p(token | prompt, completion so far) at a sampling temperature, for every completion token of `row`.

    The head runs only on positions that predict a completion token in some row.

    Args:
        model: a Hugging Face causal language model, wrapped or not.
        row: from `pack`.
        temperature: logits are divided by it.
        return_entropy: also return the entropy of each of the N distributions (no gradient).

    Returns:
        [N] fp32 (fp64 for an fp64 model), nats, in the order group, completion, token; differentiable.
    """
    columns, column = row.position.unique(return_inverse=True)
    logits = model(
        input_ids=row.input_ids, attention_mask=row.attention_mask, use_cache=False, logits_to_keep=columns
    ).logits
    logits = logits[row.row, column]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits / temperature
    normalizer = logits.logsumexp(-1)
    logprobs = logits.gather(-1, row.targets[:, None])[:, 0] - normalizer
    if not return_entropy:
        return logprobs
    with torch.no_grad():
        entropy = normalizer - ((logits - normalizer[:, None]).exp() * logits).sum(-1)
    return logprobs, entropy
