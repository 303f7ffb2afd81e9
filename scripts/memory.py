"""Write the tables of docs/memory.md: what of Qwen2.5 fits on which card, by scripts/plan.py.

    python scripts/memory.py docs/memory.md

What stands before the first table stays.
"""

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plan import CHANGES, LORA, SEQUENCES, Placement, Variants
from transformers import Qwen2Config

from recipes.gsm8k import config as gsm8k

CARDS = (16, 24, 48, 80)  # GB
KINDS: dict[str, dict[str, Any]] = {"all weights": {}, "LoRA": LORA | {"learning_rate": 1e-5}}
SHAPES = {  # of Qwen2.5: hidden size, MLP, layers, heads, heads of keys, vocabulary, tied embeddings
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
}
WORDS = {"adam_8bit": "8-bit moments", "base_4bit": "4-bit base", "fsdp_offload": "offload"}

NOTHING = "-"  # fits
ALL = "16,384"  # tokens that were tried, with nothing on top
COLUMNS = {
    Placement.ELSEWHERE: "alone",
    Placement.BESIDE: "beside its server",
    Placement.ASLEEP: "server asleep",
}


def shape(name: str) -> Qwen2Config:
    """transformers' configuration of a size."""
    hidden, mlp, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[name]
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=is_tied,
        max_position_embeddings=32768,
    )  # fmt: skip


def cells_of(size: str, kind: str) -> dict[tuple[int, Placement], str]:
    """What fits, of a size and a kind of training, by card and placement."""
    config = replace(gsm8k, model_id=f"Qwen/Qwen2.5-{size}-Instruct", **KINDS[kind])
    allowed = [each for each in CHANGES if ("use_peft" in each) == config.use_peft]
    variants = Variants(config, shape(size), [{}, *allowed])
    cells = {}
    for card_gb, placement in product(CARDS, Placement):
        cells[card_gb, placement] = NOTHING
        if plan := variants.best(card_gb, placement):
            words = [f"{plan.num_tokens:,}"]
            words += [WORDS[name] for name in plan.changes if name in WORDS]
            if 0 < plan.num_sequences < SEQUENCES[0]:
                words.append(f"{plan.num_sequences} sequences")
            cells[card_gb, placement] = ", ".join(words)
    return cells


def tables_of(sizes: list[str]) -> str:
    """The tables, in Markdown."""
    found = {(size, kind): cells_of(size, kind) for kind in KINDS for size in sizes}
    tables = []
    for card_gb in CARDS:
        tables += [f"## {card_gb} GB", ""]
        tables.append(f"| model | trained | {' | '.join(COLUMNS.values())} |")
        tables.append("|---|---|---|---|---|")
        for (size, kind), cells in found.items():
            texts = [cells[card_gb, placement] for placement in COLUMNS]
            if set(texts) not in ({NOTHING}, {ALL}):
                tables.append(f"| {size} | {kind} | {' | '.join(texts)} |")
        tables.append("")
    return "\n".join(tables).strip() + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    text, _, _ = page.read_text().partition(f"## {CARDS[0]} GB")
    page.write_text(text + tables_of([*SHAPES]))


if __name__ == "__main__":
    main()
