"""Two forwards of the policy are one, whatever its configuration asks for in training; LoRA's own dropout stays."""

from typing import Any

import pytest
import torch
import transformers
from test_gradients import make_config
from test_prefix_models import SIZES
from torch import nn
from transformers import AutoModelForCausalLM

from config import UserError
from prefix_attention import evaluating
from training.model import build_policy, build_reference, recompute_layers, share_prefixes
from utils import process_group

IDS = torch.arange(5, 25)[None]
SMALL = {"vocab_size": 99, "num_hidden_layers": 3, "num_attention_heads": 2, "pad_token_id": 2}
WIDE = {**SMALL, "hidden_size": 32, "max_position_embeddings": 64}
EXPERTS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
# Noise as an attribute of a module, of a layer, read from the configuration, and in a function.
NOISY = {
    "Qwen3": {**SIZES, "attention_dropout": 0.5},
    "Mixtral": {**EXPERTS, "router_jitter_noise": 0.5},
    "Phimoe": {**EXPERTS, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01},
    "OPT": {**WIDE, "ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.5, "dropout": 0.5},
    "BioGpt": {**WIDE, "intermediate_size": 48, "layerdrop": 0.5, "hidden_dropout_prob": 0.5},
    "XGLM": {
        "vocab_size": 99, "d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 2, "layerdrop": 0.5,
        "max_position_embeddings": 64, "dropout": 0.5, "activation_dropout": 0.5,
    },
    "Falcon": {**WIDE, "hidden_dropout": 0.5, "attention_dropout": 0.5},
    "Bloom": {**SMALL, "hidden_size": 32, "hidden_dropout": 0.5, "attention_dropout": 0.5},
    "GPTBigCode": {
        "vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64,
        "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5,
    },
}  # fmt: skip


def save(family, folder):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**NOISY[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def device():
    with process_group(60) as device:
        yield device


def gradients(logits, model):
    logits.log_softmax(-1)[..., 3].sum().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", NOISY)
def test_two_forwards_are_one(family, recomputes, tmp_path, device):
    """Under autograd, recomputed or not; and they are what transformers gives in eval mode."""
    path = save(family, tmp_path)
    policy = build_policy(make_config(path, gradient_checkpoint=recomputes), device)
    first, second = policy(input_ids=IDS).logits, policy(input_ids=IDS).logits
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    model = AutoModelForCausalLM.from_pretrained(path)
    plain = model(input_ids=IDS).logits
    torch.testing.assert_close(first, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(first, policy), gradients(plain, model))


def forwards(policy):
    """Counts what runs in each of the model's attention layers, as a list that grows."""
    counted = []
    for name, module in policy.named_modules():
        if name.endswith("q_proj") or name.endswith("query_key_value"):
            module.register_forward_hook(lambda *_: counted.append(1))
    return counted


@pytest.mark.parametrize("fields", [{}, {"use_peft": True, "lora_dropout": 0.2}], ids=str)
@pytest.mark.parametrize("family", ["Qwen3", "BioGpt", "Falcon"])
def test_layers_are_recomputed(family, fields, tmp_path, device):
    """Each layer runs a second time in the backward, and keeps less; a forward alone runs it once."""
    path = save(family, tmp_path)
    kept = {}
    found = {}
    for recomputes in (False, True):
        torch.manual_seed(1)
        policy = build_policy(make_config(path, gradient_checkpoint=recomputes, **fields), device)
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.05)
        counted = forwards(policy)
        num_layers = policy.config.num_hidden_layers
        sizes: list[int] = []

        def keep(tensor, sizes=sizes):
            sizes.append(tensor.nbytes)
            return tensor

        torch.manual_seed(2)  # of the adapter's dropout
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = policy(input_ids=IDS).logits
        assert len(counted) == num_layers
        kept[recomputes] = sum(sizes)
        found[recomputes] = gradients(logits, policy)
        assert len(counted) == num_layers * (2 if recomputes else 1)
        with torch.no_grad():
            policy(input_ids=IDS)
        assert len(counted) == num_layers * (3 if recomputes else 2)
    assert kept[True] < kept[False] / 2
    torch.testing.assert_close(found[True], found[False])


def test_a_model_of_no_known_layers_is_refused():
    model: Any = nn.Linear(2, 2)
    model._no_split_modules = None
    with pytest.raises(UserError, match="gradient_checkpoint: this model names no layers"):
        recompute_layers(model)


def test_only_loras_own_dropout_stays(tmp_path, device):
    """It moves log-probs by a seed, also after verification; without the adapter two forwards are one."""
    path = save("Falcon", tmp_path)
    config = make_config(path, use_peft=True, lora_dropout=0.5, beta=0.1)
    policy = build_policy(config, device)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.05)
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
