"""Round trips between the clocks of the controller and its workers, in a file beside the events.

A round has three readings in ns, each on the clock of the events of its process: the controller asks, the worker reads
its clock, the controller has the answer. The file has one JSON object a line, so that a SIGKILL loses one line at most:
first the clock of each process, ``{"rank", "epoch", "clock", "host", "pid", "waits"}``, then bursts of rounds,
``{"rank", "rounds": [[asked, there, answered], ...]}``.
"""

import json
import math
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tilth.core.errors import DataError, StorageError
from tilth.trace.spans import recorder

Round = tuple[int, int, int]  # (asked, there, answered): on the clocks of the controller, the worker, the controller
NOT_KNOWN = ""
BEFORE, FEW = 120_000_000_000, 12
"""How far before ``since`` rounds are read: ns, and the least number of bursts of each worker."""
_ASKED = re.compile(r'"rounds": \[\[(-?\d+)')


class Origin(NamedTuple):
    """The clock of a process.

    epoch: ns added to the monotonic clock for the starts of events. clock: identifies that clock; equal texts mean the
    same clock, "": unknown. waits: True if a communication ends with its span, False on a GPU, which queues it.
    """

    epoch: int
    clock: str
    host: str
    pid: int
    waits: bool = True


@dataclass(frozen=True)
class ClockSamples:
    """The clock of a process and its bursts of rounds: int64 [k, 3] each, in order of time."""

    origin: Origin
    bursts: list[np.ndarray] = field(default_factory=list)


def origin() -> Origin:
    """Return the clock that this process's recorder uses now."""
    torch = sys.modules.get("torch")
    waits = torch is None or not torch.cuda.is_initialized()
    return Origin(recorder.epoch, steady_clock(), socket.gethostname(), os.getpid(), waits)


def steady_clock() -> str:
    """Identify the clock of ``time.perf_counter_ns``: on Linux CLOCK_MONOTONIC by boot and time namespace; else ""."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return NOT_KNOWN


def events_folder(path: str | Path) -> Path:
    """Return a run's folder of events, by the run's folder, the folder itself, or a file in it."""
    path = Path(path)
    if not path.is_dir():
        return path.parent
    return path / "events" if (path / "events").is_dir() else path


def rounds_path(folder: Path, attempt: int) -> Path:
    """Return the file of an attempt in a folder of events."""
    return folder / f"attempt-{attempt}-clocks.jsonl"


MOST = 1 << 20
"""Bytes of rounds that wait for a disk which refuses them."""


class RoundsFile:
    """The file that the controller appends to. StorageError if it cannot be opened."""

    def __init__(self, folder: Path, attempt: int) -> None:
        path = rounds_path(folder, attempt)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: FileIO | None = FileIO(path, "a")
            self._waiting = b""
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", key=path.name) from error

    def introduce(self, origins: Mapping[int, Origin]) -> None:
        """Write the clocks of processes."""
        self._write([{"rank": rank, **who._asdict()} for rank, who in origins.items()])

    def add(self, bursts: Mapping[int, Sequence[Round]]) -> None:
        """Write rounds by worker."""
        self._write([{"rank": rank, "rounds": list(rounds)} for rank, rounds in bursts.items()])

    def _write(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Write lines, with those that an earlier call could not write."""
        self._waiting += "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        if self._file is None:
            return
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError:  # a full disk must not end the run: clocks are compared by the rounds so far
            if len(self._waiting) > MOST:
                self._waiting = self._waiting[: self._waiting.rfind(b"\n", 0, MOST) + 1]

    def close(self) -> None:
        """Close; a second call does nothing."""
        self._write([])
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a full disk must not end the run
                file.close()


def read_rounds(folder: Path, attempt: int, since: int | None = None) -> dict[int, ClockSamples]:
    """Read the clocks of an attempt by rank, the controller's included; {} if there is no file.

    An incomplete last line is skipped; DataError names file and line of any other fault. since: ns on the controller's
    clock; rounds long before it are not read, except some of the last.
    """
    path = rounds_path(folder, attempt)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", key=path.name) from error
    found: dict[int, ClockSamples] = {}
    lines = lines[:-1]  # the rest after the last line end is incomplete
    for i in range(len(lines)) if since is None else _newest(lines, since):
        line, number = lines[i], i + 1
        try:
            _take(json.loads(line), found)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines):  # cut by a SIGKILL
                break
            raise DataError(
                f"{path}, line {number}: this is no round of clocks: {line[:80]!r}; without this file the times of "
                "each rank are by its own clock",
                key=f"{path.name}.{number}",
            ) from error
    return found


def _newest(lines: Sequence[str], since: int) -> list[int]:
    """Return the places of all clocks, and of the rounds from ``BEFORE`` this time on."""
    known = [i for i, line in enumerate(lines) if '"epoch"' in line]
    first, least = len(lines), len(lines) - FEW * max(len(known), 1)
    while first and (first > least or _begun(lines[first - 1]) >= since - BEFORE):
        first -= 1
    return [i for i in known if i < first] + list(range(first, len(lines)))


def _begun(line: str) -> float:
    """Return the time of a line's first round; inf for a line without rounds."""
    found = _ASKED.search(line)
    return int(found[1]) if found else math.inf


def _take(row: dict[str, object], found: dict[int, ClockSamples]) -> None:
    rank = row.pop("rank")
    if not isinstance(rank, int):
        raise TypeError
    if "rounds" not in row:
        found[rank] = ClockSamples(Origin(**row))  # type: ignore[arg-type]
        return
    burst = np.array(row["rounds"], np.int64).reshape(-1, 3)
    if len(burst):
        found[rank].bursts.append(burst)
