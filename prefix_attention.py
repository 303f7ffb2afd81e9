"""Shared-prefix attention: forward each prompt once for all its completions, exactly.

    model = attach(AutoModelForCausalLM.from_pretrained(...))
    for row in pack(groups, max_tokens=8192):                     # groups: (prompt_ids, [completion_ids, ...])
        logprobs = completion_logprobs(model, row)                # [N], of the tokens `row.index`

`pack` lays sequences into rows without padding, in which what several begin with stands once. `attach` teaches a
Hugging Face model to run such a row. `completion_logprobs` applies the head only where a completion token is predicted,
and never holds the logits of a whole row. Needs only torch and transformers, and can be copied alone.
"""

import inspect
import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "shared_prefix"  # of the attention function in transformers
HEAD_CHUNK = {"cpu": 1 << 23, "cuda": 1 << 28}  # logits that the head holds at a time
QUERY_BLOCK = 512  # queries at a time in `_loop`
MIN_SAVED = 0.05  # of the tokens below: sharing what saves less would only make more and smaller kernel calls
SMALL = 64  # on the CPU, calls of at most SMALL² scores are made together: each costs more than its work

Tokens = Sequence[int] | Tensor  # a tensor is [n] int64, on the CPU
Groups = Sequence[tuple[Tokens, Sequence[Any]]]  # (prompt_ids, [completion_ids, ...]), see `pack`


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums and log-sum-exps: fp64 for an fp64 tensor, else fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


_fused: Any = torch.compile(dynamic=True, disable=not torch.cuda.is_available())  # on a GPU, one pass over memory


