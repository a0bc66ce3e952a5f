"""Events of one attempt of a run as columns of numbers, the input of every analysis and picture."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tilth.analysis.align import align
from tilth.analysis.matching import Coded, Spans
from tilth.analysis.read import attempts, own_times, parents, read_events
from tilth.core.errors import DataError
from tilth.trace.clock_samples import ClockSamples, events_folder, read_rounds
from tilth.trace.ops import kind
from tilth.trace.writer import LATER

NUMBERS = ("step", "micro_batch", "seq", "tokens", "squares", "bytes")
CODED = ("op", "detail", "role", "place", "thread")


@dataclass(frozen=True, eq=False)
class Events:
    """n finished spans of one attempt, by start. Times in ns since the first began; arrays are int64 [n]."""

    attempt: int
    controller: int
    """Rank of the controller: the process with the steps. Inline it is the only one, 0."""
    rank: np.ndarray
    parent: np.ndarray  # row of the enclosing span of the same thread, -1 at a root and where it is missing
    start: np.ndarray
    duration: np.ndarray
    own: np.ndarray  # the duration less that of the spans directly inside
    step: np.ndarray  # this one and the next five: columns of ``trace.writer.EVENTS``
    micro_batch: np.ndarray
    seq: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray
    bytes: np.ndarray
    flops: np.ndarray  # float64 [n]
    op: Coded
    kind: Coded
    """Kind of the operation in ``trace.ops``; "unknown" for an undeclared one."""
    detail: Coded
    role: Coded
    place: Coded
    thread: Coded
    device_start: np.ndarray  # start on a CUDA device, on the clock of ``start``; -1: not timed there
    device_duration: np.ndarray  # -1 likewise
    clock_error: float | None = None
    """Greatest error in ns between times of two ranks; None: clocks were not compared, or there is one."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> np.ndarray:
        """int64 [n]."""
        return self.start + self.duration

    @cached_property
    def spans(self) -> Spans:
        """Columns for matching."""
        return Spans(self.rank, self.seq, self.start, self.end, self.op, self.detail)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Processes that have events, ascending."""
        return tuple(np.unique(self.rank).tolist())

    @property
    def workers(self) -> tuple[int, ...]:
        """Processes that execute calls: all but the controller; inline the controller."""
        return tuple(r for r in self.ranks if r != self.controller) or self.ranks

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Complete steps, ascending: the controller's ``step`` span has ended."""
        return tuple(np.unique(self.step[self.op.is_("step")]).tolist())

    def select(self, rows: np.ndarray) -> "Events":
        """Return some of the rows (bool [n]), in the same order; times and own times do not change."""
        kept = np.flatnonzero(rows)
        place = np.full(len(self) + 1, -1, np.int64)  # the last one: of no parent
        place[kept] = np.arange(len(kept))
        columns = [f.name for f in fields(self) if f.name not in ("attempt", "controller", "clock_error")]
        chosen = {name: getattr(self, name)[kept] for name in columns}
        return replace(self, **chosen | {"parent": place[chosen["parent"]]})


def load(path: str | Path, attempt: int | None = None, steps: range | None = None) -> Events:
    """Load the events of an attempt (default: the newest) of a run's folder, its events folder, or one of its files.

    steps: only events of these. Raises DataError if nothing was recorded or the attempt is missing, and the errors of
    ``read_events``.
    """
    known = attempts(path)
    if not known:
        raise DataError(f"{path} has no events yet", key="events")
    if attempt is not None and attempt not in known:
        listed = f"{'are' if known[1:] else 'is'} {', '.join(map(str, known))}"
        raise DataError(f"{path} has no attempt {attempt}; there {listed}", key="attempt")
    chosen = known[-1] if attempt is None else attempt
    asked = read_rounds(events_folder(path), chosen)
    table = read_events(path, chosen)
    if not len(table):
        raise DataError(f"{path} has no events yet", key="events")
    if not Path(path).is_dir():
        table = table.filter(pc.equal(table["attempt"], chosen))
    events = from_table(table, asked)
    try:
        return events if steps is None else of_steps(events, steps)
    except DataError as error:
        raise DataError(f"{path} has {error}", key=error.key) from error


def of_steps(events: Events, steps: range) -> Events:
    """Return the events of these steps. Raises DataError if there are none."""
    found = events.select((events.step >= steps.start) & (events.step < steps.stop))
    if not len(found):
        there = f"its steps are {events.steps[0]} to {events.steps[-1]}" if events.steps else "no step has ended yet"
        raise DataError(f"no events of steps {steps.start}:{steps.stop}; {there}", key="steps")
    return found


