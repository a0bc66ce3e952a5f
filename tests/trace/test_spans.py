"""Spans: nesting, totals, threads, exceptions, forks; and the price of one."""

import math
import os
import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.work import work_of
from tilth.analysis.read import read_events
from tilth.core.errors import StorageError
from tilth.trace import Recorder, recorder, span, traced
from tilth.trace import spans as spans_module
from tilth.trace.spans import in_phase


@pytest.fixture(autouse=True)
def fresh():
    recorder.totals()
    yield
    assert not recorder.recording
    recorder.totals()


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_totals_without_a_recorder():
    for n in (3, 4):
        with span("generate", tokens=n, bytes=10, flops=0.5):
            pass
    total = recorder.totals()["generate"]
    assert (total.count, total.tokens, total.bytes, total.flops) == (2, 7, 20, 1.0)
    assert total.seconds > 0


def test_reset_and_no_reset():
    with span("a"):
        pass
    assert recorder.totals(reset=False)["a"].count == 1
    with span("a"):
        pass
    assert recorder.totals()["a"].count == 2
    assert recorder.totals() == {}
    with span("b"):
        pass
    assert list(recorder.totals()) == ["b"]


def test_own_time_leaves_out_the_spans_inside():
    with span("outer") as outer:
        busy(0.002)
        with span("inner") as inner:
            busy(0.004)
    totals = recorder.totals()
    assert outer.seconds >= inner.seconds + 0.002
    assert totals["inner"].self_seconds == pytest.approx(inner.seconds)
    assert totals["outer"].self_seconds == pytest.approx(outer.seconds - inner.seconds, abs=1e-8)


def test_step_and_micro_batch_come_from_outside():
    with span("step", step=7, micro_batch=2) as outer, span("a") as a:
        with span("b", step=9) as b, span("c") as c:
            pass
    assert [(s.step, s.micro_batch, s.depth) for s in (outer, a, b, c)] == [(7, 2, 0), (7, 2, 1), (9, 2, 2), (9, 2, 3)]
    with span("alone") as alone:
        pass
    assert (alone.step, alone.micro_batch, alone.depth) == (-1, -1, 0)


def test_time_inside_two_phases_belongs_to_the_outer_one():
    with span("step") as step:
        with span("generate", tokens=3) as first, span("decode"), span("generate", tokens=3):
            busy(0.001)
        with span("evaluate", tokens=5) as evaluate, span("generate", tokens=7) as hidden:
            busy(0.001)
    totals = recorder.totals()
    assert totals["generate"].phase_seconds == pytest.approx(first.seconds)
    assert totals["generate"].phase_tokens == 3 and totals["generate"].tokens == 13
    assert totals["evaluate"].phase_seconds == pytest.approx(evaluate.seconds)
    assert evaluate.seconds > hidden.seconds > 0.001
    assert totals["decode"].phase_seconds == totals["step"].phase_seconds == 0
    assert sum(t.phase_seconds for t in totals.values()) <= step.seconds


def test_set_inside_changes_only_what_is_given():
    with span("a", tokens=1, bytes=2, flops=3) as s:
        s.set(tokens=10)
        s.set(flops=30.0)
    total = recorder.totals()["a"]
    assert (total.tokens, total.bytes, total.flops) == (10, 2, 30.0)


def test_an_exception_passes_and_leaves_the_nesting_right():
    with pytest.raises(KeyError), span("outer"), span("inner"):
        raise KeyError("x")
    with span("next") as after:
        pass
    assert after.depth == 0
    assert {op: t.count for op, t in recorder.totals().items()} == {"outer": 1, "inner": 1, "next": 1}


def test_decorator_keeps_the_function():
    @traced("score")
    def add(a: int, *, b: int) -> int:
        """Adds."""
        return a + b

    assert add(1, b=2) == 3 and add.__name__ == "add" and add.__doc__ == "Adds."
    with pytest.raises(TypeError):
        add(1, b="x")
    assert recorder.totals()["score"].count == 2


def test_a_span_left_open_by_a_generator_does_not_disturb_the_next():
    def rows():
        with span("generate"):
            yield 1
            yield 2

    with span("step"):
        stream = rows()
        next(stream)
    stream.close()
    with span("next") as after:
        pass
    assert after.depth == 0
    assert recorder.totals()["generate"].count == 1


