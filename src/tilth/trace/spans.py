"""Spans: ``with span("generate", step=3) as s: ...; s.set(tokens=n)``, or ``@traced("score")``.

A finished span does two things: it adds to the totals of its operation (always), and it becomes one event in the
Parquet table of the run (once ``recorder.start`` was called). Every phase timing that anybody shows comes from here.

A span costs about a microsecond, so that an operation of a millisecond can be traced without a second thought: no
lock is taken and nothing is formatted on the way. Each thread sums up its own totals, which only ever grow; reading
and resetting work on differences, so no update can be lost between the two.
"""

import functools
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from tilth.core.errors import StorageError
from tilth.trace.ops import PHASES

if TYPE_CHECKING:
    from tilth.trace.writer import PartWriter

P = ParamSpec("P")
R = TypeVar("R")

CAPACITY = 200_000
"""Most events that wait in memory (about 50 MB); beyond it events are dropped and counted, totals stay exact."""
WAKE = 20_000
"""As many waiting events wake the writer before its time."""
WIDTH = 8  # sums kept for each operation
Where = tuple[str, str]
"""Role and place: the coordinates of this rank in the role's mesh, as "dp=0 fsdp=1 tp=0"."""
NOWHERE: Where = ("", "")
_now = time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class Total:
    """What the spans of one operation add up to. A span within a span of its own name counts in ``seconds`` twice."""

    seconds: float
    """Inclusive of the spans inside."""
    self_seconds: float
    """Exclusive of the spans inside: these sum to the time of the outermost spans."""
    count: int
    tokens: int
    bytes: int
    flops: float
    phase_seconds: float
    """Inclusive time of those spans that are a phase of the step: in PHASES and not inside another phase."""
    phase_tokens: int
    """Their tokens."""


class _Thread:
    """What one thread keeps: the innermost open span, and by name the sums that ``Total`` shows (times in ns)."""

    __slots__ = ("name", "sums", "thread", "top")

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.name = self.thread.name
        self.top: span | None = None
        self.sums: dict[str, list[float]] = {}


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = _Thread()
        recorder._threads.append(self.state)


class span:
    """A context manager that times its block under the name ``op``; name the thing done, e.g. ``generate``.

    ``step``, ``micro_batch`` and ``where`` default to those of the enclosing span (-1, -1, nowhere at the root).
    ``tokens``, ``squares`` (the sum of squared lengths of their sequences), ``bytes`` and ``flops`` say how much was
    done, here or by ``set`` inside. ``detail`` and ``seq`` say which one it is of its kind, as ``trace.ops`` declares.
    Usable once. After the block ``seconds`` is its time.
    """

    __slots__ = (
        "_covered", "_inside", "_open", "_parent", "_thread",
        "bytes", "depth", "detail", "duration", "flops", "id", "micro_batch", "op", "seq", "squares", "start", "step",
        "tokens", "where",
    )  # fmt: skip

    def __init__(
        self,
        op: str,
        step: int = -1,
        micro_batch: int = -1,
        tokens: int = 0,
        bytes: int = 0,
        flops: float = 0,
        squares: int = 0,
        detail: str = "",
        seq: int = -1,
        where: Where = NOWHERE,
    ) -> None:
        self.op = op
        self.step = step
        self.micro_batch = micro_batch
        self.tokens = tokens
        self.bytes = bytes
        self.flops = flops
        self.squares = squares
        self.detail = detail
        self.seq = seq
        self.where = where
        self.duration = 0

    def set(
        self,
        *,
        tokens: int | None = None,
        bytes: int | None = None,
        flops: float | None = None,
        squares: int | None = None,
    ) -> None:
        """State what became known inside the block."""
        self.squares = self.squares if squares is None else squares
        self.tokens = self.tokens if tokens is None else tokens
        self.bytes = self.bytes if bytes is None else bytes
        self.flops = self.flops if flops is None else flops

    @property
    def seconds(self) -> float:
        """Time of the finished block."""
        return self.duration * 1e-9

    def __enter__(self) -> "span":
        thread = self._thread = _local.state
        parent = self._parent = thread.top
        self._covered = self.op in PHASES
        if parent is None:
            self.depth = 0
        else:
            self.depth = parent.depth + 1
            self._covered = self._covered or parent._covered
            if self.step < 0:
                self.step = parent.step
            if self.micro_batch < 0:
                self.micro_batch = parent.micro_batch
            if self.where is NOWHERE:
                self.where = parent.where
        self.id = next(_ids)
        self._inside = 0
        self._open = True
        thread.top = self
        self.start = _now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        took = self.duration = _now() - self.start
        thread, op = self._thread, self.op
        parent = outside = self._parent
        self._open = False
        if parent is not None:
            parent._inside += took
        if thread.top is self:
            # A generator may have left a span behind that was closed out of order: skip those.
            while parent is not None and not parent._open:
                parent = parent._parent
            thread.top = parent
        sums = thread.sums.get(op)
        if sums is None:
            sums = thread.sums[op] = [0] * WIDTH
        sums[0] += took
        sums[1] += took - self._inside
        sums[2] += 1
        sums[3] += self.tokens
        sums[4] += self.bytes
        sums[5] += self.flops
        if self._covered and (outside is None or not outside._covered):
            sums[6] += took
            sums[7] += self.tokens
        if recorder.recording:
            recorder._add(self)


def in_phase() -> bool:
    """Whether this thread is inside a phase of the step, so that what it asks of others is part of that phase."""
    top = _local.state.top
    return top is not None and top._covered


