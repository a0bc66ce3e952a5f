"""Log of an asynchronous run: what happened to each trajectory, in one order, so that the run can be repeated.

    {"number": 0, "kind": "begin", "format": 1, "recipe": "f00d", "sum": 1234}
    {"number": 1, "kind": "admit", "id": 7, "group": 6, "prompt": 41, "sum": 5678}

Lines count up from 0, and each has a checksum of its bytes. An event is appended before it takes effect; ``sync`` makes
all of them durable with the step that they belong to. Tokens are a pure function of seed, id and weights, so what the
log adds is all that clocks decide: who was sampled under which weights, and what a step learned from.
"""

import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

from tilth.config.schema import Recipe
from tilth.core import lines
from tilth.core.errors import ArgumentError, DataError, TokenCountError, TokenIdentityError
from tilth.core.files import writing
from tilth.core.lines import Lines
from tilth.core.write_queue import PATIENCE, WriteQueue, lost, settle
from tilth.runs.files import to_json
from tilth.runs.identity import Identity
from tilth.runs.readers import read_metrics, read_state
from tilth.runs.state import Intervals

EVENTS = "experience.jsonl"
"""File of the log in the folder of a run."""
OBSERVATIONS = "observations"
"""Folder of what environments said: in the newest calls, or in all of an asynchronous run, for its replay."""
FORMAT = 1
KINDS: Mapping[str, tuple[str, ...]] = {
    "admit": ("id", "group", "prompt"),
    "finish": ("id", "versions", "opened", "length", "checksum"),
    "publish": ("version",),
    "pull": ("replica", "version"),
    "resume": ("id", "tokens", "version"),
    "move": ("id", "from", "to", "tokens"),
    "consume": ("id", "batch", "checksum"),
    "drop": ("id", "reason", "tokens"),
}
"""Kind -> its fields. versions, opened: of ``Trajectory``; length: tokens so far, with the prompt; checksum:
``experience.identity`` of the tokens; batch: the step, from 1; replica: place along dp of one that takes weights in
its own time; tokens of "drop": that the policy chose, None before its end. A sample goes on with its first ``tokens``
tokens of completion: "resume", after a failure or in a new process, under this ``version``; "move", from one replica
to another, by their places."""
PLACES = ("cluster", "guard", "rollout.environments", "rollout.layout", "rollout.pool", "rollout.repack")
"""Keys that may differ where a run is replayed."""
REPLAY = "replay"
"""Input of a run that repeats another one: its name."""
_ENDS = ("consume", "drop")
_BEGIN, _COMMIT = "begin", "commit"
_SUM = b', "sum": '
_TAIL = 1 << 16
"""Bytes at the end of a log in which a reader first looks for the newest commit."""


class Event(NamedTuple):
    """A line of the log."""

    number: int
    kind: str
    fields: dict[str, Any]


class Drops(NamedTuple):
    """Samples that were dropped for one reason; of these such that had ended, and the tokens that the policy chose in
    them."""

    samples: int = 0
    ended: int = 0
    tokens: int = 0

    def plus(self, tokens: int | None) -> "Drops":
        """Return these and one more sample, of so many tokens; None: it had not ended."""
        return Drops(self.samples + 1, self.ended + (tokens is not None), self.tokens + (tokens or 0))


class DrawnPart(NamedTuple):
    """Tokens of a trajectory that one version of the policy drew."""

    id: int
    group: int
    prompt: int
    version: int
    stops: dict[int, int]
    """Conversation -> its tokens with this part and the prompt, where a later version drew more of it."""


