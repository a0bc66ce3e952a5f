"""State of the workers of one machine, read from outside: correct for one that is stopped or holds the GIL."""

import faulthandler
import mmap
import os
import signal
import struct
import time
from pathlib import Path

import psutil

from tilth.cluster.backends.base import Probe
from tilth.cluster.backends.capacity import advice
from tilth.cluster.backends.session_dir import SessionDir
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


STACK = 1.0
"""Seconds for a worker to write its stacks; a signal handler does, so only a stopped one takes longer."""
GONE = "gone"
SILENT = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, GONE)
"""States of a process that answers nothing."""
TAIL = 4000
"""Bytes of a lost worker's log in its error."""
FATAL = "Fatal Python error: "
"""Beginning of the stacks of a process that a signal of its own ends, as that of an abort."""


def show_stacks(path: Path) -> None:
    """Append the stacks of all threads of this process to a file on each SIGUSR1, whatever Python does, and before it
    ends by an abort or a fault."""
    stack = open(path, "w")  # noqa: SIM115 - it stays open: the signal handler writes to it
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack, all_threads=True)


class NodeProbe:
    """Reads the operating system, the status board and the stacks that signal handlers write."""

    def __init__(self, folder: SessionDir, workers: int) -> None:
        self.folder = folder
        self.board = StatusBoard.create(folder.board, workers)

    def probe(self, rank: int, pid: int) -> Probe:
        """Return the state of a worker, in at most about a second."""
        doing, opened = self.board.read(rank), self.board.spans(rank)
        try:
            state = psutil.Process(pid).status()
            stack = self._fatal(rank) if state in SILENT else self._stack(rank, pid)
        except (psutil.NoSuchProcess, ProcessLookupError):  # it may end between the two
            state, stack = GONE, self._fatal(rank)
        return Probe(rank, pid, state, doing, stack, opened)

    def _fatal(self, rank: int) -> str:
        """Return the stacks with which a worker ended; "" if it did not write them."""
        path = self.folder.stack(rank)
        _, head, text = path.read_text(errors="replace").rpartition(FATAL) if path.exists() else ("", "", "")
        return head + text if head else ""

    def _stack(self, rank: int, pid: int) -> str:
        """Return what the worker's handler of SIGUSR1 appends to its file."""
        path, until = self.folder.stack(rank), time.monotonic() + STACK
        before = size = path.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        while time.monotonic() < until:
            time.sleep(0.05)  # a file of another process, written in one go: nothing to wait on
            size, last = path.stat().st_size, size
            if size == last > before:
                break
        return path.read_bytes()[before:].decode(errors="replace")

    def ending(self, rank: int, pid: int, how: str) -> str:
        """Describe a lost worker: how it ended, its current call, the end of its log."""
        phase = self.board.read(rank)
        doing = f"while in {phase}" if phase else "between calls"
        doing += f" ({fatal.splitlines()[0]})" if (fatal := self._fatal(rank)) else ""
        return f"the worker (process {pid}) {how} {doing}{self.log_end(rank)}"

    def log_end(self, rank: int) -> str:
        """Return the last lines of a worker's log as the end of a message; "" without any."""
        path = self.folder.log(rank)
        text = path.read_bytes()[-TAIL:].decode(errors="replace").strip() if path.exists() else ""
        return "; its log ends:\n" + "\n".join(f"    {line}" for line in text.splitlines()) if text else ""
