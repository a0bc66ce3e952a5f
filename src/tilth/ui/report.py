"""``report.html``: curves, sampled answers, time, plan and environment of a run in one file that needs no network.

It is made from the run's files, also while the run is running.
"""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from tilth.analysis.events import Events
from tilth.analysis.read import breakdown, read_events
from tilth.analysis.recent import told
from tilth.analysis.run_trace import open_run
from tilth.analysis.time_breakdown import account
from tilth.core.errors import DataError
from tilth.core.lines import read_lines, replace
from tilth.runs.readers import curve as points
from tilth.runs.readers import (
    ettr_curve,
    handovers,
    read_metrics,
    read_recoveries,
    read_state,
    read_warnings,
    summarise,
)
from tilth.ui import format
from tilth.ui.charts import MEMORY, Chart, Curve, Phase, charts, curve, draw
from tilth.ui.html import embed, render, text_of
from tilth.ui.result import headline
from tilth.ui.samples import samples
from tilth.ui.timeline import HUES, LANES, chosen, pictures, timeline
from tilth.ui.top import first_line

OPERATIONS = 14  # most operations in the table of times
Record = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """The contents of a run's directory."""

    run: Path
    state: Record
    records: list[Record]
    summary: Record

    @property
    def plan(self) -> Record:
        """Return the plan, empty if there is none yet."""
        return self.state.get("plan") or {}

    @property
    def steps(self) -> tuple[float, float]:
        """Return the first and last committed step."""
        return (self.records[0]["step"], self.records[-1]["step"]) if self.records else (0, 0)


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into the run's directory and return its path. DataError: not a run; StorageError."""
    run = Path(run_dir)
    seen = Seen(run, read_state(run), read_metrics(run), summarise(run))
    target = run / "report.html"
    replace(target, page(seen).encode())
    return target


