"""Rows of data sets that are no `.jsonl` file."""

import csv
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from config import TrainConfig

MOST_ROWS = 1_000_000  # of a generator, which may be endless


def rows_of(
    source: str | Callable[[], Any], split: str, config: TrainConfig
) -> list[dict[str, Any]]:
    """The rows of a function, a file, or a `datasets` name, as `load_rows`."""
    if callable(source):
        return _returned_rows(source)
    path = Path(source)
    if path.suffix == ".json":
        return _json_rows(path)

    if path.suffix == ".csv":  # all of it as text: 007 is not 7, and NA is not nothing
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        for number, row in enumerate(rows):
            if None in row:  # the name of cells beyond the header's
                raise ValueError(f"row {number} has more cells than the header has names")
        return rows

    from datasets import load_dataset

    if path.suffix == ".parquet":
        dataset = load_dataset("parquet", data_files=source, split="train")
    else:
        subset = config.dataset_config if source in config.train_sets.values() else None
        if subset and len(config.train_sets) > 1:
            raise ValueError("dataset_config is of one data set: give it as a function instead")
        dataset = load_dataset(source, subset, split=split)
    return _dataset_rows(dataset)


def _returned_rows(source: Callable[[], Any]) -> list[dict[str, Any]]:
    """The rows of a function."""
    rows = source()
    if isinstance(rows, Mapping) or type(rows).__name__ == "DataFrame":
        raise ValueError(f"it returned a {type(rows).__name__}, and no list of rows")
    if hasattr(rows, "to_iterable_dataset"):
        return _dataset_rows(rows)
    if hasattr(rows, "__len__"):
        return list(rows)

    # As many whatever `max_steps` is, which a run that goes on may raise.
    rows = list(itertools.islice(rows, MOST_ROWS))
    if len(rows) == MOST_ROWS:
        raise ValueError(f"it goes on after {MOST_ROWS} rows: let it end, or return a list")
    return rows


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """The list in a file; or a row in each line, as `Dataset.to_json` writes them."""
    text = path.read_text("utf-8-sig")
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):
            raise
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if not isinstance(rows, list):
        raise ValueError("it is no list of rows")
    return rows


def _dataset_rows(dataset: Any) -> list[dict[str, Any]]:
    """The rows of a `datasets` table, whose images stay bytes and paths."""
    if len(dataset) == 0:
        return []
    rows = list(dataset.to_iterable_dataset().decode(False))
    for row in rows:
        for name, value in row.items():
            if _is_chat(value):
                row[name] = _without_nulls(value)
    return rows


def _is_chat(value: Any) -> bool:
    """True for a list of messages."""
    items = value if isinstance(value, list) else []
    return items != [] and all(isinstance(item, dict) and "role" in item for item in items)


def _without_nulls(value: Any) -> Any:
    """Messages without the null values that columns of one type give to all their rows.

    Else a tool would be called with the arguments of all others.
    """
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
