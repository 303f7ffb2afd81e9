"""`recipes/tiny.py` with its curves and a completion of each step in TensorBoard.

    bash scripts/demo.sh recipes/trackers.py
    tensorboard --logdir outputs/tiny/trackers

Needs `pip install tensorboard`. Any other tracker is called in the same way. For wandb and trackio
there are settings: `--use_wandb true`, `--use_trackio true`.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

from recipes.tiny import config as tiny

FOLDER = Path("outputs/tiny/trackers")


@cache
def writer():
    """Open TensorBoard's file at the first step: all ranks and reward workers import this file."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(FOLDER / "tensorboard")


def to_tensorboard(step, metrics, groups):
    """Add a step's numbers, and one of its completions as text."""
    for name, value in metrics.items():
        writer().add_scalar(name, value, step)
    if groups:  # step 0 evaluates, and has none
        writer().add_text("completion", groups[0].texts[0], step)
    writer().flush()  # its own thread would be cut off by the end of the run


config = replace(tiny, on_step=to_tensorboard, output_dir=str(FOLDER))
