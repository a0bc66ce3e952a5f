"""When checkpoints are made, one at a time, and what becomes of a run whose checkpoints fail."""

import errno
import time
from types import SimpleNamespace

import pytest
import torch

from tests.errors import raises
from tests.flows import tiny
from tilth.checkpoint import Group, Saver, latest, open_checkpoint, read_best, stages
from tilth.core.errors import StorageError
from tilth.core.layout import Layout, Mesh
from tilth.flows import saving
from tilth.flows.saving import Saving
from tilth.runs.metrics import Metrics

ALONE = Mesh(("world",), (1,))


class Keeper:
    """A group of one worker whose one tensor tells the step; ``refuse``: what its next saves answer."""

    mesh = ALONE

    def __init__(self):
        self.weight, self.saver, self.refuse = torch.zeros(3), Saver(), []

    def kept(self):
        return ["model"]

    def save(self, folder, background):
        if self.refuse:
            return [self.refuse.pop(0)]
        self.saver.start(
            folder,
            {"model": Group({"weight": self.weight}, {"weight": Layout.single((3,))})},
            0,
            "",
            background=background,
        )
        return [""]

    def saving(self, wait):
        return [self.saver.settle() if wait else self.saver.problem()]


@pytest.fixture
def made(tmp_path):
    """(Saving, its keeper, what it said) of a recipe with these keys of [run]."""

    def make(**run):
        keeper, said, noted = Keeper(), [], []
        recipe = tiny.recipe(tmp_path, run=run)
        directory = SimpleNamespace(
            checkpoints=str(tmp_path / "kept"), note_checkpoint=lambda *what: noted.append(what), log=said.append
        )
        return Saving(recipe, directory, {"policy": keeper}, Metrics(), said.append), keeper, said

    return make


def save(one, step, best=None):
    one.stateful_roles["policy"].weight.fill_(step)
    one.begin(step, {"progress": {"step": step}}, best, ALONE)


def steps(root):
    return sorted(int(path.name[5:]) for path in root.iterdir() if path.name.startswith("step-"))


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/dev/full", "File exists"),
        ("/proc/here", "No such file"),
        ("file:///proc/here", "No such file"),
        ("foo://bar/x", "Protocol not known: foo"),
    ],
)
def test_a_place_that_cannot_take_checkpoints_is_told_by_its_key_before_anything_is_made(tmp_path, place, why):
    with raises(StorageError, "run.checkpoints"):
        tiny.run(tiny.recipe(tmp_path, run={"checkpoints": place}))
    assert not list(tmp_path.iterdir())


def test_what_was_begun_counts_when_it_is_finished(made, tmp_path):
    one, keeper, said = made()
    save(one, 4)
    keeper.weight.fill_(99.0)  # training goes on
    one.finish()
    kept = open_checkpoint(latest(tmp_path / "kept"))
    assert kept.step == 4 and kept.read("model", "weight").tolist() == [4.0] * 3 and not said
    assert one.metrics.values()["save/seconds"] > 0


@pytest.mark.parametrize("background", [True, False])
def test_the_next_save_waits_for_the_one_before_and_retention_follows(made, tmp_path, background):
    one, *_ = made(keep=1, keep_every=4, save_background=background)
    for step in range(1, 11):
        save(one, step, {"step": 3, "metric": "m", "value": 1.0} if step >= 3 else None)
    one.finish()
    assert steps(tmp_path / "kept") == [3, 4, 8, 10]


def test_another_runs_newer_checkpoint_does_not_count_as_one_to_keep(made, tmp_path):
    one, *_ = made(keep=1)
    (tmp_path / "kept" / "step-000099").mkdir(parents=True)
    (tmp_path / "kept" / "step-000099" / "manifest.json").write_bytes(b"{}")
    for step in (4, 6):
        save(one, step)
    one.finish()
    assert 6 in steps(tmp_path / "kept") and 99 in steps(tmp_path / "kept")


def test_a_save_that_is_not_in_the_background_is_durable_at_once(made, tmp_path):
    one, *_ = made(save_background=False)
    save(one, 4)
    assert latest(tmp_path / "kept").name == "step-000004"


def test_when_a_checkpoint_is_due(made, monkeypatch):
    one, *_ = made(save_every=4, save_minutes=2.0)
    assert [step for step in range(1, 10) if one.due(step)] == [4, 8]
    clock = SimpleNamespace(monotonic=lambda: one._began + 121.0)
    monkeypatch.setattr(saving, "time", clock)
    assert one.due(5)
    never, *_ = made(save_every=4, save_minutes=0.0)
    assert not never.due(5)


