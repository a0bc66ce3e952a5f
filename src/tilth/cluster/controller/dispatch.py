"""Controller side of every backend: sends calls, waits for answers, and ends the cluster at a failure, if so told.

A failure is raised where the controller waits next, with the role, rank and method that caused it.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import NoReturn

from tilth.cluster.backends.base import Backend, Call, Probe, RepairableBackend, Reply
from tilth.cluster.controller.report import absence, absent, overdue
from tilth.core.batch import Lease
from tilth.core.errors import CallTimeout, TilthError, WorkerError, WorkerLost
from tilth.trace.spans import Total, in_phase, total_of

GRACE = 0.5
"""Seconds to wait for further failures after the first, since a peer may report a broken collective before the crash
that caused it; also the grace of an answer at its limit."""
AT_LIMIT = 0.1
"""Seconds of that grace where signs of life are watched."""
LOOK = 0.1
"""Seconds between two looks for signs of life of the workers, which are in shared memory."""


STILL = 10 * LOOK
"""Seconds without a look that count for no worker: this process stood still, or its garbage was collected."""


class Life:
    """When each worker last showed signs of life, as far as the controller has looked."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend if isinstance(backend, RepairableBackend) else None
        self._seen = [(0, 0)] * backend.workers
        self._work, self._beat = [0.0] * backend.workers, [0.0] * backend.workers

    def look(self, ranks: Iterable[int]) -> None:
        """Look at these workers now, if the backend shows their signs of life."""
        if self._backend is None:
            return
        now = time.monotonic()
        for rank in ranks:
            work, beats = self._backend.life(rank)
            if work != self._seen[rank][0]:
                self._work[rank] = now
            if beats != self._seen[rank][1]:
                self._beat[rank] = now
            self._seen[rank] = work, beats

    def work(self, rank: int) -> float:
        """Return when a look last saw it get on with its work, in monotonic seconds."""
        return self._work[rank]

    def beat(self, rank: int) -> float:
        """Return when a look last saw its process run, in monotonic seconds."""
        return self._beat[rank]


@dataclass(eq=False)
class PendingCall:
    """A call in flight."""

    rank: int
    call: Call
    future: Future[Reply]
    covered: bool
    """True if it was submitted inside a phase of the step."""
    leases: tuple[Lease, ...] = ()
    """Leases that it reads from or puts under."""
    landed: bool = False


