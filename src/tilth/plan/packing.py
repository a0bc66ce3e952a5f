"""Assignment of rows to micro-batches and ranks, from lengths and costs alone. Deterministic."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from tilth.core.errors import ArgumentError, PlanError

Numbers = Sequence[int] | Sequence[float] | np.ndarray


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


Method = Literal["longest", "differencing"]
"""Rule of ``balance``: longest processing time first, or largest differencing."""


def balance(
    costs: Numbers,
    ranks: int,
    *,
    method: Method = "longest",
    lengths: Numbers | None = None,
    max_tokens: float = math.inf,
    max_rows: float = math.inf,
) -> list[np.ndarray]:
    """Assign rows to ``ranks`` ranks with nearly equal sums of cost: ascending int64 row indices of each rank.

    longest: the greatest sum is at most 4/3 - 1/(3 ranks) of the best one (Graham 1969). differencing: sets with the
    most uneven sums are joined, the largest of one with the least of the other (Karmarkar and Karp 1982); more even
    where rows are few, and slower. max_tokens, max_rows: of a rank; a row goes to the rank with the least load of those
    that have room. lengths: tokens [n], by default the costs. A rank may be left without rows if there are fewer rows
    than ranks. Raises PlanError where no rank has room for a row.
    """
    weights = np.asarray(costs, np.float64)
    tokens = weights if lengths is None else np.asarray(lengths, np.float64)
    parts = _LimitedParts(weights, tokens, max_tokens, max_rows, ranks)
    left = np.argsort(-weights, kind="stable").tolist()
    if method == "differencing" and left:
        left = parts.take(_differencing(weights, ranks))
    parts.add(left)
    return [np.sort(np.array(m, np.int64)) for m in parts.members]


class _LimitedParts:
    """Rows of each rank, within its limits."""

    def __init__(self, costs: np.ndarray, tokens: np.ndarray, max_tokens: float, max_rows: float, ranks: int) -> None:
        self._costs, self._tokens = costs.tolist(), tokens.tolist()
        self._most, self._rows = max_tokens, max_rows
        self.members: list[list[int]] = [[] for _ in range(ranks)]
        self._sums = [0.0] * ranks
        self._loads = [0.0] * ranks

    def _fits(self, rank: int, row: int) -> bool:
        return len(self.members[rank]) < self._rows and self._sums[rank] + self._tokens[row] <= self._most

    def _put(self, rank: int, row: int) -> None:
        self.members[rank].append(row)
        self._sums[rank] += self._tokens[row]
        self._loads[rank] += self._costs[row]

    def take(self, members: list[list[int]]) -> list[int]:
        """Take rows over as far as they fit, and return the others, both costliest first."""
        left = []
        for rank, rows in enumerate(members):
            for row in sorted(rows, key=lambda row: (-self._costs[row], row)):
                if self._fits(rank, row):
                    self._put(rank, row)
                else:
                    left.append(row)
        return sorted(left, key=lambda row: (-self._costs[row], row))

    def add(self, rows: list[int]) -> None:
        """Add rows in this order, each to the rank with the least load of those that have room."""
        load = [(total, rank) for rank, total in enumerate(self._loads)]
        heapq.heapify(load)
        for row in rows:
            full = []
            while load and not self._fits(load[0][1], row):
                full.append(heapq.heappop(load))
            if not load:
                raise PlanError(
                    f"row {row} of {self._tokens[row]:g} tokens fits none of {len(full)} parts of at most "
                    f"{self._most:g} tokens and {self._rows:g} rows; take more parts",
                    key="parts",
                )
            rank = load[0][1]
            self._put(rank, row)
            heapq.heapreplace(load, (self._loads[rank], rank))
            for one in full:
                heapq.heappush(load, one)


class _Joined(NamedTuple):
    """Two sets of parts: part ``order[j]`` of the first and the part as far from the end of the second are part j."""

    first: int
    second: int
    order: np.ndarray


def _differencing(costs: np.ndarray, parts: int) -> list[list[int]]:
    """Join sets of parts, at first of one row each, until one is left; return the rows of its parts."""
    joined: list[_Joined] = []
    sums: dict[int, np.ndarray] = {}

    def sums_of(number: int) -> np.ndarray:
        return sums.pop(number) if number >= len(costs) else np.pad(costs[number : number + 1], (0, parts - 1))

    heap = [(-cost, row) for row, cost in enumerate(costs.tolist())]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        whole = sums_of(first) + sums_of(second)[::-1]
        order = np.argsort(-whole, kind="stable")
        whole = whole[order]
        sums[len(costs) + len(joined)] = whole - whole[-1]
        heapq.heappush(heap, (float(whole[-1] - whole[0]), len(costs) + len(joined)))
        joined.append(_Joined(first, second, order))
    found: list[list[int]] = [[] for _ in range(parts)]
    left = [(heap[0][1], np.arange(parts))]
    while left:
        number, names = left.pop()
        if number < len(costs):
            found[names[0]].append(number)
            continue
        one, outer = joined[number - len(costs)], np.empty(parts, np.int64)
        outer[one.order] = names
        left += [(one.first, outer), (one.second, outer[::-1])]
    return found


APART = 1.1
"""``divide`` keeps groups whole up to this multiple of the greatest load of ``balance``."""


def divide(lengths: Numbers | None, groups: Numbers | None, parts: int, method: Method = "longest") -> list[np.ndarray]:
    """Divide rows of a batch over data-parallel ranks: ascending int64 row indices of each of ``parts``.

    lengths: tokens of each row [n] (or any cost); None: every row costs the same, and then groups give n. groups: rows
    with the same number are kept on one rank, as far as the greatest load stays within 10 % of what ``balance``
    reaches; None: every row is alone. method: of ``balance``, for rows that are alone. Whole groups go, heaviest first,
    to the rank with the least load; rows of groups that fit nowhere go one by one. Each row is in exactly one part;
    parts may be empty. Raises ArgumentError if both are None or differ in size.
    """
    if lengths is None and groups is None:
        raise ArgumentError("divide needs the lengths or the groups of the rows", key="lengths")
    ids = np.asarray(groups if groups is not None else np.arange(len(np.asarray(lengths))))
    costs = np.ones(len(ids)) if lengths is None else np.asarray(lengths, np.float64)
    if len(costs) != len(ids):
        raise ArgumentError(f"{len(costs)} lengths and {len(ids)} groups; both have one number per row", key="groups")
    free = balance(costs, parts, method=method)
    if groups is None or parts == 1:
        return free
    most = APART * max(float(costs[rows].sum()) for rows in free)
    together = _together(costs, ids, parts, most)
    fits = max(float(costs[rows].sum()) for rows in together) <= most
    return together if fits else free


def _together(costs: np.ndarray, ids: np.ndarray, parts: int, most: float) -> list[np.ndarray]:
    """Assign whole groups to ranks up to the load ``most``, then the rows of the other groups."""
    members: list[list[np.ndarray]] = [[] for _ in range(parts)]
    load = [(0.0, rank) for rank in range(parts)]
    left: list[np.ndarray] = []
    for rows in _groups(costs, ids):
        cost = float(costs[rows].sum())
        if load[0][0] + cost > most:
            left.append(rows)
            continue
        members[load[0][1]].append(rows)
        heapq.heapreplace(load, (load[0][0] + cost, load[0][1]))
    single = np.concatenate(left) if left else np.empty(0, np.int64)
    for row in single[np.lexsort((single, -costs[single]))]:
        total, rank = load[0]
        members[rank].append(row[None])
        heapq.heapreplace(load, (total + float(costs[row]), rank))
    return [np.sort(np.concatenate([np.empty(0, np.int64), *rows])) for rows in members]


def _groups(costs: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each group, costliest group first; equal groups in order of their first row."""
    order = np.argsort(ids, kind="stable")
    cuts = np.flatnonzero(np.diff(ids[order])) + 1
    groups = [rows for rows in np.split(order, cuts) if len(rows)]
    return sorted(groups, key=lambda rows: (-float(costs[rows].sum()), int(rows[0])))
