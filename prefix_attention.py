"""Shared-prefix attention: forward each prompt once for all its completions, exactly.

    model = attach(AutoModelForCausalLM.from_pretrained(...))
    for row in pack(groups, max_tokens=8192):                     # groups: (prompt_ids, [completion_ids, ...])
        logprobs = completion_logprobs(model, row)                # [N], in the order group, completion, token

`pack` lays trees of segments (a prompt, its completions) into rows without padding. `attach` teaches a Hugging Face
model to run such a row: every segment sees itself causally and its ancestors whole, and positions go on from the
parent's end. `completion_logprobs` runs the head on the positions that predict a completion token, chunk by chunk, and
never holds the logits of a row. Needs only torch and transformers, and can be copied alone into another project.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import accumulate, groupby, pairwise
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NAME = "shared_prefix"  # under which transformers knows the attention function
HEAD_CHUNK = {"cpu": 1 << 23, "cuda": 1 << 27}  # logits alive at a time
QUERY_BLOCK = 512  # queries at a time in the attention loop
SMALL = 64  # tokens of segments that attend together on the CPU, where a call costs more than its work

# --------------------------------------------------------------------------------------------------------------------
# Rows


@dataclass(frozen=True)
class PackedBatch:
    """One forward's worth of tokens; R rows of T positions hold N completion tokens.

    Where prefixes are shared, one row of segments without padding; else a right-padded row per completion.

    Attributes:
        input_ids, position_ids: [R, T] int64; positions restart in every completion where its prompt ended.
        attention_mask: [R, T] int64, 1 on tokens, built from lengths, never from the value of a token; None where
            prefixes are shared.
        segments: [S, 3] int64 on the CPU, (start, length, parent): a forest, parents first, depth first, -1 without a
            parent; None without sharing.
        row, position: [N] int64, where the logits that predict each completion token stand.
        targets: [N] int64, the completion tokens.
        group, completion: [N] int64, number of the group and of the completion among all given to `pack`.
        index: [N] int64, place of the token among all completion tokens given to `pack`, in the order group,
            completion, token: `per_token[row.index]` picks this row's part of any per-token tensor.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    segments: Tensor | None
    row: Tensor
    position: Tensor
    targets: Tensor
    group: Tensor
    completion: Tensor
    index: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded, padding included."""
        return self.input_ids.numel()

    @property
    def prompts(self) -> list[int]:
        """Numbers of the groups whose prompts are forwarded, in their order, once for each time."""
        if self.segments is None:
            place, num = self.row, len(self.input_ids)
        else:
            starts = self.segments[self.segments[:, 2] < 0, 0].to(self.position.device)
            place, num = torch.searchsorted(starts, self.position, right=True) - 1, len(starts)
        return self.group.new_zeros(num).index_put((place,), self.group).tolist()

    def to(self, device: torch.device | str) -> Self:
        """The same row on `device`; `segments` stay on the CPU, where attention reads them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{n: v if v is None or n == "segments" else v.to(device) for n, v in values.items()})


