"""Packed events: nothing is lost, doubled or half read whatever comes between, and memory stays bounded."""

import gc
import random
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.memory import start_tracing
from tilth.analysis.events import load
from tilth.analysis.read import read_events
from tilth.trace import buffer as buffer_module
from tilth.trace import recorder, span
from tilth.trace import spans as spans_module
from tilth.trace.buffer import CHUNK, FORMAT, FULL, NONE, OTHERS, SIZE, Codes, EventBuffer
from tilth.trace.collector import collector
from tilth.trace.writer import PACKED


def put(buffer: EventBuffer, number: int, written: bool = True) -> int:
    """One event, as a span adds it; its place. Not written: only its place is taken."""
    chunk = buffer.chunk if buffer.chunk.used < FULL else buffer.grow()
    at = chunk.used
    chunk.used = at + SIZE
    if written:
        FORMAT.pack_into(chunk.buffer, at, number, *range(8), 0.5, *range(5))
    return at


def ids(taken: bytes) -> list[int]:
    return np.frombuffer(taken, PACKED)["id"].tolist()


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 3 * CHUNK), max_size=8))
def test_what_goes_in_comes_out_once_and_in_order(counts):
    buffer, number, seen = EventBuffer(), 0, []
    for count in counts:
        for _ in range(count):
            number += 1
            put(buffer, number)
        seen += ids(buffer.take())
        assert len(buffer.full) <= 1
    assert seen == list(range(1, number + 1))
    assert buffer.take() == b"" and NONE.used == FULL and not NONE.buffer


def test_numbers_are_where_the_reader_of_the_packed_form_has_them():
    buffer = EventBuffer()
    put(buffer, 9)
    row = np.frombuffer(buffer.take(), PACKED)[0]
    assert row.tolist() == (9, *range(8), 0.5, *range(5), 0)


@pytest.mark.parametrize("before", [0, 5, CHUNK - 1, CHUNK, CHUNK + 1])
def test_an_event_that_is_being_written_waits_and_so_do_those_behind_it(before):
    buffer = EventBuffer()
    for number in range(1, before + 1):
        put(buffer, number)
    at = put(buffer, before + 1, written=False)
    chunk = buffer.chunk
    put(buffer, before + 2)
    assert ids(buffer.take()) == list(range(1, before + 1))
    assert buffer.take() == b""
    FORMAT.pack_into(chunk.buffer, at, before + 1, *range(8), 0.5, *range(5))
    assert ids(buffer.take()) == [before + 1, before + 2]


def test_a_chunk_that_a_collection_made_meanwhile_is_kept(monkeypatch):
    buffer = EventBuffer()
    put(buffer, 1)
    plain = buffer_module.Chunk

    def interrupted():
        monkeypatch.setattr(buffer_module, "Chunk", plain)
        buffer.chunk.used = FULL
        put(buffer, 2)
        return plain()

    monkeypatch.setattr(buffer_module, "Chunk", interrupted)
    buffer.chunk.used = FULL
    first = buffer.chunk
    assert buffer.grow() is buffer.chunk is not first
    first.used = SIZE
    assert [ids(bytes(c.buffer[: c.written()])) for c in (first, buffer.chunk)] == [[1], [2]]


def test_codes_are_given_once_even_by_many_threads_and_end_somewhere(monkeypatch):
    codes = Codes("", OTHERS)
    assert codes[""] == 0
    words = [f"w{i}" for i in range(300)]
    found: list[dict] = []

    def ask() -> None:
        mine = random.Random(threading.get_ident()).sample(words, len(words))
        found.append({w: codes[w] for w in mine})

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == found[0] for one in found) and len(set(found[0].values())) == 300
    assert all(codes.texts()[code] == word for word, code in found[0].items())
    monkeypatch.setattr(buffer_module, "MOST_TEXTS", 310)
    last = {codes[f"x{i}"] for i in range(50)}
    assert codes.texts()[codes["new"]] == OTHERS and len(last) == 10


def test_texts_and_places_come_back(tmp_path):
    policy = ("policy", "dp=0 fsdp=1 tp=0")
    with recorder.to(tmp_path, interval=60), span("call", detail="policy.update", seq=7, where=policy):
        with span("all_reduce", detail="0,1", seq=3), span("all_reduce", where=("critic", "dp=1")):
            pass
    rows = [(r["op"], r["detail"], r["seq"], r["role"], r["place"]) for r in read_events(tmp_path).to_pylist()]
    assert rows == [
        ("all_reduce", "", -1, "critic", "dp=1"), ("all_reduce", "0,1", 3, *policy),
        ("call", "policy.update", 7, *policy),
    ]  # fmt: skip


