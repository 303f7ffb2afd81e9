"""Refuses checkpoints whose weights are not those of the model."""

import re
from collections.abc import Iterable
from pathlib import Path

from config import UserError

NO_WEIGHT = re.compile(r"(\.attn|\.attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
MOST_NAMES = 3  # of each kind, in a message


def check_complete(
    source: str | Path, missing: Iterable[str], unexpected: Iterable[str],
    reshaped: Iterable[str], untied: Iterable[str] = (),
) -> None:  # fmt: skip
    """Refuse weights that are missing, that no module takes, of another shape, or untied.

    Missing weights would be drawn at random and trained. The proof of servers cannot see it, as
    they get the same numbers.

    Args:
        source: of the weights, for the message.
        missing: names of weights, without those that the model's family ties or leaves out.
        unexpected: names that no module takes.
        reshaped: names of weights whose shape is not the module's.
        untied: names of weights whose values are not those that they are tied to.

    Raises:
        UserError: names some of them.
    """
    # Masks that GPT-Neo and GPT-J, and frequencies that old Llamas have in their files.
    unexpected = [name for name in unexpected if not NO_WEIGHT.search(name)]
    kinds = {
        "missing": missing,
        "unknown to the model": unexpected,
        "of another shape": reshaped,
        "tied in config.json, with other values (set tie_word_embeddings=false there)": untied,
    }
    faults = ""
    for kind, names in kinds.items():
        found = sorted(names)
        if found:
            faults += f"; {len(found)} {kind}: {', '.join(found[:MOST_NAMES])}"
    if faults:
        raise UserError(f"the weights of {source} do not fit the model{faults}")
