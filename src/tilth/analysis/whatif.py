"""Time of a step if some operations behaved like their peers (arXiv 2505.05713, section 4), and its likely cause.

T is the replayed time of the recorded durations, T_ideal that of durations equal to their peers' (mean of a compute
type, median of a communication type), both without the delays that the model does not explain. S = T / T_ideal; the S
of a type, stage, dp rank or worker is that of a step in which only they keep their recorded durations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tilth.core.errors import DataError

GUILTY = 0.03
"""Share of workers that M_W makes ideal."""


@dataclass(frozen=True)
class Slowdown:
    """S of a group of operations: T with only them as recorded, over T_ideal."""

    mean: float  # of the mean times over steps
    per_step: np.ndarray  # float64 [s]

    @classmethod
    def of(cls, seconds: np.ndarray, best: np.ndarray) -> "Slowdown":
        """Divide times of each step by those in the ideal."""
        return cls(float(seconds.mean() / best.mean()), seconds / best)


@dataclass(frozen=True)
class Gain:
    """Gain if a group of operations is made ideal (M_W, M_S), and loss if only it is as recorded."""

    share: float
    """(T - T_fixed) / (T - T_ideal): 1 if it explains all of the loss. Below 0 and above 1 are possible."""
    seconds: float  # T_fixed
    added: float  # (T_added - T_ideal) / (T - T_ideal)
    added_seconds: float  # T_added: all others ideal


@dataclass(frozen=True)
class Replayed:
    """Recorded, replayed and ideal times of s steps on w workers, in seconds.

    Workers are [stages, dp ranks] in a foreign trace; in a run, which has one stage, [w] (0 inline).
    """

    steps: np.ndarray
    recorded: np.ndarray  # float64 [s]: as traced
    replayed: np.ndarray  # float64 [s]: T of the recorded durations
    explained: np.ndarray  # float64 [s]: the part of ``recorded`` that the model explains
    ideal: np.ndarray  # float64 [s]: T_ideal
    by_optype: dict[str, Slowdown]
    by_stage: dict[int, Slowdown]  # empty without stages
    by_dp: dict[int, Slowdown]
    workers: np.ndarray  # int64 [w]: global ranks
    dp: np.ndarray  # int64 [w]: place of each among the ranks that share the data
    stage: np.ndarray  # int64 [w]
    exact: np.ndarray  # float64 [w]: S of each worker by a separate replay
    exact_per_step: np.ndarray  # float64 [w, s]
    m_w: Gain  # the worst 3 % of workers, at least one
    m_s: Gain  # the last stage; a share of 0 without a pipeline
    m_c: Gain  # all communication

    @property
    def slowdown(self) -> float:
        """S."""
        return float(self.replayed.mean() / self.ideal.mean())

    @property
    def per_step(self) -> np.ndarray:
        """float64 [s]: S of each step."""
        return self.replayed / self.ideal

    @property
    def waste(self) -> float:
        """Share of the time lost, 1 - 1 / S."""
        return 1 - 1 / self.slowdown

    @property
    def error(self) -> float:
        """Error of the model: recorded over explained time, means over steps, less 1."""
        return float(self.recorded.mean() / self.explained.mean() - 1)

    @property
    def worst_error(self) -> float:
        """Greatest absolute error of a step."""
        return float(np.abs(self.recorded / self.explained - 1).max())

    @property
    def shortcut(self) -> np.ndarray:
        """float64 [w]: the study's S of each worker, the lesser of its stage's and its dp rank's."""
        stages = [self.by_stage[s].mean if self.by_stage else self.slowdown for s in self.stage.ravel().tolist()]
        dp = [self.by_dp[d].mean for d in self.dp.ravel().tolist()]
        return np.minimum(stages, dp).reshape(self.exact.shape)

    @property
    def by_worker(self) -> list[dict[str, Any]]:
        """Names and S of every worker."""
        names = ("dp", "stage", "rank", "exact", "shortcut")
        columns = (self.dp, self.stage, self.workers, self.exact, self.shortcut)
        return [dict(zip(names, row)) for row in zip(*(c.ravel().tolist() for c in columns))]

    @property
    def slowest(self) -> list[dict[str, Any]]:
        """Every worker, the slowest first."""
        return sorted(self.by_worker, key=lambda w: (-w["exact"], w["rank"]))


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


def mended(model: Replays, fix: np.ndarray, replayed: np.ndarray, best: np.ndarray) -> Gain:
    """Gain if ``fix``, in the form that ``seconds`` takes, is made ideal; nothing where it is empty."""
    if not fix.any():
        return Gain(0.0, float(replayed.mean()), 0.0, float(best.mean()))
    return mended_by(model.seconds(~fix), model.seconds(fix), replayed, best)


def mended_by(fixed: np.ndarray, added: np.ndarray, replayed: np.ndarray, best: np.ndarray) -> Gain:
    """Gain from times of each step: with a group ideal, with only the group recorded, all recorded, all ideal."""
    lost = replayed.mean() - best.mean()
    scale = 1 / lost if lost else 0.0
    gain, loss = replayed.mean() - fixed.mean(), added.mean() - best.mean()
    return Gain(float(gain * scale), float(fixed.mean()), float(loss * scale), float(added.mean()))


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
