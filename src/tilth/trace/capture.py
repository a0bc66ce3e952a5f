"""torch's profiler in this process, over some steps; written as a Chrome trace, which Perfetto opens.

It never ends a run: every error becomes a text. torch is imported when a capture starts. The spans of the process are
merged in, so that an operation shows its phase, micro-batch and call. Both have times since the Unix epoch: the
profiler's by the system clock at its start, the spans' by the system clock at the start of the recorder plus the
monotonic clock. ``ClockMark`` has the difference.
"""

import gzip
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilth.core.errors import DataError
from tilth.core.files import make_folder, rename
from tilth.trace.spans import recorder

SUFFIX = ".json.gz"
_LEVEL = 1  # of gzip: a fifth of the time of level 9, which the run waits for, and a third more bytes
_CHUNK = 1 << 20
BASE = re.compile(rb'"baseTimeNanoseconds": *(\d+)')
EVENTS = re.compile(rb'"traceEvents": *\[')
_THREAD = 2_000_000_000  # first lane of spans: above the thread ids of the system
_SHOWN = ("step", "micro_batch", "tokens", "bytes", "flops", "detail", "role")
_NONE = (-1, 0, "", None)


class ClockMark(NamedTuple):
    """A moment: ns since the Unix epoch; shift: converts a span's start to the system clock of that moment."""

    at: int
    shift: int

    @classmethod
    def now(cls) -> "ClockMark":
        at, steady = time.time_ns(), time.perf_counter_ns()
        return cls(at, at - steady - recorder.epoch)


def head_with_spans(head: bytes, folder: Path, rank: int, since: ClockMark) -> bytes:
    """Insert the spans of this process since a moment into the beginning of a Chrome trace.

    head: of torch's trace, at least to the bracket that opens its events. folder, rank: of the recorder. DataError:
    another trace; StorageError: the spans so far cannot be written.
    """
    base, opened = BASE.search(head), EVENTS.search(head)
    if base is None or opened is None:
        missing = "traceEvents" if opened is None else "baseTimeNanoseconds"
        raise DataError(f"torch's trace does not begin as expected: it has no {missing}", key=missing)
    lines = "".join(json.dumps(event) + ",\n" for event in _events(folder, rank, since, int(base[1])))
    return head[: opened.end()] + b"\n" + lines.encode() + head[opened.end() :]


def _events(folder: Path, rank: int, since: ClockMark, base: int) -> Iterator[dict[str, Any]]:
    """Yield Chrome events of the spans that started since then; times in us since ``base``."""
    process, lanes = os.getpid(), dict[str, int]()
    for row in _spans(folder, rank, since):
        lane = lanes.setdefault(row["thread"], _THREAD + len(lanes))
        yield {
            "ph": "X", "cat": "span", "name": row["op"], "pid": process, "tid": lane,
            "ts": (row["start"] + since.shift - base) / 1000, "dur": row["duration"] / 1000,
            "args": {name: row[name] for name in _SHOWN if row[name] not in _NONE},
        }  # fmt: skip
    for thread, lane in lanes.items():
        yield _meta("thread_name", process, lane, {"name": f"spans of {thread}"})
        yield _meta("thread_sort_index", process, lane, {"sort_index": lane - _THREAD - len(lanes)})


def _meta(what: str, process: int, lane: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "ts": 0, "args": args}


def _spans(folder: Path, rank: int, since: ClockMark) -> list[dict[str, Any]]:
    """Read rows of the event table, only from files that were written since then."""
    import pyarrow.parquet as pq  # takes a third of a second

    from tilth.trace.writer import PART

    recorder.flush()
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.iterdir()):
        found = PART.fullmatch(path.name)
        if found and int(found[2]) == rank and path.stat().st_mtime_ns >= since.at - 1_000_000_000:  # coarse clocks
            table = pq.read_table(path)
            rows += table.filter(np.asarray(table["start"]) + since.shift >= since.at).to_pylist()
    return rows


class Captured(NamedTuple):
    """Result of a capture: a file and its size, or the error."""

    path: str = ""
    bytes: int = 0
    error: str = ""


class Capture:
    """One capture at a time, started and stopped in the same thread."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._since: ClockMark | None = None

    def start(self, memory: bool = False) -> str:
        """Start recording operations with their shapes; memory: allocations too. Return the error or ""."""
        if self._profiler is not None:
            return "this process is being profiled already"
        self._since = ClockMark.now() if recorder.recording else None
        try:
            self._profiler = _started(memory)
        except Exception as error:  # noqa: BLE001 - errors of torch: another profiler, no CUPTI
            return _text(error)
        return ""

    def stop(self, stem: str, folder: str = "", rank: int = 0) -> Captured:
        """Stop and write ``stem.json.gz`` atomically; an empty stem: write nothing.

        folder, rank: those of this process's recorder, whose spans are merged into the trace.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return Captured(error="nothing is being profiled")
        target = Path(stem + SUFFIX)
        try:
            profiler.__exit__(None, None, None)
            spans = (Path(folder), rank, self._since) if folder and self._since else None
            return Captured(str(target), _write(profiler, target, spans) if stem else 0)
        except Exception as error:  # noqa: BLE001 - errors of torch, a full disk
            return Captured(error=_text(error))

    def drop(self) -> None:
        """Stop without writing; without a capture do nothing."""
        self.stop("")

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Show the block under this name, above its operations."""
        if self._profiler is None:
            return nullcontext()
        from torch.autograd.profiler import record_function

        return record_function(name)


def _started(memory: bool) -> Any:
    """Start torch.autograd.profiler: the events of torch.profiler, without its import of the compiler (seconds)."""
    import torch
    from torch.autograd.profiler import profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read at the first start; keeps it from printing to stderr
    device = "cuda" if torch.cuda.is_available() else None
    found = profile(use_cpu=True, use_device=device, use_kineto=True, record_shapes=True, profile_memory=memory)
    return found.__enter__()


def _write(profiler: Any, target: Path, spans: tuple[Path, int, ClockMark] | None) -> int:
    """Write the compressed trace and return its size in bytes."""
    plain, packed = (target.with_name(f".{target.name}.{kind}") for kind in ("json", "tmp"))
    make_folder(target.parent)
    try:
        profiler.export_chrome_trace(str(plain))
        if not plain.exists() or not plain.stat().st_size:
            raise OSError(f"torch has written nothing to {target.parent}")
        with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=_LEVEL) as sink:
            head = source.read(_CHUNK)
            sink.write(head if spans is None else head_with_spans(head, *spans))
            shutil.copyfileobj(source, sink, _CHUNK)
        rename(packed, target)
    finally:
        for left in (plain, packed):
            left.unlink(missing_ok=True)
    return target.stat().st_size


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
