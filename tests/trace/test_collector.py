"""Garbage collection: each one is a span of the thread that ran it; planned ones happen when they are asked for."""

import gc
import os
import subprocess
import threading
import weakref

import pytest

from tests import forked
from tests.flows import tiny
from tilth.analysis.events import load
from tilth.trace import recorder, span
from tilth.trace.collector import Collector, collector


@pytest.fixture(autouse=True)
def as_it_was():
    recorder.totals()
    gc.freeze()  # to look at all that pytest holds takes a second each time
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    yield
    assert not collector.watching and not collector.planned and not ears()
    assert gc.isenabled() == enabled and gc.get_freeze_count() <= frozen
    gc.freeze()


def ears() -> int:
    """Collectors that Python tells of its collections."""
    return sum(isinstance(getattr(told, "__self__", None), Collector) for told in gc.callbacks)


class Knot:
    """An object that only a collection frees."""

    def __init__(self):
        self.self = self


def tied() -> weakref.ref:
    return weakref.ref(Knot())


def pauses(folder):
    """Rank, step, generation and enclosing operation of each collection in a run's events."""
    events = load(folder)
    rows = events.op.is_("gc").nonzero()[0]
    names = [events.op.text(p) if p >= 0 else "" for p in events.parent[rows]]
    return list(zip(events.rank[rows].tolist(), events.step[rows].tolist(), map(events.detail.text, rows), names))


def test_each_collection_is_a_span_inside_what_it_interrupted(tmp_path):
    gc.disable()
    try:
        with recorder.to(tmp_path, interval=60), collector.to(), span("step", step=4):
            with span("update") as update:
                gc.collect(0)
            gc.collect()
    finally:
        gc.enable()
    assert pauses(tmp_path) == [(0, 4, "0", "update"), (0, 4, "2", "step")]
    totals = recorder.totals()
    assert totals["gc"].count == 2
    assert totals["update"].self_seconds < update.seconds  # the pause is not its own time


def test_a_collection_of_python_itself_is_one_in_the_thread_that_it_stopped(tmp_path):
    def work() -> None:
        with span("score"):
            kept = [[] for _ in range(2 * gc.get_threshold()[0])]
        assert kept

    with recorder.to(tmp_path, interval=60), collector.to():
        thread = threading.Thread(target=work, name="scorer")
        thread.start()
        thread.join()
    events = load(tmp_path)
    mine = events.op.is_("gc") & events.thread.is_("scorer")
    assert mine.any() and all(events.op.text(p) == "score" for p in events.parent[mine])


def test_it_can_come_anywhere_while_spans_are_made(tmp_path):
    """A collection at every object that is made: in spans, in their events, in a thread that has no name yet."""
    before = gc.get_threshold()

    def work() -> None:
        for i in range(20):
            with span("outer", step=i), span("inner"):
                pass

    with recorder.to(tmp_path, interval=60), collector.to():
        gc.set_threshold(1, 10**6, 10**6)
        try:
            threads = [threading.Thread(target=work, name=name) for name in ("one", "two")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            gc.set_threshold(*before)
    events = load(tmp_path)
    for op in ("outer", "inner"):
        rows = events.op.is_(op)
        for name in ("one", "two"):
            assert events.step[rows & events.thread.is_(name)].tolist() == list(range(20))
        assert (events.own[rows] >= 0).all()
    assert events.op.is_("gc").sum() > 40
    inside = events.parent >= 0
    parent = events.parent[inside]
    assert (events.start[parent] <= events.start[inside]).all() and (events.end[inside] <= events.end[parent]).all()


def test_planned_collections_only():
    frozen = gc.get_freeze_count()
    mine = [[] for _ in range(2000)]
    with collector.to(planned=True):
        assert mine and not gc.isenabled() and gc.get_freeze_count() > frozen + 1000
        recorder.totals()
        knot = tied()
        [[] for _ in range(5 * gc.get_threshold()[0])]
        assert knot() is not None and "gc" not in recorder.totals()
        collector.collect()
        assert knot() is None and recorder.totals()["gc"].count == 1
    assert gc.isenabled() and not gc.get_freeze_count()


def test_the_plan_may_change_and_what_was_off_stays_off():
    code = "from tests.trace.test_collector import changes; changes()"  # not here: it would look at all of pytest
    subprocess.run([*forked.python(), "-c", code], check=True)


def changes():
    gc.disable()
    one = Collector()
    try:
        one.start()
        gc.unfreeze()
        one.start(planned=True)
        one.start(planned=True)
        assert one.planned and gc.get_freeze_count() and ears() == 1
        one.start()
        assert not one.planned and not gc.get_freeze_count()
        one.stop()
        one.stop()
        assert not gc.isenabled() and not ears()
    finally:
        one.stop()
        gc.enable()


def test_a_forked_child_collects_as_any_other_process():
    with collector.to(planned=True):
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() and not ears() and not gc.get_freeze_count() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled() and collector.watching


def test_a_run_collects_at_its_steps_and_learns_the_same(tmp_path):
    """Every third step a whole collection, none between; results are those of a run that is left alone."""
    sections = {"supervised": {"steps": 2}, "algorithm": {"steps": 4}}
    plain = tiny.run(tiny.recipe(tmp_path / "plain", **sections))
    planned = tiny.run(tiny.recipe(tmp_path / "planned", **sections, run={"collect_every": 3}))
    assert tiny.numbers(plain.directory) == tiny.numbers(planned.directory)
    assert [p for p in pauses(planned.directory) if p[1] >= 0] == [(0, 3, "2", "call"), (0, 6, "2", "call")]
    assert all(generation != "2" or op != "call" for _, _, generation, op in pauses(plain.directory))
