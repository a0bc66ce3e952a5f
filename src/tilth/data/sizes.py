"""Bound what a file of data decodes to: text and rows compressed beyond reason are refused before they fill memory."""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tilth.core.errors import DataError

PIECE = 1 << 26
"""Decoded bytes that are converted to Python objects at once, and that any file may have."""
BATCH = 1 << 28
"""Decoded bytes of a Parquet file held at once, and most of a line of compressed text."""
RATIO = 1000
"""Most decoded bytes for each byte of a larger file: gzip's own limit; real data has below 200."""
ROWS = 1024
"""Rows of a table converted to Python objects at once."""

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 4}
"""Least bytes of a decoded value; of a text those of its index."""
_TEXTS = {pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()}

Sizes = np.ndarray[Any, np.dtype[np.int64]]
"""Bytes of each value."""


class Budget:
    """Decoded bytes that a file may still have: the greater of ``PIECE`` and ``RATIO`` times its size."""

    def __init__(self, path: Path) -> None:
        self._path, self._size, self._used = path, path.stat().st_size, 0
        self._most = max(PIECE, RATIO * self._size)

    def take(self, size: int, column: str = "") -> None:
        """Count decoded bytes. Raises ``DataError`` if that is more than is left."""
        self._used += size
        if self._used > self._most:
            part = f"column {column!r} of {str(self._path)!r}" if column else repr(str(self._path))
            message = (
                f"{part} decodes to {self._used} bytes or more, the file has {self._size}; at most {RATIO} for each "
                f"byte are read, so write the file without compression and dictionaries, or in several files"
            )
            raise DataError(message, key=f"{self._path.name}.{column or 'size'}")


class BoundedReader(io.RawIOBase):
    """Decompressed bytes of a file, within its budget."""

    def __init__(self, inner: BinaryIO, path: Path) -> None:
        self._inner, self._path, self._budget, self._line = inner, path, Budget(path), 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; return the number of bytes."""
        found = self._inner.read(len(buffer))
        buffer[: len(found)] = found
        self._budget.take(len(found))
        self._line = len(found) - 1 - end if (end := found.rfind(b"\n")) >= 0 else self._line + len(found)
        if self._line > BATCH:
            message = f"{self._path.name} has a line of more than {BATCH} bytes; write a record on each line"
            raise DataError(message, key=f"{self._path.name}.line")
        return len(found)

    def close(self) -> None:
        """Close the file too."""
        self._inner.close()
        super().close()


def check_parquet(path: Path, file: pq.ParquetFile) -> None:
    """Raise ``DataError`` if the footer of a Parquet file announces values beyond its budget."""
    for i in range(file.metadata.num_columns):
        budget, column = Budget(path), file.metadata.schema.column(i)
        width = _WIDTHS.get(column.physical_type, max(1, column.length))
        for group in range(file.metadata.num_row_groups):
            chunk = file.metadata.row_group(group).column(i)
            budget.take(max(chunk.total_uncompressed_size, chunk.num_values * width), column.path)


def batch_rows(path: Path, file: pq.ParquetFile) -> int:
    """Return the rows of a Parquet file that decode to at most ``BATCH`` bytes, whatever value each of them repeats."""
    longest = 1
    with path.open("rb") as raw:
        for group, i in itertools.product(range(file.metadata.num_row_groups), range(file.metadata.num_columns)):
            chunk = file.metadata.row_group(group).column(i)
            if chunk.physical_type == "BYTE_ARRAY":
                prefixed = "DELTA_BYTE_ARRAY" in chunk.encodings  # each value may begin as the one before
                longest = max(longest, chunk.total_uncompressed_size if prefixed else _dictionary_size(raw, chunk))
    return min(ROWS, max(1, BATCH // longest))


def _dictionary_size(raw: BinaryIO, chunk: pq.ColumnChunkMetaData) -> int:
    """Return the decompressed bytes of a column's dictionary, from the header of its first page; 0: it has none.

    The header begins with the page's type, 2 for a dictionary, and its size, as integers of Thrift's compact protocol.
    """
    raw.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
    head = raw.read(9)
    if head[:3] != b"\x15\x04\x15":
        return 0
    size = 0
    for place, byte in enumerate(head[3:]):
        size |= (byte & 127) << 7 * place
        if byte < 128:
            break
    return size >> 1


def pieces(batch: pa.RecordBatch, budget: Budget | None = None) -> Iterator[pa.RecordBatch]:
    """Yield slices of at most ``ROWS`` rows and ``PIECE`` decoded bytes, or of one row."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for name, column in zip(batch.schema.names, batch.columns):
        own = _sizes(column)
        sizes += own
        if budget is not None:
            budget.take(int(own.sum()), name)
    ends, start = np.cumsum(sizes), 0
    while start < batch.num_rows:
        before = ends[start] - sizes[start]
        rows = int(np.searchsorted(ends, before + PIECE, "right")) - start
        rows = min(max(rows, 1), ROWS)
        yield batch.slice(start, rows)
        start += rows


def _sizes(array: pa.Array) -> Sizes:
    """Return the decoded bytes of each value, with what lists, dictionaries and runs repeat."""
    kind, none = array.type, np.zeros(len(array), np.int64)
    if isinstance(array, pa.ExtensionArray):
        return _sizes(array.storage)
    if isinstance(array, pa.DictionaryArray):
        values = np.append(_sizes(array.dictionary), 0)
        return values[pc.fill_null(array.indices, len(values) - 1).cast(pa.int64()).to_numpy(zero_copy_only=False)]
    if isinstance(array, pa.RunEndEncodedArray):
        places = np.arange(array.offset, array.offset + len(array))
        return _sizes(array.values)[np.searchsorted(array.run_ends.to_numpy(), places, "right")]
    if pa.types.is_struct(kind):
        return sum((_sizes(array.field(i)) for i in range(kind.num_fields)), none)
    if pa.types.is_union(kind):  # a dense one may repeat a value
        most = max((int(_sizes(array.field(i)).max(initial=0)) for i in range(kind.num_fields)), default=0)
        return none + most
    if pa.types.is_fixed_size_list(kind):
        at, size = array.offset, kind.list_size
        return _sizes(array.values.slice(at * size, len(array) * size)).reshape(len(array), size).sum(axis=1)
    if pa.types.is_nested(kind):
        return _list_sizes(array)
    return _text_sizes(array) if kind in _TEXTS else none + 8


def _list_sizes(array: Any) -> Sizes:
    """Return the decoded bytes of each list, views that overlap as often as they do."""
    ends = np.append(0, np.cumsum(_sizes(array.values)))
    offsets = array.offsets.to_numpy()
    views = hasattr(array, "sizes")
    return np.asarray(ends[offsets + array.sizes.to_numpy()] - ends[offsets] if views else np.diff(ends[offsets]))


def _text_sizes(array: pa.Array) -> Sizes:
    """Return the bytes of each text."""
    if array.type in (pa.string_view(), pa.binary_view()):  # the first of four words of a view is its length
        words = np.frombuffer(array.buffers()[1] or b"", np.int32)
        return words[4 * array.offset :: 4][: len(array)].astype(np.int64)
    return np.asarray(pc.fill_null(pc.binary_length(array), 0).cast(pa.int64()).to_numpy())
