"""Draw docs/memory.md: what of Qwen2.5 fits on which card, by scripts/plan.py.

    python scripts/memory.py -o docs/memory.md

`--models 0.5B` leaves out the other sizes.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plan import LORA, Server, Variants
from transformers import Qwen2Config

from recipes.gsm8k import config as gsm8k

CARDS = (16, 24, 48, 80)  # GB
KINDS: dict[str, dict[str, Any]] = {"all weights": {}, "LoRA": LORA}
SHAPES = {  # of Qwen2.5: hidden size, MLP, layers, heads, heads of keys, vocabulary, tied embeddings
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
}
WORDS = {"adam_8bit": "8-bit moments", "base_4bit": "4-bit base", "fsdp_offload": "offload"}

TEXT = """# What fits on one card

Made by `python scripts/memory.py -o docs/memory.md`, for [recipes/gsm8k.py](../recipes/gsm8k.py) with Qwen2.5-Instruct:
completions of 1,024 tokens on prompts of up to 512, 64 of them sampled at a time, gradient checkpointing. A recipe of
your own: `python scripts/doctor.py recipe.py --plan 24GB`.

**Planned, not measured**: a step runs on tensors without data, and their bytes are counted. Such counts are within
0.5 % of the peaks of a row and 1 % of those of a step that were measured on an H200, and within 8 % of this CPU's
([results.md](results.md#memory)). CUDA's part and the server's graphs are rules of thumb, and 7 % of a card are left
for fragments. "Offload" has its own rule (embeddings, head and two layers on the GPU), which no GPU has checked.

A cell is the longest row, `max_tokens_per_gpu`, of 16,384 at most: longer ones are no faster. With it stands what the
recipe needs on top; "-" is what does not fit. "Beside" and "asleep" have their server on the same card: one takes its
own part of it, the other gives it up while the trainer trains ([how](operations.md#a-server-that-sleeps)).

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


def cell(
    variants: Variants, card_gb: int, server: Server, kind: dict[str, Any], recipe: list[str]
) -> Cell:
    """What fits on a card, of one kind of training."""
    found = variants.first_that_fits(card_gb, server)
    if not found or ("use_peft" in found[0]) > ("use_peft" in kind):
        return Cell("-", "")
    changes, plan, most = found
    num_tokens = min(most, gsm8k.max_tokens_per_gpu)
    more = [WORDS[name] for name in changes if name in WORDS]
    return Cell(", ".join([f"{num_tokens:,}", *more]), plan.command(recipe, changes, num_tokens))


def cells_of(size: str, kind: str) -> dict[tuple[int, Server], Cell]:
    """All cells of a size and a kind of training, by card and server."""
    changes = KINDS[kind]
    config = replace(gsm8k, model_id=f"Qwen/Qwen2.5-{size}-Instruct", **changes)
    recipe = ["recipes/gsm8k.py", "--model_id", config.model_id]
    for name, value in changes.items():
        if value != getattr(gsm8k, name):
            recipe += [f"--{name}", str(value).lower()]
    variants = Variants(config, shape(size))
    return {
        (card_gb, server): cell(variants, card_gb, server, changes, recipe)
        for card_gb in CARDS
        for server in Server
    }


def page(sizes: list[str]) -> str:
    """The page, in Markdown."""
    found = {(size, kind): cells_of(size, kind) for kind in KINDS for size in sizes}
    tables, commands = [], []
    for card_gb in CARDS:
        tables += [f"### {card_gb} GB", ""]
        tables.append("| model | trained | alone | beside its server | server asleep |")
        tables.append("|---|---|---|---|---|")
        commands += [f"### Of {card_gb} GB", "", "```bash"]
        for (size, kind), cells in found.items():
            own = [cells[card_gb, s] for s in (Server.ELSEWHERE, Server.BESIDE, Server.ASLEEP)]
            texts = " | ".join(each.text for each in own)
            tables.append(f"| {size} | {kind} | {texts} |")
            for each, where in zip(
                own, ("alone", "beside its server", "server asleep"), strict=True
            ):
                if each.command:
                    commands += [f"# {size}, {kind}, {where}", each.command]
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
