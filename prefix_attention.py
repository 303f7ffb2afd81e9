"""Shared-prefix attention: forward each prompt once for all its completions, exactly.

    model = attach(AutoModelForCausalLM.from_pretrained(...))
    for row in pack(groups, max_tokens=8192):        # groups: (prompt_ids, [completion_ids, ...])
        logprobs = completion_logprobs(model, row)   # [N], of the tokens `row.index`

`pack` lays sequences into rows without padding, in which what several begin with stands once.
`attach` teaches a Hugging Face model to run such a row. `completion_logprobs` applies the head only
where a completion token is predicted, and never holds the logits of a whole row. Needs only torch
and transformers, and can be copied alone.
"""

import inspect
import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "shared_prefix"  # of the attention function in transformers
# Logits that the head holds at a time, up to twice as many in short rows. On a CPU 64 MiB: above
# 32 glibc gives memory back at once, and smaller pieces leave holes in its heap.
HEAD_CHUNK = {"cpu": 1 << 24, "cuda": 3 << 26}
NEVER = -1e15  # a logit as good as -inf, but finite: 0·inf would make the entropy NaN
HALF = (torch.bfloat16, torch.float16)  # dtypes of the flash kernels on a GPU
QUERY_BLOCK = 512  # queries at a time where no flash kernel takes them

Tokens = Sequence[int] | Tensor  # a tensor is [n] int64, on the CPU
Groups = Sequence[tuple[Tokens, Sequence[Any]]]  # (prompt_ids, [completion_ids, ...]), see `pack`


def _computed_in(tensor: Tensor) -> torch.dtype:
    """The dtype of products with a tensor: autocast's, or its own."""
    if torch.is_autocast_enabled(tensor.device.type):
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums and log-sum-exps: fp64 for an fp64 tensor, else fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


_fused: Any = torch.compile(dynamic=True, disable=not torch.cuda.is_available())  # on a GPU


# -- Rows ------------------------------------------------------------------------------------------
# A row is a list of sequences, depth first. Each goes on from the one before, behind what both
# begin with: that many tokens of it are its depth. The places in the row of all tokens that it
# sees, those of its own segment last, are its path.


Segment = tuple[int, int, int, int]


class Tree:
    """The segments of a row, depth first; no dataclass, which FSDP2 would copy in every layer."""

    def __init__(self, segments: list[Segment]):
        # of a segment: where it starts, its length, how many tokens of the path of the segment
        # before come before it, and above 0 where its tokens also see later ones of it (an image)
        self.segments = segments


@dataclass(frozen=True)
class PackedBatch:
    """One forward's worth of tokens: R rows of T positions, with N completion tokens."""

    input_ids: Tensor  # [R, T] int64; one row, or padded ones
    position_ids: Tensor  # [R, T] int64; they restart in every segment at its depth
    attention_mask: Tensor | None  # [R, T] int64, 1 on tokens, by length; None with a tree
    tree: Tree | None  # None in padded rows
    cells: Tensor  # [N] int64, where the logits that predict a token stand, among R·T positions
    targets: Tensor  # [N] int64, the completion tokens
    group: Tensor  # [N] int64, number of the group among all given to `pack`
    completion: Tensor  # [N] int64, number of the completion among all given to `pack`
    index: Tensor  # [N] int64, place among all tokens given, in the order group, completion, token
    prompts: list[Any]  # whose prompt begins each sequence of depth 0: a group, None for several

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> Self:
        """The same row on `device`."""
        moved: Any = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


class _Sequence(NamedTuple):
    """A completion's prompt, or a segment's, and its tokens but the last."""

    family: int  # sequences of other families share nothing with it
    ids: Any  # [n] int64, of numpy
    tokens: Tensor  # those that are predicted
    group: int
    completion: int
    place: int  # of its first token among all completion tokens


def as_tokens(ids: Tokens) -> Tensor:
    """Token ids as [n] int64."""
    return torch.as_tensor(ids, dtype=torch.int64)


def pack(
    groups: Groups,
    max_tokens: int | None = None,
    share_prefix: bool = True,
    apart: Collection[int] = (),
) -> list[PackedBatch]:
    """Lay groups out as forwards of at most `max_tokens` positions.

    What several sequences of a row begin with is forwarded once: prompts, what these have in
    common, a history that goes on or branches. Groups stay in order; one over the budget is split
    into completions, and these into segments. The last token of a completion predicts nothing.

    Args:
        groups: `(prompt_ids, completions)` of one prompt each. A completion is its tokens, or with
            a history that was rewritten a list of segments `(prompt_ids, tokens)`; or empty.
        max_tokens: bound on R·T of a batch; None puts everything into one.
        share_prefix: False gives a right-padded row per completion, for any model's own attention.
        apart: numbers of groups that share nothing with others: those with images, which token ids
            do not tell apart. Prompts of their segments begin with the group's.

    Raises:
        ValueError: an empty prompt, or a completion that with its prompt exceeds `max_tokens`.
    """
    budget = math.inf if max_tokens is None else max_tokens
    rows: list[list[_Sequence]] = [[]]
    size = 0  # a bound on the last row's tokens, as counting all of them takes time
    for group in _sequences(groups, apart, budget):
        for unit in _units(group, share_prefix, budget):
            unit_size = _num_tokens(unit, share_prefix)
            size += unit_size
            if size > budget or not share_prefix:  # padded rows are more than their parts
                size = _num_tokens([*rows[-1], *unit], share_prefix)
            if size > budget:
                rows.append([])
                size = unit_size
            rows[-1] += unit
    return [_laid_out(row, share_prefix) for row in rows if row]


def num_packed_tokens(
    groups: Groups,
    share_prefix: bool = True,
    apart: Collection[int] = (),
) -> int:
    """Positions of a single row of all groups."""
    of_groups = _sequences(groups, apart, math.inf)
    return _num_tokens(list(chain.from_iterable(of_groups)), share_prefix)