class Dispatch:
    """Calls on a backend, each limited to ``timeout`` seconds (or its ``least``) from when its worker is free for it.

    hang_after: seconds that a call may take without progress of its worker, a patient one without a running process,
    or while it computes; inf: no limit. patience: seconds that a patient one may take without progress; waits: role ->
    the same for its calls, if that is more. keep: keep the workers after a failure, for ``Cluster.repair``; else the
    first one ends the cluster, since a collective that lost a rank never ends.
    """

    def __init__(self, backend: Backend, timeout: float, *, keep: bool = False) -> None:
        self.backend = backend
        self.timeout, self.hang_after, self.patience = timeout, math.inf, math.inf
        self.waits: Mapping[str, float] = {}
        self.keep = keep
        self.longest = 0.0, ""
        """Longest time in seconds that a call was without progress before it got on, and the call's name."""
        self._looked = self._awake = 0.0
        """When the last look was; the first one after a time without looks."""
        self._life = Life(backend)
        self.totals = Totals(backend.workers)
        self.traffic = Traffic()
        self._own = threading.local()
        self._apart: Collection[int] = ()
        self.order = threading.RLock()
        """Held while one call goes to all its ranks, so that calls of two threads reach each rank in one order."""
        self.failed: BaseException | None = None
        lock = threading.RLock()
        self._changed, self._arrived = threading.Condition(lock), threading.Condition(lock)
        """A call has ended; all calls that a thread waits for have, or one has failed, or has an earlier deadline."""
        self._awaited: list[set[PendingCall]] = []
        """Calls that each waiting thread still waits for."""
        self._deadline = math.inf
        """Earliest deadline when a thread began to wait."""
        self._flying: list[deque[PendingCall]] = [deque() for _ in range(backend.workers)]
        self._since = [0.0] * backend.workers
        self._failures: list[BaseException] = []
        self._waited: dict[int, tuple[Call, WorkerError]] = {}
        """Rank -> call that timed out in a collective because another rank did not join."""

    @property
    def apart(self) -> Collection[int]:
        """Ranks whose loss concerns those alone who wait for their calls: see ``Cluster.renew``. A loss of theirs that
        was to be raised is dropped when this is set: their next call fails with it."""
        return self._apart

    @apart.setter
    def apart(self, ranks: Collection[int]) -> None:
        with self._changed:
            self._apart = ranks
            self._failures = [error for error in self._failures if not self._is_apart(error)]

    @property
    def lease(self) -> Lease | None:
        """Lease of the calls that this thread submits now."""
        return getattr(self._own, "lease", None)

    @lease.setter
    def lease(self, lease: Lease | None) -> None:
        self._own.lease = lease

    def submit(self, rank: int, call: Call, leases: tuple[Lease, ...] = ()) -> PendingCall:
        """Send a call to one worker. Raises an earlier failure that ended the cluster."""
        if self.failed is not None:
            raise self.failed
        try:
            flight = PendingCall(rank, call, self.backend.submit(rank, call), in_phase(), leases)
        except TimeoutError:
            self._give_up(self._timeout_error([(rank, call)]))
        with self._changed:
            if not self._flying[rank]:
                self._since[rank] = time.monotonic()
            self._flying[rank].append(flight)
        flight.future.add_done_callback(partial(self._land, flight))
        return flight

    def _land(self, flight: PendingCall, future: Future[Reply]) -> None:
        error = future.exception()
        queue = self._flying[flight.rank]
        with self._changed:
            queue.remove(flight)
            self._since[flight.rank] = time.monotonic()
            flight.landed = True
            for left in self._awaited:
                left.discard(flight)
            if error is not None and not self._is_apart(error):
                self._failures.append(error)
                if isinstance(error, WorkerError) and error.collective == "timeout":
                    self._waited[flight.rank] = flight.call, error
            self._changed.notify_all()
            # Not at every answer: who waits for W workers would look at W deadlines W times.
            if error is not None or not all(self._awaited) or (queue and self._due(flight.rank) < self._deadline):
                self._arrived.notify_all()
        if error is None:
            reply = future.result()
            self.traffic.add(flight.call.operation, reply.sent, reply.received)
            self.totals.add(flight.rank, reply.sums, flight.call.answer, flight.covered)

    @contextmanager
    def _awaiting(self, *groups: Iterable[PendingCall]) -> Iterator[list[set[PendingCall]]]:
        """Hold the lock and yield the calls of each group that have not landed, up to date whenever ``_arrived`` is."""
        with self._changed:
            left = [{flight for flight in flights if not flight.landed} for flights in groups]
            self._awaited += left
            try:
                yield left
            finally:
                self._awaited = [other for other in self._awaited if not any(other is one for one in left)]

    def wait(self, flights: Sequence[PendingCall]) -> list[Reply]:
        """Return the replies when all have arrived. On a failure of any worker, or a call over its limit, end the
        cluster unless ``keep`` and raise a TilthError of the worker's class, WorkerError, WorkerLost or CallTimeout."""
        self.wait_first([flights])
        return [flight.future.result() for flight in flights]

    def wait_first(self, groups: Sequence[Sequence[PendingCall]]) -> None:
        """Wait until the replies of one of these groups of calls have arrived. Raises as ``wait``."""
        if self.failed is not None:
            raise self.failed
        flights = [flight for group in groups for flight in group]
        with self._awaiting(*groups) as left:
            while not self._failures and all(left) and _own_failure(flights) is None:
                if not self._arrived.wait(self._until_look()):
                    self._look()
                    if self._limit() > time.monotonic():
                        continue
                    self._arrived.wait(GRACE if math.isinf(self.hang_after) else AT_LIMIT)
                    self._look()
                    if self._limit() <= time.monotonic() and not self._failures:
                        break
            first = self._first_failure() or _own_failure(flights)
        if self._waited and _of_a_collective(first):
            first = self._absence() or first
        if first is None and all(left):
            if not (late := self._overdue()):  # another thread has raised what failed, which was none of these
                return self.wait_first(groups)
            first = self._timeout_error(late)
        if first is not None and self._is_apart(first):
            raise first
        if first is not None:
            self._give_up(first)

    def _is_apart(self, error: BaseException) -> bool:
        """True for the loss of workers without which the others go on."""
        return isinstance(error, WorkerLost) and bool(error.ranks) and set(error.ranks).issubset(self.apart)

    def idle(self) -> bool:
        """Return True if no call is in flight and none has failed."""
        with self._changed:
            return self.failed is None and not self._failures and not any(self._flying)

    def drain(self, lease: Lease | None = None) -> None:
        """Wait for the calls in flight that use a lease, or for all. Those of a worker apart end with its loss too."""
        with self._changed:
            flights = [flight for queue in self._flying for flight in queue]
        flights = [flight for flight in flights if lease is None or lease in flight.leases]
        while True:
            try:
                self.wait(flights)
                return
            except WorkerLost as error:
                if not self._is_apart(error):
                    raise
                flights = [flight for flight in flights if not flight.landed]

    def end(self, seconds: float) -> bool:
        """Close the roles of idle workers. Return False, without an error, if a call has failed or is in flight, or if
        a worker does not answer within ``seconds``."""
        if not self.idle():
            return False
        call = Call("", "end", patient=True)
        try:
            flights = [self.submit(rank, call) for rank in range(self.backend.workers)]
        except TilthError:
            return False
        with self._awaiting(flights) as (left,):
            self._arrived.wait_for(lambda: self._failures or not left, seconds)
            return not self._failures and not left

    def settle(self, quiet: float, alone: Collection[int] = ()) -> list[int]:
        """Wait until no call is in flight, or none has ended for ``quiet`` seconds; return the ranks that still have
        some. alone: ranks that wait for no other, whose calls may go on as long as they show signs of life."""
        with self._changed:
            while any(self._flying):
                if self._changed.wait(quiet):
                    continue
                busy = {rank for rank, queue in enumerate(self._flying) if queue}
                if late := busy.difference(alone):
                    return sorted(late)
                self._look()
                if self._limit() <= time.monotonic():
                    return sorted(busy)
            return []

    def roles(self, rank: int) -> set[str]:
        """Return the roles of the calls in flight on a rank; "": the cluster's own."""
        with self._changed:
            return {flight.call.role for flight in self._flying[rank]}

    def silent(self, ranks: Iterable[int], seconds: float) -> set[int]:
        """Return those of these idle workers that do not answer within ``seconds``: they are dead, or stand still."""
        call = Call("", "clock", patient=True)
        asked = [self.submit(rank, call) for rank in ranks]
        with self._awaiting(asked) as (left,):
            self._arrived.wait_for(lambda: not left, seconds)
            return {one.rank for one in asked if not one.landed or one.future.exception() is not None}

    def forget(self) -> None:
        """Forget failures that have been dealt with; no call is in flight."""
        with self._changed:
            self._failures.clear()
            self._waited.clear()
        self.lease = None

    def _until_look(self) -> float:
        """Return the seconds until the earliest deadline, or until the next look. (Called with the lock.)"""
        self._deadline = self._limit()
        left = max(0.0, self._deadline - time.monotonic())
        return left if math.isinf(self.hang_after) else min(left, LOOK)

    def _look(self) -> None:
        """Look for signs of life of the busy workers. (Called with the lock.)"""
        if math.isinf(self.hang_after):
            return
        busy = {rank: queue[0].call for rank, queue in enumerate(self._flying) if queue}
        before = {rank: self._last(rank) for rank, call in busy.items() if not call.patient}
        self._life.look(busy)
        now, looked, self._looked = time.monotonic(), self._looked, time.monotonic()
        if now - looked >= STILL:  # nobody knows since when, and answers that have come may not be read yet
            self._awake = now
            return
        for rank, since in before.items():
            if (stood := self._last(rank) - since) > self.longest[0]:
                self.longest = stood, busy[rank].name

    def _limit(self) -> float:
        """Return the earliest deadline of the running calls. (Called with the lock.)"""
        return min((self._due(rank) for rank, queue in enumerate(self._flying) if queue), default=math.inf)

    def _due(self, rank: int) -> float:
        """Return the deadline of this rank's running call. (Called with the lock.)"""
        call, since = self._flying[rank][0].call, self._since[rank]
        return min(since + max(self.timeout, call.least), self._hangs_at(rank))

    def _last(self, rank: int) -> float:
        """Return when this rank's running call last made progress, or began. (Called with the lock.)"""
        return self._stand(rank)[0]

    def _hangs_at(self, rank: int) -> float:
        """Return when this rank's running call has been without progress for too long. (Called with the lock.)"""
        return sum(self._stand(rank))

    def _stand(self, rank: int) -> tuple[float, float]:
        """Return since when this rank's running call has been without progress, and for how many seconds it may be: of
        two limits of a patient call the one that ends first. (Called with the lock.)"""
        call, began = self._flying[rank][0].call, max(self._since[rank], self._awake)
        work, beat = max(began, self._life.work(rank)), max(began, self._life.beat(rank))
        if not call.patient:
            return work, self.hang_after
        patience = max(self.patience, self.waits.get(call.role, 0.0), call.least)
        return min((work, patience), (beat, self.hang_after), key=sum)

    def _first_failure(self) -> BaseException | None:
        """Return the failure that caused the others: a lost worker, else one outside of collectives, else the first.
        (Called with the lock.)"""
        until = time.monotonic() + GRACE
        while self._failures and not any(isinstance(e, WorkerLost) for e in self._failures) and any(self._flying):
            if not self._changed.wait(max(0.0, until - time.monotonic())):
                break
        lost = [error for error in self._failures if isinstance(error, WorkerLost)]
        own = [error for error in self._failures if not _of_a_collective(error)]
        return next(iter([*lost, *own, *self._failures]), None)

    def _overdue(self) -> list[tuple[int, Call]]:
        with self._changed:
            now = time.monotonic()
            return [(rank, q[0].call) for rank, q in enumerate(self._flying) if q and self._due(rank) <= now]

    def _timeout_error(self, late: Iterable[tuple[int, Call]]) -> CallTimeout:
        calls = dict(late)
        with self._changed:
            now = time.monotonic()
            hangs = [self._stand(rank)[1] for rank in calls if self._flying[rank] and self._hangs_at(rank) <= now]
        limit = "guard.hang_after" if self.hang_after in hangs else "a call that may wait, by guard.hang_after"
        return overdue(calls, self._probes(), self.timeout, f"{min(hangs):g} s ({limit})" if hangs else "")

    def _absence(self) -> CallTimeout | None:
        """Return the error that names the ranks which did not join a collective that timed out for others.

        They are the ranks, with the same call or else any call in flight, that do not wait in a collective themselves.
        """
        with self._changed:
            calls = {(call.number, call.name) for call, _ in self._waited.values()}
            flying = {
                rank: list(queue) for rank, queue in enumerate(self._flying) if queue and rank not in self._waited
            }
        same = {
            rank: flight.call
            for rank, queue in flying.items()
            for flight in queue
            if (flight.call.number, flight.call.name) in calls
        }
        waited, probes = {rank: str(error) for rank, (_, error) in self._waited.items()}, self._probes()
        for late in (same, {rank: queue[0].call for rank, queue in flying.items()}):
            if absent(late, probes):
                return absence(late, probes, waited)
        return None

    def _probes(self) -> list[Probe]:
        with ThreadPoolExecutor(min(16, self.backend.workers)) as pool:
            return list(pool.map(self.backend.probe, range(self.backend.workers)))

    def _progress(self) -> dict[int, float]:
        """Return when each busy worker last got on with its work."""
        with self._changed:
            return {rank: self._last(rank) for rank, queue in enumerate(self._flying) if queue}

    def _give_up(self, error: BaseException) -> NoReturn:
        if isinstance(error, CallTimeout):
            error.since = self._progress()
        if not self.keep:
            self.failed = error
            self.backend.close(kill=True)
        with self._changed:
            self._failures.clear()
            self._waited.clear()
        raise error


