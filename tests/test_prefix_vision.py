"""Shared prefixes with images in the prompt: the decoder and the vision tower against one plain row per completion."""

import pytest
import torch
import transformers
from test_prefix_models import assert_equal_gradients, gradients

import prefix_attention
from prefix_attention import attach, completion_logprobs, pack

IMAGE = 90
TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
}
QWEN = {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3,
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
SQUARE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
}  # fmt: skip
FAMILIES = {
    "Qwen2_5_VL": {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN | {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0]},
        **QWEN_IDS,
    },
    "Qwen3VL": {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN
        | {"depth": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN_IDS,
    },
    # a layer with a window shorter than the prompts, and one without; 4 image tokens, which see each other
    "Gemma3": {
        "text_config": TEXT
        | {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        "vision_config": SQUARE | {"patch_size": 4, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
    },
    "Llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": SQUARE | {"patch_size": 8, "model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
    },
}
OTHERS = {  # of which attach knows nothing
    "Qwen2VL": {
        "text_config": TEXT | MROPE,
        "vision_config": QWEN | {"depth": 1, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **QWEN_IDS,
    },
    "InternVL": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": SQUARE
        | {"image_size": [16, 16], "patch_size": [4, 4], "model_type": "internvl_vision"},
        "image_token_id": IMAGE,
        "image_seq_length": 4,
    },
    # every token of its prompts sees all of them
    "PaliGemma": {
        "text_config": TEXT | {"model_type": "gemma"},
        "vision_config": SQUARE | {"patch_size": 8, "model_type": "siglip_vision_model"},
        "projection_dim": 64,
        "image_token_index": IMAGE,
    },
}
GRIDS = [(1, 4, 4), (1, 2, 6)]  # Qwen's images in patches: time, height, width


def make_model(family):
    config = getattr(transformers, f"{family}Config")(
        **{n: dict(v) if isinstance(v, dict) else v for n, v in (FAMILIES | OTHERS)[family].items()}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
            if (
                parameter.ndim > 1 and not parameter.any()
            ):  # Gemma3's projector starts at 0: no image would be seen
                parameter.normal_(std=0.5)
    return model.eval()


def make_batch(family):
    """Prompts with an image, without, with another one and with both; and each prompt's images."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(3, 88, (count,), generator=generator).tolist()

    def prompt(*images):
        sizes = [t * h * w // 4 if "Qwen" in family else 4 for t, h, w in images]
        return [
            *tokens(3),
            *(token for size in sizes for token in [92, *[IMAGE] * size, 93]),
            *tokens(4),
        ]

    def inputs(*images):
        if not images:
            return {}
        if "Qwen" not in family:
            return {"pixel_values": torch.randn(len(images), 3, 16, 16, generator=generator)}
        patches = sum(t * h * w for t, h, w in images)
        return {
            "pixel_values": torch.randn(patches, 3 * 16, generator=generator),
            "image_grid_thw": torch.tensor(images),
        }

    groups = [
        (prompt(GRIDS[0]), [tokens(4), tokens(1), tokens(6)]),
        (tokens(5), [tokens(3), tokens(2)]),
        (prompt(GRIDS[1]), [tokens(5), tokens(2)]),
        (prompt(*GRIDS), [tokens(3), tokens(9)]),
    ]
    return groups, [inputs(GRIDS[0]), {}, inputs(GRIDS[1]), inputs(*GRIDS)]


def of_row(row, images):
    """The images of a row's prompts, as one batch."""
    found = [images[number] for number in row.prompts if images[number]]
    return {
        name: torch.cat([inputs[name] for inputs in found]) for name in (found[0] if found else ())
    }


def plain_logprobs(model, groups, images):
    """One row for each completion, through the model's own forward."""
    values = []
    for (prompt, completions), inputs in zip(groups, images, strict=True):
        for completion in completions:
            ids = torch.tensor([prompt + completion])
            kinds = {}
            if inputs and model.config.model_type not in ("llava", "internvl"):
                name = (
                    "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
                )
                kinds = {name: (ids == IMAGE).int()}
            logits = model(input_ids=ids, **kinds, **inputs).logits
            logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            values.append(logprobs[range(len(completion)), completion])
    return torch.cat(values)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients(family):
    """The tower runs once per prompt; its gradients equal those of one run per completion."""
    groups, images = make_batch(family)
    plain, shared = (
        make_model(family),
        attach(make_model(family), verify=True, example=(groups[0][0], images[0])),
    )
    expected = plain_logprobs(plain, groups, images)
    (row,) = pack(groups)
    assert sorted(row.prompts) == [0, 1, 2, 3]
    got = completion_logprobs(shared, row, **of_row(row, images))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    of_plain, of_shared = gradients(plain, expected), gradients(shared, got)
    assert any("vis" in name for name in of_plain)
    for name in [
        name for name in of_plain if "vision_tower" in name and name.endswith("k_proj.bias")
    ]:
        # without positions, a bias of all keys shifts all scores of a query alike
        assert of_plain.pop(name).norm() < 1e-5
        assert of_shared.pop(name).norm() < 1e-5
    assert_equal_gradients(of_shared, of_plain, 1e-5)


@pytest.mark.parametrize("family", ["Qwen2VL", "InternVL"])
def test_other_models_are_compared(family):
    groups, images = make_batch(family)
    model = attach(make_model(family))
    (row,) = pack(groups)
    with pytest.raises(ValueError, match="attach.model, example=...."):
        completion_logprobs(model, row, **of_row(row, images))
    attach(model, example=(groups[0][0], images[0]))
    got = completion_logprobs(model, row, **of_row(row, images))
    torch.testing.assert_close(
        got, plain_logprobs(make_model(family), groups, images), rtol=1e-5, atol=1e-5
    )


def test_what_is_not_exact_is_refused(monkeypatch):
    """A prompt that sees itself whole; and Gemma3, if its images did not."""
    groups, images = make_batch("PaliGemma")
    example = (groups[0][0], images[0])
    with pytest.raises(
        ValueError, match="PaliGemma.* cannot share prefixes: .* differ from plain rows"
    ):
        attach(make_model("PaliGemma"), example=example)
    monkeypatch.setattr(prefix_attention, "WHOLE_IMAGES", frozenset())
    with pytest.raises(ValueError, match="differ from plain rows"):
        attach(make_model("Gemma3"), verify=True, example=example)


@pytest.mark.parametrize("layout", [{"share_prefix": False}, {}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_split(family, layout):
    """A prompt's images once per completion, padded and not, and shared rows in which a prompt comes twice."""
    model = make_model(family)
    groups, images = make_batch(family)
    expected = plain_logprobs(model, groups, images).detach()
    if layout != {"share_prefix": False}:
        attach(model)
    rows = pack(groups, 36, **layout)
    assert len(rows) > 2
    for row in rows:
        got = completion_logprobs(model, row, **of_row(row, images))
        torch.testing.assert_close(got, expected[row.index], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_tokens", [None, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_segments_below_an_image(family, max_tokens):
    """Two prompts of the same ids and different images, each with a history that goes on and one that is rewritten."""
    model = make_model(family)
    groups, images = make_batch(family)
    with_images = [n for n, inputs in enumerate(images) if inputs]
    first, other = groups[with_images[0]][0], images[with_images[0]]
    changed = {
        name: value.flip(-1) if name == "pixel_values" else value for name, value in other.items()
    }
    turns = [[7, 8, 9, 10], [11, 12], [13, 14, 15]]
    histories = [first, [*first, *turns[0], 16], [*first, 17, *turns[1], 16]]
    segments = [(history, turn) for history, turn in zip(histories, turns, strict=True)]
    both = [(first, [segments, [18, 19]])] * 2
    alone = [(history, [turn]) for history, turn in [*segments, (first, [18, 19])]] * 2
    of_alone = [other] * 4 + [changed] * 4
    expected = plain_logprobs(model, alone, of_alone).detach()
    assert (expected[:11] - expected[11:]).abs().max() > 1e-4
    attach(model)
    for row in pack(both, max_tokens, apart={0, 1}):
        got = completion_logprobs(model, row, **of_row(row, [other, changed]))
        torch.testing.assert_close(got, expected[row.index], rtol=1e-5, atol=1e-5)
    (row,) = pack(both)
    assert row.prompts == [None]  # of which of the two?


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_go_without_images(family, share_prefix):
    """Embeddings as `inputs_embeds` give what their ids give, also after a row whose images shifted its positions."""
    model = attach(make_model(family))
    groups, images = make_batch(family)
    (row,) = pack(groups, share_prefix=share_prefix)
    completion_logprobs(model, row, **of_row(row, images))
    features = model.get_input_embeddings()(row.input_ids)
    with pytest.raises(
        ValueError, match="inputs_embeds and pixel_values.*: a model finds the places of images by"
    ):
        completion_logprobs(model, row, inputs_embeds=features, **of_row(row, images))
    (row,) = pack(groups[1:2], share_prefix=share_prefix)
    features = model.get_input_embeddings()(row.input_ids)
    got, expected = (
        completion_logprobs(model, row, inputs_embeds=features),
        completion_logprobs(model, row),
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_an_image_sees_itself_whole(monkeypatch):
    """Without the cut at images Gemma3's log-probs would be others: the test above would notice."""
    model = attach(make_model("Gemma3"))
    groups, images = make_batch("Gemma3")
    (row,) = pack(groups)
    right = completion_logprobs(model, row, **of_row(row, images))
    monkeypatch.setattr(prefix_attention, "WHOLE_IMAGES", frozenset())
    wrong = completion_logprobs(model, row, **of_row(row, images))
    assert (right - wrong).abs().max() > 1e-3


@pytest.mark.parametrize("share_prefix", [False, True])
def test_forbidden_tokens(share_prefix):
    """What no one can sample has no probability: log-softmax over the other tokens, and their entropy."""
    model = attach(make_model("Qwen2_5_VL"))
    groups, _ = make_batch("Qwen2_5_VL")
    groups = [groups[1]]
    (row,) = pack(groups, share_prefix=share_prefix)
    logprobs, entropy = completion_logprobs(
        model, row, 0.7, return_entropy=True, forbidden=[IMAGE, 91]
    )
    allowed = [token for token in range(97) if token not in (IMAGE, 91)]
    expected, entropies = [], []
    prompt, completions = groups[0]
    for completion in completions:
        logits = (
            model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            / 0.7
        )
        over_allowed = logits[:, allowed].log_softmax(-1)
        expected.append(
            over_allowed[range(len(completion)), [allowed.index(token) for token in completion]]
        )
        entropies.append(-(over_allowed.exp() * over_allowed).sum(-1))
    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(entropies), rtol=1e-5, atol=1e-5)
    of_plain = gradients(model, torch.cat(expected))
    assert_equal_gradients(gradients(model, logprobs), of_plain, 1e-5)
