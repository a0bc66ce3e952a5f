"""Writes of a process that wait in memory while their disk refuses them: full, read-only, slow or gone.

A thread makes the writes one after another and repeats the first one until it succeeds. Whoever writes waits for a
moment, as long as the disk is well, and goes on without it otherwise.
"""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from tilth.core.clock import utc_now
from tilth.core.errors import StorageError

LIMIT = 1 << 30
"""Bytes that may wait in one process."""
PROMPT = 0.5
"""Seconds that a caller waits for its write; a disk that takes longer is slow, and nobody waits for it."""
SLOW = 5.0
"""Seconds of one write after which it is reported."""
SOONEST, LATEST = 0.1, 20.0
"""Bounds of the seconds between two tries; each pause is twice the one before."""
PATIENCE = 300.0
"""Seconds that the end of a run waits for its disk."""

Trouble = Mapping[str, Any]
"""What cannot be written: ``path``, ``reason``, ``since`` (time), ``bytes``, ``writes`` and ``files`` that wait;
``slow``: True if the disk has not refused it. {}: nothing."""


@dataclass(eq=False)
class _Write:
    path: Path
    work: Callable[[], None]
    nbytes: int
    done: bool = False


@dataclass
class _Failing:
    """Trouble from its first failure until nothing waits any more."""

    path: Path
    reason: str
    slow: bool = False
    since: str = field(default_factory=lambda: utc_now("seconds"))
    pause: float = SOONEST


