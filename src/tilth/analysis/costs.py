"""Fit the costs of work on the trace of a run, for ``plan.costs``."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.network import links
from tilth.core.errors import DataError
from tilth.plan.cost_fit import fit_compute
from tilth.plan.costs import Compute, Costs

ENOUGH = 8
"""Fewest rows of an operation for a fit."""
IDLE = 0.01
"""A span without tokens and shorter than this share of the longer ones (90th percentile) did nothing, like a skipped
optimizer step, and is left out."""
SCORING = ("logprobs", "reference", "values", "judge", "score")
"""Phases that do the work themselves."""


def fit_costs(events: Events, about: Mapping[str, Any] | None = None) -> Costs:
    """Fit the cost of each operation and role, and of each communication and group size. Raises DataError if none."""
    compute, left = list[Compute](), list[str]()
    op, role = events.op, events.role
    works = _works(events)
    key = np.where(works, op.codes.astype(np.int64) * len(role.names) + role.codes, -1)
    for kind in np.unique(key[works]).tolist():
        i, j = divmod(kind, len(role.names))
        rows = _busy(events, np.flatnonzero(key == kind))
        if len(rows) >= ENOUGH:
            amounts = events.tokens[rows], events.squares[rows], events.own[rows] * 1e-9
            compute.append(fit_compute(op.names[i], role.names[j], *amounts, events.rank[rows], events.step[rows]))
        else:
            left.append(f"{op.names[i]} of {role.names[j] or 'the run'}: {len(rows)} of {ENOUGH} spans")
    every = links(events)
    found = [k for k in every if k.count >= ENOUGH]
    left += [f"{k.op} among {k.ranks} ranks: {k.count} of {ENOUGH} spans" for k in every if k.count < ENOUGH]
    if not compute and not found:
        message = f"too little data to fit costs ({'; '.join(left) or 'no work in the trace'}); record more steps"
        raise DataError(message, key="events.few" if left else "events.work")
    ordered = sorted(compute, key=lambda c: (c.role, c.op))
    return Costs(tuple(ordered), tuple(found), tuple(sorted(left)), dict(about or {}))


def _works(events: Events) -> np.ndarray:
    """bool [n]: spans that do work themselves and hold no compute span."""
    compute = events.kind.is_("compute")
    holds = np.zeros(len(events) + 1, bool)  # the last one: of no parent
    holds[events.parent[compute]] = True
    return (compute | (events.op.is_(*SCORING) & (events.tokens > 0))) & ~holds[:-1] & (events.own > 0)


def _busy(events: Events, rows: np.ndarray) -> np.ndarray:
    if events.tokens[rows].any():
        return rows
    return rows[events.own[rows] >= IDLE * np.quantile(events.own[rows], 0.9)]
