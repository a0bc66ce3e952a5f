"""pass@k and avg@k against brute force over all subsets; intervals that hold as often as they say."""

import math
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import ArgumentError
from tilth.rl import passk
from tilth.rl.passk import (
    Interval,
    avg_at_k,
    interval,
    normal,
    paired_change,
    pass_at_k,
    wilson,
)

samples = st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=1, max_size=7)


def one(outcomes, k):
    right = np.array([outcomes.count(1.0)])
    return pass_at_k(right, np.array([sum(not math.isnan(o) for o in outcomes)]), k)[0]


@settings(max_examples=examples(200), deadline=None)
@given(samples, st.integers(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(outcomes, k):
    known = [o for o in outcomes if not math.isnan(o)]
    found = one(outcomes, k)
    if len(known) < k:
        assert math.isnan(found)
    else:
        subsets = list(combinations(known, k))
        assert found == pytest.approx(sum(any(s) for s in subsets) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(200, 3, 100), (1000, 1, 1), (1000, 999, 500), (5000, 2500, 4000)])
def test_pass_at_k_by_exact_binomials_where_factorials_are_huge(n, c, k):
    expected = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(np.array([c]), np.array([n]), k)[0] == pytest.approx(expected, rel=1e-10)


def test_pass_at_k_is_unbiased():
    """Over all outcomes of 5 samples that are right with chance p, its mean is 1 - (1 - p)^3."""
    p, total = 0.3, 0.0
    for c in range(6):
        total += math.comb(5, c) * p**c * (1 - p) ** (5 - c) * pass_at_k(np.array([c]), np.array([5]), 3)[0]
    assert total == pytest.approx(1 - (1 - p) ** 3, abs=1e-12)


@given(st.integers(1, 30), st.data())
def test_pass_at_k_grows_with_k_and_with_right_samples(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    here = pass_at_k(np.array([c]), np.array([n]), k)[0]
    assert 0 <= here <= 1 and (here == 0) == (c == 0)
    if k < n:
        assert here <= pass_at_k(np.array([c]), np.array([n]), k + 1)[0] + 1e-15
    if c < n:
        assert here <= pass_at_k(np.array([c + 1]), np.array([n]), k)[0] + 1e-15
    assert pass_at_k(np.array([c]), np.array([n]), 1)[0] == pytest.approx(c / n)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.lists(st.floats(-2, 2) | st.just(math.nan), min_size=4, max_size=4), min_size=1), st.integers(1, 5))
def test_avg_at_k_is_the_mean_of_the_first_known(rows, k):
    found = avg_at_k(np.array(rows), k)
    for row, value in zip(rows, found):
        known = [v for v in row if not math.isnan(v)][:k]
        assert math.isnan(value) if len(known) < k else value == pytest.approx(sum(known) / k, abs=1e-12)


@pytest.mark.parametrize(
    "function", [lambda k: pass_at_k(np.ones(1), np.ones(1), k), lambda k: avg_at_k(np.ones((1, 1)), k)]
)
def test_k_is_at_least_one(function):
    with raises(ArgumentError, "k"):
        function(0)


# ---- intervals ----


def test_wilson_solves_the_score_equation():
    """Its ends are the shares p at which the score (found - p) / sqrt(p (1 - p) / n) is exactly z."""
    z = NormalDist().inv_cdf(0.975)
    for right, n in ((1, 10), (37, 50), (499, 500)):
        value, low, high = wilson(right, n)
        assert value == right / n and 0 < low < value < high < 1
        for p in (low, high):
            assert abs(right / n - p) / math.sqrt(p * (1 - p) / n) == pytest.approx(z)


def test_none_or_all_right_is_not_certainty():
    assert wilson(0, 20) == Interval(0.0, 0.0, pytest.approx(0.1611, abs=1e-4))
    assert interval(np.ones(20)) == Interval(1.0, pytest.approx(0.8389, abs=1e-4), 1.0)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_wilson_covers_as_promised(p):
    """Exactly, over the binomial distribution; for each p it swings around 95 %."""
    n = 200
    covered = 0.0
    for c in range(n + 1):
        _, low, high = wilson(c, n)
        covered += math.comb(n, c) * p**c * (1 - p) ** (n - c) * (low <= p <= high)
    assert 0.92 < covered < 0.98


