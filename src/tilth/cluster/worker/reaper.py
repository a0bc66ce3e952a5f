"""Process beside a local cluster that kills its workers and removes its directory if the controller dies.

A worker ends with its connection, but not while it is stopped or holds the GIL. Standard input lists the process ids of
the workers, a line each, and ends with the controller; the line "done" ends this process without effect. It is run as a
file and imports nothing of Tilth, so that it starts fast and stays small.
"""

import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress

import psutil


def main(folder: str) -> None:
    """Read process ids until the controller ends. Each is looked up at once: the system may reuse it later."""
    workers: list[psutil.Process] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        workers += running([int(line)])
    kill(workers)
    shutil.rmtree(folder, ignore_errors=True)


def running(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes of those ids that have one; any may end meanwhile."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def kill(workers: Iterable[psutil.Process]) -> None:
    """Kill these processes and their descendants, including those that left their group (reward processes)."""
    for process in [process for worker in workers if worker.is_running() for process in (worker, *below(worker))]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def below(worker: psutil.Process) -> list[psutil.Process]:
    """Return the descendants of a process."""
    try:
        return worker.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    main(sys.argv[1])
