"""Read the newest files of a trace, in milliseconds however long the run is."""

from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tilth.analysis.events import Events, from_table
from tilth.analysis.read import parts, read_events
from tilth.analysis.time_breakdown import periods
from tilth.core.errors import DataError
from tilth.trace.clock_samples import events_folder, read_rounds

DEPTH = 64
"""Most files of a rank to read. Processes write at different moments, and a step may be longer than the time between
two files: its events are then in the files before the one with its end."""


def recent(run: str | Path, least: int = 1) -> tuple[Events | None, range]:
    """Return the newest events of every rank of the newest attempt, and the steps that all of them have written.

    run: its folder, or that of its events. least: steps to read, if DEPTH files hold them. None if nothing was written
    yet; the range may be empty.
    """
    folder = events_folder(run)
    ranks = [_Files(paths) for paths in _parts(folder).values()]
    depth = 1
    while True:
        tables = [table for rank in ranks for table in rank.newest(depth)]
        if not tables:
            return None, range(0)
        table = pa.concat_tables(tables)
        attempt, since = table["attempt"][0].as_py(), pc.min(table["start"]).as_py()
        events = from_table(table, read_rounds(folder, attempt, since))
        cut = {int(rank.tables[0]["rank"][0].as_py()) for rank in ranks if rank.tables and not rank.whole}
        steps = told(events, cut)
        if len(steps) >= least or depth >= DEPTH or all(rank.ended for rank in ranks):
            return events, steps
        depth *= 2


class _Files:
    """Files of a rank, read lazily from the newest on; a truncated one, except the newest, ends them."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._at = 0
        self.tables: list[pa.Table] = []
        self.ended = False
        self.whole = False
        """True if all files are read, to the first."""

    def newest(self, depth: int) -> list[pa.Table]:
        """Return at most ``depth`` tables, the newest first."""
        while len(self.tables) < depth and not self.ended:
            path = self._paths[self._at]
            self._at += 1
            torn = False
            try:
                table = read_events(path)
                self.tables += [table] if len(table) else []
            except DataError:  # as a kill leaves the newest
                torn = self._at > 1
            self.whole = not torn and self._at == len(self._paths)
            self.ended = torn or self.whole
        return self.tables[:depth]


def dropped(run: str | Path, attempt: int | None = None) -> int:
    """Count events that did not fit in memory or on disk, over all ranks of an attempt (default: the newest)."""
    return sum(next(_dropped(paths), 0) for paths in _parts(events_folder(run), attempt).values())


def _parts(folder: Path, attempt: int | None = None) -> dict[int, list[Path]]:
    """Files of each rank of one attempt, the newest first."""
    if not folder.is_dir():
        return {}
    found = parts(folder)
    wanted = attempt if attempt is not None else max((its for its, _ in found), default=0)
    return {rank: list(files.values())[::-1] for (its, rank), files in found.items() if its == wanted}


def _dropped(paths: list[Path]) -> Iterator[int]:
    for path in paths:
        try:
            about = pq.read_metadata(path).metadata or {}
        except (pa.ArrowInvalid, OSError):
            continue
        yield int(about.get(b"dropped", b"0"))


def told(events: Events, cut: Collection[int] = ()) -> range:
    """Return the steps that every process has written: they begin before the earliest last event of a rank.

    cut: ranks whose earlier files are not among the events. A file holds the events that ended before it was written,
    so nothing is missing of what ends after the first known end of such a rank; steps that begin after it are complete.
    """
    bounds, known = periods(events)
    if not len(known):
        return range(0)
    low = max((_first_end(events, r) for r in cut), default=int(bounds[0]))
    high = min(int(events.end[events.rank == r].max()) for r in events.ranks)
    inside = known[(bounds[:-1] >= low) & (bounds[:-1] <= high)]
    return range(int(inside[0]), int(inside[-1]) + 1) if len(inside) else range(0)


def _first_end(events: Events, rank: int) -> int:
    """First end of a rank's events without device times, which may be written later than they ended."""
    mine = events.rank == rank
    prompt = mine & (events.device_start < 0)
    return int(events.end[prompt if prompt.any() else mine].min())
