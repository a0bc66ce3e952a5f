"""Books of asynchronous experience, against plain sets and the rule itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core.errors import DataError
from tilth.flows.ledger import Ledger
from tilth.runs.state import RunState

SIZE = 3


def books(bound=1, batch=2, *, buffer=2, fresh=False, state=None, version=0):
    return Ledger(bound, buffer, batch, fresh=fresh, version=version, state=state or RunState())


def ids(group):
    return set(range(group.first, group.stop))


class Loop:
    """A run of the books: each step begins what there is room for, lets some groups end, takes, and trains."""

    def __init__(self, ledger, steps):
        self.ledger, self.left, self.first, self.version = ledger, steps, 0, 0
        self.begun, self.out = {}, []

    def begin(self):
        ledger, count = self.ledger, self.ledger.room()
        for group in ledger.begin(range(count), self.first, SIZE):
            self.begun[group.first] = ledger.steps
            self.first += SIZE

    def step(self, choose):
        ledger = self.ledger
        self.left -= 1
        ledger.want(ledger.batch, self.left)
        self.begin()
        while not (taken := ledger.take()):
            flying = [group for group in ledger.open.values() if group.place < 0]
            ledger.end(flying[choose(len(flying))].first)
            assert ledger.begun - ledger.lost <= (ledger.steps + (ledger.bound or 0) + 1) * ledger.batch or (
                ledger.bound is None
            )
        self.out.append(taken)
        self.version += 1
        ledger.done()
        ledger.at(self.version)
        self.begin()


ORDERS = st.lists(st.integers(0, 10**6), min_size=1, max_size=60)


@given(bound=st.integers(1, 4), batch=st.integers(1, 4), fresh=st.booleans(), orders=ORDERS)
def test_whatever_ends_first_no_group_is_further_behind_than_the_bound(bound, batch, fresh, orders):
    """Each group is taken once, none is dropped, and nothing is left when the phase ends."""
    loop, steps = Loop(books(bound, batch, fresh=fresh), 12), 12
    source = iter(orders * 1000)
    for step in range(steps):
        loop.step(lambda count: next(source) % count)
        assert len(loop.out[-1]) == batch
        assert all(step - loop.begun[group.first] <= bound for group in loop.out[-1])
    everything = [i for taken in loop.out for group in taken for i in ids(group)]
    assert sorted(everything) == list(range(steps * batch * SIZE))
    assert not loop.ledger.open and not loop.ledger.dropped
    assert list(loop.ledger.consumed) == [(0, steps * batch * SIZE)] == list(loop.ledger.admitted)


def test_without_looking_ahead_the_bound_would_break():
    """Three groups of one version, one a step: the newest may not be taken before those that are due after it."""
    ledger = books(2, 1, fresh=True)
    ledger.want(1, 9)
    old = ledger.begin(range(3), 0, SIZE)
    for group in old:
        ledger.end(group.first)
    assert ledger.take() == [old[2]]
    ledger.done()
    ledger.at(1)
    ledger.want(1, 8)
    (new,) = ledger.begin([7], 9, SIZE)
    ledger.end(new.first)
    (taken,) = ledger.take()
    assert taken is old[1] and new.first in ledger.open


@given(buffer=st.integers(1, 4), batch=st.integers(1, 3), orders=ORDERS)
def test_without_a_bound_the_buffer_holds_back(buffer, batch, orders):
    loop, source = Loop(books(None, batch, buffer=buffer), 10), iter(orders * 1000)
    for _ in range(10):
        loop.step(lambda count: next(source) % count)
        assert len(loop.ledger.open) <= buffer * batch
    assert not loop.ledger.open and not loop.ledger.too_old(0)


def test_what_was_dropped_makes_room_and_what_ends_first_is_taken_first():
    ledger = books(1, 2)
    ledger.want(2, 5)
    groups = ledger.begin(range(4), 0, SIZE)
    assert ledger.room() == 0
    ledger.drop([groups[1].first])
    assert ledger.room() == 1 and list(ledger.dropped) == [(3, 6)]
    for place in (3, 2, 0):
        ledger.end(groups[place].first)
    assert ledger.take() == [groups[2], groups[3]]


def test_the_state_has_what_a_resume_needs():
    ledger, state = books(1, 2), RunState()
    ledger.want(2, 5)
    groups = ledger.begin([4, 5, 6, 7], 0, SIZE)
    for group in groups[:3]:
        ledger.end(group.first)
    taken = ledger.take()
    ledger.drop([taken[1].first])
    ledger.done()
    ledger.store(state)
    assert state.flying == [(6, SIZE, 6, 0), (9, SIZE, 7, 0)] and state.admitted == [(0, 12)]
    assert state.consumed == [(0, 3)] and state.dropped == [(3, 6)] and state.ended == [(0, 9)]


def test_beginning_more_than_the_bound_allows_is_an_error():
    ledger = books(1, 2)
    ledger.begin(range(4), 0, SIZE)
    with raises(DataError, "experience.capacity"):
        ledger.begin([9], 12, SIZE)


def test_a_sample_is_begun_once_and_consumed_or_dropped_once():
    state = RunState()
    state.admitted.add(0, 3)
    with raises(DataError, "experience.admitted"):
        books(state=state).begin([1], 0, SIZE)
    state.consumed.add(0, 3)
    ledger = books(1, 1, state=state)
    ledger.begin([1], 0, SIZE, again=True)
    with raises(DataError, "experience.once"):
        ledger.drop([0])


@given(bound=st.integers(1, 4), batch=st.integers(1, 4), syncs=st.integers(2, 3), orders=ORDERS)
def test_versions_between_two_steps_make_no_more_room_than_the_bound_allows(bound, batch, syncs, orders):
    ledger, source, first, version = books(bound, batch), iter(orders * 1000), 0, 0
    for step in range(8):
        ledger.want(batch, 7 - step)
        for _ in range(syncs):
            ledger.drop(ledger.stale())
            first += SIZE * len(ledger.begin(range(ledger.room()), first, SIZE))
            version += 1
            ledger.at(version)
        ledger.drop(ledger.stale())
        first += SIZE * len(ledger.begin(range(ledger.room()), first, SIZE))
        while not ledger.take():
            flying = [group for group in ledger.open.values() if group.place < 0]
            ledger.end(flying[next(source) % len(flying)].first)
        ledger.done()
    assert ledger.steps == 8


@pytest.mark.parametrize(("bound", "stale"), [(1, [0]), (2, [])])
def test_a_loop_that_syncs_twice_in_a_step_leaves_some_behind(bound, stale):
    ledger = books(bound, 1)
    ledger.begin([1], 0, SIZE)
    for version in (3, 7):
        ledger.at(version)
    assert ledger.stale() == stale and ledger.age(0) == 2 and ledger.age(3) == 1 and ledger.age(7) == 0


def test_groups_that_go_on_after_a_resume_are_as_far_behind_as_before():
    before, state = books(2, version=3), RunState()
    before.begin([0], 0, SIZE)
    for version in (5, 8):
        before.at(version)
    before.store(state)
    after = books(2, state=RunState(**vars(state)), version=8)
    assert [after.age(version) for version in (3, 5, 8)] == [2, 1, 0] == [before.age(v) for v in (3, 5, 8)]
    ((first, size, prompt, version),) = state.flying
    after.want(2, 1)
    after.begin([prompt], first, size, version, again=True)
    after.at(9)
    assert after.stale() == [0]
