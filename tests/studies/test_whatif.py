"""What-if analysis: a job worked out on paper, invariants, and causes that were put in and must come out."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_schedules import by_type, orders, synthetic
from tilth_studies.cause import alikeness, diagnose
from tilth_studies.straggler_format import from_table
from tilth_studies.whatif import TraceModel, what_if, worst_workers

from tests.examples import examples

USUAL = by_type(
    forward_compute=1.0, backward_compute=2.0, forward_send=0.02, forward_recv=0.02, backward_send=0.02,
    backward_recv=0.02, params_all_gather=0.3, grads_reduce_scatter=0.4, optimizer=0.2,
)  # fmt: skip


def paper():
    """Two stages, two micro-batches, two dp ranks; forward 1 s, backward 2 s, transfers free. The worker of dp rank 1
    and stage 1 is half as fast. Starts and ends by hand; waiting counts in the durations of transfers."""
    rows = []
    for dp, slow in ((0, 1), (1, 2)):
        back = [2, 3 * slow, 1 + 3 * slow, 1 + 6 * slow]  # gradients of micro-batches 0 and 1 leave stage 1
        turn = 1 + 3 * slow
        rows += [
            (dp, 0, "forward-compute", 0, 0, 0, 1), (dp, 0, "forward-compute", 1, 1, 1, 2),
            (dp, 0, "forward-send", 0, -1, 1, 1), (dp, 0, "forward-send", 1, -1, 2, 1 + slow if slow > 1 else 2),
            (dp, 0, "backward-recv", 0, -1, 1, turn), (dp, 0, "backward-compute", 0, 0, turn, turn + 2),
            (dp, 0, "backward-recv", 1, -1, turn, back[3]), (dp, 0, "backward-compute", 1, 1, back[3], back[3] + 2),
            (dp, 1, "forward-recv", 0, -1, 0, 1), (dp, 1, "forward-compute", 0, 0, 1, 1 + slow),
            (dp, 1, "forward-recv", 1, -1, 1 + slow, 1 + slow), (dp, 1, "backward-compute", 0, 0, 1 + slow, turn),
            (dp, 1, "backward-send", 0, -1, turn, turn), (dp, 1, "forward-compute", 1, 1, turn, turn + slow),
            (dp, 1, "backward-compute", 1, 1, turn + slow, back[3]), (dp, 1, "backward-send", 1, -1, back[3], back[3]),
        ]  # fmt: skip
    names = ("dp_rank", "stage", "optype", "seq_id", "mb_id", "start_ts", "end")
    columns = dict(zip(names, map(list, zip(*rows))))
    columns["duration"] = [float(b - a) for a, b in zip(columns["start_ts"], columns.pop("end"))]
    columns["start_ts"] = [float(a) for a in columns["start_ts"]]
    return from_table(pa.table({**columns, "step": [7] * len(rows), "mc": [0] * len(rows)}))


def test_a_job_worked_out_on_paper():
    found = what_if(paper())
    assert found.recorded == pytest.approx([15]) and found.replayed == pytest.approx([15])
    assert found.ideal == pytest.approx([3 * 3.75])  # forward 1.25 and backward 2.5 s in the mean
    assert found.slowdown == pytest.approx(4 / 3) and found.waste == pytest.approx(1 / 4) and found.error == 0
    alone = 1.25 + 2 * 6 + 2.5
    assert found.exact[1, 1] == pytest.approx(alone / 11.25)
    assert found.exact[1, 0] == pytest.approx(1)  # faster than the mean, but the other dp rank is not
    assert found.by_stage[1].mean == pytest.approx(alone / 11.25)
    assert found.by_dp[1].mean == pytest.approx(15 / 11.25)
    assert found.by_optype["forward-compute"].mean == pytest.approx((1 + 2 * (2 + 2.5) + 2.5) / 11.25)
    assert found.worst == [(1, 1)]
    assert found.m_w.seconds == pytest.approx(1 + 2 * 3.75 + 2) and found.m_w.share == pytest.approx(1.2)
    assert found.m_s.share == pytest.approx(1.2) and found.m_s.added_seconds == pytest.approx(alone)


def noisy(change, seed=0, *, stages=4, dp=4, batches=8, steps=4, noise=0.02, base=USUAL):
    rng = np.random.default_rng(seed)

    def durations(trace):
        took = base(trace) * rng.lognormal(0, noise, trace.start.shape)
        change(trace, took, rng)
        return took

    return synthetic(orders("1f1b", stages, batches), durations, dp=dp, steps=steps)


def computes(trace):
    return trace.named("forward-compute", "backward-compute")


def slow_worker(trace, took, rng):
    took[computes(trace) & (trace.stage == 2), :, 1] *= 2


def slow_stage(trace, took, rng):
    took[computes(trace) & (trace.stage == trace.stages - 1)] *= 1.6


def lengths(trace, took, rng):
    """A micro-batch has its cost on all stages, forward and backward alike."""
    _, steps, dp = took.shape
    cost = rng.lognormal(0, 0.4, (int(trace.micro_batch.max()) + 1, steps, dp))
    mine = computes(trace)
    took[mine] *= cost[trace.micro_batch[mine]]


def pauses(trace, took, rng):
    mine = trace.named("forward-compute")
    took[mine] += 6.0 * (rng.random(took[mine].shape) < 0.03)


def network(trace, took, rng):
    mine = trace.named("grads-reduce-scatter")
    took[mine] += 20.0 * (rng.random(took[mine].shape) < 0.1)


CAUSES = {
    "slow-worker": slow_worker, "stage-imbalance": slow_stage, "sequence-lengths": lengths,
    "garbage-collection": pauses, "communication": network,
}  # fmt: skip


@pytest.mark.parametrize("kind", CAUSES)
@pytest.mark.parametrize("seed", range(4))
def test_the_cause_that_was_put_in_comes_out_first(kind, seed):
    model = TraceModel(noisy(CAUSES[kind], seed))
    found = what_if(model.trace, model)
    cause = diagnose(model, found)
    assert cause.findings[0].kind == kind, cause
    assert 0.5 <= cause.findings[0].share < 1.5 and cause.text.startswith(cause.findings[0].text)
    if kind == "slow-worker":
        assert cause.findings[0].where == ({"dp": 1, "stage": 2, "rank": 9},)
    if kind == "stage-imbalance":
        assert cause.findings[0].where == ({"stage": 3},)
    if kind == "communication":
        assert cause.findings[0].where == ({"optype": "grads-reduce-scatter"},)


def test_an_even_job_has_no_cause():
    model = TraceModel(noisy(lambda *_: None))
    cause = diagnose(model, what_if(model.trace, model))
    assert cause.findings == () and cause.text.startswith("no straggler: S is 1.0")


def test_one_dp_rank_with_a_long_last_stage_is_no_slow_worker():
    model = TraceModel(noisy(slow_stage, dp=1))
    assert [f.kind for f in diagnose(model, what_if(model.trace, model)).findings] == ["stage-imbalance"]


def test_predicted_time_without_the_slow_worker_is_that_of_the_job_without_it():
    found = what_if(noisy(slow_worker, noise=0))
    mended = what_if(noisy(lambda *_: None, noise=0))
    assert found.m_w.seconds == pytest.approx(mended.replayed.mean(), rel=0.05)


def test_exact_worker_scores_are_those_of_full_replays():
    model = TraceModel(noisy(lengths))
    found = what_if(model.trace, model)
    for stage in range(4):
        for dp in range(4):
            keep = np.zeros((len(model.stage), 4), bool)
            keep[model.stage == stage, dp] = True
            assert found.exact_per_step[stage, dp] * found.ideal == pytest.approx(model.seconds(keep), rel=1e-12)


def test_blocks_of_steps_change_nothing(monkeypatch):
    trace = noisy(lengths)
    whole = what_if(trace)
    monkeypatch.setattr("tilth_studies.whatif.BLOCK", 1)
    small = what_if(trace)
    assert (small.exact_per_step == whole.exact_per_step).all() and (small.replayed == whole.replayed).all()
    assert (small.m_w, small.m_s, small.m_l) == (whole.m_w, whole.m_s, whole.m_l)


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 100))
def test_scale_and_names_of_dp_ranks_do_not_matter(seed, scale):
    trace = noisy(lengths, seed, stages=2, dp=3, batches=3, steps=2)
    found = what_if(trace)
    times = what_if(dataclasses.replace(trace, start=trace.start * scale, duration=trace.duration * scale))
    assert times.slowdown == pytest.approx(found.slowdown) and times.replayed == pytest.approx(found.replayed * scale)
    turned = dataclasses.replace(trace, start=trace.start[..., ::-1], duration=trace.duration[..., ::-1])
    assert what_if(turned).exact == pytest.approx(found.exact[:, ::-1])


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**31))
def test_a_longer_operation_never_makes_a_step_shorter(seed):
    model = TraceModel(noisy(lengths, seed, stages=2, dp=2, batches=3, steps=1))
    before = model.times(model.real)
    longer = model.real.copy()
    longer[seed % len(longer), 0, seed % 2] += 0.5
    after = model.times(longer)
    assert (before - 1e-12 <= after).all() and (after <= before + 0.5 + 1e-12).all()


def test_correlation_is_within_workers():
    """Stages of different size would make any job look correlated when pooled."""
    r, variation = alikeness(noisy(slow_stage))
    assert abs(r) < 0.5 and variation < 0.05
    r, variation = alikeness(noisy(lengths))
    assert r > 0.95 and variation > 0.2


def test_equal_scores_take_the_lower_rank():
    scores = np.ones((2, 40))
    assert worst_workers(scores, np.arange(80)[::-1].reshape(2, 40)) == [(39, 1), (38, 1), (37, 1)]


def test_clocks_that_differ_do_not_make_negative_transfers():
    trace = noisy(lambda *_: None)
    trace.start[trace.named("forward-recv")] += 1.0  # its clock is a second ahead: sends end before it was posted
    assert TraceModel(trace).real.min() > -0.01
