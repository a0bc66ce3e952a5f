"""Fits of time against work, beside brute force and known truth."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.plan import cost_fit as fit_module
from tilth.plan.cost_fit import error, fit, held_out_error, nonnegative

numbers = st.floats(-3, 3, allow_nan=False)


def work(n, seed=0):
    """Features (1, tokens, squares) of n micro-batches, and their seconds by a known law."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(100, 4000, n)
    squares = tokens * draw.integers(10, 200, n)
    features = np.stack([np.ones(n), tokens, squares], 1)
    return features, features @ TRUE, draw


TRUE = np.array([1e-3, 2e-6, 3e-9])


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_no_other_non_negative_coefficients_are_nearer(k, seed):
    draw = np.random.default_rng(seed)
    x, y = draw.normal(size=(k + 3, k)), draw.normal(size=k + 3)
    best = nonnegative(x.T @ x, x.T @ y)
    assert (best >= 0).all()
    lost = np.sum((x @ best - y) ** 2)
    for other in itertools.product(np.linspace(0, 3, 13), repeat=k):
        assert lost <= np.sum((x @ other - y) ** 2) + 1e-9
    slope = x.T @ (x @ best - y)  # Karush-Kuhn-Tucker: no way down that is allowed
    assert (slope >= -1e-8).all() and abs(slope @ best) < 1e-8


def test_exact_times_give_their_law_back():
    features, seconds, _ = work(50)
    found = fit(features, seconds)
    np.testing.assert_allclose(found, TRUE, rtol=1e-6)
    assert error(features, seconds, found).p90 < 1e-6


@pytest.mark.parametrize("share", [0.05, 0.2, 0.3])
def test_outliers_do_not_count(share):
    features, seconds, draw = work(1500)
    measured = seconds * draw.lognormal(0, 0.03, len(seconds))
    slow = draw.random(len(seconds)) < share
    measured[slow] *= draw.uniform(2, 30, int(slow.sum()))
    np.testing.assert_allclose(fit(features, measured), TRUE, rtol=0.05)
    plain = np.linalg.lstsq(features, measured, rcond=None)[0]
    assert error(features, seconds, plain).median > 5 * error(features, seconds, fit(features, measured)).median


def test_no_other_coefficients_have_less_absolute_error():
    """Beside a search: of the errors relative to the fit, and near it."""
    features, seconds, draw = work(300)
    seconds = seconds * draw.lognormal(0, 0.2, 300) * np.where(draw.random(300) < 0.3, 5, 1)
    found = fit(features, seconds)
    at = features @ found

    def lost(b):
        return np.sum(np.abs(features @ b - seconds) / at)

    least = lost(found)
    for moved in itertools.product((0.97, 1, 1.03), repeat=3):
        assert least <= lost(found * moved) + 1e-3
    above = np.mean(seconds > at)
    assert above == pytest.approx(0.5, abs=0.02)


@settings(max_examples=examples(25), deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(1e-6, 1e6))
def test_units_do_not_matter(of_time, of_work):
    features, seconds, draw = work(60)
    seconds = seconds * draw.lognormal(0, 0.1, 60)
    once = fit(features, seconds)
    np.testing.assert_allclose(
        fit(features * [1, of_work, 1], seconds * of_time) * [1, of_work, 1], once * of_time, 1e-5
    )


def test_what_would_be_negative_is_nothing():
    tokens = np.arange(1.0, 40)
    found = fit(np.stack([np.ones(39), tokens], 1), 1e-3 * tokens - 5e-4)  # a fixed part below 0 is no cost
    assert found[0] == 0 and found[1] > 0


def test_rare_sizes_count_by_weight():
    size = np.array([8.0] * 500 + [1e6] * 2)
    features = np.stack([np.ones(502), size], 1)
    draw = np.random.default_rng(1)
    seconds = (1e-4 + 1e-9 * size) * draw.lognormal(0, 0.3, 502)
    weight = np.where(size == 8, 1 / 500, 1 / 2)
    at = np.array([1.0, 1e6])
    assert seconds[-2:].min() * 0.999 <= at @ fit(features, seconds, weight) <= seconds[-2:].max() * 1.001


