"""``tilth ls``: the runs of a folder with their states."""

import json
import time
from pathlib import Path
from typing import Any

import typer

from tilth.cli.main import LsCommand
from tilth.cli.tables import new_table, show
from tilth.core.errors import DataError, TilthError
from tilth.runs.model_refs import run_settings
from tilth.runs.readers import summarise
from tilth.ui import format

METRICS = {
    "accuracy_last": "accuracy",
    "pairs_heldout_last": "pairs in order",
    "loss_heldout_last": "loss",
    "reward_heldout_last": "reward",
    "reward_last": "reward while training",
}  # key of a run's summary -> its title; the first that was measured is shown. All but the last are held-out metrics


def ls(options: LsCommand) -> None:
    """Print a row for each run. Exit code 1: one of them cannot be read."""
    rows = look(options.folder)
    if options.as_json:
        typer.echo(json.dumps(rows))
    elif rows:
        _print(rows)
    else:
        typer.echo(f"no runs in {options.folder}")
    raise typer.Exit(any(row["state"] == "unreadable" for row in rows))


def look(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each run in a folder, or for a run's folder. DataError: no such folder."""
    if not folder.is_dir():
        raise DataError(f"no folder {str(folder)!r}; the default of run.dir is runs/", key="FOLDER")
    runs = [folder] if (folder / "run.json").is_file() else [path.parent for path in folder.glob("*/run.json")]
    return sorted(map(_row, runs), key=lambda row: (row["age"], row["run"]))


def _row(run: Path) -> dict[str, Any]:
    files = [file for name in ("run.json", "metrics.jsonl") if (file := run / name).exists()]
    age = round(max(time.time() - max(file.stat().st_mtime for file in files), 0.0), 1)
    row = dict.fromkeys(("run", "recipe", "flow", "state", "error", "step", "metric", "value", "age"))
    try:
        found, flow = summarise(run), run_settings(run).get("flow", "grpo")
    except TilthError as error:
        return {**row, "run": str(run), "state": "unreadable", "error": str(error), "age": age}
    key = next((key for key in METRICS if found.get(key) is not None), None)
    measured = {"metric": METRICS[key], "value": found[key]} if key else {}
    copied = {name: found[name] for name in ("run", "recipe", "state", "error")}
    return {**row, **copied, "flow": flow, "step": found["steps"], **measured, "age": age}


def _print(rows: list[dict[str, Any]]) -> None:
    table = new_table("run", "flow", "state", "step", "", "written", right=("step",))
    for row in rows:
        step, metric = "" if row["step"] is None else f"{row['step']:,}", row["metric"]
        form = format.share if metric in ("accuracy", "pairs in order") else format.number
        value = "" if metric is None else f"{metric} {form(row['value'])}"
        state = f"{row['state']}: {row['error']}" if row["error"] else row["state"]
        table.add_row(row["run"], row["flow"] or "", state, step, value, f"{format.ago(row['age'])} ago")
    show(table)
