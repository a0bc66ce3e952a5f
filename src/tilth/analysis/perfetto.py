"""Export the events of a run in the trace event format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process for each rank and a thread for each of its threads; counters with the controller; arrows of calls and
communications. Format: "Trace Event Format" of Chromium's Catapult, a JSON object with an array of
events; times in us, with three decimals.
"""

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TextIO

import numpy as np

from tilth.analysis.align import EVERYONE
from tilth.analysis.events import Events
from tilth.analysis.matching import PAIR, split
from tilth.analysis.predicted import Predicted
from tilth.core.files import atomic_write

CHUNK = 65_536
"""Rows converted to text at once."""
NAMED = ("call", "submit", "await")
"""Operations whose name includes their detail."""
PLACES = "stf"
"""Letters of the format for begin, middle and end of an arrow."""
BEGIN, ON, END = 0, 1, 2
"""Places of a point in an arrow."""
SHOWN = ("micro_batch", "seq", "tokens", "squares", "bytes", "flops")
"""Numbers shown with a span besides its step, where they are set."""
Lines = Iterator[list[str]]


@dataclass(frozen=True, eq=False)
class Counter:
    """A number over time: ``value`` (float64 [n]) from ``at`` on (int64 [n], ns on the events' clock)."""

    name: str
    unit: str
    at: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Written:
    """Contents of a written file."""

    path: Path
    spans: int
    arrows: int
    counters: int
    bytes: int


def export(
    events: Events,
    path: Path,
    counters: Sequence[Counter] = (),
    about: Mapping[str, str] | None = None,
    costs: Predicted | None = None,
) -> Written:
    """Write a file in chunks, compressed if its name ends in .gz. about: further entries; costs: of micro-batches,
    shown with their first pass. Raises StorageError."""
    tracks = Tracks(events)
    called, met = calls(events), communications(events)
    parts = chain(
        tracks.metadata(), _spans(events, tracks, costs), _device(events, tracks), _arrows(called, tracks, "call", 0),
        _arrows(met, tracks, "communication", called.count), _counted(events, counters),
    )  # fmt: skip
    with atomic_write(path) as temporary:
        with closing(_open(temporary, packed=path.suffix == ".gz")) as file:
            _write(file, parts, about or {})
        size = temporary.stat().st_size
    return Written(path, len(events), called.count + met.count, len(counters), size)


def _open(path: Path, *, packed: bool) -> TextIO:
    if packed:
        return gzip.open(path, "wt", compresslevel=4, encoding="utf-8")  # type: ignore[return-value]
    return path.open("w", encoding="utf-8")


