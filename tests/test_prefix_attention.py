"""Rows, the head's log-probabilities, refusals, and what shared prefixes must get along with."""

import contextlib
import copy
import dataclasses
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import transformers
from helpers import ROOT
from test_prefix_models import (
    SIZES,
    assert_equal_gradients,
    bare_head,
    gradients,
    make_agents,
    make_groups,
    make_model,
    pairs,
    plain_rows,
    shared_rows,
    stock,
)
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import prefix_attention
from prefix_attention import (
    PackedBatch,
    Tree,
    _Asked,
    _Cascade,
    _in_chunks,
    _logits,
    attach,
    completion_logprobs,
    num_packed_tokens,
    pack,
)

GROUPS = [
    ([5, 6, 7], [[8, 9, 2], [2], []]),
    ([10, 11, 12, 13, 14, 15, 2, 2], [[16, 2, 2, 17], [18, 19, 20, 21, 22, 23, 24]]),
]
FLAT = [token for _, completions in GROUPS for completion in completions for token in completion]


def plain_logprobs(model, temperature):
    """One unpadded row per completion, the whole log-softmax."""
    parts = []
    for prompt, completions in GROUPS:
        for completion in completions:
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
            for place, token in enumerate(completion, len(prompt) - 1):
                parts.append((logits[place] / temperature).log_softmax(-1)[token])
    return torch.stack(parts)


def packed_logprobs(model, temperature, max_tokens):
    together = torch.zeros(len(FLAT), dtype=model.dtype)
    for row in pack(GROUPS, max_tokens, share_prefix=False):
        assert max_tokens is None or row.num_tokens <= max_tokens
        assert row.targets.tolist() == [FLAT[i] for i in row.index]
        together = together.index_put((row.index,), completion_logprobs(model, row, temperature))
    return together


@pytest.mark.parametrize("max_tokens", [None, 32, 15])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(models, max_tokens, temperature):
    model = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float64)
    weights = torch.linspace(-1, 1, len(FLAT), dtype=torch.float64)
    results = []
    for logprobs in (
        plain_logprobs(model, temperature),
        packed_logprobs(model, temperature, max_tokens),
    ):
        model.zero_grad(set_to_none=True)
        (logprobs * weights).sum().backward()
        results.append((logprobs.detach(), [p.grad for p in model.parameters()]))
    (plain, plain_gradients), (packed, packed_gradients) = results
    # Qwen3's norms and rotary embedding compute in fp32 also in an fp64 model: 1e-6, not 1e-14
    torch.testing.assert_close(packed, plain, rtol=1e-6, atol=1e-6)
    for got, expected in zip(packed_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_entropy(models):
    model = AutoModelForCausalLM.from_pretrained(models["tied"], dtype=torch.float64)
    (row,) = pack(GROUPS[:1], share_prefix=False)
    _, entropy = completion_logprobs(model, row, 0.7, return_entropy=True)
    logits = model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 2]])).logits[0, 2:5] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy[:3], expected, rtol=1e-6, atol=1e-6)


def test_order_and_numbers():
    rows = pack(GROUPS, 16, share_prefix=False)
    assert torch.cat([row.index for row in rows]).tolist() == list(range(len(FLAT)))
    for row in rows:  # pickled for other ranks, a view would take its whole storage along
        for name in ("cells", "targets", "group", "completion", "index"):
            column = getattr(row, name)
            assert column.untyped_storage().nbytes() == column.nbytes, name
    completions = torch.cat([row.completion for row in rows]).tolist()
    assert completions == [0] * 3 + [1] + [3] * 4 + [4] * 7


def test_refusals():
    with pytest.raises(ValueError, match="completion 1 of group 1 has 15 tokens"):
        pack(GROUPS, 13, share_prefix=False)
    with pytest.raises(ValueError, match="group 0 has an empty prompt"):
        pack([([], [[1]])], share_prefix=False)


# -- rows ------------------------------------------------------------------------------------------------------------


def paths(row):
    """For each completion token of a shared row: the tokens it is conditioned on, walked from the segments alone."""
    contexts = {}
    path: list[int] = []
    for start, length, depth, _ in row.tree.segments:
        path = path[:depth]
        for place in range(start, start + length):
            path = [*path, place]
            contexts[place] = row.input_ids[0, path].tolist()
            assert row.position_ids[0, place] == len(path) - 1
    assert contexts.keys() == set(range(row.num_tokens))
    return [contexts[place] for place in row.cells.tolist()]


BRANCHING = [
    [7, 8, 9],
    [7, 8, 9, 10],
    [7, 8, 11],
    [7],
    [12, 7],
    [7, 8, 9],
    [20, 3, 4, 5],
    [20, 3, 9, 9],
]


