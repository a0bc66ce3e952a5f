"""A delta gives back every bit, is small where little has changed, and refuses bytes that are none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core.delta import apply_delta, encode_delta, whole_delta
from tilth.core.errors import ArgumentError

WORDS = (np.uint8, np.uint16, np.uint32, np.uint64)


@st.composite
def pairs(draw):
    """Two arrays of one size and dtype, with any part of the words changed."""
    dtype, n = draw(st.sampled_from(WORDS)), draw(st.integers(0, 600))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = chance.integers(0, np.iinfo(dtype).max, n, dtype, endpoint=True)
    flips = chance.integers(0, draw(st.integers(0, np.iinfo(dtype).max)), n, dtype, endpoint=True)
    return before, before ^ np.where(chance.random(n) < draw(st.floats(0, 1)), flips, 0).astype(dtype)


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_every_bit_comes_back(pair):
    before, now = pair
    kept, delta = before.copy(), encode_delta(before, now)
    other, there = np.empty_like(now), before.copy()
    apply_delta(delta, before, other)
    apply_delta(delta, there, there)
    assert (other == now).all() and (there == now).all() and (before == kept).all()
    assert len(delta) <= len(whole_delta(now))
    apply_delta(whole_delta(now), None, other)
    assert (other == now).all()


@settings(max_examples=200, deadline=None)
@given(pairs(), st.data())
def test_cut_or_longer_bytes_are_refused(pair, data):
    before, now = pair
    delta = encode_delta(before, now)
    cut = delta[: data.draw(st.integers(0, len(delta) - 1))]
    for wrong in (cut, delta + b"\0"):
        with raises(ArgumentError, "delta"):
            apply_delta(wrong, before, np.empty_like(now))


@settings(max_examples=300, deadline=None)
@given(pairs(), st.binary(max_size=200))
def test_any_other_bytes_are_refused_or_give_an_array(pair, noise):
    """No other exception, and no array that is longer than what was asked for."""
    before, now = pair
    try:
        apply_delta(b"\1" + noise, before, np.empty_like(now))
    except ArgumentError as error:
        assert error.key == "delta"


def test_changes_without_what_they_change_are_refused():
    before, now = np.zeros(1000, np.uint16), np.eye(1, 1000, dtype=np.uint16)[0]
    with raises(ArgumentError, "delta"):
        apply_delta(encode_delta(before, now), None, np.empty_like(now))


def test_bytes_that_would_decode_to_far_more_are_not_decoded():
    many = encode_delta(np.zeros(1 << 22, np.uint16), np.ones(1 << 22, np.uint16))
    with raises(ArgumentError, "delta"):
        apply_delta(many, np.zeros(8, np.uint16), np.empty(8, np.uint16))


@pytest.mark.parametrize(("part", "most"), [(0.0, 0.01), (0.01, 0.02), (0.1, 0.1), (1.0, 0.6)])
def test_small_where_little_has_changed_by_a_unit_in_the_last_place(part, most):
    chance = np.random.default_rng(3)
    before = chance.integers(0, 2**16, 1 << 18, np.uint16)
    now = before + (chance.random(len(before)) < part).astype(np.uint16)
    assert len(encode_delta(before, now)) <= most * now.nbytes
