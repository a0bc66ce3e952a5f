"""The view of a run from another process, by the ends of its files: metrics, log, newest events of each rank.

A look costs milliseconds, however long the run is, and nothing in the run.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilth.analysis.recent import recent
from tilth.analysis.time_breakdown import COMMUNICATION, CONTROLLER, PAUSE, PEERS, PROFILE, STAGES, Account, account
from tilth.core.errors import DataError
from tilth.core.write_queue import settle
from tilth.data.cache import FileState, file_state
from tilth.runs.progress import Doing, read_progress
from tilth.runs.readers import (
    ACCURACY,
    HOUR,
    RECOVERIES,
    REWARD,
    WARNINGS,
    ettr,
    present,
    read_recoveries,
    read_warnings,
    run_settings,
    spread,
    stored_state,
    supervised,
)
from tilth.ui import format
from tilth.ui.live import LiveState, divided, picture, split_bar
from tilth.ui.signs import LATE, LIVING, living, sign_of

END = 256  # bytes before the place where reading goes on: more than the end of one line
TAIL = 1 << 18  # bytes at the end of the metrics that are read first: some hundred steps
STEPS = 20  # most steps that the breakdown of the newest events covers
RANKS = 16  # most ranks with a line of their own
LOG = 1 << 12
WARNED = 4  # newest warnings shown
IDLE = Doing()
T = TypeVar("T")
FIXED = {
    COMMUNICATION: "blue", PAUSE: "red", PROFILE: "bright_black", STAGES: "cyan", PEERS: "grey39", CONTROLLER: "grey23",
}  # fmt: skip
METER = {
    "busy": "green", "communication": "blue", "gc": "red", "profile": "bright_black", "pipeline": "cyan",
    "waiting": "grey23",
}  # fmt: skip


class RecordTail(Protocol):
    """Records of a growing file: see ``Tail.new``."""

    def new(self) -> tuple[list[dict[str, Any]], bool]: ...


class Tail:
    """The newest records of a growing file of JSON lines; an incomplete last line is read when it is complete."""

    def __init__(self, path: Path, reach: int = TAIL) -> None:
        self.path, self.reach = path, reach
        self._at, self._file, self._end = 0, -1, b""

    def new(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the records since the last call; True if the file was replaced, which voids earlier ones."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                again = found.st_ino != self._file or end_at(file, self._at) != self._end
                if again:
                    self._file, self._at = found.st_ino, max(0, found.st_size - self.reach)
                    if self._at:
                        file.seek(self._at - 1)
                        self._at += len(file.readline()) - 1  # to the start of a line
                file.seek(self._at)
                text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
                self._at += len(whole)
                self._end = end_at(file, self._at)
        except FileNotFoundError:
            return [], False
        return [record for line in whole.splitlines() if isinstance(record := parsed(line), dict)], again


def end_at(file: BinaryIO, place: int) -> bytes:
    """Return the last bytes before a place of a file. Where they are not what was read there, the file was replaced: a
    new one may have the inode of one that was removed, and be as long."""
    file.seek(max(0, place - END))
    return file.read(min(place, END))


def parsed(line: bytes) -> Any:
    """Return the value of a line of JSON; None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Look:
    """The state of a run. recent: time of the newest steps; message: last line of the log; silent: seconds since the
    last step. None: not yet."""

    run: Path
    state: Mapping[str, Any]
    progress: LiveState
    recent: Account | None
    message: str
    silent: float | None
    recoveries: Sequence[Mapping[str, Any]] = ()
    warnings: Sequence[Mapping[str, Any]] = ()
    doing: Doing = IDLE
    workers: Sequence[Mapping[str, Any]] = ()
    """Health of each rank at this moment, if they run on this machine."""

    @property
    def running(self) -> bool:
        return self.state["state"] in ("running", "restarting")

    def ettr(self, window: float = math.inf) -> float | None:
        """Return ``readers.ettr`` until now, or until the run ended."""
        ended = self.state.get("ended")
        end = datetime.fromisoformat(ended) if ended and not self.running else datetime.now(UTC)
        return ettr(self.state, self.recoveries, end, window)


class KeptFiles:
    """Values read of a run's files, until these are written or replaced."""

    def __init__(self, run: Path) -> None:
        self._run, self._text = run, str(run)
        self._known: dict[str, tuple[FileState, Any]] = {}

    def of(self, name: str, read: Callable[[Path], T]) -> T:
        """Return ``read(run)``, which reads this file, of the run or with a path of its own."""
        path = os.path.join(self._text, name)  # of Path objects it takes a tenth of a look
        settle(path)
        state, known = file_state(path), self._known.get(name)  # before it is read: it may grow meanwhile
        if known is None or known[0] != state:
            known = self._known[name] = state, read(self._run)
        found: T = known[1]
        return found


