"""Rows, the head's log-probabilities, refusals, and what shared prefixes must get along with."""

import contextlib
import copy
import itertools
import math
import re
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import transformers
from helpers import ROOT
from test_prefix_models import (
    SIZES,
    assert_equal_gradients,
    break_gradients,
    exact,
    gradients,
    make_agents,
    make_groups,
    make_model,
    pairs,
    plain_logits,
    plain_rows,
    shared_rows,
    stock,
)
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import prefix_attention
from prefix_attention import attach, completion_logprobs, num_packed_tokens, pack

__all__ = ["exact"]

# -- rows ------------------------------------------------------------------------------------------

GROUPS = [
    ([5, 6, 7], [[8, 9, 2], [2], []]),
    ([10, 11, 12, 13, 14, 15, 2, 2], [[16, 2, 2, 17], [18, 19, 20, 21, 22, 23, 24]]),
]
BRANCHING = [
    [7, 8, 9], [7, 8, 9, 10], [7, 8, 11], [7], [12, 7], [7, 8, 9], [20, 3, 4, 5], [20, 3, 9, 9],
]  # fmt: skip


def contexts(row):
    """For each completion token of a row: the tokens that it is conditioned on."""
    if row.tree is None:
        width = row.input_ids.shape[1]
        lines = row.input_ids.tolist()
        return [lines[cell // width][: cell % width + 1] for cell in row.cells.tolist()]
    found = {}
    path: list[int] = []
    for start, length, depth, _ in row.tree.segments:
        path = path[:depth]
        for place in range(start, start + length):
            path = [*path, place]
            found[place] = row.input_ids[0, path].tolist()
            assert row.position_ids[0, place] == len(path) - 1
    assert found.keys() == set(range(row.num_tokens))
    return [found[place] for place in row.cells.tolist()]


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("max_tokens", [None, 40, 31])
def test_every_token_stands_below_its_own_context(max_tokens, share_prefix):
    groups = [*GROUPS, ([5, 6], BRANCHING), *make_agents()]
    expected = []  # of each token: what is before, group, completion, itself
    num_completions = 0
    for number, (prompt, completions) in enumerate(groups):
        for completion in completions:
            for before, ids in pairs([(prompt, [completion])]):
                for place, token in enumerate(ids):
                    expected.append((before + ids[:place], number, num_completions, token))
            num_completions += 1

    rows = pack(groups, max_tokens, share_prefix)
    indices = [row.index.tolist() for row in rows]
    assert sorted(itertools.chain(*indices)) == list(range(len(expected)))
    for row, index in zip(rows, indices, strict=True):
        assert max_tokens is None or row.num_tokens <= max_tokens
        assert index == sorted(index)
        columns = (row.group.tolist(), row.completion.tolist(), row.targets.tolist())
        found = [*zip(contexts(row), *columns, strict=True)]
        assert found == [expected[place] for place in index]
        # Pickled for other ranks: a view would take its whole storage along.
        for name in ("cells", "targets", "group", "completion", "index"):
            column = getattr(row, name)
            assert column.untyped_storage().nbytes() == column.nbytes, name


def test_nothing_is_forwarded_twice():
    """As many tokens as there are different contexts in a row; groups apart share nothing."""
    groups = [*GROUPS, ([5, 6], BRANCHING), *make_agents()]
    for few in (groups[:2], groups[:3], groups[3:]):
        whole = [prompt + ids[:-1] for prompt, ids in pairs(few)]
        different = {tuple(ids[:n]) for ids in whole for n in range(1, len(ids) + 1)}
        assert [row.num_tokens for row in pack(few)] == [len(different)]
        assert num_packed_tokens(few) == len(different)
    of_each = [num_packed_tokens([group]) for group in groups[3:]]
    (apart,) = pack(groups[3:], apart=range(4))
    assert apart.num_tokens == num_packed_tokens(groups[3:], apart=range(4)) == sum(of_each)
    assert sorted(apart.prompts) == [0, 1, 2, 2, 3]  # a segment of the third begins otherwise
    (together,) = pack(groups[3:])
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


def test_completions_may_branch_at_every_token():
    """Each one a token longer than the one before, alone and with an end of its own."""
    answer = [3 + i % 90 for i in range(1500)]
    (row,) = pack([([1, 2], [answer[:length] for length in range(1, 1501)])])
    assert row.position_ids[0].tolist() == list(range(1501))
    assert len(row.targets) == 1500 * 1501 // 2
    (row,) = pack([([1, 2], [[*answer[:length], 95, 96] for length in range(1500)])], 10_000)
    assert row.tree is not None
    assert row.num_tokens == 2 + 1499 + 1500
    assert len(row.tree.segments) == 1500


@pytest.mark.parametrize("block", [1, 3, 512])
@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "GptOss"])
def test_windows_that_bind_by_one_token(family, block, monkeypatch):
    """Paths below, at and over the window, in blocks of queries smaller than a segment."""
    monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", block)
    plain, shared = make_model(family, stock(family)), attach(make_model(family))
    for length in range(4, 9):  # with two prompt tokens, all but the last forwarded
        groups = [([5, 6], [list(range(10, 10 + length)), [7, 8]])]
        got, expected = shared_rows(shared, groups), plain_rows(plain, groups)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=f"{length}")