def test_failures_are_told_and_too_many_in_a_row_stop_the_run(made, tmp_path):
    one, keeper, said = made(save_failures=2)
    save(one, 1)
    keeper.refuse = ["write of model.safetensors failed: No space left on device"] * 2
    save(one, 2)
    save(one, 3)
    assert len(said) == 2 and one.failed == 2
    assert (
        "checkpoint of step 2 failed (1 in a row; the run stops after 2 more)" in said[0] and "No space left" in said[0]
    )
    save(one, 4)
    one.finish()
    assert one.failed == 0 and steps(tmp_path / "kept") == [1, 4]  # it is a row only without a success between
    keeper.refuse = ["full"] * 3
    save(one, 5)
    save(one, 6)
    with raises(StorageError, "step-000007"):
        save(one, 7)
    assert said[-1] == "the checkpoint of step 7 failed, 3 in a row: full"
    assert steps(tmp_path / "kept") == [1, 4] or steps(tmp_path / "kept") == [4]
    assert one.metrics.values()["save/failed"] == 5.0


def test_with_no_failure_allowed_the_first_one_stops_the_run(made):
    one, keeper, said = made(save_failures=0)
    keeper.refuse = ["full"]
    with raises(StorageError, "step-000001"):
        save(one, 1)
    assert said == ["the checkpoint of step 1 failed, 1 in a row: full"]


@pytest.mark.parametrize("stage", ["checksum", "write", "sync", "report", "manifest", "publish"])
def test_what_fails_in_the_background_is_told_with_its_stage_and_the_one_before_stays(
    made, tmp_path, monkeypatch, stage
):
    def fails(name, path):
        if name == stage:
            raise OSError(errno.EIO, "Input/output error", path)

    one, _, said = made()
    save(one, 1)
    one.finish()
    with monkeypatch.context() as patched:
        patched.setattr(stages, "stage", fails)
        save(one, 2)
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            one.look()  # as at the ends of steps
    assert len(said) == 1 and "Input/output error" in said[0] and f"stage {stage}" in said[0] and one.failed == 1
    assert latest(tmp_path / "kept").name == "step-000001"
    save(one, 3)
    one.finish()
    assert latest(tmp_path / "kept").name == "step-000003" and one.failed == 0


def test_looking_does_not_wait(made, tmp_path):
    one, keeper, _ = made()
    one.look()  # nothing is under way
    save(one, 1)
    keeper.saver.wait()
    one._under_way.wait(60)
    one.look()
    assert one._under_way is None and "save/seconds" in one.metrics.values()


def test_a_run_that_ends_in_an_error_leaves_no_half_of_a_checkpoint(made, tmp_path):
    one, *_ = made()
    save(one, 1)
    one.finish()
    save(one, 2)
    one.give_up()
    one.give_up()
    left = [path.name for path in (tmp_path / "kept").iterdir() if path.name.startswith("step-")]
    assert "step-000001" in left and latest(tmp_path / "kept").name in left


def test_the_best_one_stays_until_a_better_one_is_on_the_disk(made, tmp_path):
    one, keeper, _ = made(keep=1)
    first, better = ({"step": step, "metric": "accuracy", "value": step / 10} for step in (2, 6))
    save(one, 2, first)
    save(one, 4, first)
    one.finish()
    keeper.refuse = ["No space left on device"]
    save(one, 6, better)
    save(one, 8, better)
    one.finish()
    assert steps(tmp_path / "kept") == [2, 8] and read_best(tmp_path / "kept") == first
    save(one, 10, best := {**better, "step": 10})
    one.finish()
    assert steps(tmp_path / "kept") == [10] and read_best(tmp_path / "kept") == best


def test_retention_that_fails_is_told_and_the_checkpoint_counts(made, tmp_path, monkeypatch):
    def fails(name, path):
        if name == "retention":
            raise OSError(errno.EACCES, "Permission denied", path)

    one, _, said = made(save_failures=0)
    monkeypatch.setattr(stages, "stage", fails)
    save(one, 3)
    one.finish()
    assert one.failed == 0 and "which is complete" in said[0] and "Permission denied" in said[0]
    assert latest(tmp_path / "kept").name == "step-000003"
