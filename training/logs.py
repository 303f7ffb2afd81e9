"""The files of a run, its lines on the terminal, and all receivers of its metrics."""

import fnmatch
import hashlib
import importlib
import json
import math
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache
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

FILES = ("metrics", "completions", "held_out", "dropped")  # each ends in .jsonl
ENCODER = msgspec.json.Encoder(enc_hook=repr)  # JSON has no NaN and infinity: they become null

MAX_SHOWN = 2000  # characters of a column, of a message, of a segment's prompt
UNREADABLE = "\ufffd"  # what a part of a character is decoded as
MAX_PARTS = 4  # tokens of a character, as UTF-8 has at most four bytes for it
LARGEST_SIDE = 512  # pixels of a copy of an image

MAX_ROWS = 256  # completions in a tracker's table
MAX_CELL = 10_000  # characters

PRINTED = (  # patterns of names, in the order of a line
    "reward", "rewards/*", "rewards_failed", "rollouts_failed", "eval/accuracy", "eval/reward",
    "eval/pass@*", "eval/*/accuracy", "eval/*/reward", "loss", "grad_norm", "kl",
    "frac_reward_zero_std", "completions/mean_length", "time/step_s", "loss/*",
)  # fmt: skip
IDLE = "idle: trainer {idle/trainer:.0%}, servers {idle/servers:.0%}"
LIVE = {"reward": "reward", "eval/reward": "eval"}  # names in the live line
MAX_CUT = 0.9  # share of completions that run into max_completion_len without a warning
WINDOW = 5  # steps whose mean is compared with that of the first ones
WARNINGS = {
    "no_signal": (
        "warning: no advantages, as every prompt's completions have the same reward (mean "
        "{metrics[reward]:.4g}): read them with `python scripts/show.py {config.output_dir}`"
    ),
    "cut": (
        "warning: max_completion_len={config.max_completion_len} cuts "
        "{metrics[completions/clipped_ratio]:.0%} of completions: raise it, or see why the model "
        "does not end its answers (EOS, chat template)"
    ),
    "collapse": (
        "warning: {fallen}: has the policy collapsed? Lower learning_rate or set beta, and read "
        "`python scripts/show.py {config.output_dir}`"
    ),
}

# -- The files -------------------------------------------------------------------------------------


