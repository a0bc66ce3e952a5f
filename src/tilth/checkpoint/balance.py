"""Divide shares of tensors among their holders: each writes one stretch, and boxes are cut where that pays.

Everything that a set of ranks holds is one line of bytes, tensor behind tensor. Each rank takes the stretch that brings
all to the same number of bytes (the wrap-around rule of McNaughton, Scheduling with deadlines and loss functions,
Management Science 6(1), 1959), so n holders make at most n - 1 cuts. Computed on arrays over all shares at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST = 1 << 18
"""Least bytes of a part of a box, still eight bands of tiles: each piece costs an entry in header and manifest."""
_SLICE = 2  # a box is cut along the first dimension whose slices have at most LEAST / _SLICE bytes
_SHORT = 4  # next to a stretch of less than _SHORT * LEAST bytes boxes are cut at multiples of LEAST, else at any slice


class Held(NamedTuple):
    """The boxes of a tensor, none of them empty, and their shares. B: boxes, D: dimensions."""

    offset: np.ndarray  # int64 [B, D]: sorted
    size: np.ndarray  # int64 [B, D]
    share: np.ndarray  # int64 [B]
    itemsize: int


class Dealt(NamedTuple):
    """The boxes of a tensor as they are written. B: boxes, D: dimensions, W: writers."""

    offset: np.ndarray  # int64 [B, D]: sorted
    size: np.ndarray  # int64 [B, D]
    writer: np.ndarray  # int64 [B]
    before: np.ndarray  # int64 [B]: bytes of the tensor that its writer has in boxes before this one
    writers: np.ndarray  # int64 [W]: each once
    nbytes: np.ndarray  # int64 [W]: bytes that each writes of the tensor


def cuttable(nbytes: int) -> bool:
    """True if a box of this many bytes may be cut."""
    return nbytes >= 2 * LEAST


def deal(tensors: Sequence[Held], starts: np.ndarray, holders: np.ndarray, load: np.ndarray) -> list[Dealt]:
    """Divide tensors whose shares have the same ``holders`` among those.

    holders: int64 [H], writers by share. starts: int64 [S], where the holders of each share start. load: int64 [H],
    bytes that each has to write already. The holders of a share end with the same number of bytes, except for half a
    slice at each end of a stretch, and up to ``LEAST`` near the ends of boxes and of short stretches.
    """
    line = _line(tensors)
    ends = np.concatenate([[0], np.cumsum(line.nbytes)])
    total = np.diff(ends[np.searchsorted(line.share, np.arange(len(starts) + 1))])
    stops = _snapped(line, ends, _levelled(load, starts, total))
    cuts = stops[np.diff(stops, prepend=-1) > 0]
    cuts = cuts[ends[np.searchsorted(ends, cuts)] != cuts]  # in boxes, not between them
    behind = np.searchsorted(ends, cuts)
    first, at = np.insert(ends[:-1], behind, cuts), np.insert(np.arange(len(ends) - 1), behind, behind - 1)
    holder = np.searchsorted(stops, first, side="right")
    pieces = _Pieces(at, holders[holder], (first - ends[at]) // line.unit[at], np.diff(first, append=ends[-1]))
    order = np.argsort(line.tensor[at], kind="stable")
    return _by_tensor(tensors, line, _Pieces(*(column[order] for column in pieces)))


class _Line(NamedTuple):
    """The boxes of all tensors by share, tensor and place; columns int64 [N]."""

    tensor: np.ndarray
    row: np.ndarray  # index of the box in its tensor
    share: np.ndarray
    nbytes: np.ndarray
    dim: np.ndarray  # along which it can be cut
    unit: np.ndarray  # bytes of a slice along ``dim``


def _line(tensors: Sequence[Held]) -> _Line:
    known: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
    for held in tensors:
        key = id(held.size), held.itemsize
        if key not in known:
            known[key] = (np.arange(len(held.share)), held.share, *_slices(held.size, held.itemsize))
    columns = [known[id(held.size), held.itemsize] for held in tensors]
    tensor = np.repeat(np.arange(len(tensors)), [len(held.share) for held in tensors])
    line = _Line(tensor, *(np.concatenate(column) for column in zip(*columns)))
    order = np.argsort(line.share, kind="stable")
    return _Line(*(column[order] for column in line))


def _slices(size: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bytes of boxes, the dimension along which each can be cut, the bytes of a slice; each int64 [B]."""
    nbytes = size.prod(1) * itemsize
    if not size.shape[1]:
        return nbytes, 0 * nbytes, nbytes
    slices = nbytes[:, None] // size
    small = slices <= LEAST // _SLICE
    dim = np.where(small.any(1), small.argmax(1), slices.argmin(1))
    return nbytes, dim, np.take_along_axis(slices, dim[:, None], 1)[:, 0]


