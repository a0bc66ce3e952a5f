"""Payload files, the phase board and the private folder."""

import contextlib
import errno
import os
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.errors import raises
from tilth.cluster.backends.probe import LONGEST, StatusBoard
from tilth.cluster.backends.ray_actors import RayStore
from tilth.cluster.backends.store import FolderStore, _no_room, column_of
from tilth.core.batch import Handle, Jagged
from tilth.core.errors import ReplicaMismatch, StorageError
from tilth.trace import recorder, span
from tilth.trace.spans import DEEPEST, show_open

KINDS = ["<i8", "<i4", "<i2", "|u1", "|i1", "|b1", "<f4", "<f8", "<f2"]


@given(
    st.sampled_from(KINDS).flatmap(lambda kind: hnp.arrays(kind, st.integers(0, 40))),
    st.lists(st.integers(0, 9), max_size=9),
    st.text(max_size=20),
)
def test_a_column_comes_back_bit_for_bit(tmp_path_factory, values, lengths, name):
    folder = tmp_path_factory.mktemp("payload")
    data = Jagged(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    handle = FolderStore(folder, "0").put(name, data)
    found = FolderStore(folder, "1").get(handle)
    assert found.values.dtype == values.dtype and found.values.tobytes() == values.tobytes()
    assert found.offsets.dtype == np.int64 and np.array_equal(found.offsets, data.offsets)
    assert handle.nbytes == values.nbytes + data.offsets.nbytes == FolderStore(folder, "2").held()[handle.key]


def ragged(*values):
    return Jagged.of([np.array(values)])


def test_the_process_that_replaces_one_of_a_rank_puts_columns_beside_its(tmp_path):
    """In one lease too, from the same number on; on Ray the second would take the place of the first."""
    lives = [FolderStore(tmp_path, "1") for _ in range(2)]
    handles = [store.put("x", ragged(i)) for i, store in enumerate(lives)]
    assert [lives[0].get(handle).values.tolist() for handle in handles] == [[0], [1]]
    assert len({len(handle.key) for handle in handles}) == 1  # counts of bytes are those of every run


def test_columns_of_ray_have_the_name_of_a_process(monkeypatch):
    kept = {}
    monkeypatch.setattr(RayStore, "_ask", lambda self, key, method, *given: kept.update({key: given}))
    for _ in range(2):
        RayStore("s", 0, "1").put("x", ragged(1))
    assert len(kept) == 2 and {column_of(key) for key in kept} == {"x"}


def test_a_reader_may_write_in_its_own_view(tmp_path):
    store = FolderStore(tmp_path, "0")
    handle = store.put("x", ragged(1, 2, 3))
    store.get(handle).values[:] = 0
    assert store.get(handle).values.tolist() == [1, 2, 3]


def test_a_view_stays_valid_when_the_column_is_freed(tmp_path):
    store = FolderStore(tmp_path, "0")
    handle = store.put("x", ragged(1, 2, 3))
    view = store.get(handle)
    FolderStore(tmp_path, "1").release("")
    assert view.values.tolist() == [1, 2, 3] and store.held() == {}
    with pytest.raises(KeyError):
        store.get(handle)


def test_many_leases_are_released_in_one_look_at_the_folder(tmp_path, monkeypatch):
    store, looks, listed = FolderStore(tmp_path, "0"), [], os.listdir
    for store.lease in map(str, range(12)):
        store.put("x~1", ragged(1, 2, 3))
    monkeypatch.setattr(os, "listdir", lambda path: looks.append(path) or listed(path))
    store.release(*map(str, range(1, 11)))
    assert len(looks) == 1
    assert [key.partition("~")[0] for key in sorted(store.held())] == ["0", "11"]


def test_writers_of_one_folder_do_not_collide(tmp_path):
    stores = [FolderStore(tmp_path, str(rank)) for rank in range(3)]
    handles = [store.put("tokens", ragged(i)) for i in range(4) for store in stores]
    assert len({h.key for h in handles}) == 12
    assert [stores[0].get(h).values[0] for h in handles] == [i for i in range(4) for _ in stores]


@pytest.mark.parametrize("bad", [np.array(["a", None], object), np.zeros((2, 2))])
def test_what_is_not_a_row_of_numbers_is_refused(tmp_path, bad):
    with raises(ValueError, "x"):
        FolderStore(tmp_path, "0").put("x", Jagged(bad, np.array([0, 2])))
    assert not list(tmp_path.iterdir())


def test_no_room_names_the_column_its_size_and_the_way_out():
    store = FolderStore(__import__("pathlib").Path("/dev/full-of-nothing"), "0")
    with raises(StorageError, "tokens") as raised:
        store.put("tokens", ragged(1, 2))
    assert "32 bytes" in str(raised.value) and "/dev/full-of-nothing" in str(raised.value)


def test_a_full_disk_says_what_to_do(tmp_path):
    error = _no_room(tmp_path, "x", 10, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert "No space left on device; free memory there or set TMPDIR to a larger place" in str(error)


def test_an_unknown_handle_is_a_key_error(tmp_path):
    with pytest.raises(KeyError):
        FolderStore(tmp_path, "0").get(Handle("never", 8))


def test_the_board_shows_each_worker_to_every_process(tmp_path):
    board = StatusBoard.create(tmp_path / "board", 3)
    assert [board.read(rank) for rank in range(3)] == ["", "", ""]
    StatusBoard(tmp_path / "board").mark(1, "policy.update")
    time.sleep(0.11)
    assert board.read(1).startswith("policy.update (for 0.") and board.read(0) == board.read(2) == ""
    board.mark(1, "")
    assert board.read(1) == ""
    board.close()


@given(st.text(max_size=300))
def test_any_name_fits_into_its_own_slot(tmp_path_factory, name):
    board = StatusBoard.create(tmp_path_factory.mktemp("board") / "board", 3)
    for rank in range(3):
        board.mark(rank, f"{rank}{name}")
    for rank in range(3):
        shown = board.read(rank).rsplit(" (for ", 1)[0]
        cut = f"{rank}{name}".encode()[:LONGEST].decode(errors="replace")
        assert shown == cut
    board.close()


def test_the_board_shows_the_open_spans_of_a_worker_and_nothing_else_moves(tmp_path):
    board = StatusBoard.create(tmp_path / "board", 2)
    board.mark(1, "policy.update")
    board.beat(1, 5, 6)
    show_open(board.room(1))
    try:
        with span("call"), span("update"), span("backward", micro_batch=3), span("a plugin's own"):
            assert board.spans(1) == [("call", -1), ("update", -1), ("backward", 3), ("", 3)]
        assert board.spans(1) == board.spans(0) == []
        with contextlib.ExitStack() as deep:
            for i in range(DEEPEST + 2):
                deep.enter_context(span("reduce", micro_batch=i))
            assert board.spans(1) == [("reduce", i) for i in range(DEEPEST)]
            with span("forward", micro_batch=1 << 60):  # no room for such a number
                pass
    finally:
        show_open(None)
    assert board.life(1) == (5, 6) and board.read(1).startswith("policy.update")
    board.mark(1, "x" * 1000)
    assert board.spans(1) == [] and board.life(1) == (5, 6)


def test_what_goes_in_and_out_is_told_with_its_bytes_also_where_it_fails(tmp_path):
    shop, data = FolderStore(tmp_path, "r0"), Jagged.of([np.arange(3), np.arange(2)])
    recorder.totals()
    handle = shop.put("tokens", data)
    shop.get(handle)
    shop.release("")
    with pytest.raises(KeyError):
        shop.get(handle)
    told = {op: (total.count, total.bytes) for op, total in recorder.totals().items()}
    assert handle.nbytes == (5 + 3) * 8
    assert told == {"payload.put": (1, 64), "payload.get": (2, 2 * 64)}


@pytest.mark.parametrize("place", [64, 87, -1])
def test_a_column_with_a_flipped_bit_is_refused(tmp_path, place):
    handle = FolderStore(tmp_path, "0").put("reward", Jagged.of([np.arange(3.0), np.arange(2.0)]))
    data = bytearray((tmp_path / handle.key).read_bytes())
    data[place] ^= 4
    (tmp_path / handle.key).write_bytes(data)
    with raises(ReplicaMismatch, "reward"):
        FolderStore(tmp_path, "1").get(handle)
