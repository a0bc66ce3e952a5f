"""What-if analysis of our own runs: timelines told forward by another clock, closed forms, and invariants."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tilth_studies.other_network import OtherNetwork
from tilth_studies.run_whatif import what_if_run

from tests.analysis.run_jobs import Job
from tests.errors import raises
from tests.examples import examples
from tilth.analysis.events import from_table
from tilth.analysis.run_graph import AWAIT, END, LAUNCH, MEET, REPLY, WORK, adopted, outermost, read_steps
from tilth.analysis.run_replay import RunModel, numbered, quantiles
from tilth.analysis.run_trace import open_run
from tilth.analysis.run_whatif import analyse_events
from tilth.core.errors import DataError

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
"""Shrinking such programs takes minutes and makes them no clearer."""
EXACT = {"rel": 1e-7, "abs": 1e-8}  # events are in ns


def times(model, pieces):
    """Seconds of each step where the nodes spend these seconds in the operations."""
    return model.times(pieces.sum(1)[:, None])[:, 0]


def update(forward, transfer=0.1, backward=None, **amounts):
    """An update as of data parallelism: two micro-batches, gradients summed, the optimizer's step."""
    backward = 2 * forward if backward is None else backward
    passes = [("forward", forward, amounts), ("backward", backward, amounts)] * 2
    return [*passes, ("all_reduce", transfer, {"bytes": 4_000_000}), ("optimizer", 0.05)]


def pair(slow=1.0, steps=1, transfer=0.1, **job):
    """Two ranks; rank 1 computes so many times as long."""
    made = Job(2, **job)
    for _ in range(steps):
        with made:
            made.think(0.02)
            made.do("policy.update", {0: update(1.0, transfer), 1: update(1.0 * slow, transfer)})
            made.think(0.03)
    return made


def test_a_step_on_paper():
    job = pair(2.0, delay=0.01, reply=0.005)
    model = RunModel(read_steps(job.events))
    found = what_if_run(model)
    whole = 0.02 + 0.01 + 12 + 0.1 + 0.05 + 0.005 + 0.03
    assert job.seconds == pytest.approx([whole]) and found.recorded == pytest.approx([whole], **EXACT)
    assert found.replayed == pytest.approx([whole], **EXACT) and found.error == pytest.approx(0, abs=1e-9)
    assert found.ideal == pytest.approx([whole - 3], **EXACT)  # both compute 9 s
    assert found.slowdown == pytest.approx(whole / (whole - 3))
    assert found.exact == pytest.approx([1, whole / (whole - 3)], **EXACT)
    assert {d: s.mean for d, s in found.by_dp.items()} == pytest.approx({0: 1, 1: whole / (whole - 3)}, **EXACT)
    assert found.by_optype["forward"].mean == pytest.approx((whole - 3 + 1) / (whole - 3), **EXACT)
    assert found.by_optype["backward"].mean == pytest.approx((whole - 3 + 2) / (whole - 3), **EXACT)
    assert found.by_optype["all_reduce"].mean == pytest.approx(1, **EXACT)
    assert found.worst == [1] and found.m_w.share == pytest.approx(1, **EXACT) and found.m_c.share == pytest.approx(0)
    assert found.workers.tolist() == [0, 1] and found.dp.tolist() == [0, 1]


def test_delays_that_are_not_the_usual_ones_are_the_model_s_error():
    """Of five steps one has calls that come 0.3 s late, one answers that come 0.2 s late: no dependency says why."""
    job = Job(2)
    for late, slow in ((0.01, 0.02), (0.31, 0.02), (0.01, 0.02), (0.01, 0.22), (0.01, 0.02)):
        job.delay, job.reply = late, slow
        with job:
            job.do("policy.update", {0: [("update", 1.0)], 1: [("update", 1.0)]})
            number = job.submit("policy.save", {0: [("save", 0.1)]})
            job.delay = 0.0
            job.wait(number)
    found = what_if_run(RunModel(read_steps(job.events)))
    usual = 1.0 + 0.1 + 2 * 0.01 + 2 * 0.02
    assert found.replayed == pytest.approx(job.seconds, **EXACT)
    assert found.explained == pytest.approx([usual] * 5, **EXACT)
    assert found.error == pytest.approx(np.mean(job.seconds) / usual - 1, **EXACT)
    assert found.error > 0.15 and found.worst_error == pytest.approx(0.6 / usual, **EXACT)


