"""ETTR under faults: the arithmetic of closed forms, a second-by-second oracle, sizes of the spare pool."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tilth_studies.faults import DAY, FaultTrace, Incident, NodeFault, incidents, read_trace, scaled
from tilth_studies.survival import MECHANISMS, SurvivalPolicy, simulate, standby, switched_off, worst_window

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import ArgumentError, DataError

TRACE = Path(__file__).parents[3] / "shared" / "data" / "faults" / "infinitehbd_fault_trace.json"
SURE = SurvivalPolicy(hangs=0.0, again=0.0)
EAGER = replace(SURE, memory=False, load=0.0, wake=0.0, spares=10**9)


def trace_of(*at, nodes=4, seconds=20000.0, lasts=500.0):
    return FaultTrace(nodes, seconds, tuple(NodeFault(a, a + lasts, i % nodes) for i, a in enumerate(at)))


@pytest.fixture(scope="module")
def year():
    if not TRACE.is_file():
        pytest.skip("the trace of a year is not here")
    return read_trace(TRACE, 400)


PUBLISHED = [(600, 600, 1800, 96.64), (180, 300, 1800, 97.79), (60, 120, 600, 99.23), (10, 30, 60, 99.89)]


@pytest.mark.parametrize(("detect", "restart", "interval", "percent"), [*PUBLISHED, (10, 0, 1e-3, 99.98)])
def test_a_year_of_400_nodes_costs_what_arithmetic_says(year, detect, restart, interval, percent):
    found = simulate(year, replace(EAGER, detect=detect, restart=restart, interval=interval))
    assert found.incidents == 482
    assert abs(100 * found.ettr - percent) < 0.1
    lost = 482 * (detect + restart + interval / 2)  # if incidents never meet
    assert abs(100 * (1 - lost / year.seconds) - percent) < 0.005


def test_ten_times_the_nodes_have_ten_times_the_faults(year):
    large = scaled(year, 4000)
    assert len(large.faults) == 10 * len(year.faults)
    assert len({fault.node for fault in large.faults}) == 2310
    part = scaled(year, 1000)
    assert max(fault.node for fault in part.faults) < 1000
    assert scaled(year, 400) == year


def test_our_settings_reach_the_goal_at_4000_nodes(year):
    assert simulate(scaled(year, 4000), SurvivalPolicy(spares=27)).ettr > 0.989


def test_every_mechanism_pays(year):
    large, policy = scaled(year, 4000), SurvivalPolicy(spares=27)
    whole = simulate(large, policy).ettr
    for mechanism in MECHANISMS:
        assert simulate(large, switched_off(policy, mechanism)).ettr < whole - 0.005, mechanism


# ---- oracles ----


def ticks(trace, p, found):
    """Productive seconds of a policy without hangs, luck, or spares' limits, second by second."""
    strikes = {int(incident.at): incident for incident in found}
    done, unsaved, idle, ran = 0, 0, 0, 0
    for second in range(int(trace.seconds)):
        if second in strikes:
            if not idle:
                down = {node for node, _ in strikes[second].down}
                held = p.memory and not any((node + trace.nodes // 2) % trace.nodes in down for node in down)
                lost = ran % int(p.step) if held else unsaved
                done, unsaved = done - lost, unsaved - min(lost, unsaved)
                extra = 0 if held else int(p.load)
            idle = int(p.detect + p.wake + p.restart) + (extra if not idle else 0)
            ran = 0
        if idle:
            idle -= 1
            continue
        done, ran, unsaved = done + 1, ran + 1, (unsaved + 1) % int(p.interval)
    return done


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(1, 5990), max_size=8, unique=True),
    st.tuples(st.integers(0, 300), st.integers(1, 300), st.integers(0, 90)),
    st.integers(1, 40),
    st.integers(30, 2000),
    st.booleans(),
)
def test_it_agrees_with_counting_seconds(at, prices, step, interval, memory):
    detect, restart, load = prices
    policy = replace(
        SURE, detect=detect, restart=restart, load=load, step=step, interval=interval, memory=memory, spares=10**9
    )
    trace = FaultTrace(4, 6000.0, tuple(NodeFault(float(a), a + 50.0, a % 4) for a in sorted(at)))
    found = incidents(trace.faults)
    assert simulate(trace, policy).ettr * 6000 == pytest.approx(ticks(trace, policy, found), abs=1e-3)


@given(st.lists(st.tuples(st.floats(0.1, 40), st.floats(0.1, 40), st.floats(0.1, 1)), max_size=6), st.floats(1, 60))
def test_the_worst_window_is_that_of_all_windows(parts, window):
    segments, now = [], 0.0
    for gap, length, rate in parts:
        segments.append((now + gap, now + gap + length, rate))
        now += gap + length
    seconds = max(now, 1.0) + 1.0
    found = worst_window(segments, seconds, window)

    def share(begin):
        end = begin + min(window, seconds)
        return sum(max(0.0, min(b, end) - max(a, begin)) * r for a, b, r in segments) / min(window, seconds)

    tried = [share(max(0.0, seconds - window) * i / 400) for i in range(401)]
    assert found <= min(tried) + 1e-9
    assert found >= min(tried) - seconds / 400 * 2 / min(window, seconds)


# ---- mechanisms one by one ----


