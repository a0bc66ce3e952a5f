"""Group tests find the machine that is faulty, for all sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core.errors import ArgumentError
from tilth.guard.replay import DualPhase, failed_groups

SIZES = [(m, n) for n in range(1, 13) for m in range(1, n + 1)]


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
