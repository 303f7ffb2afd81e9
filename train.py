"""GRPO (DeepSeekMath, arXiv:2402.03300) on plain torch.distributed, rollouts from vLLM servers.

    torchrun --nproc_per_node=N train.py [recipes/x.py] [--field value ...]

The file reads top to bottom: advantages, loss, the model, the batch, rollouts, the loop.
"""

import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import TrainConfig, UserError, describe, parse_args
from prefix_attention import PackedBatch, pack
from rollouts.data import (
    Prompt,
    fingerprint,
    joined_images,
    load_processor,
    load_prompts,
    placeholder_ids,
    tokenizer_of,
    with_images,
)
from rollouts.scoring import Scorer, check_rewards, reward_means
from rollouts.stream import Group, RolloutStream, epochs, sample_group, sampling_params
from training.checkpoints import Checkpoints, find_checkpoint, push_to_hub, read_state
from training.logs import RunLog, batch_metrics, batch_samples, locked
from training.model import (
    build_optimizer,
    build_policy,
    build_reference,
    check_positions,
    fits_in_memory,
    forward,
    full_tensor,
    load_model_config,
    published_weights,
    share_prefixes,
    sync_gradients,
)
from utils import (
    Stopped,
    broadcast_object,
    exits,
    in_threads,
    is_main,
    over_ranks,
    process_group,
    scatter_objects,
    stop_signals,
    timed,
)
from vllm_client import CONTROL_TIMEOUT_S, Server, ServerError, VLLMClient

LOSS_SUMS = ("kl", "clip_ratio/low", "clip_ratio/high")
MIN_SHARED = 0.05  # share of the batch's tokens that rows of shared prompts must save, or completions are padded rows

# --------------------------------------------------------------------------------------------------------------------
# Advantages and loss


def compute_advantages(rewards: Tensor, scale: str = "group") -> Tensor:
    """Group-relative advantages, (r - mean of the group) / (std + 1e-4).

    Args:
        rewards: [num_groups, num_generations], of a floating type; NaN where a completion has no valid reward.
        scale: `group` divides by the group's own standard deviation (unbiased), `batch` by that of all rewards,
            `none` by nothing (Dr. GRPO, arXiv:2503.20783).

    Returns:
        Same shape and type; 0 where the reward is NaN and in groups with a single valid reward.
    """
    valid = ~rewards.isnan()
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale == "none":
        return centred.nan_to_num(0.0)
    if scale == "batch":
        std = rewards[valid].std() if valid.sum() > 1 else rewards.new_zeros(())
    else:
        degrees = (valid.sum(dim=1, keepdim=True) - 1).clamp(min=1)
        std = (centred.nan_to_num(0.0).square().sum(dim=1, keepdim=True) / degrees).sqrt()
    return (centred / (std + 1e-4)).nan_to_num(0.0)


