"""The fit of a clock: beside exact vertices of the possible lines, and on clocks whose skew and drift are injected."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.analysis.clocks import Shifted, bursts, noisy
from tests.examples import examples
from tilth.analysis.align import Known
from tilth.analysis.clock import FASTEST, SLACK, STRAIGHT, WIDE, Bounds, Clock, clip, fit, same

SECOND = 1_000_000_000


def bounds(points):
    at, value = np.array(points, np.int64).reshape(-1, 2).T
    return Bounds(at, value)


def vertices(least, most, x0):
    """Exact corners (offset at x0, drift) of all lines above the least, below the most, within the greatest drift."""
    fastest, slack = Fraction(FASTEST), Fraction(SLACK)
    planes = [(Fraction(1), Fraction(x - x0), Fraction(y) - slack) for x, y in least]
    planes += [(Fraction(-1), Fraction(x0 - x), -Fraction(y) - slack) for x, y in most]
    planes += [(Fraction(0), Fraction(1), -fastest), (Fraction(0), Fraction(-1), -fastest)]
    found = []
    for (a, b, c), (d, e, f) in itertools.combinations(planes, 2):
        if det := a * e - b * d:
            corner = (c * e - b * f) / det, (a * f - c * d) / det
            if all(p * corner[0] + q * corner[1] >= r for p, q, r in planes):
                found.append(corner)
    return found


points = st.lists(st.tuples(st.integers(0, 50 * SECOND), st.integers(0, 10**6)), min_size=1, max_size=5)


@settings(max_examples=examples(60), deadline=None)
@given(points, points, st.integers(-(10**12), 10**12), st.integers(-900, 900))
def test_bounds_are_those_of_the_exact_polygon(below, above, skew, ppm):
    line = [skew + x * ppm // 1_000_000 for x, _ in below], [skew + x * ppm // 1_000_000 for x, _ in above]
    least = [(x, y - gap) for (x, gap), y in zip(below, line[0])]
    most = [(x, y + gap) for (x, gap), y in zip(above, line[1])]
    knots = np.unique([x for x, _ in least + most] + [0, 50 * SECOND])
    found = fit(bounds(least), bounds(most), knots)
    corners = vertices(least, most, int(knots[0]))
    for k, x in enumerate(knots.tolist()):
        values = [a + b * Fraction(x - int(knots[0])) for a, b in corners]
        width = float(max(values) - min(values))
        assert abs(found.base + found.least[k] - float(min(values))) < 1 + 1e-6 * width
        assert abs(found.base + found.most[k] - float(max(values))) < 1 + 1e-6 * width


@settings(max_examples=examples(60), deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.sampled_from([1.0, -1.0]))
def test_a_clipped_square_is_what_lies_on_one_side(x, y, side):
    square = np.array([(-1e6, -1.0), (1e6, -1.0), (1e6, 1.0), (-1e6, 1.0)])
    part = clip(square, x, y, side)
    a, b = np.random.default_rng(0).uniform(-1, 1, (2, 200)) * [[1e6], [1.0]]
    allowed = side * (a + b * x - y) > 0

    def area(polygon):
        (p, q), (r, s) = polygon.T, np.roll(polygon, -1, 0).T
        return 0.5 * float(np.sum(p * s - r * q))

    kept, cut = area(part), area(clip(square, x, y, -side))
    assert kept + cut == pytest.approx(area(square), rel=1e-9)
    assert abs(kept / area(square) - allowed.mean()) < 0.15
    assert (side * (part[:, 0] + part[:, 1] * x - y) >= -1e-3).all()


worlds = st.tuples(
    st.integers(-3600 * SECOND, 3600 * SECOND), st.floats(-500e-6, 500e-6), st.integers(0, 2**32), st.integers(2, 40),
    st.floats(0.1, 300.0), st.floats(1e3, 1e7),
)  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(worlds)
@example((0, 0.0, 38, 38, 217.0, 1000.0))  # a burst whose best round was read before its first one
def test_injected_skew_and_drift_are_recovered_within_the_stated_bound(world):
    skew, drift, seed, count, gap, delay = world
    rng, clock = np.random.default_rng(seed), Shifted(skew, drift)
    times = np.cumsum(rng.uniform(0.2, 1.0, count) * gap * SECOND)
    there = np.sort(rng.uniform(times[0] - SECOND, times[-1] + 10 * SECOND, 300)).astype(np.int64)
    shown = clock.shows(there)
    found = Known.of(bursts(clock, times, noisy(delay), rng), int(shown[0]), int(shown[-1])).clock
    wrong = np.abs(found.aligned(shown) - there)
    assert (wrong <= found.error(shown) + 1).all()
    early, late = found.reach(shown)
    assert ((early <= there) & (there <= late)).all()
    assert (np.diff(found.aligned(shown)) >= 0).all()


def test_what_it_states_is_tight_and_better_than_an_average():
    """Answers take ten times as long as questions: an average of the middles of rounds is wrong by half of that."""
    rng, clock = np.random.default_rng(1), Shifted(-(10**9), 40e-6)
    times = np.linspace(0, 100, 60) * SECOND

    def slow(rng, n):
        return rng.exponential(500e3, n)

    asked = bursts(clock, times, noisy(5e3), rng)
    for burst in asked:
        burst[:, 2] += slow(rng, len(burst)).astype(np.int64)
    shown = clock.shows(times.astype(np.int64))
    found = Known.of(asked, int(shown[0]), int(shown[-1])).clock
    assert np.median(found.error(shown)) < 40e3  # a one-way trip takes 20 us at least
    assert np.abs(found.aligned(shown) - times).max() < 40e3
    middle = np.array([np.mean((b[:, 0] + b[:, 2]) / 2 - b[:, 1]) for b in asked])
    assert np.abs(middle - (times - shown)).mean() > 100e3
    assert found.drift == pytest.approx(-40e-6, abs=1e-6)


def test_rounds_that_were_held_up_change_nothing():
    rng, clock = np.random.default_rng(2), Shifted(5, -3e-6)
    times = np.linspace(0, 50, 20) * SECOND
    asked = bursts(clock, times, noisy(), rng)
    delay = np.array([-(10**8), 0, 10**8])
    held = [np.concatenate([b, b + delay]) for b in asked]
    a, b = (Known.of(rounds, int(asked[0][0, 1]), int(asked[-1][-1, 1])).clock for rounds in (asked, held))
    assert np.array_equal(a.least, b.least) and np.array_equal(a.most, b.most)


def test_a_long_run_whose_drift_changes():
    """Where no line can hold, another begins; between, the error stays below that of a round."""
    rng, clock = np.random.default_rng(3), Shifted(10**9, 80e-6, change=1000e9, later=-60e-6)
    times = np.linspace(0, 2000, 201) * SECOND
    shown = clock.shows(times.astype(np.int64))
    found = Known.of(bursts(clock, times, noisy(), rng), int(shown[0]), int(shown[-1])).clock
    wrong = np.abs(found.aligned(shown) - times)
    away = np.abs(times - 1000e9) > STRAIGHT
    assert (wrong[away] <= found.error(shown)[away] + 1).all()
    assert wrong.max() < 100e3 and found.error(shown).max() < 200e3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ppm", "trip"), [(0.25, 30e3), (0.5, 30e3), (2.0, 200e3)])
def test_what_is_stated_holds_where_rates_wander(ppm, trip, seed):
    """Each minute another rate, as by a daemon that disciplines the clock; short trips, so that little is allowed."""
    rng = np.random.default_rng(seed)
    turns = np.arange(0, 700, 64) * 1e9
    offset = 3e9 + np.append(0, np.cumsum(np.diff(turns) * (20e-6 + rng.normal(0, ppm * 1e-6, len(turns) - 1))))
    shows = lambda t: np.rint(t + np.interp(t, turns, offset)).astype(np.int64)  # noqa: E731
    asked = []
    for time in np.sort(rng.uniform(0, 600e9, 120)):
        there, back = rng.exponential(trip, (2, 3)) + trip / 2
        asked.append(np.stack([time - there, np.full(3, shows(time)), time + back], 1).astype(np.int64))
    found = Known.of(asked, int(asked[0][0, 1]), int(asked[-1][0, 1])).clock
    true = np.linspace(asked[0][0, 0] + 2 * trip, asked[-1][0, 0], 3000)
    wrong = np.abs(found.aligned(shows(true)) - true)
    assert (wrong <= found.error(shows(true)) + 1).all()
    assert found.worst < 2 * trip, "and it is of use"


def test_bounds_that_contradict_each_other_widen_the_error():
    """A clock that was set forward by a second between two rounds: what is stated covers both."""
    apart = 10 * SECOND
    least = bounds([(k * apart, 0 if k < 5 else SECOND) for k in range(10)])
    most = bounds([(k * apart, 50_000 if k < 5 else SECOND + 50_000) for k in range(10)])
    found = fit(least, most, least.at)
    assert found.offset(least.at[[0, 9]]) == pytest.approx([25_000, SECOND + 25_000], abs=1)
    assert found.error(least.at).max() < 60_000
    twice = fit(bounds([(0, 0), (0, SECOND)]), bounds([(0, 50_000), (0, SECOND + 50_000)]), np.zeros(1, np.int64))
    assert twice.error(np.zeros(1, np.int64))[0] == pytest.approx((SECOND + 50_000) / 2, abs=2 * SLACK)


def test_beyond_what_was_looked_at_the_error_grows():
    found = fit(bounds([(0, 0), (SECOND, 0)]), bounds([(0, 10), (SECOND, 10)]), np.array([0, SECOND]))
    errors = found.error(np.array([-SECOND, 0, SECOND, 2 * SECOND, 11 * SECOND]))
    assert errors[1] == pytest.approx(errors[2]) and errors[0] > errors[1] + SECOND * FASTEST
    assert errors[4] > errors[3] > errors[2]


def test_one_round_bounds_by_its_trip():
    found = fit(bounds([(7, 100)]), bounds([(7, 300)]), np.array([7]))
    assert found.offset(np.array([7])).tolist() == [200]
    assert found.error(np.array([7])).tolist() == [100 + SLACK]
    assert not found.exact and found.drift == 0


def test_the_same_clock_is_exact_everywhere():
    clock = same(-5)
    assert clock.exact and clock.aligned(np.array([0, 10**18])).tolist() == [-5, 10**18 - 5]
    assert clock.error(np.array([-(10**18), 10**18])).tolist() == [0, 0]


def test_times_of_an_epoch_keep_every_nanosecond():
    start = 1_795_221_232_326_894_784
    clock = Clock(np.array([start, start + 10**12]), np.zeros(2), np.full(2, 2.0), base=-(10**15) - 1)
    times = start + np.array([0, 1, 2, 999_999_999_999])
    assert (clock.aligned(times) - times).tolist() == [-(10**15)] * 4


def test_nothing_but_one_side_is_known_to_be_unknown():
    found = fit(bounds([(0, 0), (SECOND, 5)]), bounds([]), np.array([0, SECOND]))
    assert found.error(np.array([0]))[0] > WIDE / 4
