"""Trajectories of a run as Parquet files, each of a range of committed steps: ``steps-000001-000025.parquet``."""

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tilth.core.errors import DataError
from tilth.core.files import atomic_write, make_folder, rename, writing

COLUMNS = pa.schema(
    [
        ("step", pa.int32()),
        ("id", pa.int64()),
        ("group", pa.int64()),
        ("prompt", pa.int64()),  # index in the data
        ("prompt_text", pa.string()),
        ("text", pa.string()),  # the completion, decoded
        ("answer", pa.string()),  # the right answer, where the data has one
        ("tokens", pa.list_(pa.int32())),  # of the whole episode
        ("mask", pa.list_(pa.uint8())),  # 1 where the policy chose the token
        ("segments", pa.list_(pa.struct([("role", pa.string()), ("start", pa.int32())]))),
        ("prompt_length", pa.int32()),  # tokens before the first one that the policy chose
        ("reward", pa.float32()),  # null: missing
        ("parts", pa.map_(pa.string(), pa.float32())),  # named parts of the reward
        ("finish", pa.string()),
        ("logprobs", pa.list_(pa.float32())),  # of the rollout engine; 0 on the prompt
        ("version", pa.int32()),
    ]
)
"""All columns; a writer may leave out any but ``step`` and ``id``; missing ones are filled with null."""
PART_BYTES = 64_000_000
TRAJECTORIES = "trajectories"
"""Folder of a run with its trajectories."""
_NAME = re.compile(r"steps-(\d+)-(\d+)\.parquet")


def conform(table: pa.Table) -> pa.Table:
    """Return the table with exactly the columns of ``COLUMNS``; ``DataError`` for an unknown or ill-typed column."""
    unknown = [n for n in table.column_names if n not in COLUMNS.names]
    absent = [n for n in ("step", "id") if n not in table.column_names]
    if unknown or absent:
        problem = f"unknown column {unknown[0]!r}" if unknown else "no column step or id"
        message = f"table of trajectories has {problem}; columns are {', '.join(COLUMNS.names)}"
        raise DataError(message, key=f"trajectories.{(unknown or absent)[0]}")
    arrays = []
    for field in COLUMNS:
        if field.name not in table.column_names:
            arrays.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            arrays.append(table[field.name].cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            message = f"column {field.name} of trajectories: {str(error).splitlines()[0]}"
            raise DataError(message, key=f"trajectories.{field.name}.type") from error
    return pa.Table.from_arrays(arrays, schema=COLUMNS)


class TrajectoryFiles:
    """Write trajectories of committed steps; rows that were added but not committed are never written.

    spill: folder in shared memory for committed rows that are in no file yet, so that the next writer has them
    (``rewind``) if this process dies; None: they are lost.
    """

    def __init__(self, folder: Path, spill: Path | None = None) -> None:
        self.folder, self.spill = folder, spill
        self._open: list[pa.Table] = []
        self._committed: list[pa.Table] = []
        for needed in (folder, spill):
            if needed is not None:
                with writing(needed):
                    make_folder(needed)

    def add(self, table: pa.Table) -> None:
        """Add rows of the current step."""
        self._open.append(conform(table))

    def commit(self, step: int) -> None:
        """Commit a step and drop added rows of other steps; rows are written by ``flush``, or beyond PART_BYTES."""
        added, self._open = self._open, []
        kept = [table.filter(pc.equal(table["step"], step)) for table in added]
        new = [table for table in kept if len(table)]
        self._committed += new
        if self.spill is not None and new:
            path = self.spill / f"step-{step:06d}.arrow"
            with atomic_write(path) as temporary, pa.ipc.new_file(str(temporary), COLUMNS) as out:
                for table in new:
                    out.write_table(table)
        if sum(t.nbytes for t in self._committed) > PART_BYTES:
            self.flush()

    def flush(self) -> Path | None:
        """Write committed rows as one more file; on StorageError the rows stay for the next call."""
        if not self._committed:
            return None
        path = self._write(pa.concat_tables(self._committed))
        self._committed = []
        for spilled in self._spilled():
            spilled.unlink()
        return path

    def _spilled(self) -> list[Path]:
        return sorted(self.spill.glob("step-*.arrow")) if self.spill is not None else []

    def _write(self, table: pa.Table) -> Path:
        first, last = (f(table["step"]).as_py() for f in (pc.min, pc.max))
        target = self.folder / f"steps-{first:06d}-{last:06d}.parquet"
        temporary = target.with_name(f".{target.name}.tmp")
        with writing(target):
            try:
                pq.write_table(table, temporary, compression="zstd")
                rename(temporary, target)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
        return target

    def rewind(self, step: int) -> None:
        """Drop all rows of later steps; a file with earlier rows too is rewritten before it is removed."""
        self._open, self._committed = [], []
        written = max((last for _, last, _ in _parts(self.folder)), default=0)
        for spilled in self._spilled():
            if not written < int(spilled.stem.removeprefix("step-")) <= step:
                spilled.unlink()
            else:
                self._committed.append(pa.ipc.open_file(pa.memory_map(str(spilled))).read_all())
        for first, last, path in _parts(self.folder):
            if last <= step:
                continue
            if first <= step:
                table = read_part(path)
                self._write(table.filter(pc.less_equal(table["step"], step)))
            with writing(path):
                path.unlink()


def _parts(folder: Path) -> list[tuple[int, int, Path]]:
    if not folder.is_dir():
        return []
    found = [(m, p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
    return sorted((int(m[1]), int(m[2]), p) for m, p in found)


def read_part(path: Path) -> pa.Table:
    """Read one file; ``DataError`` names it if it is truncated or foreign."""
    try:
        return conform(pq.read_table(path))
    except (pa.ArrowInvalid, OSError) as error:
        message = f"{path} is truncated or not a Parquet file: {str(error).splitlines()[0]}"
        raise DataError(message, key=path.name) from error


def read_trajectories(run: str | Path, step: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the trajectories of a run's folder, of one step or of all, in order; also while the run writes."""
    tables = [COLUMNS.empty_table()]
    for first, last, path in _parts(Path(run) / TRAJECTORIES):
        if step is not None and not first <= step <= last:
            continue
        if not path.exists():  # a resume has just dropped it
            continue
        table = read_part(path)
        tables.append(table if step is None else table.filter(pc.equal(table["step"], step)))
    whole = pa.concat_tables(tables)
    return whole.select(list(columns)) if columns else whole


def steps_of(run: str | Path) -> list[tuple[int, int]]:
    """Return the ranges of steps whose trajectories are on disk."""
    return [(first, last) for first, last, _ in _parts(Path(run) / TRAJECTORIES)]
