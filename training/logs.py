"""The files of a run, its lines on the terminal, and all receivers of its metrics."""

import fnmatch
import hashlib
import importlib
import json
import math
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from tqdm import tqdm

from config import TrainConfig, to_json
from rollouts.custom import naming_function
from rollouts.group import Batch, Completion, Group, version_spans
from rollouts.images import open_image
from rollouts.processor import as_sampled, tokenizer_of
from training.metrics import batch_metrics
from utils import is_main, naming

FILES = ("metrics.jsonl", "completions.jsonl", "held_out.jsonl", "dropped.jsonl")
ENCODER = msgspec.json.Encoder(enc_hook=repr)  # JSON has no NaN and infinity: they become null

MAX_SHOWN = 2000  # characters of a column, of a message, of a segment's prompt
LARGEST_SIDE = 512  # pixels of a copy of an image

PRINTED = (  # patterns of names, in the order of a line
    "reward", "rewards/*", "rewards_failed", "rollouts_failed", "eval/accuracy", "eval/reward",
    "eval/pass@*", "eval/*/accuracy", "eval/*/reward", "loss", "grad_norm", "kl",
    "frac_reward_zero_std", "completions/mean_length", "time/step_s", "loss/*",
)  # fmt: skip
IDLE = "idle: trainer {idle/trainer:.0%}, servers {idle/servers:.0%}"
PAGE = "curves and completions on a page: `python scripts/show.py {} --html`"
WINDOW = 5  # steps whose mean is compared with that of the first ones
MAX_CUT = 0.9  # share of completions that run into max_completion_len without a warning

# -- The files -------------------------------------------------------------------------------------


