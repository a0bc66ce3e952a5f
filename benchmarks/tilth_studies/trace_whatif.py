"""``tilth trace whatif``: the cost of stragglers in a run, or in a trace of the straggler study's format, their places,
and the likely cause."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from markupsafe import Markup
from rich.text import Text

from tilth.analysis.events import parse_steps
from tilth.analysis.run_trace import hint, open_run
from tilth.analysis.run_whatif import analyse_events
from tilth.analysis.summaries import cause_summary
from tilth.analysis.whatif import Cause
from tilth.cli.main import TraceWhatifCommand
from tilth.cli.tables import WIDTH, new_table, show
from tilth.core.errors import DataError, StorageError
from tilth.ui import format
from tilth.ui.heat import HIGH, LOW, colour
from tilth.ui.html import render
from tilth_studies.cause import diagnose
from tilth_studies.other_network import parse
from tilth_studies.run_whatif import RunWhatIf, what_if_run
from tilth_studies.slowdowns import Slowdown, Slowdowns
from tilth_studies.straggler_format import Trace, read_study
from tilth_studies.whatif import TraceModel, WhatIf, what_if

SHADES = " ░▒▓█"
LARGEST, LEAST, LEFT, TOP = 960.0, 4.0, 70.0, 84.0
"""Pixels of a heat map: its width, least size of a cell, margins left of and above the cells."""
SHOWN = 8  # most rows of a table of dp ranks or workers


def analyse(options: TraceWhatifCommand) -> None:
    """Analyse a run, or a trace in the straggler study's format, and print the findings."""
    path, meta = options.path, options.meta
    if path.is_dir():
        if meta is not None:
            raise DataError("--meta describes a trace in the straggler study's format, not a run", key="--meta")
        _analyse_run(path, options)
        return
    if options.steps or options.bandwidth or options.latency or options.attempt is not None:
        raise DataError(
            "--steps, --bandwidth, --latency and --attempt need a RUN, not a trace in the straggler study's format",
            key="RUN",
        )
    _analyse_file(path, meta, options.svg, as_json=options.as_json)


def _analyse_run(run: Path, options: TraceWhatifCommand) -> None:
    chosen, svg = parse_steps(options.steps) if options.steps else None, options.svg
    network = None
    if options.latency or options.bandwidth:
        network = parse(options.latency, options.bandwidth)
    opened = open_run(run, options.attempt)
    try:
        model, times, cause = analyse_events(opened.events, chosen)
    except DataError as error:
        raise DataError(f"{run}: {error}{hint(run, opened.events.attempt) if chosen else ''}", key=error.key) from error
    found = what_if_run(model, times)
    seconds = None if network is None else float(network.times(model).mean())
    assumed = () if network is None else network.assumed(model)
    if svg is not None:
        if not found.by_worker:
            raise DataError(f"--svg: {run} ran inline, so there are no workers to draw", key="--svg")
        write_map(svg, run.name, found, cause, [f"dp {w['dp']}" for w in found.by_worker])
    if options.as_json:
        plain = (
            whatif_summary(found, cause)
            | run_summary(found)
            | {"other_network": seconds, "assumed": list(assumed)}
            | {"attempt": opened.events.attempt, "notes": opened.notes}
        )
        typer.echo(json.dumps(plain, allow_nan=False))
    else:
        show(*opened.notes, *_run_parts(run, found, cause, _other_network(found, seconds, assumed)))


def _analyse_file(path: Path, meta: Path | None, svg: Path | None, *, as_json: bool) -> None:
    """Analyse a trace in the straggler study's format. svg: file for the heat map of workers."""
    trace = read_study(path, meta)
    try:
        model = TraceModel(trace)
        found = what_if(trace, model)
    except DataError as error:
        raise DataError(f"{path}: {error}", key=error.key) from error
    cause = diagnose(model, found)
    if svg is not None:
        write_map(svg, path.name, found, cause, [f"dp {w['dp']} stage {w['stage']}" for w in found.by_worker])
    if as_json:
        typer.echo(json.dumps(whatif_summary(found, cause), allow_nan=False))
    else:
        show(*_file_parts(path, trace, found, cause))


