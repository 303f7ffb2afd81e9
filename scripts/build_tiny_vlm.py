"""Build what `recipes/tiny_vlm.py` trains: a Qwen2.5-VL of 0.9 M parameters that answers with some colour. About 20 s.

    python scripts/build_tiny_vlm.py [--output DIR] [--seed N]

It is taught the names of colours on squares with answers drawn by lot, and then what it sees, until 30 % of fresh
squares are right. Nothing is done where DIR is complete.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from build_tiny import build_tokenizer
from torch.nn.functional import cross_entropy
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


def build_processor(edge: int = SIZE) -> Qwen2_5_VLProcessor:
    """Characters, and an image as `edge` x `edge` pixels in patches of 8, four of which are a token."""
    tokenizer = build_tokenizer()
    specials = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = TEMPLATE
    pixels = {"shortest_edge": edge * edge, "longest_edge": edge * edge}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=8, merge_size=2, size=pixels),
        video_processor=Qwen2VLVideoProcessor(patch_size=8, merge_size=2, size=pixels),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
    )


def build_model(tokenizer: Any) -> Qwen2_5_VLForConditionalGeneration:
    """A randomly initialized Qwen2.5-VL: two layers of vision, four of text."""
    named = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "vision_end")
    }
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
        tie_word_embeddings=True,
        **named,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


def teach(model: Any, processor: Any, seed: int) -> None:
    """Supervised steps on fresh squares until `STOP_AT` of them are right before they are trained on."""
    tokenizer = processor.tokenizer
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):
        rows = squares(BATCH_SIZE, seed=1000 * seed + 100 + step)
        by_lot = step <= NUM_WORDS_STEPS
        answers = [rng.choice(list(COLOURS)) if by_lot else row["answer"] for row in rows]
        texts = [prompt + answer + tokenizer.eos_token for answer in answers]
        batch = processor(
            text=texts, images=[[row["image"]] for row in rows], padding=True, return_tensors="pt"
        )
        ends = batch["attention_mask"].sum(1)
        lengths = torch.tensor([len(answer) + 1 for answer in answers])
        at = torch.arange(batch["input_ids"].shape[1])
        is_answer = (at >= (ends - lengths)[:, None]) & (at < ends[:, None])
        target = batch["input_ids"].where(is_answer, -100)[:, 1:]
        logits = model(**batch).logits[:, :-1]
        right = ((logits.argmax(-1) == target) | (target == -100)).all(-1).float().mean().item()
        accuracy = 0.0 if by_lot else accuracy + 0.2 * (right - accuracy)
        if step % 25 == 0 or accuracy >= STOP_AT:
            print(f"teaching: step {step}, {accuracy:.0%} of fresh squares right", flush=True)
        if accuracy >= STOP_AT:
            return
        cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def build(folder: Path, seed: int) -> None:
    """Write `model/` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    processor = build_processor()
    model = build_model(processor.tokenizer)
    teach(model, processor, seed)
    part = folder / "model.part"
    model.save_pretrained(part)
    processor.save_pretrained(part)
    part.rename(folder / "model")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "tiny_vlm")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.output / "model").is_dir():
        sys.exit(print(f"{args.output} is there already"))
    build(args.output, args.seed)


if __name__ == "__main__":
    main()
