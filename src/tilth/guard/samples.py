"""Samples of the processes of a local run, as a table for the detector of odd machines: one machine a rank."""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tilth.guard.odd_machines import MetricRule, OddMachineRules, SampleTable, align

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
