"""What the newest files of a trace say: read in milliseconds however long the run is."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tilth.core.errors import DataError
from tilth.trace.account import periods
from tilth.trace.events import Events, from_table
from tilth.trace.read import read_events
from tilth.trace.rounds import events_folder, read_rounds
from tilth.trace.writer import PART

DEPTH = 3
"""Most files of a rank that are read: processes do not write at the same moment, so the newest alone share no step."""


def recent(run: str | Path) -> tuple[Events | None, range]:
    """The newest events of every rank of the newest attempt, and the steps that all of them tell as a whole.

    run: its folder, or that of its events. None where nothing was written yet; the range may be empty.
    """
    folder = events_folder(run)
    ranks = [list(_readable(paths)) for paths in _parts(folder).values()]
    for depth in range(1, DEPTH + 1):
        tables = [pa.concat_tables(tables[:depth]) for tables in ranks if tables]
        if not tables:
            return None, range(0)
        table = pa.concat_tables(tables)
        events = from_table(table, read_rounds(folder, int(table["attempt"][0].as_py())))
        steps = told(events)
        if len(steps) or all(len(tables) <= depth for tables in ranks):
            return events, steps
    return events, steps


def dropped(run: str | Path, attempt: int | None = None) -> int:
    """Events that did not fit in memory or on disk, over all ranks of an attempt (default: the newest)."""
    return sum(next(_dropped(paths), 0) for paths in _parts(events_folder(run), attempt).values())


def _parts(folder: Path, attempt: int | None = None) -> dict[int, list[Path]]:
    """Files of each rank of one attempt, the newest first."""
    if not folder.is_dir():
        return {}
    found = sorted((tuple(map(int, m.groups())), p) for p in folder.iterdir() if (m := PART.fullmatch(p.name)))
    wanted = attempt if attempt is not None else max((key[0] for key, _ in found), default=0)
    ranks: dict[int, list[Path]] = {}
    for key, path in reversed(found):
        if key[0] == wanted:
            ranks.setdefault(key[1], []).append(path)
    return dict(sorted(ranks.items()))


def _readable(paths: list[Path]) -> Iterator[pa.Table]:
    """Tables of a rank's newest files; one that is torn, as a kill leaves it, ends them."""
    for path in paths[:DEPTH]:
        try:
            yield read_events(path)
        except DataError:
            continue


def _dropped(paths: list[Path]) -> Iterator[int]:
    for path in paths:
        try:
            about = pq.read_metadata(path).metadata or {}
        except (pa.ArrowInvalid, OSError):
            continue
        yield int(about.get(b"dropped", b"0"))


def told(events: Events) -> range:
    """The steps that begin between the latest first and the earliest last event of a rank.

    Of a run that goes on these are the ones of which every process has written its part.
    """
    bounds, known = periods(events)
    if not len(known):
        return range(0)
    low = max(int(events.start[events.rank == r].min()) for r in events.ranks)
    high = min(int(events.end[events.rank == r].max()) for r in events.ranks)
    inside = known[(bounds[:-1] >= low) & (bounds[:-1] <= high)]
    return range(int(inside[0]), int(inside[-1]) + 1) if len(inside) else range(0)