class RunLog:
    """Writes a run's files, prints its lines, and sends its metrics.

    Rank 0 writes, and calls `on_step`, in a thread of its own; the other ranks have an empty log.
    """

    def __init__(self, config: TrainConfig, before: dict[str, Any], rollouts: Any):
        """Cut what the files have behind `before`, the state that this run goes on from, or {}.

        The run's `rollouts` end it where a step cannot be written.
        """
        self.config = config
        self.num_steps = rollouts.num_steps
        self._noting_failure = rollouts.noting_failure
        self._recent_s = deque[float](maxlen=50)  # seconds of steps, with their evaluations
        self._trained: list[dict[str, float]] = []  # metrics, for `_warn_of_collapse`
        self._on_step: list[Any] = [config.on_step] if config.on_step else []
        self.run_id = before.get("run_id") or uuid.uuid4().hex
        parts = ExitStack()
        self.close = parts.close
        if not is_main():
            return

        self._on_step += rollouts.run.on_step
        self._tokenizer = tokenizer_of(rollouts.run.processor)
        folder = Path(config.output_dir)
        parts.callback(print, PAGE.format(folder))
        (folder / "run_id").write_text(self.run_id)
        (folder / "config.json").write_text(json.dumps(to_json(config), indent=2) + "\n")
        if before:
            for name in FILES:
                cut_after(folder / name, before["step"])

        known_by: dict[str, Any] = {  # a resumed run has the same id, and continues there
            "wandb": {"id": self.run_id, "dir": config.output_dir},
            "trackio": {"name": self.run_id},  # it keeps all runs in TRACKIO_DIR
        }
        for package, options in known_by.items():
            if getattr(config, f"use_{package}"):
                tracker: Any = importlib.import_module(package)
                options |= {"project": config.wandb_project, "config": to_json(config)}
                self._on_step.append(
                    partial(send, tracker.init(resume="allow", **options), tracker.Table, config)
                )
                parts.callback(tracker.finish)

        self._writer = parts.enter_context(ThreadPoolExecutor(1))
        self._written: Future[None] = self._writer.submit(lambda: None)
        parts.callback(lambda: self._written.result())

    def step(self, step: int, metrics: dict[str, float], batch: Batch) -> None:
        """Write one step, if it has metrics.

        Args:
            step: its number, 0 before the first.
            metrics: of the step; those of its batch are added.
            batch: what was trained and dropped, and the evaluation after it.
        """
        metrics = batch.metrics | metrics
        if not is_main() or not metrics:
            return
        with self._noting_failure():
            if batch.groups:
                metrics = batch_metrics(batch.groups, step - 1, self.config) | metrics
                metrics["time/train_s"] -= metrics["time/wait_s"]

            self._written.result()  # raises the error of the step before, as of its `on_step`
            self._written = self._writer.submit(self._write, step, metrics, batch)
            self._print(step, metrics)
            if step == 0:
                self._written.result()  # ends a run before it trains

    def _write(self, step: int, metrics: dict[str, float], batch: Batch) -> None:
        """Write a step's lines, with the images of their prompts; then call `on_step`."""
        folder = Path(self.config.output_dir)
        with naming(f"output_dir={folder} cannot be written"):
            logged = batch.groups[: self.config.logged_groups]
            evaluated = list(chain.from_iterable(batch.held_out.values()))
            lines: dict[str, Any] = {
                "metrics.jsonl": [metrics],
                "completions.jsonl": batch_samples(logged, self.config, tokenizer=self._tokenizer),
                "held_out.jsonl": batch_samples(evaluated, self.config),
                "dropped.jsonl": [
                    {
                        "group": group.id,
                        "row": group.prompt.index,
                        "reason": group.dropped,
                        "why": group.why,
                    }
                    for group in batch.dropped
                ],
            }
            for name, of_file in lines.items():
                with (folder / name).open("ab") as file:
                    file.write(encoded([{"step": step, **line} for line in of_file]))

        for on_step in self._on_step:
            with naming_function("on_step"):
                on_step(step, dict(metrics), list(batch.groups))

    def _print(self, step: int, metrics: dict[str, float]) -> None:
        """Print a line every `log_steps` and after an evaluation; warn of a first batch."""
        config = self.config
        has_signal = config.advantage_fn or config.loss_fn or config.beta
        if step == 1 and metrics.get("frac_reward_zero_std") == 1 and not has_signal:
            print(
                "warning: no advantages, as every prompt's completions have the same reward: read "
                "them with scripts/show.py"
            )
        if step == 1 and metrics.get("completions/clipped_ratio", 0.0) > MAX_CUT:
            print(
                "warning: nearly all completions are cut: raise max_completion_len, or see why the "
                "model does not end its answers (EOS, chat template)"
            )
        self._warn_of_collapse(metrics)

        words = [f"step {step}/{self.num_steps}"]
        for pattern in PRINTED:
            for name in fnmatch.filter(metrics, pattern):
                if metrics[name] or not name.endswith("_failed"):
                    words.append(f"{name} {metrics[name]:.4g}")
        if "time/step_s" in metrics:
            self._recent_s.append(metrics["time/step_s"] + metrics.get("time/eval_s", 0.0))
            left_s = fmean(self._recent_s) * (self.num_steps - step)
            speed = tqdm.format_sizeof(metrics["tokens_per_s/trained"])
            words += [f"{tqdm.format_interval(left_s)} left", f"{speed} tok/s"]
            words.append(IDLE.format_map(metrics))
        if step % config.log_steps == 0 or "eval/reward" in metrics:
            print(" · ".join(words))

    def _warn_of_collapse(self, metrics: dict[str, float]) -> None:
        """Print that reward or entropy fell to a tenth, by means of `WINDOW` steps.

        A policy that learns to be sure has little entropy too, and a higher reward.
        """
        trained = self._trained
        if math.isfinite(metrics.get("reward", math.nan)) and "entropy" in metrics:
            trained.append(metrics)
        if len(trained) < 2 * WINDOW:
            return
        del trained[WINDOW:-WINDOW]  # the first and the last ones are enough
        for name in ("reward", "entropy"):
            first = fmean(each[name] for each in trained[:WINDOW])
            last = fmean(each[name] for each in trained[-WINDOW:])
            if name == "reward" and last > first:
                return  # it learns
            if first > 0 and last < first / 10:
                print(
                    f"warning: {name} fell from {first:.3g} to {last:.3g}: has the policy "
                    "collapsed? Lower learning_rate or set beta, and read scripts/show.py"
                )
                trained.clear()  # it is said again if they fall as far again
                return

    def state(self) -> dict[str, Any]:
        """The state by which a later run continues these files.

        All steps until now are on the disk when it returns, or `step` and `close` raise why not.
        """
        if is_main():
            wait([self._written])
        return {"run_id": self.run_id}


def cut_after(path: Path, step: int) -> None:
    """Cut off the lines of a file after `step`, which come again.

    A crash may also have left half a line.
    """
    if not path.exists():
        return
    # In bytes, a line ends with \n alone.
    with naming(f"{path} has a damaged line: remove it"), path.open("rb+") as lines:
        size = 0
        for line in lines:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
            size += len(line)
        lines.truncate(size)


def encoded(lines: list[dict[str, Any]]) -> bytes:
    """Lines of JSON, in which a half of a surrogate pair is spelled as &#55357;."""
    try:
        return ENCODER.encode_lines(lines)
    except UnicodeEncodeError:  # UTF-8 cannot hold it
        text = json.dumps(lines, ensure_ascii=False, default=repr)
        return ENCODER.encode_lines(json.loads(text.encode("utf-8", "xmlcharrefreplace")))


