"""What a process's clock says against the controller's, with bounds of the error.

The bounds hold where the rate of a clock against the controller's changes by at most ``WANDER`` within ``STRAIGHT``.

A worker's clock read ``w`` while the controller's read something between the moments when it asked and when it had the
answer: the offset (controller's time less worker's) lies between ``asked - w`` and ``answered - w``. Over a while the
offset is a straight line, for clocks run at constant rates; so the lines that pass above all lower and below all upper
bounds are all that can be true, and they are a convex polygon in the plane of (offset, drift): an intersection of half
planes (Duda et al., ICDCS 1987). Nothing is averaged: a round that was delayed says little, and does no harm.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

FASTEST = 1e-3
"""Greatest drift between two clocks: NTP changes rates by at most 500 ppm, quartz is within 100."""
STRAIGHT = 60e9
"""ns for which a drift counts as constant: rates follow the temperature, and NTP, over more than that."""
WANDER = 0.5e-6
"""Greatest change of a rate within ``STRAIGHT`` for which bounds are made to hold. Quartz at a steady temperature stays
below 0.1 ppm; NTP that has just begun, or is slewing, does not, and then true offsets may lie outside of what is
stated."""
SLACK = WANDER * STRAIGHT / 8 + 250
"""ns by which bounds are widened, for lines that bend a little all the same, and as readings are whole numbers. A rate
that changes by d in the middle of a time t is at most d t / 8 from the best straight line."""
WIDE = 1e13
"""Bound of how far an offset may be from the first known, ns: hours."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """At the time ``at`` of a worker's clock (int64 [n], ns) its offset is at least, or at most, ``value``."""

    at: np.ndarray
    value: np.ndarray

    def near(self, knots: np.ndarray) -> np.ndarray:
        """int64 [n]: which of the knots (ascending) is the last one before, or the first."""
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
    """The offset of a clock to the controller's: at the times ``at`` (int64 [k], ascending, this clock's own ns)
    between ``least`` and ``most`` (float64 [k], ns from ``base``); between and beyond these times straight lines."""

    at: np.ndarray
    least: np.ndarray
    most: np.ndarray
    base: int = 0

    @cached_property
    def _slopes(self) -> tuple[float, float]:
        """Of the estimate before the first knot and after the last: those of the whole."""
        if len(self.at) < 2:
            return 0.0, 0.0
        middle, x = (self.least + self.most) / 2, (self.at - self.at[0]).astype(float)
        slope = float((middle[-1] - middle[0]) / x[-1])
        return slope, slope

    def offset(self, times: np.ndarray) -> np.ndarray:
        """int64 [n]: ns to add to times of this clock; the middle of what is possible. It keeps their order."""
        x, before, after = self._places(times)
        middle = np.interp(x, (self.at - self.at[0]).astype(float), (self.least + self.most) / 2)
        first, last = self._slopes
        return np.rint(middle + after * last - before * first).astype(np.int64) + self.base

    def error(self, times: np.ndarray) -> np.ndarray:
        """float64 [n]: ns by which the offset may be wrong at most where the rate is as steady as ``WANDER`` says;
        infinite where nothing is known."""
        x, before, after = self._places(times)
        half = np.interp(x, (self.at - self.at[0]).astype(float), (self.most - self.least) / 2)
        beyond = 0.0 if self.exact else 2 * FASTEST
        return half + beyond * (before + after)

    @property
    def worst(self) -> float:
        """ns by which the offset may be wrong at most, from the first knot to the last."""
        return float((self.most - self.least).max() / 2)

    @property
    def exact(self) -> bool:
        """Whether it is the controller's own clock but for where it counts from."""
        return len(self.at) == 1 and bool(self.least[0] == self.most[0])

    @property
    def drift(self) -> float:
        """By how much the controller's clock is faster, over the whole time: 1e-6 is a microsecond a second."""
        return self._slopes[0]

    def aligned(self, times: np.ndarray) -> np.ndarray:
        """int64 [n]: the same moments on the controller's clock."""
        return times + self.offset(times)

    def reach(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] each: the earliest and the latest that these moments can be on the controller's clock."""
        here, error = self.aligned(times), np.ceil(np.minimum(self.error(times), WIDE)).astype(np.int64)
        return here - error, here + error

    def _places(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times since the first knot, and how far they lie before it or behind the last."""
        x = (times - self.at[0]).astype(float)
        return x, np.maximum(-x, 0.0), np.maximum(x - float(self.at[-1] - self.at[0]), 0.0)


def same(base: int = 0) -> Clock:
    """A clock that differs from the controller's by this many ns, exactly and always."""
    return Clock(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), base)


def fit(least: Bounds, most: Bounds, knots: np.ndarray) -> Clock:
    """The clock between these bounds, at least one of each kind.

    knots: int64 [k], ascending, at least one: the moments, of its own time, at which it is worked out; error bounds
    hold between them too, for there the least is concave and the most convex.

    Drift is constant for ``STRAIGHT`` and as long as the bounds allow it; then another line begins where the last one
    ends. Bounds that contradict each other within one knot widen the error instead.
    """
    base = int(least.value[0])
    planes: list[list[Plane]] = [[] for _ in knots]
    for knot, plane in _half_planes(least, 1.0, knots, base) + _half_planes(most, -1.0, knots, base):
        planes[knot].append(plane)
    low, high = np.full(len(knots), np.inf), np.full(len(knots), -np.inf)
    x = (knots - knots[0]).astype(float)
    for first, last, polygon in _segments(planes, x):
        inside = slice(first, last + 1)
        values = polygon[:, 0] + np.multiply.outer(x[inside] - x[first], polygon[:, 1])
        low[inside] = np.minimum(low[inside], values.min(1))
        high[inside] = np.maximum(high[inside], values.max(1))
    return Clock(knots, low, high, base)


def _half_planes(bounds: Bounds, side: float, knots: np.ndarray, base: int) -> list[tuple[int, Plane]]:
    """Each bound with the knot that it belongs to."""
    x, y = (bounds.at - knots[0]).astype(float), (bounds.value - base).astype(float) - side * SLACK
    return [(k, (a, b, side)) for k, a, b in zip(bounds.near(knots).tolist(), x.tolist(), y.tolist())]


def _segments(planes: list[list[Plane]], x: np.ndarray) -> Iterable[tuple[int, int, np.ndarray]]:
    """(first knot, last knot, polygon of the possible (offset at the first, drift), [v, 2]): one after the other, each
    as long as one line can hold it, the last knot of one the first of the next."""
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
    """The polygon of one knot alone. Where its bounds contradict each other: all that lies between any of them."""
    box = np.array([(-WIDE, -FASTEST), (WIDE, -FASTEST), (WIDE, FASTEST), (-WIDE, FASTEST)])
    found = _clipped(box, planes, start)
    if len(found):
        return found
    values = [y for _, y, _ in planes]
    low, high = min(values), max(values)
    return np.array([(low, -FASTEST), (high, -FASTEST), (high, FASTEST), (low, FASTEST)])


def _clipped(polygon: np.ndarray, planes: list[Plane], start: float) -> np.ndarray:
    """What of a polygon lies in all the half planes; empty, [0, 2], where nothing does."""
    for x, y, side in planes:
        polygon = clip(polygon, x - start, y, side)
    return polygon


def clip(polygon: np.ndarray, x: float, y: float, side: float) -> np.ndarray:
    """The part of a convex polygon of (a, b), [v, 2], where a + b x is at least y (side 1) or at most y (side -1)."""
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
