"""Ranks and shares of equation 3 against a search over all shares."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilth.plan.offload import HostRates, OffloadLimits, fewest_ranks, ranks_needed, ratios

CAPACITY = 64


def limits_of(layers=8, bandwidth=40.0, host=np.inf):
    """A layer of 2 bytes for a token, whose seconds grow with the square of the length."""
    return OffloadLimits(layers, 2.0, lambda n: 0.04 * n + n**2 / 1024, HostRates(bandwidth, host, 4.0))


def searched(length, limits):
    """Fewest ranks and the least share for them, of 20,001 shares."""
    shares = np.linspace(0, 1, 20_001)
    needed = ranks_needed(np.full(len(shares), length), CAPACITY, limits, shares)
    moved = shares * (limits.layers - 2) * limits.per_token * length / needed
    hidden = (
        shares * limits.per_token * length / limits.rates.bandwidth
        <= limits.work(np.array([float(length)]))[0] / limits.rates.flops + 1e-9
    )
    allowed = hidden & (moved <= limits.rates.host + 1e-6)
    best = needed[allowed].min()
    return best, shares[allowed & (needed == best)].min()


@settings(max_examples=60)
@given(st.integers(CAPACITY + 1, 4000), st.sampled_from([3, 8, 32]), st.sampled_from([1.0, 40.0, 1e6]))
def test_ranks_and_shares_are_those_of_a_search(length, layers, bandwidth):
    limits, lengths = limits_of(layers, bandwidth), np.array([length])
    ranks, share = searched(length, limits)
    found = fewest_ranks(lengths, CAPACITY, limits)
    assert found[0] == ranks
    assert ratios(lengths, found, CAPACITY, limits)[0] == pytest.approx(share, abs=1e-4)


@given(st.integers(CAPACITY + 1, 4000), st.floats(1, 20_000))
def test_no_rank_gives_its_host_more_than_it_holds(length, host):
    limits, lengths = limits_of(host=host), np.array([length])
    ranks = fewest_ranks(lengths, CAPACITY, limits)
    share = ratios(lengths, ranks, CAPACITY, limits)
    assert share[0] * (limits.layers - 2) * limits.per_token * length / ranks[0] <= host + 1e-6
    assert share[0] <= limits.movable(lengths)[0] + 1e-6
    assert (ranks_needed(lengths, CAPACITY, limits, share + 1e-9) <= ranks).all()


@given(st.integers(1, 4000), st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_ranks_do_not_grow_with_the_share(length, shares):
    needed = ranks_needed(np.full(len(shares), length), CAPACITY, limits_of(), np.sort(shares))
    assert (np.diff(needed) <= 0).all()


def test_a_longer_sequence_may_need_fewer_ranks():
    """The example of the paper's constants: half of 128K rows move, and all of 256K."""
    limits = OffloadLimits(32, 1.0, lambda n: n * np.where(n > 200_000, 1.0, 0.5), HostRates(1.0, np.inf, 1.0))
    assert fewest_ranks(np.array([131_072, 262_144]), 8192, limits).tolist() == [9, 2]


def test_what_fits_stays():
    lengths = np.array([1, 63, 64, 65, 128])
    assert fewest_ranks(lengths, CAPACITY, None).tolist() == [1, 1, 1, 2, 2]
    assert ratios(lengths, fewest_ranks(lengths, CAPACITY, None), CAPACITY, limits_of()).tolist() == [0.0] * 5
    assert fewest_ranks(lengths, CAPACITY, limits_of(layers=2)).tolist() == [1, 1, 1, 2, 2]