def unpad(input_ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The rows of a left- or right-padded batch [B, T] as lists of token ids, for `pack`; `mask` [B, T]: 1 on those."""
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]


def pack(
    groups: Sequence[tuple[list[int], list[list[int]]]],
    max_tokens: int | None = None,
    share_prefix: bool = True,
    share_completions: bool = False,
) -> list[PackedBatch]:
    """Groups as forwards of at most `max_tokens` positions, in the given order.

    Shared prefixes: first-fit, and a group larger than the budget is split with its prompt repeated. A completion's
    last token predicts nothing and is not forwarded.

    Args:
        groups: `(prompt_ids, completions)` of one prompt each; an empty completion contributes nothing.
        max_tokens: bound on R·T of a batch; None puts everything into one.
        share_prefix: False gives one right-padded row per completion, for any model's own attention.
        share_completions: forward leading tokens that completions of a group have in common once, too.

    Raises:
        ValueError: an empty prompt, or a prompt and completion that alone exceed `max_tokens`, named by number.
    """
    budget = math.inf if max_tokens is None else max_tokens
    rows: list[list[_Tree]] = []  # of trees laid one after the other; or, padded, one below the other
    number = place = 0
    for g, (prompt, completions) in enumerate(groups):
        if not prompt:
            raise ValueError(f"group {g} has an empty prompt: nothing predicts the first completion token")
        leaves = []
        for c, tokens in enumerate(completions):
            if tokens and len(prompt) + len(tokens) - 1 > budget:
                raise ValueError(
                    f"completion {c} of group {g} has {len(prompt) + len(tokens)} tokens with its prompt, over "
                    f"max_tokens={max_tokens}"
                )
            if tokens:
                leaves.append(_Leaf(tokens, g, number, place))
            number += 1
            place += len(tokens)
        alone = (_Tree(prompt, [leaf]) for leaf in leaves)
        for tree in _trees(prompt, leaves, budget, share_completions) if share_prefix else alone:
            open_rows = rows if share_prefix else rows[-1:]
            row = next((row for row in open_rows if _size([*row, tree], share_prefix) <= budget), None)
            if row is None:
                rows.append(row := [])
            row.append(tree)
    return [_batch(row, share_prefix) for row in rows]


def _size(trees: list["_Tree"], share_prefix: bool) -> int:
    lengths = [len(tree.tokens) for tree in trees]
    return sum(lengths) if share_prefix else len(lengths) * max(lengths)


@dataclass(frozen=True)
class _Leaf:
    """A completion: its tokens, its group's and its own number, and the place of its first token among all."""

    tokens: list[int]
    group: int
    number: int
    place: int


class _Tree:
    """A prompt and what is forwarded of its completions, as a sequence of segments, depth first."""

    def __init__(self, prompt: list[int], leaves: list[_Leaf], share_completions: bool = False):
        self.tokens = list(prompt)
        self.positions = list(range(len(prompt)))
        self.segments = [(0, len(prompt), -1)]
        self.share_completions = share_completions
        # where each token of each leaf is predicted from: its first one from the prompt's end
        self.sources = {leaf.number: [len(prompt) - 1] for leaf in leaves}
        self.leaves = leaves
        branches = self._branches(0, leaves, 0)
        while branches:  # depth first, without recursion: completions may branch at every token
            parent, branch, depth = branches.pop()
            rest = [leaf.tokens[depth:-1] for leaf in branch]
            length = min(map(len, rest))
            if len(branch) > 1:
                columns = zip(*rest, strict=False)
                length = next((i for i, column in enumerate(columns) if len(set(column)) > 1), length)
            start = len(self.tokens)
            self.tokens += rest[0][:length]
            self.positions += range(len(prompt) + depth, len(prompt) + depth + length)
            self.segments.append((start, length, parent))
            for leaf in branch:
                self.sources[leaf.number] += range(start, start + length)
            branches += self._branches(len(self.segments) - 1, branch, depth + length)

    def _branches(self, parent: int, leaves: list[_Leaf], depth: int) -> list[tuple[int, list[_Leaf], int]]:
        """What is left of `leaves` after `depth` tokens, all but their last token, by what begins alike; last first."""
        found: dict[int, list[_Leaf]] = {}
        for leaf in leaves:
            if len(leaf.tokens) - 1 > depth:
                key = leaf.tokens[depth] if self.share_completions else leaf.number
                found.setdefault(key, []).append(leaf)
        return [(parent, branch, depth) for branch in reversed(found.values())]

    def predictions(self, row: int, offset: int) -> list[Tensor]:
        """Of each leaf laid at `offset` [6, tokens]: row, position, target, group, completion, index."""
        found = []
        for leaf in self.leaves:
            places = torch.arange(leaf.place, leaf.place + len(leaf.tokens))
            same = (torch.full_like(places, number) for number in (row, leaf.group, leaf.number))
            rows, groups, completions = same
            positions = torch.tensor(self.sources[leaf.number]) + offset
            found.append(torch.stack([rows, positions, torch.tensor(leaf.tokens), groups, completions, places]))
        return found


def _trees(prompt: list[int], leaves: list[_Leaf], budget: float, share_completions: bool) -> list[_Tree]:
    """A group as one tree, or as consecutive ones that fit the budget, each with the prompt."""
    whole = _Tree(prompt, leaves, share_completions)
    if len(whole.tokens) <= budget:
        return [whole] if leaves else []
    pieces: list[list[_Leaf]] = []
    room = 0.0
    for leaf in leaves:
        room -= len(leaf.tokens) - 1
        if not pieces or room < 0:
            pieces.append([])
            room = budget - len(prompt) - len(leaf.tokens) + 1
        pieces[-1].append(leaf)
    return [_Tree(prompt, piece, share_completions) for piece in pieces]


def _batch(trees: list[_Tree], share_prefix: bool) -> PackedBatch:
    """Trees one after the other in a single row; or, not shared, a right-padded row for each."""
    rows = [trees] if share_prefix else [[tree] for tree in trees]
    width = max(sum(len(tree.tokens) for tree in row) for row in rows)
    input_ids, position_ids, attention_mask = torch.zeros(3, len(rows), width, dtype=torch.long).unbind()
    segments: list[tuple[int, int, int]] = []
    places: list[Tensor] = []
    for r, row in enumerate(rows):
        start = 0
        for tree in row:
            end, first = start + len(tree.tokens), len(segments)
            input_ids[r, start:end] = torch.tensor(tree.tokens)
            position_ids[r, start:end] = torch.tensor(tree.positions)
            attention_mask[r, start:end] = 1
            segments += [(start + at, size, up if up < 0 else first + up) for at, size, up in tree.segments]
            places += tree.predictions(r, start)
            start = end
    layout = (None, torch.tensor(segments)) if share_prefix else (attention_mask.clone(), None)
    # clones: a view would be sent to another process with all of its memory
    together = torch.cat(places, dim=1)
    columns = together[:, together[-1].argsort()].unbind()
    return PackedBatch(input_ids.clone(), position_ids.clone(), *layout, *(column.clone() for column in columns))


# --------------------------------------------------------------------------------------------------------------------
# Attention over a row of segments
#
# The cascade: every segment attends causally to itself, and what lies below a segment attends to it whole, in one
# call. As softmax over all keys = softmax over blocks of keys, merged by their log-sum-exps, this is exact, and no key
# or value is copied. The kernels' log-sum-exp is not differentiable, so autograd cannot go through the merge; but
# given the *merged* output and log-sum-exp, the backward of flash attention over one block of keys is just that block's
# part of the whole gradient (it makes p = exp(q·k - lse) again and needs rowsum(grad·out), nothing else).
#
# A plan is a row's segments with a fourth number, 1 for a segment that sees all of itself (an image in Gemma3's
# prompts), 0 for a causal one.


def _paths(segments: list[list[int]]) -> list[list[int]]:
    """For each segment, its ancestors and itself, root first."""
    paths: list[list[int]] = []
    for number, (_, _, parent, _) in enumerate(segments):
        paths.append([*(paths[parent] if parent >= 0 else []), number])
    return paths


@dataclass(frozen=True)
class _Block:
    """One kernel call of the cascade: pieces of queries, each of which sees its piece of keys.

    The CUDA kernel takes neighbouring pieces of any lengths; the CPU's takes pieces of one shape, from anywhere.
    `is_first` for the call that is the first one for its queries; the results of later ones are merged.
    """

    queries: list[slice]
    keys: list[slice]
    is_first: bool
    is_causal: bool


def _below(segments: list[list[int]]) -> list[tuple[int, slice, slice]]:
    """(depth, tokens of everything below it, its tokens) for each segment that has something below it."""
    ends = [_span(segment)[1] for segment in segments]
    for number in range(len(segments) - 1, -1, -1):  # depth first: what is below follows at once
        if (parent := segments[number][2]) >= 0:
            ends[parent] = max(ends[parent], ends[number])
    found: list[tuple[int, slice, slice]] = []
    depths: list[int] = []
    for segment, end in zip(segments, ends, strict=True):
        depths.append(depths[segment[2]] + 1 if segment[2] >= 0 else 0)
        start, stop = _span(segment)
        if end > stop:
            found.append((depths[-1], slice(stop, end), slice(start, stop)))
    return found


def _blocks(segments: list[list[int]], is_cuda: bool) -> list[_Block]:
    """The kernel calls of a row: every segment on itself, then what is below a segment on it, from the roots down.

    On the CPU small calls of one shape are made together. The order of a token's calls depends on its own tree alone.
    """
    calls: dict[Any, _Block] = {}

    def call(depth: int, queries: slice, keys: slice, is_causal: bool) -> None:
        shape = (queries.stop - queries.start, keys.stop - keys.start)
        is_small = not is_cuda and shape[0] * shape[1] <= SMALL * SMALL
        block = _Block([], [], depth < 0, is_causal)
        block = calls.setdefault((depth, shape, is_causal, None if is_small else queries.start), block)
        block.queries.append(queries)
        block.keys.append(keys)

    if is_cuda:
        for is_whole, run in groupby(segments, key=lambda segment: segment[3]):
            pieces = [slice(*_span(segment)) for segment in run]
            calls[pieces[0].start] = _Block(pieces, pieces, True, not is_whole)
    else:
        for segment in segments:
            call(-1, slice(*_span(segment)), slice(*_span(segment)), not segment[3])
    for depth, queries, keys in sorted(_below(segments), key=lambda found: found[0]):
        call(depth, queries, keys, False)
    return list(calls.values())


def _neighbours(pieces: list[slice]) -> list[list[slice]]:
    """Pieces in runs, each of which goes on where the one before ends."""
    runs = [[pieces[0]]]
    for before, piece in pairwise(pieces):
        if piece.start != before.stop:
            runs.append([])
        runs[-1].append(piece)
    return runs


def _tokens(pieces: list[slice], device: torch.device) -> slice | Tensor:
    """The tokens of pieces as an index: a slice, which copies nothing, wherever one will do."""
    if len(_neighbours(pieces)) == 1:
        return slice(pieces[0].start, pieces[-1].stop)
    starts = torch.tensor([piece.start for piece in pieces], device=device)
    return (starts[:, None] + torch.arange(pieces[0].stop - pieces[0].start, device=device)).flatten()


def _cuda_arguments(block: _Block, device: torch.device) -> tuple[Any, ...]:
    """Cumulative and longest lengths of queries and keys, dropout and causality, as the CUDA kernel takes them."""
    lengths = [[piece.stop - piece.start for piece in pieces] for pieces in (block.queries, block.keys)]
    # not `device=device`, which would wait for the GPU in every call of every layer
    cumulative = [torch.tensor([0, *accumulate(of)], dtype=torch.int32).to(device, non_blocking=True) for of in lengths]
    return *cumulative, *map(max, lengths), 0.0, block.is_causal


def _flash(q: Tensor, k: Tensor, v: Tensor, block: _Block, scale: float) -> tuple[Tensor, Tensor]:
    """Flash attention of a block's tokens: q [L, H, D], k and v [K, H_kv, D] -> out [L, H, D], log-sum-exp [L, H]."""
    if q.is_cuda:  # what torch.nn.attention.varlen calls, whose own names and arguments change from release to release
        arguments = _cuda_arguments(block, q.device)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *arguments, False, scale=scale)
        return out, lse.T
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*(_heads_first(t, block) for t in (q, k, v)), 0.0, block.is_causal, scale=scale)
    return _tokens_first(out), _tokens_first(lse)


