"""Checkpoints that lack weights, or have others: refused by name, for every model that a run loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_gradients import make_config
from transformers import AutoModelForCausalLM

from config import UserError
from training.loading import add_lora
from training.model import build_policy, build_reference, load_model

HEAD = "lm_head.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def changed(model, folder, change):
    """A copy of a model whose weights went through `change`, a function of name to tensor."""
    shutil.copytree(model, folder)
    file = next(Path(folder).glob("*model.safetensors"))
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return str(folder)


def without(gone):
    return lambda weights: {name: w for name, w in weights.items() if not name.startswith(gone)}


def also(*names):
    return lambda weights: weights | {name: torch.zeros(2) for name in names}


def within_a_module(weights):
    return {f"module.{name}": weight for name, weight in weights.items()}


def cut_off(weights):
    return weights | {DOWN: weights[DOWN][:, :-1].contiguous()}


def head_beside(change):
    """The change that adds a head to a file whose configuration ties it to the embedding."""
    return lambda weights: weights | {HEAD: change(weights["model.embed_tokens.weight"])}


def edit(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


BIAS = "model.layers.0.self_attn.q_proj.bias"
FAULTS = {
    "an mlp": (without("model.layers.1.mlp."), f"missing: {DOWN}, .*gate_.*, .*up_proj.weight$"),
    "the head": (without(HEAD), rf"missing: {HEAD}$"),
    "a prefix": (within_a_module, rf"\d+ missing: {HEAD}, .*; \d+ unknown .*: module.{HEAD}, "),
    "a shape": (cut_off, rf"of another shape: {DOWN}$"),
    "one too many": (also(BIAS), f"unknown to the model: {BIAS}$"),
}


def assert_refused(broken, whole, message, device):
    """As the policy, as the checkpoint of a run that goes on, and as the reference."""
    refused = lambda: pytest.raises(UserError, match=f"the weights of {broken} .*{message}")
    with refused():
        load_model(make_config(broken))
    with refused():
        load_model(make_config(whole), Path(broken))
    with refused():
        build_reference(None, make_config(whole, beta=0.1, reference_id=broken), device)


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_not_the_models(models, tmp_path, device, fault):
    change, message = FAULTS[fault]
    broken = changed(models["untied"], tmp_path / "broken", change)
    assert_refused(broken, models["untied"], message, device)


def test_what_is_not_missing_and_what_is_no_weight(models, tmp_path):
    """A head that the configuration ties; masks of GPT-Neo's files, and frequencies of old Llamas'."""
    assert HEAD not in load_file(f"{models['tied']}/model.safetensors")
    load_model(make_config(models["tied"]))
    masks = ("transformer.h.0.attn.attention.bias", "transformer.h.0.attn.masked_bias")
    more = also(*masks, "model.layers.0.self_attn.rotary_emb.inv_freq")
    load_model(make_config(changed(models["tied"], tmp_path / "old", more)))


def test_a_tied_head_of_its_own_values(models, tmp_path, device):
    """As a merge of adapters may leave it: transformers unties it, vLLM does not."""
    broken = changed(models["tied"], tmp_path / "broken", head_beside(lambda w: 1.01 * w))
    message = rf"tied in config.json, with other values .*: {HEAD}$"
    assert_refused(broken, models["tied"], message, device)
    for fields in ({"use_peft": True}, {"use_fsdp": True}, {"dtype": "bfloat16"}):
        with pytest.raises(UserError, match=message):
            build_policy(make_config(broken, **fields), device)

    edit(Path(broken) / "config.json", tie_word_embeddings=False)  # as the message says
    head = load_model(make_config(broken)).lm_head.weight
    assert torch.equal(head, load_file(f"{broken}/model.safetensors")[HEAD])


def test_a_tied_head_of_the_same_values(models, tmp_path):
    """A copy, as many files have it, and a head alone, are one matrix with the embedding."""
    copied = changed(models["tied"], tmp_path / "copied", head_beside(torch.clone))
    alone = changed(copied, tmp_path / "alone", without("model.embed_tokens."))
    expected = load_model(make_config(models["tied"])).lm_head.weight
    for path in (copied, alone):
        model = load_model(make_config(path))
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert torch.equal(model.lm_head.weight, expected)


def test_an_adapter_that_lacks_weights(models, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(models["tied"])
    adapter = tmp_path / "adapter"
    get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).save_pretrained(adapter)
    config = make_config(models["tied"], use_peft=True)

    def add(folder):
        return add_lora(load_model(config), config, checkpoint=Path(folder))

    add(adapter)
    first = next(iter(load_file(adapter / "adapter_model.safetensors")))
    lacking = changed(adapter, tmp_path / "lacking", without(first))
    with pytest.raises(UserError, match=f"{lacking} .*; 1 missing: {first}$"):
        add(lacking)
    more = changed(adapter, tmp_path / "more", also("score.weight"))
    with pytest.raises(UserError, match=f"{more} .*; 1 unknown to the model: score.weight$"):
        add(more)
    other = shutil.copytree(adapter, tmp_path / "other")
    edit(other / "adapter_config.json", r=8)
    message = f"the adapter of {other} cannot be loaded: .*size mismatch"
    with pytest.raises(UserError, match=message):
        add(other)
