import numpy as np
import pytest

from tilth.cluster.inline import InlineGroup, InlineStore
from tilth.cluster.protocol import Transfer, transfer, transfer_of
from tilth.core.batch import Batch, Column, Ragged


class Worker:
    @transfer(split="rows", gather="merge")
    def total(self, batch: Batch) -> dict[str, float]:
        return {"total": float(batch["x"].sum())}

    def hidden(self) -> None:
        """Not declared, so not callable through a group."""


def ragged(*rows):
    return Ragged.of([np.array(r, np.int64) for r in rows])


def test_a_group_calls_its_worker():
    group = InlineGroup("adder", Worker())
    assert group.total(Batch({"x": np.array([1.0, 2.0])})) == {"total": 3.0}


def test_the_protocol_is_declared_on_the_method():
    assert transfer_of(Worker.total) == Transfer("rows", "merge")
    assert transfer_of(Worker.hidden) is None


def test_methods_without_a_protocol_are_refused_with_what_is_offered():
    with pytest.raises(AttributeError, match="role adder has no method 'hidden'; it offers total"):
        InlineGroup("adder", Worker()).hidden()


def test_fetch_is_counted_and_get_is_not():
    store = InlineStore()
    handle = store.put("tokens", ragged([1, 2], [3]))
    store.get(handle)
    assert store.fetched_bytes == 0
    store.fetch(handle)
    assert store.fetched_bytes == handle.nbytes == 3 * 8 + 3 * 8


def test_the_same_name_twice_makes_two_columns():
    store = InlineStore()
    first, second = store.put("tokens", ragged([1])), store.put("tokens", ragged([2]))
    assert store.get(first).values.tolist() == [1]
    assert store.get(second).values.tolist() == [2]


def test_freeing_twice_is_an_error():
    store = InlineStore()
    handle = store.put("tokens", ragged([1]))
    store.free(handle)
    with pytest.raises(KeyError):
        store.free(handle)


def test_a_scope_frees_what_was_put_inside_and_nothing_else():
    store = InlineStore()
    kept = store.put("kept", ragged([1]))
    with store.scope():
        early = store.put("early", ragged([2]))
        store.free(early)
        lost = store.put("lost", ragged([3]))
        with store.scope():
            store.put("inner", ragged([4]))
        assert store.get(lost).values.tolist() == [3]
    assert store.get(kept).values.tolist() == [1]
    assert store.nbytes == kept.nbytes
    with pytest.raises(KeyError):
        store.get(lost)


def test_a_scope_frees_after_an_exception_too():
    store = InlineStore()
    with pytest.raises(RuntimeError), store.scope():
        store.put("x", ragged([1]))
        raise RuntimeError
    assert store.nbytes == 0


def test_a_batch_over_the_store_reads_through_selection():
    store = InlineStore()
    column = Column.whole(store.put("tokens", ragged([1, 2], [3], [4, 5, 6])), 3)
    batch = Batch({"id": np.arange(3)}, {"tokens": column}).select(np.array([2, 0]))
    read = batch.read(store, "tokens")["tokens"]
    assert [read.row(i).tolist() for i in range(2)] == [[4, 5, 6], [1, 2]]
