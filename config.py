"""The configuration of a run: one frozen dataclass, its validation, and its command line.

    torchrun --nproc_per_node=N train.py [recipe.py] [--field value ...]

A recipe is a Python file that defines `config = TrainConfig(...)` with only what differs.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import json
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

_RANGES: list[tuple[str, Callable[[Any], bool], str]] = [
    ("at least 2", lambda v: v >= 2, "num_generations"),
    (
        "at least 1",
        lambda v: v >= 1,
        "max_completion_len batch_size max_tokens_per_gpu max_steps num_iterations num_minibatches lora_rank "
        "lora_alpha max_concurrent_requests log_steps top_k reward_workers max_dropped_batches "
        "keep_last_n max_skipped_steps",
    ),
    (
        "at least 0",
        lambda v: v >= 0,
        "log_completions_steps eval_steps save_steps request_retries learning_rate weight_decay grad_norm beta "
        "epsilon_high max_staleness server_timeout extra_generations correction_floor",
    ),
    (
        "above 0",
        lambda v: v > 0,
        "temperature num_epochs request_timeout sync_timeout collective_timeout max_logprob_mismatch reward_timeout "
        "correction_cap",
    ),
    ("between 0 and 1", lambda v: 0 <= v <= 1, "warmup_ratio min_p"),
    ("above 0 and at most 1", lambda v: 0 < v <= 1, "top_p"),
    ("at least 0 and below 1", lambda v: 0 <= v < 1, "epsilon adam_beta1 adam_beta2 lora_dropout"),
]

_NEEDS = {
    "use_peft": "lora_rank lora_alpha lora_dropout lora_target_modules",
    "use_wandb": "wandb_project",
    "push_to_hub": "hub_repo_id hub_private",
    "eval_dataset_id": "eval_steps eval_dataset_split",
    "max_staleness": "stale_policy inflight_updates",
    "drop_zero_advantage": "max_dropped_batches",
}

_EXACT_PARAMS = {"seed", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"}
_FIELD_PARAMS = {"n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "logprobs", "structured_outputs"}

RewardFunc = str | Callable[..., Any]


def is_data_file(source: str) -> bool:
    """True for a local data file, by its name; any other string names a data set of the hub."""
    return source.endswith((".jsonl", ".parquet"))


class UserError(ValueError):
    """Something the user gave is wrong; the message is one line that says what, and what to do."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a run. Values are checked when it is made; `UserError` names the field and what to do."""

    # -- model ---------------------------------------------------------------------------------------------------
    model_id: str
    """Hub name or path of a causal language model, or of a vision-language model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights and of the optimizer state. Keep float32 and use `bf16` for fast mathematics:
    bfloat16 weights lose updates smaller than 1/256 of a weight."""
    bf16: bool = False
    """Run the forward under bfloat16 autocast; weights stay in `dtype`."""
    attn_implementation: str | None = None
    """transformers' attention implementation (`sdpa`, `flash_attention_2`, ...) without `share_prefix`; None lets
    transformers choose."""
    share_prefix: bool = True
    """Forward each prompt once for all its completions, exactly (`prefix_attention.py`). Models for which that cannot
    be are trained on one padded row per completion, with a message; so are batches with next to nothing to share."""
    gradient_checkpoint: bool = False
    """Recompute activations in the backward pass: about a third more time for much less memory."""
    processor_kwargs: dict[str, Any] | None = None
    """Arguments of the model's processor, for example `{"max_pixels": 401408}`. The server needs the same
    (`--mm-processor-kwargs`)."""
    freeze_vision_tower: bool = False
    """Train the language model and the projector of a vision-language model, but not its vision tower."""
    trust_remote_code: bool = False
    """Let the model's repository run its own Python code here."""
    use_peft: bool = False
    """Train LoRA adapters instead of the weights."""
    lora_rank: int = 16
    """LoRA rank r. Needs `use_peft`, as the three fields below."""
    lora_alpha: int = 32
    """LoRA scale: the update is alpha/r · B·A."""
    lora_dropout: float = 0.0
    """Dropout before A. Anything above 0 lets the trainer's log-probs differ from the server's and between forwards."""
    lora_target_modules: list[str] | None = None
    """Module names (or their last parts) that get an adapter; None takes all linear layers but the head."""

    # -- data ----------------------------------------------------------------------------------------------------
    dataset_id: str | Callable[[], Any]
    """`datasets` name, a local `.jsonl` or `.parquet` file, or a function that returns rows with a `prompt`, and an
    `image` or `images` where the model sees."""
    dataset_config: str | None = None
    """Configuration (subset) of a `datasets` name; also of `eval_dataset_id`, where that is the same one."""
    dataset_split: str = "train"
    """Split of a `datasets` name."""
    eval_dataset_id: str | Callable[[], Any] | None = None
    """Held-out problems, as `dataset_id`; None evaluates nothing."""
    eval_dataset_split: str = "test"
    """Split of `eval_dataset_id` where it is a `datasets` name."""
    collate_fn: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | str | None = None
    """Maps the dataset's rows to rows with a `prompt` before anything else, for data of another shape."""
    extra_columns: list[str] | None = None
    """Columns handed to the rewards beside the prompt; None hands over all but the images."""
    no_apply_chat_template: bool = False
    """Tokenize a string prompt as it is. Otherwise it becomes one user message where the tokenizer has a chat
    template. Chat messages always go through the template."""

    # -- rollouts ------------------------------------------------------------------------------------------------
    vllm_urls: list[str] = dataclasses.field(default_factory=lambda: ["http://127.0.0.1:8000"])
    """Addresses of the rollout servers."""
    num_generations: int = 8
    """Completions per prompt: the group whose mean is the baseline."""
    max_completion_len: int = 512
    """Tokens a completion may have."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs are taken at the same one."""
    top_k: int | None = None
    """Sample among the k likeliest tokens only. Anything but None makes the server's log-probs inexact."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this mass. See `top_k`."""
    min_p: float | None = None
    """Leave out tokens below this fraction of the likeliest. See `top_k`."""
    stop: list[str] | None = None
    """Strings that end a completion."""
    guided_regex: str | None = None
    """Completions must match this regular expression. See `top_k`."""
    guided_json: dict[str, Any] | None = None
    """Completions must be JSON of this schema. See `top_k`."""
    sampling_params: dict[str, Any] | None = None
    """Any further vLLM sampling parameters, passed through as they are."""
    rollout_fn: Callable[..., Any] | str | None = None
    """`f(client, prompt, sampling) -> completions` in place of one `client.generate`: several turns, tools,
    environments. See `recipes/tool_calculator.py`."""
    extra_generations: int = 0
    """Completions sampled beyond `num_generations`; the first to finish are kept, the rest is aborted. Cuts the wait
    for long completions, and biases towards short ones."""
    max_staleness: int = 1
    """How many policy versions a trained completion's oldest token may lie behind the policy that it trains. 0 is
    synchronous: generation and training take turns."""
    stale_policy: Literal["wait", "drop"] = "wait"
    """A group that would become too stale: wait for it and train it in time, or drop it and sample another prompt."""
    inflight_updates: bool = True
    """Update the servers' weights in the middle of completions, which go on under the new ones; False finishes what
    is in flight first."""
    drop_zero_advantage: bool = False
    """Drop groups whose rewards are all equal, from which nothing is learned, and sample other prompts in their place
    (DAPO's dynamic sampling)."""
    max_dropped_batches: int = 10
    """Stop where a step has dropped so many batches' worth of such groups."""
    max_concurrent_requests: int = 64
    """Groups in flight on one server."""
    request_timeout: float = 600.0
    """Seconds one request may take."""
    sync_timeout: float = 60.0
    """Seconds one broadcast of a weight sync (at most 32 MiB) may take."""
    request_retries: int = 3
    """How often a failed request is sent again."""
    server_timeout: float = 600.0
    """Seconds to wait at start for all servers to answer, and later for one, once all are lost."""
    max_logprob_mismatch: float = 0.1
    """Mean |trainer - server| log-prob (nats) on the probe after the first weight sync above which the run stops."""

    # -- loss ----------------------------------------------------------------------------------------------------
    reward_funcs: list[RewardFunc]
    """Functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, or their dotted paths.
    A name without a dot is a function of the recipe."""
    reward_weights: list[float] | None = None
    """One weight per reward function; None weighs all 1."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What a group's centred rewards are divided by: its own standard deviation, the batch's, or nothing."""
    reward_workers: int = 4
    """Processes that call reward functions."""
    reward_timeout: float = 60.0
    """Seconds one call, of one function for one group, may take; its process is then killed and replaced. A function's
    first call in a process may take 60 s longer, for imports."""
    failed_reward: float | None = None
    """What a function gives completions whose call failed or timed out; None leaves it out of their rewards, and
    completions without any reward out of the loss. Failures are counted, and written to `failed_rewards.jsonl`."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "dapo"
    """grpo: mean over completions of token means. bnpo: token mean of the mini-batch. dr_grpo: token sum over
    completions x max_completion_len. dapo: token mean of the whole batch. cispo: dapo's with clipped, detached
    ratios times the log-probability."""
    loss_fn: Callable[..., Any] | str | None = None
    """`f(logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config) -> (loss, sums)` in place of
    `train.grpo_loss`, whose docstring says what the arguments are. `loss_type` still chooses the normalizer, `sums`
    become metrics (divided by the tokens); `beta`, `epsilon`, `epsilon_high`, `delta` and `importance_level` are what
    it makes of them. See `recipes/own_loss.py`."""
    importance_level: Literal["token", "sequence"] = "token"
    """Importance ratio per token (GRPO) or the geometric mean of a completion's (GSPO)."""
    epsilon: float = 0.2
    """Lower clip: ratios below 1 - epsilon give no further gradient."""
    epsilon_high: float | None = None
    """Upper clip: 1 + epsilon_high; None takes epsilon. DAPO uses 0.28."""
    delta: float | None = None
    """Dual clip: bound on the ratio where the advantage is negative (INTELLECT-2 uses 4); None for none."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """What the clipped ratio is taken against: the policy before the batch's first update (the decoupled objective,
    arXiv:2505.24298), or the server's log-probs, which then need no correction."""
    off_policy_correction: Literal["truncate", "mask", "none"] = "truncate"
    """Weight of each token by w = p(trainer) / p(server) at `old_logprobs=trainer`: min(w, correction_cap) (TIS), w
    where it lies between `correction_floor` and `correction_cap` and else 0 (IcePop, arXiv:2510.18855), or 1."""
    correction_cap: float = 2.0
    """Upper bound on w. IcePop uses 5."""
    correction_floor: float = 0.5
    """Lower bound on w, for `mask`."""
    beta: float = 0.0
    """Weight of the KL penalty (k3) to the initial policy; 0 keeps no reference model."""
    num_iterations: int = 1
    """Passes over each batch of completions."""
    num_minibatches: int = 1
    """Optimizer steps each pass is split into, by prompts."""
    mask_truncated_completions: bool = False
    """Leave completions that ran into `max_completion_len` out of the loss."""

    # -- optimization --------------------------------------------------------------------------------------------
    batch_size: int = 32
    """Prompts per step over all ranks, so that results do not depend on the number of ranks."""
    max_tokens_per_gpu: int = 16384
    """Token budget of one forward/backward, padding included. Changes memory and speed, never the gradient."""
    max_steps: int | None = None
    """Steps (batches of completions) to train; None takes `num_epochs`."""
    num_epochs: float = 1.0
    """Passes over the dataset where `max_steps` is None."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up: constant, or falling to 0 at the last step."""
    warmup_ratio: float = 0.0
    """Share of all steps over which the learning rate rises linearly."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, on matrices only."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment."""
    grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 clips nothing."""
    seed: int = 42
    """Seeds the order of prompts, LoRA's start and dropout."""

    # -- parallelism ---------------------------------------------------------------------------------------------
    use_fsdp: bool = False
    """Shard weights, gradients and optimizer state over the ranks (FSDP2) instead of replicating them (DDP)."""
    fsdp_bf16: bool = False
    """FSDP2 mixed precision: bfloat16 compute and gathers, weights and gradient sums in `dtype`."""
    collective_timeout: float = 3600.0
    """Seconds after which a collective that some rank never entered ends the run."""

    # -- logging -------------------------------------------------------------------------------------------------
    output_dir: str = "outputs"
    """Where metrics, completions and checkpoints go."""
    log_steps: int = 1
    """Steps between lines on the terminal; `metrics.jsonl` has every step."""
    log_completions_steps: int = 0
    """Steps between printed tables of sampled completions; 0 prints none."""
    eval_steps: int = 0
    """Steps between evaluations, beside the first and the last; 0 evaluates only before and after."""
    use_wandb: bool = False
    """Log to Weights & Biases too."""
    wandb_project: str = "grpo"
    """Its project."""

    # -- checkpoints ---------------------------------------------------------------------------------------------
    save_steps: int = 0
    """Steps between checkpoints, beside the last; 0 saves only the last."""
    keep_last_n: int | None = None
    """Checkpoints of this run that are kept, the last ones; None keeps all."""
    resume_from_checkpoint: str | None = None
    """A `checkpoint-<step>` to go on from, or `auto`: the newest one in `output_dir`, if there is one. A synchronous
    run goes on bit for bit, and in any run every group is trained or dropped once."""
    max_skipped_steps: int = 10
    """A step whose loss or gradient is not finite is skipped; after so many in a row the run ends."""
    push_to_hub: bool = False
    """Upload the last checkpoint to the Hugging Face hub."""
    hub_repo_id: str | None = None
    """Repository to push to."""
    hub_private: bool = True
    """Create it private."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            object.__setattr__(self, name, _checked(name, getattr(self, name), hint))
        functions = [load_function(f) if isinstance(f, str) else f for f in self.reward_funcs]
        object.__setattr__(self, "reward_funcs", functions)
        for name in ("collate_fn", "rollout_fn", "loss_fn"):
            if isinstance(path := getattr(self, name), str):
                object.__setattr__(self, name, load_function(path))
        self._check_ranges()
        self._check_servers()
        self._check_rewards()
        self._check_combinations()
        self._check_effects()

    def _check_ranges(self) -> None:
        """Refuse values outside their meaning."""
        for name, value in vars(self).items():
            _require(not isinstance(value, float) or math.isfinite(value), f"{name}={value}: must be a finite number")
            _require(value != [], f"{name} is empty: give at least one value, or leave it at its default")
        for meaning, holds, names in _RANGES:
            for name in names.split():
                value = getattr(self, name)
                _require(value is None or holds(value), f"{name}={value}: must be {meaning}")

    def _check_servers(self) -> None:
        """Refuse addresses that are none."""
        for url in self.vllm_urls:
            _require(url.startswith(("http://", "https://")), f"vllm_urls: {url} must start with http:// or https://")
            _require("@" not in url, "vllm_urls: a token belongs into VLLM_API_KEY, not into an address")
            try:
                parts = urlsplit(url)
                is_address = bool(parts.hostname) and parts.port != 0
            except ValueError:  # of brackets, or a port that is no number
                is_address = False
            _require(is_address, f"vllm_urls: {url} is no address: give http://host:port")
            rest = parts.path.strip("/") or parts.query or parts.fragment
            _require(not rest, f"vllm_urls: {url} must end with the port, without a path")
        _require(len(set(self.vllm_urls)) == len(self.vllm_urls), "vllm_urls names a server twice")

    def _check_rewards(self) -> None:
        """Refuse rewards that have no name or weight of their own."""
        for f in self.reward_funcs:
            _require(hasattr(f, "__name__"), f"reward {f!r} has no __name__, which names its metric: use def")
        names = [getattr(f, "__name__", "") for f in self.reward_funcs]
        is_unique = len(set(names)) == len(names)
        _require(is_unique, f"reward_funcs: {', '.join(names)}: two have one name, which names a metric")
        num_weights = len(names if self.reward_weights is None else self.reward_weights)
        _require(
            num_weights == len(names),
            f"reward_weights has {num_weights} values for {len(names)} reward_funcs: give one each",
        )

    def _check_combinations(self) -> None:
        """Refuse settings that contradict each other."""
        _require(
            self.collective_timeout > self.request_timeout * (1 + self.request_retries) + self.server_timeout,
            "collective_timeout must exceed request_timeout x (1 + request_retries) + server_timeout: the other ranks "
            "wait while rank 0 waits",
        )
        _require(
            self.batch_size % self.num_minibatches == 0,
            f"batch_size={self.batch_size} cannot be divided into num_minibatches={self.num_minibatches} equal parts",
        )
        _require(
            self.max_tokens_per_gpu > self.max_completion_len,
            f"max_tokens_per_gpu={self.max_tokens_per_gpu} holds no completion of max_completion_len="
            f"{self.max_completion_len} with its prompt: raise it",
        )
        _require(
            self.correction_floor < self.correction_cap or not self._corrects,
            "correction_floor must lie below correction_cap",
        )
        is_wider = self.delta is None or self.delta > 1 + self.clip_high
        _require(is_wider, f"delta={self.delta}: must exceed 1 + epsilon_high")
        _require(not (self.bf16 and self.fsdp_bf16), "bf16 and fsdp_bf16 do the same in two ways: set one of them")
        has_two = self.guided_regex and self.guided_json
        _require(not has_two, "guided_regex and guided_json exclude each other: set one")
        _require(not self.push_to_hub or bool(self.hub_repo_id), "push_to_hub needs hub_repo_id (user/name)")
        clash = sorted(_FIELD_PARAMS & set(self.sampling_params or {}))
        _require(not clash, f"sampling_params may not set {', '.join(clash)}: use the fields of TrainConfig")

    def _check_effects(self) -> None:
        """Refuse settings that have no effect beside the others."""
        changed = changed_fields(self)
        for switch, names in _NEEDS.items():
            for name in names.split():
                is_used = bool(getattr(self, switch)) or name not in changed
                _require(is_used, f"{name} has no effect without {switch}: {_default(name)}")
        for name in sorted({"dataset_config", "dataset_split", "eval_dataset_split"} & set(changed)):
            source = "eval_dataset_id" if name == "eval_dataset_split" else "dataset_id"
            given = getattr(self, source)
            is_hub = isinstance(given, str) and not is_data_file(given)
            _require(is_hub, f"{name} has no effect on a {source} that is a file or a function: {_default(name)}")
        masks = self._corrects and self.off_policy_correction == "mask"
        for name, has_effect, condition in (
            ("off_policy_correction", self.old_logprobs == "trainer", "without old_logprobs=trainer"),
            ("correction_cap", self._corrects, "without an off_policy_correction"),
            ("correction_floor", masks, "without off_policy_correction=mask"),
            ("extra_generations", not self.rollout_fn, "with a rollout_fn, which samples itself"),
            ("fsdp_bf16", self.use_fsdp, "without use_fsdp (bf16 has)"),
            ("num_epochs", self.max_steps is None, "beside max_steps, which --max_steps none unsets"),
            ("delta", self.loss_type != "cispo", "with loss_type=cispo"),
        ):
            is_used = has_effect or name not in changed
            _require(is_used, f"{name} has no effect {condition}: {_default(name)}")

    @property
    def _corrects(self) -> bool:
        return self.old_logprobs == "trainer" and self.off_policy_correction != "none"

    @property
    def clip_high(self) -> float:
        """The upper clip actually used: `epsilon_high`, or `epsilon` where it is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def exact_sampling(self) -> bool:
        """True where tokens are drawn from the policy itself, so that server and trainer log-probs must agree."""
        truncated = self.top_k or self.guided_regex or self.guided_json or self.min_p or self.top_p not in (None, 1.0)
        return not truncated and set(self.sampling_params or {}) <= _EXACT_PARAMS


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _default(name: str) -> str:
    """How to leave a field alone, also where a recipe has set it."""
    return f"leave it at its default (--{name} {str(getattr(TrainConfig, name)).lower()})"


