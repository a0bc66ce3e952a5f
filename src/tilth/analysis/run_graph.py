"""Build the dependency graph of a run: calls, cut at their communications, and the controller that submits them.

Within a step each worker executes its calls one after another. A call is ready when the rank's call before it has ended
and the controller has reached its ``submit``; a communication moves when all its members have reached it; the
controller waits in ``await`` for its call on all ranks; a step ends when all of its calls have. Between two such
meetings a process works alone: a segment, whose time is split by operation.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tilth.analysis.events import Events, profiled
from tilth.analysis.network import meetings
from tilth.analysis.replay import ACROSS, ALONE, Graph
from tilth.core.errors import DataError

LAUNCH, WORK, MEET, REPLY, AWAIT, END = range(6)
"""Kinds of nodes. LAUNCH: from the moment a call is ready to its start. WORK: a segment. MEET: a communication's
transfer. REPLY: a call's end, for its await. AWAIT: from the last answer until the controller continues. END: of a
step."""
DISPATCH = "dispatch"
"""Operation of LAUNCH and AWAIT: calls and answers under way between processes."""
MOST = 500_000
"""Most events of the analysed steps, and of the other steps: about 1 GB and 10 s."""


@dataclass(frozen=True, eq=False)
class Steps:
    """n nodes of s steps, and the k operations that take their time. Each step starts at 0."""

    events: Events
    steps: np.ndarray  # int64 [s]: their numbers, ascending
    recorded: np.ndarray  # float64 [s]: seconds of the controller's spans
    dropped: list[int]  # steps left out because calls of theirs are missing
    ops: tuple[str, ...]
    kind: np.ndarray  # int64 [n]: LAUNCH ... END
    frame: np.ndarray  # int64 [n]: row of the call, or of the step, that the node is part of
    segment: np.ndarray  # int64 [n]: its place in the frame
    row: np.ndarray  # int64 [n]: row of the communication or the await, -1 for others
    real: np.ndarray  # float64 [n, k]: seconds by operation, without waiting for others
    graph: Graph
    last: np.ndarray  # int64 [s]: the END of each step
    older: int = 0  # number of steps left out because later ones have ``MOST`` events
    profiled: tuple[int, ...] = ()  # steps left out because a profiler made them longer

    @cached_property
    def rank(self) -> np.ndarray:
        """int64 [n]."""
        return self.events.rank[self.frame]

    @cached_property
    def call(self) -> np.ndarray:
        """int64 [n]: number of the call, -1 at the controller's nodes."""
        return np.where(self.home, -1, self.events.seq[self.frame])

    @cached_property
    def home(self) -> np.ndarray:
        """bool [n]: nodes of the controller."""
        return self.events.op.is_("step")[self.frame]

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each operation."""
        events = self.events
        codes, rows = np.unique(events.op.codes, return_index=True)
        by_name = {events.op.names[code]: events.kind.text(row) for code, row in zip(codes, rows)}
        return tuple(by_name.get(name, "frame") for name in self.ops)

    @cached_property
    def meet_column(self) -> np.ndarray:
        """int64 [n]: column of a communication node's operation; 0 at other nodes."""
        of = np.array([self.ops.index(name) if name in self.ops else 0 for name in self.events.op.names])
        return np.where(self.kind == MEET, of[self.events.op.codes[self.row]], 0)

    @property
    def workers(self) -> np.ndarray:
        """int64 [w]: ranks that executed calls, ascending; none inline."""
        return np.unique(self.rank[~self.home])


class _Cut:
    """Frames (calls and steps) of the chosen steps, and every boundary of a span in them, by time within a frame."""

    def __init__(self, events: Events, steps: np.ndarray) -> None:
        self.events = events
        home = events.rank == events.controller
        step_rows = events.op.is_("step") & home & np.isin(events.step, steps)
        calls = events.op.is_("call") & ~home & np.isin(events.step, steps)
        owner = outermost(events.parent, step_rows | calls)
        self.rows = np.flatnonzero(owner >= 0)
        self.frame = owner[self.rows]
        self.meetings = _meetings(events, owner)  # int64 [n events]: number of a row's communication, -1: none
        self._order()

    def _order(self) -> None:
        """Sort boundaries: at one moment ends before starts, inner ends and outer starts first. A span of no time ends
        right after its start."""
        events, rows = self.events, self.rows
        depth = _depths(events.parent)[rows]
        start, end = events.start[rows], _inside(events, rows, self.frame)
        time = np.concatenate([start, end])
        leaving = np.repeat([0, 1], len(rows))
        late = np.concatenate([np.ones(len(rows), np.int64), end == start])
        level = np.concatenate([depth, np.where(end == start, depth, -depth)])
        order = np.lexsort((leaving, np.tile(rows, 2), level, late, time, np.tile(self.frame, 2)))
        frame = np.tile(self.frame, 2)
        self.time, self.leaving = time[order], leaving[order].astype(bool)
        self.at, self.of = np.tile(rows, 2)[order], frame[order]  # rows of the span and its frame at each boundary
        following = np.flatnonzero(self.of[1:] == self.of[:-1])
        self.spent = np.zeros(len(self.time), np.int64)  # ns from each boundary to the next of its frame, in ``owner``
        self.spent[following] = self.time[following + 1] - self.time[following]
        self.owner = np.where(self.leaving, events.parent[self.at], self.at)


