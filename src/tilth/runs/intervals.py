"""Sets of ids that mostly follow one another, as intervals."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any


class Intervals(list[tuple[int, int]]):
    """A set of integers as sorted pairs [start, stop) without neighbours that touch; as a list it is plain JSON.

    A look-up takes O(log n) of n pairs.
    """

    def __init__(self, pairs: Iterable[Sequence[int]] = ()) -> None:
        """pairs: [start, stop) in any order, also such that overlap."""
        super().__init__()
        for start, stop in pairs:
            self.add(start, stop)

    def add(self, start: int, stop: int | None = None) -> None:
        """Add the ids of [start, stop); stop: default ``start + 1``."""
        stop = start + 1 if stop is None else stop
        if start >= stop:
            return
        first, last = self._first_at(start), bisect_right(self, stop, key=_start)
        if first < last:
            start, stop = min(start, self[first][0]), max(stop, self[last - 1][1])
        self[first:last] = [(start, stop)]

    def _first_at(self, place: int) -> int:
        """Return the index of the first pair that contains this place, ends there, or comes after it."""
        before = bisect_right(self, place, key=_start)
        return before - 1 if before and self[before - 1][1] >= place else before

    def __contains__(self, id: Any) -> bool:
        """Return True if an id is in the set."""
        before = bisect_right(self, id, key=_start)
        return before > 0 and id < self[before - 1][1]


def _start(pair: tuple[int, int]) -> int:
    return pair[0]