class RunLog:
    """Writes a run's files, prints its lines, and sends its metrics.

    Rank 0 writes, and calls `on_step`, in a thread of its own; the other ranks have an empty log.
    """

    def __init__(
        self, config: TrainConfig, num_steps: int, resumed: dict[str, Any] | None = None,
        noting_failure: Callable[[], AbstractContextManager[None]] = nullcontext, run: Any = None,
    ):  # fmt: skip
        """Open the files; a step that cannot be written raises in `noting_failure`.

        With the `rollouts.run.Run`, samples of a batch have their tokens, and its parts hear of
        each step.
        """
        self.config = config
        self._noting_failure = noting_failure
        self._on_step: list[Any] = []
        self._tokenizer = None
        if config.on_step:
            self._on_step.append(config.on_step)
        if run:
            self._on_step += run.on_step
            self._tokenizer = tokenizer_of(run.processor)
        self.run_id = resumed["run_id"] if resumed else uuid.uuid4().hex
        parts = ExitStack()
        self.close = parts.close
        if not is_main():
            return

        folder = Path(config.output_dir)
        (folder / "run_id").write_text(self.run_id)
        (folder / "config.json").write_text(json.dumps(to_json(config), indent=2) + "\n")
        self._files = {}
        for name in FILES:
            path = folder / f"{name}.jsonl"
            if resumed:
                cut_after(path, resumed["step"])
            self._files[name] = parts.enter_context(path.open("ab", 0))

        self._writer = parts.enter_context(ThreadPoolExecutor(1))
        self._written: Future[None] = self._writer.submit(lambda: None)
        parts.callback(lambda: self._written.result())
        self._terminal = Terminal(num_steps, config)
        parts.callback(self._terminal.close)
        self._trackers: list[Any] = []
        for package in ("wandb", "trackio"):
            if getattr(config, f"use_{package}"):
                tracker = open_tracker(package, self.run_id, config)
                self._trackers.append(tracker)
                parts.callback(tracker.finish)

    def step(
        self, step: int, metrics: dict[str, float], batch: Batch | None = None,
        held_out: dict[str, list[Group]] | None = None,
    ) -> None:  # fmt: skip
        """Write one step.

        Args:
            step: its number, 0 before the first.
            metrics: of the step; those of its batch are added.
            batch: what was trained and dropped.
            held_out: groups of an evaluation, by the name of their data set.
        """
        if not is_main() or not metrics:
            return
        with self._noting_failure():
            if batch:
                of_batch = batch_metrics(batch.groups, step - 1, self.config)
                metrics = of_batch | batch.metrics | metrics
                metrics["time/train_s"] -= metrics["time/wait_s"]
            batch = batch or Batch()
            in_order = sorted(batch.groups, key=lambda group: group.id)
            logged = in_order[: self.config.logged_groups]

            self._written.result()  # raises the error of the step before, as of its `on_step`
            self._written = self._writer.submit(
                self._write, step, metrics, batch, logged, held_out or {}
            )
            self._terminal.show(step, metrics)
            for tracker in self._trackers:
                send(tracker, step, metrics, logged, self.config)
            if step == 0:
                self._written.result()  # ends a run before it trains

    def _write(
        self, step: int, metrics: dict[str, float], batch: Batch, logged: list[Group],
        held_out: dict[str, list[Group]],
    ) -> None:  # fmt: skip
        """Write a step's lines, and images of the groups that they show; then call `on_step`."""
        rows: Any = {"metrics": [metrics], "held_out": [], "dropped": []}
        rows["completions"] = batch_samples(logged, self.config, tokenizer=self._tokenizer)
        for name, groups in held_out.items():
            rows["held_out"] += batch_samples(groups, self.config, name)
        for group in batch.dropped:
            fate = {"reason": group.dropped, "why": group.why}
            rows["dropped"].append({"group": group.id, "row": group.prompt.index, **fate})

        with naming("an image of a prompt cannot be written"):
            for group in chain(logged, *held_out.values()):
                write_images(group, Path(self.config.output_dir) / "images")

        for name, file in self._files.items():
            with naming(f"{file.name} cannot be written"):
                data = encoded([{"step": step, **row} for row in rows[name]])
                if file.write(data) < len(data):
                    raise ValueError("the disk is full")

        for on_step in self._on_step:
            with naming_function("on_step"):
                on_step(step, dict(metrics), list(batch.groups))

    def state(self) -> dict[str, Any]:
        """The state by which a later run continues these files.

        All steps until now are on the disk when it returns, or `step` and `close` raise why not.
        """
        if is_main():
            wait([self._written])
        return {"run_id": self.run_id}


def encoded(lines: list[dict[str, Any]]) -> bytes:
    """Lines of JSON, in which a half of a surrogate pair is spelled as &#55357;."""
    try:
        return ENCODER.encode_lines(lines)
    except UnicodeEncodeError:  # UTF-8 cannot hold it
        text = json.dumps(lines, ensure_ascii=False, default=repr)
        data = text.encode("utf-8", "xmlcharrefreplace")
        return ENCODER.encode_lines(json.loads(data, parse_constant=lambda _: None))


def cut_after(path: Path, step: int) -> None:
    """Cut off the lines of a file after `step`, which come again.

    A crash may also have left half a line.
    """
    if not path.exists():
        return
    with path.open("rb+") as lines:  # in bytes, a line ends with \n alone
        size = 0
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            with naming(f"{path}: line {number} is damaged: remove it"):
                if json.loads(line)["step"] > step:
                    break
            size += len(line)
        lines.truncate(size)


# -- Completions as lines --------------------------------------------------------------------------


def batch_samples(
    groups: list[Group], config: TrainConfig, set_name: str = "", tokenizer: Any = None
) -> list[dict[str, Any]]:
    """One JSON object a completion; with a tokenizer it has its tokens and earlier segments."""
    functions: Any = config.reward_funcs
    names = [each.__name__ for each in functions]
    samples = []
    for group in groups:
        # A held-out group has no advantages; where its rollouts were refused, it has no texts.
        for number, text in enumerate(group.texts):
            segments = [segment_fields(each, group, tokenizer) for each in group.segments[number]]
            segments[-1].pop("prompt", None)
            fields = {
                "group": group.id,
                "row": group.prompt.index,
                "prompt": group.prompt.content,
                "columns": shortened(group.prompt.columns),
                "set": set_name or group.prompt.set or None,
                "images": list(map(image_name, image_urls(group))) or None,
                "completion": text,
                "reward": group.reward[number],
                "rewards": dict(zip(names, group.rewards[number].tolist(), strict=True)),
                "advantage": group.advantages[number] if group.advantages else None,
                "finish_reason": group.completions[number].finish_reason,
                "info": shortened(group.completions[number].info),
                **segments[-1],
                "earlier": segments[:-1] if tokenizer and len(segments) > 1 else None,
            }
            samples.append({name: value for name, value in fields.items() if value is not None})
    return samples