def _own_failure(flights: Iterable[PendingCall]) -> BaseException | None:
    """Return the failure of one of these calls, which another thread may have raised. (Called with the lock.)"""
    return next(filter(None, (flight.future.exception() for flight in flights if flight.landed)), None)


def _of_a_collective(error: BaseException | None) -> bool:
    return isinstance(error, WorkerError) and bool(error.collective)


# ---- times and bytes ----

Sums = dict[str, list[float]]
DONE = tuple(f.name in ("tokens", "bytes", "flops", "phase_tokens") for f in fields(Total))
"""True for the fields that count work; the others are durations and numbers of calls."""
_row = attrgetter(*(f.name for f in fields(Total)))


class Totals:
    """Sums of the workers' spans. The time of an operation is that of its slowest rank; its work is summed over the
    ranks that answer, so copies along other axes count once."""

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._times: list[Sums] = [{} for _ in range(workers)]

    def add(self, rank: int, sums: Sums, answers: bool, covered: bool = False) -> None:
        """Add the spans of one call, from ``recorder.rows``. covered: the call is part of a phase's time."""
        with self._lock:
            for op, row in sums.items():
                row = [*row[:-2], 0, 0] if covered else row  # phase_seconds and phase_tokens
                row = row if answers else [0 if done else value for value, done in zip(row, DONE)]
                before = self._times[rank].get(op)
                self._times[rank][op] = row if before is None else [a + b for a, b in zip(before, row)]

    def take(self) -> dict[str, Total]:
        """Return the sums since the last take, by operation."""
        with self._lock:
            times, self._times = self._times, [{} for _ in self._times]
        ops = dict.fromkeys(op for sums in times for op in sums)
        return {op: _joined([sums[op] for sums in times if op in sums]) for op in ops}


class Traffic:
    """Bytes by operation and direction, "sent" by the controller or "received"."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, operation: str, sent: int = 0, received: int = 0) -> None:
        """Count a call with its answer, or a payload column that the controller puts or gets."""
        with self._lock:
            for key, nbytes in (((operation, "sent"), sent), ((operation, "received"), received)):
                if nbytes:
                    self._bytes[key] += nbytes

    def take(self) -> dict[tuple[str, str], int]:
        """Return the sums above 0 since the last take."""
        with self._lock:
            found, self._bytes = self._bytes, Counter()
        return dict(found)


def _joined(rows: list[list[float]]) -> Total:
    return total_of([sum(c) if done else max(c) for c, done in zip(zip(*rows), DONE)])


def together(mine: dict[str, Total], other: dict[str, Total]) -> dict[str, Total]:
    """Add the sums of controller and workers, which work one after the other."""
    both = dict(mine)
    for op, total in other.items():
        row = zip(_row(both[op]), _row(total)) if op in both else [(value, 0) for value in _row(total)]
        both[op] = Total(*(a + b for a, b in row))
    return both
