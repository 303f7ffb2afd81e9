"""Training with a vision tower: frozen modules, features, ranks without images.

Imported only for models that have a vision tower.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from config import TrainConfig
from prefix_attention import base_model
from rollouts.group import Prompt
from utils import broadcast_object, is_main


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
    parts = []
    for name in ("pooler_output", "deepstack_features"):
        if name in output:
            parts.append(output[name])
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