def _sequences(groups: Groups, apart: Collection[int], budget: float) -> Iterator[list[_Sequence]]:
    """For every group its sequences; none for an empty completion."""
    num_completions = 0
    place = 0
    for group, (prompt_ids, completions) in enumerate(groups):
        sequences = []
        for number, completion in enumerate(completions):
            segments = [(prompt_ids, completion)]
            if len(completion) and isinstance(completion[0], tuple):
                segments = completion

            for prompt, tokens in segments:
                if not len(prompt):
                    raise ValueError(
                        f"group {group} has an empty prompt: "
                        "nothing predicts the first completion token"
                    )
                if len(prompt) + len(tokens) - 1 > budget:
                    raise ValueError(
                        f"completion {number} of group {group} has {len(prompt) + len(tokens)} "
                        f"tokens with its prompt, over {budget}"
                    )
                if len(tokens):
                    tokens = as_tokens(tokens)
                    ids = torch.cat([as_tokens(prompt), tokens[:-1]]).numpy()
                    sequences.append(
                        _Sequence(
                            group if group in apart else -1,
                            ids,
                            tokens,
                            group,
                            num_completions + number,
                            place,
                        )
                    )
                place += len(tokens)
        num_completions += len(completions)
        yield sequences


def _units(group: list[_Sequence], share_prefix: bool, budget: float) -> Iterator[list[_Sequence]]:
    """The largest parts of a group that fit: itself, its completions, or their segments."""
    if share_prefix and _num_tokens(group, share_prefix) <= budget:
        yield group
        return

    for _, segments in groupby(group, key=attrgetter("completion")):
        completion = list(segments)
        if _num_tokens(completion, share_prefix) <= budget:
            yield completion
        else:
            for sequence in completion:
                yield [sequence]


def _in_order(sequences: list[_Sequence], share_prefix: bool) -> list[tuple[int, int, _Sequence]]:
    """Sequences depth first, the longest before its branches, as (level, depth, sequence)."""
    if not share_prefix:
        return [(0, 0, sequence) for sequence in sequences]

    ordered = []
    waiting = [(0, 0, sequences)] if sequences else []
    while waiting:
        level, depth, below = waiting.pop()
        longest = max(below, key=lambda sequence: len(sequence.ids))
        ordered.append((level, depth, longest))
        branches: dict[tuple[int, ...], list[_Sequence]] = {}  # by where they leave the longest
        for sequence in below:
            if sequence is longest:
                continue
            fork = 0  # with how many tokens that may be shared both begin
            if sequence.family == longest.family:
                is_same = sequence.ids == longest.ids[: len(sequence.ids)]
                fork = int(is_same.cumprod().sum())
            branches.setdefault((fork, *sequence.ids[fork : fork + 1]), []).append(sequence)
        for leave in sorted(branches):  # the last to leave comes next
            fork = leave[0]
            waiting.append((level + 1 if fork else 0, fork, branches[leave]))
    return ordered


def _num_tokens(sequences: list[_Sequence], share_prefix: bool) -> int:
    """Positions of a forward of these sequences."""
    ordered = _in_order(sequences, share_prefix)
    lengths = [len(sequence.ids) - depth for _, depth, sequence in ordered]
    if share_prefix:
        return sum(lengths)
    return len(lengths) * max(lengths, default=0)


def _laid_out(sequences: list[_Sequence], share_prefix: bool) -> PackedBatch:
    """Sequences as one line of segments, or as right-padded lines for any model's own attention.

    Segments stand by level: so a level's calls copy no queries.
    """
    ordered = _in_order(sequences, share_prefix)
    longest = max(len(sequence.ids) for sequence in sequences)
    ids = []
    positions = []
    starts = {}  # by the sequences' places
    start = 0
    for _, depth, sequence in sorted(ordered, key=itemgetter(0)):
        own = torch.from_numpy(sequence.ids[depth:])
        ids.append(own)
        positions.append(torch.arange(depth, depth + len(own)))
        starts[sequence.place] = start
        start += len(own) if share_prefix else longest

    segments = []
    prompts: list[Any] = []
    for level, depth, sequence in ordered:
        segments.append((starts[sequence.place], len(sequence.ids) - depth, depth, 0))
        if level == 0:
            prompts.append(sequence.group)
        elif prompts[-1] != sequence.group:
            prompts[-1] = None

    columns: dict[int, Any] = {}  # the fields from `cells` on, by the sequences' places
    for (_, _, sequence), path in zip(ordered, _paths(segments), strict=True):
        places = torch.cat([torch.arange(run.start, run.stop) for run in path])
        num_tokens = len(sequence.tokens)
        columns[sequence.place] = (
            places[-num_tokens:],
            sequence.tokens,
            torch.full((num_tokens,), sequence.group),
            torch.full((num_tokens,), sequence.completion),
            torch.arange(sequence.place, sequence.place + num_tokens),
        )
    in_order = [columns[sequence.place] for sequence in sequences]
    # no views: one that is sent to a rank would take its whole storage along
    joined: Any = [torch.cat(parts) for parts in zip(*in_order, strict=True)]

    if share_prefix:
        input_ids = torch.cat(ids)[None]
        position_ids = torch.cat(positions)[None]
        mask = None
        # no length: the beginning of another sequence
        tree = Tree([segment for segment in segments if segment[1] > 0])
    else:
        input_ids = pad_sequence(ids, batch_first=True)
        position_ids = pad_sequence(positions, batch_first=True)
        mask = pad_sequence([torch.ones_like(line) for line in ids], batch_first=True)
        tree = None
    fields: Any = (input_ids, position_ids, mask, tree, *joined, prompts)
    return PackedBatch(*fields)


