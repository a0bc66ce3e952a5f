"""A slow rank and its cost: runs on paper with and without it, and what must not be taken for one."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.run_jobs import Job
from tests.examples import examples
from tests.guard import stuck
from tilth.analysis import slow_rank as module
from tilth.analysis.run_graph import read_steps
from tilth.analysis.run_replay import RunModel
from tilth.analysis.slow_rank import FEWEST, TRIED, SlowRankWatch, gains, judged
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.layout import Mesh
from tilth.guard.verdict import Verdict
from tilth.trace.spans import recorder, span

STEPS = 12


def update(factor, forward=1.0):
    passes = [("forward", forward * factor, {}), ("backward", 2 * forward * factor, {})] * 2
    return [*passes, ("all_reduce", 0.1, {"bytes": 4_000_000}), ("optimizer", 0.05 * factor)]


def job(factors, steps=STEPS, more=lambda step: 0.0):
    """Ranks whose work takes these times as long; factors: of (step, rank). more: seconds of an evaluation."""
    made = Job(4, delay=0.01, reply=0.005)
    for step in range(steps):
        with made:
            made.think(0.02)
            made.do("policy.update", {rank: update(factors(step, rank)) for rank in range(4)})
            if more(step):
                made.do("policy.evaluate", {rank: [("infer", more(step), {})] for rank in range(4)})
    return made


def found(made):
    model = RunModel(read_steps(made.events))
    ranks, gained, ratios = gains(model)
    return judged(model.steps.steps, model.steps.recorded, ranks, gained, ratios)


@given(st.floats(1.2, 3.0), st.integers(0, 3))
@settings(max_examples=examples(8), deadline=None, derandomize=True)
def test_the_cost_is_what_the_run_loses(factor, rank):
    slow = job(lambda step, at: factor if at == rank else 1.0)
    lost = np.mean(slow.seconds) - np.mean(job(lambda step, at: 1.0).seconds)
    verdict = found(slow)
    assert verdict.ranks == (rank,)
    assert verdict.details["seconds"] == pytest.approx(lost, rel=1e-3)
    assert verdict.details["ratio"] == pytest.approx(factor, rel=1e-2)


def test_ranks_with_calls_of_other_lengths_are_compared_as_a_whole():
    made = Job(2)
    for _ in range(STEPS):
        with made:
            made.do(
                "policy.update", {0: update(1.0), 1: [("forward", 3.0, {}), *update(1.0)[2:], ("backward", 9.0, {})]}
            )
    ranks, gained, _ = gains(RunModel(read_steps(made.events)))
    assert ranks.tolist() == [0, 1] and gained[:, 1].min() > 0 > gained[:, 0].max() - 1e-9


def noisy(seed, ranks=24):
    """Ranks whose work varies from step to step, one of which may be slow all the time."""
    random = np.random.default_rng(seed)
    usual = random.uniform(0.95, 1.05, ranks)
    usual[random.integers(ranks)] *= random.choice([1.0, 1.15, 1.4, 2.0])
    made = Job(ranks, delay=0.01, reply=0.005)
    for _ in range(STEPS):
        factors = usual * random.lognormal(0.0, 0.1, ranks)
        with made:
            made.do("policy.update", {rank: update(factors[rank]) for rank in range(ranks)})
    return RunModel(read_steps(made.events))


def test_the_few_ranks_that_are_tried_have_the_verdict_of_all():
    named = []
    for seed in range(6):
        model = noisy(seed)
        several, every = ((*gains(model, most),) for most in (4, 24))
        at = np.isin(every[0], several[0])
        assert len(several[0]) == 4 and at.sum() == 4 and len(every[0]) == 24
        assert np.array_equal(several[1], every[1][:, at]) and np.array_equal(several[2], every[2][at])
        verdicts = [judged(model.steps.steps, model.steps.recorded, *made) for made in (several, every)]
        assert verdicts[0] == verdicts[1]
        named.append(verdicts[0] is not None)
    assert {*named} == {True, False}


def test_replays_do_not_grow_with_the_ranks(monkeypatch):
    model, tried, times = noisy(0, ranks=80), [], RunModel.times
    monkeypatch.setattr(RunModel, "times", lambda own, some: tried.append(some.shape[1]) or times(own, some))
    monkeypatch.setattr(module, "CACHE", 4 * 8 * 5 * len(model.order))
    gains(model)
    assert sum(tried) == TRIED + 1 and max(tried) == 5  # with the steps as recorded


HEALTHY = {
    "even": (lambda step, rank: 1.0, lambda step: 0.0),
    "another in each step": (lambda step, rank: 1.6 if rank == step % 4 else 1.0, lambda step: 0.0),
    "a long evaluation": (lambda step, rank: 1.0, lambda step: 60.0 if step == 5 else 0.0),
    "a first step that compiles": (lambda step, rank: 40.0 if step == 0 else 1.0, lambda step: 0.0),
    "one rank compiles": (lambda step, rank: 40.0 if step < 2 and rank == 1 else 1.0, lambda step: 0.0),
    "a load for three steps": (lambda step, rank: 3.0 if 4 <= step < 7 and rank == 3 else 1.0, lambda step: 0.0),
    "a few percent": (lambda step, rank: 1.05 if rank == 2 else 1.0, lambda step: 0.0),
}


@pytest.mark.parametrize("case", HEALTHY)
def test_no_rank_is_named_where_none_is_slow(case):
    factors, more = HEALTHY[case]
    assert found(job(factors, more=more)) is None


def slow(rank):
    return Verdict("slow", (rank,), f"rank {rank} costs")


def test_a_rank_is_told_once_after_two_looks_and_again_after_it_was_well():
    watch = SlowRankWatch()
    looks = [slow(1), slow(1), slow(1), None, slow(1), slow(2), slow(2), slow(1), slow(1)]
    told = [watch.take(verdict, at) for at, verdict in enumerate(looks)]
    assert [one.ranks[0] if one else None for one in told] == [None, 1, None, None, None, None, 2, None, 1]
    assert watch.take(slow(3), -1) is None  # too few steps: nothing is known


def test_a_look_is_taken_in_a_thread_and_told_at_a_later_step(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "slow_rank", lambda run, since: (slow(1), since + 10))
    said, noted = [], []
    directory = SimpleNamespace(path=tmp_path, note_finding=noted.append)
    run = SimpleNamespace(state=SimpleNamespace(step=0), say=said.append, directory=directory)
    watch = SlowRankWatch(every=0.0)
    watch.on_run_start(run)
    for step in range(1, 9):
        watch.on_step_end(run, step, {})
        watch._thread.join()
        time.sleep(0.01)
        watch._due = 0.0
    assert said == ["warning: slow: rank 1 costs"] and noted[0]["ranks"] == (1,)
    watch.on_run_end(run, {})


@pytest.mark.slow
@pytest.mark.dist
def test_the_cost_in_a_real_job_is_within_5_percent_of_the_loss(tmp_path):
    """Four workers whose work is to sleep, as a device works beside its host; rank 2 sleeps twice as long in a part."""
    took = dict[int, float]()
    with open_cluster("local", 4) as cluster, recorder.to(tmp_path / "events", cluster.rank):
        group = cluster.group("policy", f"{stuck.HERE}:Sleeper", {}, Mesh.of({"dp": 4}))
        cluster.trace(tmp_path / "events", 0)
        for step in range(1, 41):
            with span("step", step=step) as whole:
                group.update(2 if step > 20 else -1, 0.04)
            took[step] = whole.seconds
    lost = np.median([took[i] for i in range(22, 41)]) - np.median([took[i] for i in range(2, 21)])
    verdict, last = module.slow_rank(tmp_path, since=21)
    assert (verdict.ranks, last) == ((2,), 40)
    assert verdict.details["seconds"] == pytest.approx(lost, rel=0.05), (lost, verdict)
    assert module.slow_rank(tmp_path, since=40) == (None, -1)


def test_too_few_steps_give_no_verdict(tmp_path):
    assert module.slow_rank(tmp_path)[1] == -1 and FEWEST <= STEPS
