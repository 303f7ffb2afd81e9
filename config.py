"""A run's configuration: a frozen dataclass, its validation and its command line.

    torchrun --nproc_per_node=N train.py [recipe.py] [--field value ...]

A recipe is a Python file that defines `config = TrainConfig(...)` with only what differs.
`--help` explains all fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ImportString,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
)
from pydantic.dataclasses import dataclass

HERE = Path(__file__).resolve().parent
# In place of a field of TRL, verl or an earlier version, or of a value.
_HINTS: dict[str, str] = {}
with suppress(OSError):  # a copy without its documents
    _HINTS = json.loads((HERE / "docs" / "elsewhere.json").read_text())


class UserError(ValueError):
    """A user's mistake; the one-line message names the mistake and its cure."""


def _checked(values: dict[str, Any], **how: Any) -> Any:
    """The config of these values; `how` is for pydantic.

    Raises:
        UserError: it names all unknown fields, or else the first value that is wrong.
    """
    unknown = []
    for name in sorted(values.keys() - DEFAULTS.keys()):
        (nearest,) = difflib.get_close_matches(name, DEFAULTS, n=1, cutoff=0)
        hint = _HINTS.get(
            name.rpartition(".")[2],  # verl's names have dots
            f"did you mean {nearest}? --help lists them all",
        )
        unknown.append(f"unknown field {name}: {hint}")
    if unknown:
        raise UserError("; ".join(unknown))

    try:
        config = object.__new__(TrainConfig)
        return _VALIDATOR.validate_python(values, self_instance=config, **how)
    except ValidationError as error:
        first = error.errors()[0]
        # An error of `__post_init__`, or of a module that a dotted path names, stays as it is.
        if first["type"] == "value_error":
            raise first["ctx"]["error"] from None

        name = str(first["loc"][0])
        value = values.get(name)
        hint = _HINTS.get(f"{name}={value}", "--help explains it")
        raise UserError(f"{name}={value!r}: {first['msg']}; {hint}") from None


class _OneLineErrors(type):
    """Lets `TrainConfig(...)` raise `UserError` in place of pydantic's errors."""

    def __call__(cls, **values: Any) -> Any:
        return _checked(values)


def _in_recipe(path: Any, info: ValidationInfo) -> Any:
    """A function of the recipe by its name; any other value as it is.

    `.f` is `f`: there is no relative import.
    """
    if not isinstance(path, str):
        return path
    path = path.lstrip(".")
    return getattr(info.context, path, path)


# The types of the fields, which `--help` calls by these names.
NotEmpty = Field(min_length=1)
# Imports a str, but for a name that the recipe has.
Function = Annotated[Callable[..., Any] | str, ImportString, BeforeValidator(_in_recipe)]
# A path, in which ~ is the user's home, or a name on the hub.
PathOrName = Annotated[str, AfterValidator(os.path.expanduser)]
Source = PathOrName | Callable[[], Any]
Sets = Annotated[dict[Annotated[str, NotEmpty], Source], NotEmpty]  # data sets by name

