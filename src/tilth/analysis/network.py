"""Measure the communications of a run: transfers without waiting, fitted links, and times on another network.

A communication begins for each rank on its arrival, but nothing moves before the last one has arrived: the transfer
starts there. ``plan.costs`` has the cost model of a link.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.matching import Coded
from tilth.core.errors import DataError
from tilth.plan.cost_fit import fit, held_out_error
from tilth.plan.costs import SMALL, Link, wire

ROOM = 2.0
"""A transfer up to this many times its link's time is slow because of the network; the rest is delay that another
network would not remove."""
APART = 2
"""Latency and bandwidth can be separated if the greatest tensor has this many times the bytes of the least."""
_BITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


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
        _link(op, ranks, *_samples(events, met, mine)) for op, ranks, mine in _kinds(events.op[met.rows], met.ranks)
    ]


def _kinds(op: Coded, ranks: np.ndarray) -> Iterator[tuple[str, int, np.ndarray]]:
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
    small, separate = _tells(nbytes)
    features = np.stack([moved * (not small), np.full(len(moved), messages * (separate or small))], 1)
    size = np.unique(np.log2(np.maximum(nbytes, 1)).astype(int), return_inverse=True)[1].reshape(-1)
    weight = 1 / np.bincount(size)[size]  # one size class counts as much as another, however rare
    stated = held_out_error(features, seconds, step, weight)
    slope, latency = fit(features, seconds, weight).tolist()
    bandwidth = 1 / slope if slope > 0 else float("inf")
    return Link(op, ranks, latency, bandwidth, least, greatest, len(nbytes), separate, stated)


def _tells(nbytes: np.ndarray) -> tuple[bool, bool]:
    """(True if all sizes are ``SMALL``, True if they differ enough to separate latency and bandwidth)."""
    least, greatest = int(nbytes.min()), int(nbytes.max())
    small = greatest <= SMALL
    return small, greatest >= APART * max(least, 1) and not small


def assumed(
    events: Events, latency: float | None = None, bandwidth: float | None = None, steps: np.ndarray | None = None
) -> tuple[str, ...]:
    """List communications for which ``retimed`` must assume that all time is bandwidth; () if it is given both.

    If all tensors have one size, the share of latency in their time is unknown.
    """
    if (latency is None) == (bandwidth is None):
        return ()
    met, found = meetings(events), []
    met = met if steps is None else met.select(np.isin(events.step[met.rows], steps))
    for op, ranks, mine in _kinds(events.op[met.rows], met.ranks):
        nbytes = events.bytes[met.rows[mine]]
        if not any(_tells(nbytes)):
            found.append(f"{op} among {ranks} ranks: {nbytes.min():,} to {nbytes.max():,} bytes")
    return tuple(found)


def retimed(
    events: Events, latency: float | None = None, bandwidth: float | None = None, steps: np.ndarray | None = None
) -> np.ndarray:
    """int64 [n]: ns of each row without waiting, on a network of this latency (seconds) and bandwidth (bytes/s).

    None keeps the run's value; with both None these are the recorded transfers. Rows that are no complete
    communication keep their duration. On a slower link a transfer takes as much longer as the link does. On a faster
    one it keeps its ratio to the typical transfer, but delay beyond ``ROOM`` times that stays. steps: int64, those
    whose transfers are typical, where that changes in the run (default: all).
    """
    _positive(latency, bandwidth)
    met, result = meetings(events), events.duration.copy()
    result[met.rows] = met.transfer
    if latency is None and bandwidth is None:
        return result
    seen = met if steps is None else met.select(np.isin(events.step[met.rows], steps))
    usual = {(link.op, link.ranks): link for link in links(events, seen)}
    for op, ranks, mine in _kinds(events.op[met.rows], met.ranks):
        if (op, ranks) not in usual:  # only in other steps
            continue
        link = usual[op, ranks]
        other = replace(
            link,
            latency=link.latency if latency is None else latency,
            bandwidth=link.bandwidth if bandwidth is None else bandwidth,
        )
        nbytes = events.bytes[met.rows[mine]]
        took = _moved(met.transfer[mine] * 1e-9, link.seconds(nbytes), other.seconds(nbytes))
        result[met.rows[mine]] = np.rint(took * 1e9).astype(np.int64)
    return result


def _moved(took: np.ndarray, usual: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Seconds on the other network of transfers that took ``took`` where ``usual`` is typical."""
    inside = np.minimum(took, ROOM * usual)
    times = np.divide(other, usual, out=np.ones_like(usual), where=usual > 0)
    return np.where(other >= usual, took + other - usual, inside * times + (took - inside))


def _positive(latency: float | None, bandwidth: float | None) -> None:
    if latency is not None and not 0 <= latency < float("inf"):
        raise DataError(f"a latency of {latency} s is none; it is at least 0, and finite", key="latency")
    if bandwidth is not None and not bandwidth > 0:
        raise DataError(f"a bandwidth of {bandwidth} bytes/s is none; it is above 0", key="bandwidth")


def parse_bandwidth(text: str) -> float:
    """Parse "10Gbit", "10 Gbit/s", "25Gbps", "1.25GB/s" or "800MiB/s" to bytes a second. Raises DataError."""
    found = re.fullmatch(r"([\d.]+)\s*([kMGT]i?|)(bit/s|bits/s|bit|bps|B/s|B)", text.strip())
    value = _number(found[1]) if found else 0.0
    if found is None or value <= 0:
        raise DataError(f"bandwidth {text!r} is not of the form 10Gbit or 1.25GB/s", key="bandwidth")
    return value * _BITS[found[2]] / (1 if found[3].startswith("B") else 8)


def parse_seconds(text: str) -> float:
    """Parse "50us", "0.2 ms", "3ns" or "1s" to seconds. Raises DataError."""
    found = re.fullmatch(r"([\d.]+)\s*(s|ms|us|µs|ns)", text.strip())
    value = _number(found[1]) if found else -1.0
    if found is None or value < 0:
        raise DataError(f"latency {text!r} is not of the form 50us, 0.2ms or 1s", key="latency")
    return value * _SECONDS[found[2]]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
