"""The data that everything else passes on: prompts, completions, groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from config import UserError
from prefix_attention import as_tokens

# In place of the policy version that sampled a token:
FOREIGN = -1  # it was sampled by weights that this trainer never sent
ENVIRONMENT = -2  # an environment wrote it, so it does not train

CUT = ("length", "repetition")  # finish reasons of completions that did not end by themselves
NO_REWARDS = torch.empty(0, 0)


@dataclass(frozen=True)
class Prompt:
    """One problem: tokens for the server, content and columns for the rewards."""

    index: int  # row in the dataset; of several sets, numbered on from one to the next
    token_ids: list[int]  # tokenized once; the placeholder of an image stands expanded
    content: Any  # the dataset's `prompt` (string or chat messages), for rewards and people
    columns: dict[str, Any]  # the other columns that the rewards want
    # Its images as the dataset has them; once they are processed, as bytes or paths
    sources: list[Any] = field(default_factory=list)
    # What its chat template takes beside messages: `tools`, or the like of `enable_thinking`
    template: dict[str, Any] = field(default_factory=dict)
    images: Any = None  # its images, processed (`rollouts.images.Images`); None until it is sampled
    set: str = ""  # its data set's name, where there are several
    place: str = ""  # in its data set, for messages

    @property
    def where(self) -> str:
        """Its place in the data, for messages."""
        return self.place or f"dataset row {self.index}"


@dataclass(eq=False)
class Completion:
    """Tokens that continue a prompt, by a policy or an environment.

    Lists are taken as tensors; a ValueError tells of columns of several lengths. A rollout whose
    history was rewritten is a list of completions, its segments.
    """

    token_ids: Any  # [n] int64, with the end-of-sequence token, where one was sampled
    sampler_logprobs: Any  # [n] float32, nats, by the server: after temperature (and top-k/p)
    finish_reason: str  # `stop` (it ended by itself), or a reason of `CUT`
    weight_versions: Any  # [n] int64, the policy that sampled it, or ENVIRONMENT; an int is of all
    info: dict[str, Any] = field(default_factory=dict)  # an environment's columns for the rewards
    prompt_ids: Any = None  # [m] int64, what it was sampled for; None: the prompt of its group

    def __post_init__(self) -> None:
        if isinstance(self.weight_versions, int):
            self.weight_versions = [self.weight_versions] * len(self.token_ids)
        self.token_ids = as_tokens(self.token_ids)
        self.sampler_logprobs = torch.as_tensor(self.sampler_logprobs, dtype=torch.float32)
        self.weight_versions = as_tokens(self.weight_versions)
        if self.prompt_ids is not None:
            self.prompt_ids = as_tokens(self.prompt_ids)

        num_tokens = len(self.token_ids)
        if not 0 < num_tokens == len(self.sampler_logprobs) == len(self.weight_versions):
            raise ValueError(
                "a completion needs tokens, and as many sampler_logprobs and weight_versions"
            )

    def then(self, environment_ids: Sequence[int], reply: "Completion") -> "Completion":
        """Join this turn, the environment's answer and the next turn."""
        between = as_tokens(environment_ids)
        before_reply = torch.cat([self.token_ids, between])
        # None stands for the group's prompt, which is not known here: nothing can be compared.
        if self.prompt_ids is not None and reply.prompt_ids is not None:
            history = torch.cat([self.prompt_ids, before_reply])
            if not torch.equal(history, reply.prompt_ids):
                raise ValueError("a reply is joined to a turn that it was not sampled for")

        versions = torch.full_like(between, ENVIRONMENT)
        return replace(
            self,
            token_ids=torch.cat([before_reply, reply.token_ids]),
            sampler_logprobs=torch.cat(
                [self.sampler_logprobs, torch.zeros(len(between)), reply.sampler_logprobs]
            ),
            weight_versions=torch.cat([self.weight_versions, versions, reply.weight_versions]),
            finish_reason=reply.finish_reason,
            info=self.info | reply.info,
        )


@dataclass(frozen=True)
class TokenColumns:
    """One value a completion token, by completion, segment, token: [n]."""

    completion: Tensor  # int64, the number of its completion within the group
    sampler_logprobs: Tensor  # float32, nats
    weight_versions: Tensor  # int64, the policy version that sampled it, or ENVIRONMENT


