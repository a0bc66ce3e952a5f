"""Runs on paper: a controller and workers that do what a script says, and the events they would have recorded.

Not a replay: time is told forward here, by the clock of each process, and the events follow from it.
"""

import itertools
from collections.abc import Mapping, Sequence

import pyarrow as pa

from tilth.analysis.events import Events, from_table
from tilth.trace.ops import OPS
from tilth.trace.writer import EVENTS

NS = 1_000_000_000
MEETINGS = {op.name for op in OPS.values() if op.kind == "communication"}
BLANK = {
    "attempt": 0, "detail": "", "seq": -1, "role": "", "place": "", "step": -1, "micro_batch": -1, "tokens": 0,
    "squares": 0, "bytes": 0, "flops": 0.0, "thread": "MainThread",
}  # fmt: skip
Work = tuple
"""(op, seconds) or (op, seconds, {columns}); the seconds of a communication are those of its transfer; those of an op
whose third part holds "inside", a list of works, are what it does besides these, before them."""


class Job:
    """A run of so many workers, whose clock stands at ``now`` for the controller, and ``free`` for each of them."""

    def __init__(self, workers: int, delay: float = 0.0, reply: float = 0.0) -> None:
        self.workers, self.delay, self.reply = workers, delay, reply
        self.now, self.free = 0.0, dict.fromkeys(range(workers), 0.0)
        self.rows: list[dict] = []
        self.numbers, self.ids = itertools.count(), itertools.count(1)
        self.met: dict[str, int] = {}
        self.step_number, self.step_id, self.ends = 0, -1, {}
        self.seconds: list[float] = []

    def row(self, op: str, start: float, end: float, rank: int, parent: int, depth: int, **more: object) -> int:
        made = {
            **BLANK, "op": op, "rank": rank, "id": next(self.ids), "parent": parent, "depth": depth,
            "step": self.step_number, "start": round(start * NS) + NS, "duration": round(end * NS) - round(start * NS),
            **more,
        }  # fmt: skip
        self.rows.append(made)
        return made["id"]

    def __enter__(self) -> "Job":
        """A step."""
        self.step_number += 1
        self.step_id, self.began = next(self.ids), self.now
        return self

    def __exit__(self, *_: object) -> None:
        """It ends when all its calls have."""
        self.now = max([self.now, *self.free.values()])
        self.rows.append({
            **BLANK, "op": "step", "rank": self.workers, "id": self.step_id, "parent": -1, "depth": 0,
            "step": self.step_number, "start": round(self.began * NS) + NS,
            "duration": round(self.now * NS) - round(self.began * NS),
        })  # fmt: skip
        self.seconds.append(self.now - self.began)
        self.now += 0.01

    def think(self, seconds: float, op: str = "") -> None:
        """The controller works by itself."""
        if op:
            self.row(op, self.now, self.now + seconds, self.workers, self.step_id, 1)
        self.now += seconds

    def submit(self, name: str, works: Mapping[int, Sequence[Work]], took: float = 0.0) -> int:
        """Send a call; the number to wait for."""
        number = next(self.numbers)
        self.row("submit", self.now, self.now + took, self.workers, self.step_id, 1, detail=name, seq=number)
        begun = {r: max(self.free[r], self.now) + self.delay for r in works}
        self.ends[number] = _Call(self, name, number, works, begun).ends
        self.free |= self.ends[number]
        self.now += took
        return number

    def wait(self, number: int) -> None:
        """Wait for a call."""
        end = max(self.now, *self.ends[number].values()) + self.reply
        self.row("await", self.now, end, self.workers, self.step_id, 1, detail="any", seq=number)
        self.now = end

    def do(self, name: str, works: Mapping[int, Sequence[Work]]) -> None:
        """Submit and wait."""
        self.wait(self.submit(name, works))

    def table(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows, EVENTS)

    @property
    def events(self) -> Events:
        return from_table(self.table())


class _Call:
    """A call on its ranks: each goes on by itself to its next communication, in which all meet."""

    def __init__(self, job: Job, name: str, number: int, works: Mapping[int, Sequence[Work]], begun: dict) -> None:
        self.job, self.name, self.works = job, name, works
        self.ends = dict(begun)
        self.ids = {r: next(job.ids) for r in works}
        self.at = {r: {"role": name.split(".")[0], "place": f"dp={i} fsdp=0 tp=0"} for i, r in enumerate(works)}
        queues = {r: list(w) for r, w in works.items()}
        while any(queues.values()):
            for r, queue in queues.items():
                while queue and queue[0][0] not in MEETINGS:
                    self.ends[r] = self.local(r, self.ids[r], 1, queue.pop(0), self.ends[r])
            if any(queues.values()):
                self.meet({r: queue.pop(0) for r, queue in queues.items() if queue})
        for r in works:
            job.rows.append({
                **BLANK, "op": "call", "rank": r, "id": self.ids[r], "parent": -1, "depth": 0, "detail": name,
                "seq": number, "step": job.step_number, "start": round(begun[r] * NS) + NS,
                "duration": round(self.ends[r] * NS) - round(begun[r] * NS), **self.at[r],
            })  # fmt: skip

    def local(self, rank: int, parent: int, depth: int, work: Work, now: float) -> float:
        op, seconds, more = (*work, {})[:3]
        if not op:  # the call's own time
            return now + seconds
        more = dict(more)
        inside = more.pop("inside", [])
        own, end = next(self.job.ids), now + seconds
        for part in inside:
            end = self.local(rank, own, depth + 1, part, end)
        made = self.job.row(op, now, end, rank, parent, depth, **self.at[rank], **more)
        for row in self.job.rows[-1:]:
            assert row["id"] == made
            row["id"] = own
        return end

    def meet(self, works: dict[int, Work]) -> None:
        group = ",".join(map(str, sorted(works)))
        number = self.job.met[group] = self.job.met.get(group, -1) + 1
        latest = max(self.ends[r] for r in works)
        for r, work in works.items():
            op, seconds, more = (*work, {})[:3]
            began, self.ends[r] = self.ends[r], latest + seconds
            where = {**self.at[r], "detail": group, "seq": number, **more}
            self.job.row(op, began, self.ends[r], r, self.ids[r], 1, **where)
