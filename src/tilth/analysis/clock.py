"""Offset of a process's clock to the controller's, with bounds of the error.

The bounds hold where the rate of a clock against the controller's changes by at most ``WANDER`` within ``STRAIGHT``.

A worker's clock read ``w`` at some moment between the controller's question and its answer: the offset (controller's
time less worker's) lies between ``asked - w`` and ``answered - w``. Over a short time the offset is a straight line,
since clocks run at constant rates. The lines above all lower and below all upper bounds are a convex polygon in the
plane of (offset, drift): an intersection of half planes (Duda et al., ICDCS 1987). Nothing is averaged: a delayed round
has loose bounds and does no harm.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

FASTEST = 1e-3
"""Greatest drift between two clocks: NTP changes rates by at most 500 ppm, quartz is within 100."""
STRAIGHT = 60e9
"""ns for which a drift counts as constant: rates follow the temperature, and NTP, over longer times."""
WANDER = 0.5e-6
"""Greatest change of a rate within ``STRAIGHT`` for which bounds hold. Quartz at a steady temperature stays below
0.1 ppm; NTP that has just begun, or is slewing, does not, and true offsets may then lie outside of the bounds."""
SLACK = WANDER * STRAIGHT / 8 + 250
"""ns by which bounds are widened, for lines that bend a little and for rounding. A rate that changes by d in the middle
of a time t is at most d t / 8 from the best straight line."""
WIDE = 1e13
"""Greatest distance of an offset from the first known one, ns: hours."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """At the time ``at`` of a worker's clock (int64 [n], ns) its offset is at least, or at most, ``value``."""

    at: np.ndarray
    value: np.ndarray

    def near(self, knots: np.ndarray) -> np.ndarray:
        """int64 [n]: index of the last knot (ascending) at or before each bound, or of the first."""
        return (np.searchsorted(knots, self.at, "right") - 1).clip(min=0)

    def __len__(self) -> int:
        return len(self.at)

    def __add__(self, other: "Bounds") -> "Bounds":
        return Bounds(np.concatenate([self.at, other.at]), np.concatenate([self.value, other.value]))

    def __getitem__(self, rows: np.ndarray) -> "Bounds":
        return Bounds(self.at[rows], self.value[rows])


Plane = tuple[float, float, float]
"""x (ns since the first knot), y (ns from the base), and the side: 1 lines pass above, -1 below."""


@dataclass(frozen=True, eq=False)
class Clock:
    """Offset of a clock to the controller's: at the times ``at`` (int64 [k], ascending, ns of this clock) between
    ``least`` and ``most`` (float64 [k], ns from ``base``); straight lines between and beyond these times."""

    at: np.ndarray
    least: np.ndarray
    most: np.ndarray
    base: int = 0

    @cached_property
    def drift(self) -> float:
        """Rate of the controller's clock against this one, less 1, over the whole time: 1e-6 is a microsecond a second.

        It extends the offset before the first knot and after the last.
        """
        if len(self.at) < 2:
            return 0.0
        middle, x = (self.least + self.most) / 2, (self.at - self.at[0]).astype(float)
        return float((middle[-1] - middle[0]) / x[-1])

    def offset(self, times: np.ndarray) -> np.ndarray:
        """int64 [n]: ns to add to times of this clock, the middle of the bounds; it preserves the order of times."""
        x, before, after = self._places(times)
        middle = np.interp(x, (self.at - self.at[0]).astype(float), (self.least + self.most) / 2)
        return np.rint(middle + after * self.drift - before * self.drift).astype(np.int64) + self.base

    def error(self, times: np.ndarray) -> np.ndarray:
        """float64 [n]: greatest error of the offset in ns, if the rate is as steady as ``WANDER``."""
        x, before, after = self._places(times)
        half = np.interp(x, (self.at - self.at[0]).astype(float), (self.most - self.least) / 2)
        return half + (0.0 if self.exact else 2 * FASTEST) * (before + after)

    @property
    def worst(self) -> float:
        """Greatest error of the offset in ns, from the first knot to the last."""
        return float((self.most - self.least).max() / 2)

    @property
    def exact(self) -> bool:
        """True for the controller's clock with another origin."""
        return len(self.at) == 1 and bool(self.least[0] == self.most[0])

    def aligned(self, times: np.ndarray) -> np.ndarray:
        """int64 [n]: times of this clock on the controller's clock."""
        return times + self.offset(times)

    def reach(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] each: the earliest and the latest moment on the controller's clock."""
        here, error = self.aligned(times), np.ceil(np.minimum(self.error(times), WIDE)).astype(np.int64)
        return here - error, here + error

    def _places(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times since the first knot, and their distances before it and after the last."""
        x = (times - self.at[0]).astype(float)
        return x, np.maximum(-x, 0.0), np.maximum(x - float(self.at[-1] - self.at[0]), 0.0)


def same(base: int = 0) -> Clock:
    """Return a clock that differs from the controller's by exactly this many ns."""
    return Clock(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), base)


