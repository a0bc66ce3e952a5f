"""Contents of the pages on runs, curves and trajectories: what runs wrote, as the templates and the script take it."""

import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from markupsafe import Markup

from tilth.core.errors import DataError, TilthError, parsing
from tilth.data.cache import FileState
from tilth.runs.readers import ACCURACY, REWARD, planned_steps, present, read_recoveries
from tilth.ui import format
from tilth.ui.charts import CATALOGUE, DULL_AT_ZERO, MEMORY, Chart, Line, extremes, members
from tilth.ui.html import render
from tilth.ui.listing import METRICS, Row, measured, row_of
from tilth.ui.report import findings, memory_card, planned, spent_steps, workers_of
from tilth.ui.result import headline
from tilth.ui.samples import prompt_of, sample
from tilth.ui.signs import SIGNS, age_of, newest_write
from tilth.ui.tokens import COLOURINGS, numbers, pieces_of
from tilth.ui.top import KeptFiles, Look
from tilth.ui.web.follow import FollowedRun, RunsFolder, written
from tilth.ui.web.metric_table import MetricTable
from tilth.ui.web.search import PAGE, Wanted, group_of, kept_of, newest_step, search
from tilth.ui.web.times import slow_rank_of

PATIENT = 0.4
"""Seconds that the list waits for runs that have not been read yet; they are read in a thread meanwhile."""
LARGE = 4 << 20
"""Bytes of metrics that the list does not wait for."""
LISTED = 200
"""Most runs on one page of the list."""
SPARK = (120.0, 24.0, 60)
"""Width, height and most points of a curve in the list."""
POINTS = 800
"""Most points of a curve, besides its ends."""
MARKS = 60
"""Most marks of evaluations on a curve."""
LOG = 1 << 16
"""Bytes at the end of a log that are shown."""
TOKENS = 2_000
"""Most tokens of a sample that are shown."""
PAGE_TOKENS = 100_000
"""Most tokens of a page, which has as many of each sample."""
CHARTS = 60
"""Most charts of one page."""
SHAPES = {
    "accuracy_last": ACCURACY, "pairs_heldout_last": "accuracy/pairs", "loss_heldout_last": "loss/heldout",
    "reward_heldout_last": REWARD, "reward_last": "reward/mean",
}  # fmt: skip
"""Key of ``listing.METRICS`` -> the metric of its curve."""
AXES = {"step": "step", "tokens": "tokens", "seconds": "seconds of training"}
"""Horizontal axis -> its title."""


# ---- runs ----