def completion_sums(values: Tensor, completion: Tensor) -> Tensor:
    """Each completion's sum of `values` [N], at each of its tokens: [N], of their dtype, differentiable.

    `completion` [N] int64 says which one a token belongs to; its numbers may be any.
    """
    numbers, segment = completion.unique(return_inverse=True)
    return values.new_zeros(len(numbers)).index_add(0, segment, values)[segment]


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    completion: Tensor,
    config: TrainConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The unnormalized policy loss of one micro-batch: a sum over its completion tokens.

    With ratio ρ = exp(logprobs - old_logprobs), or its geometric mean over the completion (GSPO, arXiv:2507.18071):
    -min(ρA, clip(ρ, 1-ε, 1+ε_high)·A), with ρ ≤ δ in the first term (two-sided clip, arXiv:2505.07291); for cispo
    (arXiv:2506.13585) -sg(clip(ρ))·A·logprobs. Plus β·k3, k3 = exp(ref - logprobs) - (ref - logprobs) - 1. For
    loss_type grpo each token's is divided by how many of its completion train. Divide the gradient of the sum over all
    micro-batches by `loss_normalizer`, once.

    Args:
        logprobs: [N], one per completion token, nats, under the policy; the gradient goes through them alone.
        old_logprobs: [N], nats: what the ratio is taken against.
        ref_logprobs: [N], nats, under the initial policy; may be None where config.beta is 0.
        advantages: [N].
        mask: [N], 1 on tokens that train, 0 elsewhere; any type.
        completion: [N] int64, which completion each token belongs to; a completion is never split over micro-batches.
        config: loss_type, importance_level, epsilon, epsilon_high, delta, beta.

    Returns:
        The loss sum, 0-d, and 0-d sums over tokens for the metrics: `clip_ratio/low`, `clip_ratio/high`, and `kl`
        (nats) where config.beta is above 0.
    """
    mask = mask.to(logprobs.dtype)
    log_ratio = (logprobs - old_logprobs).where(mask > 0, 0.0)  # where, not times: a masked infinity would give NaN
    if config.importance_level == "sequence":
        log_ratio = completion_sums(log_ratio, completion) / completion_sums(mask, completion).clamp(min=1)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.epsilon, 1 + config.clip_high)
    if config.loss_type == "cispo":
        per_token = -clipped.detach() * advantages * logprobs
    else:
        bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
        per_token = -torch.minimum(bounded * advantages, clipped * advantages)
    sums = {
        "clip_ratio/low": ((ratio < 1 - config.epsilon) & (advantages < 0)).to(mask.dtype) @ mask,
        "clip_ratio/high": ((ratio > 1 + config.clip_high) & (advantages > 0)).to(mask.dtype) @ mask,
    }
    if config.beta > 0:
        assert ref_logprobs is not None
        log_gap = (ref_logprobs - logprobs).where(mask > 0, 0.0)
        k3 = log_gap.exp() - log_gap - 1
        per_token = per_token + config.beta * k3
        sums["kl"] = k3.detach() @ mask
    per_token = per_token.where(mask > 0, 0.0)
    if config.loss_type == "grpo":
        per_token = per_token / completion_sums(mask, completion).clamp(min=1)
    return per_token.sum(), sums


def check_loss(config: TrainConfig) -> None:
    """Try the config's `loss_fn`, if it has one, on a completion of two tokens.

    Raises:
        UserError: it fails, or returns something else than a scalar with a gradient and a dictionary of sums.
    """
    if config.loss_fn is None:
        return
    assert callable(config.loss_fn)
    name = f"loss_fn {getattr(config.loss_fn, '__name__', config.loss_fn)}"
    logprobs = torch.full((2,), -1.0, requires_grad=True)
    before, ones = logprobs.detach(), torch.ones(2)
    try:
        ref = before if config.beta > 0 else None
        returned = config.loss_fn(logprobs, before, ref, ones, ones, torch.zeros(2, dtype=torch.long), config)
    except Exception as error:
        raise UserError(f"{name} raised {type(error).__name__}: {error}") from error
    match returned:
        case (Tensor(ndim=0, requires_grad=True) as loss, dict() as sums):
            if not loss.isfinite():
                raise UserError(f"{name} is {loss.item()} on two tokens of log-probability -1 and advantage 1")
            named = all(key in LOSS_SUMS or str(key).startswith("loss/") for key in sums)
            if named and all(isinstance(value, Tensor) and value.ndim == 0 for value in sums.values()):
                return
    raise UserError(
        f"{name} must return (loss, sums): a scalar tensor that depends on logprobs, and a dict of 0-d tensors, sums "
        f"over the tokens, with the names {', '.join(LOSS_SUMS)} or ones that begin with loss/"
    )


def off_policy_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, config: TrainConfig) -> Tensor:
    """What each token's advantage is multiplied by, as another policy sampled it than the ratio is taken against.

    w = exp(old_logprobs - sampler_logprobs): min(w, cap) for `truncate` (TIS), w within [floor, cap] and 0 outside for
    `mask` (IcePop, arXiv:2510.18855); 1 where the config corrects nothing. All tensors and the result are [N],
    log-probs in nats, the mask 1 on tokens that train.
    """
    if config.old_logprobs == "sampler" or config.off_policy_correction == "none":
        return torch.ones_like(old_logprobs)
    weights = (old_logprobs - sampler_logprobs).where(mask > 0, 0.0).exp()
    if config.off_policy_correction == "truncate":
        return weights.clamp(max=config.correction_cap)
    return weights.where((weights >= config.correction_floor) & (weights <= config.correction_cap), 0.0)


def sampling_sums(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """How far trainer and server are apart on the sampled tokens: sums over tokens, and the largest |difference|.

    All arguments are [N], log-probs in nats, the mask 1 on tokens that train; all results are 0-d. `gap` sums the
    |difference|, `sampling_kl` estimates KL(server || trainer) by k3; `weight` and `square` give the effective
    sample size of w as (Σw)² / NΣw².
    """
    gap = (old_logprobs - sampler_logprobs).where(mask > 0, 0.0)
    weight = gap.exp() * mask
    sums = {"gap": gap.abs().sum(), "sampling_kl": (gap.expm1() - gap).sum(), "weight": weight.sum()}
    return sums | {"square": weight.square().sum()}, gap.abs().max()


def loss_normalizer(lengths: list[int], config: TrainConfig) -> float:
    """What the summed loss of completions with `lengths` unmasked tokens is divided by; at least 1.

    grpo: the completions. dr_grpo: completions x max_completion_len. bnpo, dapo, cispo: the tokens.
    """
    if config.loss_type == "grpo":
        return max(len(lengths), 1)
    if config.loss_type == "dr_grpo":
        return max(len(lengths), 1) * config.max_completion_len
    return max(sum(lengths), 1)


# --------------------------------------------------------------------------------------------------------------------
# The batch


@dataclass(frozen=True)
class MicroBatch:
    """One forward and what its completion tokens need for the loss.

    Attributes:
        row: the tokens, N of them of completions.
        advantages: [N] float32.
        mask: [N] float32, 1 on tokens that train, 0 elsewhere.
        sampler_logprobs: [N] float32, the server's, nats.
        images: those of the row's prompts, from `joined_images`.
        is_last: it is the rank's last one before a `Step`: gradients are then summed over ranks.
    """

    row: PackedBatch
    advantages: Tensor
    mask: Tensor
    sampler_logprobs: Tensor
    images: dict[str, Tensor] = field(default_factory=dict)
    is_last: bool = False

    def to(self, device: torch.device) -> Self:
        """The same micro-batch on `device`."""
        moved = {n: getattr(self, n).to(device) for n in ("row", "advantages", "mask", "sampler_logprobs")}
        return replace(self, **moved, images={name: value.to(device) for name, value in self.images.items()})


@dataclass(frozen=True)
class Step:
    """The end of a mini-batch: what its summed gradient is divided by."""

    normalizer: float


class Resync:
    """Rank 0's call to send the policy, as it is, to servers that answer again."""


