"""Compare log-probs of trainer and rollout engine in every step; ``tilth.roles.weight_sync`` compares the weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilth.config.schema import Recipe
from tilth.core.errors import LogprobMismatch
from tilth.rl.metrics import Metric

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEFAULT_MISMATCH = {"fp32": 1e-3, "bf16": 0.5}
"""Largest tolerated |log-prob difference| of one token: far above rounding, far below a wrong tensor's effect."""
CORRECTED_MISMATCH = 2.0
"""Largest tolerated difference with a correction; a factor of 7 in probability cannot be corrected."""


@dataclass(frozen=True)
class SyncBounds:
    """The engine's dtype, and the largest log-prob difference of a token between trainer and engine."""

    dtype: torch.dtype
    mismatch: float

    @classmethod
    def of(cls, recipe: Recipe) -> "SyncBounds":
        """Return the recipe's bounds; 0 in parity mode."""
        t = recipe.train
        usual = CORRECTED_MISMATCH if recipe.algorithm.correction else DEFAULT_MISMATCH[t.precision]
        return cls(DTYPES[t.precision], 0.0 if t.parity else t.mismatch or usual)


def check_mismatch(metrics: Mapping[str, Metric], bounds: SyncBounds, step: int) -> None:
    """Raise LogprobMismatch if the log-probs of some token differ by more than the bound.

    ``mismatch/max`` is only there if the update began with the weights that generated the batch.
    """
    found = metrics.get("mismatch/max")
    worst = float(found.total) if found is not None and found.count else 0.0
    if not worst <= bounds.mismatch:  # NaN too
        raise LogprobMismatch(
            f"step {step + 1}: log-probs of trainer and rollout engine differ by up to {worst:.3g}, "
            f"more than train.mismatch={bounds.mismatch:g}; they compute different policies",
            key="train.mismatch",
        )
