"""What is written for Perfetto, beside the rules of the trace event format."""

import gzip
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.analysis import perfetto
from tilth.analysis.events import Coded, Events
from tilth.analysis.perfetto import BEGIN, END, Counter, calls, communications, export, nested
from tilth.core.errors import StorageError
from tilth.trace.ops import kind


def made(rows, controller=2):
    """Events of dictionaries: rank, op, start, duration and what else is not its default."""
    usual = {
        "rank": 0, "parent": -1, "start": 0, "duration": 0, "step": 0, "micro_batch": -1, "seq": -1, "tokens": 0,
        "squares": 0, "bytes": 0, "flops": 0.0, "op": "forward", "detail": "", "role": "", "place": "",
        "thread": "MainThread", "device_start": -1, "device_duration": -1,
    }  # fmt: skip
    rows = sorted(({**usual, **row} for row in rows), key=lambda row: row["start"])
    for row in rows:
        row["kind"] = kind(row["op"])
        row["own"] = row["duration"]
    texts = ("op", "kind", "detail", "role", "place", "thread")
    numbers = {n: np.array([row[n] for row in rows], np.int64) for n in (*usual, "own") if n not in (*texts, "flops")}
    return Events(1, controller, **numbers, flops=np.array([row["flops"] for row in rows], float), **{
        name: coded([row[name] for row in rows]) for name in texts
    })  # fmt: skip


def coded(texts):
    names = tuple(dict.fromkeys(texts))
    return Coded(np.array([names.index(text) for text in texts], np.int32), names)


def written(events, path, **kwargs):
    found = export(events, path, **kwargs)
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        trace = json.load(file, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found.bytes == path.stat().st_size and not list(path.parent.glob(".*"))
    check(trace)
    return trace["traceEvents"]


def ns(us):
    """Whole ns of a time in us; fails where it is not one of three decimals."""
    assert us == round(us, 3)
    return round(us * 1000)


def check(trace):
    """The rules of the format and what Perfetto makes of it."""
    events = trace["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert all(e["ph"] in "XMCstf" for e in events)
    tracks = {}
    for e in events:
        assert e["pid"] in processes and e["pid"] > 0
        if e["ph"] == "X":
            assert (e["pid"], e["tid"]) in named and e["name"] and e["cat"] and ns(e["dur"]) >= 0
            tracks.setdefault((e["pid"], e["tid"]), []).append((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])))
        elif e["ph"] == "C":
            assert all(isinstance(v, float) and math.isfinite(v) for v in e["args"].values()) and e["args"]
    tids = [tid for _, tid in named]
    assert len(set(tids)) == len(tids), "a thread's number is its own on the whole machine"
    for spans in tracks.values():
        stack = []
        for start, end in spans:  # in the order of the file: Perfetto sorts by time, and keeps that order otherwise
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], "spans of a track lie within one another or apart"
            stack.append(end)
        assert [s for s, _ in spans] == sorted(s for s, _ in spans)
    flows = {}
    for e in events:
        if e["ph"] in "stf":
            assert e["bp"] == "e" and e["name"] and e["cat"]
            at = ns(e["ts"])
            assert any(s <= at and (at < t or s == t) for s, t in tracks[e["pid"], e["tid"]]), "an arrow needs a span"
            flows.setdefault(e["id"], []).append((at, e["ph"], e["cat"], e["name"]))
    for points in flows.values():
        assert "".join(p[1] for p in points) == "s" + "t" * (len(points) - 2) + "f"
        assert [p[0] for p in points] == sorted(p[0] for p in points)
        assert len({p[2:] for p in points}) == 1


CALLED = [
    {"rank": 2, "op": "step", "start": 0, "duration": 1000, "step": 3},
    {"rank": 2, "op": "submit", "start": 10, "duration": 5, "seq": 7, "detail": "policy.update", "step": 3},
    {"rank": 2, "op": "await", "start": 400, "duration": 300, "seq": 7, "detail": "policy.update", "step": 3},
    {"rank": 0, "op": "call", "start": 20, "duration": 600, "seq": 7, "detail": "policy.update", "role": "policy",
     "place": "dp=0", "step": 3},
    {"rank": 1, "op": "call", "start": 30, "duration": 650, "seq": 7, "detail": "policy.update", "role": "policy",
     "place": "dp=1", "step": 3},
    {"rank": 0, "op": "all_reduce", "start": 100, "duration": 250, "seq": 0, "detail": "0,1", "bytes": 64, "step": 3},
    {"rank": 1, "op": "all_reduce", "start": 300, "duration": 55, "seq": 0, "detail": "0,1", "bytes": 64, "step": 3},
    {"rank": 0, "op": "forward", "start": 30, "duration": 20, "tokens": 9, "squares": 81, "flops": 1.5,
     "micro_batch": 0},
]  # fmt: skip


