"""What a rank holds of a tensor, which rank writes it, and whether boxes make up a tensor. Pure functions of layouts.

Nothing here communicates: every rank computes the same answers from the same layouts (section 5.7 of the notes on
ByteCheckpoint, arXiv 2407.20143: placements are deterministic, so nobody has to ask).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
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
            raise CheckpointError(f"optimizer state {name}: there is no layout of a parameter {parameter!r}")
        if kind not in (*LIKE_PARAMETER, *REPLICATED):
            known = ", ".join((*LIKE_PARAMETER, *REPLICATED))
            raise CheckpointError(f"optimizer state {name}: where a {kind!r} lies is not known; known are {known}")
        layout = layouts[parameter]
        whole = Layout(layout.mesh, (Replicate(),) * len(layout.mesh.sizes), ())
        found[name] = whole if kind in REPLICATED else layout
    return found


# ---- who writes ----


class Item(NamedTuple):
    """A tensor that may have to be written."""

    name: str
    layout: Layout
    itemsize: int
    """Bytes of an element."""


class _Blocks(NamedTuple):
    """The different shares of a tensor. P: places of the mesh, in its order."""

    of: np.ndarray
    """int64 [P]: number of the share that a place holds; -1 for none."""
    numel: np.ndarray
    """int64 [shares]: its elements."""

    @property
    def copies(self) -> int:
        """Places of the share that most hold."""
        return int(np.bincount(self.of[self.of >= 0]).max())

    def lightest(self, load: np.ndarray) -> np.ndarray:
        """For each share the place with the smallest load of those that hold it; the first of several."""
        order = np.lexsort((load, self.of))
        return order[np.searchsorted(self.of[order], np.arange(len(self.numel)))]


@lru_cache(maxsize=256)
def _blocks(layout: Layout) -> _Blocks:
    numbers: dict[tuple[Box, ...], int] = {}
    of = []
    for rank in layout.mesh.ranks:
        boxes = tuple(held(layout, rank))
        of.append(numbers.setdefault(boxes, len(numbers)) if boxes else -1)
    return _Blocks(np.array(of, np.int64), np.array([sum(b.numel for b in boxes) for boxes in numbers], np.int64))


@lru_cache(maxsize=64)
def names_to_write(items: tuple[Item, ...], rank: int) -> frozenset[str]:
    """The tensors of which this rank writes the share that it holds; all items are over one mesh.

    Every share is written by one of the ranks that hold it: the one with the least to write so far, the lowest place of
    several; what few hold first, then the large before the small. So ranks with the same shares differ by at most one
    share, and what everybody holds fills up the others (the worst-fit rule of ByteCheckpoint, arXiv 2407.20143).
    """
    mesh = items[0].layout.mesh
    place, load = mesh.ranks.index(rank), np.zeros(len(mesh), np.int64)
    blocks = {item: _blocks(item.layout) for item in items}
    mine = set()

    def order(item: Item) -> tuple[int, int, str]:
        return blocks[item].copies, -int(blocks[item].numel.max()) * item.itemsize, item.name

    for item in sorted(items, key=order):
        writers = blocks[item].lightest(load)
        load[writers] += blocks[item].numel * item.itemsize
        if place in writers:
            mine.add(item.name)
    return frozenset(mine)


# ---- whether it is whole ----


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """What is wrong with boxes that should hold every element of a tensor exactly once; empty if they do.

    Takes one box after another out of what is left, in the order of their offsets: what is left then stays in few
    pieces, so that it costs about as much as sorting.
    """
    left = [Box.whole(shape)] if math.prod(shape) else []
    for box in sorted(boxes):
        if len(box.size) != len(shape) or not Box.whole(shape).contains(box):
            return f"{box} is not in a tensor of shape {tuple(shape)}"
        common = [(piece, piece.intersect(box)) for piece in left]
        if sum(c.numel for _, c in common if c) != box.numel:
            return f"{_doubled(box, boxes)} is written twice"
        left = [part for piece, c in common for part in (_without(piece, c) if c else [piece])]
    return f"{left[0]} is missing" if left else ""


def _doubled(box: Box, boxes: Sequence[Box]) -> Box:
    """A common block of this box and another one."""
    others = list(boxes)
    others.remove(box)
    return next(common for common in map(box.intersect, others) if common)


def _without(piece: Box, hole: Box) -> list[Box]:
    """``piece`` without ``hole``, which lies in it: the slabs before and behind it, dimension by dimension."""
    slabs, offset, size = [], list(piece.offset), list(piece.size)
    for d in range(len(size)):
        start, stop, end = hole.offset[d], hole.stop[d], offset[d] + size[d]
        for first, last in ((offset[d], start), (stop, end)):
            if last > first:
                slab = Box((*offset[:d], first, *offset[d + 1 :]), (*size[:d], last - first, *size[d + 1 :]))
                slabs.append(slab)
        offset[d], size[d] = start, stop - start
    return slabs