def outermost(parent: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """int64 [n]: row of the outermost chosen span (bool [n]) around each row, or itself; -1 where there is none."""
    found = np.where(chosen, np.arange(len(parent)), -1)
    up = parent.copy()
    while (going := np.flatnonzero(up >= 0)).size:
        above = up[going]
        found[going] = np.where(chosen[above], above, found[going])
        up[going] = parent[above]
    return found


def adopted(events: Events) -> Events:
    """Nest communications of a separate thread (a backward pass on a device) in their rank's call.

    The parent is the innermost span that was open for the whole communication.
    """
    calls = events.op.is_("call") & (events.rank != events.controller)
    strays = np.flatnonzero(events.kind.is_("communication") & (events.parent < 0) & (events.rank != events.controller))
    if not len(strays):
        return events
    inside, end = outermost(events.parent, calls) >= 0, events.end
    parent, own = events.parent.copy(), events.own.copy()
    for rank in np.unique(events.rank[strays]):
        mine, rows = strays[events.rank[strays] == rank], np.flatnonzero(inside & (events.rank == rank))
        at = np.searchsorted(events.start[rows], events.start[mine], "right") - 1
        up = np.where(at >= 0, np.append(rows, -1)[at], -1)
        while (out := (up >= 0) & (end[up] < end[mine])).any():
            up = np.where(out, events.parent[up], up)
        parent[mine] = up
    found = strays[parent[strays] >= 0]
    np.subtract.at(own, parent[found], events.duration[found])
    return replace(events, parent=parent, own=own)


def _depths(parent: np.ndarray) -> np.ndarray:
    depth, up = np.zeros(len(parent), np.int64), parent.copy()
    while (going := np.flatnonzero(up >= 0)).size:
        depth[going] += 1
        up[going] = parent[up[going]]
    return depth


def _inside(events: Events, rows: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """Ends of these rows, none after that of the spans around it: clock alignment rounds."""
    end = np.minimum(events.end[rows], events.end[frame])
    full = events.end
    full[rows] = end
    up = events.parent[rows]
    while (up >= 0).any():
        end = np.where(up >= 0, np.minimum(end, full[up]), end)
        up = np.where(up >= 0, events.parent[up], -1)
    return np.maximum(end, events.start[rows])


def _meetings(events: Events, owner: np.ndarray) -> np.ndarray:
    """Number the communications of the chosen calls whose members overlap in time. A send that ended before its receive
    began was buffered and waits for nobody."""
    met, number = meetings(events), np.full(len(events), -1)
    rows, groups = met.rows, met.number
    if not len(rows):
        return number
    count = int(groups.max()) + 1
    low, high = np.full(count, np.iinfo(np.int64).min), np.full(count, np.iinfo(np.int64).max)
    np.maximum.at(low, groups, events.start[rows])
    np.minimum.at(high, groups, events.end[rows])
    ours = np.ones(count, bool)
    np.logical_and.at(ours, groups, owner[rows] >= 0)
    together = ours & (low <= high)
    number[rows] = np.where(together[groups], groups, -1)
    inner = outermost(events.parent, number >= 0)
    number[inner != np.arange(len(events))] = -1
    return number


def read_steps(events: Events, wanted: range | None = None, most: int = MOST) -> Steps:
    """Build the dependency graph of the complete steps among ``wanted`` (default: all).

    Of many events, take the newest steps with ``most`` events, and as many events of other steps for comparison.
    Raises DataError if no step is left.
    """
    steps, dropped = _complete(events, wanted)
    during = np.isin(steps, profiled(events))
    if during.all():
        message = f"step {steps[0]} was profiled, as were all of these: their times are the profiler's too"
        raise DataError(message, key="steps.profiled")
    steps, slowed = steps[~during], tuple(steps[during].tolist())
    events, chosen = adopted(events), steps
    if len(events) > most:
        chosen, others = _newest(events, steps, most)
        events = events.select(np.isin(events.step, others))
    made = _Nodes(_Cut(events, chosen), chosen).made(dropped)
    return replace(made, older=len(steps) - len(chosen), profiled=slowed)


def _newest(events: Events, steps: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(the newest of these steps with at most ``most`` events, at least one; these and a sample of the others). The
    sample takes one of every few neighbours at random (seeded), since some work is done every N steps."""
    numbers, count = np.unique(events.step, return_counts=True)
    sizes = count[np.searchsorted(numbers, steps)]
    fit = np.cumsum(sizes[::-1]) <= most
    chosen = steps[len(steps) - max(int(fit.sum()), 1) :]
    rest = numbers[(numbers >= 0) & ~np.isin(numbers, chosen)]
    every = max(1, -(-int(count.sum()) // most))
    last = np.arange(len(rest) - 1, -1, -every)
    drawn = (last - np.random.default_rng(0).integers(0, every, len(last))).clip(min=0)
    return chosen, np.concatenate([chosen, rest[drawn]])


def _complete(events: Events, wanted: range | None) -> tuple[np.ndarray, list[int]]:
    """(complete steps, incomplete ones): a killed worker's events end early, and a run in progress writes by parts."""
    known = np.array(events.steps, np.int64)
    if not len(known):
        raise DataError("no step of the run has ended yet", key="steps.ended")
    steps = known if wanted is None else known[(known >= wanted.start) & (known < wanted.stop)]
    if wanted is not None and not len(steps):
        message = f"no events of steps {wanted.start}:{wanted.stop}; its steps are {known[0]} to {known[-1]}"
        raise DataError(message, key="steps")
    broken = np.isin(steps, _missing(events))
    if broken.all():
        raise DataError(f"no step is complete: calls of step {steps[0]} are missing", key="steps.complete")
    return steps[~broken], steps[broken].tolist()


def _missing(events: Events) -> np.ndarray:
    """Steps with submitted calls that lack the events of a rank of their role."""
    home = events.rank == events.controller
    asked, done = events.op.is_("submit") & home, events.op.is_("call") & ~home
    number, count = np.unique(events.seq[done], return_counts=True)
    rows = np.flatnonzero(asked)
    place = np.searchsorted(number, events.seq[rows]).clip(max=max(len(number) - 1, 0))
    there = np.zeros(len(rows), np.int64)
    if len(number):
        there = np.where(number[place] == events.seq[rows], count[place], 0)
    most = np.ones(len(events.detail.names), np.int64)
    np.maximum.at(most, events.detail.codes[rows], there)
    return np.unique(events.step[rows[there < most[events.detail.codes[rows]]]])


class _Nodes:
    """Cut frames into nodes, numbered by time within a frame."""

    def __init__(self, cut: _Cut, steps: np.ndarray) -> None:
        self.cut, self.events, self.steps = cut, cut.events, steps
        self._count()
        self.op_code, self.ops = self._ops()
        self.real = self._pieces()
        self.edges: list[np.ndarray] = []
        self.group = np.arange(self.n)

    def _count(self) -> None:
        """Number the nodes; the node of a boundary is the one that begins or continues there."""
        cut, events = self.cut, self.events
        is_frame, home = cut.at == cut.of, events.op.is_("step")[cut.of]
        submit, waits = events.op.is_("submit")[cut.at] & home, events.op.is_("await")[cut.at] & home
        meets = (cut.meetings[cut.at] >= 0) | waits
        new = (is_frame | meets | (submit & ~cut.leaving)).astype(np.int64)
        new += is_frame & ~home & ~cut.leaving  # a call's LAUNCH and its first segment
        node = np.cumsum(new) - 1
        self.n = int(node[-1]) + 1
        self.node = node
        self.kind = np.full(self.n, WORK)
        self.frame, self.row = np.zeros(self.n, np.int64), np.full(self.n, -1)
        self.frame[node] = cut.of
        opening = is_frame & ~cut.leaving & ~home
        self.kind[node[opening] - 1], self.frame[node[opening] - 1] = LAUNCH, cut.of[opening]
        closing = is_frame & cut.leaving
        self.kind[node[closing]] = np.where(home[closing], END, REPLY)
        entering = meets & ~cut.leaving
        self.kind[node[entering]] = np.where(waits[entering], AWAIT, MEET)
        self.row[node[entering]] = cut.at[entering]
        self.begin = np.full(len(events), -1)  # of each frame: its first node; its last is that before the next one's
        self.close = np.full(len(events), -1)
        self.begin[cut.of[is_frame & ~cut.leaving]] = node[is_frame & ~cut.leaving] - ~home[is_frame & ~cut.leaving]
        self.close[cut.of[closing]] = node[closing]
        self.before = np.full(len(events), -1)  # of each submit: the node before it
        asking = submit & ~cut.leaving
        self.before[cut.at[asking]] = node[asking] - 1

    def _ops(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """(column of each operation name, names of the columns), for operations that occur."""
        names = self.events.op.names
        used = np.zeros(len(names), bool)
        used[self.events.op.codes[self.cut.owner[self.cut.spent > 0]]] = True
        used[self.events.op.codes[self.row[self.row >= 0]]] = True
        kept = [i for i in np.flatnonzero(used) if names[i] != "await"]
        code = np.full(len(names), len(kept))
        code[kept] = np.arange(len(kept))
        return code, (*(names[i] for i in kept), DISPATCH)

    def _pieces(self) -> np.ndarray:
        """Seconds of segments by operation; those of meetings and ends are added later."""
        cut, k = self.cut, len(self.ops)
        spent = cut.spent * (self.kind[self.node] == WORK)
        spent = self._without_drain(spent)
        column = self.op_code[self.events.op.codes[cut.owner]]
        flat = np.bincount(self.node * k + column, spent, self.n * k)
        return flat.reshape(self.n, k) * 1e-9

    def _without_drain(self, spent: np.ndarray) -> np.ndarray:
        """Remove the wait of a step's end for calls without an await from the step's last segment."""
        cut, events = self.cut, self.events
        calls = np.unique(self.frame[self.kind == LAUNCH])
        awaits = self.row[self.kind == AWAIT]
        asked, answered = (events.seq[rows] << 32 | events.step[rows] for rows in (calls, awaits))
        open_ = calls[~np.isin(asked, answered)]
        if not len(open_):
            return spent
        until = dict.fromkeys(self.steps.tolist(), -1)
        for row in open_:
            until[int(events.step[row])] = max(until[int(events.step[row])], int(events.end[row]))
        last = self.close[cut.of] - 1  # its last segment
        mine = np.flatnonzero((self.node == last) & (cut.owner == cut.of) & events.op.is_("step")[cut.of])
        waited = np.array([until[int(s)] for s in events.step[cut.of[mine]]], np.int64) - cut.time[mine]
        spent = spent.copy()
        spent[mine] -= np.clip(waited, 0, spent[mine])
        return spent

    def made(self, dropped: list[int]) -> Steps:
        """Add edges, groups and the times of nodes that are no segments."""
        self._chain()
        self._calls()
        self._meet()
        ends = self._end()
        before, after = np.concatenate(self.edges, axis=1)
        grouped = np.bincount(self.group, minlength=self.n)[self.group] > 1
        graph = Graph(before, after, self.group, np.where(grouped, ACROSS, ALONE))
        last = ends[np.argsort(self.events.step[self.frame[ends]])]
        recorded = self.events.duration[self.frame[last]] * 1e-9
        segment = np.arange(self.n) - self.begin[self.frame]
        return Steps(self.events, self.steps, recorded, dropped, self.ops, self.kind, self.frame, segment, self.row,
                     self.real, graph, last)  # fmt: skip

    def _edge(self, before: np.ndarray, after: np.ndarray) -> None:
        self.edges.append(np.stack([before, after]))

    def _chain(self) -> None:
        """Order the nodes of a frame."""
        inside = np.flatnonzero(self.frame[1:] == self.frame[:-1])
        self._edge(inside, inside + 1)

    def _calls(self) -> None:
        """Begin a call after the one before it on its rank in the step, and after its submit."""
        events = self.events
        calls = np.unique(self.frame[self.kind == LAUNCH])
        calls = calls[np.lexsort((events.start[calls], events.step[calls], events.rank[calls]))]
        same = (events.rank[calls[1:]] == events.rank[calls[:-1]]) & (events.step[calls[1:]] == events.step[calls[:-1]])
        earlier, later = calls[:-1][same], calls[1:][same]
        self._edge(self.close[earlier] - 1, self.begin[later])
        ready = np.full(len(events), np.iinfo(np.int64).min)
        ready[later] = events.end[earlier]
        asked, submits = _matched(events, calls, np.flatnonzero(self.before >= 0))
        self._edge(self.before[submits], self.begin[asked])
        ready[asked] = np.maximum(ready[asked], events.start[submits])
        ends = self.frame[self.kind == END]
        step = events.start[ends[np.argsort(events.step[ends])]]
        alone = ready[calls] == np.iinfo(np.int64).min
        ready[calls[alone]] = step[np.searchsorted(self.steps, events.step[calls[alone]])]
        self.real[self.begin[calls], -1] = np.maximum(events.start[calls] - ready[calls], 0) * 1e-9
        self.calls = calls

    def _meet(self) -> None:
        """Join the members of a communication, and an await with its call's replies, from the last arrival on."""
        events = self.events
        meets = np.flatnonzero(self.kind == MEET)
        number = self.cut.meetings[self.row[meets]]
        self._join(meets, number, events.start[self.row[meets]], events.end[self.row[meets]])
        awaits = np.flatnonzero(self.kind == AWAIT)
        _, one = np.unique(events.seq[self.row[awaits]], return_index=True)
        chosen, later = awaits[one], np.delete(awaits, one)
        self.real[later, -1] = events.duration[self.row[later]] * 1e-9  # the answer was there already
        calls, rows = _matched(events, self.calls, self.row[chosen])
        same = events.step[calls] == events.step[rows]
        calls, rows = calls[same], rows[same]
        of = chosen[np.searchsorted(events.seq[self.row[chosen]], events.seq[rows])]
        nodes, named = np.concatenate([chosen, self.close[calls]]), np.concatenate([chosen, of])
        arrived = np.concatenate([events.start[self.row[chosen]], events.end[calls]])
        ended = np.concatenate([events.end[self.row[chosen]], events.end[calls]])
        self._join(nodes, named, arrived, ended)
        self.real[self.close[calls]] = 0

    def _join(self, nodes: np.ndarray, number: np.ndarray, arrived: np.ndarray, ended: np.ndarray) -> None:
        """Start the nodes of one number together."""
        if not len(nodes):
            return
        names, which = np.unique(number, return_inverse=True)
        latest = np.full(len(names), np.iinfo(np.int64).min)
        np.maximum.at(latest, which, arrived)
        first = np.full(len(names), self.n)
        np.minimum.at(first, which, nodes)
        self.group[nodes] = first[which]
        column = np.where(self.kind[nodes] == MEET, self.op_code[self.events.op.codes[self.row[nodes]]], -1)
        self.real[nodes, column] = np.maximum(ended - latest[which], 0) * 1e-9

    def _end(self) -> np.ndarray:
        """End a step after the last call of each rank: one more node for each meets with the step's end."""
        events, ends = self.events, np.flatnonzero(self.kind == END)
        final = np.ones(len(self.calls), bool)
        final[:-1] = (events.rank[self.calls[1:]] != events.rank[self.calls[:-1]]) | (
            events.step[self.calls[1:]] != events.step[self.calls[:-1]]
        )
        calls = self.calls[final]
        by_step = dict(zip(events.step[self.frame[ends]].tolist(), ends.tolist()))
        joined = np.array([by_step[s] for s in events.step[calls].tolist()], np.int64)
        made = np.arange(self.n, self.n + len(calls))
        self._edge(self.close[calls] - 1, made)
        self.group = np.concatenate([self.group, joined])
        self.kind, self.frame = np.append(self.kind, np.full(len(calls), REPLY)), np.append(self.frame, calls)
        self.row = np.append(self.row, np.full(len(calls), -1))
        self.real = np.concatenate([self.real, np.zeros((len(calls), len(self.ops)))])
        self.n += len(calls)
        return ends


def _matched(events: Events, calls: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(calls with a row of their number among these submits or awaits, that row for each)."""
    rows = rows[np.argsort(events.seq[rows], kind="stable")]
    numbers = events.seq[rows]
    place = np.searchsorted(numbers, events.seq[calls]).clip(max=max(len(rows) - 1, 0))
    known = numbers[place] == events.seq[calls] if len(rows) else np.zeros(len(calls), bool)
    return calls[known], rows[place[known]]