@pytest.mark.parametrize("max_tokens", [None, 40, 31])
def test_every_token_stands_below_its_own_context(max_tokens):
    groups = [*GROUPS, ([5, 6], BRANCHING), *make_agents()]
    rows = pack(groups, max_tokens)
    expected = [prompt + ids[:t] for prompt, ids in pairs(groups) for t in range(len(ids))]
    flat = [
        (g, token) for g, group in enumerate(groups) for _, ids in pairs([group]) for token in ids
    ]
    assert sorted(i for row in rows for i in row.index.tolist()) == list(range(len(flat)))
    for row in rows:
        assert max_tokens is None or row.num_tokens <= max_tokens
        assert row.index.tolist() == sorted(row.index.tolist())
        assert paths(row) == [expected[i] for i in row.index]
        assert list(zip(row.group.tolist(), row.targets.tolist(), strict=True)) == [
            flat[i] for i in row.index
        ]


def test_nothing_is_forwarded_twice():
    """As many tokens as there are different contexts in a row."""
    groups = [*GROUPS, ([5, 6], BRANCHING), *make_agents()]
    for few in (groups[:2], groups[:3], groups[3:]):
        whole = [prompt + ids[:-1] for prompt, ids in pairs(few)]
        nodes = {tuple(ids[:n]) for ids in whole for n in range(1, len(ids) + 1)}
        assert [row.num_tokens for row in pack(few)] == [len(nodes)]
        assert num_packed_tokens(few) == len(nodes)
    apart = pack(groups[3:], apart=range(4))
    assert [row.num_tokens for row in apart] == [
        sum(num_packed_tokens([group]) for group in groups[3:])
    ]
    alike = [([1, 2, 3], [[5, 6, 7, 8], [5, 6, 7, 9]])]
    assert [row.num_tokens for row in pack(alike, 8)] == [3 + 3]
    assert [row.num_tokens for row in pack(GROUPS[::-1], 22)] == [17 + 5]
    assert [row.num_tokens for row in pack(GROUPS[::-1], 16)] == [11, 14, 5]  # the first is split


def test_sharing_among_groups():
    """A system prompt once for all groups, each prompt once for its completions; with images apart."""
    system = [1] * 100
    groups = [
        ([*system, *[10 + n] * 10], [[20 + 16 * n + c] * 300 for c in range(16)]) for n in range(4)
    ]
    alone = [num_packed_tokens([group]) for group in groups]
    assert alone == [110 + 16 * 299] * 4
    assert num_packed_tokens(groups) == sum(alone) - 3 * 100
    assert num_packed_tokens(groups, apart=range(4)) == sum(alone)
    (row,) = pack(groups, apart=range(4))
    assert sorted(row.prompts) == [0, 1, 2, 3]
    (row,) = pack(groups)
    assert row.prompts == [None]


