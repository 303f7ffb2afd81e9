"""Rows, the head's log-probabilities, refusals, and what shared prefixes must get along with."""

import copy
import itertools
import re
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import transformers
from helpers import ROOT
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from test_prefix_models import (
    SIZES,
    assert_equal_gradients,
    break_gradients,
    gradients,
    make_agents,
    make_groups,
    make_model,
    pairs,
    plain_rows,
    shared_rows,
)

import prefix_attention
from prefix_attention import attach, completion_logprobs, num_packed_tokens, pack

# -- rows ------------------------------------------------------------------------------------------

GROUPS = [
    ([5, 6, 7], [[8, 9, 2], [2], []]),
    ([10, 11, 12, 13, 14, 15, 2, 2], [[16, 2, 2, 17], [18, 19, 20, 21, 22, 23, 24]]),
]


def test_nothing_is_forwarded_twice():
    """As many tokens as there are different contexts in a row; groups apart share nothing."""
    agents = make_agents()
    for few in (GROUPS, agents[1:2], agents):
        whole = [prompt + ids[:-1] for prompt, ids in pairs(few)]
        different = {tuple(ids[:n]) for ids in whole for n in range(1, len(ids) + 1)}
        assert [row.num_tokens for row in pack(few)] == [len(different)]
        assert num_packed_tokens(few) == len(different)
    of_each = [num_packed_tokens([group]) for group in agents]
    (apart,) = pack(agents, apart=range(4))
    assert apart.num_tokens == num_packed_tokens(agents, apart=range(4)) == sum(of_each)
    assert sorted(apart.prompts) == [0, 1, 2, 2, 3]  # a segment of the third begins otherwise
    (together,) = pack(agents)
    assert sorted(together.prompts, key=str) == [2, 3, None]  # None: of the system prompt