class AsyncLog:
    """The log while its run writes it; any thread may append. One that exists takes events after ``cut`` only."""

    def __init__(
        self, path: Path, recipes: Sequence[str], *, replay: "RunReplay | None" = None, queue: WriteQueue | None = None
    ) -> None:
        """recipes: digests that the run has had, the current one last. replay: what the run has to repeat: a trajectory
        that differs is an error before it is consumed. queue: as of ``Lines``."""
        self.path, self.number = path, 0
        """number: of the newest line."""
        self._recipes, self._replay, self._queue, self._lock = recipes, replay, queue, Lock()
        self._done, self._consumed, self._drops = Intervals(), 0, dict[str, Drops]()
        """Ids that were consumed or dropped; number of those that the current step has consumed; drops by reason."""
        self._lines: Lines | None = None
        if not path.exists():
            self.cut(0)

    def append(self, kind: str, **fields: Any) -> int:
        """Append an event, before it takes effect, and return its number. fields: those of ``KINDS``.

        TokenCountError [events.twice] for a trajectory that was consumed or dropped before.
        """
        if kind not in KINDS or fields.keys() != {*KINDS[kind]}:
            known = f"{kind} has {', '.join(KINDS[kind])}" if kind in KINDS else f"use {', '.join(KINDS)}"
            raise ArgumentError(
                f"event {kind!r} with {', '.join(fields) or 'no fields'}: {known}", key=f"events.{kind}"
            )
        if kind in _ENDS and fields["id"] in self._done:
            raise TokenCountError(f"trajectory {fields['id']} was consumed or dropped before", key="events.twice")
        if kind == "consume" and self._replay is not None:
            self._replay.check(fields["batch"], self._consumed, fields["id"], fields["checksum"])
        number = self._append(kind, fields)
        if kind in _ENDS:
            self._done.add(fields["id"])
            self._consumed += kind == "consume"
        if kind == "drop":
            _count(self._drops, fields)
        return number

    def sync(self, step: int) -> int:
        """Commit what came since the last commit as this step, durably; return the number of the commit."""
        if self._replay is not None:
            self._replay.check_all(step, self._consumed)
        self._consumed = 0
        return self._append(_COMMIT, {"step": step, "dropped": self._drops}, sync=True)

    def _append(self, kind: str, fields: dict[str, Any], *, sync: bool = False) -> int:
        assert self._lines is not None, "an old log is cut before it goes on"
        with self._lock:
            self._lines.append(_line(Event(self.number + 1, kind, fields)), sync=sync)
            self.number += 1
            return self.number

    def cut(self, number: int) -> None:
        """Return to the commit with this number, 0: to the beginning. Events behind it are void.

        DataError [events.cut] if the log ends or is damaged before this number; what is behind it may be torn.
        """
        if self._queue is not None and (trouble := self._queue.settle(PATIENCE)):
            raise lost(trouble, f"the events up to {number} cannot be read")
        done, drops, found = Intervals(), dict[str, Drops](), -1
        if self.path.exists():
            with writing(self.path), open(self.path, "r+b") as file:
                for event in _read(file, self.path, self._recipes, number):
                    found = event.number
                    if event.kind in _ENDS:
                        done.add(event.fields["id"])
                    if event.kind == "drop":
                        _count(drops, event.fields)
                    if found == number:
                        file.truncate(file.tell())
                        os.fsync(file.fileno())
                        break
        if found < 0:
            begin = Event(0, _BEGIN, {"format": FORMAT, "recipe": self._recipes[-1]})
            lines.replace(self.path, f"{_line(begin)}\n".encode())
        self.close()
        self._lines = Lines(self.path, self._queue)
        self.number, self._done, self._consumed, self._drops = number, done, 0, drops

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()


def _count(drops: dict[str, Drops], fields: Mapping[str, Any]) -> None:
    """Count a drop; logs of before ``tokens`` was in them have none."""
    drops[fields["reason"]] = drops.get(fields["reason"], Drops()).plus(fields.get("tokens"))


def _line(event: Event) -> str:
    text = to_json({"number": event.number, "kind": event.kind, **event.fields})
    return f"{text[:-1]}{_SUM.decode()}{zlib.crc32(text.encode())}}}"


def _parsed(line: bytes, number: int | None = None) -> Event | None:
    """Return the event of a line; None if it is torn, has other bytes than were written, or another number."""
    text, found, checksum = line.rpartition(_SUM)
    if not found or checksum != b"%d}\n" % zlib.crc32(text + b"}"):
        return None
    fields = json.loads(text + b"}")
    event = Event(fields.pop("number"), fields.pop("kind"), fields)
    return event if number in (None, event.number) else None


def read_events(path: Path, recipes: Sequence[str] = (), needed: int | None = None) -> Iterator[Event]:
    """Yield the lines of a log up to the first one that is torn.

    recipes: digests that it may begin with; none: any. needed: number that was durable; None: of the newest commit.
    DataError for another format [events.format] or recipe [events.recipe], and [events.cut] if a line up to ``needed``
    is torn or missing.
    """
    with open(path, "rb") as file:
        yield from _read(file, path, recipes, needed)


