"""Traces of node faults: reading them, incidents, and the faults of a larger cluster.

The format is that of InfiniteHBD (arXiv 2502.03885): a JSON list of events with ``node_id``, ``event_time`` in days and
``event_type``, "fault_start" or "fault_end".
"""

import json
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tilth.core.errors import ArgumentError, DataError

DAY = 86400.0
WITHIN = 600.0
"""Seconds after a fault in which another one belongs to the same incident: they have one cause, and one recovery."""


@dataclass(frozen=True, order=True)
class NodeFault:
    """Seconds from which to which a node is out of order. end: inf if its repair is not in the trace."""

    start: float
    end: float
    node: int


@dataclass(frozen=True)
class FaultTrace:
    """Faults of ``nodes`` nodes in ``seconds``, by their start."""

    nodes: int
    seconds: float
    faults: tuple[NodeFault, ...]


@dataclass(frozen=True)
class Incident:
    """Faults that strike a job as one. down: (node, end of its fault) of each."""

    at: float
    down: tuple[tuple[int, float], ...]


def read_trace(path: Path, nodes: int) -> FaultTrace:
    """Read a trace of ``nodes`` nodes, also of those that never failed. Raises DataError for a file that is no trace.

    A node's ends belong to its starts in their order; a start without an end is a node that stays out of order.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no trace of faults: {error}", key="trace") from error
    if not isinstance(events, list) or not events:
        raise DataError(f"{path} is no trace of faults: it must be a list of at least one event", key="trace")
    parsed = sorted((_event(path, i, event) for i, event in enumerate(events)), key=lambda e: (e[0], e[2]))
    names = {name: i for i, name in enumerate(sorted({name for _, name, _ in parsed}))}
    if len(names) > nodes:
        raise DataError(f"{path}: faults of {len(names)} nodes in a cluster of {nodes}", key="trace_nodes")
    started: dict[str, deque[float]] = defaultdict(deque)
    faults = []
    for at, name, ends in parsed:
        if not ends:
            started[name].append(at)
        elif started[name]:
            faults.append(NodeFault(started[name].popleft(), at, names[name]))
        else:
            raise DataError(f"{path}: the fault of node {name} that ends at {at / DAY} never began", key="trace")
    faults += [NodeFault(at, math.inf, names[name]) for name, left in started.items() for at in left]
    return FaultTrace(nodes, parsed[-1][0], tuple(sorted(faults)))


def _event(path: Path, index: int, event: Any) -> tuple[float, str, bool]:
    """Return (seconds, node, True for an end) of one event."""

    def wrong(key: str, wanted: str) -> NoReturn:
        found = event.get(key) if isinstance(event, dict) else event
        raise DataError(f"{path} is no trace of faults: event {index}: {key}={found!r} is not {wanted}", key="trace")

    if not isinstance(event, dict) or not isinstance(event.get("node_id"), str):
        wrong("node_id", "a text")
    at = event.get("event_time")
    if isinstance(at, bool) or not isinstance(at, int | float) or not (math.isfinite(at) and at >= 0):
        wrong("event_time", "a number of days, 0 or more")
    if event.get("event_type") not in ("fault_start", "fault_end"):
        wrong("event_type", "'fault_start' or 'fault_end'")
    return at * DAY, event["node_id"], event["event_type"] == "fault_end"


def incidents(faults: Sequence[NodeFault]) -> list[Incident]:
    """Merge faults, ordered by start, each of which begins at most ``WITHIN`` seconds after the one before it."""
    merged: list[list[NodeFault]] = []
    for fault in faults:
        if merged and fault.start - merged[-1][-1].start <= WITHIN:
            merged[-1].append(fault)
        else:
            merged.append([fault])
    return [Incident(group[0].start, tuple((fault.node, fault.end) for fault in group)) for group in merged]


def scaled(trace: FaultTrace, nodes: int, seed: int = 0) -> FaultTrace:
    """Return the faults of ``nodes`` nodes: copies of the whole trace, one after another until there are enough nodes,
    of the last copy a random part of the nodes.

    Each copy after the first is rotated in time by a random number of seconds, so that nodes fail independently across
    copies while faults that struck several nodes of the trace at once still do.
    """
    if nodes < 1:
        raise ArgumentError(f"{nodes=}: at least 1", key="nodes")
    rng, faults = np.random.default_rng(seed), list[NodeFault]()
    for first in range(0, nodes, trace.nodes):
        shift = rng.uniform(0, trace.seconds) if first else 0.0
        count = min(trace.nodes, nodes - first)
        order = rng.permutation(trace.nodes)[:count] if count < trace.nodes else np.arange(trace.nodes)
        places = {int(node): first + i for i, node in enumerate(order)}
        for fault in trace.faults:
            if fault.node in places:
                start = (fault.start + shift) % trace.seconds if shift else fault.start
                faults.append(NodeFault(start, fault.end + (start - fault.start), places[fault.node]))
    return FaultTrace(nodes, trace.seconds, tuple(sorted(faults)))
