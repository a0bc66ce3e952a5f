"""Disks that fail for a while under a run: real ones on small file systems in memory, and a layer that fails."""

import errno
import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq

from tilth.flows.callbacks import Callback


@contextmanager
def mounted(place: Path, megabytes: int = 4):
    """A file system of its own at this folder; None where mounts are not permitted."""
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class Full:
    """Fill the file system to its last byte."""

    number = errno.ENOSPC

    def __init__(self, disk: Path) -> None:
        self.disk, self.filler = disk, disk / "filler"

    def begin(self) -> None:
        descriptor = os.open(self.filler, os.O_WRONLY | os.O_CREAT)
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    os.write(descriptor, bytes(size))
            except OSError:
                continue
        os.close(descriptor)

    def end(self) -> None:
        self.filler.unlink()


class Vanished:
    """Move what is on the disk away, as a file system that is unmounted."""

    number = errno.ENOENT

    def __init__(self, disk: Path) -> None:
        self.runs, self.away = disk / "runs", disk / "away"

    def begin(self) -> None:
        self.runs.rename(self.away)

    def end(self) -> None:
        assert not self.runs.exists(), "something was written beside the disk"
        self.away.rename(self.runs)


class Layer:
    """Let every write, sync and rename below the folder fail with this number, or take some time."""

    def __init__(self, disk: Path, number: int, seconds: float = 0.0) -> None:
        self.disk, self.number, self.seconds, self._kept = str(disk), number, seconds, {}

    def _fail(self, real):
        def call(*args, **kwargs):
            if self.seconds:
                time.sleep(self.seconds)
                return real(*args, **kwargs)
            raise OSError(self.number, os.strerror(self.number))

        return call

    def begin(self) -> None:
        for owner, name in ((os, "fsync"), (os, "replace"), (pq, "write_table")):
            self._kept[owner, name] = getattr(owner, name)
            setattr(owner, name, self._fail(self._kept[owner, name]))

    def end(self) -> None:
        for (owner, name), real in self._kept.items():
            setattr(owner, name, real)
        self._kept = {}


class Trouble(Callback):
    """Let a disk fail after one step, and be well again after another one, or once a message has the text ``until``."""

    def __init__(self, fault, first: int, last: int) -> None:
        self.fault, self.first, self.last = fault, first, last
        self.messages, self.records, self.under_way = [], [], False
        self.until = ""

    def on_message(self, text):
        self.messages.append(text)
        if self.until and self.until in text:
            self.stop()

    def on_step_end(self, run, step, metrics):
        self.records.append(step)
        if step == self.first:
            self.fault.begin()
            self.under_way = True
        if step == self.last:
            self.stop()

    def stop(self):
        if self.under_way:
            self.fault.end()
            self.under_way = False