def test_a_step_with_two_ranks(tmp_path):
    counter = Counter("memory/rss", "bytes", np.array([1500]), np.array([2.0]))
    found = written(made(CALLED), tmp_path / "x.json", counters=[counter], about={"run": "a"})
    spans = {(e["pid"], e["name"]): e for e in found if e["ph"] == "X"}
    assert spans[1, "call policy.update"] == {
        "ph": "X", "name": "call policy.update", "cat": "call", "pid": 1, "tid": spans[1, "forward"]["tid"], "ts": 0.02,
        "dur": 0.6, "args": {"detail": "policy.update", "role": "policy", "place": "dp=0", "step": 3, "seq": 7},
    }  # fmt: skip
    assert spans[1, "forward"]["args"] == {"step": 0, "micro_batch": 0, "tokens": 9, "squares": 81, "flops": 1.5}
    assert spans[2, "all_reduce"]["args"] == {"detail": "0,1", "step": 3, "seq": 0, "bytes": 64}
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1", 3: "controller"}
    labels = {e["pid"]: e["args"]["labels"] for e in found if e["name"] == "process_labels"}
    assert labels == {1: "policy dp=0", 2: "policy dp=1", 3: ""}
    flows = [(e["id"], e["ph"], e["pid"], e["ts"], e["name"]) for e in found if e["ph"] in "stf"]
    assert flows == [
        (0, "s", 3, 0.01, "call"), (0, "t", 1, 0.02, "call"), (0, "f", 3, 0.699, "call"),
        (1, "s", 3, 0.01, "call"), (1, "t", 2, 0.03, "call"), (1, "f", 3, 0.699, "call"),
        (2, "s", 1, 0.1, "communication"), (2, "f", 2, 0.3, "communication"),
    ]  # fmt: skip
    assert [e for e in found if e["ph"] == "C"] == [
        {"ph": "C", "name": "memory/rss", "pid": 3, "tid": 0, "ts": 1.5, "args": {"bytes": 2.0}}
    ]


def test_what_a_device_did_is_on_tracks_of_its_own(tmp_path):
    rows = [
        {"rank": 1, "op": "forward", "start": 0, "duration": 5, "device_start": 8, "device_duration": 100},
        {"rank": 1, "op": "backward", "start": 5, "duration": 5, "device_start": 108, "device_duration": 100},
        {"rank": 1, "op": "all_reduce", "start": 6, "duration": 2, "device_start": 150, "device_duration": 100},
        {"rank": 0, "op": "forward", "start": 7, "duration": 5, "device_start": 20, "device_duration": 0},
        {"rank": 0, "op": "gc", "start": 7, "duration": 1},
    ]  # fmt: skip
    found = written(made(rows), tmp_path / "x.json")
    names = {e["tid"]: (e["pid"], e["args"]["name"]) for e in found if e["name"] == "thread_name"}
    device = [(*names[e["tid"]], e["name"], ns(e["ts"]), ns(e["dur"])) for e in found if e.get("cat") == "device"]
    assert device == [
        (2, "device", "forward", 8, 100), (1, "device", "forward", 20, 0), (2, "device", "backward", 108, 100),
        (2, "device (2)", "all_reduce", 150, 100),
    ]  # fmt: skip
    assert sum(e["ph"] == "X" for e in found) == len(rows) + 4


def test_a_call_nobody_awaits_and_one_whose_clock_is_a_little_wrong():
    lazy = [row for row in CALLED if row["op"] != "await"]
    found = calls(made(lazy))
    assert found.count == 2 and found.place.tolist() == [BEGIN, END] * 2
    early = [{**row, "start": 5} if row["op"] == "call" else row for row in CALLED]
    found = calls(made(early))
    assert found.at.tolist() == [10, 10, 699] * 2, "it begins where it was submitted at the earliest"
    over = [{**row, "start": 2, "duration": 3} if row["op"] == "call" else row for row in CALLED]
    assert calls(made(over)).count == 2 and len(calls(made(over)).row) == 4, "over before it was submitted: left out"
    answered = [{**row, "start": 12, "duration": 4} if row["op"] == "await" else row for row in CALLED]
    assert calls(made(answered)).place.tolist() == [BEGIN, END] * 2


def test_communications():
    rows = [
        {"rank": 0, "op": "send", "start": 10, "duration": 5, "detail": "0>1", "seq": 0},
        {"rank": 1, "op": "receive", "start": 2, "duration": 15, "detail": "0>1", "seq": 0},
        {"rank": 0, "op": "broadcast", "start": 50, "duration": 5, "detail": "0,1,3", "seq": 0},
        {"rank": 3, "op": "broadcast", "start": 40, "duration": 5, "detail": "0,1,3", "seq": 0},
        {"rank": 1, "op": "broadcast", "start": 45, "duration": 5, "detail": "0,1,3", "seq": 0},
        {"rank": 0, "op": "all_gather", "start": 60, "duration": 5, "detail": "0,1", "seq": 5},
        {"rank": 0, "op": "all_gather", "start": 70, "duration": 5, "detail": "0", "seq": 0},
    ]
    events = made(rows)
    found = communications(events)
    path = [(events.op.text(r), int(events.rank[r]), at) for r, at in zip(found.row, found.at.tolist())]
    assert path == [
        ("broadcast", 3, 40), ("broadcast", 1, 45), ("broadcast", 0, 50), ("send", 0, 10), ("receive", 1, 16),
    ]  # fmt: skip
    assert found.count == 2


