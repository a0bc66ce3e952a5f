"""Plans of ranks that divide rows and tokens together: micro-batches of one rank or several, in one order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.scripts import script
from tilth.cluster.protocol import Transfer, deal, evenly, gather
from tilth.config.axes import Axis
from tilth.core.batch import Batch
from tilth.core.errors import PlanError
from tilth.core.layout import Mesh
from tilth.plan.batch import MicroBatchLimits, RowTable, check_plan, plan_batch

CAPACITY = 10


def table_of(lengths):
    sizes = np.array(lengths, np.int64)
    return RowTable(sizes, np.minimum(sizes, 1), np.arange(len(sizes)))


def plan_of(lengths, ranks, units, in_step=False):
    return plan_batch(table_of(lengths), None, ranks, MicroBatchLimits(CAPACITY, in_step=in_step), units=units)


lengths = st.lists(st.integers(1, 4 * CAPACITY), max_size=12)


@given(lengths, st.sampled_from([1, 2]), st.booleans())
def test_every_row_is_on_one_rank_and_in_as_many_parts_as_its_unit_has(sizes, apart, in_step):
    plan, table = plan_of(sizes, 4 * apart, 4, in_step), table_of(sizes)
    assert sorted(np.concatenate(plan.rows)) == list(range(len(sizes)))
    for first in range(0, 4 * apart, 4):
        parts = [part.learn for part in plan.ranks[first : first + 4]]
        for rank, micros in enumerate(parts):
            check_plan(micros, table.take(plan.rows[first + rank]))
            for micro in (m for m in micros if m.several):
                theirs = [[m for m in parts[peer] if m.check == micro.check] for peer in micro.ranks]
                assert rank in micro.ranks and all(len(found) >= 1 for found in theirs)
                assert micro.lengths.sum() <= CAPACITY * len(micro.ranks)
                assert bool(len(micro.rows)) == (rank == micro.ranks[0])
            held = [sizes[row] for row in plan.rows[first + rank]]
            assert all(sum(held[i] for i in m.rows) <= CAPACITY for m in micros if not m.several)
        for peer in range(1, 4):
            shared = [[(m.ranks, m.check) for m in parts[r] if {0, peer} <= {*m.ranks}] for r in (0, peer)]
            assert shared[0] == shared[1]  # in one order


@given(lengths)
def test_in_step_a_unit_has_one_place_on_all_of_its_ranks(sizes):
    plain, parts = (([p.learn for p in plan_of(sizes, 4, 4, in_step).ranks]) for in_step in (False, True))
    blanks = [[m for m in micros if not (m.several or len(m.rows))] for micros in parts]
    if any(m.several for micros in plain for m in micros):
        assert len({len(micros) for micros in parts}) == 1
    for micros, padded, blank in zip(plain, parts, blanks):
        assert len(padded) - len(blank) == len(micros)
        for at, micro in enumerate(padded):
            assert all(parts[peer][at].check == micro.check for peer in micro.ranks)
    assert not any(m for micros in plain for m in micros if not (m.several or len(m.rows)))


def test_a_row_longer_than_all_ranks_together_is_refused():
    assert plan_of([2 * CAPACITY], 2, 2).ranks[1].learn[0].several
    with raises(PlanError, "layout.hdp") as told:
        plan_of([3, 2 * CAPACITY + 1], 2, 2)
    assert str(2 * CAPACITY + 1) in str(told.value)


def test_an_axis_of_rows_and_tokens_is_no_copy_of_rows():
    mesh = Mesh.of({"pp": 2, "fsdp": 2, "hdp": 3, "tp": 2})
    assert (mesh.units, mesh.pieces, mesh.count("rows"), mesh.copies) == (3, 1, 6, ("dp", "hdp", "cp"))
    assert Mesh.of({"cp": 2, "dp": 3}).pieces == 2 and Mesh.of({"cp": 2, "dp": 3}).units == 1
    assert Axis("hdp", ("rows", "tokens"), "").undivided(2)


def test_rows_are_dealt_and_answered_once(monkeypatch):
    sizes = np.array([9, 25, 4, 12, 7, 3], np.int32)
    batch = Batch({"length": sizes, "name": np.arange(6)}, {})
    mesh, how = Mesh.of({"hdp": 3, "tp": 2}), Transfer("plan", "rows", limits=MicroBatchLimits(CAPACITY))
    dealt = deal(how, mesh, evenly, [batch], {})
    assert dealt.answers == [True, False] * 3  # ranks along tp have the same
    given_rows = [arguments.args[0]["name"].tolist() for arguments in dealt.arguments[::2]]
    assert sorted(row for rows in given_rows for row in rows) == list(range(6))
    plans = [arguments.kwargs["plan"].score for arguments in dealt.arguments[::2]]
    assert any(micro.several for micro in plans[0])
    answers = [a.args[0] if i % 2 == 0 else None for i, a in enumerate(dealt.arguments)]
    assert gather(how, dealt, answers)["name"].tolist() == list(range(6))


@pytest.mark.parametrize("units", [1, 2])
def test_a_batch_without_rows_has_a_plan(units):
    plan = plan_of([], 2, units)
    assert [len(rows) for rows in plan.rows] == [0, 0] and not any(part.learn for part in plan.ranks)


# ---- the benchmark ----


def seen(*micros):
    """What a rank of the benchmark saw: (ranks, seconds) of its micro-batches."""
    return script("hdp.py").Found([1.0], [1.0], 1.0, [(ranks, seconds, 0) for ranks, seconds in micros], 0)


def test_the_replay_waits_for_all_ranks_of_a_unit():
    end, idle = script("hdp.py").makespan([seen(((0,), 3.0), ((0, 1), 2.0)), seen(((0, 1), 4.0), ((1,), 1.0))])
    assert (end, idle) == (8.0, 1 - 10 / 16)  # from 3 to 7 together, then 1 alone


def test_a_row_of_the_benchmark_fails_for_other_results_and_bytes():
    good = {"relative_error": 1e-7, "short_bytes": 0, "sent_bytes": 8, "planned_bytes": 8}
    failures = script("hdp.py").failures
    assert failures(good) == failures(good | {"planned_bytes": None}) == []
    for change in ({"relative_error": float("nan")}, {"short_bytes": 4}, {"sent_bytes": 9}, {"loss": float("inf")}):
        assert len(failures(good | change)) == 1
