"""Token columns of groups, packed into rows and dealt to ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from config import TrainConfig
from prefix_attention import PackedBatch, num_packed_tokens, pack
from rollouts.group import CUT, ENVIRONMENT, Group, Prompt, rollout_number
from rollouts.images import joined_images


@dataclass
class MicroBatch:
    """One forward, with the loss's columns of its N completion tokens.

    Tensors are [N] float32, but for `servers` and `rollouts`.
    """

    packed: PackedBatch
    advantages: Tensor
    mask: Tensor  # 1 on tokens that train, 0 elsewhere
    sampler_logprobs: Tensor  # nats, the server's
    servers: Tensor  # int16, 1 + the server's number; 0 for a token of an older policy
    rollouts: Tensor  # int64, `rollout_number`
    ref_logprobs: Tensor | None = None  # nats, where a part of the run gives them
    trainer_logprobs: Tensor | None = None  # nats, before the first of several updates
    images: dict[str, Tensor] = field(default_factory=dict)  # of the row's prompts, joined

    def to(self, device: torch.device) -> Self:
        """The same micro-batch on `device`."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor | PackedBatch):
                moved[name] = value.to(device)
        moved["images"] = {name: value.to(device) for name, value in self.images.items()}
        return replace(self, **moved)


# -- From columns to rows --------------------------------------------------------------------------


def groups_apart(groups: Sequence[Group]) -> set[int]:
    """The numbers of groups with images, which share nothing with others.

    Their token ids do not tell the images apart.
    """
    return {number for number, group in enumerate(groups) if group.prompt.images}


def row_tokens(groups: Sequence[Group], config: TrainConfig) -> int:
    """Positions of the smallest row that holds all groups."""
    sequences = [group.sequences for group in groups]
    return num_packed_tokens(sequences, config.share_prefix, apart=groups_apart(groups))


def tokens_alone(group: Group, config: TrainConfig) -> int:
    """Positions of a row that holds the group alone; they are counted once."""
    if group.num_positions is None:
        group.num_positions = row_tokens([group], config)
    return group.num_positions


def trained_lengths(group: Group, config: TrainConfig) -> list[int]:
    """The number of tokens of each completion that train.

    It is 0 where the reward is NaN, and for a cut completion where `mask_truncated_completions` is
    set. All tokens train in groups that were never scored.
    """
    lengths = list(group.num_sampled)
    for number, completion in enumerate(group.completions):
        is_masked = config.mask_truncated_completions and completion.finish_reason in CUT
        is_nan = bool(group.reward) and math.isnan(group.reward[number])
        if is_masked or is_nan:
            lengths[number] = 0
    return lengths


def micro_batches(
    groups: list[Group], max_tokens: int | None, config: TrainConfig
) -> list[MicroBatch]:
    """Pack groups and their columns into rows of at most `max_tokens`, or one (None)."""
    columns = token_columns(groups, config)
    sequences = [group.sequences for group in groups]
    found = []
    for row in pack(sequences, max_tokens, config.share_prefix, apart=groups_apart(groups)):
        row_columns: Any = {name: column[row.index] for name, column in columns.items()}
        # None: a prompt of several groups, which is text alone.
        prompts = [groups[number].prompt for number in row.prompts if number is not None]
        found.append(MicroBatch(row, images=row_images(prompts), **row_columns))
    return found


def row_images(prompts: list[Prompt]) -> dict[str, Tensor]:
    """The images of a row's prompts, joined."""
    if not any(prompt.images for prompt in prompts):
        return {}
    return joined_images(prompts)


def token_columns(groups: list[Group], config: TrainConfig) -> dict[str, Tensor]:
    """Fields of `MicroBatch`, one value a completion token, by group, completion, segment."""
    columns: dict[str, list[Tensor]] = {
        "advantages": [],
        "mask": [],
        "sampler_logprobs": [],
        "servers": [],
        "rollouts": [],
    }
    for group in groups:
        tokens = group.tokens
        advantages = torch.tensor(group.advantages).float()
        trains = torch.tensor(trained_lengths(group, config)) > 0
        versions = tokens.weight_versions
        is_current = versions == group.trained_version
        columns["advantages"].append(advantages[tokens.completion])
        columns["mask"].append((versions != ENVIRONMENT) & trains[tokens.completion])
        columns["sampler_logprobs"].append(tokens.sampler_logprobs)
        columns["servers"].append(is_current.to(torch.int16) * (1 + group.server))
        columns["rollouts"].append(rollout_number(group, tokens.completion))
        if group.ref_logprobs is not None:
            columns.setdefault("ref_logprobs", []).append(group.ref_logprobs)

    joined = {name: torch.cat(parts) for name, parts in columns.items()}
    joined["mask"] = joined["mask"].float()
    return joined


# -- From rows to ranks ----------------------------------------------------------------------------


class Share(NamedTuple):
    """A rank's next rows; an update follows where numbers are given."""

    micro_batches: list[MicroBatch]
    num_trained: tuple[int, int] | None = None  # of all ranks, as `num_trained`


