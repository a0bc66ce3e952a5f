"""Assignment of rows to micro-batches and ranks, from lengths and costs alone. Deterministic."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from tilth.core.errors import ArgumentError

T = TypeVar("T")
Numbers = Sequence[int] | Sequence[float] | np.ndarray


def portions(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items in order, some at a time: of at most ``most`` in all, or a larger one alone."""
    some, filled = list[T](), 0
    for item in items:
        if some and filled + size(item) > most:
            yield some
            some, filled = [], 0
        some.append(item)
        filled += size(item)
    if some:
        yield some


def micro_batches(lengths: Numbers, max_tokens: int) -> list[np.ndarray]:
    """Pack rows into micro-batches of at most ``max_tokens`` tokens: ascending int64 row indices of each.

    Best-fit decreasing: at most 11/9 of the fewest possible plus 4 (Johnson et al. 1974). Each row is in exactly one;
    a row longer than ``max_tokens`` is alone. Micro-batches are in the order of their first row.
    """
    sizes = np.asarray(lengths)
    members: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, micro-batch), ascending
    for row in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[row])
        at = bisect_left(room, (size, -1))
        if at < len(room):
            left, bin = room.pop(at)
            members[bin].append(row)
        else:
            left, bin = max_tokens, len(members)
            members.append([row])
        insort(room, (left - size, bin))
    return sorted((np.sort(np.array(m, np.int64)) for m in members), key=lambda m: m[0])


def balance(costs: Numbers, ranks: int) -> list[np.ndarray]:
    """Assign rows to ``ranks`` ranks with nearly equal sums of cost: ascending int64 row indices of each rank.

    Longest processing time first: the greatest sum is at most 4/3 - 1/(3 ranks) of the best one (Graham 1969). A rank
    may be left without rows if there are fewer rows than ranks.
    """
    weights, parts = np.asarray(costs, np.float64), _Loads(ranks)
    for row in np.argsort(-weights, kind="stable").tolist():
        parts.add([row], float(weights[row]))
    return parts.rows()


class _Loads:
    """Rows of each rank. What is added goes to the rank with the least load."""

    def __init__(self, ranks: int) -> None:
        self._members: list[list[int]] = [[] for _ in range(ranks)]
        self._loads = [(0.0, rank) for rank in range(ranks)]

    @property
    def least(self) -> float:
        """Load of the rank that gets what is added."""
        return self._loads[0][0]

    def add(self, rows: list[int], cost: float) -> None:
        """Add rows with this cost together."""
        load, rank = self._loads[0]
        self._members[rank] += rows
        heapq.heapreplace(self._loads, (load + cost, rank))

    def rows(self) -> list[np.ndarray]:
        """Return the rows of each rank: int64, ascending."""
        return [np.sort(np.array(rows, np.int64)) for rows in self._members]


APART = 1.1
"""``divide`` keeps groups whole up to this multiple of the greatest load of ``balance``."""


def divide(lengths: Numbers | None, groups: Numbers | None, parts: int) -> list[np.ndarray]:
    """Divide rows of a batch over data-parallel ranks: ascending int64 row indices of each of ``parts``.

    lengths: tokens of each row [n] (or any cost); None: every row costs the same, and then groups give n. groups: rows
    with the same number are kept on one rank, as far as the greatest load stays within 10 % of what ``balance``
    reaches; None: every row is alone. Whole groups go, heaviest first, to the rank with the least load; rows of groups
    that fit nowhere go one by one. Each row is in exactly one part; parts may be empty. Raises ArgumentError if both
    are None or differ in size.
    """
    if lengths is None and groups is None:
        raise ArgumentError("divide needs the lengths or the groups of the rows", key="lengths")
    ids = np.asarray(groups if groups is not None else np.arange(len(np.asarray(lengths))))
    costs = np.ones(len(ids)) if lengths is None else np.asarray(lengths, np.float64)
    if len(costs) != len(ids):
        raise ArgumentError(f"{len(costs)} lengths and {len(ids)} groups; both have one number per row", key="groups")
    free = balance(costs, parts)
    if groups is None or parts == 1:
        return free
    most = APART * max(float(costs[rows].sum()) for rows in free)
    together = _together(costs, ids, parts, most)
    fits = max(float(costs[rows].sum()) for rows in together) <= most
    return together if fits else free


def _together(costs: np.ndarray, ids: np.ndarray, parts: int, most: float) -> list[np.ndarray]:
    """Assign whole groups to ranks up to the load ``most``, then the rows of the other groups."""
    found, left = _Loads(parts), list[np.ndarray]()
    for rows in _groups(costs, ids):
        cost = float(costs[rows].sum())
        if found.least + cost > most:
            left.append(rows)
        else:
            found.add(rows.tolist(), cost)
    single = np.concatenate(left) if left else np.empty(0, np.int64)
    for row in single[np.lexsort((single, -costs[single]))].tolist():
        found.add([row], float(costs[row]))
    return found.rows()


def _groups(costs: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each group, costliest group first; equal groups in order of their first row."""
    order = np.argsort(ids, kind="stable")
    cuts = np.flatnonzero(np.diff(ids[order])) + 1
    groups = [rows for rows in np.split(order, cuts) if len(rows)]
    return sorted(groups, key=lambda rows: (-float(costs[rows].sum()), int(rows[0])))
