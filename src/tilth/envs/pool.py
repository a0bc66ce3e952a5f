"""Pool of processes in which environments live, seen from the process that generates.

Calls return at once; ``poll`` brings the answers. A call beyond its limit, an exception and a process that dies cost
their own episode, never another one: the episodes of a lost process begin again elsewhere and repeat what they have
said, which must come out the same.
"""

import itertools
import json
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tilth.core.errors import DataError, PluginError
from tilth.envs.journal import Heard, ObservationJournal, Status
from tilth.envs.process import Asked
from tilth.process.child import ChildPool, PipedChild, death, ready
from tilth.process.output import Prints
from tilth.process.restarts import RestartPolicy

START = 120.0
"""Seconds for a process to become ready."""
RESTARTS = RestartPolicy(attempts=2)
"""An episode begins again once after the death of a process of its own."""
SUSPECTS = 4
"""Most processes that begin for the episodes which may have ended one."""
PING = 1.0
"""Seconds in which a process whose episode hangs answers if its other threads still run."""


class Answer(NamedTuple):
    """Answer of an episode's environment. value: None unless ``status`` is ok; then ``reason`` says why."""

    episode: int
    op: str
    value: Any
    reason: str = ""
    status: Status = "ok"


@dataclass
class _Episode:
    """History of an episode, from which it can begin again in another process."""

    id: int
    said: list[tuple[Asked, Any]] = field(default_factory=list)
    """Answered requests with their answers."""
    journal: ObservationJournal | None = None
    known: list[Heard] = field(default_factory=list)
    """What the journal has of it."""
    asked: Asked | None = None
    """Request in flight."""
    deadline: float = 0.0
    repeated: int = 0
    """Answered requests that its present process has answered."""
    strikes: int = 0
    """Processes that died while this episode had a request in flight."""
    before: int = 0
    """Answered requests of earlier calls, which the journal of this one does not have."""
    life: int = field(default_factory=itertools.count(1).__next__)
    """Its number in its process. One with the same id that begins anew has another, so late answers are nobody's."""


