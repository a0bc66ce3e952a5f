"""``tilth trace whatif``: what stragglers cost, where they are, and the likely cause."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.text import Text

from tilth.analysis.cause import Cause, diagnose
from tilth.analysis.straggler_format import Trace, read_study
from tilth.analysis.whatif import Model, Slowdown, WhatIf, what_if
from tilth.cli.tables import WIDTH, new_table, show
from tilth.core.errors import DataError, StorageError
from tilth.ui import words
from tilth.ui.heat import HIGH, LOW, colour, heat_map
from tilth.ui.terminal import Terminal

SHADES = " ░▒▓█"
SHOWN = 8
"""Rows of a table of dp ranks or workers."""


def whatif(file: Path, meta: Path | None, svg: Path | None, *, as_json: bool) -> None:
    """Read a trace, analyse it and print what was found."""
    trace = read_study(file, meta)
    try:
        model = Model(trace)
        found = what_if(trace, model)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    cause = diagnose(model, found)
    if svg is not None:
        _write(svg, file, found, cause)
    if as_json:
        typer.echo(json.dumps(as_dict(found, cause), allow_nan=False))
    else:
        _print(file, trace, found, cause)


def about(cause: Cause) -> dict[str, Any]:
    """A cause as JSON has it."""
    findings = [{"kind": f.kind, "share": f.share, "where": list(f.where), "text": f.text} for f in cause.findings]
    for told, finding in zip(findings, cause.findings):
        if finding.seconds is not None:
            told["seconds"] = finding.seconds
    return {"text": cause.text, "findings": findings, "evidence": cause.evidence}


def as_dict(found: WhatIf, cause: Cause) -> dict[str, Any]:
    """The findings as JSON has them. Times in seconds."""
    return {
        "slowdown": found.slowdown,
        "ideal_step": float(found.ideal.mean()),
        "by_optype": {name: s.mean for name, s in found.by_optype.items()},
        "by_stage": {str(i): s.mean for i, s in enumerate(found.by_stage)},
        "by_dp": {str(i): s.mean for i, s in enumerate(found.by_dp)},
        "by_worker": _workers(found),
        "m_w": found.m_w.share,
        "m_s": found.m_s.share,
        "cause": about(cause),
    }


def _workers(found: WhatIf) -> list[dict[str, Any]]:
    """Every worker, the slowest first."""
    stages, dp = found.exact.shape
    shortcut = found.shortcut
    rows = [
        {"dp": d, "stage": p, "rank": int(found.ranks[p, d]), "exact": float(found.exact[p, d]),
         "shortcut": float(shortcut[p, d])}
        for p in range(stages) for d in range(dp)
    ]  # fmt: skip
    return sorted(rows, key=lambda r: (-r["exact"], r["rank"]))


def _write(path: Path, file: Path, found: WhatIf, cause: Cause) -> None:
    stages, dp = found.exact.shape
    names = [[f"dp {d} stage {p} (rank {found.ranks[p, d]})" for d in range(dp)] for p in range(stages)]
    write_map(path, f"{file.name}: S = {found.slowdown:.3f}", cause, found.exact, names)


def write_map(path: Path, title: str, cause: Cause, values: np.ndarray, names: list[list[str]]) -> None:
    """The heat map of workers, [stages, dp] and as many names, as a picture. StorageError if it cannot be written."""
    note = "Slowdown of a step in which only this worker keeps its recorded times. " + _short(cause)
    try:
        path.write_text(heat_map(title, note, values, names))
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _short(cause: Cause) -> str:
    return ", ".join(f.kind for f in cause.findings)


def _print(file: Path, trace: Trace, found: WhatIf, cause: Cause) -> None:
    stages, dp = found.exact.shape
    worst = float(np.abs(found.recorded / found.replayed - 1).max())
    lost = trace.dropped
    show(
        f"{file}: {words.count(stages * dp, 'worker')} (stages {stages}, dp {dp}), "
        + words.count(len(found.steps), "step")
        + (f"; {words.count(len(lost), 'step')} left out: operations are missing" if lost else ""),
        f"slowdown S {found.slowdown:.4f}: a step takes {found.replayed.mean():.4g} s instead of "
        f"{found.ideal.mean():.4g} s, {100 * found.waste:.1f} % of the time is lost; "
        f"worst step {found.per_step.max():.4f}",
        f"error of the model {100 * found.error:.2f} % (recorded over replayed; worst step {100 * worst:.2f} %)",
        f"M_W {found.m_w.share:.4f} (worst 3 % of workers mended), M_S {found.m_s.share:.4f} (last stage mended)",
        f"forwards against backwards r = {cause.evidence['forward_backward_correlation']:.3f}, forwards vary by "
        f"{100 * cause.evidence['forward_variation']:.1f} % (medians over workers)",
        f"cause: {cause.text}",
        "",
    )
    _tables(found)
    draw_map(found.exact)


def _tables(found: WhatIf) -> None:
    by_type(found.by_optype)
    if len(found.by_stage) > 1:
        slowdowns("stage", [(str(i), s) for i, s in enumerate(found.by_stage)])
    ranks = sorted(((str(i), s) for i, s in enumerate(found.by_dp)), key=lambda kv: -kv[1].mean)
    if len(ranks) > 1:
        slowdowns("dp rank", ranks[:SHOWN], len(ranks) - SHOWN)
    table = new_table("worker", "rank", "S exact", "S shortcut", right=("rank", "S exact", "S shortcut"))
    for r in _workers(found)[:SHOWN]:
        name = f"dp {r['dp']} stage {r['stage']}"
        table.add_row(name, str(r["rank"]), f"{r['exact']:.4f}", f"{r['shortcut']:.4f}")
    show(table, *([f"and {found.exact.size - SHOWN} more"] if found.exact.size > SHOWN else []), "")


def by_type(found: dict[str, Slowdown], most: int | None = None) -> None:
    """A table of operations, the worst first."""
    rows = sorted(found.items(), key=lambda kv: -kv[1].mean)
    slowdowns("operation", rows[:most], len(rows) - len(rows[:most]))


def slowdowns(what: str, rows: list[tuple[str, Slowdown]], more: int = 0) -> None:
    """A table of S; more: rows that are not shown."""
    table = new_table(what, "S", "worst step", right=("S", "worst step"))
    for name, s in rows:
        table.add_row(name, f"{s.mean:.4f}", f"{s.per_step.max():.4f}")
    show(table, *([f"and {more} more"] if more > 0 else []), "")


def draw_map(values: np.ndarray) -> None:
    """Workers, [stages, dp], as a picture of characters; where they do not fit, a cell is the worst of several."""
    console = Terminal(width=shutil.get_terminal_size((WIDTH, 24)).columns, highlight=False)
    stages, dp = values.shape
    room = max(console.width - 12, 8)
    fold = -(-dp // room)
    several = f", a column is the worst of {fold}" if fold > 1 else ""
    console.print(f"S of workers, a row a stage, a column a dp rank{several}; {LOW:g} to {HIGH:g}: ", end="")
    console.print(Text.assemble(*(_shade(v, sys.stdout.isatty()) for v in np.linspace(LOW, HIGH, 5))))
    wide = max(1, min(4, room // dp))
    for p in range(stages):
        row = [values[p, i : i + fold].max() for i in range(0, dp, fold)]
        cells = [_shade(v, sys.stdout.isatty(), wide) for v in row]
        console.print(Text.assemble(f"{f'stage {p}':>10} ", *cells, "|"), soft_wrap=True)


def _shade(value: float, coloured: bool, wide: int = 2) -> tuple[str, str]:
    if coloured:
        return " " * wide, "on rgb({},{},{})".format(*colour(value))
    share = min(max((value - LOW) / (HIGH - LOW), 0.0), 1.0)
    return SHADES[round(share * (len(SHADES) - 1))] * wide, ""
