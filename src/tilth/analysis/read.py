"""Read the event table: all parts of a run as one table, and the time by operation."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tilth.core.errors import DataError
from tilth.trace.clock_samples import events_folder
from tilth.trace.writer import EVENTS, LATER, PART, TEXTS


@dataclass(frozen=True, slots=True)
class OpTime:
    """Time of one operation over all of its spans in a table."""

    op: str
    count: int
    seconds: float  # with the spans inside
    self_seconds: float  # without the spans inside
    share: float  # own time over that of all operations, 0 to 1
    longest: float  # seconds of the longest span
    tokens: int
    bytes: int
    flops: float


COLUMNS = pa.schema([(f.name, pa.dictionary(pa.int32(), f.type) if f.type == pa.string() else f.type) for f in EVENTS])
"""``writer.EVENTS`` with dictionaries for texts."""


def read_events(path: str | Path, attempt: int | None = None) -> pa.Table:
    """Read the events of a file, or of all parts in a folder (or of a run's folder), as one table of ``COLUMNS``.

    attempt: read only its files. A row takes 116 bytes.
    A run in progress and an empty folder are fine. A truncated part is left out if it is the last of its process (which
    was killed while it wrote); any other one, and a foreign file, is a DataError.
    """
    path = Path(path)
    if not path.is_dir():
        return _read_part(path)
    tables = list[pa.Table | None]()
    for (its, _), files in parts(events_folder(path)).items():
        if attempt is None or its == attempt:
            *earlier, last = files.values()
            tables += [*map(_read_part, earlier), _read_last(last)]
    return pa.concat_tables([COLUMNS.empty_table(), *[t for t in tables if t is not None]]).unify_dictionaries()


def attempts(path: str | Path) -> list[int]:
    """Return the attempts that have files in a folder (or a run's folder), or events in a file, ascending."""
    path = Path(path)
    if not path.is_dir():
        return sorted(_read_part(path)["attempt"].unique().to_pylist())
    return sorted({its for its, _ in parts(events_folder(path))})


def parts(folder: Path) -> dict[tuple[int, int], dict[int, Path]]:
    """Return (attempt, rank) -> number -> file, in this order: the parts that processes wrote to a folder."""
    found = sorted((tuple(map(int, m.groups())), p) for p in folder.iterdir() if (m := PART.fullmatch(p.name)))
    processes: dict[tuple[int, int], dict[int, Path]] = {}
    for (attempt, rank, number), path in found:
        processes.setdefault((attempt, rank), {})[number] = path
    return processes


def _read_last(path: Path) -> pa.Table | None:
    try:
        pq.read_metadata(path)
    except (pa.ArrowInvalid, FileNotFoundError):
        return None
    return _read_part(path)


def _read_part(path: Path) -> pa.Table:
    try:
        there = pq.read_schema(path).names
        if missing := [n for n in EVENTS.names if n not in (*there, *LATER)]:
            message = f"{path} is not an event file of Tilth: it has no column {', '.join(missing)}"
            raise DataError(message, key=f"{path.name}.{missing[0]}")
        with pq.ParquetFile(path, read_dictionary=TEXTS) as file:
            table = file.read(columns=[n for n in EVENTS.names if n in there])
        for name in (n for n in LATER if n not in there):
            table = table.append_column(name, pa.nulls(len(table), EVENTS.field(name).type))
        return table.select(EVENTS.names).cast(COLUMNS)
    except FileNotFoundError as error:
        raise DataError(f"no event file or folder at {path}", key=path.name) from error
    except (pa.ArrowInvalid, OSError) as error:
        message = f"{path} is truncated or not a Parquet file: {str(error).splitlines()[0]}"
        raise DataError(message, key=f"{path.name}.format") from error


def self_times(table: pa.Table) -> np.ndarray:
    """int64 [n]: for each event its duration less those of the spans directly inside, in ns.

    Children of a parent that is not in the table (its process was killed inside it) are roots.
    """
    process = _key(table, "attempt") << 14 | _key(table, "rank")
    return own_times(parents(process, _key(table, "id"), _key(table, "parent")), _key(table, "duration"))


def parents(process: np.ndarray, ids: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """int64 [n]: rows of the parents, -1 where there is none. Ids are unique in a process.

    process, ids, parent: int64 [n]; at most 2,048 attempts of 16,384 ranks as the process, and 2e11 spans of each.
    """
    key, wanted = process << 38 | ids, process << 38 | np.maximum(parent, 0)
    order = np.argsort(key, kind="stable")
    key = key[order]
    place = np.searchsorted(key, wanted).clip(max=len(key) - 1)
    return np.where((parent >= 0) & (key[place] == wanted), order[place], -1)


def own_times(parent: np.ndarray, duration: np.ndarray) -> np.ndarray:
    """int64 [n]: durations less those of the spans directly inside, in ns. parent: rows, -1 at a root."""
    return duration - np.bincount(parent + 1, duration, len(parent) + 1)[1:].astype(np.int64)


def breakdown(table: pa.Table) -> list[OpTime]:
    """Return one row for each operation, the greatest own time first; seconds summed over ranks and threads."""
    table = table.append_column("own", pa.array(self_times(table)))
    sums = [(name, "sum") for name in ("duration", "own", "tokens", "bytes", "flops")]
    grouped = table.group_by("op").aggregate([("id", "count"), ("duration", "max"), *sums])
    everything = max(pc.sum(table["own"]).as_py() or 0, 1)
    rows = [
        OpTime(
            r["op"], r["id_count"], r["duration_sum"] * 1e-9, r["own_sum"] * 1e-9, r["own_sum"] / everything,
            r["duration_max"] * 1e-9, r["tokens_sum"], r["bytes_sum"], r["flops_sum"],
        )
        for r in grouped.to_pylist()
    ]  # fmt: skip
    return sorted(rows, key=lambda r: (-r.self_seconds, r.op))


def _key(table: pa.Table, column: str) -> np.ndarray:
    return table[column].to_numpy().astype(np.int64, copy=False)
