"""`recipes/tiny.py` with a bonus for entropy, near a reference that follows the policy.

    bash scripts/demo.sh recipes/entropy.py

The bonus keeps a policy from being sure too early; the penalty holds it near where it was some
steps ago, and not for ever near where it began. `loss/entropy_bonus` stands on the terminal.
Expected: 35 to 92 %.
"""

from dataclasses import replace

from recipes.losses import entropy_bonus
from recipes.tiny import config as tiny

config = replace(
    tiny,
    loss_fn=entropy_bonus,
    beta=0.01,
    reference_decay=0.9,  # the average of about ten steps
    output_dir="outputs/tiny/entropy",
)
