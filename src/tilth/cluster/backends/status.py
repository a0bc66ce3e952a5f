"""Status board: call, open spans and signs of life of each worker, in a small file that all processes of a machine map.

The controller reads it without the worker, so it is correct for one that is stopped or holds the GIL.
"""

import mmap
import struct
import time
from pathlib import Path

from tilth.cluster.backends.capacity import advice
from tilth.core.errors import StorageError
from tilth.trace.spans import SHOWN, opened

SLOT = 512
"""Bytes per worker: begin of the call (float64, monotonic seconds), length of its name (uint16), the name; at the end
the open spans of the thread that executes calls (``SHOWN``) and its signs of life (uint64, uint64) and when each last
grew (float64, monotonic seconds)."""
_HEAD = struct.Struct("<dH")
_COUNTS = struct.Struct("<QQdd")
_TAIL = SHOWN.size + _COUNTS.size
LONGEST = SLOT - _HEAD.size - _TAIL
"""Bytes of a call's name."""


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
        name = phase.encode()[:LONGEST]
        start = rank * SLOT
        self._map[start : start + _HEAD.size + len(name)] = _HEAD.pack(time.monotonic(), len(name)) + name

    def read(self, rank: int) -> str:
        """Return the call and its duration so far, "policy.update (for 3.1 s)", or "" between calls."""
        start = rank * SLOT
        since, length = _HEAD.unpack_from(self._map, start)
        name = self._map[start + _HEAD.size : start + _HEAD.size + length].decode(errors="replace")
        return f"{name} (for {time.monotonic() - since:.1f} s)" if name else ""

    def room(self, rank: int) -> memoryview:
        """Return the room for a worker's open spans, for ``show_open``."""
        end = (rank + 1) * SLOT - _COUNTS.size
        return memoryview(self._map)[end - SHOWN.size : end]

    def spans(self, rank: int) -> list[tuple[str, int]]:
        """Return (operation, micro_batch) of the open spans of a worker, the outermost first."""
        start = (rank + 1) * SLOT - _TAIL
        return opened(self._map[start : start + SHOWN.size])

    def beat(self, rank: int, work: int, beats: int) -> None:
        """Set the signs of life of a worker: two numbers that grow, with its work and with time."""
        at, now = (rank + 1) * SLOT - _COUNTS.size, time.monotonic()
        before, _, beat, since = _COUNTS.unpack_from(self._map, at)
        _COUNTS.pack_into(self._map, at, work, beats, now, since if work == before and beat else now)

    def life(self, rank: int) -> tuple[int, int]:
        """Return the signs of life of a worker."""
        work, beats, _, _ = _COUNTS.unpack_from(self._map, (rank + 1) * SLOT - _COUNTS.size)
        return int(work), int(beats)

    def ages(self, rank: int) -> tuple[float, float] | None:
        """Return the seconds since a worker was last known to run, and to get on with its work; None before that."""
        _, _, beat, since = _COUNTS.unpack_from(self._map, (rank + 1) * SLOT - _COUNTS.size)
        now = time.monotonic()
        return (now - beat, now - since) if beat else None

    def clear(self, rank: int) -> None:
        """Forget a worker that was lost."""
        self._map[rank * SLOT : (rank + 1) * SLOT] = bytes(SLOT)

    def close(self) -> None:
        """Unmap."""
        self._map.close()