def changed_fields(config: TrainConfig) -> dict[str, Any]:
    """The fields whose values differ from the defaults, or have none."""
    changed = {}
    for f in dataclasses.fields(config):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if (value := getattr(config, f.name)) != default:
            changed[f.name] = value
    return changed


def describe(config: TrainConfig) -> str:
    """What differs from the defaults, a line a field, and warnings: of inexact log-probs, of fields without effect."""
    lines = [f"  {name} = {_jsonable(value)}" for name, value in changed_fields(config).items()]
    if not config.exact_sampling:
        lines.append(
            "warning: top_k, top_p, min_p, guided decoding and penalties change the distribution sampled from, while "
            "the loss takes log-probs over the whole vocabulary: ratios are then not exact"
        )
    idle = {"importance_level", "epsilon", "epsilon_high", "delta"} & set(changed_fields(config))
    if idle and config.old_logprobs == "trainer" and config.num_iterations * config.num_minibatches == 1:
        lines.append(
            f"warning: {', '.join(sorted(idle))}: without effect, as with one update a batch the ratio to the "
            "trainer's own log-probs is 1; set old_logprobs to sampler, or num_iterations or num_minibatches above 1"
        )
    if config.dtype == "bfloat16" and not config.use_peft:
        lines.append(
            "warning: dtype=bfloat16: weights lose updates smaller than 1/256 of them, which is most of them; keep "
            "float32 with bf16 or fsdp_bf16"
        )
    if config.attn_implementation and config.share_prefix:
        lines.append(
            f"warning: attn_implementation={config.attn_implementation} counts only for a model that cannot share "
            "prefixes: others run prefix_attention.py's own attention; --share_prefix false goes without"
        )
    return "\n".join(["configuration, where it differs from the defaults:", *lines])


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The resolved configuration as JSON values; functions become their dotted paths."""
    return {f.name: _jsonable(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _jsonable(value: Any) -> Any:
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return [_jsonable(item) for item in value] if isinstance(value, list) else value


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type_name(option) for option in get_args(hint))
    if get_origin(hint) in (list, dict):
        return {list: "list", dict: "dict"}[get_origin(hint)]
    return "None" if hint is type(None) else str(getattr(hint, "__name__", "function"))


def _matches(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        return isinstance(value, list | tuple) and all(_matches(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else callable(value)


def _checked(name: str, value: Any, hint: Any) -> Any:
    if not _matches(value, hint):
        raise UserError(f"{name}={value!r}: must be {_type_name(hint)}")
    if isinstance(value, int) and hint is float:
        return float(value)
    return list(value) if isinstance(value, tuple) else value


def _parsed(name: str, text: str, hint: Any) -> Any:
    """A command-line word as a value of the field's type."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if text.lower() in ("none", "null") and type(None) in options:
        return None
    for option in options:
        origin = get_origin(option)
        if origin is list:
            if text.startswith("["):
                return _json_value(name, text, hint)
            return [_parsed(name, item, get_args(option)[0]) for item in text.split(",")]
        if origin is dict:
            return _json_value(name, text, hint)
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
    return text  # strings, choices and dotted paths; TrainConfig itself refuses what does not fit