# -- Completions as lines --------------------------------------------------------------------------


def batch_samples(
    groups: list[Group], config: TrainConfig, tokenizer: Any = None
) -> list[dict[str, Any]]:
    """One JSON object a completion; images of their prompts are written beside, once.

    With a tokenizer a completion has its tokens and earlier segments.
    """
    functions: Any = config.reward_funcs
    names = [each.__name__ for each in functions]
    samples = []
    for group in groups:
        images = write_images(group, Path(config.output_dir) / "images")
        # A held-out group has no advantages; where its rollouts were refused, it has no texts.
        for number in range(len(group.texts)):
            segments = [segment_fields(each, group, tokenizer) for each in group.segments[number]]
            segments[-1].pop("prompt", None)
            fields = {
                "group": group.id,
                "row": group.prompt.index,
                "prompt": group.prompt.content,
                "columns": shortened(group.prompt.columns),
                "set": group.prompt.set or None,
                "images": images or None,
                "completion": group.texts[number],
                "reward": group.reward[number],
                "rewards": dict(zip(names, group.rewards[number].tolist(), strict=True)),
                "advantage": group.advantages[number] if group.advantages else None,
                "finish_reason": group.completions[number].finish_reason,
                "info": shortened(group.completions[number].info),
                **segments[-1],
                "earlier": (tokenizer and segments[:-1]) or None,
            }
            samples.append({name: value for name, value in fields.items() if value is not None})
    return samples


def segment_fields(segment: Completion, group: Group, tokenizer: Any) -> dict[str, Any]:
    """A segment's versions; with a tokenizer its tokens, the server's log-probs, and its prompt.

    The prompt is there where it is not the group's; of a long one the end.
    """
    fields: dict[str, Any] = {"weight_versions": version_spans(segment.weight_versions)}
    if tokenizer:
        token_ids = segment.token_ids.tolist()
        fields["tokens"] = [token_text(tokenizer, token_id) for token_id in token_ids]
        logprobs = segment.sampler_logprobs.double()
        fields["logprobs"] = logprobs.round(decimals=2).tolist()  # 5 bytes each
        own_prompt = segment.prompt_ids
        if own_prompt is not None and own_prompt.tolist() != group.prompt.token_ids:
            end = own_prompt[-MAX_SHOWN:]  # a token has a character, as a rule
            fields["prompt"] = as_sampled(end, tokenizer)[-MAX_SHOWN:]
    return fields


@lru_cache(maxsize=1 << 18)
def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of a token behind another: at its beginning some tokenizers leave out a space."""
    once = as_sampled([token_id], tokenizer)
    return as_sampled([token_id, token_id], tokenizer).removeprefix(once)


def shortened(value: Any, name: str = "") -> Any:
    """A column cut to `MAX_SHOWN` characters; of a dictionary or conversation, each part of it."""
    if isinstance(value, dict):
        return {key: shortened(item, key) for key, item in value.items()}
    if name == "messages" and isinstance(value, list):
        return list(map(shortened, value))
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN]


def write_images(group: Group, folder: Path) -> list[str]:
    """Write a small copy of each image of the group's prompt, once; returns the files' names."""
    names = []
    for url in group.prompt.images.urls if group.prompt.images else []:
        name = f"{hashlib.sha256(url.encode()).hexdigest()[:20]}.jpg"
        names.append(name)
        if not (folder / name).exists():
            image = open_image(url)
            image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            folder.mkdir(exist_ok=True)
            image.save(folder / name, "JPEG", quality=85)
    return names


# -- Weights & Biases, and trackio -----------------------------------------------------------------


def send(
    tracked: Any, table: Any, config: TrainConfig,
    step: int, metrics: dict[str, float], groups: list[Group],
) -> None:  # fmt: skip
    """Send a step to a tracker's run, with a table of completions every `log_completions_steps`."""
    sent: dict[str, Any] = {}
    for name, value in metrics.items():
        # A section of panels is made for each word before a slash.
        sent[name if "/" in name else f"train/{name}"] = value

    interval = config.log_completions_steps
    if groups and interval and step % interval == 0:
        samples = batch_samples(groups[: config.logged_groups], config)
        data = []
        for sample in samples:
            cells = [sample.get(name) for name in samples[0]]
            # Numbers stay, all else becomes text.
            data.append([each if isinstance(each, float | int) else str(each) for each in cells])
        sent["completions/table"] = table(columns=list(samples[0]), data=data)
    tracked.log(sent, step=step)
