"""Ctrl-C, SIGTERM and SIGHUP end a run at its next step boundary, with everything saved; the last two within a stated
time."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn

from tilth.core.errors import TilthError


class Interrupted(TilthError):
    """The run was asked to stop; its state is saved and the message says how to continue."""


def ends() -> list[signal.Signals]:
    """Signals that ask this process to end: SIGTERM; and SIGHUP, of a terminal that is closed or a connection that is
    lost, unless whoever started the process had it ignore that (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


class StopRequest:
    """While active, the first SIGINT, SIGTERM or SIGHUP sets ``requested``; a SIGINT after it interrupts at once.

    Who sends SIGTERM may send it twice, and sends SIGKILL some time later. So ``grace`` seconds after it, or after
    SIGHUP, the run stops (Interrupted) wherever it is, and goes on from its last checkpoint another time. A SIGHUP that
    is ignored stays so. Outside the main thread signals cannot be handled: then it only carries the flag.
    """

    def __init__(self, grace: float = 60.0) -> None:
        self.requested = False
        self.by = ""
        """Name of the signal that asked."""
        self.grace = grace
        self._before: dict[int, object] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:
            return
        self.requested, self.by = True, signal.Signals(number).name
        limit = ""
        if number != signal.SIGINT:
            signal.setitimer(signal.ITIMER_REAL, self.grace)
            limit = f", {self.grace:g} s at most"
        # Written at once, without any lock: the handler may run in the middle of anything.
        text = f"\nstopping after this step, then everything is saved{limit}; Ctrl-C: stop now\n"
        with contextlib.suppress(OSError):  # the terminal may be what is gone
            if sys.stderr is not None:
                os.write(sys.stderr.fileno(), text.encode())

    def _expire(self, number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(
            f"stopped {self.grace:g} s after {self.by} (run.grace), before the step and its checkpoint were done; the "
            "same command continues from the last checkpoint",
            key="run.grace",
        )

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, *ends())}
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._expire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
