"""Put the events of several processes on the controller's clock, from rounds, calls and communications.

Besides the rounds (``trace.clock_samples``) the trace itself bounds offsets: a call cannot begin before its submit, nor
end after its answer; no rank leaves an all-reduce before the last one has entered it; nothing is received before it is
sent (dPRO, arXiv 2205.02473, section 5). Processes that read one clock (one machine) need no estimate, unless their
rounds contradict it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tilth.analysis.clock import SLACK, Bounds, Clock, fit, same
from tilth.analysis.matching import PAIR, Spans, split
from tilth.trace.clock_samples import ClockSamples

EVERYONE = ("all_reduce", "all_gather", "reduce_scatter")
"""Communications that need data of every member, so that none ends before all have begun."""
PASSES = 2
"""Rounds in which ranks tighten each other's bounds through communications."""
NEVER = np.iinfo(np.int64).min // 4


@dataclass(frozen=True, eq=False)
class Known:
    """Bounds of one clock, and the fit to them."""

    least: Bounds
    most: Bounds
    knots: np.ndarray
    clock: Clock

    @classmethod
    def of(cls, bursts: Sequence[np.ndarray], begin: int, end: int) -> "Known":
        """Build from rounds, int64 [k, 3] each burst, with the tightest round of a burst on either side.

        begin, end: range of the clock's times to cover.
        """
        rounds = [b[(np.argmax(b[:, 0] - b[:, 1]), np.argmin(b[:, 2] - b[:, 1])), :] for b in bursts]
        asked, answered = np.array([r[0] for r in rounds]), np.array([r[1] for r in rounds])
        least = Bounds(asked[:, 1], asked[:, 0] - asked[:, 1])
        most = Bounds(answered[:, 1], answered[:, 2] - answered[:, 1])
        knots = np.unique(np.r_[begin, end, [int(b[:, 1].min()) for b in bursts]])
        return cls(least, most, knots, fit(least, most, knots))

    def told(self, least: Bounds, most: Bounds) -> "Known":
        """Add the tightest further bounds at each knot; bounds that contradict the present ones are left out."""
        least, most = self.least + self._tightest(least, 1), self.most + self._tightest(most, -1)
        if len(least) + len(most) == len(self.least) + len(self.most):
            return self
        return Known(least, most, self.knots, fit(least, most, self.knots))

    def _tightest(self, bounds: Bounds, side: int) -> Bounds:
        room = self.clock.error(bounds.at)
        excess = side * (bounds.value - self.clock.offset(bounds.at))
        news = np.flatnonzero((excess <= room) & (excess > -room))
        knot = bounds[news].near(self.knots)
        order = np.lexsort((excess[news], knot))
        last = np.flatnonzero(np.diff(knot[order], append=-1))
        return bounds[news[order[last]]]


def clocks(asked: Mapping[int, ClockSamples], controller: int, spans: Spans) -> dict[int, Clock]:
    """Return the clock of each rank with rounds, and the controller's."""
    known, found = dict[int, Known](), {controller: same()}
    for rank, about in asked.items():
        mine = spans.rows.get(rank)
        if rank == controller or not about.bursts or mine is None:
            continue
        exact = _shared(asked.get(controller), about)
        if exact is None:
            first = Known.of(about.bursts, int(spans.start[mine].min()), int(spans.end[mine].max()))
            known[rank] = first.told(*calls(spans, controller, rank))
        else:
            found[rank] = exact
    together = [r for r, about in asked.items() if about.origin.waits]
    for _ in range(PASSES if known else 0):
        found |= {rank: about.clock for rank, about in known.items()}
        met = meetings(spans, {r: found[r] for r in together if r in found})
        known = {rank: about.told(*met[rank]) if rank in met else about for rank, about in known.items()}
    return found | {rank: about.clock for rank, about in known.items()}


def _shared(controller: ClockSamples | None, worker: ClockSamples) -> Clock | None:
    """Clock of a worker that reads the controller's clock by its own account, if its rounds agree. No fit is needed,
    which takes seconds for a long run."""
    if controller is None or not controller.origin.clock or controller.origin.clock != worker.origin.clock:
        return None
    offset = controller.origin.epoch - worker.origin.epoch
    rounds = np.concatenate(worker.bursts)
    least, most = rounds[:, 0] - rounds[:, 1], rounds[:, 2] - rounds[:, 1]
    agrees = least.max() - SLACK <= offset <= most.min() + SLACK
    return same(offset) if agrees else None


def calls(spans: Spans, controller: int, rank: int) -> tuple[Bounds, Bounds]:
    """Return the bounds from a rank's calls: none begins before its submit, nor ends after its answer."""
    begun, asked, ended, answered = spans.calls(controller, rank)
    return (
        Bounds(spans.start[begun], spans.start[asked] - spans.start[begun]),
        Bounds(spans.end[ended], spans.end[answered] - spans.end[ended]),
    )


def meetings(spans: Spans, clocks: Mapping[int, Clock]) -> dict[int, tuple[Bounds, Bounds]]:
    """Return the bounds from communications, by rank: all members enter before the first one can leave."""
    rows = spans.of(*EVERYONE, *PAIR)
    rows = rows[np.isin(spans.rank[rows], list(clocks))]
    group, _ = spans.grouped(rows)
    rows, group = rows[group >= 0], group[group >= 0]
    early, late = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    members = split(spans.rank[rows])
    for rank, mine in members.items():
        clock = clocks[rank]
        early[mine], late[mine] = clock.reach(spans.start[rows[mine]])[0], clock.reach(spans.end[rows[mine]])[1]
    enters, leaves = ~spans.op[rows].is_("receive"), ~spans.op[rows].is_("send")
    entered = np.full(group.max(initial=-1) + 1, NEVER)
    left = -entered
    np.maximum.at(entered, group[enters], early[enters])
    np.minimum.at(left, group[leaves], late[leaves])
    found = {}
    for rank, mine in members.items():
        a, b = mine[leaves[mine]], mine[enters[mine]]
        least = Bounds(spans.end[rows[a]], entered[group[a]] - spans.end[rows[a]])
        found[rank] = least, Bounds(spans.start[rows[b]], left[group[b]] - spans.start[rows[b]])
    return found


class Aligned(NamedTuple):
    """All spans on the controller's clock: int64 [n] each, ns."""

    start: np.ndarray
    end: np.ndarray
    error: float
    """Greatest error of a rank's times in ns; infinite if one of them has no rounds."""


def align(asked: Mapping[int, ClockSamples], spans: Spans) -> Aligned:
    """Put all spans on the controller's clock, which is the last rank's; ranks without rounds keep their times.

    Nesting and order of the spans of a process are preserved.
    """
    start, end, error = spans.start.copy(), spans.end.copy(), 0.0
    found = clocks(asked, max(asked), spans)
    for rank, mine in spans.rows.items():
        clock = found.get(rank)
        if clock is None:
            error = math.inf
            continue
        start[mine], end[mine] = clock.aligned(start[mine]), clock.aligned(end[mine])
        error = max(error, clock.worst)
    return Aligned(start, end, error)