# vLLM's parameters that are fields, and those that change what is told of tokens.
_OWN_PARAMETERS = {
    "n", "max_tokens", "temperature", "top_k", "stop",
    "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start",
    "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "stream_interval", "skip_clone", "trace_decode_token_ids", "watermarking",
}  # fmt: skip
# Fields that nothing reads: while another has a value (`a=b`), or while it is set (`a`).
_UNREAD = {
    "use_peft=False": "lora_rank lora_alpha lora_dropout lora_target_modules base_4bit",
    "use_fsdp=False": "fsdp_bf16 fsdp_offload fsdp_shard_size",
    "push_to_hub=False": "hub_repo_id hub_private",
    "eval_dataset_id=None": "eval_steps eval_generations eval_temperature accuracy_func",
    "eval_temperature=0.0": "eval_generations",  # all of them would be the same
    "logged_groups=0": "log_completions_steps",
    "use_wandb=False and use_trackio=False": "wandb_project log_completions_steps",
    "max_staleness=0": "inflight_updates",
    "old_logprobs=sampler": "off_policy_correction correction_cap",
    "off_policy_correction=none": "correction_cap correction_floor",
    "off_policy_correction=truncate": "correction_floor",
    "off_policy_correction=sequence": "correction_floor",
    "off_policy_correction=geometric": "correction_floor",
    "beta=0.0": "kl_gradient",
    "beta=0.0 and loss_fn=None": "reference_id reference_decay",  # a loss_fn may use it
    "reference_decay=None": "reference_steps",
    "loss_type=cispo": "delta",
    "max_steps": "num_epochs",
    "advantage_fn": "scale_rewards",
}
# Settings under which vLLM no longer draws tokens from the policy itself.
_BENDING = {
    "top_k", "top_p", "min_p", "structured_outputs", "bad_words", "allowed_token_ids", "min_tokens",
    "logit_bias", "thinking_token_budget", "extra_args", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class TrainConfig(metaclass=_OneLineErrors):
    """Every setting of a run.

    Values are checked when it is made; `UserError` names the field and what to do.
    """

    # -- model -------------------------------------------------------------------------------------
    model_id: PathOrName
    """Hub name or path of a causal language model, or of a vision-language model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights and the optimizer state;
    bfloat16 weights lose updates below 1/256 of a weight."""
    bf16: bool | None = None
    """Run the forward under bfloat16 autocast, weights stay in `dtype`;
    None: on CUDA (use_fsdp: `fsdp_bf16` is on)."""
    attn_implementation: str | None = None
    """transformers' attention (`sdpa`, `flash_attention_2`, ...) where no prefix is shared;
    None takes its default."""
    share_prefix: bool = True
    """Forward a prompt once for all its completions, where that is exact;
    else pad a row for each."""
    gradient_checkpoint: bool = False
    """Recompute activations in the backward pass: about a third more time for much less memory."""
    torch_compile: bool = False
    """Compile the model's layers in their first step, half a minute:
    a quarter less time for each step after it."""
    processor_kwargs: dict[str, Any] | None = None
    """Arguments of the processor, as `{"max_pixels": 401408}`;
    the server needs them too (`--mm-processor-kwargs`)."""
    freeze_vision_tower: bool = False
    """Train the language model and the projector of a vision-language model,
    but not its vision tower."""
    trust_remote_code: bool = False
    """Let the model's repository run its own Python code here."""
    use_peft: bool = False
    """Train LoRA adapters instead of the weights."""
    lora_rank: PositiveInt = 16
    """LoRA rank r. This field and the four below need `use_peft`."""
    lora_alpha: PositiveInt = 32
    """LoRA scale: the update is alpha/r · B·A."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before A.
    Anything above 0 lets the trainer's log-probs differ from the server's and between forwards."""
    lora_target_modules: Annotated[list[str], NotEmpty] | None = None
    """Module names (or their last parts) that get an adapter;
    None takes all linear layers but the head."""
    base_4bit: bool = False
    """Keep LoRA's frozen base in 4 bits (nf4).
    Needs bitsandbytes, and servers of the dequantized base: see docs/operations.md."""

    # -- data --------------------------------------------------------------------------------------
    dataset_id: Source | Sets
    """A `datasets` name, `name:subset` or `name:subset:split` (without a split: train), a file
    (`.jsonl`, `.ndjson`, `.json`, `.csv`, all of them `.gz` too, `.parquet`), or a function that
    returns the same rows each time: `prompt`, perhaps `images`; or several of them by name.
    All rows are read before the first step. All columns of a `.csv` are text."""
    eval_dataset_id: Source | Sets | None = None
    """Held-out problems, given as `dataset_id` is (a name without a split: test);
    None evaluates nothing."""
    accuracy_func: str | None = None
    """Name of the reward function whose 1 means right, for `eval/accuracy` and `eval/pass@k`;
    None takes the first, if it gives nothing but 0 and 1."""
    eval_generations: PositiveInt = 1
    """Completions per held-out problem:
    `eval/accuracy` is avg@k, `eval/pass@k` the chance that one of k is right."""
    eval_temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature of evaluations; 0 is greedy."""
    order_fn: Function | None = None
    """`f(prompts, history, count, rng) -> prompts`, those that come next: `recipes/curriculum.py`.
    None takes all of them, shuffled anew for each epoch."""
    collate_fn: Function | None = None
    """Turns the list of all rows into rows with a `prompt` before anything else,
    for data of another shape."""
    extra_columns: Annotated[list[str], NotEmpty] | None = None
    """Columns handed to the rewards beside the prompt, and no others;
    None hands over all but images and what is for the chat template (`tools`)."""
    no_apply_chat_template: bool = False
    """Tokenize a string prompt as it is, even where there is a chat template;
    chat messages always go by it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What the chat template takes beside messages, as `{"enable_thinking": false}`;
    a row's own columns `tools` and `chat_template_kwargs` come on top."""

    # -- rollouts ----------------------------------------------------------------------------------
    vllm_urls: list[str] = dataclasses.field(default_factory=lambda: ["http://127.0.0.1:8000"])
    """Addresses of the servers, or `@file` with one a line, which may change;
    their token is in `VLLM_API_KEY`."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt: the group whose mean is the baseline."""
    max_completion_len: PositiveInt = 512
    """Tokens a completion may have."""
    # vLLM takes one below 0.01 for 0.01, and refuses one above 2.
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature; the trainer's log-probs are taken at the same one."""
    top_k: PositiveInt | None = None
    """Sample among the k likeliest tokens only; ratios are then inexact."""
    stop: Annotated[list[Annotated[str, NotEmpty]], NotEmpty] | None = None
    """Strings that end a completion, and stay at its end."""
    sampling_params: dict[str, Any] | None = None
    """Further parameters of vLLM, as `{"top_p": 0.9}`;
    what bends the distribution acts as `top_k` does."""
    rollout_fn: Function | None = None
    """`f(server, prompt, sampling) -> completions` in place of `server.generate`:
    see `recipes/tool_calculator.py`."""
    parts: list[Function] = dataclasses.field(default_factory=list)
    """Functions `f(run)` that may replace what a run is made of, before it begins:
    see `recipes/teacher.py`, `recipes/replay.py`."""
    max_staleness: NonNegativeInt = 1
    """Policy versions that a completion's oldest token may lie behind the policy that it trains;
    0 is synchronous, and what scripts/launch.py sets where both sides share a GPU."""
    inflight_updates: bool = True
    """Update weights in the middle of completions, which go on under the new ones;
    False waits for their end."""
    drop_zero_advantage: bool = False
    """Drop groups whose rewards are all equal, and sample other prompts in their place
    (DAPO's dynamic sampling), up to ten batches for each under way; with an `advantage_fn`:
    those that get nothing but zeros when it is asked about each by itself."""
    max_concurrent_requests: PositiveInt = 64
    """Groups in flight on one server."""
    request_timeout: PositiveFloat = 600.0
    """Seconds that a server may take for a group's completions."""
    sync_timeout: PositiveFloat = 60.0
    """Seconds that a weight sync may take, until the last server has loaded it."""
    server_timeout: NonNegativeFloat = 600.0
    """Seconds to wait at the start until all servers answer,
    and later, when all are lost, until one is back."""
    max_logprob_mismatch: PositiveFloat = 0.1
    """Mean |trainer - server| log-prob (nats) on current tokens,
    above which a server is left out, or a start ends."""

    # -- loss --------------------------------------------------------------------------------------
    reward_funcs: Annotated[list[Function], NotEmpty]
    """Functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]`,
    or their dotted paths."""
    reward_weights: Annotated[list[float], NotEmpty] | None = None
    """One weight per reward function; None weighs all 1."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of a group's centred rewards:
    its own standard deviation, the batch's, or nothing."""
    reward_workers: PositiveInt = 4
    """Processes that call reward functions."""
    reward_timeout: PositiveFloat = 60.0
    """Seconds a function may take for one group,
    and 60 more for imports at its first call in a process."""
    failed_reward: float | None = None
    """Reward that a function gives where its call failed or timed out;
    None leaves the function out there."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "dapo"
    """grpo: mean over completions of token means.
    dr_grpo: token sum over completions x max_completion_len. bnpo: token mean of the mini-batch.
    dapo: of the whole batch. cispo: dapo's, of clipped, detached ratios times log-probs."""
    loss_fn: Function | None = None
    """Function in place of `train.grpo_loss`, with its arguments and results, and with
    differentiable entropies where it has an argument `entropy` without a default.
    See `recipes/own_loss.py`."""
    advantage_fn: Function | None = None
    """`f(rewards, groups) -> advantages` of a whole batch in place of `train.compute_advantages`:
    `recipes/advantages.py`."""
    importance_level: Literal["token", "sequence"] = "token"
    """Importance ratio per token (GRPO) or the geometric mean of a completion's (GSPO)."""
    epsilon: NonNegativeFloat | None = None
    """Lower clip: below a ratio of 1 - epsilon a negative advantage gives no further gradient;
    None: 0.2, and for cispo no lower bound."""
    epsilon_high: NonNegativeFloat | None = None
    """Upper clip: 1 + epsilon_high; None takes epsilon, or 0.2 for cispo, and where
    that is None too. DAPO uses 0.28."""
    delta: PositiveFloat | None = None
    """Two-sided clip: bound on the ratio where the advantage is negative (INTELLECT-2 uses 4);
    None sets no bound."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Ratios are against the policy before the batch's first update (arXiv:2505.24298),
    or the server's log-probs."""
    off_policy_correction: Literal[
        "truncate", "mask", "sequence", "sequence_mask", "geometric", "geometric_mask", "none"
    ] = "truncate"
    """A token's weight at `old_logprobs=trainer`, of w = p(trainer) / p(server).
    truncate: min(w, correction_cap), TIS. mask: w within floor and cap, else 0 (IcePop).
    sequence, geometric: of the product, or mean, of a completion's."""
    correction_cap: PositiveFloat = 2.0
    """Upper bound on w. IcePop uses 5."""
    correction_floor: NonNegativeFloat = 0.5
    """Lower bound on w, for the masks."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty (k3) to the reference; with 0 only own functions may use one."""
    reference_id: PathOrName | None = None
    """Model behind `ref_logprobs`, of the same vocabulary, as a teacher;
    None: the initial policy."""
    reference_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """d, for a reference that becomes d · reference + (1 - d) · policy; 0 copies the policy.
    None: it stays as it is."""
    reference_steps: PositiveInt = 1
    """Steps after each of which it does so."""
    kl_gradient: Literal["forward", "reverse"] = "reverse"
    """reverse: that of k3 times the ratio, KL(policy || reference), as TRL has it.
    forward: that of k3 alone, KL(reference || policy)."""
    num_iterations: PositiveInt = 1
    """Passes over each batch of completions."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps each pass is split into, by prompts."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut, by length or as repetition, out of the loss."""

    # -- optimization ------------------------------------------------------------------------------
    batch_size: PositiveInt = 32
    """Prompts per step over all ranks, so that results do not depend on the number of ranks."""
    max_tokens_per_gpu: PositiveInt = 16384
    """Token budget of one forward/backward, padding included; no sequence may be longer.
    Changes memory and speed, never the gradient."""
    max_steps: PositiveInt | None = None
    """Steps (batches of completions) to train; None takes `num_epochs`."""
    num_epochs: PositiveFloat = 1.0
    """Passes over the dataset where `max_steps` is None."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up: constant, or falling to 0 behind the last step."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of all steps over which the learning rate rises linearly."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay, of all weights but biases and norms."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment; that of its first is 0.9."""
    adam_8bit: bool = False
    """Keep AdamW's moments in 8 bits (needs torchao): about 2 bytes a weight in place of 8."""
    grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this global norm; 0 clips nothing."""
    seed: Annotated[int, Field(ge=-(10**18), le=10**18)] = 42
    """Seeds the order of prompts, LoRA's start, dropout, and sampling at `max_staleness=0`."""
    use_fsdp: bool = False
    """Shard weights, gradients and optimizer state over the ranks (FSDP2)
    instead of replicating them (DDP)."""
    fsdp_bf16: bool = False
    """FSDP2 mixed precision: bfloat16 compute and gathers, weights and gradient sums in `dtype`."""
    fsdp_offload: bool = False
    """Keep FSDP2's weights, gradients and optimizer state in host memory;
    slower, for models that fit no other way."""
    fsdp_shard_size: PositiveInt | None = None
    """Ranks that one copy of the model is sharded over, replicated between them (HSDP),
    as one node's; None: all."""
    collective_timeout: PositiveFloat = 3600.0
    """Seconds after which a collective that some rank never entered ends the run."""

    # -- logs and checkpoints ----------------------------------------------------------------------
    output_dir: PathOrName = "outputs"
    """Folder for metrics, completions and checkpoints."""
    log_steps: PositiveInt = 1
    """Steps between lines on the terminal; `metrics.jsonl` has every step."""
    logged_groups: NonNegativeInt | None = 8
    """Groups of each step whose completions go into `completions.jsonl`:
    the first that were begun; None logs all."""
    log_completions_steps: NonNegativeInt = 0
    """Steps between tables of sampled completions in Weights & Biases or trackio; 0 sends none."""
    eval_steps: NonNegativeInt = 0
    """Steps between evaluations, beside the first and the last;
    0 evaluates only before and after."""
    use_wandb: bool = False
    """Log to Weights & Biases too."""
    use_trackio: bool = False
    """Log to trackio too, on this machine and without an account;
    `trackio show` draws it. Needs trackio."""
    wandb_project: str = "grpo"
    """Project of the run in Weights & Biases, and in trackio."""
    on_step: Function | None = None
    """`f(step, metrics, groups)`, called on rank 0 once a step's files are written, for any other
    tracker: see `recipes/trackers.py`."""
    save_steps: NonNegativeInt = 0
    """Steps between checkpoints, beside the last; 0 saves only the last."""
    keep_last_n: PositiveInt | None = None
    """Keep this many of the run's last checkpoints; None keeps all."""
    resume_from_checkpoint: PathOrName | None = None
    """A `checkpoint-<step>` to go on from,
    or `auto`: the one of the largest step in `output_dir`, if there is one."""
    push_to_hub: bool = False
    """Upload the last checkpoint to the Hugging Face hub."""
    hub_repo_id: str | None = None
    """Repository to push to."""
    hub_private: bool = True
    """Create the repository as a private one."""

    def __post_init__(self) -> None:
        names = [getattr(function, "__name__", "") for function in self.reward_funcs]
        changed = changed_fields(self)
        num_references = len(changed & {"reference_id", "reference_decay"})
        not_theirs = ", ".join(_OWN_PARAMETERS.intersection(self.sampling_params or ()))
        rules = {
            "reward_funcs: each needs a __name__ of its own, for its metric": (
                "" in names or len(set(names)) < len(names)
            ),
            f"accuracy_func={self.accuracy_func}: it is none of reward_funcs": (
                self.accuracy_func and self.accuracy_func not in names
            ),
            "reward_weights must be as many as reward_funcs": (
                self.reward_weights and len(self.reward_weights) != len(names)
            ),
            "batch_size must be a multiple of num_minibatches": (
                self.batch_size % self.num_minibatches
            ),
            "max_tokens_per_gpu must exceed max_completion_len": (
                self.max_tokens_per_gpu <= self.max_completion_len
            ),
            "correction_floor must be below correction_cap": (
                self.off_policy_correction.endswith("mask")
                and self.correction_floor >= self.correction_cap
            ),
            "epsilon must be below 1, but for loss_type=cispo": (
                self.clip_low >= 1 and self.loss_type != "cispo"
            ),
            "delta must exceed 1 + epsilon_high": self.delta and self.delta <= 1 + self.clip_high,
            "base_4bit cannot be sharded: unset use_fsdp": self.base_4bit and self.use_fsdp,
            "push_to_hub needs hub_repo_id (user/name)": self.push_to_hub and not self.hub_repo_id,
            "parts takes functions f(run), or objects as Teacher(url), and no class": (
                any(map(inspect.isclass, self.parts))
            ),
            "the reference is a part, or reference_id, or moves by reference_decay: leave one": (
                num_references + self.reference_is_a_part > 1
            ),
            "reference_decay: an average in bfloat16 rounds its steps away: set dtype=float32, or "
            "reference_decay=0, which copies": (
                self.reference_decay and self.dtype == "bfloat16" and not self.use_peft
            ),
            "eval_temperature must be 0, or at least 0.01": 0 < self.eval_temperature < 0.01,
            f"sampling_params may not set {not_theirs}, which is the trainer's: num_generations, "
            "max_completion_len, temperature, top_k and stop are fields": not_theirs,
        }
        for name, condition in self.unread():
            rules[f"{name} has no effect with {condition}: leave it at its default"] = (
                name in changed
            )

        for message, is_broken in rules.items():
            if is_broken:
                raise UserError(message)

    def unread(self) -> Iterator[tuple[str, str]]:
        """The fields that nothing reads, each with the settings that leave it so."""
        values = {f"{name}={value}" for name, value in vars(self).items()} | changed_fields(self)
        for condition, fields in _UNREAD.items():
            if values.issuperset(condition.split(" and ")):
                for name in fields.split():
                    yield name, condition

    @property
    def clip_low(self) -> float:
        """The lower clip in use: `epsilon`, or its stand-in where None."""
        if self.epsilon is not None:
            return self.epsilon
        return math.inf if self.loss_type == "cispo" else 0.2

    @property
    def clip_high(self) -> float:
        """The upper clip in use: `epsilon_high`, or its stand-in where None."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 0.2 if self.loss_type == "cispo" else self.clip_low

    @property
    def advantages_need_batch(self) -> bool:
        """True where advantages depend on the whole batch.

        Training cannot start before such a batch is complete.
        """
        return self.scale_rewards == "batch" or self.advantage_fn is not None

    @property
    def loss_needs_completions(self) -> bool:
        """True where a token's loss may depend on its completion's other tokens.

        They then stand in one row.
        """
        return (
            self.loss_fn is not None
            or self.loss_type == "grpo"
            or self.importance_level == "sequence"
            or self.off_policy_correction.startswith(("sequence", "geometric"))
        )

    @property
    def loss_reads_entropy(self) -> bool:
        """True where `loss_fn` has an argument `entropy`, without a default."""
        loss_fn: Any = self.loss_fn
        parameter: Any = loss_fn and inspect.signature(loss_fn).parameters.get("entropy")
        # One with a default is the function's own, as a coefficient.
        return bool(parameter) and parameter.default is parameter.empty

    @property
    def has_reference(self) -> bool:
        """True where the loss gets log-probs of a reference."""
        moves = self.reference_decay is not None
        return bool(self.beta or self.reference_id or moves or self.reference_is_a_part)

    @property
    def reference_is_a_part(self) -> bool:
        """True where one of `parts` gives groups their `ref_logprobs`, as its attribute says."""
        return any(getattr(part, "gives_ref_logprobs", False) for part in self.parts)

    @property
    def divides_by_batch(self) -> bool:
        """True where tokens weigh the same in all mini-batches of a batch."""
        return self.loss_type in ("dapo", "cispo")

    @property
    def updates_per_batch(self) -> int:
        """Optimizer updates on one batch of completions."""
        return self.num_iterations * self.num_minibatches


_VALIDATOR = TrainConfig.__pydantic_validator__  # type: ignore[attr-defined]
DEFAULTS = {
    name: field.get_default(call_default_factory=True)
    for name, field in TrainConfig.__pydantic_fields__.items()  # type: ignore[attr-defined]
}


def changed_fields(config: TrainConfig) -> set[str]:
    """The fields whose values differ from the defaults, or without a default."""
    return {name for name, default in DEFAULTS.items() if getattr(config, name) != default}


def bending(config: TrainConfig) -> list[str]:
    """The settings by which a server draws tokens with other probabilities than the policy's."""
    settings = changed_fields(config).union(config.sampling_params or {})
    return sorted(_BENDING & settings)


def describe(config: TrainConfig) -> str:
    """Describe the settings other than the defaults, one a line, then warn."""
    changed = changed_fields(config)
    computes = "bfloat16" if config.bf16 or config.fsdp_bf16 else config.dtype
    lines = [f"weights in {config.dtype}, computation in {computes}; other than the defaults:"]
    lines += [f"  {name} = {value}" for name, value in to_json(config).items() if name in changed]

    bends = ", ".join(bending(config))
    idle = ", ".join(sorted({"importance_level", "epsilon", "epsilon_high", "delta"} & changed))
    has_ratios = config.old_logprobs == "sampler" or config.updates_per_batch > 1
    warnings = {
        f"{bends}: tokens are not drawn from the policy itself; ratios are then inexact": bends,
        f"{idle} without effect: all ratios are 1 with one update per batch": (
            idle and not has_ratios
        ),
        "dtype=bfloat16: weights lose most updates; keep float32, with bf16 or fsdp_bf16": (
            config.dtype == "bfloat16" and not config.use_peft
        ),
        f"learning_rate={config.learning_rate}: LoRA hardly learns below 1e-5; try 1e-5 to 5e-4": (
            config.use_peft and config.learning_rate < 1e-5
        ),
    }
    lines += [f"warning: {text}" for text, applies in warnings.items() if applies]
    return "\n".join(lines)


def lora_options(lora_rank: int) -> list[str]:
    """The options of a server that takes adapters of this rank; none where vLLM has no such."""
    for most in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        if most >= lora_rank:
            return ["--enable-lora", "--max-lora-rank", str(most)]
    return []


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The resolved configuration as JSON values; functions become their dotted paths."""

    def dotted_path(function: Any) -> str:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return f"{function.__module__}.{name}"

    return json.loads(json.dumps(vars(config), default=dotted_path))


def load_recipe(path: str) -> ModuleType:
    """Import a recipe under a name that reward workers can import.

    Raises `UserError` where another module has that name.
    """
    file = Path(path).resolve()
    if not file.is_file() or not re.fullmatch(r"[^.]+\.py", file.name):
        raise UserError(f"recipe {path}: no such file, or none named NAME.py without further dots")
    folder = HERE if file.is_relative_to(HERE) else file.parent
    sys.path.append(str(folder))  # the last place, as it must hide no library
    name = ".".join(file.relative_to(folder).with_suffix("").parts)
    try:
        module = importlib.import_module(name)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"recipe {path}: {error}") from error

    is_other = Path(getattr(module, "__file__", None) or "").resolve() != file
    if is_other or not isinstance(getattr(module, "config", None), TrainConfig):
        raise UserError(
            f"recipe {path} defines no `config = TrainConfig(...)`, or another module has its "
            "name: rename it"
        )
    return module


def parse_args(argv: list[str]) -> TrainConfig:
    """Read a configuration from `[recipe.py] --field value ...`.

    Raises `UserError`; `--help` prints all fields, and ends.
    """
    if {"--help", "-h"}.intersection(argv):
        print(
            "usage: train.py [recipe.py] [--field value ...]\n\n"
            "Lists are written a,b or as JSON, dictionaries as JSON, functions as dotted paths,\n"
            "those of the recipe by name. A value that begins with -- follows after =.\n"
        )
        source = inspect.getsource(TrainConfig)
        print(source[source.index("    # --") : source.index("    def ")])  # the fields
        sys.exit(0)

    sys.path.append(str(Path.cwd()))  # for dotted paths
    words = iter(argv)
    recipe = None
    values: dict[str, Any] = {}
    if argv and not argv[0].startswith("-"):
        recipe = load_recipe(next(words))
        values |= vars(recipe.config)
    for flag in words:
        flag, equals, word = flag.partition("=")
        if not equals:
            word = next(words, "--")
        if not flag.startswith("--") or (not equals and word.startswith("--")):
            raise UserError(
                f"{flag}: give --field value, or --field=value where the value begins with --"
            )

        name = flag.removeprefix("--").replace("-", "_")
        annotation = TrainConfig.__annotations__.get(name, "")
        values[name] = word
        if "None" in annotation and word.lower() in ("none", "null"):
            values[name] = None
        elif word.startswith(("[", "{")):
            with suppress(ValueError):  # a word that is no JSON is refused, or a name
                values[name] = json.loads(word)
        elif "list[" in annotation:
            # A shell leaves "\\n" as two characters.
            values[name] = word.replace("\\n", "\n").split(",")

    # Not strict: words stand for numbers.
    return _checked(values, strict=False, context=recipe)
