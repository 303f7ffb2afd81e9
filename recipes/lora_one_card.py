"""LoRA on Qwen2.5-1.5B-Instruct with its server, on one GPU of 24 GB.

    python scripts/launch.py recipes/lora_one_card.py

Grade-school mathematics again, as in `recipes/gsm8k.py`. The server gets the adapter alone and
keeps 0.35 of the card throughout; with `max_staleness` 0 it samples while the trainer waits, which
is faster on one GPU. Planned, and not run on such a card: 16.5 GB, of which the trainer has 8.6.

    python scripts/doctor.py recipes/lora_one_card.py --plan 24GB
"""

from dataclasses import replace

from recipes.gsm8k import config as gsm8k

config = replace(
    gsm8k,
    dtype="bfloat16",
    use_peft=True,
    lora_rank=32,
    lora_alpha=64,
    learning_rate=2e-5,
    max_staleness=0,
    output_dir="outputs/lora_one_card",
)
