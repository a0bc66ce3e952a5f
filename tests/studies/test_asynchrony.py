"""Simulation of asynchronous runs: against arithmetic and a loop over decode steps, and its guarantees in all modes."""

import random
from dataclasses import replace

import pytest
from async_counted import CountedCase, CountedRun, simulated
from async_lengths import length_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tilth_studies.asynchrony import (
    AsyncMode,
    AsyncSimulation,
    RolloutCosts,
    RolloutJob,
    SimulatedReplica,
    modes,
    simulate,
)

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import PlanError
from tilth.plan.repack import ReplicaLimits

MODES = modes(3) | {
    "rounds": AsyncMode(staleness=3, rounds=0.25),
    "bounded": AsyncMode(staleness=3, rounds=0.25, bounded=True),
    "bounded by 0": AsyncMode(staleness=0, rounds=0.3, bounded=True),
    "its own pace in rounds": AsyncMode(rounds=0.25, repacks=True),
}
TAIL = random.Random(5).choices([10, 20, 30, 40, 400], weights=[6, 6, 6, 6, 1], k=997)
JOB = RolloutJob(
    RolloutCosts(
        step=0.01, row=0.001, kv_token=1e-6, prefill=1e-5, train=0.5, train_token=1e-3, sync=0.2, publish=0.1, relay=0.2
    ),
    ReplicaLimits(tokens=4_000, rows=16),
    replicas=4,
    devices=4,
    samples=32,
    group=4,
    prompt=8,
    lengths=TAIL,
    updates=8,
)


@pytest.mark.parametrize("mode, period", [("sync", 2.2), ("one-step", 1.2), ("partial", 1.2), ("bounded by 0", 2.2)])
def test_one_row_by_hand(mode, period):
    """100 steps of 10 ms, an update of 1 s, weights in 0.2 s: one after the other, or beside each other."""
    costs = RolloutCosts(step=0.01, train=1.0, sync=0.2)
    job = RolloutJob(costs, ReplicaLimits(1_000, 1), 1, 1, 1, 1, 1, [100])
    assert simulate(job, MODES[mode]).samples_per_minute == pytest.approx(60 / period)


def test_free_is_as_fast_as_the_slower_side():
    costs = RolloutCosts(step=0.01, train=3.0, publish=0.5)
    job = RolloutJob(costs, ReplicaLimits(1_000, 1), 1, 1, 1, 1, 1, [100])
    slow_trainer = simulate(job, MODES["free"])
    assert slow_trainer.samples_per_minute == pytest.approx(60 / 3.5)
    assert slow_trainer.trainer_idle < 0.2 < slow_trainer.replica_idle
    slow_replica = simulate(replace(job, costs=replace(costs, train=0.1, publish=0.0)), MODES["free"])
    assert slow_replica.samples_per_minute == pytest.approx(60)
    assert slow_replica.replica_idle < 0.01  # the last update


def step_by_step(lengths, job):
    """Seconds in which one replica decodes rows, a step at a time; a list of numbers to do, youngest last."""
    costs, waiting, live, now = job.costs, [(n, 0) for n in lengths], [], 0.0
    while waiting or live:
        tokens = sum(job.prompt + done for _, done in live)
        while waiting:
            size = job.prompt + waiting[0][1]
            if len(live) == job.limits.rows or tokens + size + len(live) + 1 > job.limits.tokens:
                break
            now += costs.prefill * (size if waiting[0][1] else job.prompt / job.group)
            live.append(waiting.pop(0))
            tokens += size
        if tokens + len(live) > job.limits.tokens and len(live) > 1:
            waiting.insert(0, live.pop())
            continue
        now += max(costs.step, costs.row * len(live)) + costs.kv_token * tokens
        live = [(n, done + 1) for n, done in live if done + 1 < n] if live else live
    return now


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(70, 400),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.004]),
    st.sampled_from([0.0, 1e-4]),
)
def test_a_replica_against_single_steps(lengths, tokens, rows, row, kv):
    """Closed form from event to event: batches that shrink, wait, and are preempted."""
    costs = RolloutCosts(step=0.01, row=row, kv_token=kv, prefill=1e-4, train=1.0)
    job = RolloutJob(costs, ReplicaLimits(tokens, rows), 1, 1, len(lengths), 1, 8, lengths, updates=2)
    sync = simulate(job, MODES["sync"])
    assert sync.seconds == pytest.approx(2 * (step_by_step(lengths, job) + 1.0), rel=1e-9)


