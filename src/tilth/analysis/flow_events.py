"""Arrows between spans of different processes: calls and communications."""

from dataclasses import dataclass

import numpy as np

from tilth.analysis.align import EVERYONE
from tilth.analysis.events import Events
from tilth.analysis.matching import PAIR

BEGIN, ON, END = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Arrows:
    """Points of arrows, int64 [k] each, those of one arrow in order. Along an arrow time never falls."""

    number: np.ndarray  # of the arrow, from 0 on
    row: np.ndarray  # of the span
    at: np.ndarray  # ns, within the span
    place: np.ndarray  # BEGIN, ON or END

    @property
    def count(self) -> int:
        """Number of arrows."""
        return int((self.place == BEGIN).sum())


def calls(events: Events) -> Arrows:
    """Return arrows from a call's submit over its execution on each rank to the end of its await, if there is one.

    None in a trace of one process.
    """
    spans, points = events.spans, []
    for rank in events.workers:
        begun, asked, ended, answered = spans.calls(events.controller, rank)
        first, last = (events.seq[rows] * (max(events.ranks) + 1) + rank for rows in (begun, ended))
        points += [(first, asked, 0, False), (first, begun, 1, False), (last, answered, 2, True)]
    number, row, turn, late = (np.concatenate([np.full(len(p[0]), p[c]) for p in points]) for c in range(4))
    return _arrows(events, number, row, turn, late.astype(bool))


def meetings(events: Events) -> Arrows:
    """Return arrows through the members of each communication by arrival, and from each send to its receive."""
    spans = events.spans
    row = spans.of(*EVERYONE, "broadcast", *PAIR)
    number, _ = spans.grouped(row)
    row, number = row[number >= 0], number[number >= 0]
    received = events.op[row].is_("receive")
    return _arrows(events, number, row, received.astype(np.int64), received)


def _arrows(events: Events, number: np.ndarray, row: np.ndarray, turn: np.ndarray, late: np.ndarray) -> Arrows:
    """Sort points by arrow, turn and time: the start of a span, or its end (late).

    A point that a clock's error put before its cause is moved to it within its span, else dropped, and so are arrows of
    one point.
    """
    last = events.start[row] + np.maximum(events.duration[row] - 1, 0)
    at = np.where(late, last, events.start[row])
    order = np.lexsort((at, turn, number))
    number, row, at, last = number[order], row[order], at[order], last[order]
    for _ in range(2):  # turns are three at most; within a turn they are in order
        at[1:] = np.where(number[1:] == number[:-1], np.maximum(at[1:], at[:-1]), at[1:])
    fits = at <= last
    number, row, at = number[fits], row[fits], at[fits]
    _, number, size = np.unique(number, return_inverse=True, return_counts=True)
    kept = size[number] > 1
    _, number = np.unique(number[kept], return_inverse=True)
    begins, ends = np.diff(number, prepend=-1) != 0, np.diff(number, append=-1) != 0
    return Arrows(number, row[kept], at[kept], np.where(begins, BEGIN, np.where(ends, END, ON)))