def test_groups_stay_in_order():
    """Two system prompts, each once in a row of its groups."""
    systems = [[1 + n] * 20 for n in range(2)]
    groups = [([*systems[n // 5], 30 + n], [[40 + n], [50 + n] * 3]) for n in range(10)]
    rows = pack(groups, 20 + 5 * 3)
    assert [row.group.unique().tolist() for row in rows] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [row.num_tokens for row in rows] == [35, 35]
    groups = [([5] * 6, [[6] * 3]), ([5] * 9, [[6] * 2]), ([7], [[8] * 2])]
    assert [row.group.unique().tolist() for row in pack(groups, 10)] == [[0], [1], [2]]


def test_a_completion_stays_whole_where_it_fits():
    """Two segments of 9 + 3 tokens that share 4: 20 together; in rows of 19 each stands alone."""
    segments = [([1, 2, 3, 4, *[n] * 5], [20, 21, 22, 23]) for n in (7, 8)]
    groups = [([1, 2], [[9] * 12, segments, [10] * 12])]
    assert [row.completion.unique().tolist() for row in pack(groups, 20)] == [[0], [1], [2]]
    assert [row.completion.unique().tolist() for row in pack(groups, 19)] == [[0], [1], [1], [2]]


def test_the_longest_history_is_one_segment():
    """Turns whose thoughts are stripped branch off the longest one, which a second level of calls sees."""
    groups = [([1, 2], [[([1, 2, *range(20, 20 + 4 * n)], [10 + n] * 3) for n in range(5)]])]
    (row,) = pack(groups)
    assert row.tree is not None
    assert row.tree.segments == [
        (0, 20, 0, 0),
        *((26 - 2 * n, 2, 2 + 4 * n, 0) for n in (3, 2, 1, 0)),
    ]
    blocks = prefix_attention._blocks(row.tree, torch.device("cpu"), is_cuda=True)
    assert [block.level for block in blocks] == [0, 1, 1]  # of 28 tokens; together they see 32
    assert [len(block.lengths[0]) - 1 for block in blocks] == [5, 2, 2]


def test_empty_completions_only():
    assert pack([([5, 6], [[], []])]) == []


def test_rows_are_laid_out_by_level():
    """Each prompt with its longest completion, then the others, which see the prompt."""
    groups = [
        ([1, 2, 3], [[11, 12, 13], [14, 15]]),
        ([4, 5], [[16, 17, 18]]),
        ([6], [[19], [20, 21, 22]]),
    ]
    (row,) = pack(groups)
    assert row.tree is not None
    assert row.input_ids[0].tolist() == [1, 2, 3, 11, 12, 6, 20, 21, 4, 5, 16, 17, 14]
    assert row.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 3]
    assert row.tree.segments == [(0, 5, 0, 0), (12, 1, 3, 0), (5, 3, 0, 0), (8, 4, 0, 0)]
    assert row.targets.tolist() == [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
    assert row.cells.tolist() == [2, 3, 4, 2, 12, 9, 10, 11, 5, 5, 6, 7]
    assert row.prompts == [0, 2, 1]


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_rows_of_single_segments(max_tokens):
    """Nothing shared and nothing padded: the same values and gradients as plain rows."""
    alone = [
        (prompt, [completion])
        for prompt, completions in make_groups()
        for completion in completions
    ]
    rows: list[Any] = pack(alone, max_tokens, apart=range(len(alone)))
    segments = [segment for row in rows for segment in row.tree.segments]
    assert {depth for _, _, depth, _ in segments} == {0}
    assert all(row.num_tokens <= (max_tokens or 1000) for row in rows)
    lengths = [
        len(prompt) + len(c) - 1 for prompt, completions in make_groups() for c in completions if c
    ]
    assert sorted(length for _, length, _, _ in segments) == sorted(lengths)
    plain, ours = make_model("Qwen3", stock("Qwen3")), attach(make_model("Qwen3"))
    expected = plain_rows(plain, make_groups())
    got = torch.zeros_like(expected)
    for row in rows:
        got = got.index_put((row.index,), completion_logprobs(ours, row))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert_equal_gradients(gradients(ours, got), gradients(plain, expected), 1e-4)


def test_a_tree_of_any_depth():
    """A hand-made row: 3 tokens, below them 5 and 4, below the first 2 of the 5 another 1; against each path alone."""
    model = attach(make_model("Llama"))
    ids = torch.randint(3, 97, (13,), generator=torch.Generator().manual_seed(0))
    tree = Tree([(0, 3, 0, 0), (3, 5, 3, 0), (8, 1, 5, 0), (9, 4, 3, 0)])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 5, 3, 4, 5, 6]])
    leaf_paths = ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8], [0, 1, 2, 9, 10, 11, 12])
    row = torch.zeros(13, dtype=torch.long)
    everything = PackedBatch(
        ids[None],
        positions,
        None,
        tree,
        torch.arange(13),
        ids.roll(-1),
        row,
        row,
        torch.arange(13),
        [0],
    )
    got = completion_logprobs(model, everything)
    for path in leaf_paths:
        expected = make_model("Llama")(input_ids=ids[path][None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(
            got[path], expected[range(len(path)), ids.roll(-1)[path]], rtol=1e-5, atol=1e-5
        )


# -- the head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads_entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 97 * 5, 1 << 23])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_chunks_equal_the_whole_head(chunk, softcap, reads_entropy, monkeypatch):
    """fp64, with a bias, a second factor, multiplier and temperature; values, entropies and every gradient."""
    monkeypatch.setitem(prefix_attention.HEAD_CHUNK, "cpu", chunk)
    generator = torch.Generator().manual_seed(0)
    shapes = ((23, 8), (97, 8), (23, 3), (97, 3), (97,))
    tensors = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]
    x, w, low, up, bias = tensors
    targets = torch.randint(97, (23,), generator=generator)

    def head(both):
        z = 0.5 * (both[:, :8] @ w.T + both[:, 8:] @ up.T + bias)
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    both = torch.cat([x, low], 1)
    logprobs, entropies = _in_chunks(head, both, 97, _Asked(targets, targets, 0.7, (), True))
    logits = head(both) / 0.7
    expected = logits.log_softmax(-1)[range(23), targets]
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropies, entropy, rtol=1e-12, atol=1e-12)
    weights, others = torch.randn(2, 23, generator=generator, dtype=torch.float64)
    ours_sum, theirs_sum = (logprobs * weights).sum(), (expected * weights).sum()
    if reads_entropy:
        ours_sum, theirs_sum = ours_sum + entropies @ others, theirs_sum + entropy @ others
    got = torch.autograd.grad(ours_sum, tensors)
    theirs_of_all = torch.autograd.grad(theirs_sum, tensors)
    for ours, theirs in zip(got, theirs_of_all, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_entropies_of_shared_rows_have_gradients(family):
    """fp64, at a temperature, without two tokens: those of all weights, against each prompt and completion alone."""
    model = make_model(family, stock(family), torch.float64)
    forbidden = [3, 5]
    entropies = []
    for prompt, ids in pairs(make_groups()):
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logits = (logits / 0.7).index_fill(-1, torch.tensor(forbidden), -math.inf)
        logprobs = logits.log_softmax(-1)
        entropies.append(-(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(-1))
    expected = torch.cat(entropies)
    weights = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
    model.zero_grad()
    (expected * weights).sum().backward()
    plain = {name: weight.grad.clone() for name, weight in model.named_parameters()}

    attach(model)
    (row,) = pack(make_groups())
    _, got = completion_logprobs(model, row, 0.7, return_entropy=True, forbidden=forbidden)
    got = got[row.index.argsort()]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    model.zero_grad()
    (got * weights).sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, plain[name], rtol=1e-5, atol=1e-6)


def test_a_head_with_a_bias():
    model = make_model("Qwen3")
    model.lm_head = torch.nn.Linear(32, 97)
    (row,) = pack(make_groups(), share_prefix=False)
    got, expected = completion_logprobs(model, row), plain_rows(model, make_groups())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(gradients(model, got), gradients(model, expected), 1e-5)


def test_entropies_are_fp32_under_autocast():
    """1e-5 nats, as of sums in fp32; a product in bf16 would be off by 2⁻⁹ of the logits."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator) for shape in ((23, 64), (4001, 64)))
    targets = torch.zeros(23, dtype=torch.long)
    base = bare_head(partial(F.linear, weight=w))
    head = partial(_logits, base, base.forward, base.outputs)
    with torch.autocast("cpu", torch.bfloat16):
        _, entropies = _in_chunks(head, x, 4001, _Asked(targets, targets, 4.0, (), True))
    expected = torch.distributions.Categorical(logits=x.double() @ w.double().T / 4).entropy()
    torch.testing.assert_close(entropies.double(), expected, rtol=0, atol=1e-5)


def test_logits_of_a_row_never_exist(monkeypatch):
    """No tensor of the size of all logits is made, forward or backward."""
    monkeypatch.setitem(prefix_attention.HEAD_CHUNK, "cpu", 97 * 4)
    model = attach(make_model("Qwen3"))
    (row,) = pack(make_groups())
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if (
                    isinstance(tensor, torch.Tensor)
                    and tensor.ndim == 2
                    and tensor.shape[1] == 97
                    and len(tensor) != 32
                ):
                    largest = max(largest, len(tensor))
            return result

    with Sizes():
        completion_logprobs(model, row).sum().backward()
    assert 4 <= largest < 8


# -- refusals --------------------------------------------------------------------------------------------------------


def tiny(name, **fields):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **fields})
    return transformers.AutoModelForCausalLM.from_config(config)


def tiny_bart():
    sizes = {
        f"{part}_{what}": 2
        for part in ("encoder", "decoder")
        for what in ("layers", "attention_heads", "ffn_dim")
    }
    config: Any = transformers.BartConfig
    return transformers.BartForConditionalGeneration(config(d_model=8, vocab_size=9, **sizes))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: tiny("Mamba", state_size=4), ""),
        (lambda: tiny("Bloom"), ""),
        (
            lambda: tiny(
                "Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "dynamic",
        ),
        (
            lambda: tiny("Qwen2Moe", use_sliding_window=True, sliding_window=8, num_experts=4),
            "window is in the mask",
        ),
        (lambda: tiny_bart(), ""),
        (
            lambda: tiny("Llama4Text", num_local_experts=2, interleave_moe_layer_step=1),
            "chunked_attention",
        ),
    ],
)
@torch.no_grad()
def test_attach_refuses(build, reason):
    with pytest.raises(
        ValueError, match=f"cannot share prefixes: .*({reason}).*go without .share_prefix=False."
    ):
        attach(build())


@pytest.mark.parametrize("build", [
    lambda: tiny("Llama", attention_dropout=0.1), lambda: tiny("GPT2", attn_pdrop=0.1),
])  # fmt: skip
def test_dropout_in_attention_is_refused(build):
    """Rows that share prefixes would be without: while it is there, and not after."""
    model = attach(build())
    (row,) = pack(make_groups())
    with pytest.raises(ValueError, match="no dropout in attention"):
        completion_logprobs(model.train(), row)
    completion_logprobs(model.eval(), row)


def test_completions_may_branch_at_every_token():
    """Each one a token longer than the one before, alone and with an end of its own."""
    answer = [3 + i % 90 for i in range(1500)]
    (row,) = pack([([1, 2], [answer[:length] for length in range(1, 1501)])])
    assert row.tree is not None
    assert row.num_tokens == 2 + 1499
    assert row.position_ids[0].tolist() == list(range(1501))
    assert len(row.targets) == 1500 * 1501 // 2
    (row,) = pack([([1, 2], [[*answer[:length], 95, 96] for length in range(1500)])], 10_000)
    assert row.tree is not None
    assert row.num_tokens == 2 + 1499 + 1500
    assert len(row.tree.segments) == 1500


def test_another_model_of_the_same_config_is_not_attached():
    """The implementation's name stands in the config, which both share; the patched layers are one model's."""
    policy = make_model("Qwen3Next")
    reference = type(policy)(policy.config)
    attach(policy)
    (row,) = pack(make_groups())
    completion_logprobs(policy, row)
    with pytest.raises(ValueError, match="attach.model. first"):
        completion_logprobs(reference, row)
    assert torch.equal(
        completion_logprobs(copy.deepcopy(policy), row), completion_logprobs(policy, row)
    )


def test_prompt_learning_is_refused():
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(
        make_model("Qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ValueError, match="prompt learning"):
        attach(model)
    with pytest.raises(ValueError, match="prompt learning"):
        completion_logprobs(model, pack(make_groups(), share_prefix=False)[0])


def test_a_head_and_a_temperature_are_needed():
    classifier = transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**SIZES))
    with pytest.raises(ValueError, match="no language-model head"):
        attach(classifier)
    model = make_model("Granite")
    (row,) = pack(make_groups(), share_prefix=False)
    with pytest.raises(ValueError, match="temperature=0.0: must be above 0"):
        completion_logprobs(model, row, 0.0)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    assert completion_logprobs(model, row).isnan().all()  # a diverged run is seen as what it is


def test_softcap_of_a_config_that_refuses_none():
    config = transformers.Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 2, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8},
        vocab_size_per_layer_input=97, layer_types=["full_attention"] * 2, laurel_rank=4, final_logit_softcapping=3.0,
        activation_sparsity_pattern=[0.0, 0.0],
    )  # fmt: skip
    model = transformers.Gemma3nForCausalLM(config)
    (row,) = pack(make_groups(), share_prefix=False)
    torch.testing.assert_close(
        completion_logprobs(model, row), plain_rows(model, make_groups()), rtol=1e-4, atol=1e-4
    )


def test_verification_notices_a_model_that_looks_sideways():
    """A layer that mixes neighbouring tokens of the row, in a way that no rule knows of."""
    model = make_model("Llama")
    inner = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: (
        inner(x) + 0.5 * x.roll(1, dims=1).index_fill(1, torch.tensor([0]), 0)
    )
    with pytest.raises(ValueError, match="differ from plain rows"):
        attach(model, verify=True)


def test_verification_restores_everything():
    """Gradients, mode and attention, also where it fails; and it looks past dropout of the adapter's own."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        make_model("Llama"), LoraConfig(target_modules="all-linear", lora_dropout=0.5)
    ).train()
    model.get_submodule("base_model.model.model.layers.0").eval()
    modes = [module.training for module in model.modules()]
    weight = next(parameter for name, parameter in model.named_parameters() if "lora_B" in name)
    weight.grad = torch.ones_like(weight)
    attach(model, verify=True)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(weight.grad, torch.ones_like(weight))
    broken = make_model("Qwen3")
    broken.model.rotary_emb.forward = lambda x, position_ids: 1 / 0
    with pytest.raises(
        ValueError, match="Qwen3ForCausalLM cannot share prefixes: division by zero"
    ):
        attach(broken, verify=True)
    assert broken.config._attn_implementation == "sdpa"


