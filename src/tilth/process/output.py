"""Output of children, in files instead of the terminal of the run."""

import contextlib
import os
import tempfile
import threading
from pathlib import Path

LIMIT = 8 << 20
"""Maximum bytes of the file; then it is renamed ``NAME.1``, replacing an earlier one, and a new file begins."""
HELD = 1 << 20
"""Newest bytes kept until the file is known."""
CHUNK = 1 << 16
MARK = b"[printed] "
PATIENCE = 1.0
"""Seconds to drain the pipe at the end: a process that outlives its call may keep it open for ever."""
TAIL = 1 << 14
"""Bytes that the last lines of a file are looked for in."""


class Prints:
    """Pipe for processes and a thread that copies it to a file of bounded size.

    Output before the call of ``to`` is kept in memory. What cannot be written goes to standard error. So does what is
    still kept at the end, each line behind ``MARK``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writer = -1
        self._thread: threading.Thread | None = None
        self._held = b""
        self._path: Path | None = None

    @property
    def writer(self) -> int:
        """Return the file descriptor to print to."""
        if self._thread is None:
            reader, self._writer = os.pipe()
            self._thread = threading.Thread(target=self._carry, args=(reader,), name="prints", daemon=True)
            self._thread.start()
        return self._writer

    def to(self, path: Path) -> None:
        """Append the kept and all later output to this file."""
        with self._lock:
            held, self._held, self._path = self._held, b"", path
            if held:
                self._write(path, held)

    def close(self) -> None:
        """Drain the pipe. No process may print afterwards. May be called twice."""
        if self._thread is not None and self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
            self._thread.join(PATIENCE)
        with self._lock:
            held, self._held = self._held, b""
        _complain(b"".join(MARK + line for line in held.splitlines(keepends=True)))

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


class OutputFile:
    """Output of one process, in a file without a name, so that nothing is left behind."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process

    def fileno(self) -> int:
        """Return the descriptor to print to."""
        return self._file.fileno()

    def tail(self, lines: int) -> str:
        """Return the last lines."""
        size = os.fstat(self.fileno()).st_size
        text = os.pread(self.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def _complain(data: bytes) -> None:
    with contextlib.suppress(OSError):  # standard error is closed
        while data:
            data = data[os.write(2, data) :]