def test_one_process_has_no_controller_and_no_arrows(tmp_path):
    found = written(
        made([{"op": "step"}, {"op": "call", "seq": 0, "detail": "a.b"}], controller=0), tmp_path / "x.json"
    )
    assert [e["args"]["name"] for e in found if e["name"] == "process_name"] == ["rank 0"]
    assert not [e for e in found if e["ph"] in "stf"]


def test_compressed_by_name_and_the_same(tmp_path):
    a = written(made(CALLED), tmp_path / "x.json")
    assert written(made(CALLED), tmp_path / "x.json.gz") == a
    assert (tmp_path / "x.json.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_any_text_is_json(tmp_path):
    rows = [{"detail": '"\n\\ü\u2028', "thread": 'a"b', "role": "</script>", "op": "call", "seq": 1}]
    found = written(made(rows, controller=0), tmp_path / "x.json")
    assert found[-1]["args"]["detail"] == rows[0]["detail"] and found[-1]["name"] == "call " + rows[0]["detail"]


def test_spans_that_overlap_go_on_another_track(tmp_path):
    rows = [{"start": 0, "duration": 10}, {"start": 5, "duration": 10}, {"start": 6, "duration": 2}, {"start": 20}]
    found = written(made(rows, controller=0), tmp_path / "x.json")
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["MainThread", "MainThread (2)"]
    spans = [names[e["tid"]] for e in found if e["ph"] == "X"]
    assert spans == ["MainThread", "MainThread (2)", "MainThread", "MainThread"]
    assert nested(np.array([0, 0, 0, 9]), np.array([10, 10, 9, 12])).tolist() == [0, 0, 0, 1]
    assert nested(np.zeros(0), np.zeros(0)).tolist() == []


def test_numbers_that_are_none_are_no_counters(tmp_path):
    counter = Counter("x", "s", np.arange(4), np.array([1.0, np.nan, np.inf, 2.0]))
    found = written(made(CALLED), tmp_path / "x.json", counters=[counter])
    assert [e["args"] for e in found if e["ph"] == "C"] == [{"s": 1.0}, {"s": 2.0}]


def test_a_file_that_cannot_be_written(tmp_path):
    with raises(StorageError, "x.json"):
        export(made(CALLED), tmp_path / "none" / "x.json")
    (tmp_path / "folder.json").mkdir()
    with raises(StorageError, "folder.json.type"):
        export(made(CALLED), tmp_path / "folder.json")
    assert os.listdir(tmp_path) == ["folder.json"]


def test_chunks_are_one_file(tmp_path, monkeypatch):
    whole = written(made(CALLED), tmp_path / "x.json")
    monkeypatch.setattr(perfetto, "CHUNK", 3)
    assert written(made(CALLED), tmp_path / "y.json") == whole


ops = st.sampled_from(["step", "call", "submit", "await", "all_reduce", "send", "receive", "forward", "gc"])
rows = st.lists(
    st.fixed_dictionaries({
        "rank": st.integers(0, 2), "op": ops, "start": st.integers(0, 60), "duration": st.integers(0, 40),
        "seq": st.integers(-1, 3), "detail": st.sampled_from(["", "0,1", "0>1", "a.b"]),
        "thread": st.sampled_from(["MainThread", "other"]), "step": st.integers(-1, 2),
        "device_start": st.integers(-1, 40), "device_duration": st.integers(0, 9),
    }), min_size=1, max_size=40,
)  # fmt: skip


@settings(max_examples=examples(80), deadline=None)
@given(rows)
def test_whatever_was_recorded_the_file_keeps_the_rules(tmp_path_factory, rows):
    events = made(rows)
    found = written(events, tmp_path_factory.mktemp("any") / "x.json")
    spans = sorted((e["pid"] - 1, ns(e["ts"]), ns(e["dur"])) for e in found if e["ph"] == "X" and e["cat"] != "device")
    assert spans == sorted(zip(events.rank.tolist(), events.start.tolist(), events.duration.tolist()))


def test_a_link_is_written_through_and_a_device_is_refused(tmp_path):
    (tmp_path / "target.json").write_text("old")
    (tmp_path / "link.json").symlink_to("target.json")
    assert export(made(CALLED), tmp_path / "link.json").bytes == (tmp_path / "target.json").stat().st_size > 100
    assert (tmp_path / "link.json").is_symlink()
    os.mkfifo(tmp_path / "pipe.json")
    with raises(StorageError, "pipe.json.type"):
        export(made(CALLED), tmp_path / "pipe.json")