class Patience:
    """Rank 0's word that it still waits, so that the others' collective does not run into its timeout."""


def deal(groups: Iterable[Group], num_ranks: int, config: TrainConfig) -> Iterator[list[MicroBatch] | list[Step]]:
    """Scored groups as rounds of micro-batches, one for each rank, as soon as enough groups have come; then a `Step`.

    Every rank runs as many backward passes as the others, as FSDP2 and DDP need: where rows are missing, it gets a
    masked copy of the smallest one. In a round the largest row goes to the rank that has had the fewest tokens.

    Args:
        groups: the batch, with advantages; num_minibatches equal parts of it end with a `Step` each.
        num_ranks: items of a round.
        config: batch_size, num_minibatches, max_tokens_per_gpu, share_prefix, loss_type, max_completion_len,
            mask_truncated_completions.
    """
    parts: Iterable[Iterable[Group]] = [groups]
    whole: float | None = None  # one normalizer for all parts, where every token of the batch weighs the same
    if config.num_minibatches > 1:
        groups = list(groups)
        size = config.batch_size // config.num_minibatches
        parts = [groups[start : start + size] for start in range(0, len(groups), size)]
        if config.loss_type in ("dapo", "cispo"):
            whole = loss_normalizer(trained_lengths(groups, config), config) / config.num_minibatches
    loads = [0] * num_ranks
    for part in parts:
        lengths: list[int] = []
        rows: list[MicroBatch] = []
        waiting: list[Group] = []
        for group in part:
            lengths += trained_lengths([group], config)
            if waiting and row_layout([*waiting, group], config)[1] > config.max_tokens_per_gpu:
                rows += micro_batches(waiting, config.max_tokens_per_gpu, config)
                waiting = []
            waiting.append(group)
            while len(rows) >= num_ranks:
                yield _round(rows[:num_ranks], loads, is_last=False)
                rows = rows[num_ranks:]
        rows += micro_batches(waiting, _tail_tokens(waiting, num_ranks - len(rows), config), config)
        while rows:
            yield _round(rows[:num_ranks], loads, is_last=len(rows) <= num_ranks)
            rows = rows[num_ranks:]
        yield [Step(whole or loss_normalizer(lengths, config))] * num_ranks


def _round(rows: list[MicroBatch], loads: list[int], is_last: bool) -> list[MicroBatch]:
    """One row for each rank, and the tokens counted into `loads`."""
    smallest = min(rows, key=lambda micro: micro.row.num_tokens)
    filler = replace(smallest, mask=torch.zeros_like(smallest.mask))
    rows = [replace(micro, is_last=is_last) for micro in [*rows, *[filler] * (len(loads) - len(rows))]]
    rows.sort(key=lambda micro: -micro.row.num_tokens)
    ranks = sorted(range(len(loads)), key=lambda rank: loads[rank])
    dealt = dict(zip(ranks, rows, strict=True))
    for rank, micro in dealt.items():
        loads[rank] += micro.row.num_tokens
    return [dealt[rank] for rank in range(len(loads))]


def _tail_tokens(groups: list[Group], num_ranks: int, config: TrainConfig) -> int:
    """A budget at which the last groups fill a row on every rank that has none yet."""
    longest = max(len(group.prompt.token_ids) + len(c.token_ids) for group in groups for c in group.completions)
    even = math.ceil(row_layout(groups, config)[1] / num_ranks)
    return min(max(even, longest), config.max_tokens_per_gpu)


