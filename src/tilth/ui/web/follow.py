"""Runs of a folder, each read once for all pages, and the news of those that are watched as server-sent events."""

import asyncio
import json
import logging
import os
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tilth.config.load import flattened
from tilth.core.errors import DataError, TilthError, parsing
from tilth.data.cache import FileState, file_state
from tilth.runs.readers import present, stored_state, summarise
from tilth.ui.signs import SIGNS
from tilth.ui.top import KeptFiles, Look, RunWatcher
from tilth.ui.web.metric_table import RECENT, MetricTable, Record

EVERY = 1.0
"""Seconds between two looks at a run that a page watches; up to twice as many where they cost a core more than
``PART``."""
PART = 0.0025
"""Part of a core that the looks at a run may take."""
SLOWLY = 10.0
"""Seconds after which ages on a page are drawn anew, and the list of runs."""
FRESH = 0.4
"""Seconds in which the folder is not listed again."""
PING = 15.0
"""Seconds after which a stream without news has a comment, so that what is between server and page does not end it."""
SHARE = 30
"""Times what a summary takes until that of a running run is computed anew for a page."""
OFTEN, RARELY = 5.0, 500
"""Seconds, and times the processor time that it takes, until news have a rare part of a run that goes on again."""
WAITING = 16
"""Most news that wait for a page which does not read."""
KEPT = 160 << 20
"""Bytes of metrics in memory, besides those of the newest run; others are read again where they are asked for."""
MARKS = ("run.json", "metrics.jsonl", "recipe.toml", "log.txt")
"""Files of which a folder with any is a run, broken or not."""
WRITTEN = (*SIGNS, "recoveries.jsonl", "warnings.jsonl", "updates", "")
"""Files of a run that its summary depends on; the folder itself changes where a link is made in it."""
FOLDERS = ("", "trajectories", "events", "model", "updates")
"""Folders of a run that a page reads."""


class UnknownRun(DataError):
    """No run of this name is in the folder."""


