"""Health of the workers of a local run: a thread of the controller looks at them every second, from outside.

It asks no worker anything. What it sees is in the session's folder, for ``tilth top``; what it warns of is taken by the
run. Signs of life, calls and operations are on the status board, which others read without it (``read_health``).
"""

import json
import os
import resource
import shutil
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tilth.cluster.backends.base import Probe
from tilth.cluster.backends.local import LocalBackend
from tilth.cluster.backends.probe import GONE, StatusBoard
from tilth.cluster.backends.session_dir import SHARED_MEMORY, SessionDir
from tilth.core.clock import periodically
from tilth.core.memory import host_memory
from tilth.guard.diagnosis import place
from tilth.guard.odd_machines import FEWEST, MetricRule, OddMachineRules, OddMachineWatch, SampleTable, align
from tilth.guard.verdict import Kind, Verdict

EVERY = 1.0
"""Seconds between two looks."""
RARELY = 10
"""Looks between two at disks and open files."""
COMPARED = 60
"""Looks between two comparisons of ranks with the same work."""
KEPT = 600
"""Newest samples of each metric of a process."""
Row = dict[str, Any]


class HealthWatch:
    """Looks at the workers of a backend. folder: of the run, whose disk is watched too.

    works: returns the number of the work of each rank; ranks with equal ones are compared.
    """

    def __init__(
        self,
        backend: LocalBackend,
        folder: Path,
        report: Callable[[Verdict], None],
        works: Callable[[], Mapping[int, int]],
    ) -> None:
        self._backend, self._folder, self._report, self._works = backend, folder, report, works
        self._odd = OddMachineWatch(local_rules())
        self._began: float | None = None
        self._samples = ProcessSamples({}, kept=KEPT)
        self._leak, self._clock = LeakWatch(), ClockWatch()
        self._memory, self._disk, self._files = ShareWatch("memory"), ShareWatch("disk"), ShareWatch("files", 0.2, 0.3)
        self._warned: list[Row] = []
        self.workers: list[Row] = []
        """For each rank the most memory in bytes, and the mean of cores in use, over all looks."""
        self._counted = Counter[int]()
        self._looks = 0

    def watching(self) -> AbstractContextManager[None]:
        """Look every second while the body runs, and report what is new to warn of."""
        return periodically("health", EVERY, self._tell)

    def _tell(self) -> None:
        for verdict in self.look(time.monotonic(), time.time()):
            self._warned.append({"time": time.time(), "kind": verdict.kind, "evidence": verdict.evidence})
            self._report(verdict)

    def look(self, now: float, wall: float) -> list[Verdict]:
        """Look once; return what is new to warn of. now: monotonic seconds; wall: seconds since 1970."""
        pids = self._backend.pids()
        for rank, pid in pids.items():
            if self._samples.pids.get(rank) not in (None, pid):
                self._leak.forget(rank)
        self._samples.follow(pids)
        self._began = now if self._began is None else self._began
        self._samples.take(now - self._began)
        found = [
            self._clock.take(now, wall),
            *self._memories(now),
            *(self._seldom() if not self._looks % RARELY else []),
            self._compare() if self._looks % COMPARED == COMPARED - 1 else None,
        ]
        self._looks += 1
        rows = states(self._backend.watch.board, pids)
        for row in rows:
            row |= self._samples.newest(row["rank"])
            self._count(row)
        self._write({"time": wall, "ranks": rows, "warnings": self._warned[-20:]})
        return [verdict for verdict in found if verdict is not None]

    def _count(self, row: Row) -> None:
        """Add a look at one rank to ``workers``."""
        if "memory" not in row or "cores" not in row:
            return
        rank = row["rank"]
        self.workers += [{"rank": at, "memory": 0.0, "cores": 0.0} for at in range(len(self.workers), rank + 1)]
        mine, self._counted[rank] = self.workers[rank], self._counted[rank] + 1
        mine["memory"] = max(mine["memory"], row["memory"])
        mine["cores"] += (row["cores"] - mine["cores"]) / self._counted[rank]

    def _memories(self, now: float) -> list[Verdict | None]:
        room = host_memory()
        whole, left = float(room.total), float(room.free)
        text = f"({room.where}) is nearly used up: {left / 2**30:.2f} GiB of {whole / 2**30:.1f} GiB are left"
        found = [self._memory.take("memory", left, whole, text)]
        for rank in self._samples.pids:
            if (resident := self._samples.newest(rank).get("memory")) is not None:
                found.append(self._leak.take(now, rank, resident, left))
        return found

    def _compare(self) -> Verdict | None:
        """Return the rank whose samples differ from those of the ranks with the same work: a warning, no more."""
        works = self._works()
        if max(Counter(works.values()).values(), default=0) < FEWEST:
            return None
        return self._odd.detect(self._samples.table(EVERY, works))

    def _seldom(self) -> list[Verdict | None]:
        """Look at disks and open files."""
        places = {str(self._folder): self._folder, str(SHARED_MEMORY): SHARED_MEMORY}
        usage = {name: shutil.disk_usage(at) for name, at in places.items() if at.exists()}
        found: list[Verdict | None] = list(
            disks({k: (float(u.free), float(u.total)) for k, u in usage.items()}, self._disk)
        )
        for rank, pid in self._samples.pids.items():
            try:
                used, most = len(os.listdir(f"/proc/{pid}/fd")), resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
            except OSError:  # it has ended
                continue
            text = f"has {used} open files of at most {most} (ulimit -n)"
            found.append(self._files.take(f"rank {rank}", most - used, most, text, (rank,)))
        return found

    def _write(self, facts: Mapping[str, Any]) -> None:
        """Replace the file that others read; a full disk loses it, and the watch of disks says why."""
        target = self._backend.folder.health
        new = target.with_suffix(".new")
        try:
            new.write_text(json.dumps(facts))
            os.replace(new, target)
        except OSError:
            new.unlink(missing_ok=True)


