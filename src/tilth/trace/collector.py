"""Python's garbage collections as spans and, on request, at planned moments only.

Python collects after some hundred new objects, in the thread that makes the last one. All ranks wait in the next
collective for a rank that collects, and with many ranks one of them nearly always does. If all ranks collect after the
same step, the pauses coincide (MegaScale, arXiv 2402.15627; the straggler study, arXiv 2505.05713).
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tilth.trace.spans import nameable, span


class Collector:
    """The collections of this process; use its one instance, ``collector``. planned: only ``collect`` collects."""

    def __init__(self) -> None:
        self.watching = False
        self.planned = False
        self._was_enabled = True
        self._open: span | None = None

    def start(self, planned: bool = False) -> None:
        """Make every collection a span ``gc`` (detail: the generation) of the thread that it stops.

        planned: disable automatic collections and freeze the present objects (modules, models), so that a planned
        collection only visits newer ones. A second call changes ``planned``.
        """
        if not self.watching:
            self.watching = True
            gc.callbacks.append(self._on_collection)
        if planned and not self.planned:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()
            gc.freeze()
        elif self.planned and not planned:
            self._unplan()
        self.planned = planned

    def collect(self) -> None:
        gc.collect()

    def stop(self) -> None:
        """Restore Python's collections, without spans; a second call does nothing."""
        if self.planned:
            self._unplan()
        if self.watching:
            gc.callbacks.remove(self._on_collection)
        self.watching = self.planned = False

    @contextmanager
    def to(self, planned: bool = False) -> Iterator["Collector"]:
        """Call ``start`` and ``stop`` around a block."""
        self.start(planned)
        try:
            yield self
        finally:
            self.stop()

    def _unplan(self) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def _on_collection(self, phase: str, about: dict[str, int]) -> None:
        """Open or close the span; Python calls this at both ends of a collection, in the same thread, one at a time. It
        may interrupt any code that makes an object, so it takes no lock that is held for long. A thread that has just
        begun has no name yet, under which its later spans would be written."""
        if phase == "start":
            if nameable():
                self._open = span("gc", detail=str(about["generation"])).__enter__()
        elif self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


collector = Collector()
os.register_at_fork(after_in_child=collector.stop)
