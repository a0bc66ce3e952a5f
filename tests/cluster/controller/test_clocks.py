"""Rounds between the controller and its workers: when they are made, what is kept, and what is recovered from them."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pyarrow.compute as pc
import pytest

from tests.analysis.clocks import Shifted
from tests.cluster.controller.test_dispatch import ByHand
from tests.errors import raises
from tilth.analysis.align import Known
from tilth.analysis.events import load
from tilth.analysis.read import read_events
from tilth.cluster.backends.base import Call, Reply
from tilth.cluster.controller import cluster as clocks_module
from tilth.cluster.controller.cluster import FEW, MANY, Clocks, Cluster, open_cluster
from tilth.cluster.controller.dispatch import Dispatch
from tilth.core.errors import WorkerLost
from tilth.core.layout import Mesh
from tilth.trace import recorder
from tilth.trace.clock_samples import Origin, RoundsFile, read_rounds


class Skewed(ByHand):
    """Workers whose clocks are wrong; each answers when its timer says so, the first one at once."""

    def __init__(self, *clocks, late=0.0):
        super().__init__(len(clocks))
        self.clocks, self.late, self.calls = clocks, late, []
        self.began = time.perf_counter_ns()

    def submit(self, rank, call):
        self.calls.append((rank, call.method))
        future = Future()
        if call.method == "work":
            return future
        value = Origin(0, f"clock {rank}", "far", rank) if call.method == "origin" else self.now(rank)
        if self.late:
            threading.Timer(self.late, future.set_result, [Reply(value, {})]).start()
        else:
            future.set_result(Reply(value, {}))
        return future

    def now(self, rank):
        return int(self.clocks[rank].shows(time.perf_counter_ns() - self.began))


def rounds_of(fleet):
    return sum(method == "clock" for _, method in fleet.calls)


def test_injected_skew_and_drift_are_recovered_from_rounds_that_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr(clocks_module, "SHORTEST", 0.0)
    monkeypatch.setattr(clocks_module, "COST", 1e9)
    fleet = Skewed(Shifted(10**12, 4e-4), Shifted(-(10**9), -4e-4))
    made = Clocks(Dispatch(fleet, 60), tmp_path, 3)
    made.begin()
    for _ in range(20):
        time.sleep(0.005)
        made.now_and_then()
    made.end()
    asked = read_rounds(tmp_path, 3)
    assert asked[0].origin == Origin(0, "clock 0", "far", 0) and set(asked) == {0, 1, 2}
    for rank, clock in enumerate(fleet.clocks):
        bursts = asked[rank].bursts
        assert [len(b) for b in bursts] == [MANY, *[FEW] * 20, MANY]
        true = np.linspace(bursts[0][0, 0], bursts[-1][-1, 2], 100).astype(np.int64)
        shown = clock.shows(true - fleet.began)
        found = Known.of(bursts, int(shown[0]), int(shown[-1])).clock
        assert (np.abs(found.aligned(shown) - true) <= found.error(shown) + 1).all()
        assert found.error(shown).max() < 1e7  # whatever else this machine does


def test_they_are_made_when_it_is_time_and_nobody_works(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clocks_module.time, "monotonic", lambda: now[0])
    fleet = Skewed(Shifted(0, 0.0), Shifted(0, 0.0))
    dispatch = Dispatch(fleet, 60)
    made = Clocks(dispatch, tmp_path, 0)
    made.begin()
    assert rounds_of(fleet) == 2 * MANY
    made.now_and_then()
    assert rounds_of(fleet) == 2 * MANY, "too early"
    now[0] += 1.5
    flight = dispatch.submit(0, Call("policy", "work"))
    made.now_and_then()
    assert rounds_of(fleet) == 2 * MANY, "a worker is busy: its answer would have to be waited for"
    flight.future.set_result(Reply(None, {}))
    made.now_and_then()
    assert rounds_of(fleet) == 2 * (MANY + FEW)
    for elapsed, pause in ((1000, 10.0), (100_000, 20.0)):
        now[0] = 100.0 + elapsed
        before = rounds_of(fleet)
        made.now_and_then()
        now[0] += pause - 0.1
        made.now_and_then()
        assert rounds_of(fleet) == before + 2 * FEW, "1 % of the time so far, but not too seldom"
        now[0] += 0.2
        made.now_and_then()
        assert rounds_of(fleet) == before + 4 * FEW


def test_slow_rounds_are_rare(tmp_path, monkeypatch):
    ticks = iter(np.arange(0, 10_000, 0.5).tolist())  # every look at the clock takes half a second
    fleet = Skewed(Shifted(0, 0.0))
    made = Clocks(Dispatch(fleet, 1e9), tmp_path, 0)
    monkeypatch.setattr(clocks_module.time, "monotonic", lambda: next(ticks))
    made._burst(1)
    assert made._next >= 500, "0.1 % of the time at most"


def test_answers_that_take_long_are_bounds_all_the_same(tmp_path):
    fleet = Skewed(Shifted(10**9, 0.0), late=0.01)
    made = Clocks(Dispatch(fleet, 60), tmp_path, 0)
    asked, there, answered = made._round(0)
    assert asked <= there - 10**9 + fleet.began <= answered
    assert answered - asked >= 10**7


def test_a_worker_that_is_lost_is_told_as_ever(tmp_path):
    class Lost(ByHand):
        def submit(self, rank, call):
            future = super().submit(rank, call)
            threading.Timer(0.05, future.set_exception, [WorkerLost("rank 0: gone", key="cluster.origin")]).start()
            return future

    made = Clocks(Dispatch(Lost(1), 60), tmp_path, 0)
    with raises(WorkerLost, "cluster.origin"):
        made.begin()


def test_inline_there_is_one_clock(tmp_path):
    with recorder.to(tmp_path), open_cluster("inline", 1) as cluster:
        cluster.trace(tmp_path, 0)
        cluster.compare_clocks()
    assert read_rounds(tmp_path, 0) == {}


def test_an_ended_cluster_asks_no_more(tmp_path):
    fleet = Skewed(Shifted(0, 0.0))
    cluster = Cluster(fleet, 60)
    cluster.trace(tmp_path, 0)
    cluster.close()
    assert [method for _, method in fleet.calls[-2:]] == ["clock", "end"] and rounds_of(fleet) == 2 * MANY
    cluster.close()
    assert rounds_of(fleet) == 2 * MANY
    interrupted = Cluster(fleet, 60)
    with pytest.raises(KeyboardInterrupt), interrupted:
        interrupted.trace(tmp_path, 1)
        raise KeyboardInterrupt
    assert rounds_of(fleet) == 3 * MANY, "it leaves at once"


@pytest.mark.dist
def test_processes_of_this_machine_are_on_one_clock(tmp_path):
    with open_cluster("local", 2) as cluster, recorder.to(tmp_path, cluster.rank, 1):
        cluster.trace(tmp_path, 1)
        mesh = Mesh(("dp", "fsdp", "tp"), (2, 1, 1))
        group = cluster.group("echo", "tests.cluster.workers:echo", {"scale": float}, mesh)
        for _ in range(20):
            group.pid()
            cluster.compare_clocks()
    asked = read_rounds(tmp_path, 1)
    assert len(asked) == 3 and all(len(asked[r].bursts) >= 2 for r in (0, 1))
    assert len({about.origin.clock for about in asked.values()}) == 1
    events = load(tmp_path)
    for rank in (0, 1):
        for op, side in (("submit", 1), ("await", -1)):
            here = {s: t for s, t, o, r in _each(events, side) if o == "call" and r == rank}
            there = {s: t for s, t, o, r in _each(events, side) if o == op}
            assert len(here) >= 20 and all(side * (here[s] - there[s]) >= 0 for s in here)


def _each(events, side):
    times = events.start if side > 0 else events.end
    ops = [events.op.names[i] for i in events.op.codes]
    return zip(events.seq.tolist(), times.tolist(), ops, events.rank.tolist())


WRONG = """
import sys, time

