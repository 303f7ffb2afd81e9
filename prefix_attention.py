"""Shared-prefix attention: forward each prompt once for all its completions, exactly.

    model = attach(AutoModelForCausalLM.from_pretrained(...))
    for row in pack(groups, max_tokens=8192):        # groups: (prompt_ids, [completion_ids, ...])
        logprobs = completion_logprobs(model, row)   # [N], of the tokens `row.index`

`pack` lays sequences into rows without padding, in which what several begin with stands once.
`attach` teaches a Hugging Face model to run such a row. `completion_logprobs` applies the head only
where a completion token is predicted, and never holds the logits of a whole row. Needs only torch
and transformers, and can be copied alone. A few families also need training/rare_attention.py.
"""

import inspect
import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "shared_prefix"  # of the attention function in transformers
HEAD_CHUNK = {"cpu": 1 << 23, "cuda": 1 << 28}  # logits that the head holds at a time
NEVER = -1e15  # a logit as good as -inf, but finite: 0·inf would make the entropy NaN
HALF = (torch.bfloat16, torch.float16)  # dtypes of the flash kernels on a GPU
MIN_SAVED = 0.05  # of the tokens below a fork: less would only make more and smaller kernel calls
# On the CPU, calls of at most SMALL² scores, which cost more than their work, are joined.
SMALL = 64

Tokens = Sequence[int] | Tensor  # a tensor is [n] int64, on the CPU
Groups = Sequence[tuple[Tokens, Sequence[Any]]]  # (prompt_ids, [completion_ids, ...]), see `pack`

RARE: Any = None  # the module training/rare_attention.py, which puts itself here: see `_rare`


def _rare() -> Any:
    """The only way to what few families need."""
    if not RARE:
        raise ValueError("attention that few models need: import training.rare_attention first")
    return RARE


def _computed_in(dtype: torch.dtype, kind: str) -> torch.dtype:
    """The dtype of products on a kind of device: autocast's, or that of their factors."""
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return dtype


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums and log-sum-exps: fp64 for an fp64 tensor, else fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


_fused: Any = torch.compile(dynamic=True, disable=not torch.cuda.is_available())  # on a GPU


# -- Rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedBatch:
    """One forward's worth of tokens.

    R rows of T positions, one or padded ones, hold N completion tokens. `segments` has for each
    start, length, parent or -1, how many of the parent's tokens come before it, and 1 where its
    tokens also see later ones of it (an image; 0 here).
    """

    input_ids: Tensor  # [R, T] int64
    position_ids: Tensor  # [R, T] int64; they restart in every segment where it branches off
    attention_mask: Tensor | None  # [R, T] int64, 1 on tokens, by length; None with segments
    segments: Tensor | None  # [S, 5] int64 on the CPU; None in padded rows
    row: Tensor  # [N] int64, and `position`: where the logits that predict a token stand
    position: Tensor
    targets: Tensor  # [N] int64, the completion tokens
    group: Tensor  # [N] int64, number of the group among all given to `pack`
    completion: Tensor  # [N] int64, number of the completion among all given to `pack`
    index: Tensor  # [N] int64, place among all tokens given, in the order group, completion, token
    prompts: list[Any]  # for every root, whose prompt it begins with: a group, None for several

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> Self:
        """The same row on `device`; attention reads `segments` on the CPU."""
        moved: Any = {}
        for name, value in vars(self).items():
            if hasattr(value, "to") and name != "segments":
                moved[name] = value.to(device)
        return replace(self, **moved)


def as_tokens(ids: Tokens) -> Tensor:
    """Token ids as [n] int64."""
    if isinstance(ids, Tensor) or not len(ids):
        return torch.as_tensor(ids, dtype=torch.int64)
    return torch.frombuffer(array("q", ids), dtype=torch.int64)  # faster than `torch.tensor`


