"""Events as columns: parents, own times, kinds and choice of steps, beside a walk over the rows."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.analysis.events import from_table, load, parse_steps
from tilth.analysis.read import read_events, self_times
from tilth.core.errors import DataError
from tilth.trace import recorder, span
from tilth.trace.writer import EVENTS


def record(folder, rank: int = 0, attempt: int = 1) -> None:
    with recorder.to(folder, rank=rank, attempt=attempt, interval=60):
        for step in (1, 2):
            with span("step", step=step), span("update", tokens=10, where=("policy", "dp=0")):
                with span("forward", micro_batch=0, squares=50):
                    pass
                with span("all_reduce", bytes=8, detail="0,1", seq=step - 1):
                    pass


def test_a_run_as_columns(tmp_path):
    record(tmp_path, rank=2)
    found = load(tmp_path)
    assert (found.attempt, found.controller, found.ranks, found.steps) == (1, 2, (2,), (1, 2))
    assert [found.op.text(i) for i in range(4)] == ["step", "update", "forward", "all_reduce"]
    assert found.parent.tolist() == [-1, 0, 1, 1, -1, 4, 5, 5]
    assert [found.kind.text(i) for i in range(4)] == ["step", "phase", "compute", "communication"]
    assert (found.role.text(2), found.place.text(3), found.detail.text(3)) == ("policy", "dp=0", "0,1")
    assert found.start[0] == 0 and (np.diff(found.start) >= 0).all()
    assert found.own[0] == found.duration[0] - found.duration[1]
    assert found.end[1] <= found.end[0]
    assert found.bytes[found.op.is_("all_reduce", "broadcast")].tolist() == [8, 8]
    assert found.seq[found.op.is_("all_reduce")].tolist() == [0, 1]


def test_one_attempt_of_several_and_some_steps(tmp_path):
    record(tmp_path, attempt=1)
    record(tmp_path, attempt=3)
    assert load(tmp_path).attempt == 3 and load(tmp_path, 1).attempt == 1
    assert len(load(tmp_path)) == 8
    second = load(tmp_path, steps=parse_steps("2"))
    assert second.steps == (2,) and second.parent.tolist() == [-1, 0, 1, 1] and second.start[0] > 0
    assert len(load(tmp_path, steps=parse_steps("1:3"))) == 8
    with raises(DataError, "attempt"):
        load(tmp_path, 2)
    with raises(DataError, "steps"):
        load(tmp_path, steps=range(7, 9))


def test_children_of_a_row_that_is_left_out_have_no_parent(tmp_path):
    record(tmp_path)
    found = load(tmp_path)
    kept = found.select(~found.op.is_("update"))
    assert kept.parent.tolist() == [-1, -1, -1, -1, -1, -1]
    assert kept.own[0] < kept.duration[0]  # what was inside stays inside


def test_nothing_yet(tmp_path):
    with raises(DataError, "events"):
        load(tmp_path)
    with raises(DataError, "events"):
        from_table(EVENTS.empty_table())


@pytest.mark.parametrize("text", ["", "a", "5:5", "7:3", "1:2:3", "-1"])
def test_steps_that_are_none(text):
    with raises(DataError, "steps"):
        parse_steps(text)


def test_steps():
    assert (parse_steps("20:40"), parse_steps(" 7 ")) == (range(20, 40), range(7, 8))


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 9), st.integers(0, 99), st.integers(0, 50)), min_size=1))
def test_parents_and_own_times_as_a_walk_over_the_rows_finds_them(rows):
    """rows: rank, parent's id, start, duration; ids count up within the rank."""
    ids = [sum(r[0] == rank for r in rows[:i]) for i, (rank, *_) in enumerate(rows)]
    columns = {f.name: pa.array([0] * len(rows), pa.int64()).cast(f.type) for f in EVENTS}
    given_columns = zip(*rows)
    for name, values in zip(("rank", "parent", "start", "duration"), given_columns):
        columns[name] = pa.array(values, pa.int64()).cast(EVENTS.field(name).type)
    columns["id"] = pa.array(ids, pa.int64())
    table = pa.table([columns[f.name] for f in EVENTS], schema=EVENTS)
    found = from_table(table)
    order = sorted(range(len(rows)), key=lambda i: (rows[i][2], i))
    for row, i in enumerate(order):
        same = [j for j in range(len(rows)) if rows[j][0] == rows[i][0] and ids[j] == rows[i][1]]
        assert found.parent[row] == (order.index(same[0]) if same else -1)
    assert found.own.tolist() == [self_times(table).tolist()[i] for i in order]
    assert found.start.tolist() == [rows[i][2] - rows[order[0]][2] for i in order]


def test_what_the_reader_gives_is_what_was_recorded(tmp_path):
    record(tmp_path)
    assert len(read_events(tmp_path)) == len(load(tmp_path))
