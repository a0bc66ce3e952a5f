"""The order of draws: every thing once an epoch, a pure function of seed and position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilth.core.random import stream
from tilth.data.order import Order

ROWS = st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True).map(sorted)


@given(ROWS, st.integers(0, 5), st.integers(0, 40), st.integers(0, 40))
def test_any_stretch_is_a_part_of_one_endless_sequence(rows, seed, start, count):
    order, base = Order(np.array(rows)), stream(seed, "x")
    whole = order.take(base, 0, start + count)
    assert np.array_equal(Order(np.array(rows)).take(base, start, count), whole[start:])


@given(ROWS, st.integers(0, 5), st.integers(0, 9))
def test_an_epoch_is_a_permutation_of_everything(rows, seed, epoch):
    n = len(rows)
    assert sorted(Order(np.array(rows)).take(stream(seed, "x"), epoch * n, n)) == rows


def test_epochs_and_streams_differ():
    order = Order(np.arange(50))
    a, b = order.take(stream(0, "x"), 0, 50), order.take(stream(0, "x"), 50, 50)
    assert not np.array_equal(a, b) and not np.array_equal(a, order.take(stream(0, "y"), 0, 50))


def test_nothing_is_taken_where_nothing_is_asked_for():
    assert len(Order(np.arange(10)).take(stream(1, "x"), 0, 0)) == 0
