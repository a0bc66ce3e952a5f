"""Processes that load sources: each opens some of them, reads and tokenises samples ahead of need.

Which samples are needed is decided elsewhere, by index; nothing here depends on which process makes one, so a plan of
processes and their deaths change no sample and no order. A thread of this process hears and feeds the loaders, so that
they go on while the step computes.
"""

import os
import pickle
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from tilth.core.errors import DataError, TilthError
from tilth.data.computed import Source, has_media
from tilth.data.examples import Kind, LoadedSample
from tilth.plan.loaders import Shares
from tilth.process.by_value import dumps
from tilth.process.child import ChildPool, PipedChild, how_ended, ready
from tilth.process.restarts import RestartPolicy
from tilth.roles.source_loader import LoaderSettings, Places

AHEAD = 8192
"""Samples that are asked for ahead of need at most, those that have come included."""
SILENCE = 60.0
"""Seconds in which a loader that was asked for samples begins to read the next one, or makes some."""
OPENING = 600.0
"""Seconds in which a loader starts, or opens a source."""
RESTARTS = RestartPolicy(fruitless=3)
"""A loader of which samples are asked is replaced three times in a row without one in between."""
_TOGETHER = 16
"""Samples, of any sources, that a loader is asked for at once: what a lost one makes again, and how finely work is
divided."""
_FLYING = 2
"""Messages with requests that a loader has at a time: it begins with the next one before the last is heard."""
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_Key = tuple[Kind, int]


@dataclass(frozen=True)
class _LoadRequest:
    """Samples of one source."""

    source: int
    kind: Kind
    indices: tuple[int, ...]

    @property
    def keys(self) -> list[_Key]:
        return [(self.kind, i) for i in self.indices]


class LoaderProcess(PipedChild):
    """One process with its requests in flight, which it answers in order."""

    def __init__(self, greeting: bytes, output: int | None) -> None:
        self.flying = deque[list[_LoadRequest]]()
        """Requests that it has, by message."""
        self.starting = 0
        """Lists of sources that it has not taken yet."""
        self.opening = False
        """True while it opens a source."""
        self.holds = frozenset[int]()
        """Sources that it was told to serve."""
        self.heard = time.monotonic()
        super().__init__("tilth.roles.source_loader:main", [], greeting, output, variables=_ONE_THREAD)

    @property
    def idle(self) -> bool:
        """True if it ends by itself once its requests end."""
        return not self.flying and not self.starting

    def late(self, silence: float) -> float:
        """Return when (time.monotonic) it has been silent for too long."""
        return self.heard + (OPENING if self.opens else silence if self.flying else float("inf"))

    @property
    def opens(self) -> bool:
        """True while it starts, or opens a source."""
        return self.opening or bool(self.starting)

    @property
    def requests_flying(self) -> list[_LoadRequest]:
        """Requests that are not answered, in order."""
        return list(chain.from_iterable(self.flying))


@dataclass
class _Place:
    """Place of a loader, which a successor takes over."""

    wanted: set[int] = field(default_factory=set)
    """Numbers of the sources that are loaded here."""
    waiting: deque[_LoadRequest] = field(default_factory=deque)
    team: list[LoaderProcess] = field(default_factory=list)
    """The loader, and those that serve the same sources once they take over."""
    rests: bool = False
    """True if the loader was lost while no sample was asked of it: its successor starts when one is."""
    lost: Counter[bool] = field(default_factory=Counter)
    """Losses of the loader in a row without a sample in between (True), and of others before one was ready."""

    @property
    def pending(self) -> Iterator[_LoadRequest]:
        """Requests that were made here and are not answered."""
        return chain(self.team[0].requests_flying if self.team else (), self.waiting)


