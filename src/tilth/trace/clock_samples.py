"""Round trips between the controller's clock and those of its workers, kept in a file beside the events.

A round is three readings: the controller asks, the worker reads its clock, the controller has the answer. All are in ns
on the clock of the events of the process that read them. One JSON object a line, so that a kill loses the last line at
most: first who has which clock, ``{"rank", "epoch", "clock", "host", "pid", "waits"}``, then bursts of rounds,
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
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from tilth.core.errors import DataError, StorageError
from tilth.trace.spans import recorder

Round = tuple[int, int, int]
"""Asked (controller's clock), there (worker's), answered (controller's)."""
NOT_KNOWN = ""
BEFORE, FEW = 120_000_000_000, 12
"""Of rounds before a time that is asked for: ns that are read, and bursts of each worker at least."""
_ASKED = re.compile(r'"rounds": \[\[(-?\d+)')


class Origin(NamedTuple):
    """The clock of a process."""

    epoch: int
    """ns that were added to the steady clock's: what the events' starts begin at."""
    clock: str
    """Which steady clock it is: processes that say the same read the very same one. "": not known."""
    host: str
    pid: int
    waits: bool = True
    """Whether a communication is over when its span ends: not on a GPU, which is only told to do it."""


@dataclass(frozen=True)
class Asked:
    """What was found out about one process's clock. bursts: int64 [k, 3] each, in order of time."""

    origin: Origin
    bursts: list[np.ndarray] = field(default_factory=list)


def origin() -> Origin:
    """That of this process, as its recorder writes its events now."""
    torch = sys.modules.get("torch")
    waits = torch is None or not torch.cuda.is_initialized()
    return Origin(recorder.epoch, steady_clock(), socket.gethostname(), os.getpid(), waits)


def steady_clock() -> str:
    """Name of the clock that ``time.perf_counter_ns`` reads: on Linux CLOCK_MONOTONIC, one for each boot and time
    namespace. "" elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return NOT_KNOWN


def events_folder(path: str | Path) -> Path:
    """Where the events of a run are: its own folder, its folder of events, and a file in there lead to it."""
    path = Path(path)
    if not path.is_dir():
        return path.parent
    return path / "events" if (path / "events").is_dir() else path


def rounds_path(folder: Path, attempt: int) -> Path:
    """The file of an attempt in a folder of events."""
    return folder / f"attempt-{attempt}-clocks.jsonl"


class RoundsFile:
    """Where the controller writes them. StorageError if the file cannot be made."""

    def __init__(self, folder: Path, attempt: int) -> None:
        path = rounds_path(folder, attempt)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = path.open("a", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", key=path.name) from error

    def introduce(self, origins: Mapping[int, Origin]) -> None:
        """Say who has which clock."""
        self._write([{"rank": rank, **who._asdict()} for rank, who in origins.items()])

    def add(self, bursts: Mapping[int, Sequence[Round]]) -> None:
        """Rounds by worker."""
        self._write([{"rank": rank, "rounds": list(rounds)} for rank, rounds in bursts.items()])

    def _write(self, lines: Sequence[Mapping[str, object]]) -> None:
        if self._file is None:
            return
        try:
            self._file.write("".join(f"{json.dumps(line)}\n" for line in lines))
            self._file.flush()
        except OSError:  # a full disk must not end the run from here: the clocks are as well known as they were
            self._file = None

    def close(self) -> None:
        """No more will come. Twice is fine."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what a full disk on a network refused: as in _write
                file.close()


def read_rounds(folder: Path, attempt: int, since: int | None = None) -> dict[int, Asked]:
    """All that is known of the clocks of an attempt, by rank, the controller's among them; {} where there is no file. A
    torn last line, with a line end or without, is left out; DataError names the file and line of any other fault.

    since: ns on the controller's clock; rounds long before are not read, but always some of the last.
    """
    path = rounds_path(folder, attempt)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", key=path.name) from error
    found: dict[int, Asked] = {}
    lines = lines[:-1]  # what follows the last line end was torn off
    for i in range(len(lines)) if since is None else _newest(lines, since):
        line, number = lines[i], i + 1
        try:
            _take(json.loads(line), found)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines):  # torn by a kill, as what has no line end
                break
            raise DataError(
                f"{path}, line {number}: this is no round of clocks: {line[:80]!r}; without this file the times of "
                "each rank are by its own clock",
                key=f"{path.name}.{number}",
            ) from error
    return found


def _newest(lines: Sequence[str], since: int) -> list[int]:
    """Places of all introductions, and of the rounds from ``BEFORE`` this time on."""
    known = [i for i, line in enumerate(lines) if '"epoch"' in line]
    first, least = len(lines), len(lines) - FEW * max(len(known), 1)
    while first and (first > least or _begun(lines[first - 1]) >= since - BEFORE):
        first -= 1
    return [i for i in known if i < first] + list(range(first, len(lines)))


def _begun(line: str) -> float:
    """When the first of a line's rounds was asked; inf where it says nothing of the kind."""
    found = _ASKED.search(line)
    return int(found[1]) if found else math.inf


def _take(row: dict[str, object], found: dict[int, Asked]) -> None:
    rank = row.pop("rank")
    if not isinstance(rank, int):
        raise TypeError
    if "rounds" not in row:
        found[rank] = Asked(Origin(**row))  # type: ignore[arg-type]
        return
    burst = np.array(row["rounds"], np.int64).reshape(-1, 3)
    if len(burst):
        found[rank].bursts.append(burst)
