"""The event table: what comes back, what a kill or a full disk leaves, and where the time went."""

import os
import subprocess
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import forked
from tests.errors import raises
from tests.examples import examples
from tests.patience import patience
from tilth.analysis.read import COLUMNS, attempts, breakdown, parents, parts, read_events, self_times
from tilth.core.errors import DataError, StorageError
from tilth.trace import buffer as buffer_module
from tilth.trace import recorder, span
from tilth.trace import spans as spans_module
from tilth.trace.writer import EVENTS


def record(folder, *ops, rank=0, attempt=0):
    with recorder.to(folder, rank=rank, attempt=attempt, interval=60):
        for op in ops:
            with span(op):
                pass


def test_round_trip(tmp_path):
    before = time.time_ns()
    with recorder.to(tmp_path, rank=3, attempt=2, interval=60):
        with span("step", step=5, tokens=7) as outer, span("train", micro_batch=1, bytes=8, flops=1e12) as inner:
            pass
    table = read_events(tmp_path)
    assert table.schema.equals(COLUMNS) and table.cast(EVENTS).to_pylist() == table.to_pylist()
    train, step = table.to_pylist()
    assert step == {
        "attempt": 2, "rank": 3, "id": outer.id, "parent": -1, "depth": 0, "op": "step", "detail": "", "seq": -1,
        "role": "", "place": "", "step": 5, "micro_batch": -1, "start": step["start"], "duration": outer.duration,
        "tokens": 7, "squares": 0, "bytes": 0, "flops": 0.0,
        "thread": "MainThread", "device_start": None, "device_duration": None,
    }  # fmt: skip
    assert (train["parent"], train["step"], train["bytes"], train["flops"]) == (outer.id, 5, 8, 1e12)
    assert train["start"] - step["start"] == inner.start - outer.start
    assert before - 1e9 < step["start"] < time.time_ns() + 1e9


def test_parts_follow_one_another_and_a_second_start_continues_the_numbers(tmp_path):
    record(tmp_path, "a")
    record(tmp_path, "b")
    record(tmp_path, "c", rank=1)
    assert sorted(os.listdir(tmp_path)) == [
        "attempt-0-rank-0-000001.parquet", "attempt-0-rank-0-000002.parquet", "attempt-0-rank-1-000001.parquet",
    ]  # fmt: skip
    assert read_events(tmp_path)["op"].to_pylist() == ["a", "b", "c"]


def test_flush_makes_events_readable_while_recording(tmp_path):
    with recorder.to(tmp_path, interval=60):
        with span("a"):
            pass
        recorder.flush()
        assert read_events(tmp_path)["op"].to_pylist() == ["a"]
        with pytest.raises(RuntimeError, match="twice"):
            recorder.start(tmp_path)
    recorder.stop()


def test_background_writes_by_time_and_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr(spans_module, "WAKE", 2 * buffer_module.CHUNK)
    with recorder.to(tmp_path, interval=30):
        for _ in range(3 * buffer_module.CHUNK):
            with span("many"):
                pass
        deadline = time.time() + 5
        while not list(tmp_path.glob("*.parquet")) and time.time() < deadline:
            time.sleep(0.01)
        assert read_events(tmp_path).num_rows >= buffer_module.CHUNK
    assert read_events(tmp_path).num_rows == 3 * buffer_module.CHUNK


def test_memory_is_bounded_and_what_is_dropped_is_counted(tmp_path, monkeypatch):
    chunk = buffer_module.CHUNK
    monkeypatch.setattr(spans_module, "CAPACITY", 2 * chunk)
    recorder.totals()
    with recorder.to(tmp_path, interval=60):
        kept = flood(5 * chunk)
        assert recorder.dropped == 5 * chunk - kept > 0
        flood(0)
        recorder.flush()
        assert flood(3) == 3  # there is room again
    assert read_events(tmp_path).num_rows == kept + 3
    assert recorder.totals()["many"].count == 5 * chunk + 3
    told = [int(pq.read_schema(part).metadata[b"dropped"]) for part in sorted(tmp_path.iterdir())]
    assert told == [5 * chunk - kept] * 2


def flood(spans: int) -> int:
    """How many of so many spans were kept."""
    before = recorder.dropped
    for _ in range(spans):
        with span("many"):
            pass
    return spans - (recorder.dropped - before)


