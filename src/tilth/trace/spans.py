"""Spans: ``with span("generate", step=3) as s: ...; s.set(tokens=n)``, or ``@traced("score")``.

A finished span adds to the totals of its operation and, after ``recorder.start``, becomes an event in the run's Parquet
table. Every reported time of a phase comes from here.

A span costs about a microsecond, so operations of a millisecond may be traced: it takes no lock, formats nothing and
keeps no object. Each thread has its own totals, which only grow; reading and resetting use differences, so that no
update is lost.
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
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tilth.core.errors import StorageError
from tilth.trace.buffer import FORMAT, FULL, OTHERS, SIZE, Codes, EventBuffer, EventNames, Taken
from tilth.trace.device import DeviceClock, device_clock
from tilth.trace.ops import ON_DEVICE, OPS, PHASES

if TYPE_CHECKING:
    from torch.cuda import Event as CudaEvent

    from tilth.trace.writer import PartWriter

P = ParamSpec("P")
R = TypeVar("R")

CAPACITY = 200_000
"""Most events that wait in memory (21 MB, and a chunk a thread); further ones are dropped and counted. Totals stay
exact."""
WAKE = 20_000  # number of waiting events that wakes the writer early
LONGEST = 600.0  # most seconds between two parts of the table
WIDTH = 8  # sums of each operation, followed by
CODE, PHASE, DEVICE, NUMBER = 8, 9, 10, 11  # its code in events, True for a phase, True for work of a device, number
Where = tuple[str, str]  # role and place: the coordinates of this rank in the role's mesh, as "dp=0 fsdp=1 tp=0"
NOWHERE: Where = ("", "")
_now = time.perf_counter_ns
_pack = FORMAT.pack_into
DEEPEST = 16
"""Open spans of a thread that are shown."""
SHOWN = struct.Struct(f"@{DEEPEST}q")
"""Open spans of a thread, the outermost first, then 0: micro_batch * 2^16 + number of the operation."""
UNDECLARED = 0xFFFF
_numbers = {name: i + 1 for i, name in enumerate(OPS)}
_ops, _details, _places = Codes("", OTHERS), Codes("", OTHERS), Codes(NOWHERE, (OTHERS, ""))


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over the spans of one operation.

    seconds: inclusive; a span inside one of its own name counts twice. self_seconds: exclusive; these sum to the time
    of the outermost spans. phase_seconds, phase_tokens: of the spans in PHASES that are not inside another phase.
    """

    seconds: float
    self_seconds: float
    count: int
    tokens: int
    bytes: int
    flops: float
    phase_seconds: float
    phase_tokens: int


class _Thread(EventBuffer):
    """State of a thread: innermost open span, sums of ``Total`` by operation (times in ns), the part of them that was
    read, and waiting events."""

    __slots__ = ("name", "place", "reported", "shown", "sums", "thread", "top", "where")

    def __init__(self) -> None:
        super().__init__()
        self.where, self.place = NOWHERE, _places[NOWHERE]  # the newest place, and its code
        self.thread = _started_thread() or threading.current_thread()
        self.name = self.thread.name
        self.top: span | None = None
        self.shown: memoryview | None = None  # where others read which span is open
        self.sums: dict[str, list[Any]] = {}
        self.reported: dict[str, list[float]] = {}

    def add_new(self, into: dict[str, list[float]], reset: bool) -> None:
        """Add the sums since the last reset. A worker calls this in each call, so operations without new spans are
        skipped."""
        for op, row in list(self.sums.items()):  # a copy: the thread may add an operation meanwhile
            before = self.reported.get(op)
            if before is not None and row[2] == before[2]:
                continue
            now = row[:WIDTH]
            new = now if before is None else [a - b for a, b in zip(now, before)]
            into[op] = [a + b for a, b in zip(into[op], new)] if op in into else new
            if reset:
                self.reported[op] = now

    def begin(self, op: str) -> list[Any]:
        """Add an operation that is new in this thread."""
        sums: list[Any] = [0] * WIDTH
        self.sums[op] = sums = [*sums, _ops[op], op in PHASES, op in ON_DEVICE, _numbers.get(op, UNDECLARED)]
        return sums


