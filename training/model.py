"""The policy and its reference, loaded, with LoRA, under DDP or FSDP2.

What images need on top is in `training/vision.py`, imported only for models that have a tower.
"""

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as run_checkpointed
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from config import TrainConfig, UserError
from prefix_attention import (
    PackedBatch,
    attach,
    base_model,
    completion_logprobs,
    device_of,
)
from rollouts.group import Prompt
from rollouts.processor import placeholder_ids
from training.intact import check_complete
from training.lora import add_lora
from training.low_memory import in_4bit, use_differentiable_layout
from training.moving_reference import MovingReference
from training.vision import freeze_unused, frozen_modules, run_tower_always
from utils import gather_objects, is_main, naming
from weights.publish import unwrap

# -- Policy and reference --------------------------------------------------------------------------


def build_policy(
    config: TrainConfig, device: torch.device,
    example: Prompt | None = None, checkpoint: Path | None = None,
) -> Any:  # fmt: skip
    """Load, freeze and wrap the policy, spread over the ranks. Collective.

    `example` is a prompt with images, where the run has any. `checkpoint` is loaded instead of
    `model_id`, or with LoRA for its adapter alone.
    """
    num_ranks = dist.get_world_size()
    if num_ranks % (config.fsdp_shard_size or 1):
        raise UserError(
            f"fsdp_shard_size={config.fsdp_shard_size}: {num_ranks} ranks are no multiple of it"
        )

    # Weights in 4 bits cannot be broadcast from rank 0: every rank loads its own.
    on_meta = not is_main() and not config.base_4bit
    model = load_model(config, None if config.use_peft else checkpoint, on_meta)
    frozen = frozen_modules(model, config, has_images=example is not None)
    for name in frozen:
        for weight in model.get_submodule(name).parameters(recurse=False):
            weight.requires_grad_(False)

    if config.use_peft:  # what it adds is in train mode, for its own dropout
        model = add_lora(model, config, frozen, checkpoint)
    if example:
        freeze_unused(model, example)
        run_tower_always(model, example, device)
    return parallelize(model, config, device)


def share_prefixes(policy: Any, config: TrainConfig, example: Prompt | None = None) -> TrainConfig:
    """Swap in shared-prefix attention, or turn `share_prefix` off. Collective."""
    if not config.share_prefix:
        return config

    refusal = None
    try:
        _attach(policy, config, example, verify=True)
    except ValueError as error:
        refusal = str(error)
        # A rank that refuses alone may have left the others in a forward, where they wait for it.
        print(f"rank {dist.get_rank()}: {refusal}", flush=True)
    reasons = [reason for reason in gather_objects(refusal) if reason]
    if reasons and is_main():
        print(f"share_prefix is off, each prompt is forwarded once per completion: {reasons[0]}")
    return replace(config, share_prefix=not reasons)


def build_reference(
    policy: Any, config: TrainConfig, device: torch.device, example: Prompt | None = None
) -> Any:
    """A function of a row and images: `token_logprobs` under the reference.

    The reference is `reference_id`, else the policy without its adapter, or `model_id` as it was
    before training; a `MovingReference` with `reference_decay`. Returns None where there is none,
    or a part of the run has it. Collective.
    """
    if not config.has_reference or config.reference_is_a_part:
        return None

    model = unwrap(policy)
    without_adapter: Any = nullcontext
    if config.use_peft and not config.reference_id:
        without_adapter = model.disable_adapter
    else:
        named = replace(config, model_id=config.reference_id or config.model_id, base_4bit=False)
        model = load_model(named, on_meta=not is_main()).requires_grad_(False)
        if example:
            run_tower_always(model, example, device)
        model = parallelize(model, named, device)
        if config.share_prefix:
            # `share_prefixes` has proved it on the policy, which another model need not be like.
            with naming("reference_id: set share_prefix=false"):
                _attach(model, config, example, verify=config.reference_id is not None)

    logprobs_of = partial(token_logprobs, config=config)
    if config.reference_decay is not None:
        return MovingReference(policy, model, logprobs_of, config)

    def reference(row: PackedBatch, images: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), without_adapter():
            return logprobs_of(model, row, images)

    return reference


