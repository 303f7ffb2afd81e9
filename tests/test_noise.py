"""Two forwards of the policy are one, whatever its configuration asks for; LoRA's dropout stays."""

from typing import Any

import pytest
import torch
import transformers
from helpers import far_from_uniform, moved_adapter
from test_gradients import make_config
from test_prefix_models import SIZES
from torch import nn
from transformers import AutoModelForCausalLM

from config import UserError
from prefix_attention import evaluating
from training.model import build_policy, build_reference, recompute_layers, share_prefixes

IDS = torch.arange(5, 25)[None]
SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Noise as an attribute of a module, in a function, of a layer, and read from the configuration.
NOISY = {
    "Qwen3": {**SIZES, "attention_dropout": 0.5},
    "Mixtral": {**SIZES, **EXPERTS, "router_jitter_noise": 0.5},
    "BioGpt": {
        **SMALL, "max_position_embeddings": 64, "intermediate_size": 48, "layerdrop": 0.5,
        "hidden_dropout_prob": 0.5, "pad_token_id": 2,
    },
    "Falcon": {**SMALL, "hidden_dropout": 0.5, "attention_dropout": 0.5},
}  # fmt: skip


def save(family, folder):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**NOISY[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    far_from_uniform(model).save_pretrained(folder)
    return str(folder)


def build(path, device, **fields):
    """A policy, an adapter away from zero."""
    torch.manual_seed(1)
    return moved_adapter(build_policy(make_config(path, **fields), device))


def gradients(logits, model):
    logits.log_softmax(-1)[..., 3].sum().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", NOISY)
def test_two_forwards_are_one(family, recomputes, tmp_path, device):
    """Under autograd, recomputed or not; and they are what transformers gives in eval mode."""
    path = save(family, tmp_path)
    policy = build(path, device, gradient_checkpoint=recomputes)
    first, second = policy(input_ids=IDS).logits, policy(input_ids=IDS).logits
    assert torch.equal(first, second)
    model = AutoModelForCausalLM.from_pretrained(path)
    plain = model(input_ids=IDS).logits
    torch.testing.assert_close(first, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(first, policy), gradients(plain, model))


@pytest.mark.parametrize("family", ["Qwen3", "BioGpt", "Falcon"])
def test_layers_are_recomputed(family, tmp_path, device):
    """A forward keeps less than half for the backward, which gives the same gradients."""
    path = save(family, tmp_path)
    kept, found = [], []
    for recomputes in (False, True):
        fields = {"gradient_checkpoint": recomputes, "use_peft": True, "lora_dropout": 0.2}
        policy = build(path, device, **fields)
        sizes: list[int] = []

        def keep(tensor, sizes=sizes):
            sizes.append(tensor.nbytes)
            return tensor

        torch.manual_seed(2)  # of the adapter's dropout
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = policy(input_ids=IDS).logits
        kept.append(sum(sizes))
        found.append(gradients(logits, policy))
    assert kept[1] < kept[0] / 2
    torch.testing.assert_close(found[1], found[0])


def test_a_model_of_no_known_layers_is_refused():
    model: Any = nn.Linear(2, 2)
    model._no_split_modules = None
    with pytest.raises(UserError, match="gradient_checkpoint: this model names no layers"):
        recompute_layers(model)


def test_only_loras_own_dropout_stays(tmp_path, device):
    """It moves log-probs by a seed, also after verification; without the adapter two forwards are one."""
    path = save("Falcon", tmp_path)
    fields = {"use_peft": True, "lora_dropout": 0.5, "beta": 0.1}
    config = make_config(path, **fields)
    policy = build(path, device, **fields)
    plain = AutoModelForCausalLM.from_pretrained(path)

    def logits(seed):
        torch.manual_seed(seed)
        return policy(input_ids=IDS).logits

    for _ in range(2):
        assert torch.equal(logits(1), logits(1))
        assert (logits(1) - logits(2)).abs().max() > 1e-3
        with policy.disable_adapter():
            assert torch.equal(logits(1), logits(2))
            torch.testing.assert_close(logits(1), plain(input_ids=IDS).logits, rtol=0, atol=1e-5)
        with evaluating(policy):
            assert torch.equal(logits(1), logits(2))
        share_prefixes(policy, config)
        assert build_reference(policy, config, device) is not None

    policy.save_pretrained(tmp_path / "adapter")
    resumed = build_policy(config, device, checkpoint=tmp_path / "adapter")
    torch.manual_seed(1)
    torch.testing.assert_close(resumed(input_ids=IDS).logits, logits(1))