def micro_batches(groups: list[Group], max_tokens: int, config: TrainConfig) -> list[MicroBatch]:
    """Groups packed into rows of at most `max_tokens`, with what their tokens need for the loss."""
    completions = [c for group in groups for c in group.completions]
    sizes = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.long)
    advantages = torch.tensor([a for group in groups for a in group.advantages])
    trained = [trains for tokens in trained_tokens(groups, config) for trains in tokens]
    advantages = advantages.float().repeat_interleave(sizes)
    mask = torch.tensor(trained, dtype=torch.float32)
    sampler_logprobs = torch.tensor([x for c in completions for x in c.sampler_logprobs])
    pairs = [(group.prompt.token_ids, [c.token_ids for c in group.completions]) for group in groups]
    rows = pack(pairs, max_tokens, share_prefix=row_layout(groups, config)[0])
    return [
        MicroBatch(
            row,
            advantages[row.index],
            mask[row.index],
            sampler_logprobs[row.index],
            joined_images([groups[number].prompt for number in row.prompts]),
        )
        for row in rows
    ]


def row_layout(groups: list[Group], config: TrainConfig) -> tuple[bool, int]:
    """Whether a row of these groups shares their prompts, and its tokens (estimated, where rows are padded)."""
    prompts = [len(group.prompt.token_ids) for group in groups]
    lengths = [[len(c.token_ids) for c in group.completions] for group in groups]
    shared = sum(prompt + sum(of_group) for prompt, of_group in zip(prompts, lengths, strict=True))
    padded = sum(len(of_group) * (prompt + max(of_group)) for prompt, of_group in zip(prompts, lengths, strict=True))
    if config.share_prefix and shared <= (1 - MIN_SHARED) * padded:  # attention in smaller calls has its price
        return True, shared
    return False, padded


def trained_tokens(groups: list[Group], config: TrainConfig) -> list[list[bool]]:
    """Which tokens of each completion train: those sampled; none without a reward, or where truncation masks it."""
    is_masked = config.mask_truncated_completions
    return [
        c.sampled if has_reward and not (is_masked and c.truncated) else [False] * len(c.token_ids)
        for group in groups
        for c, has_reward in zip(group.completions, group.have_reward, strict=True)
    ]


def trained_lengths(groups: list[Group], config: TrainConfig) -> list[int]:
    """Tokens of each completion that train."""
    return [sum(tokens) for tokens in trained_tokens(groups, config)]


# --------------------------------------------------------------------------------------------------------------------
# Rollouts

DISAGREES = (
    "and the trainer differ by {:.3g} nats a token after the weight sync: it does not compute this model as the "
    "trainer does, or takes no new weights for a part of it (vLLM: gpt-oss's experts); compare its --dtype (and, for "
    "images, its --mm-processor-kwargs with processor_kwargs), or raise max_logprob_mismatch"
)


