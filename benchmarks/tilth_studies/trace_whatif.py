"""``tilth trace whatif FILE``: cost of stragglers in a trace of the straggler study's format, and its likely cause."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tilth.analysis.summaries import whatif_summary
from tilth.analysis.whatif import Cause
from tilth.cli.tables import show
from tilth.cli.trace_whatif import slowdowns, summary, table, worker_map, write_map
from tilth.core.errors import DataError
from tilth.ui import format
from tilth_studies.cause import diagnose
from tilth_studies.straggler_format import Trace, read_study
from tilth_studies.whatif import TraceModel, WhatIf, what_if


def analyse(path: Path, meta: Path | None, svg: Path | None, *, as_json: bool) -> None:
    """Print the findings. svg: file for the heat map of workers."""
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
        show(*_parts(path, trace, found, cause))


def _parts(file: Path, trace: Trace, found: WhatIf, cause: Cause) -> Iterator[Any]:
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
