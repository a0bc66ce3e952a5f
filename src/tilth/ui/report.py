"""``report.html``: one page that tells what a run learned, how, where the time went and what it said on the way.

It is a single file that needs no network, made from what is on disk, so it can be written while the run goes on.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.read import OpTime, breakdown, read_events
from tilth.analysis.recent import told
from tilth.analysis.run_trace import open_run
from tilth.analysis.time_breakdown import account
from tilth.core.errors import DataError
from tilth.flows.files import read_lines, replace
from tilth.flows.readers import curve as points
from tilth.flows.readers import read_metrics, read_state, summarise
from tilth.ui import words
from tilth.ui.charts import MEMORY, Chart, Curve, Phase, charts, curve, draw
from tilth.ui.health import chosen, health
from tilth.ui.html import Html, escape, join, tag
from tilth.ui.page import MARK, page
from tilth.ui.samples import samples
from tilth.ui.timeline import HUES, LANES, divided, stack, timeline, typical

OPERATIONS = 14
"""Most operations in the table of times."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """What the report is made of."""

    run: Path
    state: Record
    records: list[Record]
    summary: Record

    @property
    def plan(self) -> Record:
        """The plan, empty if there is none yet."""
        return self.state.get("plan") or {}

    @property
    def steps(self) -> tuple[float, float]:
        """First and last committed step."""
        return (self.records[0]["step"], self.records[-1]["step"]) if self.records else (0, 0)


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into the run's directory and return its path. DataError: not a run; StorageError."""
    run = Path(run_dir)
    seen = Seen(run, read_state(run), read_metrics(run), summarise(run))
    target = run / "report.html"
    replace(target, render(seen).encode())
    return target


def render(seen: Seen) -> str:
    """The page as text."""
    figures, data = _charts(seen)
    details, more = _details(seen)
    sections = [
        _header(seen),
        _tiles(seen),
        _section("What it learned", figures),
        _section("What it said", samples(seen.run)),
        _section("Where the time went", _times(seen)),
        _section("Missing rewards", _missing(seen)),
        _section("How it ran", details),
        tag("footer", "Written by Tilth from ", tag("code", seen.run.name), " at step ", f"{seen.summary['steps']:,}."),
    ]
    return page(f"{seen.run.name} · Tilth", join(sections), data + more)


def headline(summary: Mapping[str, Any]) -> Html:
    """What was learned, in one sentence."""
    if not summary["steps"]:
        return join(["No step has been committed yet."])
    if not summary.get("phases"):
        return _text_headline(summary, f"{summary['steps']:,} steps, {words.timed(summary['seconds'])}")
    metric, said = summary["phases"][0]["metric"], list[object]()
    for phase in summary["phases"]:
        said += [", then " if said else " ", *_clause(phase, told=bool(said))]
    return join([f"Held-out {words.MEASURES[metric]}", *said, "."])


def _clause(phase: Mapping[str, Any], *, told: bool) -> list[object]:
    """``rose from 12.5 % to 97.1 % in 250 steps of GRPO``. told: the phase before has said where it begins."""
    metric, first, last = phase["metric"], phase["first"], phase["last"]
    name = words.phase_name(phase["phase"]).replace("-", "\N{NON-BREAKING HYPHEN}")
    took = f" in {words.count(phase['steps'], 'step')} of {name}"
    begin, end = words.figure(metric, first), words.figure(metric, last)
    if first is None:
        return ["reached ", tag("b", end, class_="from"), took]
    if begin == end:
        return ["stayed at ", tag("b", end), took]
    verb, kind = ("rose", None) if last > first else ("fell", "bad")
    since = [] if told else [" from ", tag("b", begin, class_="from")]
    return [verb, *since, " to ", tag("b", end, class_=kind), took]


def _text_headline(summary: Mapping[str, Any], spent: str) -> Html:
    """Of a run without accuracy."""
    first, last, bits = (summary.get(k) for k in ("loss_heldout_first", "loss_heldout_last", "bits_per_byte"))
    pairs = summary.get("pairs_heldout_last")
    if pairs is not None:
        return join(["It puts ", tag("b", words.share(pairs)), f" of the held-out pairs in their order after {spent}."])
    if first is None or last is None:
        return join([f"Trained for {spent}."])
    ends = ["from ", tag("b", f"{first:.3f}", class_="from"), " to ", tag("b", f"{last:.3f}")]
    also = f" ({bits:.3f} bits per byte)" if bits else ""
    return join(["Held-out loss went ", *ends, f" nats per token{also} in {spent}."])