SYSTEMS = [[1 + number] * 20 for number in range(2)]
OF_SYSTEMS = [([*SYSTEMS[n // 5], 30 + n], [[40 + n], [50 + n] * 3]) for n in range(10)]
LENGTHS_9_10_2 = [([5] * 6, [[6] * 3]), ([5] * 9, [[6] * 2]), ([7], [[8] * 2])]
TWO_SEGMENTS = [([1, 2, 3, 4, *[n] * 5], [20, 21, 22, 23]) for n in (7, 8)]
WITH_SEGMENTS = [([1, 2], [[9] * 3, TWO_SEGMENTS, [10] * 12])]


@pytest.mark.parametrize(
    ("groups", "max_tokens", "column", "expected", "num_tokens"),
    [
        # Groups stay in order: each system prompt stands once in a row.
        (OF_SYSTEMS, 35, "group", [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [35, 35]),
        (LENGTHS_9_10_2, 10, "group", [[0], [1], [2]], [8, 10, 2]),
        (GROUPS[::-1], 22, "group", [[0, 1]], [22]),
        # A group over the bound is split into completions, and one of these into its segments.
        (GROUPS[::-1], 16, "completion", [[0], [1], [2, 3]], [11, 14, 5]),
        (WITH_SEGMENTS, 20, "completion", [[0], [1], [2]], [4, 20, 13]),
        (WITH_SEGMENTS, 19, "completion", [[0, 1], [1], [2]], [14, 12, 13]),
        ([([5, 6], [[], []])], None, "group", [], []),
    ],
)
def test_where_rows_are_cut(groups, max_tokens, column, expected, num_tokens):
    rows = pack(groups, max_tokens)
    assert [getattr(row, column).unique().tolist() for row in rows] == expected
    assert [row.num_tokens for row in rows] == num_tokens
    # Pickled for other ranks: a view would take its whole storage along.
    for row, name in itertools.product(rows, ("cells", "targets", "group", "completion", "index")):
        values = getattr(row, name)
        assert values.untyped_storage().nbytes() == values.nbytes, name


def test_completions_may_branch_at_every_token():
    """Each has a token more of one answer than the one before, and an end of its own."""
    answer = [3 + i % 90 for i in range(1500)]
    (row,) = pack([([1, 2], [[*answer[:length], 95, 96] for length in range(1500)])], 10_000)
    assert row.num_tokens == 2 + 1499 + 1500


# -- the head --------------------------------------------------------------------------------------


def test_entropies_are_fp32_under_autocast():
    """1e-5 nats, as of sums in fp32; a product in bf16 would be off by 2⁻⁹ of the logits."""
    model = make_model("Qwen3")
    (row,) = pack(make_groups(), share_prefix=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, entropies = completion_logprobs(model, row, 4.0, return_entropy=True)
        body = model.model(input_ids=row.input_ids, attention_mask=row.attention_mask)
    hidden = body.last_hidden_state.flatten(0, 1)[row.cells].double()
    logits = hidden @ model.lm_head.weight.detach().double().T / 4
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropies.double(), expected, rtol=0, atol=1e-5)


def test_logits_of_a_row_never_exist(monkeypatch):
    monkeypatch.setitem(prefix_attention.HEAD_CHUNK, "cpu", 97 * 4)
    model = attach(make_model("Qwen3"))
    (row,) = pack(make_groups())
    lengths = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (97,):
                    lengths.append(len(tensor))
            return result

    with Sizes():
        completion_logprobs(model, row).sum().backward()
    assert 4 <= max(length for length in lengths if length != 32) < 8  # 32: the head's own weight


def test_whatever_a_model_does_to_its_logits():
    """The answer is that of its own head, with a bias, and of its own forward."""
    model = make_model("Qwen3")
    model.lm_head = torch.nn.Linear(32, 97)
    forward = model.forward

    def louder(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = louder
    expected = plain_rows(model, make_groups())
    of_plain = gradients(model, expected)
    for share_prefix in (False, True):
        got = shared_rows(attach(model), make_groups(), share_prefix=share_prefix)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert_equal_gradients(gradients(model, got), of_plain, 1e-5)


OF_DORA = {"target_modules": ["lm_head", "q_proj"], "use_dora": True}
OF_A_COPY = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize("options", [OF_DORA, OF_A_COPY])
def test_adapters_of_the_head(options):
    """Whatever peft does to a head, also by a trained copy, the log-probs are those of its own forward."""
    torch.manual_seed(0)
    lora = LoraConfig(r=2, init_lora_weights=False, **options)
    model: Any = get_peft_model(attach(make_model("Qwen3")), lora)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name:
                weight.mul_(2)
        got, expected = shared_rows(model, make_groups()), plain_rows(model, make_groups())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_prefix", [True, False])
def test_groups_that_no_row_takes(share_prefix):
    for group, message in (
        (([5, 6, 7], [[8], [9] * 12]), "completion 1 of group 1 has 15 tokens with its prompt"),
        (([], [[1]]), "group 1 has an empty prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            pack([GROUPS[0], group], 13, share_prefix)


def tiny(name, kind="CausalLM", **fields):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **fields})
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config)


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
IN_MASK = {"use_sliding_window": True, "sliding_window": 8, "num_experts": 4}
CHUNKED = {"num_local_experts": 2, "interleave_moe_layer_step": 1}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: tiny("Mamba", state_size=4), ""),
        (lambda: tiny("Bloom"), ""),
        (lambda: tiny("Llama", **DYNAMIC), "dynamic"),
        (lambda: tiny("Qwen2Moe", **IN_MASK), "window is in the mask"),
        (lambda: tiny("Bart", kind="Seq2SeqLM"), ""),
        (lambda: tiny("Llama4Text", **CHUNKED), "chunked_attention"),
        (lambda: tiny("Qwen3", kind="SequenceClassification"), "no language-model head"),
    ],
)
@torch.no_grad()
def test_attach_refuses(build, reason):
    message = f"cannot share prefixes: .*({reason}).*go without .share_prefix=False."
    with pytest.raises(ValueError, match=message):
        attach(build())


def test_prompt_learning_is_refused():
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(make_model("Qwen3"), prompt)
    with pytest.raises(ValueError, match="prompt learning"):
        attach(model)
    with pytest.raises(ValueError, match="prompt learning"):
        completion_logprobs(model, pack(make_groups(), share_prefix=False)[0])


@pytest.mark.parametrize(
    ("name", "field"), [("Llama", "attention_dropout"), ("GPT2", "attn_pdrop")]
)
def test_dropout_in_attention_is_refused(name, field):
    """Rows that share prefixes would be without: while it is there, and not after."""
    model = attach(tiny(name, **{field: 0.1}))
    (row,) = pack(make_groups())
    with pytest.raises(ValueError, match="no dropout in attention"):
        completion_logprobs(model.train(), row)
    completion_logprobs(model.eval(), row)


@pytest.mark.parametrize("share_prefix", [True, False])
def test_arguments_that_do_not_fit(share_prefix):
    """A shared row needs a model that is attached itself: others may share its configuration."""
    policy = make_model("Qwen3Next")
    reference = type(policy)(policy.config)
    (row,) = pack(make_groups(), share_prefix=share_prefix)
    for model in (policy, reference) if share_prefix else ():
        with pytest.raises(ValueError, match="attach.model. first"):
            completion_logprobs(model, row)
        attach(policy)
    with pytest.raises(ValueError, match="temperature=0.0: must be above 0"):
        completion_logprobs(policy, row, 0.0)
    with pytest.raises(ValueError, match=r"inputs_embeds \[1, 3, 32\] of a row of "):
        completion_logprobs(policy, row, inputs_embeds=torch.randn(1, 3, 32))
    with torch.no_grad():
        policy.model.norm.weight.fill_(torch.nan)
    assert completion_logprobs(policy, row).isnan().all()  # a diverged run is seen as what it is


# -- verification ----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0, torch.nan])
def test_verification_notices_wrong_gradients(factor, monkeypatch):
    """A comparison of largest differences would let NaN by."""
    break_gradients(monkeypatch, factor)
    with pytest.raises(ValueError, match="gradients differ from plain rows"):
        attach(make_model("Llama"))
    attach(make_model("Llama"), verify=False)


def test_verification_restores_everything():
    """Gradients, mode and attention, also where it fails; it looks past dropout of an adapter."""
    lora = LoraConfig(target_modules="all-linear", lora_dropout=0.5)
    model = get_peft_model(make_model("Llama"), lora).train()
    model.get_submodule("base_model.model.model.layers.0").eval()
    modes = [module.training for module in model.modules()]
    weight = next(parameter for name, parameter in model.named_parameters() if "lora_B" in name)
    weight.grad = torch.ones_like(weight)
    attach(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(weight.grad, torch.ones_like(weight))
    broken = make_model("Qwen3")
    broken.model.rotary_emb.forward = lambda x, position_ids: 1 / 0
    with pytest.raises(ValueError, match="Qwen3ForCausalLM cannot share prefixes: division by zer"):
        attach(broken)
    assert broken.config._attn_implementation == "sdpa"


# -- together with ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision(dtype, limit):
    """As near to fp32 as plain rows in half precision come, with a margin of two."""
    full = make_model("Qwen3")
    half = attach(make_model("Qwen3", dtype=dtype))
    exact = plain_rows(full, make_groups())
    plain = plain_rows(make_model("Qwen3", dtype=dtype), make_groups()).float()
    shared = shared_rows(half, make_groups())
    assert shared.dtype == torch.float32
    assert (shared - exact).abs().mean() <= 2 * (plain - exact).abs().mean() + 1e-3
    of_half = gradients(half, shared)
    of_full = gradients(full, exact)
    errors = [((of_half[n].float() - g).norm() / g.norm()).item() for n, g in of_full.items()]
    assert sorted(errors)[len(errors) // 2] <= limit
    with torch.autocast("cpu", dtype):
        under_autocast = shared_rows(attach(make_model("Qwen3")), make_groups())
    assert (under_autocast - exact).abs().mean() <= limit


def test_compiled_once_for_all_layouts():
    """After two layouts (shapes become symbols at the second) any other runs the same program."""
    torch._dynamo.reset()
    plain = tiny("Qwen3", num_hidden_layers=1)
    compiles = torch._dynamo.testing.CompileCounter()
    model = torch.compile(attach(copy.deepcopy(plain)), backend=compiles)
    counts = []
    for groups in (make_groups(), make_groups()[:2], [make_groups()[2]] * 3):
        got = shared_rows(model, groups)
        torch.testing.assert_close(got, plain_rows(plain, groups), rtol=1e-5, atol=1e-5)
        counts.append(compiles.frame_count)
    assert counts[-1] == counts[1]


def test_the_readmes_snippet(monkeypatch):
    page = (ROOT / "docs" / "prefix-attention.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    model = tiny("Qwen3", vocab_size=10000)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: model)
    names: dict[str, Any] = {}
    exec(first, names)
    expected = plain_rows(model, names["groups"])
    torch.testing.assert_close(names["logprobs"], expected, rtol=1e-5, atol=1e-5)
    sums = torch.stack([of_one.sum() for of_one in expected.split([3, 1, 2, 2, 3])])
    torch.testing.assert_close(names["scores"], sums, rtol=1e-5, atol=1e-5)
    assert model.lm_head.weight.grad is not None
    exec(second, names)
    assert names["soft"].grad.abs().max() > 0
