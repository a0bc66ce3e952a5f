"""The metrics of a run as a table: a row a committed step, a column a metric, each with its unit and reduction."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tilth.core.target import written_whole
from tilth.runs.metrics import KEYS, MetricError, declaration
from tilth.runs.readers import read_metrics

_KEY_TYPES = {"phase": pa.string(), "seconds": pa.float64()}


def metrics_table(run: str | Path) -> pa.Table:
    """Columns step, attempt, phase, phase_step, phase_steps, seconds, then all metrics that some step has, as float64,
    by name; null where a step has not measured one. The metadata of a metric's field are unit, reduction, description.
    DataError: not the metrics of a run."""
    records = read_metrics(run)
    names = sorted({name for record in records for name in record} - set(KEYS))
    keys = [pa.field(key, _KEY_TYPES.get(key, pa.int64())) for key in KEYS]
    schema = pa.schema([*keys, *[pa.field(name, pa.float64(), metadata=_about(name)) for name in names]])
    return pa.Table.from_arrays([_column(records, field) for field in schema], schema=schema)


def write_metrics(run: str | Path, path: Path) -> Path:
    """The table as a Parquet file, as a whole or not at all. StorageError if it cannot be written."""
    table = metrics_table(run)
    with written_whole(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return path


def _column(records: Sequence[dict[str, Any]], field: pa.Field) -> pa.Array:
    values = [record.get(field.name) for record in records]
    if pa.types.is_floating(field.type):
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, field.type)


def _about(name: str) -> dict[str, str]:
    try:
        metric = declaration(name)
    except MetricError:  # of another version of Tilth: its numbers are there all the same
        return {}
    return {"unit": metric.unit, "reduction": metric.reduction, "description": metric.description}
