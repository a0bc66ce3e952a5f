"""Events of several processes on one clock: bounds from calls and communications, and a run whose clocks are wrong."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.clocks import Shifted, bursts, noisy
from tests.examples import examples
from tilth.analysis import align as align_module
from tilth.analysis.align import Known, align, calls, clocks, meetings
from tilth.analysis.clock import same
from tilth.analysis.events import load
from tilth.analysis.matching import Coded, Spans
from tilth.analysis.recent import recent
from tilth.trace.clock_samples import ClockSamples, Origin, RoundsFile
from tilth.trace.writer import EVENTS

SECOND = 1_000_000_000
CONTROLLER = 2
MEET = 30_000  # ns that a communication takes after the last has come


class World:
    """A controller and two workers: calls and meetings with true times, and what each process's clock says of them."""

    def __init__(self, workers, seconds=30, seed=0, trip=100e3, every=0.2):
        self.clocks = {**workers, CONTROLLER: Shifted(0, 0.0)}
        self.rng, self.trip = np.random.default_rng(seed), trip
        self.rows = []
        for number, begin in enumerate(np.arange(0.1, seconds, every) * SECOND):
            self.call(number, begin)
        self.true = {k: np.array([row[k] for row in self.rows]) for k in ("rank", "seq", "start", "end")}
        shown = [
            [self.clocks[r].shows(t) for r, t in zip(self.true["rank"], self.true[k])] for k in ("start", "end")
        ]  # fmt: skip
        self.start, self.end = (np.array(times, np.int64) for times in shown)

    def call(self, number, begin):
        """Submitted, executed with one communication inside, awaited."""
        sent = begin + self.rng.uniform(10e3, 50e3)
        arrive = {r: sent + self.rng.exponential(self.trip) for r in self.clocks if r != CONTROLLER}
        enter = {r: t + self.rng.uniform(1e6, 9e6) for r, t in arrive.items()}
        met = max(enter.values()) + MEET
        leave = {r: met + self.rng.exponential(20e3) for r in arrive}
        over = {r: t + self.rng.uniform(1e5, 1e6) for r, t in leave.items()}
        for r in arrive:
            self.row(r, "call", "policy.update", number, arrive[r], over[r])
            self.row(r, "all_reduce", "0,1", number, enter[r], leave[r])
        back = max(t + self.rng.exponential(self.trip) for t in over.values())
        self.row(CONTROLLER, "submit", "policy.update", number, begin, sent)
        self.row(CONTROLLER, "await", "policy.update", number, sent, back)

    def row(self, rank, op, detail, seq, start, end):
        self.rows.append({"rank": rank, "op": op, "detail": detail, "seq": seq, "start": int(start), "end": int(end)})

    def spans(self):
        ops, details = (tuple(dict.fromkeys(row[k] for row in self.rows)) for k in ("op", "detail"))
        op = np.array([ops.index(row["op"]) for row in self.rows], np.int32)
        detail = np.array([details.index(row["detail"]) for row in self.rows], np.int32)
        return Spans(self.true["rank"], self.true["seq"], self.start, self.end, Coded(op, ops), Coded(detail, details))

    def asked(self, *ranks, steady=None, waits=True, trip=None):
        """Rounds with these; what the others are asked is nothing. steady: rank -> the name of its steady clock."""
        steady = steady or {}
        found = {}
        for rank in sorted(self.clocks):
            origin = Origin(self.clocks[rank].skew, steady.get(rank, ""), "here", rank, waits)
            times = np.linspace(0, self.true["end"].max(), 12)
            delay = noisy(trip or self.trip)
            rounds = bursts(self.clocks[rank], times, delay, self.rng, least=1e3) if rank in ranks else []
            found[rank] = ClockSamples(origin, rounds)
        return found

    def wrong(self, found, rank):
        """(error of each event's start, its stated bound), ns."""
        mine = self.true["rank"] == rank
        return np.abs(found.aligned(self.start[mine]) - self.true["start"][mine]), found.error(self.start[mine])


