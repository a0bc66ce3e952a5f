"""What a rank holds of a tensor, and where the state of an optimizer lies. Pure functions of layouts."""

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Layout, Replicate

LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Kinds of optimizer state that have an element for each of the parameter's."""
REPLICATED = ("step",)
"""Kinds that are one number for the whole parameter, the same on every rank."""


def held(layout: Layout, rank: int) -> list[Box]:
    """What a rank of the mesh holds; of a tensor without elements everyone holds the whole."""
    return layout.boxes(rank) if math.prod(layout.shape) else [Box.whole(layout.shape)]


def views(local: Tensor, boxes: Sequence[Box]) -> list[Tensor] | None:
    """A view of ``local`` for each box, or None if it is not the storage of these boxes.

    It has the shape of the only box, or is 1-D with the boxes one after another, each row-major.
    """
    if len(boxes) == 1 and tuple(local.shape) == boxes[0].size:
        return [local]
    sizes = [box.numel for box in boxes]
    if local.numel() != sum(sizes) or (local.ndim != 1 and local.numel()):
        return None
    return [part.view(box.size) for part, box in zip(local.reshape(-1).split(sizes), boxes)] if boxes else []


def state_layouts(layouts: Mapping[str, Layout], tensors: Iterable[str]) -> dict[str, Layout]:
    """Layouts of optimizer state by its names, ``<kind>.<parameter>``, from those of the parameters.

    A moment lies as its parameter does; its number of steps is on every rank. CheckpointError for another kind, and
    for a parameter without a layout.
    """
    found = {}
    for name in tensors:
        kind, _, parameter = name.partition(".")
        if parameter not in layouts:
            message = f"optimizer state {name}: there is no layout of a parameter {parameter!r}"
            raise CheckpointError(message, key=f"{name}.layout")
        if kind not in (*LIKE_PARAMETER, *REPLICATED):
            known = ", ".join((*LIKE_PARAMETER, *REPLICATED))
            message = f"optimizer state {name}: no layout is known for the kind {kind!r}; known are {known}"
            raise CheckpointError(message, key=f"{name}.kind")
        layout = layouts[parameter]
        whole = Layout(layout.mesh, (Replicate(),) * len(layout.mesh.sizes), ())
        found[name] = whole if kind in REPLICATED else layout
    return found
