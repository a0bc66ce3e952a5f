"""Parts of several ranks that do not make a whole are refused by name, and no failure touches the checkpoint before."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from tests.checkpoint.make import cut, group_of, groups, parts_of, same, save_sharded, save_step, tensor
from tests.checkpoint.test_crash import Trap, calls_of_a_save, die_at, holds
from tests.errors import raises
from tilth.checkpoint import Group, Saver, abandon_save, begin_save, commit_save, latest, open_checkpoint, save
from tilth.checkpoint.stages import StageError
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Layout, Mesh, RaggedShard, Replicate, Shard

MESH = Mesh(("dp", "fsdp"), (2, 2))


def layouts_of(tensors):
    """Split over fsdp where there is something to split, alike on both replicas."""
    return {
        name: Layout(MESH, (Replicate(), Shard(0) if value.ndim else Replicate()), tuple(value.shape))
        for name, value in tensors.items()
    }


LAYOUTS = {group: layouts_of(tensors) for group, tensors in groups().items()}


def save_four(root, step):
    """As save_step, by four ranks."""
    return save_sharded(root, step, groups(str(step)), LAYOUTS, {"step": step})


@pytest.fixture
def begun(tmp_path):
    """A checkpoint of step 1, and all parts of one of step 2."""
    save_step(tmp_path, 1)
    folder = begin_save(tmp_path, 2)
    return folder, parts_of(folder, groups("2"), LAYOUTS)


def refused(folder, parts, key, **changes):
    """Commit is refused in one line, nothing of it stays, and the checkpoint before is what it was."""
    with raises(CheckpointError, key) as caught:
        commit_save(folder, **{"parts": parts, "objects": {}, **changes})
    assert "\n" not in str(caught.value)
    assert [p.name for p in folder.parent.iterdir()] == ["step-000001"] and holds(latest(folder.parent), "1")


def test_a_whole_is_accepted_in_any_order(begun):
    folder, parts = begun
    path = commit_save(folder, reversed(parts), {"step": 2}, MESH)
    assert holds(path, "2") and latest(folder.parent) == path and open_checkpoint(path).objects == {"step": 2}
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step-000001", "step-000002"]


def test_who_wrote_is_kept(begun):
    folder, parts = begun
    manifest = open_checkpoint(commit_save(folder, parts, {})).manifest
    assert Mesh.from_json(manifest.layout["mesh"]) == Mesh(("world",), (4,))
    named = save_sharded(folder.parent, 3, groups("3"), LAYOUTS, mesh=MESH)
    assert Mesh.from_json(open_checkpoint(named).manifest.layout["mesh"]) == MESH


def one_of(parts, group, **wanted):
    return next(p for p in parts if p["group"] == group and all(p[k] == v for k, v in wanted.items()))


def test_a_missing_rank(begun):
    folder, parts = begun
    parts.remove(one_of(parts, "model", rank=2))
    parts.remove(one_of(parts, "optimizer", rank=0))
    refused(folder, parts, "model.rank2.missing")


def test_two_parts_of_one_rank(begun):
    folder, parts = begun
    mine = group_of(groups("2")["model"], LAYOUTS["model"], 1)
    parts.append(Saver().write(folder, {"model": mine}, 1, "again")[0])
    refused(folder, parts, "model.rank1.twice")


def test_a_rank_that_planned_otherwise(begun):
    """One rank thinks that a tensor lies elsewhere: who writes what would be two answers."""
    folder, parts = begun
    other = LAYOUTS["model"] | {"norm.weight": Layout(MESH, (Replicate(), Replicate()), (5,))}
    whole = groups("2")["model"]
    lost = one_of(parts, "model", rank=2)
    parts.remove(lost)
    parts += Saver().write(folder, {"model": group_of(whole, other, 2)}, 2, "other")
    refused(folder, parts, "model.rank2.digest")


def test_a_rank_that_wrote_nothing_of_what_it_should(begun):
    folder, parts = begun
    part = next(p for p in parts if p["group"] == "model" and p["rank"] and p["file"])
    part |= {"file": "", "entry": None}
    refused(folder, parts, f"model.rank{part['rank']}.file.missing")


def test_a_group_that_was_expected(begun):
    folder, parts = begun
    expected = {"model": range(4), "optimizer": range(4), "critic": (0,)}
    refused(folder, parts, "critic.rank0.missing", expected=expected)


def test_a_part_of_another_step(tmp_path):
    save_step(tmp_path, 1)
    other = begin_save(tmp_path, 9)
    stale = parts_of(other, groups("9"), LAYOUTS)
    folder = begin_save(tmp_path, 2)
    parts = parts_of(folder, groups("2"), LAYOUTS)
    parts[1] = stale[1]
    refused(folder, parts, "model.rank1.folder")


def test_a_folder_that_was_never_begun(tmp_path):
    (tmp_path / "step-000002").mkdir()
    with raises(CheckpointError, "folder"):
        Saver().start(tmp_path / "step-000002", {"g": Group({"x": torch.ones(1)}, {"x": Layout.single((1,))})}, 0)


@pytest.mark.parametrize("length", [None, 0, 100])
def test_a_file_that_did_not_arrive(begun, length):
    """The workers' storage is not the controller's."""
    folder, parts = begun
    file = folder / one_of(parts, "model", rank=1)["file"]
    raw = file.read_bytes()
    file.unlink()
    if length is not None:
        file.write_bytes(raw[:length])
    refused(folder, parts, f"model.rank1.safetensors.{'missing' if length is None else 'nbytes'}")


def test_something_else_than_a_part(begun):
    folder, parts = begun
    refused(folder, [*parts, {"rank": 1}], "report.folder")


def test_objects_that_json_would_change(begun):
    folder, parts = begun
    refused(folder, parts, "objects.a.1", objects={"a": {1: 2}})


# ---- what a rank may not bring ----


@pytest.mark.parametrize(
    ("tensors", "layouts", "rank", "key"),
    [
        (
            {"x": torch.ones(4, 2)},
            {"x": (Shard(0), (4, 2))},
            0,
            "g/x.shape",
        ),
        ({"x": torch.ones(5)}, {"x": (RaggedShard((3, 1)), (4, 2))}, 0, "g/x.shape"),
        ({}, {"x": (Shard(0), (4, 2))}, 1, "g/x.missing"),
        ({"x": torch.ones(1)}, {}, 1, "g/x.layout"),
        (
            {"x": torch.ones(2)},
            {"x": (Replicate(), (2,))},
            7,
            "g/x.rank",
        ),
        ({"x": torch.ones(2).to_sparse()}, {"x": (Replicate(), (2,))}, 0, "g/x.dtype"),
        ({"__metadata__": torch.ones(2)}, {"__metadata__": (Replicate(), (2,))}, 0, "g/__metadata__.name"),
    ],
)
def test_tensors_that_do_not_fit_their_layouts(tmp_path, tensors, layouts, rank, key):
    mesh = Mesh(("fsdp",), (2,))
    folder = begin_save(tmp_path, 1)
    found = {name: Layout(mesh, (placement,), shape) for name, (placement, shape) in layouts.items()}
    with raises(CheckpointError, key) as caught:
        Saver().start(folder, {"g": Group(tensors, found)}, rank, "0")
    assert "\n" not in str(caught.value) and [p.name for p in folder.rglob("*")] == [".reports"]


@pytest.mark.parametrize(("group", "part"), [("../g", "0"), ("g", "../0"), ("g", "a.b"), ("", "0")])
def test_names_that_are_no_files(tmp_path, group, part):
    with raises(CheckpointError, "part" if group == "g" else "group"):
        Saver().start(begin_save(tmp_path, 1), {group: Group({}, {})}, 0, part)


def test_a_name_that_looks_like_a_box(tmp_path):
    mesh = Mesh(("fsdp",), (2,))
    whole = {"x": tensor((4,)), "x[0:2]": tensor(())}
    layouts = {"x": Layout(mesh, (Shard(0),), (4,)), "x[0:2]": Layout(mesh, (Replicate(),), ())}
    with raises(CheckpointError, "x[0:2].twice"):
        save_sharded(tmp_path, 1, {"g": whole}, {"g": layouts})


def test_two_ranks_with_one_name(tmp_path):
    whole, layouts = groups()["model"], LAYOUTS["model"]
    folder = begin_save(tmp_path, 1)
    Saver().write(folder, {"model": group_of(whole, layouts, 0)}, 0, "part")
    with raises(StorageError, "save.write.rank1") as caught:
        Saver().write(folder, {"model": group_of(whole, layouts, 1)}, 1, "part")
    assert Path(caught.value.path).name == "model.part.safetensors" and caught.value.reason == "File exists"


def test_a_rank_that_has_nothing_of_a_tensor_must_know_its_dtype(tmp_path):
    far = Layout(Mesh(("far",), (1,), (7,)), (Replicate(),), (3,))
    with raises(CheckpointError, "g/x.dtypes"):
        Saver().start(begin_save(tmp_path, 1), {"g": Group({}, {"x": far})}, 0)
    folder = begin_save(tmp_path, 1)
    with raises(CheckpointError, "g/x.dtype"):
        Saver().start(folder, {"g": Group({}, {"x": far}, {"x": torch.complex128})}, 0)


# ---- what a rank may not expect ----


@pytest.mark.parametrize(
    ("into", "layouts", "rank", "key"),
    [
        ({"x": torch.zeros(3, 4)}, {"x": (Shard(0), (6, 4))}, 2, "model/x.layout"),
        ({"x": torch.zeros(3, 4)}, {"x": (Shard(0), (6, 5))}, 0, "model/x.shape"),
        (
            {"x": torch.zeros(2, 4)},
            {"x": (Shard(0), (6, 4))},
            0,
            "model/x.boxes",
        ),
        (
            {"x": torch.zeros(3, 4).double()},
            {"x": (Shard(0), (6, 4))},
            0,
            "model/x.dtype",
        ),
        ({}, {"x": (Shard(0), (6, 4))}, 0, "model/x.extra"),
        ({}, {}, 0, "model/x.extra"),
        (
            {"x": torch.zeros(3, 4), "y": torch.zeros(1)},
            {"x": (Shard(0), (6, 4)), "y": (Shard(0), (2,))},
            0,
            "model/y.missing",
        ),
    ],
)
def test_restore_into_a_layout_is_strict(tmp_path, into, layouts, rank, key):
    path = save(tmp_path, 1, {"model": {"x": tensor((6, 4))}}, {})
    mesh = Mesh(("fsdp",), (2,))
    found = {name: Layout(mesh, (placement,), shape) for name, (placement, shape) in layouts.items()}
    with raises(CheckpointError, key) as caught:
        open_checkpoint(path).restore("model", into, found, rank)
    assert "\n" not in str(caught.value) and all(not t.any() for t in into.values())


def test_only_what_a_rank_touches_is_checked(tmp_path):
    """A flipped bit in one rank's box: who reads it is told, whole or in part; who does not is not disturbed."""
    mesh, shape = Mesh(("fsdp",), (3,)), (9, 2)
    layout = {"x": Layout(mesh, (Shard(0),), shape)}
    whole = tensor(shape)
    path = save_sharded(tmp_path, 1, {"g": {"x": whole}}, {"g": layout})
    piece = next(p for p in open_checkpoint(path).entry("g", "x").boxes if p.offset == (3, 0))
    with open(path / piece.file, "r+b") as file:
        file.seek(piece.byte0)
        byte = file.read(1)[0]
        file.seek(piece.byte0)
        file.write(bytes([byte ^ 1]))
    checkpoint = open_checkpoint(path)
    halves = {"x": Layout(Mesh(("tp",), (2,)), (Shard(0),), shape)}
    for layouts, rank, broken in [(layout, 0, False), (layout, 1, True), (layout, 2, False), (halves, 0, True)]:
        into = {"x": torch.zeros_like(cut(whole, layouts["x"], rank))}
        if broken:
            with raises(CheckpointError, "g/x.checksum") as caught:
                checkpoint.restore("g", into, layouts, rank)
            assert "g.rank1.safetensors" in str(caught.value)
        else:
            checkpoint.restore("g", into, layouts, rank)
            assert same(into["x"], cut(whole, layouts["x"], rank))
    with raises(CheckpointError, "g/x.checksum"):
        checkpoint.read("g", "x")


