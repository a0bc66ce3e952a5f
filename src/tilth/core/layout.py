"""Layouts of tensors over ranks: a shard is a box (offset, size) of the global index space.

A ``Layout`` is symbolic: a mesh, one placement per mesh dimension, the global shape. ``boxes(rank)`` is computed on
demand. Offsets, sizes and shapes are in elements.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tilth.config import axes
from tilth.core.errors import ArgumentError

Shape = tuple[int, ...]

MOST_RANKS = 1 << 20  # of a mesh from JSON, which bounds the memory of tables over ranks
_LARGEST = 1 << 53


@dataclass(frozen=True, order=True)
class Box:
    """An axis-aligned block of a tensor: ``offset[d] <= index[d] < offset[d] + size[d]``."""

    offset: Shape
    size: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Return the box of a whole tensor; ``Box((), ())``, with one element, for a 0-d tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def around(cls, boxes: "Sequence[Box]") -> "Box":
        """Return the least box that contains these, of which there are some."""
        offset = tuple(map(min, zip(*(box.offset for box in boxes))))
        stop = tuple(map(max, zip(*(box.stop for box in boxes))))
        return cls(offset, tuple(b - a for a, b in zip(offset, stop)))

    @property
    def stop(self) -> Shape:
        """First index behind the box in every dimension."""
        return tuple(o + s for o, s in zip(self.offset, self.size))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices with which ``tensor[box.slices]`` is the block."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size))

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common block, or None if they share no element."""
        offset = tuple(map(max, self.offset, other.offset))
        size = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset))
        return Box(offset, size) if all(s > 0 for s in size) else None

    def contains(self, other: "Box") -> bool:
        """True if this box contains every index of ``other``, or the bounds of an empty ``other``."""
        return all(a <= b for a, b in zip(self.offset, other.offset)) and all(
            a >= b for a, b in zip(self.stop, other.stop)
        )

    def within(self, outer: "Box") -> "Box":
        """Return the block in the coordinates of ``outer``, which contains it, to index the tensor of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset)), self.size)

    def shifted(self, offset: Shape) -> "Box":
        """Move the block by ``offset``: the inverse of ``within``."""
        return Box(tuple(a + b for a, b in zip(self.offset, offset)), self.size)


class Runs(NamedTuple):
    """Ordered intervals of the flat (row-major) index, all of one length."""

    starts: list[int]
    length: int


def runs(box: Box, shape: Shape) -> Runs:
    """Return a box of a tensor of this shape as the longest intervals of the tensor's flat index."""
    if box.numel == 0:
        return Runs([], 0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    split = len(shape)
    while split and (split == len(shape) or box.size[split] == shape[split]):
        split -= 1
    base = sum(o * s for o, s in zip(box.offset, strides))
    steps = [range(0, n * s, s) for n, s in zip(box.size[:split], strides)]
    return Runs([base + sum(step) for step in itertools.product(*steps)], math.prod(box.size[split:]))


def interval_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Return the interval [start, stop) of the flat index as at most 2 * (dimensions - 1) + 1 boxes, in flat order."""
    if start >= stop:
        return []
    if len(shape) < 2:
        return [Box((start,), (stop - start,)) if shape else Box((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if first == last:
        return _inside_row(shape, first, start - first * row, stop - first * row)
    head = _inside_row(shape, first, start - first * row, row) if start % row else []
    begin = first + 1 if head else first
    middle = [Box((begin,) + (0,) * (len(shape) - 1), (last - begin, *shape[1:]))] if last > begin else []
    return head + middle + _inside_row(shape, last, 0, stop - last * row)


def _inside_row(shape: Shape, row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *b.offset), (1, *b.size)) for b in interval_boxes(shape[1:], start, stop)]


@dataclass(frozen=True)
class Mesh:
    """Named dimensions over ranks: the row-major coordinate i belongs to rank ``ranks[i]`` (default: i)."""

    names: tuple[str, ...]
    sizes: Shape
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(math.prod(self.sizes))))
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise ArgumentError(f"mesh names {self.names}, sizes {self.sizes}: one name per dimension", key="names")
        if len(set(self.ranks)) != len(self.ranks) or len(self.ranks) != math.prod(self.sizes):
            raise ArgumentError(
                f"mesh of sizes {self.sizes} needs {math.prod(self.sizes)} different ranks", key="ranks"
            )

    @classmethod
    def of(cls, sizes: Mapping[str, int], ranks: tuple[int, ...] = ()) -> "Mesh":
        """Return a mesh with all axes of the table, of size 1 unless given; AxisError for an unknown name."""
        for name in sizes:
            axes.known(name)
        return cls(tuple(axes.AXES), tuple(sizes.get(name, 1) for name in axes.AXES), ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def has(self, rank: int) -> bool:
        """True if the rank is in this mesh."""
        place = rank - self.ranks[0]
        return (place >= 0 and self.ranks[place : place + 1] == (rank,)) or rank in self.ranks

    def coordinates(self, rank: int) -> Shape:
        """Return a rank's coordinate along every axis; ArgumentError for a rank that is not in the mesh."""
        place = rank - self.ranks[0]
        if place < 0 or self.ranks[place : place + 1] != (rank,):  # ranks are not consecutive
            if rank not in self.ranks:
                raise ArgumentError(f"rank={rank} is not in a mesh of {len(self)} ranks {self.ranks[:8]}", key="rank")
            place = self.ranks.index(rank)
        steps = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        return tuple(place // step % size for step, size in zip(steps, self.sizes))

    def at(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by name; ArgumentError for a rank that is not in the mesh."""
        return dict(zip(self.names, self.coordinates(rank)))

    def coordinate(self, name: str, rank: int) -> int:
        """Return a rank's coordinate along an axis, 0 for an axis of the table that is not here; AxisError."""
        return self.at(rank).get(self._known(name), 0)

    def size(self, *names: str) -> int:
        """Return the product of the sizes of these axes; AxisError for one that is neither here nor in the table."""
        sizes = dict(zip(self.names, self.sizes))
        return math.prod(sizes.get(self._known(name), 1) for name in names)

    def over(self, *splits: axes.Split, without: tuple[axes.Split, ...] = ()) -> tuple[str, ...]:
        """Return the axes of this mesh that split any of these, and none of ``without``, in order. AxisError for an
        unknown split."""
        found = axes.over(*splits, without=without)
        return tuple(name for name in self.names if name in found)

    def count(self, *splits: axes.Split) -> int:
        """Return the number of parts into which these are split."""
        return self.size(*self.over(*splits))

    @property
    def pieces(self) -> int:
        """Number of ranks that divide the tokens of the same rows, whatever their lengths."""
        return self.size(*self.over("tokens", without=("rows",)))

    @property
    def units(self) -> int:
        """Number of ranks over which a plan spreads rows, each on as many as it takes."""
        return self.size(*(name for name in self.over("rows") if name in self.over("tokens")))

    @property
    def copies(self) -> tuple[str, ...]:
        """Axes whose ranks hold the same part of the model and see different data."""
        shards = self.shards
        return tuple(name for name in self.over(*axes.DATA) if name not in shards)

    @property
    def shards(self) -> tuple[str, ...]:
        """Axes whose ranks see different data and gather what they hold of the model to compute with it.

        Ranks that divide experts compute with their own; they gather all other parameters.
        """
        model = self.over(*axes.MODEL)
        return tuple(name for name in self.over(*axes.DATA) if name in model)

    @property
    def expert_shards(self) -> tuple[str, ...]:
        """Axes whose ranks see different data and gather what they hold of their experts to compute with it."""
        experts = self.over("experts")
        return tuple(name for name in self.shards if name not in experts)

    def index(self, rank: int, *names: str) -> int:
        """Return the row-major index of a rank along these axes."""
        place = 0
        for name, size, at in zip(self.names, self.sizes, self.coordinates(rank)):
            place = place * size + at if name in names else place
        return place

    def along(self, rank: int, *names: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one along these axes only, in the mesh's order."""
        chosen, places = set(map(self._known, names)), [0]
        for name, size, at in zip(self.names, self.sizes, self.coordinates(rank)):
            places = [place * size + i for place in places for i in (range(size) if name in chosen else (at,))]
        return tuple(self.ranks[place] for place in places)

    def only(self, name: str, places: Sequence[int]) -> "Mesh":
        """Return the mesh of the ranks with these coordinates along an axis."""
        sizes = tuple(len(places) if own == name else size for own, size in zip(self.names, self.sizes))
        if name not in self.names:
            return self
        kept = np.take(self._grid, sorted(places), axis=self.names.index(name))
        return Mesh(self.names, sizes, tuple(kept.ravel().tolist()))

    def merged(self, *names: str) -> "Mesh":
        """Return the mesh in which these neighbouring axes are one, under the name of the first; others get size 1.

        ArgumentError if another axis of several ranks lies between them.
        """
        sizes = dict(zip(self.names, self.sizes))
        used = [name for name in self.names if sizes[name] > 1]
        merged = [name for name in used if name in names]
        if len(merged) < 2:
            return self
        first = used.index(merged[0])
        if used[first : first + len(merged)] != merged:
            message = f"axes {', '.join(merged)} of a mesh {', '.join(used)} are no neighbours, so they cannot be one"
            raise ArgumentError(message, key="names")
        sizes |= {name: 1 for name in merged} | {merged[0]: self.size(*merged)}
        return Mesh(self.names, tuple(sizes.values()), self.ranks)

    def part(self, rank: int, *names: str) -> "Mesh":
        """Return the mesh of the ranks that differ from this one along these axes only; other axes have size 1."""
        return Mesh(self.names, tuple(self.size(n) if n in names else 1 for n in self.names), self.along(rank, *names))

    def groups(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """Partition all ranks into groups that differ along these axes only."""
        chosen = set(map(self._known, names))
        inner = [i for i, name in enumerate(self.names) if name in chosen]
        outer = [i for i, name in enumerate(self.names) if name not in chosen]
        size = math.prod(self.sizes[i] for i in inner)
        return tuple(map(tuple, self._grid.transpose(outer + inner).reshape(-1, size).tolist()))

    @property
    def _grid(self) -> np.ndarray:
        """The ranks, int64 [sizes]."""
        return np.array(self.ranks).reshape(self.sizes)

    def _known(self, name: str) -> str:
        return name if name in self.names else axes.known(name).name

    def place(self, rank: int) -> str:
        """Format the coordinates of a rank: "dp=0 fsdp=1"."""
        return " ".join(f"{name}={at}" for name, at in self.at(rank).items())

    def rank(self, coordinates: Shape) -> int:
        """Return the rank at these coordinates."""
        place = 0
        for size, at in zip(self.sizes, coordinates, strict=True):
            if not 0 <= at < size:
                raise ArgumentError(f"{coordinates=} are not in a mesh of sizes {self.sizes}", key="coordinates")
            place = place * size + at
        return self.ranks[place]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, with the ranks only if they are not 0, 1, 2, ..."""
        table: dict[str, Any] = {"names": list(self.names), "sizes": list(self.sizes)}
        return table if self.ranks == tuple(range(len(self))) else {**table, "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Mesh":
        """Invert ``to_json``. KeyError, TypeError or ArgumentError for any other JSON."""
        sizes = _integers("sizes", data["sizes"], 1)
        if math.prod(sizes) > MOST_RANKS:
            raise ArgumentError(f"mesh of sizes {sizes}: at most {MOST_RANKS} ranks can be read", key="sizes")
        return cls(tuple(data["names"]), sizes, _integers("ranks", data.get("ranks", ()), 0))


@dataclass(frozen=True)
class Shard:
    """Split along a tensor dimension like ``torch.chunk``: ceil(n / parts) each, the last ones smaller or empty.

    copies: number of neighbouring ranks that hold the same piece (if there are fewer key heads than ranks).
    """

    dim: int
    copies: int = 1

    def piece(self, box: Box, part: int, parts: int) -> list[Box]:
        """Return the boxes of one part of ``box``; ArgumentError unless the parts are a multiple of the copies."""
        if self.copies < 1 or parts % self.copies:
            raise ArgumentError(f"{self}: {parts} ranks cannot hold {self.copies} copies of each piece", key="copies")
        length, part = box.size[self.dim], part // self.copies
        chunk = -(-length // (parts // self.copies))
        start, stop = min(length, part * chunk), min(length, (part + 1) * chunk)
        before, behind = slice(0, self.dim), slice(self.dim + 1, None)
        offset = (*box.offset[before], box.offset[self.dim] + start, *box.offset[behind])
        return [Box(offset, (*box.size[before], stop - start, *box.size[behind]))]


@dataclass(frozen=True)
class Replicate:
    """Place the whole on every rank of the mesh dimension."""

    def piece(self, box: Box, part: int, parts: int) -> list[Box]:
        """Return ``box``."""
        return [box]


@dataclass(frozen=True)
class RaggedShard:
    """Split the flat storage into intervals in proportion to ``units``, one integer >= 0 per rank.

    A rank's local tensor is 1-D: its boxes one after another, each row-major (veScale-FSDP, arXiv 2602.22437).
    """

    units: tuple[int, ...]

    def piece(self, box: Box, part: int, parts: int) -> list[Box]:
        """Return the boxes of one part of ``box``; ArgumentError unless its elements divide by the sum of units."""
        total = sum(self.units)
        if len(self.units) != parts or total < 1 or min(self.units) < 0 or box.numel % total:
            raise ArgumentError(f"{self} does not split {box} over {parts} ranks into whole units", key="units")
        unit = box.numel // total
        start = unit * sum(self.units[:part])
        stop = start + unit * self.units[part]
        return [b.shifted(box.offset) for b in interval_boxes(box.size, start, stop)]


Placement = Shard | Replicate | RaggedShard


@dataclass(frozen=True)
class Layout:
    """A global tensor of this shape over a mesh: mesh dimension i splits it by ``placements[i]``.

    order: the order in which mesh dimensions split (default: 0, 1, ..., DTensor's rule). A ragged split comes last.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    shape: Shape
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", tuple(range(len(self.placements))))
        if len(self.placements) != len(self.mesh.sizes) or sorted(self.order) != list(range(len(self.placements))):
            text = f"{self.placements}, order {self.order}: one placement per dimension of {self.mesh.sizes}"
            raise ArgumentError(text, key="placements")
        splits = [p for p in (self.placements[i] for i in self.order) if not isinstance(p, Replicate)]
        if any(isinstance(p, RaggedShard) for p in splits[:-1]):
            raise ArgumentError(f"{self.placements}: a ragged split must be the last one", key="order")
        if any(isinstance(p, Shard) and not 0 <= p.dim < len(self.shape) for p in splits):
            raise ArgumentError(f"{self.placements}: no such dimension in shape {self.shape}", key="dim")

    @classmethod
    def single(cls, shape: Sequence[int]) -> "Layout":
        """Return the layout of a tensor in one process."""
        return cls(Mesh(("world",), (1,)), (Replicate(),), tuple(shape))

    def boxes(self, rank: int) -> list[Box]:
        """Return the boxes of a rank, in the order of its storage; none if its share is empty or it is not in the
        mesh."""
        if not self.mesh.has(rank):
            return []
        coordinates = self.mesh.coordinates(rank)
        boxes = [Box.whole(self.shape)]
        for i in self.order:
            pieces = (self.placements[i].piece(box, coordinates[i], self.mesh.sizes[i]) for box in boxes)
            boxes = list(itertools.chain.from_iterable(pieces))
        return [box for box in boxes if box.numel]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "mesh": self.mesh.to_json(),
            "placements": [_placement_json(p) for p in self.placements],
            "shape": list(self.shape),
            "order": list(self.order),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Layout":
        """Invert ``to_json``. KeyError, TypeError or ArgumentError for any other JSON."""
        placements = tuple(_placement_from_json(p) for p in data["placements"])
        mesh = Mesh.from_json(data["mesh"])
        shape, order = (_integers(name, data[name], 0) for name in ("shape", "order"))
        return cls(mesh, placements, shape, order)


def _placement_json(placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return {"shard": placement.dim} | ({"copies": placement.copies} if placement.copies != 1 else {})
    return {"ragged": list(placement.units)} if isinstance(placement, RaggedShard) else "replicate"


def _placement_from_json(data: Any) -> Placement:
    if data == "replicate":
        return Replicate()
    if "shard" in data:
        return Shard(*_integers("shard", (data["shard"], data.get("copies", 1)), 0))
    return RaggedShard(_integers("ragged", data["ragged"], 0))


def _integers(name: str, values: Sequence[Any], least: int) -> Shape:
    """Return a field's values as a tuple. TypeError for other types, ArgumentError for integers out of range."""
    found = tuple(map(operator.index, values))
    if any(not least <= n < _LARGEST for n in found):
        raise ArgumentError(f"{name}: integers from {least} to 2^{_LARGEST.bit_length() - 1} are needed", key=name)
    return found
