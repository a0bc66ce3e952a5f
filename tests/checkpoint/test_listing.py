"""What is under a root: a folder of a step without a manifest is damage on a disk, and a save under way in a store."""

import errno
import os
import uuid
from pathlib import Path

import pytest

from tests.errors import raises
from tilth.checkpoint import begin_save
from tilth.checkpoint.directory import (
    DAMAGED,
    HELD,
    MISSING,
    Attempt,
    bare,
    complete,
    hold,
    latest,
    listing,
    prunable,
    prune,
)
from tilth.checkpoint.manifest import NAME
from tilth.checkpoint.storage import Local, storage_of
from tilth.core.errors import StorageError


def made(root, step: int, *, whole: bool = True, suffix: str = "") -> str:
    name = f"step-{step:06d}{suffix}"
    storage = storage_of(root)
    storage.begin(name)
    for file in ["model.safetensors", *([NAME] if whole else [])]:
        if storage.remote:
            storage.put(f"{name}/{file}", b"{}")
        else:
            (Path(root) / name / file).write_bytes(b"{}")
    return name


def states(root) -> dict[str, tuple[str, str]]:
    return {str(e.path).rpartition("/")[2]: (e.state, e.reason) for e in listing(root)}


def test_on_a_disk_it_is_damage(tmp_path):
    for step in (3, 5, 8):
        made(tmp_path, step, whole=step != 8)
    made(tmp_path, 13, whole=False, suffix=".tmp-abc")
    made(tmp_path, 5, whole=False, suffix=".replaced")  # the rest of one that is being removed
    assert states(tmp_path) == {
        "step-000003": ("complete", ""),
        "step-000005": ("complete", ""),
        "step-000005.replaced": ("unfinished", ""),
        "step-000008": ("damaged", MISSING),
        "step-000013.tmp-abc": ("unfinished", ""),
    }
    assert bare(tmp_path) == [tmp_path / "step-000008"] and latest(tmp_path).name == "step-000005"


def test_an_empty_folder_is_damage_as_well(tmp_path):
    (tmp_path / "step-000002").mkdir()
    assert states(tmp_path) == {"step-000002": ("damaged", MISSING)} and bare(tmp_path) == [tmp_path / "step-000002"]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_in_a_store_it_is_unfinished(kind, tmp_path):
    root = f"memory://{uuid.uuid4().hex}" if kind == "memory" else f"file://{tmp_path}"
    made(root, 3)
    made(root, 5, whole=False)
    assert states(root) == {"step-000003": ("complete", ""), "step-000005": ("unfinished", "")}
    assert bare(root) == [] and prunable(root, 1) == []


def test_one_that_was_marked_keeps_its_reason(tmp_path):
    made(tmp_path, 3, whole=False)
    (tmp_path / "step-000003" / DAMAGED).write_text("tensor x\n")
    assert states(tmp_path) == {"step-000003": ("damaged", "tensor x")} and bare(tmp_path) == []


def test_it_goes_when_it_is_older_than_the_newest(tmp_path):
    for step in (2, 3, 5, 8):
        made(tmp_path, step, whole=step not in (2, 8))
    assert [path.name for path in prune(tmp_path, 2)] == ["step-000002"]
    assert [path.name for path in prune(tmp_path, 1)] == ["step-000003"]
    assert set(states(tmp_path)) == {"step-000005", "step-000008"}


def test_a_save_of_its_step_takes_its_place(tmp_path):
    made(tmp_path, 3, whole=False)
    attempt = Attempt.new(tmp_path, 3)
    attempt.begin()
    attempt.write_manifest(b"{}")
    attempt.publish()
    assert states(tmp_path) == {"step-000003": ("complete", "")} == states(tmp_path) and len(complete(tmp_path)) == 1


def test_a_checkpoint_that_is_a_link_goes_as_any_other(tmp_path):
    root, away = tmp_path / "root", tmp_path / "away"
    for step in (2, 3):
        made(root, step)
    (root / "step-000002").rename(away)
    (root / "step-000002").symlink_to(away)
    assert [path.name for path in prune(root, 1)] == ["step-000002"]
    assert os.listdir(root) == ["step-000003"] and sorted(os.listdir(away)) == [NAME, "model.safetensors"]


def test_what_cannot_be_removed_does_not_stop_the_next_save(tmp_path, monkeypatch):
    """What can be is; where nothing can be written the save fails still."""
    left = [made(tmp_path, step, whole=False, suffix=".tmp-abc") for step in (1, 2, 3)]
    remove = Local.remove

    def refuses(self, path):
        if path == left[1]:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        remove(self, path)

    def full(self, folder):
        raise OSError(errno.ENOSPC, "No space left on device", folder)

    monkeypatch.setattr(Local, "remove", refuses)
    attempt = Attempt.new(tmp_path, 5)
    attempt.begin()
    attempt.write_manifest(b"{}")
    attempt.publish()
    assert states(tmp_path) == {left[1]: ("unfinished", ""), "step-000005": ("complete", "")}
    monkeypatch.setattr(Local, "begin", full)
    with raises(StorageError, "save.begin"):
        begin_save(tmp_path, 6)


def test_what_is_bad_is_not_counted(tmp_path):
    for step in (2, 3, 5, 8):
        made(tmp_path, step)
    bad = [str(tmp_path / f"step-00000{step}") for step in (3, 8)]
    assert [path.name for path in prunable(tmp_path, 1, 0, bad)] == ["step-000002", "step-000003"]
    assert prunable(tmp_path, 2, 0, bad) == [] == prunable(tmp_path, 1, 0, [*map(str, complete(tmp_path))])


def test_what_others_need_is_kept(tmp_path, monkeypatch):
    for step in range(1, 5):
        made(tmp_path, step)
    for _ in range(2):
        hold(tmp_path / "step-000002", "runs/lora-001")
    hold(tmp_path / "step-000002", "runs/lora-002")
    assert (tmp_path / "step-000002" / HELD).read_text() == "runs/lora-001\nruns/lora-002\n"
    assert [path.name for path in prune(tmp_path, 1)] == ["step-000001", "step-000003"]
    assert [path.name for path in complete(tmp_path)] == ["step-000002", "step-000004"]

    def full(self, *given):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Local, "put", full)
    with raises(StorageError, HELD):
        hold(tmp_path / "step-000004", "runs/lora-001")


def test_what_comes_and_goes_while_it_is_listed(tmp_path, monkeypatch):
    """Published after the complete ones were looked up: complete. Removed since: not damaged."""
    made(tmp_path, 3)
    made(tmp_path, 5)
    size = Local.size

    def removed(self, path):
        if (tmp_path / "step-000003").exists():
            os.rename(tmp_path / "step-000003", tmp_path / "step-000003.tmp-abc")
        return size(self, path)

    monkeypatch.setattr("tilth.checkpoint.directory._complete", lambda storage: {})
    monkeypatch.setattr(Local, "size", removed)
    assert states(tmp_path) == {"step-000003": ("unfinished", ""), "step-000005": ("complete", "")}