@settings(max_examples=examples(15), deadline=None)
@given(
    st.integers(-100 * SECOND, 100 * SECOND), st.integers(-100 * SECOND, 100 * SECOND), st.floats(-3e-4, 3e-4),
    st.floats(-3e-4, 3e-4), st.integers(0, 2**32),
)  # fmt: skip
def test_skew_and_drift_of_all_ranks_are_recovered_within_the_stated_bounds(a, b, drift_a, drift_b, seed):
    world = World({0: Shifted(a, drift_a), 1: Shifted(b, drift_b)}, seconds=10, seed=seed)
    found = clocks(world.asked(0, 1), CONTROLLER, world.spans())
    assert found[CONTROLLER].exact
    for rank in (0, 1):
        wrong, stated = world.wrong(found[rank], rank)
        assert (wrong <= stated + 1).all() and stated.max() < 500e3 and stated.max() <= found[rank].worst + 1
    start, end, error = align(world.asked(0, 1), world.spans())
    assert np.abs(start - world.true["start"]).max() <= error + 1 < 500e3
    assert (end >= start).all()


def known(world, rank, **kwargs):
    asked = world.asked(rank, **kwargs)[rank]
    mine = world.true["rank"] == rank
    return Known.of(asked.bursts, int(world.start[mine].min()), int(world.end[mine].max()))


def test_calls_tell_what_rare_rounds_do_not():
    world = World({0: Shifted(10**9, 1e-4), 1: Shifted(0, 0.0)}, trip=5e3)
    rounds = known(world, 0, trip=5e6)
    both = rounds.told(*calls(world.spans(), CONTROLLER, 0))
    for about in (rounds, both):
        wrong, stated = world.wrong(about.clock, 0)
        assert (wrong <= stated + 1).all()
    assert world.wrong(both.clock, 0)[1].mean() < 0.5 * world.wrong(rounds.clock, 0)[1].mean()


def test_more_knowledge_never_widens_what_is_stated():
    world = World({0: Shifted(10**9, 1e-4), 1: Shifted(5, -1e-4)})
    spans = world.spans()
    asked = world.asked(0, 1)
    found = clocks(asked, CONTROLLER, spans)
    for rank in (0, 1):
        rounds = Known.of(asked[rank].bursts, *(f(world.start[world.true["rank"] == rank]) for f in (np.min, np.max)))
        both = rounds.told(*calls(spans, CONTROLLER, rank))
        again = both.told(*calls(spans, CONTROLLER, rank))
        stated = [world.wrong(clock, rank)[1] for clock in (rounds.clock, both.clock, again.clock, found[rank])]
        assert all((after <= before + 1e-3).all() for before, after in itertools.pairwise(stated))
        assert rounds.told(both.least[:0], both.most[:0]) is rounds


def test_no_call_begins_before_it_was_submitted_nor_ends_after_its_answer():
    world = World({0: Shifted(-(10**8), -2e-4), 1: Shifted(10**8, 2e-4)}, trip=1e3)
    spans = world.spans()
    start, end, _ = align(world.asked(0, 1), spans)
    for rank in (0, 1):
        for mine, other, side in (("call", "submit", 1), ("call", "await", -1)):
            here = spans.of(mine)[world.true["rank"][spans.of(mine)] == rank]
            there = spans.of(other)
            gap = side * ((start[here] - start[there]) if side > 0 else (end[here] - end[there]))
            assert gap.min() >= -2_100  # the bounds' own slack


def test_a_rank_that_is_known_tells_of_one_it_meets():
    """Rank 0 reads the controller's very clock, rank 1 is far away; they meet every 0.2 s within 30 us."""
    world = World({0: Shifted(777, 0.0), 1: Shifted(10**9, 5e-5)}, trip=2e6)
    asked = world.asked(0, 1, steady={0: "x", CONTROLLER: "x"})
    found = clocks(asked, CONTROLLER, world.spans())
    assert found[0].exact and (world.wrong(found[0], 0)[0] == 0).all()
    silent = ClockSamples(asked[0].origin._replace(waits=False), asked[0].bursts)
    alone = clocks({**asked, 0: silent}, CONTROLLER, world.spans())
    wrong, stated = world.wrong(found[1], 1)
    assert (wrong <= stated + 1).all()
    assert stated.mean() < 0.8 * world.wrong(alone[1], 1)[1].mean()


def test_communications_that_a_device_does_tell_nothing():
    """Their spans end when they are queued: a rank may be done before the other has begun."""
    world = World({0: Shifted(0, 0.0), 1: Shifted(0, 0.0)})
    spans = world.spans()
    early = spans.of("all_reduce")
    spans.end[early] = spans.start[early] + 1
    asked = world.asked(0, 1, waits=False)
    found = clocks(asked, CONTROLLER, spans)
    for rank in (0, 1):
        wrong, stated = world.wrong(found[rank], rank)
        assert (wrong <= stated + 1).all()


