"""Replay a step by its dependency graph: max-plus, level by level, for all steps, dp ranks and scenarios at once.

Operations are in level order (a group of operations that start together is one node), so a level is one slice, and its
ready times are a few gathers and maxima over arrays. The number of Python operations is that of the levels, the length
of the pipeline's longest chain, for any number of workers, steps and scenarios.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from tilth.core.errors import DataError

ALONE, TOGETHER, ACROSS = 0, 1, 2
"""Start of an operation: alone; with one peer on its dp rank; with its group on all dp ranks."""


@dataclass(frozen=True)
class Graph:
    """Edges between n operations, and groups of operations that start together when the last of them is ready."""

    before: np.ndarray  # int64 [e]: this operation must have ended ...
    after: np.ndarray  # int64 [e]: ... before this one is ready
    group: np.ndarray  # int64 [n]: number of the group, whose members are of one kind
    kind: np.ndarray  # int64 [n]: ALONE, TOGETHER or ACROSS


@dataclass(frozen=True)
class _Level:
    """A slice of operations whose predecessors have all ended, sorted by kind and group."""

    low: int
    high: int
    before: np.ndarray  # int64 [width, m]: operations to wait for; n stands for the start of the step
    together: slice  # place of the pairs in the slice, peer beside peer
    across: tuple[int, np.ndarray, np.ndarray] | None
    """Place in the slice where groups over all dp ranks begin, their first members from there, and their sizes."""


@dataclass(frozen=True)
class Schedule:
    """A dependency graph in level order."""

    order: np.ndarray  # int64 [n]: operations by level; all arrays of ``run`` are in this order
    levels: list[_Level]
    last: np.ndarray  # int64: places of operations that nothing waits for

    def run(self, duration: np.ndarray, launched: np.ndarray | None = None) -> np.ndarray:
        """Return the end of each operation, float64 [n, x, d], in seconds since the start of the step.

        duration: float64 [n, x, d], seconds, transfer time for communication, in ``order``; x: steps, scenarios or
        both; d: dp ranks. launched: [n, x, d], receives the time when each is ready, for communication before its
        group has assembled.
        """
        n = len(self.order)
        end = np.empty((n + 1, *duration.shape[1:]))
        end[n] = 0.0
        for level in self.levels:
            ready = end[level.before[0]]
            for row in level.before[1:]:
                np.maximum(ready, end[row], out=ready)
            if launched is not None:
                launched[level.low : level.high] = ready
            meet(ready, level)
            np.add(ready, duration[level.low : level.high], out=end[level.low : level.high])
        return end[:n]

    def seconds(self, duration: np.ndarray) -> np.ndarray:
        """float64 [x]: time of a step, over all dp ranks. duration: [n, x, d] like that of ``run``."""
        return self.run(duration)[self.last].max((0, 2))


def meet(ready: np.ndarray, level: _Level) -> None:
    """Delay the members of a group until the last is ready. ready: [m, x, d] of this level, changed in place."""
    pairs = ready[level.together]
    if len(pairs):
        np.maximum(pairs[0::2], pairs[1::2], out=pairs[0::2])
        pairs[1::2] = pairs[0::2]
    if level.across is not None:
        at, first, sizes = level.across
        latest = np.maximum.reduceat(ready[at:].max(-1, keepdims=True), first, axis=0)
        ready[at:] = np.repeat(latest, sizes, axis=0)


def schedule(graph: Graph) -> Schedule:
    """Put a dependency graph in level order. Raises DataError if operations wait for each other in a circle."""
    n = len(graph.group)
    level = _levels(graph)
    order = np.lexsort((np.arange(n), graph.group, graph.kind, level))
    place = np.empty(n + 1, np.int64)
    place[order] = np.arange(n)
    before, after = place[graph.before], place[graph.after]
    bounds = np.searchsorted(level[order], np.arange(level.max() + 2))
    waits = _padded(before, after, n)
    levels = [_level(graph, order, waits, int(a), int(b)) for a, b in itertools.pairwise(bounds)]
    return Schedule(order, levels, np.setdiff1d(np.arange(n), before))


def _levels(graph: Graph) -> np.ndarray:
    """int64 [n]: length of the longest chain of groups before each operation (Kahn's algorithm by fronts)."""
    names, group = np.unique(graph.group, return_inverse=True)
    edges = np.stack(np.divmod(_distinct(group[graph.before] * len(names) + group[graph.after]), len(names)))
    first = np.searchsorted(edges[0], np.arange(len(names) + 1))
    waiting = np.bincount(edges[1], minlength=len(names))
    level = np.full(len(names), -1)
    front, depth = np.flatnonzero(waiting == 0), 0
    while len(front):
        level[front] = depth
        sizes = first[front + 1] - first[front]
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        freed = edges[1, np.repeat(first[front], sizes) + inside]
        np.subtract.at(waiting, freed, 1)
        front, depth = _distinct(freed[waiting[freed] == 0]), depth + 1
    if (level < 0).any():
        message = f"{(level < 0).sum()} groups of operations wait for each other: the order of launch is damaged"
        raise DataError(message, key="graph.cycle")
    return level[group]


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """Distinct numbers, ascending; faster here than ``np.unique``, which hashes."""
    numbers = np.sort(numbers)
    return numbers[np.r_[True, numbers[1:] != numbers[:-1]][: len(numbers)]]


def _padded(before: np.ndarray, after: np.ndarray, n: int) -> np.ndarray:
    """int64 [width, n]: operations that each one waits for, padded with n."""
    order = np.argsort(after, kind="stable")
    before, after = before[order], after[order]
    column = np.arange(len(after)) - np.searchsorted(after, after)
    waits = np.full((int(column.max(initial=0)) + 1, n), n)
    waits[column, after] = before
    return waits


def _level(graph: Graph, order: np.ndarray, waits: np.ndarray, low: int, high: int) -> _Level:
    ops, before = order[low:high], waits[:, low:high]
    used = max(int((before < len(order)).any(1).sum()), 1)
    pairs = np.searchsorted(graph.kind[ops], [TOGETHER, ACROSS])  # kinds are in this order
    return _Level(low, high, before[:used], slice(*pairs.tolist()), _across(graph, ops))


def _across(graph: Graph, ops: np.ndarray) -> tuple[int, np.ndarray, np.ndarray] | None:
    mine = np.flatnonzero(graph.kind[ops] == ACROSS)
    if not len(mine):
        return None
    group = graph.group[ops[mine]]
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    return int(mine[0]), first, np.diff(np.r_[first, len(group)])
