"""``tilth trace export``: the events of a run for Perfetto."""

import json
import math
import re
from pathlib import Path

import numpy as np
import typer

from tilth.analysis.events import Events, parse_ranks, parse_steps
from tilth.analysis.perfetto import Counter, export
from tilth.analysis.predicted import predicted
from tilth.analysis.run_trace import open_run
from tilth.cli.main import TraceExportCommand
from tilth.core.errors import DataError
from tilth.runs.costs import read_costs
from tilth.runs.metrics import declaration
from tilth.runs.readers import read_metrics
from tilth.ui import format

FILE = "perfetto.json.gz"
SHOWN = re.compile(r"tokens_per_second/.*|memory/.*|mfu|loss|reward/mean|(accuracy|reward)/heldout|grad_norm|entropy")
"""Metrics that become counters."""
MANY = 2_000_000  # number of spans above which a browser is slow
HELD = ("last", "max", "min")  # reductions of values that hold at the end of a step; the others describe the whole step


def write(options: TraceExportCommand) -> None:
    """Write the file, by default perfetto.json.gz in the run's folder, and print its contents."""
    run, steps, ranks = options.run, options.steps, options.ranks
    if not run.exists():
        raise DataError(f"no run at {str(run)!r}", key="RUN")
    opened = open_run(run, options.attempt, parse_steps(steps) if steps else None)
    events = chosen(opened.events, ranks)
    target = options.path or (run if run.is_dir() else run.parent) / FILE
    about = {"run": run.resolve().name, "attempt": str(events.attempt), "steps": steps, "ranks": ranks, "by": "tilth"}
    costs = predicted(events, read_costs(run)) if run.is_dir() else None
    found = export(events, target, counters(run, events), about, costs)
    clock_error = events.clock_error
    error = None if clock_error is None or math.isinf(clock_error) else clock_error * 1e-9
    if options.as_json:
        plain = {"path": str(found.path), "spans": found.spans, "arrows": found.arrows, "counters": found.counters}
        plain |= {"bytes": found.bytes, "ranks": list(events.ranks), "steps": list(events.steps)}
        typer.echo(json.dumps(plain | {"clock_error": error, "notes": opened.notes}))
        return
    clocks = "; clocks were not compared: ranks may be apart"
    if error is not None:
        clocks = f"; clocks within {1e6 * error:,.0f} us" if error else "; ranks on one clock"
    lines = [
        f"{found.path}: {found.spans:,} spans of {format.count(len(events.ranks), 'rank')}, {found.arrows:,} arrows, "
        f"{found.counters} counters, {found.bytes / 1e6:,.2f} MB{clocks if len(events.ranks) > 1 else ''}",
        *(["so many are slow in a browser: --steps A:B or --ranks 0,1 for fewer"] if found.spans > MANY else []),
        "open it at https://ui.perfetto.dev (the file stays on your machine)",
    ]
    typer.echo("\n".join([*opened.notes, *lines]))


def chosen(events: Events, ranks: str) -> Events:
    """Select the events of some ranks, "0,1"; "": all. DataError: a rank has none."""
    if not ranks:
        return events
    wanted = parse_ranks(ranks)
    for rank in wanted:
        if rank not in events.ranks:
            there = ", ".join(f"{r} (controller)" if r == events.controller else str(r) for r in events.ranks)
            raise DataError(f"--ranks {ranks!r}: rank {rank} has no events; these ranks have: {there}", key="--ranks")
    return events.select(np.isin(events.rank, wanted))


def counters(run: Path, events: Events) -> list[Counter]:
    """Return the metrics of the recorded steps: rates at the start of a step, held values at its end.

    They belong to the controller: without its events there are none.
    """
    if not (run / "metrics.jsonl").is_file():
        return []
    rows = np.flatnonzero(events.op.is_("step"))
    at = {int(events.step[row]): (int(events.start[row]), int(events.end[row])) for row in rows}
    found: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(run):
        if record["step"] not in at or record.get("attempt", events.attempt) != events.attempt:
            continue
        begin, end = at[record["step"]]
        for name, value in record.items():
            if SHOWN.fullmatch(name) and isinstance(value, int | float):
                held = declaration(name).reduction in HELD
                found.setdefault(name, []).append((end if held else begin, float(value)))
    return [
        Counter(name, declaration(name).unit, np.array([t for t, _ in points]), np.array([y for _, y in points]))
        for name, points in sorted(found.items())
    ]
