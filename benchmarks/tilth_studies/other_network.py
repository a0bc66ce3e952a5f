"""Time of a run's step on another network: transfers are retimed by the links fitted to them, and the step replayed."""

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.network import kinds_of, links, meetings, separable
from tilth.analysis.run_graph import MEET
from tilth.analysis.run_replay import RunModel
from tilth.core.errors import DataError

ROOM = 2.0
"""A transfer up to this many times its link's time is slow because of the network; the rest is delay that another
network would not remove."""
_BITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


class OtherNetwork(NamedTuple):
    """A network of this latency (seconds) and bandwidth (bytes/s); None: the run's."""

    latency: float | None = None
    bandwidth: float | None = None

    def times(self, model: RunModel) -> np.ndarray:
        """float64 [s]: seconds of each step with the recorded work on this network."""
        steps, real = model.steps, model.steps.real.copy()
        nodes = np.flatnonzero(steps.kind == MEET)
        moved = retimed(steps.events, self.latency, self.bandwidth, steps.steps)
        real[nodes, steps.meet_column[nodes]] = moved[steps.row[nodes]] * 1e-9
        return model.times(real[model.order].sum(1)[:, None])[:, 0]

    def assumed(self, model: RunModel) -> tuple[str, ...]:
        """List the communications for which ``times`` must assume that all time is bandwidth."""
        return assumed(model.steps.events, self.latency, self.bandwidth, model.steps.steps)


def parse(latency: str, bandwidth: str) -> OtherNetwork:
    """Parse "50us" and "10Gbit"; "": the run's. Raises DataError."""
    seconds = parse_seconds(latency) if latency else None
    return OtherNetwork(seconds, parse_bandwidth(bandwidth) if bandwidth else None)


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
    for op, ranks, mine in kinds_of(events.op[met.rows], met.ranks):
        nbytes = events.bytes[met.rows[mine]]
        if not any(separable(nbytes)):
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
    for op, ranks, mine in kinds_of(events.op[met.rows], met.ranks):
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