class Rollouts:
    """Where batches come from and weights go to. The servers and the data live on rank 0; the methods are collective.

    Everything is checked when it is made, before a model is loaded.

    Raises:
        UserError: bad data, or prompts other than those of the run that this one goes on with.
        ServerError: no server, or one that serves another model.
    """

    def __init__(self, config: TrainConfig, device: torch.device, resumed: dict[str, Any] | None = None):
        self.config, self.device = config, device
        self.stop = threading.Event()  # set, it ends `batch` and `evaluate`
        self.failure: Exception | None = None  # what ended `batch`, on rank 0
        self.samples: list[dict[str, Any]] = []  # of the last batch, as are the groups dropped before it
        self.dropped: list[dict[str, Any]] = []
        self.processor: Any = None  # of the model; rank 0's
        self.example: Prompt | None  # the shortest prompt with images, processed
        self.policy: Any = None  # that was published last, and its version
        self.version = -1
        self.told_s = time.monotonic()  # when the other ranks last heard that rank 0 waits
        self.num_steps, self.example = broadcast_object(self._open(device, resumed) if is_main() else None)

    def _open(self, device: torch.device, resumed: dict[str, Any] | None) -> tuple[int, Prompt | None]:
        """Check and load everything rank 0 needs; returns the number of steps, and an example of its images.

        Raises:
            UserError: bad data, other prompts than the resumed run's, servers as `check_positions`, or
                `freeze_vision_tower` without an image.
            ServerError: no server, or one that serves another model.
        """
        config = self.config
        print(describe(config))
        self.processor = load_processor(config)
        model_config, _ = load_model_config(config)
        self.client = VLLMClient(config, tokenizer_of(self.processor), placeholder_ids(model_config))
        longest = self.client.wait_until_ready()
        check_positions(model_config, longest)
        max_prompt_len = min(longest, config.max_tokens_per_gpu) - config.max_completion_len
        self.prompts = self._load(config.dataset_id, config.dataset_split, max_prompt_len)
        held_out = config.eval_dataset_id
        self.held_out = self._load(held_out, config.eval_dataset_split, max_prompt_len) if held_out else []
        self.fingerprint = fingerprint(self.prompts)
        if resumed and resumed["prompts"] != self.fingerprint:
            raise UserError(
                "resume_from_checkpoint: that run had other prompts: give this one the same dataset, and the servers "
                "the same --max-model-len (or a max_tokens_per_gpu that holds as long ones)"
            )
        example = self._example()
        self.client.connect(device)
        self.scorer = Scorer(tokenizer_of(self.processor), config)
        if not resumed:
            self.scorer.failed_path.unlink(missing_ok=True)
        before = resumed or {"step": 0, "num_tokens": 0, "ended": ()}
        num_steps = config.max_steps or math.ceil(config.num_epochs * len(self.prompts) / config.batch_size)
        if before["step"] >= num_steps:
            print(f"all {num_steps} steps are done: raise max_steps or num_epochs to go on", flush=True)
        self.num_tokens, self.ended = before["num_tokens"], set(before["ended"])
        order = enumerate(epochs(len(self.prompts), config.seed))
        groups = (Group(self.prompts[index], id=number) for number, index in order if number not in self.ended)
        num_trained = before["step"] * config.batch_size
        self.num_threads = len(config.vllm_urls) * config.max_concurrent_requests + config.reward_workers
        self.stream = RolloutStream(
            groups,
            lambda group: sample_group(group, self.client, self.processor, sampling_params(config), config),
            self.scorer.score,
            self.num_threads,
            num_steps,
            config,
            num_trained,
        )
        self.reported_s = 0.0  # when the metrics' clocks were last read
        return num_steps, example

    def _load(self, source: str | Callable[[], Any], split: str, max_prompt_len: int) -> list[Prompt]:
        try:
            prompts = load_prompts(source, split, self.processor, max_prompt_len, self.config)
            check_rewards(prompts, self.config)
        except UserError as error:
            if source is self.config.dataset_id:
                raise
            raise UserError(f"eval_dataset_id: {error}") from error
        return prompts

    def _example(self) -> Prompt | None:
        """The shortest of the prompts with images, processed; None without one.

        Raises:
            UserError: `freeze_vision_tower` without an image.
        """
        with_sources = [prompt for prompt in self.prompts if prompt.sources]
        if hasattr(self.processor, "image_processor"):
            print(f"{len(with_sources)} of {len(self.prompts)} prompts have images", flush=True)
        if with_sources:
            shortest = min(with_sources, key=lambda p: len(p.token_ids))
            return replace(with_images(shortest, self.processor, self.config), sources=[])  # no rank needs the files
        if self.config.freeze_vision_tower:
            raise UserError("freeze_vision_tower has no effect: no prompt has an image")
        return None

    def batch(self, metrics: dict[str, float]) -> Iterator[MicroBatch | Step]:
        """This rank's share of the batch that trains the published policy, each part as soon as it is there.

        Collective: every rank iterates to the end. `metrics` is then filled in, on rank 0.
        """
        yield from self._lead(self._rounds(metrics) if is_main() else None)

    def _lead(self, rounds: Iterator[Any] | None) -> Iterator[Any]:
        """This rank's item of each of rank 0's rounds, and between them what rank 0 calls for. Collective.

        Raises:
            Stopped: on every rank, when rank 0 was told to end, or failed: `failure` says how.
        """
        while (item := scatter_objects(self._next_round(rounds) if rounds else None)) is not None:
            if isinstance(item, Stopped):
                raise item
            if isinstance(item, Resync):
                self._resync()
            elif not isinstance(item, Patience):
                yield item

    def _next_round(self, rounds: Iterator[Any]) -> Any:
        nobody = [None] * dist.get_world_size()
        try:
            if self.failure:
                raise self.failure
            return next(rounds, nobody)
        except (UserError, ServerError, Stopped) as error:  # all ranks hear of it, and save what there is
            self.failure = None if isinstance(error, Stopped) else error
            return [Stopped()] * dist.get_world_size()

    def _rounds(self, metrics: dict[str, float]) -> Iterator[list[MicroBatch] | list[Step]]:
        """What `deal` makes of the stream's groups, and what is known of them."""
        taken = self.stream.take(self.version, self._meanwhile)
        yield from deal(self._advantages(taken), dist.get_world_size(), self.config)
        about, groups, dropped = self.stream.report()
        self.num_tokens += sum(group.num_tokens for group in groups)
        if all(math.isnan(reward) for group in groups for reward in group.reward):
            self.failure = UserError("no reward function gave any completion of this batch a number: nothing to learn")
        self.dropped = [{"group": g.id, "row": g.prompt.index, "reason": reason} for g, reason in dropped]
        self.ended.update([*(group.id for group in groups), *(group.id for group, _ in dropped)])
        now = time.monotonic()
        elapsed, self.reported_s = now - self.reported_s, now
        metrics |= batch_metrics(groups, self.version, self.config) | about
        metrics |= {
            "num_tokens": self.num_tokens,
            "rewards_failed": float(self.scorer.num_failed),
            "idle/trainer": metrics["time/wait_s"] / elapsed,
            "idle/servers": self.client.idle_seconds() / elapsed,
            "tokens_per_s/sampled": metrics.pop("num_sampled_tokens") / elapsed,
            "tokens_per_s/trained": sum(group.num_tokens for group in groups) / elapsed,
        }
        self.samples = batch_samples(groups, self.config)

    def _meanwhile(self) -> None:
        """What rank 0 does while it waits, and the others for it: end, give a server the weights again, or say so.

        Raises:
            Stopped: the run was told to end.
        """
        if self.stop.is_set():
            raise Stopped
        if self.client.returned:
            scatter_objects([Resync()] * dist.get_world_size())
            self._resync()
        elif time.monotonic() > self.told_s + self.config.collective_timeout / 4:
            scatter_objects([Patience()] * dist.get_world_size())
            self.told_s = time.monotonic()

    def _resync(self) -> None:
        """Give the policy, as it is, to servers that answer again. Collective."""
        self._admit(self._send(only_returned=True))

    def _advantages(self, groups: Iterable[Group]) -> Iterator[Group]:
        """The same groups with their advantages; all of them at once where the scale is the batch's."""
        scale = self.config.scale_rewards
        for part in [list(groups)] if scale == "batch" else ([group] for group in groups):
            advantages = compute_advantages(torch.tensor([group.reward for group in part], dtype=torch.float64), scale)
            for group, values in zip(part, advantages.tolist(), strict=True):
                group.advantages = values
                yield group

    def publish(self, policy: nn.Module, version: int) -> None:
        """Send the policy to every server as `version`, which lets the stream go on.

        Collective: every rank takes part in the gathers.
        """
        self.policy, self.version = policy, version
        with nullcontext() if self.config.inflight_updates or not is_main() else self.client.drained(self.stop):
            returned = self._send()
            if is_main():
                self.stream.open(version)
        self._admit(returned)

    def _send(self, only_returned: bool = False) -> list[Server]:
        """Stream the policy to the servers; those that were lost and have it now, on rank 0. Collective."""
        weights = published_weights(self.policy)
        if is_main():
            return self.client.update_weights(weights, self.version, only_returned)
        deque(weights, maxlen=0)
        return []

    def _admit(self, servers: list[Server]) -> None:
        """Let those of rank 0's servers serve that compute what the policy does. Collective."""
        for server, reason in zip(servers, self._refusals(servers), strict=False):  # none but on rank 0
            if reason:
                self.client.keep_out(server, reason)
            else:
                self.client.admit(server)

    def _refusals(self, servers: list[Server]) -> list[str | None]:
        """How rank 0's servers and the policy disagree on a probe, None where they do not (law 6). Collective."""
        reasons: list[str | None] = []
        self.policy.eval()  # LoRA's dropout would differ from the server, and move the random state of the step
        for probe in broadcast_object([self._probe(server) for server in servers] if is_main() else None):
            if isinstance(probe, str):
                reasons.append(probe)
                continue
            moved = probe.to(self.device)
            with torch.no_grad():
                logprobs = forward(self.policy, moved.row, moved.images, self.config)
            mismatch = (logprobs.cpu() - probe.sampler_logprobs).abs().mean().item()
            is_same = mismatch <= self.config.max_logprob_mismatch
            reasons.append(None if is_same else DISAGREES.format(mismatch))
        self.policy.train()
        return reasons

    def _probe(self, server: Server) -> MicroBatch | str:
        """A short completion to compare log-probs on, with an image if the run has one; or why there is none."""
        config, prompt = self.config, self.example or self.prompts[0]
        sampling = {"n": 1, "max_tokens": min(16, config.max_completion_len), "temperature": config.temperature}
        try:
            reply = server.generate(
                prompt.token_ids, sampling, images=prompt.images, timeout_s=CONTROL_TIMEOUT_S, retries=0
            )
        except ServerError as error:
            return str(error)
        probe = Group(prompt, reply, advantages=[0.0])
        (micro,) = micro_batches([probe], config.max_tokens_per_gpu, config)
        return micro if probe.oldest_version == self.version else "answers with other weights than it was sent"

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on after the last whole step. Rank 0's counts."""
        if not is_main():
            return {}
        return {"num_tokens": self.num_tokens, "ended": sorted(self.ended), "prompts": self.fingerprint}

    def publish_first(self, policy: nn.Module, version: int = 0) -> None:
        """The first sync, and the proof that it took: server and trainer agree on a probe's log-probs (law 6).

        The servers' weights are zeroed before it, so that a weight that does not arrive shows. Collective.

        Raises:
            ServerError: the mean |difference| exceeds `max_logprob_mismatch`.
        """
        self.policy, self.version = policy, version
        if is_main():
            self.client.clear_weights()
        self._send()
        reasons = self._refusals(self.client.servers if is_main() else [])
        for url, reason in zip(self.config.vllm_urls, reasons, strict=True):
            if reason:
                raise ServerError(f"{url} {reason}")
        if is_main():
            self._start_clocks()
            self.stream.open(version)  # nothing is sampled before

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy held-out rewards where they are due: `eval/reward`, and `eval/accuracy` where all are 0 or 1.

        Also `eval/rewards/<function>`. Collective. Empty on ranks other than 0.
        """
        config = self.config
        values: dict[str, float] = {}
        if config.eval_dataset_id and (
            step in (0, self.num_steps) or (config.eval_steps and step % config.eval_steps == 0)
        ):
            with suppress(Stopped):  # what ended it ends the next batch, too
                deque(self._lead(self._evaluation(values) if is_main() else None), maxlen=0)
        return values

    def _evaluation(self, values: dict[str, float]) -> Iterator[None]:
        """Fill in `values`; nothing to iterate over."""
        greedy = {**sampling_params(self.config), "n": 1, "temperature": 0.0}

        def answer(prompt: Prompt) -> Group:
            group = Group(prompt)
            sample_group(group, self.client, self.processor, greedy, self.config)
            self.scorer.score(group)
            return group

        with timed("time/eval_s", values):
            groups = in_threads(answer, self.held_out, self.num_threads, self._meanwhile)
        rewards = torch.tensor([group.reward for group in groups])
        values["eval/reward"] = rewards.nanmean().item()
        values |= {f"eval/{name}": value for name, value in reward_means(groups, self.config).items()}
        if {0.0, 1.0} >= set(rewards[~rewards.isnan()].tolist()) > set():
            values["eval/accuracy"] = values["eval/reward"]
        self._start_clocks()
        yield from ()

    def _start_clocks(self) -> None:
        """Of the metrics' rates, which leave out the time before."""
        self.client.idle_seconds()
        self.reported_s = time.monotonic()

    def close(self) -> None:
        """Leave the servers."""
        if is_main():
            self.stream.close()
            self.scorer.close()
            self.client.close()


