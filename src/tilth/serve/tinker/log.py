"""Log of what a client has asked for and what it was answered, on disk before it is acknowledged."""

import json
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tilth.core.files import atomic_write, make_folder, sync, writing

_HEAD = struct.Struct("<III")
"""Bytes of the header, bytes of the body, checksum of both."""


class Record(NamedTuple):
    """One entry: a JSON header and a body."""

    head: dict[str, Any]
    body: bytes = b""


class RequestLog:
    """Append-only file of records. A record that was cut off by a kill is dropped when the file is opened.

    Raises StorageError if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        self.records, good = _read(path)
        """Records that were there when it was opened."""
        with writing(path):
            new = not path.exists()
            with open(path, "ab") as file:
                file.truncate(good)
            if new:
                sync(path.parent)
        self.size = good
        """Bytes."""

    def append(self, record: Record, *, durable: bool = True) -> None:
        """Write a record. durable: also under a power cut, when this returns."""
        raw = _raw(record)
        with writing(self.path), open(self.path, "ab") as file:  # anew: a process has fewer descriptors than logs
            file.write(raw)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        self.size += len(raw)

    def replace(self, records: Iterable[Record]) -> None:
        """Replace all records atomically."""
        raw = b"".join(map(_raw, records))
        with atomic_write(self.path) as made:
            made.write_bytes(raw)
        self.size = len(raw)


def _raw(record: Record) -> bytes:
    head = json.dumps(record.head).encode()
    return _HEAD.pack(len(head), len(record.body), zlib.crc32(record.body, zlib.crc32(head))) + head + record.body


def _read(path: Path) -> tuple[list[Record], int]:
    """Return the whole records of a file, and where they end."""
    raw, at, found = path.read_bytes() if path.exists() else b"", 0, list[Record]()
    while at + _HEAD.size <= len(raw):
        head, body, check = _HEAD.unpack_from(raw, at)
        start = at + _HEAD.size
        end = start + head + body
        if end > len(raw) or zlib.crc32(raw[start:end]) != check:
            break
        found.append(Record(json.loads(raw[start : start + head]), raw[start + head : end]))
        at = end
    return found, at