def test_verification_notices_wrong_gradients(monkeypatch):
    monkeypatch.setattr(_Cascade, "backward", times(0)(_Cascade.backward))
    with pytest.raises(ValueError, match="gradients differ from plain rows"):
        attach(make_model("Llama"), verify=True)


def test_every_model_is_verified(monkeypatch):
    own = lambda *row, blocks=prefix_attention._blocks: [b for b in blocks(*row) if b.level == 0]
    monkeypatch.setattr(prefix_attention, "_blocks", own)
    with pytest.raises(ValueError, match="differ from plain rows"):
        attach(make_model("Llama"))
    attach(make_model("Llama"), verify=False)


class NormHead(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x, torch.nn.functional.normalize(self.weight))


def test_odd_heads():
    """The head runs as it is."""
    model = make_model("Qwen3")
    model.lm_head = NormHead(32, 97, bias=False)
    attach(model)
    got, expected = shared_rows(model, make_groups()), plain_rows(model, make_groups())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(gradients(model, got), gradients(model, expected), 1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "two adapters",
        "adapter elsewhere",
        "merged",
        "merged and off",
        "trained copy",
        "rslora",
        "dora",
        "bias",
    ],
)
def test_adapters_of_the_head(kind):
    """Whatever peft does to a head, the log-probs are those of its own forward."""
    from peft import LoraConfig, get_peft_model

    def lora(**fields):
        return LoraConfig(
            **{
                "r": 2,
                "target_modules": ["lm_head", "q_proj"],
                "init_lora_weights": False,
                **fields,
            }
        )

    torch.manual_seed(0)
    copied = (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
        if kind == "trained copy"
        else {}
    )
    model = get_peft_model(
        attach(make_model("Qwen3")),
        lora(
            use_rslora=kind == "rslora", use_dora=kind == "dora", lora_bias=kind == "bias", **copied
        ),
    )
    if kind == "two adapters":
        model.add_adapter("other", lora(lora_alpha=3))
        model.base_model.set_adapter(["default", "other"])
    if kind == "adapter elsewhere":
        model.add_adapter("other", lora(target_modules=["q_proj"]))
        model.base_model.set_adapter(["other"])
    if kind == "trained copy":
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    if kind.startswith("merged"):
        model.merge_adapter()
    with (
        model.disable_adapter() if kind == "merged and off" else contextlib.nullcontext(),
        torch.no_grad(),
    ):
        got, expected = shared_rows(model, make_groups()), plain_rows(model, make_groups())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [1, 3, 512])
