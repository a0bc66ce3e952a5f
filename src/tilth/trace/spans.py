"""Spans: ``with span("generate", step=3) as s: ...; s.set(tokens=n)``, or ``@traced("score")``.

A finished span does two things: it adds to the totals of its operation (always), and it becomes one event in the
Parquet table of the run (once ``recorder.start`` was called). Every phase timing that anybody shows comes from here.

A span costs about a microsecond, so that an operation of a millisecond can be traced without a second thought: no
lock is taken, nothing is formatted and no object is kept on the way. Each thread sums up its own totals, which only
ever grow; reading and resetting work on differences, so no update can be lost between the two.
"""

import functools
import itertools
import math
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from tilth.core.errors import StorageError
from tilth.trace.buffer import FORMAT, FULL, OTHERS, SIZE, Codes, EventBuffer, EventNames, Taken
from tilth.trace.device import CudaEvent, DeviceClock, device_clock
from tilth.trace.ops import ON_DEVICE, PHASES

if TYPE_CHECKING:
    from tilth.trace.writer import PartWriter

P = ParamSpec("P")
R = TypeVar("R")

CAPACITY = 200_000
"""Most events that wait in memory (21 MB, and a chunk a thread); beyond it they are dropped and counted. Totals
stay exact."""
WAKE = 20_000
"""As many waiting events wake the writer before its time."""
LONGEST = 600.0
"""Most seconds between two parts."""
WIDTH = 8  # sums kept for each operation; behind them stand
CODE, PHASE, DEVICE = 8, 9, 10  # its code in events, whether it is a phase of the step, whether devices do its work
Where = tuple[str, str]
"""Role and place: the coordinates of this rank in the role's mesh, as "dp=0 fsdp=1 tp=0"."""
NOWHERE: Where = ("", "")
_now = time.perf_counter_ns
_pack = FORMAT.pack_into
_ops, _details, _places = Codes("", OTHERS), Codes("", OTHERS), Codes(NOWHERE, (OTHERS, ""))


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


class _Thread(EventBuffer):
    """What one thread keeps: the innermost open span, by name the sums that ``Total`` shows (times in ns), those that
    were told, and the events that wait."""

    __slots__ = ("name", "place", "sums", "thread", "told", "top", "where")

    def __init__(self) -> None:
        super().__init__()
        self.where, self.place = NOWHERE, _places[NOWHERE]  # the newest, and its code
        self.thread = threading.current_thread()
        self.name = self.thread.name
        self.top: span | None = None
        self.sums: dict[str, list[float]] = {}
        self.told: dict[str, list[float]] = {}

    def untold(self, into: dict[str, list[float]], tell: bool) -> None:
        """Add what came to the sums since they were last told. A worker asks at each call, however small: operations
        that did not end since then cost next to nothing."""
        for op, row in list(self.sums.items()):  # a copy: the thread may be adding a name right now
            before = self.told.get(op)
            if before is not None and row[2] == before[2]:
                continue
            now = row[:WIDTH]
            new = now if before is None else [a - b for a, b in zip(now, before)]
            into[op] = [a + b for a, b in zip(into[op], new)] if op in into else new
            if tell:
                self.told[op] = now

    def begin(self, op: str) -> list[float]:
        """The sums of an operation that this thread has not done before."""
        sums: list[float] = [0] * WIDTH
        self.sums[op] = sums = [*sums, _ops[op], op in PHASES, op in ON_DEVICE]
        return sums


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
        "_begun", "_covered", "_inside", "_parent", "_sums", "_thread",
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
        flops: float = 0.0,
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
        self.duration = -1  # it is not over

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
        sums = self._sums = thread.sums.get(self.op) or thread.begin(self.op)
        parent = self._parent = thread.top
        if parent is None:
            self.depth = 0
            self._covered = sums[PHASE]
        else:
            self.depth = parent.depth + 1
            self._covered = sums[PHASE] or parent._covered
            if self.step < 0:
                self.step = parent.step
            if self.micro_batch < 0:
                self.micro_batch = parent.micro_batch
            if self.where is NOWHERE:
                self.where = parent.where
        self.id = next(_ids)
        self._inside = 0
        self._begun = recorder.begin() if sums[DEVICE] and recorder.timed else None
        thread.top = self
        self.start = _now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        took = self.duration = _now() - self.start
        thread, parent, sums = self._thread, self._parent, self._sums
        sums[0] += took
        sums[1] += took - self._inside
        sums[2] += 1
        if self.tokens:
            if type(self.tokens) is not int:
                self.tokens = _fitting(self.tokens, 63)
            sums[3] += self.tokens
        if self.bytes:
            if type(self.bytes) is not int:
                self.bytes = _fitting(self.bytes, 63)
            sums[4] += self.bytes
        if self.flops:
            self.flops = _finite(self.flops)
            sums[5] += self.flops
        if self._covered and (parent is None or not parent._covered):
            sums[6] += took
            if self.tokens:
                sums[7] += self.tokens
        if parent is not None:
            parent._inside += took
        if thread.top is self:
            # A generator may have left a span behind that was closed out of order: skip those.
            thread.top = parent if parent is None or parent.duration < 0 else _still_open(parent)
        if recorder.recording:
            if self._begun is not None:
                recorder.end(self.id, self._begun)
            _add(self, thread, sums[CODE], -1 if parent is None else parent.id)


