"""A profiled step: the profiler's time is named, and its steps are told and set aside."""

import numpy as np
import pytest

from tests.analysis.run_jobs import Job
from tests.analysis.tree import s, tree
from tests.errors import raises
from tilth.analysis.events import from_table, profiled
from tilth.analysis.run_graph import read_steps
from tilth.analysis.run_replay import RunModel
from tilth.analysis.run_whatif import diagnose_run, replayed
from tilth.analysis.time_breakdown import CONTROLLER, PROFILE, account
from tilth.core.errors import DataError


def mark(start, end, detail, rank=2):
    return s("profile", start, end, rank=rank, detail=detail)


def two_steps(*marks):
    """Step 1 is recorded, and what was seen is written before step 2 begins."""
    return [
        s("step", 10, 50, s("submit", 10, 11, seq=1), s("await", 11, 50, seq=1), rank=2, step=1),
        s("step", 100, 140, s("submit", 100, 101, seq=2), s("await", 101, 140, seq=2), rank=2, step=2),
        *(s("call", 12 + at, 48 + at, s("update", 12 + at, 48 + at), rank=r, step=1 + at // 90, seq=1 + at // 90)
          for at in (0, 90) for r in (0, 1)), *marks,
    ]  # fmt: skip


def test_writing_a_profile_is_a_part_of_its_own():
    marks = [mark(5, 6, "begin"), mark(52, 98, "end"), mark(53, 97, "end", rank=0), mark(53, 97, "end", rank=1)]
    found = account(tree(*two_steps(*marks)), range(1, 2))
    assert found.parts == pytest.approx({"update": 36e-9, PROFILE: 44e-9, CONTROLLER: 10e-9})
    assert found.controller == pytest.approx((90 - 39 - 46) * 1e-9)
    assert found.busy == pytest.approx([36e-9, 36e-9])


@pytest.mark.parametrize(
    ("marks", "want"),
    [
        ([], []),
        ([mark(5, 6, "begin"), mark(52, 98, "end")], [1]),
        ([mark(52, 53, "begin"), mark(141, 150, "end")], [2]),
        ([mark(5, 6, "begin"), mark(141, 150, "end")], [1, 2]),
        ([mark(52, 53, "begin")], [2]),
        ([mark(52, 60, "end")], []),
        ([mark(5, 8, "begin"), mark(6, 7, "begin"), mark(52, 98, "end"), mark(53, 97, "end")], [1]),
        ([mark(5, 6, "begin", rank=0), mark(52, 98, "end", rank=0)], []),
    ],
)
def test_which_steps_were_profiled(marks, want):
    assert profiled(tree(*two_steps(*marks))).tolist() == want


def job(first, last, steps=10):
    """A job of two ranks, of which rank 0 is recorded in some steps and takes twice as long there."""
    made = Job(2)
    for i in range(1, steps + 1):
        if i == first:
            made.row("profile", made.now, made.now, 2, -1, 0, detail="begin", step=-1)
        with made:
            made.do("policy.update", {0: [("update", 2.0 if first <= i <= last else 1.0)], 1: [("update", 1.0)]})
        if i == last:
            made.row("profile", made.now, made.now + 1, 2, -1, 0, detail="end", step=-1)
            made.now += 1
    return from_table(made.table())


def test_a_rank_that_was_profiled_is_not_slow():
    model = RunModel(read_steps(job(3, 8)))
    found = replayed(model)
    assert model.steps.profiled == (3, 4, 5, 6, 7, 8) and found.steps.tolist() == [1, 2, 9, 10]
    assert found.slowdown == pytest.approx(1.0) and not diagnose_run(model, found).findings
    assert np.isin(found.steps, model.steps.profiled).sum() == 0


def test_where_all_steps_were_profiled_that_is_said():
    with raises(DataError, "steps.profiled"):
        read_steps(job(3, 8), range(3, 6))