def test_delays_are_usual_for_calls_of_their_name():
    job = Job(1)
    for _ in range(3):
        with job:
            for name, delay in (("policy.update", 0.5), ("policy.save", 0.1), ("policy.save", 0.1)):
                job.delay = delay
                job.do(name, {0: [("update", 1.0)]})
    assert what_if_run(RunModel(read_steps(job.events))).error == pytest.approx(0, abs=1e-8)


def test_nodes_of_a_step():
    steps = read_steps(pair(2.0, delay=0.01, reply=0.005).events)
    assert np.bincount(steps.kind, minlength=6).tolist() == [2, 4 + 3, 2, 2 + 2, 1, 1]  # REPLY: two for the step's end
    launch, meet = steps.real[steps.kind == LAUNCH], steps.real[steps.kind == MEET]
    assert launch.sum(1) == pytest.approx([0.01, 0.01], **EXACT)
    assert meet[:, steps.ops.index("all_reduce")] == pytest.approx([0.1, 0.1], **EXACT)  # not the 6 s of waiting
    assert steps.real[steps.kind == AWAIT].sum() == pytest.approx(0.005, **EXACT)
    assert steps.real[(steps.kind == REPLY) | (steps.kind == END)].sum() == 0
    first = (steps.kind == WORK) & (steps.rank == 1) & (steps.segment == 1)
    assert steps.real[first, steps.ops.index("forward")] == pytest.approx([4], **EXACT)
    assert steps.home.sum() == 5 and set(steps.call[steps.home]) == {-1}


def test_two_pools_whose_lazy_calls_overlap():
    """Generation of the next batch goes on while the policy learns: the step takes the longer of the two."""
    job = Job(4)
    for generate, learn in ((3.0, 2.0), (1.0, 2.5)):
        with job:
            a = job.submit("rollout.generate", {2: [("generate", generate)], 3: [("generate", generate / 2)]})
            b = job.submit("policy.update", {0: [("update", learn)], 1: [("update", learn)]})
            job.think(0.5)
            job.wait(b)
            job.wait(a)
            job.think(0.1)
    model = RunModel(read_steps(job.events))
    found = what_if_run(model)
    assert found.replayed == pytest.approx([3.1, 2.6], **EXACT) and found.recorded == pytest.approx([3.1, 2.6], **EXACT)
    assert found.ideal == pytest.approx([2.25 + 0.1, 2.6], **EXACT)  # the mean of 3 and 1.5 is still more than 2
    assert found.exact_per_step[2] == pytest.approx([3.1 / 2.35, 1], **EXACT)
    assert found.by_dp[1].mean == pytest.approx(1, **EXACT)  # ranks 1 and 3: the second of each pool


def test_calls_queue_behind_each_other_on_a_rank():
    job = Job(1)
    with job:
        first = job.submit("policy.logprobs", {0: [("logprobs", 1.0)]})
        second = job.submit("policy.update", {0: [("update", 2.0)]})
        job.think(0.5)
        job.wait(second)
        job.wait(first)
    model = RunModel(read_steps(job.events))
    assert times(model, model.real) == pytest.approx([3.0], **EXACT)
    less = model.real.copy()
    less[:, model.steps.ops.index("logprobs")] = 0
    assert times(model, less) == pytest.approx([2.0], **EXACT)


def test_a_step_ends_when_calls_that_nobody_awaited_have_ended():
    job = Job(2)
    with job:
        job.think(0.2)
        job.submit("policy.update", {0: [("update", 1.0)], 1: [("update", 4.0)]})
        job.think(0.3)
    model = RunModel(read_steps(job.events))
    found = what_if_run(model)
    assert found.recorded == pytest.approx([4.2], **EXACT) and found.replayed == pytest.approx([4.2], **EXACT)
    assert found.ideal == pytest.approx([2.7], **EXACT)  # the controller waited, it did not work for 4 s


def test_an_answer_that_is_taken_a_step_later_or_twice():
    """The step waited for the call when it ended; who takes the answer later waits for nothing."""
    job = Job(2, reply=0.01)
    with job:
        number = job.submit("policy.update", {0: [("update", 1.0)], 1: [("update", 4.0)]})
        job.think(0.3)
    with job:
        job.wait(number)
        job.think(0.2)
        job.wait(number)
        job.do("policy.update", {0: [("update", 1.0)], 1: [("update", 2.0)]})
    found = what_if_run(RunModel(read_steps(job.events)))
    assert found.recorded == pytest.approx([4.0, 2.23], **EXACT)
    assert found.replayed == pytest.approx([4.0, 2.23], **EXACT) and found.ideal == pytest.approx([2.5, 1.73], **EXACT)


