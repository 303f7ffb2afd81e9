"""AdamW's state in 8 bits, and a base of LoRA in 4 bits."""

import copy
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from dequantize import write_base
from fake_server import fake_server
from helpers import ROOT, answer_in, moved_adapter, on_forked_ranks, on_ranks
from peft import LoraConfig, get_peft_model
from test_adapters import lora_config
from test_prefix_models import plain_rows
from test_resume import assert_identical, run, start, weights  # noqa: F401
from test_server import make_config
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

import training.model as model_module
from config import UserError
from prefix_attention import completion_logprobs, pack
from rollouts.processor import load_processor
from rollouts.servers import ServerPool
from server.messages import About
from train import optimizer_step
from training.loading import load_model
from training.model import build_policy, build_reference
from training.optimizer import build_optimizer
from utils import process_group
from vllm_client import ServerError
from weights.publish import full_tensor, published_weights

pytest.importorskip("torchao")
bnb = pytest.importorskip("bitsandbytes")

ADAM = {
    "adam_8bit": True, "learning_rate": 0.01, "weight_decay": 0.1,
    "adam_beta2": 0.95, "lr_scheduler": "linear", "warmup_ratio": 0.4, "grad_norm": 0.0,
}  # fmt: skip


# -- AdamW in 8 bits -------------------------------------------------------------------------------


def config_of(**fields):
    return make_config("m", "http://x", **fields)


def some_gradients(model):
    """Of six updates, several scales, so that the smallest of a block are rounded away; the third is none."""
    torch.manual_seed(3)
    gradients: list = []
    for _ in range(6):
        of_update = {}
        for name, weight in model.named_parameters():
            scale = 10 ** torch.empty_like(weight).uniform_(-3, 0)
            of_update[name] = torch.randn_like(weight) * scale
        gradients.append(of_update)
    gradients[2] = None
    return gradients


def train_on(model, gradients, config):
    """Updates as train.py makes them, a NaN where there is no gradient; the optimizer and rates."""
    optimizer, scheduler = build_optimizer(model, len(gradients), config)
    rates = []
    for of_update in gradients:
        rates.append(float(optimizer.param_groups[0]["lr"]))
        for name, weight in model.named_parameters():
            gradient = torch.full(weight.shape, torch.nan)
            if of_update:
                gradient = of_update[name].clone()
            if isinstance(weight, DTensor):
                gradient = distribute_tensor(gradient, weight.device_mesh, weight.placements)
            weight.grad = gradient
        optimizer_step(model, optimizer, scheduler, 1.0, config)
    return optimizer, rates


