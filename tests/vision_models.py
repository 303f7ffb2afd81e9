"""Tiny random vision models with their processors, as checkpoints that vLLM loads: Qwen3-VL, LLaVA, Gemma3."""

import torch
import transformers
from build_tiny_vlm import TEMPLATE
from helpers import VOCAB, far_from_uniform
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
TOWER = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
}  # fmt: skip
EDGE = 32  # pixels of an image that the processors make
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"  # in the template


def tokenizer(image_tokens, **names):
    """A token per character, and those of images."""
    vocab = [*VOCAB, "\n\n", "\n\n\n", "\n\n\n\n"]  # vLLM's Gemma3 wants these
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(image_tokens)
    specials = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **specials, extra_special_tokens=names
    )


def qwen3_vl():
    marks = {f"{n}_token": f"<|{n}|>" for n in ("vision_start", "vision_end")}
    marks |= {f"{n}_token": f"<|{n}_pad|>" for n in ("image", "video")}
    tok = tokenizer(list(marks.values()))
    options = {"patch_size": 8, "size": {"shortest_edge": 4 * EDGE**2, "longest_edge": 4 * EDGE**2}}
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**options), tok, transformers.Qwen3VLVideoProcessor(**options),
        chat_template=TEMPLATE,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope |= {"mrope_section": [4, 6, 6], "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"vocab_size": len(tok), "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 8, "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
        },
        **{f"{name}_id": tok.convert_tokens_to_ids(mark) for name, mark in marks.items()},
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config), processor


def llava():
    tok = tokenizer(["<image>"])
    size = {"size": {"shortest_edge": EDGE}, "crop_size": {"height": EDGE, "width": EDGE}}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(**size), tok, chat_template=TEMPLATE.replace(IMAGE, "<image>\\n"), patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=TEXT | {"vocab_size": len(tok), "model_type": "llama"},
        vision_config=TOWER | {"num_hidden_layers": 3, "model_type": "clip_vision_model"},
        image_token_index=tok.convert_tokens_to_ids("<image>"),
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def gemma3():
    """A layer with a window shorter than the prompts, and one without."""
    marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    marks |= {"image_token": "<image_soft_token>"}
    tok = tokenizer(list(marks.values()), **marks)
    processor = transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessor(size={"height": EDGE, "width": EDGE}), tok,
        chat_template=TEMPLATE.replace(IMAGE, "<start_of_image>"), image_seq_length=4,
    )  # fmt: skip
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=TEXT | layers | {"vocab_size": len(tok), "query_pre_attn_scalar": 32},
        vision_config=TOWER | {"num_hidden_layers": 2, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        **{f"{name}_index": tok.convert_tokens_to_ids(mark) for name, mark in marks.items()},
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


def save(family, folder):
    """A model and its processor, under the names that the hub's checkpoints have."""
    torch.manual_seed(0)
    model, processor = {"qwen3_vl": qwen3_vl, "llava": llava, "gemma3": gemma3}[family]()
    far_from_uniform(model, 4).save_pretrained(folder)
    processor.save_pretrained(folder)
    # A model made from a config is saved without a level that the hub's have.
    path = folder / "model.safetensors"
    whole = lambda name: name.replace("vision_tower.", "vision_tower.vision_model.")
    weights = {whole(name): weight for name, weight in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    return str(folder)
