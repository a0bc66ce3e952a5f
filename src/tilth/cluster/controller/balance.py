"""Balance of the calls of a run: by which costs plans divide rows, and how even the ranks were.

All passes of a batch follow the costs of the policy's passes that learn, so that log-probs, critic and reference have
its rows on the same ranks.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from tilth.core.errors import DataError
from tilth.plan.batch import BatchPlan, MicroBatchLimits, RankLoad, RowTable, plan_batch
from tilth.plan.costs import Costs
from tilth.plan.offload import OffloadLimits
from tilth.plan.schedule import Balance

ROLE = "policy"
"""Role whose passes are measured, and whose costs all plans follow."""
PASSES = ("forward", "backward", "weight")
"""Operations of a pass that learns."""
OWN = 1
"""Place of an operation's own time in its sums (``trace.spans.Total``), in ns."""
FEW = 64
"""Most ranks of a call whose times are kept for a fit."""


class PassTime(NamedTuple):
    """Mean micro-batch of one rank in one call that learns: its amounts and own seconds."""

    rank: int
    step: int
    tokens: float
    squares: float
    seconds: float


class RowBalance:
    """By what the calls of a run are balanced, and what is measured of it."""

    def __init__(self, by: Balance = "tokens", *, measures: bool = True) -> None:
        self._lock = threading.Lock()
        self.begin(by, measures=measures)

    def begin(self, by: Balance, *, measures: bool) -> None:
        """Begin a run. measures: False if spans of passes end before the device does, so that their times mean
        nothing."""
        self.by, self.measures, self.collects = by, measures, False
        self.times: list[PassTime] = []
        """Times of calls, while ``collects``."""
        self.offload: OffloadLimits | None = None
        """What decides on how many ranks a row is, in calls of all roles whose ranks make units; None: each role's."""
        self._fits: list[tuple[int, Costs]] = []
        self._figures: list[tuple[str, float]] = []

    def use(self, step: int, costs: Costs) -> None:
        """Follow these costs from a step on. Raises DataError if they lack the policy's passes."""
        costs.learning(ROLE)
        self._fits = sorted([*(fit for fit in self._fits if fit[0] != step), (step, costs)], key=itemgetter(0))

    def planner(self, step: int) -> Callable[..., BatchPlan]:
        """Return ``plan_batch`` by what holds at a step. Raises DataError if there are no costs yet."""
        plan = plan_batch if self.offload is None else partial(_plan_alike, self.offload)
        if self.by != "cost":
            return partial(plan, balance=self.by)
        if not self._fits:
            message = "train.balance = 'cost' has no costs yet: a plan was asked for before the run began"
            raise DataError(message, key="train.balance.early")
        costs = [costs for first, costs in self._fits if first <= step or first == self._fits[0][0]][-1]
        return partial(plan, balance=self.by, costs=costs.rows(ROLE), ring=costs.ring)

    def note(self, role: str, step: int, loads: Sequence[RankLoad], sums: Sequence[dict[str, list[float]]]) -> None:
        """Add a call that has learned: the planned work of its ranks, and the sums of their spans."""
        busy = np.array([sum(of[op][OWN] for op in PASSES if op in of) for of in sums])
        with self._lock:
            self._figures += [("balance/spread", spread(loads)), ("padding", padding(loads))]
            if len(loads) == 1 or (self.measures and all(sums)):
                self._figures.append(("balance/idle", idle(busy)))
            if self.collects and self.measures and role == ROLE:
                for rank in range(0, len(loads), -(-len(loads) // FEW)):
                    if busy[rank] and (count := len(loads[rank].tokens)):
                        amounts = loads[rank].tokens.sum(), loads[rank].squares.sum(), busy[rank] * 1e-9
                        self.times.append(PassTime(rank, step, *(float(x) / count for x in amounts)))

    def take(self) -> list[tuple[str, float]]:
        """Return (metric, value) of each call since the last take."""
        with self._lock:
            found, self._figures = self._figures, []
        return found


def _plan_alike(
    offload: OffloadLimits, table: RowTable, groups: np.ndarray | None, ranks: int, limits: MicroBatchLimits, **how: Any
) -> BatchPlan:
    """Plan a call; units of ranks by ``offload`` in place of the role's own."""
    return plan_batch(table, groups, ranks, replace(limits, offload=offload) if how["units"] > 1 else limits, **how)


def spread(loads: Sequence[RankLoad]) -> float:
    """Return the greatest predicted cost of a rank less the least, over the mean; 0 if nothing costs."""
    costs = [float(load.cost.sum()) for load in loads]
    return (max(costs) - min(costs)) * len(costs) / sum(costs) if sum(costs) else 0.0


def padding(loads: Sequence[RankLoad]) -> float:
    """Return the share of places without a token, if each rank had as many in each round as the fullest one.

    Rounds are the micro-batches with the same number; a rank without one has none of the tokens.
    """
    tokens = np.zeros((len(loads), max(len(load.tokens) for load in loads)))
    for row, load in zip(tokens, loads):
        row[: len(load.tokens)] = load.tokens
    places = len(loads) * tokens.max(0, initial=0.0).sum()
    return float(1 - tokens.sum() / places) if places else 0.0


def idle(busy: np.ndarray) -> float:
    """Return the share of the ranks' time in which they have ended their passes and the busiest one has not."""
    return float(1 - busy.mean() / busy.max()) if busy.max() else 0.0
