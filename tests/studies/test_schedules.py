"""Synthetic schedules against their closed forms, and replay against a plain loop over the same dependencies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_schedules import by_type, orders, synthetic, to_table
from tilth_studies.dependencies import dependencies
from tilth_studies.straggler_format import OPTYPES, from_table
from tilth_studies.whatif import TraceModel, what_if

from tests.errors import raises
from tests.examples import examples
from tilth.analysis.replay import ACROSS, ALONE, TOGETHER, Graph, schedule
from tilth.core.errors import DataError

PLAIN = by_type(forward_compute=1.0, backward_compute=2.0)
HALVES = by_type(forward_compute=1.0, backward_compute=1.0, weight_compute=1.0)


def seconds(kind, stages, batches, chunks=1, durations=PLAIN, **options):
    return synthetic(orders(kind, stages, batches, chunks), durations, **options).seconds[0]


@pytest.mark.parametrize("stages, batches", [(1, 1), (1, 5), (2, 2), (3, 7), (4, 2), (4, 8), (8, 32)])
def test_1f1b_takes_micro_batches_and_stages_less_one(stages, batches):
    assert seconds("1f1b", stages, batches, dp=2) == pytest.approx((batches + stages - 1) * 3)


@pytest.mark.parametrize("stages, batches, chunks", [(1, 3, 2), (2, 4, 2), (3, 6, 3), (4, 4, 2), (4, 8, 2), (4, 16, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(stages, batches, chunks):
    found = seconds("interleaved", stages, batches, chunks, dp=2)
    assert found == pytest.approx((batches * chunks + stages - 1) * 3)


@pytest.mark.parametrize("stages, batches", [(1, 3), (3, 7), (4, 8), (4, 12), (8, 32)])
def test_zero_bubble_leaves_a_third_of_the_bubble(stages, batches):
    bubble = (stages - 1) * (1 + 1 - 1)
    assert seconds("zero-bubble", stages, batches, durations=HALVES) == pytest.approx(batches * 3 + bubble)


@pytest.mark.parametrize("reduce", [0.5, 2.0, 3.0, 50.0])
def test_overlapped_reduction_hides_behind_the_last_backward_of_another_chunk(reduce):
    """One stage of two chunks: chunk 1 is reduced under the last backward of chunk 0, then chunk 0."""
    durations = by_type(forward_compute=1.0, backward_compute=2.0, grads_reduce_scatter=reduce, optimizer=0.5)
    apart = seconds("interleaved", 1, 3, 2, durations=durations, dp=2)
    hidden = seconds("interleaved", 1, 3, 2, durations=durations, dp=2, overlapped=True)
    assert apart == pytest.approx(3 * 2 * 3 + 2 * reduce + 0.5)
    assert hidden == pytest.approx(3 * 2 * 3 + max(reduce - 2, 0) + reduce + 0.5)


def test_tail_and_transfers_of_1f1b_with_one_micro_batch():
    """Nothing overlaps: gather, two forwards, two backwards, a transfer each way, reduction, clip, optimizer."""
    durations = by_type(
        params_all_gather=0.5, forward_compute=1.0, backward_compute=2.0, forward_send=0.1, forward_recv=0.1,
        backward_send=0.2, backward_recv=0.2, layernorm_grads_all_reduce=0.01, embedding_grads_all_reduce=0.02,
        grads_reduce_scatter=0.7, optimizer_clip_main_grad=0.03, optimizer=0.4,
    )  # fmt: skip
    assert seconds("1f1b", 2, 1, durations=durations, dp=3) == pytest.approx(
        0.5 + 2 + 4 + 0.1 + 0.2 + 0.01 + 0.02 + 0.7 + 0.03 + 0.4
    )


@pytest.mark.parametrize("kind, chunks", [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_recorded_step_is_replayed_to_the_second(kind, chunks, overlapped):
    """Recorded with its waiting, by way of the format: durations come back, and nothing is left unexplained."""
    rng = np.random.default_rng(3)
    drawn = {}

    def durations(trace):
        drawn[0] = rng.lognormal(0, 1, trace.start.shape)
        return drawn[0]

    trace = synthetic(orders(kind, 4, 8, chunks), durations, dp=3, steps=2, overlapped=overlapped)
    read = from_table(to_table(trace))
    model = TraceModel(read)
    assert model.times(model.real) == pytest.approx(trace.seconds, rel=1e-12)
    rows = np.lexsort((trace.seq, trace.stage, trace.optype))  # the reader's order
    assert model.real == pytest.approx(drawn[0][rows][model.schedule.order], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind, chunks", [("1f1b", 1), ("interleaved", 2)])
def test_all_equal_means_nothing_lost(kind, chunks):
    found = what_if(synthetic(orders(kind, 4, 8, chunks), PLAIN, dp=2, steps=3))
    assert found.slowdown == pytest.approx(1) and found.exact == pytest.approx(1) and found.error == pytest.approx(0)
    assert (found.m_w.share, found.m_s.share) == (0, 0)


@pytest.mark.parametrize(
    "wish, message",
    [
        (("gpipe", 2, 2), "no schedule 'gpipe'; there are 1f1b, interleaved, zero-bubble"),
        (("1f1b", 0, 2), "must be positive"),
        (("interleaved", 4, 6, 2), "interleaved needs a multiple of 4 micro-batches, not 6"),
        (("1f1b", 2, 2, 2), "1f1b has 1 chunk a stage, not 2"),
    ],
)
def test_schedules_that_cannot_be(wish, message):
    with pytest.raises(DataError, match=message):
        orders(*wish)


def test_each_stage_computes_each_micro_batch_once():
    for kind, chunks, kinds in (("1f1b", 1, 2), ("interleaved", 3, 2), ("zero-bubble", 1, 3)):
        for order in orders(kind, 4, 8, chunks):
            assert len(set(order)) == len(order) == kinds * 8 * chunks


def loop(graph, duration):
    """The definition, an operation at a time."""
    n, steps, dp = duration.shape
    end = np.full((n, steps, dp), -1.0)
    for s in range(steps):
        known = np.full((n, dp), np.nan)
        while np.isnan(known).any():
            for i in range(n):
                members = [j for j in range(n) if graph.group[j] == graph.group[i]]
                for d in range(dp):
                    ranks = range(dp) if graph.kind[i] == ACROSS else [d]
                    waits = [known[b, r] for j in members for r in ranks for b in graph.before[graph.after == j]]
                    known[i, d] = max([0.0, *waits] if not np.isnan(waits).any() else [np.nan]) + duration[i, s, d]
        end[:, s] = known
    return end


@st.composite
def graphs(draw):
    n = draw(st.integers(1, 9))
    kind = np.full(n, ALONE)
    group = np.arange(n)
    for i in range(n):
        kind[i] = draw(st.sampled_from([ALONE, ALONE, ACROSS]))
    if n > 1 and draw(st.booleans()):  # neighbours in a topological order may start together: no edge between them
        i = draw(st.integers(0, n - 2))
        kind[i : i + 2], group[i + 1] = TOGETHER, i
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n) if group[a] != group[b]]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    before, after = np.array(edges, np.int64).reshape(-1, 2).T
    return Graph(before, after, group, kind)


@settings(max_examples=examples(60), deadline=None)
@given(graphs(), st.integers(1, 3), st.integers(0, 2**31))
def test_replay_is_the_loop_over_operations(graph, dp, seed):
    duration = np.random.default_rng(seed).random((len(graph.group), 2, dp))
    plan = schedule(graph)
    assert plan.run(duration[plan.order]) == pytest.approx(loop(graph, duration)[plan.order], rel=1e-12)


def test_operations_in_a_circle_are_an_error():
    graph = Graph(np.array([0, 1]), np.array([1, 0]), np.arange(2), np.zeros(2, int))
    with raises(DataError, "graph.cycle"):
        schedule(graph)


def test_no_operation_starts_before_what_it_waits_for_and_members_end_together():
    trace = synthetic(orders("1f1b", 3, 6), by_type(forward_compute=1.0, forward_send=0.5, forward_recv=0.5), dp=2)
    graph = dependencies(trace)
    end = trace.start + trace.duration
    assert (trace.start[graph.after] >= end[graph.before] - 1e-12).all()
    sends = trace.named("forward-send")
    for group in np.unique(graph.group[sends]):
        members = np.flatnonzero(graph.group == group)
        assert {OPTYPES[k] for k in trace.optype[members]} == {"forward-send", "forward-recv"}
        assert np.ptp(end[members], axis=0) == pytest.approx(0)
