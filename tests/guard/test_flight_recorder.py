"""Dumps of the flight recorder: what torch writes is read; nothing that a file holds is run, or believed unchecked."""

import json
import os
import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import DataError
from tilth.guard import flight_recorder
from tilth.guard.flight_recorder import decode, dump, parse, read_dumps

ENTRY = {
    "record_id": 7, "pg_id": 1, "process_group": ("3", "mesh_tp"), "collective_seq_id": 4, "p2p_seq_id": 9, "op_id": 5,
    "profiling_name": "nccl:recv 0<-1", "is_p2p": True, "input_sizes": [[4, 2]], "input_dtypes": ["Float"],
    "output_sizes": [[4, 2]], "state": "scheduled", "retired": False, "time_created_ns": 11,
    "frames": [
        {"filename": "/x/torch/distributed/distributed_c10d.py", "line": 3, "name": "recv"},
        {"filename": "/home/me/train.py", "line": 12, "name": "step"},
    ],
}  # fmt: skip
STATUS = {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 4}
GOOD = {
    "version": "2.9",
    "pg_config": {"3": {"desc": "mesh_tp", "ranks": "[2, 5]"}, "12": {"desc": "dp", "ranks": "[2]"}},
    "pg_status": {"1": STATUS, "10": STATUS},
    "entries": [ENTRY],
}  # fmt: skip


@pytest.mark.parametrize(
    "form", [lambda v: pickle.dumps(v, 2), lambda v: pickle.dumps(v, 5), lambda v: json.dumps(v).encode()]
)
def test_a_dump_of_each_form_is_the_same_table(form):
    found = parse(form(GOOD), 2, "dump_2")
    assert found.groups["12"]._asdict() | {"ranks": (2,)} == found.groups["12"]._asdict()  # the second local number
    (op,) = found.ops
    assert (op.group, op.seq, op.op, op.peer, op.sizes, op.pending) == ("3", 9, "recv 0<-1", 5, ((4, 2),), True)
    assert op.site == "/home/me/train.py:12 in step" and op.backend == "nccl" and not found.unnamed


def test_torchs_texts_of_numbers_and_its_names_by_hash_are_read():
    status = {key: str(value) for key, value in STATUS.items()}
    hashed = {"a3f": {"name": "a3f", "desc": "dp", "ranks": "[2, 3]"}, "": {"name": "", "desc": "", "ranks": "[]"}}
    value = GOOD | {"pg_config": hashed, "pg_status": {"1": status, "2": status}}
    found = parse(json.dumps(value).encode(), 2, "dump_2")
    assert found.groups["3"].completed == 4 and found.unnamed == (2,)  # no entry says which group 2 is


def test_gloos_status_counts_sends_so_its_entries_are_believed():
    gloo = ENTRY | {"profiling_name": "gloo:all_reduce", "is_p2p": False}
    calls = [gloo | {"collective_seq_id": n, "retired": n < 3} for n in (1, 2, 3)]
    found = parse(pickle.dumps(GOOD | {"entries": calls}), 2, "dump_2")
    assert (found.groups["3"].enqueued, found.groups["3"].completed) == (3, 2)


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile",)


HOSTILE = [pickle.dumps(Hostile(), protocol) for protocol in (2, 4)] + [
    b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00ls\x85R.",  # a call
    b"\x80\x02c__builtin__\neval\n.",
    b"\x80\x02ios\nsystem\n.",
    b"\x80\x02X\x01\x00\x00\x00aQ.",  # a persistent reference
    b"\x80\x02\x82\x01.",  # a registered extension
    b"\x80\x02}r\xff\xff\xff\xff.X",  # a memo of 4e9 values would take 64 GB in C
    b"\x80\x02X\xff\xff\xff\x7fa.",  # a text of 2 GB
    b"\x80\x02e.", b"\x80\x02(.", b"\x80\x02.", b"\x80\x02}]K\x01s.", b"\x80\x02K\x01K\x02.", b"\x80\x02h\x05.", b"",
    b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    b"[" * 100_000, b'{"version": 1e999}', b"\xff\xfe", b"null",
]  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_file_is_refused_and_does_nothing(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        parse(data, 0, "dump_0")
    assert caught.value.key.startswith("dump_0") and not list(tmp_path.iterdir())


def test_the_refused_pickles_would_have_done_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE[0])
    assert (tmp_path / "hostile").is_dir()