def _heads_first(tensor: Tensor, block: _Block) -> Tensor:
    """[pieces * L, H, ...] -> [pieces, H, L, ...]."""
    return tensor.unflatten(0, (len(block.queries), -1)).transpose(1, 2)


def _tokens_first(tensor: Tensor) -> Tensor:
    """[pieces, H, L, ...] -> [pieces * L, H, ...]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: _Block, scale: float
) -> tuple[Tensor, ...]:
    """The block's part of the gradients of q, k and v, from the merged `out` [L, H, D] and `lse` [L, H]."""
    if q.is_cuda:
        arguments = _cuda_arguments(block, q.device)
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout of 0
        backward = torch.ops.aten._flash_attention_backward
        unused = torch.empty(0, device=q.device)
        return backward(grad, q, k, v, out, lse.T.contiguous(), *arguments, random, unused, scale=scale)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = (_heads_first(t, block) for t in (grad, q, k, v, out, lse))
    return tuple(map(_tokens_first, backward(*tensors, 0.0, block.is_causal, scale=scale)))


@torch.library.custom_op("prefix_attention::cascade", mutates_args=())
def _cascade(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of a row: q [T, H, D], k and v [T, H_kv, D], sinks [H] or None -> out [T, H, D], log-sum-exp [T, H].

    An operator, so that `torch.compile` sees a plan that is data, not a new program for every layout.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=wide, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    for block in _blocks(segments.tolist(), q.is_cuda):
        queries, keys = _tokens(block.queries, q.device), _tokens(block.keys, q.device)
        part, part_lse = _flash(q[queries], k[keys], v[keys], block, scale)
        if block.is_first:
            out[queries], lse[queries] = part.to(wide), part_lse
        else:
            merged = torch.logaddexp(lse[queries], part_lse)
            out[queries] *= (lse[queries] - merged).exp()[..., None]
            out[queries] += part * (part_lse - merged).exp()[..., None]
            lse[queries] = merged
    if sinks is not None:  # a key without a value in every softmax
        merged = torch.logaddexp(lse, sinks.to(wide))
        out *= (lse - merged).exp()[..., None]
        lse = merged
    return out.to(q.dtype), lse


@_cascade.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.custom_op("prefix_attention::cascade_backward", mutates_args=())
def _cascade_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: the sum of every block's."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grads = [torch.empty(t.shape, dtype=wide, device=t.device) for t in (q, k, v)]
    for block in _blocks(segments.tolist(), q.is_cuda):
        queries, keys = _tokens(block.queries, q.device), _tokens(block.keys, q.device)
        tensors = (grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries])
        parts = _flash_backward(*tensors, block, scale)
        for total, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
            total[where] = part.to(wide) if block.is_first else total[where] + part
    dq, dk, dv = (total.to(q.dtype) for total in grads)
    return dq, dk, dv


