"""Work of ranks in steps whose sequences have unequal lengths, by the function that plans a run's calls."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tilth.core.layout import Mesh
from tilth.plan.batch import MicroBatchLimits, PlannedMicroBatch, RankLoad, RowCosts, RowTable, plan_batch, token_costs
from tilth.plan.schedule import Balance

STEPS = 4
"""Steps that are planned to see how uneven ranks are."""


class StepCosts(NamedTuple):
    """Predicted cost of sequences, and by what rows are balanced."""

    rows: RowCosts
    balance: Balance
    micro_tokens: int
    ring: float = 0.0
    """Cost of a token's way around ranks that divide its sequence (``Costs.ring``)."""

    def loads(self, lengths: np.ndarray, mesh: Mesh) -> list[RankLoad]:
        """Plan a step; the work of each rank that divides rows, in predicted costs. PlanError: a row that is too long.

        lengths: int64 [n]."""
        table, by_cost = RowTable(lengths, *np.zeros((2, len(lengths)), np.int64)), self.balance == "cost"
        how: dict[str, Any] = {"balance": self.balance, "units": mesh.units, "stages": mesh.count("layers")}
        how |= {"costs": self.rows, "ring": self.ring} if by_cost else {"costs": token_costs}
        plan = plan_batch(table, None, mesh.count("rows"), MicroBatchLimits(self.micro_tokens), **how)
        found = []
        for rows, part in zip(plan.rows, plan.ranks):
            load = RankLoad.of(part.learn, table.take(rows))
            found.append(load._replace(cost=np.array([self._cost(micro, lengths[rows]) for micro in part.learn])))
        return found

    def _cost(self, micro: PlannedMicroBatch, lengths: np.ndarray) -> float:
        """Return the predicted cost of one rank in a micro-batch of its rows, which have these lengths."""
        own = micro.lengths if micro.several else lengths[micro.rows]
        computed = float(self.rows(own.astype(np.float64)).sum()) / max(1, len(micro.ranks))
        return max(computed, self.ring * float(own.sum())) if micro.several else computed


class StepShare(NamedTuple):
    """Mean step of unequal sequences over one in which all are as long as the longest."""

    busiest: float = 1.0
    """Work of the busiest rank."""
    tokens: float = 1.0
    divided: float = 1.0
    """Tokens of sequences on several ranks along "hdp"."""

    @classmethod
    def of(cls, lengths: np.ndarray, rows: int, longest: int, mesh: Mesh, costs: StepCosts) -> "StepShare":
        """Plan some steps of ``rows`` sequences, as long as those of a sample: int64 [n]. PlanError: one is too
        long."""
        steps, whole = steps_of(lengths, rows), rows * longest
        even = -(-rows // mesh.count("rows")) * float(costs.rows(np.array([float(longest)]))[0])
        busiest = [max(load.cost.sum() for load in costs.loads(step, mesh)) / even for step in steps]
        divided = [step[step > costs.micro_tokens].sum() / whole for step in steps]
        return cls(*(float(np.mean(each)) for each in (busiest, [step.sum() / whole for step in steps], divided)))


def steps_of(lengths: np.ndarray, rows: int) -> Sequence[np.ndarray]:
    """Return ``STEPS`` steps of ``rows`` lengths each, of a sample in the order of its data, again from its beginning
    where it ends."""
    return list(np.resize(lengths, (STEPS, rows)))
