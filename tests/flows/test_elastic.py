"""Batches in proportion to the number of workers (``guard.batch``)."""

import pytest

from tests.flows import tiny
from tilth.checkpoint import latest, open_checkpoint
from tilth.data.prompts import PromptSet
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def go(folder, workers, stop=0, batch="scale", size=8, **optimizer):
    """Train on 8 batches of ``size`` for 2 workers; stop: step after which the run is interrupted."""

    def fall(record):
        if stop and record["step"] == stop:
            raise Interrupted("now")

    made = tiny.recipe(
        folder, flow="sft", model={"context": 24}, cluster={"backend": "local", "workers": workers},
        supervised={"steps": 8, "batch": size, "check_every": 100, "lr": 1e-2}, guard={"batch": batch},
        optimizer=optimizer, run={"dir": str(folder), "save_every": 1, "eval_prompts": 8},
    )  # fmt: skip
    try:
        return tiny.run(
            made, reward=None, name="a", prompts=PromptSet.of(tiny.SUMS), allow=["cluster"],
            callbacks=[tiny.Recorder(fall)],
        ).directory  # fmt: skip
    except Interrupted:
        return folder / "a"


def state(directory):
    return open_checkpoint(latest(directory / "checkpoints")).objects


def test_the_batch_follows_the_workers_and_the_run_has_the_samples_that_it_would_have_had(tmp_path):
    ends = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        go(folder, 2, stop=3, ramp_steps=3)  # after a step is committed, and before it is saved
        go(folder, 1, stop=7, ramp_steps=3)
        if killed:
            go(folder, 2, stop=9, ramp_steps=3)  # within the ramp
        directory = go(folder, 2, ramp_steps=3)
        ends.append((tiny.weights(directory), [r["lr"] for r in read_metrics(directory)]))
    progress = state(directory)["progress"]
    assert progress["drawn"]["examples"] == 64 and progress["phase_step"] == 10 and progress["more_samples"] == -16
    assert state(directory)["positions"]["policy"]["steps"] == 8
    rates = ends[0][1]
    half = 0.5**0.5
    assert rates[:6] == pytest.approx([1e-2] * 2 + [half * 1e-2] * 4) and rates[6] == pytest.approx(half * 1e-2)
    assert rates[6:] == sorted(rates[6:]) and rates[9] == pytest.approx(1e-2)
    assert ends[0] == ends[1]


def test_the_batch_stays_where_it_is_kept(tmp_path):
    go(tmp_path, 2, stop=3, batch="keep")
    progress = state(go(tmp_path, 1, batch="keep"))["progress"]
    assert progress["phase_step"] == 8 and progress["more_samples"] == 0


def test_the_last_batch_has_what_is_left(tmp_path):
    go(tmp_path, 2, stop=3, size=9)
    progress = state(go(tmp_path, 1, size=9))["progress"]
    assert progress["drawn"]["examples"] == 8 * 9  # 2 of 9, 13 of 4 and one of 2