@_cascade_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, segments, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, segments, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, segments, out, lse = ctx.saved_tensors
    dq, dk, dv = _cascade_backward(grad.contiguous(), q, k, v, out, lse, segments, ctx.scale)
    dsinks = None
    if sinks is not None:  # d/ds of softmax with one more key: -p(sink) · grad·out, summed over tokens
        delta = (grad.to(lse.dtype) * out).sum(-1)
        dsinks = -((sinks.to(lse.dtype) - lse).exp() * delta).sum(0).to(sinks.dtype)
    return dq, dk, dv, dsinks, None, None


_cascade.register_autograd(_differentiate, setup_context=_keep)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Plain attention, tokens first, with a boolean mask [L, K]: q [L, H, D], k and v [K, H_kv, D] -> [L, H, D_v]."""
    if softcap is None and sinks is None:
        qs, ks, vs = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("lgrd,kgd->grlk", grouped, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(wide).masked_fill(~mask, torch.finfo(wide).min)  # padding may see nothing
    if sinks is not None:
        sink = sinks.to(wide).view(k.shape[1], -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(k)].to(v.dtype)
    return torch.einsum("grlk,kgd->lgrd", weights, v).flatten(1, 2)


def _loop(q: Tensor, k: Tensor, v: Tensor, segments: list[list[int]], window: int | None, *rules: Any) -> Tensor:
    """Attention of a row, segment by segment and `QUERY_BLOCK` queries at a time, on copies of the keys they see."""
    row, outs = torch.arange(len(q), device=q.device), []  # read on the device: the host never waits for it
    for path in _paths(segments):
        start, length, _, is_whole = segments[path[-1]]
        tokens = torch.cat([row[slice(*_span(segments[number]))] for number in path])
        above = len(tokens) - length
        for first in range(above, len(tokens), QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, len(tokens))
            oldest = 0 if window is None else max(first - window + 1, 0)
            at = torch.arange(oldest, len(tokens) if is_whole else last, device=q.device)
            distance = torch.arange(first, last, device=q.device)[:, None] - at[None]
            mask = ((distance >= 0) | bool(is_whole)) & (distance < (window or math.inf))
            keys = tokens[at]
            queries = q[start + first - above : start + last - above]
            outs.append(checkpoint(_attend, queries, k[keys], v[keys], mask, *rules, use_reentrant=False))
    return torch.cat(outs)


def _span(segment: list[int]) -> tuple[int, int]:
    return segment[0], segment[0] + segment[1]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, [B, H, T, D] -> [B, T, H, D]; without `segments`, plain attention.

    Raises:
        ValueError: dropout, with `segments`.
    """
    if torch.is_autocast_enabled(query.device.type):
        compute = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(compute), key.to(compute), value.to(compute)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if segments is None and softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs)
    if segments is None:  # what sdpa has not
        if attention_mask is None:
            ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            attention_mask = ones.tril(key.shape[2] - query.shape[2])[None, None]
        rows = (t.transpose(1, 2) for t in (query, key, value))
        masks = attention_mask.expand(len(query), 1, -1, -1)[:, 0]
        outs = [_attend(q, k, v, m, scale, softcap, s_aux) for q, k, v, m in zip(*rows, masks, strict=True)]
        return torch.stack(outs), None
    if dropout:
        raise ValueError("dropout in attention is not available with shared prefixes: set it to 0")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    missing = q.shape[-1] - v.shape[-1]  # the kernels want one head size
    is_plain = softcap is None and (sliding_window is None or _longest(segments) <= sliding_window)
    if is_plain and missing >= 0 and _has_kernel(q):
        out, _ = _cascade(q, k, F.pad(v, (0, missing)) if missing else v, s_aux, segments, scale)
        return out[None, ..., : v.shape[-1]], None
    return _loop(q, k, v, segments.tolist(), sliding_window, scale, softcap, s_aux)[None], None


def _has_kernel(q: Tensor) -> bool:
    """Whether the flash kernels take this device, dtype and head size."""
    if q.device.type != "cuda":
        return q.device.type == "cpu"
    takes = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return takes and torch.cuda.get_device_capability(q.device) >= (8, 0)


@torch.compiler.disable
def _longest(segments: Tensor) -> int:
    """Tokens of the longest path from a root to a leaf."""
    plan = segments.tolist()
    return max(sum(plan[number][1] for number in path) for path in _paths(plan))


# --------------------------------------------------------------------------------------------------------------------
# Gated delta nets (Qwen3-Next, Qwen3.5): recurrent layers, whose state goes from a segment to those below it


class _Handover:
    """What a gated delta net takes for its cache: hands it the parents' state and keeps the one it ends with.

    Args:
        layer: number of the layer.
        above: states of the parents, one for each row of the batch; none at a root. Each holds the last inputs of the
            causal convolution [1, channels, K - 1] and the state of the delta rule [1, heads, d_k, d_v].
    """

    record_past = True  # the way that does not update states in place
    conv_states: list[Tensor]
    recurrent_states: list[Tensor]

    def __init__(self, layer: int, above: "Sequence[_Handover]" = ()):
        self.layers = {layer: self}
        self.is_root = not above
        if above:
            conv = torch.cat([state.conv_states[0] for state in above])
            recurrent = torch.cat([state.recurrent_states[0] for state in above])
            self.conv_states, self.recurrent_states = [conv], [recurrent]

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return not self.is_root

    def update_conv_state(self, inputs: Tensor, _: int, conv_kernel_size: int, **__: Any) -> Tensor:
        past = conv_kernel_size - 1
        seen = F.pad(inputs, (past, 0)) if self.is_root else torch.cat([self.conv_states[0], inputs], -1)
        self.conv_states = [seen[..., seen.shape[-1] - past :]]
        return inputs if self.is_root else seen

    def update_recurrent_state(self, state: Tensor, _: int, **__: Any) -> None:
        self.recurrent_states = [state]


