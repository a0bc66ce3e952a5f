"""Simulation of reinforcement learning whose generation and training proceed side by side, event by event.

A replica decodes all of its rows together: a step takes ``max(step, row * rows)`` and the reading of keys and values.
Rows have the lengths they are given; a replica that is full preempts its youngest row, whose prefix is computed again.
The trainer takes complete groups in the order in which they end. Modes differ in when weights move and in what is
admitted, in nothing else, so that their rates can be compared; consolidation of tails is ``plan.repack``'s.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tilth.core.errors import PlanError
from tilth.plan.repack import LiveRow, ReplicaLimits, ReplicaLoad, due_groups, repack

PERIOD = 5.0
"""Seconds between two plans of moves (Laminar, arXiv 2510.12633); one more follows each publication."""


class AsyncMode(NamedTuple):
    """Rules by which weights reach the replicas."""

    every: int = 0
    """Updates between two moments at which all replicas stop and get weights; 0: replicas never stop together."""
    shared: bool = False
    """Generation and training take turns on the same devices."""
    staleness: int | None = None
    """With ``every`` 0: v updates done, at most (v + staleness + 1) batches are admitted, and each update interrupts
    all replicas, whose rows go on under new weights. None: a replica gets weights once it has no rows (Laminar)."""
    repacks: bool = False
    rounds: float = 0.0
    """Seconds after which a replica returns what has ended, and gets weights and whole groups, as many as all updates
    need; 0: at any time, row by row, without an end. Without ``staleness`` it gets weights once it has no rows, and
    groups while it has the newest; ``RolloutJob.buffer`` then counts all groups that no update has learned from."""
    bounded: bool = False
    """With ``rounds``: an update waits for groups that would be too old for the next: ``due_groups``."""
    together: bool = False
    """With ``rounds``: replicas and trainer load weights in one collective. A replica comes to it at the end of its
    round, and waits there for the others, as the trainer does."""


def modes(staleness: int) -> dict[str, AsyncMode]:
    """Return the modes by name; staleness: of k-step and partial."""
    return {
        "sync": AsyncMode(every=1, shared=True),
        "one-step": AsyncMode(every=1),
        f"{staleness}-step": AsyncMode(every=staleness),
        "partial": AsyncMode(staleness=staleness),
        "free": AsyncMode(),
        "free+repack": AsyncMode(repacks=True),
    }


@dataclass(frozen=True)
class RolloutCosts:
    """Seconds of one replica, and of one device that trains."""

    step: float
    """Least time of a decode step, which reads the weights."""
    row: float = 0.0
    """Computation of one row of a decode step."""
    kv_token: float = 0.0
    """Reading of the keys and values of one token in a decode step."""
    prefill: float = 0.0
    """A token whose prefix is computed."""
    train: float = 0.0
    """An update, whatever its tokens."""
    train_token: float = 0.0
    """A token of a batch on one device; n devices take an n-th."""
    sync: float = 0.0
    """Loading of weights by a replica; where all stop, the trainer waits too."""
    publish: float = 0.0
    """Stall of the trainer that hands weights to relays (mode free)."""
    relay: float = 0.0
    """From the end of this stall until all relays have the weights."""
    move: float = 0.0
    """Stall of both sides of a move, besides the prefixes."""


@dataclass(frozen=True)
class RolloutJob:
    """Run that is simulated: its devices, samples and lengths."""

    costs: RolloutCosts
    limits: ReplicaLimits
    replicas: int
    devices: int
    """Devices that train."""
    samples: int
    """Samples of an update."""
    group: int
    prompt: int
    """Tokens of a prompt."""
    lengths: Sequence[int]
    """Tokens of completions in order of admission; after the last the first comes again."""
    updates: int = 12
    ahead: int = 1
    """Modes without periods: batches that replicas may have on their way; mode partial has its staleness besides."""
    buffer: int = 2
    """Mode free: no replica begins while complete groups of so many batches wait for the trainer."""

    def __post_init__(self) -> None:
        """Raise PlanError for what cannot run."""
        for name in ("replicas", "devices", "samples", "group", "updates", "ahead", "buffer"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} = {getattr(self, name)}: it must be at least 1", key=name)
        if self.samples % self.group:
            message = f"samples = {self.samples} are no whole groups of {self.group}; use a multiple"
            raise PlanError(message, key="samples")
        if not self.lengths or min(self.lengths) < 1:
            raise PlanError("lengths must be one or more, each at least 1 token", key="lengths")
        if not self.limits.hold(self.prompt + max(self.lengths), 1):
            message = f"limits: {self.prompt + max(self.lengths):,} tokens of the longest sequence do not fit"
            raise PlanError(f"{message} {self.limits.tokens:,} of a replica; give it more", key="limits.tokens")

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max(self.lengths)

    @cached_property
    def flat(self) -> ReplicaLimits:
        """Limits of what a repacked replica holds: rows up to which a decode step takes its least time."""
        if not self.costs.row:
            return self.limits
        return ReplicaLimits(self.limits.tokens, min(self.limits.rows, max(1, int(self.costs.step / self.costs.row))))


@dataclass(frozen=True)
class AsyncOutcome:
    """Figures of a simulated run, from a quarter of its updates on; shares are of the whole run."""

    samples_per_minute: float
    tokens_per_second: float
    """Of completions in trained batches."""
    replica_idle: float
    """Share of the time of replicas without a row; of ``sync`` the training counts."""
    trainer_idle: float
    kv_use: float
    """Mean share of a replica's tokens that are in use while it decodes."""
    staleness: dict[int, float]
    """Updates between the weights that began a sample and those that learn from it -> share of samples."""
    load_wait: float
    """Mean seconds that a replica waited for weights, each time it got some."""
    moves: int
    seconds: float
    """Length of the simulated run."""
    lengths: tuple[float, float]
    """Mean tokens of admitted and of trained samples: apart, short ones are preferred."""


