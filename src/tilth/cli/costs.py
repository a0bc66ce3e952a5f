"""``tilth trace costs``: fit the cost of work in a run; print a table or JSON, or save it for planners."""

import json
import math
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from tilth.analysis.costs import fit_costs
from tilth.analysis.events import parse_steps
from tilth.analysis.run_trace import open_run
from tilth.cli.main import TraceCostsCommand
from tilth.cli.tables import new_table, show
from tilth.core.errors import DataError
from tilth.plan.costs import SMALL, Compute, Costs, Error, Link, as_dict, save_costs


def costs(options: TraceCostsCommand) -> None:
    """Fit, save and print."""
    run, save = options.run, options.save
    opened = open_run(run, options.attempt, parse_steps(options.steps) if options.steps else None)
    events = opened.events
    for note in opened.notes:
        typer.echo(note, err=True)
    try:
        found = fit_costs(events, _about(run) | {"attempt": events.attempt, "steps": len(events.steps)})
    except DataError as error:
        raise DataError(f"{run}: {error}", key=error.key) from error
    if save is not None:
        save_costs(found, save)
    if options.as_json:
        typer.echo(json.dumps(as_dict(found), allow_nan=False))
        return
    show(*_parts(found), *([f"saved: {save}"] if save is not None else []))


def _about(run: Path) -> dict[str, Any]:
    """Return recipe, model and machine of a run's folder; of a folder of events only its name."""
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


def _parts(found: Costs) -> list[Any]:
    parts: list[Any] = []
    if found.compute:
        parts += [_compute_table(found.compute), ""]
    if found.links:
        titles = ("communication", "ranks", "us/message", "MB/s", "bytes", "error", "p90")
        rows = [(k.op, str(k.ranks), *_speed(k), _span((k.least, k.greatest)), *_errors(k.error)) for k in found.links]
        parts += [new_table(*titles, right=titles[1:], rows=rows), ""]
    parts.append("error: |predicted - measured| / measured, median and 90th percentile, of steps that were not fitted")
    if not all([*(c.error.held_out for c in found.compute), *(k.error.held_out for k in found.links)]):
        parts.append("*: of the fitted steps themselves, there were no others")
    return [*parts, f"too few: {'; '.join(found.left)}"] if found.left else parts


def _compute_table(rows: tuple[Compute, ...]) -> Table:
    """Make the table, without columns that no row fills."""
    titles = ("operation", "ms each", "us/token", "ns/square", "tokens", "slowest rank", "error", "p90")
    cells = [
        (" ".join(filter(None, (c.role, c.op))), *_prices(c), _span(c.tokens), _slowest(c), *_errors(c.error))
        for c in rows
    ]
    shown = [i for i in range(len(titles)) if any(row[i] for row in cells)]
    return new_table(*(titles[i] for i in shown), right=titles[1:], rows=[[row[i] for i in shown] for row in cells])


def _prices(c: Compute) -> tuple[str, str, str]:
    """Format the fitted terms; one that could not be separated is left out."""
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