def _write(file: TextIO, parts: Lines, about: Mapping[str, str]) -> None:
    file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(dict(about))},"traceEvents":[')
    between = "\n"
    for lines in parts:
        if lines:
            file.write(between + ",\n".join(lines))
            between = ",\n"
    file.write("\n]}\n")


class Tracks:
    """Assign spans to tracks: a process for each rank, a thread for each of its threads.

    Spans of a thread that overlap without nesting, which the format forbids, get another track.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self.process = events.rank + 1  # int64 [n]; 0 is the idle process to some readers
        self.names: dict[int, tuple[int, str]] = {}
        """Number of a track, unique over all processes of one machine -> rank, name."""
        rows, codes = np.arange(len(events)), events.thread.codes
        self.order, tracks = self._lay(rows, events.start, events.duration, codes, events.thread.names)
        """int64 [n]: rows by start, outer spans first."""
        self.thread = np.empty(len(events), np.int64)  # int64 [n]: the track of each row
        self.thread[self.order] = tracks
        timed = np.flatnonzero(events.device_start >= 0)
        start, took = events.device_start[timed], events.device_duration[timed]
        self.device, self.device_thread = self._lay(timed, start, took, np.zeros_like(timed), ("device",))
        """int64 [m] each: rows that were timed on a device, by start there, and their tracks."""

    def _lay(
        self, rows: np.ndarray, start: np.ndarray, took: np.ndarray, codes: np.ndarray, names: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows by start and a track for each. codes: index of their thread's name."""
        order = np.lexsort((-rows, -took, start))
        rows, start, end, codes = rows[order], start[order], (start + took)[order], codes[order]
        tracks = np.empty(len(rows), np.int64)
        keys, place = np.unique(self._events.rank[rows] * len(names) + codes, return_inverse=True)
        for at, mine in split(place).items():
            rank, code = divmod(int(keys[at]), len(names))
            first = max(self._events.ranks) + 2 + len(self.names)  # beyond the numbers of processes
            lanes = nested(start[mine], end[mine])
            tracks[mine] = first + lanes
            for lane in range(int(lanes.max()) + 1):
                self.names[first + lane] = rank, f"{names[code]} ({lane + 1})" if lane else names[code]
        return rows, tracks

    def metadata(self) -> Lines:
        """Yield names and order of the tracks, the controller first."""
        events, roles = self._events, self._roles()
        lines = []
        for rank in events.ranks:
            controls = rank == events.controller
            name = "controller" if controls and len(events.ranks) > 1 else f"rank {rank}"
            lines.append(_meta("process_name", rank, {"name": name}))
            lines.append(_meta("process_labels", rank, {"labels": ", ".join(roles.get(rank, []))}))
            lines.append(_meta("process_sort_index", rank, {"sort_index": -1 if controls else rank}))
        for at, (number, (rank, name)) in enumerate(sorted(self.names.items())):
            index = -1 if name == "MainThread" else at
            lines.append(_meta("thread_name", rank, {"name": name}, number))
            lines.append(_meta("thread_sort_index", rank, {"sort_index": index}, number))
        yield lines

    def _roles(self) -> dict[int, list[str]]:
        """Roles of each rank, with its place in them."""
        role, place = self._events.role, self._events.place
        key = (self._events.rank * len(role.names) + role.codes) * len(place.names) + place.codes
        found: dict[int, list[str]] = {}
        for one in np.unique(key).tolist():
            rest, at = divmod(one, len(place.names))
            rank, name = divmod(rest, len(role.names))
            if role.names[name]:
                found.setdefault(rank, []).append(f"{role.names[name]} {place.names[at]}".strip())
        return found


def nested(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """int64 [n]: lowest lane on which each span nests in or follows others; spans by start, the longer first."""
    stacks: list[list[int]] = [[]]
    lanes = [_lane(stacks, begin, until) for begin, until in zip(start.tolist(), end.tolist())]
    return np.array(lanes, np.int64)


def _lane(stacks: list[list[int]], start: int, end: int) -> int:
    for lane, open_until in enumerate(stacks):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        if not open_until or end <= open_until[-1]:
            open_until.append(end)
            return lane
    stacks.append([end])
    return len(stacks) - 1


def _meta(what: str, rank: int, args: Mapping[str, str | int], thread: int = 0) -> str:
    return f'{{"ph":"M","name":"{what}","pid":{rank + 1},"tid":{thread},"args":{json.dumps(dict(args))}}}'


def _spans(events: Events, tracks: Tracks, costs: Predicted | None) -> Lines:
    """Yield a complete event for each span, outer spans first."""
    pairs = () if costs is None else zip(costs.row.tolist(), costs.seconds.tolist(), costs.measured.tolist())
    beside = {row: f',"predicted_ms":{1e3 * a:.6g},"measured_ms":{1e3 * b:.6g}' for row, a, b in pairs}
    heads = Heads(events)
    for begin in range(0, len(events), CHUNK):
        rows = tracks.order[begin : begin + CHUNK]
        codes = zip(
            *(c.codes[rows].tolist() for c in (events.op, events.kind, events.detail, events.role, events.place))
        )
        process, thread = tracks.process[rows].tolist(), tracks.thread[rows].tolist()
        start, took = (events.start[rows] / 1000).tolist(), (events.duration[rows] / 1000).tolist()
        columns = zip(codes, _numbers(events, rows), rows.tolist(), process, thread, start, took)
        yield [
            f'{{{heads[code]}{args}{beside.get(row, "")}}},"pid":{p},"tid":{t},"ts":{s},"dur":{d}}}'
            for code, args, row, p, t, s, d in columns
        ]


def _device(events: Events, tracks: Tracks) -> Lines:
    """Yield the device times of spans, on separate tracks."""
    for begin in range(0, len(tracks.device), CHUNK):
        rows, thread = (column[begin : begin + CHUNK] for column in (tracks.device, tracks.device_thread))
        process, ops = tracks.process[rows].tolist(), events.op.codes[rows].tolist()
        start, took = (c[rows] / 1000 for c in (events.device_start, events.device_duration))
        yield [
            f'{{"ph":"X","name":{json.dumps(events.op.names[op])},"cat":"device","pid":{p},"tid":{t},"ts":{s},"dur":{d}}}'
            for op, p, t, s, d in zip(ops, process, thread.tolist(), start.tolist(), took.tolist())
        ]


class Heads(dict[tuple[int, ...], str]):
    """Text of a span by its codes, up to its numbers: name, category (its kind) and texts; cached."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def __missing__(self, codes: tuple[int, ...]) -> str:
        e = self._events
        columns = {"op": e.op, "kind": e.kind, "detail": e.detail, "role": e.role, "place": e.place}
        texts = {name: column.names[code] for (name, column), code in zip(columns.items(), codes)}
        op, kind = texts.pop("op"), texts.pop("kind")
        name = f"{op} {texts['detail']}" if op in NAMED else op
        args = "".join(f'"{key}":{json.dumps(text)},' for key, text in texts.items() if text)
        self[codes] = f'"ph":"X","name":{json.dumps(name)},"cat":{json.dumps(kind)},"args":{{{args}'
        return self[codes]


def _numbers(events: Events, rows: np.ndarray) -> list[str]:
    """Step and set numbers of each span, as JSON."""
    found = [f'"step":{step}' for step in events.step[rows].tolist()]
    for name in SHOWN:
        values = getattr(events, name)[rows]
        known = np.flatnonzero(values >= 0 if name in ("micro_batch", "seq") else values > 0)
        for i, value in zip(known.tolist(), values[known].tolist()):
            found[i] += f',"{name}":{value}'
    return found


@dataclass(frozen=True, eq=False)
class Arrows:
    """Points of arrows, int64 [k] each, those of one arrow in order. Along an arrow time never falls."""

    number: np.ndarray  # of the arrow, from 0 on
    row: np.ndarray  # of the span
    at: np.ndarray  # ns, within the span
    place: np.ndarray  # BEGIN, ON or END

    @property
    def count(self) -> int:
        """Number of arrows."""
        return int((self.place == BEGIN).sum())


def calls(events: Events) -> Arrows:
    """Return arrows from a call's submit over its execution on each rank to the end of its await, if there is one.

    None in a trace of one process.
    """
    spans, points = events.spans, []
    for rank in events.workers:
        begun, asked, ended, answered = spans.calls(events.controller, rank)
        first, last = (events.seq[rows] * (max(events.ranks) + 1) + rank for rows in (begun, ended))
        points += [(first, asked, 0, False), (first, begun, 1, False), (last, answered, 2, True)]
    number, row, turn, late = (np.concatenate([np.full(len(p[0]), p[c]) for p in points]) for c in range(4))
    return _sorted(events, number, row, turn, late.astype(bool))


def communications(events: Events) -> Arrows:
    """Return arrows through the members of each communication by arrival, and from each send to its receive."""
    spans = events.spans
    row = spans.of(*EVERYONE, "broadcast", *PAIR)
    number, _ = spans.grouped(row)
    row, number = row[number >= 0], number[number >= 0]
    received = events.op[row].is_("receive")
    return _sorted(events, number, row, received.astype(np.int64), received)


def _sorted(events: Events, number: np.ndarray, row: np.ndarray, turn: np.ndarray, late: np.ndarray) -> Arrows:
    """Sort points by arrow, turn and time: the start of a span, or its end (late). A point that a clock's error put
    before its cause is moved to it within its span, else dropped, and so are arrows of one point."""
    last = events.start[row] + np.maximum(events.duration[row] - 1, 0)
    at = np.where(late, last, events.start[row])
    order = np.lexsort((at, turn, number))
    number, row, at, last = number[order], row[order], at[order], last[order]
    for _ in range(2):  # turns are three at most; within a turn they are in order
        at[1:] = np.where(number[1:] == number[:-1], np.maximum(at[1:], at[:-1]), at[1:])
    fits = at <= last
    number, row, at = number[fits], row[fits], at[fits]
    _, number, size = np.unique(number, return_inverse=True, return_counts=True)
    kept = size[number] > 1
    _, number = np.unique(number[kept], return_inverse=True)
    begins, ends = np.diff(number, prepend=-1) != 0, np.diff(number, append=-1) != 0
    return Arrows(number, row[kept], at[kept], np.where(begins, BEGIN, np.where(ends, END, ON)))


def _arrows(found: Arrows, tracks: Tracks, name: str, first: int) -> Lines:
    """Yield flow events; each binds to the span of its track at its time."""
    for begin in range(0, len(found.row), CHUNK):
        number, row, at, place = (
            column[begin : begin + CHUNK] for column in (found.number, found.row, found.at, found.place)
        )
        where = zip(tracks.process[row].tolist(), tracks.thread[row].tolist(), (at / 1000).tolist())
        yield [
            f'{{"ph":"{PLACES[k]}","name":"{name}","cat":"{name}","id":{n},"pid":{p},"tid":{t},"ts":{s},"bp":"e"}}'
            for n, k, (p, t, s) in zip((number + first).tolist(), place.tolist(), where)
        ]


def _counted(events: Events, counters: Sequence[Counter]) -> Lines:
    for counter in counters:
        head = f'{{"ph":"C","name":{json.dumps(counter.name)},"pid":{events.controller + 1},"tid":0,"ts":'
        unit = json.dumps(counter.unit)
        values = zip((counter.at / 1000).tolist(), counter.value.tolist())
        yield [f'{head}{at},"args":{{{unit}:{value}}}}}' for at, value in values if math.isfinite(value)]
