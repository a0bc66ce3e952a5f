"""Parts of several ranks that do not make a whole are refused by name, and no failure touches the checkpoint before."""

import copy
import errno
import os

import pytest
import torch

from tests.checkpoint.make import cut, groups, parts_of, same, save_sharded, save_step, shares, tensor
from tests.checkpoint.test_crash import Trap, calls_of_a_save, die_at, holds
from tilth.checkpoint import abandon_save, begin_save, commit_save, latest, open_checkpoint, save, write_part
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Layout, Mesh, Ragged, Replicate, Shard

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


def refused(folder, parts, message, **changes):
    """Commit is refused in one line, nothing of it stays, and the checkpoint before is what it was."""
    arguments = {"root": folder.parent, "step": 2, "parts": parts, "objects": {}, **changes}
    with pytest.raises(CheckpointError, match=message) as caught:
        commit_save(folder, **arguments)
    assert "\n" not in str(caught.value)
    assert [p.name for p in folder.parent.iterdir()] == ["step-000001"] and holds(latest(folder.parent), "1")


def test_a_whole_is_accepted_in_any_order(begun):
    folder, parts = begun
    path = commit_save(folder, folder.parent, 2, reversed(parts), {"step": 2}, MESH)
    assert holds(path, "2") and latest(folder.parent) == path and open_checkpoint(path).objects == {"step": 2}
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step-000001", "step-000002"]


def test_who_wrote_is_kept(begun):
    folder, parts = begun
    manifest = open_checkpoint(commit_save(folder, folder.parent, 2, parts, {})).manifest
    assert Mesh.from_json(manifest.layout["mesh"]) == Mesh(("world",), (4,))
    named = save_sharded(folder.parent, 3, groups("3"), LAYOUTS, mesh=MESH)
    assert Mesh.from_json(open_checkpoint(named).manifest.layout["mesh"]) == MESH


def one_of(parts, group, **wanted):
    return next(p for p in parts if p["group"] == group and all(p[k] == v for k, v in wanted.items()))


def test_a_missing_rank(begun):
    folder, parts = begun
    parts.remove(one_of(parts, "model", rank=2))
    parts.remove(one_of(parts, "optimizer", rank=0))
    refused(folder, parts, r"step-000002.*: group model has no part of rank 2$")


def test_two_parts_of_one_rank(begun):
    folder, parts = begun
    mine = shares(groups("2")["model"], LAYOUTS["model"], 1)
    parts.append(write_part(folder, "model", "again", mine, LAYOUTS["model"], 1))
    refused(folder, parts, r"group model has 2 parts of rank 1$")


def test_two_ranks_that_write_the_same_box(begun):
    folder, parts = begun
    first = next(p for p in parts if p["tensors"].get("embed.weight", {}).get("boxes"))
    other = next(p for p in parts if p["group"] == "model" and p["rank"] != first["rank"])
    box = copy.deepcopy(first["tensors"]["embed.weight"])
    other["tensors"]["embed.weight"] = box
    offset, size = (tuple(box["boxes"][0][k]) for k in ("offset", "size"))
    message = rf"tensor model/embed\.weight: Box\(offset=\({offset[0]}, 0\), size=\({size[0]}, 4\)\) is written twice; "
    refused(folder, parts, message + r"its boxes are in model\.rank\d\.safetensors")


def test_a_box_that_nobody_wrote(begun):
    folder, parts = begun
    for part in parts:
        if "norm.weight" in part["tensors"]:
            entry = part["tensors"]["norm.weight"]
            entry["boxes"] = [b for b in entry["boxes"] if b["offset"] != [3]]
    refused(
        folder, parts, r"tensor model/norm\.weight: Box\(offset=\(3,\), size=\(2,\)\) is missing; its boxes are in "
    )


def test_a_tensor_that_nobody_wrote_is_not_forgotten(begun):
    """Whoever had to write it says nothing of it; the first rank knows that there is one."""
    folder, parts = begun
    for part in parts:
        if "norm.weight" in part["tensors"]:
            part["tensors"]["norm.weight"]["boxes"] = []
            if part["rank"]:
                del part["tensors"]["norm.weight"]
    refused(
        folder, parts, r"model/norm\.weight: Box\(offset=\(0,\), size=\(5,\)\) is missing; its boxes are in no file"
    )


def test_every_tensor_with_a_hole_is_named(begun):
    folder, parts = begun
    for part in parts:
        for entry in part["tensors"].values():
            entry["boxes"] = []
    refused(
        folder, parts, r"model/embed\.weight: .*; tensor model/norm\.weight: .*; tensor optimizer/step: .*optimizer/m"
    )