def _json_value(name: str, text: str, hint: Any) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}={text!r}: must be {_type_name(hint)}, as JSON ({error})") from None


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown field {name}" + (f": did you mean {near[0]}?" if near else ": see config.py for all fields")


def load_function(path: str, recipe: types.ModuleType | None = None) -> Callable[..., Any]:
    """The function at a dotted path (`my_module.my_reward`), or of that name in the recipe.

    Raises:
        UserError: no such module or function.
    """
    module_name, _, name = path.rpartition(".")
    has_module = bool(module_name or recipe) and not path.startswith(".")
    _require(has_module, f"no function {path}: give its dotted path, package.module.function")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name) if module_name else recipe
        function = getattr(module, name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise UserError(
            f"no function {path}: {error}; give package.module.function or a function of the recipe"
        ) from None
    _require(callable(function), f"{path} is not a function")
    return function


def load_recipe(path: str) -> types.ModuleType:
    """Run a recipe file and return its module, with `config` in it.

    Raises:
        UserError: no such file, code that cannot be imported, no `config` in it, or a field that is unknown or missing.
        TypeError: of the recipe's own code, as anything else that it raises.
    """
    _require(Path(path).is_file(), f"no recipe at {path}")
    for folder in (Path(path).resolve().parent, Path(__file__).resolve().parent):  # its neighbours, recipes.rewards
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(path).stem}", path)  # no library has it
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that its functions can be found by their dotted path
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"recipe {path}: {error}") from error
    except TypeError as error:
        words = str(error).split("'")
        if "unexpected keyword argument" in str(error) and "TrainConfig" in str(error):
            raise UserError(_unknown(words[1], list(TrainConfig.__dataclass_fields__))) from None
        if "TrainConfig" in str(error) and "missing" in str(error):
            raise UserError(f"{path}: {', '.join(words[1::2])} must be given") from None
        raise
    _require(isinstance(getattr(module, "config", None), TrainConfig), f"{path} defines no `config = TrainConfig(...)`")
    return module