def _read(file: BinaryIO, path: Path, recipes: Sequence[str], needed: int | None) -> Iterator[Event]:
    """Yield the events of an open log; the file is then at the end of their line."""
    number, torn = -1, False
    for line in file:
        event = _parsed(line, number + 1)
        if event is None:
            torn = needed is None and any(map(_is_commit, file))
            break
        if not event.number:
            _check_begin(path, event, recipes)
        number = event.number
        yield event
    if torn or number < (0 if needed is None else needed or -1):
        least = "it is not behind the last commit" if needed is None else f"the run needs those up to {needed}"
        raise DataError(
            f"{path} line {number + 2} is missing, torn or changed, and {least}: bring the file back whole, or go on "
            "from an earlier checkpoint",
            key="events.cut",
        )


def committed_drops(run: Path) -> dict[str, Drops] | None:
    """Return what the newest commit in the log of a run has as dropped, by reason; None without a log, or with one of
    before commits had it. Reads the end of the log alone."""
    path = run / EVENTS
    settle(path)
    if not path.exists():
        return None
    with open(path, "rb") as file:
        whole, size = file.seek(0, os.SEEK_END), _TAIL
        while True:
            file.seek(max(0, whole - size))
            for line in reversed(file.read().splitlines(keepends=True)):
                if _is_commit(line) and (event := _parsed(line)):
                    found = event.fields.get("dropped")
                    return None if found is None else {reason: Drops(*counts) for reason, counts in found.items()}
            if size >= whole:
                return {}
            size *= 8


def _is_commit(line: bytes) -> bool:
    text, _, checksum = line.rpartition(_SUM)
    return b'"kind": "commit"' in text and checksum == b"%d}\n" % zlib.crc32(text + b"}")


def _check_begin(path: Path, event: Event, recipes: Sequence[str]) -> None:
    if event.kind != _BEGIN or event.fields["format"] != FORMAT:
        raise DataError(
            f"{path} has the format {event.fields.get('format')!r}: this version of Tilth reads {FORMAT}; use the "
            "version that wrote it",
            key="events.format",
        )
    if recipes and (found := event.fields["recipe"]) not in recipes:
        raise DataError(
            f"{path} is the log of another recipe, {found}, and this one is {recipes[-1]}: give the recipe of that run",
            key="events.recipe",
        )


def repeats(recipe: Recipe) -> bool:
    """True if a run can be repeated from its log: no drafts rounded its log-probs by what had ended."""
    return recipe.rollout.speculate == "off" or recipe.train.parity