class _SegmentedDeltaNet:
    """The forward of a gated delta net that takes `segments`: parents one by one, leaves in one padded batch."""

    def __init__(self, module: Any):
        self.module = module
        self.original = module.forward

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, segments: Tensor | None = None, **kwargs: Any) -> Tensor:
        if segments is None:
            return self.original(hidden_states, **kwargs)
        plan = segments.tolist()
        parents = {parent for _, _, parent, _ in plan}
        outs: dict[int, Tensor] = {}
        states: dict[int, _Handover] = {}
        for number, (start, length, parent, _) in enumerate(plan):
            if parent < 0 or number in parents:
                states[number] = _Handover(self.module.layer_idx, [states[parent]] if parent >= 0 else ())
                tokens = hidden_states[:, start : start + length]
                outs[number] = self.original(tokens, cache_params=states[number])[0]
        leaves = [number for number in range(len(plan)) if number not in states]
        if leaves:
            longest = max(2, *(plan[n][1] for n in leaves))  # one token alone would take the decoding kernels
            pieces = [hidden_states[0, slice(*_span(plan[n]))] for n in leaves]
            batch = torch.stack([F.pad(piece, (0, 0, 0, longest - len(piece))) for piece in pieces])
            state = _Handover(self.module.layer_idx, [states[plan[n][2]] for n in leaves])
            for number, out in zip(leaves, self.original(batch, cache_params=state), strict=True):
                outs[number] = out[: plan[number][1]]
        return torch.cat([outs[number] for number in range(len(plan))])[None]


# --------------------------------------------------------------------------------------------------------------------
# attach

# Compared with one plain row per completion by the tests; any other type is compared when it is attached.
TESTED = frozenset({
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "qwen3_moe", "gpt_oss", "glm4",
    "deepseek_v3", "cohere2", "granite", "smollm3", "qwen3_next", "qwen3_5_text", "qwen2_5_vl", "qwen3_vl", "gemma3",
})  # fmt: skip
VISION = frozenset({"qwen2_5_vl", "qwen3_vl", "gemma3", "llava"})  # tested with images (LLaVA's text part may be any)
WHOLE_IMAGES = frozenset({"gemma3"})  # whose image tokens see all of their image
LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}