# -- Attention over a row of segments --------------------------------------------------------------
# The cascade: every segment attends causally to itself, then to each run of its path above it, from
# the root down. A softmax over all keys equals the softmaxes over blocks of keys, merged by their
# log-sum-exps: exactly. On CUDA a level is one kernel call, which copies keys from above; or
# several, each of about as many as the row's tokens. The kernels' log-sum-exp has no gradient, so
# autograd cannot go through the merge. But flash attention's backward makes p = exp(q·k - lse)
# again, and needs only rowsum(grad·out) besides: from the *merged* output and log-sum-exp it
# computes the block's part of the whole gradient.


def _paths(segments: list[Segment]) -> list[list[range]]:
    """For each segment the runs of the row that it sees, from the root down, its own last."""
    paths = []
    path: list[range] = []
    for start, length, depth, _ in segments:
        above = []
        for run in path:
            seen = run[:depth]
            if seen:
                above.append(seen)
            depth -= len(seen)
        path = [*above, range(start, start + length)]
        paths.append(path)
    return paths


def _cut(segments: list[Segment], kinds: list[int]) -> list[Segment]:
    """Segments cut where the kinds of neighbours differ; the last column has the kind."""
    cut = []
    for start, length, depth, _ in segments:
        for kind, run in groupby(range(start, start + length), key=kinds.__getitem__):
            num_tokens = len(list(run))
            cut.append((start, num_tokens, depth, kind))
            start += num_tokens
            depth += num_tokens
    return cut


def _in_row(segments: list[Segment]) -> list[tuple[list[range], bool]]:
    """Paths in the order of the row, and which of them end in an image that sees itself whole."""
    paths = sorted(zip(segments, _paths(segments), strict=True))
    return [(path, bool(segment[3])) for segment, path in paths]


Piece = tuple[range, range]  # tokens of a row: queries, and the keys that they see


class _Block(NamedTuple):
    """One kernel call for several pieces; on a CPU they are a batch, of equal lengths."""

    level: int
    is_causal: bool
    num_pieces: int
    queries: Any  # tokens of the row: a slice where they are adjacent, which copies nothing, or [L]
    keys: Any
    lengths: Any  # as CUDA's kernels take them: cumulative of queries, of keys, longest of each


@lru_cache(maxsize=16)
def _blocks(tree: Tree, device: torch.device, is_cuda: bool) -> list[_Block]:
    """The kernel calls of a row, once for both passes of all layers."""
    num_tokens = sum(segment[1] for segment in tree.segments)
    blocks = []
    for (level, sees_all), pieces in sorted(_pieces_by_level(tree.segments).items()):
        is_causal = level == 0 and not sees_all
        for call in _calls(pieces, num_tokens, is_cuda):
            queries, keys = zip(*call, strict=True)
            places = (_places(queries, device), _places(keys, device))
            lengths = [
                _cumulative(queries, device),
                _cumulative(keys, device),
                max(map(len, queries)),
                max(map(len, keys)),
            ]
            blocks.append(_Block(level, is_causal, len(call), *places, lengths))
    return blocks


def _cumulative(pieces: Sequence[range], device: torch.device) -> Tensor:
    """Where pieces begin when they are joined, and the end: [pieces + 1] int32."""
    ends = accumulate(map(len, pieces), initial=0)
    return torch.tensor(list(ends), dtype=torch.int32, device=device)


def _pieces_by_level(segments: list[Segment]) -> dict[tuple[int, bool], list[Piece]]:
    """Pieces by level (0: of a segment itself) and whether queries see later keys."""
    levels: dict[tuple[int, bool], list[Piece]] = {}
    for path, sees_all in _in_row(segments):
        own = path[-1]
        levels.setdefault((0, sees_all), []).append((own, own))
        for level, keys in enumerate(path[:-1], 1):
            pieces = levels.setdefault((level, False), [])
            queries = own
            if pieces and pieces[-1][1] == keys and pieces[-1][0].stop == own.start:
                queries = range(pieces.pop()[0].start, own.stop)
            pieces.append((queries, keys))
    return levels


def _calls(pieces: list[Piece], num_tokens: int, is_cuda: bool) -> list[list[Piece]]:
    """The pieces of a level, call by call."""
    calls: dict[Any, list[Piece]] = {}  # by what the pieces of a call have in common
    num_keys = 0
    for queries, keys in pieces:
        num_keys += len(keys)
        common: Any = (len(queries), len(keys))
        if is_cuda:  # a call has about as many keys as the row has tokens
            common = (num_keys - 1) // num_tokens
        calls.setdefault(common, []).append((queries, keys))
    return list(calls.values())


def _places(pieces: Sequence[range], device: torch.device) -> slice | Tensor:
    """The tokens of pieces as an index: a slice where they are adjacent."""
    if all(before.stop == piece.start for before, piece in pairwise(pieces)):
        return slice(pieces[0].start, pieces[-1].stop)
    places = [torch.arange(piece.start, piece.stop) for piece in pieces]
    return torch.cat(places).to(device)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, block: _Block, scale: float | None
) -> tuple[Tensor, ...]:
    """Flash attention of a block: out [L, H, D] and log-sum-exp [L, H]."""
    if not q.is_cuda:
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return _flash_on_cpu(on_cpu, (q, k, v), block, scale)
    # torch.nn.attention.varlen's, which changes with each release
    forward = torch.ops.aten._flash_attention_forward
    found = forward(q, k, v, *block.lengths, 0.0, block.is_causal, False, scale=scale)
    return found[0], found[1].T


def _flash_backward(
    tensors: Sequence[Tensor], block: _Block, scale: float | None
) -> tuple[Tensor, ...]:
    """The block's part, of grad, q, k, v, merged out and lse."""
    if not tensors[0].is_cuda:
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return _flash_on_cpu(on_cpu, tensors, block, scale)
    grad, q, k, v, out, lse = tensors
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout
    offset = torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.T.contiguous(),
        *block.lengths,
        0.0,
        block.is_causal,
        seed,
        offset,
        scale=scale,
    )


