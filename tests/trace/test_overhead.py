"""The benchmark of tracing: what it makes of the times of blocks, and that tracing is on again after it."""

import gc

import numpy as np
import pytest

from tests.scripts import script
from tilth.trace import recorder, span
from tilth.trace.collector import collector

bench = script("trace_overhead.py")


@pytest.fixture(autouse=True)
def as_it_was():
    recorder.totals()
    yield
    assert span.__enter__ is bench.ENTER and span.__exit__ is bench.EXIT
    assert not collector.watching and gc.isenabled()


def blocks(off: float, on: float, number: int, drift: float = 0.0):
    """Seconds of each step and whether tracing was on; the first of a block is far off, steps get slower by drift."""
    which = [bench.ORDER[i // bench.BLOCK % len(bench.ORDER)] for i in range(number * bench.BLOCK)]
    values = [on if is_on else off for is_on in which]
    slow = [v + drift * i + (100 if i % bench.BLOCK == 0 else 0) for i, v in enumerate(values)]
    return slow, which


def test_neighbouring_blocks_are_paired_and_their_first_steps_left_out():
    found = bench.pairs(*blocks(0.2, 0.21, 9))
    assert found.shape == (4, 2) and np.allclose(found, [[0.2, 0.21]] * 4)
    told = bench.difference(found)
    assert told == {"off_ms": 200.0, "on_ms": 210.0, "difference_percent": 5.0, "low_percent": 5.0, "high_percent": 5.0}


def test_a_drift_cancels():
    """On, off, off, on: what grows by the step weighs on both alike."""
    told = bench.difference(bench.pairs(*blocks(0.2, 0.2, 16, drift=0.001)))
    assert abs(told["difference_percent"]) < 1e-6 and told["low_percent"] < 0 < told["high_percent"]


def test_off_means_that_a_span_does_nothing_and_on_that_it_is_as_before():
    bench.switch(None, False)
    try:
        with span("a", tokens=1) as inside:
            inside.set(tokens=2)
        assert recorder.totals() == {} and not collector.watching
    finally:
        bench.switch(None, True)
        assert collector.watching
        collector.stop()
    with span("a"):
        pass
    assert recorder.totals()["a"].count == 1
