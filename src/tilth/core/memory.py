"""Memory and cores that this process may use, and messages for failed allocations."""

import errno
import math
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")
_NONE = 1 << 60  # a larger limit of cgroup v1 is none
_LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}  # cgroup v2 and v1
_CACHE = ("inactive_file", "total_inactive_file")  # in ``memory.stat``: file pages that the kernel drops first
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "Cannot allocate memory")
_WANTED = re.compile(r"(?:allocate|malloc of size|allocation of) ([\d.]+ ?(?:[KMGT]iB|bytes)?)")


class Room(NamedTuple):
    """Memory in bytes; ``where``: of the machine or of which cgroup, for messages."""

    total: int
    free: int
    where: str


def core_limit(groups: Path = GROUPS, own: Path = OWN_GROUP) -> float:
    """Return the cores whose time the cgroups of this process grant it; inf without a limit."""
    bounds = [math.inf]
    for folder in _folders(groups, own, "cpu"):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")  # cgroup v2, then v1
        quota, period = quota or _text(folder / "cpu.cfs_quota_us"), period or _text(folder / "cpu.cfs_period_us")
        if quota.strip().isdecimal() and period.strip().isdecimal():
            bounds.append(int(quota) / int(period))
    return min(bounds)


def host_memory(groups: Path = GROUPS, own: Path = OWN_GROUP) -> Room:
    """Return the memory of this machine with its swap, or of the cgroup of this process if that is less."""
    seen, swap = psutil.virtual_memory(), psutil.swap_memory()
    found = [Room(seen.total + swap.total, seen.available + swap.free, "this machine")]
    found += [room for folder in _folders(groups, own) if (room := _bounded(folder)) is not None]
    least = min(found, key=lambda room: room.total)
    return least._replace(free=max(0, min(room.free for room in found)))


def _folders(groups: Path, own: Path, controller: str = "memory") -> Iterator[Path]:
    """Yield the cgroups of this process, v2 and v1 of a controller, up to the root; some may not be visible here."""
    lines = own.read_text().splitlines() if own.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in (controllers or controller).split(","):
            root = groups / controllers
            inside = root / path.lstrip("/")
            yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(root))


def _bounded(folder: Path) -> Room | None:
    """Return the memory of a cgroup; None without a limit."""
    for name, used in _LIMITS.items():
        limit = _number(folder / name)
        if limit is not None and limit < _NONE:
            return Room(limit, limit - (_number(folder / used) or 0) + _cached(folder), f"the cgroup's {name}")
    return None


def _number(path: Path) -> int | None:
    """Return the number in a file; None without the file, or if it contains "max"."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cached(folder: Path) -> int:
    return max((count for name in _CACHE if (count := _line(folder / "memory.stat", name)) is not None), default=0)


def _line(path: Path, name: str) -> int | None:
    """Return the number of a line ``NAME NUMBER``."""
    lines = map(str.split, _text(path).splitlines())
    return next((int(words[1]) for words in lines if words[:1] == [name]), None)


def oom_kills(groups: Path = GROUPS, own: Path = OWN_GROUP, vmstat: Path = VMSTAT) -> int | None:
    """Return the number of processes that the kernel's OOM killer has ended, here or in a cgroup of this process; None
    if unknown."""
    counts = [_line(folder / "memory.events", "oom_kill") for folder in _folders(groups, own)]
    known = [count for count in (*counts, _line(vmstat, "oom_kill")) if count is not None]
    return max(known) if known else None


def is_out_of_memory(error: BaseException) -> bool:
    """True for a failed allocation: MemoryError (Python, numpy, pyarrow), torch's on a GPU and on a CPU (a plain
    RuntimeError), and ENOMEM."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return type(error).__name__ == "OutOfMemoryError" or any(word in str(error) for word in _WORDS)
    return isinstance(error, MemoryError)


def wanted(error: BaseException) -> str:
    """Return the size of the failed allocation, in words; "" if the error does not contain it."""
    found = _WANTED.search(str(error))
    if found is None:
        return ""
    number, _, unit = found[1].partition(" ")
    return f"{int(float(number)) / 1e6:,.0f} MB" if unit in ("", "bytes") else found[1]


def no_memory(error: BaseException) -> str:
    """Describe in one line the failed allocation and the memory that there is."""
    if type(error).__name__ == "OutOfMemoryError":  # of a GPU: torch's first sentences contain both
        return ". ".join(str(error).split(". ")[:3])
    asked, room = wanted(error), host_memory()
    what = f"no memory for {asked}" if asked else "no memory for what it needs"
    bound = _address_space()
    least = f", and this process may have {bound / 1e9:.3g} GB of addresses (ulimit -v)" if bound else ""
    return f"{what}: {room.where} has {room.free / 1e9:.3g} GB free of {room.total / 1e9:.3g} GB{least}"


def _address_space() -> int:
    """Return the limit of the address space in bytes; 0: none."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return 0 if most == resource.RLIM_INFINITY else most