class EnvironmentPool:
    """Processes with the environments of many episodes.

    spec: as ``rollout.environment``. workers: processes. timeout: limit of one call in seconds. plugins: imported in
    each process. rollout: how the recipe draws turns, for an agent (``SelfDriven.sampling``). Output is kept until
    ``print_to`` names its file, or ``close`` shows it. Raises PluginError if the environment cannot be loaded.
    """

    def __init__(
        self,
        spec: str,
        *,
        workers: int = 1,
        timeout: float = 10.0,
        plugins: Iterable[str] = (),
        rollout: Mapping[str, Any] | None = None,
    ) -> None:
        if workers < 1 or not timeout > 0:
            message = f"environments need workers >= 1 and a limit > 0, got {workers} and {timeout}"
            raise PluginError(message, key="environment.workers" if workers < 1 else "environment.timeout")
        self.timeout, self._workers = timeout, workers
        self._prints = Prints()
        greeting = pickle.dumps((spec, tuple(plugins), rollout))
        self._pool = ChildPool(partial(_Child, greeting), self._prints)
        self._children = self._pool.children
        self._episodes: dict[int, _Episode] = {}
        self._journal: ObservationJournal | None = None
        self._at_once: list[Answer] = []
        """Answers that the journal has."""
        try:
            self._start(workers)
        except PluginError:
            self.close()  # which shows what they printed
            raise

    def _start(self, count: int = 1) -> list["_Child"]:
        """Start processes besides. Meanwhile nobody is heard, so the time counts in no episode's limit."""
        begin = time.monotonic()
        fresh = [self._await(child) for child in [self._pool.start() for _ in range(count)]]
        for episode in self._episodes.values():
            episode.deadline += time.monotonic() - begin
        return fresh

    def _await(self, child: "_Child") -> "_Child":
        """Wait for a process of the pool to be ready. One that a signal kills meanwhile is replaced once: a kernel that
        needed memory may need more."""
        if not child.wait_ready():
            self._children.remove(child)
            child = self._pool.start()
            if not child.wait_ready():
                how = f"{death(child.kill())} at its start, as was the one before it"
                raise PluginError(f"a process of environments {how}", key="environment")
        return child

    def print_to(self, path: Path) -> None:
        """Append the environments' earlier and later output to this file."""
        self._prints.to(path)

    def keep(self, journal: ObservationJournal | None) -> None:
        """Write the answers of episodes that begin or go on from now on to a journal, and take those that it has; None:
        to none."""
        self._journal = journal

    def begin(self, episode: int, info: dict[str, Any]) -> None:
        """Begin an episode; its answer has messages and tools. One of this id that an attempt has left is ended."""
        self.end(episode)
        self._episodes[episode] = self._journaled(_Episode(episode))
        self._ask(Asked(episode, "begin", info))

    def _journaled(self, episode: _Episode) -> _Episode:
        """Let an episode know what the journal has of it, once."""
        episode.journal = self._journal
        episode.known = [] if self._journal is None else self._journal.known.pop(episode.id, [])
        return episode

    def said(self, episode: int) -> list[Any]:
        """Return what was asked of an episode and answered, as JSON; ``resume`` takes it."""
        return [[[*asked], value] for asked, value in self._episodes[episode].said]

    def resume(self, episode: int, said: Sequence[Any]) -> None:
        """Go on with an episode that has answered these. One that is not there, or has gone further in an attempt that
        failed, begins again and repeats them, which must come out the same."""
        known = self._episodes.get(episode)
        if known is None or known.asked is not None or self.said(episode) != list(said):
            self.end(episode)
            self._episodes[episode] = known = _Episode(episode, [(Asked(*asked), value) for asked, value in said])
        self._journaled(known).before = len(said)

    def keep_only(self, episodes: Iterable[int]) -> None:
        """End all other episodes."""
        for episode in self._episodes.keys() - set(episodes):
            self.end(episode)

    def step(self, episode: int, message: Any) -> None:
        """Pass on a message of the policy; the answer has messages and done."""
        self._ask(Asked(episode, "step", message))

    def reward(self, episode: int, cut: str = "") -> None:
        """Ask for an episode's reward; the answer is a ``rewards.functions.Score`` as a dict. cut: why it has ended
        before its end."""
        self._ask(Asked(episode, "reward", cut or None))

    def end(self, episode: int) -> None:
        """Forget an episode."""
        known = self._episodes.pop(episode, None)
        self._at_once = [one for one in self._at_once if one.episode != episode]
        if known is not None and (child := self._child_of(episode)):
            child.ask(known, Asked(episode, "end"))
            child.episodes.discard(episode)
            child.threads.pop(episode, None)
        self._retire()

    def working(self, episodes: Iterable[int]) -> bool:
        """Return True while the environment of one of these episodes owes an answer."""
        known = (self._episodes.get(i) for i in episodes)  # one that has failed is gone
        return any(one is not None and one.asked is not None for one in known)

    def at_once(self) -> list[Answer]:
        """Return the answers that the journal had."""
        found, self._at_once = self._at_once, []
        return found

    def poll(self, seconds: float) -> list[Answer]:
        """Return the answers that are there, in any order; wait for the first one at most this long."""
        until = time.monotonic() + seconds
        if found := self.at_once():
            return found
        while True:
            found = self._turn(max(0.0, min(until, self._first_deadline()) - time.monotonic()))
            if found or time.monotonic() >= until:
                return found

    def close(self) -> None:
        """End all processes. May be called twice."""
        self._pool.close()

    def _ask(self, asked: Asked) -> None:
        episode = self._episodes[asked.episode]
        place = len(episode.said) - episode.before
        here = episode.known[place : place + 2]
        if here and _same(here[0].asked, asked):
            heard = here[0] if here[-1].asked.op else here[-1]  # it failed before this answer was of use
            if heard.status == "ok":
                episode.said.append((asked, heard.value))
            else:
                self.end(episode.id)
            self._at_once.append(Answer(episode.id, asked.op, heard.value, heard.reason, heard.status))
            return
        if episode.journal is not None and episode.journal.complete:
            raise DataError(
                f"episode {episode.id}: {asked.op} after {len(episode.said)} answers is not in the journal of "
                f"environments, {episode.journal.path.parent}; weights, data or software are not the same",
                key="observations",
            )
        episode.known.clear()  # it went another way
        episode.asked, episode.deadline = asked, time.monotonic() + self.timeout
        child = self._child_of(episode.id)
        if child is None:  # its first request, or the first that the journal does not know
            self._home(episode).ask(episode, episode.said[0][0] if episode.said else asked)
        elif episode.repeated == len(episode.said):
            child.ask(episode, asked)

    def _child_of(self, episode: int) -> "_Child | None":
        return next((child for child in self._children if episode in child.episodes), None)

    def _home(self, episode: _Episode) -> "_Child":
        """Return the process for an episode: the emptiest; one of its own if it may have ended the last one."""
        able = [child for child in self._children if not child.retiring]
        best = min(able, key=lambda child: len(child.episodes), default=None)
        if best is None or (episode.strikes and best.episodes):
            (best,) = self._start()
            best.retiring = episode.strikes > 0
        return best

    def _first_deadline(self) -> float:
        return min((e.deadline for e in self._episodes.values() if e.asked is not None), default=float("inf"))

    def _turn(self, seconds: float) -> list[Answer]:
        """Wait for messages or a deadline, and handle them."""
        found: list[Answer] = []
        for child in _ready(self._children, seconds):
            if child not in self._children:  # it retired with its last episode, which another message ended
                continue
            alive = child.write() and child.read()
            for message in child.messages():
                found += self._take_in(child, message)
            if not alive:
                found += self._lose(child, f"its process {death(child.kill())}")
        now = time.monotonic()
        while late := [e for e in self._episodes.values() if e.asked is not None and e.deadline <= now]:
            found += self._overdue(late[0])  # which may give the others of its process more time
        return found

    def _take_in(self, child: "_Child", message: dict[str, Any]) -> list[Answer]:
        lives = {(one := self._episodes[i]).life: one for i in child.episodes}
        episode = lives.get(message.get("episode", -1))
        if episode is None:  # it has ended
            return []
        if "thread" in message:
            child.threads[episode.id] = message["thread"]
            return []
        if "error" in message:
            return [self._fail(episode, message["error"], "error")]
        value = message["value"]
        if episode.repeated < len(episode.said):
            return self._repeat(child, episode, value)
        assert episode.asked is not None
        asked, episode.asked = episode.asked, None
        self._write(episode, Heard(asked, value))
        episode.said.append((asked, value))
        episode.repeated = len(episode.said)
        return [Answer(episode.id, asked.op, value)]

    def _repeat(self, child: "_Child", episode: _Episode, value: Any) -> list[Answer]:
        """Compare an answer that was given before, in a process that was lost, and go on."""
        if value != episode.said[episode.repeated][1]:
            op = episode.said[episode.repeated][0].op
            why = f"its process was lost, and in a new one {op} {episode.repeated} returned something else"
            return [self._fail(episode, why, "differs")]
        episode.repeated += 1
        episode.deadline = time.monotonic() + self.timeout
        if episode.repeated < len(episode.said):
            child.ask(episode, episode.said[episode.repeated][0])
        elif episode.asked is not None:
            child.ask(episode, episode.asked)
        return []

    def _write(self, episode: _Episode, heard: Heard) -> None:
        if episode.journal is not None and not episode.journal.closed:
            episode.journal.write(len(episode.said) - episode.before, heard)

    def _fail(self, episode: _Episode, reason: str, status: Status) -> Answer:
        asked = episode.asked or Asked(episode.id, "")
        self._write(episode, Heard(asked, None, reason, status))
        self.end(episode.id)
        return Answer(episode.id, asked.op, None, reason, status)

    def _overdue(self, episode: _Episode) -> list[Answer]:
        """Fail an episode that hangs; its process goes on for its other episodes if it still answers. If it does not,
        the episode whose thread computes holds the others up: it fails, once it is beyond its limit too. If none
        computes, nobody is blamed: each begins again in a process of its own."""
        child = self._child_of(episode.id)
        assert child is not None
        before = child.computed()
        if child.answers(PING):
            if any(message.get("episode") == episode.life and "thread" not in message for message in child.kept):
                episode.deadline = time.monotonic() + PING  # it has answered, while nobody listened
                return []
            child.retiring = True
            return self._too_late(episode)
        blamed = self._holder(child, before)
        if blamed is not None and blamed.deadline > time.monotonic():
            episode.deadline = blamed.deadline
            return []
        child.retiring = True
        found = self._too_late(blamed) if blamed is not None else []
        if child in self._children:  # else it retired with its last episode
            child.kill()
            found += self._lose(child, "" if blamed is not None else "its process stands still")
        return found

    def _too_late(self, episode: _Episode) -> list[Answer]:
        assert episode.asked is not None
        why = f"{episode.asked.op} took longer than {self.timeout:g} s (rollout.turn_seconds)"
        return [self._fail(episode, why, "timeout")]

    def _holder(self, child: "_Child", before: dict[int, float]) -> _Episode | None:
        """Return the episode whose thread has computed most since ``before``; None if that is less than it could, or if
        the process is stopped for the first time under a single episode that waits."""
        after = child.computed()
        waiting = [e for i in child.episodes if (e := self._episodes[i]).asked is not None]
        spent = {e.id: after.get(t, 0.0) - before.get(t, 0.0) for e in waiting if (t := child.threads.get(e.id))}
        most = max(spent, key=lambda i: spent[i], default=-1)
        if len(waiting) == 1 and (waiting[0].strikes or not child.stopped()):
            return waiting[0]
        return self._episodes[most] if spent.get(most, 0.0) > max(0.05 * PING, sum(spent.values()) / 2) else None

    def _lose(self, child: "_Child", reason: str) -> list[Answer]:
        """Begin the episodes of a lost process again. reason: why it died; "": it was killed for another's sake. Those
        with a request in flight may have ended it: each gets a process of its own, and fails when that dies too. More
        than ``SUSPECTS`` of them are divided among that many processes, and again if one of these dies."""
        if child in self._children:
            self._children.remove(child)
        found = []
        lost = [self._episodes[i] for i in sorted(child.episodes)]
        if sum(not c.retiring for c in self._children) < self._workers:
            self._start()
        many = bool(reason) and sum(episode.asked is not None for episode in lost) > SUSPECTS
        shared = self._shared() if many else None
        for episode in lost:
            suspect = bool(reason) and episode.asked is not None
            episode.strikes += suspect and shared is None
            if not RESTARTS.again(episode.strikes):
                found.append(self._fail(episode, reason, "died"))
                continue
            episode.repeated, episode.deadline = 0, time.monotonic() + self.timeout
            first = episode.said[0][0] if episode.said else episode.asked
            if first is not None:
                home = next(shared) if suspect and shared else self._home(episode)
                home.ask(episode, first)
        return found

    def _shared(self) -> Iterator["_Child"]:
        """Start ``SUSPECTS`` processes that get no other episodes; yield them in turn."""
        fresh = self._start(SUSPECTS)
        for child in fresh:
            child.retiring = True
        return itertools.cycle(fresh)

    def _retire(self) -> None:
        """End processes that get no new episodes and have none left; keep the number of the others."""
        for child in [c for c in self._children if c.retiring and not c.episodes]:
            self._children.remove(child)
            child.kill()


