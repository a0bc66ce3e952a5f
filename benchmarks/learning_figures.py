"""From points of runs to a table: curves at equal tokens, their spread over seeds, and verdicts that are computed.

Nothing here runs anything; all of it is arithmetic of (tokens, accuracy).
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Point = tuple[float, float]
Curve = Sequence[Point]
ERRORS = 2.0
"""Standard errors that a difference must have to be one. With three seeds on each side chance alone gives as much in
about one comparison of nine (t of 4 degrees of freedom)."""
MEASURES = ("final", "area")


@dataclass(frozen=True)
class Spread:
    """A measure over seeds; std is that of a sample, nan with one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True)
class Difference:
    """Of a variant to its parent. pooled: standard deviation of a seed, of both together; error: of the difference."""

    value: float
    pooled: float
    error: float

    @property
    def verdict(self) -> str:
        """better, worse or no difference; not known where there are no two seeds of each."""
        if math.isnan(self.error):
            return "not known"
        if abs(self.value) < ERRORS * self.error or not self.value:
            return "no difference"
        return "better" if self.value > 0 else "worse"


def difference(mine: Spread, parent: Spread) -> Difference:
    """Means apart, with the variances of both pooled by their degrees of freedom."""
    counts = [len(mine.values), len(parent.values)]
    value = mine.mean - parent.mean
    if min(counts) < 2:
        return Difference(value, math.nan, math.nan)
    squares = sum((n - 1) * s.std**2 for n, s in zip(counts, (mine, parent)))
    pooled = math.sqrt(squares / (sum(counts) - 2))
    return Difference(value, pooled, pooled * math.sqrt(sum(1 / n for n in counts)))


def curve(points: Sequence[Sequence[float]], *, counted: bool = True) -> list[Point]:
    """(tokens, accuracy) of a run in order; counted: the tokens of value pre-training too. Of two evaluations at the
    same tokens the later one."""
    found: dict[float, float] = {}
    for tokens, values, accuracy in points:
        found[tokens if counted else tokens - values] = accuracy
    return sorted(found.items())


def at(points: Curve, tokens: float) -> float:
    """Accuracy between the two evaluations around it, linearly. ValueError where there is none on one of the sides."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= tokens <= x1:
            return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)
    raise ValueError(f"no evaluations around {tokens:,.0f} tokens; they go from {points[0][0]:,.0f} "
                     f"to {points[-1][0]:,.0f}")  # fmt: skip


def area(points: Curve, budget: float) -> float:
    """Mean accuracy over the tokens from 0 to the budget: the integral of the straight pieces, over the budget."""
    inside = [(x, y) for x, y in points if x < budget] + [(budget, at(points, budget))]
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(inside)) / budget


def band(curves: Sequence[Curve], budget: float, count: int = 40) -> list[tuple[float, float, float, float]]:
    """(tokens, mean, lowest, highest) over seeds at even places from 0 to the budget."""
    rows = []
    for i in range(count + 1):
        x = budget * i / count
        values = [at(points, x) for points in curves]
        rows.append((x, statistics.fmean(values), min(values), max(values)))
    return rows


def measured(runs: Sequence[Mapping[str, Any]], budget: float, *, counted: bool = True) -> dict[str, Spread]:
    """Final accuracy and area of a variant's runs, one for each seed."""
    curves = [curve(run["points"], counted=counted) for run in runs]
    how: dict[str, Callable[[Curve, float], float]] = {"final": at, "area": area}
    return {name: Spread(tuple(how[name](points, budget) for points in curves)) for name in MEASURES}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def row(
    title: str, runs: Sequence[Mapping[str, Any]], parent: Sequence[Mapping[str, Any]], budget: float, *, counted: bool
) -> dict[str, Any]:
    """One line of the table as plain numbers. parent: its runs; none: no difference is formed."""
    mine = measured(runs, budget, counted=counted)
    theirs = measured(parent, budget, counted=counted) if parent else {}
    found: dict[str, Any] = {"title": title, "seeds": len(runs)}
    for name, spread in mine.items():
        found[name] = {"mean": spread.mean, "std": _known(spread.std), "low": spread.low, "high": spread.high}
        if name in theirs:
            apart = difference(spread, theirs[name])
            found[name] |= {"difference": apart.value, "pooled": _known(apart.pooled), "verdict": apart.verdict}
    means = ("wall_seconds", "cpu_seconds", "steps", "tokens", "value_tokens", "greedy_tokens", "dropped", "clipped")
    return found | {name: statistics.fmean(run[name] for run in runs) for name in means}


def table(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], parents: Mapping[str, str], budget: float, *, counted: bool = True
) -> list[dict[str, Any]]:
    """Rows in the order of ``runs`` (title -> runs of all seeds); parents: title -> title, empty for nobody's."""
    return [
        row(title, mine, runs.get(parents[title], ()), budget, counted=counted) for title, mine in runs.items() if mine
    ]


def elsewhere(row: Mapping[str, Any]) -> str:
    """What of the tokens no update of the policy saw."""
    parts = {
        "thrown away": row["dropped"],
        "greedy": row["greedy_tokens"] / row["tokens"],
        "values": row["value_tokens"] / row["tokens"],
    }
    return ", ".join(f"{100 * share:.0f} % {what}" for what, share in parts.items() if share) or "-"


def _spread(found: Mapping[str, Any]) -> str:
    std = "" if found["std"] is None else f" ± {100 * found['std']:.1f}"
    return f"{100 * found['mean']:.1f}{std} ({100 * found['low']:.1f} to {100 * found['high']:.1f})"


def _apart(found: Mapping[str, Any]) -> str:
    if "difference" not in found:
        return ""
    pooled = "" if found["pooled"] is None else f" (seed {100 * found['pooled']:.1f})"
    return f"{100 * found['difference']:+.1f}{pooled}: {found['verdict']}"


def markdown(rows: Sequence[Mapping[str, Any]], parents: Mapping[str, str]) -> str:
    """The table as it stands in docs: accuracies in percent, mean ± standard deviation (range) over seeds."""
    heads = (
        "",
        "final accuracy %",
        "area %",
        "compared with",
        "final",
        "area",
        "steps",
        "wall s",
        "clipped %",
        "not learned from",
    )
    lines = [heads, ("---", "---", "---", "---", "---", "---", "---:", "---:", "---:", "---")]
    for r in rows:
        measures = [_spread(r[name]) for name in MEASURES]
        apart = [_apart(r[name]) for name in MEASURES]
        parent = parents[r["title"]] if apart[0] else ""
        counts = (f"{r['steps']:.0f}", f"{r['wall_seconds']:.0f}", f"{100 * r['clipped']:.2f}", elsewhere(r))
        lines.append((r["title"], *measures, parent, *apart, *counts))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
