"""Read foreign traces in the format of the straggler study (arXiv 2505.05713): Parquet, a row an operation.

Rows become dense arrays [operation, step, dp]: in hybrid-parallel training every data-parallel rank does the same
operations in every step, so (type, stage, sequence number) names an operation and the rest are axes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tilth.core.errors import DataError

COLUMNS = {
    "dp_rank": np.int64, "stage": np.int64, "step": np.int64, "start_ts": np.float64, "duration": np.float64,
    "seq_id": np.int64, "mc": np.int64, "mb_id": np.int64,
}  # fmt: skip
"""Columns that a trace needs besides ``optype``; ``rank`` (global) is optional."""
COMPUTE = ("forward-compute", "backward-compute", "weight-compute")
"""``weight-compute`` is the second half of a backward in zero-bubble schedules; the study has no such type."""
PIPE = ("forward-recv", "forward-send", "backward-recv", "backward-send")
DATA = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")
TAIL = ("gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad", "optimizer")
OPTYPES = (*COMPUTE, *PIPE, *DATA, *TAIL)
MOST = 1e15
"""Greatest number of a step."""
_LEAST = {"start_ts": -np.inf, "step": -np.inf, "mc": -1, "mb_id": -1}
"""Least value of a column, where it is not 0."""


@dataclass(frozen=True)
class Trace:
    """A trace by operation: n operations of one dp rank in one step, s steps, d data-parallel ranks."""

    optype: np.ndarray  # int64 [n]: index into OPTYPES
    stage: np.ndarray  # int64 [n]: pipeline stage
    seq: np.ndarray  # int64 [n]: number among the operations of its type on its worker in the step, by start
    chunk: np.ndarray  # int64 [n]: model chunk of the stage, at least 0
    micro_batch: np.ndarray  # int64 [n]: -1 where unknown (all but computes)
    start: np.ndarray  # float64 [n, s, d]: seconds since some moment of the step
    duration: np.ndarray  # float64 [n, s, d]: seconds
    steps: np.ndarray  # int64 [s]: their numbers, ascending
    ranks: np.ndarray  # int64 [stages, d]: a global rank for each worker
    dropped: list[int] = field(default_factory=list)
    """Steps left out because they lack operations that others have."""

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.ranks.shape[0]

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.ranks.shape[1]

    @property
    def seconds(self) -> np.ndarray:
        """float64 [s]: recorded time of each step, from the first start to the last end."""
        return (self.start + self.duration).max((0, 2)) - self.start.min((0, 2))

    def named(self, *names: str) -> np.ndarray:
        """bool [n]: operations of these types."""
        return np.isin(self.optype, [OPTYPES.index(name) for name in names])


def read_study(path: str | Path, meta: str | Path | None = None) -> Trace:
    """Read a Parquet file of the study's format. Steps that lack operations are left out and listed in ``dropped``.

    Raises DataError for a file that is no Parquet, lacks columns or rows, has unknown types of operations or invalid
    values, or contradicts ``meta`` (sizes of the job, ``key: value`` a line).
    """
    table = _table(Path(path))
    try:
        trace = from_table(table)
        if meta is not None:
            _check(trace, read_meta(meta), Path(meta))
    except DataError as error:
        raise DataError(f"{path}: {error}", key=error.key) from error
    return trace


def _table(path: Path) -> pa.Table:
    if path.is_dir():
        message = f"{path} is a folder; a trace in the study's format is one Parquet file"
        raise DataError(message, key=f"{path.name}.folder")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [n for n in ("optype", *COLUMNS) if n not in names]:
                message = f"{path} is no trace in the study's format: it has no column {', '.join(missing)}"
                raise DataError(message, key=f"{path.name}.{missing[0]}")
            return file.read(columns=["optype", *COLUMNS, *(["rank"] if "rank" in names else [])])
    except FileNotFoundError as error:
        raise DataError(f"no trace at {path}", key=path.name) from error
    except (pa.ArrowInvalid, OSError) as error:
        message = f"{path} is truncated or not a Parquet file: {str(error).splitlines()[0]}"
        raise DataError(message, key=f"{path.name}.format") from error


def from_table(table: pa.Table) -> Trace:
    """Return the trace in a table with the columns of the format. Raises DataError for invalid values."""
    if not len(table):
        raise DataError("the trace is empty: it has no rows", key="rows")
    rows = {name: _column(table, name, kind) for name, kind in COLUMNS.items()}
    rows["optype"] = _optypes(table)
    stages, dp, seqs = (int(rows[name].max()) + 1 for name in ("stage", "dp_rank", "seq_id"))
    _check_size(rows, len(OPTYPES) * stages * seqs)
    code = (rows["optype"] * stages + rows["stage"]) * seqs + rows["seq_id"]
    present = np.bincount(code, minlength=len(OPTYPES) * stages * seqs) > 0
    n, op = int(present.sum()), (np.cumsum(present) - 1)[code]
    steps, step = _steps(rows["step"])
    _check_size(rows, n * len(steps) * dp)
    place = (op * len(steps) + step) * dp + rows["dp_rank"]
    counts = np.bincount(place, minlength=n * len(steps) * dp).reshape(n, len(steps), dp)
    codes = np.flatnonzero(present)
    whole = _complete(counts, codes, steps, stages, seqs)
    start, duration = np.zeros((2, *counts.shape))
    start.reshape(-1)[place], duration.reshape(-1)[place] = rows["start_ts"], rows["duration"]
    chunk, micro_batch = np.zeros((2, n), np.int64)  # of an operation's first row: they are equal by the format
    chunk[op[::-1]], micro_batch[op[::-1]] = rows["mc"][::-1], rows["mb_id"][::-1]
    ranks = np.arange(stages)[:, None] * dp + np.arange(dp)
    if "rank" in table.column_names:
        ranks[rows["stage"], rows["dp_rank"]] = _column(table, "rank", np.int64)
    return Trace(
        codes // (stages * seqs), codes // seqs % stages, codes % seqs, np.maximum(chunk, 0), micro_batch,
        start[:, whole], duration[:, whole], steps[whole], ranks, steps[~whole].tolist(),
    )  # fmt: skip


def _check_size(rows: dict[str, np.ndarray], cells: int) -> None:
    """Refuse numbers that leave most cells empty: they are wrong, and would fill the memory."""
    if cells > 1000 * (len(rows["step"]) + 1000):
        sizes = ", ".join(f"{name} up to {rows[name].max()}" for name in ("stage", "dp_rank", "seq_id"))
        raise DataError(f"{len(rows['step'])} rows are far too few for {sizes}", key="rows.few")
    if len(idle := np.flatnonzero(np.bincount(rows["stage"]) == 0)):
        message = f"there is no operation on stage {idle[0]}, but on stage {rows['stage'].max()}"
        raise DataError(message, key=f"stage.{idle[0]}")


def _column(table: pa.Table, name: str, kind: type) -> np.ndarray:
    column = table[name]
    if column.null_count:
        raise DataError(f"column {name} has {column.null_count} missing values", key=f"{name}.null")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(f"column {name} holds {column.type} instead of numbers", key=f"{name}.type")
    given = column.to_numpy()
    if not np.isfinite(given).all():  # of whole numbers too: the conversion to int64 would hide it
        raise DataError(f"column {name} holds numbers that are not finite", key=f"{name}.finite")
    most, low = given[np.abs(given).argmax()], _LEAST.get(name, 0)
    if kind is np.int64 and abs(most) > MOST:
        message = f"column {name} holds {most:g}; the greatest that makes sense is {MOST:g}"
        raise DataError(message, key=f"{name}.greatest")
    values = given.astype(kind, copy=False)
    if values.min() < low:
        message = f"column {name} holds {values.min():g}; the least that makes sense is {low:g}"
        raise DataError(message, key=f"{name}.least")
    if kind is np.int64 and name != "step" and values.max() > 1_000_000:
        message = f"column {name} holds {values.max()}; the greatest that makes sense is 1000000"
        raise DataError(message, key=f"{name}.greatest")
    return values


def _optypes(table: pa.Table) -> np.ndarray:
    column = table["optype"].combine_chunks()
    if column.null_count:
        raise DataError(f"column optype has {column.null_count} missing values", key="optype.null")
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    names = column.dictionary.to_pylist()
    used = np.unique(column.indices.to_numpy())
    if unknown := [str(names[i]) for i in used if names[i] not in OPTYPES]:
        message = f"column optype holds {', '.join(unknown)}; known are {', '.join(OPTYPES)}"
        raise DataError(message, key=f"optype.{unknown[0]}")
    lookup = np.array([OPTYPES.index(name) if name in OPTYPES else -1 for name in names])
    return lookup[column.indices.to_numpy()]


def _steps(step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the steps, ascending, and the index of each row's step; without a sort where numbers lie close."""
    low, span = int(step.min()), int(step.max() - step.min()) + 1
    if span > 10_000_000:
        return np.unique(step, return_inverse=True)
    there = np.bincount(step - low, minlength=span) > 0
    return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[step - low]


