"""Attention of few families: imported, this file registers with prefix_attention.

It holds what flash kernels do not do: windows that bind (Mistral, Gemma, gpt-oss), softcaps
(Gemma2), sinks in ordinary batches, fp32 on a GPU. Then gated delta nets (Qwen3-Next, Qwen3.5), and
images that see themselves whole (Gemma3) or have M-RoPE positions (Qwen-VL).
`prefix_attention.needs_rare_attention` tells which models need it. That file calls `attention`,
`prepare` and `inputs_of_images`, by way of `prefix_attention.RARE`.
"""

import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import prefix_attention
from prefix_attention import PackedBatch

QUERY_BLOCK = 512  # queries at a time in `_loop`

prefix_attention.RARE = sys.modules[__name__]


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, options: dict[str, Any]
) -> Tensor:
    """Attention that no flash kernel does, with a plan or without.

    q [B, H, L, D], k and v [B, H_kv, K, D], mask [L, K] or [B, 1, L, K] of bool -> [B, L, H, D_v].
    """
    rules = (scale, options.get("softcap"), options.get("s_aux"))
    plan = options.get("segments")

    if plan is not None:
        out = _loop(q, k, v, plan, options.get("sliding_window"), *rules)
    else:
        if mask is None:
            ones = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool)
            mask = ones.tril(k.shape[2] - q.shape[2])
        out = _attend(q, k, v, mask, *rules)
    return out.transpose(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention written out: [B, H, L, D_v]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)

    num_copies = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(num_copies, dim=1)
    values = v.repeat_interleave(num_copies, dim=1)
    scores = q @ keys.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    wide = prefix_attention._wide(q)
    smallest = torch.finfo(wide).min  # finite: padding may see nothing
    scores = scores.to(wide).masked_fill(~mask, smallest)
    if sinks is not None:
        sinks = sinks.to(wide).view(-1, 1, 1)
        sink_scores = sinks.expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)

    p = scores.softmax(-1)[..., : k.shape[2]]
    return p.to(v.dtype) @ values


@torch.compiler.disable  # which could not follow it
def _loop(q: Tensor, k: Tensor, v: Tensor, plan: Tensor, window: int | None, *rules: Any) -> Tensor:
    """`_attend` of a row, `QUERY_BLOCK` queries of a segment at a time.

    Each block works on copies of the keys that it sees, which are made again in backward.
    """
    if window is None:
        window = q.shape[2]
    row = torch.arange(q.shape[2], device=q.device)  # so that the host never waits for the device
    outs = []
    paths = prefix_attention._paths(plan)
    for segment, path in zip(plan.tolist(), paths, strict=True):
        pieces = [row[piece.start : piece.stop] for piece in reversed(path)]
        context = torch.cat(pieces)
        sees_all = bool(segment[4])
        shift = path[0].stop - len(context)  # from a place on the path to one in the row

        for first in range(path[0].start - shift, len(context), QUERY_BLOCK):
            stop = min(first + QUERY_BLOCK, len(context))
            oldest = max(first - window + 1, 0)
            newest = len(context) if sees_all else stop
            seen = slice(oldest, newest)
            keys = context[seen]

            out = checkpoint(
                _attend,
                q[:, :, shift + first : shift + stop],
                k[:, :, keys],
                v[:, :, keys],
                _mask(row[first:stop, None] - row[seen], sees_all, window),
                *rules,
                use_reentrant=False,
            )
            outs.append(out)

    return torch.cat(outs, dim=2)


def _mask(distance: Tensor, sees_all: bool, window: int) -> Tensor:
    """Keys that are seen, of those `distance` [L, K] before their query."""
    mask = (distance >= 0) | sees_all
    return mask & (distance < window)


# -- Gated delta nets: recurrent layers, whose state goes from a segment to those below it ---------


def prepare(base: nn.Module) -> None:
    """Give gated delta nets a forward that takes a plan."""
    for module in filter(prefix_attention.is_delta_net, base.modules()):
        if getattr(module.forward, "func", None) is not delta_net:
            module.forward = partial(delta_net, module.forward, module.layer_idx)


class Handover:
    """A gated delta net's cache: takes parents' states, keeps the last one.

    Up to transformers 5.20 the net reads its attributes, from 5.21 on it calls `get_...`.
    """

    record_past = True  # the way that does not update states in place

    def __init__(self, layer: int, above: Sequence[Any]):
        self.layers = {layer: self}

        # the last inputs of the convolution [B, channels, K - 1]
        self.inputs: Tensor | None = None
        # the state of the delta rule [B, heads, d_k, d_v], in a list of one
        self.recurrent_states: list[Tensor] = []
        if above:
            self.inputs = torch.cat([state.inputs for state in above])
            recurrent = [state.recurrent_states[0] for state in above]
            self.recurrent_states = [torch.cat(recurrent)]

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
        return self.recurrent_states[0] if self.recurrent_states else None

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


class _Run(NamedTuple):
    """One forward, for the tokens from `first` to `stop` of a row."""

    begin: int  # where the forward begins, maybe before the tokens
    first: int
    stop: int
    behind: int  # it goes on from the state behind this many tokens of the row; 0 at a root