def _attach(model: Any, config: TrainConfig, example: Prompt | None, verify: bool) -> None:
    """Swap shared-prefix attention into a model.

    Raises:
        ValueError: the attention would not be exact.
    """
    with autocast(config, device_of(model)):
        attach(
            model,
            verify=verify,
            example=(example.token_ids, example.images.inputs) if example else None,
        )


# -- Loading ---------------------------------------------------------------------------------------


def with_bf16(config: TrainConfig) -> TrainConfig:
    """Decide a `bf16` of None.

    It is on where CUDA computes in bfloat16 and the weights that train are fp32. Under FSDP2
    `fsdp_bf16` is on in its place.
    """
    if config.bf16 is not None:
        return config

    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    wanted = has_bf16 and (config.dtype == "float32" or config.use_peft)
    if config.use_fsdp:
        return replace(config, bf16=False, fsdp_bf16=wanted or config.fsdp_bf16)
    return replace(config, bf16=wanted)


def load_model_config(config: TrainConfig) -> tuple[Any, Any]:
    """Read transformers' configuration of `model_id`, and choose its class.

    Raises:
        UserError: the model is quantized.
    """
    model_config = AutoConfig.from_pretrained(
        config.model_id, trust_remote_code=config.trust_remote_code
    )
    quantized = getattr(model_config, "quantization_config", None)
    method = dict(quantized or {}).get("quant_method")
    if method and method != "mxfp4":  # mxfp4 is loaded in bfloat16
        raise UserError(
            f"model_id={config.model_id} is quantized ({method}), and cannot be trained: take the "
            "model that it was made from"
        )
    if getattr(model_config, "vision_config", None) is not None:
        return model_config, AutoModelForImageTextToText
    return model_config, AutoModelForCausalLM