def _flash_on_cpu(
    kernel: Any,
    tensors: Sequence[Tensor],
    block: _Block,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Call a kernel for [pieces, H, L, ...] with [pieces * L, H, ...]."""
    pieces = [tensor.unflatten(0, (block.num_pieces, -1)) for tensor in tensors]
    heads_first = [piece.transpose(1, 2) for piece in pieces]
    results = kernel(*heads_first, 0.0, block.is_causal, scale=scale)
    return tuple(result.transpose(1, 2).flatten(0, 1) for result in results)


@_fused
def _merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both, in the log-sum-exps' dtype."""
    lse = torch.logaddexp(a_lse, b_lse)
    a_weight = (a_lse - lse).exp()[..., None]
    b_weight = (b_lse - lse).exp()[..., None]
    return (a * a_weight + b * b_weight).to(a.dtype), lse


class _Cascade(torch.autograd.Function):
    """Attention [T, H, D] of a row."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        tree: Tree,
        scale: float | None,
    ) -> Tensor:
        out = q.new_empty(q.shape)  # blocks of level 0 come first, and fill it
        lse = q.new_empty(q.shape[:2], dtype=_wide(q))
        for block in _blocks(tree, q.device, q.is_cuda):
            queries = block.queries
            part, part_lse = _flash(q[queries], k[block.keys], v[block.keys], block, scale)
            if block.level > 0:
                part, part_lse = _merge(out[queries], lse[queries], part, part_lse)
            out[queries] = part
            lse[queries] = part_lse

        if sink is not None:  # a key without a value in every softmax
            out, lse = _merge(out, lse, torch.zeros_like(out), sink.to(lse.dtype).expand_as(lse))
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.tree = tree
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of every block's part."""
        q, k, v, sink, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        dq = torch.zeros_like(q)
        dk = torch.zeros_like(k, dtype=_wide(k))
        dv = torch.zeros_like(v, dtype=_wide(v))
        for block in _blocks(ctx.tree, q.device, q.is_cuda):
            tensors = (
                grad[block.queries],
                q[block.queries],
                k[block.keys],
                v[block.keys],
                out[block.queries],
                lse[block.queries],
            )
            parts = _flash_backward(tensors, block, ctx.scale)
            _add_part(dq, parts[0], block.queries)
            _add_part(dk, parts[1], block.keys)
            _add_part(dv, parts[2], block.keys)

        dsink = None
        if sink is not None:  # of a softmax with one more key: -p(sink) · grad·out, summed
            dsink = (grad.to(lse.dtype) * out).sum(-1) * (sink.to(lse.dtype) - lse).exp()
            dsink = -dsink.sum(0).to(sink.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsink, None, None


def _add_part(total: Tensor, part: Tensor, places: slice | Tensor) -> None:
    """Add a block's part of a gradient."""
    if isinstance(places, slice):
        total[places] += part
    else:  # several pieces may see the same keys
        total.index_add_(0, places, part.to(total.dtype))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    tree: Tree | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, H, T, D] -> [B, T, H, D]."""
    if tree is not None:
        return _over_tree(module, query, key, value, tree, options), None
    if options.get("s_aux") is None and options.get("softcap") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is None:
        ones = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
        attention_mask = ones.tril(key.shape[2] - query.shape[2])
    return _attend(module, query, key, value, attention_mask, options).transpose(1, 2), None


@torch.compiler.disable  # which could not follow it
def _over_tree(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tree,
    options: dict[str, Any],
) -> Tensor:
    """Attention of a row of segments, by the cascade where kernels take it: [1, T, H, D]."""
    if options.get("dropout"):
        raise ValueError("rows that share prefixes have no dropout in attention: set it to 0")
    if not _fits_kernels(query, value, tree, options):
        return _loop(module, query, key, value, tree, options).transpose(1, 2)

    head_size = value.shape[-1]
    if head_size < query.shape[-1]:  # the kernels want one head size
        value = F.pad(value, (0, query.shape[-1] - head_size))
    dtype = _computed_in(query)
    q = query.squeeze(0).transpose(0, 1).to(dtype)
    k = key.squeeze(0).transpose(0, 1).to(dtype)
    v = value.squeeze(0).transpose(0, 1).to(dtype)
    out: Tensor = _Cascade.apply(q, k, v, options.get("s_aux"), tree, options.get("scaling"))
    return out[None, ..., :head_size]


def _fits_kernels(query: Tensor, value: Tensor, tree: Tree, options: dict[str, Any]) -> bool:
    """Tells if flash kernels take a row's attention."""
    device = query.device
    size = query.shape[-1]
    longest = max(depth + length for _, length, depth, _ in tree.segments)
    window = options.get("sliding_window") or longest
    if longest > window or value.shape[-1] > size or options.get("softcap") is not None:
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return _computed_in(query) in HALF and size % 8 == 0 and size <= 256
    return device.type == "cpu"


# What no flash kernel takes: windows that bind (Mistral, Gemma, gpt-oss), softcaps (Gemma2), fp32
# on a GPU; in ordinary batches softcaps and sinks.


def _attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Attention [B, H, L, D] to the keys that are seen, [.., L, K] of bool.

    With a softcap or sinks by the model's own function, which is given next to the layer.
    """
    if options.get("softcap") is None and options.get("s_aux") is None:
        return F.scaled_dot_product_attention(
            q, k, v, seen, scale=options.get("scaling"), enable_gqa=True
        )
    # finite, not -inf: padding may see nothing
    mask = torch.where(seen, q.new_zeros(1), torch.finfo(q.dtype).min)
    file = sys.modules[type(module).forward.__module__]
    return file.eager_attention_forward(module, q, k, v, mask, **options)[0].transpose(1, 2)


def _loop(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: Tree,
    options: dict[str, Any],
) -> Tensor:
    """`_attend` of a row, `QUERY_BLOCK` queries of a segment at a time: [1, H, T, D].

    Each block works on copies of the keys that it sees, which are made again in backward.
    """
    window = options.get("sliding_window") or q.shape[2]
    row = torch.arange(q.shape[2], device=q.device)  # so that the host never waits for the device
    outs = []
    for path, sees_all in _in_row(tree.segments):
        context = torch.cat([row[run.start : run.stop] for run in path])
        shift = path[-1].stop - len(context)  # from a place on the path to one in the row

        for first in range(path[-1].start - shift, len(context), QUERY_BLOCK):
            stop = min(first + QUERY_BLOCK, len(context))
            oldest = max(first - window + 1, 0)
            newest = len(context) if sees_all else stop
            keys = context[oldest:newest]
            queries = q[:, :, shift + first : shift + stop]
            distance = row[first:stop, None] - row[oldest:newest]
            seen = ((distance >= 0) | sees_all) & (distance < window)
            given = (module, queries, k[:, :, keys], v[:, :, keys], seen, options)
            outs.append(checkpoint(_attend, *given, use_reentrant=False))
    return torch.cat(outs, dim=2)


# -- Gated delta nets: recurrent layers, whose state goes from a segment to those below it ---------


class _Handover:
    """A gated delta net's cache: takes the states from above, keeps the last one.

    Up to transformers 5.20 the net reads its attributes, from 5.21 on it calls `get_...`.
    """

    record_past = True  # the way that does not update states in place

    def __init__(self, layer: int, above: Sequence[Any], read: Tensor | None = None):
        self.layers = {layer: self}
        self.above = above
        self.read: Any = read  # by the run that leaves this state
        # the last inputs of the convolution [B, channels, K - 1]
        self.inputs: Tensor | None = None
        # the state of the delta rule [B, heads, d_k, d_v], in a list of one
        self.recurrent_states: list[Tensor | None] = [None]
        if above:
            self.inputs = torch.cat([state.inputs for state in above])
            self.recurrent_states = [torch.cat([state.recurrent_states[0] for state in above])]

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Called by the net."""
        return self.inputs is not None

    def is_recording_past(self, _: int) -> bool:
        """Called by the net."""
        return self.record_past

    def get_conv_state(self, _: int, **__: Any) -> Tensor | None:
        """Called by the net."""
        return self.inputs

    def get_recurrent_state(self, _: int, **__: Any) -> Tensor | None:
        """Called by the net."""
        return self.recurrent_states[0]

    def update_conv_state(self, inputs: Tensor, _: int, conv_kernel_size: int, **__: Any) -> Tensor:
        """Called by the net: inputs with those before."""
        num_past = conv_kernel_size - 1
        if self.inputs is None:
            seen = F.pad(inputs, (num_past, 0))
        else:
            seen = torch.cat([self.inputs, inputs], -1)

        self.inputs = seen[..., seen.shape[-1] - num_past :]
        return seen

    def update_recurrent_state(self, state: Tensor, _: int, **__: Any) -> None:
        """Called by the net."""
        self.recurrent_states = [state]


@torch.compiler.disable
def _delta_net(
    forward: Any,
    layer: int,
    hidden_states: Tensor,
    tree: Tree | None = None,
    **more: Any,
) -> Tensor:
    """The forward of a gated delta net that takes a tree.

    Segments run from fork to fork, roots without forks whole; what is left of them in one batch.
    """
    if tree is None:
        return forward(hidden_states, **more)
    forks = {path[-2].stop for path in _paths(tree.segments) if len(path) > 1}
    num_forks = accumulate(place in forks for place in range(hidden_states.shape[1]))
    states: dict[int, _Handover] = {}  # by the place behind which they stand
    outs: dict[int, Tensor] = {}  # by the place where they begin
    leaves = []
    for path in _paths(_cut(tree.segments, list(num_forks))):
        own = path[-1]
        inputs = hidden_states[:, own.start : own.stop]
        above: Any = [states[run.stop] for run in path[-2:-1]]
        if above and own.stop not in forks:
            leaves.append((own, inputs[0], above[0]))
            continue
        # a single token would take decoding kernels: with what was read before
        if above and len(own) == 1:
            inputs = torch.cat([above[0].read, inputs], 1)
            above = above[0].above
        states[own.stop] = _Handover(layer, above, inputs)
        outs[own.start] = forward(inputs, states[own.stop])[0, -len(own) :]

    if leaves:
        runs, parts, above = zip(*leaves, strict=True)
        batch = pad_sequence(list(parts), batch_first=True)
        batch = F.pad(batch, (0, 0, 0, 1))  # as above: not a single token
        for run, out in zip(runs, forward(batch, _Handover(layer, above)), strict=True):
            outs[run.start] = out[: len(run)]
    return torch.cat([outs[start] for start in sorted(outs)])[None]


# -- attach ----------------------------------------------------------------------------------------

VISION = frozenset({"qwen2_5_vl", "qwen3_vl", "gemma3", "llava"})  # whose images the tests compare
WHOLE_IMAGES = frozenset({"gemma3"})  # whose image tokens see all of their image


def attach(
    model: Any,
    verify: bool = True,
    example: tuple[list[int], dict[str, Any]] | None = None,
) -> Any:
    """Swap shared-prefix attention into a Hugging Face causal language model, in place.

    Ordinary batches go through sdpa from now on. Dropout outside attention (LoRA's) falls on a
    prompt once for all its completions.

    Args:
        model: wrapped (DDP, FSDP2, peft) or not; returned.
        verify: compare log-probs and gradients of a few random groups with one plain row per
            completion; False leaves it out. Collective where the model is sharded.
        example: the tokens of a prompt with images, and what the processor makes of these, to
            compare, too; types outside `VISION` need one.

    Raises:
        ValueError: shared prefixes would not be exact for this model; names the reason.
        OutOfMemoryError: there is no room for the comparison.
    """
    base = base_model(model)
    for module in base.modules():
        is_delta_net = type(module).__name__.endswith("GatedDeltaNet")
        if is_delta_net and getattr(module.forward, "func", None) is not _delta_net:
            module.forward = partial(_delta_net, module.forward, module.layer_idx)

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = base.config.get_text_config(decoder=True)._attn_implementation
    base.shares_prefixes = True  # on the model: its config may be that of one that is not attached
    base.shares_images = example is not None or base.config.model_type in VISION
    try:
        _refuse(base)
        _use(base, NAME)
        if verify:
            _verify(model, example)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model that nobody tried does with a row of segments
        _use(base, before)
        base.shares_prefixes = False
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{type(base).__name__} cannot share prefixes: {reason}; "
            "go without (share_prefix=False)"
        ) from error
    return model


