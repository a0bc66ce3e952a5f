"""The tensors of a group as columns: a number or more for each box, since thousands of ranks make millions of boxes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tilth.checkpoint.planning import DTYPES, tile_counts, tiling_problem
from tilth.core.layout import Shape

_COLUMNS = ("offset", "size", "file", "byte0")


class Row(NamedTuple):
    """A tensor as the file has it. B: boxes, D: dimensions."""

    shape: Shape
    dtype: str
    offset: np.ndarray
    """int64 [B, D]."""
    size: np.ndarray
    """int64 [B, D]."""
    file: np.ndarray
    """int64 [B]: number of the file in the order of ``files``."""
    byte0: np.ndarray
    """int64 [B]: from the start of the file's data section."""


class Table:
    """The tensors of a group."""

    def __init__(self, rows: dict[str, Row]) -> None:
        self.rows = rows

    @cached_property
    def text(self) -> list[bytes]:
        """As JSON, a line for each tensor, in parts. Columns that are the same are made once."""
        texts: dict[bytes, bytes] = {}

        def column(values: np.ndarray) -> bytes:
            key = values.tobytes()
            if key not in texts:
                texts[key] = json.dumps(values.reshape(-1).tolist(), separators=(",", ":")).encode()
            return texts[key]

        def line(row: Row) -> Iterator[bytes]:
            yield f'{{"shape": {json.dumps(row.shape)}, "dtype": "{row.dtype}"'.encode()
            for name in _COLUMNS:
                yield f', "{name}": '.encode()
                yield column(getattr(row, name))
            yield b"}"

        return list(json_object({name: line(row) for name, row in self.rows.items()}))


def json_object(entries: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON object of these, each on a line."""
    for i, (name, parts) in enumerate(entries.items()):
        yield b",\n" if i else b"{\n"
        yield json.dumps(name).encode() + b": "
        yield from parts
    yield b"\n}" if entries else b"{}"


# ---- all pieces ----


@dataclass(frozen=True, eq=False)
class Pieces:
    """All boxes of all tensors one after another. N: boxes."""

    file: np.ndarray
    byte0: np.ndarray
    nbytes: np.ndarray
    tiles: np.ndarray
    """All int64 [N]."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Pieces":
        known: dict[tuple[bytes, int], np.ndarray] = {}
        counts, nbytes = [], []
        for row in rows:
            key = row.size.tobytes(), DTYPES[row.dtype].itemsize
            if key not in known:
                known[key] = tile_counts(row.size, key[1])
            counts.append(known[key])
            nbytes.append(row.size.prod(1) * key[1])
        none = [np.zeros(0, np.int64)]
        columns = ([row.file for row in rows], [row.byte0 for row in rows], nbytes, counts)
        return cls(*(np.concatenate(none + column) for column in columns))

    @cached_property
    def order(self) -> np.ndarray:
        """By file and then by byte: int64 [N]."""
        return np.lexsort((self.nbytes, self.byte0, self.file))

    @property
    def first_tile(self) -> np.ndarray:
        """int64 [N]: number of each piece's first tile in its file."""
        file, count = self.file[self.order], self.tiles[self.order]
        first = np.cumsum(count) - count
        starts = np.flatnonzero(np.diff(file, prepend=-1))
        found = np.empty(len(first), np.int64)
        found[self.order] = first - np.repeat(first[starts], np.diff(starts, append=len(file)))
        return found

    def gap(self) -> int:
        """The number of a piece that does not start where the one before it in its file ends; -1: there is none."""
        file, byte0, nbytes = (column[self.order] for column in (self.file, self.byte0, self.nbytes))
        ends = np.concatenate([[0], (byte0 + nbytes)[:-1]])
        ends[np.flatnonzero(np.diff(file, prepend=-1))] = 0
        wrong = np.flatnonzero(byte0 != ends)
        return int(self.order[wrong[0]]) if len(wrong) else -1


# ---- from JSON ----


class WrongField(Exception):
    """Where and what."""


def rows_of(group: str, tensors: Mapping[str, Any], files: int) -> dict[str, Row]:
    """The rows of a group from its JSON. WrongField, also for boxes that do not tile a tensor."""
    found = {name: _row(f"{group}.{name}", entry, files) for name, entry in tensors.items()}
    sound = set()  # most tensors of a model have the boxes of another one
    for name, row in found.items():
        key = row.shape, row.offset.tobytes(), row.size.tobytes()
        problem = "" if key in sound else tiling_problem(row.shape, row.offset, row.size)
        if problem:
            raise WrongField(f"{group}.{name}: {problem}")
        sound.add(key)
    return found


def _row(where: str, entry: Any, files: int) -> Row:
    fields = ("shape", "dtype", *_COLUMNS)
    if not isinstance(entry, dict) or sorted(entry) != sorted(fields):
        raise WrongField(f"{where}: its fields should be {', '.join(fields)}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise WrongField(f"{where}.dtype: {entry['dtype']!r} is none of {', '.join(DTYPES)}")
    columns = {name: _integers(f"{where}.{name}", entry[name]) for name in ("shape", *_COLUMNS)}
    boxes, shape = len(columns["file"]), columns.pop("shape")
    for name, column in columns.items():
        expected = boxes * (len(shape) if name in ("offset", "size") else 1)
        if len(column) != expected:
            raise WrongField(f"{where}.{name}: {len(column)} numbers, {boxes} boxes of it need {expected}")
    if boxes and int(columns["file"].max()) >= files:
        raise WrongField(f"{where}.file: there is no file number {columns['file'].max()}, only {files} files")
    offset, size = (columns[name].reshape(boxes, len(shape)) for name in ("offset", "size"))
    return Row(tuple(shape.tolist()), entry["dtype"], offset, size, columns["file"], columns["byte0"])


def _integers(where: str, values: Any) -> np.ndarray:
    """Numbers from 0 on as int64."""
    try:
        column = np.array(values)
        if not isinstance(values, list) or column.ndim != 1 or (len(column) and column.dtype != np.int64):
            raise ValueError
    except ValueError:
        raise WrongField(f"{where}: a list of integers is needed") from None
    if len(column) and column.min() < 0:
        raise WrongField(f"{where}: {column.min()} is negative")
    return column.astype(np.int64)
