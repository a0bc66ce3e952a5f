"""Health of the workers of a local run: a thread of the controller looks at them every second, from outside.

It asks no worker anything. What it sees is in the session's folder, for ``tilth top``; what it warns of is taken by the
run. Signs of life, calls and operations are on the status board, which others read without it (``read_health``).
"""

import json
import os
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from tilth.cluster.backends.base import Probe
from tilth.cluster.backends.local import LocalBackend
from tilth.cluster.backends.probe import GONE
from tilth.cluster.backends.session_dir import SHARED_MEMORY, SessionDir
from tilth.cluster.backends.status import StatusBoard
from tilth.core.clock import periodically
from tilth.core.memory import host_memory
from tilth.guard.diagnosis import place
from tilth.guard.odd_machines import FEWEST, OddMachineWatch
from tilth.guard.samples import ProcessSamples, local_rules
from tilth.guard.verdict import Verdict
from tilth.guard.watches import ClockWatch, LeakWatch, ShareWatch, disks

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
    """Return the health of the run with this session folder, read now; None if it has none (any more).

    time: when its controller last looked. The states of the workers are of this moment, also if the controller is
    stopped.
    """
    folder = SessionDir(Path(session))
    try:
        facts: dict[str, Any] = json.loads(folder.health.read_text())
        board = StatusBoard(folder.board)
    except (OSError, ValueError):
        return None
    try:
        before = {row["rank"]: row for row in facts["ranks"]}
        now = states(board, {rank: row["pid"] for rank, row in before.items()})
        return facts | {"ranks": [before[row["rank"]] | row for row in now]}
    finally:
        board.close()
