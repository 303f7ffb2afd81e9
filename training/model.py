"""The model: loaded, frozen, with LoRA, under DDP or FSDP2; its reference; its weights in checkpoint form."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import chain, groupby
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
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from config import TrainConfig, UserError
from prefix_attention import (
    PackedBatch,
    attach,
    base_model,
    completion_logprobs,
    device_of,
    needs_rare_attention,
)
from rollouts.data import Prompt, placeholder_ids
from utils import broadcast_object, gather_objects, is_main, naming


def with_bf16(config: TrainConfig) -> TrainConfig:
    """Decide a `bf16` of None: on where CUDA computes in it and what trains is fp32; under FSDP2 by `fsdp_bf16`."""
    if config.bf16 is not None:
        return config
    can = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    wanted, sharded = can and (config.dtype == "float32" or config.use_peft), config.use_fsdp
    return replace(
        config, bf16=wanted and not sharded, fsdp_bf16=sharded and (wanted or config.fsdp_bf16)
    )


def load_model_config(config: TrainConfig) -> tuple[Any, Any]:
    """transformers' configuration of `model_id`, and the class for such models: with a vision part, or without."""
    model_config = AutoConfig.from_pretrained(
        config.model_id, trust_remote_code=config.trust_remote_code
    )
    has_vision = getattr(model_config, "vision_config", None) is not None
    return model_config, AutoModelForImageTextToText if has_vision else AutoModelForCausalLM


def load_model(config: TrainConfig, checkpoint: Path | None = None, on_meta: bool = False) -> Any:
    """The model of the config or a checkpoint, on the CPU (`on_meta`: without values), without dropout and noise."""
    disable_progress_bar()  # ours is the one to watch
    shape, loads = load_model_config(config)
    softcap = getattr(shape.get_text_config(decoder=True), "attn_logit_softcapping", None)
    attention = config.attn_implementation or (
        "eager" if softcap else None
    )  # transformers would take sdpa
    if softcap and attention == "sdpa":
        raise UserError(
            f"attn_implementation=sdpa leaves out the softcap of {config.model_id}: leave it at none"
        )
    local = Path(config.model_id)
    model = loads.from_pretrained(
        checkpoint or (local.resolve() if local.exists() else config.model_id),  # absolute: an adapter names its model
        dtype=getattr(torch, config.dtype), attn_implementation=attention,
        trust_remote_code=config.trust_remote_code, device_map="meta" if on_meta else None,
    )  # fmt: skip
    generation: Any = getattr(model, "generation_config", None)
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
    if any(
        getattr(generation, name, None) not in (None, value) for name, value in defaults.items()
    ):
        generation.do_sample = True  # without it, no checkpoint with such values could be saved
    for module in model.modules():
        random = {
            "jitter_noise",
            "input_jitter_noise",
            "p" if isinstance(module, nn.Dropout) else "",
        }
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name in random):
                setattr(
                    module, name, 0.0
                )  # else log-probs would differ from the server's, and between forwards
    return model


def frozen_modules(model: Any, config: TrainConfig, has_images: bool) -> list[str]:
    """Names of modules that do not train: without images all but the language model, else the tower, if so set."""
    tower = model.get_encoder(modality="image")
    if tower is model:  # it has none
        return []
    # The projector trains: Qwen's is `merger` in the tower.
    frozen = (
        {m for name, m in tower.named_modules() if "merger" not in name}
        if config.freeze_vision_tower
        else set()
    )
    if not has_images:
        ends = {model.get_input_embeddings(), model.get_output_embeddings()}
        frozen = set(model.modules()) - set(model.get_decoder().modules()) - ends
    return [name for name, module in model.named_modules() if module in frozen]