def segment_fields(segment: Completion, group: Group, tokenizer: Any) -> dict[str, Any]:
    """A segment's versions; with a tokenizer its tokens, the server's log-probs, and its prompt.

    The prompt is there where it is not the group's; of a long one the end.
    """
    fields: dict[str, Any] = {"weight_versions": version_spans(segment.weight_versions)}
    if tokenizer:
        fields["tokens"] = token_texts(segment.token_ids.tolist(), tokenizer)
        logprobs = segment.sampler_logprobs.double()
        fields["logprobs"] = logprobs.round(decimals=2).tolist()  # 5 bytes each
        own_prompt = segment.prompt_ids
        if own_prompt is not None and own_prompt.tolist() != group.prompt.token_ids:
            end = own_prompt[-MAX_SHOWN:]  # a token has a character, as a rule
            fields["prompt"] = as_sampled(end, tokenizer)[-MAX_SHOWN:]
    return fields


def token_texts(token_ids: list[int], tokenizer: Any) -> list[str]:
    """The text of each token, for a reader who goes from token to token.

    A character of several tokens is given whole to the last of them, and "" to the others. Joined,
    the texts are the decoded completion, except where its bytes are not valid UTF-8.
    """
    texts: list[str] = []
    part: tuple[int, ...] = ()  # tokens that make no whole character yet
    for token_id in token_ids:
        part = (*part, token_id)
        text = text_behind(tokenizer, part)
        if text.endswith(UNREADABLE) and len(part) < MAX_PARTS:
            text = ""
        else:
            part = ()
        texts.append(text)
    return texts


@lru_cache(maxsize=1 << 18)
def text_behind(tokenizer: Any, token_ids: tuple[int, ...]) -> str:
    """The text of tokens behind others: at its beginning some tokenizers leave out a space."""
    once = list(token_ids)
    return as_sampled(once + once, tokenizer).removeprefix(as_sampled(once, tokenizer))


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """Columns whose text is cut to `MAX_SHOWN` characters; of a conversation, each message's."""
    found = {}
    for name, value in values.items():
        text = value if isinstance(value, str) else repr(value)
        found[name] = value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN]
        is_list = name == "messages" and isinstance(value, list)
        if is_list and all(isinstance(message, dict) for message in value):
            found[name] = list(map(shortened, value))
    return found


def image_urls(group: Group) -> list[str]:
    """The images of a group's prompt, as data URIs."""
    return group.prompt.images.urls if group.prompt.images else []


def image_name(url: str) -> str:
    """The file name of an image: the same image has it in every step."""
    return f"{hashlib.sha256(url.encode()).hexdigest()[:20]}.jpg"


def write_images(group: Group, folder: Path) -> None:
    """Write a small copy of each image of the group's prompt into `folder`, once."""
    for url in image_urls(group):
        path = folder / image_name(url)
        if not path.exists():
            image = open_image(url)
            image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            folder.mkdir(exist_ok=True)
            image.save(path, "JPEG", quality=85)


# -- Weights & Biases, and trackio -----------------------------------------------------------------


def open_tracker(package: str, run_id: str, config: TrainConfig) -> Any:
    """The package with an open run; a resumed run has the same id, and continues there."""
    tracker: Any = importlib.import_module(package)
    options = {"project": config.wandb_project, "config": to_json(config), "resume": "allow"}
    if package == "wandb":
        tracker.init(id=run_id, dir=config.output_dir, **options)
    else:  # trackio knows a run by its name, and keeps all of them in TRACKIO_DIR
        tracker.init(name=run_id, **options)
    return tracker


