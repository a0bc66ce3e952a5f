"""Changes of weights: back to the same bits, whatever has changed, and no longer than the whole."""

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.roles.relay_delta import packed, unpacked


def versions(size, share, seed=0):
    """Random bytes, and those with a share of others."""
    chance = np.random.default_rng(seed)
    old, other = (chance.integers(0, 256, size, np.uint8) for _ in range(2))
    return old, np.where(chance.random(size) < share, other, old)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 5_000), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_what_was_packed_gives_the_same_bits_back(size, share, seed):
    old, new = versions(size, share, seed)
    row = packed(new, old)
    assert row.dtype == np.uint8 and len(row) <= size
    np.testing.assert_array_equal(unpacked(row, old), new)


def test_few_changes_are_short_and_bits_that_all_change_travel_whole():
    old, new = versions(100_000, 0.01)
    assert len(packed(old, old)) < 100 and len(packed(new, old)) < 0.05 * 100_000
    assert packed(versions(100_000, 1.0)[1], old).tobytes() == versions(100_000, 1.0)[1].tobytes()


def test_what_is_cut_is_an_error():
    old, new = versions(1_000, 0.01)
    with pytest.raises((OSError, pyarrow.ArrowException)):
        unpacked(packed(new, old)[:-5], old)
