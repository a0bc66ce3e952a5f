"""Atomic writes, append-only JSONL files and the lock of a run; a failed write is a StorageError."""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tilth.core.errors import DataError, StorageError
from tilth.core.files import atomic_write, sync, writing


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old bytes or the new, also after a power cut. StorageError."""
    with atomic_write(path, follow=False) as temporary:  # the target of a link is not the run's
        temporary.write_bytes(data)


def to_json(value: Any) -> str:
    """Return one line of strict JSON, with null for a number that is not finite."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


class Lines:
    """An append-only file of lines. Opening it drops an incomplete last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if there := path.exists():
            whole = path.read_bytes()
            if whole and not whole.endswith(b"\n"):
                replace(path, whole[: whole.rfind(b"\n") + 1])
        with writing(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
            if not there:
                sync(path.parent)

    def append(self, line: str, *, sync: bool = False) -> None:
        """Append a line, durably if ``sync``. StorageError if that fails; the file is then unchanged."""
        end = self._file.seek(0, os.SEEK_END)
        data = line.encode() + b"\n"
        with writing(self.path):
            try:
                while data:
                    data = data[self._file.write(data) :]
                if sync:
                    os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(end)
                raise

    def sync(self) -> None:
        """Flush all lines to disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def iterate_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file, none if it does not exist. An incomplete last line is skipped.

    DataError for any other line that is not JSON.
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
                raise DataError(
                    f"{path} line {number} is not JSON: {line[:60].rstrip()!r}", key=f"{path.name}.{number}"
                ) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file: see ``iterate_lines``."""
    return list(iterate_lines(path))


class Lock:
    """An exclusive lock on a file. A forked child does not inherit it, and it is released when the process ends."""

    _held: ClassVar[set[int]] = set()

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._fd, 32).decode().strip() or "unknown"
            os.close(self._fd)
            raise StorageError(
                f"{path.parent} is being written by process {holder}; stop it, or start another run", key=path.name
            ) from error
        Lock._held.add(self._fd)
        with writing(path):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._fd in Lock._held:
            Lock._held.discard(self._fd)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)


def _close_inherited() -> None:
    for descriptor in Lock._held:
        os.close(descriptor)
    Lock._held.clear()


os.register_at_fork(after_in_child=_close_inherited)
