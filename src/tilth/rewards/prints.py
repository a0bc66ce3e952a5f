"""What reward processes print, in a file of bounded size instead of the terminal of the run."""

import contextlib
import os
import threading
from pathlib import Path

LIMIT = 8 << 20
"""Bytes of the file; then it becomes ``NAME.1``, in place of the one before, and a new one begins."""
HELD = 1 << 20
"""Bytes that are held until the file is known, the newest ones."""
CHUNK = 1 << 16
PATIENCE = 1.0
"""Seconds at the end for what is on its way: a process that outlived its reward may keep the pipe open for ever."""


class Prints:
    """A pipe for the processes, and a thread that carries what comes to the file.

    It holds what comes before ``to`` was called. What cannot be written goes to standard error, as does what is held at
    the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writer = -1
        self._thread: threading.Thread | None = None
        self._held = b""
        self._path: Path | None = None

    @property
    def writer(self) -> int:
        """The file descriptor to print to."""
        if self._thread is None:
            reader, self._writer = os.pipe()
            self._thread = threading.Thread(target=self._carry, args=(reader,), name="reward-prints", daemon=True)
            self._thread.start()
        return self._writer

    def to(self, path: Path) -> None:
        """Append what was held, and what comes from now on, to this file."""
        with self._lock:
            held, self._held, self._path = self._held, b"", path
            if held:
                self._write(path, held)

    def close(self) -> None:
        """Take in what is on its way. Nobody may print any more; twice is fine."""
        if self._thread is not None and self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
            self._thread.join(PATIENCE)
        with self._lock:
            held, self._held = self._held, b""
        _complain(held)

    def _carry(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as pipe:
            while data := pipe.read(CHUNK):
                with self._lock:
                    if self._path is None:
                        self._held = (self._held + data)[-HELD:]
                    else:
                        self._write(self._path, data)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            if path.exists() and path.stat().st_size + len(data) > LIMIT:
                path.replace(path.with_name(f"{path.name}.1"))
            with open(path, "ab") as file:
                file.write(data)
        except OSError:
            _complain(data)


def _complain(data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads that either
        while data:
            data = data[os.write(2, data) :]