def page(seen: Seen) -> str:
    """Render the page. Its security policy permits one script, by its digest."""
    records = ettr_curve(seen.records, [*read_recoveries(seen.run), *handovers(seen.state)])
    figures = [_drawn(seen, chart, curves) for chart, curves in charts(records)]
    memory, more = _memory(seen)
    script, recipe = text_of("page.js"), seen.run / "recipe.toml"
    scores = any("reward/missing" in record for record in seen.records)
    return render(
        "report.html", name=seen.run.name, state=seen.state, headline=headline(seen.summary), s=seen.summary,
        warnings=seen.summary["warnings"] + findings(seen.run, seen.summary),
        missing=seen.summary["rewards_missing"], measures=format.MEASURES,
        spent=spent_steps(seen.summary, Counter(format.phase_name(r.get("phase", "")) for r in seen.records)),
        scored=int(sum(v for _, v in points(seen.records, "samples"))) if scores else None,
        reasons=reasons_of(seen), figures=[figure for figure, _ in figures], samples=samples(seen.run),
        times=_times(seen), plan=seen.plan, planned=planned(seen.plan), memory=memory, steps=seen.summary["steps"],
        workers=workers_of(seen.state),
        recipe=recipe.read_text(encoding="utf-8") if recipe.exists() else None,
        data=embed([data for _, data in figures] + more), style=Markup(text_of("page.css")), script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip


def findings(run: Path, summary: Record) -> list[Record]:
    """Return what the run has survived, with verdict and price, what its watches warned of, and its updates."""
    failures = read_recoveries(run)
    survived = [(one, f"{format.outcome(one)}: {format.survived(one)}: {first_line(one)}") for one in failures]
    warned = [(one, f"warning: {one['kind']}: {first_line(one)}") for one in read_warnings(run)]
    updates = [(one, f"update {format.updated(one)}") for one in summary["updates"]]
    return [{"step": one["step"], "text": text} for one, text in [*survived, *warned, *updates]]


def workers_of(state: Record) -> list[tuple[str, str]]:
    """Return memory and cores of each rank of a run that was watched (``guard.health``)."""
    rows = state.get("workers") or []
    used = [f"{format.size(row['memory'])} at most, {row['cores']:.2f} cores on average" for row in rows]
    return [(f"rank {row['rank']}", text) for row, text in zip(rows, used)]


def spent_steps(summary: Record, spent: Mapping[str, int]) -> str:
    """Return the planned number of steps, and those of each phase of several so far."""
    planned, parts = summary["steps_planned"], [f"{count:,} {name}" for name, count in spent.items()]
    return ": ".join([*([f"of {planned:,}"] if planned else []), *([", ".join(parts)] if len(parts) > 1 else [])])


# ---- curves ----


def _drawn(seen: Seen, chart: Chart, curves: Sequence[Curve]) -> tuple[Markup, Record]:
    return draw(chart, curves, seen.steps, _phases(seen))


def _phases(seen: Seen) -> list[Phase]:
    """Return each phase with its first step and that of the next phase, so that no gap is drawn."""
    names = dict.fromkeys(r.get("phase", "") for r in seen.records)
    starts = [min(r["step"] for r in seen.records if r.get("phase", "") == name) for name in names]
    ends = [*starts[1:], seen.steps[1]]
    return [(format.phase_name(name), a, b) for name, a, b in zip(names, starts, ends)]


# ---- time ----


def _times(seen: Seen) -> list[Markup]:
    """Draw the events of the trace; without readable ones, the times of the metrics."""
    folder = seen.run / "events"
    try:
        rows = breakdown(read_events(folder)) if folder.is_dir() else []
        if not rows:
            return _measured(seen)
        opened = open_run(folder)
        notes = [render("times.html", note=note, rows=[], health="") for note in opened.notes]
        longest = max(r.share for r in rows) or 1.0
        table = render("times.html", note="", health="", rows=rows[:OPERATIONS], longest=longest)
        return [*notes, *_pictures(seen, opened.events), table]
    except DataError as error:
        note = f"The trace cannot be read: {error}"
        return [*_measured(seen), render("times.html", note=note, rows=[], health="")]


def _pictures(seen: Seen, events: Events) -> list[Markup]:
    """Draw timelines of two steps, all steps, and all ranks, of the newest attempt."""
    if not events.steps:
        return _measured(seen)
    found = account(events, told(events) or None if seen.state["state"] == "running" else None)
    last = {r["step"] for r in seen.records if r.get("phase") == seen.records[-1].get("phase")}
    drawn, longest = pictures(events, found, np.isin(found.steps, list(last))), list[Markup]()
    if drawn["longest"] != drawn["usual"]:
        ranks = [found.ranks[i] for i in chosen(found, LANES)]
        longest = [timeline(events, drawn["longest"], "The longest step", ranks)]
    beside = [render("times.html", note="", rows=[], health=drawn["health"])] if drawn["health"] else []
    return [drawn["divided"], drawn["timeline"], *longest, drawn["stack"], *beside]


def _measured(seen: Seen) -> list[Markup]:
    spent: Counter[str] = Counter()
    for record in seen.records:
        spent.update({k[5:]: v for k, v in record.items() if k.startswith("time/") and k != "time/step" and v})
    bar = _bar([(name, seconds, format.duration(seconds)) for name, seconds in spent.most_common()])
    return [bar] if bar else []


def _bar(items: Sequence[tuple[str, float, str]]) -> Markup | None:
    """Draw one bar in parts and its legend: (name, size, size as text)."""
    whole = sum(value for _, value, _ in items) or 1.0
    hues = [HUES[i] if i < len(HUES) else "grey" for i in range(len(items))]
    parts = [(name, value / whole, hue, text) for hue, (name, value, text) in zip(hues, items)]
    return render("bar.html", parts=parts) if parts else None


# ---- missing rewards, plan, memory ----


def reasons_of(seen: Seen) -> list[tuple[tuple[str, str], int]]:
    """Count the causes of missing rewards in the journal: ((status, reason), count)."""
    why: Counter[tuple[str, str]] = Counter()
    for entry in read_lines(seen.run / "rewards.jsonl") if seen.summary["rewards_missing"] else ():
        outcome = entry.get("outcome") or {}
        why[(str(outcome.get("status", "")), str(outcome.get("reason", "")))] += 1
    return why.most_common(12)


def planned(plan: Record) -> list[tuple[str, str]]:
    """Return the plan as names and values, without the parts of memory."""
    shown = {k: v for k, v in plan.items() if k not in ("memory", "memory_peak")}
    return [(k.replace("_", " "), _plain(v)) for k, v in shown.items()]


def _plain(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _memory(seen: Seen) -> tuple[Record | None, list[Record]]:
    """Return the contents of the card with a chart, and the numbers of that chart."""
    card = memory_card(seen.summary, seen.plan)
    if card is None:
        return None, []
    found = curve(MEMORY, MEMORY.lines[0], seen.records)
    figure, data = _drawn(seen, MEMORY, [found]) if found.points else ("", None)
    return card | {"figure": figure}, [data] if data else []


def memory_card(summary: Record, plan: Record) -> Record | None:
    """Return predicted and measured memory as pairs, and the parts of the plan as a bar; None if neither is known."""
    predicted, peak = summary["memory_predicted"], summary["memory_peak"]
    if not (predicted or peak):
        return None
    items = plan.get("memory") or {}
    parts = sorted(((k, float(v), format.size(v)) for k, v in items.items()), key=lambda item: -item[1])
    pairs = [("predicted", format.size(predicted)), ("measured peak", format.size(peak))]
    return {"pairs": pairs, "bar": _bar(parts) or "", "figure": ""}