def load_model(config: TrainConfig, checkpoint: Path | None = None, on_meta: bool = False) -> Any:
    """Load a model on the CPU, in eval mode: without dropout, noise and skipped layers.

    With them log-probs would differ from the server's, and from forward to forward. `on_meta` gives
    its shapes alone.
    """
    disable_progress_bar()  # ours is the one to watch
    model_config, model_class = load_model_config(config)
    attention = config.attn_implementation
    if getattr(model_config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        if attention == "sdpa":
            raise UserError(
                f"attn_implementation=sdpa leaves out the softcap of {config.model_id}: "
                "leave it at none"
            )
        attention = attention or "eager"  # transformers would take sdpa

    source: Any = checkpoint or config.model_id
    if Path(source).exists():
        source = Path(source).resolve()  # as an adapter names its model by it
    quantization = None
    if config.base_4bit:
        quantization = in_4bit(config)
    with naming(f"the weights of {source} cannot be loaded"):
        model, found = model_class.from_pretrained(
            source,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            device_map="meta" if on_meta else None,
            quantization_config=quantization,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_complete` refuses them
        )
    if not on_meta:
        reshaped = {name for name, _, _ in found["mismatched_keys"]}
        # What the file has with other values transformers unties, and vLLM does not.
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        untied = tied.keys() - model.all_tied_weights_keys.keys()
        check_complete(source, found["missing_keys"], found["unexpected_keys"], reshaped, untied)
    if config.base_4bit:
        use_differentiable_layout(model)
    if model.can_generate():
        model.generation_config = KeptDefaults.from_dict(model.generation_config.to_dict())
    return model.eval()


class KeptDefaults(GenerationConfig):
    """A model's defaults of sampling, which training does not use and checkpoints keep.

    transformers loads some that it refuses to save.
    """

    def validate(self, *_: Any, **__: Any) -> None:
        """Take them as they are."""


# -- Over the ranks --------------------------------------------------------------------------------


def parallelize(model: Any, config: TrainConfig, device: torch.device) -> Any:
    """Spread rank 0's model over all ranks, by FSDP2 or DDP. Collective.

    A base in 4 bits is on each of them already. The result is on `device`, but for weights with
    `fsdp_offload`, which are on the CPU.
    """
    if config.torch_compile:
        for layer in _layers(model):
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if config.gradient_checkpoint:
        recompute_layers(model)
    if dist.get_world_size() == 1 and not config.use_fsdp:
        return model.to(device)

    if config.base_4bit:
        model = model.to(device)
    else:
        _spread(model, config, device)
    if not config.use_fsdp and any(weight.requires_grad for weight in model.parameters()):
        # torch 2.11 warns of `broadcast_buffers`, and lacks its successor.
        with catch_warnings(action="ignore", category=FutureWarning):
            model = nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        model.register_comm_hook(None, _sum_over_ranks)
    return model


@torch.no_grad()
def _spread(model: Any, config: TrainConfig, device: torch.device) -> None:
    """Give each rank its part of rank 0's weights and buffers: all, or a shard. Collective."""
    whole: dict[str, Tensor] = {}
    if is_main():  # only rank 0 holds a whole model
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            whole[name] = tensor.detach()
    model.to("meta")
    base_model(model).tie_weights()  # to another device each of two tied ones goes by itself
    if config.use_fsdp:
        _shard(model, config, device)

    model.to_empty(device="cpu" if config.fsdp_offload else device)
    base_model(model).tie_weights()

    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_main():
            values = whole.pop(name).to(device)
        else:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        if isinstance(tensor, DTensor):
            shard = distribute_tensor(values, tensor.device_mesh, tensor.placements)
            tensor.to_local().copy_(shard.to_local())
        else:
            dist.broadcast(values, 0)
            tensor.data = values  # buffers are on the device with `fsdp_offload`, too
        del values  # as there may be no room for two


def _layers(model: Any) -> list[nn.Module]:
    """Layers of the decoder and of a tower, which transformers never splits."""
    kinds = base_model(model)._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in kinds]


def recompute_layers(model: Any) -> None:
    """Let each layer keep its inputs alone, and run again in the backward.

    transformers' own switch works in train mode, with its dropout and noise.

    Raises:
        UserError: the model has no layers that are known.
    """
    known = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    layers = known or _layers(model)  # the latter where the model has code of its own
    if not layers:
        raise UserError("gradient_checkpoint: this model names no layers: leave it off")
    for layer in layers:
        layer.forward = partial(run_checkpointed, layer.forward, use_reentrant=False)
    base = base_model(model)
    base.forward = partial(base.forward, use_cache=False)  # which they would fill twice


def _shard(model: Any, config: TrainConfig, device: torch.device) -> None:
    """Let FSDP2 shard each layer, and then the rest.

    Shards lie on all ranks, or with `fsdp_shard_size` on each group of so many.
    """
    num_shards = config.fsdp_shard_size
    sizes = {"shards": dist.get_world_size()}
    if num_shards:
        sizes = {"replicas": dist.get_world_size() // num_shards, "shards": num_shards}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():  # of two dimensions they would have torch's time-out
        _set_pg_timeout(timedelta(seconds=config.collective_timeout), group)

    precision = MixedPrecisionPolicy()
    if config.fsdp_bf16:
        # Gradients are summed in the dtype of the weights that train.
        sums = torch.float32 if config.use_peft else getattr(torch, config.dtype)
        precision = MixedPrecisionPolicy(torch.bfloat16, sums)
    offload = OffloadPolicy()
    if config.fsdp_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    for module in [*_layers(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        module.set_gradient_divide_factor(1.0)  # a sum, as `optimizer_step` normalizes once
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def _sum_over_ranks(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's reduction of gradients: a sum, as `optimizer_step` normalizes once."""
    return (
        dist.all_reduce(bucket.buffer(), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )


# -- Training --------------------------------------------------------------------------------------


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """The config's autocast: bfloat16, or none."""
    # A cache of weights would outlive those that FSDP2 gathers.
    return torch.autocast(
        device.type, torch.bfloat16, bool(config.bf16), cache_enabled=not config.use_fsdp
    )


def token_logprobs(
    model: nn.Module, row: PackedBatch, images: dict[str, Tensor], config: TrainConfig,
    return_entropy: bool = False,
) -> Any:  # fmt: skip
    """`completion_logprobs` under autocast, without probability on tokens no server samples."""
    forbidden = placeholder_ids(base_model(model).config)
    with autocast(config, row.targets.device):
        return completion_logprobs(
            model, row, config.temperature, return_entropy, forbidden, **images
        )