def _started_thread() -> threading.Thread | None:
    """Return this thread; None if ``threading`` has not started it, or not yet: ``current_thread`` would make up a
    name for it."""
    ident, dummy = threading.get_ident(), threading._DummyThread
    return next((t for t in threading.enumerate() if t.ident == ident and not isinstance(t, dummy)), None)


def _begin() -> _Thread:
    """Make the state of this thread, unless a garbage collection in here makes it first."""
    made = _Thread()
    state: _Thread = vars(_local).setdefault("state", made)
    if state is made:
        recorder._threads.append(state)
    return state


def _state() -> _Thread:
    """Return the state of this thread."""
    try:
        state: _Thread = _local.state
    except AttributeError:
        state = _begin()
    return state


def nameable() -> bool:
    """True if the name of this thread is known, which is so after its first span, or once it has started."""
    return hasattr(_local, "state") or _started_thread() is not None


class span:
    """A context manager that times its block as one run of the operation ``op``, e.g. ``generate``. Usable once.

    ``step``, ``micro_batch`` and ``where`` default to those of the enclosing span (-1, -1, nowhere at the root).
    ``tokens``, ``squares`` (sum of squared lengths of their sequences), ``bytes`` and ``flops`` are the amount of work,
    also by ``set`` inside. ``detail`` and ``seq`` identify it, as ``trace.ops`` declares. Afterwards ``seconds`` is its
    time.
    """

    __slots__ = (
        "_begun", "_covered", "_inside", "_parent", "_sums", "_thread",
        "bytes", "depth", "detail", "duration", "flops", "id", "micro_batch", "op", "seq", "squares", "start", "step",
        "tokens", "where",
    )  # fmt: skip

    def __init__(
        self, op: str, step: int = -1, micro_batch: int = -1, tokens: int = 0, bytes: int = 0, flops: float = 0.0,
        squares: int = 0, detail: str = "", seq: int = -1, where: Where = NOWHERE,
    ) -> None:  # fmt: skip
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
        self.duration = -1  # not finished

    def set(
        self, *, tokens: int | None = None, bytes: int | None = None, flops: float | None = None,
        squares: int | None = None,
    ) -> None:  # fmt: skip
        """Set amounts that became known inside the block."""
        self.squares = self.squares if squares is None else squares
        self.tokens = self.tokens if tokens is None else tokens
        self.bytes = self.bytes if bytes is None else bytes
        self.flops = self.flops if flops is None else flops

    @property
    def seconds(self) -> float:
        return self.duration * 1e-9

    def __enter__(self) -> "span":
        try:
            thread = self._thread = _local.state
        except AttributeError:
            thread = self._thread = _begin()
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
        if (shown := thread.shown) is not None and self.depth < DEEPEST:
            try:
                shown[self.depth] = sums[NUMBER] + (self.micro_batch << 16)
            except (TypeError, ValueError):  # no number, or one too large: tracing must not end a run
                shown[self.depth] = sums[NUMBER]
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
            # Skip spans that a generator closed out of order.
            thread.top = parent if parent is None or parent.duration < 0 else _still_open(parent)
        if (shown := thread.shown) is not None and self.depth < DEEPEST:
            shown[self.depth] = 0
        if recorder.recording:
            if self._begun is not None:
                recorder.end(self.id, self._begun)
            _add(self, thread, sums[CODE], -1 if parent is None else parent.id)


def _still_open(top: span | None) -> span | None:
    while top is not None and top.duration >= 0:
        top = top._parent
    return top


def _add(s: span, thread: _Thread, code: float, parent: int) -> None:
    """Add the event of a finished span. A garbage collection in here may add its own event first."""
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
    """Clamp an amount to a signed integer; 0 if it is no number: tracing must not end a run."""
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
    """True if this thread is inside a phase of the step; its calls are part of that phase."""
    top = _state().top
    return top is not None and bool(top._covered)