def test_the_same_clock_is_taken_unless_rounds_speak_against_it():
    world = World({0: Shifted(500, 0.0), 1: Shifted(10**7, 1e-4)})
    steady = {0: "x", 1: "x", CONTROLLER: "x"}
    found = clocks(world.asked(0, 1, steady=steady), CONTROLLER, world.spans())
    assert found[0].exact and found[0].base == -500
    assert not found[1].exact  # it says so, but it drifts
    nameless = clocks(world.asked(0, 1), CONTROLLER, world.spans())
    assert not nameless[0].exact


def test_nothing_is_fitted_where_one_clock_is_shared(monkeypatch):
    world = World({0: Shifted(500, 0.0), 1: Shifted(-700, 0.0)})
    asked = world.asked(0, 1, steady={0: "x", 1: "x", CONTROLLER: "x"})
    monkeypatch.setattr(align_module, "fit", None)
    found = clocks(asked, CONTROLLER, world.spans())
    assert {rank: (clock.exact, clock.base) for rank, clock in found.items()} == {
        0: (True, -500), 1: (True, 700), CONTROLLER: (True, 0),
    }  # fmt: skip


def test_one_round_against_it_is_enough_for_a_clock_to_be_another():
    world = World({0: Shifted(500, 0.0), 1: Shifted(0, 0.0)})
    asked = world.asked(0, steady={0: "x", CONTROLLER: "x"})
    assert clocks(asked, CONTROLLER, world.spans())[0].exact
    asked[0].bursts[5][2] += [10**6, 0, 10**6]
    assert not clocks(asked, CONTROLLER, world.spans())[0].exact


def test_a_rank_that_nobody_asked_stays_as_it_is():
    world = World({0: Shifted(10**9, 0.0), 1: Shifted(10**9, 0.0)}, seconds=2)
    found = clocks(world.asked(0), CONTROLLER, world.spans())
    assert set(found) == {0, CONTROLLER}
    start, _, error = align(world.asked(0), world.spans())
    assert error == np.inf
    one = world.true["rank"] == 1
    assert np.array_equal(start[one], world.start[one])


def test_a_call_that_contradicts_the_rounds_is_left_out():
    world = World({0: Shifted(0, 0.0), 1: Shifted(0, 0.0)})
    spans = world.spans()
    before = clocks(world.asked(0), CONTROLLER, spans)
    spans.end[spans.of("await")[3]] -= SECOND  # as if the answer had been there a second too early
    spans.start[spans.of("submit")[5]] += SECOND
    wrong, stated = world.wrong(clocks(world.asked(0), CONTROLLER, spans)[0], 0)
    assert (wrong <= stated + 1).all() and stated.max() < 2 * world.wrong(before[0], 0)[1].max() + 1e5


def table(*rows):
    """Spans of (rank, op, detail, seq, start, end)."""
    rank, op, detail, seq, start, end = zip(*rows)
    ops, details = tuple(dict.fromkeys(op)), tuple(dict.fromkeys(detail))
    codes = [np.array([names.index(text) for text in column]) for names, column in ((ops, op), (details, detail))]
    return Spans(*map(np.array, (rank, seq, start, end)), Coded(codes[0], ops), Coded(codes[1], details))


def test_members_of_a_communication():
    spans = table(
        (0, "all_reduce", "0,1", 0, 0, 10), (1, "all_reduce", "0,1", 0, 5, 12), (0, "send", "0>1", 0, 20, 21),
        (1, "receive", "0>1", 0, 15, 30), (0, "all_reduce", "0,1", 1, 40, 50), (0, "all_gather", "0", 0, 60, 61),
        (0, "all_reduce", "0,1", 7, 70, 71), (1, "all_reduce", "0,1", 7, 70, 71), (1, "all_reduce", "0,1", 7, 90, 91),
        (0, "all_reduce", "0,1", -1, 70, 71), (1, "all_reduce", "0,1", -1, 70, 71),
    )  # fmt: skip
    found, _ = spans.grouped(np.arange(11))
    assert found[0] == found[1] != found[2] == found[3]
    assert found[4] == -1, "a member is missing"
    assert found[5] >= 0, "alone"
    assert (found[6:] == -1).all(), "one of them twice; without a number"
    least, most = meetings(spans, {0: same(), 1: same()})[1]
    assert (least.at.tolist(), least.value.tolist()) == ([12, 30], [5 - 12, 20 - 30])
    assert (most.at.tolist(), most.value.tolist()) == ([5], [10 - 5])
    least, most = meetings(spans, {0: same(), 1: same()})[0]
    assert (least.at.tolist(), least.value.tolist()) == ([10, 61], [5 - 10, 60 - 61])
    assert (most.at.tolist(), most.value.tolist()) == ([0, 20, 60], [10, 30 - 20, 1])
    assert meetings(table((0, "call", "x.y", 0, 0, 1)), {0: same()}) == {}


