"""Write events as Parquet parts, each renamed from a temporary name, so that readers never see half a file."""

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tilth.core.errors import StorageError
from tilth.core.files import atomic_write, make_folder
from tilth.trace.buffer import SIZE, EventNames, Taken

VERSION = "3"
EVENTS = pa.schema(
    [
        ("attempt", pa.int32()),
        ("rank", pa.int32()),
        ("id", pa.int64()),  # unique in (attempt, rank)
        ("parent", pa.int64()),  # id of the enclosing span of the same thread, -1 at the root
        ("depth", pa.int32()),
        ("op", pa.string()),  # one of trace.ops
        ("detail", pa.string()),  # which one of its kind, as trace.ops declares, or ""
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
        ("device_start", pa.int64()),  # of its work on a CUDA device, on the clock of start; null: not timed there
        ("device_duration", pa.int64()),  # ns
    ]
)
TEXTS = [f.name for f in EVENTS if f.type == pa.string()]
LATER = ("device_start", "device_duration")  # columns that files of version 2 do not have
Times = Mapping[int, tuple[int, int]]
PACKED = np.dtype(
    [(name, "i8") for name in ("id", "parent", "step", "seq", "start", "duration", "tokens", "squares", "bytes")]
    + [("flops", "f8")]
    + [(name, "i4") for name in ("micro_batch", "depth", "op", "detail", "where", "thread")]
)  # an event of ``trace.buffer``, with the thread in the padding at its end
assert PACKED.itemsize == SIZE
FROM = frozenset(PACKED.names or ()) - {"op", "detail", "thread"}
PART = re.compile(r"attempt-(\d+)-rank-(\d+)-(\d+)\.parquet")


class PartWriter:
    """Writes the parts of one process. StorageError names the folder or file that cannot be written."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.folder, self.rank, self.attempt = folder, rank, attempt
        # One reading of the wall clock: order and durations within the process are those of the monotonic clock.
        self.epoch = time.time_ns() - time.perf_counter_ns()
        try:
            make_folder(folder)
            for half in folder.glob(f".attempt-*-rank-{rank}-*.parquet.tmp"):  # of a killed process
                half.unlink(missing_ok=True)
            names = [PART.fullmatch(p.name) for p in folder.iterdir()]
        except OSError as error:
            raise StorageError(f"cannot write events to {folder}: {error.strerror}", key=folder.name) from error
        mine = [int(m[3]) for m in names if m and (int(m[1]), int(m[2])) == (attempt, rank)]
        self.part = max(mine, default=0)

    def without(self, taken: Taken, waiting: frozenset[int]) -> tuple[Taken, Taken]:
        """Split off the events, by id, that wait for their device times: (ready, waiting)."""
        now, later = Taken(), Taken()
        for name, packed in taken:
            rows = np.frombuffer(packed, PACKED)
            wait = np.isin(rows["id"], list(waiting))
            now += [(name, rows[~wait].tobytes())] if not wait.all() else []
            later += [(name, rows[wait].tobytes())] if wait.any() else []
        return now, later

    def write(self, taken: Taken, texts: EventNames, dropped: int, times: Times | None = None) -> Path:
        """Write packed events as one part, in order of their ends.

        times: (start, duration) on a device by span id, in ns on the events' monotonic clock.
        """
        target = self.folder / f"attempt-{self.attempt}-rank-{self.rank}-{self.part + 1:06d}.parquet"
        with atomic_write(target) as temporary:
            table = self._table(taken, texts, dropped, times or {})
            pq.write_table(table, temporary, compression="zstd", use_dictionary=TEXTS, write_statistics=["step"])
        self.part += 1
        return target

    def _table(self, taken: Taken, texts: EventNames, dropped: int, times: Times) -> pa.Table:
        rows = _rows(taken)
        columns = {name: pa.array(np.ascontiguousarray(rows[name])) for name in EVENTS.names if name in FROM}
        columns |= {
            "attempt": pa.array(np.full(len(rows), self.attempt, np.int32)),
            "rank": pa.array(np.full(len(rows), self.rank, np.int32)),
            "start": pa.array(rows["start"] + self.epoch),
            "op": _dictionary(rows["op"], texts.op),
            "detail": _dictionary(rows["detail"], texts.detail),
            "role": _dictionary(rows["where"], {code: role for code, (role, _) in texts.where.items()}),
            "place": _dictionary(rows["where"], {code: place for code, (_, place) in texts.where.items()}),
            "thread": _dictionary(rows["thread"], dict(enumerate(name for name, _ in taken))),
            **self._on_device(rows["id"], times),
        }
        about = {
            "tilth.events": VERSION, "dropped": str(dropped), "epoch": str(self.epoch),
            "host": socket.gethostname(), "pid": str(os.getpid()),
        }  # fmt: skip
        return pa.table({name: columns[name] for name in EVENTS.names}).replace_schema_metadata(about)

    def _on_device(self, ids: np.ndarray, times: Times) -> dict[str, pa.Array]:
        if not times:
            return {name: pa.nulls(len(ids), pa.int64()) for name in LATER}
        known = [times.get(span, (0, 0)) for span in ids.tolist()]
        found = np.array(known, np.int64).reshape(-1, 2) + np.array([self.epoch, 0])
        missing = ~np.isin(ids, list(times))
        return {name: pa.array(found[:, i], mask=missing) for i, name in enumerate(LATER)}


def _rows(taken: Taken) -> np.ndarray:
    """Return PACKED [n] in order of their ends."""
    words = np.concatenate([np.frombuffer(packed, np.int64).reshape(-1, SIZE // 8) for _, packed in taken])
    thread = np.repeat(np.arange(len(taken)), [len(packed) // SIZE for _, packed in taken])
    rows = words.view(PACKED)[:, 0]
    order = np.argsort(rows["start"] + rows["duration"], kind="stable")
    rows = words[order].view(PACKED)[:, 0]  # as words: numpy copies records field by field
    rows["thread"] = thread[order]
    return rows


def _dictionary(codes: np.ndarray, texts: Mapping[int, str]) -> pa.DictionaryArray:
    """Return the texts of codes (int32 [n]); a path among them may be invalid Unicode."""
    used = np.flatnonzero(np.bincount(codes))  # codes are small: no need to sort
    found = [str(texts[code]).encode("utf-8", "replace").decode() for code in used.tolist()]
    distinct = {text: i for i, text in enumerate(dict.fromkeys(found))}
    which = np.zeros(used[-1] + 1, np.int32)
    which[used] = [distinct[text] for text in found]
    return pa.DictionaryArray.from_arrays(which[codes], pa.array(list(distinct), pa.string()))
