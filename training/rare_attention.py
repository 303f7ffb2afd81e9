"""Attention of a few families, which prefix_attention.py finds here once this file is imported.

Gated delta nets (Qwen3-Next, Qwen3.5), softcaps (Gemma2), sinks outside of the flash kernels
(gpt-oss), images that see themselves whole (Gemma3), and M-RoPE positions of images (Qwen-VL).
`prefix_attention.needs_rare_attention` tells which models need it. Its way in is
`prefix_attention.RARE`, through which `prepare`, `attend` and `inputs_of_images` are called.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import prefix_attention
from prefix_attention import PackedBatch

prefix_attention.RARE = sys.modules[__name__]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with a softcap or sinks, written out, as no kernel has these.

    q [B, H, L, D], k and v [B, H_kv, K, D], mask [B, 1, L, K] of bool -> [B, H, L, D_v]. Without a
    mask queries see the keys before them.
    """
    if mask is None:
        ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = ones.tril(k.shape[2] - q.shape[2])[None, None]
    num_copies = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(num_copies, dim=1)
    v = v.repeat_interleave(num_copies, dim=1)
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    wide = torch.promote_types(q.dtype, torch.float32)
    scores = scores.to(wide).masked_fill(
        ~mask, torch.finfo(wide).min
    )  # finite: padding may see nothing
    if sinks is not None:
        sink_scores = sinks.to(wide).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_scores], -1)
    p = scores.softmax(-1)[..., : k.shape[2]]
    return p.to(v.dtype) @ v


# -- Gated delta nets: recurrent layers, whose state goes from a segment to those below it ---------


def prepare(base: nn.Module) -> None:
    """Give a model's gated delta nets a forward that takes a plan, where they have none yet."""
    for module in base.modules():
        if not prefix_attention._is_delta_net(module):
            continue
        if getattr(module.forward, "func", None) is not delta_net:
            module.forward = partial(delta_net, module.forward, module.layer_idx)


class Handover:
    """Takes the place of a gated delta net's cache.

    It hands the net the states of its parents, and keeps the one with which the net ends.
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
            self.recurrent_states = [torch.cat([state.recurrent_states[0] for state in above])]

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self.inputs is not None

    def update_conv_state(self, inputs: Tensor, _: int, conv_kernel_size: int, **__: Any) -> Tensor:
        num_past = conv_kernel_size - 1
        if self.inputs is None:
            seen = F.pad(inputs, (num_past, 0))
        else:
            seen = torch.cat([self.inputs, inputs], -1)
        self.inputs = seen[..., seen.shape[-1] - num_past :]
        return seen

    def update_recurrent_state(self, state: Tensor, _: int, **__: Any) -> None:
        self.recurrent_states = [state]


@torch.compiler.disable
def delta_net(
    forward: Any, layer: int, hidden_states: Tensor, segments: Tensor | None = None, **more: Any
) -> Tensor:
    """The forward of a gated delta net that takes a plan: [1, T, hidden] -> [1, T, hidden].

    Segments run up to their last forks one by one, and what is left of them in a padded batch.
    """
    if segments is None:
        return forward(hidden_states, **more)

    net = _Net(forward, layer, hidden_states)
    plan = segments.tolist()
    forks: dict[int, set[int]] = {}  # of each segment, after how many tokens others branch off
    for _, _, parent, seen, _ in plan:
        forks.setdefault(parent, set()).add(seen)
    states: dict[tuple[int, int], Handover] = {}  # by segment, and how many of its tokens passed
    for number, (start, length, parent, seen, _) in enumerate(plan):
        state = states.get((parent, seen))
        ends = sorted(forks.get(number, ()))
        if not ends and state is None:
            ends = [length]  # a root without forks runs whole
        at_ends = net.run(start, ends, state)
        for end, state in zip(ends, at_ends, strict=True):
            states[number, end] = state
        first = ends[-1] if ends else 0
        if state and first < length:
            net.leaves.append((range(start + first, start + length), state))
    net.run_leaves()
    return torch.cat([net.outs[start] for start in sorted(net.outs)])[None]


@dataclass
class _Net:
    """A gated delta net and a row's hidden states [1, T, hidden]."""

    forward: Any
    layer: int
    hidden_states: Tensor
    outs: dict[int, Tensor] = field(default_factory=dict)  # by the place where they begin
    # the ends of segments, behind the last fork, and the states that they go on from
    leaves: list[tuple[range, Handover]] = field(default_factory=list)

    def run(self, start: int, ends: list[int], state: Handover | None) -> list[Handover]:
        """Run a segment piece by piece from `state` on; returns the states at the pieces' ends."""
        states = []
        first = 0
        begin = 0  # where the piece's forward begins, maybe before the piece
        state_at_begin = state
        for last in ends:
            # a single token would take decoding kernels: the piece before runs again with it
            if state is None or last - first > 1:
                begin = first
                state_at_begin = state
            state = Handover(self.layer, [state_at_begin] if state_at_begin else [])
            states.append(state)
            piece = self.hidden_states[:, start + begin : start + last]
            out = self.forward(piece, cache_params=state)[0]
            self.outs[start + first] = out[first - begin :]
            first = last
        return states

    def run_leaves(self) -> None:
        """Run all leaves in a padded batch."""
        if not self.leaves:
            return
        longest = max(len(leaf) for leaf, _ in self.leaves)
        longest = max(longest, 2)  # for the same reason
        pieces = []
        for leaf, _ in self.leaves:
            piece = self.hidden_states[0, leaf.start : leaf.stop]
            pieces.append(F.pad(piece, (0, 0, 0, longest - len(leaf))))
        below = Handover(self.layer, [state for _, state in self.leaves])
        batch = self.forward(torch.stack(pieces), cache_params=below)
        for (leaf, _), out in zip(self.leaves, batch, strict=True):
            self.outs[leaf.start] = out[: len(leaf)]