def _still_open(top: span | None) -> span | None:
    while top is not None and top.duration >= 0:
        top = top._parent
    return top


def _add(s: span, thread: _Thread, code: float, parent: int) -> None:
    """The event of a finished span. In here a collection of garbage may come, and its event before this one."""
    place = thread.place
    if s.where is not thread.where:
        place = _places[s.where]
        thread.where, thread.place = s.where, place
    detail = _details[s.detail] if s.detail else 0
    chunk = thread.chunk
    if chunk.used >= FULL:
        if not recorder._room():
            thread.dropped += 1
            return
        chunk = thread.grow()
    at = chunk.used
    chunk.used = at + SIZE
    try:
        _pack(
            chunk.buffer, at, s.id, parent, s.step, s.seq, s.start, s.duration, s.tokens, s.squares, s.bytes, s.flops,
            s.micro_batch, s.depth, code, detail, place,
        )  # fmt: skip
    except struct.error:
        numbers = s.id, parent, s.step, s.seq, s.start, s.duration, s.tokens, s.squares, s.bytes
        _pack(
            chunk.buffer, at, *(_fitting(n, 63) for n in numbers), _finite(s.flops),
            _fitting(s.micro_batch, 31), s.depth, code, detail, place,
        )  # fmt: skip


def _fitting(number: float, bits: int) -> int:
    """What was said to be an integer as one of so many bits, 0 where it is no number: tracing ends no run."""
    most = (1 << bits) - 1
    try:
        return min(max(int(number), -most), most)
    except (TypeError, ValueError, OverflowError):  # None, nan, inf
        return 0


def _finite(number: float) -> float:
    try:
        return float(number) if math.isfinite(number) else 0.0
    except (TypeError, ValueError, OverflowError):
        return 0.0


