"""Transitions: they make the generation weights of a rank out of the training shards of all.

The three of HybridFlow's comparison (arXiv 2409.19256, table 2): ``full`` (DeepSpeed-Chat) and ``naive`` (HybridFlow-V)
gather whole parameters beside the training shards, over all ranks or over those of one training replica, and cut from
them; ``zero_redundancy`` receives what a rank lacks of its generation shard, as runs do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tilth.core.errors import ArgumentError
from tilth.core.layout import Layout, Mesh
from tilth.parallel.reshard import Part, Parts, Resharder, allocate, parts_of, whole_layout
from tilth.parallel.sharded import WHOLE, buckets
from tilth.plan.reshard import ReshardPlan


@dataclass(frozen=True)
class Training:
    """Training shards of one rank."""

    rank: int
    mesh: Mesh
    layouts: Mapping[str, Layout]
    parameters: Mapping[str, Tensor]
    bucket: int = WHOLE
    """Bytes of whole parameters that travel at a time."""

    @property
    def parts(self) -> dict[str, Part]:
        """This rank's part of each parameter."""
        return parts_of(self.parameters, self.layouts, self.rank)


Transition = Callable[[Training, Mesh, Mapping[str, Layout], Parts], Parts]
"""(training shards, generation mesh, its layouts, generation weights to fill or none) -> generation weights."""


def full(training: Training, mesh: Mesh, layouts: Mapping[str, Layout], into: Parts) -> Parts:
    """Gather every parameter over all ranks and cut the generation shard from it.

    ArgumentError unless training divides the parameters over all its ranks (ZeRO-3), as DeepSpeed-Chat does.
    """
    if training.mesh.size(*training.mesh.copies) > 1:
        message = (
            f"a full gather needs parameters divided over all {len(training.mesh)} ranks, by fsdp; here are copies"
        )
        raise ArgumentError(message, key="training.mesh")
    return _gathered(training, mesh, layouts)


def naive(training: Training, mesh: Mesh, layouts: Mapping[str, Layout], into: Parts) -> Parts:
    """Gather every parameter over the ranks of one training replica and cut the generation shard from it."""
    return _gathered(training, mesh, layouts)


def zero_redundancy(training: Training, mesh: Mesh, layouts: Mapping[str, Layout], into: Parts) -> Parts:
    """Receive the rest of the generation shard into ``into``, where the training shard lies already (``share``)."""
    plan = ReshardPlan.of(training.rank, training.mesh, training.layouts, mesh, layouts)
    _fill(Resharder.of(plan, training.rank, _like(into).device), into, training)
    return into


def _gathered(training: Training, mesh: Mesh, layouts: Mapping[str, Layout]) -> Parts:
    everywhere = {name: whole_layout(layout, training.mesh) for name, layout in training.layouts.items()}
    plan = ReshardPlan.of(training.rank, training.mesh, training.layouts, training.mesh, everywhere)
    whole = allocate(everywhere, training.rank, _like(training.parts))
    _fill(Resharder.of(plan, training.rank, _like(whole).device), whole, training)
    boxes = {name: layout.boxes(training.rank) for name, layout in layouts.items()}
    return {name: Part(box, whole[name].piece(box)) for name, found in boxes.items() for box in found}


def _fill(resharder: Resharder, into: Parts, training: Training) -> None:
    shapes, dtype = {name: layout.shape for name, layout in training.layouts.items()}, _like(training.parts).dtype
    for names in buckets(shapes, training.bucket):
        resharder.fill(into, training.parts, names, dtype)


def _like(parts: Parts) -> Tensor:
    return next(iter(parts.values())).values


TRANSITIONS: dict[str, Transition] = {"full": full, "naive": naive, "zero-redundancy": zero_redundancy}
"""Name -> transition. A run uses zero-redundancy."""