# -- Rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedBatch:
    """One forward's worth of tokens; R rows of T positions (one, or padded ones) hold N completion tokens.

    Attributes:
        input_ids, position_ids: [R, T] int64; positions restart in every segment where it branches off.
        attention_mask: [R, T] int64, 1 on tokens (by length, never by the value of a token); None with segments.
        segments: [S, 5] int64 on the CPU: start, length, parent or -1, how many of the parent's tokens come before it,
            and 1 where its tokens also see later ones of it (an image; 0 here); None in padded rows.
        row, position: [N] int64, where the logits that predict each completion token stand.
        targets: [N] int64, the completion tokens.
        group, completion: [N] int64, number of the group and of the completion among all given to `pack`.
        index: [N] int64, place of the token among all given to `pack`, in the order group, completion, token.
        prompts: for every root, in order, the group whose prompt it begins with; None for that of several groups.
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
    prompts: list[int | None]

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> Self:
        """The same row on `device`; `segments` stay on the CPU, where attention reads them."""
        moved: Any = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor) and n != "segments"}
        return replace(self, **moved)


def as_tokens(ids: Tokens) -> Tensor:
    """Token ids as [n] int64."""
    if isinstance(ids, Tensor) or not len(ids):
        return torch.as_tensor(ids, dtype=torch.int64)
    return torch.frombuffer(array("q", ids), dtype=torch.int64)  # many times as fast as `torch.tensor` of a long list


def pack(
    groups: Groups, max_tokens: int | None = None, share_prefix: bool = True, apart: Collection[int] = ()
) -> list[PackedBatch]:
    """Lay groups out as forwards of at most `max_tokens` positions.

    What several sequences of a row begin with is forwarded once, but where that saves less than `MIN_SAVED`: prompts,
    what these have in common, a history that goes on or branches. A group goes where it adds the fewest tokens; one
    over the budget is split into completions, and these into segments. The last token of a completion predicts nothing.

    Args:
        groups: `(prompt_ids, completions)` of one prompt each. A completion is its tokens, or, where its history was
            rewritten, a list of segments `(prompt_ids, tokens)`; an empty one contributes nothing.
        max_tokens: bound on R·T of a batch; None puts everything into one.
        share_prefix: False gives one right-padded row per completion, for any model's own attention.
        apart: numbers of groups that share nothing with others: those with images, which token ids do not tell apart.
            Prompts of their segments begin with the group's.

    Raises:
        ValueError: an empty prompt, or a prompt and completion that alone exceed `max_tokens`, named by number.
    """
    budget = math.inf if max_tokens is None else max_tokens
    rows, empty = list[_Row](), _Row(is_padded=not share_prefix)
    for group in _sequences(groups, share_prefix, apart, budget):
        for unit, alone in _units(group, empty, budget):
            open_rows = range(len(rows)) if share_prefix else range(len(rows))[-1:]  # padded rows keep the order
            wider = [(rows[n].and_also(unit), n) for n in open_rows]
            fitting = [(row.num_tokens - rows[n].num_tokens, n, row) for row, n in wider if row.num_tokens <= budget]
            _, n, row = min(fitting, key=itemgetter(0), default=(0, len(rows), alone))
            rows[n : n + 1] = [row]
    return [_batch(row) for row in rows]


def num_packed_tokens(groups: Groups, share_prefix: bool = True, apart: Collection[int] = ()) -> int:
    """Positions of a single row of all groups."""
    wholes = ([s for unit in group for s in unit] for group in _sequences(groups, share_prefix, apart, math.inf))
    return _Row(is_padded=not share_prefix).and_also(*wholes).num_tokens


def _units(group: list[list["_Sequence"]], empty: "_Row", budget: float) -> Iterator[tuple[list["_Sequence"], "_Row"]]:
    """A group's sequences, each completion's, or each one, and a row of these: the most that may share and fit."""
    whole = [sequence for completion in group for sequence in completion]
    if whole and not empty.is_padded and (row := empty.and_also(whole)).num_tokens <= budget:
        yield whole, row
        return
    for completion in filter(None, group):
        fits = (row := empty.and_also(completion)).num_tokens <= budget
        yield from [(completion, row)] if fits else [([one], empty.and_also([one])) for one in completion]


class _Sequence(NamedTuple):
    """What is forwarded for a completion, or a segment of one: its prompt and its tokens but the last."""

    key: tuple[int, bytes]  # a number that sequences need in common to share, and the ids: alike ones are neighbours
    ids: Any  # [n] int64, of numpy
    tokens: Tensor  # those that are predicted
    group: int
    completion: int
    place: int  # of its first token among all completion tokens


def _sequences(groups: Groups, shares: bool, apart: Collection[int], budget: float) -> Iterator[list[list[_Sequence]]]:
    """For every group the sequences of each of its completions; none for an empty one."""
    number = place = 0
    for g, (prompt_ids, completions) in enumerate(groups):
        of_group: list[list[_Sequence]] = []
        for c, completion in enumerate(completions):
            has_segments = not isinstance(completion, Tensor) and len(completion) and isinstance(completion[0], tuple)
            of_group.append([])
            for pair in completion if has_segments else [(prompt_ids, completion)]:
                prompt, tokens = map(as_tokens, pair)
                if not prompt.numel():
                    raise ValueError(f"group {g} has an empty prompt: nothing predicts the first completion token")
                if (num := prompt.numel() + tokens.numel()) - 1 > budget:
                    raise ValueError(f"completion {c} of group {g} has {num} tokens with its prompt, over {budget}")
                if tokens.numel():
                    ids = torch.cat([prompt, tokens[:-1]]).numpy()
                    shares_with = place if not shares else g if g in apart else -1
                    of_group[-1].append(_Sequence((shares_with, ids.tobytes()), ids, tokens, g, number, place))
                place += tokens.numel()
            number += 1
        yield of_group


@dataclass(eq=False)  # a key of dictionaries
class _Branch:
    """A sequence in a row: a segment of its tokens from `depth` on; those before stand in the branches above."""

    sequence: _Sequence
    depth: int
    above: "list[_Branch]"  # the nearest first

    @classmethod
    def of(cls, sequence: _Sequence, neighbours: "list[_Branch]") -> Self:
        """The branch off what a sequence has in common with a neighbour, where that saves enough."""
        num_tokens, depth, path = len(sequence.ids), 0, list[_Branch]()
        for branch in neighbours:
            shortest = min(num_tokens, len(branch.sequence.ids)) * (sequence.key[0] == branch.sequence.key[0])
            differ = sequence.ids[:shortest] != branch.sequence.ids[:shortest]
            if (common := int(differ.argmax()) if differ.any() else shortest) > depth:
                depth, path = common, [branch, *branch.above]
        prompt_length = num_tokens - len(sequence.tokens) + 1
        # A fork moves up to the end of the prompt, or a branch above, that is near; that of a prompt with images stays.
        for fork in sorted([prompt_length, *(branch.depth for branch in path)], reverse=True):
            may_move = (fork == 0 or depth != prompt_length) and (fork > 0 or sequence.key[0] < 0)
            if may_move and 0 < depth - fork < MIN_SAVED * (num_tokens - fork):
                depth = fork
        return cls(sequence, depth, [branch for branch in path if branch.depth < depth])

    @property
    def length(self) -> int:
        """How many tokens it adds; 0 where its sequence is the beginning of another."""
        return len(self.sequence.ids) - self.depth


@dataclass
class _Row:
    """Sequences that are forwarded together, as branches sorted by their keys."""

    is_padded: bool
    branches: list[_Branch] = field(default_factory=list)

    def and_also(self, *units: list[_Sequence]) -> "_Row":
        """The row with some sequences more. The longest of a unit come first: the others branch off them."""
        branches = [*self.branches]
        for sequence in (s for unit in units for s in sorted(unit, key=lambda s: -len(s.ids))):
            place = bisect_left(branches, sequence.key, key=lambda branch: branch.sequence.key)
            neighbours = branches[max(place - 1, 0) : place + 1]  # with one of them it has the most in common
            branches.insert(place, _Branch.of(sequence, neighbours))
        return _Row(self.is_padded, branches)

    @cached_property
    def num_tokens(self) -> int:
        """Positions of its forward."""
        lengths = [branch.length for branch in self.branches]
        return len(lengths) * max(lengths, default=0) if self.is_padded else sum(lengths)


def _batch(row: _Row) -> PackedBatch:
    """A row of segments; or, padded, a row for each sequence."""
    # by level, and then what sees the same stands side by side
    order = lambda b: (len(b.above), [a.sequence.place for a in b.above[:1]], b.depth, b.sequence.place)  # noqa: E731
    segments = sorted((branch for branch in row.branches if branch.length), key=order)
    lengths = [segment.length for segment in segments]
    starts = dict(zip(segments, [0] * len(segments) if row.is_padded else accumulate([0, *lengths]), strict=False))
    numbers = {segment: number for number, segment in enumerate(segments)}
    branches = sorted(row.branches, key=lambda branch: branch.sequence.place)
    position = _ranges([source for branch in branches for source in _sources(branch, starts)])
    ids = torch.cat([torch.from_numpy(segment.sequence.ids[segment.depth :]) for segment in segments])
    rows = [ids, _ranges([(segment.depth, segment.length) for segment in segments]), torch.ones_like(ids)]
    ids, positions, ones = (pad_sequence(list(of.split(lengths)), True) if row.is_padded else of[None] for of in rows)
    sequences = [branch.sequence for branch in branches]
    of_sequences = [(numbers[b] if row.is_padded else 0, b.sequence.group, b.sequence.completion) for b in branches]
    sizes = torch.tensor([len(sequence.tokens) for sequence in sequences])
    in_row, group, completion = (torch.tensor(of).repeat_interleave(sizes) for of in zip(*of_sequences, strict=True))
    targets = torch.cat([sequence.tokens for sequence in sequences])
    index = _ranges([(sequence.place, len(sequence.tokens)) for sequence in sequences])
    forks = [(numbers[s.above[0]], s.depth - s.above[0].depth) if s.above else (-1, 0) for s in segments]
    plan = torch.tensor([(starts[s], s.length, *fork, 0) for s, fork in zip(segments, forks, strict=True)])
    below: dict[_Branch, set[int]] = {}
    for branch in branches:
        below.setdefault([branch, *branch.above][-1], set()).add(branch.sequence.group)
    prompts = [min(below[s]) if len(below[s]) == 1 else None for s in segments if not s.above]
    mask, plan_or_none = (ones, None) if row.is_padded else (None, plan)
    of_tokens = in_row, position, targets, group, completion, index
    return PackedBatch(ids, positions, mask, plan_or_none, *of_tokens, prompts)


def _sources(branch: _Branch, starts: dict[_Branch, int]) -> list[tuple[int, int]]:
    """Where the tokens of its sequence are predicted, as (place in the row, length)."""
    found, stop = [], len(branch.sequence.ids)
    first = stop - len(branch.sequence.tokens)
    for segment in (branch, *branch.above):
        if (start := max(first, segment.depth)) < stop:
            found.append((starts[segment] + start - segment.depth, stop - start))
            stop = start
    return found[::-1]


def _ranges(pairs: list[tuple[int, int]]) -> Tensor:
    """`range(start, start + length)` of every (start, length), one after the other: [sum of lengths] int64."""
    starts, sizes = torch.tensor(pairs).T
    return torch.arange(int(sizes.sum())) + (starts - sizes.cumsum(0) + sizes).repeat_interleave(sizes)


# -- Attention over a row of segments --------------------------------------------------------------------------------
# The cascade: every segment attends causally to itself, then to what it sees of its parent, of its parent's parent,
# and so on. A softmax over all keys equals the softmaxes over blocks of keys, merged by their log-sum-exps: exactly.
# On CUDA a level is one kernel call, which copies parents' keys; or several, each of about as many as the row's tokens.
# The kernels' log-sum-exp has no gradient, so autograd cannot go through the merge. But flash attention's backward
# makes p = exp(q·k - lse) again, and needs only rowsum(grad·out) besides: from the *merged* output and log-sum-exp it
# computes the block's part of the whole gradient. As an operator the cascade takes `segments` as data, also compiled.


def _paths(plan: Tensor) -> list[list[range]]:
    """Of each segment its own tokens, then what it sees of its parent, of its parent's parent, and so on."""
    paths: list[list[range]] = []
    for start, length, parent, seen, _ in plan.tolist():
        above = [paths[parent][0][:seen], *paths[parent][1:]] if parent >= 0 else []
        paths.append([range(start, start + length), *above])
    return paths


