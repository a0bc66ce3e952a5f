"""Resident memory stays flat, however many steps a run has."""

import statistics

import pytest

from tests.flows import tiny

STEPS, SETTLED = 2000, 300
MOST = 20e6
"""Bytes that a run may grow by after it has settled."""


@pytest.mark.slow
def test_resident_memory_is_flat_over_two_thousand_steps(tmp_path):
    """Every step updates (flat groups are kept), evaluates, saves and writes now and then, as a long run does."""
    resident = []
    made = tiny.recipe(
        tmp_path,
        supervised={"steps": 0},
        algorithm={"steps": STEPS, "drop_flat": False, "kl_coef": 0.01},
        optimizer={"lr": 1e-4},
        run={"eval_every": 100, "save_every": 50},
    )
    tiny.run(made, observers=[tiny.Recorder(at_step=lambda r: resident.append(r["memory/rss"]))])
    assert len(resident) == STEPS
    curve = [round(statistics.median(resident[i : i + 100]) / 1e6, 1) for i in range(0, STEPS, 100)]
    settled = statistics.median(resident[SETTLED - 100 : SETTLED])
    assert statistics.median(resident[-100:]) - settled < MOST, f"MB by hundreds of steps: {curve}"
    assert max(resident[SETTLED:]) - settled < MOST, f"MB by hundreds of steps: {curve}"