# -- the head --------------------------------------------------------------------------------------


READS = {
    "log-probs": lambda logprobs, entropies: logprobs,
    "entropies": lambda logprobs, entropies: entropies,
    "both": lambda logprobs, entropies: logprobs + 0.3 * entropies,
}


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("chunk", [1, 97 * 5, 1 << 24])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_the_head_in_chunks(family, chunk, reads, exact, monkeypatch):
    """At a temperature, without two tokens; Gemma3 has a softcap. fp64: the order of summation."""
    monkeypatch.setitem(prefix_attention.HEAD_CHUNK, "cpu", chunk)
    plain = make_model(family, stock(family), torch.float64)
    forbidden = [1, 2]
    logprobs, entropies = [], []
    for logits, ids in plain_logits(plain, make_groups(), 0.7):
        allowed = logits.index_fill(-1, torch.tensor(forbidden), -math.inf).log_softmax(-1)
        logprobs.append(allowed[range(len(ids)), ids])
        entropies.append(-(allowed.exp() * allowed.nan_to_num(neginf=0.0)).sum(-1))
    expected = [torch.cat(logprobs), torch.cat(entropies)]

    ours = attach(make_model(family, dtype=torch.float64))
    (row,) = pack(make_groups())
    found = completion_logprobs(ours, row, 0.7, return_entropy=True, forbidden=forbidden)
    got = [values[row.index.argsort()] for values in found]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    of_ours = gradients(ours, READS[reads](*got))
    of_plain = gradients(plain, READS[reads](*expected))
    assert_equal_gradients(of_ours, of_plain, 1e-10)


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
    """No tensor of the size of all logits is made, forward or backward."""
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


class OddHead(torch.nn.Linear):
    def forward(self, x):
        return F.linear(x, F.normalize(self.weight), self.bias)


def test_whatever_a_model_does_to_its_logits():
    """The answer is that of its own head, with a bias and a norm, and of its own forward."""
    model = make_model("Qwen3")
    model.lm_head = OddHead(32, 97)
    forward = model.forward

    def louder(*args, logits_to_keep=0, **kwargs):
        output = forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = louder
    expected = plain_rows(model, make_groups())
    of_plain = gradients(model, expected)
    for share_prefix in (False, True):
        got = shared_rows(attach(model), make_groups(), share_prefix=share_prefix)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert_equal_gradients(gradients(model, got), of_plain, 1e-5)


@pytest.mark.parametrize("kind", ["two", "merged and off", "trained copy", "dora"])
def test_adapters_of_the_head(kind):
    """Whatever peft does to a head, the log-probs are those of its own forward."""
    from peft import LoraConfig, get_peft_model

    lora: Any = {"r": 2, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
    if kind == "trained copy":
        lora |= {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    torch.manual_seed(0)
    config = LoraConfig(**lora, use_dora=kind == "dora")
    model: Any = get_peft_model(attach(make_model("Qwen3")), config)
    if kind == "two":
        model.add_adapter("other", LoraConfig(**lora, lora_alpha=3))
        model.base_model.set_adapter(["default", "other"])
    if kind == "trained copy":
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    off: Any = contextlib.nullcontext()
    if kind == "merged and off":
        model.merge_adapter()
        off = model.disable_adapter()
    with off, torch.no_grad():
        got, expected = shared_rows(model, make_groups()), plain_rows(model, make_groups())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (([5, 6, 7], [[8], [9] * 12]), "completion 1 of group 1 has 15 tokens with its prompt"),
        (([], [[1]]), "group 1 has an empty prompt"),
    ],
)
def test_groups_that_no_row_takes(group, message):
    for share_prefix in (True, False):
        with pytest.raises(ValueError, match=message):
            pack([GROUPS[0], group], 13, share_prefix)


