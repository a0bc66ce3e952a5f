"""Share of a long sequence's activations that moves to the host, and the ranks that this saves.

Equation 3 of ByteScale, arXiv 2502.21231, with a limit on the host's memory that the paper leaves out. Whatever moves,
a rank keeps the activations of two layers: the last one, and one on its way. Only what a layer's forward pass hides
moves.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

RESIDENT = 2
"""Layers whose activations stay on the device."""
Positive = Annotated[float, Field(gt=0)]
NEARLY = 1e-9
"""Part of a rank by which rounding may exceed a whole number of ranks."""


class HostRates(NamedTuple):
    """Measured of one rank's device and its host."""

    bandwidth: Positive
    """Bytes a second to the host and back, the slower of both."""
    host: Positive
    """Bytes of host memory for one rank."""
    flops: Positive
    """Matrix products, FLOP/s."""


class OffloadLimits(NamedTuple):
    """One rank's model, link to the host, and host memory."""

    layers: int
    """Layers of the rank."""
    per_token: float
    """Bytes of one layer's activations for each token; what is constant is on every rank alike."""
    work: Callable[[np.ndarray], np.ndarray]
    """Lengths [n] -> FLOPs of one layer's forward pass over each sequence on one rank."""
    rates: HostRates

    def movable(self, lengths: np.ndarray) -> np.ndarray:
        """Return the greatest share of the rows that can move while a layer computes, float64 [n].

        Compute and bytes of a rank are both the part of a sequence that it has, so the share is that of any number of
        ranks.
        """
        seconds = self.work(lengths) / self.rates.flops
        return np.minimum(1.0, seconds * self.rates.bandwidth / (self.per_token * np.maximum(lengths, 1)))


def ranks_needed(lengths: np.ndarray, capacity: int, limits: OffloadLimits, ratio: np.ndarray | float) -> np.ndarray:
    """Return the ranks that hold each sequence if a share ``ratio`` of its rows moves: int64 [n] (D of equation 3)."""
    kept = RESIDENT + (1 - np.asarray(ratio)) * (limits.layers - RESIDENT)
    return _ceil(kept * lengths / (limits.layers * capacity))


def fewest_ranks(lengths: np.ndarray, capacity: int, limits: OffloadLimits | None) -> np.ndarray:
    """Return the fewest ranks that hold each sequence, at ``capacity`` tokens each: int64 [n], at least 1.

    limits: with these, activations of sequences that are longer than the capacity may move to the host.
    """
    alone = _ceil(lengths / capacity)
    if limits is None or limits.layers <= RESIDENT:
        return alone
    spared = ranks_needed(lengths, capacity, limits, limits.movable(lengths))
    held = _ceil(lengths / (capacity + limits.rates.host / (limits.layers * limits.per_token)))
    return np.where(lengths > capacity, np.minimum(alone, np.maximum(spared, held)), alone)


def ratios(lengths: np.ndarray, ranks: np.ndarray | int, capacity: int, limits: OffloadLimits) -> np.ndarray:
    """Return the least share of the rows of each sequence that has to move if ``ranks`` ranks hold it: float64 [n].

    At ``fewest_ranks`` or more it is at most what a layer hides and what the host holds; 0 where nothing has to move.
    """
    over = 1 - np.asarray(ranks) * capacity / np.maximum(lengths, 1)
    return np.clip(over * limits.layers / max(limits.layers - RESIDENT, 1), 0.0, 1.0)


def _ceil(ranks: np.ndarray) -> np.ndarray:
    return np.maximum(np.ceil(ranks - NEARLY), 1).astype(np.int64)
