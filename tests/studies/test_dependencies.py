"""The dependency model, edge by edge, against what the format's published description says."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from pipeline_schedules import by_type, orders, synthetic, to_table
from tilth_studies.dependencies import dependencies
from tilth_studies.straggler_format import OPTYPES, from_table
from tilth_studies.whatif import TraceModel, what_if

from tests.errors import raises
from tilth.analysis.replay import ACROSS, ALONE, TOGETHER
from tilth.core.errors import DataError

USUAL = by_type(forward_compute=1.0, backward_compute=2.0, grads_reduce_scatter=0.5, optimizer=0.2)


def job(kind="1f1b", stages=3, batches=4, chunks=1, **options):
    return synthetic(orders(kind, stages, batches, chunks), USUAL, **{"dp": 2, **options})


def name(trace, op):
    return f"{OPTYPES[trace.optype[op]]} {trace.seq[op]} @{trace.stage[op]}"


def waits(trace, of):
    """Names of what an operation waits for."""
    graph = dependencies(trace)
    return sorted(name(trace, b) for b, a in zip(graph.before, graph.after) if name(trace, a) == of)


@pytest.mark.parametrize(
    "of, before",
    [
        ("params-all-gather 0 @1", []),
        ("forward-recv 0 @1", []),
        ("forward-compute 0 @0", ["params-all-gather 0 @0"]),
        ("forward-compute 0 @1", ["forward-recv 0 @1", "params-all-gather 0 @1"]),
        ("forward-recv 1 @1", ["forward-compute 0 @1", "forward-recv 0 @1"]),
        ("forward-compute 1 @1", ["forward-compute 0 @1", "forward-recv 1 @1"]),
        ("forward-send 1 @0", ["forward-compute 1 @0", "forward-send 0 @0"]),
        ("forward-compute 2 @1", ["backward-compute 0 @1", "forward-recv 2 @1"]),
        # two forwards go ahead of the first backward on stage 1: the last but one is the first
        ("backward-recv 0 @1", ["forward-compute 0 @1"]),
        ("backward-send 0 @1", ["backward-compute 0 @1", "forward-compute 0 @1"]),
        # on the last stage only one does
        ("backward-send 0 @2", ["backward-compute 0 @2"]),
        ("backward-compute 0 @2", ["forward-compute 0 @2"]),
        ("backward-recv 1 @0", ["backward-compute 0 @0", "backward-recv 0 @0"]),
        ("gc 0 @0", ["backward-compute 3 @0"]),
        ("layernorm-grads-all-reduce 0 @1", ["gc 0 @1"]),
        ("embedding-grads-all-reduce 0 @2", ["layernorm-grads-all-reduce 0 @2"]),
        ("grads-reduce-scatter 0 @1", ["layernorm-grads-all-reduce 0 @1", "params-all-gather 0 @1"]),
        ("grads-reduce-scatter 0 @2", ["embedding-grads-all-reduce 0 @2", "params-all-gather 0 @2"]),
        ("optimizer-clip-main-grad 0 @2", ["grads-reduce-scatter 0 @2"]),
        ("optimizer 0 @2", ["optimizer-clip-main-grad 0 @2"]),
    ],
)
def test_what_an_operation_of_1f1b_waits_for(of, before):
    assert waits(job(), of) == before


@pytest.mark.parametrize(
    "of, before",
    [
        ("grads-reduce-scatter 0 @0", ["backward-compute 5 @0", "params-all-gather 1 @0"]),
        ("grads-reduce-scatter 1 @0", ["backward-compute 7 @0", "grads-reduce-scatter 0 @0"]),
        ("gc 0 @0", ["backward-compute 7 @0"]),
        ("optimizer-clip-main-grad 0 @0", ["embedding-grads-all-reduce 0 @0", "grads-reduce-scatter 1 @0"]),
    ],
)
def test_overlapped_gradients_wait_for_the_last_backward_of_their_chunk(of, before):
    """Backwards of two chunks on two stages go 1 1 0 0 1 1 0 0: the last of chunk 1 is the sixth."""
    assert waits(job("interleaved", 2, 4, 2, overlapped=True), of) == before


def test_a_chunk_waits_for_its_own_parameters():
    trace = job("interleaved", 2, 4, 2)
    assert "params-all-gather 1 @1" in waits(trace, "forward-compute 2 @1")
    assert not [b for b in waits(trace, "forward-compute 1 @1") if b.startswith("params")]


def groups(trace, kind):
    graph = dependencies(trace)
    found = {}
    for op in np.flatnonzero(graph.kind == kind):
        found.setdefault(graph.group[op], []).append(name(trace, op))
    return sorted(sorted(members) for members in found.values())


def test_what_starts_together():
    trace = job(stages=2, batches=2)
    assert groups(trace, TOGETHER) == [
        ["backward-recv 0 @0", "backward-send 0 @1"],
        ["backward-recv 1 @0", "backward-send 1 @1"],
        ["embedding-grads-all-reduce 0 @0", "embedding-grads-all-reduce 0 @1"],
        ["forward-recv 0 @1", "forward-send 0 @0"],
        ["forward-recv 1 @1", "forward-send 1 @0"],
    ]
    assert groups(trace, ACROSS) == [
        ["grads-reduce-scatter 0 @0"],
        ["grads-reduce-scatter 0 @1"],
        ["optimizer-clip-main-grad 0 @0", "optimizer-clip-main-grad 0 @1"],
        ["params-all-gather 0 @0"],
        ["params-all-gather 0 @1"],
    ]
    alone = {members[0].split()[0] for members in groups(trace, ALONE)}
    assert alone == {"forward-compute", "backward-compute", "gc", "layernorm-grads-all-reduce", "optimizer"}


def test_interleaved_transfers_go_round_from_the_last_stage_to_the_first():
    trace = job("interleaved", 2, 2, 2)
    pairs = groups(trace, TOGETHER)
    # micro-batch 0: chunk 0 on stage 0, 1, then chunk 1 on stage 0, 1; stage 0 sends its third and fourth after that
    assert ["forward-recv 0 @0", "forward-send 0 @1"] in pairs
    assert ["forward-recv 2 @1", "forward-send 2 @0"] in pairs
    assert ["backward-recv 0 @1", "backward-send 0 @0"] in pairs
    graph = dependencies(trace)
    sizes = np.bincount(graph.group)[graph.group]
    assert (sizes[trace.named("forward-send", "forward-recv", "backward-send", "backward-recv")] == 2).all()


def with_ghosts(trace):
    """Transfers of nothing at the ends of the pipeline, which some profilers log: no time, no peer."""
    table = to_table(trace).to_pylist()
    ends = {("forward-compute", 0): "forward-recv", ("backward-compute", 0): "backward-send"}
    last = trace.stages - 1
    ends |= {("forward-compute", last): "forward-send", ("backward-compute", last): "backward-recv"}
    for row in list(table):
        if kind := ends.get((row["optype"], row["stage"])):
            start = row["start_ts"] + (row["duration"] if kind.endswith("send") else 0)
            table.append({**row, "optype": kind, "start_ts": start, "duration": 0.0, "mb_id": -1, "mc": -1})
    return from_table(pa.Table.from_pylist(table))


def test_transfers_of_nothing_at_the_ends_of_the_pipeline_change_nothing():
    plain, ghosts = job(steps=2), with_ghosts(job(steps=2))
    assert len(ghosts.optype) == len(plain.optype) + 16
    a, b = what_if(plain), what_if(ghosts)
    assert b.replayed == pytest.approx(a.replayed) and b.ideal == pytest.approx(a.ideal)
    assert b.exact == pytest.approx(a.exact)


def test_a_job_without_data_parallelism():
    """No gathers and no reductions: the tail goes on without them."""
    trace = job(dp=1)
    keep = ~trace.named("params-all-gather", "grads-reduce-scatter")
    fields = ("optype", "stage", "seq", "chunk", "micro_batch", "start", "duration")
    bare = dataclasses.replace(trace, **{f: getattr(trace, f)[keep] for f in fields})
    assert waits(bare, "optimizer-clip-main-grad 0 @1") == ["layernorm-grads-all-reduce 0 @1"]
    assert what_if(bare).replayed == pytest.approx([(4 + 3 - 1) * 3 + 0.2])


def test_the_order_of_launch_is_taken_from_the_starts():
    """A job that does all forwards first (GPipe) is seen as one."""
    order = [[op for op in stage if op[0] == way] for stage in orders("1f1b", 2, 3) for way in ("forward-compute",)]
    order = [f + [("backward-compute", m, 0) for _, m, _ in f] for f in order]
    trace = synthetic(order, USUAL, dp=2)
    assert waits(trace, "backward-compute 0 @1") == ["forward-compute 2 @1"]
    assert TraceModel(trace).times(TraceModel(trace).real) == pytest.approx(trace.seconds)


def test_damaged_order_of_launch_is_an_error_or_another_schedule():
    """Stage 0 says that its first backward went before its first forward: that cannot be."""
    trace = job(stages=2, batches=2)
    first = trace.named("backward-compute") & (trace.stage == 0) & (trace.seq == 0)
    trace.start[first] = -1.0
    with raises(DataError, "graph.cycle"):
        what_if(trace)
