"""Time of a step if some operations behaved like their peers (arXiv 2505.05713, section 4), and its likely cause.

T is the replayed time of the recorded durations, T_ideal that of durations equal to their peers' (mean of a compute
type, median of a communication type), both without the delays that the model does not explain. S = T / T_ideal; the S
of a type, stage, dp rank or worker is that of a step in which only they keep their recorded durations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tilth.core.errors import DataError


@dataclass(frozen=True)
class Replayed:
    """Recorded, replayed and ideal times of s steps, in seconds."""

    steps: np.ndarray
    recorded: np.ndarray  # float64 [s]: as traced
    replayed: np.ndarray  # float64 [s]: T of the recorded durations
    explained: np.ndarray  # float64 [s]: the part of ``recorded`` that the model explains
    ideal: np.ndarray  # float64 [s]: T_ideal

    @property
    def slowdown(self) -> float:
        """S."""
        return float(self.replayed.mean() / self.ideal.mean())

    @property
    def waste(self) -> float:
        """Share of the time lost, 1 - 1 / S."""
        return 1 - 1 / self.slowdown

    @property
    def error(self) -> float:
        """Error of the model: recorded over explained time, means over steps, less 1."""
        return float(self.recorded.mean() / self.explained.mean() - 1)


class Replays(Protocol):
    """Steps that can be replayed with some of their times ideal."""

    def seconds(self, keep: np.ndarray) -> np.ndarray:
        """float64 [s]: time of each step with the operations in ``keep`` as recorded and all others ideal."""


def timed(model: Replays, everything: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [s] each: times of the steps as recorded, and in the ideal. Raises DataError if they are 0."""
    replayed, best = model.seconds(everything), model.seconds(~everything)
    if min(best.min(), replayed.min()) <= 0:
        raise DataError("a step takes no time: its durations are 0", key="durations")
    return replayed, best


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
