"""Garbage collection by Python: seen as spans, and, where a run asks for it, done at planned moments only.

Python collects when it has made some hundred objects more than it has freed, in whichever thread that happens. A rank
that does so alone lets all others wait for it in the next collective, and with many ranks one of them nearly always
does. Collected at the same step on all ranks the pauses fall together (MegaScale, arXiv 2402.15627; the straggler
study, arXiv 2505.05713).
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tilth.trace.spans import _local, span


class Collector:
    """The collections of this process. Use the instance ``collector``; there is one per process."""

    def __init__(self) -> None:
        self.watching = False
        self.planned = False
        """Whether collections happen in ``collect`` only."""
        self._was_enabled = True
        self._open: span | None = None

    def start(self, planned: bool = False) -> None:
        """From now on every collection is a span ``gc`` (detail: the generation) of the thread that it stopped.

        planned: Python collects no more of itself. What stands now (modules, models) is taken to stay and is looked at
        no more, so that a planned collection costs as much as was made since. A second call changes the plan.
        """
        if not self.watching:
            self.watching = True
            gc.callbacks.append(self._heard)
        if planned and not self.planned:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()
            gc.freeze()
        elif self.planned and not planned:
            self._give_back()
        self.planned = planned

    def collect(self) -> None:
        """Collect now, all generations."""
        gc.collect()

    def stop(self) -> None:
        """Collections are no spans any more and happen when Python likes. Stopping twice is fine."""
        if self.planned:
            self._give_back()
        if self.watching:
            gc.callbacks.remove(self._heard)
        self.watching = self.planned = False

    @contextmanager
    def to(self, planned: bool = False) -> Iterator["Collector"]:
        """``start`` and ``stop`` around a block."""
        self.start(planned)
        try:
            yield self
        finally:
            self.stop()

    def _give_back(self) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def _heard(self, phase: str, about: dict[str, int]) -> None:
        """Python's word that a collection begins or has ended, in the same thread; there is only one at a time.

        It may come wherever an object is made: no lock is taken here. In the midst of the first span of a thread there
        is no place yet where this one could be put.
        """
        if phase == "start":
            if getattr(_local, "state", None) is not None:
                self._open = span("gc", detail=str(about["generation"])).__enter__()
        elif self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


collector = Collector()
os.register_at_fork(after_in_child=collector.stop)
