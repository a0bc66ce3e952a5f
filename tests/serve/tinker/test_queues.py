"""Queues and logs of clients, without a server."""

import asyncio
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core.errors import DataError
from tilth.serve.tinker import queues
from tilth.serve.tinker.queues import KEPT, BusyError, Record, RequestLog, RequestQueue, StoredAnswer, next_of


def queue(folder, name="a", **more):
    return RequestQueue(name, RequestLog(folder / name / "log"), **more)


def in_loop(test):
    """Run a test in an event loop, which answers belong to."""

    def run(tmp_path):
        async def main():
            test(tmp_path)

        asyncio.run(main())

    return run


@in_loop
def test_requests_run_in_their_order_and_once(tmp_path):
    mine = queue(tmp_path)
    second = mine.accept(2, "step", b"2", None, 1)
    assert mine.ready() is None
    first = mine.accept(1, "step", b"1", None, 1)
    assert mine.accept(1, "step", b"1", None, 1) is first
    with raises(DataError, "seq_id.reused"):
        mine.accept(1, "step", b"other", None, 1)
    for operation in (first, second):
        assert mine.ready() is operation
        mine.finish(operation, StoredAnswer(b"done"))
    assert mine.ready() is None and mine.accept(1, "step", b"1", None, 1).answer.result().body == b"done"


@in_loop
def test_the_client_with_fewest_tokens_is_next(tmp_path):
    heavy, light = queue(tmp_path, "heavy"), queue(tmp_path, "light")
    for seq in range(1, 41):
        heavy.accept(seq, "data", b"%d" % seq, None, 30)
        light.accept(seq, "data", b"%d" % seq, None, 10)
    order = []
    while (one := next_of([heavy, light])) is not None and len(order) < 40:
        order.append(one.name)
        one.finish(one.ready(), StoredAnswer(b""))
    assert order.count("light") == 3 * order.count("heavy")
    assert max(map(len, "".join(name[0] for name in order).split("h"))) <= 3


@in_loop
def test_a_client_has_a_limit_of_requests_and_tokens(tmp_path):
    mine = queue(tmp_path, most=2)
    mine.accept(1, "data", b"1", None, 1)
    mine.accept(2, "data", b"2", None, 1)
    with raises(BusyError, "service.queue"):
        mine.accept(3, "data", b"3", None, 1)
    mine.finish(mine.ready(), StoredAnswer(b""))
    mine.accept(3, "data", b"3", None, 2**26)
    other = queue(tmp_path, "b")
    other.accept(1, "data", b"", None, 2**26)
    with raises(BusyError, "service.queue"):
        other.accept(2, "data", b"", None, 1)


@in_loop
def test_an_opened_queue_has_answers_and_requests_of_the_one_before(tmp_path):
    before = queue(tmp_path)
    for seq in (1, 2, 3):
        before.accept(seq, "step", b"%d" % seq, None, seq)
    before.finish(before.ready(), StoredAnswer(b"one", "text/plain"))
    again = queue(tmp_path)
    again.next = 2
    assert again.operations[1].answer.result() == StoredAnswer(b"one", "text/plain")
    assert again.ready().body == b"2" and again.operations[3].cost == 3
    again.finish(again.ready(), StoredAnswer(b"two"))
    again.shorten()
    last = queue(tmp_path)
    assert [seq for seq, one in last.operations.items() if one.answer.done()] == [1, 2]
    assert last.accept(2, "step", b"2", None, 2).answer.result().body == b"two"
    with raises(DataError, "seq_id.reused"):
        last.accept(2, "step", b"other", None, 2)


@in_loop
def test_old_answers_are_dropped(tmp_path):
    mine = queue(tmp_path)
    for seq in range(1, KEPT + 3):
        mine.finish(mine.accept(seq, "step", b"", None, 1), StoredAnswer(b""))
    mine.shorten()
    assert min(mine.operations) == 3
    with raises(DataError, "seq_id.past"):
        mine.accept(2, "step", b"", None, 1)


@in_loop
def test_answers_have_a_limit_of_bytes_and_the_newest_is_kept(tmp_path):
    mine = queue(tmp_path, ordered=False)
    waiting = [mine.accept(seq, "sample", b"", None, 1) for seq in range(1, 5)]
    for number in (1, 2, 3, 0):
        mine.finish(waiting[number], StoredAnswer(bytes(1000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queues, "FRESH", 3000)
        assert mine.fresh == 4000
        mine.shorten()
        assert list(mine.operations) == [3, 4, 1] and mine.fresh == 0
        mine.finish(mine.accept(5, "sample", b"", None, 1), StoredAnswer(bytes(3001)))
        mine.shorten()
    assert list(mine.operations) == [5] == list(queue(tmp_path).operations)


@in_loop
def test_a_number_far_ahead_waits_for_nothing(tmp_path):
    mine = queue(tmp_path, most=4)
    with raises(BusyError, "seq_id.early"):
        mine.accept(5, "step", b"", None, 1)
    mine.accept(4, "step", b"", None, 1)
    mine.finish(mine.accept(1, "step", b"", None, 1), StoredAnswer(b""))
    mine.accept(5, "step", b"", None, 1)


def test_logs_hold_no_descriptor(tmp_path):
    held = len(os.listdir("/proc/self/fd"))
    logs = [RequestLog(tmp_path / str(number) / "log") for number in range(9)]
    for log in logs:
        log.append(Record({"seq": 1}, b"one"))
        log.replace([Record({"seq": 2}, b"two")])
        log.append(Record({"seq": 3}, b"three"))
    assert len(os.listdir("/proc/self/fd")) == held
    assert [one.body for log in logs for one in RequestLog(log.path).records] == [b"two", b"three"] * 9


@given(records=st.lists(st.binary(max_size=40), max_size=6), cut=st.integers(0, 300), flip=st.booleans())
def test_a_torn_log_has_the_records_before(tmp_path_factory, records, cut, flip):
    path = tmp_path_factory.mktemp("log") / "log"
    log, ends = RequestLog(path), [0]
    for number, body in enumerate(records):
        log.append(Record({"seq": number}, body), durable=False)
        ends.append(log.size)
    raw = bytearray(path.read_bytes())
    at = min(cut, len(raw))
    if flip and at < len(raw):
        raw[at] ^= 1
    path.write_bytes(raw if flip else raw[:at])
    found = RequestLog(path)
    whole = sum(end <= at for end in ends) - 1 if not flip or at < len(raw) else len(records)
    assert [record.body for record in found.records] == records[:whole]
    found.append(Record({"seq": -1}, b"new"))
    assert [record.body for record in RequestLog(path).records] == [*records[:whole], b"new"]


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "log").mkdir()
    with pytest.raises(Exception, match="log"):
        RequestLog(tmp_path / "log")