@pytest.mark.parametrize("width", [64, 62])
def test_adamw(width):
    """Against torch's in fp64: what is in fp32 is within 1e-6, in 8 bits within 5 % of the way (seen: 2 %)."""
    config = config_of(**ADAM)
    torch.manual_seed(0)
    model = nn.Linear(width, 64)
    exact = copy.deepcopy(model).double()
    before = exact.weight.detach().clone()
    gradients = some_gradients(model)
    optimizer, rates = train_on(model, gradients, config)
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025])

    groups: list = [{"params": [exact.weight]}, {"params": [exact.bias], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    for of_update, rate in zip(gradients, rates, strict=True):
        for name, weight in exact.named_parameters():
            weight.grad = of_update[name].double() if of_update else None
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
    torch.testing.assert_close(model.bias.double(), exact.bias, rtol=0, atol=1e-6)
    error = (model.weight.double() - exact.weight).abs()
    in_8bit = hasattr(optimizer.state[model.weight]["exp_avg"], "codes")
    assert in_8bit == (width == 64)  # 64 x 62 values are fewer than 4,096
    if in_8bit:
        assert 1e-4 < error.mean() / (exact.weight - before).abs().mean() < 0.05
    else:
        assert error.max() < 1e-6


@pytest.mark.parametrize("kind", ["columns", "rows", "all"])
def test_no_step_is_much_longer_than_the_rate(kind):
    """Where gradients of a block differ a thousandfold, or come seldom, as AdamW's are not."""
    torch.manual_seed(0)
    config = config_of(adam_8bit=True, learning_rate=1e-6, grad_norm=0.0)
    scales = {
        "columns": torch.where(torch.arange(256) % 85 == 0, 1000.0, 1.0),
        "rows": torch.exp(2 * torch.randn(256)),
        "all": torch.exp(2 * torch.randn(256, 256)),
    }
    model = nn.Linear(256, 256, bias=False)
    nn.init.zeros_(model.weight)
    optimizer, _ = build_optimizer(model, 1, config)
    for _ in range(30):
        before = model.weight.detach().clone()
        is_there = torch.rand(256, 1) < 0.1 if kind == "rows" else 1.0  # as of an embedding
        model.weight.grad = 1e-5 * scales[kind] * torch.randn(256, 256) * is_there
        optimizer.step()
        longest = (model.weight.detach() - before).abs().max().item() / 1e-6
        assert longest < 4, longest  # seen: 1.9; with second moments of 0 hundreds


def make_whole():
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False)
    nn.init.normal_(model.weight)
    return model


def shards_main(output):
    """Two ranks train shards, and rank 0 writes the whole weights; all check what they hold."""
    model_module._layers = lambda model: []  # in this process alone: a model without layers
    with process_group(60) as device:
        found = []
        for offload in (False, True):
            config = config_of(use_fsdp=True, fsdp_offload=offload, **ADAM)
            policy = make_whole()
            gradients = some_gradients(policy)
            model_module._shard(policy, config, device)
            optimizer, _ = train_on(policy, gradients, config)
            moment = optimizer.state[policy.weight]["exp_avg"].to_local()
            assert (moment.codes.shape, moment.codes.dtype) == ((64, 64), torch.uint8)
            found.append(full_tensor(policy.weight))
        if dist.get_rank() == 0:
            torch.save(found, output)


def test_shards_of_two_ranks(tmp_path):
    """Each has the state of its half, in 8 bits; the weights are those of one rank."""
    on_ranks(2, tmp_path, "test_low_memory.shards_main", tmp_path / "found")
    model = make_whole()
    train_on(model, some_gradients(model), config_of(**ADAM))
    for found in torch.load(tmp_path / "found"):
        torch.testing.assert_close(found, model.weight.detach(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_what_gpus_compile(monkeypatch):
    """The compiled step is the one that runs here, to fp32's rounding. Ten seconds a shape."""
    found = []
    set_stance = torch.compiler.set_stance
    for stance in ("force_eager", "default"):
        monkeypatch.setattr(torch.compiler, "set_stance", lambda _, s=stance: set_stance(s))
        model = make_whole()
        train_on(model, some_gradients(model), config_of(**ADAM))
        found.append(model.weight.detach())
    apart = (found[0] - found[1]).abs()
    assert (apart > 1e-6).double().mean() < 5e-3


def test_shards_go_on_as_one_rank(start, tmp_path, monkeypatch):  # noqa: F811
    """Two ranks' shards, loaded by one: of small weights they were whole, and are rounded here."""
    fields = {"adam_8bit": True, "save_steps": 2}
    middle = start(resume_from_checkpoint=tmp_path / "run" / "checkpoint-2", **fields)
    run(1, start(**fields))
    expected = weights(tmp_path / "run")
    run(2, start(use_fsdp=True, **fields))

    def distance():
        run(1, middle)
        found = weights(tmp_path / "run").items()
        return sum((weight - expected[name]).abs().mean().item() for name, weight in found)

    kept = distance()
    monkeypatch.setattr("training.checkpoints.set_optimizer_state_dict", lambda *_: None)
    monkeypatch.setattr("training.checkpoints.dcp.load", lambda *_, **__: None)
    assert kept < distance() / 10


def test_shards_that_cut_a_block_are_refused(start, models, tmp_path):  # noqa: F811
    """68 x 64 values are 17 blocks of 256: the half of a rank would begin within one."""
    shape = AutoConfig.from_pretrained(models["untied"], intermediate_size=68)
    model = shutil.copytree(models["untied"], tmp_path / "model")
    AutoModelForCausalLM.from_config(shape).save_pretrained(model)
    with fake_server(str(model), answer_in(0.02)) as fake:
        fields = {"adam_8bit": True, "save_steps": 1, "model_id": model, "vllm_urls": fake.url}
        run(1, start(max_steps=1, **fields))
        resumed = start(use_fsdp=True, resume_from_checkpoint="auto", **fields)
        done = on_forked_ranks(2, ROOT / "train.py", *resumed, status=1)
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "cannot be loaded, perhaps by this number of ranks: ValueError: Invalid start or" in said


# -- A base in 4 bits ------------------------------------------------------------------------------


def base_config(model, url="http://x", **fields):
    return lora_config(model, url, base_4bit=True, **fields)


PROMPT, COMPLETION = [5, 20, 33, 41], [7, 8, 50, 51, 52]
GROUPS = [(PROMPT, [COMPLETION])]
(ROW,) = pack(GROUPS, share_prefix=False)


def dequantized(path):
    """A plain model whose linear layers, but for the head, were rounded to 4 bits and back."""
    model = AutoModelForCausalLM.from_pretrained(path)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            rounded, state = bnb.functional.quantize_4bit(module.weight.data, quant_type="nf4")
            module.weight.data = bnb.functional.dequantize_4bit(rounded, state)
    return model


COMPILED = pytest.param({"torch_compile": True}, marks=pytest.mark.slow)


@pytest.mark.parametrize("fields", [{}, {"gradient_checkpoint": True}, COMPILED], ids=str)
def test_gradients_of_adapters(models, fields, device):
    """Those of plain peft over plain weights, to fp32's rounding; also after other forwards."""
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    plain: nn.Module = moved_adapter(get_peft_model(dequantized(models["untied"]), lora))
    config = base_config(models["untied"], beta=0.1, **fields)
    policy = build_policy(config, device)
    with torch.no_grad():
        policy.eval()
        policy(torch.tensor([PROMPT]))
        policy.train()
    adapters = {n: w for n, w in policy.named_parameters() if w.requires_grad}
    theirs = {n: w for n, w in plain.named_parameters() if ".lora_" in n}
    for name, weight in theirs.items():
        adapters[name].data.copy_(weight.data)

    found, expected = completion_logprobs(policy, ROW), plain_rows(plain, GROUPS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    whole = plain_rows(AutoModelForCausalLM.from_pretrained(models["untied"]), GROUPS)
    assert (whole - expected).abs().mean() > 0.05  # the test can tell it from a base of 4 bits

    (found * torch.arange(5.0)).sum().backward()
    (expected * torch.arange(5.0)).sum().backward()
    for name, weight in theirs.items():
        torch.testing.assert_close(adapters[name].grad, weight.grad, rtol=1e-4, atol=1e-5)
    if not fields:  # the reference: the base, or a model of another name, which is whole
        other = AutoModelForCausalLM.from_pretrained(models["tied"])
        of_other = replace(config, reference_id=models["tied"])
        for of_reference, base in ((config, dequantized(models["untied"])), (of_other, other)):
            found = build_reference(policy, of_reference, device)(ROW, {})
            torch.testing.assert_close(found, plain_rows(base, GROUPS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"dtype": "bfloat16"}])
def test_the_dtype_in_which_a_base_computes(models, fields):
    """The forward's: another one would be another model."""
    loaded = load_model(base_config(models["untied"], **fields)).config.quantization_config
    assert loaded.bnb_4bit_compute_dtype == (torch.bfloat16 if fields else torch.float32)


def test_what_cannot_have_a_base_in_4_bits(models, device):
    with pytest.raises(UserError, match="base_4bit has no effect with use_peft=False"):
        config_of(base_4bit=True)
    with pytest.raises(UserError, match="base_4bit cannot be sharded: unset use_fsdp"):
        base_config("m", use_fsdp=True)
    with pytest.raises(AssertionError, match=r"q_proj.* is in 4 bits, and cannot be sent"):
        list(published_weights(build_policy(base_config(models["tied"]), device)))


def test_servers_of_another_base_are_refused(models, stand_in):
    """Of the model itself, before anything is loaded; and those that take whole weights."""

    def refused(message):
        with pytest.raises(ServerError, match=message):
            ServerPool(base_config(models["untied"], fake.url)).wait_until_ready()

    fake = stand_in()
    refused("serves the model itself, and not what scripts/dequantize.py makes of it")
    fake.about = lambda: About(["x", models["untied"]], 128, "float32", 0, False)
    refused("takes whole weights, and base_4bit has none: give it --enable-lora")


def test_replays_on_two_ranks_and_after_a_stop(start, tmp_path):  # noqa: F811
    """Two ranks agree with one, to the rounding of sums; a run that goes on, to the bit."""
    run(1, start(parts="recipes.replay.save"))
    base = {"use_peft": True, "base_4bit": True, "learning_rate": 0.001, "save_steps": 2}
    found = {}

    def replayed(ranks, output, **more):
        words = [tmp_path / "run", *start(**base, output_dir=output, **more)]
        on_forked_ranks(ranks, ROOT / "recipes" / "replay.py", *words, status=0)
        return weights(output)

    for ranks in (1, 2):
        output = tmp_path / f"of_{ranks}"
        found[ranks] = replayed(ranks, output)
        assert all(".lora_" in name for name in found[ranks])
        again = replayed(ranks, output, resume_from_checkpoint=output / "checkpoint-2")
        assert_identical(again, found[ranks])
    torch.testing.assert_close(found[2], found[1], rtol=1e-3, atol=1e-5)


def test_the_base_that_servers_get(models, tmp_path):
    """scripts/dequantize.py writes it: a plain model, to which an adapter is added as to any."""
    write_base(base_config(models["untied"]), tmp_path / "base")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = dequantized(models["untied"])
    torch.testing.assert_close(written.state_dict(), expected.state_dict(), rtol=0, atol=1e-6)
    assert load_processor(make_config(str(tmp_path / "base"), "http://x")).eos_token == "<eos>"
