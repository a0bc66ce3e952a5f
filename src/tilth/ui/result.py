"""The result of a run in Python, as text and in a notebook."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tilth.runs.readers import read_metrics
from tilth.ui import format
from tilth.ui.charts import charts, draw
from tilth.ui.html import render, text_of


@dataclass(frozen=True)
class RunResult:
    """Result of a run. summary: as printed by ``tilth show RUN --json``."""

    directory: Path
    summary: dict[str, Any] = field(repr=False)

    @property
    def report(self) -> Path:
        """The HTML report of the run."""
        return self.directory / "report.html"

    @property
    def accuracy(self) -> float | None:
        """Share of right greedy answers to held-out prompts at the end; None if some outcome was neither 0 nor 1."""
        return self.summary.get("accuracy_last")

    @property
    def reward(self) -> float | None:
        """Mean reward of greedy answers to held-out prompts at the end."""
        return self.summary.get("reward_heldout_last")

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the figures, the curve of the main metric, and a link to the report."""
        page = render("curve.html", figure=_main_curve(self.directory), style=Markup(text_of("page.css")))
        return str(render("result.html", lines=outcome(self.summary), page=page, report=self.report))


def _main_curve(run: Path) -> Markup:
    """Draw the first chart of the report: the held-out metric of a run that has one."""
    records = read_metrics(run)
    for chart, curves in charts(records)[:1]:
        return draw(chart, curves, (records[0]["step"], records[-1]["step"]))[0]
    return Markup()


def outcome(summary: Mapping[str, Any]) -> list[str]:
    """Return lines on what was learned, the best checkpoint, and the cost."""
    best = format.best(summary.get("best"))
    return [*_learned(summary), *([best] if best else []), _took(summary)]


def headline(summary: Mapping[str, Any]) -> Markup:
    """Return one sentence on what was learned."""
    return render("headline.html", s=summary, measures=format.MEASURES)


def _learned(s: Mapping[str, Any]) -> list[str]:
    """Return the result of each phase; of a run without evaluated answers, one sentence."""
    if not s.get("phases"):
        return [str(headline(s).striptags())]
    first = s["phases"][0]
    metric = first["metric"]
    rows = [("before the first step", first["first"], first.get("range_first"), "")]
    rows = [] if first["first"] is None else rows
    for phase in s["phases"]:
        took = f"{format.count(phase['steps'], 'step')}, {format.timed(phase['seconds'])}"
        name = f"after {format.phase_name(phase['phase'])} ({took})"
        rows.append((name, phase["last"], phase.get("range"), format.unclear(phase)))
    width = max(len(name) for name, *_ in rows)
    results = [
        f"  {name:<{width}}  {format.ranged(metric, value, ends)}" + (f": {unclear}" if unclear else "")
        for name, value, ends, unclear in rows
    ]
    known = any(ends for _, _, ends, _ in rows)
    title = f"{format.MEASURES[metric].capitalize()} on problems it never trained on"
    return [f"{title} (95 % intervals):" if known else f"{title}:", *results]


def _took(s: Mapping[str, Any]) -> str:
    parts = [f"{format.count(s['steps'], 'step')} in {format.timed(s['seconds'])}"] if s.get("phases") else []
    if s.get("tokens_per_second_generate"):
        parts.append(f"{s['tokens_per_second_generate']:,.0f} tokens/s generated")
    if s.get("tokens_per_second_train"):
        parts.append(f"{s['tokens_per_second_train']:,.0f} tokens/s trained on")
    if s.get("memory_peak"):
        predicted = f" (predicted {format.size(s['memory_predicted'])})" if s.get("memory_predicted") else ""
        parts.append(f"memory at most {format.size(s['memory_peak'])}{predicted}")
    if s.get("mismatch_max") is not None:
        parts.append(f"log-prob mismatch at most {s['mismatch_max']:.1e}")
    return "; ".join(parts)