class RunWatcher:
    """Reads the state of a run repeatedly; unchanged files are not read again. DataError: not a run."""

    def __init__(self, run: Path, tail: RecordTail | None = None, *, times: bool = True) -> None:
        """tail: of its metrics, if another reader has one; times: read the newest events and workers' health."""
        self.run, self._times, self._kept = run, times, KeptFiles(run)
        self._tail = tail or Tail(run / "metrics.jsonl")
        self._kept.of("run.json", stored_state)
        self._settings = run_settings(run)
        self._progress, self._before = LiveState(self._settings), 0.0
        self._files: frozenset[str] = frozenset()
        self._recent: Account | None = None

    def look(self) -> Look:
        state = present(self.run, self._kept.of("run.json", stored_state))
        if state["state"] == "interrupted" and not state.get("ended") and supervised(state):
            state["state"] = "restarting"  # between two controllers
        records, again = self._tail.new()
        if again:
            self._progress, self._before = LiveState(self._settings), 0.0
        for record in records:
            now = float(record.get("seconds") or 0.0)
            took = now - self._before if self._before else float(record.get("time/step") or 0.0)
            self._progress.take(record, max(took, 0.0))
            self._before = now
        self._events()
        running = state["state"] == "running"
        doing = (read_progress(self.run) if running else None) or Doing()
        self._progress.see(doing)
        written = (self.run / "metrics.jsonl").stat().st_mtime if self._progress.record else None
        silent = None if written is None else max(time.time() - written, 0.0)
        message = self._kept.of("log.txt", lambda run: last_line(run / "log.txt"))
        survived, warned = self._kept.of(RECOVERIES, read_recoveries), self._kept.of(WARNINGS, read_warnings)
        workers = living(state) if self._times else ()
        return Look(self.run, state, self._progress, self._recent, message, silent, survived, warned, doing, workers)

    def _events(self) -> None:
        folder = self.run / "events"
        if not self._times:
            return
        files = frozenset(p.name for p in folder.glob("*.parquet")) if folder.is_dir() else frozenset[str]()
        if files == self._files:
            return
        self._files = files
        try:
            events, steps = recent(folder)
            if events is not None and len(steps):
                self._recent = account(events, range(max(steps.start, steps.stop - STEPS), steps.stop))
        except DataError:  # a file came or went meanwhile: the next look reads them
            self._files = frozenset()


def last_line(path: Path) -> str:
    """Return the last complete line of a log without its time; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1].partition(" ")[2] if lines else ""


def as_dict(look: Look) -> dict[str, Any]:
    """Return a look as JSON has it. Times in seconds, shares from 0 to 1."""
    p, record = look.progress, look.progress.record
    return {
        "run": str(look.run), "state": look.state["state"], "attempt": look.state.get("attempt"),
        "step": record.get("step", 0), "phase": p.phase, "phase_step": p.done, "phase_steps": p.steps,
        "seconds": p.seconds, "left": p.left, "silent": look.silent, "doing": asdict(look.doing),
        "loss": record.get("loss"), "reward": record.get("reward/mean"), "accuracy": p.latest.get(ACCURACY),
        "reward_heldout": p.latest.get(REWARD), "heldout_range": spread(p.latest, REWARD),
        "tokens_per_second": {n: record.get(f"tokens_per_second/{n}") for n in ("generate", "train")},
        "time": {k[5:]: v for k, v in record.items() if k.startswith("time/")},
        "memory": {"now": record.get("memory/rss"), "peak": record.get("memory/peak"),
                   "predicted": (look.state.get("memory") or {}).get("predicted")},
        "recent": _recent(look.recent), "recoveries": list(look.recoveries),
        "ettr": look.ettr(), "ettr_last_hour": look.ettr(HOUR),
        "workers": list(look.workers), "warnings": list(look.warnings), "storage": _storage(look),
        "message": look.message,
    }  # fmt: skip


def _storage(look: Look) -> list[dict[str, Any]]:
    """Return the trouble of the run's disks: ``core.write_queue.Trouble``."""
    return list(look.state.get("storage") or []) if look.running else []


def _recent(found: Account | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "first": int(found.steps[0]), "last": int(found.steps[-1]),
        "parts": {name: seconds / found.whole for name, seconds in found.parts.items()},
        "ranks": [{"rank": r} | found.shares(i) for i, r in enumerate(found.ranks)],
    }  # fmt: skip


