"""Runs of a folder, each read once for all pages, and the news of those that are watched as server-sent events."""

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tilth.core.errors import DataError, TilthError, parsing
from tilth.runs.readers import read_state, summarise
from tilth.ui.top import Look, RunWatcher
from tilth.ui.web.metric_table import RECENT, MetricTable, Record

EVERY = 1.0
"""Seconds between two looks at a run that a page watches."""
SLOWLY = 10.0
"""Seconds after which ages on a page are drawn anew, and the list of runs."""
FRESH = 0.4
"""Seconds in which a run is not read again."""
SHARE = 30
"""Times what a summary takes until that of a running run is computed anew."""
KEPT = 160 << 20
"""Bytes of metrics in memory, besides those of the newest run; others are read again where they are asked for."""
MARKS = ("run.json", "metrics.jsonl", "recipe.toml", "log.txt")
"""Files of which a folder with any is a run, broken or not."""
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
        self._seen = 0.0
        self._watch: RunWatcher | None = None
        self._new: list[Record] = []
        self._again = False
        self._summary: tuple[Any, Record, float] = (None, {}, 0.0)

    def refresh(self) -> MetricTable:
        """Read the new lines of its metrics, unless that was done a moment ago; return the table, which stays as it
        is."""
        with self.lock:
            if time.monotonic() - self._seen < FRESH:
                return self.table
            table = self.table.copy()
            new, again = table.new()
            self.table = table
            self._seen, self._again = time.monotonic(), self._again or again
            self._new = new if again else [*self._new, *new][-RECENT:]
            return table

    def new(self) -> tuple[list[Record], bool]:
        """Return the records that the watcher has not had; see ``Tail.new``."""
        self.refresh()
        found, self._new, again, self._again = self._new, [], self._again, False
        return found, again

    def look(self) -> Look:
        """Return its state now. DataError: not a run."""
        with self.lock:
            if self._watch is None:
                self._watch = RunWatcher(self.path, self, times=False)
            return self._watch.look()

    def summary(self) -> Record:
        """Return ``summarise``, computed anew where something was written. DataError: not a run."""
        with self.lock:
            self.refresh()
            mark, found, due = self._summary
            now, state = time.monotonic(), read_state(self.path)["state"]
            new = (self.table.version, state, _written(self.path))
            soon = state == "running" and now < due
            if mark is None or (not soon and (new != mark or state == "running")):
                found = summarise(self.path, self.table.steps())
                self._summary = new, found, time.monotonic() + SHARE * (time.monotonic() - now)
            return found

    def forget(self) -> None:
        """Release the metrics, unless they are in use; they are read again where they are asked for."""
        if self.lock.acquire(blocking=False):  # all other runs would wait for one that is read
            try:
                self.table, self._watch = MetricTable(self.path / "metrics.jsonl"), None
                self._seen, self._new = 0.0, []
            finally:
                self.lock.release()


def _written(run: Path) -> tuple[int, ...]:
    """Return when files were written that a summary depends on, besides the metrics."""
    names = ("run.json", "recoveries.jsonl", "warnings.jsonl", "updates")
    return tuple((run / name).stat().st_mtime_ns if (run / name).exists() else 0 for name in names)


