"""Shared prefixes with images in the prompt: decoder and vision tower against plain rows."""

from inspect import signature
from typing import Any

import pytest
import torch
import transformers
import vision_models
from build_tiny_vlm import build_model, build_processor
from helpers import far_from_uniform
from test_prefix_models import assert_equal_gradients, gradients

from prefix_attention import attach, completion_logprobs, pack

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "gemma3", "llava"]
GRIDS = [(1, 4, 4), (1, 2, 6)]  # Qwen's images in patches: time, height, width


def qwen2_vl():
    """A model of which attach knows nothing."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = transformers.Qwen2VLConfig(
        text_config=vision_models.TEXT | {"vocab_size": 97, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8},
        image_token_id=90, video_token_id=91,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


def make_model(family):
    torch.manual_seed(0)
    if family == "qwen2_vl":
        model = qwen2_vl()
    elif family == "qwen2_5_vl":
        model = build_model(build_processor().tokenizer)
    else:
        model, _ = getattr(vision_models, family)()
    return far_from_uniform(model, 4).eval()


def make_batch(model):
    """Prompts with an image, without, with another one and with both; and each prompt's images."""
    num_fixed = {"gemma3": 4, "llava": 16}.get(model.config.model_type)  # tokens of any image
    generator = torch.Generator().manual_seed(0)
    tokens = lambda count: torch.randint(3, 88, (count,), generator=generator).tolist()

    def prompt(*images):
        ids = tokens(3)
        for time, height, width in images:
            num_tokens = num_fixed or time * height * width // 4
            ids += [*[model.config.image_token_id] * num_tokens, 88]
        return ids + tokens(4)

    def inputs(*images):
        if not images:
            return {}
        if num_fixed:
            return {"pixel_values": torch.randn(len(images), 3, 32, 32, generator=generator)}
        grids = torch.tensor(images)
        patches = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 8 * 8, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": grids}

    groups = [
        (prompt(GRIDS[0]), [tokens(4), tokens(1), tokens(6)]),
        (tokens(5), [tokens(3), tokens(2)]),
        (prompt(GRIDS[1]), [tokens(5), tokens(2)]),
        (prompt(*GRIDS), [tokens(3), tokens(9)]),
    ]
    return groups, [inputs(GRIDS[0]), {}, inputs(GRIDS[1]), inputs(*GRIDS)]


def row_logprobs(model, row, images, **options):
    """Log-probs of a row with the images of its prompts, in one batch."""
    found = [images[number] for number in row.prompts if images[number]]
    names = found[0] if found else ()
    joined: Any = {name: torch.cat([inputs[name] for inputs in found]) for name in names}
    return completion_logprobs(model, row, **joined, **options)


def plain_logprobs(model, groups, images, forbidden=()):
    """One row for each completion, through the model's own forward; without probability of some tokens."""
    values = []
    named = {"mm_token_type_ids", "token_type_ids"} & {*signature(model.forward).parameters}
    for (prompt, completions), inputs in zip(groups, images, strict=True):
        for completion in completions:
            ids = torch.tensor([prompt + completion])
            is_image = (ids == model.config.image_token_id).int()
            kinds = {name: is_image for name in named if inputs}
            logits = model(input_ids=ids, **kinds, **inputs).logits[0, len(prompt) - 1 : -1]
            logits = logits.index_fill(1, torch.tensor(forbidden, dtype=torch.long), -torch.inf)
            values.append(logits.log_softmax(-1)[range(len(completion)), completion])
    return torch.cat(values)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_vl"])
def test_values_and_gradients(family):
    """The tower runs once per prompt; its gradients equal those of one run per completion."""
    plain, shared = make_model(family), attach(make_model(family))
    groups, images = make_batch(plain)
    (row,) = pack(groups)
    assert sorted(row.prompts) == [0, 1, 2, 3]
    if family not in FAMILIES:
        with pytest.raises(ValueError, match="attach.model, example=...."):
            row_logprobs(shared, row, images)
    attach(shared, example=(groups[0][0], images[0]))
    expected = plain_logprobs(plain, groups, images)
    got = row_logprobs(shared, row, images)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    of_plain, of_shared = gradients(plain, expected), gradients(shared, got)
    assert any("vis" in name for name in of_plain)
    for name in list(of_plain):
        # Without positions, a bias of all keys shifts all scores of a query alike.
        if "vision_tower" in name and name.endswith("k_proj.bias"):
            assert of_plain.pop(name).norm() < 1e-5
            assert of_shared.pop(name).norm() < 1e-5
    assert_equal_gradients(of_shared, of_plain, 1e-5)

    # Rows of any split, padded or shared: a prompt's images once per completion, or per row.
    with torch.no_grad():
        for model, share_prefix in ((plain, False), (shared, True)):
            rows = pack(groups, len(groups[3][0]) + 9, share_prefix)
            assert len(rows) > 2
            for row in rows:
                got = row_logprobs(model, row, images)
                torch.testing.assert_close(got, expected[row.index], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_below_an_image(family):
    """Equal ids with other images; each history goes on in one segment, and is rewritten in another."""
    model = make_model(family)
    groups, images = make_batch(model)
    first, other = groups[0][0], images[0]
    changed = other | {"pixel_values": other["pixel_values"].flip(-1)}
    turns = [[7, 8, 9, 10], [11, 12], [13, 14, 15]]
    histories = [first, [*first, *turns[0], 16], [*first, 17, *turns[1], 16]]
    segments = [*zip(histories, turns, strict=True)]
    both = [(first, [segments, [18, 19]])] * 2
    alone = [(history, [turn]) for history, turn in [*segments, (first, [18, 19])]] * 2
    expected = plain_logprobs(model, alone, [other] * 4 + [changed] * 4).detach()
    assert (expected[:11] - expected[11:]).abs().max() > 1e-4
    attach(model)
    for row in (*pack(both, apart={0, 1}), *pack(both, 60, apart={0, 1})):
        got = row_logprobs(model, row, [other, changed])
        torch.testing.assert_close(got, expected[row.index], rtol=1e-5, atol=1e-5)
    (row,) = pack(both)
    assert row.prompts == [None]  # of which of the two?


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_go_without_images(family, share_prefix):
    """They give what their ids give, also after a row whose images shifted its positions."""
    model = attach(make_model(family))
    groups, images = make_batch(model)
    (row,) = pack(groups, share_prefix=share_prefix)
    (text,) = pack(groups[1:2], share_prefix=share_prefix)
    table = model.get_input_embeddings()
    row_logprobs(model, row, images)
    with pytest.raises(ValueError, match="inputs_embeds and pixel_values.*: a model finds the pla"):
        row_logprobs(model, row, images, inputs_embeds=table(row.input_ids))
    got = completion_logprobs(model, text, inputs_embeds=table(text.input_ids))
    torch.testing.assert_close(got, completion_logprobs(model, text), rtol=1e-5, atol=1e-5)
