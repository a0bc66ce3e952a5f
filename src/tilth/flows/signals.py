"""Ctrl-C and SIGTERM end a run at its next step boundary, with everything saved."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

from tilth.core.errors import TilthError


class Interrupted(TilthError):
    """The run was asked to stop; its state is saved and the message says how to continue."""


class StopRequest:
    """While active, the first SIGINT or SIGTERM sets ``requested``; a second one interrupts at once.

    Outside the main thread signals cannot be handled: then it only carries the flag.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, object] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # Written at once, without any lock: the handler may run in the middle of anything.
        os.write(sys.stderr.fileno(), b"\nstopping after this step, then everything is saved; once more: stop now\n")

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
