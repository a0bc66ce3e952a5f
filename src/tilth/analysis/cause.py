"""Types of a likely cause of slow steps, and how alike forward and backward times are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Place = dict[str, int | str]
"""Names of a worker (dp, stage, rank), a stage, or a type of operation."""


@dataclass(frozen=True)
class Finding:
    """One cause. ``kind``: slow-worker, stage-imbalance, sequence-lengths, garbage-collection, communication; of a run
    also controller."""

    kind: str
    share: float
    text: str
    where: tuple[Place, ...] = ()
    seconds: float | None = None
    """Of a run: median time of a step without the cause."""


@dataclass(frozen=True)
class Cause:
    """A sentence, its findings (the likeliest first), and the numbers that they are based on."""

    text: str
    findings: tuple[Finding, ...]
    evidence: dict[str, float]


def medians(workers: Sequence[tuple[np.ndarray, ...]]) -> tuple[float, float]:
    """Medians over workers of the correlation of forward with backward times, and of the variation of forwards."""
    r, variation = np.median([pearson(f, b) for f, b in workers], axis=0) if workers else (0.0, 0.0)
    return float(r), float(variation)


def pearson(f: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Correlation (0 if one of them is constant) and coefficient of variation of the first."""
    if not len(f) or not f.mean():
        return 0.0, 0.0
    x, y = f - f.mean(), b - b.mean()
    size = np.sqrt((x @ x) * (y @ y))
    tiny = 1e-12 * f.mean() * max(b.mean(), 1e-300) * len(f)
    return float(x @ y / size) if size > tiny else 0.0, float(f.std() / f.mean())