def test_pauses_go_in_the_ideal_and_waiting_for_storage_stays():
    job = Job(2)
    slow = ("forward", 1.0, {"inside": [("gc", 0.7)]})
    with job:
        job.do("policy.update", {0: [slow, ("all_reduce", 0.1)], 1: [("forward", 1.0), ("all_reduce", 0.1)]})
        job.think(0.4, "save.wait")
    model = RunModel(read_steps(job.events))
    found = what_if_run(model)
    assert found.replayed == pytest.approx([2.2], **EXACT) and found.ideal == pytest.approx([1.5], **EXACT)
    assert found.by_optype["gc"].mean == pytest.approx(2.2 / 1.5, **EXACT)


def test_an_ideal_communication_is_as_fast_as_the_fast_ones_of_the_run():
    job = Job(2)
    for transfer in (0.1, 0.1, 0.5, 0.9):
        with job:
            job.do("policy.update", {r: update(0.25, transfer) for r in (0, 1)})
    found = what_if_run(RunModel(read_steps(job.events)))
    assert found.ideal == pytest.approx(4 * [1.5 + 0.1 + 0.05], **EXACT)
    assert (
        found.m_c.share == pytest.approx(1) and found.m_w.share < 0.2
    )  # one rank's part: the other waits all the same
    chosen = what_if_run(RunModel(read_steps(job.events, range(3, 5))))
    assert chosen.steps.tolist() == [3, 4]
    assert chosen.ideal == pytest.approx(2 * [1.65], **EXACT)  # usual is what is usual in the whole run


def test_each_axis_of_the_mesh():
    """Four ranks, two by two; both of the second tensor-parallel part are slow."""
    job = Job(4)
    with job:
        job.do("policy.update", {r: update(1.0 + r % 2) for r in range(4)})
    rows = job.table().to_pylist()
    for row in rows:
        if row["place"]:
            row["place"] = f"dp=0 fsdp={row['rank'] // 2} tp={row['rank'] % 2}"
    found = what_if_run(RunModel(read_steps(from_table(pa.Table.from_pylist(rows, job.table().schema)))))
    assert found.dp.tolist() == [0, 0, 1, 1] and list(found.by_axis) == ["fsdp", "tp"]
    slow = 12.15 / 9.15
    assert [s.mean for s in found.by_dp.values()] == pytest.approx([slow, slow], **EXACT)
    assert [s.mean for s in found.by_axis["fsdp"].values()] == pytest.approx([slow, slow], **EXACT)
    assert [s.mean for s in found.by_axis["tp"].values()] == pytest.approx([1, slow], **EXACT)


def test_another_network():
    """4 MB took 0.1 s: 40 MB/s between two ranks. At twice that they take half as long."""
    job = pair(2.0, steps=4)
    model = RunModel(read_steps(job.events))
    for bandwidth, more in ((4e7, 0), (8e7, -0.05), (4e6, 0.9)):
        times = OtherNetwork(bandwidth=bandwidth).times(model)
        assert times.mean() == pytest.approx(np.mean(job.seconds) + more, **EXACT)


def test_ranks_of_a_call_with_different_groups():
    """Where calls are not cut alike on all ranks each keeps its shape, and takes the mean of the sums."""
    job = Job(3)
    with job:
        job.do("policy.update", {0: [("forward", 1.0), ("all_reduce", 0.1), ("forward", 2.0)], 1: [("forward", 6.0)]})
    found = what_if_run(RunModel(read_steps(job.events)))
    assert found.replayed == pytest.approx([6.0], **EXACT) and found.ideal == pytest.approx([4.6], **EXACT)


def test_members_that_were_never_in_it_together_do_not_meet():
    job = pair()
    rows = job.table().to_pylist()
    for row in rows:
        if row["op"] == "all_reduce" and row["rank"] == 1:
            row["seq"] = 99
    steps = read_steps(from_table(pa.Table.from_pylist(rows, job.table().schema)))
    assert not (steps.kind == MEET).any()
    assert what_if_run(RunModel(steps)).replayed == pytest.approx(job.seconds, **EXACT)


