"""Plans of loaders against brute force, and for what they promise."""

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.errors import raises
from tests.work import work_of
from tilth.core.errors import PlanError
from tilth.plan.loaders import GAIN, place_loaders, plan_loaders, wrap

NAMES = "abcd"
costs = st.fixed_dictionaries({name: st.floats(1e-4, 10) for name in NAMES})
weights = st.dictionaries(st.sampled_from(NAMES), st.just(0.0) | st.floats(0.01, 100))
steps = st.lists(weights, min_size=1, max_size=4)
held = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9))


def weighted(ahead):
    return {name for step in ahead for name, weight in step.items() if weight > 0}


def seconds(cost, step, plan, cores):
    """Length of a step, by McNaughton: the longest work of a loader, or the mean of the cores."""
    work = {name: cost[name] * weight for name, weight in step.items() if weight > 0}
    return max(max(own / plan[name] for name, own in work.items()), sum(work.values()) / cores)


@given(costs, steps, st.integers(1, 8), held, st.integers(1, 12))
def test_every_source_with_a_weight_ahead_has_a_loader_and_no_other(cost, ahead, cores, now, cap):
    plan = plan_loaders(cost, ahead, cores, now, cap=cap)
    assert set(plan) == weighted(ahead) and all(plan.values())
    assert sum(plan.values()) <= max(cap, len(plan))


@given(costs, steps, st.integers(1, 8), held)
def test_a_step_ahead_is_as_short_as_with_any_number_of_loaders(cost, ahead, cores, now):
    plan, fresh = (plan_loaders(cost, ahead, cores, at, cap=99) for at in (now, {}))
    for step in ahead:
        if weighted([step]):
            best = seconds(cost, step, dict.fromkeys(NAMES, cores), cores)
            assert seconds(cost, step, fresh, cores) <= best * (1 + 1e-8)
            assert seconds(cost, step, plan, cores) <= best * (1 + GAIN + 1e-8)


@given(costs, steps, st.integers(1, 4))
def test_the_fewest_loaders_that_do_so(cost, ahead, cores):
    names = sorted(weighted(ahead))
    assume(names)
    plan = plan_loaders(cost, ahead, cores, {}, cap=99)
    for counts in itertools.product(range(1, cores + 1), repeat=len(names)):
        other = dict(zip(names, counts))
        best = dict.fromkeys(names, cores)
        pairs = [(seconds(cost, s, other, cores), seconds(cost, s, best, cores)) for s in ahead if weighted([s])]
        if all(own <= ideal for own, ideal in pairs):
            assert sum(counts) >= sum(plan.values())


@given(costs, weights, st.integers(1, 6), st.integers(1, 9))
def test_under_a_cap_the_longest_work_of_a_loader_is_as_short_as_can_be(cost, step, cores, cap):
    names = sorted(weighted([step]))
    assume(names and cap >= len(names))
    plan = plan_loaders(cost, [step], cores, {}, cap=cap)
    options = (dict(zip(names, n)) for n in itertools.product(range(1, cap + 1), repeat=len(names)) if sum(n) <= cap)
    best = min(seconds(cost, step, other, cores) for other in options)
    assert seconds(cost, step, plan, cores) == pytest.approx(best)


noise = st.lists(st.floats(-1, 1), min_size=len(NAMES), max_size=len(NAMES))


@given(costs, steps, st.integers(1, 8), st.integers(1, 12), st.lists(noise, max_size=4))
def test_costs_that_vary_less_than_the_gain_change_nothing(cost, ahead, cores, cap, varied):
    plan = plan_loaders(cost, ahead, cores, {}, cap=cap)
    # a need is a cost over the sum of costs, each off by the fourth root of 1 + gain; worst and best are compared
    room = (1 + GAIN) ** 0.25 * (1 - 1e-6)
    for signs in varied:
        measured = {name: cost[name] * room**sign for name, sign in zip(NAMES, signs)}
        assert plan_loaders(measured, ahead, cores, plan, cap=cap) == plan


def test_more_than_the_gain_changes_the_plan_and_only_where_it_pays():
    steps, now = [{"a": 1, "b": 1}], {"a": 2, "b": 2}
    assert plan_loaders({"a": 1, "b": 1}, steps, 4, now, cap=9) == now
    assert plan_loaders({"a": 1, "b": 1.4}, steps, 4, now, cap=9) == now
    assert plan_loaders({"a": 1, "b": 2}, steps, 4, now, cap=9) == {"a": 2, "b": 3}
    assert plan_loaders({"a": 1, "b": 9}, steps, 4, now, cap=9) == {"a": 1, "b": 4}


def test_loaders_are_there_before_a_weight_rises_and_go_when_it_has_fallen():
    ramp = [{"a": 1.0, "b": weight} for weight in (0, 0, 0, 3, 3, 0, 0, 0)]
    plan, seen = {}, []
    for step in range(len(ramp)):
        plan = plan_loaders({"a": 0.1, "b": 0.1}, ramp[step : step + 2], 4, plan, cap=9)
        seen.append((plan.get("a", 0), plan.get("b", 0)))
    assert seen == [(4, 0), (4, 0), (4, 3), (1, 3), (4, 3), (4, 0), (4, 0), (4, 0)]


