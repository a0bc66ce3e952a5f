"""A step that is not finite is left out on all workers, or the run goes back to a checkpoint."""

import pytest

import tilth.rl as rl
from tests.errors import raises
from tests.flows import tiny
from tests.launch.test_survive import recoveries
from tilth.core.errors import NonFiniteError, RecipeError
from tilth.runs.readers import read_metrics, read_state

BREAKS = """
from dataclasses import replace
from pathlib import Path
import tilth.rl as rl

whole = rl.policy_loss

def broken(*args, **given):
    found = whole(*args, **given)
    return replace(found, loss=found.loss * float("nan")) if Path(__file__).with_name("broken").exists() else found

rl.policy_loss = broken
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """The plugin changes this process too, where the worker is inline."""
    monkeypatch.setattr(rl, "policy_loss", rl.policy_loss)


class Break(tiny.Recorder):
    """Break the loss after a step; mend it after ``times`` steps, or when the run goes back if 0."""

    def __init__(self, folder, step, times=0):
        super().__init__()
        self.flag, self.step, self.times = folder / "broken", step, times

    def on_step_end(self, run, step, metrics):
        super().on_step_end(run, step, metrics)
        if step == self.step:
            self.flag.touch()
        if self.times and step == self.step + self.times:
            self.flag.unlink()

    def on_message(self, text):
        super().on_message(text)
        if "from a checkpoint" in text and self.times == 0:
            self.step = -1
            self.flag.unlink(missing_ok=True)


def recipe(folder, **sections):
    (folder / "mine.py").write_text(BREAKS)
    keys = {"supervised": {"steps": 2}, "algorithm": {"drop_flat": False}}
    return tiny.recipe(folder / "runs", plugins=[str(folder / "mine.py")], **keys, **sections)


def directory(folder):
    (found,) = (path.parent for path in folder.rglob("metrics.jsonl"))
    return found


def test_steps_are_left_out_counted_and_their_rows_are_logged(tmp_path):
    seen = Break(tmp_path, 4, 2)
    ours = tiny.run(recipe(tmp_path), callbacks=[seen])
    rows = {row["step"]: row for row in read_metrics(ours.directory)}
    assert [step for step, row in rows.items() if row.get("steps/not_finite")] == [5, 6]
    assert rows[6]["steps/skipped"] == 1
    warned = read_state(ours.directory)["warnings"]
    assert [one["step"] for one in warned] == [5, 6]
    assert "24 rows may be the cause: prompt" in warned[0]["text"] and "trajectory" in warned[0]["text"]
    assert "left out" in (ours.directory / "log.txt").read_text()


def test_where_nothing_can_go_back_the_third_in_a_row_ends_the_run(tmp_path):
    with raises(NonFiniteError, "loss"):
        tiny.run(recipe(tmp_path), callbacks=[Break(tmp_path, 4)])
    assert [row["step"] for row in read_metrics(directory(tmp_path))][-1] == 6


def test_stop_ends_the_run_at_once(tmp_path):
    with raises(NonFiniteError, "loss"):
        tiny.run(recipe(tmp_path, guard={"on_nan": "stop"}), callbacks=[Break(tmp_path, 4)])
    assert [row["step"] for row in read_metrics(directory(tmp_path))][-1] == 4


LOCAL = {"cluster": {"backend": "local", "workers": 2}, "policy": {"layout": {"fsdp": 2}}}


@pytest.mark.dist
@pytest.mark.parametrize("policy", ["rollback", pytest.param("skip", marks=pytest.mark.slow)])
def test_a_run_goes_back_to_its_checkpoint_and_leaves_the_data_out(tmp_path, policy):
    seen = Break(tmp_path, 5)
    ours = tiny.run(recipe(tmp_path, guard={"on_nan": policy}, **LOCAL), callbacks=[seen])
    failed = 5 if policy == "rollback" else 7
    assert read_state(ours.directory)["state"] == "finished"
    (found,) = recoveries(ours.directory)
    assert (found["kind"], found["action"], found["step"]) == ("not-finite", "rollback", failed)
    assert "prompt" in found["evidence"] and not found["replaced"]
    left = (failed + 1 - 4) * 6
    assert any(f"back at step 4; what was drawn since is left out: {left} prompts" in text for text in seen.messages)
    assert [row["step"] for row in read_metrics(ours.directory)] == list(range(1, 9))


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_that_is_never_finite_goes_back_twice(tmp_path):
    seen = Break(tmp_path, 5)
    seen.times = 100
    with raises(NonFiniteError, "loss"):
        tiny.run(recipe(tmp_path, guard={"on_nan": "rollback"}, **LOCAL), callbacks=[seen])
    assert [one["action"] for one in recoveries(directory(tmp_path))] == ["rollback"] * 2


@pytest.mark.parametrize("sections", [{}, {"cluster": {"backend": "local"}, "guard": {"restarts": 0}}])
def test_going_back_needs_a_recovery(tmp_path, sections):
    guard = {"on_nan": "rollback", **sections.get("guard", {})}
    with raises(RecipeError, "guard.on_nan"):
        tiny.recipe(tmp_path, **{**sections, "guard": guard})
