"""Shared prefixes with images in the prompt: decoder and vision tower against plain rows."""

from typing import Any

import pytest
import torch
import transformers
from helpers import far_from_uniform
from test_prefix_models import WINDOW, assert_equal_gradients, gradients

import prefix_attention
from prefix_attention import attach, completion_logprobs, pack

IMAGE = 90
TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN = {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3,
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}  # fmt: skip
SQUARE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16,
}  # fmt: skip


def qwen(**vision: Any) -> dict[str, Any]:
    text = TEXT | {"rope_parameters": dict(MROPE)}
    return {"text_config": text, "vision_config": QWEN | vision, **QWEN_IDS}


def square(tower: str, patch_size: int, text: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A configuration with a tower for square images."""
    vision = SQUARE | {"model_type": tower, "patch_size": patch_size}
    fields["image_token_index"] = IMAGE
    return {"text_config": TEXT | text, "vision_config": vision, **fields}


FAMILIES = {
    "Qwen2_5_VL": lambda: qwen(depth=1, window_size=16, fullatt_block_indexes=[0]),
    "Qwen3VL": lambda: qwen(depth=2, deepstack_visual_indexes=[0], num_position_embeddings=16),
    # One layer has a window shorter than the prompts; the 4 tokens of an image see each other.
    "Gemma3": lambda: square(
        "siglip_vision_model", 4, {**WINDOW, "query_pre_attn_scalar": 16}, mm_tokens_per_image=4
    ),
    "Llava": lambda: square("clip_vision_model", 8, {"model_type": "llama"}),
}
# Of which attach knows nothing:
OTHERS = {"Qwen2VL": lambda: qwen(depth=1, embed_dim=32, hidden_size=64, mlp_ratio=2)}
GRIDS = [(1, 4, 4), (1, 2, 6)]  # Qwen's images in patches: time, height, width


def make_model(family):
    config = getattr(transformers, f"{family}Config")(**(FAMILIES | OTHERS)[family]())
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    return far_from_uniform(model, 4).eval()


def make_batch(family):
    """Prompts with an image, without, with another one and with both; and each prompt's images."""
    generator = torch.Generator().manual_seed(0)
    tokens = lambda count: torch.randint(3, 88, (count,), generator=generator).tolist()

    def prompt(*images):
        ids = tokens(3)
        for time, height, width in images:
            num_tokens = time * height * width // 4 if "Qwen" in family else 4
            ids += [92, *[IMAGE] * num_tokens, 93]
        return ids + tokens(4)

    def inputs(*images):
        if not images:
            return {}
        if "Qwen" not in family:
            return {"pixel_values": torch.randn(len(images), 3, 16, 16, generator=generator)}
        grids = torch.tensor(images)
        patches = torch.randn(int(grids.prod(1).sum()), 3 * 16, generator=generator)
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


KINDS = {"gemma3": "token_type_ids", "llava": None}


def plain_logprobs(model, groups, images):
    """One row for each completion, through the model's own forward."""
    values = []
    name = KINDS.get(model.config.model_type, "mm_token_type_ids")
    for (prompt, completions), inputs in zip(groups, images, strict=True):
        for completion in completions:
            ids = torch.tensor([prompt + completion])
            kinds = {name: (ids == IMAGE).int()} if inputs and name else {}
            logits = model(input_ids=ids, **kinds, **inputs).logits[0, len(prompt) - 1 : -1]
            values.append(logits.log_softmax(-1)[range(len(completion)), completion])
    return torch.cat(values)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_values_and_gradients(family):
    """The tower runs once per prompt; its gradients equal those of one run per completion."""
    groups, images = make_batch(family)
    (row,) = pack(groups)
    assert sorted(row.prompts) == [0, 1, 2, 3]
    plain, shared = make_model(family), attach(make_model(family))
    if family in OTHERS:
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
            rows = pack(groups, 36, share_prefix)
            assert len(rows) > 2
            for row in rows:
                got = row_logprobs(model, row, images)
                torch.testing.assert_close(got, expected[row.index], rtol=1e-5, atol=1e-5)


def test_what_is_not_exact_is_refused(monkeypatch):
    """Gemma3, if the tokens of an image did not see each other."""
    groups, images = make_batch("Gemma3")
    monkeypatch.setattr(prefix_attention, "WHOLE_IMAGES", frozenset())
    with pytest.raises(ValueError, match="Gemma3.* cannot share prefixes: .* from plain rows"):
        attach(make_model("Gemma3"), verify=True, example=(groups[0][0], images[0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_below_an_image(family):
    """Equal ids with other images; each history goes on in one segment, and is rewritten in another."""
    model = make_model(family)
    groups, images = make_batch(family)
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
    groups, images = make_batch(family)
    (row,) = pack(groups, share_prefix=share_prefix)
    (text,) = pack(groups[1:2], share_prefix=share_prefix)
    table = model.get_input_embeddings()
    row_logprobs(model, row, images)
    with pytest.raises(ValueError, match="inputs_embeds and pixel_values.*: a model finds the pla"):
        row_logprobs(model, row, images, inputs_embeds=table(row.input_ids))
    got = completion_logprobs(model, text, inputs_embeds=table(text.input_ids))
    torch.testing.assert_close(got, completion_logprobs(model, text), rtol=1e-5, atol=1e-5)