def test_communications_of_another_thread_are_those_of_the_call_that_was_open():
    job = pair(2.0, steps=2, delay=0.01)
    rows = job.table().to_pylist()
    for row in rows:
        if row["op"] == "all_reduce":
            row |= {"parent": -1, "depth": 0, "thread": "pt_autograd_0"}
    strays = from_table(pa.Table.from_pylist(rows, job.table().schema))
    whole = adopted(strays)
    assert (whole.parent == job.events.parent).all() and (whole.own == job.events.own).all()
    assert (whole.own >= 0).all() and (strays.own != whole.own).any()
    one, other = (what_if_run(RunModel(read_steps(events))) for events in (strays, job.events))
    assert one.slowdown == other.slowdown and (one.exact == other.exact).all()
    for row in rows:
        row["start"] += 10**15 * (row["op"] == "all_reduce")  # while no call is open
    outside = from_table(pa.Table.from_pylist(rows, job.table().schema))
    assert (adopted(outside).parent == outside.parent).all()


def test_a_run_in_one_process_has_phases_and_no_workers():
    job = Job(0)
    for generate in (1.0, 2.0):
        with job:
            job.think(generate, "generate")
            job.think(0.5, "update")
            job.think(0.2, "gc")
    found = what_if_run(RunModel(read_steps(job.events)))
    assert found.workers.size == 0 and found.by_dp == {} and found.worst == []
    assert found.recorded == pytest.approx([1.7, 2.7], **EXACT) and found.ideal == pytest.approx([1.5, 2.5], **EXACT)


@settings(max_examples=examples(25), deadline=None, phases=PHASES)
@given(st.data())
def test_any_job_is_replayed_exactly_and_follows_its_times(data):
    """Random programs: the replay is the clock's; a time that grows never makes a step shorter; twice the times, twice
    the steps; S of what is even is 1."""
    seconds = st.floats(0.01, 3.0)
    job = Job(workers := data.draw(st.integers(1, 4)), data.draw(st.floats(0, 0.2)), data.draw(st.floats(0, 0.2)))
    for _ in range(data.draw(st.integers(1, 3))):
        with job:
            _draw_step(data, job, workers, seconds)
    model = RunModel(read_steps(job.events))
    replayed = times(model, model.real)
    assert replayed == pytest.approx(job.seconds, rel=1e-6, abs=1e-6)
    assert times(model, 2 * model.real) == pytest.approx(2 * replayed, **EXACT)
    node = data.draw(st.integers(0, len(model.real) - 1))
    more = model.real.copy()
    more[node, 0] += data.draw(seconds)
    assert (times(model, more) >= replayed - 1e-9).all()
    found = what_if_run(model)
    assert set(found.workers) <= set(range(workers)) and found.exact.shape == found.workers.shape