def states(board: StatusBoard, pids: Mapping[int, int]) -> list[Row]:
    """Return for each rank its process and state, call, operation, and the seconds since signs of life and of work."""
    rows = []
    for rank, pid in sorted(pids.items()):
        try:
            state = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            state = GONE
        call, spans, ages = board.read(rank), board.spans(rank), board.ages(rank)
        where = place(Probe(rank, pid, state, call, "", spans))
        beat, work = ages or (None, None)
        rows.append(
            {"rank": rank, "pid": pid, "state": state, "call": call.partition(" (for")[0], "operation": where}
            | {"heartbeat_age": beat, "progress_age": work if call else None}
        )
    return rows


def read_health(session: str) -> dict[str, Any] | None:
    """Return the health of the run with this session folder, read now; None if it has none (any more), or the folder
    is no session of this user.

    time: when its controller last looked. The states of the workers are of this moment, also if the controller is
    stopped.
    """
    folder = SessionDir.at(Path(session))
    if folder is None:
        return None
    try:
        facts: dict[str, Any] = json.loads(folder.health.read_text())
        board = StatusBoard(folder.board)
    except (OSError, ValueError):
        return None
    try:
        before = {row["rank"]: row for row in facts["ranks"]}
        now = states(board, {rank: row["pid"] for rank, row in before.items()})
        return facts | {"ranks": [before[row["rank"]] | row for row in now]}
    except (KeyError, TypeError, AttributeError, struct.error):  # as another version writes it
        return None
    finally:
        board.close()


# ---- samples of processes, for the detector of odd machines: one machine a rank ----

PAGE, MIB = os.sysconf("SC_PAGE_SIZE"), 2**20
ODD = 5.0
"""Score of a process that is odd."""


