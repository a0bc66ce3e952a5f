"""Odd machines: scores against brute force, properties of Minder's sheet, and rules that are learned."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilth_studies.odd_machine_fit import in_order, peaks, with_floors, with_thresholds

from tests.errors import raises
from tests.examples import examples
from tilth.config.errors import ArgumentError
from tilth.guard.odd_machines import (
    MISSING,
    MetricRule,
    OddMachineRules,
    OddMachineWatch,
    SampleTable,
    align,
    distances,
    leave_one_out,
    levels,
    sustained,
)

CPU, DUTY, LOST = (
    MetricRule("cpu", 0, 100, 0.01, 5),
    MetricRule("duty", 0, 100, 0.01, 5),
    MetricRule(MISSING, 0, 1, 0.05, 5),
)
RULES = OddMachineRules((CPU, DUTY, LOST), window=8, continuity=30, cool_down=50)


def table(machines=8, seconds=120, seed=0, **changes):
    """Two metrics with a common wave and noise of 1 %."""
    rng = np.random.default_rng(seed)
    wave = 50 + 20 * np.sin(np.arange(seconds) / 7)
    values = wave[None, :, None] + rng.standard_normal((2, seconds, machines))
    names = tuple(f"node-{i}" for i in range(machines))
    return SampleTable(("cpu", "duty"), names, values.astype(np.float32), **changes)


def odd(machines=8, machine=2, metric=0, begin=40, length=60, by=15.0, **changes):
    made = table(machines, **changes)
    made.values[metric, begin : begin + length, machine] += by
    return made


@given(st.integers(4, 12), st.integers(0, 99))
@settings(max_examples=examples(30), deadline=None, derandomize=True)
def test_scores_equal_all_pairs(machines, seed):
    level = np.random.default_rng(seed).integers(0, 6, (3, machines)).astype(np.float32)
    pairs = np.abs(level[:, :, None] - level[:, None])
    np.testing.assert_allclose(distances(level), pairs.sum(2), atol=1e-6)
    for i in range(machines):
        rest = [j for j in range(machines) if j != i]
        among = pairs[:, rest][:, :, rest].sum((1, 2)) / ((machines - 1) * (machines - 2))
        expected = pairs[:, i, rest].mean(1) / (among + 0.5)
        np.testing.assert_allclose(leave_one_out(distances(level), 0.5)[:, i], expected, atol=1e-6)


def test_levels_equal_medians_of_five_and_means():
    made = table(5, 40)
    values = np.pad(made.values[0] / 100, ((2, 2), (0, 0)), mode="edge")
    medians = np.stack([np.median(values[i : i + 5], axis=0) for i in range(40)])
    expected = np.stack([medians[i : i + 8].mean(0) for i in range(33)])
    np.testing.assert_allclose(levels(made, CPU, 8), expected, atol=1e-6)


@given(st.integers(1, 9))
def test_the_smallest_of_windows_in_a_row(length):
    score = np.random.default_rng(length).random((9, 2))
    expected = [score[i : i + length].min(0) for i in range(10 - length)]
    np.testing.assert_array_equal(sustained(score, length), np.array(expected))
    assert len(sustained(score[: length - 1], length)) == 0


@pytest.mark.parametrize("machines", [4, 10, 300])
def test_an_odd_machine_is_named_in_jobs_of_any_size(machines):
    ranks = tuple((2 * i, 2 * i + 1) for i in range(machines))
    found = OddMachineWatch(RULES).detect(odd(machines, metric=1, ranks=ranks))
    assert (found.kind, found.ranks) == ("odd-machine", (4, 5))
    assert (found.details["machine"], found.details["metric"]) == ("node-2", "duty")
    assert 40 <= found.details["since"] <= 48 and found.details["alert"] <= 40 + 30 + 2 * 8 + 4


@given(st.integers(1, 30), st.integers(0, 60), st.floats(-500, 500), st.integers(0, 20))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_a_blip_shorter_than_the_span_never_alerts(length, begin, by, seed):
    assert OddMachineWatch(RULES).detect(odd(length=length, begin=begin, by=by, seed=seed)) is None


def test_the_order_of_machines_and_a_constant_change_nothing():
    made = odd(12)
    found = OddMachineWatch(RULES).detect(made).details
    order = np.random.default_rng(1).permutation(12)
    mixed = replace(made, machines=tuple(made.machines[i] for i in order), values=made.values[..., order])
    assert OddMachineWatch(RULES).detect(mixed).details == pytest.approx(found)
    moved = OddMachineWatch(RULES).detect(replace(made, values=made.values + 1000)).details
    assert {key: moved[key] for key in ("machine", "metric", "since")} == {
        key: found[key] for key in ("machine", "metric", "since")
    }


def test_identical_machines_and_short_tables_are_quiet():
    made = table()
    same = replace(made, values=np.repeat(made.values[..., :1], 8, axis=2))
    bare = replace(RULES, metrics=(replace(CPU, floor=0.0, threshold=1e-9),))
    assert OddMachineWatch(bare).detect(same) is None
    assert OddMachineWatch(RULES).detect(table(seconds=20)) is None
    assert OddMachineWatch(RULES).detect(odd(machines=3)) is None  # two others are no crowd


def test_the_most_telling_metric_counts_first_then_the_earliest_machine():
    made = odd(24, machine=5, metric=1, begin=20)
    made.values[0, 40:100, 2] += 15
    assert OddMachineWatch(RULES).detect(made).details["machine"] == "node-2"
    other = replace(RULES, metrics=(DUTY, CPU))
    assert OddMachineWatch(other).detect(made).details["machine"] == "node-5"
    made.values[1, 50:110, 1] += 15  # the fault spreads
    assert OddMachineWatch(other).detect(made).details["machine"] == "node-5"


def test_only_machines_of_one_role_are_compared():
    made = table(12, groups=(0,) * 11 + (1,))
    made.values[..., 11:] += 30
    assert OddMachineWatch(RULES).detect(made) is None
    assert OddMachineWatch(RULES).detect(replace(made, groups=())) is not None


def test_gaps_are_filled_within_a_machine_and_missing_ones_are_a_metric():
    made = table()
    made.values[0, 40:60, 3] = np.nan
    assert OddMachineWatch(RULES).detect(made) is None
    made.values[:, 40:, 3] = np.nan
    found = OddMachineWatch(RULES).detect(made)
    assert (found.details["machine"], found.details["metric"]) == ("node-3", MISSING)
    made.values[:, :, 3] = np.nan  # not one sample
    assert OddMachineWatch(RULES).detect(made).details["metric"] == MISSING


def test_a_machine_is_reported_once_until_it_was_healthy_for_the_cool_down():
    watch = OddMachineWatch(RULES)
    assert watch.detect(odd(begin=40, length=80)) is not None
    assert watch.detect(odd(begin=0, length=50, start=120.0)) is None  # it goes on
    assert watch.detect(odd(begin=40, length=60, start=240.0)) is not None  # healthy in between


def test_samples_are_aligned_to_the_nearest_tick():
    made = align(
        {"b": {"cpu": ([10.4, 12.1], [1, 3])}, "a": {"cpu": ([10.0, 11.1], [5, 6])}}, 1.0, ranks={"a": (0,), "b": (1,)}
    )
    assert made.machines == ("a", "b") and made.start == 10 and made.ranks == ((0,), (1,))
    np.testing.assert_array_equal(made.values[0], np.array([[5, 1], [6, np.nan], [np.nan, 3]]))


def test_rules_are_learned():
    plain = replace(RULES, metrics=(MetricRule("cpu", 0, 100), MetricRule("duty", 0, 100)))
    healthy = [table(seed=seed) for seed in range(4)]
    rules = with_floors(plain, healthy)
    assert all(0 < rule.floor < 0.01 for rule in rules.metrics)
    calm = np.stack([peaks(made, rules) for made in healthy])
    rules = with_thresholds(rules, calm, 1.5)
    ill = np.stack([peaks(odd(metric=1, seed=seed), rules) for seed in range(5, 8)])
    rules = in_order(rules, np.concatenate([calm, ill]), np.array([False] * 4 + [True] * 3))
    assert [rule.name for rule in rules.metrics] == ["duty", "cpu"]
    assert OddMachineWatch(rules).detect(odd(metric=1, seed=9)).details["machine"] == "node-2"
    assert all(OddMachineWatch(rules).detect(made) is None for made in healthy)


def test_bad_input_is_refused_by_its_key():
    made = table()
    for changes, key in (
        ({"values": made.values[0]}, "values"), ({"machines": ("a",) * 8}, "machines"), ({"interval": 0.0}, "interval"),
        ({"groups": (1,)}, "groups"), ({"ranks": ((1,),)}, "ranks"),
    ):  # fmt: skip
        with raises(ArgumentError, key):
            replace(made, **changes)
    for key, value in (("low", 100), ("floor", -1), ("threshold", 0)):
        with raises(ArgumentError, f"cpu.{'high' if key == 'low' else key}"):
            replace(CPU, **{key: value})
    for key, bad in (("metrics", ()), ("window", 0), ("continuity", float("nan")), ("cool_down", -1)):
        with raises(ArgumentError, key):
            replace(RULES, **{key: bad})
    with raises(ArgumentError, "metrics"):
        OddMachineWatch(OddMachineRules((MetricRule("heat", 0, 1),), 8, 30)).detect(made)
    with raises(ArgumentError, "a.cpu"):
        align({"a": {"cpu": ([2, 1], [0, 0])}}, 1.0)
    with raises(ArgumentError, "interval"):
        align({}, 0)
    with raises(ArgumentError, "series"):
        align({"a": {}}, 1.0)
    with raises(ArgumentError, "healthy"):
        with_floors(RULES, [])
    with raises(ArgumentError, "healthy"):
        with_thresholds(RULES, np.zeros((0, 3)), 1)
    with raises(ArgumentError, "margin"):
        with_thresholds(RULES, np.ones((1, 3)), 0)
