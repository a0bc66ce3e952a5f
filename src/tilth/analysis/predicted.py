"""Predicted costs of micro-batches beside the measured ones: the costs that a run balanced by, on its own trace."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilth.analysis.events import Events
from tilth.plan.cost_fit import relative_error
from tilth.runs.costs import CostFit

ROLE = "policy"
PASSES = ("forward", "backward", "weight")
"""Operations of a micro-batch that is learned from."""


@dataclass(frozen=True, eq=False)
class Predicted:
    """Micro-batches that the policy learned from, by start. Times in seconds, float64 [m]."""

    row: np.ndarray
    """int64: row of its first pass in the events."""
    seconds: np.ndarray
    """Predicted by the costs of its step."""
    measured: np.ndarray
    """Own time of its passes."""

    def summary(self) -> dict[str, Any]:
        """Return number, sums and relative errors, as JSON."""
        apart = relative_error(self.seconds, self.measured)
        sums = {"predicted": float(self.seconds.sum()), "measured": float(self.measured.sum())}
        return {"micro_batches": len(self.row), **sums, "error": apart.median, "p90": apart.p90}


def predicted(events: Events, fits: Sequence[CostFit]) -> Predicted | None:
    """Predict each micro-batch of the events by the costs on record, oldest first; None without either."""
    rows = np.flatnonzero(events.op.is_(*PASSES) & events.role.is_(ROLE) & (events.parent >= 0) & (events.tokens > 0))
    if not len(rows) or not fits:
        return None
    whole = events.parent[rows] * (int(events.micro_batch[rows].max()) + 1) + events.micro_batch[rows]
    _, first, mine = np.unique(whole, return_index=True, return_inverse=True)
    measured, begins = np.bincount(mine, events.own[rows] * 1e-9), rows[first]
    laws = np.array([[sum(getattr(c, name) for c in fit.costs.learning(ROLE)) for name in _TERMS] for fit in fits])
    order = np.argsort([fit.step for fit in fits], kind="stable")
    at = np.searchsorted([fits[i].step for i in order], events.step[begins], side="right") - 1
    amounts = np.stack([events.tokens[begins], events.squares[begins], np.ones(len(begins))], 1)
    seconds = (laws[order][np.maximum(at, 0)] * amounts).sum(1)
    by_start = np.argsort(begins)
    return Predicted(begins[by_start], seconds[by_start], measured[by_start])


_TERMS = ("per_token", "per_square", "fixed")