def from_table(table: pa.Table, asked: Mapping[int, ClockSamples] | None = None) -> Events:
    """Return the events of one attempt in a table with the columns of ``trace.writer.EVENTS``.

    asked: samples of the clocks, which put all times on the controller's clock.
    """
    if not len(table):
        raise DataError("there are no events", key="events")
    table, error = _aligned(table, asked) if asked else (table, None)
    attempt, order = int(table["attempt"][0].as_py()), np.argsort(_number(table, "start"), kind="stable")
    found = {}
    for name in ("rank", "id", "parent", "start", "duration", *NUMBERS, *CODED, *LATER, "flops"):
        found[name] = _column(table, name)[order]
        table = table.drop_columns(name)  # so that no column of ten million events is in memory twice
    rank, duration = found["rank"], found["duration"]
    parent = parents(rank, found.pop("id"), found["parent"])
    own = own_times(parent, duration)
    start = found["start"] - found["start"][0]
    timed = found["device_start"] >= 0
    found["device_start"] = np.where(timed, found["device_start"] - found["start"][0], -1)
    found |= {"parent": parent, "start": start, "own": own, "kind": _kinds(found["op"])}
    steps = rank[found["op"].is_("step")]
    controller = int(steps[0]) if len(steps) else int(rank.max())  # it has the steps, and the rank after the workers'
    return Events(attempt, controller, **found, clock_error=error)


def _aligned(table: pa.Table, asked: Mapping[int, ClockSamples]) -> tuple[pa.Table, float]:
    """Put all times on the controller's clock; return their greatest error in ns too."""
    rank, seq, start, took = (_number(table, name) for name in ("rank", "seq", "start", "duration"))
    op, detail = _coded(table, "op"), _coded(table, "detail")
    spans = Spans(rank, seq, start, start + took, op, detail)
    start, end, error = align(asked, spans)
    device = pc.add(table["device_start"], pa.array(start - _number(table, "start")))  # by as much as what queued it
    for name, values in (("start", pa.array(start)), ("duration", pa.array(end - start)), ("device_start", device)):
        table = table.set_column(table.schema.get_field_index(name), name, values)
    return table, error


def parse_steps(text: str) -> range:
    """Parse "20:40" (20 to 39) or "20". Raises DataError."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if not found or (found[2] is not None and int(found[2]) <= int(found[1])):
        raise DataError(f"steps {text!r} are not of the form 20:40 (20 to 39) or 20", key="steps")
    first = int(found[1])
    return range(first, first + 1 if found[2] is None else int(found[2]))


def parse_ranks(text: str) -> list[int]:
    """Parse the option "0,1" of a command to [0, 1]. Raises DataError."""
    if not re.fullmatch(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*", text):
        raise DataError(f"--ranks {text!r} is not of the form 0,1", key="--ranks")
    return [int(rank) for rank in text.split(",")]


def _column(table: pa.Table, name: str) -> Any:
    """Column in the form of ``Events``."""
    if name == "flops":
        return table[name].to_numpy()
    if name in LATER:
        return table[name].fill_null(-1).to_numpy()
    return _coded(table, name) if name in CODED else _number(table, name)


def _number(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy().astype(np.int64, copy=False)


def _coded(table: pa.Table, name: str) -> Coded:
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    return Coded(column.indices.to_numpy().astype(np.int32, copy=False), tuple(column.dictionary.to_pylist()))


def _kinds(op: Coded) -> Coded:
    kinds = [_kind(name) for name in op.names]
    names = tuple(dict.fromkeys(kinds))
    return Coded(np.array([names.index(k) for k in kinds], np.int32)[op.codes], names)


def _kind(name: str) -> str:
    try:
        return kind(name)
    except KeyError:  # a user's own span
        return "unknown"


def profiled(events: Events) -> np.ndarray:
    """Return the steps that overlap a profile, from its begin mark to its end mark: int64, ascending."""
    home = events.rank == events.controller
    marks = np.flatnonzero(home & events.op.is_("profile"))
    rows = np.flatnonzero(home & events.op.is_("step"))
    during, since = np.zeros(len(rows), bool), -1
    for row in marks.tolist():
        if events.detail.text(row) == "begin":
            since = int(events.start[row]) if since < 0 else since
        elif since >= 0:
            during |= (events.end[rows] > since) & (events.start[rows] < events.end[row])
            since = -1
    if since >= 0:  # it has not ended yet
        during |= events.end[rows] > since
    return np.unique(events.step[rows[during]])
