"""Tensors of a group as columns, a number or more for each box: thousands of ranks make millions of boxes."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tilth.checkpoint.planning import DIMENSIONS, DTYPES, MOST, TensorRow, tile_counts, tiling_problem
from tilth.core.errors import CheckpointError

_COLUMNS = ("offset", "size", "file", "byte0")
_LONG = 64  # a column with more numbers is written once


class TensorTable:
    """The tensors of a group."""

    def __init__(self, rows: dict[str, TensorRow]) -> None:
        self.rows = rows

    @cached_property
    def text(self) -> list[bytes]:
        """JSON in parts, a line for each tensor.

        A long column equal to one of an earlier tensor is the name of the first such tensor: most tensors of a model
        have the layout of another one.
        """
        known: dict[tuple[str, bytes], str] = {}

        def line(name: str, row: TensorRow) -> Iterator[bytes]:
            yield f'{{"shape": {json.dumps(row.shape)}, "dtype": "{row.dtype}"'.encode()
            for column in _COLUMNS:
                yield f', "{column}": '.encode()
                values = getattr(row, column).reshape(-1)
                first = known.setdefault((column, values.tobytes()), name) if len(values) > _LONG else name
                yield _numbers(values) if first == name else json.dumps(first).encode()
            yield b"}"

        return list(json_object({name: line(name, row) for name, row in self.rows.items()}))


def _numbers(values: np.ndarray) -> bytes:
    """Return a JSON list; a run of equal numbers is formatted once, since the files of one layout have long runs."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])[: len(values)])
    if 4 * len(starts) > len(values):
        return json.dumps(values.tolist(), separators=(",", ":")).encode()
    counts = np.diff(starts, append=len(values))
    runs = [f"{value}," * count for value, count in zip(values[starts].tolist(), counts.tolist())]
    return f"[{''.join(runs)[:-1]}]".encode()


def json_object(entries: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """Yield a JSON object with one entry per line."""
    for i, (name, parts) in enumerate(entries.items()):
        yield b",\n" if i else b"{\n"
        yield json.dumps(name).encode() + b": "
        yield from parts
    yield b"\n}" if entries else b"{}"


@dataclass(frozen=True, eq=False)
class Pieces:
    """All boxes of all tensors one after another; columns int64 [N]."""

    file: np.ndarray
    byte0: np.ndarray
    nbytes: np.ndarray
    tiles: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[TensorRow]) -> "Pieces":
        sizes, none = [DTYPES[row.dtype].itemsize for row in rows], [np.zeros(0, np.int64)]
        nbytes = [row.size.prod(1) * itemsize for row, itemsize in zip(rows, sizes)]
        counts = [tile_counts(row.size, itemsize) for row, itemsize in zip(rows, sizes)]
        columns = ([row.file for row in rows], [row.byte0 for row in rows], nbytes, counts)
        return cls(*(np.concatenate(none + column) for column in columns))

    @cached_property
    def order(self) -> np.ndarray:
        """Indices by file and then by byte: int64 [N]."""
        return np.lexsort((self.nbytes, self.byte0, self.file))

    @property
    def first_tile(self) -> np.ndarray:
        """Index of each piece's first tile in its file: int64 [N]."""
        file, count = self.file[self.order], self.tiles[self.order]
        first = np.cumsum(count) - count
        starts = np.flatnonzero(np.diff(file, prepend=-1))
        found = np.empty(len(first), np.int64)
        found[self.order] = first - np.repeat(first[starts], np.diff(starts, append=len(file)))
        return found

    def gap(self) -> int:
        """Return the index of a piece that does not start where the one before it in its file ends; -1: none."""
        file, byte0, nbytes = (column[self.order] for column in (self.file, self.byte0, self.nbytes))
        ends = np.concatenate([[0], (byte0 + nbytes)[:-1]])
        ends[np.flatnonzero(np.diff(file, prepend=-1))] = 0
        wrong = np.flatnonzero(byte0 != ends)
        return int(self.order[wrong[0]]) if len(wrong) else -1


class WrongField(CheckpointError):
    """A field of the manifest is wrong.

    key: the place of the field, ``groups.model.w.offset``, and the kind of fault (``length``) where it can have
    several.
    """

    def __init__(self, message: str, *, key: str, fault: str = "") -> None:
        super().__init__(message, key=f"{key}.{fault}" if fault else key)
        self.field = key


