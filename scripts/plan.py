"""What a recipe takes of a GPU's memory, from shapes alone: `python scripts/doctor.py recipe.py --plan 24GB`.

A row of the policy runs forward and backward on tensors without data, whose bytes are counted. Nothing is loaded, and no
GPU or server is asked. Images are not counted.
"""

import argparse
import math
import re
import shlex
import weakref
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM

import prefix_attention
from config import TrainConfig, UserError
from prefix_attention import attach, base_model, completion_logprobs, pack
from training.loading import add_lora, load_model_config
from training.model import recompute_layers, with_bf16

GB = 1e9
CONTEXT_GB = 0.6  # CUDA's own, and cuBLAS's workspaces
SERVER_GB = 2.0  # vLLM's beside weights and cache: CUDA's own, graphs, a step's activations
ASLEEP_GB = 1.0  # what is left of that while it sleeps
MOST_GB = 1000  # of a card; more is a mistake, as --plan 4090
USABLE = 0.93  # of a card: the rest is lost to fragments
PROMPT_TOKENS = 512  # of a prompt, which no data set is asked for
SEQUENCES = (64, 32, 16)  # that the server samples at once, if the recipe asks for as many
BYTES_4BIT = 0.5 + 4 / 64  # a weight, with an fp32 scale for each block of 64
BYTES_8BIT = 1 + 4 / 256  # a moment, with an fp32 scale for each block of 256
LENGTHS = (1024, 4096, 16384, 65536)  # tokens of rows that are run; between them lines are drawn


# -- Memory without memory -------------------------------------------------------------------------


class ByteCounter(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it gives."""
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 cannot do it without memory
            return kwargs["out"]
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return found

    def count(self, tensor: Tensor) -> None:
        """Count a tensor, once for all that share its memory."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        num_bytes = storage.nbytes()
        self._known[storage] = num_bytes
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, num_bytes)

    def _forget(self, num_bytes: int) -> None:
        self.now -= num_bytes


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Let prefix_attention.py take the ways that it takes on a GPU."""
    # Compiled, its two kernels allocate nothing but what they give.
    empty = torch.empty_like
    read = lambda logits, targets, _: [empty(targets, dtype=logits.dtype) for _ in range(3)]
    derive = lambda logits, *_: empty(logits)
    kernels = patch.multiple(prefix_attention, _read=read, _derive=derive)
    with kernels, patch.object(FakeTensor, "is_cuda", True):
        yield


def _without_data(model: nn.Module) -> None:
    """Give a model on the meta device tensors that operations take, and that have no memory."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in made:
                tensor = torch.empty(weight.shape, dtype=weight.dtype)
                made[id(weight)] = nn.Parameter(tensor, weight.requires_grad)
            module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


# -- A policy --------------------------------------------------------------------------------------