def base_model(model: Any) -> Any:
    """The Hugging Face model inside torch.compile, DDP and peft."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            "prompt learning adds tokens to every row: their log-probs are not available"
        )
    if hasattr(model, "_orig_mod"):
        return base_model(model._orig_mod)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return base_model(model.module)
    if hasattr(model, "get_base_model"):
        return base_model(model.get_base_model())
    return model


def _refuse(base: Any) -> None:
    """Raise a ValueError for what short texts would not show."""
    config = base.config.get_text_config(decoder=True)
    odd = set(getattr(config, "layer_types", None) or ())
    odd -= {"full_attention", "sliding_attention", "linear_attention"}
    if odd:
        raise ValueError(f"layers of type {', '.join(sorted(odd))} do not see a whole prefix")
    if rope_limit(config) < math.inf:
        raise ValueError("longrope and dynamic position embeddings depend on the longest text")
    if getattr(config, "sliding_window", None):
        kinds = {type(module) for module in base.modules() if "Attention" in type(module).__name__}
        # of the forward, as FSDP2 makes classes without a source
        if not any("sliding_window=" in inspect.getsource(kind.forward) for kind in kinds):
            raise ValueError(
                "its sliding window is in the mask alone and does not reach the attention function"
            )


def rope_limit(config: Any) -> float:
    """The longest text, in tokens, that does not change a model's rope factors; mostly inf.

    Beyond it longrope and dynamic NTK take others: here for all texts of a forward, and in vLLM for
    all texts of a server whose --max-model-len exceeds it.
    """
    config = config.get_text_config(decoder=True)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # of all layers, or by their types
        match rope:
            case {"rope_type": "longrope" | "dynamic"}:
                length = rope.get("original_max_position_embeddings")
                return length or config.max_position_embeddings
    return math.inf


def _use(base: Any, name: str) -> None:
    """Set the attention implementation of the language model; other towers keep theirs."""
    parts = [part for part in base.config.sub_configs if "text" in part]
    base.set_attn_implementation(dict.fromkeys(["", *parts], name))


def _verify(model: Any, example: tuple[list[int], dict[str, Any]] | None) -> None:
    """Compare log-probs and gradients of shared rows with those of plain ones."""
    base = base_model(model)
    gradients = {weight: weight.grad for weight in base.parameters()}
    try:
        with evaluating(model):  # dropout would be another one every time
            plain, is_half = _trial(model, "eager", example)
            shared, _ = _trial(model, NAME, example)
    finally:
        for weight, gradient in gradients.items():
            weight.grad = gradient

    limit = 5e-2 if is_half else 1e-4
    errors = _errors(plain, shared, is_half)
    if not all(error <= limit for error in errors):  # NaN is over it, too
        raise ValueError(
            f"log-probs or gradients differ from plain rows by {max(errors):.2g}, over {limit:.0e}"
        )


def _errors(plain: list[Tensor], shared: list[Tensor], is_half: bool) -> list[float]:
    """Relative errors of log-probs, and a tenth of those of gradients."""
    # a random model's log-probs are all nearly the same
    spread = plain[0].std().item() if is_half else 1.0
    errors = [(shared[0] - plain[0]).abs().mean().item() / spread]
    norms = [gradient.double().norm().item() for gradient in plain[1:]]
    # some gradients, as of a bias of all keys, are nothing but rounding
    least = 0.01 * max(norms, default=0.0) or 1.0
    for right, found, norm in zip(plain[1:], shared[1:], norms, strict=True):
        error = (found - right).double().norm().item() / max(norm, least)
        errors.append(error / 10)
    return errors


def _trial(
    model: Any, attention: str, example: tuple[list[int], dict[str, Any]] | None
) -> tuple[list[Tensor], bool]:
    """Log-probs and gradients of three groups of random words; True for logits in 16 bits."""
    base = base_model(model)
    vocab_size = base.config.get_text_config(decoder=True).vocab_size
    words = range(vocab_size // 2, vocab_size * 3 // 4)  # placeholders of images stand at the ends
    draw = partial(random.Random(0).choices, words)
    prompt, images = example or (draw(k=7), {})
    groups = [(draw(k=9), [draw(k=5), draw(k=2), draw(k=7)])]
    groups += [(draw(k=8), [draw(k=6), draw(k=3)])]
    groups += [(prompt, [draw(k=5), draw(k=4)])]

    base.zero_grad()
    _use(base, attention)
    row = pack(groups, share_prefix=attention == NAME, apart={2})[0].to(device_of(base))
    num = row.prompts.count(2)  # as often is the third group's prompt there
    inputs: dict[str, Any] = {
        name: torch.cat([value.to(row.cells.device)] * num) for name, value in images.items()
    }
    with torch.enable_grad():  # whatever the caller's mode
        if attention == NAME:
            found = completion_logprobs(model, row, **inputs)
            logprobs = found
        else:  # by the model alone
            found = model(**_inputs(base, row, inputs)).logits.flatten(0, 1)[row.cells]
            logprobs = -F.cross_entropy(found.double(), row.targets, reduction="none")
        if logprobs.requires_grad:
            logprobs.backward(torch.linspace(-1, 1, len(logprobs)).to(logprobs))
    results = [logprobs.detach()]
    for weight in base.parameters():
        if weight.grad is not None:
            results.append(getattr(weight.grad, "_local_tensor", weight.grad).clone())
    return results, found.dtype in HALF


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and after the block each of its modules in the mode it had."""
    in_train_mode = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_train_mode:
            module.training = True