@pytest.mark.parametrize("seconds", [[], [0.0, 0.0]])
def test_nothing_to_fit(seconds):
    features = np.ones((len(seconds), 2))
    assert fit(features, np.array(seconds)).tolist() == [0, 0]
    nothing = error(features, np.array(seconds), np.zeros(2))
    assert nothing.count == 0 and np.isnan(nothing.median) and np.isnan(nothing.p90)


def test_one_row_and_columns_that_say_the_same():
    assert fit(np.array([[2.0]]), np.array([6.0])).tolist() == pytest.approx([3])
    both = fit(np.array([[2.0, 1.0]] * 3), np.array([6.0, 6, 6]))
    assert both.tolist() == pytest.approx([3, 0])  # the first of them
    assert fit(np.array([[0.0, 1.0]] * 3), np.array([6.0, 6, 6])).tolist() == pytest.approx([0, 6])


def test_a_median_row_is_what_a_constant_fits():
    found = fit(np.ones((101, 1)), np.r_[np.full(80, 2.0), np.full(21, 50.0)])
    assert found.tolist() == pytest.approx([2.0])


def test_errors_are_relative():
    found = error(np.array([[1.0]] * 10), np.array([1.0] * 8 + [2.0, 0.0]), np.array([1.1]))
    assert (found.median, found.count) == (pytest.approx(0.1), 9)
    assert found.p90 == pytest.approx(np.quantile([0.1] * 8 + [0.45], 0.9))


def test_of_very_many_rows_some_are_looked_at(monkeypatch):
    monkeypatch.setattr(fit_module, "ENOUGH", 100)
    features, seconds, _ = work(5000)
    looked = []
    robust = fit_module._robust
    monkeypatch.setattr(fit_module, "_robust", lambda x, y, c: looked.append(len(x)) or robust(x, y, c))
    np.testing.assert_allclose(fit(features, seconds, np.ones(5000)), TRUE, rtol=1e-6)
    assert looked == [100]


@pytest.mark.parametrize("turns", [2, 3, 4, 8])
def test_of_ranks_that_take_turns_none_is_left_out(monkeypatch, turns):
    """Each rank is as much slower than the one before."""
    monkeypatch.setattr(fit_module, "ENOUGH", 1000)
    features, seconds, draw = work(1000 * turns)
    slow = seconds * (1 + np.arange(len(seconds)) % turns) * draw.lognormal(0, 0.2, len(seconds))
    above = np.mean(slow > features @ fit(features, slow))
    assert above == pytest.approx(0.5, abs=0.05), "a median has half of all rows above it, not of one rank's"


def test_what_is_drawn_is_the_same_each_time(monkeypatch):
    monkeypatch.setattr(fit_module, "ENOUGH", 50)
    features, seconds, draw = work(5000)
    seconds = seconds * draw.lognormal(0, 0.3, 5000)
    assert fit(features, seconds).tolist() == fit(features, seconds).tolist()


def test_rows_that_are_held_out_do_not_tell_the_fit_anything():
    """Every fifth step alone has work of the second kind: a fit that saw it would be exact."""
    step = np.repeat(np.arange(20), 3)
    held = step % 5 == 4
    features = np.stack([np.ones(60), held], 1)
    assert error(features, 1.0 + held, fit(features, 1.0 + held)).p90 < 1e-6
    found = held_out_error(features, 1.0 + held, step)
    assert (found.median, found.p90, found.count) == (pytest.approx(0.5), pytest.approx(0.5), 12)


def test_errors_are_those_of_steps_that_were_not_fitted():
    features, seconds, _ = work(100)
    step = np.repeat(np.arange(3, 23), 5)
    assert held_out_error(features, seconds, step).p90 < 1e-6
    odd = np.where(step % 5 == 2, 2 * seconds, seconds)  # every fifth step takes twice as long: the fit does not know
    found = held_out_error(features, odd, step)
    assert (found.median, found.count, found.held_out) == (pytest.approx(0.5), 20, True)


def test_a_single_step_is_compared_with_itself():
    features, seconds, _ = work(9)
    found = held_out_error(features, seconds, np.full(9, 4), np.ones(9))
    assert (found.count, found.held_out) == (9, False)
    assert held_out_error(features, seconds, np.repeat([4, 5], [6, 3])).count == 3
    assert held_out_error(features[:0], seconds[:0], np.zeros(0, int)).count == 0
