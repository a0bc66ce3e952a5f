"""Curves as inline SVG that stretches, with labels as text beside it, so that they stay sharp at any width.

A script shows their numbers, which the page has as JSON, at the pointer in all charts at once.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from tilth.runs.readers import ACCURACY, REWARD, main_metric, spread
from tilth.ui import format
from tilth.ui.html import render

Record = Mapping[str, Any]
Point = tuple[float, float]
Phase = tuple[str, float, float]  # name, first and last step
FAMILY = ("leaf", "sky", "sun", "plum", "teal", "clay", "soil")  # colours of a family of metrics
POINTS = 320  # most points of a curve; more are averaged
WIDTH, HEIGHT = 1000.0, 400.0


@dataclass(frozen=True)
class Line:
    """One metric in a chart."""

    metric: str
    colour: str
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """Contents of a chart. note: a sentence under the title; phase: of this phase only."""

    title: str
    lines: tuple[Line, ...]
    form: str = "number"
    note: str = ""
    log: bool = False
    phase: str = ""
    dots: bool = False
    hero: bool = False


CATALOGUE = (
    Chart("Held-out accuracy", (Line(ACCURACY, "leaf"),), "share",
          "Greedy answers to prompts that it never trains on.", dots=True, hero=True),
    Chart("Held-out reward", (Line(REWARD, "leaf"),), "number",
          "Greedy answers to prompts that it never trains on.", dots=True, hero=True),
    Chart("Held-out loss", (Line("loss/heldout", "leaf"),), "number",
          "Nats a token, on text that it never trains on.", dots=True),
    Chart("Held-out pairs", (Line("accuracy/pairs", "leaf"),), "share",
          "Pairs that it never trains on in which the chosen answer is ahead.", dots=True),
    Chart("Rewards of pairs", (Line("rewards/chosen", "leaf", "chosen"), Line("rewards/rejected", "clay", "rejected")),
          "number", "A reward model's, or DPO's implicit ones."),
    Chart("Parts of the reward", (Line("reward/heldout/part/*", ""),), "number",
          "Of greedy answers to prompts that it never trains on.", dots=True),
    Chart("Reward", (Line("reward/mean", "sky"),), "number", "Mean over the samples of a step."),
    Chart("Entropy", (Line("entropy", "plum"),), "number", "Nats a token: how undecided it is."),
    Chart("Loss", (Line("loss", "clay"),), "number"),
    Chart("Completion length", (Line("length/mean", "sun", "mean"), Line("length/max", "soil", "longest"),
                                Line("length/finished", "sky", "ended in the step"),
                                Line("length/consumed", "leaf", "learned from"),
                                Line("length/dropped", "clay", "dropped")), "count",
          "Tokens that the policy chose."),
    Chart("Staleness", (Line("staleness/mean", "sky", "mean"), Line("staleness/max", "clay", "greatest")), "number",
          "Versions of the policy that a sample is behind."),
    Chart("Tokens by versions behind", (Line("staleness/tokens/*", ""),), "count"),
    Chart("Waiting", (Line("fully_async/trainer/idle_ratio", "clay", "the loop"),
                      Line("fully_async/rollouter/idle_ratio", "soil", "replicas")), "share",
          "For samples, and replicas without any."),
    Chart("Log-prob mismatch", (Line("mismatch/max", "clay", "greatest"), Line("mismatch/mean", "teal", "mean")),
          "number", "Trainer against rollout engine, nats.", log=True),
    Chart("Routing flips", (Line("experts/flips", "clay"),), "share",
          "Choices of experts in the rollout engine that the trainer's routers would not make."),
    Chart("Load of experts", (Line("experts/load_max", "soil"),), "number",
          "Of the busiest expert of any layer, over the mean."),
    Chart("Tokens per second", (Line("tokens_per_second/generate", "leaf", "generated"),
                                Line("tokens_per_second/train", "sky", "trained on")), "count"),
    Chart("Balance of ranks", (Line("balance/idle", "clay", "idle"), Line("padding", "soil", "padding")), "share",
          "Passes in which ranks wait for the busiest, and places of rounds without a token."),
    Chart("Samples by source", (Line("mixture/*", ""),), "count", "That a step has drawn."),
    Chart("Distance from teachers", (Line("reference/kl/*", ""),), "number", "Nats a token, by teacher."),
    Chart("Waiting for data", (Line("loader/stall", "sun"),), "number", "Seconds of a step in which the loader loads."),
    Chart("Gradient norm", (Line("grad_norm", "teal"),), "number", "Before clipping."),
    Chart("Flat groups", (Line("groups/flat", "soil"),), "share", "Samples in groups of equal rewards."),
    Chart("Clipped tokens", (Line("clip_low", "sky", "low"), Line("clip_high", "clay", "high")), "share",
          "Held by the clip range of the ratio."),
    Chart("KL towards the first policy", (Line("kl_ref", "plum"),), "number", "Nats a token."),
    Chart("Effective training time", (Line("ettr/whole", "leaf", "whole run"), Line("ettr/hour", "clay", "last hour")),
          "share", "Share of the wall time that failures did not cost."),
    Chart("Missing rewards", (Line("reward/missing", "clay"),), "count", "Left out of the loss, never counted as 0."),
)  # fmt: skip
MEMORY = Chart("Over the run", (Line("memory/rss", "soil"),), "size", "Resident memory of the process.")
DULL_AT_ZERO = (
    "Missing rewards", "Routing flips", "Clipped tokens", "KL towards the first policy", "Log-prob mismatch",
    "Balance of ranks",
)  # fmt: skip


@dataclass
class Curve:
    """A line with its points."""

    line: Line
    points: list[Point]
    last: float = 0.0
    band: list[tuple[float, float, float]] = field(default_factory=list)
    """(step, low, high): 95 % intervals of its points, where they are known."""
    bounds: str = ""
    """Interval of the last point as text."""


@dataclass
class Frame:
    """The ranges of a chart, and places in it."""

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False
    ticks: list[float] = field(default_factory=list)

    def across(self, x: float) -> float:
        """Return the place of a step: 0 at the left, 1 at the right."""
        low, high = self.x
        return (x - low) / (high - low) if high > low else 0.5

    def down(self, y: float) -> float:
        """Return the place of a value: 0 at the top, 1 at the bottom, clamped."""
        low, high = self.y
        if self.log:
            y, low, high = (math.log10(max(v, 1e-300)) for v in (y, low, high))
        return min(max(1 - (y - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def charts(records: Sequence[Record]) -> list[tuple[Chart, list[Curve]]]:
    """Make the charts that these records fill; each phase has a chart of its loss, as their scales differ."""
    found = []
    phases = [p for p in dict.fromkeys(r.get("phase", "") for r in records) if p]
    names = dict.fromkeys(name for record in records for name in record)
    beside = REWARD if main_metric(records) == ACCURACY else ACCURACY
    for chart in CATALOGUE:
        if chart.lines[0].metric == beside:
            continue
        lines = [one for line in chart.lines for one in members(line, names)]
        apart = chart.title == "Loss" and len(phases) > 1
        for phase in phases if apart else [""]:
            title = f"{chart.title}, {format.phase_name(phase)}" if phase else chart.title
            shown = Chart(title, chart.lines, chart.form, chart.note, chart.log, phase, chart.dots, chart.hero)
            curves = [c for line in lines if (c := curve(shown, line, records)).points]
            if curves and not (chart.title in DULL_AT_ZERO and all(y == 0 for c in curves for _, y in c.points)):
                found.append((shown, curves))
    return found


def members(line: Line, known: Collection[str]) -> list[Line]:
    """Expand a family ``name/*`` to a line for each known metric."""
    if not line.metric.endswith("/*"):
        return [line]
    family = line.metric.removesuffix("*")
    names = [name for name in known if name.startswith(family)]
    return [Line(name, FAMILY[i % len(FAMILY)], name.removeprefix(family)) for i, name in enumerate(names)]


def curve(chart: Chart, line: Line, records: Sequence[Record]) -> Curve:
    mine = [r for r in records if not chart.phase or r.get("phase") == chart.phase]
    points = [(float(r["step"]), float(r[line.metric])) for r in mine if r.get(line.metric) is not None]
    points = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not chart.log)]
    ranges = [(r["step"], found) for r in mine if r.get(line.metric) is not None and (found := spread(r, line.metric))]
    text = format.bounds(line.metric, ranges[-1][1]) if ranges and ranges[-1][0] == points[-1][0] else ""
    return Curve(line, thin(points), points[-1][1] if points else 0.0, [(x, *ends) for x, ends in ranges], text)


def thin(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """Reduce to at most ``limit`` points: means of stretches, and the last point."""
    if len(points) <= limit:
        return list(points)
    bounds = [round(i * (len(points) - 1) / (limit - 1)) for i in range(limit)]
    parts = [points[a:b] for a, b in itertools.pairwise(bounds)]
    return [(p[len(p) // 2][0], sum(y for _, y in p) / len(p)) for p in parts] + [points[-1]]


def extremes(y: np.ndarray, limit: int) -> np.ndarray:
    """Return the places of at most ``limit`` + 2 points, int64 ascending: least and greatest of stretches, both ends.

    y: float64 [n] without NaN. A spike is kept, however long the curve.
    """
    if len(y) <= limit:
        return np.arange(len(y))
    edges = np.linspace(0, len(y), max(limit // 2, 1) + 1).astype(int)
    places = [f(y[a:b]) + a for a, b in itertools.pairwise(edges) if b > a for f in (np.argmin, np.argmax)]
    return np.unique([0, *places, len(y) - 1])


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return the centred moving average over a twentieth of the curve; a short curve is unchanged."""
    reach = len(points) // 40
    if reach == 0:
        return list(points)
    parts = [points[max(i - reach, 0) : i + reach + 1] for i in range(len(points))]
    return [(points[i][0], sum(y for _, y in p) / len(p)) for i, p in enumerate(parts)]


_LEAST = 1e-290  # smallest range that can be divided into powers of ten


def nice(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers that cover ``low`` to ``high`` in about ``count`` steps."""
    if not high - low > _LEAST:
        half = 0.5 * max(abs(low), abs(high))
        low, high = (low - half, high + half) if half > _LEAST else (low - 0.5, high + 0.5)
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [i * step for i in range(first, last + 1)]
    return [min(ticks[0], low), *ticks[1:-1], max(ticks[-1], high)]  # a product may be rounded into the range


def decades(low: float, high: float) -> list[float]:
    """Return at most five powers of ten that cover ``low`` to ``high``."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = -(-(last - first) // 4)
    return [10.0**e for e in range(first, last + every, every)]


def frame(chart: Chart, curves: Sequence[Curve], steps: tuple[float, float]) -> Frame:
    """Choose ranges and ticks of a chart. steps: first and last of the whole run."""
    values = [y for c in curves for ys in (*c.points, *c.band) for y in ys[1:]]
    xs = [x for c in curves for x, _ in c.points]
    across = (min(xs), max(xs)) if chart.phase else steps
    if chart.log:
        ticks = decades(min(values), max(values))
    elif chart.form == "share" and (chart.hero or max(values) <= _LEAST):
        ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    elif chart.form == "number":
        ticks = nice(min(values), max(values))
    else:  # shares and amounts are never below 0
        ticks = nice(0.0, max(values) if max(values) > _LEAST else 1.0)
    return Frame(across, (ticks[0], ticks[-1]), chart.log, ticks)


def draw(
    chart: Chart, curves: Sequence[Curve], steps: tuple[float, float], phases: Sequence[Phase] = ()
) -> tuple[Markup, dict[str, Any]]:
    """Render the figure; return its numbers for the script too. All phases but the last are shaded."""
    f = frame(chart, curves, steps)
    behind = [] if chart.phase else phases
    shown = phases if chart.hero and len(phases) > 1 else []
    figure = render(
        "chart.html", chart=chart, curves=curves, f=f, form=FORMS[chart.form], width=f"{WIDTH:g}", height=f"{HEIGHT:g}",
        shades=[(f.across(a) * WIDTH, (f.across(b) - f.across(a)) * WIDTH) for _, a, b in behind[:-1]],
        border="".join(f"M{_x(f, a)} 0V{HEIGHT:g}" for _, a, _ in behind[1:-1]),
        grid=" ".join(f"M0 {_y(f, t)}H{WIDTH:g}" for t in f.ticks),
        paths=[path for c in curves for path in _paths(chart, c, f)],
        zones=[(name, 100 * f.across(a), 100 * (f.across(b) - f.across(a))) for name, a, b in shown],
    )  # fmt: skip
    return figure, {"x": f.x, "y": f.y, "log": int(f.log), "form": chart.form, "lines": [_numbers(c) for c in curves]}


def _numbers(curve: Curve) -> dict[str, Any]:
    xs, ys = [x for x, _ in curve.points], [float(f"{y:.5g}") for _, y in curve.points]
    return {"x": [int(x) for x in xs], "y": ys, "last": float(f"{curve.last:.5g}"), "c": curve.line.colour}


def _paths(chart: Chart, curve: Curve, f: Frame) -> Iterator[tuple[str, str]]:
    """Yield each path of a curve with its class."""
    colour, points = curve.line.colour, curve.points
    line = _path(points, f)
    if chart.dots or len(points) == 1:
        if len(curve.band) > 1:
            around = [(x, high) for x, _, high in curve.band] + [(x, low) for x, low, _ in reversed(curve.band)]
            yield f"{_path(around, f)}Z", f"area {colour}"
        elif chart.hero and len(points) > 1:
            yield f"{line}L{_x(f, points[-1][0])} {HEIGHT:g}L{_x(f, points[0][0])} {HEIGHT:g}Z", f"area {colour}"
        yield line, f"line {colour}"
        yield " ".join(f"M{_x(f, x)} {_y(f, y)}h0" for x, y in points), f"dots {colour}"
        return
    softer = smooth(points)
    if softer != points:
        yield line, f"raw {colour}"
    yield _path(softer, f), f"line {colour}"


def _path(points: Sequence[Point], f: Frame) -> str:
    return "M" + "L".join(f"{_x(f, x)} {_y(f, y)}" for x, y in points)


def _x(f: Frame, x: float) -> str:
    return f"{f.across(x) * WIDTH:.1f}"


def _y(f: Frame, y: float) -> str:
    return f"{f.down(y) * HEIGHT:.1f}"


def _short(value: float) -> str:
    """Format as ``15.2k`` from 1000 on, else with three digits."""
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    if abs(value) >= 1e-3:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return "0" if abs(value) < 1e-12 else f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"


FORMS: dict[str, Callable[[float], str]] = {"share": _share, "number": _short, "count": _short, "size": format.size}
