"""Membership of batches: which sample of which source stands at each position, a pure function of seed and position.

It depends on weights, schedules and sizes alone: neither on the number of ranks nor on where a sample is computed, and
a resume needs the position and nothing else. At position p the source is where a Weyl sequence, ``p * golden ratio mod
1`` from an offset of the seed, falls among the shares of the weights: each source is ahead of its share by a few
samples at most. Inside a source samples come in the order of ``Order``: each once in an epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tilth.config.schema import MixtureSource
from tilth.core.errors import DataError
from tilth.data.order import Order

if TYPE_CHECKING:
    from tilth.core.random import Stream

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 13
"""Samples between two states that are kept, from which a draw begins to count."""
_FAR = 1 << 62


class MixtureRow(NamedTuple):
    """One source of a mixture: its samples to train on, their tokens (None: not counted), its share at the start."""

    source: str
    samples: int
    tokens: int | None
    weight: float


@dataclass(frozen=True)
class _State:
    """Samples before a position: of each source, and tokens of all."""

    counts: np.ndarray
    tokens: int = 0

    @property
    def position(self) -> int:
        return int(self.counts.sum())


class Mixture:
    """Samples of several sources in one endless order (``flows.sampler.Split``)."""

    def __init__(
        self,
        parts: Sequence[MixtureSource],
        rows: Sequence[np.ndarray],
        each: int,
        steps: Mapping[Stream, int] = MappingProxyType({}),
        lengths: np.ndarray | None = None,
        others: Mapping[Stream, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """rows: indices of each source's samples; no two sources share one, and they ascend from source to source.

        each: samples of a step; steps: those of streams that differ. lengths: tokens of the sample at each index, which
        schedules by tokens need; others: of streams that differ. Raises ``DataError`` for a source without samples.
        """
        for part, own in zip(parts, rows):
            if not len(own):
                message = f"source {part.name} of data.mixture has no sample to train on; leave it out"
                raise DataError(message, key=f"data.mixture.{part.name}.empty")
        self.parts, self.orders, self._lengths = parts, [Order(own) for own in rows], lengths
        self._each, self._steps, self._others = each, steps, others
        self._sizes = np.array([len(own) for own in rows], np.int64)
        self._ends = np.array([part.at_end != "repeat" for part in parts])
        self._points = [sorted((int(at), factor) for at, factor in part.schedule.items()) for part in parts]
        self._marks: dict[Stream, list[_State]] = {}
        self._offsets: dict[Stream, np.uint64] = {}

    def __len__(self) -> int:
        return int(self._sizes.sum())

    def take(self, stream: Stream, start: int, count: int) -> np.ndarray:
        """Return indices int64 [count] from position ``start`` of the stream's order. ``DataError`` at its end."""
        state, found = self._at(stream, start), [np.zeros(0, np.int64)]
        while count:
            chosen, after = self._segment(stream, state, count)
            found.append(self._rows(stream, chosen, state.counts))
            state, count = after, count - len(chosen)
        return np.concatenate(found)

    def counts(self, indices: np.ndarray) -> dict[str, int]:
        """Return the number of these samples by source."""
        lasts = [order.rows[-1] for order in self.orders]
        own = np.bincount(np.searchsorted(lasts, indices), minlength=len(self.parts))
        return {part.name: int(count) for part, count in zip(self.parts, own)}

    def drawn(self, stream: Stream, count: int) -> np.ndarray:
        """Return the number of samples of each source among the first ``count``, int64 [sources]. ``DataError`` if
        there are fewer."""
        return self._at(stream, count).counts

    def ends(self, stream: Stream, start: int, count: int) -> list[str]:
        """Return a line on each source that has given its last sample within these positions."""
        before, after = (self.drawn(stream, at) for at in (start, start + count))
        lines = []
        for part, size, one, other in zip(self.parts, self._sizes, before // self._sizes, after // self._sizes):
            if one < other:
                then = "begins again" if part.at_end == "repeat" else "leaves the mixture"
                lines.append(f"source {part.name} has given all of its {size:,} samples, and {then}")
        return lines

    def check(self, stream: Stream, count: int) -> None:
        """Raise ``DataError`` now for a source, or a schedule, that ends before this many samples."""
        self.drawn(stream, count)

    def table(self) -> list[MixtureRow]:
        """Return a row for each source."""
        weights = self._weights(np.zeros(len(self.parts), np.int64), 0, 0)
        total = sum(weights)
        tokens = [None if self._lengths is None else int(self._lengths[order.rows].sum()) for order in self.orders]
        return [
            MixtureRow(part.name, int(size), own, weight / total)
            for part, size, own, weight in zip(self.parts, self._sizes, tokens, weights)
        ]

    # ---- positions ----

    def _at(self, stream: Stream, position: int) -> _State:
        """Return the state before a position."""
        marks = self._marks.setdefault(stream, [_State(np.zeros(len(self.parts), np.int64))])
        state = marks[bisect_right(marks, position, key=lambda mark: mark.position) - 1]
        while (left := position - state.position) > 0:
            _, state = self._segment(stream, state, min(left, _BLOCK))
            if state.position >= marks[-1].position + _BLOCK:
                marks.append(state)
        return state

    def _segment(self, stream: Stream, state: _State, most: int) -> tuple[np.ndarray, _State]:
        """Return the source of each of the next samples, at most this many, up to where a weight changes or a source
        ends, and the state behind them."""
        each, start = self._steps.get(stream, self._each), state.position
        step = start // each
        weights = self._weights(state.counts, step, state.tokens)
        if not sum(weights) > 0:
            names = ", ".join(part.name for part in self.parts)
            message = (
                f"the weights of data.mixture ({names}) sum to 0 from step {step:,} on, after {start:,} samples: a "
                "schedule, or every source, ends before the run; give one a weight, or at_end = 'repeat'"
            )
            raise DataError(message, key="data.mixture.weight")
        count = min(most, self._next("steps", step) * each - start)
        words = np.arange(start, start + count, dtype=np.uint64) * _GOLDEN + self._offset(stream)
        edges = np.cumsum(weights)
        chosen = np.searchsorted((edges / edges[-1])[:-1], (words >> np.uint64(11)) * 2.0**-53, side="right")
        chosen = chosen[: self._whole(chosen, state.counts)]
        lengths = self._others.get(stream, self._lengths)
        if lengths is None or not len(chosen):
            after = state.counts + np.bincount(chosen, minlength=len(self.parts))
            return chosen, _State(after)
        tokens = np.cumsum(lengths[self._rows(stream, chosen, state.counts)], dtype=np.int64) + state.tokens
        chosen = chosen[: 1 + int(np.searchsorted(tokens[:-1], self._next("tokens", state.tokens)))]
        after = state.counts + np.bincount(chosen, minlength=len(self.parts))
        return chosen, _State(after, int(tokens[len(chosen) - 1]))

    def _whole(self, chosen: np.ndarray, counts: np.ndarray) -> int:
        """Return the number of samples before the first of a source that has none left. Raises ``DataError`` if it is
        the next one, of a source that stops the run."""
        over = np.zeros(len(chosen), bool)
        for number in np.flatnonzero(self._ends):
            mine = chosen == number
            over |= mine & (np.cumsum(mine) + counts[number] > self._sizes[number])
        first = int(over.argmax()) if over.any() else len(chosen)
        if first or not len(chosen):
            return self._left(chosen[:first], counts)
        name, size = self.parts[chosen[0]].name, self._sizes[chosen[0]]
        message = (
            f"source {name} of data.mixture ends: all of its {size:,} samples are drawn after {int(counts.sum()):,} of "
            "all sources; at_end = 'repeat' goes through them again, 'leave' goes on without it"
        )
        raise DataError(message, key=f"data.mixture.{name}.at_end")

    def _left(self, chosen: np.ndarray, counts: np.ndarray) -> int:
        """Return the number of samples up to the last one of the first source that leaves, where weights change."""
        count = len(chosen)
        for number in np.flatnonzero([part.at_end == "leave" for part in self.parts]):
            mine, left = np.flatnonzero(chosen == number), self._sizes[number] - counts[number]
            if 0 < left <= len(mine):
                count = min(count, int(mine[left - 1]) + 1)
        return count

    def _weights(self, counts: np.ndarray, step: int, tokens: int) -> list[float]:
        """Return the weight of each source, 0 for one that has left."""
        found = []
        for part, points, count, size in zip(self.parts, self._points, counts, self._sizes):
            now = tokens if part.schedule_by == "tokens" else step
            factor = next((factor for at, factor in reversed(points) if at <= now), 1.0)
            found.append(0.0 if part.at_end == "leave" and count >= size else part.weight * factor)
        return found

    def _next(self, unit: str, now: int) -> int:
        """Return the next step, or number of tokens, at which a schedule changes a weight."""
        points = (p for part, own in zip(self.parts, self._points) if part.schedule_by == unit for p, _ in own)
        return min((point for point in points if point > now), default=_FAR)

    def _rows(self, stream: Stream, chosen: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the indices of samples by their sources, from these counts on."""
        from tilth.core.random import stream as named  # imports torch, which mistakes in the data need not wait for

        found = np.zeros(len(chosen), np.int64)
        for number in np.unique(chosen).tolist():
            mine, part = chosen == number, self.parts[number]
            own = stream if len(self.parts) == 1 else named(stream.seed, stream.id, "source", part.name)
            found[mine] = self.orders[number].take(own, int(counts[number]), int(mine.sum()))
        return found

    def _offset(self, stream: Stream) -> np.uint64:
        if stream not in self._offsets:
            from tilth.core.random import stream as named

            low, high = named(stream.seed, stream.id, "mixture").bits(0, 2).tolist()
            self._offsets[stream] = np.uint64(high << 32 | low)
        return self._offsets[stream]