def add_lora(
    model: Any, config: TrainConfig, frozen: Sequence[str] = (), checkpoint: Path | None = None
) -> Any:
    """Wrap a model in LoRA adapters, fresh or of a checkpoint, except for its frozen modules."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.lora.layer import ParamWrapper

    if checkpoint:
        return PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    # One matrix cannot take the adapter of one of its two uses.
    tied = ends if ends[1] is not None and ends[0].weight is ends[1].weight else ()
    for target in config.lora_target_modules or ():
        matched = [
            module for name, module in model.named_modules() if f".{name}".endswith(f".{target}")
        ]
        if not matched or any(module is end for module in matched for end in tied):
            leaves = ", ".join(
                sorted({n.rpartition(".")[2] for n, m in model.named_modules() if m._parameters})
            )
            raise UserError(
                f"lora_target_modules: {target} is no module, or a tied embedding; the model has {leaves}"
            )
    with naming("lora_target_modules"):
        model = get_peft_model(model, LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout, task_type="CAUSAL_LM",
            target_modules=config.lora_target_modules or "all-linear", exclude_modules=list(frozen) or None,
        ))  # fmt: skip
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        raise UserError(
            "lora_target_modules: adapters of experts in one tensor cannot be sent: name attention layers"
        )
    return model


def parallelize(model: Any, config: TrainConfig, device: torch.device) -> Any:
    """FSDP2 or DDP over all ranks, with rank 0's weights, on `device` or with `fsdp_offload` on the CPU. Collective."""
    for layer in _layers(model) if config.torch_compile else ():
        layer.forward = torch.compile(layer.forward, dynamic=True)
    if dist.get_world_size() == 1 and not config.use_fsdp:
        return model.to(device)
    # Only rank 0 holds a whole model, and lets go of each weight once its parts are where they belong.
    whole = (
        {n: t.detach() for n, t in chain(model.named_parameters(), model.named_buffers())}
        if is_main()
        else {}
    )
    model.to("meta")
    base_model(model).tie_weights()  # to another device each of two tied ones goes by itself
    if config.use_fsdp:
        _shard(model, config, device)
    home = torch.device("cpu") if config.fsdp_offload else device
    model._apply(
        lambda t: torch.empty_like(t, device=home if isinstance(t, nn.Parameter) else device)
    )
    base_model(model).tie_weights()
    with torch.no_grad():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            _from_main(tensor, whole.pop(name) if is_main() else None, device)
    if whole:  # the configuration ties them, and the checkpoint has others: without shards they would be kept
        raise UserError(
            f"model_id={config.model_id} holds {', '.join(whole)} beside what they are tied to: untie them"
        )
    if not config.use_fsdp and any(p.requires_grad for p in model.parameters()):
        with catch_warnings(
            action="ignore", category=FutureWarning
        ):  # torch 2.11 lacks `broadcast_buffers`' successor
            model = nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        model.register_comm_hook(None, _sum_over_ranks)  # as `optimizer_step` normalizes once
    return model


