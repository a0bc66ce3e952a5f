"""Payload store of the local backend: one file per column in the session directory, mapped by its readers.

The files belong to no process, so a column outlives the rank that put it. In /dev/shm they are shared memory.
"""

import itertools
import mmap
import os
import secrets
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import xxhash

from tilth.cluster.backends.capacity import advice
from tilth.core.batch import Handle, Jagged
from tilth.core.errors import ArgumentError, ReplicaMismatch, StorageError
from tilth.trace.spans import span

HEADER = 64
"""Bytes before the offsets (int64) and the values: dtype (numpy's string, padded to 40), xxh3 of all that follows the
header (uint64), counts of offsets and values (int64)."""
_NAME = 40


def column_key(lease: str, column: str, writer: str, number: int) -> str:
    """Return the key of a column: unique, and fit for the name of a file."""
    return f"{lease}~{quote(column, safe='')}-{writer}-{number}"


def process_name(writer: str) -> str:
    """Return a name that this process alone has, always of one length: a worker that replaces one of the same rank
    counts its columns from 0 again, and those of the one before may still be there."""
    return f"{writer}.{secrets.token_hex(4)}"


def column_of(key: str) -> str:
    """Return the column's name that a key from ``column_key`` holds."""
    return unquote(key.partition("~")[2].rsplit("-", 2)[0])


class FolderStore:
    """Columns as files of a folder that all processes of one machine share. writer: rank, in its keys."""

    def __init__(self, folder: Path, writer: str) -> None:
        self.folder = folder
        self.lease = ""
        self._writer = process_name(writer)
        self._numbers = itertools.count()

    def put(self, column: str, data: Jagged) -> Handle:
        """Write a column. Raises StorageError if there is no room, ArgumentError unless its values are 1-D numbers."""
        values, offsets = np.ascontiguousarray(data.values), np.ascontiguousarray(data.offsets, np.int64)
        if values.ndim != 1 or values.dtype.hasobject:
            message = f"column {column!r}: payload is one row of numbers, not {values.dtype} of {values.shape}"
            raise ArgumentError(message, key=column)
        key = column_key(self.lease, column, self._writer, next(self._numbers))
        handle = Handle(key, values.nbytes + offsets.nbytes)
        sizes = np.array([_digest(offsets, values), len(offsets), len(values)], np.uint64)
        try:
            with span("payload.put", bytes=handle.nbytes), open(self.folder / handle.key, "xb") as file:
                file.write(values.dtype.str.encode().ljust(_NAME) + sizes.tobytes())
                file.write(offsets.data)
                file.write(values.data)
        except OSError as error:
            raise _no_room(self.folder, column, handle.nbytes, error) from None
        return handle

    def get(self, handle: Handle) -> Jagged:
        """Return a column as a private map, which takes memory for what is read. Raises KeyError if it was released,
        ReplicaMismatch if it is not what was put."""
        try:
            with span("payload.get", bytes=handle.nbytes), open(self.folder / handle.key, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise KeyError(handle.key) from None
        digest, count, length = np.frombuffer(data, np.uint64, 3, _NAME).tolist()
        dtype = np.dtype(data[:_NAME].decode().strip())
        offsets = np.frombuffer(data, np.int64, count, HEADER)
        values = np.frombuffer(data, dtype, length, HEADER + offsets.nbytes)
        if _digest(offsets, values) != digest:
            column = column_of(handle.key)
            message = f"payload column {column!r} in {self.folder} has other bits than those that were put there"
            raise ReplicaMismatch(message, key=column)
        return Jagged(values, offsets)

    def release(self, *leases: str) -> None:
        gone = set(leases)
        for key in os.listdir(self.folder) if self.folder.is_dir() else ():
            if key.partition("~")[0] in gone:
                (self.folder / key).unlink(missing_ok=True)

    def held(self) -> dict[str, int]:
        """Return the bytes of each column by key; {} after a failure has removed the folder, which must be reported."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return {path.name: path.stat().st_size - HEADER for path in found}


def _digest(offsets: np.ndarray, values: np.ndarray) -> int:
    hasher = xxhash.xxh3_64(offsets.data)
    hasher.update(values.data)
    return hasher.intdigest()


def _no_room(folder: Path, column: str, size: int, error: OSError) -> StorageError:
    return StorageError(
        f"payload column {column!r} of {size} bytes could not be put in {folder}: {error.strerror}{advice(error)}",
        key=column,
    )
