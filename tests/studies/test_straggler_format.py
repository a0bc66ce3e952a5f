"""The reader of foreign traces: what comes back, and one line for what cannot be read."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_schedules import by_type, orders, synthetic, to_table
from tilth_studies.straggler_format import COLUMNS, from_table, read_meta, read_study
from tilth_studies.whatif import TraceModel, what_if

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import DataError

USUAL = by_type(forward_compute=1.0, backward_compute=2.0, optimizer=0.5)


def example(**options):
    return synthetic(orders("1f1b", 2, 3), USUAL, dp=2, steps=3, **options)


def table(drop=None, **columns):
    made = to_table(example())
    for name, values in columns.items():
        made = made.set_column(made.column_names.index(name), name, pa.array(values))
    return made.drop_columns([drop]) if drop else made


def column(name):
    return to_table(example())[name].to_numpy(zero_copy_only=False).copy()


def test_round_trip(tmp_path):
    trace = example()
    pq.write_table(to_table(trace), tmp_path / "t.parquet")
    read = read_study(tmp_path / "t.parquet")
    rows = np.lexsort((trace.seq, trace.stage, trace.optype))
    for name in ("optype", "stage", "seq", "micro_batch", "start", "duration"):
        assert (getattr(read, name) == getattr(trace, name)[rows]).all(), name
    assert (read.stages, read.dp, read.dropped) == (2, 2, [])
    assert (read.steps == trace.steps).all() and (read.ranks == trace.ranks).all()
    assert read.seconds == pytest.approx(trace.seconds)


def test_order_of_rows_and_types_of_columns_do_not_matter():
    made = to_table(example())
    shuffled = made.take(np.random.default_rng(0).permutation(len(made)))
    narrow = shuffled.set_column(0, "dp_rank", shuffled["dp_rank"].cast(pa.int8()))
    plain = narrow.set_column(3, "optype", narrow["optype"].cast(pa.string()))
    assert plain.column_names[3] == "optype"
    assert what_if(from_table(plain)).exact == pytest.approx(what_if(from_table(made)).exact)


def test_steps_may_have_any_numbers():
    numbers = np.array([16, 10**12, 21])[column("step")]
    assert from_table(table(step=numbers)).steps.tolist() == [16, 21, 10**12]


def test_steps_that_lack_operations_are_left_out_and_told():
    made = to_table(example())
    cut = made.filter(pa.array(np.arange(len(made)) != 5))
    lacking = made["step"][5].as_py()
    read = from_table(cut)
    assert read.dropped == [lacking] and lacking not in read.steps and len(read.steps) == 2
    assert read.start.shape[1] == 2


@pytest.mark.parametrize("name", ["optype", *COLUMNS])
def test_a_missing_column_is_named(tmp_path, name):
    pq.write_table(table(drop=name), tmp_path / "t.parquet")
    with raises(DataError, f"t.parquet.{name}"):
        read_study(tmp_path / "t.parquet")


def test_all_missing_columns_are_named(tmp_path):
    pq.write_table(pa.table({"op": ["a"], "stage": [0]}), tmp_path / "t.parquet")
    with raises(DataError, "t.parquet.optype") as caught:
        read_study(tmp_path / "t.parquet")
    assert str(caught.value).endswith("optype, dp_rank, step, start_ts, duration, seq_id, mc, mb_id")


def test_a_truncated_file_an_empty_one_and_none(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(table(), path)
    path.write_bytes(path.read_bytes()[:2000])
    with raises(DataError, "t.parquet.format"):
        read_study(path)
    path.write_bytes(b"")
    with raises(DataError, "t.parquet.format"):
        read_study(path)
    with raises(DataError, "none.parquet"):
        read_study(tmp_path / "none.parquet")
    with raises(DataError, f"{tmp_path.name}.folder"):
        read_study(tmp_path)
    pq.write_table(table()[:0], path)
    with raises(DataError, "rows"):
        read_study(path)


def spoilt(name, value, at=4):
    values = column(name)
    if isinstance(value, float) and values.dtype.kind != "f":
        values = values.astype(float)
    values = values.astype(object) if value is None or isinstance(value, str) else values
    values[at] = value
    return {name: values.tolist()}


@pytest.mark.parametrize(
    "columns, key",
    [
        (spoilt("duration", -1.0), "duration.least"),
        (spoilt("duration", float("nan")), "duration.finite"),
        (spoilt("start_ts", float("inf")), "start_ts.finite"),
        (spoilt("stage", -1), "stage.least"),
        (spoilt("stage", None), "stage.null"),
        (spoilt("dp_rank", 2**30), "dp_rank.greatest"),
        (spoilt("optype", "matmul"), "optype.matmul"),
        ({"step": ["a"] * len(column("step"))}, "step.type"),
    ],
)
def test_values_that_make_no_sense(columns, key):
    with raises(DataError, key):
        from_table(table(**columns))


def test_a_row_told_twice_is_named():
    made = to_table(example())
    with raises(DataError, "rows.twice") as caught:
        from_table(pa.concat_tables([made, made[:1]]))
    assert str(caught.value).endswith("params-all-gather 0 on stage 0, dp rank 0, step 0")


def test_no_complete_step_names_what_lacks():
    made = to_table(example())
    cut = made.filter(pa.array(~((column("dp_rank") == 1) & (column("seq_id") == 2))))
    with raises(DataError, "rows.missing") as caught:
        from_table(cut)
    assert str(caught.value).endswith(" 2 on stage 0, dp rank 1, step 0")


def test_transfers_that_belong_to_no_compute():
    made = to_table(example())
    names = np.array(column("optype").tolist())
    cut = made.filter(pa.array(~((names == "forward-send") & (column("seq_id") == 2))))
    with raises(DataError, "stage.0.forward-send"):
        TraceModel(from_table(cut))


@pytest.mark.parametrize("name", ["stage", "dp_rank", "seq_id"])
def test_numbers_that_would_fill_the_memory(name):
    with raises(DataError, "rows.few") as caught:
        from_table(table(**spoilt(name, 900_000)))
    assert f"{name} up to 900000" in str(caught.value)


def test_a_stage_without_operations():
    with raises(DataError, "stage.1"):
        from_table(table(stage=(column("stage") * 2).tolist()))


def test_a_trace_in_which_no_time_passes():
    with raises(DataError, "durations"):
        what_if(from_table(table(duration=[0.0] * len(column("step")))))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 227), st.sampled_from(list(COLUMNS)), st.integers(-2, 40))
def test_one_wrong_number_is_an_error_in_one_line_or_read(at, name, value):
    try:
        made = table(**spoilt(name, float(value) if name in ("start_ts", "duration") else value, at))
        found = what_if(from_table(made))
        assert np.isfinite(found.slowdown)
    except DataError as error:
        assert "\n" not in str(error)


META = "trial_name: AR\nrun_id: 0\ndp_size: 2\npp_size: 2\ntp_size: 4\ndsp_size: 1\nvpp_size: 1\nworld_size: 16\n"


def test_meta_that_fits(tmp_path):
    pq.write_table(table(), tmp_path / "t.parquet")
    (tmp_path / "m.yaml").write_text("# sizes\n" + META)
    assert read_study(tmp_path / "t.parquet", tmp_path / "m.yaml").dp == 2
    assert read_meta(tmp_path / "m.yaml")["trial_name"] == "AR"


@pytest.mark.parametrize(
    "change, key",
    [
        (("dp_size: 2", "dp_size: 4"), "m.yaml.dp_size"),
        (("pp_size: 2", "pp_size: 8"), "m.yaml.pp_size"),
        (("vpp_size: 1", "vpp_size: 2"), "m.yaml.vpp_size"),
        (("world_size: 16", "world_size: 64"), "m.yaml.world_size"),
        (("tp_size: 4", "tp_size: four"), "m.yaml.sizes"),
        (("run_id: 0", "nonsense"), "m.yaml:2"),
    ],
)
def test_meta_that_does_not_fit(tmp_path, change, key):
    pq.write_table(table(), tmp_path / "t.parquet")
    (tmp_path / "m.yaml").write_text(META.replace(*change))
    with raises(DataError, key) as error:
        read_study(tmp_path / "t.parquet", tmp_path / "m.yaml")
    assert "\n" not in str(error.value)


def test_meta_that_is_not_there(tmp_path):
    pq.write_table(table(), tmp_path / "t.parquet")
    with raises(DataError, "none.yaml"):
        read_study(tmp_path / "t.parquet", tmp_path / "none.yaml")


@pytest.mark.parametrize("name", [*sorted(set(COLUMNS) - {"start_ts", "duration"}), "rank"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_named_in_columns_of_whole_numbers_too(name, value, recwarn):
    values = column(name).astype(float)
    values[3] = value
    with raises(DataError, f"{name}.finite"):
        from_table(table(**{name: values}))
    assert not recwarn.list


def test_a_step_that_no_integer_can_hold_is_named(recwarn):
    values = column("step").astype(float)
    values[3] = 1e300
    with raises(DataError, "step.greatest"):
        from_table(table(step=values))
    assert not recwarn.list
