"""Break down the time of a run: each moment of each rank belongs to one part, so the parts sum to the whole.

A step lasts from its start to the next one's, so the time between two steps (saving) is included. A worker works in one
thread, inside of calls: each span's own time there counts as communication or pause if it is one, else as its outermost
phase. A stage of a pipeline that waits for a message is idle. Outside of calls a worker waits: for another one that is
still in a call, or for the controller.
"""

from dataclasses import dataclass

import numpy as np

from tilth.analysis.events import Events
from tilth.analysis.network import last_start
from tilth.analysis.run_graph import outermost
from tilth.analysis.run_rates import paces
from tilth.core.errors import DataError

COMMUNICATION, PAUSE, DATA, PROFILE, OTHER = "communication", "gc", "data", "profile", "other"
STAGES, PEERS, CONTROLLER = "waiting for stages", "waiting for ranks", "waiting for the controller"
IDLE = (STAGES, PEERS, CONTROLLER)
FIXED = (COMMUNICATION, PAUSE, DATA, PROFILE, OTHER, *IDLE)
"""Parts that are no phases, in their order after the phases."""
NS = 1e-9
_OWN = {"communication": COMMUNICATION, "pause": PAUSE, "data": DATA}


@dataclass(frozen=True, eq=False)
class Meetings:
    """Time of the communications of r ranks, in seconds, each float64 [r]. Exposed: in the thread of the calls."""

    transfer: np.ndarray  # exposed, after the last member's arrival
    waiting: np.ndarray  # exposed, before the last member's arrival
    hidden: np.ndarray  # in another thread, while the rank was in a call
    blamed: np.ndarray  # mean wait of the other members where this rank arrived last
    by_op: dict[str, float]
    """Exposed seconds by operation, the mean over ranks."""


