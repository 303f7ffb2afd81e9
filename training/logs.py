"""The files of a run, and all receivers of its metrics."""

import json
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from config import TrainConfig, to_json
from rollouts.group import Batch, Group
from rollouts.own_advantages import naming_function
from rollouts.processor import tokenizer_of
from training.metrics import batch_metrics
from training.samples import TokenTexts, batch_samples
from training.terminal import Terminal, warn_of
from training.thumbnails import write_thumbnails
from training.trackers import Tracker
from utils import is_main, naming

FILES = ("metrics", "completions", "held_out", "dropped")  # each ends in .jsonl
ENCODER = msgspec.json.Encoder(enc_hook=repr)  # JSON has no NaN and infinity: they become null
Rows = dict[str, list[dict[str, Any]]]  # lines, by the name of their file
TRACKERS = ("wandb", "trackio")  # packages with one interface


def encoded(lines: list[dict[str, Any]]) -> bytes:
    """Lines of JSON."""
    try:
        return ENCODER.encode_lines(lines)
    except UnicodeEncodeError:
        return ENCODER.encode_lines(_writable(lines))


def _writable(value: Any) -> Any:
    r"""The value with half surrogate pairs, which UTF-8 cannot hold, spelled as \ud83d."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value


class RunLog:
    """Writes a run's files, prints its lines, and sends its metrics.

    Rank 0 writes, and calls `on_step`, in a thread of its own; the other ranks have an empty log.
    """

    def __init__(
        self,
        config: TrainConfig,
        num_steps: int,
        resumed: dict[str, Any] | None = None,
        noting_failure: Callable[[], AbstractContextManager[None]] = nullcontext,
        run: Any = None,
    ):
        """Open the files; a step that cannot be written raises in `noting_failure`.

        With the `rollouts.run.Run`, samples of a batch have their tokens, and its parts hear of
        each step.
        """
        self.config = config
        self._on_step: list[Any] = []
        if config.on_step:
            self._on_step.append(config.on_step)
        self._token_texts = None
        if run:
            self._on_step += run.on_step
            self._token_texts = TokenTexts(tokenizer_of(run.processor))
        self._noting_failure = noting_failure
        before = resumed or {"run_id": uuid.uuid4().hex}
        self.run_id = before["run_id"]
        self.tracker_ids = {f"{package}_id": before.get(f"{package}_id") for package in TRACKERS}
        self._trackers: list[Any] = []
        parts = ExitStack()
        self.close = parts.close
        if not is_main():
            return

        folder = Path(config.output_dir)
        (folder / "run_id").write_text(self.run_id)
        (folder / "config.json").write_text(json.dumps(to_json(config), indent=2) + "\n")
        if resumed:
            _cut_files(folder, resumed["step"])
        self._files = {}
        for name in FILES:
            self._files[name] = parts.enter_context(_path(folder, name).open("ab", 0))

        self._writer = parts.enter_context(ThreadPoolExecutor(1))
        self._written: Future[None] = self._writer.submit(lambda: None)
        parts.callback(self._wait)
        self._terminal = Terminal(num_steps, config)
        parts.callback(self._terminal.close)
        for package in TRACKERS:
            if getattr(config, f"use_{package}"):
                tracker = Tracker(package, self.tracker_ids[f"{package}_id"], config)
                self.tracker_ids[f"{package}_id"] = tracker.run_id
                self._trackers.append(tracker)
                parts.callback(tracker.close)

    def step(
        self,
        step: int,
        metrics: dict[str, float],
        batch: Batch | None = None,
        held_out: dict[str, list[Group]] | None = None,
    ) -> None:
        """Write one step.

        Args:
            step: its number, 0 before the first.
            metrics: of the step; those of its batch are added.
            batch: what was trained and dropped.
            held_out: groups of an evaluation, by the name of their data set.
        """
        if is_main() and (metrics or batch):
            with self._noting_failure():
                self._step(step, metrics, batch, held_out or {})

    def _step(
        self,
        step: int,
        metrics: dict[str, float],
        batch: Batch | None,
        held_out: dict[str, list[Group]],
    ) -> None:
        if batch:
            metrics = batch_metrics(batch.groups, step - 1, self.config) | batch.metrics | metrics
            metrics["time/train_s"] -= metrics["time/wait_s"]
            if step == 1:
                warn_of(metrics, self.config)
        batch = batch or Batch()
        rows = self._rows(batch, held_out)
        rows["metrics"] = [metrics]
        shown = [*self._logged(batch), *chain.from_iterable(held_out.values())]

        self._wait()
        self._written = self._writer.submit(self._write, step, rows, batch.groups, shown)
        self._terminal.show(step, metrics)
        for tracker in self._trackers:
            tracker.send(step, metrics, rows["completions"])
        if step == 0:
            self._wait()  # an error, as of `on_step`, ends a run before it trains

    def _rows(self, batch: Batch, held_out: dict[str, list[Group]]) -> Rows:
        """The lines of a step, but for its metrics."""
        rows: Rows = {name: [] for name in FILES}
        logged = self._logged(batch)
        rows["completions"] = batch_samples(
            logged, self.config, self._token_texts, batch.mismatches
        )

        for group in batch.dropped:
            rows["dropped"].append(
                {
                    "group": group.id,
                    "row": group.prompt.index,
                    "reason": group.dropped,
                    "why": group.why,
                }
            )

        for name, groups in held_out.items():
            for sample in batch_samples(groups, self.config):
                rows["held_out"].append({"set": name, **sample})
        return rows

    def _logged(self, batch: Batch) -> list[Group]:
        """The groups whose completions are written."""
        in_order = sorted(batch.groups, key=lambda group: group.id)
        return in_order[: self.config.logged_groups]

    def _write(self, step: int, rows: Rows, groups: list[Group], shown: list[Group]) -> None:
        """Write a step's lines, and images of the groups that they show; then call `on_step`."""
        if any(group.prompt.images for group in shown):
            with naming("an image of a prompt cannot be written"):
                write_thumbnails(shown, Path(self.config.output_dir) / "images")

        for name, file in self._files.items():
            with naming(f"{file.name} cannot be written"):
                data = encoded([{"step": step, **row} for row in rows[name]])
                if file.write(data) < len(data):
                    raise ValueError("the disk is full")

        for on_step in self._on_step:
            with naming_function("on_step"):
                on_step(step, dict(rows["metrics"][0]), list(groups))

    def _wait(self) -> None:
        """Wait until the last step is written; raises the error of writing or of `on_step`."""
        self._written.result()

    def state(self) -> dict[str, Any]:
        """The state by which a later run continues these files.

        All steps until now are on the disk when it returns, or `step` and `close` raise why not.
        """
        if is_main():
            wait([self._written])
        return {"run_id": self.run_id, **self.tracker_ids}


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"


def _cut_files(folder: Path, step: int) -> None:
    """Cut off the lines after `step`, which come again.

    A crash may also have left half a line.
    """
    for name in FILES:
        path = _path(folder, name)
        if not path.exists():
            continue
        with path.open("rb+") as lines:  # in bytes, a line ends with \n alone
            size = 0
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                with naming(f"{path}: line {number} is damaged: remove it"):
                    line_step = json.loads(line)["step"]
                if line_step > step:
                    break
                size += len(line)
            lines.truncate(size)
