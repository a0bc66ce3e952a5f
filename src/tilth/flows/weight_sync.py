"""What trainer and rollout engine must agree on, and the check of their log-probs that is always on.

That their weights are equal is checked where they arrive: ``tilth.roles.weight_sync``.
"""

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
"""The same where a correction is there for an engine that does differ: beyond a factor of 7 none mends it."""


@dataclass(frozen=True)
class SyncBounds:
    """What trainer and engine must agree on: the engine's dtype and the largest log-prob difference."""

    dtype: torch.dtype
    mismatch: float

    @classmethod
    def of(cls, recipe: Recipe) -> "SyncBounds":
        """The recipe's own bound; in parity mode it is 0."""
        t = recipe.train
        usual = CORRECTED_MISMATCH if recipe.algorithm.correction else DEFAULT_MISMATCH[t.precision]
        return cls(DTYPES[t.precision], 0.0 if t.parity else t.mismatch or usual)


def check_mismatch(metrics: Mapping[str, Metric], bounds: SyncBounds, step: int) -> None:
    """Raise LogprobMismatch if trainer and engine gave some token log-probs further apart than the bound.

    The comparison (``mismatch/max``) is present when the update began at the weights that generated the batch.
    """
    found = metrics.get("mismatch/max")
    worst = float(found.total) if found is not None and found.count else 0.0
    if not worst <= bounds.mismatch:  # NaN too
        raise LogprobMismatch(
            f"step {step + 1}: log-probs of trainer and rollout engine differ by up to {worst:.3g}, "
            f"more than train.mismatch={bounds.mismatch:g}; one of them computes another policy",
            key="train.mismatch",
        )