class OnPaper:
    """A recipe's policy, by its shapes; `model_config` is transformers'."""

    def __init__(self, config: TrainConfig, model_config: Any, peaks: Any = None):
        self.config = config
        self.peaks: dict[Any, list[int]] = {} if peaks is None else peaks  # of rows, by kind
        self.text_config = model_config.get_text_config(decoder=True)
        self.in_half = bool(config.bf16 or config.fsdp_bf16)  # the forward computes in bfloat16

    def build(self) -> Any:
        """The model on the meta device, with its adapters."""
        config = self.config
        with torch.device("meta"):
            own, dtype = deepcopy(self.text_config), getattr(torch, config.dtype)
            model = AutoModelForCausalLM.from_config(own, dtype=dtype)
            model.eval()
            if config.use_peft:
                model = add_lora(model, config)
            if config.gradient_checkpoint:
                recompute_layers(model)
        return model

    model = cached_property(build)  # for its weights

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, the adapter's too."""
        total = sum(weight.nbytes for weight in self.model.parameters())
        if self.config.base_4bit:
            for matrix in self._base_matrices:
                total -= matrix.nbytes - BYTES_4BIT * matrix.numel()
        return total

    @property
    def _base_matrices(self) -> list[Tensor]:
        """Weights of the base's linear layers, but the head: those that `base_4bit` quantizes."""
        head = self.model.get_output_embeddings()
        return [
            module.weight
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and ".lora_" not in name and module is not head
        ]

    @property
    def moment_bytes(self) -> float:
        """Bytes of AdamW's two moments."""
        if self.config.adam_8bit:
            num = sum(w.numel() for w in self.model.parameters() if w.requires_grad)
            return 2 * BYTES_8BIT * num
        return 2 * self.trained_bytes

    @property
    def trained_bytes(self) -> int:
        """Bytes of the weights that train."""
        return sum(w.nbytes for w in self.model.parameters() if w.requires_grad)

    @property
    def num_weights(self) -> int:
        """Weights of the model, without the adapter."""
        return sum(w.numel() for n, w in self.model.named_parameters() if ".lora_" not in n)

    def row_bytes(self, num_tokens: float) -> float:
        """Bytes of a row at its peak, beside weights and gradients."""
        # The peak is convex in the length, so lines between those that were run never underestimate it.
        at_most = float(np.interp(num_tokens, LENGTHS, self._row_peaks))
        if self.config.base_4bit:  # one matrix at a time is dequantized, and then cast to 16 bits
            num_bytes = 2 if self.config.dtype == "bfloat16" else 4 + 2
            at_most += num_bytes * max(matrix.numel() for matrix in self._base_matrices)
        return at_most

    @property
    def _row_peaks(self) -> list[int]:
        config = self.config
        kind = (config.gradient_checkpoint, config.use_peft, config.dtype, self.in_half)
        if kind not in self.peaks:
            self.peaks[kind] = [self.measured_row(length) for length in LENGTHS]
        return self.peaks[kind]

    def measured_row(self, num_tokens: int, has_gradients: bool = True) -> int:
        """Bytes of a row at its peak, which is run; all but its first token are completion."""
        model = self.build()
        (row,) = pack([([5], [[5] * num_tokens])])  # the head runs on all of its tokens
        counter = ByteCounter()
        with _as_on_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True):
            _without_data(model)
            attach(model, verify=False)
            for weight in model.parameters():
                counter.count(weight)
                if has_gradients and weight.requires_grad:  # as from a batch's second row on
                    weight.grad = torch.empty_like(weight)
                    counter.count(weight.grad)
            start = counter.now
            with counter:
                with torch.autocast("cpu", torch.bfloat16, enabled=self.in_half):
                    logprobs = completion_logprobs(model, row)
                logprobs.sum().backward()
        return counter.peak - start

    @property
    def kept_bytes(self) -> float:
        """Bytes that stay between steps: weights, AdamW's two moments, a reference."""
        if self.config.fsdp_offload:
            return 0.0  # they are in the host's memory
        return self.weight_bytes + self.moment_bytes + self.reference_bytes

    @property
    def reference_bytes(self) -> int:
        """Bytes of a reference that is a model of its own, as `build_reference` loads it."""
        config = self.config
        is_here = config.has_reference and not config.reference_is_a_part
        if is_here and (config.reference_id or not config.use_peft):
            return self.num_weights * getattr(torch, config.dtype).itemsize
        return 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients, which are there while a batch trains."""
        return 0 if self.config.fsdp_offload else self.trained_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes that `fsdp_offload` has on the GPU: embeddings, head, two layers, gradients, in 16 bits."""
        if not self.config.fsdp_offload:
            return 0
        names = base_model(self.model)._no_split_modules or ()
        modules = [each for each in self.model.modules() if type(each).__name__ in names]
        layers = [sum(weight.numel() for weight in each.parameters()) for each in modules]
        rest = sum(weight.numel() for weight in self.model.parameters()) - sum(layers)
        copies = 1 if self.config.use_peft else 2
        return 2 * copies * (rest + 2 * max(layers, default=0))


# -- A card ----------------------------------------------------------------------------------------


class Placement(Enum):
    """Where a run's server is."""

    BESIDE = "with its server"
    ASLEEP = "with its server, which sleeps while it trains"
    ELSEWHERE = "without a server"