def test_threads_nest_each_on_their_own_and_no_count_is_lost():
    def work() -> None:
        for _ in range(500):
            with span("w", tokens=1), span("in"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    counted = tokens = 0
    with span("main"):
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            totals = recorder.totals()  # resets race with the work
            counted += totals["in"].count if "in" in totals else 0
            tokens += totals["w"].tokens if "w" in totals else 0
        for t in threads:
            t.join()
    totals = recorder.totals()
    counted += totals["in"].count if "in" in totals else 0
    tokens += totals["w"].tokens if "w" in totals else 0
    assert (counted, tokens) == (4000, 4000)
    assert totals["main"].self_seconds == pytest.approx(totals["main"].seconds)


def test_ended_threads_are_folded_away():
    def work() -> None:
        with span("short"):
            pass

    recorder.totals()
    before = len(recorder._threads)
    for _ in range(50):
        t = threading.Thread(target=work)
        t.start()
        t.join()
    assert recorder.totals()["short"].count == 50
    assert len(recorder._threads) <= before and not recorder._left


trees = st.recursive(st.just([]), lambda kids: st.lists(kids, max_size=4), max_leaves=20)


@settings(max_examples=examples(50), deadline=None)
@given(trees)
def test_own_times_sum_to_the_root(tree):
    recorder.totals()

    def walk(node: list, depth: int) -> None:
        with span(f"op{depth % 3}"):
            for child in node:
                walk(child, depth + 1)

    with span("root") as root:
        walk(tree, 0)
    totals = recorder.totals()
    assert sum(t.self_seconds for t in totals.values()) == pytest.approx(root.seconds, abs=1e-9)
    assert min(t.self_seconds for t in totals.values()) >= 0


def test_a_forked_child_does_not_write_into_the_parents_events(tmp_path):
    with recorder.to(tmp_path, interval=60):
        child = os.fork()
        if child == 0:
            with span("child"):
                pass
            os._exit(0 if not recorder.recording else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert recorder.recording


def test_a_new_recorder_is_independent_of_time():
    assert Recorder().totals() == {}


def test_work_of_a_span(tmp_path):
    def price(n: int) -> int:
        def spans() -> None:
            for _ in range(n):
                with span("a", step=3, tokens=5):
                    pass

        return work_of(spans)

    idle = price(200)
    with recorder.to(tmp_path):
        recording = price(200)
    assert idle < 200 * 60 and recording < 200 * 100


def test_what_is_asked_inside_a_phase_is_part_of_it():
    assert not in_phase()
    with span("step"):
        assert not in_phase()
        with span("evaluate"), span("anything"):
            assert in_phase()
    assert not in_phase()


def test_parts_grow_with_the_run(monkeypatch):
    """Three days of it on a clock of its own: how many parts there are, and how much time a kill may cost."""
    now, written = [0.0], []

    class Sleep:
        def get(self, timeout):
            now[0] += timeout
            writing.recording = now[0] < 3 * 86_400

    monkeypatch.setattr(spans_module.time, "monotonic", lambda: now[0])
    writing = Recorder()
    writing.recording, writing._wake = True, Sleep()
    writing._write = lambda: written.append(now[0])
    writing._run(2.0)
    pauses = np.diff([0.0, *written])
    assert pauses.min() == 2 and round(pauses.max(), 6) == 600
    assert (pauses <= np.maximum(2.0, 0.01 * np.array(written)) + 1e-6).all(), "of the time so far at most 1 %"
    assert 600 < sum(at <= 12 * 3600 for at in written) < 700
    assert 140 < sum(2 * 86_400 < at <= 3 * 86_400 for at in written) < 150


@pytest.mark.parametrize("wrong", [None, math.inf, -math.inf, math.nan, "many"])
def test_an_amount_that_is_no_number_is_none_and_ends_no_run(tmp_path, wrong):
    with recorder.to(tmp_path, interval=60):
        with span("generate", tokens=wrong, bytes=wrong, flops=wrong, squares=wrong):
            pass
        with span("update") as update:
            update.tokens = update.bytes = update.flops = update.squares = wrong
        with span("generate", tokens=3, bytes=4, flops=5.0, squares=6):
            pass
    total = recorder.totals()["generate"]
    assert (total.count, total.tokens, total.phase_tokens, total.bytes, total.flops) == (2, 3, 3, 4, 5.0)
    assert recorder.totals() == {}
    with span("generate", tokens=7, flops=1.5):
        pass
    total = recorder.totals()["generate"]
    assert (total.tokens, total.flops) == (7, 1.5), "nor are the sums that come later spoilt"
    rows = [tuple(r[n] for n in ("tokens", "bytes", "flops", "squares")) for r in read_events(tmp_path).to_pylist()]
    assert rows == [(0, 0, 0.0, 0), (0, 0, 0.0, 0), (3, 4, 5.0, 6)]


def test_events_wait_for_a_disk_that_comes_back(tmp_path):
    recorder.start(tmp_path / "events", interval=60)
    for number in range(3):
        with span(f"a{number}"):
            pass
        if number < 2:
            (tmp_path / "events").rename(tmp_path / "away") if not number else None
            with pytest.raises(StorageError):
                recorder.flush()
    (tmp_path / "away").rename(tmp_path / "events")
    assert recorder.conclude() == "" and not recorder.dropped
    assert read_events(tmp_path)["op"].to_pylist() == ["a0", "a1", "a2"]


def test_what_could_not_be_written_is_told_in_a_line_and_hides_no_error(tmp_path):
    def lost():
        with span("a"):
            pass
        shutil.rmtree(tmp_path / "events")

    recorder.start(tmp_path / "events", interval=60)
    lost()
    told = recorder.conclude()
    assert "1 events were dropped" in told and "cannot write" in told and str(tmp_path) in told
    assert recorder.conclude() == "" and not recorder.recording
    with pytest.raises(KeyError) as caught, recorder.to(tmp_path / "events", interval=60):
        lost()
        raise KeyError("its own")
    assert "cannot write" in caught.value.__notes__[0]
    with pytest.raises(StorageError), recorder.to(tmp_path / "events", interval=60):
        lost()
