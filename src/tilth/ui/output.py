"""Output streams that a run outlives: a closed pipe, a terminal that went away, a full disk behind ``> FILE``."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Outlived:
    """A text stream that takes whatever is written to it, also when what is behind it does not any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None
        """The first error; from then on nothing is written."""

    def write(self, text: str) -> int:
        """Write, unless nobody takes it."""
        if self.lost is None:
            try:
                self._stream.write(text)
            except OSError as error:
                self.lost = error
        return len(text)

    def flush(self) -> None:
        """Flush, unless nobody takes it."""
        if self.lost is None:
            try:
                self._stream.flush()
            except OSError as error:
                self.lost = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def outlived() -> Iterator[None]:
    """Make standard output and error of this process ``Outlived`` for the time of the block."""
    before = sys.stdout, sys.stderr
    made = [stream and Outlived(stream) for stream in before]  # None: the process was started without it
    sys.stdout, sys.stderr = made  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in made:
            if stream and stream.lost is not None:
                discard(stream)


def discard(stream: Any) -> None:
    """Send to nowhere what waits in a stream, so that it is no error when the process ends and flushes it."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file, or is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
