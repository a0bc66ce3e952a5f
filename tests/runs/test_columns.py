"""Metrics as a table: what was committed, null where nothing was, and what each number means beside it."""

import json
import math
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.errors import raises
from tilth.cli.main import app
from tilth.core.errors import DataError, StorageError
from tilth.runs.columns import metrics_table, write_metrics
from tilth.runs.metrics import KEYS, METRICS, declaration
from tilth.runs.readers import read_metrics

NAMES = [name.replace("*", "x") for name in METRICS]


def committed(folder, records):
    lines = [
        json.dumps({"step": i, "attempt": 1, "phase": "grpo", "seconds": i / 2, **r}) for i, r in enumerate(records, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path):
    return committed(tmp_path, [{"loss": 1, "phase_step": 1}, {"loss": None, "time/update": 0.5}, {"loss": 0.25}])


def test_a_row_a_step_and_null_where_nothing_was_measured(run):
    table = metrics_table(run)
    assert table.column_names == [*KEYS, "loss", "time/update"]
    assert table.to_pydict() == {
        "step": [1, 2, 3], "attempt": [1, 1, 1], "phase": ["grpo"] * 3, "phase_step": [1, None, None],
        "phase_steps": [None] * 3, "seconds": [0.5, 1.0, 1.5],
        "loss": [1.0, None, 0.25], "time/update": [None, 0.5, None],
    }  # fmt: skip


def test_every_declared_metric_says_unit_reduction_and_meaning(tmp_path):
    table = metrics_table(committed(tmp_path, [dict.fromkeys(NAMES, 1.0)]))
    for name in NAMES:
        field, metric = table.schema.field(name), declaration(name)
        assert field.type == pa.float64()
        said = {key.decode(): value.decode() for key, value in field.metadata.items()}
        assert said == {"unit": metric.unit, "reduction": metric.reduction, "description": metric.description}


@given(
    st.lists(
        st.dictionaries(st.sampled_from(NAMES), st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))),
        max_size=6,
    )
)
def test_a_table_holds_the_very_records(tmp_path_factory, records):
    folder = committed(tmp_path_factory.mktemp("run"), records)
    path = write_metrics(folder, folder / "metrics.parquet")
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == len(records)
    for row, record in zip(rows, read_metrics(folder)):
        assert {k: v for k, v in row.items() if v is not None} == {k: v for k, v in record.items() if v is not None}


def test_of_steps_that_ran_twice_the_later_counts_and_a_torn_line_does_not(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps({"step": 2, "attempt": 2, "phase": "grpo", "seconds": 9.0, "loss": 7}) + '\n{"step": 4, "lo'
        )
    table = metrics_table(run)
    assert table["step"].to_pylist() == [1, 2, 3] and table["loss"].to_pylist() == [1.0, 7.0, 0.25]


def test_a_metric_of_another_version_is_there_without_a_meaning(tmp_path):
    table = metrics_table(committed(tmp_path, [{"speed of light": 3.0}]))
    assert table["speed of light"].to_pylist() == [3.0] and not table.schema.field("speed of light").metadata


def test_a_run_without_steps_has_a_table_without_rows(tmp_path):
    assert metrics_table(tmp_path).num_rows == 0 and metrics_table(tmp_path).column_names == list(KEYS)


def test_damaged_metrics_are_named(run):
    (run / "metrics.jsonl").write_text("{}\n")
    with raises(DataError, "metrics.jsonl.1.step"):
        metrics_table(run)


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left(run):
    with raises(StorageError, "m.parquet"):
        write_metrics(run, run / "nowhere" / "m.parquet")
    (run / "taken").mkdir()
    with raises(StorageError, "taken.type"):
        write_metrics(run, run / "taken")
    assert sorted(p.name for p in run.iterdir()) == ["metrics.jsonl", "taken"]


def test_the_command_writes_it_and_says_where(run, tmp_path):
    target = tmp_path / "m.parquet"
    result = CliRunner().invoke(app, ["show", str(run), "--parquet", str(target)])
    assert result.exit_code == 0 and result.stdout == f"{target}\n"
    assert math.isclose(pq.read_table(target)["loss"].to_pylist()[2], 0.25)
    result = CliRunner().invoke(app, ["show", str(tmp_path / "none"), "--parquet", str(target)])
    assert result.exit_code == 2 and "no run at" in result.stderr


def test_a_link_is_written_through_and_what_is_no_file_is_refused(run, tmp_path):
    (tmp_path / "link.parquet").symlink_to("target.parquet")
    write_metrics(run, tmp_path / "link.parquet")
    assert (tmp_path / "link.parquet").is_symlink() and len(pq.read_table(tmp_path / "target.parquet")) == 3
    os.mkfifo(tmp_path / "pipe")
    with raises(StorageError, "pipe.type"):
        write_metrics(run, tmp_path / "pipe")
