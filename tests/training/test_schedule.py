import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.training.optim import lr_factor

KINDS = ("constant", "linear", "cosine", "wsd", "plateau")


@given(st.sampled_from(KINDS), st.integers(1, 500), st.integers(0, 50))
def test_factor_stays_between_nothing_and_the_peak(kind, total, warmup):
    values = [lr_factor(kind, s, total, warmup) for s in range(total)]
    assert all(0 < v <= 1 + 1e-12 for v in values)


@given(st.sampled_from(KINDS), st.integers(1, 50))
def test_the_rise_is_linear_and_never_starts_at_zero(kind, warmup):
    values = [lr_factor(kind, s, 200, warmup) for s in range(warmup)]
    assert values == pytest.approx([(s + 1) / warmup for s in range(warmup)])


def test_cosine_is_half_way_in_the_middle_and_zero_after_the_end():
    assert lr_factor("cosine", 50, 100, 0) == pytest.approx(0.5)
    assert lr_factor("cosine", 100, 100, 0) == pytest.approx(0.0, abs=1e-12)
    assert lr_factor("cosine", 25, 100, 0) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_linear_falls_evenly():
    falls = [lr_factor("linear", s, 100, 20) - lr_factor("linear", s + 1, 100, 20) for s in range(20, 99)]
    assert falls == pytest.approx([1 / 80] * len(falls))


def test_wsd_is_flat_then_falls_in_the_last_fifth():
    assert [lr_factor("wsd", s, 100, 5) for s in (5, 40, 79, 80)] == [1.0] * 4
    assert lr_factor("wsd", 90, 100, 5) == pytest.approx(0.5)
    assert lr_factor("wsd", 100, 100, 5) == 0.0


def test_plateau_rises_holds_and_falls_to_zero():
    found = [lr_factor("plateau", s, 100, 10, 40) for s in range(101)]
    assert found[9:51] == [1.0] * 42 and found[0] == 0.1
    assert found[51:] == pytest.approx([(100 - s) / 50 for s in range(51, 101)])
    assert [lr_factor("plateau", s, 20, 10, 10) for s in (9, 19, 20)] == [1.0, 1.0, 0.0]


def test_a_run_longer_than_planned_does_not_go_negative():
    assert all(lr_factor(k, 150, 100, 0) >= 0 for k in KINDS)