def test_a_part_of_another_step(tmp_path):
    save_step(tmp_path, 1)
    other = begin_save(tmp_path, 9)
    stale = parts_of(other, groups("9"), LAYOUTS)
    folder = begin_save(tmp_path, 2)
    parts = parts_of(folder, groups("2"), LAYOUTS)
    parts[1] = stale[1]
    refused(folder, parts, rf"the part of rank 1 of group model was written for step-000009\.tmp-{os.getpid()}$")


def test_a_folder_of_another_step(begun):
    folder, parts = begun
    refused(folder, parts, r"step-000002\.tmp-\d+ was begun for step 2, not for step 3$", step=3)


def test_a_folder_that_was_never_begun(tmp_path):
    (tmp_path / "step-000002").mkdir()
    with pytest.raises(CheckpointError, match="is no folder of begin_save"):
        write_part(tmp_path / "step-000002", "g", "0", {"x": torch.ones(1)}, {"x": Layout.single((1,))}, 0)


def test_other_shapes_on_other_ranks(begun):
    folder, parts = begun
    last = next(p for p in reversed(parts) if p["group"] == "model" and "embed.weight" in p["tensors"])
    last["tensors"]["embed.weight"]["dtype"] = "float32"
    message = rf"model/embed\.weight is bfloat16 \(7, 4\) on rank 0, float32 \(7, 4\) on rank {last['rank']}$"
    refused(folder, parts, message)


@pytest.mark.parametrize("length", [None, 0, 100])
def test_a_file_that_did_not_arrive(begun, length):
    """The workers' storage is not the controller's."""
    folder, parts = begun
    file = folder / next(iter(one_of(parts, "model", rank=1)["files"]))
    raw = file.read_bytes()
    file.unlink()
    if length is not None:
        file.write_bytes(raw[:length])
    refused(folder, parts, r"file model\.rank1\.safetensors (is missing|has (0|100) bytes, expected \d+)$")


def test_something_else_than_a_part(begun):
    folder, parts = begun
    refused(folder, [*parts, {"rank": 1}], r"a part is not what write_part returns: folder: Field required")


def test_objects_that_json_would_change(begun):
    folder, parts = begun
    refused(folder, parts, r"objects\.a: key 1 is a int", objects={"a": {1: 2}})


# ---- what a rank may not bring ----