def device_of(model: nn.Module) -> torch.device:
    """The device that computes; FSDP2 may keep weights elsewhere."""
    weight: Any = next(model.parameters())
    if hasattr(weight, "device_mesh"):
        return torch.device(weight.device_mesh.device_type)
    return weight.device


# -- Log-probabilities -----------------------------------------------------------------------------


class _Asked(NamedTuple):
    """Asks a model for log-probs and entropies in place of logits."""

    cells: Tensor  # [N], as in a row
    targets: Tensor  # [N]
    temperature: float
    forbidden: Sequence[int]  # tokens without probability
    with_entropy: bool


def completion_logprobs(
    model: Any,
    row: PackedBatch,
    temperature: float = 1.0,
    return_entropy: bool = False,
    forbidden: Sequence[int] = (),
    inputs_embeds: Tensor | None = None,
    **images: Any,
) -> Any:
    """log p(token | what is before) for every completion token of a row.

    Args:
        model: a causal language model, wrapped or not; attached where the row shares prefixes.
        row: from `pack`, on the model's device.
        temperature: logits are divided by it; above 0.
        return_entropy: also return the entropy of each of the N distributions, differentiable.
        forbidden: tokens without probability, as the sampler could not draw them (placeholders).
        inputs_embeds: [R, T, hidden], features that the model reads in place of `row.input_ids` (a
            soft prompt, another modality), differentiable; not together with images.
        images: what the processor makes of images of `row.prompts`, in order (`pixel_values`, ...).

    Returns:
        [N] fp32 (fp64 for an fp64 model), nats, in the order group, completion, token;
        differentiable. With `return_entropy` a pair: those, and the entropies [N], nats.

    Raises:
        ValueError: arguments that do not fit, a shared row without `attach`, a model without head.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    base = base_model(model)
    if getattr(base.forward, "func", None) is not _forward:  # is reached through every wrapper
        base.forward = wraps(base.forward)(partial(_forward, base, base.forward))
    inputs = _inputs(base, row, images, inputs_embeds)
    asked = _Asked(row.cells, row.targets, temperature, forbidden, return_entropy)
    logprobs, entropies = model(asked=asked, **inputs)
    return (logprobs, entropies) if return_entropy else logprobs


def _forward(
    base: Any, original: Any, *args: Any, asked: _Asked | None = None, **inputs: Any
) -> Any:
    """A model's forward; with `asked` it gives log-probs and entropies, each [N]."""
    if asked is None:
        return original(*args, **inputs)
    # peft hands on what nobody gave, as None
    inputs = {name: value for name, value in inputs.items() if value is not None}
    outputs = base.base_model(**inputs)
    hidden = outputs.last_hidden_state.flatten(0, 1).index_select(0, asked.cells)
    # without the states of all positions, which nothing needs any more
    head = partial(_logits, base, original, replace(outputs, last_hidden_state=None))
    return _in_chunks(head, hidden, base.config.get_text_config(decoder=True).vocab_size, asked)


