"""The files of a run, and all receivers of its metrics."""

import hashlib
import importlib
import json
import re
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from config import TrainConfig, to_json
from rollouts.custom import naming_function
from rollouts.group import Batch, Completion, Group, rollout_number, version_spans
from rollouts.images import open_image
from rollouts.processor import tokenizer_of
from training.metrics import batch_metrics
from training.terminal import Terminal
from utils import is_main, naming

FILES = ("metrics", "completions", "held_out", "dropped")  # each ends in .jsonl
ENCODER = msgspec.json.Encoder(enc_hook=repr)  # JSON has no NaN and infinity: they become null
HALF_PAIR = re.compile("[\ud800-\udfff]")  # a half of a surrogate pair, which UTF-8 cannot hold

MAX_SHOWN = 2000  # characters of a column, of a message, of a segment's prompt
UNREADABLE = "\ufffd"  # what a part of a character is decoded as
MAX_PARTS = 4  # tokens of a character, as UTF-8 has at most four bytes for it
LARGEST_SIDE = 512  # pixels of a copy of an image

Rows = dict[str, list[dict[str, Any]]]  # lines, by the name of their file
TRACKERS = {"wandb": "wandb_id", "trackio": "trackio_id"}  # packages with one interface
MAX_ROWS = 256  # completions in a tracker's table
MAX_CELL = 10_000  # characters
OF_TOKENS = {"tokens", "logprobs", "earlier"}  # which the page of the run shows

# -- The files -------------------------------------------------------------------------------------


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
        self._on_step: list[Any] = [config.on_step] if config.on_step else []
        self._token_texts = None
        if run:
            self._on_step += run.on_step
            self._token_texts = TokenTexts(tokenizer_of(run.processor))
        self._noting_failure = noting_failure
        before = resumed or {"run_id": uuid.uuid4().hex}
        self.run_id = before["run_id"]
        self.tracker_ids = {name: before.get(name) for name in TRACKERS.values()}
        self._trackers: list[Any] = []
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
        parts.callback(self._wait)
        self._terminal = Terminal(num_steps, config)
        parts.callback(self._terminal.close)
        for package, name in TRACKERS.items():
            if getattr(config, f"use_{package}"):
                tracker, self.tracker_ids[name] = open_tracker(
                    package, self.tracker_ids[name], config
                )
                self._trackers.append(tracker)
                parts.callback(tracker.finish)

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
        if not is_main() or not (metrics or batch):
            return
        with self._noting_failure():
            if batch:
                of_batch = batch_metrics(batch.groups, step - 1, self.config)
                metrics = of_batch | batch.metrics | metrics
                metrics["time/train_s"] -= metrics["time/wait_s"]
            batch = batch or Batch()
            held_out = held_out or {}
            in_order = sorted(batch.groups, key=lambda group: group.id)
            logged = in_order[: self.config.logged_groups]
            rows = self._rows(batch, logged, held_out)
            rows["metrics"] = [metrics]
            shown = [*logged, *chain.from_iterable(held_out.values())]

            self._wait()
            self._written = self._writer.submit(self._write, step, rows, batch.groups, shown)
            self._terminal.show(step, metrics)
            for tracker in self._trackers:
                send(tracker, step, metrics, rows["completions"], self.config)
            if step == 0:
                self._wait()  # an error, as of `on_step`, ends a run before it trains

    def _rows(self, batch: Batch, logged: list[Group], held_out: dict[str, list[Group]]) -> Rows:
        """The lines of a step by the name of their file, but for its metrics."""
        of_batch = batch_samples(logged, self.config, self._token_texts, batch.mismatches)
        rows: Rows = {"completions": of_batch, "held_out": [], "dropped": []}
        for name, groups in held_out.items():
            for sample in batch_samples(groups, self.config):
                rows["held_out"].append({"set": name, **sample})

        for group in batch.dropped:
            row = {"group": group.id, "row": group.prompt.index}
            rows["dropped"].append({**row, "reason": group.dropped, "why": group.why})
        return rows

    def _write(self, step: int, rows: Rows, groups: list[Group], shown: list[Group]) -> None:
        """Write a step's lines, and images of the groups that they show; then call `on_step`."""
        with naming("an image of a prompt cannot be written"):
            write_images(shown, Path(self.config.output_dir) / "images")

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


def encoded(lines: list[dict[str, Any]]) -> bytes:
    r"""Lines of JSON, in which a half of a surrogate pair is spelled as \ud83d."""
    try:
        return ENCODER.encode_lines(lines)
    except UnicodeEncodeError:
        text = json.dumps(lines, ensure_ascii=False, default=repr)
        text = HALF_PAIR.sub(lambda half: rf"\\u{ord(half[0]):x}", text)
        return ENCODER.encode_lines(json.loads(text, parse_constant=lambda _: None))


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
                line_step = json.loads(line)["step"]
            if line_step > step:
                break
            size += len(line)
        lines.truncate(size)


def image_urls(group: Group) -> list[str]:
    """The images of a group's prompt, as data URIs."""
    return group.prompt.images.urls if group.prompt.images else []


def image_name(url: str) -> str:
    """The file name of an image: the same image has it in every step."""
    return f"{hashlib.sha256(url.encode()).hexdigest()[:20]}.jpg"


def write_images(groups: list[Group], folder: Path) -> None:
    """Write a small copy of each image of the groups' prompts into `folder`, once."""
    for group in groups:
        for url in image_urls(group):
            path = folder / image_name(url)
            if path.exists():
                continue
            image = open_image(url)
            image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            folder.mkdir(exist_ok=True)
            partial = path.with_suffix(".part")
            image.save(partial, "JPEG", quality=85)
            partial.rename(path)


# -- Completions as lines --------------------------------------------------------------------------