def drawn(look: Look, width: int) -> RenderableType:
    """Draw the whole view for a terminal of this width."""
    width = min(width, 110)
    parts: list[RenderableType] = [_title(look)]
    if look.progress.record or look.doing.phase:
        parts.append(picture(look.progress, None, width, times=look.recent is None))
    if look.recent is not None:
        found = look.recent
        first, last = int(found.steps[0]), int(found.steps[-1])
        title = f"steps {first:,} to {last:,}" if last > first else f"step {first:,}"
        divisions = [(name, seconds / found.whole) for name, seconds in found.parts.items()]
        parts += [Text(title, "dim"), *divided(divisions, width, FIXED), Text()]
        parts += [_ranks(found, width)] if len(found.ranks) > 1 else []
    if look.workers:
        parts.append(_workers(look.workers))
    if look.recoveries:
        whole, hour, newest = look.ettr(), look.ettr(HOUR), format.survived(look.recoveries[-1])
        shares = f"{whole:.1%} of the time effective, {hour:.1%} in the last hour" if whole and hour else ""
        count = format.count(len(look.recoveries), "failure")
        parts.append(Text.assemble(("survived  ", "dim"), f"{count}, the last: {newest}; {shares}"))
        parts.append(Text("          " + first_line(look.recoveries[-1]), no_wrap=True, overflow="ellipsis"))
    for warning in look.warnings[-WARNED:]:
        line = f"{warning['kind']}: {first_line(warning)}"
        parts.append(Text.assemble(("warning   ", "yellow"), line, no_wrap=True, overflow="ellipsis"))
    for trouble in _storage(look):
        waits = f"{trouble['path']}: {trouble['reason']} since {trouble['since']}; {trouble['bytes']:,} bytes wait"
        parts.append(Text.assemble(("not written  ", "red"), waits))
    if look.message:
        parts.append(Text.assemble(("log  ", "dim"), look.message, no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def first_line(finding: Mapping[str, Any]) -> str:
    """Return the sentence of a verdict, without the stacks that may follow it."""
    return str(finding.get("evidence", "")).partition("\n")[0]


def _workers(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw a line for each rank: call and operation, signs of life, memory and cores."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for keeps in (True, False, False, False):
        grid.add_column(no_wrap=keeps)  # others are cut first
    for row in rows[:RANKS]:
        (late, doing), beat, work = sign_of(row), row.get("heartbeat_age"), row.get("progress_age")
        alive = f"alive {beat:.1f} s ago" if beat is not None else str(row["state"])
        still = f", no progress for {format.timed(work)}" if work is not None and work > LATE else ""
        used = [format.size(row["memory"])] if row.get("memory") else []
        used += [f"{row['cores']:.1f} cores"] if row.get("cores") is not None else []
        state = "" if row["state"] in LIVING else f"{row['state']}, "
        colour = "red" if late else "yellow" if still else "dim"
        cells = (doing, ""), (f"{state}{alive}{still}", colour), (", ".join(used), "")
        cut = [Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in cells]
        grid.add_row(Text(f"rank {row['rank']}", "dim"), *cut)
    if len(rows) > RANKS:
        grid.add_row(Text(f"and {len(rows) - RANKS} more", "dim"))
    return Group(grid, Text())


def _title(look: Look) -> Text:
    state = str(look.state["state"])
    colour = {"running": "cyan", "finished": "green", "failed": "red"}.get(state, "yellow")
    text = Text.assemble((look.run.name, "bold"), "  ", (state, colour), no_wrap=True, overflow="ellipsis")
    if (look.state.get("attempt") or 1) > 1:
        text.append(f"  attempt {look.state['attempt']}", "dim")
    peak, memory = look.progress.record.get("memory/peak"), look.state.get("memory") or {}
    if peak:
        predicted = f" (predicted {format.size(memory['predicted'])})" if memory.get("predicted") else ""
        text.append(f"  memory at most {format.size(peak)}{predicted}", "dim")
    usual = max(10.0, 3 * float(look.progress.record.get("time/step") or 0.0))  # seconds that a step may take
    if look.running and look.silent is not None and look.silent > usual:
        text.append(f"  no step for {format.timed(look.silent)}", "bold yellow")
    if look.state.get("error"):
        text.append(f"  {look.state['error']}", "red")
    return text


def _ranks(found: Account, width: int) -> RenderableType:
    """Draw a line for each rank: busy, communication, pauses; the rest is waiting."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    room = max(width - 70, 8)
    for i, rank in enumerate(found.ranks[:RANKS]):
        part = found.shares(i)
        text = "  ".join(f"{name} {format.part(v)}" for name, v in part.items() if v >= 0.0005)
        bar = split_bar([(part[name], colour) for name, colour in METER.items()], room)
        grid.add_row(Text(f"rank {rank}", "dim"), bar, Text(text, "dim"))
    if len(found.ranks) > RANKS:
        grid.add_row(Text(f"and {len(found.ranks) - RANKS} more", "dim"))
    return Group(grid, Text())