@pytest.mark.parametrize(
    ("tensors", "layouts", "rank", "message"),
    [
        (
            {"x": torch.ones(4, 2)},
            {"x": (Shard(0), (4, 2))},
            0,
            r"tensor g/x of rank 0 has shape \(4, 2\), its layout ",
        ),
        ({"x": torch.ones(5)}, {"x": (Ragged((3, 1)), (4, 2))}, 0, r"has shape \(5,\), its layout says \[Box\("),
        ({}, {"x": (Shard(0), (4, 2))}, 1, r"tensor g/x is not among those of rank 1, which is in its mesh"),
        ({"x": torch.ones(1)}, {}, 1, r"tensor g/x has no layout"),
        (
            {"x": torch.ones(2)},
            {"x": (Replicate(), (2,))},
            7,
            r"tensor g/x is not rank 7's: its mesh has ranks \(0, 1\)",
        ),
        ({"x": torch.ones(2).to_sparse()}, {"x": (Replicate(), (2,))}, 0, r"tensor g/x .*sparse.* cannot be stored"),
        ({"__metadata__": torch.ones(2)}, {"__metadata__": (Replicate(), (2,))}, 0, r"keeps this name for itself"),
    ],
)
def test_tensors_that_do_not_fit_their_layouts(tmp_path, tensors, layouts, rank, message):
    mesh = Mesh(("fsdp",), (2,))
    folder = begin_save(tmp_path, 1)
    found = {name: Layout(mesh, (placement,), shape) for name, (placement, shape) in layouts.items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        write_part(folder, "g", "0", tensors, found, rank)
    assert "\n" not in str(caught.value) and not list(folder.iterdir())


@pytest.mark.parametrize(("group", "part"), [("../g", "0"), ("g", "../0"), ("g", "a.b"), ("", "0")])
def test_names_that_are_no_files(tmp_path, group, part):
    with pytest.raises(CheckpointError, match=r"a name of letters, digits, '-' and '_' is needed"):
        write_part(begin_save(tmp_path, 1), group, part, {}, {}, 0)


def test_a_name_that_looks_like_a_box(tmp_path):
    mesh = Mesh(("fsdp",), (2,))
    whole = {"x": tensor((4,)), "x[0:2]": tensor(())}
    layouts = {"x": Layout(mesh, (Shard(0),), (4,)), "x[0:2]": Layout(mesh, (Replicate(),), ())}
    with pytest.raises(CheckpointError, match=r"tensor x(\[0:2\])?: another one has the name 'x\[0:2\]'"):
        save_sharded(tmp_path, 1, {"g": whole}, {"g": layouts})


def test_two_ranks_with_one_name(tmp_path):
    whole, layouts = groups()["model"], LAYOUTS["model"]
    folder = begin_save(tmp_path, 1)
    write_part(folder, "model", "part", shares(whole, layouts, 0), layouts, 0)
    with pytest.raises(StorageError, match=r"step 1: cannot write .*model\.part\.safetensors: File exists"):
        write_part(folder, "model", "part", shares(whole, layouts, 1), layouts, 1)


# ---- what a rank may not expect ----


@pytest.mark.parametrize(
    ("into", "layouts", "rank", "message"),
    [
        ({"x": torch.zeros(3, 4)}, {"x": (Shard(0), (6, 4))}, 2, r"model/x has no layout on rank 2"),
        ({"x": torch.zeros(3, 4)}, {"x": (Shard(0), (6, 5))}, 0, r"model/x has shape \(6, 4\), expected \(6, 5\)"),
        (
            {"x": torch.zeros(2, 4)},
            {"x": (Shard(0), (6, 4))},
            0,
            r"model/x of rank 0 has shape \(2, 4\), its layout says",
        ),
        (
            {"x": torch.zeros(3, 4).double()},
            {"x": (Shard(0), (6, 4))},
            0,
            r"has dtype float32, expected torch\.float64",
        ),
        ({}, {"x": (Shard(0), (6, 4))}, 0, r"model/x is extra: nothing takes it"),
        ({}, {}, 0, r"model/x is extra: nothing takes it"),
        (
            {"x": torch.zeros(3, 4), "y": torch.zeros(1)},
            {"x": (Shard(0), (6, 4)), "y": (Shard(0), (2,))},
            0,
            r"model/y is missing",
        ),
    ],
)
def test_restore_into_a_layout_is_strict(tmp_path, into, layouts, rank, message):
    path = save(tmp_path, 1, {"model": {"x": tensor((6, 4))}}, {})
    mesh = Mesh(("fsdp",), (2,))
    found = {name: Layout(mesh, (placement,), shape) for name, (placement, shape) in layouts.items()}
    with pytest.raises(CheckpointError, match=message) as caught:
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
            with pytest.raises(CheckpointError, match=r"tensor g/x is corrupt in file g\.rank1\.safetensors"):
                checkpoint.restore("g", into, layouts, rank)
            assert not into["x"].any()
        else:
            checkpoint.restore("g", into, layouts, rank)
            assert same(into["x"], cut(whole, layouts["x"], rank))
    with pytest.raises(CheckpointError, match=r"tensor g/x is corrupt"):
        checkpoint.read("g", "x")


# ---- crashes ----


def test_killed_at_every_call_of_a_save_by_four(tmp_path, monkeypatch):
    """Controller and ranks die together: the power fails."""
    total = calls_of_a_save(monkeypatch, lambda: save_four(tmp_path / "count", 2))
    assert total > 15
    committed = 0
    for at in range(total):
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


@pytest.mark.parametrize("code", ["ENOSPC", "EROFS"])
def test_a_failing_disk_names_the_step_and_what_is_intact(tmp_path, monkeypatch, code):
    def fail(name):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), str(tmp_path / name))

    total = calls_of_a_save(monkeypatch, lambda: save_four(tmp_path / "count", 2))
    for at in range(1, total):  # the first call makes the root, which is there already
        root = tmp_path / f"root{at}"
        before = save_step(root, 1)
        with monkeypatch.context() as patch:
            Trap(patch, fail, at)
            with pytest.raises(StorageError, match=r"^checkpoint of step 2: cannot write .*is intact$") as caught:
                save_four(root, 2)
        assert f"the checkpoint before it, {before}, is intact" in str(caught.value)
        assert holds(before, "1")
        save_four(root, 3)
        assert not [p for p in root.iterdir() if "tmp" in p.name]


def test_everything_is_synchronised_before_the_name_is_given(tmp_path, monkeypatch):
    log = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        log.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source, target, **options):
        log.append("rename")
        real_rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    path = save_four(tmp_path, 1)
    data = sorted(p.name for p in path.glob("*.safetensors"))
    assert sorted(log[: len(data)]) == data
    assert log[len(data) :] == ["manifest.json", f"step-000001.tmp-{os.getpid()}", "rename", tmp_path.name]
