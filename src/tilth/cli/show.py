"""``tilth show`` and ``tilth report``: summarise a run as lines or as JSON; write its report or its metrics."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from tilth.cli.main import ReportCommand, ShowCommand
from tilth.cli.tables import labelled
from tilth.core.errors import DataError
from tilth.ui import format

Lines = list[tuple[str, str]]


def show_run(options: ShowCommand) -> None:
    """Print the summary of a run, or write the metrics of all steps and print where they are."""
    check_run(options.run)
    if options.parquet is not None:
        from tilth.runs.columns import write_metrics

        typer.echo(str(write_metrics(options.run, options.parquet)))
        return
    from tilth.runs.readers import summarise

    summary = summarise(options.run)
    typer.echo(json.dumps(summary) if options.as_json else "\n".join(labelled(table(summary))))


def write(options: ReportCommand) -> None:
    """Write the report and print where it is."""
    check_run(options.run)
    from tilth.ui.report import write_report

    typer.echo(str(write_report(options.run)))


def table(s: Mapping[str, Any]) -> Lines:
    """Return names and values of what was measured."""
    missing = f"{s['rewards_missing']}, of them timed out {s.get('rewards_timed_out', 0)}"
    lines = [
        ("run", f"{s['run']} ({s['recipe']})"),
        ("state", str(s["state"]) + (f": {s['error']}" if s.get("error") else "")),
        *[("warning", f"after step {one['step']:,}: {one['text']}") for one in s.get("warnings") or []],
        *[(format.outcome(one), format.survived(one)) for one in s.get("recoveries") or []],
        *[("updated", format.updated(one)) for one in s.get("updates") or []],
        ("effective time", f"{s['ettr']:.1%} of the wall time" if s.get("recoveries") and s.get("ettr") else ""),
        ("steps", f"{format.steps(s['steps'], s.get('steps_planned'))} in {format.duration(s['seconds'])}"),
        *_phases(s),
        ("reward's parts", ", ".join(f"{k} {format.number(v)}" for k, v in (s.get("parts_heldout") or {}).items())),
        ("held-out loss", _loss(s)),
        ("best", format.best(s.get("best")).removeprefix("best ")),
        ("generation", _rate(s["tokens_per_second_generate"], s.get("tokens_generated"))),
        ("training", _rate(s["tokens_per_second_train"], s.get("tokens_trained"))),
        ("samples by source", ", ".join(f"{name} {count:,}" for name, count in (s.get("sources") or {}).items())),
        ("balance", _balance(s)),
        *format.behind(s.get("behind")),
        *format.generation(s.get("generation")),
        ("log-prob mismatch", "" if s["mismatch_max"] is None else f"greatest {s['mismatch_max']:.2g}"),
        ("rewards missing", missing),
        ("checkpoints failed", str(s["saves_failed"]) if s.get("saves_failed") else ""),
        ("memory", _memory(s.get("memory_peak"), s.get("memory_predicted"))),
    ]
    return [(name, value) for name, value in lines if value]


def _balance(s: Mapping[str, Any]) -> str:
    """Describe how even ranks were; "" if they were, as one is."""
    spread, idle, padding = (s.get(name) for name in ("balance_spread", "balance_idle", "padding"))
    if not any((spread, idle, padding)):
        return ""
    waits = "" if idle is None else f"; ranks wait {format.part(idle)} of their passes for the busiest"
    return f"planned costs of ranks {format.part(spread or 0.0)} apart, padding {format.part(padding or 0.0)}{waits}"


def check_run(run: Path) -> None:
    if not run.is_dir():
        raise DataError(f"no run at {str(run)!r}; the default of run.dir is runs/", key="RUN")


def _phases(s: Mapping[str, Any]) -> Lines:
    """Return the held-out metric before the first phase and after each one."""
    found = s.get("phases") or []
    if not found:
        return []
    metric, begin = found[0]["metric"], found[0]["first"]
    ends = [] if begin is None else [format.ranged(metric, begin, found[0].get("range_first"))]
    for phase in found:
        took = f"{format.count(phase['steps'], 'step')} of {format.phase_name(phase['phase'])}"
        unclear = format.unclear(phase)
        value = format.ranged(metric, phase["last"], phase.get("range"))
        ends.append(f"{value} after {took}" + (f", {unclear}" if unclear else ""))
    return [(f"held-out {format.MEASURES[metric]}", " -> ".join(ends))]


def _loss(s: Mapping[str, Any]) -> str:
    first, last, bits = s.get("loss_heldout_first"), s.get("loss_heldout_last"), s.get("bits_per_byte")
    if first is None or last is None:
        return ""
    return f"{first:.4f} -> {last:.4f} nats per token" + (f", {bits:.3f} bits per byte" if bits else "")


def _rate(rate: float | None, tokens: int | None) -> str:
    return "" if rate is None else f"{rate:,.0f} tokens/s" + (f", {tokens:,} tokens" if tokens else "")


def _memory(peak: int | None, predicted: int | None) -> str:
    if peak is None:
        return ""
    return f"peak {format.size(peak)}" + (f", predicted {format.size(predicted)}" if predicted else "")