class SourceLoaders:
    """Loaders of several sources, whose indices follow each other, until they are closed.

    ``stalled``: seconds that ``take`` has waited; ``plan``: the one that is followed. Samples come as ``tokenised``
    makes them, bit for bit. A thread alone reads, writes, starts and kills.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        settings: LoaderSettings,
        plan: Sequence[Shares],
        *,
        shadows: int = 0,
        ahead: int = AHEAD,
        silence: float = SILENCE,
    ) -> None:
        """plan: as of ``follow``. shadows: processes beside each that take over when it is lost. ahead: most samples
        that are asked for ahead of need. silence: seconds after which a silent process is lost.
        """
        self._names, self._sources = list(sources), list(sources.values())
        self._shadows, self._ahead, self._silence = shadows, ahead, silence
        self.stalled, self.plan = 0.0, list[dict[str, float]]()
        starts = np.cumsum([0, *map(len, self._sources)])
        self._starts = starts.tolist()
        places = Places(starts, any(map(has_media, self._sources)))
        greeting = dumps((settings.plugins, dumps((settings, places))))
        self._pool = ChildPool(partial(LoaderProcess, greeting))
        self._places: list[_Place] = []
        self._come: dict[_Key, LoadedSample | TilthError] = {}
        self._open = set[_Key]()
        """Asked for, and not come."""
        self._made, self._spent = Counter[int](), dict[int, float]()
        """Samples, and processor seconds, by source."""
        self._failed: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        self._thread = threading.Thread(target=self._run, name="source-loaders", daemon=True)
        self._thread.start()
        try:
            self.follow(plan)
        except BaseException:
            self.close()
            raise

    def ask(self, kind: Kind, indices: Sequence[int]) -> None:
        """Begin with samples that will be taken next, as many as may be ahead; forget those that were asked for before
        and are not among them. Returns at once."""
        wanted = {(kind, i): None for i in indices}
        with self._calling():
            self._open &= wanted.keys()
            self._come = {key: one for key, one in self._come.items() if key in wanted}
            fresh = (key for key in wanted if key not in self._open and key not in self._come)
            self._request(list(islice(fresh, max(0, self._ahead - len(self._open) - len(self._come)))))

    def take(self, kind: Kind, indices: Sequence[int]) -> list[LoadedSample]:
        """Return these samples in order, and wait for those that have not come.

        Raises the first error of a sample, errors of a source that cannot be opened, and ``DataError`` for a loader
        that is lost again and again.
        """
        began, keys = time.perf_counter(), list(dict.fromkeys((kind, i) for i in indices))
        with self._calling():
            self._request([key for key in keys if key not in self._open and key not in self._come], first=True)
        with self._changed:
            while not all(key in self._come for key in keys):
                if self._failed is not None:
                    raise self._failed
                self._changed.wait()  # the thread ends what takes too long
            found = {key: self._come.pop(key) for key in keys}
        self.stalled += time.perf_counter() - began
        for one in found.values():
            if isinstance(one, TilthError):
                raise one
        return [found[kind, i] for i in indices]  # type: ignore[misc]

    def follow(self, plan: Sequence[Shares]) -> None:
        """Have these processes from now on, each for these sources; what was asked for is not lost.

        plan: as of ``plan.loaders.place_loaders``. A source that it leaves out is opened once it is asked for.
        """
        with self._calling():
            wanted = [frozenset(map(self._names.index, shares)) for shares in plan if shares]
            queued = [request for place in self._places for request in place.waiting]
            arranged = kept_places(wanted, [place.wanted for place in self._places])
            self._places += [_Place() for _ in arranged[len(self._places) :]]
            for place, own in zip(self._places, [*arranged, *[set[int]()] * len(self._places)]):
                place.wanted = own
                place.waiting.clear()
            for request in queued:
                self._place_of(request.source).waiting.append(request)
        self.plan = [dict(shares) for shares in plan]

    def costs(self) -> dict[str, float]:
        """Return the processor seconds of a sample by source, of those that have made some."""
        with self._changed:
            return {self._names[number]: self._spent[number] / made for number, made in self._made.items()}

    def pids(self) -> list[int]:
        """Return the processes of all loaders, shadows included."""
        with self._changed:
            return [child.pid for place in self._places for child in place.team]

    def close(self) -> None:
        """End all loaders and wait for their end. May be called twice."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._failed = self._failed or DataError("the source loaders are closed", key="data.loaders.closed")
            self._tell()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # a garbage collection in it may close this
            self._thread.join(OPENING)
        self._pool.close()
        os.close(self._wake)
        os.close(self._waker)

    # ---- with the lock ----

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Hold the lock for a call, and wake the thread behind it. Raises what has ended the loaders."""
        with self._changed:
            if self._failed is not None:
                raise self._failed
            yield
            self._tell()

    def _tell(self) -> None:
        """Wake the thread."""
        with suppress(BlockingIOError):  # full: it will wake anyway
            os.write(self._waker, b"\0")

    def _request(self, keys: Iterable[_Key], first: bool = False) -> None:
        """Queue requests for samples; first: before all others."""
        by_source: dict[tuple[int, Kind], list[int]] = {}
        for kind, index in keys:
            self._open.add((kind, index))
            by_source.setdefault((bisect_right(self._starts, index) - 1, kind), []).append(index)
        made = []
        for (source, kind), indices in by_source.items():
            several = sum(source in place.wanted for place in self._places)
            size = min(_TOGETHER, -(-len(indices) // max(1, several)))
            made += [_LoadRequest(source, kind, tuple(indices[i : i + size])) for i in range(0, len(indices), size)]
        for request in reversed(made) if first else made:
            waiting = self._place_of(request.source).waiting
            (waiting.appendleft if first else waiting.append)(request)

    def _place_of(self, source: int) -> _Place:
        """Return the place with the least to do among those that load this source; if none does, one begins to."""
        able = [place for place in self._places if source in place.wanted]
        able = able or [place for place in self._places if place.wanted]
        if not able:
            self._places.append(_Place())
            able = self._places[-1:]
        best = able[0]
        if len(able) > 1:  # few of hundreds of sources: for each of these all that is pending is summed
            best = min(able, key=lambda place: sum(map(self._work, place.pending)))
        best.wanted.add(source)
        return best

    def _work(self, request: _LoadRequest) -> float:
        """Return the seconds that a request is expected to take: those of a sample of its source, or of any."""
        own = [request.source] if request.source in self._made else list(self._made)
        made = sum(self._made[number] for number in own)
        return len(request.indices) * (sum(self._spent[number] for number in own) / made if made else 1.0)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001  (whoever takes a sample raises it)
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Wait for messages, a deadline or a call, and handle them; False at the end."""
        children = [child for place in self._places for child in place.team]
        due = min((child.late(self._silence) for child in children), default=float("inf"))
        happened = ready(children, min(due - time.monotonic(), OPENING), self._wake)
        with self._changed:
            if self._ended:
                return False
            for place in self._places:
                for child in [child for child in place.team if child in happened]:
                    if not self._hear(place, child):
                        self._lose(place, child, f"it {how_ended(child.kill())}")
                for child in [child for child in place.team if child.late(self._silence) <= time.monotonic()]:
                    child.kill()
                    what = "did not open its sources" if child.opens else "made no sample"
                    self._lose(place, child, f"it {what} for {OPENING if child.opens else self._silence:g} s")
            for place in self._places:
                self._staff(place)
            for place in self._places:
                self._feed(place)
            self._places = [place for place in self._places if place.wanted or place.team]
            self._changed.notify_all()
        return True

    def _hear(self, place: _Place, child: LoaderProcess) -> bool:
        """Take in the messages of a loader; False if it has ended. Raises the error of one that cannot load."""
        alive = child.write() and child.read()
        for body in child.bodies():
            child.heard = time.monotonic()
            what, *given = pickle.loads(body)
            if what == "failed":
                raise given[0]
            if what == "alive":
                continue
            if what in ("opening", "opened"):
                child.opening = what == "opening"
                continue
            if what == "serving":
                child.starting -= 1
            else:
                for request, found in zip(child.flying.popleft(), given[0]):
                    self._add(request, *found)
            place.lost[what == "loaded"] = 0
        return alive

    def _add(self, request: _LoadRequest, found: Sequence[LoadedSample | TilthError], seconds: float) -> None:
        """Keep the samples that are still wanted."""
        self._come |= {key: one for key, one in zip(request.keys, found) if key in self._open}
        self._open.difference_update(request.keys)
        self._spent[request.source] = self._spent.get(request.source, 0.0) + seconds
        self._made[request.source] += len(found)

    def _lose(self, place: _Place, child: LoaderProcess, why: str) -> None:
        """Ask another one for what a loader has not made; a loss counts while somebody waits for that, that of a shadow
        always. Raises ``DataError`` if one is lost too often."""
        loads = child is place.team[0]
        place.rests = loads and not (child.flying or place.waiting)
        place.lost[loads] += not place.rests
        for request in reversed(child.requests_flying):  # also of sources that are not loaded here any more
            able = place if request.source in place.wanted else self._place_of(request.source)
            able.waiting.appendleft(request)
        place.team.remove(child)
        self._pool.children.remove(child)
        if not RESTARTS.again(fruitless=(times := place.lost[loads])):
            names = ", ".join(self._names[number] for number in sorted(place.wanted))
            if not loads:
                message = f"the shadow of a loader of {names} is lost {times} times in a row before it is ready: {why}"
                raise DataError(f"{message}; data.shadows = 0 goes on without one", key="data.shadows.lost")
            message = f"a loader of {names} is lost {times} times in a row without a sample in between: {why}"
            raise DataError(f"{message}; data.loaders = 0 shows where", key="data.loaders.lost")

    def _staff(self, place: _Place) -> None:
        """Start the loader of a place and its shadows, open what it loads; end them where nothing is loaded."""
        if not place.wanted:
            if not any(child.flying for child in place.team):
                for child in place.team:
                    child.kill()
                    self._pool.children.remove(child)
                place.team.clear()
            return
        if place.rests and not place.waiting:
            return
        place.rests = False
        while len(place.team) < 1 + self._shadows:
            place.team.append(self._pool.start())
        for child in place.team:
            if child.holds != place.wanted:
                new = {number: dumps(self._sources[number]) for number in place.wanted - child.holds}
                self._send(child, "serve", dict.fromkeys(place.wanted, b"") | new)
                child.holds = frozenset(place.wanted)
                child.starting += 1

    def _feed(self, place: _Place) -> None:
        """Send the next requests to the loader of a place, without what nobody wants any more."""
        while place.team and place.waiting and len(place.team[0].flying) < _FLYING:
            asked, room = list[_LoadRequest](), _TOGETHER
            while place.waiting and len(place.waiting[0].indices) <= room:
                request = place.waiting.popleft()
                if indices := tuple(i for kind, i in request.keys if (kind, i) in self._open):
                    asked.append(replace(request, indices=indices))
                    room -= len(indices)
            if asked:
                self._send(place.team[0], "load", [(request.kind, request.indices) for request in asked])
                place.team[0].flying.append(asked)

    def _send(self, child: LoaderProcess, *message: Any) -> None:
        if child.idle:
            child.heard = time.monotonic()
        child.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def kept_places(wanted: Sequence[AbstractSet[int]], now: Sequence[AbstractSet[int]]) -> list[set[int]]:
    """Return the wanted sources of each process in an order in which present ones keep most of what they have open.

    now: sources of the processes that there are; each in turn takes what it shares most with.
    """
    left, found = list(wanted), list[set[int]]()
    for held in now:
        if left:
            best = max(left, key=lambda one: (len(one & held), -len(one)))
            left.remove(best)
            found.append(set(best))
    return found + list(map(set, left))
