"""A run's configuration: a frozen dataclass, its validation and its command line.

    torchrun --nproc_per_node=N train.py [recipe.py] [--field value ...]

A recipe is a Python file that defines `config = TrainConfig(...)` with only what differs.
`--help` explains all fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, ImportString, ValidationError
from pydantic.dataclasses import dataclass


class UserError(ValueError):
    """A user's mistake; the one-line message names the mistake and its cure."""


class _OneLineErrors(type):
    """Lets `TrainConfig(...)` raise `UserError`, of one line, in place of pydantic's errors."""

    def __call__(cls, **values: Any) -> Any:
        for name in values:
            if name not in _FIELDS:
                nearest = difflib.get_close_matches(name, _FIELDS, n=1)
                hint = f"did you mean {nearest[0]}?" if nearest else "--help lists them all"
                raise UserError(f"unknown field {name}: {_GONE.get(name, hint)}")

        try:
            return super().__call__(**values)
        except ValidationError as error:
            first = error.errors()[0]

        # An error of `__post_init__`, or of a module that a dotted path names, stays as it is.
        if first["type"] == "value_error":
            raise first["ctx"]["error"]
        name = str(first["loc"][0])
        raise UserError(f"{name}={values.get(name)!r}: {first['msg']}")


# The types of the fields, which `--help` calls by these names.
T = TypeVar("T")
Values = Annotated[list[T], Field(min_length=1)]
ADDRESS = r"^https?://([\w.-]+|\[[\w:]+\])(:\d+)?/?$"
Function = Annotated[Callable[..., Any] | str, ImportString]  # imports a str
NonEmpty = Annotated[str, Field(min_length=1)]
OneOrMore = Annotated[int, Field(ge=1)]
TwoOrMore = Annotated[int, Field(ge=2)]
ZeroOrMore = Annotated[int, Field(ge=0)]
# A path, in which ~ is the user's home, or a name on the hub.
PathOrName = Annotated[str, AfterValidator(os.path.expanduser)]
Source = PathOrName | Callable[[], Any]
Sets = Annotated[dict[NonEmpty, Source], Field(min_length=1)]  # data sets by name
AboveZero = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
ZeroToOne = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Correction = Literal[
    "truncate", "mask", "sequence", "sequence_mask", "geometric", "geometric_mask", "none"
]
_STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
)

