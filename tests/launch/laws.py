"""Costs by a known law."""

import numpy as np

from tilth.plan.costs import LEARN, Compute, Costs, Error


def costs_of(per_token, per_square=0.0, fixed=0.0, role="policy"):
    """Costs of both passes of a micro-batch."""
    none = Error(0.01, 0.02, 8, True)
    return Costs((Compute(LEARN, role, fixed, per_token, per_square, (1, 10**6), (1, 10**9), (1.0, 1e4), 8, (), True,
                          True, none),), ())  # fmt: skip


def times_of(law, steps, seed=0, noise=0.0):
    """Times of two ranks: (per token, per square, fixed)."""
    from tilth.cluster.controller.balance import PassTime

    draw, found = np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        for rank in (0, 1):
            tokens = float(draw.integers(200, 4000))
            squares = tokens * float(draw.integers(10, 300))
            seconds = (law[0] * tokens + law[1] * squares + law[2]) * draw.lognormal(0, noise)
            found.append(PassTime(rank, step, tokens, squares, float(seconds)))
    return found
