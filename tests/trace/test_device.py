"""Times on a device, by a device that is made up: nobody waits for it, and its clock is found again in the host's."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.analysis.read import read_events
from tilth.trace import device as device_module
from tilth.trace import recorder, span
from tilth.trace import spans as spans_module
from tilth.trace.device import DeviceClock, device_clock
from tilth.trace.ops import ON_DEVICE, OPS

BEGAN = 10**15


class Device:
    """A queue of work in one stream. Its clock runs (1 + drift) times as fast as the host's; times in ns."""

    def __init__(self, drift=0.0):
        self.host, self.free, self.drift, self.waits, self.fails = BEGAN, BEGAN, drift, 0, False

    def queue(self, took):
        """Work that takes so long; the host goes on."""
        self.free = max(self.free, self.host) + took

    def pause(self, seconds):
        self.host += round(seconds * 1e9)

    def clock(self, **more):
        return DeviceClock(lambda: Mark(self), now=lambda: self.host, pause=self.pause, **more)


class Mark:
    """Recorded in the queue: reached when the work before it is done."""

    def __init__(self, device):
        self.device, self.at = device, None

    def record(self):
        self.at = max(self.device.free, self.device.host)

    def query(self):
        if self.device.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.at <= self.device.host

    def synchronize(self):
        self.device.waits += 1
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end):
        """ms, as CUDA tells them: only of marks that were reached, and as a 32-bit float."""
        assert self.query() and end.query()
        return float(np.float32((end.at - self.at) * (1 + self.device.drift) * 1e-6))


def work(device, clock, number, took):
    begun = clock.begin()
    device.queue(took)
    clock.end(number, begun)


def test_work_that_was_queued_is_timed_when_it_is_done():
    device = Device()
    clock = device.clock()
    work(device, clock, 1, 3_000_000)
    work(device, clock, 2, 500_000_000)
    known, waiting = clock.take()  # it looked until the first was done
    assert known == {1: (pytest.approx(BEGAN, abs=60_000), 3_000_000)} and waiting == {2}
    device.host += 10**9
    work(device, clock, 3, 1_000)
    device.host += 10**6
    known, waiting = clock.take()
    assert not waiting and known.keys() == {2, 3}
    assert known[2] == pytest.approx((BEGAN + 3_000_000, 500_000_000), abs=60_000)
    assert device.waits == 1  # at the start


@settings(max_examples=examples(30), deadline=None)
@given(st.floats(-5e-5, 5e-5), st.integers(0, 2**32))
def test_clocks_that_drift_are_tied_again_and_again(drift, seed):
    """Half an hour in which the clocks come apart by up to 90 ms: starts stay right to a third of a millisecond."""
    rng = np.random.default_rng(seed)
    device = Device(drift)
    clock, truth, found, number = device.clock(), {}, {}, 0
    for _ in range(900):
        for _ in range(3):
            number += 1
            start, took = max(device.host, device.free), int(rng.integers(10_000, 2_000_000))
            truth[number] = start, took
            work(device, clock, number, took)
        found |= clock.take()[0]
        device.host += int(rng.integers(1, 4 * 10**9))
    device.host = max(device.host, device.free)  # the last wait may be shorter than the work
    found |= clock.take()[0]
    assert found.keys() == truth.keys()
    error = np.array([np.subtract(found[n], truth[n]) for n in truth])
    assert np.abs(error[:, 1]).max() < 200 + 5e-5 * 2_000_000
    assert np.abs(error[:, 0]).max() < 350_000


def test_bounded_unfit_and_failed(monkeypatch):
    device = Device()
    capturing = []
    clock = device.clock(unfit=lambda: bool(capturing))
    begun = clock.begin()
    capturing.append(True)
    assert clock.begin() is None
    clock.end(1, begun)
    capturing.clear()
    assert clock.take() == ({}, set())
    monkeypatch.setattr(device_module, "MOST", 2)
    for number in (1, 2):
        work(device, clock, number, 10**12)
    assert clock.begin() is None
    device.fails = True
    assert clock.take() == ({}, set()) == clock.take()


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(spans_module, "device_clock", made.clock)
    yield made
    assert not recorder.timed and recorder._device is None


def test_only_what_devices_do_is_timed_and_waits_until_it_is_known(tmp_path, device):
    with recorder.to(tmp_path, interval=60):
        with span("update") as update, span("forward") as forward:
            device.queue(7_000_000)
        with span("backward"):
            device.queue(10**12)
        device.host += 7_000_000
        recorder.flush()
        early = {r["op"]: r for r in read_events(tmp_path).to_pylist()}
        assert early.keys() == {"update", "forward"}  # backward is not done yet
        assert (early["forward"]["device_duration"], early["update"]["device_duration"]) == (7_000_000, None)
        assert early["forward"]["start"] - early["update"]["start"] == forward.start - update.start
        device.host += 2 * 10**12
        with span("all_reduce", detail="0,1"):
            pass
    rows = {r["op"]: r for r in read_events(tmp_path).to_pylist()}
    assert rows["backward"]["device_duration"] == pytest.approx(10**12, rel=1e-6)
    epoch = rows["update"]["start"] - update.start
    assert rows["forward"]["device_start"] == BEGAN + epoch
    assert rows["all_reduce"]["device_duration"] == 0 and device.waits == 1


def test_at_the_end_nothing_is_waited_for_and_nothing_lost(tmp_path, device):
    def other():
        with span("decode"):
            device.queue(10**15)

    with recorder.to(tmp_path, interval=60):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        recorder.flush()
        assert read_events(tmp_path).num_rows == 0
    (row,) = read_events(tmp_path).to_pylist()
    assert row["op"] == "decode" and row["device_start"] is row["device_duration"] is None


def test_without_a_device_there_is_no_clock():
    assert device_clock() is None
    assert {"forward", "decode", "all_reduce"} <= ON_DEVICE < OPS.keys() and "update" not in ON_DEVICE