def _section(title: str, content: Html | None) -> Html | None:
    return tag("section", tag("h2", title), content) if content else None


def _header(seen: Seen) -> Html:
    state, plan, env = seen.state, seen.plan, seen.state.get("environment") or {}
    brand = tag(
        "div", MARK, tag("b", "tilth"), tag("span", seen.run.name),
        tag("span", state["state"], class_=f"state {state['state']}"), class_="brand",
    )  # fmt: skip
    facts = [
        f"{_count(plan['parameters'])} parameters" if plan.get("parameters") else None,
        _machine(env) or None,
        _date(state.get("started")),
    ]
    lede = tag("p", " · ".join(f for f in facts if f), class_="lede")
    error = tag("p", state["error"], class_="lede clay") if state.get("error") else None
    told = [f"After step {said['step']:,}: {said['text']}." for said in seen.summary["warnings"]]
    warnings = [tag("p", text, class_="lede clay") for text in told]
    return tag("header", brand, tag("h1", headline(seen.summary)), lede, error, *warnings)


def _machine(env: Mapping[str, Any]) -> str:
    threads = f", {env['threads']} threads" if env.get("threads") else ""
    return f"{env.get('accelerator') or env['cpu']}{threads}" if env.get("cpu") else ""


def _date(text: str | None) -> str | None:
    return f"{datetime.fromisoformat(text):%d %B %Y, %H:%M} UTC".lstrip("0") if text else None


def _count(number: float) -> str:
    return next((f"{number / s:.3g}{u}" for u, s in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if number >= s), f"{number:g}")


# ---- tiles ----


def _tiles(seen: Seen) -> Html:
    s = seen.summary
    rates = [
        (name, f"{s[key]:,.0f}", "tokens/s")
        for name, key in (("Generation", "tokens_per_second_generate"), ("Training", "tokens_per_second_train"))
        if s[key]
    ]
    predicted = f"{words.size(s['memory_predicted'])} predicted" if s["memory_predicted"] else ""
    mismatch = s["mismatch_max"]
    tiles = [
        ("Steps", f"{s['steps']:,}", _steps(seen)),
        _best(s["best"]) if s.get("best") else None,
        ("Time", words.timed(s["seconds"]), f"attempt {s['attempts']}" if (s["attempts"] or 1) > 1 else ""),
        *rates,
        ("Memory, peak", words.size(s["memory_peak"]), predicted) if s["memory_peak"] else None,
        ("Log-prob mismatch", _mismatch(mismatch), "nats at most") if mismatch is not None else None,
        _missing_tile(seen),
    ]
    shown = [
        tag("div", tag("span", name), tag("b", value), tag("small", note), class_="tile warn" if warn else "tile")
        for name, value, note in (t for t in tiles if t)
        for warn in [name == "Missing rewards" and s["rewards_missing"] > 0]
    ]
    return tag("div", *shown, class_="tiles")


def _steps(seen: Seen) -> str:
    """Steps of each phase, or of how many at most."""
    spent = Counter(words.phase_name(r.get("phase", "")) for r in seen.records)
    if len(spent) > 1:
        return ", ".join(f"{count:,} {name}" for name, count in spent.items())
    most = sum(seen.plan.get(name, 0) for name in ("supervised_steps", "value_steps", "steps"))
    return f"of at most {most:,}" if most else ""


def _best(found: Mapping[str, Any]) -> tuple[str, str, str]:
    value, step = found["value"], f"at step {found['step']:,}"
    if found["metric"] == "loss/heldout":
        return "Best held-out loss", f"{value:.4f}", f"nats a token, {step}"
    name = {"accuracy/pairs": "order of pairs"} | words.MEASURES
    return f"Best {name[found['metric']]}", words.figure(found["metric"], value), f"held out, {step}"


def _missing_tile(seen: Seen) -> tuple[str, str, str] | None:
    """None where nothing is scored."""
    missing, samples = seen.summary["rewards_missing"], sum(v for _, v in points(seen.records, "samples"))
    if not any("reward/missing" in r for r in seen.records):
        return None
    scored = f"of {words.count(int(samples), 'sample')}" if samples else ""
    return "Missing rewards", f"{missing:,}", "left out, never 0" if missing else scored


def _mismatch(value: float) -> str:
    return "exactly 0" if value == 0 else f"{value:.1e}"


# ---- curves ----


