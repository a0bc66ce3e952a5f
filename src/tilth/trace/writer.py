"""Events to Parquet parts: written under a temporary name, then renamed, so that a reader never meets half a file."""

import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tilth.core.errors import StorageError

VERSION = "2"
EVENTS = pa.schema(
    [
        ("attempt", pa.int32()),
        ("rank", pa.int32()),
        ("id", pa.int64()),  # unique in (attempt, rank)
        ("parent", pa.int64()),  # id of the enclosing span of the same thread, -1 at the root
        ("depth", pa.int32()),
        ("op", pa.string()),  # one of trace.ops
        ("detail", pa.string()),  # which one of its kind, as trace.ops declares: "" where nothing is to be said
        ("seq", pa.int64()),  # its number among those, -1: none
        ("role", pa.string()),  # "" outside of every role's calls
        ("place", pa.string()),  # coordinates in the role's mesh, "dp=0 fsdp=1 tp=0"
        ("step", pa.int64()),  # -1: none
        ("micro_batch", pa.int32()),  # -1: none
        ("start", pa.int64()),  # ns since the Unix epoch, on the process's monotonic clock
        ("duration", pa.int64()),  # ns
        ("tokens", pa.int64()),
        ("squares", pa.int64()),  # sum of squared lengths of the sequences
        ("bytes", pa.int64()),
        ("flops", pa.float64()),
        ("thread", pa.string()),
    ]
)
START = EVENTS.get_field_index("start") - EVENTS.get_field_index("id")
"""Place of the start in the tuple of an event."""
PART = re.compile(r"attempt-(\d+)-rank-(\d+)-(\d+)\.parquet")


class PartWriter:
    """Writes the parts of one process. StorageError names the folder or file that could not be written."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.folder, self.rank, self.attempt = folder, rank, attempt
        # One reading of the wall clock: within the process the order and the durations are those of the steady clock.
        self.epoch = time.time_ns() - time.perf_counter_ns()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = [PART.fullmatch(p.name) for p in folder.iterdir()]
        except OSError as error:
            raise StorageError(f"cannot write events to {folder}: {error.strerror}") from error
        mine = [int(m[3]) for m in names if m and (int(m[1]), int(m[2])) == (attempt, rank)]
        self.part = max(mine, default=0)

    def write(self, rows: Sequence[tuple], dropped: int) -> Path:
        """One part out of tuples in the order id ... thread of the schema (start on the steady clock)."""
        target = self.folder / f"attempt-{self.attempt}-rank-{self.rank}-{self.part + 1:06d}.parquet"
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            pq.write_table(self._table(rows, dropped), temporary, compression="zstd")
            os.replace(temporary, target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
        self.part += 1
        return target

    def _table(self, rows: Sequence[tuple], dropped: int) -> pa.Table:
        columns = [list(c) for c in zip(*rows)]
        columns[START] = [start + self.epoch for start in columns[START]]
        constant = [[self.attempt] * len(rows), [self.rank] * len(rows)]
        about = {
            "tilth.events": VERSION, "dropped": str(dropped), "epoch": str(self.epoch),
            "host": socket.gethostname(), "pid": str(os.getpid()),
        }  # fmt: skip
        arrays = [pa.array(c, f.type) for c, f in zip(constant + columns, EVENTS)]
        return pa.Table.from_arrays(arrays, schema=EVENTS.with_metadata(about))