@dataclass(eq=False, repr=False)
class Group:
    """One prompt and its completions, the unit from dataset to gradient.

    It is filled in on its way.
    """

    prompt: Prompt
    # Of each rollout the last segment, with the `info` of all
    completions: list[Completion] = field(default_factory=list)

    # Of each completion, from its scoring on:
    texts: list[str] = field(default_factory=list)  # decoded, for rewards and people
    rewards: Tensor = NO_REWARDS  # [completions, functions] float64, NaN for none
    reward: list[float] = field(default_factory=list)  # their weighted sum, NaN without any
    advantages: list[float] = field(default_factory=list)

    id: int = 0  # its place in the order of admission
    started_version: int = -1  # the policy version when its request was sent, -1 before
    finished_version: int = -1  # the policy version when its rewards were known, -1 before
    trained_version: int = -1  # the policy version that it trains, -1 before
    server: int = 0  # the number of the server that sampled it
    started_s: float = 0.0  # when its request was sent, on the monotonic clock
    sampled_s: float = 0.0
    scored_s: float = 0.0
    dropped: str = ""  # `zero_advantage` or `failed` where it does not train, and why
    why: str = ""
    ref_logprobs: Tensor | None = None  # [n] float32, nats, if a part of the run gives them

    # By `set_rollouts`; of each rollout:
    segments: Sequence[list[Completion]] = ()
    lengths: Sequence[int] = ()  # tokens of its segments
    num_sampled: Sequence[int] = ()  # of them, those that a policy sampled
    versions: Sequence[list[int]] = ()  # the policies that sampled them, ascending
    # Of the group:
    oldest_version: int = -1  # of a policy that sampled a token
    num_tokens: int = 0  # of all segments with their prompts, nothing shared
    sequences: Any = None  # for `pack`: the prompt, and of each rollout its pairs
    tokens: Any = None  # `TokenColumns`

    def __post_init__(self) -> None:
        if self.completions:
            self.set_rollouts(self.completions)

    def set_rollouts(self, rollouts: Sequence[Completion | Sequence[Completion]]) -> None:
        """Take the rollouts, each a completion or the list of its segments.

        The columns of their tokens are joined once, in the rollout's thread; all others read them.

        Raises:
            ValueError: a rollout has no segment.
        """
        self.completions = []
        self.segments = []
        self.num_tokens = 0
        group_prompt = as_tokens(self.prompt.token_ids)
        sequences = []
        versions = []
        for rollout in rollouts:
            segments = [rollout] if isinstance(rollout, Completion) else list(rollout)
            if not segments:
                raise ValueError("a rollout without a completion")
            info: dict[str, Any] = {}
            pairs = []
            for segment in segments:
                info |= segment.info
                prompt_ids = group_prompt if segment.prompt_ids is None else segment.prompt_ids
                pairs.append((prompt_ids, segment.token_ids))
                self.num_tokens += len(prompt_ids) + len(segment.token_ids)
            sequences.append(pairs)
            versions.append(torch.cat([segment.weight_versions for segment in segments]))
            self.segments.append(segments)
            self.completions.append(replace(segments[-1], info=info))

        sampled = [of_rollout[of_rollout != ENVIRONMENT] for of_rollout in versions]
        self.lengths = list(map(len, versions))
        self.num_sampled = list(map(len, sampled))
        self.versions = [of_rollout.unique().tolist() for of_rollout in sampled]
        every_version = chain.from_iterable(self.versions)
        self.oldest_version = min(every_version, default=self.started_version)
        self.sequences = (group_prompt, sequences)
        every_segment = chain.from_iterable(self.segments)
        self.tokens = TokenColumns(
            completion=torch.repeat_interleave(torch.tensor(self.lengths)),
            sampler_logprobs=torch.cat([segment.sampler_logprobs for segment in every_segment]),
            weight_versions=torch.cat(versions),
        )

    @property
    def valid_rewards(self) -> list[float]:
        """The rewards of the completions that have one."""
        return [reward for reward in self.reward if not math.isnan(reward)]


@dataclass
class Batch:
    """The groups that a step trained, those dropped meanwhile, and held-out ones."""

    groups: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    # Of the evaluation after it, by the name of their set
    held_out: dict[str, list[Group]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutFailed(UserError):
    """A group got no completions, and its servers are not to blame; the message says why."""


def version_spans(weight_versions: Tensor) -> list[tuple[int, ...]]:
    """The runs of tokens that one policy sampled: (version, start, end), of versions [n]."""
    versions, sizes = weight_versions.unique_consecutive(return_counts=True)
    ends = sizes.cumsum(0)
    runs = torch.stack([versions, ends - sizes, ends], dim=1)
    return [tuple(run) for run in runs[versions != ENVIRONMENT].tolist()]