# --------------------------------------------------------------------------------------------------------------------
# The loop


def optimizer_step(policy: nn.Module, optimizer: Any, scheduler: Any, normalizer: float, config: TrainConfig) -> float:
    """Normalize the summed gradients, clip, step; returns the gradient norm before clipping. Collective under FSDP2.

    A gradient that is not finite, which is that of a loss that is not, changes no weight; the schedule goes on.
    """
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    torch._foreach_div_(gradients, normalizer)
    norm = full_tensor(nn.utils.clip_grad_norm_(policy.parameters(), config.grad_norm or math.inf)).item()
    if math.isfinite(norm):
        optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def train_batch(
    policy: nn.Module,
    reference: Callable[[PackedBatch, dict[str, Tensor]], Tensor] | None,
    optimizer: Any,
    scheduler: Any,
    batch: Iterable[MicroBatch | Step],
    config: TrainConfig,
    device: torch.device,
) -> dict[str, float]:
    """All optimizer steps on one batch; returns its metrics. Collective: every rank calls it with its share.

    A batch that is used once trains as it arrives; for several updates it is collected first, as the log-probs before
    the first of them are needed.
    """
    loss_fn: Any = config.loss_fn or grpo_loss
    totals: dict[str, Any] = defaultdict(float)
    max_gap = torch.zeros((), device=device)
    learning_rate = optimizer.param_groups[0]["lr"]
    num_updates = config.num_iterations * config.num_minibatches
    norms = []
    old_logprobs: dict[int, Tensor] = {}  # of the trainer, where its own forward does not give them
    if num_updates > 1:
        batch = list(batch)
        rows = [item for item in batch if isinstance(item, MicroBatch) and config.old_logprobs == "trainer"]
        for micro in rows:
            with torch.no_grad(), fits_in_memory(micro.row, config):
                moved = micro.to(device)
                old_logprobs[id(micro)] = forward(policy, moved.row, moved.images, config)
    for _ in range(config.num_iterations):
        loss_sum = torch.zeros((), device=device)
        for item in batch:
            if isinstance(item, Step):
                norms.append(optimizer_step(policy, optimizer, scheduler, item.normalizer, config))
                totals["loss"] += loss_sum / item.normalizer
                loss_sum = torch.zeros((), device=device)
                continue
            micro = item.to(device)
            sync_gradients(policy, micro.is_last)
            with fits_in_memory(micro.row, config):
                logprobs, entropy = forward(policy, micro.row, micro.images, config, return_entropy=True)
                before = old_logprobs.get(id(item), logprobs.detach())
                old = micro.sampler_logprobs if config.old_logprobs == "sampler" else before
                advantages = micro.advantages * off_policy_weights(old, micro.sampler_logprobs, micro.mask, config)
                ref = reference(micro.row, micro.images) if reference else None
                loss, sums = loss_fn(logprobs, old, ref, advantages, micro.mask, micro.row.completion, config)
                loss.backward()
            loss_sum += loss.detach()
            apart, gap = sampling_sums(before, micro.sampler_logprobs, micro.mask)
            max_gap = torch.maximum(max_gap, gap)
            sums |= apart | {"tokens": micro.mask.sum(), "entropy": entropy @ micro.mask.to(entropy.dtype)}
            for name, value in sums.items():
                totals[name] += value.detach()
    total = over_ranks(totals) | over_ranks({"max_gap": max_gap}, dist.ReduceOp.MAX)
    tokens = max(total.pop("tokens"), 1)
    return {
        "loss": total.pop("loss") / num_updates,
        "grad_norm": sum(norms) / len(norms),
        "skipped_steps": float(sum(not math.isfinite(norm) for norm in norms)),
        "learning_rate": learning_rate,
        "sampling/sampling_logp_difference/mean": total.pop("gap") / tokens,
        "sampling/sampling_logp_difference/max": total.pop("max_gap"),
        "sampling/kl": total.pop("sampling_kl") / tokens,
        "sampling/effective_sample_size": total.pop("weight") ** 2 / max(tokens * total.pop("square"), 1e-30),
        **{name: value / tokens for name, value in total.items()},
    }


