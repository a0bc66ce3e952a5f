"""Records that a program passes: lists and iterators, tables of pandas, polars and Arrow, datasets of Hugging Face.

No table library is imported: each is recognised by its methods. An empty cell of a table (None, NaN, NaT) is None.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Protocol

import pyarrow as pa

from tilth.config.code import describe
from tilth.core.errors import DataError
from tilth.data.formats import Record, is_file_name, rows_of
from tilth.data.sizes import ROWS

ACCEPTED = (
    "a list or iterator of records (dictionaries) or of texts, a DataFrame, an Arrow table, a datasets.Dataset, an "
    "object with __len__ and __getitem__, or the name of a file, folder or task"
)


class RandomAccess(Protocol):
    """Records by index, read when they are asked for: a source of Grain, a ``torch.utils.data.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any] | str:
        """Return the record at an index in [0, len)."""
        ...


class ArrowTable(Protocol):
    """A table with an Arrow stream: a DataFrame of pandas or polars, a table of pyarrow, a relation of duckdb."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a capsule with the table's batches."""
        ...


Given = Iterable[Mapping[str, Any] | str] | ArrowTable | RandomAccess
"""Records by value, see ``ACCEPTED``."""


def is_random_access(data: Any) -> bool:
    """True for records that are read by index when they are asked for, and in no other way."""
    table = hasattr(data, "__arrow_c_stream__")
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not table and not isinstance(data, Iterable)


def read_at(data: RandomAccess, index: int, name: str) -> Any:
    """Return one record. DataError, with its place, for whatever the source raises."""
    try:
        return data[index]
    except Exception as error:
        message = f"{place_of(name, index + 1)}: its source raised {describe(error)}"
        raise DataError(message, key=f"{place_of(name, index + 1)}.read") from error


def placed(data: Any, name: str = "data") -> Iterator[tuple[str, Any]]:
    """Yield (place, record) of every record, in order; an iterator is read once, a table in pieces without a copy.
    A record read by index that cannot be read is its ``DataError``.

    name: the argument's name, for errors; it is their key, followed by the kind of a value that is refused. Raises
    DataError at once for a value that holds no records: see ``ACCEPTED``.
    """
    if error := _no_records(data, name):
        raise error
    return _numbered(_rows(data, name), name)


def _rows(data: Any, name: str) -> Iterable[Any]:
    if all(hasattr(data, attribute) for attribute in ("iloc", "columns", "to_dict")):
        return _frame(data, name)
    if hasattr(data, "__arrow_c_stream__") and (hasattr(data, "columns") or hasattr(data, "schema")):
        reader = pa.RecordBatchReader.from_stream(data)
        _check_names(reader.schema.names, name)
        return (_cells(row, name) for row in rows_of(reader))
    if hasattr(data, "to_batches") and hasattr(data, "schema"):  # of Lance, pyarrow.dataset
        _check_names(data.schema.names, name)
        return (_cells(row, name) for row in rows_of(data.to_batches()))
    if hasattr(data, "column_names"):  # of datasets: its rows are dictionaries, of tensors if it is set so
        return (_cells(row, name) for row in data)
    if isinstance(data, Iterable):
        return data
    if is_random_access(data):
        return (_tried(data, i, name) for i in range(len(data)))
    hint = "; .collect() makes a DataFrame of it" if hasattr(data, "collect") else ""
    hint = hint or ("; call it, and give what it yields" if callable(data) else "")
    raise _refused(name, _kind(data), f"of type {_kind(data)}{hint}")


def _frame(frame: Any, name: str) -> Iterator[Record]:
    """Yield the rows of a pandas.DataFrame, without its index."""
    _check_names([str(column) for column in frame.columns], name)
    for start in range(0, len(frame), ROWS):
        yield from (_cells(row, name) for row in frame.iloc[start : start + ROWS].to_dict("records"))


def _check_names(columns: Iterable[str], name: str) -> None:
    """Raise DataError for a column that is there twice: a record has one of each name."""
    twice = [column for column, count in Counter(columns).items() if count > 1]
    if twice:
        message = f"{name} has {len(twice)} columns whose name is there twice, such as {twice[0]!r}; rename them"
        raise DataError(message, key=f"{name}.columns")


def _numbered(rows: Iterable[Any], name: str) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, 1):
        if number == 1 and isinstance(row, str) and is_file_name(row):
            message = f"the names of files, such as {row[:60]!r}, not their records; name one, or a pattern, alone"
            raise _refused(name, "names", message)
        yield place_of(name, number), row


def place_of(name: str, number: int) -> str:
    """Return the place of a record, counted from 1."""
    return f"record {number}" if name == "data" else f"{name} record {number}"


def _tried(data: RandomAccess, index: int, name: str) -> Any:
    """Return a record, or the error of reading it."""
    try:
        return read_at(data, index, name)
    except DataError as error:
        return error


def _no_records(data: Any, name: str) -> DataError | None:
    """Error for an iterable that does not iterate over records."""
    kind = _kind(data)
    if isinstance(data, (str, bytes, bytearray, PurePath)):
        return _refused(name, kind, f"of type {kind}, one value")
    if isinstance(data, Mapping) and data and all(hasattr(split, "column_names") for split in data.values()):
        names = [str(split) for split in data]
        held = f", {name}[{names[1]!r}] as heldout" if len(names) > 1 else ""
        one = f"give one split, such as {name}[{names[0]!r}]{held}"
        return _refused(name, "splits", f"a {kind} of {', '.join(names)}; {one}")
    if isinstance(data, Mapping):
        return _refused(name, kind, f"one {kind}; give a list of records, as in [{{'prompt': ..., 'answer': ...}}]")
    if isinstance(data, (set, frozenset)):
        return _refused(name, kind, f"a {kind}, which has no order, so that no run can resume with it; give a list")
    if hasattr(data, "read"):
        return _refused(name, "file", f"an open file ({kind}), whose lines are no records; give its name")
    return None


def _refused(name: str, kind: str, problem: str) -> DataError:
    return DataError(f"{name} is {problem}. It can be {ACCEPTED}", key=f"{name}.{kind}")


def _kind(data: Any) -> str:
    kind = type(data)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}.{kind.__name__}"


def nothing_in(data: Any, name: str) -> DataError:
    """Return the error for data without a record."""
    hint = "; an iterator gives its records once: make it anew" if hasattr(data, "__next__") else ""
    return DataError(f"{name} is empty{hint}", key=f"{name}.exhausted" if hint else name)


# -- cells -------------------------------------------------------------------------------------------------------------

_NONE = ("NaTType", "NAType")
"""Types of pandas for an empty cell; they equal nothing, not even themselves."""


def _cells(row: Any, name: str) -> Any:
    """Convert a row to plain Python. DataError: a value is nested too deep."""
    try:
        return _plain(row)
    except RecursionError:
        raise DataError(f"{name} has a value that is nested too deep to be read", key=f"{name}.depth") from None


def _plain(value: Any) -> Any:
    """Convert a cell to plain Python: numbers, texts, lists and dictionaries of them, None for an empty cell."""
    if value is None or type(value) in (str, bool, int, bytes):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if type(value).__name__ in _NONE:
        return None
    if isinstance(value, float):
        return None if value != value else float(value)
    if hasattr(value, "tolist"):  # a scalar or an array of numpy, a tensor
        return _plain(value.tolist())
    return str(value)


def file_name(data: Any) -> str | None:
    """Return ``data.source`` for a path or a name of a file, folder or task; None for records by value."""
    return os.fspath(data) if isinstance(data, (str, os.PathLike)) else None