class WriteQueue:
    """Writes in order. Each must leave its file as it was if it fails, or be able to begin again."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting = deque[_Write]()
        self._began: float | None = None
        """When the try under way began."""
        self._failing: _Failing | None = None
        self._bug: BaseException | None = None
        self._slow = self._closed = False
        self._thread: _QueueThread | None = None

    def put(self, path: Path, work: Callable[[], None], nbytes: int = 0, *, newest: bool = False) -> None:
        """Add a write of these bytes and wait for it if the disk is well. newest: it replaces those that wait for the
        same path. StorageError if more than ``LIMIT`` bytes wait, with what is lost."""
        with self._changed:
            self._check()
            if newest:
                kept = [w for i, w in enumerate(self._waiting) if w.path != path or (not i and self._began is not None)]
                self._waiting = deque(kept)
            self._make_room(nbytes)
            alone, write = not self._waiting and not self._slow, _Write(path, work, nbytes)
            self._waiting.append(write)
            if self._thread is None:
                self._thread = _QueueThread(self, self._run)
                self._thread.start()
            self._changed.notify_all()
            if alone:
                self._changed.wait_for(lambda: write.done or self._failing is not None, PROMPT)
            self._check()

    def settle(self, seconds: float) -> Trouble:
        """Wait until nothing waits, at most so long, or the disk refuses; return what still cannot be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._bug or self._failing, seconds)
            self._check()
            return self._trouble("it takes longer than expected")

    def wait(self, path: str, seconds: float) -> None:
        """Wait until no write of this absolute path, or of one below it, waits: at most so long, or until the disk
        refuses."""

        def there() -> bool:
            return any(os.path.commonpath([path, os.path.abspath(w.path)]) == path for w in self._waiting)

        with self._changed:
            self._changed.wait_for(lambda: not there() or self._bug or self._failing or self._closed, seconds)

    def status(self) -> Trouble:
        """Return what cannot be written now."""
        with self._changed:
            took = 0.0 if self._began is None else time.monotonic() - self._began
            if took > SLOW and self._failing is None and self._waiting:
                self._failing = _Failing(
                    self._waiting[0].path, f"the disk has not answered for {took:.0f} s", slow=True
                )
            return self._trouble("") if self._failing is not None else {}

    def close(self) -> None:
        """End the thread; what waits is given up."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(PROMPT)

    # ---- with the lock ----

    def _check(self) -> None:
        """Raise what a write raised that was no failure of a disk."""
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    def _make_room(self, nbytes: int) -> None:
        """Wait for a slow disk if too much waits. StorageError if the disk refuses, or does not get on either."""

        def full() -> bool:
            return bool(self._waiting) and sum(w.nbytes for w in self._waiting) + nbytes > LIMIT

        if full() and self._failing is None:
            self._changed.wait_for(lambda: not full() or self._failing is not None, PATIENCE)
        if full():
            raise lost(self._trouble("it takes too long"), f"more than {LIMIT:,} bytes wait in memory")

    def _trouble(self, reason: str) -> Trouble:
        if not self._waiting:
            return {}
        failing = self._failing or _Failing(self._waiting[0].path, reason, slow=True)
        names = Counter(w.path.name for w in self._waiting)
        return {
            "path": str(failing.path), "reason": failing.reason, "since": failing.since,
            "bytes": sum(w.nbytes for w in self._waiting), "writes": len(self._waiting), "slow": failing.slow,
            "files": [f"{name} ({count})" for name, count in names.items()],
        }  # fmt: skip

    # ---- the thread ----

    def _run(self) -> None:
        while (write := self._next()) is not None:
            reason = self._try(write)
            with self._changed:
                took, self._began = time.monotonic() - (self._began or 0.0), None
                if reason:
                    self._failed(write, reason)
                    self._changed.notify_all()
                    assert self._failing is not None
                    self._changed.wait_for(lambda: self._closed, self._failing.pause)
                    continue
                write.done, self._slow = True, took > PROMPT
                self._waiting.popleft()
                if not self._waiting:
                    self._failing = None
                elif self._failing is not None:
                    self._failing.pause = SOONEST
                self._changed.notify_all()

    def _next(self) -> _Write | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            self._began = time.monotonic()
            return self._waiting[0]

    def _try(self, write: _Write) -> str:
        """Make the write; return why it failed, or ""."""
        try:
            write.work()
        except (OSError, StorageError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            return (cause.strerror if isinstance(cause, OSError) else "") or str(error)
        except BaseException as error:  # noqa: BLE001 - raised where the next write is put
            self._bug = error
        return ""

    def _failed(self, write: _Write, reason: str) -> None:
        if self._failing is None:
            self._failing = _Failing(write.path, reason)
        else:
            self._failing.path, self._failing.reason, self._failing.slow = write.path, reason, False
            self._failing.pause = min(2 * self._failing.pause, LATEST)


class _QueueThread(Thread):
    """Thread of a queue. The queues of this process are found by their threads, of which a fork has none."""

    def __init__(self, queue: WriteQueue, run: Callable[[], None]) -> None:
        super().__init__(target=run, name="tilth-writes", daemon=True)
        self.queue = queue


def settle(path: str | Path, seconds: float = SLOW) -> None:
    """Wait, before this process reads a file or a folder, until it has written what waits for it.

    Who puts a write waits for ``PROMPT`` seconds only, so the file may be older, or not there yet. A disk that refuses
    is not waited for.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _QueueThread):
            thread.queue.wait(os.path.abspath(path), seconds)


def described(before: Trouble, now: Trouble) -> str:
    """Return a sentence on trouble that has begun or ended, for who watches a run that goes on; "" for neither."""
    if before and not now:
        return f"{before['path']} can be written again: nothing is missing"
    if before or not now:
        return ""
    return (
        f"cannot write {now['path']}: {now['reason']}; training goes on, {now['bytes']:,} bytes wait in memory "
        f"(at most {LIMIT:,}), and it is tried again"
    )


def lost(trouble: Trouble, why: str) -> StorageError:
    """Make the error of writes that are given up."""
    message = f"cannot write {trouble['path']}: {trouble['reason']}, since {trouble['since']}; {why}. Lost are "
    return StorageError(message + f"{trouble['bytes']:,} bytes of {', '.join(trouble['files'])}; "
                        "what was written before is intact", key=Path(trouble["path"]).name)  # fmt: skip
