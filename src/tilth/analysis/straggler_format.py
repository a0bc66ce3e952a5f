"""Reader of foreign traces in the format of the straggler study (arXiv 2505.05713): Parquet, a row an operation.

Rows become dense arrays [operation, step, dp]: in hybrid-parallel training every data-parallel rank does the same
operations in every step, so an operation is named by (type, stage, sequence number) and all else is an axis.
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
"""Columns that a trace needs besides ``optype``; ``rank`` (global) may lack."""
COMPUTE = ("forward-compute", "backward-compute", "weight-compute")
"""``weight-compute`` is the second half of a backward in zero-bubble schedules; the study has no such type."""
PIPE = ("forward-recv", "forward-send", "backward-recv", "backward-send")
DATA = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce")
TAIL = ("gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad", "optimizer")
OPTYPES = (*COMPUTE, *PIPE, *DATA, *TAIL)
MOST = 1e15
"""Greatest number of a step."""
SIZES = {"dp_size": "dp_rank", "pp_size": "stage", "vpp_size": "mc"}
"""Keys of a meta file and the column that each must agree with."""


@dataclass(frozen=True)
class Trace:
    """What happened, by operation. n operations of one dp rank in one step, s steps, d data-parallel ranks."""

    optype: np.ndarray
    """int64 [n]: index into OPTYPES."""
    stage: np.ndarray
    """int64 [n]: pipeline stage."""
    seq: np.ndarray
    """int64 [n]: which operation of its type on its worker in the step, in order of start."""
    chunk: np.ndarray
    """int64 [n]: model chunk of the stage, at least 0."""
    micro_batch: np.ndarray
    """int64 [n]: -1 where not known (all but computes)."""
    start: np.ndarray
    """float64 [n, s, d]: seconds since some moment of the step."""
    duration: np.ndarray
    """float64 [n, s, d]: seconds."""
    steps: np.ndarray
    """int64 [s]: their numbers, ascending."""
    ranks: np.ndarray
    """int64 [stages, d]: the global rank that stands for each worker."""
    dropped: list[int] = field(default_factory=list)
    """Steps left out, for they lack operations that others have."""

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
        """bool [n]: which operations are of one of these types."""
        return np.isin(self.optype, [OPTYPES.index(name) for name in names])


def read_study(path: str | Path, meta: str | Path | None = None) -> Trace:
    """The trace in a Parquet file of the study's format. Steps that lack operations are left out and told.

    DataError in one line for a file that is no Parquet, lacks columns or rows, has types of operations that are not
    known, a value that makes no sense, or does not fit ``meta`` (sizes of the job, ``key: value`` a line).
    """
    table = _table(Path(path))
    try:
        trace = from_table(table)
        if meta is not None:
            _check(trace, read_meta(meta), Path(meta))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return trace


def _table(path: Path) -> pa.Table:
    if path.is_dir():
        raise DataError(f"{path} is a folder; a trace in the study's format is one Parquet file")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [n for n in ("optype", *COLUMNS) if n not in names]:
                raise DataError(f"{path} is no trace in the study's format: it has no column {', '.join(missing)}")
            return file.read(columns=["optype", *COLUMNS, *(["rank"] if "rank" in names else [])])
    except FileNotFoundError as error:
        raise DataError(f"no trace at {path}") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is truncated or not a Parquet file: {str(error).splitlines()[0]}") from error


def from_table(table: pa.Table) -> Trace:
    """The trace in a table with the columns of the format. DataError as in ``read_study``."""
    if not len(table):
        raise DataError("the trace is empty: it has no rows")
    rows = {name: _column(table, name, kind) for name, kind in COLUMNS.items()}
    rows["optype"] = _optypes(table)
    stages, dp, seqs = (int(rows[name].max()) + 1 for name in ("stage", "dp_rank", "seq_id"))
    _plausible(rows, len(OPTYPES) * stages * seqs)
    code = (rows["optype"] * stages + rows["stage"]) * seqs + rows["seq_id"]
    present = np.bincount(code, minlength=len(OPTYPES) * stages * seqs) > 0
    n, op = int(present.sum()), (np.cumsum(present) - 1)[code]
    steps, step = _steps(rows["step"])
    _plausible(rows, n * len(steps) * dp)
    place = (op * len(steps) + step) * dp + rows["dp_rank"]
    counts = np.bincount(place, minlength=n * len(steps) * dp).reshape(n, len(steps), dp)
    codes = np.flatnonzero(present)
    whole = _complete(counts, codes, steps, stages, seqs)
    fill = {name: _dense(place, rows[name], counts.shape)[:, whole] for name in ("start_ts", "duration")}
    chunk, micro_batch = (_per_op(op, rows[name], n) for name in ("mc", "mb_id"))
    return Trace(
        codes // (stages * seqs), codes // seqs % stages, codes % seqs, np.maximum(chunk, 0), micro_batch,
        fill["start_ts"], fill["duration"], steps[whole], _ranks(table, rows, stages, dp), steps[~whole].tolist(),
    )  # fmt: skip


def _plausible(rows: dict[str, np.ndarray], cells: int) -> None:
    """Numbers that leave most places empty are wrong, and would fill the memory."""
    if cells > 1000 * (len(rows["step"]) + 1000):
        sizes = ", ".join(f"{name} up to {rows[name].max()}" for name in ("stage", "dp_rank", "seq_id"))
        raise DataError(f"{len(rows['step'])} rows are far too few for {sizes}")
    if len(idle := np.flatnonzero(np.bincount(rows["stage"]) == 0)):
        raise DataError(f"there is no operation on stage {idle[0]}, but on stage {rows['stage'].max()}")


def _column(table: pa.Table, name: str, kind: type) -> np.ndarray:
    column = table[name]
    if column.null_count:
        raise DataError(f"column {name} has {column.null_count} missing values")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(f"column {name} holds {column.type} instead of numbers")
    given = column.to_numpy()
    if not np.isfinite(given).all():  # of whole numbers too: as int64 they would be some number
        raise DataError(f"column {name} holds numbers that are not finite")
    most = given[np.abs(given).argmax()]
    if kind is np.int64 and abs(most) > MOST:
        raise DataError(f"column {name} holds {most:g}; the greatest that makes sense is {MOST:g}")
    values = given.astype(kind, copy=False)
    low = {"duration": 0, "start_ts": -np.inf, "step": -np.inf, "mc": -1, "mb_id": -1}.get(name, 0)
    if values.min() < low:
        raise DataError(f"column {name} holds {values.min():g}; the least that makes sense is {low:g}")
    if kind is np.int64 and name != "step" and values.max() > 1_000_000:
        raise DataError(f"column {name} holds {values.max()}; the greatest that makes sense is 1000000")
    return values


def _optypes(table: pa.Table) -> np.ndarray:
    column = table["optype"].combine_chunks()
    if column.null_count:
        raise DataError(f"column optype has {column.null_count} missing values")
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    names = column.dictionary.to_pylist()
    used = np.unique(column.indices.to_numpy())
    if unknown := [str(names[i]) for i in used if names[i] not in OPTYPES]:
        raise DataError(f"column optype holds {', '.join(unknown)}; known are {', '.join(OPTYPES)}")
    lookup = np.array([OPTYPES.index(name) if name in OPTYPES else -1 for name in names])
    return lookup[column.indices.to_numpy()]


def _steps(step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the steps, ascending, and for each row which of them; without a sort where numbers lie close."""
    low, span = int(step.min()), int(step.max() - step.min()) + 1
    if span > 10_000_000:
        return np.unique(step, return_inverse=True)
    there = np.bincount(step - low, minlength=span) > 0
    return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[step - low]


