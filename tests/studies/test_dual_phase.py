"""Group tests find the machine that is faulty, for all sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilth_studies.dual_phase import DualPhase, GroupResult, judge

from tests.errors import raises
from tilth.core.errors import ArgumentError

SIZES = [(m, n) for n in range(1, 13) for m in range(1, n + 1)]


def failed_groups(groups, faulty):
    """Numbers of the groups with a faulty machine: what a replay would find."""
    return [number for number, group in enumerate(groups) if set(group) & set(faulty)]


def answer(plan, faulty):
    return plan.candidates(failed_groups(plan.first(), faulty), failed_groups(plan.second(), faulty))


@pytest.mark.parametrize("m, n", SIZES)
def test_each_machine_is_in_one_group_of_each_phase_and_is_found(m, n):
    plan = DualPhase(m, n)
    for groups in (plan.first(), plan.second()):
        assert sorted(x for group in groups for x in group) == list(plan.machines)
        assert {len(group) for group in groups} == {m} and len(groups) == n
    assert all(answer(plan, [x]) == (x,) for x in plan.machines)
    assert answer(plan, []) == ()


def test_the_example_of_the_paper():
    plan = DualPhase(4, 6)
    assert failed_groups(plan.first(), [13]) == [3] and failed_groups(plan.second(), [13]) == [1]


@given(st.sampled_from(SIZES), st.data())
def test_of_several_faults_all_are_among_the_candidates(size, data):
    plan = DualPhase(*size)
    faulty = data.draw(st.sets(st.sampled_from(plan.machines), min_size=1, max_size=3))
    found = answer(plan, faulty)
    assert faulty <= set(found) and len(found) <= len(faulty) ** 2


def test_groups_larger_than_their_number_are_refused():
    """They are ambiguous: of 3 groups of 4, two machines share both groups."""
    for m, n in ((4, 3), (0, 3)):
        with raises(ArgumentError, "size"):
            DualPhase(m, n)
    with raises(ArgumentError, "second"):
        DualPhase(2, 3).candidates([0], [3])


@pytest.mark.parametrize("machines, least, sizes", [(1, 1, (1, 1)), (2, 1, (1, 2)), (4, 1, (1, 4)), (9, 1, (3, 3)),
                                                    (16, 2, (4, 4)), (16, 4, (4, 4)), (6, 1, (2, 3))])  # fmt: skip
def test_groups_are_large_while_there_are_three_of_them(machines, least, sizes):
    plan = DualPhase.of(machines, least)
    assert (plan.size, plan.groups) == sizes


def test_machines_that_cannot_be_grouped_are_refused():
    for machines, least in ((4, 4), (3, 2)):
        with raises(ArgumentError, "ranks"):
            DualPhase.of(machines, least)


def judged(plan, faulty, recorded=None, finite=True, twice=True):
    """The verdict if these machines compute other bits, each its own."""

    def outcomes(groups, wrong):
        return [GroupResult(f"wrong {set(g) & wrong}" if set(g) & wrong else "right", finite, "rows 3") for g in groups]

    ranks = [10 + x for x in plan.machines]
    second = outcomes(plan.second(), set(faulty) if twice else set())
    return judge(plan, outcomes(plan.first(), set(faulty)), second, ranks, recorded)


@pytest.mark.parametrize("plan", [DualPhase(1, 3), DualPhase(2, 3), DualPhase(3, 4)])
def test_the_ranks_of_a_device_that_computes_wrongly_are_named(plan):
    for x in plan.machines:
        verdict = judged(plan, [x])
        assert (verdict.kind, verdict.ranks, verdict.details["cause"]) == ("corruption", (10 + x,), "device")
    once = judged(plan, [2], twice=False)
    assert 12 in once.ranks and not once.details["again"]


def test_data_records_and_ties():
    plan = DualPhase(2, 3)
    data = judged(plan, [], finite=False)
    assert (data.kind, data.details["cause"], "rows 3" in data.evidence) == ("not-finite", "data", True)
    assert judged(plan, []) is None and judged(plan, [], recorded=True) is None
    assert judged(plan, [], recorded=False).details["cause"] == "device"
    tie = judge(
        DualPhase(1, 2), [GroupResult("a"), GroupResult("b")], [GroupResult("a"), GroupResult("b")], [0, 1], None
    )
    assert tie.ranks == (0, 1) and not tie.details["majority"]
