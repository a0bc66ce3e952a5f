"""Status board: the current call of each worker, in a small file that all processes of the machine map.

The controller reads it without the worker, so it is correct for one that is stopped or holds the GIL.
"""

import mmap
import struct
import time
from pathlib import Path

from tilth.cluster.backends.capacity import advice
from tilth.core.errors import StorageError

SLOT = 256
"""Bytes per worker: begin of the call (float64, monotonic seconds), length of its name (uint16), the name."""
_HEAD = struct.Struct("<dH")


class StatusBoard:
    """One slot per worker."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, workers: int) -> "StatusBoard":
        """Create a board with all workers idle. Raises StorageError if the file cannot be written."""
        try:
            path.write_bytes(bytes(SLOT * workers))
        except OSError as error:
            message = f"{path} could not be written: {error.strerror}{advice(error)}"
            raise StorageError(message, key=path.name) from None
        return cls(path)

    def mark(self, rank: int, phase: str) -> None:
        """Set the current call of a worker, "" for none; a long name is cut to the slot."""
        name = phase.encode()[: SLOT - _HEAD.size]
        start = rank * SLOT
        self._map[start : start + _HEAD.size + len(name)] = _HEAD.pack(time.monotonic(), len(name)) + name

    def read(self, rank: int) -> str:
        """Return the call and its duration so far, "policy.update (for 3.1 s)", or "" between calls."""
        start = rank * SLOT
        since, length = _HEAD.unpack_from(self._map, start)
        name = self._map[start + _HEAD.size : start + _HEAD.size + length].decode(errors="replace")
        return f"{name} (for {time.monotonic() - since:.1f} s)" if name else ""

    def close(self) -> None:
        """Unmap."""
        self._map.close()
