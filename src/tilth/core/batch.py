"""A ``Batch``: one row per sample in the controller, opaque handles to the token payload in a store.

The controller plans on rows only, at most about 200 bytes each at any number of tokens. Workers read the store; a store
that the controller reads counts the bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from tilth.core.errors import ArgumentError


class Jagged(NamedTuple):
    """A ragged column: row i is ``values[offsets[i]:offsets[i + 1]]``. values: [total]; offsets: int64 [n + 1]."""

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Jagged":
        """Concatenate rows."""
        return cls.with_lengths(np.concatenate(rows) if len(rows) else np.zeros(0), [len(r) for r in rows])

    @classmethod
    def with_lengths(cls, values: np.ndarray, lengths: np.ndarray | Sequence[int]) -> "Jagged":
        """Make a column of packed values and the length of each row."""
        return cls(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row: int64 [n]."""
        return np.diff(self.offsets)

    def row(self, i: int) -> np.ndarray:
        """Return a view of row i."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def rows(self) -> list[np.ndarray]:
        """Return views of all rows."""
        return [self.values[start:end] for start, end in pairwise(self.offsets.tolist())]

    def take(self, rows: np.ndarray) -> "Jagged":
        """Pack the rows with these indices, in this order."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        source = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Jagged(self.values[source], offsets)


@dataclass(frozen=True)
class Handle:
    """An opaque reference to one ragged column in a store."""

    key: str
    nbytes: int


class Store(Protocol):
    """Storage of payload. Every column belongs to the lease under which it was put, and is freed with it."""

    lease: str
    """The lease of columns that are put now; "": none, they are never freed."""

    def put(self, column: str, data: Jagged) -> Handle:
        """Store a column; the handle is its only name."""

    def get(self, handle: Handle) -> Jagged:
        """Return a column; KeyError if its lease was released."""

    def release(self, *leases: str) -> None:
        """Free all columns that any process has put under these leases."""

    def held(self) -> dict[str, int]:
        """Return key -> bytes of all stored columns."""


@dataclass(frozen=True, eq=False)
class Lease:
    """Payload of one owner, which lives until ``release``, in this step or a later one. name: for error messages."""

    name: str
    key: str
    free: Callable[["Lease"], None] = field(repr=False)

    def release(self) -> None:
        """Wait for the calls made under it, then free what they put. May be called twice."""
        self.free(self)


@dataclass(frozen=True)
class Column:
    """References to the payload of a batch: row i is row ``row[i]`` of ``handles[part[i]]``."""

    handles: tuple[Handle, ...]
    part: np.ndarray
    row: np.ndarray

    @classmethod
    def whole(cls, handle: Handle, rows: int) -> "Column":
        """Return the column of all rows of one handle, in order."""
        return cls((handle,), np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32))

    def take(self, index: np.ndarray) -> "Column":
        """Select rows, of the same handles."""
        return Column(self.handles, self.part[index], self.row[index])

    def assemble(self, parts: Sequence[Jagged]) -> Jagged:
        """Return the rows in batch order, from the payload of each handle."""
        if len(parts) == 1 and np.array_equal(self.row, np.arange(len(parts[0].offsets) - 1)):
            return parts[0]
        starts = np.concatenate([[0], np.cumsum([len(p.offsets) - 1 for p in parts])])
        return concat_ragged(parts).take(starts[self.part] + self.row)


def concat_ragged(parts: Sequence[Jagged]) -> Jagged:
    """Concatenate the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([p.lengths for p in parts])
    return Jagged.with_lengths(np.concatenate([p.values for p in parts]), lengths)


@dataclass
class Batch:
    """Rows and handles. ``rows`` maps a column name to an array [n] of numbers; NaN in ``reward`` means missing.

    In the controller, a batch and the batches derived from it share the leases of the payload, which lives until one of
    them is released. Leases are not pickled with a batch.
    """

    rows: dict[str, np.ndarray]
    payload: dict[str, Column] = field(default_factory=dict)
    leases: tuple[Lease, ...] = field(default=(), compare=False, repr=False)

    def __len__(self) -> int:
        return len(next(iter(self.rows.values()))) if self.rows else 0

    def __getitem__(self, column: str) -> np.ndarray:
        return self.rows[column]

    def select(self, index: np.ndarray) -> "Batch":
        """Select the rows at ``index`` (integers or a boolean mask), payload by reference."""
        index = np.flatnonzero(index) if index.dtype == bool else index
        rows = {name: values[index] for name, values in self.rows.items()}
        return Batch(rows, {name: column.take(index) for name, column in self.payload.items()}, self.leases)

    def with_rows(self, **columns: np.ndarray) -> "Batch":
        """Return a batch with these row columns [n] added or replaced. ArgumentError for a column of another length."""
        for name, values in columns.items():
            if self.rows and np.shape(values)[:1] != (len(self),):
                raise ArgumentError(f"column {name} has shape {np.shape(values)}, the batch {len(self)} rows", key=name)
        return Batch({**self.rows, **columns}, dict(self.payload), self.leases)

    def with_payload(self, **columns: Column) -> "Batch":
        """Return a batch with these payload columns added or replaced."""
        return Batch(dict(self.rows), {**self.payload, **columns}, self.leases)

    def read(self, store: Store, *columns: str) -> dict[str, Jagged]:
        """Read payload columns, rows in the order of the batch."""
        return {c: self.payload[c].assemble([store.get(h) for h in self.payload[c].handles]) for c in columns}

    def release(self) -> None:
        """Free the payload, also of every batch that shares its leases."""
        for lease in self.leases:
            lease.release()

    def __reduce__(self) -> tuple[type["Batch"], tuple[Any, ...]]:
        return Batch, (self.rows, self.payload)


def concat(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches. Payload columns must agree; a missing row column is NaN if floating, else a KeyError."""
    first = batches[0]
    names = dict.fromkeys(name for b in batches for name in b.rows)
    rows = {name: np.concatenate([_row_column(b, name, batches) for b in batches]) for name in names}
    payload = {c: _concat_columns([b.payload[c] for b in batches]) for c in first.payload}
    return Batch(rows, payload, tuple(dict.fromkeys(lease for b in batches for lease in b.leases)))


def _row_column(batch: Batch, name: str, batches: Sequence[Batch]) -> np.ndarray:
    if name in batch.rows:
        return batch.rows[name]
    dtype = next(b.rows[name].dtype for b in batches if name in b.rows)
    if dtype.kind != "f":
        raise KeyError(f"row column {name!r} ({dtype}) is missing in one of the batches")
    return np.full(len(batch), np.nan, dtype)


def _concat_columns(columns: Sequence[Column]) -> Column:
    handles: dict[Handle, int] = {}
    for column in columns:
        for handle in column.handles:
            handles.setdefault(handle, len(handles))
    lookup = [np.array([handles[h] for h in c.handles], np.int32) for c in columns]
    part = np.concatenate([table[c.part] for table, c in zip(lookup, columns)])
    return Column(tuple(handles), part, np.concatenate([c.row for c in columns]))