class _Block(NamedTuple):
    """One kernel call for several pieces of queries and keys, which on the CPU have the same sizes."""

    level: int
    is_causal: bool
    num_pieces: int
    queries: slice | Tensor  # tokens of the row: a slice where they are adjacent, which copies nothing
    keys: slice | Tensor
    lengths: tuple[Any, ...]  # as CUDA's kernels take them: cumulative of queries and of keys, the longest of each


@lru_cache(maxsize=16)
def _blocks(plan: bytes, device: torch.device, is_cuda: bool) -> list[_Block]:
    """The kernel calls of a row, from level 0 on, made once for the forward and backward passes of all layers."""
    numbers = torch.frombuffer(bytearray(plan), dtype=torch.int64).view(-1, 5)
    num_tokens = int(numbers[-1, :2].sum())
    levels: dict[tuple[int, int], list[tuple[range, range]]] = {}  # queries and keys; 0: of the segment itself
    for (*_, sees_all), path in zip(numbers.tolist(), _paths(numbers), strict=True):
        for level, keys in enumerate(path):
            queries, pieces = path[0], levels.setdefault((level, sees_all if level == 0 else 0), [])
            if level and pieces and pieces[-1][1] == keys and pieces[-1][0].stop == queries.start:
                queries = range(pieces.pop()[0].start, queries.stop)
            pieces.append((queries, keys))
    blocks = []
    for (level, sees_all), pieces in sorted(levels.items()):
        calls: dict[Any, list[tuple[range, range]]] = {}
        num_keys = 0
        for queries, keys in pieces:
            sizes, num_keys = (len(queries), len(keys)), num_keys + len(keys)
            kind = sizes if math.prod(sizes) <= SMALL * SMALL else queries
            calls.setdefault((num_keys - 1) // num_tokens if is_cuda else kind, []).append((queries, keys))
        for call in calls.values():
            sides = list(zip(*call, strict=True))
            lengths = [torch.tensor([0, *accumulate(map(len, side))], dtype=torch.int32).to(device) for side in sides]
            longest = [max(map(len, side)) for side in sides]
            of_q, of_k = (_places(side, device) for side in sides)
            blocks.append(_Block(level, level == 0 and not sees_all, len(call), of_q, of_k, (*lengths, *longest)))
    return blocks


def _places(pieces: Sequence[range], device: torch.device) -> slice | Tensor:
    """The tokens of pieces as an index: a slice where they are adjacent."""
    if all(before.stop == piece.start for before, piece in pairwise(pieces)):
        return slice(pieces[0].start, pieces[-1].stop)
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces]).to(device)


def _flash(q: Tensor, k: Tensor, v: Tensor, block: _Block, scale: float) -> tuple[Tensor, ...]:
    """Flash attention of a block's tokens: q [L, H, D], k and v [K, H_kv, D] -> out [L, H, D], log-sum-exp [L, H]."""
    if not q.is_cuda:
        return _flash_on_cpu(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, (q, k, v), block, scale)
    forward = torch.ops.aten._flash_attention_forward  # torch.nn.attention.varlen's, which changes with each release
    out, lse, *_ = forward(q, k, v, *block.lengths, 0.0, block.is_causal, False, scale=scale)
    return out, lse.T


def _flash_backward(tensors: Sequence[Tensor], block: _Block, scale: float) -> tuple[Tensor, ...]:
    """The block's part of the gradients of q, k and v; `tensors` are grad, q, k, v, and the merged out and lse."""
    if not tensors[0].is_cuda:
        return _flash_on_cpu(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, tensors, block, scale)
    grad, q, k, v, out, lse = tensors
    seeds = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))  # of dropout
    backward = torch.ops.aten._flash_attention_backward
    return backward(grad, q, k, v, out, lse.T.contiguous(), *block.lengths, 0.0, block.is_causal, *seeds, scale=scale)


def _flash_on_cpu(kernel: Any, tensors: Sequence[Tensor], block: _Block, scale: float) -> tuple[Tensor, ...]:
    """Call a kernel that takes and returns [pieces, H, L, ...] with tensors [pieces * L, H, ...]."""
    heads_first = (tensor.unflatten(0, (block.num_pieces, -1)).transpose(1, 2) for tensor in tensors)
    results = kernel(*heads_first, 0.0, block.is_causal, scale=scale)
    return tuple(result.transpose(1, 2).flatten(0, 1) for result in results)


@_fused
def _merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [L, H, D] over the keys of both and its log-sum-exp [L, H], computed in the latter's dtype."""
    lse = torch.logaddexp(a_lse, b_lse)
    return (a * (a_lse - lse).exp()[..., None] + b * (b_lse - lse).exp()[..., None]).to(a.dtype), lse


