"""Plan which rank writes which boxes of a group of tensors, and where in its file: a pure function of layouts.

Nothing here communicates. Every rank computes the same plan, and ranks compare only its digest (section 4 of
ByteCheckpoint, arXiv 2407.20143, gathers plans instead). All work is done on arrays over ranks, once for each different
layout, so that a plan for thousands of ranks costs little more.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Layout, Mesh, RaggedShard, Shape, Shard, interval_boxes

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


# ---- shares divided among their holders, each of which writes one stretch ----
#
# Everything that a set of ranks holds is one line of bytes, tensor behind tensor. Each rank takes the stretch that
# brings all to the same number of bytes (the wrap-around rule of McNaughton, Scheduling with deadlines and loss
# functions, Management Science 6(1), 1959), so n holders make at most n - 1 cuts.

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


# ---- the plan ----

SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_NAMES}
"""dtypes by their names in specs and manifests: torch's, without ``torch.``."""
METADATA = "__metadata__"  # a name that safetensors reserves
ALIGNMENT = 64  # the data section of a file starts at a multiple of this many bytes, for copies and direct reads
LARGEST_TILE = 1 << 20  # bytes
ROW_TILE = 1 << 16  # rows are cut into four bands while tiles keep this many bytes
COLUMN_TILE = 1 << 15  # columns are cut while tiles keep this many bytes
SEGMENT = 256  # least bytes of a row in a tile where columns are cut
DIMENSIONS = 16  # most dimensions of a tensor
MOST = 1 << 53  # upper bound of every number of elements or bytes
_PLANS = 16


class Spec(NamedTuple):
    """A tensor of a group: its layout over ranks and the name of its dtype (``float32``)."""

    name: str
    layout: Layout
    dtype: str


class Planned(NamedTuple):
    """A piece that a rank writes: bytes ``byte0 .. byte0 + nbytes`` of its file's data section are this box."""

    name: str
    key: str  # its name in the safetensors file, see ``piece_key``
    box: Box
    byte0: int
    nbytes: int
    dtype: str


class TensorRow(NamedTuple):
    """A tensor and its boxes, sorted by offset, in a plan and in a manifest. B: boxes, D: dimensions."""

    shape: Shape
    dtype: str
    offset: np.ndarray  # int64 [B, D]
    size: np.ndarray  # int64 [B, D]
    file: np.ndarray  # int64 [B]: index of the file that has it
    byte0: np.ndarray  # int64 [B]: from the start of the file's data section


class Tiles(NamedTuple):
    """Cuts of a piece, as a matrix [elements / last, last], into a grid of tiles; each from 0 to the end."""

    rows: list[int]
    columns: list[int]

    @property
    def total(self) -> int:
        """Number of tiles: row bands outer, column bands inner; 0 for a piece without elements."""
        return (len(self.rows) - 1) * (len(self.columns) - 1)


def spec_table(specs: Sequence[Spec]) -> dict[str, Any]:
    """Return JSON with each different layout once: ``{"layouts": [...], "specs": [[name, layout, dtype], ...]}``."""
    numbers, layouts = _numbered([spec.layout for spec in specs])
    rows = [[spec.name, number, spec.dtype] for spec, number in zip(specs, numbers)]
    return {"layouts": [layout.to_json() for layout in layouts], "specs": rows}