def test_blocks_of_queries(block, monkeypatch):
    """Windows that bind by one token, in blocks smaller than a segment."""
    monkeypatch.setattr(prefix_attention, "QUERY_BLOCK", block)
    for family in ("Mistral", "Gemma2", "GptOss"):
        plain, shared = make_model(family, stock(family)), attach(make_model(family))
        for length in (
            5,
            6,
            7,
        ):  # with two prompt tokens, all but the last forwarded: below, at and over the window
            groups = [([5, 6], [list(range(10, 10 + length)), [7, 8]])]
            torch.testing.assert_close(
                shared_rows(shared, groups),
                plain_rows(plain, groups),
                rtol=1e-5,
                atol=1e-5,
                msg=f"{family} {length}",
            )


def test_a_shared_row_needs_an_attached_model():
    (row,) = pack(make_groups())
    with pytest.raises(ValueError, match="attach"):
        completion_logprobs(make_model("Llama"), row)


def test_whatever_a_model_does_to_its_logits():
    """The answer is that of its own forward."""
    model = make_model("Llama")
    forward = model.forward

    def louder(*args, logits_to_keep=0, **kwargs):
        output = forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = louder
    (row,) = pack(make_groups(), share_prefix=False)
    expected = plain_rows(model, make_groups())
    torch.testing.assert_close(completion_logprobs(model, row), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        shared_rows(attach(model), make_groups()), expected, rtol=1e-5, atol=1e-5
    )