def write(folder, world, asked):
    """A run's events as their processes would have written them."""
    folder.mkdir()
    for rank in world.clocks:
        mine = np.flatnonzero(world.true["rank"] == rank)
        rows = [
            {"attempt": 1, "rank": rank, "id": int(i), "parent": -1, "depth": 0, "op": world.rows[i]["op"],
             "detail": world.rows[i]["detail"], "seq": world.rows[i]["seq"], "role": "", "place": "", "step": 0,
             "micro_batch": -1, "start": int(world.start[i]), "duration": int(world.end[i] - world.start[i]),
             "tokens": 0, "squares": 0, "bytes": 0, "flops": 0.0, "thread": "MainThread",
             "device_start": int(world.start[i]) + 9 if world.rows[i]["op"] == "all_reduce" else None,
             "device_duration": 5 if world.rows[i]["op"] == "all_reduce" else None}
            for i in mine
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows, schema=EVENTS), folder / f"attempt-1-rank-{rank}-000001.parquet")
    file = RoundsFile(folder, 1)
    file.introduce({rank: about.origin for rank, about in asked.items()})
    file.add({rank: [tuple(map(int, r)) for b in about.bursts for r in b] for rank, about in asked.items()})
    file.close()


def test_loaded_events_are_on_the_controllers_clock(tmp_path):
    world = World({0: Shifted(5 * SECOND, 1e-4), 1: Shifted(-3 * SECOND, -1e-4)}, seconds=10, trip=20e3)
    write(tmp_path / "events", world, world.asked(0, 1))
    events = load(tmp_path)
    true = np.sort(world.true["start"])
    assert np.abs(events.start - (true - true[0])).max() < 200e3
    inside = events.op.is_("all_reduce")
    first = {(r, s): (a, b) for r, s, a, b in zip(*(c[events.op.is_("call")].tolist() for c in (
        events.rank, events.seq, events.start, events.end)))}  # fmt: skip
    for r, s, a, b in zip(*(c[inside].tolist() for c in (events.rank, events.seq, events.start, events.end))):
        assert first[r, s][0] <= a and b <= first[r, s][1], "what is within a span stays so"
    assert (events.device_start[inside] == events.start[inside] + 9).all() and (
        events.device_duration[inside] == 5
    ).all()
    assert (events.device_start[~inside] == -1).all() and (events.device_duration[~inside] == -1).all()
    assert 0 < events.clock_error < 200e3 and events.select(inside).clock_error == events.clock_error
    again, _ = recent(tmp_path)
    assert np.abs(again.start - events.start).max() <= 1 and again.clock_error == pytest.approx(events.clock_error)
    (tmp_path / "events" / "attempt-1-clocks.jsonl").unlink()
    assert load(tmp_path).clock_error is None
    assert np.abs(load(tmp_path).start - (true - true[0])).max() > SECOND


def test_a_run_of_ten_hours():
    rng, clock = np.random.default_rng(0), Shifted(1, 5e-5)
    asked = ClockSamples(Origin(0, "", "here", 1), bursts(clock, np.linspace(0, 36_000e9, 1800), noisy(), rng))
    spans = table(*[(0, "call", "a.b", i, i * SECOND, i * SECOND + 9) for i in range(0, 36_000, 50)])
    found = clocks({0: asked, 9: ClockSamples(Origin(0, "", "here", 2))}, 9, spans)[0]
    true = np.linspace(0, 36_000e9, 999).astype(np.int64)
    wrong, stated = np.abs(found.aligned(clock.shows(true)) - true), found.error(clock.shows(true))
    assert found.drift == pytest.approx(-5e-5, rel=1e-3)
    assert (wrong <= stated + 1).all() and stated.max() < 200e3