def pack(
    groups: Groups, max_tokens: int | None = None, share_prefix: bool = True,
    apart: Collection[int] = (),
) -> list[PackedBatch]:  # fmt: skip
    """Lay groups out as forwards of at most `max_tokens` positions.

    What several sequences of a row begin with is forwarded once, but where that saves less than
    `MIN_SAVED`: prompts, what these have in common, a history that goes on or branches. A group
    goes where it adds the fewest tokens; one over the budget is split into completions, and these
    into segments. The last token of a completion predicts nothing.

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
    rows: list[_Row] = []
    empty = _Row(is_padded=not share_prefix)
    for group in _sequences(groups, apart, budget):
        for unit, alone in _units(group, empty, budget):
            _add_unit(rows, unit, alone, budget)
    return [row.batch() for row in rows]


def num_packed_tokens(
    groups: Groups, share_prefix: bool = True, apart: Collection[int] = ()
) -> int:
    """Positions of a single row of all groups."""
    sequences = _sequences(groups, apart, math.inf)
    return _Row(not share_prefix).with_units(*sequences).num_tokens


SHARES_WITH_ALL = -1  # a family of sequences; others are numbers of groups


class _Sequence(NamedTuple):
    """A completion's prompt, or a segment's, and its tokens but the last."""

    key: tuple[int, bytes]  # the family that may share, and the ids: neighbours in order are alike
    ids: Any  # [n] int64, of numpy
    tokens: Tensor  # those that are predicted
    group: int
    completion: int
    place: int  # of its first token among all completion tokens

    def num_common(self, other: "_Sequence") -> int:
        """With how many tokens that may be shared both begin."""
        if self.key[0] != other.key[0]:
            return 0
        shortest = min(len(self.ids), len(other.ids))
        differ = self.ids[:shortest] != other.ids[:shortest]
        if differ.any():
            return int(differ.argmax())
        return shortest


def _sequences(groups: Groups, apart: Collection[int], budget: float) -> Iterator[list[_Sequence]]:
    """For every group its sequences; none for an empty completion."""
    num_completions = 0
    place = 0
    for group, (prompt_ids, completions) in enumerate(groups):
        family = group if group in apart else SHARES_WITH_ALL
        sequences = []
        for number, completion in enumerate(completions):
            for prompt, tokens in _segments(prompt_ids, completion):
                if not prompt.numel():
                    raise ValueError(
                        f"group {group} has an empty prompt: "
                        "nothing predicts the first completion token"
                    )
                num_tokens = prompt.numel() + tokens.numel()
                if num_tokens - 1 > budget:
                    where = f"completion {number} of group {group}"
                    total = f"{num_tokens} tokens with its prompt"
                    raise ValueError(f"{where} has {total}, over {budget}")
                if tokens.numel():
                    ids = torch.cat([prompt, tokens[:-1]]).numpy()
                    key = (family, ids.tobytes())
                    sequences.append(
                        _Sequence(key, ids, tokens, group, num_completions + number, place)
                    )
                place += tokens.numel()
        num_completions += len(completions)
        yield sequences


def _segments(prompt_ids: Tokens, completion: Any) -> list[tuple[Tensor, Tensor]]:
    """A completion's own segments, or itself behind its group's prompt."""
    pairs = [(prompt_ids, completion)]
    is_tensor = isinstance(completion, Tensor)
    if not is_tensor and len(completion) and isinstance(completion[0], tuple):
        pairs = completion
    return [(as_tokens(prompt), as_tokens(tokens)) for prompt, tokens in pairs]


def _units(
    group: list[_Sequence], empty: "_Row", budget: float
) -> Iterator[tuple[list[_Sequence], "_Row"]]:
    """The largest parts of a group that fit, each with a row."""
    if group and not empty.is_padded:
        row = empty.with_units(group)
        if row.num_tokens <= budget:
            yield group, row
            return

    for _, segments in groupby(group, key=attrgetter("completion")):
        completion = list(segments)
        row = empty.with_units(completion)
        if row.num_tokens <= budget:
            yield completion, row
        else:
            for sequence in completion:
                yield [sequence], empty.with_units([sequence])


def _add_unit(rows: list["_Row"], unit: list[_Sequence], alone: "_Row", budget: float) -> None:
    """Put a unit where it adds the fewest tokens, or into `alone`."""
    place = len(rows)
    fewest = math.inf
    for number, row in enumerate(rows):
        if row.is_padded and number < len(rows) - 1:  # these keep the order
            continue
        wider = row.with_units(unit)
        num_added = wider.num_tokens - row.num_tokens
        if wider.num_tokens <= budget and num_added < fewest:
            place = number
            alone = wider
            fewest = num_added
    rows[place : place + 1] = [alone]


@dataclass(eq=False)  # a key of dictionaries
class _Branch:
    """A sequence in a row: a segment from `depth` on."""

    sequence: _Sequence
    depth: int
    above: "list[_Branch]"  # the branches that hold the tokens before, the nearest first

    @classmethod
    def of(cls, sequence: _Sequence, neighbours: "list[_Branch]") -> Self:
        """The branch off a neighbour, where that saves enough."""
        depth = 0
        path: list[_Branch] = []
        for neighbour in neighbours:
            num_common = sequence.num_common(neighbour.sequence)
            if num_common > depth:
                depth = num_common
                path = [neighbour, *neighbour.above]

        # A fork moves up to a near end of the prompt or branch above, or to 0, but not from the end
        # of the prompt, nor where groups are apart to 0: images would be forwarded twice.
        num_tokens = len(sequence.ids)
        prompt_length = num_tokens - len(sequence.tokens) + 1
        forks = [prompt_length]
        forks += [branch.depth for branch in path]
        for fork in sorted(forks, reverse=True):
            may_move = depth != prompt_length if fork else sequence.key[0] == SHARES_WITH_ALL
            least = MIN_SAVED * (num_tokens - fork)
            if may_move and 0 < depth - fork < least:
                depth = fork
        return cls(sequence, depth, [branch for branch in path if branch.depth < depth])

    @property
    def length(self) -> int:
        """Tokens that it adds; 0 for the beginning of another sequence."""
        return len(self.sequence.ids) - self.depth

    @property
    def order(self) -> tuple[int, int, int, int]:
        """By level, then what sees the same of a parent together."""
        parent = self.above[0].sequence.place if self.above else -1
        return len(self.above), parent, self.depth, self.sequence.place

    def cells(self, starts: "dict[_Branch, int]") -> list[tuple[int, int]]:
        """Runs of places that predict its sequence's tokens, as (first, length)."""
        cells = []
        stop = len(self.sequence.ids)
        first = stop - len(self.sequence.tokens)
        for segment in (self, *self.above):  # from the last token back to the first
            begin = max(first, segment.depth)
            if begin < stop:
                cells.append((starts[segment] + begin - segment.depth, stop - begin))
                stop = begin
        return cells[::-1]


