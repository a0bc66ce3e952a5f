"""Shares of ranks, and layouts of optimizer state. Pure functions of layouts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from torch import Tensor

from tilth.config.open_sets import OPTIMIZERS
from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Layout, Mesh, Replicate

REPLICATED = ("step",)
"""Kinds with one number for the parameter, equal on every rank."""


def held(layout: Layout, rank: int) -> list[Box]:
    """Return the boxes of a rank; every rank holds the whole of a tensor without elements."""
    return layout.boxes(rank) if math.prod(layout.shape) else [Box.whole(layout.shape)]


def views(local: Tensor, boxes: Sequence[Box]) -> list[Tensor] | None:
    """Return a view of ``local`` for each box, or None if it is not the storage of these boxes.

    The storage has the shape of the only box, or is 1-D with the boxes one after another, each row-major.
    """
    if len(boxes) == 1 and tuple(local.shape) == boxes[0].size:
        return [local]
    sizes = [box.numel for box in boxes]
    if local.numel() != sum(sizes) or (local.ndim != 1 and local.numel()):
        return None
    return [part.view(box.size) for part, box in zip(local.reshape(-1).split(sizes), boxes)] if boxes else []


def state_layouts(layouts: Mapping[str, Layout], tensors: Iterable[str]) -> dict[str, Layout]:
    """Return the layouts of optimizer state, named ``<kind>.<parameter>``, from those of the parameters.

    A moment has the layout of its parameter; a step count is replicated. CheckpointError for another kind, and for a
    parameter without a layout.
    """
    found, kinds = {}, dict.fromkeys([*(kind for spec in OPTIMIZERS.values() for kind in spec.state), *REPLICATED])
    for name in tensors:
        kind, _, parameter = name.partition(".")
        if parameter not in layouts:
            message = f"optimizer state {name}: there is no layout of a parameter {parameter!r}"
            raise CheckpointError(message, key=f"{name}.layout")
        if kind not in kinds:
            known = ", ".join(kinds)
            message = f"optimizer state {name}: no layout is known for the kind {kind!r}; known are {known}"
            raise CheckpointError(message, key=f"{name}.kind")
        found[name] = _everywhere(layouts[parameter].mesh) if kind in REPLICATED else layouts[parameter]
    return found


@cache
def _everywhere(mesh: Mesh) -> Layout:
    """Return the layout of a number that all ranks hold."""
    return Layout(mesh, (Replicate(),) * len(mesh.sizes), ())