class Dealer:
    """Packs a batch's groups into rows, and deals these in rounds.

    FSDP2 and DDP need equally many backward passes on every rank, so a round is one row for each,
    and only whole rounds are dealt. The last round of an update is filled up with copies of a row
    in which no token trains. Rank 0 deals for all.
    """

    def __init__(self, num_ranks: int, config: TrainConfig):
        self.config = config
        self.loads = [0] * num_ranks  # tokens that each rank has had
        self.waiting: list[Group] = []  # groups of a row that still has room
        self.waiting_tokens = 0  # of these, each alone: sharing may make the row shorter
        self.rows: list[MicroBatch] = []  # not dealt yet
        self.added: list[Group] = []  # to the mini-batch

    def missing_tokens(self) -> float:
        """Tokens to wait for before dealing: a row for each rank, or inf for the whole batch.

        Training while a batch arrives hides the sampling of a synchronous run. With rollouts ahead
        of the trainer the batch is there, or sampling is the bottleneck: nothing is gained
        (docs/asynchronous.md).
        """
        config = self.config
        if config.max_staleness > 0 or config.updates_per_batch > 1 or config.weighs_whole_batch:
            return math.inf
        num_missing_rows = len(self.loads) - len(self.rows)
        return num_missing_rows * config.max_tokens_per_gpu - row_tokens(self.waiting, config)

    def deal(self, groups: list[Group], is_complete: bool) -> list[list[Share]]:
        """Deal the groups that came: each rank's shares, one a mini-batch.

        Args:
            groups: in the order in which they train; with several mini-batches the whole batch.
            is_complete: these are the batch's last groups.
        """
        config = self.config
        size = config.batch_size // config.num_minibatches
        shares_of_rank: list[list[Share]] = [[] for _ in self.loads]
        for start in range(0, len(groups), size):
            shares = self._shares(groups[start : start + size], is_complete)
            for rank, share in enumerate(shares):
                shares_of_rank[rank].append(share)

        if config.num_minibatches > 1 and config.weighs_tokens_alike:
            of_all = num_trained(groups, config)
            for shares in shares_of_rank:
                shares[:] = [share._replace(num_trained=of_all) for share in shares]
        return shares_of_rank

    def _shares(self, groups: list[Group], ends_update: bool) -> list[Share]:
        """Each rank's share of a mini-batch, or of its whole rounds."""
        for group in groups:
            self._add(group)
        if not ends_update:
            return [Share(rows) for rows in self._deal_whole_rounds()]

        self._pack_the_rest()
        self._fill_the_last_round()
        of_all = num_trained(self.added, self.config)
        self.added = []
        return [Share(rows, of_all) for rows in self._deal_whole_rounds()]

    def _add(self, group: Group) -> None:
        """Let a group wait with others for their row; pack the others first if it does not fit."""
        if self.waiting and not self._has_room_for(group):
            self._pack_waiting(self.config.max_tokens_per_gpu)
        self.waiting.append(group)
        self.waiting_tokens += tokens_alone(group, self.config)
        self.added.append(group)

    def _has_room_for(self, group: Group) -> bool:
        """True where the open row can take the group."""
        max_tokens = self.config.max_tokens_per_gpu
        # Sharing only takes tokens away, so this cheap sum is the most that the row can have.
        at_most = self.waiting_tokens + tokens_alone(group, self.config)
        return (
            at_most <= max_tokens or row_tokens([*self.waiting, group], self.config) <= max_tokens
        )

    def _pack_waiting(self, max_tokens: int) -> None:
        """Pack the waiting groups into rows of at most `max_tokens`."""
        self.rows += micro_batches(self.waiting, max_tokens, self.config)
        self.waiting = []
        self.waiting_tokens = 0

    def _pack_the_rest(self) -> None:
        """Spread the waiting groups evenly over the round's missing rows."""
        num_ranks = len(self.loads)
        num_missing = num_ranks - len(self.rows) % num_ranks
        if num_missing == 1:  # all of them, as they wait for one row
            self._pack_waiting(self.config.max_tokens_per_gpu)
            return
        tokens_each = math.ceil(row_tokens(self.waiting, self.config) / num_missing)
        longest = longest_completion(self.waiting, self.config)
        self._pack_waiting(min(max(tokens_each, longest), self.config.max_tokens_per_gpu))

    def _fill_the_last_round(self) -> None:
        """Fill up the round with copies of the smallest row, all masked."""
        smallest = min(self.rows, key=num_tokens)
        filler = replace(smallest, mask=torch.zeros_like(smallest.mask))
        while len(self.rows) % len(self.loads) != 0:
            self.rows.append(filler)

    def _deal_whole_rounds(self) -> list[list[MicroBatch]]:
        """The rows for each rank: the largest where the fewest tokens were."""
        num_ranks = len(self.loads)
        dealt: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
        while len(self.rows) >= num_ranks:
            this_round = self.rows[:num_ranks]
            self.rows = self.rows[num_ranks:]
            largest_first = sorted(this_round, key=num_tokens, reverse=True)
            idlest_first = sorted(range(num_ranks), key=self.loads.__getitem__)
            for rank, row in zip(idlest_first, largest_first, strict=True):
                dealt[rank].append(row)
                self.loads[rank] += num_tokens(row)
        return dealt


def num_tokens(row: MicroBatch) -> int:
    """Tokens forwarded, padding included."""
    return row.packed.input_ids.numel()


def num_trained(groups: list[Group], config: TrainConfig) -> tuple[int, int]:
    """Completions, and tokens that train, over which an update's gradient is a mean."""
    lengths = []
    for group in groups:
        lengths += trained_lengths(group, config)
    return len(lengths), sum(lengths)


def longest_completion(groups: list[Group], config: TrainConfig) -> int:
    """The most positions that a completion with its prompt needs.

    For shorter rows `pack` would cut that completion into pieces, or refuse the group.
    """
    longest = 0
    for group in groups:
        prompt_ids, completions = group.sequences
        for completion in completions:
            own_prompt, token_ids = completion[0]
            alone = len(own_prompt) + len(token_ids) - 1  # a position predicts the next token
            if len(completion) > 1:  # segments, which may share
                alone = num_packed_tokens([(prompt_ids, [completion])], config.share_prefix)
            longest = max(longest, alone)
    return longest
