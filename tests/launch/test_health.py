"""Warnings of watches in a run: in its log, its folder and its report, and its workers' health while it runs."""

from types import SimpleNamespace

import pytest

from tests.flows import tiny
from tilth.flows.callbacks import Callback
from tilth.guard import health
from tilth.guard.verdict import Verdict
from tilth.launch.health import MEASURED, RunHealth
from tilth.runs.readers import read_state, read_warnings
from tilth.ui.top import RunWatcher, as_dict

pytestmark = pytest.mark.dist


class Look(Callback):
    """Look at the run as ``tilth top`` does, between two steps."""

    def __init__(self):
        self.found = []

    def on_step_end(self, run, step, metrics):
        self.found.append(as_dict(RunWatcher(run.directory.path).look()))


def test_a_run_tells_its_warnings_and_shows_its_workers(tmp_path, monkeypatch):
    told = []

    def look(self, now, wall):
        rows = health.states(self._backend.watch.board, self._backend.pids())
        self._write({"time": wall, "ranks": rows, "warnings": []})
        told.append(1)
        return [Verdict("disk", (), "/data is nearly full", {"left": 1})] if len(told) == 1 else []

    monkeypatch.setattr(health.HealthWatch, "look", look)
    monkeypatch.setattr(health, "EVERY", 0.2)
    seen, looked = tiny.Recorder(), Look()
    short = {"supervised": {"steps": 2}, "algorithm": {"steps": 2}}
    recipe = tiny.recipe(tmp_path, cluster={"backend": "local", "workers": 2}, **short)
    ours = tiny.run(recipe, callbacks=[seen, looked], report=True)
    assert "warning: disk: /data is nearly full" in seen.messages
    (warning,) = read_warnings(ours.directory)
    assert (warning["kind"], warning["details"]) == ("disk", {"left": 1})
    assert "warning: disk: /data is nearly full" in (ours.directory / "report.html").read_text()
    workers = looked.found[-1]["workers"]
    assert [row["rank"] for row in workers] == [0, 1] and looked.found[-1]["warnings"] == [warning]
    assert all(row["heartbeat_age"] is not None and row["state"] != "gone" for row in workers)
    assert not as_dict(RunWatcher(ours.directory).look())["workers"]  # it has ended
    assert read_state(ours.directory)["session"]


@pytest.mark.parametrize(("limit", "value"), [(3.0, 20), (5.1, None), (float("inf"), None)])
def test_a_limit_of_hangs_below_the_length_of_a_step_is_told_after_the_first_ones(limit, value):
    dispatch, said = SimpleNamespace(longest=(0.4, "policy.update"), hang_after=limit), []
    cluster = SimpleNamespace(backend=None, dispatch=dispatch, compare_clocks=lambda: None)
    run, one = SimpleNamespace(say=said.append), RunHealth(cluster, None)
    for step, seconds in enumerate([90.0, 4.0, 5.0, 5.0, 90.0, 90.0], 1):  # the first one compiles
        one.on_step_end(run, step, {"time/step": seconds})
        assert len(said) == (step >= MEASURED and value is not None)
    for text in said:
        assert "guard.hang_after = 3 is below" in text and f"guard.hang_after={value} " in text
        assert "0.4 s at most so far, in policy.update" in text


def test_a_limit_of_hangs_near_what_is_healthy_is_told_once():
    dispatch, said = SimpleNamespace(longest=(1.0, "policy.update"), hang_after=3.0), []
    cluster = SimpleNamespace(backend=None, dispatch=dispatch, compare_clocks=lambda: None)
    run, one = SimpleNamespace(say=said.append), RunHealth(cluster, None)
    one.on_step_end(run, 1, {})
    assert not said
    dispatch.longest = 2.0, "policy.update"
    one.on_step_end(run, 2, {})
    one.on_step_end(run, 3, {})
    assert len(said) == 1 and "policy.update" in said[0] and "guard.hang_after=8" in said[0]
