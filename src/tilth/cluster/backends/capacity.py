"""Limits of one machine: how many workers it can take, and how long they may take to start."""

import errno
import math
import os

import psutil

from tilth.core.errors import RecipeError
from tilth.core.memory import core_limit, host_memory

PER_CORE = 8
"""Workers per CPU core that still make sense, to compare layouts on a small machine."""
WORKER = 360_000_000
"""Bytes of memory of an empty worker."""
BUSIEST = 10
"""Largest factor by which a busy machine may be slower."""


def patience(seconds: float) -> float:
    """Return a time limit that grows with the load per core of this machine, up to ``BUSIEST`` times ``seconds``."""
    return seconds * min(max(os.getloadavg()[0] / cores(), 1.0), BUSIEST)


def cores() -> int:
    """Number of CPU cores that this process may use: of its affinity, and of the time that its cgroup grants."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(able, core_limit())))


def core_share(workers: int) -> int:
    """Number of CPU threads of each of so many workers here: physical cores, of those that this process may use."""
    return max(1, min(psutil.cpu_count(logical=False) or cores(), cores()) // workers)


def most_workers() -> int:
    """Largest number of workers that this machine has cores and free memory for; at least 1."""
    return max(1, min(PER_CORE * cores(), host_memory().free // WORKER))


def check_room(workers: int) -> None:
    """Raise RecipeError if this machine cannot take this many workers."""
    if workers < 1:
        raise RecipeError(f"cluster.workers = {workers}: at least 1 is needed", key="cluster.workers")
    if workers > (most := most_workers()):
        free = host_memory().free / 1e9
        raise RecipeError(
            f"cluster.workers = {workers}: this machine has {cores()} CPU cores and {free:.1f} GB of free memory (a "
            f"worker takes about {WORKER / 1e9:.2f} GB), enough for at most {most}; use cluster.workers={most} or less",
            key="cluster.workers",
        )


MORE_ROOM = "; free memory there or set TMPDIR to a larger place"


def advice(error: OSError) -> str:
    """Return the end of an error message about a full file system; "" for another error."""
    return MORE_ROOM if error.errno == errno.ENOSPC else ""
