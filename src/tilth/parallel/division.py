"""Division of a one-device model along the axes of a mesh: each axis's mechanism divides what the others have left."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from tilth.config.axes import Axis, known
from tilth.config.roles import resolve
from tilth.core.errors import AxisError
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.plan.pipeline import Stages

if TYPE_CHECKING:
    from tilth.parallel.context import ContextParallel, Style


@dataclass
class Division:
    """One part of a model, on the meta device, with what mechanisms need and leave; arguments of ``sharded.shard``."""

    model: Decoder
    grid: ParallelDims
    stages: Stages
    part: int
    """Number of this part of ``stages``."""
    sp: bool
    zero: int
    cp_style: "Style"
    engine: bool
    device: str
    partial: list[tuple[dist.ProcessGroup, tuple[str, ...]]] = field(default_factory=list)
    """Parameters whose gradients are summed over a further group after a backward pass."""
    context: "ContextParallel | None" = None
    """Division of the tokens of each sequence; None: this rank has all of them."""

    def divide(self) -> None:
        """Run the mechanisms of all axes with several ranks, in place: stages first, then from the innermost axis."""
        for axis in sorted(reversed(divided(self.grid)), key=lambda axis: "layers" not in axis.splits):
            if axis.mechanism:
                resolve(axis.mechanism)(self)


def divided(grid: ParallelDims) -> list[Axis]:
    """Return the axes with several ranks, outermost first. AxisError: one of them has no mechanism."""
    found = [known(name) for name in grid.mesh.names if grid.size(name) > 1]
    for axis in found:
        if why := axis.undivided(grid.size(axis.name)):
            raise AxisError(f"layout.{axis.name}={grid.size(axis.name)}: {why}", key=f"layout.{axis.name}")
    return found
