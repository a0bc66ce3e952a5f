"""Check that boxes tile a tensor: every element is in exactly one of them."""

import math
from collections.abc import Sequence

import numpy as np

from tilth.core.errors import CheckpointError
from tilth.core.layout import Box

_SMALL_GRID = 1 << 20


def tiling_problem(shape: Sequence[int], offset: np.ndarray, size: np.ndarray) -> CheckpointError | None:
    """Return None if the boxes hold every element of a tensor exactly once, else an error with the first wrong box.

    offset, size: int64 [B, D]. Its key is ``outside``, ``overlap`` or ``missing``. Regular boxes are counted on the
    grid of their bounds; others are subtracted from the tensor one by one, which costs about as much as sorting them.
    """
    stop, end = offset + size, np.array(shape, np.int64)
    inside = offset.shape[1] == len(shape) and ((offset >= 0) & (size >= 0) & (stop <= end)).all()
    if inside:
        cuts = [np.unique(np.concatenate([[0, n], a, b])) for n, a, b in zip(shape, offset.T, stop.T)]
        if math.prod(map(len, cuts)) <= _SMALL_GRID and _covered(cuts, offset, stop):
            return None
    boxes = [Box(tuple(o), tuple(s)) for o, s in zip(offset.tolist(), size.tolist())]
    return _slow_tiling_problem(shape, boxes)


def _covered(cuts: Sequence[np.ndarray], offset: np.ndarray, stop: np.ndarray) -> bool:
    """True if every cell of the grid of these cuts is in exactly one box: sums of +1 and -1 at the boxes' corners."""
    count = np.zeros([len(c) for c in cuts], np.int64)
    bounds = [(np.searchsorted(c, a), np.searchsorted(c, b)) for c, a, b in zip(cuts, offset.T, stop.T)]
    for corner in np.ndindex(*(2,) * len(cuts)):
        at = tuple(bound[side] for bound, side in zip(bounds, corner))
        np.add.at(count, at, (-1) ** sum(corner))
    for d in range(len(cuts)):
        count = count.cumsum(d)
    cells = count[tuple(slice(0, -1) for _ in cuts)]
    return bool((cells == 1).all()) if cuts else len(offset) == 1


def _slow_tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> CheckpointError | None:
    left = [Box.whole(shape)] if math.prod(shape) else []
    for box in sorted(boxes):
        if len(box.size) != len(shape) or not Box.whole(shape).contains(box):
            return CheckpointError(f"{box} is not in a tensor of shape {tuple(shape)}", key="outside")
        common = [(piece, piece.intersect(box)) for piece in left]
        if sum(c.numel for _, c in common if c) != box.numel:
            return CheckpointError(f"{_overlap(box, boxes)} is there twice", key="overlap")
        left = [part for piece, c in common for part in (_subtract(piece, c) if c else [piece])]
    return CheckpointError(f"{left[0]} is missing", key="missing") if left else None


def _overlap(box: Box, boxes: Sequence[Box]) -> Box:
    """Return a common block of this box and another one."""
    others = list(boxes)
    others.remove(box)
    return next(common for common in map(box.intersect, others) if common)


def _subtract(piece: Box, hole: Box) -> list[Box]:
    """Subtract ``hole`` from ``piece``, which contains it: the slabs before and behind it, dimension by dimension."""
    slabs, offset, size = [], list(piece.offset), list(piece.size)
    for d in range(len(size)):
        start, stop, end = hole.offset[d], hole.stop[d], offset[d] + size[d]
        for first, last in ((offset[d], start), (stop, end)):
            if last > first:
                slabs.append(Box((*offset[:d], first, *offset[d + 1 :]), (*size[:d], last - first, *size[d + 1 :])))
        offset[d], size[d] = start, stop - start
    return slabs
