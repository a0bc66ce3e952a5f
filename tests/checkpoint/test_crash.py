"""A save that dies or fails at any moment leaves the checkpoint before it loadable, and the next save cleans up."""

import errno
import os
import shutil
import subprocess

import pytest
import torch

from tests.checkpoint.make import groups, same, save_step
from tests.errors import raises
from tilth.checkpoint import directory, latest, open_checkpoint, prune, save, stages
from tilth.core.errors import StorageError

CALLS = [(os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (os, "write"), (stages, "stage")]


class Trap:
    """Counts what a save does to the disk, and acts before the n-th call."""

    def __init__(self, monkeypatch, action, at=None):
        self.count, self.at, self.action = 0, at, action
        for module, name in CALLS:
            monkeypatch.setattr(module, name, self.guard(getattr(module, name), name))

    def guard(self, real, name):
        def call(*args, **kwargs):
            self.count += 1
            if self.count - 1 == self.at:
                self.action(name)
            return real(*args, **kwargs)

        return call


def calls_of_a_save(monkeypatch, work):
    with monkeypatch.context() as patch:
        trap = Trap(patch, None)
        work()
    return trap.count


def die_at(monkeypatch, at, work):
    """Run ``work`` in a forked process that is gone before its n-th call, with nothing cleaned up."""
    child = os.fork()
    if child == 0:
        Trap(monkeypatch, lambda name: os._exit(77), at)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


def moments(total, every):
    """Calls before which something happens: every one, or the last ones, among which a save commits, and few others."""
    return range(total) if every else [*range(0, total - 10, 24), *range(max(total - 10, 0), total)]


def holds(path, salt):
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    expected = groups(salt)
    return all(same(checkpoint.read(g, n), t) for g, tensors in expected.items() for n, t in tensors.items())


@EVERY
def test_killed_at_every_call_of_a_save(tmp_path, monkeypatch, every):
    save_step(tmp_path / "count", 1)
    total = calls_of_a_save(monkeypatch, lambda: save_step(tmp_path / "count", 2))
    assert total > 20
    committed, calls = 0, moments(total, every)
    for at in calls:
        root = tmp_path / f"root{at}"
        before = save_step(root, 1)
        assert die_at(monkeypatch, at, lambda root=root: save_step(root, 2)) == 77
        newest = latest(root)
        assert newest is not None and holds(newest, "2" if newest != before else "1")
        committed += newest != before
        assert holds(before, "1")
        after = save_step(root, 3)
        assert latest(root) == after and holds(after, "3")
        assert not [p for p in root.iterdir() if "tmp" in p.name]
    assert 0 < committed < len(calls)


@EVERY
def test_killed_at_every_call_while_a_step_is_replaced(tmp_path, monkeypatch, every):
    """The only checkpoint there is, saved again."""

    def again(root):
        save(root, 1, groups("new"), {})

    save_step(tmp_path / "count", 1)
    total = calls_of_a_save(monkeypatch, lambda: again(tmp_path / "count"))
    seen = set()
    for at in moments(total, every):
        root = tmp_path / f"root{at}"
        save_step(root, 1)
        assert die_at(monkeypatch, at, lambda root=root: again(root)) == 77
        newest = latest(root)
        assert newest is not None
        old = open_checkpoint(newest).objects != {}
        assert holds(newest, "1" if old else "new")
        seen.add((newest.suffix, old))
        again(root)
        assert [p.name for p in root.iterdir()] == ["step-000001"]
        assert holds(root / "step-000001", "new")
    assert seen == {("", True), (".replaced", True), ("", False)}


@EVERY
def test_killed_while_pruning(tmp_path, monkeypatch, every):
    def make(root):
        for step in (1, 2, 3):
            save_step(root, step)

    make(tmp_path / "count")
    total = calls_of_a_save(monkeypatch, lambda: prune(tmp_path / "count", 1))
    for at in range(0, total, 1 if every else 6):
        root = tmp_path / f"root{at}"
        make(root)
        assert die_at(monkeypatch, at, lambda root=root: prune(root, 1)) == 77
        assert all(holds(p, str(int(p.name[-1]))) for p in directory.complete(root))
        assert latest(root) == root / "step-000003"
        save_step(root, 4)
        prune(root, 1)
        assert [p.name for p in root.iterdir()] == ["step-000004"]


@EVERY
@pytest.mark.parametrize(
    "code", ["ENOSPC", pytest.param("EROFS", marks=pytest.mark.slow), pytest.param("EACCES", marks=pytest.mark.slow)]
)
def test_a_failing_call_is_a_storage_error(tmp_path, monkeypatch, code, every):
    def fail(name):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), str(tmp_path / name))

    save_step(tmp_path / "count", 1)
    total = calls_of_a_save(monkeypatch, lambda: save_step(tmp_path / "count", 2))
    for at in moments(total, every):
        root = tmp_path / f"root{at}"
        before = save_step(root, 1)
        with monkeypatch.context() as patch:
            Trap(patch, fail, at)
            with pytest.raises(StorageError) as caught:
                save_step(root, 2)
        message = str(caught.value)
        assert os.strerror(getattr(errno, code)) in message and str(tmp_path) in message
        assert f"the checkpoint before it, {before}, is intact" in message and "\n" not in message
        assert not [p for p in root.iterdir() if "tmp" in p.name]
        newest = latest(root)
        assert newest is not None and holds(newest, newest.name[-1]) and holds(before, "1")


def test_a_full_disk_while_writing_bytes(tmp_path, monkeypatch):
    save_step(tmp_path, 1)

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with raises(StorageError, "save.write.rank0") as caught:
        save_step(tmp_path, 2)
    assert "step-000002" in caught.value.path and "model" in caught.value.path
    assert caught.value.reason == os.strerror(errno.ENOSPC) and "step-000001, is intact" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"] and holds(tmp_path / "step-000001", "1")


def test_the_first_checkpoint_fails(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with raises(StorageError, "save.begin") as caught:
            save_step(place, 1)
        assert caught.value.reason == "Not a directory" and "there was none before it" in str(caught.value)


def test_prune_that_cannot_remove(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)

    def fail(name):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        Trap(patch, fail, 0)
        with raises(StorageError, "save.retention") as caught:
            prune(tmp_path, 1)
        assert caught.value.path == str(tmp_path / "step-000001")
    assert holds(tmp_path / "step-000001", "1")


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    save_step(tmp_path, 1)

    def interrupt(name):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        Trap(patch, interrupt, 3)
        with pytest.raises(KeyboardInterrupt):
            save_step(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_everything_is_synchronised_before_the_name_is_given(tmp_path, monkeypatch):
    """The new folder when made; both files, the manifest and their directory before the rename; the root after it."""
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
    save_step(tmp_path, 1)
    folder = log[1]
    data = ["model.safetensors", "rename", "optimizer.safetensors", "rename"]  # those of reports
    assert log == [tmp_path.name, folder, *data, "manifest.json.tmp", "rename", folder, folder, "rename", tmp_path.name]
    assert folder.startswith("step-000001.tmp-")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)] if mount else ["false"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no permission to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_really_full_disk(small_disk):
    before = save_step(small_disk, 1)
    with raises(StorageError, "save.write.rank0"):
        save(small_disk, 2, {"g": {"x": torch.zeros(2 << 20, dtype=torch.uint8)}}, {})
    assert [p.name for p in small_disk.iterdir()] == ["step-000001"] and holds(before, "1")
    save_step(small_disk, 3)