def current_step() -> int:
    """Return the step of this thread's innermost open span; -1: none."""
    top = _state().top
    return -1 if top is None else top.step


def show_open(where: memoryview | None) -> None:
    """Keep the open spans of this thread in shared memory (``SHOWN``); None: no longer.

    Others read them there, also of a process that is stopped or in which something holds the GIL.
    """
    _state().shown = None if where is None else where.cast("q")


def opened(shown: bytes) -> list[tuple[str, int]]:
    """Return (operation, micro_batch) of the spans that ``show_open`` keeps, outermost first; "": not declared."""
    names, cells = ["", *OPS], itertools.takewhile(bool, SHOWN.unpack(shown))
    numbers = [(cell & UNDECLARED, cell >> 16) for cell in cells]
    return [(names[number] if number < len(names) else "", micro) for number, micro in numbers]


def traced(op: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: every call is a span of this operation."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(op):
                return function(*args, **kwargs)

        return call

    return decorate


class Recorder:
    """Totals and events of the process; use its one instance, ``recorder``. timed: True if device work is timed too."""

    def __init__(self) -> None:
        self._threads: list[_Thread] = []
        self._gone: dict[str, list[float]] = {}  # unread sums of threads that have ended
        self._forget()

    def _forget(self) -> None:
        """Reset to a state without a writer, also in a forked child, whose events are not those of this rank."""
        self.recording = self.timed = False
        self._writer: PartWriter | None = None
        self._device: DeviceClock | None = None
        self._held: Taken = []
        self._times: dict[int, tuple[int, int]] = {}  # of the device, of spans among those held
        self._background: threading.Thread | None = None
        # No threading.Event: a garbage collection inside one of its methods would deadlock on its lock.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._left: deque[_Thread] = deque()
        self._lost = 0
        for thread in self._threads:
            thread.forget()
            thread.shown = None
        self._write_lock = threading.Lock()
        self._totals_lock = threading.Lock()
        self._error: StorageError | None = None

    def begin(self) -> "CudaEvent | None":
        """Mark the start of a span's device work; None if it is not timed."""
        return self._device.begin() if self._device is not None else None

    def end(self, span: int, begun: "CudaEvent") -> None:
        """Mark the end of a span's device work."""
        if self._device is not None:
            self._device.end(span, begun)

    def _room(self) -> bool:
        """Return True if one more chunk may wait; wake the writer if there are many."""
        waiting = sum(thread.waiting for thread in [*self._threads, *self._left])
        if waiting >= WAKE and self._wake.empty():
            self._wake.put(None)
        return waiting < CAPACITY

    @property
    def dropped(self) -> int:
        """Return the number of events since the start that did not fit in memory or on disk."""
        return self._lost + sum(thread.dropped for thread in [*self._threads, *self._left])

    @property
    def epoch(self) -> int:
        """Return the ns to add to ``time.perf_counter_ns`` for the clock of events; 0: none are written."""
        writer = self._writer
        return 0 if writer is None else writer.epoch

    def ended(self, thread: int) -> int:
        """Return the number of spans that a thread has ended so far; thread: its ``ident``."""
        rows = [list(state.sums.values()) for state in list(self._threads) if state.thread.ident == thread]
        return sum(int(row[2]) for row in itertools.chain(*rows))

    def totals(self, reset: bool = True) -> dict[str, Total]:
        """Return the sums by operation over spans that ended since the last reset, in all threads."""
        return {op: total_of(row) for op, row in self.rows(reset).items()}

    def rows(self, reset: bool = True) -> dict[str, list[float]]:
        """Return the sums as rows for ``total_of``; a worker sends them with each answer."""
        with self._totals_lock:
            self._retire()
            new = dict(self._gone)
            for state in list(self._threads):
                state.add_new(new, reset)
            if reset:
                self._gone = {}
        return {op: row for op, row in new.items() if row[2]}

    def _retire(self) -> None:
        """Move the unread sums of ended threads, which bounds memory. Requires the lock of totals."""
        for state in [t for t in self._threads if not t.thread.is_alive()]:
            if self._writer is not None and (state.waiting or state.dropped):
                self._left.append(state)  # its last events are still to be written
            self._threads.remove(state)
            state.add_new(self._gone, True)

    def start(self, path: str | Path, rank: int = 0, attempt: int = 0, interval: float = 2.0) -> None:
        """Start a thread that writes events to ``path/attempt-A-rank-R-NNNNNN.parquet``.

        It writes a part after ``interval`` seconds, later after 1 % of the time so far (at most LONGEST), or when WAKE
        events wait; SIGKILL loses the events since the last part. That makes about 650 parts in the first 12 hours and
        150 a day later, or one for each WAKE events. StorageError: the folder cannot be made; RuntimeError: already
        started.
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
                self._error = self._error if self._lost else None
            except Exception as error:  # noqa: BLE001 - must not end the writer's thread; flush and stop raise it
                self._drop(CAPACITY)
                self._error = error if isinstance(error, StorageError) else _unwritten(self._writer.folder, error)

    def _drop(self, keep: int) -> None:
        """Drop the newest of the events that could not be written; keep: how many stay, to be written later."""
        kept = Taken()
        for name, packed in self._held:
            kept.append((name, packed[: keep * SIZE]))
            keep -= len(kept[-1][1]) // SIZE
            self._lost += (len(packed) - len(kept[-1][1])) // SIZE
        self._held = [(name, packed) for name, packed in kept if packed]

    def _take(self) -> None:
        """Take the finished events of each thread, also of ended ones."""
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
        """Write the taken events, except those that wait for a device."""
        now, later = self._held, Taken()
        if self._device is not None:
            times, waiting = self._device.take()
            self._times |= times
            now, later = writer.without(now, waiting if self.recording else frozenset())
        if now:
            writer.write(now, EventNames(_ops.texts(), _details.texts(), _places.texts()), self.dropped, self._times)
        self._held, self._times = later, {}

    def flush(self) -> None:
        """Write all finished spans now. StorageError if that fails, or if events were dropped before."""
        self._write()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        """Flush and stop writing; totals continue. A second call does nothing. StorageError: events are dropped."""
        self.recording = False
        self._wake.put(None)
        if self._background is not None:
            self._background.join()
            self._background = None
        try:
            self.flush()
        finally:
            self._drop(0)
            self._writer = self._device = None
            self.timed = False
            self._wake = SimpleQueue()

    def conclude(self) -> str:
        """Stop; return the error and the number of dropped events in a line, or "" if the trace is complete."""
        try:
            self.stop()
        except StorageError as error:
            return f"the trace of this run has holes, {self.dropped} events were dropped: {error}"
        return ""

    @contextmanager
    def to(self, path: str | Path, rank: int = 0, attempt: int = 0, interval: float = 2.0) -> Iterator["Recorder"]:
        """Call ``start`` and ``stop`` around a block. An exception of the block gets a StorageError as a note."""
        self.start(path, rank, attempt, interval)
        try:
            yield self
        except BaseException as failed:
            if note := self.conclude():
                failed.add_note(note)
            raise
        self.stop()


def _unwritten(folder: Path, error: Exception) -> StorageError:
    made = StorageError(f"cannot write events to {folder}: {type(error).__name__}: {error}", key=folder.name)
    made.__cause__ = error
    return made


def total_of(row: Sequence[float]) -> Total:
    """Convert sums in the order of the fields, times in ns."""
    took, own, count, tokens, size, flops, phase, phase_tokens = row
    return Total(
        took * 1e-9, own * 1e-9, int(count), int(tokens), int(size), float(flops), phase * 1e-9, int(phase_tokens)
    )  # fmt: skip


_ids = itertools.count(1)  # 0: a place that is not packed yet
recorder = Recorder()
_local = threading.local()
os.register_at_fork(after_in_child=recorder._forget)