class RunList:
    """Rows of the list of runs, each computed anew when its run has written, or its process has ended."""

    def __init__(self, runs: RunsFolder) -> None:
        self._runs = runs
        self._rows: dict[str, tuple[tuple[FileState, ...], Row, Row]] = {}
        """Name -> what was written, run.json if its process may end, the row."""
        self._health: dict[str, KeptFiles] = {}
        self._reader = threading.Lock()

    def page(self, words: str, state: str, tag: str, page: int) -> Row:
        """Return the rows that match, the newest first, of this page or the last, and how many are still to be read."""
        late, rows, unread = time.monotonic() + PATIENT, [], []
        paths = self._runs.paths()
        for kept in (self._rows, self._health):
            for name in [*kept.keys() - paths.keys()]:
                kept.pop(name, None)
        found = [(name, path, written(path)) for name, path in paths.items()]
        for name, path, files in sorted(found, key=lambda one: -newest_write(one[2][: len(SIGNS)])):
            row = self._row(name, path, files, time.monotonic() > late)
            _, running, _ = self._rows.get(name, ((), Row(), Row()))
            if not running:
                self._health.pop(name, None)
            elif name not in self._health:
                self._health[name] = KeptFiles(path)
            rows.append(row | {"age": age_of(path, files[: len(SIGNS)], running, self._health.get(name))})
            unread += [(name, path)] if row["state"] == "reading" else []
        if unread and self._reader.acquire(blocking=False):
            threading.Thread(target=self._read, args=(unread,), name="run-list", daemon=True).start()
        tags = Counter(tag for row in rows for tag in row["tags"])
        asked = words.lower().split()
        shown = [r for r in rows if all(w in r["words"] for w in asked) and state in ("", r["state"])]
        shown = [row for row in shown if not tag or tag in row["tags"]]
        pages = -(-len(shown) // LISTED)
        page = min(page, max(pages - 1, 0))
        return {
            "rows": shown[page * LISTED : (page + 1) * LISTED], "total": len(shown), "all": len(rows),
            "unread": len(unread), "tags": [t for t, count in tags.most_common(24) if count > 1],
            "states": sorted({row["state"] for row in rows}), "page": page, "pages": pages,
            "sweeps": [(s, count) for s, count in Counter(r["sweep"] for r in rows).items() if s and count > 1],
        }  # fmt: skip

    def _read(self, runs: Sequence[tuple[str, Path]]) -> None:
        try:
            for name, path in runs:
                self._row(name, path, written(path), False, whole=True)
        finally:
            self._reader.release()

    def _row(self, name: str, path: Path, files: tuple[FileState, ...], late: bool, *, whole: bool = False) -> Row:
        """Return the row of a run, or what is known of it. whole: read a large run too."""
        known = self._rows.get(name)
        if known is not None and (late or (known[0] == files and _as_then(path, known[1]))):
            return known[2]
        try:
            run = self._runs.get(name)
            large = run.table.version[0] < 0 and bool(files[1]) and files[1][2] > LARGE
            if late or (large and not whole):
                return _broken(name, "") | {"state": "reading"} if known is None else known[2]
            with run.lock, parsing(name):
                row, state, behind = row_of_run(run), run.state(), run.behind
        except TilthError as error:
            return _broken(name, str(error))
        if not behind:
            self._rows[name] = files, state if row["state"] == "running" else {}, row
        return row


def _as_then(run: Path, state: Row) -> bool:
    """True if a run that was running still is."""
    return not state or present(run, state)["state"] == state["state"]


def _broken(name: str, error: str) -> Row:
    named = ("recipe", "flow", "step", "metric", "value", "rate", "host", "spark", "planned", "sweep")
    row = dict.fromkeys(named)
    return {**row, "name": name, "state": "broken", "error": error, "tags": tags_of(name), "age": 0.0, "shown": "",
            "words": f"{name} {error}".lower()}  # fmt: skip


def tags_of(name: str) -> list[str]:
    """Return the words of a run's name, without its number."""
    words = name.replace("_", "-").replace(".", "-").split("-")
    return [word for word in dict.fromkeys(words) if word and not word.isdecimal()]


def row_of_run(run: FollowedRun) -> Row:
    """Return the row of the list: ``listing.row_of``, with progress, a small curve, rate, machine."""
    name, found = run.path.name, row_of(run.path, lambda _: run.summary())
    if found["state"] == "unreadable":
        return _broken(name, found["error"])
    state, summary = run.state(), run.summary()
    sweep = state.get("sweep") or ""
    key = next((key for key in METRICS if summary.get(key) is not None), None)
    cpu = (state.get("environment") or {}).get("cpu") or ""
    loss = _last(run.table, "loss")  # of a run without another metric yet
    words = (name, found["recipe"], found["flow"], found["state"], state.get("host"), cpu)
    return found | {
        "name": name, "planned": summary["steps_planned"], "sweep": sweep,
        "shown": measured(found) or (f"loss {format.number(loss['last'])}" if loss else ""),
        "tags": [sweep] if sweep else tags_of(name),
        "rate": summary["tokens_per_second_generate"] or summary["tokens_per_second_train"],
        "host": state.get("host"), "spark": spark(run.table, SHAPES[key] if key else "loss"),
        "words": " ".join(str(word) for word in words if word).lower(),
    }  # fmt: skip


def spark(table: MetricTable, name: str) -> str:
    """Return the path of a small curve; "" if there are less than two points."""
    steps, values = points_of(table, name)
    if len(values) < 2:
        return ""
    wide, high, most = SPARK
    at = extremes(values, most)
    x, y = steps[at] - steps[0], values[at] - values.min()
    x, y = wide * x / max(float(x.max()), 1e-300), high * (1 - y / max(float(y.max()), 1e-300))
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist()))


# ---- one run ----


def head(name: str, look: Look) -> Markup:
    """Render the head of a run's pages: state, progress, newest numbers."""
    p, state = look.progress, look.state
    step, planned = p.record.get("step", 0), planned_steps(look.state, p.record)
    rates = {n: p.record.get(f"tokens_per_second/{n}") for n in ("generate", "train")}
    more = {"step": step, "planned": planned, "later": step + p.steps - p.done < (planned or 0)}
    return render("head.html", name=name, look=look, p=p, state=state, rates=rates, running=look.running, **more)


