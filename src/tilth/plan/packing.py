"""Rows into micro-batches and onto ranks, from lengths and costs alone. Deterministic."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

Numbers = Sequence[int] | Sequence[float] | np.ndarray


def micro_batches(lengths: Numbers, max_tokens: int) -> list[np.ndarray]:
    """Rows in micro-batches of at most ``max_tokens`` tokens each: int64 row indices, ascending.

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
    """Rows on ``ranks`` ranks with nearly equal sums of cost: int64 row indices, ascending, for each rank.

    Longest processing time first: the greatest sum is at most 4/3 - 1/(3 ranks) of the best one (Graham 1969).
    A rank may be left without rows if there are fewer rows than ranks.
    """
    weights = np.asarray(costs, np.float64)
    members: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    for row in np.argsort(-weights, kind="stable").tolist():
        total, rank = heapq.heappop(load)
        members[rank].append(row)
        heapq.heappush(load, (total + float(weights[row]), rank))
    return [np.sort(np.array(m, np.int64)) for m in members]