@pytest.mark.parametrize(
    "change, key",
    [
        ({"costs": {"a": 1.0}}, "costs"),
        ({"costs": {"a": 1.0, "b": -1.0}}, "costs.b"),
        ({"costs": {"a": 1.0, "b": math.nan}}, "costs.b"),
        ({"weights_by_step": [{"a": 1.0, "b": math.inf}]}, "weights.b"),
        ({"weights_by_step": [{"a": -1.0}]}, "weights.a"),
        ({"cores": 0}, "cores"),
        ({"cap": 0}, "cap"),
        ({"gain": -0.1}, "gain"),
    ],
)
def test_a_number_that_is_none_is_refused(change, key):
    given = {"costs": {"a": 1.0, "b": 1.0}, "weights_by_step": [{"a": 1, "b": 1}], "cores": 2, "now": {}, "cap": 4}
    with raises(PlanError, key=key):
        plan_loaders(**(given | change))


def test_sources_without_costs_have_one_loader_each():
    assert plan_loaders({"a": 0.0, "b": 0.0}, [{"a": 1, "b": 1}], 4, {}, cap=9) == {"a": 1, "b": 1}
    assert plan_loaders({}, [], 4, {"a": 2}, cap=9) == {}


# -- processes -------------------------------------------------------------------------------------------------------

work = st.dictionaries(st.integers(0, 99), st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=30)


@given(work, st.integers(1, 12))
def test_work_is_conserved_and_the_same_in_each_part(own, parts):
    shares = wrap(own, parts)
    mean = sum(own.values()) / parts
    for name in own:
        assert sum(part.get(name, 0) for part in shares) == pytest.approx(1)
    for part in shares:
        assert sum(share * own[name] for name, share in part.items()) == pytest.approx(mean, rel=1e-6)
    assert sum(map(len, shares)) <= len(own) + parts - 1


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.integers(1, 6))
def test_on_cores_no_loader_computes_twice_at_once(own, cores):
    """McNaughton's theorem, by the moments at which ``wrap`` lets each loader of a plan compute."""
    cost = {str(i): one for i, one in enumerate(own)}
    plan = plan_loaders(cost, [dict.fromkeys(cost, 1)], cores, {}, cap=99)
    loaders = {f"{name}.{i}": cost[name] / count for name, count in plan.items() for i in range(count)}
    length, spans = sum(own) / cores, {name: [] for name in loaders}
    for part in wrap(loaders, cores):
        clock = 0.0
        for name, share in part.items():
            spans[name].append((clock, clock + share * loaders[name]))
            clock += share * loaders[name]
        assert clock <= length * (1 + 1e-6)
    for one in spans.values():
        assert all(a[1] <= b[0] + 1e-6 * length or b[1] <= a[0] + 1e-6 * length for a, b in itertools.pairwise(one))
        assert len(one) <= 2


def test_a_process_for_each_loader_or_all_on_the_cap():
    plan, own = {"a": 2, "b": 1}, {"a": 3.0, "b": 1.0}
    assert place_loaders(plan, own, 3) == [{"a": 0.5}, {"a": 0.5}, {"b": 1.0}]
    assert place_loaders(plan, own, 2) == [{"a": pytest.approx(2 / 3)}, {"a": pytest.approx(1 / 3), "b": 1.0}]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10)), min_size=7, max_size=20), st.integers(1, 6))
def test_shares_stay_while_the_processes_are_nearly_even(pairs, cap):
    before, after = (dict(enumerate(own)) for own in zip(*pairs))
    plan = dict.fromkeys(before, 1)
    now = place_loaders(plan, before, cap)
    then = place_loaders(plan, after, cap, now)
    mean = sum(after.values()) / cap
    worst = max(sum(share * after[name] for name, share in part.items()) for part in then)
    assert len(then) == cap and worst <= (1 + GAIN) * mean * (1 + 1e-6)
    assert place_loaders(plan, after, cap, then) == then


def test_shares_change_with_the_sources_and_with_uneven_work():
    now = place_loaders({"a": 1, "b": 1, "c": 1}, {"a": 1.0, "b": 1.0, "c": 2.0}, 2)
    assert now == [{"a": 1.0, "b": 1.0}, {"c": 1.0}]
    assert place_loaders({"a": 1, "b": 1, "c": 1}, {"a": 1.0, "b": 1.0, "c": 3.0}, 2, now) == now
    assert place_loaders({"a": 1, "b": 1, "c": 1}, {"a": 1.0, "b": 1.0, "c": 6.0}, 2, now) != now
    assert place_loaders({"b": 1, "c": 1, "d": 1}, {"b": 1.0, "c": 1.0, "d": 2.0}, 2, now)[1] == {"d": 1.0}


def test_work_of_a_plan_grows_as_the_sources():
    def plan(count):
        names = [f"source {i}" for i in range(count)]
        cost = {name: 1 + i % 7 for i, name in enumerate(names)}
        counts = plan_loaders(cost, [dict.fromkeys(names, 1)] * 8, 64, {}, cap=count)
        return place_loaders(counts, {name: float(cost[name]) for name in names}, 16)

    few, many = (work_of(lambda: plan(count)) for count in (300, 1200))
    assert many < 5 * few