class RunReplay:
    """Committed steps of a run: which trajectories each learned from, and which versions drew their tokens."""

    def __init__(self, path: Path, recipes: Sequence[str] = ()) -> None:
        """path, recipes: as of ``read_events``, whose errors are raised."""
        self.path, self.steps = path, 0
        """steps: number of the newest committed step."""
        self._admitted: dict[int, tuple[int, int]] = {}
        self._finished: dict[int, dict[str, Any]] = {}
        self._consumed = defaultdict[int, list[tuple[int, int]]](list)
        pending: list[Event] = []
        for event in read_events(path, recipes):
            pending.append(event)
            if event.kind == _COMMIT:
                self.steps = event.fields["step"]
                for one in pending:
                    self._take(one.kind, one.fields)
                pending = []
        self._batches = {step: [self._drawn(id) for id, _ in some] for step, some in sorted(self._consumed.items())}
        self._parts = defaultdict[int, list[tuple[int, DrawnPart]]](list)
        for step, drawn in self._batches.items():
            for part in chain.from_iterable(drawn):
                self._parts[part.version].append((step, part))

    @classmethod
    def of(cls, run: Path, who: Identity) -> "RunReplay":
        """Open the log of a run for another one, which repeats it on any workers.

        DataError for a run without a log [--replay], with a damaged one, that ``who`` does not repeat [events.recipe],
        whose drafts rounded by their timing [rollout.speculate], or with episodes and without a journal of what
        environments said [rollout.environment].
        """
        if not repeats(who.recipe):
            raise DataError(
                f"--replay {run}: with rollout.speculate = {who.recipe.rollout.speculate} passes have shapes, by which "
                "they round, that depend on what had ended; with train.parity = true, or no drafts, it repeats",
                key="rollout.speculate",
            )
        state = read_state(run)
        if not (path := run / EVENTS).exists():
            raise DataError(
                f"--replay {run}: it has no {EVENTS}, which runs with rollout.staleness write; others repeat by their "
                "recipe alone",
                key="--replay",
            )
        if who.recipe.rollout.environment and not any((run / OBSERVATIONS).glob("*.jsonl")):
            raise DataError(
                f"--replay {run}: it has no {OBSERVATIONS}, which runs with rollout.staleness and rollout.environment "
                "write since they can be repeated",
                key="rollout.environment",
            )
        changes = {} if state["digest"] == who.digest else who.changes(run, state)
        free = replace(who, allow=(*PLACES, REPLAY))
        others = [text for key, text in changes.items() if not free.allows(key)]
        if len(state["digests"]) > 1:
            others.append(f"it has had {len(state['digests'])} recipes, and a replay repeats one")
        if others:
            message = f"--replay {run} is another run: {'; '.join(others)}"
            raise DataError(f"{message}; a replay has the recipe and the data of its run", key="events.recipe")
        found = cls(path, state["digests"])
        if found.steps < (last := max((record["step"] for record in read_metrics(run)), default=0)):
            message = f"{path} ends with step {found.steps}, and {run} has committed {last}: bring the file back whole"
            raise DataError(message, key="events.cut")
        return found

    @property
    def name(self) -> str:
        """Name of what is replayed, which differs once its run has gone on."""
        return f"{self.path.resolve().parent} to step {self.steps}"

    def _take(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "admit":
            self._admitted[fields["id"]] = fields["group"], fields["prompt"]
        elif kind == "finish":
            self._finished[fields["id"]] = fields
        elif kind == "consume":
            self._consumed[fields["batch"]].append((fields["id"], fields["checksum"]))

    def _drawn(self, id: int) -> list[DrawnPart]:
        """Return the parts of a trajectory in order. DataError [events.order] for one without begin or end."""
        if id not in self._admitted or id not in self._finished:
            raise DataError(
                f"{self.path}: trajectory {id} was consumed without {'an end' if id in self._admitted else 'a begin'}; "
                "the log is not the one that the run wrote",
                key="events.order",
            )
        spans, starts = self._finished[id]["versions"], [0, *self._finished[id].get("opened", ()), math.inf]
        each = [
            [(at - begin, version) for at, version in spans if begin <= at < end] for begin, end in pairwise(starts)
        ]
        parts = list[DrawnPart]()
        for version in sorted({version for _, version in spans}) or [-1]:  # -1: an episode without a turn
            behind = [[at for at, later in conversation if later > version] for conversation in each]
            stops = {place: ats[0] for place, ats in enumerate(behind) if ats}
            parts.append(DrawnPart(id, *self._admitted[id], version, stops))
        return parts

    def batch(self, step: int) -> list[DrawnPart]:
        """Return the last part of each trajectory that a step learned from, in order. DataError [replay.step] for a
        step that the log lacks."""
        if not 0 < step <= self.steps:
            raise DataError(
                f"step {step} is not in {self.path}, which has committed {self.steps}: it can be replayed up to there",
                key="replay.step",
            )
        return [parts[-1] for parts in self._batches.get(step, ())]

    def parts(self, version: int, after: int = 0) -> list[DrawnPart]:
        """Return what this version of the policy drew for steps after step ``after``, in their order."""
        return [part for step, part in self._parts.get(version, ()) if step > after]

    def lowest(self, after: int) -> int:
        """Return the lowest group that steps after this one learned from; a higher one if none did."""
        later = chain.from_iterable(drawn for step, drawn in self._batches.items() if step > after)
        return min((part.group for part, *_ in later), default=max(self._admitted, default=0) + 1)

    def check(self, step: int, place: int, id: int, checksum: int) -> None:
        """Raise TokenIdentityError [replay.trajectory] unless the step's trajectory number ``place`` is this one."""
        wanted = self._consumed.get(step, [])[place : place + 1]
        if wanted != [(id, checksum)]:
            was = "no further one" if not wanted else "{}, checksum {}".format(*wanted[0])
            raise TokenIdentityError(
                f"trajectory {place + 1} of step {step} is {id}, checksum {checksum}, and was {was} in {self.path}: "
                "weights, data or software are not the same",
                key="replay.trajectory",
            )

    def check_all(self, step: int, consumed: int) -> None:
        """Raise TokenIdentityError [replay.trajectory] unless a step has learned from as many trajectories as then."""
        if consumed != (had := len(self.batch(step))):
            raise TokenIdentityError(
                f"step {step} has learned from {consumed} trajectories, and from {had} in {self.path}",
                key="replay.trajectory",
            )
