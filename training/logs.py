"""What a run writes, prints and sends, and the metrics of a batch."""

import fcntl
import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from config import TrainConfig, UserError, to_json
from rollouts.scoring import reward_means
from rollouts.stream import Group
from utils import is_main


class RunLog:
    """What a run writes: `config.json`, the `.jsonl` files, the terminal, wandb when asked.

    Exists on every rank; only rank 0's writes.

    Args:
        config: output_dir, log_steps, log_completions_steps, use_wandb, wandb_project.
        num_steps: for the time that is left.
        resumed: of the run that this one goes on with: `step`, after which what was written is dropped, `wandb_id`
            and `run_id`.
    """

    PRINTED = (
        "reward", "eval/accuracy", "eval/reward", "loss", "grad_norm", "kl", "frac_reward_zero_std",
        "completions/mean_length", "time/step_s",
    )  # fmt: skip

    def __init__(self, config: TrainConfig, num_steps: int, resumed: dict[str, Any] | None = None):
        self.config = config
        self.wandb_id: str | None = None
        self.run_id = resumed["run_id"] if resumed else uuid.uuid4().hex
        self._files = ExitStack()
        self._wandb: Any = None
        if not is_main():
            return
        folder = Path(config.output_dir)
        (folder / "run_id").write_text(self.run_id)
        (folder / "config.json").write_text(json.dumps(to_json(config), indent=2) + "\n")
        paths = {name: folder / f"{name}.jsonl" for name in ("metrics", "completions", "dropped")}
        if paths["metrics"].exists() and not resumed:
            print(f"{folder} has an earlier run: its logs get the ending .old", flush=True)
        for path in filter(Path.exists, paths.values()):
            if resumed:
                _cut_lines(path, resumed["step"])
            else:
                path.rename(path.with_name(path.name + ".old"))  # of an earlier run
        self._num_steps, self._first_step = num_steps, resumed["step"] if resumed else 0
        self._started_s = time.monotonic()
        self._held_out: float | None = None  # the last evaluation's reward
        self._lines = {n: self._files.enter_context(path.open("a", 1, "utf-8")) for n, path in paths.items()}
        self._bar = self._files.enter_context(tqdm(disable=None, bar_format="{desc}"))
        if config.use_wandb:
            import wandb

            known = {"id": resumed["wandb_id"], "resume": "allow"} if resumed and resumed["wandb_id"] else {}
            self._wandb = wandb.init(project=config.wandb_project, dir=folder, config=to_json(config), **known)
            self.wandb_id = self._wandb.id
            self._files.callback(wandb.finish)

    def step(
        self,
        step: int,
        metrics: dict[str, float],
        samples: Sequence[dict[str, Any]] = (),
        dropped: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Write one step: metrics everywhere, samples to `completions.jsonl`, groups not trained to `dropped.jsonl`.

        Raises:
            UserError: a file cannot be written, as on a full disk.
        """
        if not is_main() or not metrics:
            return
        for name, rows in (("metrics", [metrics]), ("completions", samples), ("dropped", dropped)):
            for row in rows:
                line = json.dumps(_finite({"step": step, **row}), ensure_ascii=False, default=str) + "\n"
                try:
                    self._lines[name].write(line)
                except OSError as error:
                    raise UserError(f"{self._lines[name].name} cannot be written: {error.strerror}") from error
        if self._wandb:  # which has a section of panels for each word before a slash
            self._wandb.log({n if "/" in n else f"train/{n}": value for n, value in metrics.items()}, step=step)
        self._held_out = metrics.get("eval/reward", self._held_out)
        pace = self._pace(step, metrics)
        known = (("reward", metrics.get("reward")), ("eval", self._held_out))
        good = [f"{name} {value:.3g}" for name, value in known if value is not None]
        self._bar.set_description_str(" · ".join([f"step {step}/{self._num_steps}", *good, *pace]))
        if step % self.config.log_steps == 0 or "eval/reward" in metrics:
            parts = [name for name in metrics if name.startswith("rewards/")]
            names = [self.PRINTED[0], *(parts if len(parts) > 1 else ()), *self.PRINTED[1:]]
            printed = [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
            tqdm.write(" · ".join([f"step {step}/{self._num_steps}", *printed, *pace]))
        every = self.config.log_completions_steps
        if samples and every and step % every == 0:
            self._show(step, samples)

    def _pace(self, step: int, metrics: dict[str, float]) -> list[str]:
        """How long yet, how fast, and the share of the time that the trainer and the servers waited."""
        pace = []
        if step > self._first_step:
            step_s = (time.monotonic() - self._started_s) / (step - self._first_step)
            pace += [f"{tqdm.format_interval(step_s * (self._num_steps - step))} left"]
        if "tokens_per_s/trained" in metrics:
            pace += [f"{tqdm.format_sizeof(metrics['tokens_per_s/trained'])} tok/s"]
            pace += [f"idle {metrics['idle/trainer']:.0%}/{metrics['idle/servers']:.0%}"]
        return pace

    def _show(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Some samples on the terminal, and a table of them in wandb."""
        for sample in samples[:8]:
            cells = (f"{str(sample[column])[:2000]!r:<60.60}" for column in ("prompt", "completion"))
            tqdm.write(" │ ".join([f"{sample['reward']!s:>8.8}", *cells]))
        if self._wandb:
            import wandb

            parts = [f"rewards/{name}" for name in samples[0]["rewards"]]
            columns: list[str | int] = ["group", "prompt", "completion", *parts, "reward", "advantage", "finish_reason"]
            texts = ([str(s["prompt"])[:10_000], s["completion"][:10_000]] for s in samples)
            rows: list[Any] = [
                [s["group"], *text, *s["rewards"].values(), s["reward"], s["advantage"], s["finish_reason"]]
                for s, text in zip(samples[:256], texts, strict=False)
            ]
            self._wandb.log({"completions/table": wandb.Table(columns=columns, data=rows)}, step=step)

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on with what is written."""
        return {"wandb_id": self.wandb_id, "run_id": self.run_id}

    def close(self) -> None:
        """Flush and close everything."""
        self._files.close()


def _finite(value: Any) -> Any:
    """A value with None for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_lines(path: Path, step: int) -> None:
    """Drop the lines after `step`, which come again, and one that a crash cut off."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as kept, path.open(encoding="utf-8") as lines:
        for line in lines:  # not splitlines(), which takes more than \n for an end
            if not line.endswith("\n") or json.loads(line)["step"] > step:
                break
            kept.write(line)
    part.rename(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and this run's own while the block, or the process, lasts. Rank 0's.

    Raises:
        UserError: it cannot be written, or another process has it.
    """
    if not is_main():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as error:
        raise UserError(f"output_dir={folder} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"output_dir={folder} has another run in it, process {file.read()}: end it first") from None
        except OSError as error:  # a file system without locks
            print(f"output_dir={folder} cannot be locked ({error.strerror}): keep other runs out of it", flush=True)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


MAX_SHOWN = 2000  # characters of a column in completions.jsonl


def batch_metrics(groups: list[Group], version: int, config: TrainConfig) -> dict[str, float]:
    """What is known of a batch before it trains policy `version`: rewards, lengths, staleness, times."""
    completions = [c for group in groups for c in group.completions]
    rewards = torch.tensor([group.reward for group in groups], dtype=torch.float64)
    lengths = torch.tensor([float(len(c.token_ids)) for c in completions])
    stale = [[version - min((span[0] for span in c.weight_versions), default=version)] for c in completions]
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    spread = centred.square().nanmean(dim=1).sqrt().nan_to_num(0.0)
    return {
        "reward": rewards.nanmean().item(),
        "reward_std": spread.mean().item(),
        "frac_reward_zero_std": sum(not group.can_teach for group in groups) / len(groups),
        **reward_means(groups, config),
        "staleness/mean": torch.tensor(stale).double().mean().item(),
        "staleness/max": float(max(map(max, stale))),
        "staleness/in_flight": sum(g.finished_version - g.started_version for g in groups) / len(groups),
        "staleness/in_queue": sum(version - g.finished_version for g in groups) / len(groups),
        "completions/mean_length": lengths.mean().item(),
        "completions/clipped_ratio": sum(c.truncated for c in completions) / len(completions),
        "completions/weight_versions": sum(len({s[0] for s in c.weight_versions}) for c in completions)
        / len(completions),
        "time/generate_s": max(g.sampled_s for g in groups) - min(g.started_s for g in groups),
        "time/reward_s": sum(g.scored_s - g.sampled_s for g in groups),
    }


def _shortened(value: Any) -> Any:
    """A column's value to look at: the data set has the whole of a long one, which every completion would repeat."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " …"


def batch_samples(groups: list[Group], config: TrainConfig) -> list[dict[str, Any]]:
    """One JSON object per completion, for `completions.jsonl`."""
    names = [function.__name__ for function in config.reward_funcs if callable(function)]
    return [
        {
            "group": group.id,
            "row": group.prompt.index,
            "prompt": group.prompt.content,
            "columns": columns,
            "completion": text,
            "reward": None if math.isnan(reward) else reward,
            "rewards": dict(zip(names, parts, strict=True)),
            "advantage": advantage,
            "finish_reason": completion.finish_reason,
            "weight_versions": completion.weight_versions,
        }
        for group in groups
        for columns in [{name: _shortened(value) for name, value in group.prompt.columns.items()}]
        for completion, text, parts, reward, advantage in zip(
            group.completions, group.texts, group.rewards, group.reward, group.advantages, strict=True
        )
    ]
