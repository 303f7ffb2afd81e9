"""From the token columns of groups to rows, and from rows to the ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from config import TrainConfig
from prefix_attention import PackedBatch, num_packed_tokens, pack
from rollouts.data import joined_images
from rollouts.group import Group


@dataclass
class MicroBatch:
    """One forward and what the loss needs for each of its N completion tokens; tensors are [N] float32."""

    packed: PackedBatch
    advantages: Tensor
    mask: Tensor  # 1 on tokens that train, 0 elsewhere
    sampler_logprobs: Tensor  # nats, the server's
    servers: Tensor  # int16: 1 + the server's number where the current policy sampled the token, 0 where an older did
    images: dict[str, Tensor] = field(
        default_factory=dict
    )  # those of the row's prompts, from `joined_images`
    ref_logprobs: Tensor | None = None  # nats, of `reference_urls`
    trainer_logprobs: Tensor | None = (
        None  # nats, the policy's before the first of several updates, on its device
    )

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded, padding included."""
        return self.packed.num_tokens

    def to(self, device: torch.device) -> Self:
        """The same micro-batch on `device`."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor | PackedBatch):
                moved[name] = value.to(device)
        moved["images"] = {name: value.to(device) for name, value in self.images.items()}
        return replace(self, **moved)


def loss_normalizer(lengths: list[int], config: TrainConfig) -> float:
    """What the summed gradient is divided by, at least 1; `lengths` are the trained tokens of each completion.

    grpo: the completions. dr_grpo: completions x max_completion_len. bnpo, dapo, cispo: the tokens.
    """
    if config.loss_type == "grpo":
        return max(len(lengths), 1)
    if config.loss_type == "dr_grpo":
        return max(len(lengths), 1) * config.max_completion_len
    return max(sum(lengths), 1)


def with_images(groups: Sequence[Group]) -> set[int]:
    """The numbers of groups whose prompts have images: they share nothing with others."""
    return {number for number, group in enumerate(groups) if group.prompt.images}


def row_tokens(groups: Sequence[Group], config: TrainConfig) -> int:
    """Positions of the smallest row that holds all groups."""
    sequences = [group.sequences for group in groups]
    return num_packed_tokens(sequences, config.share_prefix, apart=with_images(groups))


def trained_lengths(group: Group, config: TrainConfig) -> list[int]:
    """Count the tokens of each completion that train: none without a reward, or where truncation masks them."""
    lengths = group.num_sampled
    for number, completion in enumerate(group.completions):
        is_cut = config.mask_truncated_completions and completion.finish_reason == "length"
        has_no_reward = bool(group.reward) and math.isnan(
            group.reward[number]
        )  # it need not have been scored
        if is_cut or has_no_reward:
            lengths[number] = 0
    return lengths


def micro_batches(groups: list[Group], max_tokens: int, config: TrainConfig) -> list[MicroBatch]:
    """Pack groups into rows of at most `max_tokens`, with what their tokens need for the loss."""
    columns = token_columns(groups, config)
    sequences = [group.sequences for group in groups]
    batches = []
    for row in pack(sequences, max_tokens, config.share_prefix, apart=with_images(groups)):
        of_row: Any = {name: column[row.index] for name, column in columns.items()}
        prompts = [groups[number].prompt for number in row.prompts if number is not None]
        batches.append(MicroBatch(row, images=joined_images(prompts), **of_row))
    return batches


def token_columns(groups: list[Group], config: TrainConfig) -> dict[str, Tensor]:
    """Join what the loss needs of each completion token, by name, in the order group, completion, segment, token."""
    parts: dict[str, list[Tensor]] = {
        "advantages": [],
        "mask": [],
        "sampler_logprobs": [],
        "servers": [],
    }
    for group in groups:
        tokens = group.tokens
        advantages = torch.tensor(group.advantages).float()
        trains = torch.tensor(trained_lengths(group, config)) > 0
        is_current = tokens.weight_versions == group.trained_version
        parts["advantages"].append(advantages[tokens.completion])
        parts["mask"].append(tokens.loss_mask & trains[tokens.completion])
        parts["sampler_logprobs"].append(tokens.sampler_logprobs)
        parts["servers"].append(is_current.to(torch.int16) * (1 + group.server))
        if group.ref_logprobs is not None:
            parts.setdefault("ref_logprobs", []).append(group.ref_logprobs)

    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    joined["mask"] = joined["mask"].float()
    return joined


class Share(NamedTuple):
    """Rows that one rank trains next. With a `normalizer` an update follows, which divides the gradients by it."""

    micro_batches: list[MicroBatch]
    normalizer: float | None = None


class Dealer:
    """Packs the groups of a batch into rows, and deals the rows to the ranks in rounds of one row each.

    FSDP2 and DDP need equally many backward passes on every rank, so only whole rounds are dealt. The last round of an
    update is filled up with copies of a row in which no token trains. Only rank 0's is filled.
    """

    def __init__(self, num_ranks: int, config: TrainConfig):
        self.config = config
        self.loads = [0] * num_ranks  # tokens that each rank has had
        self.waiting: list[Group] = []  # groups of a row that still has room
        self.waiting_tokens = (
            0  # of these, each alone: where prefixes are shared, at least those of their row
        )
        self.rows: list[MicroBatch] = []  # not dealt yet
        self.lengths: list[int] = []  # tokens that train, of each completion of the mini-batch

    def missing_tokens(self) -> float:
        """Count the tokens that fill a row on every rank; infinitely many where training needs the whole batch."""
        if self.config.updates_per_batch > 1 or self.config.weighs_whole_batch:
            return math.inf
        num_rows = len(self.loads) - len(self.rows)
        return num_rows * self.config.max_tokens_per_gpu - row_tokens(self.waiting, self.config)

    def deal(self, groups: list[Group], is_complete: bool) -> list[list[Share]]:
        """Each rank's shares of the groups that came, one per mini-batch; `is_complete`: they are the batch's last."""
        config = self.config
        weighs_tokens_alike = config.num_minibatches > 1 and config.loss_type in ("dapo", "cispo")
        normalizer = None
        if weighs_tokens_alike:
            # With several mini-batches these groups are the whole batch, for which `missing_tokens` makes `take` wait.
            lengths = []
            for group in groups:
                lengths += trained_lengths(group, config)
            normalizer = loss_normalizer(lengths, config) / config.num_minibatches

        size = config.batch_size // config.num_minibatches
        shares_of_rank: list[list[Share]] = [[] for _ in self.loads]
        for start in range(0, len(groups), size):
            shares = self._shares(groups[start : start + size], is_complete, normalizer)
            for rank, share in enumerate(shares):
                shares_of_rank[rank].append(share)
        return shares_of_rank

    def _shares(
        self, groups: list[Group], ends_update: bool, normalizer: float | None
    ) -> list[Share]:
        """Each rank's share of a mini-batch, or of the part of it that fills whole rounds."""
        for group in groups:
            self._add(group)
        if not ends_update:
            return [Share(rows) for rows in self._deal_whole_rounds()]

        self._pack_the_rest()
        self._fill_the_last_round()
        if normalizer is None:
            normalizer = loss_normalizer(self.lengths, self.config)
        self.lengths = []
        return [Share(rows, normalizer) for rows in self._deal_whole_rounds()]

    def _add(self, group: Group) -> None:
        """Put a group into the open row; if it has no room for it, pack that row and open another."""
        if self.waiting and not self._has_room_for(group):
            self._pack_waiting(self.config.max_tokens_per_gpu)
        self.waiting.append(group)
        self.waiting_tokens += row_tokens([group], self.config)
        self.lengths += trained_lengths(group, self.config)

    def _has_room_for(self, group: Group) -> bool:
        budget = self.config.max_tokens_per_gpu
        if self.config.share_prefix:
            # Sharing only takes tokens away, so this sum, which costs little, is the most that the row can have.
            at_most = self.waiting_tokens + row_tokens([group], self.config)
            if at_most <= budget:
                return True
        return row_tokens([*self.waiting, group], self.config) <= budget

    def _pack_waiting(self, budget: int) -> None:
        """Make rows of at most `budget` tokens of the waiting groups."""
        self.rows += micro_batches(self.waiting, budget, self.config)
        self.waiting = []
        self.waiting_tokens = 0

    def _pack_the_rest(self) -> None:
        """Spread what still waits evenly over the rows that the current round lacks."""
        num_ranks = len(self.loads)
        num_missing = num_ranks - len(self.rows) % num_ranks
        even = math.ceil(row_tokens(self.waiting, self.config) / num_missing)
        longest = longest_completion(
            self.waiting, self.config
        )  # a row holds at least one whole completion
        self._pack_waiting(min(max(even, longest), self.config.max_tokens_per_gpu))

    def _fill_the_last_round(self) -> None:
        """Add copies of the smallest row, in which no token trains, until every rank gets one."""
        smallest = min(self.rows, key=num_tokens)
        filler = replace(smallest, mask=torch.zeros_like(smallest.mask))
        while len(self.rows) % len(self.loads) != 0:
            self.rows.append(filler)

    def _deal_whole_rounds(self) -> list[list[MicroBatch]]:
        """The rows for each rank: in each round the largest row goes to the rank that has had the fewest tokens."""
        num_ranks = len(self.loads)
        dealt: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
        while len(self.rows) >= num_ranks:
            this_round = self.rows[:num_ranks]
            self.rows = self.rows[num_ranks:]
            largest_first = sorted(this_round, key=num_tokens, reverse=True)
            idlest_first = sorted(range(num_ranks), key=lambda rank: self.loads[rank])
            for rank, row in zip(idlest_first, largest_first, strict=True):
                dealt[rank].append(row)
                self.loads[rank] += row.num_tokens
        return dealt


def num_tokens(row: MicroBatch) -> int:
    """A key to sort rows by."""
    return row.num_tokens


def longest_completion(groups: list[Group], config: TrainConfig) -> int:
    """Positions of the longest row that a single completion, with its prompt, needs."""
    longest = 0
    for group in groups:
        prompt_ids, completions = group.sequences
        for completion in completions:
            alone = num_packed_tokens([(prompt_ids, [completion])], config.share_prefix)
            longest = max(longest, alone)
    return longest
