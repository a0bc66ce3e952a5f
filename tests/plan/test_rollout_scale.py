"""The scale study of rollouts: its lengths, equal work of its contenders, and the order of the published table."""

import numpy as np
import pytest

from tests.scripts import script

SIZE = {"samples": 512, "updates": 4}


@pytest.fixture(scope="module")
def made():
    return script("rollout_scale.py")


def test_lengths_have_the_published_tail(made):
    found = np.random.default_rng(0).permutation(made.drawn(100_000, 0))
    assert np.median(found) == pytest.approx(made.MEDIAN, rel=0.02) and found.max() <= made.LONGEST
    assert np.percentile(found, 99) == pytest.approx(made.TAIL * made.MEDIAN, rel=0.05)


def test_contenders_share_all_but_the_division_of_devices(made):
    together, apart = made.job("7B", 64, 64, **SIZE), made.job("7B", 64, 32, **SIZE)
    assert (together.devices, apart.devices, apart.replicas) == (64, 32, 32)
    assert together.costs == apart.costs and together.lengths == apart.lengths
    assert made.job("72B", 64, 32, **SIZE).replicas == 8


def test_the_order_of_the_published_table(made):
    rows = {row["mode"]: row for row in made.scale("7B", 64, **SIZE)}
    order = ["sync", "one-step", "4-step", "free", "free+repack"]
    speeds = [rows[name]["tokens_per_second"] for name in order]
    assert speeds == sorted(speeds) and speeds[-1] > 2 * speeds[0]
    assert rows["free+repack"]["kv_use_share"] > rows["free"]["kv_use_share"]
    assert rows["free"]["weight_wait_seconds"] < (1 - made.WAIT) * rows["one-step"]["weight_wait_seconds"]
