"""Weights & Biases: the metrics of a run, and tables of completions."""

from typing import Any

import wandb

from config import TrainConfig, to_json

MAX_ROWS = 256  # completions in a table
MAX_CELL = 10_000  # characters


class WandbLog:
    """A run in Weights & Biases; `run_id` lets a resumed run continue."""

    def __init__(self, run_id: str | None, config: TrainConfig):
        self.config = config
        run = wandb.init(
            project=config.wandb_project,
            dir=config.output_dir,
            config=to_json(config),
            id=run_id,
            resume="allow",
        )
        self.run_id = run.id
        self.close = wandb.finish

    def send(self, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Send a step, with a table of its completions every `log_completions_steps`."""
        sent: dict[str, Any] = {}
        for name, value in metrics.items():
            # A section of panels is made for each word before a slash.
            sent[name if "/" in name else f"train/{name}"] = value

        interval = self.config.log_completions_steps
        if samples and interval and step % interval == 0:
            rows = [_cells(sample) for sample in samples[:MAX_ROWS]]
            sent["completions/table"] = wandb.Table(columns=list(samples[0]), data=rows)
        wandb.log(sent, step=step)


def _cells(sample: dict[str, Any]) -> list[float | str]:
    """A row of a table: numbers stay, all else becomes text."""
    return [
        value if isinstance(value, float | int) else str(value)[:MAX_CELL]
        for value in sample.values()
    ]