class RunsFolder:
    """The runs of a folder by their names. Nothing outside of it is read: a run with a link that leads out is none."""

    def __init__(self, root: Path) -> None:
        """DataError: there is no such folder."""
        if not root.is_dir():
            raise DataError(f"no folder {str(root)!r}; the default of run.dir is runs/", key="RUNS_DIR")
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._runs: dict[str, FollowedRun] = {}
        self._links: dict[Path, tuple[int, list[Path]]] = {}
        self._listed: tuple[float, int, list[str]] = (0.0, 0, [])

    def names(self) -> list[str]:
        """Return the names of its runs, broken ones among them; of a run's own folder, its name."""
        if (self.root / "run.json").is_file():
            return [self.root.name]
        changed, (seen, mark, known) = self.root.stat().st_mtime_ns, self._listed
        if time.monotonic() - seen > FRESH or changed != mark:
            with os.scandir(self.root) as entries:
                found = [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
            known = sorted(n for n in found if any((self.root / n / mark).exists() for mark in MARKS))
            self._listed = time.monotonic(), changed, known
        return known

    def of_sweep(self, sweep: str) -> list[str]:
        """Return the names of the runs of a sweep."""
        found = []
        for name in self.names():
            with suppress(TilthError):  # a broken folder
                if read_state(self.get(name).path).get("sweep") == sweep:
                    found.append(name)
        return found

    def get(self, name: str) -> FollowedRun:
        """Return a run. UnknownRun; DataError if a link in it leads out of the folder."""
        if name not in self.names():
            raise UnknownRun(f"there is no run {name[:80]!r} in {self.root.name}", key="run")
        path = self.root if (self.root / "run.json").is_file() else self.root / name
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
        for folder in (run / name for name in FOLDERS):
            if not folder.is_dir():
                continue
            changed = folder.stat().st_mtime_ns
            known = self._links.get(folder)
            if known is None or known[0] != changed:
                with os.scandir(folder) as entries:
                    known = self._links[folder] = changed, [Path(e.path) for e in entries if e.is_symlink()]
            for link in known[1]:  # where one leads may change without a change of its folder
                if not link.resolve().is_relative_to(self.root):
                    return link.name
        return ""


def _points(table: MetricTable, version: tuple[int, int, int], since: int) -> list[Record] | None:
    """Return the steps that were added to a version whose last step is ``since``, which pages draw without asking
    again; None if they are many, or if earlier steps were replaced or dropped, so that pages have to draw all."""
    if (table.version[0], table.version[2]) != (version[0], version[2]):
        return None
    rows = np.flatnonzero(table.column("step") > since) if len(table) else np.zeros(0, np.int64)
    return [table.record(int(row)) for row in rows] if len(rows) <= RECENT else None


class News:
    """Server-sent events about runs: one reader for each that is watched, whatever the number of pages."""

    def __init__(self, runs: RunsFolder, head: Callable[[str, Look], str]) -> None:
        """head: returns the head of a run's page."""
        self._runs, self._head = runs, head
        self._pages: dict[str, set[asyncio.Queue[str]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def of(self, name: str) -> AsyncIterator[dict[str, str]]:
        """Yield the news of a run, or of the folder ("")."""
        queue: asyncio.Queue[str] = asyncio.Queue(16)
        self._pages.setdefault(name, set()).add(queue)
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(self._read(name))
        try:
            while True:
                yield {"event": "news", "data": await queue.get()}
        finally:
            self._pages[name].discard(queue)
            if not self._pages[name]:
                self._tasks.pop(name).cancel()
                del self._pages[name]

    async def _read(self, name: str) -> None:
        before: Any = None
        while True:
            mark, text = await asyncio.to_thread(self._look, name, before)
            for queue in self._pages[name] if mark != before else ():
                if not queue.full():  # a page that does not read misses what it would read again anyway
                    queue.put_nowait(text)
            before = mark
            await asyncio.sleep(EVERY)

    def _look(self, name: str, before: Any) -> tuple[Any, str]:
        """Return what changes with the news, and the news."""
        if not name:
            return [time.time() // SLOWLY, *self._runs.names()], json.dumps({})
        try:
            with parsing(name):
                return self._news(name, before)
        except (TilthError, OSError) as error:
            return str(error), json.dumps({"gone": str(error)})

    def _news(self, name: str, before: Any) -> tuple[Any, str]:
        run = self._runs.get(name)
        with run.lock:
            look, table = run.look(), run.table
        doing, state = asdict(look.doing), look.state
        since = None if look.silent is None or not look.running else look.silent // SLOWLY
        mark = (table.version, doing, since, state["state"], len(look.recoveries), len(look.warnings), look.message)
        if isinstance(before, tuple) and mark == before[:-1]:
            return before, ""
        last = int(table.column("step")[-1]) if len(table) else 0
        news = {"step": last, "state": state["state"], "head": self._head(name, look), "version": list(table.version)}
        if isinstance(before, tuple):
            news |= {"before": list(before[0]), "points": _points(table, before[0], before[-1])}
        return (*mark, last), json.dumps(news)
