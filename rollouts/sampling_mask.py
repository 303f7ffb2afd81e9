"""Sampling masks: the tokens that a server could draw, under top-k, top-p or min-p.

Where the server truncates the distribution, ratios are exact if the trainer's log-probs are taken
over the same tokens ("Keep Sampling Mask", DeepSeek-V3.2, arXiv:2512.02556).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config import TrainConfig, UserError, bending
from server.messages import Sampled


class SamplingMask:
    """For each of n tokens, the set of tokens that it was drawn from.

    Args:
        ids: [m] int64, the sets one after the other.
        sizes: [n] int64, of each set; 0 stands for all tokens, as where an environment wrote one.

    Raises:
        ValueError: the sizes do not add up.
    """

    def __init__(self, ids: Any, sizes: Any):
        self.ids = torch.as_tensor(ids, dtype=torch.int64)
        self.sizes = torch.as_tensor(sizes, dtype=torch.int64)
        if self.sizes.sum() != len(self.ids):
            raise ValueError(f"a sampling mask of {len(self.ids)} ids has sizes of other sum")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, places: Any) -> "SamplingMask":
        """The sets at `places`, in their order: a slice, or numbers [k] int64."""
        sizes = self.sizes[places]
        starts = (self.sizes.cumsum(0) - self.sizes)[places]
        within = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return SamplingMask(self.ids[starts.repeat_interleave(sizes) + within], sizes)

    def check(self, token_ids: Tensor) -> None:
        """Raise a ValueError unless each token [n] is in its set."""
        owner = torch.arange(len(self)).repeat_interleave(self.sizes)
        is_drawn = torch.zeros(len(self), dtype=torch.bool)
        is_drawn[owner[self.ids == token_ids[owner]]] = True
        if not is_drawn.all():
            place = int(is_drawn.int().argmin())
            raise ValueError(f"token {place} of a completion is not in its sampling mask")

    def excluded(self, part: slice, logits: Tensor) -> Tensor:
        """True outside the sets of the places `part`: bool, in the shape of `logits` [k, V]."""
        mask = self[part]
        excluded = (mask.sizes > 0).to(logits.device)[:, None].repeat(1, logits.shape[1])
        owner = torch.arange(len(mask)).repeat_interleave(mask.sizes)
        excluded[owner.to(logits.device), mask.ids.to(logits.device)] = False
        return excluded


def mask_of(message: Sampled) -> SamplingMask:
    """Check the mask of a completion that a server sampled.

    Raises:
        ValueError: its sizes make no sense, or a token is not in its set.
    """
    token_ids, ids, sizes = [
        torch.from_numpy(np.frombuffer(data, "<i4").astype(np.int64))
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
        found = mask or SamplingMask([], [0] * length)
        ids.append(found.ids)
        sizes.append(found.sizes)
    return SamplingMask(torch.cat(ids), torch.cat(sizes))


def check_servers(servers: Sequence[Any], config: TrainConfig) -> None:
    """Warn where servers that truncate return no masks.

    Raises:
        UserError: log-probs of `reference_urls` would be over other tokens than the policy's.
    """
    without = [server.url for server in servers if not server.returns_sampling_mask]
    if len(without) < len(servers) and config.reference_urls:
        raise UserError(
            "reference_urls give log-probs over all tokens, and servers with --return-sampling-mask"
            " over those that could be drawn: use reference_id, or servers without that option"
        )
    truncating = set(bending(config)) - set(bending(config, has_masks=True))
    if truncating and without:
        print(
            f"warning: {', '.join(sorted(truncating))}: tokens are not drawn from the policy "
            f"itself, and ratios are inexact, as {', '.join(without)} return no sampling mask: on "
            "GPUs vllm_server.py takes --return-sampling-mask, with top_k set",
            flush=True,
        )
