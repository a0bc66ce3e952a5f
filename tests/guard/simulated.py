"""Jobs of ranks on a mesh in plain Python, with faults: what each flight recorder holds when all is still."""

import itertools
import random
from dataclasses import dataclass, field

from tilth.guard.flight_recorder import FlightDump, GroupProgress, RecordedOp

AHEAD = 12
"""Calls by which a host runs ahead of its device."""
FROZEN = 4
"""Steps that a device with a frozen record still takes."""


@dataclass
class Job:
    """A program of calls (axis, operation, elements), the same on all ranks, repeated for some steps."""

    sizes: dict[str, int]
    program: list[tuple[str, str, int]]
    steps: int = 6
    faults: dict[int, tuple[str, int]] = field(default_factory=dict)
    """rank -> kind and number of the call: "stop", "sleep", "missing", "shape"; "frozen" (of the device)."""
    devices: bool = False
    seed: int = 0

    def __post_init__(self):
        self.groups = {}
        places = list(itertools.product(*(range(n) for n in self.sizes.values())))
        for axis in [*self.sizes, "world"]:
            for place in places:
                others = tuple(i for i, p in enumerate(places) if axis == "world" or self._same(p, place, axis))
                if others not in [ranks for name, (title, ranks) in self.groups.items() if title == axis]:
                    self.groups[str(len(self.groups))] = (axis, others)
        self.world = len(places)

    def _same(self, a, b, axis):
        return all(x == y for x, y, name in zip(a, b, self.sizes) if name != axis)

    def group(self, rank, axis):
        return next(name for name, (title, ranks) in self.groups.items() if title == axis and rank in ranks)

    def calls(self, rank):
        """(group, operation, elements), with the wrong one in its place."""
        kind, at = self.faults.get(rank, ("", -1))
        made = [(self.group(rank, axis), op, n) for _ in range(self.steps) for axis, op, n in self.program]
        if kind == "missing":
            del made[at]
        if kind == "shape":
            made[at] = (made[at][0], made[at][1], made[at][2] + 1)
        return made[:at] if kind in ("stop", "sleep") else made

    def run(self):
        """rank -> dump of those that give one."""
        calls = [self.calls(rank) for rank in range(self.world)]
        queued, done, clock = [0] * self.world, [0] * self.world, itertools.count(1)
        times = [[] for _ in range(self.world)]
        arrived = {}  # (group, seq) -> rank -> call
        rng, moved = random.Random(self.seed), True
        while moved:
            moved = False
            for rank in rng.sample(range(self.world), self.world):
                while queued[rank] < len(calls[rank]) and queued[rank] - done[rank] < (AHEAD if self.devices else 1):
                    times[rank].append(next(clock))
                    queued[rank] += 1
                    moved = True
                while done[rank] < queued[rank] and self._complete(rank, done[rank], calls, queued, done, arrived):
                    done[rank] += 1
                    moved = True
        return {
            rank: self._dump(rank, calls[rank][: queued[rank]], self._shown(rank, done[rank]), times[rank])
            for rank in range(self.world)
            if self.faults.get(rank, ("",))[0] != "stop"
        }

    def _complete(self, rank, i, calls, queued, done, arrived):
        """True if the call at the head of a rank's queue is at the head, or done, on all members."""
        kind, at = self.faults.get(rank, ("", -1))
        if kind == "frozen" and i >= at + FROZEN * len(self.program):
            return False
        name, op, size = calls[rank][i]
        seq = [call[0] for call in calls[rank][: i + 1]].count(name)
        arrived.setdefault((name, seq), {})[rank] = (op, size)
        return arrived[name, seq] == dict.fromkeys(self.groups[name][1], (op, size))

    def _shown(self, rank, done):
        kind, at = self.faults.get(rank, ("", -1))
        return min(done, at) if kind == "frozen" else done

    def _dump(self, rank, calls, done, times):
        counts, ops = {}, []
        for i, (name, op, size) in enumerate(calls):
            counts[name] = counts.get(name, 0) + 1
            ops.append(recorded(name, counts[name], op, size, i >= done, i, times[i]))
        groups = {}
        for name in counts:
            finished = sum(1 for op in ops if op.group == name and not op.pending)
            groups[name] = GroupProgress(name, *self.groups[name], counts[name], -1, finished)
        kept = [op for op in ops if op.pending] if self.devices else ops
        return FlightDump(rank, "2", groups, tuple(kept))


def recorded(group, seq, op, size, pending, number=0, created=0, site="train.py:1 in step", dtype="Float", **more):
    """One operation; the backend is gloo."""
    sizes = ((size,),)
    return RecordedOp(
        group, seq, op, False, -1, sizes, sizes, (dtype,), pending, (site,), created, number, "gloo"
    )._replace(**more)
