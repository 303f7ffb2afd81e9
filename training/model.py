"""The policy and its reference, with LoRA and vision towers, under DDP or FSDP2."""

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
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as run_checkpointed
from transformers.modeling_layers import GradientCheckpointingLayer

from config import TrainConfig, UserError
from prefix_attention import (
    PackedBatch,
    attach,
    base_model,
    completion_logprobs,
    device_of,
    evaluating,
)
from rollouts.group import Prompt
from rollouts.processor import placeholder_ids
from training.loading import add_lora, load_model
from utils import broadcast_object, gather_objects, is_main, naming
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

    shares = True
    try:
        _attach(policy, config, example, verify=True)
    except ValueError as error:
        shares = False
        # By each rank: one that refuses alone may have left the others in a forward.
        told = f"share_prefix is off, each prompt is forwarded once per completion: {error}"
        print(told, flush=True)
    return replace(config, share_prefix=all(gather_objects(shares)))


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

    if config.reference_decay is not None:
        return MovingReference(policy, model, config)

    def reference(row: PackedBatch, images: dict[str, Tensor]) -> Any:
        with torch.no_grad(), without_adapter():
            return token_logprobs(model, row, images, config)

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


# -- Vision towers ---------------------------------------------------------------------------------


def frozen_modules(model: Any, config: TrainConfig, has_images: bool) -> list[str]:
    """Names of modules that do not train.

    Without images they are all but the language model, with images the tower if
    `freeze_vision_tower` is set. A model without a tower has none.
    """
    tower = model.get_encoder(modality="image")
    if tower is model or (has_images and not config.freeze_vision_tower):
        return []

    if has_images:  # the projector trains: Qwen's is `merger` in the tower
        frozen = {module for name, module in tower.named_modules() if "merger" not in name}
    else:
        language_model = {*model.get_decoder().modules()}
        language_model |= {model.get_input_embeddings(), model.get_output_embeddings()}
        frozen = set(model.modules()) - language_model
    return [name for name, module in model.named_modules() if module in frozen]


def image_features(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Features of images as the model's decoder gets them.

    Args:
        model: wrapped or not.
        inputs: the processor's tensors of one or more images, on the model's device.

    Returns:
        Tensors in the model's own number and shapes.
    """
    output = base_model(model).get_image_features(**inputs)
    names = ("pooler_output", "deepstack_features")
    parts = [output[name] for name in names if name in output]
    return tree_leaves(parts or dict(output))  # some models name them otherwise


def freeze_unused(model: nn.Module, example: Prompt) -> None:
    """Freeze weights of the tower that no image feature depends on. Collective.

    They would get no gradient, and ranks would wait for one. LLaVA takes its features before the
    last layer.
    """
    tower = base_model(model).get_encoder(modality="image")
    weights = [weight for weight in tower.parameters() if weight.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if weights and is_main():  # whose model is whole, and on the CPU
        total: Any = sum(feature.sum() for feature in image_features(model, example.images.inputs))
        gradients = torch.autograd.grad(total, weights, allow_unused=True)

    is_used = broadcast_object([gradient is not None for gradient in gradients])
    for weight, trains in zip(weights, is_used, strict=True):
        weight.requires_grad_(trains)


def run_tower_always(model: nn.Module, example: Prompt, device: torch.device) -> None:
    """Let every forward run the vision tower.

    The tower takes `example`'s images where the row has none: ranks with and without images in
    their row meet in the tower's collectives.
    """
    base = base_model(model)
    example_inputs = {name: value.to(device) for name, value in example.images.inputs.items()}
    row_has_images = False

    def note_images(_: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        nonlocal row_has_images
        row_has_images = not example_inputs.keys().isdisjoint(inputs)

    def add_nothing(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not row_has_images:
            nothing = sum(0 * feature.sum() for feature in image_features(base, example_inputs))
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + nothing
        return args, inputs

    base.register_forward_pre_hook(note_images, with_kwargs=True)
    base.get_decoder().register_forward_pre_hook(add_nothing, with_kwargs=True)


# -- A reference that follows the policy -----------------------------------------------------------


class MovingReference:
    """Log-probs under weights that become d · reference + (1 - d) · policy.

    With LoRA these are the averages of A and of B (not of their product). For the reference's
    forward they are put into the policy, so that the base is in memory once. Without LoRA the
    reference is a model of its own.
    """

    def __init__(self, policy: nn.Module, model: nn.Module, config: TrainConfig):
        """Begin at the policy's weights.

        Args:
            policy: whose weights it follows.
            model: a frozen one that begins with the same weights; with LoRA the policy's own.
            config: reference_decay, reference_steps.
        """
        self.config = config
        self.model = model
        self.swaps_weights = model is unwrap(policy)
        self.policy_weights: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}  # by the policy's names, too
        for name, weight in unwrap(policy).named_parameters():
            if weight.requires_grad:
                self.policy_weights[name] = weight
                own = model.get_parameter(name).detach()
                self.weights[name] = own.clone() if self.swaps_weights else own

    @torch.no_grad()
    def __call__(self, row: PackedBatch, images: dict[str, Tensor]) -> Any:
        """`token_logprobs` of a row.

        Never call it between the policy's forward and its backward: with LoRA it exchanges the
        policy's weights, and restores them.
        """
        if not self.swaps_weights:
            return token_logprobs(self.model, row, images, self.config)

        self._swap()
        try:
            with evaluating(self.model):  # without dropout
                return token_logprobs(self.model, row, images, self.config)
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange the policy's weights and the averages."""
        for name, weight in self.policy_weights.items():
            kept = weight.clone()
            weight.copy_(self.weights[name])
            self.weights[name].copy_(kept)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # forgets what its root has gathered for the last forward

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move towards the policy after a step, if this one is due."""
        if step % self.config.reference_steps:
            return
        decay: Any = self.config.reference_decay
        averages = list(self.weights.values())
        # DTensors have no `lerp_` of their own.
        torch._foreach_lerp_(averages, list(self.policy_weights.values()), 1 - decay)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # as in `_swap`


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
    whole: dict[str, Tensor] = {}  # of values on rank 0, on the others of shapes alone
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        whole[name] = tensor.detach()
    model.to("meta")
    base_model(model).tie_weights()  # to another device each of two tied ones goes by itself
    if config.use_fsdp:
        _shard(model, config, device)

    model.to_empty(device="cpu" if config.fsdp_offload else device)
    base_model(model).tie_weights()

    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        values = whole.pop(name)
        values = values.to(device) if is_main() else torch.empty_like(values, device=device)
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