@torch.compiler.disable
def delta_net(
    forward: Any, layer: int, hidden_states: Tensor, segments: Tensor | None = None, **more: Any
) -> Tensor:
    """The forward of a gated delta net that takes a plan."""
    if segments is None:
        return forward(hidden_states, **more)

    runs, leaves = _runs(segments.tolist())
    outs: dict[int, Tensor] = {}  # by the place where they begin
    states: dict[int, Handover] = {}  # by the place behind which they stand

    for run in runs:
        above = [states[run.behind]] if run.behind else []
        states[run.stop] = Handover(layer, above)

        out = forward(hidden_states[:, run.begin : run.stop], states[run.stop])[0]
        outs[run.first] = out[run.first - run.begin :]

    if leaves:
        batch = pad_sequence(
            [hidden_states[0, run.first : run.stop] for run in leaves], batch_first=True
        )
        if batch.shape[1] == 1:  # would take decoding kernels, as in `_runs`
            batch = F.pad(batch, (0, 0, 0, 1))
        below = Handover(layer, [states[run.behind] for run in leaves])
        for run, out in zip(leaves, forward(batch, below), strict=True):
            outs[run.first] = out[: run.stop - run.first]

    return torch.cat([outs[first] for first in sorted(outs)])[None]


def _runs(plan: list[list[int]]) -> tuple[list[_Run], list[_Run]]:
    """Runs up to the last forks of segments, and leaves, for one batch.

    A root without forks runs whole. One token behind a state would take decoding kernels: its run
    begins where the one before began.
    """
    origins = []  # the place behind which each segment begins; 0 for a root
    forks: list[set[int]] = [set() for _ in plan]  # places in it behind which others begin
    for segment in plan:
        parent = segment[2]
        behind = 0
        if parent >= 0:
            behind = plan[parent][0] + segment[3]
            forks[parent].add(behind)
        origins.append(behind)

    runs = []
    leaves = []
    for segment, behind, stops in zip(plan, origins, forks, strict=True):
        first = begin = segment[0]
        end = first + segment[1]
        if not behind and not stops:
            stops = {end}

        from_state = behind
        for stop in sorted(stops):
            if stop - first > 1:
                begin = first
                from_state = behind
            runs.append(_Run(begin, first, stop, from_state))
            first = behind = stop

        if first < end:
            leaves.append(_Run(first, first, end, behind))
    return runs, leaves


# -- Images ----------------------------------------------------------------------------------------


def inputs_of_images(base: Any, row: PackedBatch, images: dict[str, Any]) -> dict[str, Any]:
    """The arguments that images change: plan and positions."""
    inputs: dict[str, Any] = {}
    if base.config.model_type in prefix_attention.WHOLE_IMAGES:
        assert row.segments is not None
        is_image = row.input_ids[0] == base.config.image_token_id
        inputs["segments"] = cut_at_images(row.segments, is_image.tolist())

    if any(name.endswith("_grid_thw") for name in images):
        inputs["position_ids"] = rope_positions(base, row, images)
    return inputs


def rope_positions(base: Any, row: PackedBatch, images: dict[str, Any]) -> Tensor:
    """M-RoPE positions [3, 1, T], of which the model makes those of prompts."""
    assert row.segments is not None
    paths = prefix_attention._paths(row.segments)
    roots = [path[0] for path in paths if len(path) == 1]
    prompts = [row.input_ids[0, root.start : root.stop] for root in roots]
    of_prompts, deltas = _rope_of_prompts(base, prompts, images)

    positions = row.position_ids.expand(3, 1, -1).clone()
    numbers = {root.start: number for number, root in enumerate(roots)}
    for path in paths:
        number = numbers[path[-1].start]
        own = positions[:, 0, path[0].start : path[0].stop]
        if len(path) > 1:
            own += deltas[number]
        else:
            own[:] = of_prompts[:, number, : len(path[0])]
    return positions


def _rope_of_prompts(base: Any, prompts: list[Tensor], images: dict[str, Any]) -> Any:
    """Positions [3, prompts, tokens], and shifts for what follows each prompt."""
    ids = pad_sequence(prompts, batch_first=True)
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)

    grids = {
        name: value
        for name, value in images.items()
        if name.endswith(("_grid_thw", "second_per_grid_ts"))
    }

    kinds = prefix_attention._kinds(base, ids)
    return base.model.get_rope_index(ids, kinds, **grids, attention_mask=mask)


def cut_at_images(plan: Tensor, is_image: list[bool]) -> Tensor:
    """The plan with segments for images, which see themselves whole."""
    cut: list[tuple[int, ...]] = []
    pieces: list[range] = []  # numbers in `cut` of each segment's
    paths = prefix_attention._paths(plan)
    for segment, path in zip(plan.tolist(), paths, strict=True):
        parent = -1
        num_seen = 0
        if segment[2] >= 0:  # below the last piece that begins before the fork
            before = [number for number in pieces[segment[2]] if cut[number][0] < path[1].stop]
            parent = before[-1]
            num_seen = path[1].stop - cut[parent][0]

        first = len(cut)
        for kind, run in groupby(path[0], key=is_image.__getitem__):
            places = list(run)
            cut.append((places[0], len(places), parent, num_seen, int(kind)))
            parent = len(cut) - 1  # of the next run
            num_seen = len(places)

        pieces.append(range(first, len(cut)))

    return torch.tensor(cut)
