import errno
import os
import threading

import numpy as np
import pytest

from tests.cluster.workers import HERE
from tests.errors import raises
from tilth.cluster.backends.base import Call, PickledKwargs
from tilth.cluster.backends.inline import InlineBackend, InlineStore
from tilth.cluster.protocol import Transfer
from tilth.cluster.worker.executor import REFUSALS
from tilth.core.batch import Batch, Column, Jagged
from tilth.core.errors import StorageError
from tilth.core.layout import Mesh


def ragged(*rows):
    return Jagged.of([np.array(r, np.int64) for r in rows])


def test_a_call_runs_in_this_thread_and_its_exception_has_its_own_traceback():
    """So a debugger stops in the role."""
    fleet = InlineBackend()
    fleet.submit(0, Call("", "create", ("faulty", f"{HERE}:faulty", PickledKwargs({}), Mesh.of({}))))
    seen = []
    fleet.host.roles["faulty"].sleep = lambda seconds: seen.append((threading.get_ident(), fleet.probe(0).phase))
    assert fleet.submit(0, Call("faulty", "sleep", (1,))).done()
    assert seen == [(threading.get_ident(), "faulty.sleep")] and fleet.probe(0).phase == ""
    with pytest.raises(ValueError) as raised:
        fleet.submit(0, Call("faulty", "fail", (0, "value")))
    assert raised.traceback[-1].name == "fail" and fleet.probe(0).phase == ""
    assert fleet.probe(0).pid == os.getpid()


@pytest.mark.parametrize("number", [*REFUSALS, errno.ENOENT])
def test_a_file_system_that_takes_no_more_is_a_storage_error_of_the_call(number):
    fleet = InlineBackend()
    fleet.submit(0, Call("", "create", ("faulty", f"{HERE}:faulty", PickledKwargs({}), Mesh.of({}))))
    refused = OSError(number, os.strerror(number), "/data/x")
    fleet.host.roles["faulty"].sleep = lambda seconds: exec("raise refused", {"refused": refused})
    if number == errno.ENOENT:  # a wrong path is a bug
        with pytest.raises(FileNotFoundError):
            fleet.submit(0, Call("faulty", "sleep", (1,)))
        return
    with raises(StorageError, "write") as caught:
        fleet.submit(0, Call("faulty", "sleep", (1,)))
    assert f"/data/x: {os.strerror(number)}" in str(caught.value)


def test_kwargs_are_passed_as_they_are():
    """No copy is made on the way to a role in this process: a lambda, a lock, a model."""
    fleet, scale = InlineBackend(), lambda x: x
    call = Call("", "create", ("echo", f"{HERE}:echo", PickledKwargs({"scale": scale}), Mesh.of({})))
    methods = fleet.submit(0, call).result().value
    assert fleet.host.roles["echo"].scale is scale and methods["same"] == Transfer("rows", "rows")


def test_what_cannot_be_pickled_is_passed_all_the_same_and_counted_as_far_as_it_goes():
    fleet, lock = InlineBackend(), threading.Lock()
    given = PickledKwargs({"scale": (bytes(1000), lock)})
    reply = fleet.submit(0, Call("", "create", ("echo", f"{HERE}:echo", given, Mesh.of({})))).result()
    assert fleet.host.roles["echo"].scale[1] is lock and reply.received > 0
    assert fleet.submit(0, Call("echo", "generator")).result().value is not None


def test_the_same_name_twice_makes_two_columns():
    store = InlineStore()
    first, second = store.put("tokens", ragged([1])), store.put("tokens", ragged([2]))
    assert store.get(first).values.tolist() == [1]
    assert store.get(second).values.tolist() == [2]


def test_a_release_frees_what_was_put_under_the_lease_and_nothing_else():
    store = InlineStore()
    kept = store.put("kept", ragged([1]))
    store.lease = "1"
    lost = store.put("lost", ragged([2]))
    store.lease = "11"  # begins with the same digit
    other = store.put("other", ragged([3]))
    store.release("1")
    with pytest.raises(KeyError):
        store.get(lost)
    assert store.held() == {kept.key: kept.nbytes, other.key: other.nbytes}
    store.release("1")
    store.release("")
    assert store.held() == {other.key: other.nbytes}


def test_a_batch_over_the_store_reads_through_selection():
    store = InlineStore()
    column = Column.whole(store.put("tokens", ragged([1, 2], [3], [4, 5, 6])), 3)
    batch = Batch({"id": np.arange(3)}, {"tokens": column}).select(np.array([2, 0]))
    read = batch.read(store, "tokens")["tokens"]
    assert [read.row(i).tolist() for i in range(2)] == [[4, 5, 6], [1, 2]]
