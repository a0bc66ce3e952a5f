"""Spans over a profile: at their time, in lanes of their own, of the capture alone, in a trace that stays valid."""

import gzip
import json
import os
import threading
import time

import numpy as np
import pytest
import torch

from tests.errors import raises
from tilth.core.errors import DataError
from tilth.trace import capture
from tilth.trace.capture import Capture, ClockMark, head_with_spans
from tilth.trace.spans import recorder, span

BASE = 1_700_000_000_000_000_000
HEAD = (
    b'{\n "schemaVersion": 1,\n "baseTimeNanoseconds": %d,\n "traceEvents": [\n  {"ph": "M", "name": "x"}], "end": 1}'
    % BASE
)


@pytest.fixture
def events(tmp_path):
    """Where this process writes its spans, as rank 3."""
    with recorder.to(tmp_path / "events", rank=3):
        yield tmp_path / "events"
    recorder.totals()


def work(pause=0.02):
    time.sleep(pause)
    torch.ones(24, 24) @ torch.ones(24, 24)
    time.sleep(pause)


def read(path):
    with gzip.open(path) as file:
        return json.load(file)


def spans(found):
    return [e for e in found["traceEvents"] if e.get("cat") == "span"]


def inside(inner, outer):
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_spans_lie_over_the_operations_inside_them_in_time(events, tmp_path):
    taken = Capture()
    with span("update", step=4):
        taken.start()
        with span("forward", micro_batch=2, tokens=48, flops=1e6):
            work()
        with span("backward"):
            work()
        made = taken.stop(str(tmp_path / "a"), str(events), 3)
    assert made.error == ""
    found = read(made.path)
    shown = {e["name"]: e for e in spans(found)}
    assert set(shown) == {"forward", "backward"}  # update had begun before
    assert shown["forward"]["args"] == {"step": 4, "micro_batch": 2, "tokens": 48, "flops": 1e6}
    products = sorted((e for e in found["traceEvents"] if e["name"] == "aten::mm"), key=lambda e: e["ts"])
    assert [inside(p, shown[n]) for p, n in zip(products, ("forward", "backward"))] == [True, True]
    assert not inside(products[0], shown["backward"]) and shown["forward"]["dur"] >= 40_000


def test_each_thread_has_a_lane_with_its_name_apart_from_those_of_the_operations(events, tmp_path):
    taken = Capture()
    taken.start()
    other = threading.Thread(target=lambda: work_in("save.write"), name="writer")

    def work_in(name):
        with span(name):
            work(0.001)

    other.start()
    other.join()
    work_in("forward")
    found = read(taken.stop(str(tmp_path / "a"), str(events), 3).path)["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name" and "spans" in e["args"]["name"]}
    by_name = {e["name"]: (lanes[e["tid"]], e["pid"]) for e in found if e.get("cat") == "span"}
    assert by_name == {
        "save.write": ("spans of writer", os.getpid()),
        "forward": ("spans of MainThread", os.getpid()),
    }
    assert not {e["tid"] for e in found if e.get("cat") == "cpu_op"} & set(lanes)


def test_only_spans_of_the_capture_and_of_this_rank(events, tmp_path):
    with span("before"):
        pass
    recorder.flush()
    taken = Capture()
    taken.start()
    with span("within"):
        work(0)
    assert [e["name"] for e in spans(read(taken.stop(str(tmp_path / "a"), str(events), 3).path))] == ["within"]
    taken.start()
    with span("later"):
        work(0)
    assert [e["name"] for e in spans(read(taken.stop(str(tmp_path / "b"), str(events), 3).path))] == ["later"]
    taken.start()
    with span("again"):
        work(0)
    assert spans(read(taken.stop(str(tmp_path / "c"), str(events), 4).path)) == []


@pytest.mark.parametrize("folder", ["", "events"])
def test_without_a_recorder_there_is_the_profile_alone(tmp_path, folder):
    taken = Capture()
    taken.start()
    with span("forward"):
        work(0)
    made = taken.stop(str(tmp_path / "a"), folder and str(tmp_path / folder))
    assert made.error == "" and spans(read(made.path)) == []
    recorder.totals()


def test_times_are_those_of_the_system_clock_as_it_was_at_the_mark(events):
    """A clock that was set by an hour after the recorder began: the profiler goes by the new time."""
    hour = 3_600_000_000_000
    with span("forward") as made:
        pass
    start = made.start + recorder.epoch
    since = ClockMark(start + hour - 1, hour)
    recorder.flush()
    for path in events.iterdir():
        os.utime(path, ns=(since.at, since.at))
    found = json.loads(head_with_spans(HEAD, events, 3, since))
    (shown,) = spans(found)
    assert shown["ts"] == pytest.approx((start + hour - BASE) / 1000)
    assert shown["dur"] == pytest.approx(made.duration / 1000)


def test_files_that_were_written_before_are_not_even_read(events):
    with span("forward"):
        pass
    recorder.flush()
    (path,) = events.iterdir()
    path.write_bytes(b"torn")
    os.utime(path, ns=(0, 0))
    assert spans(json.loads(head_with_spans(HEAD, events, 3, ClockMark.now()))) == []


def test_the_rest_of_the_trace_is_as_it_was(events):
    since = ClockMark.now()
    for _ in range(3):
        with span("forward", step=np.int64(7)):
            pass
    found = json.loads(head_with_spans(HEAD, events, 3, since))
    assert found["end"] == 1 and found["schemaVersion"] == 1
    assert found["traceEvents"][-1] == {"ph": "M", "name": "x"} and len(spans(found)) == 3


@pytest.mark.parametrize(
    ("head", "missing"),
    [(b"", "traceEvents"), (b"{}", "traceEvents"), (b'{"traceEvents": [', "baseTimeNanoseconds"),
     (b'{"baseTimeNanoseconds": 5, "events": []}', "traceEvents")],
)  # fmt: skip
def test_a_trace_of_another_form_is_refused(tmp_path, head, missing):
    with raises(DataError, missing):
        head_with_spans(head, tmp_path, 0, ClockMark(0, 0))


def test_the_mark_is_as_far_from_the_recorders_clock_as_the_clocks_have_drifted(events, monkeypatch):
    assert abs(ClockMark.now().shift) < 50_000_000
    monkeypatch.setattr(capture.time, "time_ns", lambda: BASE)
    assert ClockMark.now().at == BASE
