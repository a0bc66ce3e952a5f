"""Stop a run on Ctrl-C, SIGTERM or SIGHUP, at a step boundary with everything saved; hold signals for a report."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType
from typing import NoReturn

from tilth.core.errors import TilthError
from tilth.process.handlers import handling


class Interrupted(TilthError):
    """A run that stopped on request; its state is saved and the message names how to resume it."""


def ends() -> list[signal.Signals]:
    """Return the signals that end this process: SIGTERM, and SIGHUP unless the process ignores it (nohup)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


class HandOver(Interrupted):
    """A run that goes on in its next controller, which has an update."""


class StopRequest:
    """Set ``requested`` on the first SIGINT, SIGTERM or SIGHUP while active; a second SIGINT interrupts at once.

    A scheduler that sends SIGTERM sends SIGKILL some time later. So ``grace`` seconds after SIGTERM or SIGHUP the run
    stops wherever it is (Interrupted), to resume from its last checkpoint. An ignored SIGHUP stays ignored. Outside the
    main thread signals cannot be handled, and this is only a flag. told: called with the number of the first signal.
    """

    def __init__(self, grace: float = 60.0, told: Callable[[int], None] = lambda number: None) -> None:
        self.requested = False
        self.by = ""
        """Name of the signal, or the caller of ``Run.stop``."""
        self.grace, self._told = grace, told
        self._open = ExitStack()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:
            return
        self.requested, self.by = True, signal.Signals(number).name
        self._told(number)
        limit = ""
        if number != signal.SIGINT:
            signal.setitimer(signal.ITIMER_REAL, self.grace)
            limit = f", {self.grace:g} s at most"
        _write(f"stopping after this step, then everything is saved{limit}; Ctrl-C: stop now")

    def _expire(self, number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(
            f"stopped {self.grace:g} s after {self.by} (run.grace), before the step and its checkpoint were complete; "
            "the same command resumes from the last checkpoint",
            key="run.grace",
        )

    def __enter__(self) -> "StopRequest":
        handlers = {**dict.fromkeys((signal.SIGINT, *ends()), self._handle), signal.SIGALRM: self._expire}
        if self._open.enter_context(handling(handlers)):
            self._open.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class HeldSignals:
    """Hold back the first SIGINT, SIGTERM or SIGHUP from ``begin`` to the end of the block, and raise it there.

    So a finished run has its report, whenever somebody wants it to end. A second SIGINT interrupts at once. Outside the
    main thread signals cannot be handled, and this does nothing.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._held: int | None = None

    def begin(self) -> None:
        """Hold signals back from now on."""
        self._open.enter_context(handling(dict.fromkeys((signal.SIGINT, *ends()), self._hold)))

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._held is None:
            self._held = number
            _write("the run is finished; its report comes first; Ctrl-C: stop now (tilth report RUN writes it later)")

    def __enter__(self) -> "HeldSignals":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()
        if self._held is not None and error is None:
            signal.raise_signal(self._held)


def _write(text: str) -> None:
    """Write to stderr in a signal's handler, without a lock: it may interrupt any other code."""
    with suppress(OSError):  # the terminal may be closed
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
