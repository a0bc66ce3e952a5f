"""The order in which rows are drawn: endless, and a pure function of seed and position, so nothing is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tilth.core.random import Stream


class Order:
    """Indices and their endless sequence: one permutation of all after another, an epoch each.

    ``rows``: int64 [n], the indices, ascending.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._orders: dict[tuple[Stream, int], np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, stream: Stream, start: int, count: int) -> np.ndarray:
        """Return int64 [count]: the indices from place ``start`` of the sequence on."""
        epochs, places = np.divmod(np.arange(start, start + count), len(self))
        parts = [self.rows[self._order(stream, int(e))[places[epochs == e]]] for e in np.unique(epochs)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _order(self, base: Stream, epoch: int) -> np.ndarray:
        from tilth.core.random import stream  # imports torch, which mistakes in the data need not wait for

        if (base, epoch) not in self._orders:
            self._orders = dict(list(self._orders.items())[-3:])  # few are in use at a time; any can be computed again
            permutation = stream(base.seed, base.id, "epoch", epoch).permutation(len(self))
            self._orders[base, epoch] = np.asarray(permutation, dtype=np.int64)
        return self._orders[base, epoch]