def parse_args(argv: list[str]) -> TrainConfig:
    """`[recipe.py] --field value ...` as a configuration; `--field=value` is the same.

    None and booleans by name, lists with commas or as JSON, dictionaries as JSON.

    Raises:
        UserError: an unknown field (with the nearest name), a missing value, or what `load_recipe` or `TrainConfig`
            refuses.
        SystemExit: `--help`, once the fields are printed.
    """
    hints = get_type_hints(TrainConfig)
    words = list(argv)
    if {"-h", "--help"} & set(words):
        fields = [f"  --{name}  {_type_name(hint)}" for name, hint in hints.items()]
        print("\n".join(["train.py [recipe.py] [--field value ...]; config.py says what each field does", *fields]))
        raise SystemExit(0)
    recipe = load_recipe(words.pop(0)) if words and not words[0].startswith("--") else None
    values = {f.name: getattr(recipe.config, f.name) for f in dataclasses.fields(TrainConfig)} if recipe else {}
    while words:
        word = words.pop(0)
        _require(word.startswith("--"), f"unexpected {word!r}: settings are given as --field value")
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if name not in hints:
            raise UserError(_unknown(name, list(hints)))
        if not equals:
            _require(bool(words), f"--{name} needs a value")
            text = words.pop(0)
        values[name] = _parsed(name, text, hints[name])
    for name in ("model_id", "dataset_id", "reward_funcs"):
        _require(name in values, f"{name} must be given, by a recipe or as --{name}")
    if isinstance(values["reward_funcs"], list):
        values["reward_funcs"] = [load_function(f, recipe) if isinstance(f, str) else f for f in values["reward_funcs"]]
    for name in ("collate_fn", "rollout_fn", "loss_fn"):
        if isinstance(values.get(name), str):
            values[name] = load_function(values[name], recipe)
    return TrainConfig(**values)
