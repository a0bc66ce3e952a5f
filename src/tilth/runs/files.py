"""Writing that either happens or leaves everything as it was, with one named error when the disk says no."""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tilth.core.errors import DataError, StorageError
from tilth.core.target import rename, sync, writing


def replace(path: Path, data: bytes) -> None:
    """Write a file as a whole: a reader sees the old bytes or the new, also after a power cut. StorageError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_bytes(data)
            rename(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def to_json(value: Any) -> str:
    """One line of strict JSON: a number that is not finite becomes null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


class Lines:
    """A file of lines that only grows. A line is there as a whole or not at all; opening drops a torn last one."""

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
        """Add a line; ``sync``: it is on disk when this returns. StorageError, and the file is as before."""
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
        """Make all lines durable."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def iterate_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file one by one, none if there is no file. A torn last line is left out, another is a
    DataError."""
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
    """All of ``iterate_lines``."""
    return list(iterate_lines(path))


class Lock:
    """An exclusive lock on a file, held by this process alone: a forked child does not inherit it, and it ends with the
    process however that ends."""

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
        """Give the lock back; twice is fine."""
        if self._fd in Lock._held:
            Lock._held.discard(self._fd)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)


def _let_go() -> None:
    for descriptor in Lock._held:
        os.close(descriptor)
    Lock._held.clear()


os.register_at_fork(after_in_child=_let_go)
