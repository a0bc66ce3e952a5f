"""Pictures of a trace for the report: timelines of the ranks in one step, the parts of all steps, a table of ranks.

Both are SVG with one path for each colour, so that a page with many ranks and steps stays small.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from tilth.analysis.events import Events
from tilth.analysis.time_breakdown import (
    COMMUNICATION,
    CONTROLLER,
    OTHER,
    PAUSE,
    PEERS,
    PROFILE,
    STAGES,
    Account,
    arrivals,
    parts_of,
    periods,
)
from tilth.ui import format
from tilth.ui.charts import HEIGHT, WIDTH, nice
from tilth.ui.html import render

HUES = ("leaf", "sky", "sun", "plum", "teal", "rose", "indigo", "olive", "aqua", "lilac", "moss", "soil")
"""Colours of phases, the longest first, and of data; the others are grey."""
MEETING = "waiting in communication"  # the part of a communication before its last member arrives
FIXED = {
    COMMUNICATION: "ink", MEETING: "ink pale", PAUSE: "clay", PROFILE: "grey pale",
    STAGES: "sky pale", PEERS: "idle", CONTROLLER: "idle far",
}  # fmt: skip
COLUMNS, FINE = 1000, 8  # columns of a lane, and samples of each column, whose most frequent part of the time it shows
BARS = 160  # most columns of the picture over steps; further steps are averaged
LANES = 16  # most ranks in a timeline
TALL = 26
BLANK = -1
Band = tuple[str, str, str]  # title, path and colour


@dataclass(frozen=True, eq=False)
class TimelineRow:
    """One row of a timeline. codes: int64 [COLUMNS], the part of each column, or BLANK."""

    name: str
    codes: np.ndarray


def hues(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each part of the time, the same in all pictures of a run."""
    phases = [n for n in names if n not in (*FIXED, OTHER)]
    named = {n: HUES[i] if i < len(HUES) else "grey" for i, n in enumerate(phases)}
    return {n: FIXED.get(n) or named.get(n, "grey") for n in names}


def typical(found: Account, among: np.ndarray | None = None) -> tuple[int, int]:
    """Return a step of median time, and the longest. among: bool [s], the steps to choose from; default: all."""
    rows = np.flatnonzero(among) if among is not None and among.any() else np.arange(len(found.steps))
    took = found.seconds[rows]
    usual = rows[np.abs(took - np.median(took)).argmin()]
    return int(found.steps[usual]), int(found.steps[rows[took.argmax()]])


def lanes(
    events: Events, step: int, ranks: Collection[int], part: tuple[float, float] = (0.0, 1.0)
) -> tuple[list[TimelineRow], tuple[str, ...], float]:
    """Return the lanes of ranks in a step, until the next began, the names of the parts, and the seconds.

    part: of the step, from 0 to 1. The controller's lane, if it is a process of its own, shows when it did not wait for
    answers.
    """
    bounds, known = periods(events)
    at = int(np.searchsorted(known, step))
    whole = int(bounds[at + 1] - bounds[at])
    low, high = (int(bounds[at]) + round(share * whole) for share in part)
    parts = parts_of(events)
    names = (*parts.names, MEETING)
    within = (events.end > low) & (events.start < high)
    shown = parts.main & within
    window = low, high, np.where(events.op.is_("await"), BLANK, parts.code)
    _, waits = arrivals(events, within & events.kind.is_("communication"))
    made = []
    for r in sorted(ranks):
        rows = np.flatnonzero(shown & (events.rank == r))
        line = _painted(events, rows, *window)
        _paint(line, events.start[rows], np.minimum(waits, events.duration)[rows], low, high, len(names) - 1)
        made.append(TimelineRow(f"rank {r}", _coarse(line)))
    if events.controller not in events.workers:
        mine = np.flatnonzero(shown & (events.rank == events.controller))
        own = np.where(window[2] == BLANK, BLANK, names.index(OTHER))
        made.insert(0, TimelineRow("controller", _coarse(_painted(events, mine, low, high, own))))
    return made, names, (high - low) * 1e-9


def _painted(events: Events, rows: np.ndarray, low: int, high: int, code: np.ndarray) -> np.ndarray:
    """Return int64 [COLUMNS * FINE]: codes of these spans, an inner one over its outer one."""
    line = np.full(COLUMNS * FINE, BLANK)
    # Of two nested spans of the same length only the inner has exclusive time.
    inner = rows[np.lexsort((events.own[rows], -events.duration[rows], events.start[rows]))]
    _paint(line, events.start[inner], events.duration[inner], low, high, code[inner])
    return line


def _paint(line: np.ndarray, start: np.ndarray, took: np.ndarray, low: int, high: int, code: np.ndarray | int) -> None:
    scale = len(line) / max(high - low, 1)
    begin, end = (np.rint((t - low) * scale).clip(0, len(line)).astype(int) for t in (start, start + took))
    for a, b, c in zip(begin, end, np.broadcast_to(code, begin.shape)):
        line[a:b] = c


def _coarse(line: np.ndarray) -> np.ndarray:
    """Return the most frequent code of each column: int64 [COLUMNS]."""
    found = np.unique(line)
    counts = np.stack([(line.reshape(COLUMNS, FINE) == c).sum(1) for c in found])
    return found[counts.argmax(0)]


