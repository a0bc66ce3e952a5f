"""Causes in words: each rule on jobs that meet it and on jobs that just do not."""

import numpy as np
import pytest
from pipeline_schedules import by_type, orders, synthetic
from tilth_studies.cause import alikeness, diagnose, paused
from tilth_studies.whatif import TraceModel, what_if

USUAL = by_type(
    forward_compute=1.0, backward_compute=2.0, forward_send=0.02, forward_recv=0.02, backward_send=0.02,
    backward_recv=0.02, params_all_gather=0.3, grads_reduce_scatter=0.4, optimizer=0.2,
)  # fmt: skip


def job(change, *, kind="1f1b", stages=2, dp=4, batches=6, chunks=1, steps=3, seed=0, noise=0.01):
    rng = np.random.default_rng(seed)

    def durations(trace):
        took = USUAL(trace) * rng.lognormal(0, noise, trace.start.shape)
        change(trace, took, rng)
        return took

    return TraceModel(synthetic(orders(kind, stages, batches, chunks), durations, dp=dp, steps=steps))


def verdict(model):
    return diagnose(model, what_if(model.trace, model))


def rows(trace, name, stage):
    return np.flatnonzero(trace.named(name) & (trace.stage == stage))


def pause(count, seconds=9.0, backward=0.0):
    """Forwards of different workers and steps that take so much longer, their backwards too."""

    def change(trace, took, rng):
        for i in range(count):
            at = (int(rng.integers(6)), i % took.shape[1], i % took.shape[2])
            stage = i % trace.stages
            for name, extra in (("forward-compute", seconds), ("backward-compute", backward)):
                op = rows(trace, name, stage)[at[0]]
                took[op, at[1], at[2]] += extra

    return change


@pytest.mark.parametrize("kind, chunks", [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_pauses_are_counted_one_by_one(kind, chunks):
    def change(trace, took, rng):
        for at, (stage, step, dp) in enumerate([(0, 0, 0), (1, 0, 3), (1, 2, 1)]):
            took[rows(trace, "forward-compute", stage)[at], step, dp] += 5.0

    model = job(change, kind=kind, chunks=chunks)
    even, count = paused(model)
    assert count == 3
    moved = np.argwhere(even != model.real)
    assert len(moved) == 3 and {(int(s), int(d)) for _, s, d in moved} == {(0, 0), (0, 3), (2, 1)}
    assert even[tuple(moved.T)] == pytest.approx(1, abs=0.05)


def test_pauses_of_forwards_alone_are_garbage_collection():
    cause = verdict(job(pause(6)))
    assert cause.findings[0].kind == "garbage-collection" and cause.evidence["pauses_per_step"] == 2
    assert "2.0 forwards a step take more than 1.5 times" in cause.text


def test_a_micro_batch_that_is_long_both_ways_is_no_pause():
    model = job(pause(6, backward=18.0))
    assert paused(model)[1] == 0
    assert "garbage-collection" not in [f.kind for f in verdict(model).findings]


def scaled(spread, forward=True, backward=True):
    """Each micro-batch costs more or less on all stages."""

    def change(trace, took, rng):
        cost = rng.lognormal(0, spread, (6, *took.shape[1:]))
        for name, counts in (("forward-compute", forward), ("backward-compute", backward)):
            mine = np.flatnonzero(trace.named(name))
            took[mine] *= cost[trace.micro_batch[mine]] if counts else 1.0

    return change


def test_lengths_show_in_forward_and_backward():
    r, spread = alikeness(job(scaled(0.3)).trace)
    assert r > 0.99 and spread == pytest.approx(0.3, abs=0.08)
    cause = verdict(job(scaled(0.3)))
    assert [f.kind for f in cause.findings] == ["sequence-lengths"]
    assert cause.evidence["forward_backward_correlation"] == r and f"r = {r:.3f}" in cause.text


def test_spread_of_one_way_only_is_not_lengths():
    r, _ = alikeness(job(scaled(0.4, backward=False)).trace)
    assert abs(r) < 0.6
    assert "sequence-lengths" not in [f.kind for f in verdict(job(scaled(0.4, backward=False))).findings]


def test_correlation_without_spread_is_not_lengths():
    """What is nearly even may go together, too: the study's threshold alone would call it lengths."""
    model = job(scaled(0.06), noise=0.001)
    cause = verdict(model)
    assert cause.evidence["forward_backward_correlation"] > 0.95 and cause.evidence["forward_variation"] < 0.1
    assert "sequence-lengths" not in [f.kind for f in cause.findings]


def test_constant_times_have_no_correlation():
    assert alikeness(job(lambda *_: None, noise=0).trace) == pytest.approx((0, 0), abs=1e-12)


def test_lengths_and_a_long_last_stage_are_both_named():
    def change(trace, took, rng):
        scaled(0.3)(trace, took, rng)
        took[(trace.stage == 1) & trace.named("forward-compute", "backward-compute")] *= 1.5

    cause = verdict(job(change))
    assert sorted(f.kind for f in cause.findings) == ["sequence-lengths", "stage-imbalance"]
    assert cause.findings[0].share >= cause.findings[1].share
    assert cause.text == "; ".join(f.text for f in cause.findings)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_slow_on_one_worker_is_that_worker(stage):
    def change(trace, took, rng):
        took[(trace.stage == stage) & trace.named("forward-compute", "backward-compute"), :, 3] *= 2

    cause = verdict(job(change))
    assert [f.kind for f in cause.findings] == ["slow-worker"]
    assert cause.findings[0].where == ({"dp": 3, "stage": stage, "rank": 4 * stage + 3},)


def test_of_the_mended_workers_only_the_slow_are_named():
    """3 % of 64 are 2: the second is like all others."""

    def change(trace, took, rng):
        took[(trace.stage == 1) & trace.named("forward-compute", "backward-compute"), :, 30] *= 2

    model = job(change, dp=32)
    found = what_if(model.trace, model)
    assert len(found.worst) == 2
    assert [w["dp"] for w in diagnose(model, found).findings[0].where] == [30]


def test_shares_of_evidence_are_those_of_the_analysis():
    model = job(pause(6))
    found = what_if(model.trace, model)
    said = diagnose(model, found).evidence
    assert (said["share_workers"], said["share_last_stage"]) == (found.m_w.share, found.m_s.share)
    assert (said["share_communication"], said["share_within_stages"]) == (found.m_c.share, found.m_l.share)
    assert said["model_error"] == found.error and said["waste"] == found.waste


def test_no_single_cause_names_the_type_that_is_slowed_most():
    """Every backward differs for itself, and nothing else does."""

    def change(trace, took, rng):
        mine = np.flatnonzero(trace.named("backward-compute"))
        took[mine] *= rng.lognormal(0, 0.3, took[mine].shape)

    cause = verdict(job(change, dp=8))
    assert cause.findings == () and cause.text == "no single cause; backward-compute is slowed most"