def write_map(path: Path, title: str, found: Slowdowns, cause: Cause, names: Sequence[str]) -> None:
    """Write the heat map of workers as SVG. StorageError if it cannot be written."""
    note = "Slowdown of a step in which only this worker keeps its recorded times. "
    note += ", ".join(f.kind for f in cause.findings)
    grid = np.atleast_2d(found.exact)
    cells = [f"{name} (rank {w['rank']})" for name, w in zip(names, found.by_worker)]
    rows = [cells[i : i + grid.shape[1]] for i in range(0, grid.size, grid.shape[1])]
    try:
        path.write_text(heat_map(f"{title}: S = {found.slowdown:.3f}", note, grid, rows))
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", key=path.name) from error


def heat_map(title: str, note: str, values: np.ndarray, names: Sequence[Sequence[str]]) -> Markup:
    """Draw workers as SVG: a row for each stage, a column for each dp rank.

    values: [stages, dp], 1: nothing is lost. names: tooltips [stages, dp].
    """
    stages, dp = values.shape
    side = max(min((LARGEST - LEFT - 20) / dp, 56.0), LEAST)
    tall = max(min(side, 40.0), 12.0)
    return render(
        "heat.svg", title=title, note=note, values=values.tolist(), names=names, hex=_hex,
        marks=np.linspace(LOW, HIGH, 6), side=side, tall=tall, left=LEFT, top=TOP, gap=1 if side > 2 * LEAST else 0,
        across=range(0, dp, max(1, round(40 / side))),
        size=(max(LARGEST, LEFT + dp * side + 20), TOP + stages * tall + 66),
    )  # fmt: skip


def _hex(value: float) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour(value))


def summary(found: Slowdowns, over: str) -> list[str]:
    lost, worst = f"{100 * found.waste:.1f} % of the time is lost", f"worst step {found.per_step.max():.4f}"
    instead = f"a step takes {found.replayed.mean():.4g} s instead of {found.ideal.mean():.4g} s"
    error = f"recorded over {over}; worst step {100 * found.worst_error:.2f} %"
    return [
        f"slowdown S {found.slowdown:.4f}: {instead}, {lost}; {worst}",
        f"error of the model {100 * found.error:.2f} % ({error})",
    ]


def _run_parts(run: Path, found: RunWhatIf, cause: Cause, other_network: Sequence[str]) -> Iterator[Any]:
    steps, count = found.steps, len(found.by_worker)
    who = format.count(count, "worker") if count else "inline: one process, so there are no peers to compare it with"
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    reasons = (
        (len(found.dropped), "step", "calls are missing"),
        (len(found.profiled), "step", "they were profiled"),
        (found.older, "earlier step", "--steps A:B looks at others"),
    )
    left = "".join(f"; {format.count(n, name)} left out: {why}" for n, name, why in reasons if n)
    yield f"{run}: {who}; {which}{left}"
    yield from summary(found, "a replay with usual delays of dispatch")
    if count:
        which = f"rank{'s' * (len(found.worst) > 1)} {', '.join(map(str, found.worst))}"
        yield (
            f"shares of the loss: M_W {found.m_w.share:.4f} ({which} of {count} mended: each step ideal for its own "
            f"work, jitter included), communication {found.m_c.share:.4f}; they overlap"
        )
    yield from (*other_network, f"cause: {cause.text}\n")
    yield from slowdowns("operation", found.by_optype)
    if count:
        for name, at in ({"dp": found.by_dp} | found.by_axis).items():
            if len(at) > 1:
                yield from slowdowns(f"{name} rank", at)
        titles = ("worker", "dp rank", "S")
        rows = [(str(w["rank"]), str(w["dp"]), f"{w['exact']:.4f}") for w in found.slowest]
        yield from table(titles, rows, right=titles)
        yield worker_map(found.exact[None])


def _file_parts(file: Path, trace: Trace, found: WhatIf, cause: Cause) -> Iterator[Any]:
    lost = trace.dropped
    yield (
        f"{file}: {format.count(len(found.by_worker), 'worker')} (stages {trace.stages}, dp {trace.dp}), "
        + format.count(len(found.steps), "step")
        + (f"; {format.count(len(lost), 'step')} left out: operations are missing" if lost else "")
    )
    yield from summary(found, "replayed")
    yield f"M_W {found.m_w.share:.4f} (worst 3 % of workers mended), M_S {found.m_s.share:.4f} (last stage mended)"
    yield (
        f"forwards against backwards r = {cause.evidence['forward_backward_correlation']:.3f}, forwards vary by "
        f"{100 * cause.evidence['forward_variation']:.1f} % (medians over workers)"
    )
    yield f"cause: {cause.text}\n"
    yield from slowdowns("operation", found.by_optype, len(found.by_optype))
    if len(found.by_stage) > 1:
        yield from slowdowns("stage", found.by_stage, len(found.by_stage), ordered=False)
    if len(found.by_dp) > 1:
        yield from slowdowns("dp rank", found.by_dp)
    rows = [
        (f"dp {w['dp']} stage {w['stage']}", str(w["rank"]), f"{w['exact']:.4f}", f"{w['shortcut']:.4f}")
        for w in found.slowest
    ]
    yield from table(("worker", "rank", "S exact", "S shortcut"), rows, right=("rank", "S exact", "S shortcut"))
    yield worker_map(found.exact)