def in_phase() -> bool:
    """Whether this thread is inside a phase of the step, so that what it asks of others is part of that phase."""
    top = _local.state.top
    return top is not None and bool(top._covered)


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
        self.timed = False
        """Whether spans of what devices do are timed there too."""
        self._threads: list[_Thread] = []
        self._gone: dict[str, list[float]] = {}  # what threads that ended had not told
        self._forget()

    def _forget(self) -> None:
        """Start without a writer (also in a forked child, whose events are not those of this rank)."""
        self.recording = self.timed = False
        self._writer: PartWriter | None = None
        self._device: DeviceClock | None = None
        self._held: Taken = []
        self._background: threading.Thread | None = None
        # No Event: a collection of garbage inside one of its own methods would wait for its lock for ever.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._left: deque[_Thread] = deque()
        self._lost = 0
        for thread in self._threads:
            thread.forget()
        self._write_lock = threading.Lock()
        self._totals_lock = threading.Lock()
        self._error: StorageError | None = None

    def begin(self) -> CudaEvent | None:
        """The device's work of a span begins; None if it is not timed."""
        return self._device.begin() if self._device is not None else None

    def end(self, span: int, begun: CudaEvent) -> None:
        """It ends."""
        if self._device is not None:
            self._device.end(span, begun)

    def _room(self) -> bool:
        """Whether one more chunk may wait. The writer is told when there are many."""
        waiting = sum(thread.waiting for thread in [*self._threads, *self._left])
        if waiting >= WAKE and self._wake.empty():
            self._wake.put(None)
        return waiting < CAPACITY

    @property
    def dropped(self) -> int:
        """Events since the start that did not fit in memory or on disk."""
        return self._lost + sum(thread.dropped for thread in [*self._threads, *self._left])

    @property
    def epoch(self) -> int:
        """ns to add to ``time.perf_counter_ns`` for the clock of the events that are being written; 0: none are."""
        writer = self._writer
        return 0 if writer is None else writer.epoch

    def totals(self, reset: bool = True) -> dict[str, Total]:
        """Sums by operation over the spans that ended since the last reset, in all threads; time in seconds."""
        return {op: total_of(row) for op, row in self.rows(reset).items()}

    def rows(self, reset: bool = True) -> dict[str, list[float]]:
        """What ``totals`` tells, as ``total_of`` takes it: what a worker sends with each answer."""
        with self._totals_lock:
            self._retire()
            new = dict(self._gone)
            for state in list(self._threads):
                state.untold(new, reset)
            if reset:
                self._gone = {}
        return {op: row for op, row in new.items() if row[2]}

    def _retire(self) -> None:
        """Keep what threads that ended have not told, so memory stays bounded. (Called with the lock of totals.)"""
        for state in [t for t in self._threads if not t.thread.is_alive()]:
            if self._writer is not None and (state.waiting or state.dropped):
                self._left.append(state)  # its last events are still to be written
            self._threads.remove(state)
            state.untold(self._gone, True)

    def start(self, path: str | Path, rank: int = 0, attempt: int = 0, interval: float = 2.0) -> None:
        """Write events to ``path/attempt-A-rank-R-NNNNNN.parquet`` from now on, in a thread of its own.

        A new part is written after ``interval`` seconds at first and later after 1 % of the time so far (at most ten
        minutes), or when WAKE events wait: a process that is killed (SIGKILL) loses what ended since, no more. That
        makes about 650 parts in the first 12 hours and 150 a day later on, or one for each 20,000 events where those
        are more. StorageError if the folder cannot be made; RuntimeError if the recorder is already writing.
        """
        from tilth.trace.writer import PartWriter  # pyarrow takes a third of a second to import

        if self._writer is not None:
            raise RuntimeError("recorder.start was called twice without a stop")
        self._writer = PartWriter(Path(path), rank, attempt)
        self._left.clear()
        self._held = []
        self._lost, self._error = 0, None
        self._device = device_clock()
        self.timed = self._device is not None
        for thread in list(self._threads):
            thread.forget()
        self.recording = True
        self._background = threading.Thread(target=self._run, args=(interval,), name="trace-writer", daemon=True)
        self._background.start()

    def _run(self, interval: float) -> None:
        began = time.monotonic()
        while self.recording:
            with suppress(Empty):
                self._wake.get(timeout=max(interval, min(LONGEST, 0.01 * (time.monotonic() - began))))
            self._write()

    def _write(self) -> None:
        with self._write_lock:
            if self._writer is None:
                return
            try:
                self._take()
                self._put(self._writer)
            except Exception as error:  # noqa: BLE001 - none ends the run, or the writer's thread; flush and stop tell it
                self._lost += sum(len(packed) for _, packed in self._held) // SIZE
                self._held = []
                self._error = error if isinstance(error, StorageError) else _unwritten(self._writer.folder, error)

    def _take(self) -> None:
        """Hold name and finished events of each thread that has any, those that have ended among them."""
        with self._totals_lock:
            self._retire()
        for thread in list(self._threads):
            self._hold(thread)
        while self._left:
            self._hold(self._left[0])
            self._lost += self._left.popleft().dropped

    def _hold(self, thread: _Thread) -> None:
        if packed := thread.take():
            self._held.append((thread.name, packed))

    def _put(self, writer: "PartWriter") -> None:
        """Write the events that are held, but for those that still wait for a device."""
        now, later, times = self._held, Taken(), dict[int, tuple[int, int]]()
        if self._device is not None:
            times, waiting = self._device.take()
            now, later = writer.without(now, waiting if self.recording else frozenset())
        if now:
            writer.write(now, EventNames(_ops.texts(), _details.texts(), _places.texts()), self.dropped, times)
        self._held = later

    def flush(self) -> None:
        """Write all finished spans now. StorageError if this or an earlier background write failed: what it should have
        written is dropped."""
        self._write()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """Flush and end the writing; totals go on. Stopping twice is fine. StorageError as in ``flush``."""
        self.recording = False
        self._wake.put(None)
        if self._background is not None:
            self._background.join()
            self._background = None
        try:
            self.flush()
        finally:
            self._writer = self._device = None
            self.timed = False
            self._wake = SimpleQueue()

    def conclude(self) -> str:
        """``stop`` where what was recorded counts and its trace does not: a line on what of the trace could not be
        written, and how many events are missing; "": nothing, all is there."""
        try:
            self.stop()
        except StorageError as error:
            return f"the trace of this run has holes, {self.dropped} events were dropped: {error}"
        return ""

    @contextmanager
    def to(self, path: str | Path, rank: int = 0, attempt: int = 0, interval: float = 2.0) -> Iterator["Recorder"]:
        """``start`` and ``stop`` around a block. What the block raises stays, with the StorageError as a note."""
        self.start(path, rank, attempt, interval)
        try:
            yield self
        except BaseException as failed:
            if untold := self.conclude():
                failed.add_note(untold)
            raise
        self.stop()


def _unwritten(folder: Path, error: Exception) -> StorageError:
    made = StorageError(f"cannot write events to {folder}: {type(error).__name__}: {error}", key=folder.name)
    made.__cause__ = error
    return made


def total_of(row: Sequence[float]) -> Total:
    """Of sums in the order of the fields, times in ns."""
    took, own, count, tokens, size, flops, phase, phase_tokens = row
    return Total(
        took * 1e-9, own * 1e-9, int(count), int(tokens), int(size), float(flops), phase * 1e-9, int(phase_tokens)
    )  # fmt: skip


_ids = itertools.count(1)  # 0: an event that is not written yet
recorder = Recorder()
_local = _Local()
os.register_at_fork(after_in_child=recorder._forget)
