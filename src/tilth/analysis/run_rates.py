"""Measure the work and the speed of each rank in a call: seconds against the cost of the work.

The cost of a span is the fitted time of its operation on all ranks of the run for its tokens and squared tokens
(``fit``). A rank's time beyond its cost is slowness; costs that differ between the ranks of a call are unequal work.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.run_graph import WORK, Steps, outermost
from tilth.analysis.run_replay import numbered
from tilth.plan.cost_fit import fit

APART = frozenset({"communication", "pause", "wait", "storage", "call", "unknown"})
"""Kinds of operations whose time does not depend on tokens."""


@dataclass(frozen=True, eq=False)
class Rates:
    """Work and cost of s steps on w ranks. A cost is in seconds of a typical rank."""

    steps: Steps
    frames: np.ndarray  # int64 [f]: rows of the calls that more than one rank executed
    spent: np.ndarray  # float64 [f]: seconds of work in each, without communications, pauses and waits
    costs: np.ndarray  # float64 [f, k]: what they should have taken, by operation

    @cached_property
    def cost(self) -> np.ndarray:
        """float64 [f]: cost of all operations together."""
        return self.costs.sum(1)

    @cached_property
    def at(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [f] each: indices of the step and of the rank of each call."""
        rows = self.steps.events
        return (
            np.searchsorted(self.steps.steps, rows.step[self.frames]),
            np.searchsorted(self.steps.workers, rows.rank[self.frames]),
        )

    @cached_property
    def rate(self) -> np.ndarray:
        """float64 [s, w]: seconds per cost; 1 where a rank shared no call."""
        shape = len(self.steps.steps), len(self.steps.workers)
        spent, cost = np.zeros(shape), np.zeros(shape)
        np.add.at(spent, self.at, self.spent)
        np.add.at(cost, self.at, self.cost)
        return np.divide(spent, cost, out=np.ones(shape), where=cost > 0)

    @cached_property
    def excess(self) -> np.ndarray:
        """float64 [s, w]: a rank's rate over the median of the others'."""
        return beside(self.rate)

    @cached_property
    def uneven(self) -> np.ndarray:
        """float64 [f, k]: cost of an operation in a call on its rank over the mean of the call's ranks; 1 without cost.

        By operation: longer rows do not lengthen an optimizer step, and ranks may meet in between.
        """
        mean = np.stack([self._shared(cost) for cost in self.costs.T], 1)
        return np.divide(self.costs, mean, out=np.ones(mean.shape), where=(mean > 0) & (self.costs > 0))

    def _shared(self, values: np.ndarray) -> np.ndarray:
        """float64 [f]: means over the ranks of a call."""
        which = numbered(self.steps.events.seq[self.frames][None])
        return (np.bincount(which, values) / np.bincount(which))[which]

    @cached_property
    def load(self) -> np.ndarray:
        """float64 [s, w]: a rank's cost over the mean cost of those that share its calls."""
        shape = len(self.steps.steps), len(self.steps.workers)
        cost, mean = np.zeros(shape), np.zeros(shape)
        np.add.at(cost, self.at, self.cost)
        np.add.at(mean, self.at, self._shared(self.cost))
        return np.divide(cost, mean, out=np.ones(shape), where=mean > 0)

    def scaled(self, factor: np.ndarray) -> np.ndarray:
        """float64 [n]: seconds of all nodes with each call's work times ``factor``: [f], or [f, k] by operation."""
        steps = self.steps
        place = np.full(len(steps.events), -1)
        place[self.frames] = np.arange(len(self.frames))
        mine = np.flatnonzero((steps.kind == WORK) & (place[steps.frame] >= 0))
        work = np.array([kind not in APART for kind in steps.kinds])
        more = (factor if factor.ndim == 2 else factor[:, None]) - 1
        seconds = steps.real.sum(1)
        seconds[mine] += (steps.real[mine] * more[place[steps.frame[mine]]]) @ work
        return seconds


def beside(rate: np.ndarray) -> np.ndarray:
    """float64 [s, w]: each rank's rate over the median of the others'; 1 where there are no others."""
    if rate.shape[1] < 2:
        return np.ones(rate.shape)
    others = [np.median(np.delete(rate, i, 1), 1) for i in range(rate.shape[1])]
    return rate / np.maximum(np.stack(others, 1), 1e-12)


def paces(events: Events, chosen: np.ndarray) -> np.ndarray:
    """float64 [w]: ``excess`` of each worker over all chosen events (bool [n]); costs are fitted on all events.

    NaN for a rank that shared no call, or whose peers did not.
    """
    worked, call = _worked(events)
    cost = _costs(events, worked)
    frames = np.unique(call)
    mine = np.isin(call, frames[_shared(events.seq[frames])]) & chosen[worked]
    rank = np.searchsorted(events.workers, events.rank[worked[mine]])
    spent, due = (np.bincount(rank, x[mine], len(events.workers)) for x in (events.own[worked] * 1e-9, cost))
    some, found = np.flatnonzero(due > 0), np.full(len(due), np.nan)
    if len(some) > 1:
        found[some] = beside((spent[some] / due[some])[None])[0]
    return found


def rates(steps: Steps) -> Rates:
    """Fit costs on the whole run, and sum the times of these steps' calls."""
    events = steps.events
    worked, call = _worked(events)
    cost = _costs(events, worked)
    frames = np.unique(steps.frame[~steps.home])
    frames = frames[_shared(events.seq[frames])]
    place = np.full(len(events), -1)
    place[frames] = np.arange(len(frames))
    mine = place[call] >= 0
    of = place[call[mine]]
    spent = np.bincount(of, events.own[worked[mine]] * 1e-9, len(frames))
    column = np.array([steps.ops.index(name) if name in steps.ops else -1 for name in events.op.names])
    by_op, k = column[events.op.codes[worked[mine]]], len(steps.ops)
    timed = by_op >= 0  # the others took no time in these steps
    costs = np.bincount((of * k + by_op)[timed], cost[mine][timed], len(frames) * k).reshape(len(frames), k)
    return Rates(steps, frames, spent, costs)


def _shared(call: np.ndarray) -> np.ndarray:
    """bool: True if more than one rank executed the call."""
    _, which, count = np.unique(call, return_inverse=True, return_counts=True)
    return count[which.reshape(-1)] > 1


def _worked(events: Events) -> tuple[np.ndarray, np.ndarray]:
    """int64 [k] each: rows of work spans in calls of workers, and rows of these calls."""
    call = outermost(events.parent, events.op.is_("call") & (events.rank != events.controller))
    rows = np.flatnonzero((call >= 0) & ~events.kind.is_(*APART))
    return rows, call[rows]


def _costs(events: Events, rows: np.ndarray) -> np.ndarray:
    """float64: fitted seconds of each of these spans, by its operation, role and amount of work."""
    which = numbered(np.stack([events.op.codes[rows], events.role.codes[rows]]))
    amounts = np.stack([np.ones(len(rows)), events.tokens[rows], events.squares[rows]], 1).astype(np.float64)
    seconds, cost = events.own[rows] * 1e-9, np.zeros(len(rows))
    for kind in range(int(which.max(initial=-1)) + 1):
        mine = which == kind
        cost[mine] = amounts[mine] @ fit(amounts[mine], seconds[mine])
    return cost
