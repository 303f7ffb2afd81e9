"""One page of one or several runs: their curves, and what was sampled.

`scripts/show.py RUN --html` writes it as a file that opens from the disk, `--serve` serves it on loopback and
follows runs that train. scripts/page/ has its parts; text of a model is data there, and never code.
"""

import base64
import hashlib
import json
import math
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import DEFAULTS

PARTS = Path(__file__).resolve().parent / "page"
MAX_ROWS = 10_000  # of one log of a run, completions or held_out
MAX_BYTES = 40_000_000  # of these rows, as JSON
MAX_POINTS = 2_000  # of a curve
# Which tell of machines and accounts, and not of the run.
MACHINE_SETTINGS = ("output_dir", "vllm_urls", "hub_repo_id", "resume_from_checkpoint")
KEPT_BYTES = 150_000  # of each log, of a run that is kept in a repository
MAX_IMAGE_BYTES = 20_000_000  # of all pictures in a page
STEP = re.compile(rb'\{"step": ?(\d+)')


class Lines(NamedTuple):
    """The lines of a log that a page has, and how many it lacks."""

    rows: list[dict[str, Any]]
    steps_left_out: int
    rows_left_out: int


def read_lines(path: Path, most_bytes: int) -> Lines:
    """The rows of a log, each of which begins with its step; of a long one those of steps at even distances."""
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return Lines(rows, 0, 0)
    places: dict[int, list[tuple[int, int]]] = {}  # by step, the begin and size of each line
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):  # the trainer is about to write the rest
                break
            found = STEP.match(line)
            if not found:
                sys.exit(f"error: {path}: a line is damaged: {line[:60]!r}")
            places.setdefault(int(found[1]), []).append((end, len(line)))
            end += len(line)

        weights = {}  # the share of a page that each step takes
        for step, of_step in places.items():
            num_bytes = sum(size for _, size in of_step)
            weights[step] = max(len(of_step) / MAX_ROWS, num_bytes / most_bytes)
        chosen = chosen_steps(weights)
        total = max(sum(weights[step] for step in chosen), 1.0)
        for step in chosen:  # even the first and the last may be too large: their first groups
            num_rows = int(len(places[step]) / total)
            for begin, size in places[step][:num_rows]:
                file.seek(begin)
                rows.append(parsed(file.read(size), path))
    num_rows = sum(map(len, places.values()))
    return Lines(rows, len(places) - len(chosen), num_rows - len(rows))


def parsed(line: bytes, path: Path) -> dict[str, Any]:
    """A line of a log, None for what JSON has no number for, as other trainers write it."""
    try:
        return json.loads(line, parse_constant=lambda _: None)
    except ValueError:
        sys.exit(f"error: {path}: a line is damaged: {line[:60]!r}")