# -- together with -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision(dtype, limit):
    """Against the same weights in fp32: as near as plain rows in half precision come, with a margin of two."""
    exact = plain_rows(make_model("Qwen3"), make_groups())
    plain = plain_rows(make_model("Qwen3", dtype=dtype), make_groups()).float()
    shared = shared_rows(attach(make_model("Qwen3", dtype=dtype)), make_groups())
    assert shared.dtype == torch.float32
    assert (shared - exact).abs().mean() <= 2 * (plain - exact).abs().mean() + 1e-3
    half = attach(make_model("Qwen3", dtype=dtype))
    full = make_model("Qwen3")
    of_half = gradients(half, shared_rows(half, make_groups()))
    of_full = gradients(full, plain_rows(full, make_groups()))
    errors = [((of_half[n].float() - g).norm() / g.norm()).item() for n, g in of_full.items()]
    assert sorted(errors)[len(errors) // 2] <= limit
    with torch.autocast("cpu", dtype):
        under_autocast = shared_rows(attach(make_model("Qwen3")), make_groups())
    assert (under_autocast - exact).abs().mean() <= limit


def test_compiled_once_for_all_layouts():
    """After two layouts (shapes become symbols at the second) any other runs the same program."""
    torch._dynamo.reset()
    plain = make_model("Qwen3")
    compiles = torch._dynamo.testing.CompileCounter()
    model = torch.compile(attach(make_model("Qwen3")), backend=compiles)
    counts = []
    for groups in (make_groups(), make_groups()[:2], make_groups()[1:], [make_groups()[2]] * 3):
        got = shared_rows(model, groups)
        torch.testing.assert_close(got, plain_rows(plain, groups), rtol=1e-5, atol=1e-5)
        counts.append(compiles.frame_count)
    assert counts[-1] == counts[1]


def test_a_copy_of_an_attached_model_is_its_own():
    for family in ("Llama", "Qwen3_5"):
        model = attach(make_model(family))
        before = shared_rows(model, make_groups()).detach()
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        assert (shared_rows(other, make_groups()) - before).abs().max() > 0.01
        torch.testing.assert_close(shared_rows(model, make_groups()), before, rtol=0, atol=0)


def test_checkpoints_do_not_know_of_it(tmp_path):
    model = attach(make_model("Gemma2"))
    shared_rows(model, make_groups())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config.final_logit_softcapping == 3.0
    torch.testing.assert_close(
        plain_rows(loaded, make_groups()), shared_rows(model, make_groups()), rtol=1e-5, atol=1e-5
    )


def test_the_readmes_snippet(monkeypatch):
    snippets = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "prefix-attention.md").read_text(), re.DOTALL
    )
    assert "attach(" in snippets[0]
    model = tiny("Qwen3", vocab_size=10000)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: model)
    names: dict[str, Any] = {}
    exec(snippets[0], names)
    expected = plain_rows(model, names["groups"])
    torch.testing.assert_close(names["logprobs"], expected, rtol=1e-5, atol=1e-5)
    sums = torch.stack([of_one.sum() for of_one in expected.split([3, 1, 2, 2, 3])])
    torch.testing.assert_close(names["scores"], sums, rtol=1e-5, atol=1e-5)
    assert model.lm_head.weight.grad is not None
    exec(snippets[1], names)
    assert names["soft"].grad.abs().max() > 0