def test_a_second_failure_during_a_recovery_begins_it_anew():
    far, near = trace_of(1000.0, 9000.0), trace_of(1000.0, 1601.0)
    policy = replace(EAGER, detect=0.0, restart=900.0, interval=1e-3)
    assert simulate(far, policy).lost["restart"] == pytest.approx(1800.0)
    assert simulate(near, policy).lost["restart"] == pytest.approx(601.0 + 900.0)


def test_a_failure_of_a_node_and_its_peer_goes_back_to_the_disk():
    pair = FaultTrace(4, 20000.0, (NodeFault(5500.0, 6000.0, 0), NodeFault(5500.0, 6000.0, 2)))
    other = FaultTrace(4, 20000.0, (NodeFault(5500.0, 6000.0, 0), NodeFault(5500.0, 6000.0, 1)))
    policy = replace(SURE, interval=1000.0)
    assert (simulate(pair, policy).from_disk, simulate(other, policy).from_disk) == (1, 0)
    assert simulate(pair, policy).lost["recompute"] == pytest.approx(500.0)


def test_spares_new_nodes_repair_and_fewer_nodes():
    trace = trace_of(5000.0, lasts=4000.0)
    warm = simulate(trace, replace(SURE, spares=1)).lost["replace"]
    cold = simulate(trace, replace(SURE, spares=0, cold=600.0)).lost["replace"]
    repair = simulate(trace, replace(SURE, spares=0, cold=math.inf)).lost["replace"]
    shrunk = simulate(trace, replace(SURE, spares=0, cold=math.inf, without="shrink", restart=0.0))
    assert (warm, cold) == (5.0, 600.0)
    assert repair == pytest.approx(3999.0)  # the repair began with the fault, a second before it was seen
    assert shrunk.lost["replace"] == 0
    assert shrunk.lost["fewer"] == pytest.approx((9000.0 - 5001.0) / 4)


def test_restarts_that_fail_end_in_a_stop_for_a_person():
    trace = trace_of(*(1000.0 * i for i in range(1, 15)))
    found = simulate(trace, replace(SURE, again=0.8, restarts=2), seed=1)
    assert found.stops > 0
    assert simulate(trace, replace(SURE, again=0.8, restarts=0), seed=1).stops == 0
    assert simulate(trace, replace(SURE, again=0.8, restarts=2), seed=1) == found


# ---- spares ----


def test_the_published_pool():
    assert [standby(n, 0.0012) for n in (128, 256, 512, 1024)] == [2, 2, 3, 4]
    assert [standby(n, 0.0011) for n in (128, 256, 512, 1024)] != [2, 2, 3, 4]
    assert [standby(n, 0.0013) for n in (128, 256, 512, 1024)] != [2, 2, 3, 4]


@example(2, 10, 0.99)  # met exactly by one
@given(st.integers(1, 60), st.integers(0, 30), st.sampled_from([0.5, 0.9, 0.99]))
def test_the_pool_is_the_quantile(nodes, percent, quantile):
    p, below, k = Fraction(percent, 100), Fraction(0), -1
    while below < Fraction(str(quantile)):
        k += 1
        below += math.comb(nodes, k) * p**k * (1 - p) ** (nodes - k)
    assert standby(nodes, percent / 100, quantile) == k


# ---- traces ----


def event(at=1.0, node="a", kind="fault_start"):
    return {"node_id": node, "event_time": at, "event_type": kind}


def written(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        {},
        [],
        [1],
        [event(at="soon")],
        [event(at=-1.0)],
        [event(at=True)],
        [event(at=float("nan"))],
        [event(node=5)],
        [event(kind="fault")],
        [event(kind="fault_end")],
    ],
)
def test_a_trace_that_is_none(tmp_path, content):
    with raises(DataError, "trace"):
        read_trace(written(tmp_path, content), 4)


def test_more_nodes_than_the_cluster_has(tmp_path):
    with raises(DataError, "trace_nodes"):
        read_trace(written(tmp_path, [event(), event(node="b")]), 1)
    with raises(DataError, "trace"):
        read_trace(tmp_path / "nowhere.json", 1)


def test_starts_and_ends_of_a_node_belong_together(tmp_path):
    path = written(tmp_path, [event(1.0), event(2.0, kind="fault_end"), event(2.0, "b"), event(3.0)])
    assert read_trace(path, 2).faults == (
        NodeFault(DAY, 2 * DAY, 0),
        NodeFault(2 * DAY, math.inf, 1),
        NodeFault(3 * DAY, math.inf, 0),
    )


def test_faults_within_ten_minutes_are_one_incident():
    faults = [
        NodeFault(0.0, 9.0, 0),
        NodeFault(600.0, 700.0, 1),
        NodeFault(1200.0, 1300.0, 2),
        NodeFault(1801.0, 1900.0, 0),
    ]
    assert incidents(faults) == [
        Incident(0.0, ((0, 9.0), (1, 700.0), (2, 1300.0))),
        Incident(1801.0, ((0, 1900.0),)),
    ]


@pytest.mark.parametrize("key", ["detect", "restart", "spares", "step", "interval", "hangs", "again", "cold"])
def test_settings_that_mean_nothing(key):
    with raises(ArgumentError, key):
        SurvivalPolicy(**{key: -1})