class _Child(PipedChild):
    """One process, and the episodes that live in it."""

    def __init__(self, greeting: bytes, output: int | None) -> None:
        super().__init__("tilth.envs.process:main", [], greeting, output)
        self.episodes: set[int] = set()
        self.threads = dict[int, int]()
        """Native id of the thread of each episode that it has begun."""
        self.retiring = False
        self._pongs, self.kept = 0, list[dict[str, Any]]()

    def wait_ready(self) -> bool:
        """Wait until it has loaded the environment; raises PluginError if it cannot. False: a signal has killed it."""
        until = time.monotonic() + START
        while time.monotonic() < until:
            _ready([self], until - time.monotonic())
            alive = self.write() and self.read()
            for message in self.messages():
                if "ready" in message:
                    return True
                self.kill()
                raise PluginError(message["failed"], key=message["key"])
            if not alive and (code := self.kill()) < 0:
                return False
            if not alive:
                raise PluginError(f"a process of environments {death(code)} at its start", key="environment")
        self.kill()
        raise PluginError(f"a process of environments has not started within {START:g} s", key="environment.start")

    def ask(self, episode: _Episode, asked: Asked) -> None:
        """Queue a request about an episode, which lives here from now on and goes by its life."""
        self.episodes.add(episode.id)
        self.send(pickle.dumps(asked._replace(episode=episode.life)))

    def messages(self) -> list[dict[str, Any]]:
        """Return the complete messages received so far."""
        found, self.kept = self.kept, []
        for body in self.bodies():
            message = json.loads(body)
            self._pongs += "pong" in message
            found += [message] if "pong" not in message else []
        return found

    def answers(self, seconds: float) -> bool:
        """Ask whether its threads still run; messages that come meanwhile are kept."""
        before, until = self._pongs, time.monotonic() + seconds
        self.send(pickle.dumps(Asked(-1, "ping")))
        while time.monotonic() < until and self._pongs == before:
            _ready([self], until - time.monotonic())
            if not (self.write() and self.read()):
                return False
            self.kept = self.messages()
        return self._pongs > before

    def stopped(self) -> bool:
        """Return True for a process that SIGSTOP holds."""
        return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    def computed(self) -> dict[int, float]:
        """Return the processor seconds of each thread by its native id; none of a process that is gone."""
        try:
            return {t.id: t.user_time + t.system_time for t in psutil.Process(self.pid).threads()}
        except psutil.Error:
            return {}


def _ready(children: Sequence[_Child], seconds: float) -> list[_Child]:
    """Wait for children that can be read, or written to if they have unsent bytes."""
    if kept := [child for child in children if child.kept]:
        return kept
    return ready(children, min(seconds, START))


def _same(one: Asked, other: Asked) -> bool:
    """Return True for requests that are equal as JSON."""
    return json.dumps([*one], default=str) == json.dumps([*other], default=str)
