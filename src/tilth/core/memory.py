"""Memory of a machine: what this process may take of it, and what an allocation that failed says."""

import errno
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")
_NONE = 1 << 60
"""A limit of cgroup v1 above this is none."""
_LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""Files of cgroup v2 and v1: the limit -> what is used of it."""
_CACHE = ("inactive_file", "total_inactive_file")
"""Lines of ``memory.stat``: pages of files that the kernel gives up before anything else."""
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "Cannot allocate memory")
_WANTED = re.compile(r"(?:allocate|malloc of size|allocation of) ([\d.]+ ?(?:[KMGT]iB|bytes)?)")


class Room(NamedTuple):
    """Memory in bytes."""

    total: int
    """There at all; more can never be had."""
    free: int
    """That nobody uses now."""
    where: str
    """Whose it is, in words."""


def host_memory(groups: Path = GROUPS, own: Path = OWN_GROUP) -> Room:
    """Of this machine with its swap, or of the cgroup that bounds this process, where that is less."""
    seen, swap = psutil.virtual_memory(), psutil.swap_memory()
    found = [Room(seen.total + swap.total, seen.available + swap.free, "this machine")]
    found += [room for folder in _folders(groups, own) if (room := _bounded(folder)) is not None]
    least = min(found, key=lambda room: room.total)
    return least._replace(free=max(0, min(room.free for room in found)))


def _folders(groups: Path, own: Path) -> Iterator[Path]:
    """The cgroups that this process is in, v2 and v1, from its own to the root; some may not be visible here."""
    lines = own.read_text().splitlines() if own.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = groups / controllers
            inside = root / path.lstrip("/")
            yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(root))


def _bounded(folder: Path) -> Room | None:
    """What a cgroup may take; None where it has no limit."""
    for name, used in _LIMITS.items():
        limit = _number(folder / name)
        if limit is not None and limit < _NONE:
            return Room(limit, limit - (_number(folder / used) or 0) + _cached(folder), f"the cgroup's {name}")
    return None


def _number(path: Path) -> int | None:
    """None where there is no such file, or "max" in it."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _cached(folder: Path) -> int:
    return max((count for name in _CACHE if (count := _line(folder / "memory.stat", name)) is not None), default=0)


def _line(path: Path, name: str) -> int | None:
    """The number of a line ``NAME NUMBER``."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


def oom_kills(groups: Path = GROUPS, own: Path = OWN_GROUP, vmstat: Path = VMSTAT) -> int | None:
    """Processes that the kernel has killed so far since memory ran out, here or in a cgroup of this process; None where
    it does not say."""
    counts = [_line(folder / "memory.events", "oom_kill") for folder in _folders(groups, own)]
    known = [count for count in (*counts, _line(vmstat, "oom_kill")) if count is not None]
    return max(known) if known else None


def exhausted(error: BaseException) -> bool:
    """Whether this says that memory could not be had: Python's, numpy's and pyarrow's MemoryError, torch's on a CPU (a
    plain RuntimeError) and on a GPU, and ENOMEM."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return type(error).__name__ == "OutOfMemoryError" or any(word in str(error) for word in _WORDS)
    return isinstance(error, MemoryError)


def wanted(error: BaseException) -> str:
    """How much the allocation asked for, in words; "" where it does not say."""
    found = _WANTED.search(str(error))
    if found is None:
        return ""
    number, _, unit = found[1].partition(" ")
    return f"{int(float(number)) / 1e6:,.0f} MB" if unit in ("", "bytes") else found[1]


def no_memory(error: BaseException) -> str:
    """What was wanted, and what there is, in one line."""
    if type(error).__name__ == "OutOfMemoryError":  # of a GPU: torch says what there is, in its first sentences
        return ". ".join(str(error).split(". ")[:3])
    asked, room = wanted(error), host_memory()
    what = f"no memory for {asked}" if asked else "no memory for what it needs"
    bound = _address_space()
    least = f", and this process may have {bound / 1e9:.3g} GB of addresses (ulimit -v)" if bound else ""
    return f"{what}: {room.where} has {room.free / 1e9:.3g} GB free of {room.total / 1e9:.3g} GB{least}"


def _address_space() -> int:
    """Bytes; 0: no limit."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return 0 if most == resource.RLIM_INFINITY else most
