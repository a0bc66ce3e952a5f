"""How many workers one machine can take, told before the first is started, and how long they may take to start."""

import errno
import os

from tilth.core.errors import RecipeError
from tilth.core.memory import host_memory

PER_CORE = 8
"""Workers a CPU core that may still make sense (to compare layouts on a small machine); more only wait in turn."""
WORKER = 360_000_000
"""Bytes of memory that a worker takes before it holds anything."""

BUSIEST = 10
"""Times that starting may take longer on a busy machine."""


def patience(seconds: float) -> float:
    """How long something may take that only computes, and takes far less than ``seconds`` on a machine at rest: more by
    as much as the machine has more to do than cores to do it, up to ``BUSIEST`` times."""
    return seconds * min(max(os.getloadavg()[0] / cores(), 1.0), BUSIEST)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_workers() -> int:
    """The greatest number of workers that this machine has cores and free memory for; at least 1."""
    return max(1, min(PER_CORE * cores(), host_memory().free // WORKER))


def check_room(workers: int) -> None:
    """RecipeError with what would work if this machine cannot take so many workers."""
    if workers < 1:
        raise RecipeError(f"cluster.workers = {workers}: at least 1 is needed", key="cluster.workers")
    if workers > (most := most_workers()):
        free = host_memory().free / 1e9
        raise RecipeError(
            f"cluster.workers = {workers}: this machine has {cores()} CPU cores and {free:.1f} GB of free memory (a "
            f"worker takes about {WORKER / 1e9:.2f} GB), enough for at most {most}; use cluster.workers={most} or less",
            key="cluster.workers",
        )


def advice(error: OSError) -> str:
    """What to do where memory files have no room, as the end of a sentence; "" for another error."""
    return MORE_ROOM if error.errno == errno.ENOSPC else ""


MORE_ROOM = "; free memory there or set TMPDIR to a larger place"
