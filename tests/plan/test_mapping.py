"""The mapping search equals brute force, stays within memory, and never gets slower with more devices."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.plan.mapping import MappingProblem, Option, best, placements, search

ROLES = ("policy", "critic", "reference", "rollout")
STAGES = 3


def partitions(items):
    """All ways to label the items with set numbers, each partition once (restricted growth strings)."""
    for labels in product(range(len(items)), repeat=len(items)):
        if all(label <= max(labels[:i], default=-1) + 1 for i, label in enumerate(labels)):
            yield [tuple(x for x, at in zip(items, labels) if at == k) for k in range(max(labels) + 1)]


def pools_of(problem, roles, devices):
    """Seconds of the stages of every choice of layouts that fits."""
    for chosen in product(*(problem.options(role, devices, frozenset(roles)) for role in roles)):
        working = max(max(o.training for o in chosen), max(o.generation for o in chosen))
        if problem.base + sum(o.held for o in chosen) + working <= problem.memory:
            yield tuple(map(sum, zip(*(o.seconds for o in chosen))))


def brute_force(problem):
    """Least seconds of a step over all placements, splits and layouts; inf if nothing fits."""
    least = math.inf
    for groups in partitions(problem.roles):
        for split in product(problem.sizes, repeat=len(groups)):
            left = problem.devices - sum(split)
            if left < 0 or (problem.whole and left):
                continue
            for chosen in product(*(list(pools_of(problem, g, n)) for g, n in zip(groups, split))):
                least = min(least, sum(map(max, zip(*chosen))))
    return least


@st.composite
def problems(draw):
    roles = ROLES[: draw(st.integers(1, 3))]
    devices = draw(st.integers(1, 4))
    seconds = st.tuples(*[st.integers(0, 9).map(float)] * STAGES)
    option = st.builds(Option, st.none(), seconds, *[st.integers(0, 6)] * 3)
    table = {
        (role, n): draw(st.lists(option, min_size=0 if n == 1 else 1, max_size=3))
        for role in roles
        for n in range(1, devices + 1)
    }
    return MappingProblem(
        roles,
        lambda role, n, beside: table[role, n],
        tuple(range(1, devices + 1)),
        devices,
        draw(st.integers(4, 20)),
        draw(st.integers(0, 2)),
        draw(st.booleans()),
    )


@settings(max_examples=examples(50), deadline=None)
@given(problems())
def test_the_search_equals_brute_force_and_fits(problem):
    found, least = search(problem), brute_force(problem)
    assert [m.total for m in found[:1]] == ([pytest.approx(least)] if least < math.inf else [])
    for mapping in found:
        assert sorted(role for pool in mapping.pools for role in pool.roles) == sorted(problem.roles)
        assert mapping.devices == problem.devices if problem.whole else mapping.devices <= problem.devices
        assert all(problem.base + pool.memory <= problem.memory for pool in mapping.pools)
        assert all(pool.held == sum(o.held for o in pool.options) for pool in mapping.pools)
    assert len({m.placement for m in found}) == len(found) and [m.total for m in found] == sorted(
        m.total for m in found
    )


@settings(max_examples=examples(30), deadline=None)
@given(problems())
def test_more_devices_are_never_slower(problem):
    sizes = problem.sizes
    totals = []
    for devices in sizes:
        found = search(replace(problem, devices=devices, sizes=sizes[:devices], whole=False, found={}))
        totals.append(found[0].total if found else math.inf)
    assert totals == sorted(totals, reverse=True)


def test_all_set_partitions_once():
    assert [len(list(placements(ROLES[:n]))) for n in range(5)] == [1, 1, 2, 5, 15]  # Bell numbers
    assert {frozenset(map(frozenset, p)) for p in placements(ROLES)} == {
        frozenset(map(frozenset, p)) for p in partitions(ROLES)
    }


def scaled(role, devices, beside):
    """Stages generate and train of an actor and a critic: compute, and gradients that cost the same on any number."""
    return [Option(devices, (64 / devices if role == "actor" else 0.0, 64 / devices + 1), 1)]


def test_roles_share_devices_while_compute_dominates_and_part_when_a_fixed_cost_does():
    few, many = (MappingProblem(("actor", "critic"), scaled, tuple(range(1, n + 1)), n, 10) for n in (8, 256))
    together, apart = search(few)[0], search(many)[0]
    assert len(together.pools) == 1 and together.total == pytest.approx(64 / 8 + 2 * (64 / 8 + 1))
    assert len(apart.pools) == 2 and apart.total < 64 / 256 + 2 * (64 / 256 + 1)


def test_the_minimum_allocation_and_what_fits_nowhere():
    memory = MappingProblem(("a", "b"), lambda r, n, _: [Option(n, (1.0,), 12 // n)], (1, 2, 3, 4), 4, 8)
    assert memory.least(("a",)) == 2 and memory.least(("a", "b")) == 3
    assert [len(m.pools) for m in search(memory)] == [2, 1]
    assert search(replace(memory, memory=2, found={})) == []


def test_options_may_depend_on_the_roles_beside():
    def options(role, n, beside):
        return [Option(n, (5.0 if role == "policy" and "rollout" not in beside else 1.0,), 1)]

    found = search(MappingProblem(("policy", "rollout"), options, (1, 2), 2, 9))
    assert [(len(m.pools), m.total) for m in found] == [(1, 2.0), (2, 5.0)]


def test_items_that_another_beats_are_left_out():
    assert best([(1, 2), (2, 1), (2, 2), (1, 2), (0, 9)], lambda x: x) == [(1, 2), (2, 1), (0, 9)]