def attach(model: Any, verify: bool = False, example: tuple[list[int], dict[str, Any]] | None = None) -> Any:
    """Swap shared-prefix attention into a Hugging Face causal language model, in place; returns it.

    Ordinary batches go on through sdpa, whatever the implementation was before. Auxiliary losses of a mixture of
    experts, which count every forwarded token once, would see a prompt once instead of once per completion: they are
    refused. Dropout outside attention, LoRA's too, falls on a prompt once for all its completions.

    Args:
        model: wrapped (DDP, FSDP2, peft) or not.
        verify: compare log-probs and gradients of a few random groups with one plain row per completion. Model types
            that the tests of this file do not cover are always compared. Collective where the model is sharded.
        example: a prompt with images as they will come, its tokens and what the processor makes of its images: it is
            among what is compared. Images in model types that the tests of this file do not cover need one.

    Raises:
        ValueError: shared prefixes would not be exact for this model; names the reason.
        OutOfMemoryError: there is no room for the comparison.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    base = _base(model)
    if reason := _refusal(base):
        raise ValueError(_refused(base, reason))
    _LogprobHead.of(base)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for module in base.modules():
        if _is_gated_delta_net(module) and not isinstance(module.forward, _SegmentedDeltaNet):
            module.forward = _SegmentedDeltaNet(module)
    before = base.config.get_text_config(decoder=True)._attn_implementation
    _use(base, NAME)
    if not hasattr(base, "shares_prefixes"):
        base.register_forward_pre_hook(_plan_on_host, with_kwargs=True)
    base.shares_prefixes = True  # of this instance: models made from one config share the implementation's name
    kind = base.config.model_type
    base.shares_images = example is not None or kind in VISION
    if verify or kind not in TESTED or (example and kind not in VISION):
        try:
            _verify(model, example)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model that nobody tried does with a row of segments
            _use(base, before)
            base.shares_prefixes = False
            raise ValueError(_refused(base, str(error))) from error
    return model


def _plan_on_host(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """FSDP2 and DDP send every tensor to their device, where each layer would wait for the GPU to read the plan."""
    if inputs.get("segments") is not None:
        inputs["segments"] = inputs["segments"].cpu()
    return args, inputs


def _refused(base: Any, reason: str) -> str:
    return f"{type(base).__name__} cannot share prefixes: {' '.join(reason.split())}; go without (share_prefix=False)"


def _base(model: Any) -> Any:
    """The Hugging Face model inside torch.compile, DDP and peft.

    Raises:
        ValueError: an adapter that adds tokens, which are at no position of a row.
    """
    while True:
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("adapters of prompt learning add tokens to a row: log-probs of its own are not available")
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def _is_gated_delta_net(module: nn.Module) -> bool:
    return type(module).__name__.endswith("GatedDeltaNet")


def _refusal(base: Any) -> str | None:
    """Why prefixes cannot be shared, or None where nothing speaks against it."""
    config = base.config.get_text_config(decoder=True)
    if getattr(base.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if not base._can_set_attn_implementation():
        return "its attention cannot be replaced through transformers' AttentionInterface"
    if odd := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        return f"layers of type {', '.join(sorted(odd))} do not see a whole prefix"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
            return f"{rope['rope_type']} position embeddings depend on the longest text of a batch"
    if _has_window(config) and config.model_type not in TESTED and not _passes_window(base):
        return "its sliding window is in the mask alone and does not reach the attention function"
    if getattr(config, "output_router_logits", False):
        return "output_router_logits adds an auxiliary loss that counts forwarded tokens, prompts once"
    for name, module in base.named_modules():
        kind = type(module).__name__
        share: Any = getattr(module, "attention_dropout", 0.0)
        if isinstance(module, nn.Dropout) and "att" in name.rpartition(".")[2]:
            share = module.p
        if isinstance(share, float) and share > 0:
            return f"dropout in attention ({name})"
        recurrent = isinstance(module, nn.Conv1d | nn.RNNBase) or any(w in kind for w in ("Mamba", "Recurrent", "SSM"))
        if recurrent and not _is_gated_delta_net(base.get_submodule(name.rpartition(".")[0])):
            return f"{name or 'it'} ({kind}) carries a state from token to token"
    parameters = inspect.signature(base.forward).parameters
    if "position_ids" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return "its forward takes no position_ids"
    return None


def _has_window(config: Any) -> bool:
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def _passes_window(base: Any) -> bool:
    """Whether the source of some attention layer hands its window to the attention function."""
    kinds = {type(module) for module in base.modules() if "Attention" in type(module).__name__}
    return any("sliding_window=" in inspect.getsource(kind) for kind in kinds)


def _use(base: Any, name: str) -> None:
    """Set the attention implementation of the language model, and leave other towers theirs."""
    wanted = {"": name}
    for part in getattr(base.config, "sub_configs", {}):
        config = getattr(base.config, part)
        wanted[part] = name if config is None or "text" in part else config._attn_implementation
    base.set_attn_implementation(wanted)


def _verify(model: Any, example: tuple[list[int], dict[str, Any]] | None) -> None:
    """Compare values and gradients of a few groups: shared, against plain rows through the model's eager attention.

    Two of random tokens, and one of the example with random completions.

    Raises:
        ValueError: they differ by more than the rounding of the model's dtype explains.
    """
    base = _base(model)
    config = base.config.get_text_config(decoder=True)
    device = next(base.parameters()).device
    generator = torch.Generator().manual_seed(0)

    names = ("image_token_id", "video_token_id", "audio_token_id")
    placeholders = {getattr(base.config, name, None) for name in names}
    words = [token for token in range(min(config.vocab_size, 1000)) if token not in placeholders]

    def tokens(count: int) -> list[int]:
        return [words[n] for n in torch.randint(len(words), (count,), generator=generator)]

    groups = [(tokens(9), [tokens(5), tokens(2), tokens(7)]), (tokens(4), [tokens(6), tokens(3)])]
    if example:
        groups.append((example[0], [tokens(5), tokens(3)]))
    trainable = [p for p in base.parameters() if p.requires_grad]
    before, was_training = [p.grad for p in trainable], model.training
    values, gradients = [], []
    model.eval()  # dropout would be another one every time
    try:
        for name in ("eager", NAME):
            for p in trainable:
                p.grad = None
            _use(base, name)
            (row,) = pack(groups, share_prefix=name == NAME)
            row = row.to(device)
            times = row.prompts.count(2)  # the example is the third prompt
            images: dict[str, Any] = {}
            for key, value in example[1].items() if example else ():
                images[key] = torch.cat([value.to(device)] * times)
            with torch.set_grad_enabled(bool(trainable)):  # whatever the caller's mode
                if name == NAME:
                    logprobs = completion_logprobs(model, row, **images)
                else:
                    logits = model(**_padded_inputs(base, row, images)).logits
                    chosen = logits[row.row, row.position].float().log_softmax(-1)
                    logprobs = chosen.gather(-1, row.targets[:, None])[:, 0]
                values.append(logprobs.detach())
                if trainable:
                    (logprobs * torch.linspace(-1, 1, len(logprobs), device=device)).sum().backward()
                    gradients.append([p.grad if p.grad is None else p.grad.detach().clone() for p in trainable])
    finally:
        model.train(was_training)
        for p, grad in zip(trainable, before, strict=True):
            p.grad = grad
    errors = [(values[0] - values[1]).abs().mean().item()]
    pairs = [pair for pair in zip(*gradients, strict=True) if pair[0] is not None] if gradients else []
    norms = [_norm(plain) for plain, _ in pairs]
    least = 0.01 * max(norms, default=0.0)  # some gradients, as of a bias of all keys, are nothing but rounding
    for (plain, shared), norm in zip(pairs, norms, strict=True):
        if scale := max(norm, least):
            errors.append(_norm(shared - plain) / scale / 10)  # gradients are ten times as rough
    limit = 5e-2 if _LogprobHead.of(base).dtype in (torch.bfloat16, torch.float16) else 1e-4
    if not all(error <= limit for error in errors):  # NaN is over it, too
        raise ValueError(f"log-probs or gradients differ from plain rows by {max(errors):.2g}, over {limit:.0e}")


def _norm(tensor: Any) -> float:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.double().norm().item()


# --------------------------------------------------------------------------------------------------------------------
# Log-probabilities


@dataclass(frozen=True)
class _Logits:
    """From the head's product to the logits of the distribution: z -> cap·tanh(z·multiplier / cap) / temperature.

    Those of `forbidden` tokens are as good as -inf, but finite, as 0·inf would make the entropy NaN.
    """

    multiplier: float
    softcap: float | None
    temperature: float
    forbidden: Tensor | None = None

    @property
    def factor(self) -> float:
        """d logits / d z at 0."""
        return self.multiplier / self.temperature

    def apply(self, z: Tensor) -> Tensor:
        """In place, on [..., V]."""
        if self.softcap is not None:
            z = z.mul_(self.multiplier / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.factor != 1:
            z = z.mul_(self.factor)
        return z if self.forbidden is None else z.index_fill_(-1, self.forbidden, -1e4)

    def bend(self, logits: Tensor) -> Tensor | None:
        """d logits / d z over `factor`, 1 - tanh², from the logits; None where it is 1."""
        return None if self.softcap is None else 1 - (logits * (self.temperature / self.softcap)).square_()


class _TokenLogprobs(torch.autograd.Function):
    """log softmax at the targets, and entropies, chunk by chunk, in fp32 (fp64 for fp64).

    The head is a sum of products x·Wᵀ (a matrix, and its LoRA). Forward keeps the log-sum-exps; backward makes the
    logits again and turns each chunk into its own gradient, g·(onehot - p), in place.
    """

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, rule: _Logits, with_entropy: bool, bias: Tensor | None, *factors: Tensor
    ) -> tuple[Tensor, Tensor]:
        xs, weights = factors[::2], factors[1::2]
        wide = torch.promote_types(xs[0].dtype, torch.float32)
        logprobs = torch.empty(len(targets), dtype=wide, device=targets.device)
        normalizers, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for part, logits in _chunks(rule, bias, xs, weights, wide):
            chosen, top = logits.gather(-1, targets[part, None])[:, 0], logits.amax(-1)
            logits.sub_(top[:, None])
            p = logits.exp() if with_entropy else logits.exp_()
            total = p.sum(-1)
            normalizers[part] = top + total.log()
            logprobs[part] = chosen - normalizers[part]
            if with_entropy:  # log Σ exp - Σ p·logit, by no product that autocast would round
                entropies[part] = total.log() - p.mul_(logits).sum(-1) / total
        ctx.rule, ctx.num = rule, len(xs)
        ctx.save_for_backward(targets, bias, normalizers, *xs, *weights)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        targets, bias, normalizers, *factors = ctx.saved_tensors
        xs, weights = factors[: ctx.num], factors[ctx.num :]
        wide = normalizers.dtype
        needed = ctx.needs_input_grad[4:]
        dxs = [torch.empty_like(x) if need else None for x, need in zip(xs, needed[::2], strict=True)]
        dws = [
            torch.zeros(w.shape, dtype=wide, device=w.device) if need else None
            for w, need in zip(weights, needed[1::2], strict=True)
        ]
        dbias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[3] else None
        for part, logits in _chunks(ctx.rule, bias, xs, weights, wide):
            g, bend = grad[part] * ctx.rule.factor, ctx.rule.bend(logits)
            dz = logits.sub_(normalizers[part, None]).exp_().mul_(-g[:, None])
            dz[torch.arange(len(dz), device=dz.device), targets[part]] += g
            dz = (dz if bend is None else dz.mul_(bend)).to(weights[0].dtype)
            if dbias is not None:
                dbias += dz.sum(0, dtype=wide)
            for x, w, dx, dw in zip(xs, weights, dxs, dws, strict=True):
                if dx is not None:
                    torch.mm(dz, w, out=dx[part])
                if dw is not None and dw.dtype == dz.dtype:
                    dw.addmm_(dz.T, x[part])
                elif dw is not None:
                    dw += dz.T @ x[part]
        dws = [dw if dw is None else dw.to(w.dtype) for dw, w in zip(dws, weights, strict=True)]
        interleaved = [d for pair in zip(dxs, dws, strict=True) for d in pair]
        return None, None, None, dbias if dbias is None else dbias.to(bias.dtype), *interleaved


def _chunks(
    rule: _Logits, bias: Tensor | None, xs: Sequence[Tensor], weights: Sequence[Tensor], wide: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """The logits [n, V] of n tokens after the others, all in the same memory."""
    size = max(1, HEAD_CHUNK["cuda" if xs[0].is_cuda else "cpu"] // len(weights[0]))
    memory = torch.empty(min(size, len(xs[0])), len(weights[0]), dtype=wide, device=xs[0].device)
    for start in range(0, len(xs[0]), size):
        part = slice(start, min(start + size, len(xs[0])))
        logits = memory[: part.stop - start]
        z = torch.mm(xs[0][part], weights[0].T, out=logits if xs[0].dtype == wide else None)
        for x, w in zip(xs[1:], weights[1:], strict=True):
            z.addmm_(x[part], w.T)
        logits.copy_(z)  # does nothing where they are the same
        yield part, rule.apply(logits if bias is None else logits.add_(bias))


class _LogprobHead:
    """The forward of a head that answers `completion_logprobs` with log-probs and entropies [1, N, 2], not logits.

    It stands on the instance, so that parameters keep their names; without a request it is the head's own forward.
    """

    def __init__(self, head: Any):
        self.head = head
        self.original = head.forward
        self.request: tuple[Tensor, Tensor, _Logits, bool] | None = None  # cells, targets, rule, with_entropy
        self.answer: Tensor | None = None
        self.dtype: torch.dtype | None = None

    @classmethod
    def of(cls, base: Any) -> "_LogprobHead":
        """The one installed on the model's head, installed where there is none.

        Raises:
            ValueError: the model has no head.
        """
        head = base.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(base).__name__} has no language-model head")
        if not isinstance(head.forward, cls):
            head.forward = cls(head)
        return head.forward

    @torch.compiler.disable
    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.request is None:
            return self.original(hidden, *args, **kwargs)
        cells, targets, rule, with_entropy = self.request
        self.dtype = hidden.dtype
        bias, factors = _factors(self.head, hidden.flatten(0, 1).index_select(0, cells))
        if torch.is_autocast_enabled(hidden.device.type):
            compute = torch.get_autocast_dtype(hidden.device.type)
            factors = [factor.to(compute) for factor in factors]
        values = _TokenLogprobs.apply(targets, rule, with_entropy, bias, *factors)
        self.answer = torch.stack(values, -1)[None]
        return self.answer


def _factors(head: Any, hidden: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """A head as bias and [x, W, x', W', ...] with logits = bias + x·Wᵀ + x'·W'ᵀ + ...

    Raises:
        ValueError: a head that is neither linear nor a LoRA of one.
    """
    if hasattr(head, "modules_to_save"):  # peft: a trained copy beside the original
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    linear = head.get_base_layer() if hasattr(head, "lora_A") else head
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise ValueError(f"the language-model head is a {type(linear).__name__}, not a plain linear layer")
    factors = [hidden, linear.weight]
    if linear is not head and head.disable_adapters and head.merged:
        head.unmerge()
    if linear is not head and not head.disable_adapters and not head.merged:
        for name in filter(head.lora_A.__contains__, head.active_adapters):
            if name in head.lora_variant or head.lora_B[name].bias is not None:
                raise ValueError("the language-model head has an adapter other than plain LoRA (DoRA, or with a bias)")
            low = head.lora_A[name](head.lora_dropout[name](hidden.to(head.lora_A[name].weight.dtype)))
            factors += [(low * head.scaling[name]).to(hidden.dtype), head.lora_B[name].weight.to(hidden.dtype)]
    return linear.bias, factors


@contextmanager
def _bare_logits(base: Any, temperature: float, forbidden: Tensor | None) -> Iterator[_Logits]:
    """Move what the model does to its head's output into the head: yields it as a rule, and undoes it in the model."""
    softcap = getattr(base.config, "final_logit_softcapping", None)
    scale = getattr(base, "logit_scale", 1.0)
    divisor = getattr(base.config, "logits_scaling", 1.0) if base.config.model_type.startswith("granite") else 1.0
    with ExitStack() as stack:
        attributes = vars(base.config)  # itself, as a config may refuse None
        if softcap is not None:
            stack.callback(attributes.update, final_logit_softcapping=softcap)
            attributes["final_logit_softcapping"] = None
        if scale != 1.0:
            stack.enter_context(patch.object(base, "logit_scale", 1.0))
        if divisor != 1.0:
            stack.callback(attributes.update, logits_scaling=divisor)
            attributes["logits_scaling"] = 1.0
        yield _Logits(scale / divisor, softcap, temperature, forbidden)


