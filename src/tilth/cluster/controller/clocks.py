"""Clock samples between the controller and its workers: at the start, in between, at the end."""

import time
from pathlib import Path

from tilth.cluster.backends.base import Call
from tilth.cluster.controller.dispatch import Dispatch
from tilth.trace.clock_samples import Origin, Round, RoundsFile, origin
from tilth.trace.spans import recorder

MANY, FEW = 12, 3
"""Samples per worker at the start and at the end, and in between; the best one counts."""
COST = 1e-3
"""Largest share of the time that sampling may take."""
SHORTEST, LONGEST = 1.0, 20.0
"""Bounds on the seconds between bursts, which are 1 % of the time so far."""


class Clocks:
    """Samples the clocks of idle workers and writes the samples beside the events."""

    def __init__(self, dispatch: Dispatch, folder: Path, attempt: int) -> None:
        self._dispatch = dispatch
        self._ranks = range(dispatch.backend.workers)
        self._file = RoundsFile(folder, attempt)
        self._epoch = recorder.epoch  # the recorder may stop before the last samples
        self._began = self._next = time.monotonic()

    def begin(self) -> None:
        """Identify the clocks and take the first samples."""
        call = Call("", "origin")
        replies = self._dispatch.wait([self._dispatch.submit(rank, call) for rank in self._ranks])
        origins = dict(enumerate(Origin(*reply.value) for reply in replies))
        self._file.introduce(origins | {len(origins): origin()})
        self._burst(MANY)

    def now_and_then(self) -> None:
        """Take samples if they are due and all workers are idle."""
        if time.monotonic() >= self._next and self._dispatch.idle():
            self._burst(FEW)

    def end(self) -> None:
        """Take the last samples and close the file."""
        self._burst(MANY)
        self.close()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _burst(self, count: int) -> None:
        began = time.monotonic()
        self._file.add({rank: [self._round(rank) for _ in range(count)] for rank in self._ranks})
        now = time.monotonic()
        pause = min(max(0.01 * (now - self._began), SHORTEST), LONGEST)
        self._next = now + max(pause, (now - began) / COST)

    def _round(self, rank: int) -> Round:
        """Return (sent, remote, received) in ns; the callback takes the last before this thread wakes up."""
        landed: list[int] = []
        asked = self._now()
        flight = self._dispatch.submit(rank, Call("", "clock"))
        flight.future.add_done_callback(lambda _: landed.append(self._now()))
        reply = self._dispatch.wait([flight])[0]
        return asked, reply.value, landed[0] if landed else self._now()

    def _now(self) -> int:
        """Return ns on the clock of this process's events."""
        return time.perf_counter_ns() + self._epoch