@torch.library.custom_op("prefix_attention::cascade", mutates_args=())
def _cascade(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of a row: q [T, H, D], k and v [T, H_kv, D], sink [H] or None -> out [T, H, D], log-sum-exp [T, H]."""
    out = q.new_empty(q.shape)  # blocks of level 0 come first, and fill it
    lse = torch.empty(q.shape[:2], dtype=_wide(q), device=q.device)
    for block in _blocks(plan.numpy().tobytes(), q.device, q.is_cuda):
        queries = block.queries
        part, part_lse = _flash(q[queries], k[block.keys], v[block.keys], block, scale)
        if block.level == 0:
            out[queries], lse[queries] = part, part_lse
        else:
            out[queries], lse[queries] = _merge(out[queries], lse[queries], part, part_lse)
    if sink is not None:  # a key without a value in every softmax
        out, lse = _merge(out, lse, torch.zeros_like(out), sink.to(lse.dtype).expand_as(lse))
    return out, lse


_cascade.register_fake(lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_wide(q))))


@torch.library.custom_op("prefix_attention::cascade_backward", mutates_args=())
def _cascade_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: the sum of every block's."""
    dq, dk, dv = q.new_empty(q.shape), *(torch.empty(t.shape, dtype=_wide(t), device=t.device) for t in (k, v))
    for block in _blocks(plan.numpy().tobytes(), q.device, q.is_cuda):
        queries, keys = block.queries, block.keys
        parts = _flash_backward((grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries]), block, scale)
        for total, part, where in zip((dq, dk, dv), parts, (queries, keys, keys), strict=True):
            if block.level == 0:
                total[where] = part.to(total.dtype)
            elif isinstance(where, slice):
                total[where] += part
            else:  # several pieces may see the same keys
                total.index_add_(0, where, part.to(total.dtype))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