def completion_logprobs(
    model: Any,
    row: PackedBatch,
    temperature: float = 1.0,
    return_entropy: bool = False,
    forbidden: Sequence[int] = (),
    **inputs: Any,
) -> Any:
    """log p(token | prompt, completion so far) at a sampling temperature, for every completion token of `row`.

    The head runs only on positions that predict a completion token, and its logits exist a chunk at a time. During the
    forward a final softcap or scale of the logits is missing in the model's config: nothing else may read or save it.

    Args:
        model: a Hugging Face causal language model, wrapped or not; attached where the row shares prefixes.
        row: from `pack`, on the model's device.
        temperature: logits are divided by it; above 0.
        return_entropy: also return the entropy of each of the N distributions, without a gradient.
        forbidden: tokens that the sampler could not draw (the placeholders of images): they have no probability.
        inputs: what the processor makes of the images of the forwarded prompts, in the order of `row.prompts`
            (`pixel_values`, ...). With shared prefixes for Qwen2.5-VL, Qwen3-VL, Gemma3 and LLaVA, and for what was
            attached with an example.

    Returns:
        [N] fp32 (fp64 for an fp64 model), nats, in the order group, completion, token; differentiable. With
        `return_entropy` a pair: those, and the entropies [N], nats.

    Raises:
        ValueError: a temperature not above 0; the row shares prefixes and the model is not attached, or not for images;
            the head is not linear; or the model changes its logits in an unknown way.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    base = _base(model)
    head = _LogprobHead.of(base)
    images = bool(inputs)
    if row.segments is None:
        inputs = _padded_inputs(base, row, inputs)
    else:
        in_use = NAME in (base.config._attn_implementation, base.config.get_text_config()._attn_implementation)
        if not (in_use and getattr(base, "shares_prefixes", False)):
            raise ValueError("this row shares prefixes: attach(model) first, or pack(..., share_prefix=False)")
        if images and not base.shares_images:
            raise ValueError(f"a {base.config.model_type} with images: attach(model, example=...) first, to compare it")
        is_spatial = any(name.endswith("_grid_thw") for name in inputs)
        positions = _rope_positions(base, row, inputs) if is_spatial else row.position_ids
        nothing_to_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.input_ids.device)  # 4-D: handed through
        plan = F.pad(row.segments, (0, 1))
        if images and base.config.model_type in WHOLE_IMAGES:
            plan = _cut_at_images(plan, row.input_ids[0].cpu() == base.config.image_token_id)
        inputs |= {"input_ids": row.input_ids, "position_ids": positions, "use_cache": False}
        inputs |= {"attention_mask": nothing_to_mask, "segments": plan}
    width, column = row.input_ids.shape[1], row.position
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        kept, column = row.position.unique(return_inverse=True)
        inputs["logits_to_keep"], width = kept, len(kept)
    never = torch.tensor(forbidden, device=row.input_ids.device) if forbidden else None
    with _bare_logits(base, temperature, never) as rule:
        head.request = (row.row * width + column, row.targets, rule, return_entropy)
        try:
            answer = model(**inputs).logits
            if head.answer is None or not torch.equal(answer.nan_to_num(), head.answer.nan_to_num()):
                raise ValueError(
                    f"{type(base).__name__} changes its logits after the head in a way that is not known here"
                )
        finally:
            head.request = head.answer = None
    logprobs, entropy = answer[0].unbind(-1)
    return (logprobs, entropy.detach()) if return_entropy else logprobs


def _padded_inputs(base: Any, row: PackedBatch, images: dict[str, Any]) -> dict[str, Any]:
    """What a model's own forward gets for padded rows."""
    parameters = inspect.signature(base.forward).parameters
    kinds = parameters.keys() & {"mm_token_type_ids", "token_type_ids"} if images else ()
    of_tokens = {kind: _kinds(base, row.input_ids) for kind in kinds}
    return {
        "input_ids": row.input_ids, "attention_mask": row.attention_mask, "use_cache": False, **of_tokens, **images,
    }  # fmt: skip


