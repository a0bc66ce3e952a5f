"""``tilth ls``: the runs of a folder with their states."""

import json

import typer

from tilth.cli.main import LsCommand
from tilth.cli.tables import new_table, show
from tilth.ui import format
from tilth.ui.listing import Row, measured, rows_of


def ls(options: LsCommand) -> None:
    """Print a row for each run. Exit code 1: one of them cannot be read."""
    rows = rows_of(options.folder)
    if options.as_json:
        typer.echo(json.dumps(rows))
    elif rows:
        _print(rows)
    else:
        typer.echo(f"no runs in {options.folder}")
    raise typer.Exit(any(row["state"] == "unreadable" for row in rows))


def _print(rows: list[Row]) -> None:
    table = new_table("run", "flow", "state", "step", "", "written", right=("step",))
    for row in rows:
        step = "" if row["step"] is None else f"{row['step']:,}"
        state = f"{row['state']}: {row['error']}" if row["error"] else row["state"]
        table.add_row(row["run"], row["flow"] or "", state, step, measured(row), f"{format.ago(row['age'])} ago")
    show(table)