class SimulatedRow:
    """Trajectory on its way."""

    __slots__ = ("done", "end", "group", "length", "number", "version")

    def __init__(self, number: int, group: int, length: int, version: int) -> None:
        self.number, self.group, self.length, self.version = number, group, length, version
        self.done, self.end = 0, 0  # tokens generated, as of its admission; the replica's step at which it ends


class SimulatedReplica:
    """Continuous batching in closed form from one event to the next."""

    def __init__(self, job: RolloutJob) -> None:
        self.job, self.now, self.steps, self.tokens, self.peak, self.version = job, 0.0, 0, 0, 0, 0
        self.live: dict[int, SimulatedRow] = {}  # in order of admission
        self.waiting: deque[SimulatedRow] = deque()
        self.ends: list[tuple[int, int]] = []
        self.stamp, self.busy, self.held = 0, 0.0, 0.0
        self.landing: list[SimulatedRow] | None = None  # rows that end in the round under way

    @property
    def rows(self) -> int:
        """Rows that decode or wait, or have ended in the round under way."""
        return len(self.live) + len(self.waiting) + len(self.landing or ())

    def seconds(self, steps: int) -> float:
        """Time of further decode steps with the present rows."""
        costs, rows = self.job.costs, len(self.live)
        read = steps * self.tokens + rows * steps * (steps - 1) / 2
        return steps * max(costs.step, costs.row * rows) + costs.kv_token * read

    def horizon(self) -> int:
        """Steps until a row ends or memory is full; rows must decode."""
        while self.ends[0][1] not in self.live or self.live[self.ends[0][1]].end != self.ends[0][0]:
            heapq.heappop(self.ends)  # of a row that has left
        return min(self.ends[0][0] - self.steps, (self.job.limits.tokens - self.tokens) // len(self.live))

    def advance(self, steps: int) -> None:
        """Decode."""
        seconds, rows = self.seconds(steps), len(self.live)
        self.held += seconds * (self.tokens + rows * steps / 2)
        self.busy += seconds
        self.now += seconds
        self.steps += steps
        self.tokens += rows * steps
        self.peak = max(self.peak, self.tokens)

    def until(self, time: float) -> None:
        """Decode the whole steps that end by ``time``, which is before the next event; without rows wait for it."""
        if not self.live:
            self.now = max(self.now, time)
            return
        low, high = 0, self.horizon()
        while low < high:  # seconds() grows with its steps
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.now + self.seconds(middle) <= time else (low, middle - 1)
        self.advance(low)

    def ended(self) -> list[SimulatedRow]:
        """Take out the rows that end now; if none does, memory is full, and the youngest row waits again."""
        found = []
        while self.ends and (row := self.live.get(self.ends[0][1])) is not None and row.end == self.steps:
            heapq.heappop(self.ends)
            self.leave(row)
            found.append(row)
        if not found and len(self.live) > 1 and self.tokens + len(self.live) > self.job.limits.tokens:
            youngest = self.live[next(reversed(self.live))]
            self.leave(youngest)
            self.waiting.appendleft(youngest)
        return found

    def leave(self, row: SimulatedRow) -> None:
        """Take a row out, with what it has generated."""
        del self.live[row.number]
        row.done = row.length - (row.end - self.steps)
        self.tokens -= self.job.prompt + row.done

    def give(self, rows: Sequence[SimulatedRow]) -> None:
        """Add rows; those that have begun elsewhere go first."""
        for row in rows:
            (self.waiting.appendleft if row.done else self.waiting.append)(row)
        self.admit()
        self.peak = self.tokens

    def admit(self) -> None:
        """Admit waiting rows while there is room, and compute prefixes; a group shares the cost of its prompt."""
        job = self.job
        while self.waiting:
            row = self.waiting[0]
            size = job.prompt + row.done
            if not job.limits.hold(self.tokens + size + len(self.live) + 1, len(self.live) + 1):
                return
            self.waiting.popleft()
            self.compute(size if row.done else job.prompt / job.group)
            row.end = self.steps + row.length - row.done
            self.live[row.number] = row
            heapq.heappush(self.ends, (row.end, row.number))
            self.tokens += size
            self.peak = max(self.peak, self.tokens)

    def compute(self, tokens: float) -> None:
        """Compute prefixes while nothing decodes."""
        seconds = tokens * self.job.costs.prefill
        self.now, self.busy = self.now + seconds, self.busy + seconds

    def load(self) -> ReplicaLoad:
        """Return its state for a plan of moves; that of a replica that cannot be in its tail without rows."""
        rows = list[LiveRow]()
        for row in self.live.values() if self.tokens < self.peak and not self.waiting else ():
            done = row.length - (row.end - self.steps)
            rows.append(LiveRow(row.number, self.job.prompt + done, self.job.longest - done))
        return ReplicaLoad(self.version, tuple(rows), len(self.waiting), self.peak)


@dataclass
class AsyncSimulation:
    """State of a simulated run."""

    job: RolloutJob
    mode: AsyncMode
    given: int = 0
    """Rows admitted."""
    version: int = 0
    """Updates done."""
    newest: int = 0
    """Version that relays have."""
    periods: int = 0
    training: bool = False
    free_at: float = 0.0
    """Time from which the trainer may begin."""
    trained: float = 0.0
    """Seconds of updates."""
    moves: int = 0
    ready: deque[list[SimulatedRow]] = field(default_factory=deque)
    open: dict[int, list[SimulatedRow]] = field(default_factory=dict)
    events: list[tuple[float, int, str, int, int]] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    ends: list[tuple[float, int]] = field(default_factory=list)
    """Time and tokens of each update."""
    waits: list[float] = field(default_factory=list)
    order: int = 0
    planning: bool = False
    """With rounds: moves are planned once no replica has a round."""
    stopping: bool = False
    """With ``together``: no round begins until all replicas have the newest weights."""
    flying: dict[int, int] = field(default_factory=dict)
    """With rounds: group that no update has taken -> version that began it."""

    def __post_init__(self) -> None:
        self.replicas = [SimulatedReplica(self.job) for _ in range(self.job.replicas)]

    def run(self) -> AsyncOutcome:
        """Simulate until the last update."""
        if self.mode.repacks:
            self.at(PERIOD, "repack")
        self.go_on(0.0)
        while self.version < self.job.updates:
            time, _, kind, index, stamp = heapq.heappop(self.events)
            if kind == "decode":
                self.decoded(time, index, stamp)
            elif kind == "train":
                self.updated(time)
            elif kind == "publish":
                self.newest = max(self.newest, index)
                if self.mode.rounds:
                    self.round(time)
                else:
                    self.repack(time)
            elif kind == "round":
                landed, self.replicas[index].landing = self.replicas[index].landing, None
                self.collect(landed or [])
                self.go_on(time)
                if self.stopping:
                    self.sync(time)
                else:
                    self.round(time)
            else:
                self.at(time + PERIOD, "repack")
                if self.mode.rounds:
                    self.planning = True
                else:
                    self.repack(time)
        return self.outcome()

    def at(self, time: float, kind: str, index: int = 0, stamp: int = 0) -> None:
        """Add an event."""
        self.order += 1
        heapq.heappush(self.events, (time, self.order, kind, index, stamp))

    def follow(self, index: int) -> None:
        """Replace the next event of a replica."""
        replica = self.replicas[index]
        replica.stamp += 1
        if replica.live:
            self.at(replica.now + replica.seconds(replica.horizon()), "decode", index, replica.stamp)

    def decoded(self, time: float, index: int, stamp: int) -> None:
        """Take what has ended on a replica, and give it more."""
        replica = self.replicas[index]
        if stamp != replica.stamp:
            return
        replica.advance(replica.horizon())
        self.collect(replica.ended())
        replica.admit()
        self.follow(index)
        if not self.mode.every:
            self.feed(index, time)
        self.go_on(time)

    def collect(self, rows: Sequence[SimulatedRow]) -> None:
        """Take rows that have ended, and collect whole groups."""
        for row in rows:
            members = self.open.setdefault(row.group, [])
            members.append(row)
            if len(members) == self.job.group:
                self.ready.append(self.open.pop(row.group))

    def round(self, time: float) -> None:
        """Give replicas whole groups, the least loaded first, and new weights and a round to each without one."""
        limits, group = self.job.limits, self.job.group
        resting, own_time = [replica for replica in self.replicas if replica.landing is None], self._own_time
        held = self.newest if own_time else self.version
        for replica in resting:
            replica.now = max(replica.now, time)
            if replica.version < held and not (own_time and replica.rows):
                self.interrupt(replica, time)
        while self.allowed() >= group and self.given < self.job.updates * self.job.samples:
            takes = [one for one in self.replicas if one.version == held or not own_time]
            replica = min(takes or self.replicas, key=lambda one: one.rows)
            if not takes or replica.rows + group > limits.rows:
                break
            self.flying[self.given // group] = self.version
            replica.give(self.take(group, self.version))
        if self.planning:
            if len(resting) < len(self.replicas):
                return
            self.planning = False
            self.repack(time)
        for replica in resting:
            if replica.rows:
                replica.landing, stop = [], replica.now + self.mode.rounds
                while replica.live and replica.now < stop:
                    replica.advance(min(1, replica.horizon()))
                    replica.landing += replica.ended()
                    replica.admit()
                self.at(replica.now, "round", self.replicas.index(replica))

    @property
    def _own_time(self) -> bool:
        """Each replica takes weights once it has no rows."""
        return self.mode.staleness is None

    # ---- admission ----

    def go_on(self, time: float) -> None:
        """Begin what can begin now: a period of generation, then an update."""
        if self.mode.every:
            self.begin(time)
        elif not self.given:
            self.feed_all(time)
        stopped = self.training or self.stopping or (self.mode.every and self.due())
        if stopped or not (groups := self.batch()):
            return
        rows = [row for group in groups for row in group]
        self.ages.update(self.version - row.version for row in rows)
        tokens = sum(row.length for row in rows)
        costs, whole = self.job.costs, tokens + self.job.prompt * len(rows)
        seconds = costs.train + costs.train_token * whole / self.job.devices
        begin = max(time, self.free_at)
        self.training, self.trained = True, self.trained + seconds
        self.ends.append((begin + seconds, tokens))
        self.at(begin + seconds, "train")
        if not self.mode.every:
            self.feed_all(time)

    def batch(self) -> list[list[SimulatedRow]]:
        """Take the groups of an update; none while it has to wait for some."""
        count, bound = self.job.samples // self.job.group, self.mode.staleness
        if not self.mode.bounded or bound is None:
            found = [self.ready.popleft() for _ in range(count)] if len(self.ready) >= count else []
            for rows in found:
                self.flying.pop(rows[0].group, None)
            return found
        ready, groups = {rows[0].group: rows for rows in self.ready}, [*self.flying]
        left = [bound - (self.version - self.flying[group]) for group in groups]
        places = {group: place for place, group in enumerate(groups)}
        chosen = [groups[i] for i in due_groups(left, [places[group] for group in ready], count, count)]
        self.ready = deque(rows for group, rows in ready.items() if group not in chosen)
        for group in chosen:
            del self.flying[group]
        return [ready[group] for group in chosen]

    def due(self) -> bool:
        """True if all replicas have ended a period and the updates before the next one are done."""
        done = self.version // self.mode.every - self.periods + (0 if self.mode.shared else 1)
        return not any(replica.rows for replica in self.replicas) and done >= 0

    def begin(self, time: float) -> None:
        """Give all replicas the newest weights, and a period's rows, evenly."""
        if self.training or not self.due():
            return
        loaded = time + (self.job.costs.sync if self.periods else 0.0)
        self.free_at = max(self.free_at, loaded)
        self.periods += 1
        rows = self.take(self.mode.every * self.job.samples, self.version)
        for index, replica in enumerate(self.replicas):
            if self.periods > 1:
                self.waits.append(loaded - replica.now)  # since its last row
            replica.now, replica.version = loaded, self.version
            replica.give(rows[index :: self.job.replicas])
            self.follow(index)

    def take(self, count: int, version: int) -> list[SimulatedRow]:
        """Admit rows."""
        job = self.job
        numbers = range(self.given, self.given + count)
        self.given += count
        return [SimulatedRow(n, n // job.group, job.lengths[n % len(job.lengths)], version) for n in numbers]

    def allowed(self) -> int:
        """Rows that may be admitted now."""
        if self.mode.staleness is not None:
            return (self.version + self.mode.staleness + 1) * self.job.samples - self.given
        if self.mode.rounds:
            held = len(self.flying) * self.job.group + self.training * self.job.samples
            return self.job.buffer * self.job.samples - held
        return self.job.samples if len(self.ready) * self.job.group < self.job.buffer * self.job.samples else 0

    def feed_all(self, time: float) -> None:
        """Give rows to whoever has room, the least loaded first."""
        if self.mode.rounds:
            if all(replica.landing is None for replica in self.replicas):
                self.round(time)
            return
        for index in sorted(range(self.job.replicas), key=lambda index: (self.replicas[index].rows, index)):
            if self.allowed() <= 0:
                return
            self.feed(index, time)

    def feed(self, index: int, time: float) -> None:
        """Give a replica rows: as many as it decodes at once, or, once it is empty, new weights and its share."""
        replica, partial = self.replicas[index], self.mode.staleness is not None
        share = -(-self.job.ahead * self.job.samples // self.job.replicas)
        wanted = min(share, self.job.limits.rows) - replica.rows if partial else share * (not replica.rows)
        count = min(wanted, self.allowed())
        if count <= 0:
            return
        replica.until(time)
        if not partial and replica.version < self.newest:
            replica.now, replica.version = replica.now + self.job.costs.sync, self.newest
            self.waits.append(self.job.costs.sync)
        replica.give(self.take(count, replica.version))
        self.follow(index)

    # ---- weights ----

    def updated(self, time: float) -> None:
        """End an update, and hand its weights on."""
        self.training, self.version = False, self.version + 1
        costs = self.job.costs
        if self.mode.together:
            self.stopping = True
            self.sync(time)
            return
        if self.mode.every:
            self.go_on(time)
            return
        if self.mode.staleness is None:
            self.free_at = time + costs.publish
            self.at(self.free_at + costs.relay, "publish", self.version)
        else:
            self.free_at = time + costs.sync
            for index, replica in enumerate(self.replicas if not self.mode.rounds else ()):
                self.interrupt(replica, time)
                self.follow(index)
            self.feed_all(time)
        self.go_on(time)

    def sync(self, time: float) -> None:
        """Load weights on all replicas, and go on, once none has a round."""
        if any(replica.landing is not None for replica in self.replicas):
            return
        self.stopping, self.free_at = False, time + self.job.costs.sync
        for replica in self.replicas:
            replica.now = max(replica.now, time)
            self.interrupt(replica, time)
        self.round(time)
        self.go_on(time)

    def interrupt(self, replica: SimulatedReplica, time: float) -> None:
        """Load weights while rows are held, and compute their prefixes again."""
        replica.until(time)
        self.waits.append(self.job.costs.sync)
        held = self.newest if self._own_time else self.version
        replica.now, replica.version = max(replica.now, time) + self.job.costs.sync, held
        replica.compute(replica.tokens)

    def repack(self, time: float) -> None:
        """Plan and carry out moves."""
        if not self.mode.repacks:
            return
        for replica in self.replicas if not self.mode.rounds else ():
            replica.until(time)
        stay = math.ceil(self.job.costs.move / self.job.costs.step)
        for move in repack([replica.load() for replica in self.replicas], self.job.flat, stay=stay):
            source, target = self.replicas[move.source], self.replicas[move.target]
            rows = [source.live[number] for number in move.trajectories]
            for row in rows:
                source.leave(row)
            for replica in (source, target):
                replica.now += self.job.costs.move
            target.give(rows)
            self.moves += len(rows)
            if self.mode.rounds:
                continue
            self.follow(move.source)
            self.follow(move.target)
            self.feed(move.source, time)

    # ---- figures ----

    def outcome(self) -> AsyncOutcome:
        """Return the figures."""
        job, first, last = self.job, max(1, self.job.updates // 4), self.job.updates
        begin, end = self.ends[first - 1][0], self.ends[last - 1][0]
        tokens, decoding = sum(n for _, n in self.ends[first:last]), sum(r.busy for r in self.replicas)
        total = sum(self.ages.values())
        admitted = sum(job.lengths[n % len(job.lengths)] for n in range(self.given)) / self.given
        return AsyncOutcome(
            samples_per_minute=60 * (last - first) * job.samples / (end - begin),
            tokens_per_second=tokens / (end - begin),
            replica_idle=max(0.0, 1 - decoding / (job.replicas * end)),
            trainer_idle=max(0.0, 1 - self.trained / end),
            kv_use=sum(r.held for r in self.replicas) / decoding / job.limits.tokens,
            staleness={age: count / total for age, count in sorted(self.ages.items())},
            load_wait=sum(self.waits) / max(1, len(self.waits)),
            moves=self.moves,
            seconds=end,
            lengths=(admitted, sum(n for _, n in self.ends) / (len(self.ends) * job.samples)),
        )


def simulate(job: RolloutJob, mode: AsyncMode) -> AsyncOutcome:
    """Simulate ``job.updates`` updates by a mode. Raises PlanError (a job of fewer than two updates, a mode with rounds
    or a bound and without what they need)."""
    if (mode.bounded or mode.together) and not (mode.rounds and mode.staleness is not None):
        raise PlanError(f"{mode}: bounded and together need rounds and a staleness", key="mode")
    if job.updates < 2:
        raise PlanError(f"updates = {job.updates}: a rate needs 2 or more", key="updates")
    return AsyncSimulation(job, mode).run()
