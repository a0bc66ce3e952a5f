"""Engines that generate beside training: groups of samples are handed to replicas, which go on in rounds.

A sample can go on elsewhere from the tokens that its replica has logged: a replica gives it up, or is lost, and another
one takes it up, with the same random numbers.

One thread keeps a round of each replica in flight, so that the loop's own calls never wait for more than a round; no
replica waits for the round of another one, nor for one that is lost: its samples go to the others, and its worker is
replaced beside them (``mend``). With the inline backend there is no thread: rounds are run where the loop
waits, and ``AHEAD`` of them for each batch.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.lazy import resolved
from tilth.cluster.controller.leases import LeasedStore
from tilth.core.batch import Batch, Lease, concat
from tilth.core.errors import DataError, WorkerLost
from tilth.engines.protocol import EngineError
from tilth.flows.generation import Scorers
from tilth.plan.repack import ReplicaLimits, repack
from tilth.roles.relay import Publication
from tilth.roles.rollout import Ended

AHEAD = 1
"""Rounds for each batch that the inline backend runs before the step learns from it."""
PATIENCE = 10.0
"""Seconds for the thread to end its rounds when the run ends; a replica that hangs is found by the cluster's limits."""
MENDING = 120.0
"""Seconds for replicas to be mended when the run ends, before their workers are killed."""
PERIOD = 5.0
"""Seconds between two plans of moves (Laminar, arXiv 2510.12633)."""
STAY = 16
"""A sample that has at most so many tokens to draw is not moved: its prefix would be computed again for them."""
STOPPED = "replicas.stopped"
"""Key of the error of who asks a replica once the rounds are stopped."""
LOOK = 1.0
"""Seconds between two looks at a thread that is waited for."""


@dataclass(eq=False)
class Flight:
    """A group of samples on its way. asked: rows that ask for them; lease: of its payload; version: of their begin;
    again: True if an earlier attempt, or a replica that was lost, may have begun them: they go on from what is logged
    of this version or newer ones."""

    first: int
    asked: Batch
    lease: Lease
    version: int = 0
    again: bool = False
    places: set[int] = field(default_factory=set)
    """Replicas on which samples of it have ended."""
    ended: dict[int, Ended] = field(default_factory=dict)
    rows: Batch | None = None
    """What replicas have generated, when all samples have ended and ``whole`` has returned it."""
    parts: list[Batch] = field(default_factory=list)
    """The same of each replica; lazy."""
    since: float = 0.0
    """When they had, in monotonic seconds."""
    after: dict[int, object] = field(default_factory=dict)
    """Replica -> its round that may still log tokens of these samples: nobody goes on with them before it has ended."""