def _complete(counts: np.ndarray, codes: np.ndarray, steps: np.ndarray, stages: int, seqs: int) -> np.ndarray:
    """bool [s]: the steps in which every dp rank has every operation. DataError if none has, or for one told twice."""

    def name(at: np.intp) -> str:
        op, step, dp = np.unravel_index(at, counts.shape)
        at = codes[op]
        kind = OPTYPES[at // (stages * seqs)]
        return f"{kind} {at % seqs} on stage {at // seqs % stages}, dp rank {dp}, step {steps[step]}"

    if counts.max() > 1:
        raise DataError(f"more than one row for {name(counts.argmax())}")
    whole = np.asarray(counts.all((0, 2)))
    if not whole.any():
        raise DataError(f"no step is complete; there is no {name(counts.argmin())}")
    return whole


def _dense(place: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    dense = np.zeros(shape)
    dense.reshape(-1)[place] = values
    return dense


def _per_op(op: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """One value for each operation: that of its first row (they are equal by the format)."""
    result = np.zeros(n, np.int64)
    result[op[::-1]] = values[::-1]
    return result


def _ranks(table: pa.Table, rows: dict[str, np.ndarray], stages: int, dp: int) -> np.ndarray:
    ranks = np.arange(stages)[:, None] * dp + np.arange(dp)
    if "rank" in table.column_names:
        ranks[rows["stage"], rows["dp_rank"]] = _column(table, "rank", np.int64)
    return ranks


def read_meta(path: str | Path) -> dict[str, Any]:
    """The flat ``key: value`` lines of a meta file; whole numbers as int. DataError names the line that is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the meta file {path}: {error}") from error
    meta: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        key, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or not key:
            raise DataError(f"{path}, line {number}: {text!r} is not of the form key: value")
        meta[key] = int(value) if value.lstrip("-").isdigit() else value.strip("\"'")
    return meta


def _check(trace: Trace, meta: dict[str, Any], path: Path) -> None:
    found = {"dp_size": trace.dp, "pp_size": trace.stages, "vpp_size": int(trace.chunk.max()) + 1}
    for key, size in found.items():
        if meta.get(key, size) != size:
            raise DataError(f"{path} says {key} {meta[key]}, the column {SIZES[key]} of the trace says {size}")
    parts = [meta.get(key, 1) for key in ("dp_size", "pp_size", "tp_size", "dsp_size")]
    if not all(isinstance(p, int) for p in parts):
        raise DataError(f"{path}: the sizes dp, pp, tp and dsp must be whole numbers, not {parts}")
    world = int(np.prod(parts))
    if all(k in meta for k in ("world_size", "dp_size", "pp_size")) and meta["world_size"] != world:
        raise DataError(f"{path} says world_size {meta['world_size']}, the sizes of its dimensions make {world}")
