"""Token columns of groups, packed into rows and dealt to ranks."""

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from config import TrainConfig
from prefix_attention import PackedBatch, num_packed_tokens, pack
from rollouts.group import CUT, ENVIRONMENT, Group
from rollouts.images import joined_images


class Update(NamedTuple):
    """An optimizer step, and what its gradient is a mean over, on all ranks."""

    num_completions: int
    num_trained_tokens: int


@dataclass
class MicroBatch:
    """One forward, with the loss's columns of its N completion tokens.

    Tensors are [N] float32, but for `servers`.
    """

    packed: PackedBatch  # its `index` says where its tokens stand among all that were packed
    advantages: Tensor
    mask: Tensor  # 1 on tokens that train, 0 elsewhere
    sampler_logprobs: Tensor  # nats, the server's
    servers: Tensor  # int16, 1 + the server's number; 0 for a token of another policy
    ref_logprobs: Tensor | None = None  # nats, where a part of the run gives them
    trainer_logprobs: Tensor | None = None  # nats, before the first of several updates
    images: dict[str, Tensor] = field(default_factory=dict)  # of the row's prompts, joined
    update: Update | None = None  # follows this one, the last of its mini-batch

    def to(self, device: torch.device) -> Self:
        """The same micro-batch on `device`."""
        moved = tree_map_only((Tensor, PackedBatch), lambda value: value.to(device), vars(self))
        return replace(self, **moved)


# -- From columns to rows --------------------------------------------------------------------------


def trained_lengths(group: Group, config: TrainConfig) -> list[int]:
    """The number of tokens of each completion that train.

    It is 0 where the reward is NaN, and for a cut completion where `mask_truncated_completions` is
    set. In a group without rewards, as of a probe, all tokens train.
    """
    lengths = list(group.num_sampled)
    for number, completion in enumerate(group.completions):
        is_masked = config.mask_truncated_completions and completion.finish_reason in CUT
        is_nan = group.reward and math.isnan(group.reward[number])
        if is_masked or is_nan:
            lengths[number] = 0
    return lengths


def micro_batches(
    groups: list[Group], max_tokens: int | None, config: TrainConfig
) -> list[MicroBatch]:
    """Pack groups and their columns into rows of at most `max_tokens`, or one (None)."""
    columns = token_columns(groups, config)
    sequences = [group.sequences for group in groups]
    # Groups with images share nothing with others: token ids do not tell images apart.
    apart = {number for number, group in enumerate(groups) if group.prompt.images}
    found = []
    for row in pack(sequences, max_tokens, config.share_prefix, apart):
        row_columns: Any = {name: column[row.index] for name, column in columns.items()}
        # Of each prompt in the row its group, or None where several share it: that is text alone.
        prompts = [groups[number].prompt for number in row.prompts if number is not None]
        found.append(MicroBatch(row, images=joined_images(prompts), **row_columns))
    return found


def token_columns(groups: list[Group], config: TrainConfig) -> dict[str, Tensor]:
    """Fields of `MicroBatch`, one value per completion token, by group, completion, segment."""
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for group in groups:
        tokens = group.tokens
        advantages = torch.tensor(group.advantages).float()
        trains = torch.tensor(trained_lengths(group, config))[tokens.completion] > 0
        versions = tokens.weight_versions
        is_current = versions == group.trained_version
        of_group = {
            "advantages": advantages[tokens.completion],
            "mask": ((versions != ENVIRONMENT) & trains).float(),
            "sampler_logprobs": tokens.sampler_logprobs,
            "servers": is_current.to(torch.int16) * (1 + group.server),
        }
        if group.ref_logprobs is not None:
            of_group["ref_logprobs"] = group.ref_logprobs
        for name, column in of_group.items():
            columns[name].append(column)

    return {name: torch.cat(parts) for name, parts in columns.items()}


# -- From rows to ranks ----------------------------------------------------------------------------


