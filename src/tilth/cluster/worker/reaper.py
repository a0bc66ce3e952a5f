"""Run beside a local cluster: kills its workers and removes its folder when the controller is gone.

A worker leaves by itself when its connection ends, but one that is stopped or holds the GIL cannot. This process only
waits: its standard input names the workers, a line each, and ends with the controller; the line "done" says that there
is nothing to do. It is run as a file and imports nothing of Tilth, so that it starts in a moment and stays small.
"""

import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress

import psutil


def main(folder: str) -> None:
    """Read process ids until the end of the controller. An id is looked up at once: later it might be another's."""
    workers: list[psutil.Process] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        if psutil.pid_exists(int(line)):
            workers.append(psutil.Process(int(line)))
    kill(workers)
    shutil.rmtree(folder, ignore_errors=True)


def kill(workers: Iterable[psutil.Process]) -> None:
    """End these processes and all that they have started, also what has left their group (reward processes)."""
    for process in [process for worker in workers if worker.is_running() for process in (worker, *below(worker))]:
        _end(process)


def below(worker: psutil.Process) -> list[psutil.Process]:
    """What a process has started, and what that has."""
    try:
        return worker.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):  # it has left already
        process.kill()


if __name__ == "__main__":
    main(sys.argv[1])