def fit(least: Bounds, most: Bounds, knots: np.ndarray) -> Clock:
    """Fit a clock to bounds, at least one of each kind.

    knots: int64 [k], ascending, at least one: times of the clock at which its offset is computed; error bounds hold
    between them too, since the least offset is concave and the greatest convex there.

    Drift is constant for ``STRAIGHT`` and as long as the bounds allow it; then another line begins where the last one
    ends. Contradicting bounds within one knot widen the error.
    """
    base = int(least.value[0])
    planes: list[list[Plane]] = [[] for _ in knots]
    for bounds, side in ((least, 1.0), (most, -1.0)):
        x, y = (bounds.at - knots[0]).astype(float), (bounds.value - base).astype(float) - side * SLACK
        for knot, a, b in zip(bounds.near(knots).tolist(), x.tolist(), y.tolist()):
            planes[knot].append((a, b, side))
    low, high = np.full(len(knots), np.inf), np.full(len(knots), -np.inf)
    x = (knots - knots[0]).astype(float)
    for first, last, polygon in _segments(planes, x):
        inside = slice(first, last + 1)
        values = polygon[:, 0] + np.multiply.outer(x[inside] - x[first], polygon[:, 1])
        low[inside] = np.minimum(low[inside], values.min(1))
        high[inside] = np.maximum(high[inside], values.max(1))
    return Clock(knots, low, high, base)


def _segments(planes: list[list[Plane]], x: np.ndarray) -> Iterable[tuple[int, int, np.ndarray]]:
    """Yield (first knot, last knot, polygon [v, 2] of (offset at the first, drift)) for successive straight segments.
    Each is as long as one line fits its bounds; its last knot is the first of the next."""
    first, polygon = 0, _first(planes[0])
    for k in range(1, len(planes)):
        straight = x[k] - x[first] <= STRAIGHT or x[-1] - x[k - 1] < STRAIGHT / 2  # no short end by itself
        longer = _clipped(polygon, planes[k], x[first]) if straight else polygon[:0]
        if len(longer):
            polygon = longer
            continue
        yield first, k - 1, polygon
        from_last = _clipped(_first(planes[k - 1], x[k - 1]), planes[k], x[k - 1])
        first, polygon = (k - 1, from_last) if len(from_last) else (k, _first(planes[k], x[k]))
    yield first, len(planes) - 1, polygon


def _first(planes: list[Plane], start: float = 0.0) -> np.ndarray:
    """Polygon of one knot; if its bounds contradict each other, the range of all of them."""
    found = _clipped(_box(-WIDE, WIDE), planes, start)
    values = [y for _, y, _ in planes]
    return found if len(found) else _box(min(values), max(values))


def _box(low: float, high: float) -> np.ndarray:
    return np.array([(low, -FASTEST), (high, -FASTEST), (high, FASTEST), (low, FASTEST)])


def _clipped(polygon: np.ndarray, planes: list[Plane], start: float) -> np.ndarray:
    """Intersect a polygon with half planes; empty, [0, 2], if nothing is left."""
    for x, y, side in planes:
        polygon = clip(polygon, x - start, y, side)
    return polygon


def clip(polygon: np.ndarray, x: float, y: float, side: float) -> np.ndarray:
    """Clip a convex polygon of (a, b), [v, 2], to a + b x >= y (side 1) or a + b x <= y (side -1)."""
    over = side * (polygon[:, 0] + polygon[:, 1] * x - y)
    if not len(over) or over.min() >= 0:
        return polygon
    inside = over >= 0
    if not inside.any():
        return polygon[:0]
    following, after = np.roll(polygon, -1, 0), np.roll(over, -1)
    crossing = inside != (after >= 0)
    share = np.where(crossing, over / np.where(crossing, over - after, 1.0), 0.0)
    cut = polygon + share[:, None] * (following - polygon)
    return np.stack([polygon, cut], 1).reshape(-1, 2)[np.stack([inside, crossing], 1).ravel()]
