"""Measure the communications of a run: transfers without waiting, and fitted links.

A communication begins for each rank on its arrival, but nothing moves before the last one has arrived: the transfer
starts there. ``plan.costs`` has the cost model of a link.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.matching import Coded
from tilth.plan.cost_fit import fit, held_out_error
from tilth.plan.costs import SMALL, Link, wire

APART = 2
"""Latency and bandwidth can be separated if the greatest tensor has this many times the bytes of the least."""


@dataclass(frozen=True)
class CompleteMeetings:
    """The m rows of communications with all members."""

    rows: np.ndarray  # int64 [m]: in ``Events``, ascending
    number: np.ndarray  # int64 [m]: the same for all rows of one communication
    ranks: np.ndarray  # int64 [m]: size of its group
    transfer: np.ndarray  # int64 [m]: ns from the arrival of the last member to this one's end; 0 where it ended before

    def select(self, chosen: np.ndarray) -> "CompleteMeetings":
        """Some of the rows, bool [m]."""
        return CompleteMeetings(self.rows[chosen], self.number[chosen], self.ranks[chosen], self.transfer[chosen])


def meetings(events: Events) -> CompleteMeetings:
    """Return the complete communications of a run, matched by ``Spans.grouped``."""
    rows = np.flatnonzero(events.kind.is_("communication"))
    number, ranks = events.spans.grouped(rows)
    rows, number, ranks = rows[number >= 0], number[number >= 0], ranks[number >= 0]
    last = last_start(events, rows, number)
    return CompleteMeetings(rows, number, ranks, np.maximum(events.end[rows] - last[number], 0))


def last_start(events: Events, rows: np.ndarray, number: np.ndarray) -> np.ndarray:
    """int64: arrival of the last member of each communication, in ns."""
    last = np.full(int(number.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, number, events.start[rows])
    return last


def links(events: Events, met: CompleteMeetings | None = None) -> list[Link]:
    """Fit a link for each operation and group size; the error is that of every fifth step, by a fit on the others."""
    met = met or meetings(events)
    return [
        _link(op, ranks, *_samples(events, met, mine)) for op, ranks, mine in kinds_of(events.op[met.rows], met.ranks)
    ]


def kinds_of(op: Coded, ranks: np.ndarray) -> Iterator[tuple[str, int, np.ndarray]]:
    """(operation, ranks, int64 places in the arrays) of each kind that occurs."""
    key = ranks * len(op.names) + op.codes
    for kind in np.unique(key).tolist():
        size, code = divmod(kind, len(op.names))
        yield op.names[code], size, np.flatnonzero(key == kind)


def _samples(events: Events, met: CompleteMeetings, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = met.rows[mine]
    return events.bytes[rows], met.transfer[mine] * 1e-9, events.step[rows]


def _link(op: str, ranks: int, nbytes: np.ndarray, seconds: np.ndarray, step: np.ndarray) -> Link:
    messages, moved = wire(op, ranks, nbytes)
    least, greatest = int(nbytes.min()), int(nbytes.max())
    small, separate = separable(nbytes)
    features = np.stack([moved * (not small), np.full(len(moved), messages * (separate or small))], 1)
    size = np.unique(np.log2(np.maximum(nbytes, 1)).astype(int), return_inverse=True)[1].reshape(-1)
    weight = 1 / np.bincount(size)[size]  # one size class counts as much as another, however rare
    stated = held_out_error(features, seconds, step, weight)
    slope, latency = fit(features, seconds, weight).tolist()
    bandwidth = 1 / slope if slope > 0 else float("inf")
    return Link(op, ranks, latency, bandwidth, least, greatest, len(nbytes), separate, stated)


def separable(nbytes: np.ndarray) -> tuple[bool, bool]:
    """(True if all sizes are ``SMALL``, True if they differ enough to separate latency and bandwidth)."""
    least, greatest = int(nbytes.min()), int(nbytes.max())
    small = greatest <= SMALL
    return small, greatest >= APART * max(least, 1) and not small
