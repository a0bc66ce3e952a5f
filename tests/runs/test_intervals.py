"""Intervals hold what a plain set of integers holds, in the fewest pairs."""

import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tilth.runs.state import Intervals

PAIRS = st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 9)).map(lambda one: (one[0], sum(one))), max_size=30)


def plain(pairs):
    return {i for start, stop in pairs for i in range(start, stop)}


def check(found, expected):
    assert plain(found) == expected
    assert all((i in found) == (i in expected) for i in range(-40, 50))
    assert all(start < stop for start, stop in found)
    assert all(stop < start for (_, stop), (start, _) in pairwise(found))


@given(PAIRS)
def test_they_hold_what_a_plain_set_holds(pairs):
    found, expected = Intervals(), set()
    for start, stop in pairs:
        found.add(start, stop)
        expected |= {*range(start, stop)}
        check(found, expected)


@given(st.permutations(range(12)))
def test_single_ids_in_any_order_become_one_pair(order):
    found = Intervals()
    for i in order:
        found.add(i)
    assert found == [(0, 12)]


@dataclass
class State:
    taken: Intervals = field(default_factory=Intervals)


@given(PAIRS)
def test_they_survive_a_checkpoint_s_json(pairs):
    stored = json.loads(json.dumps(asdict(State(Intervals(pairs)))))
    check(Intervals(stored["taken"]), plain(pairs))