def local_rules() -> OddMachineRules:
    """Return the rules for processes with the same work on this machine. They are not learned from runs.

    A rank is odd if for two minutes it is five times as far from the others as they are from each other and the floor
    together: by 0.5 cores, 0.5 s of waiting for a core each second, 5 % of the memory, 100 major faults a second, or
    20 MiB/s, where the others are alike.
    """
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE / MIB
    limits = (
        ("major faults/s", 1000.0, 20.0),
        ("MiB resident", memory, 0.01 * memory),
        ("MiB/s read and written", 4096.0, 4.0),
        ("run-queue wait", 1.0, 0.1),
        ("cores used", float(cores), 0.1),
    )
    return OddMachineRules(tuple(MetricRule(name, 0, high, floor / high, ODD) for name, high, floor in limits))


class ProcessSamples:
    """Sampler of processes by /proc. pids: rank -> process. Rates are of the time since the sample before.

    kept: newest samples of a metric that are kept; None: all.
    """

    def __init__(self, pids: Mapping[int, int], kept: int | None = None) -> None:
        self.pids, self.kept = dict(pids), kept
        self._before = dict[int, tuple[float, dict[str, float]]]()
        self.series: dict[str, dict[str, tuple[list[float], list[float]]]] = {
            f"rank-{rank}": defaultdict(lambda: ([], [])) for rank in pids
        }

    def follow(self, pids: Mapping[int, int]) -> None:
        """Sample these processes from now on; what a new one of a rank counts has begun anew."""
        for rank, pid in pids.items():
            if self.pids.get(rank) != pid:
                self._before.pop(rank, None)
                self.series[f"rank-{rank}"] = defaultdict(lambda: ([], []))
        self.pids = dict(pids)

    def newest(self, rank: int) -> dict[str, float]:
        """Return the newest memory in bytes and cores in use of a rank, where they are known."""
        names = {"memory": ("MiB resident", MIB), "cores": ("cores used", 1)}
        series = self.series.get(f"rank-{rank}", {})
        return {name: series[metric][1][-1] * unit for name, (metric, unit) in names.items() if metric in series}

    def take(self, now: float) -> None:
        """Read all processes. A process that has ended gives no sample, which is a sign too. now: seconds."""
        for rank, pid in self.pids.items():
            try:
                counts, resident = _read(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
            at, last = self._before.get(rank, (now, counts))
            self._before[rank] = now, counts
            if now <= at:
                continue
            rates = {metric: max(0.0, counts[metric] - last[metric]) / (now - at) for metric in counts}
            for metric, value in {**rates, "MiB resident": resident}.items():
                times, values = self.series[f"rank-{rank}"][metric]
                times.append(now)
                values.append(value)
                if self.kept is not None and len(times) > 2 * self.kept:
                    del times[: -self.kept], values[: -self.kept]

    def table(self, interval: float, groups: Mapping[int, int] | None = None) -> SampleTable:
        """Return all samples so far on one clock. groups: rank -> number of its work; None: all have the same."""
        machines = {f"rank-{rank}": rank for rank in self.pids}
        series = {name: self.series[name] for name in machines}
        of = {name: (groups or {}).get(rank, 0) for name, rank in machines.items()}
        return align(series, interval, of, {name: (rank,) for name, rank in machines.items()})


def _read(pid: int) -> tuple[dict[str, float], float]:
    """Return counters of a process, in seconds, faults and MiB, and its resident MiB."""
    folder, on_core, waited = Path(f"/proc/{pid}"), 0, 0
    for task in (folder / "task").iterdir():
        try:
            nanoseconds = (task / "schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # a thread that ended
            continue
        on_core, waited = on_core + int(nanoseconds[0]), waited + int(nanoseconds[1])
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    moved = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
    counts = {
        "cores used": on_core / 1e9,
        "run-queue wait": waited / 1e9,
        "major faults/s": float(fields[9]),
        "MiB/s read and written": (int(moved["rchar"]) + int(moved["wchar"])) / MIB,
    }
    return counts, int(fields[21]) * PAGE / MIB


# ---- watches with a clear limit ----
#
# Each is given values now and then and returns a verdict once, and again only after what it warned of was over. A
# verdict is a warning: no worker is replaced for it.

GIB = 2**30


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