def _other_network(found: RunWhatIf, seconds: float | None, assumed: Sequence[str]) -> list[str]:
    if seconds is None:
        return []
    times = found.replayed.mean() / seconds
    lines = [f"on the other network a step takes {seconds:.4g} s, {times:.2f} times as fast"]
    if assumed:
        lines.append(
            "  if these wait for bandwidth alone and never for latency, which one size of tensor cannot show: "
            f"{'; '.join(assumed)}. Give both --latency and --bandwidth to assume nothing"
        )
    return lines


def slowdowns(what: str, found: Mapping[Any, Slowdown], most: int = SHOWN, *, ordered: bool = True) -> list[Any]:
    """Make a table of S; ordered: the worst first."""
    rows = sorted(found.items(), key=lambda kv: -kv[1].mean) if ordered else list(found.items())
    cells = [(str(name), f"{s.mean:.4f}", f"{s.per_step.max():.4f}") for name, s in rows]
    return table((what, "S", "worst step"), cells, right=("S", "worst step"), most=most)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], most: int = SHOWN) -> list[Any]:
    """Make a table of at most ``most`` rows, and count the others."""
    left = [f"and {len(rows) - most} more"] if len(rows) > most else []
    return [new_table(*titles, right=right, rows=rows[:most]), *left, ""]


def worker_map(values: np.ndarray) -> Text:
    """Draw workers, [stages, dp], with characters; where they do not fit, a cell is the worst of several."""
    stages, dp = values.shape
    room = max(shutil.get_terminal_size((WIDTH, 24)).columns - 12, 8)
    fold = -(-dp // room)
    several = f", a column is the worst of {fold}" if fold > 1 else ""
    text = Text(f"S of workers, a row a stage, a column a dp rank{several}; {LOW:g} to {HIGH:g}: ")
    text.append_text(Text.assemble(*(_shade(v) for v in np.linspace(LOW, HIGH, 5))))
    wide = max(1, min(4, room // dp))
    for p in range(stages):
        row = [values[p, i : i + fold].max() for i in range(0, dp, fold)]
        text.append_text(Text.assemble(f"\n{f'stage {p}':>10} ", *(_shade(v, wide) for v in row), "|"))
    return text


def _shade(value: float, wide: int = 2) -> tuple[str, str]:
    if sys.stdout.isatty():
        return " " * wide, "on rgb({},{},{})".format(*colour(value))
    share = min(max((value - LOW) / (HIGH - LOW), 0.0), 1.0)
    return SHADES[round(share * (len(SHADES) - 1))] * wide, ""


# ---- JSON ----


def whatif_summary(found: Slowdowns, cause: Cause) -> dict[str, Any]:
    """Return the findings that foreign traces and runs share."""
    return {
        "slowdown": found.slowdown, "ideal_step": float(found.ideal.mean()), "by_optype": _means(found.by_optype),
        "by_stage": _means(found.by_stage), "by_dp": _means(found.by_dp), "by_worker": found.slowest,
        "m_w": found.m_w.share, "m_s": found.m_s.share, "cause": cause_summary(cause),
    }  # fmt: skip


def _means(found: Mapping[Any, Slowdown]) -> dict[str, float]:
    return {str(name): s.mean for name, s in found.items()}


def run_summary(found: RunWhatIf) -> dict[str, Any]:
    """Return the findings that only a run has."""
    return {
        "by_axis": {axis: _means(at) for axis, at in found.by_axis.items()},
        "step": float(found.recorded.mean()),
        "model_error": found.error,
        "steps": {"first": int(found.steps[0]), "last": int(found.steps[-1]), "count": len(found.steps)},
        "left_out": found.dropped,
        "earlier": found.older,
        "profiled": list(found.profiled),
    }
