"""Publish weights to engines that take them when they can, and compare log-probs of trainer and engine in every step;
``tilth.roles`` compares the weights."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.lazy import resolved
from tilth.cluster.controller.leases import LeasedStore
from tilth.config.schema import Recipe
from tilth.core.batch import Lease
from tilth.core.errors import LogprobMismatch
from tilth.core.layout import Mesh
from tilth.rl.metrics import Metric
from tilth.roles.relay import Publication

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEFAULT_MISMATCH = {"fp32": 1e-3, "bf16": 0.5}
"""Largest tolerated |log-prob difference| of one token: far above rounding, far below a wrong tensor's effect."""
CORRECTED_MISMATCH = 2.0
"""Largest tolerated difference with a correction; a factor of 7 in probability cannot be corrected."""

_numbers = itertools.count(1)
"""Of the publications of this controller, whatever is made again meanwhile."""


class Publisher:
    """Versions of the policy that engines take from a relay (``roles.relay_sync``), each after its round under way."""

    def __init__(self, weight_sync: WorkerGroup, policy: Mesh, rollout: Mesh, store: LeasedStore) -> None:
        """policy, rollout: meshes of the roles of these names, which share no worker."""
        self.store, place = store, weight_sync.mesh.ranks.index
        self._policy = weight_sync.part("to", [place(rank) for rank in policy.ranks])
        self._rollout = weight_sync.part("to", [place(rank) for rank in rollout.ranks])
        self._pulls: Any = None
        self._lease: Lease | None = None

    def publish(self, version: int) -> int:
        """Write the policy's weights to the relay, and let the engines take them; return the bytes that were written.

        Returns once they are written: what an engine is asked for from then on comes from these weights, or newer ones.
        Waits first for engines that have not taken the version before, so that no version is overwritten unread.
        """
        self.wait()
        publication = Publication(next(_numbers), version)
        written = self._policy.publish("rollout", publication)
        self._lease = self.store.lease("weights")
        with self.store.under(self._lease):  # not the step's, which ends without them
            self._pulls = self._rollout.pull("rollout", publication)
        return sum(written)

    def wait(self) -> None:
        """Wait until all engines have taken what was published. Raises what stopped one."""
        if self._lease is not None:
            resolved(self._pulls)
            self._lease.release()
            self._lease = None


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