class Dealer:
    """Packs a batch's groups into rows, and deals these in rounds.

    FSDP2 and DDP need equally many backward passes on every rank, so a round is one row for each,
    and only whole rounds are dealt. The last round of an update is filled up with copies of a row
    in which no token trains. Rank 0 deals for all.
    """

    def __init__(self, num_ranks: int, config: TrainConfig):
        self.config = config
        self.num_ranks = num_ranks
        self.groups: list[Group] = []  # of the batch, dealt or not
        self.waiting: list[Group] = []  # not dealt yet
        self._num_tokens = 0  # of those that wait or are to be dealt next

    def needs_more(self, group: Group) -> bool:
        """Count a group that came; True where those not dealt make less than a row for each rank.

        With max_staleness 0, training while a batch arrives hides its sampling. The whole batch is
        awaited where that gains nothing, as rollouts run ahead (docs/asynchronous.md), and where it
        is needed first.
        """
        config = self.config
        if config.max_staleness > 0 or config.updates_per_batch > 1 or config.advantages_need_batch:
            return True
        self._num_tokens += num_packed_tokens([group.sequences], config.share_prefix)
        return self._num_tokens < self.num_ranks * config.max_tokens_per_gpu

    def deal(self, groups: list[Group], is_complete: bool) -> list[list[MicroBatch]]:
        """Deal the groups that came: each rank's next micro-batches.

        Args:
            groups: in the order in which they train; all of the batch at once, if it has several
                mini-batches.
            is_complete: these are the batch's last groups.
        """
        config = self.config
        of_ranks: list[list[MicroBatch]] = [[] for _ in range(self.num_ranks)]
        size = config.batch_size // config.num_minibatches
        self.groups += groups
        for start in range(0, len(groups), size):
            mini_batch = groups[start : start + size]
            self.waiting += mini_batch
            dealt = self._next_rounds(is_complete)
            for rank, own in enumerate(of_ranks):
                own += dealt[rank :: self.num_ranks]
            if is_complete:  # with several mini-batches, each of them ends with an update
                if config.num_minibatches == 1 or config.divides_by_batch:
                    mini_batch = self.groups
                update = num_trained(mini_batch, config)
                for own in of_ranks:  # the last round was whole: each has a row of the update
                    own[-1].update = update
        return of_ranks

    def _next_rounds(self, is_complete: bool) -> list[MicroBatch]:
        """Whole rounds of micro-batches; the groups of others wait for the next call.

        At the end of an update these groups are packed again, into smaller rows for all ranks, and
        dealt too.
        """
        config = self.config
        num_ranks = self.num_ranks
        found = micro_batches(self.waiting, config.max_tokens_per_gpu, config)
        num_dealt = len(found)
        if not is_complete:  # later groups may join the last row
            num_dealt -= 1
        num_dealt -= num_dealt % num_ranks
        # A round less, until the cut falls between two groups.
        while 0 < num_dealt < len(found):
            last = found[num_dealt - 1].packed
            if last.group[-1] != found[num_dealt].packed.group[0]:
                break
            num_dealt -= num_ranks
        left = found[num_dealt:]
        self.waiting = self.waiting[left[0].packed.group[0] :] if left else []
        self._num_tokens = sum(each.packed.num_tokens for each in left)
        if not is_complete or not left:
            return found[:num_dealt]

        num_smaller = math.ceil(len(left) / num_ranks) * num_ranks
        tokens_each = self._num_tokens / num_smaller
        # So that no completion is cut by the smaller bound.
        longest = longest_completion(self.waiting, config)
        max_tokens = min(max(math.ceil(tokens_each), longest), config.max_tokens_per_gpu)
        found[num_dealt:] = micro_batches(self.waiting, max_tokens, config)
        self.waiting = []

        smallest = min(found, key=lambda each: each.packed.num_tokens)
        filler = replace(smallest, mask=torch.zeros_like(smallest.mask))
        while len(found) % num_ranks != 0:
            found.append(filler)
        return found


def num_trained(groups: list[Group], config: TrainConfig) -> Update:
    """Completions, and tokens that train, over which an update's gradient is a mean."""
    lengths = []
    for group in groups:
        lengths += trained_lengths(group, config)
    return Update(len(lengths), sum(lengths))


def longest_completion(groups: list[Group], config: TrainConfig) -> int:
    """The most positions that a row of one completion, with its prompts, has."""
    longest = 0
    for group in groups:
        prompt_ids, completions = group.sequences
        for completion in completions:
            alone = num_packed_tokens([(prompt_ids, [completion])], config.share_prefix)
            longest = max(longest, alone)
    return longest
