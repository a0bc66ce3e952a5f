"""Packing and balance against brute force, and for what they promise."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.work import work_of
from tilth.core.errors import ArgumentError
from tilth.plan.packing import APART, balance, divide, micro_batches

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


def test_work_of_packing_grows_as_the_rows():
    few, many = (work_of(lambda: micro_batches(np.arange(n) % 997 + 1, 4096)) for n in (500, 2000))
    assert many < 5 * few


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


# -- divide ----------------------------------------------------------------------------------------------------------


def greatest(costs, parts):
    return max(sum(costs[r] for r in part) for part in parts)


def straddling(groups, parts):
    """Groups that lie on more than one rank."""
    held = [{groups[r] for r in part} for part in parts]
    return {g for a, b in itertools.combinations(held, 2) for g in a & b}


rows_with_groups = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=24)


@given(rows_with_groups, st.integers(1, 6), st.booleans(), st.booleans())
def test_divide_gives_each_row_to_one_part_and_is_balanced(rows, parts, with_lengths, with_groups):
    lengths, groups = [n for n, _ in rows], [g for _, g in rows]
    if not (with_lengths or with_groups):
        with raises(ArgumentError, "lengths"):
            divide(None, None, parts)
        return
    found = divide(lengths if with_lengths else None, groups if with_groups else None, parts)
    assert len(found) == parts
    assert sorted(np.concatenate(found).tolist()) == list(range(len(rows)))
    assert all((np.diff(p) > 0).all() and p.dtype == np.int64 for p in found)
    costs = lengths if with_lengths else [1] * len(rows)
    assert greatest(costs, found) <= APART * greatest(costs, balance(costs, parts)) + 1e-9
    again = divide(lengths if with_lengths else None, groups if with_groups else None, parts)
    assert all((a == b).all() for a, b in zip(found, again))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 4))
def test_groups_of_equal_rows_stay_together_if_any_assignment_of_whole_groups_is_as_even(sizes, parts, cost):
    """Brute force: where heaviest-first reaches what the best assignment of whole groups does, no group is split."""
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    costs = [cost] * len(groups)
    limit = APART * greatest(costs, balance(costs, parts))
    best = min(
        max(sum(cost * s for s, r in zip(sizes, assignment) if r == rank) for rank in range(parts))
        for assignment in itertools.product(range(parts), repeat=len(sizes))
    )
    found = divide(costs, groups, parts)
    if best > limit:
        assert straddling(groups, found)
    heaviest_first = balance([cost * s for s in sizes], parts)
    if max(sum(cost * sizes[g] for g in part) for part in heaviest_first) <= limit:
        assert not straddling(groups, found)


def test_usual_batches_keep_every_group_whole():
    """64 prompts x 8 samples on 2, 4 and 8 ranks, with lengths that differ a lot."""
    groups = np.repeat(np.arange(64), 8)
    lengths = 20 + (np.arange(512) * 7919) % 300
    for parts in (2, 4, 8):
        assert not straddling(groups, divide(lengths, groups, parts))
        assert not straddling(groups, divide(None, groups, parts))


def test_a_group_that_is_too_heavy_for_a_rank_is_split_and_the_others_are_not():
    groups = [0] * 8 + [1, 1] + [2, 2]
    found = divide([10] * 12, groups, 3)
    assert straddling(groups, found) == {0}
    assert greatest([10] * 12, found) == 40


def test_without_groups_divide_is_balance():
    costs = [5, 9, 1, 7, 3]
    assert [p.tolist() for p in divide(costs, None, 2)] == [p.tolist() for p in balance(costs, 2)]


def test_fewer_rows_than_parts_and_no_rows_at_all():
    assert sorted(len(p) for p in divide([4, 4], [0, 0], 4)) == [0, 0, 1, 1]
    assert [len(p) for p in divide([], [], 3)] == [0, 0, 0]


def test_names_of_groups_do_not_matter():
    lengths, groups = [30, 10, 20, 20, 15, 25], np.array([0, 0, 1, 1, 2, 2])
    renamed = np.array([900, 900, -7, -7, 2**62, 2**62])
    assert [p.tolist() for p in divide(lengths, groups, 2)] == [p.tolist() for p in divide(lengths, renamed, 2)]


def test_sizes_that_differ():
    with raises(ArgumentError, "groups"):
        divide([1, 2], [0, 0, 0], 2)


def test_work_of_dividing_grows_as_the_rows():
    few, many = (work_of(lambda: divide(np.arange(n) % 997 + 1, np.arange(n) // 8, 64)) for n in (500, 2000))
    assert many < 5 * few