def times(factor):
    """Gradients as many times as large."""
    return lambda right: (
        lambda *args: tuple(
            None if gradient is None else factor * gradient for gradient in right(*args)
        )
    )


def test_gradients_that_are_nan_are_refused(monkeypatch):
    """A comparison of largest differences would let them through."""
    monkeypatch.setattr(_Cascade, "backward", times(math.nan)(_Cascade.backward))
    with pytest.raises(ValueError, match="gradients differ from plain rows"):
        attach(make_model("Llama", stock("Llama")), verify=True)


# -- mutations -------------------------------------------------------------------------------------------------------
# Each takes a function and returns it with a fault.


def heavier(merge):
    """The other part is weighed against the first instead of both."""

    def broken(a, a_lse, b, b_lse):
        out, lse = merge(a, a_lse, b, b_lse)
        return out + b * ((b_lse - a_lse).exp() - (b_lse - lse).exp())[..., None], lse

    return broken


def sinks_off_by_one(merge):
    """The key without a value is a nat smaller."""

    def broken(a, a_lse, b, b_lse):
        return merge(a, a_lse, b, b_lse if b.any() else b_lse - 1)

    return broken


def uncut(paths):
    """A branch sees all of the path before."""

    def broken(segments):
        return paths([(a, b, 1000 if depth else 0, c) for a, b, depth, c in segments])

    return broken


def run_together(pieces_by_level):
    """Queries that stand side by side make one piece, whatever they see."""

    def broken(plan):
        levels = pieces_by_level(plan)
        for (level, _), pieces in levels.items():
            for n in reversed(range(1, len(pieces))):
                (before, _), (queries, keys) = pieces[n - 1 : n + 1]
                if level and before.stop == queries.start:
                    pieces[n - 1 : n + 1] = [(range(before.start, queries.stop), keys)]
        return levels

    return broken


def in_row(batch):
    """The lengths of segments in the order of the row."""
    return [length for _, length, *_ in sorted(batch.tree.segments)]


def from_zero(shared):
    """Positions begin at 0 in every segment."""

    def broken(*args):
        batch = shared(*args)
        positions = [torch.arange(length) for length in in_row(batch)]
        return dataclasses.replace(batch, position_ids=torch.cat(positions)[None])

    return broken


def too_early(shared):
    """A branch does not see the last token before it."""

    def broken(*args):
        batch = shared(*args)
        segments = [(a, b, max(depth - 1, 0), c) for a, b, depth, c in batch.tree.segments]
        return dataclasses.replace(batch, tree=Tree(segments))

    return broken