def run_page(run: FollowedRun, words: str, axis: str, smooth: int) -> Row:
    """Return the contents of a run's page: summary, charts of its metrics or of those with the words in their names."""
    summary, state = run.summary(), run.state()
    plan, table, recipe = state.get("plan") or {}, run.table, run.path / "recipe.toml"
    shown = charts_of(table, words)
    return standing(run) | {
        "state": state, "slow": slow_rank_of(run), "headline": headline(summary), "planned": planned(plan),
        "plan": plan, "memory": memory_card(summary, plan), "workers": workers_of(state),
        "env": state.get("environment") or {}, "recipe": _text(recipe), "charts": shown, "words": words, "axis": axis,
        "log": tail_of(run.path / "log.txt"), "smooth": smooth, "axes": AXES, "all": table.names,
        "about": _schema(run.path),
        "values": {line.metric: _last(table, line.metric) for chart in shown for line in chart.lines},
    }  # fmt: skip


def standing(run: FollowedRun) -> Row:
    """Return what changes of a run's page as it goes, besides its head and its charts: numbers, warnings, notes."""
    table, phases = run.refresh(), Counter[str]()
    summary = run.summary() | ({"steps": int(table.column("step")[-1])} if len(table) else {})  # it may be behind
    if summary["state"] != "running":  # else they would be behind the step, which comes with each news
        phases.update(table.phase_steps())
    notes = [f"{table.unread:,} lines of metrics.jsonl are no records of a step"] if table.unread else []
    warned = dict[str, list[str]]()
    for one in summary["warnings"] + findings(run.path, summary):
        warned.setdefault(one["text"], []).append(f"{one['step']:,}")
    return {
        "s": summary, "measures": format.MEASURES, "notes": notes, "missing": summary["rewards_missing"],
        "scored": int(sum(table.steps().values("samples"))) if "reward/missing" in table.names else None,
        "spent": spent_steps(summary, phases),
        "warnings": warned,
    }  # fmt: skip


def tiles(run: FollowedRun) -> Markup:
    """Render ``standing``."""
    return render("standing.html", **standing(run))


def slow(run: FollowedRun) -> Markup:
    """Render which rank is slow, if one is."""
    return render("slow.html", name=run.path.name, slow=slow_rank_of(run))


PARTS = {"tiles": tiles, "slow-rank": slow}
"""Id of a part of a run's page -> its contents, which change as the run goes."""


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[: 4 * LOG]
    except OSError:
        return None


def tail_of(path: Path) -> str:
    """Return the end of a log; "" if there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG))
            text = file.read(LOG)
    except OSError:
        return ""
    whole = text if size <= LOG else text[text.find(b"\n") + 1 :]
    return format.plain(whole.decode(errors="replace"))


def _schema(run: Path) -> Mapping[str, Mapping[str, str]]:
    try:
        found = json.loads((run / "metrics_schema.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def charts_of(table: MetricTable, words: str = "") -> list[Chart]:
    """Return the charts of the catalogue that a run fills; with words, one for each metric that has them all."""
    names = table.names
    if asked := words.lower().split():
        found = [name for name in names if all(word in name.lower() for word in asked)]
        return [Chart(name, (Line(name, "sky"),)) for name in found[:CHARTS]]
    charts = []
    for chart in (*CATALOGUE, MEMORY):
        lines = tuple(m for line in chart.lines for m in members(line, names) if m.metric in names)
        values = [v[~np.isnan(v)] for line in lines if len(v := table.column(line.metric))]
        if any(len(v) for v in values) and not (chart.title in DULL_AT_ZERO and not any(v.any() for v in values)):
            charts.append(Chart(chart.title, lines, chart.form, chart.note, chart.log, dots=chart.dots))
    return charts[:CHARTS]


def _last(table: MetricTable, name: str) -> Row:
    """Return the newest value of a metric with its step, the least and the greatest."""
    steps, values = points_of(table, name)
    if not len(values):
        return {}
    ends = {"least": float(values.min()), "most": float(values.max())}
    return {"last": float(values[-1]), "step": int(steps[-1]), **ends}


# ---- curves ----


def points_of(table: MetricTable, name: str, axis: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """Return places on an axis and values of a metric where it was measured: float64 [m] each."""
    rows = measured_rows(table, name, axis)
    return across_of(table, axis)[rows], table.column(name)[rows]


def measured_rows(table: MetricTable, name: str, axis: str) -> np.ndarray:
    """Return the steps that have a metric and a place on an axis: bool [n]."""
    return np.isfinite(table.column(name)) & np.isfinite(across_of(table, axis))


def across_of(table: MetricTable, axis: str) -> np.ndarray:
    """Return the place of each step on an axis: float64 [n]."""
    if axis == "tokens":
        trained = table.column("tokens/trained")
        counted = trained if np.isfinite(trained).any() else table.column("tokens/generated")
        return np.cumsum(np.nan_to_num(counted))
    return table.column("seconds" if axis == "seconds" else "step")


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Return the mean of each value and those up to ``width`` before it: float64 [n]."""
    if width < 1 or not len(values):
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(end - width - 1, 0)
    return (sums[end] - sums[begin]) / (end - begin)


