"""Batches: selections and concatenations against plain lists, and no read of payload."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core.batch import Batch, Column, Handle, Jagged, Lease, concat, concat_ragged
from tilth.core.errors import ArgumentError

quick = settings(max_examples=3 * settings.default.max_examples, deadline=None)
rows_of_numbers = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6)


class DictStore:
    """A store in a dictionary."""

    def __init__(self):
        self.columns = {}

    def put(self, column, data):
        handle = Handle(f"{column}/{len(self.columns)}", data.values.nbytes + data.offsets.nbytes)
        self.columns[handle] = data
        return handle

    def get(self, handle):
        return self.columns[handle]

    def release(self, *leases):
        self.columns.clear()


class ClosedStore(DictStore):
    """A store that nobody may read."""

    def get(self, handle):
        raise AssertionError(f"{handle.key} was read")


def ragged(rows):
    return (
        Jagged.of([np.array(r, np.int64) for r in rows])
        if rows
        else Jagged(np.zeros(0, np.int64), np.zeros(1, np.int64))
    )


def lists(data):
    return [data.row(i).tolist() for i in range(len(data.offsets) - 1)]


def batch_of(store, rows, first=0, columns=("tokens",)):
    ids = np.arange(first, first + len(rows))
    payload = {c: Column.whole(store.put(c, ragged(rows)), len(rows)) for c in columns}
    return Batch({"id": ids, "length": np.array([len(r) for r in rows], np.int32)}, payload)


@quick
@given(rows_of_numbers, st.data())
def test_ragged_take_is_indexing(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    got = ragged(rows).take(np.array(index, np.int64))
    assert lists(got) == [rows[i] for i in index]
    assert got.offsets.dtype == np.int64


@quick
@given(rows_of_numbers)
def test_ragged_of_and_with_lengths_agree(rows):
    data = ragged(rows)
    again = Jagged.with_lengths(data.values, data.lengths)
    assert lists(again) == lists(data) == rows
    assert again.offsets.tolist() == data.offsets.tolist()
    assert data.lengths.tolist() == [len(r) for r in rows]


@quick
@given(st.lists(rows_of_numbers, min_size=1, max_size=4))
def test_concat_ragged_is_addition_of_lists(parts):
    assert lists(concat_ragged([ragged(p) for p in parts])) == [row for part in parts for row in part]


@quick
@given(rows_of_numbers.filter(len), st.data())
def test_select_by_index_and_by_mask(rows, data):
    store = DictStore()
    batch = batch_of(store, rows)
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    chosen = batch.select(np.array(index, np.int64))
    assert chosen["id"].tolist() == index and len(chosen) == len(index)
    assert lists(chosen.read(store, "tokens")["tokens"]) == [rows[i] for i in index]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), bool)
    kept = batch.select(mask)
    assert lists(kept.read(store, "tokens")["tokens"]) == [r for r, keep in zip(rows, mask) if keep]


@quick
@given(st.lists(rows_of_numbers.filter(len), min_size=1, max_size=4), st.data())
def test_any_chain_of_selections_and_concatenations(parts, data):
    """The batch follows a list of (id, row) pairs through everything that is done to it."""
    store = DictStore()
    batches = [batch_of(store, rows, first=100 * i) for i, rows in enumerate(parts)]
    model = [[(100 * i + j, row) for j, row in enumerate(rows)] for i, rows in enumerate(parts)]
    for _ in range(data.draw(st.integers(1, 4))):
        i = data.draw(st.integers(0, len(batches) - 1))
        index = data.draw(st.lists(st.integers(0, len(model[i]) - 1), min_size=1, max_size=5)) if model[i] else []
        batches.append(concat([batches[i].select(np.array(index, np.int64)), batches[0]]))
        model.append([model[i][j] for j in index] + model[0])
    for batch, pairs in zip(batches, model):
        assert batch["id"].tolist() == [number for number, _ in pairs]
        assert lists(batch.read(store, "tokens")["tokens"]) == [row for _, row in pairs]


def test_a_row_column_of_another_length_is_refused():
    batch = Batch({"id": np.arange(3)})
    assert batch.with_rows(reward=np.zeros(3)).rows.keys() == {"id", "reward"}
    for wrong in (np.zeros(2), np.zeros(4), np.float64(1)):
        with raises(ArgumentError, "reward"):
            batch.with_rows(reward=wrong)


def test_concat_shares_handles():
    store = DictStore()
    batch = batch_of(store, [[1], [2, 3], [4]])
    joined = concat([batch.select(np.array([2, 0])), batch.select(np.array([1]))])
    assert len(joined.payload["tokens"].handles) == 1
    assert lists(joined.read(store, "tokens")["tokens"]) == [[4], [1], [2, 3]]


def test_a_batch_of_more_parts_than_16_bits_count_refers_to_each():
    parts = [Batch({}, {"tokens": Column.whole(Handle(f"{i}", 1), 1)}) for i in range(2**15 + 9)]
    column = concat(parts).payload["tokens"].take(np.array([2**15 + 8, 2**15, 3]))
    assert [column.handles[i].key for i in column.part] == ["32776", "32768", "3"]


def test_work_on_rows_reads_no_payload():
    store = ClosedStore()
    batch = concat([batch_of(store, [[1, 2], [3]]), batch_of(store, [[4]], first=2)])
    batch = batch.select(np.array([True, False, True])).with_rows(reward=np.array([1.0, np.nan]))
    batch = batch.with_payload(again=batch.payload["tokens"])
    assert batch["id"].tolist() == [0, 2] and np.isnan(batch["reward"][1]) and len(batch) == 2


def test_what_is_derived_from_a_batch_shares_its_leases_and_leaves_them_behind_when_it_travels():
    released = []
    one, two = (Lease(name, name, lambda lease: released.append(lease.name)) for name in "ab")
    store = DictStore()
    first, second = (replace(batch_of(store, [[1], [2]]), leases=(lease,)) for lease in (one, two))
    derived = first.select(np.array([1])).with_rows(x=np.zeros(1)).with_payload(again=first.payload["tokens"])
    assert derived.leases == (one,) and pickle.loads(pickle.dumps(derived)).leases == ()
    both = concat([first, second, first])
    assert both.leases == (one, two)
    both.release()
    assert released == ["a", "b"]


def controller_bytes(batch):
    rows = sum(v.nbytes for v in batch.rows.values())
    return rows + sum(c.part.nbytes + c.row.nbytes for c in batch.payload.values())


COLUMNS = ("tokens", "mask", "logprobs", "ref_logprobs", "advantages", "returns", "values", "versions")
ROWS = {
    "id": np.int64, "prompt": np.int64, "group": np.int64, "length": np.int32, "prompt_length": np.int32,
    "reward": np.float32, "version": np.int64, "cost": np.float64, "owner": np.int32, "finish": np.int8,
}  # fmt: skip


@pytest.mark.parametrize("length", [1, 10, 1_000])
def test_bytes_per_row_are_flat_in_tokens(length):
    """At most 200 bytes a row in the controller, with every column that a flow carries, whatever the lengths."""
    store, n = DictStore(), 500
    parts = []
    for first in (0, n):
        rows = {name: np.zeros(n, dtype) for name, dtype in ROWS.items()} | {"id": np.arange(first, first + n)}
        data = Jagged.with_lengths(np.zeros(n * length, np.float32), np.full(n, length))
        parts.append(Batch(rows, {c: Column.whole(store.put(c, data), n) for c in COLUMNS}))
    joined = concat(parts).select(np.arange(2 * n)[::-1])
    for batch in (*parts, joined):
        assert controller_bytes(batch) / len(batch) <= 200


def test_an_empty_batch():
    assert len(Batch({})) == 0
    store = DictStore()
    batch = batch_of(store, [[1], [2]]).select(np.array([], np.int64))
    assert len(batch) == 0 and lists(batch.read(store, "tokens")["tokens"]) == []
    assert len(concat([batch, batch])) == 0


def test_a_float_row_column_that_one_batch_lacks_is_nan_there():
    a = Batch({"id": np.arange(2), "part/x": np.array([0.5, 1.0], np.float32)})
    b = Batch({"id": np.arange(3)})
    joined = concat([b, a])["part/x"]
    assert joined.dtype == np.float32
    assert np.isnan(joined[:3]).all() and joined[3:].tolist() == [0.5, 1.0]


def test_a_missing_column_of_integers_is_an_error():
    with pytest.raises(KeyError, match="group"):  # Python's own kind of error
        concat([Batch({"id": np.arange(2), "group": np.arange(2)}), Batch({"id": np.arange(3)})])