def rows_of(group: str, tensors: Mapping[str, Any], files: int, boxes: int) -> dict[str, TensorRow]:
    """Parse the rows of a group. WrongField, also for boxes that do not tile a tensor.

    boxes: most boxes of all tensors. Any number of tensors can name one column, so without a bound a short text could
    describe a table that no memory holds.
    """
    known: dict[str, dict[str, np.ndarray]] = {}
    found: dict[str, TensorRow] = {}
    for name, entry in tensors.items():
        where = f"groups.{group}.{name}"
        row = found[name] = _row(where, name, entry, files, known)
        boxes -= len(row.file)
        if boxes < 0:
            message = "there are more boxes than the files have checksums for"
            raise WrongField(message, key=f"{where}.boxes", fault="count")
    sound = set()  # most tensors of a model have the boxes of another one
    for name, row in found.items():
        key = row.shape, row.offset.tobytes(), row.size.tobytes()
        problem = None if key in sound else tiling_problem(row.shape, row.offset, row.size)
        if problem:
            raise WrongField(str(problem), key=f"groups.{group}.{name}.boxes", fault=problem.key)
        sound.add(key)
    return found


def _row(where: str, name: str, entry: Any, files: int, known: dict[str, dict[str, np.ndarray]]) -> TensorRow:
    """Parse one row. known: columns of the tensors before it, to which its own are added."""
    fields = ("shape", "dtype", *_COLUMNS)
    if not isinstance(entry, dict) or sorted(entry) != sorted(fields):
        raise WrongField(f"its fields should be {', '.join(fields)}", key=where, fault="fields")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise WrongField(f"{entry['dtype']!r} is none of {', '.join(DTYPES)}", key=f"{where}.dtype")
    shape = _integers(f"{where}.shape", entry["shape"])
    if len(shape) > DIMENSIONS:
        message = f"{len(shape)} dimensions, at most {DIMENSIONS} can be read"
        raise WrongField(message, key=f"{where}.shape", fault="length")
    columns = {c: _column(f"{where}.{c}", c, entry[c], known) for c in _COLUMNS}
    known[name] = columns
    boxes = len(columns["file"])
    for column, values in columns.items():
        expected = boxes * (len(shape) if column in ("offset", "size") else 1)
        if len(values) != expected:
            message = f"{len(values)} numbers, {boxes} boxes of it need {expected}"
            raise WrongField(message, key=f"{where}.{column}", fault="length")
    if boxes and int(columns["file"].max()) >= files:
        raise WrongField(f"there is no file number {columns['file'].max()}, only {files} files", key=f"{where}.file")
    offset, size = (columns[c].reshape(boxes, len(shape)) for c in ("offset", "size"))
    _check_sizes(where, shape, size, DTYPES[entry["dtype"]].itemsize)
    return TensorRow(tuple(shape.tolist()), entry["dtype"], offset, size, columns["file"], columns["byte0"])


def _check_sizes(where: str, shape: np.ndarray, size: np.ndarray, itemsize: int) -> None:
    """Refuse sizes whose products exceed a number of bytes, and empty boxes: an empty tensor has one box."""
    elements = [shape, *size] if len(size) == 1 else [shape]
    largest = max([math.prod(one.tolist()) for one in elements] + size.astype(float).prod(1).tolist())
    if largest >= MOST // itemsize:
        message = f"{largest:.3g} elements are more than any file has bytes"
        raise WrongField(message, key=f"{where}.size", fault="largest")
    if not shape.all() and not np.array_equal(size, shape[None]):
        raise WrongField("a tensor without elements has one box, its shape", key=f"{where}.size", fault="empty")
    if shape.all() and not size.all():
        raise WrongField("a box without elements", key=f"{where}.size", fault="zero")


def _column(where: str, column: str, values: Any, known: Mapping[str, Mapping[str, np.ndarray]]) -> np.ndarray:
    """Return the numbers of a column, or those of the tensor that it names."""
    if not isinstance(values, str):
        return _integers(where, values)
    if values not in known:
        message = f"there is no tensor {values!r} before it, whose numbers these should be"
        raise WrongField(message, key=where, fault="reference")
    return known[values][column]


def _integers(where: str, values: Any) -> np.ndarray:
    """Return integers in [0, MOST) as int64. Types are checked first: numpy pads each text to the longest one."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise WrongField("a list of integers is needed", key=where, fault="type")
    if min(values, default=0) < 0:
        raise WrongField(f"{min(values):.3g} is negative", key=where, fault="least")
    if max(values, default=0) >= MOST:
        raise WrongField(f"a number in it is not below 2^{MOST.bit_length() - 1}", key=where, fault="most")
    return np.array(values, np.int64)