def test_numbers_that_are_none_of_the_columns_end_no_run(tmp_path):
    with recorder.to(tmp_path, interval=60):
        with span("update", tokens=np.int64(5), bytes=2**70, squares=3.9, flops=np.float32(2.5)):  # type: ignore[arg-type]
            pass
        with span("update", micro_batch=2**40, squares=float("nan"), seq=-(2**80)):  # type: ignore[arg-type]
            pass
        with span("after"):
            pass
    rows = [
        [r[n] for n in ("tokens", "bytes", "squares", "seq", "micro_batch", "flops")]
        for r in read_events(tmp_path).to_pylist()
    ]
    assert rows == [[5, 2**63 - 1, 3, -1, -1, 2.5], [0, 0, 0, 1 - 2**63, 2**31 - 1, 0.0], [0, 0, 0, -1, -1, 0.0]]


def test_many_threads_at_once_with_a_writer_that_never_rests(tmp_path):
    def work(number: int) -> None:
        for i in range(700):
            with span("w", seq=i, tokens=number), span("in", seq=i, tokens=number):
                pass

    with recorder.to(tmp_path, interval=0.001), collector.to():
        threads = [threading.Thread(target=work, args=(n,), name=f"t{n}") for n in range(6)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            recorder.totals()
            recorder.flush()
        for thread in threads:
            thread.join()
        recorder.totals()  # what has ended is folded away, its events are not
        assert all(state.thread.is_alive() for state in recorder._threads)
    events = load(tmp_path)
    assert recorder.dropped == 0
    for number in range(6):
        mine = events.thread.is_(f"t{number}")
        for op in ("w", "in"):
            rows = mine & events.op.is_(op)
            assert events.seq[rows].tolist() == list(range(700)) and (events.tokens[rows] == number).all()
        inside = mine & events.op.is_("in")
        assert (events.seq[events.parent[inside]] == events.seq[inside]).all()


def test_a_flood_is_bounded_in_memory(tmp_path, monkeypatch):
    """While the disk stands still 12 times the capacity goes by; memory is that of the capacity, the rest counted."""
    capacity = 4 * CHUNK
    monkeypatch.setattr(spans_module, "CAPACITY", capacity)
    with recorder.to(tmp_path, interval=60), recorder._write_lock:
        start_tracing()
        try:
            for _ in range(12 * capacity):
                with span("many"):
                    pass
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 1.5 * capacity * SIZE
        assert 11 * capacity <= recorder.dropped <= 12 * capacity
    assert read_events(tmp_path).num_rows == 12 * capacity - recorder.dropped > 0


def test_recording_leaves_nothing_for_collections_of_garbage(tmp_path):
    gc.freeze()  # all that pytest holds
    with recorder.to(tmp_path, interval=60), span("step"):
        before = len(gc.get_objects())
        for _ in range(5 * CHUNK):
            with span("many", detail="0,1", seq=3, bytes=8):
                pass
        assert len(gc.get_objects()) - before < 50


def test_threads_that_ended_or_do_nothing_take_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(spans_module, "CAPACITY", 4 * CHUNK)
    monkeypatch.setattr(spans_module, "WAKE", 3 * CHUNK)
    over = threading.Event()

    def work(idle: bool) -> None:
        with span("short"):
            pass
        if idle:
            over.wait()

    recorder.totals()
    threads = [threading.Thread(target=work, args=(i < 10,)) for i in range(60)]
    with recorder.to(tmp_path, interval=60):
        for thread in threads:
            thread.start()
        for thread in threads[10:]:
            thread.join()
        for _ in range(2 * CHUNK):
            with span("main"):
                pass
        assert recorder.dropped == 0 and recorder._wake.empty(), "60 events and those of this thread wait, no more"
        before = len(recorder._threads)
        recorder.flush()
        assert len(recorder._threads) == before - 50 and not recorder._left, "those that ended are let go"
        over.set()
    for thread in threads:
        thread.join()
    assert read_events(tmp_path).num_rows == 60 + 2 * CHUNK
    assert recorder.totals()["short"].count == 60


def test_a_thread_that_ended_with_nothing_but_dropped_events_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(spans_module, "CAPACITY", 0)

    def work() -> None:
        with span("short"):
            pass

    with recorder.to(tmp_path, interval=60):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        recorder.totals()
        recorder.flush()
        assert recorder.dropped == 1


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(-1, CHUNK + 1), max_size=12))
def test_what_waits_is_counted(counts):
    """-1: all is taken."""
    buffer, waiting = EventBuffer(), 0
    for count in counts:
        for number in range(max(count, 0)):
            put(buffer, number + 1)
        waiting = 0 if count < 0 else waiting + count
        if count < 0:
            buffer.take()
        assert buffer.waiting == waiting
    buffer.forget()
    assert buffer.waiting == 0