def test_spans_of_threads_carry_their_names(tmp_path):
    def work() -> None:
        with span("score"):
            pass

    with recorder.to(tmp_path, interval=60), span("main"):
        t = threading.Thread(target=work, name="scorer")
        t.start()
        t.join()
    rows = {r["op"]: r for r in read_events(tmp_path).to_pylist()}
    assert rows["score"]["thread"] == "scorer" and rows["score"]["parent"] == -1 and rows["score"]["depth"] == 0


def test_a_full_disk_is_told_at_flush_and_does_not_stop_the_spans(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    recorder.start(tmp_path / "events", interval=60)
    with monkeypatch.context() as m:
        m.setattr(pq, "write_table", full)
        with span("lost"):
            pass
        with raises(StorageError, "attempt-0-rank-0-000001.parquet"):
            recorder.flush()
    with span("kept"):
        pass
    recorder.stop()
    assert recorder.dropped == 0
    assert read_events(tmp_path / "events")["op"].to_pylist() == ["lost", "kept"]
    assert not list((tmp_path / "events").glob(".*"))


@pytest.mark.parametrize("error", [MemoryError("no room"), pa.ArrowInvalid("odd"), ValueError("odd")])
def test_the_writers_thread_outlives_any_error_of_a_batch(tmp_path, monkeypatch, error):
    failed = []

    def fails(*args, **kwargs):
        failed.append(1)
        raise error

    with recorder.to(tmp_path, interval=0.01):
        with monkeypatch.context() as m:
            m.setattr(pq, "write_table", fails)
            with span("late"):
                pass
            until(lambda: failed)
        with span("kept"):
            pass
        until(lambda: list(tmp_path.glob("*.parquet")))
    assert sorted(read_events(tmp_path)["op"].to_pylist()) == ["kept", "late"] and recorder.dropped == 0


def until(there) -> None:
    deadline = time.time() + 10
    while not there() and time.time() < deadline:
        time.sleep(0.005)
    assert there()


def test_a_batch_that_cannot_be_taken_is_neither_lost_nor_doubled(tmp_path, monkeypatch):
    def fails(self):
        raise MemoryError("no room")

    with recorder.to(tmp_path, interval=60):
        with span("a"):
            pass
        with monkeypatch.context() as m, raises(StorageError, tmp_path.name):
            m.setattr(buffer_module.Chunk, "written", fails)
            recorder.flush()
    assert read_events(tmp_path)["op"].to_pylist() == ["a"] and recorder.dropped == 0


def test_a_detail_that_is_no_text_is_written_as_far_as_it_is(tmp_path):
    with recorder.to(tmp_path, interval=60):
        for detail in ("a\udcffb", 5, "fine"):
            with span("load", detail=detail):
                pass
    assert read_events(tmp_path)["detail"].to_pylist() == ["a?b", "5", "fine"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(StorageError, "file"):
        recorder.start(tmp_path / "file")
    assert not recorder.recording


CHILD = """
import sys, threading, time
from tilth.trace import recorder, span
recorder.start(sys.argv[1], interval=0.05)
def beside():
    for i in range(10**9):
        with span("beside", seq=i):
            time.sleep(0.0001)
threading.Thread(target=beside, name="beside", daemon=True).start()
with span("run"):
    i = 0
    while True:
        with span("step", step=i):
            time.sleep(0.001)
        i += 1
        if i % 50 == 0:
            print(i, flush=True)
"""


def flushed(folder):
    """Numbers of the steps in files, and of the spans of the thread beside them."""
    rows = read_events(folder).to_pylist() if any(folder.glob("*.parquet")) else []
    return [[r[number] for r in rows if r["op"] == op] for op, number in (("step", "step"), ("beside", "seq"))]


def test_sigkill_loses_only_what_was_not_flushed(tmp_path):
    child = subprocess.Popen(
        [*forked.python(), "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "src"}
    )
    try:
        for _ in range(6):
            child.stdout.readline()
        until = time.monotonic() + patience(10.0)
        while min(map(len, flushed(tmp_path))) < 300 and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        forked.kill(child)
    for seen in flushed(tmp_path):
        assert len(seen) >= 300 and seen == list(range(len(seen)))
    assert sorted(r.op for r in breakdown(read_events(tmp_path))) == ["beside", "step"]


def test_the_next_process_removes_what_a_killed_one_had_begun_to_write(tmp_path):
    mine, others = (tmp_path / f".attempt-1-rank-{rank}-000003.parquet.tmp" for rank in (1, 11))
    mine.write_bytes(b"half")
    others.write_bytes(b"half")
    record(tmp_path, "a", rank=1, attempt=2)
    assert not mine.exists() and others.exists()
    assert read_events(tmp_path)["op"].to_pylist() == ["a"]


def test_a_torn_last_part_is_left_out_and_named_when_read_itself(tmp_path):
    record(tmp_path, "a")
    record(tmp_path, "b")
    last = tmp_path / "attempt-0-rank-0-000002.parquet"
    last.write_bytes(last.read_bytes()[:-20])
    assert read_events(tmp_path)["op"].to_pylist() == ["a"]
    with raises(DataError, "attempt-0-rank-0-000002.parquet.format"):
        read_events(last)


def test_a_torn_part_in_the_middle_is_an_error(tmp_path):
    record(tmp_path, "a")
    record(tmp_path, "b")
    first = tmp_path / "attempt-0-rank-0-000001.parquet"
    first.write_bytes(b"")
    with raises(DataError, "attempt-0-rank-0-000001.parquet.format"):
        read_events(tmp_path)


def test_a_foreign_table_names_its_missing_columns(tmp_path):
    path = tmp_path / "foreign.parquet"
    pq.write_table(EVENTS.empty_table().drop_columns(["duration", "op"]), path)
    with raises(DataError, "foreign.parquet.op"):
        read_events(path)
    with raises(DataError, "nowhere"):
        read_events(tmp_path / "nowhere")


def test_an_empty_run(tmp_path):
    assert read_events(tmp_path).num_rows == 0
    assert breakdown(read_events(tmp_path)) == []


def test_a_run_folder_is_read_through_its_events(tmp_path):
    record(tmp_path / "events", "a")
    (tmp_path / "events" / ".attempt-0-rank-0-000002.parquet.tmp").write_bytes(b"half")
    assert read_events(tmp_path)["op"].to_pylist() == ["a"]


def events(rows: list[dict]) -> pa.Table:
    blank = {f.name: "" if pa.types.is_string(f.type) else 0 for f in EVENTS}
    return pa.Table.from_pylist([{**blank, "parent": -1, **r} for r in rows], EVENTS)


def test_breakdown_by_hand():
    table = events(
        [
            {"id": 2, "parent": 1, "op": "generate", "duration": 3_000_000_000, "tokens": 30},
            {"id": 3, "parent": 1, "op": "train", "duration": 5_000_000_000, "tokens": 40, "flops": 1e9},
            {"id": 1, "op": "step", "duration": 10_000_000_000},
            {"id": 1, "rank": 1, "op": "step", "duration": 4_000_000_000},  # same ids in another process
            {"id": 2, "rank": 1, "parent": 1, "op": "train", "duration": 1_000_000_000, "tokens": 5},
        ]
    )
    rows = breakdown(table)
    assert [(r.op, r.count, r.seconds, r.self_seconds, r.tokens) for r in rows] == [
        ("train", 2, 6.0, 6.0, 45), ("step", 2, 14.0, 5.0, 0), ("generate", 1, 3.0, 3.0, 30),
    ]  # fmt: skip
    assert rows[0].longest == 5.0 and rows[0].flops == 1e9
    assert [round(r.share, 6) for r in rows] == [round(x / 14, 6) for x in (6, 5, 3)]


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 3))
def test_own_times_against_a_plain_loop(seed, n, ranks):
    rng = np.random.default_rng(seed)
    rows = []
    for rank in range(ranks):
        for i in range(n):
            parent = int(rng.integers(-1, i)) if i else -1
            rows.append({"rank": rank, "attempt": rank % 2, "id": 10 * i, "parent": 10 * parent if parent >= 0 else -1,
                         "op": f"op{rng.integers(3)}", "duration": int(rng.integers(1, 10**9))})  # fmt: skip
    rows = [rows[i] for i in rng.permutation(len(rows)) if rng.random() < 0.9]  # some parents were never written
    want = [
        r["duration"] - sum(c["duration"] for c in rows if (c["rank"], c["parent"]) == (r["rank"], r["id"]))
        for r in rows
    ]
    got = self_times(events(rows))
    assert got.tolist() == want
    roots = [r for r in rows if not any((p["rank"], p["id"]) == (r["rank"], r["parent"]) for p in rows)]
    assert got.sum() == sum(r["duration"] for r in roots)


def test_attempts_are_read_apart_and_texts_once(tmp_path):
    for attempt, rank in ((1, 0), (1, 1), (3, 0)):
        with recorder.to(tmp_path, rank=rank, attempt=attempt, interval=60):
            for detail in (f"only-{attempt}-{rank}", "all"):
                with span("call", detail=detail):
                    pass
            recorder.flush()
            with span("call", detail="all"):
                pass
    assert attempts(tmp_path) == [1, 3]
    one = read_events(tmp_path, attempt=1)
    assert set(one["attempt"].to_pylist()) == {1} and one.num_rows == 6
    detail = one["detail"]
    assert all(chunk.dictionary.equals(detail.chunk(0).dictionary) for chunk in detail.chunks)
    assert sorted(detail.chunk(0).dictionary.to_pylist()) == ["all", "only-1-0", "only-1-1"]
    assert read_events(tmp_path, attempt=2).num_rows == 0 and read_events(tmp_path).num_rows == 9
    assert attempts(max(tmp_path.iterdir())) == [3]


def test_a_file_of_version_2_is_read_too(tmp_path):
    """Its texts are plain, and no device is said."""
    path = tmp_path / "attempt-0-rank-0-000001.parquet"
    older = events([{"id": 1, "op": "a"}, {"id": 2, "op": "b"}]).drop_columns(["device_start", "device_duration"])
    pq.write_table(older, path, use_dictionary=False)
    assert read_events(tmp_path).schema.equals(COLUMNS)
    assert read_events(tmp_path)["op"].to_pylist() == ["a", "b"]
    assert read_events(tmp_path)["device_start"].null_count == 2


def test_many_events():
    n = 300_000
    parents = np.where(np.arange(n) % 10 == 0, -1, np.arange(n) // 10 * 10)
    table = EVENTS.empty_table()
    columns = {f.name: pa.array(np.zeros(n, np.int64)).cast(f.type) for f in EVENTS if not pa.types.is_string(f.type)}
    columns |= {"id": pa.array(np.arange(n)), "parent": pa.array(parents), "duration": pa.array(np.ones(n, np.int64))}
    columns |= {f.name: pa.array(["m"] * n) for f in EVENTS if pa.types.is_string(f.type)}
    columns |= {"op": pa.array(["a", "b", "c"] * (n // 3))}
    table = pa.table([columns[f.name] for f in EVENTS], schema=EVENTS)
    assert sum(r.count for r in breakdown(table)) == n


def test_parts_are_listed_by_process_and_number(tmp_path):
    names = [
        "attempt-2-rank-0-000001",
        "attempt-1-rank-10-000001",
        "attempt-1-rank-2-000010",
        "attempt-1-rank-2-000009",
    ]
    for name in names:
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    for name in (".attempt-1-rank-2-000011.parquet.tmp", "attempt-1-clocks.jsonl", "notes.parquet"):
        (tmp_path / name).write_bytes(b"")
    found = parts(tmp_path)
    assert [(key, list(files)) for key, files in found.items()] == [((1, 2), [9, 10]), ((1, 10), [1]), ((2, 0), [1])]
    assert found[1, 2][9].name == "attempt-1-rank-2-000009.parquet"


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_parents_are_found_by_process(data):
    n = data.draw(st.integers(0, 25))
    process = np.array([data.draw(st.integers(0, 2**25 - 1)) for _ in range(2)])[data_rows(data, n, 2)]
    ids = np.array([data.draw(st.integers(0, 2**38 - 1)) for _ in range(6)])[data_rows(data, n, 6)]
    keep = np.sort(np.unique(np.stack([process, ids], 1), axis=0, return_index=True)[1])
    process, ids = process[keep], ids[keep]
    parent = np.where(data_rows(data, len(keep), 2) == 1, data.draw(st.integers(-1, 2**38 - 1)), np.roll(ids, 1))
    where = {pair: row for row, pair in enumerate(zip(process.tolist(), ids.tolist()))}
    want = [where.get(pair, -1) for pair in zip(process.tolist(), parent.tolist())]
    assert parents(process, ids, parent).tolist() == want


def data_rows(data, n: int, below: int) -> np.ndarray:
    return np.array(data.draw(st.lists(st.integers(0, below - 1), min_size=n, max_size=n)), np.int64)