class TokenTexts:
    """The text of each token, for a reader who goes from token to token.

    A character of several tokens is given whole to the last of them, and "" to the others. Joined,
    the texts are the decoded completion, except where its bytes are not valid UTF-8.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: list[int]) -> list[str]:
        """One text a token."""
        texts: list[str] = []
        part: list[int] = []  # tokens that make no whole character yet
        for token_id in token_ids:
            part.append(token_id)
            text = self._text(token_id) if len(part) == 1 else self.tokenizer.decode(part)
            if text.endswith(UNREADABLE) and len(part) < MAX_PARTS:
                text = ""
            else:
                part = []
            texts.append(text)

        if part:
            texts[-1] = self.tokenizer.decode(part)
        return texts

    def _text(self, token_id: int) -> str:
        if token_id not in self._known:
            # Behind another token: at the beginning of a text some tokenizers leave out a space.
            once = self.tokenizer.decode([token_id])
            twice = self.tokenizer.decode([token_id, token_id])
            self._known[token_id] = twice.removeprefix(once)
        return self._known[token_id]


def batch_samples(
    groups: list[Group],
    config: TrainConfig,
    texts: TokenTexts | None = None,
    mismatches: dict[int, float] | None = None,
) -> list[dict[str, Any]]:
    """One JSON object a completion.

    `texts` adds its tokens and their log-probs; the mismatches are those of a `Batch`.
    """
    functions: Any = config.reward_funcs
    names = [function.__name__ for function in functions]
    mismatches = mismatches or {}
    samples = []
    for group in groups:
        # A held-out group has no advantages; where its rollouts were refused, it has no texts.
        for number, text in enumerate(group.texts):
            completion = group.completions[number]
            fields = {
                "group": group.id,
                "row": group.prompt.index,
                "prompt": group.prompt.content,
                "columns": shortened(group.prompt.columns),
                "set": group.prompt.set or None,
                "images": list(map(image_name, image_urls(group))) or None,
                "completion": text,
                "reward": group.reward[number],
                "rewards": dict(zip(names, group.rewards[number].tolist(), strict=True)),
                "advantage": group.advantages[number] if group.advantages else None,
                "mismatch": mismatches.get(rollout_number(group, number)),
                "finish_reason": completion.finish_reason,
                "info": shortened_info(completion.info),
                **token_fields(completion, texts),
                "earlier": earlier_segments(group, number, texts),
            }
            samples.append({name: value for name, value in fields.items() if value is not None})
    return samples


def token_fields(segment: Completion, texts: TokenTexts | None) -> dict[str, Any]:
    """A segment's versions, and with `texts` its tokens and the server's log-probs."""
    fields: dict[str, Any] = {"weight_versions": version_spans(segment.weight_versions)}
    if texts:
        fields["tokens"] = texts(segment.token_ids.tolist())
        logprobs = segment.sampler_logprobs.double()
        fields["logprobs"] = logprobs.round(decimals=2).tolist()  # 5 bytes each
    return fields


def earlier_segments(group: Group, number: int, texts: TokenTexts | None) -> Any:
    """The segments of a completion before its last, with `texts`; None if there is none.

    Those with a prompt of their own have the end of it.
    """
    earlier = group.segments[number][:-1]
    if not texts or not earlier:
        return None
    found = []
    for segment in earlier:
        fields = token_fields(segment, texts)
        own_prompt = segment.prompt_ids
        if own_prompt is not None and own_prompt.tolist() != group.prompt.token_ids:
            end = own_prompt[-MAX_SHOWN:]  # a token has a character, as a rule
            fields["prompt"] = texts.tokenizer.decode(end)[-MAX_SHOWN:]
        found.append(fields)
    return found


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """Columns whose text is cut to `MAX_SHOWN` characters."""
    found = {}
    for name, value in values.items():
        text = value if isinstance(value, str) else repr(value)
        found[name] = value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN]
    return found


def shortened_info(info: dict[str, Any]) -> dict[str, Any]:
    """An environment's columns; of a conversation each message is cut by itself."""
    found = shortened(info)
    messages = info.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        found["messages"] = list(map(shortened, messages))
    return found


# -- Weights & Biases, and trackio -----------------------------------------------------------------


def open_tracker(package: str, run_id: str | None, config: TrainConfig) -> tuple[Any, str]:
    """The package with an open run, and the run's id; `run_id` lets a resumed run continue."""
    tracker: Any = importlib.import_module(package)
    options = {"project": config.wandb_project, "config": to_json(config), "resume": "allow"}
    if package == "wandb":
        return tracker, tracker.init(dir=config.output_dir, id=run_id, **options).id
    # trackio knows a run by its name, and keeps all of them in TRACKIO_DIR.
    return tracker, tracker.init(name=run_id, **options).name


def send(
    tracker: Any, step: int, metrics: dict[str, float], samples: list[dict[str, Any]],
    config: TrainConfig,
) -> None:  # fmt: skip
    """Send a step, with a table of its completions every `log_completions_steps`."""
    sent: dict[str, Any] = {}
    for name, value in metrics.items():
        # A section of panels is made for each word before a slash.
        sent[name if "/" in name else f"train/{name}"] = value

    interval = config.log_completions_steps
    if samples and interval and step % interval == 0:
        columns = [name for name in samples[0] if name not in OF_TOKENS]
        rows = [list(map(cell, map(sample.get, columns))) for sample in samples[:MAX_ROWS]]
        sent["completions/table"] = tracker.Table(columns=columns, data=rows)
    tracker.log(sent, step=step)


def cell(value: Any) -> float | str:
    """A cell of a table: numbers stay, all else becomes text."""
    return value if isinstance(value, float | int) else str(value)[:MAX_CELL]