def _rope_positions(base: Any, row: PackedBatch, inputs: dict[str, Any]) -> Tensor:
    """M-RoPE positions [3, 1, T]: the model's own for prompts with images; completions go on from the largest."""
    assert row.segments is not None
    plan = row.segments.tolist()
    roots = [segment for segment in plan if segment[2] < 0]
    prompts = nn.utils.rnn.pad_sequence([row.input_ids[0, slice(*_span(s))] for s in roots], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(s[1], device=prompts.device) for s in roots], batch_first=True)
    grids = {name: value for name, value in inputs.items() if name.endswith(("_grid_thw", "second_per_grid_ts"))}
    of_prompts, deltas = base.model.get_rope_index(prompts, _kinds(base, prompts), **grids, attention_mask=mask)
    positions = row.position_ids.expand(3, 1, -1).clone()
    ends = [start for start, _, _ in roots[1:]] + [positions.shape[-1]]
    for number, ((start, length, _), end) in enumerate(zip(roots, ends, strict=True)):
        positions[:, 0, start : start + length] = of_prompts[:, number, :length]
        positions[:, 0, start + length : end] += deltas[number]
    return positions


def _kinds(base: Any, ids: Tensor) -> Tensor:
    """0 for text, 1 for the placeholder of an image, 2 for that of a video."""
    video = getattr(base.config, "video_token_id", -1)
    return (ids == base.config.image_token_id).int() + 2 * (ids == video).int()


def _cut_at_images(plan: Tensor, is_image: Tensor) -> Tensor:
    """The same row with every run of image tokens as a segment of its own that sees itself whole.

    What followed it hangs below it, so that a prompt becomes a chain of segments.
    """
    cut: list[tuple[int, int, int, int]] = []
    last: dict[int, int] = {-1: -1}  # where a segment's last piece stands in the new plan
    for number, (start, length, parent, _) in enumerate(plan.tolist()):
        above = last[parent]
        for kind, run in groupby(range(start, start + length), key=lambda at: bool(is_image[at])):
            tokens = list(run)
            cut.append((tokens[0], len(tokens), above, int(kind)))
            above = len(cut) - 1
        last[number] = above
    return torch.tensor(cut)