def rows_of(simulation):
    """Numbers of all rows that have not been trained."""
    groups = [*simulation.ready, *simulation.open.values()]
    found = [row.number for group in groups for row in group]
    found += [row.number for one in simulation.replicas for row in one.landing or ()]
    return found + [n for r in simulation.replicas for n in (*r.live, *(row.number for row in r.waiting))]


@pytest.mark.parametrize("name", MODES)
@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(420, 1_500), st.integers(1, 3))
def test_no_row_is_lost_or_trained_twice(name, seed, replicas, tokens, ahead):
    lengths = random.Random(seed).sample(TAIL, 50)
    limits = ReplicaLimits(tokens, 16)
    job = replace(JOB, lengths=lengths, replicas=replicas, limits=limits, ahead=ahead, updates=5)
    simulation = AsyncSimulation(job, MODES[name])
    outcome = simulation.run()
    left = rows_of(simulation)
    assert len(set(left)) == len(left) == simulation.given - job.samples * len(simulation.ends)
    assert all(len(group) == job.group for group in simulation.ready)
    assert sum(outcome.staleness.values()) == pytest.approx(1)
    for replica in simulation.replicas:
        held = sum(job.prompt + row.length - (row.end - replica.steps) for row in replica.live.values())
        assert held == replica.tokens <= tokens and len(replica.live) <= 16


@pytest.mark.parametrize("name", MODES)
def test_limits_hold_at_every_event(name, monkeypatch):
    advance, seen = SimulatedReplica.advance, []

    def checked(self, steps):
        advance(self, steps)
        seen.append(self.job.limits.hold(self.tokens, len(self.live)))

    monkeypatch.setattr(SimulatedReplica, "advance", checked)
    simulate(replace(JOB, limits=ReplicaLimits(700, 6)), MODES[name])
    assert all(seen) and len(seen) > 100


def test_staleness_of_each_mode():
    ages = {name: simulate(replace(JOB, updates=20), mode).staleness for name, mode in MODES.items()}
    assert set(ages["sync"]) == {0} and set(ages["one-step"]) == {0, 1}  # the first update is of the first weights
    assert max(ages["3-step"]) <= 2 * 3 - 1 and max(ages["3-step"]) > 1
    assert max(ages["partial"]) >= 1 and max(ages["free"]) >= 1
    assert max(ages["rounds"]) > 3 == max(ages["bounded"]) and set(ages["bounded by 0"]) == {0}


def test_what_has_ended_returns_with_its_round():
    """Of 10 and 100 steps, 30 a round: the first is there after 0.3 s. The third begins with the next round after its
    admission and is there with the end of that, but a bound waits for the second."""
    costs = RolloutCosts(step=0.01, train=0.1)
    job = RolloutJob(costs, ReplicaLimits(1_000, 2), 1, 1, 1, 1, 1, [10, 100], updates=3)
    for staleness, bounded, second in ((1, True, 1.0), (1, False, 0.9), (3, False, 0.6)):
        simulation = AsyncSimulation(job, AsyncMode(staleness=staleness, rounds=0.3, bounded=bounded))
        simulation.run()
        assert [time for time, _ in simulation.ends[:2]] == pytest.approx([0.4, second + 0.1])


