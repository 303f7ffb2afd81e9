"""Build what `recipes/tiny_vlm.py` trains: a Qwen2.5-VL of 0.9 M parameters that answers with some colour. About 20 s.

    python scripts/build_tiny_vlm.py

It is taught the names of colours on squares with answers drawn by lot, and then what it sees, until 30 % of fresh
squares are right. Nothing is done where `outputs/tiny_vlm` is complete.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from build_tiny import build_tokenizer, teach
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from recipes.tiny_vlm import COLOURS, QUESTION, SIZE, squares

BATCH_SIZE, MAX_STEPS, LEARNING_RATE = 32, 400, 1e-3
NUM_WORDS_STEPS = 100  # with answers drawn by lot
STOP_AT = 0.3  # share of right answers at which teaching ends
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def build_processor() -> Qwen2_5_VLProcessor:
    """Characters, and an image as `SIZE` x `SIZE` pixels in patches of 8, four of which are a token."""
    tokenizer = build_tokenizer()
    specials = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = TEMPLATE
    pixels = {"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=8, merge_size=2, size=pixels),
        video_processor=Qwen2VLVideoProcessor(patch_size=8, merge_size=2, size=pixels),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    )


def build_model(tokenizer: Any) -> Qwen2_5_VLForConditionalGeneration:
    """A randomly initialized Qwen2.5-VL: two layers of vision, four of text."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
            "patch_size": 8, "spatial_merge_size": 2, "window_size": 32, "fullatt_block_indexes": [1],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def lessons(processor: Any, seed: int) -> Iterator[Any]:
    """For each step of `teach` a batch of fresh squares; the share of right ones counts once they are shown."""
    tokenizer = processor.tokenizer
    rng = random.Random(seed)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    for step in range(1, MAX_STEPS + 1):
        rows = squares(BATCH_SIZE, seed=1000 * seed + 100 + step)
        by_lot = step <= NUM_WORDS_STEPS
        answers = [rng.choice(list(COLOURS)) if by_lot else row["answer"] for row in rows]
        texts = [prompt + answer + tokenizer.eos_token for answer in answers]
        images = [[row["image"]] for row in rows]
        batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
        is_answer = batch["attention_mask"].bool()
        num_before = int(is_answer[0].sum()) - len(answers[0]) - 1  # the same in all rows
        is_answer[:, :num_before] = False
        labels = batch["input_ids"].where(is_answer, -100)
        yield 0.0 if by_lot else 0.2, [(batch, labels[:, 1:])]


def build(folder: Path, seed: int) -> None:
    """Write `model/` into `folder`."""
    torch.manual_seed(seed)
    processor = build_processor()
    model = build_model(processor.tokenizer)
    teach(model, lessons(processor, seed), LEARNING_RATE, 1, STOP_AT)
    part = folder / "model.part"
    model.save_pretrained(part)
    processor.save_pretrained(part)
    part.rename(folder / "model")


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    folder = ROOT / "outputs" / "tiny_vlm"
    if (folder / "model").is_dir():
        sys.exit(print(f"{folder} is there already"))
    build(folder, seed=0)


if __name__ == "__main__":
    main()
