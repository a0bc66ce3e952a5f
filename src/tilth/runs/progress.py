"""Progress inside a step: what a run does now, for the live view, and in a small file for ``tilth top``."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilth.core.clock import periodically

PROGRESS = "progress.json"
"""File of a running run: ``Doing`` as JSON."""
EVERY = 1.0
"""Seconds between two looks."""


@dataclass(frozen=True)
class Doing:
    """A part of a step. done, of: samples, updates ...; of = 0: not counted. since: seconds since 1970."""

    phase: str = ""
    step: int = 0
    steps: int = 0
    what: str = ""
    done: int = 0
    of: int = 0
    since: float = 0.0

    def __str__(self) -> str:
        """``generating 31 of 64``; empty between two parts."""
        return f"{self.what} {min(self.done, self.of):,} of {self.of:,}" if self.of > 1 and self.what else self.what


class StepProgress:
    """Notes of the run's thread on what it does, ``now``, which another thread writes to a file."""

    def __init__(self, folder: Path) -> None:
        self.now = self._written = Doing()
        self._file = folder / PROGRESS

    def begin(self, phase: str, step: int, steps: int) -> None:
        """Begin a step: its number in its phase, and the steps of the phase."""
        self.now = Doing(phase, step, steps, since=time.time())

    def at(self, what: str, done: int = 0, of: int = 0) -> None:
        """Go on to another part of the step, or count on in the same."""
        since = self.now.since if what == self.now.what else time.time()
        self.now = replace(self.now, what=what, done=done, of=of, since=since)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look every second while the body runs, and write what is seen to the file, which is removed at the end."""
        try:
            with periodically("progress", EVERY, self._note):
                yield
        finally:
            self._file.unlink(missing_ok=True)

    def _note(self) -> None:
        now = self.now
        if now != self._written:
            self._write(now)
            self._written = now

    def _write(self, now: Doing) -> None:
        """Replace the file; it is not durable, and a full disk, which the run's log reports, loses it."""
        new = self._file.with_suffix(".new")
        with suppress(OSError):
            new.write_text(json.dumps(asdict(now)))
            os.replace(new, self._file)


def read_progress(run: Path) -> Doing | None:
    """Return what a running run does now; None if it does not say so."""
    try:
        found: dict[str, Any] = json.loads((run / PROGRESS).read_text())
        return Doing(**found)
    except (OSError, ValueError, TypeError):
        return None
