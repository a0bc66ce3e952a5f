"""Deal and gather are inverse, whatever the mesh, the number of rows and the division."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.workers import Echo, Metric
from tests.errors import raises
from tilth.cluster.protocol import Deal, Transfer, deal, evenly, gather, offered, transfer, transfer_of
from tilth.config.axes import AXES
from tilth.core.batch import Batch, Column, Handle, Jagged
from tilth.core.errors import ArgumentError, AxisError
from tilth.core.layout import Mesh
from tilth.plan.batch import MicroBatchLimits, RowTable, plan_batch

ROWS = Transfer("rows", "rows")


def run(how, mesh, function, *args, divide=evenly, **kwargs):
    """What a backend does, without processes; answers that are not wanted are lost on the way."""
    dealt = deal(how, mesh, divide, args, kwargs)
    values = [function(*a, **k) if answer else None for (a, k), answer in zip(dealt.arguments, dealt.answers)]
    return gather(how, dealt, values)


@st.composite
def meshes(draw):
    names = draw(st.permutations(["dp", "fsdp", "tp"]))[: draw(st.integers(1, 3))]
    sizes = tuple(draw(st.integers(1, 3)) for _ in names)
    first = draw(st.integers(0, 5))
    return Mesh(tuple(names), sizes, tuple(range(first, first + int(np.prod(sizes)))))


def batch_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return Batch({"id": np.arange(count), "length": rng.integers(0, 9, count), "x": rng.random(count)})


def divided_by(seed):
    def divide(batch, count):
        owner = np.random.default_rng(seed).integers(0, count, len(batch))
        return [np.random.default_rng(i).permutation(np.flatnonzero(owner == i)) for i in range(count)]

    return divide


def same(a, b):
    assert a.rows.keys() == b.rows.keys()
    assert all(np.array_equal(a[c], b[c]) and a[c].dtype == b[c].dtype for c in a.rows)


@given(meshes(), st.integers(0, 20), st.integers(0, 99))
def test_a_call_that_is_planned_gives_each_rank_its_part(mesh, count, seed):
    batch, how = batch_of(count, seed), Transfer("plan", "rows", limits=MicroBatchLimits(12))
    plan = plan_batch(RowTable.of_batch(batch, "mask", digests=False), None, mesh.size(*mesh.over("rows")), how.limits)
    seen = []

    def echo(part, plan):
        seen.append((part["id"].tolist(), plan))
        return part

    same(run(how, mesh, echo, batch), batch)
    assert [rows for rows, _ in seen] == [rows.tolist() for rows in plan.rows]
    assert [[m.rows.tolist() for m in part.learn] for _, part in seen] == [
        [m.rows.tolist() for m in part.learn] for part in plan.ranks
    ]


def test_a_plan_balances_the_costs_that_are_given():
    batch, how = Batch({"length": np.array([8, 4, 4, 4, 4])}), Transfer("plan", "merge", limits=MicroBatchLimits(9))
    found = [
        [
            arguments.args[0]["row"].tolist()
            for arguments in deal(how, Mesh(("dp",), (2,)), evenly, [batch], {}, *given).arguments
        ]
        for given in ((), (partial(plan_batch, costs=np.square),))
    ]
    assert found == [[[0, 3], [1, 2, 4]], [[0], [1, 2, 3, 4]]]


@pytest.mark.parametrize("batches, limits", [(0, MicroBatchLimits(9)), (2, MicroBatchLimits(9)), (1, None)])
def test_a_plan_is_of_one_batch_under_limits(batches, limits):
    how = Transfer("plan", "merge", limits=limits)
    with raises(ArgumentError, "plan"):
        deal(how, Mesh(("dp",), (2,)), evenly, [batch_of(3)] * batches, {})


def test_a_role_with_planned_methods_has_limits():
    class Role:
        limits = MicroBatchLimits(9)

        @transfer("plan", "merge", dropout=True)
        def learn(self, batch, *, plan):
            return {}

    assert offered(Role())["learn"] == Transfer("plan", "merge", dropout=True, limits=Role.limits)
    Role.limits = None
    with raises(ArgumentError, "limits"):
        offered(Role())


@given(meshes(), st.integers(0, 20), st.integers(0, 99))
def test_an_identity_gives_the_batch_back(mesh, count, seed):
    batch = batch_of(count, seed)
    same(run(ROWS, mesh, lambda b: b, batch), batch)
    same(run(ROWS, mesh, lambda b: b, batch, divide=divided_by(seed)), batch)


@given(meshes(), st.integers(0, 20), st.integers(0, 99))
def test_rows_made_anew_come_back_in_the_order_of_the_whole(mesh, count, seed):
    batch = batch_of(count, seed)
    found = run(ROWS, mesh, lambda b: Batch({"twice": b["x"] * 2}), batch, divide=divided_by(seed))
    same(found, Batch({"twice": batch["x"] * 2}))


@given(meshes(), st.integers(0, 20), st.integers(0, 99))
def test_a_worker_may_reorder_its_rows_if_it_keeps_their_numbers(mesh, count, seed):
    batch = batch_of(count, seed)
    found = run(ROWS, mesh, lambda b: b.select(np.arange(len(b))[::-1]), batch, divide=divided_by(seed))
    one_part = mesh.count("rows") == 1  # then the rows carry no numbers, and the answer is the worker's own
    same(found, batch.select(np.arange(count)[::-1]) if one_part else batch)


@given(meshes(), st.integers(0, 20))
def test_every_part_knows_where_its_rows_and_tokens_stand_in_the_whole(mesh, count):
    batch = batch_of(count)
    dealt = deal(ROWS, mesh, evenly, [batch], {})
    if mesh.count("rows") == 1:
        assert all(a.args[0] is batch for a in dealt.arguments) and dealt.rows is None
        return
    before = np.concatenate([[0], np.cumsum(batch["length"])])
    for (part,), _ in dealt.arguments:
        assert (
            np.array_equal(part["start"], before[part["row"]]) and part["row"].dtype == part["start"].dtype == np.int64
        )
        assert np.array_equal(part["id"], part["row"])


@given(meshes())
def test_one_rank_speaks_for_each_part_and_copies_get_the_same(mesh):
    dealt, over = deal(ROWS, mesh, evenly, [batch_of(40)], {}), ("dp", "fsdp")
    count, seen = mesh.size(*over), []
    for (args, _), answers, rank in zip(dealt.arguments, dealt.answers, mesh.ranks):
        at, part = mesh.at(rank), 0
        for name, size in zip(mesh.names, mesh.sizes):
            part = part * size + at[name] if name in over else part
        assert args[0]["id"].tolist() == evenly(batch_of(40), count)[part].tolist()
        seen += [part] * answers
    assert seen == list(range(count))  # one for each, in rank order where tp is the last axis


def test_an_axis_in_over_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(AxisError) as raised:
        deal(Transfer("rows", "rows", over=("pd",)), Mesh(("dp",), (2,)), evenly, [batch_of(4)], {})
    assert ", ".join(AXES) in str(raised.value)


def test_ranks_along_tp_share_one_message():
    mesh = Mesh(("dp", "tp"), (2, 2))
    dealt = deal(ROWS, mesh, evenly, [batch_of(5)], {})
    assert dealt.arguments[0] is dealt.arguments[1] and dealt.arguments[2] is dealt.arguments[3]
    assert dealt.answers == [True, False, True, False]


def test_fewer_rows_than_ranks_leave_empty_parts_that_are_called_all_the_same():
    seen = []
    run(ROWS, Mesh(("dp",), (4,)), lambda b: seen.append(len(b)) or b, batch_of(2))
    assert seen == [1, 1, 0, 0]


def test_batches_in_keyword_arguments_are_divided_too_and_other_arguments_are_not():
    found = run(Transfer("rows", "all"), Mesh(("dp",), (2,)), lambda a, n, b: (len(a), n, len(b)), batch_of(5), 7,
                b=batch_of(5))  # fmt: skip
    assert found == [(3, 7, 3), (2, 7, 2)]


def test_other_dimensions_can_be_the_ones_that_divide():
    how = Transfer("rows", "rows", over=("dp", "tp"))
    dealt = deal(how, Mesh(("dp", "fsdp", "tp"), (1, 2, 2)), evenly, [batch_of(4)], {})
    assert [a.args[0]["id"].tolist() for a in dealt.arguments] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert dealt.answers == [True, True, False, False]


def test_a_part_refers_only_to_the_payload_that_it_needs():
    handles = [Handle(f"tokens-{i}", 100) for i in range(4)]
    column = Column(
        tuple(handles), np.repeat(np.arange(4, dtype=np.int32), 2), np.tile(np.arange(2, dtype=np.int32), 4)
    )
    dealt = deal(ROWS, Mesh(("dp",), (2,)), evenly, [Batch({"id": np.arange(8)}, {"tokens": column})], {})
    first, second = (a.args[0].payload["tokens"] for a in dealt.arguments)
    assert first.handles == tuple(handles[:2]) and second.handles == tuple(handles[2:])
    parts_of = [Jagged.of([np.array([10 * i]), np.array([10 * i + 1])]) for i in range(4)]
    assert second.assemble(parts_of[2:]).values.tolist() == [20, 21, 30, 31]


def test_a_part_of_more_handles_than_16_bits_count_refers_to_each():
    count = 2**15 + 9
    column = Column(tuple(Handle(f"{i}", 1) for i in range(count)), np.arange(count), np.zeros(count, np.int32))
    batch = Batch({"id": np.arange(count)}, {"tokens": column})
    most = np.arange(1, count)
    dealt = deal(ROWS, Mesh(("dp",), (2,)), lambda *_: [most, np.zeros(1, np.int64)], [batch], {})
    pruned = dealt.arguments[0].args[0].payload["tokens"]
    assert [pruned.handles[i] for i in pruned.part] == list(column.handles[1:])


def test_payload_of_no_rows_still_has_its_kind():
    column = Column((Handle("a", 8), Handle("b", 8)), np.array([0, 1], np.int32), np.zeros(2, np.int32))
    batch = Batch({"id": np.arange(2)}, {"tokens": column})
    dealt = deal(ROWS, Mesh(("dp",), (3,)), evenly, [batch], {})
    empty = dealt.arguments[2].args[0].payload["tokens"]
    found = empty.assemble([Jagged.of([np.array([5], np.int32)])] * len(empty.handles))
    assert len(found.offsets) == 1 and found.values.dtype == np.int32 and not len(found.values)


def test_payload_of_parts_is_one_column_again():
    def think(part):
        handle = Handle(f"of-{part['id'].tolist()}", 8)
        return part.with_payload(tokens=Column.whole(handle, len(part)))

    rows = [np.array(r) for r in ([4, 0], [], [2, 1, 3])]
    found = run(ROWS, Mesh(("dp",), (3,)), think, batch_of(5), divide=lambda batch, count: rows)
    column = found.payload["tokens"]
    where = [(column.handles[p].key, r) for p, r in zip(column.part, column.row.tolist())]
    first, last = "of-[4, 0]", "of-[2, 1, 3]"
    assert where == [(first, 1), (last, 1), (last, 0), (last, 2), (first, 0)]


def test_an_empty_part_adds_no_column_of_another_kind():
    """Of no rows a worker may make floats; they must not turn the integers of the others into floats."""
    answer = run(ROWS, Mesh(("dp",), (3,)), lambda b: Batch({"n": b["id"] if len(b) else np.zeros(0)}), batch_of(2))
    assert answer["n"].dtype == np.int64 and answer["n"].tolist() == [0, 1]


@pytest.mark.parametrize("gathered, expected", [("first", 0), ("all", [0, 1, 2, 3])])
def test_first_and_all(gathered, expected):
    ranks = iter(range(4))
    assert run(Transfer("all", gathered), Mesh(("dp", "tp"), (2, 2)), lambda: next(ranks)) == expected


def test_metrics_are_merged_over_the_collectors():
    found = run(Transfer("rows", "merge"), Mesh(("dp", "tp"), (3, 2)), Echo(None, float).total, batch_of(7))
    assert found["x"].total == pytest.approx(batch_of(7)["x"].sum()) and found["x"].count == 7


def test_mappings_without_merge_are_united_and_may_not_contradict():
    how, mesh = Transfer("all", "merge"), Mesh(("dp",), (2,))
    answers = iter([{"a": 1, "same": np.arange(2)}, {"b": 2, "same": np.arange(2)}])
    assert set(run(how, mesh, lambda: next(answers))) == {"a", "b", "same"}
    other = iter([{"a": 1}, {"a": 2}])
    with raises(ValueError, "a"):
        run(how, mesh, lambda: next(other))


def test_each_gives_every_rank_its_item():
    mesh = Mesh(("dp", "tp"), (2, 2))
    assert run(Transfer("each", "all"), mesh, lambda a, k: (a, k), [5, 6, 7, 8], k=1) == [
        (5, 1),
        (6, 1),
        (7, 1),
        (8, 1),
    ]
    with raises(ValueError, "args"):
        run(Transfer("each", "all"), mesh, lambda a: a, [5, 6, 7])


@pytest.mark.parametrize(
    "divide", [lambda b, n: [np.arange(3)] * n, lambda b, n: [np.arange(2), np.arange(0)], lambda b, n: [np.arange(3)]]
)
def test_a_division_that_loses_or_repeats_rows_is_refused(divide):
    with raises(ValueError, "divide"):
        deal(ROWS, Mesh(("dp",), (2,)), divide, [batch_of(3)], {})


def test_what_cannot_be_split_by_rows_is_refused():
    mesh = Mesh(("dp",), (2,))
    with raises(ValueError, "batch"):
        deal(ROWS, mesh, evenly, [batch_of(2), batch_of(3)], {})
    with raises(ValueError, "batch"):
        deal(ROWS, mesh, evenly, [1], {})
    with raises(ValueError, "start"):
        deal(ROWS, mesh, evenly, [batch_of(2).with_rows(start=np.zeros(2))], {})


def test_rows_that_cannot_be_placed_are_refused():
    dealt = deal(ROWS, Mesh(("dp",), (2,)), evenly, [batch_of(4)], {})
    with raises(ValueError, "row"):
        gather(ROWS, dealt, [Batch({"y": np.zeros(1)}), Batch({"y": np.zeros(2)})])


def test_rows_of_workers_that_were_sent_none_follow_one_another():
    how = Transfer("all", "rows")
    found = gather(how, Deal([], [True, True], None), [Batch({"y": np.arange(2)}), Batch({"y": np.arange(3)})])
    assert found["y"].tolist() == [0, 1, 0, 1, 2]


def test_what_a_role_offers_is_read_from_its_class():
    found = offered(Echo(None, float))
    assert found["same"] == Transfer("rows", "rows") and "context" not in found
    assert transfer_of(Echo.total) == Transfer("rows", "merge") and transfer_of(Metric.merge) is None


@pytest.mark.parametrize("key", ["split", "gather"])
def test_a_transfer_that_there_is_not_is_refused_where_it_is_declared(key):
    with raises(ArgumentError, key):
        transfer(**{"split": "rows", "gather": "rows", key: "row"})
