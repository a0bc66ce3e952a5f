"""Run beside a local cluster: kills its workers and removes its folder when the controller is gone.

A worker leaves by itself when its connection ends, but one that is stopped or holds the GIL cannot. This process only
waits: its standard input names the workers, a line each, and ends with the controller; the line "done" says that there
is nothing to do. It is run as a file, with the standard library alone, so that it starts in a moment and stays small.
"""

import os
import shutil
import signal
import sys


def main(folder: str) -> None:
    """Read process ids; a handle on each, where the system has one, tells it from a later process of its number."""
    handles: dict[int, int | None] = {}
    for line in sys.stdin:
        if line.strip() == "done":
            return
        pid = int(line)
        handles[pid] = _handle(pid)
    for pid, handle in handles.items():
        _kill(pid, handle)
    shutil.rmtree(folder, ignore_errors=True)


def _handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        return -1


def _kill(pid: int, handle: int | None) -> None:
    """The worker's whole group, if the worker is still the process that was named."""
    try:
        if handle is not None:
            signal.pidfd_send_signal(handle, 0)
        os.killpg(pid, signal.SIGKILL)
    except OSError:  # it has left already
        return


if __name__ == "__main__":
    main(sys.argv[1])