def _levelled(load: np.ndarray, starts: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the bytes that each holder takes of its share, so that the least loaded become equal; int64 [H]."""
    counts = np.diff(starts, append=len(load))
    share = np.repeat(np.arange(len(starts)), counts)
    order = np.lexsort((load, share))
    least, place = load[order], np.arange(len(load)) - starts[share]
    upto = np.cumsum(least)
    upto -= (upto - least)[starts][share]
    some = (place + 1) * least - upto < total[share]  # less than all would bring those before to its level
    filled = np.add.reduceat(np.where(some, least, 0), starts) + total
    level, rest = np.divmod(filled, np.maximum(1, np.add.reduceat(some.astype(np.int64), starts)))
    taken = np.empty(len(load), np.int64)
    taken[order] = np.where(some, level[share] - least + (place < rest[share]), 0)
    return taken


def _snapped(line: _Line, ends: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Return where stretches of about these bytes stop: between boxes, or in one far enough from the next stop."""
    stops, short = np.cumsum(taken), taken < _SHORT * LEAST
    at = np.minimum(np.searchsorted(ends, stops, side="right") - 1, len(line.nbytes) - 1)
    nbytes, unit, into = line.nbytes[at], line.unit[at], stops - ends[at]
    least = -(-LEAST // unit) * unit
    coarse = short | np.append(short[1:], True)
    grid = np.where(coarse, least, unit)
    top = np.where(coarse, nbytes // least * least, nbytes) - least
    near = (into + grid // 2) // grid * grid
    near = np.where(near < least, np.where(2 * into < least, 0, least), near)
    near = np.where(near > top, np.where(2 * (nbytes - into) < nbytes - top, nbytes, top), near)
    return ends[at] + np.where(nbytes < 2 * least, np.where(2 * into < nbytes, 0, nbytes), near)


class _Pieces(NamedTuple):
    """Parts of boxes; columns int64 [N]."""

    at: np.ndarray  # index of the box in the line
    writer: np.ndarray
    skipped: np.ndarray  # slices of the box before the piece
    nbytes: np.ndarray


def _by_tensor(tensors: Sequence[Held], line: _Line, pieces: _Pieces) -> list[Dealt]:
    """Split pieces, sorted by tensor and then in the order of the line, into tensors."""
    tensor, numbers = line.tensor[pieces.at], np.arange(len(tensors) + 1)
    new = (tensor[1:] != tensor[:-1]) | (pieces.writer[1:] != pieces.writer[:-1])
    starts = np.flatnonzero(np.concatenate([[True], new]))
    before = np.cumsum(pieces.nbytes) - pieces.nbytes
    before -= np.repeat(before[starts], np.diff(starts, append=len(before)))
    writers, written = pieces.writer[starts], np.add.reduceat(pieces.nbytes, starts)
    bounds = np.searchsorted(tensor[starts], numbers).tolist()
    row = line.row[pieces.at]
    order = np.argsort(tensor * (row.max() + 1) + row, kind="stable")  # almost sorted, and quick for that
    cuts, before, sorted_ = np.searchsorted(tensor, numbers).tolist(), before[order], [c[order] for c in pieces]
    found = []
    for i, held in enumerate(tensors):
        mine, theirs = slice(cuts[i], cuts[i + 1]), slice(bounds[i], bounds[i + 1])
        dealt = Dealt(held.offset, held.size, sorted_[1][mine], before[mine], writers[theirs], written[theirs])
        uncut = len(dealt.writer) == len(held.share)
        found.append(dealt if uncut else _cut(dealt, line, _Pieces(*(column[mine] for column in sorted_))))
    return found


def _cut(dealt: Dealt, line: _Line, pieces: _Pieces) -> Dealt:
    """Replace whole boxes by those of the pieces."""
    at, number = pieces.at, np.arange(len(pieces.at))
    offset, size = dealt.offset[line.row[at]], dealt.size[line.row[at]]
    offset[number, line.dim[at]] += pieces.skipped
    size[number, line.dim[at]] = pieces.nbytes // line.unit[at]
    order = np.lexsort(offset.T[::-1])
    return dealt._replace(
        offset=offset[order], size=size[order], writer=dealt.writer[order], before=dealt.before[order]
    )