def send(
    tracker: Any, step: int, metrics: dict[str, float], logged: list[Group], config: TrainConfig
) -> None:
    """Send a step, with a table of its completions every `log_completions_steps`."""
    sent: dict[str, Any] = {}
    for name, value in metrics.items():
        # A section of panels is made for each word before a slash.
        sent[name if "/" in name else f"train/{name}"] = value

    interval = config.log_completions_steps
    if logged and interval and step % interval == 0:
        samples = batch_samples(logged, config)
        rows = []
        for sample in samples[:MAX_ROWS]:
            rows.append([cell(sample.get(name)) for name in samples[0]])
        sent["completions/table"] = tracker.Table(columns=list(samples[0]), data=rows)
    tracker.log(sent, step=step)


def cell(value: Any) -> float | str:
    """A cell of a table: numbers stay, all else becomes text."""
    return value if isinstance(value, float | int) else str(value)[:MAX_CELL]


# -- The terminal ----------------------------------------------------------------------------------


class Terminal:
    """Prints a run's progress, with the time left."""

    def __init__(self, num_steps: int, config: TrainConfig):
        self.config = config
        self.num_steps = num_steps
        self.recent_s = deque[float](maxlen=50)  # seconds of steps, with their evaluations
        self.last: dict[str, float] = {}  # the last value of each metric
        self.values: dict[str, list[float]] = {"reward": [], "entropy": []}  # the finite ones
        self.warnings = dict(WARNINGS)  # not printed yet
        self.patterns = list(PRINTED)
        if len(config.reward_funcs) == 1:  # it is the reward
            self.patterns.remove("rewards/*")
        self.bar = tqdm(disable=None, bar_format="{desc}")

    def close(self) -> None:
        """End the live line, and say where all of the run can be seen."""
        self.bar.close()
        if self.last:  # else it ended before its first step
            folder = self.config.output_dir
            print(f"curves and completions on a page: `python scripts/show.py {folder} --html`")

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Renew the live line; print one every `log_steps` and after an evaluation."""
        self.warn(step, metrics)
        self.last |= metrics
        head = f"step {step}/{self.num_steps}"
        pace = []
        if "time/step_s" in metrics:
            self.recent_s.append(metrics["time/step_s"] + metrics.get("time/eval_s", 0.0))
            left_s = fmean(self.recent_s) * (self.num_steps - step)
            speed = tqdm.format_sizeof(metrics["tokens_per_s/trained"])
            pace = [f"{tqdm.format_interval(left_s)} left", f"{speed} tok/s"]
            if len(self.recent_s) > 1:  # the first step's groups were sampled before it began
                pace.append(IDLE.format_map(metrics))

        live = [f"{LIVE[name]} {self.last[name]:.4g}" for name in LIVE if name in self.last]
        self.bar.set_description_str(" · ".join([head, *live, *pace]))
        if step % self.config.log_steps == 0 or "eval/reward" in metrics:
            shown = []
            for pattern in self.patterns:
                for name in fnmatch.filter(metrics, pattern):
                    if metrics[name] or not name.endswith("_failed"):
                        shown.append(f"{name} {metrics[name]:.4g}")
            tqdm.write(" · ".join([head, *shown, *pace]))

    def warn(self, step: int, metrics: dict[str, float]) -> None:
        """Print each warning that holds, once.

        A policy that learns to be sure has little entropy too, and a higher reward. Means of
        `WINDOW` steps are compared, as one batch may have no solved problem.
        """
        for name in self.values.keys() & metrics.keys():
            if math.isfinite(metrics[name]):
                self.values[name].append(metrics[name])
        fallen = []
        for name, values in self.values.items():
            if len(values) < 2 * WINDOW:
                continue
            first = fmean(values[:WINDOW])
            last = fmean(values[-WINDOW:])
            if name == "reward" and last > first:
                break  # it learns
            if first > 0 and last < first / 10:
                fallen.append(f"{name} fell from {first:.3g} to {last:.3g}")

        config = self.config
        has_signal = config.advantage_fn or config.loss_fn or config.beta
        holds = {
            "no_signal": step == 1 and metrics.get("frac_reward_zero_std") == 1 and not has_signal,
            "cut": metrics.get("completions/clipped_ratio", 0.0) > MAX_CUT,
            "collapse": fallen,
        }
        known = {"config": config, "metrics": metrics, "fallen": ", ".join(fallen)}
        for name in list(self.warnings):
            if holds[name]:
                tqdm.write(self.warnings.pop(name).format(**known))
