"""Time of the workers' operations as one total, and bytes between controller and workers."""

import threading
from collections import Counter
from dataclasses import fields
from operator import attrgetter

from tilth.trace.spans import Total, total_of

Sums = dict[str, list[float]]
DONE = tuple(f.name in ("tokens", "bytes", "flops", "phase_tokens") for f in fields(Total))
"""True for the fields that count work; the others are durations and numbers of calls."""
_row = attrgetter(*(f.name for f in fields(Total)))


class Totals:
    """Sums of the workers' spans. The time of an operation is that of its slowest rank; its work is summed over the
    ranks that answer, so copies along other axes count once."""

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._times: list[Sums] = [{} for _ in range(workers)]

    def add(self, rank: int, sums: Sums, answers: bool, covered: bool = False) -> None:
        """Add the spans of one call, from ``recorder.rows``. covered: the call is part of a phase's time."""
        with self._lock:
            for op, row in sums.items():
                row = [*row[:-2], 0, 0] if covered else row  # phase_seconds and phase_tokens
                row = row if answers else [0 if done else value for value, done in zip(row, DONE)]
                before = self._times[rank].get(op)
                self._times[rank][op] = row if before is None else [a + b for a, b in zip(before, row)]

    def take(self) -> dict[str, Total]:
        """Return the sums since the last take, by operation."""
        with self._lock:
            times, self._times = self._times, [{} for _ in self._times]
        ops = dict.fromkeys(op for sums in times for op in sums)
        return {op: _joined([sums[op] for sums in times if op in sums]) for op in ops}


class Traffic:
    """Bytes by operation and direction, "sent" by the controller or "received"."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, operation: str, sent: int = 0, received: int = 0) -> None:
        """Count a call with its answer, or a payload column that the controller puts or gets."""
        with self._lock:
            for key, nbytes in (((operation, "sent"), sent), ((operation, "received"), received)):
                if nbytes:
                    self._bytes[key] += nbytes

    def take(self) -> dict[tuple[str, str], int]:
        """Return the sums above 0 since the last take."""
        with self._lock:
            found, self._bytes = self._bytes, Counter()
        return dict(found)


def _joined(rows: list[list[float]]) -> Total:
    return total_of([sum(c) if done else max(c) for c, done in zip(zip(*rows), DONE)])


def together(mine: dict[str, Total], other: dict[str, Total]) -> dict[str, Total]:
    """Add the sums of controller and workers, which work one after the other."""
    both = dict(mine)
    for op, total in other.items():
        row = zip(_row(both[op]), _row(total)) if op in both else [(value, 0) for value in _row(total)]
        both[op] = Total(*(a + b for a, b in row))
    return both