def _logits(base: Any, original: Any, outputs: Any, hidden: Tensor) -> Tensor:
    """The model's logits [n, V] of hidden states [n, H], fp32 or fp64.

    Its own forward makes them, around a body that gives these states: with adapters, softcap and
    factors, whatever comes after the body.
    """
    given = replace(outputs, last_hidden_state=hidden[None])
    with patch.object(base.base_model, "forward", lambda *_, **__: given), _WideProducts():
        logits = original().logits.flatten(0, 1)
    return logits.to(_wide(logits))


@torch.compiler.disable
def _in_chunks(
    head: Callable[[Tensor], Tensor], hidden: Tensor, vocab_size: int, asked: _Asked
) -> tuple[Tensor, ...]:
    """Log-probs and entropies [N]; backward makes the logits of each chunk again."""
    forbidden = asked.targets.new_tensor(asked.forbidden)

    def token_stats(hidden: Tensor, targets: Tensor, known: list[Tensor]) -> Any:
        return _Stats.apply(head(hidden), targets[:, None], forbidden, asked, known)

    num_logits = HEAD_CHUNK["cuda" if hidden.is_cuda else "cpu"]
    num_chunks = max(1, len(hidden) // math.ceil(num_logits / vocab_size))
    logprobs = []
    entropies = []
    for chunk in zip(
        hidden.tensor_split(num_chunks), asked.targets.tensor_split(num_chunks), strict=True
    ):
        known: list[Tensor] = []  # its statistics, once forward has them
        of_chunk: Any = checkpoint(token_stats, *chunk, known, use_reentrant=False)
        logprobs.append(of_chunk[0])
        entropies.append(of_chunk[1])
    return torch.cat(logprobs), torch.cat(entropies)


class _WideProducts(TorchFunctionMode):
    """Lets linear layers give fp32 for 16-bit factors, in which CUDA sums their products."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions."""
        kwargs = kwargs or {}
        if function is F.linear and _computed_in(args[0]) in HALF:
            function = _linear32
        return function(*args, **kwargs)


def _linear32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dtype = _computed_in(x)
    with torch.autocast(x.device.type, enabled=False):
        if x.is_cuda:
            product = _Product32.apply(x.to(dtype).flatten(0, -2), weight.to(dtype))
            product = product.unflatten(0, x.shape[:-1])
        else:
            product = F.linear(x.float(), weight.float())
    return product if bias is None else product + bias


class _Product32(torch.autograd.Function):
    """x·Wᵀ of [n, K] and [V, K] in 16 bits, given in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return grad @ weight, grad.T @ x if ctx.needs_input_grad[1] else None


class _Stats(torch.autograd.Function):
    """Log softmax at the targets [n, 1], and entropies, of logits [n, V]: two [n].

    The logits are used up: autograd would copy what changes in place.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, forbidden: Tensor, asked: _Asked,
        known: list[Tensor],
    ) -> Any:  # fmt: skip
        if asked.temperature != 1:
            logits.div_(asked.temperature)
        logits.index_fill_(-1, forbidden, NEVER)
        if not known:  # else backward has made the logits again, and needs nothing else
            known += _read(logits, targets, asked.with_entropy)
        logprobs, normalizers, entropies = known
        ctx.save_for_backward(logits, targets, normalizers, entropies)
        ctx.temperature = asked.temperature
        ctx.set_materialize_grads(False)  # None for what no loss reads, most often entropies
        return logprobs[:, 0], entropies[:, 0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: they are made again
        g = torch.zeros_like(saved[2]) if grad is None else grad[:, None] / ctx.temperature
        h = None if entropy_grad is None else entropy_grad[:, None] / ctx.temperature
        return _derive(*saved, g, h), None, None, None, None


@_fused
def _read(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log Σ exp and entropies (or zeros), each [n, 1]; the logits are used up."""
    top = logits.amax(-1, keepdim=True)
    shifted = _less(logits, top)
    chosen = shifted.gather(-1, targets)
    p = shifted.exp() if with_entropy else shifted.exp_()
    total = p.sum(-1, keepdim=True)
    log_total = total.log()
    entropies = torch.zeros_like(total)
    if with_entropy:  # Σ p·logit by no product that autocast would round
        entropies = log_total - p.mul_(shifted).sum(-1, keepdim=True) / total
    return chosen - log_total, top + log_total, entropies


@_fused
def _derive(
    logits: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    g: Tensor,
    h: Tensor | None,
) -> Tensor:
    """g·(onehot - p) - h·p·(log p + entropy) [n, V]; g and h [n, 1] are gradients."""
    logp = _less(logits, normalizers)
    of_target = logp.gather(-1, targets)
    chosen = torch.expm1(of_target) * -g  # of more digits than g - p·g
    slope = g
    if h is not None:
        chosen = chosen - of_target.exp() * (of_target + entropies) * h
        slope = (logp + entropies).mul_(h).add_(g)
    return logp.exp_().mul_(-slope).scatter_(-1, targets, chosen)


def _less(logits: Tensor, column: Tensor) -> Tensor:
    """Logits less a column; on a GPU, compiled, in place would cost a pass."""
    return logits - column if logits.is_cuda else logits.sub_(column)


def _inputs(
    base: Any, row: PackedBatch, images: dict[str, Any], inputs_embeds: Tensor | None = None
) -> dict[str, Any]:
    """A model's arguments for a row: token ids, or features instead."""
    if base.get_output_embeddings() is None:
        raise ValueError(f"{type(base).__name__} has no language-model head")
    if images and inputs_embeds is not None:
        raise ValueError(
            f"inputs_embeds and {', '.join(images)}: "
            "a model finds the places of images by token ids"
        )
    inputs = {"use_cache": False, "input_ids": row.input_ids, **images}
    tree = row.tree
    if tree is not None:
        config = base.config.get_text_config()
        if config._attn_implementation != NAME or not getattr(base, "shares_prefixes", False):
            raise ValueError(
                "this row shares prefixes: attach(model) first, or pack(..., share_prefix=False)"
            )
        kind = base.config.model_type
        if images and not base.shares_images:
            raise ValueError(
                f"a {kind} with images: attach(model, example=...) first, to compare it"
            )
        if images and kind in WHOLE_IMAGES:
            tree = Tree(_cut(tree.segments, _kinds(base, row.input_ids[0]).tolist()))
        inputs |= {"tree": tree, "position_ids": row.position_ids}
        if "image_grid_thw" in images:
            inputs["position_ids"] = _rope_positions(base, row, tree, images)
        # a mask that says nothing: one of 4 dimensions is handed through
        inputs["attention_mask"] = row.input_ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
    else:  # as any model's own attention takes it
        if row.input_ids.shape[1] > rope_limit(base.config):
            raise ValueError("a text is too long for the rope factors of others in its row: cut it")
        inputs["attention_mask"] = row.attention_mask
        for name in ("mm_token_type_ids", "token_type_ids"):
            if images and name in inspect.signature(base.forward).parameters:
                inputs[name] = _kinds(base, row.input_ids)

    if inputs_embeds is not None:
        shape = inputs.pop("input_ids").shape
        if inputs_embeds.shape[:-1] != shape:
            raise ValueError(
                f"inputs_embeds {[*inputs_embeds.shape]} of a row of {[*shape]} tokens"
            )
        # without ids Qwen-VL would shift positions by the images of an earlier row
        inputs |= {"inputs_embeds": inputs_embeds, "position_ids": row.position_ids}
    return inputs


# -- Images ----------------------------------------------------------------------------------------


def _kinds(base: Any, ids: Tensor) -> Tensor:
    """0 for text, 1 for placeholders of images."""
    return (ids == base.config.image_token_id).int()


def _rope_positions(base: Any, row: PackedBatch, tree: Tree, images: dict[str, Any]) -> Tensor:
    """M-RoPE positions [3, 1, T]: the model's own of roots, and shifted by their images below."""
    roots = [
        row.input_ids[0, start : start + length]
        for start, length, depth, _ in tree.segments
        if depth == 0
    ]
    ids = pad_sequence(roots, batch_first=True, padding_value=-2)
    of_roots, deltas = base.model.get_rope_index(
        ids, _kinds(base, ids), **images, attention_mask=(ids >= 0).long()
    )

    positions = row.position_ids.expand(3, 1, -1).clone()
    root = -1
    for start, length, depth, _ in tree.segments:
        own = positions[:, 0, start : start + length]
        if depth > 0:
            own += deltas[root]
        else:
            root += 1
            own[:] = of_roots[:, root, :length]
    return positions
