"""The simulated 175B job of MegaScale: every step of its ablation helps, and the published MFU is near."""

from tests.scripts import script


def test_every_step_of_the_ablation_raises_the_mfu_and_the_first_gains_most():
    made = script("megascale.py")
    rows = made.ablation(made.fitted())
    found = [row["mfu_percent"] for row in rows]
    assert found == sorted(found) and len(set(found)) == len(found)
    assert found[0] - made.ABLATION[0] < 1e-6
    assert max(abs(row["mfu_percent"] - row["published_percent"]) for row in rows) < 5
    gains = [row["gain_points"] for row in rows[1:]]
    assert max(gains) == gains[0] and min(gains) == gains[1]  # PTB and SWA, as published


def test_the_strong_scaling_is_near_the_published_one_and_keeps_its_order():
    made = script("megascale.py")
    rows = made.scaling(made.fitted())
    assert all(abs(row["mfu_percent"] - row["published_percent"]) < 5 for row in rows)
    ours, theirs = rows[::2], rows[1::2]
    assert all(a["mfu_percent"] > b["mfu_percent"] + 8 for a, b in zip(ours, theirs))


def test_each_overlap_that_is_left_out_costs_time():
    made = script("megascale.py")
    assert all(row["lost_points"] > 0.5 for row in made.without(made.fitted()))
