"""The configuration of a run: one frozen dataclass, its validation, and its command line.

    torchrun --nproc_per_node=N train.py [recipe.py] [--field value ...]

A recipe is a Python file that defines `config = TrainConfig(...)` with only what differs. `--help` explains all fields.
"""

import argparse
import dataclasses
import difflib
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

_PROJECT = Path(__file__).resolve().parent
_EXACT_PARAMS = {"seed", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"}
_FIELD_PARAMS = {"n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "logprobs", "structured_outputs"}


class UserError(ValueError):
    """Something the user gave is wrong; the message is one line that says what, and what to do."""


def is_data_file(source: str) -> bool:
    """True for a local data file, by its name; any other string names a data set of the hub."""
    return source.endswith((".jsonl", ".parquet"))


def load_function(path: str) -> Callable[..., Any]:
    """The function at a dotted path (`my_module.my_reward`), imported from the working directory too.

    Raises:
        UserError: no such module or function.
    """
    module, _, name = path.rpartition(".")
    if not module or path.startswith("."):
        raise UserError(f"no function {path}: give its dotted path, package.module.function")
    _add_to_path(Path.cwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise UserError(f"no function {path}: {error}") from None


def _add_to_path(*folders: Path) -> None:
    """Let modules of these folders be imported, but hide no library."""
    sys.path.extend(str(folder) for folder in folders if str(folder) not in sys.path)


def _address(url: str) -> str:
    if not re.fullmatch(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:[1-9]\d{0,4})?/?", url):
        shown = url.rpartition("@")[2]  # a token before it is not for the terminal
        raise UserError(f"vllm_urls: {shown} must be http://host:port; a token belongs into VLLM_API_KEY")
    return url


class _OneLineErrors(type):
    """Lets `TrainConfig(...)` raise a `UserError` of one line where pydantic raises a `ValidationError` of many."""

    def __call__(cls, **values: Any) -> Any:
        try:
            return super().__call__(**values)
        except ValidationError as error:
            # An unknown field is often the misspelt name of one that is missing, and is said first.
            first = max(error.errors(), key=lambda detail: detail["type"] == "unexpected_keyword_argument")
        if cause := first.get("ctx", {}).get("error"):
            raise cause  # a check of ours raised it, or a module that a dotted path names
        kind, name = first["type"], str(first["loc"][0])
        if kind == "unexpected_keyword_argument":
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            raise UserError(f"unknown field {name}: " + (f"did you mean {near[0]}?" if near else "see --help for all"))
        if kind == "missing":
            raise UserError(f"{name} must be given, by a recipe or as --{name}")
        if kind == "too_short":
            raise UserError(f"{name} is empty: give at least one value, or leave it at its default")
        wanted = "a finite number" if kind == "finite_number" else _type_in_words(_HINTS[name])
        if kind.startswith(("greater_than", "less_than")):
            wanted = wanted.partition(", ")[2]
        raise UserError(f"{name}={values[name]!r}: must be {wanted}")


# The types of the fields. Messages and `--help` call a type by its title.
T = TypeVar("T")
Values = Annotated[list[T], Field(min_length=1), BeforeValidator(lambda v: list(v) if isinstance(v, tuple) else v)]
Address = Annotated[str, Field(title="http://host:port"), AfterValidator(_address)]
Function = Annotated[
    Callable[..., Any] | str,
    Field(title="function"),
    BeforeValidator(lambda f: load_function(f) if isinstance(f, str) else f),
]
OneOrMore = Annotated[int, Field(title="int, at least 1", ge=1)]
ZeroOrMore = Annotated[int, Field(title="int, at least 0", ge=0)]
Positive = Annotated[float, Field(title="float, above 0", gt=0)]
NotNegative = Annotated[float, Field(title="float, at least 0", ge=0)]
Share = Annotated[float, Field(title="float, at least 0 and at most 1", ge=0, le=1)]
BelowOne = Annotated[float, Field(title="float, at least 0 and below 1", ge=0, lt=1)]
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainConfig(metaclass=_OneLineErrors):
    """Every setting of a run. Values are checked when it is made; `UserError` names the field and what to do."""

    # -- model ---------------------------------------------------------------------------------------------------
    model_id: str
    """Hub name or path of a causal language model, or of a vision-language model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights and of the optimizer state. Keep float32 and set `bf16` for speed: bfloat16 weights
    lose updates smaller than 1/256 of a weight."""
    bf16: bool = False
    """Run the forward under bfloat16 autocast; weights stay in `dtype`."""
    attn_implementation: str | None = None
    """transformers' attention (`sdpa`, `flash_attention_2`, ...) without `share_prefix`; None takes its own default."""
    share_prefix: bool = True
    """Forward each prompt once for all its completions, exactly (`prefix_attention.py`). Where a model makes that
    inexact, or a batch has next to nothing to share, one padded row per completion is trained instead."""
    gradient_checkpoint: bool = False
    """Recompute activations in the backward pass: about a third more time for much less memory."""
    processor_kwargs: dict[str, Any] | None = None
    """Arguments of the model's processor, as `{"max_pixels": 401408}`. The server needs them, too
    (`--mm-processor-kwargs`)."""
    freeze_vision_tower: bool = False
    """Train the language model and the projector of a vision-language model, but not its vision tower."""
    trust_remote_code: bool = False
    """Let the model's repository run its own Python code here."""
    use_peft: bool = False
    """Train LoRA adapters instead of the weights."""
    lora_rank: OneOrMore = 16
    """LoRA rank r. This field and the three below need `use_peft`."""
    lora_alpha: OneOrMore = 32
    """LoRA scale: the update is alpha/r · B·A."""
    lora_dropout: BelowOne = 0.0
    """Dropout before A. Anything above 0 lets the trainer's log-probs differ from the server's and between forwards."""
    lora_target_modules: Values[str] | None = None
    """Module names (or their last parts) that get an adapter; None takes all linear layers but the head."""

    # -- data ----------------------------------------------------------------------------------------------------
    dataset_id: str | Callable[[], Any]
    """A `datasets` name, a local `.jsonl` or `.parquet` file, or a function that returns rows. A row has a `prompt`,
    and for a vision-language model an `image` or `images`."""
    dataset_config: str | None = None
    """Configuration (subset) of a `datasets` name. Where `eval_dataset_id` is the same name, it has this one, too."""
    dataset_split: str = "train"
    """Split of a `datasets` name."""
    eval_dataset_id: str | Callable[[], Any] | None = None
    """Held-out problems, given as `dataset_id` is; None evaluates nothing."""
    eval_dataset_split: str = "test"
    """Split of `eval_dataset_id` where it is a `datasets` name."""
    collate_fn: Function | None = None
    """Turns the list of all rows into rows with a `prompt` before anything else, for data of another shape."""
    extra_columns: Values[str] | None = None
    """Columns handed to the rewards beside the prompt; None hands over all but the images."""
    no_apply_chat_template: bool = False
    """Tokenize a string prompt as it is. Otherwise it becomes one user message where the tokenizer has a chat
    template. Chat messages always go through the template."""

    # -- rollouts ------------------------------------------------------------------------------------------------
    vllm_urls: Values[Address] = dataclasses.field(default_factory=lambda: ["http://127.0.0.1:8000"])
    """Addresses of the rollout servers."""
    num_generations: Annotated[int, Field(title="int, at least 2", ge=2)] = 8
    """Completions per prompt: the group whose mean is the baseline."""
    max_completion_len: OneOrMore = 512
    """Tokens a completion may have."""
    temperature: Positive = 1.0
    """Sampling temperature; the trainer's log-probs are taken at the same one."""
    top_k: OneOrMore | None = None
    """Sample among the k likeliest tokens only. Anything but None makes the server's log-probs inexact."""
    top_p: Annotated[float, Field(title="float, above 0 and at most 1", gt=0, le=1)] | None = None
    """Sample from the smallest set of tokens with this mass. See `top_k`."""
    min_p: Share | None = None
    """Leave out tokens below this fraction of the likeliest. See `top_k`."""
    stop: Values[str] | None = None
    """Strings that end a completion."""
    guided_regex: str | None = None
    """Completions must match this regular expression. See `top_k`."""
    guided_json: dict[str, Any] | None = None
    """Completions must be JSON of this schema. See `top_k`."""
    sampling_params: dict[str, Any] | None = None
    """Any further vLLM sampling parameters, passed through as they are."""
    rollout_fn: Function | None = None
    """`f(client, prompt, sampling) -> completions` in place of one `client.generate`: several turns, tools,
    environments. See `recipes/tool_calculator.py`."""
    extra_generations: ZeroOrMore = 0
    """Completions sampled beyond `num_generations`; the last to finish are aborted. Saves time, favours short ones."""
    max_staleness: ZeroOrMore = 1
    """How many policy versions a trained completion's oldest token may lie behind the policy that it trains. 0 is
    synchronous: generation and training take turns."""
    stale_policy: Literal["wait", "drop"] = "wait"
    """Before a group becomes too stale: wait for it and train it in time, or drop it and sample another prompt."""
    inflight_updates: bool = True
    """Update the servers' weights in the middle of completions, which go on under the new ones; False waits for their
    end first."""
    drop_zero_advantage: bool = False
    """Drop groups whose rewards are all equal, and sample other prompts in their place (DAPO's dynamic sampling)."""
    max_dropped_batches: OneOrMore = 10
    """Stop once a step has dropped as many groups with equal rewards as this many batches have."""
    max_concurrent_requests: OneOrMore = 64
    """Groups in flight on one server."""
    request_timeout: Positive = 600.0
    """Seconds one request may take."""
    sync_timeout: Positive = 60.0
    """Seconds one broadcast of a weight sync (at most 32 MiB) may take."""
    server_timeout: NotNegative = 600.0
    """Seconds to wait at the start until all servers answer, and later, when all are lost, until one is back."""
    max_logprob_mismatch: Positive = 0.1
    """Mean |trainer - server| log-prob (nats) on the probe after the first weight sync above which the run stops."""

    # -- loss ----------------------------------------------------------------------------------------------------
    reward_funcs: Values[Function]
    """Functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, or their dotted paths.
    On the command line, a name without a dot is a function of the recipe."""
    reward_weights: Values[float] | None = None
    """One weight per reward function; None weighs all 1."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What a group's centred rewards are divided by: its own standard deviation, the batch's, or nothing."""
    reward_workers: OneOrMore = 4
    """Processes (and threads, for functions that no other process can import) that call reward functions."""
    reward_timeout: Positive = 60.0
    """Seconds one call, of one function for one group, may take; its process is then killed and replaced."""
    failed_reward: float | None = None
    """What a function gives completions whose call failed or timed out. None leaves it out of their rewards, and
    completions without any reward out of the loss. Failures are counted, and written to `failed_rewards.jsonl`."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "dapo"
    """grpo: mean over completions of token means. bnpo: token mean of the mini-batch. dr_grpo: token sum over
    completions x max_completion_len. dapo: token mean of the whole batch. cispo: dapo's with clipped, detached
    ratios times the log-probability."""
    loss_fn: Function | None = None
    """`f(logprobs, old_logprobs, ref_logprobs, advantages, mask, completion, config) -> (loss, sums)` in place of
    `train.grpo_loss`, whose docstring says what the arguments are. `loss_type` still chooses the normalizer, and
    `sums`, divided by the number of tokens, become metrics. Your function decides what `beta`, `epsilon`,
    `epsilon_high`, `delta` and `importance_level` mean. See `recipes/own_loss.py`."""
    importance_level: Literal["token", "sequence"] = "token"
    """Importance ratio per token (GRPO) or the geometric mean of a completion's (GSPO)."""
    epsilon: BelowOne = 0.2
    """Lower clip: ratios below 1 - epsilon give no further gradient."""
    epsilon_high: NotNegative | None = None
    """Upper clip: 1 + epsilon_high; None takes epsilon. DAPO uses 0.28."""
    delta: Positive | None = None
    """Dual clip: bound on the ratio where the advantage is negative (INTELLECT-2 uses 4); None sets no bound."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """What the clipped ratio is taken against: the policy before the batch's first update (the decoupled objective,
    arXiv:2505.24298), or the server's log-probs, which then need no correction."""
    off_policy_correction: Literal["truncate", "mask", "none"] = "truncate"
    """Weight of each token at `old_logprobs=trainer`, with w = p(trainer) / p(server). truncate: min(w, correction_cap)
    (TIS). mask: w between correction_floor and correction_cap, else 0 (IcePop, arXiv:2510.18855). none: 1."""
    correction_cap: Positive = 2.0
    """Upper bound on w. IcePop uses 5."""
    correction_floor: NotNegative = 0.5
    """Lower bound on w, for `mask`."""
    beta: NotNegative = 0.0
    """Weight of the KL penalty (k3) to the initial policy; 0 keeps no reference model."""
    num_iterations: OneOrMore = 1
    """Passes over each batch of completions."""
    num_minibatches: OneOrMore = 1
    """Optimizer steps each pass is split into, by prompts."""
    mask_truncated_completions: bool = False
    """Leave completions that ran into `max_completion_len` out of the loss."""

    # -- optimization --------------------------------------------------------------------------------------------
    batch_size: OneOrMore = 32
    """Prompts per step over all ranks, so that results do not depend on the number of ranks."""
    max_tokens_per_gpu: OneOrMore = 16384
    """Token budget of one forward/backward, padding included. Changes memory and speed, never the gradient."""
    max_steps: OneOrMore | None = None
    """Steps (batches of completions) to train; None takes `num_epochs`."""
    num_epochs: Positive = 1.0
    """Passes over the dataset where `max_steps` is None."""
    learning_rate: NotNegative = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up: constant, or falling to 0 at the last step."""
    warmup_ratio: Share = 0.0
    """Share of all steps over which the learning rate rises linearly."""
    weight_decay: NotNegative = 0.0
    """AdamW's decoupled weight decay, on matrices only."""
    adam_beta1: BelowOne = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: BelowOne = 0.999
    """Decay of AdamW's second moment."""
    grad_norm: NotNegative = 1.0
    """Gradients are clipped to this global norm; 0 clips nothing."""
    seed: int = 42
    """Seeds the order of prompts, LoRA's start and dropout."""

    # -- parallelism ---------------------------------------------------------------------------------------------
    use_fsdp: bool = False
    """Shard weights, gradients and optimizer state over the ranks (FSDP2) instead of replicating them (DDP)."""
    fsdp_bf16: bool = False
    """FSDP2 mixed precision: bfloat16 compute and gathers, weights and gradient sums in `dtype`."""
    collective_timeout: Positive = 3600.0
    """Seconds after which a collective that some rank never entered ends the run."""

    # -- logging -------------------------------------------------------------------------------------------------
    output_dir: str = "outputs"
    """Where metrics, completions and checkpoints go."""
    log_steps: OneOrMore = 1
    """Steps between lines on the terminal; `metrics.jsonl` has every step."""
    log_completions_steps: ZeroOrMore = 0
    """Steps between printed tables of sampled completions; 0 prints none."""
    eval_steps: ZeroOrMore = 0
    """Steps between evaluations, beside the first and the last; 0 evaluates only before and after."""
    use_wandb: bool = False
    """Log to Weights & Biases too."""
    wandb_project: str = "grpo"
    """Project of the run in Weights & Biases."""

    # -- checkpoints ---------------------------------------------------------------------------------------------
    save_steps: ZeroOrMore = 0
    """Steps between checkpoints, beside the last; 0 saves only the last."""
    keep_last_n: OneOrMore | None = None
    """Keep this many of the run's last checkpoints; None keeps all."""
    resume_from_checkpoint: str | None = None
    """A `checkpoint-<step>` to go on from, or `auto`: the newest one in `output_dir`, if there is one. A synchronous
    run goes on bit for bit, and in any run every group is trained or dropped once."""
    max_skipped_steps: OneOrMore = 10
    """A step whose loss or gradient is not finite is skipped; after so many in a row the run ends."""
    push_to_hub: bool = False
    """Upload the last checkpoint to the Hugging Face hub."""
    hub_repo_id: str | None = None
    """Repository to push to."""
    hub_private: bool = True
    """Create the repository as a private one."""

    def __post_init__(self) -> None:
        # First refuse settings that contradict each other, then settings that have no effect beside the others.
        names = [getattr(function, "__name__", "") for function in self.reward_funcs]
        num_weights = len(names if self.reward_weights is None else self.reward_weights)
        batch, parts = self.batch_size, self.num_minibatches
        tokens, longest = self.max_tokens_per_gpu, self.max_completion_len
        taken = ", ".join(sorted(_FIELD_PARAMS & set(self.sampling_params or {})))
        corrects = self.old_logprobs == "trainer" and self.off_policy_correction != "none"
        masks = corrects and self.off_policy_correction == "mask"
        for is_wrong, message in (
            ("" in names, "reward_funcs: each needs a __name__, which names its metric: use def"),
            (len(set(names)) < len(names), f"reward_funcs: {', '.join(names)}: two have one name, and so one metric"),
            (num_weights != len(names), f"reward_weights has {num_weights} values for {len(names)} reward_funcs"),
            (len(set(self.vllm_urls)) < len(self.vllm_urls), "vllm_urls names a server twice"),
            (batch % parts, f"batch_size={batch} cannot be divided into num_minibatches={parts} equal parts"),
            (tokens <= longest, f"max_tokens_per_gpu={tokens} must exceed max_completion_len={longest}"),
            (masks and self.correction_floor >= self.correction_cap, "correction_floor must be below correction_cap"),
            (self.delta and self.delta <= 1 + self.clip_high, f"delta={self.delta}: must exceed 1 + epsilon_high"),
            (self.bf16 and self.fsdp_bf16, "bf16 and fsdp_bf16 do the same in two ways: set one of them"),
            (self.guided_regex and self.guided_json, "guided_regex and guided_json exclude each other: set one"),
            (self.push_to_hub and not self.hub_repo_id, "push_to_hub needs hub_repo_id (user/name)"),
            (taken, f"sampling_params may not set {taken}: use the fields of TrainConfig"),
        ):
            if is_wrong:
                raise UserError(message)
        sources = (self.dataset_id, self.eval_dataset_id)
        is_name, eval_is_name = (isinstance(source, str) and not is_data_file(source) for source in sources)
        changed = changed_fields(self)
        for fields, has_effect, condition in (
            ("lora_rank lora_alpha lora_dropout lora_target_modules", self.use_peft, "without use_peft"),
            ("wandb_project", self.use_wandb, "without use_wandb"),
            ("hub_repo_id hub_private", self.push_to_hub, "without push_to_hub"),
            ("eval_steps eval_dataset_split", self.eval_dataset_id, "without eval_dataset_id"),
            ("eval_dataset_split", eval_is_name, "on an eval_dataset_id that is a file or a function"),
            ("dataset_config dataset_split", is_name, "on a dataset_id that is a file or a function"),
            ("stale_policy inflight_updates", self.max_staleness, "without max_staleness"),
            ("max_dropped_batches", self.drop_zero_advantage, "without drop_zero_advantage"),
            ("off_policy_correction", self.old_logprobs == "trainer", "without old_logprobs=trainer"),
            ("correction_cap", corrects, "without an off_policy_correction"),
            ("correction_floor", masks, "without off_policy_correction=mask"),
            ("extra_generations", not self.rollout_fn, "with a rollout_fn, which samples itself"),
            ("fsdp_bf16", self.use_fsdp, "without use_fsdp (bf16 has)"),
            ("num_epochs", self.max_steps is None, "beside max_steps, which --max_steps none unsets"),
            ("delta", self.loss_type != "cispo", "with loss_type=cispo"),
        ):
            for name in fields.split():
                if name in changed and not has_effect:
                    default = str(_DEFAULTS[name]).lower()
                    raise UserError(f"{name} has no effect {condition}: leave it at its default (--{name} {default})")

    @property
    def clip_high(self) -> float:
        """The upper clip actually used: `epsilon_high`, or `epsilon` where it is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def exact_sampling(self) -> bool:
        """True where tokens are drawn from the policy itself, so that server and trainer log-probs must agree."""
        truncated = self.top_k or self.guided_regex or self.guided_json or self.min_p or self.top_p not in (None, 1.0)
        return not truncated and set(self.sampling_params or {}) <= _EXACT_PARAMS


_FIELDS = TrainConfig.__pydantic_fields__  # type: ignore[attr-defined]
_HINTS = get_type_hints(TrainConfig, include_extras=True)
_DEFAULTS = {name: field.get_default(call_default_factory=True) for name, field in _FIELDS.items()}


def changed_fields(config: TrainConfig) -> dict[str, Any]:
    """The fields whose values differ from the defaults, or that have none."""
    values = {name: getattr(config, name) for name in _FIELDS}
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


def describe(config: TrainConfig) -> str:
    """What differs from the defaults, one line per field, and warnings."""
    changed = changed_fields(config)
    idle = sorted({"importance_level", "epsilon", "epsilon_high", "delta"} & set(changed))
    is_ratio_1 = config.old_logprobs == "trainer" and config.num_iterations * config.num_minibatches == 1
    warnings = {
        "top_k, top_p, min_p, guided decoding and penalties change the distribution sampled from, while the loss takes "
        "log-probs over the whole vocabulary: ratios are then not exact": not config.exact_sampling,
        f"{', '.join(idle)} without effect: with one update per batch the ratio to the trainer's own log-probs is 1; "
        "set old_logprobs to sampler, or num_iterations or num_minibatches above 1": idle and is_ratio_1,
        "dtype=bfloat16: weights lose updates smaller than 1/256 of them, which is most of them; keep float32 with "
        "bf16 or fsdp_bf16": config.dtype == "bfloat16" and not config.use_peft,
        f"attn_implementation={config.attn_implementation} counts only for a model that cannot share prefixes, or with "
        "--share_prefix false: prefix_attention.py has its own": config.attn_implementation and config.share_prefix,
    }
    lines = [f"  {name} = {_jsonable(value)}" for name, value in changed.items()]
    lines += [f"warning: {text}" for text, applies in warnings.items() if applies]
    return "\n".join(["configuration, where it differs from the defaults:", *lines])


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The resolved configuration as JSON values; functions become their dotted paths."""
    return {name: _jsonable(getattr(config, name)) for name in _FIELDS}


def _jsonable(value: Any) -> Any:
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return [_jsonable(item) for item in value] if isinstance(value, list) else value


def load_recipe(path: str) -> ModuleType:
    """Import a recipe and return its module, with `config` in it; other processes can import it by the same name.

    Raises:
        UserError: no such file, code that cannot be imported, no `config` in it, or what `TrainConfig` refuses.
    """
    if not Path(path).is_file():
        raise UserError(f"no recipe at {path}")
    try:
        name = _module_name(Path(path).resolve())
        sys.modules.pop(name, None)  # it may have been edited since
        module = importlib.import_module(name)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"recipe {path}: {error}") from error
    if not isinstance(getattr(module, "config", None), TrainConfig):
        raise UserError(f"{path} defines no `config = TrainConfig(...)`")
    return module


def _module_name(file: Path) -> str:
    # Dotted below this project or the working directory, else the file's stem. No name of another module is returned.
    importlib.invalidate_caches()
    folders = (_PROJECT, Path.cwd(), file.parent)
    _add_to_path(*folders)
    for folder in filter(file.is_relative_to, folders):
        name = ".".join(file.relative_to(folder).with_suffix("").parts)
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec and spec.origin and Path(spec.origin).resolve() == file:
                return name
    raise ImportError("its name does not end in .py, has another dot, or belongs to another module: rename it")


def _type_in_words(hint: Any) -> str:
    """A field's type as messages and `--help` write it: `one of a, b`, `int, at least 1, or none`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return args[1].title or _type_in_words(args[0])
    if origin is Literal:
        return "one of " + ", ".join(args)
    if origin in (Union, UnionType):
        words = [_type_in_words(option) for option in args]
        return (", or " if "," in words[0] else " or ").join(words)
    if origin is list:
        return f"list of {_type_in_words(args[0])}"
    names = {bool: "true or false", NoneType: "none", dict: "dict", Callable: "function"}
    return names.get(origin or hint, getattr(hint, "__name__", ""))


def _parsed(text: str, hint: Any, recipe: ModuleType | None) -> Any:
    """A command-line word as a value of the type; what does not fit stays text, which `TrainConfig` refuses."""
    origin, args = get_origin(hint), get_args(hint)
    if NoneType in args and text.lower() in ("none", "null"):
        return None
    if hint == Function:
        return text if "." in text or not recipe else f"{recipe.__name__}.{text}"
    if origin in (Annotated, Union, UnionType):
        return _parsed(text, args[0], recipe)  # str, or the only type beside None
    with suppress(ValueError):
        if hint is bool:
            return json.loads(text.lower())
        if origin is dict:
            return json.loads(text)
        if hint in (int, float):
            return hint(text)
        if origin is list:
            items = json.loads(text) if text.startswith("[") else text.split(",")
            return [_parsed(item, args[0], recipe) if isinstance(item, str) else item for item in items]
    return text


def parse_args(argv: list[str]) -> TrainConfig:
    """The configuration that `[recipe.py] --field value ...` means; `--help` says how values are written.

    Raises:
        UserError: a missing value, or what `load_recipe` or `TrainConfig` refuses.
        SystemExit: `--help`, once the fields are printed.
    """
    parser = argparse.ArgumentParser(
        usage="train.py [recipe.py] [--field value ...]",
        description="Lists are written a,b or as JSON, dictionaries as JSON, functions as dotted paths; "
        "a function's name without a dot is one of the recipe's.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=6),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    group: Any = parser
    for section, name in re.findall(r"^    (?:# -- (\w+)|(\w+):) ", Path(__file__).read_text("utf-8"), re.MULTILINE):
        if section:
            group = parser.add_argument_group(section)
        elif name in _FIELDS:
            default = "required" if _FIELDS[name].is_required() else f"default {str(_DEFAULTS[name]).lower()}"
            kind = f"{_type_in_words(_HINTS[name])} ({default})"
            group.add_argument(f"--{name}", metavar=kind, help=_FIELDS[name].description.replace("%", "%%"))
    words = [re.sub("^--[^=]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word) for word in argv]
    path = words.pop(0) if words and not words[0].startswith("-") else None
    try:
        given, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name} needs a value, after = where it begins with a dash") from None
    recipe = load_recipe(path) if path else None
    values = {name: _parsed(text, _HINTS[name], recipe) for name, text in vars(given).items()}
    values |= {word.lstrip("-").partition("=")[0]: word for word in rest[:1]}  # TrainConfig refuses an unknown field
    return dataclasses.replace(recipe.config, **values) if recipe else TrainConfig(**values)