@dataclass
class _Row:
    """Sequences that are forwarded together, as branches sorted by their keys."""

    is_padded: bool
    branches: list[_Branch] = field(default_factory=list)

    def with_units(self, *units: Iterable[_Sequence]) -> "_Row":
        """The row with more sequences: a unit's longest first, and the others branch off."""
        branches = list(self.branches)
        for unit in units:
            for sequence in sorted(unit, key=lambda sequence: len(sequence.ids), reverse=True):
                place = bisect_left(branches, sequence.key, key=attrgetter("sequence.key"))
                # with one of its neighbours it has the most in common
                neighbours = [] if self.is_padded else branches[max(place - 1, 0) : place + 1]
                branches.insert(place, _Branch.of(sequence, neighbours))
        return _Row(self.is_padded, branches)

    @cached_property
    def num_tokens(self) -> int:
        """Positions of its forward."""
        lengths = [branch.length for branch in self.branches]
        if self.is_padded:
            return len(lengths) * max(lengths, default=0)
        return sum(lengths)

    def batch(self) -> PackedBatch:
        """The tensors of its forward."""
        self.branches.sort(key=attrgetter("sequence.place"))
        if self.is_padded:
            return self._padded()
        return self._shared()

    def _padded(self) -> PackedBatch:
        """A right-padded line for every sequence, for any model's own attention."""
        lines = [torch.from_numpy(branch.sequence.ids) for branch in self.branches]
        ids = pad_sequence(lines, batch_first=True)
        positions = pad_sequence([torch.arange(len(line)) for line in lines], batch_first=True)
        mask = pad_sequence([torch.ones_like(line) for line in lines], batch_first=True)
        starts = dict.fromkeys(self.branches, 0)
        prompts = [branch.sequence.group for branch in self.branches]
        columns = self._columns(range(len(lines)), starts, prompts)
        return PackedBatch(ids, positions, mask, None, **columns)

    def _shared(self) -> PackedBatch:
        """One line of segments, parents before children."""
        segments = [branch for branch in self.branches if branch.length > 0]
        segments.sort(key=attrgetter("order"))
        numbers = {}
        starts = {}
        plan = []
        start = 0
        for number, segment in enumerate(segments):
            numbers[segment] = number
            starts[segment] = start
            fork = (-1, 0)  # of a root
            if segment.above:
                parent = segment.above[0]
                fork = (numbers[parent], segment.depth - parent.depth)
            plan.append((start, segment.length, *fork, 0))
            start += segment.length

        ids = [torch.from_numpy(segment.sequence.ids[segment.depth :]) for segment in segments]
        positions = _ranges([(segment.depth, segment.length) for segment in segments])
        lines = [0] * len(self.branches)
        columns = self._columns(lines, starts, self._prompts(segments))
        return PackedBatch(
            torch.cat(ids)[None], positions[None], None, torch.tensor(plan), **columns
        )

    def _columns(self, lines: Sequence[int], starts: dict[_Branch, int], prompts: list[Any]) -> Any:
        """The fields from `row` on; `lines` has each branch's row."""
        sequences = [branch.sequence for branch in self.branches]
        sizes = torch.tensor([len(sequence.tokens) for sequence in sequences])
        groups = [sequence.group for sequence in sequences]
        completions = [sequence.completion for sequence in sequences]
        cells = [branch.cells(starts) for branch in self.branches]
        return {  # no views: one that is sent to a rank would take its whole storage along
            "row": torch.tensor([*lines]).repeat_interleave(sizes),
            "position": _ranges(list(chain.from_iterable(cells))),
            "targets": torch.cat([sequence.tokens for sequence in sequences]),
            "group": torch.tensor(groups).repeat_interleave(sizes),
            "completion": torch.tensor(completions).repeat_interleave(sizes),
            "index": _ranges([(sequence.place, len(sequence.tokens)) for sequence in sequences]),
            "prompts": prompts,
        }

    def _prompts(self, segments: list[_Branch]) -> list[int | None]:
        """For every root the one group below it, or None."""
        below: dict[_Branch, set[Any]] = {each: set() for each in segments if not each.above}
        for branch in self.branches:
            below[[branch, *branch.above][-1]].add(branch.sequence.group)
        return [groups.pop() if len(groups) == 1 else None for groups in below.values()]


def _ranges(pairs: list[tuple[int, int]]) -> Tensor:
    """Every `range(start, start + length)`, joined: [sum of lengths] int64."""
    starts, lengths = torch.tensor(pairs).T
    shifts = starts - lengths.cumsum(0) + lengths
    return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)


# -- Attention over a row of segments --------------------------------------------------------------
# The cascade: every segment attends causally to itself, then to what it sees of its parent, of its
# parent's parent, and so on. A softmax over all keys equals the softmaxes over blocks of keys,
# merged by their log-sum-exps: exactly. On CUDA a level is one kernel call, which copies parents'
# keys; or several, each of about as many as the row's tokens. The kernels' log-sum-exp has no
# gradient, so autograd cannot go through the merge. But flash attention's backward makes
# p = exp(q·k - lse) again, and needs only rowsum(grad·out) besides: from the *merged* output and
# log-sum-exp it computes the block's part of the whole gradient. As an operator the cascade takes
# `segments` as data, also compiled.


def _paths(plan: Tensor) -> list[list[range]]:
    """Of each segment its tokens, then those it sees of its parents."""
    paths: list[list[range]] = []
    for start, length, parent, num_seen, _ in plan.tolist():
        path = [range(start, start + length)]
        if parent >= 0:
            path += paths[parent]
            path[1] = path[1][:num_seen]
        paths.append(path)
    return paths


Piece = tuple[range, range]  # tokens of a row: queries, and the keys that they see


class _Block(NamedTuple):
    """One kernel call for several pieces, alike in size on the CPU."""

    level: int
    is_causal: bool
    num_pieces: int
    queries: Any  # tokens of the row: a slice where they are adjacent, which copies nothing, or [L]
    keys: Any
    lengths: Any  # as CUDA's kernels take them: cumulative of queries, of keys, longest of each


@lru_cache(maxsize=16)
def _blocks(plan: bytes, device: torch.device, is_cuda: bool) -> list[_Block]:
    """The kernel calls of a row, once for both passes of all layers."""
    segments = torch.frombuffer(bytearray(plan), dtype=torch.int64).view(-1, 5)
    blocks = []
    for (level, sees_all), pieces in sorted(_pieces_by_level(segments).items()):
        is_causal = level == 0 and not sees_all
        for call in _calls(pieces, int(segments[-1, :2].sum()), is_cuda):
            queries = [piece[0] for piece in call]
            keys = [piece[1] for piece in call]
            lengths = [
                _cumulative(queries, device),
                _cumulative(keys, device),
                max(map(len, queries)),
                max(map(len, keys)),
            ]
            places = (_places(queries, device), _places(keys, device))
            blocks.append(_Block(level, is_causal, len(call), *places, lengths))
    return blocks


def _cumulative(pieces: Sequence[range], device: torch.device) -> Tensor:
    """Where pieces begin when they are joined, and the end: [pieces + 1] int32."""
    starts = list(accumulate(map(len, pieces), initial=0))
    return torch.tensor(starts, dtype=torch.int32).to(device)


