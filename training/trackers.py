"""Weights & Biases and trackio: the metrics of a run, and tables of completions."""

import importlib
from typing import Any

from config import TrainConfig, to_json

MAX_ROWS = 256  # completions in a table
MAX_CELL = 10_000  # characters
OF_TOKENS = {"tokens", "logprobs", "earlier"}  # which the page of the run shows


class Tracker:
    """A run in wandb, or in trackio, which has wandb's interface."""

    def __init__(self, package: str, run_id: str | None, config: TrainConfig):
        """Open a run of the package; `run_id` lets a resumed run continue."""
        self.config = config
        self.module: Any = importlib.import_module(package)
        options = {"project": config.wandb_project, "config": to_json(config), "resume": "allow"}
        if package == "wandb":
            self.run_id = self.module.init(dir=config.output_dir, id=run_id, **options).id
        else:  # trackio knows a run by its name, and keeps all of them in TRACKIO_DIR
            self.run_id = self.module.init(name=run_id, **options).name
        self.close = self.module.finish

    def send(self, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Send a step, with a table of its completions every `log_completions_steps`."""
        sent: dict[str, Any] = {}
        for name, value in metrics.items():
            # A section of panels is made for each word before a slash.
            sent[name if "/" in name else f"train/{name}"] = value

        interval = self.config.log_completions_steps
        if samples and interval and step % interval == 0:
            columns = [name for name in samples[0] if name not in OF_TOKENS]
            rows = [_cells(sample, columns) for sample in samples[:MAX_ROWS]]
            sent["completions/table"] = self.module.Table(columns=columns, data=rows)
        self.module.log(sent, step=step)


def _cells(sample: dict[str, Any], columns: list[str]) -> list[float | str]:
    """A row of a table: numbers stay, all else becomes text."""
    values = [sample.get(name) for name in columns]
    return [value if isinstance(value, float | int) else str(value)[:MAX_CELL] for value in values]
