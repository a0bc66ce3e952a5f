"""The fused-bucket model: cases by hand, a walk through events, and what must hold of every step and network."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network_fusion import (
    Adding,
    Fusion,
    Ring,
    Step,
    compression_for,
    fuse,
    scaling_alone,
    scaling_at_best,
    server_seconds,
    synchronise,
)

from tests.examples import examples
from tilth.core.errors import DataError

MB = 2.0**20


def step(ready, size, back=None, batch=None):
    back = max(ready, default=1.0) if back is None else back
    return Step(np.array(ready, float), np.array(size, float), back, back if batch is None else batch)


@st.composite
def steps(draw):
    count = draw(st.integers(1, 12))
    ready = draw(st.lists(st.floats(0, 10), min_size=count, max_size=count))
    size = draw(st.lists(st.floats(0.1, 100), min_size=count, max_size=count))
    back = max(ready) + draw(st.floats(0.01, 5))
    return step(ready, size, back, back + draw(st.floats(0, 5)))


fusions = st.builds(Fusion, st.floats(0.1, 300), st.floats(0, 5))
rings = st.builds(Ring, st.integers(1, 64), st.floats(0.5, 1000), st.floats(0, 0.01), st.floats(1, 50))


def walk(given, ring, fusion):
    """The same by two queues, an event at a time: (bucket's time, bytes) and the end of the last all-reduce."""
    items = sorted(zip(given.ready.tolist(), given.bytes.tolist()), key=lambda item: item[0])
    buffer, flushed, first = [], [], None
    for at, size in [*items, (math.inf, 0.0)]:
        if buffer and at > min(first + fusion.patience, given.back):
            flushed.append((min(first + fusion.patience, given.back), sum(buffer)))
            buffer = []
        if not buffer:
            first = at
        buffer.append(size)
        if at < math.inf and sum(buffer) >= fusion.limit:
            flushed.append((at, sum(buffer)))
            buffer = []
    free = 0.0
    for at, size in flushed:
        free = max(free, at)
        free += 2 * (ring.ranks - 1) * ring.latency
        free += 2 * size * (ring.ranks - 1) / ring.ranks / ring.bandwidth / ring.compression
    return flushed, free


def test_a_step_by_hand():
    """Two gradients of 6 fill a bucket of 10 at t = 2: over 2 ranks at 3 bytes/s 12 bytes take 4 s. One of 3 is ready
    at 5, waits for company until 7, is added up by 8, 2 s after the backward pass. A step of 7 s takes 9."""
    given = step([1, 2, 5], [6, 6, 3], back=6, batch=7)
    patient = Fusion(10, 2)
    buckets = fuse(given, patient)
    assert (buckets.ready.tolist(), buckets.bytes.tolist()) == ([2, 6], [12, 3])  # not later than the backward pass
    found = synchronise(given, Ring(2, 3.0), patient)
    assert (found.start.tolist(), found.end.tolist()) == ([2, 6], [6, 7])
    assert (found.overhead, found.scaling) == (1, 7 / 8)
    early = fuse(replace(given, back=7.5, batch=8), patient)
    assert early.ready.tolist() == [2, 7] and early.gradients.tolist() == [0, 0, 1]


def test_one_at_a_time():
    """The second bucket waits for the first: 1 + 4 + 4 s, then 8 s are left of 9 after a backward pass of 1."""
    found = synchronise(step([0.0, 1.0], [6, 6]), Ring(4, 2.25), Fusion(1, 0))
    assert found.end.tolist() == [4, 8] and found.start.tolist() == [0, 4] and found.overhead == 7
    assert found.scaling == 1 / 8


def test_the_papers_formula_with_additions():
    """8 ranks, 64 MB at 100 Gbit/s and 900 GB/s of memory, three vectors' traffic an addition."""
    adding = Adding(np.array([MB, 1000 * MB]), np.array([MB, 1000 * MB]) * 3 / 900e9)
    size = 64 * MB
    assert float(Ring(8, 12.5e9, adding=adding).seconds(size)) == pytest.approx(
        2 * size * 7 / (8 * 12.5e9) + 7 * (size / 8) * 3 / 900e9
    )
    small = Ring(8, 12.5e9, compression=4, coding=1e-11, latency=1e-5)
    assert float(small.seconds(size)) == pytest.approx(2 * size * 7 / (8 * 12.5e9 * 4) + size * 1e-11 + 14e-5)
    assert float(Ring(8, 12.5e9, coding=1.0).seconds(size)) == pytest.approx(2 * size * 7 / (8 * 12.5e9))


def test_additions_between_and_beyond_what_was_measured():
    adding = Adding(np.array([10.0, 20.0]), np.array([1.0, 3.0]))
    assert adding(np.array([0.0, 5, 10, 15, 20, 40])).tolist() == [0, 0.5, 1, 2, 3, 6]


@settings(max_examples=examples(200), deadline=None)
@given(steps(), rings, fusions)
def test_like_a_walk_through_events(given, ring, fusion):
    flushed, end = walk(given, ring, fusion)
    buckets, found = fuse(given, fusion), synchronise(given, ring, fusion)
    assert buckets.ready.tolist() == pytest.approx([at for at, _ in flushed])
    assert buckets.bytes.tolist() == pytest.approx([size for _, size in flushed])
    assert found.end[-1] == pytest.approx(end)
    assert found.overhead == pytest.approx(max(0, end - given.back), abs=1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(steps(), fusions)
def test_fusion_keeps_every_byte_and_its_bounds(given, fusion):
    found = fuse(given, fusion)
    assert found.bytes.sum() == pytest.approx(given.bytes.sum())
    assert (np.diff(found.ready) >= 0).all()
    order = np.argsort(given.ready, kind="stable")
    assert (np.diff(found.gradients[order]) >= 0).all()  # in order, each in one
    for i in range(len(found.ready)):
        mine = order[found.gradients[order] == i]
        assert found.bytes[i] == pytest.approx(given.bytes[mine].sum())
        assert given.bytes[mine[:-1]].sum() < fusion.limit  # full with its last one
        assert given.ready[mine[-1]] <= found.ready[i] <= given.ready[mine[0]] + fusion.patience + 1e-12
        assert found.ready[i] <= given.back


@settings(max_examples=examples(100), deadline=None)
@given(steps(), rings, fusions, st.floats(1, 20))
def test_a_faster_link_and_more_compression_do_no_harm(given, ring, fusion, factor):
    before = synchronise(given, ring, fusion).scaling
    assert 0 < before <= 1
    for better in (
        replace(ring, bandwidth=ring.bandwidth * factor),
        replace(ring, compression=ring.compression * factor),
        replace(ring, latency=ring.latency / factor),
    ):
        assert synchronise(given, better, fusion).scaling >= before - 1e-12


@settings(max_examples=examples(100), deadline=None)
@given(steps(), rings, fusions)
def test_bounds(given, ring, fusion):
    """f is never above that of a link that never rests; all hidden is f = 1; one rank has nothing to wait for."""
    found = synchronise(given, ring, fusion)
    assert found.scaling <= scaling_at_best(given, ring) + 1e-12
    assert (found.scaling == 1) == (found.overhead <= 1e-15 * given.batch) or found.scaling == pytest.approx(1)
    if (found.end <= given.back).all():
        assert found.scaling == 1
    alone = synchronise(given, replace(ring, ranks=1), fusion)
    assert (alone.overhead, alone.scaling) == (0, 1)
    everything = synchronise(given, ring, Fusion(math.inf, math.inf))
    assert len(everything.end) == 1  # one huge bucket overlaps with nothing
    assert everything.scaling == pytest.approx(scaling_alone(given, ring))


@settings(max_examples=examples(100), deadline=None)
@given(steps(), rings, st.floats(0, 5), st.integers(0, 11), st.floats(0.1, 0.9))
def test_a_gradient_in_two_parts_is_the_same_gradient(given, ring, patience, which, share):
    """Where fusion puts them together anyway: no limit in the way."""
    i = which % len(given.ready)
    parts = given.bytes[i] * np.array([share, 1 - share])
    ready, size = np.insert(given.ready, i, given.ready[i]), np.r_[given.bytes[:i], parts, given.bytes[i + 1 :]]
    split = replace(given, ready=ready, bytes=size)
    fusion = Fusion(math.inf, patience)
    one, other = synchronise(given, ring, fusion), synchronise(split, ring, fusion)
    assert one.end.tolist() == pytest.approx(other.end.tolist())


@settings(max_examples=examples(60), deadline=None)
@given(steps(), rings, fusions)
def test_twice_as_slow_in_everything_is_twice_as_long(given, ring, fusion):
    slow = Step(given.ready * 2, given.bytes, given.back * 2, given.batch * 2)
    slow_ring = replace(ring, bandwidth=ring.bandwidth / 2, latency=ring.latency * 2)
    once, twice = (
        synchronise(given, ring, fusion),
        synchronise(slow, slow_ring, replace(fusion, patience=fusion.patience * 2)),
    )
    assert twice.end.tolist() == pytest.approx((once.end * 2).tolist())
    assert twice.scaling == pytest.approx(once.scaling)


@settings(max_examples=examples(60), deadline=None)
@given(steps(), st.builds(Ring, st.integers(2, 64), st.floats(0.5, 30)), fusions, st.floats(0.3, 0.95))
def test_the_compression_that_is_just_enough(given, ring, fusion, wanted):
    enough = compression_for(given, ring, wanted, fusion)
    if math.isinf(enough):
        assert synchronise(given, replace(ring, compression=1e6), fusion).scaling < wanted
        return
    assert synchronise(given, replace(ring, compression=enough), fusion).scaling >= wanted
    if enough > 1.01:
        assert synchronise(given, replace(ring, compression=enough / 1.002), fusion).scaling < wanted


def test_where_compression_pays_for_its_coding():
    """All after the backward pass, 100 bytes at 1 byte/s over 2 ranks: 100 s, or 100 / r + 50 s: it pays from r = 2."""
    given, ring = step([1.0], [100.0]), Ring(2, 1.0, coding=0.5)
    plain = synchronise(given, ring)
    assert plain.overhead == pytest.approx(100)
    assert compression_for(given, ring, plain.scaling) == pytest.approx(2, rel=2e-3)
    assert math.isinf(compression_for(given, replace(ring, coding=1.1), plain.scaling))


def test_the_papers_finding():
    """Backward passes of 60 ms with 100 MB of gradients on 64 ranks: no compression needed at 100 Gbit/s, a small one
    at 10, and 100x is pointless."""
    ready = 0.04 + 0.06 * np.arange(1, 51) / 50
    given = Step(ready, np.full(50, 2e6), 0.1, 0.11)
    fast, slow = Ring(64, 12.5e9), Ring(64, 1.25e9)
    assert synchronise(given, fast).scaling > 0.97
    assert synchronise(given, slow).scaling < 0.6
    ratio = compression_for(given, slow, 0.95)
    assert 2 < ratio < 6
    gain = (
        synchronise(given, replace(slow, compression=100)).scaling
        - synchronise(given, replace(slow, compression=10)).scaling
    )
    assert gain < 0.02


def test_parameter_servers():
    assert server_seconds(100, ranks=8, servers=8, bandwidth=10) == 20
    assert server_seconds(100, ranks=8, servers=2, bandwidth=10) == 80
    assert server_seconds(100, ranks=2, servers=8, bandwidth=10) == 20  # its own link is the busier one


def test_no_gradients():
    given = step([], [], back=1.0)
    assert len(fuse(given).ready) == 0
    assert synchronise(given, Ring(4, 1.0)).scaling == scaling_at_best(given, Ring(4, 1.0)) == 1
    assert scaling_alone(given, Ring(4, 1.0)) == 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: step([1, 2], [1]), "both have one number a gradient"),
        (lambda: step([-1.0, 2], [1, 1]), "a gradient's time is below 0"),
        (lambda: step([1.0, 2], [1, 0]), "its size not above 0"),
        (lambda: step([1.0, math.nan], [1, 1], back=3), "or either is no number"),
        (lambda: step([1.0, 2], [1, 1], back=1.5), "each is at least the one before"),
        (lambda: step([1.0], [1], back=2, batch=1), "each is at least the one before"),
        (lambda: step([], [], back=0.0), "each is at least the one before"),
        (lambda: Ring(0, 1.0), "a ring of 0 ranks"),
        (lambda: Ring(2, 0.0), "the bandwidth is above 0"),
        (lambda: Ring(2, 1.0, compression=0.5), "compression 0.5"),
        (lambda: Ring(2, 1.0, latency=-1.0), "times are not below 0"),
        (lambda: Adding(np.array([2.0, 1.0]), np.array([1.0, 1.0])), "sizes of additions ascend"),
        (lambda: Adding(np.array([]), np.array([])), "sizes of additions ascend"),
        (lambda: Adding(np.array([1.0]), np.array([-1.0])), "a time of at least 0"),
    ],
)
def test_bad_input(made, message):
    with pytest.raises(DataError, match=message):
        made()