def tiny(name, **fields):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **fields})
    return transformers.AutoModelForCausalLM.from_config(config)


def tiny_bart():
    sizes: dict[str, Any] = {"d_model": 8, "vocab_size": 9}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 2}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))


def tiny_classifier():
    return transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**SIZES))


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
        (tiny_bart, ""),
        (lambda: tiny("Llama4Text", **CHUNKED), "chunked_attention"),
        (tiny_classifier, "no language-model head"),
    ],
)
@torch.no_grad()
def test_attach_refuses(build, reason):
    message = f"cannot share prefixes: .*({reason}).*go without .share_prefix=False."
    with pytest.raises(ValueError, match=message):
        attach(build())


def test_prompt_learning_is_refused():
    from peft import PromptTuningConfig, get_peft_model

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


def test_a_shared_row_needs_an_attached_model():
    """Its implementation's name stands in a config that another model may share."""
    policy = make_model("Qwen3Next")
    reference = type(policy)(policy.config)
    (row,) = pack(make_groups())
    with pytest.raises(ValueError, match="attach.model. first"):
        completion_logprobs(policy, row)
    attach(policy)
    completion_logprobs(policy, row)
    with pytest.raises(ValueError, match="attach.model. first"):
        completion_logprobs(reference, row)


@pytest.mark.parametrize("share_prefix", [True, False])
def test_arguments_that_do_not_fit(share_prefix):
    model = attach(make_model("Llama"))
    (row,) = pack(make_groups(), share_prefix=share_prefix)
    with pytest.raises(ValueError, match="temperature=0.0: must be above 0"):
        completion_logprobs(model, row, 0.0)
    with pytest.raises(ValueError, match=r"inputs_embeds \[1, 3, 32\] of a row of "):
        completion_logprobs(model, row, inputs_embeds=torch.randn(1, 3, 32))
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    assert completion_logprobs(model, row).isnan().all()  # a diverged run is seen as what it is


# -- verification ----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0, math.nan])  # a comparison of largest differences lets NaN by
def test_verification_notices_wrong_gradients(factor, monkeypatch):
    break_gradients(monkeypatch, factor)
    with pytest.raises(ValueError, match="gradients differ from plain rows"):
        attach(make_model("Llama"))
    attach(make_model("Llama"), verify=False)


def test_verification_restores_everything():
    """Gradients, mode and attention, also where it fails; it looks past dropout of an adapter."""
    from peft import LoraConfig, get_peft_model

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


@pytest.mark.parametrize("family", ["Llama", "Qwen3_5"])
def test_a_copy_of_an_attached_model_is_its_own(family):
    model = attach(make_model(family))
    before = shared_rows(model, make_groups()).detach()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert (shared_rows(other, make_groups()) - before).abs().max() > 0.01
    torch.testing.assert_close(shared_rows(model, make_groups()), before, rtol=0, atol=0)


def test_the_readmes_snippet(monkeypatch):
    page = (ROOT / "docs" / "prefix-attention.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    assert "attach(" in first
    model = tiny("Qwen3", vocab_size=10000)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: model)
    names: dict[str, Any] = {}
    exec(first, names)
    expected = plain_rows(model, names["groups"])
    torch.testing.assert_close(names["logprobs"], expected, rtol=1e-5, atol=1e-5)
    sums = torch.stack([of_one.sum() for of_one in expected.split([3, 1, 2, 2, 3])])
    torch.testing.assert_close(names["scores"], sums, rtol=1e-5, atol=1e-5)
    assert model.lm_head.weight.grad is not None
    exec(second, names)
    assert names["soft"].grad.abs().max() > 0