_cascade_backward.register_fake(lambda _, q, k, v, *__: tuple(t.new_empty(t.shape) for t in (q, k, v)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, plan, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, plan, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, plan, out, lse = ctx.saved_tensors
    dq, dk, dv = _cascade_backward(grad.contiguous(), q, k, v, out, lse, plan, ctx.scale)
    dsinks = None
    if sinks is not None:  # d/ds of softmax with one more key: -p(sink) · grad·out, summed over tokens
        delta = (grad.to(lse.dtype) * out).sum(-1)
        dsinks = -((sinks.to(lse.dtype) - lse).exp() * delta).sum(0).to(sinks.dtype)
    return dq, dk, dv, dsinks, None, None


_cascade.register_autograd(_differentiate, setup_context=_save)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Plain attention: q [B, H, L, D], k and v [B, H_kv, K, D], mask [B, 1, L, K] of bool -> [B, H, L, D_v]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.to(_wide(q)).masked_fill(~mask, torch.finfo(_wide(q)).min)  # finite: padding may see nothing
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


def _loop(q: Tensor, k: Tensor, v: Tensor, plan: Tensor, window: int | None, *rules: Any) -> Tensor:
    """`_attend` of a row, segment by segment and `QUERY_BLOCK` queries at a time, on copies of the keys they see."""
    row, outs = torch.arange(q.shape[2], device=q.device), []  # on the device, so that the host never waits for it
    for (*_, sees_all), path in zip(plan.tolist(), _paths(plan), strict=True):
        context = torch.cat([row[seen.start : seen.stop] for seen in reversed(path)])
        num_above = len(context) - len(path[0])
        for first in range(num_above, len(context), QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, len(context))
            oldest = 0 if window is None else max(first - window + 1, 0)
            seen = torch.arange(oldest, len(context) if sees_all else last, device=q.device)
            distance = torch.arange(first, last, device=q.device)[:, None] - seen
            mask = ((distance >= 0) | bool(sees_all)) & (distance < (window or math.inf))
            start, keys = path[0].start - num_above, context[seen]
            tensors = (q[:, :, start + first : start + last], k[:, :, keys], v[:, :, keys], mask[None, None])
            outs.append(checkpoint(_attend, *tensors, *rules, use_reentrant=False))
    return torch.cat(outs, dim=2)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface, [B, H, T, D] -> [B, T, H, D]; without a plan (`segments`) plain attention."""
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (query, key, value))
    plan, window, softcap, sinks = map(options.get, ("segments", "sliding_window", "softcap", "s_aux"))
    if plan is None and softcap is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale = query.shape[-1] ** -0.5 if options.get("scaling") is None else options["scaling"]
    if plan is None:  # softcap and sinks, which sdpa does not know
        ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = ones.tril(key.shape[2] - query.shape[2])[None, None] if attention_mask is None else attention_mask
        return _attend(query, key, value, mask, scale, softcap, sinks).transpose(1, 2), None
    missing = query.shape[-1] - value.shape[-1]  # the kernels want one head size
    is_plain = softcap is None and (window is None or _longest(plan) <= window)
    if is_plain and missing >= 0 and _has_kernel(query):
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, F.pad(value, (0, missing)) if missing else value))
        out, _ = _cascade(q, k, v, sinks, plan, scale)
        return out[None, ..., : value.shape[-1]], None
    return _loop(query, key, value, plan, window, scale, softcap, sinks).transpose(1, 2), None


def _has_kernel(q: Tensor) -> bool:
    """Whether the flash kernels take this device, dtype and head size."""
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cpu"


@torch.compiler.disable
def _longest(plan: Tensor) -> int:
    """Tokens of the longest path from a root to a leaf."""
    return max(sum(map(len, path)) for path in _paths(plan))


# -- Gated delta nets (Qwen3-Next, Qwen3.5): recurrent layers, whose state goes from a segment to those below it -----


class _Handover:
    """Takes the place of a gated delta net's cache: hands it the parents' states, and keeps the one it ends with."""

    record_past = True  # the way that does not update states in place

    def __init__(self, layer: int, above: Sequence[Any]):
        self.layers = {layer: self}
        # the last inputs of the convolution [B, channels, K - 1], and the state of the delta rule [B, heads, d_k, d_v]
        self.inputs = torch.cat([state.inputs for state in above]) if above else None
        self.recurrent_states = [torch.cat([state.recurrent_states[0] for state in above])] if above else []

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self.inputs is not None

    def update_conv_state(self, inputs: Tensor, _: int, conv_kernel_size: int, **__: Any) -> Tensor:
        past = conv_kernel_size - 1
        seen = F.pad(inputs, (past, 0)) if self.inputs is None else torch.cat([self.inputs, inputs], -1)
        self.inputs = seen[..., seen.shape[-1] - past :]
        return seen

    def update_recurrent_state(self, state: Tensor, _: int, **__: Any) -> None:
        self.recurrent_states = [state]


@torch.compiler.disable
def _delta_net(forward: Any, layer: int, hidden_states: Tensor, segments: Tensor | None = None, **more: Any) -> Tensor:
    """The forward of a gated delta net that takes a plan: up to the forks one by one, the rest in a padded batch."""
    if segments is None:
        return forward(hidden_states, **more)
    plan = segments.tolist()
    outs: dict[int, Tensor] = {}  # by where they begin
    states: dict[tuple[int, int], _Handover] = {}  # by segment, and how many of its tokens have passed
    leaves: list[tuple[range, _Handover]] = []
    forks: dict[int, set[int]] = {}  # of each segment
    for _, _, parent, seen, _ in plan:
        forks.setdefault(parent, set()).add(seen)
    for number, (start, length, parent, seen, _) in enumerate(plan):
        first, state = before = 0, states.get((parent, seen))
        for last in sorted(forks.get(number) or ({length} if state is None else ())):  # a root without forks runs whole
            before = before if state and last - first == 1 else (first, state)  # one token would take decoding kernels
            states[number, last] = state = _Handover(layer, [before[1]] if before[1] else [])
            out = forward(hidden_states[:, start + before[0] : start + last], cache_params=state)[0]
            outs[start + first] = out[first - before[0] :]
            first = last
        if state and first < length:
            leaves.append((range(start + first, start + length), state))
    if leaves:
        longest = max(2, *(len(leaf) for leaf, _ in leaves))  # not 1, as above
        pieces = [F.pad(hidden_states[0, leaf.start : leaf.stop], (0, 0, 0, longest - len(leaf))) for leaf, _ in leaves]
        below = _Handover(layer, [state for _, state in leaves])
        for (leaf, _), out in zip(leaves, forward(torch.stack(pieces), cache_params=below), strict=True):
            outs[leaf.start] = out[: len(leaf)]
    return torch.cat([outs[start] for start in sorted(outs)])[None]


# -- attach ----------------------------------------------------------------------------------------------------------

# Compared with one plain row per completion by the tests; any other type is compared when it is attached.
TESTED = frozenset({
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "qwen3_moe", "gpt_oss", "glm4",
    "deepseek_v3", "cohere2", "granite", "smollm3", "qwen3_next", "qwen3_5_text", "qwen2_5_vl", "qwen3_vl", "gemma3",
})  # fmt: skip
VISION = frozenset({"qwen2_5_vl", "qwen3_vl", "gemma3", "llava"})  # tested with images (LLaVA's text part may be any)
WHOLE_IMAGES = frozenset({"gemma3"})  # whose image tokens see all of their image
DELTA_NET = "GatedDeltaNet"  # ends the names of classes


def attach(model: Any, verify: bool = False, example: tuple[list[int], dict[str, Any]] | None = None) -> Any:
    """Swap shared-prefix attention into a Hugging Face causal language model, in place; returns it.

    Ordinary batches go through sdpa from now on. Dropout outside attention (LoRA's) falls on a prompt once for all its
    completions. Auxiliary losses of a mixture of experts, which would count a prompt once, are refused.

    Args:
        model: wrapped (DDP, FSDP2, peft) or not.
        verify: compare log-probs and gradients of a few random groups with one plain row per completion; types outside
            `TESTED` are always compared. Collective where the model is sharded.
        example: the tokens of a prompt with images, and what the processor makes of these, to compare, too; types
            outside `VISION` need one.

    Raises:
        ValueError: shared prefixes would not be exact for this model; names the reason.
        OutOfMemoryError: there is no room for the comparison.
    """
    base = base_model(model)
    refused = f"{type(base).__name__} cannot share prefixes: {{}}; go without (share_prefix=False)"
    if reason := _refusal(base):
        raise ValueError(refused.format(reason))
    _LogprobHead.of(base)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for module in base.modules():
        if type(module).__name__.endswith(DELTA_NET) and getattr(module.forward, "func", None) is not _delta_net:
            module.forward = partial(_delta_net, module.forward, module.layer_idx)
    before = base.config.get_text_config(decoder=True)._attn_implementation
    _use(base, NAME)
    if not hasattr(base, "shares_prefixes"):
        base.register_forward_pre_hook(_plan_on_host, with_kwargs=True)
    base.shares_prefixes = True  # on the model: its config may be that of another one, which is not attached
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
            raise ValueError(refused.format(" ".join(str(error).split()))) from error
    return model


def _plan_on_host(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """FSDP2 and DDP send every tensor to their device, where each layer would wait for the GPU to read the plan."""
    if inputs.get("segments") is not None:
        inputs["segments"] = inputs["segments"].cpu()
    return args, inputs


def base_model(model: Any) -> Any:
    """The Hugging Face model inside torch.compile, DDP and peft."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("prompt learning adds tokens to every row: their log-probs are not available")
    if hasattr(model, "_orig_mod"):
        return base_model(model._orig_mod)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return base_model(model.module)
    return base_model(model.get_base_model()) if hasattr(model, "get_base_model") else model


def _refusal(base: Any) -> str | None:
    """Why prefixes cannot be shared, or None where nothing speaks against it."""
    config = base.config.get_text_config(decoder=True)
    if getattr(base.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if not base._can_set_attn_implementation():
        return "its attention cannot be replaced through transformers' AttentionInterface"
    known = {"full_attention", "sliding_attention", "linear_attention"}
    if odd := set(getattr(config, "layer_types", None) or ()) - known:
        return f"layers of type {', '.join(sorted(odd))} do not see a whole prefix"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
            return f"{rope['rope_type']} position embeddings depend on the longest text of a batch"
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    sources = map(inspect.getsource, {type(m) for m in base.modules() if "Attention" in type(m).__name__})
    if has_window and config.model_type not in TESTED and not any("sliding_window=" in source for source in sources):
        return "its sliding window is in the mask alone and does not reach the attention function"
    if getattr(config, "output_router_logits", False):
        return "output_router_logits adds an auxiliary loss that counts forwarded tokens, prompts once"
    for name, module in base.named_modules():
        kind = type(module).__name__
        above, _, last = name.rpartition(".")
        is_dropout = isinstance(module, nn.Dropout) and "att" in last
        share = module.p if is_dropout else getattr(module, "attention_dropout", 0.0)
        if isinstance(share, float) and share > 0:
            return f"dropout in attention ({name})"
        recurrent = isinstance(module, nn.Conv1d | nn.RNNBase) or any(w in kind for w in ("Mamba", "Recurrent", "SSM"))
        if recurrent and not type(base.get_submodule(above)).__name__.endswith(DELTA_NET):
            return f"{name or 'it'} ({kind}) carries a state from token to token"
    return None


def _use(base: Any, name: str) -> None:
    """Set the attention implementation of the language model; other towers keep theirs."""
    base.set_attn_implementation({"": name} | {part: name for part in base.config.sub_configs if "text" in part})


def _verify(model: Any, example: tuple[list[int], dict[str, Any]] | None) -> None:
    """Compare log-probs and gradients of a few groups: shared rows against plain ones through eager attention."""
    base = base_model(model)
    placeholders = {getattr(base.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")}
    vocab_size = base.config.get_text_config(decoder=True).vocab_size
    words = [token for token in range(min(vocab_size, 1000)) if token not in placeholders]
    tokens = partial(random.Random(0).choices, words)
    prompt, images = example or (tokens(k=6), {})
    groups = [(tokens(k=9), [tokens(k=5), tokens(k=2), tokens(k=7)]), (tokens(k=4), [tokens(k=6), tokens(k=3)])]
    groups.append((prompt, [tokens(k=5), tokens(k=3)]))
    before, was_training = {p: p.grad for p in base.parameters() if p.requires_grad}, model.training
    model.eval()  # dropout would be another one every time
    try:
        expected, plain_gradients = _trial(model, "eager", groups, images, list(before))
        got, shared_gradients = _trial(model, NAME, groups, images, list(before))
    finally:
        model.train(was_training)
        for p, grad in before.items():
            p.grad = grad
    is_half = _LogprobHead.of(base).dtype in (torch.bfloat16, torch.float16)
    spread = expected.std().item() if is_half else 1.0  # a random model's log-probs are all nearly the same
    errors = [(got - expected).abs().mean().item() / spread]
    norms = [plain.double().norm().item() for plain in plain_gradients]
    least = 0.01 * max(norms, default=0.0) or 1.0  # some gradients, as of a bias of all keys, are nothing but rounding
    for plain, shared, norm in zip(plain_gradients, shared_gradients, norms, strict=True):  # ten times as rough
        errors.append((shared - plain).double().norm().item() / max(norm, least) / 10)
    limit = 5e-2 if is_half else 1e-4
    if not all(error <= limit for error in errors):  # NaN is over it, too
        raise ValueError(f"log-probs or gradients differ from plain rows by {max(errors):.2g}, over {limit:.0e}")


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes, which is not where FSDP2 keeps weights that it offloads."""
    weight: Any = next(model.parameters())
    return torch.device(weight.device_mesh.device_type) if hasattr(weight, "device_mesh") else weight.device


def _trial(model: Any, attention: str, groups: Groups, images: Any, weights: list[Any]) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of the groups and their gradients, where weights have any, with eager attention or with ours."""
    base, is_shared = base_model(model), attention == NAME
    base.zero_grad()
    _use(base, attention)
    row = pack(groups, share_prefix=is_shared, apart={2})[0].to(device_of(base))
    times = row.prompts.count(2)  # the prompt with images is that of the third group
    images = {name: torch.cat([value.to(row.input_ids.device)] * times) for name, value in images.items()}
    with torch.set_grad_enabled(bool(weights)):  # whatever the caller's mode
        if is_shared:
            logprobs = completion_logprobs(model, row, **images)
        else:
            logits = model(**_inputs(base, row, images)).logits[row.row, row.position]
            logprobs = -F.cross_entropy(logits.float(), row.targets, reduction="none")
        if weights:
            (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
    grads = [weight.grad for weight in weights if weight.grad is not None]
    return logprobs.detach(), [(g.to_local() if hasattr(g, "to_local") else g).detach().clone() for g in grads]


# -- Log-probabilities -----------------------------------------------------------------------------------------------


class _Logits(NamedTuple):
    """How the logits of the distribution follow from the head's product z: factor·z, or cap·tanh(factor·z / cap)."""

    factor: float
    cap: float | None = None
    forbidden: Tensor | None = None  # tokens without probability


class _TokenLogprobs(torch.autograd.Function):
    """log softmax at the targets, and entropies, of a head's `_factors`: chunk by chunk, in fp32 (fp64 for fp64)."""

    @staticmethod
    def forward(ctx: Any, targets: Tensor, rule: _Logits, with_entropy: bool, *factors: Tensor) -> tuple[Tensor, ...]:
        logprobs = torch.empty(len(targets), dtype=_wide(factors[0]), device=targets.device)
        normalizers, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for part, logits in _chunks(rule, factors):
            logprobs[part], normalizers[part], entropies[part] = _read(logits, targets[part, None], with_entropy)
        ctx.rule = rule
        ctx.save_for_backward(targets, normalizers, *factors)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        targets, normalizers, *factors = ctx.saved_tensors
        xs, weights = factors[: len(factors) // 2], factors[len(factors) // 2 :]
        dxs = [torch.empty_like(x) for x in xs]
        wider: Any = {"out_dtype": normalizers.dtype} if xs[0].dtype != normalizers.dtype else {}
        wanted = zip(weights, ctx.needs_input_grad[-len(weights) :], strict=True)
        dws = [torch.zeros_like(w, dtype=normalizers.dtype) if is_wanted else None for w, is_wanted in wanted]
        for part, logits in _chunks(ctx.rule, factors):  # backward makes the logits again
            g = grad[part, None] * ctx.rule.factor
            dz = _derive(logits, targets[part, None], normalizers[part, None], g, ctx.rule.cap, weights[0].dtype)
            for x, w, dx, dw in zip(xs, weights, dxs, dws, strict=True):
                torch.mm(dz, w, out=dx[part])
                if dw is not None:
                    torch.addmm(dw, dz.T, x[part], out=dw, **wider)
        return None, None, None, *dxs, *dws  # autograd casts sums to the dtype of their weight


@_fused
def _read(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [n, V] and targets [n, 1]: log-probs, log Σ exp and entropies (or zeros), each [n]."""
    top = logits.amax(-1, keepdim=True)
    shifted = logits - top if logits.is_cuda else logits.sub_(top)  # compiled, in place would cost a pass
    chosen, p = shifted.gather(-1, targets)[:, 0], shifted.exp() if with_entropy else shifted.exp_()
    total = p.sum(-1)
    entropies = total.log() - p.mul_(shifted).sum(-1) / total if with_entropy else torch.zeros_like(total)
    return chosen - total.log(), top[:, 0] + total.log(), entropies  # Σ p·logit by no product that autocast would round


@_fused
def _derive(logits: Tensor, targets: Tensor, normalizers: Tensor, g: Tensor, cap: Any, dtype: torch.dtype) -> Tensor:
    """g·(onehot - p) [n, V], times the slope of a softcap; all but logits are [n, 1]."""
    chosen = torch.expm1(logits.gather(-1, targets) - normalizers) * -g  # of more digits than dz + g
    slope = None if cap is None else 1 - (logits / cap).square_()
    dz = (logits - normalizers if logits.is_cuda else logits.sub_(normalizers)).exp_().mul_(-g)
    if slope is not None:
        dz, chosen = dz.mul_(slope), chosen * slope.gather(-1, targets)
    return dz.to(dtype).scatter_(-1, targets, chosen.to(dtype))


def _chunks(rule: _Logits, factors: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Some tokens and their logits [n, V], one chunk of tokens after the other, all in the same memory."""
    (x, *xs), (weight, *weights) = factors[: len(factors) // 2], factors[len(factors) // 2 :]
    size = max(1, HEAD_CHUNK["cuda" if x.is_cuda else "cpu"] // len(weight))
    memory = torch.empty(min(size, len(x)), len(weight), dtype=_wide(x), device=x.device)
    wider: Any = {"out_dtype": memory.dtype} if x.dtype != memory.dtype else {}  # on CUDA, of 16-bit factors
    for start in range(0, len(x), size):
        part = slice(start, min(start + size, len(x)))
        logits = memory[: part.stop - start]
        torch.mm(x[part], weight.T, out=logits, **wider)
        for more, w in zip(xs, weights, strict=True):
            torch.addmm(logits, more[part], w.T, out=logits, **wider)
        if rule.cap is not None:
            logits.mul_(rule.factor / rule.cap).tanh_().mul_(rule.cap)
        elif rule.factor != 1:
            logits.mul_(rule.factor)
        if rule.forbidden is not None:  # as good as -inf, but finite: 0·inf would make the entropy NaN
            logits.index_fill_(-1, rule.forbidden, -1e4)
        yield part, logits


@dataclass(eq=False)
class _LogprobHead:
    """A head's forward; where `cells` are set, it returns log-probs and entropies [1, N, 2] in place of logits."""

    head: Any
    original: Any
    cells: Tensor | None = None  # flat positions, among all that reach the head
    logprobs_of: Any = None
    answer: Tensor | None = None
    dtype: torch.dtype | None = None  # that the model computes in

    @classmethod
    def of(cls, base: Any) -> "_LogprobHead":
        """The one on the model's head, installed where there is none."""
        head = base.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(base).__name__} has no language-model head")
        if not isinstance(head.forward, cls):
            head.forward = cls(head, head.forward)  # not a module around it: parameters keep their names
        return head.forward

    @torch.compiler.disable
    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.cells is None:
            return self.original(hidden, *args, **kwargs)
        kind = hidden.device.type
        self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        factors = _factors(self.head, hidden.flatten(0, 1).index_select(0, self.cells))
        compute = self.dtype if kind == "cuda" else _wide(hidden)  # only CUDA sums products of 16-bit factors in fp32
        self.answer = torch.stack(self.logprobs_of(*(factor.to(compute) for factor in factors)), -1)[None]
        return self.answer


def _factors(head: Any, hidden: Tensor) -> list[Tensor]:
    """A head as [x, x', ..., W, W', ...], with logits x·Wᵀ + x'·W'ᵀ + ...: its matrix, its bias, LoRAs."""
    if hasattr(head, "modules_to_save"):  # peft: a trained copy beside the original
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    linear = head.get_base_layer() if hasattr(head, "lora_A") else head
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise ValueError(f"the language-model head is a {type(linear).__name__}, not a plain linear layer")
    products = [(hidden, linear.weight)]
    if linear.bias is not None:
        products.append((hidden.new_ones(len(hidden), 1), linear.bias[:, None]))
    if linear is not head and head.disable_adapters and head.merged:
        head.unmerge()
    if linear is not head and not head.disable_adapters and not head.merged:
        for name in filter(head.lora_A.__contains__, head.active_adapters):
            if name in head.lora_variant or head.lora_B[name].bias is not None:
                raise ValueError("the language-model head has an adapter other than plain LoRA (DoRA, or with a bias)")
            low = head.lora_A[name](head.lora_dropout[name](hidden.to(head.lora_A[name].weight.dtype)))
            products.append(((low * head.scaling[name]).to(hidden.dtype), head.lora_B[name].weight.to(hidden.dtype)))
    xs, weights = zip(*products, strict=True)
    return [*xs, *weights]


@contextmanager
def _bare_logits(base: Any, temperature: float, forbidden: Tensor | None) -> Iterator[_Logits]:
    """Yields what the model does to its head's output as a rule, and takes it out of its config, not to be saved."""
    softcap = getattr(base.config, "final_logit_softcapping", None)
    scale = getattr(base, "logit_scale", 1.0)
    divisor = getattr(base.config, "logits_scaling", 1.0) if base.config.model_type.startswith("granite") else 1.0
    own = vars(base.config)  # written directly, as a config may refuse None
    neutral = [(own, "final_logit_softcapping", None), (vars(base), "logit_scale", 1.0), (own, "logits_scaling", 1.0)]
    with ExitStack() as stack:
        for (attributes, name, without), value in zip(neutral, (softcap, scale, divisor), strict=True):
            if value != without:
                stack.callback(attributes.update, {name: value})
                attributes[name] = without
        yield _Logits(scale / divisor / temperature, None if softcap is None else softcap / temperature, forbidden)


def completion_logprobs(
    model: Any, row: PackedBatch, temperature: float = 1.0, return_entropy: bool = False,
    forbidden: Sequence[int] = (), inputs_embeds: Tensor | None = None, **images: Any,
) -> Any:  # fmt: skip
    """log p(token | prompt, completion so far) at a sampling temperature, for every completion token of `row`.

    Args:
        model: a Hugging Face causal language model, wrapped or not; attached where the row shares prefixes.
        row: from `pack`, on the model's device.
        temperature: logits are divided by it; above 0.
        return_entropy: also return the entropy of each of the N distributions, without a gradient.
        forbidden: tokens that the sampler could not draw (the placeholders of images): they have no probability.
        inputs_embeds: [R, T, hidden], features that the model reads in place of embedding `row.input_ids` (a soft
            prompt, another modality), differentiable. Targets stay token ids. Not together with images.
        images: what the processor makes of the images of `row.prompts`, in that order (`pixel_values`, ...).

    Returns:
        [N] fp32 (fp64 for an fp64 model), nats, in the order group, completion, token; differentiable. With
        `return_entropy` a pair: those, and the entropies [N], nats.

    Raises:
        ValueError: arguments that do not fit; a row that shares prefixes without `attach`; a head that is not linear.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    base = base_model(model)
    head = _LogprobHead.of(base)
    inputs = _inputs(base, row, images, inputs_embeds)
    width, column = row.input_ids.shape[1], row.position
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        kept, column = row.position.unique(return_inverse=True)
        inputs["logits_to_keep"], width = kept, len(kept)
    with _bare_logits(base, temperature, torch.tensor(forbidden, device=column.device) if forbidden else None) as rule:
        head.cells = row.row * width + column
        head.logprobs_of = partial(_TokenLogprobs.apply, row.targets, rule, return_entropy)
        try:
            answer = model(**inputs).logits
            if head.answer is None or not torch.equal(answer.nan_to_num(), head.answer.nan_to_num()):
                raise ValueError(f"{type(base).__name__} changes its logits after the head in an unknown way")
        finally:
            head.cells = head.answer = None
    logprobs, entropy = answer[0].unbind(-1)
    return (logprobs, entropy.detach()) if return_entropy else logprobs


def _inputs(base: Any, row: PackedBatch, images: dict[str, Any], inputs_embeds: Tensor | None = None) -> dict[str, Any]:
    """What a model gets for a row: either token ids, and maybe images, or features in their place."""
    inputs = {"use_cache": False, **images}
    if row.segments is None:  # what its own attention takes
        inputs["attention_mask"] = row.attention_mask
        kinds = inspect.signature(base.forward).parameters.keys() & {"mm_token_type_ids", "token_type_ids"}
        inputs |= {name: _kinds(base, row.input_ids) for name in kinds if images}
    else:
        in_use = NAME in (base.config._attn_implementation, base.config.get_text_config()._attn_implementation)
        if not (in_use and getattr(base, "shares_prefixes", False)):
            raise ValueError("this row shares prefixes: attach(model) first, or pack(..., share_prefix=False)")
        if images and not base.shares_images:
            raise ValueError(f"a {base.config.model_type} with images: attach(model, example=...) first, to compare it")
        inputs["segments"] = row.segments
        if images and base.config.model_type in WHOLE_IMAGES:
            inputs["segments"] = _cut_at_images(row.segments, (row.input_ids[0] == base.config.image_token_id).tolist())
        is_spatial = any(name.endswith("_grid_thw") for name in images)
        inputs["position_ids"] = _rope_positions(base, row, images) if is_spatial else row.position_ids
        inputs["attention_mask"] = row.input_ids.new_ones(1, 1, 1, 1, dtype=torch.bool)  # 4-D: handed through
    if inputs_embeds is None:
        return inputs | {"input_ids": row.input_ids}
    if images:
        raise ValueError(f"inputs_embeds and {', '.join(images)}: a model finds the places of images by token ids")
    if inputs_embeds.shape[:-1] != row.input_ids.shape:
        raise ValueError(f"inputs_embeds {[*inputs_embeds.shape]} of a row of {[*row.input_ids.shape]} tokens")
    if hasattr(base.base_model, "rope_deltas"):  # without ids it would shift positions by the images of an earlier row
        inputs["position_ids"] = row.position_ids
    return inputs | {"inputs_embeds": inputs_embeds}


def _rope_positions(base: Any, row: PackedBatch, inputs: dict[str, Any]) -> Tensor:
    """M-RoPE positions [3, 1, T]: the model's own for prompts with images; completions go on from the largest."""
    assert row.segments is not None
    paths = _paths(row.segments)
    roots = [path[0] for path in paths if len(path) == 1]
    ids = pad_sequence([row.input_ids[0, root.start : root.stop] for root in roots], batch_first=True)
    mask = pad_sequence([row.input_ids.new_ones(len(root)) for root in roots], batch_first=True)
    grids = {name: value for name, value in inputs.items() if name.endswith(("_grid_thw", "second_per_grid_ts"))}
    of_prompts, deltas = base.model.get_rope_index(ids, _kinds(base, ids), **grids, attention_mask=mask)
    positions = row.position_ids.expand(3, 1, -1).clone()
    numbers = {root.start: number for number, root in enumerate(roots)}
    for path in paths:
        number, own = numbers[path[-1].start], slice(path[0].start, path[0].stop)
        of_root = of_prompts[:, number, : len(path[0])]
        positions[:, 0, own] = of_root if len(path) == 1 else positions[:, 0, own] + deltas[number]
    return positions


def _kinds(base: Any, ids: Tensor) -> Tensor:
    """0 for text, 1 for the placeholder of an image, 2 for that of a video."""
    return (ids == base.config.image_token_id).int() + 2 * (ids == getattr(base.config, "video_token_id", -1)).int()


def _cut_at_images(plan: Tensor, is_image: list[bool]) -> Tensor:
    """The plan in which a run of image tokens is a segment that sees all of itself, above what follows it."""
    cut: list[tuple[int, ...]] = []
    pieces: list[range] = []  # numbers in `cut` of each segment's
    for (_, _, above, *_), path in zip(plan.tolist(), _paths(plan), strict=True):
        parent, seen, first = -1, 0, len(cut)
        if above >= 0:
            parent = max(number for number in pieces[above] if cut[number][0] < path[1].stop)
            seen = path[1].stop - cut[parent][0]
        for kind, run in groupby(path[0], key=is_image.__getitem__):
            places = list(run)
            cut.append((places[0], len(places), parent, seen, int(kind)))
            parent, seen = len(cut) - 1, len(places)
        pieces.append(range(first, len(cut)))
    return torch.tensor(cut)
