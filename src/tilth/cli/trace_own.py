"""``tilth trace whatif RUN``: what stragglers cost one of our own runs, where they are, and the likely cause."""

import json
from pathlib import Path
from typing import Any

import typer

from tilth.analysis.cause import Cause
from tilth.analysis.events import parse_steps
from tilth.analysis.network import parse_bandwidth, parse_seconds
from tilth.analysis.run_trace import hint, open_run
from tilth.analysis.run_whatif import RunWhatIf, analyse_events
from tilth.cli.tables import new_table, show
from tilth.cli.trace import SHOWN, about, by_type, draw_map, slowdowns, write_map
from tilth.core.errors import DataError
from tilth.ui import words


def whatif_of(
    run: Path, steps: str, latency: str, bandwidth: str, svg: Path | None, attempt: int | None, *, as_json: bool
) -> None:
    """Analyse a run and print what was found. Empty texts: all steps, the network as it was."""
    chosen = parse_steps(steps) if steps else None
    network = parse_seconds(latency) if latency else None, parse_bandwidth(bandwidth) if bandwidth else None
    opened = open_run(run, attempt)
    try:
        _, found, cause = analyse_events(opened.events, chosen, *network)
    except DataError as error:
        raise DataError(f"{run}: {error}{hint(run, opened.events.attempt) if chosen else ''}") from error
    if svg is not None:
        names = [[f"dp {d} (rank {r})" for d, r in zip(found.dp, found.workers)]]
        write_map(svg, f"{run.name}: S = {found.slowdown:.3f}", cause, found.exact[None], names)
    if as_json:
        said = as_dict(found, cause) | {"attempt": opened.events.attempt, "notes": opened.notes}
        typer.echo(json.dumps(said, allow_nan=False))
    else:
        show(*opened.notes)
        _print(run, found, cause)


def as_dict(found: RunWhatIf, cause: Cause) -> dict[str, Any]:
    """The findings as JSON has them: the keys of foreign traces, then those of our own runs. Times in seconds."""
    return {
        "slowdown": found.slowdown,
        "ideal_step": float(found.ideal.mean()),
        "by_optype": {name: s.mean for name, s in found.by_optype.items()},
        "by_stage": {},
        "by_dp": {str(d): s.mean for d, s in found.by_dp.items()},
        "by_worker": _workers(found),
        "m_w": found.m_w.share,
        "m_s": 0.0,
        "cause": about(cause),
        "by_axis": {axis: {str(i): s.mean for i, s in at.items()} for axis, at in found.by_axis.items()},
        "step": float(found.recorded.mean()),
        "model_error": found.error,
        "steps": {"first": int(found.steps[0]), "last": int(found.steps[-1]), "count": len(found.steps)},
        "left_out": found.dropped,
        "earlier": found.older,
        "profiled": list(found.profiled),
        "other_network": found.other_network,
        "assumed": list(found.assumed),
    }


def _workers(found: RunWhatIf) -> list[dict[str, Any]]:
    """Every worker, the slowest first."""
    columns = zip(found.dp.tolist(), found.workers.tolist(), found.exact.tolist(), found.shortcut.tolist())
    rows = [{"dp": d, "stage": 0, "rank": r, "exact": e, "shortcut": s} for d, r, e, s in columns]
    return sorted(rows, key=lambda r: (-r["exact"], r["rank"]))


def _print(run: Path, found: RunWhatIf, cause: Cause) -> None:
    steps, count = found.steps, len(found.workers)
    who = (
        f"{words.count(count, 'worker')}" if count else "inline: one process, so there are no peers to compare it with"
    )
    which = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    left = f"; {words.count(len(found.dropped), 'step')} left out: calls are missing" if found.dropped else ""
    left += f"; {words.count(len(found.profiled), 'step')} left out: they were profiled" if found.profiled else ""
    left += f"; {words.count(found.older, 'earlier step')} left out: --steps A:B looks at others" if found.older else ""
    show(
        f"{run}: {who}; {which}{left}",
        f"slowdown S {found.slowdown:.4f}: a step takes {found.replayed.mean():.4g} s instead of "
        f"{found.ideal.mean():.4g} s, {100 * found.waste:.1f} % of the time is lost; "
        f"worst step {found.per_step.max():.4f}",
        f"error of the model {100 * found.error:.2f} % (recorded over a replay with usual delays of dispatch; "
        f"worst step {100 * found.worst_error:.2f} %)",
        *_shares(found),
        *_elsewhere(found),
        f"cause: {cause.text}",
        "",
    )
    by_type(found.by_optype, SHOWN)
    if count:
        _ranks(found)


def _shares(found: RunWhatIf) -> list[str]:
    if not len(found.workers):
        return []
    worst = ", ".join(map(str, found.worst))
    who = f"rank{'s' * (len(found.worst) > 1)} {worst} of {len(found.workers)} mended"
    return [
        f"shares of the loss: M_W {found.m_w.share:.4f} ({who}: what is ideal for its work in each step by itself, "
        f"jitter too), communication {found.m_c.share:.4f}; they overlap"
    ]


def _elsewhere(found: RunWhatIf) -> list[str]:
    if found.other_network is None:
        return []
    times = found.replayed.mean() / found.other_network
    said = [f"on the other network a step takes {found.other_network:.4g} s, {times:.2f} times as fast"]
    if found.assumed:
        said.append(
            "  that is if these wait for bandwidth alone and never for latency, of which one size of tensor says "
            f"nothing: {'; '.join(found.assumed)}. With both --latency and --bandwidth nothing is taken for granted"
        )
    return said


def _ranks(found: RunWhatIf) -> None:
    parts = {"dp rank": found.by_dp} | {f"{axis} rank": at for axis, at in found.by_axis.items() if axis != "dp"}
    for name, at in parts.items():
        rows = sorted(((str(i), s) for i, s in at.items()), key=lambda kv: -kv[1].mean)
        if len(rows) > 1:
            slowdowns(name, rows[:SHOWN], len(rows) - SHOWN)
    table = new_table("worker", "dp rank", "S", right=("worker", "dp rank", "S"))
    for r in _workers(found)[:SHOWN]:
        table.add_row(str(r["rank"]), str(r["dp"]), f"{r['exact']:.4f}")
    show(table, *([f"and {len(found.workers) - SHOWN} more"] if len(found.workers) > SHOWN else []), "")
    draw_map(found.exact[None])