def current_step() -> int:
    """The step that this thread is in, as its innermost open span says; -1: none."""
    top = _local.state.top
    return -1 if top is None else top.step


def traced(op: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: every call of the function is a span of this name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(op):
                return function(*args, **kwargs)

        return call

    return decorate


class Recorder:
    """The process-wide collector of finished spans. Use the instance ``recorder``; there is one per process."""

    def __init__(self) -> None:
        self.recording = False
        self.dropped = 0
        """Events that did not fit in memory or on disk."""
        self._threads: list[_Thread] = []
        self._gone: dict[str, list[float]] = {}
        self._before: dict[str, list[float]] = {}
        self._forget()

    def _forget(self) -> None:
        """Start without a writer (also in a forked child, whose events are not those of this rank)."""
        self.recording = False
        self._events: deque[tuple] = deque()
        self._writer: PartWriter | None = None
        self._background: threading.Thread | None = None
        self._wake = threading.Event()
        self._write_lock = threading.Lock()
        self._totals_lock = threading.Lock()
        self._error: StorageError | None = None

    def _add(self, s: span) -> None:
        events = self._events
        waiting = len(events)
        if waiting >= CAPACITY:
            self.dropped += 1
            return
        parent = s._parent
        events.append((
            s.id, -1 if parent is None else parent.id, s.depth, s.op, s.detail, s.seq, *s.where, s.step, s.micro_batch,
            s.start, s.duration, s.tokens, s.squares, s.bytes, s.flops, s._thread.name,
        ))  # fmt: skip
        if waiting >= WAKE and not self._wake.is_set():
            self._wake.set()

    @property
    def epoch(self) -> int:
        """ns to add to ``time.perf_counter_ns`` for the clock of the events that are being written; 0: none are."""
        writer = self._writer
        return 0 if writer is None else writer.epoch

    def totals(self, reset: bool = True) -> dict[str, Total]:
        """Sums by operation over the spans that ended since the last reset, in all threads; time in seconds."""
        with self._totals_lock:
            sums = self._sums()
            change = {op: [a - b for a, b in zip(row, self._before.get(op, [0] * WIDTH))] for op, row in sums.items()}
            if reset:
                self._before = sums
        return {op: _total(row) for op, row in change.items() if row[2]}

    def _sums(self) -> dict[str, list[float]]:
        """Sums since the process began; those of threads that ended are folded together, so memory stays bounded."""
        for state in [t for t in self._threads if not t.thread.is_alive()]:
            self._threads.remove(state)
            _merge(self._gone, state.sums)
        sums = {op: list(row) for op, row in self._gone.items()}
        for state in list(self._threads):
            _merge(sums, state.sums)
        return sums

    def start(self, path: str | Path, rank: int = 0, attempt: int = 0, interval: float = 2.0) -> None:
        """Write events to ``path/attempt-A-rank-R-NNNNNN.parquet`` from now on, in a thread of its own.

        A new part is written after ``interval`` seconds at first and later after 1 % of the time so far (at most a
        minute), so that a killed process loses little and a long run does not make a thousand files. StorageError if
        the folder cannot be made; RuntimeError if the recorder is already writing.
        """
        from tilth.trace.writer import PartWriter  # pyarrow takes a third of a second to import

        if self._writer is not None:
            raise RuntimeError("recorder.start was called twice without a stop")
        self._writer = PartWriter(Path(path), rank, attempt)
        self._events.clear()
        self.dropped, self._error = 0, None
        self.recording = True
        self._background = threading.Thread(target=self._run, args=(interval,), name="trace-writer", daemon=True)
        self._background.start()

    def _run(self, interval: float) -> None:
        began = time.monotonic()
        while self.recording:
            self._wake.wait(max(interval, min(60.0, 0.01 * (time.monotonic() - began))))
            self._wake.clear()
            self._write()

    def _write(self) -> None:
        with self._write_lock:
            events = self._events
            rows = [events.popleft() for _ in range(len(events))]
            if not rows or self._writer is None:
                return
            try:
                self._writer.write(rows, self.dropped)
            except StorageError as error:  # a full disk must not end the run from here; flush() and stop() tell it
                self.dropped += len(rows)
                self._error = error

    def flush(self) -> None:
        """Write all finished spans now. StorageError if this or an earlier background write failed."""
        self._write()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """Flush and end the writing; totals go on. Stopping twice is fine. StorageError as in ``flush``."""
        self.recording = False
        self._wake.set()
        if self._background is not None:
            self._background.join()
            self._background = None
        try:
            self.flush()
        finally:
            self._writer = None
            self._wake.clear()

    @contextmanager
    def to(self, path: str | Path, rank: int = 0, attempt: int = 0, interval: float = 2.0) -> Iterator["Recorder"]:
        """``start`` and ``stop`` around a block."""
        self.start(path, rank, attempt, interval)
        try:
            yield self
        finally:
            self.stop()


def _total(row: list[float]) -> Total:
    took, own, count, tokens, size, flops, phase, phase_tokens = row
    return Total(
        took * 1e-9, own * 1e-9, int(count), int(tokens), int(size), flops, phase * 1e-9, int(phase_tokens)
    )  # fmt: skip


def _merge(into: dict[str, list[float]], sums: dict[str, list[float]]) -> None:
    for op, row in list(sums.items()):  # a copy: the thread may be adding a name right now
        into[op] = [a + b for a, b in zip(into[op], row)] if op in into else list(row)


_ids = itertools.count()
recorder = Recorder()
_local = _Local()
os.register_at_fork(after_in_child=recorder._forget)
