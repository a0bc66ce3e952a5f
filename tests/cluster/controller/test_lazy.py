import pickle

import numpy as np
import pytest

from tests.errors import raises
from tilth.cluster.controller.lazy import LazyBatch, LazyMap, resolved
from tilth.core.batch import Batch, Column, Handle, Jagged, concat
from tilth.core.errors import DataError


class Counted:
    """An answer that counts how often it is asked for."""

    def __init__(self, answer):
        self.answer, self.asked = answer, 0

    def __call__(self):
        self.asked += 1
        return self.answer


@pytest.fixture
def batch():
    return Batch({"id": np.arange(3)}, {"tokens": Column.whole(Handle("k", 8), 3)})


@pytest.mark.parametrize(
    "read",
    [
        len,
        lambda b: b["id"],
        lambda b: b.rows,
        lambda b: b.payload,
        lambda b: b.select(np.array([0])),
        lambda b: b.with_rows(x=np.zeros(3)),
        lambda b: concat([b, b]),
        lambda b: b.wait(),
    ],
)
def test_a_batch_waits_when_it_is_read_and_once(batch, read):
    source = Counted(batch)
    lazy = LazyBatch(source)
    assert source.asked == 0 and repr(lazy) == "LazyBatch(not resolved)" and isinstance(lazy, Batch)
    read(lazy)
    read(lazy)
    assert source.asked == 1 and repr(lazy) == repr(batch)


def test_a_lazy_batch_reads_its_payload_like_a_plain_one(batch):
    class Store:
        def get(self, handle):
            return Jagged.of([np.array([1]), np.array([2, 3]), np.array([4])])

    assert LazyBatch(Counted(batch)).read(Store(), "tokens")["tokens"].values.tolist() == [1, 2, 3, 4]


def test_a_lazy_batch_equals_and_travels_as_the_plain_one(batch):
    assert LazyBatch(Counted(batch)) == batch
    sent = pickle.loads(pickle.dumps(LazyBatch(Counted(batch))))
    assert type(sent) is Batch and sent["id"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError):
        hash(LazyBatch(Counted(batch)))


@pytest.mark.parametrize("read", [len, list, dict, lambda m: m["a"], lambda m: "a" in m, lambda m: list(m.items())])
def test_a_mapping_waits_when_it_is_read_and_once(read):
    source = Counted({"a": 1})
    lazy = LazyMap(source)
    assert source.asked == 0 and repr(lazy) == "LazyMap(not resolved)"
    read(lazy)
    read(lazy)
    assert source.asked == 1 and repr(lazy) == "{'a': 1}" and lazy == {"a": 1}


def test_a_lazy_map_travels_as_a_dict():
    assert type(pickle.loads(pickle.dumps(LazyMap(Counted({"a": 1}))))) is dict


def test_what_went_wrong_is_raised_where_the_answer_is_read():
    def fails():
        raise DataError("role policy, rank 1, update: no data", key="data.source")

    for lazy in (LazyBatch(fails), LazyMap(fails)):
        for _ in range(2):
            with raises(DataError, "data.source"):
                len(lazy)


def test_arguments_are_resolved_and_others_are_left_alone(batch):
    assert resolved(LazyBatch(Counted(batch))) is batch
    assert resolved(LazyMap(Counted({"a": 1}))) == {"a": 1}
    assert resolved(batch) is batch and resolved(5) == 5
