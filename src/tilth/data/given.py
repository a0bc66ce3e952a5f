"""Records that a program brings: lists and iterators, tables of pandas, polars and Arrow, datasets of Hugging Face.

No library of tables is imported: each is known by what it can do. An empty cell of a table (None, NaN, NaT) is None.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NoReturn, Protocol

import pyarrow as pa

from tilth.core.errors import DataError
from tilth.data.formats import ROWS, Record, is_file_name, rows_of

ACCEPTED = (
    "a list or iterator of records (dictionaries) or of texts, a DataFrame, an Arrow table, a datasets.Dataset, or the "
    "name of a file, folder or task"
)


class ArrowTable(Protocol):
    """A table that can be read as Arrow: a DataFrame of pandas or polars, a table of pyarrow, a relation of duckdb."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """A capsule with the table's batches."""
        ...


Given = Iterable[Mapping[str, Any] | str] | ArrowTable
"""Records by value, see ``ACCEPTED``."""


def placed(data: Any, name: str = "data") -> Iterator[tuple[str, Any]]:
    """(place, record) of every record, in order; an iterator is read once, a table in pieces, without a copy of it.

    name: of the argument, for errors. Raises DataError at once for what holds no records: see ``ACCEPTED``.
    """
    _check(data, name)
    return _counted(_rows(data, name), name)


def _rows(data: Any, name: str) -> Iterable[Any]:
    if all(hasattr(data, attribute) for attribute in ("iloc", "columns", "to_dict")):
        return _frame(data, name)
    if hasattr(data, "__arrow_c_stream__") and (hasattr(data, "columns") or hasattr(data, "schema")):
        return (_plain(row) for row in rows_of(pa.RecordBatchReader.from_stream(data)))
    if hasattr(data, "column_names"):  # of datasets: its rows are dictionaries, of tensors if it is told so
        return map(_plain, data)
    if isinstance(data, Iterable):
        return data
    hint = "; .collect() makes a DataFrame of it" if hasattr(data, "collect") else ""
    hint = hint or ("; call it, and give what it yields" if callable(data) else "")
    _refuse(name, f"of type {_kind(data)}{hint}")


def _frame(frame: Any, name: str) -> Iterator[Record]:
    """Rows of a pandas.DataFrame, without its index."""
    columns = [str(column) for column in frame.columns]
    twice = [column for column, count in Counter(columns).items() if count > 1]
    if twice:
        raise DataError(f"{name} has {len(twice)} columns whose name is there twice, such as {twice[0]!r}; rename them")
    for start in range(0, len(frame), ROWS):
        yield from map(_plain, frame.iloc[start : start + ROWS].to_dict("records"))


def _counted(rows: Iterable[Any], name: str) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, 1):
        if number == 1 and isinstance(row, str) and is_file_name(row):
            _refuse(name, f"the names of files, such as {row[:60]!r}, not their records; name one, or a pattern, alone")
        yield f"record {number}" if name == "data" else f"{name} record {number}", row


def _check(data: Any, name: str) -> None:
    """DataError for what can be iterated over, but not over records."""
    if isinstance(data, (str, bytes, bytearray, PurePath)):
        _refuse(name, f"of type {_kind(data)}, one value")
    if isinstance(data, Mapping):
        if data and all(hasattr(split, "column_names") for split in data.values()):
            names = [str(split) for split in data]
            held = f", {name}[{names[1]!r}] as heldout" if len(names) > 1 else ""
            one = f"give one split, such as {name}[{names[0]!r}]{held}"
            _refuse(name, f"a {_kind(data)} of {', '.join(names)}; {one}")
        _refuse(name, f"one {_kind(data)}; give a list of such records, as in [{{'prompt': ..., 'answer': ...}}]")
    if isinstance(data, (set, frozenset)):
        _refuse(name, f"a {_kind(data)}, which has no order, so that no run can go on with it; give a list")
    if hasattr(data, "read"):
        _refuse(name, f"an open file ({_kind(data)}), whose lines are no records; give its name")


def _refuse(name: str, what: str) -> NoReturn:
    raise DataError(f"{name} is {what}. It can be {ACCEPTED}")


def _kind(data: Any) -> str:
    kind = type(data)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}.{kind.__name__}"


def nothing_in(data: Any, name: str) -> str:
    """The error of data without a record."""
    once = "; an iterator gives its records once: make it anew" if hasattr(data, "__next__") else ""
    return f"{name} is empty{once}"


# -- cells -------------------------------------------------------------------------------------------------------------

_NONE = ("NaTType", "NAType")
"""Types of pandas for a cell that is empty; they are equal to nothing, themselves neither."""


def _plain(value: Any) -> Any:
    """A cell as plain Python: numbers and texts, lists and dictionaries of them, None where there is nothing."""
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
    """What ``data.source`` would be for a name of a file, folder or task; None for records by value."""
    return os.fspath(data) if isinstance(data, (str, os.PathLike)) else None