def test_no_replica_waits_for_the_round_of_another_one():
    """Of 10, 100 and 10 steps, one at a time on each of two: the second begins and ends beside both others."""
    job = RolloutJob(
        RolloutCosts(step=0.01, train=0.1), ReplicaLimits(1_000, 1), 2, 1, 1, 1, 1, [10, 100, 10], updates=3
    )
    simulation = AsyncSimulation(job, AsyncMode(staleness=3, rounds=0.3))
    simulation.run()
    assert [time for time, _ in simulation.ends] == pytest.approx([0.2, 0.3, 1.1])


def test_the_order_of_modes_under_a_long_tail():
    """Bound by rollouts: every freedom is faster than the one before, and consolidated tails are faster still."""
    job = replace(JOB, costs=RolloutCosts(step=0.1, train=0.1, sync=0.05), replicas=8, updates=24)
    job = replace(job, limits=ReplicaLimits(20_000, 16))
    found = {name: simulate(job, mode) for name, mode in MODES.items()}
    rates = {name: outcome.samples_per_minute for name, outcome in found.items()}
    assert rates["sync"] < 0.6 * rates["3-step"] and rates["one-step"] < rates["3-step"] < rates["partial"]
    assert 1.5 * rates["one-step"] < rates["free"] < 0.9 * rates["free+repack"]
    assert found["free+repack"].moves and found["free+repack"].kv_use > found["free"].kv_use
    assert found["sync"].replica_idle > 0.3 > 0.05 > found["free"].replica_idle


def test_equal_jobs_have_equal_outcomes():
    assert all(simulate(JOB, mode) == simulate(JOB, mode) for mode in MODES.values())


@pytest.mark.parametrize(
    "change, key",
    [
        ({"lengths": []}, "lengths"),
        ({"lengths": [3, 0]}, "lengths"),
        ({"replicas": 0}, "replicas"),
        ({"samples": 30}, "samples"),
        ({"limits": ReplicaLimits(407, 4)}, "limits.tokens"),
        ({"buffer": 0}, "buffer"),
    ],
)
def test_jobs_that_cannot_run(change, key):
    with raises(PlanError, key):
        replace(JOB, **change)


def test_a_rate_needs_two_updates():
    with raises(PlanError, "updates"):
        simulate(replace(JOB, updates=1), MODES["sync"])


def test_weights_that_all_load_together_wait_for_the_rounds_under_way():
    """Of 10 and 100 steps on two replicas. The first update is done at 0.2 s, amid a round that ends at 0.3 s; after
    0.2 s of loading the second row goes on at 0.5 s, with 70 steps left, and its update is done at 1.3 s."""
    costs = RolloutCosts(step=0.01, train=0.1, sync=0.2)
    job = RolloutJob(costs, ReplicaLimits(1_000, 1), 2, 1, 1, 1, 1, [10, 100], updates=2)
    simulation = AsyncSimulation(job, AsyncMode(staleness=1, rounds=0.3, together=True))
    simulation.run()
    assert [time for time, _ in simulation.ends] == pytest.approx([0.2, 1.3])


def test_moves_in_counted_rounds_gain_as_much_as_their_simulation():
    """Of the run's own books, hand-outs and plans; replicas take weights once they have no rows."""
    lengths, found = [min(length_of(i), 224) for i in range(8192)], {}
    for every in (0, 1):
        case = CountedCase(4, 5, every, lengths, steps=40)
        found[every] = run = CountedRun(case).run()
        assert simulated(case) == pytest.approx(run["samples_per_round"], rel=0.1)
    assert found[1]["samples_per_round"] > 1.1 * found[0]["samples_per_round"]
    assert found[1]["moved"] > 100 and not found[0]["moved"]


@pytest.mark.parametrize(
    "mode",
    [AsyncMode(rounds=1.0, bounded=True), AsyncMode(staleness=1, bounded=True), AsyncMode(staleness=1, together=True)],
)
def test_a_mode_without_what_it_needs(mode):
    with raises(PlanError, "mode"):
        simulate(JOB, mode)