if "tilth.cluster.worker.fork_server" in sys.orig_argv:
    steady, wall = time.perf_counter_ns, time.time_ns

    def world():
        here = "tilth.cluster.worker.local_worker" in sys.argv  # a fork of it
        return {worlds}[int(sys.argv[-3])] if here else (0, 0.0, 0)

    time.perf_counter_ns = lambda: (now := steady()) + int(world()[1] * (now - world()[2]))
    time.time_ns = lambda: wall() + world()[0]
"""


@pytest.mark.slow  # starts a fork server of its own
@pytest.mark.dist
def test_processes_whose_clocks_are_wrong_are_put_right(tmp_path, monkeypatch):
    """Each worker's wall clock is seconds off and its steady clock runs too fast or too slowly; all say they read the
    same one, which rounds refute."""
    since = time.perf_counter_ns()
    worlds = [(5 * 10**9, 4e-4, since), (-3 * 10**9, -4e-4, since)]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WRONG.format(worlds=worlds))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("OMP_DYNAMIC", "false")  # asks for a new fork server, which imports that file
    folder = tmp_path / "events"
    with open_cluster("local", 2) as cluster, recorder.to(folder, cluster.rank, 1):
        cluster.trace(folder, 1)
        group = cluster.group("echo", "tests.cluster.workers:echo", {"scale": float}, Mesh(("dp",), (2,)))
        for _ in range(30):
            group.pid()
            time.sleep(0.01)
    asked, raw, events = read_rounds(folder, 1), read_events(folder), load(folder)
    first = int(pc.min(raw.filter(pc.equal(raw["rank"], 2))["start"]).as_py())
    start = events.start - events.start[events.rank == 2].min() + first  # as the controller's clock has it
    for rank, (_, drift, _) in enumerate(worlds):
        shown = np.sort(raw.filter(pc.equal(raw["rank"], rank))["start"].to_numpy())
        steady = since + (shown - asked[rank].origin.epoch - since) / (1 + drift)
        true = steady + asked[2].origin.epoch
        stated = Known.of(asked[rank].bursts, int(shown[0]), int(shown[-1])).clock.error(shown)
        assert np.abs(shown - true).max() > 10**9
        assert (np.abs(np.sort(start[events.rank == rank]) - true) <= stated + 2e3).all()


def test_a_file_that_cannot_be_closed_leaves_no_worker_behind(tmp_path, monkeypatch):
    class Full:
        def close(self):
            raise OSError(122, "Disk quota exceeded")

    written = RoundsFile(tmp_path, 0)
    written._file = Full()
    written.close()
    written.close()

    def broken(self):
        raise RuntimeError("broken")

    ended = []
    fleet = Skewed(Shifted(0, 0.0))
    monkeypatch.setattr(fleet, "close", lambda kill: ended.append(kill))
    monkeypatch.setattr(Clocks, "close", broken)
    for error in (None, KeyError("x")):
        cluster = Cluster(fleet, 60)
        cluster.trace(tmp_path, 0)
        with pytest.raises(RuntimeError), cluster:
            if error:
                raise error
    assert ended == [False, False]