def runs(codes: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the stretches of equal codes but BLANK: (code, first column, columns)."""
    edges = np.flatnonzero(np.diff(codes)) + 1
    begins, ends = np.append(0, edges), np.append(edges, len(codes))
    return [(int(codes[a]), int(a), int(b - a)) for a, b in zip(begins, ends) if codes[a] != BLANK]


def timeline(events: Events, step: int, title: str, ranks: Collection[int] | None = None) -> Markup:
    """Draw one step, a lane for each rank. ranks: the workers to show; default: the first ``LANES``."""
    chosen = events.workers[:LANES] if ranks is None else ranks
    made, names, seconds = lanes(events, step, chosen)
    more = f"; {len(chosen)} of {len(events.workers)} ranks" if len(chosen) < len(events.workers) else ""
    waits = any((lane.codes == len(names) - 1).any() for lane in made)
    pale = "; communication is pale until the last member is there" if waits else ""
    return render(
        "lanes.html", title=title, note=f"step {step:,}{more}{pale}", lanes=[(m.name, _bands(m, names)) for m in made],
        wide=COLUMNS, tall=TALL, ends=("0", format.brief(seconds)), grid="",
    )  # fmt: skip


def _bands(lane: TimelineRow, names: Sequence[str]) -> list[Band]:
    colours = hues(names)
    stretches: dict[str, list[str]] = {}
    for code, first, count in runs(lane.codes):
        stretches.setdefault(names[code], []).append(f"M{first} 0h{count}v{TALL}h-{count}z")
    return [(f"{lane.name}: {name}", "".join(d), colours[name]) for name, d in stretches.items()]


def divided(found: Account) -> Markup:
    """Draw the whole time as one bar with a legend: each part's share, the mean over ranks."""
    colours, whole = hues(found.names), found.whole
    return render("bar.html", parts=[(n, s / whole, colours[n], "") for n, s in found.parts.items()])


def stack(found: Account) -> Markup:
    """Draw the parts of each step's time, the mean over ranks, as stacked areas."""
    edges = np.linspace(0, len(found.steps), min(len(found.steps), BARS) + 1).round().astype(int)
    heights = np.stack([found.by_step[a:b].mean(0) for a, b in itertools.pairwise(edges)])
    top = np.cumsum(heights, axis=1)
    ticks = nice(0.0, float(top[:, -1].max()), 3)
    across = np.linspace(0, WIDTH, len(heights) + 1)
    colours = hues(found.names)
    bands = [
        (name, _area(across, top[:, i] - heights[:, i], top[:, i], ticks[-1]), colours[name])
        for i, name in enumerate(found.names) if heights[:, i].any()
    ]  # fmt: skip
    return render(
        "lanes.html", title="Steps", note="seconds of a step, the mean over ranks", lanes=[], bands=bands,
        wide=f"{WIDTH:g}", tall=f"{HEIGHT:g}",
        labels=[(100 * (1 - t / ticks[-1]), format.brief(t)) for t in ticks],
        grid="".join(f"M0 {_y(t, ticks[-1])}H{WIDTH:g}" for t in ticks),
        ends=(f"step {found.steps[0]:,}", f"{found.steps[-1]:,}"),
    )  # fmt: skip


def _area(across: np.ndarray, low: np.ndarray, high: np.ndarray, most: float) -> str:
    """Return the path of an area: its upper edge as steps of a stair, then its lower edge back."""
    there = "".join(f"H{_x(across[i])}V{_y(high[i], most)}H{_x(across[i + 1])}" for i in range(len(high)))
    back = "".join(f"V{_y(low[i], most)}H{_x(across[i])}" for i in reversed(range(len(low))))
    return f"M0 {_y(high[0], most)}{there}{back}z"


def _x(value: float) -> str:
    return f"{value:.4g}"


def _y(value: float, most: float) -> str:
    return f"{HEIGHT * (1 - value / most):.4g}"


def pictures(events: Events, found: Account, among: np.ndarray | None = None) -> dict[str, Any]:
    """Draw the whole time, a typical step, all steps, and several ranks; name the typical and the longest step.

    among: bool [s], the steps of which one is typical; default: all.
    """
    usual, ranks = typical(found, among)[0], [found.ranks[i] for i in chosen(found, LANES)]
    return {
        "divided": divided(found), "stack": stack(found), "timeline": timeline(events, usual, "A typical step", ranks),
        "health": health(found) if len(found.ranks) > 1 else "", "usual": usual, "longest": typical(found)[1],
    }  # fmt: skip


# ---- ranks ----

ROWS = 24  # most ranks in the table; of more, those that differ most from the median
SLOW = 1.1  # pace (time over that of its peers for the same work) that is marked; the verdict is of what a rank costs


def health(found: Account) -> Markup:
    """Render the table: for each rank its parts of the time, its pace, and how long others waited for it."""
    shown = chosen(found)
    return render("health.html", rows=[_row(found, i) for i in shown], left=len(found.ranks) - len(shown))


def chosen(found: Account, most: int = ROWS) -> list[int]:
    """Choose at most ``most`` ranks, those whose parts differ most from the median; return their places, ascending."""
    if len(found.ranks) <= most:
        return list(range(len(found.ranks)))
    far = np.abs(found.by_rank - np.median(found.by_rank, axis=0)).sum(1)
    return sorted(np.argsort(-far, kind="stable")[:most].tolist())


def _row(found: Account, i: int) -> tuple[int, list[tuple[str, float, str]], list[float], str, bool]:
    """Return rank, parts, shares of the time, pace, and True if that is marked."""
    whole, colours = found.whole, hues(found.names)
    at = {name: float(found.by_rank[i, k]) / whole for k, name in enumerate(found.names)}
    pace, part = float(found.pace[i]), found.shares(i)
    shares = [part[name] for name in ("busy", "communication", "gc", "pipeline", "waiting")]
    shares.append(float(found.meetings.blamed[i]) / whole)
    parts = [(name, share, colours[name]) for name, share in at.items() if share > 0]
    return found.ranks[i], parts, shares, "–" if math.isnan(pace) else f"{pace:.2f}", pace >= SLOW
