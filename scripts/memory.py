"""Write docs/memory.md: what of Qwen2.5 fits on which card, by scripts/plan.py.

    python scripts/memory.py -o docs/memory.md

`--models 0.5B` leaves out the other sizes.
"""

import argparse
import sys
from dataclasses import dataclass, replace
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

COLUMNS = {
    Placement.ELSEWHERE: "alone",
    Placement.BESIDE: "beside its server",
    Placement.ASLEEP: "server asleep",
}

TEXT = """# What fits on one card

Written by `python scripts/memory.py -o docs/memory.md`, for [recipes/gsm8k.py](../recipes/gsm8k.py) with
Qwen2.5-Instruct: completions of 1,024 tokens on prompts of up to 512, 64 of them sampled at a time where nothing else
is said, gradient checkpointing. For a recipe of your own it is `python scripts/doctor.py recipe.py --plan 24GB`, which
reads no data: there, too, prompts are taken to have 512 tokens.

**Planned, not measured**: a step runs on tensors without data, and their bytes are counted. Such counts were within 2 %
of the peaks of a row and of a step on an H200, and on a CPU within 2 % of those of a row, or 10 % with a base in bf16
([how](results.md#what-the-plan-counts)). CUDA's part and the server's graphs are rules of thumb, and 7 % of a card are
left for fragments. "Offload" follows a rule, too (embeddings, head and two layers are on the GPU), which no GPU has
checked.

A cell has the longest row that fits, `max_tokens_per_gpu`, and what the recipe needs on top; "-" does not fit. Longer rows
than 16,384 tokens were not tried for this table. "Alone": the server is on another card. "Beside its server": it keeps its
share of the card. "Server asleep": it gives that up while the trainer trains ([how](operations.md#a-server-that-sleeps)). [8-bit moments and a 4-bit base](operations.md#less-memory) need a package
each, and a 4-bit base servers of the dequantized one; `launch.py` starts such. Offload is slow. A group that is longer
than a row goes into several, and its prompt is computed once for each.

{tables}

## Commands

{commands}
"""


@dataclass
class Cell:
    """A place in the table, and the command that belongs there."""

    text: str
    command: str


def shape(name: str) -> Qwen2Config:
    """transformers' configuration of a size."""
    hidden, mlp, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[name]
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=is_tied,
        max_position_embeddings=32768,
    )  # fmt: skip


def cell(variants: Variants, card_gb: int, placement: Placement, recipe: list[str]) -> Cell:
    """What fits on a card."""
    fit = variants.best(card_gb, placement)
    if not fit:
        return Cell("-", "")
    more = [WORDS[name] for name in fit.changes if name in WORDS]
    if 0 < fit.plan.num_sequences < SEQUENCES[0]:
        more.append(f"{fit.plan.num_sequences} sequences")
    return Cell(", ".join([f"{fit.num_tokens:,}", *more]), fit.command(recipe))


def cells_of(size: str, kind: str) -> dict[tuple[int, Placement], Cell]:
    """All cells of a size and a kind of training, by card and placement."""
    changes = KINDS[kind]
    config = replace(gsm8k, model_id=f"Qwen/Qwen2.5-{size}-Instruct", **changes)
    recipe = ["recipes/gsm8k.py", "--model_id", config.model_id]
    for name, value in changes.items():
        if value != getattr(gsm8k, name):
            recipe += [f"--{name}", str(value).lower()]
    allowed = [each for each in CHANGES if ("use_peft" in each) == config.use_peft]
    variants = Variants(config, shape(size), [{}, *allowed])
    return {
        (card_gb, placement): cell(variants, card_gb, placement, recipe)
        for card_gb in CARDS
        for placement in Placement
    }


def page(sizes: list[str]) -> str:
    """The page, in Markdown."""
    found = {(size, kind): cells_of(size, kind) for kind in KINDS for size in sizes}
    tables, commands = [], []
    for card_gb in CARDS:
        tables += [f"### {card_gb} GB", ""]
        tables.append(f"| model | trained | {' | '.join(COLUMNS.values())} |")
        tables.append("|---|---|---|---|---|")
        commands += [f"### Of {card_gb} GB", "", "```bash"]
        for (size, kind), cells in found.items():
            row = {column: cells[card_gb, placement] for placement, column in COLUMNS.items()}
            texts = " | ".join(each.text for each in row.values())
            tables.append(f"| {size} | {kind} | {texts} |")
            for column, each in row.items():
                if each.command:
                    commands += [f"# {size}, {kind}, {column}", each.command]
        tables.append("")
        commands += ["```", ""]
    return TEXT.format(tables="\n".join(tables).strip(), commands="\n".join(commands).strip())


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", dest="path", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    args = parser.parse_args()
    args.path.write_text(page(args.models))


if __name__ == "__main__":
    main()