def specs_of(table: Mapping[str, Any]) -> list[Spec]:
    """Invert ``spec_table``; CheckpointError for any other JSON."""
    try:
        layouts = [Layout.from_json(layout) for layout in table["layouts"]]
        return [Spec(str(name), layouts[number], str(dtype)) for name, number, dtype in table["specs"]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        message = f"a table of layouts cannot be read: {type(error).__name__}: {error}"
        raise CheckpointError(message, key="table") from error


def digest_of(table: Mapping[str, Any]) -> str:
    """Return a hash of 128 bits, in hex, of everything that determines a plan."""
    return xxhash.xxh3_128_hexdigest(json.dumps(table, sort_keys=True, separators=(",", ":")).encode())


def _numbered(layouts: Sequence[Layout]) -> tuple[list[int], list[Layout]]:
    """Number the different layouts. Meshes of thousands of ranks are hashed once, not for each tensor."""
    meshes: dict[Mesh, int] = {}
    seen: dict[int, int] = {}
    known: dict[Any, int] = {}
    numbers: list[int] = []
    different: list[Layout] = []
    for layout in layouts:
        mesh = layout.mesh
        if id(mesh) not in seen:
            seen[id(mesh)] = meshes.setdefault(mesh, len(meshes))
        key = (seen[id(mesh)], layout.placements, layout.shape, layout.order)
        if key not in known:
            known[key] = len(different)
            different.append(layout)
        numbers.append(known[key])
    return numbers, different


def tiles(size: Shape, itemsize: int) -> Tiles:
    """Return the tiles of a piece; each has one checksum, over its rows' bytes one after another.

    Columns are cut into the most of 8, 4, 2 or 1 equal bands that leave ``SEGMENT`` bytes in a row of a tile and
    ``COLUMN_TILE`` in a column of tiles. Rows are cut into bands of at most ``LARGEST_TILE`` bytes a tile, and into at
    least four where that leaves ``ROW_TILE``. A single row is cut by elements. So a reader of some rows or of a quarter
    of the columns of a large piece verifies just those, and a small piece has one checksum.
    """
    if not math.prod(size):
        return Tiles([0], [0])
    rows, height, last, width = _grid(size, itemsize)
    return Tiles([*range(0, rows, height), rows], [*range(0, last, width), last])


def _grid(size: Shape, itemsize: int) -> tuple[int, int, int, int]:
    """Return rows of the piece, rows of a tile, columns of the piece, columns of a tile."""
    last = size[-1] if size else 1
    rows = math.prod(size) // last
    if rows == 1:
        return 1, 1, last, _height(last, itemsize)
    least = max(SEGMENT, -(-COLUMN_TILE // rows))  # bytes of a row of a tile
    width = last // next(n for n in (8, 4, 2, 1) if n == 1 or (last % n == 0 and last // n * itemsize >= least))
    return rows, _height(rows, width * itemsize), last, width


def _height(rows: int, nbytes: int) -> int:
    """Return the rows of a tile, of ``rows`` rows of ``nbytes`` bytes each."""
    return max(1, min(LARGEST_TILE // nbytes, max(-(-rows // 4), -(-ROW_TILE // nbytes))))


def tile_counts(size: np.ndarray, itemsize: int) -> np.ndarray:
    """Count the tiles of pieces of these sizes: int64 [B, D] -> int64 [B]. Most tensors have the boxes of another."""
    return _tile_counts(size.tobytes(), size.shape, itemsize)


@lru_cache(maxsize=64)
def _tile_counts(raw: bytes, shape: Shape, itemsize: int) -> np.ndarray:
    sizes = list(map(tuple, np.frombuffer(raw, np.int64).reshape(shape).tolist()))
    known = {one: _tile_count(one, itemsize) for one in set(sizes)}
    return np.array([known[one] for one in sizes], np.int64)


def _tile_count(size: Shape, itemsize: int) -> int:
    if not math.prod(size):
        return 0
    rows, height, last, width = _grid(size, itemsize)
    return -(-rows // height) * -(-last // width)


@dataclass(eq=False)
class _Shares:
    """Shares of a tensor on the places of a mesh. P: places in the mesh's order; S: different shares; B: boxes."""

    of: np.ndarray  # int64 [P]: number of the share of each place; -1 for none
    numel: np.ndarray  # int64 [S]: elements of each share
    offset: np.ndarray  # int64 [B, D]: boxes of all shares, sorted by offset
    size: np.ndarray  # int64 [B, D]
    share: np.ndarray  # int64 [B]: share of each box
    before: np.ndarray  # int64 [B]: elements of the share in boxes before this one

    def __post_init__(self) -> None:
        self.counts = np.bincount(self.of[self.of >= 0], minlength=len(self.numel))  # [S]: holders of each share
        self.holders = np.argsort(self.of, kind="stable")[np.count_nonzero(self.of < 0) :]  # places, by share
        self.starts = np.cumsum(self.counts) - self.counts  # [S]: where in ``holders`` each share starts
        self.copies = int(self.counts.max())
        self.largest = int(self.size.prod(1).max())  # elements of the largest box

    def writers(self, load: np.ndarray) -> np.ndarray:
        """Return the least loaded holder of each share, the first of several: load int64 [P] -> places int64 [S]."""
        if self.copies == 1:
            return self.holders
        loads = load[self.holders]
        least = np.repeat(np.minimum.reduceat(loads, self.starts), self.counts)
        hits = np.flatnonzero(loads == least)
        return self.holders[hits[np.searchsorted(hits, self.starts)]]


@lru_cache(maxsize=256)
def _shares(layout: Layout) -> _Shares:
    """Return the shares of a layout; CheckpointError unless they hold every element exactly once."""
    places = len(layout.mesh)
    if not math.prod(layout.shape):  # all places hold the whole
        whole, one = np.array([layout.shape], np.int64), np.zeros(1, np.int64)
        return _Shares(np.zeros(places, np.int64), one, whole * 0, whole, one, one)
    place, offset, size = _held(layout)
    rows, number = np.unique(np.hstack([0 * place[:, None], offset, size]), axis=0, return_inverse=True)
    number, dimensions = number.reshape(-1), len(layout.shape)
    offset, size = rows[:, 1 : 1 + dimensions], rows[:, 1 + dimensions :]
    if problem := tiling_problem(layout.shape, offset, size):
        raise CheckpointError(f"{problem} in the pieces of {layout}", key=f"boxes.{problem.key}")
    holders, firsts = np.unique(place, return_index=True)  # a share is known by its first box
    kinds, share_of = np.unique(number[firsts], return_inverse=True)
    of = np.full(places, -1, np.int64)
    of[holders] = share_of.reshape(-1)
    share = np.empty(len(rows), np.int64)
    share[number] = of[place]
    numels = size.prod(1)
    order = np.argsort(share, kind="stable")
    cumulative = np.cumsum(numels[order]) - numels[order]
    numel = np.bincount(share, numels, len(kinds)).astype(np.int64)
    before = np.empty(len(rows), np.int64)
    before[order] = cumulative - (np.cumsum(numel) - numel)[share[order]]
    return _Shares(of, numel, offset, size, share, before)


def _held(layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return place int64 [N], offset and size int64 [N, D] of all boxes with elements: ``Layout.boxes``, vectorised."""
    sizes, shape = layout.mesh.sizes, layout.shape
    coordinates = np.indices(sizes).reshape(len(sizes), -1)
    place = np.arange(coordinates.shape[1])
    offset = np.zeros((len(place), len(shape)), np.int64)
    size = np.tile(np.array(shape, np.int64), (len(place), 1))
    for i in layout.order:
        placement = layout.placements[i]
        placement.piece(Box.whole(shape), 0, sizes[i])  # ArgumentError
        match placement:
            case Shard(dim, copies):
                length = size[:, dim].copy()
                chunk, part = -(-length // (sizes[i] // copies)), coordinates[i] // copies
                start = np.minimum(length, part * chunk)
                offset[:, dim] += start
                size[:, dim] = np.minimum(length, start + chunk) - start
            case RaggedShard():
                place, offset, size = _ragged(placement, coordinates[i], offset, size)
    some = size.prod(1) > 0
    return place[some], offset[some], size[some]


def _ragged(
    ragged: RaggedShard, part: np.ndarray, offset: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Apply the last split: an interval of the flat block of each place, as boxes."""
    ends = [0, *accumulate(ragged.units)]
    found: dict[tuple[int, Shape, Shape], list[Box]] = {}
    place, rows = [], []
    for p, key in enumerate(zip(part.tolist(), map(tuple, offset.tolist()), map(tuple, size.tolist()))):
        if key not in found:
            at, first, block = key
            unit, rest = divmod(math.prod(block), ends[-1])
            if rest:
                ragged.piece(Box(first, block), at, len(ragged.units))  # ArgumentError
            found[key] = [b.shifted(first) for b in interval_boxes(block, unit * ends[at], unit * ends[at + 1])]
        place += [p] * len(found[key])
        rows += [(box.offset, box.size) for box in found[key]]
    table = np.array(rows, np.int64).reshape(len(rows), 2, offset.shape[1])
    return np.array(place, np.int64), table[:, 0], table[:, 1]


def plan_group(specs: Sequence[Spec]) -> "GroupPlan":
    """Return the plan for a group of tensors; those used last are cached by ``digest``.

    CheckpointError for a tensor that cannot be stored, that is there twice, or whose layout does not tile it.
    """
    specs = tuple(specs)
    return _plan(_Wanted(digest_of(spec_table(specs)), specs))


@dataclass(frozen=True)
class _Wanted:
    digest: str
    specs: tuple[Spec, ...] = field(compare=False)


@lru_cache(maxsize=_PLANS)
def _plan(wanted: _Wanted) -> "GroupPlan":
    return GroupPlan(wanted.digest, wanted.specs)


class GroupPlan:
    """Which rank writes which boxes of a group, and where. Made by ``plan_group``; the same on every rank.

    Tensors with few copies come first. Shares with a box large enough to be cut are divided among their holders
    (``deal``). Any other share is written by its least loaded holder, large shares before small ones (the worst-fit
    rule of ByteCheckpoint, arXiv 2407.20143). So where all ranks hold everything, the most loaded one has at most the
    mean and about one uncut piece. In a file wide dtypes come first, then names, then boxes: no gaps for alignment.
    """

    def __init__(self, digest: str, specs: tuple[Spec, ...]) -> None:
        _check(specs)
        self.digest = digest
        self.specs = specs
        self._itemsize = [DTYPES[spec.dtype].itemsize for spec in specs]
        numbers, different = _numbered([spec.layout for spec in specs])
        first = {number: spec.name for spec, number in zip(reversed(specs), reversed(numbers))}
        tables = [_named_shares(first[number], layout) for number, layout in enumerate(different)]
        self._shares = [tables[number] for number in numbers]
        everyone = [np.array(layout.mesh.ranks, np.int64) for layout in different]
        ranks = np.unique(np.concatenate(everyone)) if everyone else np.zeros(0, np.int64)
        self.ranks: tuple[int, ...] = tuple(ranks.tolist())
        self._index = [np.searchsorted(ranks, mine) for mine in everyone]
        self._number = numbers
        self._load = np.zeros(len(ranks), np.int64)
        self._writes = np.zeros(len(ranks), bool)
        self._alone: dict[tuple[int, int], Dealt] = {}
        self._dealt = self._distribute()

    def _distribute(self) -> list[Dealt]:
        """Choose the writers of each tensor, as indices in ``ranks``."""
        shares, itemsize, specs = self._shares, self._itemsize, self.specs
        largest = [int(share.numel.max()) * size for share, size in zip(shares, itemsize)]
        large = [s.copies > 1 and cuttable(s.largest * size) for s, size in zip(shares, itemsize)]
        order = sorted(range(len(specs)), key=lambda i: (shares[i].copies, not large[i], -largest[i], specs[i].name))
        found: dict[int, Dealt] = {}
        for (_, cut), same in groupby(order, key=lambda i: (shares[i].copies, large[i])):
            for together in self._by_holders(same) if cut else ([i] for i in same):
                for i, dealt in zip(together, self._divided(together) if cut else [self._whole(together[0])]):
                    self._load[dealt.writers] += dealt.nbytes
                    self._writes[dealt.writers] = True
                    found[i] = dealt
        return [found[i] for i in range(len(specs))]

    def _holders(self, i: int) -> np.ndarray:
        """Indices in ``ranks`` of the holders of a tensor, by share."""
        return self._index[self._number[i]][self._shares[i].holders]

    def _by_holders(self, tensors: Iterable[int]) -> Iterable[list[int]]:
        """Group tensors whose shares have the same holders."""
        known: dict[int, tuple[bytes, bytes]] = {}
        found: dict[tuple[bytes, bytes], list[int]] = {}
        for i in tensors:
            number = self._number[i]
            if number not in known:
                known[number] = self._holders(i).tobytes(), self._shares[i].starts.tobytes()
            found.setdefault(known[number], []).append(i)
        return found.values()

    def _divided(self, tensors: Sequence[int]) -> list[Dealt]:
        """Cut shares of tensors with the same holders among those."""
        each = [(self._shares[i], self._itemsize[i]) for i in tensors]
        held = [Held(shares.offset, shares.size, shares.share, itemsize) for shares, itemsize in each]
        holders = self._holders(tensors[0])
        return deal(held, each[0][0].starts, holders, self._load[holders])

    def _whole(self, i: int) -> Dealt:
        """Let one holder write each share of a tensor."""
        shares, itemsize, number = self._shares[i], self._itemsize[i], self._number[i]
        if (number, itemsize) in self._alone:
            return self._alone[number, itemsize]
        index = self._index[number]
        writers = index[shares.writers(self._load[index])]
        before, nbytes = shares.before * itemsize, shares.numel * itemsize
        dealt = Dealt(shares.offset, shares.size, writers[shares.share], before, writers, nbytes)
        if shares.copies == 1:  # the same for all tensors of this layout
            self._alone[number, itemsize] = dealt
        return dealt

    @cached_property
    def _file_order(self) -> list[int]:
        return sorted(range(len(self.specs)), key=lambda i: (-self._itemsize[i], self.specs[i].name))

    @cached_property
    def _different(self) -> list[tuple[Dealt, int, int]]:
        """Each different assignment once, with the bytes of an element and its number of tensors."""
        times = Counter(map(id, self._dealt))
        found = {id(dealt): (dealt, itemsize) for dealt, itemsize in zip(self._dealt, self._itemsize)}
        return [(dealt, itemsize, times[id(dealt)]) for dealt, itemsize in found.values()]

    def place(self, rank: int) -> int:
        """Return the index of a rank in ``ranks``; CheckpointError if it is not there."""
        try:
            return self.ranks.index(rank)
        except ValueError:
            message = f"rank {rank} is in no mesh of this plan; its ranks are {self.ranks}"
            raise CheckpointError(message, key="rank") from None

    @property
    def writes(self) -> list[bool]:
        """For each of ``ranks``, True if it writes a file."""
        return self._writes.tolist()

    @property
    def nbytes(self) -> list[int]:
        """For each of ``ranks``, the bytes of its data section."""
        return self._load.tolist()

    @cached_property
    def tiles(self) -> list[int]:
        """For each of ``ranks``, the number of tiles of its pieces."""
        found = np.zeros(len(self.ranks), np.int64)
        for dealt, itemsize, times in self._different:
            np.add.at(found, dealt.writer, tile_counts(dealt.size, itemsize) * times)
        return found.tolist()

    def data_nbytes(self, rank: int) -> int:
        """Return the bytes of the data section of a rank's file."""
        return 0 if not self.specs else int(self._load[self.place(rank)])

    def pieces(self, rank: int) -> tuple[Planned, ...]:
        """Return what a rank writes, in the order of its file."""
        if not self.specs:
            return ()
        me, end = self.place(rank), 0
        mine = {id(dealt.writer): np.flatnonzero(dealt.writer == me) for dealt, _, _ in self._different}
        found = []
        for i in self._file_order:
            dealt, spec = self._dealt[i], self.specs[i]
            start = end
            for row in mine[id(dealt.writer)].tolist():
                box = Box(tuple(dealt.offset[row].tolist()), tuple(dealt.size[row].tolist()))
                nbytes = box.numel * self._itemsize[i]
                key = piece_key(spec.name, box, spec.layout.shape)
                found.append(Planned(spec.name, key, box, start + int(dealt.before[row]), nbytes, spec.dtype))
                end += nbytes
        return tuple(found)

    def header(self, rank: int) -> bytes:
        """Return the safetensors header of a rank's file, see ``safetensors_header``."""
        return safetensors_header(self.pieces(rank))

    def rows(self, files: np.ndarray) -> dict[str, TensorRow]:
        """Return each tensor in the files of all ranks, in the order of the specs. files: index of each rank's file."""
        end, byte0 = np.zeros(len(self.ranks), np.int64), dict[int, np.ndarray]()
        for i in self._file_order:
            dealt = self._dealt[i]
            byte0[i] = end[dealt.writer] + dealt.before
            end[dealt.writers] += dealt.nbytes
        each = enumerate(zip(self.specs, self._dealt))
        return {
            spec.name: TensorRow(spec.layout.shape, spec.dtype, d.offset, d.size, files[d.writer], byte0[i])
            for i, (spec, d) in each
        }


def _check(specs: Iterable[Spec]) -> None:
    seen = set()
    for name, layout, dtype in specs:
        if dtype not in DTYPES:
            message = f"tensor {name} of dtype {dtype} cannot be stored in safetensors"
            raise CheckpointError(message, key=f"{name}.dtype")
        if len(layout.shape) > DIMENSIONS or math.prod(layout.shape) >= MOST // DTYPES[dtype].itemsize:
            message = f"tensor {name} of shape {layout.shape} is too large to be stored"
            raise CheckpointError(message, key=f"{name}.shape")
        if name == METADATA:
            raise CheckpointError(f"tensor {name}: safetensors reserves this name", key=f"{name}.name")
        if name in seen:
            raise CheckpointError(f"tensor {name} is there twice", key=f"{name}.twice")
        seen.add(name)


def _named_shares(name: str, layout: Layout) -> _Shares:
    try:
        return _shares(layout)
    except (ValueError, CheckpointError) as error:  # ValueError: of numpy too
        key = getattr(error, "key", "") or "layout"
        raise CheckpointError(f"tensor {name} cannot be planned: {error}", key=f"{name}.{key}") from error


def piece_key(name: str, box: Box, shape: Shape) -> str:
    """Return the name of a box in a safetensors file: the tensor's, with the bounds of a box that is not the whole."""
    if box == Box.whole(shape):
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in zip(box.offset, box.stop))}]"


def safetensors_header(pieces: Iterable[Planned]) -> bytes:
    """Return a safetensors header with its length in front, padded with spaces to a multiple of ``ALIGNMENT``.

    CheckpointError if two pieces need the same key.
    """
    table: dict[str, Any] = {METADATA: {"format": "pt"}}
    for piece in pieces:
        if piece.key in table:
            message = f"tensor {piece.name}: another tensor has the name {piece.key!r}, which its part needs"
            raise CheckpointError(message, key=f"{piece.key}.twice")
        table[piece.key] = {
            "dtype": SAFETENSORS_NAMES[DTYPES[piece.dtype]],
            "shape": list(piece.box.size),
            "data_offsets": [piece.byte0, piece.byte0 + piece.nbytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
