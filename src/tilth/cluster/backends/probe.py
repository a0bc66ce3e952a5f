"""State of the workers of one machine, read from outside: correct for one that is stopped or holds the GIL."""

import faulthandler
import os
import signal
import time
from pathlib import Path

import psutil

from tilth.cluster.backends.base import Probe
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.status import StatusBoard

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
