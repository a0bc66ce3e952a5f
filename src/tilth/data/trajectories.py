"""Trajectories of a run as Parquet files, each of a range of committed steps: ``steps-000001-000025.parquet``."""

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tilth.core.clock import utc_now
from tilth.core.errors import DataError, StorageError
from tilth.core.files import atomic_write, make_folder, writing
from tilth.core.write_queue import SLOW, Trouble, WriteQueue, settle

COLUMNS = pa.schema(
    [
        ("step", pa.int32()),
        ("id", pa.int64()),
        ("group", pa.int64()),
        ("prompt", pa.int64()),  # index in the data
        ("prompt_text", pa.string()),  # of an episode: as the policy saw it
        ("text", pa.string()),  # the completion, decoded; of an episode: what the policy chose, with special tokens
        ("answer", pa.string()),  # the right answer, where the data has one
        ("tokens", pa.list_(pa.int32())),  # of the whole episode
        ("mask", pa.list_(pa.uint8())),  # 1 where the policy chose the token
        ("segments", pa.list_(pa.struct([("role", pa.string()), ("start", pa.int32())]))),
        ("conversations", pa.list_(pa.int32())),  # first token of each; null: the episode is one
        ("prompt_length", pa.int32()),  # tokens before the first one that the policy chose
        ("length", pa.int32()),  # tokens that the policy chose
        ("reward", pa.float32()),  # null: missing
        ("parts", pa.map_(pa.string(), pa.float32())),  # named parts of the reward
        ("turn_rewards", pa.list_(pa.float32())),  # of each assistant segment; null: the environment has none
        ("finish", pa.string()),
        ("logprobs", pa.list_(pa.float32())),  # of the rollout engine; 0 on the prompt
        ("version", pa.int32()),
        ("advantages", pa.list_(pa.float32())),  # null: nothing was learned from the row
        ("trainer_logprobs", pa.list_(pa.float32())),  # before the update; null: the algorithm does not need them
    ]
)
"""All columns; a writer may leave out any but ``step`` and ``id``; missing ones are filled with null."""
PART_BYTES = 64_000_000
GROUP = 4096
"""Rows of a row group: a reader of one step reads few others."""
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
    (``rewind``) if this process dies; None: they are lost. Rows that the disk refuses wait.
    """

    def __init__(self, folder: Path, spill: Path | None = None) -> None:
        self.folder, self.spill = folder, spill
        self._open: list[pa.Table] = []
        self._committed: list[pa.Table] = []
        self._queue, self._writing, self._lock = WriteQueue(), Lock(), Lock()
        self._alone: Trouble = {}
        """Trouble that keeps committed rows out of ``spill``: only this process has them."""
        self._alone_until = 0
        if spill is not None:
            with writing(spill):
                make_folder(spill)

    def add(self, table: pa.Table) -> None:
        """Add rows of the current step."""
        self._open.append(conform(table))

    def commit(self, step: int) -> Trouble:
        """Commit a step and drop added rows of other steps; rows are written by ``flush``, or beyond PART_BYTES.

        Return what cannot be written now; ``alone`` if nobody else has these rows. StorageError if too much waits."""
        added, self._open = self._open, []
        kept = [table.filter(pc.equal(table["step"], pa.scalar(step, COLUMNS.field("step").type))) for table in added]
        new = [table for table in kept if len(table)]
        new = self._spill(step, new) if self.spill is not None and new else new
        with self._lock:
            self._committed += new
            nbytes = sum(t.nbytes for t in self._committed)
        if nbytes > PART_BYTES:
            self._queue.put(self.folder, self._write_committed, nbytes, newest=True)
        return self._alone or self._queue.status()

    def _spill(self, step: int, tables: list[pa.Table]) -> list[pa.Table]:
        """Put rows into shared memory and return them from there; without room they are in this process only."""
        assert self.spill is not None
        path = self.spill / f"step-{step:06d}.arrow"
        try:
            with atomic_write(path) as temporary, pa.ipc.new_file(str(temporary), COLUMNS) as out:
                for table in tables:
                    out.write_table(table)
        except StorageError as error:
            nbytes, cause = sum(table.nbytes for table in tables), error.__cause__
            reason = (cause.strerror if isinstance(cause, OSError) else "") or str(error)
            facts = {"path": str(self.spill), "reason": reason, "since": utc_now("seconds")}
            more = {"bytes": nbytes, "writes": 1, "slow": False, "files": [path.name], "alone": True}
            self._alone, self._alone_until = facts | more, step
            return tables
        return [pa.ipc.open_file(pa.memory_map(str(path))).read_all()]

    def flush(self, seconds: float = SLOW) -> Trouble:
        """Write committed rows as one more file; return what cannot be written within these seconds, and waits."""
        with self._lock:
            nbytes = sum(t.nbytes for t in self._committed)
        if nbytes:
            self._queue.put(self.folder, self._write_committed, nbytes, newest=True)
        return self._queue.settle(seconds)

    def close(self) -> None:
        """Write nothing any more; rows that are not written are in ``spill``."""
        self._queue.close()
        with self._writing:
            self._committed = []

    def _spilled(self) -> list[Path]:
        return sorted(self.spill.glob("step-*.arrow")) if self.spill is not None else []

    def _write_committed(self) -> None:
        """Write what is committed now, except rows that a file has already."""
        with self._writing:
            with self._lock:
                tables = list(self._committed)
            if not self.folder.parent.is_dir():  # a disk that is not mounted is not written to
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
            make_folder(self.folder)
            written = max((last for _, last, _ in _parts(self.folder)), default=0)
            new = [table for table in tables if pc.max(table["step"]).as_py() > written]
            if new:
                self._write(pa.concat_tables(new))
            with self._lock:
                del self._committed[: len(tables)]
            last = max((pc.max(table["step"]).as_py() for table in tables), default=0)
            self._alone = {} if last >= self._alone_until else self._alone
            for spilled in self._spilled():
                if _step(spilled) <= last:
                    spilled.unlink()

    def _write(self, table: pa.Table) -> Path:
        first, last = (f(table["step"]).as_py() for f in (pc.min, pc.max))
        target = self.folder / f"steps-{first:06d}-{last:06d}.parquet"
        with atomic_write(target, follow=False) as temporary:
            pq.write_table(table, temporary, compression="zstd", row_group_size=GROUP)
        return target

    def rewind(self, step: int) -> None:
        """Drop all rows of later steps; a file with earlier rows too is rewritten before it is removed."""
        with self._writing, self._lock:
            self._open, self._committed, self._alone = [], [], {}
            for spilled in self._spilled():
                if _step(spilled) > step:
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


def _step(spilled: Path) -> int:
    return int(spilled.stem.removeprefix("step-"))


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
    for first, last, path in files_of(Path(run) / TRAJECTORIES):
        if step is not None and not first <= step <= last:
            continue
        if not path.exists():  # a resume has just dropped it
            continue
        table = read_part(path)
        tables.append(
            table
            if step is None
            else table.filter(pc.equal(table["step"], pa.scalar(step, COLUMNS.field("step").type)))
        )
    whole = pa.concat_tables(tables)
    return whole.select(list(columns)) if columns else whole


def steps_of(run: str | Path) -> list[tuple[int, int]]:
    """Return the ranges of steps whose trajectories are on disk."""
    return [(first, last) for first, last, _ in files_of(Path(run) / TRAJECTORIES)]


def files_of(folder: Path) -> list[tuple[int, int, Path]]:
    """Return first step, last step and path of each file in a folder of trajectories, in order."""
    settle(folder)
    return _parts(folder)
