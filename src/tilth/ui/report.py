"""``report.html``: curves, sampled answers, time, plan and environment of a run in one file that needs no network.

It is made from the run's files, also while the run is running.
"""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
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
from tilth.runs.files import read_lines, replace
from tilth.runs.readers import curve as points
from tilth.runs.readers import read_metrics, read_state, summarise
from tilth.ui import format
from tilth.ui.charts import MEMORY, Chart, Curve, Phase, charts, curve, draw
from tilth.ui.health import chosen, health
from tilth.ui.html import embed, render, text_of
from tilth.ui.samples import samples
from tilth.ui.timeline import HUES, LANES, divided, stack, timeline, typical

OPERATIONS = 14
"""Most operations in the table of times."""
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
    figures = [_drawn(seen, chart, curves) for chart, curves in charts(seen.records)]
    memory, more = _memory(seen)
    script = text_of("page.js")
    recipe = seen.run / "recipe.toml"
    return render(
        "report.html", name=seen.run.name, state=seen.state, headline=headline(seen.summary), facts=_facts(seen),
        warnings=seen.summary["warnings"], tiles=_tiles(seen), missing=seen.summary["rewards_missing"],
        reasons=_reasons(seen), figures=[figure for figure, _ in figures], samples=samples(seen.run),
        times=_times(seen), plan=_plan(seen), memory=memory, environment=_environment(seen),
        steps=seen.summary["steps"], recipe=recipe.read_text(encoding="utf-8") if recipe.exists() else None,
        data=embed([data for _, data in figures] + more), style=Markup(text_of("page.css")), script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip


def headline(summary: Mapping[str, Any]) -> Markup:
    """Return one sentence on what was learned."""
    if not summary["steps"]:
        return Markup("No step has been committed yet.")
    if not summary.get("phases"):
        return _text_headline(summary, f"{summary['steps']:,} steps, {format.timed(summary['seconds'])}")
    clauses = [_clause(phase, told=i > 0) for i, phase in enumerate(summary["phases"])]
    metric = summary["phases"][0]["metric"]
    return Markup("Held-out {} {}.").format(format.MEASURES[metric], Markup(", then ").join(clauses))


def _clause(phase: Mapping[str, Any], *, told: bool) -> Markup:
    """Return ``rose from 12.5 % to 97.1 % in 250 steps of GRPO``. told: the clause before names the first value."""
    metric, first, last = phase["metric"], phase["first"], phase["last"]
    name = format.phase_name(phase["phase"]).replace("-", "\N{NON-BREAKING HYPHEN}")
    took = f" in {format.count(phase['steps'], 'step')} of {name}"
    begin, end = format.figure(metric, first), format.figure(metric, last)
    if first is None:
        return Markup('reached <b class="from">{}</b>{}').format(end, took)
    if begin == end:
        return Markup("stayed at <b>{}</b>{}").format(end, took)
    since = "" if told else Markup(' from <b class="from">{}</b>').format(begin)
    form = "rose{} to <b>{}</b>{}" if last > first else 'fell{} to <b class="bad">{}</b>{}'
    return Markup(form).format(since, end, took)


def _text_headline(summary: Mapping[str, Any], spent: str) -> Markup:
    """Return the sentence of a run without evaluated answers."""
    first, last, bits = (summary.get(k) for k in ("loss_heldout_first", "loss_heldout_last", "bits_per_byte"))
    pairs = summary.get("pairs_heldout_last")
    if pairs is not None:
        return Markup("It puts <b>{}</b> of the held-out pairs in their order after {}.").format(
            format.share(pairs), spent
        )
    if first is None or last is None:
        return Markup("Trained for {}.").format(spent)
    also = f" ({bits:.3f} bits per byte)" if bits else ""
    form = Markup('Held-out loss went from <b class="from">{:.3f}</b> to <b>{:.3f}</b> nats per token{} in {}.')
    return form.format(first, last, also, spent)


def _facts(seen: Seen) -> list[str]:
    """Return size of the model, machine and date, if known."""
    parameters, env = seen.plan.get("parameters"), seen.state.get("environment") or {}
    threads = f", {env['threads']} threads" if env.get("threads") else ""
    started = seen.state.get("started")
    facts = [
        f"{_count(parameters)} parameters" if parameters else "",
        f"{env.get('accelerator') or env['cpu']}{threads}" if env.get("cpu") else "",
        f"{datetime.fromisoformat(started):%d %B %Y, %H:%M} UTC".lstrip("0") if started else "",
    ]
    return [fact for fact in facts if fact]


def _count(number: float) -> str:
    return next((f"{number / s:.3g}{u}" for u, s in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if number >= s), f"{number:g}")


# ---- tiles ----


def _tiles(seen: Seen) -> list[tuple[str, str, str]]:
    """Return name, value and a note of each tile."""
    s = seen.summary
    rates = [
        (name, f"{s[key]:,.0f}", "tokens/s")
        for name, key in (("Generation", "tokens_per_second_generate"), ("Training", "tokens_per_second_train"))
        if s[key]
    ]
    predicted = f"{format.size(s['memory_predicted'])} predicted" if s["memory_predicted"] else ""
    mismatch = s["mismatch_max"]
    tiles = [
        ("Steps", f"{s['steps']:,}", _steps(seen)),
        _best(s["best"]) if s.get("best") else None,
        ("Time", format.timed(s["seconds"]), f"attempt {s['attempts']}" if (s["attempts"] or 1) > 1 else ""),
        *rates,
        ("Memory, peak", format.size(s["memory_peak"]), predicted) if s["memory_peak"] else None,
        ("Log-prob mismatch", f"{mismatch:.1e}" if mismatch else "exactly 0", "nats at most")
        if mismatch is not None else None,
        _missing_tile(seen),
    ]  # fmt: skip
    return [tile for tile in tiles if tile]


def _steps(seen: Seen) -> str:
    """Return the steps of each phase, or the planned number of steps."""
    spent = Counter(format.phase_name(r.get("phase", "")) for r in seen.records)
    if len(spent) > 1:
        return ", ".join(f"{count:,} {name}" for name, count in spent.items())
    most = sum(seen.plan.get(name, 0) for name in ("supervised_steps", "value_steps", "steps"))
    return f"of at most {most:,}" if most else ""


def _best(found: Mapping[str, Any]) -> tuple[str, str, str]:
    value, step = found["value"], f"at step {found['step']:,}"
    if found["metric"] == "loss/heldout":
        return "Best held-out loss", f"{value:.4f}", f"nats a token, {step}"
    name = {"accuracy/pairs": "order of pairs"} | format.MEASURES
    return f"Best {name[found['metric']]}", format.figure(found["metric"], value), f"held out, {step}"


def _missing_tile(seen: Seen) -> tuple[str, str, str] | None:
    """Return the tile; None if nothing is scored."""
    missing, samples = seen.summary["rewards_missing"], sum(v for _, v in points(seen.records, "samples"))
    if not any("reward/missing" in r for r in seen.records):
        return None
    scored = f"of {format.count(int(samples), 'sample')}" if samples else ""
    return "Missing rewards", f"{missing:,}", "left out, never 0" if missing else scored


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
        notes = [render("times.html", said=note, rows=[], health="") for note in opened.notes]
        longest = max(r.share for r in rows) or 1.0
        table = render("times.html", said="", health="", rows=rows[:OPERATIONS], longest=longest)
        return [*notes, *_pictures(seen, opened.events), table]
    except DataError as error:
        said = f"The trace cannot be read: {error}"
        return [*_measured(seen), render("times.html", said=said, rows=[], health="")]


def _pictures(seen: Seen, events: Events) -> list[Markup]:
    """Draw timelines of two steps, all steps, and all ranks, of the newest attempt."""
    if not events.steps:
        return _measured(seen)
    found = account(events, told(events) or None if seen.state["state"] == "running" else None)
    last = {r["step"] for r in seen.records if r.get("phase") == seen.records[-1].get("phase")}
    usual, _ = typical(found, np.isin(found.steps, list(last)))
    _, longest = typical(found)
    ranks = [found.ranks[i] for i in chosen(found, LANES)]
    figures = [timeline(events, usual, "A typical step", ranks)]
    if longest != usual:
        figures.append(timeline(events, longest, "The longest step", ranks))
    beside = [render("times.html", said="", rows=[], health=health(found))] if len(found.ranks) > 1 else []
    return [divided(found), *figures, stack(found), *beside]


def _measured(seen: Seen) -> list[Markup]:
    """Draw the phases by the metrics."""
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


# ---- missing rewards, plan, memory, environment ----


def _reasons(seen: Seen) -> list[tuple[tuple[str, str], int]]:
    """Count the causes of missing rewards in the journal: ((status, reason), count)."""
    why: Counter[tuple[str, str]] = Counter()
    for entry in read_lines(seen.run / "rewards.jsonl") if seen.summary["rewards_missing"] else ():
        outcome = entry.get("outcome") or {}
        why[(str(outcome.get("status", "")), str(outcome.get("reason", "")))] += 1
    return why.most_common(12)


def _plan(seen: Seen) -> list[tuple[str, str]]:
    shown = {k: v for k, v in seen.plan.items() if k not in ("memory", "memory_peak")}
    return [(k.replace("_", " "), _plain(v)) for k, v in shown.items()]


def _plain(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _memory(seen: Seen) -> tuple[Record | None, list[Record]]:
    """Return the contents of the card with a chart, and the numbers of that chart."""
    predicted, peak = seen.summary["memory_predicted"], seen.summary["memory_peak"]
    items = seen.plan.get("memory") or {}
    if not (predicted or peak):
        return None, []
    parts = sorted(((k, float(v), format.size(v)) for k, v in items.items()), key=lambda item: -item[1])
    pairs = [("predicted", format.size(predicted)), ("measured peak", format.size(peak))]
    found = curve(MEMORY, MEMORY.lines[0], seen.records)
    figure, data = _drawn(seen, MEMORY, [found]) if found.points else ("", None)
    return {"pairs": pairs, "bar": _bar(parts) or "", "figure": figure}, [data] if data else []


def _environment(seen: Seen) -> list[tuple[str, Any]]:
    env = seen.state.get("environment")
    if not env:
        return []
    packages = ", ".join(f"{name} {version}" for name, version in (env.get("packages") or {}).items())
    cores = f"{env.get('cores')} cores, {env.get('threads') or '?'} threads"
    return [
        ("machine", env.get("cpu")), ("cores", cores), ("memory", format.size(env.get("memory"))),
        ("accelerator", env.get("accelerator")), ("system", env.get("platform")), ("Python", env.get("python")),
        ("packages", packages), ("recipe digest", seen.state.get("digest")), ("attempts", _attempts(seen)),
    ]  # fmt: skip


def _attempts(seen: Seen) -> str:
    attempts = seen.state.get("attempts") or []
    starts = (f" from step {a['from_step']}" if a.get("from_step") else "" for a in attempts)
    texts = [f"{a['attempt']}: {a['state']}{start}" for a, start in zip(attempts, starts)]
    return ", ".join(texts) if len(texts) > 1 else ""
