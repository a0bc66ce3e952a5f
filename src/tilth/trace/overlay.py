"""Merge the spans of this process into its profile, which shows the phase, micro-batch and call of an operation.

Both have times since the Unix epoch: the profiler's by the system clock at its start, the spans' by the system clock at
the start of the recorder plus the monotonic clock. ``ClockMark`` has the difference.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilth.core.errors import DataError
from tilth.trace.spans import recorder

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
