"""Shared prefixes with images in the prompt and M-RoPE: the decoder and the vision tower against plain rows."""

import pytest
import torch
import transformers
from test_prefix_models import assert_equal_gradients, gradients

from prefix_attention import attach, completion_logprobs, pack

IMAGE = 90
TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3,
}  # fmt: skip
TOWERS = {
    "Qwen2_5_VL": {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0]},
    "Qwen3VL": {"depth": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
GRIDS = [(1, 4, 4), (1, 2, 6)]  # images in patches: time, height, width


def make_model(family):
    ids = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = getattr(transformers, f"{family}Config")(
        text_config=dict(TEXT), vision_config={**VISION, **TOWERS[family]}, **ids
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model


def make_batch():
    """Prompts with an image, without, and with another image; and the images' patches."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(3, 88, (count,), generator=generator).tolist()

    def prompt(time, height, width):
        return [*tokens(3), 92, *[IMAGE] * (time * height * width // 4), 93, *tokens(4)]

    groups = [
        (prompt(*GRIDS[0]), [tokens(4), tokens(1), tokens(6)]),
        (tokens(5), [tokens(3), tokens(2)]),
        (prompt(*GRIDS[1]), [tokens(5), tokens(2)]),
    ]
    return groups, [torch.randn(t * h * w, 3 * 16, generator=generator) for t, h, w in GRIDS]


@pytest.mark.parametrize("family", TOWERS)
def test_values_and_gradients(family):
    """The tower runs once per prompt; its gradients equal those of one run per completion."""
    plain, shared = make_model(family), attach(make_model(family), verify=True)
    groups, images = make_batch()
    values = []
    for (prompt, completions), image in zip(groups, (0, None, 1), strict=True):
        for completion in completions:
            ids = torch.tensor([prompt + completion])
            inputs = {}
            if image is not None:
                inputs = {"pixel_values": images[image], "image_grid_thw": torch.tensor([GRIDS[image]])}
            logits = plain(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **inputs).logits
            logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            values.append(logprobs[range(len(completion)), completion])
    expected = torch.cat(values)
    (row,) = pack(groups)
    got = completion_logprobs(shared, row, pixel_values=torch.cat(images), image_grid_thw=torch.tensor(GRIDS))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    of_plain = gradients(plain, expected)
    assert any("visual" in name for name in of_plain)
    assert_equal_gradients(gradients(shared, got), of_plain, 1e-5)
