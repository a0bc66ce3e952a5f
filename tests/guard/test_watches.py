"""Watches with a clear limit: each is silent below it, warns once above it, and anew after it was over."""

import numpy as np
import pytest

from tilth.guard.health import GIB, MIB, ClockWatch, LeakWatch, ShareWatch, disks


def test_a_share_is_warned_of_once_until_there_is_room_again():
    watch = ShareWatch("disk")
    left = [50, 6, 4, 3, 6, 4, 9, 4]
    found = [watch.take("/data", share, 100, "is nearly full") is not None for share in left]
    assert found == [False, False, True, False, False, False, False, True]
    assert watch.take("/other", 1, 100, "is nearly full").kind == "disk"  # each for itself


def test_a_disk_is_named_with_what_is_left():
    (found,) = disks({"/a": (90 * GIB, 100 * GIB), "/b": (1 * GIB, 100 * GIB)}, ShareWatch("disk"))
    assert found.evidence == "/b is nearly full: 1.00 GiB of 100.0 GiB are left" and found.ranks == ()


def leak(levels, left=GIB, **options):
    """Verdicts on one process by its memory in MiB, a sample each second."""
    watch = LeakWatch(window=60.0, **options)
    found = [watch.take(float(now), 3, level * MIB, left) for now, level in enumerate(levels)]
    return [(now, one) for now, one in enumerate(found) if one is not None]


def test_a_leak_is_found_with_the_time_that_is_left():
    ((at, found),) = leak(100 + 2 * np.arange(300))
    assert 55 <= at <= 65 and found.ranks == (3,) and found.kind == "leak"
    assert found.details["slope"] == pytest.approx(2 * MIB, rel=0.05) and "for 9 minutes" in found.evidence


@pytest.mark.parametrize(
    "levels",
    [
        np.full(300, 5000.0),
        np.minimum(100 + 60 * np.arange(300), 2000),  # a start
        100 + 500 * (np.arange(300) % 40 > 20),  # an evaluation, again and again
        100 + 0.5 * np.arange(300),  # too little to matter
        np.concatenate([np.full(150, 100.0), np.full(150, 3000.0)]),  # a step
    ],
)
def test_memory_that_starts_swings_or_steps_is_no_leak(levels):
    assert not leak(levels)


def test_a_leak_that_would_take_long_is_none_yet():
    assert leak(100 + 2 * np.arange(300), left=1000 * GIB) == []


def test_a_process_that_was_not_seen_for_a_while_begins_anew():
    watch = LeakWatch(window=60.0)
    for now in [*range(50), *range(100, 130)]:
        assert watch.take(float(now), 0, (100 + 4 * now) * MIB, GIB) is None


def test_a_clock_that_jumps_is_told_and_a_stopped_controller_is_not():
    watch = ClockWatch()
    times = [(0.0, 100.0), (1.0, 101.0), (600.0, 700.0), (601.0, 4301.0), (602.0, 4302.0), (603.0, 4100.0)]
    found = [watch.take(monotonic, wall) for monotonic, wall in times]
    assert [one is not None for one in found] == [False, False, False, True, False, True]
    assert "forward by 3600.0 s" in found[3].evidence and "back by 203.0 s" in found[5].evidence