@given(st.data())
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_a_cut_or_changed_dump_is_a_table_or_a_named_error(data):
    whole = bytearray(
        data.draw(st.sampled_from([pickle.dumps(GOOD, 2), pickle.dumps(GOOD, 4), json.dumps(GOOD).encode()]))
    )
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse(bytes(whole[: data.draw(st.integers(0, len(whole)))]), 0, "dump_0")
    except DataError as error:
        assert error.key.startswith("dump_0")


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
PLAIN = st.recursive(
    SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@given(PLAIN, st.integers(2, 5))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_plain_values_survive(value, protocol):
    assert decode(pickle.dumps(value, protocol), "x") == value


@given(st.sampled_from([*GOOD]), st.sampled_from([*ENTRY]), PLAIN)
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_a_field_of_another_kind_is_a_named_error_or_read(top, field, value):
    for bad in (GOOD | {top: value}, GOOD | {"entries": [ENTRY | {field: value}]}):
        try:
            parse(pickle.dumps(bad), 0, "dump_0")
        except DataError as error:
            assert error.key.startswith("dump_0")


@pytest.mark.parametrize(("change", "key"), [
    ({"entries": 3}, "entries"), ({"version": None}, "version"), ({"pg_status": {"x": STATUS}}, "pg_status"),
    ({"pg_config": {"3": {"desc": "", "ranks": "[1, x]"}}}, "pg_config.ranks"),
    ({"entries": [ENTRY | {"pg_id": True}]}, "pg_id"),
    ({"entries": [ENTRY | {"process_group": ["3"]}]}, "process_group"),
    ({"entries": [ENTRY, ENTRY | {"process_group": ("4", "")}]}, "pg_id"),
    ({"entries": [ENTRY | {"input_sizes": [4]}]}, "input_sizes"),
    ({"entries": [ENTRY | {"time_created_ns": 10**5000}]}, "time_created_ns"),
])  # fmt: skip
def test_the_error_names_the_field(change, key):
    with raises(DataError, f"dump_0.{key}"):
        parse(pickle.dumps(GOOD | change), 0, "dump_0")


def test_values_that_are_shared_too_often_are_refused(monkeypatch):
    monkeypatch.setattr(flight_recorder, "_VALUES", 1 << 17)
    shape = list(range(10_000))
    entry = ENTRY | {"input_sizes": [shape] * 2_000}
    with raises(DataError, "dump_0"):
        parse(pickle.dumps(GOOD | {"entries": [entry] * 2_000}), 0, "dump_0")


def sharing(**change):
    """A dump whose pickle is small, and which refers to a large value many times."""
    return pickle.dumps(GOOD | change, 4)


TEXT, FRAME = "x" * 1_000_000, {"filename": "x" * 1_000_000, "line": 1, "name": "step"}
BLANKS, RANKS = f"[{' ' * 1_000_000}]", f"[{'1,' * 400_000}1]"


def described(ranks, groups):
    """Groups whose ranks are one text."""
    return {str(i): {"desc": "", "ranks": ranks} for i in range(groups)}


BOMBS = {
    "frames": (lambda: sharing(entries=[ENTRY | {"frames": [FRAME] * 50_000}]), "dump_0"),
    "names": (lambda: sharing(entries=[ENTRY | {"process_group": ("3", TEXT)}] * 20_000), "dump_0"),
    "ranks": (lambda: sharing(pg_config=described(RANKS, 50)), "dump_0"),
    "blanks": (lambda: sharing(pg_config=described(BLANKS, 5_000)), "dump_0"),
    "keys of one hash": (lambda: pickle.dumps({k * (2**61 - 1): 0 for k in range(8, 40)}), "dump_0"),
    "a key of 10,000 digits": (lambda: sharing(pg_status={10**10_000: STATUS}), "dump_0"),
    "no commas": (lambda: sharing(pg_config=described("[1 2]", 1)), "dump_0.pg_config.ranks"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_dump_takes_more_memory_or_time_than_its_values_may(bomb, monkeypatch):
    monkeypatch.setattr(flight_recorder, "_VALUES", 1 << 17)
    make, key = BOMBS[bomb]
    with raises(DataError, key):
        parse(make(), 0, "dump_0")


def test_a_pickle_has_so_many_operations_and_no_more(monkeypatch):
    data = pickle.dumps([[], []])
    assert decode(data, "x") == [[], []]
    monkeypatch.setattr(flight_recorder, "MOST", 4)
    with raises(DataError, "x"):
        decode(data, "x")


def test_a_folder_of_dumps(tmp_path):
    with raises(DataError, str(tmp_path)):
        read_dumps(tmp_path)
    (tmp_path / "fault_injection.log").write_text("no dump")
    (tmp_path / "_dump_3").write_bytes(pickle.dumps(GOOD))
    (tmp_path / "_dump_11.json").write_text(json.dumps(GOOD))
    assert sorted(read_dumps(tmp_path)) == [3, 11] and read_dumps(tmp_path)[11].rank == 11
    (tmp_path / "other_3").write_bytes(pickle.dumps(GOOD))
    with raises(DataError, "other_3"):
        read_dumps(tmp_path)


def calls(rank):
    """Two collectives of this process; runs in a pool of tests."""
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_reduce(torch.ones(2), group=group)
    until = time.monotonic() + 20
    while b'"retired": false' in dump() and time.monotonic() < until:  # another thread records the end
        time.sleep(0.01)
    return group.group_name, dump(), dump(frames=False)


@pytest.mark.dist
def test_a_living_process_dumps_its_collectives(pool):
    for rank, (name, data, bare) in enumerate(pool.run(2, "tests.guard.test_flight_recorder:calls")):
        found = parse(data, rank, "live")
        assert found.groups[name].ranks == (0, 1) and found.groups[name].completed == 2
        mine = [op for op in found.ops if op.group == name]
        assert [op.sizes for op in mine] == [((3,),), ((2,),)] and "test_flight_recorder.py:" in mine[0].site
        assert [op.site for op in parse(bare, rank, "live").ops if op.group == name] == ["", ""]
