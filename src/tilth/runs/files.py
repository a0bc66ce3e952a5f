"""The lock of a run; strict JSON, lines of it, and its dotted keys."""

import fcntl
import json
import math
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

from tilth.core.errors import StorageError
from tilth.core.files import writing
from tilth.core.lines import Lines


def to_json(value: Any) -> str:
    """Return one line of strict JSON, with null for a number that is not finite."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def append_line(path: Path, value: Any, *, sync: bool = False) -> None:
    """Append a value to a file of JSON lines, durably if ``sync``. StorageError."""
    with closing(Lines(path)) as lines:
        lines.append(to_json(value), sync=sync)


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
            message = f"{path.parent} is being written by process {holder}; stop it, or start another run"
            raise StorageError(message, key=path.name) from error
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
