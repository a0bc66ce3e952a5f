"""Append-only JSONL files, such as logs that are written before what they say is done; a failed write is a
StorageError."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tilth.core.errors import DataError
from tilth.core.files import atomic_write, sync, writing
from tilth.core.write_queue import WriteQueue, settle

_BLOCK = 1 << 16


def replace(path: Path, data: bytes, queue: WriteQueue | None = None) -> None:
    """Write a file atomically: a reader sees the old bytes or the new, also after a power cut. StorageError.

    queue: where it waits while the disk refuses it, unless a newer one takes its place.
    """
    if queue is not None:
        queue.put(path, partial(replace, path, data), len(data), newest=True)
        return
    with atomic_write(path, follow=False) as temporary:  # the target of a link is not the run's
        temporary.write_bytes(data)


class Lines:
    """An append-only file of JSON values, one a line. Opening it drops what follows the last object: a line that is
    not complete, or that something else wrote."""

    def __init__(self, path: Path, queue: WriteQueue | None = None, *, text: bool = False) -> None:
        """queue: where writes wait while the disk refuses them; None: they are errors. text: any line is one of it."""
        self.path, self._queue = path, queue
        self.dropped = b""
        if there := path.exists():
            with open(path, "rb") as file:
                end = _whole_end(file, text)
                file.seek(end)
                self.dropped = file.read()
                if self.dropped:
                    file.seek(0)
                    replace(path, file.read(end))
        with writing(path):
            self._open(os.O_CREAT)
            if not there:
                sync(path.parent)

    def _open(self, flags: int = 0) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o666)
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        self._durable = self._end = os.fstat(descriptor).st_size
        self._torn = self._unsure = False

    def append(self, line: str, *, sync: bool = False) -> None:
        """Append a line, durably if ``sync``. StorageError if that fails; the file is then unchanged."""
        data = line.encode() + b"\n"
        self._do(partial(self._append, data, sync), len(data))

    def sync(self) -> None:
        """Flush all lines to disk."""
        self._do(self._sync)

    def rewrite(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the lines whose objects ``keep`` refuses."""
        self._do(partial(self._rewrite, keep))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _do(self, work: Callable[[], None], nbytes: int = 0) -> None:
        if self._queue is not None:
            self._queue.put(self.path, work, nbytes)
            return
        with writing(self.path):
            work()

    def _append(self, data: bytes, durably: bool) -> None:
        """Append bytes to the whole lines, after an earlier try too."""
        self._find()
        left = data
        try:
            if self._torn:
                self._file.truncate(self._end)
                self._torn = False
            while left:
                left = left[self._file.write(left) :]
            if durably:
                os.fsync(self._file.fileno())
        except OSError:
            self._torn = True
            with suppress(OSError):  # else before the next try
                self._file.truncate(self._end)
                self._torn = False
            raise
        self._end += len(data)
        self._durable = self._end if durably else self._durable

    def _sync(self) -> None:
        """Make all lines durable."""
        self._find()
        try:
            if self._unsure:
                with open(self.path, "r+b") as file:
                    file.seek(self._durable)
                    whole = file.read(self._end - self._durable)
                    file.seek(self._durable)
                    file.write(whole)
            os.fsync(self._file.fileno())
        except OSError:
            self._unsure = True  # the kernel may forget bytes that it failed to write, unless they are written again
            raise
        self._durable, self._unsure = self._end, False

    def _rewrite(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        self._find()
        with open(self.path, "rb") as file:
            whole = b"".join(line for line, entry in zip(file, iterate_lines(self.path)) if keep(entry))
        replace(self.path, whole)
        self._file.close()
        self._open()

    def _find(self) -> None:
        """Check that the path still leads to the open file, or open it again. OSError while its disk is not there, or
        another one is in its place."""
        there, mine = os.stat(self.path), os.fstat(self._file.fileno())
        if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
            return
        if there.st_size < self._end:
            raise OSError(errno.ESTALE, "another file is in its place, with fewer lines", str(self.path))
        end = self._end
        self._file.close()
        self._open()
        self._torn, self._end = self._end > end, end
        self._durable = 0


def _whole_end(file: BinaryIO, text: bool) -> int:
    """Return where the last line ends that is complete and, unless ``text``, an object. Reads from the end."""
    end = _behind_newline(file, file.seek(0, os.SEEK_END))
    while not text and end:
        start = _behind_newline(file, end - 1)
        file.seek(start)
        if _is_object(file.read(end - start)):
            break
        end = start
    return end


def _behind_newline(file: BinaryIO, stop: int) -> int:
    """Return the place behind the last line feed before ``stop``; 0: there is none."""
    while stop > 0:
        start = max(0, stop - _BLOCK)
        file.seek(start)
        if place := file.read(stop - start).rfind(b"\n") + 1:
            return start + place
        stop = start
    return 0


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def iterate_lines(path: Path, *, lenient: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file, none if it does not exist. An incomplete last line is skipped.

    DataError for any other line that is not JSON; lenient: {} in its place.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                if lenient:
                    yield {}
                    continue
                raise DataError(
                    f"{path} line {number} is not JSON: {line[:60].rstrip()!r}", key=f"{path.name}.{number}"
                ) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, with what this process has still to write: see ``iterate_lines``."""
    settle(path)
    return list(iterate_lines(path))
