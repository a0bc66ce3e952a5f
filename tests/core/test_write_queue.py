"""Writes that their disk refuses wait in order, are repeated, and are lost only with an error that names them."""

import errno
import os
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.core import write_queue
from tilth.core.errors import StorageError
from tilth.core.write_queue import WriteQueue, described


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.setattr(write_queue, "SOONEST", 0.001)
    monkeypatch.setattr(write_queue, "LATEST", 0.002)
    made = WriteQueue()
    yield made
    made.close()


class Disk:
    """A disk that refuses while ``refuses`` is an error's number."""

    def __init__(self, tmp_path):
        self.path, self.refuses, self.wrote = tmp_path / "file", 0, []

    def write(self, what):
        def work():
            if self.refuses:
                raise OSError(self.refuses, os.strerror(self.refuses), str(self.path))
            self.wrote.append(what)

        return work


def test_a_write_is_done_when_it_returns_while_the_disk_is_well(queue, tmp_path):
    disk = Disk(tmp_path)
    for number in range(5):
        queue.put(disk.path, disk.write(number), 1)
        assert disk.wrote[-1] == number
    assert queue.settle(10) == {} == queue.status()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOENT, errno.ESTALE])
def test_what_is_refused_waits_in_order_and_is_described_at_its_begin_and_end(queue, tmp_path, number):
    disk = Disk(tmp_path)
    disk.refuses = number
    for what in range(4):
        queue.put(disk.path, disk.write(what), 10)
        told = queue.status()
    assert (told["bytes"], told["writes"], told["reason"]) == (40, 4, os.strerror(number)) and not told["slow"]
    assert queue.settle(10)["files"] == ["file (4)"]
    said = described({}, told)
    assert os.strerror(number) in said and str(disk.path) in said and described(told, queue.status()) == ""
    disk.refuses = 0
    queue.put(disk.path, disk.write(4), 10)
    deadline = time.monotonic() + 30
    while queue.settle(1) and time.monotonic() < deadline:
        pass
    assert disk.wrote == [0, 1, 2, 3, 4] and queue.status() == {}
    assert str(disk.path) in described(told, {}) and described({}, {}) == ""


def test_the_newest_of_a_file_takes_the_place_of_older_ones(queue, tmp_path):
    disk = Disk(tmp_path)
    disk.refuses = errno.ENOSPC
    queue.put(disk.path, disk.write("first"), 1)
    queue.settle(10)
    for what in ("a", "b"):
        queue.put(tmp_path / "state", disk.write(what), 1, newest=True)
    queue.put(disk.path, disk.write("last"), 1)
    queue.put(tmp_path / "state", disk.write("c"), 1, newest=True)
    disk.refuses = 0
    deadline = time.monotonic() + 30
    while queue.settle(1) and time.monotonic() < deadline:
        pass
    assert disk.wrote == ["first", "last", "c"]


def test_more_than_the_limit_is_an_error_that_names_what_is_lost(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(write_queue, "LIMIT", 100)
    disk = Disk(tmp_path)
    disk.refuses = errno.ENOSPC
    queue.put(disk.path, disk.write(0), 1000)  # one write may be larger
    queue.settle(10)
    with raises(StorageError, "file") as caught:
        queue.put(disk.path, disk.write(1), 1)
    assert "1,000 bytes of file (1)" in str(caught.value)


def test_nobody_waits_for_a_slow_disk_unless_memory_demands_it(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(write_queue, "PROMPT", 0.05)
    monkeypatch.setattr(write_queue, "SLOW", 0.0)
    monkeypatch.setattr(write_queue, "LIMIT", 100)
    disk, going = Disk(tmp_path), threading.Event()
    queue.put(disk.path, lambda: going.wait(60) and disk.wrote.append("slow"), 60)
    queue.put(disk.path, disk.write("next"), 40)
    assert queue.status()["slow"] and queue.settle(0.01)["slow"] and disk.wrote == []
    threading.Timer(0.2, going.set).start()
    monkeypatch.setattr(write_queue, "SLOW", 60.0)
    queue._failing = None
    queue.put(disk.path, disk.write("more"), 100)  # waits
    assert disk.wrote[:2] == ["slow", "next"]


def test_a_reader_in_the_process_that_writes_waits_for_what_is_put_below_its_path_and_for_nothing_else(
    queue, tmp_path, monkeypatch
):
    monkeypatch.setattr(write_queue, "PROMPT", 0.0)
    disk, going = Disk(tmp_path), threading.Event()
    queue.put(tmp_path / "run" / "run.json", lambda: going.wait(60) and disk.wrote.append("late"))
    write_queue.settle(tmp_path / "other", 60)
    write_queue.settle(tmp_path / "run" / "metrics.jsonl", 60)
    write_queue.settle(tmp_path / "ru", 60)
    assert disk.wrote == []
    threading.Timer(0.05, going.set).start()
    monkeypatch.chdir(tmp_path)
    write_queue.settle("run", 60)
    assert disk.wrote == ["late"]


def test_a_reader_does_not_wait_for_a_disk_that_refuses(queue, tmp_path):
    disk = Disk(tmp_path)
    disk.refuses = errno.ENOSPC
    queue.put(disk.path, disk.write(0))
    write_queue.settle(disk.path, 60)
    assert queue.status() and disk.wrote == []


def test_a_bug_is_no_trouble_of_the_disk(queue, tmp_path):
    with pytest.raises(ZeroDivisionError):
        queue.put(tmp_path, lambda: 1 / 0)
    assert queue.settle(10) == {}


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12))
def test_any_number_of_failures_changes_no_order(tmp_path_factory, failures):
    """failures: how often each write fails, having written a part."""
    queue, wrote, left = WriteQueue(), [], list(failures)
    queue_pause, write_queue.SOONEST, write_queue.LATEST = (write_queue.SOONEST, write_queue.LATEST), 0.0, 0.0
    try:
        for number in range(len(failures)):

            def work(number=number):
                if left[number]:
                    left[number] -= 1
                    raise OSError(errno.EIO, "Input/output error")
                wrote.append(number)

            queue.put(tmp_path_factory.getbasetemp() / "x", work, 1)
        deadline = time.monotonic() + 30
        while queue.settle(1) and time.monotonic() < deadline:
            pass
        assert wrote == list(range(len(failures)))
    finally:
        write_queue.SOONEST, write_queue.LATEST = queue_pause
        queue.close()
