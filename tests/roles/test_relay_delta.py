"""Changes of weights: back to the same bits, whatever has changed, and no longer than the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.roles.relay_delta import BLOCK, packed, unpack

sizes = st.one_of(st.integers(1, 40), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7]))


@settings(max_examples=examples(60), deadline=None)
@given(sizes, st.floats(0, 1), st.sampled_from([np.uint16, np.uint32, np.uint64]), st.integers(0, 2**32 - 1))
def test_what_was_packed_gives_the_same_bits_back(size, share, dtype, seed):
    chance = np.random.default_rng(seed)
    old = chance.integers(0, np.iinfo(dtype).max, size, dtype)
    new = np.where(chance.random(size) < share, chance.integers(0, np.iinfo(dtype).max, size, dtype), old)
    words, row = old.copy(), packed(new, old)
    unpack(row, words)
    assert row.dtype == np.uint8 and len(row) <= new.nbytes
    np.testing.assert_array_equal(words, new)


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 3 * BLOCK - 1])
def test_bytes_are_those_of_the_changes(place):
    """Four for each block, and two for the place and those of the value of each change."""
    old = np.zeros(3 * BLOCK, np.uint16)
    assert len(packed(old, old)) == 12
    new = old.copy()
    new[place] = 7
    assert packed(new, old)[:12].view(np.uint32).tolist() == [int(place // BLOCK == i) for i in range(3)]
    assert packed(new, old)[12:].view(np.uint16).tolist() == [place % BLOCK, 7]


def test_what_changes_everywhere_travels_whole():
    old = np.arange(100, dtype=np.uint16)
    assert packed(old + 1, old).tobytes() == (old + 1).tobytes()
