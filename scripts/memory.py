"""Write docs/memory.md: what of Qwen2.5 fits on which card, by scripts/plan.py.

    python scripts/memory.py -o docs/memory.md

`--models 0.5B` leaves out the other sizes.
"""

import argparse
import sys
from dataclasses import replace
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

TEXT = """# What fits on one card

Written by `python scripts/memory.py -o docs/memory.md` for [recipes/gsm8k.py](../recipes/gsm8k.py) with models of
Qwen2.5-Instruct: completions of 1,024 tokens on prompts of up to 512, gradient checkpointing, and 64 completions
sampled at a time. This prints the plan and the commands of one model on one card:

```bash
python scripts/doctor.py recipes/gsm8k.py --model_id Qwen/Qwen2.5-7B-Instruct --plan 24GB
```

Your own recipe works in the same way, and prompts are taken to have 512 tokens, too. Where all weights fit and you want
LoRA, add `--use_peft true --dtype bfloat16 --learning_rate 1e-5`.

**Planned, not measured.** A step runs on tensors without data, and their bytes are counted. Beside peaks that were measured
on an H200, rows of 1.5B differ by at most 0.5 %, and steps of 0.6B (all weights) and 4B (LoRA) by at most 1 %
([tests/test_plan.py](../tests/test_plan.py)). CUDA's own memory, the server's graphs and offload are rules of thumb. 7 % of
a card are left for fragments.

A cell has the longest row that fits (`max_tokens_per_gpu`; more than 16,384 tokens were not tried), and what the recipe
needs on top. "-" does not fit. Of the models that a table leaves out, smaller ones fit with 16,384 everywhere, larger
ones not at all, for each kind of training. A group that is longer than a row goes into several, and its prompt is computed once for each.

- **Alone**: the server is on another card.
- **Beside its server**: the server keeps its share of the card.
- **Server asleep**: it gives its memory up while the trainer trains ([how](operations.md#a-server-that-sleeps)).
- **8-bit moments, 4-bit base**: [less memory](operations.md#less-memory).
- **Offload**: weights wait in host memory, which is slow.
- **16 sequences**: the server samples so many at a time, not 64.

{tables}
"""


def shape(name: str) -> Qwen2Config:
    """transformers' configuration of a size."""
    hidden, mlp, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[name]
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=is_tied,
        max_position_embeddings=32768,
    )  # fmt: skip


def cell(variants: Variants, card_gb: int, placement: Placement) -> str:
    """What fits on a card."""
    fit = variants.best(card_gb, placement)
    if not fit:
        return NOTHING
    more = [WORDS[name] for name in fit.changes if name in WORDS]
    if 0 < fit.plan.num_sequences < SEQUENCES[0]:
        more.append(f"{fit.plan.num_sequences} sequences")
    return ", ".join([f"{fit.num_tokens:,}", *more])


def cells_of(size: str, kind: str) -> dict[tuple[int, Placement], str]:
    """All cells of a size and a kind of training, by card and placement."""
    changes = KINDS[kind]
    config = replace(gsm8k, model_id=f"Qwen/Qwen2.5-{size}-Instruct", **changes)
    allowed = [each for each in CHANGES if ("use_peft" in each) == config.use_peft]
    variants = Variants(config, shape(size), [{}, *allowed])
    return {
        (card_gb, placement): cell(variants, card_gb, placement)
        for card_gb in CARDS
        for placement in Placement
    }


def page(sizes: list[str]) -> str:
    """The page, in Markdown."""
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
    return TEXT.format(tables="\n".join(tables).strip())


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", dest="path", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    args = parser.parse_args()
    args.path.write_text(page(args.models))


if __name__ == "__main__":
    main()
