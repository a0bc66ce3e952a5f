"""Packing and balance against brute force, and for what they promise."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.plan.packing import balance, micro_batches

lengths = st.lists(st.integers(0, 50), max_size=40)


@given(lengths, st.integers(1, 60))
def test_each_row_once_and_within_the_budget(sizes, budget):
    packed = micro_batches(sizes, budget)
    assert sorted(np.concatenate([[], *packed]).tolist()) == list(range(len(sizes)))
    for rows in packed:
        assert rows.dtype == np.int64 and (np.diff(rows) > 0).all()
        total = sum(sizes[r] for r in rows)
        assert total <= budget or len([r for r in rows if sizes[r]]) == 1


@given(lengths, st.integers(1, 60))
def test_over_long_rows_are_alone(sizes, budget):
    for rows in micro_batches(sizes, budget):
        assert len(rows) == 1 or all(sizes[r] <= budget for r in rows)


@given(lengths, st.integers(1, 60))
def test_deterministic_and_in_order_of_first_rows(sizes, budget):
    packed = micro_batches(sizes, budget)
    assert all((a == b).all() for a, b in zip(packed, micro_batches(np.array(sizes), budget)))
    assert [rows[0] for rows in packed] == sorted(rows[0] for rows in packed)


def fewest(sizes, budget):
    """Fewest bins, by trying every assignment."""
    for bins in range(1, len(sizes) + 1):
        for assignment in itertools.product(range(bins), repeat=len(sizes)):
            loads = [0] * bins
            for size, bin in zip(sizes, assignment):
                loads[bin] += size
            if max(loads) <= budget:
                return bins
    return 0


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_close_to_the_fewest(sizes):
    best = fewest(sizes, 10)
    assert best <= len(micro_batches(sizes, 10)) <= math.ceil(best * 11 / 9)


def test_heavy_tailed_lengths_fill_their_micro_batches():
    sizes = (1000 / np.arange(1, 2001)).astype(int) + 8
    packed = micro_batches(sizes, 2048)
    assert len(packed) == math.ceil(sizes.sum() / 2048)


def test_nothing():
    assert micro_batches([], 10) == []


def test_many_rows_are_packed_without_delay():
    start = time.perf_counter()
    micro_batches(np.arange(20_000) % 997 + 1, 4096)
    assert time.perf_counter() - start < 10  # 0.1 s on a quiet machine; quadratic packing took minutes


# -- balance ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), max_size=30), st.integers(1, 8))
def test_balance_gives_each_row_to_one_rank(costs, ranks):
    parts = balance(costs, ranks)
    assert len(parts) == ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(costs)))
    assert all((np.diff(p) > 0).all() and p.dtype == np.int64 for p in parts)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_balance_within_grahams_bound_of_the_best(costs, ranks):
    best = min(
        max(sum(c for c, r in zip(costs, assignment) if r == rank) for rank in range(ranks))
        for assignment in itertools.product(range(ranks), repeat=len(costs))
    )
    worst = max(sum(costs[i] for i in part) for part in balance(costs, ranks))
    assert best <= worst <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


@pytest.mark.parametrize("ranks", [8, 64])
def test_balance_of_many_rows_is_nearly_even(ranks):
    costs = 1000 / np.arange(1, 4097) ** 0.5
    loads = np.array([costs[part].sum() for part in balance(costs, ranks)])
    assert loads.max() / loads.mean() < 1.01


def test_more_ranks_than_rows():
    assert sorted(len(part) for part in balance([3, 1], 4)) == [0, 0, 1, 1]
