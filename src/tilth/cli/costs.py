"""``tilth trace costs``: what work cost in a run, as a table, as JSON, or saved for planners."""

import json
import math
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from tilth.analysis.costs import fit_costs
from tilth.analysis.events import parse_steps
from tilth.analysis.run_trace import open_run
from tilth.cli.tables import new_table, show
from tilth.core.errors import DataError
from tilth.plan.costs import SMALL, Compute, Costs, Error, Link, as_dict, save_costs


def costs(run: Path, steps: str, save: Path | None, attempt: int | None = None, *, as_json: bool) -> None:
    """Fit, print, and save. steps: "" for all."""
    opened = open_run(run, attempt, parse_steps(steps) if steps else None)
    events = opened.events
    for note in opened.notes:
        typer.echo(note, err=True)
    try:
        found = fit_costs(events, _about(run) | {"attempt": events.attempt, "steps": len(events.steps)})
    except DataError as error:
        raise DataError(f"{run}: {error}", key=error.key) from error
    if save is not None:
        save_costs(found, save)
    if as_json:
        typer.echo(json.dumps(as_dict(found), allow_nan=False))
        return
    _print(found)
    if save is not None:
        typer.echo(f"saved: {save}")


def _about(run: Path) -> dict[str, Any]:
    """Recipe, model and machine of a run's folder; of a folder of events nothing is known but its name."""
    if not (run / "run.json").is_file():
        return {"run": run.name}
    from tilth.runs.readers import read_state

    state = read_state(run)
    machine = state.get("environment", {})
    kept = ("cpu", "cores", "threads", "accelerator", "packages")
    return {
        "run": run.name,
        "recipe": state.get("recipe"),
        "parameters": (state.get("plan") or {}).get("parameters"),
        "machine": {name: machine[name] for name in kept if name in machine},
    }


def _print(found: Costs) -> None:
    parts: list[Any] = []
    if found.compute:
        parts += [_computes(found.compute), ""]
    if found.links:
        parts += [_wires(found.links), ""]
    show(*parts, "error: |predicted - measured| / measured, median and 90th percentile, of steps that were not fitted")
    errors = [c.error for c in found.compute] + [k.error for k in found.links]
    if not all(error.held_out for error in errors):
        show("*: of the fitted steps themselves, there were no others")
    if found.left:
        show(f"too few: {'; '.join(found.left)}")


def _computes(rows: tuple[Compute, ...]) -> Table:
    """Columns that no row fills are left out."""
    titles = ("operation", "ms each", "us/token", "ns/square", "tokens", "slowest rank", "error", "p90")
    cells = [
        (" ".join(filter(None, (c.role, c.op))), *_prices(c), _span(c.tokens), _slowest(c),
         *_errors(c.error))
        for c in rows
    ]  # fmt: skip
    shown = [i for i in range(len(titles)) if any(row[i] for row in cells)]
    table = new_table(*(titles[i] for i in shown), right=titles[1:])
    for row in cells:
        table.add_row(*(row[i] for i in shown))
    return table


def _wires(rows: tuple[Link, ...]) -> Table:
    titles = ("communication", "ranks", "us/message", "MB/s", "bytes", "error", "p90")
    table = new_table(*titles, right=titles[1:])
    for k in rows:
        table.add_row(k.op, str(k.ranks), *_speed(k), _span((k.least, k.greatest)), *_errors(k.error))
    return table


def _prices(c: Compute) -> tuple[str, str, str]:
    """What could not be told apart is left out."""
    fixed = f"{c.fixed * 1e3:.3g}" if c.separate else ""
    token = f"{c.per_token * 1e6:.3g}" if c.tokens[1] else ""
    return fixed, token, f"{c.per_square * 1e9:.3g}" if c.separate_squares else ""


def _span(amounts: tuple[int, int]) -> str:
    least, greatest = amounts
    return "" if greatest == 0 else f"{least:,}" if least == greatest else f"{least:,} to {greatest:,}"


def _slowest(c: Compute) -> str:
    rank, times = max(c.ranks, key=lambda one: one[1])
    return f"{rank}: {times:.2f}x" if len(c.ranks) > 1 else ""


def _speed(k: Link) -> tuple[str, str]:
    bandwidth = "" if math.isinf(k.bandwidth) else f"{k.bandwidth * 1e-6:,.3g}"
    return f"{k.latency * 1e6:.3g}" if k.separate or k.greatest <= SMALL else "", bandwidth


def _errors(error: Error) -> tuple[str, str]:
    mark = "" if error.held_out else "*"
    median, p90 = ("" if math.isnan(x) else f"{100 * x:.1f} %{mark}" for x in (error.median, error.p90))
    return median, p90