def _draw_step(data, job, workers, seconds):
    waiting = []
    for _ in range(data.draw(st.integers(1, 4))):
        ranks = data.draw(st.sets(st.integers(0, workers - 1), min_size=1))
        meets = data.draw(st.lists(seconds, max_size=2)) if len(ranks) > 1 else []
        works = {r: [("forward", data.draw(seconds))] for r in ranks}
        for transfer in meets:
            for r in ranks:
                works[r] += [("all_reduce", transfer), ("backward", data.draw(seconds)), ("", data.draw(seconds))]
        job.think(data.draw(seconds))
        waiting.append(job.submit(f"policy{sorted(ranks)}.update", works))  # a role is always asked on all its ranks
        if data.draw(st.booleans()):
            job.wait(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
    job.think(data.draw(seconds), "evaluate")
    if data.draw(st.booleans()):
        for number in waiting:
            job.wait(number)


def test_all_even_is_ideal():
    found = what_if_run(RunModel(read_steps(pair(1.0, steps=3).events)))
    assert found.slowdown == pytest.approx(1, **EXACT) and found.exact == pytest.approx([1, 1], **EXACT)
    assert found.m_w.share == 0 or abs(found.m_w.share) < 1.5  # of nothing


def test_names_of_ranks_change_nothing():
    one, other = (what_if_run(RunModel(read_steps(_swapped(pair(2.0, steps=2), by).events_))) for by in (0, 1))
    assert one.slowdown == pytest.approx(other.slowdown) and one.exact == pytest.approx(other.exact[::-1])


class _Table:
    def __init__(self, table):
        self.events_ = from_table(table)


def _swapped(job, by):
    rows = job.table().to_pylist()
    for row in rows:
        row["rank"] = {0: by, 1: 1 - by, 2: 2}[row["rank"]]
    return _Table(pa.Table.from_pylist(rows, job.table().schema))


# ---- what is missing ----


def test_steps_whose_calls_are_missing_are_left_out():
    job = pair(1.5, steps=3)
    rows = [r for r in job.table().to_pylist() if not (r["rank"] == 1 and r["op"] == "call" and r["step"] == 3)]
    steps = read_steps(from_table(pa.Table.from_pylist(rows, job.table().schema)))
    assert steps.steps.tolist() == [1, 2] and steps.dropped == [3]
    rows = [r for r in job.table().to_pylist() if r["op"] != "call"]
    with raises(DataError, "steps.complete"):
        read_steps(from_table(pa.Table.from_pylist(rows, job.table().schema)))


def test_clear_words(tmp_path):
    job = pair(steps=2)
    with raises(DataError, "events"):
        (tmp_path / "none").mkdir()
        open_run(tmp_path / "none")
    rows = [r for r in job.table().to_pylist() if r["op"] != "step"]
    begun = from_table(pa.Table.from_pylist(rows, job.table().schema))
    with raises(DataError, "steps.ended"):
        read_steps(begun)
    with raises(DataError, "steps"):
        read_steps(job.events, range(5, 9))
    (tmp_path / "run" / "events").mkdir(parents=True)
    pq.write_table(job.table(), tmp_path / "run" / "events" / "attempt-0-rank-0-000001.parquet")
    events = open_run(tmp_path / "run").events
    with raises(DataError, "steps"):
        analyse_events(events, range(5, 9))
    _, found, cause = analyse_events(events, range(1, 2))
    assert found.steps.tolist() == [1] and cause.text.startswith("none")


def test_of_too_many_events_the_newest_steps_are_looked_at():
    job = Job(2)
    for step in range(20):
        with job:
            job.do("policy.update", {r: update(0.25, 0.1 + 0.4 * (step >= 10)) for r in (0, 1)})
    whole, each = job.events, len(job.events) // 20
    steps = read_steps(whole, most=5 * each)
    assert steps.steps.tolist() == [16, 17, 18, 19, 20] and steps.older == 15
    others, looked_at = steps.events.steps[:-5], steps.events.steps[-5:]
    assert len(steps.events) == 9 * each and looked_at == (16, 17, 18, 19, 20)
    assert [(step - 4) // 4 for step in others] == [-1, 0, 1, 2], "one of each four"
    found = what_if_run(RunModel(steps))
    assert found.recorded == pytest.approx(job.seconds[15:], **EXACT) and found.older == 15
    assert found.ideal == pytest.approx(5 * [2.05], **EXACT)
    chosen = read_steps(whole, range(2, 4), most=5 * each)
    assert chosen.steps.tolist() == [2, 3] and chosen.older == 0 and chosen.dropped == []
    assert read_steps(whole, most=1).steps.tolist() == [20]
    assert read_steps(whole, most=len(whole)).older == 0


def test_steps_to_compare_with_are_not_all_of_a_kind():
    """Every second step evaluates: evenly spaced others would all do so, or none."""
    job = Job(1)
    for step in range(1, 65):
        with job:
            job.do("policy.evaluate" if step % 2 else "policy.update", {0: [("update", 1.0)]})
    events = job.events
    others = np.array(read_steps(events, most=len(events) // 4).events.steps[:-16])
    assert len(others) == 12 and 2 <= (others % 2).sum() <= 10
    assert np.array_equal(others, read_steps(events, most=len(events) // 4).events.steps[:-16])


# ---- small parts ----


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=30), st.data())
def test_outermost_chosen(up, data):
    parent = np.array([min(p, i - 1) for i, p in enumerate(up)])
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(up), max_size=len(up))))
    for i, found in enumerate(outermost(parent, chosen)):
        chain = [i]
        while parent[chain[-1]] >= 0:
            chain.append(int(parent[chain[-1]]))
        assert found == next((c for c in reversed(chain) if chosen[c]), -1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=40), st.floats(0, 1))
def test_quantiles_of_groups(pairs, q):
    which, values = numbered(np.array([[a for a, _ in pairs]])), np.array([b for _, b in pairs])
    for group in range(which.max() + 1):
        mine = np.quantile(values[which == group], q, method="lower")
        assert quantiles(which, values, q)[group] <= mine + 1e-9
        assert quantiles(which, values, q)[group] in values[which == group]


@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 10**12)), min_size=1, max_size=30))
def test_different_columns_have_different_numbers(columns):
    found = numbered(np.array(columns).T)
    for i, a in enumerate(columns):
        for j, b in enumerate(columns):
            assert (found[i] == found[j]) == (a == b)
    assert sorted(set(found.tolist())) == list(range(len(set(columns))))
