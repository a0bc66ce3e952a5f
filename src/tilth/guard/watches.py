"""Watches with a clear limit: memory that leaks, host memory, disks and open files that run out, a clock that jumps.

Each is given values now and then and returns a verdict once, and again only after what it warned of was over. A verdict
is a warning: no worker is replaced for it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tilth.guard.verdict import Kind, Verdict

GIB, MIB = 2**30, 2**20


@dataclass
class ShareWatch:
    """Warns when less than ``low`` of something is left, and anew after more than ``high`` was."""

    kind: Kind
    low: float = 0.05
    high: float = 0.08
    _told: set[str] = field(default_factory=set)

    def take(self, name: str, left: float, whole: float, text: str, ranks: tuple[int, ...] = ()) -> Verdict | None:
        """Return the verdict on what is left. text: of the evidence, after the name."""
        share = left / whole if whole > 0 else 1.0
        if share > self.high:
            self._told.discard(name)
        if share >= self.low or name in self._told:
            return None
        self._told.add(name)
        return Verdict(self.kind, ranks, f"{name} {text}", {"name": name, "left": left, "of": whole})


@dataclass
class LeakWatch:
    """Warns when the memory of a process grows all the time, and would reach the limit within ``horizon`` seconds.

    A leak grows in each part of the window; a run that starts, evaluates or saves grows in some of them.
    """

    window: float = 300.0
    parts: int = 6
    least: float = 64 * MIB
    """Bytes by which it must have grown within the window."""
    horizon: float = 3600.0
    _past: dict[int, deque[tuple[float, float]]] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)

    def take(self, now: float, rank: int, resident: float, left: float) -> Verdict | None:
        """Return the verdict on one process. resident, left: bytes that it has, and that the machine has left."""
        past = self._past.setdefault(rank, deque())
        if past and now - past[-1][0] > self.window / self.parts:  # a gap: its growth is not known
            past.clear()
        past.append((now, resident))
        while past[0][0] < now - self.window:
            past.popleft()
        if now - past[0][0] < 0.95 * self.window:
            return None
        levels = self._levels(now, past)
        slope = float(levels[-1] - levels[0]) / (self.window * (self.parts - 1) / self.parts)
        grows = bool((np.diff(levels) > 0).all()) and levels[-1] - levels[0] >= self.least
        if not grows or slope * self.horizon < left:
            if not grows:
                self._told.discard(rank)
            return None
        if rank in self._told:
            return None
        self._told.add(rank)
        minutes = left / slope / 60
        evidence = (
            f"rank {rank} grows by {slope * 60 / MIB:.0f} MiB a minute and has {resident / GIB:.2f} GiB; the machine "
            f"has {left / GIB:.2f} GiB left, for {minutes:.0f} minutes"
        )
        return Verdict("leak", (rank,), evidence, {"slope": slope, "resident": int(resident), "left": int(left)})

    def forget(self, rank: int) -> None:
        """Forget a process that was replaced."""
        self._past.pop(rank, None)
        self._told.discard(rank)

    def _levels(self, now: float, past: deque[tuple[float, float]]) -> np.ndarray:
        """Return the median of each part of the window."""
        times, values = np.array(past).T
        part = np.clip(((times - (now - self.window)) / self.window * self.parts).astype(int), 0, self.parts - 1)
        return np.array([np.median(values[part == i]) if (part == i).any() else np.nan for i in range(self.parts)])


@dataclass
class ClockWatch:
    """Warns when the wall clock moves against the monotonic one by more than ``most`` seconds between two looks."""

    most: float = 1.0
    _offset: float | None = None

    def take(self, monotonic: float, wall: float) -> Verdict | None:
        """Return the verdict on both clocks, in seconds."""
        before, self._offset = self._offset, wall - monotonic
        if before is None or abs(jump := self._offset - before) <= self.most:
            return None
        way = "forward" if jump > 0 else "back"
        evidence = (
            f"the clock of this machine jumped {way} by {abs(jump):.1f} s; times in logs and files are off by that"
        )
        return Verdict("clock", (), evidence, {"jump": jump})


def disks(free: Mapping[str, tuple[float, float]], watch: ShareWatch) -> list[Verdict]:
    """Return the verdicts on disks. free: place -> bytes left, bytes in all."""
    found = [
        watch.take(place, left, whole, f"is nearly full: {left / GIB:.2f} GiB of {whole / GIB:.1f} GiB are left")
        for place, (left, whole) in free.items()
    ]
    return [one for one in found if one is not None]