def reordered(shared):
    """The tokens of segments stand in the opposite order."""

    def broken(*args):
        batch = shared(*args)
        pieces = batch.input_ids[0].split(in_row(batch))
        return dataclasses.replace(batch, input_ids=torch.cat(pieces[::-1])[None])

    return broken


def one_before(shared):
    """Tokens are predicted a place too early."""

    def broken(*args):
        batch = shared(*args)
        return dataclasses.replace(batch, cells=(batch.cells - 1).clamp(min=0))

    return broken


def zeroed(attribute):
    """What a gated delta net takes over is 0."""

    def make(init):
        def broken(self, *args):
            init(self, *args)
            if self.inputs is None:
                return
            if attribute == "inputs":
                self.inputs = 0 * self.inputs
            else:
                self.recurrent_states = [0 * state for state in self.recurrent_states]

        return broken

    return make


OURS = prefix_attention
MUTATIONS: list[tuple[str, str, Any, str, Any]] = [
    ("the merge", "Llama", torch, "logaddexp", lambda right: lambda a, b: a),
    ("the weight of a part", "Llama", OURS, "_merge", heavier),
    ("the gradient's lse", "Llama", OURS, "_flash_backward",
     lambda right: lambda tensors, *rest: right((*tensors[:5], tensors[5] + 0.1), *rest)),
    ("the gradient's sum", "Llama", OURS, "_flash_backward",
     lambda right: lambda tensors, block, scale: [
         (block.level == 0) * part for part in right(tensors, block, scale)
     ]),
    ("causality", "Llama", OURS, "_flash_on_cpu",
     lambda right: lambda kernel, q, block, scale: right(kernel, q, block._replace(is_causal=False), scale)),
    ("positions", "Llama", OURS, "_laid_out", from_zero),
    ("where a branch leaves its path", "Llama", OURS, "_paths", uncut),
    ("the root", "Llama", OURS, "_pieces_by_level",
     lambda right: lambda segments: {level: pieces for level, pieces in right(segments).items() if level[0] < 2}),
    ("who sees what", "Llama", OURS, "_pieces_by_level", run_together),
    ("the depth", "Llama", OURS, "_laid_out", too_early),
    ("the order of tokens", "Llama", OURS, "_laid_out", reordered),
    ("the cells", "Llama", OURS, "_laid_out", one_before),
    ("the window", "Mistral", OURS, "_loop",
     lambda right: lambda *args: right(*args[:-1], args[-1] | {"sliding_window": args[-1]["sliding_window"] + 1})),
    ("the loop's mask", "Gemma2", OURS, "_attend",
     lambda right: lambda *args: right(*args[:4], args[4] & args[4].roll(-1, -1), args[5])),
    ("softcap", "Gemma2", torch, "tanh", lambda right: lambda x: right(x) / 2),  # not times the cap, which is 2
    ("logit softcap", "Gemma3", torch, "tanh", lambda right: lambda x: right(x) / 2),
    ("the gradient of logits", "Llama", OURS, "_derive", lambda right: lambda *args: right(*args) * 1.1),
    ("sinks", "GptOss", OURS, "_merge", sinks_off_by_one),
    ("the gradient of sinks", "GptOss", _Cascade, "backward",
     lambda right: lambda *args: tuple(-d if n == 3 else d for n, d in enumerate(right(*args)))),
    ("the logit scale", "Cohere2", OURS, "_logits", lambda right: lambda *args: right(*args) * 2),
    ("the handed state", "Qwen3Next", OURS._Handover, "__init__", zeroed("states")),
    ("the handed inputs", "Qwen3_5", OURS._Handover, "__init__", zeroed("inputs")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "owner", "name", "mutate"),
    [m[1:] for m in MUTATIONS],
    ids=[m[0] for m in MUTATIONS],
)
def test_the_comparison_notices(family, owner, name, mutate, monkeypatch):
    """With one function broken, the comparison of `test_prefix_models.py` fails."""
    plain = make_model(family, stock(family))
    groups = [*make_groups(), *make_agents()]
    expected = plain_rows(plain, groups)
    right_gradients = gradients(plain, expected)
    monkeypatch.setattr(owner, name, mutate(getattr(owner, name)))
    shared = attach(make_model(family), verify=False)
    (row,) = pack(groups)
    got = completion_logprobs(shared, row)
    wrong_gradients = gradients(shared, got)
    errors = [
        ((wrong_gradients[n] - g).norm() / g.norm()).item() for n, g in right_gradients.items()
    ]
    assert max((got - expected).abs().max().item(), *errors) > 1e-3