@pytest.mark.parametrize("prompts", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_the_bootstrap_covers_as_promised(prompts):
    """Prompts of unlike difficulty, 4 samples each: the interval holds the true mean in about 95 of 100 datasets."""
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(300):
        chance = rng.beta(1, 1, prompts)
        values = rng.binomial(4, chance) / 4
        _, low, high = interval(values, seed=trial)
        hits += low <= 0.5 <= high
    assert 0.90 < hits / 300 < 0.99


def test_a_plain_percentile_would_be_too_narrow_for_few_prompts():
    assert passk._tail(8, 0.95) < 0.6 * passk._tail(10_000, 0.95) and passk._tail(10**6, 0.95) == pytest.approx(
        0.025, rel=1e-3
    )


def test_the_bootstrap_is_that_of_the_definition(monkeypatch):
    """Against a loop that draws each resample by itself; how many are drawn at a time changes nothing."""
    values = np.array([0.0, 0.25, 0.5, 1.0, 0.75, 0.25])
    found = interval(values, seed=9)
    numbers = passk.stream(9, "bootstrap")
    means = [values[numbers.integers(6 * i, 6, 6).numpy()].mean() for i in range(passk.RESAMPLES)]
    tail = passk._tail(6, 0.95)
    assert (found.low, found.high) == (np.quantile(means, tail), np.quantile(means, 1 - tail))
    monkeypatch.setattr(passk, "_CHUNK", 20)
    assert interval(values, seed=9) == found != interval(values, seed=10)


def test_the_same_numbers_for_the_same_seed_whatever_numpy_does():
    values = np.linspace(0, 1, 50)
    first = interval(values, seed=3)
    np.random.seed(0)
    np.random.rand(10)
    assert interval(values, seed=3) == first


def test_many_prompts_have_the_normal_interval_and_it_agrees_with_the_bootstrap():
    values = np.random.default_rng(0).random(5000)
    assert passk._bootstrap(values, 0, 0.95) == pytest.approx(normal(values, 0, 0.95), abs=5e-4)
    many = np.tile(values, 4)
    assert len(many) == passk.LARGE and interval(many) == normal(many, 0, 0.95)


def test_what_is_missing_is_left_out():
    assert interval(np.array([1.0, math.nan, 0.0, 1.0])) == wilson(2, 3)
    assert all(map(math.isnan, interval(np.full(3, math.nan))))
    assert all(map(math.isnan, interval(np.zeros(0))))


def test_one_prompt_says_nothing_of_others():
    value, low, high = interval(np.array([0.5]))
    assert value == 0.5 and math.isnan(low) and math.isnan(high)
    assert interval(np.array([1.0])).low < 0.3


def test_a_higher_level_is_wider():
    values = np.random.default_rng(1).random(40)
    assert interval(values, level=0.99).low < interval(values, level=0.9).low
    assert wilson(5, 10, 0.99).high > wilson(5, 10, 0.9).high


def pairs(both, better, worse, neither):
    before = [1.0] * both + [0.0] * better + [1.0] * worse + [0.0] * neither
    after = [1.0] * both + [1.0] * better + [0.0] * worse + [0.0] * neither
    return np.array(before), np.array(after)


def test_a_paired_change_is_that_of_a_textbook():
    found = paired_change(*pairs(794, 86, 150, 570))  # Agresti, Categorical Data Analysis, 10.1: (-0.06, -0.02)
    assert found == pytest.approx((-0.04, -0.059, -0.021), abs=5e-4)


@pytest.mark.parametrize("better, shown", [(0, False), (1, False), (4, False), (6, True)])
def test_a_few_better_answers_show_a_change_where_an_exact_test_sees_one(better, shown):
    low, high = paired_change(*pairs(150, better, 0, 150 - better))[1:]
    exact = 0.5**better - 0.5 ** (better + 1)  # mid-p of the sign test, one side
    assert (low > 0) == shown == (exact < 0.025) and high > 0


def test_paired_intervals_hold_as_often_as_they_say():
    random, held = np.random.default_rng(0), 0
    for _ in range(400):
        kind = random.choice(4, p=[0.5, 0.15, 0.05, 0.3], size=60)  # both, better, worse, neither: a change of 0.1
        low, high = paired_change(np.isin(kind, (0, 2)).astype(float), np.isin(kind, (0, 1)).astype(float))[1:]
        held += low <= 0.1 <= high
    assert 0.92 <= held / 400 <= 0.99


def test_missing_outcomes_and_graded_rewards_of_pairs():
    before, after = np.array([0.2, math.nan, 0.4, 0.6]), np.array([0.3, 0.9, 0.6, math.nan])
    assert paired_change(before, after) == pytest.approx(interval(np.array([0.1, math.nan, 0.2, math.nan])))
    assert all(map(math.isnan, paired_change(before[:0], after[:0])))