def chosen_steps(weights: dict[int, float]) -> list[int]:
    """As many steps as fit into a page, of which each takes a share, at even distances, with the first and the last."""
    steps = sorted(weights)
    chosen = steps
    while len(chosen) > 2 and sum(weights[step] for step in chosen) > 1:
        num_steps = max(len(chosen) * 9 // 10, 2)
        distance = (len(steps) - 1) / (num_steps - 1)
        chosen = [steps[round(place * distance)] for place in range(num_steps)]
    return chosen


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The metrics by name, None where a step has none; of very many steps means of neighbours, at the last."""
    size = math.ceil(len(rows) / MAX_POINTS)
    parts = [rows[begin : begin + size] for begin in range(0, len(rows), size or 1)]
    names = dict.fromkeys(name for row in rows for name in row)
    by_name = {name: [_short(_mean(part, name)) for part in parts] for name in names}
    by_name["step"] = [part[-1]["step"] for part in parts]
    return by_name


def _mean(rows: list[dict[str, Any]], name: str) -> Any:
    """A metric's mean over the steps that have it; None where none has."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else None


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a log, one by one; the trainer may be about to write the rest of the last."""
    if not path.is_file():
        sys.exit(f"error: {path} is not there: give a run's output_dir")
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield parsed(line, path)


def read_run(folder: Path) -> dict[str, Any]:
    """Read a run's part of a page."""
    metrics = list(read_rows(folder / "metrics.jsonl"))
    config, left_out = read_config(folder)
    samples, held_out, told = read_samples(folder, MAX_BYTES)
    return {
        "name": str(folder),
        "config": config,
        "changed": [name for name in DEFAULTS if name in config and config[name] != DEFAULTS[name]],
        "metrics": columns(metrics),
        "samples": samples,
        "heldOut": held_out,
        "leftOut": left_out + told,
    }


def read_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """A run's settings without those of its machine, and what a kept run lacks, in words."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in MACHINE_SETTINGS:
        config.pop(name, None)
    return config, config.pop("left_out", [])


def read_samples(folder: Path, most_bytes: int) -> tuple[Any, Any, list[str]]:
    """The rows of both logs of completions, and in words what of long ones is left out here."""
    samples = read_lines(folder / "completions.jsonl", most_bytes)
    held_out = read_lines(folder / "held_out.jsonl", most_bytes)
    told = []
    for name, lines in (("completions", samples), ("held-out completions", held_out)):
        said = f"{lines.rows_left_out:,} {name} are left out to keep this small"
        if lines.steps_left_out:
            said += f": {lines.steps_left_out:,} steps have none here"
        if lines.rows_left_out:
            told.append(said)
    return samples.rows, held_out.rows, told


def keep(folder: Path, target: Path) -> None:
    """Write a small copy of a run, for a repository: its metrics, and samples of some steps with their images."""
    if target.resolve() == folder.resolve() or (target / "run_id").exists():
        sys.exit(f"error: {target} is a run of its own: --keep takes another folder")
    metrics = []
    for row in read_rows(folder / "metrics.jsonl"):
        metrics.append({name: _short(value) for name, value in row.items()})
    most_bytes = KEPT_BYTES
    if (folder / "images").is_dir():  # which take the rest
        most_bytes = KEPT_BYTES // 4
    samples, held_out, told = read_samples(folder, most_bytes)
    logs = {"metrics": metrics, "completions": samples, "held_out": held_out}

    target.mkdir(parents=True, exist_ok=True)
    config, left_out = read_config(folder)
    text = json.dumps(config | {"left_out": left_out + told}, indent=1)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
    for name, rows in logs.items():
        with (target / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    shown = {name for rows in logs.values() for row in rows for name in row.get("images", ())}
    for name in sorted(shown):
        source = folder / "images" / Path(name).name
        if source.is_file():
            (target / "images").mkdir(exist_ok=True)
            shutil.copy(source, target / "images")

    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target}: {size / 1e6:.1f} MB")


def state_of(folders: list[Path]) -> str:
    """A text that is another one whenever one of the runs has written."""
    paths = [path for folder in folders for path in sorted(folder.glob("*.jsonl"))]
    return str([(path.stat().st_size, path.stat().st_mtime_ns) for path in paths])


def read_images(rows: list[dict[str, Any]], folder: Path, room: int) -> tuple[dict[str, str], int]:
    """Images of the rows' prompts as data URIs by name, as many as fit, and how many do not."""
    images: dict[str, str] = {}
    num_left_out = 0
    for name in dict.fromkeys(name for row in rows for name in row.get("images", ())):
        path = folder / "images" / Path(name).name  # never a path out of the run's folder
        if not path.is_file() or path.stat().st_size > room:
            num_left_out += 1
            continue
        data = path.read_bytes()
        room -= len(data)
        images[name] = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    return images, num_left_out


def page(folders: list[Path], state: str = "") -> bytes:
    """The whole page, as HTML; one that is served has the runs' state, and loads itself anew after the next."""
    runs = [read_run(folder) for folder in folders]
    images: dict[str, str] = {}
    for run, folder in zip(runs, folders, strict=True):
        rows = [*run["heldOut"], *run["samples"]]
        found, num_left_out = read_images(rows, folder, MAX_IMAGE_BYTES // len(folders))
        images |= found
        if num_left_out:
            run["leftOut"].append(f"{num_left_out:,} images are left out")

    data = {"runs": runs, "images": images, "state": state}
    # Inside a script element only `<` can end it; half surrogate pairs become escapes of JSON.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")
    script = (PARTS / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "POLICY": (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
        ),
        "STYLE": (PARTS / "page.css").read_text(encoding="utf-8"),
        "DATA": text,
        "SCRIPT": script,
    }
    template = (PARTS / "page.html").read_text(encoding="utf-8")
    filled = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    return filled.encode("utf-8", "backslashreplace")


def serve(folders: list[Path], port: int) -> None:
    """Serve the page of runs, once they have begun, on loopback until Ctrl-C, with what they write meanwhile."""
    for folder in folders:
        if not (folder / "metrics.jsonl").exists():
            print(f"waiting for {folder}/metrics.jsonl", flush=True)
        while not (folder / "metrics.jsonl").exists():
            time.sleep(1)
    token = secrets.token_urlsafe(8)  # other users of this host cannot read the page without it

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost") or not self.path.startswith(f"/{token}/"):
                self.send_error(404)
                return
            try:
                if self.path == f"/{token}/state":
                    self.answer(state_of(folders).encode(), "text/plain")
                else:
                    self.answer(page(folders, state_of(folders)), "text/html; charset=utf-8")
            except (SystemExit, OSError) as error:
                self.send_error(503, explain=str(error))

        def answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/{token}/ (until Ctrl-C)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
