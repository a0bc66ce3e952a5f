import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tilth.core.batch import Batch
from tilth.flows.reward_shaping import has_spread, is_mixed


def batch(groups, rewards):
    said = np.array(rewards, np.float32)
    return Batch({"group": np.array(groups, np.int64), "reward": said, "outcome": said})


def test_groups_with_equal_rewards_are_left_out():
    kept = has_spread(batch([7, 7, 3, 3, 9], [1, 0, 1, 1, 1]))
    assert kept.tolist() == [True, True, False, False, False]


def test_what_is_unknown_neither_makes_a_group_mixed_nor_hides_that_it_is():
    nan = np.nan
    groups = batch([1, 1, 1, 2, 2, 3, 3, 3], [1, 0, nan, nan, nan, 1, nan, 1])
    assert is_mixed(groups).tolist() == [True] * 3 + [False] * 5


def test_no_rows_no_mask():
    assert has_spread(batch([], [])).tolist() == []


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 0.7, 1.0])), max_size=40))
def test_equals_a_loop_over_groups(rows):
    groups, rewards = [g for g, _ in rows], [r for _, r in rows]
    expected = [len({r for g, r in rows if g == mine}) > 1 for mine in groups]
    assert has_spread(batch(groups, rewards)).tolist() == expected
