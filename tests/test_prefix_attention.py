"""Rows and log-probabilities against one plain forward per completion."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefix_attention import completion_logprobs, pack

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
    for logprobs in (plain_logprobs(model, temperature), packed_logprobs(model, temperature, max_tokens)):
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
    completions = torch.cat([row.completion for row in rows]).tolist()
    assert completions == [0] * 3 + [1] + [3] * 4 + [4] * 7


def test_refusals():
    with pytest.raises(ValueError, match="completion 1 of group 1 has 15 tokens"):
        pack(GROUPS, 14, share_prefix=False)
    with pytest.raises(ValueError, match="group 0 has an empty prompt"):
        pack([([], [[1]])], share_prefix=False)
