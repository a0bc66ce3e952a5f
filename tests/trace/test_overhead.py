"""The benchmark of tracing: what it makes of the times of steps, and that tracing is on again after it."""

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


def steps(off: float, on: float, number: int, drift: float = 0.0):
    """Seconds of each step and whether tracing was on; the first is far off, steps get slower by drift."""
    which = [bench.ORDER[i % len(bench.ORDER)] for i in range(number)]
    return [(on if is_on else off) + drift * i + 100 * (i == 0) for i, is_on in enumerate(which)], which


def test_neighbouring_steps_are_compared_and_the_first_ones_left_out():
    found = bench.fours(*steps(0.2, 0.21, 22))
    assert found.shape == (4, 2) and np.allclose(found, [[0.2, 0.21]] * 4)
    told = bench.difference(found)
    assert told == {"off_ms": 200.0, "on_ms": 210.0, "difference_percent": 5.0, "low_percent": 5.0, "high_percent": 5.0}


def test_a_drift_cancels():
    """On, off, off, on: what grows by the step weighs on both alike."""
    told = bench.difference(bench.fours(*steps(0.2, 0.2, 64, drift=0.001)))
    assert all(abs(told[name]) < 1e-6 for name in ("difference_percent", "low_percent", "high_percent"))


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