def lines_of(run: str, table: MetricTable, names: Sequence[str], axis: str, smooth: int, since: float) -> list[Row]:
    """Return the curves of a run's metrics from a place of the axis on, thinned with their extremes kept.

    step: of each point, for links to the samples of that step.
    """
    found = []
    for name in names:
        rows = measured_rows(table, name, axis)
        x, y, steps = across_of(table, axis)[rows], table.column(name)[rows], table.column("step")[rows]
        kept = x > since
        x, y, steps = x[kept], smoothed(y, smooth)[kept], steps[kept]
        at = extremes(y, POINTS)
        columns = {"x": x[at].tolist(), "y": y[at].tolist(), "step": steps[at].astype(int).tolist()}
        found.append({"run": run, "metric": name, "points": len(y), **columns})
    return found


def marks_of(run: FollowedRun, axis: str) -> list[Row]:
    """Return the recoveries and evaluations of a run with their places on an axis; of more than ``MARKS`` evaluations
    evenly spread ones with the last."""
    table, found = run.table, []
    steps, across = table.column("step"), across_of(table, axis)
    for one in read_recoveries(run.path):
        at = int(np.searchsorted(steps, one["step"]))
        if at < len(across) and math.isfinite(across[at]):
            text = f"{format.outcome(one)}: {format.survived(one)}"
            found.append({"kind": "recovery", "x": float(across[at]), "text": text})
    rows = np.flatnonzero(table.evaluated() & np.isfinite(across))
    for row in rows[:: -max(-(-len(rows) // MARKS), 1)][::-1].tolist():
        found.append({"kind": "evaluation", "x": float(across[row]), "text": f"evaluation at step {int(steps[row]):,}"})
    return found


# ---- trajectories ----


def trajectories_page(run: FollowedRun, wanted: Wanted) -> Row:
    """Return a page of trajectories, and the newest steps that have some."""
    found = search(run.path, wanted)
    last = max(-(-found.total // PAGE) - 1, 0)
    if wanted.page > last:
        wanted = replace(wanted, page=last)
        found = search(run.path, wanted)
    first, end = wanted.steps
    return {
        "rows": [row | {"kind": format.verdict(row)} for row in found.rows], "total": found.total,
        "more": found.more, "notes": found.notes, "wanted": wanted, "pages": -(-found.total // PAGE),
        "newest": newest_step(run.path), "whole": _measured_at(run, first) if first == end else {},
    }  # fmt: skip


def _measured_at(run: FollowedRun, step: int) -> Row:
    """Return how many samples a step had, their mean reward, and how many are on disk; {}: it was not measured."""
    table = run.refresh()
    rows = np.flatnonzero(table.column("step") == step)
    record = table.record(int(rows[-1])) if len(rows) else {}
    if "samples" not in record:
        return {}
    return {"samples": int(record["samples"]), "reward": record.get("reward/mean"), "kept": kept_of(run.path, step)}


def group_page(run: FollowedRun, step: int, group: int | None, one: int | None, by: str, most: int) -> Row:
    """Return the samples of a group side by side, each token coloured. DataError: there is no such group."""
    rows, pieces = group_of(run.path, step, group, one), pieces_of(run.path)
    if not rows:
        raise DataError(f"{run.path.name} has no such samples at step {step} on disk", key="step")
    most = min(most, PAGE_TOKENS // len(rows))
    known = [name for name in COLOURINGS if any(numbers(row, name) is not None for row in rows)]
    asked, by = by, by if by in known else next(iter(known), "logprob")
    shown = [row | {"shown": sample(row, pieces, most, by)} for row in rows]
    return {
        "rows": shown, "prompt": prompt_of(rows[0], pieces, 20_000), "answer": rows[0].get("answer"), "by": by,
        "asked": asked, "known": known, "colourings": COLOURINGS, "label": COLOURINGS[by], "step": step, "group": group,
        "most": most,
    }  # fmt: skip
