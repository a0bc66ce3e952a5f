"""Snapshots in memory: what is refused, what goes on without one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.errors import raises
from tilth.checkpoint import Group
from tilth.checkpoint.saver import MemorySaver
from tilth.core.errors import CheckpointError, NonFiniteError, StorageError
from tilth.core.layout import Layout, Mesh
from tilth.flows.run import Run
from tilth.guard.recovery import Recovery, verdict_of
from tilth.guard.snapshots import Snapshots
from tilth.roles.state import StateCopy, check_finite


class Role:
    """Answers of two ranks, in turn."""

    mesh = Mesh.of({"dp": 2})

    def __init__(self, *problems):
        self.problems, self.marks = list(problems), []

    def mark(self, step):
        self.marks.append(step)

    def snapshot(self, folder, slot):
        return [StateCopy([], {}), StateCopy([], {}, self.problems.pop(0))]


def test_a_rank_without_room_leaves_the_last_snapshot(tmp_path):
    snapshots, role = Snapshots(tmp_path), Role("", "full", "full", "")
    snapshots.take({"policy": role}, 1, {}, Mesh.of({}))
    for _ in range(2):
        with raises(StorageError, "snapshot"):
            snapshots.take({"policy": role}, 2, {}, Mesh.of({}))
        assert [taken.step for taken in snapshots._taken] == [1]
    snapshots.take({"policy": role}, 4, {}, Mesh.of({}))
    assert [taken.step for taken in snapshots._taken] == [1, 4] == role.marks


def test_the_next_controller_has_the_snapshots_of_the_one_that_was_killed(tmp_path):
    tensors = {"w": torch.arange(6.0), "n": torch.ones(2, dtype=torch.int64)}
    group = Group(tensors, {name: Layout.single(tensor.shape) for name, tensor in tensors.items()})
    mesh, kept = Mesh.of({"dp": 1}), Snapshots(tmp_path)

    class Saver:
        mesh, saver, mark = Mesh.of({"dp": 1}), MemorySaver(), print

        def snapshot(self, folder, slot):
            reports = self.saver.take(Path(folder), slot, {"model": group}, 0)
            return [StateCopy(reports, {"at": slot})]

    for step in (1, 2, 3):
        tensors["w"] += 1
        kept.take({"policy": Saver()}, step, {"progress": {"step": step, "x": 0.1}}, mesh)
    assert kept.newest().step == 3  # a checkpoint of this process, which the next one makes again
    after = Snapshots(tmp_path)
    found = after.newest()
    found.verify()
    assert (found.step, found.objects) == (3, {"progress": {"step": 3, "x": 0.1}, "positions": {"policy": {"at": 0}}})
    torn = next((tmp_path / "slot-0").iterdir())
    torn.write_bytes(bytes(torn.stat().st_size))  # links of one file
    with pytest.raises(CheckpointError):
        found.verify()
    after.discard()
    assert after.newest().step == 2
    after.clear()
    assert Snapshots(tmp_path).newest() is None


def test_a_run_goes_on_without_room_and_says_so_once_until_there_is_room(tmp_path):
    snapshots, role, said = Snapshots(tmp_path), Role("full", "full", "", "full"), []
    run = SimpleNamespace(
        kept_in_memory=True,
        _objects=dict,
        directory=SimpleNamespace(settle=dict),
        say=said.append,
        state=SimpleNamespace(step=1),
        policy=SimpleNamespace(mesh=Mesh.of({})),
        roles=SimpleNamespace(stateful_roles=lambda: {"policy": role}),
    )
    for run.state.step in range(1, 5):
        Run._keep_in_memory(run, snapshots)
    assert [text.partition(" and")[0] for text in said] == ["step 1", "step 3 is kept in memory again", "step 4"]


def test_a_state_that_is_not_finite_is_no_snapshot_and_the_step_runs_again():
    large = torch.full((4,), 6e4, dtype=torch.float16)  # whose sum is not finite
    check_finite({"model": Group({"w": large, "n": torch.ones(2, dtype=torch.int64)}, {})})
    for value in (float("nan"), float("inf")):
        large[2] = value
        with pytest.raises(NonFiniteError) as caught:
            check_finite({"model": Group({"w": large}, {})})
        recovery, verdict = Recovery(8), verdict_of(caught.value)
        assert caught.value.key == "snapshot" and verdict.kind == "not-finite"
        assert [recovery.decide(verdict, 3, now).step for now in (0.0, 1.0)] == ["retry", "stop"]
