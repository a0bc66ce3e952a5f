"""A power cut at any moment: what was not synchronised is gone, and the run goes on from its newest checkpoint."""

import itertools
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from threading import RLock

import pyarrow.parquet as pq
import pytest

from tests.flows import tiny
from tests.flows.test_resume_exact import benchmark
from tilth.checkpoint import latest, open_checkpoint
from tilth.checkpoint.directory import step_of
from tilth.data.tokenizer import Tokenizer
from tilth.runs.readers import read_metrics, read_state, read_trajectories


class Disk:
    """What POSIX promises of a folder after a power cut: bytes of files and names in folders as of their last fsync."""

    def __init__(self, root, monkeypatch, look):
        """look: called with this disk after every fsync of a folder and around every rename."""
        self.root, self.look = root, look
        self._lock, self._looking = RLock(), False
        self._bytes, self._names, self._held = {}, {os.stat(root).st_ino: {}}, {}
        for name in ("fsync", "replace", "rename"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name), name))

    def _watched(self, function, name):
        def watched(*args, **kwargs):
            with self._lock:
                if self._looking:
                    return function(*args, **kwargs)
                if name != "fsync":
                    self._look()
                result = function(*args, **kwargs)
                if name != "fsync" or self._keep(*args):
                    self._look()
                return result

        return watched

    def _look(self):
        self._looking = True
        try:
            self.look(self)
        finally:
            self._looking = False

    def _hold(self, path):
        """No other file gets its number."""
        number = os.stat(path, follow_symlinks=False).st_ino
        if number not in self._held:
            self._held[number] = os.open(path, os.O_PATH)
        return number

    def _keep(self, descriptor):
        """Whether it is a folder."""
        place = f"/proc/self/fd/{descriptor}"
        self._hold(os.readlink(place))
        found = os.fstat(descriptor)
        if folder := stat.S_ISDIR(found.st_mode):
            names = self._names[found.st_ino] = {}
            for entry in os.scandir(os.readlink(place)):
                with suppress(FileNotFoundError):  # another thread has just removed it
                    names[entry.name] = self._hold(entry.path), entry.is_dir()
        else:
            self._bytes[found.st_ino] = Path(place).read_bytes()
        return folder

    def left(self, target, names):
        """Build what is left. names: "synced" ones only, or "all" as they are now, with or without their bytes."""
        target.mkdir()
        if names == "synced":
            self._rebuild(os.stat(self.root).st_ino, target)
            return target
        for place in sorted(self.root.rglob("*")):
            copy = target / place.relative_to(self.root)
            with suppress(FileNotFoundError):  # another thread has just removed it
                found = place.stat()
                if stat.S_ISDIR(found.st_mode):
                    copy.mkdir()
                else:
                    copy.write_bytes(self._bytes.get(found.st_ino, b""))
        return target

    def synced(self, number=0):
        """Name -> bytes of a file, or the same of a folder: what is left of a folder, by default all."""
        names = self._names.get(number or os.stat(self.root).st_ino, {})
        return {
            name: self.synced(inside) if is_folder else self._bytes.get(inside, b"")
            for name, (inside, is_folder) in names.items()
        }

    def _rebuild(self, number, target):
        for name, (inside, is_folder) in self._names.get(number, {}).items():
            if is_folder:
                (target / name).mkdir()
                self._rebuild(inside, target / name)
            else:
                (target / name).write_bytes(self._bytes.get(inside, b""))

    def close(self):
        for descriptor in self._held.values():
            os.close(descriptor)


def check(root):
    """Whatever is there is whole, and a checkpoint stands beside all that it refers to; its step."""
    for path in root.rglob("*.parquet"):
        pq.read_metadata(path)
    (run,) = list((root / "runs").glob("tiny-*")) or [None]
    newest = latest(run / "checkpoints") if run is not None else None
    if newest is None:
        return 0
    step = step_of(newest)
    open_checkpoint(newest).verify()
    assert read_state(run)["digest"] and (run / "recipe.toml").read_text()
    assert [r["step"] for r in read_metrics(run)][:step] == list(range(1, step + 1))
    assert set(range(3, step + 1)) <= set(read_trajectories(run, columns=["step"])["step"].to_pylist())
    assert Tokenizer.load(str(run / "model")) and (run / "model" / "config.json").read_text().endswith("}")
    return step


SHORT = {"supervised": {"steps": 2}, "algorithm": {"steps": 2}, "run": {"save_every": 1, "eval_every": 2}}


def go(root):
    return tiny.run(tiny.recipe(root / "runs", **SHORT)).directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return go(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("names", ["synced", pytest.param("all", marks=pytest.mark.slow)])
def test_a_power_cut_leaves_a_run_that_goes_on_with_the_same_bits(tmp_path, monkeypatch, whole, names):
    """Around every rename; and it goes on after some of them."""
    (disk_root := tmp_path / "disk").mkdir()
    seen, kept, count, before = [], [], itertools.count(), [None]

    def look(disk):
        now = disk.synced() if names == "synced" else None
        if now is not None and now == before[0]:  # a rename alone is not on the disk
            return
        before[0] = now
        left = disk.left(tmp_path / f"left-{next(count)}", names)
        seen.append(check(left))
        if seen[-1] in (1, 3) and seen[-1] not in [step for step, _ in kept]:
            kept.append((seen[-1], left))
        else:
            shutil.rmtree(left)

    with monkeypatch.context() as patched:
        disk = Disk(disk_root, patched, look)
        go(disk_root)
    disk.close()
    assert seen == sorted(seen) and max(seen) == 4, "a checkpoint that was there is gone"
    for step, left in kept:
        assert benchmark().differences(go(left), whole) == [], f"after the cut at step {step}"