def _complete(counts: np.ndarray, codes: np.ndarray, steps: np.ndarray, stages: int, seqs: int) -> np.ndarray:
    """bool [s]: steps in which every dp rank has every operation. DataError if there is none, or for two equal rows."""

    def name(at: np.intp) -> str:
        op, step, dp = np.unravel_index(at, counts.shape)
        at = codes[op]
        kind = OPTYPES[at // (stages * seqs)]
        return f"{kind} {at % seqs} on stage {at // seqs % stages}, dp rank {dp}, step {steps[step]}"

    if counts.max() > 1:
        raise DataError(f"more than one row for {name(counts.argmax())}", key="rows.twice")
    whole = np.asarray(counts.all((0, 2)))
    if not whole.any():
        raise DataError(f"no step is complete; there is no {name(counts.argmin())}", key="rows.missing")
    return whole


def read_meta(path: str | Path) -> dict[str, Any]:
    """Read the flat ``key: value`` lines of a meta file; whole numbers as int. Raises DataError with the line."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the meta file {path}: {error}", key=Path(path).name) from error
    meta: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        key, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or not key:
            message = f"{path}, line {number}: {text!r} is not of the form key: value"
            raise DataError(message, key=f"{Path(path).name}:{number}")
        meta[key] = int(value) if value.lstrip("-").isdigit() else value.strip("\"'")
    return meta


def _check(trace: Trace, meta: dict[str, Any], path: Path) -> None:
    chunks = int(trace.chunk.max()) + 1
    for key, column, size in (("dp_size", "dp_rank", trace.dp), ("pp_size", "stage", trace.stages),
                              ("vpp_size", "mc", chunks)):  # fmt: skip
        if meta.get(key, size) != size:
            message = f"{path} says {key} {meta[key]}, the column {column} of the trace says {size}"
            raise DataError(message, key=f"{path.name}.{key}")
    parts = [meta.get(key, 1) for key in ("dp_size", "pp_size", "tp_size", "dsp_size")]
    if not all(isinstance(p, int) for p in parts):
        message = f"{path}: the sizes dp, pp, tp and dsp must be whole numbers, not {parts}"
        raise DataError(message, key=f"{path.name}.sizes")
    world = int(np.prod(parts))
    if all(k in meta for k in ("world_size", "dp_size", "pp_size")) and meta["world_size"] != world:
        message = f"{path} says world_size {meta['world_size']}, the sizes of its dimensions make {world}"
        raise DataError(message, key=f"{path.name}.world_size")
