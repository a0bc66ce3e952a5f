"""Trajectories of a run as Parquet files, each of a range of committed steps: ``steps-000001-000025.parquet``."""

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tilth.core.errors import DataError
from tilth.core.target import make_folder, rename, writing

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
"""All columns; a writer may leave out any but ``step`` and ``id``, they are null then."""
PART_BYTES = 64_000_000
TRAJECTORIES = "trajectories"
"""Folder of a run that they are in."""
_NAME = re.compile(r"steps-(\d+)-(\d+)\.parquet")


def conform(table: pa.Table) -> pa.Table:
    """The table with exactly the columns of ``COLUMNS``; DataError names a column that is unknown or ill-typed."""
    unknown = [n for n in table.column_names if n not in COLUMNS.names]
    if unknown or not {"step", "id"} <= set(table.column_names):
        wrong = f"unknown column {unknown[0]!r}" if unknown else "no column step or id"
        raise DataError(f"table of trajectories has {wrong}; columns are {', '.join(COLUMNS.names)}")
    arrays = []
    for field in COLUMNS:
        if field.name not in table.column_names:
            arrays.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            arrays.append(table[field.name].cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"column {field.name} of trajectories: {str(error).splitlines()[0]}") from error
    return pa.Table.from_arrays(arrays, schema=COLUMNS)


class TrajectoryFiles:
    """Writes trajectories of committed steps. What was added but not committed is never written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: list[pa.Table] = []
        self._committed: list[pa.Table] = []
        with writing(folder):
            make_folder(folder)

    def add(self, table: pa.Table) -> None:
        """Rows of the step under way."""
        self._open.append(conform(table))

    def commit(self, step: int) -> None:
        """The step is committed, other rows that were added are dropped. Its rows are written now if enough of them
        wait, else by the next ``flush``."""
        added, self._open = self._open, []
        kept = [table.filter(pc.equal(table["step"], step)) for table in added]
        self._committed += [table for table in kept if len(table)]
        if sum(t.nbytes for t in self._committed) > PART_BYTES:
            self.flush()

    def flush(self) -> Path | None:
        """Write what is committed as one more file. StorageError; the rows are kept and tried again next time."""
        if not self._committed:
            return None
        path = self._write(pa.concat_tables(self._committed))
        self._committed = []
        return path

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
        """Drop all rows of later steps. A file that holds both is written anew before the old one goes."""
        self._open, self._committed = [], []
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
    """One file; DataError names it if it is torn or foreign."""
    try:
        return conform(pq.read_table(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is truncated or not a Parquet file: {str(error).splitlines()[0]}") from error


def read_trajectories(run: str | Path, step: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """Trajectories of a run's folder, of one step or of all, in order; works while the run goes on."""
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
    """The ranges of steps whose trajectories are on disk."""
    return [(first, last) for first, last, _ in _parts(Path(run) / TRAJECTORIES)]