def _pieces_by_level(plan: Tensor) -> dict[tuple[int, int], list[Piece]]:
    """Pieces by level (0: of a segment itself) and whether queries see later keys."""
    levels: dict[tuple[int, int], list[Piece]] = {}
    for segment, path in zip(plan.tolist(), _paths(plan), strict=True):
        own = path[0]
        levels.setdefault((0, segment[4]), []).append((own, own))
        for level, keys in enumerate(path[1:], 1):
            pieces = levels.setdefault((level, 0), [])
            queries = own
            if pieces and pieces[-1][1] == keys and pieces[-1][0].stop == own.start:
                queries = range(pieces.pop()[0].start, own.stop)
            pieces.append((queries, keys))
    return levels


def _calls(pieces: list[Piece], num_tokens: int, is_cuda: bool) -> list[list[Piece]]:
    """The pieces of a level, call by call."""
    calls: dict[tuple[int, ...], list[Piece]] = {}  # by what a call's pieces have in common
    num_keys = 0
    for queries, keys in pieces:
        num_keys += len(keys)
        common: tuple[int, ...] = (len(queries), len(keys))
        if is_cuda:  # together about as many keys as the row has tokens
            common = ((num_keys - 1) // num_tokens,)
        elif len(queries) * len(keys) > SMALL * SMALL:  # a call of its own
            common = (*common, queries.start)
        calls.setdefault(common, []).append((queries, keys))
    return list(calls.values())


def _places(pieces: Sequence[range], device: torch.device) -> slice | Tensor:
    """The tokens of pieces as an index: a slice where they are adjacent."""
    if all(before.stop == piece.start for before, piece in pairwise(pieces)):
        return slice(pieces[0].start, pieces[-1].stop)
    places = [torch.arange(piece.start, piece.stop) for piece in pieces]
    return torch.cat(places).to(device)


def _flash(q: Tensor, k: Tensor, v: Tensor, block: _Block, scale: float) -> tuple[Tensor, ...]:
    """Flash attention of a block: out [L, H, D] and log-sum-exp [L, H]."""
    if not q.is_cuda:
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return _flash_on_cpu(on_cpu, (q, k, v), block, scale)
    # torch.nn.attention.varlen's, which changes with each release
    forward = torch.ops.aten._flash_attention_forward
    out, lse, *_ = forward(q, k, v, *block.lengths, 0.0, block.is_causal, False, scale=scale)
    return out, lse.T


def _flash_backward(tensors: Sequence[Tensor], block: _Block, scale: float) -> tuple[Tensor, ...]:
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
    kernel: Any, tensors: Sequence[Tensor], block: _Block, scale: float
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


@torch.library.custom_op("prefix_attention::cascade", mutates_args=())
def _cascade(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention [T, H, D] of a row, and its log-sum-exp [T, H]."""
    out = q.new_empty(q.shape)  # blocks of level 0 come first, and fill it
    lse = q.new_empty(q.shape[:2], dtype=_wide(q))
    for block in _blocks(plan.numpy().tobytes(), q.device, q.is_cuda):
        queries = block.queries
        part, part_lse = _flash(q[queries], k[block.keys], v[block.keys], block, scale)
        if block.level > 0:
            part, part_lse = _merge(out[queries], lse[queries], part, part_lse)
        out[queries] = part
        lse[queries] = part_lse

    if sink is not None:  # a key without a value in every softmax
        out, lse = _merge(out, lse, torch.zeros_like(out), sink.to(lse.dtype).expand_as(lse))
    return out, lse


_cascade.register_fake(
    lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_wide(q)))
)


@torch.library.custom_op("prefix_attention::cascade_backward", mutates_args=())
def _cascade_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v: the sum of every block's."""
    dq = q.new_empty(q.shape)
    dk = k.new_empty(k.shape, dtype=_wide(k))
    dv = v.new_empty(v.shape, dtype=_wide(v))
    for block in _blocks(plan.numpy().tobytes(), q.device, q.is_cuda):
        queries = block.queries
        keys = block.keys
        parts = _flash_backward(
            (grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries]), block, scale
        )
        _add_part(dq, parts[0], queries, block.level)
        _add_part(dk, parts[1], keys, block.level)
        _add_part(dv, parts[2], keys, block.level)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _add_part(total: Tensor, part: Tensor, places: slice | Tensor, level: int) -> None:
    """Add a block's part of a gradient; level 0 comes first."""
    if level == 0:
        total[places] = part.to(total.dtype)
    elif isinstance(places, slice):
        total[places] += part
    else:  # several pieces may see the same keys
        total.index_add_(0, places, part.to(total.dtype))


_cascade_backward.register_fake(
    lambda _, q, k, v, *__: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, plan, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sink, plan, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sink, plan, out, lse = ctx.saved_tensors
    dq, dk, dv = _cascade_backward(grad.contiguous(), q, k, v, out, lse, plan, ctx.scale)
    dsink = None if sink is None else _sink_gradient(grad, sink, out, lse)
    return dq, dk, dv, dsink, None, None


def _sink_gradient(grad: Tensor, sink: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """d/ds of softmax with one more key: -p(sink) · grad·out, summed."""
    delta = (grad.to(lse.dtype) * out).sum(-1)
    p = (sink.to(lse.dtype) - lse).exp()
    return -(p * delta).sum(0).to(sink.dtype)


_cascade.register_autograd(_differentiate, setup_context=_save)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: [B, H, T, D] -> [B, T, H, D]."""
    dtype = _computed_in(query.dtype, query.device.type)
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    plan = options.get("segments")
    sinks = options.get("s_aux")
    has_softcap = options.get("softcap") is not None
    if plan is None and sinks is None and not has_softcap:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    scale = options.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5

    head_size = query.shape[-1]
    fits = value.shape[-1] <= head_size and _has_kernel(query.device, dtype, head_size)
    if plan is not None and fits and not has_softcap:
        window = options.get("sliding_window")
        if window is None or _longest(plan) <= window:
            return _in_kernels(query, key, value, sinks, plan, scale), None
    return _rare().attention(query, key, value, attention_mask, scale, options), None


def _in_kernels(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, plan: Tensor, scale: float
) -> Tensor:
    """The cascade of a row: [1, T, H, D_v]."""
    head_size = value.shape[-1]
    if head_size < query.shape[-1]:  # the kernels want one head size
        value = F.pad(value, (0, query.shape[-1] - head_size))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out, _ = _cascade(q, k, v, sinks, plan, scale)
    return out[None, ..., :head_size]


def _has_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Tells if flash kernels take queries of this kind."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return dtype in HALF and head_size % 8 == 0 and head_size <= 256
    return device.type == "cpu"


@torch.compiler.disable
def _longest(plan: Tensor) -> int:
    """Tokens of the longest path from a root to a leaf."""
    return max(sum(map(len, path)) for path in _paths(plan))


# -- attach ----------------------------------------------------------------------------------------

# Types of language models that do without training/rare_attention.py, if flash kernels take them.
COMMON = frozenset({
    "llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "qwen3_moe", "glm4", "deepseek_v3",
    "granite", "smollm3",
})  # fmt: skip
# Compared with one plain row per completion by the tests; any other type is when it is attached.
TESTED = COMMON | {
    "gemma2", "gemma3_text", "gpt_oss", "cohere2", "qwen3_next", "qwen3_5_text", "qwen2_5_vl",
    "qwen3_vl", "gemma3",
}  # fmt: skip
VISION = frozenset({"qwen2_5_vl", "qwen3_vl", "gemma3", "llava"})  # with images (LLaVA's text: any)
WHOLE_IMAGES = frozenset({"gemma3"})  # whose image tokens see all of their image
Example = tuple[list[int], dict[str, Any]]  # tokens of a prompt with images, and these as inputs


def attach(model: Any, verify: bool = False, example: Example | None = None) -> Any:
    """Swap shared-prefix attention into a Hugging Face causal language model, in place.

    Ordinary batches go through sdpa from now on. Dropout outside attention (LoRA's) falls on a
    prompt once for all its completions. Auxiliary losses of a mixture of experts, which would count
    a prompt once, are refused.

    Args:
        model: wrapped (DDP, FSDP2, peft) or not; returned.
        verify: compare log-probs and gradients of a few random groups with one plain row per
            completion; types outside `TESTED` always are. Collective where the model is sharded.
        example: the tokens of a prompt with images, and what the processor makes of these, to
            compare, too; types outside `VISION` need one.

    Raises:
        ValueError: shared prefixes would not be exact for this model; names the reason. Or
            training/rare_attention.py must be imported first, see `needs_rare_attention`.
        OutOfMemoryError: there is no room for the comparison.
    """
    base = base_model(model)
    refused = f"{type(base).__name__} cannot share prefixes: {{}}; go without (share_prefix=False)"
    reason = _refusal(base)
    if reason:
        raise ValueError(refused.format(reason))
    if needs_rare_attention(base):
        _rare().prepare(base)
    _LogprobHead.of(base)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = base.config.get_text_config(decoder=True)._attn_implementation
    _use(base, NAME)
    if not hasattr(base, "shares_prefixes"):
        base.register_forward_pre_hook(_plan_on_host, with_kwargs=True)
    base.shares_prefixes = True  # on the model: its config may be that of one that is not attached
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


def needs_rare_attention(model: Any) -> bool:
    """Tells for which models training/rare_attention.py must be imported before `attach`.

    Types outside `COMMON`, windows, and on a GPU what no flash kernel takes: fp32, odd head sizes,
    and anything on a GPU older than Ampere.
    """
    base = base_model(model)
    config = base.config.get_text_config(decoder=True)
    if config.model_type not in COMMON or _has_window(config):
        return True
    if not torch.cuda.is_available():
        return False
    head_size = config.hidden_size // config.num_attention_heads
    for name in ("head_dim", "qk_head_dim"):  # the first may be of the rotated part alone
        head_size = getattr(config, name, None) or head_size
    dtype = _computed_in(next(base.parameters()).dtype, "cuda")
    return not _has_kernel(torch.device("cuda"), dtype, head_size)


def _has_window(config: Any) -> bool:
    is_used = getattr(config, "use_sliding_window", True)
    return is_used and getattr(config, "sliding_window", None) is not None


def is_delta_net(module: nn.Module) -> bool:
    """Tells a recurrent layer of Qwen3-Next or Qwen3.5."""
    return type(module).__name__.endswith("GatedDeltaNet")


def _plan_on_host(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # FSDP2 and DDP send every tensor to their device, where each layer would wait for the GPU
    # to read the plan.
    if inputs.get("segments") is not None:
        inputs["segments"] = inputs["segments"].cpu()
    return args, inputs


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


def _refusal(base: Any) -> str | None:
    """The reason why prefixes cannot be shared, or None."""
    if getattr(base.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if not base._can_set_attn_implementation():
        return "its attention cannot be replaced through transformers' AttentionInterface"
    config = base.config.get_text_config(decoder=True)
    known = {"full_attention", "sliding_attention", "linear_attention"}
    odd = set(getattr(config, "layer_types", None) or ()) - known
    if odd:
        return f"layers of type {', '.join(sorted(odd))} do not see a whole prefix"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
            kind = rope["rope_type"]
            return f"{kind} position embeddings depend on the longest text of a batch"
    if _has_window(config) and config.model_type not in TESTED:
        kinds = {type(module) for module in base.modules() if "Attention" in type(module).__name__}
        if not any("sliding_window=" in inspect.getsource(kind) for kind in kinds):
            return (
                "its sliding window is in the mask alone and does not reach the attention function"
            )
    if getattr(config, "output_router_logits", False):
        return (
            "output_router_logits adds an auxiliary loss that counts forwarded tokens, prompts once"
        )
    for name, module in base.named_modules():
        reason = _refusal_of_module(base, name, module)
        if reason:
            return reason
    return None


def _refusal_of_module(base: Any, name: str, module: nn.Module) -> str | None:
    parent, _, last = name.rpartition(".")
    share = getattr(module, "attention_dropout", 0.0)
    if isinstance(module, nn.Dropout) and "att" in last:
        share = module.p
    if isinstance(share, float) and share > 0:
        return f"dropout in attention ({name})"

    kind = type(module).__name__
    is_recurrent = any(word in kind for word in ("Mamba", "Recurrent", "SSM"))
    is_recurrent |= isinstance(module, nn.Conv1d | nn.RNNBase)
    if is_recurrent and not is_delta_net(base.get_submodule(parent)):
        return f"{name or 'it'} ({kind}) carries a state from token to token"
    return None


def _use(base: Any, name: str) -> None:
    """Set the attention implementation of the language model; other towers keep theirs."""
    names = {part: name for part in base.config.sub_configs if "text" in part}
    base.set_attn_implementation({"": name} | names)


def _verify(model: Any, example: Example | None) -> None:
    """Compare shared rows with plain ones through eager attention."""
    base = base_model(model)
    groups = _trial_groups(base.config)
    images: dict[str, Any] = {}
    if example:
        groups[2] = (example[0], groups[2][1])
        images = example[1]
    gradients = {weight: weight.grad for weight in base.parameters()}
    was_training = model.training
    model.eval()  # dropout would be another one every time
    try:
        plain = _trial(model, "eager", groups, images)
        shared = _trial(model, NAME, groups, images)
    finally:
        model.train(was_training)
        for weight, gradient in gradients.items():
            weight.grad = gradient

    is_half = _LogprobHead.of(base).dtype in HALF
    limit = 5e-2 if is_half else 1e-4
    errors = _errors(plain, shared, is_half)
    if not all(error <= limit for error in errors):  # NaN is over it, too
        raise ValueError(
            f"log-probs or gradients differ from plain rows by {max(errors):.2g}, over {limit:.0e}"
        )


def _trial_groups(config: Any) -> list[tuple[list[int], list[list[int]]]]:
    """Three groups of random words."""
    kinds = ("image_token_id", "video_token_id", "audio_token_id")
    placeholders = [getattr(config, kind, None) for kind in kinds]
    vocab_size = min(config.get_text_config(decoder=True).vocab_size, 1000)
    words = sorted(set(range(vocab_size)).difference(placeholders))
    generator = random.Random(0)
    groups = []
    for lengths in ((9, 5, 2, 7), (4, 6, 3), (6, 5, 3)):
        texts = [generator.choices(words, k=length) for length in lengths]
        groups.append((texts[0], texts[1:]))
    return groups


def _trial(model: Any, attention: str, groups: Groups, images: dict[str, Any]) -> list[Tensor]:
    """Log-probs of the groups, then this rank's gradients, where weights have any."""
    base = base_model(model)
    base.zero_grad()
    _use(base, attention)
    device = device_of(base)
    row = pack(groups, share_prefix=attention == NAME, apart={2})[0].to(device)
    inputs: dict[str, Any] = {}
    for name, value in images.items():  # as often as the third group's prompt is there
        inputs[name] = torch.cat([value.to(device)] * row.prompts.count(2))

    with torch.enable_grad():  # whatever the caller's mode
        if row.segments is not None:
            logprobs = completion_logprobs(model, row, **inputs)
        else:
            logits = model(**_inputs(base, row, inputs)).logits[row.row, row.position]
            logprobs = -F.cross_entropy(logits.float(), row.targets, reduction="none")
        if logprobs.requires_grad:
            logprobs.backward(torch.linspace(-1, 1, len(logprobs)).to(logprobs))
    results = [logprobs.detach()]
    for weight in base.parameters():
        gradient: Any = weight.grad
        if hasattr(gradient, "to_local"):
            gradient = gradient.to_local()
        if gradient is not None:
            results.append(gradient.clone())
    return results


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


def device_of(model: nn.Module) -> torch.device:
    """The device that computes; FSDP2 may keep weights elsewhere."""
    weight: Any = next(model.parameters())
    if hasattr(weight, "device_mesh"):
        return torch.device(weight.device_mesh.device_type)
    return weight.device


# -- Log-probabilities -----------------------------------------------------------------------------


class _Logits(NamedTuple):
    """Logits of the head's product z: factor·z, or cap·tanh(factor·z / cap)."""

    factor: float
    cap: float | None = None
    forbidden: Tensor | None = None  # tokens without probability


class _TokenLogprobs(torch.autograd.Function):
    """Log softmax at the targets, and entropies, of a head's `_factors`."""

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, rule: _Logits, with_entropy: bool, *factors: Tensor
    ) -> tuple[Tensor, ...]:
        logprobs = factors[0].new_empty(len(targets), dtype=_wide(factors[0]))
        normalizers = torch.empty_like(logprobs)
        entropies = torch.zeros_like(logprobs)
        for part, logits in _chunks(rule, factors):
            found = _read(logits, targets[part, None], with_entropy)
            logprobs[part], normalizers[part], entropies[part] = found
        ctx.rule = rule
        ctx.save_for_backward(targets, normalizers, entropies, *factors)
        ctx.set_materialize_grads(False)  # None for what no loss reads, most often entropies
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Any, ...]:
        targets, normalizers, entropies, *factors = ctx.saved_tensors
        grad = torch.zeros_like(normalizers) if grad is None else grad
        xs, weights = _halves(factors)
        dxs = list(map(torch.empty_like, xs))
        dws: list[Tensor | None] = []
        wanted = ctx.needs_input_grad[-len(weights) :]
        for weight, is_wanted in zip(weights, wanted, strict=True):
            dws.append(torch.zeros_like(weight, dtype=normalizers.dtype) if is_wanted else None)

        for part, logits in _chunks(ctx.rule, factors):  # backward makes the logits again
            columns = (targets[part, None], normalizers[part, None], entropies[part, None])
            g = grad[part, None] * ctx.rule.factor
            h = None if entropy_grad is None else entropy_grad[part, None] * ctx.rule.factor
            dz = _derive(logits, *columns, g, h, ctx.rule.cap, weights[0].dtype)
            for x, weight, dx, dw in zip(xs, weights, dxs, dws, strict=True):
                torch.mm(dz, weight, out=dx[part])
                if dw is not None:
                    torch.addmm(dw, dz.T, x[part], out=dw, **_summed_in(dw, x))
        return None, None, None, *dxs, *dws  # autograd casts sums to the dtype of their weight


def _halves(factors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The xs and the weights of `_factors`."""
    num = len(factors) // 2
    return factors[:num], factors[num:]


def _summed_in(total: Tensor, x: Tensor) -> dict[str, Any]:
    """CUDA's option to sum products of 16-bit factors in fp32."""
    return {} if x.dtype == total.dtype else {"out_dtype": total.dtype}


@_fused
def _read(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log Σ exp and entropies (or zeros), each [n]."""
    top = logits.amax(-1, keepdim=True)
    # compiled, in place would cost a pass
    shifted = logits - top if logits.is_cuda else logits.sub_(top)
    chosen = shifted.gather(-1, targets)[:, 0]
    p = shifted.exp() if with_entropy else shifted.exp_()
    total = p.sum(-1)
    log_total = total.log()
    if with_entropy:  # Σ p·logit by no product that autocast would round
        entropies = log_total - p.mul_(shifted).sum(-1) / total
    else:
        entropies = torch.zeros_like(total)
    return chosen - log_total, top[:, 0] + log_total, entropies


@_fused
def _derive(
    logits: Tensor, targets: Tensor, normalizers: Tensor, entropies: Tensor,
    g: Tensor, h: Tensor | None, cap: Any, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """g·(onehot - p) - h·p·(log p + entropy) [n, V], by a softcap's slope; g, h are gradients."""
    logprobs = logits.gather(-1, targets) - normalizers
    chosen = torch.expm1(logprobs) * -g  # of more digits than the sum dz + g
    slope = None if cap is None else 1 - (logits / cap).square_()
    shifted = logits - normalizers if logits.is_cuda else logits.sub_(normalizers)
    if h is not None:
        chosen = chosen - logprobs.exp() * (logprobs + entropies) * h
        g = (shifted + entropies).mul_(h).add_(g)
    dz = shifted.exp_().mul_(-g)
    if slope is not None:
        dz = dz.mul_(slope)
        chosen = chosen * slope.gather(-1, targets)
    return dz.to(dtype).scatter_(-1, targets, chosen.to(dtype))


def _chunks(rule: _Logits, factors: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of tokens and their logits [n, V], in the same memory."""
    xs, weights = _halves(factors)
    num_tokens = len(xs[0])
    vocab_size = len(weights[0])
    kind = "cuda" if xs[0].is_cuda else "cpu"
    size = max(1, HEAD_CHUNK[kind] // vocab_size)
    memory = xs[0].new_empty(min(size, num_tokens), vocab_size, dtype=_wide(xs[0]))
    wider = _summed_in(memory, xs[0])
    for start in range(0, num_tokens, size):
        part = slice(start, start + size)
        x = xs[0][part]
        logits = memory[: len(x)]
        torch.mm(x, weights[0].T, out=logits, **wider)
        for x, weight in zip(xs[1:], weights[1:], strict=True):
            torch.addmm(logits, x[part], weight.T, out=logits, **wider)

        if rule.cap is not None:
            logits.mul_(rule.factor / rule.cap).tanh_().mul_(rule.cap)
        elif rule.factor != 1:
            logits.mul_(rule.factor)
        if rule.forbidden is not None:
            logits.index_fill_(-1, rule.forbidden, NEVER)
        yield part, logits


@dataclass(eq=False)
class _LogprobHead:
    """A head's forward; with `cells`, gives log-probs [1, N, 1], and keeps entropies [N]."""

    head: Any
    original: Any
    cells: Tensor | None = None  # flat positions, among all that reach the head
    logprobs_of: Any = None
    found: Any = None  # log-probs and entropies
    dtype: torch.dtype | None = None  # that the model computes in

    @classmethod
    def of(cls, base: Any) -> "_LogprobHead":
        """The one on the model's head, installed where there is none."""
        head = base.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(base).__name__} has no language-model head")
        if not isinstance(head.forward, cls):
            # not a module around it: parameters keep their names
            head.forward = cls(head, head.forward)
        return head.forward

    @torch.compiler.disable
    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.cells is None:
            return self.original(hidden, *args, **kwargs)
        self.dtype = _computed_in(hidden.dtype, hidden.device.type)
        factors = _factors(self.head, hidden.flatten(0, 1).index_select(0, self.cells))
        # CUDA sums products of 16-bit factors in fp32.
        dtype = self.dtype if hidden.is_cuda else _wide(hidden)
        self.found = self.logprobs_of(*[factor.to(dtype) for factor in factors])
        return self.found[0][None, :, None]

    def gave(self, logits: Tensor) -> bool:
        """True if a model returns the answer as it is."""
        if self.found is None:
            return False
        return torch.equal(logits[0, :, 0].nan_to_num(), self.found[0].nan_to_num())


def _factors(head: Any, hidden: Tensor) -> list[Tensor]:
    """A head as [x, x', ..., W, W', ...], logits x·Wᵀ + x'·W'ᵀ + ..."""
    if hasattr(head, "modules_to_save"):  # peft: a trained copy beside the original
        trained = head.modules_to_save
        head = head.original_module if head.disable_adapters else trained[head.active_adapters[0]]
    has_lora = hasattr(head, "lora_A")
    linear = head.get_base_layer() if has_lora else head
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise ValueError(
            f"the language-model head is a {type(linear).__name__}, not a plain linear layer"
        )

    xs = [hidden]
    weights = [linear.weight]
    if linear.bias is not None:
        xs.append(hidden.new_ones(len(hidden), 1))
        weights.append(linear.bias[:, None])
    if has_lora and head.disable_adapters and head.merged:
        head.unmerge()
    if has_lora and not head.disable_adapters and not head.merged:
        for name in head.active_adapters:
            if name in head.lora_A:
                if name in head.lora_variant or head.lora_B[name].bias is not None:
                    odd = "an adapter other than plain LoRA (DoRA, or with a bias)"
                    raise ValueError(f"the language-model head has {odd}")
                down = head.lora_A[name]
                low_rank = down(head.lora_dropout[name](hidden.to(down.weight.dtype)))
                xs.append((low_rank * head.scaling[name]).to(hidden.dtype))
                weights.append(head.lora_B[name].weight.to(hidden.dtype))
    return [*xs, *weights]


@contextmanager
def _bare_logits(base: Any, temperature: float, forbidden: Any) -> Iterator[_Logits]:
    """Take the rule for logits out of the model and its config, and yield it."""
    softcap = getattr(base.config, "final_logit_softcapping", None)
    scale = getattr(base, "logit_scale", 1.0)
    divisor = 1.0
    if base.config.model_type.startswith("granite"):  # other families multiply by the same field
        divisor = getattr(base.config, "logits_scaling", 1.0)
    own = vars(base.config)  # written directly, as a config may refuse None
    neutral = [
        (own, "final_logit_softcapping", softcap, None),
        (vars(base), "logit_scale", scale, 1.0),
        (own, "logits_scaling", divisor, 1.0),
    ]

    with ExitStack() as stack:
        for attributes, name, value, without in neutral:
            if value != without:
                stack.callback(attributes.update, {name: value})
                attributes[name] = without
        # With z = scale·x / T and c = cap / T, cap·tanh(scale·x / cap) / T is c·tanh(z / c).
        cap = None if softcap is None else softcap / temperature
        yield _Logits(scale / divisor / temperature, cap, forbidden)


def completion_logprobs(
    model: Any, row: PackedBatch, temperature: float = 1.0, return_entropy: bool = False,
    forbidden: Sequence[int] = (), inputs_embeds: Tensor | None = None, **images: Any,
) -> Any:  # fmt: skip
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
        ValueError: arguments that do not fit, a shared row without `attach`, a head not linear.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    base = base_model(model)
    head = _LogprobHead.of(base)
    inputs = _inputs(base, row, images, inputs_embeds)
    not_sampled = torch.tensor(forbidden, device=row.targets.device) if forbidden else None
    with _bare_logits(base, temperature, not_sampled) as rule:
        head.cells = _keep_predicting(base, row, inputs)
        head.logprobs_of = partial(_TokenLogprobs.apply, row.targets, rule, return_entropy)
        try:
            answer = model(**inputs).logits
            if not head.gave(answer):
                raise ValueError(
                    f"{type(base).__name__} changes its logits after the head in an unknown way"
                )
            entropies = head.found[1]
        finally:
            head.cells = None
            head.found = None
    return (answer[0, :, 0], entropies) if return_entropy else answer[0, :, 0]


def _keep_predicting(base: Any, row: PackedBatch, inputs: dict[str, Any]) -> Tensor:
    """Flat places [N] among what reaches the head; others do not."""
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        return row.row * row.input_ids.shape[1] + row.position
    kept, column = row.position.unique(return_inverse=True)
    inputs["logits_to_keep"] = kept
    return row.row * len(kept) + column


def _inputs(
    base: Any, row: PackedBatch, images: dict[str, Any], inputs_embeds: Tensor | None = None
) -> dict[str, Any]:
    """A model's arguments for a row: token ids, or features instead."""
    inputs = {"use_cache": False, **images}
    if row.segments is not None:
        inputs |= _shared_inputs(base, row, images)
    else:  # as any model's own attention takes it
        inputs["attention_mask"] = row.attention_mask
        for name in ("mm_token_type_ids", "token_type_ids"):
            if images and name in inspect.signature(base.forward).parameters:
                inputs[name] = _kinds(base, row.input_ids)
    if inputs_embeds is None:
        return inputs | {"input_ids": row.input_ids}
    if images:
        both = f"inputs_embeds and {', '.join(images)}"
        raise ValueError(f"{both}: a model finds the places of images by token ids")
    shape = row.input_ids.shape
    if inputs_embeds.shape[:-1] != shape:
        raise ValueError(f"inputs_embeds {[*inputs_embeds.shape]} of a row of {[*shape]} tokens")
    if hasattr(base.base_model, "rope_deltas"):
        # without ids it would shift positions by the images of an earlier row
        inputs["position_ids"] = row.position_ids
    return inputs | {"inputs_embeds": inputs_embeds}


def _shared_inputs(base: Any, row: PackedBatch, images: dict[str, Any]) -> dict[str, Any]:
    """A row's plan, its positions, and a mask that says nothing."""
    in_use = base.config.get_text_config()._attn_implementation
    if in_use != NAME or not getattr(base, "shares_prefixes", False):
        raise ValueError(
            "this row shares prefixes: attach(model) first, or pack(..., share_prefix=False)"
        )
    if images and not base.shares_images:
        kind = base.config.model_type
        raise ValueError(f"a {kind} with images: attach(model, example=...) first, to compare it")
    inputs = {
        "segments": row.segments,
        "position_ids": row.position_ids,
        # 4-D: handed through
        "attention_mask": row.input_ids.new_ones(1, 1, 1, 1, dtype=torch.bool),
    }
    if images and RARE:
        inputs |= RARE.inputs_of_images(base, row, images)
    return inputs


def _kinds(base: Any, ids: Tensor) -> Tensor:
    """0 for text, 1 for placeholders of images, 2 for videos."""
    is_image = ids == base.config.image_token_id
    is_video = ids == getattr(base.config, "video_token_id", -1)
    return is_image.int() + 2 * is_video.int()