# -- Images ----------------------------------------------------------------------------------------


def inputs_of_images(base: Any, row: PackedBatch, images: dict[str, Any]) -> dict[str, Any]:
    """The arguments that images change in a row's forward: its plan, its positions."""
    assert row.segments is not None
    inputs: dict[str, Any] = {}
    if base.config.model_type in prefix_attention.WHOLE_IMAGES:
        is_image = row.input_ids[0] == base.config.image_token_id
        inputs["segments"] = cut_at_images(row.segments, is_image.tolist())
    if any(name.endswith("_grid_thw") for name in images):
        inputs["position_ids"] = rope_positions(base, row, images)
    return inputs


def rope_positions(base: Any, row: PackedBatch, images: dict[str, Any]) -> Tensor:
    """M-RoPE positions [3, 1, T]: the model's own for prompts with images.

    Completions go on from the largest.
    """
    assert row.segments is not None
    paths = prefix_attention._paths(row.segments)
    roots = [path[0] for path in paths if len(path) == 1]
    ids = pad_sequence(
        [row.input_ids[0, root.start : root.stop] for root in roots], batch_first=True
    )
    mask = pad_sequence([row.input_ids.new_ones(len(root)) for root in roots], batch_first=True)
    kinds = prefix_attention._kinds(base, ids)
    ends = ("_grid_thw", "second_per_grid_ts")
    grids = {name: value for name, value in images.items() if name.endswith(ends)}
    of_prompts, deltas = base.model.get_rope_index(ids, kinds, **grids, attention_mask=mask)

    positions = row.position_ids.expand(3, 1, -1).clone()
    numbers = {root.start: number for number, root in enumerate(roots)}
    for path in paths:
        number = numbers[path[-1].start]
        own = positions[:, 0, path[0].start : path[0].stop]
        if len(path) == 1:
            own.copy_(of_prompts[:, number, : len(path[0])])
        else:
            own += deltas[number]
    return positions


def cut_at_images(plan: Tensor, is_image: list[bool]) -> Tensor:
    """The plan in which a run of image tokens is a segment that sees all of itself.

    That segment stands above what follows it.
    """
    cut: list[tuple[int, ...]] = []
    pieces: list[range] = []  # numbers in `cut` of each segment's
    for segment, path in zip(plan.tolist(), prefix_attention._paths(plan), strict=True):
        above = segment[2]
        parent = -1
        seen = 0
        if above >= 0:  # the last piece that begins before the fork
            fork = path[1].stop
            parent = max(number for number in pieces[above] if cut[number][0] < fork)
            seen = fork - cut[parent][0]

        first = len(cut)
        for kind, run in groupby(path[0], key=is_image.__getitem__):
            places = list(run)
            cut.append((places[0], len(places), parent, seen, int(kind)))
            parent = len(cut) - 1
            seen = len(places)
        pieces.append(range(first, len(cut)))
    return torch.tensor(cut)