def _charts(seen: Seen) -> tuple[Html | None, list[Record]]:
    """All figures, and the numbers behind each, in the order in which they stand on the page."""
    found = [(figure, data) for chart, curves in charts(seen.records) for figure, data in [_drawn(seen, chart, curves)]]
    if not found:
        return None, []
    return tag("div", *[figure for figure, _ in found], class_="charts"), [data for _, data in found]


def _drawn(seen: Seen, chart: Chart, curves: Sequence[Curve]) -> tuple[Html, Record]:
    return draw(chart, curves, seen.steps, _phases(seen))


def _phases(seen: Seen) -> list[Phase]:
    """Each phase with the steps it spans; the next one begins where it ends, so that no gap is drawn."""
    names = dict.fromkeys(r.get("phase", "") for r in seen.records)
    starts = [min(r["step"] for r in seen.records if r.get("phase", "") == name) for name in names]
    ends = [*starts[1:], seen.steps[1]]
    return [(words.phase_name(name), a, b) for name, a, b in zip(names, starts, ends)]


# ---- time ----


def _times(seen: Seen) -> Html | None:
    """From the events of the trace; where there are none, or they cannot be read, from the metrics."""
    folder = seen.run / "events"
    try:
        rows = breakdown(read_events(folder)) if folder.is_dir() else []
        parts = [*_from_events(seen, folder), _operations(rows)] if rows else [_measured(seen)]
    except DataError as error:
        parts = [_measured(seen), tag("p", f"The trace cannot be read: {error}", class_="lead clay")]
    return tag("div", *parts, class_="card") if any(parts) else None


def _from_events(seen: Seen, folder: Path) -> list[Html | None]:
    opened = open_run(folder)
    notes: list[Html | None] = [tag("p", note, class_="lead clay") for note in opened.notes]
    return notes + _pictures(seen, opened.events)


def _pictures(seen: Seen, events: Events) -> list[Html | None]:
    """Timelines of two steps, the steps beside each other, the ranks beside each other; of the newest attempt."""
    if not events.steps:
        return [_measured(seen)]
    found = account(events, told(events) or None if seen.state["state"] == "running" else None)
    last = {r["step"] for r in seen.records if r.get("phase") == seen.records[-1].get("phase")}
    usual, _ = typical(found, np.isin(found.steps, list(last)))
    _, longest = typical(found)
    ranks = [found.ranks[i] for i in chosen(found, LANES)]
    figures = [timeline(events, usual, "A typical step", ranks)]
    if longest != usual:
        figures.append(timeline(events, longest, "The longest step", ranks))
    several = len(found.ranks) > 1
    return [divided(found), *figures, stack(found), _folded("Ranks", health(found)) if several else None]


def _measured(seen: Seen) -> Html | None:
    """The phases as the metrics have them."""
    spent: Counter[str] = Counter()
    for record in seen.records:
        spent.update({k[5:]: v for k, v in record.items() if k.startswith("time/") and k != "time/step" and v})
    if not spent:
        return None
    return _bar([(name, seconds, words.duration(seconds)) for name, seconds in spent.most_common()])


def _folded(title: str, content: Html) -> Html:
    return tag("details", tag("summary", title), content, open=True)


def _bar(items: Sequence[tuple[str, float, str]]) -> Html:
    """One bar in parts, and its legend: name, size, how the size is written."""
    whole = sum(value for _, value, _ in items) or 1.0
    hues = [HUES[i] if i < len(HUES) else "grey" for i in range(len(items))]
    bars = [tag("i", class_=h, style=f"flex:{v / whole:.5f}", title=n) for h, (n, v, _) in zip(hues, items)]
    keys = [
        tag(
            "span",
            tag("i", class_=f"key {h}"),
            n,
            " ",
            tag("b", words.part(v / whole)),
            " ",
            tag("span", t, class_="k"),
        )
        for h, (n, v, t) in zip(hues, items)
    ]
    return join([tag("div", *bars, class_="bar"), tag("div", *keys, class_="keys")])


def _operations(rows: Sequence[OpTime]) -> Html:
    """The operations that took most time of their own."""
    longest = max(r.share for r in rows) or 1.0
    body = [
        tag(
            "tr", tag("td", tag("code", r.op)),
            tag("td", tag("span", class_="meter", style=f"width:{100 * r.share / longest:.1f}%"), class_="wide"),
            *[tag("td", t) for t in (words.share(r.share), f"{r.self_seconds:,.2f} s", f"{r.count:,}",
                                     f"{1e3 * r.seconds / r.count:,.2f} ms",
                                     words.number(r.tokens / r.seconds) if r.tokens and r.seconds else "")],
        )
        for r in rows[:OPERATIONS]
    ]  # fmt: skip
    names = ("operation", "", "own share", "own time", "spans", "mean", "tokens/s")
    table = tag("table", tag("tr", *[tag("th", n) for n in names]), *body)
    return _folded("By operation, without what ran inside it", tag("div", table, class_="scroll"))


