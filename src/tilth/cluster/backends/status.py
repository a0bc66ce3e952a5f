"""The phase board: what each worker is doing, in a small file that every process of the machine maps.

The controller reads it without asking the worker, so it is right for one that is stopped or holds the GIL.
"""

import mmap
import struct
import time
from pathlib import Path

from tilth.cluster.backends.capacity import advice
from tilth.core.errors import StorageError

SLOT = 256
"""Bytes a worker: when the call began (float64, monotonic seconds), the length of its name (uint16), the name."""
_HEAD = struct.Struct("<dH")


class StatusBoard:
    """One slot a worker."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, workers: int) -> "StatusBoard":
        """A new board, all workers between calls. StorageError if there is no room for it."""
        try:
            path.write_bytes(bytes(SLOT * workers))
        except OSError as error:
            message = f"{path} could not be written: {error.strerror}{advice(error)}"
            raise StorageError(message, key=path.name) from None
        return cls(path)

    def mark(self, rank: int, phase: str) -> None:
        """Say what this worker does from now on, "" for nothing. A name is cut at what the slot holds."""
        name = phase.encode()[: SLOT - _HEAD.size]
        start = rank * SLOT
        self._map[start : start + _HEAD.size + len(name)] = _HEAD.pack(time.monotonic(), len(name)) + name

    def read(self, rank: int) -> str:
        """ "policy.update (for 3.1 s)", or "" between calls."""
        start = rank * SLOT
        since, length = _HEAD.unpack_from(self._map, start)
        name = self._map[start + _HEAD.size : start + _HEAD.size + length].decode(errors="replace")
        return f"{name} (for {time.monotonic() - since:.1f} s)" if name else ""

    def close(self) -> None:
        """Unmap."""
        self._map.close()