def _shard(model: Any, config: TrainConfig, device: torch.device) -> None:
    """Let FSDP2 shard every layer, and what is left, over all ranks or groups of `fsdp_shard_size`."""
    world_size, size = dist.get_world_size(), config.fsdp_shard_size
    sizes = {"replicas": world_size // size, "shards": size} if size else {"shards": world_size}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes if size else ():  # groups of its own, which would have torch's time-out
        _set_pg_timeout(timedelta(seconds=config.collective_timeout), mesh.get_group(name))
    sums = (
        torch.float32 if config.use_peft else getattr(torch, config.dtype)
    )  # that of the weights that train
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, sums) if config.fsdp_bf16 else MixedPrecisionPolicy()
    )
    offload = (
        CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if config.fsdp_offload
        else OffloadPolicy()
    )
    for module in [*_layers(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
        module.set_gradient_divide_factor(1.0)  # a sum, as `optimizer_step` normalizes once
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def _layers(model: Any) -> list[nn.Module]:
    return [
        m
        for m in model.modules()
        if type(m).__name__ in (base_model(model)._no_split_modules or ())
    ]


def _from_main(tensor: Tensor, whole: Tensor | None, device: torch.device) -> None:
    """Fill a tensor, or this rank's part of an FSDP2 shard, from rank 0's whole one. Collective."""
    whole = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if whole is None
        else whole.to(device)
    )
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(
            distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
        )
    else:
        dist.broadcast(whole, 0)
        tensor.copy_(whole)


def _sum_over_ranks(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return (
        dist.all_reduce(bucket.buffer(), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )


def image_features(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What a model's decoder gets of images (`inputs`, on its device): tensors in the model's number and shapes."""
    output = base_model(model).get_image_features(**inputs)
    named = (getattr(output, name, None) for name in ("pooler_output", "deepstack_features"))
    return tree_leaves([part for part in named if part is not None] or dict(output))


def freeze_unused(model: nn.Module, example: Prompt) -> None:
    """Freeze weights of the tower that no feature depends on, and whose gradients ranks would wait for. Collective."""
    # LLaVA takes its features before the last layer.
    weights = [
        p for p in base_model(model).get_encoder(modality="image").parameters() if p.requires_grad
    ]
    gradients: Any = ()
    if weights and is_main():  # whose model is whole, and on the CPU
        total = torch.stack(
            [feature.sum() for feature in image_features(model, example.inputs)]
        ).sum()
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
    is_used = broadcast_object([gradient is not None for gradient in gradients])
    for weight, trains in zip(weights, is_used, strict=True):
        weight.requires_grad_(trains)


def run_tower_always(model: nn.Module, example: Prompt, device: torch.device) -> None:
    """Let every forward run the vision tower: ranks with and without images in their row meet in its collectives."""
    base = base_model(model)
    image = {name: value.to(device) for name, value in example.inputs.items()}
    row_has_images = False

    def note_images(_: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        nonlocal row_has_images
        row_has_images = not image.keys().isdisjoint(inputs)

    def add_nothing(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not row_has_images:
            nothing = sum(0 * feature.sum() for feature in image_features(base, image))
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + nothing
        return args, inputs

    base.register_forward_pre_hook(note_images, with_kwargs=True)
    base.get_decoder().register_forward_pre_hook(add_nothing, with_kwargs=True)


def build_policy(
    config: TrainConfig,
    device: torch.device,
    example: Prompt | None = None,
    checkpoint: Path | None = None,
) -> Any:
    """The model that trains, on this rank's device, of `checkpoint` or `model_id`; `example`: a prompt with images."""
    if (num_ranks := dist.get_world_size()) % (config.fsdp_shard_size or 1):
        raise UserError(
            f"fsdp_shard_size={config.fsdp_shard_size}: {num_ranks} ranks are no multiple of it"
        )
    model = load_model(config, None if config.use_peft else checkpoint, on_meta=not is_main())
    if config.gradient_checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    frozen = frozen_modules(model, config, example is not None)
    for parameter in chain(
        *(model.get_submodule(name).parameters(recurse=False) for name in frozen)
    ):
        parameter.requires_grad_(False)
    if config.use_peft:
        model = add_lora(model, config, frozen, checkpoint)
    if example:
        freeze_unused(model, example)
        run_tower_always(model, example, device)
    return parallelize(model.train(), config, device)


def import_rare_attention(model: Any) -> None:
    """Import what a few families need for shared prefixes, if the model is of one of them."""
    if needs_rare_attention(model):
        import training.rare_attention  # noqa: F401


def share_prefixes(policy: Any, config: TrainConfig, example: Prompt | None = None) -> TrainConfig:
    """Swap shared-prefix attention into the policy, and prove it; the config has it off if that fails. Collective."""
    if not config.share_prefix:
        return config
    reason = None
    try:
        with autocast(config, device_of(policy)):
            import_rare_attention(policy)
            attach(
                policy,
                verify=True,
                example=(example.token_ids, example.inputs) if example else None,
            )
    except ValueError as error:
        reason = str(error)
    reasons = list(filter(None, gather_objects(reason)))
    if reasons and is_main():
        print(f"share_prefix is off, each prompt is forwarded once per completion: {reasons[0]}")
    return replace(config, share_prefix=not reasons)


def build_reference(
    policy: Any, config: TrainConfig, device: torch.device, example: Prompt | None = None
) -> Any:
    """`token_logprobs` under the reference: `reference_id`, else the policy without adapter or a frozen copy of it."""
    if not config.has_reference or config.reference_urls:
        return None
    model, is_adapted = unwrap(policy), config.use_peft and not config.reference_id
    if not is_adapted:
        named = replace(config, model_id=config.reference_id or config.model_id)
        model = load_model(named, on_meta=not is_main()).requires_grad_(False).eval()
        if example:
            run_tower_always(model, example, device)
        model = parallelize(model, config, device)
        if config.share_prefix:  # which `share_prefixes` has proved on the policy alone
            with naming("reference_id: set share_prefix=false"), autocast(config, device):
                images = (example.token_ids, example.inputs) if example else None
                import_rare_attention(model)
                attach(model, verify=config.reference_id is not None, example=images)

    def reference(row: PackedBatch, images: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), model.disable_adapter() if is_adapted else nullcontext():
            return token_logprobs(model, row, images, config)

    return reference


def build_optimizer(policy: nn.Module, num_updates: int, config: TrainConfig) -> tuple[Any, Any]:
    """AdamW with weight decay on matrices only, and its schedule over `num_updates` optimizer steps."""
    trainable = [p for p in policy.parameters() if p.requires_grad]
    matrices, others = (
        [p for p in trainable if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)
    )
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = (
        config.fsdp_offload or any(p.is_cuda for p in trainable) or None
    )  # None leaves it to torch
    optimizer = torch.optim.AdamW(
        groups, config.learning_rate, (config.adam_beta1, config.adam_beta2), fused=fused
    )
    num_warmup = round(config.warmup_ratio * num_updates)

    def factor(update: int) -> float:
        done = (update - num_warmup) / max(num_updates - num_warmup, 1)
        shapes = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return (update + 1) / num_warmup if update < num_warmup else shapes[config.lr_scheduler]

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """bfloat16 autocast, if the config says so; its cache of weights would outlive those that FSDP2 gathers."""
    return torch.autocast(
        device.type, torch.bfloat16, bool(config.bf16), cache_enabled=not config.use_fsdp
    )


def token_logprobs(
    model: nn.Module,
    row: PackedBatch,
    images: dict[str, Tensor],
    config: TrainConfig,
    return_entropy: bool = False,
) -> Any:
    """`completion_logprobs`, under the config's autocast, with no probability on tokens that no server samples."""
    forbidden = placeholder_ids(base_model(model).config)
    with autocast(config, row.targets.device):
        return completion_logprobs(
            model, row, config.temperature, return_entropy, forbidden, **images
        )


def unwrap(model: nn.Module) -> Any:
    """The module inside DistributedDataParallel; FSDP2 and plain models are their own."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, detached, in its shape and dtype. Of an FSDP2 shard it is an all-gather: collective."""
    whole: Any = tensor.detach()  # which `fsdp_offload` keeps elsewhere
    return (
        whole.to(whole.device_mesh.device_type).full_tensor()
        if isinstance(tensor, DTensor)
        else whole
    )


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, whole, LoRA merged: `(name in the plain Hugging Face model, tensor)`, one at a time.

    Merged weights are temporaries, W + s·B·A computed in the wider of the dtypes and rounded to W's; others may be the
    model's own, read only. Tied weights appear under their first name. Collective: every rank iterates to the end.
    """
    base = base_model(model)
    seen: set[int] = set()
    for name, tensor in base.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        module_name, _, leaf = name.rpartition(".base_layer.")
        if leaf == "weight":
            layer = base.get_submodule(module_name)
            with torch.no_grad():  # there is one adapter
                merged = full_tensor(tensor) + full_tensor(
                    layer.get_delta_weight(*layer.active_adapters)
                )
            yield f"{module_name}.weight", merged.to(tensor.dtype)
        else:
            yield name.replace(".base_layer.", "."), full_tensor(tensor)


def published_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`full_weights` as `save_pretrained` would write them, with no more than one decoder layer alive. Collective."""
    # Some have another form here (fused experts, renamed towers). Names of one layer begin alike: `model.layers.3.`
    for _, layer in groupby(
        full_weights(model), key=lambda item: re.findall(r"^.*?\.\d+\.", item[0])
    ):
        yield from revert_weight_conversion(base_model(model), dict(layer)).items()


def host_weights(model: nn.Module) -> dict[str, Tensor]:
    """What `save_pretrained` takes as `state_dict`: whole, on the CPU, of LoRA its own; on rank 0. Collective."""
    weights = full_weights(model)
    if hasattr(unwrap(model), "peft_config"):
        adapted = unwrap(model).state_dict(keep_vars=True)
        weights = (
            (name, full_tensor(tensor)) for name, tensor in adapted.items() if ".lora_" in name
        )
    return {
        name: tensor.to("cpu", copy=True) for name, tensor in weights if is_main()
    }  # every rank gathers all
