"""Sampling masks: the tokens that a server could draw, under top-k, top-p or min-p.

Where the server truncates the distribution, ratios are exact if the trainer's log-probs are taken
over the same tokens ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556).
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config import TrainConfig, UserError, sampling_settings, truncating
from server.messages import Sampled


class SamplingMask:
    """For each of n tokens, the set of tokens that it was drawn from.

    Args:
        ids: [m] int32, the sets one after the other.
        sizes: [n] int32, of each set; 0 stands for all tokens, as where an environment wrote one.

    Raises:
        ValueError: the sizes do not add up, or a number is negative.
    """

    def __init__(self, ids: Any, sizes: Any):
        self.ids = torch.as_tensor(ids, dtype=torch.int32)
        self.sizes = torch.as_tensor(sizes, dtype=torch.int32)
        if self.sizes.sum() != len(self.ids):
            raise ValueError(f"a sampling mask of {len(self.ids)} ids has sizes of other sum")
        if (self.sizes < 0).any() or (self.ids < 0).any():
            raise ValueError("a sampling mask has negative numbers")
        self.ends = self.sizes.cumsum(0)  # of the sets in `ids`; they stay on the CPU

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, places: Any) -> "SamplingMask":
        """The sets at `places`, in their order: a slice, or numbers [k] int64. On the CPU."""
        sizes = self.sizes[places]
        starts = (self.ends - self.sizes)[places]
        within = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return SamplingMask(self.ids[starts.repeat_interleave(sizes) + within], sizes)

    def to(self, device: torch.device | str) -> "SamplingMask":
        """The same mask for logits on `device`."""
        moved = copy(self)
        moved.ids = self.ids.to(device)
        moved.sizes = self.sizes.to(device)
        return moved

    def check(self, token_ids: Tensor) -> None:
        """Raise a ValueError unless each token [n] is in its set."""
        owner = torch.arange(len(self)).repeat_interleave(self.sizes)
        is_drawn = torch.zeros(len(self), dtype=torch.bool)
        is_drawn[owner[self.ids == token_ids[owner]]] = True
        if not is_drawn.all():
            place = int(is_drawn.int().argmin())
            raise ValueError(f"token {place} of a completion is not in its sampling mask")

    def restrict(self, part: slice, logits: Tensor, fill: float) -> None:
        """Write `fill` over all but the sets' logits of the places `part`: logits [k, V]."""
        start = part.start
        begin = int(self.ends[start - 1]) if start else 0
        end = int(self.ends[start + len(logits) - 1])  # read on the CPU: no GPU is waited for
        sizes = self.sizes[part]
        rows = torch.arange(len(logits), device=logits.device)
        owner = rows.repeat_interleave(sizes, output_size=end - begin)
        ids = self.ids[begin:end].long()
        drawn = logits[owner, ids]
        logits.masked_fill_((sizes > 0)[:, None], fill)
        logits[owner, ids] = drawn


def mask_of(message: Sampled) -> SamplingMask:
    """Check the mask of a completion that a server sampled, in which no set is empty.

    Raises:
        ValueError: its sizes make no sense, or a token is not in its set.
    """
    token_ids, ids, sizes = [
        torch.from_numpy(np.frombuffer(data, "<i4").copy())
        for data in (message.token_ids, message.mask_ids, message.mask_sizes)
    ]
    mask = SamplingMask(ids, sizes)
    if len(mask) != len(token_ids):
        raise ValueError(f"a sampling mask of {len(mask)} tokens for {len(token_ids)}")
    mask.check(token_ids)
    return mask


def joined(masks: Sequence[SamplingMask | None], lengths: Sequence[int]) -> SamplingMask:
    """Join masks of neighbours, of so many tokens each; None stands for all tokens."""
    ids = []
    sizes = []
    for mask, length in zip(masks, lengths, strict=True):
        found = SamplingMask([], [0] * length) if mask is None else mask
        ids.append(found.ids)
        sizes.append(found.sizes)
    return SamplingMask(torch.cat(ids), torch.cat(sizes))


def check_server(server: Any, config: TrainConfig, say: Callable[[str], None]) -> None:
    """Warn of a server that truncates and returns no masks.

    Raises:
        UserError: nothing bounds its masks, or log-probs of `reference_urls` would be over other
            tokens than the policy's.
    """
    if server.returns_sampling_mask and not config.top_k:
        raise UserError(
            f"{server.url} was started with --return-sampling-mask, which needs top_k to bound its "
            "masks: set it, or start the server without"
        )
    if server.returns_sampling_mask and config.reference_urls:
        raise UserError(
            "reference_urls give log-probs over all tokens, and servers with --return-sampling-mask"
            " over those that could be drawn: use reference_id, or servers without that option"
        )
    if not server.returns_sampling_mask:
        names = ", ".join(truncating(sampling_settings(config)))
        say(
            f"warning: {names}: tokens are not drawn from the policy itself, and ratios are "
            "inexact, as not all servers return sampling masks: on GPUs vllm_server.py takes "
            "--return-sampling-mask, with top_k set"
        )


def warn_of_replay(theirs: dict[str, Any], group: Any) -> None:
    """Warn where saved rollouts were truncated, and have no masks.

    Args:
        theirs: the settings of the run that saved them, as JSON.
        group: the first of its groups.
    """
    names = truncating([*(theirs.get("sampling_params") or {})])
    if theirs.get("top_k"):
        names.append("top_k")
    if names and group.tokens.sampling_mask is None:
        print(
            f"warning: {', '.join(names)}: the saved tokens were not drawn from the policy itself, "
            "and ratios are inexact, as no sampling masks were saved with them",
            flush=True,
        )