class Replicas:
    """The replicas of the rollout role."""

    def __init__(
        self,
        rollout: WorkerGroup,
        store: LeasedStore,
        room: int,
        scorers: Scorers | None,
        *,
        threaded: bool,
        note: Callable[..., object] = lambda kind, **fields: None,
        version: int = 0,
        limits: ReplicaLimits | None = None,
        pull: Callable[[int], Publication] | None = None,
        mend: Callable[[int, WorkerLost], Publication] | None = None,
        give_up: Callable[[Collection[int]], object] = lambda ranks: None,
    ) -> None:
        """room: samples in flight that a replica takes; scorers: get what has ended; note: is called with the events
        "resume" and "move" of ``runs.events``; version: of the weights under which samples go on that were begun
        before; limits: of a replica to which samples move, None: none does; pull: lets a replica take the newest
        weights (``rollout.inflight = "finish"``) once none of its samples is in flight, so that each has one version,
        and until then it begins no others; None: weights come between two rounds; mend: replaces the worker of a
        replica that is lost, in a thread of its own, and returns the weights that it has then; it is asked again with
        the loss of the new worker, and raises what the loop is to hear; None: the loop hears of every loss; give_up:
        kills the workers of these ranks, for which ``mend`` takes too long."""
        self.rollout, self.store, self.room, self.scorers = rollout, store, room, scorers
        self.note, self.version, self.limits, self._pull, self._mend = note, version, limits, pull, mend
        self._give_up = give_up
        self.below: int | None = None
        """The replicas are to forget the tokens of samples below this id."""
        self.moved = self.resumed = 0
        """Samples that went on elsewhere, since somebody set these to 0."""
        self._planned = time.monotonic()
        self._parts = rollout.parts("dp")
        self._flying: list[dict[int, Flight]] = [{} for _ in self._parts]
        """Sample in flight -> its group, of each replica."""
        self._newest: Publication | None = None
        self._has: list[Publication | None] = [None] * len(self._parts)
        """What was published since these replicas were made, and what each has taken of it."""
        self._rounds = dict[int, tuple[float, Mapping[int, Ended]]]()
        """Replica with a round under way -> when that was sent, and its answer."""
        self._queue, self._whole = deque[Flight](), deque[Flight]()
        self._discarded = set[int]()
        """First ids of groups to forget before the next round."""
        self._lost = set[int]()
        """Replicas without a worker."""
        self._torn = list[Flight]()
        """Groups that have ended, and of which rows were lost with a replica."""
        self._menders = dict[int, threading.Thread]()
        self._changed = threading.Condition()
        self._holds, self._still, self._stopped = 0, True, False
        self._error: BaseException | None = None
        self._busy, self._since = 0.0, time.monotonic()
        rollout.begin(anew=True)
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # ---- for the loop ----

    def submit(self, flight: Flight) -> None:
        """Queue a group, for the first replica that has room."""
        with self._changed:
            self._queue.append(flight)
            self._changed.notify_all()

    def offer(self, publication: Publication) -> None:
        """Note what was published last; each replica pulls it when its samples in flight have ended."""
        with self._changed:
            self._newest = publication
            self._changed.notify_all()

    def whole(self) -> list[Flight]:
        """Return the groups that have ended since the last call, in this order, with their rows. Raises what a replica
        has raised."""
        with self._changed:
            self._check()
            found = [*self._whole]
            self._whole.clear()
        return [flight for flight in found if self._has_rows(flight)]

    def _has_rows(self, flight: Flight) -> bool:
        """Bring the rows of a group that has ended; False: some were lost with a replica, and it goes on again."""
        try:
            found = [resolved(one) for one in flight.parts]
        except WorkerLost as error:
            self.check_lost(error)
            with self._changed:
                self._torn.append(flight)
                self._changed.notify_all()
            return False
        if len(found) == 1:
            flight.rows = found[0]
        elif found:  # samples of it have moved
            rows = concat(found)
            flight.rows = rows.select(np.argsort(rows["id"]))
        return True

    def check_lost(self, error: WorkerLost) -> None:
        """Raise the loss of a worker, unless it is that of a replica, which is mended once a round ends with it."""
        if self._mend is None or not self._places(error):
            raise error

    def living(self) -> WorkerGroup | None:
        """Return the replicas that have a worker, as far as it is known; None without any."""
        with self._changed:
            living = [place for place in range(len(self._parts)) if place not in self._lost]
        return self.rollout if len(living) == len(self._parts) else self.rollout.part("dp", living) if living else None

    def discard(self, first: int) -> None:
        """Forget a group that is queued or in flight; ``whole`` returns it as far as it is."""
        with self._changed:
            self._discarded.add(first)
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until something has ended. Raises what a replica has raised."""
        if self._thread is None:
            if not self._stopped:
                self._round()
            return
        with self._changed:
            while not self._whole and self._error is None and self._thread.is_alive():
                self._changed.wait(LOOK)

    def ahead(self) -> None:
        """Run the rounds of a batch, where no thread does."""
        for _ in range(AHEAD if self._thread is None and not self._holds else 0):
            self._round()

    def hold(self) -> None:
        """Stop rounds until ``release``; returns when none is under way."""
        with self._changed:
            self._holds += 1
            self._changed.notify_all()
            while self._thread is not None and not self._still and self._thread.is_alive():
                self._changed.wait(LOOK)
            self._check()

    def release(self) -> None:
        """Go on, unless another part of the loop holds the rounds."""
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let all replicas generate something else in the block, under the newest weights. What is in flight goes on
        afterwards, or ends before with weights of its own; a block that raises loses it, and every later use of the
        replicas raises the same."""
        self.hold()
        try:
            with self._changed:
                while self._lost and self._error is None:
                    self._changed.wait(LOOK)
                self._check()
            while self._pull is not None and (self._rounds or any(self._flying)):
                self._round(begin=False)
            self._pull_due()
            self.rollout.set_aside()
            yield
            self.rollout.take_up()
        except BaseException as error:
            with self._changed:
                self._error, self._stopped = error, True
            raise
        finally:
            self.release()

    def idle_share(self) -> float:
        """Return the share of the replicas' time since the last call in which they had no round."""
        with self._changed:
            now, busy = time.monotonic(), self._busy
            spent, self._since, self._busy = now - self._since, now, 0.0
        return max(0.0, 1.0 - busy / max(spent * len(self._parts), 1e-9))

    def stop(self) -> None:
        """End the rounds; what is in flight is lost. EngineError [replicas.mend] for a replica that is being mended
        even when its workers have been given up for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:  # one that hangs for longer asks no replica any more: see ``_part``
            self._thread.join(PATIENCE)
        if late := self._mending(MENDING):
            self._give_up([rank for place in late for rank in self._parts[place].mesh.ranks])
            if late := self._mending(PATIENCE):
                raise EngineError(
                    f"replica {late[0]} is still being replaced {MENDING + PATIENCE:g} s after the end of the rounds; "
                    "if the run has not finished, start it again, and it continues",
                    key="replicas.mend",
                )

    def _mending(self, seconds: float) -> list[int]:
        """Wait for the replicas that are being mended; return those that still are after some seconds."""
        until = time.monotonic() + seconds
        for mender in self._menders.values():
            mender.join(max(0.0, until - time.monotonic()))
        return [place for place, mender in self._menders.items() if mender.is_alive()]

    def drop(self) -> None:
        """Drop what was in flight, once the rounds have ended, and scores that nobody asks for."""
        self.rollout.begin(anew=True)
        if self.scorers is not None:
            self.scorers.forget()

    def forget(self, flight: Flight) -> None:
        """Drop the scores of a group that no step takes."""
        if self.scorers is not None:
            self.scorers.forget(flight.ended)

    def _check(self) -> None:
        """Raise what the thread has raised."""
        if self._error is not None:
            raise self._error

    def check_ended(self) -> None:
        """Raise what rounds or menders have raised that are stopped, but for what the stop has made them raise."""
        if not (isinstance(self._error, EngineError) and self._error.key == STOPPED):
            self._check()

    # ---- rounds ----

    def _run(self) -> None:
        try:
            while self._goes_on():
                try:
                    if not (self._holds or self._stopped):
                        self._begin_rounds()
                    self._end_rounds()
                except WorkerLost as error:
                    self._lose(error)
        except BaseException as error:  # noqa: BLE001 - the loop's thread raises it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        """Wait until there is something to do, or a round is under way; False: never again. Once still, this thread
        stays so while the loop holds the rounds, and runs its own."""
        with self._changed:
            while not self._stopped and (
                (self._holds and self._still) or not (self._rounds or (not self._holds and self._has_work()))
            ):
                self._still = True
                self._changed.notify_all()
                self._changed.wait(LOOK)
            self._still = False
            return bool(self._rounds) or not self._stopped

    def _has_work(self) -> bool:
        """True if a replica has something to generate or to take. (Called with the lock.)"""
        queued = bool(self._queue or self._torn) and len(self._lost) < len(self._parts)
        return queued or any(self._flying) or bool(self._due())

    def _part(self, place: int) -> WorkerGroup:
        """Return a replica for a call. EngineError once the rounds are stopped: the next attempt may have it."""
        if self._stopped:
            raise EngineError(f"rounds that were stopped ask replica {place}", key=STOPPED)
        return self._parts[place]

    def _round(self, *, begin: bool = True) -> None:
        """Begin rounds, and take those that end first."""
        self._begin_rounds(begin=begin)
        self._end_rounds()

    def _begin_rounds(self, *, begin: bool = True) -> None:
        """Hand out groups, if some may ``begin``, and let each replica with samples generate for a round."""
        with self._changed:
            torn, self._torn = self._torn, []
        for flight in torn:
            self._go_again(flight)
        self._end_discarded()
        if self.below is not None and (living := self.living()) is not None:
            living.forget(self.below)
            self.below = None
        self._pull_due()
        if begin:
            self._hand_out()
        if begin and self.limits is not None:
            self._repack(self.limits)
        texts = self.scorers is not None
        for place, flying in enumerate(self._flying):
            if flying and place not in self._rounds:
                self._rounds[place] = time.monotonic(), self._part(place).advance(texts=texts)

    def _end_rounds(self, places: Collection[int] = ()) -> None:
        """Take the rounds that have ended, once one has, and all of these replicas have."""
        while self._rounds:
            answers = [answer for _, answer in self._rounds.values()]
            for place, landed in zip([*self._rounds], self.rollout.first(answers)):
                if landed:
                    since, answer = self._rounds.pop(place)
                    ended = resolved(answer)
                    if not self._stopped:  # else it is lost, and nobody may ask the replica for more
                        self._take(place, ended)
                    with self._changed:
                        self._busy += time.monotonic() - since
            if self._rounds.keys().isdisjoint(places):
                return

    def _end_discarded(self) -> None:
        """End groups that are discarded, on the replicas that have them."""
        with self._changed:
            gone, self._discarded = self._discarded, set()
            found = [flight for flight in self._queue if flight.first in gone]
            self._queue = deque(flight for flight in self._queue if flight.first not in gone)
        for place, flying in enumerate(self._flying):
            for flight in dict.fromkeys(flight for flight in flying.values() if flight.first in gone):
                here = [i for i, one in flying.items() if one is flight]
                self._part(place).discard(here)
                for i in here:
                    del flying[i]
                found.append(flight)
        found = list(dict.fromkeys(found))  # samples of a group may have moved
        for flight in found:
            for place in sorted(flight.places):
                self._part(place).discard([*flight.ended])
        with self._changed:
            self._whole.extend(found)
            self._changed.notify_all()

    def _due(self) -> list[int]:
        """Return the replicas that wait for the newest weights and have nothing in flight."""
        behind = (place for place, has in enumerate(self._has) if has != self._newest and not self._flying[place])
        return [place for place in behind if place not in self._lost]

    def _pull_due(self) -> None:
        """Let replicas take the newest weights where it is time; what they are asked for next waits for it."""
        for place in self._due():
            assert self._pull is not None
            self._part(place)  # raises once the rounds are stopped
            self._has[place] = self._pull(place)

    def _hand_out(self) -> None:
        """Give each queued group to the replica with the fewest samples, while there is room, but to none that waits
        for weights."""
        while True:
            with self._changed:  # a group is never of newer weights in the books than in the replica that gets it
                places = [p for p, has in enumerate(self._has) if has == self._newest and p not in self._lost]
                flight = next((flight for flight in self._queue if not self._is_drawn(flight)), None)
                # The answer of a resume is waited for, which a round would delay.
                if flight is not None and flight.again:
                    places = [place for place in places if place not in self._rounds]
                place = min(places, key=lambda p: len(self._flying[p]), default=None)
                if place is None or flight is None:
                    return
                flying = self._flying[place]
                if flying and len(flying) + len(flight.asked) > self.room:
                    return
                self._queue.remove(flight)
            flying.update((i, flight) for i in flight.asked["id"].tolist())
            if flight.again:
                self._resume(place, flight)
            else:
                self._part(place).submit(flight.asked)

    def _is_drawn(self, flight: Flight) -> bool:
        """True while a round from before this group was queued again may draw its samples."""
        return any(self._rounds.get(place) is one for place, one in flight.after.items())

    def _resume(self, place: int, flight: Flight) -> None:
        """Let samples go on from what is known of each; the others begin."""
        found = resolved(self._part(place).submit(flight.asked, again=flight.version))
        for i, one in found.items():
            self.note("resume", id=i, tokens=one.tokens, version=one.version)
        self.resumed += len(found)

    def _repack(self, limits: ReplicaLimits) -> None:
        """Empty replicas that are in their tail into others, where nothing waits for their room."""
        now = time.monotonic()
        if (self._thread is not None and now - self._planned < PERIOD) or not (places := self._tails(limits.rows)):
            return
        self._planned = now
        self._end_rounds(places)
        busy = self._tails(limits.rows)
        for source, target, ids in repack([self._part(place).load() for place in busy], limits, stay=STAY):
            self._move(busy[source], busy[target], ids, limits)

    def _tails(self, rows: int) -> list[int]:
        """Return the replicas that may be in their tail: they take no queued group, since none waits or they wait for
        weights, and another one with the same weights has room for their samples, of ``rows``."""
        count = [len(flying) for flying in self._flying]
        takes = [bool(self._queue) and has == self._newest for has in self._has]
        some = [place for place, rest in enumerate(count) if rest and not takes[place]]
        return [
            place
            for place in some
            if any(
                other != place and self._has[other] == self._has[place] and count[other] + count[place] <= rows
                for other in some
            )
        ]

    def _move(self, source: int, target: int, ids: Sequence[int], limits: ReplicaLimits) -> None:
        """Move samples that are still in flight, if their target still has their version, and room.

        DataError [move.tokens] for one that did not arrive with all its tokens.
        """
        before, after = self._part(source).load(), self._part(target).load()
        tokens = after.tokens + sum(row.tokens for row in before.rows if row.trajectory in ids)
        if before.version != after.version or not limits.hold(tokens, len(after.rows) + len(ids)):
            return
        given = self._part(source).give_up(ids)
        moved = {i: self._flying[source].pop(i) for i in given}
        for i, count in given.items():
            self.note("move", id=i, tokens=count, **{"from": source, "to": target})
        self._flying[target].update(moved)
        asked = concat([one.asked.select(np.isin(one.asked["id"], [*given])) for one in dict.fromkeys(moved.values())])
        found = {i: one.tokens for i, one in resolved(self._part(target).submit(asked, again=0)).items()}
        if found != given:
            raise DataError(
                f"replica {source} gave up samples with {given} tokens, and {target} has {found} of them: do all "
                "workers of the rollout see the directory of the run?",
                key="move.tokens",
            )
        self.moved += len(given)

    def _take(self, place: int, ended: Mapping[int, Ended]) -> None:
        """Take samples that have ended, for the scorers first; collect the groups that are whole."""
        self._part(place)  # before the scorers are asked
        ended = {i: one for i, one in ended.items() if i in self._flying[place]}  # else it was discarded meanwhile
        if self.scorers is not None and ended:
            self.scorers.take(ended)
        for i, one in ended.items():
            flight = self._flying[place].pop(i)
            flight.ended[i] = one
            flight.places.add(place)
            if self._pull is not None and len(found := {version for _, version in one.versions}) > 1:
                raise EngineError(
                    f"sample {i} was drawn by versions {', '.join(map(str, sorted(found)))} of the policy: replica "
                    f"{place} took weights while it was in flight, and rollout.inflight = finish allows one",
                    key="rollout.inflight.versions",
                )
            if len(flight.ended) == len(flight.asked):
                with self.store.under(flight.lease):
                    asked = flight.asked["id"]
                    flight.parts = [self._part(place).collect(asked) for place in sorted(flight.places)]
                flight.since = time.monotonic()
                with self._changed:
                    self._whole.append(flight)
                    self._changed.notify_all()

    # ---- replicas that are lost ----

    def _places(self, error: WorkerLost) -> list[int]:
        """Return the replicas whose workers were lost; none if others were lost, too."""
        ranks = {rank: place for place, part in enumerate(self._parts) for rank in part.mesh.ranks}
        return [ranks[rank] for rank in error.ranks] if set(error.ranks) <= ranks.keys() else []

    def _lose(self, error: WorkerLost) -> None:
        """Give the samples of a lost replica to the others, and begin to mend it. Raises any other loss."""
        self.check_lost(error)
        if self._stopped:
            raise error
        for place in self._places(error):
            with self._changed:
                if place in self._lost:
                    raise error
                self._lost.add(place)
            self._rounds.pop(place, None)
            flights = dict.fromkeys(flight for flying in self._flying for flight in flying.values())
            for flight in flights:
                if place in flight.places or flight in self._flying[place].values():
                    self._go_again(flight)
            self._menders[place] = threading.Thread(target=self._bring_back, args=(place, error), daemon=True)
            self._menders[place].start()

    def _go_again(self, flight: Flight) -> None:
        """Queue a group of which a replica was lost: all of its samples go on from what is logged of them.

        A replica forgets them behind its round under way, which logs more: two would draw one sample, and the log would
        join tokens of both."""
        flight.after = {}
        for place, flying in enumerate(self._flying):
            here = [i for i, one in flying.items() if one is flight]
            for i in here:
                del flying[i]
            if place in self._lost:
                continue
            if here := [*here, *(flight.ended if place in flight.places else ())]:
                self._part(place).discard(here)
                if place in self._rounds:
                    flight.after[place] = self._rounds[place]
        if flight.ended:
            self.forget(flight)
        flight.ended, flight.places, flight.parts, flight.again = {}, set(), [], True
        with self._changed:
            self._queue.appendleft(flight)

    def _bring_back(self, place: int, error: WorkerLost) -> None:
        """Mend a replica, again if its new worker is lost meanwhile; what it cannot recover from, the loop raises."""
        assert self._mend is not None
        while True:
            try:
                has = self._mend(place, error)
                break
            except BaseException as found:  # noqa: BLE001 - the loop's thread raises it
                if isinstance(found, WorkerLost) and found is not error and self._places(found) == [place]:
                    error = found
                    if not self._stopped:
                        continue
                with self._changed:
                    self._error = self._error or found
                    self._changed.notify_all()
                return
        with self._changed:
            self._has[place] = None if self._newest is None else has
            self._lost.discard(place)
            self._changed.notify_all()