@dataclass(frozen=True, eq=False)
class Account:
    """The time of s steps on r ranks, in c parts. All times in seconds."""

    attempt: int
    steps: np.ndarray  # int64 [s]: those that have ended
    seconds: np.ndarray
    """float64 [s]: from the start of a step to that of the next; of the last to the end of what followed it."""
    ranks: tuple[int, ...]
    """The workers; inline the one process."""
    names: tuple[str, ...]
    """Of the parts: phases, the longest first, then those of ``FIXED``."""
    by_step: np.ndarray
    """float64 [s, c]: means over ranks. A call belongs to the step that submitted it, also where it continues into the
    next: such a row sums to more than the step's time."""
    by_rank: np.ndarray  # float64 [r, c]: sums over steps; a row sums to the whole time
    roles: dict[str, np.ndarray]
    """float64 [r] by role: time in its calls without communication and pauses. The longest first."""
    pace: np.ndarray
    """float64 [r]: ``run_rates.paces``, a rank's time for the cost of its work over the median of its peers'; above 1
    it is slow, not only loaded with more work. NaN without peers."""
    meetings: Meetings
    controller: float
    """Time of the controller without waiting for answers. Inline: all of it."""

    @property
    def whole(self) -> float:
        """Seconds of all steps."""
        return float(self.seconds.sum())

    @property
    def parts(self) -> dict[str, float]:
        """Part -> seconds, the mean over ranks; parts of 0 seconds are left out."""
        means = self.by_rank.mean(0)
        return {name: float(t) for name, t in zip(self.names, means) if t > 0}

    @property
    def busy(self) -> np.ndarray:
        """float64 [r]: seconds of work: phases, data and other time in calls."""
        idle = [self.names.index(n) for n in (COMMUNICATION, PAUSE, PROFILE, *IDLE)]
        return np.delete(self.by_rank, idle, axis=1).sum(1)

    def shares(self, i: int) -> dict[str, float]:
        """Return the shares of the i-th rank's time, which sum to 1. pipeline: waiting for other stages."""
        at = {name: float(self.by_rank[i, k]) / self.whole for k, name in enumerate(self.names)}
        return {
            "busy": float(self.busy[i]) / self.whole, "communication": at[COMMUNICATION], "gc": at[PAUSE],
            "profile": at[PROFILE], "pipeline": at[STAGES], "waiting": at[PEERS] + at[CONTROLLER],
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class EventParts:
    """Part of each of n events."""

    names: tuple[str, ...]
    code: np.ndarray  # int64 [n]: of ``names``
    main: np.ndarray  # bool [n]: in the thread that executes calls (of the controller: the one that has the steps)


def account(events: Events, steps: range | None = None) -> Account:
    """Break down the time of these steps (default: all that have ended). Raises DataError if there are none."""
    bounds, known = periods(events)
    chosen = np.ones(len(known), bool) if steps is None else np.isin(known, np.arange(steps.start, steps.stop))
    if not chosen.any():
        if steps is None or not len(known):
            raise DataError("no step has ended yet", key="steps.ended")
        message = f"no events of steps {steps.start}:{steps.stop}; its steps are {known[0]} to {known[-1]}"
        raise DataError(message, key="steps")
    parts = parts_of(events)
    place = places(events, bounds, known)
    place = np.where((place >= 0) & chosen[place], np.cumsum(chosen)[place] - 1, -1)
    took = np.diff(bounds)[chosen]
    rank = np.searchsorted(events.workers, events.rank).clip(max=len(events.workers) - 1)
    mine = parts.main & (place >= 0) & np.isin(events.rank, events.workers)
    shape = len(took), len(events.workers), len(parts.names)
    by_step = _summed(events.own, mine, (place, parts.code), (shape[0], shape[2]))
    by_rank = _summed(events.own, mine, (rank, parts.code), shape[1:])
    free = _free(events, mine, bounds)[chosen]
    _rest(events, parts.names, (by_step, took * shape[1], free * shape[1]), (by_rank, took.sum(), free.sum()))
    worked = mine & ~events.kind.is_("communication", "pause")
    return Account(
        events.attempt, known[chosen], took * NS, events.workers, parts.names, by_step * (NS / shape[1]), by_rank * NS,
        _roles(events, worked, rank), paces(events, mine), _meetings(events, mine, place >= 0, rank),
        _controller(events, parts.main & (place >= 0), int(took.sum())),
    )  # fmt: skip


def periods(events: Events) -> tuple[np.ndarray, np.ndarray]:
    """Return starts of the steps and the end of the last, in ns (int64 [s + 1]); their numbers (int64 [s])."""
    rows = np.flatnonzero(events.op.is_("step") & (events.rank == events.controller))
    if not len(rows):
        return np.zeros(1, np.int64), np.zeros(0, np.int64)
    _, first = np.unique(events.step[rows], return_index=True)
    rows = rows[first]
    after = events.start >= events.start[rows[-1]]
    mine = after & (events.rank == events.controller) & (events.thread.codes == events.thread.codes[rows[-1]])
    end = events.end[mine & (events.step <= events.step[rows[-1]])].max()
    return np.append(events.start[rows], end), events.step[rows]


def places(events: Events, bounds: np.ndarray, known: np.ndarray) -> np.ndarray:
    """int64 [n]: index of an event's step among the known; by its start if the event has no step; -1: none."""
    by_time = np.searchsorted(bounds, events.start, side="right") - 1
    by_time[by_time >= len(known)] = -1
    if not len(known):
        return by_time
    by_step = np.searchsorted(known, events.step).clip(max=len(known) - 1)
    return np.where(events.step < 0, by_time, np.where(known[by_step] == events.step, by_step, -1))


def parts_of(events: Events) -> EventParts:
    """Return the part of every event."""
    above, around = (outermost(events.parent, one) for one in (events.kind.is_("phase"), events.op.is_("call")))
    phase = np.where(above >= 0, events.op.codes[above], -1).astype(np.int64)
    call = np.where(around >= 0, events.seq[around], -1)
    rows = np.flatnonzero(events.op.is_("submit") & (phase >= 0))
    calls, first = np.unique(events.seq[rows], return_index=True)  # those submitted inside a phase, which is theirs too
    if calls.size:
        at = np.searchsorted(calls, call).clip(max=len(calls) - 1)
        mine = (calls[at] == call) & (events.rank != events.controller)
        phase = np.where(mine, phase[rows[first]][at], phase)
    main = _main(events)
    worked = (phase >= 0) & main & np.isin(events.rank, events.workers) & ~events.kind.is_("communication", "pause")
    took = np.bincount(phase[worked], events.own[worked], len(events.op.names))
    phases = [int(i) for i in np.argsort(-took, kind="stable") if (phase == i).any()]
    names = (*(events.op.names[i] for i in phases), *FIXED)
    place = np.full(len(events.op.names) + 1, names.index(OTHER))  # the last one: of no phase
    place[phases] = np.arange(len(phases))
    code = place[phase]
    for kind, name in _OWN.items():
        here = events.kind.is_(kind) & ((phase < 0) | (kind != "data"))
        code[here] = names.index(name)
    code[events.op.is_(PROFILE)] = names.index(PROFILE)
    code[events.op.is_("receive")] = names.index(STAGES)
    return EventParts(names, code, main)


def _main(events: Events) -> np.ndarray:
    """bool [n]: events in a thread with calls or steps."""
    width = len(events.thread.names)
    key = events.rank * width + events.thread.codes
    return np.isin(key, np.unique(key[events.op.is_("call", "step")]))


def _summed(own: np.ndarray, rows: np.ndarray, at: tuple[np.ndarray, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """float64 [shape]: sums of these rows' own times in ns."""
    key = np.ravel_multi_index((at[0][rows], at[1][rows]), shape)
    return np.bincount(key, own[rows], shape[0] * shape[1]).reshape(shape)


def _free(events: Events, mine: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """int64 [s]: ns of each period in which no worker was in a call."""
    roots = mine & (events.parent < 0)
    return np.diff(bounds) - np.diff(covered(events.start[roots], events.end[roots], bounds))


def covered(start: np.ndarray, end: np.ndarray, at: np.ndarray) -> np.ndarray:
    """int64: length of the union of the intervals up to these moments. start: ascending."""
    if not len(start):
        return np.zeros(len(at), np.int64)
    reach = np.maximum.accumulate(end)
    begins = np.append(True, start[1:] > reach[:-1])
    first, last = start[begins], reach[np.append(begins[1:], True)]
    before = np.cumsum(last - first) - (last - first)
    i = (np.searchsorted(first, at, side="right") - 1).clip(min=0)
    return before[i] + (np.minimum(at, last[i]) - first[i]).clip(min=0)


def _rest(events: Events, names: tuple[str, ...], *tables: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Add the remaining time as waiting; inline as the process's own. Each of tables: a table, the whole time of its
    rows, and the part of it in which no worker was in a call."""
    peers, controller, other = (names.index(n) for n in (PEERS, CONTROLLER, OTHER))
    for table, whole, alone in tables:
        left = np.maximum(whole - table.sum(1), 0)
        if events.controller in events.workers:
            table[:, other] += left
        else:
            table[:, controller] = np.minimum(left, alone)
            table[:, peers] = left - table[:, controller]


def _roles(events: Events, rows: np.ndarray, rank: np.ndarray) -> dict[str, np.ndarray]:
    shape = len(events.role.names), len(events.workers)
    table = _summed(events.own, rows, (events.role.codes, rank), shape)
    order = np.argsort(-table.sum(1), kind="stable")
    return {events.role.names[i]: table[i] * NS for i in order if events.role.names[i] and table[i].any()}


def _meetings(events: Events, mine: np.ndarray, within: np.ndarray, rank: np.ndarray) -> Meetings:
    ranks = len(events.workers)
    talks = events.kind.is_("communication") & within & np.isin(events.rank, events.workers)
    late, waits = arrivals(events, talks)
    exposed = talks & mine
    waiting = np.where(exposed, np.minimum(waits, events.own), 0)
    by_op = {
        name: float(events.own[rows].sum()) * NS / ranks
        for name in events.op.names if (rows := exposed & events.op.is_(name)).any()
    }  # fmt: skip
    return Meetings(
        _per_rank(np.where(exposed, events.own - waiting, 0), rank, ranks), _per_rank(waiting, rank, ranks),
        _per_rank(_hidden(events, talks & ~mine, mine), rank, ranks), _per_rank(late, rank, ranks), by_op,
    )  # fmt: skip


def _per_rank(values: np.ndarray, rank: np.ndarray, ranks: int) -> np.ndarray:
    return np.bincount(rank, values, ranks) * NS


def arrivals(events: Events, talks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [n] each, in ns: mean wait of the others at a communication's last member; wait for it at every member.

    0 elsewhere, and where members are missing.
    """
    late, waits = np.zeros(len(events)), np.zeros(len(events))
    rows = np.flatnonzero(talks)
    group, ranks = events.spans.grouped(rows)
    rows, group, ranks = rows[group >= 0], group[group >= 0], ranks[group >= 0]
    if not len(rows):
        return late, waits
    waits[rows] = last_start(events, rows, group)[group] - events.start[rows]
    mean = np.bincount(group, waits[rows] / np.maximum(ranks - 1, 1))
    late[rows] = np.where(waits[rows] == 0, mean[group], 0)
    return late, waits


def _hidden(events: Events, beside: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """int64 [n]: ns that a rank was in a call during its communications in other threads."""
    hidden = np.zeros(len(events), np.int64)
    for r in np.unique(events.rank[beside]):
        rows, roots = beside & (events.rank == r), mine & (events.rank == r) & (events.parent < 0)
        at = [covered(events.start[roots], events.end[roots], t[rows]) for t in (events.start, events.end)]
        hidden[rows] = at[1] - at[0]
    return hidden


def _controller(events: Events, within: np.ndarray, whole: int) -> float:
    if events.controller in events.workers:
        return whole * NS
    rows = events.op.is_("await", PROFILE) & (events.rank == events.controller) & within
    return max(whole - int(events.duration[rows].sum()), 0) * NS