# ---- missing rewards ----


def _missing(seen: Seen) -> Html | None:
    """Why rewards are missing, from the journal; nothing if none is."""
    if not seen.summary["rewards_missing"]:
        return None
    why: Counter[tuple[str, str]] = Counter()
    for entry in read_lines(seen.run / "rewards.jsonl"):
        outcome = entry.get("outcome") or {}
        why[(str(outcome.get("status", "")), str(outcome.get("reason", "")))] += 1
    rows = [
        tag("tr", tag("td", status), tag("td", f"{count:,}"), tag("td", reason[:200]))
        for (status, reason), count in why.most_common(12)
    ]
    head = tag("tr", tag("th", "what"), tag("th", "times"), tag("th", "why"))
    table = tag("div", tag("table", head, *rows), class_="scroll") if rows else None
    said = f"{seen.summary['rewards_missing']:,} samples had no reward and were left out of the loss."
    return tag("div", tag("p", said, class_="lead"), table, class_="card")


# ---- plan, memory, environment ----


def _details(seen: Seen) -> tuple[Html, list[Record]]:
    """Plan, memory (with a chart of its own), environment and recipe."""
    memory, data = _memory(seen)
    cards = [_plan(seen), memory, _environment(seen)]
    return join([tag("div", *[c for c in cards if c], class_="two"), _recipe(seen)]), data


def _card(title: str, content: object) -> Html:
    return tag("div", tag("h3", title), content, class_="card")


def _pairs(pairs: Sequence[tuple[str, object]]) -> Html:
    rows = [(tag("dt", name), tag("dd", value)) for name, value in pairs if value not in (None, "")]
    return tag("dl", *[cell for row in rows for cell in row])


def _plan(seen: Seen) -> Html | None:
    if not seen.plan:
        return None
    shown = {k: v for k, v in seen.plan.items() if k not in ("memory", "memory_peak")}
    return _card("Plan", _pairs([(k.replace("_", " "), _plain(v)) for k, v in shown.items()]))


def _plain(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _memory(seen: Seen) -> tuple[Html | None, list[Record]]:
    predicted, peak = seen.summary["memory_predicted"], seen.summary["memory_peak"]
    items = seen.plan.get("memory") or {}
    if not (predicted or peak):
        return None, []
    parts = sorted(((k, float(v), words.size(v)) for k, v in items.items()), key=lambda item: -item[1])
    text = _pairs([("predicted", words.size(predicted)), ("measured peak", words.size(peak))])
    found = curve(MEMORY, MEMORY.lines[0], seen.records)
    figure, data = _drawn(seen, MEMORY, [found]) if found.points else (None, None)
    return _card("Memory", join([text, _bar(parts) if parts else None, figure])), [data] if data else []


def _environment(seen: Seen) -> Html | None:
    env = seen.state.get("environment")
    if not env:
        return None
    packages = ", ".join(f"{name} {version}" for name, version in (env.get("packages") or {}).items())
    cores = f"{env.get('cores')} cores, {env.get('threads') or '?'} threads"
    pairs = [
        ("machine", env.get("cpu")), ("cores", cores), ("memory", words.size(env.get("memory"))),
        ("accelerator", env.get("accelerator")), ("system", env.get("platform")), ("Python", env.get("python")),
        ("packages", packages), ("recipe digest", seen.state.get("digest")), ("attempts", _attempts(seen)),
    ]  # fmt: skip
    return _card("Environment", _pairs(pairs))


def _attempts(seen: Seen) -> str:
    attempts = seen.state.get("attempts") or []
    words_ = [
        f"{a['attempt']}: {a['state']}" + (f" from step {a['from_step']}" if a.get("from_step") else "")
        for a in attempts
    ]
    return ", ".join(words_) if len(attempts) > 1 else ""


def _recipe(seen: Seen) -> Html | None:
    path = seen.run / "recipe.toml"
    if not path.exists():
        return None
    return tag("details", tag("summary", "Recipe"), tag("pre", escape(path.read_text(encoding="utf-8"))), class_="card")
