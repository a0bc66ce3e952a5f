"""Where a replayed job loses its time: S of operations, stages, dp ranks and workers, and what mending them gains.

``tilth.analysis.whatif`` has the definitions of T and S (arXiv 2505.05713, section 4).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilth.analysis.whatif import Replayed, Replays

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
class Slowdowns(Replayed):
    """Slowdowns of w workers and of their operations.

    Workers are [stages, dp ranks] in a foreign trace; in a run, which has one stage, [w] (0 inline).
    """

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
    def per_step(self) -> np.ndarray:
        """float64 [s]: S of each step."""
        return self.replayed / self.ideal

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
