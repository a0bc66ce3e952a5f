"""Rows on the runs of a folder: how each stands, its newest metric, when it last wrote."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilth.core.errors import DataError, TilthError, parsing
from tilth.runs.readers import read_state, summarise
from tilth.ui import format

METRICS = {
    "accuracy_last": "accuracy",
    "pairs_heldout_last": "pairs in order",
    "loss_heldout_last": "loss",
    "reward_heldout_last": "reward",
    "reward_last": "reward while training",
}  # key of a run's summary -> its title; the first that was measured is shown. All but the last are held-out metrics
KEYS = ("run", "recipe", "flow", "state", "error", "step", "metric", "value", "age")
Row = dict[str, Any]


def rows_of(folder: Path) -> list[Row]:
    """Return a row for each run in a folder, or for a run's folder, the newest first. DataError: no such folder."""
    if not folder.is_dir():
        raise DataError(f"no folder {str(folder)!r}; the default of run.dir is runs/", key="FOLDER")
    runs = [folder] if (folder / "run.json").is_file() else [path.parent for path in folder.glob("*/run.json")]
    return sorted(map(row_of, runs), key=lambda row: (row["age"], row["run"]))


def row_of(run: Path, summary: Callable[[Path], Row] = summarise) -> Row:
    """Return the row of a run; one that cannot be read is "unreadable", with the reason as its error."""
    row = dict.fromkeys(KEYS) | {"run": str(run), "age": age_of(run)}
    try:
        with parsing(run):
            found, flow = summary(run), read_state(run).get("flow", "grpo")
    except TilthError as error:
        return {**row, "state": "unreadable", "error": str(error)}
    key = next((key for key in METRICS if found.get(key) is not None), None)
    measured = {"metric": METRICS[key], "value": found[key]} if key else {}
    copied = {name: found[name] for name in ("run", "recipe", "state", "error")}
    return {**row, **copied, "flow": flow, "step": found["steps"], **measured}


def age_of(run: Path) -> float:
    """Return the seconds since a run wrote its last step or its state."""
    files = [file for name in ("run.json", "metrics.jsonl") if (file := run / name).exists()]
    return round(max(time.time() - max((file.stat().st_mtime for file in files), default=0.0), 0.0), 1)


def measured(row: Row) -> str:
    """Return the newest metric of a row as text; "" if there is none."""
    form = format.share if row["metric"] in ("accuracy", "pairs in order") else format.number
    return "" if row["metric"] is None else f"{row['metric']} {form(row['value'])}"
