"""Rows on the runs of a folder: how each stands, its newest metric, when it last gave a sign of life."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilth.core.errors import DataError, TilthError, parsing
from tilth.data.cache import FileState, file_state
from tilth.runs.readers import read_state, summarise
from tilth.ui import format

if TYPE_CHECKING:
    from tilth.ui.top import KeptFiles

SIGNS = ("run.json", "metrics.jsonl")
"""Files of a run that say when it last wrote its state or a step."""
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


def age_of(run: Path, files: Sequence[FileState], state: Row, kept: "KeptFiles | None" = None) -> float:
    """Return the seconds since a run wrote its last step or its state, or gave a newer sign of life.

    files: states of ``SIGNS``; state: ``read_state``, or {} of a run that does not run; kept: as of ``top.sign_age``.
    """
    age = max(time.time() - newest_write(files), 0.0)
    if not state:
        return age
    from tilth.ui.top import sign_age  # which takes half a second to import

    sign = sign_age(run, state, kept)
    return age if sign is None else min(age, sign)


def newest_write(files: Sequence[FileState]) -> float:
    """Return when the newest of some files was written, in seconds since 1970; 0: there are none."""
    return max((file[-1] for file in files if file), default=0) / 1e9


def measured(row: Row) -> str:
    """Return the newest metric of a row as text; "" if there is none."""
    form = format.share if row["metric"] in ("accuracy", "pairs in order") else format.number
    return "" if row["metric"] is None else f"{row['metric']} {form(row['value'])}"