# vLLM takes a temperature below 0.01 for 0.01, and refuses one above 2.
Temperature = Annotated[float, Field(ge=0.01, le=2)]
TemperatureOrZero = Annotated[float, Field(ge=0, le=2)]
Seed = Annotated[int, Field(ge=-(10**18), le=10**18)]
# vLLM's names of what has a field of its own.
_SAMPLING_FIELDS = {
    "n": "num_generations", "max_tokens": "max_completion_len", "temperature": "temperature",
    "top_k": "top_k", "stop": "stop",
}  # fmt: skip
# What vLLM calls a parameter of sampling, and changes what is told of tokens, or whose they are.
_NOT_SAMPLING = {
    "logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start",
    "logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "stream_interval", "skip_clone", "trace_decode_token_ids", "watermarking",
}  # fmt: skip
# Fields of earlier versions, and what takes their place.
_GONE = {
    "stale_policy": "it is gone, as groups train in their order now: leave it out; a rollout_fn"
    " that may hang needs a time-out of its own",
    "dataset_config": "give dataset_id=name:subset",
    "dataset_split": "give dataset_id=name:subset:split, or name::split",
    "eval_dataset_split": "give eval_dataset_id=name:subset:split, or name::split",
    "max_dropped_batches": "it is 10 (rollouts/stream.py)",
    "max_skipped_steps": "it is 10 (train.py)",
    "probe_steps": "it is 20 (rollouts/rollouts.py)",
    "save_rollouts": "set --parts recipes.replay.save",
    "replay": "run `python -m recipes.replay FOLDER recipe.py`",
    "reference_urls": "set parts=[recipes.teacher.Teacher(url, ...)] in the recipe",
}
# Fields that another one leaves unread while it has this value.
_UNREAD = {
    ("use_peft", False): "lora_rank lora_alpha lora_dropout lora_target_modules base_4bit",
    ("use_fsdp", False): "fsdp_bf16 fsdp_offload fsdp_shard_size",
    ("push_to_hub", False): "hub_repo_id hub_private",
    ("eval_dataset_id", None): "eval_steps eval_generations eval_temperature accuracy_func",
    ("eval_temperature", 0): "eval_generations",  # all of them would be the same
    ("logged_groups", 0): "log_completions_steps",
    ("max_staleness", 0): "inflight_updates",
    ("old_logprobs", "sampler"): "off_policy_correction correction_cap",
    ("off_policy_correction", "none"): "correction_cap",
    ("beta", 0): "kl_gradient",
    ("reference_decay", None): "reference_steps",
    ("loss_type", "cispo"): "delta",
}
# Settings under which vLLM no longer draws tokens from the policy itself.
_BENDING = {
    "top_k", "top_p", "min_p", "structured_outputs", "bad_words", "allowed_token_ids", "min_tokens",
    "logit_bias", "thinking_token_budget", "extra_args", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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
    """Forward a prompt once for all its completions, where that is exact and saves work;
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
    lora_rank: OneOrMore = 16
    """LoRA rank r. This field and the four below need `use_peft`."""
    lora_alpha: OneOrMore = 32
    """LoRA scale: the update is alpha/r · B·A."""
    lora_dropout: BelowOne = 0.0
    """Dropout before A.
    Anything above 0 lets the trainer's log-probs differ from the server's and between forwards."""
    lora_target_modules: Values[str] | None = None
    """Module names (or their last parts) that get an adapter;
    None takes all linear layers but the head."""
    base_4bit: bool = False
    """Keep LoRA's frozen base in 4 bits (nf4).
    Needs bitsandbytes, and servers of the dequantized base: see docs/operations.md."""

    # -- data --------------------------------------------------------------------------------------
    dataset_id: Source | Sets
    """A `datasets` name, `name:subset` or `name:subset:split` (without a split: train), a file
    (`.jsonl`, `.json`, `.csv`, `.parquet`), or a function that returns the same rows each time:
    `prompt`, perhaps `images`; or several of them by name. All columns of a `.csv` are text."""
    eval_dataset_id: Source | Sets | None = None
    """Held-out problems, given as `dataset_id` is (a name without a split: test);
    None evaluates nothing."""
    accuracy_func: str | None = None
    """Name of the reward function whose 1 means right, for `eval/accuracy` and `eval/pass@k`;
    None takes the first, if it gives nothing but 0 and 1."""
    eval_generations: OneOrMore = 1
    """Completions per held-out problem:
    `eval/accuracy` is avg@k, `eval/pass@k` the chance that one of k is right."""
    eval_temperature: TemperatureOrZero = 0.0
    """Sampling temperature of evaluations; 0 is greedy."""
    order_fn: Function | None = None
    """`f(prompts, history, count, rng) -> prompts`, those that come next: `recipes/curriculum.py`.
    None takes all of them, shuffled anew for each epoch."""
    collate_fn: Function | None = None
    """Turns the list of all rows into rows with a `prompt` before anything else,
    for data of another shape."""
    extra_columns: Values[str] | None = None
    """Columns handed to the rewards beside the prompt; None hands over all but the images."""
    no_apply_chat_template: bool = False
    """Tokenize a string prompt as it is, even where there is a chat template;
    chat messages always go by it."""

    # -- rollouts ----------------------------------------------------------------------------------
    vllm_urls: list[str] = dataclasses.field(default_factory=lambda: ["http://127.0.0.1:8000"])
    """Addresses of the servers, or `@file` with one a line, which may change;
    their token is in `VLLM_API_KEY`."""
    num_generations: TwoOrMore = 8
    """Completions per prompt: the group whose mean is the baseline."""
    max_completion_len: OneOrMore = 512
    """Tokens a completion may have."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer's log-probs are taken at the same one."""
    top_k: OneOrMore | None = None
    """Sample among the k likeliest tokens only; ratios are then inexact."""
    stop: Values[NonEmpty] | None = None
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
    max_staleness: ZeroOrMore = 1
    """Policy versions that a completion's oldest token may lie behind the policy that it trains;
    0 is synchronous."""
    inflight_updates: bool = True
    """Update weights in the middle of completions, which go on under the new ones;
    False waits for their end."""
    drop_zero_advantage: bool = False
    """Drop groups whose rewards are all equal, and sample other prompts in their place
    (DAPO's dynamic sampling), of up to ten batches a step; with an `advantage_fn`: those to which
    it gives zeros alone."""
    max_concurrent_requests: OneOrMore = 64
    """Groups in flight on one server."""
    request_timeout: AboveZero = 600.0
    """Seconds that a server may take for a group's completions."""
    sync_timeout: AboveZero = 60.0
    """Seconds that a weight sync may take, until the last server has loaded it."""
    server_timeout: NotNegative = 600.0
    """Seconds to wait at the start until all servers answer,
    and later, when all are lost, until one is back."""
    max_logprob_mismatch: AboveZero = 0.1
    """Mean |trainer - server| log-prob (nats) on current tokens,
    above which a server is left out, or a start ends."""

    # -- loss --------------------------------------------------------------------------------------
    reward_funcs: Values[Function]
    """Functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]`,
    or their dotted paths."""
    reward_weights: Values[float] | None = None
    """One weight per reward function; None weighs all 1."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divisor of a group's centred rewards:
    its own standard deviation, the batch's, or nothing."""
    reward_workers: OneOrMore = 4
    """Processes that call reward functions."""
    reward_timeout: AboveZero = 60.0
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
    differentiable entropies where it has an argument `entropy`. See `recipes/own_loss.py`."""
    advantage_fn: Function | None = None
    """`f(rewards, groups) -> advantages` of a whole batch in place of `compute_advantages`:
    `recipes/advantages.py`."""
    importance_level: Literal["token", "sequence"] = "token"
    """Importance ratio per token (GRPO) or the geometric mean of a completion's (GSPO)."""
    epsilon: NotNegative | None = None
    """Lower clip: below a ratio of 1 - epsilon a negative advantage gives no further gradient;
    None: 0.2, and for cispo no lower bound."""
    epsilon_high: NotNegative | None = None
    """Upper clip: 1 + epsilon_high; None takes epsilon, or 0.2 for cispo, and where
    that is None too. DAPO uses 0.28."""
    delta: AboveZero | None = None
    """Two-sided clip: bound on the ratio where the advantage is negative (INTELLECT-2 uses 4);
    None sets no bound."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Ratios are against the policy before the batch's first update (arXiv:2505.24298),
    or the server's log-probs."""
    off_policy_correction: Correction = "truncate"
    """A token's weight at `old_logprobs=trainer`, of w = p(trainer) / p(server).
    truncate: min(w, correction_cap), TIS. mask: w within floor and cap, else 0 (IcePop).
    sequence, geometric: of the product, or mean, of a completion's."""
    correction_cap: AboveZero = 2.0
    """Upper bound on w. IcePop uses 5."""
    correction_floor: NotNegative = 0.5
    """Lower bound on w, for the masks."""
    beta: NotNegative = 0.0
    """Weight of the KL penalty (k3) to the reference; 0 keeps no reference model."""
    reference_id: PathOrName | None = None
    """Model behind `ref_logprobs`, of the same vocabulary, as a teacher;
    None: the initial policy."""
    reference_decay: BelowOne | None = None
    """d, for a reference that becomes d · reference + (1 - d) · policy; 0 copies the policy.
    None: it stays as it is."""
    reference_steps: OneOrMore = 1
    """Steps after each of which it does so."""
    kl_gradient: Literal["forward", "reverse"] = "forward"
    """forward: that of k3, KL(reference || policy), as DeepSeekMath has it.
    reverse: times the ratio, as TRL has it."""
    num_iterations: OneOrMore = 1
    """Passes over each batch of completions."""
    num_minibatches: OneOrMore = 1
    """Optimizer steps each pass is split into, by prompts."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut, by length or as repetition, out of the loss."""

    # -- optimization ------------------------------------------------------------------------------
    batch_size: OneOrMore = 32
    """Prompts per step over all ranks, so that results do not depend on the number of ranks."""
    max_tokens_per_gpu: OneOrMore = 16384
    """Token budget of one forward/backward, padding included.
    Changes memory and speed, never the gradient."""
    max_steps: OneOrMore | None = None
    """Steps (batches of completions) to train; None takes `num_epochs`."""
    num_epochs: AboveZero = 1.0
    """Passes over the dataset where `max_steps` is None."""
    learning_rate: NotNegative = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up: constant, or falling to 0 behind the last step."""
    warmup_ratio: ZeroToOne = 0.0
    """Share of all steps over which the learning rate rises linearly."""
    weight_decay: NotNegative = 0.0
    """AdamW's decoupled weight decay, of all weights but biases and norms."""
    adam_beta1: BelowOne = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: BelowOne = 0.999
    """Decay of AdamW's second moment."""
    adam_8bit: bool = False
    """Keep AdamW's moments in 8 bits (needs torchao): about 2 bytes a weight in place of 8."""
    grad_norm: NotNegative = 1.0
    """Gradients are clipped to this global norm; 0 clips nothing."""
    seed: Seed = 42
    """Seeds the order of prompts, LoRA's start, dropout, and sampling at `max_staleness=0`."""
    use_fsdp: bool = False
    """Shard weights, gradients and optimizer state over the ranks (FSDP2)
    instead of replicating them (DDP)."""
    fsdp_bf16: bool = False
    """FSDP2 mixed precision: bfloat16 compute and gathers, weights and gradient sums in `dtype`."""
    fsdp_offload: bool = False
    """Keep FSDP2's weights, gradients and optimizer state in host memory;
    slower, for models that fit no other way."""
    fsdp_shard_size: OneOrMore | None = None
    """Ranks that one copy of the model is sharded over, replicated between them (HSDP),
    as one node's; None: all."""
    collective_timeout: AboveZero = 3600.0
    """Seconds after which a collective that some rank never entered ends the run."""

    # -- logs and checkpoints ----------------------------------------------------------------------
    output_dir: PathOrName = "outputs"
    """Folder for metrics, completions and checkpoints."""
    log_steps: OneOrMore = 1
    """Steps between lines on the terminal; `metrics.jsonl` has every step."""
    logged_groups: ZeroOrMore | None = 8
    """Groups of each step whose completions go into `completions.jsonl`:
    the first that were begun; None logs all."""
    log_completions_steps: ZeroOrMore = 0
    """Steps between tables of sampled completions in Weights & Biases or trackio; 0 sends none."""
    eval_steps: ZeroOrMore = 0
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
    save_steps: ZeroOrMore = 0
    """Steps between checkpoints, beside the last; 0 saves only the last."""
    keep_last_n: OneOrMore | None = None
    """Keep this many of the run's last checkpoints; None keeps all."""
    resume_from_checkpoint: PathOrName | None = None
    """A `checkpoint-<step>` to go on from,
    or `auto`: the newest one in `output_dir`, if there is one."""
    push_to_hub: bool = False
    """Upload the last checkpoint to the Hugging Face hub."""
    hub_repo_id: str | None = None
    """Repository to push to."""
    hub_private: bool = True
    """Create the repository as a private one."""

    def __post_init__(self) -> None:
        names = [getattr(function, "__name__", "") for function in self.reward_funcs]
        if len(set(names) - {""}) < len(names):
            raise UserError("reward_funcs: each needs a __name__ of its own, for its metric")
        if self.accuracy_func and self.accuracy_func not in names:
            raise UserError(f"accuracy_func={self.accuracy_func}: it is none of reward_funcs")
        if self.reward_weights and len(self.reward_weights) != len(names):
            raise UserError("reward_weights must be as many as reward_funcs")

        for url in self.vllm_urls:
            if not re.match(f"@.|{ADDRESS}", url):
                raise UserError(f"vllm_urls={url}: give http://host:port, or @file with one a line")
        if self.batch_size % self.num_minibatches:
            raise UserError("batch_size must be a multiple of num_minibatches")
        if self.max_tokens_per_gpu <= self.max_completion_len:
            raise UserError("max_tokens_per_gpu must exceed max_completion_len")

        if (
            self.off_policy_correction.endswith("mask")
            and self.correction_floor >= self.correction_cap
        ):
            raise UserError("correction_floor must be below correction_cap")
        if self.clip_low >= 1 and self.loss_type != "cispo":
            raise UserError("epsilon must be below 1, but for loss_type=cispo")
        if self.delta and self.delta <= 1 + self.clip_high:
            raise UserError("delta must exceed 1 + epsilon_high")

        if self.base_4bit and self.use_fsdp:
            raise UserError("base_4bit cannot be sharded: unset use_fsdp, each rank holds it whole")
        if self.push_to_hub and not self.hub_repo_id:
            raise UserError("push_to_hub needs hub_repo_id (user/name)")
        if self.reference_is_a_part and (self.reference_id or self.reference_decay is not None):
            raise UserError("one of parts is the reference: unset reference_id and reference_decay")
        if self.reference_decay is not None and self.reference_id:
            raise UserError("reference_decay moves the initial policy: unset reference_id")
        if self.reference_decay and self.dtype == "bfloat16" and not self.use_peft:
            raise UserError(
                "reference_decay: an average in bfloat16 rounds its steps away: set dtype=float32, "
                "or reference_decay=0, which copies"
            )
        if 0 < self.eval_temperature < 0.01:
            raise UserError("eval_temperature must be 0 or at least 0.01, which vLLM takes it for")
        for name in self.sampling_params or ():
            if name in _SAMPLING_FIELDS:
                field = _SAMPLING_FIELDS[name]
                raise UserError(f"sampling_params may not set {name}: use the field {field}")
            if name in _NOT_SAMPLING:
                raise UserError(f"sampling_params.{name} is the trainer's own to set")

        self._refuse_settings_without_effect()

    def _refuse_settings_without_effect(self) -> None:
        """Raise `UserError` for a changed field that another setting leaves unread."""
        rules: list[tuple[str, Any, str]] = []
        for (name, value), fields in _UNREAD.items():
            condition = f"with {name}={value}" if value else f"without {name}"
            rules.append((condition, getattr(self, name) == value, fields))
        has_mask = self.off_policy_correction.endswith("mask")
        rules += [
            (
                "without use_wandb or use_trackio",
                not self.use_wandb and not self.use_trackio,
                "wandb_project log_completions_steps",
            ),
            (
                "without beta or a loss_fn, which may use a reference",
                not self.beta and not self.loss_fn,
                "reference_id reference_decay",
            ),
            ("without a mask as off_policy_correction", not has_mask, "correction_floor"),
            ("with advantage_fn", self.advantage_fn, "scale_rewards"),
            ("beside max_steps, which --max_steps none unsets", self.max_steps, "num_epochs"),
        ]
        for condition, is_unread, fields in rules:
            for name in fields.split():
                if is_unread and getattr(self, name) != _DEFAULTS[name]:
                    raise UserError(
                        f"{name} has no effect {condition}: leave it at its default, "
                        f"{_DEFAULTS[name]}"
                    )

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
        if self.epsilon is not None and self.loss_type != "cispo":
            return self.epsilon
        return 0.2

    @property
    def weighs_whole_batch(self) -> bool:
        """True where advantages depend on the whole batch.

        Training cannot start before such a batch is complete.
        """
        return self.scale_rewards == "batch" or self.advantage_fn is not None

    @property
    def weighs_whole_completions(self) -> bool:
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
        if loss_fn is None:
            return False
        # One with a default is the function's own, as a coefficient.
        parameter = inspect.signature(loss_fn).parameters.get("entropy")
        return parameter is not None and parameter.default is parameter.empty

    @property
    def train_sets(self) -> dict[str, Any]:
        """Data sets by name; a single set has the name ""."""
        if isinstance(self.dataset_id, dict):
            return self.dataset_id
        return {"": self.dataset_id}

    @property
    def eval_sets(self) -> dict[str, Any]:
        """Held-out data sets by name; a single set has the name ""."""
        if isinstance(self.eval_dataset_id, dict):
            return self.eval_dataset_id
        return {"": self.eval_dataset_id} if self.eval_dataset_id else {}

    @property
    def has_reference(self) -> bool:
        """True where the loss gets log-probs of a reference."""
        is_named = self.reference_id or self.reference_is_a_part
        return bool(self.beta or is_named) or self.reference_decay is not None

    @property
    def reference_is_a_part(self) -> bool:
        """True where one of `parts` gives groups their `ref_logprobs`, as its attribute says."""
        return any(getattr(part, "gives_ref_logprobs", False) for part in self.parts)

    @property
    def weighs_tokens_alike(self) -> bool:
        """True where tokens weigh the same in all mini-batches of a batch."""
        return self.loss_type in ("dapo", "cispo")

    @property
    def updates_per_batch(self) -> int:
        """Optimizer updates on one batch of completions."""
        return self.num_iterations * self.num_minibatches


_FIELDS = TrainConfig.__pydantic_fields__  # type: ignore[attr-defined]
_HINTS = get_type_hints(TrainConfig, include_extras=True)
_DEFAULTS = {name: field.get_default(call_default_factory=True) for name, field in _FIELDS.items()}


def changed_fields(config: TrainConfig) -> set[str]:
    """The fields whose values differ from the defaults, or without a default."""
    return {name for name in _FIELDS if getattr(config, name) != _DEFAULTS[name]}


def sampling_settings(config: TrainConfig) -> set[str]:
    """The names of all that is set for sampling."""
    return changed_fields(config).union(config.sampling_params or {})


def bending(settings: Collection[str]) -> list[str]:
    """Of some settings, those by which a server draws tokens with other probabilities."""
    return sorted(_BENDING.intersection(settings))


def describe(config: TrainConfig) -> str:
    """Describe the settings other than the defaults, one a line, then warn."""
    changed = changed_fields(config)
    computes = "bfloat16" if config.bf16 or config.fsdp_bf16 else config.dtype
    lines = [f"weights in {config.dtype}, computation in {computes}; other than the defaults:"]
    lines += [f"  {name} = {value}" for name, value in to_json(config).items() if name in changed]

    bends = ", ".join(bending(sampling_settings(config)))
    if bends:
        lines.append(
            f"warning: {bends}: tokens are not drawn from the policy itself; "
            "ratios are then inexact"
        )
    idle = ", ".join(sorted({"importance_level", "epsilon", "epsilon_high", "delta"} & changed))
    if idle and config.old_logprobs == "trainer" and config.updates_per_batch == 1:
        lines.append(f"warning: {idle} without effect: all ratios are 1 with one update per batch")

    if config.dtype == "bfloat16" and not config.use_peft:
        lines.append(
            "warning: dtype=bfloat16: weights lose most updates; "
            "keep float32, with bf16 or fsdp_bf16"
        )
    if config.use_peft and config.learning_rate < 1e-5:
        lines.append(
            f"warning: learning_rate={config.learning_rate}: LoRA hardly learns below 1e-5; "
            "try 1e-5 to 5e-4"
        )
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
    folder = Path(__file__).resolve().parent
    if not file.is_relative_to(folder):
        folder = file.parent
        sys.path.append(str(folder))  # the last place, as it must hide no library
    name = ".".join(file.relative_to(folder).with_suffix("").parts)

    if "." in file.stem:
        raise UserError(f"recipe {path}: Python imports no name with a dot: rename it")
    try:
        spec = importlib.util.find_spec(name)
        if not spec or Path(spec.origin or "").resolve() != file:
            raise ImportError("no such file, or another module has its name: rename it")
        module = importlib.import_module(name)
    except (ImportError, SyntaxError) as error:
        module_name = str(getattr(error, "name", None))
        cure = ""
        if file.with_name(f"{module_name}.py").is_file() and module_name in sys.modules:
            cure = f"; {module_name} is the trainer's own: rename {module_name}.py beside it"
        raise UserError(f"recipe {path}: {error}{cure}") from error

    if not isinstance(getattr(module, "config", None), TrainConfig):
        raise UserError(f"{path} defines no `config = TrainConfig(...)`")
    return module


def parse_args(argv: list[str]) -> TrainConfig:
    """Read a configuration from `[recipe.py] --field value ...`.

    Raises `UserError`, or argparse's `SystemExit`.
    """
    words = [_with_underscores(word) for word in argv]
    path = None
    if words and not words[0].startswith("-"):
        path = words.pop(0)
    given, unknown = _parser().parse_known_args(words)

    sys.path.append(str(Path.cwd()))  # for dotted paths
    recipe = load_recipe(path) if path else None
    values = {name: _parsed(word, _HINTS[name], recipe) for name, word in vars(given).items()}
    if isinstance(values.get("stop"), list):  # a shell leaves "\n" as two characters
        values["stop"] = [str(stop).replace("\\n", "\n") for stop in values["stop"]]
    if unknown:  # TrainConfig refuses the first
        name = unknown[0].lstrip("-").partition("=")[0]
        values[name] = unknown[0]

    if recipe:
        return dataclasses.replace(recipe.config, **values)
    return TrainConfig(**values)


def _with_underscores(word: str) -> str:
    """`--output-dir=a-b` as `--output_dir=a-b`."""
    flag, equals, value = word.partition("=")
    if flag.startswith("--"):
        flag = "--" + flag[2:].replace("-", "_")
    return flag + equals + value


def _parser() -> argparse.ArgumentParser:
    """A parser with an option for each field, whose values stay words."""
    parser = argparse.ArgumentParser(
        usage="train.py [recipe.py] [--field value ...]",
        description="Lists are written a,b or as JSON, dictionaries as JSON, functions as dotted "
        "paths, those of the recipe by name. A value that begins with a dash follows after =.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=6),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in _FIELDS.items():
        default = "required" if field.is_required() else f"default {str(_DEFAULTS[name]).lower()}"
        parser.add_argument(
            f"--{name}",
            metavar=f"{TrainConfig.__annotations__[name]} ({default})",
            help=field.description.replace("%", "%%"),
        )
    return parser


def _parsed(word: Any, hint: Any, recipe: ModuleType | None) -> Any:
    """Turn a command line's word into a value of the type.

    A word that does not fit stays text, which `TrainConfig` refuses.
    """
    if not isinstance(word, str):  # a part of a JSON list
        return word
    if hint == Function:
        path = word.lstrip(".")  # `.f` is `f`: there is no relative import
        if recipe and "." not in path:  # a function of the recipe, by its name alone
            return f"{recipe.__name__}.{path}"
        return path

    kind = get_origin(hint) or hint
    args = get_args(hint)
    if NoneType in args and word.lower() in ("none", "null"):
        return None
    if kind in (Annotated, Union, UnionType):
        option = args[0]  # what Annotated wraps; of a union, str or the only type beside None
        if word.startswith("{") and Sets in args:
            option = dict
        return _parsed(word, option, recipe)

    with suppress(ValueError):
        if kind is list:
            items = json.loads(word) if word.startswith("[") else word.split(",")
            return [_parsed(item, args[0], recipe) for item in items]
        if kind is dict:
            return json.loads(word)
        if kind is bool:
            return json.loads(word.lower())
        if kind in (int, float):
            return kind(word)
    return word
