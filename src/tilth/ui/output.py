"""Output streams that may fail without ending a run: a closed pipe or terminal, a full disk behind ``> FILE``."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class Outlived:
    """A text stream that drops what is written after its first error, ``lost``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if self.lost is None:
            try:
                action()
            except OSError as error:
                self.lost = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def outlived() -> Iterator[None]:
    """Make standard output and error ``Outlived`` inside the block."""
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
    """Redirect a stream to /dev/null, so that the flush at the end of the process cannot fail."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file, or is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