@dataclass
class Plan:
    """A policy on a card, with its server or without."""

    policy: OnPaper
    card_gb: float
    placement: Placement
    num_sequences: int = 0  # that the server has room for at once
    changes: dict[str, Any] = field(default_factory=dict)  # of the recipe

    @property
    def server_parts(self) -> dict[str, float]:
        """GB of the server that samples, by what takes them; its weights are in 16 bits."""
        if self.placement is Placement.ELSEWHERE:
            return {}
        text = self.policy.text_config
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        length = PROMPT_TOKENS + self.policy.config.max_completion_len
        token_bytes = 2 * 2 * text.num_hidden_layers * heads * size  # keys and values, in 16 bits
        cache_bytes = token_bytes * length * self.num_sequences
        return {
            "the server's weights": 2 * self.policy.num_weights / GB,
            f"its cache, {self.num_sequences} sequences of {length:,}": cache_bytes / GB,
            "its graphs and the like": SERVER_GB,
        }

    def parts(self, num_tokens: int) -> dict[str, float]:
        """GB by what takes them in training, with rows of so many tokens."""
        policy = self.policy
        parts = {"weights, gradients, optimizer": (policy.kept_bytes + policy.gradient_bytes) / GB}
        if policy.config.fsdp_offload:
            parts = {"weights on their way": policy.gathered_bytes / GB}
        parts[f"a row of {num_tokens:,} tokens"] = policy.row_bytes(num_tokens) / GB
        parts["CUDA"] = CONTEXT_GB
        if self.placement is Placement.ASLEEP:
            return parts | {"the server, asleep": ASLEEP_GB}
        return parts | self.server_parts

    def sampling_parts(self) -> dict[str, float]:
        """GB by what takes them while the server samples, if it sleeps in training."""
        if self.placement is not Placement.ASLEEP:
            return {}
        kept = {"weights, optimizer": self.policy.kept_bytes / GB, "CUDA": CONTEXT_GB}
        return kept | self.server_parts

    def fits(self, num_tokens: int) -> bool:
        """True where the card has room for rows of so many tokens."""
        phases = (self.parts(num_tokens), self.sampling_parts())
        return max(sum(parts.values()) for parts in phases) <= USABLE * self.card_gb

    @cached_property
    def most_tokens(self) -> int:
        """The longest row that fits, of 65,536 tokens at most; 0 where the shortest does not."""
        least = self.policy.config.max_completion_len + PROMPT_TOKENS
        lengths = range(least // 256 * 256 + 256, LENGTHS[-1] + 1, 256)
        num_fitting = bisect(lengths, False, key=lambda num_tokens: not self.fits(num_tokens))
        return lengths[num_fitting - 1] if num_fitting else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of a row: as many as the recipe asks for, if they fit."""
        return min(self.most_tokens, self.policy.config.max_tokens_per_gpu)

    def command(self, recipe: list[str]) -> str:
        """The command that starts trainer and server."""
        fields = {**self.changes, "max_tokens_per_gpu": self.num_tokens}
        if self.placement is Placement.ASLEEP:
            fields["max_staleness"] = 0
        given_anew = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in fields:
            given_anew.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
        _, words = given_anew.parse_known_args(recipe)  # without these fields
        for name, value in fields.items():
            words += [f"--{name}", str(value).lower()]
        if self.placement is Placement.ELSEWHERE:
            return shlex.join(["torchrun", "train.py", *words, "--vllm_urls", "http://..."])
        if self.placement is Placement.ASLEEP:
            words.append("--sleep")
        share = math.ceil(100 * sum(self.server_parts.values()) / self.card_gb) / 100
        options = f"--gpu-memory-utilization {share} --max-num-seqs {self.num_sequences}"
        return shlex.join(["python", "scripts/launch.py", *words, f"--server_options={options}"])


# What makes a recipe fit, what changes least first. Only LoRA's base may be in bf16: weights that
# train lose updates.
LORA = {"gradient_checkpoint": True, "use_peft": True, "dtype": "bfloat16"}
CHANGES: list[dict[str, Any]] = [
    {},
    {"gradient_checkpoint": True},
    {"gradient_checkpoint": True, "adam_8bit": True},
    LORA,
    LORA | {"base_4bit": True},
    LORA | {"use_fsdp": True, "fsdp_offload": True},
]
# Other training, from another base, or out of the host's memory.
LAST_RESORTS = {"use_peft", "base_4bit", "fsdp_offload"}
HAS_BF16: Any = {"is_available": lambda: True, "is_bf16_supported": lambda **_: True}  # of a GPU


class Variants:
    """A recipe as it is, and changed so that it takes less."""

    def __init__(self, config: TrainConfig, model_config: Any = None, all_changes: Any = CHANGES):
        try:
            model_config = model_config or load_model_config(config)[0]
        except OSError as error:
            cause = str(error).partition("\n")[0]
            told = f"model_id={config.model_id} is no model's folder, and the hub does not give it"
            raise UserError(f"{told}: {cause}") from None
        if hasattr(model_config, "vision_config"):
            raise UserError(f"--plan: {config.model_id} has a vision tower, which is not counted")
        self._variants: list[tuple[dict[str, Any], OnPaper]] = []
        peaks: dict[Any, list[int]] = {}
        for changes in all_changes:
            own = {k: value for k, value in changes.items() if getattr(config, k) != value}
            if "use_peft" in own:  # adapters learn at about ten times the rate of all weights
                own["learning_rate"] = float(f"{10 * config.learning_rate:.3g}")
            is_known = own in [known for known, _ in self._variants]
            if is_known or (config.use_peft and "adam_8bit" in own):  # an adapter's are small
                continue
            try:
                with patch.multiple(torch.cuda, **HAS_BF16):  # where `bf16` is None, this decides
                    changed = with_bf16(replace(config, **own))
            except UserError:  # the recipe's other settings forbid it
                continue
            self._variants.append((own, OnPaper(changed, model_config, peaks)))

    def best(self, card_gb: float, placement: Placement) -> Plan | None:
        """Find the least change that fits, or a mild one that makes short rows longer."""
        best: Plan | None = None
        for changes, policy in self._variants:
            if best and changes.keys() & LAST_RESORTS:  # a recipe that fits needs none
                break
            for num_sequences in _numbers_of_sequences(policy.config, placement):
                plan = Plan(policy, card_gb, placement, num_sequences, changes)
                if plan.most_tokens and (not best or best.num_tokens < plan.num_tokens):
                    best = plan
        return best

    def with_shorter_completions(self, card_gb: float, placement: Placement) -> Plan | None:
        """As `best`, where nothing fits: with the last change, and shorter completions."""
        changes, policy = self._variants[-1]
        num_sequences = _numbers_of_sequences(policy.config, placement)[-1]
        lengths = range(256, policy.config.max_completion_len, 256)
        for length in reversed(lengths):
            shorter = copy(policy)  # whose rows have been run
            shorter.config = replace(policy.config, max_completion_len=length)
            own = changes | {"max_completion_len": length}
            plan = Plan(shorter, card_gb, placement, num_sequences, own)
            if plan.most_tokens:
                return plan
        return None


def _numbers_of_sequences(config: TrainConfig, placement: Placement) -> list[int]:
    """Numbers of sequences that a server may be planned for, the largest first."""
    if placement is Placement.ELSEWHERE:
        return [0]
    num_completions = config.batch_size * config.num_generations
    return [min(num_completions, number) for number in SEQUENCES]


def print_plan(config: TrainConfig, card: str, recipe: list[str]) -> None:
    """Print what a recipe takes of a card such as `24GB`, and commands that fit."""
    match = re.fullmatch(r"(\d+(\.\d+)?) ?(GB)?", card)
    if not match or float(match[1]) > MOST_GB:
        raise UserError(f"--plan {card}: it needs the memory of a GPU, such as 24GB")
    card_gb = float(match[1])
    variants = Variants(config)
    length = config.max_completion_len
    print(f"for prompts of {PROMPT_TOKENS} tokens and completions of {length:,}; no data is read")
    for placement in Placement:
        plan = variants.best(card_gb, placement)
        place = f"on {card_gb:g} GB {placement.value}"
        if not plan:
            print(f"\n{config.model_id} does not fit {place}")
            plan = variants.with_shorter_completions(card_gb, placement)
        elif "use_peft" in plan.changes:
            print(f"\n{config.model_id}, all weights, does not fit {place}; LoRA does:")
        if plan:
            print_fit(plan, recipe)


def print_fit(plan: Plan, recipe: list[str]) -> None:
    """Print what a plan takes, and its command."""
    config = plan.policy.config
    how = "LoRA" if config.use_peft else "all weights"
    if "max_completion_len" in plan.changes:
        how += f", completions of {config.max_completion_len} tokens"
    print(f"\n{config.model_id}, {how}, on {plan.card_gb:g} GB {plan.placement.value}")
    _print_parts(plan.parts(plan.num_tokens))
    if plan.sampling_parts():
        print("  while the server samples:")
        _print_parts(plan.sampling_parts())
    print(f"  max_tokens_per_gpu may be up to {plan.most_tokens:,}")
    print(f"  {plan.command(recipe)}")


def _print_parts(parts: dict[str, float]) -> None:
    for name, gb in {**parts, "together": sum(parts.values())}.items():
        print(f"  {name:<40}{gb:6.1f} GB")