def main(config: TrainConfig) -> None:
    """Train. Under torchrun every rank calls it; without torchrun the world is this process.

    Raises:
        UserError: what the user gave is wrong, or ended the run, which then has saved its last whole step.
        ServerError: as that, of the servers.
    """
    check_loss(config)
    checkpoint = find_checkpoint(config)
    resumed = read_state(checkpoint) if checkpoint else None
    with (
        process_group(config.collective_timeout) as device,
        locked(Path(config.output_dir)),
        closing(Rollouts(config, device, resumed)) as rollouts,
        stop_signals(rollouts.stop),
    ):
        torch.manual_seed(config.seed)
        policy = build_policy(config, device, rollouts.example, checkpoint)
        config = rollouts.config = share_prefixes(policy, config, rollouts.example)
        reference = build_reference(policy, config, device, rollouts.example)
        updates_per_batch = config.num_iterations * config.num_minibatches
        optimizer, scheduler = build_optimizer(policy, rollouts.num_steps * updates_per_batch, config)
        checkpoints = Checkpoints(config, policy, optimizer, scheduler, rollouts.processor)
        step, num_skipped = checkpoints.resume(checkpoint), 0
        log = RunLog(config, rollouts.num_steps, resumed)
        with closing(log), suppress(Stopped):
            rollouts.publish_first(policy, step)
            if step == 0:
                log.step(0, rollouts.evaluate(0))
            while step < rollouts.num_steps and num_skipped < config.max_skipped_steps:
                torch.manual_seed(hash((config.seed, step, dist.get_rank())))  # of dropout: a resumed run has the same
                metrics: dict[str, float] = {"policy_version": step}
                with timed("time/step_s", metrics):
                    batch = rollouts.batch(metrics)
                    with timed("time/train_s", metrics):
                        metrics |= train_batch(policy, reference, optimizer, scheduler, batch, config, device)
                    metrics["time/train_s"] -= metrics.get("time/wait_s", 0.0)
                    step += 1
                    with timed("time/sync_s", metrics):
                        rollouts.publish(policy, step)
                num_skipped = num_skipped + 1 if metrics["skipped_steps"] == updates_per_batch else 0
                log.step(step, metrics | rollouts.evaluate(step), rollouts.samples, rollouts.dropped)
                if config.save_steps and step % config.save_steps == 0:
                    checkpoints.save(step, rollouts.state() | log.state())
        checkpoints.finish(step, rollouts.state() | log.state())
        if is_main() and rollouts.failure:
            raise rollouts.failure
        if is_main() and num_skipped >= config.max_skipped_steps:
            cure = "look at loss_fn" if config.loss_fn else "lower learning_rate"
            raise UserError(f"{num_skipped} steps in a row had no finite gradient: {cure}")
        if config.hub_repo_id and step == rollouts.num_steps and is_main():
            push_to_hub(Path(config.output_dir) / f"checkpoint-{step}", config.hub_repo_id, config.hub_private)


if __name__ == "__main__":
    with exits(UserError, ServerError):
        main(parse_args(sys.argv[1:]))
