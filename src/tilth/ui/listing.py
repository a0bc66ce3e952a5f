"""Rows on the runs of a folder: how each stands, its newest metric, when it last gave a sign of life."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilth.core.errors import DataError, TilthError, parsing
from tilth.data.cache import file_state
from tilth.runs.readers import read_state, summarise
from tilth.ui import format
from tilth.ui.signs import SIGNS, age_of

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
    rows = []
    for run, row in zip(runs, map(row_of, runs)):
        state = Row()
        with suppress(TilthError):  # it may be gone meanwhile
            state = read_state(run) if row["state"] == "running" else state
        age = age_of(run, [file_state(run / name) for name in SIGNS], state)
        rows.append(row | {"age": round(age, 1)})
    return sorted(rows, key=lambda row: (row["age"], row["run"]))


def row_of(run: Path, summary: Callable[[Path], Row] = summarise) -> Row:
    """Return the row of a run; one that cannot be read is "unreadable", with the reason as its error."""
    row = dict.fromkeys(KEYS) | {"run": str(run)}
    try:
        with parsing(run):
            found, flow = summary(run), read_state(run).get("flow", "grpo")
    except TilthError as error:
        return {**row, "state": "unreadable", "error": str(error)}
    key = next((key for key in METRICS if found.get(key) is not None), None)
    measured = {"metric": METRICS[key], "value": found[key]} if key else {}
    copied = {name: found[name] for name in ("run", "recipe", "state", "error")}
    return {**row, **copied, "flow": flow, "step": found["steps"], **measured}


def measured(row: Row) -> str:
    """Return the newest metric of a row as text; "" if there is none."""
    form = format.share if row["metric"] in ("accuracy", "pairs in order") else format.number
    return "" if row["metric"] is None else f"{row['metric']} {form(row['value'])}"
