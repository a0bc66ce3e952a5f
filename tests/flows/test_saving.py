"""When checkpoints are made, one at a time, and what becomes of a run whose checkpoints fail."""

import errno
import threading
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
            checkpoints=str(tmp_path / "kept"),
            note_checkpoint=lambda *what: noted.append(what),
            log=said.append,
            saved=0,
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


def test_a_save_that_fails_is_tried_again_until_it_succeeds_and_told_once(made, tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(saving, "time", clock)
    one, keeper, said = made(save_every=4)
    save(one, 4)
    one.finish()
    keeper.refuse = ["write of model.safetensors failed: No space left on device"] * 6
    tries = []
    for step in range(8, 60):
        clock.now += 0.1
        if one.due(step):
            tries.append(step)
            save(one, step)
            one.finish()
        if not keeper.refuse and not one.wanted:
            break
    assert tries[:3] == [8, 9, 11] and one.failed == 0
    assert len(said) == 2 and "tried again" in said[0] and "No space left" in said[0] and "after 6 that" in said[1]
    assert steps(tmp_path / "kept") == [4, tries[-1]] and one.metrics.values()["save/failed"] == 6.0


def test_due_checkpoints_that_fail_in_a_row_stop_the_run_where_the_recipe_says_so(made, tmp_path):
    one, keeper, said = made(save_every=4, save_failures=1)
    save(one, 4)
    keeper.refuse = ["full"] * 4
    for step in (8, 9, 10):  # tries between two that are due do not count
        save(one, step)
    with raises(StorageError, "step-000012"):
        save(one, 12)
    assert said[-1] == "the checkpoint of step 12 failed, 2 in a row: full" and steps(tmp_path / "kept") == [4]


def test_a_save_that_is_due_does_not_wait_for_a_slow_disk(made, tmp_path, monkeypatch):
    going = threading.Event()
    monkeypatch.setattr(saving, "NEXT", 0.2)
    monkeypatch.setattr(stages, "stage", lambda name, path: going.wait(60) if name == "write" else None)
    one, _, said = made(save_every=4)
    for step in (4, 8, 9):
        save(one, step)
    assert one.wanted and not said
    going.set()
    one.finish()
    save(one, 10)
    one.finish()
    assert steps(tmp_path / "kept") == [4, 10] and not one.wanted


def test_a_place_of_checkpoints_that_is_gone_is_not_made_anew(made, tmp_path):
    one, _, said = made()
    save(one, 4)
    one.finish()
    one.directory.saved = 4
    (tmp_path / "kept").rename(tmp_path / "away")
    save(one, 8)
    assert "is its disk mounted?" in said[0] and not (tmp_path / "kept").exists()
    (tmp_path / "away").rename(tmp_path / "kept")
    save(one, 9)
    one.finish()
    assert steps(tmp_path / "kept") == [4, 9]


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