class FollowedRun:
    """Contents of one run, for all pages that show it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = MetricTable(path / "metrics.jsonl")  # replaced, not changed: pages read it without the lock
        self.lock = threading.RLock()
        self.behind = False
        """True if the summary that was returned last is older than what is written."""
        self._kept = KeptFiles(path)
        self._seen: FileState | None = None
        self._watch: RunWatcher | None = None
        self._new: list[Record] = []
        self._again = False
        self._summary: tuple[Any, Record, float] = (None, {}, 0.0)

    def refresh(self) -> MetricTable:
        """Read the new lines of its metrics, if there are some; return the table, which stays as it is."""
        with self.lock:
            if (state := file_state(self.table.path)) == self._seen:
                return self.table
            table = self.table.copy()
            new, again = table.new()
            self.table = table
            self._seen, self._again = state, self._again or again
            if self._watch is not None:
                self._new = new if again else [*self._new, *new][-RECENT:]
            return table

    def new(self) -> tuple[list[Record], bool]:
        """Return the records that the watcher has not had; see ``Tail.new``."""
        self.refresh()
        found, self._new, again, self._again = self._new, [], self._again, False
        return found, again

    def state(self) -> Record:
        """Return ``read_state``. DataError: not a run."""
        return present(self.path, self._kept.of("run.json", stored_state))

    def recipe(self) -> Record:
        """Return its recipe by dotted keys. DataError: it cannot be read."""
        return self._kept.of("recipe.toml", _recipe)

    def look(self) -> Look:
        """Return its state now. DataError: not a run."""
        with self.lock:
            if self._watch is None:
                table = self.refresh()
                self._watch = RunWatcher(self.path, self, times=False)
                self._new = [table.record(row) for row in range(max(len(table) - RECENT, 0), len(table))]
            return self._watch.look()

    def summary(self) -> Record:
        """Return ``summarise``, computed anew where something was written. DataError: not a run."""
        with self.lock:
            self.refresh()
            mark, found, due = self._summary
            now, state = time.monotonic(), self.state()["state"]
            new = (self.table.version, state, written(self.path))
            soon = state == "running" and now < due
            self.behind = soon and new != mark
            if mark is None or (not soon and (new != mark or state == "running")):
                found = summarise(self.path, self.table.steps())
                self._summary = new, found, time.monotonic() + SHARE * (time.monotonic() - now)
            return found

    def forget(self) -> None:
        """Release the metrics, unless they are in use; they are read again where they are asked for."""
        if self.lock.acquire(blocking=False):  # all other runs would wait for one that is read
            try:
                self.table, self._watch = MetricTable(self.path / "metrics.jsonl"), None
                self._seen, self._new = None, []
            finally:
                self.lock.release()


def written(run: Path) -> tuple[FileState, ...]:
    """Return the states of ``WRITTEN``, in that order."""
    return tuple(file_state(f"{run}/{name}") for name in WRITTEN)


def _recipe(run: Path) -> Record:
    try:
        return flattened(tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{run.name}/recipe.toml cannot be read: {error}", key="recipe.toml") from error


class RunsFolder:
    """The runs of a folder by their names. Nothing outside of it is read: a run with a link that leads out is none."""

    def __init__(self, root: Path) -> None:
        """DataError: there is no such folder."""
        if not root.is_dir():
            raise DataError(f"no folder {str(root)!r}; the default of run.dir is runs/", key="RUNS_DIR")
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._runs: dict[str, FollowedRun] = {}
        self._links: dict[str, tuple[FileState, list[Path]]] = {}
        self._listed: tuple[float, int, dict[str, Path]] = (0.0, 0, {})

    def paths(self) -> Mapping[str, Path]:
        """Return its runs by name, broken ones among them; a run's own folder has that run alone."""
        if (self.root / "run.json").is_file():
            return {self.root.name: self.root}
        changed, (seen, mark, known) = self.root.stat().st_mtime_ns, self._listed
        if time.monotonic() - seen > FRESH or changed != mark:
            with os.scandir(self.root) as entries:
                found = [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
            known = {name: self.root / name for name in sorted(found) if _is_run(f"{self.root}/{name}")}
            self._listed = time.monotonic(), changed, known
        return known

    def of_sweep(self, sweep: str) -> list[str]:
        """Return the names of the runs of a sweep."""
        found = []
        for name in self.paths():
            with suppress(TilthError):  # a broken folder
                if self.get(name).state().get("sweep") == sweep:
                    found.append(name)
        return found

    def get(self, name: str) -> FollowedRun:
        """Return a run. UnknownRun; DataError if a link in it leads out of the folder."""
        path = self._listed[2].get(name)
        if path is None or path.is_symlink() or not _is_run(path):  # else the other runs need not be looked at
            path = self.paths().get(name)
        if path is None:
            raise UnknownRun(f"there is no run {name[:80]!r} in {self.root.name}", key="run")
        if away := self._leads_out(path):
            raise DataError(f"{name}: {away} is a link that leads out of {self.root.name}", key="run.link")
        with self._lock:
            run = self._runs.pop(name, None) or FollowedRun(path)
            self._runs[name] = run  # the newest is the last
            whole = 0
            for other in reversed(self._runs.values()):
                whole += other.table.nbytes
                if whole > KEPT and other is not run:
                    other.forget()
        return run

    def _leads_out(self, run: Path) -> str:
        """Return the first link below a run that leads out of the folder; "": there is none."""
        for folder in (f"{run}/{name}" for name in FOLDERS):
            state, known = file_state(folder), self._links.get(folder)
            if known is None or known[0] != state:
                links = [Path(e.path) for e in os.scandir(folder) if e.is_symlink()] if os.path.isdir(folder) else []
                known = self._links[folder] = state, links
            for link in known[1]:  # where one leads may change without a change of its folder
                if not link.resolve().is_relative_to(self.root):
                    return link.name
        return ""


def _is_run(folder: str | Path) -> bool:
    return any(os.path.exists(f"{folder}/{mark}") for mark in MARKS)


def _points(table: MetricTable, version: tuple[int, int, int], since: int) -> list[Record] | None:
    """Return the steps that were added to a version whose last step is ``since``, which pages draw without asking
    again; None if they are many, or if earlier steps were replaced or dropped, so that pages have to draw all."""
    if (table.version[0], table.version[2]) != (version[0], version[2]):
        return None
    rows = np.flatnonzero(table.column("step") > since) if len(table) else np.zeros(0, np.int64)
    return [table.record(int(row)) for row in rows] if len(rows) <= RECENT else None


class News:
    """Server-sent events about runs: one reader for each that is watched, whatever the number of pages."""

    def __init__(
        self, runs: RunsFolder, head: Callable[[str, Look], str], rare: Mapping[str, Callable[[FollowedRun], str]]
    ) -> None:
        """head, rare: return parts of a run's page, of which the others are made now and then, by their ids."""
        self._runs, self._head, self._rare = runs, head, rare
        self._pages: dict[str, set[asyncio.Queue[bytes | None]]] = {}
        """Name -> news that each of its pages has not been sent yet; None ends its stream."""
        self._ended = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._parts: dict[str, tuple[dict[str, float], Record]] = {}
        """Name -> when each rare part is due, and the newest parts of the page."""

    async def of(self, name: str) -> AsyncIterator[bytes]:
        """Yield the news of a run, or of the folder (""), as server-sent events."""
        if self._ended:
            return
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING + 1)
        pages = self._pages.setdefault(name, set())
        if pages and name in self._parts:  # what others were sent while this page was hidden
            queue.put_nowait(_event({"parts": self._parts[name][1]}))
        pages.add(queue)
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(self._read(name))
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._pages[name].discard(queue)
            if not self._pages[name]:
                self._tasks.pop(name).cancel()
                del self._pages[name]
                self._parts.pop(name, None)

    def end(self) -> None:
        """End all streams, and those that begin from now on: one that is only cut off is an error of the page."""
        self._ended = True
        for name in self._pages:
            self._end_pages(name)

    def _end_pages(self, name: str) -> None:
        for queue in self._pages[name]:
            if not queue.full():  # there is room for one end
                queue.put_nowait(None)

    async def _read(self, name: str) -> None:
        try:
            await self._follow(name)
        except Exception:  # whatever it is: pages would wait for news that never come; now they ask again
            logging.getLogger("uvicorn.error").exception("the news of run %r end", name)
            self._end_pages(name)

    async def _follow(self, name: str) -> None:
        before: Any = None
        sent = time.monotonic()
        while True:
            mark, event, took = await asyncio.to_thread(self._timed_look, name, before)
            if mark == before:
                event = b": ping\n\n" if time.monotonic() - sent > PING else b""
            for queue in self._pages[name] if event else ():
                sent = time.monotonic()
                if queue.qsize() < WAITING:  # a page that does not read misses what it would read again anyway
                    queue.put_nowait(event)
            before = mark
            await asyncio.sleep(min(max(EVERY, took / PART), 2 * EVERY))

    def _timed_look(self, name: str, before: Any) -> tuple[Any, bytes, float]:
        """Return ``_look`` and the processor seconds that it took."""
        began = time.thread_time()
        return *self._look(name, before), time.thread_time() - began

    def _look(self, name: str, before: Any) -> tuple[Any, bytes]:
        """Return what changes with the news, and the news."""
        if not name:
            return [time.time() // SLOWLY, *self._runs.paths()], _event({})
        try:
            with parsing(name):
                return self._news(name, before)
        except (TilthError, OSError) as error:
            self._parts.pop(name, None)
            return str(error), _event({"gone": str(error)})

    def _news(self, name: str, before: Any) -> tuple[Any, bytes]:
        run = self._runs.get(name)
        with run.lock:
            look, table = run.look(), run.table
        state = look.state
        since = None if look.silent is None or not look.running else look.silent // SLOWLY
        mark = (
            table.version,
            look.doing,
            since,
            state["state"],
            len(look.recoveries),
            len(look.warnings),
            look.message,
        )
        if isinstance(before, tuple) and mark == before[:-1]:
            return before, b""
        last = int(table.column("step")[-1]) if len(table) else 0
        follows = isinstance(before, tuple)
        parts = self._changed(run, look, rested=follows and before[3] == state["state"])
        news = {"step": last, "state": state["state"], "parts": parts, "version": list(table.version)}
        news["metrics"] = len(table.names)  # a new one has a chart
        if follows:
            news |= {"before": list(before[0]), "points": _points(table, before[0], before[-1])}
        return (*mark, last), _event(news)

    def _changed(self, run: FollowedRun, look: Look, *, rested: bool) -> Record:
        """Return the parts of a page that are new, by their ids. rested: the run goes on as before, so that rare parts
        may wait."""
        name = run.path.name
        dues, known = self._parts.get(name, ({}, {}))
        parts = {"head": self._head(name, look)}
        for part, made in self._rare.items():
            if not rested or time.monotonic() >= dues.get(part, 0.0):
                began = time.thread_time()
                parts[part] = made(run)
                dues = {**dues, part: time.monotonic() + max(OFTEN, RARELY * (time.thread_time() - began))}
        self._parts[name] = dues, known | parts
        return parts


def _event(news: Record) -> bytes:
    """Return news as a server-sent event, made once for all pages."""
    return f"event: news\ndata: {json.dumps(news)}\n\n".encode()
