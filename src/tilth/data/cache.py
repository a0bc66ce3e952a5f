"""Entries of the cache in ``run.dir``, which can be made again: a file and what is known about it, or nothing."""

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilth.core.errors import StorageError
from tilth.core.files import rename, sync

CACHE = ".cache"
"""Folder in run.dir of tokenised documents and of indexed records."""
_READ = 1 << 18
FileState = tuple[int, ...]
"""Device, inode, size and time of a file, () if there is none: equal as long as nobody writes it."""


def state_of(found: os.stat_result) -> FileState:
    """Return what differs between a file and one that has been changed or put in its place."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def file_state(path: str | Path) -> FileState:
    """Return the state of a file or folder."""
    try:
        return state_of(os.stat(path))
    except OSError:
        return ()


class CacheEntry:
    """One entry: a folder with a file and ``about.json``, which has the file's checksum and state and is written last.

    A file in the state in which it was written is intact; its checksum, a second per gigabyte, is read if that differs.
    """

    def __init__(self, place: Path, name: str) -> None:
        self.place, self.file = place, place / name

    def rooted(self) -> "CacheEntry":
        """Return the entry for processes in other folders."""
        return CacheEntry(self.place.absolute(), self.file.name)

    def about(self) -> dict[str, Any]:
        """Return what is known about the file."""
        found: dict[str, Any] = json.loads((self.place / "about.json").read_text())
        return found

    def state(self) -> FileState:
        """Return the state of the file."""
        return file_state(self.file)

    def damage(self) -> str | None:
        """Describe the damage of the entry: "" if it is intact, None if there is none."""
        if not self.place.exists():
            return None
        try:
            about = self.about()
            checksum, state = about["checksum"], about.get("state", ())  # an older version has no state
            if self.state() != tuple(state) and _checksum(self.file) != checksum:
                return "its checksum differs"
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return str(error) or type(error).__name__
        return ""

    @contextmanager
    def writing(self, what: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield a file and a table to fill; at the end of the block they are the entry, also if it was killed before.

        what: for the error. Raises ``StorageError`` if the folder cannot be written.
        """
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            file, about = self.place / f".{self.file.stem}.{os.getpid()}", dict[str, Any]()
            try:
                yield file, about
                about["checksum"] = _checksum(file)
                sync(file)  # or a loss of power leaves a file in its state without its bytes
                rename(file, self.file, durable=False)
                about["state"] = self.state()
            finally:
                file.unlink(missing_ok=True)
            described = self.place / f".about.{os.getpid()}"
            described.write_text(json.dumps(about))
            rename(described, self.place / "about.json", durable=False)
        except OSError as error:
            message = f"cannot write {what} to {self.place}: {error.strerror or error}"
            raise StorageError(message, key=self.file.name) from error


def _checksum(file: Path) -> int:
    """CRC-32 of a file, at about a second per gigabyte."""
    found = 0
    with open(file, "rb") as opened:
        while block := opened.read(_READ):
            found = zlib.crc32(block, found)
    return found