# ---- crashes ----


@pytest.mark.slow  # test_crash.py has a save by one
def test_killed_at_every_call_of_a_save_by_four(tmp_path, monkeypatch):
    """Controller and ranks die together: the power fails."""
    save_four(tmp_path / "count", 1)
    total = calls_of_a_save(monkeypatch, lambda: save_four(tmp_path / "count", 2))
    assert total > 60
    committed = 0
    for at in [*range(0, total - 12, 18), *range(total - 12, total)]:
        root = tmp_path / f"root{at}"
        before = save_four(root, 1)
        assert die_at(monkeypatch, at, lambda root=root: save_four(root, 2)) == 77
        newest = latest(root)
        assert newest is not None and holds(newest, "2" if newest != before else "1")
        committed += newest != before
        assert holds(before, "1")
        after = save_four(root, 3)
        assert latest(root) == after and holds(after, "3")
        assert not [p for p in root.iterdir() if "tmp" in p.name]
    assert 0 < committed < total


def test_a_rank_that_dies_leaves_the_others_parts_to_be_removed(begun):
    folder, _ = begun
    (folder / "model.rank1.safetensors").unlink()
    assert latest(folder.parent).name == "step-000001"
    abandon_save(folder)
    abandon_save(folder)
    assert [p.name for p in folder.parent.iterdir()] == ["step-000001"]
    after = save_four(folder.parent, 2)
    assert holds(after, "2")


