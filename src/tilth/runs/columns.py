"""Metrics of a run as an Arrow table: a row per committed step, a column per metric with unit and reduction."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tilth.core.files import atomic_write
from tilth.runs.metrics import KEYS, MetricError, declaration
from tilth.runs.readers import read_metrics

_KEY_TYPES = {"phase": pa.string(), "seconds": pa.float64()}


def metrics_table(run: str | Path) -> pa.Table:
    """Return a table with the columns ``KEYS`` and, sorted by name, each metric as float64; null where not measured.

    The metadata of a metric's field are unit, reduction and description. DataError if the run has no valid metrics.
    """
    records = read_metrics(run)
    names = sorted({name for record in records for name in record} - set(KEYS))
    keys = [pa.field(key, _KEY_TYPES.get(key, pa.int64())) for key in KEYS]
    schema = pa.schema([*keys, *[pa.field(name, pa.float64(), metadata=_about(name)) for name in names]])
    return pa.Table.from_arrays([_column(records, field) for field in schema], schema=schema)


def write_metrics(run: str | Path, path: Path) -> Path:
    """Write the table as a Parquet file atomically; StorageError if it cannot be written."""
    table = metrics_table(run)
    with atomic_write(path) as temporary:
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
    except MetricError:  # written by another version of Tilth
        return {}
    return {"unit": metric.unit, "reduction": metric.reduction, "description": metric.description}
