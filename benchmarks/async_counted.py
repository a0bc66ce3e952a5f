"""Moves of last samples (``rollout.repack``) in counted rounds, for ``async_rl.py --counted``: no clock has a say.

Books, hand-outs, pulls and plans are the run's own (``flows.ledger``, ``flows.replicas``, ``plan.repack``); a replica
only counts the decode steps of its rows, and a trainer the rounds of its update. The unit of time is a round, in which
each replica takes ``STEPS`` decode steps. A decode step takes the same time for one row as for all that fit.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from tilth_studies import asynchrony
from tilth_studies.asynchrony import AsyncMode, RolloutCosts, RolloutJob

from tilth.core.batch import Batch, Lease
from tilth.flows.ledger import Ledger
from tilth.flows.replicas import Flight, Replicas
from tilth.plan.repack import LiveRow, ReplicaLimits, ReplicaLoad
from tilth.roles.relay import Publication
from tilth.roles.rollout import Ended, Resumed
from tilth.runs.state import RunState

STEPS = 5
"""Decode steps of a round: 0.25 s of 50 ms each."""
PROMPT = 16


class CountedCase(NamedTuple):
    """What is counted. Samples of a step are ``prompts * group``; a replica has room for its share of them."""

    replicas: int
    train: int
    """Rounds of an update."""
    every: int
    """Rounds between two plans of moves; 0: none."""
    lengths: Sequence[int]
    move: int = 0
    """Decode steps that a move costs both of its replicas."""
    prompts: int = 16
    group: int = 4
    buffer: int = 4
    steps: int = 20
    untimed: int = 2

    @property
    def limits(self) -> ReplicaLimits:
        """Limits of a replica."""
        rows = self.prompts * self.group // self.replicas
        return ReplicaLimits(rows * (PROMPT + max(self.lengths)), rows)


class CountedReplica:
    """Rows that grow by a token a step. drawn: tokens of each sample, which replicas share as the run's log."""

    def __init__(self, case: CountedCase, drawn: dict[int, int]) -> None:
        self.case, self.drawn, self.rows = case, drawn, dict[int, int]()
        self.version = self.peak = self.stalled = self.busy = 0

    def submit(self, asked: Batch, again: int | None = None) -> dict[int, Resumed]:
        """Take samples; one that has moved goes on with its tokens."""
        ids = asked["id"].tolist()
        self.rows.update((i, self.drawn.setdefault(i, 0)) for i in ids)
        self.peak, self.stalled = 0, self.stalled + (self.case.move if again is not None else 0)
        return {i: Resumed(self.rows[i], self.version) for i in ids}

    def advance(self, *, texts: bool) -> dict[int, Ended]:
        """Run a round."""
        ended = dict[int, Ended]()
        self.busy += 1
        for _ in range(STEPS):
            if self.stalled:
                self.stalled -= 1
                continue
            for i in list(self.rows):
                self.rows[i] += 1
                if self.rows[i] >= (length := self.case.lengths[i]):
                    del self.rows[i]
                    ended[i] = Ended(0, i, "", False, ((PROMPT, self.version),), PROMPT + length)
            self.peak = max(self.peak, sum(self.rows.values()))
        self.drawn.update(self.rows)
        return ended

    def load(self) -> ReplicaLoad:
        """Return its rows, for a plan."""
        longest = max(self.case.lengths)
        rows = tuple(LiveRow(i, PROMPT + done, longest - done) for i, done in self.rows.items())
        return ReplicaLoad(self.version, rows, 0, self.peak + PROMPT * len(rows))

    def give_up(self, ids: Sequence[int]) -> dict[int, int]:
        """Stop rows."""
        self.stalled += self.case.move
        return {i: self.rows.pop(i) for i in ids if i in self.rows}

    def collect(self, ids: np.ndarray) -> Batch:
        """Return rows without columns."""
        return Batch({"id": ids})


class CountedRun:
    """A trainer, its books and its replicas."""

    def __init__(self, case: CountedCase) -> None:
        self.case, self.now, self.left, self.given, self.ends = case, 0, 0, 0, list[int]()
        drawn = dict[int, int]()
        self.each = [CountedReplica(case, drawn) for _ in range(case.replicas)]
        whole: Any = SimpleNamespace(
            parts=lambda axis: self.each, first=lambda answers: [True] * len(answers), begin=lambda *, anew: None
        )
        store: Any = SimpleNamespace(under=lambda lease: nullcontext())
        self.replicas = Replicas(whole, store, case.limits.rows, None, threaded=False, pull=self.pull)
        self.ledger = Ledger(None, case.buffer, case.prompts, fresh=False, version=0, state=RunState())
        self.ledger.want(case.prompts, case.steps - 1)

    @property
    def newest(self) -> Publication:
        """Weights that are there."""
        return Publication(1 + len(self.ends), len(self.ends))

    def pull(self, place: int) -> Publication:
        """Let a replica take them."""
        self.each[place].version = self.newest.version
        return self.newest

    def run(self) -> dict[str, Any]:
        """Return samples per round behind the first steps, rows that moved, and the idle share of replicas."""
        case, every = self.case, self.case.every
        while len(self.ends) < case.steps:
            self.begin()
            self.replicas.limits = case.limits if every and self.now % every == 0 else None
            self.replicas.wait()
            self.now += 1
            for flight in self.replicas.whole():
                self.ledger.end(flight.first)
            self.train()
        samples, rounds = case.prompts * case.group, self.ends[-1] - self.ends[case.untimed - 1]
        idle = 1 - sum(one.busy for one in self.each) / (self.now * case.replicas)
        found = {"samples_per_round": (case.steps - case.untimed) * samples / rounds, "replica_idle_share": idle}
        return {**found, "moved": self.replicas.moved}

    def begin(self) -> None:
        """Begin the groups that the books have room for."""
        for one in self.ledger.begin(range(self.ledger.room()), self.given, self.case.group):
            ids = np.arange(one.first, one.stop, dtype=np.int64)
            lease = Lease("", str(one.first), lambda lease: None)
            self.replicas.submit(Flight(one.first, Batch({"id": ids}), lease, one.version))
            self.given = one.stop

    def train(self) -> None:
        """End an update whose rounds are over, and begin the next one if its samples are there."""
        if self.left:
            self.left -= 1
            if not self.left:
                self.ledger.done()
                self.ends.append(self.now)
                self.ledger.at(len(self.ends))
                self.replicas.offer(self.newest)
                self.ledger.want(self.case.prompts, self.case.steps - len(self.ends) - 1)
        if not self.left and len(self.ends) < self.case.steps and self.ledger.take():
            self.left = self.case.train


def simulated(case: CountedCase) -> float:
    """Samples per round of the same case by the simulator."""
    costs = RolloutCosts(step=1 / STEPS, train=case.train, move=case.move / STEPS)
    job = RolloutJob(
        costs, case.limits, case.replicas, 1, case.prompts * case.group, case.group, PROMPT, case.lengths,
        updates=case.steps, buffer=case.buffer,
    )  # fmt: skip
    asynchrony.PERIOD = float(case.every or 1)
    simulation = asynchrony.AsyncSimulation(job, AsyncMode(repacks=bool(case.every), rounds=1.0))
    simulation.run()
    (first, _), (last, _) = simulation.ends[case.untimed - 1], simulation.ends[case.steps - 1]
    return (case.steps - case.untimed) * job.samples / (last - first)