@pytest.mark.parametrize("code", ["ENOSPC", pytest.param("EROFS", marks=pytest.mark.slow)])
def test_a_failing_disk_names_the_step_and_what_is_intact(tmp_path, monkeypatch, code):
    def fail(name):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), str(tmp_path / name))

    save_four(tmp_path / "count", 1)
    total = calls_of_a_save(monkeypatch, lambda: save_four(tmp_path / "count", 2))
    for at in range(0, total, 13):
        root = tmp_path / f"root{at}"
        before = save_step(root, 1)
        with monkeypatch.context() as patch:
            Trap(patch, fail, at)
            with pytest.raises(StageError) as caught:
                save_four(root, 2)
        assert re.fullmatch(r"save\.\w+(\.rank\d)?", caught.value.key)
        assert f"the checkpoint before it, {before}, is intact" in str(caught.value)
        assert holds(before, "1")
        save_four(root, 3)
        assert not [p for p in root.iterdir() if "tmp" in p.name]


def test_everything_is_synchronised_before_the_name_is_given(tmp_path, monkeypatch):
    log = []
    real_fsync, real_rename = os.fsync, os.replace

    def fsync(descriptor):
        log.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source, target, **options):
        log.append("rename")
        real_rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    path = save_four(tmp_path, 1)
    data = sorted(p.name for p in path.glob("*.safetensors"))
    begun, before, after = log[:2], log[2:-6], log[-6:]  # a report is renamed, but needs not be durable
    assert sorted(name for name in before if name != "rename") == data
    folder = after[2]
    assert begun == [tmp_path.name, folder]
    assert after == ["manifest.json.tmp", "rename", folder, folder, "rename", tmp_path.name]
    assert folder.startswith("step-000001.tmp-")
