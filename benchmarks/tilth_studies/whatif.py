"""Cost of stragglers in a foreign trace (arXiv 2505.05713, section 4), by a replay of its operations.

``tilth.analysis.whatif`` has the definitions. The ideal of an operation is that of its peers in the whole trace.
"""

import math
from dataclasses import dataclass

import numpy as np

from tilth.analysis.replay import ACROSS, TOGETHER, Graph, schedule
from tilth.analysis.whatif import timed
from tilth_studies.dependencies import dependencies
from tilth_studies.slowdowns import GUILTY, Gain, Slowdown, Slowdowns, mended, mended_by
from tilth_studies.straggler_format import COMPUTE, OPTYPES, Trace

MERGED = {
    "forward-send": "forward-pp-comm", "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm", "backward-recv": "backward-pp-comm",
}  # fmt: skip
LOCAL = (*COMPUTE, "gc", "optimizer")
"""Types whose ideal is the mean: the work stays, its spread goes. All others: the median, because of outliers."""
SKEW = -0.01
"""Seconds; clocks of workers may differ. Transfer times and delays at or below it count as 0."""
BLOCK = 8_000_000
"""Bytes of one array of a replay, so that the working set stays near the cache."""


@dataclass(frozen=True)
class WhatIf(Slowdowns):
    """Findings of a foreign trace."""

    worst: list[tuple[int, int]]
    """(dp rank, stage) of the workers of M_W, chosen like the study by the shortcut."""
    m_p: Gain  # the stage with the greatest S
    m_l: Gain  # the spread of computes within a stage: each takes the mean of its type on its stage in that step


class TraceModel:
    """A trace ready for replay: recorded and ideal durations, in the order of the schedule."""

    def __init__(self, trace: Trace) -> None:
        self.trace, graph = trace, dependencies(trace)
        self.schedule = schedule(graph)
        order = self.schedule.order
        self.optype, self.stage = trace.optype[order], trace.stage[order]
        real = transfers(trace, graph)
        self.ideal = ideal(trace, real)[order]  # float64 [n]: seconds
        self.real = real[order]  # float64 [n, s, d]: seconds

    def seconds(self, keep: np.ndarray) -> np.ndarray:
        """float64 [s]: time of each step with ``keep``, bool [n] or [n, d], as recorded and all others ideal."""
        keep = keep.reshape(len(keep), 1, -1)
        blocks = self._blocks(self.real)
        return np.concatenate([self.schedule.seconds(np.where(keep, b, self.ideal[:, None, None])) for b in blocks])

    def times(self, duration: np.ndarray) -> np.ndarray:
        """float64 [s]: time of each step with these durations, [n, s, d]."""
        return np.concatenate([self.schedule.seconds(b) for b in self._blocks(duration)])

    def apart(self, keep: np.ndarray) -> np.ndarray:
        """float64 [d, s]: for each dp rank, time of each step with only its operations in ``keep``, bool [n], recorded.

        All other dp ranks are alike then, so one stands for them.
        """
        n, steps, dp = self.real.shape
        alike = min(dp, 2)
        flat = self.real.reshape(n, steps * dp, 1)
        found = []
        for real in self._blocks(flat, alike):
            duration = np.broadcast_to(self.ideal[:, None, None], (*real.shape[:2], alike)).copy()
            duration[keep, :, 0] = real[keep, :, 0]
            found.append(self.schedule.seconds(duration))
        return np.concatenate(found).reshape(steps, dp).T

    def _blocks(self, real: np.ndarray, width: int = 1) -> list[np.ndarray]:
        """Views of some steps each, with about BLOCK bytes per array."""
        size = max(1, BLOCK // (8 * real.shape[0] * real.shape[2] * width))
        return [real[:, i : i + size] for i in range(0, real.shape[1], size)]


def transfers(trace: Trace, graph: Graph) -> np.ndarray:
    """float64 [n, s, d]: durations without waiting; a communication counts from the launch of its last member."""
    latest = trace.start.copy()
    for kind in (TOGETHER, ACROSS):
        members = np.flatnonzero(graph.kind == kind)
        members = members[np.argsort(graph.group[members], kind="stable")]
        if kind == ACROSS:
            latest[members] = latest[members].max(-1, keepdims=True)
        _share(latest, members, graph.group)
    alone = (graph.kind != TOGETHER) & (graph.kind != ACROSS)
    moved = trace.start + trace.duration - latest
    moved[alone] = trace.duration[alone]
    return np.where(moved <= SKEW, 0.0, moved)


def _share(latest: np.ndarray, members: np.ndarray, group: np.ndarray) -> None:
    """Set each of the members, sorted by group, to the latest of its group, in place."""
    if not len(members):
        return
    names = group[members]
    first = np.flatnonzero(np.r_[True, names[1:] != names[:-1]])
    sizes = np.diff(np.r_[first, len(names)])
    latest[members] = np.repeat(np.maximum.reduceat(latest[members], first, axis=0), sizes, axis=0)


def ideal(trace: Trace, real: np.ndarray) -> np.ndarray:
    """float64 [n]: ideal duration of each operation, from all operations of its type."""
    result = np.zeros(len(trace.optype))
    for kind in np.unique(trace.optype):
        mine = trace.optype == kind
        result[mine] = np.mean(real[mine]) if OPTYPES[kind] in LOCAL else np.median(real[mine])
    return result


def what_if(trace: Trace, model: TraceModel | None = None) -> WhatIf:
    """Analyse a trace. Raises DataError if its operations do not match or take no time.

    model: that of the trace, if it exists already.
    """
    model = model or TraceModel(trace)
    everything = np.ones(len(model.optype), bool)
    replayed, best = timed(model, everything)

    def slowdown(keep: np.ndarray) -> Slowdown:
        return Slowdown.of(model.seconds(keep), best)

    def without(fix: np.ndarray) -> Gain:
        return mended(model, fix, replayed, best)

    by_stage = {p: slowdown(model.stage == p) for p in range(trace.stages)}
    by_dp = {d: Slowdown.of(seconds, best) for d, seconds in enumerate(model.apart(everything))}
    alone = np.stack([model.apart(model.stage == p) for p in range(trace.stages)])
    shortcut = np.minimum.outer([s.mean for s in by_stage.values()], [s.mean for s in by_dp.values()])
    worst = worst_workers(shortcut, trace.ranks)
    mine = np.zeros((len(model.stage), trace.dp), bool)
    for at, stage in worst:
        mine[model.stage == stage, at] = True
    last, slowest = trace.stages - 1, max(by_stage, key=lambda p: by_stage[p].mean)
    piped = trace.stages > 1
    places = np.indices(trace.ranks.shape)
    types = np.array([MERGED.get(name, name) for name in OPTYPES])[model.optype]
    return WhatIf(
        steps=trace.steps, recorded=trace.seconds, replayed=replayed, explained=replayed, ideal=best,
        by_optype={str(name): slowdown(types == name) for name in dict.fromkeys(types)}, by_stage=by_stage, by_dp=by_dp,
        workers=trace.ranks, dp=places[1], stage=places[0], exact=alone.mean(-1) / best.mean(),
        exact_per_step=alone / best, worst=worst, m_w=without(mine),
        m_s=without((model.stage == last) & piped), m_p=without((model.stage == slowest) & piped),
        m_c=without(~np.isin(model.optype, [OPTYPES.index(name) for name in LOCAL])),
        m_l=replaced(model, levelled(model), replayed, best),
    )  # fmt: skip


def worst_workers(scores: np.ndarray, ranks: np.ndarray) -> list[tuple[int, int]]:
    """(dp rank, stage) of the worst 3 % of workers, at least one; of equal ones the lower global rank. [p, d] each."""
    order = np.lexsort((ranks.ravel(), -scores.ravel()))[: math.ceil(GUILTY * scores.size)]
    return [(int(i % scores.shape[1]), int(i // scores.shape[1])) for i in order]


def replaced(model: TraceModel, even: np.ndarray, replayed: np.ndarray, best: np.ndarray) -> Gain:
    """Gain if operations take the durations ``even``, [n, s, d], instead of the recorded ones."""
    only = model.ideal[:, None, None] + model.real - even
    return mended_by(model.times(even), model.times(np.maximum(only, 0)), replayed, best)


def levelled(model: TraceModel) -> np.ndarray:
    """float64 [n, s, d]: durations with the mean of its type on its stage in that step for each compute."""
    even = model.real.copy()
    for stage in range(model.trace.stages):
        for name in COMPUTE:
            mine = (model.stage == stage) & (model.optype == OPTYPES.index(name))
            if mine.any():
                even[mine] = model.real[mine].mean((0, 2), keepdims=True)
    return even
